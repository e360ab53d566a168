"""report: pages that agree with the results, and planted faults of results that --check must see."""

from __future__ import annotations

import copy
import functools
import operator
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compare_seeds
from evidence import claims, report
from evidence.report import main, render_page
from helpers import DATA, Capture, Patch
from recorded import check
from support import results
from support.result_tables import paired_table, rows_table, seeds_table
from support.results import parse_json, save_result
from support.statistics import summarise_comparison

Json = dict[str, Any]

TABLES = {
    "steps": {"columns": ["code", "ms", "time / numpy's"], "rows": [["numpy", 12, 1.0], ["torch 2.13", 31, 2.5833]]}
}
README = """# Title
By `<!-- table: any -->` markers.

<!-- table: results/fake/r.json seeds metrics=top_accuracy,loss digits=2 -->
<!-- end -->
<!-- table: results/fake/r.json rows models=cnn --><!-- end -->
<!-- table: results/fake/r.json seeds first=2 models=cnn -->
old
<!-- end -->
<!-- pending: table: results/fake/none.json seeds -->
<!-- table: results/benchmarks/b.json table steps digits=1 -->
<!-- end -->
<!-- table: results/fake/p.json#small,results/fake/g.json rows "names=plain,first||third|" models=cnn -->
<!-- end -->
The end.
"""


def git(*words: str) -> str:
    author = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    return subprocess.run(["git", *author, *words], capture_output=True, text=True, check=True).stdout.strip()


