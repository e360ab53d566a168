"""compare_seeds: statistics, sweeps, runs that die, are resumed or cannot be compared.

The experiment here is tests/data/fake_experiment.py, which keeps the contract (flags, JSON) and trains nothing.
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
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats

import compare_seeds
from compare_seeds import main
from helpers import DATA, usage_error
from support import statistics
from support.files import is_running
from support.results import code_fingerprint, save_result
from support.statistics import describe_sample, sign_flip_p, summarise, verdict

FAKE = (DATA / "fake_experiment.py").read_text()
DRAW = compare_seeds.draw


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The experiment's path; the test runs in its folder, and no figure is drawn, which takes a second."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare_seeds, "draw", lambda *_: None)
    (tmp_path / "fake.py").write_text(FAKE)
    return "./fake.py"


@pytest.fixture
def drawn(fake: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same with figures."""
    monkeypatch.setattr(compare_seeds, "draw", DRAW)
    return fake


def runs() -> list[str]:
    """What the experiment's runs have noted, sorted."""
    path = Path("runs.log")
    return sorted(line.rpartition(" ")[0] for line in path.read_text().splitlines()) if path.exists() else []


def runs_with_process() -> list[list[str]]:
    """The words that each run has noted, the last of which is its process."""
    path = Path("runs.log")
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def ended(processes: list[int]) -> bool:
    """Whether these processes end within ten seconds."""
    deadline = time.monotonic() + 10
    while any(map(is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, processes))


def cached(pattern: str = "*") -> list[Path]:
    return sorted(Path(".cache/compare_seeds").glob(f"fake-{pattern}.json"))


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


def test_sign_flips_by_hand_by_enumeration_and_by_scipy() -> None:
    assert sign_flip_p(np.array([1.0, 2.0, 3.0])) == 2 / 8
    assert sign_flip_p(np.array([3.0, -1.0, 2.0])) == 4 / 8
    assert sign_flip_p(np.array([0.3])) == 1.0
    assert sign_flip_p(np.zeros(4)) == 1.0
    d = np.random.default_rng(6).normal(0.5, 1, 9)
    sums = np.array([np.dot(signs, d) for signs in itertools.product((1, -1), repeat=len(d))])
    assert sign_flip_p(d) == np.mean(np.abs(sums) >= abs(d.sum()) - 1e-12)
    scipy = stats.permutation_test((d,), np.mean, permutation_type="samples", n_resamples=2**9, vectorized=False)
    np.testing.assert_allclose(sign_flip_p(d), scipy.pvalue)
    assert sign_flip_p(np.full(20, 0.1)) == 2 / 2**20


def test_many_seeds_use_random_flips_of_a_fixed_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    d = np.random.default_rng(7).normal(0.35, 1, 40)
    p = sign_flip_p(d)
    assert p == sign_flip_p(d)
    np.testing.assert_allclose(p, stats.ttest_1samp(d, 0).pvalue, atol=0.01)
    exact = sign_flip_p(d[:16])
    monkeypatch.setattr(statistics, "EXACT_UP_TO", 10)
    np.testing.assert_allclose(sign_flip_p(d[:16]), exact, atol=0.01)


def test_verdict_is_the_intervals() -> None:
    for low, high, word in (
        (0.1, 0.3, "higher"),
        (-0.3, -0.1, "lower"),
        (-0.1, 0.3, "undecided"),
        (0.0, 0.1, "undecided"),
    ):
        assert verdict({"low": low, "high": high}) == word
    assert verdict({"low": None, "high": None}) == "undecided"


