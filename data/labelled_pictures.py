"""A person's own pictures, each of a class: a folder, a .npz file, or files of MNIST's format of any size."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import re
import unicodedata
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.pictures import GREATEST, Levels, Square, array_square, eight_bits, quiet, read_square, require_scale
from support.console import one_line, print_message, shows_progress
from support.files import UserError

Array = np.ndarray
Files = list[tuple[tuple[str, ...], Path]]  # each file with the names of the folders that lead to it, and its own name

TEST_FRACTION = 0.2  # of each class, where there is no test set
N_MEASURED = 200  # pictures whose size is looked at
MAX_BYTES = 1 << 31  # of all pictures, resized, in float32
FLAT = 64  # of 256 levels: a picture that spans fewer shows little
ROLE = re.compile(  # of a folder, by its name
    r"(?<![a-z])(?:(?P<train>train(?:ing)?)|(?P<val>val(?:id(?:at(?:e|ion))?)?|dev)"
    r"|(?P<test>test(?:ing)?|eval(?:uation)?|hold.?out))(?:set|data|images)?(?![a-z])"
)
LAYOUTS = (
    "make FOLDER/CLASS/1.jpg … of all pictures, or FOLDER/train/CLASS/1.jpg … and FOLDER/test/CLASS/2.jpg …, with a"
    " folder for each CLASS"
)


class Source(NamedTuple):
    """Where pictures come from: files, or rows of arrays."""

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
    is_drawn: bool  # whether the test set was drawn from the pictures


def read_sets(path: Path, side: int | tuple[int, int], channels: int, rng: np.random.Generator) -> PictureSets:
    """Training and test set of a folder or a .npz file; a test set that is not there is drawn, see ``picture_sets``.

    ``side``: that of the images in pixels, or the least and the greatest from which the one nearest to the pictures'
    own (the median of their longer sides) is taken. Raises UserError; a picture that cannot be read is left out, with a
    warning.
    """
    if not os.path.exists(path):
        raise UserError(f"there is no folder and no .npz file {path}")
    files = visible_files(path) if os.path.isdir(path) else []
    idx = [file for _, file in files if IDX_NAME.fullmatch(file.name)]
    if idx and (others := [file.name for _, file in files if file not in idx and file.name != NAMES]):
        print_message(f"{path}: left out beside the IDX files: {len(others):,} ({one_line(', '.join(others))})")
    source = idx_source(path, idx) if idx else folder_source(path, files) if os.path.isdir(path) else npz_source(path)
    if not isinstance(side, int):
        items = source.parts[0][0]
        chosen = np.linspace(0, len(items) - 1, min(len(items), N_MEASURED)).astype(int).tolist()
        sizes = [size for k in chosen if (size := source.size(items[k]))]
        side = int(np.clip(round(float(np.median(sizes or side[1:]))), *side))
    parts, levels = read_all(path, source, side, channels)
    return picture_sets(parts, source.names, levels, rng)


def read_all(path: Path, source: Source, side: int, channels: int) -> tuple[list[Labelled], Levels]:
    """Every picture is resized when it is read: memory depends on the number of pictures alone, not on their sizes.
    Black and white are the least and the greatest number of all training pictures of one kind of numbers."""
    from tqdm import tqdm

    n = sum(len(labels) for _, labels in source.parts)
    if 4 * n * side * side * channels > MAX_BYTES:
        raise UserError(f"{n:,} pictures of {side} x {side} pixels need more than {MAX_BYTES >> 20} MiB: take fewer, or"
                        " a smaller --image-size")  # fmt: skip
    known, sets, why = dict[str, tuple[float, float]](), list[Labelled](), ""
    unreadable, ends = list[str](), list[str]()
    bar = tqdm(total=n, desc="pictures", leave=False, disable=not shows_progress())
    for items, labels in source.parts:
        raw, read = np.empty((len(items), side, side, channels), np.float32), dict[str, list[Any]]()  # by kind
        for k, item in enumerate(items):
            try:
                raw[k], kind, extremes = source.load(item, side, channels)
                read.setdefault(kind, []).append((k, *extremes))
            except UserError as error:
                why = why or one_line(error.__cause__ or error, 120)
            bar.update()
        names = [str(x.relative_to(path)) if isinstance(x, Path) else f"number {k}" for k, x in enumerate(items)]
        images, is_read = np.empty(raw.shape, np.uint8), np.zeros(len(items), bool)
        for kind, found in read.items():
            numbers, lows, highs = zip(*found, strict=True)
            if not sets:  # these are the training's
                known[kind] = min(lows), max(highs)
                ends += [names[numbers[x.index(end)]] for x, end in zip((lows, highs), known[kind], strict=True)]
            if kind not in known:
                why = why or f"it has {kind}, and no training picture does: save all in one format"
                continue
            require_scale(f"the pictures of {path} for the test have", max(highs), known[kind])
            for k in numbers:
                images[k], is_read[k] = eight_bits(raw[k], known[kind]), True
        unreadable += [names[k] for k in np.flatnonzero(~is_read)]
        sets.append(Labelled(images[is_read], labels[is_read], [names[k] for k in np.flatnonzero(is_read)]))
    bar.close()
    if unreadable:
        text = f"{len(unreadable):,} of {n:,} pictures of {path} cannot be read ({why})"
        text = one_line(f"{text} and are left out: {', '.join(unreadable)}", 480)
        if not len(sets[0].labels):
            raise UserError(text)
        print_message(f"warning: {text}")
    look = f"look at the darkest and the brightest ({one_line(', '.join(ends))}), or take a greater --image-size"
    for which, remedy, part in zip(("", " for the test"), (look, "scale both sets alike"), sets, strict=False):
        n_flat = int((np.ptp(part.images, axis=(1, 2, 3)) < FLAT).sum())
        if n_flat > len(part.labels) / 4:
            print_message(f"warning: {n_flat:,} of {len(part.labels):,} pictures of {path}{which} span under a quarter"
                          f" of the grey levels, so that the networks see little of them: {remedy}")  # fmt: skip
    return sets, known


# ----------------------------------------------------------------------------------------------------------------------
# A folder: which of its files are of which class
# ----------------------------------------------------------------------------------------------------------------------


def visible_files(folder: Path) -> Files:
    """All files below a folder, sorted, without hidden ones and those in hidden folders."""
    found: Files = []
    seen = set()

    def refuse(error: OSError) -> None:
        raise UserError(f"cannot read the folder {error.filename}: {error.strerror}") from error

    for at, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        seen.add(os.path.realpath(at))
        folders[:] = sorted(f for f in folders if f[0] != "." and os.path.realpath(os.path.join(at, f)) not in seen)
        parts = Path(at).relative_to(folder).parts
        found += [((*parts, name), Path(at, name)) for name in sorted(names) if name[0] != "."]
    return found


def inner_folders(files: Files) -> dict[str, Files]:
    """The files of each sub-folder, by its name, as seen from there."""
    found: dict[str, Files] = {}
    for (first, *rest), path in files:
        if rest:
            found.setdefault(first, []).append((tuple(rest), path))
    return found


def by_name(files: Files) -> dict[str, list[Path]]:
    """The files that lie in no sub-folder by what comes before the first dot or number of their names: circle.0.jpg."""
    found: dict[str, list[Path]] = {}
    for parts, path in files:
        name = re.split(r"[.\d]", parts[0])[0].strip(" _-(")
        if len(parts) == 1 and name:
            found.setdefault(class_name(name), []).append(path)
    return found


def names_classes(files: Files) -> bool:
    """Whether the files' own names are those of two classes or more, of two files or more each, not train and test."""
    found = by_name(files)
    return len(found) > 1 < min(map(len, found.values())) and not all(ROLE.search(name.lower()) for name in found)


