"""Imported first by every script: Ctrl-C while it imports the rest ends it with one word and status 130."""

import os
import signal
import sys
from pathlib import Path
from typing import Any


def end(signum: int, frame: Any) -> None:
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
    root = Path(__file__).resolve().parent.parent
    return file is not None and Path(file).resolve().parent in (root, root / "benchmarks")


if (
    is_a_script(getattr(sys.modules["__main__"], "__file__", None))
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, end)
