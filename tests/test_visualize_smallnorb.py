"""The figures and the animation of the novel-viewpoint experiment, on trainings of seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import make_smallnorb_novel_viewpoint_gif as animation
import smallnorb_novel_viewpoint as experiment
import visualize_smallnorb_novel_viewpoint as figures
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
)
from helpers import SMALLNORB, needs_smallnorb, usage_error
from support.checkpoints import save_checkpoint
from support.figures import figure_style
from support.files import UserError
from support.run import Stream, generator

TINY = ["--seed=123", "--n-epochs=2", "--n-train-views=2", "--n-test-views=2", "--n-elev=1", "--n-per-combo=1"]
ALWAYS = [
    "azimuth_accuracy", "class_poses", "elevation_strip", "example_views", "extrapolation_bars", "held_out_confusion",
    "routing_assignments", "training_curves",
]  # fmt: skip
VOXELS = sorted([*ALWAYS, "pose_curves"])
FOLDER = Path("viz", experiment.EXPERIMENT)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No figure of the project is touched, and no results file of it found."""
    monkeypatch.chdir(tmp_path)
    draw_coarsely(monkeypatch)
    monkeypatch.delenv("SMALLNORB_DIR", raising=False)
    monkeypatch.setattr(figures, "NOISE_DRAWS", 1)  # quicker


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, experiment, "train_all")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run.npz"
    assert experiment.main([*TINY, "--quiet", f"--checkpoint={path}"]) == 0
    return path


@pytest.fixture(scope="module")
def run(checkpoint: Path) -> figures.Run:
    config, states = experiment.load_checkpoint(checkpoint)
    return figures.Run(config, experiment.make_data(config), experiment.make_models(config), states)


# ----------------------------------------------------------------------------------------------------------------------
# Figures
# ----------------------------------------------------------------------------------------------------------------------


