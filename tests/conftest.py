"""Failures in the modules that tests share show the values, as those in a test do. A run says whether it met MNIST."""

import pytest

pytest.register_assert_rewrite("helpers", "figure_checks")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    from helpers import MNIST, SMALLNORB

    for name, folder in (("MNIST", MNIST), ("smallNORB", SMALLNORB)):
        found = f"real files in {folder}" if folder.is_dir() else "absent, its tests are skipped"
        terminalreporter.write_line(f"{name}: {found} (CAPSULES_DATA names another folder)")
