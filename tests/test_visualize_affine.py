"""The figures and the animation of the affine experiment, on trainings of a second with generated digits."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

import make_mnist_affine_capsnet_gif as animation
import mnist_affine_capsnet as experiment
import multimnist_capsnet as base
import visualize_mnist_affine_capsnet as figures
from figure_checks import (
    check_animation,
    check_failures,
    check_pictures,
    check_texts,
    check_unchanged,
    draw_coarsely,
    drawn_texts,
    pictures,
    refuse,
    shown_texts,
)
from helpers import usage_error
from support.checkpoints import save_checkpoint
from support.figures import WRONG, figure_style
from support.files import UserError

SMALL = ["--seed=123", "--dataset=strokes", "--conv-channels=4", "--primary-types=2", "--threads=1"]
TINY = [*SMALL, "--n-epochs=2", "--n-train=64", "--n-val=20", "--n-test=60", "--n-sweep=5", "--batch-size=16"]
CANVAS = [*TINY, "--canvas=40", "--match-accuracy=1", "--check-every=3"]
ALL = [name for name in figures.FIGURES if name != "affnist_examples"]
FOLDER = Path("viz", experiment.EXPERIMENT)


@functools.cache
def strokes() -> base.Digits:
    train, test = (base.stroke_digits(np.random.default_rng(k), 200) for k in range(2))
    return base.Digits("strokes", *train, *test)


@pytest.fixture(autouse=True, scope="module")
def few_digits_and_angles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "resolve_dataset", lambda *_: strokes())
        for module in (experiment, figures, animation):
            patch.setattr(module, "SWEEP", tuple(range(-90, 91, 15)))
        yield


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No figure of the project is touched, and no results file of it found."""
    monkeypatch.chdir(tmp_path)
    draw_coarsely(monkeypatch)


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, experiment, "train")


def trained(folder: Path, flags: list[str]) -> Path:
    files = [f"--checkpoint={folder / 'run.safetensors'}", f"--out-json={folder}/r.json"]
    assert experiment.main([*flags, "--quiet", *files]) == 0
    return folder / "run.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("upright"), TINY)


@pytest.fixture(scope="module")
def on_canvas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("canvas"), CANVAS)


def load(path: Path) -> figures.Run:
    return figures.finish(*figures.prepare(path, experiment.Config(), {}), threads=1, quiet=True)


@pytest.fixture(scope="module")
def run(checkpoint: Path) -> figures.Run:
    return load(checkpoint)


@pytest.fixture(scope="module")
def canvas_run(on_canvas: Path) -> figures.Run:
    return load(on_canvas)


def random_seeds(run: figures.Run, n: int = 3) -> figures.Seeds:
    rng = np.random.default_rng(0)
    return figures.Seeds(
        n,
        {name: rng.random((n, len(experiment.SWEEP))) for name in run.states},
        {name: rng.random(n) for name in run.states},
    )


NO_SEEDS = figures.Seeds(0, {}, {})


# ----------------------------------------------------------------------------------------------------------------------
# Figures
# ----------------------------------------------------------------------------------------------------------------------


def test_training_and_checkpoint_give_the_same_figures(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch, experiment, "train")
        assert figures.main([*TINY, "--preset=small", f"--checkpoint={checkpoint}"]) == 0
    check_pictures(FOLDER, ALL, highest=2600, scale=0.5)
    again = ("rotation_sweep", "reconstructions", "training_curves")
    check_unchanged(figures, [*TINY, "--quiet", f"--figures={','.join(again)}"], FOLDER, capsys, redrawn=again)


def test_only_the_figures_that_were_asked_for(on_canvas: Path) -> None:
    other = ["--n-test=40", "--rotation=-70", "--outdir=x"]  # test sets may differ from those of the checkpoint
    asked = "--figures=affnist_examples,confusion_matrices"
    assert figures.main([f"--checkpoint={on_canvas}", f"--results={on_canvas.parent}/r.json", asked, *other]) == 0
    assert list(pictures(Path("x", experiment.EXPERIMENT))) == ["affnist_examples", "confusion_matrices"]


