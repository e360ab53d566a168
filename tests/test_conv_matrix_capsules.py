"""conv_matrix_capsules.py: routing in float32, training, data, and runs on digits and on views of objects.

Gradients and plain loops: test_gradients.py; flags, checkpoints and results: test_contract.py."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import smallnorb_novel_viewpoint as smallnorb
from data.pictures import read_strokes
from fast.workers import Workers
from helpers import (
    EXPERIMENTS, Array, Capture, GradientError, Patch, config_of, digits_folder, failure, strokes,
    surviving_mutants,
)
from more import conv_matrix_capsules as conv
from smallnorb_novel_viewpoint import RunOptions
from support.experiment import load_checkpoint
from test_gradients import FIELD_CASES as CASES, FIELD_FORMS as FORMS, field_inputs, perturbed
from test_smallnorb_files import make_arrays, write_set


SIZES = (5, 2, 3, 2)
FEW_VIEWS = "--n-train-views 2 --n-test-views 2 --n-elev 1 --n-per-combo 2"


def tiny(**changes: Any) -> conv.Config:
    few: dict[str, Any] = {"dataset": "mnist", "data_dir": digits_folder(), "n_train": 24, "n_test": 10}
    return conv.Config(**few | {"batch_size": 8, "sizes": SIZES, "n_epochs": 2, "cnn_epochs": 2} | changes)


# --- Gradients --------------------------------------------------------------------------------------------------------


def check_parts() -> None:
    """Losses and gradients of a batch's parts add up to those of the batch, to float64 rounding."""
    model = conv.make_models(tiny(dtype="float64", dataset="voxels", data_dir=None))["cnn"]
    rng = np.random.default_rng(3)
    params, batch = perturbed(model), conv.Examples(rng.random((7, 32, 32, 1)), rng.integers(0, 5, 7))
    scores, cache = model.forward(params, batch.images)
    mean_loss, dscores = model.loss(scores, batch.labels, 0.4)
    parts = [conv.loss_and_grads(model, 0.4, params, batch.part(k, k + 3), 7) for k in (0, 3, 6)]
    if sum(losses["train_loss"] for losses, _ in parts) != pytest.approx(mean_loss, rel=1e-12):
        raise GradientError("the losses of the parts do not add up")
    for key, grad in model.backward(dscores, cache)[0].items():
        off = np.abs(sum(grads[key] for _, grads in parts) - grad).max()
        if not off < 1e-11 * np.abs(grad).max():
            raise GradientError(f"{key} is off by {off:.3g}")


def test_a_broken_term_of_the_gradient_is_seen(monkeypatch: Patch) -> None:
    assert surviving_mutants(monkeypatch, conv, "loss_and_grads", check_parts) == []


# --- Models and routing -----------------------------------------------------------------------------------------------


def test_half_of_the_hidden_units_are_left_out_in_training_and_none_in_a_test() -> None:
    config = tiny(cnn="paper", n_train=60, dtype="float64")
    data, model = conv.make_data(config), conv.make_models(config)["cnn"]
    batch, again, other = (conv.training_batch(data, config, step) for step in (3, 3, 4))
    factors: Any = batch.dropout
    assert factors.shape == (8, 1024)
    assert set(np.unique(factors)) == {0, 2}
    np.testing.assert_array_equal(factors, again.dropout)
    for one, another in ((factors, other.dropout), (factors[0], factors[1])):
        assert (one != another).mean() == pytest.approx(0.5, abs=0.1)
    np.testing.assert_array_equal(batch.images, conv.training_batch(data, tiny(n_train=60, dtype="float64"), 3).images)
    params = model.init_params(np.random.default_rng(0))
    seen = model.forward(params, batch.images, dropout=factors)[1][-1][0]
    units = model.forward(params, batch.images)[1][-1][0]  # as in a test
    np.testing.assert_allclose(seen, units * factors, rtol=1e-12, atol=0)
    part = conv.loss_and_grads(model, 0.5, params, batch.part(2, 5), 8)[0]["train_loss"]
    scores, _ = model.forward(params, batch.images[2:5], dropout=factors[2:5])
    assert part == pytest.approx(3 / 8 * model.loss(scores, batch.labels[2:5], 0.5)[0], rel=1e-12)


