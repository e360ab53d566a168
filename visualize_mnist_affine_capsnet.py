#!/usr/bin/env python3
"""Draw the figures of the affine-digits experiment into ``DIR/mnist_affine_capsnet/``.

    python visualize_mnist_affine_capsnet.py --checkpoint run.safetensors --outdir viz

draws what ``mnist_affine_capsnet.py --checkpoint FILE`` has trained; without ``--checkpoint`` the three models are
trained first, with the flags of that script. The same run gives the same files byte for byte, and a file that would not
change is left alone. ``--arrays FILE`` keeps what two of them show, and draws them again from there.

    predictions.png         a digit of every class, upright and rotated, with the answer of each model
    rotation_sweep.png      accuracy from -90 to 90 degrees, every seed of the results files as a line of its own
    affnist_examples.png    digits at random positions and their affNIST versions, with the answers (--canvas 40 only)
    reconstructions.png     digits upright and rotated, and what the decoder draws from their longest capsule
    capsule_dimensions.png  the numbers of each digit's capsule that change its reconstruction most
    confusion_matrices.png  rotated and distorted digits: percentage of each class that gets each answer
    training_curves.png     losses and errors, epoch by epoch

Which digits are shown never depends on how the models do on them: it is the first of each class in the test set.
Capsules are perturbed for the first of these, among twenty, that the capsule network classifies correctly.
"""

from __future__ import annotations

import support.headless  # noqa: F401  before matplotlib

# isort: split

import dataclasses
import functools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

import mnist_affine_capsnet as experiment
import multimnist_capsnet as base
from fast.workers import Workers, blas_threads
from mnist_affine_capsnet import SWEEP, Config, Data
from multimnist_capsnet import Array, Params
from support.console import one_line
from support.figures import (
    BLACK,
    BLUE,
    DATASET_NAMES,
    GREY,
    MODEL_STYLES,
    ORANGE,
    RIGHT,
    WIDTH,
    WRONG,
    FigureOptions,
    add_axes,
    add_frame,
    add_image,
    add_model_legend,
    add_reference_line,
    add_row_label,
    add_seed_points,
    add_sheet,
    add_text,
    darkened,
    epoch_axis,
    lightened,
    load_finished,
    model_line,
    new_figure,
    plural,
    read_runs,
    require_runs,
    results_files,
    tiled,
    with_minus_sign,
    write_figures,
)
from support.files import UserError, atomic_write, require_writable
from support.optimizers import TrainState
from support.script import script
from support.settings import SettingError, input_path, names_of, output_path, parse, redeclared, setting
from support.training import RunOptions

MODELS = MODEL_STYLES[experiment.EXPERIMENT]
J = base.N_CLASSES


def degrees(angle: float) -> str:
    return with_minus_sign(f"{angle:g}°")


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def subtitle(config: Config, data: Data, *, seeds: int = 0, length: bool = True) -> str:
    """What every figure says of its run: data set, canvas, seed or number of seeds, and how long it trained."""
    canvas = "" if config.image_size == base.DIGIT_SIDE else f", anywhere on {config.image_size}×{config.image_size}"
    parts = [DATASET_NAMES[data.name] + canvas, plural(seeds, "seed") if seeds else f"seed {config.seed}"]
    if length:
        match = config.match_accuracy
        stop = f"up to {100 * match:g} % right, at most " if match is not None else ""
        parts.append(f"{stop}{plural(config.n_epochs, 'epoch')} of {config.n_train:,} upright digits")
    return " · ".join(parts)


def add_rectangle(fig: Figure, x: float, y: float, width: float, height: float, colour: Any) -> None:
    """Its upper left corner x, y inches from the figure's."""
    w, h = fig.get_size_inches()
    corner = (x / w, 1 - (y + height) / h)
    fig.add_artist(Rectangle(corner, width / w, height / h, facecolor=colour, edgecolor="none", zorder=0.5))


ANSWER_HEIGHT = 0.21  # inches, below a picture


def add_answers(fig: Figure, x: float, y: float, width: float, names: Sequence[str], answers: Sequence[int],
          label: int) -> None:  # fmt: skip
    """The answers of the models side by side, under a bar of each model's colour; wrong ones are white on red."""
    each = width / len(names)
    for m, (name, answer) in enumerate(zip(names, answers, strict=True)):
        left, right = x + m * each, answer == label
        add_rectangle(fig, left, y, each - 0.02, 0.035, MODELS[name].colour)
        add_rectangle(
            fig, left, y + 0.035, each - 0.02, ANSWER_HEIGHT - 0.035, lightened(RIGHT, 0.22) if right else WRONG
        )
        add_text(fig, left + (each - 0.02) / 2, y + 0.038, str(answer), ha="center", fontsize=9.5,
                 color=darkened(RIGHT) if right else "white", fontweight="normal" if right else "bold")  # fmt: skip


