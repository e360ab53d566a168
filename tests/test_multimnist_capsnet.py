"""multimnist_capsnet: composites, routing's invariants, training, files, command line.

Digits are noise or generated strokes; the last section uses real MNIST where ``../shared/data/mnist`` (or the folder
mnist below CAPSULES_DATA) is there.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import io
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
import pytest
from scipy import linalg

import multimnist_capsnet as m
from helpers import (
    MNIST,
    ROOT,
    check_resumed_on_the_same_digits,
    failure,
    needs_mnist,
    run_script,
    script_environment,
    usage_error,
)

Array = np.ndarray
SCRIPT = "multimnist_capsnet.py"


@functools.cache
def strokes() -> m.Digits:
    train, test = (m.stroke_digits(np.random.default_rng(k), n) for k, n in ((0, 600), (1, 300)))
    return m.Digits("strokes", *train, *test)


@functools.cache
def mnist_like() -> dict[str, bytes]:
    """The four files of a small set of strokes."""
    files = {}
    for stem, array in zip(m.MNIST_SHA256, strokes()[1:], strict=True):
        head = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes()
        files[f"{stem}.gz"] = gzip.compress(head + array.tobytes(), 1)
    return files


@pytest.fixture(scope="session")
def digits_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    for name, content in mnist_like().items():
        (folder / name).write_bytes(content)
    return folder


SMALL = {"conv_channels": 2, "primary_types": 1, "decoder": (16, 16), "n_test": 20, "n_train": 24, "batch_size": 8}


def small(digits_dir: Path | None = None, **changes: Any) -> m.Config:
    data = {} if digits_dir is None else {"dataset": "mnist", "data_dir": str(digits_dir)}
    return m.Config(**{**SMALL, **data, "n_epochs": 2, **changes})


def overlays(**changes: Any) -> m.Overlays:
    return m.Overlays(strokes().train_images, strokes().train_labels, small(**changes))


# ----------------------------------------------------------------------------------------------------------------------
# Composites
# ----------------------------------------------------------------------------------------------------------------------


def boxes_iou(a: Array, b: Array) -> float:
    """Of two 28x28 boxes shifted by a and b, by counting pixels."""
    canvas = np.zeros((2, 60, 60), bool)
    for k, (dy, dx) in enumerate((a, b)):
        canvas[k, 16 + dy : 44 + dy, 16 + dx : 44 + dx] = True
    return float((canvas[0] & canvas[1]).sum() / (canvas[0] | canvas[1]).sum())


@pytest.mark.parametrize("min_iou", [0, 0.6, 0.8, 1])
def test_admissible_shifts_are_all_those_that_overlap_enough(min_iou: float) -> None:
    allowed = {tuple(pair.ravel()) for pair in m.admissible_shifts(2, min_iou)}
    s = range(-2, 3)
    for ay, ax, by, bx in itertools.product(s, s, s, s):
        assert ((ay, ax, by, bx) in allowed) == (boxes_iou(np.array([ay, ax]), np.array([by, bx])) >= min_iou)
    assert len(m.admissible_shifts(4, 0)) == 9**4


def test_a_composite_is_the_maximum_of_two_shifted_digits_of_different_classes() -> None:
    source = overlays()
    composites = source.draw(np.random.default_rng(0), 200)
    batch = source.render(composites)
    assert batch.images.shape == (200, 36, 36)
    assert batch.images.dtype == np.float32
    np.testing.assert_array_equal(batch.labels, source.labels[composites.which])
    assert (batch.labels[:, 0] != batch.labels[:, 1]).all()
    for n in range(200):
        assert boxes_iou(*composites.shift[n]) >= 0.8
        for k in range(2):
            canvas = np.zeros((36, 36), np.float32)
            y, x = 4 + composites.shift[n, k]
            canvas[y : y + 28, x : x + 28] = source.images[composites.which[n, k]] / np.float32(255)
            np.testing.assert_allclose(batch.sources[n, k], canvas, rtol=1e-6)
    np.testing.assert_array_equal(batch.images, batch.sources.max(axis=1))
    assert 0 <= batch.images.min() < batch.images.max() <= 1


def test_shifts_are_drawn_for_each_digit_and_reach_four_pixels() -> None:
    shift = overlays(min_iou=0).draw(np.random.default_rng(0), 5000).shift
    assert set(shift.ravel()) == set(range(-4, 5))
    correlation = np.corrcoef(shift.reshape(5000, 4).T)
    assert np.abs(correlation - np.eye(4)).max() < 0.06


def test_every_pair_of_classes_is_as_likely_as_its_digits() -> None:
    """First digit from all, second from those of the nine other classes, each image as likely as another."""
    labels = np.repeat(np.arange(10), np.arange(5, 15)).astype(np.uint8)
    source = m.Overlays(np.zeros((len(labels), 28, 28), np.uint8), labels, small())
    n = 200_000
    which = source.draw(np.random.default_rng(0), n).which
    share = np.bincount(which[:, 0], minlength=len(labels)) / n
    np.testing.assert_allclose(share, 1 / len(labels), rtol=0.15)
    counts = np.bincount(labels)
    expected = sum(counts[k] / len(labels) / (len(labels) - counts[k]) for k in range(1, 10))  # of an image of class 0
    second = np.bincount(which[:, 1], minlength=len(labels)) / n
    np.testing.assert_allclose(second[labels == 0], expected, rtol=0.15)


def test_one_class_alone_is_refused() -> None:
    with pytest.raises(m.UserError, match="needs two"):
        m.Overlays(np.zeros((5, 28, 28), np.uint8), np.full(5, 3, np.uint8), small())


def test_batches_are_fresh_and_the_test_set_is_fixed(digits_dir: Path) -> None:
    config = small(digits_dir)
    data, again = m.make_data(config), m.make_data(config)
    np.testing.assert_array_equal(data.test.images, again.test.images)
    first, second = (m.training_batch(data, config, step) for step in (0, 1))
    assert (first.images != second.images).any()
    np.testing.assert_array_equal(first.images, m.training_batch(again, config, 0).images)
    other = m.make_data(dataclasses.replace(config, seed=1))
    assert (other.test.images != data.test.images).any()
    # Nothing of the network shifts the data.
    wide = m.make_data(dataclasses.replace(config, conv_channels=7, routing_iters=1, n_train=80))
    np.testing.assert_array_equal(wide.test.images, data.test.images)


def test_training_and_test_share_no_digit(digits_dir: Path) -> None:
    def ink(images: np.ndarray) -> set[tuple[tuple[int, ...], bytes]]:
        """Each image's ink, cut out, wherever it lies."""
        found = set()
        for image in np.rint(images).astype(np.uint8):
            rows, columns = (np.flatnonzero(image.any(axis=axis)) for axis in (1, 0))
            cut = image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
            found.add((cut.shape, cut.tobytes()))
        return found

    data = m.make_data(small(digits_dir, n_test=50))
    training, test = ink(strokes().train_images), ink(strokes().test_images)
    seen = ink(255 * m.training_batch(data, small(digits_dir, batch_size=50), 0).sources.reshape(-1, 36, 36))
    tested = ink(255 * data.test.sources.reshape(-1, 36, 36))
    assert seen <= training
    assert tested <= test
    assert not test & training


