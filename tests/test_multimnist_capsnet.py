"""The MultiMNIST experiment: gradients, references, known mistakes, training, files, command line."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import multimnist_capsnet as mm
from multimnist_capsnet import Array, Batch, Config, Params, Workspace

# ----------------------------------------------------------------------------------------------------------------------
# Gradients: float64, random direction, random upstream gradient, unequal odd dimensions
# ----------------------------------------------------------------------------------------------------------------------

TOLERANCE = 1e-6


def relative_error(loss: Callable[[Params], float], at: Params, grads: Params, seed: int = 0, eps: float = 1e-4) -> float:
    """Central difference along one random direction against the gradient's component; Richardson-extrapolated."""
    rng = np.random.default_rng(seed)
    direction = {name: rng.standard_normal(a.shape) for name, a in at.items()}

    def difference(eps: float) -> float:
        ends = [loss({k: a + sign * eps * direction[k] for k, a in at.items()}) for sign in (1, -1)]
        return (ends[0] - ends[1]) / (2 * eps)

    numeric = (4 * difference(eps / 2) - difference(eps)) / 3
    analytic = sum(float(np.vdot(grads[k], direction[k])) for k in at)
    return abs(numeric - analytic) / max(abs(numeric), abs(analytic))


def float64() -> Workspace:
    return Workspace(np.float64)


@pytest.mark.parametrize(
    ("stride", "kernel", "height", "width"), [(1, 3, 7, 9), (2, 3, 9, 8), (2, 4, 11, 10), (3, 5, 13, 12), (3, 2, 11, 9)]
)
def test_conv2d_gradient(stride: int, kernel: int, height: int, width: int) -> None:
    rng = np.random.default_rng(stride)
    at = {
        "x": rng.standard_normal((height, 2, width, 5)),
        "w": rng.standard_normal((kernel, kernel, 2, 3)),
        "b": rng.standard_normal(3),
    }
    ws = float64()
    out, cache = mm.conv2d_forward(at["x"], at["w"], at["b"], stride, ws, "c")
    upstream = rng.standard_normal(out.shape)
    grads = {k: np.full_like(at[k], np.nan) for k in ("w", "b")}
    dx = mm.conv2d_backward(upstream, cache, grads["w"], grads["b"], ws)
    assert dx is not None
    grads["x"] = dx

    def loss(a: Params) -> float:
        return float(np.vdot(mm.conv2d_forward(a["x"], a["w"], a["b"], stride, float64(), "c")[0], upstream))

    assert relative_error(loss, at, grads) < TOLERANCE


def squash(s: Array, axis: int) -> Array:
    out = np.empty_like(s)
    mm.squash_forward(s, axis, out)
    return out


@pytest.mark.parametrize("axis", [0, 1])
def test_squash_gradient(axis: int) -> None:
    rng = np.random.default_rng(axis)
    at = {"s": rng.standard_normal((3, 7, 5))}
    cache = mm.squash_forward(at["s"], axis, np.empty((3, 7, 5)))
    upstream = rng.standard_normal((3, 7, 5))
    grads = {"s": mm.squash_backward(upstream, cache)}
    assert relative_error(lambda a: float(np.vdot(squash(a["s"], axis), upstream)), at, grads) < TOLERANCE


def test_softmax_gradient() -> None:
    rng = np.random.default_rng(0)
    at = {"b": rng.standard_normal((4, 7, 3))}
    c = mm.softmax_over_parents(at["b"], np.empty((4, 7, 3)))
    upstream = rng.standard_normal(c.shape)
    grads = {"b": mm.softmax_backward(upstream.copy(), c)}

    def loss(a: Params) -> float:
        return float(np.vdot(mm.softmax_over_parents(a["b"], np.empty_like(c)), upstream))

    assert relative_error(loss, at, grads) < TOLERANCE


def routing_case(seed: int, J: int = 4, P: int = 3, I: int = 7, D: int = 5, B: int = 6) -> tuple[Params, Array]:
    rng = np.random.default_rng(seed)
    at = {"u": rng.standard_normal((P, I, B)), "w": rng.standard_normal((J, P, I, D))}
    return at, rng.standard_normal((J, D, B))


@pytest.mark.parametrize("n_iters", [1, 2, 3, 4])
def test_routing_exact_gradient(n_iters: int) -> None:
    at, upstream = routing_case(n_iters)
    ws = float64()
    _, cache = mm.routing_forward(at["u"], at["w"], n_iters, ws)
    dw = np.full_like(at["w"], np.nan)
    grads = {"u": mm.routing_backward(upstream.copy(), cache, "exact", dw, ws), "w": dw}

    def loss(a: Params) -> float:
        return float(np.vdot(mm.routing_forward(a["u"], a["w"], n_iters, float64())[0], upstream))

    assert relative_error(loss, at, grads) < TOLERANCE


