"""What is measured and reported, on data where the right answer is known by construction.

The models in here answer from what is written into the images: a label, the set that an image is of, its number. The
settings and constants in tests/data/defaults.json are those of every script; who changes one changes it there too.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest

import compare_seeds
import multimnist_capsnet as multimnist
import planted_errors
import smallnorb_novel_viewpoint as smallnorb
from evidence import report
from fast.workers import SERIAL
from helpers import DATA, EXPERIMENTS, Array, Patch, config_of, load, smallest, states_of
from more import capsule_attacks as attacks, conv_matrix_capsules as conv, mnist_affine_capsnet as affine
from smallnorb_novel_viewpoint import RunOptions, TrainState, count_params, generator
from support.results import checksum, parse_json, save_result

FILES: dict[str, dict[str, Any]] = {"smallnorb": {"data_dir": "."}, "voxels": {}, "mnist": {}}
WEIGHTS = {"conv1.w": np.zeros(1, np.float32)}  # of a model that learns nothing


def one_hot(answers: Any, n_classes: int) -> Array:
    return np.eye(n_classes)[np.asarray(answers)]


def fresh_weights(rng: np.random.Generator) -> dict[str, Array]:
    return {key: p.copy() for key, p in WEIGHTS.items()}


def numbers_of(line: str) -> list[float]:
    """The numbers in a row of a table, after the model's name."""
    return [float(cell.replace(",", "")) for cell in line.split()[1:]]


# --- Views: accuracy on those of the training range, on those held out, and the drop ----------------------------------

of_views = pytest.mark.parametrize("script", [smallnorb, conv], ids=lambda script: script.__name__)
FEW_VIEWS = {"dataset": "voxels", "n_train_views": 2, "n_test_views": 3, "n_elev": 1, "n_per_combo": 1, "n_epochs": 1}


def views_model(script: Any, scores: Callable[[Array], Array], losses: Callable[[Array], Any] = np.mean) -> Any:
    """A CNN of smallnorb_novel_viewpoint or conv_matrix_capsules with ``scores(images)``, and the mean of
    ``losses(images)`` for its loss."""
    seen: list[Array] = []

    def forward(params: Any, x: Array, *ws: Any) -> tuple[Array, None]:
        seen[:] = [x]
        return scores(x), None

    return script.Network(
        "cnn", fresh_weights, forward, lambda *args, **options: (fresh_weights(np.random.default_rng(0)), None),
        lambda scores, labels, progress: (float(np.mean(losses(seen[0]))), np.zeros_like(scores)),
    )


def run_of_known_answers(script: Any, known: Callable[[str, Any], Any], monkeypatch: Patch) -> dict[str, Any]:
    """A run of a model that gives every image of a data set its label where ``known(set, part)``, and the next one
    elsewhere."""
    config, answers = script.Config(**FEW_VIEWS), {}
    data = smallnorb.make_data(config)
    for name, split in zip(data._fields, data, strict=True):
        is_known = np.broadcast_to(known(name, split), len(split.labels))
        for image, label, right in zip(split.images, split.labels, is_known, strict=True):
            answers[image.tobytes()] = int(label if right else (label + 1) % 5)
    model = views_model(script, lambda x: one_hot([answers[np.float32(image).tobytes()] for image in x], 5))
    monkeypatch.setattr(script, "make_models", lambda config: {"cnn": model})
    result: dict[str, Any] = script.run(config, RunOptions(threads=2, quiet=True), names=("cnn",))[0]
    return result


@of_views
@pytest.mark.parametrize(("known", "familiar", "held_out"), [
    (lambda name, part: part.azimuths <= 150, 1.0, 0.0),  # the views of the training
    (lambda name, part: part.azimuths >= 200, 0.0, 1.0),
    (lambda name, part: name == "train", 0.0, 0.0),  # the images of the training, by heart
    (lambda name, part: (name != "train") & (part.azimuths > 0), 0.5, 1.0),  # one of the two training views
], ids=["training views", "held-out views", "training images", "one view"])
def test_accuracies_and_drop_of_views(
    script: Any, known: Any, familiar: float, held_out: float, monkeypatch: Patch
) -> None:
    result = run_of_known_answers(script, known, monkeypatch)
    found = result["models"]["cnn"]
    assert (found["familiar_accuracy"], found["held_out_accuracy"]) == (familiar, held_out)
    assert found["drop"] == familiar - held_out
    assert result["headline"] == "held_out_accuracy"
    assert numbers_of(script.format_table(result).splitlines()[1])[:3] == [familiar, held_out, familiar - held_out]


