"""multimnist_capsnet: every backward pass against differences, loops and autograd, against its fast twin, and against
broken copies of itself.

Float64, random directions, random upstream gradients, unequal and odd sizes.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import multimnist_capsnet as m
import smallnorb_novel_viewpoint as viewpoint
import what_routing_does as study
from fast import dynamic_routing, spectral_conv
from helpers import GradientError, check_gradient, surviving_mutants

Array = np.ndarray
Params = dict[str, Array]


def rng_of(*seed: int) -> np.random.Generator:
    return np.random.default_rng([*seed, 7])


# ----------------------------------------------------------------------------------------------------------------------
# Layers
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["conv2d", "linear", "relu", "sigmoid"])
def test_a_layer_is_the_same_in_both_base_scripts(name: str) -> None:
    for step in ("forward", "backward"):
        ours, theirs = (inspect.getsource(getattr(script, f"{name}_{step}")) for script in (m, viewpoint))
        assert ours == theirs


# stride, padding, kernel, rows, columns, channels in
CONV_CASES = [
    (1, 0, 3, 7, 9, 2), (2, 0, 3, 9, 8, 2), (2, 1, 4, 11, 10, 1), (3, 0, 5, 13, 12, 3), (3, 2, 2, 11, 9, 2),
    (1, 0, 3, 3, 3, 2), (2, 0, 9, 9, 10, 1), (1, 0, 1, 2, 2, 2),
]  # fmt: skip
FORMS = [m, spectral_conv]


def conv_inputs(case: tuple[int, ...], B: int = 5) -> Params:
    _, _, K, H, W, C = case
    rng = rng_of(*case)
    shapes = {"x": (B, H, W, C), "w": (K, K, C, 4), "b": (4,)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def loop_conv(x: Array, w: Array, b: Array, stride: int, pad: int) -> Array:
    x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    (B, H, W, C), K, F = x.shape, w.shape[0], w.shape[-1]
    out = np.empty((B, (H - K) // stride + 1, (W - K) // stride + 1, F))
    for n, h, v, f in itertools.product(*map(range, out.shape)):
        total = b[f]
        for i, j, c in itertools.product(range(K), range(K), range(C)):
            total += x[n, h * stride + i, v * stride + j, c] * w[i, j, c, f]
        out[n, h, v, f] = total
    return out


def check_conv(form: ModuleType, case: tuple[int, ...]) -> None:
    at, (stride, pad) = conv_inputs(case), case[:2]
    out, cache = form.conv2d_forward(at["x"], at["w"], at["b"], stride, pad)
    upstream = rng_of(1).standard_normal(out.shape)
    grads = dict(zip("xwb", form.conv2d_backward(upstream, cache), strict=True))

    def f(x: Array, w: Array, b: Array) -> float:
        return float(np.vdot(form.conv2d_forward(x, w, b, stride, pad)[0], upstream))

    check_gradient(f, at, grads, rng_of(2))
    dx, *without_dx = form.conv2d_backward(upstream, cache, need_dx=False)
    if dx is not None:
        raise GradientError("a gradient that nobody asked for")
    for one, name in zip(without_dx, "wb", strict=True):
        if not np.array_equal(one, grads[name]):
            raise GradientError(f"another gradient of {name} where that of x is not needed")


@pytest.mark.parametrize("case", CONV_CASES)
@pytest.mark.parametrize("form", FORMS)
def test_conv2d(form: ModuleType, case: tuple[int, ...]) -> None:
    check_conv(form, case)


@pytest.mark.parametrize("case", CONV_CASES)
@pytest.mark.parametrize("form", FORMS)
def test_conv2d_is_the_loop(form: ModuleType, case: tuple[int, ...]) -> None:
    at, (stride, pad) = conv_inputs(case), case[:2]
    out, _ = form.conv2d_forward(at["x"], at["w"], at["b"], stride, pad)
    np.testing.assert_allclose(out, loop_conv(at["x"], at["w"], at["b"], stride, pad), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "case",
    [(1, 0, 5, 13, 17, 1), (2, 0, 9, 28, 28, 3), (2, 2, 5, 15, 11, 4), (3, 0, 7, 19, 23, 2), (3, 1, 5, 17, 16, 1),
     (3, 0, 9, 27, 29, 3)],
)  # fmt: skip
def test_spectral_convolution_is_im2col(case: tuple[int, ...]) -> None:
    at, results = conv_inputs(case), []
    for form in FORMS:
        out, cache = form.conv2d_forward(at["x"], at["w"], at["b"], *case[:2])
        results.append((out, *form.conv2d_backward(rng_of(4).standard_normal(out.shape), cache)))
    for plain, spectral in zip(*results, strict=True):
        np.testing.assert_allclose(spectral, plain, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_conv2d_in_single_precision_has_its_precision(form: ModuleType) -> None:
    """Going by way of the spectra costs no more than a few roundings of the largest output."""
    rng = rng_of(5)
    x, w, b = rng.random((3, 16, 16, 16)), rng.standard_normal((9, 9, 16, 8)), rng.standard_normal(8)
    dout, results = rng.standard_normal((3, 4, 4, 8)), []
    for dtype in (np.float64, np.float32):
        out, cache = form.conv2d_forward(x.astype(dtype), w.astype(dtype), b.astype(dtype), 2, 0)
        results.append((out, *form.conv2d_backward(dout.astype(dtype), cache)))
    for exact, single in zip(*results, strict=True):
        assert single.dtype == np.float32
        assert np.abs(single - exact).max() < 3e-6 * np.abs(exact).max()


def check_transforms() -> None:
    """Against sums of waves, and back."""
    for Ho, Wo, k in ((4, 5, 3), (5, 4, 2), (1, 1, 1), (3, 3, 2)):
        rng, t = rng_of(Ho, Wo), spectral_conv.transforms(Ho, Wo, k, np.dtype(float))
        V, U = Wo + k - 1, len(t.x_rows)
        if U % 2 or not Ho + k - 1 <= U <= Ho + k:
            raise GradientError("not as many points as the outputs see, made even")
        row = np.exp(-1j * np.pi / U * np.outer(2 * np.arange(U // 2) + 1, np.arange(U)))
        column = np.exp(-2j * np.pi / V * np.outer(np.arange(V), np.arange(V)))

        def transformed(x: Array, rows: Array, columns: Array) -> Array:
            by_rows = (rows @ x).reshape(len(rows) // 2, -1)  # of each frequency: part and column
            parts = (by_rows @ columns.T).reshape(len(rows) // 2, -1, 2)
            return parts[..., 0] + 1j * parts[..., 1]

        x, w = rng.standard_normal((U, V)), rng.standard_normal((k, k))
        x_f, w_f = transformed(x, t.x_rows, t.x_columns), transformed(w, t.w_rows, t.w_columns)
        parts = np.stack([x_f.real, x_f.imag], axis=2).reshape(U // 2, -1)  # of each frequency of the rows
        back = t.out_rows @ (parts @ t.out_columns.T).reshape(U, Wo)
        pairs = [
            (x_f, row @ x @ column.T), (w_f, row.conj()[:, :k] @ w @ column.conj()[:, :k].T), (back, x[:Ho, :Wo]),
        ]  # fmt: skip
        for ours, expected in pairs:
            if not np.allclose(ours, expected, rtol=1e-12, atol=1e-12):
                raise GradientError("not the Fourier transform")


def test_transforms_are_sums_of_waves() -> None:
    check_transforms()


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_phases(stride: int) -> None:
    x = rng_of(0).standard_normal((7, 8, 2, 3))
    for N, M in ((2, 2), (3, 4), (7, 8), (8, 9)):  # some smaller, some larger than x
        phases = spectral_conv.split_phases(x, stride, N, M)
        for n, p, a, b in itertools.product(range(N), range(M), range(stride), range(stride)):
            h, w = stride * n + a, stride * p + b
            expected = x[h, w] if h < 7 and w < 8 else 0
            np.testing.assert_array_equal(phases[n, p, :, a, b], expected)
        back = np.zeros_like(x)
        spectral_conv.join_phases(phases, stride, back)
        seen = np.zeros_like(x)
        seen[: stride * N, : stride * M] = x[: stride * N, : stride * M]
        np.testing.assert_array_equal(back, seen)


def check_linear() -> None:
    rng = rng_of(0)
    at = {name: rng.standard_normal(shape) for name, shape in {"x": (5, 3), "w": (3, 7), "b": (7,)}.items()}
    out, cache = m.linear_forward(**at)
    upstream = rng.standard_normal(out.shape)
    grads = dict(zip("xwb", m.linear_backward(upstream, cache), strict=True))
    check_gradient(lambda x, w, b: float(np.vdot(m.linear_forward(x, w, b)[0], upstream)), at, grads, rng)


def check_activation(name: str) -> None:
    rng = rng_of(0)
    x = rng.standard_normal((2, 7, 5))
    upstream = rng.standard_normal(x.shape)
    forward, backward = getattr(m, f"{name}_forward"), getattr(m, f"{name}_backward")
    dx = backward(upstream, forward(x)[1])
    check_gradient(lambda x: float(np.vdot(forward(x)[0], upstream)), {"x": x}, {"x": dx}, rng)


def check_max_pool() -> None:
    for shape in ((5, 6, 8, 3), (3, 7, 9, 2)):
        rng = rng_of(*shape)
        x = rng.permutation(math.prod(shape)).reshape(shape) / 10  # no ties
        out, cache = m.max_pool_forward(x)
        assert out.shape == (shape[0], 3, 4, shape[3])
        upstream = rng.standard_normal(out.shape)
        dx = m.max_pool_backward(upstream, cache)
        check_gradient(lambda x, up=upstream: float(np.vdot(m.max_pool_forward(x)[0], up)), {"x": x}, {"x": dx}, rng)
    _, cache = m.max_pool_forward(np.zeros((1, 2, 2, 1)))
    if m.max_pool_backward(np.ones((1, 1, 1, 1)), cache).sum() != 1:
        raise GradientError("the gradient of a tie is not handed on once")


def check_softmax() -> None:
    rng = rng_of(0)
    b, upstream = rng.standard_normal((3, 7, 4)), rng.standard_normal((3, 7, 4))
    db = m.softmax_backward(upstream, m.softmax(b))
    check_gradient(lambda b: float(np.vdot(m.softmax(b), upstream)), {"b": b}, {"b": db}, rng)


def check_mask() -> None:
    rng = rng_of(0)
    v, labels = rng.standard_normal((5, 4, 3)), np.stack([rng.permutation(4)[:2] for _ in range(5)])
    upstream = rng.standard_normal((10, 12))
    masked, mask = m.mask_forward(v, labels)
    for b, digit in itertools.product(range(5), range(2)):
        alone = np.zeros((4, 3))
        alone[labels[b, digit]] = v[b, labels[b, digit]]
        np.testing.assert_array_equal(masked[2 * b + digit], alone.ravel())
    dv = m.mask_backward(upstream, mask)
    check_gradient(lambda v: float(np.vdot(m.mask_forward(v, labels)[0], upstream)), {"v": v}, {"v": dv}, rng)


def test_linear() -> None:
    check_linear()


@pytest.mark.parametrize("name", ["relu", "sigmoid", "squash"])
def test_activation(name: str) -> None:
    check_activation(name)


def test_max_pool() -> None:
    check_max_pool()


def test_softmax() -> None:
    check_softmax()


def test_mask() -> None:
    check_mask()


# ----------------------------------------------------------------------------------------------------------------------
# Routing
# ----------------------------------------------------------------------------------------------------------------------

J, P, I, D, B = 7, 3, 9, 5, 6
ROUTINGS = {"plain": m.PLAIN.routing, "fast": m.FAST.routing}


def routing_inputs(seed: int) -> Params:
    rng = rng_of(seed)
    return {"u": rng.standard_normal((B, I, P)), "w": rng.standard_normal((I, P, J, D))}


def check_routing(routing: m.Pair, policy: str, n_iters: int, squash: m.Pair = m.SQUASH, shared: bool = False) -> None:
    at, (forward, backward) = routing_inputs(n_iters), routing
    if squash is not m.SQUASH:
        at["w"] /= 3  # else the couplings would be 0 and 1
    if shared:
        at["w"] = at["w"][:1]
    v, cache = forward(at["u"], at["w"], n_iters, squash)
    upstream = rng_of(1).standard_normal(v.shape)
    grads = dict(zip("uw", backward(upstream, cache, policy), strict=True))
    if policy == "stop":
        c = m.routing_forward(at["u"], at["w"], n_iters, squash)[1].c[-1]

    def f(u: Array, w: Array) -> float:
        if policy == "exact":
            return float(np.vdot(forward(u, w, n_iters, squash)[0], upstream))
        s = np.einsum("bij,ipjd,bip->bjd", c, w, u)  # the last sum, with the couplings that the forward pass found
        return float(np.vdot(squash[0](s)[0], upstream))

    check_gradient(f, at, grads, rng_of(2))


@pytest.mark.parametrize("n_iters", [1, 2, 3, 4])
@pytest.mark.parametrize("policy", ["exact", "stop"])
@pytest.mark.parametrize("form", ROUTINGS)
def test_routing(form: str, policy: str, n_iters: int) -> None:
    check_routing(ROUTINGS[form], policy, n_iters)


@pytest.mark.parametrize("n_iters", [1, 3])
@pytest.mark.parametrize("policy", ["exact", "stop"])
@pytest.mark.parametrize("form", ROUTINGS)
def test_routing_without_squash(form: str, policy: str, n_iters: int) -> None:
    check_routing(ROUTINGS[form], policy, n_iters, study.IDENTITY)
    at = routing_inputs(0)
    v, _ = ROUTINGS[form][0](at["u"], at["w"], 1, study.IDENTITY)
    np.testing.assert_allclose(v, np.einsum("ipjd,bip->bjd", at["w"], at["u"]) / J)


@pytest.mark.parametrize("n_iters", [1, 2, 3, 4])
@pytest.mark.parametrize("policy", ["exact", "stop"])
def test_fast_routing_is_the_plain_one(policy: str, n_iters: int) -> None:
    at, results = routing_inputs(n_iters), []
    for forward, backward in ROUTINGS.values():
        v, cache = forward(at["u"], at["w"], n_iters, m.SQUASH)
        results.append((v, *backward(rng_of(1).standard_normal(v.shape), cache, policy)))
    for plain, fast in zip(*results, strict=True):
        np.testing.assert_allclose(fast, plain, rtol=0, atol=1e-10)


def test_fixed_couplings() -> None:
    for couplings in (study.even_couplings(I, J), study.random_couplings(I, J)):
        np.testing.assert_allclose(couplings.sum(axis=1), 1)
        for squash in (m.SQUASH, study.IDENTITY):
            check_routing(study.fixed(couplings), "exact", 2, squash)
        at = routing_inputs(0)
        v, _ = study.fixed(couplings)[0](at["u"], at["w"], 3, m.SQUASH)
        s = np.einsum("ij,ipjd,bip->bjd", couplings, at["w"], at["u"])
        np.testing.assert_allclose(v, m.squash_forward(s)[0])
    assert couplings.std() > 0.1
    plain, _ = m.routing_forward(at["u"], at["w"], 1)
    even, _ = study.fixed(study.even_couplings(I, J))[0](at["u"], at["w"], 3, m.SQUASH)
    np.testing.assert_allclose(even, plain)


def test_one_transformation_for_all() -> None:
    for routing in (*ROUTINGS.values(), study.fixed(study.random_couplings(I, J))):
        check_routing(study.shared(routing), "exact", 2, shared=True)


def routing_by_loops(u: Array, w: Array, n_iters: int) -> tuple[Array, Array]:
    """[Sabour 2017, procedure 1], one example, one pair of capsules at a time."""
    v, couplings = np.zeros((B, J, D)), np.zeros((n_iters, B, I, J))
    for n in range(B):
        votes = [[w[i, :, j].T @ u[n, i] for j in range(J)] for i in range(I)]
        b = [[0.0] * J for _ in range(I)]
        for t in range(n_iters):
            for i in range(I):
                total = sum(math.exp(x) for x in b[i])
                for j in range(J):
                    couplings[t, n, i, j] = math.exp(b[i][j]) / total
            for j in range(J):
                s = sum(couplings[t, n, i, j] * votes[i][j] for i in range(I))
                length = math.sqrt(float(s @ s))
                v[n, j] = length**2 / (1 + length**2) * s / length
            for i, j in itertools.product(range(I), range(J)):
                b[i][j] += float(votes[i][j] @ v[n, j])
    return v, couplings


@pytest.mark.parametrize("n_iters", [1, 2, 3])
@pytest.mark.parametrize("form", ROUTINGS)
def test_routing_is_the_loop(form: str, n_iters: int) -> None:
    at = routing_inputs(n_iters)
    v, cache = ROUTINGS[form][0](at["u"], at["w"], n_iters, m.SQUASH)
    expected, couplings = routing_by_loops(at["u"], at["w"], n_iters)
    np.testing.assert_allclose(v, expected, rtol=1e-7)  # the script adds 1e-9 to |s|^2
    if form == "plain":
        np.testing.assert_allclose(cache.c, couplings, rtol=1e-7)


# ----------------------------------------------------------------------------------------------------------------------
# Losses
# ----------------------------------------------------------------------------------------------------------------------


def some_labels(n: int, seed: int = 0, n_labels: int = 2) -> Array:
    rng = rng_of(seed)
    return np.stack([rng.permutation(10)[:n_labels] for _ in range(n)])


def check_loss(name: str) -> None:
    rng = rng_of(0)
    x = rng.uniform(0, 1, (7, 10)) if name == "margin_loss" else 3 * rng.standard_normal((7, 10))
    positive = m.indicator(some_labels(7), 10, float)
    loss = getattr(m, name)
    check_gradient(lambda x: loss(x, positive, 9)[0], {"x": x}, {"x": loss(x, positive, 9)[1]}, rng)


def check_squared_error() -> None:
    rng = rng_of(0)
    x, target = rng.random((11, 6)), rng.random((11, 6))
    loss, gradient = m.squared_error(x, target, 5)
    if loss != pytest.approx(((x - target) ** 2).sum() / 5):
        raise GradientError("the loss is not the mean of the examples' sums")
    check_gradient(lambda x: m.squared_error(x, target, 5)[0], {"x": x}, {"x": gradient}, rng)


@pytest.mark.parametrize("name", ["margin_loss", "sigmoid_cross_entropy", "softmax_cross_entropy"])
def test_loss(name: str) -> None:
    check_loss(name)


def test_squared_error() -> None:
    check_squared_error()


def test_margin_loss_by_hand() -> None:
    """0.9 and 0.1 are free, what is short or long is squared, a wrong class weighs half; no softmax, no mean."""
    positive = np.array([[1.0, 1.0, 0.0, 0.0]])
    lengths = np.array([[0.95, 0.6, 0.05, 0.5]])
    loss, gradient = m.margin_loss(lengths, positive, 1)
    assert loss == pytest.approx(0.3**2 + 0.5 * 0.4**2)
    np.testing.assert_allclose(gradient[0], [0, -2 * 0.3, 0, 0.5 * 2 * 0.4])


def test_cross_entropy_by_hand_and_far_out() -> None:
    p = 1 / (1 + math.exp(-0.7))
    for positive, expected in ((1.0, -math.log(p)), (0.0, -math.log(1 - p))):
        assert m.sigmoid_cross_entropy(np.array([[0.7]]), np.array([[positive]]), 1)[0] == pytest.approx(expected)
    loss, gradient = m.sigmoid_cross_entropy(np.array([[1e4, -1e4]]), np.array([[0.0, 1.0]]), 2)
    assert loss == 1e4
    np.testing.assert_array_equal(gradient, [[0.5, -0.5]])


@pytest.mark.parametrize("n_labels", [1, 2])
def test_softmax_cross_entropy_by_hand(n_labels: int) -> None:
    scores = 3 * rng_of(1).standard_normal((7, 10))
    positive = m.indicator(some_labels(7, n_labels=n_labels), 10, float)
    p = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    loss, _ = m.softmax_cross_entropy(scores, positive, 9)
    assert loss == pytest.approx(-np.log(p[positive == 1]).sum() / 9, rel=1e-12)


def test_softmax_cross_entropy_far_out() -> None:
    scores = np.zeros((2, 10), np.float32)
    scores[:, 3] = 1e4
    positive = m.indicator(np.array([[3], [4]]), 10, np.float32)
    loss, gradient = m.softmax_cross_entropy(scores, positive, 2)
    assert loss == 5000
    np.testing.assert_array_equal(gradient[0], 0)
    np.testing.assert_allclose(gradient[1, [3, 4]], [0.5, -0.5])


# ----------------------------------------------------------------------------------------------------------------------
# Whole models
# ----------------------------------------------------------------------------------------------------------------------

TINY = {"image_size": 20, "conv_channels": 3, "primary_types": 2, "decoder": (7, 11), "recon_weight": 0.1}
POOLED = m.CNN((m.ConvLayer(5, 3, pool=True), m.ConvLayer(3, 4, stride=2), m.ConvLayer(2, 2, pool=True)), 7)
TRUNK = m.CNN((m.ConvLayer(9, 3), m.ConvLayer(5, 4, stride=2)), 6)
NAMES = {"assignments", "transform", "activation", "loss"}  # of the parts of a CapsNet; other changes are settings


def tiny(**changes: Any) -> m.Config:
    return m.Config(**{**TINY, "dtype": "float64", **changes})


def random_batch(config: m.Config, n: int, n_labels: int = 2) -> m.Batch:
    rng = rng_of(n)
    side = config.image_size
    return m.Batch(
        rng.random((n, side, side)), some_labels(n, n_labels=n_labels), rng.random((n, n_labels, side, side))
    )


def perturbed(params: Params) -> Params:
    """Biases are not zero, and digit capsules are of all lengths."""
    rng = rng_of(3)
    return {k: p + 0.1 * rng.standard_normal(p.shape) for k, p in params.items()}


def capsnet_of(changes: dict[str, Any]) -> tuple[m.Config, m.Model]:
    config = tiny(**{key: value for key, value in changes.items() if key not in NAMES})
    return config, study.make_model(config, **{key: value for key, value in changes.items() if key in NAMES})


def check_model(model: m.Model, batch: m.Batch) -> None:
    params = perturbed(model.init_params(rng_of(1)))
    _, grads = model.loss_and_grads(params, batch, 6)

    def f(**p: Array) -> float:
        return model.loss_and_grads(p, batch, 6)[0]["train_loss"]

    # a larger step would take ReLUs over their kink
    check_gradient(f, params, grads, rng_of(2), n_directions=1, step=1e-6)


def check_capsnet(n_labels: int = 2, **changes: Any) -> None:
    config, model = capsnet_of(changes)
    check_model(model, random_batch(config, 5, n_labels))


def check_cnn(net: m.CNN) -> None:
    config = tiny()
    model = m.capsnet_model(config)._replace(
        init_params=lambda rng: m.cnn_init(rng, config, net),
        loss_and_grads=lambda params, batch, n: m.cnn_loss_and_grads(params, batch, n, net),
    )
    check_model(model, random_batch(config, 5))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"plain": True},
        {"routing_iters": 2, "n_labels": 1},
        {"routing_iters": 1},
        {"assignments": "even"},
        {"assignments": "random"},
        {"assignments": "random", "routing_grad": "stop"},
        {"transform": "shared", "assignments": "even"},
        {"transform": "shared", "routing_iters": 2},
        {"activation": "relu", "routing_iters": 1},
        {"loss": "cross-entropy"},
        {"assignments": "even", "activation": "relu", "loss": "cross-entropy"},
    ],
)
def test_capsnet(changes: dict[str, Any]) -> None:
    check_capsnet(**changes)


@pytest.mark.parametrize("net", [TRUNK, POOLED, POOLED._replace(conv=m.FAST.conv)])
def test_cnn(net: m.CNN) -> None:
    check_cnn(net)


@pytest.mark.parametrize("name", m.MODEL_NAMES)
def test_a_network_in_its_plain_form_is_the_fast_one(name: str) -> None:
    results = []
    for plain in (True, False):
        config = tiny(plain=plain, image_size=28 if name == "cnn_pool" else 20)
        model = m.make_models(config)[name]
        params, batch = perturbed(model.init_params(rng_of(1))), random_batch(config, 5)
        losses, grads = model.loss_and_grads(params, batch, 5)
        scores, error = model.assess(params, batch)
        results.append({"loss": np.array(losses["train_loss"]), "scores": scores, "error": np.array(error), **grads})
    for key, plain_form in results[0].items():
        np.testing.assert_allclose(results[1][key], plain_form, rtol=0, atol=1e-10, err_msg=key)


def reference_capsnet_loss(p: Any, batch: m.Batch, config: m.Config, names: dict[str, str], n: int, np: Any) -> Any:
    """The network once more, in autograd's numpy, batch first and with all votes stored."""
    from autograd.tracer import getval

    def conv(x: Any, w: Any, b: Any, stride: int) -> Any:  # x (B, C, H, W), w (K, K, C, C')
        K, n_out = w.shape[0], (x.shape[2] - w.shape[0]) // stride + 1
        out = 0
        for i, j in itertools.product(range(K), range(K)):
            patch = x[:, :, i : i + stride * n_out : stride, j : j + stride * n_out : stride][:, :, :n_out, :n_out]
            out = out + np.einsum("bchw,co->bohw", patch, w[i, j])
        return out + b[None, :, None, None]

    def squash(s: Any, axis: int) -> Any:
        q = np.sum(s * s, axis=axis, keepdims=True) + m.SQUASH_EPS
        return s * np.sqrt(q) / (1 + q)

    B, T, side = len(batch.images), config.primary_types, config.primary_side
    h = np.maximum(conv(batch.images[:, None], p["conv1.w"], p["conv1.b"], 1), 0)
    h = conv(h, p["primary.w"], p["primary.b"], 2)  # (B, T*P, side, side)
    is_squashed = names.get("activation") != "relu"
    u = np.reshape(np.transpose(h, (0, 2, 3, 1)), (B, side * side * T, m.PRIMARY_SIZE))  # (B, I, P)
    u = squash(u, 2) if is_squashed else np.maximum(u, 0)
    if names.get("transform") == "shared":
        votes = np.einsum("bip,pjd->bijd", u, p["routing.w"][0])
    else:
        votes = np.einsum("bip,ipjd->bijd", u, p["routing.w"])
    logits = np.zeros((B, u.shape[1], 10))
    n_iters = 1 if "assignments" in names else config.routing_iters
    for t in range(n_iters):
        e = np.exp(logits)
        c = e / np.sum(e, axis=2, keepdims=True)
        if config.routing_grad == "stop":
            c = getval(c)  # a constant
        v = np.einsum("bij,bijd->bjd", c, votes)
        v = squash(v, 2) if is_squashed else v
        if t < n_iters - 1:
            logits = logits + np.einsum("bijd,bjd->bij", votes, v)
    lengths = np.sqrt(np.sum(v * v, axis=2) + m.SQUASH_EPS)
    loss = 0
    for b in range(B):
        for j in range(10):
            if "loss" in names:
                p_j = np.exp(lengths[b, j]) / np.sum(np.exp(lengths[b]))
                loss = loss - (np.log(p_j) if j in batch.labels[b] else 0)
            elif j in batch.labels[b]:
                loss = loss + np.maximum(0, 0.9 - lengths[b, j]) ** 2
            else:
                loss = loss + 0.5 * np.maximum(0, lengths[b, j] - 0.1) ** 2
        for digit, j in enumerate(batch.labels[b]):
            x = v[b, j] @ p["decoder1.w"][j * m.CAPSULE_SIZE : (j + 1) * m.CAPSULE_SIZE] + p["decoder1.b"]
            x = np.maximum(x, 0) @ p["decoder2.w"] + p["decoder2.b"]
            x = 1 / (1 + np.exp(-(np.maximum(x, 0) @ p["decoder3.w"] + p["decoder3.b"])))
            loss = loss + config.recon_weight * np.sum((x - batch.sources[b, digit].ravel()) ** 2)
    return loss / n


