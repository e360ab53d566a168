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
from helpers import DATA
from recorded import check
from support import results
from support.result_tables import paired_table, rows_table, searches_table, seeds_table
from support.results import parse_json, save_result
from support.statistics import describe_sample, summarise_comparison

Json = dict[str, Any]
Capture = pytest.CaptureFixture[str]

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
<!-- table: results/fake/g.json rows models=capsules,cnn -->
<!-- end -->
<!-- pending: table: results/fake/none.json seeds -->
<!-- table: results/benchmarks/b.json table steps digits=1 -->
<!-- end -->
<!-- table: results/fake/r.json,results/fake/g.json rows "names=one setting,four" models=cnn -->
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
def page(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


def test_what_is_true_passes_without_a_word(page: Path, capsys: Capture) -> None:
    assert run("--check") == 0
    assert capsys.readouterr() == ("", "")


# --- Pages ------------------------------------------------------------------------------------------------------------


def test_rewrite_then_check(page: Path, capsys: Capture) -> None:
    page.write_text(README)
    Path("docs").mkdir()
    Path("docs/more.md").write_text("<!-- table: results/fake/r.json rows models=cnn -->?<!-- end -->")
    lines = faults(capsys)
    assert "README.md:6: table results/fake/r.json rows models=cnn differs from its file" in lines
    assert "docs/more.md:1: table results/fake/r.json rows models=cnn differs from its file" in lines
    assert len(lines) == 8
    assert page.read_text() == README
    assert run("--check") == 1
    assert "; python -m evidence.report rewrites the pages" in capsys.readouterr().err
    assert run() == 0
    assert capsys.readouterr().out == "README.md: 7 rewritten\ndocs/more.md: 1 rewritten\n"
    text = page.read_text()
    assert "By `<!-- table: any -->` markers." in text
    assert "old" not in text
    tables = {  # the marker, and a line of the table below it
        "seeds metrics=top_accuracy,loss digits=2": r"\| seed \| +capsules: top accuracy \|.*cnn: loss \|",
        "rows models=cnn": r"\| network \| parameters \| seeds \| +top accuracy \|",
        "rows models=capsules,cnn": r"\| cnn +\| +99 \| kind=a gap=y \| +2 \|.*",
        "table steps digits=1": r"\| torch 2.13 \| +31 \| +2.6 \|",
        'rows "names=one setting,four" models=cnn': r"\| four +\| +99 \| kind=a gap=x \| +2 \|.*",
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


def test_a_row_has_the_numbers_of_its_model() -> None:
    models = {name: {"n_params": 1, "k": describe_sample([mean])} for name, mean in (("a", 0.1), ("b", 0.9))}
    models["a"]["x"] = describe_sample([0.3])  # a metric that one of them has
    document = {"headline": "k", "settings": {"default": {"models": models, "runs": [{}]}}}
    table = rows_table([document], {"metrics": "x,k"})
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()[2:]]
    assert [[row[1], *row[4:6]] for row in rows] == [["a", "0.300", "0.100"], ["b", "", "0.900"]]


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


def test_a_search_has_its_grid_its_best_values_and_their_test(tmp_path: Path) -> None:
    found = {"axes": [[0.0005, 0.001], [0, 0.3], [10, 20]], "winner": [0.001, 0, 20],
             "fresh": {"seeds": 48, "held_out": 0.5123}, "doubled_length": {"change": -0.0123, "standard_error": 0.004}}
    row = searches_table({"shapes_azimuths_dense_cnn": found}).splitlines()[2]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    expected = ["drawn shapes, azimuths: dense CNN", "0.0005, **0.001**", "**0**, 0.3", "10, **20**",
                "0.512 (48 seeds)"]
    assert cells == [*expected, "-1.2 ± 0.4"]
    del found["doubled_length"]  # as of digits
    save_result(path := tmp_path / "shapes_azimuths_dense_cnn.json", found)
    save_result(other := tmp_path / "voxels_azimuths_dense_cnn.json", found)
    *_, row, last = report.make_table([str(path), str(other)], "searches", None, {}).splitlines()
    assert [cell.strip() for cell in row[1:-1].split("|")] == [*expected, "not tried"]
    assert last.startswith("| the write-up's objects, azimuths: dense CNN |")


def test_a_page_has_the_claims_that_are_its_own(tmp_path: Path) -> None:
    claim = {"verdict": "holds", "paper": "x", "conditions": []}
    own = {kind: [claim | {"claim": f"{kind} of {page}", "page": page} for page in ("a.md", "b.md")]
           for kind in ("claims", "registered")}
    save_result(path := tmp_path / "claims.json", own)
    for kind, more in (("claims", ", exploratory"), ("registered", "")):
        of_page, of_all = (report.make_table([str(path)], kind, None, page) for page in ({"page": "b.md"}, {}))
        assert re.findall(r"\*.*", of_page) == [f"*{kind} of b.md*{more}: **holds**. The paper: x."]
        assert re.findall(r"of (\w)\.md", of_all) == ["a", "b"]


def test_accuracies_in_sentences_are_those_of_the_tables() -> None:
    page = """Capsules 0.747, CNN 0.686, 0.123 or 1.000, a rate of 0.005, `0.999`, 10.555.

| model | accuracy |
|---|---|
| cnn | 0.686 ± 0.100 |

```
0.444
```
Between 0.222
```
0.444
```
"""
    assert report.loose_accuracies(page) == ["0.747", "0.123", "1.000", "0.222"]


def test_numbers_of_sentences_that_are_nowhere_else_are_faults(page: Path, capsys: Capture) -> None:
    page.write_text(page.read_text() + "\nAn accuracy of 0.987, ahead by 1.5 points (1.0 to 2.0).\n")
    assert faults(capsys) == ["README.md: 0.987 is in no table of the page",
                              "README.md: 1.5 points (1.0 to 2.0) is the interval of no comparison"]
    assert run("--check") == 1
    assert "rewrites the pages" not in capsys.readouterr().err  # which would not help


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
             "1.9 points (0.5 to 3.1)", "+1.8 (−3.1 to −0.5)", "1.78 behind on heights (+0.0 to +3.7)"]
    made = "<!-- table: x -->\n\n| (1.0 to 2.0) |\n\n<!-- end -->"
    text = " and ".join([*right, *wrong]) + f"\n{made}\n| (1.0 to 3.0) |\n{made}\n`(1.0 to 2.0)`"
    assert report.loose_intervals(text, claimed) == [*wrong, "(1.0 to 3.0)"]


