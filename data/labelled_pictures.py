"""A person's own images, each of a class: a folder, a .npz file, or files of MNIST's format of any size."""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from data.digit_files import IDX_NAME, KEYS, NPZ_KEYS, read_idx_files
from data.files import UserError, expanded, one_line, print_message, read_text, told_as, with_progress
from data.pictures import GREATEST, Levels, Square, array_square, in_levels, longer_side, read_square

Array = np.ndarray
Files = list[tuple[tuple[str, ...], Path]]  # each file with the names of the folders that lead to it, and its own name

TEST_FRACTION = 0.2  # of each class, where there is no test set
N_MEASURED = 200  # images whose size is looked at
MAX_BYTES = 1 << 31  # of all images, resized, in float32
FLAT = 64  # of 256 levels: an image that spans fewer shows little
ROLE = re.compile(  # of a folder, by its name
    r"(?<![a-z])(?:(?P<train>train(?:ing)?)|(?P<val>val(?:id(?:at(?:e|ion))?)?|dev)"
    r"|(?P<test>test(?:ing)?|eval(?:uation)?|hold.?out))(?:set|data|images)?(?![a-z])"
)
LAYOUTS = (
    "make FOLDER/CLASS/1.jpg … of all images, or FOLDER/train/CLASS/1.jpg … and FOLDER/test/CLASS/2.jpg …, with a"
    " folder for each CLASS"
)


class Source(NamedTuple):
    """Where images come from: files, or rows of arrays."""

    parts: list[tuple[Any, Array]]  # of the training and perhaps of the test: items, and numbers of names
    names: tuple[str, ...]  # of the classes
    load: Callable[[Any, int, int], Square] = array_square
    size: Callable[[Any], int] = lambda picture: max(picture.shape[:2])  # an item's longer side, in pixels


class Labelled(NamedTuple):
    images: Array  # (N, S, S, C) uint8
    labels: Array  # (N,) numbers of classes
    names: Sequence[str] = ()  # of the files


class PictureSets(NamedTuple):
    classes: tuple[str, ...]
    train: Labelled
    test: Labelled
    levels: Levels  # which became black and white


def read_sets(
    path: Path, side: int | tuple[int, int], channels: int, rng: np.random.Generator, n_train: int | None = None
) -> PictureSets:
    """Training and test set of a folder or a .npz file; a test set that is not there is drawn, see ``picture_sets``.
    ``n_train``: take so many of the training images, see ``fewer``.

    ``side``: that of the images in pixels, or the least and the greatest from which the one nearest to the images'
    own (the median of their longer sides) is taken. Raises UserError; an image that cannot be read is left out, with a
    warning.
    """
    path = expanded(path)
    if os.path.isdir(path):
        files = visible_files(path)
        is_idx = any(IDX_NAME.fullmatch(file.name) for _, file in files)
        source = idx_source(path, files) if is_idx else folder_source(path, files)
    else:
        source = npz_source(path)
    if n_train:
        source = fewer(source, n_train, rng)
    if not isinstance(side, int):
        items = source.parts[0][0]
        chosen = np.linspace(0, len(items) - 1, min(len(items), N_MEASURED)).astype(int).tolist()
        sizes = [size for k in chosen if (size := source.size(items[k]))]
        side = int(np.clip(round(float(np.median(sizes or side[1:]))), *side))
    parts, levels = read_all(path, source, side, channels)
    return picture_sets(parts, source.names, levels, rng)


def fewer(source: Source, n_train: int, rng: np.random.Generator) -> Source:
    """About ``n_train`` images of the training, of each class the same share, but at least one, or two where a part
    of them becomes the test set, which comes on top. The test set that is there is left as it is."""
    (items, labels), *test = source.parts
    share, least = (n_train, 1) if test else (n_train / (1 - TEST_FRACTION), 2)
    order = rng.permutation(len(labels))
    own = [order[labels[order] == label] for label in range(len(source.names))]
    chosen = np.sort(np.concatenate([k[: max(least, round(len(k) * share / len(labels)))] for k in own]))
    return source._replace(parts=[([items[k] for k in chosen], labels[chosen]), *test])


