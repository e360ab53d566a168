"""A person's own images: how they are read, and what is said of those that cannot be."""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data import files, labelled_pictures, pictures
from data.labelled_pictures import PictureSets, Source, read_sets
from helpers import PICTURE_CLASSES as CLASSES, Array, Capture, Patch, idx, picture, write_folder
from support import results


def write_deep(root: Path, ending: str, convert: Callable[[Array], Array], n: int = 4) -> Path:
    """Grey images of two classes, whose levels of 0 to 255 ``convert`` makes others of."""
    rng = np.random.default_rng(0)
    for label in range(2):
        (root / f"class {label}").mkdir(parents=True)
        for k in range(n):
            grey = picture(label, rng)[..., 0]
            Image.fromarray(convert(grey.astype(np.float64))).save(root / f"class {label}" / f"{k}{ending}")
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "own images")


def sets_of(path: Path, side: int | tuple[int, int] = (20, 32), channels: int = 1, seed: int = 0) -> PictureSets:
    return read_sets(path, side, channels, np.random.default_rng(seed))


def fault_of(path: Path) -> str:
    with pytest.raises(OSError) as caught:
        sets_of(path)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 500
    return text


def everything(sets: PictureSets) -> Array:
    """All images, sorted, whichever set they are in."""
    images = np.concatenate([sets.train.images, sets.test.images])
    return images[np.lexsort(images.reshape(len(images), -1).T)]


def said_of(path: Path, capsys: Capture) -> str:
    """What is printed while a set is read."""
    capsys.readouterr()
    sets_of(path)
    return capsys.readouterr().err


def paint(path: Path, level: float, dtype: Any = np.uint16) -> Path:
    """An image of one level."""
    Image.fromarray(np.full((20, 20), level, dtype)).save(path)
    return path


def write_idx(root: Path, labels: Sequence[int]) -> Path:
    """The four files."""
    root.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("t10k", 3)):
        y = np.resize(np.array(labels, np.uint8), count * len(labels))
        x = rng.integers(0, 256, (len(y), 28, 28)).astype(np.uint8)
        (root / f"{part}-images-idx3-ubyte").write_bytes(idx(x))
        (root / f"{part}-labels-idx1-ubyte").write_bytes(idx(y))
    return root


# --- One image ------------------------------------------------------------------------------------------------------


def read_square(path: Path, side: int, channels: int) -> Array:
    return pictures.square_of_set(path, side, channels, {})


def test_a_picture_is_resized_and_padded_with_the_level_of_its_border(tmp_path: Path) -> None:
    wide = np.full((10, 40), 80, np.uint8)
    wide[2:8, 10:30] = 240
    wide[:2, :2] = 255  # a bright corner is no background
    Image.fromarray(wide).save(tmp_path / "wide.png")
    small, large = (read_square(tmp_path / "wide.png", side, 1)[..., 0] for side in (20, 80))
    assert (small[[*range(7), *range(13, 20)]] == 80).all()
    assert (small[9:11, 6:14] == 240).all()
    assert (large[40, 40], large[5, 5]) == (240, 80)
    assert len(np.unique(large)) > 3  # with levels between those of its pixels


def test_a_photograph_is_upright_and_may_be_decoded_at_a_fraction_of_its_size(tmp_path: Path) -> None:
    image, exif = np.zeros((800, 1200), np.uint8), Image.Exif()
    image[:, 900:] = 255  # bright on the right; turned clockwise by a quarter: below
    exif[0x0112] = 6
    for name, pixels in (("photo.jpg", image), ("small.jpg", image[::2, ::2])):
        Image.fromarray(pixels).save(tmp_path / name, exif=exif, quality=95)
    assert pictures.open_upright(tmp_path / "photo.jpg", 32).height < 1200
    assert min(pictures.open_upright(tmp_path / "small.jpg", 32).size) >= 64  # an eighth of it would be below
    read = read_square(tmp_path / "photo.jpg", 32, 1)[..., 0]
    assert read[28, 16] > 240
    assert read[4, 16] < 15


