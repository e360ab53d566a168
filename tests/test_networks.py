"""What holds for each network of each experiment, whatever its weights. Gradients: test_gradients.py."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import multimnist_capsnet as multimnist
import smallnorb_novel_viewpoint as smallnorb
from helpers import EXPERIMENTS, Array, config_of, digits_folder, states_of
from more import conv_matrix_capsules as conv, mnist_affine_capsnet as affine
from smallnorb_novel_viewpoint import TrainState, count_params


@pytest.mark.parametrize(("script", "name", "changes", "n_params"), [
    (multimnist, "capsnet", multimnist.PRESETS["paper"], 11_361_808),  # as published
    (multimnist, "capsnet", {}, 2_030_224),
    (affine, "lenet", {}, 44_426),
    (affine, "lenet", {"canvas": 40, "max_shift": 6}, 44_426 + (784 - 256) * 120),
    (smallnorb, "capsules", {}, 558_258),
    (smallnorb, "cnn", {}, 262_949),
    (conv, "cnn", {"dataset": "toys", "cnn": "paper"}, 4_253_349),  # "4.2M"
    (conv, "capsules", {"dataset": "mnist", "sizes": (32, 32, 32, 32)}, 832 + 17_952 + 2 * 147_456 + 5120 + 148),
])
def test_numbers_of_parameters(script: Any, name: str, changes: dict[str, Any], n_params: int) -> None:
    model = script.make_models(script.Config(**changes))[name]
    assert count_params(model.init_params(np.random.default_rng(0))) == n_params


NAMES = [
    (name, model)
    for name, experiment in EXPERIMENTS.items()
    if hasattr(experiment.script, "training_batch") or experiment.script is smallnorb
    for model in experiment.models
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("experiment", "name"), NAMES)
def test_a_step_overwrites_neither_its_inputs_nor_the_next_steps(experiment: str, name: str, dtype: str) -> None:
    """The layers give new arrays, of the parameters' shapes and type; memory is used again by the allocator alone. And
    an image has the same scores in any batch."""
    script = EXPERIMENTS[experiment].script
    config = config_of(script, [*EXPERIMENTS[experiment].argv(), f"--dtype={dtype}"])
    data, model = script.make_data(config), script.make_models(config)[name]
    params = model.init_params(np.random.default_rng(0))
    if script is smallnorb:
        batch: Any = conv.Examples(data.train.images[::2].astype(dtype), data.train.labels[::2])
    else:
        batch = script.training_batch(data, config, 0)
    before, n = copy.deepcopy((params, batch)), len(batch.labels)

    def grads_of(part: Any) -> dict[str, Array]:
        if hasattr(model, "assess"):
            return model.loss_and_grads(params, part, n)[1]
        return conv.loss_and_grads(model, 0.5, params, part, n)[1]

    def scores_of(part: Any) -> Array:
        answer = model.assess(params, part) if hasattr(model, "assess") else model.forward(params, part.images)
        return np.asarray(answer[0])

    first = grads_of(batch)
    kept = copy.deepcopy(first)
    grads_of(batch.part(1, n))
    for grads in (first, grads_of(batch)):
        np.testing.assert_equal(grads, kept)
    np.testing.assert_equal((params, batch), before)
    assert {key: g.shape for key, g in first.items()} == {key: p.shape for key, p in params.items()}
    scores = scores_of(batch)
    assert {str(x.dtype) for x in (scores, *first.values(), *params.values())} == {dtype}
    alone = np.concatenate([scores_of(batch.part(k, k + 1)) for k in range(n)])
    precision = {"float32": 1e-4, "float64": 1e-9}[dtype]
    np.testing.assert_allclose(scores, alone, rtol=precision, atol=precision / 1000)
    assert np.abs(scores[0] - scores[1]).max() > 1e-9


class OwnConfig(smallnorb.Config):
    classes, in_channels, n_features = ("bar", "dot", "ring"), 3, 12 * 12 * smallnorb.CONV_CHANNELS


def own_data(column: bool) -> smallnorb.Data:
    """Images of another size, colours and classes."""
    labels = np.arange(24) % 3
    images = np.random.default_rng(0).standard_normal((24, 24, 24, 3), np.float32)
    images[np.arange(24), 8 * labels] += 2
    split = smallnorb.Split(images, labels[:, None] if column else labels, *np.zeros((3, 24)))
    return smallnorb.Data(split, split, split)


@pytest.mark.parametrize("loss", ["spread", "cross-entropy"])
def test_arrays_of_ones_own_and_labels_in_a_column(loss: str) -> None:
    """A column of labels is no table of all against all."""
    config = OwnConfig(n_epochs=8, lr=2e-3, loss=loss)
    flat, column = (smallnorb.train_all(config, own_data(as_column)) for as_column in (False, True))
    for name in smallnorb.MODEL_NAMES:
        assert flat[name].history == column[name].history
        assert flat[name].history["familiar_accuracy"][-1] > 0.9, name
        with pytest.raises(ValueError, match="reshape"):
            smallnorb.fraction_right(np.ones((24, 3)), np.eye(3)[own_data(False).train.labels])


def test_only_cnns_have_settings_of_their_own_and_no_parameters_name_is_asked_for() -> None:
    config = smallnorb.Config(lr=1e-3, cnn_lr=2e-3)
    rates = [smallnorb.of_model(name, config)[1] for name in ("capsules", "capsules_even", "cnn", "cnn_matched")]
    assert rates == [1e-3, 1e-3, 2e-3, 2e-3]
    model = Mock(forward=lambda params, x: (x.sum(axis=(1, 2)) * params["k"], None))
    assert smallnorb.predict_scores(model, {"k": np.ones(1)}, np.ones((2, 3, 3, 1), np.float32)).dtype == np.float64


def test_names_of_models_are_whole_and_known() -> None:
    models: Any = {name: Mock(init_params=lambda rng: {}) for name in ("cnn", "cnn_matched")}
    for name, model in models.items():
        model.name = name
    session = smallnorb.Session("x", smallnorb.Config(), lambda _: models, names="cnn_matched")
    assert [*session.trained] == ["cnn_matched"]
    with pytest.raises(smallnorb.UsageError, match="'cnm' is not one of cnn, cnn_matched"):
        smallnorb.Session("x", smallnorb.Config(), lambda _: models, names=["cnm"])


OF_VIEWS = {"n_epochs": 10, "n_elev": 1, "n_train_views": 4, "n_per_combo": 3, "batch_size": 10, "lr": 5e-4}
OF_DIGITS = {"dataset": "mnist", "conv_channels": 8, "primary_types": 2, "decoder": (32, 64), "batch_size": 16}
OF_PAIRS = {**OF_DIGITS, "n_epochs": 2, "n_train": 1120, "n_test": 100}
OF_TURNED = {**OF_DIGITS, "n_epochs": 12, "n_train": 192, "n_val": 100, "n_sweep": 4, "lr": 1e-2, "cnn_lr": 1e-2}
OF_FIELDS = {**OF_VIEWS, "n_epochs": 7, "dataset": "voxels", "sizes": (8, 4, 4, 4), "lr": 1e-2, "variance_floor": 0.3}
LEARNING: list[tuple[Any, ...]] = [
    (smallnorb, "capsules", OF_VIEWS | {"loss": "cross-entropy", "em_grad": "stop"}, "familiar_accuracy", 0.45),
    *((smallnorb, name, OF_VIEWS, "familiar_accuracy", 0.45) for name in smallnorb.MODEL_NAMES),
    *((multimnist, name, OF_PAIRS, "digit_accuracy", 0.3) for name in multimnist.MODEL_NAMES),
    *((affine, name, OF_TURNED, "val_accuracy", 0.2) for name in affine.MODEL_NAMES),
    *((conv, name, OF_FIELDS, "familiar_accuracy", 0.45) for name in conv.MODEL_NAMES),
]


@pytest.mark.parametrize(("script", "name", "changes", "metric", "least"), LEARNING)
def test_training_learns(script: Any, name: str, changes: dict[str, Any], metric: str, least: float) -> None:
    """By the best epoch, as the gradient of "stop" is no descent direction and comes and goes. Chance is 0.2 for views
    and for one of two digits, and 0.1 for single digits."""
    config = script.Config(**changes | ({"data_dir": digits_folder()} if changes.get("dataset") == "mnist" else {}))
    history = script.train_all(config, script.make_data(config), names=(name,))[name].history
    assert max(history[metric]) > least, history
    if name == "capsnet":
        recon_mse = history["recon_mse" if script is multimnist else "val_recon_mse"]
        assert recon_mse[-1] < min(0.075, recon_mse[0])


@pytest.mark.parametrize(("script", "name", "changes", "decayed"), [
    (smallnorb, "capsules", {}, {"conv1.w", "primary.w"}),
    (smallnorb, "cnn", {}, {"conv1.w", "hidden.w", "out.w"}),
    (conv, "capsules", {}, {"conv1.w", "primary.w"}),
    (conv, "cnn", {}, {"conv1.w", "conv2.w", "conv3.w", "out.w"}),
    (conv, "cnn", {"cnn": "paper"}, {"conv1.w", "conv2.w", "hidden.w", "out.w"}),
])
def test_a_step_moves_every_parameter_and_weights_outside_of_the_routing_decay(
    script: Any, name: str, changes: dict[str, str], decayed: set[str]
) -> None:
    few = {"dataset": "voxels", "n_train_views": 2, "n_test_views": 2, "n_elev": 1, "n_per_combo": 1}
    epochs = {"n_epochs": 1, "cnn_epochs": 1, "dtype": "float64", "batch_size": 16}  # one step
    config, states = script.Config(**few, **epochs, **changes), list[TrainState]()
    for decay in (0.0, 20.0):
        decays = {key: decay for key in ("weight_decay", "cnn_weight_decay") if hasattr(config, key)}
        changed = dataclasses.replace(config, **decays)
        states.append(script.train_all(changed, script.make_data(changed), names=(name,))[name])
    plain, shrunk = states
    assert plain.step == shrunk.step == 1
    start = states_of(script.make_models(config), config)[name].params
    lr = conv.learning_rate(config, name, 0.0) if script is conv else smallnorb.of_model(name, config)[1]
    for key, p in plain.params.items():
        assert (p != start[key]).mean() > 0.5, key
        expected = p - 20 * lr * start[key] if key in decayed else p
        np.testing.assert_allclose(shrunk.params[key], expected, rtol=1e-12, atol=1e-15, err_msg=key)
        assert np.array_equal(shrunk.params[key], p) == (key not in decayed), key


# --- Plain forms ------------------------------------------------------------------------------------------------------


def test_the_fast_twins_are_used_unless_plain_is_asked_for() -> None:
    fast, plain = (multimnist.parts_of(multimnist.Config(plain=is_plain)) for is_plain in (False, True))
    twins = {name for name in fast._fields if getattr(fast, name) is not getattr(plain, name)}
    assert twins == {"conv", "routing"}
    for parts, package in ((fast, "fast"), (plain, "multimnist_capsnet")):
        functions = (function for name in twins for function in getattr(parts, name))
        assert {function.__module__.split(".")[0] for function in functions} == {package}


@pytest.mark.parametrize("parts", [multimnist.PLAIN, multimnist.FAST], ids=["plain", "fast"])
@pytest.mark.parametrize("policy", ["exact", "stop"])
def test_a_cache_of_dynamic_routing_serves_two_backward_passes(parts: multimnist.Parts, policy: str) -> None:
    rng = np.random.default_rng(0)
    u, w, dv = (rng.standard_normal(shape) for shape in ((6, 7, 3), (7, 3, 4, 5), (6, 4, 5)))
    _, cache = parts.routing.forward(u, w, 3, parts.digit)
    first, *others = ([g.copy() for g in parts.routing.backward(dv, cache, policy)] for _ in range(3))
    for other in others:
        assert [g.tobytes() for g in other] == [g.tobytes() for g in first]


@pytest.mark.parametrize("name", ["multimnist cnn", "multimnist cnn_pool", "affine cnn", "affine lenet"])
@pytest.mark.parametrize("side", [28, 40])
def test_fast_and_plain_cnns_have_the_same_first_gradient_on_a_blank_ground(name: str, side: int) -> None:
    """Where a rounding error would decide which units are on."""
    (script, model), rng, found = name.split(), np.random.default_rng(0), []
    images, labels = np.zeros((8, side, side), np.float32), np.arange(8)[:, None]
    images[:, side // 2 - 4 : side // 2 + 4, side // 2] = rng.random((8, 8))
    for plain in (False, True):
        few: dict[str, Any] = {"conv_channels": 4, "primary_types": 1, "plain": plain}
        models: Any = (affine.make_models(affine.Config(canvas=side, **few)) if script == "affine"
                       else multimnist.make_models(multimnist.Config(image_size=side, **few)))
        params = models[model].init_params(np.random.default_rng(1))
        found.append(models[model].loss_and_grads(params, multimnist.Batch(images, labels, images[:, None]), 8)[1])
    for key, grad in found[1].items():
        np.testing.assert_allclose(found[0][key], grad, atol=2e-5 * np.abs(grad).max(), err_msg=key)