@of_views
@pytest.mark.parametrize(("wrong", "hard"), [((0, 2, 3), 1.0), ((1,), 0.5), ((4,), 0.5)], ids=str)
def test_hard_accuracy_is_that_of_the_classes_that_look_new_from_behind(
    script: Any, wrong: tuple[int, ...], hard: float, monkeypatch: Patch
) -> None:
    """Cross, T and frame are the same after half a turn; on held-out views the classes ``wrong`` are named the next."""

    def known(name: str, part: Any) -> Any:
        return name != "held_out" or ~np.isin(part.labels, wrong)

    found = run_of_known_answers(script, known, monkeypatch)["models"]["cnn"]
    assert found["hard_accuracy"] == hard
    assert found["held_out_accuracy"] == pytest.approx(1 - len(wrong) / 5)
    for label, name in enumerate(smallnorb.VOXEL_CLASSES):
        assert found[f"class_{name}_accuracy"] == (label not in wrong)


def test_three_classes_look_the_same_from_behind() -> None:
    """So that a network which learned nothing of viewpoints has 0.6 on held-out azimuths."""
    labels, zero = np.arange(5), np.zeros(5)
    front, behind = (smallnorb.render_voxels(labels, zero + azimuth, zero, None) for azimuth in (30.0, 210.0))
    same = [smallnorb.VOXEL_CLASSES[k] for k in labels if np.abs(front[k] - behind[k]).max() < 1e-6]
    assert same == [name for name in smallnorb.VOXEL_CLASSES if name not in smallnorb.HARD_CLASSES]


def test_the_hardest_drawn_object_is_that_of_the_least_accuracy() -> None:
    config, labels = smallnorb.Config(dataset="shapes"), np.repeat(np.arange(5), 4)
    right = ~np.isin(np.arange(20), [0, 9, 10, 11])
    assert smallnorb.class_accuracies(config, labels, right) == {"hardest_object_accuracy": 0.25}


def numbered(values: Any) -> smallnorb.Split:
    """Images that show a number each, in their first pixel."""
    images, labels = np.zeros((len(values), 32, 32, 1), np.float32), np.arange(len(values)) % 5
    images[:, 0, 0, 0] = values
    return smallnorb.Split(images, labels, labels, labels, labels)


@of_views
def test_every_image_counts_once_in_an_accuracy(script: Any) -> None:
    """Right on the last image alone, and on all but the last: the sets end in a batch that is not full."""
    n = smallnorb.EVALUATION_BATCH + 1
    split = numbered(np.arange(n))
    for right in (np.arange(n) == n - 1, np.arange(n) < n - 1):
        named = one_hot(np.where(right, split.labels, (split.labels + 1) % 5), 5)
        model = views_model(script, functools.partial(lambda named, x: named[x[:, 0, 0, 0].astype(int)], named))
        if script is smallnorb:
            found = smallnorb.evaluate(model, WEIGHTS, smallnorb.Data(split, split, split))["held_out_accuracy"]
        else:
            config, examples = conv.Config(dataset="voxels"), conv.Examples(split.images, split.labels)
            found = conv.accuracy(model, WEIGHTS, examples, config, SERIAL)
        assert found == right.sum() / n


@of_views
def test_the_loss_of_an_epoch_is_the_mean_over_its_images(script: Any) -> None:
    """Seven images in batches of four: the last batch has three, and counts as three."""
    values, seen = [1.0, 2, 4, 8, 16, 32, 64], list[float]()
    split = numbered(values)

    def losses(x: Array) -> Array:
        seen.extend(x[:, 0, 0, 0].tolist())
        return x[:, 0, 0, 0]

    model = views_model(script, lambda x: one_hot(np.zeros(len(x), int), 5), losses)
    config = config_of(script, ["--dataset", "voxels", "--n-epochs", "2", "--batch-size", "4"])
    state = TrainState("cnn", fresh_weights(np.random.default_rng(0)))
    if script is smallnorb:
        smallnorb.train(model, config, smallnorb.Data(split, split, split), state, lambda *_: None)
    else:
        examples = conv.Examples(split.images, split.labels)
        conv.train(model, config, conv.Data("voxels", *[examples] * 3), state, SERIAL, lambda *_: None)
    np.testing.assert_allclose(state.history["train_loss"], [127 / 7] * 2, rtol=1e-6)
    assert sorted(seen[:7]) == sorted(seen[7:]) == values  # every image once an epoch
    assert seen[:7] != seen[7:]


