"""The smallNORB reader of smallnorb_novel_viewpoint.py: sets written here in the official format, damaged ones, and a
sample of the real one."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import smallnorb_novel_viewpoint as smallnorb
from data import norb_files as norb
from helpers import SMALLNORB, Array, Capture, Patch, config_of, failure, needs_smallnorb
from more import conv_matrix_capsules as conv


MAGIC = {"uint8": 0x1E3D4C55, "int32": 0x1E3D4C54, "float32": 0x1E3D4C51}
NAMES = {
    "training": "smallnorb-5x46789x9x18x6x2x96x96-training-{}.mat",
    "testing": "smallnorb-5x01235x9x18x6x2x96x96-testing-{}.mat",
}


class Arrays(NamedTuple):
    dat: Array  # (N, 2, 96, 96) uint8
    cat: Array  # (N,) int32
    info: Array  # (N, 4) int32: instance, elevation 0-8, azimuth 0-34 even, lighting


def encode(array: Array) -> bytes:
    """The official format: magic, number of dimensions, at least three sizes, data; all little-endian."""
    sizes = [*array.shape, *[1] * (3 - array.ndim)]
    head = struct.pack(f"<{2 + len(sizes)}i", MAGIC[array.dtype.name], array.ndim, *sizes)
    return head + array.astype(array.dtype.newbyteorder("<")).tobytes()


def make_arrays(subset: str, n: int, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    instances = [4, 6, 7, 8, 9] if subset == "training" else [0, 1, 2, 3, 5]
    info = [rng.choice(instances, n), rng.integers(0, 9, n), 2 * rng.integers(0, 18, n), rng.integers(0, 6, n)]
    pairs = rng.integers(0, 256, (n, 2, 96, 96), dtype=np.uint8)
    return Arrays(pairs, (np.arange(n) % 5).astype(np.int32), np.stack(info, axis=1).astype(np.int32))


def write_set(folder: Path, subset: str, arrays: Arrays, ending: str = ".gz", packed: bool = True) -> None:
    for part, array in arrays._asdict().items():
        content = gzip.compress(encode(array), 1) if packed else encode(array)
        (folder / (NAMES[subset].format(part) + ending)).write_bytes(content)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Both sets, 20 pairs each."""
    write_set(tmp_path, "training", make_arrays("training", 20))
    write_set(tmp_path, "testing", make_arrays("testing", 20, seed=1))
    return tmp_path


# --- Sound files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ending", "packed"), [(".gz", True), ("", False), (".gz", False), ("", True)])
@pytest.mark.parametrize("subset", ["training", "testing"])
def test_a_set_is_read_as_it_was_written(subset: str, ending: str, packed: bool, tmp_path: Path) -> None:
    """Gzipped or not by its content: a browser may unpack a file and keep its name, or the reverse."""
    arrays = make_arrays(subset, 300)  # more than a chunk
    assert norb.NORB_CHUNK < 300
    write_set(tmp_path, subset, arrays, ending, packed)
    split = smallnorb.read_smallnorb(tmp_path, (subset, None))
    np.testing.assert_array_equal(split.labels, arrays.cat)
    np.testing.assert_array_equal(split.elevations, 30 + 5 * arrays.info[:, 1])
    np.testing.assert_array_equal(split.azimuths, 10 * arrays.info[:, 2])
    np.testing.assert_array_equal(split.objects, 6 * arrays.info[:, 0] + arrays.info[:, 3])
    np.testing.assert_array_equal(split.images, smallnorb.standardized(norb.shrink(arrays.dat)))
    assert split.images.shape == (300, 48, 48, 2)
    some = smallnorb.read_smallnorb(tmp_path, (subset, None), azimuth_range=(0, 100))
    np.testing.assert_array_equal(some.images, split.images[split.azimuths <= 100])


