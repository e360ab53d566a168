#!/usr/bin/env python3
"""Draw the figures of the novel-viewpoint experiment into ``DIR/smallnorb_novel_viewpoint/``.

    python visualize_smallnorb_novel_viewpoint.py --seed 1 --n-epochs 10

trains the three models and draws; ``--checkpoint FILE`` draws what ``smallnorb_novel_viewpoint.py --checkpoint FILE``
has trained. Of reported settings it is, without --seed, the seed whose capsules have the median held-out accuracy.

    example_views.png         every class at six training and six held-out azimuths
    elevation_strip.png       every class from rising elevations
    training_curves.png       loss and both accuracies, epoch by epoch
    extrapolation_bars.png    familiar against held-out accuracy of each model, and the drop from one to the other
    azimuth_accuracy.png      accuracy over the full circle; of reported settings mean and interval of all their seeds,
                              trained again
    class_poses.png           pose matrices of the class capsules, a familiar and a held-out view of each class
    routing_assignments.png   how EM assigns the primary capsules to the classes, iteration by iteration
    shapes.png                twenty drawn shapes, and two of them from trained and held-out sides
"""

from __future__ import annotations

from support.figures import (
    CNN, DATASET_NAMES, EM_CAPSULES, GREEN, GREY, OF_MEDIAN, PURPLE, RIGHT, SMALL_CNN, VERMILLION, VIEWPOINT_METRICS,
    WRONG, FigureOptions, Run, accuracy_axis, bare, choice_of_figures, darkened, draw_histories, evenly_spaced_indices,
    figure_script, grey_levels, head_legend, heading, lightened, load_or_train, make_figure, model_handles, plot_band,
    show_pictures, with_minus_sign,
)

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

import smallnorb_novel_viewpoint as smallnorb
from smallnorb_novel_viewpoint import Array, Config, Data, Range, Split, Stream, generator

MODELS = {"capsules": EM_CAPSULES, "cnn": SMALL_CNN, "cnn_matched": CNN}
TRAINED, HELD_OUT = GREEN, PURPLE  # ranges of viewpoints
RANGES = ("train", "trained on", TRAINED), ("test", "held out", HELD_OUT)
MIDDLES = ("trained range", TRAINED), ("held-out range", HELD_OUT)  # which may be no trained viewpoint
CHANCE = 1 / smallnorb.N_CLASSES
HALF_TURN = 0.6  # accuracy on held-out azimuths by cross, T and frame alone, which look the same after half a turn
HALF_TURN_NAME = "cross, T and frame alone: 0.6"
RESULTS = Path("results") / smallnorb.EXPERIMENT / "voxels_azimuths.json"


def shade_range(ax: Axes, span: Range, colour: str, text: str) -> None:
    """Shade a range of azimuths and name it; it may pass 360 and is then drawn in two parts."""
    start = span[0] % 360
    stop = start + span[1] - span[0]
    parts = [(start, min(stop, 360.0))] + ([(0.0, stop - 360)] if stop > 360 else [])
    for a, b in parts:
        ax.axvspan(a, b, color=lightened(colour, 0.17), linewidth=0, zorder=0)
    a, b = max(parts, key=lambda part: part[1] - part[0])
    ax.annotate(
        text, ((a + b) / 2, 1), xycoords=("data", "axes fraction"), xytext=(0, 3), textcoords="offset points",
        ha="center", va="bottom", color=darkened(colour), fontweight="bold",
    )


def degrees(span: Range, *, circular: bool) -> str:
    """A range of angles; an azimuth range that passes 360 goes on from 0."""
    low, high = span
    if circular and high - low < 360:
        low, high = low % 360, high % 360 or 360
    return f"{low:g}–{high:g}°"


def subtitle(config: Config, who: str = "") -> str:
    """What every figure says of its run: data set, what is held out, and the seed or what else is shown."""
    seen, unseen = (getattr(config, f"{part}_{config.held_out_angle}s") for part in ("train", "test"))
    circular = config.held_out_angle == "azimuth"
    ranges = f"held-out {config.held_out_angle}s {degrees(unseen, circular=circular)}, trained on"
    return (f"{DATASET_NAMES[config.dataset]} · {ranges} {degrees(seen, circular=circular)}"
            f" · {who or f'seed {config.seed}'}")


# --- What is drawn: views chosen from a finished run ------------------------------------------------------------------


# Keys of the evaluation stream: every figure draws its own noise.
VIEWS_KEY, AZIMUTH_KEY = range(2)
NOISE_DRAWS = 3  # images of each view in the curves over an angle


