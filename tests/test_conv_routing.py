"""Convolutional matrix capsules of conv_matrix_capsules.py: gradients, plain loops, the paper's shapes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import value_and_grad

import conv_matrix_capsules as caps
import smallnorb_novel_viewpoint as s
from fast import field_em
from helpers import GradientError, check_gradient, surviving_mutants

Array = np.ndarray

FORMS: dict[str, Any] = {"plain": caps, "fast": field_em}  # of the same pair
CASES = [  # B, H, W, I, J, K, P, stride
    (3, 7, 6, 2, 3, 3, 3, 1),
    (2, 8, 7, 3, 2, 3, 2, 2),  # the last row lies in no field
    (2, 7, 8, 1, 2, 2, 2, 3),  # fields with gaps between them
    (2, 4, 4, 3, 5, 4, 2, 1),  # one field, as for the class capsules
]
FLOOR = 0.7


class Network(NamedTuple):
    """What the networks read of a Config."""

    sizes: tuple[int, int, int, int] = (5, 3, 2, 4)
    image_size: int = 28
    in_channels: int = 1
    n_classes: int = 7
    em_iters: int = 3
    variance_floor: float = FLOOR
    beta_v_init: float = 0.0
    em_grad: str = "exact"
    loss: str = "cross-entropy"
    dtype: str = "float64"
    plain: bool = False


def net(**changes: Any) -> Any:
    return Network(**changes)


# ----------------------------------------------------------------------------------------------------------------------
# The same functions, stated plainly
# ----------------------------------------------------------------------------------------------------------------------


def loop_routing(
    pose: Array, a_in: Array, w: Array, beta_a: Array, beta_v: Array, n_iters: int, stride: int, offset: Array
) -> tuple[Array, Array, dict[tuple[int, ...], float]]:
    """One example, one child and one parent at a time: pose (H, W, I, P, P) -> mu, a, last {(parent, child): r}."""
    height, width, n_in, p, _ = pose.shape
    k, n_out = w.shape[0], w.shape[3]
    parents = list(np.ndindex((height - k) // stride + 1, (width - k) // stride + 1, n_out))
    votes: dict[tuple[int, ...], Array] = {}
    for q in parents:
        y, x, j = q
        for dy, dx, i in np.ndindex(k, k, n_in):
            child = (stride * y + dy, stride * x + dx, i)
            votes[q + child] = (pose[child] @ w[dy, dx, i, j] + offset[dy, dx]).ravel()
    children = sorted({pair[3:] for pair in votes})
    parents_of = {c: [pair[:3] for pair in votes if pair[3:] == c] for c in children}
    children_of = {q: [pair[3:] for pair in votes if pair[:3] == q] for q in parents}
    mean_mass = len(children) / len(parents)  # of a parent, were every child active and assigned evenly
    r = {pair: 1 / len(parents_of[pair[3:]]) for pair in votes}
    mu = np.zeros((*np.max(parents, axis=0) + 1, p * p))
    sigma, a = np.zeros_like(mu), np.zeros(mu.shape[:-1])
    for _ in range(n_iters):
        used = dict(r)
        for q in parents:  # M-step
            total = sum(r[q + c] * a_in[c] for c in children_of[q]) + s.MASS_FLOOR
            mu[q] = sum(r[q + c] * a_in[c] * votes[q + c] for c in children_of[q]) / total
            variance = sum(r[q + c] * a_in[c] * (votes[q + c] - mu[q]) ** 2 for c in children_of[q]) / total
            sigma[q] = np.sqrt(variance + FLOOR)
            cost = sum((beta_v[q[2]] + math.log(sigma[q][h])) * total / mean_mass for h in range(p * p))
            a[q] = 1 / (1 + math.exp(cost - beta_a[q[2]]))
        for c in children:  # E-step: over all of a child's parents, whatever their position
            joint = {}
            for q in parents_of[c]:
                z = (votes[q + c] - mu[q]) / sigma[q]
                joint[q] = a[q] * math.exp(-0.5 * (z @ z)) / np.prod(math.sqrt(2 * math.pi) * sigma[q])
            for q, value in joint.items():
                r[q + c] = value / sum(joint.values())
    return mu, a, used


def plain_routing(
    pose: Any, a_in: Any, w: Any, beta_a: Any, beta_v: Any, n_iters: int, k: int, stride: int, offset: Array,
    variance_floor: float, detached: Any = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """In whole arrays -> mu, a, (r, mass, mu) of the last M-step.

    With ``detached`` (such a triple) the last M-step alone is computed, with these three held constant.
    """
    n, height, width, n_in, p, _ = pose.shape
    n_out = w.shape[3]
    h_out, w_out = (height - k) // stride + 1, (width - k) // stride + 1
    sees = np.zeros((h_out * w_out * k * k, height * width))  # 1 where an entry of a field is that child
    for e, (y, x, dy, dx) in enumerate(np.ndindex(h_out, w_out, k, k)):
        sees[e, (stride * y + dy) * width + stride * x + dx] = 1
    child = sees.argmax(axis=1)
    shape, m = (n, h_out * w_out, k * k, n_in), k * k * n_in
    poses = anp.reshape(anp.reshape(pose, (n, height * width, n_in, p, p))[:, child], (*shape, p, p))
    a = anp.reshape(anp.reshape(a_in, (n, height * width, n_in))[:, child], (n, h_out * w_out, m, 1))
    kernel = anp.reshape(w, (k * k, n_in, n_out, p, p))
    votes = anp.einsum("npkixy,kijyz->npkijxz", poses, kernel) + np.reshape(offset, (k * k, 1, 1, p, p))
    votes = anp.reshape(votes, (n, h_out * w_out, m, n_out, p * p))
    n_seen = sees.sum(axis=0)
    mean_mass = (n_seen > 0).sum() * n_in / (h_out * w_out * n_out)
    first = np.broadcast_to(1 / (n_out * n_seen[child]).reshape(1, -1, k * k, 1, 1), (*shape, n_out))
    r: Any = first.reshape(n, h_out * w_out, m, n_out)
    for t in range(n_iters):
        r = r if detached is None else detached[0]
        ra = r * a
        mass = anp.sum(ra, axis=2) + s.MASS_FLOOR if detached is None else detached[1]
        weight = (ra / mass[:, :, None])[..., None]
        mu = anp.sum(weight * votes, axis=2)
        centre = (mu if detached is None else detached[2])[:, :, None]
        sigma_sq = anp.sum(weight * (votes - centre) ** 2, axis=2) + variance_floor
        cost = anp.sum(beta_v[:, None] + 0.5 * anp.log(sigma_sq), axis=3) * mass / mean_mass
        out = 1 / (1 + anp.exp(cost - beta_a))
        if detached is not None or t == n_iters - 1:
            break
        log_p = -0.5 * anp.sum((votes - centre) ** 2 / sigma_sq[:, :, None] + anp.log(sigma_sq)[:, :, None], axis=4)
        joint = anp.exp(anp.log(out)[:, :, None] + log_p)  # small enough here without a shift
        total = anp.einsum("ec,nei->nci", sees, anp.reshape(anp.sum(joint, axis=3), (n, -1, n_in)))
        r = joint / anp.reshape(total[:, child], (n, h_out * w_out, m, 1))
    return anp.reshape(mu, (n, h_out, w_out, n_out, p, p)), anp.reshape(out, (n, h_out, w_out, n_out)), (r, mass, mu)


def plain_capsnet(params: Any, x: Any, config: Any, detached: Any = None) -> tuple[Any, Any, Any]:
    """Class scores, class poses, and what ``detached`` takes."""

    def conv(x: Any, w: Any, b: Any, stride: int, pad: int) -> Any:
        k = w.shape[0]
        x = anp.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)), "constant")
        side = (x.shape[1] - k) // stride + 1
        out = b
        for i, j in itertools.product(range(k), range(k)):
            window = x[:, i : i + stride * (side - 1) + 1 : stride, j : j + stride * (side - 1) + 1 : stride]
            out = out + anp.einsum("nhwc,cf->nhwf", window, w[i, j])
        return out

    hidden = anp.maximum(conv(x, params["conv1.w"], params["conv1.b"], 2, 2), 0)
    primary = conv(hidden, params["primary.w"], params["primary.b"], 1, 0)
    n_pose = config.sizes[1] * 16
    pose = anp.reshape(primary[..., :n_pose], (*primary.shape[:3], config.sizes[1], 4, 4))
    a = 1 / (1 + anp.exp(-primary[..., n_pose:]))
    constants = []
    for t, (layer, stride) in enumerate((("convcaps1", 2), ("convcaps2", 1), ("class", 1))):
        w = params[f"{layer}.w"]
        offset = np.zeros((3, 3, 4, 4))
        if layer == "class":
            side = pose.shape[1]
            w = anp.reshape(w, (1, 1, *w.shape)) * np.ones((side, side, 1, 1, 1, 1))
            position = (6.5 + 4 * np.arange(side)) / config.image_size
            offset = np.zeros((side, side, 4, 4))
            offset[:, :, 0, 3], offset[:, :, 1, 3] = position[:, None], position[None, :]
        pose, a, constant = plain_routing(
            pose, a, w, params[f"{layer}.beta_a"], params[f"{layer}.beta_v"], config.em_iters, len(offset), stride,
            offset, config.variance_floor, None if detached is None else detached[t],
        )  # fmt: skip
        constants.append(constant)
    mu, a = anp.reshape(pose, (len(x), -1, 16)), anp.reshape(a, (len(x), -1))
    scores = a if config.loss == "spread" else anp.sum(mu**2, axis=2) / 16 + 4 * (a - 0.5)
    return scores, mu, constants


# ----------------------------------------------------------------------------------------------------------------------
# Gradients. Each check below is also what the mutants have to get past.
# ----------------------------------------------------------------------------------------------------------------------


def routing_inputs(case: tuple[int, ...]) -> dict[str, Any]:
    n, height, width, n_in, n_out, k, p, _ = case
    rng = np.random.default_rng(case)
    return {
        "pose": rng.standard_normal((n, height, width, n_in, p, p)),
        "a_in": rng.uniform(0.1, 0.9, (n, height, width, n_in)),
        "w": rng.standard_normal((k, k, n_in, n_out, p, p)),
        "beta_a": rng.standard_normal(n_out),
        "beta_v": 0.3 * rng.standard_normal(n_out) - 0.3,
    }


def options(case: tuple[int, ...], n_iters: int = 3) -> dict[str, Any]:
    k, p, stride = case[5:]
    offset = np.random.default_rng(1).standard_normal((k, k, p, p))
    return {"n_iters": n_iters, "variance_floor": FLOOR, "k": k, "stride": stride, "offset": offset}


def check_routing(form: Any, case: tuple[int, ...], n_iters: int = 3, policy: str = "exact") -> None:
    rng = np.random.default_rng(2)
    inputs, how = routing_inputs(case), options(case, n_iters)
    mu, a, cache = form.field_routing_forward(**inputs, **how)
    dmu, da = rng.standard_normal(mu.shape), rng.standard_normal(a.shape)
    grads = dict(zip(inputs, form.field_routing_backward(dmu, da, cache, policy), strict=True))
    detached = plain_routing(**inputs, **how)[2] if policy == "stop" else None

    def f(**inputs: Any) -> float:
        if policy == "exact":
            mu, a, _ = form.field_routing_forward(**inputs, **how)
        else:
            mu, a, _ = plain_routing(**inputs, **how, detached=detached)
        return float((dmu * mu).sum() + (da * a).sum())

    assert f(**inputs) == pytest.approx(float((dmu * mu).sum() + (da * a).sum()), rel=1e-9)
    check_gradient(f, inputs, grads, rng)


def check_starved(form: Any) -> None:
    """Almost inactive children: the floor under a parent's mass is a good part of it, and the gradient knows it."""
    case, tiny, rng = CASES[1], 40 * s.MASS_FLOOR, np.random.default_rng(8)
    inputs, how = routing_inputs(case), options(case, 2)

    def forward(pose: Array, a_in: Array) -> tuple[Array, Array, Any]:
        return form.field_routing_forward(**{**inputs, "pose": pose, "a_in": tiny * a_in}, **how)

    mu, a, cache = forward(inputs["pose"], inputs["a_in"])
    dmu = rng.standard_normal(mu.shape)
    dpose, da_in, *_ = form.field_routing_backward(dmu, np.zeros_like(a), cache, "exact")
    check_gradient(
        lambda pose, a_in: float((dmu * forward(pose, a_in)[0]).sum()),
        {"pose": inputs["pose"], "a_in": inputs["a_in"]}, {"pose": dpose, "a_in": tiny * da_in}, rng,
    )  # fmt: skip