CASES = {
    "one seed": ("rotation_sweep", "reconstructions", "capsule_dimensions"),
    "three seeds": ("predictions", "rotation_sweep", "training_curves"),
    "canvas": ("affnist_examples", "confusion_matrices", "training_curves"),
    "capsules alone": ("rotation_sweep", "confusion_matrices", "training_curves"),
}


@pytest.mark.parametrize("case", CASES)
def test_texts_are_large_enough_and_stay_apart(run: figures.Run, canvas_run: figures.Run, case: str) -> None:
    shown = canvas_run if case == "canvas" else run
    if case == "capsules alone":
        shown = run._replace(states={"capsnet": run.states["capsnet"]}, tested={"capsnet": run.tested["capsnet"]})
    seeds = random_seeds(run) if case == "three seeds" else NO_SEEDS
    for name, drawer in figures.drawers(shown, seeds).items():
        if name not in CASES[case]:
            continue
        fig, texts = drawn_texts(drawer)
        seed = "3 seeds" if seeds.n and name == "rotation_sweep" else "seed 123"
        assert any(seed in t.get_text() and "not MNIST" in t.get_text() for t, _ in texts), name
        check_texts(fig, texts, name)


def test_every_seed_has_its_curve(run: figures.Run) -> None:
    seeds = random_seeds(run)
    with figure_style():
        axes = figures.draw_rotation_sweep(run, seeds).axes
        *_, curves, points = figures.draw_training_curves(run, seeds).axes
    accuracy = next(ax for ax in axes if ax.get_title(loc="left") == "accuracy")
    drawn = [np.asarray(line.get_ydata()).tolist() for line in accuracy.lines]
    difference = next(ax for ax in axes if "minus" in ax.get_title(loc="left"))
    differences = [np.asarray(line.get_ydata()) for line in difference.lines]
    for name, rows in seeds.sweep.items():
        assert all(row.tolist() in drawn for row in rows)
        assert rows.mean(axis=0).tolist() in drawn
        if name != "capsnet":
            expected = 100 * (seeds.sweep["capsnet"] - rows)
            assert all(any(np.array_equal(row, d) for d in differences) for row in (*expected, expected.mean(axis=0)))
    assert [np.asarray(line.get_ydata()).tolist() for line in points.lines] == [
        errors.tolist() for errors in seeds.val_error.values()
    ]
    low, high = curves.get_ylim()
    assert all(low <= error <= high for errors in seeds.val_error.values() for error in errors)


def test_without_seeds_the_sweep_is_the_runs_own(run: figures.Run) -> None:
    with figure_style():
        axes = figures.draw_rotation_sweep(run, NO_SEEDS).axes
    accuracy = next(ax for ax in axes if ax.get_title(loc="left") == "accuracy")
    drawn = [np.asarray(line.get_ydata()).tolist() for line in accuracy.lines]
    assert all(list(tested["sweep"].values()) in drawn for tested in run.tested.values())


@pytest.mark.parametrize("values", [[0.5], [0.0099, 0.0101], [1e-5, 1], [3.0, 3.0], [1e-8, 30]])
def test_a_log_axis_holds_its_values_and_two_ticks(values: list[float]) -> None:
    ax = Figure().add_subplot()
    figures.log_axis(ax, values, str)
    low, high = ax.get_ylim()
    assert low < min(values) <= max(values) < high
    assert len(ax.get_yticks()) >= 2


# ----------------------------------------------------------------------------------------------------------------------
# What is drawn is what the networks do
# ----------------------------------------------------------------------------------------------------------------------


def test_digits_and_answers_are_those_of_the_tests(run: figures.Run, canvas_run: figures.Run) -> None:
    for drawn, angles in ((run, (0, 15, 35)), (canvas_run, (0, 35))):
        labels = drawn.data.test_labels
        chosen = np.arange(len(labels))
        for angle in angles:
            image_set = experiment.rotated_set(drawn.data, drawn.config, angle)
            images = figures.turned(drawn, chosen, angle)
            np.testing.assert_array_equal(images, image_set.images())
            for name, answers in zip(drawn.states, figures.answers_to(drawn, images).T, strict=True):
                expected = drawn.tested[name]["confusion"][image_set.name]
                assert experiment.confusion_matrix(labels, answers, 10).tolist() == expected