@pytest.mark.parametrize(
    "changes",
    [
        {"routing_grad": "exact"},
        {"routing_grad": "stop"},
        {"transform": "shared", "assignments": "even"},
        {"loss": "cross-entropy"},
        {"activation": "relu", "routing_iters": 2},
        {"assignments": "even", "activation": "relu", "loss": "cross-entropy", "recon_weight": 0.0},
    ],
)
def test_loss_and_gradients_are_those_of_autograd(changes: dict[str, Any]) -> None:
    import autograd.numpy as anp
    from autograd import value_and_grad

    config, model = capsnet_of(changes)
    names = {key: value for key, value in changes.items() if key in NAMES}
    params, batch = perturbed(model.init_params(rng_of(1))), random_batch(config, 4)
    losses, grads = model.loss_and_grads(params, batch, 4)
    expected, reference = value_and_grad(lambda p: reference_capsnet_loss(p, batch, config, names, 4, anp))(params)
    assert losses["train_loss"] == pytest.approx(float(expected), rel=1e-12)
    for name in params:
        np.testing.assert_allclose(grads[name], reference[name], rtol=1e-8, atol=1e-12, err_msg=name)


# ----------------------------------------------------------------------------------------------------------------------
# Broken backward passes
# ----------------------------------------------------------------------------------------------------------------------


