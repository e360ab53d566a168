#!/usr/bin/env python3
"""Draw the figures of the novel-viewpoint experiment into ``DIR/smallnorb_novel_viewpoint/``.

    python visualize_smallnorb_novel_viewpoint.py --seed 1 --n-epochs 10

trains the three models and draws; ``--checkpoint FILE`` draws what ``smallnorb_novel_viewpoint.py --checkpoint FILE``
has trained. The same run gives the same files byte for byte, and a file that would not change is left alone.

    example_views.png         every class from training and held-out viewpoints
    elevation_strip.png       the same objects at rising elevations
    training_curves.png       loss and both accuracies, epoch by epoch
    extrapolation_bars.png    familiar against held-out accuracy, and every seed of a results file as a point
    azimuth_accuracy.png      accuracy over the full circle, on images drawn for this figure alone
    elevation_accuracy.png    the same over elevations, where elevation is held out
    class_poses.png           pose matrices of the class capsules, a familiar and a held-out view of each class
    routing_assignments.png   how EM shares the primary capsules out among the classes, iteration by iteration
    smallnorb_pairs.png       real smallNORB stereo pairs beside the voxel classes (needs files, see --smallnorb-dir)
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator, NullFormatter

import smallnorb_novel_viewpoint as experiment
from smallnorb_novel_viewpoint import Array, Config, Data, Model, Range, Split, Stream, TrainState, UserError

# ----------------------------------------------------------------------------------------------------------------------
# Style: one for all figures and the GIF
# ----------------------------------------------------------------------------------------------------------------------

DPI = 100
WIDTH = 9.0  # inches: 900 pixels, about the width of a README

# Okabe & Ito's palette, told apart with every kind of colour vision
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY = "#555555"
TRAINED, HELD_OUT = GREEN, PURPLE  # ranges of viewpoints
RIGHT, WRONG = GREEN, VERMILLION  # answers

STYLE = {
    "figure.dpi": DPI,
    "savefig.dpi": DPI,
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.labelsize": 9.5,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "hatch.linewidth": 1.2,
}


class ModelStyle(NamedTuple):
    label: str
    colour: str
    marker: str


MODEL_STYLES = {
    "capsules": ModelStyle("Matrix capsules", BLUE, "o"),
    "cnn": ModelStyle("CNN, 64 units", ORANGE, "s"),
    "cnn_matched": ModelStyle("CNN, as many parameters", VERMILLION, "^"),
}


def house_style() -> Any:
    """Context in which all drawing happens: matplotlib's defaults, whatever the user's own are, then ours."""
    return matplotlib.style.context(["default", STYLE])


def new_figure(height: float, title: str, subtitle: str, width: float = WIDTH) -> Figure:
    """A canvas with a title and a grey line below it; they take the upper 0.6 inches."""
    fig = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(fig)
    write(fig, 0.12, 0.12, title, fontsize=12.5, fontweight="bold")
    write(fig, 0.12, 0.37, subtitle, color=GREY)
    return fig


def write(fig: Figure, x: float, y: float, text: str, **style: Any) -> Any:
    """A line whose left end and top lie x, y inches from the figure's upper left corner. Lines of one y share their
    base line, whatever letters they have."""
    width, height = fig.get_size_inches()
    if "va" not in style:
        y, style["va"] = y + 0.76 * style.get("fontsize", STYLE["font.size"]) / 72, "baseline"
    return fig.text(x / width, 1 - y / height, text, **{"ha": "left", **style})


def place(fig: Figure, x: float, y: float, width: float, height: float, **options: Any) -> Axes:
    """Axes whose upper left corner lies x, y inches from the figure's."""
    w, h = fig.get_size_inches()
    return fig.add_axes((x / w, 1 - (y + height) / h, width / w, height / h), **options)


def frame(ax: Axes, colour: str, width: float = 2.0) -> None:
    """A coloured frame in the place of ticks."""
    ax.set(xticks=[], yticks=[])
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set(visible=True, color=colour, linewidth=width)


def grey_levels(image: Array) -> Array:
    """A network's input (H, W, C) as grey levels in [0, 1]: the left eye; stretched where it is a normalised one."""
    eye = image[..., 0]
    if eye.min() >= 0 and eye.max() <= 1:
        return eye
    low, high = np.percentile(eye, [0.5, 90])  # the background is the larger part, and bright
    return np.clip((eye - low) / max(high - low, 1e-6), 0, 1)


def show_image(ax: Axes, image: Array, colour: str, width: float = 2.0) -> Any:
    frame(ax, colour, width)
    return ax.imshow(grey_levels(image), cmap="gray", vmin=0, vmax=1, interpolation="nearest")


