"""Flags: the two help texts, errors in one line, types of values, and the flags that every experiment has."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from support.console import exit_status, one_line, print_message, print_result
from support.files import data_files, overwriting


class ShowHelp(argparse.Action):
    def __call__(self, parser: Any, *_: object) -> None:
        text = parser.format_help() if self.dest == "help_all" else parser.format_short_help()
        parser.exit(exit_status(lambda: print_result(text.rstrip("\n"))))


class Parser(argparse.ArgumentParser):
    """``--help`` shows the flags ``common`` (none: all), the ``examples`` and the epilog, which says where results go.
    An example is a pair: flags, and what they do in which time on one thread. ``--help-all`` shows every flag.

    What is wrong is said in one line, without the usage before it. ``args.given`` names what the command line set.
    ``checks`` are called with the parser and what it has parsed. No output of the flags that all scripts have may
    replace an input.
    """

    def __init__(self, common: str = "", examples: Sequence[tuple[str, str]] = (), **options: Any) -> None:
        super().__init__(add_help=False, allow_abbrev=False, **{"usage": "%(prog)s [flags]", **options})
        self.common, self.examples = set(common.split()), examples
        shows: Any = {"action": ShowHelp, "nargs": 0, "default": argparse.SUPPRESS}
        self.add_argument("-h", "--help", **shows, help="Show the usual flags, and examples.")
        self.add_argument("--help-all", **shows, help="Show every flag and its default.")
        self.checks: list[Callable[[Parser, argparse.Namespace], object]] = []
        self.data_dir: str | None = None  # the folder of data where --data-dir is not given

    def format_short_help(self) -> str:
        formatter, shown = self._get_formatter(), self.common | {"--help-all"}
        formatter.add_usage(self.usage, [], [])
        formatter.add_text(self.description)
        formatter.start_section("flags")
        formatter.add_arguments(
            action
            for action in self._actions
            if not self.common or not action.option_strings or shown & {*action.option_strings}
        )
        formatter.end_section()
        script = self.prog if " " in self.prog else f"python {self.prog}"
        examples = (f"  {script} {flags}".rstrip() + f"\n      {text}" for flags, text in self.examples)
        head = ["examples, with their times on one thread:", *examples, ""] if self.examples else []
        return "\n".join([formatter.format_help(), *head, self.epilog or ""])

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        for flag, _, value in (word.partition("=") for word in (sys.argv[1:] if args is None else args)):
            if flag.startswith("-") and value == "--":  # Python 3.11 takes it for no value at all
                self.error(f"argument {flag}: expected a value, not --")
        self._negative_number_matcher = re.compile(r"-[\d.]")  # or -30:30 would be taken for a flag
        parsed = super().parse_args(args, namespace)
        defaults = {action: action.default for action in self._actions}
        for action in self._actions:
            action.default = argparse.SUPPRESS
        parsed.given = frozenset(vars(super().parse_args(args)))
        for action, default in defaults.items():
            action.default = default
        for check in (*self.checks, check_overwriting):
            check(self, parsed)
        return parsed

    def error(self, message: str) -> NoReturn:
        print_message(f"{self.prog}: error: {one_line(message, 300)} (--help-all shows every flag)")
        self.exit(2)


def add_flags(parser: argparse.ArgumentParser, title: str, config: type) -> Callable[..., None]:
    """Start a group of flags, and return ``add(field, type, help, metavar, default)``, which adds the flag of a field
    of ``config``.

    The type is a function of the text, or a tuple of choices. The help is a sentence. Without ``default`` the flag has
    the field's default, and the help says it. With it, the help says this text, and the value is None unless the flag
    is given.
    """
    group = parser.add_argument_group(title)
    fields = {field.name: field for field in dataclasses.fields(config)}

    def add(name: str, kind: Any, text: str, metavar: str | None = "N", default: str | None = None) -> None:
        options: dict[str, Any] = {"choices": kind} if isinstance(kind, tuple) else {"type": kind, "metavar": metavar}
        if name == "data_dir" and isinstance(parser, Parser) and (default or "").startswith("~"):
            parser.data_dir = default
        shown = default or format_value(fields[name].default, fields[name].type)
        group.add_argument(
            flag_of(config, name), dest=name, default=None if default else fields[name].default,
            help=f"{text} Default: {shown}.".replace("%", "%%"), **options,
        )  # fmt: skip

    return add


def values_of(args: argparse.Namespace, config: type) -> dict[str, Any]:
    """The values of the flags that set fields of ``config``, by field."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(config) if field.name in args}