def check_shared_w(form: Any) -> None:
    """One w for all positions of a field is the same as its copies, and its gradient the sum of theirs."""
    case = CASES[3]
    n_in, n_out, k, p = case[3:7]
    inputs, how, rng = routing_inputs(case), options(case), np.random.default_rng(4)
    inputs["w"] = inputs["w"][:1, :1]
    copies = {**inputs, "w": np.broadcast_to(inputs["w"], (k, k, n_in, n_out, p, p))}
    one, many = (form.field_routing_forward(**x, **how) for x in (inputs, copies))
    dmu, da = rng.standard_normal(one[0].shape), rng.standard_normal(one[1].shape)
    for x, y in zip(one[:2], many[:2], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12)
    grads, expected = (list(form.field_routing_backward(dmu, da, x[2], "exact")) for x in (one, many))
    expected[2] = expected[2].sum(axis=(0, 1), keepdims=True)
    for x, y in zip(grads, expected, strict=True):
        if x.shape != y.shape or np.abs(x - y).max() > 1e-11 * np.abs(y).max():
            raise GradientError("one w for all positions has another gradient than the sum of its copies'")


def fields_of(form: Any, case: tuple[int, ...]) -> Any:
    _, height, width, _, _, k, _, stride = case
    return caps.Fields((height, width), k, stride) if form is caps else field_em.receptive_fields(*case[1:3], k, stride)


