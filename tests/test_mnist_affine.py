"""mnist_affine_capsnet: affine maps, data, validation, files, command line. Digits are noise or generated
strokes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.affnist_file import read_affnist
from fast.workers import SERIAL
from helpers import EXPERIMENTS, Array, Capture, Patch, digits_folder, failure, strokes
from more import mnist_affine_capsnet as affine
from multimnist_capsnet import init_state
from smallnorb_novel_viewpoint import permutation


@pytest.fixture(autouse=True)
def short_sweep(monkeypatch: Patch) -> None:
    monkeypatch.setattr(affine, "SWEEP", (-90, 0, 35))


SMALL = {
    "conv_channels": 2, "primary_types": 1, "decoder": (16, 16), "n_train": 24, "n_val": 16, "n_test": 20,
    "n_sweep": 4, "batch_size": 8, "n_epochs": 2,
}


def small(**changes: Any) -> affine.Config:
    return affine.Config(**{**SMALL, "dataset": "mnist", "data_dir": digits_folder(), **changes})


BIG = {"canvas": 40, "max_shift": 6}


# --- Affine maps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [28, 27])
def test_quarter_turns_are_exact_and_counter_clockwise(side: int) -> None:
    images = np.random.default_rng(0).random((3, side, side))
    for quarters in (-1, 0, 1, 2, 4):
        turned = affine.rotate(images, 90 * quarters)
        np.testing.assert_allclose(turned, np.rot90(images, quarters, axes=(1, 2)), atol=1e-12)
    by = affine.rotation_matrices
    np.testing.assert_allclose(by(35) @ by(-15), by(20))


def test_warp_is_the_loop(monkeypatch: Patch) -> None:
    """In parts of a set as in whole ones."""
    monkeypatch.setattr(affine, "WARP_PART", 3)
    rng = np.random.default_rng(3)
    images, matrices = rng.random((5, 6, 7)), rng.standard_normal((5, 2, 3)) * [1, 1, 4]
    out = affine.warp(images, matrices, 8)
    for n, i, j in np.ndindex(5, 8, 8):
        row, column = matrices[n] @ (i, j, 1)
        total = 0.0
        for r in (math.floor(row), math.floor(row) + 1):
            for c in (math.floor(column), math.floor(column) + 1):
                if 0 <= r < 6 and 0 <= c < 7:
                    total += images[n, r, c] * (1 - abs(row - r)) * (1 - abs(column - c))
        assert out[n, i, j] == pytest.approx(total, abs=1e-12)


def test_affnist_ranges_and_ink_inside() -> None:
    digits = strokes().train_images[:360]
    d = affine.draw_distortions(np.random.default_rng(1), digits)
    assert 19 < np.abs(d.rotation).max() <= 20
    for values, low, high in ((d.shear, -0.2, 0.2), (d.scale, 0.8, 1.2)):
        assert low <= values.min() < low + 0.01
        assert high - 0.01 < values.max() <= high
    for drawn, spread in ((d.scale, 0.1), (d.middle, 3)):  # for each axis
        assert (drawn.std(axis=0) > spread).all()
        assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.15
    np.testing.assert_allclose(np.corrcoef([d.rotation, d.shear, *d.scale.T]), np.eye(4), atol=0.2)
    images = affine.distort(digits / 255, d)
    # The same on a larger canvas: nothing lies in what is added.
    wide = affine.warp(digits / 255, affine.warp_matrices(d.matrices, 13.5, d.middle + 20), 80)
    np.testing.assert_allclose(wide[:, 20:60, 20:60], images, atol=1e-12)
    np.testing.assert_allclose(wide.sum(axis=(1, 2)), images.sum(axis=(1, 2)), rtol=1e-12)
    area = np.linalg.det(d.matrices)
    np.testing.assert_allclose(images.sum(axis=(1, 2)) / (digits / 255).sum(axis=(1, 2)), area, rtol=0.05)
    # The whole canvas is used.
    rows, columns = np.nonzero(images.max(axis=0))
    assert [rows.min(), rows.max(), columns.min(), columns.max()] == [0, 39, 0, 39]


def test_ink_that_does_not_fit_is_in_the_middle() -> None:
    for grey in (0, 255):
        digits = np.full((6, 28, 28), grey, np.uint8)
        d = affine.draw_distortions(np.random.default_rng(2), digits)
        assert np.isfinite(affine.distort(digits / 255, d)).all()
    np.testing.assert_allclose(d.middle[~np.isclose(d.middle, 19.5)], 19.5, atol=6)


def test_a_distortion_is_scale_then_shear_then_turn() -> None:
    d = affine.Distortion(np.array([90.0]), np.array([0.5]), np.array([[2.0, 3.0]]), np.zeros((1, 2)))
    # One column to the right: three, no shear; turned, three rows up. One row down: two down and one to the right.
    np.testing.assert_allclose(d.matrices[0] @ np.eye(2), [[-1, -3], [2, 0]], atol=1e-12)


# --- affNIST files ----------------------------------------------------------------------------------------------------


def affnist_like(n: int = 30) -> tuple[Array, Array]:
    digits = strokes().test_images[:n]
    images = affine.distort(digits.astype(np.float32), affine.draw_distortions(np.random.default_rng(4), digits))
    return images.round().astype(np.uint8), strokes().test_labels[:n]


def write_affnist(path: Path, pixels: Any, labels: Any, name: str = "affNISTdata") -> Path:
    savemat = pytest.importorskip("scipy.io").savemat
    savemat(path, {name: {"image": pixels, "label_int": labels, "human_readable_transform": np.zeros((6, 3))}})
    return path


@pytest.mark.parametrize("digits", [*range(10), range(10), range(2, 10)], ids=str)
@pytest.mark.parametrize(("order", "number"), [("rows", np.uint8), ("columns", float)])
def test_a_published_file_is_read(order: str, number: Any, digits: Any, tmp_path: Path) -> None:
    """Whichever digits it has, and however MATLAB has stored them: as doubles, unless it is asked not to."""
    images, labels = affnist_like(300)
    chosen = np.isin(labels, digits)
    images, labels = images[chosen], labels[chosen]
    stored = images if order == "rows" else images.transpose(0, 2, 1)
    path = write_affnist(tmp_path / "15.mat", stored.reshape(len(images), -1).T, labels[None].astype(number))
    for read, expected in zip(read_affnist(path), (images, labels), strict=True):
        np.testing.assert_array_equal(read, expected)


def test_what_is_no_affnist_file_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    images, labels = affnist_like()
    pixels = images.reshape(30, -1).T
    content = write_affnist(tmp_path / "good.mat", pixels, labels[None]).read_bytes()
    contents = {
        "text": b"hello", "empty": b"", "cut": content[: len(content) // 2],
        "broken": content[:128] + b"\xff" * 12 + content[140:], "archive": b"PK\x03\x04" + bytes(200),
        "hdf": b"\x89HDF\r\n\x1a\n" + bytes(200), "7.3": b"MATLAB 7.3 MAT-file" + bytes(200),
    }
    arrays: dict[str, tuple[Any, ...]] = {
        "name": (pixels, labels[None], "other"), "float": (pixels / 255, labels[None]),
        "size": (pixels[:784], labels[None]), "few": (pixels, labels[None, :20]),
        "eleven": (pixels, labels[None] + 2), "words": (pixels, "abc"),
    }
    for name, wrong in contents.items():
        (tmp_path / f"{name}.mat").write_bytes(wrong)
    for name, given in arrays.items():
        write_affnist(tmp_path / f"{name}.mat", *given)
    says = {"archive": "is a ZIP file: unpack it", "hdf": "with the option -v7", "7.3": "with the option -v7"}
    for path in (*(tmp_path / f"{name}.mat" for name in (*contents, *arrays, "nowhere")), tmp_path):
        error = failure(affine, f"--canvas 40 --dataset mnist --data-dir {tmp_path} --affnist {path}".split(), capsys)
        assert f"it is no affNIST file: {path}" in error
        assert says.get(path.stem, "") in error


# --- Data -------------------------------------------------------------------------------------------------------------


def content(images: Array) -> set[bytes]:
    return {image.tobytes() for image in images}


def test_training_validation_and_test_share_no_digit() -> None:
    for config in (small(), small(n_train=None, n_test=None)):
        data = affine.make_data(config)
        train, val = content(data.images), content((255 * data.val.images).round().astype(np.uint8))
        assert len(data.images) == (config.n_train or 600 - 16)
        assert len(data.test_images) == (config.n_test or 300)
        assert len(val) == 16
        assert not train & val
        assert not content(data.test_images) & (val | train)
        assert val | train <= content(strokes().train_images)
        done = affine.resolve_defaults(config, data)
        assert (done.n_train, done.n_test) == (len(data.images), len(data.test_images))
    assert content(affine.make_data(small(seed=1)).images) != content(affine.make_data(small()).images)


@pytest.mark.parametrize("changes", [{"n_train": 600}, {"n_val": 600, "n_train": None}, {"n_test": 301}])
def test_too_few_digits(changes: dict[str, Any]) -> None:
    with pytest.raises(OSError, match="too few") as error:
        affine.make_data(small(**changes))
    assert "None" not in str(error.value)  # which nobody typed


def shifts_of(images: Array, digits: Array) -> Array:
    """How far each image (n, S, S) is moved from the middle, by its centre of ink."""

    def centre(a: Array) -> Array:
        grid = np.indices(a.shape[1:], float)
        return np.einsum("nij,aij->na", a, grid) / a.sum(axis=(1, 2))[:, None] - (a.shape[1] - 1) / 2

    return centre(images.astype(float)) - centre(digits.astype(float))


@pytest.mark.parametrize(("changes", "reach"), [({}, 2), (BIG, 6), ({"max_shift": 0}, 0)])
def test_augmentation_is_drawn_for_each_image_and_never_at_test(changes: dict[str, Any], reach: int) -> None:
    config = small(n_train=96, batch_size=32, n_epochs=9, **changes)
    data = affine.make_data(config)
    data = data._replace(images=data.images * np.pad(np.ones((24, 24), np.uint8), 2))  # no shift loses ink
    seen = []
    for step in range(6):
        batch = affine.training_batch(data, config, step)
        which = permutation(96, config.seed, 0, step // 3)[32 * (step % 3) :][:32]
        np.testing.assert_array_equal(batch.labels[:, 0], data.labels[which])
        np.testing.assert_array_equal(batch.sources[:, 0], batch.images)
        moved = shifts_of(batch.images, data.images[which])
        np.testing.assert_allclose(moved, moved.round(), atol=1e-4)
        assert len(np.unique(moved.round(), axis=0)) > (10 if reach else 0)
        seen.append(moved.round())
    assert np.abs(np.concatenate(seen)).max() == reach
    assert reach == 0 or not np.array_equal(seen[0], seen[3])
    moved, free = shifts_of(affine.rotated_set(data, config).images, data.test_images), (config.image_size - 28) // 2
    np.testing.assert_allclose(moved, affine.evaluation_shifts(config, 20, 0), atol=1e-4)
    assert {*affine.evaluation_shifts(config, 500, 0).ravel().tolist()} == {*range(-free, free + 1)}


@pytest.mark.parametrize("changes", [{}, BIG])
def test_every_set_is_scaled_alike(changes: dict[str, Any]) -> None:
    """Grey values from 0 to 1: the same ink in training, validation, and on every test set."""
    config = small(n_train=96, **changes)
    data = affine.make_data(config)
    tests = dict(affine.make_test_sets(data, config, affnist_like() if changes else None))
    assert list(tests) == ["upright", "rotated_15", "rotated_35"] + ["affnist", "affnist_file"] * bool(changes)
    train = affine.training_batch(data, config, 0)
    for name, digits in (tests | {"train": train, "val": data.val}).items():
        images = digits.images
        assert images.dtype == np.float32, name
        assert images.shape[1:] == (config.image_size, config.image_size), name
        assert images.min() == 0, name
        assert 0.95 < images.max() <= 1, name
        assert images.sum() / len(images) == pytest.approx(train.images.sum() / 8, rel=0.25), name


def test_the_sweep_is_spread_over_the_test_digits() -> None:
    config = small()
    data = affine.make_data(config)
    some, every = affine.rotated_set(data, config, 0.0, 4), affine.rotated_set(data, config)
    np.testing.assert_array_equal(some.labels, every.labels[[0, 6, 13, 19]])
    np.testing.assert_array_equal(some.images, every.images[[0, 6, 13, 19]])
    assert len(affine.rotated_set(data, config, 5.0, 99).images) == 20


# --- Training, validation, tests --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "steps"), [(0.75, 6), (0.5, 4), (0.9, 24)])
def test_training_stops_at_the_accuracy_asked_for(target: float, steps: int, monkeypatch: Patch) -> None:
    """Checks every 2 of 3 steps an epoch, and at an epoch's end; accuracies rise to 14/16 and fall again."""
    config = small(n_epochs=8, match_accuracy=target, check_every=2)
    data, asked = affine.make_data(config), []

    def assess(model: Any, params: Any, batch: Any, workers: Any) -> tuple[Array, float]:
        asked.append(state.step)
        assert batch is data.val
        n_right = min(2 * state.step, 14, 30 - state.step)
        answers = np.where(np.arange(16) < n_right, batch.labels[:, 0], (batch.labels[:, 0] + 1) % 10)
        return np.eye(10)[answers], math.nan

    monkeypatch.setattr(affine, "assess", assess)
    model = affine.make_models(config)["lenet"]
    state, stops, last = init_state(model, config), list[int](), min(2 * steps, 30 - steps) / 16

    def stopped(s: Any, end: bool) -> None:
        stops.extend([s.step] * (end and affine.reached(s, config)))

    affine.train(model, config, data, state, SERIAL, stopped)
    assert state.step == steps
    assert asked == [k for k in range(1, steps + 1) if k % 2 == 0 or k % 3 == 0]
    assert stops == ([steps] if target < 0.9 else [])
    assert state.history["check_step"] == [float(k) for k in asked]
    assert state.history["check_accuracy"][-1] == last
    state.seconds = 2.0 * steps
    result = affine.make_result(config, data, {"lenet": state}, {"lenet": {}})["models"]["lenet"]
    assert (result["steps"], result["epochs"], result["reached"]) == (steps, steps / 3, target < 0.9)
    assert result["val_accuracy"] == last
    assert result["epoch_seconds"] == 6  # of three steps


def test_accuracies_on_all_sets(tmp_path: Path, capsys: Capture) -> None:
    """The other numbers, and the table, are recorded: test_recorded.py."""
    images, labels = affnist_like()
    mat, out = write_affnist(tmp_path / "15.mat", images.reshape(30, -1).T, labels[None]), tmp_path / "a.json"
    argv = EXPERIMENTS[affine.EXPERIMENT].argv(f"--canvas 40 --match-accuracy 1 --check-every 2 --affnist {mat}")
    assert affine.main([*argv, "--out-json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "stopped at 100 % on 16 for validation" in printed.splitlines()[0]
    assert printed.count("not reached") == 3
    sets = ("upright", "rotated_15", "rotated_35", "affnist", "affnist_file", "val")
    for figures in json.loads(out.read_text())["models"].values():
        assert {f"{key}_accuracy" for key in sets} == {key for key in figures if key.endswith("accuracy")}
