"""Convolutional matrix capsules of smallnorb_novel_viewpoint.py: gradients, plain loops, the paper's shapes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import value_and_grad

import smallnorb_novel_viewpoint as s
from helpers import check_gradient, run_script, surviving_mutants
from support.optimizers import adamw_step

Array = np.ndarray

LAMBDAS = [0.7, 1.3, 1.0]
CASES = [  # B, H, W, I, J, K, P, stride
    (3, 7, 6, 2, 3, 3, 3, 1),
    (2, 8, 7, 3, 2, 3, 2, 2),  # the last row lies in no field
    (2, 7, 8, 1, 2, 2, 2, 3),  # fields with gaps between them
    (2, 4, 4, 3, 5, 4, 2, 1),  # one field, as for the class capsules
]
FLOOR = 0.7


@dataclasses.dataclass(frozen=True)
class Net:
    """What the network reads; a stand-in for a script's Config."""

    sizes: tuple[int, int, int, int] = (5, 3, 2, 4)
    image_size: int = 28
    in_channels: int = 1
    n_classes: int = 7
    lambdas: list[float] = dataclasses.field(default_factory=lambda: list(LAMBDAS))
    variance_floor: float = FLOOR
    beta_v_init: float = 0.0
    em_grad: str = "exact"
    loss: str = "cross-entropy"
    dtype: str = "float64"


# ----------------------------------------------------------------------------------------------------------------------
# The same functions, stated plainly
# ----------------------------------------------------------------------------------------------------------------------


