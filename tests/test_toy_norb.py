"""data/toy_norb.py and make_toy_norb.py: the solids, the images, the six files and the contact sheet."""

from __future__ import annotations

import errno
import functools
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

import smallnorb_novel_viewpoint as smallnorb
from data import norb_files, toy_norb as toys
from helpers import Array, Capture, Patch, config_of, failure
from more import conv_matrix_capsules as conv, make_toy_norb as script
from recorded import check

DRAW_TOY = toys.draw_toy
NAMES = {toys.file_name(subset, part) for subset in toys.INSTANCES for part in norb_files.NORB_PARTS}


@functools.cache
def draw_once(category: int, instance: int, seed: int = 0) -> Array:
    return DRAW_TOY(category, instance, seed)


@pytest.fixture
def few_views(monkeypatch: Patch) -> None:
    """Two elevations and four azimuths, of which the last is held out by default; a toy is drawn once for all tests."""
    monkeypatch.setattr(toys, "ELEVATIONS", (30, 70))
    monkeypatch.setattr(toys, "AZIMUTHS", (0, 20, 40, 60))
    monkeypatch.setattr(toys, "draw_toy", draw_once)


@pytest.fixture
def few_toys(few_views: None, monkeypatch: Patch) -> None:
    """And one toy of each category in each half."""
    monkeypatch.setattr(toys, "INSTANCES", {"training": (4,), "testing": (0,)})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


# --- Solids and rays --------------------------------------------------------------------------------------------------


def is_inside(solid: toys.Solid, p: Array) -> Array:
    """Points (..., 3) in a solid's own coordinates."""
    if solid.kind == "box":
        return (np.abs(p) <= 1).all(axis=-1)
    if solid.kind == "ellipsoid":
        return (p**2).sum(axis=-1) <= 1
    radius = 1 + (solid.top - 1) * (p[..., 2] + 1) / 2
    return (np.hypot(p[..., 0], p[..., 1]) <= radius) & (np.abs(p[..., 2]) <= 1)


@pytest.mark.parametrize(("kind", "top"), [("ellipsoid", 1), ("box", 1), ("cone", 1), ("cone", 0.5), ("cone", 0.0)])
def test_rays_enter_and_leave_where_points_on_them_are_inside(kind: str, top: float) -> None:
    """The cones are also seen along their axes, and nearly so, from both ends."""
    rng = np.random.default_rng(0)
    u, v = np.linspace(-1.3, 1.3, 14), np.linspace(1.3, -1.3, 14)
    t = np.linspace(-4, 4, 1601)
    turns = [np.eye(3), np.diag([1, -1, -1]), *(np.linalg.qr(rng.normal(size=(3, 3)))[0] for _ in range(12))]
    turns += [toys.turned(pitch=angle) for angle in (1, -2, 178)]
    n_hits = 0
    for turn in turns:
        own, centre = turn * rng.uniform(0.7, 1.5, 3), rng.uniform(-0.2, 0.2, 3)
        solid = toys.Solid(kind, centre, np.linalg.inv(own), top=top)
        ((window, enter, leave),) = toys.crossings(toys.toy_of([solid]), u, v)
        rays = np.stack(np.meshgrid(u, v, t, indexing="xy"), axis=-1)  # (v, u, t, 3)
        inside = is_inside(solid, (rays - centre) @ own.T)
        between = np.zeros_like(inside)
        between[window] = (enter[..., None] <= t) & (t <= leave[..., None])
        n_hits += int(inside.any(axis=2).sum())
        assert (inside != between).sum(axis=2).max() <= 2  # a step at each end
    assert n_hits > 100


# --- Images -----------------------------------------------------------------------------------------------------------