def test_a_pool_is_drawn_once_and_gone_through_in_new_orders(digits_dir: Path) -> None:
    config = small(digits_dir, pool=6, batch_size=4)
    data = m.make_data(config)
    seen = [image.tobytes() for step in range(9) for image in m.training_batch(data, config, step).images]
    turns = [seen[k : k + 6] for k in range(0, 36, 6)]
    assert {tuple(sorted(turn)) for turn in turns} == {tuple(sorted(set(seen)))}  # all six, each once
    assert len({tuple(turn) for turn in turns}) > 1


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes that capsule code has been seen to make
# ----------------------------------------------------------------------------------------------------------------------


def routed(seed: int = 0, n_iters: int = 3, B: int = 4) -> tuple[Array, m.RoutingCache]:
    rng = np.random.default_rng(seed)
    u, w = rng.standard_normal((3, 7, B)), rng.standard_normal((5, 3, 7, 6))
    return m.routing_forward(u, w, n_iters, m.Workspace(np.float64))


def test_couplings_sum_to_one_over_the_parents_at_every_iteration() -> None:
    _, cache = routed()
    assert [c.shape for c in cache.c] == [(5, 7, 4)] * 3
    np.testing.assert_allclose([c.sum(axis=0) for c in cache.c], 1)
    np.testing.assert_allclose(cache.c[0], 1 / 5)
    assert np.abs(cache.c[2].sum(axis=1) - 7 / 5).max() > 0.1  # not over the capsules below


def test_routing_keeps_nothing_between_calls() -> None:
    ws = m.Workspace(np.float64)
    rng = np.random.default_rng(0)
    u, w = rng.standard_normal((3, 7, 4)), rng.standard_normal((5, 3, 7, 6))
    first = m.routing_forward(u, w, 3, ws)[0].copy()
    m.routing_forward(rng.standard_normal(u.shape), w, 3, ws)
    np.testing.assert_array_equal(m.routing_forward(u, w, 3, ws)[0], first)


def test_agreement_wins() -> None:
    """Seven capsules vote alike for parent 0 and at random for parent 1: in the end parent 0 has them."""
    rng = np.random.default_rng(0)
    w = np.stack([np.ones((3, 7, 6)), 3 * rng.standard_normal((3, 7, 6))])
    _, cache = m.routing_forward(np.full((3, 7, 1), 0.5), w, 3, m.Workspace(np.float64))
    assert (np.diff([c[0].mean() for c in cache.c]) > 0.02).all()


@pytest.mark.parametrize("name", m.MODEL_NAMES)
def test_a_batch_mate_changes_nothing(name: str) -> None:
    config = small(dtype="float64")
    model = m.make_models(config)[name]
    params = model.init_params(np.random.default_rng(0))
    source = overlays(dtype="float64")
    batch = source.render(source.draw(np.random.default_rng(0), 9))
    together = model.assess(params, batch, m.Workspace(np.float64))[0].copy()
    alone = [model.assess(params, batch.part(k, k + 1), m.Workspace(np.float64))[0][0].copy() for k in range(9)]
    np.testing.assert_allclose(together, alone, rtol=1e-10)


def test_squash_has_the_papers_length_and_direction_along_its_axis() -> None:
    s = np.random.default_rng(0).standard_normal((3, 7, 5))
    v = np.empty_like(s)
    for axis in (0, 1):
        m.squash_forward(s, axis, v)
        length = np.linalg.norm(s, axis=axis)
        np.testing.assert_allclose(np.linalg.norm(v, axis=axis), length**2 / (1 + length**2), rtol=1e-7)
        np.testing.assert_allclose((s * v).sum(axis), length * np.linalg.norm(v, axis=axis), rtol=1e-7)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nothing_is_nan_at_zero_or_far_out(dtype: type) -> None:
    for scale in (0, 1e-20, 1e-8, 1e4):
        s: Array = np.full((8, 3), scale, dtype)
        v = np.empty_like(s)
        cache = m.squash_forward(s, 0, v)
        assert np.isfinite(v).all()
        assert np.isfinite(m.squash_backward(np.ones_like(s), cache)).all()
        assert (np.linalg.norm(v, axis=0) < 1.001).all()
    config = small(dtype=np.dtype(dtype).name)
    params = m.capsnet_init(np.random.default_rng(0), config)
    grads = {k: np.empty_like(p) for k, p in params.items()}
    for brightness in (0, 1):
        image: Array = np.full((2, 36, 36), brightness, dtype)
        batch = m.Batch(image, np.array([[0, 1], [2, 3]]), np.stack([image, image], axis=1))
        losses = m.capsnet_loss_and_grads(params, batch, 2, config, grads, m.Workspace(dtype))
        assert all(map(math.isfinite, losses.values()))
        assert all(np.isfinite(g).all() for g in grads.values())


def test_reconstruction_in_training_is_from_the_true_capsules_one_by_one() -> None:
    rng = np.random.default_rng(0)
    v = rng.standard_normal((10, 16, 3))
    v[9] *= 100  # the longest, and nowhere a true one
    labels = np.array([[1, 2], [2, 1], [0, 5]])
    masked = m.mask_capsules(v, labels).reshape(10, 16, 2, 3)
    for b, digit in itertools.product(range(3), range(2)):
        others = [j for j in range(10) if j != labels[b, digit]]
        assert (masked[others, :, digit, b] == 0).all()
        np.testing.assert_array_equal(masked[labels[b, digit], :, digit, b], v[labels[b, digit], :, b])


def test_each_picture_is_compared_with_its_own_digit() -> None:
    """Swapping labels and sources together changes no loss; swapping one of the two does."""
    config = small(dtype="float64")
    params = m.capsnet_init(np.random.default_rng(0), config)
    source = overlays(dtype="float64")
    batch = source.render(source.draw(np.random.default_rng(0), 6))

    def loss(labels: Array, sources: Array) -> float:
        grads = {k: np.empty_like(p) for k, p in params.items()}
        swapped = m.Batch(batch.images, labels, sources)
        return m.capsnet_loss_and_grads(params, swapped, 6, config, grads, m.Workspace(np.float64))["train_loss"]

    straight = loss(batch.labels, batch.sources)
    assert loss(batch.labels[:, ::-1], batch.sources[:, ::-1]) == pytest.approx(straight, rel=1e-12)
    assert loss(batch.labels[:, ::-1], batch.sources) != pytest.approx(straight, rel=1e-6)


