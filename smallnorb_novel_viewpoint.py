#!/usr/bin/env python3
"""Novel viewpoints: matrix capsules with EM routing against two CNNs, in numpy, every gradient by hand.

Claim tested: [Hinton 2018] G. Hinton, S. Sabour, N. Frosst, "Matrix capsules with EM routing", ICLR 2018,
section 5.1 and table 2. A network sees five object classes from a restricted range of viewpoints and is tested on
viewpoints that it never saw. Matrix capsules lose less of their accuracy than a convolutional network does.

    input            (B, 32, 32, C)          C = 1, or 2 (stereo pairs of smallNORB)
    conv1 + ReLU     (B, 16, 16, 16)         5x5, stride 2, padding 2
    primary capsules (B, 8, 4, 4), (B, 8)    a dense layer: eight poses M_i and activations a_i
    votes            (B, 8, 5, 4, 4)         V_ij = M_i W_ij
    class capsules   (B, 5, 4, 4), (B, 5)    EM routing: poses mu_j and activations a_j
    score            (B, 5)                  a_j; or |mu_j|^2 / 16 + 4 (a_j - 1/2) with --loss cross-entropy

The CNNs keep conv1 and put a dense ReLU layer where the capsules are: one with 64 units, one with as many as give it
the capsule network's parameter count. All three go through the same loop, data and optimiser.

Deviations from the paper: the write-up's objects, five block shapes of an earlier write-up in numpy, stand in for the
smallNORB images by default (``--dataset voxels``), and are not standardised. (``shapes`` has other objects for every
seed, ``smallnorb`` reads the real files, ``toys`` a drawn set of the same structure.) The primary capsules come from
one dense layer: there is one routing layer, not three, no grid of capsules and no coordinate addition. conv1 has 16
channels, not 32, and the CNNs are not the paper's. EM routing has two iterations and a floor under the variances, and
there is weight decay. The inverse temperature lambda is 1 in all iterations, where the paper's rises. beta_a and
beta_v are one number for each class.

This file runs alone, on numpy. Run it (80 epochs, seed 0, three models):

    python smallnorb_novel_viewpoint.py
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import enum
import errno
import functools
import importlib
import io
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

import numpy as np

if sys.version_info < (3, 10):  # noqa: UP036
    raise SystemExit(f"this needs Python 3.10 or later, and is run by {sys.version.split()[0]}")

try:  # fast twins of plain forms, and threads, where the folder lies beside the script
    from fast import optimizers
    from fast.workers import blas_threads
    HAS_FAST = True
except ImportError:
    HAS_FAST, blas_threads = False, contextlib.nullcontext  # type: ignore[assignment]

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


# --- Layers: each backward pass stands below its forward pass, and repeats the lines that it undoes -------------------

ConvCache = tuple[Array, Array, tuple[int, ...], int, int]  # columns, w, the shape of x, stride, pad
LinearCache = tuple[Array, Array]  # x, w
VotesCache = tuple[Array, Array]  # pose, w


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


def votes_forward(pose: Array, w: Array) -> tuple[Array, VotesCache]:
    """V_ij = M_i W_ij: pose (B, I, P, P), w (I, J, P, P) -> votes (B, I, J, D)."""
    (B, I, P, _), J = pose.shape, w.shape[1]
    rows = pose.transpose(1, 0, 2, 3).reshape(I, B * P, P)
    columns = w.transpose(0, 2, 1, 3).reshape(I, P, J * P)
    product = (rows @ columns).reshape(I, B, P, J, P)
    return product.transpose(1, 0, 3, 2, 4).reshape(B, I, J, P * P), (pose, w)


def votes_backward(dvotes: Array, cache: VotesCache) -> tuple[Array, Array]:
    """dvotes (B, I, J, D) -> dpose (B, I, P, P), dw (I, J, P, P)."""
    pose, w = cache
    (B, I, P, _), J = pose.shape, w.shape[1]
    dproduct = dvotes.reshape(B, I, J, P, P).transpose(1, 0, 3, 2, 4).reshape(I, B * P, J * P)
    rows = pose.transpose(1, 0, 2, 3).reshape(I, B * P, P)
    columns = w.transpose(0, 2, 1, 3).reshape(I, P, J * P)
    # product = rows @ columns, for each primary capsule
    drows = dproduct @ columns.transpose(0, 2, 1)  # (I, B * P, P)
    dcolumns = rows.transpose(0, 2, 1) @ dproduct  # (I, P, J * P)
    dpose = drows.reshape(I, B, P, P).transpose(1, 0, 2, 3)
    return dpose, dcolumns.reshape(I, P, J, P).transpose(0, 2, 1, 3)


# --- EM routing [Hinton 2018, procedure 1] ----------------------------------------------------------------------------
#
# A child i is a primary capsule, a parent j a class capsule. The paper's lines, for each pose entry h, and our names:
#     R_ij <- 1 / J                                                   r
#     M-step:  R_ij <- R_ij a_i                                       ra; its sum over i is the mass
#              mu_j <- sum_i R_ij V_ij / sum_i R_ij                   weight = ra / mass; mu
#              sigma_j^2 <- sum_i R_ij (V_ij - mu_j)^2 / sum_i R_ij   error, sigma_sq
#              cost_j <- (beta_v + log sigma_j) sum_i R_ij            cost, summed over h; some editions have beta_u
#              a_j <- logistic(lambda (beta_a - sum_h cost_j))        z, a
#     E-step:  p_j <- N(V_ij; mu_j, sigma_j^2), product over h        error, scaled, distance, log_p
#              R_ij <- a_j p_j / sum_k a_k p_k                        log_ap, ap, r

VARIANCE_FLOOR = 3.0  # see em_routing_forward
MASS_FLOOR = 1e-8  # added to the assigned mass, so that the mean of a parent without mass is zero and not NaN


class MStepCache(NamedTuple):
    r: Array  # (B, I, J) the assignments that were given
    a_in: Array  # (B, I) the children's activations
    votes: Array  # (B, I, J, D)
    mass: Array  # (B, J) sum_i r a_in + MASS_FLOOR
    weight: Array  # (B, I, J) of a vote in the mean; the sum over i is 1, less where there is hardly any mass
    mu: Array  # (B, J, D)
    error: Array  # (B, I, J, D) votes - mu
    sigma_sq: Array  # (B, J, D)
    cost: Array  # (B, J) sum over all pose entries
    lambda_: float  # inverse temperature
    a: Array  # (B, J) the parents' activations


def m_step_forward(
    r: Array, a_in: Array, votes: Array, beta_a: Array, beta_v: Array, lambda_: float, variance_floor: float
) -> tuple[Array, Array, Array, Array, MStepCache]:
    """Fit each parent's Gaussian to the votes that are assigned to it. [Hinton 2018, procedure 1, M-STEP]

    r (B, I, J), a_in (B, I), votes (B, I, J, D), beta_a and beta_v (J,), inverse temperature lambda_
    -> mu and sigma_sq (B, J, D), activations a and their logarithm (B, J), cache.
    """
    ra = r * a_in[:, :, None]  # (B, I, J)
    mass = ra.sum(axis=1) + MASS_FLOOR  # (B, J)
    weight = ra / mass[:, None]  # (B, I, J)
    mu = (weight[..., None] * votes).sum(axis=1)  # (B, J, D)
    # sum_i weight votes^2 - mu^2 would be as good in exact arithmetic; in float32 it cancels for votes far from zero.
    error = votes - mu[:, None]  # (B, I, J, D)
    sigma_sq = (weight[..., None] * (error * error)).sum(axis=1) + variance_floor  # (B, J, D)
    D = mu.shape[2]
    cost = (D * beta_v + 0.5 * np.log(sigma_sq).sum(axis=2)) * mass  # (B, J)
    z = lambda_ * (beta_a - cost)  # (B, J)
    a, _ = sigmoid_forward(z)
    log_a = -np.logaddexp(0, -z)  # finite where a is zero
    cache = MStepCache(r, a_in, votes, mass, weight, mu, error, sigma_sq, cost, lambda_, a)
    return mu, sigma_sq, a, log_a, cache


def m_step_backward(
    dmu: Array, dsigma_sq: Array, dlog_a: Array, cache: MStepCache, em_grad: str
) -> tuple[Array, Array, Array, Array, Array]:
    """dmu and dsigma_sq (B, J, D), dlog_a (B, J)
    -> dr (B, I, J), dvotes (B, I, J, D), da_in (B, I), dbeta_a and dbeta_v (J,).

    With em_grad "stop" the mass, and the mean inside sigma_sq, are held constant.
    """
    r, a_in, votes, mass, weight, mu, error, sigma_sq, cost, lambda_, a = cache
    D = mu.shape[2]
    # log_a = log sigmoid(z)
    dz = dlog_a * (1 - a)  # (B, J)
    # z = lambda (beta_a - cost)
    dbeta_a = lambda_ * dz.sum(axis=0)
    dcost = -lambda_ * dz  # (B, J)
    # cost = (D beta_v + sum_d log sigma_sq / 2) mass
    dbeta_v = D * (dcost * mass).sum(axis=0)
    dsigma_sq = dsigma_sq + (0.5 * dcost * mass)[..., None] / sigma_sq  # (B, J, D)
    dmass = dcost * cost / mass  # (B, J)
    # sigma_sq = sum_i weight error^2 + floor
    dsigma_sq_error = dsigma_sq[:, None] * error  # (B, I, J, D)
    dweight = np.einsum("bijd,bijd->bij", dsigma_sq_error, error)
    derror = 2 * weight[..., None] * dsigma_sq_error  # (B, I, J, D)
    # error = votes - mu
    if em_grad != "stop":
        dmu = dmu - derror.sum(axis=1)
    # mu = sum_i weight votes
    dweight += np.einsum("bjd,bijd->bij", dmu, votes)
    dvotes = derror + weight[..., None] * dmu[:, None]  # (B, I, J, D)
    # weight = ra / mass
    dra = dweight / mass[:, None]  # (B, I, J)
    dmass -= (dra * weight).sum(axis=1)
    # mass = sum_i ra + floor
    if em_grad != "stop":
        dra += dmass[:, None]
    # ra = r a_in
    return dra * a_in[:, :, None], dvotes, (dra * r).sum(axis=2), dbeta_a, dbeta_v


OverParents = Callable[[Array, np.ufunc], Array]
EStepCache = tuple[Array, Array, Array, OverParents]  # scaled, sigma_sq, r, over


def over_parents(x: Array, combine: np.ufunc) -> Array:
    """x (B, I, J) -> (B, I, 1): np.add or np.maximum over all parents of a child."""
    return combine.reduce(x, axis=2, keepdims=True)


def e_step_forward(
    mu: Array, sigma_sq: Array, log_a: Array, votes: Array, over: OverParents = over_parents
) -> tuple[Array, EStepCache]:
    """Assign each child to the parents in proportion to a_j p_j(votes). [Hinton 2018, procedure 1, E-STEP]

    mu and sigma_sq (B, J, D), log_a (B, J), votes (B, I, J, D) -> r (B, I, J), whose sum over j is 1, and the cache.
    In logarithms, since a product of D densities may leave the range of float32. Where a child has more parents than
    the J, as on a grid of capsules, ``over`` combines over all of them.
    """
    error = votes - mu[:, None]  # (B, I, J, D)
    scaled = error / sigma_sq[:, None]  # (B, I, J, D)
    distance = np.einsum("bijd,bijd->bij", scaled, error)  # (B, I, J)
    log_p = -0.5 * (distance + np.log(sigma_sq).sum(axis=2)[:, None])  # without D log(2 pi) / 2, equal for all parents
    log_ap = log_a[:, None] + log_p  # (B, I, J)
    ap = np.exp(log_ap - over(log_ap, np.maximum))
    r = ap / over(ap, np.add)
    return r, (scaled, sigma_sq, r, over)


def e_step_backward(dr: Array, cache: EStepCache) -> tuple[Array, Array, Array, Array]:
    """dr (B, I, J) -> dmu, dsigma_sq (B, J, D), dlog_a (B, J), dvotes (B, I, J, D)."""
    scaled, sigma_sq, r, over = cache
    # r = ap / ap summed over all parents of the child; ap = exp(log_ap)
    dlog_ap = r * (dr - over(dr * r, np.add))  # (B, I, J)
    # log_ap = log_a + log_p
    dlog_a = dlog_ap.sum(axis=1)  # (B, J)
    # log_p = -(distance + sum_d log sigma_sq) / 2
    ddistance = -0.5 * dlog_ap  # (B, I, J)
    dsigma_sq = ddistance.sum(axis=1)[..., None] / sigma_sq  # (B, J, D)
    # distance = sum_d error^2 / sigma_sq
    derror = 2 * ddistance[..., None] * scaled  # (B, I, J, D)
    dsigma_sq -= 0.5 * np.einsum("bijd,bijd->bjd", derror, scaled)
    # error = votes - mu
    return -derror.sum(axis=1), dsigma_sq, dlog_a, derror


class EMCache(NamedTuple):
    m_steps: list[MStepCache]  # one for each iteration
    e_steps: list[EStepCache]  # one fewer: the last iteration's assignments would not be used


def em_routing_forward(
    votes: Array, a_in: Array, beta_a: Array, beta_v: Array, lambdas: list[float],
    variance_floor: float = VARIANCE_FLOOR, r: Array | None = None, over: OverParents = over_parents,
) -> tuple[Array, Array, EMCache]:
    """Fit one Gaussian per parent to its children's votes. [Hinton 2018, procedure 1]

    votes (B, I, J, D), a_in (B, I), beta_a and beta_v (J,), lambdas: inverse temperature of each iteration
    -> poses mu (B, J, D), activations (B, J), cache. Each parent has one beta_v for all of its D pose entries. The
    first assignments are ``r`` (I, J) or (B, I, J), or 1 / J. ``over``: see ``e_step_forward``.

    ``variance_floor`` is added to sigma_sq. It keeps the logarithm and the division finite when all votes agree. It
    also softens the assignments: a product of D narrow Gaussians has such sharp peaks that, with a floor of 1e-4, a
    parent of the trained network keeps about one child, and the network generalises less. With a floor of the order of
    a squared vote a parent has several children.
    """
    r = np.full(votes.shape[:3], 1 / votes.shape[2] if r is None else r, np.result_type(votes, beta_a))  # (B, I, J)
    cache = EMCache([], [])
    for t, lambda_ in enumerate(lambdas):
        mu, sigma_sq, a, log_a, m_step = m_step_forward(r, a_in, votes, beta_a, beta_v, lambda_, variance_floor)
        cache.m_steps.append(m_step)
        if t < len(lambdas) - 1:
            r, e_step = e_step_forward(mu, sigma_sq, log_a, votes, over)
            cache.e_steps.append(e_step)
    return mu, a, cache


def em_routing_backward(dmu: Array, da: Array, cache: EMCache, em_grad: str) -> tuple[Array, Array, Array, Array]:
    """dmu (B, J, D), da (B, J) -> dvotes (B, I, J, D), da_in (B, I), dbeta_a and dbeta_v (J,).

    "exact": the gradient of what the forward pass computes, through every iteration.
    "stop": that of the last M-step alone, with r, the mass, and the mean inside sigma_sq held constant.
    """
    m_steps, e_steps = cache
    dsigma_sq, dlog_a = np.zeros_like(dmu), da * m_steps[-1].a  # a = exp(log_a)
    dr, dvotes, da_in, dbeta_a, dbeta_v = m_step_backward(dmu, dsigma_sq, dlog_a, m_steps[-1], em_grad)
    if em_grad == "stop":
        return dvotes, da_in, dbeta_a, dbeta_v
    for m_step, e_step in zip(m_steps[-2::-1], e_steps[::-1], strict=True):  # from the last but one to the first
        dmu, dsigma_sq, dlog_a, dvotes_e = e_step_backward(dr, e_step)
        dr, dvotes_m, da_in_m, dbeta_a_m, dbeta_v_m = m_step_backward(dmu, dsigma_sq, dlog_a, m_step, em_grad)
        dvotes += dvotes_e
        dvotes += dvotes_m
        da_in += da_in_m
        dbeta_a += dbeta_a_m
        dbeta_v += dbeta_v_m
    return dvotes, da_in, dbeta_a, dbeta_v


# --- Losses: (loss, gradient with respect to the input), means over the batch -----------------------------------------


def softmax_cross_entropy(scores: Array, labels: Array) -> tuple[float, Array]:
    """scores (B, J), labels (B,) -> mean negative log-likelihood, dscores."""
    rows, labels = np.arange(len(scores)), np.reshape(labels, len(scores))
    shifted = scores - scores.max(axis=1, keepdims=True)
    p = np.exp(shifted)
    total = p.sum(axis=1, keepdims=True)
    p /= total
    loss = float((np.log(total[:, 0]) - shifted[rows, labels]).mean())
    p[rows, labels] -= 1
    return loss, p / len(labels)


def spread_loss(activations: Array, labels: Array, margin: float) -> tuple[float, Array]:
    """Sum over wrong classes of max(0, margin - (a_target - a_i))^2. [Hinton 2018, eq. 3]

    activations (B, J), labels (B,) -> mean loss, dactivations.
    """
    rows, labels = np.arange(len(activations)), np.reshape(labels, len(activations))
    shortfall = np.maximum(0, margin - (activations[rows, labels][:, None] - activations))  # (B, J)
    shortfall[rows, labels] = 0  # the sum is over the wrong classes
    da = 2 * shortfall
    da[rows, labels] = -da.sum(axis=1)
    return float((shortfall * shortfall).sum(axis=1).mean()), da / len(labels)


def capsules_loss(loss: str, scores: Array, labels: Array, progress: float) -> tuple[float, Array]:
    """The loss of that name at ``progress``, from 0 to 1, of a training, in which the margin of the spread loss rises
    from 0.2 to 0.9. [Hinton 2018, sec. 4.1]"""
    if loss == "spread":
        return spread_loss(scores, labels, margin=0.2 + 0.7 * progress)
    return softmax_cross_entropy(scores, labels)


# --- The capsule network ----------------------------------------------------------------------------------------------
#
# init_params(rng) -> params; forward(params, x) -> (scores, cache); backward(dscores, cache) -> (grads, dx)

IMAGE_SIZE = 32
N_CLASSES = 5
POSE_SIDE = 4
N_PRIMARY = 8
CONV_CHANNELS = 16
CONV_KERNEL = 5

POSE_SCORE, ACTIVATION_SCORE = 1 / 16, 4.0


def class_scores_forward(mu: Array, a: Array, loss: str) -> Array:
    """mu (..., J, D), a (..., J) -> (..., J): the spread loss looks at activations alone."""
    return a if loss == "spread" else POSE_SCORE * (mu * mu).sum(axis=-1) + ACTIVATION_SCORE * (a - 0.5)


def class_scores_backward(dscores: Array, mu: Array, loss: str) -> tuple[Array, Array]:
    """dscores (B, J) -> dmu (B, J, D), da (B, J)."""
    if loss == "spread":  # scores = a
        return np.zeros_like(mu), dscores
    # scores = |mu|^2 / 16 + 4 (a - 1/2)
    return 2 * POSE_SCORE * dscores[..., None] * mu, ACTIVATION_SCORE * dscores


class CapsulesCache(NamedTuple):
    conv: ConvCache
    relu: Array
    primary: LinearCache
    a_in: Array  # (B, I)
    votes: VotesCache
    routing: EMCache
    mu: Array  # (B, J, D) class poses
    a: Array  # (B, J) class activations


def gaussian(rng: np.random.Generator, dtype: str, std: float, *shape: int) -> Array:
    """Independent, of mean 0."""
    return rng.normal(0, std, shape).astype(dtype)


def capsules_init(rng: np.random.Generator, config: Config) -> Params:
    K, C, E, dtype = CONV_KERNEL, config.in_channels, config.n_features, config.dtype
    J = len(config.classes)
    n_primary_outputs = N_PRIMARY * (POSE_SIDE**2 + 1)
    # Each W_ij starts near the identity, so that at first a vote is about the child's own pose. It is drawn first: the
    # order of the draws decides which weights a seed has.
    class_w = np.eye(POSE_SIDE, dtype=dtype) + gaussian(rng, dtype, 0.1, N_PRIMARY, J, POSE_SIDE, POSE_SIDE)
    return {
        "conv1.w": gaussian(rng, dtype, math.sqrt(2 / (K * K * C)), K, K, C, CONV_CHANNELS),
        "conv1.b": np.zeros(CONV_CHANNELS, dtype),
        "primary.w": gaussian(rng, dtype, math.sqrt(1 / E), E, n_primary_outputs),
        "primary.b": np.zeros(n_primary_outputs, dtype),
        "class.w": class_w,
        "class.beta_a": np.zeros(J, dtype),
        "class.beta_v": np.full(J, config.beta_v_init, dtype),
    }


def capsules_forward(params: Params, x: Array, config: Config) -> tuple[Array, CapsulesCache]:
    """x (B, 32, 32, C) -> class scores (B, J)."""
    conv, conv_cache = conv2d_forward(x, params["conv1.w"], params["conv1.b"], stride=2, pad=2)  # (B, 16, 16, 16)
    hidden, relu_cache = relu_forward(conv)
    flat = hidden.reshape(len(x), -1)  # (B, 4096)
    primary, primary_cache = linear_forward(flat, params["primary.w"], params["primary.b"])  # (B, I * D + I)
    n_pose = N_PRIMARY * POSE_SIDE**2
    pose = primary[:, :n_pose].reshape(-1, N_PRIMARY, POSE_SIDE, POSE_SIDE)  # (B, I, P, P)
    a_in, _ = sigmoid_forward(primary[:, n_pose:])  # (B, I)
    votes, votes_cache = votes_forward(pose, params["class.w"])  # (B, I, J, D)
    mu, a, routing_cache = em_routing_forward(
        votes, a_in, params["class.beta_a"], params["class.beta_v"], config.lambdas, config.variance_floor
    )
    scores = class_scores_forward(mu, a, config.loss)
    return scores, CapsulesCache(conv_cache, relu_cache, primary_cache, a_in, votes_cache, routing_cache, mu, a)


def capsules_backward(
    dscores: Array, cache: CapsulesCache, config: Config, need_dx: bool = False
) -> tuple[Params, Array | None]:
    """dscores (B, J) -> gradients under the parameters' names, and dx (B, 32, 32, C) where needed."""
    grads: Params = {}
    dmu, da = class_scores_backward(dscores, cache.mu, config.loss)
    routed = em_routing_backward(dmu, da, cache.routing, config.em_grad)
    dvotes, da_in, grads["class.beta_a"], grads["class.beta_v"] = routed
    dpose, grads["class.w"] = votes_backward(dvotes, cache.votes)
    dprimary = np.concatenate([dpose.reshape(len(da), -1), sigmoid_backward(da_in, cache.a_in)], axis=1)
    dflat, grads["primary.w"], grads["primary.b"] = linear_backward(dprimary, cache.primary)
    dconv = relu_backward(dflat.reshape(cache.relu.shape), cache.relu)
    dx, grads["conv1.w"], grads["conv1.b"] = conv2d_backward(dconv, cache.conv, need_dx)
    return grads, dx