def tint(colour: str | tuple[float, float, float], share: float) -> tuple[float, float, float]:
    """A colour mixed with white."""
    r, g, b = (1 - share * (1 - part) for part in to_rgb(colour))
    return r, g, b


def ink(colour: str) -> tuple[float, float, float]:
    """A colour darkened, for text."""
    r, g, b = (0.72 * part for part in to_rgb(colour))
    return r, g, b


def accuracy_axis(
    ax: Axes,
    label: str | None = "accuracy",
    chance: float = 1 / experiment.N_CLASSES,
    name: str = "",
    side: Literal["left", "right"] = "right",
) -> None:
    """From 0 to 1, with the line of a blind guess; ``name`` is how its height is written, ``side`` where."""
    ax.set_ylim(0, 1.04)
    ax.set_yticks(np.arange(0, 1.01, 0.2))
    ax.axhline(chance, color=BLACK, linewidth=1.1, linestyle=(0, (2, 2)), zorder=1.5)
    ax.annotate(
        f"chance {name or format(chance, 'g')}", (0 if side == "left" else 1, chance),
        xycoords=("axes fraction", "data"), xytext=(3 if side == "left" else -3, 3),
        textcoords="offset points", ha=side, va="bottom", fontsize=9, zorder=6,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
    )  # fmt: skip
    if label:
        ax.set_ylabel(label)


def shade(ax: Axes, span: Range, colour: str, text: str, *, circular: bool) -> None:
    """Shade a range of angles and name it; an azimuth range may pass 360 and is then drawn in two parts."""
    low, high = span
    parts = [(low, high)]
    if circular:
        start = low % 360
        stop = start + high - low
        parts = [(start, min(stop, 360.0))] + ([(0.0, stop - 360)] if stop > 360 else [])
    for a, b in parts:
        ax.axvspan(a, b, color=tint(colour, 0.17), linewidth=0, zorder=0)
    a, b = max(parts, key=lambda part: part[1] - part[0])
    ax.annotate(
        text, ((a + b) / 2, 1), xycoords=("data", "axes fraction"), xytext=(0, 3), textcoords="offset points",
        ha="center", va="bottom", color=ink(colour), fontweight="bold",
    )  # fmt: skip


def model_line(name: str, styles: dict[str, ModelStyle] = MODEL_STYLES, **more: Any) -> dict[str, Any]:
    style = styles[name]
    look = {"color": style.colour, "marker": style.marker, "label": style.label, "markeredgecolor": "white"}
    return {**look, "markeredgewidth": 0.7, **more}


def model_legend(
    fig: Figure, x: float, y: float, names: Sequence[str], styles: dict[str, ModelStyle] = MODEL_STYLES
) -> None:
    """One line of legend whose upper left corner lies x, y inches from the figure's."""
    width, height = fig.get_size_inches()
    fig.legend(
        [Line2D([], [], **model_line(name, styles)) for name in names], [styles[name].label for name in names],
        loc="upper left", bbox_to_anchor=(x / width, 1 - y / height), ncols=len(names), borderpad=0, borderaxespad=0,
        columnspacing=2.0, handletextpad=0.6,
    )  # fmt: skip


def degrees(span: Range) -> str:
    return f"{span[0]:g}–{span[1]:g}°"