def test_splits_are_the_papers(tmp_path: Path) -> None:
    """Azimuth: 300, 320, 340, 0, 20, 40 against 60 to 280; elevation: the three lowest against the six higher."""
    views = np.array(list(itertools.product(range(9), range(0, 36, 2))), np.int32)  # every elevation and azimuth
    for subset in ("training", "testing"):
        arrays = make_arrays(subset, len(views))
        arrays.info[:, 1:3] = views
        write_set(tmp_path, subset, arrays)

    def angles(flags: str) -> list[tuple[set[int], set[int]]]:
        config = config_of(smallnorb, f"--dataset smallnorb --data-dir {tmp_path} {flags}".split())
        return [(set(split.azimuths.tolist()), set(split.elevations.tolist())) for split in smallnorb.make_data(config)]

    everywhere, around = set(range(30, 71, 5)), set(range(0, 360, 20))
    trained, low = {300, 320, 340, 0, 20, 40}, {30, 35, 40}
    assert angles("") == [(trained, everywhere)] * 2 + [(around - trained, everywhere)]
    elevations = angles("--train-elevations 30:40 --test-elevations 45:70")
    assert elevations == [(around, low)] * 2 + [(around, everywhere - low)]


ALL_VIEWS: dict[str, Any] = {
    "dataset": "smallnorb", "standardize": "image", "train_azimuths": (0, 170), "test_azimuths": (180, 350),
    "train_elevations": (30, 70), "test_elevations": (30, 70),
}


def content(*images: Array) -> set[bytes]:
    return {image.tobytes() for of_set in images for image in of_set}


def test_familiar_and_held_out_views_show_other_objects(folder: Path) -> None:
    config = smallnorb.Config(data_dir=folder, **ALL_VIEWS)
    data = smallnorb.load_smallnorb(config)
    raw = smallnorb.load_smallnorb(dataclasses.replace(config, standardize="none"))
    training, testing = (content(smallnorb.read_smallnorb(folder, (subset, None)).images) for subset in NAMES)
    assert content(data.train.images) <= training
    assert content(data.familiar.images, data.held_out.images) == testing
    assert not training & testing
    for split, standard in zip(raw, data, strict=True):
        assert 0 <= split.images.min() <= split.images.max() <= 1
        np.testing.assert_allclose(smallnorb.standardized(split.images), standard.images, atol=1e-3)
    with pytest.raises(OSError, match=r"^no smallNORB image in \S+ falls into the ranges .* and -90:90 of azimuths"):
        smallnorb.read_smallnorb(folder, ("training", None), azimuth_range=(1, 2))


@pytest.mark.parametrize("held_out", ["viewpoints", "nothing"])
def test_settings_are_chosen_on_other_objects(folder: Path, held_out: str) -> None:
    """Those of the training half, so that no test object is seen before the report."""
    objects = np.concatenate(list(norb.stream_norb(norb.norb_path(folder, "training", "info"), "info")))[:, 0]
    held = np.isin(objects, np.unique(objects)[-2:])
    images = smallnorb.read_smallnorb(folder, ("training", None)).images
    views = ALL_VIEWS if held_out == "viewpoints" else {"dataset": "smallnorb"}
    config = conv.Config(data_dir=folder, held_out=held_out, n_val_objects=2, **views)
    train, *tests = (split.images for split in conv.make_data(config) if isinstance(split, conv.Examples))
    assert set() < content(train) <= content(images[~held])
    assert content(*tests) == content(images[held])


@pytest.mark.parametrize("standardize", ["image", "none"])
def test_all_views_are_standardized_or_not_as_asked(standardize: str, folder: Path) -> None:
    config = conv.Config(dataset="smallnorb", data_dir=folder, held_out="nothing", standardize=standardize)
    expected = smallnorb.read_smallnorb(folder, ("training", None), standardize).images
    np.testing.assert_array_equal(conv.make_data(config).train.images, expected)


# --- Damaged sets, each of which breaks a sound one in one way --------------------------------------------------------


def sound(part: str, subset: str = "training") -> bytes:
    return encode(getattr(make_arrays(subset, 20), part))


