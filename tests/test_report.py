"""report: pages that agree with the results, and planted faults of results that --check must see."""

from __future__ import annotations

import copy
import functools
import json
import operator
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import compare_seeds
import report
from helpers import DATA, run_script
from report import main, render_page
from support.results import code_fingerprint, save_result
from support.statistics import describe_sample

Json = dict[str, Any]

TABLES = {
    "steps": {"columns": ["code", "ms", "time / numpy's"], "rows": [["numpy", 12, 1.0], ["torch 2.13", 31, 2.5833]]}
}
README = """# Title
By `<!-- table: any -->` markers.

<!-- table: results/fake/r.json seeds metrics=top_accuracy,loss digits=2 -->
<!-- end -->
<!-- table: results/fake/r.json summary models=cnn --><!-- end -->
<!-- table: results/fake/r.json paired -->
old
<!-- end -->
<!-- table: results/fake/g.json grid models=capsules,cnn -->
<!-- end -->
<!-- table: results/benchmarks/b.json table steps "columns=code,time / numpy's" digits=1 -->
<!-- end -->
<!-- table: results/fake/r.json,results/fake/g.json rows "names=one setting,four" models=cnn -->
<!-- end -->
<!-- table: results/fake/r.json,results/fake/g.json rows "names=plain,first||third|" models=cnn -->
<!-- end -->
The end: results/fake/one.json.
"""


def git(*words: str) -> str:
    author = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    return subprocess.run(["git", *author, *words], capture_output=True, text=True, check=True).stdout.strip()


def run(*flags: str) -> int:
    return main([*flags, "--root", "."])


def load(path: str) -> Json:
    document: Json = json.loads(Path(path).read_text())
    return document


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git repository with two comparisons, a single run and a benchmark, made once."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copy(DATA / "fake_experiment.py", folder / "fake.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(compare_seeds, "draw", lambda *_: None)
        git("init", "--quiet")
        git("add", "fake.py")
        git("commit", "--quiet", "-m", "experiment")
        patch.setenv("FAKE_COMMIT", git("rev-parse", "HEAD"))
        assert compare_seeds.main(["./fake.py", "--seeds", "0:3", "--name", "r", "--keep-history"]) == 0
        grid = ["--grid", "kind=a,b", "gap=x,y", "--", "--shift", "0.2"]
        assert compare_seeds.main(["./fake.py", "--seeds", "0:2", "--name", "g", *grid]) == 0
        one = ["python", "fake.py", "--seed", "3", "--out-json", "results/fake/one.json"]
        subprocess.run(["python3", *one[1:]], check=True)
        Path("fake.py").touch()
        save_result(Path("results/fake/one.json"), load("results/fake/one.json") | {"command": " ".join(one)})
        Path("results/benchmarks").mkdir()
        benchmark = {
            "command": "python -m benchmarks --only smallnorb --out results/benchmarks/b.json",
            "tables": TABLES,
        }
        commit = {"environment": {"git_commit": git("rev-parse", "HEAD")}}
        save_result(Path("results/benchmarks/b.json"), benchmark | commit)
        Path("README.md").write_text(README)
        assert run() == 0
    return folder


