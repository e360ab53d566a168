#!/usr/bin/env python3
"""Draw the figures of the MultiMNIST experiment into ``DIR/multimnist_capsnet/``.

    python visualize_multimnist_capsnet.py --n-epochs 8 --n-train 6000 --outdir viz

trains the three models and draws; ``--checkpoint FILE`` draws what ``multimnist_capsnet.py --checkpoint FILE`` has
trained. Of reported settings it is, without --seed, the seed whose capsule network has the median accuracy.

    example_pairs.png         composites and the two digits that each is made of
    training_curves.png       losses and accuracies, epoch by epoch
    reconstructions.png       both digits of a composite, each drawn by the decoder from its own capsule alone
    capsule_activations.png   lengths of the ten digit capsules, and how often both, one or none of the digits is found
    overlay.png               reconstructions in two colours, right, wrong, and of digits that are not there

and from results of compare_seeds.py:

    scaling.png               both digits right against composites seen in training, means and intervals over seeds

Which composites are shown never depends on how well they are reconstructed: among those that fit a figure's heading the
first of the test set are taken, other digits before digits that have been shown.
"""

from __future__ import annotations

from support.figures import (
    BLUE, CAPSNET, CNN, DATASET_NAMES, GREEN, GREY, OF_MEDIAN, POOLING, REFERENCE_LINE, RIGHT, SKY, VERMILLION, WRONG,
    YELLOW, FigureOptions, Run, bare, choice_of_figures, darkened, draw_histories, figure_script, head_legend, heading,
    interval, lightened, load_or_train, make_figure, marked_answer, model_line, name_line, plural, settings_in,
    show_pictures, tested,
)

import dataclasses
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import LogLocator, NullLocator

import multimnist_capsnet as multimnist
from multimnist_capsnet import Array, Batch, Config, resolve_auto
from support.experiment import ROOT, redeclared
from support.results import parse_json

MODELS = {"capsnet": CAPSNET, "cnn": CNN._replace(label="CNN without pooling"), "cnn_pool": POOLING}
N_PAIRS = multimnist.N_CLASSES * (multimnist.N_CLASSES - 1) // 2  # of different classes
DIGIT_COLOURS = YELLOW, SKY  # of the first and the second digit; where both are bright their sum is white
RESULTS = Path("results") / multimnist.EXPERIMENT / "registered_composites_48000.json#capsnet"
SCALING_RESULTS = RESULTS.with_name("scaling.json")  # all lengths, with few seeds and no verdict
MEDIAN_OF = RESULTS, "capsnet", "set_accuracy"


def in_colour(digit: Array, colour: str) -> Array:
    """A digit (..., H, W) in [0, 1] as RGB (..., H, W, 3) on black."""
    return digit[..., None] * np.array(to_rgb(colour))


def in_two_colours(digits: Array) -> Array:
    """Two digits (..., 2, H, W) in two colours that add up: RGB (..., H, W, 3)."""
    return np.clip(sum(in_colour(digits[..., d, :, :], colour) for d, colour in enumerate(DIGIT_COLOURS)), 0, 1)


# --- What is drawn: a finished run, and composites chosen from its test set -------------------------------------------

N_CANDIDATES = 1000  # composites that examples are chosen from


def subtitle(run: Run) -> str:
    """What every figure says of its run: data set, overlap, seed, and how long it trained."""
    config = run.config
    overlap = f"boxes overlap by IoU ≥ {config.min_iou:g}" if config.min_iou else "any overlap"
    length = f"{plural(config.n_epochs, 'epoch')} of {config.n_train:,} composites"
    return " · ".join((DATASET_NAMES[run.data.name], overlap, length, run.who))


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
    parts = np.split(batch.images, range(part, len(batch.images), part))
    found = [multimnist.capsnet_forward(params, images, run.config) for images in parts]
    lengths, v = np.concatenate([one for one, _ in found]), np.concatenate([cache.v for _, cache in found])
    answers = in_order_of_labels(batch.labels, multimnist.top_labels(lengths, 2))
    return Predictions(batch, lengths, v, answers, (answers == batch.labels).sum(axis=1))


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


# --- Figures of a run -------------------------------------------------------------------------------------------------


def colour_rows(ax: Axes, colours: Mapping[int, str]) -> None:
    """Names of rows in colours."""
    for row, colour in colours.items():
        ax.get_yticklabels()[row].set(color=darkened(colour), fontweight="bold")