def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(tmp_path: Path, monkeypatch: Patch) -> None:
    """By the project's limit; Pillow's own, which is higher, would be a warning first."""
    assert (Image.MAX_IMAGE_PIXELS or 0) > pictures.MAX_PIXELS == 50_000_000
    path = paint(tmp_path / "huge.png", 0)
    monkeypatch.setattr(pictures, "MAX_PIXELS", 50)
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("was decoded"))
    with pytest.raises(OSError, match=r"huge\.png is not an image that can be read: it has 20 x 20 pixels"):
        pictures.read_grey(path)


def test_a_single_deep_picture_has_the_white_of_the_bits_that_it_uses(tmp_path: Path) -> None:
    for most, white in ((4000, 4095), (200, 255), (65_535, 65_535)):
        assert pictures.read_grey(paint(tmp_path / "deep.png", most)).max() == pytest.approx(most / white)
    assert pictures.read_grey(paint(tmp_path / "deep.tif", 1.0000004, np.float32)).max() == 1


def test_colours_palettes_bits_frames_and_transparency(tmp_path: Path) -> None:
    clear = np.full((16, 16, 4), (255, 255, 255, 0), np.uint8)  # whatever colour transparent pixels have
    clear[4:12, 4:12] = (115, 115, 115, 255)  # dark on transparent: on white
    bright = np.where(clear == 115, np.uint8(140), clear)  # bright on transparent: on black
    frames = [Image.new("L", (16, 16), level) for level in (90, 200)]
    frames[0].save(tmp_path / "two.gif", save_all=True, append_images=frames[1:])
    Image.new("RGB", (16, 16), (200, 100, 50)).save(tmp_path / "a.bmp")
    Image.new("1", (16, 16), 1).save(tmp_path / "bits.png")
    Image.fromarray(clear).save(tmp_path / "clear.png")
    Image.fromarray(bright).save(tmp_path / "bright.png")
    for name, channels, corner, middle in (
        ("a.bmp", 3, [200, 100, 50], [200, 100, 50]), ("a.bmp", 1, 124, 124), ("bits.png", 1, 255, 255),
        ("clear.png", 1, 255, 115), ("clear.png", 3, 255, 115), ("bright.png", 1, 0, 140), ("two.gif", 1, 90, 90),
    ):
        read = read_square(tmp_path / name, 16, channels)
        assert (read[0, 0] == corner).all(), name
        assert (read[8, 8] == middle).all(), name
    assert pictures.read_square(tmp_path / "clear.png", 16, 1).extremes == (0, 255)  # with its background


# --- Grey levels are those of the set ---------------------------------------------------------------------------------

DEEP: dict[str, tuple[str, Callable[[Array], Array], tuple[float, float]]] = {
    "12 bits from 1000": (".tiff", lambda x: np.rint(1000 + x * 4).astype(np.uint16), (1000, 2020)),
    "signed": (".tif", lambda x: (x * 8 - 1000).astype(np.int32), (-1000, 1040)),
    "-1 to 1": (".tif", lambda x: (x / 127.5 - 1).astype(np.float32), (-1, 1)),
    "pgm": (".pgm", lambda x: np.rint(x * (4095 / 255)).astype(np.uint16).astype(np.int32), (0, 4095)),
    "8 bits of 0 to 15": (".png", lambda x: np.rint(x / 17).astype(np.uint8), (0, 15)),
}


@pytest.mark.parametrize("kind", DEEP)
def test_black_and_white_are_the_least_and_the_greatest_level_of_the_training_pictures(
    kind: str, tmp_path: Path, capsys: Capture
) -> None:
    ending, convert, expected = DEEP[kind]
    plain = everything(sets_of(write_deep(tmp_path / "plain", ".png", lambda x: x.astype(np.uint8))))
    sets = sets_of(write_deep(tmp_path / "deep", ending, convert))
    assert list(sets.levels.values()) == [pytest.approx(expected, abs=1e-6)]
    farthest = np.abs(everything(sets)[:, None].astype(int) - plain.astype(int)).max(axis=(2, 3, 4))
    assert farthest.min(axis=1).max() <= (9 if "15" in kind else 1)
    assert capsys.readouterr().err == ""
    path = next((tmp_path / "deep" / "class 0").iterdir())
    read = pictures.square_of_set(path, 20, 1, sets.levels)  # as --predict does
    assert (read == everything(sets)).all(axis=(1, 2, 3)).any()


