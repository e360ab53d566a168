#!/usr/bin/env python3
"""Animate the novel-viewpoint experiment: five objects rotate, and two networks classify them after some of the epochs.

    python make_smallnorb_novel_viewpoint_gif.py --seed 1

After each of ``--snapshots`` epochs the objects rotate once through the full circle (through all
elevations where elevation is held out). A frame shows the answers of the capsule network and of the CNN with as many
parameters, where the viewpoint lies, and the accuracy on held-out viewpoints up to then. The middle of the held-out
range stays longer.
"""

from __future__ import annotations

from support.figures import (
    BLACK, GREY, MAX_FRAMES, AnimationOptions, accuracy_axis, bare, darkened, epoch_axis, grey_levels, lightened,
    make_figure, marked_answer, model_line, name_line, write_animation,
)

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

import smallnorb_novel_viewpoint as smallnorb
import visualize_smallnorb_novel_viewpoint as figures
from multimnist_capsnet import softmax
from smallnorb_novel_viewpoint import (
    OUTPUT, Array, Config, Data, RunOptions, SettingError, Split, TrainState, blas_threads, int_in, parse, script,
    setting,
)
from support.experiment import require_writable
from visualize_smallnorb_novel_viewpoint import MODELS, RANGES

SHOWN = ("capsules", "cnn_matched")  # models whose answers are drawn


class Sweep(NamedTuple):
    """One rotation of the five objects: F viewpoints."""

    angles: Array  # (F,) azimuths, or elevations where those are held out, in degrees
    views: Split  # J * F views, those of class 0 first


def make_sweep(config: Config, data: Data, n_frames: int) -> Sweep:
    """From the start of the training range once round, at its middle elevation; or up through all elevations, at the
    middle azimuth of the training."""
    turns = config.held_out_angle == "azimuth"
    if turns:
        angles = config.train_azimuths[0] + 360 * np.arange(n_frames) / n_frames
    else:
        bounds = (*config.train_elevations, *config.test_elevations)
        angles = np.linspace(min(bounds), max(bounds), n_frames)
    other = np.full(n_frames, figures.middle(config, data, "elevation" if turns else "azimuth", "train"))
    views = figures.pick_views(config, data, *((angles, other) if turns else (other, angles)))
    angles = (views.azimuths if turns else views.elevations)[:n_frames]
    return Sweep(angles, views)


class Recorder:
    """A callback that keeps the bars of the sweep (J, F, J) after the given epochs, by model and epoch. A model with
    fewer epochs keeps those of its last one."""

    def __init__(self, config: Config, data: Data, sweep: Sweep, epochs: list[int]) -> None:
        self.config, self.sweep, self.epochs = config, sweep, epochs
        self.models = smallnorb.make_models(config)
        self.steps_per_epoch = smallnorb.steps_per_epoch(config, data)
        self.bars: dict[tuple[str, int], Array] = {}

    def __call__(self, state: TrainState, epoch_ended: bool) -> None:
        epoch, last = state.step // self.steps_per_epoch, smallnorb.of_model(state.name, self.config)[0]
        shown = [e for e in self.epochs if min(e, last) == epoch]
        if epoch_ended and state.name in SHOWN and shown:
            scores = smallnorb.predict_scores(self.models[state.name], state.params, self.sweep.views.images)
            activations = state.name == "capsules" and self.config.loss == "spread"  # lie between 0 and 1
            n = smallnorb.N_CLASSES
            bars = (scores if activations else softmax(scores)).reshape(n, -1, n)
            self.bars |= {(state.name, e): bars for e in shown}


def add_dial(ax: Any, config: Config) -> tuple[Any, Any]:
    """A compass of azimuths, or a quadrant of elevations, with the ranges shaded: its hand, and the text below it."""
    angle = config.held_out_angle
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
    ax.set_xlabel(" ")  # room for the text below
    for part, _, colour in RANGES:
        low, high = np.deg2rad(getattr(config, f"{part}_{angle}s"))
        ax.bar((low + high) / 2, 1, width=max(high - low, 0.02), color=lightened(colour, 0.45), linewidth=0, zorder=0)
    (hand,) = ax.plot([0, 0], [0, 0.95], color=BLACK, linewidth=2.6, solid_capstyle="round", animated=True)
    text = ax.text(0.5, -0.24, angle, transform=ax.transAxes, fontsize=10.5, ha="center", fontweight="bold",
                   animated=True)
    for x, align, (_, word, colour) in zip((-0.2, 1.2), ("left", "right"), RANGES, strict=True):
        ax.text(x, 1.22, word, transform=ax.transAxes, ha=align, color=darkened(colour), fontweight="bold")
    return hand, text


def where_is(config: Config, degrees: float) -> tuple[str, str]:
    """The name and the colour of the range in which an angle lies."""
    for part, word, colour in RANGES:
        if smallnorb.in_range(degrees, getattr(config, f"{part}_{config.held_out_angle}s")):
            return word, colour
    return "between", GREY


def longest(config: Config) -> int:
    """Epochs of the longest training that is shown."""
    return max(smallnorb.of_model(model, config)[0] for model in SHOWN)