# --- The CNNs ---------------------------------------------------------------------------------------------------------


def cnn_init(rng: np.random.Generator, config: Config, n_hidden: int) -> Params:
    K, C, E, dtype = CONV_KERNEL, config.in_channels, config.n_features, config.dtype
    J = len(config.classes)
    return {
        "conv1.w": gaussian(rng, dtype, math.sqrt(2 / (K * K * C)), K, K, C, CONV_CHANNELS),
        "conv1.b": np.zeros(CONV_CHANNELS, dtype),
        "hidden.w": gaussian(rng, dtype, math.sqrt(2 / E), E, n_hidden),
        "hidden.b": np.zeros(n_hidden, dtype),
        "out.w": gaussian(rng, dtype, math.sqrt(1 / n_hidden), n_hidden, J),
        "out.b": np.zeros(J, dtype),
    }


def cnn_forward(params: Params, x: Array) -> tuple[Array, Any]:
    """x (B, 32, 32, C) -> class scores (B, J)."""
    conv, conv_cache = conv2d_forward(x, params["conv1.w"], params["conv1.b"], stride=2, pad=2)  # (B, 16, 16, 16)
    features, conv_relu = relu_forward(conv)
    hidden, hidden_cache = linear_forward(features.reshape(len(x), -1), params["hidden.w"], params["hidden.b"])
    units, hidden_relu = relu_forward(hidden)
    scores, out_cache = linear_forward(units, params["out.w"], params["out.b"])
    return scores, (conv_cache, conv_relu, hidden_cache, hidden_relu, out_cache)