def read_all(path: Path, source: Source, side: int, channels: int) -> tuple[list[Labelled], Levels]:
    """Every image is resized when it is read: memory depends on the number of images alone, not on their sizes.
    Black and white are the least and the greatest number, of any colour, of all training images of a kind of numbers;
    a test set that is drawn from these later is among them."""
    n = sum(len(labels) for _, labels in source.parts)
    if 4 * n * side * side * channels > MAX_BYTES:
        raise UserError(f"{n:,} images of {side} x {side} pixels need more than {MAX_BYTES >> 20} MiB: take fewer"
                        " with --n-train, or a smaller --image-size")
    known, sets = dict[str, list[float]](), list[Labelled]()
    faults, ends = dict[str, str](), list[str]()  # why images are left out, by their names
    for items, labels in source.parts:
        names = [str(x.relative_to(path)) if isinstance(x, Path) else f"number {k}" for k, x in enumerate(items)]
        squares, images = dict[int, Square](), dict[int, Array]()
        for k, item in enumerate(with_progress(items, "pictures")):
            try:
                squares[k] = source.load(item, side, channels)
            except UserError as error:
                faults[names[k]] = one_line(error.__cause__ or error, 120)
        for kind in () if sets else dict.fromkeys(square.kind for square in squares.values()):  # the training's alone
            low, darkest = min((s.extremes[0], names[k]) for k, s in squares.items() if s.kind == kind)
            high, brightest = max((s.extremes[1], names[k]) for k, s in squares.items() if s.kind == kind)
            known[kind], ends = [low, high], [*ends, darkest, brightest]
        for k in list(squares):
            try:
                images[k] = in_levels(names[k], squares.pop(k), known)  # the memory serves the next ones
            except UserError as error:
                faults[names[k]] = str(error)
        stack = np.array(list(images.values()), np.uint8).reshape(-1, side, side, channels)
        sets.append(Labelled(stack, labels[list(images)], [names[k] for k in images]))
    if faults:
        text = f"{len(faults):,} of {n:,} images of {path} cannot be read ({next(iter(faults.values()))})"
        text = one_line(f"{text} and are left out: {', '.join(faults)}", 440)
        if not all(len(part.labels) for part in sets):
            raise UserError(f"none is left for training or test: {text}")
        print_message(f"warning: {text}")
    remedy = f"look at the darkest and the brightest ({one_line(', '.join(ends))}), scale all alike, or take a greater"
    for which, part in zip(("", " for the test"), sets, strict=False):
        n_flat = int((np.ptp(part.images, axis=(1, 2, 3)) < FLAT).sum())
        if n_flat > len(part.labels) / 4:
            print_message(f"warning: {n_flat:,} of {len(part.labels):,} images of {path}{which} span under a quarter"
                          f" of the grey levels, so that the networks see little: {remedy} --image-size, or --colour"
                          " rgb")
    return sets, known


# --- A folder: which of its files are of which class ------------------------------------------------------------------


def visible_files(folder: Path, around: tuple[str, ...] = (), above: tuple[Path, ...] = ()) -> Files:
    """All files below a folder, sorted, without hidden ones and those in hidden folders, nor through a link to a folder
    around it. ``around``, ``above``: the names of the folders that lead to it, and they themselves. Raises UserError.
    """
    found, above = Files(), (*above, folder.resolve())
    with told_as(f"cannot read the folder {folder}"):
        for name in sorted(name for name in os.listdir(folder) if name[0] != "."):
            path, names = folder / name, (*around, name)
            if not path.is_dir():
                found.append((names, path))
            elif path.resolve() not in above:
                found += visible_files(path, names, above)
    return found