def test_deep_and_other_pictures_may_be_mixed(tmp_path: Path) -> None:
    root = write_deep(tmp_path / "mixed", ".png", lambda x: x.astype(np.uint8))
    write_deep(root / "class 0" / "scanner", ".png", lambda x: (100 + 16 * x).astype(np.uint16))
    assert sets_of(root).levels == {"8 bits": [0, 255], "whole numbers": [100, 4180]}


def test_what_is_no_text_or_shows_nothing_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_bytes("schön".encode("latin-1"))
    for read_text in (files.read_text, results.read_text):
        with pytest.raises(OSError, match=r"^cannot read \S+/classes.txt: it is not text in UTF-8$"):
            read_text(tmp_path / "classes.txt")
        with pytest.raises(OSError, match=r"^cannot read \S+/nothing: No such file"):
            read_text(tmp_path / "nothing")
    for ground, level, stands_out in ((90, 90, False), (90, 90 + 33, True), (140, 20, True)):
        faint = Image.new("L", (28, 28), ground)  # brighter by an eighth of white; dark on bright
        faint.putpixel((14, 14), level)
        faint.save(tmp_path / "faint.png")
        with contextlib.nullcontext() if stands_out else pytest.raises(OSError, match=r"faint.png has nothing that"):
            assert pictures.read_strokes(tmp_path / "faint.png", 28, 20).max() == 1


def test_a_set_that_shows_little_is_a_warning(tmp_path: Path, capsys: Capture) -> None:
    """More than a quarter of it; one image of a far greater level; and a test set of another range."""
    root = write_deep(tmp_path / "dim", ".png", lambda x: np.rint(8 * x).astype(np.uint16))
    paint(root / "class 1" / "3.png", 8_200)
    error = said_of(root, capsys)
    assert f"warning: 8 of 8 images of {root} span under a quarter of the grey levels" in error
    assert "look at the darkest and the brightest (class 0/0.png, class 1/3.png)" in error
    write_deep(tmp_path / "both" / "train", ".png", lambda x: np.rint(16 * x).astype(np.uint16))
    write_deep(tmp_path / "both" / "test", ".png", lambda x: x.astype(np.uint16))
    train, test = (sorted((tmp_path / "both" / part).rglob("*.png")) for part in ("train", "test"))
    for n_good, warned in ((5, True), (6, False)):
        for good, dim in zip(train[:n_good], test, strict=False):
            dim.write_bytes(good.read_bytes())
        assert ("3 of 8 images" in (error := said_of(tmp_path / "both", capsys))) == warned
        assert ("for the test span under" in error) == warned


@pytest.mark.parametrize(("value", "why"), [
    (4.2, "has values up to 4.2, and those of the training up to 1: scale"),
    *((value, "it has pixels that are no finite numbers, or too great") for value in (np.nan, np.inf, -3e38)),
])
def test_a_test_picture_of_other_numbers_is_left_out(value: float, why: str, tmp_path: Path, capsys: Capture) -> None:
    for part in ("train", "test"):
        write_deep(tmp_path / part, ".tif", lambda x: (x / 255).astype(np.float32))
    paint(tmp_path / "test" / "class 1" / "3.tif", value, np.float32)
    error = said_of(tmp_path, capsys)
    assert "1 of 16 images" in error
    assert "test/class 1/3.tif" in error
    assert why in error


def test_files_after_a_training_with_arrays_or_of_another_range(tmp_path: Path) -> None:
    """What no training had is refused: see the tests around, and those of --predict."""
    plain, deep = paint(tmp_path / "bytes.png", 51, np.uint8), paint(tmp_path / "deep.png", 4080)
    thrice = {"whole numbers": (0, 1360)}  # which is cut, and no other range yet
    assert (pictures.square_of_set(deep, 20, 1, thrice) == 255).all()
    with pytest.raises(OSError, match="holds 8 bits, and no image of the training does"):
        pictures.square_of_set(plain, 20, 1, thrice)
    for ends, grey in (((0, 1), 51), ((0, 4095), 51), ((-1, 1), 51), ((1, 101), 128), ((0, 51), 255)):  # as 8 bits
        assert (pictures.square_of_set(plain, 20, 1, {"arrays": ends}) == grey).all()