def test_reconstruct_draws_what_the_loss_sees() -> None:
    config = small(dtype="float64")
    params = m.capsnet_init(np.random.default_rng(0), config)
    source = overlays(dtype="float64")
    batch = source.render(source.draw(np.random.default_rng(0), 5))
    ws = m.Workspace(np.float64)
    _, error = m.capsnet_assess(params, batch, config, ws)
    _, cache = m.capsnet_forward(params, batch.images, config, ws)
    drawn = m.reconstruct(params, cache.v, batch.labels, ws)
    assert drawn.shape == batch.sources.shape
    assert np.square(drawn - batch.sources).sum() == pytest.approx(error)


# ----------------------------------------------------------------------------------------------------------------------
# Networks
# ----------------------------------------------------------------------------------------------------------------------


def n_params(config: m.Config, name: str = "capsnet") -> int:
    return m.count_params(m.make_models(config)[name].init_params(np.random.default_rng(0)))


def test_numbers_of_parameters() -> None:
    paper = m.Config(**m.PRESETS["paper"])
    assert m.count_params(m.capsnet_init(np.random.default_rng(0), paper)) == 11_361_808  # as published
    assert m.Config().n_primary == 800
    assert paper.n_primary == 3200
    assert n_params(m.Config()) == 2_030_224
    for config in (m.Config(), small(), m.Config(image_size=28, n_labels=1), m.Config(image_size=40)):
        for name in ("cnn", "cnn_pool"):
            assert n_params(config, name) == pytest.approx(n_params(config), rel=0.01)


@pytest.mark.parametrize("image_size", [28, 36, 40])
def test_other_image_sizes_and_numbers_of_labels(image_size: int) -> None:
    config = small(image_size=image_size, n_labels=1)
    rng = np.random.default_rng(0)
    images = rng.random((3, image_size, image_size), np.float32)
    batch = m.Batch(images, np.array([[1], [2], [3]]), images[:, None])
    for model in m.make_models(config).values():
        state = m.TrainState(model.init_params(rng))
        losses = model.loss_and_grads(state.params, batch, 3, m.pack(state.params)[1], m.Workspace())
        assert math.isfinite(losses["train_loss"])
        assert model.assess(state.params, batch, m.Workspace())[0].shape == (3, 10)


def test_a_workspace_gives_an_array_again() -> None:
    ws = m.Workspace(np.float32)
    a = ws("a", 3, 4)
    assert ws("a", 3, 4) is a
    assert ws("b", 3, 4) is not a
    assert ws("a", 2, 4).shape == (2, 4)
    assert a.dtype == np.float32


