#!/usr/bin/env python3
"""Draw the figures of the MultiMNIST experiment into ``DIR/multimnist_capsnet/``.

    python visualize_multimnist_capsnet.py --n-epochs 8 --n-train 6000 --outdir viz

trains the three models and draws; ``--checkpoint FILE`` draws what ``multimnist_capsnet.py --checkpoint FILE`` has
trained. The same run gives the same files byte for byte, and a file that would not change is left alone.

    example_pairs.png         composites and the two digits that each is made of
    training_curves.png       losses and accuracies, epoch by epoch, and every seed of a results file as a point
    reconstructions.png       both digits of a composite, each drawn by the decoder from its own capsule alone
    capsule_activations.png   lengths of the ten digit capsules, and how often both, one or none of the digits is found
    overlay.png               reconstructions in two colours, right, wrong, and of digits that are not there
    capsule_dimensions.png    what each of the 16 numbers in a digit capsule changes in the picture
    couplings.png             where dynamic routing sends the primary capsules, iteration by iteration

``--scaling`` trains nothing and draws one figure, from files that compare_seeds.py has written, scaling_*.json:

    scaling.png               both digits right against composites seen in training, means and intervals over seeds

Which composites are shown never depends on how well they are reconstructed: among those that fit a figure's heading the
first of the test set are taken, other digits before digits that have been shown.
"""

from __future__ import annotations

import support.headless  # noqa: F401  before matplotlib

# isort: split

import dataclasses
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

import multimnist_capsnet as experiment
from fast.workers import blas_threads
from multimnist_capsnet import Array, Batch, Config, Data
from support.figures import (
    BLACK,
    BLUE,
    DATASET_NAMES,
    GREEN,
    GREY,
    MODEL_STYLES,
    ORANGE,
    RIGHT,
    SKY,
    VERMILLION,
    WIDTH,
    WRONG,
    YELLOW,
    Colour,
    FigureOptions,
    accuracy_axis,
    add_axes,
    add_colourbar,
    add_frame,
    add_heading_bar,
    add_image,
    add_legend,
    add_model_legend,
    add_reference_line,
    add_row_label,
    add_seed_points,
    add_sheet,
    add_text,
    darkened,
    epoch_axis,
    evenly_spaced_indices,
    lightened,
    load_finished,
    mark_column,
    marked_answer,
    model_line,
    new_figure,
    plural,
    read_seeds,
    reading_seeds,
    require_runs,
    require_test_images,
    results_files,
    tiled,
    weighted_quantiles,
    with_minus_sign,
    write_figures,
)
from support.files import UserError, require_writable
from support.optimizers import TrainState
from support.script import script
from support.settings import SettingError, input_path, parse, redeclared, setting
from support.statistics import describe_sample
from support.training import RunOptions

MODELS = MODEL_STYLES[experiment.EXPERIMENT]
FIRST, SECOND = ORANGE, SKY  # the digits of a composite; where both are bright their sum is white
DIGIT_COLOURS = (FIRST, SECOND)
N_COLOURS = {"reconstructions": 128, "overlay": 200}  # of the palettes of large pictures
OUTCOMES = (("both right", GREEN, ""), ("one right", YELLOW, "//"), ("none", VERMILLION, "xx"))
NAME_LIMIT = 3  # characters of a class's name


def subtitle(config: Config, data: Data, *, length: bool = True) -> str:
    """What every figure says of its run: data set, overlap, seed, and how long it trained."""
    overlap = f"boxes overlap by IoU ≥ {config.min_iou:g}" if config.min_iou else "any overlap"
    parts = [DATASET_NAMES[data.name], overlap, f"seed {config.seed}"]
    if length:
        parts.append(f"{plural(config.n_epochs, 'epoch')} of {config.n_train:,} composites")
    return " · ".join(parts)


def in_colour(digit: Array, colour: str) -> Array:
    """A digit (H, W) in [0, 1] as RGB (H, W, 3) on black."""
    return digit[..., None] * np.array(to_rgb(colour))


def in_two_colours(digits: Array) -> Array:
    """Two digits (2, H, W) in two colours that add up: RGB (H, W, 3)."""
    return np.clip(sum(in_colour(digit, colour) for digit, colour in zip(digits, DIGIT_COLOURS, strict=True)), 0, 1)


def tested(n_val: int | None) -> str:
    """What the composites are called on which accuracies are measured, by --n-val."""
    return "validation" if n_val else "test"


def two_names(config: Config, labels: Sequence[int]) -> tuple[str, str]:
    first, second = labels
    return config.classes[first], config.classes[second]


def name_size(config: Config, size: float) -> float:
    """In points: smaller where names of classes are longer than digits."""
    return size if max(map(len, config.classes)) == 1 else 0.8 * size


def add_two_names(fig: Figure, x: float, y: float, config: Config, labels: Sequence[int]) -> None:
    """A centred line that names two digits."""
    add_text(fig, x, y, "{} + {}".format(*two_names(config, labels)), ha="center", fontsize=name_size(config, 10.5),
             fontweight="bold")  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# What is drawn: a finished run, and composites chosen from its test set
# ----------------------------------------------------------------------------------------------------------------------

N_CANDIDATES = 1000  # composites that examples are chosen from
MIN_TEST = 16  # composites that the figures need


class Run(NamedTuple):
    config: Config
    data: Data
    states: dict[str, TrainState]


class Predictions(NamedTuple):
    """The output of the capsule network for N test composites."""

    batch: Batch
    lengths: Array  # (N, J)
    v: Array  # (N, J, D)
    answers: Array  # (N, 2) the longest two; a digit that is right stands where it stands among the labels
    hits: Array  # (N,) how many are right


