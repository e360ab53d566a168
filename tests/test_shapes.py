"""Shapes that the seed draws: what they are made of, how they differ, and which networks see which."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

import smallnorb_novel_viewpoint as smallnorb
from data.shapes import distance, draw_shapes
from helpers import Array, Patch, config_of
from more import conv_matrix_capsules as conv

SCRIPTS = pytest.mark.parametrize("script", [smallnorb, conv])


def shapes_of(seed: int, n: int = 5) -> list[Array]:
    return draw_shapes(np.random.default_rng(seed), n)


def turned(points: Array, degrees: float) -> Array:
    """By the complex plane of the horizontal coordinates."""
    z = (points[:, 0] + 1j * points[:, 2]) * np.exp(1j * np.deg2rad(degrees))
    return np.stack([z.real, points[:, 1], z.imag], axis=1)


def start_of(points: Array) -> float:
    """By how many degrees, up to a quarter turn, the rods are turned from the axes: the way to a cell's nearest one of
    the same height."""
    steps = (points[:, None] - points).reshape(-1, 3)
    lengths = np.linalg.norm(steps, axis=1)
    level = (lengths > 1e-9) & (np.abs(steps[:, 1]) < 1e-9)
    x, _, z = steps[level][lengths[level].argmin()]
    return float(np.rad2deg(np.arctan2(z, x)) % 90)


def farthest(a: Array, b: Array) -> float:
    """How far the point of either set that is the farthest from the other set is from it."""
    return max(
        max(min(float(np.linalg.norm(p - q)) for q in others) for p in ones) for ones, others in ((a, b), (b, a))
    )


@pytest.mark.parametrize("seed", range(10, 20))  # 12 and 14 draw a shape that is another, turned
def test_no_shape_is_another_or_itself_after_a_turn(seed: int) -> None:
    """Least after quarter turns, which bring rods onto rods; after others rods meet at an angle."""
    shapes = shapes_of(seed)
    for k, shape in enumerate(shapes):
        assert min(farthest(shape, turned(shape, turn)) for turn in (90, 180)) > 0.29
        assert min(farthest(shape, turned(shape, turn)) for turn in range(30, 181, 30)) > 0.05
        for other in shapes[:k]:
            assert distance(shape, other) == pytest.approx(farthest(shape, other))
            assert min(farthest(other, turned(shape, turn)) for turn in (-90, 0, 90, 180)) > 0.29
            assert min(farthest(other, turned(shape, turn)) for turn in range(-150, 181, 30)) > 0.05


@pytest.mark.parametrize("seed", range(30))
def test_a_shape_is_made_of_joined_rods_along_the_axes(seed: int) -> None:
    for points in shapes_of(seed):
        box = turned(points, -start_of(points))
        np.testing.assert_allclose(box.min(axis=0), -box.max(axis=0), atol=1e-9)
        assert box.max() == pytest.approx(0.7)
        apart = np.linalg.norm(box[:, None] - box, axis=2) + 9 * np.eye(len(box))
        cells = (box - box.min(axis=0)) / apart.min()
        np.testing.assert_allclose(cells, cells.round(), atol=1e-6)
        assert len({tuple(cell) for cell in cells.round().astype(int)}) == len(cells) <= 1 + 5 * 6
        neighbours = apart < 1.01 * apart.min()
        reached = np.eye(len(box), dtype=bool)[0]
        for _ in box:
            reached |= neighbours[reached].any(axis=0)
        assert reached.all()
        assert 2 <= cells.max() <= 5 * 6


def test_ranges_begin_anywhere_and_together(monkeypatch: Patch) -> None:
    """In each quarter turn, and at any angle of it."""
    starts = []
    for seed in range(200):
        of_seed = np.array([start_of(points) for points in shapes_of(seed, 2)])
        assert np.ptp(of_seed) < 1e-6
        starts.append(of_seed[0])
    assert np.histogram(starts, 5, (0, 90))[0].min() > 20
    monkeypatch.setattr("data.shapes.draw_shape", lambda _: np.array([[0.7, 0, 0], [0, 0, 0]]))  # its first cell tells
    x, _, z = np.array([shapes_of(seed, 1)[0][0] for seed in range(60)]).T
    assert np.histogram(np.arctan2(z, x), 4, (-np.pi, np.pi))[0].min() > 5


@SCRIPTS
def test_the_seed_draws_the_shapes_unless_they_have_their_own(script: ModuleType) -> None:
    def drawn(*flags: str) -> tuple[Array, Array]:
        config = config_of(script, ["--dataset", "shapes", "--n-train-views", "2", "--n-elev", "1", *flags])
        return smallnorb.points_of(config)[0], script.make_data(config).train.images

    (first, _), (second, images) = drawn("--seed=1"), drawn("--seed=2")
    kept, others = drawn("--seed=1", "--shapes-seed=2")
    assert len(first) == 5
    assert not np.array_equal(first[:, :9], second[:, :9])
    np.testing.assert_array_equal(kept, second)
    np.testing.assert_array_equal(drawn("--seed=1", "--shapes-seed=0")[0], drawn("--seed=0")[0])
    assert not np.array_equal(images, others)  # but not the same noise
    assert np.corrcoef(images.ravel(), others.ravel())[0, 1] > 0.98
