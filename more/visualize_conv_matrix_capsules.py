"""Draw the figures of the convolutional matrix capsules into ``DIR/conv_matrix_capsules/``.

    python -m more.visualize_conv_matrix_capsules --checkpoint run.npz

draws what ``conv_matrix_capsules.py --checkpoint run.npz`` has trained; without ``--checkpoint`` it trains
first, with the same flags as that script.

    vote_distances.png      distances of the votes from the mean of their class capsule, in each iteration
    training_curves.png     loss, and errors or, of views, accuracies, epoch by epoch

and from results of compare_seeds.py:

    novel_viewpoints.png    accuracy on toys beyond the trained range, and on held-out against familiar views
    shapes_accuracy.png     accuracy on drawn shapes, and the networks' difference, beyond the trained range
    table_2.png             errors on novel viewpoints at equal errors on familiar ones, beside the paper's table 2
"""

from __future__ import annotations

from support.figures import (
    BLACK, BLUE, CNN, DATASET_NAMES, EM_CAPSULES, GREEN, PAPER_CNN, VIEWPOINT_METRICS, FigureOptions, ModelStyle, Run,
    accuracy_axis, choice_of_figures, darkened, draw_histories, evenly_spaced_indices, figure_script, head_legend,
    interval, lightened, load_or_train, make_figure, model_handles, model_line, plot_band, plural, settings_in, tested,
    weighted_quantiles, with_minus_sign,
)

import dataclasses
import itertools
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from more import conv_matrix_capsules as conv
from more.conv_matrix_capsules import Array, Config, smallnorb
from multimnist_capsnet import resolve_auto
from support.statistics import at_equal_values

MODELS = {"capsules": EM_CAPSULES, "cnn": CNN}
DEGREES_BEYOND = "degrees beyond the trained range; 0: within it"


def style_of(name: str, cnn: str) -> ModelStyle:
    """Of a model, where ``cnn`` is that of its configuration."""
    return PAPER_CNN if (name, cnn) == ("cnn", "paper") else MODELS[name]


def subtitle(run: Run) -> str:
    """The data set, the network and its training."""
    config = run.config
    channels, *types = config.sizes
    parts = [
        DATASET_NAMES[run.data.name],
        f"{plural(channels, 'channel')}, capsules of {', '.join(map(str, types))} types",
        plural(config.em_iters, "EM iteration"),
        f"seed {config.seed}",
        f"{plural(config.n_epochs, 'epoch')} of {len(run.data.train.labels):,} images",
    ]
    return " · ".join(parts)


# --- Figures: routing -------------------------------------------------------------------------------------------------

N_ROUTED = 200  # test images
N_BINS = 30


def draw_vote_distances(run: Run) -> Figure:
    """A panel for each iteration: the votes of the true classes' capsules and of all others, weighted by their mass."""
    chosen = conv.subset(run.data.test, N_ROUTED)
    routing = conv.class_routing(run.states["capsules"].params, chosen.images, run.config)
    distances, mass = (part.swapaxes(2, 3) for part in (routing.distances, routing.weights))  # (T, N, J, M)
    mass = mass / mass.sum(axis=(2, 3), keepdims=True)  # fractions of that of an image
    limit = float(weighted_quantiles(distances.ravel(), mass.ravel(), 0.97))  # most mass lies within
    own = chosen.labels[:, None] == np.arange(run.config.n_classes)
    text = (
        f"{subtitle(run)}\n{len(own)} test images; mass: assignment × activation; the last bar holds what is beyond;"
        " lines: mean distances"
    )
    fig = make_figure(3.7, "How far the votes lie from the mean of their class capsule", text)
    shown = evenly_spaced_indices(len(mass), 3)
    for t, ax in zip(shown, fig.subplots(1, len(shown), sharey=True, squeeze=False)[0], strict=True):
        for name, each, colour, histtype, of_kind in (
            ("other classes", " each", BLUE, "stepfilled", ~own), ("true class", "", GREEN, "step", own)
        ):
            away, weights = distances[t, of_kind], mass[t, of_kind]  # (capsules, M)
            totals = weights.sum(axis=1)
            mean = ((weights * away).sum(axis=1) / np.maximum(totals, 1e-12)).mean()
            ax.hist(np.minimum(away, limit).ravel(), np.linspace(0, limit, N_BINS + 1),
                    weights=weights.ravel() / len(weights), histtype=histtype, facecolor=lightened(colour, 0.35),
                    edgecolor=colour, linewidth=1.8,
                    label=f"{name}: {100 * totals.mean():.0f} % of the mass{each}")
            ax.axvline(mean, color=darkened(colour), linestyle="--")
        ax.set(title=f"iteration {t + 1}", xlabel="distance", xlim=(0, limit))
        ax.legend(loc="upper right", reverse=True)
    fig.axes[0].set_ylabel("mass, per capsule")
    return fig


# --- Figures: training ------------------------------------------------------------------------------------------------


