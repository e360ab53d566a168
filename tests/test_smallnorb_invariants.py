"""What must hold in smallnorb_novel_viewpoint.py whatever its weights: data, routing, losses, seeds."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

import smallnorb_novel_viewpoint as s
from support.run import init_state

Array = np.ndarray
TINY = s.Config(n_epochs=2, batch_size=4, n_train_views=2, n_test_views=2, n_elev=1, n_per_combo=1)


def tiny(**changes: object) -> s.Config:
    return dataclasses.replace(TINY, **changes)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------------------
# Voxel data
# ----------------------------------------------------------------------------------------------------------------------

Point = tuple[float, float, float]


def spread_out(start: float, stop: float, n: int) -> list[float]:
    return [start + (stop - start) * k / (n - 1) for k in range(n)]


def table_of_points() -> dict[str, list[Point]]:
    """The objects' definition, written out once more."""
    arm = (-0.7, -0.35, 0.35, 0.7)
    edge = spread_out(-0.7, 0.7, 5)
    ends = list(itertools.product((-0.7, 0.7), repeat=2))
    reach = (0.17, 0.34, 0.51, 0.68, 0.85)
    back = [-0.7 * t for t in reach]
    return {
        "cross": [(0, 0, 0), *((t, 0, 0) for t in arm), *((0, t, 0) for t in arm), *((0, 0, t) for t in arm)],
        "L": [
            *((t, -0.7, -0.6) for t in spread_out(-0.8, 0.8, 9)),
            *((-0.8, t, -0.6) for t in spread_out(-0.6, 0.8, 8)),
            *((-0.8, -0.7, t) for t in spread_out(-0.5, 0.5, 5)),
        ],
        "T": [
            *((t, 0.7, 0) for t in spread_out(-0.8, 0.8, 9)),
            *((0, t, 0) for t in spread_out(-0.7, 0.6, 7)),
            *((0, 0.7, t) for t in spread_out(-0.4, 0.4, 5)),
        ],
        "frame": [p for t in edge for u, v in ends for p in ((t, u, v), (u, t, v), (u, v, t))],
        "tripod": [
            (0, 0, 0),
            *((t, 0, 0) for t in reach),
            *((0, t, 0) for t in reach),
            *((t, t, t) for t in back),
        ],
    }


def objects_of_the_script() -> dict[str, Array]:
    points, mask = s.voxel_points()
    return {name: points[k][mask[k] == 1] for k, name in enumerate(s.VOXEL_CLASSES)}


def test_numbers_of_points() -> None:
    assert [len(p) for p in objects_of_the_script().values()] == [13, 22, 21, 60, 16]
    _, mask = s.voxel_points()
    assert set(np.unique(mask)) == {0.0, 1.0}


@pytest.mark.parametrize("name", s.VOXEL_CLASSES)
def test_positions_of_points(name: str) -> None:
    def rounded(points: Array) -> Counter[Point]:
        return Counter(tuple(np.round(p, 9) + 0.0) for p in np.asarray(points, float))  # + 0.0: no negative zeros

    expected = table_of_points()[name]
    assert rounded(objects_of_the_script()[name]) == rounded(np.array(expected))


def draw_by_loop(label: int, azimuth: float, elevation: float) -> Array:
    """One image, one point and one pixel at a time."""
    image = np.zeros((32, 32))
    alpha, epsilon = math.radians(azimuth), math.radians(elevation)
    for x, y, z in objects_of_the_script()[s.VOXEL_CLASSES[label]]:
        x, z = x * math.cos(alpha) + z * math.sin(alpha), -x * math.sin(alpha) + z * math.cos(alpha)  # about y
        y, z = y * math.cos(epsilon) - z * math.sin(epsilon), y * math.sin(epsilon) + z * math.cos(epsilon)  # about x
        brightness = 0.6 + 0.4 * (z + 1) / 2
        column, row = 15.5 + 12 * x, 15.5 - 12 * y
        for i, j in np.ndindex(32, 32):
            image[i, j] += brightness * math.exp(-((i - row) ** 2 + (j - column) ** 2) / (2 * 1.6**2))
    return np.clip(image, 0, 1)[..., None]


@pytest.mark.parametrize("label", range(5))
def test_rendering_is_the_loop(label: int) -> None:
    azimuth, elevation = 37.0 + 71 * label, 10.0 + 9 * label
    image = s.render_voxels(np.array([label]), np.array([azimuth]), np.array([elevation]), None)[0]
    np.testing.assert_allclose(image, draw_by_loop(label, azimuth, elevation), atol=1e-6)


