"""smallnorb_novel_viewpoint.py: data, training, and the share of the true class."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import smallnorb_novel_viewpoint as smallnorb
from data.norb_files import shrink
from fast.workers import Workers
from helpers import Array
from more import conv_matrix_capsules as conv
from smallnorb_novel_viewpoint import init_state


# --- Voxel data -------------------------------------------------------------------------------------------------------


def draw_by_loop(label: int, azimuth: float, elevation: float) -> Array:
    """One image, one point and one pixel at a time."""
    image, (points, mask) = np.zeros((32, 32)), smallnorb.voxel_points()
    alpha, epsilon = math.radians(azimuth), math.radians(elevation)
    for x, y, z in points[label][mask[label] == 1]:
        x, z = x * math.cos(alpha) + z * math.sin(alpha), -x * math.sin(alpha) + z * math.cos(alpha)  # about y
        y, z = y * math.cos(epsilon) - z * math.sin(epsilon), y * math.sin(epsilon) + z * math.cos(epsilon)  # about x
        brightness = 0.6 + 0.4 * (z + 1) / 2
        column, row = 15.5 + 12 * x, 15.5 - 12 * y
        for i, j in np.ndindex(32, 32):
            image[i, j] += brightness * math.exp(-((i - row) ** 2 + (j - column) ** 2) / (2 * 1.6**2))
    return np.clip(image, 0, 1)[..., None]


def test_rendering_is_the_loop() -> None:
    labels = np.arange(5)
    azimuths, elevations = 37.0 + 71 * labels, 10.0 + 9 * labels
    expected = [draw_by_loop(k, azimuths[k], elevations[k]) for k in range(5)]
    np.testing.assert_allclose(smallnorb.render_voxels(labels, azimuths, elevations, None), expected, atol=1e-6)


def test_a_full_circle_has_no_view_twice() -> None:
    np.testing.assert_allclose(smallnorb.evenly_spaced((0, 360), 6), [0, 60, 120, 180, 240, 300])
    np.testing.assert_allclose(smallnorb.evenly_spaced((0, 150), 6), [0, 30, 60, 90, 120, 150])


def test_no_image_of_one_set_is_in_another() -> None:
    """Nor has it the same noise: the held-out set is moved onto the training views, so that only the noise can tell
    the sets apart."""
    config = smallnorb.Config(n_test_views=6, train_azimuths=(0, 150), test_azimuths=(200, 330))
    data, spaced = smallnorb.make_voxel_data(config), smallnorb.evenly_spaced
    again = smallnorb.generator(0, smallnorb.Stream.DATA, 2)
    moved = smallnorb.voxel_views(smallnorb.Config(), spaced((0, 150), 6), spaced((10, 50), 3), 2, again)
    data = data._replace(held_out=moved)
    images = [image.tobytes() for split in data for image in split.images]
    assert len(set(images)) == len(images)
    clean = [smallnorb.render_voxels(d.labels, d.azimuths, d.elevations, None)[:100] for d in data]
    middle = np.all([(c > 0.2) & (c < 0.8) for c in clean], axis=0)  # where the clip leaves the noise alone
    assert middle.sum() > 500
    noise = [(split.images[:100] - c)[middle] for split, c in zip(data, clean, strict=True)]
    assert np.abs(np.corrcoef(noise) - np.eye(3)).max() < 0.2


# --- Standardised images ----------------------------------------------------------------------------------------------


def test_each_channel_of_each_image_is_standardized() -> None:
    rng = np.random.default_rng(0)
    images = rng.random((4, 32, 32, 2)).astype(np.float32) * rng.uniform(0.1, 1, (4, 1, 1, 2)).astype(np.float32)
    before, out = images.copy(), smallnorb.standardized(images)
    np.testing.assert_array_equal(images, before)
    np.testing.assert_allclose(out.mean(axis=(1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(out.std(axis=(1, 2)), 1, atol=1e-4)
    np.testing.assert_array_equal(smallnorb.standardized(images[2:3]), out[2:3])  # no other image matters
    np.testing.assert_array_equal(smallnorb.standardized(images[..., 1:]), out[..., 1:])  # and no other channel


@pytest.mark.parametrize("level", [0.0, 0.1, 7.0, 255.0])
def test_an_image_of_one_grey_level_becomes_nothing(level: float) -> None:
    """No rounding error is stretched to an image."""
    images = np.full((2, 33, 31, 2), level, np.float32)
    images[1, 0, 0, 1] += 1 if level > 1 else 1 / 255
    found = smallnorb.standardized(images)
    assert not found[0].any()
    assert not found[1, :, :, 0].any()
    assert found[1, :, :, 1].std() == pytest.approx(1, abs=0.05)


def test_shrunk_images_are_normalised_and_are_means_of_four_pixels() -> None:
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 256, (3, 2, 96, 96), dtype=np.uint8)
    out = smallnorb.standardized(shrink(pairs))
    assert (out.shape, out.dtype) == ((3, 48, 48, 2), np.float32)
    means = np.array([[pairs[1, 1, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].mean() for j in range(48)] for i in range(48)])
    np.testing.assert_allclose(out[1, :, :, 1], (means - means.mean()) / means.std(), atol=1e-4)


# --- Training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [smallnorb, conv])
def test_the_loss_is_told_how_much_of_the_training_is_done(script: Any) -> None:
    few = {"batch_size": 4, "n_train_views": 2, "n_test_views": 2, "n_elev": 1, "n_per_combo": 1, "cnn_epochs": 3}
    config = script.Config(dataset="voxels", **few)
    model, workers = script.make_models(config)["cnn"], [Workers()] * (script is conv)
    state, loss = init_state(model, config), Mock(wraps=model.loss)
    script.train(model._replace(loss=loss), config, script.make_data(config), state, *workers, lambda *_: None)
    np.testing.assert_allclose([call.args[2] for call in loss.call_args_list], np.linspace(0, 1, 9))


def test_choices_about_the_network_do_not_shift_the_data() -> None:
    data = smallnorb.make_data(smallnorb.Config())
    assert not np.array_equal(smallnorb.make_data(smallnorb.Config(seed=1)).train.images, data.train.images)
    other = smallnorb.make_data(smallnorb.Config(em_iters=1, loss="spread", n_epochs=1, lr=1.0, n_test_views=3))
    np.testing.assert_array_equal(other.train.images, data.train.images)
    np.testing.assert_array_equal(other.familiar.images, data.familiar.images)


def test_share_of_the_true_class() -> None:
    """One iteration assigns evenly, so every class holds a fifth; with more, the share is the last iteration's."""
    even, config = (smallnorb.Config(em_iters=n, n_per_combo=1) for n in (1, 3))
    data, model = smallnorb.make_data(config), smallnorb.make_models(config)["capsules"]
    state = init_state(model, config)
    r = model.forward(state.params, data.train.images)[1].routing.m_steps[-1]
    mass = r.weight * r.mass[:, None]  # each child's part, (B, I, J)
    by_hand = np.mean([mass[n, :, k].sum() / mass[n].sum() for n, k in enumerate(data.train.labels)])
    assert by_hand != pytest.approx(1 / smallnorb.N_CLASSES, rel=1e-3)
    assert smallnorb.true_class_mass(model, state.params, data.train) == pytest.approx(by_hand, rel=1e-5)
    evenly = smallnorb.true_class_mass(smallnorb.make_models(even)["capsules"], state.params, data.train)
    assert evenly == pytest.approx(1 / smallnorb.N_CLASSES, rel=1e-6)
    state.history = {"familiar_accuracy": [0.5], "held_out_accuracy": [0.5]}
    found = smallnorb.make_result(config, {"capsules": state}, data)["models"]["capsules"]
    assert found["true_class_mass"] == smallnorb.true_class_mass(model, state.params, data.familiar)
