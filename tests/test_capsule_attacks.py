"""attacks.py and capsule_attacks.py: gradients that an attacker follows, what the literature asks of attacks, runs.
Flags, checkpoints and results have their tests in test_contract.py; accuracies counted by hand in test_protocol.py."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import Mock

import numpy as np
import pytest

import multimnist_capsnet as multimnist
import smallnorb_novel_viewpoint as smallnorb
from fast.workers import SERIAL
from helpers import (
    Array, Capture, Patch, check_gradient, config_of, digits_folder, failure, smallest, surviving_mutants,
)
from more import attacks
from more import capsule_attacks as m
from more import conv_matrix_capsules as conv
from test_gradients import perturbed

SMALL = ["--n-train", "24", "--batch-size", "8", "--sizes", "5,2,3,2", "--n-epochs", "1", "--threads", "1", "--quiet"]
EPSILONS, SHORT = (0.02, 0.04, 0.6), attacks.Effort(first_steps=5, most_steps=40, queries=40)


# --- Gradients and losses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["matrix", "matrix of standardized images", "dense", "capsnet"])
@pytest.mark.parametrize(("name", "vote"), [("capsules", False), ("capsules", True), ("cnn", False)])
def test_the_gradients_that_an_attacker_follows(network: str, name: str, vote: bool, monkeypatch: Any) -> None:
    """Those of the network's own scores, the vote attack's among them, and through the standardisation of images: every
    loss against its finite differences. An image of one grey level has no gradient through that."""
    monkeypatch.setitem(multimnist.PRESETS, "small", {"conv_channels": 3, "primary_types": 1, "decoder": (8, 8)})
    monkeypatch.setattr(smallnorb, "CONV_CHANNELS", 2)
    monkeypatch.setattr(smallnorb.Config, "n_features", 16 * 16 * 2)
    flags = {"matrix": SMALL, "dense": ["--network=dense"], "capsnet": ["--network=capsnet", "--dataset=strokes"],
             "matrix of standardized images": [*SMALL, "--standardize=image"]}
    config: m.Config = config_of(m, [*flags[network], "--dtype=float64"])
    model, rng = m.make_models(config)[name], np.random.default_rng(0)
    params, labels = perturbed(model), np.array([3, 0])
    x = rng.random((2, 28, 28, 1) if network == "capsnet" else (2, 32, 32, 1))
    seen = m.attacked_network(config, name, params, SERIAL, vote)
    if network == "capsnet":
        own = model.assess(params, multimnist.Batch(x, labels[:, None], x[:, None]))[0]
    else:
        own = model.forward(params, smallnorb.standardized(x) if config.standardize == "image" else x)[0]
    assert vote == (np.abs(seen.scores(x) - own).max() > 1e-6)
    assert list(seen.losses) == ["", "_margin", *(["_cross_entropy"] if name == "capsules" else [])]
    for loss in (*seen.losses.values(), seen.towards(1)):
        scores, values, dx = seen.gradient(x, labels, loss)
        np.testing.assert_allclose(scores, seen.scores(x))
        np.testing.assert_allclose(values, loss(scores, labels)[0])
        check_gradient(
            lambda x, loss=loss: float(loss(seen.scores(x), labels)[0].sum()), {"x": x}, {"x": dx}, rng, step=1e-6
        )
    if config.standardize == "image":
        assert not seen.gradient(np.full_like(x, 0.3), labels, seen.losses["_margin"])[2].any()


@pytest.mark.parametrize(
    "config", [m.Config(network="dense", seed=3), m.Config(seed=3), m.Config(seed=3, standardize="image")]
)
def test_images_are_attacked_before_they_are_standardized_and_were_not_trained_on(config: m.Config) -> None:
    raw: Any = m.make_data(dataclasses.replace(config, standardize="none"))
    images, labels = m.attacked_images(config, m.make_data(config))
    tests = raw.familiar if config.network == "dense" else raw.test
    trained, tested = (
        {image.tobytes(): label for image, label in zip(part.images.astype(np.float32), part.labels, strict=True)}
        for part in (raw.train, tests)
    )
    assert len(images) >= 100
    assert (images.min() >= 0) & (images.max() <= 1)
    assert [tested[image.tobytes()] for image in images.astype(np.float32)] == labels.tolist()
    assert not trained.keys() & {image.tobytes() for image in images.astype(np.float32)}


def check_losses() -> None:
    rng = np.random.default_rng(5)
    a, labels = rng.uniform(0.01, 0.99, (7, 5)), rng.integers(0, 5, 7)
    z = np.log(a / (1 - a))
    cross_entropy = attacks.by_image(smallnorb.softmax_cross_entropy)
    for loss in (attacks.margin_loss, attacks.margin_to(2), cross_entropy):
        odds = attacks.of_log_odds(loss)
        values, da = odds(a, labels)
        check_gradient(lambda a, odds=odds: float(odds(a, labels)[0].sum()), {"a": a}, {"a": da}, rng)
        expected, dz = loss(z, labels)
        np.testing.assert_allclose(values, expected)
        np.testing.assert_allclose(da * a * (1 - a), dz, rtol=1e-9)  # through the sigmoid nothing of it is lost
    assert cross_entropy(z, labels)[0].mean() == pytest.approx(smallnorb.softmax_cross_entropy(z, labels)[0])
    scores = np.array([[3.0, 1.0, 2.0], [0.0, 0.5, 0.25]])
    np.testing.assert_allclose(attacks.margin_loss(scores, np.array([0, 2]))[0], [-1, 0.25])
    values, dscores = attacks.margin_to(2)(scores, np.array([0, 2]))  # of the second image it is the right class
    np.testing.assert_allclose(values, [-1, 0])
    np.testing.assert_allclose(dscores, [[-1, 0, 1], [0, 0, 0]])
    for dtype in (np.float64, np.float32):
        values, da = attacks.of_log_odds(cross_entropy)(np.array([[0, 1], [1, 0]], dtype), np.array([0, 0]))
        assert np.isfinite(values).all()
        assert np.isfinite(da).all()
        assert da.dtype == dtype


def test_losses_of_float32_keep_what_float64_has() -> None:
    """The gradient of a class that leads by 20 logits, which float32 rounds to 0, and activations near 0."""
    cross_entropy = attacks.by_image(smallnorb.softmax_cross_entropy)
    for loss, scores in {cross_entropy: [[20, 0, -3]], attacks.of_log_odds(attacks.margin_loss): [[0.5, 1e-12, 1e-20]],
                         attacks.of_log_odds(cross_entropy): [[0.9999, 1e-9, 1e-12]]}.items():
        exact, dexact = loss(np.array(scores, np.float64), np.zeros(1, np.intp))
        values, dscores = loss(np.array(scores, np.float32), np.zeros(1, np.intp))
        np.testing.assert_allclose(values, exact, rtol=1e-3)
        np.testing.assert_allclose(dscores, dexact, rtol=1e-3)
        assert dscores.dtype == np.float32
        assert dscores[0, 0] < 0


@pytest.mark.parametrize("name", ["margin_loss", "margin_to", "of_log_odds"])
def test_losses_and_that_their_test_sees_errors(name: str, monkeypatch: Patch) -> None:
    assert surviving_mutants(monkeypatch, attacks, name, check_losses) == []


# --- One attack -------------------------------------------------------------------------------------------------------


def parabola(target: Array) -> attacks.Attacked:
    """A network of one score, which is highest where the image is the ``target``, and whose loss is that score."""

    def loss(scores: Array, labels: Array) -> tuple[Array, Array]:
        return scores[:, 0], np.ones_like(scores)

    def forward(x: Array) -> tuple[Array, Array]:
        return -np.square(x - target[: len(x)]).sum(axis=(1, 2, 3))[:, None], x

    def backward(dscores: Array, x: Array) -> Array:
        return -2 * dscores[:, :, None, None] * (x - target[: len(x)])

    return attacks.network_of(forward, backward, {"": loss, attacks.MARGIN: loss}, 100)


def test_the_length_of_steps_is_checked_where_automatic_pgd_does() -> None:
    """[Croce and Hein 2020, section 3.2]: p = 0, 0.22, and each gap 0.03 shorter than the last, at least 0.06."""
    assert sorted(attacks.checks(100)) == [22, 41, 57, 70, 80, 87, 93, 99]
    assert sorted(attacks.checks(20)) == [5, 9, 12, 14, 16, 18, 19, 20]  # rounded up


def test_steps_by_hand() -> None:
    """The first step is as long as the box and ends on its edge. A quarter of it is added to the next one. A step that
    raises no loss is halved, from the best image so far."""
    images, labels, seen = np.full((1, 1, 2, 1), 0.5), np.zeros(1, np.intp), list[Array]()

    def steps(second: float, n_steps: int, start: tuple[float, float] | None = None) -> tuple[Array, Array]:
        """Of two pixels, of which the first wants to leave the box, and the second to be ``second``."""
        network = parabola(np.array([0.9, second]).reshape(1, 1, 2, 1))

        def gradient(x: Array, labels: Array, loss: attacks.Loss) -> tuple[Array, Array, Array]:
            seen.append(x.copy())
            return network.gradient(x, labels, loss)

        begin, loss = None if start is None else np.reshape(start, images.shape), network.losses[""]
        seen.clear()
        best = attacks.iterated(
            network._replace(gradient=gradient), images, labels, loss, 0.1, n_steps, (0.0, 1.0), begin, stop=False
        )
        return best.ravel(), np.array(seen).reshape(-1, 2)

    np.testing.assert_allclose(steps(0.45, 1)[0], [0.6, 0.4])
    np.testing.assert_allclose(steps(0.2, 1, (2, 2))[1], [[0.6, 0.6], [0.6, 0.4]])
    best, path = steps(0.44, 3, (0.6, 0.5))
    third = 0.4 + 0.75 * 0.1  # half as long, and from the best: without a quarter of the last step
    np.testing.assert_allclose(best, [0.6, third])
    np.testing.assert_allclose(path[:, 1], [0.5, 0.4, 0.4 + 0.75 * 0.2 - 0.25 * 0.1, third])
    np.testing.assert_allclose(path[1:, 0], 0.6)


def test_steps_are_halved_until_they_reach_what_no_step_of_the_first_size_would() -> None:
    rng = np.random.default_rng(2)
    images, target = rng.uniform(0.3, 0.7, (3, 4, 4, 1)), rng.uniform(0.2, 0.8, (3, 4, 4, 1))
    network, labels = parabola(target), np.zeros(3, np.intp)
    reached = np.clip(target, images - 0.1, images + 0.1)
    distances = [
        np.abs(attacks.iterated(network, images, labels, network.losses[""], 0.1, n, (0.0, 1.0)) - reached).max()
        for n in (5, 20, 80)
    ]
    assert distances[0] > 0.04 > distances[1] > distances[2]
    assert distances[2] < 0.01


# --- What the literature asks of attacks, on small networks that have learned ----------------------------------------


class Trained(NamedTuple):
    network: attacks.Attacked
    others: dict[str, attacks.Attacked]
    images: Array
    labels: Array

    def attacked(self, loss: str, epsilon: float, n_steps: int, **more: Any) -> Array:
        losses = self.network.losses
        return attacks.iterated(
            self.network, self.images, self.labels, losses[loss], epsilon, n_steps, m.PIXELS, **more
        )


@functools.cache
def trained_pair(seed: int, network: str) -> tuple[m.Config, Any, dict[str, Any]]:
    small: Any = {"n_train": 200, "batch_size": 16, "sizes": (6, 2, 2, 2), "n_epochs": 8, "cnn_epochs": 6}
    own = small if network == "matrix" else {"n_epochs": 10, "weight_decay": 1, "cnn_lr": 5e-4, "cnn_weight_decay": 0}
    config = m.Config(seed=seed, network=network, n_attack=20, **own)
    data = m.make_data(config)
    return config, data, m.train_all(config, data)


@functools.cache
def trained(name: str, dtype: str = "float32", seed: int = 101, network: str = "matrix") -> Trained:
    config, data, states = trained_pair(seed, network)
    config = dataclasses.replace(config, dtype=dtype)
    params = {one: {key: p.astype(dtype) for key, p in state.params.items()} for one, state in states.items()}
    seen = functools.partial(m.attacked_network, config, workers=SERIAL)
    other = "cnn" if name == "capsules" else "capsules"
    others = {f"from_{other}": seen(other, params[other])}
    if name == "capsules":
        others["vote"] = seen(name, params[name], vote=True)
    return Trained(seen(name, params[name]), others, *m.attacked_images(config, data))


@functools.cache
def found(
    name: str, seed: int = 101, epsilons: tuple[float, ...] = EPSILONS, effort: Any = SHORT, network: str = "matrix"
) -> attacks.Found:
    it, rng = trained(name, seed=seed, network=network), np.random.default_rng(0)
    return attacks.attack(it.network, it.others, it.images, it.labels, epsilons, m.PIXELS, rng, effort)


each_network = pytest.mark.parametrize("name", m.MODEL_NAMES)


@each_network
def test_what_is_stronger_leaves_fewer_images(name: str) -> None:
    """Greater epsilons, many steps, the network's own gradients, and all attacks together."""
    it, (clean, right, _) = trained(name), found(name)
    worst = right["worst_case"].mean(axis=1)
    assert clean.mean() >= 0.7  # guessing: 0.2
    assert clean.mean() > worst[0] > worst[1] >= worst[2] == 0
    for suffix in it.network.losses:
        assert not (right["iterated" + suffix] & ~right["fgsm" + suffix]).any()
    assert right["gradients"].sum() < right["fgsm"].sum()
    for other in it.others:
        assert (right["iterated_margin"].sum(axis=1) <= right[other].sum(axis=1)).all()
        assert right[other][-1].sum() < clean.sum()  # which misleads as well
    assert not (right["worst_case"] & ~np.all(list(right.values()), axis=0)).any()
    for kind in (kind for attack, kind in right.items() if "fgsm" not in attack):
        assert not (kind[1:] & ~kind[:-1]).any()
        assert not (kind[0] & ~clean).any()


