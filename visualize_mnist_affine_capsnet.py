#!/usr/bin/env python3
"""Draw the figures of the affine-digits experiment into ``DIR/mnist_affine_capsnet/``.

    python visualize_mnist_affine_capsnet.py --checkpoint run.safetensors --outdir viz

draws what ``mnist_affine_capsnet.py --checkpoint FILE`` has trained; without ``--checkpoint`` the three models are
trained first, with the flags of that script. Without --seed it is the reported seed whose capsule network has the
median accuracy on rotated digits.

    rotation_sweep.png      accuracy from -90 to 90 degrees, means and intervals of the reported seeds
    training_curves.png     loss, reconstruction and error on the validation digits, epoch by epoch
    capsule_dimensions.png  the numbers of each digit's capsule that change its reconstruction most

Which digits are shown never depends on how the models do on them: it is the first of each class in the test set.
Capsules are perturbed for the first of these, among twenty, that the capsule network classifies correctly.
"""

from __future__ import annotations

import support.headless  # noqa: F401  before matplotlib

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import mnist_affine_capsnet as experiment
import multimnist_capsnet as base
from fast.workers import Workers, blas_threads
from mnist_affine_capsnet import SWEEP, Config, Data
from multimnist_capsnet import Array
from support.files import UserError
from support.script import script
from support.settings import input_path, parse, redeclared, setting
from visualize_multimnist_capsnet import PERTURBATIONS, perturb_capsule

from support.figures import (  # isort: skip
    BLACK, CAPSNET, CNN, DATASET_NAMES, GREY, LENET, ORANGE, REFERENCE_LINE, FigureOptions, Run, choice_of_figures,
    draw_figures, draw_histories, head_legend, load_or_train, make_figure, model_handles, name_line, plot_band, plural,
    show_pictures, with_minus_sign,
)  # fmt: skip

MODELS = {"capsnet": CAPSNET, "cnn": CNN, "lenet": LENET}
J = base.N_CLASSES
RESULTS = Path("results") / experiment.EXPERIMENT / "rotated.json"


def degrees(angle: float) -> str:
    return with_minus_sign(f"{angle:g}°")


def subtitle(run: Run, who: str = "") -> str:
    """What every figure says of its run: data set, canvas, how long it trained, and the seed or what else is shown."""
    config, side = run.config, run.config.image_size
    canvas = "" if side == base.DIGIT_SIDE else f", anywhere on {side}×{side}"
    stop = f"up to {100 * config.match_accuracy:g} % right, at most " if config.match_accuracy is not None else ""
    length = f"{stop}{plural(config.n_epochs, 'epoch')} of {config.n_train:,} upright digits"
    return " · ".join((DATASET_NAMES[run.data.name] + canvas, length, who or run.who))


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


def perturbed(run: Run) -> Array:
    """Pictures (J, D, 11, S, S) drawn with each number of a capsule changed, see ``perturb_capsule``: of each class the
    first of its first twenty digits that the capsule network classifies correctly, or else the very first."""
    labels, params = run.data.test_labels, run.states["capsnet"].params
    images = np.stack([turned(run, row, 0) for row in of_each_class(labels, 20)])  # (rows, J, S, S)
    found = []
    for j in range(J):
        v = base.capsnet_forward(params, images[:, j], run.config)[1].v  # (rows, J, D)
        right = np.square(v).sum(axis=2).argmax(axis=1) == j
        found.append(perturb_capsule(params, v[int(right.argmax())], j))
    return np.stack(found)


def angle_axis(ax: Axes, step: int = 30) -> None:
    ax.set_xlim(SWEEP[0], SWEEP[-1])
    ticks = range(-90, 91, step)
    ax.set_xticks(ticks, [degrees(a) for a in ticks])
    ax.set_xlabel("rotation, counter-clockwise")


def sweep_accuracy_axis(ax: Axes, in_middle: bool = False) -> None:
    """From 0 to 1, with the line of a blind guess. The curves come down to it: its name is below it or in the middle,
    where they are high."""
    ax.set_ylim(0, 1.04)
    ax.axhline(1 / J, **REFERENCE_LINE)
    text = f"chance {1 / J:g}"
    if in_middle:
        ax.annotate(text, (0, 1 / J), (0, 3), textcoords="offset points", ha="right", va="bottom", color=GREY)
    else:
        name_line(ax, text, 1 / J, side="right", below=True)


