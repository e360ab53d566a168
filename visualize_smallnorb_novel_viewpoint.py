#!/usr/bin/env python3
"""Draw the figures of the novel-viewpoint experiment into ``DIR/smallnorb_novel_viewpoint/``.

    python visualize_smallnorb_novel_viewpoint.py --seed 1 --n-epochs 10

trains the three models and draws; ``--checkpoint FILE`` draws what ``smallnorb_novel_viewpoint.py --checkpoint FILE``
has trained. The same run gives the same files byte for byte, and a file that would not change is left alone.

    example_views.png         every class from training and held-out viewpoints
    elevation_strip.png       the same objects at rising elevations
    training_curves.png       loss and both accuracies, epoch by epoch
    extrapolation_bars.png    familiar against held-out accuracy, and every seed of a results file as a point
    azimuth_accuracy.png      accuracy over the full circle: of voxels on fresh images, else on the test images
    elevation_accuracy.png    the same over elevations, where elevation is held out
    class_poses.png           pose matrices of the class capsules, a familiar and a held-out view of each class
    pose_curves.png           pose entries of the winning class capsule while L and tripod turn (voxels alone)
    held_out_confusion.png    which classes each model takes for which, on held-out views
    routing_assignments.png   how EM assigns the primary capsules to the classes, iteration by iteration
    smallnorb_pairs.png       real smallNORB stereo pairs, above the voxel classes (needs files, see --smallnorb-dir)
"""

from __future__ import annotations

import support.headless  # noqa: F401  before matplotlib

# isort: split

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator, MultipleLocator

import smallnorb_novel_viewpoint as experiment
from data.norb_files import NORB_SETS, norb_path
from fast.workers import blas_threads
from smallnorb_novel_viewpoint import Array, Config, Data, Model, Range, Split, confusion_matrix
from support.figures import (
    BLACK,
    BLUE,
    DATASET_NAMES,
    GREEN,
    GREY,
    MODEL_STYLES,
    ORANGE,
    PURPLE,
    RIGHT,
    VERMILLION,
    WIDTH,
    WRONG,
    FigureOptions,
    accuracy_axis,
    add_axes,
    add_colourbar,
    add_frame,
    add_heading_bar,
    add_legend,
    add_model_legend,
    add_row_label,
    add_text,
    add_view,
    darkened,
    decades_axis,
    epoch_axis,
    evenly_spaced_indices,
    lightened,
    load_finished,
    model_line,
    new_figure,
    plural,
    read_seeds,
    require_runs,
    with_minus_sign,
    write_figures,
)
from support.files import UserError, require_writable
from support.optimizers import TrainState
from support.run import Stream, generator
from support.script import script
from support.settings import folder, input_path, parse, setting
from support.training import RunOptions

MODELS = MODEL_STYLES[experiment.EXPERIMENT]
TRAINED, HELD_OUT = GREEN, PURPLE  # ranges of viewpoints
CHANCE = 1 / experiment.N_CLASSES
HALF_TURN = 0.6  # accuracy on held-out azimuths by cross, T and frame alone, which look the same after half a turn


def shade_range(ax: Axes, span: Range, colour: str, text: str, *, circular: bool) -> None:
    """Shade a range of angles and name it, unless the text is empty; an azimuth range may pass 360 and is then drawn in
    two parts."""
    low, high = span
    parts = [(low, high)]
    if circular:
        start = low % 360
        stop = start + high - low
        parts = [(start, min(stop, 360.0))] + ([(0.0, stop - 360)] if stop > 360 else [])
    for a, b in parts:
        ax.axvspan(a, b, color=lightened(colour, 0.17), linewidth=0, zorder=0)
    a, b = max(parts, key=lambda part: part[1] - part[0])
    ax.annotate(
        text, ((a + b) / 2, 1), xycoords=("data", "axes fraction"), xytext=(0, 3), textcoords="offset points",
        ha="center", va="bottom", color=darkened(colour), fontweight="bold",
    )  # fmt: skip


def degrees(span: Range, *, circular: bool) -> str:
    """A range of angles; an azimuth range that passes 360 goes on from 0."""
    low, high = span
    if circular and high - low < 360:
        low, high = low % 360, high % 360 or 360
    return f"{low:g}–{high:g}°"


def subtitle(config: Config, *, seeds: int = 0) -> str:
    """What every figure says of its run: data set, what is held out, seed or number of seeds."""
    seen, unseen = (getattr(config, f"{part}_{config.held_out}s") for part in ("train", "test"))
    circular = config.held_out == "azimuth"
    ranges = f"held-out {config.held_out}s {degrees(unseen, circular=circular)}, trained on"
    ranges += f" {degrees(seen, circular=circular)}"
    who = f"means of {plural(seeds, 'seed')}" if seeds else f"seed {config.seed}"
    return f"{DATASET_NAMES[config.dataset]} · {ranges} · {who}"


# ----------------------------------------------------------------------------------------------------------------------
# What is drawn: a finished run, and views chosen from it
# ----------------------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    config: Config
    data: Data
    models: dict[str, Model]
    states: dict[str, TrainState]