@pytest.mark.parametrize("changes", [
    {}, {"dataset": "voxels", "data_dir": None}, {"cnn": "paper", "n_train": 40, "batch_size": 40},
])
def test_threads_change_no_bit(changes: dict[str, Any]) -> None:
    config = tiny(**{"n_epochs": 1, "batch_size": 16, **changes})
    data, found = conv.make_data(config), list[Any]()
    assert conv.part_size(config) < config.batch_size  # or there is nothing for a second thread
    for threads in (1, 2, 3):
        states = conv.train_all(config, data, RunOptions(threads=threads, quiet=True))
        with Workers(threads) as workers:
            scores = {name: conv.predict_scores(model, states[name].params, data.test, config, workers)
                      for name, model in conv.make_models(config).items()}
        found.append([scores, *((state.history, state.params) for state in states.values())])
    for other in found[1:]:
        np.testing.assert_equal(other, found[0])


def test_the_learning_rate_rises_then_falls_and_the_cnn_has_its_own() -> None:
    config = tiny(lr=0.5, cnn_lr=0.25)
    rates = [conv.learning_rate(config, "capsules", done) for done in (0, 0.01, 0.5)]
    assert rates == pytest.approx([0.05, 0.495, 0.25])  # from 1 % of the training on it falls
    assert [conv.learning_rate(config, "cnn", done) for done in (0.5, 1)] == pytest.approx([0.125, 0])


@pytest.mark.parametrize("scale", [0.0, 1.0, 300.0, 1e6])
@pytest.mark.parametrize("policy", ["exact", "stop"])
@pytest.mark.parametrize("form", FORMS)
def test_float32_stays_finite(form: str, policy: str, scale: float) -> None:
    """Votes that all agree, votes far apart, one far from all others, children that are off, and a beta far out."""
    inputs: dict[str, Any] = {k: v.astype(np.float32) for k, v in field_inputs(CASES[0]).items()}
    inputs["pose"][:] = scale * (inputs["pose"] if scale > 1 else 1)
    inputs["w"] = inputs["w"] if scale > 1 else np.ones_like(inputs["w"])
    inputs["pose"][2, 3, 3] *= 1e3 if scale == 300 else 1
    inputs["a_in"][0] = 0
    inputs["a_in"][1] = 1
    floors = (1e-4, 3.0) if scale <= 1 else (3.0,)  # squares of 1e12 leave no digits for 1e-4
    for beta_a, floor in itertools.product((-1e3, 0.0, 1e3), floors):
        inputs["beta_a"][0] = beta_a
        mu, a, cache = FORMS[form].field_routing_forward(**inputs, lambdas=[1.0] * 3, variance_floor=floor, k=3)
        grads = FORMS[form].field_routing_backward(np.ones_like(mu), np.ones_like(a), cache, policy)
        for array in (mu, a, *grads):
            assert array.dtype == np.float32
            assert np.isfinite(array).all()


@pytest.mark.parametrize(("mean", "spread", "w_spread", "floor", "tolerance"), [
    (3.0, 2.0, 1.0, 3.0, 1e-3),  # as in training
    (100.0, 0.3, 0.0, 1e-3, 1e-2),  # far from zero, beside a small floor
    (100.0, 0.03, 1e-3, 1e-3, 1e-2),
])
@pytest.mark.parametrize("form", FORMS)
def test_float32_is_float64_rounded(
    form: str, mean: float, spread: float, w_spread: float, floor: float, tolerance: float
) -> None:
    """A variance as a difference of moments keeps its digits, also where votes lie far from zero."""
    rng, inputs = np.random.default_rng(0), field_inputs((2, 8, 8, 4, 3, 3, 4, 2))
    inputs["pose"] = spread * inputs["pose"] + mean
    inputs["w"] = np.eye(4) + w_spread * inputs["w"]
    outputs: list[tuple[Array, ...]] = []
    for dtype in ("float64", "float32"):
        rounded: dict[str, Any] = {k: v.astype(np.float32).astype(dtype) for k, v in inputs.items()}
        options: dict[str, Any] = {"lambdas": [1.0] * 3, "variance_floor": floor, "k": 3, "stride": 2}
        mu, a, cache = FORMS[form].field_routing_forward(**rounded, **options)
        if not outputs:
            dmu, da = rng.standard_normal(mu.shape), rng.standard_normal(a.shape)
        grads = FORMS[form].field_routing_backward(dmu.astype(dtype), da.astype(dtype), cache, "exact")
        outputs.append((mu, a, *grads))
    for x, y in zip(*outputs, strict=True):
        assert y.dtype == np.float32
        assert np.linalg.norm(x - y) < tolerance * np.linalg.norm(x)


