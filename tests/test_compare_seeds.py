"""compare_seeds: statistics, runs that die or are resumed, and the README that must agree with its results.

The experiment here is a script of a few lines that keeps the contract (flags, JSON) and trains nothing.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats

import compare_seeds
from compare_seeds import describe_sample, main, render_readme, sign_flip_p, summarise

FAKE = """
import argparse, json, os, random, signal, sys, time

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--seed", type=int)
parser.add_argument("--threads", type=int)
parser.add_argument("--out-json")
parser.add_argument("--quiet", action="store_true")
parser.add_argument("--shift", type=float, default=0.1)
parser.add_argument("--kind", default="a")
parser.add_argument("--gap", default="0:60")
parser.add_argument("--sleep", type=float, default=0)
parser.add_argument("--death", default="")
args = parser.parse_args()
with open("runs.log", "a") as log:
    print(args.seed, args.shift, args.kind, args.gap, file=log)
time.sleep(args.sleep)
if args.seed == 1 and args.death:
    print("the last words", file=sys.stderr)
    if args.death == "status":
        sys.exit(3)
    if args.death == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    if args.death == "hang":
        sys.stderr.flush()
        time.sleep(60)
    if args.death == "silence":
        sys.exit(0)
draw = random.Random(args.seed)
base = 0.5 + 0.1 * draw.random()
value = base + args.shift + 0.01 * draw.random()
if args.seed == 1 and args.death == "nan":
    value = float("nan")
model = lambda n, v: {"n_params": n, "top_accuracy": v, "loss": 1 - v, "train_seconds": time.perf_counter()}
result = {
    "experiment": "fake", "seed": args.seed, "dataset": "numbers", "config": {"seed": args.seed, "shift": args.shift},
    "models": {"capsules": model(1234, value), "cnn": model(99, base)},
    "history": {"capsules": {"loss": [1.0, 0.5]}}, "environment": {"python": "3", "git_commit": "abc"},
}
with open(args.out_json, "w") as stream:
    json.dump(result, stream)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The experiment's path; the test runs in its folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fake.py").write_text(FAKE)
    return "./fake.py"


def runs() -> list[str]:
    """What the experiment's runs have noted, sorted."""
    path = Path("runs.log")
    return sorted(path.read_text().splitlines()) if path.exists() else []


def load(path: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Path(path).read_text())
    return document


# ----------------------------------------------------------------------------------------------------------------------
# Statistics
# ----------------------------------------------------------------------------------------------------------------------


def test_sample_by_hand_and_by_scipy() -> None:
    sample = describe_sample([1.0, 2.0, 3.0, 4.0])
    half = 3.182446305 * math.sqrt(5 / 3) / 2  # t quantile for three degrees of freedom, from a printed table
    assert sample["n"] == 4
    assert sample["mean"] == 2.5
    np.testing.assert_allclose(
        [sample["sd"], sample["low"], sample["high"]], [math.sqrt(5 / 3), 2.5 - half, 2.5 + half]
    )
    values = np.random.default_rng(5).normal(size=13)
    sample, interval = describe_sample(values.tolist()), stats.ttest_1samp(values, 0).confidence_interval(0.95)
    np.testing.assert_allclose([sample["low"], sample["high"]], [interval.low, interval.high])


def test_one_value_has_no_interval_and_equal_values_a_point() -> None:
    assert describe_sample([0.25]) == {"n": 1, "mean": 0.25, "sd": None, "low": None, "high": None}
    assert describe_sample([0.25] * 3) == {"n": 3, "mean": 0.25, "sd": 0.0, "low": 0.25, "high": 0.25}


def test_sign_flips_by_hand_and_by_enumeration() -> None:
    np.testing.assert_allclose(sign_flip_p(np.array([[1.0, 2.0, 3.0], [3.0, -1.0, 2.0]])), [2 / 8, 4 / 8])
    assert sign_flip_p(np.array([[0.3]])) == [1.0]
    d = np.random.default_rng(6).normal(0.5, 1, 9)
    sums = np.array([np.dot(signs, d) for signs in itertools.product((1, -1), repeat=len(d))])
    np.testing.assert_allclose(sign_flip_p(d[None]), np.mean(np.abs(sums) >= abs(d.sum()) - 1e-12))


