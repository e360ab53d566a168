"""Files and pictures of odd kinds, and what the tests themselves leave alone."""

from __future__ import annotations

import importlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from data import affnist_file, norb_files, pictures
from helpers import EXPERIMENTS, ROOT, Experiment, smallest, usage_error
from support import files

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py") if "\ndef main(" in path.read_text(encoding="utf-8"))
FIGURES = [name for name in SCRIPTS if name.partition("_")[2].removesuffix("_gif") in EXPERIMENTS]


@pytest.fixture(params=EXPERIMENTS, scope="module")
def experiment(request: pytest.FixtureRequest) -> Experiment:
    return EXPERIMENTS[request.param]


@pytest.fixture(autouse=True)
def _smallest(monkeypatch: Patch) -> None:
    smallest(monkeypatch)


@pytest.fixture
def no_run(monkeypatch: Patch) -> None:
    """What is wrong has to be found before any data are made, and before the first run of a comparison."""
    for experiment in EXPERIMENTS.values():
        monkeypatch.setattr(experiment.script, "make_data", lambda config: pytest.fail("got as far as the data"))
    monkeypatch.setattr(importlib.import_module("compare_seeds"), "compare", lambda *_: pytest.fail("compared"))


def content(folder: Path) -> dict[str, bytes | None]:
    """Every file of a folder, and the folders in it."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


# ----------------------------------------------------------------------------------------------------------------------
# Written files
# ----------------------------------------------------------------------------------------------------------------------


def test_a_symbolic_link_keeps_being_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/real").write_text("old")
    for name, target in (("link", "folder/real"), ("dangling", "folder/new")):
        (tmp_path / name).symlink_to(target)
        files.require_writable(tmp_path / name)
        with files.atomic_write(tmp_path / name) as stream:
            stream.write(b"new")
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / target).read_text() == "new"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["dangling", "folder", "link", "new", "real"]


# ----------------------------------------------------------------------------------------------------------------------
# Data and pictures that are too large, or turned
# ----------------------------------------------------------------------------------------------------------------------


def test_a_photograph_is_seen_upright(tmp_path: Path) -> None:
    grey = np.linspace(0, 255, 30 * 20).astype(np.uint8).reshape(30, 20)
    upright, turned = tmp_path / "upright.png", tmp_path / "turned.png"
    Image.fromarray(grey).save(upright)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by a quarter, clockwise
    Image.fromarray(np.rot90(grey).copy()).save(turned, exif=exif)
    np.testing.assert_array_equal(pictures.read_grey(turned), pictures.read_grey(upright))
    deep = Image.fromarray(np.rot90(grey.astype(np.int32) * 257).astype(np.uint16).copy())
    deep.save(tmp_path / "deep.png", exif=exif)
    np.testing.assert_allclose(pictures.read_grey(tmp_path / "deep.png"), pictures.read_grey(upright))


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def huge_png(path: Path, width: int, height: int) -> None:
    """A PNG that claims a size and holds nothing."""
    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    body = png_chunk(b"IHDR", size + bytes((8, 0, 0, 0, 0))) + png_chunk(b"IDAT", zlib.compress(b""))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body + png_chunk(b"IEND", b""))


@pytest.mark.parametrize("side", [8_000, 10_000, 100_000])  # Pillow warns from 9,500 on, and raises from 13,400
def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(side: int, tmp_path: Path) -> None:
    huge_png(tmp_path / "huge.png", side, side)
    with pytest.raises(files.UserError) as error:
        pictures.read_grey(tmp_path / "huge.png")
    said = f"{tmp_path / 'huge.png'} has {side:,} x {side:,} pixels: make it smaller than 50,000,000"
    assert str(error.value) == said
    assert Image.MAX_IMAGE_PIXELS is not None


def test_what_pillow_finds_odd_is_no_warning(tmp_path: Path) -> None:
    """An animation of no frames, of which it warns, and warnings are errors here."""
    Image.new("L", (30, 30)).save(tmp_path / "p.png")
    plain = (tmp_path / "p.png").read_bytes()
    (tmp_path / "p.png").write_bytes(plain[:33] + png_chunk(b"acTL", bytes(8)) + plain[33:])
    assert pictures.read_grey(tmp_path / "p.png").shape == (30, 30)


def test_a_pipe_is_no_picture(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(files.UserError, match=r"pipe is not a picture: it is no regular file$"):
        pictures.read_grey(tmp_path / "pipe")
    with pytest.raises(files.UserError, match=r"is not a picture: it is a folder$"):
        pictures.read_grey(tmp_path)


def test_a_label_file_that_claims_too_many_items_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "smallnorb-cat.mat"
    for n_items in (2**31 - 1, norb_files.NORB_ITEMS + 1):
        path.write_bytes(np.array([0x1E3D4C54, 1, n_items, 1, 1], "<i4").tobytes() + bytes(4 * 30_000))
        with pytest.raises(files.UserError, match=f"{path} claims {n_items:,} items; an official file has 24,300"):
            list(norb_files.stream_norb(path, np.dtype("<i4"), ()))


def test_a_mat_file_that_grows_a_thousandfold_is_refused(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "bomb.mat"
    pixels = np.zeros((1600, 60_000), np.uint8)
    savemat(path, {"affNISTdata": {"image": pixels, "label_int": np.zeros(60_000)}}, do_compression=True)
    assert path.stat().st_size < 200_000
    with pytest.raises(files.UserError, match=f"{path} is not an affNIST file: it unpacks to 100 times its size$"):
        affnist_file.read_affnist(path)
    pixels = np.random.default_rng(0).integers(0, 2, (1600, 50), np.uint8)
    savemat(path, {"affNISTdata": {"image": pixels, "label_int": np.arange(50) % 10}}, do_compression=True)
    assert len(affnist_file.read_affnist(path)[0]) == 50


# ----------------------------------------------------------------------------------------------------------------------
# Flags that would be passed over, and their true causes
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_run")
@pytest.mark.parametrize("name", [name for name in [*EXPERIMENTS, *FIGURES] if "smallnorb" not in name])
def test_generated_digits_have_no_folder(name: str, tmp_path: Path, capsys: Capture) -> None:
    argv = ["--dataset", "strokes", "--data-dir", str(tmp_path)]
    assert "argument --data-dir: strokes has no files" in usage_error(importlib.import_module(name), argv, capsys)


# ----------------------------------------------------------------------------------------------------------------------
# The tests themselves
# ----------------------------------------------------------------------------------------------------------------------


def test_no_test_reaches_the_network_or_somebody_s_home() -> None:
    with socket.socket() as ours, pytest.raises(AssertionError, match=r"a test asks the network for 192\.0\.2\.1"):
        ours.connect(("192.0.2.1", 80))
    with pytest.raises(AssertionError, match="a test asks the network for example"):
        socket.getaddrinfo("example", 80)
    assert not list(Path.home().glob(".cache/hinton-mnist/*"))
    assert Path.home().parent == Path(tempfile.gettempdir())


def test_tests_without_data_say_which_are_skipped_and_why() -> None:
    tests = ["tests/test_smallnorb_files.py", "tests/test_multimnist_data.py", "-m", "real_data"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    env = os.environ | {"CAPSULES_DATA": "/nowhere"}
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout
    skipped = re.findall(r"SKIPPED \[\d+\] tests/(\w+)\.py:\d+: no /nowhere/(\w+): CAPSULES_DATA names", process.stdout)
    assert set(skipped) == {("test_smallnorb_files", "smallnorb_sample"), ("test_multimnist_data", "mnist")}
