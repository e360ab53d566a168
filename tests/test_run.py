"""Every experiment as a person meets it: flags, files, interruptions, damaged files, closed pipes.

A test with the argument ``experiment`` runs for each script whose settings are not declared (test_contract.py has the
others).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

import multimnist_capsnet as digits
from helpers import EXPERIMENTS as ALL
from helpers import (
    ROOT,
    Experiment,
    failure,
    script_environment,
    smallest,
    strokes,
    usage_error,
)
from support import run
from support.flags import flag_of, format_value
from support.optimizers import TrainState

EXPERIMENTS = {name: experiment for name, experiment in ALL.items() if not experiment.is_converted}
Array = np.ndarray
Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
N_STEPS = 6  # of a model in the smallest training: two epochs of three


@pytest.fixture(params=EXPERIMENTS, scope="module")
def experiment(request: pytest.FixtureRequest) -> Experiment:
    return EXPERIMENTS[request.param]


@pytest.fixture(autouse=True, scope="module")
def _smallest() -> Iterator[None]:
    with Patch.context() as patch:
        smallest(patch)
        yield


@pytest.fixture
def no_data(experiment: Experiment, monkeypatch: Patch) -> None:
    """What is wrong has to be found before any data are made, and so before any training."""
    monkeypatch.setattr(experiment.script, "make_data", lambda config: pytest.fail("got as far as the data"))


@pytest.fixture
def no_training(experiment: Experiment, monkeypatch: Patch) -> None:
    monkeypatch.setattr(experiment.script, "train", lambda *_, **__: pytest.fail("trained"))


class Run(NamedTuple):
    """A finished run."""

    result: dict[str, Any]
    states: dict[str, TrainState]
    text: str
    out: Path
    checkpoint: Path


def finished(experiment: Experiment, argv: list[str], folder: Path) -> Run:
    """Run to the end, writing out.json and c.npz."""
    folder.mkdir(exist_ok=True)
    out, checkpoint = folder / "out.json", folder / "c.npz"
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        assert experiment.script.main([*argv, "--out-json", str(out), "--checkpoint", str(checkpoint)]) == 0
    states = experiment.script.load_checkpoint(checkpoint)[1]
    return Run(json.loads(out.read_text()), states, stdout.getvalue(), out, checkpoint)


@pytest.fixture(scope="module")
def whole(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The smallest training, uninterrupted; tests must not change its files."""
    return finished(experiment, experiment.argv(), tmp_path_factory.mktemp("whole"))


def without_seconds(result: dict[str, Any]) -> dict[str, Any]:
    """Models and history without what no two runs have in common."""
    models = {
        name: {key: value for key, value in model.items() if not key.endswith("seconds")}
        for name, model in result["models"].items()
    }
    return {"models": models, "history": result["history"], "config": result["config"]}


def assert_same_states(a: dict[str, TrainState], b: dict[str, TrainState]) -> None:
    assert list(a) == list(b)
    for name, state in a.items():
        assert (state.step, state.history, state.sums) == (b[name].step, b[name].history, b[name].sums)
        for kind in ("params", "m", "v"):
            ours, theirs = getattr(state, kind), getattr(b[name], kind)
            assert list(ours) == list(theirs)
            for key in ours:
                np.testing.assert_array_equal(ours[key], theirs[key], err_msg=f"{name} {kind} {key}")


def assert_same_run(a: Run, b: Run) -> None:
    assert without_seconds(a.result) == without_seconds(b.result)
    assert_same_states(a.states, b.states)


# ----------------------------------------------------------------------------------------------------------------------
# Wrong values of flags
# ----------------------------------------------------------------------------------------------------------------------