def in_order_of_labels(labels: Array, answers: Array) -> Array:
    """labels, answers (N, 2) -> the answers, swapped where that brings a right one to its label's position."""
    swap = (answers[:, 0] == labels[:, 1]) | (answers[:, 1] == labels[:, 0])
    return np.where(swap[:, None], answers[:, ::-1], answers)


def predict(run: Run, part: int = 32) -> Predictions:
    config, batch = run.config, run.data.test.part(0, N_CANDIDATES)
    params = run.states["capsnet"].params
    lengths, v = [], []
    for start in range(0, len(batch.labels), part):
        length, cache = experiment.capsnet_forward(params, batch.images[start : start + part], config)
        lengths.append(length)
        v.append(cache.v)
    all_lengths = np.concatenate(lengths)
    answers = in_order_of_labels(batch.labels, experiment.top_labels(all_lengths, 2))
    hits = (answers == batch.labels).sum(axis=1)
    return Predictions(batch, all_lengths, np.concatenate(v), answers, hits)


def varied(labels: Array, candidates: Array, n: int) -> Array:
    """At most n of the candidates (indices of labels (N, 2)): again and again the first one whose digits were shown
    least."""
    shown = np.zeros(int(labels.max(initial=0)) + 1)
    left, chosen = candidates.tolist(), list[int]()
    while left and len(chosen) < n:
        k: int = min(left, key=lambda k: (shown[labels[k]].max(), shown[labels[k]].sum(), k))
        left.remove(k)
        chosen.append(k)
        shown[labels[k]] += 1
    return np.array(chosen, int)


def draw_capsules(run: Run, v: Array, labels: Array) -> Array:
    """v (N, J, D), labels (N, L) -> pictures (N, L, H, W), each from the named capsule alone."""
    return experiment.reconstruct(run.states["capsnet"].params, v, labels)


def absent(predicted: Predictions, chosen: Array) -> Array:
    """The longest capsule of each chosen composite (n,) that is neither a label nor an answer."""
    lengths = predicted.lengths[chosen].copy()
    for named in (predicted.batch.labels[chosen], predicted.answers[chosen]):
        np.put_along_axis(lengths, named, -1, axis=1)
    return lengths.argmax(axis=1)


class Routes(NamedTuple):
    """Dynamic routing of one composite, T iterations."""

    c: Array  # (T, J, rows, columns) couplings, the mean over types, weighted by the capsules' lengths
    entropy: Array  # (T, 3) of the couplings of a capsule, in bits: 10th percentile, mean and 90th, weighted likewise
    lengths: Array  # (T, J) of the digit capsules after each iteration


def routes(run: Run, image: Array) -> Routes:
    config, params = run.config, run.states["capsnet"].params
    _, cache = experiment.capsnet_forward(params, image[None], config, experiment.PLAIN)
    J, side = config.n_classes, config.primary_side
    c = np.stack(cache.routing.c)[:, 0].swapaxes(1, 2).astype(float)  # (T, J, I)
    weight = np.sqrt(np.square(cache.routing.u[0].astype(float)).sum(axis=1))  # (I,)
    grid = weight.reshape(side, side, config.primary_types)
    maps = (c.reshape(len(c), J, *grid.shape) * grid).sum(axis=4) / np.maximum(grid.sum(axis=2), 1e-12)
    bits = -(c * np.log2(np.maximum(c, 1e-30))).sum(axis=1)  # (T, I)
    entropy = []
    for row in bits:
        low, high = weighted_quantiles(row, weight, [0.1, 0.9])
        entropy.append((low, float(np.average(row, weights=weight)), high))
    lengths = np.stack([np.sqrt(np.square(v[0]).sum(axis=1)) for v in cache.routing.v])
    return Routes(maps, np.array(entropy), lengths)


# ----------------------------------------------------------------------------------------------------------------------
# Figures
# ----------------------------------------------------------------------------------------------------------------------


def draw_example_pairs(run: Run) -> Figure:
    batch = run.data.test
    chosen = varied(batch.labels, np.arange(min(N_CANDIDATES, len(batch.labels))), 10)
    left, cell, gap, top = 1.06, 0.72, 0.07, 1.02
    fig = new_figure(top + 4 * (cell + gap) + 0.06, "Two digits laid over each other",
                     subtitle(run.config, run.data, length=False))  # fmt: skip
    rows = (
        ("the network\nsees", BLACK),
        ("first digit", darkened(FIRST)),
        ("second digit", darkened(SECOND)),
        ("both,\nin colours", BLACK),
    )
    for r, (text, colour) in enumerate(rows):
        add_row_label(fig, left - 0.08, top + r * (cell + gap) + cell / 2, text, colour)
    for m, k in enumerate(chosen):
        x = left + m * (cell + gap)
        add_two_names(fig, x + cell / 2, 0.76, run.config, batch.labels[k])
        sources = batch.sources[k]
        singles = [in_colour(sources[d], DIGIT_COLOURS[d]) for d in range(2)]
        for r, image in enumerate((batch.images[k], *singles, in_two_colours(sources))):
            add_image(fig, x, top + r * (cell + gap), cell, image)
    return fig