def make_scene(recorder: Recorder, states: Mapping[str, TrainState]) -> tuple[Figure, Callable[[int, int], None]]:
    """Images, answers, viewpoint and accuracies; ``update(epoch, f)`` shows viewpoint ``f`` after ``epoch`` epochs."""
    config, sweep, n = recorder.config, recorder.sweep, smallnorb.N_CLASSES
    images = sweep.views.images.reshape(n, len(sweep.angles), *sweep.views.images.shape[1:])
    fig = make_figure(5.35, "", figures.subtitle(config), width=8.8)
    title = fig.texts[0]
    sides: Any = fig.subfigures(1, 2, width_ratios=(3.1, 1))
    left, right = sides
    grid = left.subplots(1 + len(SHOWN), n, height_ratios=(1.25, *(1 for _ in SHOWN)))
    dial, curve = right.add_subplot(2, 1, 1, projection="polar"), right.add_subplot(2, 1, 2)
    pictures, bars, verdicts = [], {}, {}
    for k, name in enumerate(config.classes):
        ax = grid[0, k]
        pictures.append(ax.imshow(grey_levels(images[k, 0]), vmin=0, vmax=1, animated=True))
        ax.set(xticks=[], yticks=[])
        ax.grid(False)
        ax.set_title(name, loc="center")
        for ax, model in zip(grid[1:, k], SHOWN, strict=True):
            style = MODELS[model]
            ax.set(xlim=(0, 1), ylim=(n - 0.5, -0.5), xticks=[])
            ax.set_yticks(range(n), config.classes if k == 0 else [""] * n)
            bare(ax)
            ax.spines.left.set_visible(True)
            ax.axhspan(k - 0.5, k + 0.5, color="#e8e8e8", linewidth=0, zorder=0)  # the true class
            bars[model, k] = ax.barh(range(n), np.zeros(n), height=0.62, color=style.colour, animated=True).patches
            verdicts[model, k] = ax.text(0, 1.03, "", transform=ax.transAxes, fontweight="bold", animated=True)
            ax.set_title("\n")
            if k == 0:
                ax.text(0, 1.2, f"{style.label}: answers", transform=ax.transAxes, color=darkened(style.colour),
                        fontweight="bold", fontsize=10.5, in_layout=False)
    left.supxlabel("bars: confidence in each class; grey: the true class", fontsize=9, color=GREY)
    hand, viewpoint = add_dial(dial, config)
    accuracy_axis(curve, None, figures.CHANCE)
    if figures.half_turn_line(curve, config):
        name_line(curve, "cross, T, frame alone", figures.HALF_TURN, side="right", below=True)
    curve.set_title("held-out accuracy")
    n_epochs = longest(config)
    epoch_axis(curve, n_epochs, max(0.4, 0.03 * n_epochs))
    lines = {model: curve.plot([], [], **model_line(MODELS[model], animated=True))[0] for model in SHOWN}

    def update(epoch: int, f: int) -> None:
        title.set_text(f"Answers after epoch {epoch} of {n_epochs}")
        for k, picture in enumerate(pictures):
            picture.set_data(grey_levels(images[k, f]))
        for (model, k), patches in bars.items():
            values = recorder.bars[model, epoch][k, f]
            answer = int(values.argmax())
            for j, (patch, value) in enumerate(zip(patches, values, strict=True)):
                patch.set(width=value, alpha=1 if j == answer else 0.45)
            text, colour = marked_answer(answer == k, config.classes[answer])
            verdicts[model, k].set(text=text, color=colour)
        degrees = sweep.angles[f]
        hand.set_xdata(np.deg2rad([degrees, degrees]))
        word, colour = where_is(config, degrees)
        shown = degrees % 360 if config.held_out_angle == "azimuth" else degrees
        viewpoint.set(text=f"{config.held_out_angle} {shown:.0f}°: {word}", color=darkened(colour))
        for model, line in lines.items():
            values = states[model].history["held_out_accuracy"][:epoch]
            line.set_data(np.arange(1, len(values) + 1), values)

    return fig, update


@dataclasses.dataclass(frozen=True)
class Options(AnimationOptions):
    out: Path = setting(Path(f"{smallnorb.EXPERIMENT}.gif"), OUTPUT, "File of the animation, a GIF.", usual=True)
    snapshots: int = setting(3, int_in(1, MAX_FRAMES), "Show a rotation after each of N epochs.")
    sweep_frames: int = setting(36, int_in(1, MAX_FRAMES), "Show N viewpoints in a rotation.", usual=True)


@script
def main(argv: Sequence[str]) -> None:
    config, options, _ = parse(
        Config, Options, argv,
        "Train the models of the novel-viewpoint experiment and animate their answers to rotating objects.",
        ("", "A rotation after each of three epochs of eighty, 10 degrees a frame: about 15 seconds."),
        ("--n-epochs 4 --sweep-frames 6 --out draft.gif", "Four epochs, six frames a rotation: about 3 seconds."),
        ("--snapshots 1 --sweep-frames 72", "The trained networks alone, 5 degrees a frame: about 15 seconds."),
    )
    require_writable(options.out)
    n_epochs = longest(config)
    snapshots = min(options.snapshots, n_epochs)
    if snapshots * options.sweep_frames > MAX_FRAMES:
        n_frames = f"{snapshots} times {options.sweep_frames} frames"
        raise SettingError("sweep_frames", f"{n_frames} are more than {MAX_FRAMES}")
    epochs = [round(n_epochs * (k + 1) / snapshots) for k in range(snapshots)]  # the last one among them
    with blas_threads(options.threads):
        data = smallnorb.make_data(config)
        recorder = Recorder(config, data, make_sweep(config, data, options.sweep_frames), epochs)
        run_options = RunOptions(quiet=options.quiet)
        states = smallnorb.train_all(config, data, run_options, names=SHOWN, callback=recorder)
    frames = [(epoch, f) for epoch in epochs for f in range(options.sweep_frames)]
    away = np.abs(recorder.sweep.angles - np.mean(getattr(config, f"test_{config.held_out_angle}s"))) % 360
    held = np.minimum(away, 360 - away).argmin()  # the viewpoint nearest to the middle of the held-out range
    holds = [k for k, (_, f) in enumerate(frames) if f == held]
    write_animation(options, lambda: make_scene(recorder, states), frames, holds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