@each_network
def test_more_steps_are_at_least_as_strong_as_fewer(name: str) -> None:
    it = trained(name)
    loss = it.network.losses["_margin"]
    values = [loss(it.network.scores(it.attacked("_margin", 0.1, n, stop=False)), it.labels)[0] for n in (0, 1, 5, 40)]
    for fewer, more in itertools.pairwise(values):
        assert fewer.mean() < more.mean()
        assert (fewer > 0).sum() <= (more > 0).sum()
    for rounds in found(name).convergence:
        accuracies = list(rounds.values())
        assert accuracies == sorted(accuracies, reverse=True)
        assert list(rounds) == [5 * 2**k for k in range(len(rounds))]
        assert max(rounds) == 40 or accuracies[-2] - accuracies[-1] < 0.01
        assert all(before - after >= 0.01 for before, after in itertools.pairwise(accuracies[:-1]))


@each_network
def test_a_search_without_gradients_wins_by_no_more_than_a_point(name: str) -> None:
    it, right = trained(name), found(name).right
    assert (right["gradients"].mean(axis=1) - right["worst_case"].mean(axis=1)).max() <= 0.01
    searched = functools.partial(attacks.squares, it.network, it.images, it.labels, EPSILONS[1], bounds=m.PIXELS)
    margins = [
        attacks.margin_loss(it.network.scores(searched(n_queries=n, rng=np.random.default_rng(1))), it.labels)[0].mean()
        for n in (0, 20, 150)
    ]
    assert margins[0] < margins[1] < margins[2]
    alone = ~attacks.misled(it.network, searched(n_queries=150, rng=np.random.default_rng(1)), it.labels)
    assert (right["gradients"][1] & ~alone).mean() <= 0.01