MARKERS = {
    "results/none.json seeds": "cannot read results/none.json: No such file",
    "README.md seeds": "README.md is not JSON",
    "results/fake/r.json": "the marker does not fit the file",
    "results/fake/r.json pie": "'pie' is not a kind of table",
    "results/fake/r.json seeds extra": "a marker names a file, then a kind of table",
    "results/fake/r.json,results/fake/g.json table x": "a marker names a file, then a kind of table",
    "results/fake/r.json seeds columns=a": "takes no columns=",
    "results/fake/r.json seeds digits=x": "digits= is a number from 0 to 9",
    "results/fake/r.json seeds first=0": "first= one from 1 to 9",
    "results/fake/r.json seeds models=gpt": "no model gpt",
    "results/fake/r.json seeds metrics=f1": "no metric f1",
    "results/fake/p.json seeds": "has no part '', but small, large",
    "results/benchmarks/b.json seeds": "not a comparison of seeds",
    "results/benchmarks/b.json table": "a table of kind table has a name",
    "results/benchmarks/b.json table x": "no table 'x'",
    "results/fake/r.json rows names=a,b": "names= has 2 names for 1 files",
    "results/fake/g.json rows names=a|b": "names= has 2 names for 4 settings",
    "results/fake/r.json 'a": "No closing quotation",
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: results/fake/r.json seeds -->", "has no end"),
        ("<!-- end -->", "closes nothing"),
        ("<!-- table: a b --><!-- table: a b --><!-- end -->", "has no end"),
    ],
)
def test_markers_that_do_not_close(text: str, message: str) -> None:
    page, stale, faults = render_page(text)
    assert (page, stale) == (text, [])
    assert message in faults[0]


def test_seeds_of_several_files_stand_side_by_side() -> None:
    def document(factor: float, seeds: tuple[int, ...] = (1, 2)) -> Json:
        runs = [{"seed": k, "models": {"capsules": {"accuracy": factor * k}}} for k in seeds]
        return {"headline": "accuracy", "settings": {"default": {"models": runs[0]["models"], "runs": runs}}}

    table = seeds_table([document(0.1), document(0.3)], {"names": "routed,even", "digits": "1"})
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.split("\n")]
    assert rows[0] == ["seed", "routed: accuracy", "even: accuracy"]
    assert rows[2:5] == [["1", "0.1", "0.3"], ["2", "0.2", "0.6"], ["mean", "0.2", "0.4"]]
    with pytest.raises(OSError, match="other seeds"):
        seeds_table([document(0.1), document(0.3, (1, 3))], {"names": "routed,even"})
    with pytest.raises(OSError, match="1 names for 2 files"):
        seeds_table([document(0.1), document(0.3)], {"names": "routed"})


# --- Planted faults ---------------------------------------------------------------------------------------------------


def changed(document: Json, path: tuple[Any, ...], value: Any) -> Json:
    """A copy with another value at one place."""
    other = copy.deepcopy(document)
    functools.reduce(operator.getitem, path[:-1], other)[path[-1]] = value
    return other