# --- A folder ---------------------------------------------------------------------------------------------------------


def test_sub_folders_are_classes_and_a_fifth_of_each_is_the_test_set(folder: Path, tmp_path: Path) -> None:
    """Links are followed, but not to a folder around them."""
    sets = sets_of(folder)
    assert sets.classes == tuple(sorted(CLASSES))
    assert (sets.train.images.shape, sets.train.images.dtype) == ((18, 20, 20, 1), np.uint8)
    assert [np.bincount(part.labels).tolist() for part in (sets.train, sets.test)] == [[6, 6, 6], [2, 2, 2]]
    for part in (sets.train, sets.test):
        bright = part.images[..., 0][:, :, [3, 10, 17]].mean(axis=1)
        np.testing.assert_array_equal(bright.argmax(axis=1), part.labels)
    assert len(np.unique(everything(sets), axis=0)) == 24  # no image is in both
    (tmp_path / "links").mkdir()
    for name in CLASSES:
        (tmp_path / "links" / name).symlink_to(folder / name)
    np.testing.assert_array_equal(sets.test.images, sets_of(tmp_path / "links").test.images)
    assert (sets.test.images != sets_of(folder, seed=1).test.images).any()
    (folder / CLASSES[0] / "up").symlink_to(folder)
    assert len(labelled_pictures.visible_files(folder)) == 24


def test_sizes_endings_and_colours_may_be_mixed(tmp_path: Path) -> None:
    endings = (".png", ".JPG", ".jfif", ".jpe", ".WebP", ".bmp", ".gif", ".TIF", ".PPM")
    root = write_folder(tmp_path / "mixed", n=18, sides=(17, 24, 90), endings=endings)
    Image.new("RGBA", (30, 40), (0, 0, 0, 0)).save(root / CLASSES[1] / "clear.png")
    assert everything(sets_of(root)).shape == (55, 24, 24, 1)  # the median of the sides
    assert everything(sets_of(root, 14, 3)).shape == (55, 14, 14, 3)


def test_the_size_is_that_of_pictures_spread_over_all(tmp_path: Path, monkeypatch: Patch) -> None:
    """The longer side of a file, and of an array, too; within the limits."""
    monkeypatch.setattr(labelled_pictures, "N_MEASURED", 2)
    for first, last, expected in ((20, 30, 25), (70, 70, 32), (9, 9, 20)):
        for name, side in (("a", first), ("b", last)):
            write_folder(tmp_path / f"{first}", [name], n=3, sides=(side,))
        assert sets_of(tmp_path / f"{first}").train.images.shape[1] == expected
    np.savez(tmp_path / "wide.npz", x_train=arrays(side=30)["x_train"][:, :15], y_train=arrays()["y_train"])
    assert sets_of(tmp_path / "wide.npz").train.images.shape[1] == 30


def test_what_is_left_out_is_counted_by_its_endings(folder: Path, capsys: Capture) -> None:
    write_folder(folder, [".hidden"], n=2)
    (folder / CLASSES[0] / "._bild 0.png").write_bytes(b"x")
    (folder / "empty").mkdir()
    assert said_of(folder, capsys) == ""
    for name in (f"{CLASSES[0]}/{name}" for name in ("a.heic", "b.HEIC", "notes.txt", "README")):
        (folder / name).write_bytes(b"x")
    (folder / "loose.png").write_bytes(b"x")
    shown = "2 .heic, 1 no ending, 1 .txt, 1 image of no class (loose.png)"
    assert said_of(folder, capsys) == f"{folder}: left out: {shown}\n"


