"""Every backward pass of every script against differences, every network against autograd and every routing against
plain loops, the fast twins against their plain forms, and the tests against broken copies of all of these.

Float64, random directions, random upstream gradients, unequal and odd sizes.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import value_and_grad

import multimnist_capsnet as m
import oracles
import smallnorb_novel_viewpoint as s
from fast import dynamic_routing, field_em, spectral_conv
from helpers import GradientError, check_gradient, check_pair, surviving_mutants
from more import conv_matrix_capsules as conv
from more import mnist_affine_capsnet as affine
from more import what_routing_does as study

Array = np.ndarray
Params = dict[str, Array]
Check = Callable[[], None]


def rng_of(*seed: int) -> np.random.Generator:
    return np.random.default_rng([*seed, 7])


def drawn(rng: np.random.Generator, **shapes: tuple[int, ...]) -> dict[str, Any]:
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def check_layer(module: ModuleType, name: str, *rest: Any, **shapes: tuple[int, ...]) -> None:
    """A pair by its name, on inputs of these shapes and further arguments of the forward pass."""
    forward, backward = getattr(module, f"{name}_forward"), getattr(module, f"{name}_backward")
    check_pair(lambda **x: forward(*x.values(), *rest), backward, drawn(rng_of(0), **shapes), rng_of(1))


def layer(module: ModuleType, name: str, *rest: Any, **shapes: tuple[int, ...]) -> Check:
    return functools.partial(check_layer, module, name, *rest, **shapes)


def assert_same(plain: Params, fast: Params) -> None:
    for key, expected in plain.items():
        assert fast[key].shape == expected.shape
        largest = max(1e-10, np.abs(expected).max())
        np.testing.assert_allclose(fast[key], expected, rtol=0, atol=1e-10 * largest, err_msg=key)


# --- Convolutions: the two plain ones, and that by way of the spectra -------------------------------------------------

# stride, padding, kernel, rows, columns, channels in
CONV_CASES = [
    (1, 0, 3, 7, 9, 2), (2, 0, 3, 9, 8, 2), (2, 1, 4, 11, 10, 1), (3, 0, 5, 13, 12, 3), (3, 2, 2, 11, 9, 2),
    (1, 0, 3, 3, 3, 2), (2, 0, 9, 9, 10, 1), (1, 0, 1, 2, 2, 2), (2, 0, 1, 5, 9, 3), (3, 3, 4, 6, 5, 2),
]  # fmt: skip
PLAIN_CONVS = (s, m)
CONVS = (*PLAIN_CONVS, spectral_conv)


def conv_inputs(case: tuple[int, ...], B: int = 5) -> dict[str, Any]:
    _, _, K, H, W, C = case
    return drawn(rng_of(*case), x=(B, H, W, C), w=(K, K, C, 4), b=(4,))


def check_conv(form: ModuleType, case: tuple[int, ...] = CONV_CASES[1]) -> None:
    inputs, rest = conv_inputs(case), case[:2]
    check_pair(lambda **x: form.conv2d_forward(*x.values(), *rest), form.conv2d_backward, inputs, rng_of(2))
    out, cache = form.conv2d_forward(*inputs.values(), *rest)
    _, *expected = form.conv2d_backward(out, cache)
    dx, *without_dx = form.conv2d_backward(out, cache, need_dx=False)
    if dx is not None or not all(map(np.array_equal, without_dx, expected)):
        raise GradientError("the gradients are others where that of x is not needed")


@pytest.mark.parametrize("case", CONV_CASES)
@pytest.mark.parametrize("form", CONVS)
def test_conv2d(form: ModuleType, case: tuple[int, ...]) -> None:
    check_conv(form, case)
    inputs = conv_inputs(case)
    out, _ = form.conv2d_forward(*inputs.values(), *case[:2])
    np.testing.assert_allclose(out, oracles.loop_conv(*inputs.values(), *case[:2]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "case",
    [(1, 0, 5, 13, 17, 1), (2, 0, 9, 28, 28, 3), (2, 2, 5, 15, 11, 4), (3, 0, 7, 19, 23, 2), (3, 1, 5, 17, 16, 1),
     (3, 0, 9, 27, 29, 3)],
)  # fmt: skip
def test_spectral_convolution_is_im2col(case: tuple[int, ...]) -> None:
    results = []
    for form in (m, spectral_conv):
        out, cache = form.conv2d_forward(*conv_inputs(case).values(), *case[:2])
        results.append((out, *form.conv2d_backward(rng_of(4).standard_normal(out.shape), cache)))
    for plain, spectral in zip(*results, strict=True):
        np.testing.assert_allclose(spectral, plain, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", CONVS)
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


# --- Other layers -----------------------------------------------------------------------------------------------------


def check_pool(module: ModuleType, name: str) -> None:
    for shape in ((5, 6, 8, 3), (3, 7, 9, 2)):  # the last row and column of odd ones are dropped
        check_layer(module, name, x=shape)
        assert getattr(module, f"{name}_forward")(np.zeros(shape))[0].shape == (shape[0], 3, 4, shape[3])


def check_max_pool() -> None:
    check_pool(m, "max_pool")
    _, cache = m.max_pool_forward(np.zeros((1, 2, 2, 1)))
    if m.max_pool_backward(np.ones((1, 1, 1, 1)), cache).sum() != 1:
        raise GradientError("the gradient of a tie is not handed on once")


@pytest.mark.parametrize(("module", "name", "of"), [(m, "max_pool", np.max), (affine, "avg_pool", np.mean)])
def test_a_pool_is_the_loop(module: ModuleType, name: str, of: Any) -> None:
    x = rng_of(0).standard_normal((2, 5, 7, 3))
    out, _ = getattr(module, f"{name}_forward")(x)
    for i, j in np.ndindex(2, 3):
        block = x[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
        np.testing.assert_allclose(out[:, i, j], of(block, axis=(1, 2)), rtol=1e-12)


def check_softmax() -> None:
    check_pair(lambda b: (m.softmax(b), m.softmax(b)), m.softmax_backward, drawn(rng_of(0), b=(3, 7, 4)), rng_of(1))


def check_mask() -> None:
    rng = rng_of(0)
    v, labels = rng.standard_normal((5, 4, 3)), np.stack([rng.permutation(4)[:2] for _ in range(5)])
    check_pair(lambda v: m.mask_forward(v, labels), m.mask_backward, {"v": v}, rng)
    masked, _ = m.mask_forward(v, labels)
    for b, digit in np.ndindex(5, 2):
        alone = np.zeros((4, 3))
        alone[labels[b, digit]] = v[b, labels[b, digit]]
        np.testing.assert_array_equal(masked[2 * b + digit], alone.ravel())


def check_class_scores() -> None:
    inputs = drawn(rng_of(6), mu=(3, 5, 9), a=(3, 5))
    mu, a = inputs.values()
    check_pair(
        lambda mu, a: (s.class_scores_forward(mu, a, "cross-entropy"), mu),
        lambda dscores, mu: s.class_scores_backward(dscores, mu, "cross-entropy"), inputs, rng_of(1),
    )  # fmt: skip
    np.testing.assert_array_equal(s.class_scores_forward(mu, a, "spread"), a)  # which looks at activations alone
    dmu, da = s.class_scores_backward(a, mu, "spread")
    assert not dmu.any()
    np.testing.assert_array_equal(da, a)


def check_field_layers(form: ModuleType) -> None:
    """``scatter`` is the backward pass of ``gather``; of activations and of poses."""
    rng = rng_of(10)
    for case in FIELD_CASES:
        _, height, width, n_in, _, k, p, stride = case
        fields: Any = conv.Fields((height, width), k, stride)
        if form is field_em:
            fields = field_em.receptive_fields(height, width, k, stride)
        for shape in ((2, height, width, n_in), (3, height, width, n_in, p, 5)):
            x = rng.standard_normal(shape)
            gathered = form.gather(x, fields)
            for y, column, i, j in np.ndindex(*gathered.shape[1:5]):
                np.testing.assert_array_equal(gathered[:, y, column, i, j], x[:, stride * y + i, stride * column + j])
            check_pair(
                lambda x, fields=fields: (form.gather(x, fields), fields), lambda d, fields: form.scatter(d, fields),
                {"x": x}, rng,
            )  # fmt: skip


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-14)])
def test_sigmoid_keeps_its_relative_accuracy_and_has_no_overflow(dtype: str, tolerance: float) -> None:
    x = np.linspace(-80, 80, 4001).astype(dtype)
    exact = [math.exp(v) / (1 + math.exp(v)) if v < 0 else 1 / (1 + math.exp(-v)) for v in x.tolist()]
    far = np.array([-np.inf, -1e4, -1e3, 1e3, 1e4, np.inf], dtype)
    for script in (s, m):
        out, _ = script.sigmoid_forward(x)
        assert out.dtype == dtype
        np.testing.assert_allclose(out.astype(np.float64), exact, rtol=tolerance, atol=0)
        with np.errstate(over="raise", divide="raise", invalid="raise"):
            out, cache = script.sigmoid_forward(far)
            dx = script.sigmoid_backward(np.ones(6, dtype), cache)
        np.testing.assert_array_equal(out, [0, 0, 0, 1, 1, 1])
        np.testing.assert_array_equal(dx, 0)


@pytest.mark.parametrize("name", ["conv2d", "linear", "relu", "sigmoid"])
def test_a_layer_is_the_same_in_both_base_scripts(name: str) -> None:
    for step in ("forward", "backward"):
        ours, theirs = (inspect.getsource(getattr(script, f"{name}_{step}")) for script in (m, s))
        assert ours == theirs


# --- Losses -----------------------------------------------------------------------------------------------------------


def some_labels(n: int, n_labels: int = 2) -> Array:
    rng = rng_of(0)
    return np.stack([rng.permutation(10)[:n_labels] for _ in range(n)])


POSITIVE = m.indicator(some_labels(7), 10, float)


def check_loss(module: ModuleType, name: str, rest: tuple[Any, ...], low: float = -5, high: float = 5) -> None:
    x = rng_of(0).uniform(low, high, (7, 10))
    check_gradient(
        lambda x: getattr(module, name)(x, *rest)[0], {"x": x}, {"x": getattr(module, name)(x, *rest)[1]}, rng_of(1)
    )


def check_squared_error() -> None:
    x, target = rng_of(0).random((2, 7, 10))
    check_loss(m, "squared_error", (target, 5), 0, 1)
    if m.squared_error(x, target, 5)[0] != pytest.approx(((x - target) ** 2).sum() / 5):
        raise GradientError("the loss is not the mean of the examples' sums")


def check_spread_loss() -> None:
    for margin in (0.2, 0.7, 0.9):
        check_loss(s, "spread_loss", (np.arange(7) * 3 % 10, margin), 0, 1)


def test_margin_loss_by_hand() -> None:
    """0.9 and 0.1 are free, what is short or long is squared, a wrong class weighs half; no softmax, no mean."""
    positive = np.array([[1.0, 1.0, 0.0, 0.0]])
    loss, gradient = m.margin_loss(np.array([[0.95, 0.6, 0.05, 0.5]]), positive, 1)
    assert loss == pytest.approx(0.3**2 + 0.5 * 0.4**2)
    np.testing.assert_allclose(gradient[0], [0, -2 * 0.3, 0, 0.5 * 2 * 0.4])


def test_spread_loss_by_hand() -> None:
    # Target 0.5, margin 0.3: 0.4 is 0.1 too near, -> 0.2^2; 0.1 is far enough; 0.9 is ahead by 0.4, -> 0.7^2. The
    # second image has no loss: counting its target would add 0.3^2.
    activations = np.array([[0.4, 0.5, 0.1, 0.9], [0.0, 0.0, 1.0, 0.0]])
    loss, da = s.spread_loss(activations, np.array([1, 2]), 0.3)
    assert loss == pytest.approx((0.2**2 + 0.7**2) / 2)
    np.testing.assert_allclose(da, [[0.2, -0.9, 0.0, 0.7], [0.0, 0.0, 0.0, 0.0]])


def test_cross_entropies_by_hand() -> None:
    p = 1 / (1 + math.exp(-0.7))
    for present, expected in ((1.0, -math.log(p)), (0.0, -math.log(1 - p))):
        assert m.sigmoid_cross_entropy(np.array([[0.7]]), np.array([[present]]), 1)[0] == pytest.approx(expected)
    scores = np.log([[1.0, 2.0, 5.0]])
    loss, dscores = s.softmax_cross_entropy(scores, np.array([1]))
    assert loss == pytest.approx(math.log(4))
    np.testing.assert_allclose(dscores, [[1 / 8, 2 / 8 - 1, 5 / 8]])
    for labels, of_both in (([1], math.log(4)), ([1, 2], math.log(4) - math.log(5 / 8))):
        positive = m.indicator(np.array([labels]), 3, float)
        assert affine.softmax_cross_entropy(scores, positive, 2)[0] == pytest.approx(of_both / 2)


def test_cross_entropies_far_out() -> None:
    loss, gradient = m.sigmoid_cross_entropy(np.array([[1e4, -1e4]]), np.array([[0.0, 1.0]]), 2)
    assert loss == 1e4
    np.testing.assert_array_equal(gradient, [[0.5, -0.5]])
    scores = np.zeros((2, 10), np.float32)
    scores[:, 3] = 1e4
    for loss, gradient in (
        affine.softmax_cross_entropy(scores, m.indicator(np.array([[3], [4]]), 10, np.float32), 2),
        s.softmax_cross_entropy(scores, np.array([3, 4])),
    ):
        assert loss == 5000
        np.testing.assert_array_equal(gradient[0], 0)
        np.testing.assert_allclose(gradient[1, [3, 4]], [0.5, -0.5])


# --- Dynamic routing --------------------------------------------------------------------------------------------------

J, P, I, D, B = 7, 3, 9, 5, 6
ROUTINGS = {"plain": m, "fast": dynamic_routing}


def pair_of(module: ModuleType) -> m.Pair:
    return module.routing_forward, module.routing_backward


def routing_inputs(seed: int, squash: m.Pair = m.SQUASH) -> dict[str, Any]:
    inputs = drawn(rng_of(seed), u=(B, I, P), w=(I, P, J, D))
    return inputs if squash is m.SQUASH else inputs | {"w": inputs["w"] / 3}  # else the couplings would be 0 and 1


def check_routing(routing: m.Pair, policy: str, n_iters: int, squash: m.Pair = m.SQUASH, shared: bool = False) -> None:
    inputs = routing_inputs(n_iters, squash)
    inputs["w"] = inputs["w"][:1] if shared else inputs["w"]
    of = None
    if policy == "stop":
        c = m.routing_forward(**inputs, n_iters=n_iters, squash=squash)[1].c[-1]

        def of(u: Array, w: Array) -> tuple[Array, Any]:  # the last sum, with the couplings of the forward pass
            return squash[0](np.einsum("bij,ipjd,bip->bjd", c, w, u))

    check_pair(
        lambda u, w: routing[0](u, w, n_iters, squash), lambda dv, cache: routing[1](dv, cache, policy), inputs,
        rng_of(1), of,
    )  # fmt: skip


def check_routing_all(module: ModuleType) -> None:
    check_routing(pair_of(module), "exact", 3)
    check_routing(pair_of(module), "stop", 2)


@pytest.mark.parametrize("squash", [m.SQUASH, study.IDENTITY, study.published_squash(2)])
@pytest.mark.parametrize("n_iters", [1, 2, 3, 4])
@pytest.mark.parametrize("policy", ["exact", "stop"])
@pytest.mark.parametrize("form", ROUTINGS)
def test_routing(form: str, policy: str, n_iters: int, squash: m.Pair) -> None:
    check_routing(pair_of(ROUTINGS[form]), policy, n_iters, squash)


@pytest.mark.parametrize("n_iters", [1, 2, 3, 4])
@pytest.mark.parametrize("policy", ["exact", "stop"])
def test_fast_routing_is_the_plain_one(policy: str, n_iters: int) -> None:
    results = []
    for module in ROUTINGS.values():
        v, cache = module.routing_forward(*routing_inputs(n_iters).values(), n_iters, m.SQUASH)
        results.append((v, *module.routing_backward(rng_of(1).standard_normal(v.shape), cache, policy)))
    for plain, fast in zip(*results, strict=True):
        np.testing.assert_allclose(fast, plain, rtol=0, atol=1e-10)
    with pytest.raises(IndexError):
        dynamic_routing.routing_backward(results[1][0], cache, policy)  # the votes are gone


@pytest.mark.parametrize("n_iters", [1, 2, 3])
@pytest.mark.parametrize("form", ROUTINGS)
def test_routing_is_the_loop(form: str, n_iters: int) -> None:
    u, w = routing_inputs(n_iters).values()
    v, cache = ROUTINGS[form].routing_forward(u, w, n_iters, m.SQUASH)
    expected, couplings = oracles.loop_dynamic_routing(u, w, n_iters)
    np.testing.assert_allclose(v, expected, rtol=1e-7)  # the script adds 1e-9 to |s|^2
    np.testing.assert_allclose(cache.c, couplings, rtol=1e-7)


def test_fixed_couplings() -> None:
    u, w = routing_inputs(0).values()
    for couplings in (np.full((I, J), 1 / J), study.random_couplings(I, J)):
        np.testing.assert_allclose(couplings.sum(axis=1), 1)
        for squash in (m.SQUASH, study.IDENTITY):
            check_routing(study.fixed(couplings), "exact", 2, squash)
        v, _ = study.fixed(couplings)[0](u, w, 3, m.SQUASH)
        np.testing.assert_allclose(v, m.squash_forward(np.einsum("ij,ipjd,bip->bjd", couplings, w, u))[0])
    assert couplings.std() > 0.1
    even, _ = study.fixed(np.full((I, J), 1 / J))[0](u, w, 3, m.SQUASH)
    np.testing.assert_allclose(even, m.routing_forward(u, w, 1)[0])


def test_one_transformation_for_all() -> None:
    for routing in (*map(pair_of, ROUTINGS.values()), study.fixed(study.random_couplings(I, J))):
        check_routing(study.shared(routing), "exact", 2, shared=True)


# --- EM routing of one set of children --------------------------------------------------------------------------------

LAMBDAS = [[0.8], [1.3], [1.3, 1.3], [0.4, 0.8], [0.8, 0.8, 0.8], [0.43, 0.87, 1.3], [0.04, 0.08, 0.11, 0.15]]
STARVED = 20 * s.MASS_FLOOR  # the activity of children of whose parents' mass the floor is a good part


def em_inputs(seed: int) -> dict[str, Any]:
    rng = rng_of(seed)
    return {
        "votes": rng.standard_normal((3, 5, 4, 7)),
        "a_in": rng.uniform(0.1, 0.9, (3, 5)),
        "beta_a": rng.standard_normal(4),
        "beta_v": 0.3 * rng.standard_normal(4),
    }


def plain_em(
    votes: Any, a_in: Any, beta_a: Any, beta_v: Any, lambdas: list[float], constants: Any = None
) -> tuple[Any, Any, Any]:
    mu, a, found = oracles.plain_em_routing(
        votes[:, None], a_in[:, None], beta_a, beta_v, lambdas, s.VARIANCE_FLOOR, constants=constants
    )
    return mu[:, 0], a[:, 0], found


def check_m_step(activity: float = 1.0) -> None:
    em = em_inputs(9)
    inputs = {"r": rng_of(9).uniform(0.1, 0.9, (3, 5, 4)), **em}
    names = [name for name in inputs if activity == 1 or not name.startswith("beta")]  # of no mass no cost

    def forward(**changed: Array) -> tuple[Array, Array, Array, Any]:
        r, votes, a_in, beta_a, beta_v = (inputs | changed).values()
        mu, sigma_sq, a, log_a, cache = s.m_step_forward(r, activity * a_in, votes, beta_a, beta_v, 1.3, 0.7)
        np.testing.assert_allclose(a, np.exp(log_a), rtol=1e-12)
        return mu, sigma_sq, log_a, cache

    def backward(dmu: Array, dsigma_sq: Array, dlog_a: Array, cache: Any) -> Params:
        dr, dvotes, da_in, *dbetas = s.m_step_backward(dmu, dsigma_sq, dlog_a, cache, "exact")
        grads = dict(zip(inputs, (dr, dvotes, activity * da_in, *dbetas), strict=True))
        return {name: grads[name] for name in names}

    check_pair(forward, backward, {name: inputs[name] for name in names}, rng_of(9))


def check_e_step() -> None:
    inputs = drawn(rng_of(10), mu=(3, 4, 7), sigma_sq=(3, 4, 7), log_a=(3, 4), votes=(3, 5, 4, 7))
    inputs["sigma_sq"] = 0.7 + np.abs(inputs["sigma_sq"])
    check_pair(s.e_step_forward, s.e_step_backward, inputs, rng_of(11))


def check_em(policy: str, lambdas: list[float]) -> None:
    inputs = em_inputs(len(lambdas))
    constants = plain_em(**inputs, lambdas=lambdas)[2]
    check_pair(
        lambda **x: s.em_routing_forward(**x, lambdas=lambdas),
        lambda dmu, da, cache: s.em_routing_backward(dmu, da, cache, policy), inputs, rng_of(len(lambdas)),
        None if policy == "exact" else lambda **x: plain_em(**x, lambdas=lambdas, constants=constants),
    )  # fmt: skip


def check_em_all() -> None:
    check_em("exact", [0.7, 1.3, 1.0])
    check_em("stop", [0.7, 1.3])


def check_m_steps() -> None:
    check_m_step()
    check_m_step(STARVED)
    check_em("stop", [0.7, 1.3])


@pytest.mark.parametrize("lambdas", LAMBDAS)
@pytest.mark.parametrize("policy", ["exact", "stop"])
def test_em_routing(policy: str, lambdas: list[float]) -> None:
    check_em(policy, lambdas)


@pytest.mark.parametrize("lambdas", LAMBDAS)
def test_em_routing_is_the_loop(lambdas: list[float]) -> None:
    inputs = em_inputs(len(lambdas))
    votes, a_in, beta_a, beta_v = inputs.values()
    mu, a, ((*_, m_step), _) = s.em_routing_forward(**inputs, lambdas=lambdas)
    plain_mu, plain_a, (plain_r, _, _) = plain_em(**inputs, lambdas=lambdas)
    for n in range(len(mu)):
        pairs = {((j,), (i,)): votes[n, i, j] for i, j in np.ndindex(votes.shape[1:3])}
        loop_mu, loop_a, loop_r = oracles.loop_em_routing(pairs, a_in[n], beta_a, beta_v, lambdas, s.VARIANCE_FLOOR)
        for j in range(4):
            np.testing.assert_allclose([mu[n, j], plain_mu[n, j]], [loop_mu[j,]] * 2, rtol=1e-9, atol=1e-11)
            np.testing.assert_allclose([a[n, j], plain_a[n, j]], loop_a[j,], rtol=1e-9)
            for i in range(5):
                np.testing.assert_allclose([m_step.r[n, i, j], plain_r[n, 0, i, j]], loop_r[(j,), (i,)], rtol=1e-9)


# --- EM routing over receptive fields ---------------------------------------------------------------------------------

FIELD_FORMS: dict[str, Any] = {"plain": conv, "fast": field_em}
FIELD_CASES = [  # B, H, W, I, J, K, P, stride
    (3, 7, 6, 2, 3, 3, 3, 1),
    (2, 8, 7, 3, 2, 3, 2, 2),  # the last row lies in no field
    (2, 7, 8, 1, 2, 2, 2, 3),  # fields with gaps between them
    (2, 4, 4, 3, 5, 4, 2, 1),  # one field, as for the class capsules
]
FLOOR = 0.7


def field_inputs(case: tuple[int, ...]) -> dict[str, Any]:
    n, height, width, n_in, n_out, k, p, _ = case
    rng = np.random.default_rng(case)
    return {
        "pose": rng.standard_normal((n, height, width, n_in, p, p)),
        "a_in": rng.uniform(0.1, 0.9, (n, height, width, n_in)),
        "w": rng.standard_normal((k, k, n_in, n_out, p, p)),
        "beta_a": rng.standard_normal(n_out),
        "beta_v": 0.3 * rng.standard_normal(n_out) - 0.3,
    }


def field_options(case: tuple[int, ...], n_iters: int = 3) -> dict[str, Any]:
    k, p, stride = case[5:]
    offset = np.random.default_rng(1).standard_normal((k, k, p, p))
    return {"n_iters": n_iters, "variance_floor": FLOOR, "k": k, "stride": stride, "offset": offset}


def check_fields(form: Any, case: tuple[int, ...], n_iters: int = 3, policy: str = "exact") -> None:
    inputs, how = field_inputs(case), field_options(case, n_iters)
    constants = oracles.plain_field_routing(**inputs, **how)[2]
    check_pair(
        lambda **x: form.field_routing_forward(**x, **how),
        lambda dmu, da, cache: form.field_routing_backward(dmu, da, cache, policy), inputs, rng_of(2),
        None if policy == "exact" else lambda **x: oracles.plain_field_routing(**x, **how, constants=constants),
    )  # fmt: skip


def check_starved_fields(form: Any) -> None:
    """Almost inactive children: the floor under a parent's mass is a good part of it, and the gradient knows it."""
    inputs, how = field_inputs(FIELD_CASES[1]), field_options(FIELD_CASES[1], 2)

    def forward(pose: Array, a_in: Array) -> tuple[Array, Any]:
        mu, a, cache = form.field_routing_forward(**inputs | {"pose": pose, "a_in": 2 * STARVED * a_in}, **how)
        return mu, (np.zeros_like(a), cache)

    def backward(dmu: Array, rest: Any) -> tuple[Array, Array]:
        dpose, da_in, *_ = form.field_routing_backward(dmu, *rest, "exact")
        return dpose, 2 * STARVED * da_in

    check_pair(forward, backward, {name: inputs[name] for name in ("pose", "a_in")}, rng_of(8))


