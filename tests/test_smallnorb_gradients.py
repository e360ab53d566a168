"""Every gradient of smallnorb_novel_viewpoint.py: against differences, against autograd, against plain loops.

``PYTHONPATH=. python tests/test_smallnorb_gradients.py`` writes the reference of the ten-step loss curve again, from
the autograd network below and not from the script's gradients.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import value_and_grad

import smallnorb_novel_viewpoint as s
from fast.optimizers import adamw_step
from helpers import DATA, check_gradient, surviving_mutants
from support.optimizers import TrainState

Array = np.ndarray
REFERENCE = DATA / "smallnorb_ten_steps.json"

CONV_CASES = [  # B, H, W, C, F, K, stride, pad
    (2, 7, 5, 3, 4, 3, 1, 0),
    (3, 9, 6, 2, 5, 3, 2, 1),
    (1, 11, 8, 1, 3, 5, 2, 2),
    (2, 10, 7, 2, 3, 3, 3, 0),
    (2, 5, 9, 3, 2, 1, 2, 0),
    (2, 6, 5, 2, 3, 4, 3, 3),
]
LAMBDAS = [[0.8], [1.3], [1.3, 1.3], [0.4, 0.8], [0.8, 0.8, 0.8], [0.43, 0.87, 1.3], [0.04, 0.08, 0.11, 0.15]]


# ----------------------------------------------------------------------------------------------------------------------
# The same functions, stated plainly
# ----------------------------------------------------------------------------------------------------------------------


def loop_conv(x: Array, w: Array, b: Array, stride: int, pad: int) -> Array:
    """Cross-correlation, one output number at a time."""
    n, height, width, channels = x.shape
    k, _, _, n_filters = w.shape
    h_out, w_out = (height + 2 * pad - k) // stride + 1, (width + 2 * pad - k) // stride + 1
    out = np.zeros((n, h_out, w_out, n_filters))
    for e, row, column, f in np.ndindex(out.shape):
        total = b[f]
        for i, j, c in itertools.product(range(k), range(k), range(channels)):
            y, z = row * stride + i - pad, column * stride + j - pad
            if 0 <= y < height and 0 <= z < width:
                total += x[e, y, z, c] * w[i, j, c, f]
        out[e, row, column, f] = total
    return out


def loop_em_routing(
    votes: Array, a_in: Array, beta_a: Array, beta_v: Array, lambdas: list[float]
) -> tuple[Array, Array, list[Array]]:
    """Procedure 1 of the paper for one example (votes (I, J, D)), one number at a time -> mu, a, R of each M-step."""
    n_in, n_out, d = votes.shape
    r = [[1 / n_out] * n_out for _ in range(n_in)]
    used = []
    for inverse_temperature in lambdas:
        used.append(np.array(r))
        mu, sigma, a = np.zeros((n_out, d)), np.zeros((n_out, d)), np.zeros(n_out)
        for j in range(n_out):  # M-step
            weights = [r[i][j] * a_in[i] for i in range(n_in)]
            total = sum(weights) + s.MASS_FLOOR
            cost = 0.0
            for h in range(d):
                mu[j, h] = sum(weights[i] * votes[i, j, h] for i in range(n_in)) / total
                squares = sum(weights[i] * (votes[i, j, h] - mu[j, h]) ** 2 for i in range(n_in))
                sigma[j, h] = math.sqrt(squares / total + s.VARIANCE_FLOOR)
                cost += (beta_v[j] + math.log(sigma[j, h])) * total
            a[j] = 1 / (1 + math.exp(-inverse_temperature * (beta_a[j] - cost)))
        for i in range(n_in):  # E-step
            p = []
            for j in range(n_out):
                density = 1.0
                for h in range(d):
                    density *= math.exp(-((votes[i, j, h] - mu[j, h]) ** 2) / (2 * sigma[j, h] ** 2))
                    density /= math.sqrt(2 * math.pi) * sigma[j, h]
                p.append(a[j] * density)
            r[i] = [x / sum(p) for x in p]
    return mu, a, used


def plain_conv(x: Any, w: Any, b: Any, stride: int, pad: int) -> Any:
    k = w.shape[0]
    x = anp.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)), "constant")
    h_out, w_out = (x.shape[1] - k) // stride + 1, (x.shape[2] - k) // stride + 1
    out = b
    for i, j in itertools.product(range(k), range(k)):
        window = x[:, i : i + stride * (h_out - 1) + 1 : stride, j : j + stride * (w_out - 1) + 1 : stride]
        out = out + anp.einsum("nhwc,cf->nhwf", window, w[i, j])
    return out


def plain_em_routing(
    votes: Any, a_in: Any, beta_a: Any, beta_v: Any, lambdas: list[float], detached: Any = None
) -> tuple[Any, Any, Any]:
    """EM routing in whole arrays -> mu, a, (r, mass, mu) of the last M-step.

    With ``detached`` (such a triple) the last M-step alone is computed, with these three held constant.
    """
    n, n_in, n_out, d = votes.shape
    r = anp.ones((n, n_in, n_out)) / n_out
    for t, inverse_temperature in enumerate(lambdas):
        if detached is not None:
            inverse_temperature, r = lambdas[-1], detached[0]
        ra = r * anp.reshape(a_in, (n, n_in, 1))
        mass = anp.sum(ra, axis=1) + s.MASS_FLOOR if detached is None else detached[1]
        ra4, mass4 = anp.reshape(ra, (n, n_in, n_out, 1)), anp.reshape(mass, (n, n_out, 1))
        mu = anp.sum(ra4 * votes, axis=1) / mass4
        centre = anp.reshape(mu if detached is None else detached[2], (n, 1, n_out, d))
        sigma = anp.sqrt(anp.sum(ra4 * (votes - centre) ** 2, axis=1) / mass4 + s.VARIANCE_FLOOR)
        cost = anp.sum((anp.reshape(beta_v, (n_out, 1)) + anp.log(sigma)) * mass4, axis=2)
        a = 1 / (1 + anp.exp(-inverse_temperature * (beta_a - cost)))
        if detached is not None or t == len(lambdas) - 1:
            break
        sigma4 = anp.reshape(sigma, (n, 1, n_out, d))
        log_p = anp.sum(-((votes - centre) ** 2) / (2 * sigma4**2) - anp.log(sigma4 * math.sqrt(2 * math.pi)), axis=3)
        joint = anp.reshape(anp.log(a), (n, 1, n_out)) + log_p
        p = anp.exp(joint - anp.max(joint, axis=2, keepdims=True))
        r = p / anp.sum(p, axis=2, keepdims=True)
    return mu, a, (r, mass, mu)


def plain_capsules(params: Any, x: Any, config: s.Config, detached: Any = None) -> tuple[Any, Any]:
    """Class scores, and what ``detached`` takes."""
    hidden = anp.maximum(plain_conv(x, params["conv1.w"], params["conv1.b"], 2, 2), 0)
    primary = anp.dot(anp.reshape(hidden, (len(x), -1)), params["primary.w"]) + params["primary.b"]
    n_pose = s.N_PRIMARY * s.POSE_SIDE**2
    pose = anp.reshape(primary[:, :n_pose], (len(x), s.N_PRIMARY, s.POSE_SIDE, s.POSE_SIDE))
    a_in = 1 / (1 + anp.exp(-primary[:, n_pose:]))
    votes = anp.einsum("nipq,ijqr->nijpr", pose, params["class.w"])
    votes = anp.reshape(votes, (len(x), s.N_PRIMARY, s.N_CLASSES, s.POSE_SIDE**2))
    mu, a, constants = plain_em_routing(
        votes, a_in, params["class.beta_a"], params["class.beta_v"], config.lambdas, detached
    )
    scores = a if config.loss == "spread" else s.POSE_SCORE * anp.sum(mu**2, axis=2) + s.ACTIVATION_SCORE * (a - 0.5)
    return scores, constants


def plain_cnn(params: Any, x: Any) -> Any:
    features = anp.maximum(plain_conv(x, params["conv1.w"], params["conv1.b"], 2, 2), 0)
    hidden = anp.dot(anp.reshape(features, (len(x), -1)), params["hidden.w"]) + params["hidden.b"]
    return anp.dot(anp.maximum(hidden, 0), params["out.w"]) + params["out.b"]


def plain_loss(scores: Any, labels: Array, loss: str, margin: float) -> Any:
    rows = np.arange(len(labels))
    target = anp.reshape(scores[rows, labels], (-1, 1))
    if loss == "spread":
        others = 1 - np.eye(scores.shape[1])[labels]
        return anp.sum(others * anp.maximum(0, margin - (target - scores)) ** 2) / len(labels)
    return -anp.mean(anp.log(anp.exp(target[:, 0]) / anp.sum(anp.exp(scores), axis=1)))


# ----------------------------------------------------------------------------------------------------------------------
# Primitive pairs against differences. Each check below is also what the mutants have to get past.
# ----------------------------------------------------------------------------------------------------------------------


def weighted(upstream: Array, out: Array) -> float:
    assert upstream.shape == out.shape
    return float((upstream * out).sum())


def check_conv(case: tuple[int, ...]) -> None:
    n, height, width, channels, n_filters, k, stride, pad = case
    rng = np.random.default_rng(case)
    x, b = rng.standard_normal((n, height, width, channels)), rng.standard_normal(n_filters)
    w = rng.standard_normal((k, k, channels, n_filters))
    out, cache = s.conv2d_forward(x, w, b, stride, pad)
    dout = rng.standard_normal(out.shape)
    dx, dw, db = s.conv2d_backward(dout, cache)
    assert dx is not None
    check_gradient(
        lambda x, w, b: weighted(dout, s.conv2d_forward(x, w, b, stride, pad)[0]),
        {"x": x, "w": w, "b": b},
        {"x": dx, "w": dw, "b": db},
        rng,
    )
    nothing, dw, db = s.conv2d_backward(dout, cache, need_dx=False)  # the first layer's path
    assert nothing is None
    check_gradient(
        lambda w, b: weighted(dout, s.conv2d_forward(x, w, b, stride, pad)[0]),
        {"w": w, "b": b},
        {"w": dw, "b": db},
        rng,
    )


def check_linear() -> None:
    rng = np.random.default_rng(1)
    x, w, b = rng.standard_normal((3, 7)), rng.standard_normal((7, 5)), rng.standard_normal(5)
    out, cache = s.linear_forward(x, w, b)
    dout = rng.standard_normal(out.shape)
    dx, dw, db = s.linear_backward(dout, cache)
    check_gradient(
        lambda x, w, b: weighted(dout, s.linear_forward(x, w, b)[0]),
        {"x": x, "w": w, "b": b},
        {"x": dx, "w": dw, "b": db},
        rng,
    )


def check_elementwise(forward: Callable[..., Any], backward: str) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((3, 7, 5)) * 2
    x[np.abs(x) < 1e-3] = 0.5  # away from the kink of a ReLU
    out, cache = forward(x)
    dout = rng.standard_normal(out.shape)
    check_gradient(lambda x: weighted(dout, forward(x)[0]), {"x": x}, {"x": getattr(s, backward)(dout, cache)}, rng)


def check_votes() -> None:
    rng = np.random.default_rng(3)
    pose, w = rng.standard_normal((2, 7, 3, 3)), rng.standard_normal((7, 5, 3, 3))
    out, cache = s.votes_forward(pose, w)
    dvotes = rng.standard_normal(out.shape)
    dpose, dw = s.votes_backward(dvotes, cache)
    check_gradient(
        lambda pose, w: weighted(dvotes, s.votes_forward(pose, w)[0]),
        {"pose": pose, "w": w},
        {"pose": dpose, "w": dw},
        rng,
    )


def em_inputs(rng: np.random.Generator, n: int = 3, n_in: int = 5, n_out: int = 4, d: int = 7) -> dict[str, Any]:
    return {
        "votes": rng.standard_normal((n, n_in, n_out, d)),
        "a_in": rng.uniform(0.1, 0.9, (n, n_in)),
        "beta_a": rng.standard_normal(n_out),
        "beta_v": 0.3 * rng.standard_normal(n_out),
    }


def check_m_step(activity: float = 1.0) -> None:
    """With an ``activity`` of the order of MASS_FLOOR, the floor is a good part of a parent's mass."""
    rng = np.random.default_rng(9)
    em = em_inputs(rng)
    inputs = {"r": rng.uniform(0.1, 0.9, em["votes"].shape[:3]), **em}
    given = (1.3, 0.7)  # inverse temperature, variance floor

    def forward(r: Array, a_in: Array, votes: Array, beta_a: Array, beta_v: Array) -> tuple[Any, ...]:
        return s.m_step_forward(r, activity * a_in, votes, beta_a, beta_v, *given)

    mu, sigma_sq, a, log_a, cache = forward(**inputs)
    np.testing.assert_allclose(a, np.exp(log_a), rtol=1e-12)
    dmu, dsigma_sq, dlog_a = (rng.standard_normal(x.shape) for x in (mu, sigma_sq, log_a))
    dr, dvotes, da_in, dbeta_a, dbeta_v = s.m_step_backward(dmu, dsigma_sq, dlog_a, cache, "exact")

    def f(**inputs: Any) -> float:
        mu, sigma_sq, _, log_a, _ = forward(**inputs)
        return weighted(dmu, mu) + weighted(dsigma_sq, sigma_sq) + weighted(dlog_a, log_a)

    grads = {"r": dr, "votes": dvotes, "a_in": activity * da_in}
    if activity == 1:  # otherwise the cost is lost in rounding
        grads |= {"beta_a": dbeta_a, "beta_v": dbeta_v}
    check_gradient(lambda **changed: f(**(inputs | changed)), {name: inputs[name] for name in grads}, grads, rng)