def test_part_size() -> None:
    """So much of a batch that the votes of ConvCaps1, the layer that has most, take no more memory than they may."""
    assert conv.part_size(conv.Config(dataset="mnist", sizes=(32, 4, 4, 8))) == conv.PART
    for sizes, precision in itertools.product(((64, 8, 16, 16), (32, 32, 32, 32)), (32, 64)):
        of_image = 16 * 9 * 36 * sizes[1] * sizes[2] * precision // 4
        config = conv.Config(dataset="mnist", sizes=sizes, dtype=f"float{precision}")
        assert conv.part_size(config) == max(1, conv.PART_BYTES // of_image)


def test_the_class_layers_routing_is_laid_open() -> None:
    config = tiny(dtype="float64", variance_floor=0.3, em_iters=3)
    images = strokes().test_images[:5, ..., None] / 255
    params = conv.make_models(config)["capsules"].init_params(np.random.default_rng(0))
    routing = conv.class_routing(params, images, config)
    assert routing.votes.shape == (5, n_children := 4 * 4 * SIZES[3], 10, 16)
    assert routing.distances.shape == routing.weights.shape == (3, 5, n_children, 10)
    np.testing.assert_allclose(routing.r.sum(axis=3), 1)
    np.testing.assert_allclose(routing.r[0], 0.1)
    cache = conv.make_capsules(config).forward(params, images)[1]
    np.testing.assert_allclose(routing.mu[-1], cache.mu)
    np.testing.assert_allclose(routing.a[-1], cache.a)
    for t in range(3):  # every mean is its votes' mean, weighted
        weight = routing.weights[t] / routing.weights[t].sum(axis=1, keepdims=True)
        np.testing.assert_allclose(np.einsum("nme,nmed->ned", weight, routing.votes), routing.mu[t], rtol=1e-5)
    mean = (routing.distances * routing.weights).sum(axis=(1, 2, 3)) / routing.weights.sum(axis=(1, 2, 3))
    assert mean[-1] < mean[0]  # votes gather round the means


# --- Data -------------------------------------------------------------------------------------------------------------


def test_training_images_depend_on_the_seed_and_test_images_do_not() -> None:
    examples = conv.Examples(np.arange(50), np.arange(50))
    a, b, c = (conv.subset(examples, 20, np.random.default_rng(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(a.images, b.images)
    assert set(a.images) != set(c.images)
    np.testing.assert_array_equal(a.images, a.labels)
    np.testing.assert_array_equal(conv.subset(examples, 3).images, [0, 24, 49])
    assert [len(conv.subset(examples, n).labels) for n in (None, 99)] == [50, 50]


def sets(data: conv.Data) -> list[conv.Examples]:
    return [examples for examples in (data.train, data.test, data.held_out) if examples is not None]


AZIMUTHS = "--train-azimuths 20:60 --test-azimuths 100:160"
ELEVATIONS = "--train-elevations 10:35 --test-elevations 40:70"


@pytest.mark.parametrize(("dataset", "flags"), [
    *(("smallnorb", flags) for flags in ("", AZIMUTHS, ELEVATIONS)), ("voxels", ""),
    ("voxels", f"{ELEVATIONS} --n-elev 2 --seed 5"), ("voxels", f"{FEW_VIEWS} --standardize image"),
    ("voxels", f"{AZIMUTHS} --n-train-views 2 --n-test-views 3 --n-elev 4 --n-per-combo 1"),
])
def test_views_are_those_of_the_viewpoint_script(dataset: str, flags: str, tmp_path: Path) -> None:
    argv = f"--dataset {dataset} {flags}".split()
    if dataset == "smallnorb":
        for seed, subset in enumerate(("training", "testing")):
            write_set(tmp_path, subset, make_arrays(subset, 60, seed))
        argv.append(f"--data-dir={tmp_path}")
    config, other = (config_of(script, argv) for script in (conv, smallnorb))
    fields = [field.name for field in dataclasses.fields(smallnorb.Viewpoints)]
    for name in (*fields, "held_out_angle", "classes", "in_channels"):
        assert getattr(config, name) == getattr(other, name), name
    for examples, split in zip(sets(conv.make_data(config)), smallnorb.make_data(other), strict=True):
        np.testing.assert_array_equal(examples.images, split.images)
        np.testing.assert_array_equal(examples.labels, split.labels)
        assert examples.images.dtype == np.float32


def test_fewer_views_are_drawn_for_the_training_and_spaced_evenly_for_the_test() -> None:
    every, few = (conv.make_data(config_of(conv, f"--dataset voxels {flags}".split()))
                  for flags in ("", "--n-train 40 --n-test 30"))
    for a, b in list(zip(sets(few), sets(every), strict=True))[1:]:
        for part in ("images", "labels", "angles"):
            np.testing.assert_array_equal(getattr(a, part), getattr(b, part)[np.linspace(0, 179, 30).astype(int)])
    known = {image.tobytes(): label for image, label in zip(*every.train[:2], strict=True)}
    assert [known[image.tobytes()] for image in few.train.images] == few.train.labels.tolist()
    assert len({image.tobytes() for image in few.train.images}) == 40


@pytest.mark.parametrize("flags", ["", ELEVATIONS])
def test_accuracies_at_an_angle_are_those_of_its_views(flags: str) -> None:
    """The result has one for each angle of the tested views; in the mean of a set they are the set's accuracy."""
    config = config_of(conv, f"--dataset voxels --n-epochs 1 --n-per-combo 1 {flags}".split())
    data, angle = conv.make_data(config), config.held_out_angle
    result = conv.run(config, names=["cnn"])[0]["models"]["cnn"]
    for part, metric in zip(sets(data)[1:], ("familiar_accuracy", "held_out_accuracy"), strict=True):
        angles, counts = np.unique(np.asarray(part.angles), return_counts=True)
        accuracies = [result[f"{angle}_{value:g}_accuracy"] for value in angles]
        assert np.average(accuracies, weights=counts) == pytest.approx(result[metric])


# --- Runs -------------------------------------------------------------------------------------------------------------


def test_a_persons_digits_are_named(tmp_path: Path, capsys: Capture) -> None:
    checkpoint = tmp_path / "c.npz"
    assert conv.main([*EXPERIMENTS[conv.EXPERIMENT].argv(), "--checkpoint", str(checkpoint)]) == 0
    paths = [str(tmp_path / f"{k}.png") for k in range(3)]
    for path, image in zip(paths, strokes().test_images, strict=False):
        Image.fromarray(255 - image).resize((61, 61)).save(path)
    capsys.readouterr()
    assert conv.main(["--predict", *paths[:2], "--predict", paths[2], "--checkpoint", str(checkpoint)]) == 0
    lines = capsys.readouterr().out.splitlines()
    config, states = load_checkpoint(conv, checkpoint)
    read = np.stack([read_strokes(Path(path), 28, 20) for path in paths])[..., None].astype(np.float32)
    of_capsules, of_cnn = (model.forward(states[name].params, read) for name, model in conv.make_models(config).items())
    answers = of_cnn[0].argmax(axis=1)
    for path, line, a, answer in zip(paths, lines[1:], of_capsules[1].a, answers, strict=True):
        assert line.split() == [path, str(a.argmax()), str(answer), *(f"{value:.3f}" for value in a)]


@pytest.mark.parametrize("argv", [
    f"--dataset voxels {FEW_VIEWS} --sizes 5,2,3,2 --n-epochs 1 --quiet".split(),
    EXPERIMENTS[conv.EXPERIMENT].argv("--models cnn"),
])
def test_a_network_of_views_and_a_cnn_name_no_digits(argv: list[str], tmp_path: Path, capsys: Capture) -> None:
    saved = ["--checkpoint", str(tmp_path / "c.npz")]
    assert conv.main([*argv, *saved]) == 0
    (tmp_path / "a.png").touch()
    line = failure(conv, ["--predict", str(tmp_path / "a.png"), *saved], capsys)
    assert "has no capsules that learned digits" in line
