"""Block shapes: objects of a few rods along the axes, drawn at random."""

from __future__ import annotations

import numpy as np

Array = np.ndarray

N_RODS, N_CELLS = (3, 5), (3, 7)  # of a shape, of a rod: least and most
SPACING = 0.2  # about, of the points of a rod, where the shape has radius 1
MIN_DISTANCE = 0.35  # between two shapes in the same units: two standard deviations of a drawn point are 0.27


def draw_shapes(rng: np.random.Generator, n: int) -> tuple[Array, Array]:
    """``n`` shapes in the unit ball, as points (n, Q, 3) and a mask (n, Q) over the padding. y is the vertical axis.

    A shape differs by ``MIN_DISTANCE`` from itself after a quarter and after half a turn about y, and from the others
    at every quarter turn. (Other turns bring no rods along x and z onto such rods.) All are then turned about y by the
    same random angle, which draws where a range of azimuths begins.
    """
    shapes: list[Array] = []
    while len(shapes) < n:
        shape = draw_shape(rng)
        turns = [turned(shape, 90.0 * k) for k in range(4)]
        pairs = [(shape, turn) for turn in turns[1:3]] + [(other, turn) for other in shapes for turn in turns]
        if all(distance(*pair) >= MIN_DISTANCE for pair in pairs):
            shapes.append(shape)
    start = rng.uniform(0, 360)
    points = np.zeros((n, max(map(len, shapes)), 3))
    mask = np.zeros(points.shape[:2])
    for k, shape in enumerate(shapes):
        points[k, : len(shape)] = turned(shape, start)
        mask[k, : len(shape)] = 1
    return points, mask


def draw_shape(rng: np.random.Generator) -> Array:
    """Points (Q, 3) of rods that each begin at an end of an earlier one, along all three axes, so that no view shows a
    mere line. The middle of their box is the origin, and the farthest point has distance 1."""
    axes: set[int] = set()
    cells = np.zeros((0, 3))
    while len(axes) < 3 or len(np.unique(cells, axis=0)) < len(cells):  # a flat shape, or rods within each other
        ends, rods, axes = [np.zeros(3)], [np.zeros((1, 3))], set()
        for _ in range(rng.integers(N_RODS[0], N_RODS[1], endpoint=True)):
            n_cells = rng.integers(N_CELLS[0], N_CELLS[1], endpoint=True)
            start, axis, sign = ends[rng.integers(len(ends))], int(rng.integers(3)), rng.choice((-1, 1))
            rods.append(start + sign * np.outer(np.arange(1, n_cells), np.eye(3)[axis]))  # without the cell it shares
            ends.append(rods[-1][-1])
            axes.add(axis)
        cells = np.concatenate(rods)
    middle = (cells.min(axis=0) + cells.max(axis=0)) / 2
    radius = np.linalg.norm(cells - middle, axis=1).max()
    points = [rods[0]]
    for rod in rods[1:]:
        start, n = 2 * rod[0] - rod[1], int(np.ceil(len(rod) / radius / SPACING))
        points.append(np.linspace(start, rod[-1], n + 1)[1:])
    return (np.concatenate(points) - middle) / radius


def turned(points: Array, degrees: float) -> Array:
    """Points (Q, 3) after a turn about y."""
    c, s = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    return points @ np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]]).T


def distance(a: Array, b: Array) -> float:
    """The Hausdorff distance of two sets of points (Q, 3) and (R, 3): of any point from the other set, the greatest."""
    apart = np.linalg.norm(a[:, None] - b, axis=2)  # (Q, R)
    return float(max(apart.min(axis=0).max(), apart.min(axis=1).max()))
