"""Scripts of the project, or of a folder of a person's own: what they import, and what their flags mean."""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Sequence
from modulefinder import ModuleFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.files import ROOT, UserError
from support.settings import UsageError, parse


def code_files(script: Path) -> list[Path]:
    """The script and the modules of its folder that it imports, directly or not. Raises UserError where one cannot be
    read."""
    root = script.parent if script.parent.name != "benchmarks" else script.parent.parent
    finder = ModuleFinder([str(root)])
    try:
        finder.run_script(str(script))  # which reads it, and runs nothing
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"{script} is no Python program that can be read ({type(error).__name__})") from None
    files = [vars(module)["__file__"] for module in finder.modules.values()]
    return sorted({Path(file) for file in files if file})


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
    return module.make_parser().parse_args(argv)