def cnn_backward(dscores: Array, cache: Any, need_dx: bool = False) -> tuple[Params, Array | None]:
    """dscores (B, J) -> gradients under the parameters' names, and dx (B, 32, 32, C) where needed."""
    conv_cache, conv_relu, hidden_cache, hidden_relu, out_cache = cache
    grads: Params = {}
    dunits, grads["out.w"], grads["out.b"] = linear_backward(dscores, out_cache)
    dhidden = relu_backward(dunits, hidden_relu)
    dfeatures, grads["hidden.w"], grads["hidden.b"] = linear_backward(dhidden, hidden_cache)
    dconv = relu_backward(dfeatures.reshape(conv_relu.shape), conv_relu)
    dx, grads["conv1.w"], grads["conv1.b"] = conv2d_backward(dconv, conv_cache, need_dx)
    return grads, dx


class Network(NamedTuple):
    """A network as the training loop sees it. ``backward`` gives dx only where ``need_dx`` asks for it."""

    name: str
    init_params: Callable[..., Params]  # rng
    forward: Callable[..., tuple[Array, Any]]  # params, x -> scores, cache
    backward: Callable[..., tuple[Params, Array | None]]  # dscores, cache, need_dx=False -> gradients, dx
    loss: Callable[..., tuple[float, Array]]  # scores, labels, fraction of the training done -> loss, dscores


