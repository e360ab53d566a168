"""The smallNORB files: a header, then the items one after the other, little-endian. Read a chunk at a time."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, cast

import numpy as np

from data.files import UserError, expanded, one_line

Array = np.ndarray

NORB_SETS = {"training": "5x46789", "testing": "5x01235"}  # the digits are the object instances of each set
NORB_PARTS: dict[str, tuple[int, str, tuple[int, ...]]] = {  # magic number, type and shape of an item
    "dat": (0x1E3D4C55, "u1", (2, 96, 96)), "cat": (0x1E3D4C54, "<i4", ()), "info": (0x1E3D4C54, "<i4", (4,)),
}
NORB_CHUNK = 256  # stereo pairs decoded at a time
NORB_ITEMS = 24_300  # of an official set; a file that claims more is not believed


def file_name(subset: str, part: str) -> str:
    """The official name of a file: ``subset`` is "training" or "testing", ``part`` dat, cat or info."""
    return f"smallnorb-{NORB_SETS[subset]}x9x18x6x2x96x96-{subset}-{part}.mat"


def norb_path(data_dir: Path, subset: str, part: str) -> Path:
    """One file, gzipped or not. Raises UserError where neither is there."""
    name, folder = file_name(subset, part), expanded(data_dir)
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise UserError(f"{data_dir} has no {name}[.gz]; --data-dir must hold the six official smallNORB files")


def norb_header(part: str, n_items: int) -> bytes:
    """Magic number, number of dimensions, and at least three sizes, all little-endian int32."""
    magic, _, shape = NORB_PARTS[part]
    sizes = (n_items, *shape)
    return np.array([magic, len(sizes), *sizes, *[1] * (3 - len(sizes))], "<i4").tobytes()


def stream_norb(path: Path, part: str, n_items: int | None = None) -> Iterator[Array]:
    """Yield the file's items a chunk at a time, so that no more than a chunk is ever decoded. It is gzipped or not by
    its content: a browser may have unpacked it and kept its name. Raises UserError where it is another file, has not
    ``n_items``, or is damaged."""
    _, dtype, shape = NORB_PARTS[part]
    item_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    try:
        with path.open("rb") as plain:
            is_gzipped = plain.peek(2)[:2] == b"\x1f\x8b"
            stream = cast(IO[bytes], gzip.GzipFile(fileobj=plain) if is_gzipped else plain)
            header = stream.read(len(norb_header(part, 0)))
            n = int.from_bytes(header[8:12], "little")
            if not 0 < n <= NORB_ITEMS or header != norb_header(part, n):
                raise ValueError("its header is that of another file")
            if n_items not in (None, n):
                raise ValueError(f"it has {n:,} items, and the file of its labels {n_items:,}")
            for start in range(0, n, NORB_CHUNK):
                size = min(NORB_CHUNK, n - start)
                raw = stream.read(size * item_bytes)
                if len(raw) < size * item_bytes:
                    raise ValueError("it ends early")
                yield np.frombuffer(raw, dtype).reshape(size, *shape)
            if stream.read(1):
                raise ValueError("it goes on after its last item")
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise UserError(f"{path} is no sound file of smallNORB: {one_line(error)}; fetch it again") from error


def read_norb(data_dir: Path, subset: str) -> tuple[Array, Array, Iterator[Array]]:
    """Classes (N,) and views (N, 4) of an official set ("training" or "testing"): instance, elevation, azimuth and
    lighting, as numbers of the files; and its stereo pairs, in chunks (n, 2, 96, 96) uint8. Raises UserError for a file
    that is missing, damaged or swapped, the chunks for theirs."""
    dat, cat, info = (norb_path(data_dir, subset, part) for part in NORB_PARTS)
    labels = np.concatenate(list(stream_norb(cat, "cat")))
    views = np.concatenate(list(stream_norb(info, "info", len(labels))))
    known = range(5), [int(digit) for digit in NORB_SETS[subset][2:]], range(9), range(0, 36, 2), range(6)
    if not all(np.isin(column, those).all() for column, those in zip((labels, *views.T), known, strict=True)):
        raise UserError(f"{cat} or {info} is damaged, or the {subset} files are those of the other set: fetch both")
    return labels, views, stream_norb(dat, "dat", len(labels))


Keep = Callable[[Array, Array], Array]  # azimuths and elevations (N,), in degrees -> which pairs are wanted (N,)


def read_views(
    data_dir: Path, subset: str, objects: Sequence[int] | None, keep: Keep
) -> tuple[Array, Array, Array, Array, Array]:
    """The wanted pairs of an official set, of the ``objects`` of each class that are named by their instance numbers
    (None: all): images (N, 48, 48, 2), 2x2 means of 0 to 255; classes (N,); azimuths and elevations (N,) in degrees;
    and (N,) which object of its class in which lighting, as one number."""
    labels, views, chunks = read_norb(data_dir, subset)  # views: instance, elevation, azimuth, lighting
    elevations, azimuths = 30.0 + 5.0 * views[:, 1], 10.0 * views[:, 2]
    wanted = keep(azimuths, elevations)
    if objects is not None:
        wanted &= np.isin(views[:, 0], objects)
    images, start = [], 0
    for pairs in chunks:
        images.append(shrink(pairs[wanted[start : start + len(pairs)]]))
        start += len(pairs)
    lit_objects = 6 * views[wanted, 0] + views[wanted, 3]
    return np.concatenate(images), labels[wanted].astype(np.intp), azimuths[wanted], elevations[wanted], lit_objects


def shrink(pairs: Array) -> Array:
    """Stereo pairs (N, 2, 96, 96) uint8 -> (N, 48, 48, 2) float32, 2x2 means. [Hinton 2018, sec. 5]"""
    n, eyes, height, width = pairs.shape
    small = pairs.reshape(n, eyes, height // 2, 2, width // 2, 2).mean(axis=(3, 5), dtype=np.float32)
    return np.ascontiguousarray(small.transpose(0, 2, 3, 1))
