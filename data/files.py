"""What the readers and makers of data share: where data lie, errors in a line, and files that are written whole."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any


class UserError(OSError):
    """Something that the person at the keyboard can put right; its message is one line. Not the class of that name of a
    base script: OSError is all of them."""


def one_line(error: object, limit: int = 200) -> str:
    """An error's message, or any other text, on one line; a long one is cut in its middle."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-(limit // 2 - 1) :]}"


@contextlib.contextmanager
def told_as(what: str) -> Iterator[None]:
    """Makes a UserError of an OSError."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}") from error


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a file ``.NAME.PID.tmp`` beside ``path`` that takes its place once all is written. Makes the folder. Raises
    UserError where that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with told_as(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


CLEAR = "\r\x1b[K"  # the line of a terminal


@functools.cache
def obeys_escapes() -> bool:
    """IDLE's shell does not obey CLEAR. A console of Windows does once a command has run in it."""
    if os.name == "nt":
        os.system("")
    return "idlelib.run" not in sys.modules


def is_terminal() -> bool:
    """Whether stderr shows a bar that moves."""
    return bool(sys.stderr and sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and obeys_escapes())


def print_message(text: str, end: str = "\n") -> None:
    """Print to stderr, if there is one that can be written to; in place of a bar."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"{CLEAR * is_terminal()}{text}", end=end, file=sys.stderr, flush=True)


def with_progress(items: Sequence[Any], what: str, quiet: bool = False) -> Iterator[Any]:
    """The items, counted on a terminal."""
    shown = not quiet and is_terminal()
    for k, item in enumerate(items):
        if shown:
            print_message(f"{what} {k + 1:,} of {len(items):,}", end="")
        yield item
    if shown:
        print_message("", end="")


def expanded(path: str | Path) -> Path:
    """A path with the home folder in place of ~; where there is none, the path as it is, which is not found."""
    return Path(os.path.expanduser(path))


def cache_folder() -> Path:
    """The folder of what is downloaded or drawn once: that of the variable CAPSULES_CACHE, or hinton-mnist in that of
    XDG_CACHE_HOME or in ~/.cache. Raises OSError where a process has none of the three."""
    if own := os.environ.get("CAPSULES_CACHE"):
        return expanded(own)
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))  # by its standard, one that is no whole path does not count
    caches = caches if caches.is_absolute() else expanded("~/.cache")
    if not caches.is_absolute():
        raise OSError("there is no home folder for a cache: let the variable CAPSULES_CACHE name a folder")
    return caches / "hinton-mnist"


def read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"cannot read {path}: it is not text in UTF-8") from None