NO_NUMBER = ["x", "", " ", "nan", "inf", "-inf", "1e400", "0x10", "1;5", "9" * 5000, "1\n2\nx"]
NO_RANGE = [
    "", ":", "0", "150", "0:", ":150", "a:b", "0:x", "0:10:20", "0-150", "nan:10", "0:nan", "nan:nan", "0:inf",
    "-inf:0", "1e400:0", "0:1e9", "150:0", "0.5:0.4", "9" * 5000, "0:1\n0:x",
]  # fmt: skip
NO_CHOICE = ["some", "", "0", "x" * 5000, "a\nb"]
MOST = {  # of whole numbers from 1
    "--n-epochs": 10**5, "--batch-size": 4096, "--threads": 1024, "--checkpoint-every": 10**9, "--n-train": 10**8,
    "--n-test": 10**7, "--n-train-views": 1000, "--n-test-views": 1000, "--n-elev": 1000, "--n-test-elev": 1000,
    "--n-per-combo": 1000,
    "--n-val": 10**6, "--n-sweep": 10**6, "--n-attack": 10**7, "--attack-steps": 1000, "--check-every": 10**9,
    "--n-val-objects": 4, "--conv-channels": 1024, "--primary-types": 256, "--em-iters": 20, "--routing-iters": 20,
}  # fmt: skip
FROM_0_TO = {"--seed": 2**32 - 1, "--shapes-seed": 2**32 - 1, "--shift": 8, "--max-shift": 12}
OUTSIDE = {  # of numbers
    "--lr": "0 -1 -1e-3 11", "--cnn-lr": "0 -1 -1e-3 11", "--lenet-lr": "0 -1 -1e-3 11", "--match-accuracy": "0 -1 1.1",
    "--variance-floor": "0 -1 1e7", "--beta-v-init": "-11 11", "--pixel-offset": "-11 11",
    "--weight-decay": "-1 101", "--recon-weight": "-1 1001", "--min-iou": "-1 1.5",
}  # fmt: skip
CHOICES = (
    "--canvas --dataset --hold-out --conv --preset --em-grad --routing-grad --lambda-schedule --lr-schedule"
    " --optimizer --loss --cnn --standardize --colour --assignments --vote-bias"
)
WRONG: dict[str, list[str]] = {
    **{flag: ["0", "-1", "1.5", "1,5", str(most + 1), *NO_NUMBER] for flag, most in MOST.items()},
    **{flag: ["-1", "1.5", "1,5", str(most + 1), *NO_NUMBER] for flag, most in FROM_0_TO.items()},
    **{flag: ["1,5", *values.split(), *NO_NUMBER] for flag, values in OUTSIDE.items()},
    **{f"--{which}-azimuths": ["-400:-390", "700:730", "0:361", *NO_RANGE] for which in ("train", "test")},
    **{f"--{which}-elevations": ["-91:0", "80:91", *NO_RANGE] for which in ("train", "test")},
    **{flag: ["36", "cifar", "MNIST", "quadratic", "step", "sgd", "margin", *NO_CHOICE] for flag in CHOICES.split()},
    "--dtype": ["float16", "32", *NO_CHOICE],
    "--image-size": ["12", "129", "32,32", "1.5", *NO_NUMBER],
    "--sizes": ["1,2,3", "1,2,3,4,5", "0,1,1,1", "1,1,1,2000", "8,8,8,-8", "8;8;8;8", "8,8,8,", "8,8,8,x", *NO_NUMBER],
    "--epsilons": ["0", "-0.1", "0.1,0.1", "0.2,0.1", "0.1,", "11", *NO_NUMBER],
    "--rotation": ["181", "15,nan", "15,", *NO_NUMBER],
    "--attack": ["pgd", "fgsm,", "fgsm,fgsm", *NO_CHOICE],
    "--models": ["rnn", "cnn,", "cnn,cnn", *NO_CHOICE],
    **{flag: [""] for flag in ["--data-dir", "--affnist", "--out-json", "--checkpoint", "--predict", "--predict-png"]},
}
VIEWPOINT_FLAGS = {  # not with digits
    "--train-azimuths", "--test-azimuths", "--train-elevations", "--test-elevations", "--n-train-views",
    "--n-test-views", "--n-elev", "--n-test-elev", "--n-per-combo", "--standardize",
}  # fmt: skip
NO_FIELD = {  # of a Config
    "--threads", "--affnist", "--models", "--out-json", "--checkpoint", "--checkpoint-every", "--predict",
    "--predict-png",
}  # fmt: skip
SWITCHES = {
    "--plain",
    "--resume",
    "--overwrite",
    "--eval-only",
    "--quiet",
    "--routing-study",
    "--pose-study",
    "--sign-study",
}
ALL_MAY_BE_ASKED_FOR = {("mnist_affine_capsnet", "--n-train"), ("mnist_affine_capsnet", "--n-test")}  # by 0
IN_WORDS = ALL_MAY_BE_ASKED_FOR | {  # defaults that are no value
    ("mnist_affine_capsnet", "--max-shift"),
    *((name, flag) for name in EXPERIMENTS for flag in ("--conv-channels", "--primary-types")),
    *((name, f"--{subset}-elevations") for name in EXPERIMENTS for subset in ("train", "test")),
}


@functools.cache
def flags_with_a_value(name: str) -> list[str]:
    actions = EXPERIMENTS[name].script.make_parser()._actions
    return [flag for action in actions for flag in action.option_strings if action.nargs != 0]


def test_every_flag_with_a_value_is_tried() -> None:
    assert {flag for name in EXPERIMENTS for flag in flags_with_a_value(name)} <= set(WRONG)