def subtitle(config: Config) -> str:
    """What every figure says of its run: data set, what is held out, seed."""
    seen, unseen = (getattr(config, f"{part}_{config.held_out}s") for part in ("train", "test"))
    name = "voxel objects" if config.dataset == "voxels" else "smallNORB"
    return f"{name} · held-out {config.held_out}s {degrees(unseen)}, trained on {degrees(seen)} · seed {config.seed}"


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

    Voxel objects are drawn for the purpose; of smallNORB it is the test image whose viewpoint comes nearest.
    """
    labels, azimuths, elevations = (
        np.repeat(np.arange(experiment.N_CLASSES), len(azimuths)),
        np.tile(np.asarray(azimuths, float), experiment.N_CLASSES),
        np.tile(np.asarray(elevations, float), experiment.N_CLASSES),
    )
    if config.dataset == "voxels":
        rng = experiment.generator(config.seed, Stream.EVALUATION, VIEWS_KEY)
        return Split(experiment.render_voxels(labels, azimuths, elevations, rng), labels, azimuths, elevations)
    split = testing_split(data)
    turn = np.abs((split.azimuths - azimuths[:, None] + 180) % 360 - 180)  # (views, N)
    distance = turn + np.abs(split.elevations - elevations[:, None]) + np.where(split.labels == labels[:, None], 0, 1e9)
    return Split(*(part[distance.argmin(axis=1)] for part in split))


def shown_angles(config: Config, data: Data, angle: str, part: str, n: int) -> Array:
    """At most ``n`` angles spread over the training ("train") or held-out ("test") range, in its order."""
    span: Range = getattr(config, f"{part}_{angle}s")
    if config.dataset == "voxels":
        return experiment.evenly_spaced(span, n)
    split = data.familiar if part == "train" else data.held_out
    there = np.unique(getattr(split, f"{angle}s"))
    if angle == "azimuth":
        there = there[np.argsort((there - span[0]) % 360)]
    return there[np.unique(np.linspace(0, len(there) - 1, n).round().astype(int))]


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


def capsules_look(run: Run, images: Array) -> tuple[Array, Any]:
    """Scores and cache of the capsule network."""
    x = experiment.crop(images, None).astype(run.config.dtype, copy=False)
    return experiment.make_models(run.config)["capsules"].forward(run.states["capsules"].params, x)


def accuracy_by_angle(run: Run, angle: str) -> tuple[Array, dict[str, Array]]:
    """Angles (A,) and each model's accuracy at every one of them.

    Voxels: fresh images every 10 degrees of azimuth, or 5 of elevation, the other angle within the training range.
    smallNORB: the test images, by their angle.
    """
    config = run.config
    if config.dataset == "voxels":
        if angle == "azimuth":
            azimuths, elevations = np.arange(0.0, 360, 10), experiment.evenly_spaced(config.train_elevations, 5)
            rng = experiment.generator(config.seed, Stream.EVALUATION, AZIMUTH_KEY)
        else:
            bounds = (*config.train_elevations, *config.test_elevations)
            low, high = max(-90, 5 * np.floor(min(bounds) / 5) - 10), min(90, 5 * np.ceil(max(bounds) / 5) + 10)
            azimuths, elevations = experiment.evenly_spaced(config.train_azimuths, 8), np.arange(low, high + 1, 5)
            rng = experiment.generator(config.seed, Stream.EVALUATION, ELEVATION_KEY)
        split = experiment.voxel_views(azimuths, elevations, NOISE_DRAWS, rng)
    else:
        split = testing_split(run.data)
    angles, where = np.unique(getattr(split, f"{angle}s"), return_inverse=True)
    accuracy = {}
    for name, model in run.models.items():
        right = experiment.predict_scores(model, run.states[name].params, split.images).argmax(axis=1) == split.labels
        accuracy[name] = np.bincount(where, right) / np.bincount(where)
    return angles, accuracy


# ----------------------------------------------------------------------------------------------------------------------
# Results of many seeds
# ----------------------------------------------------------------------------------------------------------------------

BOTH_ACCURACIES = ("familiar_accuracy", "held_out_accuracy")


def accuracies(metrics: Any, names: Sequence[str]) -> list[float] | None:
    """The named figures of one model; None where they are not there, or are statistics of many runs."""
    found = [metrics.get(name) for name in names] if isinstance(metrics, dict) else [None]
    values = [float(value) for value in found if isinstance(value, (int, float))]
    return values if len(values) == len(found) else None


def find_runs(node: Any, names: Sequence[str], config: Any = None, dataset: Any = None) -> Iterator[dict[str, Any]]:
    """Every run's result in a JSON tree, however nested; a configuration, and the data set's name, hold for all below
    that have none."""
    if isinstance(node, list):
        for child in node:
            yield from find_runs(child, names, config, dataset)
    elif isinstance(node, dict):
        config = node["config"] if isinstance(node.get("config"), dict) else config
        dataset = node["dataset"] if isinstance(node.get("dataset"), str) else dataset
        models = node.get("models")
        if isinstance(models, dict) and any(accuracies(m, names) for m in models.values()):
            yield {"models": models, "config": config, "dataset": dataset}
            return
        for child in node.values():
            yield from find_runs(child, names, config, dataset)


def read_runs(
    path: Path, config: Any, dataset: str, names: Sequence[str], free: Collection[str] = ("seed", "data_dir")
) -> Iterator[dict[str, Any]]:
    """The models of each of the file's runs on this data set with this configuration, the fields ``free`` aside.

    A field that the file does not have came later, and the run had its default. Raises UserError where the file cannot
    be read.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no results file {path}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable results file: {error}") from error
    defaults, asked = (json.loads(json.dumps(dataclasses.asdict(c))) for c in (type(config)(), config))
    asked["dataset"] = dataset
    for found in find_runs(tree, names):
        theirs = defaults | (found["config"] or {})
        theirs["dataset"] = found["dataset"] or theirs["dataset"]
        if all(theirs[key] == value for key, value in asked.items() if key not in free):
            yield found["models"]


