"""What is written: files, whole or not at all, and on stderr messages and progress bars."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

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


def one_line(error: object, limit: int = 200) -> str:
    """An error's message, or any other text, on one line; a long one is cut in its middle."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-(limit // 2 - 1) :]}"


def print_message(text: str) -> None:
    """Print to stderr, if there is one that can be written to."""
    if sys.stderr is not None:  # print would take stdout instead
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError:
            discard(sys.stderr)


def discard(stream: IO[str]) -> None:
    """From here on nothing is written to where a stream goes: Python would try again at its end, and end in 120."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def shows_progress(quiet: bool = False) -> bool:
    """Whether a progress bar is wanted and somebody sees it."""
    return not quiet and sys.stderr is not None and sys.stderr.isatty()


def progress_bar(items: Any = None, quiet: bool = False, **options: Any) -> Any:
    """A bar of ``tqdm``, which vanishes at its end."""
    return tqdm(items, leave=False, disable=not shows_progress(quiet), **options)


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""