def inner_folders(files: Files) -> dict[str, Files]:
    """The files of each sub-folder, by its name, as seen from there."""
    found: dict[str, Files] = {}
    for (first, *rest), path in files:
        if rest:
            found.setdefault(first, []).append((tuple(rest), path))
    return found


def by_class(files: Files, known: Container[str] = ()) -> dict[str, list[Path]]:
    """The files by the sub-folder that they lie in, which is their class; without sub-folders by what comes before the
    first dot or number of their names, as in circle.0.jpg. A folder around all these is looked through. ``known``: take
    these classes alone; without them, names of files must be of two classes or more, of two files or more each."""
    inner, found = inner_folders(files), dict[str, list[Path]]()
    if len(inner) == 1 and (deeper := by_class(next(iter(inner.values())), known)):
        return deeper
    for name, below in inner.items():
        if class_name(name) in found:
            raise UserError(f"two folders, one of them {name}, would be one class: rename it, also shorter")
        found[class_name(name)] = [path for _, path in below]
    for (name, *_), path in () if inner else files:
        if name := re.split(r"[.\d]", name)[0].strip(" _-("):
            found.setdefault(class_name(name), []).append(path)
    if known:
        return {name: paths for name, paths in found.items() if name in known}
    names_classes = len(found) > 1 < min(map(len, found.values())) and not all(ROLE.search(k.lower()) for k in found)
    return found if inner or names_classes else {}


def by_role(files: Files) -> dict[str, Files]:
    """The files of the folders train, val and test, by these names, or all as those of "train". Names may be longer,
    as in seg_train or test1, and the folders may lie in one of several. The training's classes may lie beside test. A
    folder train beside others that are none of the three, and without folders or classes in it, is a class."""
    inner, found = inner_folders(files), dict[str, Files]()
    for name, below in inner.items():
        if role := ROLE.search(name.lower()):
            found.setdefault(str(role.lastgroup), []).extend(below)
    beside = [(names, path) for names, path in files if len(names) > 1 and not ROLE.search(names[0].lower())]
    if "train" not in found and any(inner_folders(part).keys() & inner_folders(beside) for part in found.values()):
        found["train"] = beside
    outer = [deeper for below in inner.values() if len(deeper := by_role(below)) > 1 and "train" in deeper]
    if len(outer) == 1 and len(found) < 2:
        return outer[0]
    return found if len(found) > 1 or by_class(found.get("train", [])) else {"train": files}


def folder_source(folder: Path, files: Files) -> Source:
    """A folder with a sub-folder of images for each class, which has the class's name; or with the folders ``train``
    and ``test`` (or ``val``), each of which has such sub-folders. The classes are those of the training."""
    left_out = Counter(path.suffix.lower() or "no ending" for _, path in files if not is_picture(path))
    files = [file for file in files if is_picture(file[1])]
    roles, said = by_role(files), []
    train = by_class(roles.get("train", []))
    found = {role: by_class(part, train) for role, part in roles.items()}
    if len({paths[0].parent for paths in train.values()}) == 1 < len(train):
        said.append(f"the classes are from the files' names: {one_line(', '.join(train))}")
    if found.get("val"):
        role = "train" if found.get("test") else "test"
        said.append(f"the validation images are in the {'training' if role == 'train' else role} set")
        for name, paths in found.pop("val").items():
            found.setdefault(role, {}).setdefault(name, []).extend(paths)
    parts = [part for role in ("train", "test") if (part := found.get(role))]
    if len(roles) > len(parts) == 1:
        said.append("no test image is of these classes: a fifth of each is drawn for the test")
    items = [[path for paths in part.values() for path in paths] for part in parts]
    taken = {path for part in items for path in part}
    if train and (others := [names for names, path in files if path not in taken]):
        places = one_line(", ".join(dict.fromkeys("/".join(names[:-1][:2] or names) for names in others)), 100)
        left_out[f"image{'s' * (len(others) > 1)} of no class ({places})"] = len(others)
    shown = ", ".join(f"{n:,} {what}" for what, n in left_out.most_common())
    if not train:
        what = f"{len(files):,} images, but no folder for each class of a training" if files else "no images"
        raise UserError(f"{folder} has {what}{f' (left out: {shown})' * bool(shown)}: {LAYOUTS}")
    below = Counter(name for paths in train.values() for name in {path.parent.name for path in paths})
    if len(same := sorted(name for name, n in below.items() if n > 1)) > 1:
        said.append(f"warning: several classes have folders {one_line(' and '.join(same), 60)}; are these the classes?"
                    f" Then {LAYOUTS}")
    for line in said + [f"left out: {shown}"] * bool(shown):
        print_message(one_line(f"{folder}: {line}", 500))
    names = tuple(train)
    labels = [np.repeat([names.index(k) for k in part], [len(v) for v in part.values()]) for part in parts]
    return Source(list(zip(items, labels, strict=True)), names, read_square, longer_side)


