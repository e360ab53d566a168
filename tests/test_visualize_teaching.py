"""The drawings of the networks, and the pictures of the lesson."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from matplotlib.patches import Ellipse
from matplotlib.text import Annotation

import smallnorb_novel_viewpoint as smallnorb
from figure_checks import check_held, check_pictures, check_unchanged, draw_coarsely, drawn, held
from helpers import Capture, Patch
from lesson import visualize_how_capsules_work as pictures
from more import visualize_networks as networks
from smallnorb_novel_viewpoint import count_params
from support.figures import GREEN, darkened
from test_docs import page as reference

STAGES = {  # written by hand from the scripts' docstrings
    "smallnorb_novel_viewpoint": [(32, 32, 1), (16, 16, 16), (8,), (5,), (5,)],
    "multimnist_capsnet": [(36, 36, 1), (28, 28, 32), (10, 10, 8), (10,), (256,), (512,), (36, 36, 1)],
    "mnist_affine_capsnet": [(28, 28, 1), (20, 20, 32), (6, 6, 8), (10,), (256,), (512,), (28, 28, 1)],
    "conv_matrix_capsules": [(32, 32, 1), (16, 16, 32), (16, 16, 4), (7, 7, 4), (5, 5, 8), (5,)],
}


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_a_drawing_has_the_shapes_of_the_network_and_all_its_parameters(name: str) -> None:
    script, stages_of, config, _ = networks.NETWORKS[name]
    params = next(iter(script.make_models(config).values())).init_params(np.random.default_rng(0))
    stages = stages_of(config, params)
    assert [stage.shape for stage in stages] == STAGES[name]
    texts = drawn(lambda: networks.draw_network(name)).axes[0].texts
    numbers = [text.get_text() for text in texts if text.get_color() == darkened(GREEN)]
    assert sum(int(number.replace(",", "")) for number in numbers) == count_params(params)


@pytest.mark.parametrize(("loss", "layer"), [("spread", "activations"), ("cross-entropy", "‖μ‖²/16 + 4(a − ½)")])
def test_the_score_is_that_of_the_loss(loss: str, layer: str) -> None:
    config = smallnorb.Config(loss=loss)
    params = smallnorb.make_models(config)["capsules"].init_params(np.random.default_rng(0))
    assert networks.view_stages(config, params)[-1].layer == layer


def test_a_drawing_is_the_same_every_time_and_may_replace_that_of_a_page(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr(networks, "write_if_changed", write := Mock(wraps=networks.write_if_changed))
    for expected in ("wrote", "unchanged"):
        assert networks.main([f"--outdir={tmp_path}", "--overwrite"]) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [expected] * 4
    assert all(call.args[2:] == (True,) for call in write.call_args_list)


RNG = np.random.default_rng(0)
TRAINED = pictures.Trained("MNIST", RNG.integers(0, 255, (28, 28)), 3, RNG.dirichlet(np.ones(10), (3, 100)),
                           3 * RNG.random(10), RNG.random(10))


C, S, V = RNG.random((4, 100, 10)), RNG.random((4, 10, 8)), np.zeros((4, 10, 8))
V[range(4), [7, 2, 5, 1]] = 0.5
CACHE = (None, None, None, None, [(0.5 * C, S, V), (C, S, V)])
LESSON: Any = {"forward": lambda params, x: (V, CACHE), "params": {}, "test_images": RNG.integers(0, 255, (4, 28, 28)),
          "test_labels": np.array([8, 9, 5, 1]), "folder": None}


def test_the_example_is_the_first_image_that_is_classified_correctly() -> None:
    found = pictures.trained(LESSON)
    assert (found.label, found.dataset) == (5, "digits that the project draws")
    np.testing.assert_array_equal(found.image, LESSON["test_images"][2])
    np.testing.assert_array_equal(found.c, [0.5 * C[2], C[2]])
    np.testing.assert_allclose(found.s, np.linalg.norm(S[2], axis=1))
    np.testing.assert_allclose(found.v, np.linalg.norm(V[2], axis=1))


def test_all_pictures_are_drawn_and_the_same_every_time(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    draw_coarsely(monkeypatch)
    monkeypatch.setattr(pictures, "run_page", lambda: LESSON)
    argv = ["--outdir", str(tmp_path)]
    assert pictures.main(argv) == 0
    check_pictures(tmp_path / pictures.NAME, {*pictures.DRAWN, *pictures.OF_NETWORK})
    monkeypatch.setattr(pictures, "run_page", lambda: pytest.fail("trained, though no figure needs it"))
    for name in pictures.OF_NETWORK:
        (tmp_path / pictures.NAME / f"{name}.png").unlink()
    check_unchanged(pictures, [*argv, "--figures", ",".join(pictures.DRAWN)], tmp_path / pictures.NAME, capsys)


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


def test_drawn_votes_move_to_the_parent_on_which_they_agree() -> None:
    """Areas of dots are couplings, of blue and of red ones. Those of a child add up to 1 over the parents."""
    axes: Any = drawn(pictures.draw_dynamic_routing).axes
    areas = [[dots.get_sizes() for dots in ax.collections] for ax in axes]
    by_parent = np.reshape(areas, (3, 2, 2, 6)) / 260  # iteration, parent, colour, child
    np.testing.assert_allclose(by_parent.sum(axis=1), 1)
    mean = by_parent.mean(axis=3)
    np.testing.assert_allclose(mean[0], 0.5)
    assert (np.diff(mean[:, [0, 1], [0, 1]], axis=0) > 0).all(), "more and more from those that agree"
    np.testing.assert_allclose(mean[2, 0], [0.80, 0.10], atol=0.005)  # as the page says


def test_em_routing_is_that_of_the_four_votes() -> None:
    axes = drawn(pictures.draw_em_routing).axes
    _, _, steps = reference().em_routing(
        pictures.EM_EXAMPLE, np.ones(4), np.full(2, -4.0), np.zeros(2), [1.0] * 3, 0.05
    )
    for plane, table, (r, mu, sigma_sq, _) in zip(axes[:3], axes[3:], steps, strict=True):
        dots: Any = plane.collections
        np.testing.assert_allclose([of_parent.get_sizes() for of_parent in dots], 10 + 170 * r.T)
        ellipses = [patch for patch in plane.patches if isinstance(patch, Ellipse)]
        np.testing.assert_allclose([e.get_center() for e in ellipses], np.repeat(mu, 2, axis=0))
        axes_of = [(e.width, e.height) for e in ellipses]  # each is filled, then outlined
        np.testing.assert_allclose(axes_of, np.repeat(2 * np.sqrt(sigma_sq), 2, axis=0))
        assert [float(text.get_text()) for text in table.texts] == pytest.approx(r.ravel(), abs=0.0051)


def test_what_the_trained_network_does_is_shown_as_it_is() -> None:
    _, lengths, _ = drawn(lambda: pictures.draw_squash(TRAINED)).axes
    points = np.squeeze([at for at in held(lengths)["lines"].values() if len(at[0]) == 1])
    np.testing.assert_array_equal(points, np.stack([TRAINED.s, TRAINED.v], axis=1))
    *maps, bars = drawn(lambda: pictures.draw_couplings(TRAINED)).axes
    check_held(bars, bars=[TRAINED.v])
    for ax, c in zip(maps, TRAINED.c, strict=True):
        share = c[:, 3].reshape(25, 4).mean(axis=1)
        above, below = (np.asarray(marks.get_offsets(), float) for marks in ax.collections)
        blue, red = (np.asarray(marks.get_facecolor(), float) for marks in ax.collections)
        assert (blue[:, 2] >= blue[:, 0]).all()
        assert (red[:, 2] <= red[:, 0]).all()
        places = np.array([(x, y) for y in range(4, 24, 4) for x in range(4, 24, 4)])
        np.testing.assert_array_equal(above, places[share >= 0.1])
        np.testing.assert_array_equal(below, places[share < 0.1])
    margin_loss, _ = drawn(lambda: pictures.draw_losses(TRAINED)).axes
    points = np.squeeze([at for at in held(margin_loss)["lines"].values() if len(at[0]) == 1])
    expected = 0.5 * np.maximum(0, TRAINED.v - 0.1) ** 2
    expected[3] = max(0, 0.9 - TRAINED.v[3]) ** 2
    np.testing.assert_allclose(points, np.stack([TRAINED.v, expected], axis=1))