def unwrapped(files: Files) -> Files:
    """The files without a folder around the classes' folders, or around files whose names are those of classes."""
    inner = inner_folders(files)
    only = next(iter(inner.values())) if len(inner) == 1 else []
    return unwrapped(only) if inner_folders(only) or names_classes(only) else files


def by_class(files: Files) -> dict[str, list[Path]]:
    """The files by the sub-folder, or by their own names."""
    found: dict[str, list[Path]] = {}
    for name, below in inner_folders(files).items():
        found.setdefault(class_name(name), []).extend(path for _, path in below)
    return found or (by_name(files) if names_classes(files) else {})


def by_role(files: Files) -> dict[str, Files]:
    """The files of the folders train, val and test, by these names, or all as those of "train". Names may be longer,
    as in seg_train or test1, and the folders may lie in one of several. The training's classes may lie beside test. A
    folder train beside others that are none of the three, and without folders or classes in it, is a class."""
    inner, found, beside = inner_folders(files), dict[str, Files](), Files()
    for name, below in inner.items():
        if role := ROLE.search(name.lower()):
            found.setdefault(str(role.lastgroup), []).extend(below)
        else:
            beside += [((name, *parts), path) for parts, path in below]
    if "train" not in found and any(inner_folders(part).keys() & inner_folders(beside) for part in found.values()):
        found["train"] = beside
    train = found.get("train", [])
    outer = [deeper for below in inner.values() if len(deeper := by_role(below)) > 1 and "train" in deeper]
    if len(outer) == 1 and len(found) < 2:
        return outer[0]
    is_named = len(found) > 1 or inner_folders(train) or names_classes(train) or len(inner) == len(found) > 0
    return found if is_named else {"train": files}


