"""Draw matrix capsules and their CNN under attack, and how they learn, into ``DIR/capsule_attacks/``.

    python -m more.visualize_capsule_attacks

draws from results of compare_seeds.py and, the second and the fourth, after trainings:

    attack_seeds.png      accuracy against the size of an attack, mean and interval over seeds, on drawn shapes and on
                          the write-up's objects: FGSM, with the paper's on smallNORB in grey, and the worst case
    training_curves.png   loss and accuracy, epoch by epoch: the seed whose capsules have the median accuracy without
                          an attack, trained again
    attack_trainings.png  accuracy under attack against the length of the training, for three weight decays
    attack_steps.png      dense networks of four seeds: accuracy against the number of steps of an attack, and why one
                          step fails
"""

from __future__ import annotations

from support.figures import (
    DATASET_NAMES, GREY, OutOptions, Settings, accuracy_axis, choice_of_figures, draw_histories, figure_script,
    head_legend, lightened, make_figure, median_seed, model_handles, model_line, plot_band, plural, settings_in,
)

import dataclasses
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import smallnorb_novel_viewpoint as smallnorb
from more import attacks, capsule_attacks as experiment, conv_matrix_capsules as conv
from more.visualize_conv_matrix_capsules import MODELS
from multimnist_capsnet import Workers
from smallnorb_novel_viewpoint import RunOptions, TrainState, from_json
from support.experiment import redeclared

SHOWN_KINDS = {"fgsm": "one step along the loss", "worst_case": "worst of many attacks"}
# read off figure 3 of [Hinton 2018], by epsilon
PAPER_FGSM = {"capsules": {0.2: 0.83, 0.5: 0.69}, "cnn": {0.2: 0.16, 0.5: 0.03}}
CHANCE = 1 / experiment.network_config(experiment.Config()).n_classes
RESULT, LENGTHS, *REGISTERED = (
    Path("results", experiment.EXPERIMENT, f"{name}.json")
    for name in ("shapes", "lengths", "registered_shapes", "registered_voxels")
)


def draw_attack_seeds(paths: Sequence[Path] = tuple(REGISTERED)) -> Figure:
    """Accuracy against epsilon: mean and interval over the seeds of files by compare_seeds.py, a row for each."""
    text = "networks of equal size, mean and 95 % interval\nno pixel changed by more than ε, all weights known"
    fig = make_figure(1.6 + 2.7 * len(paths), "Accuracy under attack", text)
    handles = model_handles(MODELS.values())
    points: dict[str, Any] = {"color": GREY, "linestyle": ""}
    papers = [Line2D([], [], **points, marker=style.marker, label=f"the paper's {style.short}: figure 3, smallNORB")
              for style in MODELS.values()]
    head_legend(fig, [handle for both in zip(handles, papers, strict=True) for handle in both], 2)
    rows_of_axes = fig.subplots(len(paths), 2, sharex=True, sharey=True, squeeze=False)
    for (path, axes), (k, kind) in itertools.product(zip(paths, rows_of_axes, strict=True), enumerate(SHOWN_KINDS)):
        (found, *_), ax = settings_in(path), axes[k]
        runs, epsilons = found["runs"], [0.0, *found["config"]["epsilons"]]
        accuracy_axis(ax, "accuracy" if kind == "fgsm" else None, CHANCE, side="left")
        objects = DATASET_NAMES[found["dataset"]]
        ax.set_title(f"{objects}, {plural(len(runs), 'seed')}: {SHOWN_KINDS[kind]}")
        for name, style in MODELS.items():
            rows = [[run["models"][name][f"{kind}_{e:g}_accuracy"] for e in epsilons] for run in runs]
            plot_band(ax, epsilons, np.array(rows), style)
            if kind == "fgsm":
                paper = {e: value for e, value in PAPER_FGSM[name].items() if e <= epsilons[-1]}
                label = f"paper, {style.short}"
                ax.plot(list(paper), list(paper.values()), **points, marker=style.marker, label=label, clip_on=False)
        if path == paths[-1]:
            ax.set_xlabel("ε (pixels run from 0 to 1)")
        ax.set_xlim(0, epsilons[-1])
        ax.set_xticks(epsilons, [f"{e:g}" for e in epsilons])
    return fig


