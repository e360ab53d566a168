"""Imported first by every script: Ctrl-C while it imports the rest ends it with one word and status 130, and matplotlib
draws into memory whatever MPLBACKEND says, as a notebook sets it to a backend that the project may not have.

It imports little itself, for until it has run Ctrl-C gives a traceback.
"""

from __future__ import annotations

import os
import signal
import sys


def end(signum: int, frame: object) -> None:
    """There is nothing to save yet, and an exception would come out of some import as a traceback or another error."""
    try:
        if sys.stderr is not None:  # what else may have its number now
            os.write(2, b"interrupted\n")
    finally:
        os._exit(130)


def is_over() -> None:
    """From here on Ctrl-C is an exception again."""
    if signal.getsignal(signal.SIGINT) is end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_a_script(file: str | None) -> bool:
    """Whether the program is one of this project's, and not a test or somebody's own that imports it."""
    root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    return file is not None and os.path.dirname(os.path.realpath(file)) in (root, os.path.join(root, "benchmarks"))


if is_a_script(getattr(sys.modules["__main__"], "__file__", None)):
    os.environ["MPLBACKEND"] = "agg"
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)
