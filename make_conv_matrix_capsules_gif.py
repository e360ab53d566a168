#!/usr/bin/env python3
"""Animate the convolutional matrix capsules: votes gather round the class capsules during routing and training.

    python make_conv_matrix_capsules_gif.py --n-epochs 1 --n-train 20000

Training is stopped ``--snapshots`` times, more often at first, the last time at the end. Each time one test image, the
first of the set, is routed. A frame shows the votes for all class capsules in the last EM iteration: every vote in the
colour of the capsule that it is for, as large as the mass that it was given, and each capsule's mean as its class. The
last frames show every iteration of the trained network.
"""

from __future__ import annotations

import support.startup  # noqa: F401  before the others, for Ctrl-C

# isort: split

import argparse
import math
import sys
from typing import Any, NamedTuple

import numpy as np
from matplotlib.patches import Ellipse

import conv_matrix_capsules as experiment
import visualize_conv_matrix_capsules as figures
from conv_matrix_capsules import Array, ClassRouting, Config, Data, viewpoint
from fast.workers import Workers
from support.console import exit_status, print_result
from support.figures import (
    BLACK,
    BLUE,
    DATASET_NAMES,
    GREEN,
    GREY,
    MAX_FRAMES,
    ORANGE,
    PURPLE,
    RIGHT,
    SKY,
    VERMILLION,
    WRONG,
    Scene,
    accuracy_axis,
    add_animation_arguments,
    add_axes,
    add_frame,
    add_text,
    add_view,
    darkened,
    lightened,
    require_test_images,
    step_axis,
    weighted_quantiles,
    write_gif,
)
from support.files import require_writable
from support.flags import Parser, flag_of, whole_number
from support.optimizers import TrainState
from support.run import Files

N_TESTED = 500  # test images of the accuracy curve, spread over the set
N_GREYS, N_COLOURS = 32, 160  # of the palette
TRUE_COLOUR = VERMILLION
OTHER_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, "#8C6D31", "#7F7F7F", "#6A51A3", "#A6B800")  # of the other classes


# ----------------------------------------------------------------------------------------------------------------------
# What the frames show
# ----------------------------------------------------------------------------------------------------------------------


class Snapshot(NamedTuple):
    step: int
    routing: ClassRouting  # of the image that is shown
    accuracy: float


def snapshot_steps(n_steps: int, snapshots: int) -> list[int]:
    """From 0 to the last step, at distances that grow; fewer where there are not so many steps."""
    return sorted({round(n_steps * (k / max(1, snapshots - 1)) ** 2) for k in range(snapshots)} | {n_steps})


class Recorder:
    """A callback that takes the snapshots."""

    def __init__(self, config: Config, data: Data, steps: list[int], workers: Workers) -> None:
        self.config, self.steps, self.workers = config, steps, workers
        self.model = experiment.make_models(config)["capsules"]
        self.image, self.label = data.test.images[:1], int(data.test.labels[0])
        self.tested = experiment.subset(data.test, N_TESTED)
        self.snapshots: list[Snapshot] = []

    def __call__(self, state: TrainState, epoch_ended: bool) -> None:
        if state.step in self.steps:
            routing = experiment.class_routing(state.params, self.image, self.config)
            accuracy = experiment.accuracy(self.model, state.params, self.tested, self.config, self.workers)
            self.snapshots.append(Snapshot(state.step, routing, accuracy))


def record(config: Config, data: Data, snapshots: int, threads: int, quiet: bool) -> tuple[TrainState, Recorder]:
    """Train the capsule network and take the snapshots on the way."""
    steps = snapshot_steps(experiment.steps_per_epoch(config, data) * config.n_epochs, snapshots)
    with Workers(threads, config.dtype) as workers:
        recorder = Recorder(config, data, steps, workers)
        states = experiment.train_all(
            config, data, names=("capsules",), threads=threads, files=Files(quiet=quiet), callback=recorder
        )
    return states["capsules"], recorder


