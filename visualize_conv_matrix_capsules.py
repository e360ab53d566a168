#!/usr/bin/env python3
"""Draw the figures of the convolutional matrix capsules into ``DIR/conv_matrix_capsules/``.

    python visualize_conv_matrix_capsules.py --checkpoint run.npz

draws what ``conv_matrix_capsules.py --checkpoint run.npz`` has trained; without ``--checkpoint`` it trains first, with
the same flags as that script. The same run gives the same files byte for byte, and a file that would not change is left
alone.

    vote_distances.png      distances of the votes to the mean of each class capsule, in each iteration
    pose_perturbation.png   what each entry of a class capsule's pose matrix changes in the picture
    attack_curves.png       accuracy against the size of an attack, of every seed of the results files: FGSM, with the
                            paper's on smallNORB in grey, and the worst case of all attacks
    attacked_images.png     images in the worst case, what was added to them, and the answers
    training_curves.png     loss and errors, epoch by epoch
    confusion_matrix.png    how many images of each class get which answer
    attention.png           of views: where the children lie that EM routing assigns to the true class, and to a rival

``--attacks`` and ``--viewpoints`` train nothing, and draw one figure each, from files that compare_seeds.py has
written, attacks_*.json and toys_*.json:

    attack_seeds.png        as attack_curves.png, of both models with settings of their own
    novel_viewpoints.png    accuracy at every angle, and accuracy on held-out views against that on familiar ones

Which images are shown never depends on the figure they give: among those that fit its heading the first of
the test set are taken, each of another class.
"""

from __future__ import annotations

import support.startup  # noqa: F401  before the others, for Ctrl-C

# isort: split

import argparse
import dataclasses
import itertools
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.colors import LogNorm, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, MultipleLocator

import conv_matrix_capsules as experiment
import multimnist_capsnet as multimnist
from conv_matrix_capsules import POSE_SIDE, Array, Config, Data, Params, viewpoint
from fast.optimizers import adamw_step
from fast.workers import Workers
from support.console import exit_status, print_result
from support.figures import (
    BLACK,
    BLUE,
    COMMON_FLAGS,
    DATASET_NAMES,
    GREEN,
    GREY,
    MODEL_STYLES,
    ORANGE,
    PURPLE,
    REFERENCE_LINE,
    RIGHT,
    VERMILLION,
    WIDTH,
    WRONG,
    ModelStyle,
    accuracy_axis,
    add_axes,
    add_colourbar,
    add_figure_arguments,
    add_frame,
    add_heading_bar,
    add_image,
    add_legend,
    add_model_legend,
    add_reference_line,
    add_results_alone,
    add_sheet,
    add_text,
    add_view,
    darkened,
    decades_axis,
    epoch_axis,
    evenly_spaced_indices,
    grey_levels,
    lightened,
    load_finished,
    mark_column,
    marked_answer,
    model_line,
    new_figure,
    plural,
    read_runs,
    reading_seeds,
    require_runs,
    require_test_images,
    results_alone,
    results_files,
    shown_names,
    tiled,
    weighted_quantiles,
    with_minus_sign,
    write_figures,
)
from support.files import UserError, require_writable
from support.flags import Parser, names_of
from support.optimizers import TrainState
from support.run import Files, Stream, generator, permutation, require_finite
from support.tables import confusion_matrix

MODELS = MODEL_STYLES[experiment.EXPERIMENT]
PAPER_CNN = ModelStyle("CNN of the paper, 4.2 million parameters", "paper's CNN", VERMILLION, "^")


def style_of(name: str, cnn: str) -> ModelStyle:
    """Of a model, where ``cnn`` is that of its configuration."""
    return PAPER_CNN if (name, cnn) == ("cnn", "paper") else MODELS[name]


class Run(NamedTuple):
    """What is drawn: a finished training."""

    config: Config
    data: Data
    states: dict[str, TrainState]


def run_figure(run: Run, height: float, text: str, width: float = WIDTH, seed: str = "") -> Figure:
    """A canvas that names the data set in its title, and the network and its training below."""
    config = run.config
    channels, *types = config.sizes
    parts = [
        f"{plural(channels, 'channel')}, capsules of {', '.join(map(str, types))} types",
        plural(config.em_iters, "EM iteration"),
        seed or f"seed {config.seed}",
        f"{plural(config.n_epochs, 'epoch')} of {len(run.data.train.labels):,} images",
    ]
    title = f"{text} — {DATASET_NAMES[run.data.name]}" if text else ""
    return new_figure(height, title, " · ".join(parts), width)


def drawable(config: Config) -> Config:
    """With names of own images' classes that figures can show."""
    return dataclasses.replace(config, class_names=shown_names(config.class_names))


def has_long_names(config: Config) -> bool:
    return max(map(len, config.classes)) > 2


def tested(config: Config) -> str:
    """What the images are called on which accuracies are measured."""
    return "validation" if config.n_val or config.n_val_objects else "test"


def with_article(name: str) -> str:
    return f"{'an' if name in ('8', 'L') or name[:1] in [*'aeiou'] else 'a'} {name}"


def verdict(config: Config, answer: int, label: int) -> tuple[str, Any]:
    """A model's answer with a tick or a cross, and the colour that it is written in."""
    return marked_answer(answer == label, config.classes[answer])


# ----------------------------------------------------------------------------------------------------------------------
# What the networks do, measured
# ----------------------------------------------------------------------------------------------------------------------


def answers_of(run: Run, workers: Workers) -> dict[str, Array]:
    """Per model, the class (N,) that it names for each test image."""
    config, models = run.config, experiment.make_models(run.config)
    return {
        name: experiment.predict_scores(models[name], state.params, run.data.test, config, workers).argmax(axis=1)
        for name, state in run.states.items()
    }


def one_of_each_class(labels: Array, candidates: Array, n: int) -> Array:
    """At most n of the candidates (indices): the first one of each class, then the second ones, and so on."""
    rank = np.zeros(len(candidates), int)
    seen: dict[int, int] = {}
    for k, label in enumerate(labels[candidates].tolist()):
        rank[k] = seen[label] = seen.get(label, -1) + 1
    return candidates[np.argsort(rank, kind="stable")][:n]


def mass_histogram(routing: experiment.ClassRouting, image: int, edges: Array) -> Array:
    """Mass at each distance from the capsule's mean, (T, E, bins); what lies beyond is in the last bin, so that the
    bins add up to all of the capsule's mass."""
    distances = np.clip(routing.distances[:, image], edges[0], edges[-1])  # (T, M, E)
    mass = routing.weights[:, image].astype(float)
    rows = [
        [np.histogram(distances[t, :, e], edges, weights=mass[t, :, e])[0] for e in range(mass.shape[2])]
        for t in range(len(mass))
    ]
    return np.array(rows)


def far_enough(routing: experiment.ClassRouting, fraction: float = 0.97) -> float:
    """A distance within which that fraction of the mass of all iterations lies."""
    mass = routing.weights.reshape(-1).astype(float)
    return float(weighted_quantiles(routing.distances.reshape(-1), mass, fraction))


class Tightness(NamedTuple):
    """Of the true classes' capsules and of all others, after each iteration: means over images."""

    distance: Array  # (T, 2) mean distance of the votes from the capsule's mean, weighted by mass
    fraction: Array  # (T, 2) of the mass that a capsule holds