def draw_attack_trainings(path: Path = LENGTHS) -> Figure:
    """Accuracy against epochs, a panel for each weight decay: the mean over the seeds of a sweep of both, and the
    worst case of each seed."""
    found = settings_in(path)
    runs = {(one["config"]["weight_decay"], one["config"]["n_epochs"]): one["runs"] for one in found}
    decays, lengths = (sorted({key[k] for key in runs}) for k in (0, 1))
    epsilon = found[0]["config"]["epsilons"][0]
    text = (f"{DATASET_NAMES[found[0]['dataset']]} · dense networks of equal size · ε = {epsilon:g} · mean of"
            f" {plural(len(found[0]['runs']), 'seed')}; small: the worst case of each")
    fig = make_figure(4.0, "Training decides what an attack finds", text)
    lines: dict[str, Any] = {"worst_case": ("-", "worst case of all attacks"), "fgsm": ("--", "one step: FGSM")}
    kinds = [Line2D([], [], color=GREY, linestyle=line, label=label) for line, label in lines.values()]
    head_legend(fig, [*model_handles(MODELS.values()), *kinds], 2)
    for ax, decay in zip(fig.subplots(1, len(decays), sharey=True), decays, strict=True):
        accuracy_axis(ax, "accuracy" if decay == decays[0] else None, CHANCE, side="center", below=True)
        ax.set(title=f"weight decay {decay:g}", xlabel="epochs", xscale="log")
        ax.set_xticks(lengths, [str(n) for n in lengths])
        ax.minorticks_off()
        for (name, style), (kind, (line, label)) in itertools.product(MODELS.items(), lines.items()):
            metric = f"{kind}_{epsilon:g}_accuracy"
            rows = np.array([[run["models"][name][metric] for run in runs[decay, n]] for n in lengths]).T
            options: dict[str, Any] = {"linestyle": line, "label": f"{style.label}, {label}", "clip_on": False}
            ax.plot(lengths, rows.mean(axis=0), **model_line(style, **options))
            if kind == "worst_case":
                beside = np.array(lengths) * (0.88 if name == "capsules" else 1.14)
                ax.plot(beside, rows.T, style.marker, color=lightened(style.colour, 0.6), markersize=3, clip_on=False)
    return fig


TITLES = {"train_loss": "training loss, each model's own", "accuracy": "accuracy without an attack"}


def draw_training_curves(options: Options, path: Path = RESULT) -> Figure:
    """The networks of the median seed of a file by compare_seeds.py, trained again."""
    found, *_ = settings_in(path)
    seed, known = median_seed(found["runs"], "capsules", "accuracy"), vars(experiment.Config())
    config = from_json(experiment.Config, {k: x for k, x in found["config"].items() if k in known} | {"seed": seed})
    data: Any = experiment.make_data(config)
    states = experiment.train_all(config, data, RunOptions(quiet=options.quiet, threads=options.threads))
    text = (f"{DATASET_NAMES[data.name]} · images not standardised · {len(data.train.labels):,} images an epoch"
            f" · seed {seed}, the median of {len(found['runs'])}")
    return draw_histories(text, TITLES, states, MODELS, CHANCE)


# --- Accuracy against the number of steps, and why one step fails -----------------------------------------------------

STEPS = (1, 2, 5, 10, 20, 50, 100, 200)
EPSILON, N_ATTACKED, SEEDS = 0.1, 50, range(200, 204)
SATURATED = 0.05  # a number between 0 and 1 that is nearer than this to one of them
LINES: dict[str, Any] = {attacks.MARGIN: ("-", "along the margin"), "": ("--", "along the loss of the training")}


class Attacked(NamedTuple):
    """What an attacker finds on a network; several seeds are joined by ``joined``."""

    accuracies: dict[str, np.ndarray]  # (S, steps) of S seeds, by a loss of ``LINES``
    norms: np.ndarray  # (N,) of the margin's gradient at the images
    shares: dict[str, float]  # what explains the first step, by a name of it


def joined(seeds: list[Attacked]) -> Attacked:
    accuracies = {loss: np.concatenate([one.accuracies[loss] for one in seeds]) for loss in LINES}
    shares = {name: float(np.mean([one.shares[name] for one in seeds])) for name in seeds[0].shares}
    return Attacked(accuracies, np.concatenate([one.norms for one in seeds]), shares)


def saturated(x: np.ndarray) -> float:
    return float(np.mean((x < SATURATED) | (x > 1 - SATURATED)))