def testing_split(data: Data) -> Split:
    """All images that no model was trained on."""
    return Split(*(np.concatenate(pair) for pair in zip(data.familiar, data.held_out, strict=True)))


def pick_views(config: Config, data: Data, azimuths: Array, elevations: Array) -> Split:
    """Every class at each of M (azimuth, elevation) pairs: M views of class 0, then of class 1, …

    Rendered objects are drawn for the purpose; of smallNORB it is the test image whose viewpoint comes nearest, and of
    several the same object in the same lighting as far as there is one.
    """
    n = smallnorb.N_CLASSES
    labels, azimuths, elevations = np.repeat(np.arange(n), len(azimuths)), np.tile(azimuths, n), np.tile(elevations, n)
    if config.is_rendered:
        rng = generator(config.seed, Stream.EVALUATION, VIEWS_KEY)
        return smallnorb.voxel_split(config, labels, azimuths, elevations, rng)
    split = testing_split(data)
    turn = np.abs((split.azimuths - azimuths[:, None] + 180) % 360 - 180)  # (views, N)
    distance = turn + np.abs(split.elevations - elevations[:, None]) + np.where(split.labels == labels[:, None], 0, 1e9)
    distance += 0.01 * split.objects  # less than a degree
    return Split(*(part[distance.argmin(axis=1)] for part in split))


def shown_angles(config: Config, data: Data, angle: str, part: str, n: int) -> Array:
    """At most ``n`` angles spread over the training ("train") or held-out ("test") range, in its order."""
    span: Range = getattr(config, f"{part}_{angle}s")
    if config.is_rendered:
        return smallnorb.evenly_spaced(span, n)
    angles = np.unique(getattr(data.familiar if part == "train" else data.held_out, f"{angle}s"))
    if angle == "azimuth":
        angles = angles[np.argsort((angles - span[0]) % 360)]
    return angles[evenly_spaced_indices(len(angles), n)]


