"""What the scripts beyond the two base scripts share: more kinds of settings, checkpoints of finished trainings, and
how a script is found, started and understood by its name."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import itertools
import runpy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from smallnorb_novel_viewpoint import (
    INPUT, RunOptions, SettingError, TrainState, UsageError, UserError, is_there, list_of, parse, read_checkpoint,
    setting, settings_of, write_file,
)

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("", "more", "explorer", "evidence", "lesson", "benchmarks")
RUN_FLAGS = ("--seed=0", "--threads=1", "--quiet", "--out-json=x.json")  # those of a run by compare_seeds.py


# --- Settings ---------------------------------------------------------------------------------------------------------


def redeclared(config: Any, field: str, value: Any = dataclasses.MISSING, **changed: Any) -> Any:
    """A field of another dataclass, perhaps with another default ``value``, and what else of its ``Setting`` is
    ``changed``."""
    default = getattr(config, field) if value is dataclasses.MISSING else value
    return dataclasses.field(default=default, metadata={"it": settings_of(config)[field]._replace(**changed)})


@dataclasses.dataclass(frozen=True)
class PredictOptions(RunOptions):
    """Those of a script that also classifies images in files."""

    predict: tuple[Path, ...] = setting((), list_of(INPUT)._replace(metavar="FILES"),
        "Train nothing: classify images with the networks of --checkpoint.", usual=True)

    def check(self) -> None:
        super().check()
        if self.predict and self.checkpoint is None:
            raise SettingError("predict", "needs --checkpoint FILE")
        if self.predict and (self.out_json or self.resume):
            raise SettingError("out_json" if self.out_json else "resume", "--predict neither trains nor tests")


def require_alone(given: Collection[str], *used: str) -> None:
    """Raises SettingError where --predict has flags that it does not use."""
    if unused := [name for name in given if name not in used]:
        raise SettingError(unused[0], "--predict neither trains nor tests")


# --- Checkpoints ------------------------------------------------------------------------------------------------------


def load_checkpoint(script: Any, path: Path) -> tuple[Any, dict[str, TrainState]]:
    """Configuration and states of a checkpoint; ``script`` is the module that wrote it."""
    return read_checkpoint(path, script.EXPERIMENT, script.Config, script.make_models)


def unfinished(
    experiment: str, path: Path, config: Any, states: Mapping[str, TrainState], required: Iterable[str] = (),
    reached: Callable[[TrainState, Any], bool] | None = None,
) -> str | None:
    """Which training of an experiment's checkpoint, or of the ``required`` models, has not come to its end, in words:
    after its epochs, or before, where it has ``reached`` what it was to learn."""
    for name in dict.fromkeys((*required, *states)):
        done = len(states[name].history.get("train_loss", [])) if name in states else 0
        n_epochs = getattr(config, "cnn_epochs", config.n_epochs) if name.startswith("cnn") else config.n_epochs
        if done < n_epochs and not (reached and name in states and reached(states[name], config)):
            how = f"{experiment} --checkpoint … --resume"
            return f"{path} holds {done:,} of {n_epochs:,} epochs of {name}; finish it with {how}"
    return None


OUR_FILES = (b"GIF8", b"\x89PNG", b"<!DOCTYPE html>", b"{")  # how pictures, the explorer and results begin


def require_writable(*paths: Path, ours: tuple[bytes, ...] = OUR_FILES) -> None:
    """Find out before the work that a file cannot be written there, or that one which begins as none of ``ours`` would
    be lost."""
    for path in paths:
        write_file(path, None)
        if is_there(path) and not path.read_bytes()[:16].startswith(ours):
            raise UserError(f"{path} is there, and is of something else: name another file")


# --- Scripts by their names -------------------------------------------------------------------------------------------


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


def imported_names(path: Path) -> list[str]:
    """The modules that a file imports, and what it takes of them. Raises UserError where it cannot be read."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"{path} is no Python program that can be read ({type(error).__name__})") from None
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in (node for node in nodes if isinstance(node, ast.ImportFrom)):
        names += [f"{node.module}.{alias.name}" for alias in node.names]
    for call in (node for node in nodes if isinstance(node, ast.Call) and len(node.args) == 1):
        if isinstance(call.func, ast.Name) and call.func.id == "from_data":  # imported where it is asked for
            names += [f"data.{call.args[0].value!s}"] if isinstance(call.args[0], ast.Constant) else []
    return names


def code_files(script: Path, names_of: Callable[[Path], list[str]] = imported_names) -> list[Path]:
    """The script and the modules of this project, and of a folder of its own, that it imports, directly or not. Raises
    UserError where one cannot be read."""
    roots = (ROOT,) if script.is_relative_to(ROOT) else (script.parent, ROOT)
    found: set[Path] = set()
    todo = [script]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        for name in names_of(path):
            for part in itertools.accumulate(name.split("."), lambda a, b: f"{a}/{b}"):
                files = [file for root in roots for file in (root / part / "__init__.py", root / f"{part}.py")]
                todo += list(filter(Path.is_file, files))[:1]
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
            return parse(module.Config, module.Options, argv)[1]
        except UsageError as error:
            raise UsageError(f"{script.name}: {error}") from None
    if not hasattr(module, "make_parser"):
        raise UsageError(f"{script.name} is no experiment, as smallnorb_novel_viewpoint is: it has neither Config and"
                         " Options nor make_parser")
    return module.make_parser().parse_args(argv)
