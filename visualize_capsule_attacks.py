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
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import capsule_attacks as experiment
from support.files import UserError
from support.script import script
from support.settings import input_path, parse, setting
from visualize_conv_matrix_capsules import MODELS

from support.figures import (  # isort: skip
    DATASET_NAMES, GREY, OutOptions, accuracy_axis, head_legend, make_figure, model_handles, plot_band, plural,
    settings_in, write_figures,
)  # fmt: skip

SHOWN_KINDS = {"fgsm": "one step: FGSM", "worst_case": "worst case of all attacks with this ε or a smaller one"}
# read off figure 3 of [Hinton 2018], by epsilon
PAPER_FGSM = {"capsules": {0.2: 0.83, 0.5: 0.69}, "cnn": {0.2: 0.16, 0.5: 0.03}}
CHANCE = 1 / experiment.network_config(experiment.Config()).n_classes
RESULT = Path("results") / experiment.EXPERIMENT / "shapes.json"


def draw_attack_seeds(path: Path) -> Figure:
    """Accuracy against epsilon: mean and interval over the seeds of a file by compare_seeds.py. Raises UserError where
    it holds no attacks."""
    found, *_ = settings_in(path)
    runs, epsilons = found["runs"], [0.0, *found["config"].get("epsilons", ())]
    text = (
        f"{DATASET_NAMES[found['dataset']]} · networks of equal size · mean and 95 % interval of"
        f" {plural(len(runs), 'seed')}\n"
        "no pixel moved by more than ε, along the gradient of the loss, all weights known"
    )
    fig = make_figure(4.3, "Accuracy under attack", text)
    handles = model_handles(MODELS.values())
    dotted: dict[str, Any] = {"color": GREY, "linestyle": ":", "linewidth": 1.1}
    papers = [Line2D([], [], **dotted, marker=style.marker, label=f"the paper's {style.short}: figure 3, smallNORB")
              for style in MODELS.values()]  # fmt: skip
    head_legend(fig, [handle for both in zip(handles, papers, strict=True) for handle in both], 2)
    for ax, (kind, title) in zip(fig.subplots(1, 2, sharey=True), SHOWN_KINDS.items(), strict=True):
        accuracy_axis(ax, "accuracy" if kind == "fgsm" else None, CHANCE, side="left")
        ax.set_title(title)
        for name, style in MODELS.items():
            try:
                rows = [[run["models"][name][f"{kind}_{e:g}_accuracy"] for e in epsilons] for run in runs]
            except LookupError:
                raise UserError(f"{path} holds no attacks by {experiment.EXPERIMENT}.py") from None
            plot_band(ax, epsilons, np.array(rows), style)
            if kind == "fgsm":
                paper = {e: value for e, value in PAPER_FGSM[name].items() if e <= epsilons[-1]}
                label = f"paper, {style.short}"
                ax.plot(list(paper), list(paper.values()), **dotted, marker=style.marker, label=label, clip_on=False)
        ax.set_xlabel("ε (pixels run from 0 to 1)")
        ax.set_xlim(0, epsilons[-1])
        ax.set_xticks(epsilons, [f"{e:g}" for e in epsilons])
    return fig


@dataclasses.dataclass(frozen=True)
class Inputs:
    results: Path = setting(RESULT, input_path, "Draw the attacks of this result of compare_seeds.py.", usual=True)


@script
def main(argv: Sequence[str] | None = None) -> None:
    inputs, options, _ = parse(
        Inputs, OutOptions, argv, "Draw the accuracy of matrix capsules and of their CNN under attack.",
        [("", "The picture of the committed results: about 3 seconds.")],
        f"The picture goes to DIR/{experiment.EXPERIMENT}/, where DIR is --outdir.",
    )  # fmt: skip
    drawers = {"attack_seeds": lambda: draw_attack_seeds(inputs.results)}
    write_figures(options.outdir / experiment.EXPERIMENT, drawers)


if __name__ == "__main__":
    sys.exit(main())