@each_network
def test_no_pixel_leaves_its_box(name: str) -> None:
    it, epsilon, rng = trained(name), 0.07, np.random.default_rng(3)
    start = rng.uniform(-1, 2, it.images.shape).astype(np.float32)
    for x in (it.attacked("_margin", epsilon, 12), it.attacked("", epsilon, 7, start=start, stop=False),
              attacks.squares(it.network, it.images, it.labels, epsilon, 9, m.PIXELS, rng)):
        assert (x.min(), x.max()) == (0, 1)
        assert np.abs(x - it.images).max() == pytest.approx(epsilon, abs=1e-6)
        assert x.dtype == np.float32


def of_pixels(
    scores: Callable[[Array], list[Array]], told: Callable[[Array], Array] | None = None,
    slope: Callable[[Array], Array] = np.zeros_like,
) -> attacks.Attacked:
    """A network of single pixels, with the score of each class; and what an attacker learns: the loss that he asks
    for, or another one, and its gradient."""

    def of_classes(x: Array) -> Array:
        return np.stack(scores(x.ravel()), axis=1)

    def gradient(x: Array, labels: Array, loss: attacks.Loss) -> tuple[Array, Array, Array]:
        values = told(x.ravel()) if told else loss(of_classes(x), labels)[0]
        return of_classes(x), values, slope(x)

    return attacks.Attacked(of_classes, gradient, {attacks.MARGIN: attacks.margin_loss})