def draw_training_curves(run: Run, seeds: dict[str, Array]) -> Figure:
    """``seeds``: per model, the set accuracy (n, 1) of other seeds' runs; empty where there are none."""
    config = run.config
    fig = new_figure(3.8, "Training", subtitle(config, run.data))
    history, n = run.states["capsnet"].history, config.n_epochs
    epochs, every = np.arange(1, n + 1), max(1, n // 10)
    top, height = 1.3, 1.95
    style = model_line(MODELS["capsnet"], markevery=every, clip_on=False, zorder=3)

    ax = add_axes(fig, 0.55, top, 2.15, height)
    ax.plot(epochs, history["train_margin_loss"], **style)
    ax.set_title("margin loss, training", loc="left")
    ax.set_ylim(0, 1.08 * max(history["train_margin_loss"]))
    epoch_axis(ax, n)

    ax = add_axes(fig, 3.3, top, 2.15, height)
    pixels = config.image_size**2
    ax.plot(epochs, np.array(history["train_recon_loss"]) / pixels, **{**style, "linestyle": "--", "marker": "none"})
    ax.plot(epochs, history["recon_mse"], **style)
    ax.set_title("reconstruction, MSE of a pixel", loc="left")
    ax.set_ylim(0, 1.08 * max(*history["recon_mse"], max(history["train_recon_loss"]) / pixels))
    ax.legend(
        [Line2D([], [], **{**style, "markevery": None}), Line2D([], [], color=BLUE, linestyle="--")],
        [tested(config.n_val), "training"], loc="lower left", borderpad=0.2, handlelength=1.8,
    )  # fmt: skip
    epoch_axis(ax, n)

    width = 2.75 - (0.62 if seeds else 0)
    ax = add_axes(fig, 6.05, top, width, height)
    accuracy_axis(ax, None, 1 / config.n_pairs, f"1/{config.n_pairs}")
    for name, state in run.states.items():
        ax.plot(epochs, state.history["set_accuracy"], **model_line(MODELS[name], markevery=every, clip_on=False),
                zorder=3 + (name == "capsnet"))  # fmt: skip
    ax.set_title(f"both digits right, {tested(config.n_val)}", loc="left")
    epoch_axis(ax, n)
    add_model_legend(fig, 0.55, 0.74, [MODELS[name] for name in run.states])
    if seeds:
        points = {name: seeds.get(name, np.empty((0, 1)))[:, 0] for name in run.states}
        add_seed_points(fig, ax, 6.05 + width + 0.1, top, height, points, MODELS)
    return fig


def draw_reconstructions(run: Run, predicted: Predictions) -> Figure:
    batch = predicted.batch
    chosen = varied(batch.labels, np.arange(len(batch.labels)), 8)
    pictures = draw_capsules(run, predicted.v[chosen], batch.labels[chosen])
    left, cell, gap, top = 1.1, 0.9, 0.08, 1.02
    after = (0.14, 0.04, 0.32, 0.04, 0.3)  # inches below each row
    tops = top + np.concatenate([[0], np.cumsum([cell + space for space in after])])
    fig = new_figure(tops[-1] + 0.02, "Each digit drawn from its own capsule", subtitle(run.config, run.data))
    labels = ("the network\nsees", "first digit", "drawn from\nits capsule", "second digit", "drawn from\nits capsule")
    colours = (BLACK, *(darkened(c) for c in (FIRST, FIRST, SECOND, SECOND)))
    for y, text, colour in zip(tops, labels, colours, strict=False):
        add_row_label(fig, left - 0.1, y + cell / 2, text, colour)
    for d in range(2):
        add_text(fig, left - 0.1, tops[2 + 2 * d] + cell + 0.06, "MSE", ha="right", fontsize=9, color=GREY)
    for m, k in enumerate(chosen):
        x = left + m * (cell + gap)
        add_two_names(fig, x + cell / 2, 0.76, run.config, batch.labels[k])
        add_image(fig, x, tops[0], cell, batch.images[k])
        for d, colour in enumerate(DIGIT_COLOURS):
            truth, picture = batch.sources[k, d], pictures[m, d]
            add_image(fig, x, tops[1 + 2 * d], cell, in_colour(truth, colour))
            add_image(fig, x, tops[2 + 2 * d], cell, in_colour(picture, colour))
            error = float(np.square(picture - truth).mean())
            add_text(
                fig, x + cell / 2, tops[2 + 2 * d] + cell + 0.06, f"{error:.3f}", ha="center", fontsize=9, color=GREY
            )
    return fig


def draw_capsule_activations(run: Run, predicted: Predictions) -> Figure:
    batch, config, J = predicted.batch, run.config, run.config.n_classes
    right = varied(batch.labels, np.flatnonzero(predicted.hits == 2), 8)
    wrong = varied(batch.labels, np.flatnonzero(predicted.hits < 2), 8)
    n_wrong = min(len(wrong), max(3, 6 - len(right)))
    chosen = np.concatenate([right[: 6 - n_wrong], wrong[:n_wrong]])
    left, top, width, pitch, side, height = 0.55, 1.02, 1.62, 1.86, 0.72, 1.1
    row = side + height + 0.7
    fig = new_figure(top + 2 * row + 0.02, "Lengths of the digit capsules", subtitle(run.config, run.data))
    for m, k in enumerate(chosen):
        x, y = left + m % 3 * pitch, top + m // 3 * row
        labels, answers = batch.labels[k], predicted.answers[k]
        add_image(fig, x, y - 0.16, side, batch.images[k])
        true, said = ("{} + {}".format(*two_names(config, sorted(two))) for two in (labels, answers))
        good = predicted.hits[k] == 2
        add_text(fig, x + side + 0.1, y - 0.12, f"true: {true}", fontsize=name_size(config, 9.5))
        text, colour = marked_answer(good, said)
        add_text(fig, x + side + 0.1, y + 0.12, text, fontsize=name_size(config, 11), fontweight="bold", color=colour)
        ax = add_axes(fig, x, y + side - 0.02, width, height)
        colours = [BLUE if j in answers else lightened(BLUE, 0.35) for j in range(J)]
        ax.bar(range(J), predicted.lengths[k], color=colours, width=0.66, zorder=2)
        ax.set(xlim=(-0.7, J - 0.3), ylim=(0, 1.0))
        ax.set_yticks([0, 0.5, 1], ["0", ".5", "1"] if m % 3 == 0 else [""] * 3)
        ax.set_xticks(range(J), [name if J <= 10 or j in labels else "" for j, name in enumerate(config.classes)])
        ax.tick_params(axis="x", length=0)
        ax.grid(False, axis="x")
        for j in labels:
            ax.add_patch(Rectangle((j - 0.46, 0), 0.92, 1.0, fill=False, edgecolor=VERMILLION, linewidth=1.8, zorder=3,
                                   clip_on=False))  # fmt: skip
            ax.get_xticklabels()[j].set(color=VERMILLION, fontweight="bold")
        if m % 3 == 0:
            ax.set_ylabel("length", labelpad=2)
    draw_outcomes(run, fig, left + 3 * pitch + 0.42, top - 0.16, top + 2 * row - 0.55)
    handles = [
        Patch(facecolor="white", edgecolor=VERMILLION, linewidth=1.8, label="a digit that is there"),
        Patch(facecolor=BLUE, label="the longest two: the answer"),
    ]
    height_of_figure = fig.get_size_inches()[1]
    add_legend(
        fig, left, height_of_figure - 0.06, handles, loc="lower left", ncols=2, columnspacing=1.6, handletextpad=0.6
    )
    return fig


def draw_outcomes(run: Run, fig: Figure, x: float, top: float, bottom: float) -> None:
    """Stacked bars: for how many of all test composites both, one or none of a model's two answers is right."""
    text = f"All {len(run.data.test.labels):,} {tested(run.config.n_val)} composites"
    add_text(fig, x - 0.02, top, text, fontsize=10, fontweight="bold")
    ax = add_axes(fig, x, top + 1.14, WIDTH - x - 0.12, bottom - top - 1.14)
    for m, state in enumerate(run.states.values()):
        both, any_right = (state.history[metric][-1] for metric in ("set_accuracy", "soft_accuracy"))
        floor = 0.0
        for fraction, (_, colour, hatch) in zip((both, any_right - both, 1 - any_right), OUTCOMES, strict=True):
            ax.bar(m, fraction, 0.7, floor, color=lightened(colour, 0.75), edgecolor="white", hatch=hatch, linewidth=1,
                   zorder=2)  # fmt: skip
            if fraction >= 0.06 and floor + fraction < 1:
                ax.text(
                    m, floor + fraction / 2, f"{100 * fraction:.0f} %", ha="center", va="center", fontweight="bold",
                    zorder=4, bbox={"facecolor": "white", "edgecolor": "none", "boxstyle": "round,pad=0.15"},
                )  # fmt: skip
            floor += fraction
        text = f"{100 * (1 - any_right):.1f} %"
        ax.annotate(text, (m, 1), (0, 2), textcoords="offset points", ha="center", va="bottom",
                    color=darkened(VERMILLION), fontweight="bold")  # fmt: skip
    ax.set_xticks(range(len(run.states)), [MODELS[name].short for name in run.states])
    middle = (len(run.states) - 1) / 2
    ax.set(xlim=(middle - 1.5, middle + 1.5), ylim=(0, 1), yticks=np.arange(0, 1.01, 0.25))
    ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    ax.tick_params(axis="x", length=0)
    ax.grid(False, axis="x")
    handles = [Patch(facecolor=lightened(c, 0.75), edgecolor="white", hatch=hatch, label=text)
               for text, c, hatch in OUTCOMES[::-1]]  # fmt: skip
    add_legend(fig, x - 0.02, top + 0.26, handles, labelspacing=0.25, handletextpad=0.6)


def pair_text(config: Config, letter: str, pair: Sequence[int]) -> str:
    return "{}:({},{})".format(letter, *two_names(config, pair))


class Column(NamedTuple):
    """A column of the overlay figure."""

    composite: int
    letter: str  # R: reconstructed from the pair, P: that is the prediction
    pair: Sequence[int]


def draw_overlay(run: Run, predicted: Predictions) -> Figure:
    batch = predicted.batch
    right, wrong = (np.flatnonzero(predicted.hits == 2), np.flatnonzero(predicted.hits < 2))
    first = varied(batch.labels, right, 14)
    confused = varied(batch.labels, wrong, 3)
    ghosts = first[10:] if len(first) > 11 else first[:4]
    banks: list[list[tuple[tuple[str, ...], str, list[Column]]]] = [
        [(("both digits right: labels (L), drawn from their capsules (R)", "both digits right", "right"), RIGHT,
          [Column(k, "R", batch.labels[k]) for k in first[:10]])],
        [
            (("one or both wrong: drawn from labels (R) and answer (P)", "one or both wrong"), WRONG,
             [c for k in confused for c in (Column(k, "R", batch.labels[k]), Column(k, "P", predicted.answers[k]))]),
            (("* second digit is not there", "* not there", "*"), GREY,
             [Column(k, "*R", (batch.labels[k, 0], j))
              for k, j in zip(ghosts, absent(predicted, ghosts), strict=True)]),
        ],
    ]  # fmt: skip
    left, cell, gap, top, size = 0.7, 0.72, 0.1, 0.74, name_size(run.config, 9)
    banks = [bank for bank in banks if any(columns for _, _, columns in bank)]
    bank_height = 0.24 + 0.5 + 3 * (cell + 0.06) + 0.16
    fig = new_figure(top + len(banks) * bank_height - 0.04, "Two reconstructions laid over each other",
                     subtitle(run.config, run.data))  # fmt: skip
    for b, bank in enumerate(banks):
        y = top + b * bank_height
        x = left
        rows = y + 0.74 + np.arange(3) * (cell + 0.06)
        for row, text in zip(rows, ("input", "drawn", "true"), strict=True):
            add_row_label(fig, left - 0.1, row + cell / 2, text)
        for texts, colour, columns in bank:
            if not columns:
                continue
            width = len(columns) * (cell + gap) - gap
            text = next((text for text in texts if 0.085 * len(text) < width), "")
            add_heading_bar(fig, x, y, width, text, colour)
            pictures = draw_capsules(
                run, predicted.v[[c.composite for c in columns]], np.array([c.pair for c in columns], int)
            )
            for column, drawn in zip(columns, pictures, strict=True):
                k = column.composite
                middle = x + cell / 2
                add_text(fig, middle, y + 0.3, pair_text(run.config, "L", batch.labels[k]), ha="center", fontsize=size)
                is_wrong = column.letter == "P"
                add_text(fig, middle, y + 0.5, pair_text(run.config, column.letter, column.pair), ha="center",
                         fontsize=size, fontweight="bold" if column.letter != "R" else "normal",
                         color=darkened(WRONG) if is_wrong else BLACK)  # fmt: skip
                for row, image in zip(
                    rows, (batch.images[k], in_two_colours(drawn), in_two_colours(batch.sources[k])), strict=True
                ):
                    add_image(fig, x, row, cell, image)
                x += cell + gap
    return fig


SWEEP = np.linspace(-0.25, 0.25, 11)  # [Sabour 2017, sec. 5.1]


def draw_capsule_dimensions(run: Run, predicted: Predictions) -> Figure:
    batch, D, side = predicted.batch, experiment.CAPSULE_SIZE, run.config.image_size
    candidates = np.flatnonzero(predicted.hits == predicted.hits.max())
    k = int(varied(batch.labels, candidates, 1)[0])
    tile = side + 2  # pixels
    left, gap, top = 0.36, 0.14, 1.44
    width, height = len(SWEEP) * tile / 100, D * tile / 100
    fig = new_figure(
        top + height + 0.1,
        "What each number of a digit capsule changes",
        subtitle(run.config, run.data),
    )
    for d in range(2):
        j, colour = int(batch.labels[k, d]), DIGIT_COLOURS[d]
        v = np.repeat(predicted.v[k][None], D * len(SWEEP), axis=0)  # (16 * 11, J, D)
        v[np.arange(len(v)), j, np.repeat(np.arange(D), len(SWEEP))] += np.tile(SWEEP, D).astype(v.dtype)
        pictures = draw_capsules(run, v, np.full((len(v), 1), j))[:, 0]
        sheet = tiled(pictures.reshape(D, len(SWEEP), side, side), n_greys=32)
        x = left + d * (width + gap)
        add_text(
            fig,
            x + 0.02,
            0.92,
            f"capsule of the {run.config.classes[j]}",
            color=darkened(colour),
            fontweight="bold",
            fontsize=10.5,
        )
        ax = add_sheet(fig, x, top, width, height, sheet)
        middle = len(SWEEP) // 2
        mark_column(ax, middle * tile, tile, D * tile, colour, 2.2)
        for m in (0, 2, 8, 10):
            text = with_minus_sign(f"{SWEEP[m]:+.2f}")
            add_text(fig, x + (m + 0.5) * tile / 100, top - 0.22, text, ha="center", fontsize=9)
        add_text(
            fig, x + (middle + 0.5) * tile / 100, top - 0.22, "as it is", ha="center", fontsize=9, fontweight="bold"
        )
    for row in range(D):
        add_text(fig, left - 0.06, top + (row + 0.5) * tile / 100, str(row + 1), ha="right", va="center", fontsize=9)
    add_text(
        fig, left + 0.02, 0.66, "rows: the 16 numbers; columns: what is added to that number before the decoder draws"
    )
    return fig


def draw_couplings(run: Run, predicted: Predictions) -> Figure:
    config, batch = run.config, predicted.batch
    k = int(varied(batch.labels, np.flatnonzero(predicted.hits == predicted.hits.max()), 2)[-1])
    routed = routes(run, batch.images[k])
    n_iters = len(routed.c)
    shown = evenly_spaced_indices(n_iters, 3)
    a, b = (int(j) for j in batch.labels[k])
    other = int(absent(predicted, np.array([k]))[0])
    names, even = config.classes, 1 / config.n_classes  # coupling before the first iteration
    rows = ((a, names[a], FIRST), (b, names[b], SECOND), (other, f"{names[other]}, not there", BLACK))
    top, cell, gap, left, maps_left = 1.3, 1.28, 0.1, 0.12, 2.44
    fig = new_figure(
        top + 3 * (cell + gap) + 0.62, f"Routing of one composite, {names[a]} + {names[b]}", subtitle(config, run.data)
    )
    picture_side = 1.44
    add_text(fig, left, top - 0.24, "the network sees", fontsize=9.5)
    ax = add_image(fig, left, top, picture_side, batch.images[k]).axes
    # A capsule's field is 17 pixels wide and moves by 2 from column to column.
    middle, reach = (experiment.KERNEL - 1) / 2 * 2, 2 * config.primary_side
    ax.add_patch(Rectangle((middle - 1, middle - 1), reach, reach, fill=False, edgecolor=GREEN, linewidth=1.6))
    add_text(fig, left, top + picture_side + 0.06, "middles of the\nprimary capsules' fields", color=darkened(GREEN),
             fontsize=9, va="top", linespacing=1.25)  # fmt: skip
    add_text(fig, left, top + 2.12, "its digits", fontsize=9.5)
    add_image(fig, left, top + 2.36, picture_side, in_two_colours(batch.sources[k]))
    types = f"mean of {config.primary_types} types" if config.primary_types > 1 else "one type"
    heading = f"coupling of the primary capsules ({types}, weighted by length) with each digit capsule"
    add_text(fig, maps_left - 0.8, 0.7, heading, fontweight="bold")
    deviation = np.abs(routed.c[:, [a, b, other]] - even)
    limit = max(0.01, min(even, float(np.ceil(100 * np.percentile(deviation[-1], 98)) / 100)))
    drawn: Any = None
    x_pixel = (np.arange(config.image_size) - middle) / 2  # in columns of capsules
    for r, (j, text, colour) in enumerate(rows):
        y = top + r * (cell + gap)
        add_text(fig, maps_left - 0.12, y + cell / 2, text.replace(", ", ",\n"), ha="right", va="center",
                 linespacing=1.2, color=darkened(colour), fontweight="bold", fontsize=14 if r < 2 else 9.5)  # fmt: skip
        for m, t in enumerate(shown):
            ax = add_axes(fig, maps_left + m * (cell + gap), y, cell, cell)
            drawn = ax.imshow(routed.c[t, j], cmap="RdBu_r", vmin=even - limit, vmax=even + limit)
            for d in range(2):
                if r in (d, 2):
                    ax.contour(x_pixel, x_pixel, batch.sources[k, d], [0.5], colors=BLACK, linewidths=1.0)
            ax.set(xlim=(-0.5, config.primary_side - 0.5), ylim=(config.primary_side - 0.5, -0.5))
            add_frame(ax, "#bbbbbb", 0.6)
            if r == 0:
                add_text(fig, maps_left + m * (cell + gap) + cell / 2, top - 0.24, f"iteration {t + 1}", ha="center")
    foot = top + 3 * (cell + gap) + 0.06
    bar = add_colourbar(fig, drawn, maps_left, foot, 2.1, extend="both")
    ticks = [even - limit, even, even + limit]
    bar.set_xticks(ticks)
    add_text(fig, maps_left + 2.25, foot - 0.03, f"coupling c; white: even, {even:.3g}", fontsize=9.5)

    x, width, height = maps_left + 3 * (cell + gap) + 0.58, 1.42, 1.42
    iterations = np.arange(1, n_iters + 1)
    ax = add_axes(fig, x, top, width, height)
    for j in range(config.n_classes):
        style: dict[str, Any] = {"color": "#b0b0b0", "linewidth": 1.2, "marker": ".", "zorder": 2}
        for d, digit in enumerate((a, b)):
            if j == digit:
                style = {"color": DIGIT_COLOURS[d], "marker": "os"[d], "zorder": 4}
        if j == other:
            style = {"color": BLACK, "linewidth": 1.4, "marker": "v", "linestyle": "--", "zorder": 3}
        ax.plot(iterations, routed.lengths[:, j], clip_on=False, **style)
    ends = routed.lengths[-1, [a, b, other]]
    for j, colour, height_of_name in zip((a, b, other), (FIRST, SECOND, BLACK), moved_apart(ends, 0.11), strict=True):
        ax.annotate(
            names[j], (1, height_of_name), xycoords=("axes fraction", "data"), xytext=(5, 0), va="center",
            textcoords="offset points", color=darkened(colour), fontweight="bold", annotation_clip=False,
        )  # fmt: skip
    ax.set_title("lengths of digit capsules", loc="left", x=-0.2)
    ax.set_ylim(0, 1)
    ax.set_yticks([0, 0.5, 1])
    iteration_axis(ax, n_iters)

    ax = add_axes(fig, x, top + height + 0.95, width, height)
    low, mean, high = routed.entropy.T
    ax.fill_between(iterations, low, high, color=lightened(BLUE, 0.25), linewidth=0, zorder=2)
    ax.errorbar(iterations, mean, [mean - np.minimum(low, mean), np.maximum(high, mean) - mean],
                color=lightened(BLUE, 0.5), linewidth=0, elinewidth=1.4, capsize=3, zorder=2.5)  # fmt: skip
    ax.plot(iterations, mean, color=BLUE, marker="o", zorder=3, clip_on=False)
    most = np.log2(config.n_classes)
    add_reference_line(ax, most)
    ax.annotate("even", (1, most), xycoords=("axes fraction", "data"), xytext=(-2, 3), textcoords="offset points",
                ha="right", fontsize=9)  # fmt: skip
    ax.set_title("entropy of couplings, bits", loc="left", x=-0.2)
    ax.set_ylim(most - 1.25 * max(0.04, most - low.min()), most + 0.25 * max(0.04, most - low.min()))
    iteration_axis(ax, n_iters)
    ax.set_xlabel("iteration")
    add_text(fig, x - 0.3, foot + 0.2, "mean, and 10 % to 90 %", fontsize=9, color=GREY)
    return fig


def iteration_axis(ax: Axes, n: int) -> None:
    ax.set_xlim(0.85, n + 0.15)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))


