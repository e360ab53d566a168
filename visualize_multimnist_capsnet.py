#!/usr/bin/env python3
"""Draw the figures of the MultiMNIST experiment into ``DIR/multimnist_capsnet/``.

    python visualize_multimnist_capsnet.py --n-epochs 8 --n-train 6000 --outdir viz

trains the three models and draws; ``--checkpoint FILE`` draws what ``multimnist_capsnet.py --checkpoint FILE`` has
trained. Without --seed it is the reported seed whose capsule network has the median accuracy. The same run gives the
same files byte for byte, and a file that would not change is left alone.

    example_pairs.png         composites and the two digits that each is made of
    training_curves.png       losses and accuracies, epoch by epoch
    reconstructions.png       both digits of a composite, each drawn by the decoder from its own capsule alone
    capsule_activations.png   lengths of the ten digit capsules, and how often both, one or none of the digits is found
    overlay.png               reconstructions in two colours, right, wrong, and of digits that are not there
    capsule_dimensions.png    six of the 16 numbers in a digit capsule, named after what they change in the picture
    couplings.png             where dynamic routing sends the primary capsules, iteration by iteration

and from results of compare_seeds.py:

    scaling.png               both digits right against composites seen in training, means and intervals over seeds

Which composites are shown never depends on how well they are reconstructed: among those that fit a figure's heading the
first of the test set are taken, other digits before digits that have been shown.
"""

from __future__ import annotations

import support.headless  # noqa: F401  before matplotlib

# isort: split

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import LogLocator, NullLocator

import multimnist_capsnet as experiment
from fast.workers import blas_threads
from multimnist_capsnet import Array, Batch, Config, Data
from support.files import UserError
from support.optimizers import TrainState
from support.script import script
from support.settings import input_path, names_of, parse, redeclared, setting
from support.training import RunOptions

from support.figures import (  # isort: skip
    BLUE, DATASET_NAMES, GREEN, GREY, MODEL_STYLES, REFERENCE_LINE, RIGHT, SKY, VERMILLION, WRONG, YELLOW,
    FigureOptions, darkened, draw_figures, evenly_spaced_indices, head_legend, heading, interval, lightened,
    load_finished, make_figure, marked_answer, median_seed, model_handles, model_line, name_line, plural,
    reported_runs, seed_text, settings_in, show_histories, show_pictures, with_minus_sign,
)  # fmt: skip

MODELS = MODEL_STYLES[experiment.EXPERIMENT]
DIGIT_COLOURS = YELLOW, SKY  # of the first and the second digit; where both are bright their sum is white
RESULTS = Path("results") / experiment.EXPERIMENT / "composites_48000.json"
MEDIAN_OF = "capsnet", "set_accuracy"


def in_colour(digit: Array, colour: str) -> Array:
    """A digit (..., H, W) in [0, 1] as RGB (..., H, W, 3) on black."""
    return digit[..., None] * np.array(to_rgb(colour))


def in_two_colours(digits: Array) -> Array:
    """Two digits (..., 2, H, W) in two colours that add up: RGB (..., H, W, 3)."""
    return np.clip(sum(in_colour(digits[..., d, :, :], colour) for d, colour in enumerate(DIGIT_COLOURS)), 0, 1)


# ----------------------------------------------------------------------------------------------------------------------
# What is drawn: a finished run, and composites chosen from its test set
# ----------------------------------------------------------------------------------------------------------------------

N_CANDIDATES = 1000  # composites that examples are chosen from
MIN_TEST = 16  # composites that the figures need


class Run(NamedTuple):
    config: Config
    data: Data
    states: dict[str, TrainState]
    who: str  # the seed, and whether it is the median of the reported ones


def subtitle(run: Run) -> str:
    """What every figure says of its run: data set, overlap, seed, and how long it trained."""
    config = run.config
    overlap = f"boxes overlap by IoU ≥ {config.min_iou:g}" if config.min_iou else "any overlap"
    length = f"{plural(config.n_epochs, 'epoch')} of {config.n_train:,} composites"
    return " · ".join((DATASET_NAMES[run.data.name], overlap, length, run.who))


