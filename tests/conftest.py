"""Failures in the modules that tests share show the values, as those in a test do.

No test asks the network, finds a person's home folder, or leaves a file where the scripts write by default.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before numpy is imported: a process for each core needs no more, and the bits of a sum depend on the threads.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of the many processes would compile all modules anew

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell: the tests send it to scripts
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
LOCAL = ("127.0.0.1", "::1", "localhost", "0.0.0.0", "")

pytest.register_assert_rewrite("helpers", "figure_checks")


def written_by_default() -> set[Path]:
    """The files where the scripts write if no flag says otherwise."""
    folders = [ROOT / name for name in ("viz", "results", ".cache")]
    return {*ROOT.glob("*.*"), *(path for folder in folders for path in folder.rglob("*"))}


def host_of(address: Any) -> str:
    return str(address[0]) if isinstance(address, tuple) else ""  # or a socket in the file system


@pytest.fixture(autouse=True, scope="session")
def _nothing_outside() -> Iterator[None]:
    """Sockets reach this machine alone, in the scripts that a test starts through a proxy that is not there; the home
    folder is an empty one."""
    before = written_by_default()
    home = tempfile.mkdtemp(prefix="home")
    look_up = socket.getaddrinfo

    def checked(host: str) -> None:
        assert host in LOCAL, f"a test asks the network for {host}"

    def checked_connection(original: Any) -> Any:
        def call(self: socket.socket, address: Any) -> Any:
            checked(host_of(address))
            return original(self, address)

        return call

    def checked_look_up(host: Any, *args: Any, **options: Any) -> Any:
        checked(str(host or ""))
        return look_up(host, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", home)
        for variable in ("http_proxy", "https_proxy"):
            patch.setenv(variable, "http://127.0.0.1:9")
        patch.setenv("no_proxy", "127.0.0.1,localhost")
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, checked_connection(getattr(socket.socket, name)))
        patch.setattr(socket, "getaddrinfo", checked_look_up)
        yield
    shutil.rmtree(home, ignore_errors=True)
    left = written_by_default() - before
    assert not left, f"the tests left {', '.join(map(str, left))}"