def read_seeds(path: Path, config: Any, dataset: str, names: Sequence[str] = BOTH_ACCURACIES) -> dict[str, Array]:
    """Per model, the named accuracies (n, len(names)) of the file's runs on this data set with this configuration,
    seed aside. Raises UserError where the file cannot be read."""
    points: dict[str, list[list[float]]] = {}
    for models in read_runs(path, config, dataset, names):
        for name, metrics in models.items():
            if values := accuracies(metrics, names):
                points.setdefault(name, []).append(values)
    return {name: np.array(rows) for name, rows in points.items()}


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
        bar = place(fig, x, 0.72, width, 0.24)
        bar.set(xticks=[], yticks=[], facecolor=tint(colour, 0.25))
        bar.spines[:].set_visible(False)
        bar.text(
            0.5, 0.46, text, color=ink(colour), ha="center", va="center", fontweight="bold", transform=bar.transAxes
        )
        images = split.images.reshape(experiment.N_CLASSES, len(columns), *split.images.shape[1:])
        for m, label in enumerate(columns):
            write(fig, x + m * (cell + gap) + cell / 2, 1.0, label, ha="center", fontsize=9)
            for k in range(experiment.N_CLASSES):
                show_image(place(fig, x + m * (cell + gap), top + k * (cell + gap), cell, cell), images[k, m], colour)
        x += width + block_gap
    for k, name in enumerate(config.classes):
        write(fig, left - 0.1, top + k * (cell + gap) + cell / 2, name, ha="right", va="center", fontsize=10)
    return fig


def draw_example_views(run: Run) -> Figure:
    config, data = run.config, run.data
    heads, labels, blocks = [], [], []
    for part, word, colour in (("train", "trained on", TRAINED), ("test", "held out", HELD_OUT)):
        azimuths = shown_angles(config, data, "azimuth", part, 6)
        elevation = middle(config, data, "elevation", part)
        where = f"azimuth, at elevation {elevation:g}°"
        heads.append(
            (f"{word}: {where}" if config.held_out == "azimuth" else f"{word}: elevation {elevation:g}°", colour)
        )
        labels.append([f"{a % 360:.4g}°" for a in azimuths])
        blocks.append(pick_views(config, data, azimuths, np.full(len(azimuths), elevation)))
    return draw_view_grid(config, "The five classes, turning in azimuth", heads, labels, blocks)


def draw_elevation_strip(run: Run) -> Figure:
    config, data = run.config, run.data
    heads, labels, blocks = [], [], []
    for part, word, colour in (("train", "trained on", TRAINED), ("test", "held out", HELD_OUT)):
        elevations = shown_angles(config, data, "elevation", part, 5)
        azimuth = middle(config, data, "azimuth", part)
        where = f"azimuth {azimuth % 360:g}°"
        heads.append((f"{word}: {where}" if config.held_out == "azimuth" else f"{word}: elevation, at {where}", colour))
        labels.append([f"{e:.4g}°" for e in elevations])
        blocks.append(pick_views(config, data, np.full(len(elevations), azimuth), elevations))
    return draw_view_grid(config, "The five classes, seen from rising elevations", heads, labels, blocks)


