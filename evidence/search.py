"""The search of one network's settings: rate, weight decay and length of training, the same axes for all.

    python -m evidence.search --network dense --model cnn --condition azimuths

Successive halving on validation seeds: all settings of the grid on two seeds, the best third on more, the best third of
these on more again, the best four on all (SEEDS). A setting counts where the network classifies 95 % of the familiar
views correctly. The best one has the highest accuracy on held-out views or, of condition attacks, on familiar views
under attack. Where the winner lies at an edge of the grid, the axis gets one more value, with the winner's neighbours
on the other axes, and the halving goes on. At the end the winner is trained twice as long, on fresh validation seeds:
on the others luck helped it to win. Where that gains two points or more, under attack ten, the longer one is the
winner, and is trained twice as long in turn. The dense CNN, whose training does not depend on its length, gets all
lengths from one. Every run is kept in results/search/runs, and none is run twice: a search that was stopped goes on.

With --network capsnet: the CapsNet of multimnist_capsnet.py, or its CNN with pooling, on overlapping digits that the
networks are not trained on. Composites are drawn anew for each epoch, so a longer training is always better. Their
number is the condition, not an axis, and nothing is trained twice as long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import multimnist_capsnet as multimnist
import smallnorb_novel_viewpoint as smallnorb
from fast.workers import SERIAL, blas_threads
from more import attacks, capsule_attacks, conv_matrix_capsules as conv
from smallnorb_novel_viewpoint import (
    OUTPUT, SettingError, Settings, UserError, int_in, parse, print_message, script, setting,
)
from support.experiment import redeclared, require_writable
from support.results import environment, save_result

Setting = tuple[float, float, int]  # rate, weight decay, epochs

SEEDS = {"dense": (2, 6, 16, 48), "convolutional": (2, 4, 8, 24), "attacks": (2, 4, 8, 16), "capsnet": (2, 4, 8)}
FRESH = {"dense": 48, "convolutional": 24, "attacks": 16, "capsnet": 8}  # after those, also for twice the length
LENGTHS = [10 * 2**k for k in range(10)]  # epochs that are kept of a training that has all lengths
FIRST_SEED = 100
KEEP, FAMILIAR = 4, 0.95  # settings at least; accuracy on familiar views
TOLERANCES = {"azimuths": 0.02, "elevations": 0.02, "attacks": 0.1}  # of the doubled length
CONDITIONS: dict[str, dict[str, Any]] = {
    "azimuths": {}, "elevations": {"train_elevations": (10.0, 35.0), "test_elevations": (40.0, 70.0)}, "attacks": {},
    "overlaps": {"n_val": 10_000},
}
METRICS = {"azimuths": "held_out", "elevations": "held_out", "attacks": "attacked", "overlaps": "both"}  # digits
NETWORKS, N_ATTACKED = {"dense": "dense", "convolutional": "matrix"}, 50  # as capsule_attacks.py calls them; images
EPSILON, EFFORT = 0.1, attacks.Effort(most_steps=80, queries=0)  # of the attack
GRIDS: dict[tuple[str, str], tuple[list[float], list[float], list[int]]] = {
    ("dense", "capsules"): ([0.0005, 0.001, 0.002, 0.004], [0, 0.3, 1, 3], [10, 20, 40, 80]),
    ("dense", "cnn"): ([0.00025, 0.0005, 0.001, 0.002], [0, 0.3, 1, 3], [10, 20, 40, 80]),
    ("convolutional", "capsules"): ([0.0075, 0.015, 0.03], [0, 1], [5, 10, 20, 40]),
    ("convolutional", "cnn"): ([0.001, 0.003, 0.01], [0, 1], [5, 10, 20, 40]),
    ("capsnet", "capsules"): ([0.005, 0.01, 0.02], [0, 0.1, 0.3], [4]),
    ("capsnet", "cnn"): ([0.005, 0.01, 0.02], [0, 0.1, 0.3], [4]),
}
OF_ATTACKS = {  # longer trainings: they add no accuracy, but robustness
    "capsules": ([0.0005, 0.001, 0.002], [0.3, 1, 3], [80, 160, 320]),
    "cnn": ([0.00025, 0.0005, 0.001], [0.3, 1, 3], [80, 160, 320]),
}
FACTORS = (2, 3, 2)  # from a value at an edge to the next one


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    network: str = setting("dense", ("dense", "convolutional", "capsnet"), "Search the networks of"
        " smallnorb_novel_viewpoint.py, of more/conv_matrix_capsules.py, or of multimnist_capsnet.py.", usual=True)
    model: str = setting("capsules", ("capsules", "cnn"), "Search the capsules, or the CNN of equal size.", usual=True)
    condition: str | None = setting(None, tuple(CONDITIONS), "Hold out azimuths, or elevations; or attack images of"
        " views that are trained on; or lay two digits over each other.", "azimuths, capsnet overlaps", usual=True)
    dataset: str | None = setting(None, ("shapes", "voxels", "mnist"), "Shapes that the seed draws, the"
        " write-up's objects, or digits.", "shapes, capsnet mnist")
    em_iters: int = setting(2, int_in(1, 2), "Route matrix capsules in N iterations; in one, all assignments are even.")
    routing_iters: int = setting(3, int_in(1, 3), "Route a CapsNet in N iterations; in one, all couplings are even.")
    recon_weight: float = redeclared(multimnist.Config, "recon_weight", help="Weigh a CapsNet's reconstruction by X.")
    composites: int = setting(48_000, int_in(400, 10**8), "Train a CapsNet or its CNN on N composites.")

    def dependent(self) -> dict[str, Any]:
        of_digits = self.network == "capsnet"
        return {"condition": "overlaps" if of_digits else "azimuths", "dataset": "mnist" if of_digits else "shapes"}

    def check(self) -> None:
        of_digits = self.network == "capsnet"
        if of_digits != (self.condition == "overlaps"):
            raise SettingError("condition", f"{self.condition} is not for --network {self.network}")
        if of_digits != (self.dataset == "mnist"):
            raise SettingError("dataset", f"{self.dataset} is not for --network {self.network}")
        of_matrix, of_capsnet = ["em_iters"], ["routing_iters", "recon_weight"]
        own, others = (of_capsnet, of_matrix) if of_digits else (of_matrix, [*of_capsnet, "composites"])
        unused = dict.fromkeys(others, f"--network {self.network}")
        unused |= dict.fromkeys(own, "--model cnn") if self.model == "cnn" else {}
        for name, flag in unused.items():
            if getattr(self, name) != getattr(Config, name):
                raise SettingError(name, f"not together with {flag}")

    @property
    def metric(self) -> str:
        """What is chosen by."""
        return METRICS[str(self.condition)]

    @property
    def stages(self) -> str:
        """The key of SEEDS and FRESH."""
        return "attacks" if self.condition == "attacks" else self.network

    @property
    def name(self) -> str:
        """Of the result's file."""
        of_digits = self.network == "capsnet"
        own = [] if self.model == "cnn" else [f"{self.routing_iters if of_digits else self.em_iters}_iterations"]
        own += [f"reconstruction_{self.recon_weight:g}"] if self.recon_weight != Config.recon_weight else []
        length = [str(self.composites)] if of_digits else []
        return "_".join([str(self.dataset), str(self.condition), *length, self.network, self.model, *own])