def add_answers_legend(fig: Figure, x: float, y: float, names: Sequence[str]) -> None:
    add_text(fig, x, y, "Below each picture, from the left: the answer of")
    x += 3.3
    for name in names:
        add_rectangle(fig, x, y + 0.055, 0.2, 0.05, MODELS[name].colour)
        add_text(fig, x + 0.26, y, MODELS[name].short)
        x += 0.26 + 0.09 * len(MODELS[name].short) + 0.16
    for text, back, colour, weight in (
        ("right", lightened(RIGHT, 0.22), darkened(RIGHT), "normal"), ("wrong", WRONG, "white", "bold"),
    ):  # fmt: skip
        add_rectangle(fig, x, y - 0.02, 0.52, 0.2, back)
        add_text(fig, x + 0.26, y, text, ha="center", color=colour, fontweight=weight)
        x += 0.58


# ----------------------------------------------------------------------------------------------------------------------
# What is drawn: a finished run, its answers on the test sets, and digits chosen from them
# ----------------------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    config: Config
    data: Data
    states: dict[str, TrainState]
    tested: dict[str, dict[str, Any]]  # see ``run_tests`` of the experiment


def require_every_class(data: Data) -> None:
    missing = sorted(set(range(J)) - set(data.test_labels.tolist()))
    if missing:
        n = len(data.test_labels)
        raise UserError(f"the figures need a digit of every class: none of the {n:,} test digits is a {missing[0]}")


def of_each_class(labels: Array, n: int = 1) -> Array:
    """(rows, 10): the first, second ... digit of each class, up to n rows that are full."""
    where = [np.flatnonzero(labels == j)[:n] for j in range(J)]
    rows = min(map(len, where))
    return np.stack([indices[:rows] for indices in where], axis=1)


def turned(run: Run, chosen: Array, angle: float) -> Array:
    """Images (n, S, S) of chosen test digits, turned by an angle: those of the rotated test set."""
    config, data = run.config, run.data
    digits = data.test_images[chosen] * np.dtype(config.dtype).type(1 / 255)
    shift = experiment.evaluation_shifts(config, len(data.test_labels), 0)[chosen]
    return experiment.on_canvas(experiment.rotate(digits, angle), shift, config)


def outputs(run: Run, images: Array) -> dict[str, Array]:
    """images (N, S, S) -> for each model (N, J): lengths of its capsules, or probabilities."""
    models, workers = experiment.make_models(run.config), Workers(1, run.config.dtype)
    return {
        name: experiment.confidences(name, experiment.scores_of(models[name], state, images, workers))
        for name, state in run.states.items()
    }


def answers_to(run: Run, images: Array) -> Array:
    """images (N, S, S) -> (N, models)."""
    return np.stack([scores.argmax(axis=1) for scores in outputs(run, images).values()], axis=1)


# ----------------------------------------------------------------------------------------------------------------------
# Results of many seeds
# ----------------------------------------------------------------------------------------------------------------------


class Seeds(NamedTuple):
    """Of n runs with the same flags."""

    n: int
    sweep: dict[str, Array]  # model: accuracies (n, angles)
    val_error: dict[str, Array]  # model: (n,) of the last epoch, on the digits held out


TEST_FIELDS = ("data_dir", "n_test", "n_sweep", "rotation")  # on which no training depends


def read_seeds(paths: Sequence[Path], config: Config, dataset: str) -> Seeds:
    """The runs on this data set with this configuration, seed aside, in result files of the experiment
    (``--out-json``) or of ``compare_seeds.py``. A model that not every run has is left out. Raises UserError where a
    file cannot be read."""
    runs: list[dict[str, tuple[list[float], float]]] = []
    try:
        for models in read_runs(paths, config, dataset, ("upright_accuracy",), ("seed", *TEST_FIELDS)):
            runs.append({
                name: ([float(m["sweep"][f"{a}"]) for a in SWEEP], 1 - float(m["val_accuracy"]))
                for name, m in models.items()
            })  # fmt: skip
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UserError(f"{', '.join(map(str, paths))}: a run has no sweep from -90 to 90 degrees") from None
    names = [name for name in MODELS if runs and all(name in run for run in runs)]
    return Seeds(
        len(runs),
        {name: np.array([run[name][0] for run in runs]) for name in names},
        {name: np.array([run[name][1] for run in runs]) for name in names},
    )


def own_sweep(run: Run) -> Seeds:
    """As if there were no seed but the run's own."""
    return Seeds(
        0, {name: np.array([[tested["sweep"][f"{a}"] for a in SWEEP]]) for name, tested in run.tested.items()}, {}
    )


# ----------------------------------------------------------------------------------------------------------------------
# Figures
# ----------------------------------------------------------------------------------------------------------------------

SHOWN_ANGLES: tuple[float, ...] = (-60, -35, -15, 0, 15, 35, 60)


