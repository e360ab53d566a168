"""What every script keeps to, whatever its science: wrong flags and files, interruptions, full disks, NaN, results.

What is tried with the experiments and the scripts of figures is derived from the declarations of their settings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import json
import math
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from helpers import EXPERIMENTS, ROOT, Experiment, config_of, failure, load, script_environment, usage_error
from support import settings
from support.checkpoints import load_checkpoint, read_checkpoint, require_resumable, save_checkpoint
from support.output import UserError, atomic_write
from support.run import TrainState
from support.script import run_command
from support.settings import SettingError, flag_of, settings_of

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
SCRIPTS = [
    p.stem
    for p in sorted([*ROOT.glob("*.py"), *ROOT.glob("*/*.py")])
    if p.parent.name not in ("tests", "benchmarks") and "\nclass Options(" in p.read_text(encoding="utf-8")
]
PATHS = (settings.folder, settings.input_path, settings.output_path)


@pytest.fixture(params=EXPERIMENTS, scope="module")
def experiment(request: pytest.FixtureRequest) -> Experiment:
    return EXPERIMENTS[request.param]


@pytest.fixture(params=SCRIPTS)
def script(request: pytest.FixtureRequest) -> ModuleType:
    """Each of them, experiments and figures."""
    return load(request.param)


@pytest.fixture
def no_data(monkeypatch: Patch) -> None:
    """What is wrong with a command line is found before any data are made."""
    for experiment in EXPERIMENTS.values():
        monkeypatch.setattr(experiment.script, "make_data", lambda config: pytest.fail("got as far as the data"))


NO_DATA = SimpleNamespace(name="none", labels=range(24), test_labels=range(20))  # as many as in the smallest training


def without_data(patch: Patch) -> None:
    """What goes wrong goes wrong without any data."""
    for experiment in EXPERIMENTS.values():
        patch.setattr(experiment.script, "make_data", lambda config: NO_DATA)
        patch.setattr(experiment.script, "steps_per_epoch", lambda config, data: 3, raising=False)


class Run(NamedTuple):
    result: dict[str, Any]
    states: dict[str, TrainState]
    text: str
    out: Path
    checkpoint: Path


def finished(experiment: Experiment, argv: list[str], folder: Path) -> Run:
    """Run to the end, writing out.json and c.safetensors."""
    folder.mkdir(exist_ok=True)
    out, checkpoint = folder / "out.json", folder / "c.safetensors"
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        assert experiment.script.main([*argv, "--out-json", str(out), "--checkpoint", str(checkpoint)]) == 0
    states = load_checkpoint(experiment.script, checkpoint)[1]
    return Run(json.loads(out.read_text()), states, stdout.getvalue(), out, checkpoint)


@pytest.fixture(scope="module")
def whole(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The smallest training, two epochs of three steps for each model; tests must not change its files."""
    return finished(experiment, experiment.argv(), tmp_path_factory.mktemp("whole"))


def assert_same_bits(a: Run, b: Run) -> None:
    for one, other in ((a.result, b.result), (b.result, a.result)):
        assert one["history"] == other["history"]
        for name, model in one["models"].items():
            same = {key: value for key, value in model.items() if not key.endswith("seconds")}
            assert same.items() <= other["models"][name].items()
    assert list(a.states) == list(b.states)
    for name, state in a.states.items():
        assert state.step == b.states[name].step
        for kind in ("params", "m", "v"):
            for key, array in getattr(state, kind).items():
                np.testing.assert_array_equal(array, getattr(b.states[name], kind)[key], err_msg=f"{name} {kind} {key}")


# --- A wrong flag or value: one line that names it, status 2 ----------------------------------------------------------

WRONG = {  # by the kind of a setting
    "whole_number": ["x", "", "1.5", "nan", "1,5", f"{10**30}", f"-{10**30}", "1\n2"],
    "number": ["x", "", "nan", "inf", "1e400", "-1e30", "1e30", "0x10"],
    "values": ["x", "", "1,", "nan", ","],
    "names": ["nosuch", "", ","],
    "angles": ["", "0", ":", "a:b", "150:0", "0:nan", "0:1e9", "-1e9:0", "0:10:20"],
    **{kind.__name__: [""] for kind in PATHS},
}


