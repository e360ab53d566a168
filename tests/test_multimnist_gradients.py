"""multimnist_capsnet: every backward pass against differences, loops and autograd, and against broken copies of itself.

Float64, random directions, random upstream gradients, unequal and odd sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import multimnist_capsnet as m
from helpers import GradientError, check_gradient, surviving_mutants
from support import spectral_conv

Array = np.ndarray
Params = dict[str, Array]


def float64() -> m.Workspace:
    return m.Workspace(np.float64)


def rng_of(*seed: int) -> np.random.Generator:
    return np.random.default_rng([*seed, 7])


# ----------------------------------------------------------------------------------------------------------------------
# Primitive pairs
# ----------------------------------------------------------------------------------------------------------------------

# stride, kernel, rows, columns, channels in
CONV_CASES = [
    (1, 3, 7, 9, 2), (2, 3, 9, 8, 2), (2, 4, 11, 10, 1), (3, 5, 13, 12, 3), (3, 2, 11, 9, 2),
    (1, 3, 3, 3, 2), (2, 9, 9, 10, 1), (1, 1, 2, 2, 2),
]  # fmt: skip
FORMS = ("conv2d", "spectral_conv2d")


def conv_inputs(case: tuple[int, ...]) -> Params:
    _, K, H, W, C = case
    rng = rng_of(*case)
    shapes = {"x": (H, W, 5, C), "w": (K, K, C, 4), "b": (4,)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def loop_conv(x: Array, w: Array, b: Array, stride: int) -> Array:
    (H, W, B, C), K, n_out = x.shape, w.shape[0], w.shape[-1]
    out = np.empty(((H - K) // stride + 1, (W - K) // stride + 1, B, n_out))
    for h, v, n, o in itertools.product(*map(range, out.shape)):
        total = b[o]
        for i, j, c in itertools.product(range(K), range(K), range(C)):
            total += x[h * stride + i, v * stride + j, n, c] * w[i, j, c, o]
        out[h, v, n, o] = total
    return out


def check_conv(form: str, case: tuple[int, ...]) -> None:
    at, stride, ws = conv_inputs(case), case[0], float64()
    forward, backward = getattr(m, form + "_forward"), getattr(m, form + "_backward")
    out, cache = forward(at["x"], at["w"], at["b"], stride, ws, "c")
    upstream = rng_of(1).standard_normal(out.shape)
    grads = {name: np.full_like(at[name], np.nan) for name in ("w", "b")}
    grads["x"] = backward(upstream, cache, grads["w"], grads["b"], ws)

    def f(x: Array, w: Array, b: Array) -> float:
        return float(np.vdot(forward(x, w, b, stride, float64(), "c")[0], upstream))

    check_gradient(f, at, grads, rng_of(2))
    without_dx = [np.full_like(at[name], np.nan) for name in ("w", "b")]
    if backward(upstream, cache, *without_dx, ws, need_dx=False) is not None:
        raise GradientError("a gradient that nobody asked for")
    for one, name in zip(without_dx, ("w", "b"), strict=True):
        if not np.array_equal(one, grads[name]):
            raise GradientError(f"another gradient of {name} where that of x is not needed")


@pytest.mark.parametrize("case", CONV_CASES)
@pytest.mark.parametrize("form", FORMS)
def test_conv2d(form: str, case: tuple[int, ...]) -> None:
    check_conv(form, case)


@pytest.mark.parametrize("conv", m.CONVOLUTIONS)
def test_conv2d_leaves_nothing_in_the_workspace(conv: str) -> None:
    forward, backward = m.CONVOLUTIONS[conv]
    ws = float64()
    for stride, B in ((2, 5), (2, 3), (1, 5), (2, 5)):
        at = conv_inputs((stride, 3, 8, 9, 2))
        x = at["x"][:, :, :B]
        for size in (x, x[:6]):
            out, cache = forward(size, at["w"], at["b"], stride, ws, "c")
            np.testing.assert_allclose(out, loop_conv(size, at["w"], at["b"], stride), rtol=1e-12, atol=1e-12)
            twice = []
            for _ in range(2):
                dw, db = np.full_like(at["w"], np.nan), np.full_like(at["b"], np.nan)
                dx = backward(np.ones(out.shape), cache, dw, db, ws)
                twice.append([dx.copy(), dw, db])
            for first, second in zip(*twice, strict=True):
                np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("case", CONV_CASES)
@pytest.mark.parametrize("conv", m.CONVOLUTIONS)
def test_conv2d_is_the_loop(conv: str, case: tuple[int, ...]) -> None:
    stride, at = case[0], conv_inputs(case)
    out, _ = m.CONVOLUTIONS[conv][0](at["x"], at["w"], at["b"], stride, float64(), "c")
    np.testing.assert_allclose(out, loop_conv(at["x"], at["w"], at["b"], stride), rtol=1e-12, atol=1e-12)


# stride, kernel, rows, columns, channels in
@pytest.mark.parametrize(
    "case",
    [(1, 5, 13, 17, 1), (2, 9, 28, 28, 3), (2, 5, 15, 11, 4), (3, 7, 19, 23, 2), (3, 5, 17, 16, 1), (3, 9, 27, 29, 3)],
)
def test_spectral_convolution_is_im2col(case: tuple[int, ...]) -> None:
    stride, at = case[0], conv_inputs(case)
    results = []
    for forward, backward in m.CONVOLUTIONS.values():
        ws = float64()
        out, cache = forward(at["x"], at["w"], at["b"], stride, ws, "c")
        dw, db = np.full_like(at["w"], np.nan), np.full_like(at["b"], np.nan)
        dx = backward(rng_of(4).standard_normal(out.shape), cache, dw, db, ws)
        results.append((out, dx, dw, db))
    for plain, spectral in zip(*results, strict=True):
        np.testing.assert_allclose(spectral, plain, rtol=0, atol=1e-10)


@pytest.mark.parametrize("conv", m.CONVOLUTIONS)
def test_conv2d_in_single_precision_has_its_precision(conv: str) -> None:
    """Going by way of the spectra costs no more than a few roundings of the largest output."""
    rng = rng_of(5)
    x, w, b = rng.random((16, 16, 3, 16)), rng.standard_normal((9, 9, 16, 8)), rng.standard_normal(8)
    dout, f, results = rng.standard_normal((4, 4, 3, 8)), np.float32, []
    forward, backward = m.CONVOLUTIONS[conv]
    for dtype in (np.float64, np.float32):
        ws, dw, db = m.Workspace(dtype), np.empty(w.shape, dtype), np.empty(8, dtype)
        out, cache = forward(x.astype(dtype), w.astype(dtype), b.astype(dtype), 2, ws, "c")
        results.append((out, backward(dout.astype(dtype), cache, dw, db, ws), dw, db))
    for exact, single in zip(*results, strict=True):
        assert single.dtype == f
        assert np.abs(single - exact).max() < 3e-6 * np.abs(exact).max()


def check_transforms() -> None:
    for Ho, Wo, k in ((4, 5, 3), (5, 4, 2), (1, 1, 1), (3, 3, 2)):
        rng, t = rng_of(Ho, Wo), spectral_conv.transforms(Ho, Wo, k, np.dtype(complex))
        U, V = Ho + k - 1, Wo + k - 1
        R = U // 2 + 1
        x, w = rng.standard_normal((U, V)), rng.standard_normal((k, k))
        x_f, w_f = t.x_rows @ x @ t.x_columns.T, t.w_rows @ w @ t.w_columns.T
        by_rows = x_f * w_f @ t.out_columns.T
        out = (t.out_rows @ by_rows).real
        pairs_of_numpy = [
            (x_f, np.fft.rfft2(x, axes=(1, 0))),
            (w_f, np.fft.rfft2(w, (V, U), axes=(1, 0)).conj()),
            (out, np.fft.irfft2(x_f * w_f, (V, U), axes=(1, 0))[:Ho, :Wo]),
        ]
        for r in range(R):  # its own conjugate: real in space
            if 2 * r % U == 0:
                half = t.out_columns_half @ (x_f * w_f)[r, : V // 2 + 1]
                pairs_of_numpy.append((half.real, by_rows[r].real))
        for ours, numpys in pairs_of_numpy:
            if not np.allclose(ours, numpys, rtol=1e-12, atol=1e-12):
                raise GradientError("not the transform of numpy.fft")


def test_transforms_are_those_of_numpy_fft() -> None:
    check_transforms()


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_phases(stride: int) -> None:
    x = rng_of(0).standard_normal((7, 8, 2, 3))
    for N, M in ((2, 2), (3, 4), (7, 8), (8, 9)):  # some smaller, some larger than x
        phases = spectral_conv.split_phases(x, stride, np.full((N, M, 2, stride, stride, 3), np.nan))
        for n, p, a, b in itertools.product(range(N), range(M), range(stride), range(stride)):
            h, w = stride * n + a, stride * p + b
            expected = x[h, w] if h < 7 and w < 8 else 0
            np.testing.assert_array_equal(phases[n, p, :, a, b], expected)
        back = spectral_conv.join_phases(phases, stride, np.full(x.shape, np.nan))
        seen = np.zeros_like(x)
        seen[: stride * N, : stride * M] = x[: stride * N, : stride * M]
        np.testing.assert_array_equal(back, seen)


def check_linear() -> None:
    rng = rng_of(0)
    at = {name: rng.standard_normal(shape) for name, shape in {"x": (3, 5), "w": (3, 7), "b": (7,)}.items()}
    upstream = rng.standard_normal((7, 5))
    grads = {name: np.full_like(at[name], np.nan) for name in ("w", "b")}
    grads["x"] = m.linear_backward(upstream, at["x"], at["w"], grads["w"], grads["b"])
    check_gradient(lambda x, w, b: float(np.vdot(m.linear_forward(x, w, b, float64(), "l"), upstream)), at, grads, rng)


def check_in_place(forward: Callable[[Array], Array], backward: str) -> None:
    rng = rng_of(0)
    x = rng.standard_normal((7, 5))
    upstream = rng.standard_normal(x.shape)
    dx = getattr(m, backward)(upstream.copy(), forward(x.copy()))
    check_gradient(lambda x: float(np.vdot(forward(x.copy()), upstream)), {"x": x}, {"x": dx}, rng)


def check_max_pool() -> None:
    for shape in ((6, 8, 5, 3), (7, 9, 3, 2)):
        rng = rng_of(*shape)
        x = rng.permutation(math.prod(shape)).reshape(shape) / 10  # no ties
        ws = float64()
        out = m.max_pool_forward(x, ws, "p")
        assert out.shape == (3, 4, *shape[2:])
        upstream = rng.standard_normal(out.shape)
        dx = m.max_pool_backward(upstream, x, out, ws, "p")
        check_gradient(
            lambda x, up=upstream: float(np.vdot(m.max_pool_forward(x, float64(), "p"), up)), {"x": x}, {"x": dx}, rng
        )
    ties = np.zeros((2, 2, 1, 1))
    dx = m.max_pool_backward(np.ones((1, 1, 1, 1)), ties, np.zeros((1, 1, 1, 1)), float64(), "p")
    if dx.sum() != 1:
        raise GradientError("the gradient of a tie is not handed on once")


def squash(s: Array, axis: int) -> Array:
    out = np.empty_like(s)
    m.squash_forward(s, axis, out)
    return out


def check_squash() -> None:
    for axis in (0, 1):
        rng = rng_of(axis)
        s, upstream = rng.standard_normal((3, 7, 5)), rng.standard_normal((3, 7, 5))
        cache = m.squash_forward(s, axis, np.empty_like(s))
        check_gradient(
            lambda s, axis=axis, up=upstream: float(np.vdot(squash(s, axis), up)),
            {"s": s},
            {"s": m.squash_backward(upstream, cache)},
            rng,
        )


def check_softmax() -> None:
    rng = rng_of(0)
    b, upstream = rng.standard_normal((4, 7, 3)), rng.standard_normal((4, 7, 3))
    c = m.softmax_over_parents(b, np.empty_like(b))
    db = m.softmax_backward(upstream.copy(), c)
    check_gradient(
        lambda b: float(np.vdot(m.softmax_over_parents(b, np.empty_like(b)), upstream)), {"b": b}, {"b": db}, rng
    )


def check_shared_transform() -> None:
    rng = rng_of(0)
    w, upstream = rng.standard_normal((4, 3, 1, 5)), rng.standard_normal((4, 3, 7, 5))
    dw = np.full_like(w, np.nan)
    m.shared_transform_backward(upstream, dw)
    check_gradient(
        lambda w: float(np.vdot(m.shared_transform_forward(w, 7, float64()), upstream)), {"w": w}, {"w": dw}, rng
    )


def check_unmask() -> None:
    rng = rng_of(0)
    v, labels = rng.standard_normal((4, 3, 5)), np.stack([rng.permutation(4)[:2] for _ in range(5)])
    upstream = rng.standard_normal((12, 10))
    before = rng.standard_normal(v.shape)
    dv = before.copy()
    m.unmask_gradient(upstream, dv, labels)
    check_gradient(lambda v: float(np.vdot(m.mask_capsules(v, labels), upstream)), {"v": v}, {"v": dv - before}, rng)


def test_linear() -> None:
    check_linear()


def test_relu() -> None:
    check_in_place(m.relu_forward, "relu_backward")


def test_sigmoid() -> None:
    check_in_place(m.sigmoid_forward, "sigmoid_backward")
    np.testing.assert_array_equal(m.sigmoid_forward(np.array([0, 1e30])), [0.5, 1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sigmoid_keeps_its_relative_accuracy(dtype: type) -> None:
    """Down to the smallest normal number, where it stays; without overflow."""
    info = np.finfo(dtype)
    smallest = math.log(info.tiny)
    x: Array = np.linspace(smallest, 40, 10_001).astype(dtype)
    with np.errstate(over="raise", invalid="raise"):
        out = m.sigmoid_forward(x.copy())
        far = m.sigmoid_forward(np.array([-info.max, 2 * smallest, -np.inf], dtype))
    exact = 1 / (1 + np.exp(-x.astype(np.longdouble)))
    assert out.dtype == dtype
    assert float((np.abs(out - exact) / exact).max()) < 4 * info.eps
    np.testing.assert_allclose(far, info.tiny, rtol=1e-4)


def test_max_pool() -> None:
    check_max_pool()


def test_squash() -> None:
    check_squash()


def test_softmax_over_parents() -> None:
    check_softmax()


def test_shared_transform() -> None:
    check_shared_transform()


def test_mask_capsules() -> None:
    check_unmask()


# ----------------------------------------------------------------------------------------------------------------------
# Routing
# ----------------------------------------------------------------------------------------------------------------------

J, P, I, D, B = 7, 3, 9, 5, 6


def routing_inputs(seed: int) -> Params:
    rng = rng_of(seed)
    return {"u": rng.standard_normal((P, I, B)), "w": rng.standard_normal((J, P, I, D))}


def check_routing(policy: str, n_iters: int, first: Array | None = None, has_squash: bool = True) -> None:
    at, ws = routing_inputs(n_iters), float64()
    if not has_squash:
        at["w"] /= 3  # else the couplings would be 0 and 1
    v, cache = m.routing_forward(at["u"], at["w"], n_iters, ws, first, has_squash)
    upstream = rng_of(1).standard_normal(v.shape)
    dw = np.full_like(at["w"], np.nan)
    grads = {"u": m.routing_backward(upstream.copy(), cache, policy, dw, ws), "w": dw}
    c = cache.c[-1].copy()

    def f(u: Array, w: Array) -> float:
        if policy == "exact":
            return float(np.vdot(m.routing_forward(u, w, n_iters, float64(), first, has_squash)[0], upstream))
        s = np.einsum("jib,jpid,pib->jdb", c, w, u)  # the last sum, with the couplings that the forward pass found
        return float(np.vdot(squash(s, 1) if has_squash else s, upstream))

    check_gradient(f, at, grads, rng_of(2))


@pytest.mark.parametrize("n_iters", [1, 2, 3, 4])
@pytest.mark.parametrize("policy", ["exact", "stop"])
def test_routing(policy: str, n_iters: int) -> None:
    check_routing(policy, n_iters)


@pytest.mark.parametrize("n_iters", [1, 3])
@pytest.mark.parametrize("policy", ["exact", "stop"])
def test_routing_without_squash(policy: str, n_iters: int) -> None:
    check_routing(policy, n_iters, has_squash=False)
    at = routing_inputs(0)
    v, _ = m.routing_forward(at["u"], at["w"], 1, float64(), has_squash=False)
    np.testing.assert_allclose(v, np.einsum("jpid,pib->jdb", at["w"], at["u"]) / J)


@pytest.mark.parametrize("n_iters", [1, 3])
@pytest.mark.parametrize("policy", ["exact", "stop"])
def test_routing_from_random_couplings(policy: str, n_iters: int) -> None:
    first = m.random_couplings(J, I)
    np.testing.assert_allclose(first.sum(axis=0), 1)
    assert first.std() > 0.1
    check_routing(policy, n_iters, first)
    at = routing_inputs(0)
    v, cache = m.routing_forward(at["u"], at["w"], n_iters, float64(), first)
    np.testing.assert_array_equal(cache.c[0], np.broadcast_to(first[..., None], (J, I, B)))
    if n_iters == 1:
        np.testing.assert_allclose(v, squash(np.einsum("ji,jpid,pib->jdb", first, at["w"], at["u"]), 1))


@pytest.mark.parametrize("n_parents", [1, 2])
def test_routing_by_groups_of_parents(n_parents: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the real sizes."""
    w = routing_inputs(3)["w"]
    assert len(w) % 2 == 1
    monkeypatch.setattr(m, "TERM_SIZE", n_parents * w[0].size)
    check_routing("exact", 3)