def check_shared_w(form: Any) -> None:
    """One w for all positions of a field is the same as its copies, and its gradient the sum of theirs."""
    case = FIELD_CASES[3]
    inputs, how, rng = field_inputs(case), field_options(case), rng_of(4)
    inputs["w"] = inputs["w"][:1, :1]
    copies = {**inputs, "w": np.broadcast_to(inputs["w"], (case[5], case[5], *inputs["w"].shape[2:]))}
    one, many = (form.field_routing_forward(**x, **how) for x in (inputs, copies))
    dmu, da = rng.standard_normal(one[0].shape), rng.standard_normal(one[1].shape)
    grads, expected = (list(form.field_routing_backward(dmu, da, x[2], "exact")) for x in (one, many))
    expected[2] = expected[2].sum(axis=(0, 1), keepdims=True)
    for x, y in zip([*one[:2], *grads], [*many[:2], *expected], strict=True):
        if x.shape != y.shape or np.abs(x - y).max() > 1e-11 * np.abs(y).max():
            raise GradientError("one w for all positions has another gradient than the sum of its copies'")


def check_fields_all(form: Any) -> None:
    check_fields(form, FIELD_CASES[1])
    check_fields(form, FIELD_CASES[1], 2, "stop")
    check_starved_fields(form)
    check_shared_w(form)