@pytest.mark.usefixtures("no_data")
def test_a_wrong_value_is_one_line_that_names_the_flag(experiment: Experiment, capsys: Capture) -> None:
    script, parser = experiment.script, experiment.script.make_parser()
    with Patch.context() as patch:
        patch.setattr(script, "make_parser", lambda: parser)
        for flag in flags_with_a_value(experiment.name):
            for value in WRONG[flag]:
                if value == "0" and (experiment.name, flag) in ALL_MAY_BE_ASKED_FOR:
                    continue
                line = usage_error(script, [flag, value], capsys)
                assert f"argument {flag}: " in line, value
                assert len(line) < 400, value
            for argv in ([flag], [f"{flag}=--"]):
                assert f"argument {flag}: expected" in usage_error(script, argv, capsys)


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("flag", ["--resume=1", "--quiet=yes", "--no-such-flag", "stray", "--", "x\ny", "-" * 5000])
def test_unknown_arguments(flag: str, experiment: Experiment, capsys: Capture) -> None:
    line = usage_error(experiment.script, [flag], capsys)
    assert re.split("[=\n]", flag)[0][:50] in line
    assert len(line) < 400


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--resume", "--resume: needs --checkpoint"),
        ("--checkpoint-every 5", "--checkpoint-every: needs --checkpoint"),
        ("--eval-only", "--eval-only: needs --checkpoint"),
        ("--predict a.png", "--predict: needs --checkpoint"),
        ("--predict a.png --checkpoint c --eval-only", "--predict: not together"),
        ("--predict a.png --checkpoint c --resume", "--resume: --predict and --eval-only do not train"),
        ("--predict a.png --checkpoint c --checkpoint-every 5", "--checkpoint-every: --predict and"),
        ("--eval-only --checkpoint c --resume", "--resume: --predict and --eval-only do not train"),
        ("--eval-only --checkpoint c --checkpoint-every 5", "--checkpoint-every: --predict and"),
        ("--predict a.png --checkpoint c --out-json o", "--out-json: --predict has no result"),
        ("--checkpoint same --out-json same", "--out-json: is the same file"),
        ("--checkpoint tests/../same --out-json ./same", "--out-json: is the same file"),
        ("--predict a.png --checkpoint c --routing-study", "--routing-study: --predict tests nothing"),
        ("--predict a.png --checkpoint c --pose-study", "--pose-study: --predict tests nothing"),
        ("--predict a.png --checkpoint c --sign-study", "--sign-study: --predict tests nothing"),
        ("--predict a.png --checkpoint c --affnist a.mat", "--affnist: --predict tests nothing"),
        ("--predict-png a.png", "--predict-png: needs --predict"),
        ("--checkpoint a.npz --predict a.png --models cnn", "--models: --predict asks every network"),
        ("--check-every 3", "--check-every: needs --match-accuracy"),
        ("--checkpoint c --predict a.png --predict-png ./c", "--predict-png: would overwrite c"),
        ("--checkpoint c --predict prediction.png", "--predict-png: would overwrite prediction.png"),
    ],
)
def test_flags_that_do_not_fit_together(argv: str, says: str, experiment: Experiment, capsys: Capture) -> None:
    flags = {flag for action in experiment.script.make_parser()._actions for flag in action.option_strings}
    some_have = {"--eval-only", "--predict-png", "--routing-study", "--pose-study", "--sign-study", "--affnist"}
    some_have |= {"--check-every"}
    if absent := some_have - flags:
        if absent & set(argv.split()):
            assert "unrecognized arguments: --" in usage_error(experiment.script, argv.split(), capsys)
        if absent & set(re.findall("--[a-z-]+", f"{argv} {says.partition(':')[0]}")):
            return
    assert f"argument {says}" in usage_error(experiment.script, argv.split(), capsys)


