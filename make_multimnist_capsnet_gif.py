#!/usr/bin/env python3
"""Animate the MultiMNIST experiment: a capsule network learns to take two overlapping digits apart.

    python make_multimnist_capsnet_gif.py --n-epochs 8 --n-train 6000

Every ``--snapshot-every`` steps a frame shows the same six test composites, what the decoder draws from the capsule of
each of their two digits, the answer of the network, and the accuracy and reconstruction error up to then.
"""

from __future__ import annotations

import support.headless  # noqa: F401  before matplotlib

# isort: split

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import multimnist_capsnet as experiment
import visualize_multimnist_capsnet as figures
from fast.workers import Workers
from multimnist_capsnet import Array, Batch, Config, Data
from support.figures import (
    BLACK,
    BLUE,
    GREY,
    MAX_FRAMES,
    RIGHT,
    WRONG,
    AnimationOptions,
    Scene,
    accuracy_axis,
    add_axes,
    add_image,
    add_row_label,
    add_text,
    darkened,
    marked_answer,
    new_figure,
    require_test_images,
    step_axis,
    write_gif,
)
from support.files import require_writable
from support.optimizers import TrainState
from support.script import script
from support.settings import SettingError, int_in, output_path, parse, redeclared, setting
from support.training import RunOptions
from visualize_multimnist_capsnet import DIGIT_COLOURS, add_two_names, in_colour, in_two_colours

N_SHOWN = 6  # composites
N_TESTED = 500  # composites of the curves, the first of the test set
N_GREYS, N_COLOURS = 32, 160  # of the palette
MAX_MSE = 0.1  # of the axis: an untrained decoder's is out of it


# ----------------------------------------------------------------------------------------------------------------------
# What the frames show
# ----------------------------------------------------------------------------------------------------------------------


class Snapshot(NamedTuple):
    step: int
    drawn: Array  # (6, 2, H, W)
    answers: Array  # (6, 2), see figures.in_order_of_labels
    set_accuracy: float
    recon_mse: float


def shown_composites(data: Data) -> Batch:
    labels = data.test.labels[:N_TESTED]
    chosen = figures.varied(labels, np.arange(len(labels)), N_SHOWN)
    return Batch(*(array[chosen] for array in data.test))


class Recorder:
    """A callback that takes a snapshot before the training, every so many steps, and after the last."""

    def __init__(self, config: Config, data: Data, every: int, workers: Workers) -> None:
        self.config, self.every, self.workers = config, every, workers
        self.model = experiment.make_models(config)["capsnet"]
        self.shown = shown_composites(data)
        self.tested = data.test.part(0, N_TESTED)
        self.snapshots: list[Snapshot] = []

    def __call__(self, state: TrainState, epoch_ended: bool) -> None:
        if state.step % self.every and state.step != self.config.n_steps:
            return
        labels = self.shown.labels
        lengths, cache = experiment.capsnet_forward(state.params, self.shown.images, self.config)
        answers = figures.in_order_of_labels(labels, experiment.top_labels(lengths, 2))
        drawn = experiment.reconstruct(state.params, cache.v, labels)
        tested = experiment.evaluate(self.model, state.params, self.tested, self.workers)
        self.snapshots.append(Snapshot(state.step, drawn, answers, tested["set_accuracy"], tested["recon_mse"]))


def record(config: Config, data: Data, every: int, threads: int, quiet: bool) -> tuple[TrainState, list[Snapshot]]:
    """Train the capsule network and take the snapshots on the way."""
    with Workers(threads, config.dtype) as workers:
        recorder = Recorder(config, data, every, workers)
        options = RunOptions(threads=threads, quiet=quiet)
        states = experiment.train_all(config, data, options, names=("capsnet",), callback=recorder)
    return states["capsnet"], recorder.snapshots


# ----------------------------------------------------------------------------------------------------------------------
# Drawing
# ----------------------------------------------------------------------------------------------------------------------

GIF_WIDTH, GIF_HEIGHT = 8.8, 4.55  # inches
LEFT, TOP, CELL, PITCH = 1.26, 0.98, 0.72, 0.8  # two pixels of the screen for one of a picture
CURVE_LEFT, CURVE_WIDTH, CURVE_HEIGHT = 6.48, 2.02, 1.1


