"""The figures and the animation of the novel-viewpoint experiment: what they plot, for results that are known."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import imageio.v3 as imageio
import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle

import make_multimnist_capsnet_gif as digits_animation
import make_smallnorb_novel_viewpoint_gif as animation
import smallnorb_novel_viewpoint as smallnorb
import visualize_multimnist_capsnet as digits
import visualize_smallnorb_novel_viewpoint as figures
from figure_checks import cells, check_held, draw_coarsely, drawn, frame_of, held, legend_of, move_to
from helpers import ROOT, Capture, Patch, config_of
from more import make_conv_matrix_capsules_gif as routing_animation, visualize_mnist_affine_capsnet as affine
from smallnorb_novel_viewpoint import TrainState, UserError
from support.experiment import load_checkpoint
from support import figures as support_figures, redraw
from support.figures import make_figure
from support.statistics import t_quantile

SIZES = ["--n-train-views=2", "--n-test-views=2", "--n-elev=1", "--n-per-combo=1"]
TINY = ["--dtype=float64", "--seed=123", "--n-epochs=2", *SIZES]
Config = smallnorb.Config


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: Patch) -> None:
    move_to(tmp_path, monkeypatch)
    draw_coarsely(monkeypatch)
    monkeypatch.setattr(figures, "NOISE_DRAWS", 1)  # quicker


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run.npz"
    assert smallnorb.main([*TINY, "--quiet", f"--checkpoint={path}"]) == 0
    return path


@pytest.fixture(scope="module")
def run(checkpoint: Path) -> figures.Run:
    config, states = load_checkpoint(smallnorb, checkpoint)
    return figures.Run(config, smallnorb.make_data(config), states)


def test_accuracy_at_every_azimuth_is_mean_and_interval_over_seeds(run: figures.Run, monkeypatch: Patch) -> None:
    """Of all reported seeds, and of the reported models; or else of the run itself."""
    angles, base = np.array([0.0, 120, 240]), np.array([[1.0, 0.8, 0.4], [1.0, 0.6, 0.4], [0.7, 0.7, 0.4]])
    train = run.data.train._replace(azimuths=np.array([330.0, 370]))
    one = run._replace(
        config=Config(train_azimuths=(300.0, 400.0), test_azimuths=(60.0, 280.0)), data=run.data._replace(train=train),
        reported=[{"seed": s, "models": {"capsules": {}, "cnn": {}}} for s in range(3)],
    )
    monkeypatch.setattr(smallnorb, "make_data", lambda _: run.data)
    monkeypatch.setattr(smallnorb, "train_all", lambda config, _, names: dict.fromkeys(names, config.seed))
    monkeypatch.setattr(figures, "accuracy_by_azimuth", lambda it: (angles, {
        name: base[seed] / (1 + (name == "cnn")) for name, seed in it.states.items()}))
    fig = drawn(lambda: figures.draw_azimuth_accuracy(one))
    around, mean = [0, 120, 240, 360], np.array([0.9, 0.7, 0.4, 0.9])
    half = t_quantile(3) / np.sqrt(3) * np.array([np.sqrt(0.03), 0.1, 0, np.sqrt(0.03)])
    bands = [[around, f * (mean - half), f * (mean + half)] for f in (1, 0.5)]
    lines = {"Matrix capsules": [around, mean], "Small CNN": [around, mean / 2], "line 4": [[10, 330], [0.03, 0.03]]}
    check_held(fig.axes[0], lines=lines, bands=bands, spans=[(0, 40), (60, 280), (300, 360)], levels=[0.2, 0.6])
    assert legend_of(fig) == ["Matrix capsules", "Small CNN", figures.HALF_TURN_NAME]
    states: Any = {"cnn": 2}
    alone = drawn(lambda: figures.draw_azimuth_accuracy(one._replace(reported=(), states=states))).axes[0]
    check_held(alone, bands=[])
    assert held(alone)["lines"]["Small CNN"][1].tolist() == [0.35, 0.35, 0.2, 0.35]


def test_a_range_of_azimuths_may_pass_the_north() -> None:
    for span, text, parts in (
        ((300, 400), "300–40°", [(0, 40), (300, 360)]), ((-60, 80), "300–80°", [(0, 80), (300, 360)]),
        ((180, 360), "180–360°", [(180, 360)]), ((0, 360), "0–360°", [(0, 360)]), ((370, 400), "10–40°", [(10, 40)]),
    ):
        assert figures.degrees(span, circular=True) == text
        ax = make_figure(2, "", "").subplots()
        figures.shade_range(ax, span, "red", "")
        check_held(ax, spans=parts)
    assert figures.degrees((-90, 70), circular=False) == "-90–70°"


NORB = Config(dataset="smallnorb", data_dir=Path("x"))
NOTHING = smallnorb.Split(*np.zeros((5, 0)))


def test_accuracy_by_azimuth_is_of_the_test_images_there(run: figures.Run, monkeypatch: Patch) -> None:
    """Of which there may be more at one azimuth than at another."""
    labels, zeros = np.arange(5), np.zeros(5)
    split = smallnorb.Split(zeros, labels, np.array([0.0, 0, 20, 20, 20]), zeros, labels)
    monkeypatch.setattr(smallnorb, "predict_scores", lambda *_: np.eye(5)[[0, 0, 2, 3, 3]])
    of_files = run._replace(config=NORB, data=smallnorb.Data(NOTHING, split, NOTHING))
    angles, accuracy = figures.accuracy_by_azimuth(of_files)
    assert angles.tolist() == [0, 20]
    assert {name: values.tolist() for name, values in accuracy.items()} == {name: [1 / 2, 2 / 3] for name in run.states}


@pytest.mark.parametrize("angle", ["azimuth", "elevation"])
def test_views_are_test_images_at_the_angles_that_are_named(angle: str) -> None:
    """A picture's grey says the set, class, azimuth and elevation."""
    classes, trained, new, elevations = np.arange(5), [300.0, 340, 20], [60.0, 80, 100], [30.0, 50, 70]

    def level(grey: float, label: Any, azimuth: Any, elevation: Any) -> Any:
        return np.float32(grey + 0.01 * label + 0.0001 * azimuth + 0.00001 * elevation)

    def views(grey: float, azimuths: list[float]) -> smallnorb.Split:
        labels, a, e = (part.ravel() for part in np.meshgrid(classes, azimuths, elevations, indexing="ij"))
        images = np.ones((1, 2, 2, 2)) * level(grey, labels, a, e)[:, None, None, None]
        return smallnorb.Split(images, labels, a, e, np.zeros_like(labels))

    run = figures.Run(NORB, smallnorb.Data(views(0.7, trained), views(0.1, trained), views(0.4, new)), {})
    axes = drawn(lambda: figures.draw_views(run, angle, 3, "")).axes
    for ax, says, grey, own in zip(axes, ("trained on", "held out"), (0.1, 0.4), (trained, new), strict=True):
        assert ax.get_title("left").startswith(says)
        shown: Any = np.array(own if angle == "azimuth" else elevations)
        assert held(ax)["ticks"][0] == [f"{a:g}°" for a in shown]
        at = (shown, 50) if angle == "azimuth" else (own[1], shown)
        expected = level(grey, classes[:, None], *at)
        np.testing.assert_allclose(cells(ax, 5, 3)[..., 0, 0, 0], expected, atol=0.5 / 63 + 1e-6)


