"""The figures and the animation of the convolutional matrix capsules, on trainings of seconds with drawn digits."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from fast.workers import SERIAL
from figure_checks import assert_same, check_held, drawn, frame_of, held, legend_of, move_to, write_seeds
from helpers import EXPERIMENTS, Patch, config_of, states_of
from more import (
    conv_matrix_capsules as conv, make_conv_matrix_capsules_gif as animation,
    visualize_capsule_attacks as attacks, visualize_conv_matrix_capsules as figures,
)
from smallnorb_novel_viewpoint import TrainState
from support.results import parse_json
from support.statistics import t_quantile

FLAGS = "--dtype=float64 --seed=123 --n-train=48 --n-test=60 --em-iters=3 --lr=0.01"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: Patch) -> None:
    move_to(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def run() -> figures.Run:
    config = config_of(conv, EXPERIMENTS["conv_matrix_capsules"].argv(FLAGS))
    data = conv.make_data(config)
    return figures.Run(config, data, conv.train_all(config, data))


def test_votes_are_counted_by_their_mass(run: figures.Run) -> None:
    """One capsule at a time; dashed: means over capsules."""
    axes, test = drawn(lambda: figures.draw_vote_distances(run)).axes, run.data.test
    routing = conv.class_routing(run.states["capsules"].params, test.images, run.config)
    pairs = list(itertools.product(enumerate(test.labels), range(10)))
    kinds = [[(n, e) for (n, label), e in pairs if (e == label) == own] for own in (False, True)]
    for t, ax in enumerate(axes):
        outlines: Any = ax.patches
        for outline, line, capsules in zip(outlines, held(ax)["lines"].values(), kinds, strict=True):
            limit, heights, means = ax.get_xlim()[1], np.zeros(figures.N_BINS), []
            for n, e in capsules:
                away, mass = routing.distances[t, n, :, e], routing.weights[t, n, :, e]
                share = mass / routing.weights[t, n].sum() / len(capsules)
                heights += np.histogram(np.minimum(away, limit), figures.N_BINS, (0, limit), weights=share)[0]
                means.append(np.average(away, weights=mass))
            np.testing.assert_allclose(outline.get_xy()[1 : 2 * figures.N_BINS : 2, 1], heights, rtol=1e-5, atol=1e-7)
            np.testing.assert_allclose(line[0], [np.mean(means)] * 2, rtol=1e-4)
            names = ("true class: ", "") if capsules is kinds[1] else ("other classes: ", " each")
            assert str(outline.get_label()) == f"{100 * sum(heights):.0f} % of the mass".join(names)


def viewed(
    name: str, model: str, angle: str, familiar: list[float], held_out: list[float], cnn: str = "matched"
) -> None:
    """A file as compare_seeds.py --keep-history writes it, of two seeds of one model: the second is 0.1 better."""
    ranges = {"train_elevations": [30, 40]} if angle == "elevation" else {"train_elevations": [30, 70]}
    config = {"cnn": cnn, "train_azimuths": [300, 400], "test_elevations": [30, 70], **ranges}
    runs = [{
        "seed": s, "models": {model: {f"{angle}_{at}_accuracy": at / 512 + 0.1 * s for at in (30, 60, 340)}},
        "history": {model: {"familiar_accuracy": [f + 0.1 * s for f in familiar],
                            "held_out_accuracy": [h + 0.1 * s for h in held_out]}},
    } for s in (0, 1)]
    write_seeds(figures.RESULTS / f"toys_{name}.json", runs, "toys", **config)


def test_novel_viewpoints_are_means_and_intervals() -> None:
    """340 degrees and 30 lie within the trained azimuths, 60 lies 20 beyond; of elevations 30 lies within."""
    for angle in ("azimuth", "elevation"):
        viewed(f"{angle}s_capsules", "capsules", angle, [0.5, 0.7], [0.2, 0.4])
        viewed(f"{angle}s_paper_cnn", "cnn", angle, [0.6, 0.8], [0.1, 0.3], cnn="paper")
    views = figures.read_views(sorted(figures.RESULTS.glob("toys_*.json")))
    fig = drawn(lambda: figures.draw_novel_viewpoints(views))
    assert legend_of(fig) == ["Matrix capsules", "CNN of the paper"]
    half = 0.05 * t_quantile(2)
    for k, x, angles in ((0, [0, 20], [185, 60]), (2, [0, 20, 300], [30, 60, 340])):
        mean = np.array(angles) / 512 + 0.05
        lines = {"Matrix capsules": [x, mean], "CNN of the paper": [x, mean]}
        check_held(fig.axes[k], lines=lines, bands=[[x, mean - half, mean + half]] * 2, levels=[0.2])
    course = {"Matrix capsules": [[0.55, 0.75], [0.25, 0.45]], "CNN of the paper": [[0.65, 0.85], [0.15, 0.35]]}
    check_held(fig.axes[1], lines=course)


def test_differences_on_shapes_are_capsules_minus_cnn() -> None:
    """Trained on 0 to 150 degrees; 200 lies 50 beyond, 330 and 180 both 30."""

    def metrics(within: float, near: float, far: float) -> dict[str, float]:
        return {"azimuth_200_accuracy": far, "azimuth_330_accuracy": near + 0.1, "azimuth_180_accuracy": near - 0.1,
                "azimuth_60_accuracy": within, "held_out_accuracy": 0.0}

    config: dict[str, Any] = {"train_azimuths": [0, 150], "train_elevations": [10, 70], "test_elevations": [10, 70]}
    runs = [{"seed": 200 + s, "models": {"capsules": metrics(1.0, a, b), "cnn": metrics(1.0, 0.5, 0.5)}}
            for s, (a, b) in enumerate([(0.8, 0.4), (0.6, 0.2)])]
    path = write_seeds(Path("shapes.json"), runs, **config)
    fig = drawn(lambda: figures.draw_shapes_accuracy(figures.read_views([path])))
    x, half = [0, 30, 50], t_quantile(2) * np.array([0, 0.1, 0.1])
    mean, flat = np.array([1.0, 0.7, 0.3]), np.array([1.0, 0.5, 0.5])
    check_held(fig.axes[0], lines={"Matrix capsules": [x, mean], "CNN of equal size": [x, flat]},
               bands=[[x, mean - half, mean + half], [x, flat, flat]], levels=[0.2])
    gain = np.array([0, 20, -20])
    check_held(fig.axes[1], lines={"Matrix capsules": [x, gain]},
               bands=[[x, gain - 100 * half, gain + 100 * half]], levels=[0])
    assert fig.axes[0].get_title("left") == "new azimuths, 2 sets"
    assert [fig.axes[1].yaxis.get_major_formatter()(value, 0) for value in (-20, 0, 20)] == ["−20", "0", "+20"]


def test_table_2_is_read_where_familiar_accuracies_are_equal() -> None:
    """The CNN ends at 0.7 on familiar viewpoints, where capsules have 0.3 on novel ones: halfway through."""
    for angle, more in (("azimuth", 0.0), ("elevation", 0.1)):
        viewed(f"{angle}s_capsules", "capsules", angle, [0.6, 0.8], [0.2 + more, 0.4 + more])
        viewed(f"{angle}s_cnn", "cnn", angle, [0.5, 0.7], [0.1, 0.2])
        paths = [figures.RESULTS / f"toys_{angle}s{end}.json" for end in ("_capsules", "_cnn", "")]
        one, other = map(parse_json, paths[:2])
        for run, added in zip(one["settings"][""]["runs"], other["settings"][""]["runs"], strict=True):
            run["history"] |= added["history"]
        paths[2].write_text(json.dumps(one))
    ours = figures.read_table_2(figures.RESULTS)
    assert_same(ours["azimuth"], {"cnn": [80, 70], "capsules": [70, 60]}, "azimuth")
    fig = drawn(lambda: figures.draw_table_2(ours))
    paper, here = fig.axes
    assert legend_of(fig) == ["CNN of the paper", "CNN of equal size", "Matrix capsules"]
    check_held(paper, bars=[[20.0, 17.8], [13.5, 12.3]])
    check_held(here, bars=[[75, 75], [65, 55]], texts=["75.0", "75.0", "65.0", "55.0"])
    half = 5 * t_quantile(2)
    bars: Any = next(container for container in here.containers if hasattr(container, "errorbar"))
    (_, bottom), (_, top) = bars.errorbar.lines[2][0].get_segments()[0]
    assert (bottom, top) == pytest.approx((75 - half, 75 + half))


def test_attacks_are_means_and_intervals_with_the_papers_beside() -> None:
    rows = {"capsules": [[1.0, 0.2, 0.1], [0.8, 0.6, 0.3]], "cnn": [[1.0, 0.1, 0.0], [1.0, 0.3, 0.0]]}
    runs: list[Any] = [{"seed": s, "models": {}} for s in range(2)]
    for (name, of_seeds), run in itertools.product(rows.items(), runs):
        metrics = list(zip(("0", "0.2", "0.5"), of_seeds[run["seed"]], strict=True))
        run["models"][name] = {f"fgsm_{e}_accuracy": a for e, a in metrics}
        run["models"][name] |= {f"worst_case_{e}_accuracy": a / 2 for e, a in metrics}
    path = write_seeds(Path("attacks.json"), runs, epsilons=[0.2, 0.5])
    other = write_seeds(Path("others.json"), runs[:1], "voxels", epsilons=[0.2, 0.5])
    axes, x = drawn(lambda: attacks.draw_attack_seeds([path, other])).axes, [0, 0.2, 0.5]
    titles = [f"{what}: {kind}" for what in ("drawn shapes, 2 seeds", "the write-up's objects, 1 seed")
              for kind in ("one step along the loss", "worst of many attacks")]
    assert [ax.get_title("left") for ax in axes] == titles
    half, capsules, cnn = t_quantile(2) * np.array([0.1, 0.2, 0.1]), np.array([0.9, 0.4, 0.2]), np.array([1.0, 0.2, 0])
    paper = {"paper, capsules": [[0.2, 0.5], [0.83, 0.69]], "paper, CNN": [[0.2, 0.5], [0.16, 0.03]]}
    for ax, factor, beside in zip(axes[:2], (1, 0.5), (paper, {}), strict=True):
        lines = held(ax)["lines"]
        expected = {"Matrix capsules": [x, factor * capsules], "CNN of equal size": [x, factor * cnn]} | beside
        assert_same({name: lines[name] for name in expected}, expected, "lines")
        assert_same(held(ax)["bands"][0], [x, factor * (capsules - half), factor * (capsules + half)], "band")
    assert_same(held(axes[3])["lines"]["CNN of equal size"], [x, [0.5, 0.05, 0]], "another file")
    write_seeds(path, runs, epsilons=[0.2])
    lines = held(drawn(lambda: attacks.draw_attack_seeds([path]), record=False).axes[0])["lines"]
    assert_same(lines["paper, CNN"], [[0.2], [0.16]], "as far as ours")


def test_accuracy_under_attack_against_the_length_of_the_training() -> None:
    settings: dict[str, Any] = {}
    parts = list(itertools.product((("capsules", 1), ("cnn", 0.5)), (("worst_case", 0.5), ("fgsm", 1))))
    for n, decay in itertools.product((20, 80), (0.0, 3.0)):
        runs: list[Any] = [{"seed": s, "models": {"capsules": {}, "cnn": {}}} for s in (0, 2)]
        for run, ((name, of_name), (kind, of_kind)) in itertools.product(runs, parts):
            accuracy = (n + decay) / 100 * of_name * of_kind + 0.01 * run["seed"]
            run["models"][name][f"{kind}_0.1_accuracy"] = accuracy
        config = {"n_epochs": n, "weight_decay": decay, "epsilons": [0.1]}
        settings[f"{n} {decay}"] = {"config": config, "runs": runs}
    path = Path("lengths.json")
    path.write_text(json.dumps({"dataset": "shapes", "config": {"epsilons": [0.1]}, "settings": settings}))
    names = {"capsules": "Matrix capsules", "cnn": "CNN of equal size",
             "worst_case": "worst case of all attacks", "fgsm": "one step: FGSM"}
    for ax, decay in zip(drawn(lambda: attacks.draw_attack_trainings(path)).axes, (0, 3), strict=True):
        assert ax.get_title("left") == f"weight decay {decay}"
        means = np.array([0.2, 0.8]) + decay / 100
        lines = held(ax)["lines"]
        expected = {f"{names[name]}, {names[kind]}": [[20, 80], means * of_name * of_kind + 0.01]
                    for (name, of_name), (kind, of_kind) in parts}
        assert_same({name: lines[name] for name in expected}, expected, "means")
        seeds = [y for label, (_, y) in lines.items() if label not in expected]
        np.testing.assert_allclose(seeds, [means * f + 0.01 * s for f in (0.5, 0.25) for s in (0, 2)])


def test_networks_of_the_median_seed_are_trained_for_their_curves(monkeypatch: Patch) -> None:
    runs = [{"seed": s, "models": {"capsules": {"accuracy": a}, "cnn": {"accuracy": b}}}
            for s, a, b in ((200, 0.9, 0.5), (201, 0.7, 0.6), (202, 0.8, 0.4))]
    config: dict[str, Any] = {"sizes": [4, 2, 2, 2], "n_epochs": 3, "epsilons": [0.1], "of_older_code": 1}
    path = write_seeds(Path("attacks.json"), runs, **config)
    states = {name: TrainState(name, {}) for name in ("capsules", "cnn")}
    for state, accuracies in zip(states.values(), ([0.4, 0.6], [0.7, 0.9]), strict=True):
        state.history = {"train_loss": [0.5, 0.2], "accuracy": accuracies}
    monkeypatch.setattr(attacks.experiment, "train_all", train := Mock(return_value=states))
    fig = drawn(lambda: attacks.draw_training_curves(attacks.Options(threads=3, quiet=True), path))
    trained, data, options = train.call_args.args
    assert trained == attacks.experiment.Config(seed=202, sizes=(4, 2, 2, 2), n_epochs=3, epsilons=(0.1,))
    assert (len(data.train.labels) > 0, options.threads, options.quiet) == (True, 3, True)
    check_held(fig.axes[1], lines={"Matrix capsules": [[1, 2], [0.4, 0.6]], "CNN of equal size": [[1, 2], [0.7, 0.9]]})
    assert any("seed 202, the median of 3" in text.get_text() for text in fig.texts)


def test_accuracy_against_steps_and_what_explains_the_first(monkeypatch: Patch) -> None:
    def of(margin: list[list[float]], own: list[list[float]], norms: list[float], shares: Any) -> attacks.Attacked:
        return attacks.Attacked({"_margin": np.array(margin), "": np.array(own)}, np.array(norms), shares)

    one = attacks.joined([of([[1, 0.5]], [[0.5, 0.5]], [3], {"a": 0.25, "b": 0.5}),
                          of([[0, 0.5]], [[0.5, 0.25]], [1, 2], {"a": 0.75, "b": 0.5})])
    other = of([[0.75, 0.25]], [[0.7, 0.6]], [0.5, 0.25], {"a": 0.125})
    monkeypatch.setattr(attacks, "STEPS", (1, 10))
    fig = drawn(lambda: attacks.draw_steps({"capsules": one, "cnn": other}, attacks.experiment.Config()))
    steps, norms, why = fig.axes
    lines = {f"{name}, {along}": [[1, 10], y] for name, along, y in (
        ("Matrix capsules", "along the margin", [0.5, 0.5]),
        ("Matrix capsules", "along the loss of the training", [0.5, 0.375]),
        ("CNN of equal size", "along the margin", [0.75, 0.25]),
        ("CNN of equal size", "along the loss of the training", [0.7, 0.6]))}
    check_held(steps, lines=lines, levels=[0.2])
    check_held(norms, lines={"line 0": [[0, 0.5, 1], [1, 2, 3]], "line 1": [[0, 1], [0.25, 0.5]]})
    check_held(why, bars=[[0.5, 0.5], [0.125]])
    assert held(why)["ticks"][1] == ["a", "b"]
    assert any("3 images of 2 seeds" in text.get_text() for text in fig.texts)


def test_steps_are_counted_on_accurate_networks_of_every_seed(monkeypatch: Patch) -> None:
    def measured(config: Any, seed: int, states: Any, threads: int) -> dict[str, attacks.Attacked]:
        return {"cnn": attacks.Attacked(dict.fromkeys(attacks.LINES, np.full((1, 2), seed)), np.full(3, seed), {})}

    monkeypatch.setattr(attacks.experiment, "make_data", lambda config: config.seed)
    monkeypatch.setattr(attacks.experiment, "train_all", train := Mock(return_value={}))
    monkeypatch.setattr(attacks, "measure_attacks", measured)
    monkeypatch.setattr(attacks, "draw_steps", lambda found, _: found["cnn"])
    found: Any = attacks.draw_attack_steps(attacks.Options(threads=3, quiet=True))
    assert found.accuracies[""][:, 0].tolist() == [200, 201, 202, 203]
    accurate = vars(attacks.smallnorb.Config())
    own = {name: accurate[name] for name in attacks.experiment.DENSE}
    for call, seed in zip(train.call_args_list, attacks.SEEDS, strict=True):
        config, _, options = call.args
        assert config == attacks.experiment.Config(network="dense", seed=seed, n_attack=attacks.N_ATTACKED, **own)
        assert (options.threads, options.quiet) == (3, True)


@pytest.mark.parametrize(("network", "more"), [("matrix", {"sizes": (4, 2, 2, 2), "n_train": 8}), ("dense", {})])
def test_what_is_measured_of_attacked_capsules(network: str, more: dict[str, Any], monkeypatch: Patch) -> None:
    """Activations and assignments of the last iteration; accuracy after one step, and what explains it."""
    monkeypatch.setattr(attacks, "STEPS", (1,))
    config = attacks.experiment.Config(network=network, seed=103, n_attack=3, dtype="float64", **more)
    data = attacks.experiment.make_data(config)
    images, labels = attacks.experiment.attacked_images(config, data)
    state = states_of(attacks.experiment.make_models(config), config)["capsules"]
    a, r = attacks.last_routing(config, state, images)
    seen = attacks.experiment.attacked_network(config, "capsules", state.params, SERIAL)
    np.testing.assert_allclose(a, seen.scores(images), rtol=1e-5)
    np.testing.assert_allclose(r.sum(axis=2), 1, rtol=1e-5)
    assert np.ptp(r) > 1e-6  # those of the first iteration are even
    found = attacks.measure_attacks(config, data, {"capsules": state}, 1)["capsules"]
    flat = ~seen.gradient(images, labels, seen.losses[""])[2].any(axis=(1, 2, 3))
    _, before, dx = seen.gradient(images, labels, margin := seen.losses["_margin"])
    moved = np.clip(images + np.float32(attacks.EPSILON) * np.sign(dx), 0, 1)
    _, after, dx_moved = seen.gradient(moved, labels, margin)
    rises = (after - before) / (dx * (moved - images)).sum(axis=(1, 2, 3))
    turned = (dx * dx_moved)[dx != 0] < 0
    assert [*found.shares.values()][:3] == pytest.approx([flat.mean(), np.median(rises), turned.mean()])
    np.testing.assert_allclose(found.norms, np.linalg.norm(dx.reshape(3, -1), axis=1))
    right = (seen.scores(moved).argmax(axis=1) == labels).mean()
    assert found.accuracies["_margin"].tolist() == [[right]]
    level = seen._replace(losses={**seen.losses, "": lambda s, _: (np.zeros(len(s)), np.zeros_like(s))})
    monkeypatch.setattr(attacks.experiment, "attacked_network", lambda *_: level)
    found = attacks.measure_attacks(config, data, {"capsules": state}, 1)["capsules"]
    assert next(iter(found.shares.values())) == 1  # of the training's loss, not of the margin's


def test_a_frame_shows_votes_activations_and_accuracies(run: figures.Run) -> None:
    recorder = animation.Recorder(run.config, run.data, [0, 4], SERIAL)
    for step in (0, 4):
        one = states_of(conv.make_models(run.config), run.config)["capsules"]
        one.step = step
        recorder(one, True)
    last, label = recorder.snapshots[1].routing, recorder.label
    routing = last._replace(votes=1000 * last.votes, mu=1000 * last.mu)
    recorder.snapshots[1] = animation.Snapshot(4, routing, 0.75)

    plane, image, bars, curve = drawn(lambda: frame_of(animation.make_scene(run.config, run.data, recorder), 1, 2)).axes
    check_held(bars, bars=[routing.a[2, 0]])
    check_held(frame_of(animation.make_scene(run.config, run.data, recorder), 1, 1).axes[2], bars=[routing.a[1, 0]])
    check_held(curve, lines={"line 1": [[0, 4], [recorder.snapshots[0].accuracy, 0.75]]})
    dots: Any = plane.collections[0]
    n = routing.votes.shape[1]
    points, mass = routing.votes[0, :, label] @ animation.principal_axes(routing), routing.weights[2, 0, :, label]
    np.testing.assert_allclose(dots.get_offsets()[-n:], points, rtol=1e-5)
    np.testing.assert_allclose(dots.get_sizes()[-n:], animation.MASS_AREA * mass, rtol=1e-5)
    ring: Any = plane.patches[0]
    variances = np.linalg.eigvalsh(np.cov(points.T, aweights=mass, ddof=0))
    np.testing.assert_allclose((ring.width, ring.height), 4 * np.sqrt(variances), rtol=1e-3)
    assert f"votes: {np.average(routing.distances[2, 0, :, label], weights=mass):.1f}" in held(image)["texts"][1]