@pytest.mark.parametrize("form", FIELD_FORMS)
@pytest.mark.parametrize("policy", ["exact", "stop"])
@pytest.mark.parametrize("n_iters", [1, 2, 3])
@pytest.mark.parametrize("case", FIELD_CASES)
def test_field_routing(case: tuple[int, ...], n_iters: int, policy: str, form: str) -> None:
    check_fields(FIELD_FORMS[form], case, n_iters, policy)


@pytest.mark.parametrize("form", FIELD_FORMS)
@pytest.mark.parametrize("case", FIELD_CASES)
def test_field_routing_is_the_loop(case: tuple[int, ...], form: str) -> None:
    inputs, how = field_inputs(case), field_options(case)
    mu, a, _ = FIELD_FORMS[form].field_routing_forward(**inputs, **how)
    r = conv.field_routing_forward(**inputs, **how)[2].em.m_steps[-1].r  # (L, M, J)
    r = r.reshape(*mu.shape[:3], how["k"], how["k"], -1, mu.shape[3])
    for e in range(len(mu)):
        one = inputs | {"pose": inputs["pose"][e], "a_in": inputs["a_in"][e]}
        loop_mu, loop_a, loop_r = oracles.loop_field_routing(**one, **how)
        for q, expected in loop_mu.items():
            np.testing.assert_allclose(mu[e][q].ravel(), expected, rtol=1e-9, atol=1e-11)
            assert a[e][q] == pytest.approx(loop_a[q], rel=1e-9)
        for ((y, x, j), (row, column, i)), value in loop_r.items():
            dy, dx = row - how["stride"] * y, column - how["stride"] * x
            assert r[e, y, x, dy, dx, i, j] == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("policy", ["exact", "stop"])
