#!/usr/bin/env python3
"""Draw the figures of the convolutional matrix capsules into ``DIR/conv_matrix_capsules/``.

    python visualize_conv_matrix_capsules.py --checkpoint run.safetensors

draws what ``conv_matrix_capsules.py --checkpoint run.safetensors`` has trained; without ``--checkpoint`` it trains
first, with the same flags as that script.

    vote_distances.png      distances of the votes to the mean of each class capsule, in each iteration
    training_curves.png     loss and errors, epoch by epoch

and from results of compare_seeds.py:

    novel_viewpoints.png    accuracy at every angle, and accuracy on held-out views against that on familiar ones
    shapes_accuracy.png     accuracy on drawn shapes, and the networks' difference, beyond the trained range
    table_2.png             errors on novel viewpoints at equal errors on familiar ones, beside the paper's table 2

Which images are shown never depends on the figure they give: among those that fit its heading the first of
the test set are taken, each of another class.
"""

from __future__ import annotations

import support.headless  # noqa: F401  before matplotlib

import dataclasses
import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, MultipleLocator

import conv_matrix_capsules as experiment
from claims import at_equal_values
from conv_matrix_capsules import Array, Config, viewpoint
from fast.workers import Workers
from multimnist_capsnet import resolve_auto
from support.files import UserError
from support.script import script
from support.settings import parse

from support.figures import (  # isort: skip
    BLACK, BLUE, CNN, DATASET_NAMES, EM_CAPSULES, GREEN, PAPER_CNN, PURPLE, REFERENCE_LINE, WRONG, FigureOptions,
    ModelStyle, Run, accuracy_axis, add_frame, choice_of_figures, darkened, draw_figures, draw_histories,
    evenly_spaced_indices, grey_levels, head_legend, interval, lightened, load_or_train, make_figure, marked_answer,
    model_handles, model_line, plot_band, plural, require_tests, settings_in, show_pictures, weighted_quantiles,
    with_minus_sign,
)  # fmt: skip

MODELS = {"capsules": EM_CAPSULES, "cnn": CNN}
FAMILIAR, HELD_OUT = GREEN, PURPLE  # viewpoints


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


# --- What the networks do, measured -----------------------------------------------------------------------------------


def answers_of(run: Run, workers: Workers) -> Array:
    """The class (N,) that the capsules name for each test image."""
    model, params = experiment.make_models(run.config)["capsules"], run.states["capsules"].params
    return experiment.predict_scores(model, params, run.data.test, run.config, workers).argmax(axis=1)


def one_of_each_class(labels: Array, candidates: Array, n: int) -> Array:
    """At most n of the candidates (indices): the first one of each class, then the second ones, and so on."""
    rank = np.zeros(len(candidates), int)
    seen: dict[int, int] = {}
    for k, label in enumerate(labels[candidates].tolist()):
        rank[k] = seen[label] = seen.get(label, -1) + 1
    return candidates[np.argsort(rank, kind="stable")][:n]


class Tightness(NamedTuple):
    """Of the true classes' capsules and of all others, after each iteration: means over images."""

    distance: Array  # (T, 2) mean distance of the votes from the capsule's mean, weighted by mass
    fraction: Array  # (T, 2) of the mass that a capsule holds


N_TIGHTNESS = 200  # test images


def tightness(run: Run) -> Tightness:
    chosen = experiment.subset(run.data.test, N_TIGHTNESS)
    routing = experiment.class_routing(run.states["capsules"].params, chosen.images, run.config)
    total = routing.weights.sum(axis=2)  # (T, N, E)
    distance = (routing.weights * routing.distances).sum(axis=2) / np.maximum(total, 1e-12)
    fraction = total / total.sum(axis=2, keepdims=True)
    own = chosen.labels[:, None] == np.arange(run.config.n_classes)
    means = [np.stack([part[:, own].mean(axis=1), part[:, ~own].mean(axis=1)], axis=1) for part in (distance, fraction)]
    return Tightness(*means)


# --- Figures: routing -------------------------------------------------------------------------------------------------

N_BINS = 24