# --- Digits: the test set is made of test digits ----------------------------------------------------------------------

TRAIN, TEST = 100, 200  # brightness of the training digits, of the test digits


def marked_digits(n_dim: int = 0) -> multimnist.Digits:
    """60 training and 40 test digits of classes 2 to 9, each one bright pixel in the row of its class: who has no
    preference names 0 and 1, and is wrong. The first ``n_dim`` test digits are neither as bright as the training's nor
    as the test's."""
    parts = list[Array]()
    for n, brightness in ((60, TRAIN), (40, TEST)):
        labels, images = (2 + np.arange(n) % 8).astype(np.uint8), np.zeros((n, 28, 28), np.uint8)
        images[np.arange(n), labels, 0] = brightness
        parts += [images, labels]
    parts[2][:n_dim] //= 4
    return multimnist.Digits("mnist", *parts)


@pytest.fixture
def marked(monkeypatch: Patch) -> None:
    monkeypatch.setattr(multimnist, "resolve_dataset", lambda *args, **options: marked_digits())


def class_scores(images: Array, brightness: int) -> Array:
    """images (B, S, S) -> (B, 10): how bright the pixels of each class are, where their brightness is the known one."""
    edge = (images.shape[1] - 28) // 2
    pixels = images[:, edge : edge + 10, edge]
    return np.where(np.abs(pixels - brightness / 255) < 0.01, 1.0, 0.0)


def digits_model(name: str, scores: Callable[[Array], Array], error: float = math.nan) -> multimnist.Network:
    """``error`` is the squared error of a pixel of each reconstruction; the loss is 1."""

    def loss_and_grads(params: Any, batch: multimnist.Batch, n: int) -> tuple[dict[str, float], Any]:
        return {"train_loss": len(batch.labels) / n}, {"conv1.w": np.zeros_like(params["conv1.w"])}

    return multimnist.Network(
        name, fresh_weights, loss_and_grads, lambda params, batch: (scores(batch.images), error * batch.sources.size)
    )


@pytest.mark.usefixtures("marked")
@pytest.mark.parametrize(("brightness", "accuracy"), [(TEST, 1.0), (TRAIN, 0.0)])
def test_matrix_capsules_are_tested_on_test_digits(brightness: int, accuracy: float, monkeypatch: Patch) -> None:
    model = views_model(conv, lambda x: class_scores(x[..., 0], brightness))
    monkeypatch.setattr(conv, "make_models", lambda config: {"cnn": model})
    result = conv.run(conv.Config(dataset="mnist", cnn_epochs=1), names=("cnn",))[0]
    assert result["models"]["cnn"]["accuracy"] == accuracy
    assert result["headline"] == "accuracy"
    assert numbers_of(conv.format_table(result).splitlines()[1])[0] == accuracy
    data = conv.make_data(conv.Config(dataset="mnist"))
    assert (len(data.train.labels), len(data.test.labels), data.held_out) == (60, 40, None)


def test_settings_are_chosen_on_training_digits_that_are_not_trained_on() -> None:
    every = marked_digits()
    every.train_images[:, 0, 0] = np.arange(60)  # no two are the same
    digits = multimnist.without_test(every, 20)
    assert digits.train_images.max() == digits.test_images.max() == TRAIN
    for part, whole in (("images", every.train_images), ("labels", every.train_labels)):
        tested, trained = getattr(digits, f"test_{part}"), getattr(digits, f"train_{part}")
        assert len(tested) == 20
        np.testing.assert_array_equal(np.concatenate([trained, tested]), whole)
    assert multimnist.without_test(every, None) is every
    with pytest.raises(OSError, match="--n-val 60 leaves none of the 60 training digits"):
        multimnist.without_test(every, 60)


@pytest.mark.parametrize(("script", "field", "of"), [
    (conv, "n_val_objects", {"dataset": "toys", "held_out": "nothing"}),
    *((script, "n_val", {"dataset": "mnist"}) for script in (conv, multimnist)),
])
def test_what_settings_are_chosen_by_is_said_to_be_validated(script: Any, field: str, of: dict[str, Any]) -> None:
    for n in (None, 1):
        config = dataclasses.asdict(script.Config(**of, **{field: n}))
        said = script.describe({"config": config, "dataset": of["dataset"], "seed": 0})
        assert (f"validation {'objects' if 'objects' in field else 'digits'}" in said) == (n is not None)