# Keys of the evaluation stream: every figure draws its own noise.
VIEWS_KEY, AZIMUTH_KEY, ELEVATION_KEY = range(3)
NOISE_DRAWS = 3  # images of each view in the curves over an angle


def testing_split(data: Data) -> Split:
    """All images that no model was trained on."""
    return Split(*(np.concatenate(pair) for pair in zip(data.familiar, data.held_out, strict=True)))


def require_every_class(config: Config, data: Data) -> None:
    """Figures show each class. Raises UserError where a (partial) data set has no test image of one."""
    missing = sorted(set(range(experiment.N_CLASSES)) - set(testing_split(data).labels.tolist()))
    if missing:
        raise UserError(f"no test image shows a {config.classes[missing[0]]}: the figures need one of every class")


def pick_views(config: Config, data: Data, azimuths: Array, elevations: Array) -> Split:
    """Every class at each of M (azimuth, elevation) pairs: M views of class 0, then of class 1, …

    Voxel objects and shapes are drawn for the purpose; of smallNORB it is the test image whose viewpoint comes nearest,
    and of several the same object in the same lighting as far as there is one.
    """
    labels, azimuths, elevations = (
        np.repeat(np.arange(experiment.N_CLASSES), len(azimuths)),
        np.tile(np.asarray(azimuths, float), experiment.N_CLASSES),
        np.tile(np.asarray(elevations, float), experiment.N_CLASSES),
    )
    if config.is_rendered:
        rng = generator(config.seed, Stream.EVALUATION, VIEWS_KEY)
        return experiment.voxel_split(config, labels, azimuths, elevations, rng)
    split = testing_split(data)
    turn = np.abs((split.azimuths - azimuths[:, None] + 180) % 360 - 180)  # (views, N)
    distance = turn + np.abs(split.elevations - elevations[:, None]) + np.where(split.labels == labels[:, None], 0, 1e9)
    distance += 0.01 * split.objects  # less than a degree
    return Split(*(part[distance.argmin(axis=1)] for part in split))


def shown_angles(config: Config, data: Data, angle: str, part: str, n: int) -> Array:
    """At most ``n`` angles spread over the training ("train") or held-out ("test") range, in its order."""
    span: Range = getattr(config, f"{part}_{angle}s")
    if config.is_rendered:
        return experiment.evenly_spaced(span, n)
    split = data.familiar if part == "train" else data.held_out
    angles = np.unique(getattr(split, f"{angle}s"))
    if angle == "azimuth":
        angles = angles[np.argsort((angles - span[0]) % 360)]
    return angles[evenly_spaced_indices(len(angles), n)]