def flag_of(config: Any, field: str) -> str:
    """The flag that sets a field of a Config."""
    own: dict[str, str] = getattr(config, "flags", {})
    return own.get(field, "--" + field.replace("_", "-"))


def format_value(value: Any, type_name: Any = "") -> str:
    """As a flag takes it: a Range 0:150, other tuples 16,4,8,8."""
    if isinstance(value, tuple):
        return (":" if type_name == "Range" else ",").join(format_value(v) for v in value) or "none"
    return repr(float(value)).removesuffix(".0") if isinstance(value, float) else str(value)


def whole_number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not between {low} and {high}")
        return value

    return parse


def number(low: float, high: float, *, above: bool = False) -> Callable[[str], float]:
    """A number from ``low`` (with ``above``: greater than it) to ``high``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= value <= high or (above and value == low):  # a NaN fails this too
            bounds = f"above {low:g} and at most {high:g}" if above else f"between {low:g} and {high:g}"
            raise argparse.ArgumentTypeError(f"{text} is not {bounds}")
        return value

    return parse


def list_of(
    kind: Callable[[str], Any], length: int | None = None, example: str = "", *, rising: bool = False
) -> Callable[[str], tuple]:
    """Values with commas between them."""

    def parse(text: str) -> tuple[Any, ...]:
        values = tuple(kind(part) for part in text.split(","))
        if length not in (None, len(values)):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {length}, such as {example}")
        if rising and list(values) != sorted(set(values)):
            raise argparse.ArgumentTypeError(f"{text} does not rise")
        return values

    return parse


def angle_range(low: float, high: float) -> Callable[[str], tuple[float, float]]:
    """A range of degrees, such as 0:150, of at most a full circle, both ends between ``low`` and ``high``."""

    def parse(text: str) -> tuple[float, float]:
        try:
            start, stop = (float(part) for part in text.split(":"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not START:STOP in degrees, such as 0:150") from None
        if not (low <= start <= high and low <= stop <= high):
            raise argparse.ArgumentTypeError(f"{text} is not between {low:g} and {high:g} degrees")
        if start > stop:
            raise argparse.ArgumentTypeError(f"{text} runs backwards: START must not be above STOP")
        if stop - start > 360:
            raise argparse.ArgumentTypeError(f"{text} is more than a full circle")
        return start, stop

    return parse


def format_range(angles: tuple[float, float]) -> str:
    return format_value(angles, "Range")


def overlap(a: tuple[float, float], b: tuple[float, float], period: float | None = None) -> bool:
    """Whether two closed ranges have an angle in common, modulo ``period`` where one is given."""
    if period is None:
        return a[0] <= b[1] and b[0] <= a[1]
    return (b[0] - a[0]) % period <= a[1] - a[0] or (a[0] - b[0]) % period <= b[1] - b[0]


def names_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Some of the known names, each once, with commas between them."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        if len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"{text} names one twice")
        return names

    return parse


def non_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return text


def file_path(text: str) -> Path:
    return Path(non_empty(text))


def add_file_flags(parser: Parser, models: Sequence[str], *, eval_only: bool = True) -> None:
    """--models, and the files that a training reads and writes."""
    parser.checks.append(check_file_flags)
    parser.epilog = "The result is printed as a table; --out-json FILE and --checkpoint FILE keep it and the networks."
    default = ",".join(models)
    add = parser.add_argument_group("files").add_argument
    # fmt: off
    add("--models", type=names_of(models), metavar="A,B", default=tuple(models),
        help=f"Train only these. Default: {default}.")
    add("--out-json", type=file_path, metavar="FILE", help="Write the result, history and environment there.")
    add("--checkpoint", type=file_path, metavar="FILE",
        help="Save the networks there after every epoch, and on Ctrl-C. An older checkpoint of the experiment is"
        " replaced unless --resume is given.")
    add("--overwrite", action="store_true",
        help="Let --checkpoint replace one of another experiment or of an older version too.")
    add("--checkpoint-every", type=whole_number(1, 10**9), metavar="N", help="Save every N steps as well.")
    add("--resume", action="store_true",
        help="Continue from --checkpoint. On the same number of threads the numbers are those of an unbroken run, bit"
        " for bit.")
    if eval_only:
        add("--eval-only", action="store_true",
            help="Train nothing: test the networks of --checkpoint on the test set that the data flags describe.")
    add("--predict", type=file_path, nargs="+", metavar="IMAGE",
        help="Train nothing: classify pictures with the networks of --checkpoint.")
    add("--quiet", action="store_true", help="Show no progress bar.")
    # fmt: on


def check_file_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the script with status 2 where they do not fit together."""
    eval_only = getattr(args, "eval_only", False)
    for flag in ("predict", "eval_only", "resume", "checkpoint_every", "overwrite"):
        if getattr(args, flag, None) and not args.checkpoint:
            parser.error(f"argument --{flag.replace('_', '-')}: needs --checkpoint FILE")
    if args.predict and eval_only:
        parser.error("argument --predict: not together with --eval-only")
    for flag in ("resume", "checkpoint_every", "overwrite"):
        if (args.predict or eval_only) and getattr(args, flag):
            parser.error(f"argument --{flag.replace('_', '-')}: --predict and --eval-only do not train")
    if args.resume and args.overwrite:
        parser.error("argument --overwrite: --resume continues what is there")
    for flag in ("routing_study", "pose_study", "sign_study"):
        if args.predict and getattr(args, flag, None):
            parser.error(f"argument --{flag.replace('_', '-')}: --predict tests nothing")
    if args.predict and "models" in args.given:
        parser.error("argument --models: --predict asks every network of the checkpoint")
    if args.predict and args.out_json:
        parser.error("argument --out-json: --predict has no result of this kind")


