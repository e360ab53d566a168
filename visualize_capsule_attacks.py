#!/usr/bin/env python3
"""Accuracy of matrix capsules and of their CNN under attack, as a picture, from results of compare_seeds.py.

    python visualize_capsule_attacks.py            # viz/capsule_attacks/attack_seeds.png

Accuracy against the size of an attack, mean and interval over seeds: FGSM, with the paper's on smallNORB in grey, and
the worst case of all attacks.
"""

from __future__ import annotations

import support.headless  # noqa: F401  before matplotlib

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import capsule_attacks as experiment
from capsule_attacks import Array, Config
from support.files import UserError
from support.script import script
from support.settings import folder, parse, setting
from visualize_conv_matrix_capsules import MODELS, style_of

from support.figures import (  # isort: skip
    DATASET_NAMES, GREY, OutOptions, accuracy_axis, head_legend, make_figure, model_handles, plot_band, plural,
    settings_in, write_figures,
)  # fmt: skip

SHOWN_KINDS = {"fgsm": "one step: FGSM", "worst_case": "worst case of all attacks with this ε or a smaller one"}
# read off figure 3 of [Hinton 2018], by epsilon
PAPER_FGSM = {"capsules": {0.2: 0.83, 0.5: 0.69}, "cnn": {0.2: 0.16, 0.5: 0.03}}
RESULTS = Path("results") / experiment.EXPERIMENT


class Attacks(NamedTuple):
    """Accuracies under attack: by model and kind (``fgsm``, ``worst_case``)."""

    epsilons: list[float]  # from 0
    accuracy: dict[str, dict[str, Array]]  # (seeds, epsilons)
    zero_gradient: dict[str, float]  # fraction of images that give an attacker no gradient, mean over the seeds


ATTACKED_ALIKE = ("n_attack", "standardize", "cnn", "epsilons")


def join_attacks(paths: Sequence[Path]) -> tuple[Config, Attacks]:
    """Configuration and attacks of files by compare_seeds.py, in which models of the same seed are one run.

    Raises UserError where a file is none of these, and where they differ in what is attacked, or how.
    """
    runs: dict[int, dict[str, dict[str, Any]]] = {}
    alike: list[dict[str, Any]] = []
    for found in (found for path in paths for found in settings_in(path)):
        alike.append({name: found["config"][name] for name in ATTACKED_ALIKE} | {"dataset": found["dataset"]})
        for run in found["runs"]:
            runs.setdefault(run["seed"], {}).update(run["models"])
    names = list(dict.fromkeys(name for models in runs.values() for name in models))
    try:
        epsilons = ["0", *(f"{e:g}" for e in alike[0]["epsilons"])]
        accuracy = {
            name: {kind: np.array([[run[name][f"{kind}_{e}_accuracy"] for e in epsilons] for run in runs.values()])
                   for kind in SHOWN_KINDS} for name in names
        }  # fmt: skip
        if any(config != alike[0] for config in alike):
            raise LookupError("other attacks")
    except LookupError:
        raise UserError(f"{', '.join(map(str, paths))} have no attacks in common") from None
    zero = {name: float(np.mean([run[name].get("zero_gradient", 0.0) for run in runs.values()])) for name in names}
    return Config(**alike[0]), Attacks([float(e) for e in epsilons], accuracy, zero)


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
    handles = model_handles(styles.values())
    dotted: dict[str, Any] = {"color": GREY, "linestyle": ":", "linewidth": 1.1}
    handles += [Line2D([], [], **dotted, marker=style.marker, label=f"the paper's {style.short}: figure 3, smallNORB")
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
        ax.set_xticks(attacks.epsilons, [f"{e:g}" for e in attacks.epsilons])
    return fig


def draw_attack_seeds(paths: Sequence[Path]) -> Figure:
    if not paths:
        raise UserError(f"there are no results in {RESULTS}")
    config, attacks = join_attacks(paths)
    n = len(next(iter(attacks.accuracy.values()))["fgsm"])
    text = f"{DATASET_NAMES[config.dataset]} · networks of equal size · mean and 95 % interval of {plural(n, 'seed')}"
    return draw_attacks(config, attacks, text)


@dataclasses.dataclass(frozen=True)
class Inputs:
    results: Path = setting(RESULTS, folder, "Folder of the results.", usual=True)


@script
def main(argv: Sequence[str] | None = None) -> None:
    inputs, options, _ = parse(
        Inputs, OutOptions, argv, "Draw the accuracy of matrix capsules and of their CNN under attack.",
        [("", "The picture of the committed results: about 3 seconds.")],
        f"The picture goes to DIR/{experiment.EXPERIMENT}/, where DIR is --outdir.",
    )  # fmt: skip
    paths = sorted(inputs.results.glob("*.json"))
    write_figures(options.outdir / experiment.EXPERIMENT, {"attack_seeds": lambda: draw_attack_seeds(paths)})


if __name__ == "__main__":
    sys.exit(main())
