"""Which refusals does no test reach? Runs the tests and lists every ``raise`` that none of them came to.

    python tests/raises.py                    # the whole suite, on two processes
    python tests/raises.py tests/test_x.py    # these tests, or any other words for pytest
    RAISES=FOLDER python tests/raises.py      # none: lists after runs of ``RAISES=FOLDER pytest -p raises``

A refusal is a ``raise`` with an error of its own in the code that people meet, but for ``NO_REFUSALS``. In the base
scripts, the same words are one: a test holds what both define to be the same text. Exit status 1 where one was not
reached. What is raised in a process that a test starts is not seen.
"""

from __future__ import annotations

import ast
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BASE = ("multimnist_capsnet.py", "smallnorb_novel_viewpoint.py")
PLACES = ("*.py", "data/*.py", "support/*.py", "evidence/*.py", "more/*.py")
NO_REFUSALS = ("SystemExit(0)", "KeyboardInterrupt('terminated')")  # --help, a signal
OLD_PYTHON = "SystemExit(f'this needs Python"  # on which no test runs
Place = tuple[str, int]  # a file, and a line
_reached: set[Place] = set()
_of_code: dict[CodeType, bool] = {}  # whether it is watched


def refusals() -> dict[Place, str]:
    """The first line of every refusal, by its place, and by those of its other lines the same."""
    found: dict[Place, str] = {}
    in_base: dict[str, str] = {}
    for path in sorted(path for pattern in PLACES for path in ROOT.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Raise) or not node.exc:
                continue
            words = ast.unparse(node.exc)
            if words not in NO_REFUSALS and not words.startswith(OLD_PYTHON):
                line = text.splitlines()[node.lineno - 1].strip()
                name = f"{path.relative_to(ROOT)}:{node.lineno}: {line}"
                if path.name in BASE:
                    name = in_base.setdefault(ast.unparse(node), name)
                found |= {(str(path), k): name for k in range(node.lineno, (node.end_lineno or 0) + 1)}
    return found


def trace(frame: FrameType, event: str, _: Any) -> Any:
    """Of all functions, those with a refusal are asked where they raise; of no line that goes well."""
    code = frame.f_code
    if code not in _of_code:
        lines = {line for *_, line in code.co_lines()}
        _of_code[code] = any((code.co_filename, line) in _known for line in lines if line)
    if not _of_code[code]:
        return None
    frame.f_trace_lines = False
    if event == "exception":
        _reached.add((code.co_filename, frame.f_lineno))
    return trace


def pytest_configure() -> None:
    """As a plugin of pytest, in each of its processes."""
    threading.settrace(trace)
    sys.settrace(trace)


def pytest_unconfigure() -> None:
    sys.settrace(None)
    lines = "".join(f"{path}\t{line}\n" for path, line in _reached)
    Path(os.environ["RAISES"], str(os.getpid())).write_text(lines, encoding="utf-8")


def run_tests(words: Sequence[str], folder: str) -> int:
    paths = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", "-p", "raises", *(words or ["-n", "2"])]
    environment = os.environ | {"RAISES": folder, "PYTHONPATH": paths}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    with contextlib.ExitStack() as stack:
        folder, status = os.environ.get("RAISES", ""), 0
        if not folder:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            status = run_tests(sys.argv[1:], folder)
        written = [line.split("\t") for path in Path(folder).iterdir() for line in path.read_text("utf-8").splitlines()]
    every, reached = set(_known.values()), {_known.get((path, int(line))) for path, line in written}
    left = sorted(every - reached, key=lambda name: (name.split(":")[0], int(name.split(":")[1])))
    print("\n".join([*left, f"{len(left)} of {len(every)} refusals are reached by no test"]))
    return status or bool(left)


_known = refusals()

if __name__ == "__main__":
    sys.exit(main())
