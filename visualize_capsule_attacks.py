#!/usr/bin/env python3
"""Draw attacks on matrix capsules and their CNN into ``DIR/capsule_attacks/``.

    python visualize_capsule_attacks.py --checkpoint run.safetensors

draws what ``capsule_attacks.py --checkpoint run.safetensors`` has trained; without ``--checkpoint`` it trains first,
with the same flags as that script.

    attacked_images.png     images in the worst case, what was added to them, and the answers
    attack_curves.png       accuracy against the size of an attack: FGSM, with the paper's on smallNORB in grey, and the
                            worst case of all attacks
    attack_seeds.png        the same from results of compare_seeds.py, mean and interval over seeds

Which images are shown never depends on the attack: the first of the test set that both models read right are taken,
each of another class.
"""

from __future__ import annotations

import support.headless  # noqa: F401  before matplotlib

# isort: split


import dataclasses
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import capsule_attacks as experiment
import conv_matrix_capsules as conv
from capsule_attacks import Array, Config
from conv_matrix_capsules import Data, Model
from fast.workers import Workers
from support.files import UserError
from support.optimizers import TrainState
from support.script import script
from support.settings import names_of, parse, setting
from support.training import RunOptions
from visualize_conv_matrix_capsules import MODELS, answers_of, one_of_each_class, style_of, verdict, with_article

from support.figures import (  # isort: skip
    DATASET_NAMES, GREY, RIGHT, WRONG, FigureOptions, accuracy_axis, draw_figures, grey_levels, head_legend,
    load_finished, make_figure, model_line, plot_band, plural, settings_in, show_pictures,
)  # fmt: skip

ATTACKED = re.compile(r"(fgsm|iterated|worst_case)(_log_odds)?_([0-9.e+-]+)_accuracy")
SHOWN_KINDS = {"fgsm": "one step: FGSM", "worst_case": "worst case of all attacks with this ε or a smaller one"}
# read off figure 3 of [Hinton 2018], by epsilon
PAPER_FGSM = {"capsules": {0.2: 0.83, 0.5: 0.69}, "cnn": {0.2: 0.16, 0.5: 0.03}}


class Run(NamedTuple):
    """What is drawn: a finished training."""

    config: Config
    data: Data
    states: dict[str, TrainState]


def subtitle(run: Run) -> str:
    """The data set, the training, and the seed."""
    n = len(run.data.train.labels)
    return (f"{DATASET_NAMES[run.data.name]} · {plural(run.config.n_epochs, 'epoch')} of {n:,} images"
            f" · seed {run.config.seed}")  # fmt: skip


class Attacks(NamedTuple):
    """Accuracies under attack: by model and kind (``fgsm``, ``worst_case``)."""

    epsilons: list[float]  # from 0
    accuracy: dict[str, dict[str, Array]]  # (seeds, epsilons)
    zero_gradient: dict[str, float]  # fraction of images that give an attacker no gradient, mean over the seeds