def check_gather(form: Any) -> None:
    rng = np.random.default_rng(10)
    for case in CASES:
        _, height, width, n_in, _, _, p, stride = case
        fields = fields_of(form, case)
        for shape in ((2, height, width, n_in), (3, height, width, n_in, p, 5)):  # of activations and of poses
            x = rng.standard_normal(shape)
            gathered = form.gather(x, fields)
            for y, column, i, j in np.ndindex(*gathered.shape[1:5]):
                np.testing.assert_array_equal(gathered[:, y, column, i, j], x[:, stride * y + i, stride * column + j])
            dout = rng.standard_normal(gathered.shape)
            check_gradient(
                lambda x, dout=dout, fields=fields: float((dout * form.gather(x, fields)).sum()),
                {"x": x}, {"x": form.scatter(dout, fields)}, rng,
            )  # fmt: skip


def check_kronecker() -> None:
    rng = np.random.default_rng(3)
    w = rng.standard_normal((2, 2, 5, 2, 3, 3))
    dkron = rng.standard_normal(field_em.kronecker_forward(w).shape)
    check_gradient(
        lambda w: float((dkron * field_em.kronecker_forward(w)).sum()), {"w": w},
        {"w": field_em.kronecker_backward(dkron, 3)}, rng,
    )  # fmt: skip


FIELDS = field_em.receptive_fields(5, 4, 2, 1)  # 4 x 3 fields of 2 x 2 positions
N_FIELDS, N_IN, N_OUT, N_ENTRIES = 2 * 12, 3, 5, 9  # of two images
N_CHILDREN = 4 * N_IN


def votes_gradient(dvotes: field_em.VotesGradient, votes: field_em.Votes) -> Array:
    """The term as a whole array (L, J, M, D)."""
    return dvotes.weight[..., None] * (dvotes.constant[:, :, None] + dvotes.slope[:, :, None] * votes.v)


def shifted(votes: Array, shift: Array) -> field_em.Votes:
    v = votes - shift[:, :, None]
    return field_em.Votes(v, v * v, shift)


def check_votes() -> None:
    rng = np.random.default_rng(11)
    pose = rng.standard_normal((N_FIELDS, 2, 2, N_IN, N_ENTRIES))
    offset = rng.standard_normal((2, 2, 3, 3))
    terms = [
        field_em.VotesGradient(
            rng.standard_normal((N_FIELDS, N_OUT, N_CHILDREN)), *rng.standard_normal((2, N_FIELDS, N_OUT, N_ENTRIES))
        )
        for _ in range(2)
    ]
    for k in (2, 1):
        kron = rng.standard_normal((k, k, N_IN, N_ENTRIES, N_OUT * N_ENTRIES))
        votes = field_em.votes_forward(pose, kron, offset)
        shift = votes.shift.copy()
        dpose, dkron = field_em.votes_backward(terms, votes, pose, kron)

        def f(pose: Array, kron: Array, shift: Array = shift) -> float:
            votes = field_em.votes_forward(pose, kron, offset)
            v = votes.v + (votes.shift - shift)[:, :, None]  # counted from the same shift, which is a constant
            value = 0.0
            for weight, constant, slope in terms:
                value += float((weight[..., None] * (constant[:, :, None] * v + 0.5 * slope[:, :, None] * v * v)).sum())
            return value

        check_gradient(f, {"pose": pose, "kron": kron}, {"pose": dpose, "kron": dkron}, rng)