def routing_by_loops(u: Array, w: Array, n_iters: int) -> tuple[Array, list[Array]]:
    """[Sabour 2017, procedure 1], one example, one pair of capsules at a time."""
    (I, B), (J, D) = u.shape[1:], (w.shape[0], w.shape[3])
    v, couplings = np.zeros((J, D, B)), [np.zeros((J, I, B)) for _ in range(n_iters)]
    for n in range(B):
        votes = [[w[j, :, i].T @ u[:, i, n] for i in range(I)] for j in range(J)]
        b = [[0.0] * J for _ in range(I)]
        for t in range(n_iters):
            for i in range(I):
                total = sum(math.exp(x) for x in b[i])
                for j in range(J):
                    couplings[t][j, i, n] = math.exp(b[i][j]) / total
            for j in range(J):
                s = sum(couplings[t][j, i, n] * votes[j][i] for i in range(I))
                length = math.sqrt(float(s @ s))
                v[j, :, n] = length**2 / (1 + length**2) * s / length
            for i, j in itertools.product(range(I), range(J)):
                b[i][j] += float(votes[j][i] @ v[j, :, n])
    return v, couplings


@pytest.mark.parametrize("n_iters", [1, 2, 3])
def test_routing_is_the_loop(n_iters: int) -> None:
    at = routing_inputs(n_iters)
    v, cache = m.routing_forward(at["u"], at["w"], n_iters, float64())
    expected, couplings = routing_by_loops(at["u"], at["w"], n_iters)
    np.testing.assert_allclose(v, expected, rtol=1e-7)  # the script adds 1e-9 to |s|^2
    np.testing.assert_allclose(cache.c, couplings, rtol=1e-7)