def make_models(config: Config) -> dict[str, Network]:
    """The capsule network and its two baselines, by name, in the order of the result table."""
    init, rng = functools.partial(capsules_init, config=config), np.random.default_rng(0)
    one, two = (count_params(cnn_init(rng, config, n_hidden)) for n_hidden in (1, 2))
    n_matched = 1 + round((count_params(init(rng)) - one) / (two - one))  # each hidden unit has as many
    networks = [Network(
        "capsules", init, functools.partial(capsules_forward, config=config),
        functools.partial(capsules_backward, config=config), functools.partial(capsules_loss, config.loss),
    )]
    for name, n_hidden in (("cnn", 64), ("cnn_matched", n_matched)):
        init = functools.partial(cnn_init, config=config, n_hidden=n_hidden)
        loss = functools.partial(capsules_loss, "cross-entropy")
        networks.append(Network(name, init, cnn_forward, cnn_backward, loss))
    return {network.name: network for network in networks}


# --- Data: the write-up's objects; and from data/, drawn shapes, smallNORB and toys -----------------------------------

VOXEL_CLASSES = ("cross", "L", "T", "frame", "tripod")
HARD_CLASSES = ("L", "tripod")  # the other objects look the same after half a turn
SHAPE_CLASSES = ("shape 1", "shape 2", "shape 3", "shape 4", "shape 5")
SMALLNORB_CLASSES = ("animal", "human", "airplane", "truck", "car")

Range = tuple[float, float]  # of angles in degrees, both ends included


class Degrees(NamedTuple):
    """A range that a flag takes as it is printed."""

    start: float
    stop: float

    def __str__(self) -> str:
        return f"{self.start:g}:{self.stop:g}"


AROUND, ANY_TILT = Degrees(0.0, 360.0), Degrees(-90.0, 90.0)


class Split(NamedTuple):
    """A labelled set of views."""

    images: Array  # (N, H, W, C)
    labels: Array  # (N,) class numbers
    azimuths: Array  # (N,) degrees
    elevations: Array  # (N,) degrees
    objects: Array  # (N,) which object of its class in which lighting, as one number; 0 of voxels and shapes


class Data(NamedTuple):
    train: Split
    familiar: Split  # the training range, with new noise (voxels, shapes) or of other objects (smallNORB, toys)
    held_out: Split


def in_range(angles: Any, bounds: Range) -> Any:
    """Which angles lie in a closed range, modulo 360: elevations, from -90 to 90, are never a full circle apart."""
    return (angles - bounds[0]) % 360 <= bounds[1] - bounds[0]


def padded(objects: list[Array]) -> tuple[Array, Array]:
    """Objects, each of points (Q, 3), in one array (n, Q, 3), and a mask (n, Q) over the padding."""
    lengths = np.array([len(points) for points in objects])
    points = np.stack([np.pad(points, ((0, lengths.max() - len(points)), (0, 0))) for points in objects])
    return points, np.arange(lengths.max()) < lengths[:, None]


def _rod(axis: int, start: float, stop: float, n: int, at: tuple[float, float, float] = (0, 0, 0)) -> Array:
    """(n, 3) points evenly spaced along one axis; the two other coordinates are those of ``at``."""
    points = np.tile(np.asarray(at, dtype=float), (n, 1))
    points[:, axis] = np.linspace(start, stop, n)
    return points