def test_unreadable_pictures_are_named_counted_and_left_out(folder: Path, capsys: Capture) -> None:
    whole = (folder / CLASSES[0] / "bild 0ß.png").read_bytes()
    (folder / CLASSES[0] / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / CLASSES[1] / "empty.jpg").write_bytes(b"")
    assert len(everything(sets_of(folder))) == 24
    line = capsys.readouterr().err
    assert re.fullmatch(r"warning: 2 of 26 images.*\(image file is truncated.*left out: .*cut\.png.*empty\.jpg\n", line)
    for path in folder.rglob("*.png"):
        path.write_bytes(whole[:30])
    assert "26 of 26 images" in fault_of(folder)


def test_copies_stay_on_one_side(tmp_path: Path, capsys: Capture) -> None:
    root = write_folder(tmp_path / "copies", n=10)
    for path in list(root.rglob("*.png")):
        for k in range(3):
            shutil.copy(path, path.with_name(f"{path.stem} ({k}).png"))
    for seed in range(5):
        sets = sets_of(root, seed=seed)
        assert not {*map(bytes, sets.train.images)} & {*map(bytes, sets.test.images)}
        assert np.bincount(sets.test.labels).tolist() == [8, 8, 8]  # all four of two images
        assert "90 of 120 images are copies" in capsys.readouterr().err


def test_pictures_of_the_training_in_the_test_are_counted(tmp_path: Path, capsys: Capture) -> None:
    train, test = (write_folder(tmp_path / part, n=5, seed=k) for k, part in enumerate(("train", "test")))
    assert said_of(tmp_path, capsys) == ""
    for name in (f"{name}/bild {k}ß.png" for name in CLASSES[:2] for k in range(2)):
        shutil.copy(train / name, test / name)
    names = ", ".join(f"test/{name}ß.png" for name in ("dark left/bild 0", "dark left/bild 1", "heller/bild 0"))
    said = f"warning: 4 of 15 test images are in the training set too: {names} …\n"
    assert said_of(tmp_path, capsys) == said


# --- Layouts ----------------------------------------------------------------------------------------------------------


def write_tree(root: Path, tree: Mapping[str, Sequence[str]]) -> Path:
    """Four images of each name in each folder: in a folder of the name, or files where it is a pattern."""
    for seed, (place, names) in enumerate(tree.items()):
        rng = np.random.default_rng(seed)
        for (label, name), k in itertools.product(enumerate(names), range(4)):
            path = root / place / (name if "{" in name else f"{name}/{{}}.png").format(k)
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture(label, rng)).save(path)
    return root


PAIR, IN_NAMES = ("cat", "dog"), ("cat.{}.png", "dog.{}.png")
AS_TEST, AS_TRAINING = (f"the validation images are in the {part} set" for part in ("test", "training"))
NO_TEST = "no test image is of these classes: a fifth of each is drawn for the test"
LAYOUTS: list[tuple[Mapping[str, Sequence[str]], Sequence[str], tuple[int, int], str]] = [
    *((dict.fromkeys(parts.split(), PAIR), PAIR, (8 * (1 + (said == AS_TRAINING)), 8), said) for parts, said in (
        ("Training Testing", ""), ("TRAIN val", AS_TEST), ("train valid test", AS_TRAINING), ("train eval", ""),
        ("seg_train/seg_train seg_test/seg_test", ""), ("split-train-test/train split-train-test/test", ""),
        ("a/b/train a/b/Validation", AS_TEST), ("TrainingSet test_images", ""), ("train dev hold-out", AS_TRAINING),
    )),
    ({"test": PAIR, "val": ["{}.png"], ".": PAIR}, PAIR, (8, 8), "4 images of no class (val)"),
    ({"archive/pets": PAIR}, PAIR, (6, 2), ""),
    *(({".": classes}, classes, (9, 3), "") for classes in (("bus", "car", "train"), ("cars", "tests", "trains"))),
    ({".": ("cat.{}.png", "train.{}.png")}, ("cat", "train"), (6, 2), "are from the files' names: cat, train"),
    ({"train": PAIR, "test/cat": ("left", "right")}, PAIR, (8, 8), ""),
    ({"trn": PAIR, "tst": PAIR}, ("trn", "tst"), (12, 4), "warning: several classes have folders cat and dog"),
    ({"a/b/train": PAIR, "a/b/test": PAIR, "docs": ["fig.{}.png"]}, PAIR, (8, 8), "no class (docs)"),
    ({"train": PAIR, "val": (*PAIR, "bird")}, PAIR, (8, 8), "left out: 4 images of no class (val/bird)"),
    ({"train": PAIR, "test/images": ["val_.{}.png"]}, PAIR, (6, 2), NO_TEST),
    *(({"train": [f"{name}{end}" for name in PAIR]}, PAIR, (6, 2), "the classes are from the files' names: cat, dog")
      for end in ("_{:03}.png", "{}.png", " ({}).png")),
    ({"train/train": IN_NAMES, "test/test": ["{}.png"]}, PAIR, (6, 2), "4 images of no class (test/test)"),
    ({"train": PAIR, "contest": PAIR}, PAIR, (6, 2), "left out: 8 images of no class (contest/cat, contest/dog)"),
    ({"train": IN_NAMES, "test1": ["{}.png"], "test2": IN_NAMES}, PAIR, (8, 8), "4 images of no class (test1)"),
]