def tested(n_val: int | None) -> str:
    """What the composites are called on which accuracies are measured, by --n-val."""
    return "validation" if n_val else "test"


def both_names(config: Config, labels: Sequence[int]) -> str:
    return " + ".join(config.classes[label] for label in labels)


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
    batch, params = run.data.test.part(0, N_CANDIDATES), run.states["capsnet"].params
    lengths, v = [], []
    for start in range(0, len(batch.labels), part):
        length, cache = experiment.capsnet_forward(params, batch.images[start : start + part], run.config)
        lengths.append(length)
        v.append(cache.v)
    all_lengths = np.concatenate(lengths)
    answers = in_order_of_labels(batch.labels, experiment.top_labels(all_lengths, 2))
    return Predictions(batch, all_lengths, np.concatenate(v), answers, (answers == batch.labels).sum(axis=1))


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


def absent(predicted: Predictions, chosen: Array) -> Array:
    """The longest capsule of each chosen composite (n,) that is neither a label nor an answer."""
    lengths = predicted.lengths[chosen].copy()
    for named in (predicted.batch.labels[chosen], predicted.answers[chosen]):
        np.put_along_axis(lengths, named, -1, axis=1)
    return lengths.argmax(axis=1)


PERTURBATIONS = np.linspace(-0.25, 0.25, 11)  # of one number of a digit capsule [Sabour 2017, sec. 5.1]


def perturb_capsule(params: experiment.Params, v: Array, label: int) -> Array:
    """v (J, D), one image's capsules -> pictures (D, 11, H, W) drawn from capsule ``label`` with one of its numbers
    changed by -0.25, -0.2 ... 0.25."""
    D, n = v.shape[1], len(PERTURBATIONS)
    changed = np.repeat(v[None], D * n, axis=0)  # (D * n, J, D)
    changed[np.arange(D * n), label, np.repeat(np.arange(D), n)] += np.tile(PERTURBATIONS, D).astype(v.dtype)
    pictures = experiment.reconstruct(params, changed, np.full((D * n, 1), label))
    return pictures.reshape(D, n, *pictures.shape[2:])


def shapes_of(pictures: Array) -> dict[str, Array]:
    """Six measures of digits (..., H, W): their brightness in all, and of its distribution the middle, in pixels from
    the left and from the top, the standard deviations, and the slant in columns to the right a row upwards."""
    H, W = pictures.shape[-2:]
    total = pictures.sum(axis=(-2, -1))
    weight = pictures / np.maximum(total, 1e-9)[..., None, None]
    row, column = np.arange(H)[:, None], np.arange(W)

    def mean(values: Array) -> Array:
        return (weight * values).sum(axis=(-2, -1))

    x, y = mean(column), mean(row)
    dx, dy = column - x[..., None, None], row - y[..., None, None]
    variance = np.maximum(mean(dy**2), 1e-9)
    return {
        "ink": total, "width": np.sqrt(mean(dx**2)), "height": np.sqrt(variance), "slant": -mean(dx * dy) / variance,
        "left–right": x, "up–down": y,
    }  # fmt: skip


def named_numbers(pictures: Array) -> dict[str, int]:
    """pictures (D, n, H, W) drawn with each of D numbers changed -> for each measure of ``shapes_of`` the number that
    changes it most from the first picture to the last; no number has two names."""
    shapes = {name: np.abs(values[:, -1] - values[:, 0]) for name, values in shapes_of(pictures).items()}
    effect = {name: change / max(float(change.mean()), 1e-9) for name, change in shapes.items()}
    found: dict[str, int] = {}
    while len(found) < len(effect):  # the clearest name first
        free = [(change[d], name, d) for name, change in effect.items() for d in range(len(change))
                if name not in found and d not in found.values()]  # fmt: skip
        _, name, d = max(free)
        found[name] = d
    return {name: found[name] for name in shapes}


