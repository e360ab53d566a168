"""smallnorb_novel_viewpoint.py as a person meets it: flags, files, interruptions, their own pictures."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

import smallnorb_novel_viewpoint as s
from helpers import ROOT, failure, run_script, script_environment, usage_error

Array = np.ndarray

SCRIPT = "smallnorb_novel_viewpoint.py"
TINY = ["--batch-size", "4", "--n-train-views", "2", "--n-test-views", "2", "--n-elev", "1", "--n-per-combo", "1"]
SHORT = [*TINY, "--n-epochs", "2"]
MODELS = ("capsules", "cnn", "cnn_matched")


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong has to be found before any data is made, and so before any training."""

    def make_data(config: s.Config) -> s.Data:
        pytest.fail("got as far as the data")

    monkeypatch.setattr(s, "make_data", make_data)


# ----------------------------------------------------------------------------------------------------------------------
# Wrong flags
# ----------------------------------------------------------------------------------------------------------------------

NO_NUMBER = ["x", "", " ", "nan", "inf", "-inf", "1e400", "0x10", "1,5", "9" * 5000]
NO_RANGE = [
    "", ":", "0", "150", "0:", ":150", "a:b", "0:x", "0:10:20", "0-150", "nan:10", "0:nan", "nan:nan", "0:inf",
    "-inf:0", "1e400:0", "0:1e9", "150:0", "0.5:0.4",
]  # fmt: skip
WRONG = {
    "--seed": ["-1", "1.5", str(2**32), *NO_NUMBER],
    "--n-epochs": ["0", "-1", "1.5", "100001", *NO_NUMBER],
    "--batch-size": ["0", "-1", "1.5", "4097", *NO_NUMBER],
    "--em-iters": ["0", "-1", "1.5", "21", *NO_NUMBER],
    "--threads": ["0", "-1", "1.5", "1025", *NO_NUMBER],
    "--n-train-views": ["0", "-1", "1.5", "1001", *NO_NUMBER],
    "--n-test-views": ["0", "-1", "1.5", "1001", *NO_NUMBER],
    "--n-elev": ["0", "-1", "1.5", "1001", *NO_NUMBER],
    "--n-per-combo": ["0", "-1", "1.5", "1001", *NO_NUMBER],
    "--lr": ["0", "-1", "-1e-3", "11", *NO_NUMBER],
    "--em-lambda": ["0", "-1", "1001", *NO_NUMBER],
    "--variance-floor": ["0", "-1", "1e7", *NO_NUMBER],
    "--beta-v-init": ["-11", "11", *NO_NUMBER],
    "--weight-decay": ["-1", "101", *NO_NUMBER],
    "--pixel-offset": ["-11", "11", *NO_NUMBER],
    "--train-azimuths": ["-400:-390", "700:730", "0:361", *NO_RANGE],
    "--test-azimuths": ["-400:-390", "700:730", "0:361", *NO_RANGE],
    "--train-elevations": ["-91:0", "80:91", *NO_RANGE],
    "--test-elevations": ["-91:0", "80:91", *NO_RANGE],
    "--dataset": ["mnist", "", "VOXELS"],
    "--em-grad": ["none", "", "0"],
    "--lambda-schedule": ["quadratic", "", "1"],
    "--loss": ["margin", "", "0"],
    "--dtype": ["float16", "", "32"],
    "--data-dir": [""],
    "--out-json": [""],
    "--checkpoint": [""],
    "--predict": [""],
}


