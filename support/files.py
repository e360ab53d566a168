"""Files are written whole or not at all, never over an input, and a run that was killed leaves none behind for long."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import platform
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
HOST = hashlib.sha256(platform.node().encode()).hexdigest()[:8]  # whose process numbers are those of a temporary file
TEMPORARY = re.compile(rf"\..+\.{HOST}-(\d+)\.tmp")
CACHE_DIR = "~/.cache/hinton-mnist"  # of the data sets that are downloaded, or drawn once
WRITTEN = {".json", ".npz", ".png", ".gif"}  # what the scripts write is no data


class UserError(Exception):
    """Something that the person at the keyboard can put right; its message is one line."""


# ----------------------------------------------------------------------------------------------------------------------
# Writing
# ----------------------------------------------------------------------------------------------------------------------


def temporary_path(path: Path) -> Path:
    """A name beside ``path``, hidden and of bounded length, that says which process it is of. What killed processes
    left beside it goes."""
    remove_abandoned(path.parent)
    return path.with_name(f".{path.name[:50]}.{HOST}-{os.getpid()}.tmp")


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # it is another user's
        return True
    return True


def remove_abandoned(folder: Path) -> None:
    """Remove the temporary files of processes of this machine that were killed while they wrote into the folder."""
    if os.name != "posix":  # elsewhere a process cannot be asked for without ending it
        return
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            owner = TEMPORARY.fullmatch(path.name)
            if owner and not is_running(int(owner[1])):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


@contextlib.contextmanager
def folder_made(folder: Path, keep: bool) -> Iterator[None]:
    """Make a folder and those above it. They go again, as far as they are empty, after an error or without ``keep``."""
    missing = list(itertools.takewhile(lambda path: not os.path.lexists(path), (folder, *folder.parents)))
    kept = False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
        kept = keep
    finally:
        for path in () if kept else missing:
            with contextlib.suppress(OSError):
                path.rmdir()


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that takes the place of ``path``, or of the file that this links to, once all is written.
    Makes the folder. Raises UserError on failure."""
    try:
        target = Path(os.path.realpath(path))
        with folder_made(target.parent, keep=True):
            temporary = temporary_path(target)
            try:
                with temporary.open("wb") as stream:
                    yield stream
                    stream.flush()
                    os.fsync(stream.fileno())
                temporary.replace(target)
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def require_writable(*paths: Path | None) -> None:
    """Find out before a training that a file cannot be written there. Leaves no folder behind."""
    for path in paths:
        if path is None:
            continue
        try:
            target = Path(os.path.realpath(path))
            with folder_made(target.parent, keep=False):
                with contextlib.suppress(FileNotFoundError):
                    mode = path.stat().st_mode  # fails too where the name is too long
                    if not stat.S_ISREG(mode):
                        kind = "a folder" if stat.S_ISDIR(mode) else "no regular file"
                        raise UserError(f"cannot write {path}: it is {kind}")
                temporary = temporary_path(target)
                temporary.touch()
                temporary.unlink()
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """An empty folder, that of the system or ``parent`` above it. It goes at the end; where the process is killed, when
    the next one is made there."""
    parent = parent or Path(tempfile.gettempdir())
    folder = temporary_path(parent / f"run-{secrets.token_hex(6)}")
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
