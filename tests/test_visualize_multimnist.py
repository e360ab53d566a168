"""The figures and the animation of the MultiMNIST experiment, on trainings of seconds with generated digits."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import make_multimnist_capsnet_gif as animation
import multimnist_capsnet as experiment
import visualize_multimnist_capsnet as figures
from figure_checks import (
    check_animation,
    check_failures,
    check_pictures,
    check_texts,
    check_unchanged,
    draw_coarsely,
    drawn_texts,
    refuse,
    shown_texts,
)
from helpers import usage_error
from support.checkpoints import save_checkpoint
from support.figures import figure_style

SMALL = ["--seed=123", "--dataset=strokes", "--conv-channels=4", "--primary-types=2", "--threads=1"]
TINY = [*SMALL, "--n-epochs=2", "--n-train=64", "--n-test=60", "--batch-size=16", "--lr=0.002"]
ALL = [
    "capsule_activations", "capsule_dimensions", "couplings", "example_pairs", "overlay", "reconstructions",
    "training_curves",
]  # fmt: skip
FOLDER = Path("viz", experiment.EXPERIMENT)


@functools.cache
def strokes() -> experiment.Digits:
    train, test = (experiment.stroke_digits(np.random.default_rng(k), 200) for k in range(2))
    return experiment.Digits("strokes", *train, *test)


@pytest.fixture(autouse=True, scope="module")
def few_digits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "resolve_dataset", lambda *_: strokes())
        yield


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No figure of the project is touched, and no results file of it found."""
    monkeypatch.chdir(tmp_path)
    draw_coarsely(monkeypatch)


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, experiment, "train")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run.safetensors"
    assert experiment.main([*TINY, "--quiet", f"--checkpoint={path}"]) == 0
    return path


@pytest.fixture(scope="module")
def run(checkpoint: Path) -> figures.Run:
    config, states = experiment.load_checkpoint(checkpoint)
    return figures.Run(config, experiment.make_data(config), states)


@pytest.fixture(scope="module")
def seen(run: figures.Run) -> figures.Predictions:
    return figures.predict(run)


# ----------------------------------------------------------------------------------------------------------------------
# Figures
# ----------------------------------------------------------------------------------------------------------------------