def moved_apart(values: Array, least: float) -> Array:
    """Positions for labels at these values, moved apart where they are closer than ``least``."""
    positions = np.array(values, float)
    for low, high in itertools.pairwise(np.argsort(values)):
        positions[high] = max(positions[high], positions[low] + least)
    return positions


def drawers(run: Run, seeds: dict[str, Array]) -> dict[str, Callable[[], Figure]]:
    """Name of each figure of a run, and what draws it (within ``figure_style``)."""
    predicted = predict(run)
    return {
        "example_pairs": lambda: draw_example_pairs(run),
        "training_curves": lambda: draw_training_curves(run, seeds),
        "reconstructions": lambda: draw_reconstructions(run, predicted),
        "capsule_activations": lambda: draw_capsule_activations(run, predicted),
        "overlay": lambda: draw_overlay(run, predicted),
        "capsule_dimensions": lambda: draw_capsule_dimensions(run, predicted),
        "couplings": lambda: draw_couplings(run, predicted),
    }


# ----------------------------------------------------------------------------------------------------------------------
# Accuracy against the length of training, from results files
# ----------------------------------------------------------------------------------------------------------------------

PAPER_ACCURACY = 1 - 0.052  # of the CapsNet [Sabour 2017, sec. 6]
PAPER_CHANNELS = experiment.PRESETS["paper"]["conv_channels"]