@pytest.mark.usefixtures("marked")
@pytest.mark.parametrize(("scores", "both", "one", "digits"), [
    (lambda images: class_scores(images, TEST), 1.0, 1.0, 1.0),
    (lambda images: class_scores(images, TRAIN), 0.0, 0.0, 0.0),
    (lambda images: one_hot(class_scores(images, TEST).argmax(axis=1), 10) + 0.5 * one_hot(0, 10), 0.0, 1.0, 0.5),
], ids=["test digits", "training digits", "the lower of the two"])
def test_composites_are_of_test_digits(scores: Any, both: float, one: float, digits: float, monkeypatch: Patch) -> None:
    model = digits_model("capsnet", scores, 0.01)
    monkeypatch.setattr(multimnist, "make_models", lambda config: {"capsnet": model})
    config = multimnist.Config(dataset="mnist", n_epochs=1, n_train=64, n_test=70, max_shift=0)
    result = multimnist.run(config)[0]
    found = result["models"]["capsnet"]
    assert (found["set_accuracy"], found["soft_accuracy"], found["digit_accuracy"]) == (both, one, digits)
    assert found["recon_mse"] == pytest.approx(0.01)  # of a pixel of one digit
    np.testing.assert_allclose(result["history"]["capsnet"]["train_loss"], [1.0])
    assert result["headline"] == "set_accuracy"
    assert numbers_of(multimnist.format_table(result).splitlines()[1])[:4] == [both, one, digits, 0.01]
    sources = multimnist.training_batch(multimnist.make_data(config), config, 0).sources
    np.testing.assert_allclose(np.unique(sources), [0, TRAIN / 255], rtol=1e-6)  # of training digits


@pytest.mark.parametrize(("brightness", "accuracy"), [(TEST, 37 / 40), (TRAIN, 0.0)])
def test_turned_digits_are_test_digits_that_are_turned(brightness: int, accuracy: float, monkeypatch: Patch) -> None:
    """A digit that is turned has lost its pixel at the left edge, and three of the test digits are unknown."""
    monkeypatch.setattr(multimnist, "resolve_dataset", lambda *args, **options: marked_digits(3))
    monkeypatch.setattr(affine, "SWEEP", (-90, -5, 0, 5))
    scores = functools.partial(class_scores, brightness=brightness)

    def assess(params: Any, batch: multimnist.Batch) -> tuple[Array, float]:
        return scores(batch.images), 0.02 * batch.sources.size * (1 + batch.images[..., 1:].any())  # worse if turned

    models = digits_model("capsnet", scores)._replace(assess=assess), digits_model("cnn", scores)
    monkeypatch.setattr(affine, "make_models", lambda config: {model.name: model for model in models})
    few: dict[str, Any] = {"n_epochs": 1, "n_val": 16, "n_sweep": 40, "batch_size": 8, "max_shift": 0}
    result = affine.run(affine.Config(dataset="mnist", rotation=(5.0, 90.0), **few))[0]
    for found in result["models"].values():
        assert found["upright_accuracy"] == accuracy
        assert found["upright_error"] == pytest.approx(1 - accuracy, abs=1e-9)
        assert found["rotated_5_accuracy"] == found["rotated_90_accuracy"] == 0
        assert found["sweep"] == {"-90": 0, "-5": 0, "0": accuracy, "5": 0}
        assert found["val_accuracy"] == (brightness == TRAIN)  # of training digits
    assert result["models"]["capsnet"]["recon_mse"] == pytest.approx(0.02)
    assert result["headline"] == "rotated_90_accuracy"
    assert numbers_of(affine.format_table(result).splitlines()[1])[1] == pytest.approx(100 * accuracy)


def test_jitter_is_drawn_for_each_image() -> None:
    """Place, contrast and brightness, of batches of equal images."""
    rng = np.random.default_rng(0)
    image = rng.random((48, 48, 2)).astype(np.float32)
    crops = smallnorb.crop(np.stack([image] * 64), rng)
    assert len({crop.tobytes() for crop in crops}) == 64
    low, contrast = crops.min(axis=(1, 2, 3)), np.ptp(crops, axis=(1, 2, 3))
    assert 0.78 < contrast.min() < 0.85
    assert 1.15 < contrast.max() < 1.22
    assert -0.2 <= low.min() < -0.15
    assert 0.15 < low.max() <= 0.21
    points = np.zeros((512, 48, 48, 1))
    points[:, 20, 28] = 9
    rows, columns = np.argwhere(smallnorb.crop(points, rng) > 5)[:, 1:3].T
    assert (set(rows), set(columns)) == (set(range(4, 21)), set(range(12, 29)))  # crops begin at 0 to 16
    np.testing.assert_array_equal(smallnorb.crop(image[None], None), image[None, 8:40, 8:40])  # of a test