def check_e_step() -> None:
    rng = np.random.default_rng(10)
    inputs: dict[str, Any] = {
        "mu": rng.standard_normal((3, 4, 7)),
        "sigma_sq": rng.uniform(0.7, 3, (3, 4, 7)),
        "log_a": rng.standard_normal((3, 4)),
        "votes": rng.standard_normal((3, 5, 4, 7)),
    }
    r, cache = s.e_step_forward(**inputs)
    dr = rng.standard_normal(r.shape)
    grads = dict(zip(("mu", "sigma_sq", "log_a", "votes"), s.e_step_backward(dr, cache), strict=True))
    check_gradient(lambda **inputs: weighted(dr, s.e_step_forward(**inputs)[0]), inputs, grads, rng)


def check_em(policy: str, lambdas: list[float]) -> None:
    rng = np.random.default_rng(len(lambdas))
    inputs = em_inputs(rng)
    mu, a, cache = s.em_routing_forward(**inputs, lambdas=lambdas)
    dmu, da = rng.standard_normal(mu.shape), rng.standard_normal(a.shape)
    dvotes, da_in, dbeta_a, dbeta_v = s.em_routing_backward(dmu, da, cache, policy)
    detached = plain_em_routing(**inputs, lambdas=lambdas)[2]

    def f(**inputs: Any) -> float:
        if policy == "exact":
            mu, a, _ = s.em_routing_forward(**inputs, lambdas=lambdas)
        else:
            mu, a, _ = plain_em_routing(**inputs, lambdas=lambdas, detached=detached)
        return weighted(dmu, mu) + weighted(da, a)

    assert f(**inputs) == pytest.approx(weighted(dmu, mu) + weighted(da, a), rel=1e-12)
    check_gradient(f, inputs, {"votes": dvotes, "a_in": da_in, "beta_a": dbeta_a, "beta_v": dbeta_v}, rng)