@dataclasses.dataclass(frozen=True)
class Options(Settings):
    out: Path | None = setting(None, OUTPUT, "File of the result.",
        "results/search/NAME.json, named after the search", usual=True)
    jobs: int = setting(1, int_in(1, 256), "Train on N seeds at once.", usual=True)


def training_of(config: Config, chosen: Setting, seed: int) -> tuple[Any, Any, str]:
    """The module, the configuration and the model's name there of one training."""
    rate, decay, epochs = chosen
    if config.network == "capsnet":
        asked = multimnist.Config(
            dataset="mnist", seed=seed, lr=rate, weight_decay=decay, n_epochs=epochs,
            n_train=config.composites // epochs, routing_iters=config.routing_iters, recon_weight=config.recon_weight,
            **CONDITIONS["overlaps"],
        )
        return multimnist, asked, "capsnet" if config.model == "capsules" else "cnn_pool"
    is_attacked = config.condition == "attacks"
    module: Any = capsule_attacks if is_attacked else smallnorb if config.network == "dense" else conv
    name = "cnn_matched" if module is smallnorb and config.model == "cnn" else config.model
    if config.model == "capsules":
        own = {"lr": rate, "n_epochs": epochs, "em_iters": config.em_iters}
    else:
        own = {"cnn_lr": rate, "cnn_epochs": epochs}
    more = CONDITIONS[str(config.condition)]
    if is_attacked:
        more = {"network": NETWORKS[config.network], "n_attack": N_ATTACKED}
    asked = module.Config(dataset=config.dataset, seed=seed, weight_decay=decay, standardize="image", **own, **more)
    return module, asked, name