N_TIGHTNESS = 200  # test images


def tightness(run: Run) -> Tightness:
    params, config = run.states["capsules"].params, run.config
    chosen = experiment.subset(run.data.test, N_TIGHTNESS)
    distance, fraction, own = [], [], []
    for start in range(0, len(chosen.labels), 25):
        labels = chosen.labels[start : start + 25]
        routing = experiment.class_routing(params, chosen.images[start : start + 25], config)
        mass = routing.weights
        total = mass.sum(axis=2)  # (T, N, E)
        distance.append((mass * routing.distances).sum(axis=2) / np.maximum(total, 1e-12))
        fraction.append(total / total.sum(axis=2, keepdims=True))
        own.append(labels[:, None] == np.arange(config.n_classes))
    is_own = np.concatenate(own)
    parts = (np.concatenate(distance, axis=1), np.concatenate(fraction, axis=1))
    means = [np.stack([part[:, is_own].mean(axis=1), part[:, ~is_own].mean(axis=1)], axis=1) for part in parts]
    return Tightness(*means)


# ----------------------------------------------------------------------------------------------------------------------
# Figures: routing
# ----------------------------------------------------------------------------------------------------------------------

N_BINS = 24


MAX_COLUMNS = 10  # classes side by side


def name_size(config: Config, width: float, largest: float = 10) -> float:
    """Size in points at which the longest name of a class is at most that wide, in inches."""
    return min(largest, 72 * width / (0.62 * max(map(len, config.classes))))


def foremost_classes(a: Array, *named: int) -> list[int]:
    """At most ten classes, in their order: the ``named`` ones, and of the others the most active, a (E,)."""
    order = dict.fromkeys([*named, *np.argsort(-a, kind="stable").tolist()])
    return sorted(list(order)[:MAX_COLUMNS])


def draw_vote_distances(run: Run, answers: dict[str, Array]) -> Figure:
    config, labels = run.config, run.data.test.labels
    right = answers["capsules"] == labels
    first = one_of_each_class(labels, np.flatnonzero(right), 2)
    wrong = np.flatnonzero(~right)[:1]
    chosen = np.concatenate([first[:1], wrong] if len(wrong) and len(first) else [first, wrong])[:2]
    routing = experiment.class_routing(run.states["capsules"].params, run.data.test.images[chosen], config)
    shown = evenly_spaced_indices(len(routing.mu), 3)
    n_classes = min(config.n_classes, MAX_COLUMNS)
    limit = far_enough(routing)
    edges = np.linspace(0, limit, N_BINS + 1)

    left, top, side, gap = 2.4 if has_long_names(config) else 2.02, 1.22, 1.0, 0.07
    width = (WIDTH - left - 0.12 - gap * (n_classes - 1)) / n_classes
    row = 0.52
    block = len(shown) * (row + gap) + 0.72
    foot = top + len(chosen) * block - 0.02
    fig = run_figure(run, foot + 1.72, "How far the votes lie from each class capsule's mean")
    add_text(fig, 0.12, 0.66, "bars: votes at that distance from the mean, weighted by assignment × activation of"
             " the child; each row has its own scale")  # fmt: skip
    for b, k in enumerate(chosen):
        y = top + b * block
        label, answer = int(labels[k]), int(answers["capsules"][k])
        histogram = mass_histogram(routing, b, edges)
        classes = foremost_classes(routing.a[-1, b], label, answer)
        add_view(fig, 0.12, y, side, run.data.test.images[k])
        add_text(
            fig, 0.12, y + side + 0.06, f"true class {config.classes[label]}", fontweight="bold", color=darkened(GREEN)
        )
        text, colour = verdict(config, answer, label)
        add_text(fig, 0.12, y + side + 0.27, f"answer {text}", fontweight="bold", color=colour)
        for m, t in enumerate(shown):
            height = 1.08 * float(histogram[t].max()) or 1.0
            add_text(fig, left - 0.1, y + m * (row + gap) + row / 2, f"iteration {t + 1}", ha="right", va="center")
            for column, e in enumerate(classes):
                ax = add_axes(fig, left + column * (width + gap), y + m * (row + gap), width, row)
                colour_of = GREEN if e == label else WRONG if e == answer else BLUE
                ax.stairs(histogram[t, e], edges, fill=True, color=colour_of, linewidth=0)
                ax.set(xlim=(0, limit), ylim=(0, height), xticks=[0, limit / 2], yticks=[])
                ax.grid(False)
                ax.spines[:].set(visible=True, color="#cccccc", linewidth=0.7)
                ax.tick_params(length=0, labelbottom=False)
                if m == 0:
                    style = {"color": darkened(colour_of), "fontweight": "bold"} if e in (label, answer) else {}
                    add_text(fig, left + column * (width + gap) + width / 2, y - 0.2, config.classes[e], ha="center",
                             fontsize=name_size(config, width), **style)  # fmt: skip
        y += len(shown) * (row + gap) + 0.02
        add_text(fig, left - 0.1, y, "activation", ha="right")
        for column, e in enumerate(classes):
            bold = "bold" if e == answer else "normal"
            add_text(fig, left + column * (width + gap) + width / 2, y, f"{routing.a[-1, b, e]:.2f}", ha="center",
                     fontweight=bold)  # fmt: skip
        if b == len(chosen) - 1:
            text = f"distance from 0 to {limit:.2g}; the last bar holds what is beyond"
            add_text(fig, left, y + 0.22, text, color=GREY, fontsize=9)

    found = tightness(run)
    iterations = np.arange(1, len(found.fraction) + 1)
    n_images = min(N_TIGHTNESS, len(labels))
    text = f"Over {n_images}\n{tested(config)} images"
    add_text(fig, 0.12, foot + 0.18, text, fontweight="bold", va="top", linespacing=1.3)
    panels = (
        (found.distance, "mean distance, weighted by mass"),
        (found.fraction, "fraction of the mass, per capsule"),
    )
    for p, (values, title) in enumerate(panels):
        ax = add_axes(fig, 2.02 + p * 2.95, foot + 0.2, 2.3, 1.05)
        for c, (colour_of, marker) in enumerate(((GREEN, "o"), (BLUE, "s"))):
            ax.plot(iterations, values[:, c], color=colour_of, marker=marker, clip_on=False, zorder=3)
        if p:
            add_reference_line(ax, 1 / config.n_classes)
        ax.set_title(title, loc="left")
        ax.set_ylim(0, 1.15 * float(values.max()))
        ax.set_xlim(0.85, len(values) + 0.15)
        ax.set_xticks(iterations if len(values) < 8 else evenly_spaced_indices(len(values), 5) + 1)
        ax.set_xlabel("iteration", labelpad=1)
        ax.yaxis.set_major_locator(MaxNLocator(nbins=4))
    handles = [
        Line2D([], [], color=GREEN, marker="o", label="true class"),
        Line2D([], [], color=BLUE, marker="s", label="other classes"),
        Line2D([], [], **REFERENCE_LINE, label="even"),
    ]
    add_legend(fig, 7.52, foot + 0.25, handles)
    return fig


# ----------------------------------------------------------------------------------------------------------------------
# Figures: poses
# ----------------------------------------------------------------------------------------------------------------------

