"""Digits are read in every form in which people have them; what is wrong with a file is one line that names it."""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.digit_files import read_digit_files
from helpers import ROOT, Array, Capture, Patch, idx, strokes
from multimnist_capsnet import load_mnist

Digits = tuple[Array, ...]  # training images and labels, test images and labels
Form = Callable[[Digits], dict[str, bytes]]  # its files, by their names


def some() -> Digits:
    """No two images are alike, nor is one like its transpose, and labels are of all classes."""
    digits = strokes()
    return digits.train_images[:40], digits.train_labels[:40], digits.test_images[:20], digits.test_labels[:20]


def turned(digits: Digits) -> Digits:
    return tuple(x.swapaxes(1, 2) if x.ndim == 3 else x for x in digits)


def parts_of(digits: Digits) -> list[tuple[str, Array, Array]]:
    return [("train", digits[0], digits[1]), ("test", digits[2], digits[3])]


def write(files: dict[str, bytes], root: Path) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


# --- The forms --------------------------------------------------------------------------------------------------------


def idx_files(pattern: str = "{part}-{what}-idx{n}-ubyte", test: str = "t10k", pack: bool = False) -> Form:
    def files(digits: Digits) -> dict[str, bytes]:
        names = [pattern.format(part=part, what=what, n=n) for part in ("train", test)
                 for what, n in (("images", 3), ("labels", 1))]
        return {name: gzip.compress(idx(x)) if pack else idx(x) for name, x in zip(names, digits, strict=True)}

    return files


def qmnist(digits: Digits) -> dict[str, bytes]:
    """Labels of eight columns: the class, the kind of writer, his number, ..."""
    found: dict[str, bytes] = {}
    for part, images, labels in parts_of(digits):
        columns = np.arange(8 * len(labels), dtype=">i4").reshape(-1, 8)
        columns[:, 0] = labels
        head = bytes((0, 0, 12, 2)) + np.array(columns.shape, ">u4").tobytes()
        found |= {f"qmnist-{part}-images-idx3-ubyte.gz": gzip.compress(idx(images)),
                  f"qmnist-{part}-labels-idx2-int.gz": gzip.compress(head + columns.tobytes())}
    return found


def csv(names: str = "{}.csv", head: bool = True, last: bool = False, number: str = "%d") -> Form:
    """``last``: the label is the last column. ``number``: as "%d" or "%.18e", which is numpy's own."""

    def files(digits: Digits) -> dict[str, bytes]:
        found, columns = {}, [f"pixel{k}" for k in range(784)]
        columns.insert(784 * last, "label")
        for part, images, labels in parts_of(digits):
            rows = np.insert(images.reshape(len(images), -1).astype(int), 784 * last, labels, axis=1)
            np.savetxt(stream := io.BytesIO(), rows, number, ",", "\r\n", ",".join(columns) * head, comments="")
            found[names.format(part)] = stream.getvalue()
        return found

    return files


def npz(*names: str, convert: Callable[[Array], Array] = np.asarray) -> Form:
    def files(digits: Digits) -> dict[str, bytes]:
        arrays = [convert(x) if x.ndim == 3 else x for x in digits]
        named: dict[str, Any] = dict(zip(names, arrays, strict=False))
        np.savez(stream := io.BytesIO(), **named)
        return {"mnist.npz": stream.getvalue()}

    return files


def mat(digits: Digits) -> dict[str, bytes]:
    savemat, parts = pytest.importorskip("scipy.io").savemat, dict[str, Any](mapping=np.eye(2))
    for part, images, labels in parts_of(turned(digits)):
        parts[part] = {"images": images.reshape(len(images), -1), "labels": labels[:, None].astype(float)}
    savemat(stream := io.BytesIO(), {"dataset": parts})
    return {"emnist-digits.mat": stream.getvalue()}


