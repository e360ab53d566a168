"""A person's own images: how they are read, what is said of bad ones, and conv_matrix_capsules.py on them; and
multimnist_capsnet.py on files of MNIST's format with other classes than digits."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import compare_seeds
import conv_matrix_capsules as m
import make_multimnist_capsnet_gif as overlay_animation
import multimnist_capsnet as overlay
import visualize_multimnist_capsnet as overlay_figures
from figure_checks import draw_coarsely
from helpers import PICTURE_CLASSES as CLASSES
from helpers import failure, idx, usage_error, write_folder
from support.figures import shown_names
from support.files import UserError

Array = np.ndarray
Capture = pytest.CaptureFixture[str]

TINY = ["--sizes=3,1,2,2", "--batch-size=8", "--n-epochs=1", "--threads=1", "--quiet"]


@pytest.fixture(autouse=True)
def _coarse_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_coarsely(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "own images")


def config_of(path: Path, *flags: str) -> m.Config:
    parser = m.make_parser()
    return m.config_from_args(parser.parse_args(["--dataset=images", f"--data-dir={path}", *flags]))


def data_of(path: Path, *flags: str) -> m.Data:
    return m.make_data(config_of(path, *flags))


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


# ----------------------------------------------------------------------------------------------------------------------
# Runs
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any], str]:
    """Folder, checkpoint, result and what was printed of a short training."""
    root = tmp_path_factory.mktemp("images")
    folder, out = write_folder(root / "own", n=20), root / "run.json"
    argv = ["--dataset=images", f"--data-dir={folder}", *TINY, "--seed=3", "--lr=0.02"]
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("support.results.print_result", printed.append)
        assert m.main([*argv, f"--checkpoint={root / 'run.npz'}", f"--out-json={out}"]) == 0
    return folder, root / "run.npz", json.loads(out.read_text()), printed[0]


def test_images_larger_than_views_pass_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "own", n=4, sides=(48,))
    config, images = config_of(folder, "--image-size=40", "--shift=1"), data_of(folder, "--image-size=40").train.images
    assert images.shape[1:3] == (40, 40)
    assert m.augment(config, images, np.random.default_rng(0)).shape == m.prepared(images, config).shape == images.shape
    checkpoint = tmp_path / "run.npz"
    argv = ["--dataset=images", f"--data-dir={folder}", *TINY, "--image-size=40", f"--checkpoint={checkpoint}"]
    assert m.main(argv) == 0
    assert m.main([f"--checkpoint={checkpoint}", "--predict", str(next(folder.glob("*/*.png")))]) == 0
    assert "cnn" in capsys.readouterr().out


def test_result_and_table_have_the_names_and_the_confusion_matrix(trained: tuple[Any, ...]) -> None:
    _, _, result, printed = trained
    assert result["dataset"] == "images"
    assert result["config"]["class_names"] == sorted(CLASSES)
    assert result["config"]["side"] == 20
    assert result["chance"] == pytest.approx(1 / 3)
    assert result["classes"] == {name: [16, 4] for name in sorted(CLASSES)}
    for name, model in result["models"].items():
        matrix = np.array(result["confusion"][name])
        assert matrix.sum(axis=1).tolist() == [4, 4, 4]
        assert np.trace(matrix) / 12 == pytest.approx(model["accuracy"])
    assert "48 training and 12 test images of 20x20 pixels, grey, 3 classes" in printed
    assert "cnn: answers" in printed
    for name in CLASSES:
        assert printed.count(name) >= 5


def test_testing_a_checkpoint_uses_the_split_of_its_training(
    trained: tuple[Any, ...], capsys: Capture, tmp_path: Path
) -> None:
    folder, checkpoint, result, _ = trained
    out = tmp_path / "again.json"
    test = ["--eval-only", f"--checkpoint={checkpoint}", "--dataset=images", f"--data-dir={folder}", "--threads=1"]
    assert m.main([*test, f"--out-json={out}"]) == 0
    again = json.loads(out.read_text())
    assert again["confusion"] == result["confusion"]
    assert again["seed"] == 3
    assert "warning" not in capsys.readouterr().err
    assert "made with --seed 3, not 4" in failure(m, [*test, "--seed=4"], capsys)
    few = shutil.copytree(folder, tmp_path / "few")
    shutil.rmtree(few / CLASSES[1])
    assert m.main([*test[:-2], f"--data-dir={few}", "--threads=1", f"--out-json={out}"]) == 0
    assert json.loads(out.read_text())["classes"][CLASSES[1]] == [0, 0]
    assert "may have been trained on" in capsys.readouterr().err
    write_folder(few, ["bird"], n=3)
    line = failure(m, [*test[:-2], f"--data-dir={few}"], capsys)
    assert "the class bird, which is none that the network was trained on" in line
    assert "whose images and classes are not those" in failure(m, [*test[:2], "--dataset=strokes"], capsys)


def test_resuming(trained: tuple[Any, ...], tmp_path: Path, capsys: Capture) -> None:
    folder, checkpoint, result, _ = trained
    copy = shutil.copy(checkpoint, tmp_path / "run.npz")
    argv = ["--dataset=images", *TINY, "--seed=3", "--lr=0.02", f"--checkpoint={copy}", "--resume"]
    assert m.main([*argv, f"--data-dir={folder}", f"--out-json={tmp_path / 'run.json'}"]) == 0
    assert json.loads((tmp_path / "run.json").read_text())["confusion"] == result["confusion"]
    capsys.readouterr()
    other = shutil.copytree(folder, tmp_path / "other")
    (other / CLASSES[0]).rename(other / "bird")
    line = failure(m, [*argv, f"--data-dir={other}"], capsys)
    assert "it was made with the classes dark left,heller,猫, not bird,heller,猫" in line
    grown = shutil.copytree(folder, tmp_path / "grown")
    Image.new("L", (20, 20), 90).save(grown / CLASSES[0] / "one more.png")
    assert "made with pictures with the checksum " in failure(m, [*argv, f"--data-dir={grown}"], capsys)


def test_prediction_answers_with_names(trained: tuple[Any, ...], tmp_path: Path, capsys: Capture) -> None:
    folder, checkpoint, _, _ = trained
    path = next((folder / CLASSES[2]).iterdir())
    assert m.main([f"--checkpoint={checkpoint}", "--predict", str(path)]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert all(name in head for name in CLASSES)
    assert re.search("|".join(CLASSES), line.removeprefix(str(path)))
    config, states = m.load_checkpoint(checkpoint)
    scores = m.conv_cnn_forward(states["cnn"].params, m.read_picture(path, config))[0]
    assert config.classes[int(scores[0].argmax())] in line.removeprefix(str(path))
    data = m.make_data(config, config.classes)
    everything = np.concatenate([data.train.images, data.test.images])
    assert (m.read_picture(path, config) == everything).all(axis=(1, 2, 3)).any()  # as in the training
    assert "there is no picture" in failure(m, [f"--checkpoint={checkpoint}", "--predict", "nowhere.png"], capsys)


def test_flags_that_do_not_fit_together(tmp_path: Path, capsys: Capture) -> None:
    assert "needs --data-dir" in usage_error(m, ["--dataset=images"], capsys)
    assert "argument --image-size: needs --dataset images" in usage_error(m, ["--image-size=20"], capsys)
    assert "argument --colour: needs --dataset images" in usage_error(m, ["--colour=grey"], capsys)
    images = ["--dataset=images", f"--data-dir={tmp_path}"]
    assert "needs --dataset voxels" in usage_error(m, [*images, "--n-elev=2"], capsys)
    assert config_of(tmp_path).n_epochs == m.OWN_EPOCHS
    assert config_of(tmp_path, "--n-epochs=2").n_epochs == 2


def test_no_output_replaces_a_picture_or_the_set(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    images = ["--dataset=images", f"--data-dir={folder}"]
    path = folder / CLASSES[0] / "bild 0ß.png"
    assert "would overwrite" in usage_error(m, [*images, f"--out-json={path}"], capsys)
    np.savez(tmp_path / "set.npz", x_train=np.zeros((6, 20, 20)), y_train=np.arange(6))
    argv = ["--dataset=images", f"--data-dir={tmp_path / 'set.npz'}", f"--checkpoint={tmp_path / 'set.npz'}"]
    assert "would overwrite" in usage_error(m, argv, capsys)


def test_names_in_figures() -> None:
    assert shown_names(["cat", "a" * 20, "猫", "$a$", "Ж"]) == ("cat", "a" * 11 + "…", "class 3", r"\$a\$", "Ж")


def test_many_seeds(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "seeds.json"
    argv = ["conv_matrix_capsules", "--seeds=0:2", "--jobs=1", f"--out={out}"]
    assert compare_seeds.main([*argv, "--", "--dataset=images", f"--data-dir={folder}",
                               *TINY[:3]]) == 0  # fmt: skip
    document = json.loads(out.read_text())
    assert document["dataset"] == "images"
    assert document["chance"] == pytest.approx(1 / 3)


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
        m.make_data(m.Config(dataset="mnist", data_dir=str(root)))