@pytest.mark.parametrize("n_iters", [1, 2, 3, 5])
@pytest.mark.parametrize("activity", [1.0, 2 * STARVED])
@pytest.mark.parametrize("case", FIELD_CASES)
def test_the_fast_field_routing_is_the_plain_one(
    case: tuple[int, ...], activity: float, n_iters: int, policy: str
) -> None:
    inputs, how, results = field_inputs(case), field_options(case, n_iters), []
    inputs["a_in"] *= activity
    if case[1] == case[5]:
        inputs["w"] = inputs["w"][:1, :1]
    for form in FIELD_FORMS.values():
        mu, a, cache = form.field_routing_forward(**inputs, **how)
        grads = form.field_routing_backward(np.cos(mu), np.sin(1 + a), cache, policy)
        results.append({"mu": mu, "a": a, **dict(zip(inputs, grads, strict=True))})
    assert_same(*results)


# --- Whole networks of views and of convolutional capsules: parameters and images -------------------------------------


class Network(NamedTuple):
    model: Any
    x: Array
    plain: Any = None  # of autograd: parameters, images, constants -> scores, constants


# Such that neither votes nor activations saturate
TAME: dict[Any, dict[str, Any]] = {
    s: {"beta_v_init": -0.5 * math.log(s.VARIANCE_FLOOR)},
    conv: {"sizes": (5, 3, 2, 4), "variance_floor": FLOOR, "beta_v_init": 0.0},
}
PLAIN_CAPSULES = {s: oracles.plain_capsules, conv: oracles.plain_conv_capsules}


