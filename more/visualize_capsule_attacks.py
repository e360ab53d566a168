#!/usr/bin/env python3
"""Draw matrix capsules and their CNN under attack, and how they learn, into ``DIR/capsule_attacks/``.

    python -m more.visualize_capsule_attacks

draws from results of compare_seeds.py:

    attack_seeds.png      accuracy against the size of an attack, mean and interval over seeds: FGSM, with the paper's
                          on smallNORB in grey, and the worst case of all attacks
    training_curves.png   loss and accuracy, epoch by epoch: the seed whose capsules have the median accuracy without
                          an attack, trained again
"""

from __future__ import annotations

from support.figures import (  # isort: skip
    DATASET_NAMES, GREY, NoSettings, OutOptions, accuracy_axis, choice_of_figures, draw_histories, figure_script,
    head_legend, make_figure, median_seed, model_handles, plot_band, plural, settings_in,
)

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from more import capsule_attacks as experiment
from more.visualize_conv_matrix_capsules import MODELS
from smallnorb_novel_viewpoint import RunOptions, from_json
from support.experiment import redeclared

SHOWN_KINDS = {"fgsm": "one step: FGSM", "worst_case": "worst case of all attacks with this ε or a smaller one"}
# read off figure 3 of [Hinton 2018], by epsilon
PAPER_FGSM = {"capsules": {0.2: 0.83, 0.5: 0.69}, "cnn": {0.2: 0.16, 0.5: 0.03}}
CHANCE = 1 / experiment.network_config(experiment.Config()).n_classes
RESULT = Path("results") / experiment.EXPERIMENT / "shapes.json"


def draw_attack_seeds(path: Path = RESULT) -> Figure:
    """Accuracy against epsilon: mean and interval over the seeds of a file by compare_seeds.py."""
    found, *_ = settings_in(path)
    runs, epsilons = found["runs"], [0.0, *found["config"]["epsilons"]]
    text = (
        f"{DATASET_NAMES[found['dataset']]} · networks of equal size · mean and 95 % interval of"
        f" {plural(len(runs), 'seed')}\n"
        "no pixel moved by more than ε, along the gradient of the loss, all weights known"
    )
    fig = make_figure(4.3, "Accuracy under attack", text)
    handles = model_handles(MODELS.values())
    dotted: dict[str, Any] = {"color": GREY, "linestyle": ":", "linewidth": 1.1}
    papers = [Line2D([], [], **dotted, marker=style.marker, label=f"the paper's {style.short}: figure 3, smallNORB")
              for style in MODELS.values()]
    head_legend(fig, [handle for both in zip(handles, papers, strict=True) for handle in both], 2)
    for ax, (kind, title) in zip(fig.subplots(1, 2, sharey=True), SHOWN_KINDS.items(), strict=True):
        accuracy_axis(ax, "accuracy" if kind == "fgsm" else None, CHANCE, side="left")
        ax.set_title(title)
        for name, style in MODELS.items():
            rows = [[run["models"][name][f"{kind}_{e:g}_accuracy"] for e in epsilons] for run in runs]
            plot_band(ax, epsilons, np.array(rows), style)
            if kind == "fgsm":
                paper = {e: value for e, value in PAPER_FGSM[name].items() if e <= epsilons[-1]}
                label = f"paper, {style.short}"
                ax.plot(list(paper), list(paper.values()), **dotted, marker=style.marker, label=label, clip_on=False)
        ax.set_xlabel("ε (pixels run from 0 to 1)")
        ax.set_xlim(0, epsilons[-1])
        ax.set_xticks(epsilons, [f"{e:g}" for e in epsilons])
    return fig


TITLES = {"train_loss": "training loss, each model's own", "accuracy": "accuracy without an attack"}


def draw_training_curves(options: Options, path: Path = RESULT) -> Figure:
    """The networks of the median seed of a file by compare_seeds.py, trained again."""
    found, *_ = settings_in(path)
    seed, known = median_seed(found["runs"], "capsules", "accuracy"), vars(experiment.Config())
    config = from_json(experiment.Config, {k: x for k, x in found["config"].items() if k in known} | {"seed": seed})
    data = experiment.make_data(config)
    states = experiment.train_all(config, data, RunOptions(quiet=options.quiet, threads=options.threads))
    text = (f"{DATASET_NAMES[data.name]} · images not standardised · {len(data.train.labels):,} images an epoch"
            f" · seed {seed}, the median of {len(found['runs'])}")
    return draw_histories(text, TITLES, states, MODELS, CHANCE)


OF_RUN, OF_RESULTS = {"training_curves": draw_training_curves}, {"attack_seeds": draw_attack_seeds}
Config = NoSettings


@dataclasses.dataclass(frozen=True)
class Options(OutOptions):
    figures: tuple[str, ...] = choice_of_figures(*OF_RUN, *OF_RESULTS)
    threads: int = redeclared(RunOptions, "threads", usual=True)
    quiet: bool = redeclared(RunOptions, "quiet")


main = figure_script(
    experiment.EXPERIMENT, Config, Options, "Draw matrix capsules and their CNN under attack, and how they learn.",
    [
        ("", "Both pictures, after a training: about 20 seconds."),
        ("--figures attack_seeds", "That of the committed results: about 3 seconds."),
    ],
    lambda config, options, _: options, OF_RUN, OF_RESULTS,
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