def views(n: int = 40) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 5, n), rng.uniform(0, 360, n), rng.uniform(10, 50, n)


def test_rendering_a_set_is_rendering_each_image() -> None:
    labels, azimuths, elevations = views()
    together = s.render_voxels(labels, azimuths, elevations, None)
    assert together.shape == (40, 32, 32, 1)
    for k in range(40):
        alone = s.render_voxels(labels[k : k + 1], azimuths[k : k + 1], elevations[k : k + 1], None)
        np.testing.assert_allclose(together[k], alone[0], atol=1e-6)


def test_a_full_turn_changes_nothing() -> None:
    labels, azimuths, elevations = views()
    image = s.render_voxels(labels, azimuths, elevations, None)
    for turn in (360, -360, 720):
        np.testing.assert_allclose(s.render_voxels(labels, azimuths + turn, elevations, None), image, atol=1e-6)
    assert np.abs(s.render_voxels(labels, azimuths + 90, elevations, None) - image).max() > 0.3


def test_images_stay_in_range_and_noise_has_its_size() -> None:
    labels, azimuths, elevations = views(200)
    clean = s.render_voxels(labels, azimuths, elevations, None)
    noisy = s.render_voxels(labels, azimuths, elevations, np.random.default_rng(0))
    for images in (clean, noisy):
        assert images.dtype == np.float32
        assert images.min() >= 0
        assert images.max() <= 1
    assert clean.max() > 0.9
    middle = (clean > 0.3) & (clean < 0.7)  # where the clip does not reach
    assert middle.sum() > 1000
    assert (noisy - clean)[middle].std() == pytest.approx(0.04, rel=0.05)
    assert abs((noisy - clean)[middle].mean()) < 0.002


def test_sizes_and_views_of_the_sets() -> None:
    data = s.make_data(s.Config())
    assert [len(split.labels) for split in data] == [450, 180, 180]
    for split in data:
        assert len(set(Counter(split.labels.tolist()).values())) == 1  # as many of each class
        assert set(split.elevations) == {10, 30, 50}
        assert split.images.shape == (len(split.labels), 32, 32, 1)
    assert set(data.train.azimuths) == set(data.familiar.azimuths) == {0, 30, 60, 90, 120, 150}
    assert set(data.held_out.azimuths) == {200, 226, 252, 278, 304, 330}


def test_a_full_circle_has_no_view_twice() -> None:
    np.testing.assert_allclose(s.evenly_spaced((0, 360), 6), [0, 60, 120, 180, 240, 300])
    np.testing.assert_allclose(s.evenly_spaced((0, 150), 6), [0, 30, 60, 90, 120, 150])


def test_no_image_of_one_set_is_in_another() -> None:
    # The held-out set is moved onto the training views, so that only the noise can tell the sets apart.
    data = s.make_data(s.Config(test_azimuths=(0, 150)))
    images = [image.tobytes() for split in data for image in split.images]
    assert len(set(images)) == len(images)
    # From the same generator the first images of two sets would have the same noise (where the clip leaves it alone).
    clean = [s.render_voxels(d.labels, d.azimuths, d.elevations, None)[:100] for d in data]
    middle = np.all([(c > 0.2) & (c < 0.8) for c in clean], axis=0)
    assert middle.sum() > 500
    for a, b in itertools.combinations(range(3), 2):
        noise = [(data[k].images[:100] - clean[k])[middle] for k in (a, b)]
        assert abs(np.corrcoef(*noise)[0, 1]) < 0.2


def test_elevations_can_be_held_out() -> None:
    config = s.Config(
        train_elevations=(10, 35), test_elevations=(40, 70), train_azimuths=(0, 360), test_azimuths=(0, 360)
    )
    assert (config.held_out, s.Config().held_out) == ("elevation", "azimuth")
    data = s.make_data(config)
    assert data.train.elevations.max() == 35
    assert set(data.held_out.elevations) == {40, 55, 70}
    assert set(data.train.azimuths) == set(data.held_out.azimuths)


# ----------------------------------------------------------------------------------------------------------------------
# Standardised images
# ----------------------------------------------------------------------------------------------------------------------