def draw_training_curves(run: Run) -> Figure:
    fig = new_figure(3.75, "Training", subtitle(run.config))
    model_legend(fig, 0.62, 0.72, list(run.states))
    panels = (
        ("train_loss", "training loss"),
        ("familiar_accuracy", "accuracy, familiar viewpoints"),
        ("held_out_accuracy", "accuracy, held-out viewpoints"),
    )
    for p, (metric, label) in enumerate(panels):
        ax = place(fig, 0.62 + p * 2.87, 1.3, 2.5, 1.9)
        if metric == "train_loss":
            losses = np.maximum(np.concatenate([state.history[metric] for state in run.states.values()]), 1e-8)
            ax.set_yscale("log")
            ax.set_ylim(10 ** np.floor(np.log10(losses.min())), 10 ** np.ceil(np.log10(losses.max()) + 1e-6))
            ax.yaxis.set_minor_formatter(NullFormatter())
        else:
            accuracy_axis(ax, label=None)
        for name, state in run.states.items():
            values = np.array(state.history[metric])
            epochs = np.arange(1, len(values) + 1)
            if metric == "train_loss":
                values = np.maximum(values, 1e-8)
            ax.plot(epochs, values, **model_line(name), markevery=max(1, len(values) // 10), clip_on=False, zorder=3)
        ax.set_title(label, loc="left")
        ax.set_xlabel("epoch")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
        ax.set_xlim(0.6, len(values) + 0.4)
    return fig


def draw_extrapolation_bars(run: Run, seeds: dict[str, Array]) -> Figure:
    """``seeds``: per model, accuracies (n, 2) of other seeds' runs; empty where there are none."""
    fig = new_figure(4.5, "What a new viewpoint costs", subtitle(run.config))
    ax = place(fig, 0.62, 1.12, WIDTH - 0.75, 2.95)
    accuracy_axis(ax)
    bar, n_points = 0.3, 0
    rng = np.random.default_rng(0)  # spreads the points sideways, nothing else
    for k, (name, state) in enumerate(run.states.items()):
        colour = MODEL_STYLES[name].colour
        heights = [state.history[f"{part}_accuracy"][-1] for part in ("familiar", "held_out")]
        looks: list[dict[str, Any]] = [
            {"facecolor": colour, "edgecolor": colour},
            {"facecolor": tint(colour, 0.3), "edgecolor": colour, "hatch": "//"},
        ]
        for b, (height, look) in enumerate(zip(heights, looks, strict=True)):
            x = k + (b - 0.75) * (bar + 0.02)
            ax.bar(x, height, bar, linewidth=1.2, zorder=2, **look)
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
    ax.set_xticks(range(len(run.states)), [MODEL_STYLES[name].label for name in run.states], fontsize=10.5)
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(-0.5, len(run.states) - 0.5 + 0.1)
    ax.grid(False, axis="x")
    handles: list[Any] = [
        Patch(facecolor=GREY, edgecolor=GREY, label="familiar viewpoints"),
        Patch(facecolor=tint(GREY, 0.3), edgecolor=GREY, hatch="//", label="held-out viewpoints"),
    ]
    if n_points:
        handles.append(
            Line2D([], [], ls="", marker="o", markersize=4.5, color="white", markeredgecolor=BLACK,
                   label=f"one point for each of {n_points} seeds")
        )  # fmt: skip
    fig.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.62 / WIDTH, 1 - 0.72 / 4.5), ncols=3, borderpad=0,
        borderaxespad=0, columnspacing=2.0,
    )  # fmt: skip
    return fig


def draw_angle_accuracy(run: Run, angle: str) -> Figure:
    config = run.config
    angles, accuracy = accuracy_by_angle(run, angle)
    circular = angle == "azimuth"
    fig = new_figure(4.1, f"Accuracy at every {angle}", subtitle(config))
    model_legend(fig, 0.62, 0.72, list(run.states))
    ax = place(fig, 0.62, 1.3, WIDTH - 0.8, 2.25)
    accuracy_axis(ax)
    seen, unseen = (getattr(config, f"{part}_{angle}s") for part in ("train", "test"))
    if config.held_out == angle:
        shade(ax, seen, TRAINED, "trained on", circular=circular)
        shade(ax, unseen, HELD_OUT, "held out", circular=circular)
    else:
        at = f"trained on, at {config.held_out}s {degrees(config.train_elevations)}"
        shade(ax, seen, TRAINED, at, circular=circular)
    for name, values in accuracy.items():
        x, y = angles, values
        if circular:  # 360 is 0 again
            x, y = np.append(angles, angles[0] + 360), np.append(values, values[0])
        ax.plot(x, y, **model_line(name), clip_on=False, zorder=3 + (name == "capsules"))
    if circular:
        ax.set_xlim(0, 360)
        ax.set_xticks(np.arange(0, 361, 30))
    else:
        ax.set_xlim(angles[0], angles[-1])
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}°")
    ax.set_xlabel(angle + ("   (dots: the ones trained on)" if config.dataset == "voxels" else ""))
    if config.dataset == "voxels":
        marks = np.unique(getattr(run.data.train, f"{angle}s") % (360 if circular else 1e9))
        ax.plot(marks, np.full(len(marks), 0.03), ".", color=TRAINED, markersize=7, zorder=2, clip_on=False)
    return fig