def test_the_same_object_in_the_same_lighting_turns() -> None:
    """Of five classes, two objects in two lightings at four azimuths each, in any order; one view is missing."""
    turned = np.array([0.0, 90, 180, 270])
    labels, azimuths, objects = (part.ravel() for part in np.meshgrid(np.arange(5), turned, [0, 1, 6, 7]))
    here = np.random.default_rng(0).permutation(np.flatnonzero((labels != 2) | (azimuths != 180) | (objects != 0)))
    split = smallnorb.Split(np.zeros((79, 1, 1, 2)), labels[here], azimuths[here], np.full(79, 30.0), objects[here])
    data = smallnorb.Data(NOTHING, split, smallnorb.Split(*(part[:0] for part in split)))
    found = figures.pick_views(NORB, data, (turned - 1) % 360, np.full(4, 30.0))
    assert found.labels.tolist() == np.repeat(np.arange(5), 4).tolist()
    assert found.azimuths.tolist() == np.tile(turned, 5).tolist()
    assert found.objects.tolist() == [0] * 10 + [1] + [0] * 9


def test_a_network_with_fewer_epochs_stays_as_it_was_after_its_last_one(tmp_path: Path) -> None:
    out, flags = tmp_path / "a.gif", ["--n-epochs=2", "--cnn-epochs=1", *SIZES]
    assert animation.main([*flags, "--snapshots=5", "--sweep-frames=2", "--quiet", f"--out={out}"]) == 0
    assert len(imageio.imread(out, extension=".gif")) == 2 * 2  # after each epoch, of which there are two
    config = config_of(animation, flags)
    data = animation.smallnorb.make_data(config)
    recorder = animation.Recorder(config, data, animation.make_sweep(config, data, 2), [1, 2])
    animation.smallnorb.train_all(config, data, names=animation.SHOWN, callback=recorder)
    np.testing.assert_array_equal(recorder.bars["cnn_matched", 1], recorder.bars["cnn_matched", 2])
    assert np.abs(recorder.bars["capsules", 1] - recorder.bars["capsules", 2]).max() > 0
    assert animation.longest(config) == animation.longest(animation.Config(n_epochs=1, cnn_epochs=2)) == 2