def check_em_starved() -> None:
    """Almost inactive children: the floor under a parent's mass is a good part of it, and the gradient knows it."""
    rng = np.random.default_rng(8)
    inputs, lambdas, tiny = em_inputs(rng), [1.0, 1.0], 20 * s.MASS_FLOOR

    def forward(votes: Array, a_in: Array, beta_a: Array, beta_v: Array) -> tuple[Array, Array, Any]:
        return s.em_routing_forward(votes, tiny * a_in, beta_a, beta_v, lambdas)

    mu, _, cache = forward(**inputs)
    dmu = rng.standard_normal(mu.shape)
    dvotes, da_in, _, _ = s.em_routing_backward(dmu, np.zeros(mu.shape[:2]), cache, "exact")
    check_gradient(
        lambda votes, a_in: weighted(dmu, forward(votes, a_in, inputs["beta_a"], inputs["beta_v"])[0]),
        {"votes": inputs["votes"], "a_in": inputs["a_in"]},
        {"votes": dvotes, "a_in": tiny * da_in},
        rng,
    )


def check_cross_entropy() -> None:
    rng = np.random.default_rng(4)
    scores, labels = 2 * rng.standard_normal((7, 5)), rng.integers(0, 5, 7)
    _, dscores = s.softmax_cross_entropy(scores, labels)
    check_gradient(
        lambda scores: s.softmax_cross_entropy(scores, labels)[0], {"scores": scores}, {"scores": dscores}, rng
    )