def middle(config: Config, data: Data, angle: str, part: str) -> float:
    angles = shown_angles(config, data, angle, part, 3)
    return float(angles[len(angles) // 2])


def routed_views(run: Run) -> tuple[Split, Array, Any]:
    """Of every class a view from the middle of the training range and one from that of the held-out range; the scores
    and the cache of the capsule network on them."""
    azimuths, elevations = (
        np.array([middle(run.config, run.data, angle, part) for part in ("train", "test")])
        for angle in ("azimuth", "elevation")
    )
    views = pick_views(run.config, run.data, azimuths, elevations)
    x = smallnorb.crop(views.images, None).astype(run.config.dtype, copy=False)
    return views, *smallnorb.make_models(run.config)["capsules"].forward(run.states["capsules"].params, x)


def accuracy_by_azimuth(run: Run) -> tuple[Array, dict[str, Array]]:
    """Azimuths (A,) and each model's accuracy (A,) at every one: rendered objects on fresh images every 10 degrees, at
    the elevations of the training; else the test images."""
    config = run.config
    if config.is_rendered:
        azimuths, elevations = np.arange(0.0, 360, 10), smallnorb.evenly_spaced(config.train_elevations, 5)
        rng = generator(config.seed, Stream.EVALUATION, AZIMUTH_KEY)
        split = smallnorb.voxel_views(config, azimuths, elevations, NOISE_DRAWS, rng)
    else:
        split = testing_split(run.data)
    angles, where = np.unique(split.azimuths, return_inverse=True)
    accuracy, models = {}, smallnorb.make_models(config)
    for name, state in run.states.items():
        right = smallnorb.predict_scores(models[name], state.params, split.images).argmax(axis=1) == split.labels
        accuracy[name] = np.bincount(where, right) / np.bincount(where)
    return angles, accuracy


# --- Figures: views ---------------------------------------------------------------------------------------------------


def as_grid(images: Array, rows: int) -> Array:
    """Network inputs (rows * M, H, W, C) -> grey pictures (rows, M, H, W)."""
    greys = np.stack([grey_levels(image) for image in images])
    return greys.reshape(rows, -1, *greys.shape[1:])


def draw_views(run: Run, angle: str, n: int, title: str) -> Figure:
    """The classes at n angles ("azimuth" or "elevation") of the training and the held-out range, the other angle in the
    middle of its range."""
    config, data = run.config, run.data
    other = "elevation" if angle == "azimuth" else "azimuth"
    fig = make_figure(5.4, title, subtitle(config, run.who))
    for ax, (part, word, colour) in zip(fig.subplots(1, 2), RANGES, strict=True):
        angles, fixed = shown_angles(config, data, angle, part, n), middle(config, data, other, part)
        at = {angle: angles, other: np.full(len(angles), fixed)}
        at["azimuth"] = at["azimuth"] % 360
        views = pick_views(config, data, at["azimuth"], at["elevation"])
        names = config.classes if part == "train" else ()
        columns = [f"{a:.4g}°" for a in at[angle]]
        grid = show_pictures(ax, as_grid(views.images, smallnorb.N_CLASSES), names, columns)
        grid.frame(0, 0, colour, 1.2, len(angles), smallnorb.N_CLASSES)
        heading(ax, f"{word}, {other} {at[other][0]:g}°", colour)
    return fig


N_SHOWN_SHAPES = 20


def draw_shapes() -> Figure:
    """Five shapes of each of four reported seeds; below, two of the first seed from trained and held-out azimuths."""
    n_seeds = N_SHOWN_SHAPES // smallnorb.N_CLASSES
    configs = [Config(dataset="shapes", standardize="none", seed=200 + s) for s in range(n_seeds)]
    labels, angle = np.arange(smallnorb.N_CLASSES), np.ones(smallnorb.N_CLASSES)
    low, high = configs[0].train_azimuths
    elevation = float(np.mean(configs[0].train_elevations))
    shapes = [smallnorb.voxel_split(c, labels, angle * (low + high) / 2, angle * elevation, None).images
              for c in configs]
    fig = make_figure(
        4.75, "Drawn shapes: other objects for every seed",
        f"seeds {configs[0].seed} to {configs[-1].seed}, elevation {elevation:g}°; azimuths are counted from where the"
        " trained range begins",
    )
    axes = fig.subplot_mosaic("aa;bc", height_ratios=(1.0, 1.15))
    pictures = np.concatenate(shapes)[..., 0]
    show_pictures(axes["a"], pictures.reshape(2, -1, *pictures.shape[1:]), gap=(2, 2))
    heading(axes["a"], f"{N_SHOWN_SHAPES} shapes")
    for key, (part, word, colour) in zip("bc", RANGES, strict=True):
        azimuths = smallnorb.evenly_spaced(getattr(configs[0], f"{part}_azimuths"), 6)
        views = [smallnorb.voxel_split(configs[0], np.full(6, k), azimuths, np.full(6, elevation), None).images[..., 0]
                 for k in (0, 1)]
        names = ("shape 1", "shape 2") if part == "train" else ()
        grid = show_pictures(axes[key], np.stack(views), names, [f"{a % 360:.4g}°" for a in azimuths])
        for k, m in np.ndindex(2, 6):
            grid.frame(k, m, colour, 1.2)
        heading(axes[key], word, colour)
    return fig


# --- Figures: accuracies ----------------------------------------------------------------------------------------------


def draw_training_curves(run: Run) -> Figure:
    titles = {"train_loss": "training loss", **VIEWPOINT_METRICS}
    return draw_histories(subtitle(run.config, run.who), titles, run.states, MODELS, CHANCE)


def half_turn_line(ax: Axes, config: Config) -> list[Line2D]:
    """The accuracy on held-out azimuths of a network that knows nothing of viewpoints; an empty list elsewhere."""
    if config.dataset != "voxels" or config.held_out_angle != "azimuth":
        return []
    return [ax.axhline(HALF_TURN, color=GREY, linewidth=1.1, linestyle=(0, (5, 2)), zorder=1, label=HALF_TURN_NAME)]


def draw_extrapolation_bars(run: Run) -> Figure:
    fig = make_figure(4.3, "Accuracy on familiar and on held-out viewpoints", subtitle(run.config, run.who))
    ax, names = fig.subplots(), []
    accuracy_axis(ax, "accuracy", CHANCE)
    for k, (name, state) in enumerate(run.states.items()):
        style = MODELS[name]
        both = np.array([state.history[f"{part}_accuracy"][-1] for part in ("familiar", "held_out")])
        colours = [style.colour, lightened(style.colour, 0.3)]
        bars = ax.bar([k - 0.16, k + 0.16], both, 0.3, color=colours, edgecolor=style.colour, zorder=2)
        ax.bar_label(bars, [f"{value:.3f}" for value in both], padding=2, zorder=5,
                     bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        names.append(f"{style.label}\ndrop {with_minus_sign(f'{both[0] - both[1]:.3f}')}")
    ax.set_xticks(range(len(names)), names, fontweight="bold")
    ax.set(xlim=(-0.5, len(names) - 0.35), ylim=(0, 1.1))
    ax.grid(False, axis="x")
    pale = Patch(facecolor=lightened(GREY, 0.3), edgecolor=GREY, label="held-out viewpoints")
    head_legend(fig, [Patch(color=GREY, label="familiar viewpoints"), pale, *half_turn_line(ax, run.config)])
    return fig


def trainings_of(run: Run) -> Iterator[Run]:
    """The networks of each reported seed, trained again: results hold no accuracy by azimuth. Of settings that are not
    reported, this run alone."""
    for one in run.reported:
        config = dataclasses.replace(run.config, seed=one["seed"])
        data = smallnorb.make_data(config)
        yield run._replace(config=config, data=data, states=smallnorb.train_all(config, data, names=[*one["models"]]))
    if not run.reported:
        yield run


def draw_azimuth_accuracy(run: Run) -> Figure:
    config, found = run.config, [accuracy_by_azimuth(one) for one in trainings_of(run)]
    angles = found[0][0]
    accuracy = {name: np.stack([of_models[name] for _, of_models in found]) for name in found[0][1]}  # (S, A)
    who = f"mean and 95 % interval of {len(found)} reported seeds" if len(found) > 1 else ""
    fig = make_figure(3.9, "Accuracy at every azimuth", subtitle(config, who))
    ax = fig.subplots()
    accuracy_axis(ax, "accuracy", CHANCE)
    head_legend(fig, [*model_handles(MODELS[name] for name in accuracy), *half_turn_line(ax, config)])
    if config.held_out_angle == "azimuth":
        shade_range(ax, config.train_azimuths, TRAINED, "trained on")
        shade_range(ax, config.test_azimuths, HELD_OUT, "held out")
    else:
        at = f"trained on, at elevations {degrees(config.train_elevations, circular=False)}"
        shade_range(ax, config.train_azimuths, TRAINED, at)
    for name, values in accuracy.items():  # 360 is 0 again
        plot_band(ax, np.append(angles, angles[0] + 360), np.append(values, values[:, :1], axis=1), MODELS[name])
    ax.set(xlim=(0, 360), xticks=np.arange(0, 361, 30))
    ax.xaxis.set_major_formatter("{x:g}°")
    ax.set_xlabel("azimuth" + ("   (dots: those of the training images)" if config.is_rendered else ""))
    if config.is_rendered:
        marks = np.unique(run.data.train.azimuths % 360)
        ax.plot(marks, np.full(len(marks), 0.03), ".", color=TRAINED, markersize=7, zorder=2, clip_on=False)
    return fig


# --- Figures: poses and routing ---------------------------------------------------------------------------------------


def pose_pictures(poses: Array, limit: float, side: int) -> Array:
    """Pose matrices (..., P, P) as pictures (..., side, side, 3): red for positive entries, blue for negative ones."""
    enlarged = np.kron(poses, np.ones((side // poses.shape[-1],) * 2))
    return colormaps["RdBu_r"](0.5 + enlarged / (2 * limit))[..., :3]


def draw_class_poses(run: Run) -> Figure:
    config, n = run.config, smallnorb.N_CLASSES
    views, scores, cache = routed_views(run)
    side = views.images.shape[1]
    limit = float(np.percentile(np.abs(cache.mu), 96))  # a few large entries would make all others pale
    fig = make_figure(5.85, "Pose matrices of the class capsules", subtitle(config, run.who)
                      + "\nred: positive entries, blue: negative; numbers: the score of each class; framed: the answer,"
                      " green where it is right")
    poses = cache.mu.reshape(len(scores), n, smallnorb.POSE_SIDE, smallnorb.POSE_SIDE)
    for b, (ax, (word, colour)) in enumerate(zip(fig.subplots(1, 2), MIDDLES, strict=True)):
        rows = np.arange(b, len(scores), 2)  # of the views
        image = np.repeat(as_grid(views.images[rows], n)[..., None], 3, axis=4)
        grid = show_pictures(
            ax, np.concatenate([image, pose_pictures(poses[rows], limit, side)], axis=1),
            config.classes if b == 0 else (), ("image", *config.classes), gap=(9, 2), interpolation="nearest",
        )
        heading(ax, f"{word}: azimuth {views.azimuths[b] % 360:g}°, elevation {views.elevations[b]:g}°", colour)
        for k, v in enumerate(rows):
            answer = int(scores[v].argmax())
            grid.frame(k, 0, colour, 1.5)
            grid.frame(k, 1 + answer, RIGHT if answer == k else WRONG, 2.8)
            for j in range(n):
                weight = "bold" if j == answer else "normal"
                grid.write(k, 1 + j, with_minus_sign(f"{scores[v, j]:.1f}"), fontweight=weight)
    return fig


def draw_routing_assignments(run: Run) -> Figure:
    config, k, n, n_in = run.config, 1, smallnorb.N_CLASSES, smallnorb.N_PRIMARY
    views, scores, cache = routed_views(run)  # k: L, which changes most as it turns; a human of smallNORB
    iterations = [step.r for step in cache.routing.m_steps]  # each (N, I, J)
    shown = evenly_spaced_indices(len(iterations), 3)
    fig = make_figure(5.6, f"EM routing of one {config.classes[k]}", subtitle(config, run.who)
                      + "\nassignment $r_{ij}$ of each primary capsule (row: its activation) to each class (column: its"
                      " score), even at first; framed: the true class")
    axes = fig.subplots(2, 1 + len(shown), width_ratios=(0.7, *(1 for _ in shown)))
    for b, ((image, *maps), (word, colour)) in enumerate(zip(axes, MIDDLES, strict=True)):
        v = 2 * k + b
        show_pictures(image, as_grid(views.images[v : v + 1], 1)).frame(0, 0, colour, 2.5)
        heading(image, word, colour)
        image.set_xlabel(f"azimuth {views.azimuths[b] % 360:g}°,\nelevation {views.elevations[b]:g}°", fontsize=9)
        image.xaxis.set_label_position("bottom")
        for ax, t in zip(maps, shown, strict=True):
            drawn = ax.imshow(iterations[t][v], cmap="cividis", vmin=0, vmax=1, aspect="auto")
            ax.add_patch(Rectangle((k - 0.5, -0.5), 1, n_in, fill=False, edgecolor=VERMILLION, linewidth=2.2,
                                   clip_on=False))
            ax.set_title(f"iteration {t + 1}")
            ax.set_yticks(range(n_in), [f"{a:.2f}" for a in cache.a_in[v]])
            ends = [f"\n{score:.2f}" if t == shown[-1] else "" for score in scores[v]]
            ax.set_xticks(range(n), [name + end for name, end in zip(config.classes, ends, strict=True)])
            ax.get_xticklabels()[k].set(color=VERMILLION, fontweight="bold")
            bare(ax)
        maps[0].set_ylabel("primary capsule")
    fig.colorbar(drawn, ax=axes[:, 1:], shrink=0.5, aspect=30, label="assignment $r_{ij}$")
    return fig


# --- Files and command line -------------------------------------------------------------------------------------------


OF_RUN: dict[str, Callable[[Run], Figure]] = {
    "example_views": lambda run: draw_views(run, "azimuth", 6, "The five classes, turning in azimuth"),
    "elevation_strip": lambda run: draw_views(run, "elevation", 5, "The five classes from rising elevations"),
    "training_curves": draw_training_curves,
    "extrapolation_bars": draw_extrapolation_bars,
    "azimuth_accuracy": draw_azimuth_accuracy,
    "class_poses": draw_class_poses,
    "routing_assignments": draw_routing_assignments,
}
N_COLOURS = dict.fromkeys(("example_views", "elevation_strip", "shapes"), 192)  # of a palette, for a small file
OF_RESULTS = {"shapes": draw_shapes}


@dataclasses.dataclass(frozen=True)
class Options(FigureOptions):
    figures: tuple[str, ...] = choice_of_figures(*OF_RUN, *OF_RESULTS)


def trained(asked: Config, options: Options, given: Collection[str]) -> Run:
    median_of = RESULTS, "capsules", "held_out_accuracy"
    return load_or_train(smallnorb, options, asked, given, median_of=median_of, required=MODELS)


main = figure_script(
    smallnorb.EXPERIMENT, Config, Options,
    "Draw the figures of the novel-viewpoint experiment, from a checkpoint or after training its models." + OF_MEDIAN,
    ("", "All figures, after training the three models: about 20 seconds."),
    ("--standardize image --n-epochs 20 --lr 0.002 --cnn-lr 0.001 --weight-decay 1",
     "The same of the exploratory settings, all 60 seeds: about 5 minutes."),
    ("--checkpoint run.npz", "All figures of these networks: about 15 seconds."),
    prepare=trained, of_run=OF_RUN, of_results=OF_RESULTS, n_colours=N_COLOURS,
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
