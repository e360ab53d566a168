"""What every script keeps to, whatever its science: the table "What must hold" of DESIGN.md, and that a base script
runs alone. What is tried is derived from the declarations of the settings."""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import dataclasses
import errno
import inspect
import io
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
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest

import multimnist_capsnet as multimnist
import smallnorb_novel_viewpoint as smallnorb
from data import files
from helpers import (
    EXPERIMENTS, ROOT, Capture, Experiment, Patch, config_of, digits_folder, failure, load, script_environment,
    smallest, strokes, usage_error, write_folder,
)
from smallnorb_novel_viewpoint import (
    TrainState, flag_of, from_json, plain, require_same, save_checkpoint, settings_of, text_of, write_file,
)
from support.experiment import load_checkpoint

BASE = ("smallnorb_novel_viewpoint", "multimnist_capsnet")
SCRIPTS = [
    p.stem
    for p in sorted([*ROOT.glob("*.py"), *ROOT.glob("*/*.py")])
    if p.parent.name not in ("tests", "benchmarks")
    and re.search(r"^(class Options\(|Options = )", p.read_text(encoding="utf-8"), re.MULTILINE)
]


OTHERS = {  # whose smallest training no flags make alone
    "what_routing_does": "--study composites --data-dir {digits} --n-epochs 2",
    "your_own_images": "--data-dir {pictures} --n-epochs 2 --lr-schedule constant",
}


@pytest.fixture(params=[*EXPERIMENTS, *OTHERS], scope="module")
def experiment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Experiment]:
    if request.param in EXPERIMENTS:
        yield EXPERIMENTS[request.param]
        return
    parts, own = load("what_routing_does"), load("your_own_images")
    few = {"n_train": 24, "n_test": 20, "batch_size": 8, "conv_channels": 2, "primary_types": 1}
    network_config = parts.network_config
    pictures = tmp_path_factory.mktemp("pictures")
    write_folder(pictures, n=10)
    flags = OTHERS[request.param].format(digits=digits_folder(), pictures=pictures)
    with Patch.context() as patch:
        patch.setattr(parts, "network_config", lambda config: dataclasses.replace(network_config(config), **few))
        patch.setattr(parts, "MODEL_NAMES", ("capsnet",), raising=False)
        patch.setattr(own, "BATCH_SIZE", 8)
        yield Experiment(request.param, flags)


@pytest.fixture(params=SCRIPTS)
def script(request: pytest.FixtureRequest) -> ModuleType:
    """Each of them, experiments and figures."""
    return load(request.param)


@pytest.fixture
def no_data(monkeypatch: Patch) -> None:
    """What is wrong with a command line is found before any data are made."""
    for experiment in EXPERIMENTS.values():
        monkeypatch.setattr(experiment.script, "make_data", lambda config: pytest.fail("got as far as the data"))


class Run(NamedTuple):
    result: dict[str, Any]
    states: dict[str, TrainState]
    text: str
    checkpoint: Path


def finished(experiment: Experiment, argv: list[str], folder: Path) -> Run:
    """Run to the end, writing out.json and c.npz."""
    folder.mkdir(exist_ok=True)
    out, checkpoint = folder / "out.json", folder / "c.npz"
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        assert experiment.script.main([*argv, f"--out-json={out}", f"--checkpoint={checkpoint}"]) == 0
    states = load_checkpoint(experiment.script, checkpoint)[1]
    return Run(json.loads(out.read_text()), states, stdout.getvalue(), checkpoint)


