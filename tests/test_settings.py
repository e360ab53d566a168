"""Which settings of each experiment fit together, and what flags make of them."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multimnist_capsnet as multimnist
import smallnorb_novel_viewpoint as smallnorb
from helpers import Capture, Patch, config_of, load, usage_error
from more import conv_matrix_capsules as conv, mnist_affine_capsnet as affine
from smallnorb_novel_viewpoint import flag_of, from_json, text_of


# Closed ranges, modulo 360
OVERLAPPING = ["0:150 150:200", "300:400 30:60", "0:360 10:20", "200:330 -100:-90"]
APART = ["0:150 200:330", "-30:30 31:329", "300:400 60:280", "0:0 1:1"]
BOTH = "--train-elevations 10:35 --test-elevations 40:70"
OF_DIGITS = [
    ("--dataset strokes --data-dir .", "--data-dir: strokes has no files"),
    ("--n-train 31 --batch-size 32", "--n-train: 31 is less than a batch of --batch-size 32"),
]
UNFIT = {  # flags of each script, and what is said of them
    "smallnorb_novel_viewpoint": [
        *(("--train-azimuths {} --test-azimuths {}".format(*ranges.split()), "--test-azimuths: overlaps")
          for ranges in OVERLAPPING),
        (f"{BOTH} --test-azimuths 200:330", "--test-azimuths: elevation is held out already"),
        ("--train-elevations 10:35", "--test-elevations: both or none"),
        ("--train-elevations 10:40 --test-elevations 40:70", "--test-elevations: overlaps"),
        ("--dataset smallnorb", "--data-dir: goes with --dataset smallnorb"),
        ("--data-dir folder", "--data-dir: goes with --dataset smallnorb"),
        *((f"--dataset smallnorb --data-dir f --{name} 2", f"--{name}: voxels")
          for name in ("n-train-views", "n-test-views", "n-elev", "n-per-combo")),
        ("--n-train-views 1000 --n-elev 1000", "--n-elev: above the limit"),
        ("--n-train-views 1000 --n-elev 10 --n-per-combo 1", "--n-elev: 100,000 images"),
        ("--n-test-views 1000 --n-elev 10", "--n-elev: above the limit"),
        ("--dtype float64 --variance-floor 1e-320", "--variance-floor: is not between 1e-12 and"),
        ("--dataset voxels --shapes-seed 1", "--shapes-seed: needs --dataset shapes"),
    ],
    "multimnist_capsnet": OF_DIGITS,
    "mnist_affine_capsnet": [
        *OF_DIGITS,
        ("--affnist 15.mat", "--affnist: needs --canvas 40"),
        ("--check-every 3", "--check-every: needs --match-accuracy"),
        ("--match-accuracy 98", "--match-accuracy: 98 is not between 1e-09 and 1"),
        ("--min-iou 1", "unrecognized arguments: --min-iou"),  # of the base's Config
    ],
    "conv_matrix_capsules": [
        ("--dataset smallnorb", "--data-dir: goes with"),
        ("--dataset strokes --data-dir f", "--data-dir: no files"),
        ("--dataset voxels --train-elevations 10:35", "--test-elevations: both or none"),
        ("--dataset voxels --n-val 2", "--n-val: needs --dataset auto, mnist or strokes"),
        ("--dataset voxels --n-val-objects 1", "--n-val-objects: needs --dataset smallnorb or toys"),
        ("--dataset voxels --held-out nothing", "--held-out: nothing needs --dataset smallnorb or toys"),
        ("--held-out nothing", "--held-out: nothing needs --dataset smallnorb or toys"),
        ("--dataset toys --held-out nothing --test-azimuths 60:90",
         "--test-azimuths: not together with --held-out nothing"),
        ("--variance-floor 1e-20", "--variance-floor: is not between 1e-06 and"),
        ("--sizes 5,2", "--sizes: 5,2 is not a list of 4 with commas between"),
    ],
    "capsule_attacks": [
        ("--dataset smallnorb", "--data-dir: --dataset smallnorb needs"),
        ("--data-dir f", "--data-dir: shapes has no files"),
        ("--network capsnet", "--network: capsnet needs --dataset mnist or strokes"),
        *((f"--dataset strokes --network capsnet --{name} {value}", f"--{name}: not together with --network capsnet")
          for name, value in (("cnn-lr", 0.1), ("cnn-epochs", 5), ("sizes", "8,2,2,2"))),
        ("--network dense --n-train 20", "--n-train: not together with --network dense"),
        ("--network dense --dataset mnist", "--network: dense needs --dataset voxels or shapes"),
        ("--dataset strokes --standardize image", "--standardize: image needs --dataset voxels or shapes"),
        ("--epsilons 8", "--epsilons: 8 is not between 1e-09 and 1"),
        ("--epsilons 0.1,0.1", "--epsilons: 0.1,0.1 does not rise"),
        ("--epsilons 0.1,0.10000001", "--epsilons: two of them are the same to six digits"),
        ("--variance-floor 1e-20", "--variance-floor: 1e-20 is not between 1e-06 and"),
    ],
    "what_routing_does": [
        ("--assignments random", "--assignments: random is for a CapsNet"),
        ("--transform shared", "--transform: does not apply to --study shapes"),
        ("--study affnist --n-val 8", "--n-val: does not apply to --study affnist"),
        ("--study composites --vote-bias learned", "--vote-bias: does not apply to --study composites"),
        *((f"--study signs --{flag}", f"--{flag.split()[0]}: does not apply to --study signs")
          for flag in ("n-epochs 1", "plain")),
        ("--study signs --checkpoint x", "--checkpoint: --study signs takes seconds"),
        ("--study couplings --assignments even", "--assignments: does not apply to --study couplings"),
    ],
    "make_toy_norb": [
        ("--data-dir d", "--data-dir: needs --figure"),
        ("--figure x.png --out-dir d", "--out-dir: not together with --figure"),
    ],
    "your_own_images": [
        ("", "--data-dir: name the folder of your images"),
        ("--data-dir x --out a.csv", "--out: needs --predict"),
        ("--predict a.png", "--predict: needs --checkpoint FILE"),
        ("--predict a.png --checkpoint c --resume", "--resume: --predict neither trains nor tests"),
    ],
    "visualize_your_own_images": [("", "--data-dir: name the folder of your images")],
    "report": [("--check --claims", "--claims: not allowed with argument --check")],
}


@pytest.mark.parametrize("name", UNFIT)
def test_flags_that_do_not_fit_together(name: str, monkeypatch: Patch, capsys: Capture) -> None:
    """Whatever is wrong is found before any data is made, and so before any training."""
    script = load(name)
    monkeypatch.setattr(script, "make_data", lambda config: pytest.fail("got as far as the data"), raising=False)
    for words, says in UNFIT[name]:
        line = usage_error(script, words.split(), capsys)
        flag, _, message = says.partition(": ")
        assert f"{flag}: " in line, words
        assert message in line, words


@pytest.mark.parametrize("flag", ["--threads=2", "--optimizer=muon"])
def test_what_needs_the_folder_fast(flag: str, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(multimnist, "HAS_FAST", False)
    assert "the folder fast/ beside the script" in usage_error(multimnist, [flag], capsys)


def test_flags_of_viewpoints_need_views(capsys: Capture) -> None:
    others = {"n_train_views": "4", "n_test_views": "4", "n_elev": "4", "n_per_combo": "4", "shapes_seed": "4",
              "standardize": "none"}
    values = dict.fromkeys(conv.VIEW_FIELDS, "0:10") | others
    for (name, value), dataset in itertools.product(values.items(), ([], ["--dataset=mnist"])):
        line = usage_error(conv, [*dataset, flag_of(name), value], capsys)
        assert f"argument {flag_of(name)}: needs --dataset voxels, shapes, smallnorb or toys" in line


def test_ranges_apart_are_taken() -> None:
    for train, test in map(str.split, APART):
        config = config_of(smallnorb, ["--train-azimuths", train, "--test-azimuths", test])
        assert (text_of(config.train_azimuths), text_of(config.test_azimuths)) == (train, test)
        assert config.held_out_angle == "azimuth"
    for azimuths, expected in ([], (0, 360)), (["--train-azimuths=0:90"], (0, 90)):
        config = config_of(smallnorb, [*BOTH.split(), *azimuths])
        assert config.held_out_angle == "elevation"
        assert (config.train_elevations, config.test_elevations) == ((10, 35), (40, 70))
        assert config.train_azimuths == config.test_azimuths == expected


def test_cnns_are_trained_as_the_capsules_unless_they_have_settings_of_their_own() -> None:
    def trained(script: Any, words: str) -> list[tuple[int, float, float]]:
        config = config_of(script, words.split())
        return [script.of_model(name, config) for name in script.MODEL_NAMES]

    assert trained(smallnorb, "") == [(80, 0.001, 1), (80, 0.0005, 0), (80, 0.0005, 0)]
    assert trained(smallnorb, "--lr 0.01 --n-epochs 3 --weight-decay 2") == [(3, 0.01, 2)] * 3
    own = "--cnn-lr 0.1 --cnn-epochs 1 --cnn-weight-decay 4"
    assert trained(smallnorb, f"--lr 0.01 --n-epochs 3 {own}") == [(3, 0.01, 1), (1, 0.1, 4), (1, 0.1, 4)]
    assert trained(conv, "--n-epochs 3 --weight-decay 2") == [(3, 0.015, 2), (3, conv.Config.cnn_lr, 2)]
    assert trained(conv, f"--n-epochs 3 {own}") == [(3, 0.015, 0), (1, 0.1, 4)]


def test_presets_and_flags_make_the_config() -> None:
    paper = config_of(multimnist, ["--preset", "paper"])
    assert (paper.conv_channels, paper.primary_types, paper.decoder) == (256, 32, (512, 1024))
    own = config_of(multimnist, ["--preset", "paper", "--conv-channels", "64"])
    assert own == dataclasses.replace(paper, conv_channels=64)
    assert config_of(affine, ["--canvas", "40"]).max_shift == 6
    assert config_of(affine, ["--preset", "paper"]).conv_channels == 256
    matrix = config_of(conv, ["--preset", "paper", "--dataset", "toys"])
    assert (matrix.sizes, matrix.em_iters, matrix.variance_floor, matrix.lr) == ((64, 8, 16, 16), 3, 8.0, 0.0025)
    assert config_of(conv, ["--preset", "paper", "--lr", "0.01"]).lr == 0.01
    params = conv.make_models(matrix)["capsules"].init_params(np.random.default_rng(0))
    assert sum(p.size for p in params.values()) == 68_754
    assert from_json(smallnorb.Config, {"lr": 1 / 3}).lr == 1 / 3  # of a checkpoint: every digit


@pytest.mark.parametrize(("module", "flags"), [
    *(("more.mnist_affine_capsnet", f"--canvas=40 --dataset=mnist --affnist=a {written}")
      for written in ("--out-json=./a", "--checkpoint=a")),
    *(("explorer.make_explorer", f"{read}=a --out=b/../a") for read in ("--multimnist", "--viewpoint")),
    *(("explorer.make_explorer_gif", f"--page=a {written}=a") for written in ("--out", "--preview")),
])
def test_what_is_read_is_not_written_over(
    module: str, flags: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("b").mkdir()
    Path("a").write_bytes(b"mine")
    assert "is the same file as that of --" in usage_error(importlib.import_module(module), flags.split(), capsys)
    assert Path("a").read_bytes() == b"mine"
