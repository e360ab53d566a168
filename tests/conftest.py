"""Failures in the modules that tests share show the values, as those in a test do. A run says whether it met MNIST."""

import pytest

pytest.register_assert_rewrite("helpers", "figure_checks")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    from helpers import MNIST

    where = f"tested on the real files in {MNIST}" if MNIST.is_dir() else "absent, tests have generated digits alone"
    terminalreporter.write_line(f"MNIST: {where}")