def loop_routing(
    pose: Array, a_in: Array, w: Array, beta_a: Array, beta_v: Array, lambdas: list[float], stride: int, offset: Array
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
    mean_mass = len(children) / len(parents)  # of a parent, were every child active and shared out evenly
    r = {pair: 1 / len(parents_of[pair[3:]]) for pair in votes}
    mu = np.zeros((*np.max(parents, axis=0) + 1, p * p))
    sigma, a = np.zeros_like(mu), np.zeros(mu.shape[:-1])
    for inverse_temperature in lambdas:
        used = dict(r)
        for q in parents:  # M-step
            total = sum(r[q + c] * a_in[c] for c in children_of[q]) + s.MASS_FLOOR
            mu[q] = sum(r[q + c] * a_in[c] * votes[q + c] for c in children_of[q]) / total
            variance = sum(r[q + c] * a_in[c] * (votes[q + c] - mu[q]) ** 2 for c in children_of[q]) / total
            sigma[q] = np.sqrt(variance + FLOOR)
            cost = sum((beta_v[q[2]] + math.log(sigma[q][h])) * total / mean_mass for h in range(p * p))
            a[q] = 1 / (1 + math.exp(-inverse_temperature * (beta_a[q[2]] - cost)))
        for c in children:  # E-step: all of a child's parents share it, whatever their position
            joint = {}
            for q in parents_of[c]:
                z = (votes[q + c] - mu[q]) / sigma[q]
                joint[q] = a[q] * math.exp(-0.5 * (z @ z)) / np.prod(math.sqrt(2 * math.pi) * sigma[q])
            for q, value in joint.items():
                r[q + c] = value / sum(joint.values())
    return mu, a, used


def plain_routing(
    pose: Any, a_in: Any, w: Any, beta_a: Any, beta_v: Any, lambdas: list[float], stride: int, offset: Array,
    variance_floor: float, detached: Any = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """In whole arrays -> mu, a, (r, mass, mu) of the last M-step.

    With ``detached`` (such a triple) the last M-step alone is computed, with these three held constant.
    """
    n, height, width, n_in, p, _ = pose.shape
    k, n_out = w.shape[0], w.shape[3]
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
    for t, inverse_temperature in enumerate(lambdas):
        if detached is not None:
            inverse_temperature, r = lambdas[-1], detached[0]
        ra = r * a
        mass = anp.sum(ra, axis=2) + s.MASS_FLOOR if detached is None else detached[1]
        weight = (ra / mass[:, :, None])[..., None]
        mu = anp.sum(weight * votes, axis=2)
        centre = (mu if detached is None else detached[2])[:, :, None]
        sigma_sq = anp.sum(weight * (votes - centre) ** 2, axis=2) + variance_floor
        cost = anp.sum(beta_v[:, None] + 0.5 * anp.log(sigma_sq), axis=3) * mass / mean_mass
        out = 1 / (1 + anp.exp(-inverse_temperature * (beta_a - cost)))
        if detached is not None or t == len(lambdas) - 1:
            break
        log_p = -0.5 * anp.sum((votes - centre) ** 2 / sigma_sq[:, :, None] + anp.log(sigma_sq)[:, :, None], axis=4)
        joint = anp.exp(anp.log(out)[:, :, None] + log_p)  # small enough here without a shift
        total = anp.einsum("ec,nei->nci", sees, anp.reshape(anp.sum(joint, axis=3), (n, -1, n_in)))
        r = joint / anp.reshape(total[:, child], (n, h_out * w_out, m, 1))
    return anp.reshape(mu, (n, h_out, w_out, n_out, p, p)), anp.reshape(out, (n, h_out, w_out, n_out)), (r, mass, mu)


def plain_capsnet(params: Any, x: Any, config: Net, detached: Any = None) -> tuple[Any, Any, Any]:
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
            place = (6.5 + 4 * np.arange(side)) / config.image_size
            offset = np.zeros((side, side, 4, 4))
            offset[:, :, 0, 3], offset[:, :, 1, 3] = place[:, None], place[None, :]
        pose, a, constant = plain_routing(
            pose, a, w, params[f"{layer}.beta_a"], params[f"{layer}.beta_v"], config.lambdas, stride, offset,
            config.variance_floor, None if detached is None else detached[t],
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


def options(case: tuple[int, ...], lambdas: list[float] = LAMBDAS) -> dict[str, Any]:
    k, p, stride = case[5:]
    offset = np.random.default_rng(1).standard_normal((k, k, p, p))
    return {"lambdas": lambdas, "variance_floor": FLOOR, "stride": stride, "offset": offset}


def check_routing(case: tuple[int, ...], lambdas: list[float] = LAMBDAS, policy: str = "exact") -> None:
    rng = np.random.default_rng(2)
    inputs, how = routing_inputs(case), options(case, lambdas)
    mu, a, cache = s.conv_em_routing_forward(**inputs, **how)
    dmu, da = rng.standard_normal(mu.shape), rng.standard_normal(a.shape)
    grads = dict(zip(inputs, s.conv_em_routing_backward(dmu, da, cache, policy), strict=True))
    detached = plain_routing(**inputs, **how)[2] if policy == "stop" else None

    def f(**inputs: Any) -> float:
        if policy == "exact":
            mu, a, _ = s.conv_em_routing_forward(**inputs, **how)
        else:
            mu, a, _ = plain_routing(**inputs, **how, detached=detached)
        return float((dmu * mu).sum() + (da * a).sum())

    assert f(**inputs) == pytest.approx(float((dmu * mu).sum() + (da * a).sum()), rel=1e-9)
    check_gradient(f, inputs, grads, rng)


def check_starved() -> None:
    """Almost inactive children: the floor under a parent's mass is a good part of it, and the gradient knows it."""
    case, tiny, rng = CASES[1], 40 * s.MASS_FLOOR, np.random.default_rng(8)
    inputs, how = routing_inputs(case), options(case, [1.0, 1.0])

    def forward(pose: Array, a_in: Array) -> tuple[Array, Array, s.FieldsCache]:
        return s.conv_em_routing_forward(**{**inputs, "pose": pose, "a_in": tiny * a_in}, **how)

    mu, a, cache = forward(inputs["pose"], inputs["a_in"])
    dmu = rng.standard_normal(mu.shape)
    dpose, da_in, *_ = s.conv_em_routing_backward(dmu, np.zeros_like(a), cache, "exact")
    check_gradient(
        lambda pose, a_in: float((dmu * forward(pose, a_in)[0]).sum()),
        {"pose": inputs["pose"], "a_in": inputs["a_in"]}, {"pose": dpose, "a_in": tiny * da_in}, rng,
    )  # fmt: skip


def check_kronecker() -> None:
    rng = np.random.default_rng(3)
    w = rng.standard_normal((5, 2, 3, 3))
    kron = s.kronecker(w)
    dkron = rng.standard_normal(kron.shape)
    check_gradient(
        lambda w: float((dkron * s.kronecker(w)).sum()), {"w": w}, {"w": s.kronecker_backward(dkron, 3)}, rng
    )


def check_routing_all() -> None:
    check_routing(CASES[1])
    check_routing(CASES[1], LAMBDAS[:2], "stop")
    check_starved()


def random_params(config: Any) -> s.Params:
    """Parameters none of which is zero, and such that neither votes nor activations saturate."""
    rng = np.random.default_rng(4)
    params = s.conv_capsnet_init(rng, config)
    return {name: p + 0.2 * rng.standard_normal(p.shape) for name, p in params.items()}


def check_capsnet(config: Net) -> None:
    """Parameters and image, from scores and from class poses. "stop" has the plain network's same constants."""
    rng = np.random.default_rng(5)
    params, x = random_params(config), rng.random((2, config.image_size, config.image_size, config.in_channels))
    scores, cache = s.conv_capsnet_forward(params, x, config)
    dscores, dmu = rng.standard_normal(scores.shape), rng.standard_normal(cache.mu.shape)
    grads, dx = s.conv_capsnet_backward(dscores, cache, config, need_dx=True, dmu=dmu)
    assert dx is not None
    detached = plain_capsnet(params, x, config)[2] if config.em_grad == "stop" else None

    def f(x: Array, **params: Array) -> float:
        if detached is None:
            scores, cache = s.conv_capsnet_forward(params, x, config)
            return float((dscores * scores).sum() + (dmu * cache.mu).sum())
        scores, mu, _ = plain_capsnet(params, x, config, detached)
        return float((dscores * scores).sum() + (dmu * mu).sum())

    # A small step: with thousands of ReLUs a larger one would take some of them over their kink.
    check_gradient(f, {**params, "x": x}, {**grads, "x": dx}, rng, n_directions=1, step=1e-6)


def check_capsnet_both() -> None:
    for loss in ("cross-entropy", "spread"):
        check_capsnet(Net(loss=loss))


def check_conv_cnn() -> None:
    config, rng = Net(sizes=(3, 1, 1, 1), in_channels=2), np.random.default_rng(7)
    params = s.conv_cnn_init(rng, config, 5)
    params = {name: p + 0.1 * rng.standard_normal(p.shape) for name, p in params.items()}
    x = rng.standard_normal((2, 28, 28, 2))
    scores, cache = s.conv_cnn_forward(params, x)
    dscores = rng.standard_normal(scores.shape)
    grads, dx = s.conv_cnn_backward(dscores, cache, need_dx=True)
    assert dx is not None

    def f(x: Array, **params: Array) -> float:
        return float((dscores * s.conv_cnn_forward(params, x)[0]).sum())

    check_gradient(f, {**params, "x": x}, {**grads, "x": dx}, rng, step=1e-6)
    assert s.conv_cnn_backward(dscores, cache)[1] is None  # not wanted, not worked out


CHECKS: dict[str, Callable[[], None]] = {
    "conv_cnn_backward": check_conv_cnn,
    "kronecker_backward": check_kronecker,
    "conv_em_routing_backward": check_routing_all,
    "conv_capsnet_backward": check_capsnet_both,
}
METHODS = ("m_step_backward", "e_step_backward", "finish_backward")
MUTABLE = ("conv_cnn_backward", "conv_em_routing_backward", "conv_capsnet_backward")  # kronecker's has no arithmetic


@pytest.mark.parametrize("policy", ["exact", "stop"])
@pytest.mark.parametrize("n_iters", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_routing_gradient(case: tuple[int, ...], n_iters: int, policy: str) -> None:
    check_routing(case, LAMBDAS[:n_iters], policy)


def test_routing_of_almost_inactive_children() -> None:
    check_starved()


def test_cnn_of_convolutions() -> None:
    check_conv_cnn()


def test_kronecker() -> None:
    check_kronecker()
    rng = np.random.default_rng(0)
    pose, w = rng.standard_normal((5, 3, 3)), rng.standard_normal((5, 2, 3, 3))
    rows = pose.reshape(5, 1, 9) @ s.kronecker(w)
    np.testing.assert_allclose(rows.reshape(5, 2, 3, 3), pose[:, None] @ w, atol=1e-12)


@pytest.mark.parametrize("config", [
    Net(), Net(loss="spread"), Net(em_grad="stop", loss="spread"), Net(em_grad="stop"),
    Net(image_size=32, in_channels=2),
])  # fmt: skip
def test_capsnet_gradient(config: Net) -> None:
    check_capsnet(config)


def test_all_gradients_are_those_of_autograd() -> None:
    config, rng = Net(), np.random.default_rng(6)
    params, x = random_params(config), rng.random((2, 28, 28, 1))
    scores, cache = s.conv_capsnet_forward(params, x, config)
    dscores = rng.standard_normal(scores.shape)
    grads, dx = s.conv_capsnet_backward(dscores, cache, config, need_dx=True)
    oracle = value_and_grad(lambda p: anp.sum(dscores * plain_capsnet(p, p["x"], config)[0]))
    value, expected = oracle({**params, "x": x})
    assert float((dscores * scores).sum()) == pytest.approx(value, rel=1e-9)
    for name, gradient in {**grads, "x": dx}.items():
        assert gradient is not None
        largest = np.abs(expected[name]).max()
        assert largest > 1e-9
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-6, atol=1e-8 * largest, err_msg=name)


@pytest.mark.parametrize("name", METHODS)
def test_a_broken_step_back_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert surviving_mutants(monkeypatch, s.FieldVotes, name, check_routing_all) == []


@pytest.mark.parametrize("name", MUTABLE)
def test_a_broken_backward_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert surviving_mutants(monkeypatch, s, name, CHECKS[name]) == []


# ----------------------------------------------------------------------------------------------------------------------
# Routing: what the paper says, and the mistakes that others made
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_routing_is_the_loop(case: tuple[int, ...]) -> None:
    inputs, how = routing_inputs(case), options(case)
    mu, a, cache = s.conv_em_routing_forward(**inputs, **how)
    (r,) = cache.assignments[-1:]
    betas = inputs["beta_a"], inputs["beta_v"]
    for e in range(len(mu)):
        pose, a_in = inputs["pose"][e], inputs["a_in"][e]
        loop = loop_routing(pose, a_in, inputs["w"], *betas, LAMBDAS, how["stride"], how["offset"])
        np.testing.assert_allclose(mu[e].reshape(loop[0].shape), loop[0], rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(a[e], loop[1], rtol=1e-9)
        for (y, x, j, row, column, i), value in loop[2].items():
            dy, dx = row - how["stride"] * y, column - how["stride"] * x
            assert r[e, y, x, dy, dx, i, j] == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_a_child_is_shared_out_among_all_its_parents(case: tuple[int, ...]) -> None:
    n, height, width, n_in, _, k, _, stride = case
    _, _, cache = s.conv_em_routing_forward(**routing_inputs(case), **options(case, [1.0] * 4))
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


def test_parents_at_different_positions_compete() -> None:
    """A pose that only the left parent sees decides how much of the shared children the right parent gets."""
    rng = np.random.default_rng(0)
    pose, a_in = rng.standard_normal((1, 3, 5, 2, 4, 4)), rng.uniform(0.3, 0.7, (1, 3, 5, 2))
    w, betas = rng.standard_normal((3, 3, 2, 3, 4, 4)), (np.zeros(3), np.zeros(3))

    def right(pose: Array, a_in: Array, n_iters: int) -> tuple[Array, Array]:
        mu, a, _ = s.conv_em_routing_forward(pose, a_in, w, *betas, [1.0] * n_iters, 1.0, stride=2)
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
    mu, a, _ = s.conv_em_routing_forward(**inputs, **how)
    half = s.conv_em_routing_forward(**{**inputs, "a_in": 0.5 * inputs["a_in"]}, **how)
    assert np.abs(half[1] - a).max() > 0.01  # half the mass is half the cost
    inputs["a_in"][:, 3, 3] = 0
    off = s.conv_em_routing_forward(**inputs, **how)
    inputs["pose"][:, 3, 3] += 5
    np.testing.assert_allclose(s.conv_em_routing_forward(**inputs, **how)[0], off[0], rtol=1e-9)  # it has no say
    assert np.abs(off[0] - mu).max() > 0.01


def test_one_field_is_dense_routing() -> None:
    """With a single field nothing but the unit of mass sets the two routings apart."""
    case = CASES[3]
    n, height, width, n_in, n_out, _, p, _ = case
    inputs, how = routing_inputs(case), options(case)
    mu, a, cache = s.conv_em_routing_forward(**inputs, **how)
    unit = height * width * n_in / n_out
    votes = cache.votes().reshape(n, height * width * n_in, n_out, p * p)
    # cost / unit with beta_a is cost with unit * beta_a, at an inverse temperature of 1 / unit
    dense_mu, dense_a, _ = s.em_routing_forward(
        votes, inputs["a_in"].reshape(n, -1), unit * inputs["beta_a"], inputs["beta_v"],
        [x / unit for x in LAMBDAS], FLOOR,
    )  # fmt: skip
    np.testing.assert_allclose(mu.reshape(n, n_out, p * p), dense_mu, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(a.reshape(n, n_out), dense_a, rtol=1e-9)


@pytest.mark.parametrize("policy", ["exact", "stop"])
def test_chunks_and_threads_change_nothing(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = (9, *CASES[1][1:])
    inputs, how = routing_inputs(case), options(case)
    rng = np.random.default_rng(0)

    def everything() -> list[Array]:
        mu, a, cache = s.conv_em_routing_forward(**inputs, **how)
        dmu, da = (np.random.default_rng(1).standard_normal(x.shape) for x in (mu, a))
        before = [x.copy() for x in (*inputs.values(), dmu, da)]
        out = [mu, a, *s.conv_em_routing_backward(dmu, da, cache, policy), *cache.assignments]
        for x, y in zip(before, (*inputs.values(), dmu, da), strict=True):
            np.testing.assert_array_equal(x, y)
        return out

    def equal(xs: list[Array], ys: list[Array], rtol: float) -> None:
        for x, y in zip(xs, ys, strict=True):
            np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol / 1000)

    default = everything()
    equal(default, everything(), rtol=0.0)  # nothing is kept between calls, the scratch memory included
    with s.worker_threads(3):
        equal(default, everything(), rtol=0.0)
    for n_bytes in (1, 1 << 40):
        monkeypatch.setattr(s, "CHUNK_BYTES", n_bytes)
        monkeypatch.setattr(s, "MIN_CHUNKS", 1)
        equal(default, everything(), rtol=1e-9)
    order = rng.permutation(9)  # an example does not depend on its batch-mates
    inputs["pose"], inputs["a_in"] = inputs["pose"][order], inputs["a_in"][order]
    equal([default[0][order], default[1][order]], everything()[:2], rtol=1e-9)


@pytest.mark.parametrize("scale", [0.0, 1.0, 300.0])
@pytest.mark.parametrize("policy", ["exact", "stop"])
def test_float32_stays_finite(policy: str, scale: float) -> None:
    """Votes that all agree, votes far apart, children that are off, and a parent's beta far out."""
    inputs = {k: v.astype(np.float32) for k, v in routing_inputs(CASES[0]).items()}
    inputs["pose"][:] = scale * (inputs["pose"] if scale > 1 else 1)
    inputs["w"] = inputs["w"] if scale > 1 else np.ones_like(inputs["w"])
    inputs["a_in"][0] = 0
    inputs["a_in"][1] = 1
    for beta_a, floor in itertools.product((-1e3, 0.0, 1e3), (1e-4, 3.0)):
        inputs["beta_a"][0] = beta_a
        mu, a, cache = s.conv_em_routing_forward(**inputs, lambdas=[1.0] * 3, variance_floor=floor)
        grads = s.conv_em_routing_backward(np.ones_like(mu), np.ones_like(a), cache, policy)
        for array in (mu, a, *grads, *cache.assignments):
            assert array.dtype == np.float32
            assert np.isfinite(array).all()


def test_float32_is_float64_rounded() -> None:
    """The variance as a difference of moments keeps its digits, with votes and a floor as in training."""
    case = (2, 8, 8, 4, 3, 3, 4, 2)
    inputs = routing_inputs(case)
    inputs["pose"] = 2 * inputs["pose"] + 3  # a mean well away from zero
    small = {k: v.astype(np.float32) for k, v in inputs.items()}
    rng = np.random.default_rng(0)
    exact, rounded = (s.conv_em_routing_forward(**x, lambdas=[1.0] * 3, stride=2) for x in (inputs, small))
    dmu, da = rng.standard_normal(exact[0].shape), rng.standard_normal(exact[1].shape)
    grads = s.conv_em_routing_backward(dmu, da, exact[2], "exact")
    single = s.conv_em_routing_backward(dmu.astype(np.float32), da.astype(np.float32), rounded[2], "exact")
    for x, y in zip((*exact[:2], *grads), (*rounded[:2], *single), strict=True):
        assert np.abs(x - y).max() < 2e-3 * np.abs(x).max()


# ----------------------------------------------------------------------------------------------------------------------
# The network
# ----------------------------------------------------------------------------------------------------------------------


def test_shapes_and_parameters_of_the_papers_table() -> None:
    config = Net(sizes=(32, 32, 32, 32), n_classes=10, dtype="float32", lambdas=[1.0])
    params = s.conv_capsnet_init(np.random.default_rng(0), config)
    x = np.random.default_rng(1).random((1, 28, 28, 1), np.float32)
    scores, cache = s.conv_capsnet_forward(params, x, config)
    assert cache.relu.shape == (1, 14, 14, 32)
    assert cache.convcaps1.pose.shape == (1, 14, 14, 32, 4, 4)
    assert cache.convcaps1.a_in.shape == cache.a_primary.shape == (1, 14, 14, 32)
    assert cache.convcaps2.pose.shape == (1, 6, 6, 32, 4, 4)
    assert cache.convcaps2.a_in.shape == (1, 6, 6, 32)
    assert cache.routing.pose.shape == (1, 4, 4, 32, 4, 4)
    assert cache.routing.a_in.shape == (1, 4, 4, 32)
    assert cache.mu.shape == (1, 10, 16)
    assert cache.a.shape == scores.shape == (1, 10)
    assert cache.routing.assignments[0].shape == (1, 1, 1, 4, 4, 32, 10)
    assert cache.routing.votes().shape == (1, 1, 1, 4, 4, 32, 10, 16)
    sizes = {name: p.size for name, p in params.items()}
    assert sizes["conv1.w"] == 5 * 5 * 32
    assert sizes["primary.w"] == 32 * 32 * (4 * 4 + 1)
    assert sizes["convcaps1.w"] == sizes["convcaps2.w"] == 3 * 3 * 32 * 32 * 4 * 4
    assert sizes["class.w"] == 32 * 10 * 4 * 4
    betas = sum(n for name, n in sizes.items() if "beta" in name)
    assert betas == 2 * (32 + 32 + 10)
    assert s.count_params(params) == 800 + 32 + 17408 + 544 + 2 * 147456 + 5120 + betas


def test_coordinates_are_the_centres_of_what_a_position_sees() -> None:
    """Each position of ConvCaps2 answers to a window of pixels; its middle is what is added, in the right column."""
    config = Net(lambdas=[1.0])
    params = random_params(config)
    x = np.random.default_rng(0).random((1, 28, 28, 1))
    side, offset = 4, s.coordinates(28, "float64")
    assert offset.shape == (side, side, 4, 4)
    assert np.count_nonzero(offset) == 2 * side * side

    def a_at(x: Array, row: int, column: int) -> Array:
        return s.conv_capsnet_forward(params, x, config)[1].routing.a_in[0, row, column]

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
    config = Net()
    params = random_params(config)
    _, cache = s.conv_capsnet_forward(params, np.random.default_rng(0).random((2, 28, 28, 1)), config)
    votes = cache.routing.votes(slice(1, 2))[0, 0, 0]  # (S, S, I, E, D)
    for row, column, i, e in np.ndindex(*votes.shape[:4]):
        expected = cache.routing.pose[1, row, column, i] @ params["class.w"][i, e]
        expected[0, 3] += (6.5 + 4 * row) / 28
        expected[1, 3] += (6.5 + 4 * column) / 28
        np.testing.assert_allclose(votes[row, column, i, e].reshape(4, 4), expected, atol=1e-12)


@pytest.mark.parametrize("loss", ["cross-entropy", "spread"])
@pytest.mark.parametrize("seed", [100, 101, 102])
def test_training_has_no_nan(seed: int, loss: str) -> None:
    """A large learning rate, and black images among the others: all their votes are the same."""
    config = dataclasses.replace(s.Config(), arch="conv", sizes=(4, 2, 2, 2), loss=loss, seed=seed)
    model = s.make_models(config)["capsules"]
    state = s.init_state(model, config)
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 5, 8)
    x = s.render_voxels(labels, rng.uniform(0, 150, 8), rng.uniform(10, 50, 8), rng)
    x[0] = 0
    for step in range(12):
        scores, cache = model.forward(state.params, x)
        value, dscores = model.loss(scores, labels, step / 12)
        grads, _ = model.backward(dscores, cache)
        assert math.isfinite(value)
        assert all(np.isfinite(g).all() and g.dtype == np.float32 for g in grads.values())
        adamw_step(state, [grads], 0.03)
    assert all(np.isfinite(p).all() for p in state.params.values())


# ----------------------------------------------------------------------------------------------------------------------
# The command
# ----------------------------------------------------------------------------------------------------------------------

TINY = ["--batch-size", "4", "--n-train-views", "2", "--n-test-views", "2", "--n-elev", "1", "--n-per-combo", "1"]


def test_the_command_with_conv(tmp_path: Path) -> None:
    """Result, checkpoint, resumption and prediction know the architecture."""
    out, saved = tmp_path / "out.json", tmp_path / "net.ckpt.npz"
    flags = ["--arch", "conv", "--sizes", "4,2,3,2", *TINY, "--checkpoint", saved]
    first = run_script("smallnorb_novel_viewpoint.py", *flags, "--n-epochs", 1, "--out-json", out)
    assert first.returncode == 0, first.stderr
    result = json.loads(out.read_text())
    assert result["config"]["arch"] == "conv"
    assert result["config"]["sizes"] == [4, 2, 3, 2]
    config = s.Config(arch="conv", sizes=(4, 2, 3, 2))
    n_params = s.count_params(s.make_models(config)["capsules"].init_params(np.random.default_rng(0)))
    assert result["models"]["capsules"]["n_params"] == n_params
    assert 0 <= result["models"]["capsules"]["true_class_share"] <= 1
    again = run_script("smallnorb_novel_viewpoint.py", *flags, "--n-epochs", 2, "--resume")
    assert again.returncode == 0, again.stderr
    config, states = s.load_checkpoint(saved)
    assert config.sizes == (4, 2, 3, 2)
    image = s.render_voxels(np.array([1]), np.array([30.0]), np.array([20.0]), None)[0, :, :, 0]
    picture = tmp_path / "picture.png"
    from PIL import Image

    Image.fromarray((255 * image).astype(np.uint8)).save(picture)
    table = s.predict(saved, [picture], config)
    x = s.read_picture(picture, config)
    scores = s.predict_scores(s.make_models(config)["capsules"], states["capsules"].params, x)
    assert config.classes[int(scores.argmax())] in table.splitlines()[1]
    dense = run_script("smallnorb_novel_viewpoint.py", *TINY, "--checkpoint", saved, "--resume")
    assert dense.returncode == 1
    assert dense.stderr.count("\n") == 1
    assert "--arch conv" in dense.stderr


@pytest.mark.parametrize("flags", [["--sizes", "4,2,2,2"], ["--arch", "dense", "--sizes", "4,2,2,2"]])
def test_sizes_need_conv(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        s.main(flags)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "argument --sizes: needs --arch conv" in error


def test_the_matched_cnn_follows_the_architecture() -> None:
    for sizes in ((16, 4, 8, 8), (32, 8, 16, 16), (4, 2, 2, 2)):
        config, rng = s.Config(arch="conv", sizes=sizes), np.random.default_rng(0)
        models = s.make_models(config)
        counts = {name: s.count_params(m.init_params(rng)) for name, m in models.items()}
        n_channels = s.conv_cnn_channels(config, counts["capsules"])
        for other in (n_channels - 1, n_channels + 1):
            if other:
                count = s.count_params(s.conv_cnn_init(rng, config, other))
                assert abs(counts["cnn_matched"] - counts["capsules"]) <= abs(count - counts["capsules"])