def network_of(script: Any, name: str = "capsules", **changes: Any) -> Network:
    config = script.Config(dtype="float64", **{"dataset": "voxels", **TAME[script], **changes})
    plain = PLAIN_CAPSULES[script] if name == "capsules" else oracles.plain_cnn
    return Network(
        script.make_models(config)[name], rng_of(5).random((2, s.IMAGE_SIZE, s.IMAGE_SIZE, config.in_channels)),
        functools.partial(plain, config=config),
    )  # fmt: skip


def perturbed(model: Any) -> Params:
    """Parameters none of which is zero."""
    rng = rng_of(4)
    params = model.init_params(rng)
    return {key: p + (0.02 + 0.5 * p.std()) * rng.standard_normal(p.shape) for key, p in params.items()}


def check_network(network: Network, stop: bool = False) -> None:
    """With "stop" it has the constants of the plain network."""
    model, x, plain = network
    params = perturbed(model)

    def backward(dscores: Array, cache: Any) -> Params:
        grads, dx = model.backward(dscores, cache, need_dx=True)
        return {**grads, "x": dx}

    def of(x: Array, **params: Array) -> Any:
        return plain(params, x, constants=constants)

    constants = plain(params, x)[1] if stop else None
    check_pair(
        lambda x, **params: model.forward(params, x), backward, {**params, "x": x}, rng_of(6), of if stop else None,
        n_directions=1, step=1e-6,  # a larger step would take some of the ReLUs over their kink
    )  # fmt: skip
    scores, cache = model.forward(params, x)
    if model.backward(scores, cache)[1] is not None:
        raise GradientError("a gradient of the images that nobody asked for")