def voxel_points() -> tuple[Array, Array]:
    """The five objects in [-1, 1]^3 as points (J, Q, 3) and a mask (J, Q) over the padding."""
    x, y, z = range(3)
    origin, ends = np.zeros((1, 3)), (-0.7, 0.7)
    cross = [origin, *(_rod(axis, *ends, 5)[[0, 1, 3, 4]] for axis in (x, y, z))]
    ell = [_rod(x, -0.8, 0.8, 9, (0, -0.7, -0.6)), _rod(y, -0.6, 0.8, 8, (-0.8, 0, -0.6)),
           _rod(z, -0.5, 0.5, 5, (-0.8, -0.7, 0))]
    tee = [_rod(x, -0.8, 0.8, 9, (0, 0.7, 0)), _rod(y, -0.7, 0.6, 7), _rod(z, -0.4, 0.4, 5, (0, 0.7, 0))]
    frame = [_rod(axis, *ends, 5, tuple(np.insert([s, t], axis, 0))) for axis in (x, y, z) for s in ends for t in ends]
    prong = np.linspace(0.17, 0.85, 5)[:, None]
    tripod = [origin, *(prong * direction for direction in np.array([[1, 0, 0], [0, 1, 0], [-0.7, -0.7, -0.7]]))]
    return padded([np.concatenate(parts) for parts in (cross, ell, tee, frame, tripod)])


@functools.lru_cache(maxsize=4)
def points_of(config: Viewpoints) -> tuple[Array, Array]:
    """The write-up's objects, or the five shapes of a seed in the same form. Cached: do not write to them."""
    if config.dataset == "voxels":
        return voxel_points()
    seed = config.seed if config.shapes_seed is None else config.shapes_seed
    return padded(from_data("shapes").draw_shapes(generator(seed, Stream.OBJECTS), N_CLASSES))


MARGIN, BLOB_SIGMA, NOISE = 4, 1.6, 0.04  # of an image of an object: in pixels, pixels, fractions of white


def render_voxels(
    labels: Array, azimuths: Array, elevations: Array, rng: np.random.Generator | None,
    objects: tuple[Array, Array] | None = None,
) -> Array:
    """Draw one view per entry: labels (N,), angles (N,) in degrees -> images (N, 32, 32, 1) in [0, 1]. The ``objects``
    are those of ``voxel_points``, or others in its form.

    An object turns about y by the azimuth, then about x by the elevation, and is projected along z with ``MARGIN``
    pixels left free round [-1, 1]^2. A point is a Gaussian blob of ``BLOB_SIGMA`` pixels, its brightness linear in
    depth from 0.6 (z = -1, far) to 1.0 (z = +1, near). The blobs are summed and clipped; ``rng`` (or None) draws noise.
    """
    points, mask = objects or voxel_points()
    azimuth, elevation = np.deg2rad(azimuths), np.deg2rad(elevations)
    ca, sa, ce, se = np.cos(azimuth), np.sin(azimuth), np.cos(elevation), np.sin(elevation)
    zero = np.zeros_like(ca)
    rotation = np.stack(  # R_x(elevation) R_y(azimuth)
        [ca, zero, sa, se * sa, ce, -se * ca, -ce * sa, se, ce * ca], axis=-1
    ).reshape(-1, 3, 3)  # (N, 3, 3)
    x, y, z = np.moveaxis(points[labels] @ rotation.transpose(0, 2, 1), -1, 0)  # each (N, Q)

    pixels = np.arange(IMAGE_SIZE)
    centre, scale = (IMAGE_SIZE - 1) / 2, IMAGE_SIZE / 2 - MARGIN
    brightness = mask[labels] * (0.8 + 0.2 * z)

    # A round Gaussian is a product of a row profile and a column profile, so the sum over points is one matrix product.
    def profile(position: Array) -> Array:
        return np.exp(-0.5 * ((pixels - position[..., None]) / BLOB_SIGMA) ** 2)  # (N, Q, 32)

    rows = profile(centre - scale * y) * brightness[..., None]
    images = np.clip(rows.transpose(0, 2, 1) @ profile(centre + scale * x), 0, 1)
    if rng is not None:
        images = np.clip(images + rng.normal(0, NOISE, images.shape), 0, 1)
    return images[..., None].astype(np.float32)


def standardized(images: Array) -> Array:
    """Images (N, H, W, C) -> the same, each channel of each image with zero mean and unit variance.
    [Hinton 2018, sec. 5]"""
    x = np.array(images.transpose(0, 3, 1, 2), order="C")  # (N, C, H, W)
    largest = np.abs(x).max(axis=(2, 3), keepdims=True)
    x -= x.mean(axis=(2, 3), keepdims=True)
    deviation = x.std(axis=(2, 3), keepdims=True)
    x /= np.where(deviation > 1e-6 * largest, deviation + 1e-6, np.inf)  # an image of one grey level becomes 0
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1))


def evenly_spaced(angles: Range, n: int) -> Array:
    """``n`` angles over a closed range; over a full circle the end is left out, being the start again."""
    low, high = angles
    return np.linspace(low, high, n, endpoint=high - low < 360)


def voxel_split(
    config: Viewpoints, labels: Array, azimuths: Array, elevations: Array, rng: np.random.Generator | None
) -> Split:
    """One image per entry of labels, azimuths and elevations (N,), as ``config`` prepares it."""
    images = render_voxels(labels, azimuths, elevations, rng, points_of(config))
    images = standardized(images) if config.standardize == "image" else images
    return Split(images, labels, azimuths, elevations, np.zeros_like(labels))


def voxel_views(
    config: Viewpoints, azimuths: Array, elevations: Array, n_per_view: int, rng: np.random.Generator | None
) -> Split:
    """Every class at every (azimuth, elevation), ``n_per_view`` noisy images of each."""
    grid = np.meshgrid(np.arange(N_CLASSES), azimuths, elevations, np.arange(n_per_view), indexing="ij")
    label, azimuth, elevation, _ = (g.reshape(-1) for g in grid)
    return voxel_split(config, label, azimuth, elevation, rng)


def make_voxel_data(config: Viewpoints) -> Data:
    """Training, familiar and held-out sets: by default 450, 180 and 180 images."""

    def views(key: int, azimuths: Array, elevations: Array, n_per_view: int) -> Split:
        return voxel_views(config, azimuths, elevations, n_per_view, generator(config.seed, Stream.DATA, key))

    c = config
    trained = evenly_spaced(c.train_azimuths, c.n_train_views), evenly_spaced(c.train_elevations, c.n_elev)
    n_others = c.n_test_views if c.held_out_angle == "azimuth" else c.n_train_views  # the azimuths of the training
    others = evenly_spaced(c.test_azimuths, n_others), evenly_spaced(c.test_elevations, c.n_elev)
    return Data(train=views(0, *trained, c.n_per_combo), familiar=views(1, *trained, 2), held_out=views(2, *others, 2))


Half = tuple[str, Sequence[int] | None]  # an official set, "training" or "testing", and objects of it (None: all)
HALVES: tuple[Half, Half] = ("training", None), ("testing", None)


def norb_folder(config: Viewpoints) -> Path:
    """That of the six files. The toys of a seed are drawn into the cache; from there on they are smallNORB."""
    if config.dataset == "toys":
        return Path(from_data("toy_norb").cached_toys(None, config.seed))
    return Path(config.data_dir or "")