def check_m_step(policy: str, activity: float = 1.0) -> None:
    """All that an M-step gives, from votes, assignments, activations and betas."""
    rng = np.random.default_rng(12)
    shape = (N_FIELDS, N_OUT, N_CHILDREN)
    shift = rng.standard_normal((N_FIELDS, N_OUT, N_ENTRIES))
    inputs = {
        "votes": rng.standard_normal((*shape, N_ENTRIES)),
        "r": rng.uniform(0.1, 0.9, shape),
        "a_in": rng.uniform(0.1, 0.9, (N_FIELDS, N_CHILDREN)),
        "beta_a": rng.standard_normal(N_OUT),
        "beta_v": rng.standard_normal(N_OUT),
    }
    dmu, dsigma_sq = rng.standard_normal((2, N_FIELDS, N_OUT, N_ENTRIES))
    dlog_a = rng.standard_normal((N_FIELDS, N_OUT)) * (activity == 1)  # of no mass no cost

    def layer(beta_a: Array, beta_v: Array) -> field_em.Layer:
        return field_em.Layer(FIELDS, beta_a, beta_v, FLOOR, mass_unit=2.5)

    def forward(votes: Array, r: Array, a_in: Array, **betas: Array) -> field_em.MStep:
        return field_em.m_step_forward(shifted(votes, shift), r, activity * a_in, layer(**betas))

    step, votes = forward(**inputs), shifted(inputs["votes"], shift)
    mu0, betas = step.mean + shift, (inputs["beta_a"], inputs["beta_v"])
    dra, dbeta_a, dbeta_v, dvotes = field_em.m_step_backward(dmu, dsigma_sq, dlog_a, votes, step, layer(*betas), policy)
    grads = {
        "votes": votes_gradient(dvotes, votes), "r": dra * activity * inputs["a_in"][:, None],
        "a_in": activity * (dra * inputs["r"]).sum(axis=1), "beta_a": dbeta_a, "beta_v": dbeta_v,
    }  # fmt: skip

    def f(votes: Array, r: Array, a_in: Array, beta_a: Array, beta_v: Array) -> float:
        if policy == "exact":
            now = forward(votes, r, a_in, beta_a=beta_a, beta_v=beta_v)
            mu, sigma_sq, log_a = now.mean + shift, now.sigma_sq, now.log_a
        else:
            weight = activity * r * a_in[:, None] / step.mass[..., None]
            mu = np.einsum("ljm,ljmd->ljd", weight, votes)
            sigma_sq = np.einsum("ljm,ljmd->ljd", weight, (votes - mu0[:, :, None]) ** 2) + FLOOR
            cost = (beta_v[:, None] + 0.5 * np.log(sigma_sq)).sum(axis=2) * step.mass / 2.5
            log_a = -np.log1p(np.exp(cost - beta_a))
        return float((dmu * mu).sum() + (dsigma_sq * sigma_sq).sum() + (dlog_a * log_a).sum())

    names = inputs if activity == 1 else ("votes", "r", "a_in")
    rest = {name: x for name, x in inputs.items() if name not in names}
    check_gradient(lambda **x: f(**x, **rest), {k: inputs[k] for k in names}, {k: grads[k] for k in names}, rng)


def check_m_steps() -> None:
    check_m_step("exact")
    check_m_step("stop")
    check_m_step("exact", 40 * s.MASS_FLOOR)


def check_e_step() -> None:
    rng = np.random.default_rng(13)
    shift = rng.standard_normal((N_FIELDS, N_OUT, N_ENTRIES))
    inputs = {
        "votes": rng.standard_normal((N_FIELDS, N_OUT, N_CHILDREN, N_ENTRIES)),
        "mu": rng.standard_normal((N_FIELDS, N_OUT, N_ENTRIES)),
        "sigma_sq": rng.uniform(0.5, 2, (N_FIELDS, N_OUT, N_ENTRIES)),
        "log_a": -rng.exponential(1, (N_FIELDS, N_OUT)),
    }
    dr = rng.standard_normal((N_FIELDS, N_OUT, N_CHILDREN))

    def m_step(mu: Array, sigma_sq: Array, log_a: Array) -> field_em.MStep:
        unused = np.full(1, np.nan)
        log_det = np.log(sigma_sq).sum(axis=2)
        return field_em.MStep(unused, unused, unused, mu - shift, sigma_sq, log_det, unused, log_a)

    def forward(votes: Array, **moments: Array) -> Array:
        return field_em.e_step_forward(shifted(votes, shift), m_step(**moments), FIELDS)

    r, votes = forward(**inputs), shifted(inputs["votes"], shift)
    step = m_step(*(inputs[name] for name in ("mu", "sigma_sq", "log_a")))
    dmu, dsigma_sq, dlog_a, dvotes = field_em.e_step_backward(dr, votes, step, r, FIELDS)
    grads = {"votes": votes_gradient(dvotes, votes), "mu": dmu, "sigma_sq": dsigma_sq, "log_a": dlog_a}
    check_gradient(lambda **x: float((dr * forward(**x)).sum()), inputs, grads, rng)


def check_routing_all(form: Any) -> None:
    check_routing(form, CASES[1])
    check_routing(form, CASES[1], 2, "stop")
    check_starved(form)
    check_shared_w(form)


def random_params(config: Any) -> caps.Params:
    """Parameters none of which is zero, and such that neither votes nor activations saturate."""
    rng = np.random.default_rng(4)
    params = caps.conv_capsnet_init(rng, config)
    return {name: p + 0.2 * rng.standard_normal(p.shape) for name, p in params.items()}


def check_capsnet(config: Any) -> None:
    """Parameters and image. "stop" has the plain network's same constants."""
    rng = np.random.default_rng(5)
    params, x = random_params(config), rng.random((2, config.image_size, config.image_size, config.in_channels))
    scores, cache = caps.conv_capsnet_forward(params, x, config)
    dscores = rng.standard_normal(scores.shape)
    grads, dx = caps.conv_capsnet_backward(dscores, cache, config, need_dx=True)
    assert dx is not None
    detached = plain_capsnet(params, x, config)[2] if config.em_grad == "stop" else None

    def f(x: Array, **params: Array) -> float:
        if detached is None:
            return float((dscores * caps.conv_capsnet_forward(params, x, config)[0]).sum())
        return float((dscores * plain_capsnet(params, x, config, detached)[0]).sum())

    inputs = {**params, "x": x}
    # A small step: with thousands of ReLUs a larger one would take some of them over their kink.
    check_gradient(f, inputs, {**grads, "x": dx}, rng, n_directions=1, step=1e-6)


def check_capsnet_both() -> None:
    for loss in ("cross-entropy", "spread"):
        check_capsnet(net(loss=loss))


def check_conv_cnn() -> None:
    config, rng = net(sizes=(3, 1, 1, 1), in_channels=2), np.random.default_rng(7)
    params = caps.cnn_init(rng, caps.conv_cnn_shapes(config, 5), "float64")
    params = {name: p + 0.1 * rng.standard_normal(p.shape) for name, p in params.items()}
    x = rng.standard_normal((2, 28, 28, 2))
    scores, cache = caps.conv_cnn_forward(params, x)
    dscores = rng.standard_normal(scores.shape)
    grads, dx = caps.conv_cnn_backward(dscores, cache, need_dx=True)
    assert dx is not None

    def f(x: Array, **params: Array) -> float:
        return float((dscores * caps.conv_cnn_forward(params, x)[0]).sum())

    check_gradient(f, {**params, "x": x}, {**grads, "x": dx}, rng, step=1e-6)
    assert caps.conv_cnn_backward(dscores, cache)[1] is None  # not wanted, not computed