class Series(NamedTuple):
    model: str
    routing_iters: int | None  # of the capsules
    as_in_paper: bool = False  # of the paper's size, on digits that may lie as far apart as the paper's


class Scaling(NamedTuple):
    """Trainings of several lengths. The rate falls to 0 in each, so that every length is a training of its own."""

    dataset: str
    tested: str  # see ``tested``
    min_iou: float  # of all but the series as in the paper
    accuracies: dict[Series, dict[int, list[float]]]  # by composites seen, of each seed: images with both digits right


def read_scaling(paths: Sequence[Path]) -> Scaling:
    """All settings and seeds of files by compare_seeds.py, the lengths in rising order.

    Raises UserError where a file is none of these, where one model has two settings of the same length, and where the
    test composites differ, unless by the paper's overlap.
    """
    tests: set[tuple[str, str]] = set()
    overlaps: set[float] = set()
    found: dict[Series, dict[int, list[float]]] = {}
    for path in paths:
        with reading_seeds(path) as document:
            for setting in document["settings"].values():
                config = setting["config"]
                length = Config(**{name: config[name] for name in ("n_epochs", "n_train", "batch_size")})
                tests.add((DATASET_NAMES[document["dataset"]], tested(config.get("n_val"))))
                as_in_paper = config["min_iou"] == 0 and config["conv_channels"] == PAPER_CHANNELS
                overlaps |= set() if as_in_paper else {config["min_iou"]}
                for model in sorted({*setting["models"]} & {*MODELS}):
                    routing_iters = config["routing_iters"] if model == "capsnet" else None
                    series = Series(model, routing_iters, as_in_paper)
                    lengths, seen = found.setdefault(series, {}), length.n_steps * length.batch_size
                    if seen in lengths:
                        raise UserError(f"{path}: {model} has another setting of {seen:,} composites")
                    lengths[seen] = [float(run["models"][model]["set_accuracy"]) for run in setting["runs"]]
                    if not lengths[seen]:
                        raise LookupError("no runs")
    if not found:
        raise UserError(f"no results to draw: there is no {SCALING_RESULTS} by compare_seeds.py")
    if max(len(tests), len(overlaps)) > 1:
        raise UserError(f"{', '.join(map(str, paths))} have different data sets or values of --min-iou, or --n-val")
    order = sorted(
        found, key=lambda series: (series.as_in_paper, list(MODELS).index(series.model), -(series.routing_iters or 0))
    )
    min_iou = overlaps.pop() if overlaps else 0.0
    return Scaling(*tests.pop(), min_iou, {series: dict(sorted(found[series].items())) for series in order})


