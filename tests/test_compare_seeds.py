"""compare_seeds: sweeps, runs that die, are stopped, resumed or cannot be compared, and a cluster.

The experiment here is tests/data/fake_experiment.py, which keeps the contract (flags, JSON) and trains nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import compare_seeds
from compare_seeds import Setting
from fast.workers import n_processors
from helpers import DATA, ROOT, Capture, Patch, usage_error
from support.results import environment, parse_json
from support.statistics import read_comparison

SCRIPT = Path("fake.py")
FAKE = (DATA / "fake_experiment.py").read_text()


@pytest.fixture(autouse=True)
def _fake(tmp_path: Path, monkeypatch: Patch) -> None:
    """The experiment, in the folder in which the test runs."""
    monkeypatch.chdir(tmp_path)
    SCRIPT.write_text(FAKE)


def compare(flags: str) -> int:
    return compare_seeds.main(["./fake.py", *shlex.split(flags)])


def parse_command(flags: str) -> tuple[Any, list[Setting]]:
    return compare_seeds.parse_command(["./fake.py", *shlex.split(flags)])


def runs(folder: str = ".") -> list[list[str]]:
    """The words that each run has noted: seed, flags, its process."""
    path = Path(folder, "runs.log")
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def seeds_run() -> list[int]:
    return sorted(int(words[0]) for words in runs())


def cached() -> list[Path]:
    return sorted(Path(".cache/compare_seeds").glob("fake-*.json"))


def wait_until(is_so: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = parse_json(Path("results", "fake", f"{name}.json"))
    return document


# --- What is written and printed --------------------------------------------------------------------------------------


def test_three_seeds(capsys: Capture, monkeypatch: Patch) -> None:
    assert compare("--seeds 0:3 --jobs 2 -- --shift 0.2") == 0
    out = capsys.readouterr().out
    assert out.startswith("fake (numbers), top_accuracy\n")
    assert out.endswith("\n± is half of a 95 % interval of the mean\n\nresults/fake/0-2.json is written\n")
    document = load("0-2")
    assert document["command"] == "python compare_seeds.py ./fake.py --seeds 0:3 -- --shift 0.2"
    assert (document["headline"], document["dataset"], document["seeds"]) == ("top_accuracy", "numbers", [0, 1, 2])
    assert document["reference"] == "capsules"
    assert (document["config"], document["settings"]["default"]["config"]) == ({"shift": 0.2}, {})
    assert document["environment"] == environment(threads=1)
    versions = {"python": platform.python_version(), "numpy": np.__version__, "n_cpus": os.cpu_count()}
    assert document["environment"].items() > versions.items()
    entry = read_comparison("results/fake/0-2.json")["settings"]["default"]
    assert entry["models"]["capsules"]["n_params"] == 1234
    assert [run["seed"] for run in entry["runs"]] == [0, 1, 2]
    assert "history" not in entry["runs"][0]
    of_model = entry["runs"][0]["models"]["cnn"]
    assert not {"train_seconds", "epoch_seconds"} & of_model.keys()
    base = 0.5 + 0.1 * random.Random(0).random()  # to six digits
    assert (of_model["top_accuracy"], of_model["sweep"]) == (round(base, 6), {"-90": round(base / 3, 6)})
    assert re.search(r"\| cnn +\| +top_accuracy \| +\+0\.\d{3} \| .* \| +3 of 3 \|\n", out)  # and no verdict
    means = [f"{entry['models'][name]['top_accuracy']['mean']:.3f}" for name in ("capsules", "cnn")]
    assert re.search(rf"\| top accuracy +\| {means[0]} ± 0\.\d{{3}} \| {means[1]} ± 0\.\d{{3}} \|\n", out)
    for seed, run in enumerate(entry["runs"]):
        two = [f"{run['models'][name]['top_accuracy']:.3f}" for name in ("capsules", "cnn")]
        assert re.search(rf"\| {seed} +\| +{two[0]} \| +{two[1]} \|", out)
    assert compare("--seeds 0:5 --resume -- --shift 0.2") == 0
    assert "5 of 5 |  higher |" in capsys.readouterr().out
    monkeypatch.setattr(compare_seeds, "has_scipy", lambda: False)
    flags = "--seeds 0 --threads 2 --keep-history --keep-seconds --name n"  # numbers may depend on threads
    assert compare(f"{flags} --jobs=1 --resume") == 0
    assert "\n\nintervals of the means need scipy\n\n" in capsys.readouterr().out
    more = load("n")
    assert more["command"] == f"python compare_seeds.py ./fake.py {flags}"
    assert more["environment"]["threads"] == 2
    (run,) = more["settings"]["default"]["runs"]
    assert run["history"] == {"capsules": {"loss": [1.0, 0.5]}}
    assert run["models"]["cnn"]["train_seconds"] > 0


def test_metrics_of_an_angle_are_in_the_file_alone(capsys: Capture) -> None:
    SCRIPT.write_text(FAKE.replace('"loss": 1 - v', '"loss": 1 - v, "azimuth_60_accuracy": v'))
    assert compare("--seeds 0") == 0
    assert "azimuth" not in capsys.readouterr().out
    assert "azimuth_60_accuracy" in load("0")["settings"]["default"]["runs"][0]["models"]["cnn"]


def test_the_capsules_are_compared_with_the_others_wherever_they_stand() -> None:
    old, new = '(("capsules", 1234, value), ("cnn", 99, base))', '(("cnn", 99, base), ("capsules", 1234, value))'
    assert old in FAKE
    SCRIPT.write_text(FAKE.replace(old, new))
    assert compare("--seeds 0") == 0
    assert list(load("0")["settings"]["default"]["runs"][0]["models"]) == ["cnn", "capsules"]
    assert load("0")["reference"] == "capsules"


def test_parts_keep_each_other_and_a_file_of_another_command_is_left_alone(capsys: Capture) -> None:
    for flags in ("n --part first -- --kind a", "n --part second -- --kind b", "whole"):
        assert compare(f"--seeds 0 --name {flags}") == 0
    files = [Path("results/fake", f"{name}.json") for name in ("n", "whole")]
    before, n_runs = [path.read_bytes() for path in files], len(runs())
    of_first = "python compare_seeds.py ./fake.py --seeds 0 --name n --part first -- --kind a"
    shutil.copy("fake.py", "other.py")
    for words, says in (
        ("./fake.py --name n --part first -- --kind c", f"n.json is of another command, {of_first}: name"),
        ("./fake.py --name whole --part x", "whole.json is one comparison, without"),
        ("./fake.py --name n", "n.json has parts: give"),
        ("./other.py --resume --out results/fake/whole.json", "whole.json is of another command, python compare_seeds"),
    ):
        script, *others = words.split()
        assert compare_seeds.main([script, "--seeds", "0", *others]) == 1
        assert says in capsys.readouterr().err
    assert ([path.read_bytes() for path in files], len(runs())) == (before, n_runs)
    assert compare("--resume --seeds 0 --name n --part first -- --kind c") == 0
    assert {name: part["command"][-1] for name, part in load("n")["parts"].items()} == {"first": "c", "second": "b"}


def test_the_result_does_not_depend_on_jobs() -> None:
    path, written = Path("results/fake/4-9.json"), list[bytes]()
    for n in (1, 5):
        assert compare(f"--seeds 9,4:9 --jobs {n}") == 0
        written.append(path.read_bytes())
    assert (written[0], len(runs())) == (written[1], 12)
    assert compare_seeds.make_parser().get_default("jobs") == n_processors()


def test_grid_and_zip(capsys: Capture) -> None:
    assert compare("--seeds 0:2 --zip gap=0:60,0:90 shift=0.1,0.2 --grid kind=a,b") == 0
    asked = [[f"{s}", x, k, g] for s in (0, 1) for g, x in (("0:60", "0.1"), ("0:90", "0.2")) for k in "ab"]
    assert sorted(words[:-1] for words in runs()) == sorted(asked)
    document = load("gap_shift_kind")
    assert list(document["settings"])[1] == "gap=0:60 shift=0.1 kind=b"
    setting = document["settings"]["gap=0:90 shift=0.2 kind=a"]
    assert (list(setting["values"]), setting["config"], document["config"]) == (
        ["gap", "shift", "kind"], {"shift": 0.2}, {})
    table = capsys.readouterr().out
    assert re.search(r"\| cnn +\| +99 \| gap=0:90 shift=0.2 kind=b \| +2 \| +0\.\d{3} ± 0\.\d{3} \|", table)
    means = {name: np.mean([run["models"]["capsules"]["top_accuracy"] for run in entry["runs"]])
             for name, entry in document["settings"].items()}
    assert f"Best for capsules: {max(means, key=means.__getitem__)}\n" in table
    assert compare("--seeds 0 --zip models=cnn,capsules kind=a,a") == 0  # without the other's model; one may stay
    assert "Best for cnn: models=cnn kind=a\n" in capsys.readouterr().out
    assert load("models_kind")["reference"] == "cnn"  # the first, where the first result has no capsules


# --- Resuming ---------------------------------------------------------------------------------------------------------


def test_resume_runs_only_what_is_missing(monkeypatch: Patch) -> None:
    for flags, n_runs in (
        ("--seeds 0:3", 3), ("--seeds 0:5 --resume", 5), ("--seeds 0 --resume", 5), ("--seeds 0", 6),
        ("--seeds 0 --resume -- --kind b", 7), ("--seeds 0 --resume --threads 2", 8),
    ):
        assert compare(flags) == 0
        assert len(runs()) == n_runs, flags
    monkeypatch.setattr(np, "__version__", "1")
    assert compare("--seeds 0 --resume") == 0
    assert len(runs()) == 9


def test_resume_knows_the_code_that_is_imported() -> None:
    Path("tools").mkdir()
    files = {"tools/deep.py": "x = 0", "tools/helper.py": "from tools.deep import x", "other.py": "",
             "fake.py": f"from tools import helper\n{FAKE}"}
    for name, text in files.items():
        Path(name).write_text(text)
    assert compare("--seeds 0") == 0
    for name, text in files.items():
        n_runs = len(runs())
        Path(name).write_text(f"{text}\nx = 1\n")
        assert compare("--seeds 0 --resume") == 0
        assert len(runs()) - n_runs == (name != "other.py"), name


@pytest.mark.parametrize("content", [
    b"{ half a fi", b"[]", b"\xff", b'{"headline": "x", "models": {}}', b'{"models": {"a": {"b": 0.5}}}',
    b'{"headline": "x", "models": {"a": {"b": 0.5, "c": NaN}}}',
])
def test_a_file_that_is_no_result_is_run_again(content: bytes) -> None:
    assert compare("--seeds 0") == 0
    good = load("0")
    cached()[0].write_bytes(content)
    assert compare("--seeds 0 --resume") == 0
    assert (len(runs()), load("0")) == (2, good)


def test_runs_on_other_data_are_not_mixed(capsys: Capture, monkeypatch: Patch) -> None:
    """Two runs draw their numbers. Then the numbers are there, and nothing in the flags tells."""
    monkeypatch.setenv("NO_NUMBERS", "1")
    assert compare("--seeds 0:2 --name n") == 0
    before = load("n")
    monkeypatch.delenv("NO_NUMBERS")
    assert compare("--seeds 0:9 --resume --name n --jobs 1") == 1
    assert "error: the runs have different data sets and cannot be compared: drawn and num" in capsys.readouterr().err
    assert (n := len(runs())) <= 4, "it is found with the first run"
    assert compare("--seeds 0:3 --resume --name n") == 1  # and where none is left to run
    assert (len(runs()), load("n")) == (n, before)
    Path("data").mkdir()
    Path("data/numbers").write_text("1")
    assert compare("--seeds 0 --grid data-dir=data,none") == 0  # these were asked for
    assert load("data-dir")["dataset"] == ["numbers", "drawn"]


# --- Runs that die or are stopped -------------------------------------------------------------------------------------

NO_NUMBERS = "its result holds no metric of a model, or a number that is not finite"


@pytest.mark.parametrize(("death", "message"), [
    ("status", "exit status 3: the last words"), ("signal", "killed by signal 9: the last words"),
    ("silence", NO_NUMBERS), ("nan", NO_NUMBERS),
])
def test_a_run_that_dies_is_named_and_alone_run_again(capsys: Capture, death: str, message: str) -> None:
    assert compare(f"--seeds 0:3 --jobs 3 -- --death={death}") == 1
    out, err = capsys.readouterr()
    assert f"seed 1, setting default: {message}\n" in err
    assert "3 of 3 runs: seed " in err
    assert err.endswith("error: 1 of 3 runs failed; the others are kept\n")
    assert "| 2 " in out
    entry = load("0-2")["settings"]["default"]
    assert [run["seed"] for run in entry["runs"]] == [0, 2]
    assert entry["failures"] == [{"seed": 1, "error": message}]
    assert compare(f"--seeds 0:3 --jobs 3 --resume -- --death={death}") == 1
    assert seeds_run() == [0, 1, 1, 2]


def test_a_setting_without_a_result_is_left_out(capsys: Capture) -> None:
    assert compare("--seeds 1 --grid death=status,x") == 1
    assert "setting death=status has no result" in capsys.readouterr().err
    assert {name: entry["failures"] for name, entry in load("death")["settings"].items()} == {"death=x": []}
    assert compare("--seeds 0:2 -- --no-such-flag") == 1
    assert capsys.readouterr().err.endswith("error: none of the 2 runs gave a result\n")
    assert not Path("results/fake/0-1.json").exists()


def test_a_run_is_told_from_its_words_and_has_its_variables(monkeypatch: Patch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    script = "import os, sys; sys.stderr.write({}); sys.exit(int(os.environ['OMP_NUM_THREADS']))"
    for written, message in (("'first\\nthe words\\n=====\\n'", "the words"), ("''", "no message")):
        with pytest.raises(RuntimeError, match=f"^exit status 2: {message} here$"):
            compare_seeds.run([sys.executable, "-c", script.format(written)], {"OMP_NUM_THREADS": "2"}, " here")


def test_what_a_run_is_started_with(monkeypatch: Patch) -> None:
    """The same flags here and on a cluster, where a script of the project is a module of the archive."""
    _, settings = parse_command("--grid kind=a,b --grid shift=0.1,0.2")
    assert [setting.name for setting in settings][2:] == ["kind=b shift=0.1", "kind=b shift=0.2"]
    args, settings = parse_command("--seeds 7,9 --threads=3 --grid kind=a,b")
    jobs = compare_seeds.make_jobs(args, settings, b"")
    assert [(job.seed, job.setting.name[-1]) for job in jobs] == [(7, "a"), (7, "b"), (9, "a"), (9, "b")]
    executor: Any = SimpleNamespace(submit=lambda *given: given)
    monkeypatch.setenv("PYTHONPATH", "mine")
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    threads, flags = dict.fromkeys(names, "3"), ["--kind=b", "--seed=9", "--threads=3", "--quiet"]
    command = [sys.executable, str(SCRIPT.resolve()), *flags, f"--out-json={jobs[3].file}"]
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), "mine"])}
    assert compare_seeds.submit(executor, jobs[3], args, b"") == (compare_seeds.run, command, threads | path)
    args.scheduler = "tcp://host:1"
    for script, start in ((SCRIPT.resolve(), ["fake.py"]), (ROOT / "more" / "x.py", ["-m", "more.x"])):
        args.script = script
        expected: Any = (compare_seeds.run_on_worker, b"code", start, flags, threads)
        assert compare_seeds.submit(executor, jobs[3], args, b"code") == expected


def test_a_copy_of_a_script_has_what_it_imports_of_the_project() -> None:
    """A run is stale after a change of it; a module of its own comes first."""
    Path("tables.py").write_text("import support.tables\n")
    SCRIPT.write_text(f"import smallnorb_novel_viewpoint, tables\n{FAKE}")
    with zipfile.ZipFile(io.BytesIO(compare_seeds.pack(SCRIPT.resolve()))) as archive:
        files = {*archive.namelist()}
        assert {"fake.py", "tables.py", "support/tables.py", "smallnorb_novel_viewpoint.py", "fast/workers.py",
                "data/norb_files.py", "fast/optimizers.py", "data/__init__.py"} < files  # some it asks for late
        assert not [name for name in files if name.startswith(("evidence/", "tests/", "explorer/"))]
        assert archive.read("tables.py") == Path("tables.py").read_bytes()
    SCRIPT.write_text("import support.tables\n")  # and no data/, fast/
    zipfile.ZipFile(io.BytesIO(compare_seeds.pack(SCRIPT.resolve()))).extractall("copy")
    subprocess.run([sys.executable, Path("copy", SCRIPT).resolve()], env={**os.environ, "PYTHONPATH": ""}, check=True)


def test_histories_and_failures_are_those_of_the_runs() -> None:
    """Which end in any order."""
    args, (setting,) = parse_command("--seeds 0:4 --keep-history")
    args.environment = {}
    jobs = [compare_seeds.Job(setting, seed, Path("x")) for seed in range(4)]
    results: Any = {
        job: {"headline": "loss", "models": {"a": {"loss": 0.5}}, "history": {"a": {"loss": [job.seed]}}}
        for job in jobs[:2]
    }
    document = compare_seeds.make_document(args, [setting], results, {jobs[3]: "late", jobs[2]: "early"})
    (entry,) = document["settings"].values()
    assert [run["history"] for run in entry["runs"]] == [{"a": {"loss": [seed]}} for seed in (0, 1)]
    assert entry["failures"] == [{"seed": 2, "error": "early"}, {"seed": 3, "error": "late"}]


def started(flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, compare_seeds.__file__, "./fake.py", "--jobs", "2", *flags.split()]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_it_keeps_what_is_finished_and_ends_its_runs(number: signal.Signals, status: int) -> None:
    """Two runs are finished and the next two hang."""
    Path("hang").touch()
    with started("--seeds 0:5") as process:
        wait_until(lambda: len(cached()) == 2 and len(runs()) == 4)
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert process.returncode == status, err
    assert "\n2 of 5 runs are kept; --resume goes on from them\n" in err
    assert err.count("\n") <= 4
    assert (out, Path("results/fake/0-4.json").exists()) == ("", False)
    for *_, its_process in runs():
        with pytest.raises(ProcessLookupError):
            os.kill(int(its_process), 0)
    Path("hang").unlink()
    assert compare("--seeds 0:5 --resume") == 0
    assert len(runs()) == 4 + 3


def test_killed_its_runs_end_by_themselves_and_count() -> None:
    """Two runs are on when it is killed. They finish, and are not run again."""
    with started("--seeds 0:4 -- --sleep 1") as process:
        wait_until(lambda: len(runs()) == 2)
        process.kill()
    assert cached() == []
    wait_until(lambda: len(cached()) == 2)
    assert compare("--seeds 0:4 --resume -- --sleep 1") == 0
    assert seeds_run() == [0, 1, 2, 3]


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "says"), [
    ("", ""), ("no_such_experiment", "argument EXPERIMENT: there is no script no_such_experiment"),
    ("FAKE --seeds 3:1", "'3:1'"), ("FAKE --seeds 0:3,9:5", "'0:3,9:5'"), ("FAKE --seeds -1", "seeds"),
    ("FAKE --seeds 1,1", "'1,1' has a seed twice"),
    ("FAKE --grid kind=", "'kind='"), ("FAKE --grid kind=a,a", "a setting occurs twice"),
    *((f"FAKE --grid kind=a{more}", "--kind is named twice") for more in (" kind=b", " -- --kind c")),
    ("FAKE --grid seed=1,2", "--seed is not"), ("FAKE --zip kind=a,b gap=1", "argument --zip: "),
    *((f"FAKE -- --{name}=4", f"--{name} is not for the experiment here")
      for name in ("seed", "out-json", "threads", "quiet", "checkpoint", "resume")),
    ("FAKE --jobs 0", "argument --jobs: "), ("FAKE --name a/b", "argument --name: "),
    *((f"FAKE --out {path}", f"argument --out: would overwrite {named}") for path, named in
      (("FAKE", ""), ("x -- --data-dir x", "x"), ("x --grid data-dir=a,x", "x"))),
    ("FAKE --scheduler http:///8786", "argument --scheduler: 'http:///8786' is no address"),
    ("smallnorb_novel_viewpoint --n-epochs 3", "--n-epochs 3; flags of the experiment stand after --"),
    ("smallnorb_novel_viewpoint --grid em-iters=1,x", "argument --em-iters: 'x' is not a whole number"),
    ("smallnorb_novel_viewpoint --grid colour=red,blue", "unrecognized arguments: --colour=red"),
    ("smallnorb_novel_viewpoint --grid em_iters=1,2", "(did you mean --em-iters?)"),
    ("conv_matrix_capsules -- --dataset smallnorb", "argument --data-dir: goes with --dataset smallnorb"),
    ("claims", "claims.py is no experiment, as smallnorb_novel_viewpoint is: it has neither Config and Options"),
    ("visualize_multimnist_capsnet", "unrecognized arguments: --out-json=x.json"),
])
def test_usage_errors(words: str, says: str, capsys: Capture) -> None:
    """Also what an experiment refuses is said once and before any run."""
    assert says in usage_error(compare_seeds, shlex.split(words.replace("FAKE", "./fake.py")), capsys)
    assert [path.name for path in Path().iterdir()] == ["fake.py"]


@pytest.mark.parametrize(("error", "status"), [(BrokenPipeError(32, "Broken pipe"), 0), (OSError(28, "full"), 1)])
def test_a_result_is_written_whoever_reads_the_table(error: OSError, status: int, monkeypatch: Patch) -> None:
    monkeypatch.setattr(compare_seeds, "print", Mock(side_effect=error), raising=False)
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # of pytest's own stdout
    assert compare("--seeds 0,1") == status
    assert load("0-1")["settings"]


def test_a_result_that_cannot_be_written_or_a_script_that_cannot_be_read(monkeypatch: Patch, capsys: Capture) -> None:
    full = compare_seeds.UserError("cannot write x.json: No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(compare_seeds, "save_result", Mock(side_effect=full))
        assert compare("--seeds 0,1 --out x.json") == 1
    out, error = capsys.readouterr()
    assert "| mean |" in out
    assert error.endswith("x.json: No space left on device; the runs are kept, and --resume writes them\n")
    shutil.rmtree(".cache")
    for place, flags in (("results", ""), (".cache", "--out x.json")):
        Path(place).write_text("a file where a folder must be")
        assert compare(f"--seeds 0 {flags}") == 1
        assert capsys.readouterr().err.startswith(f"error: cannot write {place}")
    Path(".cache").unlink()
    for source in (b"\xff", b"def"):
        SCRIPT.write_bytes(source)
        assert compare("--seeds 0 --out x.json") == 1
        assert re.fullmatch(r"error: \S+/fake.py is no Python program .*\n", capsys.readouterr().err)
    monkeypatch.setitem(sys.modules, "more.capsule_attacks", None)
    assert compare_seeds.main(["capsule_attacks", "--seeds", "0"]) == 1
    assert capsys.readouterr().err.startswith("error: capsule_attacks.py cannot be imported: ModuleNotFoundError")
    assert seeds_run() == [0, 1]


# --- A cluster --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def cluster(n_workers: int) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A scheduler and workers, started as docs/method.md says, each in an empty folder: address and workers."""
    pytest.importorskip("distributed", reason="Dask is not installed")
    dask, env = [sys.executable, "-m", "dask"], {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    found = Path("scheduler.json").resolve()
    started: list[subprocess.Popen[bytes]] = []

    def start(folder: str, *words: str) -> None:
        Path(folder).mkdir()
        with open(f"{folder}.log", "wb") as log:
            started.append(subprocess.Popen([*dask, *words], cwd=folder, env=env, stdout=log, stderr=log))

    try:
        start("scheduler", "scheduler", "--host=127.0.0.1", "--port=0", "--no-dashboard", f"--scheduler-file={found}")
        wait_until(found.exists)
        address = json.loads(found.read_text())["address"]
        for k in range(n_workers):
            start(f"worker{k}", "worker", address, "--nthreads=1", "--no-nanny", "--no-dashboard")
        yield address, started[1:]
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_cluster_gives_the_numbers_of_this_machine_though_a_worker_is_killed() -> None:
    """The workers have nothing of the experiment, which imports a module of its folder."""
    Path("tools").mkdir()
    Path("tools/helper.py").write_text("x = 0.125")
    SCRIPT.write_text(FAKE.replace("import argparse", "import argparse\n\nfrom tools.helper import x")
                      .replace("value = base +", "value = x + base +"))
    flags = "--seeds 0:6 -- --sleep 0.5"
    assert compare(f"--jobs 6 {flags}") == 0
    local = load("0-5")
    with cluster(2) as (address, workers):
        with started(f"--scheduler {address} {flags}") as process:
            wait_until(lambda: bool(runs("worker0")))
            workers[0].kill()
            _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert load("0-5")["settings"] == local["settings"]
        assert load("0-5")["command"] == local["command"]
        assert len(runs("worker0")) + len(runs("worker1")) > 6, "what the killed worker was at has been done again"
        assert [path.name for path in Path("worker1").iterdir() if path.is_file()] == ["runs.log"]
        with started(f"--scheduler {address} --seeds 0:2 -- --death status") as process:
            _, err = process.communicate(timeout=60)
        where = rf"\(worker tcp://127.0.0.1:\d+ in {Path('worker1').resolve()}\)"
        assert re.search(rf"seed 1, setting default: exit status 3: the last words {where}\n", err)


def test_no_scheduler_and_no_dask(capsys: Capture, monkeypatch: Patch) -> None:
    pytest.importorskip("distributed", reason="Dask is not installed")
    monkeypatch.setattr(compare_seeds, "DASK_TIMEOUT", 0.3)
    nowhere = "--scheduler tcp://127.0.0.1:1"
    assert compare("--seeds 1") == 0
    assert compare(f"--seeds 1 --resume {nowhere}") == 0  # nothing is left to run
    capsys.readouterr()
    assert compare(f"--seeds 0 {nowhere}") == 1
    assert "error: there is no Dask scheduler at tcp://127.0.0.1:1" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert compare(f"--seeds 0 {nowhere}") == 1
    assert capsys.readouterr().err == 'error: --scheduler needs Dask: pip install "dask[distributed]"\n'
