"""capsule_attacks.py: the gradient that an attacker follows, the attacks, and runs. Flags, checkpoints and results have
their tests in test_contract.py; accuracies under attack, counted by hand, in test_protocol.py."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smallnorb_novel_viewpoint as views
from fast.workers import Workers
from helpers import GradientError, check_gradient, config_of, surviving_mutants
from more import capsule_attacks as m
from more import conv_matrix_capsules as conv
from test_gradients import network_of, perturbed

Array = np.ndarray
SMALL = ["--n-train", "24", "--batch-size", "8", "--sizes", "5,2,3,2", "--n-epochs", "1", "--threads", "1"]


def attack_config(*flags: str) -> m.Config:
    config: m.Config = config_of(m, [*SMALL, *flags])
    return config


# --- Gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", m.MODEL_NAMES)
@pytest.mark.parametrize("loss", ["spread", "cross-entropy"])
def test_the_gradient_that_an_attacker_follows(name: str, loss: str) -> None:
    model, x, _ = network_of(conv, name, loss=loss)
    params, labels = perturbed(model), np.array([3, 0])
    losses = m.attack_losses(model, attack_config("--dataset", "voxels", "--loss", loss))
    assert list(losses) == (["", "_log_odds"] if loss == "spread" else [""])
    for attacked in losses.values():
        grad = m.image_gradient(model, params, x, labels, attacked)
        assert (np.abs(grad).max(axis=(1, 2, 3)) > 0).all()
        check_gradient(
            lambda x, attacked=attacked: attacked(model.forward(params, x)[0], labels)[0], {"x": x}, {"x": grad},
            np.random.default_rng(0), step=1e-6,
        )


def check_log_odds() -> None:
    rng = np.random.default_rng(5)
    a, labels = rng.uniform(0.01, 0.99, (7, 5)), rng.integers(0, 5, 7)
    z = np.log(a / (1 - a))
    expected, dz = views.softmax_cross_entropy(z, labels)
    loss, da = m.log_odds_cross_entropy(a, labels)
    check_gradient(lambda a: m.log_odds_cross_entropy(a, labels)[0], {"a": a}, {"a": da}, rng)
    assert loss == pytest.approx(expected)
    np.testing.assert_allclose(da * a * (1 - a), dz, rtol=1e-9)  # through the sigmoid nothing of it is lost
    assert m.log_odds_cross_entropy(np.array([[1e-12, 0.5]]), np.array([0]))[0] == pytest.approx(12 * np.log(10))
    for dtype in (np.float64, np.float32):
        loss, da = m.log_odds_cross_entropy(np.array([[0, 1], [1, 0]], dtype), np.array([0, 0]))
        assert np.isfinite(loss)
        assert np.isfinite(da).all()
        assert da.dtype == dtype


def test_the_log_odds_loss_and_that_its_test_sees_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert surviving_mutants(monkeypatch, m, "log_odds_cross_entropy", check_log_odds) == []


# --- Attacks ----------------------------------------------------------------------------------------------------------


def check_attack() -> None:
    """Against a loop over pixels, on a loss that is highest at a target which a large step passes by."""
    rng = np.random.default_rng(4)
    images, target = rng.random((3, 2, 2, 1)), rng.uniform(-0.3, 1.3, (3, 2, 2, 1))
    model = conv.Model(
        "parabola",
        lambda rng: {},
        lambda params, x: (x, None),
        lambda dscores, cache, need_dx=False: ({}, dscores),
        lambda scores, labels, progress: loss(scores, labels),
    )

    def loss(scores: Array, labels: Array) -> tuple[float, Array]:
        return -float(np.square(scores - target).sum()), -2 * (scores - target)

    labels = np.zeros(3, np.intp)
    for epsilon, n_steps, low, high in ((0.3, 1, 0.0, 1.0), (0.3, 4, 0.0, 1.0), (0.5, 3, -0.25, 0.75)):
        expected = images - 0.25 * (low < 0)
        start = expected.copy()
        for index in np.ndindex(images.shape):
            pixel = float(start[index])
            for _ in range(n_steps):
                pixel += epsilon / n_steps * (1 if target[index] > pixel else -1)
                pixel = min(max(pixel, start[index] - epsilon, low), start[index] + epsilon, high)
            expected[index] = pixel
        found = m.attack(model, {}, start, labels, loss, epsilon, n_steps, (low, high))
        if not np.allclose(found, expected, rtol=1e-12, atol=1e-12):
            raise GradientError(f"a pixel is off by {np.abs(found - expected).max():.3g}")


def test_an_attack_is_the_loop_over_pixels_and_errors_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert surviving_mutants(monkeypatch, m, "attack", check_attack) == []


@pytest.mark.parametrize(("standardize", "low", "high"), [("none", 0.0, 1.0), ("image", -np.inf, np.inf)])
def test_attacked_views_stay_in_the_range_of_their_pixels(
    standardize: str, low: float, high: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["--epsilons", "0.4", "--n-attack", "20"]
    config = attack_config("--dataset", "voxels", *more, "--standardize", standardize)
    config = dataclasses.replace(config, attack_steps=2)
    assert config.pixel_range == (low, high)
    data, original = m.make_data(config), m.attack
    found: dict[int, list[Array]] = {1: [], 2: []}  # by the number of steps

    def spy(*args: Any) -> Array:
        moved = original(*args)
        found[args[6]].append(moved)
        return moved

    monkeypatch.setattr(m, "attack", spy)
    m.attack_all(config, m.train_all(config, data), data)
    for images in found.values():
        pixels = np.concatenate([x.ravel() for x in images])
        # the capsules along two losses, and the CNN, whose loss has both names, once
        assert len(pixels) == 3 * 20 * 32 * 32
        if standardize == "none":
            assert (pixels.min(), pixels.max()) == (low, high)
        else:
            assert pixels.max() > data.test.images.max()


def test_attacks_use_exact_gradients_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    config = attack_config("--n-attack", "5")
    seen: list[Any] = []

    def spy(
        model: conv.Model, params: m.Params, examples: conv.Examples, config: m.Config, workers: Workers
    ) -> dict[str, Any]:
        dtypes = {p.dtype for p in params.values()}
        exact = m.exact_config(config)
        seen.append((exact.em_grad, exact.dtype, dtypes, len(examples.labels)))
        return {}

    monkeypatch.setattr(m, "robustness", spy)
    data = m.make_data(config)
    m.attack_all(config, m.train_all(config, data), data)
    assert seen == [("exact", "float64", {np.dtype(np.float64)}, 5)] * 2


# --- Runs -------------------------------------------------------------------------------------------------------------


def test_the_networks_are_those_of_the_other_script() -> None:
    config = attack_config("--n-epochs", "2", "--cnn-epochs", "1", "--seed", "103")
    assert m.network_config(m.Config(dataset="toys")).held_out == "nothing"
    states = m.train_all(config, m.make_data(config))
    other = config_of(conv, [*SMALL, "--dataset", "shapes", "--standardize", "none", "--n-epochs", "2",
                             "--cnn-epochs", "1", "--seed", "103"])
    expected = conv.train_all(other, conv.make_data(other))
    for name, state in states.items():
        assert state.history["train_loss"] == expected[name].history["train_loss"]
        assert state.history["accuracy"] == expected[name].history["familiar_accuracy"]
        assert len(state.history["accuracy"]) == (1 if name == "cnn" else 2)


def test_a_run_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, checkpoint = tmp_path / "out.json", tmp_path / "c.npz"
    argv = [*SMALL, "--epsilons", "0.1,0.5", "--n-attack", "6", "--checkpoint", str(checkpoint)]
    assert m.main([*argv, "--loss", "spread", "--out-json", str(out)]) == 0
    printed, error = capsys.readouterr()
    assert error == ""
    result = json.loads(out.read_text())
    assert (result["dataset"], result["headline"]) == ("shapes", "accuracy")
    assert "epsilon in the range of pixels" in printed.splitlines()[0]
    for name, model in result["models"].items():
        assert model["accuracy"] == result["history"][name]["accuracy"][-1]
        for kind in ("fgsm", "iterated", "fgsm_log_odds", "iterated_log_odds", "worst_case"):
            accuracies = result["attack"][name][kind]
            assert list(accuracies) == ["0", "0.1", "0.5"]
            (line,) = (line for line in printed.splitlines() if line.startswith(f"{name}: {kind.replace('_', ' ')}  "))
            assert line.split(":")[1].split()[-3:] == [f"{accuracy:.3f}" for accuracy in accuracies.values()]
            for epsilon, accuracy in accuracies.items():
                assert 0 <= accuracy <= 1
                assert model[f"{kind}_{epsilon}_accuracy"] == accuracy

    # the same networks attacked again, and by other attacks
    again = [*argv, "--loss", "spread", "--resume", "--out-json", str(out)]
    assert m.main(again) == 0
    assert json.loads(out.read_text())["attack"] == result["attack"]
    assert m.main([*again, "--epsilons", "0.1", "--threads", "2"]) == 0
    other = json.loads(out.read_text())
    assert other["history"] == result["history"]
    for name in m.MODEL_NAMES:
        assert other["models"][name]["worst_case_0.1_accuracy"] == result["models"][name]["worst_case_0.1_accuracy"]