def test_training_and_checkpoint_give_the_same_figures(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert figures.main([*TINY, "--quiet"]) == 0
    check_pictures(FOLDER, ALL, highest=1600, scale=0.5)
    refuse(monkeypatch, experiment, "train")
    check_unchanged(figures, [*TINY, "--preset=small", f"--checkpoint={checkpoint}"], FOLDER, capsys)


def with_hits(seen: figures.Predictions, hits: int | None) -> figures.Predictions:
    """As if every answer had so many right digits; None: one composite in three has two, the others one."""
    labels = seen.batch.labels
    counts = np.where(np.arange(len(labels)) % 3, 1, 2) if hits is None else np.full(len(labels), hits)
    others = (labels.sum(axis=1, keepdims=True) + np.arange(10)) % 10
    answers = labels.copy()
    for k, count in enumerate(counts):
        free = [j for j in others[k] if j not in labels[k]]
        answers[k, count:] = free[: 2 - count]
    return seen._replace(answers=answers, hits=counts)


@pytest.mark.parametrize("hits", [None, 0, 1, 2])
def test_texts_are_large_enough_and_stay_apart(
    run: figures.Run, seen: figures.Predictions, monkeypatch: pytest.MonkeyPatch, hits: int | None
) -> None:
    monkeypatch.setattr(figures, "predict", lambda _: with_hits(seen, hits))
    seeds = {model: np.full((3, 1), 0.5) for model in run.states} if hits is None else {}
    shown = run if hits is None else run._replace(states={"capsnet": run.states["capsnet"]})
    checked = {"example_pairs"} if hits is not None else set()  # they show no answer
    if hits:
        checked.add("training_curves")
    for name, drawer in figures.drawers(shown, seeds).items():
        if name in checked:
            continue
        fig, texts = drawn_texts(drawer)
        assert any("seed 123" in t.get_text() and "not MNIST" in t.get_text() for t, _ in texts), name
        check_texts(fig, texts, name)


@pytest.mark.parametrize("n_iters", [1, 2, 12])
def test_other_numbers_of_iterations_are_drawn(run: figures.Run, seen: figures.Predictions, n_iters: int) -> None:
    other = run._replace(config=dataclasses.replace(run.config, routing_iters=n_iters))
    with figure_style():
        figures.draw_couplings(other, seen).canvas.draw()


def test_chance_and_the_points_of_a_results_file_are_drawn(run: figures.Run) -> None:
    seeds = {name: np.array([[0.25], [0.75]]) for name in run.states}
    with figure_style():
        *_, curves, points = figures.draw_training_curves(run, seeds).axes
    assert any(np.allclose(np.asarray(line.get_ydata()), 1 / 45) for line in curves.lines)
    assert [np.asarray(line.get_ydata()).tolist() for line in points.lines] == [[0.25, 0.75]] * 3


# ----------------------------------------------------------------------------------------------------------------------
# What is drawn is what the network does
# ----------------------------------------------------------------------------------------------------------------------


def test_predictions_agree_with_the_evaluation(run: figures.Run, seen: figures.Predictions) -> None:
    last = {metric: values[-1] for metric, values in run.states["capsnet"].history.items()}
    assert (seen.hits == 2).mean() == pytest.approx(last["set_accuracy"])
    assert (seen.hits > 0).mean() == pytest.approx(last["soft_accuracy"])
    drawn = figures.draw_capsules(run, seen.v, seen.batch.labels)
    assert np.square(drawn - seen.batch.sources).mean() == pytest.approx(last["recon_mse"], rel=1e-4)
    assert not (figures.absent(seen, np.arange(60))[:, None] == np.hstack([seen.batch.labels, seen.answers])).any()


def test_right_answers_stand_where_their_labels_stand() -> None:
    labels = np.array([[1, 2], [1, 2], [1, 2], [1, 2], [1, 2], [1, 2]])
    answers = np.array([[1, 2], [2, 1], [3, 1], [2, 3], [1, 3], [4, 3]])
    expected = [[1, 2], [1, 2], [1, 3], [3, 2], [1, 3], [4, 3]]
    assert figures.in_order_of_labels(labels, answers).tolist() == expected


def test_digits_that_were_not_shown_come_first() -> None:
    labels = np.array([[1, 2], [2, 1], [1, 3], [4, 5], [6, 7], [1, 2]])
    assert figures.varied(labels, np.arange(6), 4).tolist() == [0, 3, 4, 2]
    assert figures.varied(labels, np.array([1, 5]), 4).tolist() == [1, 5]
    assert figures.varied(labels, np.array([], int), 4).tolist() == []


def test_couplings_start_even_and_add_up_to_one(run: figures.Run, seen: figures.Predictions) -> None:
    image = seen.batch.images[3]
    routed = figures.routes(run, image)
    side = run.config.primary_side
    assert routed.c.shape == (run.config.routing_iters, 10, side, side)
    np.testing.assert_allclose(routed.c.sum(axis=1), 1, rtol=1e-4)
    np.testing.assert_allclose(routed.c[0], 0.1, rtol=1e-6)
    assert routed.entropy[0] == pytest.approx(np.log2(10))
    assert (routed.entropy <= np.log2(10) + 1e-5).all()
    np.testing.assert_allclose(routed.lengths[-1], seen.lengths[3], rtol=1e-3)


def test_couplings_lie_where_their_capsules_are(run: figures.Run) -> None:
    """A digit in the lower left corner makes the capsules there, and only there, leave the even coupling."""
    image = np.zeros((36, 36), np.float32)
    image[24:34, 2:12] = 1
    with_ink, without = (figures.routes(run, picture) for picture in (image, np.zeros_like(image)))
    change = np.abs(with_ink.c[-1] - without.c[-1]).max(axis=0)
    assert change[-1, 0] > 0
    assert max(change[:3].max(), change[:, -3:].max()) < 1e-6 * change.max()


def test_two_colours_add_up() -> None:
    one, none = np.ones((2, 2)), np.zeros((2, 2))
    assert np.allclose(figures.in_two_colours(np.stack([one, none])), figures.in_colour(one, figures.FIRST))
    assert figures.in_two_colours(np.stack([one, one])).min() > 0.85


# ----------------------------------------------------------------------------------------------------------------------
# Results of many seeds
# ----------------------------------------------------------------------------------------------------------------------


def lengths(model: str, accuracies: dict[tuple[int, int], list[float]], **config: Any) -> dict[str, Any]:
    """A comparison of lengths, as compare_seeds.py writes it; the keys are (n_epochs, n_train)."""
    settings = {}
    for (n_epochs, n_train), values in accuracies.items():
        one = dataclasses.asdict(experiment.Config(n_epochs=n_epochs, n_train=n_train, **config))
        runs = [{"seed": k, "models": {model: {"n_params": 1, "set_accuracy": a}}} for k, a in enumerate(values)]
        settings[f"n-epochs={n_epochs}"] = {"config": one, "models": {model: {}}, "runs": runs}
    return {"dataset": "mnist", "settings": settings}


def write_lengths(name: str, document: dict[str, Any]) -> None:
    path = Path("results", experiment.EXPERIMENT, f"scaling_{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


THREE = {
    "cnn_pool": lengths("cnn_pool", {(8, 6000): [0.70, 0.72, 0.74], (18, 27_000): [0.85, 0.86, 0.87]}),
    "cnn": lengths("cnn", {(8, 6000): [0.67, 0.68, 0.69], (18, 27_000): [0.83, 0.84, 0.85]}),
    "capsnet": lengths("capsnet", {(18, 27_000): [0.86, 0.87, 0.88], (8, 6000): [0.66, 0.68, 0.70]}, routing_iters=5),
    "long_capsnet": lengths("capsnet", {(50, 100_000): [0.92]}, routing_iters=5, batch_size=64),
}


def test_the_length_of_a_training_is_what_its_setting_says(no_training: None) -> None:
    for name, document in THREE.items():
        write_lengths(name, document)
    assert figures.main(["--scaling"]) == 0
    check_pictures(FOLDER, ["scaling"], highest=1000, scale=0.5)
    found = figures.read_scaling(sorted(Path("results", experiment.EXPERIMENT).iterdir()))
    assert found.dataset == "MNIST"
    assert [series.model for series in found.accuracies] == ["capsnet", "cnn", "cnn_pool"]
    # Full batches alone: 5,984 in each of 8 epochs, 26,976 in each of 18, and 99,968 in each of 50.
    assert found.accuracies[figures.Series("capsnet", 5)] == {
        47_872: [0.66, 0.68, 0.70], 485_568: [0.86, 0.87, 0.88], 4_998_400: [0.92],
    }  # fmt: skip


def scaling_axes(documents: dict[str, dict[str, Any]]) -> Any:
    for name, document in documents.items():
        write_lengths(name, document)
    fig, texts = drawn_texts(
        lambda: figures.draw_scaling(figures.read_scaling(sorted(Path("results", experiment.EXPERIMENT).iterdir())))
    )
    check_texts(fig, texts, "scaling")
    return fig.axes[0], [text.get_text() for text, _ in texts]


def test_means_with_intervals_and_lengths_of_one_seed_are_drawn() -> None:
    ax, words = scaling_axes(THREE)
    assert {"one seed", "CapsNet", "CNN with max pooling", "1 million", "50,000"} <= {*words}
    assert any("95 % intervals over 3 seeds" in word for word in words)
    capsnet = [bars for bars in ax.containers if bars.get_label() == "CapsNet"]
    means = [float(bars.lines[0].get_ydata()[0]) for bars in capsnet]
    assert means == pytest.approx([0.68, 0.87, 0.92])
    ends = [bars.lines[2][0].get_segments()[0][:, 1] for bars in capsnet]
    assert ends[0] == pytest.approx([0.68 - 4.302653 * 0.02 / 3**0.5, 0.68 + 4.302653 * 0.02 / 3**0.5])
    assert ends[2] == pytest.approx([0.92, 0.92])
    assert capsnet[2].lines[0].get_markerfacecolor() == "white"
    assert sum(line.get_linestyle() == "--" and len(line.get_xdata()) == 2 for line in ax.lines) >= 1


def test_one_routing_iteration_is_a_series_of_its_own() -> None:
    once = lengths("capsnet", {(8, 6000): [0.6, 0.62, 0.64]}, routing_iters=1)
    _, words = scaling_axes({"capsnet": THREE["capsnet"], "capsnet_1": once})
    assert {"CapsNet, 5 iterations", "CapsNet, 1 iteration"} <= {*words}
    assert "one seed" not in words


def test_a_training_as_in_the_paper_is_drawn_with_those_of_another_overlap() -> None:
    paper = lengths("capsnet", {(8, 6000): [0.9]}, min_iou=0.0, conv_channels=256)
    ax, words = scaling_axes({"capsnet": THREE["capsnet"], "paper": paper})
    assert {"CapsNet", "CapsNet of the paper's size, any overlap"} <= {*words}
    assert any("IoU ≥ 0.8" in word for word in words)
    assert [float(bars.lines[0].get_ydata()[0]) for bars in ax.containers] == pytest.approx([0.68, 0.87, 0.9])
    write_lengths("capsnet", paper)
    assert figures.read_scaling([Path("results", experiment.EXPERIMENT, "scaling_capsnet.json")]).min_iou == 0


@pytest.mark.parametrize(
    ("second", "fault"),
    [
        ({"settings": 3}, "scaling_b.json is no result of this experiment by compare_seeds.py"),
        (lengths("cnn", {(9, 6000): []}), "scaling_b.json is no result of this experiment by compare_seeds.py"),
        (lengths("cnn", {(9, 6000): ["x"]}), "scaling_b.json is no result of this experiment by compare_seeds.py"),  # type: ignore
        (lengths("cnn", {(8, 6000): [0.5]}, lr=0.1), "scaling_b.json: cnn has another setting of 47,872 composites"),
        (lengths("cnn", {(9, 6000): [0.5]}, min_iou=0.0), "have different data sets or values of --min-iou"),
    ],
)
def test_lengths_that_do_not_go_together(
    no_training: None, capsys: pytest.CaptureFixture[str], second: dict[str, Any], fault: str
) -> None:
    check_failures([(figures, ["--scaling"], "there is no results/multimnist_capsnet/scaling_*.json")], capsys)
    write_lengths("a", THREE["cnn"])
    write_lengths("b", second)
    check_failures([(figures, ["--scaling"], fault)], capsys)


# ----------------------------------------------------------------------------------------------------------------------
# Animation
# ----------------------------------------------------------------------------------------------------------------------


def test_animation_has_the_frames_that_were_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    check_animation(animation, [*TINY, "--snapshot-every=3"], 4, 4_000_000, capsys)  # of 8 steps: 0, 3, 6, 8


def test_snapshots_change_nothing_of_the_training(run: figures.Run) -> None:
    state, snapshots = animation.record(run.config, run.data, 5, 1, quiet=True)
    assert [snapshot.step for snapshot in snapshots] == [0, 5, 8]
    trained = run.states["capsnet"]
    for key, p in trained.params.items():
        np.testing.assert_array_equal(state.params[key], p)
    assert snapshots[-1].set_accuracy == trained.history["set_accuracy"][-1]
    assert snapshots[-1].recon_mse == trained.history["recon_mse"][-1]


def test_texts_of_the_animation_stay_apart(run: figures.Run) -> None:
    _, snapshots = animation.record(run.config, run.data, 8, 1, quiet=True)
    with figure_style():
        scene = animation.Reconstructions(run.config, run.data, animation.shown_composites(run.data), snapshots)
        scene.frame(1)
        texts = shown_texts(scene)
    assert len(texts) > 25
    check_texts(scene.fig, texts, "animation")


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes on the command line
# ----------------------------------------------------------------------------------------------------------------------

USAGE_ERRORS: list[tuple[Any, list[str]]] = [
    (figures, ["--n-epochs=0"]),
    (figures, ["--lr=nan"]),
    (figures, ["--threads=0"]),
    (figures, ["--dataset=smallnorb"]),
    (figures, ["--scaling", "--seed=1"]),
    (animation, ["--snapshot-every=0"]),
    (animation, ["--snapshot-every=many"]),
    (animation, ["--snapshot-every=1"]),
    (animation, ["--checkpoint=run.safetensors"]),
]


@pytest.mark.parametrize(("script", "flags"), USAGE_ERRORS)
def test_wrong_flags(no_training: None, capsys: pytest.CaptureFixture[str], script: Any, flags: list[str]) -> None:
    usage_error(script, flags, capsys)


def partly_trained(tmp_path: Path, names: tuple[str, ...], epochs: int) -> Path:
    config = experiment.Config(n_epochs=2, conv_channels=2, primary_types=1, decoder=(4, 4))
    states = experiment.fresh_states(config)
    for name in names:
        states[name].step, states[name].history = 1, {"train_loss": [0.5] * epochs}
    path = tmp_path / "-".join(names)
    save_checkpoint(path, experiment.EXPERIMENT, config, states.values(), "")
    return path


def test_a_checkpoint_that_cannot_be_drawn_is_found_before_the_data(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(monkeypatch, experiment, "make_data")
    unfinished = partly_trained(tmp_path, ("capsnet", "cnn"), 1)
    without_capsules = partly_trained(tmp_path, ("cnn",), 2)
    cases: list[tuple[Any, list[str], str]] = [
        (figures, [f"--checkpoint={unfinished}"], "1 of 2 epochs of capsnet;"),
        (figures, [f"--checkpoint={without_capsules}"], "0 of 2 epochs of capsnet;"),
        (figures, [f"--checkpoint={checkpoint}", "--seed=0"], "was made with --seed 123, not 0"),
        (figures, [f"--checkpoint={checkpoint}", "--preset=paper"], "was made with --preset small, not paper"),
    ]
    check_failures(cases, capsys)


def test_what_cannot_work_is_found_before_the_training(no_training: None, capsys: pytest.CaptureFixture[str]) -> None:
    Path("useless.json").write_text('{"models": 3}')
    cases: list[tuple[Any, list[str], str]] = [
        (figures, [*TINY, "--results=none.json"], "there is no results file none.json"),
        (figures, [*TINY, "--results=useless.json"], "useless.json holds no run with these flags"),
        (figures, ["--n-test=15"], "the figures need --n-test 16 or more"),
        (animation, ["--n-test=15"], "the figures need --n-test 16 or more"),
    ]
    check_failures(cases, capsys)
