#!/usr/bin/env python3
"""MultiMNIST: a capsule network with dynamic routing against two CNNs, in numpy, every gradient by hand.

Claim tested: [Sabour 2017] S. Sabour, N. Frosst, G. Hinton, "Dynamic routing between capsules", NIPS 2017,
section 6. Two digits of different classes are laid over each other. Capsules that route by agreement recognise both
and reconstruct each alone, although they overlap almost wholly.

    image            (B, 36, 36)           pixel-wise maximum of two shifted digits
    conv1 + ReLU     (B, 28, 28, 32)       9x9
    primary capsules (B, 800, 8)           9x9, stride 2, 8 types on a 10x10 grid; squash
    votes            (B, 800, 10, 16)      u_hat_j|i = W_ij u_i
    digit capsules   (B, 10, 16)           three iterations of dynamic routing; |v_j| says whether digit j is there
    decoder          (B, 2, 36, 36)        256 - 512 - 1296, from one digit capsule each, the others masked

The two CNNs have as many parameters, unless their convolutions alone have more. One keeps both convolutions and ends in
dense layers, the other is of the paper's kind, with max pooling. All go through the same loop, data and optimiser; the
two highest scores are the answer. Every layer, the routing and the optimiser are here in their plain form. Those that
take long have a fast twin in ``fast/``, which is used where that folder lies beside this file, unless ``--plain``.

Deviations from the paper: conv1 has 32 channels, there are 8 types of primary capsules, and the decoder has 256 and 512
units, not 256, 32, and 512 and 1024 (``--preset paper`` has them). The paper's digits share 80 % of their boxes on
average. Of boxes of 28x28 pixels that is an intersection over union of 0.68; here it is at least 0.8 in every image.
(``--overlay sum --min-iou 0`` adds and clips digits of any overlap, as the published code does; that one shifts by up
to 6 pixels, not 4.) The CNN with pooling has as many channels in its second convolution as in its first, not half.
There are 748 steps, at ten times the rate and with weight decay, and the reconstruction weighs ten times as much.

This file runs alone, on numpy. Run it (four epochs of 12,000 fresh composites, seed 0, three models):

    python multimnist_capsnet.py
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import enum
import errno
import functools
import gzip
import hashlib
import http.client
import importlib
import io
import json
import math
import os
import re
import signal
import sys
import time
import urllib.request
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

import numpy as np

if sys.version_info < (3, 10):  # noqa: UP036
    raise SystemExit(f"this needs Python 3.10 or later, and is run by {sys.version.split()[0]}")

try:  # fast twins of plain forms, and threads, where the folder lies beside the script
    from fast import dynamic_routing, optimizers, spectral_conv
    from fast.workers import Workers, default_threads
    HAS_FAST = True
except ImportError:
    HAS_FAST, default_threads = False, lambda: 1

Array = np.ndarray
Params = dict[str, Array]
C = TypeVar("C")
O = TypeVar("O")

# Dimension letters, the same in all files
#   B  images of a batch      N  images of a set         H, W    rows and columns      Ho, Wo  of a layer's output
#   K  side of a kernel       C  channels                F       filters, or outputs   E       inputs of a dense layer
#   I  children (capsules)    J  parents (classes)       P       side of a pose matrix, or entries of a child
#   D  entries of a parent's pose, or of a vote          Y       labels of an image    Q       points of an object
#   L  receptive fields       M  children of a field     S       side of an image, map T       iterations


class Pair(NamedTuple):
    """A forward pass, ``(...) -> (out, cache)``, and its backward pass, ``(dout, cache) -> gradients``."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


# --- Layers: each backward pass stands below its forward pass, and repeats the lines that it undoes -------------------

ConvCache = tuple[Array, Array, tuple[int, ...], int, int]  # columns, w, the shape of x, stride, pad
LinearCache = tuple[Array, Array]  # x, w


def conv2d_forward(x: Array, w: Array, b: Array, stride: int, pad: int) -> tuple[Array, ConvCache]:
    """Cross-correlate x (B, H, W, C) with w (K, K, C, F), add b (F,) -> (B, Ho, Wo, F), zero padded."""
    (B, H, W, C), K, F = x.shape, w.shape[0], w.shape[-1]
    Ho, Wo = (H + 2 * pad - K) // stride + 1, (W + 2 * pad - K) // stride + 1
    x_pad = np.zeros((B, H + 2 * pad, W + 2 * pad, C), x.dtype)
    x_pad[:, pad : pad + H, pad : pad + W] = x
    # im2col, one entry of the kernel at a time: faster than patch by patch for images of one channel.
    columns = np.empty((K, K, C, B, Ho, Wo), x.dtype)
    for i in range(K):
        for j in range(K):
            window = x_pad[:, i : i + stride * Ho : stride, j : j + stride * Wo : stride]  # (B, Ho, Wo, C)
            columns[i, j] = window.transpose(3, 0, 1, 2)
    columns = columns.reshape(K * K * C, -1)  # (K * K * C, B * Ho * Wo): the patches, one per column
    out = columns.T @ w.reshape(-1, F)  # (B * Ho * Wo, F)
    out += b
    return out.reshape(B, Ho, Wo, F), (columns, w, x.shape, stride, pad)


def conv2d_backward(dout: Array, cache: ConvCache, need_dx: bool = True) -> tuple[Any, Array, Array]:
    """dout (B, Ho, Wo, F) -> dx (None if it is not needed, as in the first layer), dw, db."""
    columns, w, (B, H, W, C), stride, pad = cache
    (_, Ho, Wo, F), K = dout.shape, w.shape[0]
    rows = dout.reshape(-1, F)  # (B * Ho * Wo, F)
    # out = columns.T @ w + b
    dw = (columns @ rows).reshape(w.shape)
    db = np.ones(len(rows), rows.dtype) @ rows  # the sum over rows; np.sum takes 5 to 15 times as long for short rows
    if not need_dx:
        return None, dw, db
    dcolumns = (w.reshape(-1, F) @ rows.T).reshape(K, K, C, B, Ho, Wo)
    # columns[i, j] = the pixels of x_pad under entry i, j of the kernel
    dx_pad = np.zeros((B, H + 2 * pad, W + 2 * pad, C), dout.dtype)
    for i in range(K):
        for j in range(K):
            window = dx_pad[:, i : i + stride * Ho : stride, j : j + stride * Wo : stride]
            window += dcolumns[i, j].transpose(1, 2, 3, 0)
    return dx_pad[:, pad : pad + H, pad : pad + W], dw, db


CONV = Pair(conv2d_forward, conv2d_backward)


def max_pool_forward(x: Array) -> tuple[Array, tuple[Array, Array]]:
    """2x2, stride 2; an odd last row or column is dropped. x (B, H, W, C) -> (B, H // 2, W // 2, C)."""
    H, W = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
    x00, x01, x10, x11 = (x[:, i:H:2, j:W:2] for i, j in np.ndindex(2, 2))
    out = np.maximum(np.maximum(x00, x01), np.maximum(x10, x11))
    return out, (x, out)


def max_pool_backward(dout: Array, cache: tuple[Array, Array]) -> Array:
    """The first of the four pixels that is the maximum gets the whole gradient."""
    x, out = cache
    H, W = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
    dx, not_found = np.zeros_like(x), np.ones(out.shape, bool)
    # out = max(x00, x01, x10, x11)
    for i, j in np.ndindex(2, 2):
        is_maximum = not_found & (x[:, i:H:2, j:W:2] == out)
        not_found ^= is_maximum
        np.multiply(dout, is_maximum, out=dx[:, i:H:2, j:W:2])
    return dx


MAX_POOL = Pair(max_pool_forward, max_pool_backward)


def linear_forward(x: Array, w: Array, b: Array) -> tuple[Array, LinearCache]:
    """x (B, E) @ w (E, F) + b (F,)."""
    return x @ w + b, (x, w)


def linear_backward(dout: Array, cache: LinearCache) -> tuple[Array, Array, Array]:
    """dout (B, F) -> dx, dw, db."""
    x, w = cache
    # out = x @ w + b
    return dout @ w.T, x.T @ dout, dout.sum(axis=0)


def relu_forward(x: Array) -> tuple[Array, Array]:
    out = np.maximum(x, 0)
    return out, out


def relu_backward(dout: Array, out: Array) -> Array:
    # out = max(x, 0)
    return dout * (out > 0)


def sigmoid_forward(x: Array) -> tuple[Array, Array]:
    out = np.exp(np.minimum(x, 0)) / (1 + np.exp(-np.abs(x)))  # 1 / (1 + exp(-x)) without an overflow
    return out, out


def sigmoid_backward(dout: Array, out: Array) -> Array:
    # out = sigmoid(x)
    return dout * out * (1 - out)


SQUASH_EPS = 1e-9  # added to |s|^2, so that the derivative of |s| is finite for a capsule that is exactly zero


def squash_forward(s: Array) -> tuple[Array, tuple[Array, Array]]:
    """v = |s|^2 / (1 + |s|^2) * s / |s|; a capsule's entries are along the last axis. [Sabour 2017, eq. 1]"""
    q = np.square(s).sum(axis=-1, keepdims=True) + SQUASH_EPS
    return np.sqrt(q) / (1 + q) * s, (s, q)


def squash_backward(dv: Array, cache: tuple[Array, Array]) -> Array:
    s, q = cache
    # v = f(q) s with f(q) = sqrt(q) / (1 + q) and q = |s|^2, so ds = f(q) dv + 2 f'(q) (s . dv) s
    f, twice_df = np.sqrt(q) / (1 + q), (1 - q) / (np.sqrt(q) * (1 + q) ** 2)
    return f * dv + twice_df * (s * dv).sum(axis=-1, keepdims=True) * s


SQUASH = Pair(squash_forward, squash_backward)


# --- Dynamic routing [Sabour 2017, procedure 1] -----------------------------------------------------------------------
#
# The paper's lines, for a child i and a parent j, and our names:
#     u_hat_j|i = W_ij u_i                     u_hat, the votes
#     b_ij <- 0                                b
#     c_i <- softmax(b_i)                      c, the couplings, whose sum over the parents is 1
#     s_j <- sum_i c_ij u_hat_j|i              s
#     v_j <- squash(s_j)                       v
#     b_ij <- b_ij + u_hat_j|i . v_j           b; that of the last iteration is not used


