"""Animate the convolutional matrix capsules: votes gather round the class capsules during routing and training.

    python -m more.make_conv_matrix_capsules_gif --n-epochs 1 --n-train 20000

Training is stopped ``--snapshots`` times, more often at first, the last time at the end. Each time one test image, the
first of the set, is routed. A frame shows the votes for all class capsules in one EM iteration: every vote in the
colour of the capsule that it is for, as large as the mass that it was given, and each capsule's mean as its class. The
plane and its scale are those of the trained network.
"""

from __future__ import annotations

from support.figures import (
    BLUE, DATASET_NAMES, GREEN, MAX_FRAMES, ORANGE, PURPLE, SKY, VERMILLION, AnimationOptions, Run, accuracy_axis,
    add_frame, darkened, grey_levels, lightened, make_figure, marked_answer, step_axis, tested, weighted_quantiles,
    write_animation,
)

import dataclasses
import math
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse

from more import conv_matrix_capsules as conv, visualize_conv_matrix_capsules as figures
from more.conv_matrix_capsules import Array, ClassRouting, Config, Data, smallnorb
from multimnist_capsnet import Workers, resolve_auto
from smallnorb_novel_viewpoint import OUTPUT, RunOptions, SettingError, TrainState, int_in, parse, script, setting
from support.experiment import redeclared, require_writable

N_TESTED = 500  # test images of the accuracy curve, spread over the set
TRUE_COLOUR = VERMILLION
OTHER_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, "#8C6D31", "#7F7F7F", "#6A51A3", "#A6B800")  # of the other classes


class Snapshot(NamedTuple):
    step: int
    routing: ClassRouting  # of the image that is shown
    accuracy: float


class Recorder:
    """A callback that takes the snapshots."""

    def __init__(self, config: Config, data: Data, steps: Collection[int], workers: Workers) -> None:
        self.config, self.steps, self.workers = config, steps, workers
        self.model = conv.make_models(config)["capsules"]
        self.image, self.label = data.test.images[:1], int(data.test.labels[0])
        self.tested = conv.subset(data.test, N_TESTED)
        self.snapshots: list[Snapshot] = []

    def __call__(self, state: TrainState, epoch_ended: bool) -> None:
        if state.step in self.steps:
            routing = conv.class_routing(state.params, self.image, self.config)
            accuracy = conv.accuracy(self.model, state.params, self.tested, self.config, self.workers)
            self.snapshots.append(Snapshot(state.step, routing, accuracy))


def principal_axes(routing: ClassRouting) -> Array:
    """Directions (D, 2) in which the votes, weighted by their mass in the last iteration, are spread most."""
    votes, mass = routing.votes[0].reshape(-1, routing.votes.shape[-1]), routing.weights[-1, 0].ravel()
    axes = np.linalg.eigh(np.cov(votes.T, aweights=mass))[1][:, :-3:-1]  # (D, 2)
    return axes * np.sign(axes[np.abs(axes).argmax(axis=0), [0, 1]])  # the sign of an axis is arbitrary


MASS_AREA = 260.0  # square points of a vote that has the mass of one child


def colours_of(n_classes: int, label: int) -> list[str]:
    return [*OTHER_COLOURS[:label], TRUE_COLOUR, *OTHER_COLOURS[label:]][:n_classes]