@blas_threads(1)  # as its result says
def run_once(config: Config, chosen: Setting, seed: int) -> dict[int, dict[str, float]]:
    """Accuracies after each length that one training gives; of views a fifth, as by guessing, from where it is not
    finite, of digits 0."""
    (module, asked, name), epochs = training_of(config, chosen, seed), chosen[2]
    history: dict[str, list[float]] = {}
    params: dict[int, Any] = {}
    has_all = config.network == "dense" and config.model == "cnn"  # its epochs do not depend on how many follow
    lengths = sorted({epochs, *(k for k in LENGTHS if k < epochs)}) if has_all else [epochs]
    familiar = "familiar_accuracy" if config.condition != "attacks" or config.network == "dense" else "accuracy"

    def keep(state: Any, epoch_ended: bool) -> None:
        history.update(state.history)
        if epoch_ended and (n := len(state.history.get(familiar, ()))) in lengths:
            params[n] = {key: p.copy() for key, p in state.params.items()}

    data = module.make_data(asked)
    with contextlib.suppress(UserError, multimnist.UserError):
        module.train_all(asked, data, names=(name,), callback=keep)
    if config.network == "capsnet":
        both = history.get("set_accuracy", [])
        return {epochs: {"both": round(both[-1], 5) if len(both) == epochs else 0.0}}

    def value(length: int) -> float:
        if config.condition == "attacks":
            return attacked_accuracy(asked, name, params[length], data)
        return history["held_out_accuracy"][length - 1]

    return {length: {"familiar": round(history[familiar][length - 1], 5), config.metric: round(value(length), 5)}
            if length in params else {"familiar": 0.2, config.metric: 0.2} for length in lengths}


def attacked_accuracy(asked: capsule_attacks.Config, name: str, params: Any, data: Any) -> float:
    """Under all attacks along the network's own gradient."""
    network = capsule_attacks.attacked_network(asked, name, params, SERIAL)
    images, labels = capsule_attacks.attacked_images(asked, data)
    rng = np.random.default_rng(asked.seed)
    found = attacks.attack(network, {}, images, labels, (EPSILON,), capsule_attacks.PIXELS, rng, EFFORT)
    return float(found.right["gradients"].mean())


class Runs:
    """Those of one search, by setting and seed; each is written to a file as it comes."""

    def __init__(self, config: Config, cache: Path, run_all: Callable[..., Iterable[Any]]) -> None:
        self.config, self.path, self.run_all = config, cache / f"{config.name}.jsonl", run_all
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.found: dict[tuple[Setting, int], dict[str, float]] = {}
        for line in self.path.read_text("utf-8").splitlines() if self.path.exists() else []:
            self.add(*json.loads(line))

    def add(self, chosen: Sequence[Any], seed: int, lengths: dict[str, dict[str, float]]) -> None:
        self.found |= {((chosen[0], chosen[1], int(length)), seed): run for length, run in lengths.items()}

    def values(self, chosen: Setting, n_seeds: int, part: str, first: int = FIRST_SEED) -> list[float]:
        """The accuracies of a setting on its seeds, which are run where they have not been."""
        missing = [seed for seed in range(first, first + n_seeds) if (chosen, seed) not in self.found]
        for seed, found in zip(missing, self.run_all(partial(run_once, self.config, chosen), missing), strict=True):
            line = json.dumps([chosen, seed, found])
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")
            self.add(*json.loads(line))
        return [self.found[chosen, seed][part] for seed in range(first, first + n_seeds)]

    def rank(self, chosen: Setting, n_seeds: int) -> tuple[bool, float]:
        chosen_by = float(np.mean(self.values(chosen, n_seeds, self.config.metric)))
        if self.config.network == "capsnet":
            return True, chosen_by
        return float(np.mean(self.values(chosen, n_seeds, "familiar"))) >= FAMILIAR, chosen_by


