#!/usr/bin/env python3
"""Draw how matrix capsules learn with one part replaced, into ``DIR/what_routing_does/``.

    python visualize_what_routing_does.py

trains the network of what_routing_does.py on the drawn shapes of one seed, as it is and with each part replaced.
Without --seed it is the reported seed whose routed capsules have the median accuracy on held-out viewpoints.

    training_curves.png    loss, accuracy on familiar and on held-out viewpoints, epoch by epoch
"""

from __future__ import annotations

import support.headless  # noqa: F401  before matplotlib

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import what_routing_does as experiment
from support.files import require_writable
from support.optimizers import TrainState
from support.script import script
from support.settings import int_in, parse, redeclared, setting
from support.training import RunOptions

from support.figures import (  # isort: skip
    BLACK, DATASET_NAMES, EM_CAPSULES, GREEN, SKY, ModelStyle, OutOptions, draw_histories, median_seed, plural,
    settings_in, write_figures,
)  # fmt: skip

RESULTS = Path("results") / experiment.EXPERIMENT / "assignments.json#routed"
VARIANTS: dict[str, tuple[ModelStyle, dict[str, Any]]] = {  # what is replaced
    "routed": (EM_CAPSULES._replace(label="EM routing, spread loss"), {}),
    "even": (ModelStyle("even assignments", "even", SKY, "s"), {"assignments": "even"}),
    "cross_entropy": (ModelStyle("cross-entropy", "cross-entropy", GREEN, "^"), {"loss": "cross-entropy"}),
    "bias": (ModelStyle("bias of the votes", "bias", BLACK, "D"), {"vote_bias": "learned"}),
}
STYLES = {name: style for name, (style, _) in VARIANTS.items()}
TITLES = {
    "train_loss": "training loss, each one's own",
    "familiar_accuracy": "accuracy, familiar viewpoints",
    "held_out_accuracy": "accuracy, held-out viewpoints",
}


@dataclasses.dataclass(frozen=True)
class Config:
    seed: int | None = setting(None, int_in(0, 2**32 - 1), "Seed of the shapes and the trainings.",
        shown="that of the median accuracy of the results", usual=True)  # fmt: skip
    n_epochs: int = redeclared(experiment.Config, "n_epochs")


@dataclasses.dataclass(frozen=True)
class Options(OutOptions):
    threads: int = redeclared(RunOptions, "threads")
    quiet: bool = redeclared(RunOptions, "quiet")


@script
def main(argv: Sequence[str] | None = None) -> None:
    config, options, _ = parse(
        Config, Options, argv, "Draw how matrix capsules learn with EM routing, and with one part replaced.",
        [
            ("", "The four trainings and the picture: about 40 seconds."),
            ("--seed 1 --n-epochs 2", "Of another seed, and shorter: about 15 seconds."),
        ],
        f"The picture goes to DIR/{experiment.EXPERIMENT}/, where DIR is --outdir.",
    )  # fmt: skip
    folder, seed, who = options.outdir / experiment.EXPERIMENT, config.seed, f"seed {config.seed}"
    require_writable(folder / "training_curves.png")
    if seed is None:
        runs = settings_in(RESULTS)[0]["runs"]
        seed = median_seed(runs, "capsules", "held_out_accuracy")
        who = f"seed {seed}, the median of {len(runs)}"
    states: dict[str, TrainState] = {}
    for name, (_, parts) in VARIANTS.items():
        one = experiment.Config(seed=seed, n_epochs=config.n_epochs, **parts)
        data = experiment.make_data(one)
        trained = experiment.train_all(one, data, RunOptions(quiet=options.quiet, threads=options.threads))
        states[name] = trained["capsules"]
    length = f"{plural(config.n_epochs, 'epoch')} of {len(data.train.labels):,} images"
    chance = 1 / experiment.network_config(one).n_classes
    subtitle = f"{DATASET_NAMES['shapes']}, azimuths held out · convolutional matrix capsules · {length} · {who}"
    drawing = functools.partial(draw_histories, subtitle, TITLES, states, STYLES, chance, below=True)
    write_figures(folder, {"training_curves": drawing})


if __name__ == "__main__":
    sys.exit(main())