def check_paper_cnn() -> None:
    """With an odd side, whose last row and column the pooling drops, and with and without dropout."""
    config, rng = net(image_size=13, n_classes=3, in_channels=2), np.random.default_rng(8)
    params = caps.cnn_init(rng, caps.paper_cnn_shapes(config), "float64")
    params = {name: p + 0.01 * rng.standard_normal(p.shape) for name, p in params.items()}
    x, half = rng.standard_normal((2, 13, 13, 2)), 2.0 * rng.integers(0, 2, (2, caps.N_HIDDEN))
    for dropout in (None, half):
        scores, cache = caps.paper_cnn_forward(params, x, dropout)
        dscores = rng.standard_normal(scores.shape)
        grads, dx = caps.paper_cnn_backward(dscores, cache, need_dx=True)
        assert dx is not None

        def f(x: Array, *, dropout: Array | None = dropout, dscores: Array = dscores, **params: Array) -> float:
            return float((dscores * caps.paper_cnn_forward(params, x, dropout)[0]).sum())

        check_gradient(f, {**params, "x": x}, {**grads, "x": dx}, rng, step=1e-7)
        assert caps.paper_cnn_backward(dscores, caps.paper_cnn_forward(params, x, dropout)[1])[1] is None


Check = Callable[[], None]
FAST_CHECKS: dict[str, Check] = {  # of fast/field_em.py
    "votes_backward": check_votes,
    "m_step_backward": check_m_steps,
    "e_step_backward": check_e_step,
    "kronecker_backward": check_kronecker,
}
CHECKS: dict[str, Check] = {  # of the script
    "conv_capsnet_backward": check_capsnet_both,
    "conv_cnn_backward": check_conv_cnn,
    "paper_cnn_backward": check_paper_cnn,
}
BOTH_CHECKS = (check_routing_all, check_gather)
BROKEN = [  # those with arithmetic to break
    *((caps, name, check) for name, check in CHECKS.items()),
    *((field_em, name, check) for name, check in FAST_CHECKS.items() if name != "kronecker_backward"),
    *((form, "field_routing_backward", functools.partial(check_routing_all, form)) for form in FORMS.values()),
]


@pytest.mark.parametrize("check", [*CHECKS.values(), *FAST_CHECKS.values()])
def test_gradient(check: Check) -> None:
    check()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("check", BOTH_CHECKS)
def test_gradient_of_both_forms(check: Callable[[Any], None], form: str) -> None:
    check(FORMS[form])


