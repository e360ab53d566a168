"""Flags of the scripts that are no experiment: the two help texts, errors in one line, types of values."""

from __future__ import annotations

import argparse
import contextlib
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


def flag_of(config: Any, field: str) -> str:
    """The flag that sets a field of a Config."""
    own: dict[str, str] = getattr(config, "flags", {})
    return own.get(field, "--" + field.replace("_", "-"))


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


def non_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return text


def file_path(text: str) -> Path:
    return Path(non_empty(text))


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
