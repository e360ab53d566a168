"""The files of MNIST: where they lie in a folder, and their bytes."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path

import numpy as np

from support.console import one_line
from support.files import UserError

Array = np.ndarray

MAX_EXAMPLES = 1_000_000  # a header that claims more is refused


def read_idx(path: Path, ndim: int) -> Array:
    """Read one MNIST file, plain or gzipped (told by content, not by name).

    ndim 3: images (N, 28, 28); ndim 1: labels (N,). uint8 both. Raises UserError naming the file when it is
    anything else. Memory follows the bytes that the file really holds, never what its header claims.
    """

    def fault(what: str) -> UserError:
        return UserError(f"{path} {what}: replace it with an intact MNIST file")

    data = bytearray()
    try:
        with path.open("rb") as raw:
            gzipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            with gzip.GzipFile(fileobj=raw) if gzipped else raw as file:
                header = file.read(4 + 4 * ndim)
                if len(header) < 4 + 4 * ndim:
                    raise fault("is cut short in its header")
                if header[:4] != bytes((0, 0, 8, ndim)):  # 8: unsigned byte
                    raise fault(f"is no IDX file of {ndim}-D uint8 (magic {header[:4].hex()})")
                shape = tuple(np.frombuffer(header, ">u4", offset=4).tolist())
                if shape[1:] != (28, 28)[: ndim - 1] or not 0 < shape[0] <= MAX_EXAMPLES:
                    raise fault(f"has the shape {shape}")
                size = shape[0] * 28 ** (ndim - 1)
                # One byte more than wanted shows trailing bytes and makes gzip check its CRC.
                while chunk := file.read(min(1 << 16, size + 1 - len(data))):
                    data += chunk
    except (OSError, EOFError, zlib.error) as error:
        raise fault(f"cannot be read ({one_line(error)})") from error
    if len(data) != size:
        kind = "is truncated" if len(data) < size else "has trailing bytes"
        raise fault(f"{kind} ({size} bytes of data expected)")
    return np.frombuffer(data, np.uint8).reshape(shape)


def find_mnist_file(folder: Path, stem: str) -> Path | None:
    """The file of that name in the folder, gzipped or not, with either usual spelling; None if there is none."""
    stems = (stem, stem.replace("-idx", ".idx"))
    return next((p for s in stems for p in (folder / f"{s}.gz", folder / s) if os.path.isfile(p)), None)
