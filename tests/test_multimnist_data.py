"""The MNIST loader on good and bad files, its download from mirrors that are folders, the stroke digits."""

from __future__ import annotations

import functools
import gzip
import hashlib
import zlib
from pathlib import Path

import numpy as np
import pytest

import multimnist_capsnet as multimnist
from data import stroke_digits
from helpers import MNIST, Capture, Patch, idx, needs_mnist

STEMS = tuple(multimnist.MNIST_SHA256)


@functools.cache
def tiny_mnist() -> dict[str, bytes]:
    """The four files of a data set of 30 + 10 noise images, gzipped."""
    rng = np.random.default_rng(0)
    files = {}
    for part, n in (("train", 30), ("t10k", 10)):
        files[f"{part}-images-idx3-ubyte"] = idx(rng.integers(0, 256, (n, 28, 28), np.uint8))
        files[f"{part}-labels-idx1-ubyte"] = idx(np.arange(n, dtype=np.uint8) % 10)
    return {stem: gzip.compress(files[stem], mtime=0) for stem in STEMS}


IMAGES, LABELS = (gzip.decompress(tiny_mnist()[stem]) for stem in STEMS[:2])


def place(folder: Path, **changed: bytes) -> Path:
    """Write tiny MNIST into a folder, with the files of some parts changed (train_images=...)."""
    folder.mkdir(parents=True, exist_ok=True)
    for stem, body in tiny_mnist().items():
        (folder / f"{stem}.gz").write_bytes(changed.get("_".join(stem.split("-")[:2]), body))
    return folder


def fault_of(choice: str, folder: Path | None) -> str:
    """What a person is told of digits that cannot be had: one line."""
    with pytest.raises(OSError) as caught:
        multimnist.resolve_dataset(choice, np.random.default_rng(0), folder)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 700
    return message


# --- reading files ----------------------------------------------------------------------------------------------------


@needs_mnist
def test_real_mnist_is_read_and_called_mnist() -> None:
    digits = multimnist.load_mnist(MNIST)
    assert digits.name == "mnist"
    assert (digits.train_images.shape, digits.test_images.shape) == ((60000, 28, 28), (10000, 28, 28))
    assert digits.train_images.dtype == digits.train_labels.dtype == np.uint8
    assert np.bincount(digits.train_labels).tolist()[:3] == [5923, 6742, 5958]
    assert np.bincount(digits.test_labels).tolist()[:3] == [980, 1135, 1032]
    found = {stem: hashlib.sha256((MNIST / f"{stem}.gz").read_bytes()).hexdigest() for stem in STEMS}
    assert found == multimnist.MNIST_SHA256


@pytest.mark.parametrize("form", ["{}.gz", "{}", "plain file named {}.gz", "dotted"])
def test_every_usual_form_of_the_files_is_read(form: str, tmp_path: Path, monkeypatch: Patch) -> None:
    for stem, body in tiny_mnist().items():
        name = stem.replace("-idx", ".idx") if form == "dotted" else form.rpartition(" ")[2].format(stem)
        (tmp_path / name).write_bytes(body if form == "{}.gz" else gzip.decompress(body))
    digits = multimnist.load_mnist(tmp_path)
    assert digits.name == "custom"
    assert digits.train_images.tobytes() == IMAGES[16:]
    assert digits.test_labels.tolist() == list(range(10))
    monkeypatch.setattr(multimnist, "MNIST_CRC32", zlib.crc32(b"".join(array.tobytes() for array in digits[1:])))
    assert multimnist.load_mnist(tmp_path).name == "mnist"
    (tmp_path / "raw").mkdir()  # where torchvision has them
    for path in [path for path in tmp_path.iterdir() if path.is_file()]:
        path.rename(tmp_path / "raw" / path.name)
    assert multimnist.load_mnist(tmp_path).name == "mnist"