def check_capsules(script: Any) -> None:
    for loss in ("cross-entropy", "spread"):
        check_network(network_of(script, loss=loss))


def check_paper_cnn() -> None:
    """With an odd side, whose last row and column the pooling drops, and with and without dropout."""
    config = SimpleNamespace(image_size=13, n_classes=3, in_channels=2, dtype="float64")
    for dropout in (None, 2.0 * rng_of(8).integers(0, 2, (2, conv.N_HIDDEN))):
        model = conv.make_models(conv.Config(cnn="paper"))["cnn"]._replace(
            init_params=lambda rng: m.cnn_init(rng, config, conv.PAPER_CNN),
            forward=lambda params, x, dropout=dropout: m.cnn_forward(params, x, conv.PAPER_CNN, dropout),
        )
        check_network(Network(model, rng_of(9).standard_normal((2, 13, 13, 2))))


def check_cnns() -> None:
    check_cnn()
    check_network(network_of(conv, "cnn"))
    check_paper_cnn()


@pytest.mark.parametrize("dataset", ["voxels", "smallnorb"])
@pytest.mark.parametrize("em_grad", ["exact", "stop"])
@pytest.mark.parametrize("loss", ["cross-entropy", "spread"])
@pytest.mark.parametrize("script", [s, conv], ids=lambda script: script.EXPERIMENT)
def test_capsules(script: Any, loss: str, em_grad: str, dataset: str) -> None:
    check_network(network_of(script, loss=loss, em_grad=em_grad, dataset=dataset), em_grad == "stop")


@pytest.mark.parametrize("dataset", ["voxels", "smallnorb"])
@pytest.mark.parametrize(("script", "name"), [(s, "cnn"), (s, "cnn_matched"), (conv, "cnn")])
def test_cnn(script: Any, name: str, dataset: str) -> None:
    check_network(network_of(script, name, dataset=dataset))


@pytest.mark.parametrize(
    "parts", [{}, {"assignments": "even"}, {"vote_bias": "learned"}, {"assignments": "even", "vote_bias": "learned"}]
)
def test_capsules_of_other_parts(parts: dict[str, str]) -> None:
    """With cross-entropy: activations alone do not depend on the bias of the votes for the classes."""
    config = conv.Config(
        dataset="shapes", sizes=(3, 2, 2, 2), variance_floor=FLOOR, dtype="float64", standardize="image",
        loss="cross-entropy",
    )  # fmt: skip
    model = study.matrix_capsules(config, **parts)
    assert sum(name.endswith(".bias") for name in perturbed(model)) == (3 if "vote_bias" in parts else 0)
    check_network(Network(model, rng_of(5).standard_normal((2, 32, 32, 1))))


@pytest.mark.parametrize("policy", ["exact", "stop"])
@pytest.mark.parametrize("loss", ["spread", "cross-entropy"])
@pytest.mark.parametrize("sizes", [(5, 3, 2, 4), (3, 1, 4, 2)])
def test_capsules_in_their_plain_form_are_the_fast_ones(sizes: tuple[int, ...], loss: str, policy: str) -> None:
    results = []
    for plain in (True, False):
        model, x, _ = network_of(conv, sizes=sizes, loss=loss, em_grad=policy, plain=plain)
        scores, cache = model.forward(perturbed(model), x)
        assert isinstance(cache.routing, conv.FieldRoutingCache) == plain
        grads, dx = model.backward(rng_of(0).standard_normal(scores.shape), cache, need_dx=True)
        results.append({**grads, "scores": scores, "x": dx})
    assert_same(*results)


