"""The figures and the animation of the novel-viewpoint experiment: what they plot, for results that are known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import make_smallnorb_novel_viewpoint_gif as animation
import smallnorb_novel_viewpoint as experiment
import visualize_smallnorb_novel_viewpoint as figures
from figure_checks import (
    cells,
    check_animation,
    check_held,
    check_pictures,
    check_unchanged,
    draw_coarsely,
    drawn,
    held,
    legend_of,
    refuse,
)
from helpers import SMALLNORB, failure, needs_smallnorb, usage_error
from support.files import UserError
from support.optimizers import TrainState
from support.statistics import t_quantile

TINY = ["--seed=123", "--n-epochs=2", "--n-train-views=2", "--n-test-views=2", "--n-elev=1", "--n-per-combo=1"]
FOLDER = Path("viz", experiment.EXPERIMENT)
DRAWN = (*figures.OF_RUN, "shapes")
Config = experiment.Config


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No figure of the project is touched, and no results file of it found."""
    monkeypatch.chdir(tmp_path)
    draw_coarsely(monkeypatch)
    monkeypatch.setattr(figures, "NOISE_DRAWS", 1)  # quicker


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run.safetensors"
    assert experiment.main([*TINY, "--quiet", f"--checkpoint={path}"]) == 0
    return path


@pytest.fixture(scope="module")
def run(checkpoint: Path) -> figures.Run:
    config, states = experiment.load_checkpoint(checkpoint)
    return figures.Run(config, experiment.make_data(config), experiment.make_models(config), states)


# ----------------------------------------------------------------------------------------------------------------------
# Accuracies
# ----------------------------------------------------------------------------------------------------------------------