def right_under_attack(
    network: attacks.Attacked, pixel: float, epsilon: float = 0.1, n: int = 2, steps: tuple[int, int] = (20, 20),
    **others: attacks.Attacked,
) -> dict[str, Array]:
    """Which of ``n`` images of one pixel stay right, by attack; without the search."""
    images, labels, rng = np.full((n, 1, 1, 1), pixel), np.zeros(n, np.intp), np.random.default_rng(0)
    effort = attacks.Effort(*steps, queries=0)
    return attacks.attack(network, others, images, labels, (epsilon,), m.PIXELS, rng, effort).right


def test_the_vote_attacks_from_random_starts_too() -> None:
    """A network without gradients errs at the upper end of the box. The other network leads away from the middle: from
    the image, which lies below it, down, and from half of the starts up. As any other, it attacks from the image."""
    network = of_pixels(lambda x: [0.59 - x, 0 * x])
    outward = of_pixels(lambda x: [0.59 - x, 0 * x], lambda x: np.abs(x - 0.5), lambda x: x - 0.5)
    left = {}
    for name in (attacks.VOTE, "from_cnn"):
        others: dict[str, Any] = {name: outward}
        right = right_under_attack(network, 0.499, n=40, steps=(4, 16), **others)
        assert right[name].all()
        left[name] = right["gradients"].mean()
    assert left[attacks.VOTE] < 0.1 < 0.5 < left["from_cnn"]