def softmax(b: Array) -> Array:
    """Along the last axis. [Sabour 2017, eq. 3]"""
    e = np.exp(b - b.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def softmax_backward(dc: Array, c: Array) -> Array:
    # c = softmax(b)
    return c * (dc - (c * dc).sum(axis=-1, keepdims=True))


class RoutingCache(NamedTuple):
    u: Array  # (B, I, P)
    w: Array  # (I, P, J, D)
    u_hat: Array  # (B, I, J, D)
    c: list[Array]  # per iteration: (B, I, J)
    v: list[Array]  # per iteration: (B, J, D)
    squashes: list[Any]  # per iteration: the cache of v = squash(s)
    squash: Pair


def routing_forward(u: Array, w: Array, n_iters: int, squash: Pair = SQUASH) -> tuple[Array, RoutingCache]:
    """u (B, I, P), w (I, P, J, D), whose w[i, :, j] is W_ij transposed -> v (B, J, D)."""
    u_hat = np.einsum("bip,ipjd->bijd", u, w)
    b = np.zeros(u_hat.shape[:3], u.dtype)
    cache = RoutingCache(u, w, u_hat, [], [], [], squash)
    for _ in range(n_iters):
        c = softmax(b)
        s = np.einsum("bij,bijd->bjd", c, u_hat)
        v, squash_cache = squash.forward(s)
        b = b + np.einsum("bijd,bjd->bij", u_hat, v)
        cache.c.append(c)
        cache.v.append(v)
        cache.squashes.append(squash_cache)
    return v, cache


def routing_backward(dv: Array, cache: RoutingCache, routing_grad: str) -> tuple[Array, Array]:
    """dv (B, J, D) -> du (B, I, P), dw (I, P, J, D).

    "exact": the gradient of what the forward pass computes, through all iterations.
    "stop":  the couplings are constants: only the last iteration's s and v are differentiated.
    """
    u, w, u_hat, c, v, squashes, squash = cache
    du_hat, db = np.zeros_like(u_hat), np.zeros_like(c[0])
    for t in reversed(range(len(v))):
        # b = b + sum_d u_hat v
        dv = dv + np.einsum("bij,bijd->bjd", db, u_hat)
        du_hat += db[..., None] * v[t][:, None]
        # v = squash(s)
        ds = squash.backward(dv, squashes[t])
        # s = sum_i c u_hat
        dc = np.einsum("bijd,bjd->bij", u_hat, ds)
        du_hat += c[t][..., None] * ds[:, None]
        if routing_grad == "stop":
            break
        # c = softmax(b)
        db = db + softmax_backward(dc, c[t])
        dv = np.zeros_like(dv)  # of an earlier iteration, which the loss sees through b alone
    # u_hat = u w
    return np.einsum("bijd,ipjd->bip", du_hat, w), np.einsum("bijd,bip->ipjd", du_hat, u)


# --- Losses: (loss, gradient of the input). Of a part of a batch: its share of the mean over all ``n`` examples -------

PRESENT, ABSENT, ABSENT_WEIGHT = 0.9, 0.1, 0.5  # m+, m- and lambda [Sabour 2017, sec. 3]


def margin_loss(lengths: Array, positive: Array, n: int) -> tuple[float, Array]:
    """Summed over the classes. lengths (B, J), positive (B, J) of 0 and 1 -> loss, dlengths. [Sabour 2017, eq. 4]"""
    shortfall = np.maximum(0, PRESENT - lengths) * positive
    excess = np.maximum(0, lengths - ABSENT) * (1 - positive)
    loss = float(np.square(shortfall).sum() + ABSENT_WEIGHT * np.square(excess).sum()) / n
    return loss, (2 / n) * (ABSENT_WEIGHT * excess - shortfall)


def squared_error(out: Array, target: Array, n: int) -> tuple[float, Array]:
    """Summed over pixels and digits."""
    error = out - target
    return float(np.vdot(error, error)) / n, (2 / n) * error


def sigmoid_cross_entropy(scores: Array, positive: Array, n: int) -> tuple[float, Array]:
    """Summed over the classes. scores (B, J) before the sigmoid, positive (B, J) of 0 and 1."""
    loss = float((np.maximum(scores, 0) - scores * positive + np.log1p(np.exp(-np.abs(scores)))).sum()) / n
    return loss, (sigmoid_forward(scores)[0] - positive) / n


Loss = Callable[[Array, Array, int], tuple[float, Array]]  # scores and indicator (B, J), n -> loss, gradient of scores


def indicator(labels: Array, n_classes: int, dtype: Any) -> Array:
    """labels (B, Y) -> (B, J), 1 for the classes in an image."""
    return np.eye(n_classes, dtype=dtype)[labels].max(axis=1)


# --- The capsule network ----------------------------------------------------------------------------------------------

N_CLASSES = 10
DIGIT_SIDE = 28
KERNEL = 9
PRIMARY_SIZE = 8
CAPSULE_SIZE = 16


class Parts(NamedTuple):
    """What a CapsNet is made of. A study gives it another pair, with the same arguments and results."""

    conv: Pair = CONV  # of the primary capsules
    primary: Pair = SQUASH  # of the primary capsules
    routing: Pair = Pair(routing_forward, routing_backward)
    digit: Pair = SQUASH  # of the digit capsules
    loss: Loss = margin_loss  # of their lengths


PLAIN = FAST = Parts()
if HAS_FAST:
    FAST = PLAIN._replace(
        conv=Pair(spectral_conv.conv2d_forward, spectral_conv.conv2d_backward),
        routing=Pair(dynamic_routing.routing_forward, dynamic_routing.routing_backward),
    )


def parts_of(config: CapsNetConfig) -> Parts:
    return PLAIN if config.plain else FAST


class CapsNetCache(NamedTuple):
    conv1: ConvCache
    relu1: Array  # (B, 28, 28, 32) at the default sizes
    conv2: Any
    primary: Any
    routing: Any  # with the couplings c and the outputs v of each iteration
    v: Array  # (B, J, D)


def gaussian(rng: np.random.Generator, dtype: str, std: float, *shape: int) -> Array:
    """Independent, of mean 0."""
    return rng.normal(0, std, shape).astype(dtype)


def capsnet_init(rng: np.random.Generator, config: CapsNetConfig) -> Params:
    C, n_primary_out, dtype = config.conv_channels, PRIMARY_SIZE * config.primary_types, config.dtype
    I, J, n_in = config.n_primary, config.n_classes, config.in_channels
    params = {
        "conv1.w": gaussian(rng, dtype, math.sqrt(2 / (KERNEL**2 * n_in)), KERNEL, KERNEL, n_in, C),
        "conv1.b": np.zeros(C, dtype),
        "primary.w": gaussian(rng, dtype, math.sqrt(1 / (KERNEL**2 * C)), KERNEL, KERNEL, C, n_primary_out),
        "primary.b": np.zeros(n_primary_out, dtype),
        # 0.1 at the default sizes. It falls as 1 / sqrt(I), as a digit capsule is a sum of I votes.
        "routing.w": gaussian(rng, dtype, math.sqrt(PRIMARY_SIZE / I), I, PRIMARY_SIZE, J, CAPSULE_SIZE),
    }
    sizes = (J * CAPSULE_SIZE, *config.decoder, config.image_size**2 * n_in)
    variances = (2 / CAPSULE_SIZE, 2 / sizes[1], 1 / sizes[2])  # of the first layer's inputs all but one capsule are 0
    for k in range(3):
        params[f"decoder{k + 1}.w"] = gaussian(rng, dtype, math.sqrt(variances[k]), sizes[k], sizes[k + 1])
        params[f"decoder{k + 1}.b"] = np.zeros(sizes[k + 1], dtype)
    return params


def capsnet_forward(
    params: Params, images: Array, config: CapsNetConfig, parts: Parts | None = None
) -> tuple[Array, CapsNetCache]:
    """images (B, H, W) or (B, H, W, C) -> lengths of the digit capsules (B, J). The cache has the capsules and their
    couplings."""
    parts = parts or parts_of(config)
    x = images.reshape(*images.shape[:3], -1)  # (B, H, W, C)
    h, conv1 = conv2d_forward(x, params["conv1.w"], params["conv1.b"], 1, 0)
    h, relu1 = relu_forward(h)
    h, conv2 = parts.conv.forward(h, params["primary.w"], params["primary.b"], 2, 0)  # (B, side, side, types * P)
    u, primary = parts.primary.forward(h.reshape(len(h), -1, PRIMARY_SIZE))  # (B, I, P)
    v, routing = parts.routing.forward(u, params["routing.w"], config.routing_iters, parts.digit)  # (B, J, D)
    lengths = np.sqrt(np.square(v).sum(axis=-1) + SQUASH_EPS)
    return lengths, CapsNetCache(conv1, relu1, conv2, primary, routing, v)


def capsnet_backward(
    dv: Array, cache: CapsNetCache, config: CapsNetConfig, parts: Parts | None = None, need_dx: bool = False
) -> tuple[Params, Array | None]:
    """dv (B, J, D) -> gradients of all parameters but the decoder's, and dx (B, H, W, C) where needed."""
    parts, grads = parts or parts_of(config), {}
    du, grads["routing.w"] = parts.routing.backward(dv, cache.routing, config.routing_grad)
    dh = parts.primary.backward(du, cache.primary).reshape(len(dv), config.primary_side, config.primary_side, -1)
    dh, grads["primary.w"], grads["primary.b"] = parts.conv.backward(dh, cache.conv2)
    dh = relu_backward(dh, cache.relu1)
    dx, grads["conv1.w"], grads["conv1.b"] = conv2d_backward(dh, cache.conv1, need_dx)
    return grads, dx


def mask_forward(v: Array, labels: Array) -> tuple[Array, Array]:
    """v (B, J, D), labels (B, Y) -> (B*Y, J*D): each named capsule alone, zeros in place of the others."""
    J, D = v.shape[1:]
    mask = np.eye(J, dtype=v.dtype)[labels][..., None]  # (B, Y, J, 1)
    return (mask * v[:, None]).reshape(-1, J * D), mask


def mask_backward(dmasked: Array, mask: Array) -> Array:
    """-> dv (B, J, D)."""
    B, Y, J, _ = mask.shape
    # masked = mask v
    return (mask * dmasked.reshape(B, Y, J, -1)).sum(axis=1)


def decoder_forward(params: Params, masked: Array) -> tuple[Array, list[Any]]:
    """masked (B*Y, J*D) -> pictures (B*Y, H*W), of C channels (B*Y, H*W*C)."""
    x, caches = masked, []
    for k in (1, 2, 3):
        x, linear = linear_forward(x, params[f"decoder{k}.w"], params[f"decoder{k}.b"])
        x, activation = relu_forward(x) if k < 3 else sigmoid_forward(x)
        caches.append((linear, activation))
    return x, caches


def decoder_backward(dout: Array, caches: list[Any]) -> tuple[Array, Params]:
    """dout, as the pictures -> gradient of the masked capsules (B*Y, J*D), and those of the parameters."""
    dx, grads = dout, {}
    for k in (3, 2, 1):
        linear, activation = caches[k - 1]
        dx = relu_backward(dx, activation) if k < 3 else sigmoid_backward(dx, activation)
        dx, grads[f"decoder{k}.w"], grads[f"decoder{k}.b"] = linear_backward(dx, linear)
    return dx, grads


def reconstruct(params: Params, v: Array, labels: Array) -> Array:
    """v (B, J, D), labels (B, Y) -> grey pictures (B, Y, H, W), one of each named capsule alone."""
    pictures, _ = decoder_forward(params, mask_forward(v, labels)[0])
    side = math.isqrt(pictures.shape[1])
    return pictures.reshape(*labels.shape, side, side)


def capsnet_loss_and_grads(
    params: Params, batch: Batch, n: int, config: CapsNetConfig, parts: Parts | None = None
) -> tuple[dict[str, float], Params]:
    """Loss of the lengths of all digit capsules, plus the squared error of each digit's reconstruction from its own
    capsule: ``recon_weight`` weighs it, and with 0 the decoder does not learn. Of a part of a batch: its share of the
    mean over ``n`` examples."""
    parts = parts or parts_of(config)
    lengths, cache = capsnet_forward(params, batch.images, config, parts)
    loss, dlengths = parts.loss(lengths, indicator(batch.labels, lengths.shape[1], lengths.dtype), n)
    dv = cache.v * (dlengths / lengths)[..., None]  # lengths = |v|

    masked, mask = mask_forward(cache.v, batch.labels)
    pictures, decoder = decoder_forward(params, masked)
    error, dpictures = squared_error(pictures, batch.sources.reshape(pictures.shape), n)
    dmasked, grads = decoder_backward(config.recon_weight * dpictures, decoder)
    grads |= capsnet_backward(dv + mask_backward(dmasked, mask), cache, config, parts)[0]
    losses = {
        "train_loss": loss + config.recon_weight * error,
        "train_class_loss": loss,
        "train_recon_loss": error / batch.labels.shape[1],  # of one digit
    }
    return losses, grads


def capsnet_assess(
    params: Params, batch: Batch, config: CapsNetConfig, parts: Parts | None = None
) -> tuple[Array, float]:
    """Scores (B, J), and the squared error of the true digits' pictures, summed over all pixels."""
    lengths, cache = capsnet_forward(params, batch.images, config, parts)
    return lengths, squared_error(reconstruct(params, cache.v, batch.labels), batch.sources, 1)[0]


# --- The CNN baselines: convolutions with ReLU and perhaps pooling, a hidden layer, a sigmoid for each class ----------


class ConvLayer(NamedTuple):
    kernel: int
    channels: int
    stride: int = 1
    pad: int = 0
    pool: Pair | None = None


class CNN(NamedTuple):
    convs: tuple[ConvLayer, ...]
    hidden: dict[str, int]  # units of the hidden layers, by name
    loss: Loss = sigmoid_cross_entropy
    bias: float = 0.0  # of the convolutions, at first
    conv: Pair = CONV  # of all layers but the first, whose images have few channels


def cnn_shapes(net: CNN, config: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights, by layer. ``config`` has ``image_size``, ``in_channels`` and ``n_classes``."""
    shapes: dict[str, tuple[int, ...]] = {}
    side, C = config.image_size, config.in_channels
    for k, (K, n_out, stride, pad, pool) in enumerate(net.convs, 1):
        shapes[f"conv{k}"] = (K, K, C, n_out)
        side, C = ((side + 2 * pad - K) // stride + 1) // (2 if pool else 1), n_out
    n_in = side * side * C
    for name, n_out in {**net.hidden, "out": config.n_classes}.items():
        shapes[name], n_in = (n_in, n_out), n_out
    return shapes


def cnn_size(net: CNN, config: Any) -> int:
    """Number of parameters."""
    return sum(math.prod(shape) + shape[-1] for shape in cnn_shapes(net, config).values())


def cnn_init(rng: np.random.Generator, config: Any, net: CNN) -> Params:
    params: Params = {}
    for name, shape in cnn_shapes(net, config).items():
        gain = 1 if name == "out" else 2  # a ReLU halves the second moment
        params[f"{name}.w"] = gaussian(rng, config.dtype, math.sqrt(gain / math.prod(shape[:-1])), *shape)
        params[f"{name}.b"] = np.full(shape[-1], net.bias if name.startswith("conv") else 0, config.dtype)
    return params


def cnn_forward(params: Params, images: Array, net: CNN, dropout: Array | None = None) -> tuple[Array, Any]:
    """images (B, H, W) or (B, H, W, C) -> scores (B, J), before the sigmoid. ``dropout`` (B, F), in a training: factors
    of the last hidden layer's units."""
    x, convs, hidden = images.reshape(*images.shape[:3], -1), [], []  # the lists are the layers' caches
    for k, layer in enumerate(net.convs, 1):
        pair = net.conv if k > 1 else CONV
        x, conv = pair.forward(x, params[f"conv{k}.w"], params[f"conv{k}.b"], layer.stride, layer.pad)
        x, relu = relu_forward(x)
        x, pool = layer.pool.forward(x) if layer.pool else (x, None)
        convs.append((conv, relu, pool))
    shape, x = x.shape, x.reshape(len(x), -1)
    for name in net.hidden:
        x, linear = linear_forward(x, params[f"{name}.w"], params[f"{name}.b"])
        x, relu = relu_forward(x)
        hidden.append((linear, relu))
    x = x if dropout is None else x * dropout
    scores, out = linear_forward(x, params["out.w"], params["out.b"])
    return scores, (convs, shape, hidden, dropout, out)


def cnn_backward(dscores: Array, cache: Any, net: CNN, need_dx: bool = False) -> tuple[Params, Array | None]:
    """dscores (B, J) -> gradients of the parameters, and dx (B, H, W, C) where needed."""
    convs, shape, hidden, dropout, out = cache
    grads: Params = {}
    dx, grads["out.w"], grads["out.b"] = linear_backward(dscores, out)
    dx = dx if dropout is None else dx * dropout
    for name, (linear, relu) in reversed(list(zip(net.hidden, hidden, strict=True))):
        dx, grads[f"{name}.w"], grads[f"{name}.b"] = linear_backward(relu_backward(dx, relu), linear)
    dx = dx.reshape(shape)
    for k in range(len(net.convs), 0, -1):
        (conv, relu, pool_cache), pool = convs[k - 1], net.convs[k - 1].pool
        dx = pool.backward(dx, pool_cache) if pool else dx
        pair = net.conv if k > 1 else CONV
        dx, grads[f"conv{k}.w"], grads[f"conv{k}.b"] = pair.backward(relu_backward(dx, relu), conv, need_dx or k > 1)
    return grads, dx


def cnn_loss_and_grads(params: Params, batch: Batch, n: int, net: CNN) -> tuple[dict[str, float], Params]:
    scores, cache = cnn_forward(params, batch.images, net)
    loss, dscores = net.loss(scores, indicator(batch.labels, scores.shape[1], scores.dtype), n)
    return {"train_loss": loss}, cnn_backward(dscores, cache, net)[0]


def cnn_assess(params: Params, batch: Batch, net: CNN) -> tuple[Array, float]:
    """Scores (B, J); there is no reconstruction."""
    return cnn_forward(params, batch.images, net)[0], math.nan


class Network(NamedTuple):
    """A network as the training loop sees it."""

    name: str
    init_params: Callable[..., Params]  # rng
    loss_and_grads: Callable[..., tuple[dict[str, float], Params]]  # params, batch, n: see ``capsnet_loss_and_grads``
    assess: Callable[..., tuple[Array, float]]  # params, batch -> scores (B, J), squared error of reconstruction


def capsnet_model(config: CapsNetConfig, parts: Parts | None = None) -> Network:
    return Network(
        "capsnet", functools.partial(capsnet_init, config=config),
        functools.partial(capsnet_loss_and_grads, config=config, parts=parts),
        functools.partial(capsnet_assess, config=config, parts=parts),
    )


def cnn_model(name: str, config: CapsNetConfig, net: CNN) -> Network:
    init = functools.partial(cnn_init, config=config, net=net)
    return Network(name, init, functools.partial(cnn_loss_and_grads, net=net), functools.partial(cnn_assess, net=net))


# Initial bias of the CNNs' convolutions. Without one, a second convolution gives 0 on the blank ground of a digit, or
# a rounding error of either sign. The plain and the fast form round differently, and so the ReLU's gradients differ.
BIAS = 0.01


def make_models(config: CapsNetConfig, cnn_loss: Loss = sigmoid_cross_entropy) -> dict[str, Network]:
    """The capsule network and its two baselines, by name, in the order of the result table."""
    models = {"capsnet": capsnet_model(config)}
    n_params = count_params(models["capsnet"].init_params(np.random.default_rng(0)))
    C = config.conv_channels
    trunk = (ConvLayer(KERNEL, C), ConvLayer(KERNEL, PRIMARY_SIZE * config.primary_types, stride=2))
    # Of the kind of [Sabour 2017, sec. 6], where the layers have 512 and 256 channels.
    pooled = (ConvLayer(KERNEL, 2 * C, pool=MAX_POOL), ConvLayer(5, 2 * C, pool=MAX_POOL))
    for name, convs in (("cnn", trunk), ("cnn_pool", pooled)):
        net = CNN(convs, {}, cnn_loss, BIAS, parts_of(config).conv)
        one, two = (cnn_size(net._replace(hidden={"hidden": n}), config) for n in (1, 2))
        n_hidden = max(1, 1 + round((n_params - one) / (two - one)))  # each hidden unit has as many parameters
        models[name] = cnn_model(name, config, net._replace(hidden={"hidden": n_hidden}))
    return models


# --- Data: MNIST files, or drawn strokes ------------------------------------------------------------------------------


class Digits(NamedTuple):
    """Single digits. ``name`` is what stands in tables, JSON and titles: "mnist", "strokes" or "custom"."""

    name: str
    train_images: Array  # (N, 28, 28) uint8, strokes are 255
    train_labels: Array  # (N,) uint8, 0 to 9 of digits
    test_images: Array  # (N, 28, 28) uint8
    test_labels: Array  # (N,) uint8


MIRRORS = (  # the last for a Python without certificates, as a new one on a Mac: the checksums guard the files
    "https://storage.googleapis.com/cvdf-datasets/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "http://ossci-datasets.s3.amazonaws.com/mnist/",
)
MNIST_SHA256 = {
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}  # of the .gz files
HAS_DATA = Path(__file__).with_name("data").joinpath("digit_files.py").is_file()  # it reads other files, draws strokes
EMNIST = r"(?<![a-z])emnist(?![a-z])"  # in a folder's name: its images are to be turned
TIMEOUT = 8  # seconds, to connect and for the next bytes
MNIST_CRC32 = 0x1939F699  # of the four arrays' bytes, in the order of Digits


class UnavailableError(OSError):
    """MNIST is neither on this machine nor to be had from a mirror."""


def cache_dir() -> Path:
    """The folder of data that are downloaded or drawn once. Raises UnavailableError where there is no place for it."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    caches = caches if caches.is_absolute() else Path(os.path.expanduser("~/.cache"))
    folder = Path(os.path.expanduser(os.environ.get("CAPSULES_CACHE") or caches / "hinton-mnist"))
    if not folder.is_absolute() and not os.environ.get("CAPSULES_CACHE"):
        raise UnavailableError("there is no home folder for a cache: let the variable CAPSULES_CACHE name a folder")
    return folder


def load_mnist(data_dir: Path | None = None) -> Digits:
    """The four files of ``data_dir`` or, without it, of the cache, where those that are missing are downloaded to.

    Other sets than the canonical one are read too. Raises UserError for a file that is missing or damaged, and for
    labels beyond those of digits, UnavailableError where there is neither a file nor a download.
    """
    place = data_dir or cache_dir()
    paths = [find_file(place, stem) for stem in MNIST_SHA256]
    if data_dir is not None and data_dir.exists() and (
        re.search(EMNIST, data_dir.resolve().name, re.IGNORECASE) or (HAS_DATA and not any(paths))
    ):
        try:
            return named(from_data("digit_files").read_digit_files(data_dir))  # Kaggle's, Keras', EMNIST's
        except ValueError as error:
            raise UserError(str(error)) from None
    if data_dir is not None and None in paths:
        stem = list(MNIST_SHA256)[paths.index(None)]
        raise UserError(f"{data_dir} has no {stem}.gz nor {stem}: put the four MNIST files there")
    files = [path or download(stem, place) for stem, path in zip(MNIST_SHA256, paths, strict=True)]
    arrays = [read_idx(path, ndim) for path, ndim in zip(files, (3, 1, 3, 1), strict=True)]
    for i in (0, 2):
        if len(arrays[i]) != len(arrays[i + 1]):
            counts = f"{len(arrays[i])} images but {files[i + 1]} has {len(arrays[i + 1])} labels"
            raise UserError(f"{files[i]} has {counts}: take both from the same source")
    if (most := max(arrays[1].max(), arrays[3].max())) > 9:
        raise UserError(f"{place} has the label {most}: the labels of digits must be 0 to 9")
    return named(arrays)


def named(arrays: Sequence[Array]) -> Digits:
    """The canonical set by its name, another one as "custom"."""
    crc = zlib.crc32(b"".join(array.tobytes() for array in arrays))
    return Digits("mnist" if crc == MNIST_CRC32 else "custom", *arrays)


def find_file(folder: Path, stem: str) -> Path | None:
    """The MNIST file of that name, gzipped or not, in either usual spelling."""
    names = (f"{name}{ending}" for name in (stem, stem.replace("-idx", ".idx")) for ending in (".gz", ""))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_idx(path: Path, ndim: int) -> Array:
    """An MNIST file, gzipped or not: images (N, 28, 28) for an ndim of 3, labels (N,) for 1, both uint8. Raises
    UserError, which names the file, for anything else."""
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        if content[:4] != bytes((0, 0, 8, ndim)):  # 8: unsigned bytes
            raise ValueError(f"it is no IDX file of {ndim} dimensions")
        shape = tuple(np.frombuffer(content, ">u4", ndim, offset=4).tolist())
        if shape[0] == 0 or shape[1:] != (DIGIT_SIDE,) * (ndim - 1):
            raise ValueError(f"its shape is {shape}")
        return np.frombuffer(content, np.uint8, offset=4 + 4 * ndim).reshape(shape)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise UserError(f"{path} is no intact MNIST file ({one_line(error)}): replace it") from error


def download(stem: str, folder: Path) -> Path:
    """The MNIST file of that name, from the first mirror that has it, verified, in the folder."""
    path, tried = folder / f"{stem}.gz", []
    for mirror in MIRRORS:
        try:
            print_message(f"downloading {mirror}{path.name}")
            with urllib.request.urlopen(mirror + path.name, timeout=TIMEOUT) as stream:
                content = stream.read()
            if hashlib.sha256(content).hexdigest() != MNIST_SHA256[stem]:
                raise ValueError("wrong checksum")
            write_file(path, content)
            return path
        except (OSError, ValueError, http.client.HTTPException) as error:  # no connection, no file, no folder
            tried.append(f"{mirror} ({one_line(error, 80)})")
    advice = "name the folder of its four files with --data-dir" + ", or take --dataset strokes" * HAS_DATA
    raise UnavailableError(f"MNIST could not be downloaded to {folder} from {', '.join(tried)}: {advice}")


STROKE_COUNTS = 20_000, 5_000  # of a generated set: training digits, test digits


def resolve_dataset(choice: str, rng: np.random.Generator, data_dir: Path | None = None) -> Digits:
    """The digits that ``--dataset`` asks for: "mnist", "strokes", or "auto".

    "auto" is MNIST where it is there or can be downloaded, else strokes with a warning on stderr. A damaged file and a
    wrong --data-dir raise UserError with "auto" too. ``rng`` draws the stroke digits, training and test set from
    separate streams.
    """
    if choice in ("auto", "mnist"):
        try:
            return load_mnist(data_dir)
        except UnavailableError as error:
            if choice == "mnist" or not HAS_DATA:
                raise
            rule = "!" * 100
            print_message(
                f"{rule}\nWARNING: this run does NOT use MNIST but drawn digits (strokes).\n"
                f"Its figures do not compare with those on MNIST. Reason: {error}\n{rule}"
            )
    draw = from_data("stroke_digits").stroke_digits
    train, test = (draw(own, n) for own, n in zip(rng.spawn(2), STROKE_COUNTS, strict=True))
    return Digits("strokes", *train, *test)


def without_test(digits: Digits, n: int | None) -> Digits:
    """For the choice of settings: the last n training digits instead of the test digits. Raises UserError."""
    images, labels = digits.train_images, digits.train_labels
    if n is None:
        return digits
    if n >= len(labels):
        raise UserError(f"--n-val {n} leaves none of the {len(labels)} training digits to train on")
    return Digits(digits.name, images[:-n], labels[:-n], images[-n:], labels[-n:])


# --- Data: overlays of two digits -------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Composites, the classes in them, and each digit alone. Intensities are 0 to 1."""

    images: Array  # (B, H, W)
    labels: Array  # (B, Y)
    sources: Array  # (B, Y, H, W)

    def part(self, start: int, stop: int) -> Batch:
        return Batch(*(a[start:stop] for a in self))


def admissible_shifts(max_shift: int, min_iou: float) -> Array:
    """All pairs of shifts (n, 2, 2) after which the two boxes overlap by an IoU of at least ``min_iou``.

    A digit's box is its whole 28x28 image, so a pair is admissible whatever the digits look like: at IoU 0.8 two
    digits are 3 pixels apart at most.
    """
    s = np.arange(-max_shift, max_shift + 1)
    pairs = np.stack(np.meshgrid(s, s, s, s, indexing="ij"), axis=-1).reshape(-1, 2, 2)
    common = np.prod(DIGIT_SIDE - np.abs(pairs[:, 0] - pairs[:, 1]), axis=1)
    return pairs[common >= min_iou * (2 * DIGIT_SIDE**2 - common)]


def shifted(digits: Array, shift: Array, side: int, max_shift: int) -> Array:
    """digits (n, Y, 28, 28) in the middle of (n, Y, side, side), then shift (n, Y, 2) pixels down and right, each at
    most ``max_shift``: windows of a larger canvas. What leaves the image is lost."""
    (n, Y), m = digits.shape[:2], max_shift
    start = m + (side - DIGIT_SIDE) // 2
    canvas = np.zeros((n, Y, side + 2 * m, side + 2 * m), digits.dtype)
    canvas[:, :, start : start + DIGIT_SIDE, start : start + DIGIT_SIDE] = digits
    windows = np.lib.stride_tricks.sliding_window_view(canvas, (side, side), axis=(2, 3))
    row, column = np.moveaxis(m - shift, -1, 0)  # (n, Y)
    return windows[np.arange(n)[:, None], np.arange(Y), row, column]


class Overlays:
    """The composites that can be made of one split's digits."""

    def __init__(self, images: Array, labels: Array, config: Config) -> None:
        """images (N, 28, 28) uint8, labels (N,). Raises UserError where there are not two classes."""
        order = np.argsort(labels, kind="stable")
        self.images, self.labels = images[order], labels[order].astype(np.intp)
        if self.labels[0] == self.labels[-1]:
            raise UserError("all digits are of one class: a composite needs two")
        self.class_start = np.searchsorted(self.labels, np.arange(self.labels[-1] + 2))  # in self.images
        self.shifts = admissible_shifts(config.max_shift, config.min_iou)
        self.max_shift, self.side, self.dtype = config.max_shift, config.image_size, np.dtype(config.dtype)
        self.overlay = config.overlay

    def draw(self, rng: np.random.Generator, n: int) -> tuple[Array, Array]:
        """``n`` times two digits of different classes (n, 2), and one of the admissible pairs of shifts (n, 2, 2), in
        pixels, [composite, digit, axis], without rejection."""
        first = rng.integers(len(self.labels), size=n)
        start, stop = self.class_start[self.labels[first]], self.class_start[self.labels[first] + 1]
        second = rng.integers(len(self.labels) - (stop - start))  # counts the digits of all other classes
        second += np.where(second >= start, stop - start, 0)
        return np.stack([first, second], axis=1), self.shifts[rng.integers(len(self.shifts), size=n)]

    def render(self, which: Array, shift: Array) -> Batch:
        """Images of what ``draw`` gave: the pixel-wise maximum of two shifted digits, or their sum, clipped at 1."""
        sources = shifted(self.images[which], shift, self.side, self.max_shift)  # (n, 2, H, W)
        sources = sources * self.dtype.type(1 / 255)
        images = np.minimum(sources.sum(axis=1), 1) if self.overlay == "sum" else sources.max(axis=1)
        return Batch(images, self.labels[which], sources)


class Data(NamedTuple):
    name: str  # of the digits: "mnist", "strokes" or "custom"
    train: Overlays
    test: Batch


def make_data(config: Config) -> Data:
    """Test composites are rendered here, once; those of the training are rendered batch by batch. Raises UserError."""
    digits = resolve_dataset(config.dataset, generator(config.seed, Stream.DATA), config.data_dir)
    digits = without_test(digits, config.n_val)
    train = Overlays(digits.train_images, digits.train_labels, config)
    test = Overlays(digits.test_images, digits.test_labels, config)
    return Data(digits.name, train, test.render(*test.draw(generator(config.seed, Stream.EVALUATION), config.n_test)))


def resolve_auto(config: Any, data: Any) -> Any:
    """``config`` with the data set that ``auto`` found, strokes or MNIST files, instead of ``auto``: a run that was
    begun on one is not to be resumed on the other."""
    if config.dataset != "auto":
        return config
    return dataclasses.replace(config, dataset="strokes" if data.name == "strokes" else "mnist")


def training_batch(data: Data, config: Config, step: int) -> Batch:
    """The batch of a step, which depends on the seed and the step alone."""
    return data.train.render(*data.train.draw(generator(config.seed, Stream.SHUFFLE, step), config.batch_size))


# --- Settings: each is declared once, as a field of a dataclass; its flag, help and checks come from there ------------
#
# From here to the end of "Files and trainings", the text is the same in both base scripts, but for adamw_of.


class UserError(OSError):
    """Something that the person at the keyboard can put right, in one line. Exit status 1. The other base script and
    data/ have such a class of their own: who calls several of them catches OSError."""


UsageError = argparse.ArgumentTypeError  # what is wrong with a command line or a configuration. Exit status 2


class SettingError(UsageError):
    """A value that cannot be: of a field, and why."""

    def __init__(self, field: str, why: object) -> None:
        super().__init__(f"argument {flag_of(field)}: {why}")


class Setting(NamedTuple):
    """Which values a field has, and what it says of its flag."""

    convert: Callable[[Any], Any]  # of a flag's text, or of a value: the value. Raises UsageError
    metavar: str  # what the help shows for its value; empty for a flag without a value
    written: bool = False  # whether it is a file that is written
    help: str = ""
    shown: str = ""  # what the help says of the default, if it is not the field's
    paper: str = ""  # the paper's value, if it is another
    usual: bool = False  # whether --help shows it; --help-all shows every flag
    free: bool = False  # whether a resumed run may have another value
    group: str = ""  # heading of the flags from here on


def setting(default: Any, values: Any, help: str, shown: str = "", **more: Any) -> Any:
    """A field of a ``Settings`` dataclass; ``values``: such as ``int_in(1, 9)``, a tuple of choices, or bool. A default
    of None may stand for what ``dependent`` gives."""
    if not hasattr(values, "convert"):
        values = one_of((False, True))._replace(metavar="") if values is bool else one_of(values)
    return dataclasses.field(default=default, metadata={"it": values._replace(help=help, shown=shown, **more)})


def settings_of(config: Any) -> dict[str, Setting]:
    """By field, those of a dataclass or of an instance."""
    return {field.name: field.metadata["it"] for field in dataclasses.fields(config) if "it" in field.metadata}


def flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")


def text_of(value: Any) -> str:
    """A value as a flag takes it."""
    if type(value) is tuple:
        return ",".join(map(text_of, value)) or "none"
    return "none" if value is None else str(value).removesuffix(".0")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Whatever makes a configuration, flags, a call or a file, gets the same defaults and the same checks."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            it, value = field.metadata.get("it"), getattr(self, field.name)
            if it and (value not in (None, ()) or value != field.default):  # else what ``dependent`` gives
                try:
                    vars(self)[field.name] = it.convert(value)  # where frozen fields are, too
                except UsageError as error:
                    raise SettingError(field.name, error) from None
        vars(self).update({name: value for name, value in self.dependent().items() if getattr(self, name) is None})
        self.check()

    def dependent(self) -> dict[str, Any]:
        """Defaults that depend on other fields."""
        return {}

    def check(self) -> None:
        """Raises SettingError where values do not fit together."""


def number_in(kind: Any, low: float, high: float) -> Setting:
    def convert(given: Any) -> Any:
        try:
            value = kind(str(given))
        except ValueError:
            raise UsageError(f"{given!r} is not a {'whole number' if kind is int else 'number'}") from None
        if not low <= value <= high:  # a NaN fails this too
            raise UsageError(f"{given} is not between {low:,} and {high:,}")
        return value

    return Setting(convert, "N" if kind is int else "X")


int_in, float_in = functools.partial(number_in, int), functools.partial(number_in, float)


def one_of(choices: Sequence[Any]) -> Setting:
    def convert(given: Any) -> Any:
        for choice in choices:
            if str(choice) == str(given):
                return choice
        raise UsageError(f"{given!r} is not one of {', '.join(map(str, choices))}")

    return Setting(convert, "|".join(map(str, choices)))


def list_of(one: Setting) -> Setting:
    """Values with commas between them."""

    def convert(given: Any) -> tuple[Any, ...]:
        values = tuple(map(one.convert, given.split(",") if isinstance(given, str) else given or ()))
        if not values:
            raise UsageError(f"{given!r} has no value")
        return values

    return Setting(convert, "A,B")


def path_of(given: Any) -> Path:
    if not str(given):
        raise UsageError("the name is empty")
    return Path(os.path.expanduser(given))


FOLDER, INPUT, OUTPUT = Setting(path_of, "DIR"), Setting(path_of, "FILE"), Setting(path_of, "FILE", written=True)


class Parser(argparse.ArgumentParser):
    """Names the flag that is nearest to an unknown one."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match("unrecognized arguments: ([^ =]*)", message)
        near = difflib.get_close_matches(unknown[1], self._option_string_actions, 1, 0.7) if unknown else []
        raise UsageError(message + (f" (did you mean {near[0]}?)" if near else ""))


def parse(
    config: type[C], options: type[O], argv: Sequence[str], description: str = "", *examples: tuple[str, str],
    epilog: str = "",
) -> tuple[C, O, dict[str, Any]]:
    """Both dataclasses as the command line sets them, and the texts of the flags that it has. An example is a pair:
    flags, and what they do in which time. Ends the script after ``--help``. Raises UsageError."""
    spec: Any = getattr(sys.modules["__main__"], "__spec__", None)
    is_module = spec and spec.name.count(".") == 1 and argv == sys.argv[1:]
    program = f"python -m {spec.name}" if is_module else f"python {os.path.basename(sys.argv[0])}"
    lines = [f"  {program} {flags}".rstrip() + f"\n      {what}" for flags, what in examples]
    parser = Parser(
        usage=f"{program} [flags]", allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter, description=description,
        epilog="\n".join([*["examples, with their times on one thread:"] * bool(lines), *lines, "", epilog]),
    )
    parser._negative_number_matcher = re.compile(r"-[\d.]")  # -30:30 is a value, and no flag
    parser.add_argument("-h", "--help", action="store_true", help="Show the usual flags, and examples.")
    parser.add_argument("--help-all", action="store_true", help="Show every flag.")
    group: Any = parser
    both: tuple[Any, Any] = (config, options)
    for field in (field for declared in both for field in dataclasses.fields(declared) if "it" in field.metadata):
        it = field.metadata["it"]
        group = parser.add_argument_group(it.group) if it.group else group
        default = it.shown or (text_of(field.default) if it.metavar and field.default not in (None, ()) else "")
        told = {"Default": default, "The paper": it.paper}
        help = " ".join([it.help, *(f"{what}: {value}." for what, value in told.items() if value)])
        help = help.replace("%", "%%") if it.usual or "--help-all" in argv else argparse.SUPPRESS
        takes: Any = {"metavar": it.metavar} | ({"nargs": "+", "action": "extend"} if it.metavar == "FILES" else {})
        group.add_argument(flag_of(field.name), help=help, **takes if it.metavar else {"action": "store_true"})
    given = vars(parser.parse_args(argv))
    if "help" in given or "help_all" in given:
        print(parser.format_help().rstrip(), flush=True)
        raise SystemExit(0)
    made = [declared(**{name: given[name] for name in settings_of(declared) if name in given}) for declared in both]
    files: dict[str, tuple[str, bool]] = {}  # by path
    for one in made:
        for name, it in settings_of(one).items():
            if it.metavar == "FILE" and (path := getattr(one, name)):
                other, written = files.setdefault(os.path.realpath(path), (name, it.written))
                if other != name and (written or it.written):
                    raise SettingError(name, f"is the same file as that of {flag_of(other)}")
    return made[0], made[1], given


# --- Files and trainings ---------------------------------------------------------------------------------------------


def one_line(error: object, limit: int = 200) -> str:
    """An error's message, or any other text, on one line; a long one is cut in its middle."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-(limit // 2 - 1) :]}"


CLEAR = "\r\x1b[K"  # the line of a terminal


@functools.cache
def obeys_escapes() -> bool:
    """IDLE's shell does not obey CLEAR. A console of Windows does once a command has run in it."""
    if os.name == "nt":
        os.system("")
    return "idlelib.run" not in sys.modules


def is_terminal() -> bool:
    """Whether stderr shows a bar that moves."""
    return bool(sys.stderr and sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and obeys_escapes())


def print_message(text: str, end: str = "\n") -> None:
    """Print to stderr, if there is one that can be written to; in place of a bar."""
    if sys.stderr is not None:  # print would take stdout instead
        with contextlib.suppress(OSError):
            print(f"{CLEAR * is_terminal()}{text}", end=end, file=sys.stderr, flush=True)


def from_data(module: str) -> Any:
    """A module of data/, which a script does without. Raises UserError where it, or what it needs, is missing."""
    try:
        return importlib.import_module(f"data.{module}")
    except ImportError as error:
        other = getattr(sys.modules.get("data"), "__file__", None)  # a person's own data
        is_other = other and Path(other).resolve().parent != Path(__file__).resolve().with_name("data")
        what = f"{other} is in the way of" if is_other else "this needs"
        raise UserError(f"{what} data/{module}.py beside the script: {one_line(error)}") from None


def write_file(path: Path, content: bytes | None) -> None:
    """Whole or not at all; or in its place where that cannot be replaced, as a file that is mounted by itself. None
    tries whether it could be written. Makes the folder. Raises UserError."""
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")  # its own, where two runs write the same file
    try:
        if target.exists() and not target.is_file():
            raise OSError("it is no regular file")  # such as /dev/null, which would be replaced
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as stream:
                if content is None:
                    return
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, target)
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS) or not target.exists():
                raise
            with target.open("r+b") as stream:
                if content is not None:
                    stream.truncate(stream.write(content))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def is_there(path: Path) -> bool:
    """Whether a file holds something: one that ``mktemp`` has made does not."""
    return path.exists() and path.stat().st_size > 0