@pytest.mark.usefixtures("no_data")
def test_a_wrong_value_is_one_line_that_names_the_flag(script: ModuleType, capsys: Capture) -> None:
    for declared in (script.Config, script.Options):
        for field, it in settings_of(declared).items():
            flag, named = flag_of(field), f"argument {flag_of(field)}: "
            if it.kind is bool:
                assert named in usage_error(script, [f"{flag}=yes"], capsys)
                continue
            for value in ["nosuch", "", "x" * 5000] if isinstance(it.kind, tuple) else WRONG[it.kind.__name__]:
                line = usage_error(script, [f"{flag}={value}"], capsys)
                assert named in line, (flag, value)
                assert len(line) < 450, (flag, value)
            assert f"{named}expected" in usage_error(script, [flag], capsys)


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("word", ["--no-such-flag", "stray", "--lr=1=2", "x\ny", "--" + "z" * 5000])
def test_an_unknown_word_is_one_line_that_names_it(word: str, script: ModuleType, capsys: Capture) -> None:
    line = usage_error(script, [word], capsys)
    assert re.split("[=\n]", word)[0][:50] in line
    assert len(line) < 450


@pytest.mark.usefixtures("no_data")
def test_an_output_that_is_another_file_of_the_command_line_is_refused(
    script: ModuleType, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to(tmp_path / "a")
    kinds = {field: it.kind for field, it in (settings_of(script.Config) | settings_of(script.Options)).items()}
    outputs = [field for field, kind in kinds.items() if kind is settings.output_path]
    for field in outputs:
        others = [other for other, kind in kinds.items() if kind in PATHS and other != field]
        for other, name in ((other, name) for other in others for name in ("a", "./a", "link")):
            argv = [f"{flag_of(field)}=a", f"{flag_of(other)}={name}"]
            assert "is the same file as that of" in usage_error(script, argv, capsys)
    assert list(tmp_path.iterdir()) == [tmp_path / "link"]


def test_a_flag_that_needs_another(experiment: Experiment, capsys: Capture) -> None:
    assert "argument --resume: needs --checkpoint" in usage_error(experiment.script, ["--resume"], capsys)
    with pytest.raises(SettingError, match="argument --resume"):
        config_of(experiment.script, ["--resume"])


def test_help(script: ModuleType, capsys: Capture, monkeypatch: Patch) -> None:
    """--help: about ten flags, examples that the script takes, with their times. --help-all: every flag, with its
    default. What a flag does is said in sentences."""
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py"])
    flags, shown = {}, {}
    for word in ("--help", "--help-all"):
        with pytest.raises(SystemExit, match=r"^0$"):
            script.main([word])
        shown[word] = capsys.readouterr().out
        described = re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)(.*(?:\n {5,}.*)*)", shown[word], re.MULTILINE)
        flags[word] = {flag: " ".join(text.split()) for flag, text in described}
    every = settings_of(script.Config) | settings_of(script.Options)
    usual = {flag_of(field) for field, it in every.items() if it.usual}
    assert set(flags["--help-all"]) == {"--help", "--help-all", *map(flag_of, every)}
    assert set(flags["--help"]) == {"--help", "--help-all", *usual}
    assert 3 <= len(usual) <= 12
    defaults = {f.name: f for declared in (script.Config, script.Options) for f in dataclasses.fields(declared)}
    for field, it in every.items():
        default = it.default or settings.format_value(defaults[field].default, defaults[field].type)
        assert re.match(r"[A-Z].*\.$", it.help), it.help
        assert default in ("none", "False") or f"Default: {default}." in flags["--help-all"][flag_of(field)]
    examples = re.findall(rf"^  python {script.__name__}\.py ?(.*)\n      (.*)$", shown["--help"], re.MULTILINE)
    assert 2 <= len(examples) <= 3
    for words, what in examples:
        assert re.search(r": about \d+ (seconds?|minutes?|hours?)\.$", what), what
        config_of(script, shlex.split(words))


# --- A missing, damaged or wrong file: one line that names it, status 1 -----------------------------------------------


def flipped(content: bytes, at: float) -> bytes:
    changed = bytearray(content)
    changed[int(at * len(content))] ^= 1
    return bytes(changed)


