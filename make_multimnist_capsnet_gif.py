#!/usr/bin/env python3
"""Animate the MultiMNIST experiment: a capsule network learns to take two overlapping digits apart.

    python make_multimnist_capsnet_gif.py --n-epochs 8 --n-train 6000 --snapshot-every 75 --fps 6

Every ``--snapshot-every`` steps a frame shows the same six test composites, what the decoder draws from the capsule of
each of their two digits, what the network takes them for, and the accuracy and reconstruction error up to then.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from tqdm import tqdm

import make_smallnorb_novel_viewpoint_gif as gif
import multimnist_capsnet as experiment
import visualize_multimnist_capsnet as figures
import visualize_smallnorb_novel_viewpoint as house
from multimnist_capsnet import Array, Batch, Config, Data, Params, TrainState
from visualize_multimnist_capsnet import DIGIT_COLOURS, in_colour, in_two_colours, ink, place, row_label, show, write

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
    """Takes a snapshot before the training, every so many steps, and after the last."""

    def __init__(self, config: Config, data: Data, every: int, threads: int) -> None:
        self.config, self.every = config, every
        self.model = experiment.make_models(config)["capsnet"]
        self.shown = shown_composites(data)
        self.tested = data.test.part(0, N_TESTED)
        self.crew = experiment.Crew(threads)  # with workspaces of its own, of the test's sizes
        self.snapshots: list[Snapshot] = []

    def take(self, step: int, params: Params) -> None:
        ws = experiment.Workspace(self.config.dtype)
        lengths, cache = experiment.capsnet_forward(params, self.shown.images, self.config, ws)
        labels = self.shown.labels
        answers = figures.in_order_of_labels(labels, experiment.top_labels(lengths.T, 2))
        drawn = experiment.reconstruct(params, cache.v, labels, ws).copy()
        tested = experiment.evaluate(self.model, params, self.tested, self.crew)
        self.snapshots.append(Snapshot(step, drawn, answers, tested["set_accuracy"], tested["recon_mse"]))

    def after_step(self, state: TrainState, _: bool) -> None:
        if state.step % self.every == 0 or state.step == self.config.n_steps:
            self.take(state.step, state.params)


def record(config: Config, data: Data, every: int, threads: int, quiet: bool) -> tuple[TrainState, list[Snapshot]]:
    """Train the capsule network and look at it on the way."""
    recorder = Recorder(config, data, every, threads)
    state = experiment.init_state(recorder.model, config)
    crew = experiment.Crew(threads)
    silent = quiet or not sys.stderr.isatty()
    with (
        experiment.single_blas(),
        contextlib.closing(crew),
        contextlib.closing(recorder.crew),
        tqdm(total=config.n_steps, desc="capsnet", unit="step", leave=False, disable=silent) as bar,
    ):

        def after_step(state: TrainState, epoch_ends: bool) -> None:
            bar.update()
            recorder.after_step(state, epoch_ends)

        recorder.crew.prepare(state)
        recorder.take(0, state.params)
        experiment.train(recorder.model, config, data, state, after_step=after_step, crew=crew)
    return state, recorder.snapshots


# ----------------------------------------------------------------------------------------------------------------------
# Drawing: the parts that stay are drawn once, the others over a copy of them
# ----------------------------------------------------------------------------------------------------------------------

GIF_WIDTH, GIF_HEIGHT = 8.8, 4.55  # inches
LEFT, TOP, CELL, PITCH = 1.26, 0.98, 0.72, 0.8  # two pixels of the screen for one of a picture
CURVE_LEFT, CURVE_WIDTH, CURVE_HEIGHT = 6.48, 2.02, 1.1


class Scene:
    """The canvas with its moving parts."""

    def __init__(self, config: Config, data: Data, shown: Batch, snapshots: list[Snapshot]) -> None:
        self.config, self.shown, self.snapshots = config, shown, snapshots
        self.fig = house.new_figure(GIF_HEIGHT, "", figures.subtitle(config, data), width=GIF_WIDTH)
        self.canvas = self.fig.canvas
        assert isinstance(self.canvas, FigureCanvasAgg)
        self.moving: list[Any] = []
        self.title = self.move(write(self.fig, 0.12, 0.12, "", fontsize=12.5, fontweight="bold"))

        rows = TOP + np.arange(5) * PITCH
        texts = (
            "the network\nsees",
            "first digit, from\nits capsule",
            "second digit,\nfrom its capsule",
            "both, laid over\neach other",
        )
        colours = (house.BLACK, *(ink(colour) for colour in DIGIT_COLOURS), house.BLACK)
        for y, text, colour in zip(rows, texts, colours, strict=False):
            row_label(self.fig, LEFT - 0.08, y + CELL / 2, text, colour)
        write(self.fig, LEFT - 0.08, rows[4], "its answer", ha="right", fontsize=10.5)
        self.pictures: list[list[Any]] = []
        self.verdicts: list[Any] = []
        for m, labels in enumerate(shown.labels):
            x = LEFT + m * PITCH
            figures.two_names(self.fig, x + CELL / 2, TOP - 0.24, labels, fontsize=10.5, fontweight="bold")
            show(self.fig, x, rows[0], CELL, shown.images[m], "nearest")
            blank = np.zeros((*shown.images[m].shape, 3))
            self.pictures.append([self.move(show(self.fig, x, y, CELL, blank, "nearest")[1]) for y in rows[1:4]])
            self.verdicts.append(
                self.move(write(self.fig, x + CELL / 2, rows[4], "", ha="center", fontsize=10.5, fontweight="bold"))
            )
        self.lines: list[Any] = []
        self.titles: list[Any] = []
        self.add_curve(TOP, "both digits right")
        self.add_curve(rows[4] - 0.36 - CURVE_HEIGHT, "pixel error (MSE)")
        tested = min(N_TESTED, len(data.test.labels))
        text = f"step   (on {tested} test composites)"
        write(self.fig, CURVE_LEFT + CURVE_WIDTH / 2, rows[4], text, ha="center", fontsize=9, color=house.GREY)
        self.canvas.draw()
        self.background = self.canvas.copy_from_bbox(self.fig.bbox)

    def move(self, artist: Any) -> Any:
        """Keep an artist out of the background and redraw it in every frame."""
        artist.set_animated(True)
        self.moving.append(artist)
        return artist

    def add_curve(self, y: float, title: str) -> None:
        ax = place(self.fig, CURVE_LEFT, y, CURVE_WIDTH, CURVE_HEIGHT)
        if self.lines:
            ax.set_ylim(0, MAX_MSE)
            ax.set_yticks([0, MAX_MSE / 2, MAX_MSE])
        else:
            house.accuracy_axis(ax, None, 1 / figures.N_PAIRS, f"1/{figures.N_PAIRS}")
            ax.set_yticks([0, 0.5, 1])
        ax.set_xlim(0, self.config.n_steps)
        ax.locator_params(axis="x", nbins=4, integer=True)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        ax.set_title(title, loc="left")
        self.titles.append(self.move(ax.text(1, 1.06, "", transform=ax.transAxes, ha="right", fontweight="bold",
                                             fontsize=10.5, color=ink(house.BLUE))))  # fmt: skip
        self.lines.append(self.move(ax.plot([], [], color=house.BLUE, linewidth=2.2)[0]))

    def frame(self, k: int) -> Array:
        """RGB (H, W, 3) of snapshot k."""
        now = self.snapshots[k]
        self.title.set_text(f"A capsule network takes two digits apart: step {now.step:,} of {self.config.n_steps:,}")
        for m, (first, second, both) in enumerate(self.pictures):
            first.set_data(in_colour(now.drawn[m, 0], DIGIT_COLOURS[0]))
            second.set_data(in_colour(now.drawn[m, 1], DIGIT_COLOURS[1]))
            both.set_data(in_two_colours(now.drawn[m]))
            right = (now.answers[m] == self.shown.labels[m]).all()
            self.verdicts[m].set_text(("✓ " if right else "✗ ") + "{}+{}".format(*now.answers[m]))
            self.verdicts[m].set_color(ink(house.RIGHT if right else house.WRONG))
        past = self.snapshots[: k + 1]
        steps = [snapshot.step for snapshot in past]
        self.lines[0].set_data(steps, [snapshot.set_accuracy for snapshot in past])
        self.lines[1].set_data(steps, [snapshot.recon_mse for snapshot in past])
        self.titles[0].set_text(f"{100 * now.set_accuracy:.0f} %")
        self.titles[1].set_text(f"{now.recon_mse:.3f}")
        canvas: Any = self.canvas
        canvas.restore_region(self.background)
        for artist in self.moving:
            (artist.axes or self.fig).draw_artist(artist)
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def draw_frames(config: Config, data: Data, shown: Batch, snapshots: list[Snapshot]) -> Iterator[Array]:
    with house.house_style():
        scene = Scene(config, data, shown, snapshots)
        for k in range(len(snapshots)):
            yield scene.frame(k)


# ----------------------------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = experiment.Parser(
        description="Train the capsule network of the MultiMNIST experiment and animate what it draws on the way."
    )
    experiment.add_experiment_arguments(parser)
    animation = parser.add_argument_group("animation")
    animation.add_argument(
        "--snapshot-every", type=experiment.whole_number(1, 10**9), metavar="N", default=75,
        help="steps from one frame to the next; default: %(default)s",
    )  # fmt: skip
    animation.add_argument(
        "--fps", type=gif.frame_rate, metavar="X", default=6.0, help="frames a second, 0.1 to 50; default: %(default)s"
    )
    animation.add_argument(
        "--out", type=Path, metavar="FILE", default=Path(f"{experiment.EXPERIMENT}.gif"), help="default: %(default)s"
    )
    animation.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    config = experiment.config_from_args(args)
    n_frames = 1 + math.ceil(config.n_steps / args.snapshot_every)
    if n_frames > gif.MAX_FRAMES:
        least = math.ceil(config.n_steps / (gif.MAX_FRAMES - 1))
        parser.error(
            f"argument --snapshot-every: {n_frames:,} frames are more than {gif.MAX_FRAMES}; take {least} or more"
        )
    if args.out.suffix.lower() != ".gif":
        parser.error(f"argument --out: {args.out} does not end in .gif")

    def body() -> None:
        experiment.require_writable(args.out)
        data = experiment.make_data(config)
        figures.require_enough(data)
        state, snapshots = record(config, data, args.snapshot_every, args.threads, args.quiet)
        result = experiment.make_result(config, data.name, {"capsnet": state}, args.threads)
        print(f"{experiment.describe(result)}\n{experiment.format_table(result)}")
        silent = args.quiet or not sys.stderr.isatty()
        drawn = draw_frames(config, data, shown_composites(data), snapshots)
        frames = list(tqdm(drawn, total=len(snapshots), desc="frames", unit="frame", leave=False, disable=silent))
        texts = [ink(colour) for colour in (house.RIGHT, house.WRONG, house.BLUE)]
        content = gif.encode_gif(frames, args.fps, N_GREYS, N_COLOURS, texts)
        print(house.write_if_changed(args.out, content, experiment.atomic_write))

    return experiment.exit_status(body)


if __name__ == "__main__":
    sys.exit(main())