@pytest.mark.parametrize("n_iters", [1, 2, 3])
def test_routing_stop_gradient(n_iters: int) -> None:
    """"stop" is the gradient of the last weighted sum with the couplings of the forward pass held fixed."""
    at, upstream = routing_case(n_iters)
    ws = float64()
    _, cache = mm.routing_forward(at["u"], at["w"], n_iters, ws)
    c = cache.c[-1].copy()
    dw = np.full_like(at["w"], np.nan)
    grads = {"u": mm.routing_backward(upstream.copy(), cache, "stop", dw, ws), "w": dw}

    def loss(a: Params) -> float:
        s = np.einsum("jib,jpid,pib->jdb", c, a["w"], a["u"])
        return float(np.vdot(squash(s, 1), upstream))

    assert relative_error(loss, at, grads) < TOLERANCE


def test_linear_gradient() -> None:
    rng = np.random.default_rng(0)
    at = {"x": rng.standard_normal((3, 5)), "w": rng.standard_normal((3, 7)), "b": rng.standard_normal(7)}
    upstream = rng.standard_normal((7, 5))
    grads = {k: np.full_like(at[k], np.nan) for k in ("w", "b")}
    grads["x"] = mm.linear_backward(upstream, at["x"], at["w"], grads["w"], grads["b"])

    def loss(a: Params) -> float:
        return float(np.vdot(mm.linear_forward(a["x"], a["w"], a["b"], float64(), "l"), upstream))

    assert relative_error(loss, at, grads) < TOLERANCE


@pytest.mark.parametrize("shape", [(6, 3, 8, 5), (7, 2, 9, 3)])
def test_max_pool_gradient(shape: tuple[int, int, int, int]) -> None:
    rng = np.random.default_rng(0)
    at = {"x": rng.permutation(np.prod(shape)).reshape(shape) / 10}  # no ties
    ws = float64()
    out = mm.max_pool_forward(at["x"], ws, "p")
    upstream = rng.standard_normal(out.shape)
    grads = {"x": mm.max_pool_backward(upstream, at["x"], out, ws, "p")}

    def loss(a: Params) -> float:
        return float(np.vdot(mm.max_pool_forward(a["x"], float64(), "p"), upstream))

    assert relative_error(loss, at, grads) < TOLERANCE


@pytest.mark.parametrize("name", ["margin_loss", "sigmoid_cross_entropy"])
def test_loss_gradient(name: str) -> None:
    rng = np.random.default_rng(0)
    at = {"x": rng.uniform(0, 1, (10, 7))}
    positive = mm.indicator(np.stack([rng.permutation(10)[:2] for _ in range(7)]), np.dtype(np.float64))
    loss = getattr(mm, name)
    grads = {"x": loss(at["x"], positive, 9)[1]}
    assert relative_error(lambda a: loss(a["x"], positive, 9)[0], at, grads) < TOLERANCE


def tiny(**changes: object) -> Config:
    settings = {"image_size": 20, "conv_channels": 3, "primary_types": 2, "decoder": (7, 11), "dtype": "float64"}
    return Config(**{**settings, **changes})  # type: ignore[arg-type]


def random_batch(config: Config, n: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    side, L = config.image_size, config.n_labels
    labels = np.stack([rng.permutation(10)[:L] for _ in range(n)])
    draw = [rng.random(s).astype(config.dtype) for s in ((n, side, side), (n, L, side, side))]
    return Batch(draw[0], labels, draw[1])


def model_case(name: str, config: Config, n: int = 5) -> tuple[mm.Model, mm.TrainState, Batch]:
    model = mm.make_models(config)[name]
    rng = np.random.default_rng(1)
    state = mm.TrainState(model.init_params(rng))
    state.flat += 0.05 * rng.standard_normal(state.flat.shape).astype(state.flat.dtype)  # biases are not zero either
    return model, state, random_batch(config, n)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("capsnet", {}),
        ("capsnet", {"routing_iters": 2, "n_labels": 1}),
        ("capsnet", {"routing_iters": 1, "routing_grad": "stop"}),
        ("cnn", {}),
        ("cnn_pool", {"image_size": 26}),
    ],
)
def test_whole_model_gradient(name: str, changes: dict[str, object]) -> None:
    model, state, batch = model_case(name, tiny(**changes))
    _, grads = mm.pack(state.params)
    model.loss_and_grads(state.params, batch, 5, grads, float64())

    def loss(params: Params) -> float:
        return model.loss_and_grads(params, batch, 5, mm.pack(params)[1], float64())["train_loss"]

    # ReLU and max pooling have kinks: eps is small, lest the direction crosses one.
    assert relative_error(loss, state.params, grads, eps=1e-7) < TOLERANCE