class Reconstructions(Scene):
    """Composites, what is drawn of them, answers and curves."""

    def __init__(self, config: Config, data: Data, shown: Batch, snapshots: list[Snapshot]) -> None:
        self.config, self.shown, self.snapshots = config, shown, snapshots
        super().__init__(new_figure(GIF_HEIGHT, "", figures.subtitle(config, data), width=GIF_WIDTH))
        rows = TOP + np.arange(5) * PITCH
        texts = (
            "the network\nsees",
            "first digit, from\nits capsule",
            "second digit,\nfrom its capsule",
            "both, laid over\neach other",
        )
        colours = (BLACK, *(darkened(colour) for colour in DIGIT_COLOURS), BLACK)
        for y, text, colour in zip(rows, texts, colours, strict=False):
            add_row_label(self.fig, LEFT - 0.08, y + CELL / 2, text, colour)
        add_text(self.fig, LEFT - 0.08, rows[4], "its answer", ha="right", fontsize=10.5)
        self.pictures: list[list[Any]] = []
        self.verdicts: list[Any] = []
        for m, labels in enumerate(shown.labels):
            x = LEFT + m * PITCH
            add_two_names(self.fig, x + CELL / 2, TOP - 0.24, config, labels)
            add_image(self.fig, x, rows[0], CELL, shown.images[m], interpolation="nearest")
            blank = np.zeros((*shown.images[m].shape, 3))
            self.pictures.append(
                [self.move(add_image(self.fig, x, y, CELL, blank, interpolation="nearest")) for y in rows[1:4]]
            )
            self.verdicts.append(
                self.move(add_text(self.fig, x + CELL / 2, rows[4], "", ha="center", fontsize=10.5, fontweight="bold"))
            )
        self.lines: list[Any] = []
        self.values: list[Any] = []
        self.add_curve(TOP, "both digits right")
        self.add_curve(rows[4] - 0.36 - CURVE_HEIGHT, "pixel error (MSE)")
        n_tested = min(N_TESTED, len(data.test.labels))
        text = f"step   (on {n_tested} {figures.tested(config.n_val)} composites)"
        add_text(self.fig, CURVE_LEFT + CURVE_WIDTH / 2, rows[4], text, ha="center", fontsize=9, color=GREY)
        self.finish_background()

    def add_curve(self, y: float, title: str) -> None:
        ax = add_axes(self.fig, CURVE_LEFT, y, CURVE_WIDTH, CURVE_HEIGHT)
        if self.lines:
            ax.set_ylim(0, MAX_MSE)
            ax.set_yticks([0, MAX_MSE / 2, MAX_MSE])
        else:
            accuracy_axis(ax, None, 1 / self.config.n_pairs, f"1/{self.config.n_pairs}")
            ax.set_yticks([0, 0.5, 1])
        step_axis(ax, self.config.n_steps)
        ax.set_title(title, loc="left")
        self.values.append(self.add_value_text(ax))
        self.lines.append(self.move(ax.plot([], [], color=BLUE, linewidth=2.2)[0]))

    def frame(self, k: int) -> Array:
        """RGB (H, W, 3) of snapshot k."""
        now = self.snapshots[k]
        self.title.set_text(f"A capsule network takes two digits apart: step {now.step:,} of {self.config.n_steps:,}")
        for m, (first, second, both) in enumerate(self.pictures):
            first.set_data(in_colour(now.drawn[m, 0], DIGIT_COLOURS[0]))
            second.set_data(in_colour(now.drawn[m, 1], DIGIT_COLOURS[1]))
            both.set_data(in_two_colours(now.drawn[m]))
            right = (now.answers[m] == self.shown.labels[m]).all()
            text, colour = marked_answer(bool(right), "{}+{}".format(*figures.two_names(self.config, now.answers[m])))
            self.verdicts[m].set(text=text, color=colour)
        past = self.snapshots[: k + 1]
        steps = [snapshot.step for snapshot in past]
        self.lines[0].set_data(steps, [snapshot.set_accuracy for snapshot in past])
        self.lines[1].set_data(steps, [snapshot.recon_mse for snapshot in past])
        self.values[0].set_text(f"{100 * now.set_accuracy:.0f} %")
        self.values[1].set_text(f"{now.recon_mse:.3f}")
        return self.draw()


# ----------------------------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Options(AnimationOptions):
    fps: float = redeclared(AnimationOptions, "fps", 10.0)
    out: Path = setting(Path(f"{experiment.EXPERIMENT}.gif"), output_path, "File of the animation.", usual=True)
    snapshot_every: int = setting(25, int_in(1, 10**9), "Take N steps from one frame to the next.", usual=True)
    threads: int = redeclared(experiment.DigitOptions, "threads", experiment.DigitOptions.threads)


def require_few_frames(config: Config, every: int) -> None:
    n_frames = 1 + math.ceil(config.n_steps / every)
    if n_frames > MAX_FRAMES:
        least = math.ceil(config.n_steps / (MAX_FRAMES - 1))
        message = f"{n_frames:,} frames are more than {MAX_FRAMES}; take {least} or more"
        raise SettingError("snapshot_every", message)


@script
def main(argv: Sequence[str] | None = None) -> None:
    asked, options, _ = parse(
        Config, Options, argv,
        "Train the capsule network of the MultiMNIST experiment and animate its reconstructions.",
        [
            ("", "A frame every 25 steps of eight epochs: about 3 minutes."),
            ("--n-epochs 1 --out draft.gif", "A draft of one epoch: about 30 seconds."),
            ("--n-epochs 20 --snapshot-every 150", "A longer training, and a frame every 150 steps: about 8 minutes."),
        ],
    )  # fmt: skip
    require_few_frames(asked, options.snapshot_every)
    require_writable(options.out)
    data = experiment.make_data(asked)
    config = experiment.resolve_auto(asked, data.name)
    require_test_images(len(data.test.labels), figures.MIN_TEST)
    state, snapshots = record(config, data, options.snapshot_every, options.threads, options.quiet)
    result = experiment.make_result(config, data, {"capsnet": state}, options.threads)
    print(f"{experiment.describe(result)}\n{experiment.format_table(result)}")
    shown = shown_composites(data)
    text_colours = [darkened(colour) for colour in (RIGHT, WRONG, BLUE)]
    write_gif(options, lambda: Reconstructions(config, data, shown, snapshots), [(k,) for k in range(len(snapshots))],
              N_GREYS, N_COLOURS, text_colours)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