OUTPUTS = ("out_json", "checkpoint", "out", "figure", "arrays")
INPUTS = ("predict", "results", "claims", "page", "multimnist", "viewpoint", "capsnet", "conv_capsules")


def check_overwriting(parser: Parser, args: argparse.Namespace) -> None:
    """Ends the script with status 2 where a file that it writes is one that it reads, or another that it writes."""
    outputs = {flag_of(None, name): path for name in OUTPUTS if (path := getattr(args, name, None)) is not None}
    inputs: list[tuple[str, Path]] = []
    if getattr(args, "predict", None) or getattr(args, "eval_only", False) or not hasattr(args, "checkpoint_every"):
        inputs = [("the file of --checkpoint", path) for path in [outputs.pop("--checkpoint", None)] if path]
    if outdir := getattr(args, "outdir", None):
        with contextlib.suppress(OSError):
            outputs |= {f"--outdir: {path.name}": path for path in outdir.glob("*/*.png")}
    if not outputs:
        return
    for name in INPUTS:
        given = getattr(args, name, None) or []
        paths = given if isinstance(given, list) else [given]
        inputs += [(f"a file of {flag_of(None, name)}", path) for path in paths]
    folders = (getattr(args, "data_dir", None) or parser.data_dir, getattr(args, "smallnorb_dir", None))
    pictures = getattr(args, "dataset", None) == "images"
    data = data_files(*(Path(f).expanduser() for f in folders if f), pictures=pictures)
    inputs += [("a file of data", path) for path in data]
    if fault := overwriting(outputs, inputs):
        parser.error(fault)