# ----------------------------------------------------------------------------------------------------------------------
# Losses
# ----------------------------------------------------------------------------------------------------------------------


def some_labels(n: int, seed: int = 0, n_labels: int = 2) -> Array:
    rng = rng_of(seed)
    return np.stack([rng.permutation(10)[:n_labels] for _ in range(n)])


def check_loss(name: str) -> None:
    rng = rng_of(0)
    x = rng.uniform(0, 1, (10, 7)) if name == "margin_loss" else 3 * rng.standard_normal((10, 7))
    positive = m.indicator(some_labels(7), np.dtype(np.float64))
    loss = getattr(m, name)
    check_gradient(lambda x: loss(x, positive, 9)[0], {"x": x}, {"x": loss(x, positive, 9)[1]}, rng)


def check_squared_error() -> None:
    rng = rng_of(0)
    x, target = rng.random((11, 6)), rng.random((11, 6))
    loss, gradient = m.squared_error(x, target, 0.3, 5)
    if loss != pytest.approx(((x - target) ** 2).sum() / 5):
        raise GradientError("the loss is not the mean of the examples' sums")
    check_gradient(lambda x: 0.3 * m.squared_error(x, target, 0.3, 5)[0], {"x": x}, {"x": gradient}, rng)


@pytest.mark.parametrize("name", ["margin_loss", "sigmoid_cross_entropy", "softmax_cross_entropy"])
def test_loss(name: str) -> None:
    check_loss(name)


