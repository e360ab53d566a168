"""The figures and the animation of the convolutional matrix capsules, on trainings of seconds with generated digits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

import conv_matrix_capsules as experiment
import make_conv_matrix_capsules_gif as animation
import multimnist_capsnet as digits
import visualize_conv_matrix_capsules as figures
from fast.workers import SERIAL
from figure_checks import (
    check_animation,
    check_failures,
    check_pictures,
    check_texts,
    check_unchanged,
    draw_coarsely,
    drawn_texts,
    refuse,
)
from helpers import attacked_by_hand, failure, usage_error
from support.figures import figure_style
from support.run import save_checkpoint
from support.tables import confusion_matrix

SMALL = [
    "--seed=123",
    "--dataset=strokes",
    "--em-iters=3",
    "--sizes=5,2,3,2",
    "--threads=1",
    "--batch-size=8",
    "--lr=0.01",
]
ATTACK = ["--epsilons=0.1,0.3", "--attack-steps=2", "--n-attack=4"]
TINY = [*SMALL, *ATTACK, "--n-epochs=2", "--n-train=32", "--n-test=20"]
ALL = [
    "attack_curves", "attacked_images", "confusion_matrix", "pose_perturbation", "training_curves", "vote_distances",
]  # fmt: skip
FOLDER = Path("viz", experiment.EXPERIMENT)


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """Few digits, and little of what takes long."""
    with pytest.MonkeyPatch.context() as patch:
        original = digits.resolve_dataset
        few = original("strokes", np.random.default_rng(1), None, (60, 20))
        patch.setattr(
            digits, "resolve_dataset", lambda kind, *rest: few if kind == "strokes" else original(kind, *rest)
        )
        patch.setattr(figures, "DECODER_EPOCHS", 2)
        yield


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No figure of the project is touched, and no results file of it found."""
    monkeypatch.chdir(tmp_path)
    draw_coarsely(monkeypatch)


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, experiment, "train", "train_all")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run.npz"
    assert experiment.main([*TINY, "--quiet", f"--checkpoint={path}"]) == 0
    return path


@pytest.fixture(scope="module")
def run(checkpoint: Path) -> figures.Run:
    config, states = experiment.load_checkpoint(checkpoint)
    return figures.Run(config, experiment.make_data(config), states)


@pytest.fixture(scope="module")
def answers(run: figures.Run) -> dict[str, np.ndarray]:
    return figures.answers_of(run, SERIAL)


def attacked(config: experiment.Config, accuracies: list[float]) -> dict[str, Any]:
    """A result as ``--out-json`` writes it; ``accuracies``: at epsilon 0 and at 0.25."""
    kinds = [*(a + more for a in experiment.ATTACKS for more in ("", "_log_odds")), "worst_case"]
    metrics = {f"{k}_{e}_accuracy": a for k in kinds for e, a in zip(("0", "0.25"), accuracies, strict=True)}
    models = {name: {config.headline: 0.9, "zero_gradient": 0.5, **metrics} for name in experiment.MODEL_NAMES}
    return {"seed": config.seed, "config": dataclasses.asdict(config), "models": models}


# ----------------------------------------------------------------------------------------------------------------------
# Figures
# ----------------------------------------------------------------------------------------------------------------------