def read_smallnorb(
    data_dir: Path, half: Half, standardize: str = "image", azimuth_range: Range = AROUND,
    elevation_range: Range = ANY_TILT,
) -> Split:
    """The pairs of an official set in the ranges, (N, 48, 48, 2): 2x2 means, then standardised ("image"), or as
    fractions of white ("none"). [Hinton 2018, sec. 5] Raises UserError for a file that is missing, damaged or swapped,
    and where no pair is left."""
    def keep(azimuths: Array, elevations: Array) -> Array:
        return np.asarray(in_range(azimuths, azimuth_range) & in_range(elevations, elevation_range))

    images, *labelled = from_data("norb_files").read_views(data_dir, *half, keep)
    if not len(images):
        raise UserError(f"no smallNORB image in {data_dir} falls into the ranges {azimuth_range} and {elevation_range}"
                        " of azimuths and elevations")
    return Split(standardized(images) if standardize == "image" else images / np.float32(255), *labelled)


def load_smallnorb(config: Viewpoints, halves: tuple[Half, Half] = HALVES) -> Data:
    """The paper's split: training objects seen from the training range; other objects from both ranges."""
    c, folder, (train, test) = config, norb_folder(config), halves
    return Data(
        train=read_smallnorb(folder, train, c.standardize, c.train_azimuths, c.train_elevations),
        familiar=read_smallnorb(folder, test, c.standardize, c.train_azimuths, c.train_elevations),
        held_out=read_smallnorb(folder, test, c.standardize, c.test_azimuths, c.test_elevations),
    )


def make_data(config: Viewpoints) -> Data:
    return make_voxel_data(config) if config.is_rendered else load_smallnorb(config)