def draw_rotation_sweep(run: Run) -> Figure:
    """Means and intervals of the reported runs with the same tests; where there are none, this run."""
    runs, n = [one["models"] for one in run.reported] or [run.tested], len(run.reported)
    accuracy = {name: np.array([[models[name]["sweep"][f"{a}"] for a in SWEEP] for models in runs])
                for name in MODELS if name in runs[0]}  # fmt: skip
    who = f"means and 95 % intervals of {n} seeds" if n > 1 else run.who
    digits = min(run.config.n_sweep, len(run.data.test_labels))
    fig = make_figure(4.6, "Trained on upright digits, tested on rotated ones",
                      subtitle(run, f"{plural(digits, 'digit')} at each angle, {who}"))  # fmt: skip
    head_legend(fig, model_handles(MODELS[name] for name in accuracy))
    left, right = fig.subplots(1, 2, width_ratios=(5, 2.4))
    sweep_accuracy_axis(left, in_middle=True)
    left.set_ylabel("accuracy")
    for name, rows in accuracy.items():
        plot_band(left, SWEEP, rows, MODELS[name], markevery=2)
        if name != "capsnet":
            plot_band(right, SWEEP, 100 * (accuracy["capsnet"] - rows), MODELS[name], markevery=2)
    angle_axis(left)
    example = of_each_class(run.data.test_labels)[0][4:5]
    for tick in range(-90, 91, 30):  # one digit, rotated as the axis says
        inset = left.inset_axes((tick - 10, 1.02, 20, 0.2), transform=left.get_xaxis_transform())
        show_pictures(inset, turned(run, example, tick)[None])
        inset.set_anchor("S")
    for angle in run.config.rotation:
        if SWEEP[0] < angle < SWEEP[-1]:
            left.axvline(angle, color=BLACK, linewidth=1.0, linestyle=(0, (2, 2)), zorder=1.5)
            left.annotate(degrees(angle), (angle, 0.02), (3, 0), textcoords="offset points", fontsize=9)
    right.axhline(0, color=BLACK, linewidth=1.1, zorder=2.5)
    others = [MODELS[name].short for name in accuracy if name != "capsnet"]
    right.set_title(f"CapsNet minus {others[0] if len(others) == 1 else 'the other'},\npercentage points")
    angle_axis(right, 45)
    right.set_xlabel("rotation")
    right.yaxis.set_major_locator(MaxNLocator(nbins=6, min_n_ticks=3))
    right.yaxis.set_major_formatter(lambda value, _: with_minus_sign(f"{value:+g}") if value else "0")
    return fig


def draw_training_curves(run: Run) -> Figure:
    titles = {
        "train_loss": "training loss, each model's own",
        "val_recon_mse": "reconstruction, MSE of a pixel",
        "val_error": "error, validation digits",
    }
    return draw_histories(subtitle(run), titles, run.states, MODELS, 1 / J)


N_STRONGEST = 3


def draw_capsule_dimensions(run: Run) -> Figure:
    """For each class the numbers of its capsule whose two ends differ most."""
    pictures = perturbed(run)
    effect = np.square(pictures[:, :, -1] - pictures[:, :, 0]).mean(axis=(2, 3))  # (J, D)
    strongest = np.argsort(-effect, axis=1, kind="stable")[:, :N_STRONGEST]
    text = (
        f"rows: the {N_STRONGEST} of its 16 numbers that change the picture most; columns: what is added to that number"
    )
    fig = make_figure(7.2, "What the numbers of a digit's capsule change", f"{subtitle(run)}\n{text}")
    middle = len(PERTURBATIONS) // 2
    columns = [with_minus_sign(f"{p:+.2f}") if m in (0, len(PERTURBATIONS) - 1) else "as it is" if m == middle else ""
               for m, p in enumerate(PERTURBATIONS)]  # fmt: skip
    for j, ax in enumerate(fig.subplots(J // 2, 2).T.ravel()):
        names = [str(d + 1) for d in strongest[j]]
        grid = show_pictures(ax, pictures[j, strongest[j]], names, columns if j % 5 == 0 else (), n_greys=16)
        ax.set_ylabel(str(j), rotation=0, fontsize=16, fontweight="bold", labelpad=10, va="center")
        grid.frame(0, middle, ORANGE, rows=N_STRONGEST)
    return fig


FIGURES = ("rotation_sweep", "training_curves", "capsule_dimensions")
N_COLOURS = {"capsule_dimensions": 48}  # of a palette, for a small file
TEST_FIELDS = ("data_dir", "n_test", "n_sweep", "rotation")  # on which no training depends


def finished(options: Any, asked: Config, given: Mapping[str, Any]) -> Run:
    """The networks of ``--checkpoint``, or trained now, with their tests, whose table is printed."""
    run = load_or_train(
        experiment, options, asked, given, lambda _, data: require_every_class(data), experiment.resolve_defaults,
        ("capsnet", f"rotated_{asked.rotation[-1]:g}_accuracy"), free=TEST_FIELDS, required=("capsnet",),
    )  # fmt: skip
    with Workers(options.threads) as workers:
        tested = experiment.run_tests(run.config, run.data, run.states, workers)
    result = experiment.make_result(run.config, run.data, run.states, tested, options.threads)
    print(f"{experiment.describe(result)}\n{experiment.format_table(result)}")
    return run._replace(tested=tested)


@dataclasses.dataclass(frozen=True)
class Options(FigureOptions):
    figures: tuple[str, ...] = choice_of_figures(*FIGURES)
    results: Path = setting(RESULTS, input_path, "Results of compare_seeds.py: the reported seeds.")
    threads: int = redeclared(base.Options, "threads")


@script
def main(argv: Sequence[str] | None = None) -> None:
    config, options, given = parse(
        Config, Options, argv,
        "Draw the figures of the affine-digits experiment, from a checkpoint or after training its models.",
        [
            ("--checkpoint run.safetensors", "All figures of these networks: about 2 minutes."),
            ("--n-train 6000 --n-epochs 4", "All figures, after a short training: about 4 minutes."),
            ("--checkpoint run.safetensors --figures rotation_sweep", "One of them: about 2 minutes."),
        ],
        f"The figures go to DIR/{experiment.EXPERIMENT}/, where DIR is --outdir.",
    )  # fmt: skip

    def of_run() -> dict[str, Callable[[], Figure]]:
        run = finished(options, config, given)
        return {
            "rotation_sweep": lambda: draw_rotation_sweep(run),
            "training_curves": lambda: draw_training_curves(run),
            "capsule_dimensions": lambda: draw_capsule_dimensions(run),
        }

    with blas_threads(1):
        draw_figures(options.outdir / experiment.EXPERIMENT, options, {}, of_run, N_COLOURS)


if __name__ == "__main__":
    sys.exit(main())