def draw_vote_distances(run: Run, answers: Array) -> Figure:
    config, labels = run.config, run.data.test.labels
    right = answers == labels
    first = one_of_each_class(labels, np.flatnonzero(right), 2)
    wrong = np.flatnonzero(~right)[:1]
    chosen = np.concatenate([first[:1], wrong] if len(wrong) and len(first) else [first, wrong])[:2]
    routing = experiment.class_routing(run.states["capsules"].params, run.data.test.images[chosen], config)
    shown = evenly_spaced_indices(len(routing.mu), 3)
    masses = routing.weights.astype(float)
    limit = float(weighted_quantiles(routing.distances.ravel(), masses.ravel(), 0.97))  # most mass lies within
    within = np.minimum(routing.distances, limit)
    edges = np.linspace(0, limit, N_BINS + 1)
    text = (
        f"{subtitle(run)}\nbars: votes at that distance from the mean, 0 to {limit:.2g}, weighted by assignment ×"
        " activation; the last bar holds what is beyond;\neach row has its own scale; below: activation of the capsule"
    )
    fig = make_figure(1.7 + len(chosen) * (0.62 + 0.62 * len(shown)) + 1.75,
                      "How far the votes lie from each class capsule's mean", text)  # fmt: skip
    heights = [*[0.62 + 0.62 * len(shown)] * len(chosen), 1.75]
    parts: Any = fig.subfigures(len(chosen) + 1, 1, height_ratios=heights)
    *blocks, foot = parts
    for b, (block, k) in enumerate(zip(blocks, chosen, strict=True)):
        label, answer = int(labels[k]), int(answers[k])
        left, right_part = block.subfigures(1, 2, width_ratios=(1, 5))
        image = left.subplots()
        show_pictures(image, grey_levels(run.data.test.images[k])[None, None])
        text, colour = marked_answer(answer == label, config.classes[answer])
        image.set_title(f"true: {config.classes[label]}, answer {text}", color=colour, fontweight="bold", fontsize=9)
        axes = right_part.subplots(len(shown), config.n_classes, squeeze=False, sharex=True, sharey="row")
        for row, t in zip(axes, shown, strict=True):
            for e, ax in enumerate(row):
                of_class = GREEN if e == label else WRONG if e == answer else BLUE
                ax.hist(within[t, b, :, e], edges, weights=masses[t, b, :, e], histtype="stepfilled", color=of_class)
                ax.set(xlim=(0, limit), ymargin=0.08)
                add_frame(ax, "#cccccc", 0.7)
                if t == shown[0]:
                    style = {"color": darkened(of_class), "fontweight": "bold"} if e in (label, answer) else {}
                    ax.set_title(config.classes[e], loc="center", **style)
                if t == shown[-1]:
                    weight = "bold" if e == answer else "normal"
                    ax.set_xlabel(f"{routing.a[-1, b, e]:.2f}", fontweight=weight)
            row[0].set_ylabel(f"iteration {t + 1}", rotation=0, ha="right", va="center")
    draw_tightness(foot, tightness(run), min(N_TIGHTNESS, len(labels)), config.n_classes)
    return fig


def draw_tightness(foot: Any, found: Tightness, n_images: int, n_classes: int) -> None:
    iterations = np.arange(1, len(found.fraction) + 1)
    titles = ("mean distance, weighted by mass", "fraction of the mass, per capsule")
    axes = foot.subplots(1, 2)
    for ax, values, title in zip(axes, found, titles, strict=True):
        for c, (name, colour, marker) in enumerate((("true class", GREEN, "o"), ("other classes", BLUE, "s"))):
            ax.plot(iterations, values[:, c], color=colour, marker=marker, clip_on=False, zorder=3, label=name)
        ax.set(title=title, ylim=(0, 1.15 * float(values.max())), xlim=(0.85, len(values) + 0.15), xlabel="iteration")
        ax.set_xticks(iterations if len(values) < 8 else evenly_spaced_indices(len(values), 5) + 1)
        ax.yaxis.set_major_locator(MaxNLocator(nbins=4))
    axes[1].axhline(1 / n_classes, **REFERENCE_LINE, label="even")
    axes[1].legend(loc="upper left", bbox_to_anchor=(1.02, 1), title=f"over {n_images} images")


# --- Figures: training ------------------------------------------------------------------------------------------------