def draw_training_curves(run: Run) -> Figure:
    config = run.config
    styles = {name: style_of(name, config.cnn) for name in run.states}
    metrics = VIEWPOINT_METRICS if config.has_held_out else {"error": f"{tested(config)} error"}
    titles = {"train_loss": "training loss, each model's own", **metrics}
    return draw_histories(subtitle(run), titles, run.states, styles, 1 / config.n_classes)


# --- Figures: novel viewpoints ----------------------------------------------------------------------------------------


class Views(NamedTuple):
    """Runs of one model, over seeds, in which one angle is held out."""

    style: ModelStyle
    angle: str  # "azimuth" or "elevation"
    degrees: Array  # (X,) beyond the trained range; 0 within it
    accuracy: Array  # (seeds, X) means of what lies equally far
    histories: Sequence[Mapping[str, Sequence[float]]]  # one for each seed, where they were kept


def beyond(angle: float, trained: Sequence[float], *, circular: bool) -> float:
    """Degrees from an angle to the nearer end of the trained range; 0 within it."""
    low, high = trained
    middle = (low + high) / 2
    away = abs((angle - middle + 180) % 360 - 180) if circular else abs(angle - middle)
    return max(0.0, away - (high - low) / 2)


def read_views(paths: Sequence[Path]) -> list[Views]:
    """The runs of each model in files or parts by compare_seeds.py."""
    found = []
    for one in (one for path in paths for one in settings_in(path)):
        config, runs = one["config"], one["runs"]
        angle = "azimuth" if config["train_elevations"] == config["test_elevations"] else "elevation"
        for model, metrics in runs[0]["models"].items():
            at: dict[float, list[list[float]]] = {}
            for key in metrics:
                if match := re.fullmatch(rf"{angle}_(-?[0-9.]+)_accuracy", key):  # such as azimuth_20_accuracy
                    where = beyond(float(match[1]), config[f"train_{angle}s"], circular=angle == "azimuth")
                    at.setdefault(where, []).append([run["models"][model][key] for run in runs])
            degrees = np.array(sorted(at))
            accuracy = np.stack([np.mean(at[x], axis=0) for x in degrees], axis=1)
            style = style_of(model, config.get("cnn", "matched"))  # older results have no such field
            histories = [run["history"][model] for run in runs if "history" in run]
            found.append(Views(style, angle, degrees, accuracy, histories))
    return found


def draw_beyond(ax: Axes, views: Sequence[Views], title: str) -> None:
    """Accuracy against degrees beyond the trained range."""
    accuracy_axis(ax, "accuracy", 1 / len(smallnorb.SMALLNORB_CLASSES), side="left")
    for one in views:
        plot_band(ax, one.degrees, one.accuracy, one.style)
    ax.set(title=title, xlabel=DEGREES_BEYOND)
    ax.xaxis.set_major_formatter("{x:g}°")


def draw_novel_viewpoints(views: Sequence[Views]) -> Figure:
    """A row for each held-out angle: accuracy beyond the trained range, and the course of the training."""
    angles = dict.fromkeys(one.angle for one in views)
    n = max(len(one.accuracy) for one in views)
    text = f"{DATASET_NAMES['toys']} · one set · mean and 95 % interval of {plural(n, 'training')}"
    fig = make_figure(1.1 + 2.9 * len(angles), "Accuracy on viewpoints that were never trained on", text)
    head_legend(fig, model_handles(dict.fromkeys(one.style for one in views)))
    axes = fig.subplots(len(angles), 2, squeeze=False, width_ratios=(5, 3))
    for (at, course), angle in zip(axes, angles, strict=True):
        of_angle = [one for one in views if one.angle == angle]
        draw_beyond(at, of_angle, f"new {angle}s")
        for one in of_angle:
            familiar, held_out = (np.mean([history[f"{part}_accuracy"] for history in one.histories], axis=0)
                                  for part in ("familiar", "held_out"))
            course.plot(familiar, held_out, **model_line(one.style), zorder=3)
        course.set(
            title="after each epoch", xlabel="accuracy on the trained range", ylabel="accuracy on held-out views"
        )
    return fig


def draw_shapes_accuracy(views: Sequence[Views]) -> Figure:
    """A row for each held-out angle: accuracy of each network, and capsules minus CNN, against degrees beyond."""
    pairs = list(zip(views[::2], views[1::2], strict=True))
    fig = make_figure(1.2 + 2.5 * len(pairs), "Drawn shapes: accuracy beyond the trained range",
                      "convolutional networks of equal size · means over sets of shapes, one a seed, and 95 %"
                      " intervals")
    head_legend(fig, model_handles(MODELS.values()))
    for (left, right), (capsules, cnn) in zip(fig.subplots(len(pairs), 2, squeeze=False), pairs, strict=True):
        draw_beyond(left, (capsules, cnn), f"new {capsules.angle}s, {plural(len(capsules.accuracy), 'set')}")
        plot_band(right, capsules.degrees, 100 * (capsules.accuracy - cnn.accuracy), capsules.style)
        right.axhline(0, color=BLACK, linewidth=1.1)
        right.set(title="capsules minus CNN, percentage points", xlabel=DEGREES_BEYOND)
        right.xaxis.set_major_formatter("{x:g}°")
        right.yaxis.set_major_formatter(lambda value, _: with_minus_sign(f"{value:+g}") if value else "0")
    return fig