def test_many_seeds_use_random_flips_of_a_fixed_seed() -> None:
    d = np.random.default_rng(7).normal(0.35, 1, (1, 40))
    p = sign_flip_p(d)
    np.testing.assert_array_equal(p, sign_flip_p(d))
    np.testing.assert_allclose(p, stats.ttest_1samp(d[0], 0).pvalue, atol=0.01)


def test_pairs_and_errors() -> None:
    values = {"capsules": [0.9, 0.8, 0.85], "cnn": [0.7, 0.6, 0.95]}
    made = [{"models": {name: {"n_params": 7, "x_accuracy": v[k]} for name, v in values.items()}} for k in range(3)]
    made[0]["models"]["other"] = {"n_params": 1, "x_accuracy": 0.5}  # not in every run
    made[1]["models"]["cnn"]["extra"] = 1.0  # not of every run
    summary = summarise(made)
    assert list(summary["models"]) == ["capsules", "cnn"]
    pair = summary["paired"]["cnn"]["x_accuracy"]
    assert (pair["n"], pair["higher"], pair["p"]) == (3, 2, 0.5)
    np.testing.assert_allclose([pair["mean"], pair["error_reduction"]], [0.1, 1 - 0.15 / 0.25])


# ----------------------------------------------------------------------------------------------------------------------
# Runs
# ----------------------------------------------------------------------------------------------------------------------


