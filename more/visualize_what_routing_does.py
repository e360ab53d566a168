"""Draw how matrix capsules learn with one part replaced, into ``DIR/what_routing_does/``.

    python -m more.visualize_what_routing_does

trains the network of what_routing_does.py on the drawn shapes of one seed, as it is and with each part replaced.
Without --seed it is the reported seed whose routed capsules have the median accuracy on held-out viewpoints.

    training_curves.png    loss, accuracy on familiar and on held-out viewpoints, epoch by epoch
"""

from __future__ import annotations

from smallnorb_novel_viewpoint import RunOptions, Settings, TrainState, int_in, setting
from support.experiment import redeclared

from support.figures import (
    BLACK, DATASET_NAMES, EM_CAPSULES, GREEN, SKY, VIEWPOINT_METRICS, ModelStyle, OutOptions, draw_histories,
    figure_script, median_seed, plural, settings_in,
)

import dataclasses
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from more import conv_matrix_capsules as conv, what_routing_does as study

RESULTS = Path("results") / study.EXPERIMENT / "assignments.json#routed"
VARIANTS: dict[str, tuple[ModelStyle, dict[str, Any]]] = {  # what is replaced
    "routed": (EM_CAPSULES._replace(label="EM routing, spread loss"), {}),
    "even": (ModelStyle("even assignments", "even", SKY, "s"), {"assignments": "even"}),
    "cross_entropy": (ModelStyle("cross-entropy", "cross-entropy", GREEN, "^"), {"loss": "cross-entropy"}),
    "bias": (ModelStyle("bias of the votes", "bias", BLACK, "D"), {"vote_bias": "learned"}),
}
STYLES = {name: style for name, (style, _) in VARIANTS.items()}
TITLES = {"train_loss": "training loss, each one's own", **VIEWPOINT_METRICS}


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    seed: int | None = setting(None, int_in(0, 2**32 - 1), "Seed of the shapes and the trainings.",
        shown="that of the median accuracy of the results", usual=True)
    n_epochs: int = redeclared(study.Config, "n_epochs", conv.Config().n_epochs, shown="")


@dataclasses.dataclass(frozen=True)
class Options(OutOptions):
    threads: int = redeclared(RunOptions, "threads")
    quiet: bool = redeclared(RunOptions, "quiet")


def draw_training_curves(of: tuple[Config, Options]) -> Figure:
    config, options = of
    seed, who = config.seed, f"seed {config.seed}"
    if seed is None:
        runs = settings_in(RESULTS)[0]["runs"]
        seed = median_seed(runs, "capsules", "held_out_accuracy")
        who = f"seed {seed}" + f", the median of {len(runs)}" * (config.n_epochs == conv.Config().n_epochs)
    states: dict[str, TrainState] = {}
    for name, (_, parts) in VARIANTS.items():
        one = study.Config(seed=seed, n_epochs=config.n_epochs, **parts)
        data = study.make_data(one)
        trained = study.train_all(one, data, RunOptions(quiet=options.quiet, threads=options.threads))
        states[name] = trained["capsules"]
    length = f"{plural(config.n_epochs, 'epoch')} of {len(data.train.labels):,} images"
    chance = 1 / study.network_config(one).n_classes
    subtitle = f"{DATASET_NAMES['shapes']}, azimuths held out · convolutional matrix capsules · {length} · {who}"
    return draw_histories(subtitle, TITLES, states, STYLES, chance, below=True)


main = figure_script(
    study.EXPERIMENT, Config, Options,
    "Draw how matrix capsules learn with EM routing, and with one part replaced.",
    ("", "The four trainings and the picture: about 40 seconds."),
    ("--seed 1 --n-epochs 2", "Of another seed, and shorter: about 15 seconds."),
    prepare=lambda config, options, _: (config, options), of_run={"training_curves": draw_training_curves},
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