PAPER_TABLE_2 = {  # errors in percent, of one network each
    "azimuth": {"cnn": [20.0], "capsules": [13.5]}, "elevation": {"cnn": [17.8], "capsules": [12.3]}
}


def read_table_2(folder: Path) -> dict[str, dict[str, Array]]:
    """By angle and model: of each seed the error in percent on novel viewpoints, where the accuracy on familiar ones is
    the same for both models. Raises UserError where runs are missing."""
    found: dict[str, dict[str, Array]] = {}
    for angle in PAPER_TABLE_2:
        models, path = ("cnn", "capsules"), folder / f"toys_{angle}s.json"
        pairs = [[(run, model) for model in models] for run in settings_in(path)[0]["runs"]]
        values = np.array([at_equal_values(pair, "held_out_accuracy", "familiar_accuracy") for pair in pairs])
        found[angle] = {model: 100 * (1 - values[:, m]) for m, model in enumerate(models)}
    return found


def draw_table_2(ours: Mapping[str, Mapping[str, Array]]) -> Figure:
    """Errors as bars: the paper's on the left, ours with their intervals on the right."""
    n = max(len(values) for models in ours.values() for values in models.values())
    text = (
        "[Hinton 2018, table 2]: smallNORB, one network of each kind; here: drawn toys, networks of equal size,"
        f"\nmeans and 95 % intervals of {n} sets of toys; both where the errors on familiar viewpoints are the same"
    )
    fig = make_figure(3.9, "Errors on novel viewpoints, the paper's and ours", text)
    head_legend(fig, [Patch(color=style.colour, label=style.label) for style in (PAPER_CNN, CNN, EM_CAPSULES)])
    axes = fig.subplots(1, 2, sharey=True)
    sides: Any = (("the paper", PAPER_TABLE_2, PAPER_CNN), ("here", ours, CNN))
    for ax, (title, errors, cnn) in zip(axes, sides, strict=True):
        for m, (name, style) in enumerate((("cnn", cnn), ("capsules", EM_CAPSULES))):
            bars = [interval(np.array(models[name])) for models in errors.values()]
            heights, halves = (np.array(part, float) for part in zip(*bars, strict=True))
            x = np.arange(len(errors)) + 0.36 * (m - 0.5)
            ax.bar(x, heights, 0.34, yerr=halves if title == "here" else None, capsize=3, color=style.colour, zorder=2)
            for at, height in zip(x, heights, strict=True):
                ax.text(at, 0.6, f"{height:.1f}", ha="center", va="bottom", fontweight="bold", zorder=4,
                        bbox={"facecolor": "white", "edgecolor": "none", "boxstyle": "round,pad=0.15"})
        ax.set_xticks(range(len(errors)), [f"novel {angle}s" for angle in errors])
        ax.tick_params(axis="x", length=0)
        ax.grid(False, axis="x")
        ax.set_title(title, fontweight="bold")
    axes[0].set_ylabel("error, %")
    return fig


# --- Files and command line -------------------------------------------------------------------------------------------

OF_RUN = {"training_curves": draw_training_curves, "vote_distances": draw_vote_distances}
RESULTS = Path("results") / conv.EXPERIMENT
SHAPES_RESULTS = [RESULTS / f"shapes_{angle}.json" for angle in ("azimuths", "elevations")]
VIEW_RESULTS = [
    RESULTS / f"toys_one_set.json#{angle}_{model}"
    for angle, model in itertools.product(("azimuths", "elevations"), ("capsules", "cnn", "paper_cnn"))
]
OF_RESULTS: dict[str, Callable[[], Figure]] = {
    "novel_viewpoints": lambda: draw_novel_viewpoints(read_views(VIEW_RESULTS)),
    "shapes_accuracy": lambda: draw_shapes_accuracy(read_views(SHAPES_RESULTS)),
    "table_2": lambda: draw_table_2(read_table_2(RESULTS)),
}
FREE = ("data_dir", "n_test")  # settings that may differ from those of a checkpoint


@dataclasses.dataclass(frozen=True)
class Options(FigureOptions):
    figures: tuple[str, ...] = choice_of_figures(*OF_RUN, *OF_RESULTS)


def trained(asked: Config, options: Options, given: Collection[str]) -> Run:
    return load_or_train(conv, options, asked, given, resolve_auto, free=FREE, required=("capsules",))


main = figure_script(
    conv.EXPERIMENT, Config, Options,
    "Draw the figures of the convolutional matrix capsules, from a checkpoint or after training them.",
    ("--checkpoint run.npz", "All figures of these networks: about 10 seconds."),
    ("--figures novel_viewpoints,table_2", "From committed results: about 5 seconds."),
    prepare=trained, of_run=OF_RUN, of_results=OF_RESULTS,
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