def draw_class_poses(run: Run) -> Figure:
    config = run.config
    azimuths, elevations = viewpoint_pair(config, run.data)
    views = pick_views(config, run.data, azimuths, elevations)
    scores, cache = capsules_look(run, views.images)
    side, n = experiment.POSE_SIDE, experiment.N_CLASSES
    poses = cache.mu.reshape(n, 2, n, side, side)
    limit = float(np.percentile(np.abs(poses), 96))  # a few large entries would make all others pale
    left, cell, gap, label_gap, block_gap, top = 0.72, 0.59, 0.06, 0.2, 0.26, 1.42
    row, block = cell + label_gap, (n + 1) * (cell + gap) + 0.06
    fig = new_figure(top + n * row + 0.55, "Pose matrices of the class capsules", subtitle(config))
    for b, (word, colour) in enumerate((("familiar view", TRAINED), ("held-out view", HELD_OUT))):
        x0 = left + b * (block + block_gap)
        where = f"{word}: azimuth {azimuths[b] % 360:g}°, elevation {elevations[b]:g}°"
        write(fig, x0, 0.74, where, color=ink(colour), fontweight="bold")
        write(fig, x0 + cell / 2, 1.0, "image", ha="center", fontsize=9)
        for k, name in enumerate(config.classes):
            x = x0 + cell + gap + 0.06 + k * (cell + gap)
            write(fig, x + cell / 2, 1.0, name, ha="center", fontsize=9)
            y = top + k * row
            show_image(place(fig, x0, y, cell, cell), views.images[2 * k + b], colour)
            predicted = int(scores[2 * k + b].argmax())
            for j in range(n):
                x = x0 + cell + gap + 0.06 + j * (cell + gap)
                ax = place(fig, x, y, cell, cell)
                drawn = ax.imshow(poses[k, b, j], cmap="RdBu_r", vmin=-limit, vmax=limit)
                frame(ax, "#bbbbbb", 0.6)
                if j == predicted:
                    frame(ax, RIGHT if j == k else WRONG, 3.2)
                bold = "bold" if j == predicted else "normal"
                write(fig, x + cell / 2, y - 0.02, f"{cache.a[2 * k + b, j]:.2f}", ha="center", va="bottom",
                      fontsize=9, fontweight=bold)  # fmt: skip
    for k, name in enumerate(config.classes):
        write(fig, left - 0.1, top + k * row + cell / 2, name, ha="right", va="center", fontsize=10)
    foot = top + n * row + 0.12
    bar = place(fig, left, foot, 1.9, 0.12)
    fig.colorbar(drawn, cax=bar, orientation="horizontal", extend="both")
    bar.grid(False)
    bar.xaxis.set_major_locator(MaxNLocator(nbins=5, symmetric=True))
    write(fig, left + 2.0, foot - 0.02, "pose entry")
    write(fig, left + 3.1, foot - 0.02, "number: activation")
    fig.legend(
        handles=[
            Patch(facecolor="white", edgecolor=RIGHT, linewidth=2.5, label="predicted, right"),
            Patch(facecolor="white", edgecolor=WRONG, linewidth=2.5, label="predicted, wrong"),
        ],
        loc="upper right", bbox_to_anchor=(1 - 0.1 / WIDTH, 1 - (foot - 0.02) / fig.get_size_inches()[1]), ncols=2,
        borderpad=0, borderaxespad=0, columnspacing=1.4, handletextpad=0.6,
    )  # fmt: skip
    return fig


def draw_routing_assignments(run: Run) -> Figure:
    config = run.config
    azimuths, elevations = viewpoint_pair(config, run.data)
    views = pick_views(config, run.data, azimuths, elevations)
    scores, cache = capsules_look(run, views.images)
    k = 1  # L, the class that changes most as it turns; the human of smallNORB
    iterations, a_in = [iteration.r for iteration in cache.routing.iterations], cache.a_in  # R (N, I, J); (N, I)
    shown = np.unique(np.linspace(0, len(iterations) - 1, min(4, len(iterations))).round().astype(int))
    n_in, n = a_in.shape[1], experiment.N_CLASSES
    top, height, left, side = 1.28, 1.75, 0.18, 1.3
    maps_left, scores_left = left + side + 0.72, 7.62
    pitch = (scores_left - 0.65 - maps_left) / (len(shown) + 0.22)
    width = min(pitch - 0.14, 2.1)
    pitch = width + 0.14
    fig = new_figure(top + 2 * height + 0.34 + 1.25, f"EM routing of one {config.classes[k]}", subtitle(config))
    write(
        fig,
        maps_left,
        0.72,
        "share R of each primary capsule (row) that goes to each class capsule (column), even at first",
    )
    for b, (word, colour) in enumerate((("familiar view", TRAINED), ("held-out view", HELD_OUT))):
        v, y = 2 * k + b, top + b * (height + 0.34)
        picture = place(fig, left, y + 0.22, side, side)
        show_image(picture, views.images[v], colour, 2.5)
        write(fig, left, y - 0.02, word, color=ink(colour), fontweight="bold", fontsize=10)
        write(fig, left, y + 0.22 + side + 0.05, f"az. {azimuths[b] % 360:g}°, el. {elevations[b]:g}°", fontsize=9)
        for m, t in enumerate(shown):
            ax = place(fig, maps_left + m * pitch, y, width, height)
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
        bars = place(fig, maps_left + len(shown) * pitch, y, 0.42, height)
        bars.barh(range(n_in), a_in[v], color=GREY, height=0.7)
        bars.set(ylim=(n_in - 0.5, -0.5), xlim=(0, 1), yticks=[])
        bars.set_xticks([0, 1], ["0", "1"] if b == 1 else ["", ""])
        bars.grid(False)
        result = place(fig, scores_left + 0.12, y, 1.1, height)
        predicted = int(scores[v].argmax())
        colours = [BLUE if j == predicted else tint(BLUE, 0.35) for j in range(n)]
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
    bar = place(fig, maps_left, foot, 2.0, 0.12)
    fig.colorbar(drawn, cax=bar, orientation="horizontal")
    bar.grid(False)
    write(fig, maps_left + 2.1, foot - 0.02, "R")
    write(fig, maps_left + 2.6, foot - 0.02, "$a_i$: activation of capsule $i$")
    write(fig, WIDTH - 0.15, foot - 0.02, "framed: the true class", color=VERMILLION, fontweight="bold", ha="right")
    return fig