N_BLOCKS = 5  # rows, and columns, of the regions of primary capsules whose couplings are averaged


def routes(run: Run, image: Array) -> tuple[Array, Array]:
    """Dynamic routing of one composite: couplings (T, J, 5, 5), means over the primary capsules of a region, weighted
    by their lengths; and the lengths (T, J) of the digit capsules after each iteration."""
    config, params = run.config, run.states["capsnet"].params
    _, cache = experiment.capsnet_forward(params, image[None], config, experiment.PLAIN)
    weight = np.sqrt(np.square(cache.routing.u[0].astype(float)).sum(axis=1))  # (I,)
    block = np.arange(config.primary_side) * N_BLOCKS // config.primary_side
    where = np.repeat((block[:, None] * N_BLOCKS + block).ravel(), config.primary_types)
    member = np.eye(N_BLOCKS**2)[where] * np.maximum(weight, 1e-12)[:, None]  # (I, 25)
    c = np.stack(cache.routing.c)[:, 0].swapaxes(1, 2) @ (member / member.sum(axis=0))  # (T, J, 25)
    lengths = np.stack([np.sqrt(np.square(v[0]).sum(axis=1)) for v in cache.routing.v])
    return c.reshape(*c.shape[:2], N_BLOCKS, N_BLOCKS), lengths


# ----------------------------------------------------------------------------------------------------------------------
# Figures of a run
# ----------------------------------------------------------------------------------------------------------------------


def colour_rows(ax: Axes, colours: Mapping[int, str]) -> None:
    """Names of rows in colours."""
    for row, colour in colours.items():
        ax.get_yticklabels()[row].set(color=darkened(colour), fontweight="bold")


def draw_example_pairs(run: Run) -> Figure:
    batch = run.data.test
    chosen = varied(batch.labels, np.arange(min(N_CANDIDATES, len(batch.labels))), 10)
    fig = make_figure(4.4, "Two digits laid over each other", subtitle(run))
    ax = fig.subplots()
    sources = batch.sources[chosen]
    singles = [in_colour(sources[:, d], colour) for d, colour in enumerate(DIGIT_COLOURS)]
    seen = np.repeat(batch.images[chosen][..., None], 3, axis=3)
    rows = ("the network\nsees", "first digit", "second digit", "both,\nin colours")
    show_pictures(ax, np.stack([seen, *singles, in_two_colours(sources)]), rows,
                  [both_names(run.config, labels) for labels in batch.labels[chosen]], gap=(3, 3))  # fmt: skip
    colour_rows(ax, dict(enumerate(DIGIT_COLOURS, 1)))
    return fig


def draw_training_curves(run: Run) -> Figure:
    fig = make_figure(3.75, "Training", subtitle(run))
    head_legend(fig, model_handles(MODELS[name] for name in run.states))
    titles = {
        "train_margin_loss": "margin loss, training",
        "recon_mse": f"reconstruction, MSE of a pixel, {tested(run.config.n_val)}",
        "set_accuracy": f"both digits right, {tested(run.config.n_val)}",
    }
    histories = {name: state.history for name, state in run.states.items()}
    show_histories(fig.subplots(1, 3), titles, histories, MODELS, 1 / run.config.n_pairs)
    return fig


