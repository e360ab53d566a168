"""The fast twin of conv_matrix_capsules.py's EM routing over receptive fields: by moments of the votes, in the BLAS.

An iteration never forms V - mu. It multiplies the votes V and their squares by small arrays. With weight = r a_in /
mass, mu = sum_m weight V and sigma^2 = sum_m weight V^2 - mu^2 (up to MASS_FLOOR), and the distance is
(V - mu)^2 / sigma^2 = V^2 / sigma^2 - 2 V mu / sigma^2 + mu^2 / sigma^2. In float32 the differences of moments would
cancel for votes far from zero. So v = V - shift and mean = mu - shift are relative to one of a field's votes.
Votes that lie 1e6 apart beside a floor of 1e-4 are beyond float32: their gradient may overflow.
Each step adds a term weight_m (constant_d + slope_d v) to the gradient of v; votes_backward sums these.

The votes lie in memory that is used again in every step. They would take most of a cache, so the backward pass computes
them once more.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Array = np.ndarray

# Dimension letters
#   B  images of a batch              H, W    rows and columns of a map       Ho, Wo  the same of the map above it
#   K  side of a field                I       capsule types below             J       capsule types above
#   P  side of a pose matrix (4)      D       pose entries, P * P             R       terms of the votes' gradient
#   L  receptive fields, B * Ho * Wo  M       children of a field, K * K * I

MASS_FLOOR = 1e-8  # as in smallnorb_novel_viewpoint.py


class Memory(threading.local):
    """A thread's arrays by name and type, whose memory is reused in every step: allocating a large array costs page
    faults every time. An array is uninitialised, and valid until the next call with its name."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, np.dtype], Array] = {}

    def __call__(self, name: str, dtype: np.dtype, *shape: int) -> Array:
        size = math.prod(shape)
        block = self.blocks.get((name, dtype))
        if block is None or block.size < size:
            block = self.blocks[name, dtype] = np.empty(size, dtype)
        return block[:size].reshape(shape)


memory = Memory()


# --- Receptive fields -------------------------------------------------------------------------------------------------


class Fields(NamedTuple):
    """Receptive fields of K x K positions, ``stride`` apart, on a map of H x W, without padding."""

    size: tuple[int, int]  # H, W
    out: tuple[int, int]  # Ho, Wo
    k: int
    stride: int
    position: Array  # (Ho, Wo, K, K) index of each field's positions on the flattened map
    n_fields: Array  # (Ho, Wo, K, K) how many fields contain it
    n_covered: int  # positions of the map that lie in a field


@functools.lru_cache(maxsize=64)
def receptive_fields(height: int, width: int, k: int, stride: int) -> Fields:
    fields = sliding_window_view(np.arange(height * width).reshape(height, width), (k, k))
    position = fields[::stride, ::stride].copy()  # (Ho, Wo, K, K)
    n_fields = np.bincount(position.ravel())  # (H * W,) or up to the last position in a field
    out = position.shape[:2]
    return Fields((height, width), out, k, stride, position, n_fields[position], int((n_fields > 0).sum()))


def gather(x: Array, fields: Fields) -> Array:
    """x (B, H, W, ...) -> the entries of every field (B, Ho, Wo, K, K, ...)."""
    return np.take(x.reshape(len(x), math.prod(fields.size), *x.shape[3:]), fields.position, axis=1)


def scatter(x: Array, fields: Fields, combine: np.ufunc = np.add) -> Array:
    """x (B, Ho, Wo, K, K, ...) -> (B, H, W, ...), combined over all fields that contain a position. With np.add it is
    the backward pass of ``gather``."""
    out = np.full((len(x), *fields.size, *x.shape[5:]), 0 if combine is np.add else -np.inf, x.dtype)
    views = sliding_window_view(out, (fields.k, fields.k), axis=(1, 2), writeable=True)
    views = views[:, :: fields.stride, :: fields.stride]  # (B, Ho, Wo, ..., K, K); a place of the kernel at a time
    for i, j in itertools.product(range(fields.k), range(fields.k)):
        combine(views[..., i, j], x[:, :, :, i, j], out=views[..., i, j])
    return out