def test_squared_error() -> None:
    check_squared_error()


def test_margin_loss_by_hand() -> None:
    """0.9 and 0.1 are free, what is short or long is squared, a wrong class weighs half; no softmax, no mean."""
    positive = np.array([[1.0], [1.0], [0.0], [0.0]])
    lengths = np.array([[0.95], [0.6], [0.05], [0.5]])
    loss, gradient = m.margin_loss(lengths, positive, 1)
    assert loss == pytest.approx(0.3**2 + 0.5 * 0.4**2)
    np.testing.assert_allclose(gradient[:, 0], [0, -2 * 0.3, 0, 0.5 * 2 * 0.4])


def test_cross_entropy_by_hand_and_far_out() -> None:
    p = 1 / (1 + math.exp(-0.7))
    for positive, expected in ((1.0, -math.log(p)), (0.0, -math.log(1 - p))):
        assert m.sigmoid_cross_entropy(np.array([[0.7]]), np.array([[positive]]), 1)[0] == pytest.approx(expected)
    loss, gradient = m.sigmoid_cross_entropy(np.array([[1e4, -1e4]]), np.array([[0.0, 1.0]]), 2)
    assert loss == 1e4
    np.testing.assert_array_equal(gradient, [[0.5, -0.5]])


@pytest.mark.parametrize("n_labels", [1, 2])
def test_softmax_cross_entropy_by_hand(n_labels: int) -> None:
    scores = 3 * rng_of(1).standard_normal((10, 7))
    positive = m.indicator(some_labels(7, n_labels=n_labels), scores.dtype)
    p = np.exp(scores) / np.exp(scores).sum(axis=0)
    loss, _ = m.softmax_cross_entropy(scores, positive, 9)
    assert loss == pytest.approx(-np.log(p[positive == 1]).sum() / 9, rel=1e-12)


