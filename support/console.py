"""What a script says on stderr."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import IO, Any

from tqdm import tqdm


def one_line(error: object, limit: int = 200) -> str:
    """An error's message, or any other text, on one line; a long one is cut in its middle."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-(limit // 2 - 1) :]}"


def print_message(text: str) -> None:
    """Print to stderr, if there is one that can be written to."""
    if sys.stderr is not None:  # print would take stdout instead
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError:
            discard(sys.stderr)


def discard(stream: IO[str]) -> None:
    """From here on nothing is written to where a stream goes: Python would try again at its end, and end in 120."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def shows_progress(quiet: bool = False) -> bool:
    """Whether a progress bar is wanted and somebody sees it."""
    return not quiet and sys.stderr is not None and sys.stderr.isatty()


def progress_bar(items: Any = None, quiet: bool = False, **options: Any) -> Any:
    """A bar of ``tqdm``, which vanishes at its end."""
    return tqdm(items, leave=False, disable=not shows_progress(quiet), **options)


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""