def read_pairs(folder: Path, n: int = 6) -> dict[str, Split]:
    """``n`` stereo pairs of each official set, spread over the file."""

    def spread(azimuths: Array, _: Array) -> Array:
        chosen = np.zeros(len(azimuths), bool)
        chosen[np.linspace(0, len(chosen) - 1, n).round().astype(int)] = True
        return chosen

    for subset in experiment.NORB_SETS:
        for part in ("dat", "cat", "info"):
            try:
                experiment.norb_path(folder, subset, part)
            except UserError:
                raise UserError(f"{folder} has no {subset} {part} file of smallNORB for --smallnorb-dir") from None
    return {subset: experiment.read_smallnorb(folder, subset, spread) for subset in experiment.NORB_SETS}


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
            show_image(place(fig, x + e * half, y, half, half), image, GREY, 0.8)
        write(fig, x, y + half + 0.05, text, fontsize=9)

    for r, (subset, split) in enumerate(pairs.items()):
        write(fig, left, top + r * row - 0.22, f"smallNORB, {subset} set", fontweight="bold")
        for m in range(min(6, len(split.labels))):
            eyes = [split.images[m][..., e : e + 1] for e in range(2)]
            name = experiment.SMALLNORB_CLASSES[split.labels[m]]
            two(r, m, eyes, f"{name}, {split.azimuths[m]:g}° / {split.elevations[m]:g}°")
    write(fig, WIDTH - left, top - 0.22, "below each: class, azimuth / elevation", ha="right", color=GREY)
    write(fig, left, top + 2 * row - 0.22, "voxel objects at elevation 30°", fontweight="bold")
    for k, name in enumerate(experiment.VOXEL_CLASSES):
        images = experiment.render_voxels(np.array([k, k]), np.array([60.0, 240]), np.array([30.0, 30]), None)
        two(2, k, images, f"{name}, 60° and 240°")  # type: ignore[arg-type]
    return fig


def drawers(run: Run, seeds: dict[str, Array], pairs: dict[str, Split] | None) -> dict[str, Callable[[], Figure]]:
    """Name of each figure of a run, and what draws it (within ``house_style``)."""
    found: dict[str, Callable[[], Figure]] = {
        "example_views": lambda: draw_example_views(run),
        "elevation_strip": lambda: draw_elevation_strip(run),
        "training_curves": lambda: draw_training_curves(run),
        "extrapolation_bars": lambda: draw_extrapolation_bars(run, seeds),
        "azimuth_accuracy": lambda: draw_angle_accuracy(run, "azimuth"),
        "class_poses": lambda: draw_class_poses(run),
        "routing_assignments": lambda: draw_routing_assignments(run),
    }
    if run.config.held_out == "elevation":
        found["elevation_accuracy"] = lambda: draw_angle_accuracy(run, "elevation")
    if pairs:
        found["smallnorb_pairs"] = lambda: draw_smallnorb_pairs(pairs)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Files and command line
# ----------------------------------------------------------------------------------------------------------------------


def write_if_changed(path: Path, content: bytes, atomic_write: Callable[[Path], Any] = experiment.atomic_write) -> str:
    """Write a file whole, unless it holds just that already; says which. ``atomic_write`` is an experiment's own, whose
    errors that experiment reports."""
    if path.is_file() and path.read_bytes() == content:
        return f"unchanged {path} ({len(content) / 1000:.0f} kB)"
    with atomic_write(path) as stream:
        stream.write(content)
    return f"wrote {path} ({len(content) / 1000:.0f} kB)"


