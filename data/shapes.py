"""Block shapes: objects of a few rods along the axes, drawn at random."""

from __future__ import annotations

import numpy as np

Array = np.ndarray

N_RODS, N_CELLS = (3, 5), (3, 7)  # of a shape, of a rod: least and most
HALF_WIDTH = 0.7  # of a shape along the longest side of its box, in units of half the frame
MIN_DISTANCE = 0.3  # between two shapes in the same units: two standard deviations of a drawn cell are 0.27


def draw_shapes(rng: np.random.Generator, n: int) -> list[Array]:
    """``n`` shapes, each as points (Q, 3), a cell each. y is the vertical axis.

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
    return [turned(shape, start) for shape in shapes]


def draw_shape(rng: np.random.Generator) -> Array:
    """The cells (Q, 3) of rods that each begin at an end of an earlier one, centred and scaled into the frame."""
    ends, cells = [np.zeros(3)], [np.zeros((1, 3))]
    for _ in range(rng.integers(N_RODS[0], N_RODS[1], endpoint=True)):
        n_cells = rng.integers(N_CELLS[0], N_CELLS[1], endpoint=True)
        start, axis, sign = ends[rng.integers(len(ends))], rng.integers(3), rng.choice((-1, 1))
        cells.append(start + sign * np.outer(np.arange(1, n_cells), np.eye(3)[axis]))  # without the cell they share
        ends.append(cells[-1][-1])
    shape = np.unique(np.concatenate(cells), axis=0)
    shape -= (shape.min(axis=0) + shape.max(axis=0)) / 2
    return HALF_WIDTH / shape.max() * shape


def turned(points: Array, degrees: float) -> Array:
    """Points (Q, 3) after a turn about y."""
    c, s = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    return points @ np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]]).T


def distance(a: Array, b: Array) -> float:
    """The Hausdorff distance of two sets of points (Q, 3) and (R, 3): of any point from the other set, the greatest."""
    apart = np.linalg.norm(a[:, None] - b, axis=2)  # (Q, R)
    return float(max(apart.min(axis=0).max(), apart.min(axis=1).max()))
