#!/usr/bin/env python3
"""Animate the novel-viewpoint experiment: five objects turn, and two networks name them after some of the epochs.

    python make_smallnorb_novel_viewpoint_gif.py --seed 1

Training is stopped ``--snapshots`` times. Each time the objects turn once through the full circle (through all
elevations where elevation is held out). A frame shows the answers of the capsule network and of the CNN with as many
parameters, where the viewpoint lies, and the accuracy on held-out viewpoints up to then. The middle of the held-out
range stays longer.
"""

from __future__ import annotations

import support.headless  # noqa: F401  before matplotlib

# isort: split

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.ticker import MaxNLocator

import smallnorb_novel_viewpoint as experiment
import visualize_smallnorb_novel_viewpoint as figures
from fast.workers import blas_threads
from smallnorb_novel_viewpoint import Array, Config, Data, Split
from support.figures import (
    BLACK,
    GREY,
    MAX_FRAMES,
    AnimationOptions,
    Scene,
    accuracy_axis,
    add_axes,
    add_text,
    add_view,
    darkened,
    grey_levels,
    lightened,
    marked_answer,
    model_line,
    new_figure,
    write_gif,
)
from support.files import require_writable
from support.optimizers import TrainState
from support.script import script
from support.settings import SettingError, int_in, output_path, parse, setting
from support.training import RunOptions
from visualize_smallnorb_novel_viewpoint import CHANCE, HELD_OUT, MODELS, TRAINED

SHOWN = ("capsules", "cnn_matched")  # models whose answers are drawn
N_GREYS, N_COLOURS = 48, 80  # of the palette


# ----------------------------------------------------------------------------------------------------------------------
# What the frames show
# ----------------------------------------------------------------------------------------------------------------------


class Sweep(NamedTuple):
    """One turn of the five objects: F viewpoints."""

    angles: Array  # (F,) azimuths, or elevations where those are held out, in degrees
    views: Split  # J * F views, those of class 0 first


def make_sweep(config: Config, data: Data, n_frames: int) -> Sweep:
    """From the start of the training range once round, at its middle elevation; or up through all elevations, at the
    middle azimuth of the training."""
    if config.held_out == "azimuth":
        angles = config.train_azimuths[0] + 360 * np.arange(n_frames) / n_frames
        other = np.full(n_frames, figures.middle(config, data, "elevation", "train"))
        views = figures.pick_views(config, data, angles, other)
        angles = views.azimuths[:n_frames]
    else:
        bounds = (*config.train_elevations, *config.test_elevations)
        angles = np.linspace(min(bounds), max(bounds), n_frames)
        other = np.full(n_frames, figures.middle(config, data, "azimuth", "train"))
        views = figures.pick_views(config, data, other, angles)
        angles = views.elevations[:n_frames]
    return Sweep(angles, views)


def held_frame(config: Config, sweep: Sweep) -> int:
    """The viewpoint that is nearest to the middle of the held-out range."""
    away = np.abs(sweep.angles - np.mean(getattr(config, f"test_{config.held_out}s"))) % 360
    return int(np.minimum(away, 360 - away).argmin())


def snapshot_epochs(n_epochs: int, snapshots: int) -> list[int]:
    """Evenly spread epochs, the last one among them."""
    return [round(n_epochs * (k + 1) / snapshots) for k in range(snapshots)]


def confidence(config: Config, name: str, scores: Array) -> Array:
    """Bars between 0 and 1 for scores (N, J): their softmax; the activations themselves under spread loss."""
    if name == "capsules" and config.loss == "spread":
        return scores
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


class Recorder:
    """A callback that keeps the bars of the sweep (J, F, J) after the given epochs, by model and epoch."""

    def __init__(self, config: Config, data: Data, sweep: Sweep, epochs: list[int]) -> None:
        self.config, self.sweep, self.epochs = config, sweep, epochs
        self.models = experiment.make_models(config)
        self.steps_per_epoch = experiment.steps_per_epoch(config, data)
        self.bars: dict[tuple[str, int], Array] = {}

    def __call__(self, state: TrainState, epoch_ended: bool) -> None:
        epoch = state.step // self.steps_per_epoch
        if epoch_ended and state.name in SHOWN and epoch in self.epochs:
            scores = experiment.predict_scores(self.models[state.name], state.params, self.sweep.views.images)
            n = experiment.N_CLASSES
            self.bars[state.name, epoch] = confidence(self.config, state.name, scores).reshape(n, -1, n)


# ----------------------------------------------------------------------------------------------------------------------
# Drawing
# ----------------------------------------------------------------------------------------------------------------------

GIF_WIDTH, GIF_HEIGHT = 8.8, 5.35  # inches
LEFT, PITCH, CELL = 0.86, 1.07, 1.0  # of the five columns
PICTURE_TOP = 0.86
BARS_TOP, BARS_HEIGHT = {"capsules": 2.42, "cnn_matched": 3.98}, 1.0
DIAL_LEFT, DIAL_TOP, DIAL_SIZE = 6.94, 1.14, 1.46
CURVE = (6.75, 3.5, 1.85, 1.35)


