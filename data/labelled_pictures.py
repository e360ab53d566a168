"""A person's own pictures, each of a class: a folder with a sub-folder for each class, or a .npz file."""

from __future__ import annotations

import contextlib
import os
import unicodedata
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.pictures import quiet_and_unlimited, read_square, squared
from support.console import one_line, print_message, shows_progress
from support.files import UserError

Array = np.ndarray

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"}
TEST_FRACTION = 0.2  # of each class, where there is no test set
N_MEASURED = 200  # pictures whose size is looked at
MAX_BYTES = 1 << 29  # of all pictures, resized; in float32 they take four times as many


class Labelled(NamedTuple):
    """Pictures of one size, each of a class."""

    images: Array  # (N, S, S, C) uint8
    labels: Array  # (N,) numbers of the names
    names: tuple[str, ...]  # of the classes


class PictureSets(NamedTuple):
    """Labels are numbers of ``classes``."""

    classes: tuple[str, ...]
    train_images: Array  # (N, S, S, C) uint8
    train_labels: Array  # (N,)
    test_images: Array  # (M, S, S, C) uint8
    test_labels: Array  # (M,)


def read_labelled(path: Path, side: int | tuple[int, int], channels: int) -> tuple[Labelled, Labelled | None]:
    """The training pictures and, if they are apart from these, the test pictures of a folder or a .npz file.

    ``side``: that of the images in pixels, or the least and the greatest from which the one nearest to the pictures'
    own (the median of their longer sides) is taken. Raises UserError; a picture that cannot be read is left out, with
    a warning.
    """
    if os.path.isdir(path):
        return read_folders(path, side, channels)
    if not os.path.exists(path):
        raise UserError(f"there is no folder and no .npz file {path}")
    return read_npz(path, side, channels)


def read_folders(folder: Path, side: int | tuple[int, int], channels: int) -> tuple[Labelled, Labelled | None]:
    """A folder with a sub-folder of pictures for each class, which has the class's name; or with the folders ``train``
    and ``test``, each of which has such sub-folders."""
    parts = [folder]
    if all((folder / name).is_dir() and not picture_files(folder / name)[0] for name in ("train", "test")):
        parts = [folder / "train", folder / "test"]
    found = [files_by_class(part) for part in parts]
    files = [path for by_class in found for paths in by_class.values() for path in paths]
    if not isinstance(side, int):
        side = nearest_side(file_sizes(files), side)
    require_memory(len(files), side, channels)
    unreadable: list[Path] = []
    sets = [read_files(by_class, side, channels, unreadable) for by_class in found]
    if unreadable:
        shown = ", ".join(str(path.relative_to(folder)) for path in unreadable[:5])
        more = f" and {len(unreadable) - 5:,} more" if len(unreadable) > 5 else ""
        text = f"{len(unreadable):,} of {len(files):,} pictures of {folder} cannot be read"
        if len(unreadable) == len(files):
            raise UserError(f"{text}, none is left: {shown}{more}")
        print_message(f"warning: {one_line(f'{text} and are left out: {shown}{more}', 500)}")
    return sets[0], sets[1] if len(sets) > 1 else None


def picture_files(folder: Path) -> tuple[list[Path], int]:
    """The picture files of a folder by their endings, sorted by name, and how many other files it has. Hidden ones do
    not count."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and not entry.is_dir())
    except OSError as error:
        raise UserError(f"cannot read the folder {folder}: {error.strerror}") from error
    files = [folder / name for name in names if os.path.splitext(name)[1].lower() in SUFFIXES]
    return files, len(names) - len(files)


def files_by_class(folder: Path) -> dict[str, list[Path]]:
    """The picture files by the name of the sub-folder, both sorted. Raises UserError where there are none."""
    found: dict[str, list[Path]] = {}
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    except OSError as error:
        raise UserError(f"cannot read the folder {folder}: {error.strerror}") from error
    n_other = 0
    for name in names:
        if not name.startswith("."):
            files, n = picture_files(folder / name)
            n_other += n
            if files:
                found.setdefault(class_name(name), []).extend(files)
    if not found:
        direct, n = picture_files(folder)
        what = f"{len(direct):,} pictures but no sub-folder with pictures" if direct else "no sub-folder with pictures"
        others = f" (other files: {n + n_other:,}; known endings: {' '.join(sorted(SUFFIXES))})" if n + n_other else ""
        raise UserError(f"{folder} has {what}{others}: put those of each class into a sub-folder with the class's name")
    return found


def class_name(text: object) -> str:
    """A folder's name, or a label, as it is shown: on one line, and the same from every file system."""
    return one_line(unicodedata.normalize("NFC", str(text)).strip() or "(empty)", 60)


