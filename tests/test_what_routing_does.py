"""what_routing_does: the study of couplings after the training. Its pairs are tested in test_multimnist_gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import multimnist_capsnet as base
import what_routing_does as m
from fast.workers import Workers
from helpers import digits_folder

Array = np.ndarray


def test_the_study_of_the_routing_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "EVALUATION_BATCH", 5)
    config = base.Config(
        dataset="mnist", data_dir=digits_folder(), conv_channels=2, primary_types=1, decoder=(16, 16), n_test=20,
        dtype="float64", routing_iters=2,
    )  # fmt: skip
    data = base.make_data(config)
    params = {key: 3 * p for key, p in base.capsnet_init(np.random.default_rng(0), config).items()}
    with Workers(2, config.dtype) as workers:
        found = m.routing_study(config, params, data.test, workers)
    labels = [set(pair) for pair in data.test.labels]
    drawn = m.random_couplings(config.n_primary, config.n_classes)

    def outputs(n_iters: int = 2, **names: str) -> tuple[list[set[int]], Array]:
        other, parts = dataclasses.replace(config, routing_iters=n_iters), m.make_parts(config, **names)
        parts = parts if names else base.PLAIN
        lengths, cache = base.capsnet_forward(params, data.test.images.astype(float), other, parts)
        return [set(np.argsort(-row)[:2].tolist()) for row in lengths], drawn if names else cache.routing.c[-1]

    conditions: dict[str, dict[str, Any]] = {f"iters_{n}": {"n_iters": n} for n in range(1, 6)}
    conditions["random"] = {"assignments": "random"}
    assert list(found) == [f"{name}_{kind}" for name in conditions for kind in ("accuracy", "changed", "entropy")]
    trained_pairs, _ = outputs()
    for name, changes in conditions.items():
        pairs, c = outputs(**changes)
        assert found[f"{name}_accuracy"] == np.mean([a == b for a, b in zip(pairs, labels, strict=True)])
        assert found[f"{name}_changed"] == np.mean([a != b for a, b in zip(pairs, trained_pairs, strict=True)])
        assert found[f"{name}_entropy"] == pytest.approx(-(c * np.log(c)).sum(axis=-1).mean() / np.log(10))
    assert found["iters_2_changed"] == 0 < found["random_changed"]
    assert found["iters_1_entropy"] == pytest.approx(1)


def test_even_couplings_are_those_of_one_iteration() -> None:
    config = base.Config(conv_channels=2, primary_types=1, routing_iters=1, dtype="float64")
    params, images = base.capsnet_init(np.random.default_rng(0), config), np.random.default_rng(1).random((3, 36, 36))
    even = m.make_parts(dataclasses.replace(config, routing_iters=3), assignments="uniform")
    one, other = (base.capsnet_forward(params, images, config, parts)[0] for parts in (base.PLAIN, even))
    np.testing.assert_allclose(one, other, rtol=1e-12)


def test_a_shared_transformation_has_fewer_parameters_and_the_same_layers() -> None:
    config = base.Config(conv_channels=2, primary_types=1)
    own, shared = (
        m.make_model(config, transform).init_params(np.random.default_rng(0)) for transform in ("own", "shared")
    )
    assert own["routing.w"].shape == (config.n_primary, 8, 10, 16)
    assert shared["routing.w"].shape == (1, 8, 10, 16)
    assert own.keys() == shared.keys()
