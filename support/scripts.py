"""Scripts of the project, or of a folder of a person's own: what they import, and what their flags mean."""

from __future__ import annotations

import ast
import importlib
import itertools
import runpy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.files import ROOT, UserError
from support.settings import UsageError, parse

RUN_FLAGS = ("--seed=0", "--threads=1", "--quiet", "--out-json=x.json")  # those of a run by compare_seeds.py


def code_files(script: Path) -> list[Path]:
    """The script and the modules of its folder that it imports, directly or not. Raises UserError where one cannot be
    read."""
    root = script.parent if script.parent.name != "benchmarks" else script.parent.parent
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