DECODER_IMAGES, DECODER_EPOCHS, DECODER_RATE = 3000, 40, 2e-3
DECODER_WIDTHS = (128, 256)
SWEEP = np.linspace(-2, 2, 5)  # in standard deviations of an entry over a class
LARGE_SUM, LARGE_SLANT = 0.1, 3  # a fraction, and degrees
N_MEASURED = 500  # test images over which an entry's effect is measured


class Perturbation(NamedTuple):
    """What moving pose entries does to n images."""

    indices: Array  # (n,) in the test set
    drawn: Array  # (n, D, len(SWEEP), H, W, C)
    effect: Array  # (D, 2) change of the pixels' sum, a fraction, and of the slant, degrees, from -1 to +1 deviations
    error: float  # of the decoder on the test images: squared, a pixel's mean


def sum_and_slant(pictures: Array) -> Array:
    """(N, H, W, C) -> sum of the pixels, and slant in degrees, to the right positive: (N, 2).

    The slant is that of the line which fits the bright pixels with the least squared error along each row. (Their
    centre tells nothing: MNIST has it in the middle of every image.)
    """
    pictures = pictures.sum(axis=3).astype(float)
    total = pictures.sum(axis=(1, 2))
    weight = pictures / np.maximum(total, 1e-9)[:, None, None]
    rows, columns = (np.arange(pictures.shape[axis], dtype=float) for axis in (1, 2))
    per_row, per_column = weight.sum(axis=2), weight.sum(axis=1)
    row, column = per_row @ rows, per_column @ columns
    variance = per_row @ rows**2 - row**2
    covariance = np.einsum("nyx,y,x->n", weight, rows, columns) - row * column
    return np.stack([total, -np.degrees(np.arctan2(covariance, np.maximum(variance, 1e-9)))], axis=1)


def decoder_init(rng: np.random.Generator, config: Config) -> Params:
    """Initial parameters of a decoder like that of multimnist_capsnet.py, which draws an image from the pose of one
    class capsule."""
    widths = (config.n_classes * POSE_SIDE**2, *DECODER_WIDTHS, config.image_size**2 * config.in_channels)
    params = {}
    for k, (n_in, n_out) in enumerate(itertools.pairwise(widths), start=1):
        params[f"decoder{k}.w"] = multimnist.gaussian(rng, config.dtype, math.sqrt(2 / n_in), n_in, n_out)
        params[f"decoder{k}.b"] = np.zeros(n_out, config.dtype)
    return params


def masked(poses: Array, labels: Array) -> Array:
    """poses (N, E, D), labels (N,) -> (N, E * D), all but the labelled class's pose zero."""
    return multimnist.mask_forward(poses, labels[:, None])[0]


def train_decoder(
    params: Params, images: Array, labels: Array, config: Config, n_epochs: int, lr: float = DECODER_RATE
) -> tuple[Params, list[float]]:
    """Train a decoder to draw images (N, H, W, C) from the poses of their labelled classes; the capsules stay as they
    are. Returns its parameters, and of every epoch the squared error, summed over an image's pixels."""
    poses, _ = experiment.class_capsules(params, images, config)
    inputs, targets = masked(poses, labels), experiment.prepared(images, config).reshape(len(images), -1)
    n, size = len(images), config.batch_size
    per_epoch = math.ceil(n / size)
    state = TrainState("decoder", decoder_init(generator(config.seed, Stream.INIT, *b"decoder"), config))
    for step in range(per_epoch * n_epochs):
        epoch, position = divmod(step, per_epoch)
        batch = permutation(n, config.seed, epoch)[position * size :][:size]
        progress = step / max(1, per_epoch * n_epochs - 1)
        pixels, layers = multimnist.decoder_forward(state.params, inputs[batch])
        loss, dpixels = multimnist.squared_error(pixels, targets[batch], len(batch))
        _, grads = multimnist.decoder_backward(dpixels, layers)
        adamw_step(state, [grads], lr * (1 - progress) * min(1.0, 0.1 + 90 * progress))
        require_finite(state, loss, per_epoch)
        state.add({"train_loss": loss}, weight=len(batch))
        if position == per_epoch - 1:
            state.end_epoch(n, {})
    return state.params, state.history["train_loss"]


def decode(decoder: Params, poses: Array, labels: Array, config: Config) -> Array:
    """poses (N, E, D), labels (N,) -> images (N, H, W, C), each drawn from the labelled class's pose."""
    pixels, _ = multimnist.decoder_forward(decoder, masked(poses, labels))
    return pixels.reshape(len(labels), config.image_size, config.image_size, config.in_channels)


def perturb(run: Run, answers: dict[str, Array], n: int = 3) -> Perturbation:
    """Trains a decoder on the training images, the capsules being frozen."""
    config, params = run.config, run.states["capsules"].params
    taught = experiment.subset(run.data.train, DECODER_IMAGES)
    decoder, _ = train_decoder(params, taught.images, taught.labels, config, DECODER_EPOCHS)
    tested = experiment.subset(run.data.test, N_MEASURED)
    poses, _ = experiment.class_capsules(params, tested.images, config)
    labels = tested.labels
    drawn_again = decode(decoder, poses, labels, config)
    error = float(np.square(drawn_again - experiment.prepared(tested.images, config)).mean())
    own = poses[np.arange(len(labels)), labels]  # (N, D)
    spread = np.stack([own[labels == e].std(axis=0) if (labels == e).any() else own.std(axis=0)
                       for e in range(config.n_classes)])  # (E, D)  # fmt: skip

    def moved(chosen: Array, poses: Array, entry: int, deviations: float) -> Array:
        changed = poses.copy()
        changed[np.arange(len(chosen)), chosen, entry] += (deviations * spread[chosen, entry]).astype(poses.dtype)
        return decode(decoder, changed, chosen, config)

    n_entries = poses.shape[2]
    effect = np.zeros((n_entries, 2))
    for d in range(n_entries):
        (sum_low, slant_low), (sum_high, slant_high) = (sum_and_slant(moved(labels, poses, d, s)).T for s in (-1, 1))
        effect[d] = (sum_high.sum() - sum_low.sum()) / sum_low.sum(), (slant_high - slant_low).mean()
    right = np.flatnonzero(answers["capsules"] == run.data.test.labels)
    candidates = right if len(right) else np.arange(len(run.data.test.labels))
    indices = one_of_each_class(run.data.test.labels, candidates, n)
    shown_poses, _ = experiment.class_capsules(params, run.data.test.images[indices], config)
    shown_labels = run.data.test.labels[indices]
    drawn = [[moved(shown_labels, shown_poses, d, s) for s in SWEEP] for d in range(n_entries)]
    return Perturbation(indices, np.array(drawn).transpose(2, 0, 1, 3, 4, 5), effect, error)


def signed(value: float) -> str:
    """A whole number, with a sign unless it is zero."""
    return "0" if round(value) == 0 else with_minus_sign(f"{value:+.0f}")


