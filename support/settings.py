"""Settings: each is declared once, as a field of a frozen dataclass, and its flag, help and checks come from there.

    @dataclasses.dataclass(frozen=True)
    class Config:
        em_iters: int = setting(3, int_in(1, 20), "Route in N iterations.", usual=True)

    config, options, given = parse(Config, Options, argv, "Train ...", examples)

``--help`` shows the ``usual`` flags and examples, ``--help-all`` every flag. A dataclass may have two methods:
``defaults(given)``, a class method, returns the defaults that depend on what the command line set; and ``check(given)``
raises SettingError where values do not fit together. ``given`` maps the fields that the command line set to their
values. What is wrong with a command line is a UsageError, which ``script`` makes one line of.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from support.output import UserError, require_writable

Range = tuple[float, float]
C = TypeVar("C")
O = TypeVar("O")


class UsageError(Exception):
    """What is wrong with a command line."""


class SettingError(UsageError):
    """A value that cannot be: of a field, and why."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"argument {flag_of(field)}: {message}")


# --- Declaration ------------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """What a field says of its flag."""

    kind: Any  # a function of the text, a tuple of choices, or bool: a flag without a value
    help: str
    default: str = ""  # what the help says of it, if not the field's default
    paper: str = ""  # the paper's value and where it stands, if it is another
    usual: bool = False  # whether --help shows it
    free: bool = False  # whether a resumed run may have another value
    group: str = ""  # heading of the flags from here on


def setting(default: Any, kind: Any, help: str, shown: str = "", **more: Any) -> Any:
    """A field of a dataclass of settings; see ``Setting``, whose ``default`` is ``shown``."""
    return dataclasses.field(default=default, metadata={"it": Setting(kind, help, shown, **more)})


def redeclared(config: Any, field: str, value: Any = dataclasses.MISSING, **changed: Any) -> Any:
    """A field of another dataclass, perhaps with another default ``value``, and what else of its ``Setting`` is
    ``changed``."""
    default = getattr(config, field) if value is dataclasses.MISSING else value
    return dataclasses.field(default=default, metadata={"it": settings_of(config)[field]._replace(**changed)})


def settings_of(config: Any) -> dict[str, Setting]:
    """By field, those of a dataclass or of an instance."""
    return {field.name: field.metadata["it"] for field in dataclasses.fields(config) if "it" in field.metadata}


def flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")


def format_value(value: Any, type_name: Any = "") -> str:
    """As a flag takes it: a Range 0:150, other tuples 16,4,8,8."""
    if isinstance(value, tuple):
        return (":" if type_name == "Range" else ",").join(format_value(v) for v in value) or "none"
    if value is None:
        return "none"
    return repr(float(value)).removesuffix(".0") if isinstance(value, float) else str(value)


# --- Kinds of values --------------------------------------------------------------------------------------------------