def attacks_among(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A model's metrics -> ``{"fgsm": {"0": accuracy, "0.05": …}, …, "zero_gradient": fraction}``."""
    kinds: dict[str, Any] = {k: v for k, v in metrics.items() if k.startswith("zero_gradient")}
    for key, value in metrics.items():
        if match := ATTACKED.fullmatch(key):
            kinds.setdefault(match[1] + (match[2] or ""), {})[match[3]] = value
    return kinds


def gather_attacks(runs: Sequence[Mapping[str, Mapping[str, Any]]]) -> Attacks:
    """``runs``: per seed, per model, as ``attacks_among``. Raises LookupError where their attacks differ."""
    texts = sorted(next(iter(runs[0].values()))["fgsm"], key=float)
    accuracy: dict[str, dict[str, Array]] = {}
    for name in runs[0]:
        for kind in SHOWN_KINDS:
            if any(set(run[name][kind]) != set(texts) for run in runs):
                raise LookupError(f"{kind} with other values of epsilon")
            accuracy.setdefault(name, {})[kind] = np.array([[run[name][kind][text] for text in texts] for run in runs])
    zero = {name: float(np.mean([run[name].get("zero_gradient", 0.0) for run in runs])) for name in accuracy}
    return Attacks([float(text) for text in texts], accuracy, zero)


ATTACKED_ALIKE = ("n_attack", "standardize", "cnn")


def join_attacks(paths: Sequence[Path]) -> tuple[Config, Attacks]:
    """Configuration and attacks of files by compare_seeds.py, in which models of the same seed are one run.

    Raises UserError where a file is none of these, and where they differ in what is attacked, or how.
    """
    runs: dict[int, dict[str, dict[str, Any]]] = {}
    alike: list[dict[str, Any]] = []
    for path in paths:
        for found_setting in settings_in(path):
            config = found_setting["config"]
            alike.append({name: config[name] for name in ATTACKED_ALIKE} | {"dataset": found_setting["dataset"]})
            for run in found_setting["runs"]:
                for name, metrics in run["models"].items():
                    runs.setdefault(run["seed"], {})[name] = attacks_among(metrics)
    try:
        found = gather_attacks(list(runs.values()))
    except LookupError:
        found = None
    if found is None or any(config != alike[0] for config in alike):
        raise UserError(f"{', '.join(map(str, paths))} have no attacks in common")
    return Config(**alike[0]), found


def measure_attacks(run: Run, threads: int) -> Attacks:
    return gather_attacks([experiment.attack_all(run.config, run.states, run.data, threads)])


def gradient_note(attacks: Attacks) -> str:
    """Empty where every image gives a gradient, up to half a percent."""
    zero = {name: f"{100 * fraction:.0f} %" for name, fraction in attacks.zero_gradient.items()}
    if {*zero.values()} <= {"0 %"}:
        return ""
    parts = ", ".join(f"{style.short} {zero[name]}" for name, style in MODELS.items() if name in zero)
    return f"\nimages that give an attacker no gradient at all of the model's own loss: {parts}"


def draw_attacks(config: Config, attacks: Attacks, text: str) -> Figure:
    """Accuracy against epsilon: mean and interval over the seeds."""
    text += "\nno pixel moved by more than ε, along the gradient of the loss, all weights known"
    text += gradient_note(attacks)
    fig = make_figure(4.3, "Accuracy under attack", text)
    styles = {name: style_of(name, config.cnn) for name in MODELS if name in attacks.accuracy}
    handles = [Line2D([], [], **model_line(style)) for style in styles.values()]
    dotted: dict[str, Any] = {"color": GREY, "linestyle": ":", "linewidth": 1.1}
    handles += [Line2D([], [], **dotted, marker=style.marker, label=f"the paper's {style.short}, smallNORB, read off")
                for style in styles.values()]  # fmt: skip
    head_legend(fig, [handles[k] for k in (0, 2, 1, 3)] if len(styles) == 2 else handles, 2)
    for ax, (kind, title) in zip(fig.subplots(1, 2, sharey=True), SHOWN_KINDS.items(), strict=True):
        chance = 1 / experiment.network_config(config).n_classes
        accuracy_axis(ax, "accuracy" if kind == "fgsm" else None, chance, side="left")
        ax.set_title(title)
        for name, style in styles.items():
            plot_band(ax, attacks.epsilons, attacks.accuracy[name][kind], style)
            if kind == "fgsm":
                paper = {e: value for e, value in PAPER_FGSM[name].items() if e <= attacks.epsilons[-1]}
                label = f"paper, {style.short}"
                ax.plot(list(paper), list(paper.values()), **dotted, marker=style.marker, label=label, clip_on=False)
        ax.set_xlabel("ε (pixels run from 0 to 1)" if config.pixel_range[1] == 1 else "ε (in standard deviations)")
        ax.set_xlim(0, attacks.epsilons[-1])
    return fig


def worst_cases(model: Model, params: dict[str, Array], images: Array, labels: Array, config: Config
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


N_IMAGES = 2


def draw_attacked_images(run: Run, answers: Mapping[str, Array]) -> Figure:
    """A row for each image and model: the image, and for two values of epsilon the attacked image and what was
    added."""
    config, labels, network = run.config, run.data.test.labels, experiment.exact_config(run.config)
    names = [name for name in MODELS if name in run.states]
    right = np.flatnonzero(np.all([answers[name] == labels for name in names], axis=0))
    chosen = one_of_each_class(labels, right if len(right) else np.arange(len(labels)), N_IMAGES)
    n_epsilons = len(config.epsilons)
    shown = sorted({n_epsilons // 3, 2 * n_epsilons // 3})
    images, models = conv.prepared(run.data.test.images[chosen], network), conv.make_models(network)
    text = "added: red where brighter, blue where darker, full at ±ε; once misread, misread at every larger ε"
    fig = make_figure(9.2, "Attacked images, and the answers of the models", f"{subtitle(run)}\n{text}")
    axes = fig.subplots(len(chosen) * len(names), 1)
    columns = ["image", *(c for i in shown for c in (f"ε = {config.epsilons[i]:g}", "added"))]
    for m, name in enumerate(names):
        params = {k: p.astype(np.float64) for k, p in run.states[name].params.items()}
        with np.errstate(all="ignore"):
            found = worst_cases(models[name], params, images, labels[chosen], config)
            said = [models[name].forward(params, x)[0].argmax(axis=1) for x in found]
        for b, label in enumerate(labels[chosen].tolist()):
            pictures = [np.repeat(grey_levels(images[b])[..., None], 3, axis=2)]
            for i in shown:
                moved = found[i][b]
                added = (moved - images[b])[..., 0] / config.epsilons[i]
                pictures.append(np.repeat(grey_levels(moved)[..., None], 3, axis=2))
                pictures.append(colormaps["RdBu_r"](0.5 + added / 2)[..., :3])
            ax = axes[b * len(names) + m]
            style = style_of(name, config.cnn)
            grid = show_pictures(ax, np.stack(pictures)[None], [f"against the\n{style.short}"], columns, gap=(5, 2),
                                 interpolation="nearest")  # fmt: skip
            grid.write(0, 0, with_article(network.classes[label]), fontweight="bold")
            for k, i in enumerate(shown):
                said_text, colour = verdict(network, int(said[i][b]), label)
                grid.frame(0, 1 + 2 * k, RIGHT if said[i][b] == label else WRONG, 2.2)
                grid.write(0, 1 + 2 * k, f"answer {said_text}", color=colour, fontweight="bold")
    return fig


OF_RUN, OF_RESULTS = ("attacked_images", "attack_curves"), ("attack_seeds",)
RESULTS = Path("results") / experiment.EXPERIMENT


def draw_attack_seeds(paths: Sequence[Path]) -> Figure:
    if not paths:
        raise UserError(f"there are no results in {RESULTS}")
    config, attacks = join_attacks(paths)
    n = len(next(iter(attacks.accuracy.values()))["fgsm"])
    text = f"{DATASET_NAMES[config.dataset]} · networks of equal size · mean and 95 % interval of {plural(n, 'seed')}"
    return draw_attacks(config, attacks, text)


@dataclasses.dataclass(frozen=True)
class Options(FigureOptions):
    figures: tuple[str, ...] = setting(
        (), names_of((*OF_RUN, *OF_RESULTS)), f"Draw these alone: {', '.join((*OF_RUN, *OF_RESULTS))}.", usual=True
    )


@script
def main(argv: Sequence[str] | None = None) -> None:
    asked, options, given = parse(
        Config, Options, argv,
        "Draw attacks on matrix capsules and their CNN, from a checkpoint or after training them.",
        [
            ("--checkpoint run.safetensors", "All figures of these networks: about 1 minute."),
            ("--checkpoint run.safetensors --figures attacked_images", "One of them: about 10 seconds."),
            ("--figures attack_seeds", "Attack curves of committed results: about 3 seconds."),
        ],
        f"The figures go to DIR/{experiment.EXPERIMENT}/, where DIR is --outdir.",
    )  # fmt: skip

    def of_run() -> dict[str, Callable[[], Figure]]:
        free = ("data_dir", "epsilons", "n_attack")
        config, states = load_finished(
            experiment, options.checkpoint, asked, given, free, required=MODELS,
            length=lambda name, config: conv.of_model(name, experiment.network_config(config))[0],
        )  # fmt: skip
        data, running = experiment.make_data(config), RunOptions(quiet=options.quiet, threads=options.threads)
        states = states or experiment.train_all(config, data, running)
        run, network = Run(config, data, states), experiment.network_config(config)
        with Workers(options.threads, config.dtype) as workers:
            answers = answers_of(network, data, states, workers)
        return {
            "attacked_images": lambda: draw_attacked_images(run, answers),
            "attack_curves": lambda: draw_attacks(config, measure_attacks(run, options.threads), subtitle(run)),
        }

    of_results = {"attack_seeds": lambda: draw_attack_seeds(sorted(RESULTS.glob("*.json")))}
    draw_figures(options.outdir / experiment.EXPERIMENT, options, of_results, of_run)


if __name__ == "__main__":
    sys.exit(main())