def test_softmax_cross_entropy_far_out() -> None:
    scores = np.zeros((10, 2), np.float32)
    scores[3] = 1e4
    positive = m.indicator(np.array([[3], [4]]), scores.dtype)
    loss, gradient = m.softmax_cross_entropy(scores, positive, 2)
    assert loss == 5000
    np.testing.assert_array_equal(gradient[:, 0], 0)
    np.testing.assert_allclose(gradient[[3, 4], 1], [0.5, -0.5])


# ----------------------------------------------------------------------------------------------------------------------
# Whole models
# ----------------------------------------------------------------------------------------------------------------------

TINY = {"image_size": 20, "conv_channels": 3, "primary_types": 2, "decoder": (7, 11), "recon_weight": 0.1}
POOLED = m.CNN((m.ConvLayer(5, 3, pool=True), m.ConvLayer(3, 4, stride=2), m.ConvLayer(2, 2, pool=True)), 7)
TRUNK = m.CNN((m.ConvLayer(9, 3), m.ConvLayer(5, 4, stride=2)), 6)


def tiny(**changes: Any) -> m.Config:
    return m.Config(**{**TINY, "dtype": "float64", **changes})


def random_batch(config: m.Config, n: int) -> m.Batch:
    rng = rng_of(n)
    side, L = config.image_size, config.n_labels
    return m.Batch(rng.random((n, side, side)), some_labels(n, n_labels=L), rng.random((n, L, side, side)))