INFO = make_arrays("training", 20).info
OTHER_HEADER = "its header is that of another file"
FAULTS: list[tuple[str, bytes | None, str]] = [  # a file of the training set, its content, and what the line has to say
    ("dat", struct.pack("<i", 0x12345678) + sound("dat")[4:], OTHER_HEADER),
    ("dat", sound("dat")[:-1000], "it ends early"),
    ("dat", sound("dat") + b"\0", "it goes on after its last item"),
    ("dat", sound("cat"), OTHER_HEADER),
    ("dat", encode(np.zeros((20, 2, 48, 48), np.uint8)), OTHER_HEADER),
    ("dat", encode(make_arrays("training", 21).dat), "it has 21 items, and the file of its labels 20"),
    ("dat", gzip.compress(sound("dat"), 1)[:-2000], "is no sound file of smallNORB: "),
    ("dat", sound("dat")[:9], OTHER_HEADER),
    ("dat", gzip.compress(sound("dat"), 1)[:-8] + bytes(8), "is no sound file of smallNORB: CRC check failed"),
    ("dat", b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 99, "is no sound file of smallNORB: Error -3"),
    ("cat", encode(make_arrays("training", 19).cat), "it has 20 items, and the file of its labels 19"),
    ("cat", encode(make_arrays("training", 20).cat + np.int32(1)), "cat.mat.gz or "),
    ("cat", struct.pack("<5i", MAGIC["int32"], 1, 24_301, 1, 1) + bytes(400), OTHER_HEADER),
    ("info", sound("info", "testing"), "or the training files are those of the other set"),
    ("info", encode((INFO * [1, 0, 1, 1] + [0, 9, 0, 0]).astype(np.int32)), "is damaged"),
    ("info", encode(INFO + np.array([0, 0, 1, 0], np.int32)), "is damaged"),
    ("info", encode((INFO * [1, 1, 1, 0] + [0, 0, 0, 6]).astype(np.int32)), "is damaged"),
    ("info", None, "has no smallnorb-5x46789x9x18x6x2x96x96-training-info.mat"),
]
FLAGS = "--dataset smallnorb --n-epochs 1 --train-azimuths 0:170 --test-azimuths 180:350 --data-dir"


@pytest.mark.parametrize(("part", "content", "says"), FAULTS, ids=[says for *_, says in FAULTS])
def test_a_fault_is_one_line_and_status_1(
    part: str, content: bytes | None, says: str, folder: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(smallnorb, "train_all", lambda *_, **__: pytest.fail("trained on a damaged set"))
    path = folder / (NAMES["training"].format(part) + ".gz")
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    error = failure(smallnorb, [*FLAGS.split(), str(folder)], capsys)
    assert says in error
    assert str(folder) in error


@pytest.mark.parametrize("script", [smallnorb, conv])
def test_the_sound_set_of_the_fault_tests_is_accepted(script: Any, folder: Path, capsys: Capture) -> None:
    assert script.main([*FLAGS.split(), str(folder), "--quiet"]) == 0
    out, error = capsys.readouterr()
    assert "smallnorb: azimuths 180:350 held out, 0:170 trained on" in out
    assert error == ""


# --- Twelve real pairs ------------------------------------------------------------------------------------------------


@needs_smallnorb
@pytest.mark.parametrize("subset", NAMES)
def test_the_real_files_hold_what_the_format_says(subset: str) -> None:
    split = smallnorb.read_smallnorb(SMALLNORB, (subset, None))
    assert len(split.labels) >= 6
    assert set(split.labels.tolist()) == set(range(5))
    raw = gzip.decompress((SMALLNORB / (NAMES[subset].format("info") + ".gz")).read_bytes())
    info = np.frombuffer(raw, "<i4", offset=20).reshape(-1, 4)
    np.testing.assert_array_equal(split.elevations, 30 + 5 * info[:, 1])
    np.testing.assert_array_equal(split.azimuths, 10 * info[:, 2])
    np.testing.assert_allclose(split.images.mean(axis=(1, 2)), 0, atol=1e-4)
    np.testing.assert_allclose(split.images.std(axis=(1, 2)), 1, atol=1e-3)
    for image in split.images:  # a real stereo pair: the eyes differ, and yet they see much the same
        assert 0.3 < np.corrcoef(image[..., 0].ravel(), image[..., 1].ravel())[0, 1] < 0.99999