COMPARE = "python compare_seeds.py ./fake.py --seeds 0:3 --name r --keep-history"


PLANTED: list[tuple[tuple[Any, ...], Any, str]] = [  # where, the wrong value, the fault
    (("reference",), "gpt", "has no top_accuracy of gpt"),
    (("headline",), "f1", "has no f1 of capsules"),
    (("seeds",), [0, 1], "its experiment or seeds are not those of its command"),
    (("experiment",), "other", "its experiment or seeds are not those of its command"),
    (("settings",), {}, "its settings are not those of its command"),
    (("settings", "default", "values"), {"kind": "b"}, "its settings are not those of its command"),
    (("settings", "default", "runs", 0, "seed"), 1, "its runs are not of its seeds"),
    (("settings", "default", "runs"), [], "its runs are not of its seeds"),
    (("settings", "default"), None, "is not what compare_seeds.py writes"),
    (("settings", "default"), {"values": {}, "runs": [], "failures": [{"seed": k} for k in range(3)]}, "(IndexError"),
    (("environment", "git_commit"), None, "names no commit"),
    (("environment", "git_commit"), "a" * 12, "names no commit"),
    (("environment", "git_commit"), "a" * 40, "which is not in the history"),
    (("environment", "git_commit"), "a" * 40 + "-dirty", "from a tree with uncommitted changes"),
    (("command",), None, "names no command"),
    (("command",), "make all", "names no command"),
    (("command",), "python none.py", "there is no script none.py here"),
    (("command",), "python -m nothing", "there is no script nothing here"),
    (("command",), COMPARE + " --no", "its command is no longer understood"),
    (("command",), COMPARE.replace("name r", "name s"), "its command writes results/fake/s.json"),
    (("command",), COMPARE + " --part x", "its command writes results/fake/r.json#x"),
    (("command",), COMPARE + " -- --arch x", "unrecognized arguments"),
    (("command",), COMPARE + " -- --shift=0.2", "its command has --shift 0.2, its configuration 0.1"),
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
        assert any(line.startswith("results/fake/r.json") and message in line for line in lines), lines
        assert all(line.startswith("results/fake/r.json") for line in lines)


@pytest.mark.parametrize(
    ("told", "stored", "fits"),
    [("1e-1", 0.1, True), ("0.1", 0.2, False), ("10", 10, True), ("a", "a", True), ("a", "b", False),
     ("0:60", [0.0, 60.0], True), ("0:60", [0.0, 61.0], False), ("a,b", ["a", "b"], True), ("a,b", ["a"], False),
     ("0.1", None, False), ("a", 0.1, False)],
)
def test_what_a_flag_told_is_what_is_stored(told: str, stored: object, fits: bool) -> None:
    assert report.is_told(told, stored) == fits


def test_a_changed_number_a_wrong_part_and_what_is_no_result(page: Path, capsys: Capture) -> None:
    path = Path("results/fake/r.json")
    text = path.read_text()
    path.write_text(re.sub(r'("top_accuracy": \[?0\.\d)(\d)', lambda m: m[1] + str(9 - int(m[2])), text, count=1))
    assert f"{path} has been changed since it was written: its checksum is of another content" in faults(capsys)
    path.write_text(text)
    parts = load("results/fake/p.json")
    swapped = {"parts": dict(zip(parts["parts"], [*parts["parts"].values()][::-1], strict=True))}
    save_result(Path("results/fake/p.json"), swapped)
    assert "results/fake/p.json#small: its command writes results/fake/p.json#large" in faults(capsys)
    save_result(Path("results/fake/p.json"), parts)
    contents = {
        "c": ("[]", "is no result with a checksum"), "e": ("{", "is not JSON"),
        "b": (text + " " * 200_000, f"is {len(text.encode()) + 200_000:,} bytes, above 200,000"),
        "f": ('{"x": NaN}', "holds NaN, an infinite number or one that is too long"),
        "k": ('{"command": 3}', "is no result with a checksum"),
    }
    for name, (content, _) in contents.items():
        Path(f"results/fake/{name}.json").write_text(content)
    own = Path("results/fake/0-2.json")  # of a reader who has tried compare_seeds.py
    own.write_text(text)
    git("add", "results")
    git("reset", "--quiet", str(own))
    assert run("--check") == 1
    said = capsys.readouterr().err
    assert f"{own.as_posix()} is not checked: it is in no commit and on no page\n" in said
    assert f"{own.as_posix()} is used by no page" not in said
    own.unlink()
    lines = faults(capsys)
    for name, (_, message) in contents.items():
        assert any(line.startswith(f"results/fake/{name}.json {message}") for line in lines), name
        assert f"results/fake/{name}.json is used by no page and no claim" in lines


def test_commits(page: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("results/fake/r.json")
    document, first = load(str(path)), git("rev-parse", "HEAD")
    Path("fake.py").write_text(Path("fake.py").read_text() + "# later\n")
    git("commit", "--quiet", "--all", "-m", "later")
    later = git("rev-parse", "HEAD")
    save_result(path, changed(document, ("environment", "git_commit"), [first, later]))
    assert run("--check") == 0
    assert "note: 4 of 4 results were made by earlier code" in capsys.readouterr().err  # r.json: one of its two commits
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


def test_results_older_than_the_code_are_listed_and_their_flags_may_be_gone(page: Path, capsys: Capture) -> None:
    page.write_text(page.read_text().replace("benchmarks/b.json", "fake/r.json", 1))
    Path("fake.py").write_text(Path("fake.py").read_text().replace('"shift": 0.1', '"move": 0.1'))
    git("add", "results")
    assert run("--check") == 1
    names = "results/benchmarks/b.json, results/fake/g.json, results/fake/p.json, ..."
    err = capsys.readouterr().err
    assert err.startswith(f"note: 4 of 4 results were made by earlier code: {names}\n")
    assert "results/benchmarks/b.json is used by no page and no claim\n" in err
    assert "understood" not in err


def test_what_a_claim_names_is_used(page: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    page.write_text("")
    shutil.copytree("results/fake", "results/search")
    git("add", "results")
    c = claims.Condition("x", "fake/r.json", "capsules", "cnn", "loss", "0:1", searches=("g.json", "p.json"))
    for which, used in (("REGISTERED", {"fake/r", "search/g", "search/p"}), ("CLAIMS", {"fake/r"})):
        with monkeypatch.context() as patch:
            patch.setattr(claims, which, (claims.Claim("", "", "", (c,)),))
            patch.setattr(report, "make_claims", lambda: {"registered": [], "claims": []})
            said = "\n".join(faults(capsys))
        files = {f"{folder}/{name}" for folder in ("fake", "search") for name in "rgp"}
        assert {file for file in files if f"results/{file}.json is used by no page" not in said} == used


def test_the_commit_is_that_of_the_projects_own_root_and_dirty_where_code_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit(root: Path = tmp_path, *others: str) -> str | None:
        monkeypatch.setattr(results, "ROOT", root)
        return results.git_commit.__wrapped__(*others)  # which is not cached

    monkeypatch.chdir(tmp_path)
    git("init")
    code, result, new = Path("code.py"), Path("results/a.json"), Path("deep/new.py")
    for folder in ("results", "deep"):
        Path(folder).mkdir()
    code.write_text("1")
    result.write_text("{}")
    git("add", ".")
    git("commit", "-m", "first")
    first = git("rev-parse", "HEAD")
    result.write_text("[]")
    assert (commit(), commit(tmp_path, "results")) == (first, f"{first}-dirty")
    new.touch()  # the commit lacks it
    assert commit() == f"{first}-dirty"
    new.unlink()
    code.write_text("2")
    git("add", ".")
    assert commit() == f"{first}-dirty"
    git("reset", "--hard", first)
    git("config", "core.quotepath", "false")
    odd = os.fsencode(tmp_path) + "/ä".encode("latin-1") + b"\xff.py"  # is no text in any locale
    os.close(os.open(odd, os.O_CREAT))
    assert commit() == f"{first}-dirty"
    os.unlink(odd)
    Path("link").symlink_to(tmp_path)  # the same root by another name
    assert commit(tmp_path / "link") == first
    assert commit(tmp_path / "results") is None  # a copy unpacked there has no commit of its own


def test_a_checksum_is_of_all_but_itself() -> None:
    document: Json = {"b": 1, "environment": {"x": 1}}
    changes: list[Json] = [{}, {"environment": {}}, {"b": 2}, {"c": 0}]
    found = {results.checksum(document | change) for change in changes}
    assert len(found) == 4
    assert results.checksum(document | {"checksum": "x"}) == results.checksum(document)


def test_stored_values_that_are_not_the_computed_ones_are_seen() -> None:
    whole: Json = {"claims": [{"low": 0.1, "n": 3}, {"low": -0.2, "n": 4}], "word": "equal"}
    assert report.is_same(whole, copy.deepcopy(whole))
    for other in (
        whole | {"claims": whole["claims"][:1]}, whole | {"claims": [*whole["claims"], {}]}, whole | {"word": "holds"},
        whole | {"claims": whole["claims"][::-1]}, {"claims": whole["claims"]}, whole | {"more": 1},
        whole | {"claims": [{"low": 0.1001, "n": 3}, whole["claims"][1]]},
        whole | {"claims": [{"low": 0.1, "n": 3.0}, whole["claims"][1]]},
    ):
        assert not report.is_same(whole, other), other
        assert not report.is_same(other, whole), other