def folder_source(folder: Path, files: Files) -> Source:
    """A folder with a sub-folder of pictures for each class, which has the class's name; or with the folders ``train``
    and ``test`` (or ``val``), each of which has such sub-folders. The classes are those of the training."""
    known = picture_endings()
    left_out = Counter(path.suffix.lower() or "no ending" for _, path in files if path.suffix.lower() not in known)
    files = [file for file in files if file[1].suffix.lower() in known]
    roles, said, by = {role: unwrapped(part) for role, part in by_role(files).items()}, [], by_class
    train = by_class(roles.get("train", []))
    if train and not inner_folders(roles["train"]):  # the test's names may be of no class
        said.append(f"the classes are from the files' names: {one_line(', '.join(train))}")
        by = by_name
    found = {role: {k: v for k, v in by(part).items() if k in train} for role, part in roles.items()}
    if found.get("val"):
        role = "train" if found.get("test") else "test"
        said.append(f"the validation pictures are in the {'training' if role == 'train' else role} set")
        for name, paths in found.pop("val").items():
            found.setdefault(role, {}).setdefault(name, []).extend(paths)
    parts = [part for role in ("train", "test") if (part := found.get(role))]
    if len(roles) > len(parts) == 1:
        said.append("no test picture is of these classes: a fifth of each is drawn for the test")
    items = [[path for paths in part.values() for path in paths] for part in parts]
    taken = {path for part in items for path in part}
    if train and (others := [names for names, path in files if path not in taken]):
        places = one_line(", ".join(dict.fromkeys("/".join(names[:-1][:2] or names) for names in others)), 100)
        left_out[f"picture{'s' * (len(others) > 1)} of no class ({places})"] = len(others)
    shown = ", ".join(f"{n:,} {what}" for what, n in left_out.most_common())
    if not train:
        what = f"{len(files):,} pictures, but no folder for each class of a training" if files else "no pictures"
        raise UserError(f"{folder} has {what}{f' (left out: {shown})' * bool(shown)}: {LAYOUTS}")
    below = Counter(sub for part in inner_folders(roles["train"]).values() for sub in inner_folders(part))
    if len(same := [name for name, n in below.items() if n > 1]) > 1:
        said.append(f"warning: several classes have folders {one_line(' and '.join(same), 60)}; are these the classes?"
                    f" Then {LAYOUTS}")  # fmt: skip
    for line in said + [f"left out: {shown}"] * bool(shown):
        print_message(one_line(f"{folder}: {line}", 500))
    names = tuple(dict.fromkeys(name for part in parts for name in part))
    labels = [np.repeat([names.index(k) for k in part], [len(v) for v in part.values()]) for part in parts]
    return Source(list(zip(items, labels, strict=True)), names, read_square, file_size)


def picture_endings() -> set[str]:
    """Of all kinds of files that Pillow reads."""
    from PIL import Image

    Image.init()
    return {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}


def class_name(text: object) -> str:
    """A folder's name, or a label, as it is shown: on one line, and the same from every file system."""
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
    return one_line(unicodedata.normalize("NFC", text).strip() or "(empty)", 60)


def file_size(path: Path) -> int:
    """The longer side of a picture in pixels; 0 where it cannot be read."""
    from PIL import Image

    with contextlib.suppress(Exception), quiet():
        if path.is_file():  # a pipe would be waited for
            with Image.open(path) as opened:
                return max(opened.size)
    return 0


# ----------------------------------------------------------------------------------------------------------------------
# Arrays: a .npz file, or files of MNIST's format
# ----------------------------------------------------------------------------------------------------------------------