def read_class_names(folder: Path | None, labels: Array) -> tuple[str, ...]:
    """Names of the classes of sorted labels (J,): the lines of ``classes.txt`` in the folder, in the order of the
    labels, or without this file the labels themselves. Raises UserError where there are not as many."""
    if folder is None or not (path := folder / "classes.txt").is_file():
        return tuple(map(str, labels.tolist()))
    try:
        names = tuple(class_name(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {one_line(error)}") from error
    if len(set(names)) < len(names) or len(names) != len(labels):
        raise UserError(f"{path} has {len(set(names))} different names, but the files have {len(labels)} labels")
    return names


def file_sizes(files: Sequence[Path]) -> list[int]:
    """Longer sides, in pixels, of some of the pictures, evenly spaced."""
    from PIL import Image

    sizes = []
    with quiet_and_unlimited(Image):
        for k in np.linspace(0, len(files) - 1, min(len(files), N_MEASURED)).astype(int).tolist():
            with contextlib.suppress(Exception):
                if files[k].is_file():  # a pipe would be waited for
                    with Image.open(files[k]) as opened:
                        sizes.append(max(opened.size))
    return sizes


def nearest_side(sizes: Sequence[int], limits: tuple[int, int]) -> int:
    """The side within the limits that is nearest to the median of the sizes."""
    return int(np.clip(round(float(np.median(sizes or [limits[1]]))), *limits))


def require_memory(n: int, side: int, channels: int) -> None:
    if n * side * side * channels > MAX_BYTES:
        raise UserError(
            f"{n:,} pictures of {side} x {side} pixels need more than {MAX_BYTES >> 20} MiB: take fewer, or a"
            " smaller --image-size"
        )


def read_files(by_class: Mapping[str, list[Path]], side: int, channels: int, unreadable: list[Path]) -> Labelled:
    """Every picture is resized when it is read: memory depends on the number of pictures alone, not on their sizes.
    Those that cannot be read are added to ``unreadable``."""
    from tqdm import tqdm

    n_files = sum(map(len, by_class.values()))
    images, labels, n = np.empty((n_files, side, side, channels), np.uint8), np.empty(n_files, np.intp), 0
    with tqdm(total=n_files, desc="pictures", leave=False, disable=not shows_progress()) as bar:
        for label, paths in enumerate(by_class.values()):
            for path in paths:
                try:
                    images[n] = read_square(path, side, channels)
                    labels[n] = label
                    n += 1
                except UserError:
                    unreadable.append(path)
                bar.update()
    return Labelled(images[:n], labels[:n], tuple(by_class))


def read_npz(path: Path, side: int | tuple[int, int], channels: int) -> tuple[Labelled, Labelled | None]:
    """``x_train``, ``y_train`` and, if there, ``x_test``, ``y_test``: pictures (N, H, W) or (N, H, W, C), of 0 to 255,
    or of 0 to 1 in floats; labels (N,), whole numbers or texts. ``classes``: the names of the labels, in their order.
    """
    arrays: dict[str, Array] = {}
    try:
        if not path.is_file():  # a pipe would be waited for
            raise ValueError("it is no regular file")
        with path.open("rb") as opened:
            if not zipfile.is_zipfile(path):  # numpy would speak of pickled data, and of how to load them
                raise ValueError("it is damaged, or of another kind")
            stored = np.load(opened, allow_pickle=False)
            if zipped := getattr(stored, "zip", None):
                unpacked = sum(member.file_size for member in zipped.infolist())
                if unpacked > max(MAX_BYTES, 100 * path.stat().st_size):
                    raise ValueError("it unpacks to more than 100 times its size")
            for key in ("x_train", "y_train", "x_test", "y_test", "classes"):
                if key in stored:
                    arrays[key] = stored[key]
    except Exception as error:  # zipfile and numpy raise many kinds on a damaged file
        raise UserError(f"{path} is not a folder, nor a .npz file that can be read: {one_line(error)}") from error
    parts = ("train", "test") if "x_test" in arrays else ("train",)
    for part in parts:
        for key in (f"x_{part}", f"y_{part}"):
            if key not in arrays:
                raise UserError(f"{path} has no {key}: it needs x_train, y_train and, for a test set, x_test, y_test")
    most = max(greatest(arrays[f"x_{part}"]) for part in parts)
    pictures = {part: eight_bits(arrays[f"x_{part}"], most, f"x_{part} of {path}") for part in parts}
    labels = {part: whole_labels(arrays[f"y_{part}"], len(pictures[part]), f"y_{part} of {path}") for part in parts}
    if not isinstance(side, int):
        side = nearest_side([max(pictures["train"].shape[1:3])], side)
    require_memory(sum(map(len, labels.values())), side, channels)
    known = np.unique(labels["train"])
    names = tuple(map(class_name, decoded(arrays.get("classes", known)).ravel().tolist()))
    if len(names) != len(known) or len(set(names)) < len(names):
        raise UserError(f"{path} has {len(set(names))} different classes, but {len(known)} different labels in y_train")
    if "test" in parts and not np.isin(labels["test"], known).all():
        other = labels["test"][~np.isin(labels["test"], known)][0]
        raise UserError(f"{path} has the label {other} in y_test, but not in y_train")
    sets = [
        Labelled(resized(pictures[part], side, channels), np.searchsorted(known, labels[part]), names) for part in parts
    ]
    return sets[0], sets[1] if len(sets) > 1 else None


def greatest(x: Array) -> float:
    """The greatest number of an array, at most what fits its kind: 255 for floats, 65535 for whole numbers."""
    if not x.size or x.dtype.kind not in "uifb":
        return 0.0
    return min(float(x.max()), 255.0 if x.dtype.kind == "f" else 65535.0)


def eight_bits(pictures: Array, most: float, what: str) -> Array:
    """(N, H, W) or (N, H, W, C) of numbers -> (N, H, W, C) uint8, C = 1, 3 or 4 (with transparency). ``most``: the
    greatest number in the file, which says what white is: 1, 255 or 65535."""
    x = pictures[..., None] if pictures.ndim == 3 else pictures
    if x.ndim != 4 or x.shape[-1] not in (1, 3, 4) or 0 in x.shape:
        raise UserError(f"{what} has the shape {pictures.shape}: it must be (N, H, W) or (N, H, W, 1, 3 or 4)")
    if x.dtype.kind not in "uifb":
        raise UserError(f"{what} holds {x.dtype}: it must hold numbers")
    if x.dtype == np.uint8:
        return x
    if not (x.min() >= 0 and x.max() <= most):  # a NaN fails this too
        raise UserError(
            f"{what} has values from {x.min():g} to {x.max():g}: they must be 0 to 1, 0 to 255, or whole to 65535"
        )
    is_unit = x.dtype.kind in "fb" and most <= 1
    return np.rint(x * (255 if is_unit else 1 if most <= 255 else 1 / 257)).astype(np.uint8)


def decoded(texts: Array) -> Array:
    """Bytes as text; other arrays as they are."""
    return np.char.decode(texts, "utf-8", "replace") if texts.dtype.kind == "S" else texts


def whole_labels(labels: Array, n: int, what: str) -> Array:
    """(N,) or (N, 1) of whole numbers or texts -> (N,)."""
    if labels.shape not in ((n,), (n, 1)) or labels.dtype.kind not in "uifbUS":
        raise UserError(
            f"{what} has the shape {labels.shape} of {labels.dtype}: it must have one label for each picture"
        )
    y = decoded(labels.ravel())
    if y.dtype.kind in "fb":
        if not (np.isfinite(y) & (y == np.rint(y))).all():
            raise UserError(f"{what} has labels that are no whole numbers")
        y = y.astype(np.int64)
    return y


def resized(pictures: Array, side: int, channels: int) -> Array:
    """(N, H, W, C) uint8 -> (N, S, S, C') uint8, as pictures from files; those that fit already are returned as they
    are."""
    from PIL import Image

    if pictures.shape[1:] == (side, side, channels):
        return pictures
    images = np.empty((len(pictures), side, side, channels), np.uint8)
    for n, picture in enumerate(pictures):
        plain = picture[..., 0] if picture.shape[-1] == 1 else picture
        images[n] = squared(Image.fromarray(np.ascontiguousarray(plain)).convert("RGBA"), side, channels)
    return images


def picture_sets(
    train: Labelled, test: Labelled | None, rng: np.random.Generator, classes: Sequence[str] = ()
) -> PictureSets:
    """Training and test set. Without a test set ``rng`` draws a fifth of each class, at least one picture, for it.

    ``classes``: those of a trained network, among which all must be; without it, those of which there are training
    pictures. Raises UserError where there are not enough pictures.
    """
    counts = np.bincount(train.labels, minlength=len(train.names))
    names = tuple(classes) or tuple(name for name, n in zip(train.names, counts, strict=True) if n)
    for known in (train, test):
        for name in () if known is None else (known.names[k] for k in np.unique(known.labels)):
            if name not in names:
                where = "the network was trained on" if classes else "there are training pictures of"
                raise UserError(f"there are pictures of the class {name}, which is none that {where}")
    if len(names) < 2:
        raise UserError(f"there are pictures of one class alone, {', '.join(names)}: a network needs two or more")

    def numbered(part: Labelled) -> Array:
        numbers = {name: k for k, name in enumerate(names)}
        return np.array([numbers.get(name, -1) for name in part.names], np.intp)[part.labels]

    labels = numbered(train)
    if test is not None:
        if not len(test.labels):
            raise UserError("there is no test picture that can be read")
        return PictureSets(names, train.images, labels, test.images, numbered(test))
    is_test = np.zeros(len(train.labels), bool)
    for label, name in enumerate(names):
        own = np.flatnonzero(labels == label)
        if len(own) == 1:
            raise UserError(f"there is one picture of the class {name}: two are needed, for training and for the test")
        is_test[rng.permutation(own)[: max(1, round(TEST_FRACTION * len(own)))] if len(own) else []] = True
    return PictureSets(names, train.images[~is_test], labels[~is_test], train.images[is_test], labels[is_test])
