"""evidence/search.py: the halving, edges of a grid, the doubled length, and a search that goes on."""

from __future__ import annotations

import dataclasses
import json
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evidence import report, search as m
from helpers import ROOT, Capture, Patch
from smallnorb_novel_viewpoint import UsageError, UserError
from support.results import parse_json

RESULTS = ROOT / "results" / "search"


def accuracy(config: m.Config, chosen: m.Setting, seed: int) -> dict[str, float]:
    """Best at a rate of 0.008, beyond the grid, a decay of 0.3, 40 epochs; the highest rate forgets familiar views."""
    rate, decay, epochs = chosen
    off = abs(rate / 0.008 - 1) / 10 + abs(decay - 0.3) / 100 + abs(epochs - 40) / 4000
    return {"familiar": 0.9 if rate > 0.01 else 1.0, "held_out": 0.8 - off + 0.001 * (seed % 3) + (rate > 0.01)}


def test_the_winner_is_found_beyond_the_edge_and_no_run_is_made_twice(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    asked: list[Any] = []

    def run_once(*args: Any) -> dict[int, dict[str, float]]:
        asked.append(args[1:])
        return {args[1][2]: accuracy(*args)}

    monkeypatch.setattr(m, "run_once", run_once)
    monkeypatch.chdir(tmp_path)
    assert m.main(["--condition", "azimuths"]) == 0
    assert capsys.readouterr().out.endswith(": rate, decay and epochs [0.008, 0.3, 40]; twice as long -0.010\n")
    out = Path("results/search/shapes_azimuths_dense_capsules_2_iterations.json")
    found, n = parse_json(out), len(asked)
    assert found["command"] == f"python -m evidence.search --condition azimuths --out {out}"
    assert (found["environment"]["threads"], found["winner"]) == (1, [0.008, 0.3, 40])
    assert max(found["axes"][0]) == 0.016  # beyond the winner, whose familiar views are forgotten
    assert found["doubled_length"]["change"] == pytest.approx(-0.01)
    assert n == len(set(asked))
    assert {seed for _, seed in asked} == set(range(100, 196))
    assert {chosen for chosen, seed in asked if seed >= 148} == {(0.008, 0.3, 40), (0.008, 0.3, 80)}
    rows = {tuple(row[:3]): row[3] for row in found["tables"]["grid"]["rows"]}
    assert {n for chosen, n in rows.items() if chosen[:2] != (0.008, 0.3)} == {2, 6, 16, 48}
    assert rows[0.008, 0.3, 40] == 96
    assert found["fresh"]["held_out"] == pytest.approx(0.8 + 0.001 * np.mean([seed % 3 for seed in range(148, 196)]))
    again = m.search(m.Config(), Path("results/search/runs"))  # from the kept runs
    assert {name: found[name] for name in again} == json.loads(json.dumps(again))
    assert len(asked) == n
    monkeypatch.setattr(m, "ProcessPoolExecutor", ThreadPoolExecutor)
    Path("results/search/runs", f"{out.stem}.jsonl").unlink()
    assert m.main(["--condition", "azimuths", "--jobs", "3"]) == 0
    at_once = parse_json(out)
    assert [at_once[name] for name in again] == [found[name] for name in again]
    assert len(asked) == 2 * n


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_committed_search_follows_from_its_kept_runs(path: Path) -> None:
    stored = parse_json(path)
    config, _ = m.parse_search(shlex.split(stored["command"])[3:])
    assert config.name == path.stem
    found = m.search(config, RESULTS / "runs", lambda _, missing: missing and pytest.fail("a run is not there"))
    assert found["tables"]["grid"]["columns"] == stored["tables"]["grid"]["columns"]
    assert report.is_same({key: stored[key] for key in found}, json.loads(json.dumps(found)))
    assert {stage: seeds[-1] for stage, seeds in m.SEEDS.items()} == m.FRESH  # as many fresh ones as in the last stage


def test_a_longer_training_that_gains_on_fresh_seeds_wins(tmp_path: Path, monkeypatch: Patch) -> None:
    """There 80 epochs gain 3 points on 40, and 160 gain 1 more, and differ by seed."""

    def run_once(config: m.Config, chosen: m.Setting, seed: int) -> dict[int, dict[str, float]]:
        run = accuracy(config, chosen, seed)
        gain = {80: 0.04, 160: 0.06 + 0.001 * (seed % 3)}.get(chosen[2], 0.0) if seed >= 148 else 0.0
        return {chosen[2]: run | {"held_out": run["held_out"] + gain}}

    monkeypatch.setattr(m, "run_once", run_once)
    found = m.search(m.Config(), tmp_path)
    assert found["winner"] == [0.008, 0.3, 80]
    changes = 0.02 - 0.02 + 0.001 * (np.arange(148, 196) % 3)
    assert found["doubled_length"]["change"] == pytest.approx(changes.mean())
    assert found["doubled_length"]["standard_error"] == pytest.approx(np.std(changes, ddof=1) / 48**0.5)
    assert 160 in found["axes"][2]


def test_a_search_on_digits_doubles_nothing(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    def run_once(config: m.Config, chosen: m.Setting, seed: int) -> dict[int, dict[str, float]]:
        return {4: {"both": 0.7 - abs(chosen[0] / 0.04 - 1) / 10 - abs(chosen[1] - 0.3) / 100}}

    monkeypatch.setattr(m, "run_once", run_once)
    monkeypatch.chdir(tmp_path)
    assert m.main(["--network", "capsnet", "--out", "new/own.json"]) == 0
    said = "mnist_overlaps_48000_capsnet_capsules_3_iterations: rate, decay and epochs [0.04, 0.3, 4]\n"
    assert capsys.readouterr().out == said
    stored = parse_json(Path("new/own.json"))
    assert stored["command"] == "python -m evidence.search --network capsnet --out new/own.json"
    assert "doubled_length" not in stored


def test_a_run_is_the_scripts_own_training(monkeypatch: Patch) -> None:
    """Lengths before one that goes wrong keep their accuracies."""
    config = m.smallnorb.Config(dataset="shapes", seed=100, cnn_epochs=11, cnn_lr=0.001, cnn_weight_decay=1.0)
    state = m.smallnorb.train_all(config, m.smallnorb.make_data(config), names=("cnn_matched",))["cnn_matched"]
    found = {
        k: {part: round(state.history[f"{part}_accuracy"][k - 1], 5) for part in ("familiar", "held_out")}
        for k in (10, 11)
    }
    assert m.run_once(m.Config(model="cnn"), (0.001, 1.0, 11), 100) == found
    of_grids = m.run_once(m.Config(network="convolutional", condition="elevations", em_iters=1), (0.01, 1.0, 1), 100)
    ranges: Any = {"train_elevations": (10, 35), "test_elevations": (40, 70)}
    other = m.conv.Config(dataset="shapes", seed=100, n_epochs=1, lr=0.01, em_iters=1, weight_decay=1.0, **ranges)
    history = m.conv.train_all(other, m.conv.make_data(other), names=("capsules",))["capsules"].history
    assert of_grids[1]["held_out"] == round(history["held_out_accuracy"][-1], 5)

    def stopped(config: Any, data: Any, *, callback: Any, **more: Any) -> None:  # after its tenth epoch
        state.history = {name: values[:10] for name, values in state.history.items()}
        callback(state, True)
        raise UserError("not finite")

    monkeypatch.setattr(m.smallnorb, "train_all", stopped)
    found[11] = {"familiar": 0.2, "held_out": 0.2}
    assert m.run_once(m.Config(model="cnn"), (0.001, 1.0, 11), 100) == found


@pytest.mark.parametrize(("network", "model", "lengths"), [
    ("dense", "cnn", [10, 11]), ("convolutional", "capsules", [1]),
])
def test_a_run_under_attack_has_the_accuracy_of_the_attacks_on_its_networks(
    network: str, model: str, lengths: list[int], monkeypatch: Patch
) -> None:
    """The dense CNN's after each length of one training."""
    if network == "convolutional":  # a hundred times slower
        monkeypatch.setattr(m, "EFFORT", m.EFFORT._replace(first_steps=2, most_steps=4))
    config, chosen = m.Config(network=network, model=model, condition="attacks"), (0.001, 1.0, lengths[-1])
    module, asked, name = m.training_of(config, chosen, 100)
    rates = (asked.cnn_lr, asked.cnn_weight_decay) if model == "cnn" else (asked.lr, asked.weight_decay)
    assert (*rates, asked.standardize, asked.n_attack) == (0.001, 1.0, "image", 50)
    trainings, train_all = list[Any](), module.train_all

    def train(config: Any, *given: Any, **more: Any) -> Any:
        trainings.append((config, train_all(config, *given, **more)))
        return trainings[-1][1]

    monkeypatch.setattr(module, "train_all", train)
    found = m.run_once(config, chosen, 100)
    ((used, states),) = trainings
    assert (list(found), used) == (lengths, asked)
    attacked = m.attacked_accuracy(asked, name, states[name].params, module.make_data(asked))
    right = states[name].history["familiar_accuracy" if network == "dense" else "accuracy"][-1]
    assert found[lengths[-1]] == {"familiar": round(right, 5), "attacked": round(attacked, 5)}
    assert attacked < right
    if network == "dense":
        lines = (RESULTS / "runs" / f"{config.name}.jsonl").read_text().splitlines()
        kept = {(*chosen[:2], seed): run["10"] for chosen, seed, run in map(json.loads, lines) if "10" in run}
        assert found[10]["attacked"] == pytest.approx(kept[0.001, 1, 100]["attacked"], abs=0.041)


@pytest.mark.parametrize(("model", "name", "own"), [
    ("capsules", "capsnet", {"routing_iters": 2, "recon_weight": 0}), ("cnn", "cnn_pool", {}),
])
def test_a_run_on_digits_is_the_scripts_own_training(
    model: str, name: str, own: dict[str, Any], monkeypatch: Patch
) -> None:
    config = m.Config(network="capsnet", model=model, composites=800, **own)
    module, asked, found = m.training_of(config, (0.02, 0.3, 4), 104)
    wanted = m.multimnist.Config(dataset="mnist", seed=104, lr=0.02, weight_decay=0.3, n_epochs=4, n_train=200,
        n_val=10_000, **own)
    assert (module, asked, found) == (m.multimnist, wanted, name)
    monkeypatch.setattr(module, "STROKE_COUNTS", (250, 50))
    small = dataclasses.replace(wanted, dataset="strokes", n_val=50, n_test=50, conv_channels=2, primary_types=1)
    monkeypatch.setattr(m, "training_of", lambda *_: (module, small, name))
    states = module.train_all(small, module.make_data(small), names=(name,))
    assert m.run_once(config, (0.02, 0.3, 4), 100) == {4: {"both": states[name].history["set_accuracy"][-1]}}

    def stopped(_: Any, __: Any, callback: Any, **more: Any) -> None:  # after its second epoch
        states[name].history["set_accuracy"] = [0.5, 0.6]
        callback(states[name], True)
        raise m.multimnist.UserError("not finite")

    monkeypatch.setattr(module, "train_all", stopped)
    assert m.run_once(config, (0.02, 0.3, 4), 100) == {4: {"both": 0.0}}


@pytest.mark.parametrize("argv", [
    "--network capsnet --condition azimuths", "--condition overlaps", "--network capsnet --dataset shapes",
    "--dataset mnist", "--network capsnet --em-iters 1", "--routing-iters 1", "--composites 800", "--recon-weight 0",
    "--model cnn --em-iters 1", "--network capsnet --model cnn --routing-iters 1",
    "--network capsnet --model cnn --recon-weight 0",
])
def test_what_a_search_does_not_use_is_refused(argv: str) -> None:
    with pytest.raises(UsageError, match=f"argument {argv.split()[-2]}"):
        m.parse_search(argv.split())