def test_wrong_answers_are_marked_and_no_others(run: figures.Run) -> None:
    chosen = figures.of_each_class(run.data.test_labels)[0]
    wrong = sum(
        int((figures.answers_to(run, figures.turned(run, chosen, angle)) != np.arange(10)[:, None]).sum())
        for angle in figures.SHOWN_ANGLES
    )
    with figure_style():
        fig = figures.draw_predictions(run)
    colours = [to_hex(patch.get_facecolor()) for patch in fig.findobj(Rectangle)]
    assert 0 < wrong < 10 * len(run.states) * len(figures.SHOWN_ANGLES)
    assert colours.count(to_hex(WRONG)) == wrong + 1  # and one in the legend
    white = [text for text in fig.texts if text.get_color() == "white"]
    assert len(white) == wrong + 1
    assert [text.get_text() for text in fig.texts if "true" in text.get_text()] == [f"true: {j}" for j in range(10)]


def test_the_first_digits_of_each_class_are_shown(run: figures.Run) -> None:
    labels = np.array([3, *range(10), 3, 3, *range(9, -1, -1)])
    rows = figures.of_each_class(labels, 5)
    assert labels[rows].tolist() == [list(range(10))] * 2
    assert rows[:, 3].tolist() == [0, 4]
    assert rows[:, 9].tolist() == [10, 13]


def test_perturbed_capsules_are_of_the_digit_that_is_named(run: figures.Run) -> None:
    found = figures.perturb(run)
    assert found.pictures.shape == (10, 16, 11, 28, 28)
    middle = found.pictures[:, :, 5]
    np.testing.assert_allclose(middle, np.repeat(middle[:, :1], 16, axis=1), atol=1e-6)
    params = run.states["capsnet"].params
    v = experiment.capsules(params, found.seen, run.config)
    np.testing.assert_allclose(middle[:, 0], experiment.draw_capsules(params, v, np.arange(10)), atol=1e-6)