def test_training_and_checkpoint_give_the_same_figures(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert figures.main([*TINY, "--quiet"]) == 0
    check_pictures(FOLDER, ALL, highest=1800, scale=0.5)
    refuse(monkeypatch, experiment, "train")
    check_unchanged(figures, [*TINY, f"--checkpoint={checkpoint}"], FOLDER, capsys)


def test_only_the_figures_that_were_asked_for(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [f"--checkpoint={checkpoint}", "--outdir=few", "--quiet"]
    assert figures.main([*argv, "--figures=confusion_matrix,training_curves"]) == 0
    check_pictures(Path("few", experiment.EXPERIMENT), ["confusion_matrix", "training_curves"], highest=1800, scale=0.5)
    line = failure(figures, [*argv, "--figures=attention"], capsys)
    assert line == "error: attention.png needs familiar and held-out views of every class\n"


def check_figure(name: str, drawer: Callable[[], Figure], title: str, subtitle: str) -> None:
    fig, texts = drawn_texts(drawer)
    assert any(title in t.get_text() and t.get_fontweight() == "bold" for t, _ in texts), name
    assert any(subtitle in t.get_text() for t, _ in texts), name
    check_texts(fig, texts, name)


@pytest.mark.parametrize("right", ["every answer", "none"])
def test_texts_are_large_enough_and_stay_apart(
    run: figures.Run, answers: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch, right: str
) -> None:
    labels = run.data.test.labels
    said = {"every answer": labels, "none": (labels + 1) % 10}
    monkeypatch.setattr(figures, "answers_of", lambda *_: dict.fromkeys(answers, said[right]))
    files = []
    for seed, accuracies in enumerate(([1.0, 0.5], [0.9, 0.2])):
        files.append(Path(f"{seed}.json"))
        files[-1].write_text(json.dumps(attacked(dataclasses.replace(run.config, seed=seed), accuracies)))
    attacks = figures.read_attacks(files, run.config, run.data.name)
    for name, drawer in figures.drawers(run, attacks, SERIAL).items():
        if right == "none" or name in ("vote_distances", "confusion_matrix"):
            check_figure(name, drawer, "not MNIST", "2 seeds" if name == "attack_curves" else "seed 123")


def check_attention(run: figures.Run, fig: Figure) -> None:
    """The maps of the first held-out T are means over the types at a position, weighted by the activations."""
    held_out = run.data.held_out
    assert held_out
    k = run.config.classes.index("T")
    image = held_out.images[held_out.labels == k][:1]
    routing = experiment.class_routing(run.states["capsules"].params, image, run.config)
    side = experiment.grid_sides(run.config.image_size)[-1]
    a, r = routing.a_in.reshape(side, side, -1), routing.r[-1].reshape(side, side, -1, run.config.n_classes)
    rival = max((e for e in range(run.config.n_classes) if e != k), key=lambda e: routing.a[-1, 0, e])
    drawn = [ax.images[1].get_array() for ax in fig.axes if len(ax.images) == 2]
    assert len(drawn) == 2 * 2 * run.config.n_classes
    first = 2 * (run.config.n_classes + k)
    for e, shown in zip((k, rival), drawn[first : first + 2], strict=True):
        expected = [[np.average(r[i, j, :, e], weights=a[i, j]) for j in range(side)] for i in range(side)]
        np.testing.assert_allclose(np.asarray(shown), expected, rtol=1e-4)


def test_views_of_objects_are_drawn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_them = figures.drawers

    def drawers(*given: Any) -> dict[str, Any]:
        found = all_of_them(*given)
        assert sorted(found) == sorted([*ALL, "attention"])
        for name in ("training_curves", "confusion_matrix", "attacked_images", "vote_distances", "attention"):
            check_figure(name, found[name], "voxel objects", "seed 123")
        check_attention(given[0], found["attention"]())
        return {}

    monkeypatch.setattr(figures, "drawers", drawers)
    flags = [flag for flag in TINY if "dataset" not in flag]
    assert figures.main([*flags, "--dataset=voxels", "--n-epochs=1", "--quiet"]) == 0


@pytest.mark.parametrize("changes", [{"em_iters": 1}, {"em_iters": 2, "loss": "cross-entropy"}, {"em_iters": 12}])
def test_other_routings_are_drawn(run: figures.Run, answers: dict[str, np.ndarray], changes: dict[str, Any]) -> None:
    other = run._replace(config=dataclasses.replace(run.config, **changes))
    with figure_style():
        figures.draw_vote_distances(other, answers).canvas.draw()


def test_the_line_of_the_errors_is_named(run: figures.Run) -> None:
    _, texts = drawn_texts(lambda: figures.draw_training_curves(run))
    assert "chance 90 %" in [text.get_text() for text, _ in texts]


def test_every_class_has_a_colour() -> None:
    assert len({animation.TRUE_COLOUR, *animation.OTHER_COLOURS}) == 10


# ----------------------------------------------------------------------------------------------------------------------
# What is drawn is what the network does
# ----------------------------------------------------------------------------------------------------------------------


def test_answers_agree_with_the_evaluation(run: figures.Run, answers: dict[str, np.ndarray]) -> None:
    labels = run.data.test.labels
    for name, state in run.states.items():
        assert (answers[name] == labels).mean() == pytest.approx(state.history["accuracy"][-1])
        counts = confusion_matrix(labels, answers[name], 10)
        assert counts.sum() == len(labels)
        assert np.trace(counts) == (answers[name] == labels).sum()
        assert (counts.sum(axis=1) == np.bincount(labels, minlength=10)).all()


def test_the_histograms_weights_add_up_to_the_assigned_mass(run: figures.Run) -> None:
    routing = experiment.class_routing(run.states["capsules"].params, run.data.test.images[:2], run.config)
    n_children = 4 * 4 * run.config.sizes[3]
    assert routing.weights.shape == (3, 2, n_children, 10)
    x = experiment.prepared(run.data.test.images[:2], run.config)
    cache = experiment.conv_capsnet_forward(run.states["capsules"].params, x, run.config)[1]
    for image in range(2):
        for limit in (0.5, 100):  # with nearly all votes beyond, and with none
            histogram = figures.mass_histogram(routing, image, np.linspace(0, limit, 6))
            assert histogram.shape == (3, 10, 5)
            for t, now in enumerate(cache.routing.steps):
                np.testing.assert_allclose(histogram[t].sum(axis=1), now.mass[image], rtol=1e-4, atol=1e-6)
                # and all capsules together have all that the children have to give
                assert histogram[t].sum() == pytest.approx(routing.a_in[image].sum(), rel=1e-4)


def test_tightness_is_the_mean_over_images(run: figures.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    found = figures.tightness(run)
    assert found.distance.shape == found.fraction.shape == (3, 2)
    np.testing.assert_allclose(found.fraction[:, 0] + 9 * found.fraction[:, 1], 1, rtol=1e-5)
    np.testing.assert_allclose(found.fraction[0], 0.1, rtol=1e-5)  # even at first
    monkeypatch.setattr(figures, "N_TIGHTNESS", 1)
    routing = experiment.class_routing(run.states["capsules"].params, run.data.test.images[:1], run.config)
    label = run.data.test.labels[0]
    expected = np.average(routing.distances[2, 0, :, label], weights=routing.weights[2, 0, :, label])
    assert figures.tightness(run).distance[2, 0] == pytest.approx(expected, rel=1e-4)


def test_sum_and_slant() -> None:
    upright, leaning = np.zeros((2, 28, 28, 1))
    upright[4:24, 13:15] = 1
    for row in range(4, 24):
        leaning[row, 24 - row] = 1  # by one column a row, to the right at the top
    measured = figures.sum_and_slant(np.stack([upright, leaning, 2 * upright]))
    np.testing.assert_allclose(measured, [[40, 0], [20, 45], [80, 0]], atol=1e-9)


def test_the_decoder_learns_to_draw_and_leaves_the_capsules_alone(run: figures.Run) -> None:
    config, (images, labels, *_) = run.config, experiment.subset(run.data.train, 48)
    params = run.states["capsules"].params
    before = {k: p.copy() for k, p in params.items()}
    decoder, losses = figures.train_decoder(params, images, labels, config, 20)
    assert len(losses) == 20
    assert losses[-1] < 0.7 * losses[0]
    for name, p in before.items():
        np.testing.assert_array_equal(params[name], p)
    poses, _ = experiment.class_capsules(params, images, config)
    pictures = figures.decode(decoder, poses, labels, config)
    assert pictures.shape == images.shape
    assert 0 <= pictures.min() <= pictures.max() <= 1
    assert np.square(pictures - images).sum(axis=(1, 2, 3)).mean() == pytest.approx(losses[-1], rel=0.2)
    assert figures.train_decoder(params, images, labels, config, 20)[1] == losses


@pytest.mark.parametrize("channels", [1, 3])
def test_the_decoders_loss_is_the_mean_over_the_images(channels: int) -> None:
    """At a learning rate of 0: five images in batches of four."""
    digits_only: dict[str, Any] = {"dataset": "strokes"}
    own = {"dataset": "images", "class_names": tuple("abcdefghij"), "side": 28, "colour": "rgb"}
    config = experiment.Config(**digits_only if channels == 1 else own, sizes=(4, 2, 2, 2), batch_size=4)
    rng = np.random.default_rng(0)
    params = experiment.conv_capsnet_init(rng, config)
    images, labels = rng.random((5, 28, 28, channels)).astype(np.float32), np.arange(5)
    images[:4] *= 0.1
    decoder, losses = figures.train_decoder(params, images, labels, config, 2, lr=0.0)
    pictures = figures.decode(decoder, experiment.class_capsules(params, images, config)[0], labels, config)
    np.testing.assert_allclose(losses, [np.square(pictures - images).sum() / 5] * 2, rtol=1e-5)


def test_the_decoder_sees_one_pose() -> None:
    poses, labels = np.random.default_rng(0).standard_normal((4, 3, 16)), np.array([2, 0, 1, 2])
    rows = figures.masked(poses, labels).reshape(4, 3, 16)
    for row, pose, label in zip(rows, poses, labels, strict=True):
        np.testing.assert_array_equal(row[label], pose[label])
        assert not np.delete(row, label, axis=0).any()


def test_a_perturbed_pose_is_that_pose_with_one_entry_moved(
    run: figures.Run, answers: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[np.ndarray] = []
    original = figures.decode

    def decode(decoder: Any, poses: np.ndarray, *rest: Any) -> np.ndarray:
        decoded.append(poses)
        return original(decoder, poses, *rest)

    monkeypatch.setattr(figures, "decode", decode)
    found = figures.perturb(run, dict.fromkeys(answers, run.data.test.labels), 2)
    assert found.drawn.shape == (2, 16, 5, 28, 28, 1)
    assert found.effect.shape == (16, 2)
    middle = found.drawn[:, :, 2]
    assert (middle == middle[:, :1]).all()  # nothing is moved there
    assert any((found.drawn[:, d, 0] != found.drawn[:, d, 4]).any() for d in range(16))
    labels = run.data.test.labels[found.indices]
    moved = (decoded[-1] - decoded[-3]).reshape(2, -1)  # of the last entry, by 2 deviations and by none
    assert (np.flatnonzero(moved.any(axis=0)) % 16 == 15).all()
    assert (moved.reshape(2, 10, 16)[[0, 1], labels, 15] > 0).all()


def test_classes_that_were_not_shown_come_first() -> None:
    labels = np.array([1, 1, 2, 1, 3, 2])
    assert figures.one_of_each_class(labels, np.arange(6), 5).tolist() == [0, 2, 4, 1, 5]
    assert figures.one_of_each_class(labels, np.array([1, 3]), 5).tolist() == [1, 3]


# ----------------------------------------------------------------------------------------------------------------------
# Attacks of many seeds
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", ["mnist", "voxels"])
def test_attacks_are_found_in_every_form_of_results(dataset: str) -> None:
    config = experiment.Config(dataset=dataset, seed=5, attack=("fgsm",))
    runs = [attacked(dataclasses.replace(config, seed=seed), [1.0, seed / 10]) for seed in (1, 2)]
    other = attacked(dataclasses.replace(config, em_iters=7), [0.0, 0.0])
    within = {"config": {k: v for k, v in runs[0]["config"].items() if k != "seed"}, "models": {"capsules": {}},
              "runs": [{k: v for k, v in run.items() if k != "config"} for run in runs]}  # fmt: skip
    Path("many.json").write_text(json.dumps({"settings": {"": within}}))
    for seed, run in enumerate([*runs, other]):
        Path(f"{seed}.json").write_text(json.dumps(run))
    for names in (["many"], ["0", "1"], ["0", "1", "2"]):
        found = figures.read_attacks([Path(f"{name}.json") for name in names], config, dataset)
        assert found is not None
        assert found.n_seeds == 2
        assert found.epsilons == [0, 0.25]
        assert found.accuracy["cnn"]["iterated"].tolist() == [[1.0, 0.1], [1.0, 0.2]]
        assert found.zero_gradient == {"capsules": 0.5, "cnn": 0.5}
    assert figures.read_attacks([Path("2.json")], config, dataset) is None
    assert figures.read_attacks([Path("0.json")], config, "strokes") is None


def compared(name: str, model: str, seeds: tuple[int, ...] = (0, 1), **changes: Any) -> None:
    """A file as compare_seeds.py writes it, of one model."""
    config = dataclasses.replace(experiment.Config(dataset="voxels", attack=("fgsm",)), **changes)
    runs = [attacked(dataclasses.replace(config, seed=seed), [1.0, seed / 10]) for seed in seeds]
    for run in runs:
        run["models"] = {model: run["models"]["cnn"]}
    setting = {"config": json.loads(json.dumps(runs[0]["config"])), "runs": runs}
    path = Path("results", experiment.EXPERIMENT, f"attacks_{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"dataset": "voxels", "settings": {"": setting}}))


def test_models_of_several_files_are_joined_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    compared("a", "capsules")
    compared("b", "cnn", weight_decay=1.0)
    refuse(monkeypatch, experiment, "train")
    assert figures.main(["--attacks"]) == 0
    check_pictures(FOLDER, ["attack_seeds"], highest=1000, scale=0.5)
    joined = figures.join_attacks(sorted(Path("results", experiment.EXPERIMENT).iterdir()))
    assert (joined[0].pixel_range, joined[1], joined[2].n_seeds) == ((0.0, 1.0), "voxels", 2)
    for name in experiment.MODEL_NAMES:
        assert joined[2].accuracy[name]["worst_case"].tolist() == [[1.0, 0.0], [1.0, 0.1]]
    check_figure("attack_seeds", lambda: figures.draw_attack_seeds(*joined), "voxel objects", "settings of its own")


@pytest.mark.parametrize("fraction", [0.5, 0.005])
def test_nothing_below_the_attacks_is_blank(fraction: float) -> None:
    """The note on images without a gradient makes the figure higher, where there are such images."""
    compared("a", "capsules")
    config, dataset, attacks = figures.join_attacks([Path("results", experiment.EXPERIMENT, "attacks_a.json")])
    attacks = attacks._replace(zero_gradient={"capsules": fraction})
    fig, texts = drawn_texts(lambda: figures.draw_attack_seeds(config, dataset, attacks))
    assert any("no gradient at all" in text.get_text() for text, _ in texts) == (fraction == 0.5)
    assert 0 < min(box.y0 for _, box in texts) < 0.2 * fig.dpi


def test_attacks_that_cannot_be_joined(capsys: pytest.CaptureFixture[str]) -> None:
    check_failures([(figures, ["--attacks"], "there is no results/conv_matrix_capsules/attacks_*.json")], capsys)
    compared("a", "capsules")
    for changes in ({"attack_steps": 3}, {"standardize": "image"}, {"seeds": (2, 3)}):
        compared("b", "cnn", **changes)
        check_failures([(figures, ["--attacks"], "have no attacks in common")], capsys)
    Path("other.json").write_text('{"settings": 3}')
    check_failures([(figures, ["--attacks", "other.json"], "is no result of this experiment")], capsys)
    path = Path("results", experiment.EXPERIMENT, "attacks_a.json")
    path.write_text(path.read_text().replace('"dataset": "voxels"', '"dataset": ["voxels", "mnist"]', 1))
    check_failures([(figures, ["--attacks", str(path)], "is no result of this experiment")], capsys)


def viewed(name: str, model: str, angle: str, dataset: str = "toys", cnn: str = "matched", **changes: Any) -> None:
    """A file as compare_seeds.py --keep-history writes it, of two seeds of one model."""
    ranges = {"train_elevations": [30, 40]} if angle == "elevation" else {}
    accuracies = {f"{angle}_{at}_accuracy": at / 512 for at in (30, 60, 340)}
    history = {"familiar_accuracy": [0.5, 0.75], "held_out_accuracy": [0.25, 0.5]} | changes
    runs = [{"seed": s, "models": {model: accuracies}, "history": {model: history}} for s in (0, 1)]
    fields = dataclasses.asdict(experiment.Config(train_azimuths=(300, 400), test_azimuths=(60, 280), cnn=cnn))
    config = fields | ranges
    path = Path("results", experiment.EXPERIMENT, f"toys_{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"dataset": dataset, "settings": {"": {"config": config, "runs": runs}}}))


def test_the_papers_cnn_has_a_line_of_its_own() -> None:
    for name, model, cnn in (
        ("capsules", "capsules", "paper"),
        ("cnn", "cnn", "matched"),
        ("paper_cnn", "cnn", "paper"),
    ):
        viewed(f"azimuths_{name}", model, "azimuth", cnn=cnn)
    fig = figures.draw_novel_viewpoints(figures.read_views(sorted(Path("results").rglob("*.json"))))
    labels = [text.get_text() for text in fig.legends[0].get_texts()]
    assert labels == ["Matrix capsules", "CNN, as many parameters", "CNN of the paper, 4.2 million parameters"]
    colours = {line.get_color() for line in fig.axes[0].lines if line.get_marker() not in ("None", "")}
    assert len(colours) == 3


def test_novel_viewpoints_are_drawn_from_results(monkeypatch: pytest.MonkeyPatch) -> None:
    for angle in ("azimuth", "elevation"):
        for model in experiment.MODEL_NAMES:
            viewed(f"{angle}s_{model}", model, angle)
    viewed("tuning_cnn", "cnn", "azimuth")
    refuse(monkeypatch, experiment, "train")
    assert figures.main(["--viewpoints"]) == 0
    check_pictures(FOLDER, ["novel_viewpoints"], highest=1420, scale=0.5)
    paths = sorted(Path("results", experiment.EXPERIMENT).glob("toys_[ae]*s_*.json"))
    runs = figures.read_views(paths)
    assert [(run.angle, run.model) for run in runs] == [
        ("azimuth", "capsules"), ("azimuth", "cnn"), ("elevation", "capsules"), ("elevation", "cnn")
    ]  # fmt: skip
    assert runs[0].curves == [([0.5, 0.75], [0.25, 0.5])] * 2
    assert {at: values.tolist() for at, values in runs[0].accuracy.items()} == {
        float(at): [at / 512] * 2 for at in (30, 60, 340)
    }  # fmt: skip
    check_figure("novel_viewpoints", lambda: figures.draw_novel_viewpoints(runs), "generated toys", "five others")
    fig = drawn_texts(lambda: figures.draw_novel_viewpoints(runs))[0]
    line = max(fig.axes[0].lines, key=lambda line: line.get_linewidth())
    points = np.array(line.get_xydata())
    assert points[:, 0].tolist() == [-20, 30, 60]  # the trained range, -60 to 40, is in the middle
    ticks = {t.get_position()[0]: t.get_text() for t in fig.axes[0].get_xticklabels()}
    assert ticks[-60] == "300"
    assert ticks[0] == "0"
    np.testing.assert_allclose(points[:, 1], np.array([340, 30, 60]) / 512)


def test_results_without_novel_viewpoints(capsys: pytest.CaptureFixture[str]) -> None:
    check_failures([(figures, ["--viewpoints"], "there is no results/conv_matrix_capsules/toys_[ae]*s_*.json")], capsys)
    viewed("azimuths_a", "cnn", "azimuth")
    path = Path("results", experiment.EXPERIMENT, "toys_azimuths_a.json")
    path.write_text(path.read_text().replace('"history"', '"other"'))
    check_failures([(figures, ["--viewpoints"], "holds no novel viewpoints")], capsys)
    viewed("azimuths_a", "cnn", "azimuth", held_out_accuracy=[0.5])
    check_failures([(figures, ["--viewpoints"], "holds no novel viewpoints")], capsys)
    viewed("azimuths_a", "cnn", "azimuth")
    path.write_text(path.read_text().replace("[300, 400]", "[300, 400, 500]"))
    check_failures([(figures, ["--viewpoints"], "holds no novel viewpoints")], capsys)
    Path("other.json").write_text('{"settings": 3}')
    check_failures([(figures, ["--viewpoints", "other.json"], "holds no novel viewpoints")], capsys)


def test_worst_cases_of_different_attacks_are_not_averaged() -> None:
    both = {"fgsm": {"0": 1.0, "0.1": 0.5}, "iterated": {"0": 1.0, "0.1": 0.25}, "worst_case": {"0": 1.0, "0.1": 0.25}}
    fgsm = {"fgsm": {"0": 1.0, "0.1": 0.5}, "worst_case": {"0": 1.0, "0.1": 0.5}}
    coarse = {kind: {"0": accuracies["0"]} for kind, accuracies in both.items()}
    for runs, kinds in (
        ([both, both], ["fgsm", "iterated", "worst_case"]),
        ([both, fgsm], ["fgsm"]),
        ([coarse, both], ["fgsm", "iterated"]),
    ):
        found = figures.gather_attacks([{"cnn": run} for run in runs])
        assert found
        assert list(found.accuracy["cnn"]) == kinds


def test_a_picture_that_is_misread_stays_misread_at_every_larger_epsilon() -> None:
    model, (images, labels, *_), config = attacked_by_hand()
    found = figures.worst_cases(model, {}, images, labels, config)
    wrong = [model.forward({}, x)[0].argmax(axis=1) != labels for x in found]
    # as many as by the accuracies of the script
    assert [np.flatnonzero(row).tolist() for row in wrong] == [[0, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    for epsilon, x in zip(config.epsilons, found, strict=True):
        assert (np.abs(x - images).max(axis=(1, 2, 3)) <= epsilon + 1e-12).all()
    assert found[2][1, 0, 0, 0] > found[1][1, 0, 0, 0]  # misread anew
    np.testing.assert_array_equal(found[2][0], found[0][0])  # misread with the smallest epsilon alone


def test_measured_attacks_are_those_of_the_script(run: figures.Run) -> None:
    config = dataclasses.replace(run.config, attack=experiment.ATTACKS)
    expected = experiment.attack_all(config, run.states, run.data)
    found = figures.measure_attacks(run, 1)
    fgsm_alone = run._replace(config=dataclasses.replace(run.config, attack=("fgsm",)))
    assert list(figures.measure_attacks(fgsm_alone, 1).accuracy["cnn"]) == ["fgsm", "fgsm_log_odds", "worst_case"]
    assert found.epsilons == [0, 0.1, 0.3]
    for name, kinds in expected.items():
        for kind, by_epsilon in kinds.items():
            if isinstance(by_epsilon, dict):
                assert found.accuracy[name][kind].tolist() == [list(by_epsilon.values())]
        assert found.zero_gradient[name] == kinds["zero_gradient"]


# ----------------------------------------------------------------------------------------------------------------------
# Animation
# ----------------------------------------------------------------------------------------------------------------------


def test_animation_ends_with_each_iteration_of_the_last_snapshot(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [*SMALL, "--n-train=32", "--n-test=20", "--n-epochs=2", "--snapshots=3"]
    check_animation(animation, flags, 5, 1_500_000, capsys, held=(2, 3))


@pytest.mark.parametrize(
    ("n_steps", "snapshots", "steps"), [(90, 4, [0, 10, 40, 90]), (3, 9, [0, 1, 2, 3]), (50, 2, [0, 50])]
)
def test_snapshots_are_denser_at_first_and_end_with_the_training(
    n_steps: int, snapshots: int, steps: list[int]
) -> None:
    assert animation.snapshot_steps(n_steps, snapshots) == steps


def test_the_plane_is_that_of_the_largest_spread() -> None:
    rng = np.random.default_rng(0)
    votes = rng.standard_normal((1, 50, 2, 16)) * np.where(np.isin(np.arange(16), [3, 11]), [10, 5][0], 0.1)
    votes[..., 11] *= 0.5
    ones = np.ones((1, 1, 50, 2))
    routing = experiment.ClassRouting(votes, np.ones((1, 50)), ones, np.zeros((1, 1, 2, 16)), np.zeros((1, 1, 2)))
    axes = animation.principal_axes(routing)
    assert np.abs(axes).argmax(axis=0).tolist() == [3, 11]
    assert (axes[[3, 11], [0, 1]] > 0.99).all()
    points = (votes[0] @ axes).reshape(-1, 2)
    low, high = animation.bulk(routing, axes, 0.02)
    np.testing.assert_array_equal([(points < low).sum(axis=0), (points > high).sum(axis=0)], [[1, 1], [2, 2]])


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes on the command line
# ----------------------------------------------------------------------------------------------------------------------

USAGE_ERRORS: list[tuple[Any, list[str]]] = [
    (figures, ["--sizes=1,2,3"]),
    (figures, ["--threads=0"]),
    (figures, ["--epsilons=0.2,0.1"]),
    (figures, ["--dataset=smallnorb"]),
    (figures, ["--results"]),
    (figures, ["--attacks", "--seed=1"]),
    (figures, ["--attacks", "--viewpoints"]),
    (animation, ["--snapshots=1"]),
    (animation, ["--snapshots=many"]),
    (animation, ["--snapshots=600", "--em-iters=2"]),
    (animation, ["--attack=fgsm"]),
    (animation, ["--n-attack=5"]),
]


@pytest.mark.parametrize(("script", "flags"), USAGE_ERRORS)
def test_wrong_flags(no_training: None, capsys: pytest.CaptureFixture[str], script: Any, flags: list[str]) -> None:
    usage_error(script, flags, capsys)


def half_trained(tmp_path: Path) -> Path:
    """As Ctrl-C leaves it: the second model has had one epoch of two."""
    config = experiment.Config(dataset="strokes", sizes=(5, 2, 3, 2), n_epochs=2, n_train=8, n_test=20)
    states = experiment.fresh_states(config)
    for n, state in enumerate(states.values()):
        state.step, state.history = 2 - n, {"train_loss": [0.5] * (2 - n)}
    path = tmp_path / "half.npz"
    save_checkpoint(path, experiment.EXPERIMENT, config, states.values())
    return path


def test_a_checkpoint_that_cannot_be_drawn_is_found_before_the_data(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(monkeypatch, experiment, "make_data")
    cases: list[tuple[Any, list[str], str]] = [
        (figures, [f"--checkpoint={half_trained(tmp_path)}"], "1 of 2 epochs of cnn;"),
        (figures, [f"--checkpoint={checkpoint}", "--seed=0"], "was made with --seed 123, not 0"),
        (figures, [f"--checkpoint={checkpoint}", "--sizes=5,2,3,3"], "--sizes 5,2,3,2, not 5,2,3,3"),
    ]
    check_failures(cases, capsys)


def test_what_cannot_work_is_found_before_the_training(no_training: None, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("in the way")
    Path("useless.json").write_text('{"models": 3}')
    cases: list[tuple[Any, list[str], str]] = [
        (figures, [*TINY, "--n-test=9"], "--n-test 10 or more"),
        (figures, [*TINY, "--results", "none.json"], "there is no results file none.json"),
        (figures, [*TINY, "--results", "file"], "file is not JSON"),
        (figures, [*TINY, "--results", "useless.json"], "useless.json holds no run with these flags"),
        (figures, ["--dataset=mnist", "--data-dir=none"], "none"),
        (animation, [*SMALL, "--n-epochs=2", "--n-train=32", "--n-test=9"], "--n-test 10 or more"),
    ]
    check_failures(cases, capsys)


def test_flags_of_tests_and_attacks_go_with_any_checkpoint(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[figures.Run] = []

    def drawers(run: figures.Run, *_: Any) -> dict[str, Any]:
        drawn.append(run)
        return {}

    monkeypatch.setattr(figures, "drawers", drawers)
    flags = ["--n-attack=3", "--attack-steps=9", "--n-test=15"]
    assert figures.main([*flags, f"--checkpoint={checkpoint}"]) == 0
    config = drawn[0].config
    assert (config.n_attack, config.attack_steps, config.n_test) == (3, 9, 15)
    assert len(drawn[0].data.test.labels) == 15
    states = drawn[0].states
    assert tuple(states) == experiment.MODEL_NAMES