@of_views
def test_images_of_a_training_are_cropped_at_random_and_no_others(script: Any, monkeypatch: Patch) -> None:
    """Each batch by numbers of its own."""
    monkeypatch.setattr(smallnorb, "crop", crop := Mock(wraps=smallnorb.crop))
    config = script.Config(**FEW_VIEWS | {"cnn_epochs": 2})  # of one step
    script.train_all(config, script.make_data(config), names=("cnn",))
    generators = [call.args[1] for call in crop.call_args_list]
    assert len({rng.random() for rng in generators if rng}) == 2 < len(generators)
    assert [len(call.args[0]) for call in crop.call_args_list if call.args[1]] == [10, 10]


# --- Attacks: how far a pixel may be moved ----------------------------------------------------------------------------


def attacked_by_hand(answer: Callable[[Array], Array]) -> conv.Network:
    """A model of two classes: ``answer`` is the logit of the second one for the pixel in the middle, which an attacker
    finds where its second channel is 0."""

    def forward(params: Any, x: Array) -> tuple[Array, Array]:
        logit = answer(x[:, 16, 16, 0])
        return np.stack([-logit, logit], axis=1), x

    def backward(dscores: Array, x: Array, need_dx: bool = False) -> tuple[dict[str, Array], Array]:
        dx = np.zeros_like(x)
        dx[:, 16, 16, 0] = (dscores[:, 1] - dscores[:, 0]) * (x[:, 16, 16, 1] == 0)
        return {}, dx

    return conv.Network(
        "cnn", fresh_weights, forward, backward,
        lambda scores, labels, _: smallnorb.softmax_cross_entropy(scores, labels),
    )


class Attacked(NamedTuple):
    right: dict[str, list[float]]  # accuracies by attack and epsilon
    found: Any  # by ``attack_all``
    result: dict[str, Any]


def attacked(
    answer: Callable[[Array], Array], pixels: Any, labels: Any, patch: Patch, hidden: Any, **of: Any
) -> Attacked:
    images = np.zeros((len(pixels), 32, 32, 2), np.float32)
    images[:, 16, 16, 0], images[:, 16, 16, 1] = pixels, hidden
    patch.setattr(conv, "make_models", lambda config: {"cnn": attacked_by_hand(answer)})
    other = conv.Examples(images, 1 - labels)  # of the training and held out, and not attacked
    data = conv.Data("voxels", other, conv.Examples(images, labels), other)
    config = attacks.Config(dataset="voxels", loss="cross-entropy", **of)
    states = {"cnn": TrainState("cnn", fresh_weights(np.random.default_rng(0)))}
    states["cnn"].append({"accuracy": 1.0})
    patch.setattr(attacks, "train_all", lambda config, *args, **more: {1: states}[config.seed])  # of the next seed
    found = attacks.attack_all(config, states, data)
    result = attacks.make_result(config, states, found, data)
    right = {kind: list(by_epsilon.values()) for kind, by_epsilon in result["attack"]["cnn"].items()}
    return Attacked(right, found["cnn"], result)


def test_accuracy_under_attack_is_that_of_the_images_out_of_reach(monkeypatch: Patch) -> None:
    """Pixels are 0.04, 0.12 and 0.3 away from where the answer changes. Two of the eight images have no gradient:
    the search finds their pixel."""
    distance = np.array([0.04, -0.04, 0.12, -0.12, 0.3, -0.3, 0.04, -0.04])
    of: tuple[Any, ...] = 0.5 + distance, (distance > 0).astype(np.intp), monkeypatch, np.repeat([0, 1], (6, 2))
    epsilons, by_gradient = (0.03, 0.07, 0.2, 0.4), [1.0, 1.0, 0.75, 0.5, 0.25]
    right, found, result = attacked(lambda pixel: pixel - 0.5, *of, epsilons=epsilons)
    assert right.pop("worst_case") == [1.0, 1.0, 0.5, 0.25, 0.0]
    with_starts = right.pop("gradients")  # a random start may lie beyond it
    assert all(a <= b for a, b in zip(with_starts, by_gradient, strict=True))
    assert [list(rounds.values())[-1] for rounds in found.convergence] == with_starts[1:]
    assert right == dict.fromkeys(
        ("fgsm", "iterated", "fgsm_margin", "iterated_margin", "targeted", "from_other_seed"), by_gradient
    )
    assert result["models"]["cnn"]["worst_case_0.2_accuracy"] == 0.25
    few = attacked(lambda pixel: pixel - 0.5, *of, epsilons=epsilons, n_attack=2)
    assert few.right["fgsm"] == [1.0, 1.0, 0.5, 0.5, 0.5]  # the first and the last