def test_an_image_that_is_misled_stays_misled() -> None:
    """The loss falls where a start misleads, so that the steps would lead back; and it goes on to rise where an image
    is misled on the way, so that twenty steps do no less than one."""
    falling = of_pixels(lambda x: [0.55 - x, x - 0.55], lambda x: -x, lambda x: -np.ones_like(x))
    images = np.full((1, 1, 1, 1), 0.5)
    kept, left = (attacks.iterated(falling, images, np.zeros(1, np.intp), attacks.margin_loss, 0.1, 3, m.PIXELS,
                                   images + 0.08, stop) for stop in (True, False))
    assert kept == 0.58
    assert left < 0.5
    rising = of_pixels(lambda x: [0 * x + 0.35, x], lambda x: 1 - x, lambda x: np.where(x < 0.3, 1.0, -1.0))
    right = right_under_attack(rising, 0.2, epsilon=0.2)
    for kind in ("fgsm", "iterated"):
        assert not right[kind + attacks.MARGIN].any(), kind


def test_an_attack_along_another_network_goes_on_where_that_one_errs() -> None:
    """The other network errs everywhere. Its first gradient leads down, all later ones up, to where the attacked one
    errs."""
    ways = itertools.chain([-1.0], itertools.repeat(1.0))
    down_and_up = of_pixels(lambda x: [0 * x, 1 + x], lambda x: x, lambda x: np.full_like(x, next(ways)))
    right = right_under_attack(of_pixels(lambda x: [0.55 - x, 0 * x]), 0.5, from_cnn=down_and_up)
    assert right["iterated" + attacks.MARGIN].all()
    assert not right["from_cnn"].any()


def test_the_attacks_towards_each_class_reach_what_the_greatest_wrong_score_leads_away_from() -> None:
    """That of class 1 is the greatest at the image, and never exceeds the right one's; that of class 2 does, but rises
    in the other direction."""
    slopes = np.array([[0.0], [-0.9], [6.0]])

    def forward(x: Array) -> tuple[Array, Any]:
        return x.reshape(-1, 1) @ slopes.T + [0, 0.35, -3.5], x.shape

    network = attacks.network_of(forward, lambda dscores, shape: (dscores @ slopes).reshape(shape),
                                 {attacks.MARGIN: attacks.margin_loss}, 100)
    right = right_under_attack(network, 0.5)
    assert right["iterated" + attacks.MARGIN].all()
    assert not right["targeted"].any()
    assert not right["gradients"].any()