def kmnist(digits: Digits) -> dict[str, bytes]:
    names = [f"kmnist-{name}.npz" for name in ("train-imgs", "train-labels", "test-imgs", "test-labels")]
    return {name: npz("arr_0")((array,))["mnist.npz"] for name, array in zip(names, digits, strict=True)}


def other_head(digits: Digits) -> dict[str, bytes]:
    """As a spreadsheet writes it: a mark of its encoding, and names in quotes, one of which float() takes."""
    marked = {name: "\ufeff".encode() + content for name, content in csv("digits-{}.csv")(digits).items()}
    return {name: x.replace(b"label", b'"Label"').replace(b"pixel783", b'"nan"') for name, x in marked.items()}


KERAS = ("x_train", "y_train", "x_test", "y_test")
FORMS: dict[str, Form] = {
    "MNIST": idx_files(),
    "packed under the old name": idx_files(pack=True),
    "upper case": idx_files("{part}-{what}-IDX{n}-UBYTE", "T10K"),
    "torchvision": idx_files("MNIST/raw/{part}-{what}-idx{n}-ubyte"),
    "folders of the files' names": idx_files("{part}-{what}.idx{n}-ubyte/{part}-{what}-idx{n}-ubyte"),
    "EMNIST": lambda d: idx_files("emnist-digits-{part}-{what}-idx{n}-ubyte.gz", "test", pack=True)(turned(d)),
    "EMNIST, a folder": lambda d: idx_files("EMNIST/raw/{part}-{what}-idx{n}-ubyte")(turned(d)),
    "other words": idx_files("tissuemnist-affinemnist-{part}-{what}-idx{n}-ubyte", "test"),
    "QMNIST": qmnist,
    "Kaggle": csv(),
    "without a head": csv("mnist_{}.csv", head=False),
    "numpy.savetxt": csv(head=False, number="%.18e"),
    "another head": other_head,
    "the label last": csv("digits-{}.csv", last=True),
    "the label first, under another name": lambda d: {
        name: content.replace(b"label", b"class") for name, content in csv("digits-{}.csv")(d).items()
    },
    "EMNIST's CSV": lambda d: csv("emnist-mnist-{}.csv", head=False)(turned(d)),
    "Keras": npz(*KERAS),
    "long names": npz("train_images", "train_labels", "test_images", "test_labels"),
    "without names": npz("arr_0", "arr_1", "arr_2", "arr_3"),
    "in another order": npz("arr_0", "arr_2", "arr_1", "arr_3"),
    "rows without names": npz(*(f"arr_{k}" for k in range(4)), convert=lambda x: x.reshape(len(x), -1)),
    "0 to 1": npz(*KERAS, convert=lambda x: x[..., None] / 255),
    "black or white": npz(*KERAS, convert=lambda x: x >= 128),
    "black or white in bytes": npz(*KERAS, convert=lambda x: (x >= 128).astype(np.uint8)),
    "0 to 255, long": npz(*KERAS, convert=lambda x: x.reshape(len(x), -1).astype(np.int64)),
    "KMNIST": kmnist,
    "EMNIST's .mat": mat,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read(form: str, tmp_path: Path, capsys: Capture) -> None:
    """A single file may be named instead of its folder."""
    files = FORMS[form](some())
    write(files, place := tmp_path / "folder")
    if len(files) == 1:
        (name,) = files
        place /= name
        place.with_name(f"other{place.suffix}").write_bytes(b"x")
    wanted = [array // 128 * 255 if "black or white" in form and array.ndim == 3 else array for array in some()]
    for array, expected in zip(read_digit_files(place), wanted, strict=True):
        assert array.dtype == np.uint8
        np.testing.assert_array_equal(array, expected)
    assert ("turned upright" in capsys.readouterr().err) == (form.startswith("EMNIST") and "mat" not in form)


def test_the_folders_own_name_is_emnist_or_holds_the_word_in_another(tmp_path: Path, monkeypatch: Patch) -> None:
    def is_read(*places: str | Path) -> bool:
        return all(np.array_equal(read_digit_files(place)[0], some()[0]) for place in places)

    for name, is_turned in (("EMNIST", 1), ("my_emnist-2", 1), ("tissuemnist", 0), ("emnists", 0)):
        write(FORMS["MNIST"](turned(some()) if is_turned else some()), tmp_path / name)
        assert is_read(tmp_path / name), name
        np.testing.assert_array_equal(load_mnist(tmp_path / name).train_images, some()[0], err_msg=name)
    (tmp_path / "link").symlink_to(tmp_path / "EMNIST", target_is_directory=True)
    np.testing.assert_array_equal(load_mnist(tmp_path / "link").train_images, some()[0])
    write(FORMS["MNIST"](some()), tmp_path / "emnist project" / "mnist")  # a folder around it says nothing
    monkeypatch.chdir(tmp_path / "EMNIST")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert is_read(tmp_path / "emnist project" / "mnist", ".", "~/EMNIST")


def test_without_a_test_set_every_seventh_digit_is_taken(tmp_path: Path, capsys: Capture) -> None:
    train, labels, *_ = some()
    (name, whole), (test, content) = FORMS["Kaggle"](some()).items()
    unlabelled = b"".join(line.partition(b",")[2] + b"\n" for line in content.splitlines())
    write({name: whole, test: unlabelled, "sample_submission.csv": b"ImageId,Label\n1,0\n"}, tmp_path)
    write({"._train.csv": b"Mac OS X", f"._{name}": b"Mac OS X"}, tmp_path)  # its companions of files
    found = read_digit_files(tmp_path)
    taken = np.arange(40) % 7 == 6
    for array, expected in zip(found, (train[~taken], labels[~taken], train[taken], labels[taken]), strict=True):
        np.testing.assert_array_equal(array, expected)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"{tmp_path / test} has no labels, so it is no test set"
    assert said[1:] == [f"{tmp_path}: no test set with labels, so every seventh digit, 5 in all, is taken for it"]


# --- What is wrong ----------------------------------------------------------------------------------------------------


def zipped(name: str) -> bytes:
    with zipfile.ZipFile(stream := io.BytesIO(), "w") as archive:
        archive.writestr(name, b"x")
    return stream.getvalue()


GOOD = FORMS["MNIST"](some())
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
PIXELS = GOOD[IMAGES]
BAD: dict[str, tuple[dict[str, bytes], str]] = {
    "nothing": ({"notes.txt": b"x"}, "{} has no digits: put MNIST's four files, train.csv"),
    **{f"a packed folder, {end}": ({f"gzip.{end}": b"x"}, f"gzip.{end} is packed: unpack it first")
       for end in ("zip", "tar", "tgz", "7z", "RAR")},
    **{f"images {what}": (GOOD | {IMAGES: content}, f"{IMAGES} cannot be read") for what, content in {
        "cut": PIXELS[:-1], "too long": PIXELS + b"x", "empty": b"", "of 32 bits": bytes((0, 0, 12, 3)) + PIXELS[4:],
        "of 255 axes": PIXELS[:3] + b"\xff" + PIXELS[4:], "packed and cut": gzip.compress(PIXELS)[:-9],
    }.items()},
    "text": (GOOD | {LABELS: b"<html>404</html>"}, f"{LABELS} cannot be read: it is no IDX file"),
    "a file is missing": ({k: v for k, v in GOOD.items() if k != LABELS}, "{} has no train-labels"),
    "no training": ({k: v for k, v in GOOD.items() if "t10k" in k}, "{} has no train-images"),
    "two sets": (GOOD | {f"emnist-{k}": v for k, v in GOOD.items()}, "{} holds several sets"),
    "letters": (GOOD | {LABELS: idx(np.full(40, 26, np.uint8))}, "{} has the label 26"),
    "fewer labels": (GOOD | {LABELS: idx(np.zeros(39, np.uint8))}, "{} has 40 images, but 39 labels"),
    "fewer labels of the test": (GOOD | {"t10k-labels-idx1-ubyte": idx(np.zeros(19, np.uint8))}, "{} has 20 images"),
    "labels of pictures": (GOOD | {LABELS: idx(np.zeros((40, 3), np.uint8))}, "{} has labels of the shape (40, 3)"),
    "32 x 32": (GOOD | {IMAGES: idx(np.zeros((40, 32, 32), np.uint8))}, "{} has images of the shape (40, 32, 32)"),
    "no digit": (GOOD | {IMAGES: idx(np.zeros((0, 28, 28), np.uint8))}, "{} has images of the shape (0, 28, 28)"),
    "no label": ({"train.csv": b"pixel0,pixel1\n1,2\n"}, "train.csv cannot be read"),
    "no labels": ({"train.csv": b",".join([b"x"] * 784) + b"\n" + b",".join([b"1"] * 784)}, "train.csv has no labels"),
    "no labels, no head": ({"train.csv": b"\n".join([b",".join([b"1"] * 784)] * 2)}, "train.csv has no labels"),
    "a word": ({"train.csv": b",".join([b"1"] * 784 + [b"2"]) + b"\n" + b"x,y\n"}, "train.csv cannot be read"),
    "no row": ({"train.csv": b"label,pixel0\n"}, "train.csv cannot be read: it has no row"),
    "an empty table": ({"train.csv": b""}, "train.csv cannot be read: it has no row"),
    "half a label": (npz(*KERAS)((*some()[:1], some()[1] + 0.5, *some()[2:])), "{} has the label 9.5"),
    "no number": (npz(*KERAS, convert=lambda x: x * np.nan)(some()), "{} has images of nan to nan"),
    "below 0": (npz(*KERAS, convert=lambda x: x - 1.0)(some()), "{} has images of -1 to 254"),
    "beyond 255": (npz(*KERAS, convert=lambda x: x * 2.0)(some()), "{} has images of 0 to 510"),
    "other arrays": (npz("a", "b", "c", "d")(some()), "mnist.npz has the arrays a, b, c, d, not x_train"),
    "objects": (npz("arr_0", "arr_1", "arr_2", "arr_3")((*some()[:3], np.array([None]))), "mnist.npz is no .npz file"),
    "no arrays": ({"mnist.npz": zipped("x.png")}, "mnist.npz is no .npz file"),
    "empty archive": ({"mnist.npz": b"PK\5\6" + bytes(18)}, "mnist.npz is no .npz file that can be read: it has no"),
    **{f"two {end}": ({f"a{end}": b"", f"b{end}": b""}, "{} holds several sets") for end in (".npz", ".mat")},
    "a packed .mat": ({"a.mat": zipped("a.mat")}, "a.mat cannot be read: it is a ZIP file: unpack it"),
    "MATLAB 7.3": ({"a.mat": b"MATLAB 7.3 MAT-file, Platform" + bytes(500)}, "a.mat cannot be read: it is of MATLAB 7"),
    "no MATLAB": ({"a.mat": b"hello"}, "a.mat cannot be read"),
    "few, and no test": (npz(*KERAS[:2])(tuple(x[:6] for x in some()[:2])), "{} has no test set, and 6 digits"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_wrong_is_one_line_that_names_the_file(kind: str, tmp_path: Path) -> None:
    files, says = BAD[kind]
    write(files, tmp_path)
    with pytest.raises(ValueError, match=r".") as caught:
        read_digit_files(tmp_path)
    text = str(caught.value)
    assert says.format(tmp_path) in text
    assert str(tmp_path) in text
    assert "\n" not in text
    assert len(text) < 500


def test_numpy_suffices() -> None:
    """The module and its reading of all but .mat."""
    blocked = "import sys; sys.modules |= dict.fromkeys(('scipy', 'PIL', 'matplotlib', 'imageio'))"
    code = f"{blocked}; import data.digit_files, data.stroke_digits"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
