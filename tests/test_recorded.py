"""Data and results of small runs of every script are those that were recorded (see recorded.py)."""

from __future__ import annotations

import contextlib
import io
import itertools
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

from data import pictures, shapes, stroke_digits, toy_norb
from helpers import EXPERIMENTS, Patch, config_of, load, smallest, write_folder
from recorded import check

VIEWS = "--n-train-views 2 --n-test-views 3 --n-elev 2 --n-per-combo 2"
RUNS = {  # more flags of the smallest training
    "smallnorb_novel_viewpoint": [
        f"{VIEWS} --dataset shapes --em-grad stop --loss spread --em-iters 3 --cnn-epochs 1 --cnn-lr 0.003",
        f"{VIEWS} --train-elevations 0:35 --test-elevations 40:70 --standardize image",
        f"{VIEWS} --dataset shapes --train-elevations 0:35 --test-elevations 40:70",
    ],
    "multimnist_capsnet": [
        "--n-test 60 --routing-grad stop",
        "--n-test 60 --overlay sum --min-iou 0 --n-val 40 --weight-decay 0.1 --plain",
        "--n-test 60 --optimizer muon --lr 0.02",
    ],
    "mnist_affine_capsnet": ["--n-test 60", "--n-test 60 --canvas 40 --match-accuracy 0.1 --check-every 2"],
    "conv_matrix_capsules": [
        "--n-test 60 --loss spread --em-grad stop --plain --cnn-epochs 1",
        "--n-test 60 --n-val 30 --cnn paper --cnn-lr 0.003",
    ],
    "capsule_attacks": [
        f"--n-attack 8 --epsilons 0.1,0.2 --cnn-epochs 1 --loss {loss}" for loss in ("spread", "cross-entropy")
    ],
}
VIEWS_OF_CONV = [
    f"{VIEWS} --dataset shapes",
    f"{VIEWS} --dataset voxels --train-elevations 0:35 --test-elevations 40:70",
]


@pytest.mark.parametrize(("name", "flags"), [(name, flags) for name, runs in RUNS.items() for flags in runs])
def test_data_and_results(name: str, flags: str, monkeypatch: Patch) -> None:
    smallest(monkeypatch)
    check_run(f"{name} {flags}", EXPERIMENTS[name].script, EXPERIMENTS[name].argv(f"{flags} --dtype float64 --seed 53"))


@pytest.mark.parametrize("flags", VIEWS_OF_CONV)
def test_views_of_the_convolutional_networks(flags: str) -> None:
    argv = f"{flags} --n-epochs 2 --batch-size 8 --sizes 5,2,3,2 --quiet --threads 1 --dtype float64 --seed 53"
    check_run(f"conv_matrix_capsules {flags}", load("conv_matrix_capsules"), argv.split())


def test_own_pictures(tmp_path: Path, monkeypatch: Patch) -> None:
    script = load("your_own_images")
    monkeypatch.setattr(script, "BATCH_SIZE", 16)
    folder = write_folder(tmp_path / "own", n=12)
    for path in sorted((folder / "heller").iterdir())[:6]:  # or both accuracies are one
        path.unlink()
    argv = [f"--data-dir={folder}", "--n-epochs=2", "--threads=1", "--quiet"]
    check_run("your_own_images", script, argv, tolerance=1e-4)  # in float32


def check_run(key: str, script: Any, argv: list[str], tolerance: float = 1e-6) -> None:
    """By a clock that goes on a second each time it is read: a step takes one, and the tests after an epoch others."""
    config, clock, append, run = config_of(script, argv), itertools.count(), script.TrainState.append, script.run
    results, printed = list[Any](), io.StringIO()

    def running(*args: Any, **more: Any) -> Any:
        results.append(run(*args, **more))
        return results[0]

    def tested(state: Any, metrics: Any) -> None:
        time.perf_counter()
        append(state, metrics)

    with (
        patch("time.perf_counter", clock.__next__),
        patch.object(script.TrainState, "append", tested),
        patch.object(script.Session, "trainings", autospec=True, side_effect=script.Session.trainings) as trainings,
        patch.object(script, "run", running),
        contextlib.redirect_stdout(printed),
    ):
        assert script.main(argv) == 0
    ((result, _),) = results
    (session, n_steps), *_ = (call.args for call in trainings.call_args_list)
    for name, state in session.trained.items():  # as the progress bar has it
        assert state.step == n_steps(name) or getattr(config, "match_accuracy", None)
    kept = {name: part for name, part in result.items() if name not in ("config", "version")}
    times = [[value for name, value in model.items() if "seconds" in name] for model in result["models"].values()]
    found = {"data": script.make_data(config), "result": kept, "times": times, "printed": printed.getvalue()}
    check(key, found, tolerance)


def test_drawn_data(tmp_path: Path) -> None:
    rng = np.random.default_rng
    every = [[toy_norb.make_toy(category, instance, 3) for instance in range(25)] for category in range(5)]
    toys = [toy for of_category in every for toy in (of_category[0], of_category[7])]
    views = [
        toy_norb.draw_view(toy, 40, 35, eye, toy_norb.draw_ground(
            toy_norb.shadow_maps(toy, 40), toy_norb.shadow_resampling(35, eye, toy.height)))
        for toy in toys for eye in (-1, 1)
    ]
    path = tmp_path / "digit.png"
    Image.fromarray(np.arange(40 * 30 * 3, dtype=np.uint8).reshape(40, 30, 3)).save(path)
    check("drawn data", {
        "shapes": shapes.draw_shapes(rng(3), 12),
        "solids": [{name: np.concatenate([getattr(toy, name).ravel() for toy in of_category])
                    for name in ("axes", "centres", "albedo", "top")} for of_category in every],
        "toys": views, "order of views": toy_norb.shuffled_views("training", 3),
        "strokes of a picture": pictures.read_strokes(path, 28, 20), "a picture": pictures.read_square(path, 24, 3),
    })
    # Of 235,200 pixels some are one grey level brighter with another BLAS.
    check("strokes", stroke_digits.stroke_digits(rng(3), 300), tolerance=1e-4)