def test_each_channel_of_each_image_is_standardized() -> None:
    rng = np.random.default_rng(0)
    images = rng.random((4, 32, 32, 2)).astype(np.float32) * rng.uniform(0.1, 1, (4, 1, 1, 2)).astype(np.float32)
    before, out = images.copy(), s.standardized(images)
    np.testing.assert_array_equal(images, before)
    np.testing.assert_allclose(out.mean(axis=(1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(out.std(axis=(1, 2)), 1, atol=1e-4)
    np.testing.assert_array_equal(s.standardized(images[2:3]), out[2:3])  # no other image matters
    np.testing.assert_array_equal(s.standardized(images[..., 1:]), out[..., 1:])  # and no other channel
    assert not s.standardized(np.full((1, 32, 32, 1), 0.5, np.float32)).any()  # an even image has no variance


def test_standardized_voxels_are_those_of_the_raw_images() -> None:
    raw = s.make_data(s.Config())
    for split, other in zip(s.make_data(s.Config(standardize="image")), raw, strict=True):
        np.testing.assert_array_equal(split.images, s.standardized(other.images))
        np.testing.assert_array_equal(split.labels, other.labels)


# ----------------------------------------------------------------------------------------------------------------------
# Preparation of real images
# ----------------------------------------------------------------------------------------------------------------------


def test_shrunk_images_are_normalised_and_are_means_of_four_pixels() -> None:
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 256, (3, 2, 96, 96), dtype=np.uint8)
    out = s.shrink(pairs)
    assert out.shape == (3, 48, 48, 2)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out.mean(axis=(1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(out.std(axis=(1, 2)), 1, atol=1e-4)
    means = np.array([[pairs[1, 1, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].mean() for j in range(48)] for i in range(48)])
    np.testing.assert_allclose(out[1, :, :, 1], (means - means.mean()) / means.std(), atol=1e-4)
    assert np.isfinite(s.shrink(np.full((1, 2, 96, 96), 7, np.uint8))).all()  # an even image has no variance


def test_training_crops_are_drawn_for_each_image_and_test_crops_not_at_all() -> None:
    image = np.random.default_rng(0).random((1, 48, 48, 2)).astype(np.float32)
    batch = np.repeat(image, 32, axis=0)
    test_crop = s.crop(batch, None)
    np.testing.assert_array_equal(test_crop, batch[:, 8:40, 8:40])
    train_crop = s.crop(batch, np.random.default_rng(1))
    assert train_crop.shape == test_crop.shape == (32, 32, 32, 2)
    assert len({c.tobytes() for c in train_crop}) == 32
    offsets = set()
    for c in train_crop:  # each is a window of the image, under a contrast and a brightness
        best = None
        for i, j in np.ndindex(17, 17):
            window = image[0, i : i + 32, j : j + 32]
            slope, intercept = np.polyfit(window[::5, ::5].ravel(), c[::5, ::5].ravel(), 1)
            if np.allclose(slope * window + intercept, c, atol=1e-4):
                best = (i, j)
                assert 0.8 <= slope <= 1.2
                assert -0.2 <= intercept <= 0.2
                break
        assert best is not None
        offsets.add(best)
    assert len({i for i, _ in offsets}) > 5
    assert len({j for _, j in offsets}) > 5


def test_voxel_images_are_not_cropped_or_changed() -> None:
    images = np.random.default_rng(0).random((3, 32, 32, 1))
    np.testing.assert_array_equal(s.crop(images, np.random.default_rng(0)), images)


# ----------------------------------------------------------------------------------------------------------------------
# Routing
# ----------------------------------------------------------------------------------------------------------------------


def routing_inputs(n: int = 4, n_in: int = 6, n_out: int = 5, d: int = 16, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "votes": rng.standard_normal((n, n_in, n_out, d)),
        "a_in": rng.uniform(0.05, 0.95, (n, n_in)),
        "beta_a": rng.standard_normal(n_out),
        "beta_v": 0.2 * rng.standard_normal(n_out),
    }


def test_assignments_sum_to_one_over_the_parents_at_every_iteration() -> None:
    _, _, cache = s.em_routing_forward(**routing_inputs(), lambdas=[1.0] * 4)
    assignments = [iteration.r for iteration in cache.m_steps]
    assert len(assignments) == 4
    for r in assignments:
        assert r.shape == (4, 6, 5)
        np.testing.assert_allclose(r.sum(axis=2), 1, atol=1e-12)
        assert (r >= 0).all()
    np.testing.assert_array_equal(assignments[0], 1 / 5)
    assert np.abs(assignments[1].sum(axis=1) - 6 / 5).max() > 0.1  # and not over the children


def test_routing_keeps_nothing_between_calls() -> None:
    inputs = routing_inputs()
    first = s.em_routing_forward(**inputs, lambdas=[1.0] * 3)
    s.em_routing_forward(**routing_inputs(seed=1), lambdas=[1.0] * 3)
    again = s.em_routing_forward(**inputs, lambdas=[1.0] * 3)
    for a, b in zip(first[:2], again[:2], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("policy", ["exact", "stop"])
def test_routing_changes_neither_inputs_nor_upstream(policy: str) -> None:
    inputs = routing_inputs()
    before = {name: x.copy() for name, x in inputs.items()}
    mu, a, cache = s.em_routing_forward(**inputs, lambdas=[1.0] * 3)
    dmu, da = np.ones_like(mu), np.ones_like(a)
    s.em_routing_backward(dmu, da, cache, policy)
    for name, x in inputs.items():
        np.testing.assert_array_equal(x, before[name])
    assert (dmu == 1).all()
    assert (da == 1).all()


@pytest.mark.parametrize("n_iters", [1, 3])
def test_an_input_activation_changes_poses_and_activations(n_iters: int) -> None:
    inputs = routing_inputs()
    mu, a, _ = s.em_routing_forward(**inputs, lambdas=[1.0] * n_iters)
    inputs["a_in"] = inputs["a_in"].copy()
    inputs["a_in"][2, 3] *= 0.5
    new_mu, new_a, _ = s.em_routing_forward(**inputs, lambdas=[1.0] * n_iters)
    assert np.abs(new_mu[2] - mu[2]).max() > 1e-3
    assert np.abs(new_a[2] - a[2]).max() > 1e-6
    np.testing.assert_allclose(np.delete(new_mu, 2, 0), np.delete(mu, 2, 0), rtol=1e-12)  # its batch-mates do not care
    # All activations together are no common factor that a normalisation would take out.
    half_a = s.em_routing_forward(**{**inputs, "a_in": 0.5 * inputs["a_in"]}, lambdas=[1.0] * n_iters)[1]
    assert np.abs(half_a - new_a).max() > 1e-3


def test_the_order_of_children_and_parents_does_not_matter() -> None:
    inputs = routing_inputs()
    mu, a, _ = s.em_routing_forward(**inputs, lambdas=[1.0] * 3)
    children, parents = np.random.default_rng(0).permutation(6), np.random.default_rng(1).permutation(5)
    shuffled = s.em_routing_forward(
        inputs["votes"][:, children][:, :, parents],
        inputs["a_in"][:, children],
        inputs["beta_a"][parents],
        inputs["beta_v"][parents],
        [1.0] * 3,
    )
    np.testing.assert_allclose(shuffled[0], mu[:, parents], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(shuffled[1], a[:, parents], rtol=1e-9)


@pytest.mark.parametrize("d", [1, 3, 16])
def test_the_cost_by_hand(d: int) -> None:
    """Two children vote +e and -e in each of d entries: mu = 0, sigma = e, log sigma = 1 (log sigma^2 would be 2).

    The cost is d (beta_v + 1) times the assigned mass 2: beta_v counts once for each entry.
    """
    votes = np.full((1, 2, 1, d), math.sqrt(math.e**2 - s.VARIANCE_FLOOR))
    votes[:, 1] *= -1
    beta_a, beta_v, inverse_temperature = 0.3, -0.9, 0.7
    mu, a, _ = s.em_routing_forward(
        votes, np.ones((1, 2)), np.array([beta_a]), np.array([beta_v]), [inverse_temperature]
    )
    cost = d * (beta_v + 1) * 2
    expected = 1 / (1 + math.exp(-inverse_temperature * (beta_a - cost)))
    np.testing.assert_allclose(mu, 0, atol=1e-12)
    np.testing.assert_allclose(a, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("policy", ["exact", "stop"])
@pytest.mark.parametrize("case", ["zero activations", "equal votes", "zero votes", "huge votes", "one huge vote"])
def test_nothing_becomes_nan(case: str, policy: str, dtype: str) -> None:
    inputs = routing_inputs()
    if case == "zero activations":
        inputs["a_in"][:] = 0
    elif case == "equal votes":
        inputs["votes"][:] = inputs["votes"][:, :1]
    elif case == "zero votes":
        inputs["votes"][:] = 0
    elif case == "huge votes":
        inputs["votes"] *= 1e6
    else:
        inputs["votes"][0, 0] = 1e6
    inputs = {name: x.astype(dtype) for name, x in inputs.items()}
    mu, a, cache = s.em_routing_forward(**inputs, lambdas=[1.0] * 3)
    outputs = [mu, a, *s.em_routing_backward(np.ones_like(mu), np.ones_like(a), cache, policy)]
    for x in outputs:
        assert np.isfinite(x).all()
        assert x.dtype == dtype


# ----------------------------------------------------------------------------------------------------------------------
# Losses
# ----------------------------------------------------------------------------------------------------------------------


def test_spread_loss_by_hand() -> None:
    # Target 0.5, margin 0.3: 0.4 is 0.1 too near, -> 0.2^2; 0.1 is far enough; 0.9 is ahead by 0.4, -> 0.7^2.
    activations, labels = np.array([[0.4, 0.5, 0.1, 0.9]]), np.array([1])
    loss, da = s.spread_loss(activations, labels, 0.3)
    assert loss == pytest.approx(0.2**2 + 0.7**2)
    np.testing.assert_allclose(da, [[2 * 0.2, -2 * (0.2 + 0.7), 0, 2 * 0.7]])


def test_spread_loss_does_not_count_the_target() -> None:
    activations = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    loss, da = s.spread_loss(activations, np.array([0, 2]), 0.9)
    assert loss == 0  # counting the target would add 0.9^2
    assert not da.any()


def test_losses_are_means_over_the_batch() -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.random((6, 5)), rng.integers(0, 5, 6)
    for loss in (s.softmax_cross_entropy, lambda x, y: s.spread_loss(x, y, 0.5)):
        value, gradient = loss(scores, labels)
        alone = [loss(scores[k : k + 1], labels[k : k + 1]) for k in range(6)]
        assert value == pytest.approx(np.mean([v for v, _ in alone]))
        np.testing.assert_allclose(gradient, np.concatenate([g for _, g in alone]) / 6)


def test_cross_entropy_by_hand_and_far_out() -> None:
    loss, dscores = s.softmax_cross_entropy(np.log(np.array([[1.0, 2.0, 5.0]])), np.array([1]))
    assert loss == pytest.approx(math.log(4))
    np.testing.assert_allclose(dscores, [[1 / 8, 2 / 8 - 1, 5 / 8]])
    loss, dscores = s.softmax_cross_entropy(np.array([[1000.0, 0.0, -1000.0]]), np.array([2]))
    assert loss == pytest.approx(2000)
    np.testing.assert_allclose(dscores, [[1, 0, -1]], atol=1e-12)


def test_the_margin_grows_from_first_to_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert s.spread_margin(0) == pytest.approx(0.2)
    assert s.spread_margin(1) == pytest.approx(0.9)
    margins: list[float] = []

    def spy(activations: Array, labels: Array, margin: float) -> tuple[float, Array]:
        margins.append(margin)
        return original(activations, labels, margin)

    original = s.spread_loss
    monkeypatch.setattr(s, "spread_loss", spy)
    config = tiny(loss="spread", n_epochs=3)
    s.train_all(config, s.make_data(config), names=("capsules",))
    assert len(margins) == 9
    np.testing.assert_allclose(margins, np.linspace(0.2, 0.9, 9))


# ----------------------------------------------------------------------------------------------------------------------
# Networks
# ----------------------------------------------------------------------------------------------------------------------

NETWORKS = ("capsules", "cnn", "cnn_matched")


def test_numbers_of_parameters() -> None:
    counts = {}
    for name, model in s.make_models(s.Config()).items():
        counts[name] = s.count_params(model.init_params(np.random.default_rng(0)))
    assert tuple(counts) == NETWORKS
    assert counts["capsules"] == 558_258
    assert counts["cnn"] == 262_949
    assert abs(counts["cnn_matched"] / counts["capsules"] - 1) < 0.01


def test_the_matched_cnn_is_matched_for_stereo_pairs_too() -> None:
    models = s.make_models(s.Config(dataset="smallnorb"))
    counts = [s.count_params(models[name].init_params(np.random.default_rng(0))) for name in NETWORKS]
    assert abs(counts[2] / counts[0] - 1) < 0.01
    assert models["cnn"].init_params(np.random.default_rng(0))["conv1.w"].shape[2] == 2


@pytest.mark.parametrize("name", NETWORKS)
def test_a_batch_mate_changes_nothing(name: str) -> None:
    config = s.Config(dtype="float64")
    model = s.make_models(config)[name]
    params = model.init_params(np.random.default_rng(0))
    x = np.random.default_rng(1).random((5, 32, 32, 1))
    scores, _ = model.forward(params, x)
    for k in range(5):
        np.testing.assert_allclose(model.forward(params, x[k : k + 1])[0][0], scores[k], rtol=1e-12, atol=1e-12)
    others = x.copy()
    others[1:] = 7.0
    np.testing.assert_allclose(model.forward(params, others)[0][0], scores[0], rtol=1e-12, atol=1e-12)
    assert np.abs(scores[0] - scores[1]).max() > 1e-6


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_have_the_parameters_names_shapes_and_type(name: str) -> None:
    for dtype in ("float32", "float64"):
        model = s.make_models(s.Config(dtype=dtype))[name]
        params = model.init_params(np.random.default_rng(0))
        scores, cache = model.forward(params, np.random.default_rng(1).random((3, 32, 32, 1)).astype(dtype))
        assert scores.shape == (3, 5)
        grads, dx = model.backward(np.ones_like(scores), cache, need_dx=True)
        assert dx is not None
        assert {k: g.shape for k, g in grads.items()} == {k: p.shape for k, p in params.items()}
        assert {str(x.dtype) for x in (scores, dx, *grads.values(), *params.values())} == {dtype}


def test_every_parameter_of_the_capsules_learns() -> None:
    for loss, em_grad in itertools.product(("cross-entropy", "spread"), ("exact", "stop")):
        config = tiny(loss=loss, em_grad=em_grad, n_epochs=1)
        model, data = s.make_models(config)["capsules"], s.make_data(config)
        before = init_state(model, config).params
        after = s.train_all(config, data, names=("capsules",))["capsules"].params
        for name in before:
            assert (before[name] != after[name]).any(), f"{name} does not move with {loss}, {em_grad}"


def test_scores_are_activations_under_the_spread_loss() -> None:
    config = s.Config(loss="spread")
    scores, cache = s.capsules_forward(
        s.capsules_init(np.random.default_rng(0), config), np.ones((2, 32, 32, 1)), config
    )
    np.testing.assert_array_equal(scores, cache.a)
    config = s.Config(loss="cross-entropy")
    scores, cache = s.capsules_forward(
        s.capsules_init(np.random.default_rng(0), config), np.ones((2, 32, 32, 1)), config
    )
    expected = s.POSE_SCORE * (cache.mu**2).sum(axis=2) + s.ACTIVATION_SCORE * (cache.a - 0.5)
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# Training: learns, and to the same numbers from the same seed
# ----------------------------------------------------------------------------------------------------------------------


def assert_same_states(a: dict[str, s.TrainState], b: dict[str, s.TrainState]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].history == b[name].history
        assert a[name].step == b[name].step
        for kind in ("params", "m", "v"):
            for key, array in getattr(a[name], kind).items():
                np.testing.assert_array_equal(array, getattr(b[name], kind)[key], err_msg=f"{name} {kind} {key}")


def test_same_seed_same_numbers_other_seed_others() -> None:
    data = s.make_data(TINY)
    first, again = (s.train_all(TINY, s.make_data(TINY)) for _ in range(2))
    assert_same_states(first, again)
    other = tiny(seed=1)
    assert not np.array_equal(s.make_data(other).train.images, data.train.images)
    others = s.train_all(other, s.make_data(other))
    for name in NETWORKS:
        assert not np.array_equal(first[name].params["conv1.w"], others[name].params["conv1.w"])
        assert first[name].history["train_loss"] != others[name].history["train_loss"]


def test_data_and_other_models_do_not_depend_on_the_models_trained() -> None:
    """Each model by itself, in any order, learns what it learns beside the others; and nobody touches the data."""
    data = s.make_data(TINY)
    before = [x.copy() for split in data for x in split]
    together = s.train_all(TINY, data)
    for x, y in zip([x for split in data for x in split], before, strict=True):
        np.testing.assert_array_equal(x, y)
    models = s.make_models(TINY)
    for name in reversed(NETWORKS):
        alone = s.train_all(TINY, s.make_data(TINY), names=(name,))[name]
        assert alone.history == together[name].history
        for key, p in alone.params.items():
            np.testing.assert_array_equal(p, together[name].params[key])
    starts = [init_state(model, TINY).params["conv1.w"] for model in models.values()]
    assert not np.array_equal(starts[0], starts[1])


def test_choices_about_the_network_do_not_shift_the_data() -> None:
    data = s.make_data(s.Config())
    for change in ({"em_iters": 1}, {"loss": "spread"}, {"n_epochs": 1}, {"lr": 1.0}, {"n_test_views": 3}):
        other = s.make_data(dataclasses.replace(s.Config(), **change))
        np.testing.assert_array_equal(other.train.images, data.train.images)
        np.testing.assert_array_equal(other.familiar.images, data.familiar.images)


def test_each_epoch_sees_every_image_once_in_an_order_of_its_own() -> None:
    config = tiny(cnn_epochs=3)
    data, seen = s.make_data(config), list[list[int]]()
    model = s.make_models(config)["cnn"]

    def loss(scores: Array, labels: Array, progress: float) -> tuple[float, Array]:
        seen.append(labels.tolist())
        return model.loss(scores, labels, progress)

    s.train(model._replace(loss=loss), config, data, init_state(model, config))
    assert [len(batch) for batch in seen] == [4, 4, 2] * 3
    epochs = [[*seen[k], *seen[k + 1], *seen[k + 2]] for k in (0, 3, 6)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(data.train.labels.tolist())
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_evaluation_is_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny()
    model, data = s.make_models(config)["capsules"], s.make_data(config)
    params = init_state(model, config).params
    copy = {name: p.copy() for name, p in params.items()}
    assert s.accuracy(model, params, data.train) == s.accuracy(model, params, data.train)
    for name, p in params.items():
        np.testing.assert_array_equal(p, copy[name])
    scores = s.predict_scores(model, params, data.train.images)
    with monkeypatch.context() as patch:
        patch.setattr(s, "EVALUATION_BATCH", 3)
        np.testing.assert_allclose(s.predict_scores(model, params, data.train.images), scores, rtol=1e-4)
    labels = scores.argmax(axis=1)
    assert s.accuracy(model, params, data.train._replace(labels=labels)) == 1
    assert s.accuracy(model, params, data.train._replace(labels=(labels + 1) % 5)) == 0


@pytest.mark.parametrize(("name", "loss", "em_grad"), [
    ("capsules", "cross-entropy", "exact"),
    ("capsules", "cross-entropy", "stop"),
    ("capsules", "spread", "exact"),
    ("cnn", "cross-entropy", "exact"),
    ("cnn_matched", "cross-entropy", "exact"),
])  # fmt: skip
def test_training_learns(name: str, loss: str, em_grad: str) -> None:
    """Familiar views, at the best epoch: the gradient of "stop" is no descent direction and comes and goes."""
    config = s.Config(
        n_epochs=10, n_elev=1, n_train_views=4, n_per_combo=3, batch_size=10, lr=5e-4, loss=loss, em_grad=em_grad
    )
    history = s.train_all(config, s.make_data(config), names=(name,))[name].history
    assert max(history["familiar_accuracy"]) > 0.45, history["familiar_accuracy"]  # chance is 0.2


def test_share_of_the_true_class() -> None:
    """One iteration assigns evenly, so every class holds a fifth; with more, the share is the last iteration's."""
    config = s.Config(em_iters=1, n_per_combo=1)
    model, data = s.make_models(config)["capsules"], s.make_data(config)
    params = init_state(model, config).params
    assert s.true_class_mass(model, params, data.train) == pytest.approx(1 / s.N_CLASSES, rel=1e-6)

    model = s.make_models(dataclasses.replace(config, em_iters=3))["capsules"]
    r = model.forward(params, data.train.images)[1].routing.m_steps[-1]
    mass = r.weight * r.mass[:, None]  # each child's part, (B, I, J)
    by_hand = np.mean([mass[n, :, k].sum() / mass[n].sum() for n, k in enumerate(data.train.labels)])
    assert s.true_class_mass(model, params, data.train) == pytest.approx(by_hand, rel=1e-5)
    assert by_hand != pytest.approx(1 / s.N_CLASSES, rel=1e-3)


def test_beta_v_starts_where_it_is_told() -> None:
    config = s.Config(beta_v_init=-1.25)
    np.testing.assert_array_equal(init_state(s.make_models(config)["capsules"], config).params["class.beta_v"], -1.25)
