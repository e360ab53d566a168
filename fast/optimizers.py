"""AdamW, in blocks on several threads, and Muon.

[Kingma 2015] D. Kingma, J. Ba, "Adam: a method for stochastic optimization", ICLR 2015.
[Loshchilov 2019] I. Loshchilov, F. Hutter, "Decoupled weight decay regularization", ICLR 2019.
[Jordan 2024] K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
[Liu 2025] J. Liu et al., "Muon is scalable for LLM training", 2025.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fast.workers import SERIAL, Workers

Array = np.ndarray
Params = dict[str, Array]

BLOCK = 1 << 18  # entries of a parameter that a thread updates at a time; in small blocks, threads wait for each other
FLUSH_EVERY = 100  # steps
MUON_RMS = 0.2  # root mean square of an update's entries, in learning rates; Adam's is about as large [Liu 2025]


def adamw_step(
    state: Any, grads: Sequence[Params], lr: float, weight_decay: float = 0.0, decayed: Collection[str] = (),
    workers: Workers = SERIAL,
) -> None:
    """Update ``state`` in place: its ``params``, its moments ``m`` and ``v``, its ``step``. [Kingma 2015, algorithm 1;
    Loshchilov 2019, algorithm 2]

    The gradient is the sum of ``grads``, each with the keys of ``state.params``; the first is overwritten, so that no
    two of its arrays may share memory. Parameters named in ``decayed`` first shrink by ``lr * weight_decay`` of
    themselves.
    """
    muon_step(state, grads, lr, weight_decay, decayed, {}, workers)


def muon_step(
    state: Any, grads: Sequence[Params], lr: float, weight_decay: float, decayed: Collection[str],
    matrices: Mapping[str, tuple[int, ...]], workers: Workers = SERIAL,
) -> None:
    """Update ``state`` in place: Muon for the parameters named in ``matrices``, Adam for the others.

    ``matrices`` names the axes of a parameter that are its inputs; the others are its outputs. The other arguments are
    those of ``adamw_step``.
    """
    state.step += 1
    jobs = []
    for key in sorted(state.params, key=matrices.__contains__, reverse=True):
        p, m, v = state.params[key], state.m[key], state.v[key]
        gs, keep = [grad[key] for grad in grads], 1 - lr * weight_decay if key in decayed else 1.0
        if any(g.shape != p.shape for g in gs):  # reshape would hide it
            raise ValueError(f"a gradient of {key} has shape {[g.shape for g in gs]}, not {p.shape}")
        if key in matrices:
            jobs.append(partial(_muon, p, gs, m, lr, keep, matrices[key]))
            continue
        if not all(array.flags.c_contiguous for array in (p, m, v)):  # reshape would copy, and the step be lost
            jobs.append(partial(_adam, p, gs, m, v, state.step, lr, keep))
            continue
        p, m, v, *gs = (array.reshape(-1) for array in (p, m, v, *gs))
        for start in range(0, p.size, BLOCK):
            b = slice(start, start + BLOCK)
            jobs.append(partial(_adam, p[b], [g[b] for g in gs], m[b], v[b], state.step, lr, keep))
    workers.map(lambda job: job(), jobs)
    _flush_subnormals(state)


def _adam(
    p: Array, grads: list[Array], m: Array, v: Array, step: int, lr: float, keep: float,
    beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8,
) -> None:
    """Update the arrays p, m and v in place; ``step`` counts from 1.

    The bias corrections are in the step size and in epsilon: the update is bound by memory, and this saves passes.
    """
    root = math.sqrt(1 - beta2**step)
    step_size, epsilon = lr * root / (1 - beta1**step), epsilon * root
    g = _total(grads)
    g *= 1 - beta1
    m *= beta1
    m += g
    g *= g
    g *= (1 - beta2) / (1 - beta1) ** 2
    v *= beta2
    v += g
    d = np.sqrt(v, out=g)
    d += epsilon
    np.divide(m, d, out=d)
    d *= step_size
    if keep != 1:
        p *= keep
    p -= d


def _muon(
    w: Array, grads: list[Array], m: Array, lr: float, keep: float, inputs: tuple[int, ...], momentum: float = 0.95
) -> None:
    """Update the weights w and their momentum m in place.

    The direction is the momentum, a step ahead, as a matrix of inputs by outputs made orthogonal: what has small
    gradients is learned as fast as what has large ones. [Jordan 2024], with eigenvectors instead of Newton-Schulz
    iterations; the size of the step is that of [Liu 2025, sec. 2.2].
    """
    g = _total(grads)
    m *= momentum
    m += g
    g += momentum * m
    outputs = tuple(axis for axis in range(w.ndim) if axis not in inputs)
    order = (*inputs, *outputs)
    matrix = g.transpose(order).reshape(math.prod(w.shape[axis] for axis in inputs), -1)
    update = orthogonalized(matrix)
    update *= lr * MUON_RMS * math.sqrt(max(matrix.shape))
    if keep != 1:
        w *= keep
    w -= update.reshape([w.shape[axis] for axis in order]).transpose(np.argsort(order))


def _total(grads: list[Array]) -> Array:
    """The sum of the gradients, which overwrites the first."""
    for other in grads[1:]:
        grads[0] += other
    return grads[0]


def orthogonalized(a: Array) -> Array:
    """a (M, N) = U S V^T -> U V^T; singular values below a thousandth of the others stay below 1."""
    if len(a) < a.shape[1]:
        return orthogonalized(a.T).T
    gram = a.T @ a
    if not np.isfinite(gram).all():
        return np.full_like(a, np.nan)  # eigh would raise
    squares, vectors = np.linalg.eigh(gram)  # S^2 and V
    floor = 1e-6 * squares.mean() + np.finfo(a.dtype).tiny
    return a @ (vectors / np.sqrt(np.maximum(squares, 0) + floor) @ vectors.T)


def _flush_subnormals(state: Any) -> None:
    """Every ``FLUSH_EVERY`` steps, set moments to 0 that are too small to matter. The moments of a unit without
    gradients decay, over many more steps than that, to subnormal numbers, with which a processor is a hundred times
    slower."""
    if state.step % FLUSH_EVERY == 0:
        for moments in (*state.m.values(), *state.v.values()):
            moments[np.abs(moments) < math.sqrt(np.finfo(moments.dtype).tiny)] = 0