def draw_reconstructions(run: Run, predicted: Predictions) -> Figure:
    batch = predicted.batch
    chosen = varied(batch.labels, np.arange(len(batch.labels)), 8)
    sources = batch.sources[chosen]
    pictures = experiment.reconstruct(run.states["capsnet"].params, predicted.v[chosen], batch.labels[chosen])
    errors = np.square(pictures - sources).mean(axis=(2, 3))
    fig = make_figure(6.6, "Each digit drawn from its own capsule", f"{subtitle(run)}\nnumbers: mean squared error of a"
                      " pixel")  # fmt: skip
    ax = fig.subplots()
    rows = [np.repeat(batch.images[chosen][..., None], 3, axis=3)]
    for d, colour in enumerate(DIGIT_COLOURS):
        rows += [in_colour(sources[:, d], colour), in_colour(pictures[:, d], colour)]
    names = ("the network\nsees", "first digit", "drawn from\nits capsule", "second digit", "drawn from\nits capsule")
    grid = show_pictures(ax, np.stack(rows), names, [both_names(run.config, two) for two in batch.labels[chosen]],
                         gap=(8, 3))  # fmt: skip
    colour_rows(ax, {row: DIGIT_COLOURS[(row - 1) // 2] for row in range(1, 5)})
    for (m, d), error in np.ndenumerate(errors):
        grid.write(2 + 2 * d, m, f"{error:.3f}", color=GREY)
    return fig


OUTCOMES = (("both right", GREEN, ""), ("one right", GREY, "//"), ("none", VERMILLION, "xx"))


def draw_outcomes(ax: Axes, run: Run) -> None:
    """Stacked bars: for how many of all test composites both, one or none of a model's two answers is right."""
    for m, state in enumerate(run.states.values()):
        both, any_right = (state.history[metric][-1] for metric in ("set_accuracy", "soft_accuracy"))
        floor = 0.0
        for fraction, (_, colour, hatch) in zip((both, any_right - both, 1 - any_right), OUTCOMES, strict=True):
            ax.bar(m, fraction, 0.7, floor, color=lightened(colour, 0.6), edgecolor="white", hatch=hatch, zorder=2)
            above = floor + fraction > 1 - 1e-9
            ax.text(m, 1.01 if above else floor + fraction / 2, f"{100 * fraction:.0f} %", ha="center", zorder=4,
                    va="bottom" if above else "center",
                    bbox={"facecolor": "white", "edgecolor": "none", "boxstyle": "round,pad=0.15"})  # fmt: skip
            floor += fraction
    ax.set_xticks(range(len(run.states)), [MODELS[name].short for name in run.states])
    ax.set(ylim=(0, 1), yticks=np.arange(0, 1.01, 0.25))
    ax.set_title(f"{len(run.data.test.labels):,} {tested(run.config.n_val)} composites\n", fontweight="bold")
    ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    ax.tick_params(axis="x", length=0)
    ax.grid(False, axis="x")
    handles = [Patch(facecolor=lightened(c, 0.6), edgecolor="white", hatch=hatch, label=text)
               for text, c, hatch in OUTCOMES[::-1]]  # fmt: skip
    ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def draw_capsule_activations(run: Run, predicted: Predictions) -> Figure:
    """Three composites with both digits right and three with a wrong one, as far as there are; and all of them."""
    batch, config, J = predicted.batch, run.config, run.config.n_classes
    right = varied(batch.labels, np.flatnonzero(predicted.hits == 2), 6)
    wrong = varied(batch.labels, np.flatnonzero(predicted.hits < 2), 6)
    n_wrong = min(len(wrong), max(3, 6 - len(right)))
    chosen = np.concatenate([right[: 6 - n_wrong], wrong[:n_wrong]])
    fig = make_figure(5.4, "Lengths of the digit capsules", subtitle(run))
    head_legend(fig, [
        Patch(facecolor="white", edgecolor=VERMILLION, linewidth=1.8, label="a digit that is there"),
        Patch(facecolor=BLUE, label="the longest two: the answer"),
    ])  # fmt: skip
    sides: Any = fig.subfigures(1, 2, width_ratios=(2.6, 1))
    axes = sides[0].subplots(4, 3, height_ratios=(1, 1.4) * 2)
    for m, k in enumerate(chosen):
        image, bars = axes[m // 3 * 2 : m // 3 * 2 + 2, m % 3]
        labels, answers = batch.labels[k], predicted.answers[k]
        show_pictures(image, batch.images[None, None, k])
        text, colour = marked_answer(predicted.hits[k] == 2, both_names(config, answers))
        for y, line, style in ((0.75, f"true: {both_names(config, labels)}", {}),
                               (0.3, text, {"color": colour, "fontweight": "bold", "fontsize": 11})):  # fmt: skip
            image.text(1.12, y, line, transform=image.transAxes, va="center", in_layout=False, **style)
        colours = [BLUE if j in answers else lightened(BLUE, 0.35) for j in range(J)]
        bars.bar(range(J), predicted.lengths[k], color=colours, width=0.66, zorder=2)
        bars.set(xlim=(-0.7, J - 0.3), ylim=(0, 1), yticks=[0, 0.5, 1])
        bars.set_xticks(range(J), config.classes)
        bars.tick_params(axis="x", length=0)
        bars.grid(False, axis="x")
        for j in labels:
            bars.add_patch(Rectangle((j - 0.46, 0), 0.92, 1.0, fill=False, edgecolor=VERMILLION, linewidth=1.8,
                                     zorder=3, clip_on=False))  # fmt: skip
            bars.get_xticklabels()[j].set(color=VERMILLION, fontweight="bold")
        if m % 3 == 0:
            bars.set_ylabel("length")
    draw_outcomes(sides[1].subplots(), run)
    return fig


class Column(NamedTuple):
    """A column of the overlay figure: a composite, drawn from the capsules of a pair."""

    composite: int
    pair: Sequence[int]
    said: str = ""  # before the pair's names


def draw_overlay(run: Run, predicted: Predictions) -> Figure:
    batch, params = predicted.batch, run.states["capsnet"].params
    right, wrong = (np.flatnonzero(found) for found in (predicted.hits == 2, predicted.hits < 2))
    first, confused = varied(batch.labels, right, 14), varied(batch.labels, wrong, 3)
    ghosts = first[10:] if len(first) > 11 else first[:4]
    banks = (
        ("both digits right", RIGHT, [Column(k, batch.labels[k]) for k in first[:10]]),
        ("one or both wrong; ✗: drawn from the answer", WRONG,
         [c for k in confused for c in (Column(k, batch.labels[k]), Column(k, predicted.answers[k], "✗ "))]),
        ("* second digit is not there", GREY,
         [Column(k, (batch.labels[k, 0], j), "* ") for k, j in zip(ghosts, absent(predicted, ghosts), strict=True)]),
    )  # fmt: skip
    fig = make_figure(7.3, "Two reconstructions laid over each other", f"{subtitle(run)}\nabove each column: the"
                      " digits that are there, and those from whose capsules the second picture is drawn")  # fmt: skip
    axes = fig.subplot_mosaic("aa;bc", width_ratios=(6, 4))
    for ax, (text, colour, columns) in zip(axes.values(), banks, strict=True):
        if not columns:
            ax.axis("off")
            continue
        where = [c.composite for c in columns]
        drawn = experiment.reconstruct(params, predicted.v[where], np.array([c.pair for c in columns], int))
        seen = np.repeat(batch.images[where][..., None], 3, axis=3)
        pictures = np.stack([seen, in_two_colours(drawn), in_two_colours(batch.sources[where])])
        names = [f"{both_names(run.config, batch.labels[c.composite])}\n{c.said}{both_names(run.config, c.pair)}"
                 for c in columns]  # fmt: skip
        show_pictures(ax, pictures, ("input", "drawn", "true") if ax is not axes["c"] else (), names, gap=(3, 3))
        for label, column in zip(ax.get_xticklabels(), columns, strict=True):
            label.set_color(darkened(WRONG) if column.said.startswith("✗") else "black")
        heading(ax, text, colour)
    return fig


def draw_capsule_dimensions(run: Run, predicted: Predictions) -> Figure:
    """Six numbers of the capsules of one composite's two digits, each named by what it changes."""
    batch, shown = predicted.batch, np.arange(0, len(PERTURBATIONS), 2)
    k = int(varied(batch.labels, np.flatnonzero(predicted.hits == predicted.hits.max()), 1)[0])
    text = "one of the 16 numbers (in brackets) is changed before the decoder draws: that which changes the ink, … most"
    fig = make_figure(4.6, "What a number of a digit capsule changes", f"{subtitle(run)}\n{text}")
    for ax, label, colour in zip(fig.subplots(1, 2), batch.labels[k], DIGIT_COLOURS, strict=True):
        pictures = perturb_capsule(run.states["capsnet"].params, predicted.v[k], int(label))
        rows = named_numbers(pictures)
        columns = [with_minus_sign(f"{PERTURBATIONS[m]:+.2f}") for m in shown]
        show_pictures(ax, pictures[list(rows.values())][:, shown], [f"{name} ({d + 1})" for name, d in rows.items()],
                      columns, gap=(2, 2), n_greys=32)  # fmt: skip
        heading(ax, f"capsule of the {run.config.classes[label]}", colour)
    return fig


def draw_couplings(run: Run, predicted: Predictions) -> Figure:
    """A map of printed couplings for each iteration (column) and for two digits that are there and one that is not."""
    config, batch = run.config, predicted.batch
    k = int(varied(batch.labels, np.flatnonzero(predicted.hits == predicted.hits.max()), 2)[-1])
    c, lengths = routes(run, batch.images[k])
    shown, sources = evenly_spaced_indices(len(c), 3), batch.sources[k]
    a, b, other = (*map(int, batch.labels[k]), int(absent(predicted, np.array([k]))[0]))
    names, even = config.classes, 1 / config.n_classes  # coupling before the first iteration
    text = "numbers: couplings with a digit capsule in percent, means over the primary capsules of a region; even: "
    fig = make_figure(8.0, f"Dynamic routing of {names[a]} + {names[b]}", f"{subtitle(run)}\n{text}{100 * even:.3g}")
    axes = fig.subplots(3, 1 + len(shown), squeeze=False, width_ratios=(0.75, *(1 for _ in shown)))
    for ax, image, title in ((axes[0, 0], batch.images[k], "the network sees"),
                             (axes[1, 0], in_two_colours(sources), "its digits")):  # fmt: skip
        show_pictures(ax, image[None, None])
        ax.set_title(title)
    # A capsule's field is 17 pixels wide and moves by 2 from column to column.
    middle, reach = (experiment.KERNEL - 1) / 2 * 2, 2 * config.primary_side
    axes[0, 0].add_patch(Rectangle((middle - 1, middle - 1), reach, reach, fill=False, edgecolor=GREEN, linewidth=1.6))
    axes[0, 0].set_xlabel("green: middles of the\nprimary capsules' fields", fontsize=9, color=darkened(GREEN))
    axes[0, 0].xaxis.set_label_position("bottom")
    axes[2, 0].axis("off")
    pixels = (np.arange(config.image_size) - middle + 1) / reach * N_BLOCKS - 0.5
    for row, j, d in zip(axes[:, 1:], (a, b, other), (0, 1, None), strict=True):
        colour = "black" if d is None else DIGIT_COLOURS[d]
        for ax, t in zip(row, shown, strict=True):
            show_couplings(ax, c[t, j], even)
            for digit in sources if d is None else sources[d : d + 1]:
                ax.contour(pixels, pixels, digit, [0.5], colors="#c8c8c8", linewidths=1.2, zorder=1)
            ax.set(xlim=(-0.5, N_BLOCKS - 0.5), ylim=(N_BLOCKS - 0.5, -0.5))
            ax.set_xlabel(f"length {lengths[t, j]:.2f}", color=darkened(colour), fontweight="bold")
            if j == a:
                ax.set_title(f"iteration {t + 1}", loc="center")
        row[0].set_ylabel(f"with {names[j]}{', not there' * (d is None)}", color=darkened(colour), fontweight="bold")
    return fig


def show_couplings(ax: Axes, c: Array, even: float) -> None:
    """Couplings (5, 5) in percent on a pale scale: red above even, blue below."""
    pale = 1 - 0.55 * (1 - colormaps["RdBu_r"](np.clip(c / even / 2, 0, 1))[..., :3])
    ax.imshow(pale, zorder=0)
    for (row, column), value in np.ndenumerate(c):
        ax.text(column, row, f"{100 * value:.1f}", ha="center", va="center_baseline", fontsize=9, zorder=3)
    ax.set(xticks=[], yticks=[])
    ax.grid(False)
    ax.spines[:].set(visible=True, color="#c8c8c8", linewidth=0.8)


# ----------------------------------------------------------------------------------------------------------------------
# Accuracy against the length of training, from results
# ----------------------------------------------------------------------------------------------------------------------

PAPER_ACCURACY = 1 - 0.052  # of the CapsNet [Sabour 2017, sec. 6]
PAPER_CHANNELS = experiment.PRESETS["paper"]["conv_channels"]


class Series(NamedTuple):
    model: str
    of_paper_size: bool
    min_iou: float  # 0 in the paper


def read_scaling(folder: Path) -> dict[Series, dict[int, Array]]:
    """By series and composites seen in training: of each seed, the fraction of images with both digits right. The rate
    falls to 0 in each training, so that every length is a training of its own. Raises UserError where there is no file
    scaling_*.json in the folder, or where a series has two settings of one length."""
    found: dict[Series, dict[int, Array]] = {}
    for path in sorted(folder.glob("scaling_*.json")):
        for one in settings_in(path):
            config = one["config"]
            length = Config(**{name: config[name] for name in ("n_epochs", "n_train", "batch_size")})
            seen = length.n_steps * length.batch_size
            for model in {*one["runs"][0]["models"]} & {*MODELS}:
                lengths = found.setdefault(
                    Series(model, config["conv_channels"] == PAPER_CHANNELS, config["min_iou"]), {}
                )
                if seen in lengths:
                    raise UserError(f"{path}: {model} has another setting of {seen:,} composites")
                lengths[seen] = np.array([run["models"][model]["set_accuracy"] for run in one["runs"]])
    if not found:
        raise UserError(f"there is no {folder}/scaling_*.json by compare_seeds.py")
    order = sorted(found, key=lambda series: (series.of_paper_size, list(MODELS).index(series.model)))
    return {series: dict(sorted(found[series].items())) for series in order}


def draw_scaling(accuracies: Mapping[Series, Mapping[int, Array]]) -> Figure:
    """Means with intervals; a length of one seed is a hollow point."""
    usual = Config.min_iou
    fig = make_figure(4.4, "Both digits right against composites seen", f"boxes overlap by IoU ≥ {usual:g} · means and"
                      " 95 % intervals over seeds; hollow: one seed")  # fmt: skip
    ax, handles = fig.subplots(), []
    for k, (series, lengths) in enumerate(accuracies.items()):
        style = MODELS[series.model]
        label = style.label + " of the paper's size" * series.of_paper_size
        if series.min_iou != usual:
            label += f", IoU ≥ {series.min_iou:g}" if series.min_iou else ", any overlap"
        style = style._replace(label=label, marker="P" if series.of_paper_size else style.marker)
        x = np.array(list(lengths)) * 1.03 ** (k - (len(accuracies) - 1) / 2)  # intervals stay apart
        means, halves = np.array([interval(values) for values in lengths.values()]).T
        line = model_line(style, linestyle="--" if series.of_paper_size else "-", markersize=7)
        handles += [Line2D([], [], **line), *ax.plot(x, means, zorder=3, **line)][:1]
        ax.errorbar(x, means, halves, fmt="none", ecolor=style.colour, elinewidth=1.8, zorder=2)
        alone = np.array([len(values) == 1 for values in lengths.values()])
        ax.plot(x[alone], means[alone], ls="", marker=style.marker, markersize=6, markerfacecolor="white",
                markeredgecolor=style.colour, markeredgewidth=1.5, zorder=4)  # fmt: skip
    head_legend(fig, handles, n_rows=-(-len(handles) // 3))
    ax.axhline(PAPER_ACCURACY, **REFERENCE_LINE, zorder=1.5)
    paper = "the paper's CapsNet of 11.4 million parameters, on digits that may lie farther apart"
    name_line(ax, paper, PAPER_ACCURACY)
    ax.set(ylabel="both digits right", xlabel="composites seen in training", xscale="log")
    lowest = min(values.min() for lengths in accuracies.values() for values in lengths.values())
    ax.set_ylim(max(0.0, 0.1 * np.floor(10 * (lowest - 0.01))), 1)
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda n, _: f"{n / 1e6:g} million" if n >= 1e6 else f"{n:,.0f}")
    return fig


# ----------------------------------------------------------------------------------------------------------------------
# Files and command line
# ----------------------------------------------------------------------------------------------------------------------

OF_RUN = (
    "example_pairs", "training_curves", "reconstructions", "capsule_activations", "overlay", "capsule_dimensions",
    "couplings",
)  # fmt: skip
OF_RESULTS = ("scaling",)
N_COLOURS = {"reconstructions": 255, "overlay": 255, "couplings": 192}  # of the palettes of large pictures


def drawers(run: Run) -> dict[str, Callable[[], Figure]]:
    """Name of each figure of a run, and what draws it (within ``figure_style``)."""
    predicted = predict(run)
    return {
        "example_pairs": lambda: draw_example_pairs(run),
        "training_curves": lambda: draw_training_curves(run),
        "reconstructions": lambda: draw_reconstructions(run, predicted),
        "capsule_activations": lambda: draw_capsule_activations(run, predicted),
        "overlay": lambda: draw_overlay(run, predicted),
        "capsule_dimensions": lambda: draw_capsule_dimensions(run, predicted),
        "couplings": lambda: draw_couplings(run, predicted),
    }


def require_composites(data: Data) -> None:
    """Raises UserError where there are too few test composites."""
    if len(data.test.labels) < MIN_TEST:
        raise UserError(f"the figures need --n-test {MIN_TEST} or more")


@dataclasses.dataclass(frozen=True)
class Options(FigureOptions):
    figures: tuple[str, ...] = setting(
        (), names_of((*OF_RUN, *OF_RESULTS)), f"Draw these alone: {', '.join((*OF_RUN, *OF_RESULTS))}.", usual=True
    )
    results: Path = setting(RESULTS, input_path, "Results of compare_seeds.py: the reported seeds.")
    threads: int = redeclared(experiment.Options, "threads")


@script
def main(argv: Sequence[str] | None = None) -> None:
    asked, options, given = parse(
        Config, Options, argv,
        "Draw the figures of the MultiMNIST experiment, from a checkpoint or after training its models.",
        [
            ("--checkpoint run.safetensors", "All figures of these networks: about 9 seconds."),
            ("", "All figures, after training the three models for eight epochs: about 7 minutes."),
            ("--figures scaling", "Accuracy against the length of training, from committed results: about 2 seconds."),
        ],
        f"The figures go to DIR/{experiment.EXPERIMENT}/, where DIR is --outdir.",
    )  # fmt: skip

    def of_run() -> dict[str, Callable[[], Figure]]:
        config, states = load_finished(experiment, options.checkpoint, asked, given, required=("capsnet",))
        reported = reported_runs(options.results, config)
        if reported and "seed" not in given and not states:
            config = dataclasses.replace(config, seed=median_seed(reported, *MEDIAN_OF))
        data = experiment.make_data(config)
        config = experiment.resolve_auto(config, data.name)
        require_composites(data)
        states = states or experiment.train_all(config, data, RunOptions(threads=options.threads, quiet=options.quiet))
        result = experiment.make_result(config, data, states, options.threads)
        print(f"{experiment.describe(result)}\n{experiment.format_table(result)}")
        return drawers(Run(config, data, states, seed_text(config, reported, *MEDIAN_OF)))

    of_results = {"scaling": lambda: draw_scaling(read_scaling(RESULTS.parent))}
    with blas_threads(1):
        draw_figures(options.outdir / experiment.EXPERIMENT, options, of_results, of_run, N_COLOURS)


if __name__ == "__main__":
    sys.exit(main())