def add_plane(
    ax: Axes, config: Config, routing: ClassRouting, axes: Array, label: int
) -> Callable[[ClassRouting, int], None]:
    """Votes and means on the plane of ``axes``, at the scale of ``routing``. The function sets them to an iteration."""
    colours = colours_of(config.n_classes, label)
    mass = routing.weights[:, 0].sum(axis=0).ravel()
    spans = [weighted_quantiles(column, mass, [0.015, 0.985]) for column in (routing.votes[0] @ axes).reshape(-1, 2).T]
    low, high = np.transpose(spans)
    middle, reach = (low + high) / 2, max(0.75 * float((high - low).max()), 1e-6)
    (left, right), (bottom, top) = np.stack([middle - reach, middle + reach], axis=1)
    ax.set_aspect("equal", "datalim")
    add_frame(ax, "#bbbbbb")
    # the true class is drawn last, over the others
    n_children, n = routing.votes.shape[1:3]
    order = np.array([*(e for e in range(n) if e != label), label])
    faces = [lightened(colours[e], 0.85 if e == label else 0.6) for e in order for _ in range(n_children)]
    dots = ax.scatter(np.zeros(len(faces)), np.zeros(len(faces)), s=1, c=faces, linewidths=0.3, edgecolors="white",
                      animated=True)
    ring: Any = ax.add_patch(
        Ellipse((0, 0), 1, 1, fill=False, linewidth=2, color=darkened(colours[label]), animated=True)
    )
    names = []
    for e in range(n):
        name = config.classes[e].removeprefix("shape ")
        box = {"boxstyle": "circle,pad=0.22" if len(name) == 1 else "round,pad=0.2", "linewidth": 1.6}
        box |= {"facecolor": "white", "edgecolor": colours[e]}
        names.append(ax.text(0, 0, name, ha="center", va="center", fontweight="bold", fontsize=10, bbox=box,
                             color=darkened(colours[e]), clip_on=True, animated=True, zorder=4 + (e == label),
                             alpha=1 if e == label else 0.75))
    # last, since what is added would move the limits; the aspect may still widen them
    ax.set_xlim(left, right, auto=None)
    ax.set_ylim(bottom, top, auto=None)

    def show(now: ClassRouting, t: int) -> None:
        points, mass = now.votes[0] @ axes, now.weights[t, 0]  # (M, J, 2), (M, J)
        dots.set_offsets(points[:, order].transpose(1, 0, 2).reshape(-1, 2))
        dots.set_sizes(MASS_AREA * mass[:, order].T.reshape(-1))
        means = now.mu[t, 0] @ axes  # (J, 2)
        for e, text in enumerate(names):
            text.set_position(means[e])
        values, vectors = np.linalg.eigh(np.cov(points[:, label].T, aweights=mass[:, label], ddof=0))
        ring.set_center(means[label])
        ring.width, ring.height = 4 * np.sqrt(np.maximum(values, 1e-9))
        ring.angle = math.degrees(math.atan2(vectors[1, 0], vectors[0, 0]))

    return show