@pytest.fixture(scope="module")
def whole(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The smallest training, two epochs of three steps for each model; tests must not change its files."""
    return finished(experiment, experiment.argv(), tmp_path_factory.mktemp("whole"))


def assert_same_bits(a: Run, b: Run) -> None:
    assert a.result["history"] == b.result["history"]
    for name, model in a.result["models"].items():
        same = {key: value for key, value in model.items() if not key.endswith("seconds")}
        assert same.items() <= b.result["models"][name].items()
    assert list(a.states) == list(b.states)
    for name, state in a.states.items():
        assert state.step == b.states[name].step
        for kind in ("params", "m", "v"):
            for key, array in getattr(state, kind).items():
                np.testing.assert_array_equal(array, getattr(b.states[name], kind)[key], err_msg=f"{name} {kind} {key}")


# --- A wrong flag or value: one line that names it, and the right flag where one is near; status 2 --------------------

WRONG = {  # by what the help calls a value
    "N": ["x", "", "1.5", "nan", "1,5", f"{10**30}", f"-{10**30}", "1\n2"],
    "X": ["x", "", "nan", "inf", "1e400", "-1e30", "1e30", "0x10"],
    "A,B": ["nosuch", "", ","],
    "A:B": ["", "0", ":", "a:b", "150:0", "0:nan", "0:1e9", "-1e9:0", "0:10:20", "0:400"],
    "DIR": [""], "FILE": [""], "FILES": [""],
}


@pytest.mark.usefixtures("no_data")
def test_a_wrong_flag_or_value_is_one_line_that_names_it(script: ModuleType, capsys: Capture) -> None:
    for field, it in (settings_of(script.Config) | settings_of(script.Options)).items():
        flag, named = flag_of(field), f"argument {flag_of(field)}: "
        if not it.metavar:
            assert named in usage_error(script, [f"{flag}=yes"], capsys)
            continue
        for value in WRONG.get(it.metavar, ["nosuch", "", "x" * 5000]):  # one of some
            line = usage_error(script, [f"{flag}={value}"], capsys)
            assert named in line, (flag, value)
            assert len(line) < 450, (flag, value)
        assert f"{named}expected" in usage_error(script, [flag], capsys)
    for word in ("--no-such-flag", "stray", "--lr=1=2", "x\ny", "--" + "z" * 5000):
        line = usage_error(script, [word], capsys)
        assert re.split("[=\n]", word)[0][:50] in line
        assert len(line) < 450


@pytest.mark.usefixtures("no_data")
def test_the_right_flag_is_named_where_one_is_near(experiment: Experiment, capsys: Capture) -> None:
    for wrong, right in (("--epochs", "--n-epochs"), ("--seeds=3", "--seed"), ("--resumes", "--resume")):
        line = usage_error(experiment.script, [wrong], capsys)
        assert f"unrecognized arguments: {wrong} (did you mean {right}?)" in line
    assert "argument --resume: needs --checkpoint" in usage_error(experiment.script, ["--resume"], capsys)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name: str, capsys: Capture, monkeypatch: Patch) -> None:
    """--help: about ten flags, and examples that the script takes. --help-all: every flag, with its default."""
    script, flags = load(name), dict[str, dict[str, str]]()
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    for word in ("--help-all", "--help"):
        with pytest.raises(SystemExit, match=r"^0$"):
            script.main([word])
        shown = capsys.readouterr().out
        described = re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)(.*(?:\n {5,}.*)*)", shown, re.MULTILINE)
        flags[word] = {flag: " ".join(text.split()) for flag, text in described}
    every = settings_of(script.Config) | settings_of(script.Options)
    usual = {flag_of(field) for field, it in every.items() if it.usual}
    assert set(flags["--help-all"]) == {"--help", "--help-all", *map(flag_of, every)}
    assert set(flags["--help"]) == {"--help", "--help-all", *usual}
    assert 3 <= len(usual) <= 12
    defaults = {f.name: f.default for declared in (script.Config, script.Options) for f in dataclasses.fields(declared)}
    values = vars(script.Config()) | vars(script.Options())
    for field, it in every.items():
        default = it.shown or text_of(defaults[field])
        if it.shown[:1].isdigit() and values[field] is not None:
            assert f"{it.shown}, ".startswith(f"{text_of(values[field])}, "), field
        has_none = not it.shown and defaults[field] in (None, False, ())
        assert has_none or f"Default: {default}." in flags["--help-all"][flag_of(field)]
    examples = re.findall(rf"^  python {name}\.py ?(.*)$", shown, re.MULTILINE)
    assert examples
    for words in examples:
        config_of(script, shlex.split(words))


# --- A constructor, flags and JSON make the same configuration --------------------------------------------------------

ELEVATIONS = "--train-elevations 10:35 --test-elevations 40:70"
FLAGS = {
    "smallnorb_novel_viewpoint": [
        "", "--dataset toys", "--dataset shapes --shapes-seed 3", "--n-epochs 3 --cnn-epochs 4", "--lr 0.01",
        f"{ELEVATIONS} --train-azimuths 0:90", "--train-azimuths -30:30 --test-azimuths 60:300.5",
    ],
    "multimnist_capsnet": ["--preset paper --conv-channels 64", "--n-val 100 --min-iou 0"],
    "mnist_affine_capsnet": ["--canvas 40", "--n-train 500 --match-accuracy 0.98"],
    "conv_matrix_capsules": ["--dataset toys --held-out nothing", "--sizes 5,2,3,2 --cnn paper", "--dataset shapes"],
    "capsule_attacks": ["--dataset mnist --data-dir d", "--n-epochs 3 --epsilons 0.1,0.25"],
    "what_routing_does": ["--study composites --assignments even", "--study affnist", "--n-epochs 3 --seed 7"],
}


@pytest.mark.parametrize(("name", "words"), [(name, words) for name, all_words in FLAGS.items() for words in all_words])
def test_flags_a_constructor_and_json_make_the_same_configuration(name: str, words: str) -> None:
    script = load(name)
    by_flags = config_of(script, words.split())
    given = {word[2:].replace("-", "_") for word in words.split() if word.startswith("--")}
    assert script.Config(**{field: getattr(by_flags, field) for field in given}) == by_flags
    assert from_json(script.Config, json.loads(json.dumps(plain(by_flags)))) == by_flags
    assert dataclasses.replace(by_flags) == by_flags


def test_dependent_defaults_and_checks_are_those_of_a_constructor_too() -> None:
    conv, attacks, digits = map(load, ("conv_matrix_capsules", "capsule_attacks", "multimnist_capsnet"))
    toys = smallnorb.Config(dataset="toys", n_epochs=3)
    assert (toys.train_azimuths, toys.test_azimuths, toys.standardize) == ((300, 400), (60, 280), "image")
    assert (toys.n_epochs, toys.cnn_epochs, toys.cnn_lr, smallnorb.Config(lr=0.5).cnn_lr) == (3, 3, 0.0005, 0.5)
    assert (smallnorb.Config().standardize, smallnorb.Config(dataset="shapes").standardize) == ("none", "image")
    assert (conv.Config(dataset="toys").image_size, conv.Config().image_size, conv.Config().cnn_epochs) == (32, 28, 10)
    of_views: list[dict[str, Any]] = [
        {"test_azimuths": (100, 330)}, {"dataset": "smallnorb"}, {"n_epochs": 0}, {"dtype": "float7"}, {"lr": "x"},
        {"plain": "yes"}, {"n_epochs": 2.5}, {"train_elevations": (10, 35)}, {"lr": math.nan},
        {"seed": None}, {"n_elev": None},  # what has a default is not without a value
    ]
    cases: list[tuple[Any, dict[str, Any]]] = [
        *((smallnorb, values) for values in of_views),
        (digits, {"preset": None}), (attacks, {"epsilons": ()}), (attacks, {"epsilons": None}),
    ]
    for script, values in cases:
        with pytest.raises(argparse.ArgumentTypeError, match="argument --"):
            script.Config(**values)


# --- A missing, damaged or wrong file: one line that names it, status 1 -----------------------------------------------


def bad_checkpoints(experiment: Experiment, good: Path, folder: Path) -> Iterator[Path]:
    """Files that are no checkpoint of this experiment."""
    config, states = load_checkpoint(experiment.script, good)
    content, state = good.read_bytes(), next(iter(states.values()))
    at = content.index(max(state.params.values(), key=np.size).tobytes())
    another_weight = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    parts = {"text": b"no checkpoint\n", "half": content[: len(content) // 2], "cut": content[:-1]}
    for name, part in (parts | {"weight": another_weight}).items():
        (folder / name).write_bytes(part)
        yield folder / name
    (folder / "folder").mkdir()
    yield folder / "folder"
    wrong = copy.copy(config)
    object.__setattr__(wrong, "seed", "one")
    other = TrainState(state.name, {key: p[..., :1].copy() for key, p in state.params.items()})  # which would fill all
    other.step, other.history = state.step, state.history
    more = dataclasses.make_dataclass("More", [("depth", int, 3)], bases=(type(config),), frozen=True)
    for name, what in {
        "of another": ("another", config, [state]), "of another shape": (experiment.name, config, [other]),
        "of another version": (experiment.name, more(**vars(config)), [state]),
        "of no type": (experiment.name, wrong, [state]),
    }.items():
        save_checkpoint(folder / name, *what)
        yield folder / name


def test_a_file_that_is_no_checkpoint(
    experiment: Experiment, whole: Run, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    few = SimpleNamespace(name="none", labels=range(24), test_labels=range(20))
    for other in EXPERIMENTS.values():  # before any data are needed
        monkeypatch.setattr(other.script, "make_data", lambda config: few)
        monkeypatch.setattr(other.script, "steps_per_epoch", lambda config, data: 3, raising=False)
    bad = list(bad_checkpoints(experiment, whole.checkpoint, tmp_path))
    for path in bad:
        line = failure(experiment.script, [*experiment.argv("--resume"), f"--checkpoint={path}"], capsys)
        assert f"{path}" in line
        assert ("has shape" in line) == (path.name == "of another shape"), line
    (tmp_path / "empty").write_bytes(b"")
    for path in (bad[1], tmp_path / "empty", tmp_path / "missing"):  # with the last two --resume begins
        for name in SCRIPTS:
            script = load(name)
            it = settings_of(script.Options).get("checkpoint")
            of_figures = name in (f"visualize_{experiment.name}", f"make_{experiment.name}_gif")
            if it and not it.written and of_figures:
                out = "--outdir" if "visualize" in name else "--out"
                argv = [f"--checkpoint={path}", f"{out}={tmp_path / 'out' / name}"]
                argv += [f"--data-dir={tmp_path}"] * (experiment.name == "your_own_images")  # which it needs
                assert f"{path}" in failure(script, argv, capsys)


def test_a_folder_without_the_data(experiment: Experiment, tmp_path: Path, capsys: Capture) -> None:
    dataset = "mnist" if experiment.has_digits else "smallnorb"
    of_set = [f"--dataset={dataset}"] if "dataset" in settings_of(experiment.script.Config) else []
    argv = [*(of_set or experiment.argv()), f"--data-dir={tmp_path}"]
    assert str(tmp_path) in failure(experiment.script, argv, capsys)


# --- Interrupted, terminated, killed: the checkpoint of the last epoch, from which --resume gives the same bits -------


@contextlib.contextmanager
def in_step(experiment: Experiment, at: int, what: Callable[[TrainState], object]) -> Iterator[None]:
    """``what`` happens in the step numbered ``at`` of all."""
    state_class, calls = experiment.script.TrainState, 0
    original = state_class.add

    def add(state: TrainState, *args: Any, **more: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            what(state)
        original(state, *args, **more)

    with Patch.context() as patch:
        patch.setattr(state_class, "add", add)
        yield


STOPPED = {signal.SIGTERM: (143, "terminated\n"), signal.SIGINT: (130, "interrupted\n")}


@pytest.mark.parametrize(("at", "number"), [  # within an epoch, in its last step, in the next model's second epoch
    (4, signal.SIGINT), (6, signal.SIGTERM), (11, signal.SIGINT),
])
def test_a_signal_and_resume(
    at: int, number: signal.Signals, experiment: Experiment, whole: Run, tmp_path: Path, capsys: Capture
) -> None:
    at = min(at, 6 * len(experiment.models) - 1)  # where there is one model
    path, handlers = tmp_path / "c.npz", [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with in_step(experiment, at, lambda _: os.kill(os.getpid(), number)):
        argv = [*experiment.argv("--resume"), f"--checkpoint={path}"]  # which begins where there is no file yet
        assert experiment.script.main(argv) == STOPPED[number][0]
    assert capsys.readouterr() == ("", STOPPED[number][1])
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    assert sum(state.step for state in load_checkpoint(experiment.script, path)[1].values()) == (at - 1) // 3 * 3
    assert_same_bits(finished(experiment, experiment.argv("--resume"), tmp_path), whole)
    stays = finished(experiment, experiment.argv("--resume"), tmp_path)
    assert_same_bits(stays, whole)  # finished, and so is its time
    assert min(model["train_seconds"] for model in stays.result["models"].values()) > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.npz", "out.json"]


def test_a_process_that_is_killed(tmp_path: Path) -> None:
    experiment = EXPERIMENTS[BASE[0]]
    argv, checkpoint = experiment.argv("--models cnn --n-epochs 40 --resume"), tmp_path / "c.npz"
    command = [sys.executable, f"{ROOT / BASE[0]}.py", *argv, f"--checkpoint={checkpoint}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=script_environment()) as process:
        while process.poll() is None and not checkpoint.exists():
            time.sleep(0.001)
        process.kill()
        assert (*process.communicate(timeout=60), process.returncode) == (b"", b"", -9)
    assert load_checkpoint(experiment.script, checkpoint)[1]["cnn"].step in range(3, 120, 3)
    assert_same_bits(finished(experiment, argv, tmp_path), finished(experiment, argv, tmp_path / "whole"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.npz", "out.json", "whole"]


def another(metavar: str, value: Any) -> Any:
    """A value of a setting other than the one that it has."""
    if isinstance(value, bool):
        return not value
    if "|" in metavar:
        return next(choice for choice in metavar.split("|") if choice != str(value))
    if isinstance(value, tuple):
        return (*value[:-1], another(metavar, value[-1])) if not isinstance(value[0], str) else value[:-1]
    return value / "other" if isinstance(value, Path) else value / 2 + 0.125 if isinstance(value, float) else 1 + value


def test_a_resumed_run_has_the_settings_of_its_beginning(experiment: Experiment, whole: Run, capsys: Capture) -> None:
    """Where the learning rate and the loss do not depend on its length, it may be longer, and not shorter."""
    content = whole.checkpoint.read_bytes()
    saved = load_checkpoint(experiment.script, whole.checkpoint)[0]
    may_be_longer = getattr(saved, "length_is_free", False)
    for field, it in settings_of(saved).items():
        if (value := getattr(saved, field)) is None:
            continue
        changed = copy.copy(saved)
        object.__setattr__(changed, field, another(it.metavar, value))
        if it.free or (field.endswith("epochs") and may_be_longer):
            require_same(whole.checkpoint, saved, changed, vars(saved), may_be_longer)
            continue
        with pytest.raises(OSError, match=f"{whole.checkpoint} was made with {flag_of(field)} .*, not "):
            require_same(whole.checkpoint, saved, changed, vars(saved), may_be_longer)
    for words, said in (("--seed 1", "--seed 0, not 1"), ("--n-epochs 1", "--n-epochs 2, not 1")):
        argv = [*experiment.argv(words), "--resume", f"--checkpoint={whole.checkpoint}"]
        line = failure(experiment.script, argv, capsys)
        assert line == f"error: {whole.checkpoint} was made with {said}\n"
    assert whole.checkpoint.read_bytes() == content


def test_a_longer_training_continues_a_shorter_one_bit_for_bit(
    experiment: Experiment, whole: Run, tmp_path: Path
) -> None:
    if experiment.name not in (BASE[0], "your_own_images"):
        pytest.skip("its learning rate or loss depends on its length")
    finished(experiment, experiment.argv("--n-epochs 1"), tmp_path)
    assert_same_bits(finished(experiment, experiment.argv("--resume"), tmp_path), whole)


def test_a_training_whose_margin_rises_to_its_end_is_not_made_longer(tmp_path: Path, capsys: Capture) -> None:
    argv = EXPERIMENTS[BASE[0]].argv(f"--models cnn --loss spread --checkpoint {tmp_path / 'c'}")
    assert smallnorb.main([*argv, "--n-epochs=1"]) == 0
    why = "its learning rate or loss depends on the length"
    assert f"was made with --n-epochs 1, not 2: {why}" in failure(smallnorb, [*argv, "--resume"], capsys)


def test_a_run_is_not_resumed_on_other_digits(
    experiment: Experiment, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """It trains on strokes, where there is no MNIST, which is there when the run is to go on."""
    finds_digits = experiment._replace(tiny=re.sub(r"(--dataset mnist )?--data-dir \S+", "", experiment.tiny))
    if experiment.name == "your_own_images" or finds_digits == experiment:
        pytest.skip("it looks for no digits")
    argv = finds_digits.argv(f"--checkpoint={tmp_path / 'c'}")
    monkeypatch.setattr(multimnist, "STROKE_COUNTS", (90, 60))
    monkeypatch.setattr(multimnist, "load_mnist", Mock(side_effect=multimnist.UnavailableError("there is no network")))
    assert experiment.script.main(argv) == 0
    assert "drawn digits" in capsys.readouterr().err
    monkeypatch.setattr(multimnist, "load_mnist", lambda *_: strokes()._replace(name="mnist"))
    line, has_flag = failure(experiment.script, [*argv, "--resume"], capsys), "--dataset" in experiment.tiny
    what = "--dataset" if has_flag else "other dataset:"
    assert line == f"error: {tmp_path / 'c'} was made with {what} strokes, not mnist\n"
    assert not has_flag or experiment.script.main([*argv, "--resume", "--dataset=strokes"]) == 0


def test_what_a_resumed_run_may_change() -> None:
    scripts = [load(name) for name in (*EXPERIMENTS, "what_routing_does", "your_own_images")]
    free = {f"{one.EXPERIMENT} {field}" for one in scripts for field, it in settings_of(one.Config).items() if it.free}
    assert free == {"capsule_attacks epsilons", "capsule_attacks n_attack", "your_own_images data_dir"}


# --- Outputs: those of something else are left alone; full disk, closed pipe ------------------------------------------


@pytest.mark.usefixtures("no_data")
def test_an_output_that_is_none_of_this_runs_is_left_alone(
    experiment: Experiment, whole: Run, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    result = json.dumps(whole.result)
    others = {
        "--out-json": [b"notes", b"[1]", result.replace(experiment.name, "another").encode(),
                       json.dumps({"config": {}, "experiment": experiment.name}).encode()],
        "--checkpoint": [b"notes", result.encode(), whole.checkpoint.read_bytes()[:-9]],
    }
    for flag, contents in others.items():
        for content in contents:
            (tmp_path / "file").write_bytes(content)
            line = failure(experiment.script, [*experiment.argv(), f"{flag}={tmp_path / 'file'}"], capsys)
            assert re.match(rf"error: {tmp_path / 'file'} (is there.*name another file|was made with --)", line)
            assert (tmp_path / "file").read_bytes() == content
    (tmp_path / "r").write_text(result)
    for flag, path in (("--out-json", tmp_path / "r"), ("--checkpoint", whole.checkpoint)):
        line = failure(experiment.script, [*experiment.argv("--seed 1"), f"{flag}={path}"], capsys)
        assert line == f"error: {path} was made with --seed 0, not 1\n"
    resumed = f"--seed 1 --resume --out-json={tmp_path / 'r'} --checkpoint={tmp_path / 'no'}"
    line = failure(experiment.script, experiment.argv(resumed), capsys)
    assert line == f"error: {tmp_path / 'r'} was made with --seed 0, not 1\n"
    assert (tmp_path / "r").read_text() == result
    (tmp_path / "empty").touch()
    script, config = experiment.script, from_json(experiment.script.Config, whole.result["config"])
    for out, checkpoint in ((tmp_path / "r", whole.checkpoint), (tmp_path / "empty", tmp_path / "empty.npz")):
        options = script.Options(out_json=out, checkpoint=checkpoint)  # its own, or nobody's
        script.require_own_outputs(script.EXPERIMENT, config, options)
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to(tmp_path / "r")
    for name in ("r", "./r", "link"):
        argv = [*experiment.argv(), "--out-json=r", f"--checkpoint={name}"]
        assert "is the same file as that of" in usage_error(experiment.script, argv, capsys)


@pytest.mark.usefixtures("no_data")
def test_places_where_nothing_can_be_written(script: ModuleType, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("a file")
    of_answers = script.__name__.endswith("your_own_images")  # its --out needs --predict
    fields = [field for field, it in settings_of(script.Options).items() if it.written]
    fields = [field for field in fields if not (field == "out" and of_answers)]
    needed = ["--data-dir=x"] if of_answers else []
    for flag in map(flag_of, fields or {"outdir"} & {*settings_of(script.Options)}):
        for path in (tmp_path / "file" / "x", tmp_path / ("x" * 300)) + ((tmp_path,) if flag != "--outdir" else ()):
            line = failure(script, [*needed, f"{flag}={path}"], capsys)
            assert line.startswith(f"error: cannot write {path}"), line


def test_a_full_disk(experiment: Experiment, whole: Run, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """The training goes on, the table is printed, an earlier result stays, and the status is 1."""
    earlier, n_epochs = json.dumps(whole.result).encode(), 2 * len(experiment.models)
    (tmp_path / "r").write_bytes(earlier)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    for flag, path, n_warnings in (("--checkpoint", tmp_path / "c", n_epochs), ("--out-json", tmp_path / "r", 0)):
        capsys.readouterr()
        assert experiment.script.main([*experiment.argv(), f"{flag}={path}"]) == 1
        out, error = capsys.readouterr()
        fault = f"cannot write {path}: No space left on device"
        assert error.splitlines() == [f"warning: {fault}; the training goes on"] * n_warnings + [f"error: {fault}"]
        rows = [re.sub(r" +[\d.]+$", "", line) for line in out.splitlines()]
        assert rows == [re.sub(r" +[\d.]+$", "", line) for line in whole.text.splitlines()]  # without the seconds
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("r", earlier)]


def test_what_could_not_be_written_once_and_was_later_is_no_failure(
    experiment: Experiment, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=itertools.chain([full], itertools.repeat(None))))
    assert experiment.script.main([*experiment.argv(), f"--checkpoint={tmp_path / 'c.npz'}"]) == 0
    assert capsys.readouterr().err.count("the training goes on") == 1


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / f".file.{os.getpid()}.tmp").write_text("left by a process that was killed")
    write_file(tmp_path / "link", b"old")
    for error in (RuntimeError, KeyboardInterrupt):
        monkeypatch.setattr(os, "fsync", lambda _, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(error):
            write_file(tmp_path / "link", b"half")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]
    with pytest.raises(OSError, match="/dev/null: it is no regular file"):
        write_file(Path("/dev/null"), b"")


def test_a_file_that_cannot_be_replaced_is_written_in_its_place(tmp_path: Path, monkeypatch: Patch) -> None:
    """As one that is mounted by itself in a container."""

    numbers = [errno.EROFS]

    def busy(*_: object) -> None:
        raise OSError(numbers[-1], "Device or resource busy")

    path = tmp_path / "file"
    path.write_bytes(b"an older and longer text")
    monkeypatch.setattr(os, "replace", busy)
    for number in (errno.EROFS, errno.EACCES, errno.EPERM, errno.EBUSY):
        content = f"new {number}".encode()
        numbers.append(number)
        write_file(path, content)
        assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", content)]
    with pytest.raises(OSError, match=r"cannot write .*: Device or resource busy"):
        write_file(tmp_path / "another", b"new")


@pytest.mark.parametrize(("name", "redirection", "status", "error"), [
    (BASE[0], "2>&-", 0, ""), (BASE[1], ">&-", 0, ""), (BASE[0], "| true", 0, ""),
    (BASE[1], "> /dev/full", 1, "error: [Errno 28] No space left on device\n"),
])
def test_closed_and_full_streams(name: str, redirection: str, status: int, error: str, tmp_path: Path) -> None:
    """The result is written, whoever reads the table."""
    argv = [sys.executable, f"{ROOT / name}.py", *EXPERIMENTS[name].argv("--models cnn --n-epochs 1")]
    argv.append(f"--out-json={tmp_path / 'r.json'}")
    line = f"set -o pipefail; {shlex.join(argv)} {redirection}"
    done = subprocess.run(["bash", "-c", line], env=script_environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, error)
    assert json.loads((tmp_path / "r.json").read_text())["models"]["cnn"]


# --- A NaN: one line with epoch and step ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, 3e38])
def test_a_nan_stops_the_run_and_names_epoch_and_step(
    value: float, experiment: Experiment, tmp_path: Path, capsys: Capture
) -> None:
    """Overflows and the like are no warnings."""
    model, path = experiment.models[0], tmp_path / "c.npz"
    with in_step(experiment, 4, lambda state: next(iter(state.params.values())).fill(value)):
        line = failure(experiment.script, [*experiment.argv(), f"--checkpoint={path}"], capsys)
    said = r"error: {}: train_loss became (nan|inf) in epoch 2, step 5; try a smaller learning rate\n"
    assert re.fullmatch(said.format(model), line)
    assert load_checkpoint(experiment.script, path)[1][model].step == 3  # the epoch before is kept


def test_scores_that_are_not_finite_have_no_accuracy(experiment: Experiment, capsys: Capture) -> None:
    """Parameters so large that a test overflows, after the last step of the first epoch."""
    model = experiment.models[0]

    def enlarge(state: Any) -> None:
        for p in state.params.values():
            p[...] = np.where(p < 0, -1e38, 1e38)

    with in_step(experiment, 3, enlarge):
        line = failure(experiment.script, experiment.argv(), capsys)
    assert re.match(rf"error: {model}: \w+ became (nan|inf) in epoch (1, step 3|2, step 4);", line), line


def test_a_stream_that_lacks_a_letter_shows_its_number(monkeypatch: Patch) -> None:
    stream = io.TextIOWrapper(content := io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert smallnorb.script(lambda argv: print("0.7 ± 0.1"))() == 0
    assert (content.getvalue(), stream.errors) == (b"0.7 \\xb1 0.1\n", "strict")


def test_what_does_not_fit_into_memory_is_one_line(capsys: Capture) -> None:
    def main(argv: object) -> None:
        raise MemoryError("Unable to allocate 9 GiB")

    assert smallnorb.script(main)() == 1
    assert capsys.readouterr() == ("", "error: Unable to allocate 9 GiB\n")


def test_a_data_module_in_the_way_is_named(tmp_path: Path, monkeypatch: Patch) -> None:
    (path := tmp_path / "data.py").write_text("x = 1", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for module in [module for module in sys.modules if module.partition(".")[0] == "data"]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(OSError, match=rf"^{re.escape(str(path))} is in the way of data/shapes\.py beside the script: "):
        smallnorb.from_data("shapes")


# --- Without a terminal a line an epoch; with one, a bar; results -----------------------------------------------------


def test_a_line_an_epoch_or_a_bar_on_a_terminal(experiment: Experiment, capsys: Capture, monkeypatch: Patch) -> None:
    clear, name = "\r\x1b[K", "cnn" if len(experiment.models) > 1 else experiment.models[0]

    def shown(flags: str = "") -> str:
        argv = experiment.argv(flags if len(experiment.models) == 1 else f"--models cnn {flags}")
        argv.remove("--quiet")
        assert experiment.script.main(argv) == 0
        return capsys.readouterr().err.split(" 20x20 pixels, grey, 3 classes\n")[-1]  # of your_own_images, before all

    lines = shown().splitlines()
    assert lines[0] == f"{name}: step 0 of 6"
    assert lines[3:] == ["cnn: attacks on 2 images"] * (experiment.name == "capsule_attacks")
    for step, line in zip((3, 6), lines[1:3], strict=True):
        assert re.fullmatch(rf"{name}: step {step} of 6(, [a-z ]+ [01]\.\d{{3}})+, \d+\.\d s", line)
    assert shown("--quiet") == ""
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _: True)
    monkeypatch.setattr(type(sys.stderr), "fileno", lambda _: 2)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((30, 50)))
    bar = shown()
    assert "\n" not in bar
    assert "step 6 of 6" in bar
    assert bar.endswith(clear)  # gone at the end
    assert max(map(len, bar.split(clear))) == 29  # a longer line would not be replaced
    sys.modules[experiment.script.Session.__module__].print_message("error: a fault")
    assert capsys.readouterr().err == f"{clear}error: a fault\n"  # and nothing of the bar
    monkeypatch.setenv("TERM", "dumb")
    assert shown().startswith(f"{name}: step 0 of 6\n")
    monkeypatch.setitem(sys.modules, "idlelib.run", Mock())  # a shell that shows escape codes
    assert not smallnorb.obeys_escapes.__wrapped__()


def test_out_json_holds_what_the_contract_says(experiment: Experiment, whole: Run) -> None:
    result, script = whole.result, experiment.script
    assert set(result) >= {"experiment", "seed", "dataset", "headline", "config", "models", "history"}
    assert (result["experiment"], result["seed"]) == (experiment.name, 0)
    assert set(result["config"]) == {field.name for field in dataclasses.fields(script.Config)}
    assert tuple(result["models"]) == tuple(result["history"]) == experiment.models
    for name, model in result["models"].items():
        assert model["n_params"] == sum(p.size for p in whole.states[name].params.values())
        assert model["train_seconds"] > 0
        accuracies = {key: value for key, value in model.items() if key.endswith("accuracy")}
        assert result["headline"] in accuracies
        assert all(0 <= value <= 1 for value in accuracies.values())
        history = result["history"][name]
        assert {len(values) for values in history.values()} == {2}
        assert all(math.isfinite(loss) for loss in history["train_loss"])
        assert all(model[key] == history[key][-1] for key in set(history) & set(accuracies))
        (row,) = (line for line in whole.text.splitlines() if line.split()[:1] == [name])
        assert f"{model['n_params']:,}" in row
    lines = whole.text.splitlines()
    assert "seed 0" in (whole.text if experiment.name == "your_own_images" else lines[0])


def test_same_seed_same_bits_whatever_is_trained_besides(experiment: Experiment, whole: Run, tmp_path: Path) -> None:
    if len(experiment.models) == 1:
        pytest.skip("it trains one network")
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


def test_threads_reach_what_computes(experiment: Experiment, monkeypatch: Patch) -> None:
    """Fewer would change no accuracy, and take longer."""
    place = "blas_threads" if experiment.name == BASE[0] else "Workers"
    monkeypatch.setattr(experiment.script, place, asked := Mock(wraps=getattr(experiment.script, place)))
    of_one = f" --models {experiment.models[-1]}" if len(experiment.models) > 1 else ""
    assert experiment.script.main(experiment.argv(f"--threads 3{of_one}")) == 0
    assert {call.args for call in asked.call_args_list} == {(3,)}


# --- In a notebook: no flags of the kernel, and all as it was before --------------------------------------------------


def test_main_without_argv_takes_no_flags_and_leaves_all_as_it_was(experiment: Experiment, monkeypatch: Patch) -> None:
    def surroundings() -> list[Any]:
        streams = [(stream.errors, stream.encoding, stream.line_buffering) for stream in (sys.stdout, sys.stderr)]
        return [*map(signal.getsignal, signal.valid_signals()), *streams, np.geterr(), dict(os.environ), os.getcwd()]

    monkeypatch.setattr(experiment.script, "make_data", reach := Mock(side_effect=ArithmeticError))
    monkeypatch.setattr(sys, "argv", ["kernel", "-f", "kernel.json"])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever an earlier call has left
    before = surroundings()
    if experiment.name == "your_own_images":
        assert experiment.script.main() == 2  # it needs a folder
    else:
        with pytest.raises(ArithmeticError):
            experiment.script.main()
        reach.assert_called_once_with(experiment.script.Config())
    assert experiment.script.main(["--no-such-flag"]) == 2
    assert surroundings() == before


# --- Alone ------------------------------------------------------------------------------------------------------------

OWN = {  # of the two base scripts, under the same name
    "N_CLASSES", "cnn_init", "cnn_forward", "cnn_backward", "Network", "make_models", "Data", "make_data", "Config",
    "MODEL_NAMES", "Options", "EVALUATION_BATCH", "evaluate", "train", "EXPERIMENT", "train_all", "make_result",
    "run", "describe", "format_table", "main",
}


def definitions(name: str) -> dict[str, str]:
    """What a script defines on its top level, and the text of it."""
    lines, found = (ROOT / f"{name}.py").read_text().splitlines(), dict[str, str]()
    for node in ast.parse("\n".join(lines)).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [x.id for target in targets if target for x in ast.walk(target) if isinstance(x, ast.Name)]
        names += [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        found |= dict.fromkeys(names, "\n".join(lines[node.lineno - 1 : node.end_lineno]))
    return found


def test_what_both_base_scripts_define_is_the_same_text_unless_it_is_the_experiments_own() -> None:
    ours, theirs = map(definitions, BASE)
    common = ours.keys() & theirs.keys()
    assert {name for name in common if ours[name] != theirs[name]} == OWN
    assert len(common - OWN) > 60
    for name in ("one_line", "obeys_escapes", "is_terminal"):  # and the readers of data write to a terminal as they do
        assert inspect.getsource(getattr(files, name)) == inspect.getsource(getattr(smallnorb, name)), name


LONELY = """
import contextlib, io, json, runpy, sys
class OnlyNumpy:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {{"numpy", *sys.stdlib_module_names}}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, OnlyNumpy())
sys.path.insert(0, {folder!r})
first, *more = {calls!r}
sys.argv = [{script!r}, *first]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as stopped:
    said = [stopped.code]