def npz_source(path: Path) -> Source:
    """``x_train``, ``y_train`` and, if there, ``x_test``, ``y_test``: pictures (N, H, W), (N, H, W, 1) or (N, H, W, 3)
    of any numbers; labels (N,), whole numbers or texts. ``classes``: the names of the labels, in their order."""
    try:
        if not (path.is_file() and zipfile.is_zipfile(path)):  # numpy would wait for a pipe, and speak of pickled data
            raise ValueError("it is damaged, or of another kind")
        with np.load(path, allow_pickle=False) as stored:
            if not any(name.endswith(".npy") for name in stored.zip.namelist()):
                raise ValueError("it has no arrays: unzip it first")
            arrays = {k: stored[k] for k in ("x_train", "y_train", "x_test", "y_test", "classes") if k in stored}
            if unused := [k for k in stored.files if k not in arrays]:
                print_message(f"{path}: left out: the arrays {one_line(', '.join(unused))}")
    except Exception as error:  # zipfile and numpy raise many kinds on a damaged file
        hint = "; save numbers, or texts with .astype(str)" if "allow_pickle" in str(error) else f": {LAYOUTS}"
        raise UserError(f"{path} is not a folder, nor a .npz file that can be read: {one_line(error)}{hint}") from error

    def require(holds: bool, fault: str) -> None:
        if not holds:
            raise UserError(f"{path} {fault}")

    pictures, labels = [], []
    for part in ("train", "test") if {"x_test", "y_test"} & arrays.keys() else ("train",):
        for key in (f"x_{part}", f"y_{part}"):
            require(key in arrays, f"has no {key}: it needs x_train, y_train and, for a test set, x_test, y_test")
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        x = x[..., None] if x.ndim == 3 else x
        fits = x.ndim == 4 and x.shape[-1] in (1, 3) and 0 not in x.shape
        require(fits, f"has an x_{part} of the shape {x.shape}: it must be (N, H, W) or (N, H, W, 1 or 3)")
        is_finite = x.dtype.kind in "uifb" and max(abs(float(x.min())), abs(float(x.max()))) < GREATEST
        require(is_finite, f"has an x_{part} of {x.dtype}: it must hold finite numbers")
        fits = y.shape in ((len(x),), (len(x), 1)) and y.dtype.kind in "uifbUS"
        require(fits, f"has a y_{part} of the shape {y.shape} of {y.dtype}: it must have one label for each picture")
        y = y.ravel()
        if y.dtype.kind in "fb":
            is_whole = bool((np.isfinite(y) & (y == np.rint(y))).all())
            require(is_whole, f"has labels in y_{part} that are no whole numbers")
            y = y.astype(np.int64)
        pictures.append(x)
        labels.append(y)
    known = np.unique(labels[0])
    names = tuple(map(class_name, arrays.get("classes", known).ravel().tolist()))
    different = f"has {len(set(names))} different classes, but {len(known)} different labels in y_train"
    require(len(known) == len(names) == len(set(names)), different)
    other = sorted(set(labels[-1].tolist()) - set(known.tolist()))
    require(not other, f"has labels in y_test that are not in y_train: {other[:3]}")
    return Source([(x, np.searchsorted(known, y)) for x, y in zip(pictures, labels, strict=True)], names)


NAMES = "classes.txt"
IDX_NAME = re.compile(r"(.*?)[-_.]?(train|t10k|test)[-_.](images|labels)[-_.]idx[13][-_.]ubyte(\.gz)?", re.I)


def idx_source(folder: Path, paths: Sequence[Path]) -> Source:
    """Files of MNIST's names and format below a folder, of one set, whose pictures may have any size. EMNIST's are
    turned upright. The names of the labels may be in ``classes.txt``, in the folder or beside the files."""
    found: dict[str, Path] = {}
    sets: dict[str, None] = {}
    for path in paths:
        prefix, part, what = re.sub(IDX_NAME, r"\1 \2 \3", path.name.lower()).rsplit(" ", 2)
        place = path.parent.parent if IDX_NAME.fullmatch(path.parent.name) else path.parent  # unpacked into a folder
        sets[f"{place.relative_to(folder)} {prefix}".strip(" .")] = None
        found.setdefault(f"{part.replace('test', 't10k')}-{what}", path)
    if len(sets) > 1:
        raise UserError(
            f"{folder} holds several sets, {', '.join(sets)}: put the files of one into a folder of its own"
        )
    pictures, labels = [], []
    for part in ("train", "t10k")[: 1 + any("t10k" in key for key in found)]:
        for key in (f"{part}-images", f"{part}-labels"):
            if key not in found:
                raise UserError(f"{folder} has no {key}-idx{3 if 'images' in key else 1}-ubyte beside the others")
        x, y = read_idx(found[f"{part}-images"]), read_idx(found[f"{part}-labels"])
        if x.ndim != 3 or not x.size or y.shape != (len(x),):
            raise UserError(f"{found[f'{part}-images']} has the shape {x.shape}, and its labels {y.shape}")
        pictures.append(x[..., None])
        labels.append(y)
    if any("emnist" in name.lower() for name in sets):
        print_message(f"{folder}: EMNIST's pictures lie on their side and are turned upright")
        pictures = [x.swapaxes(1, 2) for x in pictures]
    known = np.unique(np.concatenate(labels))
    names = next((p for p in [folder / NAMES, *(path.with_name(NAMES) for path in paths)] if p.is_file()), None)
    parts = [(x, np.searchsorted(known, y)) for x, y in zip(pictures, labels, strict=True)]
    return Source(parts, read_class_names(names, known))