def perturbed(params: Params) -> Params:
    """Biases are not zero, and digit capsules are of all lengths."""
    rng = rng_of(3)
    return {k: p + 0.1 * rng.standard_normal(p.shape) for k, p in params.items()}


def zeros_like(params: Params) -> Params:
    return {k: np.full_like(p, np.nan) for k, p in params.items()}


def check_capsnet(**changes: Any) -> None:
    config = tiny(**changes)
    params, batch = perturbed(m.capsnet_init(rng_of(1), config)), random_batch(config, 5)
    grads = zeros_like(params)
    m.capsnet_loss_and_grads(params, batch, 6, config, grads, float64())

    def f(**p: Array) -> float:
        return m.capsnet_loss_and_grads(p, batch, 6, config, zeros_like(p), float64())["train_loss"]

    check_gradient(
        f, params, grads, rng_of(2), n_directions=1, step=1e-6
    )  # a larger one would take ReLUs over their kink


def check_cnn(net: m.CNN) -> None:
    config = tiny()
    params, batch = perturbed(m.cnn_init(rng_of(1), config, net)), random_batch(config, 5)
    grads = zeros_like(params)
    m.cnn_loss_and_grads(params, batch, 6, net, grads, float64())

    def f(**p: Array) -> float:
        return m.cnn_loss_and_grads(p, batch, 6, net, zeros_like(p), float64())["train_loss"]

    check_gradient(f, params, grads, rng_of(2), n_directions=1, step=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"conv": "im2col"},
        {"routing_iters": 2, "n_labels": 1},
        {"routing_iters": 1},
        {"assignments": "uniform"},
        {"assignments": "random"},
        {"assignments": "random", "routing_grad": "stop"},
        {"transform": "shared", "assignments": "uniform"},
        {"transform": "shared", "routing_iters": 2},
        {"activation": "relu", "routing_iters": 1},
        {"capsnet_loss": "cross-entropy"},
        {"assignments": "uniform", "activation": "relu", "capsnet_loss": "cross-entropy"},
    ],
)
def test_capsnet(changes: dict[str, Any]) -> None:
    check_capsnet(**changes)