def composites(n: float) -> str:
    return f"{n / 1e6:g} million" if n >= 1e6 else f"{n:,.0f}"


def draw_scaling(scaling: Scaling) -> Figure:
    """Means with intervals; a length of one seed is a hollow point at the end of a dashed line."""
    counts = sorted({len(v) for lengths in scaling.accuracies.values() for v in lengths.values() if len(v) > 1})
    seeds = f"95 % intervals over {plural(counts[-1], 'seed')}" if len(counts) == 1 else "95 % intervals over seeds"
    overlap = f"boxes overlap by IoU ≥ {scaling.min_iou:g}" if scaling.min_iou else "any overlap"
    parts = [scaling.dataset, overlap, f"means with {seeds}" if counts else "one seed"]
    fig = new_figure(4.6, "Both digits right against composites seen", " · ".join(parts))
    ax = add_axes(fig, 0.75, 1.05, WIDTH - 1.0, 2.9)
    all_lengths = [n for lengths in scaling.accuracies.values() for n in lengths]
    iterations = {series.routing_iters for series in scaling.accuracies if not series.as_in_paper} - {None}
    handles, lowest = [], 1.0
    for k, (series, lengths) in enumerate(scaling.accuracies.items()):
        dodge = 1.03 ** (k - (len(scaling.accuracies) - 1) / 2)  # intervals stay apart
        label, _, own_colour, marker = MODELS[series.model]
        colour: Colour = own_colour
        if series.as_in_paper:
            label, colour, marker = f"{label} of the paper's size, any overlap", darkened(own_colour), "P"
        elif series.routing_iters and len(iterations) > 1:
            label += f", {plural(series.routing_iters, 'iteration')}"
            colour, marker = (colour, marker) if k == 0 else (SKY, "D")
        samples = [(n * dodge, values, describe_sample(values)) for n, values in lengths.items()]
        for (x, _, a), (next_x, _, b) in itertools.pairwise(samples):
            dashed = 1 in (a["n"], b["n"])
            ax.plot([x, next_x], [a["mean"], b["mean"]], color=colour, linestyle="--" if dashed else "-", zorder=2)
        for x, values, sample in samples:
            several = sample["n"] > 1
            half = sample["high"] - sample["mean"] if several else 0
            ax.errorbar(
                [x], [sample["mean"]], [half], color=colour, marker=marker, capsize=3 * several, markersize=7,
                markerfacecolor=colour if several else "white", zorder=4, label=label,
            )  # fmt: skip
            if several:
                ax.plot([x] * len(values), values, ".", color=lightened(colour, 0.5), zorder=3)
            lowest = min(lowest, *values, sample["mean"] - half)
        if series.as_in_paper:  # its name stands beside its last point, as the legend has no room
            x, _, sample = samples[-1]
            ax.annotate(label, (x, sample["mean"]), (8, -4), textcoords="offset points", fontsize=9, color=colour)
        else:
            handles.append(Line2D([], [], color=colour, marker=marker, label=label))
    if counts and any(len(v) == 1 for lengths in scaling.accuracies.values() for v in lengths.values()):
        one: dict[str, Any] = {"linestyle": "--", "marker": "o", "markerfacecolor": "white", "label": "one seed"}
        handles.append(Line2D([], [], color=GREY, **one))
    add_legend(fig, 0.75, 0.7, handles, ncols=len(handles), columnspacing=2.0, handletextpad=0.6)
    add_reference_line(ax, PAPER_ACCURACY)
    ax.annotate(
        "the paper's CapsNet of 11.4 million parameters, on digits that may lie farther apart", (0, PAPER_ACCURACY),
        xycoords=("axes fraction", "data"), xytext=(4, 3), textcoords="offset points", fontsize=9, color=GREY,
    )  # fmt: skip
    ax.set(ylabel=f"fraction of {scaling.tested} images, both digits right", xlabel="composites seen in training")
    ax.set_ylim(max(0.0, 0.1 * np.floor(10 * (lowest - 0.01))), 1)
    ax.set_xscale("log")
    ax.set_xlim(min(all_lengths) / 1.25, max(all_lengths) * 1.25)
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda n, _: composites(n))
    return fig