@pytest.mark.parametrize(("script", "flags", "said"), [
    (animation, "--n-epochs=90 --snapshots=90 --sweep-frames=7", "--sweep-frames: 90 times 7 frames are more than 600"),
    (digits_animation, "--n-epochs=20 --snapshot-every=6", "--snapshot-every: 625 frames are more than 600"),
    (routing_animation, "--snapshots=201 --em-iters=3", "--snapshots: 201 times 3 frames are more than 600"),
])
def test_too_many_frames_are_refused_before_the_training(script: Any, flags: str, said: str, capsys: Capture) -> None:
    assert script.main(flags.split()) == 2
    assert said in capsys.readouterr().err


def test_a_frame_shows_answers_viewpoint_and_accuracies(run: figures.Run) -> None:
    sweep = animation.make_sweep(run.config, run.data, 12)
    assert sweep.angles.tolist() == list(range(0, 360, 30))
    assert sweep.views.azimuths[:12].tolist() == sweep.angles.tolist()
    beyond = sweep._replace(angles=sweep.angles + 360)  # a training range may begin there
    recorder = animation.Recorder(run.config, run.data, beyond, [2])
    state = {name: TrainState(name, run.states[name].params) for name in animation.SHOWN}
    for one in state.values():
        one.step, one.history = 2 * recorder.steps_per_epoch, {"held_out_accuracy": [0.4, 0.6, 0.8]}
        recorder(one, True)

    *grid, dial, curve = drawn(lambda: frame_of(animation.make_scene(recorder, state), 2, 9)).axes
    for model, row in zip(animation.SHOWN, np.array(grid).reshape(3, 5)[1:], strict=True):
        for k, ax in enumerate(row):
            shown = recorder.bars[model, 2][k, 9]
            check_held(ax, bars=[shown])
            answer = int(shown.argmax())
            assert held(ax)["texts"][0] == f"{'✓' if answer == k else '✗'} {run.config.classes[answer]}"
    assert np.asarray(dial.lines[0].get_xdata()).tolist() == pytest.approx([np.deg2rad(630)] * 2)
    assert held(dial)["texts"][0] == "azimuth 270°: held out"
    over_north = dataclasses.replace(run.config, train_azimuths=(-60, 80), test_azimuths=(100, 200))
    assert animation.where_is(over_north, 300)[0] == "trained on"
    lines = {"Matrix capsules": [[1, 2], [0.4, 0.6]], "CNN of equal size": [[1, 2], [0.4, 0.6]]}
    check_held(curve, lines=lines, levels=[0.2, 0.6])


