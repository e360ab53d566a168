"""The figures and the animation of the MultiMNIST experiment: what they plot, for results that are known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import make_multimnist_capsnet_gif as animation
import multimnist_capsnet as multimnist
import visualize_multimnist_capsnet as figures
from fast.workers import SERIAL
from figure_checks import cells, check_held, drawn, frame_of, held, legend_of, move_to
from helpers import EXPERIMENTS, Patch, config_of, states_of
from multimnist_capsnet import TrainState
from support.statistics import t_quantile

GREYS = 0.5 / 63 + 1e-6  # rounding of pictures
HISTORY = {"set_accuracy": [0.25, 0.75, 0.5], "soft_accuracy": [0.75, 0.9, 0.875]}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: Patch) -> None:
    move_to(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def run() -> figures.Run:
    """Untrained networks with histories of three epochs."""
    flags = "--dtype=float64 --seed=123 --n-test=60 --conv-channels=4"
    config = config_of(multimnist, EXPERIMENTS["multimnist_capsnet"].argv(flags))
    states = states_of(multimnist.make_models(config), config)
    for state in states.values():
        state.history = dict(HISTORY)
    states["capsnet"].history |= {"train_class_loss": [0.5, 0.3, 0.2], "recon_mse": [0.09, 0.07, 0.06]}
    return figures.Run(config, multimnist.make_data(config), states, "seed 123")


@pytest.fixture(scope="module")
def seen(run: figures.Run) -> figures.Predictions:
    """Of every three composites one answer is right, one has a wrong second digit, one two wrong ones."""
    found = figures.predict(run)
    labels, kind = found.batch.labels, np.arange(60) % 3
    others = np.array([[j for j in range(10) if j not in two][:2] for two in labels])
    answers = np.where(np.stack([kind < 2, kind < 1], axis=1), labels, others)
    return found._replace(answers=answers, hits=2 - kind)


def test_predictions_agree_with_the_evaluation(run: figures.Run, seen: figures.Predictions) -> None:
    params, found = run.states["capsnet"].params, figures.predict(run)
    metrics = multimnist.evaluate(multimnist.make_models(run.config)["capsnet"], params, run.data.test, SERIAL)
    assert (found.hits == 2).mean() == pytest.approx(metrics["set_accuracy"])
    assert (found.hits > 0).mean() == pytest.approx(metrics["soft_accuracy"])
    assert not (figures.absent(seen, np.arange(60))[:, None] == np.hstack([seen.batch.labels, seen.answers])).any()


def test_digits_are_drawn_from_their_own_capsules(run: figures.Run, seen: figures.Predictions) -> None:
    chosen = figures.varied(seen.batch.labels, np.arange(60), 8)
    labels, sources, params = seen.batch.labels[chosen], seen.batch.sources[chosen], run.states["capsnet"].params
    ax = drawn(lambda: figures.draw_reconstructions(run._replace(tested=seen))).axes[0]
    shown, errors = cells(ax, 5, 8, (8, 3)), []
    for d, blue in enumerate((0x42 / 255, 0xE9 / 255)):
        alone = multimnist.reconstruct(params, seen.v[chosen], labels[:, d : d + 1])[:, 0]
        np.testing.assert_allclose(shown[1 + 2 * d][..., 2], sources[:, d] * blue, atol=GREYS)
        np.testing.assert_allclose(shown[2 + 2 * d][..., 2], alone * blue, atol=GREYS)
        errors.append(np.square(alone - sources[:, d]).mean(axis=(1, 2)))
    assert held(ax)["texts"] == [f"{error:.3f}" for pair in np.transpose(errors) for error in pair]
    texts: Any = ax.texts
    at = [np.divide(text.xy, (36 + 3, 36 + 8)).astype(int).tolist() for text in texts]
    assert at == [[m, row] for m in range(8) for row in (2, 4)]


def test_overlays_say_from_which_capsules_they_are_drawn(run: figures.Run, seen: figures.Predictions) -> None:
    right, wrong, ghosts = drawn(lambda: figures.draw_overlay(run._replace(tested=seen))).axes
    labels = seen.batch.labels
    names = [name.split("\n") for ax in (right, wrong, ghosts) for name in held(ax)["ticks"][0]]
    assert all(true == said for true, said in names[:10])
    k = int(figures.varied(labels, np.flatnonzero(seen.hits < 2), 3)[0])
    true, said = ("{} + {}".format(*two) for two in (labels[k], seen.answers[k]))
    assert names[10:12] == [[true, true], [true, f"✗ {said}"]]
    params = run.states["capsnet"].params
    both = figures.in_two_colours(multimnist.reconstruct(params, seen.v[[k]], seen.answers[[k]])[0])
    expected = np.stack([both, figures.in_two_colours(seen.batch.sources[k])])
    np.testing.assert_allclose(cells(wrong, 3, 6, (3, 3))[1:, 1], expected, atol=GREYS)
    assert all(said.startswith("* ") and said[2:5] == true[:3] and said[6:] != true[4:] for true, said in names[16:])
    few = seen._replace(hits=np.where(np.arange(60) < 15, seen.hits, 0))  # five are right
    drawn(lambda: figures.draw_overlay(run._replace(tested=few)))


def test_lengths_and_outcomes_are_bars(run: figures.Run, seen: figures.Predictions) -> None:
    *panels, outcomes = drawn(lambda: figures.draw_capsule_activations(run._replace(tested=seen))).axes
    grid, labels = np.array(panels).reshape(2, 2, 3).swapaxes(1, 2).reshape(6, 2), seen.batch.labels
    for k, (text, bars) in zip(figures.varied(labels, np.arange(60), 6), grid, strict=True):
        check_held(bars, bars=[seen.lengths[k]])
        boxes = sorted(patch.get_x() + 0.46 for patch in bars.patches if not patch.get_fill())
        assert boxes == pytest.approx(sorted(labels[k]))
        true, said = ("{} + {}".format(*two) for two in (labels[k], seen.answers[k]))
        assert held(text)["texts"] == [f"true: {true}\n{'✓' if seen.hits[k] == 2 else '✗'} {said}"]
    check_held(outcomes, bars=[[0.5] * 3, [0.375] * 3, [0.125] * 3])
    assert [str(bars.get_label()) for bars in outcomes.containers] == ["both right", "one right", "none"]
    assert held(outcomes)["texts"] == ["50 %"] * 3 + ["38 %"] * 3 + ["12 %"] * 3


LENGTHS = Path("lengths.json")


def add_lengths(
    name: str, model: str, accuracies: dict[tuple[int, int], list[float]], file: Path = LENGTHS, **config: Any
) -> None:
    """A part that compares lengths, as compare_seeds.py writes it; the keys are (n_epochs, n_train)."""
    settings = {}
    for (n_epochs, n_train), values in accuracies.items():
        one = dataclasses.asdict(multimnist.Config(n_epochs=n_epochs, n_train=n_train, **config))
        runs = [{"seed": k, "models": {model: {"set_accuracy": a}}} for k, a in enumerate(values)]
        settings[f"n-epochs={n_epochs}"] = {"config": one, "runs": runs}
    parts = json.loads(file.read_text())["parts"] | {name: {"dataset": "mnist", "settings": settings}}
    file.write_text(json.dumps({"parts": parts}, default=str))


def test_the_length_of_a_training_is_what_its_setting_says() -> None:
    file = LENGTHS.with_name("paper_size.json")
    LENGTHS.write_text('{"parts": {}}')
    file.write_text('{"parts": {}}')
    sizes: dict[str, Any] = {"batch_size": 32, "conv_channels": 32, "min_iou": 0.8}
    add_lengths("a", "cnn", {(8, 6000): [0.66, 0.67, 0.71]}, **sizes)
    add_lengths("b", "capsnet", {(18, 27_000): [0.86, 0.87, 0.88], (8, 6000): [0.66, 0.68, 0.70]}, **sizes)
    add_lengths("c", "capsnet", {(50, 100_000): [0.92]}, **sizes | {"batch_size": 64})
    add_lengths("d", "capsnet", {(8, 6000): [0.9]}, **sizes | {"conv_channels": 256, "min_iou": 0.0})
    config = dataclasses.asdict(multimnist.Config(n_epochs=18, n_train=27_000, **sizes))
    runs = [{"seed": 200 + k, "models": {"capsnet": {"set_accuracy": a}}} for k, a in enumerate((0.80, 0.81, 0.82))]
    document = {"config": config, "settings": {"default": {"runs": runs}}}  # of a verdict: in place of part b's
    LENGTHS.with_name("composites_485568.json").write_text(json.dumps(document, default=str))
    # The first is drawn in place of part d's, the others are not drawn.
    newer: dict[str, dict[str, Any]] = {"newer": {}, "added": {"overlay": "sum"}, "tuning": {"n_val": 1000}}
    for name, settings in newer.items():
        add_lengths(name, "capsnet", {(8, 6000): [0.7, 0.74]}, file, **sizes | {"conv_channels": 256} | settings)
    found = figures.read_scaling(LENGTHS)
    # Full batches alone: 5,984 in each of 8 epochs, 26,976 in each of 18, and 99,968 in each of 50.
    assert {series: list(lengths) for series, lengths in found.items()} == {
        figures.Series("capsnet", False): [47_872, 485_568, 4_998_400],
        figures.Series("cnn", False): [47_872], figures.Series("capsnet", True): [47_872],
    }
    fig = drawn(lambda: figures.draw_scaling(found))
    names = ["CapsNet", "CNN without pooling", "CapsNet of the paper's size"]
    assert legend_of(fig) == names
    ax = fig.axes[0]
    lines = held(ax)["lines"]
    for name, means in zip(names, ([0.68, 0.81, 0.92], [0.68], [0.72]), strict=True):
        assert lines[name][1].tolist() == pytest.approx(means)
    half = t_quantile(3) * 0.02 / 3**0.5
    intervals: Any = ax.collections[0]
    assert len(intervals.get_segments()) == 2
    ends = intervals.get_segments()[0][:, 1]
    assert ends.tolist() == pytest.approx([0.68 - half, 0.68 + half])
    assert lines["line 1"][1].tolist() == [0.92]  # hollow, for one seed
    assert lines["line 5"][1].tolist() == [pytest.approx(0.72)]  # and for two
    assert held(ax)["levels"] == [pytest.approx(0.948)]
    assert [ax.xaxis.get_major_formatter()(n, 0) for n in (5e5, 1e6)] == ["500,000", "1 million"]
    assert ax.get_ylim() == pytest.approx((0.6, 1))


def test_no_seed_of_strokes_is_a_reported_one(run: figures.Run, monkeypatch: Patch) -> None:
    said = list[str]()
    monkeypatch.setattr(animation, "with_reported_seed", lambda *_: (run.config, "seed 123, the median of 4", []))
    monkeypatch.setattr(multimnist, "train_all", lambda *_, **__: run.states)
    monkeypatch.setattr(animation, "make_scene", lambda recorder, subtitle: said.append(subtitle))
    monkeypatch.setattr(animation, "write_animation", lambda options, make, frames: make())
    for name in ("mnist", "strokes"):
        monkeypatch.setattr(multimnist, "make_data", lambda _, name=name: run.data._replace(name=name))
        assert animation.main([]) == 0
    assert [text.rpartition(" · ")[2] for text in said] == ["seed 123, the median of 4", "seed 123"]


def test_a_frame_shows_what_the_network_makes_of_the_composites(run: figures.Run) -> None:
    recorder = animation.Recorder(run.config, run.data, 2, SERIAL)
    state = TrainState("capsnet", run.states["capsnet"].params)
    for step in (0, 1, 2):
        state.step = step
        recorder(state, False)
    assert [snapshot.step for snapshot in recorder.snapshots] == [0, 2]
    first, last = recorder.snapshots
    digit = recorder.shown.labels[4, 0]  # twice, one is right
    recorder.snapshots[1] = last._replace(
        drawn=0.5 * first.drawn, answers=np.array([*recorder.shown.labels[:4], [digit, digit]]), set_accuracy=0.75
    )

    left, right = drawn(lambda: frame_of(animation.make_scene(recorder, "seed 123"), 1)).axes
    shown = cells(left, 3, 5, (2, 2))
    for d, blue in enumerate((0x42 / 255, 0xE9 / 255)):
        np.testing.assert_allclose(shown[1 + d][..., 2], 0.5 * first.drawn[:, d] * blue, atol=0.5 / 15)
    names = ["{} + {}".format(*labels) for labels in recorder.shown.labels]
    assert held(left)["ticks"][0] == names
    assert held(left)["texts"] == [*(f"✓ {name}" for name in names[:4]), f"✗ {digit} + {digit}"]
    check_held(right, lines={"CapsNet": [[0, 2], [first.set_accuracy, 0.75]]}, levels=[1 / 45])
    assert held(right)["texts"][-1] == "75 %"
