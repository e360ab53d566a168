#!/usr/bin/env python3
"""Animate the convolutional matrix capsules: votes gather round the class capsules as routing and training go on.

    python make_conv_matrix_capsules_gif.py --n-epochs 1 --n-train 20000 --snapshots 10 --fps 3

The capsule network is stopped ``--snapshots`` times on its way, more often at first, the last time at the end. Each
time one test image, the first of the set, is routed, and a frame for each EM iteration shows the votes for all class
capsules: every vote in the colour of the capsule that it is for, as large as the mass that it was given, and each
capsule's mean as its class.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Ellipse
from tqdm import tqdm

import make_smallnorb_novel_viewpoint_gif as gif
import conv_matrix_capsules as experiment
import visualize_conv_matrix_capsules as figures
import visualize_smallnorb_novel_viewpoint as house
from conv_matrix_capsules import Array, ClassRouting, Config, Data, Params, TrainState, views
from visualize_smallnorb_novel_viewpoint import ink, place, tint, write

N_TESTED = 500  # test images of the accuracy curve, spread over the set
N_GREYS, N_COLOURS = 32, 160  # of the palette
TRUE_COLOUR = "#D55E00"
# Okabe and Ito's other colours, and four more, of the other classes
OTHER_COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#8C6D31", "#7F7F7F", "#6A51A3", "#A6B800",
)  # fmt: skip


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
    """Takes the snapshots during the training."""

    def __init__(self, config: Config, data: Data, steps: list[int]) -> None:
        self.config, self.steps = config, steps
        self.model = experiment.make_models(config)["capsules"]
        self.image, self.label = data.test.images[:1], int(data.test.labels[0])
        self.tested = experiment.some(*data.test, N_TESTED)
        self.snapshots: list[Snapshot] = []

    def take(self, step: int, params: Params) -> None:
        accuracy = experiment.evaluate(self.model, params, self.tested)
        routing = experiment.class_routing(params, self.image, self.config)
        self.snapshots.append(Snapshot(step, routing, accuracy))


def record(config: Config, data: Data, snapshots: int, quiet: bool) -> tuple[TrainState, Recorder]:
    """Train the capsule network and look at it on the way."""
    n_steps = math.ceil(len(data.train.labels) / config.batch_size) * config.n_epochs
    recorder = Recorder(config, data, snapshot_steps(n_steps, snapshots))
    of = experiment.experiment(config)
    state = views.init_state(recorder.model, config, of)
    silent = quiet or not sys.stderr.isatty()
    with tqdm(total=n_steps, desc="capsules", unit="step", leave=False, disable=silent) as bar:

        def after_step(state: TrainState, epoch_ends: bool) -> None:
            bar.update()
            if state.step in recorder.steps:
                recorder.take(state.step, state.params)

        if 0 in recorder.steps:
            recorder.take(0, state.params)
        experiment.train(recorder.model, config, data, state, after_step=after_step, experiment=of)
    return state, recorder


def principal_axes(routing: ClassRouting) -> Array:
    """Directions (D, 2) in which the votes, weighted by their mass in the last iteration, are spread most."""
    votes, mass = routing.votes[0].reshape(-1, routing.votes.shape[-1]), routing.weights[-1, 0].reshape(-1)
    mean = mass @ votes / mass.sum()
    covariance = (mass[:, None] * (votes - mean)).T @ (votes - mean)
    axes = np.linalg.eigh(covariance)[1][:, :-3:-1]  # (D, 2)
    return axes * np.sign(axes[np.abs(axes).argmax(axis=0), [0, 1]])  # a sign is nobody's choice but ours


def bulk(routing: ClassRouting, axes: Array, outside: float = 0.015) -> tuple[Array, Array]:
    """Corners (2,), (2,) on the plane of ``axes``: beyond each side lies that share of the mass of all iterations."""
    points = (routing.votes[0] @ axes).reshape(-1, 2)
    mass = routing.weights[:, 0].sum(axis=0).reshape(-1)
    corners = []
    for column in points.T:
        order = np.argsort(column)
        below = np.cumsum(mass[order]) / mass.sum()
        at = np.searchsorted(below, [outside, 1 - outside]).clip(max=len(order) - 1)
        corners.append(column[order[at]])
    low, high = np.transpose(corners)
    return low, np.maximum(high, low + 1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Drawing: the parts that stay are drawn once, the others over a copy of them
# ----------------------------------------------------------------------------------------------------------------------

GIF_WIDTH, GIF_HEIGHT = 8.8, 5.2  # inches
PLANE = (0.2, 0.98, 5.2, 4.0)
RIGHT_COLUMN = 6.05
MASS_AREA = 260.0  # square points of a vote that has the mass of one child


class Scene:
    """The canvas with its moving parts."""

    def __init__(self, config: Config, data: Data, recorder: Recorder) -> None:
        self.config, self.recorder, self.label = config, recorder, recorder.label
        snapshots = recorder.snapshots
        self.axes_of_plane = principal_axes(snapshots[-1].routing)
        self.n_steps = snapshots[-1].step
        run = figures.Run(config, data, {})
        self.fig = figures.new_figure(run, GIF_HEIGHT, "", width=GIF_WIDTH)
        self.canvas = self.fig.canvas
        assert isinstance(self.canvas, FigureCanvasAgg)
        self.moving: list[Any] = []
        self.title = self.move(write(self.fig, 0.12, 0.12, "", fontsize=12.5, fontweight="bold"))
        self.dataset = figures.DATASET_NAMES[data.name]
        self.colours = list(OTHER_COLOURS[: config.n_classes - 1])
        self.colours.insert(self.label, TRUE_COLOUR)
        self.add_plane(snapshots)
        self.add_answer(recorder.image[0])
        self.add_curve()
        self.canvas.draw()
        self.background = self.canvas.copy_from_bbox(self.fig.bbox)

    def move(self, artist: Any) -> Any:
        """Keep an artist out of the background and redraw it in every frame."""
        artist.set_animated(True)
        self.moving.append(artist)
        return artist

    def add_plane(self, snapshots: list[Snapshot]) -> None:
        """Votes and means on the plane of the last snapshot's two principal axes, each snapshot at a scale of its own:
        votes grow with training."""
        x, y, width, height = PLANE
        write(self.fig, x, y - 0.25, "votes for the class capsules, and the capsules' means", fontweight="bold")
        ax = place(self.fig, x, y, width, height)
        house.frame(ax, "#bbbbbb", 0.8)
        ax.set_autoscale_on(False)
        ax.set(xlim=(-1, 1), ylim=(-height / width, height / width))
        self.views = []
        for snapshot in snapshots:
            low, high = bulk(snapshot.routing, self.axes_of_plane)
            self.views.append(((low + high) / 2, 0.58 * float(((high - low) / [1, height / width]).max())))
        # the true class is drawn last, over the others
        n_children, n = snapshots[0].routing.votes.shape[1:3]
        self.order = np.array([*(e for e in range(n) if e != self.label), self.label])
        faces = [tint(self.colours[e], 0.85 if e == self.label else 0.6) for e in self.order for _ in range(n_children)]
        dots = ax.scatter(np.zeros(len(faces)), np.zeros(len(faces)), s=1, c=faces, linewidths=0.3, edgecolors="white")
        self.dots = self.move(dots)
        self.ring = self.move(ax.add_patch(Ellipse((0, 0), 1, 1, fill=False, linewidth=2, color=house.BLACK)))
        self.means = []
        for e in range(n):
            name = self.config.classes[e]
            box = {"boxstyle": "circle,pad=0.22" if len(name) == 1 else "round,pad=0.2", "linewidth": 1.6}
            box |= {"facecolor": "white", "edgecolor": self.colours[e]}
            self.means.append(ax.text(0, 0, name, ha="center", va="center", fontweight="bold", fontsize=10, bbox=box,
                                      color=ink(self.colours[e]), clip_on=True))  # fmt: skip
        for e in self.order:
            self.move(self.means[e])
        key = "area: mass given to a vote · ring: two deviations of the true class's · each step scaled anew"
        write(self.fig, x, y + height + 0.05, key, fontsize=9, color=house.GREY)

    def add_answer(self, image: Array) -> None:
        """The image, and how active each class capsule is."""
        config, x, y = self.config, RIGHT_COLUMN, PLANE[1]
        figures.show(self.fig, x - 0.35, y, 1.05, views.crop(image[None], None)[0])
        name = figures.with_article(config.classes[self.label])
        write(self.fig, x - 0.35, y - 0.25, name, fontweight="bold", color=ink(self.colours[self.label]))
        self.verdict = self.move(write(self.fig, x + 0.85, y + 0.12, "", fontsize=14, fontweight="bold"))
        self.iteration = self.move(write(self.fig, x + 0.85, y + 0.5, "", fontsize=10.5))
        self.distance = self.move(
            write(self.fig, x + 0.85, y + 0.7, "", color=ink(self.colours[self.label]), va="top", linespacing=1.3)
        )
        n = config.n_classes
        ax = place(self.fig, x - 0.02, y + 1.5, GIF_WIDTH - x - 0.2, 0.8)
        ax.set(xlim=(-0.6, n - 0.4), ylim=(0, 1), yticks=[0, 0.5, 1])
        ax.set_xticks(range(n), config.classes)
        ax.get_xticklabels()[self.label].set(fontweight="bold", color=ink(self.colours[self.label]))
        ax.tick_params(axis="x", length=0)
        ax.grid(False, axis="x")
        ax.set_title("activation of each class capsule", loc="left")
        self.bars = [self.move(bar) for bar in ax.bar(range(n), np.zeros(n), color=self.colours, width=0.68)]

    def add_curve(self) -> None:
        ax = place(self.fig, RIGHT_COLUMN - 0.02, PLANE[1] + 2.86, GIF_WIDTH - RIGHT_COLUMN - 0.2, 0.85)
        house.accuracy_axis(ax, None, 1 / self.config.n_classes)
        ax.set_yticks([0, 0.5, 1])
        ax.set_xlim(0, max(1, self.n_steps))
        ax.locator_params(axis="x", nbins=4, integer=True)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        ax.set_title("test accuracy", loc="left")
        ax.set_xlabel(f"step   (on {len(self.recorder.tested.labels)} test images)", fontsize=9, labelpad=1)
        self.percent = self.move(ax.text(1, 1.06, "", transform=ax.transAxes, ha="right", fontweight="bold",
                                         fontsize=10.5, color=ink(house.BLUE)))  # fmt: skip
        (line,) = ax.plot([], [], color=house.BLUE, linewidth=2.2, marker="o", markersize=4, clip_on=False)
        self.line = self.move(line)

    def frame(self, k: int, t: int) -> Array:
        """RGB (H, W, 3) of snapshot k, EM iteration t."""
        now = self.recorder.snapshots[k]
        routing, label = now.routing, self.label
        n_iterations = len(routing.mu)
        shown = f"{figures.with_article(self.config.classes[label])} ({self.dataset})"
        self.title.set_text(f"Routing {shown} after {now.step:,} of {self.n_steps:,} training steps")
        centre, scale = self.views[k]
        points = (routing.votes[0] @ self.axes_of_plane - centre) / scale  # (M, E, 2)
        mass = routing.weights[t, 0]  # (M, E)
        self.dots.set_offsets(points[:, self.order].transpose(1, 0, 2).reshape(-1, 2))
        self.dots.set_sizes(MASS_AREA * mass[:, self.order].T.reshape(-1))
        means = (routing.mu[t, 0] @ self.axes_of_plane - centre) / scale  # (E, 2)
        for e, text in enumerate(self.means):
            text.set_position(means[e])
            text.set_alpha(1 if e == label else 0.75)
        share = mass[:, label] / max(float(mass[:, label].sum()), 1e-12)
        away = points[:, label] - means[label]
        values, vectors = np.linalg.eigh(np.einsum("m,mi,mj->ij", share, away, away))
        self.ring.set_center(means[label])
        self.ring.width, self.ring.height = 4 * np.sqrt(np.maximum(values, 1e-9))
        self.ring.angle = math.degrees(math.atan2(vectors[1, 0], vectors[0, 0]))
        self.ring.set_edgecolor(ink(self.colours[label]))
        a = routing.a[t, 0]
        for bar, value in zip(self.bars, a, strict=True):
            bar.set_height(value)
        answer = int(figures.class_scores(self.config, routing.mu[t, 0], a).argmax())
        said, colour = figures.verdict(self.config, answer, label)
        self.verdict.set_text(said)
        self.verdict.set_color(colour)
        self.iteration.set_text(f"iteration {t + 1} of {n_iterations}")
        distances = np.linalg.norm(routing.votes[0, :, label] - routing.mu[t, 0, label], axis=1)
        self.distance.set_text(f"votes for it lie {float(share @ distances):.1f}\nfrom their mean")
        past = self.recorder.snapshots[: k + 1]
        self.line.set_data([s.step for s in past], [s.accuracy for s in past])
        self.percent.set_text(f"{100 * now.accuracy:.0f} %")
        canvas: Any = self.canvas
        canvas.restore_region(self.background)
        for artist in self.moving:
            (artist.axes or self.fig).draw_artist(artist)
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def draw_frames(config: Config, data: Data, recorder: Recorder) -> Iterator[Array]:
    with house.house_style():
        scene = Scene(config, data, recorder)
        for k, snapshot in enumerate(recorder.snapshots):
            for t in range(len(snapshot.routing.mu)):
                yield scene.frame(k, t)


# ----------------------------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = experiment.Parser(
        description="Train the convolutional matrix capsules and animate how their votes are routed on the way."
    )
    experiment.add_experiment_arguments(parser)
    figures.add_threads(parser)
    animation = parser.add_argument_group("animation")
    animation.add_argument(
        "--snapshots", type=experiment.whole_number(2, gif.MAX_FRAMES), metavar="N", default=10,
        help="how often the network is looked at, before the first step and after the last too; default: %(default)s",
    )  # fmt: skip
    animation.add_argument(
        "--fps", type=gif.frame_rate, metavar="X", default=3.0, help="frames a second, 0.1 to 50; default: %(default)s"
    )
    animation.add_argument(
        "--out", type=Path, metavar="FILE", default=Path(f"{experiment.EXPERIMENT}.gif"), help="default: %(default)s"
    )
    animation.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    config = experiment.config_from_args(parser, args)
    if args.snapshots * config.em_iters > gif.MAX_FRAMES:
        parser.error(
            f"argument --snapshots: {args.snapshots} of {config.em_iters} iterations are more than {gif.MAX_FRAMES}"
            " frames"
        )
    if args.out.suffix.lower() != ".gif":
        parser.error(f"argument --out: {args.out} does not end in .gif")

    def body() -> None:
        experiment.require_writable(args.out)
        data = experiment.make_data(config)
        figures.require_enough(data)
        with experiment.worker_threads(args.threads):
            state, recorder = record(config, data, args.snapshots, args.quiet)
        result = experiment.make_result(config, data.name, {"capsules": state}, {}, args.threads)
        print(f"{experiment.describe(result)}\n{experiment.format_table(result)}")
        silent = args.quiet or not sys.stderr.isatty()
        drawn, total = draw_frames(config, data, recorder), len(recorder.snapshots) * config.em_iters
        frames = list(tqdm(drawn, total=total, desc="frames", unit="frame", leave=False, disable=silent))
        texts = [ink(colour) for colour in (house.RIGHT, house.WRONG, house.BLUE, TRUE_COLOUR)]
        print(house.write_if_changed(args.out, gif.encode_gif(frames, args.fps, N_GREYS, N_COLOURS, texts)))

    return experiment.exit_status(body)


if __name__ == "__main__":
    sys.exit(main())