def draw_pose_perturbation(run: Run, found: Perturbation) -> Figure:
    config = run.config
    p, n_steps, size = POSE_SIDE, len(SWEEP), config.image_size
    tile = size + 2  # pixels
    left, top, gap, head = 0.12, 1.9, 0.16, 0.28
    width = (WIDTH - 2 * left - (p - 1) * gap) / p
    cell = width / n_steps
    height = len(found.indices) * cell
    fig = run_figure(
        run, top + p * (height + head + 0.1) + 0.02, "What each entry of a class capsule's 4×4 pose changes"
    )
    add_text(fig, left, 0.66, "a decoder, trained on the poses of the finished capsules, draws the image's own class"
             " from its pose with one entry moved")  # fmt: skip
    # the images, and what is drawn of their poses as they are
    add_text(fig, left, 1.0, "images, and drawn\nfrom their poses", va="top", linespacing=1.3)
    for m, k in enumerate(found.indices):
        x = left + 1.45 + m * 1.3
        image = experiment.prepared(run.data.test.images[k : k + 1], config)[0]
        add_view(fig, x, 0.96, 0.56, image)
        add_view(fig, x + 0.59, 0.96, 0.56, found.drawn[m, 0, n_steps // 2], ORANGE, 1.6)
    x = left + 1.6 + len(found.indices) * 1.3
    steps = ", ".join(with_minus_sign(f"{s:+g}") if s else "0" for s in SWEEP)
    lines = (
        f"columns: {steps} standard deviations",
        "numbers: change of the pixels' sum and of",
        f"the slant, −1 to +1, {min(N_MEASURED, len(run.data.test.labels))} images",
        f"bold: at least {100 * LARGE_SUM:g} % or {LARGE_SLANT}°",
        "purple: where coordinates were added",
    )
    for m, line in enumerate(lines):
        add_text(fig, x, 0.93 + 0.19 * m, line, color=GREY if m < 4 else darkened(PURPLE))
    coordinates = {(0, p - 1), (1, p - 1)}  # see ``coordinates`` of the experiment
    for d in range(p * p):
        i, j = divmod(d, p)
        x, y = left + j * (width + gap), top + i * (height + head + 0.1)
        name = f"({i + 1}, {j + 1})"
        add_text(fig, x, y + 0.02, name, fontweight="bold", color=darkened(PURPLE) if (i, j) in coordinates else BLACK)
        more_light, more_slant = found.effect[d]
        text = f"sum {signed(100 * more_light)} %  slant {signed(more_slant)}°"
        large = abs(more_light) >= LARGE_SUM or abs(more_slant) >= LARGE_SLANT
        add_text(fig, x + width, y + 0.02, text, ha="right", fontweight="bold" if large else "normal", fontsize=9)
        pictures = found.drawn[:, d, ..., 0]  # (n, len(SWEEP), H, W)
        ax = add_sheet(fig, x, y + head - 0.04, width, height, tiled(pictures, n_greys=32))
        mark_column(ax, n_steps // 2 * tile, tile, len(pictures) * tile, ORANGE, 1.6)
    return fig


# ----------------------------------------------------------------------------------------------------------------------
# Figures: attacks
# ----------------------------------------------------------------------------------------------------------------------

ATTACKED = re.compile(r"(fgsm|iterated|worst_case)(_log_odds)?_([0-9.e+-]+)_accuracy")
ATTACK_NAMES = {"fgsm": "one step: FGSM", "worst_case": "worst case of all attacks with this ε or a smaller one"}
# read off figure 3 of [Hinton 2018], by epsilon
PAPER_FGSM = {"capsules": {0.2: 0.83, 0.5: 0.69}, "cnn": {0.2: 0.16, 0.5: 0.03}}
ATTACKED_ALIKE = (
    "attack", "attack_steps", "n_attack", "standardize", "test_azimuths", "test_elevations", "class_names",
)  # fmt: skip
MEASURED_ELSEWHERE = {"seed", "data_dir", "n_test", "attack", "epsilons", "n_attack"}


class Attacks(NamedTuple):
    """Accuracies under attack: by model and kind (``fgsm``, ``fgsm_log_odds``, …)."""

    epsilons: list[float]  # from 0
    accuracy: dict[str, dict[str, Array]]  # (seeds, epsilons)
    zero_gradient: dict[str, float]  # fraction of images, mean over the seeds
    n_seeds: int


def made_attacks(run: dict[str, dict[str, Any]]) -> set[tuple[str, str, str]]:
    """Model, kind and epsilon of each attack of a run."""
    return {
        (name, kind, epsilon)
        for name, kinds in run.items()
        for kind, found in kinds.items()
        if isinstance(found, dict)
        for epsilon in found
    }


def gather_attacks(runs: Sequence[dict[str, dict[str, Any]]]) -> Attacks | None:
    """``runs``: per seed, per model, ``{"fgsm": {"0": accuracy, "0.05": …}, …, "zero_gradient": fraction}``. None where
    none was attacked. Epsilons that not every run has are left out, and the worst case unless all runs have the same
    attacks and epsilons."""
    runs = [run for run in runs if any(isinstance(kind, dict) for model in run.values() for kind in model.values())]
    kinds = [
        (name, kind) for run in runs[:1] for name in run for kind in run[name] if isinstance(run[name][kind], dict)
    ]
    kinds = [(name, kind) for name, kind in kinds if all(kind in run.get(name, {}) for run in runs)]
    if any(made_attacks(run) != made_attacks(runs[0]) for run in runs):
        kinds = [(name, kind) for name, kind in kinds if kind != "worst_case"]
    if not kinds:
        return None
    common = set.intersection(*(set(run[name][kind]) for run in runs for name, kind in kinds))
    texts = sorted(common, key=float)
    accuracy: dict[str, dict[str, Array]] = {}
    for name, kind in kinds:
        rows = [[run[name][kind][text] for text in texts] for run in runs]
        accuracy.setdefault(name, {})[kind] = np.array(rows, float)
    zero = {
        name: float(np.mean([run[name]["zero_gradient"] for run in runs if "zero_gradient" in run[name]] or [0.0]))
        for name in accuracy
    }
    return Attacks([float(text) for text in texts], accuracy, zero, len(runs))


def read_attacks(paths: Sequence[Path], config: Config, dataset: str) -> Attacks | None:
    """The attacks on all runs of the files that have this data set, network and training, seed aside.

    Raises UserError where a file cannot be read.
    """
    runs = read_runs(paths, config, dataset, (config.headline,), MEASURED_ELSEWHERE)
    return gather_attacks([{name: attacks_among(metrics) for name, metrics in models.items()} for models in runs])


def attacks_among(metrics: dict[str, Any]) -> dict[str, Any]:
    """A model's metrics -> ``{"fgsm": {"0": accuracy, "0.05": …}, …, "zero_gradient": fraction}``."""
    kinds: dict[str, Any] = {k: v for k, v in metrics.items() if k.startswith("zero_gradient")}
    for key, value in metrics.items():
        if match := ATTACKED.fullmatch(key):
            kinds.setdefault(match[1] + (match[2] or ""), {})[match[3]] = value
    return kinds


def one_data_set(document: dict[str, Any]) -> str:
    """The data set of a comparison of seeds. Raises TypeError where it has several, KeyError where it is not known."""
    name = document["dataset"]
    if name not in DATASET_NAMES:  # a TypeError for a list
        raise KeyError(name)
    return name


def join_attacks(paths: Sequence[Path]) -> tuple[Config, str, Attacks]:
    """Configuration, data set and attacks of files by compare_seeds.py, in which models of the same seed are one run.

    Raises UserError where a file is none of these, and where they differ in what is attacked, or how.
    """
    runs: dict[int, dict[str, dict[str, Any]]] = {}
    configs: list[dict[str, Any]] = []
    for path in paths:
        with reading_seeds(path) as document:
            for setting in document["settings"].values():
                configs.append({name: setting["config"][name] for name in ATTACKED_ALIKE})
                configs[-1]["dataset"] = one_data_set(document)
                for run in setting["runs"]:
                    for name, metrics in run["models"].items():
                        runs.setdefault(run["seed"], {})[name] = attacks_among(metrics)
    if not configs:
        raise UserError(f"no results to draw: there is no {ATTACK_RESULTS} by compare_seeds.py")
    found = gather_attacks(list(runs.values()))
    if found is None or any(config != configs[0] for config in configs):
        raise UserError(f"{', '.join(map(str, paths))} have no attacks in common")
    tuples: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in configs[0].items()
    }
    return Config(**tuples), str(configs[0]["dataset"]), found


def measure_attacks(run: Run, threads: int) -> Attacks:
    """With the attacks of the configuration, or with all where it has none."""
    config = dataclasses.replace(run.config, attack=run.config.attack or experiment.ATTACKS)
    found = gather_attacks([experiment.attack_all(config, run.states, run.data, threads)])
    assert found is not None
    return found


ATTACKS_TITLE, ATTACKS_HEIGHT = "Accuracy under attack", 4.45


def gradient_note(attacks: Attacks) -> str:
    """Empty where every image gives a gradient, up to half a percent."""
    zero = {name: f"{100 * fraction:.0f} %" for name, fraction in attacks.zero_gradient.items()}
    if {*zero.values()} <= {"0 %"}:
        return ""
    parts = ", ".join(f"{style.short} {zero[name]}" for name, style in MODELS.items() if name in zero)
    return f"images that give an attacker no gradient at all of the model's own loss: {parts}"


def attacks_height(attacks: Attacks) -> float:
    return ATTACKS_HEIGHT + (0.35 if gradient_note(attacks) else 0)


def draw_attack_curves(run: Run, attacks: Attacks) -> Figure:
    own = f"seed {run.config.seed}" if attacks.n_seeds == 1 else f"{attacks.n_seeds} seeds"
    return plot_attacks(run_figure(run, attacks_height(attacks), ATTACKS_TITLE, seed=own), run.config, attacks)


def draw_attack_seeds(config: Config, dataset: str, attacks: Attacks) -> Figure:
    title = f"{ATTACKS_TITLE} — {DATASET_NAMES[dataset]}"
    text = "convolutional matrix capsules and a CNN of equal size, each with settings of its own"
    return plot_attacks(new_figure(attacks_height(attacks), title, text), config, attacks)


def plot_attacks(fig: Figure, config: Config, attacks: Attacks) -> Figure:
    seeds = f"mean of {attacks.n_seeds} seeds, each a thin line" if attacks.n_seeds > 1 else "one seed"
    add_text(
        fig, 0.12, 0.66, f"{seeds} · no pixel moved by more than ε, along the gradient of the loss, all weights known"
    )
    names = [name for name in MODELS if name in attacks.accuracy]
    kinds = [kind for kind in ATTACK_NAMES if any(kind in attacks.accuracy[name] for name in names)]
    handles = [Line2D([], [], **model_line(style_of(name, config.cnn))) for name in names]
    for p, kind in enumerate(kinds):
        ax = add_axes(fig, 0.62 + p * 4.3, 1.77, 3.85, 2.15)
        accuracy_axis(ax, "accuracy" if p == 0 else None, 1 / config.n_classes, side="left")
        ax.set_title(ATTACK_NAMES[kind], loc="left")
        for name in names:
            if kind not in attacks.accuracy[name]:
                continue
            style, values = model_line(style_of(name, config.cnn)), attacks.accuracy[name][kind]
            if len(values) > 1:
                ax.plot(attacks.epsilons, values.T, color=lightened(style["color"], 0.5), linewidth=0.8, zorder=2)
            ax.plot(attacks.epsilons, values.mean(axis=0), **style, clip_on=False, zorder=3)
            if kind == "fgsm":
                of_paper = {"color": GREY, "marker": style["marker"], "linestyle": ":", "linewidth": 1.1}
                epsilons = [epsilon for epsilon in PAPER_FGSM[name] if epsilon <= attacks.epsilons[-1]]
                ax.plot(epsilons, [PAPER_FGSM[name][e] for e in epsilons], **of_paper, clip_on=False, zorder=2.5)
                label = f"the paper's {MODELS[name].short}, on smallNORB, read off"
                handles.append(Line2D([], [], **of_paper, label=label))
        ax.set_xlabel("ε (pixels run from 0 to 1)" if config.pixel_range[1] == 1 else "ε (in standard deviations)")
        ax.set_xlim(0, attacks.epsilons[-1])
    add_legend(fig, 0.62, 0.93, handles, ncols=2, columnspacing=1.6)
    add_text(fig, 0.62, ATTACKS_HEIGHT + 0.08, gradient_note(attacks), fontsize=9, color=GREY)
    return fig


def worst_cases(model: experiment.Model, params: dict[str, Array], images: Array, labels: Array, config: Config
                ) -> list[Array]:  # fmt: skip
    """For each epsilon of ``config``, the images (N, H, W, C) as they mislead the model: under the first attack that
    does so with this epsilon, else as with a smaller one. Images that nothing misleads are under the last attack."""
    found = [images]

    def are_misread(x: Array) -> Array:
        return model.forward(params, x)[0].argmax(axis=1) != labels

    misread = are_misread(images)
    for epsilon in config.epsilons:
        x = found[-1].copy()
        fresh = np.zeros(len(images), bool)  # misread with this epsilon
        for loss, n_steps in experiment.attack_kinds(model, config).values():
            moved = experiment.attack(model, params, images, labels, loss, epsilon, n_steps, config.pixel_range)
            wrong = are_misread(moved)
            take = ~fresh & (wrong | ~misread)
            x[take] = moved[take]
            fresh |= wrong
            misread = misread | wrong
        found.append(x)
    return found[1:]


def draw_attacked_images(run: Run, answers: dict[str, Array]) -> Figure:
    config, labels = run.config, run.data.test.labels
    names = [name for name in MODELS if name in run.states]
    right = np.flatnonzero(np.all([answers[name] == labels for name in names], axis=0))
    chosen = one_of_each_class(labels, right if len(right) else np.arange(len(labels)), 3)
    shown = evenly_spaced_indices(len(config.epsilons), 4)
    epsilons = [config.epsilons[i] for i in shown]
    images = experiment.prepared(run.data.test.images[chosen], config).astype(np.float64)
    exact = dataclasses.replace(config, dtype="float64", em_grad="exact", attack=config.attack or experiment.ATTACKS)
    models = experiment.make_models(exact)
    attacked, said = {}, {}  # by model: by epsilon
    with np.errstate(all="ignore"):
        for name in names:
            params = {k: p.astype(np.float64) for k, p in run.states[name].params.items()}
            found = worst_cases(models[name], params, images, labels[chosen], exact)
            attacked[name] = [found[i] for i in shown]
            said[name] = [models[name].forward(params, x)[0].argmax(axis=1) for x in attacked[name]]
    left, top, cell = 1.82, 1.4, 0.78
    pitch = (WIDTH - left - 0.04) / max(len(epsilons), 4)
    row = cell + 0.3
    block = len(names) * row + 0.14
    fig = run_figure(run, top + len(chosen) * block - 0.06, "Attacked images, and the answers of the models")
    add_text(fig, 0.12, 0.66, "once misread, misread at every larger ε · at the right of each image, what was added:"
             " red for brighter, blue for darker, full at ±ε")  # fmt: skip
    for m, epsilon in enumerate(epsilons):
        add_text(fig, left + m * pitch + cell, 1.1, f"ε = {epsilon:g}", ha="center", fontweight="bold", fontsize=10.5)
    add_text(fig, 0.12, 1.1, "image", fontweight="bold", fontsize=10.5)
    for b, k in enumerate(chosen):
        y0, label = top + b * block, int(labels[k])
        add_view(fig, 0.12, y0, cell, images[b])
        add_text(fig, 0.12, y0 + cell + 0.05, with_article(config.classes[label]), fontweight="bold")
        for r, name in enumerate(names):
            y = y0 + r * row
            add_text(fig, left - 0.1, y + cell / 2 - 0.16, "against the", ha="right", color=GREY, fontsize=9)
            style = style_of(name, config.cnn)
            add_text(fig, left - 0.1, y + cell / 2 + 0.02, style.short, ha="right", fontweight="bold",
                     color=darkened(style.colour))  # fmt: skip
            for m, epsilon in enumerate(epsilons):
                x = left + m * pitch
                moved, answer = attacked[name][m][b], int(said[name][m][b])
                add_view(fig, x, y, cell, moved, RIGHT if answer == label else WRONG, 1.8)
                ax = add_axes(fig, x + cell + 0.03, y, cell, cell)
                add_frame(ax, GREY, 0.8)
                added = np.round((moved - images[b])[..., 0] / epsilon * 15) / 15  # few colours, for a small file
                ax.imshow(added, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
                text, colour = verdict(config, answer, label)
                add_text(fig, x, y + cell + 0.05, f"answer {text}", color=colour, fontsize=9, fontweight="bold")
    return fig


# ----------------------------------------------------------------------------------------------------------------------
# Figures: training and answers
# ----------------------------------------------------------------------------------------------------------------------


def draw_training_curves(run: Run) -> Figure:
    config = run.config
    fig = run_figure(run, 3.75, "Training")
    styles = {name: style_of(name, config.cnn) for name in run.states}
    add_model_legend(fig, 0.62, 0.72, list(styles.values()))
    accuracy = "familiar_accuracy" if config.holds_out else "accuracy"
    errors = [
        f"{styles[name].short} {100 * (1 - state.history[accuracy][-1]):.2f} %" for name, state in run.states.items()
    ]
    of_test = "test " if tested(config) == "test" else ""  # "validation" would touch the legend
    text = f"{of_test}errors at the end: {', '.join(errors)}"
    add_text(fig, WIDTH - 0.15, 0.72, text, ha="right", fontweight="bold")
    titles = {"train_loss": "training loss, each model's own"}
    if config.holds_out:
        titles |= {accuracy: "accuracy, familiar viewpoints", "held_out_accuracy": "accuracy, held-out viewpoints"}
    else:
        titles |= {"error": f"{tested(config)} error"}
    width, pitch = (2.3, 2.95) if config.holds_out else (3.6, 4.4)
    for p, metric in enumerate(titles):
        ax = add_axes(fig, 0.62 + p * pitch, 1.3, width, 1.9)
        values = {}
        for name, state in run.states.items():
            history = state.history[accuracy if metric == "error" else metric]
            values[name] = 1 - np.array(history) if metric == "error" else np.array(history)
        if metric.endswith("accuracy"):
            accuracy_axis(ax, None, 1 / config.n_classes)
        else:
            floor = 0.5 / len(run.data.test.labels) if metric == "error" else 1e-8
            values = {name: np.maximum(v, floor) for name, v in values.items()}
            decades_axis(ax, np.concatenate(list(values.values())))
        if metric == "error":
            ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
            chance = 1 - 1 / config.n_classes
            add_reference_line(ax, chance)
            ax.annotate(f"chance {100 * chance:.3g} %", (1, chance), xycoords=("axes fraction", "data"),
                        xytext=(-3, -3), textcoords="offset points", ha="right", va="top", fontsize=9)  # fmt: skip
        n = 1
        for name, line in values.items():
            n = len(line)
            ax.plot(np.arange(1, n + 1), line, **model_line(styles[name]), markevery=max(1, n // 10),
                    clip_on=False, zorder=3)  # fmt: skip
        ax.set_title(titles[metric], loc="left")
        epoch_axis(ax, n, max(0.3, 0.03 * n))
    return fig


def draw_confusion_matrix(run: Run, answers: dict[str, Array]) -> Figure:
    config, labels = run.config, run.data.test.labels
    names = [name for name in MODELS if name in answers]
    n = config.n_classes
    left, top = (0.85 if config.has_views else 1.15) if has_long_names(config) else 0.62, 1.32
    pitch = 4.3 if has_long_names(config) else (WIDTH - left + 0.5) / 2
    side = min(3.75, pitch - left + 0.1)
    foot = 1.2 if config.has_own_images and has_long_names(config) else 0.62  # of slanted names
    fig = run_figure(run, top + side + foot, "Confusion matrices")
    for m, name in enumerate(names):
        x = left + m * pitch
        counts = confusion_matrix(labels, answers[name], n)
        wrong = counts.sum() - np.trace(counts)
        style = style_of(name, config.cnn)
        add_text(fig, x, 0.68, style.label, fontweight="bold", color=darkened(style.colour), fontsize=10.5)
        text = f"{wrong:,} of {counts.sum():,} {tested(config)} images wrong"
        add_text(fig, x, 0.9, f"{text}: accuracy {np.trace(counts) / counts.sum():.4f}")
        ax = add_axes(fig, x, top, side, side)
        off = np.where(np.eye(n, dtype=bool) | (counts == 0), np.nan, counts)
        most = max(2.0, float(np.nanmax(off)) if wrong else 2.0)
        ax.imshow(off, cmap="Oranges", norm=LogNorm(0.5, 1.6 * most))
        for i in range(n):
            ax.add_patch(Rectangle((i - 0.5, i - 0.5), 1, 1, facecolor=lightened(GREEN, 0.22), linewidth=0))
            for j in range(n):
                if counts[i, j]:
                    dark = i != j and counts[i, j] > 0.6 * most
                    ax.text(j, i, f"{counts[i, j]:,}", ha="center", va="center", fontsize=min(9, 110 / n),
                            color="white" if dark else BLACK, fontweight="bold" if i != j else "normal")  # fmt: skip
        own: dict[str, Any] = {"fontsize": min(name_size(config, 0.9, 9), 130 / n)} if config.has_own_images else {}
        ax.set_xticks(range(n), config.classes, rotation=60 if own and has_long_names(config) else 0, **own)
        ax.set_yticks(range(n), config.classes, **own)
        ax.set_xticks(np.arange(n + 1) - 0.5, minor=True)
        ax.set_yticks(np.arange(n + 1) - 0.5, minor=True)
        ax.grid(False, which="major")
        ax.grid(True, which="minor", color="#e0e0e0", linewidth=0.6)
        ax.tick_params(length=0, which="both")
        ax.spines[:].set(visible=True, color=GREY, linewidth=0.8)
        ax.set_xlabel("answer")
        if m == 0:
            ax.set_ylabel("true class")
    return fig


# ----------------------------------------------------------------------------------------------------------------------
# Figures: novel viewpoints
# ----------------------------------------------------------------------------------------------------------------------


def draw_attention(run: Run) -> Figure:
    """Of the first familiar and the first held-out view of each class, at every position of ConvCaps2: the assignment
    of its children to the true class and to the most active other one, as their activations weight it."""
    config, params, held_out = run.config, run.states["capsules"].params, run.data.held_out
    assert held_out
    E, S = config.n_classes, experiment.grid_sides(config.image_size)[-1]
    side, pitch, gap, top, left = 1.08, 1.42, 0.06, 1.16, 0.95
    block = 3 * (side + gap)
    fig = run_figure(run, top + E * pitch + 0.45, "Which children are assigned to a class")
    centres = experiment.coordinates(config.image_size, "float64")[:, 0, 0, -1] * config.image_size - 0.5  # in pixels
    half = (centres[1] - centres[0]) / 2
    extent = (centres[0] - half, centres[-1] + half, centres[-1] + half, centres[0] - half)
    even = 1 / E
    drawn: Any = None
    for part, (head, colour, examples) in enumerate(
        (("familiar viewpoints", GREEN, run.data.test), ("held-out viewpoints", PURPLE, held_out))
    ):
        x = left + part * (block + 0.45)
        add_heading_bar(fig, x, 0.72, block - gap, head, colour)
        chosen = np.array([np.flatnonzero(examples.labels == k)[0] for k in range(E)])
        images = experiment.prepared(examples.images[chosen], config)
        routing = experiment.class_routing(params, examples.images[chosen], config)
        mass = routing.weights[-1].reshape(E, S, S, -1, E).sum(axis=3)  # (images, S, S, E)
        r = mass / routing.a_in.reshape(E, S, S, -1, 1).sum(axis=3)  # the mean over types
        for k in range(E):
            y, scores = top + k * pitch, routing.a[-1, k]
            rival = int(np.argsort(scores - 2 * np.eye(E)[k])[-1])
            add_view(fig, x, y, side, images[k], colour, 2.0)
            text, of_answer = verdict(config, int(scores.argmax()), k)
            add_text(fig, x, y + side + 0.05, text, color=of_answer, fontsize=9)
            pale = 0.4 + 0.6 * grey_levels(images[k])
            for m, e in enumerate((k, rival), 1):
                ax = add_image(fig, x + m * (side + gap), y, side, pale, interpolation="nearest").axes
                drawn = ax.imshow(r[k, :, :, e], cmap="RdBu_r", norm=TwoSlopeNorm(even, 0, 1), alpha=0.6, extent=extent)
                ax.set(xlim=(-0.5, config.image_size - 0.5), ylim=(config.image_size - 0.5, -0.5))
                add_text(fig, x + m * (side + gap), y + side + 0.05, f"to {config.classes[e]}", fontsize=9)
            if part == 0:
                add_text(fig, left - 0.12, y + side / 2, config.classes[k], ha="right", va="center", fontweight="bold")
    foot = top + E * pitch + 0.05
    bar = add_colourbar(fig, drawn, left, foot, 2.1)
    bar.set_xticks([0, even, 1], ["0", f"{even:g}: even", "1"])
    add_text(fig, left + 2.4, foot - 0.02, "assignment $r$ of the children at a position, mean of their types")
    return fig


class Views(NamedTuple):
    """Runs of one model, over seeds, in which one angle is held out."""

    model: str
    style: ModelStyle
    dataset: str
    angle: str  # "azimuth" or "elevation"
    trained: tuple[float, float]  # the range of the training
    accuracy: dict[float, Array]  # by angle: (seeds,)
    curves: list[tuple[list[float], list[float]]]  # of each seed: familiar and held-out accuracy after every epoch
    validation: bool  # on training objects, to choose settings


def read_views(paths: Sequence[Path]) -> list[Views]:
    """The runs of each model in files by compare_seeds.py --keep-history. Raises UserError for any other file."""
    found = []
    for path in paths:
        with reading_seeds(path, "holds no novel viewpoints by compare_seeds.py --keep-history") as document:
            for setting in document["settings"].values():
                config = setting["config"]
                angle = "azimuth" if config["train_elevations"] == config["test_elevations"] else "elevation"
                low, high = config[f"train_{angle}s"]
                for model in setting["runs"][0]["models"]:
                    metrics = [run["models"][model] for run in setting["runs"]]
                    histories = [run["history"][model] for run in setting["runs"]]
                    names = {float(match[1]): key for key in metrics[0]
                             if (match := re.fullmatch(rf"{angle}_(-?[0-9.]+)_accuracy", key))}  # fmt: skip
                    accuracy = {at: np.array([run[key] for run in metrics]) for at, key in sorted(names.items())}
                    curves = [(h["familiar_accuracy"], h["held_out_accuracy"]) for h in histories]
                    if not (accuracy and np.array(curves, float).size):  # lengths that differ are a ValueError
                        raise LookupError("no accuracies")
                    validation = bool(config.get("n_val_objects"))
                    style = style_of(model, config.get("cnn", "matched"))  # older results have no such field
                    found.append(
                        Views(model, style, one_data_set(document), angle, (low, high), accuracy, curves, validation)
                    )
    if not found:
        raise UserError(f"no results to draw: there is no {VIEW_RESULTS} by compare_seeds.py")
    return found


def draw_novel_viewpoints(runs: Sequence[Views]) -> Figure:
    """A row for each held-out angle: accuracy at every angle after the training, and the course of the training."""
    angles = sorted({run.angle for run in runs})
    datasets, n_seeds = {run.dataset for run in runs}, max(len(run.curves) for run in runs)
    title = "Accuracy on viewpoints that were never trained on"
    if len(datasets) == 1:
        title += f" — {DATASET_NAMES[datasets.pop()]}"
    text = f"mean of {plural(n_seeds, 'seed')}, each seed a thin line"
    if not any(run.dataset in ("voxels", "shapes") for run in runs):
        if any(run.validation for run in runs):
            text += "; validation on training objects that were held out"
        else:
            text += "; trained on five objects of each class, tested on five others"
    fig = new_figure(0.95 + 3.05 * len(angles), title, text)
    handles = [Line2D([], [], **model_line(style)) for style in dict.fromkeys(run.style for run in runs)]
    add_legend(fig, 0.5, 0.62, handles, ncols=3, columnspacing=1.6)
    for row, angle in enumerate(angles):
        top = 1.28 + 3.05 * row
        at, course = add_axes(fig, 0.62, top, 4.4, 2.1), add_axes(fig, 5.75, top, 2.75, 2.1)
        accuracy_axis(at, "accuracy", 1 / len(viewpoint.SMALLNORB_CLASSES), side="right")
        at.set_ylim(0.1, 1.02)
        at.set_title(f"at each {angle}; trained range in green", loc="left")
        at.set_xlabel(f"{angle} (degrees)")
        course.set_title("after each epoch", loc="left")
        course.set_xlabel("accuracy on the trained range")
        course.set_ylabel("accuracy on held-out views")
        familiar, held_out = (
            np.concatenate([curve[k] for run in runs if run.angle == angle for curve in run.curves]) for k in (0, 1)
        )
        course.set_xlim(familiar.min() - 0.04, min(1.02, familiar.max() + 0.04))
        course.set_ylim(held_out.min() - 0.04, min(1.02, held_out.max() + 0.04))
        for run in (run for run in runs if run.angle == angle):
            style, values = model_line(run.style), np.array(list(run.accuracy.values()))  # (angles, seeds)
            low, high = run.trained
            middle = (low + high) / 2
            x = np.array(list(run.accuracy))
            if angle == "azimuth":  # so that the trained range is in the middle
                x = (x - middle + 180) % 360 - 180 + middle
                x -= 360 * np.floor((middle + 180) / 360)
                low, high = (bound - 360 * np.floor((middle + 180) / 360) for bound in (low, high))
                at.xaxis.set_major_locator(MultipleLocator(60))
                at.xaxis.set_major_formatter(lambda value, _: f"{value % 360:g}")
            order = np.argsort(x)
            at.axvspan(low, high, color=GREEN, alpha=0.06, linewidth=0)
            at.plot(x[order], values[order], color=lightened(style["color"], 0.5), linewidth=0.8, zorder=2)
            at.plot(x[order], values[order].mean(axis=1), **style, zorder=3)
            course.plot(*np.mean(run.curves, axis=0), **style, zorder=3)
            for curve in run.curves:
                course.plot(*curve, color=lightened(style["color"], 0.5), linewidth=0.8, zorder=2)
    return fig


FIGURES = (
    "training_curves", "confusion_matrix", "vote_distances", "attacked_images", "attack_curves", "pose_perturbation",
    "attention",
)  # fmt: skip
NEEDS = {
    "pose_perturbation": "pixels between 0 and 1, which its decoder draws",
    "attention": "familiar and held-out views of every class",
}


def possible_figures(config: Config, data: Data) -> list[str]:
    """Those of FIGURES for which the images have what NEEDS says."""
    views = [part.labels for part in (data.test, data.held_out) if part]
    fits = {
        "pose_perturbation": config.pixel_range == (0.0, 1.0),
        "attention": len(views) == 2 and all(len(np.unique(labels)) == config.n_classes for labels in views),
    }
    return [name for name in FIGURES if fits.get(name, True)]


def drawers(run: Run, attacks: Attacks | None, workers: Workers) -> dict[str, Callable[[], Figure]]:
    """Name of each possible figure of a run, and what draws it (within ``figure_style``). Without ``attacks`` they are
    made."""
    answers = answers_of(run, workers)
    known: dict[str, Callable[[], Figure]] = {
        "training_curves": lambda: draw_training_curves(run),
        "confusion_matrix": lambda: draw_confusion_matrix(run, answers),
        "vote_distances": lambda: draw_vote_distances(run, answers),
        "attacked_images": lambda: draw_attacked_images(run, answers),
        "attack_curves": lambda: draw_attack_curves(run, attacks or measure_attacks(run, workers.n_threads)),
        "pose_perturbation": lambda: draw_pose_perturbation(run, perturb(run, answers)),
        "attention": lambda: draw_attention(run),
    }
    return {name: known[name] for name in possible_figures(run.config, run.data)}


# ----------------------------------------------------------------------------------------------------------------------
# Files and command line
# ----------------------------------------------------------------------------------------------------------------------

MIN_TEST = 10  # images that the figures need


# which may differ from those of a checkpoint
TEST_FIELDS = ("data_dir", "n_test", "attack", "epsilons", "attack_steps", "n_attack")

ATTACK_RESULTS = Path("results") / experiment.EXPERIMENT / "attacks_*.json"
VIEW_RESULTS = Path("results") / experiment.EXPERIMENT / "toys_[ae]*s_*.json"  # azimuths and elevations


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        COMMON_FLAGS,
        [
            ("--checkpoint run.npz", "All figures of the networks in run.npz: about 3 minutes."),
            ("--attacks", "Attack curves alone, from committed results of five seeds: about 5 seconds."),
            ("--viewpoints", "Novel viewpoints of the toys alone, from committed results: about 5 seconds."),
        ],
        description="Draw the figures of the convolutional matrix capsules, from a checkpoint or after training them.",
    )
    experiment.add_config_flags(parser)
    files = add_figure_arguments(
        parser,
        experiment.EXPERIMENT,
        "Draw the attack curves of these JSON files, each of one seed or of many. Default: attack the networks"
        " themselves, which takes minutes.",
    )
    files.add_argument(
        "--figures", type=names_of(FIGURES), metavar="A,B",
        help=f"Draw only these. Default: all, which are {', '.join(FIGURES)} (attention of views alone).",
    )  # fmt: skip
    add_results_alone(files, "--attacks", "attack_seeds", ATTACK_RESULTS)
    add_results_alone(files, "--viewpoints", "novel_viewpoints", VIEW_RESULTS)
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    asked, folder = experiment.config_from_args(args), args.outdir / experiment.EXPERIMENT

    attacks_alone = results_alone(parser, args, "attacks", ATTACK_RESULTS)
    views_alone = results_alone(parser, args, "viewpoints", VIEW_RESULTS)

    def body() -> None:
        if attacks_alone is not None:
            require_writable(folder / "attack_seeds.png")
            found = join_attacks(attacks_alone)
            write_figures(folder, {"attack_seeds": lambda: draw_attack_seeds(*found)})
            return
        if views_alone is not None:
            require_writable(folder / "novel_viewpoints.png")
            runs = read_views(views_alone)
            write_figures(folder, {"novel_viewpoints": lambda: draw_novel_viewpoints(runs)})
            return
        # All errors are found before the training.
        require_writable(folder / f"{FIGURES[0]}.png")
        results = results_files(args.results)
        config, states = load_finished(
            experiment, args.checkpoint, asked, args.given, TEST_FIELDS, required=("capsules",)
        )
        data = experiment.make_data(config, config.classes if states else ())
        config = experiment.resolved(config, data)
        require_test_images(len(data.test.labels), MIN_TEST)
        possible = possible_figures(config, data)
        for name in args.figures or ():
            if name not in possible:
                raise UserError(f"{name}.png needs {NEEDS[name]}")
        attacks = read_attacks(results, config, data.name)
        require_runs(args.results, attacks)
        states = states or experiment.train_all(config, data, threads=args.threads, files=Files(quiet=args.quiet))
        result = experiment.make_result(config, data, states, {}, args.threads)
        print_result(f"{experiment.describe(result)}\n{experiment.format_table(result)}")
        with Workers(args.threads, config.dtype) as workers:
            known = drawers(Run(drawable(config), data, states), attacks, workers)
            chosen = {name: draw for name, draw in known.items() if name in (args.figures or possible)}
            write_figures(folder, chosen)
        if not args.figures and "pose_perturbation" not in possible:
            print_result(f"skipped pose_perturbation.png: it needs {NEEDS['pose_perturbation']}")

    return exit_status(body)


if __name__ == "__main__":
    sys.exit(main())
