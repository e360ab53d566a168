#!/usr/bin/env python3
"""The search of one network's settings on drawn shapes: rate, weight decay, length of training, the same for all.

    python -m evidence.search --network dense --model cnn --condition azimuths

Successive halving on validation seeds: all settings of the grid on two seeds, the best third on six, the best third of
these on sixteen; a setting counts where the network classifies 95 % of the familiar views correctly. Where the winner
lies at an edge of the grid, the axis gets one more value, with the winner's neighbours on the other axes, and the
halving goes on. At the end the winner is trained twice as long: the accuracy on held-out views must change by less than
two points. Every run is kept in .cache/search, and none is run twice, so that a search that was stopped goes on.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import smallnorb_novel_viewpoint as smallnorb
from more import conv_matrix_capsules as conv
from smallnorb_novel_viewpoint import OUTPUT, Settings, UserError, parse, print_message, script, setting
from support.experiment import require_writable
from support.results import environment, save_result

Setting = tuple[float, float, int]  # rate, weight decay, epochs

SEEDS = (2, 6, 16)  # of a setting after each stage: the first of FIRST_SEED, FIRST_SEED + 1, ...
FIRST_SEED = 100
KEEP, FAMILIAR, TOLERANCE = 4, 0.95, 0.02  # settings at least; accuracy on familiar views; of the doubled length
CONDITIONS: dict[str, dict[str, Any]] = {
    "azimuths": {}, "elevations": {"train_elevations": (10.0, 35.0), "test_elevations": (40.0, 70.0)},
}
GRIDS: dict[tuple[str, str], tuple[list[float], list[float], list[int]]] = {
    ("dense", "capsules"): ([0.0005, 0.001, 0.002, 0.004], [0, 0.3, 1, 3], [10, 20, 40, 80]),
    ("dense", "cnn"): ([0.00025, 0.0005, 0.001, 0.002], [0, 0.3, 1, 3], [10, 20, 40, 80]),
    ("convolutional", "capsules"): ([0.0075, 0.015, 0.03], [0, 1], [5, 10, 20, 40]),
    ("convolutional", "cnn"): ([0.001, 0.003, 0.01], [0, 1], [5, 10, 20, 40]),
}
FACTORS = (2, 3, 2)  # from a value at an edge to the next one


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    network: str = setting("dense", ("dense", "convolutional"), "Search the networks of smallnorb_novel_viewpoint.py,"
        " or those of more/conv_matrix_capsules.py.", usual=True)
    model: str = setting("capsules", ("capsules", "cnn"), "Search the capsules, or the CNN of equal size.", usual=True)
    condition: str = setting("azimuths", tuple(CONDITIONS), "Hold out azimuths, or elevations.", usual=True)


@dataclasses.dataclass(frozen=True)
class Options(Settings):
    out: Path | None = setting(None, OUTPUT, "File of the result.",
        "results/search/NETWORK_MODEL_CONDITION.json", usual=True)


def run_once(config: Config, chosen: Setting, seed: int) -> dict[str, float]:
    """Accuracies of one training, after its last epoch; a fifth, as by guessing, where it does not stay finite."""
    rate, decay, epochs = chosen
    module: Any = smallnorb if config.network == "dense" else conv
    name = "cnn_matched" if config.network == "dense" and config.model == "cnn" else config.model
    own = {"lr": rate, "n_epochs": epochs} if config.model == "capsules" else {"cnn_lr": rate, "cnn_epochs": epochs}
    asked = module.Config(dataset="shapes", seed=seed, weight_decay=decay, **own, **CONDITIONS[config.condition])
    try:
        history = module.train_all(asked, module.make_data(asked), names=(name,))[name].history
    except UserError:
        return {"familiar": 0.2, "held_out": 0.2}
    return {part: round(history[f"{part}_accuracy"][-1], 5) for part in ("familiar", "held_out")}


class Runs:
    """Those of one search, by setting and seed; each is written to a file as it comes."""

    def __init__(self, config: Config, cache: Path) -> None:
        self.config, self.path = config, cache / f"{config.network}_{config.model}_{config.condition}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text("utf-8").splitlines() if self.path.exists() else []
        self.found = {(tuple(key), seed): run for key, seed, run in map(json.loads, lines)}

    def values(self, chosen: Setting, n_seeds: int, part: str) -> list[float]:
        """The accuracies of a setting on its first seeds, which are run where they have not been."""
        for seed in range(FIRST_SEED, FIRST_SEED + n_seeds):
            if (chosen, seed) not in self.found:
                run = self.found[chosen, seed] = run_once(self.config, chosen, seed)
                with self.path.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps([chosen, seed, run]) + "\n")
        return [self.found[chosen, seed][part] for seed in range(FIRST_SEED, FIRST_SEED + n_seeds)]

    def rank(self, chosen: Setting, n_seeds: int) -> tuple[bool, float]:
        familiar, held_out = (float(np.mean(self.values(chosen, n_seeds, part))) for part in ("familiar", "held_out"))
        return familiar >= FAMILIAR, held_out


def halved(runs: Runs, settings: Sequence[Setting]) -> list[Setting]:
    """The settings that are left in the last stage, the best first."""
    left = list(settings)
    for stage, n_seeds in enumerate(SEEDS):
        left.sort(key=lambda chosen: runs.rank(chosen, n_seeds), reverse=True)
        print_message(f"{len(left)} settings on {n_seeds} seeds; best: {left[0]} {runs.rank(left[0], n_seeds)[1]:.3f}")
        if stage < len(SEEDS) - 1:
            left = left[: max(KEEP, len(left) // 3)]
    return left


def edges(axes: Sequence[list[Any]], winner: Setting) -> list[int]:
    """Which values of the winner are the least or the greatest of their axis; below a decay of 0 there is none."""
    return [k for k, (values, at) in enumerate(zip(axes, winner, strict=True))
            if at == values[-1] or (at == values[0] and at != 0)]


def search(config: Config, cache: Path) -> dict[str, Any]:
    """The grid with all means, the finalists, the winner, and what twice its length changes."""
    runs, axes = Runs(config, cache), [list(values) for values in GRIDS[config.network, config.model]]
    settings: list[Any] = list(itertools.product(*axes))
    while at := edges(axes, (finalists := halved(runs, settings))[0]):
        winner = finalists[0]
        around = [values[max(0, values.index(v) - 1) : values.index(v) + 2]
                  for values, v in zip(axes, winner, strict=True)]
        for k in at:
            is_top = winner[k] == axes[k][-1]
            new = axes[k][-1] * FACTORS[k] if is_top else axes[k][0] / FACTORS[k]
            axes[k].insert(len(axes[k]) if is_top else 0, new)
            beside = [[new] if i == k else values for i, values in enumerate(around)]
            settings += [chosen for chosen in itertools.product(*beside) if chosen not in settings]
    winner, n_seeds = finalists[0], SEEDS[-1]
    twice = (*winner[:2], 2 * winner[2])
    change = np.subtract(runs.values(twice, n_seeds, "held_out"), runs.values(winner, n_seeds, "held_out"))
    means = [[*chosen, len(seeds), *(float(np.mean([run[part] for run in seeds])) for part in ("familiar", "held_out"))]
             for chosen in sorted({key for key, _ in runs.found})
             if (seeds := [run for (key, _), run in runs.found.items() if key == chosen])]
    return {
        "axes": axes, "winner": list(winner), "finalists": [list(chosen) for chosen in finalists],
        "doubled_length": {"change": float(change.mean()), "standard_error": float(change.std(ddof=1) / n_seeds**0.5),
                           "within_tolerance": bool(abs(change.mean()) < TOLERANCE)},
        "tables": {"grid": {"columns": ["rate", "decay", "epochs", "seeds", "familiar", "held out"], "rows": means}},
    }


@script
def main(argv: Sequence[str]) -> None:
    config, options, _ = parse(
        Config, Options, argv, "Search rate, weight decay and length of training of one network on drawn shapes.",
        [("", "Dense capsules, new azimuths: about 30 minutes."),
         ("--model cnn", "The CNN of their size: about 15 minutes.")],
    )
    name = f"{config.network}_{config.model}_{config.condition}"
    out = options.out or Path("results", "search", f"{name}.json")
    require_writable(out)
    found = search(config, Path(".cache/search"))
    command = shlex.join(["python", "-m", "evidence.search", *argv])
    save_result(out, {"command": command, "environment": environment(1), **found})
    print(f"{name}: rate, decay and epochs {found['winner']}; twice as long {found['doubled_length']['change']:+.3f}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