def require_own_outputs(experiment: str, config: Any, options: Any) -> None:
    """Before a run: raises UserError where its files cannot be written, or hold something of another run."""
    for path in filter(None, (options.out_json, options.checkpoint)):
        write_file(path, None)
        if not is_there(path) or (path == options.checkpoint and options.resume):
            continue
        try:
            with path.open("rb") as file:
                header = json.loads(file.read() if path == options.out_json else str(np.load(file)["header"]))
            saved, of = from_json(type(config), header["config"]), header["experiment"]
        except Exception:  # whatever another file holds
            of = "something else"
        if of != experiment:
            raise UserError(f"{path} is there, and is of {of}: name another file")
        known = [name for name, value in vars(config).items() if value not in (None, "auto", "", (), {})]  # before data
        require_same(path, saved, config, known, options.resume, whole=path == options.out_json)
        held = set(header["models"])
        if path == options.checkpoint and (others := held - set(getattr(options, "models", held))):
            raise UserError(f"{path} holds {', '.join(sorted(others))} too: --resume keeps what it holds")


def plain(config: Any) -> dict[str, Any]:
    """A dataclass as JSON holds it."""
    return {key: str(v) if isinstance(v, Path) else v for key, v in dataclasses.asdict(config).items()}


def from_json(config: type[C], content: Mapping[str, Any]) -> C:
    """The inverse of ``plain``. Raises UsageError or TypeError for what no command line gives."""
    return config(**{name: tuple(v) if isinstance(v, list) else v for name, v in content.items()})