def test_pairs_and_errors() -> None:
    values = {"cnn": [0.7, 0.6, 0.95, 0.8], "capsules": [0.9, 0.8, 0.85, 0.8]}
    made = [{"models": {name: {"n_params": 7, "x_accuracy": v[k]} for name, v in values.items()}} for k in range(4)]
    made[0]["models"]["other"] = {"n_params": 1, "x_accuracy": 0.5}  # not in every run
    made[1]["models"]["cnn"]["extra"] = 1.0  # not of every run
    summary = summarise(made, "capsules")  # the second of the two
    assert list(summary["models"]) == ["cnn", "capsules"]
    assert list(summary["paired"]) == ["cnn"]
    pair = summary["paired"]["cnn"]["x_accuracy"]
    assert (pair["n"], pair["higher"], pair["p"], pair["verdict"]) == (4, 2, 0.5, "undecided")  # a tie is not higher
    np.testing.assert_allclose([pair["mean"], pair["error_reduction"]], [0.075, 1 - 0.1625 / 0.2375])
    assert list(summarise(made, "cnn")["paired"]) == ["capsules"]


# ----------------------------------------------------------------------------------------------------------------------
# Runs
# ----------------------------------------------------------------------------------------------------------------------


def test_three_seeds(drawn: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([drawn, "--seeds", "0:3", "--jobs", "2", "--", "--shift", "0.2"]) == 0
    out = capsys.readouterr().out
    document = load("results/fake/0-2.json")
    assert document["command"] == "python compare_seeds.py ./fake.py --seeds 0:3 -- --shift 0.2"
    assert (document["headline"], document["dataset"], document["seeds"]) == ("top_accuracy", "numbers", [0, 1, 2])
    assert (document["chance"], document["reference"]) == (0.25, "capsules")
    assert document["code"] == code_fingerprint(Path(drawn))
    assert document["environment"] == {"python": "3", "git_commit": None}
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
    assert main([fake, "--seeds", "4", "--", "--models", "capsules"]) == 0
    out = capsys.readouterr().out
    assert "| capsules |" in out
    assert "Paired" not in out
    figure = Figure()
    document = load("results/fake/4.json")
    compare_seeds.draw_pairs(figure, document["settings"]["default"], ["capsules"], document)
    assert len(figure.axes) == 1


def test_options_that_keep_more(fake: str) -> None:
    assert main([fake, "--seeds", "4", "--keep-history", "--keep-seconds", "--name", "n", "--metric", "loss"]) == 0
    document = load("results/fake/n.json")
    run = document["settings"]["default"]["runs"][0]
    assert run["history"] == {"capsules": {"loss": [1.0, 0.5]}}
    assert run["models"]["cnn"]["train_seconds"] > 0
    assert (document["headline"], document["chance"]) == ("loss", None)  # the chance level is the headline's


def test_experiment_without_a_headline(fake: str) -> None:
    """The first accuracy is its main metric."""
    Path(fake).write_text(FAKE.replace('"headline": "top_accuracy", "chance": 0.25,', ""))
    assert main([fake, "--seeds", "0"]) == 0
    document = load("results/fake/0.json")
    assert (document["headline"], document["chance"]) == ("top_accuracy", None)


def test_metric_of_another_model_than_the_capsules(fake: str) -> None:
    Path(fake).write_text(FAKE.replace("    result = {", '    models["cnn"]["odd"] = 1.0\n    result = {'))
    assert main([fake, "--seeds", "0", "--metric", "odd"]) == 0
    document = load("results/fake/0.json")
    assert (document["headline"], document["reference"]) == ("odd", "cnn")


def test_figure_shows_the_chance_level(drawn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    for metric, lines in (("top_accuracy", 1), ("loss", 0)):
        assert main([drawn, "--seeds", "0", "--resume", "--metric", metric]) == 0
        assert sum(text.get_text() == "chance" for text in figures.pop().axes[0].texts) == lines


def test_result_does_not_depend_on_jobs(drawn: str) -> None:
    written = []
    for n in ("1", "5"):
        assert main([drawn, "--seeds", "0:6", "--jobs", n, "--cache", f"c{n}", "--timeout", "60"]) == 0
        written.append((Path("results/fake/0-5.json").read_bytes(), Path("viz/fake/seeds_0-5.png").read_bytes()))
    assert written[0] == written[1]
    assert len(runs()) == 12


def test_resume_runs_only_what_is_missing(fake: str) -> None:
    assert main([fake, "--seeds", "0:3"]) == 0
    assert main([fake, "--seeds", "0:5", "--resume"]) == 0
    assert [line.split()[0] for line in runs()] == ["0", "1", "2", "3", "4"]
    assert main([fake, "--seeds", "0", "--resume", "--", "--kind", "b"]) == 0  # other flags
    assert main([fake, "--seeds", "0"]) == 0  # without --resume
    assert len(runs()) == 7


def test_resume_knows_the_code(fake: str) -> None:
    Path("helper.py").write_text("x = 1")
    Path(fake).write_text("import helper\n" + FAKE)
    for n, change in enumerate(("x = 1", "x = 2", "x = 2  # two")):  # the code of a module that the script imports
        Path("helper.py").write_text(change)
        assert main([fake, "--seeds", "0", "--resume"]) == 0
        assert len(runs()) == min(n + 1, 2)
    Path(fake).write_text("import helper\n\ny = 1\n" + FAKE)
    assert main([fake, "--seeds", "0", "--resume"]) == 0
    assert len(runs()) == 3


def test_resume_knows_numpy_and_the_data(fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder is another one from another working folder, and not the same once a file in it is changed."""
    for name in ("one/data/numbers", "two/data/numbers"):
        Path(name).parent.mkdir(parents=True)
        Path(name).write_text("1")
    script, top = str(Path(fake).resolve()), Path.cwd()
    flags = ["--seeds", "0", "--resume", "--cache", str(top / "cache"), "--", "--data-dir"]

    def n_runs(folder: str, data: str) -> int:
        monkeypatch.chdir(top / folder)
        assert main([script, *flags, data]) == 0
        monkeypatch.chdir(top)
        return sum(len(log.read_text().splitlines()) for log in top.glob("*/runs.log"))

    assert [n_runs("one", "data"), n_runs("one", "data"), n_runs("two", "data")] == [1, 1, 2]
    assert n_runs("two", "../one/data") == 2  # run already, with data seen from the other folder
    Path("one/data/numbers").write_text("changed")
    assert n_runs("one", "data") == 3
    monkeypatch.setattr(compare_seeds.importlib.metadata, "version", lambda _: "0.0")
    assert n_runs("one", "data") == 4


def test_odd_cached_runs_are_named_and_repeated(fake: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([fake, "--seeds", "0"]) == 0
    (path,) = cached()
    whole = load(str(path))
    good = Path("results/fake/0.json").read_bytes()

    def change(**changes: Any) -> str:
        return json.dumps(whole | {"result": whole["result"] | changes})

    def signed(**changes: Any) -> str:
        save_result(path, whole | {"result": whole["result"] | changes})
        return path.read_text()

    nan = path.read_text().replace('"loss": 0', '"loss": NaN, "x": 0')
    cases: list[tuple[str | bytes, str]] = [
        ("{ half a fi", "is not JSON"), ("[]", "is not a JSON object"), ("[" * 100_000, "is nested too deeply"),
        (b"\xff", "is not text in UTF-8"), (nan, "holds NaN"), (change(seed=0), ""),
        (change(dataset="x"), "has been changed"),
        ("{}", "has no checksum"), (signed(seed=7), "its seed is 7"), (signed(models={}), "holds no model"),
        (signed(models=[1]), "not the JSON"), (signed(models={"cnn": 3}), "cnn has no metrics"),
        (signed(config=[]), "its config is []"), (signed(dataset=3), "its dataset is 3"),
        (signed(chance="x"), "its chance is x"), (signed(history={"x": 1}), ""),
    ]  # fmt: skip
    n = len(runs())
    for content, message in cases:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        capsys.readouterr()
        assert main([fake, "--seeds", "0", "--resume"]) == 0
        err = capsys.readouterr().err
        n += bool(message)
        assert len(runs()) == n, message
        assert err.count("\n") == bool(message), err
        assert message in err
        assert Path("results/fake/0.json").read_bytes() == good
    path.unlink()
    path.mkdir()
    assert main([fake, "--seeds", "0", "--resume"]) == 1
    assert "is no file but has the name of a run" in capsys.readouterr().err
    assert len(runs()) == n


# ----------------------------------------------------------------------------------------------------------------------
# Runs that cannot be compared
# ----------------------------------------------------------------------------------------------------------------------


def test_data_sets_are_not_mixed(
    fake: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs fall back to drawn numbers. Then the numbers are there, and nothing in the flags tells."""
    flags = ["--name", "n", "--jobs", "1"]
    monkeypatch.setenv("NO_NUMBERS", "1")
    assert main([fake, "--seeds", "0:2", *flags]) == 0
    assert capsys.readouterr().err == "seed 0, setting default: WARNING: there are no numbers, drawn ones are used\n"
    before = Path("results/fake/n.json").read_bytes()
    assert load("results/fake/n.json")["dataset"] == "drawn"
    monkeypatch.delenv("NO_NUMBERS")
    refusal = (
        "error: the runs have different data sets and cannot be compared: drawn (seed 0, setting default) and numbers "
        "(seed 2, setting default); name one with --dataset, or leave --resume out"
    )
    for more in (2, 0):  # the second time it is known before any run; the first, the next one may have begun
        n = len(runs())
        assert main([fake, "--seeds", "0:9", "--resume", *flags]) == 1
        assert capsys.readouterr().err.splitlines()[-1] == refusal
        assert len(runs()) <= n + more
        assert Path("results/fake/n.json").read_bytes() == before
    assert main([fake, "--seeds", "0:4", *flags]) == 0
    assert load("results/fake/n.json")["dataset"] == "numbers"
    assert len(cached()) == 6  # of both data sets
    n = len(runs())
    assert main([fake, "--seeds", "0:4", "--resume", *flags]) == 0  # the newest count
    assert load("results/fake/n.json")["dataset"] == "numbers"
    assert len(runs()) == n


def test_settings_may_have_different_data(fake: str) -> None:
    Path("data").mkdir()
    Path("data/numbers").write_text("1")
    assert main([fake, "--seeds", "0", "--grid", "data-dir=data,none"]) == 0
    assert load("results/fake/data-dir.json")["dataset"] == ["numbers", "drawn"]


def test_kept_runs_repeat_their_warnings(fake: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main([fake, "--seeds", "0", "--resume", "--", "--data-dir", "none"]) == 0
        assert "setting default: WARNING: there are no numbers" in capsys.readouterr().err
    assert len(runs()) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--metric", "f1"], "--metric f1 is not in the results, which have loss, top_accuracy, soft_accuracy"),
        (["--metric", "train_seconds"], "--metric train_seconds is not in the results"),
        (["--grid", "models=cnn,capsules"], "no metric of a model is in all results so far"),
        (["--seeds", "0:9", "--", "--models", "none"], "none of the 9 runs gave a result: its result holds no model"),
    ],
)
def test_nothing_to_compare(fake: str, capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    """Found with the first run that shows it, and not after all of them."""
    seeds = [] if "--seeds" in flags else ["--seeds", "0:40"]
    assert main([fake, "--jobs", "1", *seeds, *flags]) == 1
    err = capsys.readouterr().err
    assert message in err.splitlines()[-1]
    assert not Path("results/fake").exists() or not list(Path("results/fake").glob("*.json"))
    assert len(runs()) <= 9


# ----------------------------------------------------------------------------------------------------------------------
# Runs that die
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("death", "message"),
    [
        ("status", "exit status 3: the last words"),
        ("signal", "killed by SIGKILL: the last words"),
        ("hang", "not finished after 6 s: the last words"),
        ("silence", "No such file"),
        ("deep", "its result is not the JSON of an experiment"),
        ("nan", "capsules's loss is nan"),
    ],
)
def test_a_run_that_dies(fake: str, capsys: pytest.CaptureFixture[str], death: str, message: str) -> None:
    seconds = "6" if death == "hang" else "60"  # a busy machine needs two seconds to start three runs
    assert main([fake, "--seeds", "0:3", "--jobs", "3", "--timeout", seconds, "--", f"--death={death}"]) == 1
    out, err = capsys.readouterr()
    assert "seed 1, setting default: " in err
    assert message in err
    assert err.endswith("error: 1 of 3 runs failed; the others are kept\n")
    assert "| 2 " in out
    entry = load("results/fake/0-2.json")["settings"]["default"]
    assert [run["seed"] for run in entry["runs"]] == [0, 2]
    assert [failure["seed"] for failure in entry["failures"]] == [1]
    assert message in entry["failures"][0]["error"]


def test_no_run_survives(fake: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([fake, "--seeds", "0:2", "--", "--no-such-flag"]) == 1
    assert "error: none of the 2 runs gave a result: exit status 2: " in capsys.readouterr().err
    assert not Path("results/fake/0-1.json").exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_it_keeps_what_is_finished_and_ends_its_runs(fake: str, number: signal.Signals, status: int) -> None:
    """Two runs are finished and the next two hang."""
    Path("hang").touch()
    command = [sys.executable, compare_seeds.__file__, fake, "--seeds", "0:5", "--jobs", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        while (len(cached()) < 2 or len(runs()) < 4) and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert process.returncode == status, err
    assert err.startswith("2 of 5 runs are finished and kept; --resume goes on from them\n")
    assert err.count("\n") <= 2
    assert (out, Path("results/fake/0-4.json").exists()) == ("", False)
    for line in Path("runs.log").read_text().splitlines():
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split()[-1]), 0)
    Path("hang").unlink()
    assert main([*command[2:], "--resume"]) == 0
    assert len(runs()) == 4 + 3


def test_checkpoints_let_a_stopped_run_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real training is stopped after at least one epoch. What it ends with is that of one which was left alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare_seeds, "draw", lambda *_: None)
    flags = ["smallnorb_novel_viewpoint", "--seeds", "3", "--keep-history", "--cache", "cache"]
    rest = ["--", "--models", "capsules", "--n-epochs", "30", "--n-train-views", "2", "--n-test-views", "1"]
    assert main([*flags, "--out", "whole.json", *rest]) == 0
    assert [path.suffix for path in Path("cache").iterdir()] == [".json"]
    next(Path("cache").iterdir()).unlink()
    command = [*flags, "--out", "parts.json", "--checkpoints"]
    stopped = [sys.executable, compare_seeds.__file__, *command, *rest, "--checkpoint-every", "1"]
    rest += ["--checkpoint-every", "1"]
    with subprocess.Popen(stopped, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        while not list(Path("cache").glob("*.ckpt.npz")) and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 130
    (checkpoint,) = Path("cache").glob("*.ckpt.npz")
    saved = checkpoint.read_bytes()
    checkpoint.write_bytes(b"damaged")
    assert main([*command, "--resume", *rest]) == 1, "it is read"
    checkpoint.write_bytes(saved)
    assert main([*command, "--resume", *rest]) == 0
    assert [path.suffix for path in Path("cache").iterdir()] == [".json"]
    whole, parts = load("whole.json"), load("parts.json")
    assert whole["settings"]["default"]["runs"] == parts["settings"]["default"]["runs"]
    assert parts["command"].count("--checkpoint") == 1, "that of the experiment alone"


def test_killed_its_runs_end_with_it(fake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs hang. The folders that they were to write into go with the next call."""
    Path("hang").touch()
    Path("folders").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "folders"))
    command = [sys.executable, compare_seeds.__file__, fake, "--seeds", "2:4", "--jobs", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        while len(runs()) < 2 and process.poll() is None:
            time.sleep(0.02)
        process.kill()
    processes = [int(line[-1]) for line in runs_with_process()]
    assert len(processes) == 2
    assert ended(processes)
    assert len(list(Path("folders").iterdir())) == 2
    Path("hang").unlink()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "folders"))
    assert main(command[2:]) == 0
    assert list(Path("folders").iterdir()) == []


def test_a_run_sees_its_own_name_and_folder(fake: str) -> None:
    """As if it had been started by hand."""
    Path("scripts").mkdir()
    Path("scripts/helper.py").write_text("x = 1")
    checks = (
        "import sys, helper; assert sys.argv[0].endswith('real.py'); assert __name__ == '__main__'; assert __file__\n"
    )
    Path("scripts/real.py").write_text(checks + FAKE)
    assert main(["scripts/real.py", "--seeds", "0"]) == 0


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_closed_streams_lose_nothing(fake: str, stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, stream, None)
    flags = ["--seeds", "0:3", "--jobs", "1", "--timeout", "30", "--", "--death=status"]
    assert main([fake, *flags]) == 1
    assert len(load("results/fake/0-2.json")["settings"]["default"]["runs"]) == 2


def test_a_full_stdout_is_one_line(fake: str, capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w") as full, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert main([fake, "--seeds", "0"]) == 1
    assert capsys.readouterr().err == "error: cannot write to the standard output: No space left on device\n"
    assert load("results/fake/0.json")["settings"]


# ----------------------------------------------------------------------------------------------------------------------
# Sweeps
# ----------------------------------------------------------------------------------------------------------------------


def test_grid_and_zip(drawn: str, capsys: pytest.CaptureFixture[str]) -> None:
    # values that advance together may stay
    assert main([drawn, "--seeds", "0", "--name", "z", "--zip", "gap=0:60,0:90", "kind=a,a"]) == 0
    Path("runs.log").unlink()
    capsys.readouterr()
    sweep = ["--zip", "gap=0:60,0:90", "shift=0.1,0.2", "--grid", "kind=a,b"]
    assert main([drawn, "--seeds", "0:2", *sweep]) == 0
    assert runs() == sorted(f"{s} {x} {k} {g}" for s in (0, 1) for g, x in (("0:60", 0.1), ("0:90", 0.2)) for k in "ab")
    document = load("results/fake/gap_shift_kind.json")
    assert document["axes"] == [["gap", "shift"], ["kind"]]
    assert list(document["settings"])[1] == "gap=0:60 shift=0.1 kind=b"
    assert document["settings"]["gap=0:90 shift=0.2 kind=a"]["args"] == ["--gap=0:90", "--shift=0.2", "--kind=a"]
    table = capsys.readouterr().out
    assert re.search(r"\| 0:90 +\| +0.2 \| +b \| +2 \| +0\.\d{3} ± 0\.\d{3} \|", table)
    assert Path("viz/fake/seeds_gap_shift_kind.png").exists()
    metric, settings = document["headline"], document["settings"]
    for model, best in document["best"].items():
        means = {name: np.mean([run["models"][model][metric] for run in s["runs"]]) for name, s in settings.items()}
        assert means[best] == max(means.values())
        assert f"Best for {model}: {best}\n" in table
    assert set(document["best"]) == set(settings[best]["models"])


def test_setting_without_a_result_is_left_out(fake: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([fake, "--seeds", "1", "--grid", "death=status,x"]) == 1
    assert list(load("results/fake/death.json")["settings"]) == ["death=x"]
    assert "setting death=status has no result" in capsys.readouterr().err


def test_curve_of_one_ordered_axis(drawn: str) -> None:
    assert main([drawn, "--seeds", "0:2", "--grid", "shift=0.1,0.2,0.3", "--figure", "f.png", "--out", "o.json"]) == 0
    assert Path("f.png").read_bytes().startswith(b"\x89PNG")
    document = load("o.json")
    means = {
        name: entry["models"]["capsules"][document["headline"]]["mean"] for name, entry in document["settings"].items()
    }
    assert len(means) == len(set(means.values())) == 3
    assert document["best"]["capsules"] == max(means, key=lambda name: means[name])


def test_sweep_of_one_value(drawn: str) -> None:
    assert main([drawn, "--seeds", "0:2", "--grid", "shift=0.1"]) == 0
    document = load("results/fake/shift.json")
    assert list(document["settings"]) == ["shift=0.1"]
    assert "best" not in document


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
        "FAKE --timeout 3e6",
        "FAKE --name a/b",
        "FAKE --out a.png --figure ./a.png",
        "FAKE --out FAKE",
        "FAKE --dask nowhere",
        "FAKE --dask http:///8786",
    ],
)
def test_usage_errors(fake: str, capsys: pytest.CaptureFixture[str], flags: str) -> None:
    usage_error(compare_seeds, shlex.split(flags.replace("FAKE", fake)), capsys)
    assert runs() == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("smallnorb_novel_viewpoint --grid em-iters=1,x", "argument --em-iters: 'x' is not a whole number"),
        ("smallnorb_novel_viewpoint --grid colour=red,blue", "unrecognized arguments: --colour=red"),
        ("smallnorb_novel_viewpoint -- --n-epochs -3", "argument --n-epochs: -3 is not between"),
        (
            "smallnorb_novel_viewpoint --grid test-azimuths=200:330,100:200",
            "argument --test-azimuths: 100:200 overlaps",
        ),
        ("conv_matrix_capsules -- --dataset smallnorb", "argument --dataset: smallnorb needs --data-dir DIR"),
        ("multimnist_capsnet -- --models cnn --routing-study", "argument --models: --routing-study asks"),
        ("mnist_affine_capsnet --grid check-every=100,200", "argument --check-every: needs --match-accuracy"),
    ],
)
def test_what_an_experiment_refuses_is_said_once_and_before_any_run(
    words: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare_seeds, "run_all", lambda *_: pytest.fail("a run has started"))
    line = usage_error(compare_seeds, shlex.split(words), capsys)
    assert line.startswith(f"{words.split()[0]}.py: error: {says}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"\xff", "it is no Python program (UnicodeDecodeError)"),
        (b"def", "it is no Python program (SyntaxError)"),
        (b"x = 1\0", "it is no Python program (SyntaxError)"),
        (b"x = (", "it is no Python program (SyntaxError)"),
    ],
)
def test_unreadable_script(fake: str, capsys: pytest.CaptureFixture[str], source: bytes, message: str) -> None:
    Path(fake).write_bytes(source)
    assert main([fake, "--seeds", "0"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: cannot read ")
    assert err.count("\n") == 1
    assert message in err or "ValueError" in err
    Path(fake).write_text("import broken\n")
    Path("broken.py").write_bytes(source)
    assert main([fake, "--seeds", "0"]) == 1
    assert "broken.py: it is no Python program" in capsys.readouterr().err


def test_script_without_permission(
    fake: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)
    assert main([fake, "--seeds", "0"]) == 1
    err = capsys.readouterr().err
    assert err == f"error: cannot read {Path(fake).resolve()}: Permission denied\n"


def test_deleted_working_folder(fake: str, tmp_path: Path) -> None:
    script = Path(fake).resolve()
    code = (
        f"import os, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir({str(tmp_path / 'gone')!r}); "
        f"sys.path.insert(0, {str(Path(compare_seeds.__file__).parent)!r}); import compare_seeds; "
        f"sys.exit(compare_seeds.main([{str(script)!r}, '--seeds', '0']))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.stderr == "error: the working folder does not exist any more\n"
    assert process.returncode == 1


def test_unwritable_output_is_found_before_a_run(fake: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("results").write_text("a file where a folder must be")
    assert main([fake, "--seeds", "0"]) == 1
    assert capsys.readouterr().err.startswith("error: cannot write results")
    Path("results").unlink()
    Path("results/fake/0.json").mkdir(parents=True)
    assert main([fake, "--seeds", "0"]) == 1
    assert capsys.readouterr().err == "error: cannot write results/fake/0.json: it is a folder\n"
    assert runs() == []


def test_help_and_missing_dask(fake: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert " smallnorb_novel_viewpoint --seeds 0:3\n" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert main([fake, "--seeds", "0", "--dask", "tcp://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == "error: --dask needs Dask: pip install -r requirements-dask.txt\n"


# ----------------------------------------------------------------------------------------------------------------------
# A cluster
# ----------------------------------------------------------------------------------------------------------------------


def test_dask_survives_a_killed_worker(fake: str) -> None:
    """Two worker processes, one of which is killed while it works."""
    distributed = pytest.importorskip("distributed", reason="the optional extra requirements-dask.txt is not installed")
    flags = ["--seeds", "0:6", "--", "--sleep", "0.3"]
    assert main([fake, "--jobs", "6", "--cache", "local", *flags]) == 0
    local = Path("results/fake/0-5.json").read_bytes()
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
    assert Path("results/fake/0-5.json").read_bytes() == local
    assert len(runs()) > 6  # what the killed worker was at has been done again


def test_dask_runs_end_with_their_worker_and_with_the_comparison(fake: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The third run hangs: its worker is killed, and then, in another comparison, Ctrl-C comes."""
    distributed = pytest.importorskip("distributed", reason="the optional extra requirements-dask.txt is not installed")

    def hanging() -> int:
        """The process of the third run, once it is there."""
        while not (found := [line for line in runs_with_process() if line[0] == "2"]):
            time.sleep(0.02)
        return int(found[-1][-1])

    def kill_the_worker() -> None:
        processes.append(hanging())
        status = Path(f"/proc/{processes[0]}/status").read_text()
        Path("hang").unlink()
        os.kill(int(re.findall(r"PPid:\s+(\d+)", status)[0]), signal.SIGKILL)

    def interrupt() -> None:
        processes.append(hanging())
        while len(list(Path(".cache").rglob("*.json"))) < 2:  # the second run may be the slower one
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    processes: list[int] = []
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        for then, status in ((kill_the_worker, 0), (interrupt, 130)):
            Path("hang").touch()
            Path("runs.log").unlink(missing_ok=True)
            shutil.rmtree(".cache", ignore_errors=True)
            other = threading.Thread(target=then)
            other.start()
            assert main([fake, "--seeds", "0:3", "--dask", cluster.scheduler_address]) == status
            other.join()
            assert ended(processes)
    assert capsys.readouterr().err == "2 of 3 runs are finished and kept; --resume goes on from them\ninterrupted\n"


def test_no_scheduler(fake: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="the optional extra requirements-dask.txt is not installed")
    monkeypatch.setattr(compare_seeds, "DASK_TIMEOUT", 0.3)
    assert main([fake, "--seeds", "0", "--dask", "tcp://127.0.0.1:1"]) == 1
    assert "error: there is no Dask scheduler at tcp://127.0.0.1:1" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------------
# The fingerprint of code
# ----------------------------------------------------------------------------------------------------------------------

PROGRAM = '''"""Docstring."""
import numpy as np  # why
from tools import helper
def f(x, y=1):
    """What it does.

    At length."""
    if x:
        y = f"{{braces}} {x:.3f} and {y!r}"
    return (x +
            y)
'''


def fingerprint_of(text: str) -> str:
    Path("program.py").write_text(text)
    return code_fingerprint(Path("program.py"))


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ("  # why", "", True),
        ("At length.", "Briefly.", True),
        ('    """What it does.', '    """', True),
        ("(x +\n            y)", "(x + y)", True),
        ("def f", "\n\n# a line\ndef f", True),
        ("    return", "\n    return", True),
        ("y=1", "y = 1", True),
        ("y=1", "y=2", False),
        ("braces", "brackets", False),
        ("{{braces}}", "{braces}", False),
        ("x:.3f", "x:.2f", False),
        ("    return (", "        return (", False),  # into the branch
        ("        y = f", "        y += f", False),
        ("from tools import helper", "from tools import other", False),
    ],
)
def test_fingerprint_is_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, is_same: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    assert old in PROGRAM
    assert (fingerprint_of(PROGRAM) == fingerprint_of(PROGRAM.replace(old, new))) == is_same


def test_fingerprint_follows_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through modules, packages, relative imports and a circle; not into what nobody imports."""
    monkeypatch.chdir(tmp_path)
    Path("tools").mkdir()
    files = {
        "tools/__init__.py": "", "tools/helper.py": "from .deep import x", "tools/deep.py": "x = 1\nimport circle",
        "circle.py": "import program", "lazy.py": "z = 1", "unused.py": "z = 1",
    }  # fmt: skip
    for name, text in files.items():
        Path(name).write_text(text)
    program = PROGRAM + "def g():\n    import lazy\n"
    before = fingerprint_of(program)
    for name, text in files.items():
        Path(name).write_text(text + "\nnew = 2\n")
        assert (fingerprint_of(program) == before) == (name == "unused.py"), name
        Path(name).write_text(text)
    assert fingerprint_of(program) == before