def check_routing_all() -> None:
    routing = (m.routing_forward, m.routing_backward)
    check_routing(routing, "exact", 3)
    check_routing(routing, "stop", 2)


def check_fast_routing() -> None:
    routing = (dynamic_routing.routing_forward, dynamic_routing.routing_backward)
    check_routing(routing, "exact", 3)
    check_routing(routing, "stop", 2)


def check_layer(name: str) -> Callable[[], None]:
    return lambda: check_activation(name)


CHECKS: dict[str, Callable[[], None]] = {
    "conv2d_backward": lambda: check_conv(m, CONV_CASES[1]),
    "linear_backward": check_linear,
    "relu_backward": check_layer("relu"),
    "sigmoid_backward": check_layer("sigmoid"),
    "squash_backward": check_layer("squash"),
    "max_pool_backward": check_max_pool,
    "softmax_backward": check_softmax,
    "mask_backward": check_mask,
    "routing_backward": check_routing_all,
    "decoder_backward": check_capsnet,
    "capsnet_backward": check_capsnet,
    "capsnet_loss_and_grads": check_capsnet,
    "cnn_backward": lambda: check_cnn(POOLED),
    "cnn_loss_and_grads": lambda: check_cnn(POOLED),
    "margin_loss": lambda: check_loss("margin_loss"),
    "squared_error": check_squared_error,
    "sigmoid_cross_entropy": lambda: check_loss("sigmoid_cross_entropy"),
    "softmax_cross_entropy": lambda: check_loss("softmax_cross_entropy"),
}
HARMLESS = {
    "capsnet_loss_and_grads": ['"train_recon_loss":', "train_{parts.loss"],  # reported, not differentiated
    "softmax_cross_entropy": ["shifted = scores"],  # any shift gives the same softmax
    "margin_loss": ["excess = "],  # another loss, with its own right gradient: see test_margin_loss_by_hand
}