def test_the_vote_routes_all_layers_but_the_last(monkeypatch: Patch) -> None:
    network = vars(m.network_config(config_of(m, [*SMALL, "--dataset=voxels"])))
    config = conv.Config(**{**network, "em_iters": 3, "lambda_first": 0.5})
    monkeypatch.setattr(conv, "FAST", conv.FAST._replace(forward=(routed := Mock(wraps=conv.FAST.forward))))
    model = m.voting(config)
    model.forward(perturbed(model), np.random.default_rng(0).random((2, 32, 32, 1)))
    seen = [(call.args[2].shape[0] == 1, call.args[5]) for call in routed.call_args_list]  # of w, and the temperatures
    assert seen == [(False, [0.5, 0.75, 1]), (False, [0.5, 0.75, 1]), (True, [1])]


# --- Against a well-kept library --------------------------------------------------------------------------------------


def art_classifier(it: Trained, loss: attacks.Loss, as_logits: Callable[[Array], Array]) -> Any:
    """The network as the Adversarial Robustness Toolbox sees it: logits, losses and their gradient."""
    classification = pytest.importorskip("art.estimators.classification")
    estimators = pytest.importorskip("art.estimators.estimator")
    mixins = (estimators.NeuralNetworkMixin, estimators.LossGradientsMixin, classification.ClassifierMixin)
    classes = (*mixins, estimators.BaseEstimator)

    class Wrapped(*classes):  # type: ignore[misc]
        input_shape = it.images.shape[1:]

        def predict(self, x: Array, batch_size: int = 128, **_: Any) -> Array:
            return as_logits(it.network.scores(x.astype(np.float32)))

        def loss_gradient(self, x: Array, y: Array, **_: Any) -> Array:
            return it.network.gradient(x.astype(np.float32), y.argmax(axis=1), loss)[2]

        def compute_loss(self, x: Array, y: Array, **_: Any) -> Array:
            return loss(it.network.scores(x.astype(np.float32)), y.argmax(axis=1))[0]

        def fit(self, x: Array, y: Array, batch_size: int = 1, nb_epochs: int = 1, **_: Any) -> None:
            pytest.fail("an attack trains the network")

        def get_activations(self, *_: Any, **__: Any) -> Array:
            pytest.fail("an attack asks for what lies inside the network")

    wrapped = Wrapped(model=None, clip_values=m.PIXELS, channels_first=False)
    wrapped.nb_classes = 5
    return wrapped


def art_accuracy(it: Trained, epsilon: float, n_steps: int, n_starts: int, queries: int) -> dict[str, float]:
    """Under the library's automatic PGD, on the margin and the cross-entropy, and under its square attack."""
    evasion = pytest.importorskip("art.attacks.evasion")
    own = it.network.losses
    is_odds = "_cross_entropy" in own
    losses = {"margin": own["_margin"], "cross-entropy": own["_cross_entropy" if is_odds else ""]}

    def as_logits(scores: Array) -> Array:
        return np.log(scores) - np.log1p(-scores) if is_odds else scores

    # The library draws from the global generator.
    one_hot, right = np.eye(5)[it.labels], {}
    np.random.seed(0)  # noqa: NPY002
    for name, loss in losses.items():
        pgd = evasion.AutoProjectedGradientDescent(
            art_classifier(it, loss, as_logits), eps=epsilon, eps_step=2 * epsilon, max_iter=n_steps,
            nb_random_init=n_starts, loss_type=None, verbose=False, batch_size=len(it.images),
        )
        right[name] = ~attacks.misled(it.network, pgd.generate(it.images, one_hot), it.labels)
    square = evasion.SquareAttack(
        art_classifier(it, own["_margin"], as_logits), eps=epsilon, max_iter=queries, verbose=False
    )
    right["square"] = ~attacks.misled(it.network, square.generate(it.images.copy(), one_hot), it.labels)
    right["all"] = np.all(list(right.values()), axis=0)
    return {name: float(one.mean()) for name, one in right.items()}


@pytest.mark.parametrize("network", ["matrix", "dense"])
@pytest.mark.parametrize("seed", [101, 102])
@each_network
def test_the_library_finds_no_more_than_a_point_more(name: str, seed: int, network: str) -> None:
    """Automatic PGD and the square attack of the Adversarial Robustness Toolbox, where it is installed."""
    pytest.importorskip("art")
    epsilon = EPSILONS[1] if network == "matrix" else 0.05 if name == "capsules" else 0.1
    library = art_accuracy(trained(name, seed=seed, network=network), epsilon, n_steps=20, n_starts=2, queries=40)
    ours = found(name, seed, (epsilon,), attacks.DEFAULT, network)
    assert ours.right["worst_case"].mean() <= library["all"] + 0.01
    assert 0 < library["all"] < library["square"] <= ours.clean.mean()


