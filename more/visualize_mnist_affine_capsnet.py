"""Draw the figures of the affine-digits experiment into ``DIR/mnist_affine_capsnet/``.

    python -m more.visualize_mnist_affine_capsnet --checkpoint run.npz --outdir viz

draws what ``mnist_affine_capsnet.py --checkpoint FILE`` has trained; without ``--checkpoint`` the three models are
trained first, with the flags of that script. Of reported settings it is, without --seed, the seed whose capsule network
has the median accuracy on rotated digits.

    rotation_sweep.png     accuracy from -90 to 90 degrees; of reported settings means and intervals of their seeds
    training_curves.png    loss, reconstruction and error on the validation digits, epoch by epoch

Which digit is shown never depends on how the models do on it: it is the first of its class in the test set.
"""

from __future__ import annotations

from support.figures import (
    BLACK, CAPSNET, CNN, DATASET_NAMES, LENET, OF_MEDIAN, FigureOptions, Run, accuracy_axis, choice_of_figures,
    draw_histories, figure_script, head_legend, load_or_train, make_figure, model_handles, plot_band, plural,
    show_pictures, with_minus_sign,
)

import dataclasses
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import multimnist_capsnet as multimnist
from more import mnist_affine_capsnet as affine
from more.mnist_affine_capsnet import SWEEP, Config, Data
from multimnist_capsnet import Array, UserError, Workers
from support.experiment import redeclared

MODELS = {"capsnet": CAPSNET, "cnn": CNN, "lenet": LENET}
J = multimnist.N_CLASSES
RESULTS = Path("results") / affine.EXPERIMENT / "rotated.json"


def degrees(angle: float) -> str:
    return with_minus_sign(f"{angle:g}°")


def subtitle(run: Run, who: str = "") -> str:
    """What every figure says of its run: data set, canvas, how long it trained, and the seed or what else is shown."""
    config, side = run.config, run.config.image_size
    canvas = "" if side == multimnist.DIGIT_SIDE else f", anywhere on {side}×{side}"
    stop = f"up to {100 * config.match_accuracy:g} % right, at most " if config.match_accuracy is not None else ""
    length = f"{stop}{plural(config.n_epochs, 'epoch')} of {config.n_train:,} upright digits"
    return " · ".join((DATASET_NAMES[run.data.name] + canvas, length, who or run.who))


def resolved(config: Config, data: Data) -> Config:
    """Raises UserError where a class has no test digit."""
    if missing := sorted(set(range(J)) - set(data.test_labels.tolist())):
        n = len(data.test_labels)
        raise UserError(f"the figures need a digit of every class: none of the {n:,} test digits is a {missing[0]}")
    return affine.resolve_defaults(config, data)


def first_of_each_class(labels: Array) -> Array:
    return np.array([np.flatnonzero(labels == j)[0] for j in range(J)])


def angle_axis(ax: Axes, step: int = 30) -> None:
    ax.set_xlim(SWEEP[0], SWEEP[-1])
    ticks = range(-90, 91, step)
    ax.set_xticks(ticks, [degrees(a) for a in ticks])
    ax.set_xlabel("rotation, counter-clockwise")


def draw_rotation_sweep(run: Run) -> Figure:
    """Means and intervals of the reported runs with the same tests; where there are none, this run."""
    runs, n = [one["models"] for one in run.reported] or [run.tested], len(run.reported)
    accuracy = {name: np.array([[models[name]["sweep"][f"{a}"] for a in SWEEP] for models in runs])
                for name in MODELS if name in runs[0]}
    who = f"means and 95 % intervals of {n} seeds" if n > 1 else run.who
    digits = min(run.config.n_sweep, len(run.data.test_labels))
    fig = make_figure(4.6, "Trained on upright digits, tested on rotated ones",
                      subtitle(run, f"{plural(digits, 'digit')} at each angle, {who}"))
    head_legend(fig, model_handles(MODELS[name] for name in accuracy))
    left, right = fig.subplots(1, 2, width_ratios=(5, 2.4))
    accuracy_axis(left, "accuracy", 1 / J, side="center")  # where the curves are high
    for name, rows in accuracy.items():
        plot_band(left, SWEEP, rows, MODELS[name], markevery=2)
        if name != "capsnet":
            plot_band(right, SWEEP, 100 * (accuracy["capsnet"] - rows), MODELS[name], markevery=2)
    angle_axis(left)
    example = first_of_each_class(run.data.test_labels)[4:5]
    for tick in range(-90, 91, 30):  # one digit, rotated as the axis says
        inset = left.inset_axes((tick - 10, 1.02, 20, 0.2), transform=left.get_xaxis_transform())
        show_pictures(inset, affine.rotated_digits(run.data, run.config, tick, example)[None])
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


TEST_FIELDS = ("data_dir", "n_test", "n_sweep")  # on which no training depends


def finished(asked: Config, options: Any, given: Collection[str]) -> Run:
    """The networks of ``--checkpoint``, or trained now, with their sweep."""
    run = load_or_train(
        affine, options, asked, given, resolved,
        (RESULTS, "capsnet", f"rotated_{asked.rotation[-1]:g}_accuracy"), free=TEST_FIELDS, required=("capsnet",),
        reached=affine.reached,
    )
    with Workers(options.threads) as workers:
        return run._replace(tested=affine.run_sweep(run.config, run.data, run.states, workers))


OF_RUN = {"rotation_sweep": draw_rotation_sweep, "training_curves": draw_training_curves}


@dataclasses.dataclass(frozen=True)
class Options(FigureOptions):
    figures: tuple[str, ...] = choice_of_figures(*OF_RUN)
    threads: int = redeclared(multimnist.Options, "threads")


main = figure_script(
    affine.EXPERIMENT, Config, Options,
    "Draw the figures of the affine-digits experiment, from a checkpoint or after training its models." + OF_MEDIAN,
    ("--checkpoint run.npz", "Both figures of these networks: about 2 minutes."),
    ("--n-train 6000 --n-epochs 4", "Both figures, after a short training: about 4 minutes."),
    ("--checkpoint run.npz --n-sweep 100", "Of fewer digits at each angle: about 1 minute."),
    prepare=finished, of_run=OF_RUN,
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
