"""The smallNORB files: a header, then the items one after the other, little-endian. Read a chunk at a time."""

from __future__ import annotations

import contextlib
import gzip
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from support.files import UserError

Array = np.ndarray

NORB_DTYPES: dict[int, np.dtype[Any]] = {
    0x1E3D4C55: np.dtype("u1"), 0x1E3D4C54: np.dtype("<i4"), 0x1E3D4C51: np.dtype("<f4"),
    0x1E3D4C53: np.dtype("<f8"), 0x1E3D4C56: np.dtype("<i2"),
}  # fmt: skip
NORB_SETS = {"training": "5x46789", "testing": "5x01235"}  # the digits are the object instances of each set
NORB_CHUNK = 256  # stereo pairs decoded at a time
NORB_ITEMS = 24_300  # of an official set; a file that claims more is not believed
NORB_CLASSES = 5


def file_name(subset: str, part: str) -> str:
    """The official name of a file: ``subset`` is "training" or "testing", ``part`` dat, cat or info."""
    return f"smallnorb-{NORB_SETS[subset]}x9x18x6x2x96x96-{subset}-{part}.mat"


def norb_path(data_dir: Path, subset: str, part: str) -> Path:
    """One file, gzipped or not. Raises UserError where neither is there."""
    name = file_name(subset, part)
    with contextlib.suppress(OSError):  # a folder without permission, a name that is too long
        for path in (data_dir / name, data_dir / f"{name}.gz"):
            if path.is_file():
                return path
        if (data_dir / f"{name}.zip").is_file():
            raise UserError(f"{data_dir / name}.zip: unzip it first")
    raise UserError(f"{data_dir} has no {name}[.gz]; --data-dir must hold the six official smallNORB files")


def is_gzipped(stream: IO[bytes], path: Path) -> bool:
    """By its content: a browser may have unpacked a file and kept its name. Raises UserError for an archive and for
    MATLAB's files, which smallNORB's are not although they are called .mat."""
    head = stream.read(10)
    stream.seek(0)
    if head[:4] == b"PK\x03\x04":
        raise UserError(f"{path} is a .zip archive: unzip it first")
    if head[:6] == b"MATLAB" or head[:4] == b"\x89HDF":
        raise UserError(f"{path} is a file of MATLAB and not an official one of smallNORB; fetch it again")
    return head[:2] == b"\x1f\x8b"


def read_norb_header(stream: IO[bytes], path: Path) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Element type and sizes: magic, number of dimensions, then at least three sizes, all little-endian int32."""

    def words(n: int) -> list[int]:
        raw = stream.read(4 * n)
        if len(raw) != 4 * n:
            raise UserError(f"{path} is truncated inside its header; fetch it again")
        return [int(w) for w in np.frombuffer(raw, "<i4")]

    magic, n_dims = words(2)
    if magic not in NORB_DTYPES:
        raise UserError(f"{path} is not a smallNORB file: its magic number is 0x{magic & 0xFFFFFFFF:08X}")
    if not 1 <= n_dims <= 4:
        raise UserError(f"{path} is not a smallNORB file: it claims {n_dims} dimensions")
    sizes = words(max(3, n_dims))[:n_dims]
    if min(sizes) < 1:
        raise UserError(f"{path} is not a smallNORB file: it claims the sizes {sizes}")
    return NORB_DTYPES[magic], tuple(sizes)


def stream_norb(path: Path, dtype: np.dtype, item_shape: tuple[int, ...]) -> Iterator[Array]:
    """Yield the file's items a chunk at a time, so that no more than a chunk is ever decoded.

    Raises UserError where the element type or the item shape is not the expected one, where the file ends early, or
    goes on after its last item.
    """
    try:
        with path.open("rb") as plain, gzip.GzipFile(fileobj=plain) if is_gzipped(plain, path) else plain as opened:
            stream = cast(IO[bytes], opened)
            found, sizes = read_norb_header(stream, path)
            if found != dtype or sizes[1:] != item_shape:
                raise UserError(
                    f"{path} holds {found} items of shape {sizes[1:]}, not {dtype} {item_shape}: are files swapped?"
                )
            if sizes[0] > NORB_ITEMS:
                raise UserError(
                    f"{path} claims {sizes[0]:,} items; an official file has {NORB_ITEMS:,}: fetch it again"
                )
            item_bytes = math.prod(sizes[1:]) * dtype.itemsize
            for start in range(0, sizes[0], NORB_CHUNK):
                n = min(NORB_CHUNK, sizes[0] - start)
                raw = stream.read(n * item_bytes)
                if len(raw) != n * item_bytes:
                    raise UserError(f"{path} is truncated: item {start + len(raw) // item_bytes} of {sizes[0]} is cut")
                yield np.frombuffer(raw, dtype).reshape(n, *sizes[1:])
            if stream.read(1):
                raise UserError(f"{path} is longer than its header says; fetch it again")
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}); fetch it again") from error


def read_norb_labels(data_dir: Path, subset: str) -> tuple[Array, Array]:
    """Classes (N,) and views (N, 4) of an official set ("training" or "testing"): instance, elevation, azimuth and
    lighting, as numbers of the files. Raises UserError for a file that is missing, damaged or swapped."""
    cat, info = (norb_path(data_dir, subset, part) for part in ("cat", "info"))
    labels = np.concatenate(list(stream_norb(cat, np.dtype("<i4"), ())))
    views = np.concatenate(list(stream_norb(info, np.dtype("<i4"), (4,))))
    if len(labels) != len(views):
        raise UserError(f"{cat} has {len(labels)} items but {info} has {len(views)}: they are not of one set")
    if labels.min() < 0 or labels.max() >= NORB_CLASSES:
        raise UserError(f"{cat} holds a class outside 0 to {NORB_CLASSES - 1}")
    if not set(views[:, 0].tolist()) <= {int(digit) for digit in NORB_SETS[subset][2:]}:
        raise UserError(f"{info} holds objects of the other set: training and testing files are swapped")
    if ((views[:, 1:3] < 0) | (views[:, 1:3] > (8, 34))).any():
        raise UserError(f"{info} holds an elevation outside 0 to 8 or an azimuth outside 0 to 34; fetch it again")
    return labels, views


def stream_norb_pairs(data_dir: Path, subset: str, n_labels: int) -> Iterator[tuple[int, Array]]:
    """Chunks (n, 2, 96, 96) uint8 of the set's stereo pairs, each with the number of pairs before it. Raises UserError
    where there are not ``n_labels`` pairs."""
    dat, seen = norb_path(data_dir, subset, "dat"), 0
    for pairs in stream_norb(dat, np.dtype("u1"), (2, 96, 96)):
        if seen + len(pairs) > n_labels:
            raise UserError(f"{dat} has more images than there are labels, {n_labels}: the files are not of one set")
        yield seen, pairs
        seen += len(pairs)
    if seen != n_labels:
        raise UserError(f"{dat} has {seen} images but there are {n_labels} labels: the files are not of one set")
