"""The drawings of the networks, and the pictures of docs/how_capsules_work.md from small networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.patches import Ellipse
from matplotlib.text import Annotation

import multimnist_capsnet as digits
import smallnorb_novel_viewpoint as views
from figure_checks import Capture, check_held, check_pictures, drawn, held
from helpers import EXPERIMENTS, failure, smallest
from lesson import visualize_how_capsules_work as pictures
from more import visualize_networks as networks
from recorded import check
from support.checkpoints import load_checkpoint
from support.figures import GREEN, darkened
from support.run import count_params, init_states

STAGES = {  # written by hand from the scripts' docstrings
    "smallnorb_novel_viewpoint": [(32, 32, 1), (16, 16, 16), (8,), (5,), (5,)],
    "multimnist_capsnet": [(36, 36, 1), (28, 28, 32), (10, 10, 8), (10,), (256,), (512,), (36, 36, 1)],
    "mnist_affine_capsnet": [(28, 28, 1), (20, 20, 32), (6, 6, 8), (10,), (256,), (512,), (28, 28, 1)],
    "conv_matrix_capsules": [(28, 28, 1), (14, 14, 32), (14, 14, 4), (6, 6, 4), (4, 4, 8), (10,)],
}


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_a_drawing_has_the_shapes_of_the_network_and_all_its_parameters(name: str) -> None:
    script, stages_of = networks.NETWORKS[name]
    config = script.Config()
    params = next(iter(script.make_models(config).values())).init_params(np.random.default_rng(0))
    stages = stages_of(config, params)
    assert [stage.shape for stage in stages] == STAGES[name]
    texts = drawn(lambda: networks.draw_network(name)).axes[0].texts
    numbers = [text.get_text() for text in texts if text.get_color() == darkened(GREEN)]
    assert sum(int(number.replace(",", "")) for number in numbers) == count_params(params)


@pytest.mark.parametrize(("loss", "layer"), [("spread", "activations"), ("cross-entropy", "‖μ‖²/16 + 4(a − ½)")])
def test_the_score_is_that_of_the_loss(loss: str, layer: str) -> None:
    config = views.Config(loss=loss)
    params = views.make_models(config)["capsules"].init_params(np.random.default_rng(0))
    assert networks.view_stages(config, params)[-1].layer == layer


def test_a_drawing_is_the_same_every_time(tmp_path: Path, capsys: Capture) -> None:
    for expected in ("wrote", "unchanged"):
        assert networks.main(["--outdir", str(tmp_path)]) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [expected] * 4


def test_pictures_from_small_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    smallest(monkeypatch)
    experiment = EXPERIMENTS["multimnist_capsnet"]
    argv = [*experiment.argv("--models capsnet --dtype float64"), "--checkpoint", "c.safetensors"]
    assert experiment.script.main(argv) == 0
    argv = ["--checkpoint", "c.safetensors", "--outdir", "."]
    capsys.readouterr()
    assert pictures.main(argv) == 1  # three steps of training are not enough
    assert capsys.readouterr().err.endswith("train it longer\n")

    forward = digits.capsnet_forward
    config, states = load_checkpoint(digits, Path("c.safetensors"))
    labels = (data := digits.make_data(config)).test.labels

    def found(*args: object) -> tuple[np.ndarray, object]:
        lengths, cache = forward(*args)  # type: ignore[arg-type]
        lengths[0, labels[0]] = 0.9
        return lengths, cache

    monkeypatch.setattr(digits, "capsnet_forward", found)
    check("the image", pictures.composite_example(config, data, states["capsnet"].params))
    assert pictures.main(argv) == 0
    check_pictures(Path(pictures.NAME), {*pictures.WITHOUT_NETWORKS, *pictures.OF_NETWORKS})
    line = failure(pictures, ["--checkpoint", "none"], capsys)
    assert line == "error: there is no checkpoint none\n"
    assert "was made with --dataset mnist, not strokes" in failure(pictures, [*argv, "--dataset", "strokes"], capsys)


def test_the_view_is_of_an_l_that_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "train_all", lambda config, _, names: init_states(views.make_models(config), config))
    view = pictures.view_example(seed=8)
    assert views.VOXEL_CLASSES[view.label] == "L"
    check("the view", view, tolerance=1e-4)  # in float32


RNG = np.random.default_rng(0)
FAVOURS_3 = RNG.random((2, 6, 6)) < 0.5  # whether a position is coupled to a 3 rather than to an 8, by iteration
COUPLINGS = np.full((2, 10, 6, 6, 1), 0.1)
COUPLINGS[:, [3, 8]] += 0.1 * np.stack([FAVOURS_3, ~FAVOURS_3], axis=1)[..., None]
COUPLINGS[1] *= 1.5
COMPOSITE = pictures.Composite(
    "strokes", RNG.random((36, 36)), RNG.random((2, 36, 36)), RNG.random((2, 36, 36)), np.array([3, 8]),
    0.1 + RNG.random((6, 6, 1)), COUPLINGS, 3 * RNG.random((2, 10)), RNG.random((2, 10)),
)  # fmt: skip
VIEW = pictures.View(
    RNG.random((32, 32)), 1, RNG.standard_normal((8, 5, 16)), RNG.random(8), RNG.random((2, 8, 5)),
    RNG.standard_normal((2, 5, 16)), np.tile(RNG.random((2, 5, 1)), 16), np.array([[0.2] * 5, [0, 0.8, 0.1, 0.5, 0.3]]),
)  # fmt: skip
TWO_TYPES = COMPOSITE._replace(u=RNG.random((6, 6, 2)), c=RNG.random((2, 10, 6, 6, 2)))


def test_routing_by_agreement_is_shown_as_it_is() -> None:
    _, lengths, _ = drawn(lambda: pictures.draw_squash(COMPOSITE)).axes
    points = [at for at in held(lengths)["lines"].values() if len(at[0]) == 1]
    np.testing.assert_array_equal(np.squeeze(points), np.stack([COMPOSITE.s[1], COMPOSITE.v[1]], axis=1))
    *_, one, two, bars, more = drawn(lambda: pictures.draw_dynamic_routing(COMPOSITE)).axes
    for ax, favours_3, text in zip((one, two), FAVOURS_3, ("all 0.100", "0.150 to 0.300"), strict=True):
        colours = np.where(favours_3.reshape(-1, 1), to_rgba(pictures.FIRST), to_rgba(pictures.SECOND))
        np.testing.assert_allclose(np.asarray(ax.collections[0].get_facecolor(), float), colours)
        assert held(ax)["texts"] == [f"couplings to 3: {text}", f"couplings to 8: {text}"]
    for ax, v in zip((bars, more), COMPOSITE.v, strict=True):
        check_held(ax, bars=[v])
    drawn(lambda: pictures.draw_dynamic_routing(TWO_TYPES))
    once = COMPOSITE._replace(c=COUPLINGS[:1], s=COMPOSITE.s[:1], v=COMPOSITE.v[:1])
    check_held(drawn(lambda: pictures.draw_dynamic_routing(once)).axes[-1], bars=[COMPOSITE.v[0]])


def test_points_turn_to_the_left() -> None:
    np.testing.assert_allclose(pictures.turned(np.array([2.0, 0.0]), 30), [np.sqrt(3), 1])


def test_the_parts_of_a_face_vote_for_one_place() -> None:
    for ax, is_face in zip(drawn(pictures.draw_parts_and_wholes).axes, (True, True, False), strict=True):
        votes = [line.get_xydata() for line in ax.lines if line.get_marker() == "+"]
        assert (np.ptp(np.asarray(votes, float), axis=0).max() < 1e-12) == is_face


def test_arrows_are_as_wide_as_their_couplings() -> None:
    """After one iteration three of the votes agree with A's output of length 1/2, the fourth is its opposite."""
    agree = 5 / (1 + np.exp(-0.5))
    widths = [[2.5] * 4, [2.5] * 4, [agree] * 3 + [5 - agree], [5 - agree] * 3 + [agree]]
    for ax, expected in zip(drawn(pictures.draw_worked_example).axes, widths, strict=True):
        arrows: Any = [text for text in ax.texts if isinstance(text, Annotation)]
        np.testing.assert_allclose([arrow.arrow_patch.get_linewidth() for arrow in arrows[:4]], expected)


def test_votes_and_gaussians_are_of_the_true_class_and_its_rival() -> None:
    _, *planes = drawn(lambda: pictures.draw_em_routing(VIEW)).axes[:3]
    for ax, r, sigma_sq in zip(planes, VIEW.r, VIEW.sigma_sq, strict=True):
        dots: Any = ax.collections
        mass = (r[:, [1, 3]] * VIEW.a_in[:, None]).T
        np.testing.assert_allclose([of_class.get_sizes() for of_class in dots], 4 + 130 * mass)
        widths = [(patch.width, patch.height) for patch in ax.patches if isinstance(patch, Ellipse)]
        np.testing.assert_allclose(widths, np.tile(2 * np.sqrt(sigma_sq[[1, 3], :1]), 2))
    drawn(lambda: pictures.draw_em_routing(VIEW._replace(sigma_sq=VIEW.mu**2)))  # no circles


def test_the_spread_loss_is_of_true_minus_wrong() -> None:
    points = held(drawn(lambda: pictures.draw_losses(COMPOSITE, VIEW)).axes[1])["lines"]["the four wrong classes"]
    np.testing.assert_allclose(points, [[0.8, 0.7, 0.3, 0.5], [0.01, 0.04, 0.36, 0.16]])