def test_training_and_checkpoint_give_the_same_figures(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert figures.main([*TINY, "--quiet"]) == 0
    assert "smallnorb_pairs.png" not in capsys.readouterr().out
    check_pictures(FOLDER, VOXELS, highest=1600, scale=0.5)
    refuse(monkeypatch, experiment, "train_all")
    check_unchanged(figures, [*TINY, f"--checkpoint={checkpoint}"], FOLDER, capsys)


def test_texts_are_large_enough_and_stay_apart(run: figures.Run) -> None:
    seeds = {model: np.full((3, 2), 0.5) for model in run.models}
    for name, drawer in figures.drawers(run, seeds, None).items():
        fig, texts = drawn_texts(drawer)
        who = "means of 3 seeds" if name == "extrapolation_bars" else "seed 123"
        assert any(who in t.get_text() and "azimuths 200–330°" in t.get_text() for t, _ in texts), name
        check_texts(fig, texts, name)


def test_held_out_elevation_has_its_own_figure() -> None:
    elevation = [flag for flag in TINY if "n-elev" not in flag] + ["--n-elev=2", "--n-epochs=1"]
    ranges = ["--train-elevations=10:35", "--test-elevations=40:70"]
    assert figures.main([*elevation, *ranges, "--em-iters=5", "--loss=spread", "--quiet"]) == 0
    assert list(pictures(FOLDER)) == sorted([*VOXELS, "elevation_accuracy"])


@needs_smallnorb
def test_real_pairs_and_the_real_data_set() -> None:
    flags = [
        f"--smallnorb-dir={SMALLNORB}",
        "--dataset=smallnorb",
        f"--data-dir={SMALLNORB}",
        "--train-azimuths=0:140",
        "--test-azimuths=200:330",
    ]
    assert figures.main([*flags, "--n-epochs=1", "--quiet"]) == 0
    drawn = pictures(FOLDER)
    assert list(drawn) == sorted([*ALWAYS, "smallnorb_pairs"])
    assert all(len(content) <= 600_000 for content in drawn.values())
    pairs = figures.read_pairs(SMALLNORB)
    assert [len(split.labels) for split in pairs.values()] == [6, 6]
    assert animation.main([*flags, "--n-epochs=1", "--sweep-frames=2", "--quiet"]) == 0


def test_the_same_object_in_the_same_lighting_turns() -> None:
    """Of five classes, two objects in two lightings at four azimuths each, in any order; one view is missing."""
    rng = np.random.default_rng(0)
    labels, azimuths, objects = (part.ravel() for part in np.meshgrid(np.arange(5), 90.0 * np.arange(4), [0, 1, 6, 7]))
    here = rng.permutation(np.flatnonzero((labels != 2) | (azimuths != 180) | (objects != 0)))
    angles = azimuths[here], np.full(len(here), 30.0)
    images = np.zeros((len(here), 1, 1, 2), np.float32)
    split = experiment.Split(images, labels[here], *angles, objects[here])
    nothing = experiment.Split(*(part[:0] for part in split))
    config = experiment.Config(dataset="smallnorb")
    turned = np.array([0.0, 90, 180, 270])
    found = figures.pick_views(config, experiment.Data(split, nothing, split), turned, np.full(4, 30.0))
    assert found.labels.tolist() == np.repeat(np.arange(5), 4).tolist()
    assert found.azimuths.tolist() == np.tile(turned, 5).tolist()
    assert found.objects.tolist() == [0] * 10 + [1] + [0] * 9


def test_accuracy_by_angle_is_the_accuracy_there(run: figures.Run) -> None:
    angles, accuracy = figures.accuracy_by_angle(run, "azimuth")
    assert angles.tolist() == list(range(0, 360, 10))
    assert list(accuracy) == list(run.models)
    elevations = experiment.evenly_spaced(run.config.train_elevations, 5)
    rng = generator(run.config.seed, Stream.EVALUATION, figures.AZIMUTH_KEY)
    split = experiment.voxel_views(run.config, angles, elevations, 1, rng)
    there = split.azimuths == 250
    part = experiment.Split(*(array[there] for array in split))
    for name, model in run.models.items():
        assert accuracy[name][25] == pytest.approx(experiment.accuracy(model, run.states[name].params, part))


def test_the_confusion_is_that_of_the_result(run: figures.Run) -> None:
    result = experiment.make_result(run.config, run.states, run.data)
    with figure_style():
        matrices = [ax for ax in figures.draw_confusion(run).axes if ax.get_xticklabels()[0].get_text() == "cross"]
    for name, ax in zip(run.states, matrices, strict=True):
        counts = np.array(result["confusion"][name])
        np.testing.assert_allclose(np.asarray(ax.images[0].get_array()), counts / counts.sum(axis=1, keepdims=True))


def test_pose_curves_are_the_winners_entries(run: figures.Run) -> None:
    with figure_style():
        panels = figures.draw_pose_curves(run).axes
    assert len(panels) == 16
    scores, cache = figures.capsule_outputs(
        run, experiment.render_voxels(np.array([1]), np.array([120.0]), np.array([30.0]), None)
    )
    pose = cache.mu[0, scores[0].argmax()]
    right, wrong = panels[6].lines[:2]  # L is drawn first
    x, y = (np.concatenate([np.asarray(line.get_data()[k], float) for line in (right, wrong)]) for k in range(2))
    shown = y[(x == 120) & ~np.isnan(y)]
    assert shown == pytest.approx([pose[6]], rel=1e-4)


@pytest.mark.parametrize(
    ("span", "circular", "text"),
    [
        ((300, 400), True, "300–40°"), ((200, 360), True, "200–360°"), ((-60, 40), True, "300–40°"),
        ((0, 360), True, "0–360°"), ((-20, 35), False, "-20–35°"),
    ],
)  # fmt: skip
def test_azimuths_past_360_are_written_from_0(span: tuple[float, float], circular: bool, text: str) -> None:
    assert figures.degrees(span, circular=circular) == text


def test_a_range_past_360_is_shaded_in_two_parts() -> None:
    fig = Figure()
    ax = fig.add_subplot()
    figures.shade_range(ax, (300, 400), figures.TRAINED, "trained on", circular=True)
    spans = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    assert sorted((p.get_x(), p.get_x() + p.get_width()) for p in spans) == [(0, 40), (300, 360)]


# ----------------------------------------------------------------------------------------------------------------------
# Results of many seeds
# ----------------------------------------------------------------------------------------------------------------------


def test_points_of_the_results_file_are_drawn(run: figures.Run) -> None:
    seeds = {name: np.array([[1.0, 0.3], [0.9, 0.4]]) for name in run.models}
    with figure_style():
        ax = figures.draw_extrapolation_bars(run, seeds).axes[0]
    drawn = sorted(y for line in ax.lines if line.get_marker() == "o" for y in np.asarray(line.get_ydata()))
    assert drawn == sorted([1.0, 0.9, 0.3, 0.4] * len(run.models))


# ----------------------------------------------------------------------------------------------------------------------
# Animation
# ----------------------------------------------------------------------------------------------------------------------


def test_animation_has_the_frames_that_were_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    check_animation(animation, [*TINY, "--snapshots=2", "--sweep-frames=3"], 6, 3_000_000, capsys, held=(2,))


def test_animation_through_held_out_elevations() -> None:
    ranges = ["--train-elevations=-20:35", "--test-elevations=40:70", "--loss=spread"]
    assert animation.main([*TINY, *ranges, "--n-epochs=1", "--sweep-frames=2", "--quiet"]) == 0
    assert len(imageio.imread(f"{experiment.EXPERIMENT}.gif")) == 2


@pytest.mark.parametrize(("n", "snapshots", "epochs"), [(8, 8, list(range(1, 9))), (10, 3, [3, 7, 10]), (5, 1, [5])])
def test_snapshots_are_spread_and_end_with_the_training(n: int, snapshots: int, epochs: list[int]) -> None:
    assert animation.snapshot_epochs(n, snapshots) == epochs


def test_sweep_turns_once_round(run: figures.Run) -> None:
    sweep = animation.make_sweep(run.config, run.data, 12)
    assert sweep.angles.tolist() == list(range(0, 360, 30))
    assert len(sweep.views.labels) == 60
    assert sweep.views.azimuths[:12].tolist() == sweep.angles.tolist()


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes on the command line
# ----------------------------------------------------------------------------------------------------------------------

USAGE_ERRORS: list[tuple[Any, list[str]]] = [
    (figures, ["--n-epochs=0"]),
    (figures, ["--lr=nan"]),
    (figures, ["--threads=0"]),
    (figures, ["--test-azimuths=100:200"]),
    (figures, ["--dataset=smallnorb"]),
    (animation, ["--snapshots=0"]),
    (animation, ["--snapshots=many"]),
    (animation, ["--sweep-frames=0"]),
    (animation, ["--sweep-frames=-3"]),
    (animation, ["--sweep-frames=600", "--snapshots=2"]),
    (animation, ["--sweep-frames=1000000"]),
]


@pytest.mark.parametrize(("script", "flags"), USAGE_ERRORS)
def test_wrong_flags(no_training: None, capsys: pytest.CaptureFixture[str], script: Any, flags: list[str]) -> None:
    usage_error(script, flags, capsys)


def half_trained(tmp_path: Path) -> Path:
    """As Ctrl-C leaves it in the second model's first epoch."""
    config = experiment.Config(n_epochs=1, cnn_epochs=1, n_train_views=2, n_elev=1)
    states = experiment.fresh_states(config)
    states["capsules"].step, states["capsules"].history = 2, {"train_loss": [0.5]}
    path = tmp_path / "half.safetensors"
    save_checkpoint(path, experiment.EXPERIMENT, config, states.values(), "")
    return path


def test_a_checkpoint_that_cannot_be_drawn_is_found_before_the_data(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(monkeypatch, experiment, "make_data")
    cases: list[tuple[Any, list[str], str]] = [
        (figures, [f"--checkpoint={half_trained(tmp_path)}"], "0 of 1 epochs of cnn;"),
        (figures, [f"--checkpoint={checkpoint}", "--seed=0"], "was made with --seed 123, not 0"),
        (figures, [f"--checkpoint={checkpoint}", "--test-azimuths=210:330"], "--test-azimuths 200:330, not 210:330"),
    ]
    check_failures(cases, capsys)


def test_what_cannot_work_is_found_before_the_training(no_training: None, capsys: pytest.CaptureFixture[str]) -> None:
    Path("useless.json").write_text('{"models": 3}')
    cases: list[tuple[Any, list[str], str]] = [
        (figures, ["--results=none.json"], "cannot read none.json: No such file"),
        (figures, ["--results=useless.json"], "useless.json holds no run with these flags"),
        (figures, ["--smallnorb-dir=none"], "none has no training dat file of smallNORB"),
        (figures, ["--dataset=smallnorb", "--data-dir=none"], "none has no smallnorb"),
    ]
    check_failures(cases, capsys)


def test_a_class_without_a_picture_is_named() -> None:
    config = experiment.Config(n_train_views=1, n_test_views=1, n_elev=1)
    data = experiment.make_data(config)
    keep = [experiment.Split(*(array[split.labels != 3] for array in split)) for split in data]
    with pytest.raises(UserError, match="shows a frame"):
        figures.require_every_class(config, experiment.Data(*keep))