def test_stored_arrays_give_the_same_figures(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = load(checkpoint)
    figures.write_shown(tmp_path / "shown.npz", figures.make_shown(run))
    shown, again = figures.make_shown(run), figures.read_shown(tmp_path / "shown.npz")
    for name in figures.Shown._fields:
        value, stored = np.asarray(getattr(shown, name)), np.asarray(getattr(again, name))
        if name in figures.PICTURES:
            np.testing.assert_allclose(stored, np.clip(value, 0, 1), atol=0.502 / 255)
        else:
            assert np.array_equal(value, stored)
    with figure_style():
        for draw in figures.STORED.values():
            ours, theirs = draw(again), draw(shown)
            assert [t.get_text() for t in ours.texts] == [t.get_text() for t in theirs.texts]
            assert len(ours.axes) == len(theirs.axes)
    capsys.readouterr()
    assert figures.main([f"--arrays={tmp_path}/shown.npz", f"--outdir={tmp_path}/viz"]) == 0
    assert sorted(pictures(tmp_path / "viz" / experiment.EXPERIMENT)) == sorted(figures.STORED)


@pytest.mark.parametrize("fault", ["missing", "half", "shape", "kind", "class", "name"])
def test_stored_arrays_that_are_damaged_are_one_line(
    run: figures.Run, fault: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "shown.npz"
    figures.write_shown(path, figures.make_shown(run))
    with np.load(path) as stored:
        arrays = dict(stored)
    if fault == "missing":
        path.unlink()
    elif fault == "half":
        path.write_bytes(path.read_bytes()[:2000])
    else:
        changed = {"shape": arrays["drawn"][:3], "kind": arrays["drawn"] / 255, "class": arrays["answers"] + 10}
        arrays["answers" if fault == "class" else "drawn"] = changed.get(fault, arrays["drawn"])
        if fault == "name":
            del arrays["drawn"]
        np.savez_compressed(path, **arrays)
    assert figures.main([f"--arrays={path}", f"--outdir={tmp_path}/viz"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(path) in error
    assert not (tmp_path / "viz").exists()


def test_furthest_turn_and_affnist_have_confusion_matrices(run: figures.Run, canvas_run: figures.Run) -> None:
    assert [key for key, _ in figures.confusion_sets(run)] == ["rotated_35"]
    assert [key for key, _ in figures.confusion_sets(canvas_run)] == ["rotated_35", "affnist"]
    still = run._replace(config=dataclasses.replace(run.config, rotation=(0.0,)))
    assert [key for key, _ in figures.confusion_sets(still)] == ["upright"]


# ----------------------------------------------------------------------------------------------------------------------
# Results of many seeds
# ----------------------------------------------------------------------------------------------------------------------


def test_runs_of_these_flags_are_found(checkpoint: Path, run: figures.Run) -> None:
    one = json.loads((checkpoint.parent / "r.json").read_text())
    compared = {
        "settings": {
            "default": {
                "config": {k: v for k, v in one["config"].items() if k not in ("seed", "data_dir")} | {"n_test": 5},
                "models": {"capsnet": {"upright_accuracy": {"mean": 0.5}}},
                "runs": [{"seed": seed, "models": one["models"]} for seed in (1, 2)],
            },
            "other": {"config": one["config"] | {"lr": 5.0}, "runs": [{"seed": 1, "models": one["models"]}]},
        }
    }
    Path("c.json").write_text(json.dumps(compared))
    seeds = figures.read_seeds([Path("c.json"), checkpoint.parent / "r.json"], run.config, run.data.name)
    assert seeds.n == 3
    assert list(seeds.sweep) == list(experiment.MODEL_NAMES)
    for name, rows in seeds.sweep.items():
        assert rows.tolist() == [list(run.tested[name]["sweep"].values())] * 3
        last = run.states[name].history["val_accuracy"][-1]
        np.testing.assert_allclose(seeds.val_error[name], 1 - last)
    assert figures.read_seeds([], run.config, run.data.name).n == 0
    assert figures.read_seeds([checkpoint.parent / "r.json"], run.config, "mnist").n == 0
    del one["models"]["capsnet"]["sweep"]
    Path("c.json").write_text(json.dumps(one))
    with pytest.raises(UserError, match=r"c\.json: a run has no sweep from -90 to 90 degrees"):
        figures.read_seeds([Path("c.json")], run.config, run.data.name)


# ----------------------------------------------------------------------------------------------------------------------
# Animation
# ----------------------------------------------------------------------------------------------------------------------


def test_animation_has_the_frames_that_were_asked_for(
    checkpoint: Path, on_canvas: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_animation(animation, [f"--checkpoint={checkpoint}", "--frames=2"], 2, 4_000_000, capsys, held=(0,))
    assert animation.main([f"--checkpoint={on_canvas}", "--frames=2", "--digits=8", "--out=b.gif"]) == 0


def test_animation_trains_where_there_is_no_checkpoint() -> None:
    assert animation.main([*TINY, "--n-epochs=1", "--frames=2", "--digits=1,2", "--quiet", "--out=a.gif"]) == 0
    assert Path("a.gif").stat().st_size > 10_000


def test_frames_say_what_the_networks_believe(run: figures.Run) -> None:
    turning = animation.Turning(run, (2, 4, 7), 5)
    assert turning.angles.tolist() == [-90, -45, 0, 45, 90]
    np.testing.assert_allclose(turning.outputs["lenet"].sum(axis=-1), 1, rtol=1e-5)
    with figure_style():
        scene = animation.TurningDigits(run, turning)
        for k in (4, 3):
            scene.frame(k)
    for name, tested in run.tested.items():
        x, y = (np.asarray(values) for values in scene.lines[name].get_data())
        expected = [value for angle, value in tested["sweep"].items() if int(angle) <= 45]
        np.testing.assert_allclose(y, expected)
        assert x[-1] == 45
        for r, label in enumerate(turning.classes):
            scores = turning.outputs[name][3, r]
            np.testing.assert_allclose([bar.get_height() for bar in scene.bars[name][r]], scores)
            mark = "✓" if scores.argmax() == label else "✗"
            assert scene.verdicts[name][r].get_text() == f"{mark} {scores.argmax()}"


def test_texts_of_the_animation_stay_apart(run: figures.Run) -> None:
    with figure_style():
        scene = animation.TurningDigits(run, animation.Turning(run, (2, 4, 7), 3))
        scene.frame(0)
        texts = shown_texts(scene)
    assert len(texts) > 100
    check_texts(scene.fig, texts, "animation")


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes on the command line
# ----------------------------------------------------------------------------------------------------------------------

USAGE_ERRORS: list[tuple[Any, list[str]]] = [
    (figures, ["--n-epochs=0"]),
    (figures, ["--canvas=32"]),
    (figures, ["--rotation=north"]),
    (figures, ["--dataset=smallnorb"]),
    (figures, ["--figures=overlay"]),
    (figures, ["--results"]),
    (animation, ["--frames=1"]),
    (animation, ["--frames=601"]),
    (animation, ["--digits=1,2,3,4"]),
    (animation, ["--digits=10"]),
    (animation, ["--digits="]),
]


@pytest.mark.parametrize(("script", "flags"), USAGE_ERRORS)
def test_wrong_flags(no_training: None, capsys: pytest.CaptureFixture[str], script: Any, flags: list[str]) -> None:
    usage_error(script, flags, capsys)


def partly_trained(folder: Path, names: tuple[str, ...], epochs: int) -> Path:
    config = experiment.Config(n_train=64, n_epochs=2, conv_channels=2, primary_types=1, decoder=(4, 4))
    states = experiment.fresh_states(config)
    for name in names:
        states[name].step, states[name].history = 1, {"train_loss": [0.5] * epochs}
    path = folder / "-".join(names)
    save_checkpoint(path, experiment.EXPERIMENT, config, states.values(), "")
    return path


def test_a_checkpoint_that_cannot_be_drawn_is_found_before_the_data(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(monkeypatch, experiment, "make_data")
    unfinished = partly_trained(tmp_path, ("capsnet", "cnn"), 1)
    without_capsules = partly_trained(tmp_path, ("cnn",), 2)
    cases: list[tuple[Any, list[str], str]] = []
    for script in (figures, animation):
        cases += [
            (script, [f"--checkpoint={unfinished}"], "1 of 2 epochs of capsnet;"),
            (script, [f"--checkpoint={without_capsules}"], "0 of 2 epochs of capsnet;"),
            (script, [f"--checkpoint={checkpoint}", "--seed=0"], "was made with --seed 123, not 0"),
            (script, [f"--checkpoint={checkpoint}", "--canvas=40"], "was made with --canvas 28, not 40"),
            (script, [f"--checkpoint={checkpoint}", "--preset=paper"], "was made with --preset small, not paper"),
            (script, [f"--checkpoint={checkpoint}", "--lr=0.5"], "was made with --lr"),
        ]
    check_failures(cases, capsys)


def test_what_cannot_work_is_found_before_the_training(
    no_training: None, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("useless.json").write_text('{"models": 3}')
    upright = f"--checkpoint={checkpoint}"
    cases: list[tuple[Any, list[str], str]] = [
        (figures, [upright, "--figures=affnist_examples"], "affnist_examples.png needs --canvas 40"),
        (figures, [upright, "--n-test=500"], "too few for --n-test 500"),
        (figures, [*TINY, "--results", "none.json"], "there is no results file none.json"),
        (figures, [*TINY, "--results", "useless.json"], "useless.json holds no run with these flags"),
        (figures, [*TINY, "--n-test=3"], "the figures need a digit of every class: none of the 3 test digits"),
        (animation, [*TINY, "--n-test=3"], "the figures need a digit of every class"),
    ]
    check_failures(cases, capsys)


def test_a_training_that_stopped_at_its_accuracy_is_finished(
    tmp_path: Path, run: figures.Run, canvas_run: figures.Run
) -> None:
    config = dataclasses.replace(canvas_run.config, match_accuracy=0.05)
    states = {"capsnet": canvas_run.states["capsnet"]}
    first = {"check_step": [3.0], "check_accuracy": [0.1]}  # within the first epoch: no other history
    states["capsnet"].step, states["capsnet"].history = 3, first
    save_checkpoint(tmp_path / "a", experiment.EXPERIMENT, config, states.values(), "")
    config, _, states = figures.prepare(tmp_path / "a", experiment.Config(), {})
    shown = figures.Run(config, run.data, states, run.tested)
    with figure_style():
        fig = figures.draw_training_curves(shown, NO_SEEDS)
        fig.canvas.draw()
    assert sum("within" in text.get_text() for text in fig.findobj(Text)) == 2
    assert [np.asarray(values).tolist() for values in fig.axes[-1].lines[0].get_data()] == [[0.75], [0.9]]