def test_a_pair_is_of_the_left_and_of_the_right_eye(monkeypatch: Patch) -> None:
    monkeypatch.setattr(toys, "ELEVATIONS", (35,))
    monkeypatch.setattr(toys, "AZIMUTHS", (40,))
    toy, pair = toys.make_toy(3, 0), toys.draw_toy(3, 0)[0, 0, 0]
    shadows = toys.shadow_maps(toy, 40)
    for drawn, eye in zip(pair, (-2.5, 2.5), strict=True):
        ground = toys.draw_ground(shadows, toys.shadow_resampling(35, eye, toy.height))
        np.testing.assert_array_equal(drawn, toys.draw_view(toy, 40, 35, eye, ground)[0])
    assert 0.3 < np.abs(np.diff(pair.astype(int), axis=0)).mean() < 12


def test_the_grey_of_a_ball_follows_from_its_normal_and_its_own_albedo() -> None:
    """A lamp lights what faces it; the sky all, but less near the ground."""
    balls = {-0.25: 0.6, 0.25: 0.3}  # albedo by x
    toy = toys.toy_of([toys.ball((x, 0, 0.3), (0.2, 0.2, 0.2), albedo) for x, albedo in balls.items()])
    images = toys.draw_view(toy, 0, 30, 0, np.zeros((toys.N_LIGHTINGS, 96 * 96), np.float32))
    frame, (u, v) = toys.camera(30, 0), np.meshgrid(toys.grid(96, toys.SCREEN), toys.grid(96, toys.SCREEN)[::-1])
    for x, albedo in balls.items():
        a, b, _ = frame.T @ [x, 0, 0.3]
        inside = (u - a) ** 2 + (v - b) ** 2 < 0.17**2
        across = np.stack([u - a, v - b])[:, inside] / 0.2
        normal = frame @ [*across, np.sqrt(1 - (across**2).sum(axis=0))]
        sky = toys.SKY * (0.65 + 0.35 * normal[2]) * np.minimum(1, 0.55 + 3 * (0.3 + 0.2 * normal[2]))
        light = toys.BRIGHTNESS @ np.maximum(toys.LAMPS @ normal, 0) + sky
        np.testing.assert_allclose(images[:, inside], albedo * light * (toys.GROUND / toys.FLUX)[:, None], atol=2)


@pytest.mark.parametrize("azimuth", [40, 200])
def test_a_toy_and_its_shadow_turn_together(azimuth: int, monkeypatch: Patch) -> None:
    """A view of a toy is that of a turned toy from the front, with the lamps where they were."""
    turn, toy = toys.turned(yaw=azimuth), toys.make_toy(3, 2)
    turned = toy._replace(axes=turn @ toy.axes, centres=toy.centres @ turn.T)
    monkeypatch.setattr(toys, "ELEVATIONS", (40,))
    images = []
    for made, azimuths in ((toy, (0, azimuth)), (turned, (0,))):
        monkeypatch.setattr(toys, "make_toy", lambda *_, made=made: made)
        monkeypatch.setattr(toys, "AZIMUTHS", azimuths)
        images.append(toys.draw_toy(3, 2)[0, -1].astype(int))
    assert (np.abs(images[0] - images[1]) > 2).mean() < 1e-3  # a ray beside an edge, a cell of the shadow
    shadows = [toys.shadow_maps(toy, azimuth), toys.shadow_maps(turned, 0)]
    np.testing.assert_allclose(shadows[0], shadows[1], atol=0.02)
    assert np.abs(shadows[0] - toys.shadow_maps(toy, 0)).max() > 0.1