def test_every_flag_with_a_value_is_tried() -> None:
    with_value = {flag for action in s.make_parser()._actions for flag in action.option_strings if action.nargs != 0}
    assert with_value == set(WRONG)


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("flag", WRONG)
def test_a_wrong_value_is_one_line_that_names_the_flag(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in WRONG[flag]:
        line = usage_error(s, [flag, value], capsys)
        assert f"argument {flag}: " in line, value
    assert f"argument {flag}: expected" in usage_error(s, [flag], capsys)  # and no value at all


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("flag", ["--resume=1", "--quiet=yes", "--no-such-flag", "stray"])
def test_unknown_arguments(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert flag.split("=")[0] in usage_error(s, [flag], capsys)


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("0:150", "100:330"),
        ("0:150", "150:200"),  # closed ranges share their ends
        ("0:150", "200:360"),  # 360 is 0
        ("0:150", "360:400"),
        ("300:400", "30:60"),
        ("-30:30", "330:340"),
        ("0:360", "10:20"),
        ("10:20", "0:360"),
        ("50:60", "410:420"),
        ("200:330", "-100:-90"),
    ],
)
def test_ranges_that_overlap_modulo_360_are_refused(train: str, test: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = usage_error(s, ["--train-azimuths", train, "--test-azimuths", test], capsys)
    assert "argument --test-azimuths: " in line
    assert "overlaps" in line


@pytest.mark.parametrize(
    ("train", "test"),
    [("0:150", "200:330"), ("-30:30", "31:329"), ("300:400", "60:280"), ("0:0", "1:1"), ("-360:-350", "20:300")],
)
def test_ranges_apart_are_taken(train: str, test: str) -> None:
    parser = s.make_parser()
    config = s.config_from_args(parser, parser.parse_args(["--train-azimuths", train, "--test-azimuths", test]))
    assert s.format_value(config.train_azimuths) == train
    assert s.format_value(config.test_azimuths) == test


BOTH = ["--train-elevations", "10:35", "--test-elevations", "40:70"]


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize(
    ("argv", "flag", "says"),
    [
        ([*BOTH, "--test-azimuths", "200:330"], "--test-azimuths", "elevation is held out already"),
        (["--train-elevations", "10:35"], "--test-elevations", "both or none"),
        (["--test-elevations", "10:35"], "--train-elevations", "both or none"),
        (["--train-elevations", "10:40", "--test-elevations", "40:70"], "--test-elevations", "overlaps"),
        (["--dataset", "smallnorb"], "--data-dir", "needs"),
        (["--data-dir", "folder"], "--data-dir", "needs --dataset smallnorb"),
        (["--dataset", "smallnorb", "--data-dir", "f", "--n-elev", "3"], "--n-elev", "voxels"),
        (["--resume"], "--resume", "needs --checkpoint"),
        (["--predict", "a.png"], "--predict", "needs --checkpoint"),
        (["--predict", "a.png", "--checkpoint", "c", "--resume"], "--predict", "does not train"),
        (["--predict", "a.png", "--checkpoint", "c", "--out-json", "o"], "--predict", "does not train"),
        (["--checkpoint", "same", "--out-json", "same"], "--out-json", "same file"),
        (["--checkpoint", "tests/../same", "--out-json", "./same"], "--out-json", "same file"),
        (["--n-train-views", "1000", "--n-elev", "1000"], "--n-elev", "above the limit"),
        (["--n-train-views", "1000", "--n-elev", "10", "--n-per-combo", "1"], "--n-train-views", "100,000 images"),
        (["--n-test-views", "1000", "--n-elev", "10"], "--n-test-views", "above the limit"),
    ],
)
def test_flags_that_do_not_fit_together(
    argv: list[str], flag: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = usage_error(s, argv, capsys)
    assert flag in line
    assert says in line


def test_elevation_flags_hold_out_elevation() -> None:
    parser = s.make_parser()
    config = s.config_from_args(parser, parser.parse_args(BOTH))
    assert config.held_out == "elevation"
    assert (config.train_elevations, config.test_elevations) == ((10, 35), (40, 70))
    assert config.train_azimuths == config.test_azimuths == (0, 360)
    config = s.config_from_args(parser, parser.parse_args([*BOTH, "--train-azimuths", "0:90"]))
    assert config.train_azimuths == config.test_azimuths == (0, 90)


def test_defaults_are_the_headline_run() -> None:
    parser = s.make_parser()
    config = s.config_from_args(parser, parser.parse_args([]))
    assert config == s.Config()
    assert (config.seed, config.n_epochs, config.lr) == (0, 10, 2e-3)
    assert (config.train_azimuths, config.test_azimuths) == ((0, 150), (200, 330))
    assert config.em_iters == 3


def test_help_shows_every_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # no default is broken over two lines
    options = s.make_parser().format_help().partition("options:")[2]
    lines = {text.split()[0]: " ".join(text.split()) for text in re.split(r"\n  (?=--)", options)[1:]}
    config = s.Config()
    fields = [f.name for f in dataclasses.fields(s.Config)]
    without = {"data_dir", "train_elevations", "test_elevations"}  # nothing unless given
    for field in fields:
        line = lines["--" + field.replace("_", "-")]
        if field not in without:
            assert re.search(rf"default: {re.escape(s.format_value(getattr(config, field)))}\b", line), line
    assert "default" in lines["--threads"]
    assert set(lines) - {"--" + f.replace("_", "-") for f in fields} == {
        "--threads", "--out-json", "--checkpoint", "--resume", "--predict", "--quiet",
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Places where nothing can be written
# ----------------------------------------------------------------------------------------------------------------------


def below_a_file(folder: Path) -> Path:
    (folder / "file").write_text("a file")
    return folder / "file" / "below.json"


def far_below_a_file(folder: Path) -> Path:
    return below_a_file(folder) / "and" / "further"


def a_folder(folder: Path) -> Path:
    return folder


def long_name(folder: Path) -> Path:
    return folder / ("x" * 300)


def a_pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("flag", ["--out-json", "--checkpoint"])
@pytest.mark.parametrize("place", [below_a_file, far_below_a_file, a_folder, long_name, a_pipe])
def test_an_unwritable_path_is_found_before_training(
    place: Callable[[Path], Path], flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = place(tmp_path)
    before = sorted(p.name for p in tmp_path.iterdir())
    assert f"error: cannot write {path}: " in failure(s, [*SHORT, flag, str(path)], capsys)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["a.json", "new/folders/a.json", "x" * 250, "\N{SNOWMAN}" * 80])
def test_writable_paths_are_taken(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    s.require_writable(path)
    assert not path.exists()
    s.save_result(path, {"answer": 42})
    assert json.loads(path.read_text()) == {"answer": 42}
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")

    def write_half() -> None:
        with s.atomic_write(path) as stream:
            stream.write(b"half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# ----------------------------------------------------------------------------------------------------------------------
# A run
# ----------------------------------------------------------------------------------------------------------------------


def test_out_json_holds_what_the_contract_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert s.main([*SHORT, "--seed", "3", "--out-json", str(path)]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    result = json.loads(path.read_text())
    assert set(result) == {"experiment", "seed", "dataset", "config", "models", "history", "environment"}
    assert (result["experiment"], result["seed"], result["dataset"]) == ("smallnorb_novel_viewpoint", 3, "voxels")
    assert set(result["config"]) == {f.name for f in dataclasses.fields(s.Config)}
    assert result["config"]["batch_size"] == 4
    assert {"python", "numpy", "blas", "threads", "cpu", "git_commit"} <= set(result["environment"])
    assert result["environment"]["numpy"] == np.__version__
    assert tuple(result["models"]) == tuple(result["history"]) == MODELS
    for name, model in result["models"].items():
        assert {"n_params", "familiar_accuracy", "held_out_accuracy", "drop", "train_seconds"} <= set(model)
        history = result["history"][name]
        assert {len(values) for values in history.values()} == {2}
        for metric in ("familiar_accuracy", "held_out_accuracy"):
            assert model[metric] == history[metric][-1]
            assert 0 <= model[metric] <= 1
        assert model["drop"] == pytest.approx(model["familiar_accuracy"] - model["held_out_accuracy"])
        assert model["train_seconds"] > 0
        row = next(line for line in out.splitlines() if line.split()[0] == name)
        assert f"{model['held_out_accuracy']:.3f}" in row
        assert f"{model['n_params']:,}" in row
    assert result["models"]["capsules"]["n_params"] == 558_258


def test_the_result_table_has_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert s.main(SHORT) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "200:330 held out" in lines[0]
    assert "seed 0" in lines[0]
    for column in ("familiar", "held out", "drop", "parameters", "seconds"):
        assert column in lines[1]
    assert [line.split()[0] for line in lines[2:]] == list(MODELS)


def test_threads_are_limited_for_the_run_alone(tmp_path: Path) -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl")

    def blas_threads() -> list[int]:
        return [lib["num_threads"] for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "blas"]

    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        before = blas_threads()
        path = tmp_path / "out.json"
        assert s.main([*SHORT, "--threads", "1", "--out-json", str(path)]) == 0
        assert json.loads(path.read_text())["environment"]["threads"] == 1
        assert blas_threads() == before


def test_no_bar_where_stderr_is_no_terminal() -> None:
    result = run_script(SCRIPT, *SHORT)
    assert result.returncode == 0
    assert result.stderr == ""
    assert "cnn_matched" in result.stdout


@pytest.mark.parametrize("quiet", [False, True])
def test_bar_on_a_terminal_unless_quiet(quiet: bool) -> None:
    master, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, str(ROOT / SCRIPT), *SHORT, *(["--quiet"] if quiet else [])]
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=terminal, text=True, timeout=120, check=False, env=script_environment()
    )
    os.write(terminal, b"END")
    os.close(terminal)
    shown = b""
    while b"END" not in shown:
        shown += os.read(master, 65536)
    os.close(master)
    assert result.returncode == 0
    assert ("capsules" in shown.decode()) != quiet
    assert (shown == b"END") == quiet
    assert result.stdout.count("\n") == 5  # the bar is no part of the result


def test_a_command_line_error_from_the_shell() -> None:
    result = run_script(SCRIPT, "--lr", "nan")
    assert result.returncode == 2
    assert result.stdout == ""
    message = "argument --lr: nan is not above 0 and at most 10 (--help shows every flag)"
    assert result.stderr == f"{SCRIPT}: error: {message}\n"


# ----------------------------------------------------------------------------------------------------------------------
# Numbers that stop being numbers
# ----------------------------------------------------------------------------------------------------------------------


def test_a_nan_stops_the_run_and_names_epoch_and_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = s.softmax_cross_entropy, 0

    def fail_in_fifth_step(scores: Array, labels: Array) -> tuple[float, Array]:
        nonlocal calls
        calls += 1
        loss, dscores = original(scores, labels)
        return (float("nan") if calls == 5 else loss), dscores

    monkeypatch.setattr(s, "softmax_cross_entropy", fail_in_fifth_step)
    checkpoint, out = tmp_path / "c.npz", tmp_path / "out.json"
    line = failure(s, [*SHORT, "--checkpoint", str(checkpoint), "--out-json", str(out)], capsys)
    assert "capsules" in line
    assert "epoch 2, step 2" in line  # three steps an epoch
    assert "--lr" in line
    assert not out.exists()
    _, states = s.load_checkpoint(checkpoint)  # the epoch before is kept
    assert states["capsules"].step == 3


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lr", [1e15, 1e30])
def test_a_training_that_really_diverges(name: str, lr: float) -> None:
    config = s.Config(lr=lr, n_epochs=50, n_train_views=2, n_test_views=2, n_elev=1, n_per_combo=1, batch_size=4)
    with pytest.raises(s.UserError, match=rf"^{name}: .* in epoch \d+, step \d+; try a smaller --lr$"):
        s.train(s.make_models(config)[name], config, s.make_data(config))


def test_parameters_that_overflow_in_the_very_last_step() -> None:
    config = s.Config(lr=1e39, n_epochs=1, n_train_views=2, n_test_views=2, n_elev=1, n_per_combo=1, batch_size=32)
    with pytest.raises(s.UserError, match="parameter became infinite or NaN in epoch 1, step 1"):
        s.train(s.make_models(config)["cnn"], config, s.make_data(config))


def test_the_largest_learning_rate_brings_no_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    assert s.main([*SHORT, "--lr", "10", "--n-epochs", "8"]) in {0, 1}  # warnings are errors here
    assert "Warning" not in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------------
# Interrupted and resumed
# ----------------------------------------------------------------------------------------------------------------------


def result_of(argv: list[str], folder: Path) -> tuple[dict[str, Any], dict[str, s.TrainState]]:
    """Run to the end; the result without its times, and the last checkpoint."""
    out, checkpoint = folder / "out.json", folder / "c.npz"
    assert s.main([*argv, "--out-json", str(out), "--checkpoint", str(checkpoint)]) == 0
    result = json.loads(out.read_text())
    for model in result["models"].values():
        del model["train_seconds"]
    return result, s.load_checkpoint(checkpoint)[1]


def assert_same_run(
    a: tuple[dict[str, Any], dict[str, s.TrainState]], b: tuple[dict[str, Any], dict[str, s.TrainState]]
) -> None:
    assert a[0]["history"] == b[0]["history"]
    assert a[0]["models"] == b[0]["models"]
    assert tuple(a[1]) == tuple(b[1]) == MODELS
    for name in MODELS:
        for kind in ("params", "m", "v"):
            for key, array in getattr(a[1][name], kind).items():
                np.testing.assert_array_equal(array, getattr(b[1][name], kind)[key], err_msg=f"{name} {kind} {key}")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, s.TrainState]]:
    return result_of(SHORT, tmp_path_factory.mktemp("uninterrupted"))


@pytest.mark.parametrize("at", [1, 2, 3, 5, 6, 8, 18])  # of 3 models x 2 epochs x 3 steps
def test_ctrl_c_at_any_step_and_resume_give_the_same_numbers(
    at: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    uninterrupted: tuple[dict[str, Any], dict[str, s.TrainState]],
) -> None:
    original, calls = s.adam_step, 0

    def interrupt(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGINT)
        original(*args, **kwargs)

    checkpoint = ["--checkpoint", str(tmp_path / "c.npz")]
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(s, "adam_step", interrupt)
    assert s.main([*SHORT, *checkpoint]) == 130
    monkeypatch.undo()
    out, error = capsys.readouterr()
    assert (out, error) == ("", "interrupted\n")
    assert signal.getsignal(signal.SIGINT) == handler
    states = s.load_checkpoint(tmp_path / "c.npz")[1]
    assert sum(state.step for state in states.values()) == at
    assert_same_run(result_of([*SHORT, "--resume"], tmp_path), uninterrupted)
    # Resuming what is finished changes nothing.
    assert_same_run(result_of([*SHORT, "--resume"], tmp_path), uninterrupted)


LONG = [*TINY, "--n-per-combo", "4"]  # ten steps an epoch


def start_and_wait(argv: list[str], checkpoint: Path, n_saved: int) -> subprocess.Popen[str]:
    """Start the script and wait until the checkpoint has been written ``n_saved`` times."""
    command = [sys.executable, str(ROOT / SCRIPT), *argv, "--checkpoint", str(checkpoint)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=script_environment()
    )
    seen, last = 0, None
    deadline = time.monotonic() + 60
    while seen < n_saved:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        now = (checkpoint.stat().st_ino, checkpoint.stat().st_mtime_ns) if checkpoint.exists() else None
        seen += now != last
        last = now
        time.sleep(0.001)
    return process


def test_a_real_ctrl_c_in_mid_training(tmp_path: Path) -> None:
    argv = [*LONG, "--n-epochs", "8"]
    checkpoint = tmp_path / "c.npz"
    process = start_and_wait(argv, checkpoint, n_saved=2)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error) == (130, "", "interrupted\n")
    states = s.load_checkpoint(checkpoint)[1]
    assert 20 <= sum(state.step for state in states.values()) < 3 * 80  # it was in the middle
    (tmp_path / "whole").mkdir()
    assert_same_run(result_of([*argv, "--resume"], tmp_path), result_of(argv, tmp_path / "whole"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.npz", "out.json", "whole"]


@pytest.mark.parametrize("n_saved", [1, 4])
def test_kill_9_leaves_a_readable_checkpoint(n_saved: int, tmp_path: Path) -> None:
    argv = [*TINY, "--batch-size", "10", "--n-epochs", "5000"]  # one step an epoch: it saves all the time
    checkpoint = tmp_path / "c.npz"
    process = start_and_wait(argv, checkpoint, n_saved)
    time.sleep(0.004 * n_saved)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    _, states = s.load_checkpoint(checkpoint)
    state = states["capsules"]
    assert state.step == len(state.history["train_loss"]) >= n_saved
    assert all(np.isfinite(p).all() for p in state.params.values())


def test_a_longer_training_continues_a_shorter_one(tmp_path: Path) -> None:
    result_of(SHORT, tmp_path)
    longer = [*TINY, "--n-epochs", "4"]
    (tmp_path / "whole").mkdir()
    assert_same_run(result_of([*longer, "--resume"], tmp_path), result_of(longer, tmp_path / "whole"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained checkpoint; tests must not change it."""
    path = tmp_path_factory.mktemp("trained") / "c.npz"
    assert s.main([*SHORT, "--checkpoint", str(path)]) == 0
    return path


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize(
    "change",
    [
        "--seed 1", "--lr 0.1", "--batch-size 5", "--n-train-views 3", "--n-test-views 3", "--n-elev 2",
        "--n-per-combo 2", "--em-iters 2", "--em-grad stop", "--em-lambda 2", "--lambda-schedule linear",
        "--loss spread", "--dtype float64", "--train-azimuths 0:140", "--test-azimuths 200:320", "--n-epochs 1",
    ],
)  # fmt: skip
def test_resuming_with_other_settings_is_refused(
    change: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = checkpoint.read_bytes()
    line = failure(s, [*SHORT, "--checkpoint", str(checkpoint), "--resume", *change.split()], capsys)
    assert f"cannot resume {checkpoint}" in line
    flag, value = change.split()
    assert (flag in line and value in line) or "for 1 epochs: it was begun for 2" in line
    assert checkpoint.read_bytes() == content


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s, "train", lambda *_, **__: pytest.fail("trained"))


def test_a_longer_spread_training_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its margin grows over the whole training, so a shorter one is no beginning of it."""
    argv = [*SHORT, "--loss", "spread", "--checkpoint", str(tmp_path / "c.npz")]
    assert s.main(argv) == 0
    assert "--n-epochs" in failure(s, [*argv, "--n-epochs", "3", "--resume"], capsys)


# ----------------------------------------------------------------------------------------------------------------------
# Files that are no checkpoint
# ----------------------------------------------------------------------------------------------------------------------


def rewritten(good: Path, change: Callable[[dict[str, Any], dict[str, Array]], object]) -> bytes:
    """The checkpoint with its header and arrays changed."""
    with np.load(good) as stored:
        arrays = {key: stored[key] for key in stored.files}
    header = json.loads(str(arrays.pop("header")))
    change(header, arrays)
    path = good.with_name("changed.npz")
    np.savez(path, header=np.array(json.dumps(header)), **arrays)
    content = path.read_bytes()
    path.unlink()
    return content


def saved(good: Path, *args: Any, **arrays: Any) -> bytes:
    path = good.with_name("saved.npz")
    (np.savez if arrays else np.save)(path, *args, **arrays)
    written = path if arrays else good.with_name("saved.npz.npy") if not path.exists() else path
    content = written.read_bytes()
    written.unlink()
    return content


class Trap:
    """A pickle that leaves a trace where it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return (Path.touch, (self.trace,))


def pickled_entry(good: Path) -> bytes:
    return saved(good, header=np.array([Trap(good.with_name("trace"))], dtype=object))


def flipped(good: Path) -> bytes:
    content = bytearray(good.read_bytes())
    content[len(content) // 2] ^= 0xFF
    return bytes(content)


def misfit(header: dict[str, Any], arrays: dict[str, Array]) -> None:
    arrays["cnn/m/out.w"] = arrays["cnn/m/out.w"][:-1]


def other_type(header: dict[str, Any], arrays: dict[str, Array]) -> None:
    arrays["cnn/v/out.w"] = arrays["cnn/v/out.w"].astype(np.float64)


NO_CHECKPOINTS: dict[str, Callable[[Path], bytes]] = {
    "empty": lambda good: b"",
    "text": lambda good: b"this is no checkpoint\n",
    "pickle": lambda good: pickle.dumps(Trap(good.with_name("trace"))),
    "array": lambda good: saved(good, np.zeros(3)),
    "foreign archive": lambda good: saved(good, x=np.zeros(3)),
    "pickle inside": pickled_entry,
    "start": lambda good: good.read_bytes()[:100],
    "half": lambda good: good.read_bytes()[: good.stat().st_size // 2],
    "all but the end": lambda good: good.read_bytes()[:-10],
    "flipped byte": flipped,
    "missing array": lambda good: rewritten(good, lambda h, a: a.pop("capsules/params/class.beta_v")),
    "array of another shape": lambda good: rewritten(good, misfit),
    "array of another type": lambda good: rewritten(good, other_type),
    "other experiment": lambda good: rewritten(good, lambda h, a: h.update(experiment="multimnist_capsnet")),
    "header without models": lambda good: rewritten(good, lambda h, a: h.pop("models")),
    "config of another version": lambda good: rewritten(good, lambda h, a: h["config"].update(depth=3)),
    "config of another kind": lambda good: rewritten(good, lambda h, a: h.update(config=[1, 2])),
    "unknown dtype": lambda good: rewritten(good, lambda h, a: h["config"].update(dtype="float7")),
    "state without step": lambda good: rewritten(good, lambda h, a: h["models"]["cnn"].pop("step")),
    "state with more": lambda good: rewritten(good, lambda h, a: h["models"]["cnn"].update(more=1)),
    "no JSON": lambda good: saved(good, header=np.array("{")),
    "JSON list": lambda good: saved(good, header=np.array("[]")),
}


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize("kind", NO_CHECKPOINTS)
def test_what_is_no_checkpoint_is_one_line(
    kind: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "p.png"
    Image.new("L", (32, 32)).save(picture)
    path = tmp_path / "bad.npz"
    path.write_bytes(NO_CHECKPOINTS[kind](checkpoint))
    if kind in {"missing array", "state without step"}:  # what the break is about does exist in the sound file
        s.load_checkpoint(checkpoint)
    for argv in ([*SHORT, "--resume"], ["--predict", str(picture)]):
        line = failure(s, [*argv, "--checkpoint", str(path)], capsys)
        assert str(path) in line
        assert "checkpoint" in line
    assert not checkpoint.with_name("trace").exists()  # nothing was unpickled


@pytest.mark.usefixtures("no_training")
def test_a_checkpoint_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.npz"
    assert f"there is no checkpoint {path}" in failure(s, [*SHORT, "--resume", "--checkpoint", str(path)], capsys)
    assert f"there is no checkpoint {path}" in failure(s, ["--predict", "x.png", "--checkpoint", str(path)], capsys)
    assert "checkpoint" in failure(s, ["--predict", "x.png", "--checkpoint", str(tmp_path)], capsys)


# ----------------------------------------------------------------------------------------------------------------------
# A person's own pictures
# ----------------------------------------------------------------------------------------------------------------------


def voxel_picture(label: int = 1) -> Array:
    """A view as a person would draw it: (32, 32) uint8, light on dark."""
    image = s.render_voxels(np.array([label]), np.array([60.0]), np.array([30.0]), None)[0, :, :, 0]
    return np.rint(255 * image).astype(np.uint8)


def save(folder: Path, name: str, pixels: Array) -> Path:
    path = folder / name
    Image.fromarray(pixels).save(path)
    return path


def test_a_picture_is_read_as_it_is(tmp_path: Path) -> None:
    pixels = voxel_picture()
    expected = pixels[None, :, :, None] / np.float32(255)
    config = s.Config()
    colours = np.repeat(pixels[..., None], 3, axis=2)
    opaque = np.concatenate([colours, np.full_like(pixels, 255)[..., None]], axis=2)
    transparent_paper = np.stack([np.full_like(pixels, 255)] * 3 + [pixels], axis=2)
    transparent_dark = np.stack([np.zeros_like(pixels)] * 3 + [pixels], axis=2)
    pictures = {
        "grey": pixels,
        "large": np.kron(pixels, np.ones((3, 3), np.uint8)),
        "colours": colours,
        "opaque": opaque,
        "white ink on nothing": transparent_paper,
        "black ink on nothing": transparent_dark,
        "dark on light": 255 - pixels,
        "16 bits": pixels.astype(np.uint16) * 257,
        "black and white": pixels > 127,
    }
    for name, picture in pictures.items():
        image = s.read_picture(save(tmp_path, f"{name}.png", picture), config)
        wanted = (expected > 0.5) if name == "black and white" else expected
        assert image.shape == (1, 32, 32, 1), name
        assert image.dtype == np.float32, name
        np.testing.assert_allclose(image, wanted, atol=0.011, err_msg=name)


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (31, 33), (100, 40), (7, 200), (1, 3000), (3000, 1), (64, 32)])
@pytest.mark.parametrize("dataset", ["voxels", "smallnorb"])
def test_pictures_of_odd_sizes(size: tuple[int, int], dataset: str, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, size[::-1], dtype=np.uint8)
    image = s.read_picture(save(tmp_path, "p.png", pixels), s.Config(dataset=dataset))
    assert image.shape == ((1, 32, 32, 1) if dataset == "voxels" else (1, 48, 48, 2))
    assert np.isfinite(image).all()


def test_a_wide_picture_is_a_stereo_pair_of_smallnorb(tmp_path: Path) -> None:
    pairs = np.random.default_rng(0).integers(0, 256, (1, 2, 96, 96), dtype=np.uint8)
    config = s.Config(dataset="smallnorb")
    image = s.read_picture(save(tmp_path, "pair.png", np.concatenate(list(pairs[0]), axis=1)), config)
    np.testing.assert_array_equal(image, s.shrink(pairs))  # the same normalisation as the data set's
    one_eye = s.read_picture(save(tmp_path, "eye.png", pairs[0, 0]), config)
    np.testing.assert_array_equal(one_eye[..., 0], one_eye[..., 1])
    np.testing.assert_array_equal(one_eye[..., 0], image[..., 0])


def test_predict_names_the_class_that_each_network_scores_highest(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, states = s.load_checkpoint(checkpoint)
    models = s.make_models(config)
    paths = [save(tmp_path, f"picture {label}.png", voxel_picture(label)) for label in range(5)]
    capsys.readouterr()
    assert s.main(["--checkpoint", str(checkpoint), "--predict", *map(str, paths)]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    head, *rows = out.splitlines()
    assert all(name in head for name in (*MODELS, *s.VOXEL_CLASSES))
    assert len(rows) == 5
    images = np.concatenate([s.read_picture(path, config) for path in paths])
    activations = s.capsules_forward(states["capsules"].params, images, config)[1].a
    for k, (path, row) in enumerate(zip(paths, rows, strict=True)):
        assert row.startswith(str(path))
        words = row[len(str(path)) :].split()
        classes = [models[m].forward(states[m].params, images[k : k + 1])[0].argmax() for m in MODELS]
        assert words[:3] == [s.VOXEL_CLASSES[c] for c in classes]
        np.testing.assert_allclose([float(w) for w in words[3:]], activations[k], atol=6e-4)
    argv = ["--checkpoint", str(checkpoint), "--predict", str(paths[0]), "--em-iters", "2"]
    assert failure(s, argv, capsys) == f"error: {checkpoint} was made with --em-iters 3, not 2\n"


def test_predict_with_a_checkpoint_of_the_capsules_alone(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So it is after an early Ctrl-C."""
    config, states = s.load_checkpoint(checkpoint)
    path = tmp_path / "early.npz"
    s.save_checkpoint(path, config, {"capsules": states["capsules"]})
    assert s.main(["--checkpoint", str(path), "--predict", str(save(tmp_path, "p.png", voxel_picture()))]) == 0
    assert "cnn" not in capsys.readouterr().out


def test_pictures_that_cannot_be_read_are_one_line(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = save(tmp_path, "good.png", voxel_picture())
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "cut.png").write_bytes(good.read_bytes()[:-40])
    predict = ["--checkpoint", str(checkpoint), "--predict", str(good)]
    for name in ("text.png", "empty.png", "cut.png"):
        line = failure(s, [*predict, str(tmp_path / name)], capsys)
        assert f"{tmp_path / name} is not a picture that can be read" in line
    assert f"there is no picture {tmp_path / 'none.png'}" in failure(s, [*predict, str(tmp_path / "none.png")], capsys)
    for path in (tmp_path, tmp_path / ("x" * 300), good / "below"):
        assert str(path) in failure(s, [*predict, str(path)], capsys)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(position=st.integers(0, 10_000), value=st.integers(0, 255), length=st.integers(1, 8), cut=st.booleans())
@example(position=1005, value=0, length=3, cut=False)  # Pillow raises a SyntaxError
def test_any_damaged_picture_is_read_or_refused(
    position: int, value: int, length: int, cut: bool, tmp_path: Path
) -> None:
    content = bytearray(save(tmp_path, "p.png", voxel_picture()).read_bytes())
    position %= len(content)
    if cut:
        content = content[:position]
    else:
        content[position : position + length] = bytes([value] * length)
    path = tmp_path / "damaged.png"
    path.write_bytes(content)
    try:
        assert s.read_picture(path, s.Config()).shape == (1, 32, 32, 1)
    except s.UserError as error:
        assert "\n" not in str(error)  # noqa: PT017