def png_bytes(draw: Callable[[], Figure]) -> bytes:
    stream = io.BytesIO()
    with house_style():
        draw().savefig(stream, format="png", metadata={"Software": None})  # a version would change the bytes
    return stream.getvalue()


def load_finished(path: Path, asked: dict[str, Any]) -> tuple[Config, dict[str, TrainState]]:
    """A checkpoint whose three trainings have ended. ``asked`` are the experiment flags that were given: they must
    agree with it (--data-dir aside, which may have moved). Raises UserError."""
    config, states = experiment.load_checkpoint(path)
    if "data_dir" in asked:
        config = dataclasses.replace(config, data_dir=asked["data_dir"])
    for field, value in asked.items():
        if value != (saved := getattr(config, field)):
            flag, text = "--" + field.replace("_", "-"), experiment.format_value
            raise UserError(f"{path} was made with {flag} {text(saved)}, not {text(value)}")
    for name in experiment.make_models(config):
        done = len(states[name].history["train_loss"]) if name in states else 0
        if done < config.n_epochs:
            raise UserError(
                f"{path} holds {done} of {config.n_epochs} epochs of {name}; finish it with"
                " smallnorb_novel_viewpoint.py --checkpoint … --resume"
            )
    return config, states


def given_flags(parser: argparse.ArgumentParser, argv: list[str] | None, config_class: type = Config) -> dict[str, Any]:
    """The experiment flags that stand on the command line, as fields of a Config. Spoils the parser's defaults."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    return {k: v for k, v in experiment.given_flags(parser, argv).items() if k in fields}


DEFAULT_RESULTS = Path("results") / f"{experiment.EXPERIMENT}_seeds.json"


def make_parser() -> argparse.ArgumentParser:
    parser = experiment.Parser(
        description="Train the three models of the novel-viewpoint experiment and draw its figures.",
        epilog=f"The figures go to DIR/{experiment.EXPERIMENT}/.",
    )
    experiment.add_experiment_arguments(parser)
    files = parser.add_argument_group("files")
    files.add_argument(
        "--outdir", type=Path, metavar="DIR", default=Path("viz"), help="folder of the figures; default: %(default)s"
    )
    files.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="draw a finished training from there and train nothing"
    )
    files.add_argument(
        "--results", type=Path, metavar="FILE",
        help=f"JSON of many seeds, for the points of the bar chart; default: {DEFAULT_RESULTS} where it exists",
    )  # fmt: skip
    files.add_argument(
        "--smallnorb-dir", type=Path, metavar="DIR",
        help="official smallNORB files (a sample will do) to draw; default: the environment variable SMALLNORB_DIR",
    )  # fmt: skip
    files.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    folder = args.outdir / experiment.EXPERIMENT

    def body() -> None:
        # All that can go wrong goes wrong before the training.
        for name in ("example_views", "smallnorb_pairs"):
            experiment.require_writable(folder / f"{name}.png")
        if args.checkpoint:
            config, states = load_finished(args.checkpoint, given_flags(make_parser(), argv))
        else:
            config, states = asked, {}
        results = args.results or (DEFAULT_RESULTS if DEFAULT_RESULTS.is_file() else None)
        seeds = read_seeds(results, config, config.dataset) if results else {}
        if args.results and not seeds:
            raise UserError(f"{results} holds no run with these flags")
        smallnorb = args.smallnorb_dir or (Path(d) if (d := os.environ.get("SMALLNORB_DIR")) else None)
        pairs = read_pairs(smallnorb) if smallnorb else None
        with experiment.blas_threads(args.threads):
            data = experiment.make_data(config)
            require_every_class(config, data)
            states = states or experiment.train_all(config, data, quiet=args.quiet)
            result = experiment.make_result(config, states, data)
            print(f"{experiment.describe(config)}; seed {config.seed}, {config.n_epochs} epochs")
            print(experiment.format_table(result))
            run = Run(config, data, experiment.make_models(config), states)
            for name, draw in drawers(run, seeds, pairs).items():
                print(write_if_changed(folder / f"{name}.png", png_bytes(draw)))
        if results and not seeds:
            print(f"no point over the bars: {results} holds no run with these flags")
        if not pairs:
            print("skipped smallnorb_pairs.png: no --smallnorb-dir DIR, no SMALLNORB_DIR")

    asked = Config() if args.checkpoint else experiment.config_from_args(parser, args)
    return experiment.exit_status(body)


if __name__ == "__main__":
    sys.exit(main())