def test_every_backward_has_a_check() -> None:
    names = {name for name in vars(m) if name.endswith(("_backward", "_loss_and_grads"))}
    losses = {"margin_loss", "squared_error", "sigmoid_cross_entropy", "softmax_cross_entropy"}
    assert names | losses == set(CHECKS)


NO_ARITHMETIC = ("max_pool_backward", "decoder_backward", "capsnet_backward", "cnn_backward", "cnn_loss_and_grads")


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in NO_ARITHMETIC])
def test_a_broken_backward_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    survivors = surviving_mutants(monkeypatch, m, name, CHECKS[name])
    assert [s for s in survivors if not any(h in s for h in HARMLESS.get(name, []))] == []


@pytest.mark.parametrize(
    ("module", "name", "check"),
    [
        (spectral_conv, "conv2d_backward", lambda: check_conv(spectral_conv, CONV_CASES[1])),
        (spectral_conv, "transforms", check_transforms),
        (dynamic_routing, "routing_backward", check_fast_routing),
        (dynamic_routing, "route_backward", check_fast_routing),
    ],
)
def test_a_broken_fast_twin_is_seen(
    module: ModuleType, name: str, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert surviving_mutants(monkeypatch, module, name, check) == []


def scaled(gradients: Any) -> Any:
    """The same, all wrong by a tenth."""
    if isinstance(gradients, dict):
        return {key: 0.9 * value for key, value in gradients.items()}
    return tuple(map(scaled, gradients)) if isinstance(gradients, tuple) else 0.9 * gradients


@pytest.mark.parametrize("name", ["max_pool_backward", "decoder_backward", "capsnet_backward", "cnn_backward"])
def test_a_wrong_result_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(m, name)
    monkeypatch.setattr(m, name, lambda *args, **options: scaled(original(*args, **options)))
    with pytest.raises(GradientError):
        CHECKS[name]()