def require_same(
    path: Path, saved: Any, asked: Any, names: Collection[str], may_be_longer: bool = False, whole: bool = False
) -> None:
    """Raises UserError where two configurations, a file's and the one asked for, differ in a field of ``names``. Fields
    that are ``free`` may differ; where they are compared ``whole``, of these the folder alone. More epochs than the
    file has are no difference where the other ``may_be_longer``."""
    for field in dataclasses.fields(saved):
        old, new, it = getattr(saved, field.name), getattr(asked, field.name), field.metadata.get("it")
        is_free = it and it.free and (not whole or field.name == "data_dir")
        differs = field.name in names and old != new and not is_free
        longer = field.name.endswith("epochs") and (new or 0) > (old or 0)
        if differs and not (may_be_longer and longer):
            what = flag_of(field.name) if it else f"other {field.name.replace('_', ' ')}:"
            why = ": its learning rate or loss depends on the length" * longer
            raise UserError(f"{path} was made with {what} {text_of(old)}, not {text_of(new)}{why}")


# Independent random streams of one seed, so that no part of a run shifts the draws of another
Stream = enum.IntEnum("Stream", ["DATA", "INIT", "SHUFFLE", "EVALUATION", "OBJECTS"], start=0)


def generator(seed: int, stream: int, *key: int) -> np.random.Generator:
    """The generator of a stream and a key (such as the epoch and step). It depends on nothing else, so that a resumed
    run draws the same numbers without any stored state."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(int(stream), *key)))


@dataclasses.dataclass
class TrainState:
    """A model in training. A checkpoint stores its arrays, and what is ``KEPT``."""

    name: str
    params: Params
    step: int = 0
    seconds: float = 0.0  # of training, without the tests after epochs
    history: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # by metric, an entry for each epoch
    sums: dict[str, float] = dataclasses.field(default_factory=dict)  # of the losses since the last epoch's end
    weight: float = 0  # of these sums
    unsaved: str = ""  # why its last checkpoint could not be written

    def __post_init__(self) -> None:
        self.m = {key: np.zeros_like(p) for key, p in self.params.items()}  # first moments, or Muon's momentum
        self.v = {key: np.zeros_like(p) for key, p in self.params.items()}  # second moments

    def add(self, losses: Mapping[str, float], started: float, weight: float = 1) -> None:
        """After a step that was ``started`` then: add a batch's mean losses to the sums of the epoch; ``weight``: its
        number of images, where that differs. Raises UserError where a loss is not finite."""
        self.require_finite(losses)
        for key, loss in losses.items():
            self.sums[key] = self.sums.get(key, 0.0) + weight * loss
        self.weight += weight
        self.seconds += time.perf_counter() - started

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Append the mean losses and the metrics to the history. Raises UserError where a parameter or a metric is not
        finite."""
        self.require_finite({key: np.abs(p).max() for key, p in self.params.items()} | dict(metrics))
        self.append({key: total / self.weight for key, total in self.sums.items()} | dict(metrics))
        self.sums, self.weight = {}, 0

    def require_finite(self, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            if not math.isfinite(value):
                where = f"epoch {len(self.history.get('train_loss', ())) + 1}, step {self.step}"
                raise UserError(f"{self.name}: {key} became {value} in {where}; try a smaller learning rate")

    def append(self, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self.history.setdefault(key, []).append(float(value))  # a np.float32 is no JSON


def count_params(params: Params) -> int:
    return sum(p.size for p in params.values())


def init_state(model: Any, config: Any) -> TrainState:
    """Fresh parameters of a model; their draws depend on the seed and the model's name alone."""
    return TrainState(model.name, model.init_params(generator(config.seed, Stream.INIT, *model.name.encode())))


BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


def adamw_step(
    state: Any, grads: Sequence[Params], lr: float, weight_decay: float = 0.0, decayed: Collection[str] = ()
) -> None:
    """Update ``state`` in place by the sum of ``grads``; parameters named in ``decayed`` shrink by ``lr *
    weight_decay`` of themselves. [Kingma & Ba, ICLR 2015, algorithm 1; Loshchilov & Hutter, ICLR 2019, algorithm 2]"""
    state.step += 1
    for key, p in state.params.items():
        g, m, v = sum(part[key] for part in grads), state.m[key], state.v[key]
        m[...] = BETA1 * m + (1 - BETA1) * g
        v[...] = BETA2 * v + (1 - BETA2) * g**2
        m_hat, v_hat = m / (1 - BETA1**state.step), v / (1 - BETA2**state.step)
        if key in decayed:
            p -= lr * weight_decay * p
        p -= lr * m_hat / (np.sqrt(v_hat) + EPSILON)


KEPT, ARRAYS = ("step", "seconds", "history"), ("params", "m", "v")  # of a state, in a checkpoint


def save_checkpoint(path: Path, experiment: str, config: Any, states: Iterable[TrainState]) -> None:
    """Every state that has been trained, as ``np.load`` reads it: MODEL/params/NAME are weights. Raises UserError."""
    trained = [state for state in states if state.step]
    models = {state.name: {key: getattr(state, key) for key in KEPT} for state in trained}
    header = json.dumps({"experiment": experiment, "config": plain(config), "models": models})
    arrays = {f"{state.name}/{kind}/{key}": array
              for state in trained for kind in ARRAYS for key, array in getattr(state, kind).items()}
    stream = io.BytesIO()
    np.savez(stream, **{"header": np.array(header), **arrays})
    write_file(path, stream.getvalue())


def read_checkpoint(
    path: Path, experiment: str, config_class: type[C], make_models: Callable[[C], Mapping[str, Any]]
) -> tuple[C, dict[str, TrainState]]:
    """The configuration, and the states of those of ``make_models(config)`` that are in the file. Raises UserError
    where it is missing, damaged, or of another experiment."""
    if not path.exists():
        raise UserError(f"there is no checkpoint {path}")
    try:
        with path.open("rb") as file, np.lib.npyio.NpzFile(file) as stored:  # np.load would speak of pickled data
            arrays = {key: stored[key] for key in stored.files}  # with their checksums
        header = json.loads(str(arrays["header"]))
        if header["experiment"] != experiment:
            raise ValueError(f"it is of {header['experiment']}")
        config, models = from_json(config_class, header["config"]), header["models"]
        states = {name: init_state(model, config) for name, model in make_models(config).items() if name in models}
        for name, state in states.items():
            vars(state).update({key: models[name][key] for key in KEPT})
            for kind in ARRAYS:
                for key, target in getattr(state, kind).items():
                    if (stored := arrays[f"{name}/{kind}/{key}"]).shape != target.shape:
                        raise ValueError(f"{key} of {name} has shape {stored.shape}, not {target.shape}")
                    target[...] = stored
    except Exception as error:  # whatever a damaged file does
        raise UserError(f"{path} is no readable checkpoint of {experiment}: {one_line(error)}") from None
    return config, states


@dataclasses.dataclass(frozen=True)
class RunOptions(Settings):
    """What a run reads and writes besides its configuration. Of its numbers, threads may change the last bits."""

    out_json: Path | None = setting(None, OUTPUT, "Write the result and the history there.", usual=True, group="files")
    checkpoint: Path | None = setting(None, OUTPUT,
        "Save the networks there after every epoch, and read them from there.", usual=True)
    resume: bool = setting(False, bool, "Go on from --checkpoint, or begin where there is none yet: the numbers are"
        " those of an unbroken run, bit for bit. It may be longer where its learning rate and loss do not depend on"
        " its length.", usual=True)
    threads: int = setting(1, int_in(1, 256), "Use N threads, which need the folder fast/ beside the script.")
    quiet: bool = setting(False, bool, "Show no progress of the training.")

    def check(self) -> None:
        if self.resume and self.checkpoint is None:
            raise SettingError("resume", "needs --checkpoint FILE")
        if self.threads > 1 and not HAS_FAST:
            raise SettingError("threads", "more than one need the folder fast/ beside the script")


NO_OPTIONS = RunOptions(quiet=True)
Callback = Callable[[TrainState, bool], None]  # after a step: the state, and whether an epoch has ended


@dataclasses.dataclass
class Session:
    """The trainings of a run: resumed, saved after every epoch, and shown by a bar on a terminal, else by a line an
    epoch. For each ``model, state`` of ``session.trainings(n_steps)``: ``train(…, callback=session.after_step)``. A
    configuration has a ``seed``, a model a ``name`` and ``init_params(rng)``. A checkpoint that cannot be written ends
    no training: ``state.unsaved`` says why."""

    experiment: str
    config: Any
    make_models: Callable[[Any], Mapping[str, Any]]
    options: Any = NO_OPTIONS
    names: Collection[str] | None = None  # train only these models
    callback: Callback | None = None  # called after every step too, and before the first

    def __post_init__(self) -> None:
        self.models, self.n_steps = self.make_models(self.config), 1
        names = list_of(one_of(tuple(self.models))).convert(self.models if self.names is None else self.names)
        self.states = {name: init_state(model, self.config) for name, model in self.models.items()}
        path = self.options.checkpoint
        if self.options.resume and is_there(path):
            saved, states = read_checkpoint(path, self.experiment, type(self.config), self.make_models)
            require_same(path, saved, self.config, vars(saved), getattr(self.config, "length_is_free", False))
            self.states |= states
        self.trained = {name: state for name, state in self.states.items() if name in names}

    def trainings(self, n_steps: Callable[[str], int]) -> Iterator[tuple[Any, TrainState]]:
        """The models that are to be trained, one after the other, with their states. ``n_steps(name)`` of each."""
        for name, state in self.trained.items():
            self.n_steps = n_steps(name)
            self.show(f"{name}: step {state.step:,} of {self.n_steps:,}", True)
            if self.callback and state.step == 0:
                self.callback(state, True)
            yield self.models[name], state
        self.show("")

    def after_step(self, state: TrainState, epoch_ended: bool) -> None:
        """The callback of a training loop, after every step."""
        if self.callback:
            self.callback(state, epoch_ended)
        latest = {key: values[-1] for key, values in state.history.items() if values and "accuracy" in key}
        found = "".join(f", {key.replace('_', ' ')} {value:.3f}" for key, value in latest.items())
        self.show(f"{state.name}: step {state.step:,} of {self.n_steps:,}{found}, {state.seconds:.1f} s", epoch_ended)
        if self.options.checkpoint and epoch_ended:
            state.unsaved = ""
            try:
                save_checkpoint(self.options.checkpoint, self.experiment, self.config, self.states.values())
            except UserError as error:
                print_message(f"warning: {error}; the training goes on")
                state.unsaved = str(error)

    def show(self, line: str, epoch_ended: bool = False) -> None:
        if is_terminal() and not self.options.quiet:
            width = 80
            with contextlib.suppress(OSError, ValueError):
                width = os.get_terminal_size(sys.stderr.fileno()).columns or width
            print_message(line[: width - 1], end="")  # it replaces the line before, and vanishes at the end
        elif epoch_ended and not self.options.quiet:
            print_message(line)


def model_metrics(state: Any, **own: Any) -> dict[str, Any]:
    """A model's entry in a result: the last value of each metric of its tests, and its ``own``."""
    tests = {key: values[-1] for key, values in state.history.items() if values and not key.startswith("train_")}
    return {"n_params": count_params(state.params), **tests, **own, "train_seconds": round(state.seconds, 3)}


def result_document(
    experiment: str, config: Any, dataset: str, models: dict[str, Any], states: Mapping[str, Any], headline: str
) -> dict[str, Any]:
    """The JSON of a run; accuracies are fractions. ``headline`` is the name of the main metric."""
    return {"experiment": experiment, "seed": config.seed, "dataset": dataset, "headline": headline,
            "config": plain(config), "models": models, "history": {k: state.history for k, state in states.items()}}


def report(result: dict[str, Any], table: str, options: Any, states: Mapping[str, Any]) -> None:
    """Print the table, then write the result. Raises OSError where one fails, or a checkpoint's writing did."""
    try:
        print(table, flush=True)
    finally:  # where nobody reads the table, too
        if options.out_json:
            write_file(options.out_json, (json.dumps(result, indent=1) + "\n").encode())
    if unsaved := [state.unsaved for state in states.values() if state.unsaved]:
        raise UserError(unsaved[-1])


def script(main: Callable[[Sequence[str]], None]) -> Callable[..., int]:
    """Makes of a script's ``main(argv)`` one that returns the exit status: 0; 1 with one line on stderr for what the
    person at the keyboard can put right, 2 where that is the command line; 130 after Ctrl-C, 143 after SIGTERM. A
    closed pipe is no error. Called without ``argv``, it takes no flags. The signal's handler stays as it was."""

    def terminate(*_: object) -> NoReturn:
        raise KeyboardInterrupt("terminated")

    @functools.wraps(main)
    def status(argv: Sequence[str] = ()) -> int:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(ValueError):  # outside of the main thread signals are not ours
                before = signal.signal(signal.SIGTERM, terminate)
                stack.callback(signal.signal, signal.SIGTERM, before or signal.SIG_DFL)  # None: not Python's
            told: Any = "ignore" if sys.platform == "darwin" else "warn"  # Apple's BLAS raises flags for nothing
            stack.enter_context(np.errstate(divide=told, over=told, under="ignore", invalid=told))
            out: Any = sys.stdout
            with contextlib.suppress(AttributeError, ValueError):  # a terminal that lacks a letter shows its number
                stack.callback(out.reconfigure, errors=out.errors)
                out.reconfigure(errors="backslashreplace")
            try:
                main(argv)
                if sys.stdout is not None:
                    sys.stdout.flush()
            except KeyboardInterrupt as stopped:
                print_message(str(stopped) or "interrupted")
                return 143 if stopped.args else 130
            except UsageError as error:
                program = os.path.basename(sys.argv[0])
                print_message(f"{program}: error: {one_line(error, 300)} (--help-all shows every flag)")
                return 2
            except (OSError, MemoryError) as error:
                if getattr(error, "errno", None) and not getattr(error, "filename", None):
                    # stdout is full or closed: Python would try again at its end
                    with contextlib.suppress(OSError, ValueError, AttributeError):
                        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                is_closed = os.name == "nt" and getattr(error, "errno", None) == errno.EINVAL  # as Windows tells it
                if not isinstance(error, BrokenPipeError) and not is_closed:
                    print_message(f"error: {one_line(error, 500)}")
                    return 1
        return 0

    return status


# --- Configuration ----------------------------------------------------------------------------------------------------

DIGITS = tuple("0123456789")
WARMUP = 100  # steps
PRESETS: dict[str, dict[str, Any]] = {
    "small": {"conv_channels": 32, "primary_types": 8, "decoder": (256, 512)},
    "paper": {"conv_channels": 256, "primary_types": 32, "decoder": (512, 1024)},
}


@dataclasses.dataclass(frozen=True)
class CapsNetConfig(Settings):
    """Digits, networks and training, for every experiment that trains these networks. [Sabour 2017, sec. 4 to 6]"""

    dataset: str = setting("auto", ("auto", "mnist", "strokes"), "Use these digits. auto is MNIST if it is there or can"
        " be downloaded, else strokes: drawn digits.", usual=True, group="data")
    data_dir: Path | None = setting(None, FOLDER, "Folder of the four MNIST files, of others of their format, or of"
        " digits in .npz, .csv or .mat files.", "the cache, where they are downloaded to", usual=True)
    n_train: int = setting(12_000, int_in(1, 10**8), "Train on N composites in each epoch, rounded down to whole"
        " batches.", usual=True, paper="60 million in all")
    preset: str = setting("small", tuple(PRESETS), "Sizes of the network: 32 channels, 8 types and a decoder of 256-512"
        " units, or the paper's 256, 32 and 512-1024.", group="networks")
    conv_channels: int = setting(None, int_in(1, 1024), "Give conv1 N channels.", "the preset's")
    primary_types: int = setting(None, int_in(1, 256), "Use N types of primary capsules.", "the preset's")
    decoder: Any = None  # the preset's: units of its two hidden layers
    routing_iters: int = setting(3, int_in(1, 20), "Route in N iterations.")
    routing_grad: str = setting("exact", ("exact", "stop"),
        "Differentiate through all iterations, or through the last sum with constant couplings.")
    recon_weight: float = setting(0.005, float_in(0, 1000), "Weight of the squared error of reconstruction in the"
        " loss.", paper="0.0005")
    seed: int = setting(0, int_in(0, 2**32 - 1), "Seed of the data, the initial weights and the order of the images.",
        usual=True, group="training")
    n_epochs: int = setting(4, int_in(1, 100_000), "Train for N epochs, each of --n-train examples.", usual=True)
    batch_size: int = setting(64, int_in(1, 4096), "Take each step on N images.", paper="128 in its published code")
    optimizer: str = setting("adam", ("adam", "muon"), "Optimizer. muon takes orthogonal steps of convolutions, digit"
        " capsules and a CNN's hidden layer, and leaves the rest to Adam; it needs fast/ beside the script.")
    lr: float = setting(1e-2, float_in(1e-9, 10),
        f"Learning rate. It rises for {WARMUP} steps and falls linearly to 0 at the end.",
        paper="0.001, and falls by 4 % every 2,000 steps")
    weight_decay: float = setting(0.3, float_in(0, 100), "A step shrinks every weight, but no bias, by lr * X.",
        paper="0")
    dtype: str = setting("float32", ("float32", "float64"), "Number format of all arithmetic.")
    plain: bool = setting(False, bool, "Compute all in its plain form, without fast twins.")

    image_size: Any = 36  # rows, and columns
    in_channels: int = 1  # of an image: 3 are colours
    n_classes: int = N_CLASSES

    classes: ClassVar[tuple[str, ...]] = DIGITS

    def dependent(self) -> dict[str, Any]:
        return PRESETS[self.preset]

    def check(self) -> None:
        if self.dataset == "strokes" and self.data_dir is not None:
            raise SettingError("data_dir", "strokes has no files")
        if self.n_train is not None and self.n_train < self.batch_size:
            raise SettingError("n_train", f"{self.n_train} is less than a batch of --batch-size {self.batch_size}")
        if self.optimizer == "muon" and not HAS_FAST:
            raise SettingError("optimizer", "muon needs the folder fast/ beside the script")

    @property
    def primary_side(self) -> int:
        """Rows, and columns, of the grid of primary capsules."""
        return (self.image_size - 2 * KERNEL + 1) // 2 + 1

    @property
    def n_primary(self) -> int:
        return self.primary_side**2 * self.primary_types

    @property
    def steps_per_epoch(self) -> int:
        """Full batches only."""
        return max(1, self.n_train // self.batch_size)

    @property
    def n_steps(self) -> int:
        return self.steps_per_epoch * self.n_epochs

    def lr_at(self, step: int) -> float:
        """Learning rate of a step; steps count from 0. It rises for ``WARMUP`` steps, and falls linearly to 0."""
        return self.lr * (1 - step / self.n_steps) * min(1.0, (step + 1) / WARMUP)


@dataclasses.dataclass(frozen=True)
class Config(CapsNetConfig):
    """One run on composites of two digits."""

    n_test: int = setting(5000, int_in(1, 100_000), "Test on N composites of test digits, the same for all models.",
        paper="10 million", group="composites")
    n_val: int | None = setting(None, int_in(1, 10**6), "To choose settings, hold N training digits out and test on"
        " composites of them.", "test on the test digits")
    min_iou: float = setting(0.8, float_in(0, 1), "Least intersection over union of the two 28x28 boxes.", paper="0")
    overlay: str = setting("maximum", ("maximum", "sum"), "Lay two digits over each other by the larger of two pixels,"
        " or by their sum, clipped at 1.", paper="sum, in its published code")
    max_shift: int = 4  # pixels


MODEL_NAMES = ("capsnet", "cnn", "cnn_pool")
if not HAS_FAST:
    class Workers(contextlib.nullcontext):  # type: ignore[no-redef]
        """The plain form of fast/workers.py: one thread."""

        def __enter__(self) -> Any:
            return self

        def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
            return [work(item) for item in items]

        def gradients(
            self, loss_and_grads: Any, params: Params, batch: Any, part_size: int | None = None
        ) -> tuple[dict[str, float], list[Params]]:
            """Mean losses of a batch, and the gradients of its parts, each of at most ``part_size`` examples."""
            n = len(batch.labels)
            n_parts = math.ceil(n / part_size) if part_size else 1
            parts = [loss_and_grads(params, batch.part(n * k // n_parts, n * (k + 1) // n_parts), n)
                     for k in range(n_parts)]
            return {key: sum(losses[key] for losses, _ in parts) for key in parts[0][0]}, [grads for _, grads in parts]


@dataclasses.dataclass(frozen=True)
class Options(RunOptions):
    models: tuple[str, ...] = setting(MODEL_NAMES, list_of(one_of(MODEL_NAMES)), "Train only these.", usual=True)
    threads: int = setting(default_threads(), int_in(1, 256), "Use N threads, which need fast/"
        " beside the script; each works on a part of every batch. The last bits of the numbers depend on N.",
        "one for each processor, at most 4; 1 without fast/")


# --- Tests and training loop ------------------------------------------------------------------------------------------

# The weights that Muon updates, and which of their axes are inputs; Adam updates the last layers and the decoder.
MUON_INPUTS = {"routing.w": (0, 1), "hidden.w": (0,)} | dict.fromkeys(("conv1.w", "primary.w", "conv2.w"), (0, 1, 2))


def top_labels(scores: Array, n_labels: int) -> Array:
    """scores (N, J) -> the classes (N, Y) with the highest scores, highest first."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :n_labels]


EVALUATION_BATCH = 32  # images that a thread classifies at a time


def assess(model: Network, params: Params, batch: Batch, workers: Workers) -> tuple[Array, float]:
    """Scores (N, J), and the squared error of all reconstructions from the true digits' capsules, NaN where a model has
    none."""
    parts = [batch.part(k, k + EVALUATION_BATCH) for k in range(0, len(batch.labels), EVALUATION_BATCH)]
    with np.errstate(all="ignore"):
        scores, errors = zip(*workers.map(functools.partial(model.assess, params), parts), strict=True)
    return np.concatenate(scores).astype(float), sum(errors)


def evaluate(model: Network, params: Params, batch: Batch, workers: Workers) -> dict[str, float]:
    """Test metrics. ``set_accuracy``: fraction of images whose two digits have the two highest scores;
    ``soft_accuracy``: fraction in which at least one of them is among these; ``digit_accuracy``: fraction of all digits
    that are. ``recon_mse``: mean squared error of a pixel in reconstructions from the true digits' capsules."""
    Y = batch.labels.shape[1]
    scores, error = assess(model, params, batch, workers)
    n_correct = (top_labels(scores, Y)[:, :, None] == batch.labels[:, None]).sum(axis=(1, 2))  # (N,)
    if not np.isfinite(scores).all():  # the highest ones say nothing then
        n_correct = np.full(len(n_correct), np.nan)
    metrics = {
        "set_accuracy": float((n_correct == Y).mean()),
        "soft_accuracy": float((n_correct > 0).mean()),
        "digit_accuracy": float(n_correct.mean() / Y),
    }
    if not math.isnan(error):
        metrics["recon_mse"] = error / batch.sources.size
    return metrics


def update(state: TrainState, grads: list[Params], lr: float, config: CapsNetConfig, workers: Workers) -> None:
    """One step of the optimiser; weights decay, biases do not."""
    decayed = [key for key in state.params if key.endswith(".w")]
    if config.optimizer == "muon":
        optimizers.muon_step(state, grads, lr, config.weight_decay, decayed, MUON_INPUTS, workers)
    elif config.plain or not HAS_FAST:
        adamw_step(state, grads, lr, config.weight_decay, decayed)
    else:
        optimizers.adamw_step(state, grads, lr, config.weight_decay, decayed, workers)


def train(model: Network, config: Config, data: Data, state: TrainState, workers: Workers, callback: Callback) -> None:
    """Train ``state`` in place to ``config.n_epochs``, from the middle of an epoch too. Raises UserError where the loss
    stops being finite."""
    while state.step < config.n_steps:
        started = time.perf_counter()
        batch = training_batch(data, config, state.step)
        with np.errstate(all="ignore"):  # a loss that is not finite is reported in words
            losses, grads = workers.gradients(model.loss_and_grads, state.params, batch)
            update(state, grads, config.lr_at(state.step), config, workers)
        state.add(losses, started)
        if epoch_ended := state.step % config.steps_per_epoch == 0:
            state.end_epoch(evaluate(model, state.params, data.test, workers))
        callback(state, epoch_ended)


# --- A run from beginning to end --------------------------------------------------------------------------------------

EXPERIMENT = "multimnist_capsnet"


def train_all(config: Config, data: Data, options: Any = NO_OPTIONS, **more: Any) -> dict[str, TrainState]:
    """Train the models one after the other, and return their states. ``more`` as in ``Session``."""
    session = Session(EXPERIMENT, config, make_models, options, **more)
    with Workers(options.threads) as workers:
        for model, state in session.trainings(lambda _: config.n_steps):
            train(model, config, data, state, workers, session.after_step)
    return session.trained


def make_result(config: Config, data: Data, states: Mapping[str, TrainState]) -> dict[str, Any]:
    """The JSON of a run; accuracies are fractions, those of the last epoch."""
    models = {name: model_metrics(state) for name, state in states.items()}
    return result_document(EXPERIMENT, config, data.name, models, states, headline="set_accuracy")


def run(config: Config, options: Any = NO_OPTIONS, **more: Any) -> tuple[dict[str, Any], dict[str, TrainState]]:
    """Data, trainings, tests -> the result and the states. ``more`` as in ``Session``."""
    data = make_data(config)
    config = resolve_auto(config, data)
    states = train_all(config, data, options, **more)
    return make_result(config, data, states), states


def describe(result: dict[str, Any]) -> str:
    """One line: the test or validation set and the training behind a result's numbers."""
    config = result["config"]
    of_validation = " of validation digits" if config["n_val"] else ""
    return (
        f"{result['dataset']}: {config['n_test']:,} composites{of_validation}, IoU at least {config['min_iou']:g};"
        f" seed {result['seed']}, {config['n_epochs']} epochs of {config['n_train']:,}"
    )


def format_table(result: dict[str, Any]) -> str:
    """The result table."""
    lines = [f"{'model':<10} {'both':>6} {'one':>6} {'digits':>6} {'recon MSE':>9} {'parameters':>10} {'seconds':>8}"]
    for name, m in result["models"].items():
        mse = f"{m['recon_mse']:9.4f}" if "recon_mse" in m else " " * 9
        lines.append(
            f"{name:<10} {m['set_accuracy']:6.3f} {m['soft_accuracy']:6.3f} {m['digit_accuracy']:6.3f} {mse}"
            f" {m['n_params']:10,} {m['train_seconds']:8.1f}"
        )
    return "\n".join(lines)


@script
def main(argv: Sequence[str]) -> None:
    config, options, _ = parse(
        Config, Options, argv,
        "Train a capsule network and two CNNs to recognise both digits of a composite: two digits, one over the other.",
        ("", "Three models, four epochs of 12,000 composites: about 7 minutes."),
        ("--models capsnet --n-epochs 20 --checkpoint run.npz",
         "Train the capsules longer and keep them: about 8 minutes."),
    )
    require_own_outputs(EXPERIMENT, config, options)
    result, states = run(config, options, names=options.models)
    report(result, f"{describe(result)}\n{format_table(result)}", options, states)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