def principal_axes(routing: ClassRouting) -> Array:
    """Directions (D, 2) in which the votes, weighted by their mass in the last iteration, are spread most."""
    votes, mass = routing.votes[0].reshape(-1, routing.votes.shape[-1]), routing.weights[-1, 0].reshape(-1)
    mean = mass @ votes / mass.sum()
    covariance = (mass[:, None] * (votes - mean)).T @ (votes - mean)
    axes = np.linalg.eigh(covariance)[1][:, :-3:-1]  # (D, 2)
    return axes * np.sign(axes[np.abs(axes).argmax(axis=0), [0, 1]])  # the sign of an axis is arbitrary


def bulk(routing: ClassRouting, axes: Array, outside: float = 0.015) -> tuple[Array, Array]:
    """Corners (2,), (2,) on the plane of ``axes``: the fraction ``outside`` of all mass is beyond each side."""
    points = (routing.votes[0] @ axes).reshape(-1, 2)
    mass = routing.weights[:, 0].sum(axis=0).reshape(-1)
    corners = []
    for column in points.T:
        corners.append(weighted_quantiles(column, mass, [outside, 1 - outside]))
    low, high = np.transpose(corners)
    return low, np.maximum(high, low + 1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Drawing
# ----------------------------------------------------------------------------------------------------------------------

GIF_WIDTH, GIF_HEIGHT = 8.8, 5.2  # inches
PLANE = (0.2, 0.98, 5.2, 4.0)
RIGHT_COLUMN = 6.05
MASS_AREA = 260.0  # square points of a vote that has the mass of one child


class GatheringVotes(Scene):
    """Votes on a plane, the capsules' answer and the accuracy."""

    def __init__(self, config: Config, data: Data, recorder: Recorder) -> None:
        self.config, self.recorder, self.label = config, recorder, recorder.label
        snapshots = recorder.snapshots
        self.axes_of_plane = principal_axes(snapshots[-1].routing)
        self.n_steps = snapshots[-1].step
        super().__init__(figures.run_figure(figures.Run(config, data, {}), GIF_HEIGHT, "", width=GIF_WIDTH))
        self.dataset = DATASET_NAMES[data.name]
        self.colours = [OTHER_COLOURS[k % len(OTHER_COLOURS)] for k in range(config.n_classes - 1)]
        self.colours.insert(self.label, TRUE_COLOUR)
        self.add_plane(snapshots)
        self.add_answer(recorder.image[0])
        self.add_curve()
        self.finish_background()

    def add_plane(self, snapshots: list[Snapshot]) -> None:
        """Votes and means on the plane of the last snapshot's two principal axes, all snapshots at one scale."""
        x, y, width, height = PLANE
        add_text(self.fig, x, y - 0.25, "votes for the class capsules, and the capsules' means", fontweight="bold")
        ax = add_axes(self.fig, x, y, width, height)
        add_frame(ax, "#bbbbbb", 0.8)
        ax.set_autoscale_on(False)
        ax.set(xlim=(-1, 1), ylim=(-height / width, height / width))
        lows, highs = zip(*(bulk(snapshot.routing, self.axes_of_plane) for snapshot in snapshots), strict=True)
        low, high = np.min(lows, axis=0), np.max(highs, axis=0)
        self.centre, self.scale = (low + high) / 2, 0.58 * float(((high - low) / [1, height / width]).max())
        # the true class is drawn last, over the others
        n_children, n = snapshots[0].routing.votes.shape[1:3]
        self.order = np.array([*(e for e in range(n) if e != self.label), self.label])
        faces = [
            lightened(self.colours[e], 0.85 if e == self.label else 0.6) for e in self.order for _ in range(n_children)
        ]
        dots = ax.scatter(np.zeros(len(faces)), np.zeros(len(faces)), s=1, c=faces, linewidths=0.3, edgecolors="white")
        self.dots = self.move(dots)
        self.ring = self.move(ax.add_patch(Ellipse((0, 0), 1, 1, fill=False, linewidth=2, color=BLACK)))
        self.means = []
        for e in range(n):
            name = self.config.classes[e]
            box = {"boxstyle": "circle,pad=0.22" if len(name) == 1 else "round,pad=0.2", "linewidth": 1.6}
            box |= {"facecolor": "white", "edgecolor": self.colours[e]}
            self.means.append(ax.text(0, 0, name, ha="center", va="center", fontweight="bold", fontsize=10, bbox=box,
                                      color=darkened(self.colours[e]), clip_on=True))  # fmt: skip
        for e in self.order:
            self.move(self.means[e])
        key = "area of a dot: mass of a vote · ring: two standard deviations of the true class's votes"
        add_text(self.fig, x, y + height + 0.05, key, fontsize=9, color=GREY)

    def add_answer(self, image: Array) -> None:
        """The image, and how active each class capsule is."""
        config, x, y = self.config, RIGHT_COLUMN, PLANE[1]
        add_view(self.fig, x - 0.35, y, 1.05, experiment.prepared(image[None], config)[0])
        name = figures.with_article(config.classes[self.label])
        add_text(self.fig, x - 0.35, y - 0.25, name, fontweight="bold", color=darkened(self.colours[self.label]))
        self.verdict = self.move(add_text(self.fig, x + 0.85, y + 0.12, "", fontsize=14, fontweight="bold"))
        self.iteration = self.move(add_text(self.fig, x + 0.85, y + 0.5, "", fontsize=10.5))
        self.distance = self.move(
            add_text(
                self.fig, x + 0.85, y + 0.7, "", color=darkened(self.colours[self.label]), va="top", linespacing=1.3
            )
        )
        n = config.n_classes
        ax = add_axes(self.fig, x - 0.02, y + 1.5, GIF_WIDTH - x - 0.2, 0.8)
        ax.set(xlim=(-0.6, n - 0.4), ylim=(0, 1), yticks=[0, 0.5, 1])
        width = (GIF_WIDTH - x - 0.2) / n
        own: dict[str, Any] = {"fontsize": figures.name_size(config, width)} if config.has_own_images else {}
        ax.set_xticks(range(n), config.classes, **own)
        ax.get_xticklabels()[self.label].set(fontweight="bold", color=darkened(self.colours[self.label]))
        ax.tick_params(axis="x", length=0)
        ax.grid(False, axis="x")
        ax.set_title("activation of each class capsule", loc="left")
        self.bars = [self.move(bar) for bar in ax.bar(range(n), np.zeros(n), color=self.colours, width=0.68)]

    def add_curve(self) -> None:
        ax = add_axes(self.fig, RIGHT_COLUMN - 0.02, PLANE[1] + 2.86, GIF_WIDTH - RIGHT_COLUMN - 0.2, 0.85)
        accuracy_axis(ax, None, 1 / self.config.n_classes)
        ax.set_yticks([0, 0.5, 1])
        step_axis(ax, max(1, self.n_steps))
        tested = figures.tested(self.config)
        ax.set_title(f"{tested} accuracy", loc="left")
        ax.set_xlabel(f"step   (on {len(self.recorder.tested.labels)} {tested} images)", fontsize=9, labelpad=1)
        self.percent = self.add_value_text(ax)
        (line,) = ax.plot([], [], color=BLUE, linewidth=2.2, marker="o", markersize=4, clip_on=False)
        self.line = self.move(line)

    def frame(self, k: int, t: int) -> Array:
        """RGB (H, W, 3) of snapshot k, EM iteration t."""
        now = self.recorder.snapshots[k]
        routing, label = now.routing, self.label
        n_iterations = len(routing.mu)
        shown = f"{figures.with_article(self.config.classes[label])} ({self.dataset})"
        self.title.set_text(f"Routing {shown} after {now.step:,} of {self.n_steps:,} training steps")
        points = (routing.votes[0] @ self.axes_of_plane - self.centre) / self.scale  # (M, E, 2)
        mass = routing.weights[t, 0]  # (M, E)
        self.dots.set_offsets(points[:, self.order].transpose(1, 0, 2).reshape(-1, 2))
        self.dots.set_sizes(MASS_AREA * mass[:, self.order].T.reshape(-1))
        means = (routing.mu[t, 0] @ self.axes_of_plane - self.centre) / self.scale  # (E, 2)
        for e, text in enumerate(self.means):
            text.set_position(means[e])
            text.set_alpha(1 if e == label else 0.75)
        fraction = mass[:, label] / max(float(mass[:, label].sum()), 1e-12)
        away = points[:, label] - means[label]
        values, vectors = np.linalg.eigh(np.einsum("m,mi,mj->ij", fraction, away, away))
        self.ring.set_center(means[label])
        self.ring.width, self.ring.height = 4 * np.sqrt(np.maximum(values, 1e-9))
        self.ring.angle = math.degrees(math.atan2(vectors[1, 0], vectors[0, 0]))
        self.ring.set_edgecolor(darkened(self.colours[label]))
        a = routing.a[t, 0]
        for bar, value in zip(self.bars, a, strict=True):
            bar.set_height(value)
        answer = int(viewpoint.class_scores_forward(routing.mu[t, 0], a, self.config.loss).argmax())
        said, colour = figures.verdict(self.config, answer, label)
        self.verdict.set(text=said, color=colour)
        self.iteration.set_text(f"iteration {t + 1} of {n_iterations}")
        distances = np.linalg.norm(routing.votes[0, :, label] - routing.mu[t, 0, label], axis=1)
        self.distance.set_text(f"mean distance of its\nvotes: {float(fraction @ distances):.1f}")
        past = self.recorder.snapshots[: k + 1]
        self.line.set_data([s.step for s in past], [s.accuracy for s in past])
        self.percent.set_text(f"{100 * now.accuracy:.0f} %")
        return self.draw()


# ----------------------------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "--out --fps --snapshots --dataset --data-dir --seed --n-epochs --n-train --threads --quiet",
        [
            ("--n-epochs 1 --n-train 20000", "One epoch of 20,000 digits: about 1 minute."),
            ("--n-epochs 1 --n-train 2000 --snapshots 4 --out draft.gif", "A short draft: about 15 seconds."),
            ("--dataset voxels", "Views of voxel objects instead of digits: about 15 seconds."),
        ],
        description="Train the convolutional matrix capsules and animate the routing of their votes on the way.",
    )
    experiment.add_config_flags(parser)
    animation = add_animation_arguments(parser, experiment.EXPERIMENT, fps=6.0)
    animation.add_argument(
        "--snapshots", type=whole_number(2, MAX_FRAMES), metavar="N", default=30,
        help="Show the network N times, from before the first step to after the last. Default: %(default)s.",
    )  # fmt: skip
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    asked = experiment.config_from_args(args)
    for field in ("attack", "epsilons", "attack_steps", "n_attack"):
        if field in args.given:
            parser.error(f"argument {flag_of(Config, field)}: nothing is attacked here")
    n_frames = args.snapshots - 1 + asked.em_iters
    if n_frames > MAX_FRAMES:
        parser.error(f"argument --snapshots: {n_frames} frames are more than {MAX_FRAMES}")

    def body() -> None:
        require_writable(args.out)
        data = experiment.make_data(asked)
        config = experiment.resolved(asked, data)
        require_test_images(len(data.test.labels), figures.MIN_TEST)
        state, recorder = record(config, data, args.snapshots, args.threads, args.quiet)
        result = experiment.make_result(config, data, {"capsules": state}, {}, args.threads)
        print_result(f"{experiment.describe(result)}\n{experiment.format_table(result)}")
        # The last iteration while the network learns, then slowly every iteration of the trained network.
        last, T = len(recorder.snapshots) - 1, config.em_iters
        frames = [*((k, T - 1) for k in range(last)), *((last, t) for t in range(T))]
        text_colours = [darkened(colour) for colour in (RIGHT, WRONG, BLUE, TRUE_COLOUR)]
        write_gif(
            args,
            lambda: GatheringVotes(figures.drawable(config), data, recorder),
            frames,
            N_GREYS,
            N_COLOURS,
            text_colours,
            holds=range(last, last + T),
        )

    return exit_status(body)


if __name__ == "__main__":
    sys.exit(main())
