"""The figures and the animation of the affine experiment: what they plot, for results that are known."""

from __future__ import annotations

import dataclasses
from unittest.mock import Mock

import numpy as np
import pytest

import multimnist_capsnet as multimnist
from figure_checks import assert_same, cells, check_held, drawn, frame_of, held, legend_of
from helpers import EXPERIMENTS, Patch, config_of, states_of
from more import (
    make_mnist_affine_capsnet_gif as animation, mnist_affine_capsnet as affine,
    visualize_mnist_affine_capsnet as figures,
)
from multimnist_capsnet import UserError
from support.statistics import t_quantile

ANGLES = (-90, 0, 90)
LABELS = ("CapsNet", "CNN of equal size", "LeNet-5")


@pytest.fixture(autouse=True)
def three_angles(monkeypatch: Patch) -> None:
    for module in (affine, figures, animation):
        monkeypatch.setattr(module, "SWEEP", ANGLES)


@pytest.fixture(scope="module")
def run() -> figures.Run:
    """Untrained networks, and made-up tests."""
    flags = "--dtype=float64 --seed=123 --n-test=60 --conv-channels=4"
    config = config_of(affine, EXPERIMENTS["mnist_affine_capsnet"].argv(flags))
    states = states_of(affine.make_models(config), config)
    tested = {name: {"sweep": {"-90": 0.1 * m, "0": 1.0, "90": 0.2}} for m, name in enumerate(states)}
    return figures.Run(config, affine.make_data(config), states, "seed 123", tested=tested)


def test_the_median_seed_is_that_of_the_largest_rotation(monkeypatch: Patch) -> None:
    monkeypatch.setattr(figures, "load_or_train", asked := Mock(side_effect=UserError))
    with pytest.raises(OSError):
        figures.finished(affine.Config(rotation=(15.0, 40.0)), None, {})
    assert (figures.RESULTS, "capsnet", "rotated_40_accuracy") in asked.call_args.args


def test_the_sweep_is_mean_and_interval_of_the_reported_seeds(run: figures.Run) -> None:
    values = {"capsnet": [0.3, 0.5], "cnn": [0.6, 0.6], "lenet": [0.1, 0.3]}
    reported = [{"seed": 200 + s, "models": {name: {"sweep": {"-90": 0.1, "0": 1.0, "90": found[s]}}
                                             for name, found in values.items()}} for s in range(2)]
    fig = drawn(lambda: figures.draw_rotation_sweep(run._replace(reported=reported)))
    left, right = fig.axes[:2]
    half = t_quantile(2) * 0.1
    curves = {"CapsNet": (0.4, half), "CNN of equal size": (0.6, 0), "LeNet-5": (0.2, half)}
    x = list(ANGLES)
    lines = {name: [x, [0.1, 1, mean]] for name, (mean, _) in curves.items()}
    bands = [[x, [0.1, 1, mean - h], [0.1, 1, mean + h]] for mean, h in curves.values()]
    found = held(left)
    assert_same({name: found["lines"][name] for name in curves}, lines, "lines")
    check_held(left, bands=bands, levels=[0.1])
    gains = {"CNN of equal size": [x, [0, 0, -20]], "LeNet-5": [x, [0, 0, 20]]}
    width = 100 * half
    check_held(right, lines=gains, bands=[[x, [0, 0, -20 - width], [0, 0, -20 + width]], [x, [0, 0, 20], [0, 0, 20]]],
               levels=[0])
    assert legend_of(fig) == list(LABELS)
    alone = drawn(lambda: figures.draw_rotation_sweep(run)).axes[0]
    assert [held(alone)["lines"][name][1].tolist() for name in LABELS] == [[0, 1, 0.2], [0.1, 1, 0.2], [0.2, 1, 0.2]]
    assert held(alone)["bands"] == []
    stopped = run._replace(config=dataclasses.replace(run.config, n_sweep=2000, match_accuracy=0.98))
    text = drawn(lambda: figures.draw_rotation_sweep(stopped), record=False).texts[1].get_text()
    assert "up to 98 % right, at most 2 epochs" in text
    assert "60 digits at each angle" in text


def test_a_frame_says_what_the_networks_believe(run: figures.Run) -> None:
    turning = animation.Turning(run, 5)
    assert turning.angles.tolist() == [-90, -45, 0, 45, 90]
    assert animation.held(turning.angles, (35, -100)) == {0, 2, 3}
    np.testing.assert_allclose(turning.outputs["lenet"].sum(axis=-1), 1, rtol=1e-5)
    lengths, _ = multimnist.capsnet_forward(run.states["capsnet"].params, turning.images[3], run.config)
    np.testing.assert_allclose(turning.outputs["capsnet"][3], lengths, rtol=1e-5)

    *grid, curve = drawn(lambda: frame_of(animation.make_scene(run, turning), 3)).axes
    for r, row in enumerate(np.array(grid).reshape(3, 4)):
        label = animation.SHOWN[r]
        np.testing.assert_allclose(cells(row[0], 1, 1)[0, 0, ..., 0], turning.images[3, r], atol=0.5 / 31 + 1e-6)
        for ax, name in zip(row[1:], run.states, strict=True):
            scores = turning.outputs[name][3, r]
            check_held(ax, bars=[scores], spans=[(label - 0.46, label + 0.46)])
            answer = scores.argmax()
            assert held(ax)["texts"] == [f"{'✓' if answer == label else '✗'} {answer}"]
    lines = {name: [[-90, 0, 45], [0.1 * m, 1, 0.6]] for m, name in enumerate(LABELS)}
    found = held(curve)["lines"]
    assert found["line 1"][0].tolist() == [45, 45]
    assert_same({name: found[name] for name in LABELS}, lines, "lines")
