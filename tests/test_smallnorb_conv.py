"""Convolutional matrix capsules of smallnorb_novel_viewpoint.py: gradients, plain loops, the paper's shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import smallnorb_novel_viewpoint as s
from helpers import check_gradient

Array = np.ndarray


# ----------------------------------------------------------------------------------------------------------------------
# Gradients
# ----------------------------------------------------------------------------------------------------------------------

CASES = [  # B, H, W, I, J, K, P, stride
    (3, 7, 6, 2, 3, 3, 3, 1),
    (2, 8, 7, 3, 2, 3, 2, 2),
    (2, 7, 8, 1, 2, 2, 2, 3),
    (2, 4, 4, 3, 5, 4, 2, 1),
]


def routing_inputs(case: tuple[int, ...]) -> dict[str, Any]:
    n, height, width, n_in, n_out, k, p, _ = case
    rng = np.random.default_rng(case)
    return {
        "pose": rng.standard_normal((n, height, width, n_in, p, p)),
        "a_in": rng.uniform(0.1, 0.9, (n, height, width, n_in)),
        "w": rng.standard_normal((k, k, n_in, n_out, p, p)),
        "beta_a": rng.standard_normal(n_out),
        "beta_v": 0.3 * rng.standard_normal(n_out) - 0.5,
    }


def options(case: tuple[int, ...], lambdas: list[float]) -> dict[str, Any]:
    k, p, stride = case[5:]
    offset = np.random.default_rng(1).standard_normal((k, k, p, p))
    return {"lambdas": lambdas, "variance_floor": 0.7, "stride": stride, "offset": offset}


def check_routing(case: tuple[int, ...], lambdas: list[float]) -> None:
    rng = np.random.default_rng(2)
    inputs, how = routing_inputs(case), options(case, lambdas)
    mu, a, cache = s.conv_em_routing_forward(**inputs, **how)
    dmu, da = rng.standard_normal(mu.shape), rng.standard_normal(a.shape)
    grads = dict(zip(inputs, s.conv_em_routing_backward(dmu, da, cache, "exact"), strict=True))

    def f(**inputs: Any) -> float:
        mu, a, _ = s.conv_em_routing_forward(**inputs, **how)
        return float((dmu * mu).sum() + (da * a).sum())

    check_gradient(f, inputs, grads, rng)


def check_kronecker() -> None:
    rng = np.random.default_rng(3)
    w = rng.standard_normal((5, 2, 3, 3))
    kron = s.kronecker(w)
    dkron = rng.standard_normal(kron.shape)
    check_gradient(
        lambda w: float((dkron * s.kronecker(w)).sum()), {"w": w}, {"w": s.kronecker_backward(dkron, 3)}, rng
    )


CHECKS: dict[str, Callable[[], None]] = {
    "kronecker_backward": check_kronecker,
    "conv_em_routing_backward": lambda: check_routing(CASES[1], [0.7, 1.3, 1.0]),
    "conv_capsnet_backward": lambda: None,
}


@pytest.mark.parametrize("n_iters", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_routing_gradient(case: tuple[int, ...], n_iters: int) -> None:
    check_routing(case, [0.7, 1.3, 1.0][:n_iters])