def test_the_commands_of_the_pages_find_the_reported_runs(monkeypatch: Patch) -> None:
    """And the seed that they draw is that of the median of the capsules."""
    monkeypatch.setattr(support_figures, "ROOT", ROOT)
    stop = Mock(side_effect=UserError("stop"))
    of_scripts: dict[Any, tuple[str, str, str]] = {
        figures: ("azimuth_accuracy", "capsules", "held_out_accuracy"), digits: ("overlay", "capsnet", "set_accuracy"),
        affine: ("rotation_sweep", "capsnet", "rotated_35_accuracy"),
    }
    for script, (picture, *_) in of_scripts.items():
        monkeypatch.setattr(script, "load_or_train", stop)
        (row,) = [row for row in redraw.read_rows() if any(path.endswith(f"{picture}.png") for path in row.pictures)]
        assert script.main(shlex.split(row.command.replace("-m ", ""))[2:]) == 1
    for (given, more), (_, model, metric) in zip(stop.call_args_list, of_scripts.values(), strict=True):
        path, *of = more.get("median_of") or given[5]
        config, _, reported = support_figures.with_reported_seed(path, of[0], of[1], given[2], given[3])
        order = sorted(reported, key=lambda run: run["models"][model][metric])
        assert len(order) >= 5
        middle = order[(len(order) - 1) // 2]["models"][model][metric]
        assert {run["models"][model][metric] for run in order if run["seed"] == config.seed} == {middle}


def test_the_drop_is_what_is_lost(run: figures.Run) -> None:
    state = TrainState("cnn", {})
    state.history = {"familiar_accuracy": [0.5, 0.6, 0.9], "held_out_accuracy": [0.4, 0.2, 0.3]}
    ax = drawn(lambda: figures.draw_extrapolation_bars(run._replace(states={"cnn": state})), record=False).axes[0]
    check_held(ax, bars=[[0.9, 0.3]], levels=[0.2, 0.6])
    assert held(ax)["ticks"][0] == ["Small CNN\ndrop 0.600"]
    elevations: Any = {"train_elevations": (10, 35), "test_elevations": (40, 70)}
    for config in (Config(dataset="shapes"), Config(**elevations)):  # whose objects a half turn does not hide
        assert figures.half_turn_line(ax, config) == []


def test_rows_are_named_by_activations_and_columns_by_scores(run: figures.Run) -> None:
    axes = drawn(lambda: figures.draw_routing_assignments(run), record=False).axes
    _, scores, cache = figures.routed_views(run)
    for v, ax in ((2, axes[2]), (3, axes[5])):  # of an L, after the last iteration
        columns = [f"{name}\n{score:.2f}" for name, score in zip(run.config.classes, scores[v], strict=True)]
        assert held(ax)["ticks"] == [columns, [f"{a:.2f}" for a in cache.a_in[v]]]
        np.testing.assert_array_equal(ax.images[0].get_array(), cache.routing.m_steps[-1].r[v])


def test_poses_stand_beside_the_image_by_true_class_and_class_capsule(run: figures.Run) -> None:
    axes = drawn(lambda: figures.draw_class_poses(run), record=False).axes
    _, scores, cache = figures.routed_views(run)
    mu, answers = cache.mu.reshape(5, 2, 5, 4, 4), scores.reshape(5, 2, 5).argmax(axis=2)  # by class and view
    entries = colormaps["RdBu_r"](0.5 + mu / (2 * np.percentile(np.abs(mu), 96)))[..., :3]
    for b, ax in enumerate(axes):
        poses = cells(ax, 5, 6, gap=(9, 2))[:, 1:, 4:32:8, 4:32:8]
        np.testing.assert_allclose(poses, entries[:, b], atol=0.5 / 63 + 1e-6)
        frames = [patch for patch in ax.patches if isinstance(patch, Rectangle) and patch.get_linewidth() > 2]
        colours = [to_rgba(figures.RIGHT if j == k else figures.WRONG) for k, j in enumerate(answers[:, b])]
        assert [frame.get_edgecolor() for frame in frames] == colours
        # Beside the image, in steps of a picture's 32 pixels and the gap.
        corners = [((1 + j) * (32 + 2) - 0.5, k * (32 + 9) - 0.5) for k, j in enumerate(answers[:, b])]
        assert [frame.get_xy() for frame in frames] == corners