def int_in(low: int, high: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not between {low} and {high}")
        return value

    return whole_number


def float_in(low: float, high: float, *, above: bool = False) -> Callable[[str], float]:
    """From ``low``, or with ``above`` greater than it, to ``high``."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= value <= high or (above and value == low):  # a NaN fails this too
            bounds = f"above {low:g} and at most {high:g}" if above else f"between {low:g} and {high:g}"
            raise argparse.ArgumentTypeError(f"{text} is not {bounds}")
        return value

    return number


def list_of(kind: Callable[[str], Any], length: int | None = None, *, rising: bool = False) -> Callable[[str], tuple]:
    """Values with commas between them."""

    def values(text: str) -> tuple[Any, ...]:
        parts = tuple(kind(part) for part in text.split(","))
        if length not in (None, len(parts)):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {length} with commas between")
        if rising and list(parts) != sorted(set(parts)):
            raise argparse.ArgumentTypeError(f"{text} does not rise")
        return parts

    return values


def names_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Some of the known names, each once, with commas between them."""

    def names(text: str) -> tuple[str, ...]:
        parts = tuple(text.split(","))
        if unknown := [name for name in parts if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
        if len(set(parts)) < len(parts):
            raise argparse.ArgumentTypeError(f"{text} names one twice")
        return parts

    return names


def angles_in(low: float, high: float) -> Callable[[str], Range]:
    """A range of degrees, such as 0:150, of at most a full circle, both ends between ``low`` and ``high``."""

    def angles(text: str) -> Range:
        try:
            start, stop = (float(part) for part in text.split(":"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not START:STOP in degrees, such as 0:150") from None
        if not low <= start <= stop <= min(high, start + 360):
            bounds = f"between {low:g} and {high:g}, of at most a full circle, with START first"
            raise argparse.ArgumentTypeError(f"{text} is no range of degrees {bounds}")
        return start, stop

    return angles


def folder(value: str) -> Path:
    if not value:
        raise argparse.ArgumentTypeError("the name is empty")
    return Path(value)


def input_path(value: str) -> Path:
    """A file that is read."""
    return folder(value)


def output_path(value: str) -> Path:
    """A file that is written."""
    return folder(value)


METAVARS = {"whole_number": "N", "number": "X", "values": "A,B", "names": "A,B", "angles": "A:B", "folder": "DIR",
            "input_path": "FILE", "output_path": "FILE"}  # fmt: skip


# --- The command line -------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def program(prog: str) -> str:
    """What follows ``python`` where this script is started: its file, or of a module ``-m more.NAME``."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"-m {spec.name}" if spec and not spec.name.startswith("pytest") else prog


def add_settings(parser: argparse.ArgumentParser, config: Any, usual_alone: bool) -> None:
    """The flags of a dataclass; ``usual_alone``: in the help, only the usual ones."""
    group: Any = parser
    for field in dataclasses.fields(config):
        it = field.metadata.get("it")
        if it is None:
            continue
        if it.group:
            group = parser.add_argument_group(it.group)
        options: dict[str, Any] = {}
        default = it.default or ("" if field.default in (None, ()) else format_value(field.default, field.type))
        if it.kind is bool:
            options["action"], default = "store_true", ""
        elif isinstance(it.kind, tuple):
            options |= {"choices": it.kind, "type": type(it.kind[0])}
        else:
            options |= {"type": it.kind, "metavar": METAVARS.get(it.kind.__name__, "X")}
            if str(field.type).startswith("tuple[Path"):
                options["nargs"] = "+"
        help = it.help + (f" Default: {default}." if default else "") + (f" The paper: {it.paper}." if it.paper else "")
        shown = help.replace("%", "%%") if it.usual or not usual_alone else argparse.SUPPRESS
        group.add_argument(flag_of(field.name), help=shown, **options)


def parse(
    config: type[C], options: type[O], argv: Sequence[str] | None, description: str = "",
    examples: Sequence[tuple[str, str]] = (), epilog: str = "", writes: bool = True,
) -> tuple[C, O, dict[str, Any]]:  # fmt: skip
    """Both dataclasses as the command line sets them, and what it set. An example is a pair: flags, and what they do in
    which time. Ends the script after ``--help``. Raises UsageError; and if something ``writes`` the outputs, UserError
    where that is impossible."""
    words: list[str] = []
    for word in sys.argv[1:] if argv is None else argv:
        # A value such as -30:30 would be taken for a flag.
        joins = bool(words) and re.match(r"-[\d.]", word) and re.fullmatch(r"--[a-z-]+", words[-1])
        words[-1:] = [f"{words[-1]}={word}"] if joins else [*words[-1:], word]
    parser = Parser(
        allow_abbrev=False, add_help=False, usage="%(prog)s [flags]", description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    lines = [f"  python {program(parser.prog)} {flags}".rstrip() + f"\n      {what}" for flags, what in examples]
    parser.epilog = "\n".join([*(["examples, with their times on one thread:"] if lines else []), *lines, "", epilog])
    parser.add_argument("-h", "--help", action="store_true", help="Show the usual flags, and examples.")
    parser.add_argument("--help-all", action="store_true", help="Show every flag.")
    for declared in (config, options):
        add_settings(parser, declared, usual_alone="--help-all" not in words)
    given = vars(parser.parse_args(words))
    if "help" in given or "help_all" in given:
        print(parser.format_help().rstrip(), flush=True)
        raise SystemExit(0)
    made = build(config, given), build(options, given)
    require_distinct(made)
    for each in made:
        getattr(each, "check", lambda _: None)(given)
    if writes:
        read = {"checkpoint"} if given.keys() & {"predict", "resume"} else set()
        require_writable(*(path for name, path in paths_of(made, output_path) if name not in read))
    return *made, given


def build(config: type[C], given: Mapping[str, Any]) -> C:
    """A dataclass of what is given of it and the defaults of the rest, before its ``check``."""
    names = settings_of(config)
    own = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if name in names}
    defaults: Callable[..., dict[str, Any]] = getattr(config, "defaults", lambda _: {})
    return config(**(defaults(given) | own))


def paths_of(made: Sequence[Any], kind: Any) -> list[tuple[str, Path]]:
    """The settings of a kind that name paths, and these."""
    values = [(name, getattr(each, name)) for each in made for name, it in settings_of(each).items() if it.kind is kind]
    return [(name, path) for name, v in values if v for path in (v if isinstance(v, tuple) else [v])]


def require_distinct(made: Sequence[Any]) -> None:
    """Raises SettingError where an output is an input or another output, among the paths that the settings name."""
    outputs = paths_of(made, output_path)
    inputs = [*paths_of(made, input_path), *paths_of(made, folder)]  # pictures may be in one file, too
    for (name, path), (other, used) in [*itertools.combinations(outputs, 2), *itertools.product(outputs, inputs)]:
        if os.path.realpath(path) == os.path.realpath(used):
            raise SettingError(name, f"is the same file as that of {flag_of(other)}")


# --- Configurations in files ------------------------------------------------------------------------------------------


def from_json(config: type[C], content: Mapping[str, Any]) -> C:
    """The configuration of a checkpoint or result. Raises ValueError for one that no command line gives."""
    fields = {field.name: field for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    if unknown := set(content) - set(fields):
        raise ValueError(f"it has a setting {min(unknown)}, which is unknown")
    values: dict[str, Any] = {}
    for name, value in content.items():
        value = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
        it: Setting | None = fields[name].metadata.get("it")
        if it and isinstance(it.kind, tuple) and value not in it.kind:
            raise ValueError(f"its {name} is {value!r}")
        if it and it.kind is not bool and not isinstance(it.kind, tuple) and value not in (None, ()):
            try:
                value = it.kind(format_value(value, fields[name].type))
            except argparse.ArgumentTypeError as error:
                raise ValueError(f"its {name}: {error}") from None
        values[name] = value
    return config(**values)


def difference(saved: Any, asked: Any, names: Any) -> str | None:
    """The first of the fields in which two configurations differ, in words."""
    for field in dataclasses.fields(saved):
        old, new = getattr(saved, field.name), getattr(asked, field.name)
        if field.name in names and old != new:
            what = flag_of(field.name) if "it" in field.metadata else f"other {field.name.replace('_', ' ')}:"
            return f"{what} {format_value(old, field.type)}, not {format_value(new, field.type)}"
    return None


def require_same(path: Path, saved: Any, asked: Any, given: Collection[str], free: Collection[str] = ()) -> None:
    """Raises UserError where a setting that is ``given`` differs from that of a checkpoint, and is not ``free``."""
    own = {name for name, it in settings_of(saved).items() if it.free}
    if found := difference(saved, asked, {*given} - own - {*free}):
        raise UserError(f"{path} was made with {found}")
