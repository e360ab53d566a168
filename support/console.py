"""What a script says and how it ends: results, messages, the exit status."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import IO

from support import startup
from support.files import UserError


def one_line(error: object, limit: int = 200) -> str:
    """An error's message, or any other text, on one line; a long one is cut in its middle."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-(limit // 2 - 1) :]}"


unprinted: list[str] = []  # why what was printed is lost


def print_result(text: str) -> None:
    """Print to stdout. A closed pipe is ignored. Where the text cannot be written the script goes on, since its files
    may not be written yet, and ``exit_status`` says so at its end."""
    if sys.stdout is None:
        return
    try:
        print(encodable(text, sys.stdout), flush=True)
    except OSError as error:
        discard(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            unprinted.append(str(error.strerror))


def print_message(text: str) -> None:
    """Print to stderr, if there is one that can be written to."""
    if sys.stderr is not None:  # print would take stdout instead
        try:
            print(encodable(text, sys.stderr), file=sys.stderr, flush=True)
        except OSError:
            discard(sys.stderr)


def discard(stream: IO[str]) -> None:
    """From here on nothing is written to where a stream goes: Python would try again at its end, and end in 120."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def shows_progress(quiet: bool = False) -> bool:
    """Whether a progress bar is wanted and somebody sees it."""
    return not quiet and sys.stderr is not None and sys.stderr.isatty()


def encodable(text: str, stream: IO[str]) -> str:
    """The text with escapes for what the stream cannot take, such as odd bytes in a file's name."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


def exit_status(body: Callable[[], None]) -> int:
    """Run a script's body: 0; 1 with one line on stderr for a UserError or a stdout that took no text; 130 after
    Ctrl-C, 143 after SIGTERM."""
    startup.is_over()
    unprinted.clear()
    try:
        body()
        if unprinted:
            raise UserError(f"cannot write to the standard output: {unprinted[0]}")
    except UserError as error:
        print_message(f"error: {one_line(error, 500)}")
        return 1
    except MemoryError:
        print_message("error: out of memory; try a smaller --batch-size or fewer examples")
        return 1
    except Terminated:
        print_message("terminated")
        return 143
    except KeyboardInterrupt:
        print_message("interrupted")
        return 130
    return 0