@pytest.fixture
def page(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A README next to its results, all of them true; the test runs in its folder."""
    shutil.copytree(made, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return Path("README.md")


def faults(capsys: pytest.CaptureFixture[str], *, warnings: bool = False) -> list[str]:
    """The lines of a check that fails, but for the last, which counts them."""
    capsys.readouterr()
    assert run("--check") == 1
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    faults = [line for line in lines if not line.startswith("warning: ")]
    number = re.match(r"error: (\d+) problem", faults[-1])
    assert number
    assert int(number[1]) == len(faults) - 1
    return lines if warnings else faults[:-1]


def test_what_is_true_passes_without_a_word(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--check") == 0
    assert capsys.readouterr() == ("", "")


# ----------------------------------------------------------------------------------------------------------------------
# Pages
# ----------------------------------------------------------------------------------------------------------------------


def test_rewrite_then_check(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page.write_text(README)
    Path("docs").mkdir()
    Path("docs/more.md").write_text("<!-- table: results/fake/r.json summary models=cnn -->?<!-- end -->")
    lines = faults(capsys)
    assert "README.md:6: table results/fake/r.json summary models=cnn differs from its file" in lines
    assert "docs/more.md:1: table results/fake/r.json summary models=cnn differs from its file" in lines
    assert len(lines) == 8
    assert page.read_text() == README
    assert run() == 0
    assert capsys.readouterr().out == "README.md: 7 rewritten\ndocs/more.md: 1 rewritten\n"
    assert re.search(r"\| cnn +\| +99 \|", Path("docs/more.md").read_text())
    text = page.read_text()
    assert "By `<!-- table: any -->` markers." in text
    assert re.search(r"\| seed \| +capsules: top_accuracy \|.*cnn: loss \|\n\| ---- \|", text)
    assert re.search(r"summary models=cnn -->\n\n\| model \| parameters \| +top_accuracy \|\n", text)
    heads = [f"{what}: top_accuracy" for what in ("capsules", "cnn", "capsules − cnn")]
    assert re.search(rf"\| kind \| gap \| seeds \| +{heads[0]} \| +{heads[1]} \| +{heads[2]} \|", text)
    assert re.search(r"\| cnn +\| top_accuracy \| .* \| +3 of 3 \| 0.25 \| +\d+ % \|  higher \|", text)
    assert (
        "| code       | time / numpy's |\n| ---------- | -------------: |\n"
        "| numpy      |            1.0 |\n| torch 2.13 |            2.6 |\n\n<!--" in text
    )
    assert re.search(r"\| network +\| parameters \| +setting \| seeds \| +top_accuracy \|\n", text)
    assert re.search(
        r"\| one setting +\| +99 \| +\| +3 \| 0\.\d+ ± 0\.\d+ \|\n\| four +\| +99 \| kind=a gap=x \| +2 \|", text
    )
    assert len(re.findall(r"^\| four ", text, re.MULTILINE)) == 4
    settings = load("results/fake/g.json")["settings"]
    third = list(settings.values())[2]["models"]["cnn"]["top_accuracy"]["mean"]
    rows = re.findall(r"^\| (plain|first|third) +\| +99 \| +([23]) \| +(\S+)", text, re.MULTILINE)
    assert [row[:2] for row in rows] == [("plain", "3"), ("first", "2"), ("third", "2")]
    assert rows[2][2] == f"{third:.3f}"
    assert "old" not in text
    assert run("--check") == 0
    assert run() == 0
    assert page.read_text() == text
    mean = f"{load('results/fake/r.json')['settings']['default']['models']['cnn']['top_accuracy']['mean']:.3f}"
    row = next(line for line in text.splitlines() if re.match(r"\| cnn +\| +99 ", line))
    page.write_text(text.replace(row, row.replace(mean, "0.999")))
    assert faults(capsys) == ["README.md:16: table results/fake/r.json summary models=cnn differs from its file"]


def test_accuracies_in_sentences_are_those_of_the_tables() -> None:
    page = """Capsules 0.747, CNN 0.686, a rate of 0.005, `0.999`, 10.555.

| model | accuracy |
|---|---|
| cnn | 0.686 ± 0.100 |

```
0.444
```
"""
    assert report.loose_accuracies(page) == ["0.747"]


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("<!-- table: results/none.json seeds --><!-- end -->", "cannot read results/none.json: No such file"),
        ("<!-- table: README.md seeds --><!-- end -->", "README.md is not JSON"),
        ("<!-- table: results/fake/r.json --><!-- end -->", "names a file, then a kind"),
        ("<!-- table: results/fake/r.json pie --><!-- end -->", "'pie' is not a kind of table"),
        ("<!-- table: results/fake/r.json seeds extra --><!-- end -->", "'extra' is not an option"),
        ("<!-- table: results/fake/r.json seeds columns=a --><!-- end -->", "takes no columns="),
        ("<!-- table: results/fake/r.json seeds digits=x --><!-- end -->", "digits= is a number"),
        ("<!-- table: results/fake/r.json seeds models=gpt --><!-- end -->", "no model gpt"),
        ("<!-- table: results/fake/r.json seeds metrics=f1 --><!-- end -->", "no metric f1"),
        ("<!-- table: results/fake/g.json seeds --><!-- end -->", "holds 4 settings: add setting=NAME"),
        ("<!-- table: results/fake/g.json seeds setting=z --><!-- end -->", "no setting 'z'"),
        ("<!-- table: results/benchmarks/b.json seeds --><!-- end -->", "not a comparison of seeds"),
        ("<!-- table: results/benchmarks/b.json grid --><!-- end -->", "not a comparison of seeds"),
        ("<!-- table: results/benchmarks/b.json table x --><!-- end -->", "no table 'x'"),
        ("<!-- table: results/benchmarks/b.json table steps columns=x --><!-- end -->", "no column x"),
        ("<!-- table: results/fake/r.json study --><!-- end -->", "the file has no routing study of capsules"),
        ("<!-- table: results/fake/r.json rows names=a,b --><!-- end -->", "names= has 2 names for 1 files"),
        (
            "<!-- table: results/fake/g.json rows names=a|b --><!-- end -->",
            "2 names for the 4 settings of results/fake/g",
        ),
        ("<!-- table: results/fake/r.json rows metrics=f1 --><!-- end -->", "no metric f1"),
        ("<!-- table: results/fake/r.json rows models=gpt --><!-- end -->", "no metric top_accuracy"),
        ("<!-- table: results/fake/r.json,none.json rows --><!-- end -->", "cannot read none.json"),
        ("<!-- table: results/benchmarks/b.json rows --><!-- end -->", "not a comparison of seeds"),
        ("<!-- table: results/fake/r.json rows setting=a --><!-- end -->", "takes no setting="),
        ("<!-- table: results/fake/r.json rows digits=x --><!-- end -->", "digits= is a number"),
        ("<!-- table: results/fake/r.json baselines --><!-- end -->", "does not fit"),
        ("<!-- table: results/fake/r.json 'a --><!-- end -->", "No closing quotation"),
        ("<!-- table: results/fake/r.json seeds -->", "has no end"),
        ("<!-- end -->", "closes nothing"),
        ("<!-- table: a b --><!-- table: a b --><!-- end -->", "stands before the end of <!-- table: a b -->"),
    ],
)
def test_markers_at_fault(page: Path, capsys: pytest.CaptureFixture[str], marker: str, message: str) -> None:
    text = f"one\n{marker}\n"
    page.write_text(text)
    for flags in (["--check"], []):
        assert run(*flags) == 1
        faults = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning")]
        assert message in faults[0]
        assert faults[0].startswith("README.md:2: ")
        assert faults[-1].startswith("error: ")
    assert page.read_text() == text


def test_text_without_markers_stays() -> None:
    text = "a <!-- comment --> b <!-- ending --> c"
    assert render_page(text) == (text, [], [])


def test_page_that_cannot_be_read(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, message in ((b"\xff\xfe", "it is not text in UTF-8"), (None, "No such file or directory")):
        page.unlink()
        if content:
            page.write_bytes(content)
        for flags in (["--check"], []):
            assert run(*flags) == 1
            assert capsys.readouterr().err == f"error: cannot read README.md: {message}\n"
    page.mkdir()
    assert run() == 1
    assert capsys.readouterr().err == "error: cannot read README.md: Is a directory\n"
    assert main(["--root", "nowhere"]) == 1
    assert capsys.readouterr().err == "error: cannot read nowhere: No such file or directory\n"


def test_help_shows_the_markers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "<!-- table: results/EXPERIMENT/FILE.json" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------------
# Planted faults
# ----------------------------------------------------------------------------------------------------------------------


def numbers(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all numbers in a JSON document."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from numbers(value, (*path, key))
    if isinstance(node, int | float):
        yield path


def changed(document: Json, path: tuple[Any, ...], value: Any) -> Json:
    """A copy with another value at one place."""
    other = copy.deepcopy(document)
    functools.reduce(operator.getitem, path[:-1], other)[path[-1]] = value
    return other


def has_fault(path: Path) -> bool:
    return next(report.check_result(path, False), None) is not None


@pytest.mark.parametrize("name", ["fake/r", "fake/g", "fake/one", "benchmarks/b"])
def test_every_changed_number_is_seen(page: Path, name: str) -> None:
    """At first with the old checksum. Then with a new one: only what nothing follows from may pass."""
    path = Path(f"results/{name}.json")
    document = load(str(path))
    assert list(report.check_result(path, False)) == []
    passed = set()
    for place in numbers(document):
        if "kind=b gap=x" in place or "kind=b gap=y" in place:  # as the other two of the sweep
            continue
        number: Any = functools.reduce(operator.getitem, place, document)
        other = changed(document, place, number + (1 if isinstance(number, int) else 1e-6))
        path.write_text(json.dumps(other))
        assert has_fault(path), place
        save_result(path, other)
        if not has_fault(path):
            passed.add(".".join(str(key) for key in place))
    if "best" in document:
        save_result(path, changed(document, ("best", "capsules"), "kind=a gap=y"))
        assert any("best.capsules is kind=a gap=y" in fault for fault in report.check_result(path, False))
    raw = {
        "fake/r": r"chance|settings\.default\.(config\.|runs\.\d\.history\.).*",
        "fake/g": r"chance|settings\.kind=. gap=.\.config\..*",
    }
    assert passed
    for leaf in passed:
        assert re.fullmatch(raw.get(name, ".*"), leaf), leaf


def set_in(*path: Any, value: Any) -> Callable[[Json], Json]:
    return lambda document: changed(document, path, value)


PAIR = ("settings", "default", "paired", "cnn", "top_accuracy")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_in(*PAIR, "verdict", value="undecided"), "setting default: paired.cnn.top_accuracy.verdict is undecided"),
        (set_in(*PAIR, "verdict", value="lower"), "paired.cnn.top_accuracy.verdict is lower, but its runs give higher"),
        (set_in(*PAIR, "higher", value=2), "paired.cnn.top_accuracy.higher is 2, but its runs give 3"),
        (set_in(*PAIR, "p", value=0.05), "paired.cnn.top_accuracy.p is 0.05, but its runs give 0.25"),
        (set_in(*PAIR, "error_reduction", value=None), "error_reduction is None"),
        (set_in(*PAIR[:3], value={}), "paired.cnn is None"),
        (set_in("reference", value="cnn"), "paired.cnn is {"),
        (set_in("reference", value="gpt"), "has no top_accuracy of gpt"),
        (set_in("headline", value="f1"), "has no f1 of capsules"),
        (set_in("seeds", value=[0, 1]), "its experiment or seeds are not those of its command"),
        (set_in("experiment", value="other"), "its experiment or seeds are not those of its command"),
        (set_in("axes", value=[["kind"]]), "its axes are not those of its command"),
        (set_in("settings", value={}), "its settings are not those of its command"),
        (set_in("settings", "default", "args", value=["--kind=b"]), "its flags are not those of its command"),
        (set_in("settings", "default", "runs", 0, "seed", value=1), "its runs are not of its seeds"),
        (set_in("settings", "default", "runs", 1, "models", "cnn", "n_params", value=5), "n_params"),
        (set_in("settings", "default", "runs", value=[]), "is not what compare_seeds.py writes"),
        (set_in("settings", "default", value=None), "is not what compare_seeds.py writes"),
        (set_in("environment", "git_commit", value=None), "names no commit"),
        (set_in("environment", "git_commit", value="--all"), "names no commit"),
        (set_in("environment", "git_commit", value="a" * 40), "which is not in the history"),
        (set_in("environment", "git_commit", value="a" * 40 + "-dirty"), "from a tree with uncommitted changes"),
        (set_in("environment", "git_commit", value=[]), "names no commit"),
        (set_in("environment", value=None), "names no commit"),
        (set_in("command", value=None), "names no command"),
        (set_in("command", value="make all"), "names no command"),
        (set_in("command", value="python 'a"), "names no command"),
        (set_in("command", value="python none.py"), "there is no script none.py here"),
        (set_in("command", value="python ../fake.py"), "there is no script ../fake.py here"),
        (set_in("command", value="python -m nothing"), "there is no package nothing here"),
        (set_in("command", value="python -m json"), "there is no package json here"),
        (set_in("command", value="python broken.py"), "broken.py cannot be imported: ZeroDivisionError"),
        (set_in("command", value="python compare_seeds.py ./fake.py --no"), "its command is no longer understood"),
        (set_in("command", value="python compare_seeds.py ./fake.py --name s"), "command writes results/fake/s.json"),
        (set_in("command", value="python compare_seeds.py ./fake.py --name r --metric loss"), "its headline is not"),
        (set_in("command", value="python compare_seeds.py ./fake.py --name r -- --arch x"), "unrecognized arguments"),
        (set_in("command", value="python fake.py --seed 0"), "its command writes no file"),
        (set_in("command", value="python fake.py --out-json results/fake/r.json"), "its command makes none"),
    ],
)  # fmt: skip
def test_planted_faults(
    page: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Json], Json], message: str
) -> None:
    """Each with a right checksum and a rewritten page, so that nothing else is at fault."""
    Path("broken.py").write_text("1 / 0")
    page.write_text("results/fake/one.json results/fake/r.json results/fake/g.json results/benchmarks/b.json")
    path = Path("results/fake/r.json")
    save_result(path, change(load(str(path))))
    lines = faults(capsys)
    assert any(line.startswith("results/fake/r.json") and message in line for line in lines), lines
    assert all(line.startswith("results/fake/r.json") for line in lines)


def test_commits(page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("results/fake/r.json")
    document, first = load(str(path)), git("rev-parse", "HEAD")
    git("commit", "--quiet", "--allow-empty", "-m", "later")
    later = git("rev-parse", "HEAD")
    save_result(path, changed(document, ("environment", "git_commit"), [first, later]))
    assert run("--check") == 0
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


def test_checkpoint_that_nobody_made(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("results/fake/one.json")
    command = "python fake.py --checkpoint best.npz --eval-only --out-json results/fake/one.json"
    document = load(str(path)) | {"command": command}
    save_result(path, document)
    unknown = "results/fake/one.json: its command reads best.npz, and nothing says how that was made"
    assert faults(capsys) == [unknown]
    for maker, fault in (
        ("python fake.py --checkpoint other.npz", "its checkpoint_command does not make best.npz"),
        ("python fake.py --checkpoint best.npz --eval-only", "its checkpoint_command does not make best.npz"),
        ("python fake.py --checkpont best.npz", "its command is no longer understood"),
    ):
        save_result(path, document | {"checkpoint_command": maker})
        assert fault in faults(capsys)[0]
    save_result(path, document | {"checkpoint_command": "python fake.py --shift 0.3 --checkpoint best.npz"})
    assert run("--check") == 0


def test_files_that_are_no_results(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, whole = Path("results/fake"), Path("results/fake/r.json").read_text()
    (folder / "a.json").mkdir()
    contents = {
        "b": whole + " " * 200_000, "c": "[]", "d": "[" * 100_000, "e": "{", "f": '{"x": NaN}', "k": '{"command": 3}',
        "h": '{"x": -Infinity}', "i": '{"x": ' + "9" * 5000 + "}", "l": '{"x": 1e999}',
    }  # fmt: skip
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(content)
    (folder / "j.json").write_bytes(b"\xff")
    lines = faults(capsys)
    no_number = "holds NaN, an infinite number or one that is too long"
    expected = {
        "a": "cannot read results/fake/a.json: Is a directory",
        "b": f"is {len(whole) + 200_000:,} bytes, above 200,000",
        "c": "is not a JSON object", "d": "is nested too deeply", "e": "is not JSON", "f": no_number, "l": no_number,
        "h": no_number, "i": no_number, "j": "is not text in UTF-8", "k": "has no checksum",
    }  # fmt: skip
    for name, message in expected.items():
        assert any(f"{name}.json" in line and message in line for line in lines), name
    assert "results/fake/b.json: its command writes results/fake/r.json" in lines
    assert len(lines) == 11 + 1 + 2 + sum("used by no page" in line for line in lines)


def test_files_that_no_page_uses_or_older_than_the_code(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page.write_text("results/fake/one.json results/fake/r.json results/fake/g.json")
    assert faults(capsys) == ["results/benchmarks/b.json is used by no page and no claim"]
    page.write_text(page.read_text() + " results/benchmarks/b.json")
    with open("fake.py", "a") as stream:
        stream.write("# a comment\n")
    assert run("--check") == 0
    assert capsys.readouterr().err == ""
    with open("fake.py", "a") as stream:
        stream.write("more = 1\n")
    assert load("results/fake/r.json")["code"] != code_fingerprint(Path("fake.py"))
    assert run("--check") == 0
    assert capsys.readouterr().err == "warning: 2 of 4 results are older than the code: fake/g.json, fake/r.json\n"


def test_commands_of_the_benchmarks_are_understood() -> None:
    for command, out in (
        ("python -m benchmarks", "results/benchmarks/steps.json"),
        ("python -m benchmarks --out x.json", "x.json"),
    ):
        assert str(report.parse_named(command).args.out) == out


def test_project_is_true() -> None:
    """As CI runs it, from any folder."""
    process = run_script("report.py", "--check")
    assert process.returncode == 0, process.stderr


def test_a_study_has_a_row_for_each_kind_of_assignments() -> None:
    names = [f"{kind}_{k}" for kind in ("iters_1", "random") for k in ("accuracy", "changed", "entropy")]
    found = {name: describe_sample([x, x + 0.1]) for x, name in enumerate(names)}
    table = report.study_table({"models": {"capsules": found | {"loss": {}}}}, report.View(["capsules"], [], 2), "")
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.split("\n") if row]
    half = "0.64"  # of 0.1 / 2 with one degree of freedom
    assert rows[2:] == [
        ["iterations: 1", f"0.05 ± {half}", f"1.05 ± {half}", f"2.05 ± {half}"],
        ["random", f"3.05 ± {half}", f"4.05 ± {half}", f"5.05 ± {half}"],
    ]