def over_fields(x: Array, fields: Fields, combine: np.ufunc) -> Array:
    """x (L, M), a number for each child of each field -> (L, M), combined over all fields that contain the child."""
    k = fields.k
    if fields.out == (1, 1):  # each child lies in one field
        return x
    by_field = x.reshape(-1, *fields.out, k, k, x.shape[1] // k**2)  # (B, Ho, Wo, K, K, I)
    return gather(scatter(by_field, fields, combine), fields).reshape(x.shape)


# --- Votes ------------------------------------------------------------------------------------------------------------


def kronecker_forward(w: Array) -> Array:
    """w (K, K, I, J, P, P) -> (K, K, I, D, J * D): a pose, as a row of D entries, times this is pose @ w for all J."""
    k, _, n_in, n_out, p, _ = w.shape
    kron = np.zeros((k, k, n_in, p, p, n_out, p, p), w.dtype)
    for row in range(p):
        kron[:, :, :, row, :, :, row] = w.swapaxes(3, 4)
    return kron.reshape(k, k, n_in, p * p, n_out * p * p)


def kronecker_backward(dkron: Array, p: int) -> Array:
    """dkron (K, K, I, D, J * D) -> dw (K, K, I, J, P, P)."""
    blocks = dkron.reshape(*dkron.shape[:3], p, p, -1, p, p)
    # kron[:, :, :, row, :, :, row] = w
    return np.einsum("klirajrb->klijab", blocks)


class Votes(NamedTuple):
    """The votes of all children of all fields, in reused memory: valid until those of another layer are computed."""

    v: Array  # (L, J, M, D) votes - shift
    v_sq: Array  # (L, J, M, D) their squares
    shift: Array  # (L, J, D) the vote of the child in the middle of the M


def votes_forward(pose: Array, kron: Array, offset: Array | None) -> Votes:
    """V = pose W as matrices: pose (L, K, K, I, D), kron (K, K, I, D, J * D), see ``kronecker_forward`` -> votes.

    kron may be (1, 1, I, D, J * D): the same at all positions of a field. offset (K, K, P, P), None for no offset, is
    added to the votes of each position.
    """
    (L, K, _, I, D), J = pose.shape, kron.shape[4] // pose.shape[4]
    M = K * K * I
    v, v_sq = (memory(name, pose.dtype, L, M, J, D) for name in ("votes", "squares"))
    rows, out = pose.transpose(1, 2, 3, 0, 4), v.reshape(L, K, K, I, J * D).transpose(1, 2, 3, 0, 4)
    np.matmul(rows, kron, out=out)  # (K, K, I, L, J * D)
    if offset is not None:
        v += np.repeat(offset.reshape(K * K, 1, D), I, axis=0)  # (M, 1, D)
    columns = v.reshape(L, M, J * D)
    shift = columns[:, M // 2].copy()  # (L, J * D)
    columns -= shift[:, None]
    np.multiply(v, v, out=v_sq)
    return Votes(v.swapaxes(1, 2), v_sq.swapaxes(1, 2), shift.reshape(L, J, D))


class VotesGradient(NamedTuple):
    """A term of the votes' gradient: weight_m (constant_d + slope_d v_md)."""

    weight: Array  # (L, J, M)
    constant: Array  # (L, J, D)
    slope: Array  # (L, J, D)


def votes_backward(terms: list[VotesGradient], votes: Votes, pose: Array, kron: Array) -> tuple[Array, Array]:
    """The terms of dvotes -> dpose (L, K, K, I, D), dkron (K, K, I, D, J * D)."""
    L, K, _, I, _ = pose.shape
    weight, constant, slope = (np.stack(parts, axis=2) for parts in zip(*terms, strict=True))  # (L, J, R, M or D)
    v = votes.v.swapaxes(1, 2)  # (L, M, J, D)
    dv = votes.v_sq.swapaxes(1, 2)  # its memory: the squares are no longer needed
    by_v = memory("by_v", v.dtype, *v.shape)
    # dv = sum over the terms of weight (constant + slope v)
    np.matmul(weight.swapaxes(2, 3), constant, out=dv.swapaxes(1, 2))
    np.matmul(weight.swapaxes(2, 3), slope, out=by_v.swapaxes(1, 2))
    by_v *= v
    dv += by_v
    # v = rows @ kron + offset - shift; the shift cancels in every result, so that it has no gradient
    rows = pose.transpose(1, 2, 3, 0, 4)  # (K, K, I, L, D)
    dout = dv.reshape(L, K, K, I, -1).transpose(1, 2, 3, 0, 4)  # (K, K, I, L, J * D)
    dpose = np.empty_like(pose)
    np.matmul(dout, kron.swapaxes(3, 4), out=dpose.transpose(1, 2, 3, 0, 4))
    dkron = rows.swapaxes(3, 4) @ dout  # (K, K, I, D, J * D)
    return dpose, dkron if len(kron) == K else dkron.sum(axis=(0, 1), keepdims=True)


# --- EM routing [Hinton 2018, procedure 1 and sec. 4] -----------------------------------------------------------------


class MStep(NamedTuple):
    """Inputs and results of an M-step."""

    r: Array  # (L, J, M) assignments
    weight: Array  # (L, J, M) of a vote in the mean: r times the child's activation / mass; their sum is at most 1
    mass: Array  # (L, J) sum_m r a_in + MASS_FLOOR
    mean: Array  # (L, J, D) mu - shift
    sigma_sq: Array  # (L, J, D)
    log_det: Array  # (L, J) sum_d log sigma_sq
    a: Array  # (L, J) activations
    log_a: Array  # (L, J) their logarithms
    lambda_: float  # inverse temperature


class Layer(NamedTuple):
    """Parameters and settings of a layer's routing, the same in all of its steps."""

    fields: Fields
    beta_a: Array  # (J,)
    beta_v: Array  # (J,) the cost of one pose entry at sigma = 1, the same for all D
    variance_floor: float  # added to sigma_sq
    mass_unit: float  # the mass in a cost is divided by this, see field_routing_forward


def m_step_forward(votes: Votes, r: Array, a_in: Array, layer: Layer, lambda_: float) -> MStep:
    """r (L, J, M), a_in (L, M) -> means, variances, activations of the parents. [Hinton 2018, procedure 1, M-STEP]"""
    D = votes.v.shape[3]
    ra = r * a_in[:, None]  # (L, J, M)
    mass = ra.sum(axis=2) + MASS_FLOOR  # (L, J)
    weight = ra / mass[..., None]  # (L, J, M)
    first = (weight[:, :, None] @ votes.v)[:, :, 0]  # (L, J, D) sum_m weight v
    second = (weight[:, :, None] @ votes.v_sq)[:, :, 0]  # (L, J, D) sum_m weight v^2
    deficit = (MASS_FLOOR / mass)[..., None]  # 1 - sum_m weight
    mean = first - deficit * votes.shift  # sum_m weight V - shift
    variance = second - mean * (2 * first - (1 - deficit) * mean)  # sum_m weight (v - mean)^2
    sigma_sq = np.maximum(variance, 0) + layer.variance_floor  # (L, J, D)
    log_det = np.log(sigma_sq).sum(axis=2)  # (L, J)
    cost = (D * layer.beta_v + 0.5 * log_det) * (mass / layer.mass_unit)  # (L, J)
    z = lambda_ * (layer.beta_a - cost)  # (L, J)
    a = np.exp(np.minimum(z, 0)) / (1 + np.exp(-np.abs(z)))  # 1 / (1 + exp(-z)) without an overflow
    log_a = -np.logaddexp(0, -z)  # finite where a is zero
    return MStep(r, weight, mass, mean, sigma_sq, log_det, a, log_a, lambda_)


def m_step_backward(
    dmu: Array, dsigma_sq: Array, dlog_a: Array, votes: Votes, step: MStep, layer: Layer, em_grad: str
) -> tuple[Array, Array, Array, VotesGradient]:
    """dmu and dsigma_sq (L, J, D), dlog_a (L, J) -> dra (L, J, M), dbeta_a and dbeta_v (J,), dvotes; ra = r a_in.

    em_grad "stop": assignments, mass, and the mean inside sigma_sq are constants.
    """
    _, weight, mass, mean, sigma_sq, log_det, a, _, lambda_ = step
    D = dmu.shape[2]
    # log_a = log sigmoid(z)
    dz = dlog_a * (1 - a)  # (L, J)
    # z = lambda (beta_a - cost)
    dz *= lambda_
    dbeta_a = dz.sum(axis=0)
    dmass_cost = -dz / layer.mass_unit  # (L, J), of cost * mass_unit
    # cost * mass_unit = (D beta_v + log_det / 2) mass; log_det = sum_d log sigma_sq
    dbeta_v = D * (dmass_cost * mass).sum(axis=0)
    dsigma_sq = dsigma_sq + (0.5 * dmass_cost * mass)[..., None] / sigma_sq  # (L, J, D)
    # sigma_sq = sum_m weight (V - mu)^2 + floor; its derivative by mu is -2 sum_m weight (V - mu) = -2 deficit mu
    if em_grad != "stop":
        dmu = dmu - 2 * dsigma_sq * (MASS_FLOOR / mass)[..., None] * (mean + votes.shift)
    # mu = sum_m weight V; sigma_sq as above, with V - mu = v - mean: dV = weight (dmu + 2 dsigma_sq (v - mean)), and
    # dweight_m = sum_d dmu V + dsigma_sq (v - mean)^2, first without the terms that are the same for all m
    constant = dmu - 2 * dsigma_sq * mean  # (L, J, D)
    dweight = (votes.v @ constant[..., None])[..., 0]  # (L, J, M)
    dweight += (votes.v_sq @ dsigma_sq[..., None])[..., 0]
    dvotes = VotesGradient(weight, constant, 2 * dsigma_sq)
    if em_grad == "stop":
        dweight += (dsigma_sq * mean * mean + dmu * votes.shift).sum(axis=2)[..., None]
        return dweight / mass[..., None], dbeta_a, dbeta_v, dvotes
    # weight = ra / mass; mass = sum_m ra: the quotient rule subtracts sum_m weight dweight, which is
    # sum_d dmu mu + dsigma_sq (sigma_sq - floor); mu = mean + shift, and the shift cancels
    dweight += (dsigma_sq * (mean * mean - sigma_sq + layer.variance_floor) - dmu * mean).sum(axis=2)[..., None]
    dmass = dmass_cost * (D * layer.beta_v + 0.5 * log_det)  # (L, J)
    return dweight / mass[..., None] + dmass[..., None], dbeta_a, dbeta_v, dvotes


def e_step_forward(votes: Votes, step: MStep, fields: Fields) -> Array:
    """Assignments r (L, J, M), in proportion to a_j p_j(vote). A child's sum to 1 over all of its parents: all types at
    all positions whose field contains it. [Hinton 2018, procedure 1, and sec. 4 for the fields]"""
    precision = 1 / step.sigma_sq
    # In logarithms, without D log(2 pi) / 2, which is equal for all parents:
    # log a_j p_j(V) = log_a - log_det / 2 - sum_d (v - mean)^2 / (2 sigma_sq), with the square expanded
    log_ap0 = step.log_a - 0.5 * step.log_det - 0.5 * (step.mean * step.mean * precision).sum(axis=2)  # (L, J), v = 0
    log_ap = (votes.v @ (step.mean * precision)[..., None])[..., 0]  # (L, J, M)
    log_ap += (votes.v_sq @ (-0.5 * precision)[..., None])[..., 0]
    log_ap += log_ap0[..., None]
    log_ap -= over_fields(log_ap.max(axis=1), fields, np.maximum)[:, None]
    r = np.exp(log_ap, out=log_ap)
    r /= over_fields(r.sum(axis=1), fields, np.add)[:, None]
    return r


def e_step_backward(
    dr: Array, votes: Votes, step: MStep, r: Array, fields: Fields
) -> tuple[Array, Array, Array, VotesGradient]:
    """dr (L, J, M), r of the E-step after the M-step ``step`` -> dmu, dsigma_sq, dlog_a of that M-step; dvotes."""
    mean, precision = step.mean, 1 / step.sigma_sq
    # r = softmax(log_ap) over a child's parents
    dlog_ap = dr * r
    dlog_ap -= r * over_fields(dlog_ap.sum(axis=1), fields, np.add)[:, None]
    # log_ap = log_a - log_det / 2 - sum_d (v - mean)^2 / (2 sigma_sq)
    dlog_a = dlog_ap.sum(axis=2)  # (L, J)
    first = (dlog_ap[:, :, None] @ votes.v)[:, :, 0]  # (L, J, D) sum_m dlog_ap v
    second = (dlog_ap[:, :, None] @ votes.v_sq)[:, :, 0]  # (L, J, D) sum_m dlog_ap v^2
    total = dlog_a[..., None]  # sum_m dlog_ap
    dmu = (first - mean * total) * precision
    dsigma_sq = 0.5 * precision * ((second - 2 * mean * first + mean * mean * total) * precision - total)
    return dmu, dsigma_sq, dlog_a, VotesGradient(dlog_ap, mean * precision, -precision)


class RoutingCache(NamedTuple):
    """A layer's routing without its votes."""

    pose: Array  # (L, K, K, I, D) of the children of every field
    a_in: Array  # (L, M)
    kron: Array  # (K, K, I, D, J * D), or (1, 1, I, D, J * D) if all positions share the matrices
    offset: Array | None
    layer: Layer
    shift: Array  # (L, J, D)
    steps: list[MStep]


def field_routing_forward(
    pose: Array, a_in: Array, w: Array, beta_a: Array, beta_v: Array, lambdas: Sequence[float], variance_floor: float,
    k: int, stride: int = 1, offset: Array | None = None,
) -> tuple[Array, Array, RoutingCache]:
    """pose (B, H, W, I, P, P), a_in (B, H, W, I), w (K, K, I, J, P, P), or (1, 1, I, J, P, P) for the same matrices at
    all positions of a field, beta_a and beta_v (J,), an inverse temperature for each iteration, offset (K, K, P, P)
    added to the votes of the children there -> poses (B, Ho, Wo, J, P, P), activations (B, Ho, Wo, J), cache. See
    conv_matrix_capsules.py for the rest.
    """
    (B, H, W, I, P, _), J = pose.shape, w.shape[3]
    fields, D = receptive_fields(H, W, k, stride), P * P
    L, M = B * math.prod(fields.out), k * k * I
    mass_unit = fields.n_covered * I / (math.prod(fields.out) * J)
    layer = Layer(fields, beta_a, beta_v, variance_floor, mass_unit)
    poses = gather(pose.reshape(B, H, W, I, D), fields).reshape(L, k, k, I, D)
    a_fields = gather(a_in, fields).reshape(L, M)
    kron = kronecker_forward(w)
    votes = votes_forward(poses, kron, offset)
    uniform = 1 / (J * fields.n_fields.astype(pose.dtype))  # (Ho, Wo, K, K)
    uniform = np.repeat(uniform, I).reshape(-1, 1, M)  # (Ho * Wo, 1, M)
    r = np.broadcast_to(uniform, (B, len(uniform), J, M)).reshape(L, J, M)
    steps: list[MStep] = []
    for t, lambda_ in enumerate(lambdas):
        if t:
            r = e_step_forward(votes, steps[-1], fields)
        steps.append(m_step_forward(votes, r, a_fields, layer, lambda_))
    cache = RoutingCache(poses, a_fields, kron, offset, layer, votes.shift, steps)
    shape = (B, *fields.out, J)
    return (steps[-1].mean + votes.shift).reshape(*shape, P, P), steps[-1].a.reshape(shape), cache


def field_routing_backward(
    dmu: Array, da: Array, cache: RoutingCache, em_grad: str
) -> tuple[Array, Array, Array, Array, Array]:
    """dmu (B, Ho, Wo, J, P, P), da (B, Ho, Wo, J) -> dpose, da_in, dw, dbeta_a, dbeta_v, of the inputs' shapes.

    em_grad "exact": the gradient of what the forward pass computes; "stop": that of the last M-step alone, with r, the
    mass, and the mean inside sigma_sq held constant.
    """
    pose, a_in, kron, offset, layer, shift, steps = cache
    fields, (J, D) = layer.fields, shift.shape[1:]
    P = math.isqrt(D)
    votes = votes_forward(pose, kron, offset)
    dmu, dsigma_sq = dmu.reshape(shift.shape), np.zeros_like(shift)  # (L, J, D)
    dlog_a = da.reshape(-1, J) * steps[-1].a  # a = exp(log_a)
    da_fields, dbeta_a, dbeta_v = np.zeros_like(a_in), np.zeros_like(layer.beta_a), np.zeros_like(layer.beta_v)
    terms: list[VotesGradient] = []
    for t in reversed(range(len(steps))):
        # M-step
        dra, dbeta_a_step, dbeta_v_step, dvotes = m_step_backward(
            dmu, dsigma_sq, dlog_a, votes, steps[t], layer, em_grad
        )
        terms.append(dvotes)
        dbeta_a += dbeta_a_step
        dbeta_v += dbeta_v_step
        da_fields += (dra * steps[t].r).sum(axis=1)
        if t == 0 or em_grad == "stop":  # the first assignments are constants
            break
        # E-step
        dr = dra * a_in[:, None]
        dmu, dsigma_sq, dlog_a, dvotes = e_step_backward(dr, votes, steps[t - 1], steps[t].r, fields)
        terms.append(dvotes)
    dposes, dkron = votes_backward(terms, votes, pose, kron)
    shape = (-1, *fields.out, *pose.shape[1:4])  # (B, Ho, Wo, K, K, I)
    # poses, a_fields = gather(pose), gather(a_in)
    dpose = scatter(dposes.reshape(*shape, D), fields)
    da_in = scatter(da_fields.reshape(shape), fields)
    return dpose.reshape(*da_in.shape, P, P), da_in, kronecker_backward(dkron, P), dbeta_a, dbeta_v
