"""Convolution as a product of spectra: the fast form of ``conv2d_forward`` and ``conv2d_backward``.

Same arguments, and the same results up to rounding, as the im2col pair in ``multimnist_capsnet.py``.

(1) A stride s becomes s^2 phases. In the sum over the taps of a kernel, write n = s n' + a. The taps of phase a meet
    the pixels of phase a alone (one axis shown; rows and columns have s phases each):

        out[h] = sum_n w[n] x[s h + n] = sum_a sum_n' w_a[n'] x_a[h + n'],    w_a[n'] = w[s n' + a],  x_a likewise

    Phases are therefore more channels of a convolution of stride 1, whose kernel has only k = ceil(K / s) taps a side.

(2) Each phase of each channel is transformed, by a discrete Fourier transform F over the U = Ho + k - 1 rows and
    V = Wo + k - 1 columns that the outputs see. A sum over taps becomes a product for each frequency,

        out = F^-1 (F x . conj(F w)),    in matrices (B, s^2 C) (s^2 C, C') for each frequency.

    The conjugate stands for the plus in x[h + n']. Nothing wraps around, as the last output sees the last point.

(3) A complex product is four real ones: (a + i b) (c + i d) = (a c - b d) + i (a d + b c). For a 9x9 kernel of stride 2
    and 10x10 outputs, U = V = 14. Since x and w are real, 100 of the 196 frequencies say all, so that a pair of
    channels takes 4 * 100 * s^2 = 1,600 real multiplications, a direct convolution 81 * 100 = 8,100. Gauss's form,
    (1 + i) (a + b) c + i a (d - c) - b (c + d), has three products, but more sums: it rounds more, and is no faster.

The transforms have so few points that they are matrix products as well. Real x and w leave R = U // 2 + 1 frequencies
along the rows; a row's frequency that is its own conjugate (0, and U / 2) is real, and needs half of those along the
columns. The gradient of a complex z is here the g for which dL = Re(sum g dz). Then every backward pass below is the
product with the transpose, without a conjugate, as it is for real numbers.

    H, W    rows and columns of x        Ho, Wo  of the output                B  images of a batch
    C, C'   channels of x, of the output K       taps of the kernel a side    s  stride
    k       taps of a phase a side       N       channels and phases, s*s*C
    U, V    points along rows, columns   R       frequencies along the rows
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Array = np.ndarray
Workspace = Callable[..., Array]  # ws(name, *shape): a real array that is allocated once and used again


class Transforms(NamedTuple):
    """Complex matrices, along one axis each."""

    x_rows: Array  # (R, U), F
    x_columns: Array  # (V, V)
    w_rows: Array  # (R, k), conj F
    w_columns: Array  # (V, k)
    out_columns: Array  # (Wo, V), F^-1
    out_columns_half: Array  # (Wo, V // 2 + 1), for a row's frequency that is its own conjugate
    out_rows: Array  # (Ho, R); the output is the real part


@functools.lru_cache
def transforms(Ho: int, Wo: int, k: int, dtype: np.dtype) -> Transforms:
    """For outputs of Ho by Wo and phases of k by k taps; ``dtype`` is complex."""

    def waves(n: int) -> Array:
        return np.exp(2j * np.pi / n * np.outer(np.arange(n), np.arange(n)))  # (n, n), symmetric

    def count(n: int) -> Array:  # of the frequencies 0 to n // 2: one and its conjugate, or one alone
        return np.where(np.arange(n // 2 + 1) * 2 % n == 0, 1, 2)

    U, V = Ho + k - 1, Wo + k - 1
    R, rows, columns = U // 2 + 1, waves(U), waves(V)
    matrices = (
        rows[:R].conj(), columns.conj(),
        rows[:R, :k], columns[:, :k],
        columns[:Wo], columns[:Wo, : V // 2 + 1] * count(V),
        rows[:Ho, :R] * count(U) / (U * V),
    )  # fmt: skip
    return Transforms(*(np.ascontiguousarray(matrix, dtype) for matrix in matrices))


def transform(matrix: Array, x: Array, out: Array) -> None:
    """matrix (m, n), x (n, ...) -> out (m, ...)."""
    m, n = matrix.shape
    np.matmul(matrix, x.reshape(n, -1), out=out.reshape(m, -1))


def complex_array(ws: Workspace, name: str, *shape: int) -> Array:
    """Complex numbers of the workspace's precision."""
    parts = ws(name, *shape, 2)
    return parts.view(np.result_type(parts.dtype, np.complex64))[..., 0]


def split_phases(x: Array, stride: int, out: Array) -> Array:
    """x (H, W, B, C) -> out (U, V, B, s, s, C), where x[s n + a, s m + b] is at [n, m, :, a, b]; zeros beyond x."""
    U, V = out.shape[:2]
    if x.shape[:2] != (stride * U, stride * V):
        out[...] = 0
    for a, b in itertools.product(range(stride), repeat=2):
        phase = x[a : stride * U : stride, b : stride * V : stride]
        out[: len(phase), : phase.shape[1], :, a, b] = phase
    return out


def join_phases(phases: Array, stride: int, out: Array) -> Array:
    """The inverse of split_phases; zeros where there were more of x."""
    U, V = phases.shape[:2]
    if out.shape[:2] != (stride * U, stride * V):
        out[...] = 0
    for a, b in itertools.product(range(stride), repeat=2):
        phase = out[a : stride * U : stride, b : stride * V : stride]
        phase[...] = phases[: len(phase), : phase.shape[1], :, a, b]
    return out