@pytest.mark.parametrize("net", [TRUNK, POOLED, POOLED._replace(conv="im2col")])
def test_cnn(net: m.CNN) -> None:
    check_cnn(net)


@pytest.mark.parametrize("name", m.MODEL_NAMES)
def test_gradients_do_not_depend_on_the_convolution(name: str) -> None:
    results = []
    for conv in m.CONVOLUTIONS:
        config = tiny(conv=conv, image_size=28 if name == "cnn_pool" else 20)
        model = m.make_models(config)[name]
        params, batch = perturbed(model.init_params(rng_of(1))), random_batch(config, 5)
        grads = zeros_like(params)
        loss = model.loss_and_grads(params, batch, 5, grads, float64())["train_loss"]
        results.append({"loss": np.array(loss), **grads})
    for key, plain in results[0].items():
        np.testing.assert_allclose(results[1][key], plain, rtol=0, atol=1e-10, err_msg=key)


def reference_capsnet_loss(p: Any, batch: m.Batch, config: m.Config, n: int, np: Any) -> Any:
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
    h = conv(h, p["primary.w"], p["primary.b"], 2)  # (B, P*T, side, side)
    h = np.reshape(h, (B, m.PRIMARY_SIZE, T, side, side))
    is_squashed = config.activation == "squash"
    u = np.reshape(np.transpose(h, (0, 3, 2, 4, 1)), (B, -1, m.PRIMARY_SIZE))  # (B, I, P)
    u = squash(u, 2) if is_squashed else np.maximum(u, 0)
    if config.transform == "shared":
        votes = np.einsum("bip,jpd->bijd", u, p["routing.w"][:, :, 0])
    else:
        votes = np.einsum("bip,jpid->bijd", u, p["routing.w"])
    logits = np.zeros((B, u.shape[1], 10))
    n_iters = config.routing_iters if config.assignments == "routed" else 1
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
            if config.capsnet_loss == "cross-entropy":
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
        {"transform": "shared", "assignments": "uniform"},
        {"capsnet_loss": "cross-entropy"},
        {"activation": "relu", "routing_iters": 2},
        {"assignments": "uniform", "activation": "relu", "capsnet_loss": "cross-entropy", "recon_weight": 0.0},
    ],
)
def test_loss_and_gradients_are_those_of_autograd(changes: dict[str, Any]) -> None:
    import autograd.numpy as anp
    from autograd import value_and_grad

    config = tiny(**changes)
    params, batch = perturbed(m.capsnet_init(rng_of(1), config)), random_batch(config, 4)
    grads = zeros_like(params)
    loss = m.capsnet_loss_and_grads(params, batch, 4, config, grads, float64())["train_loss"]
    expected, reference = value_and_grad(lambda p: reference_capsnet_loss(p, batch, config, 4, anp))(params)
    assert loss == pytest.approx(float(expected), rel=1e-12)
    for name in params:
        np.testing.assert_allclose(grads[name], reference[name], rtol=1e-8, atol=1e-12, err_msg=name)


