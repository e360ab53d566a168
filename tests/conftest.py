"""Failures in the modules that tests share show the values, as those in a test do."""

import pytest

pytest.register_assert_rewrite("helpers", "figure_checks")