def is_picture(path: Path) -> bool:
    """Whether Pillow reads files with this ending."""
    return Image.registered_extensions().get(path.suffix.lower()) in Image.OPEN


def class_name(text: object) -> str:
    """A folder's name, or a label, as it is shown: on one line, and the same from every file system."""
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
    return one_line(unicodedata.normalize("NFC", text).strip() or "(empty)", 60)


# --- Arrays: a .npz file, or files of MNIST's format ------------------------------------------------------------------


def array_source(path: Path, arrays: Mapping[str, Array], keys: Sequence[str], names: Any) -> Source:
    """``keys``: of the training's images and labels and, if there, those of the test: (N, H, W), (N, H, W, 1) or (N,
    H, W, 3) of any numbers; (N,), whole numbers or texts. ``names``: of the labels, in their order, if not these."""

    def require(holds: bool, fault: str) -> None:
        if not holds:
            raise UserError(f"{path} has {fault}")

    for key in keys if arrays.keys() & set(keys[2:]) else keys[:2]:
        require(key in arrays, f"no {key}: it needs {keys[0]}, {keys[1]} and, for a test set, {keys[2]}, {keys[3]}")
    pictures, labels = [], []
    for x_key, y_key in (keys[:2], keys[2:]) if keys[2] in arrays else (keys[:2],):
        x, y = arrays[x_key], arrays[y_key]
        x = x[..., None] if x.ndim == 3 else x
        fits = x.ndim == 4 and x.shape[-1] in (1, 3) and x.size > 0 and x.dtype.kind in "uifb"
        fits = fits and float(x.min()) > -GREATEST and float(x.max()) < GREATEST
        require(fits, f"{x_key} of the shape {x.shape} of {x.dtype}, not finite numbers (N, H, W) or (N, H, W, 1 or 3)")
        is_number = y.dtype.kind in "uifb"
        fits = ((abs(y) < 2**53) & (y == np.rint(y))).all() if is_number else y.dtype.kind in "US"
        fits = fits and y.shape in ((len(x),), (len(x), 1))
        require(fits, f"{y_key} of the shape {y.shape} of {y.dtype}, not a whole number or text for each image")
        pictures.append(x)
        labels.append((y.astype(np.int64) if is_number else y).ravel())
    known = np.unique(np.concatenate(labels))
    shown = tuple(map(class_name, np.ravel(known if names is None else names).tolist()))
    different = f"{len(set(shown))} different names of classes, but {len(known)} different labels"
    require(len(known) == len(shown) == len(set(shown)), different)
    return Source([(x, np.searchsorted(known, y)) for x, y in zip(pictures, labels, strict=True)], shown)