# --- The six files ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("few_views")
def test_every_pair_shows_the_toy_of_its_label(tmp_path: Path) -> None:
    """So that no test toy is among the training toys, where no two of the ten look alike."""
    for category in range(5):
        assert len({toys.draw_toy(category, instance, 3).tobytes() for instance in range(10)}) == 10
    folder = tmp_path / "not" / "there"
    assert script.main(["--out-dir", str(folder), "--seed", "3"]) == 0
    assert set(contents(folder)) == NAMES
    for subset in toys.INSTANCES:
        labels, info, chunks = norb_files.read_norb(folder, subset)
        raw = np.concatenate([*chunks])
        assert set(info[:, 0]) == set(toys.INSTANCES[subset])
        assert len({*zip(labels.tolist(), *info.T.tolist(), strict=True)}) == len(raw) == 5 * 5 * 2 * 4 * 6
        for pair, category, (instance, elevation, azimuth, lighting) in zip(raw, labels, info, strict=True):
            images = toys.draw_toy(int(category), int(instance), 3)
            np.testing.assert_array_equal(pair, images[elevation, azimuth // 2, lighting])


def test_the_bytes_depend_on_the_seed_and_not_on_the_threads(
    tmp_path: Path, monkeypatch: Patch, few_toys: None
) -> None:
    monkeypatch.setattr(toys, "draw_toy", DRAW_TOY)
    monkeypatch.setattr(toys, "AZIMUTHS", (0, 20))
    for name, more in {"a": "--threads=1", "b": "--threads=3", "c": "--seed=1"}.items():
        assert script.main([f"--out-dir={tmp_path / name}", more]) == 0
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b
    assert all(a[name] != c[name] for name in NAMES if "dat" in name or "info" in name)


def test_seed_threads_and_a_tilde_reach_what_draws(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(script, "write_toy_norb", write := Mock())
    assert script.main(["--out-dir=~/toys", "--seed=4", "--threads=3"]) == 0
    write.assert_called_once_with(tmp_path / "toys", 4, 3)
    assert capsys.readouterr().out == f"wrote {tmp_path / 'toys'}\n"


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_no_file_of_the_real_set_is_replaced(ending: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / (toys.file_name("testing", "cat") + ending)
    path.write_bytes(b"real")
    line = failure(script, ["--out-dir", str(tmp_path)], capsys)
    assert line == f"error: {tmp_path} has a {path.name} already: name another folder with --out-dir\n"
    assert contents(tmp_path) == {path.name: b"real"}


@pytest.mark.usefixtures("few_toys")
@pytest.mark.parametrize(("name", "stops", "status", "says"), [
    ("draw_toy", KeyboardInterrupt, 130, "interrupted"),
    ("os.fsync", OSError(28, "No space left on device"), 1, "error: cannot write "),
])
def test_what_stops_the_drawing_leaves_the_older_set(
    name: str, stops: Any, status: int, says: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    toys.write_toy_norb(tmp_path)
    before, new = contents(tmp_path), tmp_path / "new"
    monkeypatch.setattr(f"data.toy_norb.{name}", Mock(side_effect=stops))
    with pytest.raises((KeyboardInterrupt, OSError)):
        toys.write_toy_norb(tmp_path, seed=1)
    assert contents(tmp_path) == before
    assert script.main(["--out-dir", str(new)]) == status
    assert capsys.readouterr().err.startswith(says)
    assert not (new.exists() and contents(new))


def test_the_whole_set_has_the_sizes_of_the_real_one() -> None:
    for subset, instances in toys.INSTANCES.items():
        rows = toys.shuffled_views(subset, 0)
        assert rows.shape == (norb_files.NORB_ITEMS, 5)
        assert len(np.unique(rows, axis=0)) == len(rows)
        for column, values in zip(rows.T, (range(5), instances, range(9), range(0, 36, 2), range(6)), strict=True):
            assert sorted(set(column.tolist())) == sorted(values)
        assert len({order.tobytes() for order in rows.reshape(-1, 5, 5).swapaxes(0, 1)[..., 1:]}) == 5  # of categories
        assert "".join(map(str, instances)) == norb_files.NORB_SETS[subset][2:]


# --- The cache, and the experiment on it ------------------------------------------------------------------------------


@pytest.fixture
def small_cache(tmp_path: Path, monkeypatch: Patch, few_toys: None) -> Path:
    monkeypatch.setenv("CAPSULES_CACHE", str(tmp_path))
    return tmp_path


def test_toys_are_drawn_once_and_again_where_a_file_is_missing_or_the_code_is_another(
    small_cache: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    folder = toys.cached_toys(small_cache, 0)
    assert capsys.readouterr().err.startswith(f"drawing the toys of seed 0 into {folder}: about a minute, 0.9 GB")
    (small_cache / "toys.lock").unlink()
    with monkeypatch.context() as patch:  # of another person: nothing is written where the set is whole
        patch.setattr(os, "utime", Mock(side_effect=PermissionError))
        assert toys.cached_toys(small_cache, 0) == folder
    assert not (small_cache / "toys.lock").exists()
    assert capsys.readouterr().err == ""
    next(folder.iterdir()).unlink()
    assert toys.cached_toys(small_cache, 0) == folder
    assert set(contents(folder)) == NAMES
    (other := small_cache / "toy_norb.py").write_bytes(Path(toys.__file__).read_bytes() + b"#")
    monkeypatch.setattr(toys, "__file__", str(other))
    assert toys.cached_toys(small_cache, 0) != folder


def test_the_cache_keeps_four_sets(small_cache: Path, monkeypatch: Patch) -> None:
    """Also on a disk without locks."""
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    folders = [toys.cached_toys(small_cache, seed) for seed in (0, 1, 2, 3)]
    assert toys.cached_toys(small_cache, 0) == folders[0]
    folders.append(toys.cached_toys(small_cache, 4))
    assert sorted(small_cache.glob("toys-*")) == sorted(folders[:1] + folders[2:])  # without the one used longest ago


@pytest.mark.parametrize("script", [smallnorb, conv])
def test_a_run_has_the_toys_of_its_seed(script: Any, small_cache: Path) -> None:
    first, second = ({x.tobytes() for x in script.make_data(script.Config(dataset="toys", seed=seed)).train.images}
                     for seed in (6, 7))
    of_seed = smallnorb.read_smallnorb(toys.cached_toys(small_cache, 7), ("training", None))
    assert second <= {x.tobytes() for x in of_seed.images}
    assert not first & second


def test_the_experiment_holds_out_viewpoints_or_nothing(small_cache: Path) -> None:
    """Without held-out views the halves are the official ones."""
    argv = ["--dataset", "toys", "--n-epochs", "1", "--sizes", "4,2,2,2", "--standardize", "image"]
    assert conv.run(config_of(conv, argv), names=("cnn",))[0]["headline"] == "held_out_accuracy"
    nothing = config_of(conv, [*argv, "--held-out", "nothing"])
    result = conv.run(nothing, names=("cnn",))[0]
    assert result["headline"] == "accuracy"
    assert "drop" not in result["models"]["cnn"]
    assert "toys: no viewpoints held out" in conv.describe(result)
    data, folder = conv.make_data(nothing), toys.cached_toys(small_cache, 0)
    assert data.held_out is None
    for examples, half in ((data.train, "training"), (data.test, "testing")):
        split = smallnorb.read_smallnorb(folder, (half, None))
        np.testing.assert_array_equal(examples.images, split.images)
        np.testing.assert_array_equal(examples.labels, split.labels)


# --- Contact sheet ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("few_toys")
def test_the_contact_sheet_has_a_row_of_the_real_set(tmp_path: Path, capsys: Capture) -> None:
    path, real = tmp_path / "new" / "sheet.png", tmp_path / "real"
    toys.write_toy_norb(real, seed=1)  # in the files of the real set
    assert script.main(["--figure", str(path), "--data-dir", str(real)]) == 0
    sheet = np.asarray(Image.open(path))
    check("contact sheet", sheet[:-96])
    for column, image in enumerate(np.split(sheet[-96:], 10, axis=1)):
        subset, category = ("training", "testing")[column // 5], column % 5
        views = toys.draw_toy(category, toys.INSTANCES[subset][0], 1)[:, :, :, 0].reshape(-1, 96, 96)
        assert (views == image).all(axis=(1, 2)).any()
    assert script.main(["--figure", str(path), "--seed", "1"]) == 0
    assert (np.asarray(Image.open(path)) != sheet[:-100]).any()
    line = failure(script, ["--figure", str(path), "--data-dir", str(tmp_path / "none")], capsys)
    assert line.startswith(f"error: {tmp_path / 'none'} has no smallnorb-5x")