def check_spread(margin: float = 0.7) -> None:
    rng = np.random.default_rng(5)
    activations, labels = rng.uniform(0, 1, (7, 5)), rng.integers(0, 5, 7)
    _, da = s.spread_loss(activations, labels, margin)
    check_gradient(
        lambda activations: s.spread_loss(activations, labels, margin)[0],
        {"activations": activations},
        {"activations": da},
        rng,
    )


def check_class_scores() -> None:
    rng = np.random.default_rng(6)
    mu, a, dscores = rng.standard_normal((3, 5, 9)), rng.uniform(0, 1, (3, 5)), rng.standard_normal((3, 5))

    def f(mu: Array, a: Array) -> float:
        return float((dscores * s.class_scores_forward(mu, a, "cross-entropy")).sum())

    dmu, da = s.class_scores_backward(dscores, mu, "cross-entropy")
    check_gradient(f, {"mu": mu, "a": a}, {"mu": dmu, "a": da}, rng)
    np.testing.assert_array_equal(s.class_scores_forward(mu, a, "spread"), a)
    dmu, da = s.class_scores_backward(dscores, mu, "spread")
    assert not dmu.any()
    np.testing.assert_array_equal(da, dscores)


@pytest.mark.parametrize("case", CONV_CASES)
def test_conv2d(case: tuple[int, ...]) -> None:
    check_conv(case)