def test_an_image_that_was_misread_once_counts_as_misread_at_every_larger_epsilon(monkeypatch: Patch) -> None:
    """Pixels between 0.59 and 0.61 are misread: one step of 0.1 ends there, one of 0.3 beyond it. The second image is
    misread from the start, and does not count among those that all networks classify correctly; the third is never
    misread; the fourth has no gradient, and the search finds it with an epsilon of 0.1 alone."""
    pixels, labels, hidden = [0.5, 0.6, 0.05, 0.5], np.zeros(4, np.intp), [0, 0, 0, 1]
    right, _, result = attacked(lambda pixel: 0.01 - np.abs(pixel - 0.6), pixels, labels, monkeypatch, hidden,
                                epsilons=(0.04, 0.1, 0.3, 0.45))
    counts = {kind: [4 * a for a in right[kind]] for kind in ("fgsm", "iterated", "gradients", "worst_case")}
    assert counts == {"fgsm": [3, 3, 2, 3, 3], "iterated": [3, 3, 2, 2, 2],  # of which the first rises
                      "gradients": [3, 3, 2, 2, 2], "worst_case": [3, 3, 1, 1, 1]}
    assert result["n_both"] == 3
    assert [round(3 * a) for a in result["attack_of_both"]["cnn"]["worst_case"].values()] == [3, 3, 1, 1, 1]
    assert result["models"]["cnn"]["fgsm_0.1_of_both_accuracy"] == pytest.approx(2 / 3)


def test_the_margin_that_is_attacked_is_the_last_of_the_training() -> None:
    activations = np.array([[0.5, 0.1, 0.0], [1.0, 0.05, 0.2]])
    network = attacks.attacked_network(attacks.Config(dataset="voxels"), "capsules", {}, SERIAL)
    losses, gradient = network.losses[""](activations, np.array([0, 0]))
    np.testing.assert_allclose(losses, [0.5**2 + 0.4**2, 0.1**2])  # a margin of 0.9
    np.testing.assert_allclose(gradient, [[-1.8, 1.0, 0.8], [-0.2, 0, 0.2]], atol=1e-12)


# --- Random numbers, and numbers that are not finite ------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_no_two_draws_share_a_stream(name: str, monkeypatch: Patch) -> None:
    """In the data and the training of one model: each set, each order and the jitter of each batch has its own; and no
    two models begin with the same numbers."""
    smallest(monkeypatch)
    script, keys = EXPERIMENTS[name].script, Counter[tuple[Any, ...]]()

    def counted(*key: Any) -> np.random.Generator:
        keys[key] += 1
        return generator(*key)

    for module in (script, multimnist, conv):
        monkeypatch.setattr(module, "generator", counted, raising=False)
    config = config_of(script, EXPERIMENTS[name].argv("--seed 123"))
    data = script.make_data(config)
    script.train_all(config, data, names=EXPERIMENTS[name].models[-1:])
    assert len(keys) > 5
    assert set(keys.values()) == {1}
    assert {seed for seed, *_ in keys} == {123}
    states = states_of(script.make_models(config), config)
    starts = [state.params["conv1.w"] for state in states.values()]
    assert len({start.ravel()[:20].tobytes() for start in starts}) == len(starts)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_that_is_not_finite_is_a_result(value: float, tmp_path: Path) -> None:
    run = {"headline": "x_accuracy", "models": {"cnn": {"n_params": 3, "x_accuracy": value}}}
    (path := tmp_path / "other.json").write_text(json.dumps(run))
    save = functools.partial(save_result, tmp_path / "result.json")
    refusals: list[tuple[Any, Any, str]] = [
        (save, run, "not finite"), (checksum, run, "JSON compliant"), (report.read_result, path, "holds NaN"),
        (compare_seeds.read_run, path, "a number that is not finite"),
    ]
    for refused, of, says in refusals:
        with pytest.raises((OSError, ValueError), match=says):
            refused(of)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_training_stops_at_a_number_that_is_not_finite(value: float) -> None:
    state = TrainState("cnn", fresh_weights(np.random.default_rng(0)) | {"fine": np.zeros(2)})
    state.step = 3
    state.add({"train_loss": 1.0}, 0.0)
    state.end_epoch({})
    state.step, where = 6, "became .* in epoch 2, step 6; try a smaller"
    with pytest.raises(OSError, match=f"^cnn: train_loss {where}"):
        state.add({"train_loss": value}, 0.0)
    state.params["conv1.w"][0] = value
    state.add({"train_loss": 1.0}, 0.0)  # within an epoch the loss alone counts
    with pytest.raises(OSError, match=rf"^cnn: conv1\.w {where}"):
        state.end_epoch({"accuracy": 1.0})
    state.params["conv1.w"][0] = 0
    with pytest.raises(OSError, match=f"^cnn: accuracy {where}"):
        state.end_epoch({"accuracy": value})