@pytest.mark.parametrize(("tree", "classes", "counts", "said"), LAYOUTS)
def test_layouts(
    tree: Mapping[str, Sequence[str]], classes: Sequence[str], counts: tuple[int, int], said: str, tmp_path: Path,
    capsys: Capture,
) -> None:
    sets = sets_of(write_tree(tmp_path / "set", tree))
    assert sets.classes == tuple(classes)
    assert (len(sets.train.labels), len(sets.test.labels)) == counts
    error = capsys.readouterr().err
    assert (said in error) if said else (error == "")


LIKE_THESE = "make FOLDER/CLASS/1.jpg … of all images, or FOLDER/train/CLASS/1.jpg"
ALIKE = [f"photographs of the left hand of {name}, taken in the winter of that year" for name in ("Al", "Bo")]


@pytest.mark.parametrize(("tree", "words"), [
    *((tree, LIKE_THESE) for tree in (
        {"train": ["IMG_{}.png"], "test1": ["IMG_{}.png"]}, {"test": ["{}.png"]},
        {"set": ["train.{}.png", "test1.{}.png"]}, {"dev/cat": ["{}.png"], "test/cat": ["{}.png"]},
    )),
    ({".": ["{}.png"]}, "4 images, but no folder for each class"),
    ({".": ["cat"]}, "one class alone, cat"),
    ({".": ALIKE}, "would be one class: rename it"),
])
def test_pictures_without_classes_are_refused(tree: Mapping[str, Sequence[str]], words: str, tmp_path: Path) -> None:
    assert words in fault_of(write_tree(tmp_path, tree))


def test_what_is_no_folder_of_pictures_is_one_line(tmp_path: Path) -> None:
    assert "one image of the class dark left, without copies" in fault_of(write_folder(tmp_path / "single", n=1))
    assert len(sets_of(write_folder(tmp_path / "pairs", n=2)).test.labels) == 3
    (tmp_path / "phone").mkdir()
    assert "has no images: make FOLDER/CLASS" in fault_of(tmp_path / "phone")
    (tmp_path / "phone" / "IMG_1.heic").write_bytes(b"x")
    assert "has no images (left out: 1 .heic)" in fault_of(tmp_path / "phone")
    assert "is not a folder, nor a .npz file that can be read: it is missing: make F" in fault_of(tmp_path / "nowhere")


def test_too_many_pictures_for_the_memory_are_refused_before_any_is_read(tmp_path: Path) -> None:
    part = (range(100_000), np.arange(100_000) % 2)
    source = Source([part], ("a", "b"), lambda *_: pytest.fail("has read one"), lambda item: 16)
    for side, channels in ((80, 1), (64, 3)):  # 2.4 and 4.6 GiB; the limit is 2
        with pytest.raises(OSError, match="take fewer with --n-train, or a smaller --image-size"):
            labelled_pictures.read_all(tmp_path, source, side, channels)
    assert labelled_pictures.MAX_BYTES >= 4 * 100_000 * 32 * 32 * 3