class TurningObjects(Scene):
    """Images, answers, viewpoint and accuracies."""

    def __init__(self, recorder: Recorder, states: dict[str, TrainState]) -> None:
        config, sweep, self.bars, self.states = recorder.config, recorder.sweep, recorder.bars, states
        self.config, self.sweep = config, sweep
        n, n_frames = experiment.N_CLASSES, len(sweep.angles)
        self.images = sweep.views.images.reshape(n, n_frames, *sweep.views.images.shape[1:])
        super().__init__(new_figure(GIF_HEIGHT, "", figures.subtitle(config), width=GIF_WIDTH))
        self.pictures: list[Any] = []
        self.rectangles: dict[tuple[str, int], list[Any]] = {}
        self.verdicts: dict[tuple[str, int], Any] = {}
        for k, name in enumerate(config.classes):
            x = LEFT + k * PITCH
            add_text(self.fig, x + CELL / 2, PICTURE_TOP - 0.2, name, ha="center", fontsize=10)
            self.pictures.append(self.move(add_view(self.fig, x, PICTURE_TOP, CELL, self.images[k, 0], width=1)))
        add_text(self.fig, 0.12, PICTURE_TOP + CELL / 2 - 0.07, "object", fontweight="bold")
        for model in SHOWN:
            self.add_answers(model)
        key = "bars: a model's confidence in each class · grey band: the true class"
        add_text(self.fig, LEFT, GIF_HEIGHT - 0.24, key, fontsize=9, color=GREY)
        self.add_dial()
        self.add_curve()
        self.finish_background()

    def add_answers(self, model: str) -> None:
        """Five bar charts: the scores that a model gives each object."""
        config, style, top = self.config, MODELS[model], BARS_TOP[model]
        n = experiment.N_CLASSES
        add_text(self.fig, 0.12, top - 0.42, f"{style.label}: answers", color=darkened(style.colour),
                 fontweight="bold", fontsize=10.5)  # fmt: skip
        for k in range(n):
            ax = add_axes(self.fig, LEFT + k * PITCH, top, CELL, BARS_HEIGHT)
            ax.set(xlim=(0, 1), ylim=(n - 0.5, -0.5), xticks=[])
            ax.set_yticks(range(n), config.classes if k == 0 else [""] * n)
            ax.tick_params(length=0)
            ax.grid(False)
            ax.spines.bottom.set_visible(False)
            ax.axhspan(k - 0.5, k + 0.5, color="#e8e8e8", linewidth=0, zorder=0)  # the true class
            bars = ax.barh(range(n), np.zeros(n), height=0.62, color=style.colour)
            self.rectangles[model, k] = [self.move(bar) for bar in bars]
            self.verdicts[model, k] = self.move(
                add_text(self.fig, LEFT + k * PITCH + 0.02, top - 0.2, "", fontweight="bold", fontsize=9.5)
            )

    def add_dial(self) -> None:
        """A compass of azimuths, or a quadrant of elevations, with the ranges shaded and a hand."""
        config, angle = self.config, self.config.held_out
        ax: Any = add_axes(self.fig, DIAL_LEFT, DIAL_TOP, DIAL_SIZE, DIAL_SIZE, projection="polar")
        ax.grid(False)
        ax.set(ylim=(0, 1), yticks=[])
        ax.spines["polar"].set(color=GREY, linewidth=0.8)
        if angle == "azimuth":
            ax.set_theta_zero_location("N")
            ax.set_theta_direction(-1)
            ax.set_thetagrids(range(0, 360, 90))
        else:
            low = 0 if min(config.train_elevations + config.test_elevations) >= 0 else -90
            ax.set_thetagrids(range(low, 91, 30))
            ax.set_thetalim(np.deg2rad(low), np.pi / 2)
        ax.tick_params(pad=0)
        for part, colour in (("train", TRAINED), ("test", HELD_OUT)):
            low, high = np.deg2rad(getattr(config, f"{part}_{angle}s"))
            ax.bar(
                (low + high) / 2, 1, width=max(high - low, 0.02), color=lightened(colour, 0.45), linewidth=0, zorder=0
            )
        (self.hand,) = ax.plot([0, 0], [0, 0.95], color=BLACK, linewidth=2.6, solid_capstyle="round")
        self.move(self.hand)
        middle = DIAL_LEFT + DIAL_SIZE / 2
        for x, align, word, colour in (
            (middle - 1.25, "left", "trained on", TRAINED),
            (middle + 1.05, "right", "held out", HELD_OUT),
        ):
            add_text(self.fig, x, PICTURE_TOP - 0.2, word, color=darkened(colour), fontweight="bold", ha=align)
        y = DIAL_TOP + DIAL_SIZE + 0.25
        self.angle_text = self.move(add_text(self.fig, middle, y, "", fontsize=10.5, ha="center", fontweight="bold"))

    def add_curve(self) -> None:
        """Held-out accuracy, epoch by epoch."""
        ax = add_axes(self.fig, *CURVE)
        accuracy_axis(ax, None, CHANCE)
        if figures.add_half_turn_line(ax, self.config):
            ax.text(0.98, figures.HALF_TURN - 0.02, "cross, T, frame alone", transform=ax.get_yaxis_transform(),
                    fontsize=8, color=GREY, ha="right", va="top")  # fmt: skip
        ax.set_title("accuracy on held-out views", loc="left", x=-0.16)
        ax.set_xlabel("epoch", labelpad=1)
        n = self.config.n_epochs
        ax.set_xlim(0.5, n + 0.5)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
        self.lines = {}
        for model in SHOWN:
            (line,) = ax.plot([], [], **model_line(MODELS[model], clip_on=False, markevery=max(1, n // 10)))
            self.lines[model] = self.move(line)

    def frame(self, epoch: int, f: int) -> Array:
        """RGB (H, W, 3) of viewpoint ``f`` after ``epoch`` epochs."""
        config, angle = self.config, self.config.held_out
        self.title.set_text(f"Answers after epoch {epoch} of {config.n_epochs}")
        for k, picture in enumerate(self.pictures):
            picture.set_data(grey_levels(self.images[k, f]))
        for (model, k), rectangles in self.rectangles.items():
            values = self.bars[model, epoch][k, f]
            answer = int(values.argmax())
            for j, (rectangle, value) in enumerate(zip(rectangles, values, strict=True)):
                rectangle.set_width(value)
                rectangle.set_alpha(1 if j == answer else 0.45)
            text, colour = marked_answer(answer == k, config.classes[answer])
            self.verdicts[model, k].set(text=text, color=colour)
        degrees = self.sweep.angles[f]
        self.hand.set_xdata(np.deg2rad([degrees, degrees]))
        circular = angle == "azimuth"
        where, colour = "between", GREY
        for part, word, range_colour in (("train", "trained on", TRAINED), ("test", "held out", HELD_OUT)):
            if experiment.in_range(np.array(degrees), getattr(config, f"{part}_{angle}s"), circular=circular):
                where, colour = word, range_colour
        self.angle_text.set_text(f"{angle} {degrees % 360 if circular else degrees:.0f}°: {where}")
        self.angle_text.set_color(darkened(colour))
        for model, line in self.lines.items():
            values = self.states[model].history["held_out_accuracy"][:epoch]
            line.set_data(np.arange(1, len(values) + 1), values)
        return self.draw()


# ----------------------------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Options(AnimationOptions):
    out: Path = setting(Path(f"{experiment.EXPERIMENT}.gif"), output_path, "File of the animation.", usual=True)
    snapshots: int = setting(3, int_in(1, MAX_FRAMES), "Show a turn after each of N epochs, at most --n-epochs.")
    sweep_frames: int = setting(36, int_in(1, MAX_FRAMES), "Show N viewpoints in a turn.", usual=True)

    def check(self, given: Mapping[str, Any]) -> None:
        if self.snapshots * self.sweep_frames > MAX_FRAMES:
            raise SettingError("sweep_frames", f"{self.snapshots} turns of them are more than {MAX_FRAMES} frames")


@script
def main(argv: Sequence[str] | None = None) -> None:
    config, options, _ = parse(
        Config, Options, argv,
        "Train the models of the novel-viewpoint experiment and animate their answers to turning objects.",
        [
            ("", "A turn after each of three epochs of ten, 10 degrees a frame: about 20 seconds."),
            ("--n-epochs 4 --sweep-frames 6 --out draft.gif", "Four epochs, six frames a turn: about 6 seconds."),
            ("--snapshots 1 --sweep-frames 72", "The trained networks alone, 5 degrees a frame: about 15 seconds."),
        ],
    )  # fmt: skip
    require_writable(options.out)
    epochs = snapshot_epochs(config.n_epochs, min(options.snapshots, config.n_epochs))
    with blas_threads(options.threads):
        data = experiment.make_data(config)
        figures.require_every_class(config, data)
        recorder = Recorder(config, data, make_sweep(config, data, options.sweep_frames), epochs)
        states = experiment.train_all(config, data, RunOptions(quiet=options.quiet), callback=recorder)
        result = experiment.make_result(config, states, data)
    print(f"{experiment.describe(config)}; seed {config.seed}, {config.n_epochs} epochs")
    print(experiment.format_table(result))
    frames = [(epoch, f) for epoch in epochs for f in range(options.sweep_frames)]
    held = held_frame(config, recorder.sweep)
    holds = [k for k, (_, f) in enumerate(frames) if f == held]
    write_gif(options, lambda: TurningObjects(recorder, states), frames, N_GREYS, N_COLOURS, holds=holds)


if __name__ == "__main__":
    sys.exit(main())