@pytest.mark.parametrize(
    ("script", "name", "changes"),
    [(s, "capsules", {"loss": "cross-entropy", "em_iters": 3}), (s, "capsules", {"loss": "spread", "em_iters": 3}),
     (s, "cnn", {}), (conv, "capsules", {"loss": "cross-entropy", "em_iters": 3})],
)  # fmt: skip
def test_all_gradients_are_those_of_autograd(script: Any, name: str, changes: dict[str, Any]) -> None:
    """The oracle is not ours: autograd on a plain statement of the network, three EM iterations and all."""
    model, x, plain = network_of(script, name, **changes)
    params = perturbed(model)
    scores, cache = model.forward(params, x)
    dscores = rng_of(7).standard_normal(scores.shape)
    grads, dx = model.backward(dscores, cache, need_dx=True)
    value, expected = value_and_grad(lambda p: anp.sum(dscores * plain(p, p["x"])[0]))({**params, "x": x})
    assert float((dscores * scores).sum()) == pytest.approx(value, rel=1e-9)
    for key, gradient in {**grads, "x": dx}.items():
        largest = np.abs(expected[key]).max()
        assert largest > 1e-9
        np.testing.assert_allclose(gradient, expected[key], rtol=1e-7, atol=1e-8 * largest, err_msg=key)


# --- Whole networks of digits: parameters -----------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "conv_channels": 3,
    "primary_types": 2,
    "decoder": (7, 11),
    "recon_weight": 0.1,
    "dtype": "float64",
}
POOLED = m.CNN(
    (m.ConvLayer(5, 3, pool=m.MAX_POOL), m.ConvLayer(3, 4, stride=2), m.ConvLayer(2, 2, pool=m.MAX_POOL)), {"hidden": 7}
)
TRUNK = m.CNN((m.ConvLayer(9, 3), m.ConvLayer(5, 4, stride=2)), {"hidden": 6})
NAMES = {"assignments", "transform", "activation", "loss"}  # of the parts of a CapsNet; other changes are settings


def random_batch(side: int, n: int = 5, n_labels: int = 2) -> m.Batch:
    rng = rng_of(n)
    return m.Batch(rng.random((n, side, side)), some_labels(n, n_labels), rng.random((n, n_labels, side, side)))


def of_all_lengths(model: m.Model) -> Params:
    """Biases are not zero, and digit capsules are of all lengths."""
    rng = rng_of(4)
    return {key: p + 0.1 * rng.standard_normal(p.shape) for key, p in model.init_params(rng).items()}


def capsnet_of(changes: dict[str, Any]) -> tuple[m.Config, dict[str, str], m.Model]:
    names = {key: value for key, value in changes.items() if key in NAMES}
    config = m.Config(**{"image_size": 20, **TINY} | {k: v for k, v in changes.items() if k not in NAMES})
    return config, names, study.make_model(config, **names)


def check_digits(model: m.Model, batch: m.Batch) -> None:
    params = of_all_lengths(model)

    def loss(**params: Array) -> float:
        return model.loss_and_grads(params, batch, 6)[0]["train_loss"]

    check_gradient(loss, params, model.loss_and_grads(params, batch, 6)[1], rng_of(2), n_directions=1, step=1e-6)


def check_capsnet(n_labels: int = 2, **changes: Any) -> None:
    check_digits(capsnet_of(changes)[2], random_batch(20, n_labels=n_labels))


def check_cnn(net: m.CNN = POOLED) -> None:
    config = m.Config(image_size=20, **TINY)
    model = m.capsnet_model(config)._replace(
        init_params=lambda rng: m.cnn_init(rng, config, net),
        loss_and_grads=lambda params, batch, n: m.cnn_loss_and_grads(params, batch, n, net),
    )
    check_digits(model, random_batch(20))


def check_affine(name: str = "lenet", side: int = 28, plain: bool = False) -> None:
    config = affine.Config(**TINY | {"conv_channels": 2, "primary_types": 1}, canvas=side, plain=plain)
    check_digits(affine.make_models(config)[name], random_batch(side, 3, 1))


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
def test_cnn_of_digits(net: m.CNN) -> None:
    check_cnn(net)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("side", [28, 27])
@pytest.mark.parametrize("name", affine.MODEL_NAMES)
def test_networks_of_turned_digits(name: str, side: int, plain: bool) -> None:
    check_affine(name, side, plain)


@pytest.mark.parametrize(("script", "name"), [(script, name) for script in (m, affine) for name in script.MODEL_NAMES])
def test_a_network_of_digits_in_its_plain_form_is_the_fast_one(script: Any, name: str) -> None:
    results, batch = [], random_batch(28, n_labels=1)
    for plain in (True, False):
        size = {"image_size": 28} if script is m else {}
        model = script.make_models(script.Config(**TINY, **size, plain=plain))[name]
        params = of_all_lengths(model)
        losses, grads = model.loss_and_grads(params, batch, 5)
        scores, error = model.assess(params, batch)
        results.append({**grads, "loss": np.array(losses["train_loss"]), "scores": scores, "error": np.array(error)})
    assert_same(*results)


@pytest.mark.parametrize(
    "changes",
    [
        {"routing_grad": "exact"},
        {"routing_grad": "stop"},
        {"transform": "shared", "assignments": "even"},
        {"loss": "cross-entropy"},
        {"activation": "relu", "routing_iters": 2},
        {"activation": "published"},
        {"assignments": "even", "activation": "relu", "loss": "cross-entropy", "recon_weight": 0.0},
    ],
)
def test_loss_and_gradients_are_those_of_autograd(changes: dict[str, Any]) -> None:
    config, names, model = capsnet_of(changes)
    params, batch = of_all_lengths(model), random_batch(20, 4)
    losses, grads = model.loss_and_grads(params, batch, 4)
    oracle = value_and_grad(lambda p: oracles.plain_capsnet_loss(p, batch, config, names, 4))
    expected, reference = oracle(params)
    assert losses["train_loss"] == pytest.approx(float(expected), rel=1e-12)
    for name in params:
        np.testing.assert_allclose(grads[name], reference[name], rtol=1e-8, atol=1e-12, err_msg=name)