def npz_source(path: Path) -> Source:
    """The arrays ``NPZ_KEYS``, and perhaps ``classes``: the names of the labels, in their order."""
    try:
        if not zipfile.is_zipfile(path):  # numpy would speak of pickled data
            raise ValueError("it is damaged, or of another kind" if os.path.exists(path) else "it is missing")
        with np.load(path, allow_pickle=False) as stored:
            if not any(name.endswith(".npy") for name in stored.zip.namelist()):
                raise ValueError("it has no arrays: unzip it first")
            arrays = {k: stored[k] for k in stored.files if k in (*NPZ_KEYS, "classes")}
            if unused := [k for k in stored.files if k not in arrays]:
                print_message(f"{path}: left out: the arrays {one_line(', '.join(unused))}")
    except Exception as error:  # zipfile and numpy raise many kinds on a damaged file
        hint = "; save numbers, or texts with .astype(str)" if "allow_pickle" in str(error) else f": {LAYOUTS}"
        raise UserError(f"{path} is not a folder, nor a .npz file that can be read: {one_line(error)}{hint}") from error
    return array_source(path, arrays, NPZ_KEYS, arrays.get("classes"))


NAMES = "classes.txt"


def idx_source(folder: Path, files: Files) -> Source:
    """Files of MNIST's names and format below a folder, of one set, whose images may have any size: see
    ``read_idx_files``. The names of the labels, a line each, may be in ``classes.txt``, in the folder or beside the
    files."""
    others = [path for _, path in files if not IDX_NAME.fullmatch(path.name)]
    if unused := [path.name for path in others if path.name != NAMES]:
        print_message(f"{folder}: left out beside the IDX files: {len(unused):,} ({one_line(', '.join(unused))})")
    try:
        arrays = read_idx_files(folder, [path for _, path in files])
    except ValueError as error:
        raise UserError(str(error)) from error
    text = next((read_text(path) for path in others if path.name == NAMES), "").lstrip("\ufeff")
    return array_source(folder, arrays, KEYS, [line for line in text.splitlines() if line.strip()] or None)


# --- Training and test set --------------------------------------------------------------------------------------------


def identities(images: Array) -> Array:
    """A number for each image, the same for identical ones."""
    return np.array([int.from_bytes(hashlib.blake2b(x.tobytes(), digest_size=7).digest(), "little") for x in images])


def picture_sets(
    parts: Sequence[Labelled], names: tuple[str, ...], levels: Levels, rng: np.random.Generator
) -> PictureSets:
    """Training and test set. Without a test set ``rng`` draws a fifth of each class, at least one image, for it;
    copies of an image stay on one side. Raises UserError where there are not enough images."""
    train, *rest = parts
    if len(names) < 2:
        raise UserError(f"there are images of one class alone, {', '.join(names)}: {LAYOUTS}")
    if without := [name for k, name in enumerate(names) if k not in train.labels]:
        raise UserError(f"there are no training images of the class {without[0]} that can be read: {LAYOUTS}")
    same = identities(train.images)
    if rest:
        test = rest[0]
        if len(both := np.flatnonzero(np.isin(identities(test.images), same))):
            shown = ", ".join([test.names[k] for k in both[:3]]) + " …" * (len(both) > 3)
            print_message(f"warning: {len(both):,} of {len(test.labels):,} test images are in the training set too:"
                          f" {one_line(shown)}")
        return PictureSets(names, train, test, levels)
    _, first, group, counts = np.unique(same, return_index=True, return_inverse=True, return_counts=True)
    if n := int((counts - 1).sum()):
        print_message(f"warning: {n:,} of {len(same):,} images are copies; all of an image go to the same set")
    is_test = np.zeros(len(counts), bool)
    for label, name in enumerate(names):
        own = np.flatnonzero(train.labels[first] == label)
        if len(own) == 1:
            raise UserError(f"there is one image of the class {name}, without copies, and two are needed, or a test"
                            f" set: {LAYOUTS}")
        is_test[rng.permutation(own)[: max(1, round(TEST_FRACTION * len(own)))] if len(own) else []] = True
    train, test = (Labelled(train.images[k], train.labels[k]) for k in (~is_test[group], is_test[group]))
    return PictureSets(names, train, test, levels)
