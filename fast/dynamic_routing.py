"""Dynamic routing in products of matrices: the fast form of ``routing_forward`` and ``routing_backward``.

Arguments (``squash`` must be given), results, steps and their names are those of the pair in ``multimnist_capsnet.py``.
A sum over votes is a product with one matrix (I, D) for each image and parent. The gradient of the votes is a sum of
outer products, two for each iteration but the first, which is one product too. A few images at a time go through all
iterations, while their votes (0.5 MB for an image, at the default sizes) stay in the cache. This takes about half of
the time of a form that does not store the votes.

    B  images of a batch    I  children, P  entries of each    J  parents, D  entries of each
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
GROUP = 4  # images


class Steps(NamedTuple):
    """The iterations of a group of images, each an entry of the lists."""

    c: list[Array]  # (n, J, I)
    v: list[Array]  # (n, J, D)
    squashes: list[Any]  # the cache of v = squash(s)


class RoutingCache(NamedTuple):
    u: Array  # (I, B, P)
    w: Array  # (I, P, J, D)
    votes: list[Array]  # of one u_hat (B, J, I, D), whose memory the first backward pass takes for its gradient
    groups: list[Steps]
    squash: Any  # a pair: forward and backward

    @property
    def c(self) -> list[Array]:
        """Per iteration: (B, I, J)."""
        return [np.concatenate(c).swapaxes(1, 2) for c in zip(*(steps.c for steps in self.groups), strict=True)]


def softmax(b: Array) -> Array:
    """b (B, J, I), over the parents."""
    e = np.exp(b - b.max(axis=1, keepdims=True))
    e /= e.sum(axis=1, keepdims=True)
    return e


def weighted_sum(c: Array, u_hat: Array) -> Array:
    """sum_i c u_hat: c (B, J, I), u_hat (B, J, I, D) -> (B, J, D)."""
    return (c[:, :, None] @ u_hat)[:, :, 0]


def agreement(u_hat: Array, v: Array) -> Array:
    """sum_d u_hat v: u_hat (B, J, I, D), v (B, J, D) -> (B, J, I)."""
    return (u_hat @ v[..., None])[..., 0]


def routing_forward(u: Array, w: Array, n_iters: int, squash: Any) -> tuple[Array, RoutingCache]:
    """u (B, I, P), w (I, P, J, D) -> v (B, J, D)."""
    u = np.ascontiguousarray(u.swapaxes(0, 1))  # (I, B, P)
    u_hat = votes(u, w)
    groups = [route(u_hat[k : k + GROUP], n_iters, squash) for k in range(0, max(len(u_hat), 1), GROUP)]  # B = 0: one
    return np.concatenate([steps.v[-1] for steps in groups]), RoutingCache(u, w, [u_hat], groups, squash)


def votes(u: Array, w: Array) -> Array:
    """u (I, B, P), w (I, P, J, D) -> u_hat (B, J, I, D)."""
    (I, B, P), (_, _, J, D) = u.shape, w.shape
    u_hat = np.empty((B, I, J * D), u.dtype)
    np.matmul(u, w.reshape(I, P, J * D), out=u_hat.swapaxes(0, 1))
    return u_hat.reshape(B, I, J, D).swapaxes(1, 2)


def route(u_hat: Array, n_iters: int, squash: Any) -> Steps:
    """u_hat (n, J, I, D)."""
    steps = Steps([], [], [])
    b = np.zeros(u_hat.shape[:3], u_hat.dtype)
    for t in range(n_iters):
        c = softmax(b)
        v, squash_cache = squash.forward(weighted_sum(c, u_hat))
        if t < n_iters - 1:
            b = b + agreement(u_hat, v)
        steps.c.append(c)
        steps.v.append(v)
        steps.squashes.append(squash_cache)
    return steps


def routing_backward(dv: Array, cache: RoutingCache, routing_grad: str) -> tuple[Array, Array]:
    """dv (B, J, D) -> du (B, I, P), dw (I, P, J, D). ``routing_grad`` as in the plain form."""
    u, w, kept, groups, squash = cache
    u_hat = du_hat = kept.pop() if kept else votes(u, w)
    B, J, I, D = u_hat.shape
    for k, steps in enumerate(groups):
        group = slice(k * GROUP, (k + 1) * GROUP)
        left, right = route_backward(dv[group], u_hat[group], steps, routing_grad, squash.backward)
        np.matmul(left.swapaxes(2, 3), right, out=du_hat[group])
    # u_hat = u w
    rows = du_hat.swapaxes(1, 2).reshape(B, I, J * D).swapaxes(0, 1)  # (I, B, J*D)
    du = rows @ w.reshape(len(w), -1, J * D).swapaxes(1, 2)  # (I, B, P)
    dw = u.swapaxes(1, 2) @ rows  # (I, P, J*D)
    return du.swapaxes(0, 1), dw.reshape(I, -1, J, D)


def route_backward(
    dv: Array, u_hat: Array, steps: Steps, routing_grad: str, squash_backward: Callable[..., Array]
) -> tuple[Array, Array]:
    """dv (n, J, D) -> the factors (n, J, K, I) and (n, J, K, D) of the K outer products whose sum is du_hat."""
    c, v, squashes = steps
    ds = squash_backward(dv, squashes[-1])
    left, right = [c[-1]], [ds]
    db = np.zeros_like(c[0])
    for t in range(len(v) - 1, len(v) if routing_grad == "stop" else 0, -1):
        # s = sum_i c u_hat, c = softmax(b)
        dc = agreement(u_hat, ds)
        db = db + c[t] * (dc - (c[t] * dc).sum(axis=1, keepdims=True))
        # b = b + sum_d u_hat v, v = squash(s)
        ds = squash_backward(weighted_sum(db, u_hat), squashes[t - 1])
        left += [db, c[t - 1]]
        right += [v[t - 1], ds]
    return np.stack(left, 2), np.stack(right, 2)