@pytest.mark.parametrize("case", CONV_CASES)
def test_conv2d_is_the_loop(case: tuple[int, ...]) -> None:
    n, height, width, channels, n_filters, k, stride, pad = case
    rng = np.random.default_rng(case)
    x, b = rng.standard_normal((n, height, width, channels)), rng.standard_normal(n_filters)
    w = rng.standard_normal((k, k, channels, n_filters))
    np.testing.assert_allclose(s.conv2d_forward(x, w, b, stride, pad)[0], loop_conv(x, w, b, stride, pad), atol=1e-12)


def test_linear() -> None:
    check_linear()


def test_relu() -> None:
    check_elementwise(s.relu_forward, "relu_backward")


def test_sigmoid() -> None:
    check_elementwise(s.sigmoid_forward, "sigmoid_backward")


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-14)])
def test_sigmoid_keeps_its_relative_accuracy(dtype: str, tolerance: float) -> None:
    x = np.linspace(-80, 80, 4001).astype(dtype)
    exact = [math.exp(v) / (1 + math.exp(v)) if v < 0 else 1 / (1 + math.exp(-v)) for v in x.tolist()]
    out, _ = s.sigmoid_forward(x)
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sigmoid_has_no_overflow(dtype: str) -> None:
    x = np.array([-np.inf, -1e4, -1e3, 1e3, 1e4, np.inf], dtype)
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        out, cache = s.sigmoid_forward(x)
        dx = s.sigmoid_backward(np.ones(6, dtype), cache)
    np.testing.assert_array_equal(out, [0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(dx, 0)


def test_votes() -> None:
    check_votes()


def test_votes_are_pose_times_matrix() -> None:
    rng = np.random.default_rng(0)
    pose, w = rng.standard_normal((2, 3, 4, 4)), rng.standard_normal((3, 5, 4, 4))
    votes = s.votes_forward(pose, w)[0]
    assert votes.shape == (2, 3, 5, 16)
    for b, i, j in np.ndindex(2, 3, 5):
        np.testing.assert_allclose(votes[b, i, j], (pose[b, i] @ w[i, j]).ravel(), atol=1e-12)


@pytest.mark.parametrize("lambdas", LAMBDAS)
@pytest.mark.parametrize("policy", ["exact", "stop"])
def test_em_routing(policy: str, lambdas: list[float]) -> None:
    check_em(policy, lambdas)


@pytest.mark.parametrize("lambdas", LAMBDAS)
def test_em_routing_is_the_loop(lambdas: list[float]) -> None:
    inputs = em_inputs(np.random.default_rng(len(lambdas)))
    mu, a, _ = s.em_routing_forward(**inputs, lambdas=lambdas)
    plain_mu, plain_a, (plain_r, _, _) = plain_em_routing(**inputs, lambdas=lambdas)
    for n in range(len(mu)):
        votes, a_in = inputs["votes"][n], inputs["a_in"][n]
        loop_mu, loop_a, loop_r = loop_em_routing(votes, a_in, inputs["beta_a"], inputs["beta_v"], lambdas)
        np.testing.assert_allclose(mu[n], loop_mu, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(a[n], loop_a, rtol=1e-9)
        np.testing.assert_allclose(plain_mu[n], loop_mu, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(plain_a[n], loop_a, rtol=1e-9)
        np.testing.assert_allclose(plain_r[n], loop_r[-1], rtol=1e-9)


def test_em_policies_agree_where_nothing_is_detached_twice() -> None:
    """With one iteration, upstream on mu alone and equal input activations, "stop" lacks only the mass's share."""
    rng = np.random.default_rng(0)
    mu, a, cache = s.em_routing_forward(**em_inputs(rng), lambdas=[1.0])
    dmu, da = rng.standard_normal(mu.shape), rng.standard_normal(a.shape)
    exact, stop = (s.em_routing_backward(dmu, np.zeros_like(a), cache, policy) for policy in ("exact", "stop"))
    np.testing.assert_allclose(exact[0], stop[0], rtol=1e-12)
    assert not np.allclose(exact[1], stop[1])
    # With more iterations they must part company, or "exact" would stop as well.
    _, _, cache = s.em_routing_forward(**em_inputs(rng), lambdas=[1.0] * 3)
    exact, stop = (s.em_routing_backward(dmu, da, cache, policy) for policy in ("exact", "stop"))
    assert not np.allclose(exact[0], stop[0], rtol=0.1)


@pytest.mark.parametrize("activity", [1, 20 * s.MASS_FLOOR])
def test_m_step(activity: float) -> None:
    check_m_step(activity)


def test_e_step() -> None:
    check_e_step()


@pytest.mark.parametrize("n_iters", [1, 2, 3])
@pytest.mark.parametrize("policy", ["exact", "stop"])
def test_em_routing_of_votes_far_from_zero(policy: str, n_iters: int) -> None:
    """In float32, with a mean of 100 and a floor of 1e-3, the gradients are those of float64."""
    rng = np.random.default_rng(11)
    single = {name: x.astype(np.float32) for name, x in em_inputs(rng).items()}
    single["votes"] += np.float32(100)
    upstream = rng.standard_normal((3, 4, 7)).astype(np.float32), rng.standard_normal((3, 4)).astype(np.float32)
    results = []
    for dtype in ("float32", "float64"):
        inputs = {name: x.astype(dtype) for name, x in single.items()}
        mu, a, cache = s.em_routing_forward(**inputs, lambdas=[1.0] * n_iters, variance_floor=1e-3)
        dmu, da = (d.astype(dtype) for d in upstream)
        results.append([mu, a, *s.em_routing_backward(dmu, da, cache, policy)])
    for ours, exact in zip(*results, strict=True):
        assert ours.dtype == np.float32
        assert np.linalg.norm(ours - exact) < 1e-3 * np.linalg.norm(exact)


def test_em_routing_of_almost_inactive_children() -> None:
    check_em_starved()


def test_softmax_cross_entropy() -> None:
    check_cross_entropy()


@pytest.mark.parametrize("margin", [0.2, 0.7, 0.9])
def test_spread_loss(margin: float) -> None:
    check_spread(margin)


# ----------------------------------------------------------------------------------------------------------------------
# Whole networks
# ----------------------------------------------------------------------------------------------------------------------

PROGRESS = 0.6


def random_params(model: s.Model, seed: int = 0) -> s.Params:
    """Parameters of the network's shapes, none of them zero, and such that neither votes nor activations saturate."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, p in model.init_params(rng).items():
        noise = rng.standard_normal(p.shape)
        if name == "class.w":
            params[name] = np.eye(s.POSE_SIDE) + 0.3 * noise
        elif name == "class.beta_v":
            params[name] = -0.5 * math.log(s.VARIANCE_FLOOR) + 0.1 * noise  # a cost near zero
        else:
            params[name] = noise * {"conv1.w": 0.2, "primary.w": 0.04}.get(name, 1.5 / math.sqrt(max(p.shape[0], 200)))
    return params


def images_and_labels(n: int, channels: int = 1, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng((seed, 1))
    return rng.random((n, s.IMAGE_SIZE, s.IMAGE_SIZE, channels)), rng.permutation(np.arange(n) % s.N_CLASSES)


def check_model(name: str, config: s.Config, n_directions: int = 1) -> None:
    """Parameters and image, through the loss. "stop" is checked against the plain network with the same constants."""
    model = s.make_models(config)[name]
    params, (x, labels) = random_params(model), images_and_labels(3, config.in_channels)
    scores, cache = model.forward(params, x)
    loss, dscores = model.loss(scores, labels, PROGRESS)
    grads, dx = model.backward(dscores, cache, need_dx=True)
    assert dx is not None
    detached = plain_capsules(params, x, config)[1] if name == "capsules" and config.em_grad == "stop" else None

    def f(x: Array, **params: Array) -> float:
        scores = model.forward(params, x)[0] if detached is None else plain_capsules(params, x, config, detached)[0]
        return model.loss(scores, labels, PROGRESS)[0]

    assert f(x=x, **params) == pytest.approx(loss, rel=1e-12)
    rng = np.random.default_rng(6)
    # A small step: with thousands of ReLUs a larger one would take some of them over their kink.
    check_gradient(f, {**params, "x": x}, {**grads, "x": dx}, rng, n_directions=n_directions, step=1e-6)


@pytest.mark.parametrize("dataset", ["voxels", "smallnorb"])
@pytest.mark.parametrize("em_grad", ["exact", "stop"])
@pytest.mark.parametrize("loss", ["cross-entropy", "spread"])
def test_capsules(loss: str, em_grad: str, dataset: str) -> None:
    check_model("capsules", s.Config(loss=loss, em_grad=em_grad, dtype="float64", dataset=dataset))


@pytest.mark.parametrize("name", ["cnn", "cnn_matched"])
def test_cnn(name: str) -> None:
    check_model(name, s.Config(dtype="float64"))


def plain_network(name: str, config: s.Config) -> Callable[[Any, Any], Any]:
    return (lambda params, x: plain_capsules(params, x, config)[0]) if name == "capsules" else plain_cnn


@pytest.mark.parametrize(
    ("name", "loss"), [("capsules", "cross-entropy"), ("capsules", "spread"), ("cnn", "cross-entropy")]
)
def test_all_gradients_are_those_of_autograd(name: str, loss: str) -> None:
    """The oracle is not ours: autograd on a plain statement of the network, three EM iterations and all."""
    config = s.Config(loss=loss, dtype="float64")
    model, network = s.make_models(config)[name], plain_network(name, config)
    params, (x, labels) = random_params(model), images_and_labels(4)
    scores, cache = model.forward(params, x)
    value, dscores = model.loss(scores, labels, PROGRESS)
    grads, dx = model.backward(dscores, cache, need_dx=True)

    margin = 0.2 + 0.7 * PROGRESS
    oracle = value_and_grad(lambda inputs: plain_loss(network(inputs, inputs["x"]), labels, loss, margin))
    expected_value, expected = oracle({**params, "x": x})
    assert value == pytest.approx(expected_value, rel=1e-12)
    for key, gradient in {**grads, "x": dx}.items():
        assert gradient is not None
        assert np.abs(expected[key]).max() > 1e-9
        np.testing.assert_allclose(
            gradient, expected[key], rtol=1e-7, atol=1e-10 * np.abs(expected[key]).max(), err_msg=key
        )


# ----------------------------------------------------------------------------------------------------------------------
# Mutants: every backward is broken in every place, and each break must be seen
# ----------------------------------------------------------------------------------------------------------------------


def check_em_all() -> None:
    for policy, lambdas in (("exact", [0.7, 1.3, 1.0]), ("stop", [0.7, 1.3])):
        check_em(policy, lambdas)
    check_em_starved()


def check_m_step_all() -> None:
    check_m_step()
    check_m_step(20 * s.MASS_FLOOR)
    check_em_all()


def check_capsules_all() -> None:
    for loss in ("cross-entropy", "spread"):
        check_model("capsules", s.Config(loss=loss, dtype="float64"))


CHECKS: dict[str, Callable[[], None]] = {
    "conv2d_backward": lambda: check_conv(CONV_CASES[1]),
    "linear_backward": check_linear,
    "relu_backward": lambda: check_elementwise(s.relu_forward, "relu_backward"),
    "sigmoid_backward": lambda: check_elementwise(s.sigmoid_forward, "sigmoid_backward"),
    "votes_backward": check_votes,
    "m_step_backward": check_m_step_all,
    "e_step_backward": check_e_step,
    "em_routing_backward": check_em_all,
    "class_scores_backward": check_class_scores,
    "capsules_backward": check_capsules_all,
    "cnn_backward": lambda: check_model("cnn", s.Config(dtype="float64")),
    "softmax_cross_entropy": check_cross_entropy,
    "spread_loss": check_spread,
}
HARMLESS = {
    "softmax_cross_entropy": ["shifted = scores - scores.max"],  # a softmax is the same whatever is added to all scores
    "class_scores_backward": ["return np.zeros_like(mu), dscores"],  # zeros with another factor
}


def test_every_backward_has_a_check() -> None:
    backwards = {name for name in vars(s) if name.endswith("_backward")}
    assert backwards | {"softmax_cross_entropy", "spread_loss"} == set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_a_broken_backward_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    survivors = surviving_mutants(monkeypatch, s, name, CHECKS[name])
    assert [m for m in survivors if not any(h in m for h in HARMLESS.get(name, []))] == []


# ----------------------------------------------------------------------------------------------------------------------
# Ten steps of training against a stored reference
# ----------------------------------------------------------------------------------------------------------------------

THREE = s.Config(dtype="float64", em_iters=3, beta_v_init=0.0, loss="cross-entropy")
CURVES = {"capsules": THREE, "capsules_spread": dataclasses.replace(THREE, loss="spread"), "cnn": THREE}
N_STEPS, BATCH, LR, DECAY = 10, 8, 2e-5, 3.0


def ten_steps(curve: str) -> tuple[list[float], dict[str, float]]:
    """The script's network, gradients and Adam: losses, and the norm of every parameter after the last step."""
    config = CURVES[curve]
    model = s.make_models(config)[curve.split("_")[0]]
    params = random_params(model)
    state = TrainState(curve, params)
    losses = []
    for step in range(N_STEPS):
        x, labels = images_and_labels(BATCH, seed=step % 2)
        scores, cache = model.forward(params, x)
        loss, dscores = model.loss(scores, labels, step / (N_STEPS - 1))
        grads, _ = model.backward(dscores, cache)
        adamw_step(state, [grads], LR, DECAY, s.DECAYED)
        losses.append(loss)
    return losses, {name: float(np.linalg.norm(p)) for name, p in params.items()}


def reference_ten_steps(curve: str) -> tuple[list[float], dict[str, float]]:
    """The same by autograd and a textbook AdamW; nothing of the script but its shapes and constants."""
    config = CURVES[curve]
    name = curve.split("_")[0]
    model, network = s.make_models(config)[name], plain_network(name, config)
    params = random_params(model)
    m, v = ({k: np.zeros_like(p) for k, p in params.items()} for _ in range(2))
    losses = []
    for step in range(N_STEPS):
        x, labels = images_and_labels(BATCH, seed=step % 2)
        margin = 0.2 + 0.7 * step / (N_STEPS - 1)
        kind = config.loss

        def objective(p: Any, x: Array = x, labels: Array = labels, margin: float = margin, kind: str = kind) -> Any:
            return plain_loss(network(p, x), labels, kind, margin)

        loss, grads = value_and_grad(objective)(params)
        for k, g in grads.items():
            m[k] = 0.9 * m[k] + 0.1 * g
            v[k] = 0.999 * v[k] + 0.001 * g**2
            m_hat, v_hat = m[k] / (1 - 0.9 ** (step + 1)), v[k] / (1 - 0.999 ** (step + 1))
            shrunk = params[k] * (1 - LR * DECAY * (k in ("conv1.w", "primary.w", "hidden.w", "out.w")))
            params[k] = shrunk - LR * m_hat / (np.sqrt(v_hat) + 1e-8)
        losses.append(float(loss))
    return losses, {k: float(np.linalg.norm(p)) for k, p in params.items()}


@pytest.mark.parametrize("curve", CURVES)
def test_ten_steps_follow_the_reference(curve: str) -> None:
    stored = json.loads(REFERENCE.read_text())[curve]
    losses, norms = ten_steps(curve)
    np.testing.assert_allclose(losses, stored["losses"], rtol=1e-8)
    assert set(norms) == set(stored["norms"])
    np.testing.assert_allclose([norms[k] for k in norms], [stored["norms"][k] for k in norms], rtol=1e-8)


if __name__ == "__main__":
    reference = {}
    for curve in CURVES:
        losses, norms = reference_ten_steps(curve)
        reference[curve] = {"losses": losses, "norms": norms}
        print(curve, losses)
    REFERENCE.write_text(json.dumps(reference, indent=1) + "\n")
