"""Files are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
CACHE_DIR = "~/.cache/hinton-mnist"  # of the data sets that are downloaded, or drawn once


class UserError(Exception):
    """Something that the person at the keyboard can put right; its message is one line."""


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a file ``.NAME.tmp`` beside ``path`` that takes its place once all is written, so that what is there is
    whole at any time. Makes the folder. Raises UserError where that fails."""
    with told_as(f"cannot write {path}"):
        target, temporary = beside(path)
        try:
            with temporary.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


def require_writable(*paths: Path) -> None:
    """Find out before a training that a file cannot be written there."""
    for path in paths:
        with told_as(f"cannot write {path}"):
            temporary = beside(path)[1]
            temporary.touch()
            temporary.unlink()


@contextlib.contextmanager
def told_as(what: str) -> Iterator[None]:
    """Makes a UserError of an OSError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}") from error


def beside(path: Path) -> tuple[Path, Path]:
    """The file that a path names, by links too, and the one that is written first."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise OSError("it is no regular file")  # such as /dev/null, which would be replaced
    target.parent.mkdir(parents=True, exist_ok=True)
    return target, target.with_name(f".{target.name}.tmp")
