"""Results: what a run writes, on which machine it ran, by which command and at which commit."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from data.files import read_text
from smallnorb_novel_viewpoint import UserError, print_message, write_file
from support.experiment import ROOT

try:
    from fast.workers import blas_name, n_processors
except ImportError:  # without fast/ nobody asks the BLAS
    def blas_name() -> str:
        return ""

    def n_processors() -> int:
        return os.cpu_count() or 1


def git(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What git says, as UTF-8 whatever the locale is; names of files may be of any bytes."""
    command = ["git", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, encoding="utf-8", errors="replace", check=False)


def is_git_root(folder: Path) -> bool:
    """Whether a folder is the root of its repository, and no part of another one that it was unpacked in."""
    found = shutil.which("git") and git("rev-parse", "--show-toplevel", cwd=folder).stdout.strip()
    with contextlib.suppress(OSError):  # a path as Cygwin's git writes it, or of bytes that are not UTF-8
        return bool(found) and Path(str(found)).samefile(folder)
    return False


@functools.cache
def git_commit(*others: str) -> str | None:
    """The commit of this code, with "-dirty" where a Python file, or one of ``others``, is changed or new; None outside
    of a repository of its own."""
    if not is_git_root(ROOT) or not (commit := git("rev-parse", "HEAD", cwd=ROOT).stdout.strip()):
        if shutil.which("git") and "safe.directory" in git("rev-parse", "HEAD", cwd=ROOT).stderr:  # in every language
            print_message(f"warning: no commit is noted, as git does not trust the folder:"
                          f' git config --global --add safe.directory "{ROOT}"')
        return None
    changed = git("status", "--porcelain", "--untracked-files=all", "--", "*.py", *others, cwd=ROOT).stdout
    return f"{commit}-dirty" if changed else commit


def environment(threads: int) -> dict[str, Any]:
    """What the numbers of a run depend on besides its configuration."""
    try:
        cpu_lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in cpu_lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": blas_name(),
        "threads": threads,
        "cpu": cpu,
        "n_cpus": os.cpu_count(),
        "git_commit": git_commit(),
    }


def checksum(result: dict[str, Any]) -> str:
    """SHA-256 of a result as JSON with sorted keys and no blanks, its own "checksum" left out. Raises ValueError for a
    number that is not finite."""
    content = {key: value for key, value in result.items() if key != "checksum"}
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    ).hexdigest()


def parse_json(path: Path) -> Any:
    """What a file of JSON holds, where all of its numbers are finite. Raises OSError for anything else."""
    try:
        content = json.loads(read_text(path), object_hook=rows)
        json.dumps(content, allow_nan=False)
    except json.JSONDecodeError:
        raise UserError(f"{path} is not JSON") from None
    except (LookupError, TypeError, AttributeError):
        raise UserError(f"{path} has columns of unequal lengths") from None
    except ValueError:  # also a whole number of thousands of digits
        raise UserError(f"{path} holds NaN, an infinite number or one that is too long") from None
    return content


def save_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result with its checksum, whole or not at all. Raises UserError where it cannot be written."""
    try:
        text = format_json(columns(result | {"checksum": checksum(result)}))
    except ValueError:
        raise UserError(f"cannot write {path}: the result holds a number that is not finite") from None
    write_file(path, (text + "\n").encode())


def columns(value: Any) -> Any:
    """JSON as a file holds it: runs of the same metrics as one list a metric, which takes a third of the room."""
    if isinstance(value, dict):
        return {key: columns(v) for key, v in value.items()}
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(v, dict) and "seed" in v for v in value):
        return value
    shapes = [keys(run) for run in value]
    return {"columns": column(value)} if all(shape == shapes[0] for shape in shapes) else value


def keys(value: Any) -> Any:
    return {key: keys(v) for key, v in value.items()} if isinstance(value, dict) else None


def column(runs: list[Any]) -> Any:
    """A whole number that all runs have, such as that of parameters, stands once."""
    if isinstance(runs[0], dict):
        return {key: column([run[key] for run in runs]) for key in runs[0]}
    return runs[0] if isinstance(runs[0], int) and runs == [runs[0]] * len(runs) else runs


def read_result(path: Path) -> dict[str, Any]:
    """A JSON object of finite numbers whose checksum is right. Raises UserError for anything else."""
    document = parse_json(path)
    if not isinstance(document, dict) or "checksum" not in document:
        raise UserError(f"{path} is no result with a checksum")
    if document["checksum"] != checksum(document):
        raise UserError(f"{path} has been changed since it was written: its checksum is of another content")
    return document


def rows(value: dict[str, Any]) -> Any:
    """The runs that ``columns`` made a table of; other values as they are."""
    if value.keys() != {"columns"}:
        return value

    def row(column: Any, i: int) -> Any:
        if isinstance(column, dict):
            return {key: row(v, i) for key, v in column.items()}
        return column[i] if isinstance(column, list) else column

    return [row(value["columns"], i) for i in range(len(value["columns"]["seed"]))]


def format_json(value: Any, depth: int = 0) -> str:
    """JSON in which what fits a line stands on one, and so does a list of numbers. Raises ValueError for a number that
    is not finite."""
    line = json.dumps(value, allow_nan=False)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if len(line) + depth <= 160:
        return line
    if not any(isinstance(part, dict | list) for part in parts):
        return json.dumps(value, separators=(",", ":"))
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {format_json(v, depth + 1)}" for key, v in value.items()]
    else:
        items = [format_json(v, depth + 1) for v in value]
    pad = "\n" + " " * (depth + 1)
    return line[0] + pad + ("," + pad).join(items) + pad[:-1] + line[-1]