def test_three_seeds(fake: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([fake, "--seeds", "0:3", "--jobs", "2", "--", "--shift", "0.2"]) == 0
    out = capsys.readouterr().out
    document = load("results/fake_0-2.json")
    assert document["command"] == "python compare_seeds.py ./fake.py --seeds 0:3 -- --shift 0.2"
    assert (document["metric"], document["dataset"], document["seeds"]) == ("top_accuracy", "numbers", [0, 1, 2])
    assert document["environment"] == {"python": "3", "git_commit": "abc"}
    entry = document["settings"]["default"]
    assert entry["config"] == {"shift": 0.2}
    assert entry["models"]["capsules"]["n_params"] == 1234
    assert [run["seed"] for run in entry["runs"]] == [0, 1, 2]
    assert "train_seconds" not in entry["runs"][0]["models"]["cnn"]
    assert "history" not in entry["runs"][0]
    values = [run["models"]["capsules"]["top_accuracy"] - run["models"]["cnn"]["top_accuracy"] for run in entry["runs"]]
    pair = entry["paired"]["cnn"]["top_accuracy"]
    interval = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    np.testing.assert_allclose([pair["mean"], pair["low"], pair["high"]], [np.mean(values), *interval])
    assert re.search(r"\| 2 +\| +0\.\d{3} \| +0\.\d{3} \|", out)
    assert "3 of 3" in out
    assert "| capsules | " in out
    figure = Path("viz/fake/seeds_0-2.png").read_bytes()
    assert figure.startswith(b"\x89PNG")
    assert len(figure) < 400_000


@pytest.mark.parametrize(
    ("configs", "title"),
    [
        ([{}], "a fake (numbers), 1 seed"),
        ([{"n_epochs": 1}], "a fake (numbers), 1 seed, 1 epoch"),
        ([{"n_epochs": 8, "n_train": 6000}], "a fake (numbers), 1 seed, 8 epochs of 6,000"),
        ([{"n_epochs": 8, "match_accuracy": 0.9}], "a fake (numbers), 1 seed"),  # stops before
        ([{"n_epochs": 8}] * 2, "a fake (numbers), 1–2 seeds, 8 epochs: means with 95 % intervals"),
        ([{"n_epochs": 8}, {"n_epochs": 9}], "a fake (numbers), 1–2 seeds: means with 95 % intervals"),
    ],
)
def test_a_figure_says_how_long_was_trained(configs: list[dict[str, Any]], title: str) -> None:
    settings = {str(k): {"config": config, "runs": [{}] * (k + 1)} for k, config in enumerate(configs)}
    assert compare_seeds.figure_title({"experiment": "a_fake", "dataset": "numbers", "settings": settings}) == title


def test_a_model_alone_is_compared_with_none(fake: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(fake).write_text(FAKE.replace(', "cnn": model(99, base)', ""))
    assert main([fake, "--seeds", "4"]) == 0
    out = capsys.readouterr().out
    assert "| capsules |" in out
    assert "Paired" not in out
    figure = Figure()
    compare_seeds.draw_pairs(figure, load("results/fake_4.json")["settings"]["default"], ["capsules"], "loss", None)
    assert len(figure.axes) == 1


def test_options_that_keep_more(fake: str) -> None:
    assert main([fake, "--seeds", "4", "--keep-history", "--keep-seconds", "--name", "n", "--metric", "loss"]) == 0
    document = load("results/fake_n.json")
    run = document["settings"]["default"]["runs"][0]
    assert run["history"] == {"capsules": {"loss": [1.0, 0.5]}}
    assert run["models"]["cnn"]["train_seconds"] > 0
    assert document["metric"] == "loss"


def test_result_does_not_depend_on_jobs(fake: str) -> None:
    written = []
    for n in ("1", "5"):
        assert main([fake, "--seeds", "0:6", "--jobs", n, "--cache", f"c{n}", "--timeout", "60"]) == 0
        written.append((Path("results/fake_0-5.json").read_bytes(), Path("viz/fake/seeds_0-5.png").read_bytes()))
    assert written[0] == written[1]
    assert len(runs()) == 12


def test_resume_runs_only_what_is_missing(fake: str) -> None:
    assert main([fake, "--seeds", "0:3"]) == 0
    assert main([fake, "--seeds", "0:5", "--resume"]) == 0
    assert [line.split()[0] for line in runs()] == ["0", "1", "2", "3", "4"]
    assert main([fake, "--seeds", "0", "--resume", "--", "--kind", "b"]) == 0  # other flags
    assert main([fake, "--seeds", "0"]) == 0  # without --resume
    assert len(runs()) == 7
    next(Path(".cache/compare_seeds").glob("fake-seed4-*")).write_text("{ half a fi")
    assert main([fake, "--seeds", "4", "--resume"]) == 0
    assert len(runs()) == 8


def test_resume_knows_the_code(fake: str) -> None:
    Path("helper.py").write_text("x = 1")
    Path(fake).write_text("import helper\n" + FAKE)
    for n, change in enumerate(("x = 1", "x = 2", "x = 2")):  # the code of a module that the script imports
        Path("helper.py").write_text(change)
        assert main([fake, "--seeds", "0", "--resume"]) == 0
        assert len(runs()) == min(n + 1, 2)
    Path(fake).write_text("import helper\n\n" + FAKE)
    assert main([fake, "--seeds", "0", "--resume"]) == 0
    assert len(runs()) == 3


@pytest.mark.parametrize(
    ("death", "message"),
    [
        ("status", "exit status 3: the last words"),
        ("signal", "killed by SIGKILL: the last words"),
        ("hang", "not finished after 1.5 s: the last words"),
        ("silence", "No such file"),
        ("nan", "capsules's top_accuracy is nan"),
    ],
)
def test_a_run_that_dies(fake: str, capsys: pytest.CaptureFixture[str], death: str, message: str) -> None:
    assert main([fake, "--seeds", "0:3", "--jobs", "3", "--timeout", "1.5", "--", f"--death={death}"]) == 1
    out, err = capsys.readouterr()
    assert "seed 1, setting default: " in err
    assert message in err
    assert err.endswith("error: 1 of 3 runs failed; the others are kept\n")
    assert "| 2 " in out
    entry = load("results/fake_0-2.json")["settings"]["default"]
    assert [run["seed"] for run in entry["runs"]] == [0, 2]
    assert [failure["seed"] for failure in entry["failures"]] == [1]
    assert message in entry["failures"][0]["error"]


def test_no_run_survives(fake: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([fake, "--seeds", "0:2", "--", "--no-such-flag"]) == 1
    assert "error: none of the 2 runs gave a result: exit status 2: " in capsys.readouterr().err
    assert not Path("results/fake_0-1.json").exists()


def test_unknown_metric(fake: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([fake, "--seeds", "0", "--metric", "f1"]) == 1
    assert "error: --metric f1 is not in the results, which have top_accuracy, loss" in capsys.readouterr().err


def test_ctrl_c_keeps_what_is_finished(fake: str) -> None:
    command = [sys.executable, compare_seeds.__file__, fake, "--seeds", "0:8", "--jobs", "2", "--", "--sleep", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        cache = Path(".cache/compare_seeds")
        while len(list(cache.glob("fake-*.json"))) < 2 and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    assert process.returncode == 130, err
    assert err.endswith("runs are finished and kept; --resume goes on from them\ninterrupted\n")
    assert (out, Path("results/fake_0-7.json").exists()) == ("", False)
    kept = len(list(cache.glob("fake-*.json")))
    assert 2 <= kept < 8
    before = len(runs())
    assert main([*command[2:-3], "--resume", "--", "--sleep", "1"]) == 0
    assert len(runs()) == before + 8 - kept


# ----------------------------------------------------------------------------------------------------------------------
# Sweeps
# ----------------------------------------------------------------------------------------------------------------------


def test_grid_and_zip(fake: str, capsys: pytest.CaptureFixture[str]) -> None:
    # values that advance together may stay
    assert main([fake, "--seeds", "0", "--name", "z", "--zip", "gap=0:60,0:90", "kind=a,a"]) == 0
    Path("runs.log").unlink()
    capsys.readouterr()
    sweep = ["--zip", "gap=0:60,0:90", "shift=0.1,0.2", "--grid", "kind=a,b"]
    assert main([fake, "--seeds", "0:2", *sweep]) == 0
    assert runs() == sorted(f"{s} {x} {k} {g}" for s in (0, 1) for g, x in (("0:60", 0.1), ("0:90", 0.2)) for k in "ab")
    document = load("results/fake_gap_shift_kind.json")
    assert document["axes"] == [["gap", "shift"], ["kind"]]
    assert list(document["settings"])[1] == "gap=0:60 shift=0.1 kind=b"
    assert document["settings"]["gap=0:90 shift=0.2 kind=a"]["args"] == ["--gap=0:90", "--shift=0.2", "--kind=a"]
    table = capsys.readouterr().out
    assert re.search(r"\| 0:90 +\| +0.2 \| +b \| +2 \| +0\.\d{3} ± 0\.\d{3} \|", table)
    assert Path("viz/fake/seeds_gap_shift_kind.png").exists()


def test_setting_without_a_result_is_left_out(fake: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([fake, "--seeds", "1", "--grid", "death=status,x"]) == 1
    assert list(load("results/fake_death.json")["settings"]) == ["death=x"]
    assert "setting death=status has no result" in capsys.readouterr().err


def test_curve_of_one_ordered_axis(fake: str) -> None:
    assert main([fake, "--seeds", "0:2", "--grid", "shift=0.1,0.2,0.3", "--figure", "f.png", "--out", "o.json"]) == 0
    assert Path("f.png").read_bytes().startswith(b"\x89PNG")
    assert len(load("o.json")["settings"]) == 3


def test_sweep_of_one_value(fake: str) -> None:
    assert main([fake, "--seeds", "0:2", "--grid", "shift=0.1"]) == 0
    assert list(load("results/fake_shift.json")["settings"]) == ["shift=0.1"]


# ----------------------------------------------------------------------------------------------------------------------
# Bad input
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "no_such_experiment",
        "FAKE --seeds 3:1",
        "FAKE --seeds one",
        "FAKE --seeds -1",
        "FAKE --seeds 1,1",
        "FAKE --seeds 0:99999999",
        "FAKE --seeds 0:300 --grid kind=1,2,3,4,5,6 gap=1,2,3,4,5,6",
        "FAKE --grid kind",
        "FAKE --grid kind=",
        "FAKE --grid kind=a,a",
        "FAKE --grid kind=a kind=b",
        "FAKE --grid seed=1,2",
        "FAKE --zip kind=a,b gap=1",
        "FAKE --grid kind=a,b -- --kind c",
        "FAKE -- --seed 4",
        "FAKE -- --out-json=x",
        "FAKE --jobs 0",
        "FAKE --jobs many",
        "FAKE --threads -1",
        "FAKE --timeout 0",
        "FAKE --timeout nan",
        "FAKE --name a/b",
        "FAKE --report",
        "--report --check",
        "--check -- --n-epochs 3",
    ],
)
def test_usage_errors(fake: str, capsys: pytest.CaptureFixture[str], flags: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(shlex.split(flags.replace("FAKE", fake)))
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert ": error: " in error
    assert error.count("\n") == 1
    assert runs() == []


def test_unwritable_output_is_found_before_a_run(fake: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("results").write_text("a file where a folder must be")
    assert main([fake, "--seeds", "0"]) == 1
    assert capsys.readouterr().err.startswith("error: cannot write results")
    assert runs() == []


def test_help_and_missing_dask(fake: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "<!-- value: results/FILE.json" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert main([fake, "--seeds", "0", "--dask", "tcp://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == "error: --dask needs Dask: pip install -r requirements-dask.txt\n"


# ----------------------------------------------------------------------------------------------------------------------
# The README
# ----------------------------------------------------------------------------------------------------------------------

BENCHMARKS = {
    "command": "python -m benchmarks",
    "tables": {
        "steps": {"columns": ["code", "ms", "time / numpy's"], "rows": [["numpy", 12, 1.0], ["torch 2.13", 31, 2.5833]]}
    },
}
README = """# Title
Held out <!-- value: results/fake_r.json capsules.top_accuracy.mean .3f --><!-- end -->, of
<!-- value: results/fake_r.json capsules.n_params ,d -->?<!-- end --> parameters, errors
<!-- value: results/fake_r.json paired.cnn.top_accuracy.error_reduction .0% --><!-- end --> fewer, p
<!-- value: results/fake_g.json paired.cnn.loss.p .2f setting="kind=b gap=x" --><!-- end -->,
ratio <!-- value: results/benchmarks.json "steps/torch 2.13/time / numpy's" .1f --><!-- end --> at
<!-- value: results/fake_r.json config.shift --><!-- end -->, by
`<!-- value: any -->` markers.

<!-- table: results/fake_r.json seeds metrics=top_accuracy,loss digits=2 -->
<!-- end -->
<!-- table: results/fake_r.json summary models=cnn --><!-- end -->
<!-- table: results/fake_r.json paired -->
old
<!-- end -->
<!-- table: results/fake_g.json grid models=capsules,cnn -->
<!-- end -->
<!-- table: results/benchmarks.json table steps "columns=code,time / numpy's" digits=1 -->
<!-- end -->
The end.
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two comparisons and a benchmark, made once."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "fake.py").write_text(FAKE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["./fake.py", "--seeds", "0:3", "--name", "r"]) == 0
        assert main(["./fake.py", "--seeds", "0:2", "--name", "g", "--grid", "kind=a,b", "gap=x,y"]) == 0
    (folder / "results/benchmarks.json").write_text(json.dumps(BENCHMARKS))
    return folder / "results"


@pytest.fixture
def readme(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A README beside its results; the test runs in its folder."""
    shutil.copytree(results, tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    Path("README.md").write_text(README)
    return Path("README.md")


def test_report_then_check(readme: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 1
    err = capsys.readouterr().err
    assert "README.md:12: table results/fake_r.json summary models=cnn differs from its file" in err
    assert err.count(" differs from its file") == 11
    assert readme.read_text() == README
    assert main(["--report"]) == 0
    text = readme.read_text()
    mean = load("results/fake_r.json")["settings"]["default"]["models"]["capsules"]["top_accuracy"]["mean"]
    assert f".mean .3f -->{mean:.3f}<!-- end -->, of" in text
    assert ",d -->1,234<!-- end -->" in text
    assert re.search(r"\.0% -->\d+%<!-- end --> fewer, p", text)
    assert ".1f -->2.6<!-- end -->" in text
    assert "config.shift -->0.1<!-- end -->, by" in text
    assert "`<!-- value: any -->` markers." in text
    assert re.search(r"\| seed \| +capsules: top_accuracy \|.*cnn: loss \|\n\| ---- \|", text)
    assert re.search(r"summary models=cnn -->\n\n\| model \| parameters \| +top_accuracy \|\n", text)
    assert re.search(r"\| kind \| gap \| seeds \| +capsules \| +cnn \| capsules − cnn \|", text)
    assert (
        "| code       | time / numpy's |\n| ---------- | -------------: |\n"
        "| numpy      |            1.0 |\n| torch 2.13 |            2.6 |\n\n<!--" in text
    )
    assert "old" not in text
    assert main(["--check"]) == 0
    assert main(["--report"]) == 0
    assert readme.read_text() == text
    readme.write_text(text.replace(f">{mean:.3f}<", ">0.999<"))
    assert main(["--check"]) == 1
    assert "README.md:2: value results/fake_r.json capsules.top_accuracy.mean .3f differs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("<!-- table: results/none.json seeds --><!-- end -->", "there is no file results/none.json"),
        ("<!-- table: README.md seeds --><!-- end -->", "README.md is not JSON"),
        ("<!-- table: results/fake_r.json --><!-- end -->", "names a file, then a kind"),
        ("<!-- table: results/fake_r.json pie --><!-- end -->", "'pie' is not a kind of table"),
        ("<!-- table: results/fake_r.json seeds extra --><!-- end -->", "'extra' is not an option"),
        ("<!-- table: results/fake_r.json seeds columns=a --><!-- end -->", "takes no columns="),
        ("<!-- table: results/fake_r.json seeds digits=x --><!-- end -->", "digits= is a number"),
        ("<!-- table: results/fake_r.json seeds models=gpt --><!-- end -->", "no model gpt"),
        ("<!-- table: results/fake_r.json seeds metrics=f1 --><!-- end -->", "no metric f1"),
        ("<!-- table: results/fake_g.json seeds --><!-- end -->", "holds 4 settings: add setting=NAME"),
        ("<!-- table: results/fake_g.json seeds setting=z --><!-- end -->", "no setting 'z'"),
        ("<!-- table: results/benchmarks.json seeds --><!-- end -->", "not a comparison of seeds"),
        ("<!-- table: results/benchmarks.json grid --><!-- end -->", "not a comparison of seeds"),
        ("<!-- table: results/benchmarks.json table x --><!-- end -->", "no table 'x'"),
        ("<!-- table: results/benchmarks.json table steps columns=x --><!-- end -->", "no column x"),
        ("<!-- value: results/fake_r.json cnn.nothing.mean --><!-- end -->", "no value 'cnn.nothing.mean'"),
        ("<!-- value: results/fake_r.json cnn --><!-- end -->", "no value 'cnn'"),
        ("<!-- value: results/fake_r.json experiment .3f --><!-- end -->", "does not fit"),
        ("<!-- value: results/fake_r.json 'a --><!-- end -->", "No closing quotation"),
        ("<!-- table: results/fake_r.json seeds -->", "has no end"),
        ("<!-- end -->", "closes nothing"),
        ("<!-- table: a b --><!-- value: a b --><!-- end -->", "stands before the end of <!-- table: a b -->"),
    ],
)
def test_markers_at_fault(readme: Path, capsys: pytest.CaptureFixture[str], marker: str, message: str) -> None:
    text = f"one\n{marker}\n"
    readme.write_text(text)
    for flag in ("--check", "--report"):
        assert main([flag]) == 1
        err = capsys.readouterr().err
        assert message in err
        assert err.startswith("README.md:2: ")
        assert "Traceback" not in err
    assert readme.read_text() == text


def test_check_looks_at_every_result(readme: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--report"]) == 0
    Path("results/a.json").write_text('{"tables": {}}')
    Path("results/b.json").write_text('{"command": "x"}' + " " * 200_000)
    Path("results/c.json").write_text("[]")
    assert main(["--check"]) == 1
    err = capsys.readouterr().err
    for line in ("a.json: names no command", "b.json: is 200,016 bytes, above 200,000", "c.json: is not a JSON object"):
        assert line in err
    assert "error: 3 problems in README.md and its results" in err
    assert main(["--check", "--readme", "none.md"]) == 1
    assert "cannot read none.md" in capsys.readouterr().err


def test_text_without_markers_stays(tmp_path: Path) -> None:
    text = "a <!-- comment --> b <!-- ending --> c"
    assert render_readme(text, tmp_path) == (text, [], [])


# ----------------------------------------------------------------------------------------------------------------------
# A cluster
# ----------------------------------------------------------------------------------------------------------------------


def test_dask_survives_a_killed_worker(fake: str) -> None:
    """Two worker processes, one of which is killed while it works."""
    distributed = pytest.importorskip("distributed", reason="the optional extra requirements-dask.txt is not installed")
    flags = ["--seeds", "0:6", "--", "--sleep", "0.3"]
    assert main([fake, "--jobs", "6", "--cache", "local", *flags]) == 0
    local = Path("results/fake_0-5.json").read_bytes()
    Path("runs.log").unlink()

    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        victim = cluster.workers[0].pid

        def kill_when_busy() -> None:
            while len(runs()) < 3:
                time.sleep(0.02)
            os.kill(victim, signal.SIGKILL)

        killer = threading.Thread(target=kill_when_busy)
        killer.start()
        assert main([fake, "--dask", cluster.scheduler_address, *flags]) == 0
        killer.join()
    assert Path("results/fake_0-5.json").read_bytes() == local
    assert len(runs()) > 6  # what the killed worker was at has been done again


def test_no_scheduler(fake: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="the optional extra requirements-dask.txt is not installed")
    monkeypatch.setattr(compare_seeds, "DASK_TIMEOUT", 0.3)
    assert main([fake, "--seeds", "0", "--dask", "tcp://127.0.0.1:1"]) == 1
    assert "error: there is no Dask scheduler at tcp://127.0.0.1:1" in capsys.readouterr().err