def draw_predictions(run: Run) -> Figure:
    chosen = of_each_class(run.data.test_labels)[0]
    names = list(run.states)
    left, cell, pitch, top = 0.66, 0.7, 0.83, 1.3
    row = cell + ANSWER_HEIGHT + 0.08
    fig = new_figure(top + len(SHOWN_ANGLES) * row + 0.02, "Upright and rotated digits, and the answers",
                     subtitle(run.config, run.data))  # fmt: skip
    add_answers_legend(fig, 0.12, 0.68, names)
    for m, label in enumerate(run.data.test_labels[chosen]):
        add_text(fig, left + m * pitch + cell / 2, 1.06, f"true: {label}", ha="center")
    for r, angle in enumerate(SHOWN_ANGLES):
        images = turned(run, chosen, angle)
        answers = answers_to(run, images)
        y = top + r * row
        add_text(fig, left - 0.1, y + cell / 2, degrees(angle) if angle else "upright", ha="right", va="center",
                 fontsize=10.5 if angle else 9, fontweight="bold")  # fmt: skip
        for m, image in enumerate(images):
            x = left + m * pitch
            add_image(fig, x, y, cell, image)
            add_answers(fig, x, y + cell + 0.02, cell + 0.02, names, answers[m], int(run.data.test_labels[chosen[m]]))
    return fig


def angle_axis(ax: Axes, step: int = 30) -> None:
    ax.set_xlim(SWEEP[0], SWEEP[-1])
    ticks = range(-90, 91, step)
    ax.set_xticks(ticks, [degrees(a) for a in ticks])
    ax.set_xlabel("rotation, counter-clockwise")


def sweep_accuracy_axis(ax: Axes) -> None:
    """From 0 to 1, with the line of a blind guess, which is named below it: the curves come down to it."""
    ax.set_ylim(0, 1.02)
    ax.set_yticks(np.arange(0, 1.01, 0.2))
    add_reference_line(ax, 1 / J)
    ax.annotate(f"chance {1 / J:g}", (1, 1 / J), xycoords=("axes fraction", "data"), xytext=(-3, -3),
                textcoords="offset points", ha="right", va="top", fontsize=9)  # fmt: skip


def seed_lines(ax: Axes, rows: Array, name: str) -> None:
    """Every seed (n, angles) as a thin line, the mean as a thick one; without the thin ones where it is one seed."""
    colour = MODELS[name].colour
    if len(rows) > 1:
        ax.plot(SWEEP, rows.T, color=lightened(colour, 0.55), linewidth=0.8, zorder=2)
    ax.plot(SWEEP, rows.mean(axis=0), **model_line(MODELS[name], linewidth=2.2), zorder=3, clip_on=False,
            markevery=2)  # fmt: skip


def draw_rotation_sweep(run: Run, seeds: Seeds) -> Figure:
    shown = seeds if seeds.n else own_sweep(run)
    others = [name for name in shown.sweep if name != "capsnet"]
    title = "Trained on upright digits, tested on rotated ones"
    fig = new_figure(4.5, title, subtitle(run.config, run.data, seeds=seeds.n))
    add_model_legend(fig, 0.62, 0.72, [MODELS[name] for name in shown.sweep])
    top, height = 1.62, 2.35
    width = 4.95 if others else 8.2
    ax = add_axes(fig, 0.62, top, width, height)
    sweep_accuracy_axis(ax)
    for name, rows in shown.sweep.items():
        seed_lines(ax, rows, name)
    ax.set_title("accuracy", loc="left", y=1.0, pad=6)
    angle_axis(ax)
    # One digit, rotated as the axis says.
    example, side = of_each_class(run.data.test_labels)[0][4:5], 0.42
    for tick in range(-90, 91, 30):
        x = 0.62 + (tick + 90) / 180 * width - side / 2
        add_image(fig, x, top - 0.66, side, turned(run, example, tick)[0])
    for angle in run.config.rotation:
        if SWEEP[0] < angle < SWEEP[-1]:
            ax.axvline(angle, color=BLACK, linewidth=1.0, linestyle=(0, (2, 2)), zorder=1.5)
            ax.annotate(degrees(angle), (angle, 0.02), xytext=(3, 0), textcoords="offset points", fontsize=9)

    if others:
        ax = add_axes(fig, 6.42, top, 2.4, height)
        for name in others:
            seed_lines(ax, 100 * (shown.sweep["capsnet"] - shown.sweep[name]), name)
        ax.axhline(0, color=BLACK, linewidth=1.1, zorder=2.5)
        ax.set_title("CapsNet minus the other, % points", loc="left", y=1.0, pad=6)
        angle_axis(ax, 45)
        ax.set_xlabel("rotation")
        ax.yaxis.set_major_locator(MaxNLocator(nbins=6, min_n_ticks=3))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: with_minus_sign(f"{value:+g}") if value else "0"))
    lines = "thick: mean; thin: each seed" if shown.n > 1 else ""
    add_text(fig, WIDTH - 0.12, 0.72, lines, ha="right", color=GREY)
    return fig