BAD = {  # the file that is changed, its content, and what is said
    **{kind: ("train_images", content, "/train-images-idx3-ubyte.gz is no intact MNIST file (") for kind, content in {
        "empty": b"",
        "short header": IMAGES[:9],
        "truncated": IMAGES[:-1],
        "trailing": IMAGES + b"\0",
        "labels in place of images": LABELS,
        "32x32": idx(np.zeros((30, 32, 32), np.uint8)),
        "no image": idx(np.zeros((0, 28, 28), np.uint8)),
        "gz truncated": gzip.compress(IMAGES)[:-400],
        "gz CRC": gzip.compress(IMAGES)[:-8] + b"\1\2\3\4" + gzip.compress(IMAGES)[-4:],
        "gz body": b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 99,
    }.items()},
    "a label of letters": ("train_labels", idx(np.full(30, 10, np.uint8)), " has the label 10"),
    "a label too many": ("t10k_labels", idx(np.zeros(11, np.uint8)), "/t10k-images-idx3-ubyte.gz has 10 images but "),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_named_and_kept(tmp_path: Path, kind: str) -> None:
    """Nor are strokes drawn in its place."""
    name, content, says = BAD[kind]
    place(tmp_path, **{name: content})
    assert f"{tmp_path}{says}" in fault_of("auto", tmp_path)
    assert content in [path.read_bytes() for path in tmp_path.iterdir()]


@pytest.mark.parametrize("choice", ["auto", "mnist"])
def test_data_dir_that_is_missing_or_incomplete(choice: str, tmp_path: Path) -> None:
    assert "has no train-images" in fault_of(choice, tmp_path / "nowhere")
    assert "has no digits: put MNIST's four files" in fault_of(choice, tmp_path)
    (place(tmp_path) / f"{STEMS[2]}.gz").unlink()
    (tmp_path / STEMS[2]).mkdir()  # a folder is no file
    assert f"{tmp_path} has no {STEMS[2]}.gz" in fault_of(choice, tmp_path)


# --- downloads --------------------------------------------------------------------------------------------------------


NAMES = [f"{stem}.gz" for stem in STEMS]
DEAD_URL = "http://127.0.0.1:9/"  # where nobody listens


@pytest.fixture
def mirror(monkeypatch: Patch, tmp_path: Path) -> str:
    """The address of a good mirror of tiny MNIST, whose hashes take the place of the canonical ones."""
    sha256 = {stem: hashlib.sha256(body).hexdigest() for stem, body in tiny_mnist().items()}
    address = f"{place(tmp_path / 'mirror').as_uri()}/"
    monkeypatch.setattr(multimnist, "MNIST_SHA256", sha256)
    monkeypatch.setattr(multimnist, "MIRRORS", (address,))
    return address


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Of a home folder that has none yet."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".cache" / "hinton-mnist"


def test_download_fills_the_cache_with_what_is_missing(mirror: str, cache: Path, capfd: Capture) -> None:
    assert multimnist.load_mnist().train_images.tobytes() == IMAGES[16:]
    multimnist.load_mnist()
    (cache / NAMES[1]).unlink()
    multimnist.load_mnist()
    assert sorted(path.name for path in cache.iterdir()) == sorted(NAMES)  # nothing left over
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [f"downloading {mirror}{name}" for name in (*NAMES, NAMES[1])]


@pytest.mark.parametrize("kind", ["dead", "corrupt", "truncated", "missing"])
def test_the_second_mirror_where_the_first_has_no_good_file(
    kind: str, mirror: str, cache: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    body, bad = tiny_mnist()[STEMS[0]], tmp_path / "bad"
    bad.mkdir()
    if kind != "missing":
        (bad / NAMES[0]).write_bytes({"corrupt": b"x" + body[1:], "truncated": body[:-9]}.get(kind, b""))
    url = DEAD_URL if kind == "dead" else f"{bad.as_uri()}/"
    monkeypatch.setattr(multimnist, "MIRRORS", (url,))
    message = fault_of("mnist", None)
    for part in (url, str(cache), "--data-dir", "--dataset strokes"):
        assert part in message
    assert multimnist.TIMEOUT <= 10  # seconds, that a person waits where nothing answers
    assert not (cache / NAMES[0]).exists()
    monkeypatch.setattr(multimnist, "MIRRORS", (url, mirror))
    assert multimnist.load_mnist().train_images.tobytes() == IMAGES[16:]


def test_auto_falls_back_to_strokes_with_a_warning(mirror: str, monkeypatch: Patch, capfd: Capture) -> None:
    monkeypatch.setattr(multimnist, "STROKE_COUNTS", (20, 10))
    assert multimnist.resolve_dataset("auto", np.random.default_rng(0)).name == "custom"
    assert "WARNING" not in capfd.readouterr().err
    monkeypatch.setenv("HOME", "/nowhere/at/all")
    monkeypatch.setattr(multimnist, "MIRRORS", (DEAD_URL,))
    digits = multimnist.resolve_dataset("auto", np.random.default_rng(0))
    assert (digits.name, len(digits.train_images), len(digits.test_images)) == ("strokes", 20, 10)
    out, err = capfd.readouterr()
    assert out == ""
    assert "WARNING: this run does NOT use MNIST" in err
    assert DEAD_URL in err


# --- stroke digits ----------------------------------------------------------------------------------------------------


@functools.cache
def some_strokes() -> tuple[np.ndarray, np.ndarray]:
    return stroke_digits.stroke_digits(np.random.default_rng(100), 3000)


def test_train_and_test_strokes_are_disjoint_streams(monkeypatch: Patch) -> None:
    def drawn(n_train: int, seed: int = 3) -> multimnist.Digits:
        monkeypatch.setattr(multimnist, "STROKE_COUNTS", (n_train, 300))
        return multimnist.resolve_dataset("strokes", np.random.default_rng(seed))

    digits, again, others = drawn(600), drawn(50), drawn(50, seed=4)
    assert not {x.tobytes() for x in digits.train_images} & {x.tobytes() for x in digits.test_images}
    np.testing.assert_array_equal(digits.test_images, again.test_images)  # the test set does not depend on the other
    for part in ("train_images", "test_images"):
        assert not np.array_equal(getattr(again, part), getattr(others, part))


def test_strokes_are_as_even_as_their_number_allows_lean_to_the_right_and_are_centred() -> None:
    """Columns to the right per row upwards, of ones, whose stroke is upright; and the mean centre of mass of all."""
    assert sorted(np.bincount(stroke_digits.stroke_digits(np.random.default_rng(1), 23)[1])) == [2] * 7 + [3] * 3
    images, labels = some_strokes()
    assert np.bincount(labels).tolist() == [300] * 10
    rows, columns = np.mgrid[:28, :28]
    ones = images[labels == 1] / images[labels == 1].sum(axis=(1, 2), keepdims=True)
    up = ones * ((ones * rows).sum(axis=(1, 2), keepdims=True) - rows)
    assert ((up * columns).sum(axis=(1, 2)) / (up * -rows).sum(axis=(1, 2))).mean() > 0.05
    centres = np.einsum("nij,aij->na", images.astype(float), np.mgrid[:28, :28]) / images.sum(axis=(1, 2))[:, None]
    np.testing.assert_allclose(centres.mean(axis=0), 14, atol=0.1)


@needs_mnist
def test_strokes_resemble_real_digits() -> None:
    """By the nearest of the class means of 1,500 strokes; real digits are at 0.82 among themselves."""
    strokes, classes = some_strokes()
    means = np.stack([strokes[:1500][classes[:1500] == c].mean(axis=0).ravel() / 255 for c in range(10)])
    real = multimnist.load_mnist(MNIST)
    pixels, labels = real.train_images[:5000].reshape(5000, -1) / 255, real.train_labels[:5000]
    guess = np.argmin(np.square(means).sum(axis=1) - 2 * pixels @ means.T, axis=1)
    assert np.mean(guess == labels) > 0.65
