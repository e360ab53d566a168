"""Files and pictures of odd kinds, and what the tests themselves leave alone."""

from __future__ import annotations

import importlib
import socket
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from data import affnist_file, pictures
from helpers import EXPERIMENTS, ROOT, smallest, usage_error
from support import files

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py") if "\ndef main(" in path.read_text(encoding="utf-8"))
TRAINING = EXPERIMENTS.keys() - {"capsule_attacks"}  # whose figures are drawn after a training
FIGURES = [name for name in SCRIPTS if name.partition("_")[2].removesuffix("_gif") in TRAINING]


@pytest.fixture(autouse=True)
def _smallest(monkeypatch: Patch) -> None:
    smallest(monkeypatch)


@pytest.fixture
def no_run(monkeypatch: Patch) -> None:
    """What is wrong has to be found before any data are made, and before the first run of a comparison."""
    for experiment in EXPERIMENTS.values():
        monkeypatch.setattr(experiment.script, "make_data", lambda config: pytest.fail("got as far as the data"))
    monkeypatch.setattr(importlib.import_module("compare_seeds"), "compare", lambda *_: pytest.fail("compared"))


# ----------------------------------------------------------------------------------------------------------------------
# Written files
# ----------------------------------------------------------------------------------------------------------------------


# ----------------------------------------------------------------------------------------------------------------------
# Data and pictures that are too large, or turned
# ----------------------------------------------------------------------------------------------------------------------


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
    assert "argument --data-dir: strokes " in usage_error(importlib.import_module(name), argv, capsys)


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