def last_routing(config: experiment.Config, state: TrainState, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Class activations and assignments of the last iteration, of images before any standardisation."""
    if config.network == "matrix":
        routing = conv.class_routing(state.params, images, experiment.network_config(config))
        return routing.a[-1], routing.r[-1]
    x = smallnorb.standardized(images) if config.standardize == "image" else images
    m_step = experiment.make_models(config)["capsules"].forward(state.params, x)[1].routing.m_steps[-1]
    return m_step.a, m_step.r


def measure_attacks(
    config: experiment.Config, data: Any, states: Mapping[str, TrainState], threads: int
) -> dict[str, Attacked]:
    images, labels = experiment.attacked_images(config, data)
    found = {}
    with Workers(threads) as workers:
        for name, state in states.items():
            network, bounds = experiment.attacked_network(config, name, state.params, workers), experiment.PIXELS
            accuracies = {
                kind: np.array([[
                    1 - float(attacks.misled(network, attacks.iterated(
                        network, images, labels, network.losses[kind], EPSILON, n_steps, bounds), labels).mean())
                    for n_steps in STEPS
                ]])
                for kind in LINES
            }
            flat = network.gradient(images, labels, network.losses[""])[2]
            loss = network.losses[attacks.MARGIN]
            _, before, dx = network.gradient(images, labels, loss)
            moved = np.clip(images + np.float32(EPSILON) * np.sign(dx), *bounds)
            _, after, dx_moved = network.gradient(moved, labels, loss)
            promised = (dx * (moved - images)).sum(axis=(1, 2, 3))
            shares = {
                "images whose training loss\nhas no gradient": float(np.mean(~flat.any(axis=(1, 2, 3)))),
                "rise of the margin in one step,\nof what its slope promises": float(
                    np.median((after - before) / promised)
                ),
                "pixels whose gradient\nhas another sign after it": float(np.mean((dx * dx_moved)[dx != 0] < 0)),
            }
            if name == "capsules":
                a, r = last_routing(config, state, images)
                shares |= {"class activations\nnear 0 or 1": saturated(a),
                           "assignments to classes\nnear 0 or 1": saturated(r)}
            found[name] = Attacked(accuracies, np.sqrt(np.square(dx).sum(axis=(1, 2, 3))), shares)
    return found


def draw_attack_steps(options: Options) -> Figure:
    """For the dense networks of a few seeds, in the settings of smallnorb_novel_viewpoint.py, which classify new views
    best."""
    accurate = vars(smallnorb.Config())
    found = []
    for seed in SEEDS:
        own = {name: accurate[name] for name in experiment.DENSE}
        config = experiment.Config(network="dense", seed=seed, n_attack=N_ATTACKED, **own)
        data = experiment.make_data(config)
        states = experiment.train_all(config, data, RunOptions(quiet=options.quiet, threads=options.threads))
        found.append(measure_attacks(config, data, states, options.threads))
    return draw_steps({name: joined([one[name] for one in found]) for name in found[0]}, config)


def draw_steps(found: Mapping[str, Attacked], config: experiment.Config) -> Figure:
    n_seeds = len(found["capsules"].accuracies[attacks.MARGIN])
    text = (
        f"{DATASET_NAMES[config.dataset]} · {config.network} networks of equal size, trained for accuracy on new"
        f" azimuths · ε = {EPSILON} · {len(found['capsules'].norms)} images of {plural(n_seeds, 'seed')}\n"
        "margin: the best wrong score minus the right one; scores of capsules are log-odds of activations"
    )
    fig = make_figure(4.5, "Many steps mislead capsules that one step does not", text)
    kinds = [Line2D([], [], color=GREY, linestyle=line, label=label) for line, label in LINES.values()]
    head_legend(fig, [*model_handles(MODELS.values()), *kinds], 2)
    left, middle, right = fig.subplots(1, 3, width_ratios=(1.3, 0.8, 1.1))
    accuracy_axis(left, "accuracy", CHANCE, side="left", below=True)
    left.set(title="accuracy after so many steps", xlabel="steps", xscale="log")
    left.set_xticks(STEPS, [str(n) for n in STEPS])
    left.minorticks_off()
    middle.set(title="norm of the margin's gradient", xlabel="images, by norm")
    right.set_title("why one step fails")
    names = list(dict.fromkeys(share for one in found.values() for share in one.shares))
    for k, (name, one) in enumerate(found.items()):
        for kind, (line, label) in LINES.items():
            style: dict[str, Any] = {"clip_on": False, "zorder": 3, "linestyle": line}
            style["label"] = f"{MODELS[name].label}, {label}"
            left.plot(STEPS, one.accuracies[kind].mean(axis=0), **model_line(MODELS[name], **style))
        middle.plot(np.linspace(0, 1, len(one.norms)), np.sort(one.norms), color=MODELS[name].colour)
        heights = [names.index(share) + 0.38 * k for share in one.shares]
        bars = right.barh(heights, list(one.shares.values()), 0.36, color=MODELS[name].colour)
        right.bar_label(bars, fmt="%.2f", padding=2)
    middle.set(xticks=[], ylim=(0, None))
    right.set_yticks([0.19 + n for n in range(len(names))], names)
    right.set(xlim=(0, 1.15), ylim=(len(names) - 0.4, -0.4))
    return fig


OF_RUN = {"training_curves": draw_training_curves, "attack_steps": draw_attack_steps}
OF_RESULTS: dict[str, Callable[[], Figure]] = {
    "attack_seeds": draw_attack_seeds, "attack_trainings": draw_attack_trainings,
}
Config = Settings


@dataclasses.dataclass(frozen=True)
class Options(OutOptions):
    figures: tuple[str, ...] = choice_of_figures(*OF_RUN, *OF_RESULTS)
    threads: int = redeclared(RunOptions, "threads", usual=True)
    quiet: bool = redeclared(RunOptions, "quiet")


main = figure_script(
    experiment.EXPERIMENT, Config, Options, "Draw matrix capsules and their CNN under attack, and how they learn.",
    ("", "All pictures, after ten trainings: about 3 minutes."),
    ("--figures attack_seeds", "That of the committed results: about 3 seconds."),
    prepare=lambda config, options, _: options, of_run=OF_RUN, of_results=OF_RESULTS,
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