def test_defaults_are_the_config_and_help_shows_them(experiment: Experiment, monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # no default is broken over two lines
    script = experiment.script
    smallest_decoder = {"decoder": (16, 16)} if hasattr(script.Config(), "decoder") else {}
    assert experiment.config() == script.Config(**smallest_decoder)
    options = script.make_parser().format_help().partition("--help-all")[2]
    lines = {text.split()[0]: " ".join(text.split()) for text in re.split(r"\n  (?=--)", options)[1:]}
    fields = {flag_of(script.Config, field.name): field for field in dataclasses.fields(script.Config)}
    assert set(lines) <= set(fields) | NO_FIELD | SWITCHES | {"--preset"}
    for flag, line in lines.items():
        if flag in fields and fields[flag].default not in (None, (), False) and (experiment.name, flag) not in IN_WORDS:
            shown = format_value(fields[flag].default, fields[flag].type)
            assert re.search(rf"Default: .*?{re.escape(shown)}(?![\d.]\d)", line), line
        elif flag in fields and fields[flag].default is not False:
            assert "Default: " in line, line
    for flag in ("--threads", "--models"):
        assert "Default: " in lines[flag]


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
        args = parser.parse_args(argv[: argv.index("--")] if "--" in argv else argv)
        if hasattr(script, "config_from_args"):
            script.config_from_args(args)
    assert (parser.epilog or "").splitlines()[0] in shown["--help"]


# ----------------------------------------------------------------------------------------------------------------------
# A run, its result, and where it is printed
# ----------------------------------------------------------------------------------------------------------------------

KEYS = (
    "experiment", "seed", "dataset", "headline", "chance", "config", "models", "history", "environment",
    "command", "code", "checksum",
)  # fmt: skip


def test_out_json_holds_what_the_contract_says(experiment: Experiment, whole: Run) -> None:
    result, script = whole.result, experiment.script
    assert tuple(key for key in result if experiment.has_digits or key != "confusion") == KEYS
    assert (result["experiment"], result["seed"]) == (experiment.name, 0)
    assert result["dataset"] == ("custom" if experiment.has_digits else "voxels")
    fields = {field.name for field in dataclasses.fields(script.Config)}
    assert set(result["config"]) == fields
    assert {"python", "numpy", "blas", "threads", "cpu", "n_cpus", "git_commit"} == set(result["environment"])
    assert (result["environment"]["numpy"], result["environment"]["threads"]) == (np.__version__, 1)
    assert tuple(result["models"]) == tuple(result["history"]) == experiment.models
    assert 0 < result["chance"] < 0.5
    for name, model in result["models"].items():
        assert model["n_params"] == sum(p.size for p in whole.states[name].params.values())
        assert model["train_seconds"] > 0
        assert 0 <= model[result["headline"]] <= 1
        accuracies = {key: value for key, value in model.items() if key.endswith("accuracy")}
        assert accuracies
        assert all(0 <= value <= 1 for value in accuracies.values())
        history = result["history"][name]
        assert {len(values) for values in history.values()} == {2}
        assert all(math.isfinite(loss) for loss in history["train_loss"])
        assert all(model[key] == history[key][-1] for key in set(history) & set(accuracies))
        (row,) = (line for line in whole.text.splitlines() if line.split()[0] == name)
        assert f"{model['n_params']:,}" in row
    rows = [line.split()[0] for line in whole.text.splitlines()]
    assert [row for row in rows if row in experiment.models] == list(experiment.models)
    assert "seed 0" in whole.text.splitlines()[0]


def test_the_command_of_a_result_writes_that_result(experiment: Experiment, whole: Run) -> None:
    python, script, *argv = shlex.split(whole.result["command"])
    assert (python, script) == ("python", f"{experiment.name}.py")
    parser = experiment.script.make_parser()
    args = parser.parse_args(argv)
    assert args.out_json == whole.out
    recorded = json.loads(json.dumps(dataclasses.asdict(experiment.config(shlex.join(argv)))))
    assert recorded == whole.result["config"]


@pytest.mark.usefixtures("no_data")
def test_figures_refuse_damaged_results_before_they_look_for_data(
    experiment: Experiment, tmp_path: Path, capsys: Capture
) -> None:
    script = importlib.import_module(f"visualize_{experiment.name}")
    if not hasattr(script.make_parser().parse_args([]), "results"):
        pytest.skip("the figures are of the committed results")
    for content, fault in ((b"{", "r.json is not JSON"), (b"\xff", "r.json: it is not text in UTF-8")):
        (tmp_path / "r.json").write_bytes(content)
        argv = [*experiment.argv(), "--results", str(tmp_path / "r.json"), "--outdir", str(tmp_path)]
        assert failure(script, argv, capsys).endswith(f"{fault}\n")


@contextlib.contextmanager
def streams(stdout: Any, stderr: Any) -> Iterator[None]:
    with Patch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "stderr", stderr)
        yield


def nobody_reads() -> Any:
    """The end of a pipe that has no other end."""
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


# ----------------------------------------------------------------------------------------------------------------------
# Numbers
# ----------------------------------------------------------------------------------------------------------------------


def test_same_seed_and_threads_same_bits(experiment: Experiment, tmp_path: Path, whole: Run) -> None:
    model = experiment.models[0]
    argv = experiment.argv(f"--threads 2 --models {model}")
    first, again = (finished(experiment, argv, tmp_path / str(k)) for k in range(2))
    assert_same_run(first, again)
    one, two = whole.states[model], first.states[model]
    assert two.history["train_loss"] == pytest.approx(one.history["train_loss"], rel=1e-3)
    other = finished(experiment, [*argv, "--seed", "1", "--n-epochs", "1"], tmp_path / "other").states[model]
    assert all((other.params[key] != p).any() for key, p in two.params.items() if key.endswith(".w"))


def test_a_model_does_not_depend_on_those_trained_before_it(experiment: Experiment, tmp_path: Path, whole: Run) -> None:
    last = experiment.models[-1]
    alone = finished(experiment, experiment.argv(f"--models {last}"), tmp_path)
    assert list(alone.result["models"]) == list(alone.result["history"]) == [last]
    assert [line.split()[0] for line in alone.text.splitlines() if line.split()[0] in experiment.models] == [last]
    assert_same_states(alone.states, {last: whole.states[last]})


