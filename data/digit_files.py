"""Digits, 28x28 grey values, in every form in which people have them.

    IDX    MNIST's four files, gzipped or not, in the folder or in MNIST/raw; EMNIST's, whose images lie on their side;
           QMNIST's, whose labels have eight columns
    CSV    a row for each digit, its label first, as Kaggle has them: train.csv, and test.csv if it has labels
    .npz   x_train, y_train, x_test, y_test, as Keras has them; arr_0, arr_1, ...; or an array in each of four files
    .mat   EMNIST's, which needs scipy

What is wrong with a file is a ValueError of one line, which names the file. numpy and the standard library suffice.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.files import expanded, one_line, print_message

Array = np.ndarray

SIDE = 28  # pixels
HELD_OUT = 7  # without a test set, every seventh digit of the training is of it: as many as MNIST has
KEYS = ("train-images", "train-labels", "t10k-images", "t10k-labels")
NPZ_KEYS = ("x_train", "y_train", "x_test", "y_test")
IDX_NAME = re.compile(r".*?(train|t10k|test)[-_.](images|labels)[-_.]idx[123][-_.](?:ubyte|int)(\.gz)?", re.I)
NPZ_NAME = re.compile(r".*?(train|t10k|test)[-_.](imgs|images|labels)()\.npz", re.I)
CSV_NAME = re.compile(r".*?(train|t10k|test).*?()\.csv(\.gz)?", re.I)
IDX_TYPES: dict[int, np.dtype[Any]] = {8: np.dtype("u1"), 12: np.dtype(">i4")}
PLACES = ("*", "MNIST/raw/*", "*/*", "*/*/*")  # of files below the folder; the first with digits counts
FORMS = "MNIST's four files, train.csv, a .npz with x_train and y_train, or EMNIST's .mat"


def read_digit_files(folder: str | Path) -> tuple[Array, Array, Array, Array]:
    """Training images (N, 28, 28) and labels (N,), test images and labels, all uint8, labels 0 to 9. ``folder`` holds
    files of one form, or is one file. Without a test set every seventh digit is taken for it, and a line says so."""
    place = expanded(folder)
    def seen(pattern: str) -> list[Path]:  # without a Mac's companions, ._train.csv
        return sorted(path for path in place.glob(pattern) if path.name[0] != "." and path.is_file())

    for files in [[place]] if place.is_file() else map(seen, PLACES):
        for read in (read_idx_files, read_csv_files, read_npz_files, read_mat_files):
            if arrays := read(place, files):
                return as_digits(place, arrays)
        if packed := [path for path in files if path.suffix.lower() in (".zip", ".tar", ".tgz", ".7z", ".rar")]:
            raise ValueError(f"{packed[0]} is packed: unpack it first, and name the folder")
    raise ValueError(f"{place} has no digits: put {FORMS} there")


def as_digits(place: Path, arrays: dict[str, Array]) -> tuple[Array, Array, Array, Array]:
    for key in KEYS[:2] if len(arrays) == 2 else KEYS:
        if key not in arrays:
            raise ValueError(f"{place} has no {key}: it needs {', '.join(KEYS)}")
    found = [as_images(place, x) if "images" in key else as_labels(place, x) for key, x in sorted(arrays.items())]
    *test, train_images, train_labels = found  # "t10k" sorts before "train"
    sets = [(train_images, train_labels), *([(test[0], test[1])] if test else [])]
    for images, labels in sets:
        if len(images) != len(labels):
            raise ValueError(f"{place} has {len(images):,} images, but {len(labels):,} labels of them")
    if not test:
        held_out = np.arange(len(train_images)) % HELD_OUT == HELD_OUT - 1
        if not held_out.any():
            raise ValueError(f"{place} has no test set, and {len(held_out)} digits are too few to take one from them")
        print_message(f"{place}: no test set with labels, so every seventh digit, {held_out.sum():,} in all, is taken"
                      " for it")
        sets = [(x[k], y[k]) for k in (~held_out, held_out) for x, y in sets]
    (train_images, train_labels), (test_images, test_labels) = sets
    return train_images, train_labels, test_images, test_labels


def as_images(place: Path, x: Array) -> Array:
    """(N, 28, 28), (N, 28, 28, 1) or (N, 784) of 0 to 255, or of 0 to 1 -> (N, 28, 28) uint8."""
    if not len(x) or x.shape[1:] not in ((SIDE, SIDE), (SIDE, SIDE, 1), (SIDE**2,)) or x.dtype.kind not in "uifb":
        raise ValueError(f"{place} has images of the shape {x.shape} of {x.dtype}, not of {SIDE} x {SIDE} pixels")
    x = x.reshape(-1, SIDE, SIDE)
    if x.dtype == np.uint8 and x.max() > 1:
        return x
    low, high = x.min(), x.max()
    if not (low >= 0 and high <= 255):  # a NaN too
        raise ValueError(f"{place} has images of {low:g} to {high:g}, not of 0 to 255 or 0 to 1")
    return np.rint(x * (255.0 if high <= 1 else 1.0)).astype(np.uint8)


def as_labels(place: Path, y: Array) -> Array:
    """(N,) or (N, 1) of 0 to 9 -> (N,) uint8."""
    y = y[:, 0] if y.shape[1:] == (1,) else y
    if y.ndim != 1 or y.dtype.kind not in "uif":
        raise ValueError(f"{place} has labels of the shape {y.shape} of {y.dtype}, not a digit for each image")
    if wrong := [value for value in np.unique(y).tolist() if value not in range(10)]:
        raise ValueError(f"{place} has the label {wrong[-1]:g}: the labels of digits must be 0 to 9")
    return y.astype(np.uint8)


# --- IDX --------------------------------------------------------------------------------------------------------------


def read_idx_files(place: Path, files: Iterable[Path]) -> dict[str, Array]:
    """Images of any shape and labels of one set by their names, see KEYS; others of the files are left alone. EMNIST's
    images are turned upright."""
    found = named_files(place, files, IDX_NAME)
    return upright(place, found.values(), {key: read_idx(path) for key, path in found.items()})


def named_files(place: Path, files: Iterable[Path], pattern: re.Pattern[str]) -> dict[str, Path]:
    """The files of one set, by KEYS or, where a file has images and labels, by the first part of them."""
    found = dict[str, Path]()
    for path in files:
        if match := pattern.fullmatch(path.name):
            part, what = match[1].lower().replace("test", "t10k"), match[2].lower().replace("imgs", "images")
            first = found.setdefault(f"{part}-{what}" if what else part, path)
            if path not in (first, first.with_name(f"{first.name}.gz")):  # unpacked beside it
                raise ValueError(f"{place} holds several sets, {first} and {path}: put the files of one into a folder")
    return found


def read_idx(path: Path) -> Array:
    """A file of MNIST's format, gzipped or not, told by its content: 8-bit numbers of any shape, or of QMNIST's labels,
    (N, 8) of 32 bits, the first column."""
    try:
        content = unpacked(path)
        dtype = IDX_TYPES.get(content[2]) if content[:2] == b"\0\0" else None
        if dtype is None or (dtype.itemsize > 1 and content[3] != 2):
            raise ValueError("it is no IDX file of 8-bit numbers")
        shape = np.frombuffer(content, ">u4", content[3], offset=4).tolist()
        numbers = np.frombuffer(content, dtype, offset=4 + 4 * len(shape)).reshape(shape)
        return numbers if dtype.itemsize == 1 else numbers[:, 0]
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise ValueError(f"{path} cannot be read: {one_line(error)}") from error


def unpacked(path: Path) -> bytes:
    content = path.read_bytes()
    return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content


def upright(place: Path, paths: Iterable[Path], arrays: dict[str, Array]) -> dict[str, Array]:
    """EMNIST's images turned, which it has in columns: where a file, or a folder from ``place`` on, has that word."""
    top = place.parent if place.is_file() else place
    parts = {part for path in paths for part in (top.resolve().name, *path.relative_to(top).parts)}
    if not any(re.search(r"(?<![a-z])emnist(?![a-z])", part, re.I) for part in parts):
        return arrays
    print_message(f"{place}: EMNIST's pictures lie on their side and are turned upright")
    return {key: x.swapaxes(1, 2) if x.ndim == 3 else x for key, x in arrays.items()}