def test_runs_of_the_same_metrics_are_stored_as_columns(tmp_path: Path) -> None:
    """Read again they are the runs; others stay as they are."""
    path, runs = tmp_path / "a.json", [{"seed": s, "models": {"cnn": {"accuracy": s / 8, "n": 9}}} for s in range(50)]
    save_result(path, document := {"runs": [run | {"history": [0.25, 0.5]} for run in runs]})
    assert parse_json(path) == document | {"checksum": checksum(document)}
    assert '"accuracy": [0.0,0.125,0.25' in path.read_text()
    assert path.read_text().count('"n": 9') == 1
    for other in (runs[:1], [*runs, {"seed": 50}], [*runs[:2], {"seed": 9, "models": {"cnn": {"loss": 1}}}]):
        save_result(path, {"runs": other})
        assert parse_json(path)["runs"] == other
    path.write_text(json.dumps({"columns": {"seed": [1, 2], "loss": [1]}}))
    with pytest.raises(OSError, match="columns of unequal lengths"):
        parse_json(path)


# --- Baselines of as many parameters ----------------------------------------------------------------------------------

SIZES: list[tuple[Any, dict[str, Any]]] = [
    *((smallnorb, {"dataset": dataset, **FILES[dataset]}) for dataset in ("voxels", "smallnorb")),
    *((script, {"conv_channels": channels, "primary_types": types, "decoder": (8, 8)})
      for script in (multimnist, affine) for channels, types in ((4, 2), (3, 1), (6, 1))),
    *((conv, {"dataset": dataset, "sizes": sizes, **FILES[dataset]})
      for dataset in FILES for sizes in ((32, 4, 4, 8), (32, 8, 8, 8), (5, 2, 3, 2))),
]


@pytest.mark.parametrize(("script", "changes"), SIZES)
def test_cnns_are_the_nearest_in_size(script: Any, changes: dict[str, Any]) -> None:
    """Neither one unit or channel less nor one more comes nearer to the number of the capsules' parameters."""
    config, rng = script.Config(**changes), np.random.default_rng(0)
    params = {name: model.init_params(rng) for name, model in script.make_models(config).items()}
    wanted = count_params(params[script.MODEL_NAMES[0]])
    for name in set(script.MODEL_NAMES[1:]) - ({"cnn"} if script is smallnorb else {"lenet"}):
        if script is conv:
            n = params[name]["conv2.b"].size
            found = [multimnist.cnn_size(conv.grid_cnn(config, k), config) for k in (n - 1, n, n + 1)]
        else:
            (n_flat, n), J = params[name]["hidden.w"].shape, params[name]["out.b"].size
            convolutions = sum(p.size for key, p in params[name].items() if key.startswith("conv"))
            found = [convolutions + k * (n_flat + 1 + J) + J for k in (n - 1, n, n + 1)]
        assert found[1] == count_params(params[name])
        assert abs(found[1] - wanted) == min(abs(size - wanted) for size in found), (name, n)


# --- Defaults, and the parameters that a training starts from ---------------------------------------------------------


STORED = json.loads((DATA / "defaults.json").read_text())


@pytest.mark.parametrize("name", STORED)
def test_defaults_are_the_stored_ones(name: str) -> None:
    """Those of the settings, and of the constants, that a result, a picture or what is read depends on."""
    module, found = load(name), dict[str, Any]()
    for constant in STORED[name]:
        found[constant] = attrgetter(constant)(module)
        if constant in ("Config", "Options"):  # as without a flag; threads depend on the machine
            found[constant] = {k: x for k, x in dataclasses.asdict(found[constant]()).items() if k != "threads"}
    assert json.loads(json.dumps(found, default=str)) == STORED[name]