def middle(config: Config, data: Data, angle: str, part: str) -> float:
    angles = shown_angles(config, data, angle, part, 3)
    return float(angles[len(angles) // 2])


def viewpoint_pair(config: Config, data: Data) -> tuple[Array, Array]:
    """Azimuths (2,) and elevations (2,): the middle of the training range and of the held-out one."""
    azimuths, elevations = (
        np.array([middle(config, data, angle, part) for part in ("train", "test")])
        for angle in ("azimuth", "elevation")
    )
    return azimuths, elevations


def capsule_outputs(run: Run, images: Array) -> tuple[Array, Any]:
    """Scores and cache of the capsule network."""
    x = experiment.crop(images, None).astype(run.config.dtype, copy=False)
    return run.models["capsules"].forward(run.states["capsules"].params, x)


def accuracy_by_angle(run: Run, angle: str) -> tuple[Array, dict[str, Array]]:
    """Angles (A,) and each model's accuracy at every one of them.

    Voxels and shapes: fresh images every 10 degrees of azimuth, or 5 of elevation, the other angle within the training
    range.
    smallNORB and toys: the test images, by their angle.
    """
    config = run.config
    if config.is_rendered:
        if angle == "azimuth":
            azimuths, elevations = np.arange(0.0, 360, 10), experiment.evenly_spaced(config.train_elevations, 5)
            rng = generator(config.seed, Stream.EVALUATION, AZIMUTH_KEY)
        else:
            bounds = (*config.train_elevations, *config.test_elevations)
            low, high = max(-90, 5 * np.floor(min(bounds) / 5) - 10), min(90, 5 * np.ceil(max(bounds) / 5) + 10)
            azimuths, elevations = experiment.evenly_spaced(config.train_azimuths, 8), np.arange(low, high + 1, 5)
            rng = generator(config.seed, Stream.EVALUATION, ELEVATION_KEY)
        split = experiment.voxel_views(config, azimuths, elevations, NOISE_DRAWS, rng)
    else:
        split = testing_split(run.data)
    angles, where = np.unique(getattr(split, f"{angle}s"), return_inverse=True)
    accuracy = {}
    for name, model in run.models.items():
        right = experiment.predict_scores(model, run.states[name].params, split.images).argmax(axis=1) == split.labels
        accuracy[name] = np.bincount(where, right) / np.bincount(where)
    return angles, accuracy


# ----------------------------------------------------------------------------------------------------------------------
# Figures
# ----------------------------------------------------------------------------------------------------------------------


def draw_view_grid(config: Config, title: str, heads: Sequence[tuple[str, str]], labels: Sequence[Sequence[str]],
                   blocks: Sequence[Split]) -> Figure:  # fmt: skip
    """Rows are classes, columns views, in blocks side by side; a head is (text, colour), a label stands on a column."""
    n_columns = sum(map(len, labels))
    left, gap, block_gap, top = 0.78, 0.06, 0.22, 1.22
    cell = (WIDTH - left - 0.12 - block_gap * (len(blocks) - 1) - gap * (n_columns - len(blocks))) / n_columns
    cell = min(cell, 0.85)
    fig = new_figure(top + experiment.N_CLASSES * (cell + gap) + 0.06, title, subtitle(config))
    x = left
    for (text, colour), columns, split in zip(heads, labels, blocks, strict=True):
        width = len(columns) * (cell + gap) - gap
        text = text if 0.085 * len(text) < width else text.split(":")[0]
        add_heading_bar(fig, x, 0.72, width, text, colour)
        images = split.images.reshape(experiment.N_CLASSES, len(columns), *split.images.shape[1:])
        for m, label in enumerate(columns):
            add_text(fig, x + m * (cell + gap) + cell / 2, 1.0, label, ha="center", fontsize=9)
            for k in range(experiment.N_CLASSES):
                add_view(fig, x + m * (cell + gap), top + k * (cell + gap), cell, images[k, m], colour, 2)
        x += width + block_gap
    for k, name in enumerate(config.classes):
        add_text(fig, left - 0.1, top + k * (cell + gap) + cell / 2, name, ha="right", va="center", fontsize=10)
    return fig


def draw_views(run: Run, angle: str, n: int, title: str) -> Figure:
    """The classes at n angles ("azimuth" or "elevation") of the training and the held-out range, the other angle in the
    middle of its range."""
    config, data = run.config, run.data
    heads, labels, blocks = [], [], []
    for part, word, colour in (("train", "trained on", TRAINED), ("test", "held out", HELD_OUT)):
        angles = shown_angles(config, data, angle, part, n)
        if angle == "azimuth":
            elevation = middle(config, data, "elevation", part)
            views = pick_views(config, data, angles, np.full(len(angles), elevation))
            varied, fixed, turned = f"azimuth, at elevation {elevation:g}°", f"elevation {elevation:g}°", angles % 360
        else:
            azimuth = middle(config, data, "azimuth", part)
            views = pick_views(config, data, np.full(len(angles), azimuth), angles)
            varied, fixed, turned = f"elevation, at azimuth {azimuth % 360:g}°", f"azimuth {azimuth % 360:g}°", angles
        heads.append((f"{word}: {varied if config.held_out == angle else fixed}", colour))
        labels.append([f"{a:.4g}°" for a in turned])
        blocks.append(views)
    return draw_view_grid(config, title, heads, labels, blocks)


def draw_training_curves(run: Run) -> Figure:
    fig = new_figure(3.75, "Training", subtitle(run.config))
    add_model_legend(fig, 0.62, 0.72, [MODELS[name] for name in run.states])
    panels = (
        ("train_loss", "training loss"),
        ("familiar_accuracy", "accuracy, familiar viewpoints"),
        ("held_out_accuracy", "accuracy, held-out viewpoints"),
    )
    for p, (metric, label) in enumerate(panels):
        ax = add_axes(fig, 0.62 + p * 2.87, 1.3, 2.5, 1.9)
        if metric == "train_loss":
            losses = np.maximum(np.concatenate([state.history[metric] for state in run.states.values()]), 1e-8)
            decades_axis(ax, losses)
        else:
            accuracy_axis(ax, None, CHANCE)
        for name, state in run.states.items():
            values = np.array(state.history[metric])
            epochs = np.arange(1, len(values) + 1)
            if metric == "train_loss":
                values = np.maximum(values, 1e-8)
            ax.plot(
                epochs, values, **model_line(MODELS[name]), markevery=max(1, len(values) // 10), clip_on=False, zorder=3
            )
        ax.set_title(label, loc="left")
        epoch_axis(ax, len(values), 0.4)
    return fig


def add_half_turn_line(ax: Axes, config: Config) -> list[Line2D]:
    """The accuracy on held-out azimuths of a network that knows nothing of viewpoints; as a list, empty elsewhere."""
    if config.dataset != "voxels" or config.held_out != "azimuth":
        return []
    style: dict[str, Any] = {"color": GREY, "linewidth": 1.1, "linestyle": (0, (5, 2))}
    return [ax.axhline(HALF_TURN, label="cross, T and frame alone: 0.6", zorder=1, **style)]


def draw_extrapolation_bars(run: Run, seeds: dict[str, Array]) -> Figure:
    """``seeds``: per model, accuracies (n, 2) of other seeds' runs, whose means are the bars; empty where there are
    none, and the bars are of this run."""
    n_seeds = max(map(len, seeds.values()), default=0)
    fig = new_figure(4.5, "Accuracy on familiar and on held-out viewpoints", subtitle(run.config, seeds=n_seeds))
    ax = add_axes(fig, 0.62, 1.12, WIDTH - 0.75, 2.95)
    accuracy_axis(ax, "accuracy", CHANCE)
    half_turn = add_half_turn_line(ax, run.config)
    bar, n_points = 0.3, 0
    rng = np.random.default_rng(0)  # spreads the points sideways, nothing else
    for k, (name, state) in enumerate(run.states.items()):
        colour = MODELS[name].colour
        heights = [state.history[f"{part}_accuracy"][-1] for part in ("familiar", "held_out")]
        if len(seeds.get(name, ())):
            heights = seeds[name].mean(axis=0).tolist()
        styles: list[dict[str, Any]] = [
            {"facecolor": colour, "edgecolor": colour},
            {"facecolor": lightened(colour, 0.3), "edgecolor": colour, "hatch": "//"},
        ]
        for b, (height, style) in enumerate(zip(heights, styles, strict=True)):
            x = k + (b - 0.75) * (bar + 0.02)
            ax.bar(x, height, bar, linewidth=1.2, zorder=2, **style)
            ax.text(
                x, 0.05, f"{height:.3f}", ha="center", va="bottom", fontsize=10.5, fontweight="bold", zorder=5,
                color=BLACK, bbox={"facecolor": "white", "edgecolor": "none", "boxstyle": "round,pad=0.2"},
            )  # fmt: skip
            if len(points := seeds.get(name, np.empty((0, 2)))):
                n_points = len(points)
                # Points are laid in order of height and alternate about the middle, so that equal ones stay apart.
                spread = rng.permutation(np.linspace(-0.4, 0.4, n_points)) * bar
                ax.plot(
                    x + spread, points[:, b], "o", markersize=4.5, color="white", markeredgecolor=BLACK,
                    markeredgewidth=0.9, zorder=4, clip_on=False,
                )  # fmt: skip
        edge = k + 0.25 * (bar + 0.02) + bar / 2
        ax.plot([k - 0.75 * (bar + 0.02) + bar / 2, edge + 0.1], [heights[0]] * 2, color=GREY, lw=1, ls=":", zorder=3)
        if abs(heights[0] - heights[1]) > 0.02:
            ax.annotate(
                "", (edge + 0.07, heights[1]), (edge + 0.07, heights[0]),
                arrowprops={"arrowstyle": "-|>", "color": BLACK, "shrinkA": 0, "shrinkB": 0, "linewidth": 1.4},
            )  # fmt: skip
        drop = heights[0] - heights[1]
        ax.text(
            edge + 0.1, (heights[0] + heights[1]) / 2, f" drop\n {drop:.3f}", va="center", ha="left", fontweight="bold"
        )
    ax.set_xticks(range(len(run.states)), [MODELS[name].label for name in run.states], fontsize=10.5)
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(-0.5, len(run.states) - 0.5 + 0.1)
    ax.grid(False, axis="x")
    handles: list[Any] = [
        Patch(facecolor=GREY, edgecolor=GREY, label="familiar viewpoints"),
        Patch(facecolor=lightened(GREY, 0.3), edgecolor=GREY, hatch="//", label="held-out viewpoints"),
    ]
    if n_points:
        handles.append(
            Line2D([], [], ls="", marker="o", markersize=4.5, color="white", markeredgecolor=BLACK,
                   label=f"each of {n_points} seeds")
        )  # fmt: skip
    add_legend(fig, 0.62, 0.72, handles + half_turn, ncols=4, columnspacing=1.4)
    return fig


def draw_angle_accuracy(run: Run, angle: str) -> Figure:
    config = run.config
    angles, accuracy = accuracy_by_angle(run, angle)
    circular = angle == "azimuth"
    fig = new_figure(4.1, f"Accuracy at every {angle}", subtitle(config))
    add_model_legend(fig, 0.62, 0.72, [MODELS[name] for name in run.states])
    ax = add_axes(fig, 0.62, 1.3, WIDTH - 0.8, 2.25)
    accuracy_axis(ax, "accuracy", CHANCE)
    for line in add_half_turn_line(ax, config) if circular else []:
        ax.text(3, HALF_TURN - 0.02, str(line.get_label()), va="top", fontsize=9, color=GREY)
    seen, unseen = (getattr(config, f"{part}_{angle}s") for part in ("train", "test"))
    if config.held_out == angle:
        shade_range(ax, seen, TRAINED, "trained on", circular=circular)
        shade_range(ax, unseen, HELD_OUT, "held out", circular=circular)
    else:
        at = f"trained on, at {config.held_out}s {degrees(config.train_elevations, circular=False)}"
        shade_range(ax, seen, TRAINED, at, circular=circular)
    for name, values in accuracy.items():
        x, y = angles, values
        if circular:  # 360 is 0 again
            x, y = np.append(angles, angles[0] + 360), np.append(values, values[0])
        ax.plot(x, y, **model_line(MODELS[name]), clip_on=False, zorder=3 + (name == "capsules"))
    if circular:
        ax.set_xlim(0, 360)
        ax.set_xticks(np.arange(0, 361, 30))
    else:
        ax.set_xlim(angles[0], angles[-1])
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}°")
    ax.set_xlabel(angle + ("   (dots: the ones trained on)" if config.is_rendered else ""))
    if config.is_rendered:
        marks = np.unique(getattr(run.data.train, f"{angle}s") % (360 if circular else 1e9))
        ax.plot(marks, np.full(len(marks), 0.03), ".", color=TRAINED, markersize=7, zorder=2, clip_on=False)
    return fig


def draw_class_poses(run: Run) -> Figure:
    config = run.config
    azimuths, elevations = viewpoint_pair(config, run.data)
    views = pick_views(config, run.data, azimuths, elevations)
    scores, cache = capsule_outputs(run, views.images)
    side, n = experiment.POSE_SIDE, experiment.N_CLASSES
    poses = cache.mu.reshape(n, 2, n, side, side)
    limit = float(np.percentile(np.abs(poses), 96))  # a few large entries would make all others pale
    left, cell, gap, label_gap, block_gap, top = 0.72, 0.59, 0.06, 0.2, 0.26, 1.42
    row, block = cell + label_gap, (n + 1) * (cell + gap) + 0.06
    fig = new_figure(top + n * row + 0.55, "Pose matrices of the class capsules", subtitle(config))
    for b, (word, colour) in enumerate((("familiar view", TRAINED), ("held-out view", HELD_OUT))):
        x0 = left + b * (block + block_gap)
        where = f"{word}: azimuth {azimuths[b] % 360:g}°, elevation {elevations[b]:g}°"
        add_text(fig, x0, 0.74, where, color=darkened(colour), fontweight="bold")
        add_text(fig, x0 + cell / 2, 1.0, "image", ha="center", fontsize=9)
        for k, name in enumerate(config.classes):
            x = x0 + cell + gap + 0.06 + k * (cell + gap)
            add_text(fig, x + cell / 2, 1.0, name, ha="center", fontsize=9)
            y = top + k * row
            add_view(fig, x0, y, cell, views.images[2 * k + b], colour, 2)
            predicted = int(scores[2 * k + b].argmax())
            for j in range(n):
                x = x0 + cell + gap + 0.06 + j * (cell + gap)
                ax = add_axes(fig, x, y, cell, cell)
                drawn = ax.imshow(poses[k, b, j], cmap="RdBu_r", vmin=-limit, vmax=limit)
                add_frame(ax, "#bbbbbb", 0.6)
                if j == predicted:
                    add_frame(ax, RIGHT if j == k else WRONG, 3.2)
                bold = "bold" if j == predicted else "normal"
                score = with_minus_sign(f"{scores[2 * k + b, j]:.1f}")
                add_text(fig, x + cell / 2, y - 0.02, score, ha="center", va="bottom", fontsize=9, fontweight=bold)
    for k, name in enumerate(config.classes):
        add_text(fig, left - 0.1, top + k * row + cell / 2, name, ha="right", va="center", fontsize=10)
    foot = top + n * row + 0.12
    bar = add_colourbar(fig, drawn, left, foot, 1.9, extend="both")
    bar.xaxis.set_major_locator(MaxNLocator(nbins=5, symmetric=True))
    add_text(fig, left + 2.0, foot - 0.02, "pose entry")
    add_text(fig, left + 3.1, foot - 0.02, "number: score")
    handles = [
        Patch(facecolor="white", edgecolor=RIGHT, linewidth=2.5, label="predicted, right"),
        Patch(facecolor="white", edgecolor=WRONG, linewidth=2.5, label="predicted, wrong"),
    ]
    add_legend(fig, WIDTH - 0.1, foot - 0.02, handles, loc="upper right", ncols=2, columnspacing=1.4, handletextpad=0.6)
    return fig


OTHER_CLASS: dict[str, Any] = {"marker": "o", "markersize": 3, "markerfacecolor": "white", "markeredgewidth": 0.7}


def draw_pose_curves(run: Run) -> Figure:
    """Noise-free views of both objects that do not look the same after half a turn, every 6 degrees."""
    config, side = run.config, experiment.POSE_SIDE
    azimuths, elevation = np.arange(0.0, 361, 6), middle(config, run.data, "elevation", "train")
    gap, left, top, height = 0.14, 0.95, 1.3, 0.88
    width = (WIDTH - left - 0.15 - (side - 1) * gap) / side
    fig = new_figure(top + side * (height + gap) + 0.45, "Pose of the winning class capsule while the object turns",
                     f"{subtitle(config)} · elevation {elevation:g}°")  # fmt: skip
    axes = [
        [add_axes(fig, left + c * (width + gap), top + r * (height + gap), width, height) for c in range(side)]
        for r in range(side)
    ]
    handles, limit = [], 0.0
    for name, colour in zip(experiment.HARD_CLASSES, (BLUE, ORANGE), strict=True):
        k = experiment.VOXEL_CLASSES.index(name)
        views = np.full(len(azimuths), k), azimuths, np.full(len(azimuths), elevation)
        scores, cache = capsule_outputs(run, experiment.voxel_split(config, *views, None).images)
        winner = scores.argmax(axis=1)
        poses = cache.mu[np.arange(len(winner)), winner]  # (A, D)
        limit = max(limit, float(np.abs(poses).max()))
        wrong = winner != k
        for d, entries in enumerate(poses.T):
            ax = axes[d // side][d % side]
            ax.plot(azimuths, np.where(wrong, np.nan, entries), color=colour, zorder=3)
            ax.plot(azimuths[wrong], entries[wrong], ls="", color=colour, zorder=3, **OTHER_CLASS)
        handles += [
            Line2D([], [], color=colour, label=name),
            Line2D([], [], color=colour, ls="", label=f"{name}, another class wins", **OTHER_CLASS),
        ]
    for r, c in np.ndindex(side, side):
        ax = axes[r][c]
        shade_range(ax, config.train_azimuths, TRAINED, "", circular=True)
        if config.held_out == "azimuth":
            shade_range(ax, config.test_azimuths, HELD_OUT, "", circular=True)
        ax.set(xlim=(0, 360), ylim=(-1.08 * limit, 1.08 * limit))
        ax.axhline(0, color=GREY, linewidth=0.7, zorder=1)
        ax.xaxis.set_major_locator(MultipleLocator(90))
        ax.xaxis.set_major_formatter((lambda x, _: f"{x:g}°" if x % 360 else "") if r == side - 1 else "")
        ax.yaxis.set_major_locator(MaxNLocator(nbins=3, symmetric=True))
        ax.tick_params(labelleft=c == 0)
    add_row_label(fig, left - 0.5, top + 2 * height + 1.5 * gap, "pose\nentry")
    add_text(fig, left + 2 * width + 1.5 * gap, top + side * (height + gap) + 0.2, "azimuth, in degrees", ha="center")
    shades = [Patch(color=lightened(TRAINED, 0.17), label="trained on")]
    if config.held_out == "azimuth":
        shades.append(Patch(color=lightened(HELD_OUT, 0.17), label="held out"))
    add_legend(fig, left, 0.68, [*handles, *shades], ncols=6, columnspacing=1.2, handlelength=1.4, handletextpad=0.5)
    add_text(fig, left, 0.96, "a panel is an entry of the 4×4 matrix, at its place")
    return fig


def draw_confusion(run: Run) -> Figure:
    config, split, n = run.config, run.data.held_out, experiment.N_CLASSES
    left, top, side, gap = 1.0, 1.2, 2.4, 0.25
    fig = new_figure(top + side + 0.95, "What held-out views are taken for", subtitle(config))
    for m, (name, state) in enumerate(run.states.items()):
        answers = experiment.predict_scores(run.models[name], state.params, split.images).argmax(axis=1)
        counts = confusion_matrix(split.labels, answers, n)
        fractions = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))  # of the images of a class
        x = left + m * (side + gap)
        add_text(fig, x, 0.68, MODELS[name].label, color=darkened(MODELS[name].colour), fontweight="bold")
        add_text(fig, x, 0.91, f"accuracy {np.trace(counts) / counts.sum():.3f}")
        ax = add_axes(fig, x, top, side, side)
        drawn = ax.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
        ax.grid(False)
        ax.tick_params(length=0)
        ax.set_xticks(range(n), config.classes, rotation=35, ha="right", rotation_mode="anchor")
        ax.set_yticks(range(n), config.classes if m == 0 else [""] * n)
        for k, j in np.ndindex(n, n):
            if counts[k, j]:
                ax.text(j, k, f"{fractions[k, j]:.2f}", ha="center", va="center", fontsize=9.5,
                        color="white" if fractions[k, j] > 0.55 else BLACK)  # fmt: skip
        for k in range(n):
            ax.add_patch(Rectangle((k - 0.5, k - 0.5), 1, 1, fill=False, edgecolor=RIGHT, linewidth=1.6))
    foot = top + side + 0.55
    add_colourbar(fig, drawn, left, foot, 1.9)
    add_text(
        fig, left + 2.0, foot - 0.02, "fraction of a class's images (row) with each answer (column); framed: right"
    )
    return fig


def draw_routing_assignments(run: Run) -> Figure:
    config = run.config
    azimuths, elevations = viewpoint_pair(config, run.data)
    views = pick_views(config, run.data, azimuths, elevations)
    scores, cache = capsule_outputs(run, views.images)
    k = 1  # L, the class that changes most as it turns; the human of smallNORB
    iterations = [step.r for step in cache.routing.m_steps]  # each (N, I, J)
    shown = evenly_spaced_indices(len(iterations), 4)
    n_in, n = experiment.N_PRIMARY, experiment.N_CLASSES
    top, height, left, side = 1.28, 1.75, 0.18, 1.3
    maps_left, scores_left = left + side + 0.72, 7.62
    pitch = (scores_left - 0.65 - maps_left) / (len(shown) + 0.22)
    width = min(pitch - 0.14, 2.1)
    pitch = width + 0.14
    fig = new_figure(top + 2 * height + 0.34 + 1.25, f"EM routing of one {config.classes[k]}", subtitle(config))
    heading = "assignment $r_{ij}$ of each primary capsule (row) to each class capsule (column), even at first"
    add_text(fig, maps_left, 0.72, heading)
    for b, (word, colour) in enumerate((("familiar view", TRAINED), ("held-out view", HELD_OUT))):
        v, y = 2 * k + b, top + b * (height + 0.34)
        add_view(fig, left, y + 0.22, side, views.images[v], colour, 2.5)
        add_text(fig, left, y - 0.02, word, color=darkened(colour), fontweight="bold", fontsize=10)
        add_text(fig, left, y + 0.22 + side + 0.05, f"az. {azimuths[b] % 360:g}°, el. {elevations[b]:g}°", fontsize=9)
        for m, t in enumerate(shown):
            ax = add_axes(fig, maps_left + m * pitch, y, width, height)
            drawn = ax.imshow(iterations[t][v], cmap="cividis", vmin=0, vmax=1, aspect="auto")
            ax.grid(False)
            ax.spines[:].set_visible(False)
            ax.add_patch(
                Rectangle((k - 0.5, -0.5), 1, n_in, fill=False, edgecolor=VERMILLION, linewidth=2.2, clip_on=False)
            )
            ax.set_yticks(range(n_in), [str(i + 1) for i in range(n_in)] if m == 0 else [])
            ax.set_xticks(range(n), config.classes if b == 1 else [""] * n, rotation=90)
            ax.tick_params(length=0, pad=4)
            if b == 1:
                ax.get_xticklabels()[k].set(color=VERMILLION, fontweight="bold")
            else:
                ax.set_title(f"iteration {t + 1}")
            if m == 0:
                ax.set_ylabel("primary capsule")
        bars = add_axes(fig, maps_left + len(shown) * pitch, y, 0.42, height)
        bars.barh(range(n_in), cache.a_in[v], color=GREY, height=0.7)
        bars.set(ylim=(n_in - 0.5, -0.5), xlim=(0, 1), yticks=[])
        bars.set_xticks([0, 1], ["0", "1"] if b == 1 else ["", ""])
        bars.grid(False)
        result = add_axes(fig, scores_left + 0.12, y, 1.1, height)
        predicted = int(scores[v].argmax())
        colours = [BLUE if j == predicted else lightened(BLUE, 0.35) for j in range(n)]
        result.barh(range(n), scores[v], color=colours, height=0.7)
        result.set_yticks(range(n), config.classes)
        result.get_yticklabels()[k].set(color=VERMILLION, fontweight="bold")
        result.set_ylim(n - 0.5, -0.5)
        result.set_xlim(min(0, scores[2 * k : 2 * k + 2].min()), 1.05 * scores[2 * k : 2 * k + 2].max())
        result.tick_params(axis="y", length=0)
        result.grid(False, axis="y")
        result.xaxis.set_major_locator(MaxNLocator(nbins=3))
        if b == 0:
            bars.set_title("$a_i$")
            result.set_title("class score", loc="left")
    foot = top + 2 * height + 0.34 + 0.85
    add_colourbar(fig, drawn, maps_left, foot, 2.0)
    add_text(fig, maps_left + 2.1, foot - 0.02, "$r_{ij}$")
    add_text(fig, maps_left + 2.7, foot - 0.02, "$a_i$: activation of capsule $i$")
    add_text(fig, WIDTH - 0.15, foot - 0.02, "framed: the true class", color=VERMILLION, fontweight="bold", ha="right")
    return fig


def read_pairs(folder: Path, n: int = 6) -> dict[str, Split]:
    """``n`` stereo pairs of each official set, spread over the file."""

    def spread(azimuths: Array, _: Array) -> Array:
        chosen = np.zeros(len(azimuths), bool)
        chosen[evenly_spaced_indices(len(chosen), n)] = True
        return chosen

    for subset in NORB_SETS:
        for part in ("dat", "cat", "info"):
            try:
                norb_path(folder, subset, part)
            except UserError:
                raise UserError(f"{folder} has no {subset} {part} file of smallNORB for --smallnorb-dir") from None
    return {subset: experiment.read_smallnorb(folder, subset, spread) for subset in NORB_SETS}


def draw_smallnorb_pairs(pairs: dict[str, Split]) -> Figure:
    left, top, gap = 0.12, 0.98, 0.1
    width = (WIDTH - 2 * left - 5 * gap) / 6
    half = width / 2
    row = half + 0.62
    fig = new_figure(
        top + 3 * row - 0.2,
        "Real smallNORB objects, and the voxel objects that stand in for them",
        "smallNORB: stereo pairs, left and right eye, shrunk to 48x48 pixels · voxel objects: 32x32 pixels",
    )

    def two(r: int, m: int, images: Sequence[Array], text: str) -> None:
        """Two pictures side by side and a line below them, in row r and column m."""
        x, y = left + m * (width + gap), top + r * row
        for e, image in enumerate(images):
            add_view(fig, x + e * half, y, half, image)
        add_text(fig, x, y + half + 0.05, text, fontsize=9)

    for r, (subset, split) in enumerate(pairs.items()):
        add_text(fig, left, top + r * row - 0.22, f"smallNORB, {subset} set", fontweight="bold")
        for m in range(min(6, len(split.labels))):
            eyes = [split.images[m][..., e : e + 1] for e in range(2)]
            name = experiment.SMALLNORB_CLASSES[split.labels[m]]
            two(r, m, eyes, f"{name}, {split.azimuths[m]:g}° / {split.elevations[m]:g}°")
    add_text(fig, WIDTH - left, top - 0.22, "below each: class, azimuth / elevation", ha="right", color=GREY)
    add_text(fig, left, top + 2 * row - 0.22, "voxel objects at elevation 30°", fontweight="bold")
    for k, name in enumerate(experiment.VOXEL_CLASSES):
        images = experiment.render_voxels(np.array([k, k]), np.array([60.0, 240]), np.array([30.0, 30]), None)
        two(2, k, images, f"{name}, 60° and 240°")  # type: ignore[arg-type]
    return fig


def drawers(run: Run, seeds: dict[str, Array], pairs: dict[str, Split] | None) -> dict[str, Callable[[], Figure]]:
    """Name of each figure of a run, and what draws it (within ``figure_style``)."""
    found: dict[str, Callable[[], Figure]] = {
        "example_views": lambda: draw_views(run, "azimuth", 6, "The five classes, turning in azimuth"),
        "elevation_strip": lambda: draw_views(run, "elevation", 5, "The five classes, seen from rising elevations"),
        "training_curves": lambda: draw_training_curves(run),
        "extrapolation_bars": lambda: draw_extrapolation_bars(run, seeds),
        "azimuth_accuracy": lambda: draw_angle_accuracy(run, "azimuth"),
        "class_poses": lambda: draw_class_poses(run),
        "held_out_confusion": lambda: draw_confusion(run),
        "routing_assignments": lambda: draw_routing_assignments(run),
    }
    if run.config.held_out == "elevation":
        found["elevation_accuracy"] = lambda: draw_angle_accuracy(run, "elevation")
    if run.config.dataset == "voxels":
        found["pose_curves"] = lambda: draw_pose_curves(run)
    if pairs:
        found["smallnorb_pairs"] = lambda: draw_smallnorb_pairs(pairs)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Files and command line
# ----------------------------------------------------------------------------------------------------------------------


RESULTS = Path("results") / experiment.EXPERIMENT / "azimuths.json"
BOTH_ACCURACIES = ("familiar_accuracy", "held_out_accuracy")


@dataclasses.dataclass(frozen=True)
class Options(FigureOptions):
    results: tuple[Path, ...] = setting(
        (RESULTS,), input_path, "In extrapolation_bars.png, draw a point for each seed in these JSON files."
    )
    smallnorb_dir: Path | None = setting(
        None, folder, "Draw stereo pairs of these official smallNORB files; a sample will do.", usual=True
    )


@script
def main(argv: Sequence[str] | None = None) -> None:
    config, options, given = parse(
        Config, Options, argv,
        "Draw the figures of the novel-viewpoint experiment, from a checkpoint or after training its models.",
        [
            ("", "All figures, after training the three models for ten epochs: about 12 seconds."),
            ("--checkpoint run.safetensors", "All figures of these networks: about 9 seconds."),
        ],
        f"The figures go to DIR/{experiment.EXPERIMENT}/, where DIR is --outdir.",
    )  # fmt: skip
    require_writable(options.outdir / experiment.EXPERIMENT / "training_curves.png")
    config, states = load_finished(
        experiment, options.checkpoint, config, given, required=MODELS,
        length=lambda name, config: experiment.of_model(name, config)[0],
    )  # fmt: skip
    results = [path for path in options.results if path.exists() or "results" in given]
    seeds = read_seeds(results, config, config.dataset, BOTH_ACCURACIES)
    require_runs(given.get("results"), seeds)
    pairs = read_pairs(options.smallnorb_dir) if options.smallnorb_dir else None
    with blas_threads(options.threads):
        data = experiment.make_data(config)
        require_every_class(config, data)
        states = states or experiment.train_all(config, data, RunOptions(quiet=options.quiet))
        print(f"{experiment.describe(config)}; seed {config.seed}, {config.n_epochs} epochs")
        print(experiment.format_table(experiment.make_result(config, states, data)))
        drawn = drawers(Run(config, data, experiment.make_models(config), states), seeds, pairs)
        write_figures(options.outdir / experiment.EXPERIMENT, drawn)


if __name__ == "__main__":
    sys.exit(main())