# --- Runs -------------------------------------------------------------------------------------------------------------


def test_the_dense_networks_are_those_of_their_own_script() -> None:
    config = m.Config(network="dense", n_epochs=2, weight_decay=1, seed=3)
    own = smallnorb.Config(dataset="shapes", n_epochs=2, weight_decay=1, cnn_lr=1.25e-4, seed=3)
    assert m.dense_config(config) == own
    given = m.Config(network="dense", lr=0.1, cnn_epochs=3)
    assert (given.lr, given.cnn_lr, given.n_epochs, given.cnn_epochs, given.cnn_weight_decay) == (0.1, 0.1, 80, 3, 3)
    states = m.train_all(config, m.make_data(config))
    expected = smallnorb.train_all(own, smallnorb.make_data(own), names=("capsules",))["capsules"]
    assert states["capsules"].history == expected.history
    assert states["cnn"].step == states["capsules"].step == 2 * 15
    assert sum(p.size for p in states["cnn"].params.values()) == 558_293


def test_the_networks_are_those_of_the_other_script() -> None:
    flags = [*SMALL, "--n-epochs=2", "--cnn-epochs=1", "--seed=103"]
    assert m.network_config(m.Config(dataset="toys")).held_out == "nothing"
    for dataset in ("strokes", "mnist"):
        assert m.network_config(m.Config(dataset=dataset)).n_classes == 10
    config, other = config_of(m, flags), config_of(conv, [*flags, "--dataset=shapes", "--standardize=none"])
    states, expected = m.train_all(config, m.make_data(config)), conv.train_all(other, conv.make_data(other))
    for name, state in states.items():
        assert state.history["train_loss"] == expected[name].history["train_loss"]
        assert state.history["accuracy"] == expected[name].history["familiar_accuracy"]
        assert len(state.history["accuracy"]) == (1 if name == "cnn" else 2)


def test_the_capsnet_is_that_of_the_other_script(monkeypatch: Patch) -> None:
    """The same digits in the same order, at its rates; the CNN has the same name, and so the same initial weights."""
    config = m.Config(dataset="mnist", data_dir=digits_folder(), network="capsnet", n_epochs=1, seed=104, n_train=64)
    own = m.capsnet_config(config)
    assert own == m.affine.Config(dataset="mnist", data_dir=digits_folder(), n_epochs=1, seed=104, n_train=64)
    small = dataclasses.replace(own, n_val=8, conv_channels=3, primary_types=1)
    resolved = m.affine.resolve_defaults(small, m.affine.make_data(small))
    monkeypatch.setattr(m, "capsnet_config", lambda config, data=None: resolved if data else small)
    monkeypatch.setattr(m.affine, "update", update := Mock(wraps=m.affine.update))
    data: Any = m.make_data(config)
    states = m.train_all(config, data)
    expected = m.affine.train_all(resolved, data, names=["capsnet", "cnn"])
    assert states["cnn"].history == expected["cnn"].history
    rates = [call.args[2] for call in update.call_args_list]
    assert (rates[:8], len(rates)) == (rates[8:], 16)
    images, labels = m.attacked_images(dataclasses.replace(config, n_attack=5), data)
    chosen = np.linspace(0, 299, 5).round().astype(int)  # of the test digits
    np.testing.assert_allclose(images[..., 0], data.test_images[chosen] / 255, atol=1e-6)
    assert labels.tolist() == data.test_labels[chosen].tolist()