def draw_training_curves(run: Run) -> Figure:
    config = run.config
    styles = {name: style_of(name, config.cnn) for name in run.states}
    titles = {"train_loss": "training loss, each model's own"}
    if config.holds_out:
        titles |= {"familiar_accuracy": "accuracy, familiar viewpoints"}
        titles |= {"held_out_accuracy": "accuracy, held-out viewpoints"}
    else:
        titles |= {"error": f"{tested(config)} error"}
    return draw_histories(subtitle(run), titles, run.states, styles, 1 / config.n_classes)


def tested(config: Config) -> str:
    """What the images are called on which accuracies are measured."""
    return "validation" if config.n_val or config.n_val_objects else "test"


# --- Figures: novel viewpoints ----------------------------------------------------------------------------------------


class Views(NamedTuple):
    """Runs of one model, over seeds, in which one angle is held out."""

    style: ModelStyle
    dataset: str
    angle: str  # "azimuth" or "elevation"
    trained: Sequence[float]  # the range of the training, from and to
    accuracy: dict[float, Array]  # by angle: (seeds,)
    familiar: Array  # (seeds, epochs) accuracies
    held_out: Array


def held_out_angle(config: Mapping[str, Any]) -> str:
    return "azimuth" if config["train_elevations"] == config["test_elevations"] else "elevation"


def accuracy_at(runs: Sequence[Mapping[str, Any]], model: str, angle: str) -> dict[float, Array]:
    """By degrees, in their order, the accuracies (seeds,) from metrics such as azimuth_20_accuracy."""
    found = {}
    for key in runs[0]["models"][model]:
        if match := re.fullmatch(rf"{angle}_(-?[0-9.]+)_accuracy", key):
            found[float(match[1])] = np.array([run["models"][model][key] for run in runs])
    return dict(sorted(found.items()))


def read_views(paths: Sequence[Path]) -> list[Views]:
    """The runs of each model in files or parts by compare_seeds.py --keep-history. Raises UserError for any other."""
    found = []
    for path in paths:
        try:
            for one in settings_in(path):
                config, runs = one["config"], one["runs"]
                angle = held_out_angle(config)
                for model in runs[0]["models"]:
                    style = style_of(model, config.get("cnn", "matched"))  # older results have no such field
                    familiar, held_out = (
                        np.array([run["history"][model][f"{part}_accuracy"] for run in runs], float)
                        for part in ("familiar", "held_out")
                    )
                    found.append(Views(style, one["dataset"], angle, config[f"train_{angle}s"],
                                       accuracy_at(runs, model, angle), familiar, held_out))  # fmt: skip
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise UserError(f"{path} holds no novel viewpoints by compare_seeds.py --keep-history") from error
    return found


def centred(azimuths: Array, trained: Sequence[float]) -> tuple[Array, tuple[float, float]]:
    """Azimuths (A,), and the trained range, moved by whole turns so that the range lies in the middle."""
    middle = sum(trained) / 2
    turns = 360 * np.floor((middle + 180) / 360)
    return (azimuths - middle + 180) % 360 - 180 + middle - turns, (trained[0] - turns, trained[1] - turns)


def draw_at_angles(ax: Axes, runs: Sequence[Views]) -> None:
    """Accuracy at every angle."""
    angle = runs[0].angle
    accuracy_axis(ax, "accuracy", 1 / len(viewpoint.SMALLNORB_CLASSES))
    for run in runs:
        x, values = np.array(list(run.accuracy)), np.array(list(run.accuracy.values())).T  # (seeds, angles)
        trained = run.trained
        if angle == "azimuth":
            x, trained = centred(x, trained)
        order = np.argsort(x)
        plot_band(ax, x[order], values[:, order], run.style)
    ax.axvspan(*trained, color=lightened(GREEN, 0.17), linewidth=0, zorder=0)
    if angle == "azimuth":
        ax.xaxis.set_major_locator(MultipleLocator(60))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value % 360 if angle == 'azimuth' else value:g}°")
    ax.set(title=f"at each {angle}; trained range in green", xlabel=angle)


