"""multimnist_capsnet: composites, what training does to parameters, and pictures that are read, on drawn digits."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import multimnist_capsnet as multimnist
from data.pictures import read_strokes
from fast.workers import SERIAL
from helpers import Array, digits_folder, strokes
from multimnist_capsnet import init_state


SMALL = {"conv_channels": 2, "primary_types": 1, "decoder": (16, 16), "n_test": 20, "n_train": 24, "batch_size": 8}


def small(**changes: Any) -> multimnist.Config:
    return multimnist.Config(**{**SMALL, "dataset": "mnist", "data_dir": digits_folder(), "n_epochs": 2, **changes})


def overlays(**changes: Any) -> multimnist.Overlays:
    return multimnist.Overlays(strokes().train_images, strokes().train_labels, small(**changes))


# --- Composites -------------------------------------------------------------------------------------------------------


def boxes_iou(a: Array, b: Array) -> float:
    """Of two 28x28 boxes shifted by a and b, by counting pixels."""
    canvas = np.zeros((2, 60, 60), bool)
    for k, (dy, dx) in enumerate((a, b)):
        canvas[k, 16 + dy : 44 + dy, 16 + dx : 44 + dx] = True
    return float((canvas[0] & canvas[1]).sum() / (canvas[0] | canvas[1]).sum())


@pytest.mark.parametrize("min_iou", [0, 0.6, 0.8, 1])
def test_admissible_shifts_are_all_those_that_overlap_enough(min_iou: float) -> None:
    allowed = {tuple(pair.ravel()) for pair in multimnist.admissible_shifts(2, min_iou)}
    s = range(-2, 3)
    for ay, ax, by, bx in itertools.product(s, s, s, s):
        assert ((ay, ax, by, bx) in allowed) == (boxes_iou(np.array([ay, ax]), np.array([by, bx])) >= min_iou)
    assert len(multimnist.admissible_shifts(4, 0)) == 9**4


def test_a_composite_is_the_maximum_of_two_shifted_digits_of_different_classes() -> None:
    source = overlays()
    which, shift = source.draw(np.random.default_rng(0), 200)
    batch = source.render(which, shift)
    assert (batch.images.shape, batch.images.dtype) == ((200, 36, 36), np.float32)
    np.testing.assert_array_equal(batch.labels, source.labels[which])
    assert (batch.labels[:, 0] != batch.labels[:, 1]).all()
    for n in range(200):
        assert boxes_iou(*shift[n]) >= 0.8
        for k in range(2):
            canvas = np.zeros((36, 36), np.float32)
            y, x = 4 + shift[n, k]
            canvas[y : y + 28, x : x + 28] = source.images[which[n, k]] / np.float32(255)
            np.testing.assert_allclose(batch.sources[n, k], canvas, rtol=1e-6)
    np.testing.assert_array_equal(batch.images, batch.sources.max(axis=1))
    source.overlay = "sum"
    summed = source.render(which, shift).images
    np.testing.assert_allclose(summed, np.clip(batch.sources[:, 0] + batch.sources[:, 1], 0, 1))
    assert (summed > batch.images).any()
    assert 0 <= batch.images.min() < batch.images.max() <= 1


def test_every_digit_is_trained_on() -> None:
    """The first of a pair is from all, the second from those of the nine other classes, each image as likely as
    another; each has a shift of its own."""
    labels = np.repeat(np.arange(10), np.arange(5, 15)).astype(np.uint8)
    source, n = multimnist.Overlays(np.zeros((len(labels), 28, 28), np.uint8), labels, small()), 200_000
    which, shift = source.draw(np.random.default_rng(0), n)
    counts, total = np.bincount(labels), len(labels)
    others = counts / total / (total - counts)  # of the first digit's classes, to each image of another class
    for one, expected in zip(which.T, (np.full(total, 1 / total), (others.sum() - others)[labels]), strict=True):
        np.testing.assert_allclose(np.bincount(one, minlength=total) / n, expected, rtol=0.15)
    assert (np.abs(shift).max(axis=(0, 1)) == 4).all()
    assert ((shift[:, 0] != shift[:, 1]).mean(axis=0) > 0.5).all()


def test_one_class_alone_is_refused() -> None:
    with pytest.raises(multimnist.UserError, match="needs two"):
        multimnist.Overlays(np.zeros((5, 28, 28), np.uint8), np.full(5, 3, np.uint8), small())


def test_batches_are_fresh_and_the_test_set_is_fixed() -> None:
    """Nothing of the network shifts the data."""
    config, wider = small(), {"conv_channels": 7, "routing_iters": 1, "n_train": 80}
    data, again, other, wide = (multimnist.make_data(small(**changes)) for changes in ({}, {}, {"seed": 1}, wider))
    for same in (again, wide):
        np.testing.assert_array_equal(same.test.images, data.test.images)
    assert (other.test.images != data.test.images).any()
    steps = ((data, 0), (data, 1), (again, 0))
    first, second, repeated = (multimnist.training_batch(of, config, step) for of, step in steps)
    assert (first.images != second.images).any()
    np.testing.assert_array_equal(first.images, repeated.images)


# --- Networks and training --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nothing_is_nan_at_zero_or_far_out(dtype: type) -> None:
    for scale in (0, 1e-20, 1e-8, 1e4):
        s: Array = np.full((3, 8), scale, dtype)
        v, cache = multimnist.squash_forward(s)
        assert np.isfinite(v).all()
        assert np.isfinite(multimnist.squash_backward(np.ones_like(s), cache)).all()
        assert (np.linalg.norm(v, axis=-1) < 1.001).all()
    config = small(dtype=np.dtype(dtype).name)
    params = multimnist.capsnet_init(np.random.default_rng(0), config)
    for brightness in (0, 1):
        image: Array = np.full((2, 36, 36), brightness, dtype)
        batch = multimnist.Batch(image, np.array([[0, 1], [2, 3]]), np.stack([image, image], axis=1))
        losses, grads = multimnist.capsnet_loss_and_grads(params, batch, 2, config)
        assert all(map(math.isfinite, losses.values()))
        assert all(np.isfinite(g).all() for g in grads.values())


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", multimnist.MODEL_NAMES)
def test_muon_is_for_inner_weights_and_weights_alone_decay(name: str, plain: bool) -> None:
    config = small(dtype="float64", plain=plain)
    inner = {"capsnet": {"conv1.w", "primary.w", "routing.w"}}.get(name, {"conv1.w", "conv2.w", "hidden.w"})
    model = multimnist.make_models(config)[name]

    def updated(optimizer: str, decay: float, lr: float = 0.01) -> dict[str, Array]:
        state, rng = init_state(model, config), np.random.default_rng(1)
        for p in state.params.values():
            p += 0.1  # biases begin at zero, which would not shrink
        grads = {key: rng.standard_normal(p.shape) for key, p in state.params.items()}
        changed = dataclasses.replace(config, optimizer=optimizer, weight_decay=decay)
        multimnist.update(state, [grads], lr, changed, SERIAL)
        return state.params

    start = updated("adam", 0, lr=0)
    for optimizer in ("adam", "muon"):
        steps, decayed = updated(optimizer, 0), updated(optimizer, 3)
        for key, before in start.items():
            expected = 0.03 * before if key.endswith(".w") else np.zeros_like(before)
            np.testing.assert_allclose(steps[key] - decayed[key], expected, atol=1e-12, err_msg=key)
            assert (steps[key] != before).all()
    adam, muon = updated("adam", 0), updated("muon", 0)
    for key, before in start.items():
        if key in inner:
            assert math.sqrt(np.square(muon[key] - before).mean()) == pytest.approx(0.01 * 0.2, rel=0.01), key
            n_outputs = math.prod(before.shape[-2 if key == "routing.w" else -1 :])
            stretch = np.linalg.svd((muon[key] - before).reshape(-1, n_outputs), compute_uv=False)
            assert stretch.min() == pytest.approx(stretch.max(), rel=0.01), key
        else:
            np.testing.assert_allclose(muon[key], adam[key], rtol=1e-12, err_msg=key)


def test_the_learning_rate_rises_then_falls() -> None:
    config = multimnist.Config(n_epochs=10, n_train=16_000, batch_size=16, lr=1.0)  # 10,000 steps
    rates = [config.lr_at(t) for t in (0, multimnist.WARMUP, 5000, 9999)]
    np.testing.assert_allclose(rates, [1 / multimnist.WARMUP, 0.99, 0.5, 1e-4])


# --- Pictures ---------------------------------------------------------------------------------------------------------


BOX = 24  # pixels: what two overlapping digits fill


def picture(folder: Path, array: Array) -> Path:
    path = folder / f"{len(list(folder.iterdir()))}.png"
    Image.fromarray(array).save(path)
    return path


def test_a_picture_is_read_as_it_is(tmp_path: Path) -> None:
    source = overlays()
    image = (255 * source.render(*source.draw(np.random.default_rng(0), 1)).images[0]).astype(np.uint8)
    for drawing in (image, 255 - image, 178 - (0.7 * image).astype(np.uint8), np.dstack([0 * image] * 3 + [image])):
        read = read_strokes(picture(tmp_path, drawing), 36, BOX)
        np.testing.assert_allclose(read, image / np.float32(image.max()), atol=0.01)
    block, wide = np.random.default_rng(0).integers(100, 256, (BOX, BOX)), np.zeros((61, 50), np.uint8)
    wide[20:44, 9:33] = block  # of the size that strokes are scaled to
    read = read_strokes(picture(tmp_path, wide), 36, BOX)
    np.testing.assert_allclose(read[6:30, 6:30], block / block.max(), atol=0.01)
    digit = strokes().test_images[0]
    read = read_strokes(picture(tmp_path, digit), 36, BOX)
    np.testing.assert_allclose(read[4:32, 4:32], digit / digit.max(), atol=0.01)


@pytest.mark.parametrize("size", [(5, 5), (300, 200), (17, 90), (700, 3)])
def test_pictures_of_odd_sizes_are_scaled_to_the_ink(size: tuple[int, int], tmp_path: Path) -> None:
    array = np.full(size, 240, np.uint8)
    array[size[0] // 3 : size[0] // 3 * 2 + 1, 1 : max(2, size[1] // 2)] = 20
    read = read_strokes(picture(tmp_path, array), 36, BOX)
    assert read.shape == (36, 36)
    assert read.max() == 1
    rows, columns = (np.flatnonzero((read > 0.3).any(axis=axis)) for axis in (1, 0))
    assert abs(max(np.ptp(rows), np.ptp(columns)) + 1 - BOX) <= 1
    assert abs(rows.mean() - 17.5) <= 1
    assert abs(columns.mean() - 17.5) <= 1