def crop(images: Array, rng: np.random.Generator | None) -> Array:
    """Images (B, H, W, C) -> (B, 32, 32, C): what the network is given.

    With ``rng`` (training) a crop is taken at random, and contrast (0.8 to 1.2) and brightness (-0.2 to 0.2, in
    standard deviations if the images are standardised) are drawn for each image; without (test) the crop is central.
    [Hinton 2018, sec. 5]; the amounts are ours. Images that have the network's size already, or less, pass unchanged:
    voxels and shapes do.
    """
    n, side = images.shape[:2]
    slack = side - IMAGE_SIZE
    if slack <= 0:
        return images
    if rng is None:
        return images[:, slack // 2 : slack // 2 + IMAGE_SIZE, slack // 2 : slack // 2 + IMAGE_SIZE]
    window = np.arange(IMAGE_SIZE)
    row, column = rng.integers(0, slack + 1, (2, n, 1)) + window  # each (B, 32)
    crops = images[np.arange(n)[:, None, None], row[:, :, None], column[:, None, :]]
    contrast, brightness = rng.uniform(0.8, 1.2, (n, 1, 1, 1)), rng.uniform(-0.2, 0.2, (n, 1, 1, 1))
    return (crops * contrast + brightness).astype(images.dtype)


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


def adamw_of(config: Any) -> Callable[..., None]:
    """AdamW in its plain form, or its fast twin where the folder is there."""
    return adamw_step if config.plain or not HAS_FAST else optimizers.adamw_step


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

MAX_IMAGES = 50_000  # of one set of voxels or shapes, which is drawn at once
OF_VOXELS: dict[str, Any] = {
    "train_azimuths": Degrees(0.0, 150.0), "test_azimuths": Degrees(200.0, 330.0),
    "train_elevations": Degrees(10.0, 50.0), "test_elevations": Degrees(10.0, 50.0), "standardize": "none",
}
OF_NORB: dict[str, Any] = {  # [Hinton 2018, sec. 5.1]
    "train_azimuths": Degrees(300.0, 400.0), "test_azimuths": Degrees(60.0, 280.0),
    "train_elevations": Degrees(30.0, 70.0), "test_elevations": Degrees(30.0, 70.0), "standardize": "image",
}
VIEWS = {"voxels": OF_VOXELS, "shapes": OF_VOXELS | {"standardize": "image"}, "smallnorb": OF_NORB, "toys": OF_NORB}


def angles_in(low: float, high: float) -> Setting:
    """A range of degrees, such as 0:150, of at most a full circle, both ends between ``low`` and ``high``."""

    def convert(given: Any) -> Degrees:
        try:
            angles = Degrees(*map(float, given.split(":") if isinstance(given, str) else given))
        except (TypeError, ValueError):
            raise UsageError(f"{given!r} is not START:STOP in degrees, such as 0:150") from None
        if not low <= angles.start <= angles.stop <= min(high, angles.start + 360):
            bounds = f"between {low:g} and {high:g}, of at most a full circle, with START first"
            raise UsageError(f"{given} is no range of degrees {bounds}")
        return angles

    return Setting(convert, "A:B")


ANGLES, TILTS = angles_in(-360, 720), angles_in(-90, 90)


@dataclasses.dataclass(frozen=True)
class Viewpoints(Settings):
    """The data: which views are trained on and which are held out. Angles are in degrees; a range is closed and, for
    azimuths, may pass 360. Where elevation is held out, both sets have the azimuths of the training."""

    dataset: str = setting("voxels", ("voxels", "shapes", "smallnorb", "toys"), "Use the write-up's objects; shapes"
        " that the seed draws together with the azimuth at which the ranges begin; the smallNORB files; or toys, which"
        " the seed draws in their format, in about a minute, into the cache.", usual=True, group="data")
    data_dir: Path | None = setting(None, FOLDER, "Folder of the six official smallNORB files, gzipped or not.",
        usual=True)
    seed: int = setting(0, int_in(0, 2**32 - 1),
        "Seed of the data, the initial weights and the order of the images.", usual=True)
    shapes_seed: int | None = setting(None, int_in(0, 2**32 - 1), "Draw the objects of --dataset shapes, and the"
        " azimuth at which the ranges begin, with this seed.", "as --seed")
    train_azimuths: Range = setting(None, ANGLES, "Azimuths of the training views, in degrees.",
        "0:150, smallnorb and toys 300:400; with elevations held out 0:360")
    test_azimuths: Range = setting(None, ANGLES, "Azimuths that are held out, in degrees.",
        "200:330, smallnorb and toys 60:280; with elevations held out as --train-azimuths", usual=True)
    train_elevations: Range = setting(None, TILTS, "Elevations of the training views. With other"
        " --test-elevations, hold elevations out instead of azimuths.", "10:50, smallnorb and toys 30:70")
    test_elevations: Range = setting(None, TILTS, "Elevations that are held out; needs --train-elevations.",
        "10:50, smallnorb and toys 30:70")
    n_train_views: int = setting(6, int_in(1, 1000), "Train on N azimuths.")
    n_test_views: int = setting(6, int_in(1, 1000), "Hold out N azimuths. Where elevations are held out, N is not used:"
        " every set has --n-train-views azimuths.")
    n_elev: int = setting(3, int_in(1, 1000), "Use N elevations in every set.")
    n_per_combo: int = setting(5, int_in(1, 1000), "Draw N images of each training view.")
    standardize: str = setting(None, ("none", "image"), "With image, bring each image (channel of a stereo pair) to"
        " mean zero and unit variance.", "image, voxels none")

    def dependent(self) -> dict[str, Any]:
        found = dict(VIEWS.get(self.dataset, OF_VOXELS))
        if (self.train_elevations is None) != (self.test_elevations is None):
            raise SettingError("test_elevations", "give --train-elevations and --test-elevations both or none")
        if self.train_elevations is not None and self.train_elevations != self.test_elevations:
            azimuths = self.train_azimuths or AROUND
            if self.test_azimuths not in (None, azimuths):
                raise SettingError("test_azimuths", "elevation is held out already")
            found["train_azimuths"] = found["test_azimuths"] = azimuths
        return found

    def check(self) -> None:
        if (self.dataset == "smallnorb") != (self.data_dir is not None):
            raise SettingError("data_dir", "goes with --dataset smallnorb: the folder of the six official files")
        for name in ("n_train_views", "n_test_views", "n_elev", "n_per_combo"):
            if not self.is_rendered and getattr(self, name) != getattr(Viewpoints, name):
                raise SettingError(name, "applies to --dataset voxels and shapes alone")
        if self.dataset != "shapes" and self.shapes_seed is not None:
            raise SettingError("shapes_seed", "needs --dataset shapes")
        if self.train_azimuths is None:  # nothing is held out
            return
        angle, rest = self.held_out_angle, "azimuths (modulo 360)" if self.held_out_angle == "azimuth" else "elevations"
        trained, tested = getattr(self, f"train_{angle}s"), getattr(self, f"test_{angle}s")
        if in_range(tested[0], trained) or in_range(trained[0], tested):  # they have an angle in common
            raise SettingError(f"test_{angle}s", f"overlaps --train-{rest}")
        n = N_CLASSES * self.n_elev * max(self.n_train_views * max(self.n_per_combo, 2), 2 * self.n_test_views)
        if n > MAX_IMAGES:
            raise SettingError("n_elev", f"a set of {n:,} images is above the limit of {MAX_IMAGES:,}")

    @property
    def held_out_angle(self) -> str:
        """The angle whose range differs between training and test."""
        return "azimuth" if self.train_elevations == self.test_elevations else "elevation"

    @property
    def classes(self) -> tuple[str, ...]:
        return {"voxels": VOXEL_CLASSES, "shapes": SHAPE_CLASSES}.get(self.dataset, SMALLNORB_CLASSES)

    @property
    def in_channels(self) -> int:
        return 1 if self.is_rendered else 2

    @property
    def is_rendered(self) -> bool:
        """Whether there is a view of every angle."""
        return self.dataset in ("voxels", "shapes")


@dataclasses.dataclass(frozen=True)
class Config(Viewpoints):
    """One run. Where --lr, --n-epochs or --weight-decay is given and the CNNs' own is not, it holds for all models.
    The defaults are the winners of the searches on drawn shapes and new azimuths (docs/method.md)."""

    n_epochs: int = setting(None, int_in(1, 100_000), "Train for N passes over the training set.", "80", usual=True,
        group="training")
    cnn_epochs: int = setting(None, int_in(1, 100_000), "The same for the CNNs.", "80, but as a given --n-epochs")
    batch_size: int = setting(32, int_in(1, 4096), "Take each step on N images.")
    lr: float = setting(None, float_in(1e-9, 10), "Learning rate of Adam; a given one holds for all models.",
        "0.001, of the CNNs 0.0005", usual=True)
    cnn_lr: float = setting(None, float_in(1e-9, 10), "The same for the CNNs.", "0.0005, but as a given --lr")
    weight_decay: float = setting(None, float_in(0, 100),
        "A step shrinks the weights of conv1 and the dense layers by lr * X; a given X holds for all models.",
        "1, of the CNNs 0")
    cnn_weight_decay: float = setting(None, float_in(0, 100), "The same for the CNNs.",
        "0, but as a given --weight-decay")
    em_iters: int = setting(2, int_in(1, 20), "Route in N iterations. For more than 3, also give"
        " --variance-floor 100 --beta-v-init -2.6 --lr 0.0005: else a parent ends with one child, and learning stops.",
        paper="3 is the best of its table 1", group="capsules")
    em_grad: str = setting("exact", ("exact", "stop"), "Differentiate through all iterations, or through the last"
        " M-step alone, with constant assignments and mass.")
    variance_floor: float = setting(VARIANCE_FLOOR, float_in(1e-12, 1e6),  # below, a vote's rounding error gives NaN
        "Add X to every variance of a routing iteration.")
    beta_v_init: float = setting(-1.0, float_in(-10, 10),
        "Initial beta_v. Below -log(variance floor) / 2, votes that agree activate a capsule.")
    loss: str = setting("spread", ("spread", "cross-entropy"), "Loss of the capsules: the paper's spread loss of the"
        " activations, or cross-entropy of the score. The CNNs always have cross-entropy.")
    dtype: str = setting("float32", ("float32", "float64"), "Number format of all arithmetic.")
    plain: bool = setting(False, bool, "Compute all in its plain form, without fast twins.")

    n_features: ClassVar[int] = (IMAGE_SIZE // 2) ** 2 * CONV_CHANNELS  # of the flattened conv1 map

    def dependent(self) -> dict[str, Any]:
        own = {"n_epochs": 80, "cnn_epochs": self.n_epochs or 80, "lr": 1e-3, "cnn_lr": self.lr or 5e-4,
               "weight_decay": 1.0, "cnn_weight_decay": self.weight_decay or 0.0}
        return super().dependent() | own

    @property
    def length_is_free(self) -> bool:
        """The margin of the spread loss depends on ``n_epochs``."""
        return self.loss == "cross-entropy"

    @property
    def lambdas(self) -> list[float]:
        """The inverse temperature of each iteration, 1. The paper raises it, and does not give it."""
        return [1.0] * self.em_iters


MODEL_NAMES = ("capsules", "cnn", "cnn_matched")


@dataclasses.dataclass(frozen=True)
class Options(RunOptions):
    models: tuple[str, ...] = setting(MODEL_NAMES, list_of(one_of(MODEL_NAMES)), "Train only these.", usual=True)


# --- Tests and training loop ------------------------------------------------------------------------------------------

DECAYED = {"conv1.w", "primary.w", "hidden.w", "out.w"}  # by weight decay: no bias, and no parameter of EM routing
EVALUATION_BATCH = 256  # images that are classified at a time


def forward_in_batches(model: Network, params: Params, images: Array) -> Iterator[tuple[Array, Any]]:
    """Scores and cache of each batch of images (N, H, W, C), cropped as for a test."""
    for start in range(0, len(images), EVALUATION_BATCH):
        x = crop(images[start : start + EVALUATION_BATCH], None)
        yield model.forward(params, x.astype(next(iter(params.values())).dtype, copy=False))


def predict_scores(model: Network, params: Params, images: Array) -> Array:
    """Class scores (N, J) of images (N, H, W, C)."""
    return np.concatenate([scores for scores, _ in forward_in_batches(model, params, images)])


def fraction_right(scores: Array, labels: Array) -> float:
    """The accuracy; NaN where a score is not finite, as the highest one says nothing then."""
    right = scores.argmax(axis=1) == np.reshape(labels, len(scores))
    return float(right.mean()) if np.isfinite(scores).all() else math.nan


def class_accuracies(config: Viewpoints, labels: Array, right: Array) -> dict[str, float]:
    """Of held-out views, of which those of ``right`` (N,) are classified correctly: on each class, such as
    class_L_accuracy; where a seed draws the objects, on the one of the least accuracy. For held-out azimuths also on L
    and tripod: cross, T and frame look the same after half a turn, and a network that knows them from the training
    views and nothing else classifies 0.6 of all images right."""
    found = {f"class_{config.classes[c]}_accuracy": float(right[labels == c].mean()) for c in np.unique(labels)}
    if config.dataset == "shapes":
        return {"hardest_object_accuracy": min(found.values())}
    hard = np.isin(labels, [VOXEL_CLASSES.index(name) for name in HARD_CLASSES])
    if config.dataset == "voxels" and config.held_out_angle == "azimuth" and hard.any():
        found["hard_accuracy"] = float(right[hard].mean())
    return found


def angle_accuracies(config: Viewpoints, angles: Array, right: Array) -> dict[str, float]:
    """The accuracy at each of the ``angles`` (N,), such as azimuth_200_accuracy; in drawn shapes 0 degrees is where the
    ranges begin."""
    return {f"{config.held_out_angle}_{at:g}_accuracy": float(right[angles == at].mean()) for at in np.unique(angles)}


def true_class_mass(model: Network, params: Params, split: Split) -> float:
    """Fraction of the assigned mass that the true class has in the last iteration, mean over a set; 1/5 by chance."""
    passes = forward_in_batches(model, params, split.images)
    mass = np.concatenate([cache.routing.m_steps[-1].mass for _, cache in passes])  # (N, J)
    return float((mass[np.arange(len(mass)), split.labels] / mass.sum(axis=1)).mean())


def evaluate(model: Network, params: Params, data: Data) -> dict[str, float]:
    """Fraction of the familiar and of the held-out views that is classified correctly."""
    parts = {"familiar_accuracy": data.familiar, "held_out_accuracy": data.held_out}
    scores = {name: predict_scores(model, params, part.images) for name, part in parts.items()}
    return {name: fraction_right(scores[name], part.labels) for name, part in parts.items()}


def steps_per_epoch(config: Any, data: Any) -> int:
    return math.ceil(len(data.train.labels) / config.batch_size)


def of_model(name: str, config: Any) -> tuple[int, float, float]:
    """Epochs, learning rate and weight decay of a model: those of the CNNs where its name begins with cnn."""
    c, is_cnn = config, name.startswith("cnn")
    return (c.cnn_epochs, c.cnn_lr, c.cnn_weight_decay) if is_cnn else (c.n_epochs, c.lr, c.weight_decay)


@functools.lru_cache(maxsize=2)
def permutation(n: int, seed: int, *key: int) -> Array:
    """A random order of 0 to n - 1, the same for the same seed and key (the epoch). Cached: do not write to it."""
    return generator(seed, Stream.SHUFFLE, *key).permutation(n)


def train(model: Network, config: Config, data: Data, state: TrainState, callback: Callback) -> None:
    """Train ``state`` in place to the model's number of epochs. Raises UserError where the loss stops being finite."""
    n_epochs, lr, weight_decay = of_model(model.name, config)
    n, per_epoch = len(data.train.labels), steps_per_epoch(config, data)
    n_steps = per_epoch * n_epochs
    update = adamw_of(config)
    while state.step < n_steps:
        started = time.perf_counter()
        epoch, position = divmod(state.step, per_epoch)
        batch = permutation(n, config.seed, epoch)[position * config.batch_size :][: config.batch_size]
        x = crop(data.train.images[batch], generator(config.seed, Stream.SHUFFLE, epoch, position))
        progress = state.step / max(1, n_steps - 1)
        with np.errstate(all="ignore"):  # a loss that is not finite is reported in words
            scores, cache = model.forward(state.params, x.astype(config.dtype, copy=False))
            loss, dscores = model.loss(scores, data.train.labels[batch], progress)
            grads, _ = model.backward(dscores, cache)
            update(state, [grads], lr, weight_decay, DECAYED)
        state.add({"train_loss": loss}, started, weight=len(batch))
        if epoch_ended := state.step % per_epoch == 0:
            with np.errstate(all="ignore"):
                state.end_epoch(evaluate(model, state.params, data))
        callback(state, epoch_ended)


# --- A run from beginning to end --------------------------------------------------------------------------------------

EXPERIMENT = "smallnorb_novel_viewpoint"


def train_all(config: Config, data: Data, options: Any = NO_OPTIONS, **more: Any) -> dict[str, TrainState]:
    """Train the models one after the other, and return their states. ``more`` as in ``Session``."""
    session = Session(EXPERIMENT, config, make_models, options, **more)
    for model, state in session.trainings(lambda name: steps_per_epoch(config, data) * of_model(name, config)[0]):
        train(model, config, data, state, session.after_step)
    return session.trained


def make_result(config: Config, states: Mapping[str, TrainState], data: Data) -> dict[str, Any]:
    """The JSON of a run; accuracies are fractions, those of the last epoch."""
    models: dict[str, dict[str, Any]] = {}
    networks, angle = make_models(config), f"{config.held_out_angle}s"
    for name, state in states.items():
        familiar, held_out = state.history["familiar_accuracy"][-1], state.history["held_out_accuracy"][-1]
        models[name] = model_metrics(state, drop=familiar - held_out)
        if name == "capsules":  # on the familiar views
            models[name]["true_class_mass"] = true_class_mass(networks[name], state.params, data.familiar)
        for part in (data.familiar, data.held_out):
            right = predict_scores(networks[name], state.params, part.images).argmax(axis=1) == part.labels
            models[name] |= angle_accuracies(config, getattr(part, angle), right)
        models[name] |= class_accuracies(config, data.held_out.labels, right)
    return result_document(EXPERIMENT, config, config.dataset, models, states, "held_out_accuracy")


def run(config: Config, options: Any = NO_OPTIONS, **more: Any) -> tuple[dict[str, Any], dict[str, TrainState]]:
    """Data, trainings, tests -> the result and the states. ``more`` as in ``Session``."""
    with blas_threads(options.threads):
        data = make_data(config)
        states = train_all(config, data, options, **more)
        return make_result(config, states, data), states


def describe(config: Viewpoints) -> str:
    """One line: what is held out."""
    angle = f"{config.held_out_angle}s"
    train_range, test_range = getattr(config, f"train_{angle}"), getattr(config, f"test_{angle}")
    return f"{config.dataset}: {angle} {test_range} held out, {train_range} trained on"


def format_table(result: dict[str, Any]) -> str:
    lines = [f"{'model':<12} {'familiar':>8} {'held out':>8} {'drop':>6} {'parameters':>10} {'seconds':>8}"]
    lines += [
        f"{name:<12} {m['familiar_accuracy']:8.3f} {m['held_out_accuracy']:8.3f} {m['drop']:6.3f}"
        f" {m['n_params']:10,} {m['train_seconds']:8.2f}"
        for name, m in result["models"].items()
    ]
    return "\n".join(lines)


@script
def main(argv: Sequence[str]) -> None:
    config, options, _ = parse(
        Config, Options, argv, "Train matrix capsules and two CNNs on a range of viewpoints, and test them on another.",
        ("", "Three models on the write-up's objects, azimuths 200 to 330 degrees held out: about 10 seconds."),
        ("--train-elevations 10:35 --test-elevations 40:70", "With elevations held out: about 10 seconds."),
        ("--em-grad stop", "EM routing without the gradient through its iterations: about 10 seconds."),
    )
    require_own_outputs(EXPERIMENT, config, options)
    result, states = run(config, options, names=options.models)
    of_cnns = f" (the CNNs {config.cnn_epochs})" if config.cnn_epochs != config.n_epochs else ""
    heading = f"{describe(config)}; seed {config.seed}, {config.n_epochs} epochs{of_cnns}"
    report(result, f"{heading}\n{format_table(result)}", options, states)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