def test_the_callback_is_called_before_the_first_step_and_after_each(experiment: Experiment, whole: Run) -> None:
    config, names = whole_config(experiment, whole), experiment.models[-2:]
    data, seen = experiment.script.make_data(config), []
    states = experiment.script.train_all(
        config, data, names=names, callback=lambda state, ended: seen.append((state.name, state.step, ended))
    )
    assert seen == [(name, step, step % 3 == 0) for name in names for step in range(N_STEPS + 1)]
    assert_same_states(states, {name: whole.states[name] for name in names})


def whole_config(experiment: Experiment, whole: Run) -> Any:
    return experiment.script.load_checkpoint(whole.checkpoint)[0]


def test_a_nan_stops_the_run_and_names_epoch_and_step(
    experiment: Experiment, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    original, model = TrainState.add, experiment.models[0]

    def poison(state: TrainState, losses: Any, weight: float = 1) -> None:
        original(state, losses, weight)
        if state.step == 4:
            state.params["conv1.w"][...] = np.nan

    monkeypatch.setattr(TrainState, "add", poison)
    checkpoint, out = tmp_path / "c.npz", tmp_path / "out.json"
    argv = [*experiment.argv(), "--checkpoint", str(checkpoint), "--out-json", str(out)]
    line = failure(experiment.script, argv, capsys)
    assert line == f"error: {model}: the loss became nan in epoch 2, step 2; try a smaller learning rate\n"
    assert not out.exists()
    (state,) = experiment.script.load_checkpoint(checkpoint)[1].values()  # the epoch before is kept
    assert (state.name, state.step, state.is_finite) == (model, 3, True)


def with_lr(config: Any, lr: float, **changes: Any) -> Any:
    rates = {field.name: lr for field in dataclasses.fields(config) if field.name in ("lr", "cnn_lr", "lenet_lr")}
    schedule = {"lr_schedule": "constant"} if hasattr(config, "lr_schedule") else {}
    return dataclasses.replace(config, **rates, **schedule, **changes)


@pytest.mark.parametrize("lr", [1e15, 1e30])
def test_a_training_that_really_diverges(lr: float, experiment: Experiment, whole: Run) -> None:
    config = with_lr(whole_config(experiment, whole), lr, n_epochs=50)
    data = experiment.script.make_data(config)
    for name in experiment.models:
        with pytest.raises(run.UserError, match=rf"^{name}: .* in epoch \d+, step \d+; try a smaller learning rate$"):
            experiment.script.train_all(config, data, names=(name,))


# ----------------------------------------------------------------------------------------------------------------------
# Interrupted and resumed
# ----------------------------------------------------------------------------------------------------------------------


def interrupted(experiment: Experiment, argv: list[str], checkpoint: Path, at: int) -> int:
    """Run until Ctrl-C comes in the step numbered ``at``; the exit status."""
    original, calls = TrainState.add, 0

    def interrupt(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGINT)
        original(*args, **kwargs)

    with Patch.context() as patch:
        patch.setattr(TrainState, "add", interrupt)
        status: int = experiment.script.main([*argv, "--checkpoint", str(checkpoint)])
    return status


@pytest.mark.parametrize("at", [1, 3, 11, -1])  # the first, an epoch's last, in the next model's second epoch, the last
def test_ctrl_c_at_any_step_and_resume_give_the_same_numbers(
    at: int, experiment: Experiment, whole: Run, tmp_path: Path, capsys: Capture
) -> None:
    at = at if at > 0 else len(experiment.models) * N_STEPS
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert interrupted(experiment, experiment.argv(), tmp_path / "c.npz", at) == 130
    assert capsys.readouterr() == ("", "interrupted\n")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    states = experiment.script.load_checkpoint(tmp_path / "c.npz")[1]
    assert sum(state.step for state in states.values()) == at
    assert_same_run(finished(experiment, experiment.argv("--resume"), tmp_path), whole)
    if at == 11:  # resuming what is finished changes nothing
        assert_same_run(finished(experiment, experiment.argv("--resume"), tmp_path), whole)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.npz", "out.json"]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("conv_matrix_capsules", "--shift 1 --threads 2 --loss cross-entropy"),
    ],
)
def test_ctrl_c_and_resume_under_other_settings(name: str, more: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name]
    argv = experiment.argv(more)
    uninterrupted = finished(experiment, argv, tmp_path / "whole")
    steps = [state.step for state in uninterrupted.states.values()]
    assert ("--match-accuracy" in more) == (min(steps) < N_STEPS)  # a model stopped before the end
    at = steps[0] + 2 if "--match-accuracy" in more else 4
    assert interrupted(experiment, argv, tmp_path / "c.npz", at) == 130
    assert_same_run(finished(experiment, [*argv, "--resume"], tmp_path), uninterrupted)


SMALL_PROCESS = """
import os, pathlib, signal, sys
import numpy as np
import {script}, multimnist_capsnet
from support import optimizers

multimnist_capsnet.PRESETS["small"]["decoder"] = (16, 16)
{more}
sys.exit({script}.main(sys.argv[1:]))
"""