def draw_novel_viewpoints(runs: Sequence[Views]) -> Figure:
    """A row for each held-out angle: accuracy at every angle after the training, and the course of the training."""
    angles = sorted({run.angle for run in runs})
    names = " and ".join(DATASET_NAMES[name] for name in dict.fromkeys(run.dataset for run in runs))
    text = f"{names} · mean and 95 % interval of {plural(max(len(run.familiar) for run in runs), 'seed')}"
    fig = make_figure(1.1 + 2.9 * len(angles), "Accuracy on viewpoints that were never trained on", text)
    head_legend(fig, model_handles(dict.fromkeys(run.style for run in runs)))
    axes = fig.subplots(len(angles), 2, squeeze=False, width_ratios=(5, 3))
    for (at, course), angle in zip(axes, angles, strict=True):
        of_angle = [run for run in runs if run.angle == angle]
        draw_at_angles(at, of_angle)
        for run in of_angle:
            course.plot(run.familiar.mean(axis=0), run.held_out.mean(axis=0), **model_line(run.style), zorder=3)
        course.set(
            title="after each epoch", xlabel="accuracy on the trained range", ylabel="accuracy on held-out views"
        )
    return fig


def beyond(angle: float, trained: Sequence[float], *, circular: bool) -> float:
    """Degrees from an angle to the nearer end of the trained range; 0 within it."""
    low, high = trained
    middle = (low + high) / 2
    away = abs((angle - middle + 180) % 360 - 180) if circular else abs(angle - middle)
    return max(0.0, away - (high - low) / 2)


def read_beyond(paths: Sequence[Path]) -> dict[str, dict[str, dict[float, Array]]]:
    """Of results on drawn shapes, by held-out angle and model: accuracies (seeds,) at each number of degrees beyond the
    trained range, means of what lies equally far. Raises UserError where there are none."""
    found: dict[str, dict[str, dict[float, Array]]] = {}
    for one in (one for path in paths if path.exists() for one in settings_in(path)):
        config, angle = one["config"], held_out_angle(one["config"])
        for model in one["runs"][0]["models"]:
            at: dict[float, list[Array]] = {}
            for degrees, values in accuracy_at(one["runs"], model, angle).items():
                where = beyond(degrees, config[f"train_{angle}s"], circular=angle == "azimuth")
                at.setdefault(where, []).append(values)
            found.setdefault(angle, {})[model] = {x: np.mean(at[x], axis=0) for x in sorted(at)}
    if not found:
        raise UserError(f"there are no results {', '.join(map(str, paths))}")
    return found


def draw_shapes_accuracy(found: Mapping[str, Mapping[str, Mapping[float, Array]]]) -> Figure:
    """A row for each held-out angle: accuracy of each network, and capsules minus CNN, against degrees beyond."""
    fig = make_figure(1.2 + 2.5 * len(found), "Drawn shapes: accuracy beyond the trained range",
                      "convolutional networks of equal size · means over sets of shapes, one a seed, and 95 %"
                      " intervals")  # fmt: skip
    head_legend(fig, model_handles(MODELS.values()))
    for (left, right), (angle, models) in zip(fig.subplots(len(found), 2, squeeze=False), found.items(), strict=True):
        accuracy_axis(left, "accuracy", 1 / len(viewpoint.SMALLNORB_CLASSES), side="left")
        rows = {name: np.stack(list(at.values()), axis=1) for name, at in models.items()}
        x = list(models["capsules"])
        for name, values in rows.items():
            plot_band(left, x, values, MODELS[name])
        plot_band(right, x, 100 * (rows["capsules"] - rows["cnn"]), MODELS["capsules"])
        right.axhline(0, color=BLACK, linewidth=1.1)
        left.set_title(f"new {angle}s, {plural(len(rows['capsules']), 'set')}")
        right.set_title("capsules minus CNN, percentage points")
        right.yaxis.set_major_formatter(lambda value, _: with_minus_sign(f"{value:+g}") if value else "0")
        for ax in (left, right):
            ax.set_xlabel("degrees beyond the trained range; 0: within it")
            ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}°")
    return fig


