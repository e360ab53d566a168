"""Files are written whole or not at all, and never over an input."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
CACHE_DIR = "~/.cache/hinton-mnist"  # of the data sets that are downloaded, or drawn once
WRITTEN = {".json", ".npz", ".png", ".gif"}  # what the scripts write is no data


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


def require_writable(*paths: Path | None) -> None:
    """Find out before a training that a file cannot be written there."""
    for path in paths:
        if path is not None:
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


@contextlib.contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """An empty folder, that of the system or ``parent`` above it, which goes at the end."""
    with tempfile.TemporaryDirectory(prefix=".run-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


# ----------------------------------------------------------------------------------------------------------------------
# Outputs against inputs
# ----------------------------------------------------------------------------------------------------------------------


def same_file(a: Path, b: Path) -> bool:
    """Whether two paths are of the same file, by symbolic and by hard links too; neither needs to exist."""
    with contextlib.suppress(OSError, ValueError):
        found = os.path.exists(a), os.path.exists(b)
        if all(found):
            return os.path.samefile(a, b)
        return not any(found) and os.path.realpath(a) == os.path.realpath(b)
    return False


def data_files(*folders: Path, pictures: bool = False) -> list[Path]:
    """The files in folders of data, and in the folders in these; those that the scripts write are none, unless they are
    ``pictures`` in a folder of a class. A file instead of a folder stands for itself."""
    found = []
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):
            if folder.is_file():
                found.append(folder)
                continue
            for path in (*folder.iterdir(), *folder.glob("*/*"), *(folder.glob("*/*/*") if pictures else ())):
                is_picture = pictures and path.parent != folder and path.suffix.lower() in (".png", ".gif")
                if (is_picture or path.suffix.lower() not in WRITTEN) and path.is_file():
                    found.append(path)
    return found


def project_files() -> list[Path]:
    """The code and the pages of this project."""
    patterns = ("*.py", "*/*.py", "*.md", "docs/*.md", "*.t*", "support/explorer/*", "LICENSE", "*.cff", ".ci/run")
    return [path for pattern in patterns for path in ROOT.glob(pattern)]


def overwriting(outputs: Mapping[str, Path], inputs: Iterable[tuple[str, Path]]) -> str | None:
    """A message if an output would replace an input or another output, else None. ``outputs``: paths by flag;
    ``inputs``: what each is, and its path."""
    for (flag, path), (other, same) in itertools.combinations(outputs.items(), 2):
        if same_file(path, same):
            return f"argument {flag}: is the same file as {other}"
    known = [*inputs, *(("a file of this project", path) for path in project_files())]
    for flag, path in outputs.items():
        for what, used in known:
            if same_file(path, used):
                return f"argument {flag}: would overwrite {used}, {what}"
    return None
