"""Files of MNIST's format with other classes than digits."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import conv_matrix_capsules as m
import make_multimnist_capsnet_gif as overlay_animation
import multimnist_capsnet as overlay
import visualize_multimnist_capsnet as overlay_figures
from figure_checks import draw_coarsely
from helpers import failure
from support.figures import shown_names
from support.files import UserError

Array = np.ndarray
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _coarse_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_coarsely(monkeypatch)


def idx(array: Array) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(root: Path, labels: Sequence[int], n: int = 12) -> Path:
    """Bars at a position that the label's place determines."""
    root.mkdir()
    rng = np.random.default_rng(0)
    for part, count in (("train", n), ("t10k", n // 2)):
        y = np.resize(np.array(labels, np.uint8), count * len(labels))
        x = rng.integers(0, 40, (len(y), 28, 28)).astype(np.uint8)
        for image, label in zip(x, y, strict=True):
            k = list(labels).index(int(label))
            image[:, 5 + 3 * k : 8 + 3 * k] = 255
        (root / f"{part}-images-idx3-ubyte").write_bytes(idx(x))
        (root / f"{part}-labels-idx1-ubyte").write_bytes(idx(y))
    return root


def test_names_in_figures() -> None:
    assert shown_names(["cat", "a" * 20, "猫", "$a$", "Ж"]) == ("cat", "a" * 11 + "…", "class 3", r"\$a\$", "Ж")


# ----------------------------------------------------------------------------------------------------------------------
# Overlays of other classes than digits
# ----------------------------------------------------------------------------------------------------------------------

OVERLAY = [
    "--n-epochs=2", "--n-train=16", "--batch-size=8", "--n-test=16", "--conv-channels=2", "--primary-types=1",
    "--threads=1", "--quiet",
]  # fmt: skip


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_mnist(tmp_path_factory.mktemp("sets") / "letters", [1, 5, 14, 26])
    (root / "classes.txt").write_text("Ankle boot\nE\nN\nŽ\n", encoding="utf-8")
    return root


def test_overlays_of_any_classes(letters: Path, tmp_path: Path, capsys: Capture) -> None:
    out, checkpoint = tmp_path / "run.json", tmp_path / "run.npz"
    argv = ["--dataset=mnist", f"--data-dir={letters}", *OVERLAY]
    assert overlay.main([*argv, f"--out-json={out}", f"--checkpoint={checkpoint}"]) == 0
    assert "4 classes: Ankle boot, E, N, Ž" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert result["chance"] == pytest.approx(1 / 6)
    assert result["config"]["class_names"] == ["Ankle boot", "E", "N", "Ž"]
    config, states = overlay.load_checkpoint(checkpoint)
    assert states["capsnet"].params["routing.w"].shape[2] == 4
    assert states["cnn"].params["out.w"].shape[1] == 4

    test = ["--eval-only", f"--checkpoint={checkpoint}", "--dataset=mnist", "--n-test=16", "--threads=1"]
    assert overlay.main([*test, f"--data-dir={letters}", f"--out-json={out}"]) == 0
    again = json.loads(out.read_text())
    assert {name: model["set_accuracy"] for name, model in again["models"].items()} == {
        name: model["set_accuracy"] for name, model in result["models"].items()
    }
    other = write_mnist(tmp_path / "other", [1, 2])
    line = failure(overlay, [*test, f"--data-dir={other}"], capsys)
    assert "the class 1, which is none that the network was trained on" in line

    Image.fromarray(overlay.make_data(config, config.classes).test.images[0]).convert("L").save(tmp_path / "p.png")
    canvas = np.zeros((36, 36), np.uint8)
    canvas[5:30, 10:13] = 255
    Image.fromarray(canvas).save(tmp_path / "p.png")
    argv = [f"--checkpoint={checkpoint}", "--predict", str(tmp_path / "p.png"), f"--predict-png={tmp_path / 'q.png'}"]
    capsys.readouterr()
    assert overlay.main(argv) == 0
    printed = capsys.readouterr().out
    assert "lengths of Ankle boot ... Ž" in printed
    assert re.search(r"(Ankle boot|E|N|Ž) \(\d", printed)


def test_figures_of_overlays(letters: Path, tmp_path: Path) -> None:
    argv = ["--dataset=mnist", f"--data-dir={letters}", *OVERLAY]
    assert overlay_figures.main([*argv, f"--outdir={tmp_path}"]) == 0
    assert len(list(tmp_path.glob("*/*.png"))) == 7
    assert overlay_animation.main([*argv, f"--out={tmp_path / 'a.gif'}", "--snapshot-every=2"]) == 0


def test_digits_are_read_as_ever(tmp_path: Path) -> None:
    """Ten labels of 0 to 9 are digits, with or without their names."""
    root = write_mnist(tmp_path / "ten", list(range(10)), 2)
    config = overlay.Config(dataset="mnist", data_dir=str(root), n_test=10)
    data = overlay.make_data(config)
    assert data.classes == tuple("0123456789")
    assert overlay.resolved(config, data) == config
    assert config.n_pairs == 45
    gaps = write_mnist(tmp_path / "gaps", [2, 3, 5, 7])
    data = overlay.make_data(overlay.Config(dataset="mnist", data_dir=str(gaps), n_test=10))
    assert data.classes == ("2", "3", "5", "7")
    assert set(np.unique(data.test.labels)) == {0, 1, 2, 3}


def test_digit_experiments_refuse_other_labels(tmp_path: Path) -> None:
    root = write_mnist(tmp_path / "letters", [1, 26])
    with pytest.raises(UserError, match="label 26"):
        m.make_data(m.Config(dataset="mnist", data_dir=root))