# --- CSV, .npz, .mat --------------------------------------------------------------------------------------------------


def read_csv_files(place: Path, files: Iterable[Path]) -> dict[str, Array]:
    """Those of the names train and test, or the one file that is asked for."""
    arrays, found = dict[str, Array](), named_files(place, files, CSV_NAME)
    found = found or ({"train": place} if place.suffix.lower() == ".csv" else {})
    for part, path in found.items():
        images, labels = read_csv(path)
        if labels is not None:
            arrays |= {f"{part}-images": images, f"{part}-labels": labels}
        elif part == "train":
            raise ValueError(f"{path} has no labels: a row needs its label and {SIDE**2} pixels")
        else:
            print_message(f"{path} has no labels, so it is no test set")
    return upright(place, found.values(), arrays)


def is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return math.isfinite(float(text))  # and no column called nan
    return False


def read_csv(path: Path) -> tuple[Array, Array | None]:
    """Images (N, 28, 28), and labels (N,) if a column has them: that of the name label, or the first of 785."""
    try:
        first, *rows = unpacked(path).decode("utf-8-sig").splitlines() or [""]
        names = [name.strip(' "').lower() for name in first.split(",")]
        has_names = not is_number(names[-1])
        column = names.index("label") if "label" in names else 0 if len(names) > SIDE**2 else None
        if not rows:
            raise ValueError("it has no row of a digit")
        numbers = np.loadtxt(rows if has_names else [first, *rows], np.float32, delimiter=",", ndmin=2)
        labels = None if column is None else numbers[:, column]
        pixels = numbers if column is None else np.delete(numbers, column, axis=1)
        return pixels.reshape(-1, SIDE, SIDE), labels
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {one_line(error)}") from error