# ----------------------------------------------------------------------------------------------------------------------
# Broken backward passes
# ----------------------------------------------------------------------------------------------------------------------


def check_routing_all() -> None:
    check_routing("exact", 3)
    check_routing("stop", 2)
    check_routing("exact", 2, m.random_couplings(J, I))
    check_routing("exact", 2, has_squash=False)


CHECKS: dict[str, Callable[[], None]] = {
    "conv2d_backward": lambda: check_conv("conv2d", CONV_CASES[1]),
    "spectral_conv2d_backward": lambda: check_conv("spectral_conv2d", CONV_CASES[1]),
    "linear_backward": check_linear,
    "relu_backward": lambda: check_in_place(m.relu_forward, "relu_backward"),
    "sigmoid_backward": lambda: check_in_place(m.sigmoid_forward, "sigmoid_backward"),
    "max_pool_backward": check_max_pool,
    "squash_backward": check_squash,
    "softmax_backward": check_softmax,
    "shared_transform_backward": check_shared_transform,
    "unmask_gradient": check_unmask,
    "routing_backward": check_routing_all,
    "decoder_backward": check_capsnet,
    "capsnet_loss_and_grads": check_capsnet,
    "cnn_loss_and_grads": lambda: check_cnn(POOLED),
    "margin_loss": lambda: check_loss("margin_loss"),
    "squared_error": check_squared_error,
    "sigmoid_cross_entropy": lambda: check_loss("sigmoid_cross_entropy"),
    "softmax_cross_entropy": lambda: check_loss("softmax_cross_entropy"),
}
HARMLESS = {
    "routing_backward": ["TERM_SIZE //"],  # how many terms at a time
    "capsnet_loss_and_grads": ['"train_recon_loss":', "config.class_loss:"],  # reported, not differentiated
    "softmax_cross_entropy": ["shifted = scores"],  # any shift gives the same softmax
    "margin_loss": ["excess = "],  # another loss, with its own right gradient: see test_margin_loss_by_hand
}
NO_ARITHMETIC = ("linear_backward", "max_pool_backward", "decoder_backward")  # of its own


def test_every_backward_has_a_check() -> None:
    names = {name for name in vars(m) if name.endswith(("_backward", "_loss_and_grads", "_gradient"))}
    losses = {"margin_loss", "squared_error", "sigmoid_cross_entropy", "softmax_cross_entropy"}
    assert names | losses == set(CHECKS)


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in (*NO_ARITHMETIC, "shared_transform_backward")])
def test_a_broken_backward_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    survivors = surviving_mutants(monkeypatch, m, name, CHECKS[name])
    assert [s for s in survivors if not any(h in s for h in HARMLESS.get(name, []))] == []


def test_broken_transforms_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert surviving_mutants(monkeypatch, spectral_conv, "transforms", check_transforms) == []


# dw and db
@pytest.mark.parametrize(
    ("name", "argument"),
    [
        *[("conv2d_backward", 2), ("conv2d_backward", 3), ("linear_backward", 3), ("linear_backward", 4)],
        *[("spectral_conv2d_backward", 2), ("spectral_conv2d_backward", 3), ("shared_transform_backward", 1)],
    ],
)
def test_a_wrong_gradient_of_weights_is_seen(name: str, argument: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(m, name)

    def wrong(*args: Any, **options: bool) -> Array:
        dx = original(*args, **options)
        args[argument][...] *= 0.9
        return dx

    monkeypatch.setattr(m, name, wrong)
    with pytest.raises(GradientError):
        CHECKS[name]()


@pytest.mark.parametrize("name", [*NO_ARITHMETIC, "conv2d_backward", "spectral_conv2d_backward"])
def test_a_wrong_result_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(m, name)
    monkeypatch.setattr(m, name, lambda *args, **options: 0.9 * original(*args, **options))
    with pytest.raises(GradientError):
        CHECKS[name]()