PAPER_TABLE_2 = {"azimuth": {"cnn": 20.0, "capsules": 13.5}, "elevation": {"cnn": 17.8, "capsules": 12.3}}  # errors, %


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
        "[Hinton 2018, table 2]: smallNORB, one network of each kind; here: generated toys, networks of equal size,"
        f"\nmeans and 95 % intervals of {n} sets of toys; both where the errors on familiar viewpoints are the same"
    )
    fig = make_figure(3.9, "Errors on novel viewpoints, the paper's and ours", text)
    head_legend(
        fig, [Patch(color=style.colour, label=style.label) for style in (PAPER_CNN, MODELS["cnn"], MODELS["capsules"])]
    )
    paper = {angle: {name: np.array([e]) for name, e in errors.items()} for angle, errors in PAPER_TABLE_2.items()}
    for ax, title, errors in zip(fig.subplots(1, 2, sharey=True), ("the paper", "here"), (paper, ours), strict=True):
        for m, name in enumerate(("cnn", "capsules")):
            bars = [interval(errors[angle][name]) for angle in errors]
            x, heights = np.arange(len(errors)) + 0.36 * (m - 0.5), [float(mean) for mean, _ in bars]
            half = [float(half) for _, half in bars] if title == "here" else None
            colour = style_of(name, "matched" if title == "here" else "paper").colour
            ax.bar(x, heights, 0.34, yerr=half, capsize=3, color=colour, zorder=2)
            for at, height in zip(x, heights, strict=True):
                ax.text(at, 0.6, f"{height:.1f}", ha="center", va="bottom", fontweight="bold", zorder=4,
                        bbox={"facecolor": "white", "edgecolor": "none", "boxstyle": "round,pad=0.15"})  # fmt: skip
        ax.set_xticks(range(len(errors)), [f"novel {angle}s" for angle in errors])
        ax.tick_params(axis="x", length=0)
        ax.grid(False, axis="x")
        ax.set_title(title, fontweight="bold")
    ax.figure.axes[0].set_ylabel("error, %")
    return fig


# --- Files and command line -------------------------------------------------------------------------------------------

MIN_TEST = 10  # images that the figures need
OF_RUN = ("training_curves", "vote_distances")
RESULTS = Path("results") / experiment.EXPERIMENT
SHAPES_RESULTS = RESULTS / "shapes_azimuths.json", RESULTS / "shapes_elevations.json"
VIEW_RESULTS = [
    RESULTS / f"toys_one_set.json#{angle}_{model}"
    for angle, model in itertools.product(("azimuths", "elevations"), ("capsules", "cnn", "paper_cnn"))
]
OF_RESULTS: dict[str, Callable[[], Figure]] = {
    "novel_viewpoints": lambda: draw_novel_viewpoints(read_views(VIEW_RESULTS)),
    "shapes_accuracy": lambda: draw_shapes_accuracy(read_beyond(SHAPES_RESULTS)),
    "table_2": lambda: draw_table_2(read_table_2(RESULTS)),
}
FREE = ("data_dir", "n_test")  # settings that may differ from those of a checkpoint


@dataclasses.dataclass(frozen=True)
class Options(FigureOptions):
    figures: tuple[str, ...] = choice_of_figures(*OF_RUN, *OF_RESULTS)


@script
def main(argv: Sequence[str] | None = None) -> None:
    asked, options, given = parse(
        Config, Options, argv,
        "Draw the figures of the convolutional matrix capsules, from a checkpoint or after training them.",
        [
            ("--checkpoint run.safetensors", "All figures of these networks: about 10 seconds."),
            ("--figures novel_viewpoints,table_2", "From committed results of five seeds: about 5 seconds."),
        ],
        f"The figures go to DIR/{experiment.EXPERIMENT}/, where DIR is --outdir.",
    )  # fmt: skip

    def of_run() -> dict[str, Callable[[], Figure]]:
        run = load_or_train(
            experiment, options, asked, given, lambda _, data: require_tests(data, MIN_TEST),
            lambda config, data: resolve_auto(config, data.name), free=FREE, required=("capsules",),
        )  # fmt: skip
        config, data, states = run[:3]
        result = experiment.make_result(config, states, data, options.threads)
        print(f"{experiment.describe(result)}\n{experiment.format_table(result)}")
        with Workers(options.threads) as workers:
            answers = answers_of(run, workers)
        return {
            "training_curves": lambda: draw_training_curves(run),
            "vote_distances": lambda: draw_vote_distances(run, answers),
        }

    draw_figures(options.outdir / experiment.EXPERIMENT, options, OF_RESULTS, of_run)


if __name__ == "__main__":
    sys.exit(main())
