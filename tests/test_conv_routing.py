"""conv_matrix_capsules.py: invariants of the routing over receptive fields, and so of the routing of one field which it
calls, and the shapes of the network. Gradients and plain loops: test_gradients.py."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import conv_matrix_capsules as caps
from test_gradients import FIELD_CASES as CASES
from test_gradients import FIELD_FORMS as FORMS
from test_gradients import field_inputs

Array = np.ndarray


# --- Routing: what the paper says, and the mistakes that others made --------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 1.0, 300.0, 1e6])
@pytest.mark.parametrize("policy", ["exact", "stop"])
@pytest.mark.parametrize("form", FORMS)
def test_float32_stays_finite(form: str, policy: str, scale: float) -> None:
    """Votes that all agree, votes far apart, one far from all others, children that are off, and a beta far out."""
    inputs: dict[str, Any] = {k: v.astype(np.float32) for k, v in field_inputs(CASES[0]).items()}
    inputs["pose"][:] = scale * (inputs["pose"] if scale > 1 else 1)
    inputs["w"] = inputs["w"] if scale > 1 else np.ones_like(inputs["w"])
    inputs["pose"][2, 3, 3] *= 1e3 if scale == 300 else 1
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
    inputs = field_inputs(case)
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


# --- The network ------------------------------------------------------------------------------------------------------


def test_coordinates_are_the_centres_of_what_a_position_sees() -> None:
    """Each position of ConvCaps2 answers to a window of pixels; its middle is what is added, in the right column."""
    config = caps.Config(dataset="mnist", sizes=(5, 3, 2, 4), em_iters=1, dtype="float64")
    params = caps.conv_capsnet_init(np.random.default_rng(4), config)
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


def test_part_size() -> None:
    assert caps.part_size(caps.Config(dataset="mnist", sizes=(32, 4, 4, 8))) == caps.PART
    for sizes in ((64, 8, 16, 16), (32, 32, 32, 32)):
        n_votes = 16 * 9 * 36 * sizes[1] * sizes[2]  # of an image's ConvCaps1, the layer that has most
        size = caps.part_size(caps.Config(dataset="mnist", sizes=sizes))
        assert size == 1 or size * n_votes * 8 <= caps.PART_BYTES < (size + 1) * n_votes * 8
        assert caps.part_size(caps.Config(dataset="mnist", sizes=sizes, dtype="float64")) == max(1, size // 2)
    assert size == 1