def draw_affnist_examples(run: Run) -> Figure:
    config, data, names = run.config, run.data, list(run.states)
    rows = of_each_class(data.test_labels, 2)
    left, cell, pitch, top = 0.92, 0.72, 0.8, 1.05
    row = cell + ANSWER_HEIGHT + 0.08
    y_table = top + 2 * len(rows) * row + 0.16 * (len(rows) - 1) + 0.06
    fig = new_figure(y_table + 0.78, "Trained on upright digits anywhere, tested on affNIST", subtitle(config, data))
    add_answers_legend(fig, 0.12, 0.68, names)
    distorted = experiment.affnist_set(data, config).images()
    for r, chosen in enumerate(rows):
        for s, (text, images) in enumerate((("upright,\nanywhere", turned(run, chosen, 0)),
                                            ("as in\naffNIST", distorted[chosen]))):  # fmt: skip
            y = top + (2 * r + s) * row + 0.16 * r
            add_row_label(fig, left - 0.1, y + cell / 2, text)
            for m, (image, answers) in enumerate(zip(images, answers_to(run, images), strict=True)):
                x = left + m * pitch
                add_image(fig, x, y, cell, image)
                add_answers(fig, x, y + cell + 0.02, cell + 0.02, names, answers, int(data.test_labels[chosen[m]]))
    add_text(fig, 0.12, y_table, f"Right of all {len(data.test_labels):,} test digits:", fontweight="bold")
    for s, (text, metric) in enumerate((("upright, anywhere", "upright"), ("affNIST", "affnist"))):
        y = y_table + 0.24 * (s + 1)
        add_text(fig, 0.12, y, text)
        for m, name in enumerate(names):
            accuracy = percent(run.tested[name][f"{metric}_accuracy"])
            add_text(fig, 1.75 + 2.0 * m, y, f"{MODELS[name].short} {accuracy}", color=darkened(MODELS[name].colour),
                     fontweight="bold")  # fmt: skip
    return fig


PERTURBATIONS = np.linspace(-0.25, 0.25, 11)  # of one number of a digit capsule [Sabour 2017, fig. 4]


def perturb_capsule(params: Params, v: Array, label: int) -> Array:
    """v (J, D), one image's capsules -> reconstructions (D, 11, S, S) from capsule ``label`` with one of its entries
    changed by -0.25, -0.2 ... 0.25. [Sabour 2017, fig. 4]"""
    D, n = v.shape[1], len(PERTURBATIONS)
    perturbed = np.repeat(v[None], D * n, axis=0)  # (D*n, J, D)
    perturbed[np.arange(D * n), label, np.repeat(np.arange(D), n)] += np.tile(PERTURBATIONS, D).astype(v.dtype)
    pictures = experiment.draw_capsules(params, perturbed, np.full(D * n, label))
    return pictures.reshape(D, n, *pictures.shape[1:])


class Perturbed(NamedTuple):
    """The capsule of one digit of each class."""

    seen: Array  # (J, S, S)
    pictures: Array  # (J, D, 11, S, S)


def perturb(run: Run) -> Perturbed:
    """Of each class the first of its first twenty digits that the capsule network classifies correctly, or else the
    very first."""
    config, labels, params = run.config, run.data.test_labels, run.states["capsnet"].params
    rows = of_each_class(labels, 20)
    images = np.stack([turned(run, row, 0) for row in rows])  # (rows, J, S, S)
    seen, pictures = [], []
    for j in range(J):
        v = experiment.capsules(params, images[:, j], config)  # (rows, J, D)
        right = np.square(v).sum(axis=2).argmax(axis=1) == j
        k = int(right.argmax())
        seen.append(images[k, j])
        pictures.append(perturb_capsule(params, v[k], j))
    return Perturbed(np.stack(seen), np.stack(pictures))


def sheet(pictures: Array) -> Array:
    """pictures (rows, columns, S, S) -> one, with white lines of a pixel between them."""
    return tiled(np.clip(pictures, 0, 1), n_greys=16, border=(0, 1))[:-1, :-1]


N_STRONGEST = 3
RECONSTRUCTED_ANGLES: tuple[float, ...] = (0, 15, 35, 60)


class Shown(NamedTuple):
    """What the decoder drew, for a digit of each class; pictures are in [0, 1]."""

    subtitle: str
    images: Array  # (angles, J, S, S)
    drawn: Array  # (angles, J, S, S) from the longest capsule
    answers: Array  # (angles, J)
    strongest: Array  # (J, 3) the entries of the capsule that change the picture most
    changed: Array  # (J, 3, 11, S, S) drawn with these entries changed