def halved(runs: Runs, settings: Sequence[Setting]) -> list[Setting]:
    """The settings that are left in the last stage, the best first."""
    left, stages = list(settings), SEEDS[runs.config.stages]
    for stage, n_seeds in enumerate(stages):
        left.sort(key=lambda chosen: -chosen[2])  # run the longest first: it may hold the shorter ones
        left.sort(key=lambda chosen: runs.rank(chosen, n_seeds), reverse=True)
        print_message(f"{len(left)} settings on {n_seeds} seeds; best: {left[0]} {runs.rank(left[0], n_seeds)[1]:.3f}")
        if stage < len(stages) - 1:
            left = left[: max(KEEP, len(left) // 3)]
    return left


def edges(axes: Sequence[list[Any]], winner: Setting) -> list[int]:
    """Which values of the winner are the least or the greatest of their axis; below a decay of 0 there is none, and
    one value is no axis."""
    return [k for k, (values, at) in enumerate(zip(axes, winner, strict=True))
            if len(values) > 1 and (at == values[-1] or (at == values[0] and at != 0))]


def search(config: Config, cache: Path, run_all: Callable[..., Iterable[Any]] = map) -> dict[str, Any]:
    """The grid with all means, the finalists, the winner, and what twice its length changes. ``run_all`` is ``map`` or
    that of an executor."""
    grid = OF_ATTACKS[config.model] if config.condition == "attacks" else GRIDS[config.network, config.model]
    runs, axes, metric = Runs(config, cache, run_all), [list(values) for values in grid], config.metric
    settings: list[Any] = list(itertools.product(*axes))
    while at := edges(axes, (finalists := halved(runs, settings))[0]):
        winner = finalists[0]
        around = [values[max(0, values.index(v) - 1) : values.index(v) + 2]
                  for values, v in zip(axes, winner, strict=True)]
        for k in at:
            is_top = winner[k] == axes[k][-1]
            new = axes[k][-1] * FACTORS[k] if is_top else type(axes[k][0])(axes[k][0] / FACTORS[k])
            axes[k].insert(len(axes[k]) if is_top else 0, new)
            beside = [[new] if i == k else values for i, values in enumerate(around)]
            settings += [chosen for chosen in itertools.product(*beside) if chosen not in settings]
    winner, n_fresh, fresh = finalists[0], FRESH[config.stages], FIRST_SEED + SEEDS[config.stages][-1]
    doubled, lengths = {}, {*axes[2]}
    while tolerance := TOLERANCES.get(str(config.condition)):
        twice = (*winner[:2], 2 * winner[2])
        lengths |= {twice[2]}
        longer, own = (np.array(runs.values(chosen, n_fresh, metric, fresh)) for chosen in (twice, winner))
        change = longer - own
        if change.mean() < tolerance:
            doubled = {"doubled_length": {
                "change": float(change.mean()), "standard_error": float(change.std(ddof=1) / n_fresh**0.5),
                "gains_less_than": tolerance,
            }}
            break
        winner = twice
        axes[2] = sorted({*axes[2], winner[2], 2 * winner[2]})
    own = np.array(runs.values(winner, n_fresh, metric, fresh))
    parts = [metric] if config.network == "capsnet" else ["familiar", metric]
    columns = ["rate", "decay", "epochs", "seeds", *(part.replace("_", " ") for part in parts)]
    means = [[*chosen, len(seeds), *(float(np.mean([run[part] for run in seeds])) for part in parts)]
             for chosen in sorted({key for key, _ in runs.found if key[2] in lengths})
             if (seeds := [run for (key, _), run in runs.found.items() if key == chosen])]
    return {
        "axes": axes, "winner": list(winner), "finalists": [list(chosen) for chosen in finalists],
        "fresh": {"seeds": n_fresh, metric: float(own.mean()), "sd": float(own.std(ddof=1))}, **doubled,
        "tables": {"grid": {"columns": columns, "rows": means}},
    }


def parse_search(argv: Sequence[str]) -> tuple[Config, Options]:
    return parse(
        Config, Options, argv, "Search rate, weight decay and length of training of one network.",
        ("", "Dense capsules, new azimuths: about 90 minutes."),
        ("--model cnn", "The CNN of their size: about 15 minutes."),
        ("--network capsnet", "A CapsNet on 48,000 composites of two digits: about 60 minutes."),
    )[:2]


def winner_of(document: Mapping[str, Any]) -> tuple[Any, str]:
    """The configuration of the winner's trainings, and the model's name. Raises UsageError."""
    config, _ = parse_search(shlex.split(document["command"])[3:])
    return training_of(config, tuple(document["winner"]), FIRST_SEED)[1:]


@script
def main(argv: Sequence[str]) -> None:
    config, options = parse_search(argv)
    out = options.out or Path("results", "search", f"{config.name}.json")
    require_writable(out)
    with ProcessPoolExecutor(options.jobs) as pool:
        found = search(config, Path("results/search/runs"), pool.map if options.jobs > 1 else map)
    named = [] if options.out else ["--out", str(out)]
    command = shlex.join(["python", "-m", "evidence.search", *argv, *named])
    change = found["doubled_length"]["change"] if "doubled_length" in found else None
    longer = "" if change is None else f"; twice as long {change:+.3f}"
    try:
        print(f"{config.name}: rate, decay and epochs {found['winner']}{longer}", flush=True)
    finally:  # where nobody reads it, too
        save_result(out, {"command": command, "environment": environment(1), **found})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