def test_every_backward_has_a_check() -> None:
    for module, checks in ((caps, CHECKS), (field_em, FAST_CHECKS)):
        here = {name for name, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__}
        assert {name for name in here if name.endswith("_backward")} == {*checks, "field_routing_backward"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policy", ["exact", "stop"])
@pytest.mark.parametrize("n_iters", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_routing_gradient(case: tuple[int, ...], n_iters: int, policy: str, form: str) -> None:
    check_routing(FORMS[form], case, n_iters, policy)


@pytest.mark.parametrize("config", [
    net(loss="spread"), net(em_grad="stop", loss="spread"), net(em_grad="stop"), net(image_size=32, in_channels=2),
])  # fmt: skip
def test_capsnet_gradient(config: Any) -> None:
    check_capsnet(config)


def test_all_gradients_are_those_of_autograd() -> None:
    config, rng = net(), np.random.default_rng(6)
    params, x = random_params(config), rng.random((2, 28, 28, 1))
    scores, cache = caps.conv_capsnet_forward(params, x, config)
    dscores = rng.standard_normal(scores.shape)
    grads, dx = caps.conv_capsnet_backward(dscores, cache, config, need_dx=True)
    oracle = value_and_grad(lambda p: anp.sum(dscores * plain_capsnet(p, p["x"], config)[0]))
    value, expected = oracle({**params, "x": x})
    assert float((dscores * scores).sum()) == pytest.approx(value, rel=1e-9)
    for name, gradient in {**grads, "x": dx}.items():
        assert gradient is not None
        largest = np.abs(expected[name]).max()
        assert largest > 1e-9
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-6, atol=1e-8 * largest, err_msg=name)


@pytest.mark.parametrize(("module", "name", "check"), BROKEN)
def test_a_broken_backward_is_seen(module: Any, name: str, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    assert surviving_mutants(monkeypatch, module, name, check) == []


@pytest.mark.parametrize("name", ["votes_backward", "m_step_backward", "e_step_backward"])
@pytest.mark.parametrize("form", FORMS)
def test_a_broken_step_is_seen_in_the_whole_routing(form: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = s if form == "plain" else field_em
    if form == "plain":  # which the script has imported
        monkeypatch.setattr(caps, "votes_backward", lambda *args: s.votes_backward(*args))
    assert surviving_mutants(monkeypatch, module, name, lambda: check_routing_all(FORMS[form])) == []


# ----------------------------------------------------------------------------------------------------------------------
# The two forms are the same
# ----------------------------------------------------------------------------------------------------------------------


def assert_same(plain: Sequence[Array], fast: Sequence[Array]) -> None:
    for x, y in zip(plain, fast, strict=True):
        assert x.shape == y.shape
        assert np.abs(x - y).max() <= 1e-10 * max(1e-10, np.abs(x).max())


@pytest.mark.parametrize("policy", ["exact", "stop"])
@pytest.mark.parametrize("n_iters", [1, 2, 3, 5])
@pytest.mark.parametrize("activity", [1.0, 40 * s.MASS_FLOOR])
@pytest.mark.parametrize("case", CASES)
def test_the_fast_routing_is_the_plain_one(case: tuple[int, ...], activity: float, n_iters: int, policy: str) -> None:
    inputs, how = routing_inputs(case), options(case, n_iters)
    inputs["a_in"] *= activity
    if case[1] == case[5]:
        inputs["w"] = inputs["w"][:1, :1]
    results = []
    for form in FORMS.values():
        mu, a, cache = form.field_routing_forward(**inputs, **how)
        grads = form.field_routing_backward(np.cos(mu), np.sin(1 + a), cache, policy)
        results.append((mu, a, *grads))
    assert_same(*results)


@pytest.mark.parametrize("policy", ["exact", "stop"])
@pytest.mark.parametrize("loss", ["spread", "cross-entropy"])
@pytest.mark.parametrize("sizes", [(5, 3, 2, 4), (3, 1, 4, 2)])
def test_the_networks_of_both_forms_are_the_same(sizes: tuple[int, ...], loss: str, policy: str) -> None:
    results = []
    for plain in (True, False):
        config = net(sizes=sizes, loss=loss, em_grad=policy, plain=plain)
        params, rng = random_params(config), np.random.default_rng(0)
        model, x = caps.make_capsules(config), rng.random((3, 28, 28, 1))
        scores, cache = model.forward(params, x)
        assert isinstance(cache.routing, caps.FieldRoutingCache) == plain
        grads, dx = model.backward(rng.standard_normal(scores.shape), cache, need_dx=True)
        assert dx is not None
        results.append((scores, dx, *(grads[name] for name in sorted(params))))
    assert_same(*results)


# ----------------------------------------------------------------------------------------------------------------------
# Routing: what the paper says, and the mistakes that others made
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_routing_is_the_loop(case: tuple[int, ...], form: str) -> None:
    inputs, how = routing_inputs(case), options(case)
    mu, a, _ = FORMS[form].field_routing_forward(**inputs, **how)
    r = caps.field_routing_forward(**inputs, **how)[2].assignments[-1]
    betas = inputs["beta_a"], inputs["beta_v"]
    for e in range(len(mu)):
        pose, a_in = inputs["pose"][e], inputs["a_in"][e]
        loop = loop_routing(pose, a_in, inputs["w"], *betas, how["n_iters"], how["stride"], how["offset"])
        np.testing.assert_allclose(mu[e].reshape(loop[0].shape), loop[0], rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(a[e], loop[1], rtol=1e-9)
        for (y, x, j, row, column, i), value in loop[2].items():
            dy, dx = row - how["stride"] * y, column - how["stride"] * x
            assert r[e, y, x, dy, dx, i, j] == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_assignments_of_a_child_sum_to_1_over_all_its_parents(case: tuple[int, ...]) -> None:
    n, height, width, n_in, _, k, _, stride = case
    _, _, cache = caps.field_routing_forward(**routing_inputs(case), **options(case, 4))
    assert len(cache.assignments) == 4
    for t, r in enumerate(cache.assignments):
        total, n_parents = np.zeros((n, height, width, n_in)), np.zeros((height, width))
        for y, x, dy, dx in np.ndindex(*r.shape[1:5]):
            total[:, stride * y + dy, stride * x + dx] += r[:, y, x, dy, dx].sum(axis=-1)
            n_parents[stride * y + dy, stride * x + dx] += r.shape[-1]
        seen = n_parents > 0
        np.testing.assert_allclose(total[:, seen], 1, rtol=1e-12)
        assert (total[:, ~seen] == 0).all()
        if t == 0:  # evenly over the parents of this child: more of them in the middle
            for y, x, dy, dx in np.ndindex(*r.shape[1:5]):
                assert np.allclose(r[:, y, x, dy, dx], 1 / n_parents[stride * y + dy, stride * x + dx])
            assert len(set(n_parents[seen])) > 1 or stride >= k or (height, width) == (k, k)


@pytest.mark.parametrize("form", FORMS)
def test_parents_at_different_positions_compete(form: str) -> None:
    """A pose that only the left parent sees decides how much of the shared children the right parent gets."""
    rng = np.random.default_rng(0)
    pose, a_in = rng.standard_normal((1, 3, 5, 2, 4, 4)), rng.uniform(0.3, 0.7, (1, 3, 5, 2))
    w, betas = rng.standard_normal((3, 3, 2, 3, 4, 4)), (np.zeros(3), np.zeros(3))

    def right(pose: Array, a_in: Array, n_iters: int) -> tuple[Array, Array]:
        mu, a, _ = FORMS[form].field_routing_forward(pose, a_in, w, *betas, n_iters, 1.0, 3, stride=2)
        assert mu.shape[1:3] == (1, 2)
        return mu[:, :, 1], a[:, :, 1]

    changed, activated = pose.copy(), a_in.copy()
    changed[:, :, 0] += 1.0
    activated[:, :, 0] = 0.95
    for other_pose, other_a in ((changed, a_in), (pose, activated)):
        for n_iters, same in ((1, True), (2, False)):
            before, after = right(pose, a_in, n_iters), right(other_pose, other_a, n_iters)
            for x, y in zip(before, after, strict=True):
                assert np.array_equal(x, y) if same else np.abs(x - y).max() > 1e-6


def test_input_activations_count() -> None:
    case = CASES[0]
    inputs, how = routing_inputs(case), options(case)
    mu, a, _ = caps.field_routing_forward(**inputs, **how)
    half = caps.field_routing_forward(**{**inputs, "a_in": 0.5 * inputs["a_in"]}, **how)
    assert np.abs(half[1] - a).max() > 0.01  # half the mass is half the cost
    inputs["a_in"][:, 3, 3] = 0
    off = caps.field_routing_forward(**inputs, **how)
    inputs["pose"][:, 3, 3] += 5
    np.testing.assert_allclose(caps.field_routing_forward(**inputs, **how)[0], off[0], rtol=1e-9)  # it has no say
    assert np.abs(off[0] - mu).max() > 0.01


def test_one_field_is_dense_routing() -> None:
    """With a single field nothing but the unit of mass sets the two routings apart."""
    case = CASES[3]
    n, height, width, n_in, n_out, _, p, _ = case
    inputs, how = routing_inputs(case), options(case)
    mu, a, cache = caps.field_routing_forward(**inputs, **how)
    unit = height * width * n_in / n_out
    votes = cache.em.m_steps[0].votes
    # cost / unit with beta_a is cost with unit * beta_a, at an inverse temperature of 1 / unit
    dense_mu, dense_a, _ = s.em_routing_forward(
        votes, inputs["a_in"].reshape(n, -1), unit * inputs["beta_a"], inputs["beta_v"],
        [1 / unit] * how["n_iters"], FLOOR,
    )  # fmt: skip
    np.testing.assert_allclose(mu.reshape(n, n_out, p * p), dense_mu, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(a.reshape(n, n_out), dense_a, rtol=1e-9)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policy", ["exact", "stop"])
def test_an_image_does_not_depend_on_its_batch_mates(policy: str, form: str) -> None:
    case = (5, *CASES[1][1:])
    inputs, how, routing = routing_inputs(case), options(case), FORMS[form]

    def everything(inputs: dict[str, Any]) -> list[Array]:
        mu, a, cache = routing.field_routing_forward(**inputs, **how)
        dmu, da = np.cos(mu), np.sin(a)
        before = [x.copy() for x in (*inputs.values(), dmu, da)]
        grads = routing.field_routing_backward(dmu, da, cache, policy)
        for x, y in zip(before, (*inputs.values(), dmu, da), strict=True):
            np.testing.assert_array_equal(x, y)
        return [mu, a, *grads[:2]]

    default = everything(inputs)
    for x, y in zip(default, everything(inputs), strict=True):
        np.testing.assert_array_equal(x, y)  # nothing is kept between calls
    order = np.random.default_rng(0).permutation(5)[:4]
    some = everything({**inputs, "pose": inputs["pose"][order], "a_in": inputs["a_in"][order]})
    for x, y in zip(default, some, strict=True):
        np.testing.assert_allclose(x[order], y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", [0.0, 1.0, 300.0])
@pytest.mark.parametrize("policy", ["exact", "stop"])
@pytest.mark.parametrize("form", FORMS)
def test_float32_stays_finite(form: str, policy: str, scale: float) -> None:
    """Votes that all agree, votes far apart, children that are off, and a parent's beta far out."""
    inputs: dict[str, Any] = {k: v.astype(np.float32) for k, v in routing_inputs(CASES[0]).items()}
    inputs["pose"][:] = scale * (inputs["pose"] if scale > 1 else 1)
    inputs["w"] = inputs["w"] if scale > 1 else np.ones_like(inputs["w"])
    inputs["a_in"][0] = 0
    inputs["a_in"][1] = 1
    for beta_a, floor in itertools.product((-1e3, 0.0, 1e3), (1e-4, 3.0)):
        inputs["beta_a"][0] = beta_a
        mu, a, cache = FORMS[form].field_routing_forward(**inputs, n_iters=3, variance_floor=floor, k=3)
        grads = FORMS[form].field_routing_backward(np.ones_like(mu), np.ones_like(a), cache, policy)
        for array in (mu, a, *grads):
            assert array.dtype == np.float32
            assert np.isfinite(array).all()


@pytest.mark.parametrize(("mean", "spread", "w_spread", "floor", "tolerance"), [
    (3.0, 2.0, 1.0, 3.0, 1e-3),  # as in training
    (100.0, 0.3, 0.0, 1e-3, 1e-2),  # far from zero, beside a small floor
    (100.0, 0.03, 1e-3, 1e-3, 1e-2),
])  # fmt: skip
@pytest.mark.parametrize("form", FORMS)
def test_float32_is_float64_rounded(
    form: str, mean: float, spread: float, w_spread: float, floor: float, tolerance: float
) -> None:
    """A variance as a difference of moments keeps its digits, also where votes lie far from zero."""
    case = (2, 8, 8, 4, 3, 3, 4, 2)
    rng = np.random.default_rng(0)
    inputs = routing_inputs(case)
    inputs["pose"] = spread * inputs["pose"] + mean
    inputs["w"] = np.eye(4) + w_spread * inputs["w"]
    outputs: list[tuple[Array, ...]] = []
    for dtype in ("float64", "float32"):
        rounded: dict[str, Any] = {k: v.astype(np.float32).astype(dtype) for k, v in inputs.items()}
        mu, a, cache = FORMS[form].field_routing_forward(**rounded, n_iters=3, variance_floor=floor, k=3, stride=2)
        if not outputs:
            dmu, da = rng.standard_normal(mu.shape), rng.standard_normal(a.shape)
        grads = FORMS[form].field_routing_backward(dmu.astype(dtype), da.astype(dtype), cache, "exact")
        outputs.append((mu, a, *grads))
    for x, y in zip(*outputs, strict=True):
        assert y.dtype == np.float32
        assert np.linalg.norm(x - y) < tolerance * np.linalg.norm(x)


# ----------------------------------------------------------------------------------------------------------------------
# The network
# ----------------------------------------------------------------------------------------------------------------------


def test_shapes_and_parameters_of_the_papers_table() -> None:
    config = net(sizes=(32, 32, 32, 32), n_classes=10, dtype="float32", em_iters=1, plain=True)
    params = caps.conv_capsnet_init(np.random.default_rng(0), config)
    x = np.random.default_rng(1).random((1, 28, 28, 1), np.float32)
    scores, cache = caps.make_capsules(config).forward(params, x)
    assert cache.relu.shape == (1, 14, 14, 32)
    assert cache.a_primary.shape == (1, 14, 14, 32)
    assert cache.convcaps1.mu[0].shape == (1, 6, 6, 32, 16)
    assert cache.convcaps1.a[0].shape == (1, 6, 6, 32)
    assert cache.convcaps1.assignments[0].shape == (1, 6, 6, 3, 3, 32, 32)
    assert cache.convcaps2.mu[0].shape == (1, 4, 4, 32, 16)
    assert cache.convcaps2.a[0].shape == (1, 4, 4, 32)
    assert cache.convcaps2.assignments[0].shape == (1, 4, 4, 3, 3, 32, 32)
    assert cache.mu.shape == (1, 10, 16)
    assert cache.a.shape == scores.shape == (1, 10)
    assert cache.routing.assignments[0].shape == (1, 1, 1, 4, 4, 32, 10)
    assert cache.routing.em.m_steps[0].votes.shape == (1, 4 * 4 * 32, 10, 16)
    sizes = {name: p.size for name, p in params.items()}
    assert sizes["conv1.w"] == 5 * 5 * 32
    assert sizes["primary.w"] == 32 * 32 * (4 * 4 + 1)
    assert sizes["convcaps1.w"] == sizes["convcaps2.w"] == 3 * 3 * 32 * 32 * 4 * 4
    assert sizes["class.w"] == 32 * 10 * 4 * 4
    betas = sum(n for name, n in sizes.items() if "beta" in name)
    assert betas == 2 * (32 + 32 + 10)
    assert sum(sizes.values()) == 800 + 32 + 17408 + 544 + 2 * 147456 + 5120 + betas


def test_coordinates_are_the_centres_of_what_a_position_sees() -> None:
    """Each position of ConvCaps2 answers to a window of pixels; its middle is what is added, in the right column."""
    config = net(em_iters=1)
    params = random_params(config)
    x = np.random.default_rng(0).random((1, 28, 28, 1))
    side, offset = 4, caps.coordinates(28, "float64")
    assert offset.shape == (side, side, 4, 4)
    assert np.count_nonzero(offset) == 2 * side * side

    def a_at(x: Array, row: int, column: int) -> Array:
        return caps.conv_capsnet_forward(params, x, config, caps.PLAIN)[1].convcaps2.a[-1][0, row, column]

    for row, column in ((1, 1), (2, 1), (1, 2)):  # those whose windows end inside the image
        reach: list[list[int]] = [[], []]
        for axis, pixel in itertools.product((0, 1), range(28)):
            other = x.copy()
            other[0, pixel if axis == 0 else slice(None), pixel if axis == 1 else slice(None)] += 1
            if not np.array_equal(a_at(other, row, column), a_at(x, row, column)):
                reach[axis].append(pixel)
        centre = [(pixels[0] + pixels[-1] + 1) / 2 / 28 for pixels in reach]  # pixel p covers p to p + 1
        assert offset[row, column, 0, 3] == pytest.approx(centre[0])
        assert offset[row, column, 1, 3] == pytest.approx(centre[1])
    np.testing.assert_allclose(np.diff(offset[:, 0, 0, 3]), 4 / 28)
    np.testing.assert_allclose(np.diff(offset[0, :, 1, 3]), 4 / 28)


def test_coordinates_are_added_to_the_class_votes() -> None:
    config = net()
    params = random_params(config)
    x = np.random.default_rng(0).random((2, 28, 28, 1))
    _, cache = caps.conv_capsnet_forward(params, x, config, caps.PLAIN)
    votes = cache.routing.em.m_steps[0].votes[1].reshape(4, 4, -1, config.n_classes, 16)  # (S, S, I, E, D)
    for row, column, i, e in np.ndindex(*votes.shape[:4]):
        expected = cache.convcaps2.mu[-1][1, row, column, i].reshape(4, 4) @ params["class.w"][i, e]
        expected[0, 3] += (6.5 + 4 * row) / 28
        expected[1, 3] += (6.5 + 4 * column) / 28
        np.testing.assert_allclose(votes[row, column, i, e].reshape(4, 4), expected, atol=1e-12)


def grads_in_parts(
    params: caps.Params, x: Array, dscores: Array, config: Any, size: int, n_threads: int
) -> list[Array]:
    """Scores, gradients of the parameters and of the images, from parts of ``size`` images on several threads."""

    def work(part: slice) -> tuple[Array, caps.Params, Array | None]:
        scores, cache = caps.conv_capsnet_forward(params, x[part], config)
        return scores, *caps.conv_capsnet_backward(dscores[part], cache, config, need_dx=True)

    with ThreadPoolExecutor(n_threads) as pool:
        scores, grads, dx = zip(*pool.map(work, [slice(i, i + size) for i in range(0, len(x), size)]), strict=True)
    total = [functools.reduce(np.add, [g[name] for g in grads]) for name in sorted(params)]
    return [np.concatenate(scores), np.concatenate(dx), *total]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_parts_add_up_and_threads_change_no_bit(dtype: str) -> None:
    config = net(dtype=dtype)
    params = {name: p.astype(dtype) for name, p in random_params(config).items()}
    rng = np.random.default_rng(0)
    x, dscores = rng.random((7, 28, 28, 1)).astype(dtype), rng.standard_normal((7, 7)).astype(dtype)
    whole, parts, threads = (grads_in_parts(params, x, dscores, config, *how) for how in ((7, 1), (2, 1), (2, 3)))
    for a, b, c in zip(whole, parts, threads, strict=True):
        assert a.dtype == dtype
        np.testing.assert_array_equal(b, c)
        assert np.abs(a - b).max() < (1e-11 if dtype == "float64" else 1e-4) * np.abs(a).max()


def test_part_size() -> None:
    assert caps.part_size(net(sizes=(32, 4, 4, 8), n_classes=10, dtype="float32")) == caps.PART
    for sizes in ((64, 8, 16, 16), (32, 32, 32, 32)):
        config = net(sizes=sizes, n_classes=10, dtype="float32")
        n_votes = 16 * 9 * 36 * sizes[1] * sizes[2]  # of an image's ConvCaps1, the layer that has most
        size = caps.part_size(config)
        assert size == 1 or size * n_votes * 8 <= caps.PART_BYTES < (size + 1) * n_votes * 8
        assert caps.part_size(net(sizes=sizes, n_classes=10)) == max(1, size // 2)
    assert caps.part_size(net(sizes=(32, 32, 32, 32), n_classes=10, dtype="float32")) == 1


@pytest.mark.parametrize("loss", ["cross-entropy", "spread"])
@pytest.mark.parametrize("seed", [100, 101, 102])
def test_training_has_no_nan(seed: int, loss: str) -> None:
    """Large steps, and black images among the others: all their votes are the same."""
    config = net(
        image_size=32, sizes=(4, 2, 2, 2), n_classes=5, em_iters=2, variance_floor=0.5, beta_v_init=-0.2,
        loss=loss, dtype="float32",
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    params = caps.conv_capsnet_init(rng, config)
    labels = rng.integers(0, 5, 8)
    x = s.render_voxels(labels, rng.uniform(0, 150, 8), rng.uniform(10, 50, 8), rng)
    x[0] = 0
    for step in range(12):
        scores, cache = caps.conv_capsnet_forward(params, x, config)
        if loss == "spread":
            value, dscores = s.spread_loss(scores, labels, s.spread_margin(step / 12))
        else:
            value, dscores = s.softmax_cross_entropy(scores, labels)
        grads, _ = caps.conv_capsnet_backward(dscores, cache, config)
        assert math.isfinite(value)
        assert all(np.isfinite(g).all() and g.dtype == np.float32 for g in grads.values())
        for name, gradient in grads.items():
            params[name] -= np.float32(0.03) * np.sign(gradient)
    assert all(np.isfinite(p).all() for p in params.values())


def test_the_matched_cnn_has_about_as_many_parameters() -> None:
    for sizes in ((16, 4, 8, 8), (32, 8, 16, 16), (4, 2, 2, 2)):
        config, rng = net(sizes=sizes, image_size=32, n_classes=5), np.random.default_rng(0)
        n_params = sum(p.size for p in caps.conv_capsnet_init(rng, config).values())
        n_channels = caps.conv_cnn_channels(config, n_params)

        def difference(n: int, config: Any = config, n_params: int = n_params) -> int:
            init = caps.cnn_init(np.random.default_rng(0), caps.conv_cnn_shapes(config, n), config.dtype)
            return abs(sum(p.size for p in init.values()) - n_params)

        for other in (n_channels - 1, n_channels + 1):
            assert other == 0 or difference(n_channels) <= difference(other)