def test_each_network_is_attacked_along_its_own_gradient_the_others_and_a_second_training(monkeypatch: Patch) -> None:
    """The second one has the same images and the next seed."""
    asked, config = list[Any](), m.Config(seed=7, epsilons=(0.1, 0.3))
    first = {name: smallnorb.TrainState(name, {"of": np.array(7)}) for name in m.MODEL_NAMES}

    def train_all(config: m.Config, data: Any, options: Any, names: list[str]) -> dict[str, Any]:
        asked.append((config, data, options.threads, names))
        return {name: smallnorb.TrainState(name, {"of": np.array(config.seed)}) for name in names}

    def seen(config: m.Config, name: str, params: Any, workers: Any, vote: bool = False) -> tuple[Any, ...]:
        return (config.seed, name, int(params["of"]), vote)

    monkeypatch.setattr(m, "train_all", train_all)
    monkeypatch.setattr(m, "attacked_images", lambda config, data: (f"images of {data}", "labels"))
    monkeypatch.setattr(m, "attacked_network", seen)
    monkeypatch.setattr(attacks, "attack", lambda *given: given)
    found: Any = m.attack_all(config, first, cast("m.AnyData", "data"), 2)
    assert asked == [(dataclasses.replace(config, seed=8), "data", 2, ["capsules", "cnn"])]
    others = {
        "capsules": {"from_cnn": (7, "cnn", 7, False), "from_other_seed": (7, "capsules", 8, False),
                     "vote": (7, "capsules", 7, True)},
        "cnn": {"from_capsules": (7, "capsules", 7, False), "from_other_seed": (7, "cnn", 8, False)},
    }
    for name, (*given, rng) in found.items():
        assert given == [(7, name, 7, False), others[name], "images of data", "labels", (0.1, 0.3), m.PIXELS]
        assert rng.random() == m.generator(7, m.Stream.EVALUATION, *name.encode()).random()
    alone: Any = m.attack_all(config, {"cnn": first["cnn"]}, cast("m.AnyData", "data"))
    assert alone["cnn"][1].keys() == {"from_other_seed"}
    m.attack_all(dataclasses.replace(config, seed=2**32 - 1), {"cnn": first["cnn"]}, cast("m.AnyData", "data"))
    assert asked[-1][0].seed == 0, "the next seed after the last"


def test_accuracies_of_both_are_those_of_the_images_that_every_network_classifies_correctly() -> None:
    clean = {"capsules": [True, True, False, True, False], "cnn": [True, False, False, True, True]}
    under = {"capsules": [False, True, False, True, False], "cnn": [True, False, False, True, True]}
    states, found = {name: smallnorb.TrainState(name, {}) for name in clean}, dict[str, attacks.Found]()
    for name, state in states.items():
        state.append({"accuracy": 0.6})
        right = dict.fromkeys(("fgsm", "worst_case"), np.array([under[name]]))
        found[name] = attacks.Found(np.array(clean[name]), right, [{20: 0.5}])
    config, data = m.Config(epsilons=(0.1,)), SimpleNamespace(name="shapes")
    result = m.make_result(config, states, found, data)
    assert (result["n_both"], result["config"]["n_attack"]) == (2, 5)  # of fewer than --n-attack asks for
    of_both = {name: kinds["fgsm"] for name, kinds in result["attack_of_both"].items()}
    assert of_both == {"capsules": {"0": 1.0, "0.1": 0.5}, "cnn": {"0": 1.0, "0.1": 1.0}}
    alone = m.make_result(config, {"cnn": states["cnn"]}, {"cnn": found["cnn"]}, data)
    assert ["that both classify" in m.format_table(those) for those in (result, alone)] == [True, False]
    for name, images in (("voxels", "familiar"), ("toys", "test"), ("mnist", "test")):
        assert m.describe(result | {"dataset": name}).startswith(f"{name}: {images} images attacked")


def test_saved_networks_are_attacked_again_with_fewer_epsilons(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    smallest(monkeypatch)
    out, fewer = tmp_path / "out.json", tmp_path / "fewer.json"
    argv = [*SMALL, "--models=cnn", "--n-attack=6", f"--checkpoint={tmp_path / 'c.npz'}"]
    assert m.main([*argv, "--epsilons=0.1,0.5", f"--out-json={out}"]) == 0
    line = failure(m, [*argv, "--epsilons=0.1", f"--out-json={out}"], capsys)  # which would lose the other one
    assert "was made with --epsilons 0.1,0.5, not 0.1" in line
    assert m.main([*argv, "--epsilons=0.1", "--resume", f"--out-json={fewer}"]) == 0
    one, other = (json.loads(path.read_text())["attack"]["cnn"] for path in (out, fewer))
    assert other == {kind: {epsilon: found[epsilon] for epsilon in ("0", "0.1")} for kind, found in one.items()}
