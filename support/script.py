"""How a script ends: one line for what went wrong, and the exit status."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from support.console import Terminated, discard, one_line, print_message
from support.files import UserError
from support.settings import UsageError


def script(main: Callable[[Sequence[str] | None], None]) -> Callable[..., int]:
    """Makes of a script's ``main(argv)`` one that returns the exit status: 0; 1 with one line on stderr for what the
    person at the keyboard can put right, 2 where that is the command line; 130 after Ctrl-C, 143 after SIGTERM. A
    closed pipe is no error."""

    @functools.wraps(main)
    def status(argv: Sequence[str] | None = None) -> int:
        with contextlib.suppress(ValueError):  # outside of the main thread signals are not ours
            signal.signal(signal.SIGTERM, _terminated)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # odd bytes in a file's name
        try:
            main(argv)
            if sys.stdout is not None:
                sys.stdout.flush()
        except KeyboardInterrupt as stopped:
            print_message("terminated" if isinstance(stopped, Terminated) else "interrupted")
            return 143 if isinstance(stopped, Terminated) else 130
        except UsageError as error:
            script_name = os.path.basename(sys.argv[0])
            print_message(f"{script_name}: error: {one_line(error, 300)} (--help-all shows every flag)")
            return 2
        except MemoryError:
            print_message("error: out of memory; try a smaller --batch-size or fewer examples")
            return 1
        except UserError as error:
            print_message(f"error: {one_line(error, 500)}")
            return 1
        except OSError as error:
            discard(sys.stdout)
            if not isinstance(error, BrokenPipeError):
                print_message(f"error: {one_line(error, 500)}")
                return 1
        return 0

    return status


def _terminated(*_: object) -> NoReturn:
    raise Terminated