def run(*flags: str) -> int:
    """In the working folder, and not in that of the script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "ROOT", Path.cwd())
        return main(flags)


def load(path: str) -> Json:
    document: Json = parse_json(Path(path))
    return document


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git repository with a comparison, a sweep, one of two parts, and a benchmark, made once."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copy(DATA / "fake_experiment.py", folder / "fake.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(claims, "CLAIMS", ())
        patch.setattr(claims, "REGISTERED", ())
        git("init", "--quiet")
        git("add", "fake.py")
        git("commit", "--quiet", "-m", "experiment")
        patch.setattr(compare_seeds, "environment", lambda threads: {"git_commit": git("rev-parse", "HEAD")})
        assert compare_seeds.main(["./fake.py", "--seeds", "0:3", "--name", "r", "--keep-history"]) == 0
        grid = ["--grid", "kind=a,b", "gap=x,y", "--", "--shift", "0.2"]
        assert compare_seeds.main(["./fake.py", "--seeds", "0:2", "--name", "g", *grid]) == 0
        for part, shift in (("small", "0.1"), ("large", "0.3")):
            flags = ["--seeds", "0:2", "--name", "p", "--part", part, "--resume", "--", "--shift", shift]
            assert compare_seeds.main(["./fake.py", *flags]) == 0
        command = "python fake.py --out-json results/benchmarks/b.json"
        commit = {"environment": {"git_commit": git("rev-parse", "HEAD")}}
        save_result(Path("results/benchmarks/b.json"), {"command": command, "tables": TABLES} | commit)
        Path("README.md").write_text(README)
        assert run() == 0
    return folder


@pytest.fixture
def page(made: Path, tmp_path: Path, monkeypatch: Patch) -> Path:
    """A README next to its results, all of them true; the test runs in its folder."""
    shutil.copytree(made, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setattr(claims, "CLAIMS", ())
    monkeypatch.setattr(claims, "REGISTERED", ())
    return Path("README.md")


def faults(capsys: Capture) -> list[str]:
    """The lines of a check that fails, but for the last, which counts them."""
    capsys.readouterr()
    assert run("--check") == 1
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if not line.startswith("warning: ")]
    number = re.match(r"error: (\d+) problem(s?) in the pages and results", lines[-1])
    assert number
    assert bool(number[2]) == (number[1] != "1")
    assert int(number[1]) == len(lines) - 1
    return lines[:-1]


def test_rewrite_then_check(page: Path, capsys: Capture) -> None:
    assert run("--check") == 0
    assert capsys.readouterr() == ("", "")
    page.write_text(README)
    Path("docs").mkdir()
    Path("docs/more.md").write_text("<!-- table: results/fake/r.json rows models=cnn -->?<!-- end -->")
    lines = faults(capsys)
    assert "README.md:6: table results/fake/r.json rows models=cnn differs from its file" in lines
    assert "docs/more.md:1: table results/fake/r.json rows models=cnn differs from its file" in lines
    assert len(lines) == 6
    assert page.read_text() == README
    assert run("--check") == 1
    assert "; python -m evidence.report rewrites the pages" in capsys.readouterr().err
    assert run() == 0
    assert capsys.readouterr().out == "README.md: 5 rewritten\ndocs/more.md: 1 rewritten\n"
    text = page.read_text()
    assert "By `<!-- table: any -->` markers." in text
    assert "old" not in text
    tables = {  # the marker, and a line of the table below it
        "seeds metrics=top_accuracy,loss digits=2": r"\| seed \| +capsules: top accuracy \|.*cnn: loss \|",
        "rows models=cnn": r"\| network \| parameters \| seeds \| +top accuracy \|",
        "table steps digits=1": r"\| torch 2.13 \| +31 \| +2.6 \|",
    }
    for marker, line in tables.items():
        assert re.search(rf"{re.escape(marker)} -->\n\n(\|.*\n)*{line}\n", text), marker
    cnn = [run["models"]["cnn"]["top_accuracy"] for run in load("results/fake/r.json")["settings"]["default"]["runs"]]
    assert re.search(rf"\| 1 +\| +{cnn[1]:.3f} \|\n\| mean +\| +{(cnn[0] + cnn[1]) / 2:.3f} \|", text)
    third = list(load("results/fake/g.json")["settings"].values())[2]["runs"]
    mean = sum(run["models"]["cnn"]["top_accuracy"] for run in third) / 2
    rows = re.findall(r"^\| (plain|first|third) +\| +99 \| +([23]) \| +(\S+)", text, re.MULTILINE)
    assert [row[:2] for row in rows] == [("plain", "2"), ("first", "2"), ("third", "2")]
    assert rows[2][2] == f"{mean:.3f}"
    assert run("--check") == 0
    row = next(line for line in text.splitlines() if re.match(r"\| cnn +\| +99 ", line))
    page.write_text(text.replace(row, re.sub(r"0\.\d{3}", "0.999", row, count=1)))
    assert "README.md:15: table results/fake/r.json rows models=cnn differs from its file" in faults(capsys)
    page.write_text(text + "\nAn accuracy of 0.987, ahead by 1.5 points (1.0 to 2.0).\n")
    assert faults(capsys) == ["README.md: 0.987 is in no table of the page",
                              "README.md: 1.5 points (1.0 to 2.0) is the interval of no comparison"]
    assert run("--check") == 1
    assert "rewrites the pages" not in capsys.readouterr().err  # which would not help


def test_tables_of_one_three_and_six_seeds() -> None:
    """With and without an interval, a verdict, several settings, and a model that a setting has not."""
    rng = np.random.default_rng(0)

    def comparison(n: int, **settings: tuple[str, ...]) -> Json:
        runs = {setting: [{"seed": 3 + k, "models": {
            name: {"n_params": 1234} | dict(zip(("top", "loss"), rng.random(2).tolist(), strict=True)) for name in names
        }} for k in range(n)] for setting, names in settings.items()}
        settings_of = {name: {"values": {"kind": name}, "runs": of} for name, of in runs.items()}
        document = {"headline": "top", "reference": "a", "settings": settings_of}
        return summarise_comparison(document)

    both, options = ("a", "b"), {"metrics": "top,loss", "digits": "2"}
    for n in (1, 3, 6):
        one, several = comparison(n, default=both), comparison(n, x=both, y=("a",))
        check(f"tables of {n}", {
            "seeds": [seeds_table(documents, options | {"names": names})
                      for documents, names in (([one], ""), ([several], "s"), ([one, several], "o,s"))],
            "paired": paired_table(one, options),
            "rows": [rows_table([one, several], more) for more in ({}, options | {"names": "o,s"}, {"names": "o,s|"})],
        })
    assert [n for n in range(2, 8) if "| 95 % |" in seeds_table([comparison(n, default=both)], {})] == [5, 6, 7]


def test_accuracies_in_sentences_are_those_of_the_tables() -> None:
    page = ("Capsules 0.747, CNN 0.686, 0.123 or 1.000, a rate of 0.005, `0.999`, 10.555.\n\n| cnn | 0.686 ± 0.100 |\n"
            "\n```\n0.444\n```\nBetween 0.222\n```\n0.444\n```\n")
    assert report.loose_accuracies(page) == ["0.747", "0.123", "1.000", "0.222"]


def test_intervals_in_sentences_are_those_of_the_claims() -> None:
    conditions = [
        {"n": 10, "difference": -0.0178, "low": -0.0306, "high": -0.005},
        {"n": 7, "difference": 0.0186, "low": 0.00041, "high": 0.0368},
        {"n": 8, "difference": 0.0065, "low": -0.011, "high": 0.024}, {"condition": "x"},
        {"n": 10, "low": None, "high": None},
    ]
    claimed = {"registered": [{"conditions": conditions[:1]}], "claims": [{"conditions": conditions[1:]}]}
    right = ["(−3.1 to −0.5)", "(0.5 to\n3.1)", "(−3.06 to −0.50, 10 seeds)", "(+0.0 to +3.7, 7 sets)",
             "(−1.1 to +2.4)", "(0.5 to 3.1, 10)", "(−3.1 to −0.5 points, 10 seeds, 2.0 million parameters)",
             "−1.8 (−3.1 to −0.5)", "1.8 points behind on heights (0.5 to 3.1)", "trained at 7.5 degrees (0.5 to 3.1)"]
    wrong = ["(+0.5 to +3.1)", "(−3.1 to −0.6)", "(0.5 to 3.1, ten seeds)", "(−1.1 to −2.4)", "(0.5 to 3.1, 7)",
             "0.7 points (1.1 to 2.4)", "(3.1 to 0.5)",
             "1.9 points (0.5 to 3.1)", "+1.8 (−3.1 to −0.5)", "1.78 behind on heights (+0.0 to +3.7)"]
    made = "<!-- table: x -->\n\n| (1.0 to 2.0) |\n\n<!-- end -->"
    text = " and ".join([*right, *wrong]) + f"\n{made}\n| (1.0 to 3.0) |\n{made}\n`(1.0 to 2.0)`"
    assert report.loose_intervals(text, claimed) == [*wrong, "(1.0 to 3.0)"]


MARKERS = {
    "results/none.json seeds": "cannot read results/none.json: No such file",
    "README.md seeds": "README.md is not JSON",
    "results/fake/r.json 'a": "the marker does not fit the file (ValueError: No closing quotation)",
    "results/fake/r.json pie": "'pie' is not a kind of table",
    "results/fake/r.json,results/fake/g.json table x": "a marker names a file, then a kind of table",
    "results/fake/r.json seeds columns=a": "takes no columns=",
    "results/fake/r.json seeds first=0": "digits= is a number from 0 to 9, first= one from 1 to 9",
    "results/fake/r.json seeds models=gpt": "no model gpt",
    "results/fake/r.json seeds metrics=f1": "no metric f1",
    "results/fake/p.json seeds": "has no part '', but small, large",
    "results/benchmarks/b.json seeds": "not a comparison of seeds",
    "results/benchmarks/b.json table": "a table of kind table has a name",
    "results/benchmarks/b.json table x": "no table 'x'",
    "results/fake/r.json rows names=a,b": "names= has 2 names for 1 files",
    "results/fake/g.json rows names=a|b": "names= has 2 names for 4 settings",
    "results/fake/r.json,results/fake/g.json seeds names=a,b": "the files hold other seeds",
}


def test_markers_at_fault(page: Path, capsys: Capture) -> None:
    text = "".join(f"<!-- table: {marker} --><!-- end -->\n" for marker in MARKERS)
    page.write_text(text)
    for flags in (["--check"], []):
        assert run(*flags) == 1
        lines = capsys.readouterr().err.splitlines()
        for number, message in enumerate(MARKERS.values(), 1):
            (line,) = (line for line in lines if line.startswith(f"README.md:{number}: "))
            assert message in line
    assert page.read_text() == text
    for text, message in (("<!-- table: a b -->", "has no end"), ("<!-- end -->", "closes nothing"),
                          ("<!-- table: a b --><!-- table: a b --><!-- end -->", "has no end")):
        new, stale, (fault, *_) = render_page(text)
        assert (new, stale) == (text, [])
        assert message in fault


def changed(document: Json, path: tuple[Any, ...], value: Any) -> Json:
    """A copy with another value at one place."""
    other = copy.deepcopy(document)
    functools.reduce(operator.getitem, path[:-1], other)[path[-1]] = value
    return other


COMPARE = "python compare_seeds.py ./fake.py --seeds 0:3 --name r --keep-history"


PLANTED: list[tuple[tuple[Any, ...], Any, str]] = [  # where, the wrong value, the fault
    (("reference",), "gpt", "has no top_accuracy of gpt"),
    (("seeds",), [0, 1], "its experiment or seeds are not those of its command"),
    (("experiment",), "other", "its experiment or seeds are not those of its command"),
    (("settings",), {}, "its settings are not those of its command"),
    (("settings", "default", "values"), {"kind": "b"}, "its settings are not those of its command"),
    (("settings", "default", "runs", 0, "seed"), 1, "its runs are not of its seeds"),
    (("settings", "default", "runs"), [], "its runs are not of its seeds"),
    (("settings", "default"), None, "is not what compare_seeds.py writes"),
    (("environment", "git_commit"), "a" * 12, "names no commit"),
    (("environment", "git_commit"), "a" * 40 + "-dirty", "from a tree with uncommitted changes"),
    (("command",), None, "names no command"),
    (("command",), "python none.py", "there is no script none.py here"),
    (("command",), "python -m nothing", "there is no script nothing here"),
    (("command",), COMPARE + " --no", "its command is no longer understood"),
    (("command",), COMPARE.replace("name r", "name s"), "its command writes results/fake/s.json"),
    (("command",), COMPARE + " -- --arch x", "unrecognized arguments"),
    *((("command",), f"{COMPARE} -- {words}", f"its command has --shift {told}, its configuration 0.1")
      for words, told in (("--shift=0.2", "0.2"), ("--shift a", "a"))),
    (("command",), "python fake.py --out-json results/fake/r.json", "its command makes none"),
]


def test_planted_faults(page: Path, capsys: Capture) -> None:
    """Each with a right checksum and a rewritten page, so that nothing else is at fault."""
    page.write_text(" ".join(f"results/{name}.json" for name in ("fake/r", "fake/g", "fake/p", "benchmarks/b")))
    path = Path("results/fake/r.json")
    document = load(str(path))
    for where, value, message in PLANTED:
        save_result(path, changed(document, where, value))
        lines = faults(capsys)
        assert any(message in line for line in lines), lines
        assert all(line.startswith("results/fake/r.json") for line in lines)
    save_result(path, document)
    path = Path("results/benchmarks/b.json")  # a command that compares no seeds
    save_result(path, changed(load(str(path)), ("command",), "python fake.py --out-json x.json"))
    assert faults(capsys) == [f"{path}: its command writes x.json"]
    changes: list[Json] = [{}, {"environment": {}}, {"seeds": []}, {"c": 0}]
    assert len({results.checksum(document | change) for change in changes}) == 4


@pytest.mark.parametrize(("told", "stored", "fits"), [
    ("1e-1", 0.1, True), ("10", 10, True), ("a", "a", True), ("0.1", None, False), ("a", 0.1, False),
    ("0:60", [0.0, 60.0], True), ("0:60", [0.0, 61.0], False), ("a,b", ["a"], False),
])
def test_what_a_flag_told_is_what_is_stored(told: str, stored: object, fits: bool) -> None:
    assert report.is_told(told, stored) == fits


def test_a_changed_number_a_wrong_part_and_what_is_no_result(page: Path, capsys: Capture) -> None:
    path, of_parts = Path("results/fake/r.json"), Path("results/fake/p.json")
    text = path.read_text()
    path.write_text(re.sub(r'("top_accuracy": \[?0\.\d)(\d)', lambda m: m[1] + str(9 - int(m[2])), text, count=1))
    assert f"{path} has been changed since it was written: its checksum is of another content" in faults(capsys)
    path.write_text(text)
    parts = load(str(of_parts))["parts"]
    save_result(of_parts, {"parts": dict(zip(parts, [*parts.values()][::-1], strict=True))})
    assert "results/fake/p.json#small: its command writes results/fake/p.json#large" in faults(capsys)
    contents = {
        "c": ("[]", "is no result with a checksum"), "e": ("{", "is not JSON"),
        "b": (text + " " * 200_000, f"is {len(text.encode()) + 200_000:,} bytes, above 200,000"),
        "f": ('{"x": NaN}', "holds NaN, an infinite number or one that is too long"),
    }
    for name, (content, _) in contents.items():
        Path(f"results/fake/{name}.json").write_text(content)
    git("add", "results")
    own = Path("results/fake/0-2.json")  # of a reader who has tried compare_seeds.py
    own.write_text(text)
    assert run("--check") == 1
    said = capsys.readouterr().err
    assert f"{own} is not checked: it is in no commit and on no page\n" in said
    assert f"{own} is used by no page" not in said
    for name, (_, message) in contents.items():
        assert f"results/fake/{name}.json {message}" in said
        assert f"results/fake/{name}.json is used by no page and no claim\n" in said


def test_commits(page: Path, capsys: Capture, monkeypatch: Patch) -> None:
    path = Path("results/fake/r.json")
    document, first = load(str(path)), git("rev-parse", "HEAD")
    code = Path("fake.py").read_text()
    Path("fake.py").write_text(code.replace('"shift": 0.1', '"move": 0.1'))  # its flags may be gone
    git("commit", "--quiet", "--all", "-m", "later")
    later = git("rev-parse", "HEAD")
    save_result(path, changed(document, ("environment", "git_commit"), [first, later]))
    assert run("--check") == 0
    names = "results/benchmarks/b.json, results/fake/g.json, results/fake/p.json, ..."  # r.json: one of its two commits
    assert capsys.readouterr().err == f"note: 4 of 4 results were made by earlier code: {names}\n"
    git("reset", "--quiet", "--hard", first)
    assert faults(capsys) == [f"results/fake/r.json: was made at {later}, which is not in the history"]
    # where nothing can be looked up, a warning says so; a dirty tree is still a fault
    git("clone", "--quiet", "--depth", "1", f"file://{Path.cwd()}", "../shallow")
    shutil.rmtree(".git")
    for why in ("there is no git history", "the clone is shallow", "there is no git history"):
        assert run("--check") == 0
        assert capsys.readouterr().err == f"warning: commits are not checked: {why}\n"
        if why == "there is no git history":
            shutil.copytree("../shallow/.git", ".git", dirs_exist_ok=True)
        else:
            monkeypatch.setattr(shutil, "which", lambda _: None)
    save_result(path, changed(document, ("environment", "git_commit"), f"{first}-dirty"))
    assert faults(capsys) == [f"results/fake/r.json: was made from a tree with uncommitted changes, at {first}-dirty"]


def test_the_commit_is_that_of_the_projects_own_root_and_dirty_where_code_has_changed(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    def commit(root: Path = tmp_path, *others: str) -> str | None:
        monkeypatch.setattr(results, "ROOT", root)
        return results.git_commit.__wrapped__(*others)  # which is not cached

    monkeypatch.chdir(tmp_path)
    git("init")
    for path in ("code.py", "results/a.json"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    first = git("rev-parse", "HEAD")
    Path("results/a.json").write_text("[]")
    assert (commit(), commit(tmp_path, "results")) == (first, f"{first}-dirty")
    odd = os.fsencode(tmp_path) + b"/\xff.py"  # the commit lacks it; it is no text in any locale
    os.close(os.open(odd, os.O_CREAT))
    assert commit() == f"{first}-dirty"
    os.unlink(odd)
    Path("code.py").write_text("2")
    git("add", ".")
    assert commit() == f"{first}-dirty"
    git("reset", "--hard", first)
    Path("link").symlink_to(tmp_path)  # the same root by another name
    assert commit(tmp_path / "link") == first
    assert commit(tmp_path / "results") is None  # a copy unpacked there has no commit of its own
