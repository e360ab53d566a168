"""Convolution as a product of spectra: the fast form of ``conv2d_forward`` and ``conv2d_backward``.

(1) A stride s becomes s^2 phases. In the sum over the taps of a kernel, write n = s n' + a. The taps of phase a meet
    the pixels of phase a alone (one axis shown; rows and columns have s phases each):

        out[h] = sum_n w[n] x[s h + n] = sum_a sum_n' w_a[n'] x_a[h + n'],    w_a[n'] = w[s n' + a],  x_a likewise

    Phases are therefore more channels of a convolution of stride 1, whose kernel has only k = ceil(K / s) taps a side.

(2) Each phase of each channel is transformed, by a discrete Fourier transform F, over as many points as the outputs
    see. A sum over taps becomes a product for each frequency, out = F^-1 (F x . conj(F w)), in matrices (B, N) (N, C')
    with N = s^2 C. The conjugate stands for the plus in x[h + n']. Nothing wraps around: the last output sees the last
    point. So the frequencies along the rows may lie half a step off, at (r + 1/2) / U. Then those of a real image are
    pairs of conjugates, and the first R = U / 2 say all.

(3) Real and imaginary parts stand apart, below each other, and all is made of products of real matrices, which a BLAS
    does best. A transform of so few points is one: (re, im) = (cos, -sin) x. The product of the spectra is one of
    (2 C', N) by (N, 2 B), for each frequency, whose four blocks are the products of the parts:

        re = x_re w_re - x_im w_im,    im = x_im w_re + x_re w_im    (w has its conjugate's sign already)

    For a 9x9 kernel of stride 2 and 10x10 outputs, U = V = 14. The 98 frequencies of a pair of channels take
    4 * 98 * s^2 = 1,568 multiplications, a direct convolution 81 * 100 = 8,100.

Every backward pass is the product with the transpose.

    H, W    rows and columns of x        Ho, Wo  of the output                B  images of a batch
    C, C'   channels of x, of the output K       taps of the kernel a side    s  stride
    k       taps of a phase a side       N       channels and phases, s*s*C
    U, V    points along rows, columns   R       frequencies along the rows, U / 2
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np

Array = np.ndarray


class Transforms(NamedTuple):
    """Real matrices, along one axis each. Where an axis is frequency and part, or part and place, the part (real or
    imaginary) is the second or the first of the two."""

    x_rows: Array  # (2R, U): real pixels to frequency and part
    x_columns: Array  # (2V, 2V): part and column to frequency and part
    w_rows: Array  # (2R, k), of the conjugate
    w_columns: Array  # (2V, 2k)
    out_columns: Array  # (2Wo, 2V), back: frequency and part to part and column
    out_rows: Array  # (Ho, 2R)


@functools.lru_cache
def transforms(Ho: int, Wo: int, k: int, dtype: np.dtype) -> Transforms:
    """For outputs of Ho by Wo and phases of k by k taps."""
    U, V = (Ho + k) // 2 * 2, Wo + k - 1  # U is even, one more than needed where that is odd
    row = np.pi / U * np.outer(2 * np.arange(U // 2) + 1, np.arange(U))
    column = 2 * np.pi / V * np.outer(np.arange(V), np.arange(V))

    def of_parts(cos: Array, sin: Array) -> Array:
        """(n, m) each -> (2n, 2m), which multiplies by cos - i sin."""
        return np.stack([np.stack([cos, sin], 1), np.stack([-sin, cos], 1)], 1).reshape(2 * len(cos), -1)

    cos, sin = np.cos(column), np.sin(column)
    x_rows = np.stack([np.cos(row), -np.sin(row)], 1).reshape(U, U)
    w_rows = np.stack([np.cos(row), np.sin(row)], 1).reshape(U, U)[:, :k]
    # Each backward transform is the transpose of the forward one, over the number of points; a conjugate counts too.
    matrices = (
        x_rows, of_parts(cos, sin), w_rows, of_parts(cos[:, :k], -sin[:, :k]),
        of_parts(cos[:, :Wo], sin[:, :Wo]).T / V, x_rows[:, :Ho].T * (2 / U),
    )
    return Transforms(*(np.ascontiguousarray(matrix, dtype) for matrix in matrices))


def split_phases(x: Array, stride: int, U: int, V: int) -> Array:
    """x (H, W, B, C) -> (U, V, B, s, s, C), where x[s n + a, s m + b] is at [n, m, :, a, b]; zeros beyond x."""
    out = np.zeros((U, V, x.shape[2], stride, stride, x.shape[3]), x.dtype)
    for a, b in itertools.product(range(stride), repeat=2):
        phase = x[a : stride * U : stride, b : stride * V : stride]
        out[: len(phase), : phase.shape[1], :, a, b] = phase
    return out


def join_phases(phases: Array, stride: int, out: Array) -> None:
    """The inverse of split_phases, into out (H, W, B, C), which has zeros where there were more of x."""
    U, V = phases.shape[:2]
    for a, b in itertools.product(range(stride), repeat=2):
        phase = out[a : stride * U : stride, b : stride * V : stride]
        phase[...] = phases[: len(phase), : phase.shape[1], :, a, b]


class SpectralCache(NamedTuple):
    x_f: Array  # (R, V, 2B, N), the spectrum of x; part and image on one axis
    w_f: Array  # (R, V, 2C', N), of w; part and channel on one axis
    x_shape: tuple[int, ...]  # (B, H, W, C), padded
    w_shape: tuple[int, ...]  # (K, K, C, C')
    stride: int
    pad: int


def conv2d_forward(x: Array, w: Array, b: Array, stride: int, pad: int) -> tuple[Array, SpectralCache]:
    """Cross-correlate x (B, H, W, C) with w (K, K, C, C'), add b (C',) -> (B, Ho, Wo, C'), zero padded."""
    if pad:
        x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    (B, H, W, C), (K, _, _, n_out) = x.shape, w.shape
    if w.shape[1] != K:
        raise ValueError(f"a kernel of {w.shape} is not square")
    k, Ho, Wo, N = -(-K // stride), (H - K) // stride + 1, (W - K) // stride + 1, stride**2 * C
    t = transforms(Ho, Wo, k, x.dtype)
    U, V, R = len(t.x_rows), len(t.x_columns) // 2, len(t.x_rows) // 2

    phases = split_phases(x.transpose(1, 2, 0, 3), stride, U, V)  # (U, V, B, s, s, C)
    taps = split_phases(w.swapaxes(2, 3), stride, k, k)  # (k, k, C', s, s, C)
    x_rows = (t.x_rows @ phases.reshape(U, -1)).reshape(R, 2 * V, B * N)
    w_rows = (t.w_rows @ taps.reshape(k, -1)).reshape(R, 2 * k, n_out * N)
    x_f, w_f = np.empty((R, V, 2 * B, N), x.dtype), np.empty((R, V, 2 * n_out, N), x.dtype)
    out_f, out_rows = np.empty((V, 2, n_out, B), x.dtype), np.empty((R, 2 * Wo, n_out * B), x.dtype)
    for r in range(R):  # what one frequency of the rows needs stays in the cache
        np.matmul(t.x_columns, x_rows[r], out=x_f[r].reshape(2 * V, -1))
        np.matmul(t.w_columns, w_rows[r], out=w_f[r].reshape(2 * V, -1))
        x_f_T = np.ascontiguousarray(x_f[r].swapaxes(1, 2))  # a BLAS is slow where it transposes small matrices
        products = (w_f[r] @ x_f_T).reshape(V, 2, n_out, 2, B)  # part of w, part of x
        np.subtract(products[:, 0, :, 0], products[:, 1, :, 1], out=out_f[:, 0])
        np.add(products[:, 0, :, 1], products[:, 1, :, 0], out=out_f[:, 1])
        np.matmul(t.out_columns, out_f.reshape(2 * V, -1), out=out_rows[r])
    out = (t.out_rows @ out_rows.reshape(U, -1)).reshape(Ho, Wo, n_out, B)
    out = np.add(out.transpose(3, 0, 1, 2), b, order="C")
    return out, SpectralCache(x_f, w_f, x.shape, w.shape, stride, pad)


def conv2d_backward(dout: Array, cache: SpectralCache, need_dx: bool = True) -> tuple[Array | None, Array, Array]:
    """dout (B, Ho, Wo, C') -> dx (None if it is not needed), dw, db."""
    x_f, w_f, (B, H, W, C), (K, _, _, n_out), stride, pad = cache
    (Ho, Wo), k, N = dout.shape[1:3], -(-K // stride), stride**2 * C
    t = transforms(Ho, Wo, k, dout.dtype)
    U, V, R = len(t.x_rows), len(t.x_columns) // 2, len(t.x_rows) // 2
    rows = dout.reshape(-1, n_out)
    db = np.ones(len(rows), rows.dtype) @ rows

    # out = t.out_rows out_rows
    dout_rows = (t.out_rows.T @ dout.transpose(1, 2, 0, 3).reshape(Ho, -1)).reshape(R, 2 * Wo, B * n_out)
    dx_rows, dw_rows = np.empty((R, 2 * V, B * N), dout.dtype), np.empty((R, 2 * k, n_out * N), dout.dtype)
    dproducts = np.empty((V, 2, B, 2, n_out), dout.dtype)  # transposed: part of x, part of w
    flat = dproducts.reshape(V, 2 * B, 2 * n_out)
    for r in range(R):
        # out_rows = t.out_columns out_f
        dre, dim = (t.out_columns.T @ dout_rows[r]).reshape(V, 2, B, n_out).swapaxes(0, 1)
        # re = x_re w_re - x_im w_im, im = x_im w_re + x_re w_im
        dproducts[:, 0, :, 0], dproducts[:, 1, :, 1] = dre, -dre
        dproducts[:, 1, :, 0], dproducts[:, 0, :, 1] = dim, dim
        # products.T = x_f w_f.T, w_f = t.w_columns w_rows, x_f = t.x_columns x_rows
        np.matmul(t.w_columns.T, (flat.swapaxes(1, 2) @ x_f[r]).reshape(2 * V, -1), out=dw_rows[r])
        if need_dx:
            np.matmul(t.x_columns.T, (flat @ w_f[r]).reshape(2 * V, -1), out=dx_rows[r])

    # w_rows = t.w_rows taps, taps = phases of w
    dtaps = (t.w_rows.T @ dw_rows.reshape(U, -1)).reshape(k, k, n_out, stride, stride, C)
    dw = np.empty((K, K, C, n_out), dout.dtype)
    join_phases(dtaps, stride, dw.swapaxes(2, 3))
    if not need_dx:
        return None, dw, db
    # x_rows = t.x_rows phases
    dphases = (t.x_rows.T @ dx_rows.reshape(U, -1)).reshape(U, V, B, stride, stride, C)
    dx = np.zeros((B, H, W, C), dout.dtype)
    join_phases(dphases, stride, dx.transpose(1, 2, 0, 3))
    return dx[:, pad : H - pad, pad : W - pad], dw, db
