"""AdamW, plain and fast, and Muon against the same by hand, and that an error in them would be seen."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from scipy import linalg

import multimnist_capsnet as multimnist
from fast import optimizers
from fast.optimizers import BLOCK, FLUSH_EVERY, adamw_step, muon_step, orthogonalized
from fast.workers import Workers
from helpers import Array, GradientError, Patch, surviving_mutants
from smallnorb_novel_viewpoint import TrainState

N_INPUTS = {"conv.w": (0, 1, 2), "routing.w": (1, 2), "hidden.w": (0,)}
SHAPES = {"conv.w": (3, 3, 2, 5), "routing.w": (3, 4, 6, 2), "hidden.w": (7, 12), "hidden.b": (12,)}


def state_of(shapes: Mapping[str, tuple[int, ...]], dtype: Any = np.float64, seed: int = 0) -> TrainState:
    rng = np.random.default_rng(seed)
    return TrainState("any", {key: rng.standard_normal(shape).astype(dtype) for key, shape in shapes.items()})


def draw_grads(state: TrainState, rng: np.random.Generator) -> dict[str, Array]:
    return {
        key: (rng.standard_normal(p.shape) * 10.0 ** rng.integers(-9, 3, p.shape)).astype(p.dtype)
        for key, p in state.params.items()
    }


def divided(grads: dict[str, Array]) -> list[dict[str, Array]]:
    """Two that have ``grads`` for their sum."""
    return [{key: part * g for key, g in grads.items()} for part in (0.25, 0.75)]


def check_close(a: Array, b: Array, what: str, atol: float) -> None:
    if not np.allclose(a, b, rtol=1e-9, atol=atol):
        raise GradientError(f"{what} is off by {np.abs(a - b).max():.2e}")


def check_adamw(step: Any = adamw_step) -> None:
    """[Kingma 2015, algorithm 1], with the weights decayed as in [Loshchilov 2019, algorithm 2]; more than a block."""
    state, rng = state_of({"a.w": (BLOCK + 7,), "b.w": (3, 4), "b.b": (4,)}), np.random.default_rng(1)
    expected = {key: p.copy() for key, p in state.params.items()}
    m, v = ({key: np.zeros_like(p) for key, p in state.params.items()} for _ in range(2))
    for t in range(1, 5):
        grads = draw_grads(state, rng)
        for key, g in grads.items():
            m[key], v[key] = 0.9 * m[key] + 0.1 * g, 0.999 * v[key] + 0.001 * g * g
            if key == "b.w":
                expected[key] -= 0.01 * 3 * expected[key]
            expected[key] -= 0.01 * m[key] / (1 - 0.9**t) / (np.sqrt(v[key] / (1 - 0.999**t)) + 1e-8)
        step(state, divided(grads), 0.01, 3, ("b.w", "absent"))
        assert state.step == t
        for key, p in state.params.items():
            check_close(p, expected[key], key, 1e-12)
            check_close(state.m[key], m[key], f"m of {key}", 1e-12)
            check_close(state.v[key], v[key], f"v of {key}", 1e-12)


def check_muon() -> None:
    """Directions by singular vectors, in matrices of inputs by outputs. Biases are left to Adam."""
    matrix_of: dict[str, Callable[[Array], Array]] = {
        "conv.w": lambda w: w.reshape(18, 5),
        "routing.w": lambda w: np.moveaxis(w, 0, 2).reshape(24, 6),
        "hidden.w": np.copy,
    }
    state, rng = state_of(SHAPES), np.random.default_rng(1)
    adam = TrainState("adam", {"hidden.b": state.params["hidden.b"].copy()})
    expected = {key: f(state.params[key]).copy() for key, f in matrix_of.items()}
    momentum = {key: np.zeros_like(w) for key, w in expected.items()}
    for _ in range(3):
        grads = {key: rng.standard_normal(shape) for key, shape in SHAPES.items()}
        for key, f in matrix_of.items():
            momentum[key] = 0.95 * momentum[key] + f(grads[key])
            u, _, vt = np.linalg.svd(f(grads[key]) + 0.95 * momentum[key], full_matrices=False)
            if key == "hidden.w":
                expected[key] *= 1 - 0.01 * 3
            expected[key] -= 0.01 * 0.2 * math.sqrt(max(expected[key].shape)) * (u @ vt)
        adamw_step(adam, [{"hidden.b": grads["hidden.b"].copy()}], 0.01)
        muon_step(state, divided(grads), 0.01, 3, ("hidden.w",), N_INPUTS | {"absent": (0,)})
        check_close(state.params["hidden.b"], adam.params["hidden.b"], "hidden.b", 1e-12)
        for key, f in matrix_of.items():
            check_close(f(state.params[key]), expected[key], key, 2e-5)
    for key, f in matrix_of.items():
        check_close(f(state.m[key]), momentum[key], f"momentum of {key}", 1e-12)
        assert not state.v[key].any()


def test_a_gradient_of_another_shape_is_told() -> None:
    for shape in ((4, 3), (12,), (1, 12)):
        with pytest.raises(ValueError, match="a gradient of w has shape"):
            adamw_step(state_of({"w": (3, 4)}), [{"w": np.ones(shape)}], 0.1)


def test_a_parameter_in_any_order_of_memory_is_updated() -> None:
    states = []
    for order in (np.ascontiguousarray, np.asfortranarray):
        state = TrainState("x", {"w": order(np.arange(12.0).reshape(3, 4))})
        for gradient in np.random.default_rng(0).standard_normal((3, 3, 4)):
            adamw_step(state, [{"w": order(gradient)}], 0.1, 0.5, ("w",))
        states.append(state)
    check_close(states[1].params["w"], states[0].params["w"], "w", 1e-14)
    assert not np.array_equal(states[1].params["w"], np.arange(12.0).reshape(3, 4))


def test_plain_adamw_by_hand() -> None:
    check_adamw(multimnist.adamw_step)


@pytest.mark.parametrize(("name", "check"), [
    ("_adam", check_adamw), ("_total", check_adamw), ("muon_step", check_adamw), ("_muon", check_muon),
    ("orthogonalized", check_muon),
])
def test_fast_steps_by_hand_and_an_error_is_seen(name: str, check: Any, monkeypatch: Patch) -> None:
    survivors = surviving_mutants(monkeypatch, optimizers, name, check)
    floor = [s for s in survivors if "floor =" in s or "+ floor" in s]  # only what is next to nothing feels the floor
    assert [s for s in survivors if s not in floor] == []


@pytest.mark.parametrize("step", [adamw_step, muon_step])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_any_number_of_threads_gives_the_same_bits(dtype: Any, step: Any) -> None:
    results, more = [], () if step is adamw_step else (N_INPUTS,)
    for n_threads in (1, 2, 3):
        state, rng = state_of(SHAPES | {"large.w": (3, BLOCK)}, dtype), np.random.default_rng(2)
        with Workers(n_threads) as workers:
            for _ in range(2):
                step(state, divided(draw_grads(state, rng)), 0.01, 0.1, ("hidden.w",), *more, workers=workers)
        results.append(state)
    for other in results[1:]:
        for kind in ("params", "m", "v"):
            for key, array in getattr(other, kind).items():
                assert array.dtype == dtype
                np.testing.assert_array_equal(array, getattr(results[0], kind)[key], err_msg=key)


@pytest.mark.parametrize("step", [adamw_step, muon_step])
def test_moments_of_dead_units_do_not_become_subnormal(step: Any) -> None:
    """With which a step takes many times as long."""
    state = state_of({"hidden.w": (6, 4), "hidden.b": (4,)}, np.float32)
    more = () if step is adamw_step else (N_INPUTS,)
    grads = draw_grads(state, np.random.default_rng(1))
    dead = {key: np.arange(g.size).reshape(g.shape) % 2 == 0 for key, g in grads.items()}
    step(state, [{key: g.copy() for key, g in grads.items()}], 0.0, 0.0, (), *more)
    for key, g in grads.items():
        g[...] = np.where(dead[key], 0, np.sign(g))
        state.v[key][dead[key]] = 1e-37  # as after tens of thousands of steps
    for _ in range(20 * FLUSH_EVERY):
        step(state, [{key: g.copy() for key, g in grads.items()}], 0.0, 0.0, (), *more)
        for moments in (*state.m.values(), *state.v.values()):
            assert not ((moments != 0) & (np.abs(moments) < np.finfo(np.float32).tiny)).any()
    for key in grads:
        assert not state.m[key][dead[key]].any()
        assert not state.v[key][dead[key]].any()
        alive = np.abs(state.m[key][~dead[key]])
        assert alive.min() > 0.9
        np.testing.assert_allclose(alive, alive.max(), rtol=1e-4)  # whether their gradients are 1 or -1


@pytest.mark.parametrize("shape", [(60, 7), (7, 60), (9, 9)])
def test_orthogonalized_is_the_polar_factor(shape: tuple[int, int]) -> None:
    a = np.random.default_rng(0).standard_normal(shape) * 1e-7
    result = orthogonalized(a)
    np.testing.assert_allclose(result, linalg.polar(a)[0], atol=1e-3)
    np.testing.assert_allclose(np.linalg.svd(result, compute_uv=False), 1, atol=1e-2)  # the least is a little below 1
    np.testing.assert_allclose(orthogonalized(a.astype(np.float32)), result, atol=1e-3)


def test_orthogonalized_leaves_what_is_next_to_nothing() -> None:
    rng = np.random.default_rng(0)
    left, right = np.linalg.qr(rng.standard_normal((40, 6)))[0], np.linalg.qr(rng.standard_normal((6, 6)))[0]
    result = orthogonalized((left * [1, 1, 1, 1, 1e-5, 0]) @ right)
    np.testing.assert_allclose(np.linalg.svd(result, compute_uv=False), [1, 1, 1, 1, 0.0122, 0], atol=1e-4)
    assert not orthogonalized(np.zeros((5, 3), np.float32)).any()
    assert np.isnan(orthogonalized(np.array([[np.inf, 1.0], [0.0, 1.0]]))).all()


def test_a_state_adds_up_the_losses_of_an_epoch() -> None:
    """In numbers that JSON has."""
    state = state_of({"p": (2,)})
    state.add({"train_loss": np.float32(2)}, 0.0, weight=3)
    state.add({"train_loss": np.float32(6), "other": 1.0}, 0.0)
    state.end_epoch({"accuracy": np.float32(0.5)})
    assert json.dumps(state.history) == '{"train_loss": [3.0], "other": [0.25], "accuracy": [0.5]}'
    assert (state.sums, state.weight) == ({}, 0)