def draw_example_pairs(run: Run) -> Figure:
    batch = run.data.test.part(0, N_CANDIDATES)
    chosen = varied(batch.labels, np.arange(len(batch.labels)), 10)
    sources = batch.sources[chosen]
    fig = make_figure(4.4, "Two digits laid over each other", subtitle(run))
    ax = fig.subplots()
    seen = np.repeat(batch.images[chosen][..., None], 3, axis=3)
    singles = [in_colour(sources[:, d], colour) for d, colour in enumerate(DIGIT_COLOURS)]
    rows = ("the network\nsees", "first digit", "second digit", "both,\nin colours")
    show_pictures(ax, np.stack([seen, *singles, in_two_colours(sources)]), rows,
                  [both_names(run.config, labels) for labels in batch.labels[chosen]], gap=(3, 3))
    colour_rows(ax, dict(enumerate(DIGIT_COLOURS, 1)))
    return fig


def draw_training_curves(run: Run) -> Figure:
    titles = {
        "train_class_loss": "margin loss, training",
        "recon_mse": f"reconstruction, MSE of a pixel, {tested(run.config)}",
        "set_accuracy": f"both digits right, {tested(run.config)}",
    }
    return draw_histories(subtitle(run), titles, run.states, MODELS, 1 / N_PAIRS)