ROUTED = ("convcaps1", "convcaps2", "class")
OF_VIEWS = {"conv1.w": 2, "primary.w": 1, "class.w": 0.1, "class.beta_v": 0.3}
OF_GRIDS = {"conv1.w": 2, "primary.w": 2, **{f"{layer}.w": 0.1 for layer in ROUTED},
            **{f"{layer}.beta_v": math.log(2) - 0.2 for layer in ROUTED}}  # log 2 is -1/2 of the floor's logarithm
OF_CNN = {"conv1.w": 2, "hidden.w": 2, "out.w": 1}
BIASES = {"conv1.b": 0.01, "conv2.b": 0.01}  # of the CNNs of digits
GRIDS = {"sizes": (8, 2, 3, 2), "variance_floor": 0.25, "beta_v_init": -0.2}
DIGITS = {"conv_channels": 4, "primary_types": 2, "decoder": (30, 40)}
OF_CAPSNET = {"conv1.w": 2, "primary.w": 1, "routing.w": math.sqrt(8 / 200), "decoder1.w": math.sqrt(2 / 16),
              "decoder2.w": 2, "decoder3.w": 1}
INITIAL: list[tuple[Any, dict[str, Any], str, dict[str, Any]]] = [
    *((smallnorb, {"beta_v_init": 0.3, "dataset": dataset, **FILES[dataset]}, name, scales)
      for dataset in ("voxels", "smallnorb")
      for name, scales in (("capsules", OF_VIEWS), ("cnn", OF_CNN), ("cnn_matched", OF_CNN))),
    *((conv, {**GRIDS, "dataset": dataset, **FILES[dataset]}, name, scales)
      for dataset in ("mnist", "smallnorb")
      for name, scales in (("capsules", OF_GRIDS), ("cnn", {"conv1.w": 2, "conv2.w": 2, "conv3.w": 2, "out.w": 1}))),
    (multimnist, DIGITS, "capsnet", OF_CAPSNET),
    *((multimnist, DIGITS, name, OF_CNN | {"conv2.w": 2} | BIASES) for name in ("cnn", "cnn_pool")),
    (affine, {}, "lenet", BIASES | {"conv1.w": 2, "conv2.w": 2, "hidden1.w": 2, "hidden2.w": 2, "out.w": 1}),
]


@pytest.mark.parametrize(("script", "changes", "name", "scales"), INITIAL)
def test_initial_parameters(script: Any, changes: dict[str, Any], name: str, scales: dict[str, Any]) -> None:
    """Weights, named ".w", are Gaussian, with mean zero; those of matrix capsules are added to the identity. Their
    standard deviation, to a tenth, is the one given or, for a whole number, the root of that over the number of inputs.
    All else is constant: zero, or what is given."""
    init = script.make_models(script.Config(**changes))[name].init_params
    draws = [init(np.random.default_rng(0))]
    assert set(scales) <= set(draws[0])
    for key, first in draws[0].items():
        if not key.endswith(".w"):
            np.testing.assert_allclose(first, scales.get(key, 0.0), rtol=1e-6, err_msg=key)
            continue
        n, given = math.ceil(5000 / first.size), scales[key]  # as many draws as the moments need
        scale = math.sqrt(given / math.prod(first.shape[:-1])) if isinstance(given, int) else given
        draws += [init(np.random.default_rng(k)) for k in range(len(draws), n)]
        values = np.stack([draw[key] for draw in draws[:n]]) - (np.eye(4) if key.split(".")[0] in ROUTED else 0)
        assert values.std() == pytest.approx(scale, rel=0.1), key
        assert abs(values.mean()) < 5 * scale / math.sqrt(values.size), key
        assert abs(float(np.mean((values / values.std()) ** 4)) - 3) < 0.6, key  # a Gaussian's
    if name == "capsnet":
        default = multimnist.capsnet_init(np.random.default_rng(0), multimnist.Config())
        assert default["routing.w"].std() == pytest.approx(0.1, rel=0.01)


# --- The list of planted errors ---------------------------------------------------------------------------------------


def test_every_planted_error_can_still_be_planted() -> None:
    """Its text occurs once in its file, and the tests that must see it are there."""
    assert planted_errors.stale() == []
    assert len(planted_errors.ERRORS) >= 80