def runs_of(values: dict[str, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    """Results of seeds 200, …: by model, familiar and held-out accuracy of each."""
    n = len(next(iter(values.values())))
    return [
        {"seed": 200 + s, "models": {name: {"familiar_accuracy": rows[s][0], "held_out_accuracy": rows[s][1]}
                                     for name, rows in values.items()}}
        for s in range(n)
    ]  # fmt: skip


def test_bars_are_both_accuracies_and_the_drop_is_what_is_lost(run: figures.Run) -> None:
    states = {name: TrainState(name, {}) for name in run.states}
    for state in states.values():
        state.history = {"familiar_accuracy": [0.5, 0.9], "held_out_accuracy": [0.4, 0.3]}
    ax = drawn(lambda: figures.draw_extrapolation_bars(run._replace(states=states))).axes[0]
    check_held(ax, bars=[[0.9, 0.3]] * 3, levels=[0.2, 0.6])
    assert held(ax)["texts"] == ["chance 0.2", *["0.900", "0.300"] * 3]
    names = ("Matrix capsules", "Small CNN", "CNN of equal size")
    assert held(ax)["ticks"][0] == [f"{name}\ndrop 0.600" for name in names]


def test_accuracy_at_every_azimuth_is_mean_and_interval_over_seeds() -> None:
    angles, base = np.array([0.0, 120, 240]), np.array([[1.0, 0.8, 0.4], [1.0, 0.6, 0.4], [0.7, 0.7, 0.4]])
    accuracy = {"capsules": base, "cnn": base / 2}
    config = Config(train_azimuths=(300.0, 400.0), test_azimuths=(60.0, 280.0))
    fig = drawn(lambda: figures.draw_azimuth_accuracy(config, [0, 1, 2], angles, accuracy, np.array([330.0, 370])))
    around, mean = [0, 120, 240, 360], np.array([0.9, 0.7, 0.4, 0.9])
    half = t_quantile(3) / np.sqrt(3) * np.array([np.sqrt(0.03), 0.1, 0, np.sqrt(0.03)])
    bands = [[around, f * (mean - half), f * (mean + half)] for f in (1, 0.5)]
    lines = {"Matrix capsules": [around, mean], "Small CNN": [around, mean / 2], "line 4": [[10, 330], [0.03, 0.03]]}
    check_held(fig.axes[0], lines=lines, bands=bands, spans=[(0, 40), (60, 280), (300, 360)], levels=[0.2, 0.6])
    assert legend_of(fig) == ["Matrix capsules", "Small CNN", figures.HALF_TURN_NAME]


def test_accuracy_by_azimuth_is_the_accuracy_there(run: figures.Run) -> None:
    angles, accuracy = figures.accuracy_by_azimuth(run)
    assert angles.tolist() == list(range(0, 360, 10))
    elevations = experiment.evenly_spaced(run.config.train_elevations, 5)
    rng = figures.generator(run.config.seed, figures.Stream.EVALUATION, figures.AZIMUTH_KEY)
    split = experiment.voxel_views(run.config, angles, elevations, 1, rng)
    part = experiment.Split(*(array[split.azimuths == 250] for array in split))
    for name, model in run.models.items():
        assert accuracy[name][25] == pytest.approx(experiment.accuracy(model, run.states[name].params, part))


def test_epochs_are_counted_from_one(run: figures.Run) -> None:
    fig = drawn(lambda: figures.draw_training_curves(run))
    metrics = ("train_loss", "familiar_accuracy", "held_out_accuracy")
    for ax, metric in zip(fig.axes, metrics, strict=True):
        lines = {figures.MODELS[name].label: [[1, 2], state.history[metric]] for name, state in run.states.items()}
        check_held(ax, lines=lines, levels=[0.2] if "accuracy" in metric else [])


# ----------------------------------------------------------------------------------------------------------------------
# Views, poses, routing
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("angle", "azimuths", "elevations"),
    [
        ("azimuth", ([0, 30, 60, 90, 120, 150], [200, 226, 252, 278, 304, 330]), [30] * 6),
        ("elevation", ([75] * 5, [265] * 5), [10, 20, 30, 40, 50]),
    ],
)  # fmt: skip
def test_views_are_from_the_angles_that_are_named(
    run: figures.Run, angle: str, azimuths: tuple[list[int], ...], elevations: list[int]
) -> None:
    fig = drawn(lambda: figures.draw_views(run, angle, len(elevations), ""))
    for ax, turned in zip(fig.axes, azimuths, strict=True):
        views = figures.pick_views(run.config, run.data, np.array(turned), np.array(elevations))
        shown = cells(ax, 5, len(elevations))[..., 0]
        np.testing.assert_allclose(shown, figures.as_grid(views.images, 5), atol=0.5 / 63 + 1e-6)
        assert held(ax)["ticks"][0] == [f"{a}°" for a in (turned if angle == "azimuth" else elevations)]


def test_the_same_object_in_the_same_lighting_turns() -> None:
    """Of five classes, two objects in two lightings at four azimuths each, in any order; one view is missing."""
    rng = np.random.default_rng(0)
    labels, azimuths, objects = (part.ravel() for part in np.meshgrid(np.arange(5), 90.0 * np.arange(4), [0, 1, 6, 7]))
    here = rng.permutation(np.flatnonzero((labels != 2) | (azimuths != 180) | (objects != 0)))
    angles = azimuths[here], np.full(len(here), 30.0)
    images = np.zeros((len(here), 1, 1, 2), np.float32)
    split = experiment.Split(images, labels[here], *angles, objects[here])
    nothing = experiment.Split(*(part[:0] for part in split))
    turned = np.array([0.0, 90, 180, 270])
    found = figures.pick_views(
        Config(dataset="smallnorb"), experiment.Data(split, nothing, split), turned, np.full(4, 30.0)
    )
    assert found.labels.tolist() == np.repeat(np.arange(5), 4).tolist()
    assert found.azimuths.tolist() == np.tile(turned, 5).tolist()
    assert found.objects.tolist() == [0] * 10 + [1] + [0] * 9


def test_assignments_and_scores_are_those_of_the_views(run: figures.Run) -> None:
    fig = drawn(lambda: figures.draw_routing_assignments(run))
    views = figures.pick_views(run.config, run.data, *figures.viewpoint_pair(run.config, run.data))
    scores, cache = figures.capsule_outputs(run, views.images)
    rows = np.array(fig.axes[: 2 * (3 + run.config.em_iters)]).reshape(2, -1)
    for b, (_, *maps, activations, result) in enumerate(rows):
        for ax, step in zip(maps, cache.routing.m_steps, strict=True):
            check_held(ax, image=step.r[2 + b])
        check_held(activations, bars=[cache.a_in[2 + b]])
        check_held(result, bars=[scores[2 + b]])


def test_poses_are_shown_with_the_scores(run: figures.Run) -> None:
    fig = drawn(lambda: figures.draw_class_poses(run))
    views = figures.pick_views(run.config, run.data, *figures.viewpoint_pair(run.config, run.data))
    scores, cache = figures.capsule_outputs(run, views.images)
    for b, ax in enumerate(fig.axes):
        numbers = [f"{s:.1f}".replace("-", "−") for row in scores[b::2] for s in row]
        assert held(ax)["texts"] == numbers
        reds = cells(ax, 5, 6, (9, 2))[:, 1:, 4, 4]  # of the entries (1, 1): red where positive, blue where negative
        first = cache.mu.reshape(5, 2, 5, 16)[:, b, :, 0]
        clear = np.abs(first) > 0.1 * np.abs(cache.mu).max()
        assert ((reds[..., 0] > reds[..., 2]) == (first > 0))[clear].all()


@pytest.mark.parametrize(
    ("span", "circular", "text"),
    [
        ((300, 400), True, "300–40°"), ((200, 360), True, "200–360°"), ((-60, 40), True, "300–40°"),
        ((0, 360), True, "0–360°"), ((-20, 35), False, "-20–35°"),
    ],
)  # fmt: skip
def test_azimuths_past_360_are_written_from_0(span: tuple[float, float], circular: bool, text: str) -> None:
    assert figures.degrees(span, circular=circular) == text


# ----------------------------------------------------------------------------------------------------------------------
# Files and the command line
# ----------------------------------------------------------------------------------------------------------------------


def test_training_and_checkpoint_give_the_same_figures(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert figures.main([*TINY, "--quiet"]) == 0
    check_pictures(FOLDER, DRAWN, highest=1300, scale=0.5)
    refuse(monkeypatch, experiment, "train_all")
    check_unchanged(figures, [*TINY, f"--checkpoint={checkpoint}"], FOLDER, capsys)


def test_the_median_of_the_reported_seeds_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.asdict(Config())
    runs = runs_of({"capsules": [(1.0, 0.9), (1.0, 0.5), (1.0, 0.7), (1.0, 0.6)]})
    path = Path("r.json")
    path.write_text(json.dumps({"config": config, "settings": {"default": {"config": {}, "runs": runs}}}))
    trained: list[int] = []

    def train(_: Any, config: Any, *rest: Any) -> None:
        trained.append(config.seed)
        raise UserError("stop")

    monkeypatch.setattr(figures, "trained", train)
    for flags in ([], ["--seed=7"], ["--lr=0.1"]):
        figures.main([f"--results={path}", "--figures=class_poses", *flags])
    assert trained == [203, 7, 0]


def test_held_out_elevations_are_drawn_too() -> None:
    elevation = [flag for flag in TINY if "n-elev" not in flag] + ["--n-elev=2", "--n-epochs=1"]
    ranges = ["--train-elevations=-20:35", "--test-elevations=40:70", "--loss=spread", "--quiet"]
    names = ("elevation_strip", "azimuth_accuracy")
    assert figures.main([*elevation, *ranges, f"--figures={','.join(names)}"]) == 0
    check_pictures(FOLDER, names, highest=1200, scale=0.5)
    assert animation.main([*TINY, *ranges, "--n-epochs=1", "--sweep-frames=2"]) == 0
    with Image.open(f"{experiment.EXPERIMENT}.gif") as gif:
        assert gif.n_frames == 2


@needs_smallnorb
def test_the_real_data_set_is_drawn() -> None:
    flags = ["--dataset=smallnorb", f"--data-dir={SMALLNORB}", "--train-azimuths=0:140", "--test-azimuths=200:330"]
    assert figures.main([*flags, "--n-epochs=1", "--quiet"]) == 0
    check_pictures(FOLDER, DRAWN, highest=1300, scale=0.5)
    assert animation.main([*flags, "--n-epochs=1", "--sweep-frames=2", "--quiet"]) == 0


def test_a_checkpoint_or_set_that_cannot_be_drawn(
    run: figures.Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(monkeypatch, experiment, "make_data")
    assert "not 9" in failure(figures, [f"--checkpoint={checkpoint}", "--n-epochs=9", "--figures=class_poses"], capsys)
    lacking = run.data._replace(
        familiar=experiment.Split(*(part[run.data.familiar.labels != 3] for part in run.data.familiar)),
        held_out=experiment.Split(*(part[run.data.held_out.labels != 3] for part in run.data.held_out)),
    )
    with pytest.raises(UserError, match="no test image shows a frame"):
        figures.require_every_class(run.config, lacking)
    for script, flags in [(figures, ["--figures=none"]), (animation, ["--sweep-frames=600", "--snapshots=2"])]:
        usage_error(script, flags, capsys)


# ----------------------------------------------------------------------------------------------------------------------
# Animation
# ----------------------------------------------------------------------------------------------------------------------


def test_animation_has_the_frames_that_were_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    check_animation(animation, [*TINY, "--snapshots=2", "--sweep-frames=3"], 6, 3_000_000, capsys, held=(2,))


@pytest.mark.parametrize(("n", "snapshots", "epochs"), [(8, 8, list(range(1, 9))), (10, 3, [3, 7, 10]), (5, 1, [5])])
def test_snapshots_are_spread_and_end_with_the_training(n: int, snapshots: int, epochs: list[int]) -> None:
    assert animation.snapshot_epochs(n, snapshots) == epochs


def test_a_frame_shows_answers_viewpoint_and_accuracies(run: figures.Run) -> None:
    sweep = animation.make_sweep(run.config, run.data, 12)
    assert sweep.angles.tolist() == list(range(0, 360, 30))
    assert sweep.views.azimuths[:12].tolist() == sweep.angles.tolist()
    recorder = animation.Recorder(run.config, run.data, sweep, [2])
    state = {name: TrainState(name, run.states[name].params) for name in animation.SHOWN}
    for one in state.values():
        one.step, one.history = 2 * recorder.steps_per_epoch, {"held_out_accuracy": [0.4, 0.6]}
        recorder(one, True)
    made: dict[str, Any] = {}

    def draw() -> Any:
        made["fig"], made["update"] = animation.make_scene(recorder, state)
        made["update"](2, 9)
        return made["fig"]

    fig = drawn(draw)
    *grid, dial, curve = fig.axes
    for model, row in zip(animation.SHOWN, np.array(grid).reshape(3, 5)[1:], strict=True):
        for k, ax in enumerate(row):
            shown = recorder.bars[model, 2][k, 9]
            check_held(ax, bars=[shown])
            answer = int(shown.argmax())
            assert held(ax)["texts"][0] == f"{'✓' if answer == k else '✗'} {run.config.classes[answer]}"
    assert np.asarray(dial.lines[0].get_xdata()).tolist() == pytest.approx([np.deg2rad(270)] * 2)
    assert held(dial)["texts"][0] == "azimuth 270°: held out"
    lines = {"Matrix capsules": [[1, 2], [0.4, 0.6]], "CNN of equal size": [[1, 2], [0.4, 0.6]]}
    check_held(curve, lines=lines, levels=[0.2, 0.6])