def draw_reconstructions(run: Run) -> Figure:
    predicted: Predictions = run.tested
    batch = predicted.batch
    chosen = varied(batch.labels, np.arange(len(batch.labels)), 8)
    sources = batch.sources[chosen]
    pictures = multimnist.reconstruct(run.states["capsnet"].params, predicted.v[chosen], batch.labels[chosen])
    text = f"{subtitle(run)}\nnumbers: mean squared error of a pixel"
    fig = make_figure(6.6, "Each digit drawn from its own capsule", text)
    ax = fig.subplots()
    rows = [np.repeat(batch.images[chosen][..., None], 3, axis=3)]
    for d, colour in enumerate(DIGIT_COLOURS):
        rows += [in_colour(sources[:, d], colour), in_colour(pictures[:, d], colour)]
    names = ("the network\nsees", "first digit", "drawn from\nits capsule", "second digit", "drawn from\nits capsule")
    grid = show_pictures(ax, np.stack(rows), names, [both_names(run.config, two) for two in batch.labels[chosen]],
                         gap=(8, 3))
    colour_rows(ax, {row: DIGIT_COLOURS[(row - 1) // 2] for row in range(1, 5)})
    for (m, d), error in np.ndenumerate(np.square(pictures - sources).mean(axis=(2, 3))):
        grid.write(2 + 2 * d, m, f"{error:.3f}", color=GREY)
    return fig


def draw_outcomes(ax: Axes, run: Run) -> None:
    """Stacked bars: for how many of all test composites both, one or none of a model's two answers is right."""
    both, some = (np.array([state.history[metric][-1] for state in run.states.values()])
                  for metric in ("set_accuracy", "soft_accuracy"))
    names, floor = [MODELS[name].short for name in run.states], np.zeros(len(both))
    outcomes = (("both right", GREEN, both), ("one right", GREY, some - both), ("none", VERMILLION, 1 - some))
    for text, colour, fractions in outcomes:
        bars = ax.bar(names, fractions, 0.7, floor, color=lightened(colour, 0.5), label=text, zorder=2)
        ax.bar_label(bars, [f"{100 * fraction:.0f} %" for fraction in fractions], label_type="center",
                     bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
        floor = floor + fractions
    heading(ax, f"{len(run.data.test.labels):,} {tested(run.config)} composites")
    ax.set(ylim=(-0.04, 1.04), yticks=[])
    bare(ax)
    ax.legend(reverse=True, loc="upper center", bbox_to_anchor=(0.5, -0.1))


def draw_capsule_activations(run: Run) -> Figure:
    """Six composites, and all of them."""
    predicted: Predictions = run.tested
    batch, config = predicted.batch, run.config
    fig = make_figure(5.4, "Lengths of the digit capsules", subtitle(run))
    head_legend(fig, [
        Patch(facecolor="white", edgecolor=VERMILLION, linewidth=1.8, label="a digit that is there"),
        Patch(facecolor=BLUE, label="the longest two: the answer"),
    ])
    sides: Any = fig.subfigures(1, 2, width_ratios=(2.6, 1))
    axes = sides[0].subplots(4, 3, height_ratios=(1, 1.4) * 2)
    for m, k in enumerate(varied(batch.labels, np.arange(len(batch.labels)), 6)):
        image, bars = axes[m // 3 * 2 : m // 3 * 2 + 2, m % 3]
        labels, answers = batch.labels[k], predicted.answers[k]
        show_pictures(image, batch.images[None, None, k])
        text, colour = marked_answer(predicted.hits[k] == 2, both_names(config, answers))
        image.text(1.12, 0.5, f"true: {both_names(config, labels)}\n{text}", color=colour, va="center",
                   transform=image.transAxes, in_layout=False)
        colours = [BLUE if j in answers else lightened(BLUE, 0.35) for j in range(config.n_classes)]
        bars.bar(range(config.n_classes), predicted.lengths[k], 0.66, color=colours, zorder=2)
        bars.set(ylim=(0, 1), yticks=[0, 0.5, 1], ylabel="length" if m % 3 == 0 else "")
        bars.set_xticks(range(config.n_classes), config.classes)
        bars.grid(False, axis="x")
        for j in labels:
            bars.add_patch(Rectangle((j - 0.46, 0), 0.92, 1.0, fill=False, edgecolor=VERMILLION, linewidth=1.8,
                                     zorder=3, clip_on=False))
            bars.get_xticklabels()[j].set(color=VERMILLION, fontweight="bold")
    draw_outcomes(sides[1].subplots(), run)
    return fig


def draw_overlay(run: Run) -> Figure:
    predicted: Predictions = run.tested
    batch, params = predicted.batch, run.states["capsnet"].params
    right, wrong = (np.flatnonzero(found) for found in (predicted.hits == 2, predicted.hits < 2))
    first, confused = varied(batch.labels, right, 14), varied(batch.labels, wrong, 3)
    ghosts = first[10:] if len(first) > 11 else first[:4]
    banks = (  # of columns: a composite, the pair from whose capsules it is drawn, and what is said of the pair
        ("both digits right", RIGHT, [(k, batch.labels[k], "") for k in first[:10]]),
        ("one or both wrong; ✗: drawn from the answer", WRONG,
         [column for k in confused for column in ((k, batch.labels[k], ""), (k, predicted.answers[k], "✗ "))]),
        ("* second digit is not there", GREY,
         [(k, (batch.labels[k, 0], j), "* ") for k, j in zip(ghosts, absent(predicted, ghosts), strict=True)]),
    )
    fig = make_figure(7.3, "Two reconstructions laid over each other", f"{subtitle(run)}\nabove each column: the"
                      " digits that are there, and those from whose capsules the second picture is drawn")
    axes = fig.subplot_mosaic("aa;bc", width_ratios=(6, 4))
    for ax, (text, colour, columns) in zip(axes.values(), banks, strict=True):
        if not columns:
            ax.axis("off")
            continue
        where, pairs, marks = (list(part) for part in zip(*columns, strict=True))
        drawn = multimnist.reconstruct(params, predicted.v[where], np.array(pairs, int))
        seen = np.repeat(batch.images[where][..., None], 3, axis=3)
        pictures = np.stack([seen, in_two_colours(drawn), in_two_colours(batch.sources[where])])
        names = [f"{both_names(run.config, batch.labels[k])}\n{mark}{both_names(run.config, pair)}"
                 for k, pair, mark in columns]
        show_pictures(ax, pictures, ("input", "drawn", "true") if ax is not axes["c"] else (), names, gap=(3, 3))
        for label, mark in zip(ax.get_xticklabels(), marks, strict=True):
            label.set_color(darkened(WRONG) if mark == "✗ " else "black")
        heading(ax, text, colour)
    return fig


# --- Accuracy against the length of training, from results ------------------------------------------------------------

PAPER_ACCURACY = 1 - 0.052  # of the CapsNet [Sabour 2017, sec. 6]
PAPER_CHANNELS = multimnist.PRESETS["paper"]["conv_channels"]


class Series(NamedTuple):
    model: str
    of_paper_size: bool


def settings_of_parts(path: Path) -> list[dict[str, Any]]:
    """The settings of all parts of a file."""
    parts = parse_json(path).get("parts")
    files = [Path(f"{path}#{part}") for part in parts] if parts else [path]
    return [one for file in files for one in settings_in(file)]


def read_scaling(path: Path) -> dict[Series, dict[int, Array]]:
    """By series and composites seen in training, each length a training of its own: the fraction of images with both
    digits right, of each seed. Newer runs (composites_N.json and paper_size*.json beside ``path``) replace others as
    long. Left out are those on validation digits, and those on digits that are added."""
    found, path = dict[Series, dict[int, Array]](), ROOT / path
    newer = [file for name in ("composites_*.json", "paper_size*.json") for file in path.parent.glob(name)]
    for one in (one for file in (path, *newer) for one in settings_of_parts(file)):
        config, runs = one["config"], one["runs"]
        if config.get("n_val") or config.get("overlay") == "sum":
            continue
        length = Config(**{name: config[name] for name in ("n_epochs", "n_train", "batch_size")})
        for model in runs[0]["models"]:
            series = Series(model, config["conv_channels"] == PAPER_CHANNELS)
            accuracy = np.array([run["models"][model]["set_accuracy"] for run in runs])
            found.setdefault(series, {})[length.n_steps * length.batch_size] = accuracy
    order = sorted(found, key=lambda series: (series.of_paper_size, list(MODELS).index(series.model)))
    return {series: dict(sorted(found[series].items())) for series in order}


def draw_scaling(accuracies: Mapping[Series, Mapping[int, Array]]) -> Figure:
    """Means with intervals; a length of one or two seeds is a hollow point."""
    fig = make_figure(4.4, "Both digits right against composites seen", f"boxes overlap by IoU ≥ {Config.min_iou:g}, of"
                      " the paper's size by any · means and 95 % intervals over seeds; hollow: one or two seeds")
    ax, handles = fig.subplots(), []
    for k, (series, lengths) in enumerate(accuracies.items()):
        style = MODELS[series.model]
        label = style.label + " of the paper's size" * series.of_paper_size
        style = style._replace(label=label, marker="P" if series.of_paper_size else style.marker)
        x = np.array(list(lengths)) * 1.03 ** (k - (len(accuracies) - 1) / 2)  # intervals stay apart
        means, halves = np.array([interval(values) for values in lengths.values()]).T
        line = model_line(style, linestyle="--" if series.of_paper_size else "-", markersize=7)
        handles += [Line2D([], [], **line), *ax.plot(x, means, zorder=3, **line)][:1]
        few = np.array([len(values) < 3 for values in lengths.values()])
        ax.errorbar(x[~few], means[~few], halves[~few], fmt="none", ecolor=style.colour, elinewidth=1.8, zorder=2)
        ax.plot(x[few], means[few], ls="", marker=style.marker, markersize=6, markerfacecolor="white",
                markeredgecolor=style.colour, markeredgewidth=1.5, zorder=4)
    head_legend(fig, handles, n_rows=-(-len(handles) // 3))
    ax.axhline(PAPER_ACCURACY, **REFERENCE_LINE)
    name_line(
        ax, "the paper's CapsNet of 11.4 million parameters, on digits that may lie farther apart", PAPER_ACCURACY
    )
    ax.set(ylabel="both digits right", xlabel="composites seen in training", xscale="log")
    lowest = min(values.min() for lengths in accuracies.values() for values in lengths.values())
    ax.set_ylim(max(0.0, 0.1 * np.floor(10 * (lowest - 0.01))), 1)
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda n, _: f"{n / 1e6:g} million" if n >= 1e6 else f"{n:,.0f}")
    return fig


# --- Files and command line -------------------------------------------------------------------------------------------

OF_RUN = {
    "example_pairs": draw_example_pairs, "training_curves": draw_training_curves,
    "reconstructions": draw_reconstructions, "capsule_activations": draw_capsule_activations, "overlay": draw_overlay,
}
OF_RESULTS = {"scaling": lambda: draw_scaling(read_scaling(SCALING_RESULTS))}
N_COLOURS = {"reconstructions": 255, "overlay": 255}  # of the palettes of large pictures


@dataclasses.dataclass(frozen=True)
class Options(FigureOptions):
    figures: tuple[str, ...] = choice_of_figures(*OF_RUN, *OF_RESULTS)
    threads: int = redeclared(multimnist.Options, "threads")


def trained(asked: Config, options: Options, given: Collection[str]) -> Run:
    run = load_or_train(multimnist, options, asked, given, resolve_auto, MEDIAN_OF, required=("capsnet",))
    return run._replace(tested=predict(run))


main = figure_script(
    multimnist.EXPERIMENT, Config, Options,
    "Draw the figures of the MultiMNIST experiment, from a checkpoint or after training its models." + OF_MEDIAN,
    ("--checkpoint run.npz", "All figures of these networks: about 9 seconds."),
    ("", "All figures, after training the three models for four epochs: about 7 minutes."),
    ("--figures scaling", "Accuracy against the length of training, from committed results: about 2 seconds."),
    prepare=trained, of_run=OF_RUN, of_results=OF_RESULTS, n_colours=N_COLOURS,
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