class SpectralCache(NamedTuple):
    name: str
    x_f: Array  # (R, V, B, N), the spectrum of x; half of V where a row's frequency is its own conjugate
    w_f: Array  # (R, V, N, C'), of w, likewise
    x_shape: tuple[int, ...]  # (H, W, B, C)
    stride: int


def spectral_conv2d_forward(
    x: Array, w: Array, b: Array, stride: int, ws: Workspace, name: str
) -> tuple[Array, SpectralCache]:
    """Valid convolution. x (H, W, B, C), w (K, K, C, C'), b (C') -> out (Ho, Wo, B, C')."""
    (H, W, B, C), (K, _, _, n_out) = x.shape, w.shape
    k, Ho, Wo, N = -(-K // stride), (H - K) // stride + 1, (W - K) // stride + 1, stride**2 * C
    array = functools.partial(complex_array, ws)
    phases = array(name + ".phases", Ho + k - 1, Wo + k - 1, B, stride, stride, C)  # (U, V, B, s, s, C)
    t = transforms(Ho, Wo, k, phases.dtype)
    (R, U), V = t.x_rows.shape, len(t.x_columns)

    x_rows = array(name + ".x_rows", R, V, B, N)
    transform(t.x_rows, split_phases(x, stride, phases), x_rows)
    taps = array(name + ".taps", k, k, 1, stride, stride, C * n_out)
    w_rows = array(name + ".w_rows", R, k, N, n_out)
    transform(t.w_rows, split_phases(w.reshape(K, K, 1, C * n_out), stride, taps), w_rows)

    x_f, w_f = array(name + ".x_f", R, V, B, N), array(name + ".w_f", R, V, N, n_out)
    out_f, out_rows = array(name + ".out_f", V, B, n_out), array(name + ".out_rows", R, Wo, B, n_out)
    for r in range(R):
        out_columns = t.out_columns if 2 * r % U else t.out_columns_half  # (Wo, n)
        n = out_columns.shape[1]  # frequencies along the columns: V, or V // 2 + 1
        transform(t.x_columns[:n], x_rows[r], x_f[r, :n])  # (n, B, N)
        transform(t.w_columns[:n], w_rows[r], w_f[r, :n])  # (n, N, C')
        np.matmul(x_f[r, :n], w_f[r, :n], out=out_f[:n])  # (n, B, C')
        transform(out_columns, out_f[:n], out_rows[r])  # (Wo, B, C')

    out_complex = array(name + ".out_complex", Ho, Wo, B, n_out)
    transform(t.out_rows, out_rows, out_complex)
    out = np.add(out_complex.real, b, out=ws(name + ".out", Ho, Wo, B, n_out))
    return out, SpectralCache(name, x_f, w_f, x.shape, stride)


def spectral_conv2d_backward(
    dout: Array, cache: SpectralCache, dw: Array, db: Array, ws: Workspace, need_dx: bool = True
) -> Array | None:
    """dout (Ho, Wo, B, C') -> dx (H, W, B, C), or None; writes dw (K, K, C, C') and db (C')."""
    name, x_f, w_f, x_shape, stride = cache
    (Ho, Wo, B, n_out), (K, _, C, _), N = dout.shape, dw.shape, x_f.shape[-1]
    k = -(-K // stride)
    array = functools.partial(complex_array, ws)
    t = transforms(Ho, Wo, k, x_f.dtype)
    (R, U), V = t.x_rows.shape, len(t.x_columns)

    # out = real part of out_complex + b
    np.sum(dout, axis=(0, 1, 2), out=db)
    dout_complex = array(name + ".dout_complex", Ho, Wo, B, n_out)
    dout_complex[...] = dout
    # out_complex = t.out_rows out_rows
    dout_rows, dout_f = array(name + ".out_rows", R, Wo, B, n_out), array(name + ".out_f", V, B, n_out)
    transform(t.out_rows.T, dout_complex, dout_rows)

    dx_f, dx_rows = array(name + ".dx_f", V, B, N), array(name + ".x_rows", R, V, B, N)
    dw_f, dw_rows = array(name + ".dw_f", V, N, n_out), array(name + ".w_rows", R, k, N, n_out)
    for r in range(R):
        out_columns = t.out_columns if 2 * r % U else t.out_columns_half  # (Wo, n)
        n = out_columns.shape[1]
        # out_rows = out_columns out_f
        transform(out_columns.T, dout_rows[r], dout_f[:n])  # (n, B, C')
        # out_f = x_f w_f, w_f = t.w_columns w_rows
        np.matmul(x_f[r, :n].swapaxes(1, 2), dout_f[:n], out=dw_f[:n])  # (n, N, C')
        transform(t.w_columns[:n].T, dw_f[:n], dw_rows[r])  # (k, N, C')
        # out_f = x_f w_f, x_f = t.x_columns x_rows
        if need_dx:
            np.matmul(dout_f[:n], w_f[r, :n].swapaxes(1, 2), out=dx_f[:n])  # (n, B, N)
            transform(t.x_columns[:n].T, dx_f[:n], dx_rows[r])  # (V, B, N)

    # w_rows = t.w_rows taps, taps = phases of w
    dtaps = array(name + ".dtaps", k, k, 1, stride, stride, C * n_out)
    transform(t.w_rows.T, dw_rows, dtaps)
    join_phases(dtaps.real, stride, dw.reshape(K, K, 1, C * n_out))
    if not need_dx:
        return None
    # x_rows = t.x_rows phases
    dphases = array(name + ".phases", U, V, B, stride, stride, C)
    transform(t.x_rows.T, dx_rows, dphases)
    return join_phases(dphases.real, stride, ws(name + ".dx", *x_shape))