def test_fewer_pictures_are_of_each_class_the_same_share(tmp_path: Path) -> None:
    """Of the training: a test set is left as it is, and where there is none, a fifth of them becomes it."""
    names, counts, rng = ("a", "b", "c"), (400, 200, 40), np.random.default_rng
    train, test = (list(range(640)), np.repeat(range(3), counts)), (list(range(6)), np.arange(6) % 3)
    for n, expected in ((160, (100, 50, 10)), (16, (10, 5, 1)), (1, (1, 1, 1)), (10**9, counts)):
        (items, labels), rest = labelled_pictures.fewer(Source([train, test], names), n, rng(3)).parts
        assert tuple(np.bincount(labels)) == expected
        np.testing.assert_array_equal(labels, train[1][items])
        assert rest == test
        ((_, labels),) = labelled_pictures.fewer(Source([train], names), n, rng(3)).parts
        assert abs(len(labels) - min(640, max(6, n / 0.8))) <= 1
        assert min(np.bincount(labels)) >= 2
    chosen = [labelled_pictures.fewer(Source([train], names), 16, rng(seed)).parts[0][0] for seed in (3, 3, 4)]
    assert chosen[0] == chosen[1] != chosen[2]
    sets = read_sets(write_folder(tmp_path / "own", n=20), 20, 1, rng(0), n_train=24)
    assert (len(sets.train.labels), len(sets.test.labels)) == (24, 6)


# --- A .npz file ------------------------------------------------------------------------------------------------------


def arrays(n: int = 9, side: int = 20) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    y = np.arange(n) % 3
    return {"x_train": np.stack([picture(int(k), rng, side) for k in y]), "y_train": y}


def test_npz_of_any_numbers(tmp_path: Path) -> None:
    path, plain = tmp_path / "set.npz", arrays()
    grey, y = plain["x_train"][..., 0].astype(int), plain["y_train"]
    for x, tolerance in (
        (grey[..., None], 0), (8 * grey - 1000, 1), (grey / 127.5 - 1, 1), (grey // 17, 17), (grey > 127, 129),
        ((grey / 255 * (1.0000004 + 1e-8) - 1e-8).astype(np.float32), 1),  # as resizing leaves it
    ):
        np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y[:, None])
        sets = sets_of(path)
        assert sets.classes == ("0", "1", "2")
        read = sets.test.images[..., 0].astype(int)
        assert (read.min(), read.max()) == (0, 255), x.dtype
        np.testing.assert_allclose(read, grey, atol=tolerance, err_msg=str(x.dtype))
    np.savez(path, **plain, x_test=plain["x_train"], y_test=y)
    np.testing.assert_array_equal(sets_of(path, channels=3).test.images, plain["x_train"])
    for colour, weight in zip(np.eye(3), (29.9, 58.7, 11.4), strict=True):
        level = pictures.array_square(np.full((20, 20, 3), 100 * colour), 20, 1).pixels
        np.testing.assert_allclose(level, weight, atol=1e-3)


@pytest.mark.parametrize(("labels", "names", "classes"), [
    ([b"z", b"b", "猫".encode()], None, ("b", "z", "猫")),
    (["cafe\u0301", "b", "c"], None, ("b", "c", "caf\u00e9")),  # of two ways to write a letter the usual one
    ([5.0, 15.0, 25.0], [b"five", b"fifteen", b""], ("five", "fifteen", "(empty)")),
])
def test_npz_labels_and_their_names(
    labels: Any, names: Any, classes: tuple[str, ...], tmp_path: Path, capsys: Capture
) -> None:
    path, plain = tmp_path / "set.npz", arrays()
    given: dict[str, Any] = {} if names is None else {"classes": np.array(names)}
    np.savez(path, x_train=plain["x_train"], y_train=np.array(labels)[plain["y_train"]], x_val=0, y_val=0, **given)
    sets = sets_of(path)
    assert sets.classes == classes
    assert (np.bincount(sets.train.labels).tolist(), len(sets.test.labels)) == ([2, 2, 2], 3)
    assert capsys.readouterr().err == f"{path}: left out: the arrays x_val, y_val\n"