main = runpy.run_path(sys.argv[0])["main"]
for argv in more:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        try:
            status = main(argv)
        except SystemExit as stopped:
            status = stopped.code
    said.append([status, out.getvalue(), error.getvalue()])
print(json.dumps(said))
"""


@pytest.mark.parametrize("name", BASE)
def test_a_base_script_runs_alone_in_an_empty_folder_with_numpy_alone(name: str, tmp_path: Path) -> None:
    """It writes, resumes, has its policies; what lies in data/ and fast/ is one line."""
    folder, experiment = tmp_path / "alone", EXPERIMENTS[name]
    folder.mkdir()
    shutil.copy(ROOT / f"{name}.py", folder)
    files = ["--out-json=a.json", "--checkpoint=c.npz"]
    policy, other = ("--routing-grad", "strokes") if experiment.has_digits else ("--em-grad", "shapes")
    calls = [
        [*experiment.argv(), *files], [*experiment.argv("--resume"), *files], [f"--dataset={other}"], ["--threads=2"],
        experiment.argv(f"--seed 3 --n-epochs 1 --models {experiment.models[0]} {policy} stop"), ["--help"],
    ]
    code = LONELY.format(folder=str(folder), calls=calls, script=f"{name}.py")
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=folder, capture_output=True, text=True, check=False,
                          env=script_environment() | {"HOME": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
    *table, said = done.stdout.splitlines()
    first, resumed, without, threads, stop, help = json.loads(said)
    assert (first, resumed) == (0, [0, "\n".join(table) + "\n", ""])
    assert all(model in resumed[1] for model in experiment.models)
    assert without[:2] == [1, ""]
    assert re.fullmatch(rf"error: this needs data/\w*{other[:6]}\w*\.py beside the script: .*\n", without[2])
    assert (threads[0], "--threads" in threads[2], threads[2].count("\n")) == (2, True, 1)
    assert (stop[0], help[0]) == (0, 0)
    assert sorted(p.name for p in folder.iterdir() if p.name != "__pycache__") == ["a.json", "c.npz", f"{name}.py"]
    inside = finished(experiment, experiment.argv("--plain"), tmp_path / "inside")
    assert json.loads((folder / "a.json").read_text())["history"] == inside.result["history"]


INSIDE_TWINS = (  # what each fast twin calls
    "fast.optimizers._adam", "fast.spectral_conv.transforms", "fast.dynamic_routing.route",
    "fast.field_em.votes_forward",
)


def test_a_script_runs_in_plain_forms_alone(experiment: Experiment, monkeypatch: Patch) -> None:
    smallest(monkeypatch)
    for inside in INSIDE_TWINS:
        monkeypatch.setattr(inside, Mock(side_effect=AssertionError("a fast twin")))
    assert experiment.script.main(experiment.argv("--plain")) == 0
    with pytest.raises(AssertionError, match="a fast twin"):
        experiment.script.main(experiment.argv())


WITHOUT_FAST = "import runpy, sys; sys.modules['fast'] = None; runpy.run_module(sys.argv.pop(1), run_name='__main__')"


@pytest.mark.parametrize("name", [*(name for name in EXPERIMENTS if name not in BASE), *OTHERS])
def test_an_experiment_without_the_folder_fast_computes_in_plain_forms(name: str, tmp_path: Path) -> None:
    """To the bit, in one thread."""
    write_folder(own := tmp_path / "pictures", n=10)
    flags = {"what_routing_does": "--study signs", "your_own_images": f"--data-dir {own} --n-epochs 1"}
    argv = EXPERIMENTS[name].argv() if name in EXPERIMENTS else [*flags[name].split(), "--quiet"]

    def result(*command: str) -> Any:  # in a process of its own, as other tests here change the modules
        out = tmp_path / f"out{command[0]}.json"
        done = subprocess.run([sys.executable, *command, *argv, f"--out-json={out}"], cwd=ROOT, capture_output=True,
                              text=True, check=False, env=script_environment())
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(out.read_text())

    without = result("-c", WITHOUT_FAST, f"more.{name}")
    assert without["models"]
    if name != "what_routing_does":  # this study has no --plain
        argv += ["--plain", "--threads=1"]
        assert without["history"] == result("-m", f"more.{name}")["history"]
