"""what_routing_does: each study on a case whose answer is known. Gradients: test_gradients."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multimnist_capsnet as multimnist
from fast.workers import SERIAL, Workers
from figure_checks import check_held, drawn, move_to
from helpers import Array, Capture, Patch, config_of, digits_folder, states_of
from more import conv_matrix_capsules as conv, visualize_what_routing_does as figures, what_routing_does as study
from recorded import check
from smallnorb_novel_viewpoint import TrainState


def test_the_study_of_the_routing_by_hand(monkeypatch: Patch) -> None:
    monkeypatch.setattr(multimnist, "EVALUATION_BATCH", 5)
    config = multimnist.Config(
        dataset="mnist", data_dir=digits_folder(), conv_channels=2, primary_types=1, decoder=(16, 16), n_test=20,
        dtype="float64", routing_iters=2,
    )
    data = multimnist.make_data(config)
    params = {key: 3 * p for key, p in multimnist.capsnet_init(np.random.default_rng(0), config).items()}
    with Workers(2) as workers:
        found = study.routing_study(config, params, data.test, workers)
    labels = [set(pair) for pair in data.test.labels]
    drawn = study.random_couplings(config.n_primary, config.n_classes)

    def outputs(n_iters: int = 2, **names: str) -> tuple[list[set[int]], Array]:
        other, parts = dataclasses.replace(config, routing_iters=n_iters), study.make_parts(config, **names)
        parts = parts if names else multimnist.PLAIN
        lengths, cache = multimnist.capsnet_forward(params, data.test.images.astype(float), other, parts)
        return [set(np.argsort(-row)[:2].tolist()) for row in lengths], drawn if names else cache.routing.c[-1]

    conditions: dict[str, dict[str, Any]] = {f"iters_{n}": {"n_iters": n} for n in range(1, 6)}
    conditions["random"] = {"assignments": "random"}
    assert list(found) == [f"{name}_{kind}" for name in conditions for kind in ("accuracy", "changed", "entropy")]
    trained_pairs, _ = outputs()
    for name, changes in conditions.items():
        pairs, c = outputs(**changes)
        assert found[f"{name}_accuracy"] == np.mean([a == b for a, b in zip(pairs, labels, strict=True)])
        assert found[f"{name}_changed"] == np.mean([a != b for a, b in zip(pairs, trained_pairs, strict=True)])
        assert found[f"{name}_entropy"] == pytest.approx(-(c * np.log(c)).sum(axis=-1).mean() / np.log(10))
    assert found["iters_2_changed"] == 0 < found["random_changed"]
    assert found["iters_1_entropy"] == pytest.approx(1)


# --- The studies as they are run --------------------------------------------------------------------------------------


def test_without_a_bias_a_pose_and_its_negative_are_one(tmp_path: Path, monkeypatch: Patch) -> None:
    """The negatives are those of the same poses. In float64."""
    votes_forward, sizes, last = study.smallnorb.votes_forward, list[int](), dict[str, Array]()

    def spy(pose: Array, w: Array) -> Any:
        sizes.append(len(pose))
        last.update(pose=pose, w=w)
        np.testing.assert_array_equal(pose[len(pose) // 2 :], -pose[: len(pose) // 2])
        return votes_forward(pose, w)

    monkeypatch.setattr(study.smallnorb, "votes_forward", spy)
    monkeypatch.setattr(study.smallnorb, "Config", functools.partial(study.smallnorb.Config, dtype="float64"))
    assert study.main(["--study", "signs", "--seed", "3", f"--out-json={tmp_path / 'out.json'}"]) == 0
    assert sizes == 2 * [*[2 * 16] * 300, 2 * 500]  # of training and test
    metrics = json.loads((tmp_path / "out.json").read_text())["models"]["capsules"]
    assert metrics["sign_accuracy"] == 0.5
    assert metrics["biased_sign_accuracy"] > 0.95
    assert metrics["n_params"] == 8 * 2 * 16 + 2 * (1 + 1)  # without the bias
    check("signs", [metrics, last])


def small(monkeypatch: Patch) -> None:
    """Make the networks and sets of all studies small."""
    network_config = study.network_config

    def smaller(config: study.Config) -> Any:
        found = network_config(config)
        if config.study == "shapes":
            few = {"n_train_views": 2, "n_test_views": 2, "n_elev": 1, "n_per_combo": 1, "sizes": (3, 2, 2, 2)}
            return dataclasses.replace(found, dtype="float64", batch_size=4, **few)
        sizes = {"conv_channels": 2, "primary_types": 1, "decoder": (16, 16), "n_train": 64, "n_test": 30}
        own = {"n_val": 16, "match_accuracy": None, "check_every": 500} if config.study == "affnist" else {}
        return dataclasses.replace(found, dtype="float64", batch_size=16, **sizes, **own)

    monkeypatch.setattr(study, "network_config", smaller)


VARIANTS = [
    "", "--assignments even", "--loss cross-entropy", "--vote-bias learned",
    "--study composites", "--study composites --assignments even --transform shared",
    "--study composites --assignments random --activation relu --loss cross-entropy --recon-weight 0",
    "--study composites --activation published --n-val 16", "--study couplings",
    "--study affnist", "--study affnist --assignments even --activation relu",
]


@pytest.mark.parametrize("words", VARIANTS)
def test_a_study_from_the_command_line(words: str, monkeypatch: Patch, tmp_path: Path, capsys: Capture) -> None:
    """It trains, tests, saves, and goes on from what is saved to the bits of an unbroken run."""
    small(monkeypatch)
    argv = [*words.split(), "--n-epochs=2", "--quiet"]
    if "study" in words:
        argv.append(f"--data-dir={digits_folder()}")
    whole, again, saved = tmp_path / "whole.json", tmp_path / "again.json", tmp_path / "c.npz"
    assert study.main([*argv, f"--out-json={whole}"]) == 0
    printed = re.sub(r"(?<=train_seconds) .*", "", capsys.readouterr().out).replace(str(digits_folder()), "FOLDER")

    config = config_of(study, argv)
    options = study.Options(quiet=True, checkpoint=saved)

    def stop(state: Any, epoch_ended: bool) -> None:
        if state.step and not epoch_ended and len(state.history.get("train_loss", [])) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study.run(config, options, callback=stop)[0]
    assert study.main([*argv, f"--out-json={again}", f"--checkpoint={saved}", "--resume"]) == 0
    one, other = (json.loads(path.read_text()) for path in (whole, again))
    assert one["history"] == other["history"]
    check(f"what_routing_does {words}", {"history": one["history"], "models": one["models"], "printed": printed})
    ((name, metrics),) = one["models"].items()
    assert 0 <= metrics[one["headline"]] <= 1
    assert {k: v for k, v in metrics.items() if k != "train_seconds"}.items() <= other["models"][name].items()


@pytest.mark.parametrize("name", ["shapes", "composites", "affnist"])
def test_a_study_in_its_plain_form_is_the_fast_one_with_the_settings_of_the_run(name: str, monkeypatch: Patch) -> None:
    small(monkeypatch)
    own: dict[str, Any] = {"seed": 7, "n_epochs": 1, "lr": 0.002}
    folder, losses = None if name == "shapes" else digits_folder(), []
    for plain in (False, True):
        config = study.Config(study=name, data_dir=folder, plain=plain, **own)
        assert vars(study.network_config(config)).items() >= (own | {"plain": plain}).items()
        (history,) = study.run(config)[0]["history"].values()
        losses.append(history["train_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


@pytest.mark.parametrize("loss", ["spread", "cross-entropy"])
def test_class_capsules_have_a_bias_where_the_loss_sees_their_poses(loss: str) -> None:
    model = study.matrix_capsules(conv.Config(dataset="shapes", loss=loss), vote_bias="learned")
    biases = {key for key in model.init_params(np.random.default_rng(0)) if key.endswith(".bias")}
    assert biases == {"convcaps1.bias", "convcaps2.bias"} | ({"class.bias"} if loss == "cross-entropy" else set())


def test_the_published_code_divides_primary_capsules_alone() -> None:
    parts, s = study.make_parts(multimnist.Config(), activation="published"), np.linspace(-3, 3, 16).reshape(2, 8)
    np.testing.assert_array_equal(parts.primary.forward(s)[0], multimnist.squash_forward(s / 32 + 0.1)[0])
    np.testing.assert_array_equal(parts.digit.forward(s)[0], multimnist.squash_forward(s + 0.1)[0])


def test_without_a_variant_the_network_is_that_of_the_base_script(monkeypatch: Patch) -> None:
    small(monkeypatch)
    config = study.Config(n_epochs=2)
    history = study.run(config)[0]["history"]["capsules"]
    network = study.network_config(config)
    assert (network.dataset, network.standardize, network.loss) == ("shapes", "image", "spread")
    data = conv.make_data(network)
    state = states_of(conv.make_models(network), network)["capsules"]
    conv.train(conv.make_capsules(network), network, data, state, SERIAL, lambda *_: None)
    assert history == state.history


@pytest.mark.parametrize("shift", [0, 1])
def test_the_affnist_study_counts_right_answers(shift: int, monkeypatch: Patch) -> None:
    """Of the variant that was trained: one that knows the labels, and one that is always wrong."""
    small(monkeypatch)
    config = study.Config(study="affnist", assignments="even", data_dir=digits_folder())

    def assess(params: Any, batch: multimnist.Batch) -> tuple[Array, float]:
        return np.eye(10)[(batch.labels[:, 0] + shift) % 10], 0.0

    knowing = {name: model._replace(assess=assess) for name, model in study.make_models(config).items()}
    monkeypatch.setattr(study, "make_models", {config: knowing}.__getitem__)
    found = study.affnist_study(config, {}, study.make_data(config), SERIAL)
    names = ("upright", "rotated_15", "rotated_35", "affnist")
    assert found == {f"{name}_accuracy": 1.0 - shift for name in names}


def test_the_curves_are_of_the_median_seed_and_of_each_part(tmp_path: Path, monkeypatch: Patch) -> None:
    move_to(tmp_path, monkeypatch)
    runs = [{"seed": s, "models": {"capsules": {"held_out_accuracy": a}}} for s, a in ((7, 0.9), (8, 0.5), (9, 0.6))]
    path, trained = tmp_path / figures.RESULTS.with_name("assignments.json"), list[Any]()
    path.parent.mkdir(parents=True)
    part = {"dataset": "shapes", "config": {}, "settings": {"default": {"runs": runs}}}
    path.write_text(json.dumps({"parts": {"routed": part}}))

    def train_all(config: study.Config, data: Any, options: Any) -> dict[str, TrainState]:
        assert (len(data.train.labels) > 0, options.threads, options.quiet) == (True, 3, True)
        trained.append((config.seed, config.n_epochs, config.assignments, config.loss, config.vote_bias))
        state = TrainState("capsules", {})
        accuracies = {f"{part}_accuracy": [0.5, 0.1 * len(trained)] for part in ("familiar", "held_out")}
        state.history = {"train_loss": [1.0, 0.2 * len(trained)], **accuracies}
        return {"capsules": state}

    monkeypatch.setattr(study, "train_all", train_all)
    options = figures.Options(threads=3, quiet=True)
    fig = drawn(lambda: figures.draw_training_curves((figures.Config(), options)))
    parts = [("routed", "paper", "none"), ("even", "paper", "none"), ("routed", "cross-entropy", "none"),
             ("routed", "paper", "learned")]
    assert trained == [(9, study.Config().n_epochs, *part) for part in parts]
    labels = ("EM routing, spread loss", "even assignments", "cross-entropy", "bias of the votes")
    check_held(fig.axes[0], lines={label: [[1, 2], [1, 0.2 * k]] for k, label in enumerate(labels, 1)})
    for ax in fig.axes[1:]:
        check_held(ax, lines={label: [[1, 2], [0.5, 0.1 * k]] for k, label in enumerate(labels, 1)}, levels=[0.2])
    for chosen, says in ((figures.Config(), True), (figures.Config(seed=4, n_epochs=1), False)):  # none was reported
        fig = figures.draw_training_curves((chosen, options))
        assert any("seed 9, the median of 3" in text.get_text() for text in fig.texts) == says
    assert {(seed, n_epochs) for seed, n_epochs, *_ in trained[8:]} == {(4, 1)}