def make_shown(run: Run) -> Shown:
    """The first test digit of each class for the reconstructions; for the changed entries see ``perturb``, and the
    strongest are those whose two ends differ most."""
    chosen, params = of_each_class(run.data.test_labels)[0], run.states["capsnet"].params
    images = np.stack([turned(run, chosen, angle) for angle in RECONSTRUCTED_ANGLES])
    drawn, answers = [], []
    for rotated in images:
        v = experiment.capsules(params, rotated, run.config)  # (10, J, D)
        answers.append(np.square(v).sum(axis=2).argmax(axis=1))
        drawn.append(experiment.draw_capsules(params, v, answers[-1]))
    pictures = perturb(run).pictures
    effect = np.square(pictures[:, :, -1] - pictures[:, :, 0]).mean(axis=(2, 3))  # (J, D)
    strongest = np.argsort(-effect, axis=1, kind="stable")[:, :N_STRONGEST]
    changed = np.take_along_axis(pictures, strongest[:, :, None, None, None], axis=1)
    text = subtitle(run.config, run.data)
    return Shown(text, images, np.stack(drawn), np.stack(answers), strongest, changed)


PICTURES = ("images", "drawn", "changed")  # of Shown; a file has them in 8 bits
MAX_BYTES = 1 << 26  # of a file of arrays, unpacked


def write_shown(path: Path, shown: Shown) -> None:
    arrays = {name: np.asarray(value) for name, value in shown._asdict().items()}
    arrays |= {name: (255 * np.clip(arrays[name], 0, 1)).round() for name in PICTURES}
    stored = {name: v if name == "subtitle" else v.astype(np.uint8) for name, v in arrays.items()}
    with atomic_write(path) as stream:
        np.savez_compressed(stream, **stored)  # type: ignore[arg-type]