def bad_checkpoints(experiment: Experiment, good: Path, folder: Path) -> Iterator[Path]:
    """Files that are no checkpoint of this experiment."""
    config, states = load_checkpoint(experiment.script, good)
    content = good.read_bytes()
    parts = {"empty": b"", "text": b"no checkpoint\n", "half": content[: len(content) // 2], "cut": content[:-1],
             "weight": flipped(content, 0.7), "head": flipped(content, 0), "length": flipped(content, 3 / len(content)),
             "accuracy": re.sub(rb"(accuracy[^0-9]*[01]\.)(\d)", lambda found: found[1] + b"%d" % (found[2] == b"0"),
                                content, count=1)}  # fmt: skip
    for name, part in parts.items():
        assert part != content
        (folder / name).write_bytes(part)
        yield folder / name
    (folder / "folder").mkdir()
    yield folder / "folder"
    yield folder / "missing"
    state = next(iter(states.values()))
    other = TrainState(state.name, {key: p[..., :-1].copy() for key, p in state.params.items()})
    other.step, other.history = state.step, state.history
    more = dataclasses.make_dataclass("More", [("depth", int, 3)], bases=(type(config),), frozen=True)
    wrong = dataclasses.replace(config, dtype="float7")
    for name, what in {
        "of another": ("another", config, [state]), "of another shape": (experiment.name, config, [other]),
        "of another version": (experiment.name, more(**vars(config)), [state]),
        "of no type": (experiment.name, wrong, [state]),
    }.items():  # fmt: skip
        save_checkpoint(folder / name, *what)
        yield folder / name


@pytest.mark.usefixtures("no_data")
def test_a_file_that_is_no_checkpoint(
    experiment: Experiment, whole: Run, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    without_data(monkeypatch)
    for path in bad_checkpoints(experiment, whole.checkpoint, tmp_path):
        line = failure(experiment.script, [*experiment.argv("--resume"), f"--checkpoint={path}"], capsys)
        assert f"{path}" in line
        for name in SCRIPTS:
            script = load(name)
            it = settings_of(script.Options).get("checkpoint")
            if it and it.kind is settings.input_path and getattr(script, "experiment", None) is experiment.script:
                out = "--outdir" if "visualize" in name else "--out"
                argv = [f"--checkpoint={path}", f"{out}={tmp_path / 'out' / name}"]
                assert failure(script, argv, capsys) == line


def test_an_error_in_the_code_of_a_network_is_not_one_of_its_checkpoint(experiment: Experiment, whole: Run) -> None:
    with pytest.raises(ZeroDivisionError):
        read_checkpoint(whole.checkpoint, experiment.name, experiment.script.Config, lambda config: {"cnn": 1 / 0})
    with pytest.raises(AttributeError, match="has no attribute"):
        read_checkpoint(whole.checkpoint, experiment.name, experiment.script.Config, lambda config: {"cnn": config})


@pytest.mark.usefixtures("no_data")
def test_places_where_nothing_can_be_written(
    script: ModuleType, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    (tmp_path / "file").write_text("a file")
    flags = [flag_of(f) for f, it in settings_of(script.Options).items() if it.kind is settings.output_path]
    if not flags:
        without_data(monkeypatch)
    for flag in flags or ["--outdir"]:
        for path in (tmp_path / "file" / "x", tmp_path / ("x" * 300)) + ((tmp_path,) if flags else ()):
            line = failure(script, [f"{flag}={path}"], capsys)
            assert line.startswith(f"error: cannot write {path}"), line


def test_a_folder_without_the_data(experiment: Experiment, tmp_path: Path, capsys: Capture) -> None:
    if not hasattr(experiment.script.Config, "data_dir"):
        pytest.skip("it reads no files")
    dataset = "mnist" if experiment.has_digits else "smallnorb"
    assert str(tmp_path) in failure(experiment.script, [f"--dataset={dataset}", f"--data-dir={tmp_path}"], capsys)


# --- Interrupted, terminated, killed: the checkpoint of the last epoch, from which --resume gives the same bits -------


@contextlib.contextmanager
def in_step(at: int, what: Callable[[TrainState], object]) -> Iterator[None]:
    """``what`` happens in the step numbered ``at`` of all."""
    original, calls = TrainState.add, 0

    def add(state: TrainState, losses: Any, weight: float = 1) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            what(state)
        original(state, losses, weight)

    with Patch.context() as patch:
        patch.setattr(TrainState, "add", add)
        yield


STOPPED = {signal.SIGKILL: (-9, ""), signal.SIGTERM: (143, "terminated\n"), signal.SIGINT: (130, "interrupted\n")}


@pytest.mark.parametrize(
    ("at", "number"),  # within an epoch, in its last step, in the next model's second epoch
    [(4, signal.SIGINT), (6, signal.SIGTERM), (11, signal.SIGINT)],
)
def test_a_signal_and_resume(
    at: int, number: signal.Signals, experiment: Experiment, whole: Run, tmp_path: Path, capsys: Capture
) -> None:
    path, (status, says) = tmp_path / "c.safetensors", STOPPED[number]
    with in_step(at, lambda _: os.kill(os.getpid(), number)):
        assert experiment.script.main([*experiment.argv(), f"--checkpoint={path}"]) == status
    assert capsys.readouterr() == ("", says)
    assert sum(state.step for state in load_checkpoint(experiment.script, path)[1].values()) == (at - 1) // 3 * 3
    assert_same_bits(finished(experiment, experiment.argv("--resume"), tmp_path), whole)
    stays = finished(experiment, experiment.argv("--resume"), tmp_path)
    assert_same_bits(stays, whole)  # finished, and so is its time
    assert min(model["train_seconds"] for model in stays.result["models"].values()) > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.safetensors", "out.json"]


def test_a_process_that_is_stopped_again_and_again(experiment: Experiment, tmp_path: Path) -> None:
    """Each time in an epoch after the first that it did."""
    argv, checkpoint = experiment.argv("--models cnn --n-epochs 40"), tmp_path / "c.safetensors"
    command = [sys.executable, *run_command(Path(experiment.script.__file__)), *argv, f"--checkpoint={checkpoint}"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    steps = [0]
    for number, says in STOPPED.items():
        before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        # A signal may come where a file is open that nobody holds yet.
        env = script_environment() | {"PYTHONWARNINGS": "error,ignore::ResourceWarning"}
        with subprocess.Popen(command, cwd=ROOT, env=env, **pipes) as process:
            deadline = time.monotonic() + 60
            while process.poll() is None and time.monotonic() < deadline:
                if checkpoint.exists() and checkpoint.stat().st_mtime_ns > before:
                    break
                time.sleep(0.001)
            process.send_signal(number)
            out, error = process.communicate(timeout=60)
        assert (process.returncode, error, out) == (*says, "")
        steps.append(load_checkpoint(experiment.script, checkpoint)[1]["cnn"].step)
        command.append("--resume")
    assert sorted({*steps, 120}) == [*steps, 120]
    unbroken = finished(experiment, argv, tmp_path / "whole")
    assert_same_bits(finished(experiment, [*argv, "--resume"], tmp_path), unbroken)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.safetensors", "out.json", "whole"]


# --- A full disk, a closed pipe: no earlier file is lost, one line ----------------------------------------------------


@pytest.mark.parametrize("which", ["--checkpoint", "--out-json"])
def test_a_full_disk(
    which: str, experiment: Experiment, whole: Run, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    path = tmp_path / "earlier"
    path.write_bytes(whole.checkpoint.read_bytes())

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    line = failure(experiment.script, [*experiment.argv(), f"{which}={path}"], capsys)
    assert line == f"error: cannot write {path}: No space left on device\n"
    assert path.read_bytes() == whole.checkpoint.read_bytes()
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / ".file.tmp").write_text("left by a process that was killed")
    for content, error in ((b"old", None), (b"half", RuntimeError), (b"half", KeyboardInterrupt)):
        with contextlib.suppress(RuntimeError, KeyboardInterrupt), atomic_write(tmp_path / "link") as stream:
            stream.write(content)
            if error:
                raise error
    assert (tmp_path / "file").read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]
    with pytest.raises(UserError, match="/dev/null: it is no regular file"), atomic_write(Path("/dev/null")):
        pass


@pytest.mark.parametrize(
    ("redirection", "status", "error"),
    [
        ("2>&-", 0, ""),
        ("> /dev/full", 1, "error: [Errno 28] No space left on device\n"),
        (">&-", 0, ""),
        ("| true", 0, ""),
    ],
)
def test_closed_and_full_streams(
    redirection: str, status: int, error: str, experiment: Experiment, tmp_path: Path
) -> None:
    flags = experiment.argv("--models cnn --n-epochs 1")
    argv = [sys.executable, *run_command(Path(experiment.script.__file__)), *flags]
    for command in ([*argv, f"--out-json={tmp_path / 'o.json'}"], [*argv[: -len(flags)], "--help"]):
        line = f"set -o pipefail; {shlex.join(command)} {redirection}"
        process = subprocess.run(
            ["bash", "-c", line], cwd=ROOT, env=script_environment(), capture_output=True, text=True, check=False
        )
        assert (process.returncode, process.stderr) == (status, error), command
    assert json.loads((tmp_path / "o.json").read_text())["models"]["cnn"]  # written before it is printed


# --- A NaN: one line with epoch and step ------------------------------------------------------------------------------


def test_a_nan_stops_the_run_and_names_epoch_and_step(experiment: Experiment, tmp_path: Path, capsys: Capture) -> None:
    model, path = experiment.models[0], tmp_path / "c.safetensors"
    with in_step(4, lambda state: next(iter(state.params.values())).fill(np.nan)):
        line = failure(experiment.script, [*experiment.argv(), f"--checkpoint={path}"], capsys)
    assert line == f"error: {model}: the loss became nan in epoch 2, step 2; try a smaller learning rate\n"
    assert load_checkpoint(experiment.script, path)[1][model].step == 3  # the epoch before is kept


@pytest.mark.parametrize("lr", [10, 1e15, 1e45])
def test_a_training_that_really_diverges(lr: float, experiment: Experiment, whole: Run) -> None:
    """Its numbers overflow, without a warning; in the very last step too."""
    config = load_checkpoint(experiment.script, whole.checkpoint)[0]
    rates = {field.name: lr for field in dataclasses.fields(config) if field.name.endswith("lr")}
    config = dataclasses.replace(config, **rates, **({"batch_size": 24} if lr == 1e45 else {}))
    data = experiment.script.make_data(config)
    for name in experiment.models:
        says = pytest.raises(UserError, match=rf"^{name}: .* in epoch \d+, step \d+; try")
        with says if lr > 10 else contextlib.suppress(UserError):
            experiment.script.train_all(config, data, names=(name,))


# --- Results ----------------------------------------------------------------------------------------------------------


def test_out_json_holds_what_the_contract_says(experiment: Experiment, whole: Run) -> None:
    result, script = whole.result, experiment.script
    keys = "experiment seed dataset headline config models history environment command checksum"
    assert set(keys.split()) <= set(result)
    assert (result["experiment"], result["seed"]) == (experiment.name, 0)
    assert set(result["config"]) == {field.name for field in dataclasses.fields(script.Config)}
    assert {"python", "numpy", "blas", "threads", "cpu", "n_cpus", "git_commit"} == set(result["environment"])
    assert (result["environment"]["numpy"], result["environment"]["threads"]) == (np.__version__, 1)
    assert tuple(result["models"]) == tuple(result["history"]) == experiment.models
    for name, model in result["models"].items():
        assert model["n_params"] == sum(p.size for p in whole.states[name].params.values())
        assert model["train_seconds"] > 0
        assert 0 <= model[result["headline"]] <= 1
        accuracies = {key: value for key, value in model.items() if key.endswith("accuracy")}
        assert all(0 <= value <= 1 for value in accuracies.values())
        history = result["history"][name]
        assert {len(values) for values in history.values()} == {2}
        assert all(math.isfinite(loss) for loss in history["train_loss"])
        assert all(model[key] == history[key][-1] for key in set(history) & set(accuracies))
        (row,) = (line for line in whole.text.splitlines() if line.split()[0] == name)
        assert f"{model['n_params']:,}" in row
    assert "seed 0" in whole.text.splitlines()[0]
    _, *argv = shlex.split(result["command"])
    start = run_command(Path(script.__file__))
    assert argv[: len(start)] == [word.removeprefix(f"{ROOT}/") for word in start]
    argv = argv[len(start) :]
    assert json.loads(json.dumps(dataclasses.asdict(config_of(script, argv)), default=str)) == result["config"]


def test_same_seed_same_bits_whatever_is_trained_besides(experiment: Experiment, whole: Run, tmp_path: Path) -> None:
    first, last = experiment.models[0], experiment.models[-1]
    alone = finished(experiment, experiment.argv(f"--models {last}"), tmp_path)
    assert list(alone.result["models"]) == list(alone.result["history"]) == list(alone.states) == [last]
    assert alone.result["history"][last] == whole.result["history"][last]
    for key, p in alone.states[last].params.items():
        np.testing.assert_array_equal(p, whole.states[last].params[key])
    both = finished(experiment, experiment.argv(f"--models {first} --resume"), tmp_path)
    assert {*both.states} == {first, last}  # the checkpoint keeps what it had
    other = finished(experiment, experiment.argv(f"--models {last} --seed 1"), tmp_path / "other").states[last]
    assert all((other.params[key] != p).any() for key, p in alone.states[last].params.items() if key.endswith(".w"))


@pytest.mark.parametrize("quiet", [False, True])
def test_a_bar_on_a_terminal_and_nowhere_else(quiet: bool, experiment: Experiment, capsys: Capture) -> None:
    argv = [word for word in experiment.argv("--models cnn") if quiet or word != "--quiet"]
    assert experiment.script.main(argv) == 0
    out, error = capsys.readouterr()
    assert (error, "cnn" in out) == ("", True)
    master, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with open(terminal, "w") as stderr, Patch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        with contextlib.redirect_stdout(io.StringIO()):
            assert experiment.script.main(argv) == 0
        stderr.write("END")
        stderr.flush()
        shown = b""
        while b"END" not in shown:
            shown += os.read(master, 65536)
    os.close(master)
    assert (shown == b"END") == quiet


# --- Resuming ---------------------------------------------------------------------------------------------------------


def another(kind: Any, value: Any) -> Any:
    """A value of a setting other than the one that it has."""
    if isinstance(kind, tuple):
        return next(choice for choice in kind if choice != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, Path):
        return value / "other"
    if isinstance(value, tuple):
        return (*value[:-1], another(kind, value[-1])) if value and not isinstance(value[0], str) else value[:-1]
    return value / 2 + 0.125 if isinstance(value, float) else 1 if value is None else value + 1


def test_a_resumed_run_has_the_settings_of_its_beginning(experiment: Experiment, whole: Run, capsys: Capture) -> None:
    content = whole.checkpoint.read_bytes()
    saved = load_checkpoint(experiment.script, whole.checkpoint)[0]
    for field, it in settings_of(saved).items():
        changed = dataclasses.replace(saved, **{field: another(it.kind, getattr(saved, field))})
        if it.free or (field.endswith("epochs") and getattr(saved, "length_is_free", False)):
            require_resumable(whole.checkpoint, saved, changed)
            continue
        with pytest.raises(UserError, match=f"cannot resume .*: it was made with {flag_of(field)} .*, not "):
            require_resumable(whole.checkpoint, saved, changed)
    argv = [*experiment.argv("--seed 1"), "--resume", f"--checkpoint={whole.checkpoint}"]
    line = failure(experiment.script, argv, capsys)
    assert line == f"error: cannot resume {whole.checkpoint}: it was made with --seed 0, not 1\n"
    assert whole.checkpoint.read_bytes() == content


def test_a_longer_training_continues_a_shorter_one_where_that_is_its_beginning(
    experiment: Experiment, whole: Run, tmp_path: Path, capsys: Capture
) -> None:
    short = ["--n-epochs=1", f"--checkpoint={tmp_path / 'c.safetensors'}"]
    assert experiment.script.main([*experiment.argv(), *short]) == 0
    if not getattr(config_of(experiment.script, experiment.argv()), "length_is_free", False):
        resumed = [*experiment.argv("--resume"), short[1]]
        assert "made with --n-epochs 1, not 2; its learning rate" in failure(experiment.script, resumed, capsys)
        return
    assert_same_bits(finished(experiment, experiment.argv("--resume"), tmp_path), whole)
    capsys.readouterr()
    assert "which is shorter" in failure(experiment.script, [*experiment.argv(), *short, "--resume"], capsys)
    saved = load_checkpoint(experiment.script, whole.checkpoint)[0]
    longer = dataclasses.replace(saved, n_epochs=3, cnn_epochs=1)
    with pytest.raises(UserError, match=r"made with --cnn-epochs .*, which is shorter"):
        require_resumable(whole.checkpoint, dataclasses.replace(saved, cnn_epochs=2), longer)
    bound = type("Bound", (type(saved),), {"length_is_free": False})(**vars(saved))
    with pytest.raises(UserError, match=r"made with --n-epochs 2, not 3; its learning rate or loss .*: train anew"):
        require_resumable(whole.checkpoint, bound, dataclasses.replace(bound, n_epochs=3))