def test_no_large_array_is_allocated_in_a_step() -> None:
    """numpy reports its allocations to tracemalloc: a second step takes little beside what the first one left."""
    import tracemalloc

    config = m.Config(batch_size=16)
    model = m.make_models(config)["capsnet"]
    state = m.TrainState(model.init_params(np.random.default_rng(0)))
    crew = m.Crew(1)
    crew.prepare(state)
    source = overlays()
    batch = source.render(source.draw(np.random.default_rng(0), 16))
    crew.gradients(model, state.params, batch)
    held = sum(a.nbytes for a in crew.workspaces[0]._arrays.values())
    tracemalloc.start()
    _, grads = crew.gradients(model, state.params, batch)
    crew.update(state, grads, 1e-3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held > 15e6
    assert peak < 2.5e6  # less than one copy of conv1's output, 1.6 MB, beside a few small ones


def test_top_labels_and_figures() -> None:
    scores = np.array([[0.1, 0.9, 0.5, 0, 0, 0, 0, 0, 0, 0], [0.9, 0, 0, 0, 0, 0, 0, 0, 0.2, 0.3]])
    np.testing.assert_array_equal(m.top_labels(scores, 2), [[1, 2], [0, 9]])
    model = m.Model("fixed", lambda rng: {}, lambda *a: {}, lambda p, batch, ws: (scores[batch.labels[:, 0] // 5], 3.5))
    crew = m.Crew()
    crew.workspaces = [m.Workspace()]
    labels = np.array([[2, 1], [1, 3], [9, 7], [0, 9], [9, 0], [4, 5], [1, 2], [8, 7]])
    batch = m.Batch(np.zeros((8, 2, 2)), labels, np.zeros((8, 2, 2, 2)))
    figures = m.evaluate(model, {}, batch, crew, part=3)
    # Images whose first label is below 5 score as the first row. Right: both, one, one, none, both, none, both, none.
    assert figures == {
        "set_accuracy": 3 / 8,
        "soft_accuracy": 5 / 8,
        "digit_accuracy": 8 / 16,
        "recon_mse": pytest.approx(3 * 3.5 / 64),
    }


# ----------------------------------------------------------------------------------------------------------------------
# Training
# ----------------------------------------------------------------------------------------------------------------------


def test_adam_by_hand() -> None:
    rng = np.random.default_rng(0)
    p, first, second = rng.standard_normal(300_000), np.zeros(300_000), np.zeros(300_000)  # more than two blocks
    expected, state = p.copy(), (np.zeros(300_000), np.zeros(300_000))
    for t in range(1, 5):
        g = rng.standard_normal(300_000) * 10.0 ** rng.integers(-9, 3, 300_000)
        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g * g
        expected -= 0.01 * first / (1 - 0.9**t) / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)
        m.adam_step(p, [g / 4, 0.75 * g], *state, t, 0.01)
    np.testing.assert_allclose(p, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(60, 7), (7, 60), (9, 9)])
def test_orthogonalised_is_the_polar_factor(shape: tuple[int, int]) -> None:
    a = np.random.default_rng(0).standard_normal(shape) * 1e-7
    result = m.orthogonalised(a)
    np.testing.assert_allclose(result, linalg.polar(a)[0], atol=1e-3)
    np.testing.assert_allclose(np.linalg.svd(result, compute_uv=False), 1, atol=1e-2)  # the least is a little below 1
    np.testing.assert_allclose(m.orthogonalised(a.astype(np.float32)), result, atol=1e-3)


def test_orthogonalised_leaves_what_is_next_to_nothing() -> None:
    rng = np.random.default_rng(0)
    left, right = np.linalg.qr(rng.standard_normal((40, 6)))[0], np.linalg.qr(rng.standard_normal((6, 6)))[0]
    result = m.orthogonalised((left * [1, 1, 1, 1, 1e-5, 0]) @ right)
    np.testing.assert_allclose(np.linalg.svd(result, compute_uv=False), [1, 1, 1, 1, 0.0122, 0], atol=1e-4)
    assert not m.orthogonalised(np.zeros((5, 3), np.float32)).any()
    assert np.isnan(m.orthogonalised(np.array([[np.inf, 1.0], [0.0, 1.0]]))).all()


def test_muon_by_hand() -> None:
    """The directions by singular vectors; routing weights put into their matrix one by one."""
    rng = np.random.default_rng(0)
    for name, shape in (("conv1.w", (3, 3, 2, 5)), ("routing.w", (3, 4, 6, 2)), ("hidden.w", (7, 12))):
        w, m1 = rng.standard_normal(shape), np.zeros(math.prod(shape))
        expected, momentum = w.copy(), np.zeros(shape)
        for _ in range(3):
            g = rng.standard_normal(shape)
            momentum = 0.95 * momentum + g
            ahead = g + 0.95 * momentum
            cells = {index: (index[:-1], index[-1]) for index in np.ndindex(shape)}
            if name == "routing.w":  # J, P, I, D
                cells = {index: (index[1:3], (index[0], index[3])) for index in np.ndindex(shape)}
            rows, columns = (sorted({cell[axis] for cell in cells.values()}) for axis in (0, 1))
            matrix = np.zeros((len(rows), len(columns)))
            for index, (row, column) in cells.items():
                matrix[rows.index(row), columns.index(column)] = ahead[index]
            u, _, vt = np.linalg.svd(matrix, full_matrices=False)
            for index, (row, column) in cells.items():
                size = 0.01 * 0.2 * math.sqrt(max(matrix.shape))
                expected[index] -= size * (u @ vt)[rows.index(row), columns.index(column)]
            m.muon_step(w, [g.ravel() / 4, 0.75 * g.ravel()], m1, 0.01, name)
        np.testing.assert_allclose(w, expected, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(m1.reshape(shape), momentum, err_msg=name)


@pytest.mark.parametrize("name", m.MODEL_NAMES)
def test_muon_is_for_inner_weights_and_adam_for_the_rest(name: str) -> None:
    config = small(dtype="float64", optimizer="muon")
    inner = {"capsnet": {"conv1.w", "primary.w", "routing.w"}}.get(name, {"conv1.w", "conv2.w", "hidden.w"})
    states, model = {}, m.make_models(config)[name]
    grads = np.random.default_rng(1).standard_normal((2, m.count_params(model.init_params(np.random.default_rng(0)))))
    for optimizer in ("adam", "muon"):
        for threads in (1, 3):
            state, crew = m.init_state(model, config), m.Crew(threads)
            crew.update(state, list(grads.copy()), 0.01, optimizer)
            crew.close()
            states[optimizer, threads] = state
        np.testing.assert_array_equal(states[optimizer, 1].flat, states[optimizer, 3].flat)
    start, adam, muon = m.init_state(model, config), states["adam", 1], states["muon", 1]
    for key, before in start.params.items():
        if key in inner:
            rms = math.sqrt(np.square(muon.params[key] - before).mean())
            assert rms == pytest.approx(0.01 * 0.2, rel=0.01), key
        else:
            np.testing.assert_array_equal(muon.params[key], adam.params[key], err_msg=key)
            assert (muon.params[key] != before).all()


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_moments_of_dead_units_do_not_become_subnormal(optimizer: str) -> None:
    """Which made the steps of a CNN that was trained for long five times as slow."""
    state, crew = (
        m.TrainState({"hidden.w": np.zeros((6, 4), np.float32), "hidden.b": np.zeros(4, np.float32)}),
        m.Crew(),
    )
    grad = np.random.default_rng(1).standard_normal(len(state.flat)).astype(np.float32)
    dead = np.arange(len(grad)) % 2 == 0
    crew.update(state, [grad.copy()], 0.0, optimizer)
    state.v[dead] = 1e-37  # as after tens of thousands of steps
    grad[dead] = 0
    for _ in range(20 * m.FLUSH_EVERY):
        crew.update(state, [grad.copy()], 0.0, optimizer)
        moments = np.abs([state.m, state.v])
        assert not ((moments > 0) & (moments < np.finfo(np.float32).tiny)).any()
    assert (state.m[dead] == 0).all()
    assert (state.v[dead] == 0).all()
    assert (state.m[~dead] != 0).all()


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
@pytest.mark.parametrize("name", m.MODEL_NAMES)
def test_weight_decay_shrinks_weights_and_spares_biases(name: str, optimizer: str) -> None:
    config = small(dtype="float64")
    model = m.make_models(config)[name]
    start = m.init_state(model, config)
    start.flat += 0.1  # biases begin at zero, which would not shrink
    after = {}
    for decay in (0.0, 3.0):
        after[decay], crew = m.init_state(model, config), m.Crew()
        after[decay].flat += 0.1
        grads = np.random.default_rng(1).standard_normal(start.flat.shape)
        crew.update(after[decay], [grads], 0.01, optimizer, decay)
    assert {key.rsplit(".")[-1] for key in start.params} == {"w", "b"}
    for key, before in start.params.items():
        taken = after[0.0].params[key] - after[3.0].params[key]
        expected = 0.03 * before if key.endswith(".w") else np.zeros_like(before)
        np.testing.assert_allclose(taken, expected, atol=1e-12, err_msg=key)


def test_training_hands_the_weight_decay_on(digits_dir: Path) -> None:
    config = small(digits_dir, lr=0.01, n_train=64)
    plain, decayed = (trained(dataclasses.replace(config, weight_decay=x)).params for x in (0.0, 10.0))
    for key in plain:
        if key.endswith(".w"):
            assert np.square(decayed[key]).sum() < 0.95 * np.square(plain[key]).sum(), key


def test_muon_resumes_to_the_same_numbers(digits_dir: Path, tmp_path: Path) -> None:
    config = small(digits_dir, optimizer="muon", n_train=72, batch_size=24)
    whole, data, model = trained(config), m.make_data(config), m.make_models(config)["capsnet"]
    path = tmp_path / "c.npz"

    def save(state: m.TrainState, _: bool) -> None:
        if state.step == 2:
            m.save_checkpoint(path, config, {"capsnet": state})

    with m.single_blas():
        m.train(model, config, data, after_step=save)
        state = m.load_checkpoint(path)[1]["capsnet"]
        assert state.step == 2
        m.train(model, config, data, state)
    np.testing.assert_array_equal(state.flat, whole.flat)
    assert state.history == whole.history
    assert (trained(dataclasses.replace(config, optimizer="adam")).flat != whole.flat).any()


def test_a_gradient_that_is_not_finite_is_reported_with_muon_too(digits_dir: Path) -> None:
    config = small(digits_dir, lr=1e30, n_epochs=30, lr_schedule="constant", optimizer="muon")
    with pytest.raises(m.UserError, match="try a smaller --lr"):
        trained(config)


def test_learning_rate_schedules() -> None:
    config = m.Config(n_epochs=10, n_train=16_000, batch_size=16, lr=1.0)  # 10,000 steps
    rates = {
        kind: [dataclasses.replace(config, lr_schedule=kind).lr_at(t) for t in (0, m.WARMUP, 5000, 9999)]
        for kind in ("constant", "linear", "cosine", "exponential")
    }
    np.testing.assert_allclose([r[0] for r in rates.values()], 1 / m.WARMUP)
    assert rates["constant"][1:] == [1, 1, 1]
    np.testing.assert_allclose(rates["linear"][1:], [0.99, 0.5, 1e-4])
    np.testing.assert_allclose(rates["cosine"][2:], [0.5, 0], atol=1e-6)
    np.testing.assert_allclose(rates["exponential"][2], 0.96**2.5)


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
@pytest.mark.parametrize("name", m.MODEL_NAMES)
def test_training_learns(name: str, optimizer: str, digits_dir: Path) -> None:
    sizes = {"conv_channels": 8, "primary_types": 2, "decoder": (32, 64), "optimizer": optimizer}
    config = small(digits_dir, n_train=1600, batch_size=16, n_test=100, **sizes)
    model, data = m.make_models(config)[name], m.make_data(config)
    _, history = m.train(model, config, data)
    assert history["train_loss"][1] < 0.9 * history["train_loss"][0]
    assert history["digit_accuracy"][1] > 0.3  # chance: 0.2
    if name == "capsnet":
        assert history["recon_mse"][1] < 0.075


def trained(config: m.Config, threads: int = 1, name: str = "capsnet") -> m.TrainState:
    data, model = m.make_data(config), m.make_models(config)[name]
    state, crew = m.init_state(model, config), m.Crew(threads)
    with m.single_blas():
        m.train(model, config, data, state, crew=crew)
    crew.close()
    return state


def test_same_seed_same_numbers_with_any_fixed_number_of_threads(digits_dir: Path) -> None:
    config = small(digits_dir, batch_size=24, n_train=72)
    one, two, again = (trained(config, threads) for threads in (1, 2, 2))
    np.testing.assert_array_equal(two.flat, again.flat)
    np.testing.assert_allclose(one.flat, two.flat, atol=1e-3)
    assert one.history["train_loss"] == pytest.approx(two.history["train_loss"], rel=1e-4)
    assert (trained(dataclasses.replace(config, seed=1)).flat != one.flat).any()


def test_threads_compute_the_gradient_of_the_whole_batch() -> None:
    config = small(dtype="float64")
    source = overlays(dtype="float64")
    batch = source.render(source.draw(np.random.default_rng(0), 27))
    model = m.make_models(config)["capsnet"]
    state = m.TrainState(model.init_params(np.random.default_rng(0)))
    results = []
    for threads in (1, 2, 3, 8):
        crew = m.Crew(threads)
        crew.prepare(state)
        losses, grads = crew.gradients(model, state.params, batch)
        assert len(grads) == min(threads, 27 // m.Crew.MIN_PART)
        results.append((losses["train_loss"], sum(grads)))
        crew.close()
    for loss, gradient in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-12)
        np.testing.assert_allclose(gradient, results[0][1], rtol=1e-9, atol=1e-13)


def test_callback_sees_the_start_and_every_epoch(digits_dir: Path) -> None:
    config, seen = small(digits_dir), []
    data = m.make_data(config)
    m.train_all(config, data, names=("capsnet", "cnn"), callback=lambda name, n, p, h: seen.append((name, n, len(h))))
    assert seen[:3] == [("capsnet", 0, 0), ("capsnet", 1, 7), ("capsnet", 2, 7)]
    assert seen[3:] == [("cnn", 0, 0), ("cnn", 1, 4), ("cnn", 2, 4)]


def test_evaluation_is_pure(digits_dir: Path) -> None:
    config = small(digits_dir)
    state, data = trained(config), m.make_data(config)
    model, before = m.make_models(config)["capsnet"], state.flat.copy()
    for threads in (1, 3):
        crew = m.Crew(threads)
        crew.prepare(state)
        figures = [m.evaluate(model, state.params, data.test, crew, part) for part in (32, 7)]
        crew.close()
        assert {k: v for k, v in figures[0].items() if k != "recon_mse"} == {
            k: state.history[k][-1] for k in figures[0] if k != "recon_mse"
        }
        assert [f["recon_mse"] for f in figures] == pytest.approx([state.history["recon_mse"][-1]] * 2, rel=1e-5)
    np.testing.assert_array_equal(state.flat, before)


def test_a_diverging_run_stops_with_epoch_and_step(digits_dir: Path) -> None:
    config = small(digits_dir, lr=1e30, n_epochs=30, lr_schedule="constant")
    data = m.make_data(config)
    with pytest.raises(m.UserError, match=r"cnn: the loss became (nan|inf) in epoch \d+, step \d+; try a smaller --lr"):
        m.train_all(config, data, names=("cnn",))


# ----------------------------------------------------------------------------------------------------------------------
# Interruption
# ----------------------------------------------------------------------------------------------------------------------


def flags(config: m.Config) -> list[str]:
    names = ("conv_channels", "primary_types", "n_test", "n_train", "batch_size", "n_epochs", "data_dir", "dataset")
    pairs = [(f"--{name.replace('_', '-')}", str(getattr(config, name))) for name in names]
    return ["--quiet", "--threads", "1", *(word for pair in pairs for word in pair)]


def result_of(argv: list[str], folder: Path) -> tuple[dict[str, Any], dict[str, m.TrainState]]:
    """Run to the end: the result without its times, and the last checkpoint."""
    out, checkpoint = folder / "out.json", folder / "c.npz"
    assert m.main([*argv, "--out-json", str(out), "--checkpoint", str(checkpoint)]) == 0
    result = json.loads(out.read_text())
    for model in result["models"].values():
        del model["train_seconds"]
    return result, m.load_checkpoint(checkpoint)[1]


def assert_same_run(a: tuple[dict[str, Any], Any], b: tuple[dict[str, Any], Any]) -> None:
    assert a[0]["history"] == b[0]["history"]
    assert a[0]["models"] == b[0]["models"]
    assert tuple(a[1]) == tuple(b[1]) == m.MODEL_NAMES
    for name in a[1]:
        for kind in ("flat", "m", "v"):
            np.testing.assert_array_equal(getattr(a[1][name], kind), getattr(b[1][name], kind), err_msg=name)


@pytest.mark.parametrize("at", [1, 2, 4, 11, 18])  # of 3 models x 2 epochs x 3 steps
def test_ctrl_c_at_any_step_and_resume_give_the_same_numbers(
    at: int, digits_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv, calls = flags(small(digits_dir)), 0
    original = m.adam_step

    def interrupt(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGINT)
        original(*args)

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(m, "adam_step", interrupt)
    assert m.main([*argv, "--checkpoint", str(tmp_path / "c.npz")]) == 130
    monkeypatch.undo()
    assert capsys.readouterr() == ("", "interrupted\n")
    assert signal.getsignal(signal.SIGINT) == handler
    assert sum(state.step for state in m.load_checkpoint(tmp_path / "c.npz")[1].values()) == at
    (tmp_path / "whole").mkdir()
    whole = result_of(argv, tmp_path / "whole")
    assert_same_run(result_of([*argv, "--resume"], tmp_path), whole)
    assert_same_run(result_of([*argv, "--resume"], tmp_path), whole)  # what is finished does not change


def test_kill_9_leaves_a_readable_checkpoint(digits_dir: Path, tmp_path: Path) -> None:
    config = small(digits_dir, n_epochs=100_000)
    checkpoint = tmp_path / "c.npz"
    command = [sys.executable, str(ROOT / SCRIPT), *flags(config), "--checkpoint", str(checkpoint)]
    process = subprocess.Popen([*command, "--checkpoint-every", "1"], env=script_environment())
    deadline = time.monotonic() + 60
    while not checkpoint.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(0.3)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    state = m.load_checkpoint(checkpoint)[1]["capsnet"]
    assert state.step > 0
    assert len(state.history.get("set_accuracy", [])) == state.step // 3
    assert np.isfinite(state.flat).all()


DIES_AT_THE_THIRD = """
import os, signal, sys
import numpy as np
import multimnist_capsnet as m

def die():
    os.kill(os.getpid(), signal.SIGKILL)

original, calls = {where}, 0
def third(*args, **arrays):
    global calls
    calls += 1
    if calls == 3:
        {death}
    return original(*args, **arrays)
{where} = third
sys.exit(m.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("where", "death", "kept"),
    [
        ("np.savez", 'args[0].write(b"half"); args[0].flush(); die()', 2),  # half of the file is there
        ("os.fsync", "die()", 2),  # all of it, but not under its name
        ("m.Path.replace", "original(*args); die()", 3),
        ("m.Crew.update", "die()", 2),  # in the third step
    ],
)
def test_kill_9_at_the_worst_moments(digits_dir: Path, tmp_path: Path, where: str, death: str, kept: int) -> None:
    checkpoint = tmp_path / "c.npz"
    code = DIES_AT_THE_THIRD.format(where=where, death=death)
    command = [sys.executable, "-c", code, *flags(small(digits_dir)), "--checkpoint", str(checkpoint)]
    done = subprocess.run([*command, "--checkpoint-every", "1"], env=script_environment(), check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert m.load_checkpoint(checkpoint)[1]["capsnet"].step == kept


def test_a_checkpoint_that_cannot_be_saved_costs_no_training(
    digits_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk is full at the first epoch of the first model, then there is room again."""
    original, calls = np.savez, 0

    def full_once(*args: Any, **arrays: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError(28, "No space left on device")
        original(*args, **arrays)

    argv = flags(small(digits_dir))
    (tmp_path / "whole").mkdir()
    whole = result_of(argv, tmp_path / "whole")
    monkeypatch.setattr(np, "savez", full_once)
    assert_same_run(result_of(argv, tmp_path), whole)
    warning = f"warning: cannot write {tmp_path / 'c.npz'}: No space left on device; training goes on\n"
    assert capsys.readouterr().err == warning
    assert calls == 6


def test_a_result_that_cannot_be_saved_is_printed_first(
    digits_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, result: Any) -> None:
        raise m.UserError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr(m, "save_result", full)
    argv = [*flags(small(digits_dir)), "--models", "cnn", "--out-json", str(tmp_path / "o.json")]
    assert m.main(argv) == 1
    out, error = capsys.readouterr()
    assert re.search(r"^cnn +0\.\d", out, re.MULTILINE)
    assert error == f"error: cannot write {tmp_path / 'o.json'}: No space left on device\n"


def test_resuming_with_other_settings_is_refused(
    digits_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*flags(small(digits_dir)), "--models", "cnn", "--checkpoint", str(tmp_path / "c.npz")]
    assert m.main(argv) == 0
    for more, message in (
        (["--lr", "0.1"], f"it was made with --lr {m.Config.lr}, not 0.1"),
        (["--n-epochs", "3"], "it was made with --n-epochs 2, not 3"),
        (["--seed", "1"], "it was made with --seed 0, not 1"),
        (["--preset", "paper"], "it was made with --preset with the decoder (256, 512), not (512, 1024)"),
    ):
        line = failure(m, [*argv, "--resume", *more], capsys)
        assert line == f"error: cannot resume {tmp_path / 'c.npz'}: {message}\n"
    # With a learning rate that does not depend on the length, a run may become longer.
    constant = [*argv, "--lr-schedule", "constant"]
    assert m.main(constant) == 0
    assert m.main([*constant, "--resume", "--n-epochs", "3"]) == 0
    assert m.load_checkpoint(tmp_path / "c.npz")[1]["cnn"].step == 9
    assert m.main([*constant, "--resume"]) == 1


def test_a_run_is_not_resumed_on_other_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = flags(small())
    del argv[argv.index("--data-dir") : argv.index("--data-dir") + 2]
    check_resumed_on_the_same_digits(m, [*argv, "--models", "cnn"], tmp_path / "c.npz", capsys)


# ----------------------------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------------------------

WRONG_VALUES = {
    "--dataset": "cifar", "--n-train": "0", "--n-test": "x", "--min-iou": "1.5", "--pool": "-1", "--preset": "huge",
    "--conv-channels": "0", "--primary-types": "nan", "--routing-iters": "0", "--routing-grad": "some",
    "--recon-weight": "-1", "--seed": "-1", "--n-epochs": "1.5", "--batch-size": "0", "--lr": "0",
    "--lr-schedule": "step", "--optimizer": "sgd", "--weight-decay": "-1", "--dtype": "float16", "--conv": "fft",
    "--threads": "0",
    "--models": "capsnet,rnn", "--checkpoint-every": "0",
}  # fmt: skip
PATHS = {"--data-dir", "--out-json", "--checkpoint", "--predict", "--predict-png"}


def test_every_flag_with_a_value_is_tried() -> None:
    actions = m.make_parser()._actions
    assert {a.option_strings[0] for a in actions if a.nargs != 0} == set(WRONG_VALUES) | PATHS


@pytest.mark.parametrize("flag", WRONG_VALUES)
def test_a_wrong_value_is_one_line_that_names_the_flag(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"argument {flag}: " in usage_error(m, [flag, WRONG_VALUES[flag]], capsys)


@pytest.mark.parametrize(
    "argv",
    [
        ["--resume"],
        ["--eval-only"],
        ["--predict", "a.png"],
        ["--checkpoint-every", "5"],
        ["--checkpoint", "c", "--predict", "a.png", "--eval-only"],
        ["--checkpoint", "c", "--eval-only", "--resume"],
        ["--checkpoint", "c", "--eval-only", "--checkpoint-every", "5"],
        ["--checkpoint", "c", "--predict", "a.png", "--predict-png", "./c"],
        ["--checkpoint", "c", "--predict", "prediction.png"],
        ["--predict-png", "a.png"],
        ["--checkpoint", "c", "--predict", "a.png", "--models", "cnn"],
        ["--checkpoint", "c", "--out-json", "./c"],
        ["--out-json", ""],
        ["--checkpoint", "c", "--predict", "a.png", "--out-json", "o"],
    ],
)
def test_flags_that_do_not_fit_together(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "error: argument --" in usage_error(m, argv, capsys)


def test_help_shows_every_default() -> None:
    assert run_script(SCRIPT, "--help").returncode == 0
    helps = {action.dest: action.help or "" for action in m.make_parser()._actions}
    fields = {field.name for field in dataclasses.fields(m.Config)} & helps.keys()
    for name in fields - {"data_dir", "conv_channels", "primary_types", "pool"}:
        assert "default: %(default)s" in helps[name], name


def test_presets_and_flags_make_the_config() -> None:
    def config(*argv: str) -> m.Config:
        return m.config_from_args(m.make_parser().parse_args(argv))

    assert config() == m.Config()
    paper = config("--preset", "paper")
    assert (paper.conv_channels, paper.primary_types, paper.decoder) == (256, 32, (512, 1024))
    assert config("--preset", "paper", "--conv-channels", "64") == dataclasses.replace(paper, conv_channels=64)
    assert config("--min-iou", "0", "--pool", "6000") == m.Config(min_iou=0, pool=6000)


@pytest.mark.parametrize("flag", ["--out-json", "--checkpoint"])
def test_an_unwritable_path_is_found_before_training(
    flag: str, digits_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(m, "train", None)
    for path in (tmp_path / "file" / "x", tmp_path):
        error = failure(m, [*flags(small(digits_dir)), flag, str(path)], capsys)
        assert re.fullmatch(rf"error: cannot write {re.escape(str(path))}: .+\n", error)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("old")
    with pytest.raises(TypeError):
        m.save_result(tmp_path / "r.json", {"not": object()})
    assert (tmp_path / "r.json").read_text() == "old"

    def half() -> None:
        with m.atomic_write(tmp_path / "r.json") as stream:
            stream.write(b"half")
            raise OSError(28, "No space left on device")

    with pytest.raises(m.UserError, match="No space"):
        half()
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    assert (tmp_path / "r.json").read_text() == "old"


def test_out_json_table_and_eval_only(digits_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = flags(small(digits_dir))
    files = ["--checkpoint", str(tmp_path / "c.npz"), "--out-json"]
    assert m.main([*argv, *files, str(tmp_path / "a.json")]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    assert out.splitlines()[0] == "custom: 20 composites, IoU at least 0.8; seed 0, 2 epochs of 24"
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["model", *m.MODEL_NAMES]
    result = json.loads((tmp_path / "a.json").read_text())
    assert list(result) == ["experiment", "seed", "dataset", "config", "models", "history", "environment"]
    assert (result["experiment"], result["seed"], result["dataset"]) == ("multimnist_capsnet", 0, "custom")
    assert set(result["environment"]) >= {"python", "numpy", "blas", "threads", "cpu", "git_commit"}
    assert m.Config(**{**result["config"], "decoder": tuple(result["config"]["decoder"])}).n_test == 20
    for name, figures in result["models"].items():
        accuracies = {"set_accuracy", "soft_accuracy", "digit_accuracy"}
        own = {"recon_mse"} if name == "capsnet" else set()
        assert set(figures) == {"n_params", "train_seconds"} | accuracies | own
        assert all(0 <= figures[k] <= 1 for k in accuracies)
        history = result["history"][name]
        losses = {"train_loss"} | ({"train_margin_loss", "train_recon_loss"} if own else set())
        assert set(history) == accuracies | own | losses
        assert {len(v) for v in history.values()} == {2}
        assert all(figures[k] == history[k][-1] for k in accuracies | own)

    assert m.main([*argv, "--eval-only", *files, str(tmp_path / "b.json")]) == 0
    again = json.loads((tmp_path / "b.json").read_text())
    assert {k: v for k, v in again["models"].items() if k != "capsnet"} == {
        k: v for k, v in result["models"].items() if k != "capsnet"
    }
    assert again["models"]["capsnet"] == pytest.approx(result["models"]["capsnet"])
    capsys.readouterr()
    other = ["--eval-only", "--min-iou", "0", "--n-test", "30", "--seed", "7", "--models", "cnn", *files[:2]]
    assert m.main([*argv, *other]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "custom: 30 composites, IoU at least 0; seed 7 (trained with seed 0), 2 epochs of 24"
    assert [line.split()[0] for line in lines[1:]] == ["model", "cnn"]


def test_without_training_no_flag_is_passed_over(
    digits_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "c.npz"
    assert m.main([*flags(small(digits_dir)), "--models", "cnn", "--checkpoint", str(checkpoint)]) == 0
    for action in (["--eval-only"], ["--predict", "a.png"]):
        argv = [*action, "--checkpoint", str(checkpoint)]
        for more, message in (
            (["--routing-iters", "1"], "--routing-iters 3, not 1"),
            (["--preset", "paper"], "--conv-channels 2, not 256"),
            (["--lr", "0.5"], f"--lr {m.Config.lr}, not 0.5"),
        ):
            assert failure(m, [*argv, *more], capsys) == f"error: {checkpoint} was made with {message}\n"
    line = failure(m, ["--eval-only", "--checkpoint", str(checkpoint), "--models", "capsnet"], capsys)
    assert line == f"error: {checkpoint} holds cnn, and not capsnet\n"


def test_resuming_for_one_model_leaves_the_others_in_the_checkpoint(
    digits_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*flags(small(digits_dir)), "--checkpoint", str(tmp_path / "c.npz")]
    assert m.main([*argv, "--models", "capsnet"]) == 0
    original, calls = m.adam_step, 0

    def interrupt(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            os.kill(os.getpid(), signal.SIGINT)
        original(*args)

    monkeypatch.setattr(m, "adam_step", interrupt)
    assert m.main([*argv, "--resume", "--models", "cnn"]) == 130  # in its first epoch
    monkeypatch.undo()
    capsys.readouterr()
    assert m.main([*argv, "--resume", "--models", "capsnet", "--out-json", str(tmp_path / "o.json")]) == 0
    assert list(json.loads((tmp_path / "o.json").read_text())["models"]) == ["capsnet"]
    assert [state.step for state in m.load_checkpoint(tmp_path / "c.npz")[1].values()] == [6, 2]


def test_from_the_shell_with_warnings_as_errors(digits_dir: Path) -> None:
    process = run_script(SCRIPT, *flags(small(digits_dir, n_epochs=1)), "--threads", "2")
    assert (process.returncode, process.stderr) == (0, "")
    process = run_script(SCRIPT, "--lr", "-1")
    assert process.returncode == 2
    message = "argument --lr: -1 is not above 0 and at most 10 (--help shows every flag)"
    assert process.stderr == f"{SCRIPT}: error: {message}\n"
    process = run_script(SCRIPT, *flags(small(digits_dir)), "--data-dir", digits_dir / "nowhere")
    assert process.returncode == 1
    assert re.fullmatch(r"error: --data-dir .*nowhere.*\n", process.stderr)


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints and pictures
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(digits_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained checkpoint; tests must not change it."""
    path = tmp_path_factory.mktemp("trained") / "c.npz"
    assert m.main([*flags(small(digits_dir)), "--models", "capsnet", "--checkpoint", str(path)]) == 0
    return path


def as_text(path: Path) -> bytes:
    return b"hello"


def cut(path: Path) -> bytes:
    return path.read_bytes()[:-1000]


def flipped(path: Path) -> bytes:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    return bytes(content)


def rewritten(change: Callable[[dict[str, Array]], None]) -> Callable[[Path], bytes]:
    def damaged(path: Path) -> bytes:
        with np.load(path) as stored:
            arrays = dict(stored)
        change(arrays)
        stream = io.BytesIO()
        np.savez(stream, **arrays)
        return stream.getvalue()

    return damaged


def array_file() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.zeros(3))
    return stream.getvalue()


def of_another(arrays: dict[str, Array]) -> None:
    header = json.loads(str(arrays["header"])) | {"experiment": "other"}
    arrays["header"] = np.array(json.dumps(header))


DAMAGES: dict[str, Callable[[Path], bytes]] = {
    "empty": lambda path: b"",
    "text": as_text,
    "cut": cut,
    "flipped": flipped,
    "a single array": lambda path: array_file(),
    "no header": rewritten(lambda arrays: arrays.pop("header")),  # type: ignore[arg-type]
    "no weights": rewritten(lambda arrays: arrays.pop("capsnet/routing.w")),  # type: ignore[arg-type]
    "other shape": rewritten(lambda arrays: arrays.update({"capsnet/conv1.b": np.zeros(5, np.float32)})),
    "other experiment": rewritten(of_another),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_checkpoint_is_one_line(
    damage: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.npz"
    path.write_bytes(DAMAGES[damage](checkpoint))
    argv = ["--checkpoint", str(path), "--predict", "x.png", "--predict-png", str(tmp_path / "p.png")]
    error = failure(m, argv, capsys)
    assert re.fullmatch(rf"error: {re.escape(str(path))} is (not a readable|a) checkpoint of .*\n", error)
    assert zipfile.is_zipfile(checkpoint)


def test_a_checkpoint_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.npz"
    line = failure(m, ["--checkpoint", str(path), "--eval-only"], capsys)
    assert line == f"error: there is no checkpoint {path}\n"


def picture(folder: Path, array: Array) -> Path:
    path = folder / f"{len(list(folder.iterdir()))}.png"
    iio.imwrite(path, array)
    return path


def test_a_picture_is_read_as_it_is(tmp_path: Path) -> None:
    config = small()
    source = overlays()
    image = (255 * source.render(source.draw(np.random.default_rng(0), 1)).images[0]).astype(np.uint8)
    expected = image / np.float32(image.max())
    for drawing in (image, 255 - image, np.stack([image] * 3, axis=2), np.dstack([0 * image] * 3 + [image])):
        np.testing.assert_allclose(m.read_picture(picture(tmp_path, drawing), config), expected, atol=0.01)
    deep = picture(tmp_path, image.astype(np.uint16) * 257)
    np.testing.assert_allclose(m.read_picture(deep, config), expected, atol=0.01)
    digit = strokes().test_images[0]
    read = m.read_picture(picture(tmp_path, digit), config)
    np.testing.assert_allclose(read[4:32, 4:32], digit / digit.max(), atol=0.01)


@pytest.mark.parametrize("size", [(5, 5), (300, 200), (17, 90), (700, 3)])
def test_pictures_of_odd_sizes_are_scaled_to_the_ink(size: tuple[int, int], tmp_path: Path) -> None:
    array = np.full(size, 240, np.uint8)
    array[size[0] // 3 : size[0] // 3 * 2 + 1, 1 : max(2, size[1] // 2)] = 20
    read = m.read_picture(picture(tmp_path, array), small())
    assert read.shape == (36, 36)
    assert read.max() == 1
    rows, columns = (np.flatnonzero((read > 0.3).any(axis=axis)) for axis in (1, 0))
    assert abs(max(np.ptp(rows), np.ptp(columns)) + 1 - m.INK_SIDE) <= 1
    assert abs(rows.mean() - 17.5) <= 1
    assert abs(columns.mean() - 17.5) <= 1


def test_predict_names_two_digits_and_draws_them(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, states = m.load_checkpoint(checkpoint)
    source = overlays()
    batch = source.render(source.draw(np.random.default_rng(0), 2))
    images = (255 * batch.images).astype(np.uint8)
    paths = [picture(tmp_path, image) for image in images]
    out = tmp_path / "drawn.png"
    assert m.main(["--checkpoint", str(checkpoint), "--predict", *map(str, paths), "--predict-png", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    read = np.stack([m.read_picture(path, config) for path in paths])
    lengths, _ = m.capsnet_forward(states["capsnet"].params, read, config, m.Workspace())
    for line, path, length in zip(printed[1:], paths, lengths.T, strict=False):
        first, second = m.top_labels(length[None], 2)[0]
        assert line.startswith(f"{path} {first} ({length[first]:.2f})    {second} ({length[second]:.2f})   ")
    assert printed[-1].endswith(str(out))
    assert iio.imread(out).shape == (2 * 38 * 4, 3 * 38 * 4)


def test_pictures_that_cannot_be_read_are_one_line(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.png").write_text("no picture")
    blank = picture(tmp_path, np.full((50, 40), 255, np.uint8))
    for path, what in (
        (tmp_path / "nowhere.png", "there is no picture"),
        (tmp_path / "text.png", "is not a picture"),
        (tmp_path, "is not a picture"),
        (blank, "has no ink"),
    ):
        argv = ["--checkpoint", str(checkpoint), "--predict", str(path), "--predict-png", str(tmp_path / "p.png")]
        assert m.main(argv) == 1
        out, error = capsys.readouterr()
        assert out == ""
        assert what in error
        assert error.count("\n") == 1


# ----------------------------------------------------------------------------------------------------------------------
# Real digits
# ----------------------------------------------------------------------------------------------------------------------


@needs_mnist
def test_sixty_steps_on_mnist() -> None:
    config = m.Config(dataset="mnist", data_dir=str(MNIST), n_epochs=1, n_train=60 * 16, batch_size=16, n_test=200)
    data = m.make_data(config)
    assert data.name == "mnist"
    assert (len(data.train.images), len(data.test.images)) == (60_000, 200)
    _, history = m.train(m.make_models(config)["capsnet"], config, data)
    assert history["train_margin_loss"][0] < 1.0
    assert history["digit_accuracy"][0] > 0.25  # chance: 0.2
    assert history["recon_mse"][0] < 0.07