WRONG: list[tuple[dict[str, Any], str]] = [  # arrays in place of sound ones, or none, and what is said
    ({"y_train": None}, "no y_train"),
    ({"x_test": np.zeros((2, 20, 20), np.uint8)}, "no y_test"),
    ({"y_test": np.zeros(2, int)}, "no x_test"),
    ({"x_train": np.zeros((9, 20), np.uint8)}, "shape (9, 20) of uint8, not finite numbers (N, H, W) or"),
    ({"x_train": np.zeros((9, 20, 20, 4), np.uint8)}, "(N, H, W, 1 or 3)"),
    ({"x_train": np.zeros((0, 20, 20), np.uint8), "y_train": np.zeros(0, int)}, "shape"),
    *(({"x_train": np.full((9, 20, 20), value)}, "finite numbers") for value in (np.nan, 1e300, -1e300, "a")),
    ({"y_train": np.array(["a", "b", "c"] * 3, object)}, "save numbers, or texts with .astype(str)"),
    *(({"y_train": y}, "not a whole number or text for each image")
      for y in (np.zeros((9, 3), int), np.arange(8), np.linspace(0, 1, 9), np.array([0.0, 1.0, np.inf] * 3))),
    *(({"classes": np.array(names)}, "2 different names of classes, but 3") for names in (["a", "b"], ["a", "b", "a"])),
    ({"x_test": np.zeros((1, 20, 20), np.uint8), "y_test": np.array([7])}, "no training images of the class 7"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG)
def test_a_wrong_npz_is_one_line(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    np.savez(path, **{key: value for key, value in (arrays() | changes).items() if value is not None})
    assert words in fault_of(path)


def test_a_damaged_npz_and_other_files_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    np.savez(path, **arrays())
    whole = path.read_bytes()
    for content in (b"", whole[: len(whole) // 2], whole[:-40], b"\x93NUMPY"):
        path.write_bytes(content)
        assert f"{path} is not a folder, nor a .npz file that can be read: it is damaged, or of" in fault_of(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("cat/1.png", b"x")
    assert "it has no arrays: unzip it first: make FOLDER/CLASS/1.jpg" in fault_of(path)


# --- Files of MNIST's format ------------------------------------------------------------------------------------------


def test_files_of_mnists_format(tmp_path: Path, capsys: Capture) -> None:
    """With names, and in whichever folder. Forms of their names, EMNIST's images and faults: test_digit_files.py."""
    root = write_idx(tmp_path / "letters", [1, 2, 26])
    sets = sets_of(root)
    assert (sets.classes, sets.train.images.shape, bool(sets.test.names)) == (("1", "2", "26"), (18, 28, 28, 1), True)
    for encoding in ("utf-8", "utf-8-sig"):  # the second as Windows writes it
        (root / "classes.txt").write_text("A\nB\n\nŽ\n", encoding=encoding)
        assert sets_of(root).classes == ("A", "B", "Ž")
    raw = Path(shutil.copytree(root, tmp_path / "torch" / "MNIST" / "raw"))
    for path in raw.glob("*ubyte"):  # unpacked, and beside it packed
        path.with_name(f"{path.name}.gz").write_bytes(b"")
    assert sets_of(tmp_path / "torch").classes == ("A", "B", "Ž")
    np.testing.assert_array_equal(sets_of(tmp_path / "torch").train.images, sets.train.images)
    assert capsys.readouterr().err == ""
    for path in raw.glob("*ubyte"):  # in another folder, so another set
        path.rename(tmp_path / "torch" / path.name)
    assert "holds several sets, " in fault_of(tmp_path / "torch")
    (root / "mapping.txt").write_text("x")
    assert said_of(root, capsys) == f"{root}: left out beside the IDX files: 1 (mapping.txt)\n"
    (root / "classes.txt").write_text("A\nB\n")
    assert "2 different names of classes, but 3 different labels" in fault_of(root)
    images = root / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-1])
    assert "cannot reshape array of size 14111 into shape (18,28,28)" in fault_of(root)