def read_npz_files(place: Path, files: Sequence[Path]) -> dict[str, Array]:
    """One file of several arrays, or several of one."""
    if found := named_files(place, files, NPZ_NAME):
        return {key: next(iter(read_npz(path).values())) for key, path in found.items()}
    names = [path for path in files if path.suffix.lower() == ".npz"]
    if len(names) > 1:
        raise ValueError(f"{place} holds several sets, {names[0]} and {names[1]}: name one of them")
    arrays = read_npz(names[0]) if names else {}
    for keys in (NPZ_KEYS, ("train_images", "train_labels", "test_images", "test_labels")):
        if keys[0] in arrays:
            return {key: arrays[name] for key, name in zip(KEYS, keys, strict=True) if name in arrays}
    if arrays and not set(arrays) <= {f"arr_{k}" for k in range(4)}:
        raise ValueError(f"{names[0]} has the arrays {', '.join(arrays)}, not x_train, y_train, x_test and y_test")
    images, labels = ([x for x in arrays.values() if (x.ndim > 2 or x.shape[1:] == (SIDE**2,)) == k] for k in (1, 0))
    return dict(zip(KEYS, (x for pair in zip(images, labels, strict=False) for x in pair), strict=False))


def read_npz(path: Path) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: x for name in stored.files if isinstance(x := stored[name], np.ndarray)}
        if not arrays:
            raise ValueError("it has no arrays")
        return arrays
    except Exception as error:  # zipfile and numpy raise many kinds on a damaged file
        raise ValueError(f"{path} is no .npz file that can be read: {one_line(error)}") from error


def read_mat_files(place: Path, files: Iterable[Path]) -> dict[str, Array]:
    names = [path for path in files if path.suffix.lower() == ".mat"]
    if len(names) > 1:
        raise ValueError(f"{place} holds several sets, {names[0]} and {names[1]}: name one of them")
    return read_mat(names[0], "dataset", emnist_arrays) if names else {}


def emnist_arrays(dataset: Any) -> dict[str, Array]:
    """EMNIST's struct has ``train`` and ``test``, each with ``images`` (N, 784), in columns, and ``labels`` (N, 1)."""
    parts = {"train": dataset["train"][0, 0], "t10k": dataset["test"][0, 0]}
    arrays = {f"{part}-{what}": x[what] for part, x in parts.items() for what in ("images", "labels")}
    return {key: x.reshape(-1, SIDE, SIDE).swapaxes(1, 2) if "images" in key else x for key, x in arrays.items()}


def read_mat(path: Path, name: str, use: Callable[[Any], Any]) -> Any:
    """``use`` of the struct of that name in a MATLAB file of version 5."""
    try:
        from scipy.io import loadmat

        with path.open("rb") as stream:  # loadmat's own word on a missing file does not say that it is missing
            start = stream.read(10)
            if start[:4] == b"PK\x03\x04":
                raise ValueError("it is a ZIP file: unpack it, and name the .mat file in it")
            if start[:4] == b"\x89HDF" or start == b"MATLAB 7.3":
                raise ValueError("it is of MATLAB 7.3: save it in MATLAB with the option -v7")
            stream.seek(0)
            return use(loadmat(stream, variable_names=[name])[name][0, 0])
    except Exception as error:  # scipy raises many kinds on a damaged file: TypeError, zlib.error, MatReadError, ...
        raise ValueError(f"{path} cannot be read: {one_line(error)}") from error