def read_shown(path: Path) -> Shown:
    """Raises UserError where it is no file of ``write_shown``."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
            if sum(member.file_size for member in stored.zip.infolist()) > MAX_BYTES:
                raise ValueError("it is too large")
            arrays = {name: stored[name] for name in Shown._fields}
        A, S = len(RECONSTRUCTED_ANGLES), arrays["images"].shape[-1]
        for name, shape, greatest in (
            ("images", (A, J, S, S), 255), ("drawn", (A, J, S, S), 255), ("answers", (A, J), J - 1),
            ("strongest", (J, N_STRONGEST), base.CAPSULE_SIZE - 1),
            ("changed", (J, N_STRONGEST, len(PERTURBATIONS), S, S), 255),
        ):  # fmt: skip
            if arrays[name].shape != shape or arrays[name].dtype != np.uint8 or arrays[name].max() > greatest:
                raise ValueError(f"its {name} are not what --arrays writes")
        pictures = {name: arrays[name] / 255 for name in PICTURES}
        return Shown(**arrays | pictures | {"subtitle": str(arrays["subtitle"])})
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except Exception as error:  # zipfile and numpy raise many kinds on a damaged file
        raise UserError(f"{path} is no file that --arrays has written: {one_line(error)}") from error


def draw_reconstructions(shown: Shown) -> Figure:
    left, cell, pitch, top = 1.14, 0.66, 0.78, 0.78
    row = 2 * cell + 0.04 + ANSWER_HEIGHT + 0.16
    fig = new_figure(top + len(RECONSTRUCTED_ANGLES) * row - 0.04, "Reconstructions from the longest capsule",
                     shown.subtitle)  # fmt: skip
    for r, angle in enumerate(RECONSTRUCTED_ANGLES):
        y = top + r * row
        add_text(fig, 0.12, y + cell + 0.02, degrees(angle) if angle else "upright", va="center", fontweight="bold",
                 fontsize=10.5 if angle else 9.5)  # fmt: skip
        for text, dy in (("image", 0.0), ("drawn", cell + 0.04)):
            add_text(fig, left - 0.1, y + dy + cell / 2, text, ha="right", va="center")
        for j in range(J):
            x = left + j * pitch
            add_image(fig, x, y, cell, shown.images[r, j])
            add_image(fig, x, y + cell + 0.04, cell, shown.drawn[r, j])
            add_answers(fig, x, y + 2 * cell + 0.06, cell + 0.02, ["capsnet"], [int(shown.answers[r, j])], j)
    return fig


def draw_capsule_dimensions(shown: Shown) -> Figure:
    n, side = len(PERTURBATIONS), 0.336
    left, top, gap = 0.74, 1.22, 0.2
    width, height = n * side, N_STRONGEST * side
    fig = new_figure(top + 5 * (height + gap) - 0.08, "What the numbers of a digit's capsule change", shown.subtitle)
    text = f"rows: the {N_STRONGEST} of its 16 numbers that change most; columns: what is added to that number"
    add_text(fig, 0.12, 0.64, f"{text} before the decoder draws")
    for j in range(J):
        x, y = left + j // 5 * (width + 0.66), top + j % 5 * (height + gap)
        add_sheet(fig, x, y, width, height, sheet(shown.changed[j]), interpolation="hanning")
        middle = add_axes(fig, x + n // 2 * side, y, side, height)
        add_frame(middle, ORANGE, 2)
        middle.patch.set_visible(False)
        add_text(fig, x - 0.38, y + height / 2, str(j), ha="right", va="center", fontsize=17, fontweight="bold")
        for r, d in enumerate(shown.strongest[j]):
            add_text(fig, x - 0.07, y + (r + 0.5) * side, str(d + 1), ha="right", va="center", fontsize=9, color=GREY)
        if j % 5 == 0:
            for m in (0, n // 2, n - 1):
                text = with_minus_sign(f"{PERTURBATIONS[m]:+.2f}") if m != n // 2 else "as it is"
                add_text(fig, x + (m + 0.5) * side, top - 0.22, text, ha="center", fontsize=9,
                         fontweight="bold" if m == n // 2 else "normal")  # fmt: skip
    return fig


def confusion_sets(run: Run) -> list[tuple[str, str]]:
    """(name of a test set, what it is called): rotated the furthest, and affNIST where it is there. Upright digits,
    almost all of which are classified correctly, where there is neither."""
    furthest = max(run.config.rotation, key=abs)
    sets = [(f"rotated_{furthest:g}", f"rotated by {degrees(furthest)}")] if furthest else []
    if "affnist" in run.tested["capsnet"]["confusion"]:
        sets.append(("affnist", "affNIST"))
    return sets or [("upright", "upright")]


def draw_confusion_matrices(run: Run) -> Figure:
    sets, side, left, top = confusion_sets(run), 2.4, 0.78, 1.2
    pitch, row = side + 0.36, side + 0.66
    fig = new_figure(top + len(sets) * row - 0.06, "Confusion matrices", subtitle(run.config, run.data))
    add_text(fig, 0.12, 0.64, "percentage of each true class that gets each answer; below 1 % nothing is written")
    for r, (key, text) in enumerate(sets):
        y = top + r * row
        add_text(fig, 0.36, y + side / 2, f"{text}: true class", rotation=90, ha="center", va="center", fontsize=10)
        for m, (name, tested) in enumerate(run.tested.items()):
            x = left + m * pitch
            counts = np.array(tested["confusion"][key], float)
            fraction = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
            ax = add_axes(fig, x, y, side, side)
            diagonal = np.eye(J, dtype=bool)[..., None]
            strength = np.where(diagonal[..., 0], 0.6 * fraction, 0.9 * np.sqrt(fraction))[..., None]
            colour = np.where(diagonal, to_rgb(RIGHT), to_rgb(WRONG))
            ax.imshow(1 - strength * (1 - colour))
            for i, k in zip(*np.nonzero(fraction >= 0.01), strict=True):
                dark = i != k and fraction[i, k] > 0.4
                ax.text(k, i, f"{100 * fraction[i, k]:.0f}", ha="center", va="center_baseline", fontsize=9,
                        color="white" if dark else BLACK)  # fmt: skip
            ax.set_xticks(range(J))
            ax.set_yticks(range(J))
            ax.tick_params(length=0, pad=3)
            ax.grid(False)
            ax.spines[:].set(visible=True, color=GREY, linewidth=0.8)
            add_text(fig, x, y - 0.22, f"{MODELS[name].short}: {percent(tested[f'{key}_accuracy'])} right",
                     color=darkened(MODELS[name].colour), fontweight="bold")  # fmt: skip
            add_text(fig, x + side / 2, y + side + 0.21, "answer", ha="center", fontsize=9)
    return fig


def log_axis(ax: Axes, values: Any, write_tick: Callable[[float], str]) -> None:
    """A log axis about the values, with ticks at 1, 2, 5, 10, 20 ..."""
    ticks = np.array([a * 10.0**k for k in range(-9, 5) for a in (1, 2, 5)])
    low, high = np.min(values) / 1.15, np.max(values) * 1.15
    inner = next(t for reach in (1.3, 2.6) if len(t := ticks[(ticks >= low / reach) & (ticks <= high * reach)]) > 1)
    ax.set_yscale("log")
    ax.set_ylim(min(low, *inner / 1.05), max(high, *inner * 1.05))
    ax.set_yticks(inner, [write_tick(tick) for tick in inner])
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.tick_params(axis="y", which="minor", length=0)


LEAST_ERROR, LEAST_LOSS = 1e-5, 1e-8  # that a log axis shows


def draw_training_curves(run: Run, seeds: Seeds) -> Figure:
    config = run.config
    fig = new_figure(4.0, "Training", subtitle(config, run.data))
    add_model_legend(fig, 0.62, 0.74, [MODELS[name] for name in run.states])
    top, height, last = 1.34, 1.95, max(state.step for state in run.states.values()) / config.steps_per_epoch
    whole = config.match_accuracy is None

    def curve(ax: Axes, y: Any, name: str, x: Any = None, **more: Any) -> None:
        style = {**model_line(MODELS[name]), "markevery": max(1, len(y) // 8), "zorder": 3, **more}
        ax.plot(np.arange(1, len(y) + 1) if x is None else x, y, clip_on=False, **style)

    def is_empty(ax: Axes, values: Any) -> bool:
        if not len(values):
            ax.set_yticks([])
            ax.text(0.5, 0.5, "stopped within\nthe first epoch", ha="center", va="center", transform=ax.transAxes,
                    color=GREY)  # fmt: skip
        return not len(values)

    ax = add_axes(fig, 0.62, top, 2.1, height)
    losses = {
        name: np.maximum(state.history.get("train_margin_loss" if name == "capsnet" else "train_loss", []), LEAST_LOSS)
        for name, state in run.states.items()
    }
    if not is_empty(ax, every := np.concatenate(list(losses.values()))):
        for name, values in losses.items():
            curve(ax, values, name)
        log_axis(ax, every, lambda tick: f"{tick:g}")
    ax.set_title("loss, training", loc="left")
    epoch_axis(ax, last, whole=whole)
    legend = "CapsNet: margin; others: cross-entropy"
    add_text(fig, 0.62, top + height + 0.5, legend, fontsize=9, color=GREY)

    ax = add_axes(fig, 3.4, top, 1.95, height)
    history, pixels = run.states["capsnet"].history, config.image_size**2
    held_out, training = history.get("val_recon_mse", []), np.array(history.get("train_recon_loss", [])) / pixels
    if not is_empty(ax, held_out):
        curve(ax, training, "capsnet", linestyle="--", marker="none")
        curve(ax, held_out, "capsnet")
        ax.set_ylim(0, 1.08 * max(*held_out, *training))
        ax.legend(
            [Line2D([], [], **model_line(MODELS["capsnet"])), Line2D([], [], color=BLUE, linestyle="--")],
            ["held out", "training"], loc="lower left", borderpad=0.2, handlelength=1.8,
        )  # fmt: skip
    ax.set_title("reconstruction, MSE of a pixel", loc="left")
    epoch_axis(ax, last, whole=whole)

    width = 2.8 - (0.62 if seeds.n else 0)
    ax = add_axes(fig, 6.06, top, width, height)
    shown: list[float] = [error for errors in seeds.val_error.values() for error in errors]
    for name, state in run.states.items():
        accuracy = state.history["val_accuracy" if whole else "check_accuracy"]
        x = None if whole else np.array(state.history["check_step"]) / config.steps_per_epoch
        errors = np.maximum(1 - np.array(accuracy), LEAST_ERROR)
        shown.extend(errors)
        curve(ax, errors, name, x)
    if config.match_accuracy is not None:
        shown.append(1 - config.match_accuracy)
        add_reference_line(ax, shown[-1])
    log_axis(ax, np.maximum(shown, LEAST_ERROR), lambda tick: f"{100 * tick:g} %")
    ax.set_title(f"errors, {config.n_val:,} digits held out", loc="left")
    epoch_axis(ax, last, whole=whole)
    if seeds.n:
        points = {name: np.maximum(seeds.val_error.get(name, np.empty(0)), LEAST_ERROR) for name in run.states}
        add_seed_points(fig, ax, 6.06 + width + 0.1, top, height, points, MODELS)
    return fig


FIGURES = (
    "predictions", "rotation_sweep", "affnist_examples", "reconstructions", "capsule_dimensions",
    "confusion_matrices", "training_curves",
)  # fmt: skip
N_COLOURS = {
    "capsule_dimensions": 48,
    "reconstructions": 128,
    "predictions": 128,
}  # of a palette, for a small file


def possible_figures(config: Config) -> list[str]:
    return [name for name in FIGURES if name != "affnist_examples" or config.image_size == experiment.AFFNIST_SIDE]


def drawers(run: Run, seeds: Seeds) -> dict[str, Callable[[], Figure]]:
    """Name of each possible figure of a run, and what draws it (within ``figure_style``)."""
    shown = functools.cache(lambda: make_shown(run))
    known: dict[str, Callable[[], Figure]] = {
        "predictions": lambda: draw_predictions(run),
        "rotation_sweep": lambda: draw_rotation_sweep(run, seeds),
        "affnist_examples": lambda: draw_affnist_examples(run),
        "reconstructions": lambda: draw_reconstructions(shown()),
        "capsule_dimensions": lambda: draw_capsule_dimensions(shown()),
        "confusion_matrices": lambda: draw_confusion_matrices(run),
        "training_curves": lambda: draw_training_curves(run, seeds),
    }
    return {name: known[name] for name in possible_figures(run.config)}


# ----------------------------------------------------------------------------------------------------------------------
# Files and command line
# ----------------------------------------------------------------------------------------------------------------------


def prepare(
    checkpoint: Path | None, asked: Config, given: Mapping[str, Any]
) -> tuple[Config, Data, dict[str, TrainState]]:
    """Configuration, data and the states of a checkpoint, without which there are none yet. Raises UserError."""
    config, states = load_finished(
        experiment, checkpoint, asked, given, TEST_FIELDS, required=("capsnet",), stopped=experiment.reached
    )
    data = experiment.make_data(config)
    require_every_class(data)
    return experiment.resolve_defaults(config, data), data, states


def finish(config: Config, data: Data, states: dict[str, TrainState], threads: int, quiet: bool) -> Run:
    """Train, unless that is done, test, and print the table."""
    states = states or experiment.train_all(config, data, RunOptions(threads=threads, quiet=quiet))
    with Workers(threads, config.dtype) as workers:
        tested = experiment.run_tests(config, data, states, workers)
    result = experiment.make_result(config, data, states, tested, threads)
    print(f"{experiment.describe(result)}\n{experiment.format_table(result)}")
    return Run(config, data, states, tested)


STORED = {"reconstructions": draw_reconstructions, "capsule_dimensions": draw_capsule_dimensions}  # in --arrays


def draw_stored(path: Path, folder: Path, wanted: Collection[str]) -> None:
    shown = read_shown(path)
    chosen = {name: functools.partial(draw, shown) for name, draw in STORED.items() if name in wanted}
    write_figures(folder, chosen, N_COLOURS)


DEFAULT_RESULTS = Path("results") / experiment.EXPERIMENT / "upright.json"


@dataclasses.dataclass(frozen=True)
class Options(FigureOptions):
    figures: tuple[str, ...] = setting(
        (), names_of(FIGURES), f"Draw only these of {', '.join(FIGURES)}.", usual=True,
        shown="all, affnist_examples only with --canvas 40",
    )  # fmt: skip
    results: tuple[Path, ...] = setting(
        (), input_path, "Draw the curves of all seeds in these JSON files.", shown=f"{DEFAULT_RESULTS} where it exists"
    )
    arrays: Path | None = setting(
        None, output_path,
        f"With --checkpoint: write there what {' and '.join(STORED)} show. Without: draw these two from it.",
    )  # fmt: skip
    threads: int = redeclared(base.DigitOptions, "threads", base.DigitOptions.threads)

    def check(self, given: Mapping[str, Any]) -> None:
        if self.arrays and not self.checkpoint:
            if set(given) - {"arrays", "figures", "outdir", "quiet"}:
                raise SettingError("arrays", "only --figures and --outdir go with it, or --checkpoint")
            if not STORED.keys() >= set(self.figures or STORED):
                raise SettingError("arrays", f"has {' and '.join(STORED)} alone")


@script
def main(argv: Sequence[str] | None = None) -> None:
    asked, options, given = parse(
        Config, Options, argv,
        "Draw the figures of the affine-digits experiment, from a checkpoint or after training its models.",
        [
            ("--checkpoint run.safetensors", "All figures of these networks: about 2 minutes."),
            ("--n-train 6000 --n-epochs 4", "All figures, after a short training: about 4 minutes."),
            ("--checkpoint run.safetensors --figures rotation_sweep,reconstructions",
             "Two of the figures: about 2 minutes."),
        ],
        f"The figures go to DIR/{experiment.EXPERIMENT}/, where DIR is --outdir.",
    )  # fmt: skip
    folder = options.outdir / experiment.EXPERIMENT
    # All errors are found before the training.
    if options.arrays and not options.checkpoint:
        draw_stored(options.arrays, folder, options.figures or STORED)
        return
    require_writable(folder / f"{FIGURES[0]}.png", options.arrays)
    results = results_files([*options.results], DEFAULT_RESULTS)
    config, data, states = prepare(options.checkpoint, asked, given)
    possible = possible_figures(config)
    wanted = options.figures or possible
    if not set(wanted) <= set(possible):
        raise UserError(f"affnist_examples.png needs --canvas {experiment.AFFNIST_SIDE}")
    seeds = read_seeds(results, config, data.name)
    require_runs([*options.results], seeds.n)
    run = finish(config, data, states, options.threads, options.quiet)
    with blas_threads(1):
        if options.arrays:
            write_shown(options.arrays, make_shown(run))
        write_figures(folder, {name: draw for name, draw in drawers(run, seeds).items() if name in wanted}, N_COLOURS)
    if results and not seeds.n:
        print(f"no curves of other seeds: {results[0]} holds no run with these flags")


if __name__ == "__main__":
    sys.exit(main())