def make_scene(config: Config, data: Data, recorder: Recorder) -> tuple[Figure, Callable[[int, int], None]]:
    """Votes on a plane, the capsules' answer and the accuracy; ``update(k, t)`` shows iteration t of snapshot k."""
    snapshots, label, n = recorder.snapshots, recorder.label, config.n_classes
    colours, n_steps = colours_of(n, label), recorder.snapshots[-1].step
    fig = make_figure(5.3, " ", figures.subtitle(Run(config, data, {})), width=8.8)
    title = fig.texts[0]
    axes = fig.subplot_mosaic("pi;pa;pc", width_ratios=(1.75, 1), height_ratios=(1.3, 1, 1))
    name = config.classes[label]
    plane = axes["p"]
    plane.set_title("votes for the class capsules, and the capsules' means", fontweight="bold")
    plane.set_xlabel("area: mass of a vote; ring: two standard deviations of the true class's votes", fontsize=9)
    show = add_plane(plane, config, snapshots[-1].routing, principal_axes(snapshots[-1].routing), label)

    image = axes["i"]
    shown = grey_levels(conv.prepared(recorder.image[:1], config)[0])
    image.imshow(shown, vmin=0, vmax=1, interpolation="hanning")
    image.set(xticks=[], yticks=[], anchor="W")
    image.grid(False)
    image.set_title(name, fontweight="bold", color=darkened(colours[label]))
    moving: dict[str, Any] = {"transform": image.transAxes, "animated": True, "va": "top"}
    said = image.text(1.1, 0.98, "", fontsize=14, fontweight="bold", **moving)
    detail = image.text(1.1, 0.72, "", linespacing=1.4, **moving)

    bars = axes["a"]
    patches = bars.bar(range(n), np.zeros(n), color=colours, width=0.68, animated=True).patches
    bars.set(xlim=(-0.6, n - 0.4), ylim=(0, 1), yticks=[0, 0.5, 1], title="activation of each class capsule")
    bars.set_xticks(range(n), config.classes)
    bars.get_xticklabels()[label].set(fontweight="bold", color=darkened(colours[label]))
    bars.tick_params(axis="x", length=0)
    bars.grid(False, axis="x")

    curve = axes["c"]
    accuracy_axis(curve, None, 1 / n)
    curve.set_yticks([0, 0.5, 1])
    step_axis(curve, max(1, n_steps))
    curve.set_title(f"{tested(config)} accuracy, {len(recorder.tested.labels)} images")
    curve.set_xlabel("training step")
    percent = curve.text(1, 1.04, "", transform=curve.transAxes, ha="right", fontweight="bold", color=darkened(BLUE),
                         animated=True)
    (line,) = curve.plot([], [], color=BLUE, linewidth=2.2, marker="o", markersize=4, clip_on=False, animated=True)

    def update(k: int, t: int) -> None:
        now = snapshots[k]
        title.set_text(f"Routing {name} ({DATASET_NAMES[data.name]}) after {now.step:,} of {n_steps:,} training steps")
        show(now.routing, t)
        a = now.routing.a[t, 0]
        for patch, value in zip(patches, a, strict=True):
            patch.set_height(value)
        answer = int(smallnorb.class_scores_forward(now.routing.mu[t, 0], a, config.loss).argmax())
        text, colour = marked_answer(answer == label, config.classes[answer])
        said.set(text=text, color=colour)
        mass = now.routing.weights[t, 0, :, label]
        distance = float(mass @ now.routing.distances[t, 0, :, label]) / max(float(mass.sum()), 1e-12)
        detail.set_text(f"iteration {t + 1} of {len(now.routing.mu)}\nmean distance\nof its votes: {distance:.1f}")
        line.set_data([s.step for s in snapshots[: k + 1]], [s.accuracy for s in snapshots[: k + 1]])
        percent.set_text(f"{100 * now.accuracy:.0f} %")

    return fig, update


@dataclasses.dataclass(frozen=True)
class Options(AnimationOptions):
    out: Path = setting(Path(f"{conv.EXPERIMENT}.gif"), OUTPUT, "File of the animation, a GIF.", usual=True)
    fps: float = redeclared(AnimationOptions, "fps", 6.0)
    snapshots: int = setting(
        30, int_in(2, MAX_FRAMES), "Show the network at most N times, from before the first step to after the last."
    )


@script
def main(argv: Sequence[str]) -> None:
    config, options, _ = parse(
        Config, Options, argv,
        "Train the convolutional matrix capsules and animate the routing of their votes on the way.",
        ("--n-epochs 1 --n-train 20000", "One epoch of 20,000 digits: about 1 minute."),
        ("--n-epochs 1 --n-train 2000 --snapshots 4 --out draft.gif", "A short draft: about 15 seconds."),
        ("--dataset voxels", "Views of the write-up's objects instead of digits: about 15 seconds."),
    )
    if options.snapshots * config.em_iters > MAX_FRAMES:
        n_frames = f"{options.snapshots} times {config.em_iters} frames"
        raise SettingError("snapshots", f"{n_frames} are more than {MAX_FRAMES}")
    require_writable(options.out)
    data = conv.make_data(config)
    config = resolve_auto(config, data)
    n_steps, n = conv.steps_per_epoch(config, data) * config.n_epochs, options.snapshots
    steps = {round(n_steps * (k / (n - 1)) ** 2) for k in range(n)}  # from 0 to the last, at distances that grow
    with Workers(options.threads) as workers:
        recorder = Recorder(config, data, steps, workers)
        run_options = RunOptions(threads=options.threads, quiet=options.quiet)
        conv.train_all(config, data, run_options, names=("capsules",), callback=recorder)
    T, last = config.em_iters, len(recorder.snapshots) - 1
    frames = [(k, t) for k in range(last + 1) for t in range(T)]
    write_animation(options, lambda: make_scene(config, data, recorder), frames, range(last * T, (last + 1) * T))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
