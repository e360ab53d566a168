"""The two help texts of a script: ``--help``, for most people, and ``--help-all``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


class ShowHelp(argparse.Action):
    def __call__(self, parser: Any, *_: object) -> None:
        parser.show(parser.format_help() if self.dest == "help_all" else parser.format_short_help())


class HelpParser(argparse.ArgumentParser):
    """``--help`` shows the flags ``common`` (none: all), the ``examples`` and the epilog, which says where results go.
    An example is a pair: flags, and what they do in which time on one thread. ``--help-all`` shows every flag. A
    subclass has ``show(text)``, which prints the text and ends the program."""

    def __init__(self, common: str = "", examples: Sequence[tuple[str, str]] = (), **options: Any) -> None:
        super().__init__(add_help=False, **{"usage": "%(prog)s [flags]", **options})
        self.common, self.examples = set(common.split()), examples
        shows: Any = {"action": ShowHelp, "nargs": 0, "default": argparse.SUPPRESS}
        self.add_argument("-h", "--help", **shows, help="Show the usual flags, and examples.")
        self.add_argument("--help-all", **shows, help="Show every flag and its default.")

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