def read_idx(path: Path) -> Array:
    """A file of MNIST's format, gzipped or not, told by its content: 8-bit numbers of any shape. Raises UserError."""
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        if content[:3] != bytes((0, 0, 8)):
            raise ValueError("it is no IDX file of 8-bit numbers")
        shape = np.frombuffer(content, ">u4", content[3], offset=4).tolist()
        return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error


def read_class_names(path: Path | None, labels: Array) -> tuple[str, ...]:
    """Names of the classes of sorted labels (J,): the lines of a file, in the order of the labels, or without it the
    labels themselves. Raises UserError where there are not as many."""
    if path is None:
        return tuple(map(str, labels.tolist()))
    try:
        names = tuple(class_name(line) for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {one_line(error)}") from error
    if len(set(names)) < len(names) or len(names) != len(labels):
        raise UserError(f"{path} has {len(set(names))} different names, but the files have {len(labels)} labels")
    return names


# ----------------------------------------------------------------------------------------------------------------------
# Training and test set
# ----------------------------------------------------------------------------------------------------------------------


def identities(images: Array) -> Array:
    """A number for each image, the same for identical ones."""
    return np.array([int.from_bytes(hashlib.blake2b(x.tobytes(), digest_size=7).digest(), "little") for x in images])


def picture_sets(
    parts: Sequence[Labelled], found: Sequence[str], levels: Levels, rng: np.random.Generator
) -> PictureSets:
    """Training and test set. Without a test set ``rng`` draws a fifth of each class, at least one picture, for it;
    copies of a picture stay on one side.

    ``found``: the names of the labels. Raises UserError where there are not enough pictures.
    """
    names = tuple(found[k] for k in np.unique(parts[0].labels))
    for name in (found[k] for part in parts for k in np.unique(part.labels)):
        if name not in names:
            raise UserError(f"there are pictures of the class {name}, but no training pictures of it: {LAYOUTS}")
    if len(names) < 2:
        raise UserError(f"there are pictures of one class alone, {', '.join(names)}: {LAYOUTS}")
    numbers = np.array([names.index(name) if name in names else -1 for name in found], np.intp)
    train, *rest = (part._replace(labels=numbers[part.labels]) for part in parts)
    same = identities(train.images)
    for test in rest:
        if not len(test.labels):
            raise UserError("there is no test picture that can be read")
        if len(both := np.flatnonzero(np.isin(identities(test.images), same))):
            shown = ", ".join([test.names[k] for k in both[:3]]) + " …" * (len(both) > 3)
            print_message(f"warning: {len(both):,} of {len(test.labels):,} test pictures are in the training set too:"
                          f" {one_line(shown)}")  # fmt: skip
        return PictureSets(names, train, test, levels, False)
    _, first, group, counts = np.unique(same, return_index=True, return_inverse=True, return_counts=True)
    if n := int((counts - 1).sum()):
        print_message(f"warning: {n:,} of {len(same):,} pictures are copies; all of a picture go to the same set")
    is_test = np.zeros(len(counts), bool)
    for label, name in enumerate(names):
        own = np.flatnonzero(train.labels[first] == label)
        if len(own) == 1:
            raise UserError(f"there is one picture of the class {name}, without copies, and two are needed, or a test"
                            f" set: {LAYOUTS}")  # fmt: skip
        is_test[rng.permutation(own)[: max(1, round(TEST_FRACTION * len(own)))] if len(own) else []] = True
    chosen = is_test[group.ravel()]
    drawn = [Labelled(train.images[k], train.labels[k]) for k in (~chosen, chosen)]
    return PictureSets(names, drawn[0], drawn[1], levels, True)