# --- The check of every backward pass, and the backward passes broken on purpose --------------------------------------

CHECKS: dict[tuple[ModuleType, str], Check] = {
    **{(form, "conv2d_backward"): functools.partial(check_conv, form) for form in CONVS},
    (spectral_conv, "transforms"): check_transforms,
    **{(script, "linear_backward"): layer(script, "linear", x=(5, 3), w=(3, 7), b=(7,)) for script in PLAIN_CONVS},
    **{(script, f"{name}_backward"): layer(script, name, x=(2, 7, 5))
       for script, name in itertools.product(PLAIN_CONVS, ("relu", "sigmoid"))},
    (m, "squash_backward"): layer(m, "squash", s=(2, 7, 5)),
    (m, "max_pool_backward"): check_max_pool,
    (affine, "avg_pool_backward"): functools.partial(check_pool, affine, "avg_pool"),
    (m, "softmax_backward"): check_softmax,
    (m, "mask_backward"): check_mask,
    (s, "votes_backward"): layer(s, "votes", pose=(2, 7, 3, 3), w=(7, 5, 3, 3)),
    (s, "class_scores_backward"): check_class_scores,
    (m, "margin_loss"): functools.partial(check_loss, m, "margin_loss", (POSITIVE, 9), 0, 1),
    (m, "squared_error"): check_squared_error,
    (m, "sigmoid_cross_entropy"): functools.partial(check_loss, m, "sigmoid_cross_entropy", (POSITIVE, 9)),
    (affine, "softmax_cross_entropy"): functools.partial(check_loss, affine, "softmax_cross_entropy", (POSITIVE, 9)),
    (s, "softmax_cross_entropy"): functools.partial(check_loss, s, "softmax_cross_entropy", (np.arange(7),)),
    (s, "spread_loss"): check_spread_loss,
    **{(module, "routing_backward"): functools.partial(check_routing_all, module) for module in ROUTINGS.values()},
    (dynamic_routing, "route_backward"): functools.partial(check_routing_all, dynamic_routing),
    (s, "m_step_backward"): check_m_steps,
    (s, "e_step_backward"): check_e_step,
    (s, "em_routing_backward"): check_em_all,
    **{(form, "field_routing_backward"): functools.partial(check_fields_all, form) for form in FIELD_FORMS.values()},
    **{(field_em, f"{name}_backward"): functools.partial(check_fields_all, field_em)
       for name in ("votes", "m_step", "e_step", "kronecker")},
    **{(form, "scatter"): functools.partial(check_field_layers, form) for form in FIELD_FORMS.values()},
    (s, "capsules_backward"): functools.partial(check_capsules, s),
    (s, "cnn_backward"): lambda: check_network(network_of(s, "cnn")),
    (conv, "conv_capsnet_backward"): functools.partial(check_capsules, conv),
    (m, "decoder_backward"): check_capsnet,
    (m, "capsnet_backward"): check_capsnet,
    (m, "capsnet_loss_and_grads"): check_capsnet,
    (m, "cnn_backward"): check_cnns,
    (m, "cnn_loss_and_grads"): check_cnn,
}  # fmt: skip
HARMLESS = (
    "shifted = scores",  # any shift gives the same softmax
    '"train_recon_loss":', "train_{parts.loss",  # reported, not differentiated
    "excess = ",  # another loss, with its own right gradient: see test_margin_loss_by_hand
    "return np.zeros_like(mu), dscores",  # zeros with another factor
)  # fmt: skip
# Without arithmetic of their own; the gradients that they hand on are made wrong by a tenth.
NO_ARITHMETIC = {
    "max_pool_backward", "avg_pool_backward", "kronecker_backward", "scatter", "decoder_backward", "capsnet_backward",
    "cnn_backward", "cnn_loss_and_grads",
}  # fmt: skip


def label(key: tuple[ModuleType, str]) -> str:
    return f"{key[0].__name__.split('.')[-1]}.{key[1]}"


def test_every_backward_has_a_check() -> None:
    for module in {module for module, _ in CHECKS}:
        here = {name for name, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__}
        backwards = {name for name in here if name.endswith(("_backward", "_loss_and_grads"))}
        assert backwards <= {name for of, name in CHECKS if of is module}, module


@pytest.mark.parametrize("key", CHECKS, ids=label)
def test_gradient(key: tuple[ModuleType, str]) -> None:
    CHECKS[key]()


@pytest.mark.parametrize("key", [key for key in CHECKS if key[1] not in NO_ARITHMETIC], ids=label)
def test_a_broken_backward_is_seen(key: tuple[ModuleType, str], monkeypatch: pytest.MonkeyPatch) -> None:
    survivors = surviving_mutants(monkeypatch, *key, CHECKS[key])
    assert [found for found in survivors if not any(line in found for line in HARMLESS)] == []


@pytest.mark.parametrize("name", ["votes_backward", "m_step_backward", "e_step_backward"])
def test_a_broken_step_is_seen_in_the_plain_field_routing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    votes = s.votes_forward, lambda *args: s.votes_backward(*args)  # which the script has imported
    monkeypatch.setattr(conv, "field_routing_forward", functools.partial(conv.field_routing_forward, vote=votes))
    assert surviving_mutants(monkeypatch, s, name, lambda: check_fields_all(conv)) == []


def scaled(gradients: Any) -> Any:
    """The same, all wrong by a tenth."""
    if isinstance(gradients, dict):
        return {key: 0.9 * value for key, value in gradients.items()}
    if isinstance(gradients, tuple):
        return tuple(map(scaled, gradients))
    return None if gradients is None else 0.9 * gradients


@pytest.mark.parametrize("key", [key for key in CHECKS if key[1] in NO_ARITHMETIC and "loss" not in key[1]], ids=label)
def test_a_wrong_result_is_seen(key: tuple[ModuleType, str], monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(*key)
    monkeypatch.setattr(*key, lambda *args, **options: scaled(original(*args, **options)))
    with pytest.raises(GradientError):
        CHECKS[key]()
