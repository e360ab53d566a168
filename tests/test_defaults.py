"""Every script as it runs without flags, shortened by its length alone: epochs, and steps of an attack. Of digits and
shapes there are fewer too where one epoch of the default number takes longer than seconds."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from PIL import Image

from helpers import ROOT, Patch, digits_folder, load
from more import attacks
from smallnorb_novel_viewpoint import UserError, flag_of, parse, plain, text_of
from support.experiment import load_checkpoint
from support.redraw import read_rows

OF_DIGITS = ("multimnist_capsnet", "mnist_affine_capsnet", "conv_matrix_capsules")
RUNS: dict[str, tuple[dict[str, int], int]] = {  # fields that are not the defaults, and steps of each network
    "smallnorb_novel_viewpoint": ({}, 15),  # 5 objects, 6 azimuths, 3 elevations and 5 images each in batches of 32
    "multimnist_capsnet": ({"n_train": 150, "n_test": 50}, 2),  # full batches of 64
    "mnist_affine_capsnet": ({"n_train": 40, "n_val": 20, "n_sweep": 5}, 2),  # of 16
    "conv_matrix_capsules": ({"n_train": 40, "n_test": 30}, 2),
    "capsule_attacks": ({"n_train": 40, "n_attack": 2}, 2),
    "what_routing_does": ({}, 15),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_one_epoch(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    script, (fewer, steps), out, saved = load(name), RUNS[name], tmp_path / "out.json", tmp_path / "c.npz"
    monkeypatch.setattr(attacks.attack, "__defaults__", (attacks.Effort(first_steps=1, most_steps=2, queries=2),))
    given: dict[str, Any] = {"n_epochs": 1, **fewer} | ({"data_dir": digits_folder()} if name in OF_DIGITS else {})
    argv = [f"{flag_of(field)}={text_of(value)}" for field, value in given.items()]
    assert script.main([*argv, "--threads=1", "--quiet", f"--out-json={out}", f"--checkpoint={saved}"]) == 0
    result, states = json.loads(out.read_text()), load_checkpoint(script, saved)[1]
    found = {"dataset": "mnist", "n_test": 300} if name in OF_DIGITS else {}  # in place of auto and all
    asked = json.loads(json.dumps(plain(script.Config(**given))))
    assert result["config"] == asked | {key: found[key] for key in found if asked[key] in ("auto", None)}
    assert {name: state.step for name, state in states.items()} == dict.fromkeys(result["models"], steps)
    assert {len(values) for history in result["history"].values() for values in history.values()} == {1}
    assert list(result["models"]) == list(getattr(script, "MODEL_NAMES", ["capsules"]))


FIGURES = {f"visualize_{name}": name for name in RUNS if name != "capsule_attacks"}
FIGURES |= {f"make_{name}_gif": name for name in ("smallnorb_novel_viewpoint", *OF_DIGITS)}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_of_the_default_networks(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """What a script of figures or of an animation trains is the experiment of its default flags, but for the seed."""
    script, experiment = load(name), load(FIGURES[name])
    monkeypatch.setattr(experiment, "make_data", asked := Mock(side_effect=UserError("that is enough")))
    assert script.main(["--quiet", f"--out={tmp_path / 'a.gif'}" if "gif" in name else f"--outdir={tmp_path}"]) == 1
    (call,) = asked.call_args_list
    assert dataclasses.replace(call.args[0], seed=0) == experiment.Config()


FRAMES: dict[str, Any] = {  # of the animation that each script writes
    "make_multimnist_capsnet_gif": lambda config, it: 1 + math.ceil(config.n_steps / it.snapshot_every),
    "make_smallnorb_novel_viewpoint_gif": lambda _, it: it.snapshots * it.sweep_frames,
    "make_conv_matrix_capsules_gif": lambda config, it: config.em_iters * len(  # of the 75 steps of five epochs
        {round(75 * (k / (it.snapshots - 1)) ** 2) for k in range(it.snapshots)}),
    "make_mnist_affine_capsnet_gif": lambda _, it: it.frames,
}


def test_the_projects_animations_are_those_of_their_commands() -> None:
    names = set()
    for row in read_rows():
        (script, *flags), picture = row.command.replace("python -m more.", "python ").split()[1:], row.pictures[0]
        if picture.endswith(".gif") and "explorer" not in picture:
            names.add(name := script.removesuffix(".py"))
            config, options, _ = parse(load(name).Config, load(name).Options, flags)
            with Image.open(ROOT / picture) as image:
                assert getattr(image, "n_frames", 1) == FRAMES[name](config, options), picture
    assert names == set(FRAMES)
    script = load("make_multimnist_capsnet_gif")
    assert f"A frame every {script.Options.snapshot_every} steps of four epochs" in inspect.getsource(script)
