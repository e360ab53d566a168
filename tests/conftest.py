"""Failures in the modules that tests share show the values, as those in a test do. A run says whether it met MNIST."""

import os

import pytest

# Before numpy is imported: a process for each core needs no more, and the bits of a sum depend on the threads.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

pytest.register_assert_rewrite("helpers", "figure_checks")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    from helpers import MNIST, SMALLNORB

    for name, folder in (("MNIST", MNIST), ("smallNORB", SMALLNORB)):
        found = f"real files in {folder}" if folder.is_dir() else "absent, its tests are skipped"
        terminalreporter.write_line(f"{name}: {found} (CAPSULES_DATA names another folder)")
