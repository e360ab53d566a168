"""Downloads: a file from the first of several mirrors that has it, verified, without a long wait where none answers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pooch
from tqdm import tqdm

from .console import one_line, print_message, shows_progress
from .files import UserError, folder_made, require_writable, temporary_folder

MIRROR_SECONDS = 4.0  # timeout of a mirror's first answer, name resolution included
STALL_SECONDS = 15.0  # timeout of the next bytes of a download


class UnavailableError(UserError):
    """The file is neither on this machine nor to be had from a mirror."""


def answers(downloader: pooch.HTTPDownloader, url: str) -> bool:
    """Whether a HEAD request for the URL succeeds in time. A connect timeout limits neither name resolution nor a host
    with many addresses, so the request is made in a thread, which is abandoned after ``MIRROR_SECONDS``."""
    answer: list[bool] = []

    def ask() -> None:
        try:
            answer.append(downloader(url, None, None, check_only=True))
        except (OSError, ValueError):  # requests' exceptions are OSErrors
            answer.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(MIRROR_SECONDS)
    return bool(answer) and answer[0]


def download(path: Path, sha256: str, mirrors: Sequence[str], what: str, instead: str) -> Path:
    """``path``, downloaded from one of the mirrors' folders unless it is there and has the right SHA-256.

    A damaged file is replaced when, and only when, a verified copy has arrived. Raises UnavailableError, which names
    ``what`` it is and what to do ``instead``, where no mirror gives one.
    """
    damaged = ""
    try:
        if path.exists():
            if pooch.file_hash(str(path)) == sha256:
                return path
            damaged = f"{path} is damaged; "
            print_message(f"{path} is damaged, fetching it again")
        require_writable(path)
    except (OSError, UserError) as error:
        raise UnavailableError(f"no {what} cache at {path.parent} ({one_line(error)}): {instead}") from error

    pooch.get_logger().setLevel("WARNING")
    tried = []
    for mirror in mirrors:
        # total=1 until pooch knows better: a bar without a total has no truth value
        with tqdm(total=1, desc=path.stem, unit="B", unit_scale=True, leave=False, disable=not shows_progress()) as bar:
            downloader = pooch.HTTPDownloader(bar, 1 << 16, timeout=(MIRROR_SECONDS, STALL_SECONDS))
            try:
                if not answers(downloader, mirror + path.name):
                    raise OSError("no answer")
                with folder_made(path.parent, keep=True), temporary_folder(path.parent) as unfinished:
                    pooch.retrieve(mirror + path.name, f"sha256:{sha256}", path.name, unfinished, downloader=downloader)
                    (unfinished / path.name).replace(path)
                return path
            except ValueError:
                tried.append(f"{mirror} (wrong SHA-256)")
            except OSError as error:
                tried.append(f"{mirror} ({one_line(error)})")
    raise UnavailableError(f"{damaged}{what} could not be downloaded from {', '.join(tried)}: {instead}")
