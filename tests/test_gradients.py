"""Every network and every routing against an automatic differentiation of its plain statement (oracles.py), single
layers against differences along random directions, and both against broken copies of every backward pass.

Float64, unequal and odd sizes. What a script reports, losses and scores, is compared too.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import grad

import multimnist_capsnet as multimnist
import oracles
import smallnorb_novel_viewpoint as smallnorb
from fast import dynamic_routing, field_em, spectral_conv
from helpers import Array, GradientError, Patch, check_gradient, surviving_mutants
from more import conv_matrix_capsules as conv, mnist_affine_capsnet as affine, what_routing_does as study

Params = dict[str, Array]


def rng_of(*seed: int) -> np.random.Generator:
    return np.random.default_rng([*seed, 7])


def drawn(rng: np.random.Generator, **shapes: tuple[int, ...]) -> dict[str, Any]:
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


class Case(NamedTuple):
    """A network or a layer, and the same once more as autograd takes it."""

    params: Params  # and inputs
    ours: Callable[[Params], dict[str, Any]]  # their gradients, and results by other names
    plain: Callable[[Any], tuple[Any, dict[str, Any]]]  # the number whose gradients these are, and the results


# --- Convolutions -----------------------------------------------------------------------------------------------------

CONV_CASES = [  # stride, padding, kernel, rows, columns, channels in
    (1, 0, 3, 7, 9, 2), (2, 0, 3, 9, 8, 2), (2, 1, 4, 11, 10, 1), (3, 0, 5, 13, 12, 3), (3, 2, 2, 11, 9, 2),
    (1, 0, 3, 3, 3, 2), (2, 0, 9, 9, 10, 1), (1, 0, 1, 2, 2, 2), (2, 0, 1, 5, 9, 3), (3, 3, 4, 6, 5, 2),
    (1, 0, 5, 13, 17, 1), (2, 0, 9, 28, 28, 3), (3, 1, 5, 17, 16, 1),
]


def conv_case(form: Any, case: tuple[int, ...]) -> Case:
    stride, pad, K, H, W, C = case
    params = drawn(rng_of(*case), x=(5, H, W, C), w=(K, K, C, 4), b=(4,))
    dout = rng_of(2).standard_normal(form.conv2d_forward(**params, stride=stride, pad=pad)[0].shape)

    def ours(p: Params) -> dict[str, Any]:
        out, cache = form.conv2d_forward(**p, stride=stride, pad=pad)
        dx, *grads = form.conv2d_backward(dout, cache)
        np.testing.assert_equal(form.conv2d_backward(dout, cache, need_dx=False), (None, *grads))
        return dict(zip(p, (dx, *grads), strict=True)) | {"out": out}

    def plain(p: Any) -> tuple[Any, dict[str, Any]]:
        out = oracles.plain_conv(p["x"], p["w"], p["b"], stride, pad)
        return anp.sum(dout * out), {"out": out}

    return Case(params, ours, plain)


# --- EM routing of one set of children, and over receptive fields -----------------------------------------------------

STARVED = 20 * smallnorb.MASS_FLOOR  # the activity of children of whose parents' mass the floor is a good part
FIELD_FORMS: dict[str, Any] = {"plain": conv, "fast": field_em}
FIELD_CASES = [  # B, H, W, I, J, K, P, stride
    (3, 7, 6, 2, 3, 3, 3, 1),
    (2, 8, 7, 3, 2, 3, 2, 2),  # the last row lies in no field
    (2, 7, 8, 1, 2, 2, 2, 3),  # fields with gaps between them
    (2, 4, 4, 3, 5, 4, 2, 1),  # one field, as for the class capsules
]
FLOOR = 0.7


def routing_case(forward: Any, backward: Any, plain: Any, params: Params, policy: str) -> Case:
    """Of ``plain(**params, constants=None) -> mu, a, constants``. With "stop" the last M-step has these constants."""
    mu, a, constants = plain(**params)
    dmu, da = rng_of(1).standard_normal(mu.shape), rng_of(2).standard_normal(a.shape)

    def ours(p: Params) -> dict[str, Any]:
        mu, a, cache = forward(**p)
        grads = backward(dmu, da, cache, policy)
        return dict(zip(p, grads, strict=True)) | {"mu": mu, "out": a}

    def stated(p: Any) -> tuple[Any, dict[str, Any]]:
        mu, a, _ = plain(**p, constants=constants if policy == "stop" else None)
        return anp.sum(dmu * mu) + anp.sum(da * a), {"mu": mu, "out": a}

    return Case(params, ours, stated)


def em_case(policy: str, lambdas: list[float], activity: float = 1.0) -> Case:
    rng = rng_of(len(lambdas))
    params = drawn(rng, votes=(3, 5, 4, 7), a_in=(3, 5), beta_a=(4,), beta_v=(4,))
    params |= {"a_in": activity * rng.uniform(0.1, 0.9, (3, 5)), "beta_v": 0.3 * params["beta_v"]}

    def plain(votes: Any, a_in: Any, beta_a: Any, beta_v: Any, constants: Any = None) -> tuple[Any, Any, Any]:
        votes, a_in = votes[:, None], a_in[:, None]
        mu, a, found = oracles.plain_em_routing(votes, a_in, beta_a, beta_v, lambdas, FLOOR, constants=constants)
        return mu[:, 0], a[:, 0], found

    forward = functools.partial(smallnorb.em_routing_forward, lambdas=lambdas, variance_floor=FLOOR)
    return routing_case(forward, smallnorb.em_routing_backward, plain, params, policy)


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


def field_case(form: str, policy: str, case: tuple[int, ...], n_iters: int = 3, activity: float = 1.0) -> Case:
    params, module, (k, p, stride) = field_inputs(case), FIELD_FORMS[form], case[5:]
    how: dict[str, Any] = {"k": k, "stride": stride, "offset": np.random.default_rng(1).standard_normal((k, k, p, p))}
    how |= {"lambdas": [0.4, 0.7, 1.0][-n_iters:], "variance_floor": FLOOR}
    params["a_in"] *= activity
    if case[1] == case[5]:  # one w for all positions, as for the class capsules
        params["w"] = params["w"][:1, :1]
    forward, plain = (functools.partial(f, **how) for f in (module.field_routing_forward, oracles.plain_field_routing))
    return routing_case(forward, module.field_routing_backward, plain, params, policy)


# --- Networks of views and of convolutional capsules ------------------------------------------------------------------


TAME: dict[Any, dict[str, Any]] = {  # such that neither votes nor activations saturate
    smallnorb: {"beta_v_init": -0.5 * math.log(smallnorb.VARIANCE_FLOOR), "em_iters": 3},
    conv: {"sizes": (5, 3, 2, 4), "variance_floor": FLOOR, "beta_v_init": 0.0},
}
PLAIN_CAPSULES = {smallnorb: oracles.plain_capsules, conv: oracles.plain_conv_capsules}
CONVS = {smallnorb: [(2, 2)], conv: [(2, 2), (2, 0), (1, 0)]}  # of the CNNs


def perturbed(model: Any) -> Params:
    """Parameters none of which is zero."""
    rng = rng_of(4)
    params = model.init_params(rng)
    return {key: p + (0.02 + 0.5 * p.std()) * rng.standard_normal(p.shape) for key, p in params.items()}


def compared(model: Any, x: Array, plain: Any, loss: str = "cross-entropy", stop: bool = False) -> Case:
    """``plain(params, images, constants) -> scores, constants``."""
    params, labels = perturbed(model) | {"x": x}, np.array([3, 0])
    constants = plain(params, x, constants=None)[1] if stop else None

    def ours(p: Params) -> dict[str, Any]:
        scores, cache = model.forward(p, p["x"])
        found, dscores = model.loss(scores, labels, 0.25)
        assert model.backward(dscores, cache)[1] is None  # and it can be called again
        grads, dx = model.backward(dscores, cache, need_dx=True)
        return {**grads, "x": dx, "scores": scores, "loss": found}

    def stated(p: Any) -> tuple[Any, dict[str, Any]]:
        scores, _ = plain(p, p["x"], constants=constants)
        found = oracles.plain_loss(scores, labels[:, None], loss, len(labels))
        return found, {"scores": scores, "loss": found}

    return Case(params, ours, stated)


def view_case(
    script: Any, name: str = "capsules", loss: str = "cross-entropy", em_grad: str = "exact", parts: Any = None,
    **changes: Any,
) -> Case:
    """``parts``: of what_routing_does."""
    changes = {"dataset": "voxels", "loss": loss, "em_grad": em_grad, **TAME[script], **changes}
    config = script.Config(dtype="float64", **changes)
    x = rng_of(5).random((2, smallnorb.IMAGE_SIZE, smallnorb.IMAGE_SIZE, config.in_channels))
    model, of_cnn = script.make_models(config)[name], functools.partial(oracles.plain_cnn, convs=CONVS[script])
    if name != "capsules":
        return compared(model, x, lambda p, x, constants: (of_cnn(p, x), None))
    model = study.matrix_capsules(config, **parts) if parts else model
    config = script.Config(**vars(config) | {"em_iters": 1}) if (parts or {}).get("assignments") == "even" else config
    return compared(model, x, functools.partial(PLAIN_CAPSULES[script], config=config), loss, em_grad == "stop")


def paper_cnn_case(dropout: bool) -> Case:
    """With an odd side, whose last row and column the pooling drops."""
    factors = 2.0 * rng_of(8).integers(0, 2, (2, conv.N_HIDDEN)) if dropout else None
    model = conv.make_models(conv.Config(cnn="paper", image_size=13, in_channels=2, dtype="float64"))["cnn"]
    forward = model.forward
    model = model._replace(forward=lambda params, x: forward(params, x, dropout=factors))

    def plain(p: Any, x: Any, constants: Any) -> tuple[Any, None]:
        return oracles.plain_cnn(p, x, [(1, 2, anp.max)] * 2, factors if dropout else 1.0), None

    return compared(model, rng_of(9).standard_normal((2, 13, 13, 2)), plain)


# --- Networks of digits -----------------------------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "conv_channels": 3, "primary_types": 2, "decoder": (7, 11), "recon_weight": 0.1, "dtype": "float64",
}
NAMES = {"assignments", "transform", "activation", "loss"}  # of the parts of a CapsNet; other changes are settings


def digits_case(model: multimnist.Network, side: int, n_labels: int, plain: Any) -> Case:
    """``plain(params, batch, n) -> loss, results``. Five of the six images that the mean is over."""
    rng = rng_of(3)
    # Biases are not zero, and digit capsules are of all lengths
    params = {key: p + 0.1 * rng.standard_normal(p.shape) for key, p in model.init_params(rng).items()}
    labels = np.stack([rng.permutation(10)[:n_labels] for _ in range(5)])
    batch = multimnist.Batch(rng.random((5, side, side)), labels, rng.random((5, n_labels, side, side)))

    def ours(p: Params) -> dict[str, Any]:
        losses, grads = model.loss_and_grads(p, batch, 6)
        scores, error = model.assess(p, batch)
        return {**grads, **losses, "scores": scores} | ({} if math.isnan(error) else {"error": error})

    return Case(params, ours, lambda p: plain(p, batch, 6))


def capsnet_case(n_labels: int = 2, **changes: Any) -> Case:
    names = {key: value for key, value in changes.items() if key in NAMES}
    config = multimnist.Config(**{"image_size": 20, **TINY} | {k: v for k, v in changes.items() if k not in NAMES})
    I, J = config.n_primary, config.n_classes
    fixed = {"even": np.full((I, J), 1 / J), "random": study.random_couplings(I, J)}
    couplings = fixed.get(names.get("assignments", ""))

    def plain(p: Any, batch: multimnist.Batch, n: int) -> tuple[Any, dict[str, Any]]:
        return oracles.plain_capsnet(p, batch, config, names, n, couplings)

    model = study.make_model(config, **names) if names else multimnist.capsnet_model(config)
    return digits_case(model, 20, n_labels, plain)


def cnn_case(script: Any, name: str, convs: Any, side: int, loss: str = "sigmoids", **changes: Any) -> Case:
    model = script.make_models(script.Config(**TINY, **changes))[name]

    def plain(p: Any, batch: multimnist.Batch, n: int) -> tuple[Any, dict[str, Any]]:
        scores = oracles.plain_cnn(p, batch.images[..., None], convs)
        found = oracles.plain_loss(scores, batch.labels, loss, n)
        return found, {"scores": scores, "train_loss": found}

    return digits_case(model, side, 2 if script is multimnist else 1, plain)


# --- The cases, and what must hold of them ----------------------------------------------------------------------------

LAMBDAS = [[0.8], [1.3, 1.3], [0.43, 0.87, 1.3], [0.04, 0.08, 0.11, 0.15]]
POOLED, MEANS = [(1, 0, anp.max)] * 2, [(1, 0, anp.mean)] * 2
CAPSNETS: list[dict[str, Any]] = [
    {}, {"routing_grad": "stop"}, {"routing_iters": 4}, {"routing_iters": 1, "n_labels": 1},
    {"routing_iters": 2, "routing_grad": "stop", "recon_weight": 0.0},
]
STUDIES: list[dict[str, Any]] = [
    {"assignments": "random", "routing_grad": "stop"}, {"transform": "shared"},
    {"transform": "shared", "assignments": "random"}, {"activation": "relu", "routing_iters": 2},
    {"activation": "published"}, {"assignments": "even", "activation": "relu", "loss": "cross-entropy"},
]


def all_cases() -> dict[str, Callable[[], Case]]:
    """By name, whose first word says what they are of."""
    cases: dict[str, Callable[[], Case]] = {}

    def add(name: str, make: Any, *args: Any, **options: Any) -> None:
        words = [str(x) for x in args if not inspect.ismodule(x)] + [f"{k}={v}" for k, v in options.items()]
        cases[" ".join([name, *words])] = functools.partial(make, *args, **options)

    for case in CONV_CASES:
        for form, module in (("conv2d", smallnorb), ("spectral", spectral_conv)):
            add(form, conv_case, module, case)
    for policy in ("exact", "stop"):
        for lambdas in LAMBDAS:
            add("em", em_case, policy, lambdas)
        add("em", em_case, policy, LAMBDAS[1], STARVED)
        for form, case, n_iters in itertools.product(FIELD_FORMS, FIELD_CASES, (1, 3)):
            add(f"fields_{form}", field_case, form, policy, case, n_iters)
        for form in FIELD_FORMS:
            add(f"fields_{form}", field_case, form, policy, FIELD_CASES[1], 2, 2 * STARVED)
        for loss in ("cross-entropy", "spread"):
            add("views", view_case, smallnorb, "capsules", loss, policy)
            add("conv_plain", view_case, conv, "capsules", loss, policy, plain=True)
            add("conv_fast", view_case, conv, "capsules", loss, policy)
    add("views", view_case, smallnorb, dataset="smallnorb", data_dir=".", em_iters=1)
    add("conv_fast", view_case, conv, sizes=(3, 1, 4, 2), em_iters=3, lambda_first=0.4, dataset="toys")
    for parts in ({"vote_bias": "learned"}, {"assignments": "even", "vote_bias": "learned"}):
        add("parts", view_case, conv, parts=parts)
    for form, script, name in (("views", smallnorb, "cnn"), ("views", smallnorb, "cnn_matched"), ("cnn", conv, "cnn")):
        add(form, view_case, script, name)
    for dropout in (False, True):
        add("cnn paper", paper_cnn_case, dropout)
    for plain in (True, False):
        form = "plain" if plain else "fast"
        for changes in CAPSNETS:
            add(f"capsnet_{form}", capsnet_case, plain=plain, **changes)
        add(f"cnn_{form}", cnn_case, multimnist, "cnn", [(1, 0), (2, 0)], 20, image_size=20, plain=plain)
        add(f"cnn_{form}", cnn_case, multimnist, "cnn_pool", POOLED, 20, image_size=20, plain=plain)
        add(f"lenet_{form}", cnn_case, affine, "lenet", MEANS, 28, "cross-entropy", plain=plain)
    add("cnn_fast", cnn_case, affine, "cnn", POOLED, 28, "cross-entropy")
    for changes in STUDIES:
        add("parts", capsnet_case, **changes)
    return cases


CASES = all_cases()


@functools.cache
def built(name: str) -> tuple[Case, dict[str, Any]]:
    """A case, and what autograd finds."""
    case = CASES[name]()
    return case, grad(lambda p: case.plain(p)[0])(case.params) | case.plain(case.params)[1]


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, right in expected.items():
        if np.shape(found[key]) != np.shape(right):
            raise GradientError(f"{key} has the shape {np.shape(found[key])}, not {np.shape(right)}")
        error, largest = np.abs(found[key] - right).max(), np.abs(right).max()
        if not error <= 1e-8 * largest:
            raise GradientError(f"{key} is off by {error:.1e} where the largest entry is {largest:.1e}")


def check_case(name: str) -> None:
    case, expected = built(name)
    case = CASES[name]() if name.startswith("parts") else case  # whose backward passes are made together with the model
    compare(case.ours(case.params), expected)


@pytest.mark.parametrize("name", CASES)
def test_autograd(name: str) -> None:
    check_case(name)
    case, expected = built(name)
    zero = [key for key in case.params if not np.abs(expected[key]).max() > 1e-12]
    assert all(key.startswith("decoder") and "recon_weight=0.0" in name for key in zero), zero


# --- Single layers: differences along random directions ---------------------------------------------------------------


def check_layer(module: ModuleType, name: str, *rest: Any, **shapes: tuple[int, ...]) -> None:
    """A pair by its name, on inputs of these shapes and further arguments of the forward pass."""
    forward, backward = getattr(module, f"{name}_forward"), getattr(module, f"{name}_backward")
    inputs, rng = drawn(rng_of(0), **shapes), rng_of(1)
    out, cache = forward(*inputs.values(), *rest)
    dout = rng.standard_normal(out.shape)
    grads = backward(dout, cache)
    grads = dict(zip(inputs, grads if isinstance(grads, tuple) else (grads,), strict=True))
    check_gradient(lambda **x: float(np.vdot(dout, forward(*x.values(), *rest)[0])), inputs, grads, rng)


def check_points() -> None:
    t = spectral_conv.transforms(4, 5, 3, np.dtype(float))
    if (len(t.x_rows), len(t.x_columns)) != (6, 2 * 7):
        raise GradientError("not as many points as the outputs see, those of the rows made even")


def check_tie() -> None:
    _, cache = multimnist.max_pool_forward(np.zeros((1, 2, 2, 1)))
    if multimnist.max_pool_backward(np.ones((1, 1, 1, 1)), cache).sum() != 1:
        raise GradientError("the gradient of a tie is not handed on once")


def layer(module: ModuleType, name: str, *rest: Any, **shapes: tuple[int, ...]) -> Any:
    return (module, name), [functools.partial(check_layer, module, name, *rest, **shapes)]


CONV: Any = {"x": (5, 9, 8, 2), "w": (3, 3, 2, 4), "b": (4,)}
ODD = {"x": (3, 7, 9, 2)}  # the last row and column of which pooling drops
LAYERS: dict[tuple[ModuleType, str], list[Callable[[], None]]] = dict([
    layer(smallnorb, "conv2d", 2, 1, **CONV), layer(spectral_conv, "conv2d", 2, 1, **CONV),
    layer(smallnorb, "linear", x=(5, 3), w=(3, 7), b=(7,)), layer(smallnorb, "relu", **ODD),
    layer(smallnorb, "sigmoid", **ODD),
    layer(smallnorb, "votes", pose=(2, 7, 3, 3), w=(7, 5, 3, 3)), layer(multimnist, "squash", s=(2, 7, 5)),
    layer(multimnist, "max_pool", **ODD), layer(affine, "avg_pool", **ODD),
    ((spectral_conv, "transforms"), [check_points]),
])
LAYERS[multimnist, "max_pool"].append(check_tie)


@pytest.mark.parametrize("key", LAYERS, ids=lambda key: f"{key[0].__name__}.{key[1]}")
def test_differences(key: tuple[ModuleType, str]) -> None:
    for check in LAYERS[key]:
        check()


# --- Far out, and in single precision ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [smallnorb, spectral_conv])
def test_conv2d_in_single_precision_has_its_precision(form: Any) -> None:
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


def test_sigmoids_and_cross_entropies_far_out() -> None:
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        out, cache = smallnorb.sigmoid_forward(np.array([-np.inf, -1e4, 1e4, np.inf], np.float32))
        np.testing.assert_array_equal(smallnorb.sigmoid_backward(np.ones(4, np.float32), cache), 0)
    np.testing.assert_array_equal(out, [0, 0, 1, 1])
    loss, gradient = multimnist.sigmoid_cross_entropy(np.array([[1e4, -1e4]]), np.array([[0.0, 1.0]]), 2)
    assert loss == 1e4
    np.testing.assert_array_equal(gradient, [[0.5, -0.5]])
    scores, labels = np.float32(1e4) * np.eye(10, dtype=np.float32)[[3, 3]], np.array([3, 4])
    one_hot = multimnist.indicator(labels[:, None], 10, np.float32)
    of_digits = affine.softmax_cross_entropy(scores, one_hot, 2)
    for loss, gradient in (of_digits, smallnorb.softmax_cross_entropy(scores, labels)):
        assert loss == 5000
        np.testing.assert_array_equal(gradient[0], 0)
        np.testing.assert_allclose(gradient[1, [3, 4]], [0.5, -0.5])


def test_random_couplings() -> None:
    couplings = study.random_couplings(9, 7)
    np.testing.assert_allclose(couplings.sum(axis=1), 1)
    assert couplings.std() > 0.1


# --- Backward passes broken on purpose --------------------------------------------------------------------------------


class Broken(NamedTuple):
    seen_by: tuple[str, ...]  # the first words of cases
    more: tuple[str, ...] = ()  # functions to break beside those that are called a backward pass


BROKEN: dict[ModuleType, Broken] = {
    smallnorb: Broken(("em", "views", "conv2d"), ("softmax_cross_entropy", "spread_loss")),
    multimnist: Broken(("capsnet_plain", "cnn_plain", "cnn"), (
        "margin_loss", "squared_error", "sigmoid_cross_entropy", "capsnet_loss_and_grads", "cnn_loss_and_grads")),
    spectral_conv: Broken(("spectral",), ("transforms",)), dynamic_routing: Broken(("capsnet_fast",)),
    conv: Broken(("fields_plain", "conv_plain"), ("scatter",)), field_em: Broken(("fields_fast",), ("scatter",)),
    affine: Broken(("lenet_plain",), ("softmax_cross_entropy",)),
    study: Broken(("parts",), ("biased_votes", "published_squash", "fixed", "shared")),
}
HARMLESS = (
    "shifted = scores",  # any shift gives the same softmax
    "return np.zeros_like(mu), dscores",  # zeros with another factor
)


def broken() -> list[tuple[ModuleType, str]]:
    """All backward passes. What both base scripts have is the same text, see test_contract.py, and broken once."""
    found = []
    for module, of in BROKEN.items():
        own = {k: f for k, f in vars(module).items() if getattr(f, "__module__", "") == module.__name__}
        for name in [*(name for name in own if name.endswith("_backward")), *of.more]:
            twin = getattr(smallnorb, name, None) if module is multimnist else None
            if twin is None or inspect.getsource(own[name]) != inspect.getsource(twin):
                found.append((module, name))
    return found


@pytest.mark.parametrize(("module", "name"), broken(), ids=lambda x: getattr(x, "__name__", x))
def test_a_broken_backward_is_seen(module: ModuleType, name: str, monkeypatch: Patch) -> None:
    cases = [case for case in CASES if case.split()[0] in BROKEN[module].seen_by]
    checks: list[Any] = LAYERS.get((module, name.removesuffix("_backward")), [])
    checks = [*checks, *(functools.partial(check_case, case) for case in cases)]

    def check_all() -> None:
        for check in checks:
            check()

    survivors = surviving_mutants(monkeypatch, module, name, check_all)
    assert [found for found in survivors if not any(line in found for line in HARMLESS)] == []
