"""How a script ends, what it imports and what its flags mean; also of a person's own."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import itertools
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from support.output import ROOT, Terminated, UserError, discard, one_line, print_message
from support.settings import UsageError, parse

RUN_FLAGS = ("--seed=0", "--threads=1", "--quiet", "--out-json=x.json")  # those of a run by compare_seeds.py


def script(main: Callable[[Sequence[str] | None], None]) -> Callable[..., int]:
    """Makes of a script's ``main(argv)`` one that returns the exit status: 0; 1 with one line on stderr for what the
    person at the keyboard can put right, 2 where that is the command line; 130 after Ctrl-C, 143 after SIGTERM. A
    closed pipe is no error."""

    @functools.wraps(main)
    def status(argv: Sequence[str] | None = None) -> int:
        with contextlib.suppress(ValueError):  # outside of the main thread signals are not ours
            signal.signal(signal.SIGTERM, _terminated)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # odd bytes in a file's name
        try:
            main(argv)
            if sys.stdout is not None:
                sys.stdout.flush()
        except KeyboardInterrupt as stopped:
            print_message("terminated" if isinstance(stopped, Terminated) else "interrupted")
            return 143 if isinstance(stopped, Terminated) else 130
        except UsageError as error:
            script_name = os.path.basename(sys.argv[0])
            print_message(f"{script_name}: error: {one_line(error, 300)} (--help-all shows every flag)")
            return 2
        except MemoryError:
            print_message("error: out of memory; try a smaller --batch-size or fewer examples")
            return 1
        except UserError as error:
            print_message(f"error: {one_line(error, 500)}")
            return 1
        except OSError as error:
            discard(sys.stdout)
            if not isinstance(error, BrokenPipeError):
                print_message(f"error: {one_line(error, 500)}")
                return 1
        return 0

    return status


def _terminated(*_: object) -> NoReturn:
    raise Terminated


ROOMS = ("", "more", "explorer", "evidence", "lesson", "benchmarks")


def script_path(name: str) -> Path | None:
    """The script of a path, a name ("conv_matrix_capsules", wherever in the project it lies) or a module
    ("more.conv_matrix_capsules"); None where there is none."""
    file, parts = Path(name.removesuffix(".py") + ".py"), name.split(".")
    places = [file, *(ROOT / room / file.name for room in ROOMS if len(file.parts) == 1)]
    places += [ROOT.joinpath(*parts).with_suffix(".py"), ROOT.joinpath(*parts, "__main__.py")]
    return next((path.resolve() for path in places if path.is_file()), None)


def run_command(script: Path) -> list[str]:
    """The words that start a script after those of the interpreter: a module where it lies in a room."""
    if script.is_relative_to(ROOT) and script.parent != ROOT:
        return ["-m", ".".join(script.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")]
    return [str(script)]


def code_files(script: Path) -> list[Path]:
    """The script and the modules of its folder that it imports, directly or not. Raises UserError where one cannot be
    read."""
    root = ROOT if script.is_relative_to(ROOT) else script.parent
    found: set[Path] = set()
    todo = [script]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        try:
            nodes = list(ast.walk(ast.parse(path.read_bytes())))
        except (OSError, ValueError, SyntaxError) as error:
            raise UserError(f"{path} is no Python program that can be read ({type(error).__name__})") from None
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        for node in (node for node in nodes if isinstance(node, ast.ImportFrom)):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            for part in itertools.accumulate(name.split("."), lambda a, b: f"{a}/{b}"):
                todo += [file for file in (root / f"{part}.py", root / part / "__init__.py") if file.is_file()]
    return sorted(found)


def load_script(path: Path) -> Any:
    """What a script defines, as attributes. Raises UserError where it cannot be imported."""
    try:
        if path.is_relative_to(ROOT):
            return importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        return SimpleNamespace(**runpy.run_path(str(path)))
    except Exception as error:
        raise UserError(f"{path.name} cannot be imported: {type(error).__name__}: {error}") from None


def parse_flags(script: Path, argv: Sequence[str]) -> Any:
    """The options as the script itself understands its flags, or those of the parser of a person's own. Raises
    UsageError, and SystemExit in such a parser."""
    module = load_script(script)
    if hasattr(module, "Options"):
        try:
            return parse(module.Config, module.Options, argv, writes=False)[1]
        except UsageError as error:
            raise UsageError(f"{script.name}: {error}") from None
    if not hasattr(module, "make_parser"):
        raise UsageError(f"{script.name} is no experiment")
    return module.make_parser().parse_args(argv)