# ----------------------------------------------------------------------------------------------------------------------
# Files and command line
# ----------------------------------------------------------------------------------------------------------------------


DEFAULT_RESULTS = Path("results") / experiment.EXPERIMENT / "published_settings.json"
SCALING_RESULTS = DEFAULT_RESULTS.with_name("scaling_*.json")


@dataclasses.dataclass(frozen=True)
class Options(FigureOptions):
    results: tuple[Path, ...] = setting(
        (), input_path, "In training_curves.png, draw a point for each seed in these JSON files.",
        shown=f"{DEFAULT_RESULTS} where it exists",
    )  # fmt: skip
    scaling: bool = setting(
        False, bool, f"Train nothing, and draw scaling.png alone, from {SCALING_RESULTS} by compare_seeds.py.",
        usual=True,
    )  # fmt: skip
    threads: int = redeclared(experiment.DigitOptions, "threads", experiment.DigitOptions.threads)

    def check(self, given: Mapping[str, Any]) -> None:
        if self.scaling and set(given) - {"scaling", "outdir", "quiet"}:
            raise SettingError("scaling", "only --outdir goes with it")


@script
def main(argv: Sequence[str] | None = None) -> None:
    asked, options, given = parse(
        Config, Options, argv,
        "Draw the figures of the MultiMNIST experiment, from a checkpoint or after training its models.",
        [
            ("--checkpoint run.safetensors", "All figures of these networks: about 9 seconds."),
            ("", "All figures, after training the three models for eight epochs: about 7 minutes."),
            ("--scaling", "Accuracy against the length of training, from committed results: about 2 seconds."),
        ],
        f"The figures go to DIR/{experiment.EXPERIMENT}/, where DIR is --outdir.",
    )  # fmt: skip
    folder = options.outdir / experiment.EXPERIMENT
    require_writable(folder / "overlay.png")
    if options.scaling:
        found = read_scaling(sorted(SCALING_RESULTS.parent.glob(SCALING_RESULTS.name)))
        write_figures(folder, {"scaling": lambda: draw_scaling(found)})
        return
    # All errors are found before the training.
    results = results_files([*options.results], DEFAULT_RESULTS)
    config, states = load_finished(experiment, options.checkpoint, asked, given, required=("capsnet",))
    data = experiment.make_data(config)
    config = experiment.resolve_auto(config, data.name)
    require_test_images(len(data.test.labels), MIN_TEST)
    seeds = read_seeds(results, config, data.name, ("set_accuracy",))
    require_runs([*options.results], seeds)
    states = states or experiment.train_all(config, data, RunOptions(threads=options.threads, quiet=options.quiet))
    result = experiment.make_result(config, data, states, options.threads)
    print(f"{experiment.describe(result)}\n{experiment.format_table(result)}")
    with blas_threads(1):
        write_figures(folder, drawers(Run(config, data, states), seeds), N_COLOURS)
    if results and not seeds:
        print(f"no points of seeds: {results[0]} holds no run with these flags")


if __name__ == "__main__":
    sys.exit(main())
