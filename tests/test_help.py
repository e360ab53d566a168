"""The help of the scripts that are no experiment: report.py, compare_seeds.py and the drawing of toys and explorers."""

from __future__ import annotations

import importlib
import re
import shlex
import sys

import pytest

from helpers import ROOT

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
SCRIPTS = [path.stem for path in sorted(ROOT.glob("*.py")) if "\ndef make_parser(" in path.read_text(encoding="utf-8")]
TIME = re.compile(r": about \d+ (seconds?|minutes?|hours?)\.$")


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name: str, capsys: Capture, monkeypatch: Patch) -> None:
    """--help: at most ten flags, three examples that the script takes, with their times, and where results go.
    --help-all: every flag. What a flag does is said in sentences."""
    monkeypatch.setenv("COLUMNS", "120")
    script = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    parser, shown = script.make_parser(), {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit, match=r"^0$"):
            script.main([flag])
        shown[flag] = capsys.readouterr().out
        assert shown[flag].startswith("usage: ")
    flags = {
        text: set(re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)", shown[text], re.MULTILINE)) for text in shown
    }  # fmt: skip
    assert flags["--help-all"] == {a.option_strings[-1] for a in parser._actions if a.option_strings}
    assert parser.common <= flags["--help"] <= flags["--help-all"]
    assert 1 <= len(flags["--help"] - {"--help", "--help-all"}) <= 10
    for action in parser._actions:
        text = (action.help or "") % {**vars(action), "prog": parser.prog}
        assert re.match(r"[A-Z][^\n]*\.$", text), f"{action.dest}: {text}"
    assert len(parser.examples) == 3
    for example, text in parser.examples:
        assert TIME.search(text), text
        assert f"{parser.prog} {example}".strip() in shown["--help"]
        argv = shlex.split(example)
        parser.parse_args(argv[: argv.index("--")] if "--" in argv else argv)
    assert (parser.epilog or "").splitlines()[0] in shown["--help"]