def process_of(experiment: Experiment, argv: list[str], checkpoint: Path, more: str = "") -> subprocess.Popen[str]:
    code = SMALL_PROCESS.format(script=experiment.name, more=more)
    command = [sys.executable, "-c", code, *argv, "--checkpoint", str(checkpoint)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=script_environment()
    )


def start_and_wait(experiment: Experiment, argv: list[str], checkpoint: Path, n_saved: int) -> subprocess.Popen[str]:
    """Start the script and wait until the checkpoint has been written ``n_saved`` times."""
    process = process_of(experiment, argv, checkpoint)
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


@pytest.mark.parametrize(("number", "status", "says"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_a_real_signal_in_mid_training(
    number: str, status: int, says: str, experiment: Experiment, tmp_path: Path
) -> None:
    argv = experiment.argv("--models cnn --n-epochs 30")
    checkpoint = tmp_path / "c.npz"
    process = start_and_wait(experiment, argv, checkpoint, n_saved=2)
    process.send_signal(getattr(signal, number))
    assert process.communicate(timeout=60) == ("", f"{says}\n")
    assert process.returncode == status
    assert list(tmp_path.iterdir()) == [checkpoint]
    (config, states) = experiment.script.load_checkpoint(checkpoint)
    assert 6 <= states["cnn"].step < 90  # it was in the middle
    if number == "SIGINT":
        steps = experiment.script.train_all(config, experiment.script.make_data(config), names=("cnn",))
        files = run.Files(checkpoint, resume=True)
        resumed = experiment.script.train_all(config, experiment.script.make_data(config), names=("cnn",), files=files)
        assert_same_states(resumed, steps)


# What another value is, for each flag that sets a field of a Config; flags that only fit together are given together.
OTHER_VALUES = {
    "--seed": "1", "--n-epochs": "1", "--batch-size": "5", "--lr": "0.1", "--cnn-lr": "0.1", "--lenet-lr": "0.1",
    "--n-train": "32", "--n-test": "9", "--n-val": "17", "--n-sweep": "5", "--n-train-views": "3",
    "--n-test-views": "3", "--n-elev": "2", "--n-test-elev": "4", "--n-per-combo": "2",
    "--min-iou": "0.5", "--max-shift": "1",
    "--shift": "1", "--canvas": "40 --max-shift 2", "--rotation": "10", "--match-accuracy": "0.9",
    "--check-every": "3 --match-accuracy 0.9",
    "--conv-channels": "3", "--primary-types": "2", "--preset": "paper --conv-channels 2 --primary-types 1",
    "--routing-iters": "1", "--routing-grad": "stop", "--recon-weight": "0.5", "--em-iters": "7", "--em-grad": "stop",
    "--em-lambda": "2", "--lambda-schedule": "linear", "--variance-floor": "0.25", "--beta-v-init": "-2",
    "--pixel-offset": "0.5", "--standardize": "image", "--weight-decay": "5", "--optimizer": "muon",
    "--lr-schedule": "cosine", "--loss": "cross-entropy", "--cnn": "paper", "--dtype": "float64",
    "--sizes": "8,2,3,2", "--assignments": "uniform", "--vote-bias": "learned",
    "--train-azimuths": "0:140", "--test-azimuths": "200:320",
    "--test-elevations": "40:70 --train-elevations 10:35 --train-azimuths 0:360",
}  # fmt: skip
FREE = {
    "--dataset", "--data-dir", "--hold-out", "--train-elevations", "--attack", "--epsilons", "--attack-steps",
    "--n-attack", "--image-size", "--colour", "--n-val-objects", "--shapes-seed",
}  # fmt: skip


def changes(experiment: Experiment) -> dict[str, str]:
    flags = set(flags_with_a_value(experiment.name))
    assert flags <= set(OTHER_VALUES) | FREE | NO_FIELD
    values = OTHER_VALUES
    if experiment.has_digits:
        flags -= VIEWPOINT_FLAGS
    return {flag: value for flag, value in values.items() if flag in flags}


def refused(line: str, flag: str, value: str) -> bool:
    words = {flag, *re.findall("--[a-z-]+", value)} | ({"--preset with the decoder"} if flag == "--preset" else set())
    return any(f"made with {word} " in line for word in words) and (
        f"not {value.split()[0]}" in line or len(value.split()) > 1
    )


def test_resuming_with_any_other_setting_is_refused(experiment: Experiment, whole: Run) -> None:
    saved = whole_config(experiment, whole)
    argv = shlex.join(experiment.argv())
    run.check_resumable(whole.checkpoint, saved, experiment.config(argv))
    run.check_same(whole.checkpoint, saved, experiment.config(argv), [f.name for f in dataclasses.fields(saved)])
    for flag, value in changes(experiment).items():
        asked = experiment.config(f"{argv} {flag} {value}")
        with pytest.raises(run.UserError) as error:
            run.check_resumable(whole.checkpoint, saved, asked)
        line = str(error.value)
        assert line.startswith(f"cannot resume {whole.checkpoint}"), flag
        assert refused(line, flag, value) or ("for 1 epochs: it was begun for 2" in line and flag == "--n-epochs"), line


def test_a_longer_training_continues_a_shorter_one_where_that_is_its_beginning(
    experiment: Experiment, tmp_path: Path, capsys: Capture
) -> None:
    constant = " --lr-schedule constant" if "--lr-schedule" in flags_with_a_value(experiment.name) else ""
    model = f"--models cnn --n-epochs 1{constant}"
    shorter = finished(experiment, experiment.argv(model), tmp_path)
    longer = experiment.argv(model.replace("epochs 1", "epochs 3"))
    resume = ["--checkpoint", str(shorter.checkpoint), "--resume"]
    if "n_epochs" not in whole_config(experiment, shorter).free_to_change:
        assert "it was made with --n-epochs 1, not 3" in failure(experiment.script, [*longer, *resume], capsys)
        return
    uninterrupted = finished(experiment, longer, tmp_path / "whole")
    assert_same_run(finished(experiment, [*longer, "--resume"], tmp_path), uninterrupted)
    line = failure(experiment.script, [*experiment.argv(model), *resume], capsys)
    assert line == f"error: cannot resume {shorter.checkpoint} for 1 epochs: it was begun for 3\n"


@pytest.mark.parametrize("name", [name for name, experiment in EXPERIMENTS.items() if experiment.has_digits])
def test_a_run_is_not_resumed_on_other_digits(name: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """``--dataset auto`` trains on strokes, where there is no MNIST. MNIST is there when the run is to go on, and when
    its networks are tested, the result of which names the digits that were found."""
    experiment, checkpoint, out = EXPERIMENTS[name], tmp_path / "c.npz", tmp_path / "o.json"
    script = experiment.script
    argv = [*experiment.argv("--models cnn"), "--checkpoint", str(checkpoint)]
    del argv[argv.index("--dataset") : argv.index("--dataset") + 4]

    def absent(*_: object) -> digits.Digits:
        raise digits.UnavailableError("there is no network")

    few = functools.partial(digits.resolve_dataset, stroke_counts=(60, 60))
    monkeypatch.setattr(digits, "resolve_dataset", few)
    monkeypatch.setattr(digits, "load_mnist", absent)
    assert script.main(argv) == 0
    assert "generated digits" in capsys.readouterr().err
    monkeypatch.setattr(digits, "load_mnist", lambda *_: strokes()._replace(name="mnist"))
    line = failure(script, [*argv, "--resume"], capsys)
    assert line == f"error: cannot resume {checkpoint}: it was made with --dataset strokes, not mnist\n"
    assert script.main([*argv, "--resume", "--dataset", "strokes"]) == 0
    assert script.main([*argv, "--eval-only", "--out-json", str(out)]) == 0
    tested = json.loads(out.read_text())
    assert (tested["dataset"], tested["config"]["dataset"]) == ("mnist", "mnist")


# ----------------------------------------------------------------------------------------------------------------------
# Files that are no checkpoint
# ----------------------------------------------------------------------------------------------------------------------


def predict_argv(experiment: Experiment, checkpoint: Path, *pictures: Path) -> list[str]:
    png = ["--predict-png", str(pictures[0].parent / "drawn")] if (
        "--predict-png" in flags_with_a_value(experiment.name)
    ) else []  # fmt: skip
    return ["--checkpoint", str(checkpoint), *png, "--predict", *map(str, pictures)]


@pytest.mark.usefixtures("no_data")
def test_a_checkpoint_that_is_not_there_is_missed_before_data_are_looked_for(
    experiment: Experiment, tmp_path: Path, capsys: Capture
) -> None:
    path, script = tmp_path / "none.npz", experiment.script
    runs = [["--resume", "--checkpoint", str(path)], predict_argv(experiment, path, tmp_path / "x.png")]
    if hasattr(script, "evaluate_checkpoint"):
        runs.append(["--eval-only", "--checkpoint", str(path)])
    for argv in runs:
        assert failure(script, argv, capsys) == f"error: there is no checkpoint {path}\n"
    assert "checkpoint" in failure(script, predict_argv(experiment, tmp_path, tmp_path / "x.png"), capsys)
    path.write_text("no checkpoint")
    for argv in runs:
        assert failure(script, argv, capsys).endswith(": it is no .npz file, or a part of one\n")


# ----------------------------------------------------------------------------------------------------------------------
# Without training: --eval-only and --predict
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_training")
def test_eval_only_tests_the_networks_again(
    experiment: Experiment, whole: Run, tmp_path: Path, capsys: Capture
) -> None:
    script, checkpoint, out = experiment.script, str(whole.checkpoint), tmp_path / "o.json"
    if not hasattr(script, "evaluate_checkpoint"):
        assert "unrecognized arguments: --eval-only" in usage_error(script, ["--eval-only"], capsys)
        return
    argv = [*experiment.argv(), "--eval-only", "--checkpoint", checkpoint]
    assert script.main([*argv, "--out-json", str(out)]) == 0
    again = json.loads(out.read_text())
    assert again["trained_with_seed"] == 0
    assert set(again) == {*KEYS, "trained_with_seed", "checkpoint_command"}
    for name, model in whole.result["models"].items():
        assert set(again["models"][name]) == set(model)
        for key, value in model.items():
            assert again["models"][name][key] == (pytest.approx(value) if key == "recon_mse" else value), key
    capsys.readouterr()
    assert script.main([*argv, "--seed", "7", "--n-test", "9", "--models", "cnn"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert "seed 7 (trained with seed 0)" in head
    assert [row.split()[0] for row in rows if row.split()[0] in experiment.models] == ["cnn"]


@pytest.mark.usefixtures("no_training")
def test_without_training_no_flag_is_passed_over(
    experiment: Experiment, whole: Run, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    script, parser = experiment.script, experiment.script.make_parser()
    saved = script.load_checkpoint(whole.checkpoint)
    monkeypatch.setattr(script, "load_checkpoint", lambda path: saved)  # which takes its time
    tests = getattr(script, "TEST_FIELDS", ())
    actions = {flag: action.dest for action in parser._actions for flag in action.option_strings}
    for flag, value in changes(experiment).items():
        more = [flag, *value.split()]
        line = failure(script, [*predict_argv(experiment, whole.checkpoint, tmp_path / "x.png"), *more], capsys)
        assert line.startswith(f"error: {whole.checkpoint} was made with --"), flag
        assert refused(line, flag, value), line
        if tests and actions[flag] not in (*tests, "n_train"):
            eval_only = ["--eval-only", "--checkpoint", str(whole.checkpoint), *more]
            assert refused(failure(script, eval_only, capsys), flag, value), flag


def test_networks_that_a_checkpoint_does_not_hold(
    experiment: Experiment, whole: Run, tmp_path: Path, capsys: Capture
) -> None:
    path, script = tmp_path / "c.npz", experiment.script
    config, states = script.load_checkpoint(whole.checkpoint)
    run.save_checkpoint(path, experiment.name, config, [states["cnn"]])
    assert list(script.load_checkpoint(path)[1]) == ["cnn"]
    if hasattr(script, "evaluate_checkpoint"):
        argv = ["--eval-only", "--checkpoint", str(path), "--models", experiment.models[0]]
        assert failure(script, argv, capsys) == f"error: {path} holds cnn, and not {experiment.models[0]}\n"
    run.save_checkpoint(path, experiment.name, config, [states[experiment.models[0]]])  # as after an early Ctrl-C
    picture = tmp_path / "p.png"
    Image.fromarray(strokes().test_images[0]).save(picture)
    assert script.main(predict_argv(experiment, path, picture)) == 0
    assert "cnn" not in capsys.readouterr().out


def test_pictures_that_cannot_be_read_are_one_line(
    experiment: Experiment, whole: Run, tmp_path: Path, capsys: Capture
) -> None:
    good = tmp_path / "good.png"
    Image.fromarray(strokes().test_images[0]).save(good)
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "cut.png").write_bytes(good.read_bytes()[:-40])
    Image.new("L", (40, 50), 255).save(tmp_path / "blank.png")
    faults = {
        "text.png": "is not a picture that can be read",
        "empty.png": "is not a picture that can be read",
        "cut.png": "is not a picture that can be read",
        "none.png": "there is no picture",
        "x" * 200: "there is no picture",
        "x" * 300: "is not a picture",
        ".": "is not a picture",
        "good.png/below": "is not a picture",
    } | ({"blank.png": "has nothing that stands out"} if experiment.has_digits else {})
    for name, fault in faults.items():
        line = failure(experiment.script, predict_argv(experiment, whole.checkpoint, good, tmp_path / name), capsys)
        assert fault in line, name
        assert str(tmp_path / name) in line or len(name) == 300, name  # of which the middle is left out
    assert not (tmp_path / "drawn").exists()


def test_faults_of_data_are_one_line(experiment: Experiment, tmp_path: Path, capsys: Capture) -> None:
    script, folder = experiment.script, str(tmp_path)
    if experiment.has_digits:
        assert "no train-images" in failure(script, ["--dataset", "mnist", "--data-dir", folder], capsys)
        assert "is no folder" in failure(script, ["--data-dir", f"{folder}/none"], capsys)
    if "smallnorb" in next(a.choices for a in script.make_parser()._actions if a.dest == "dataset"):
        assert "smallnorb-5x46789" in failure(script, ["--dataset", "smallnorb", "--data-dir", folder], capsys)
