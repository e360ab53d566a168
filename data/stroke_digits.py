"""Generated handwritten digits, 28x28 grey values, for runs without MNIST.

Each digit is drawn in four steps. A skeleton, one of several ways to write the digit, is chosen: a few control points
of a smooth curve that the pen follows. The points are jittered, and the curve is bent, tapered, displaced by sine
waves, slanted, stretched and turned, all by random amounts. The curve is fitted into MNIST's box of 20 pixels and
centred by its mass. A pen of random radius and edge width then turns distances from the curve into grey values.

    n  digits     K  skeletons     P  control points of a skeleton     S  steps of the pen     R  points of a curve
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Array = np.ndarray

# Several ways to write each digit, as points that the pen passes on a smooth curve: "xxyy" in percent of the
# writing box, y down. A point given twice is a corner, | lifts the pen, the number in front is the weight.
SKELETONS = {
    0: (
        "3: 5002 2515 1050 2585 5098 7585 9050 7515 5002",
        "2: 6205 3206 1240 1775 4098 7580 8545 6812 4004",
        "1: 6515 3508 1535 1575 4598 8075 8530 6006 4018",
        "1: 6515 4003 1540 2585 5598 8560 7515 5005 5025",
        "1: 3520 4003 1540 2585 5598 8560 7515 5008 2030",
        "1: 5002 2515 1050 2585 5098 7585 9050 7515 5002|2080 8020",
    ),
    1: (
        "9: 5000 5050 5099",
        "1: 3020 5500 5500 5250 5099",
        "1: 3020 5200 5200 5098|2599 8099",
        "1: 1525 5200 5200 5098|0599 9597",
    ),
    2: (
        "2: 1522 4002 7515 7040 4570 1095 1095 5095 9092",
        "1: 1520 4502 7520 6050 3085 1595 1280 3078 5592 9088",
        "2: 2022 4503 6822 5560 2595 0590 0872 3068 6085 9990",
        "1: 1010 5004 8005 8005 4550 1095 1095 5096 9595",
        "1: 1525 3805 6010 6030 3570 1092 1092 5088 9892",
        "1: 2020 4502 7018 6045 3095 3095 8092",
        "2: 1535 4012 6525 5055 2588 0588 1572 4080 7095 9980",
        "1: 3530 2018 4502 7520 6050 1595 1595 5090 9092",
        "1: 2025 4503 6518 5050 2595 1080 3570 6090 9099",
        "1: 4035 2035 2010 5002 7525 5565 1598 1598 5092 9095",
        "1: 2015 5003 7020 6050 3095 0590 0570 3065 9585",
    ),
    3: (
        "3: 1510 5002 8020 4548 4548 8570 5098 1088",
        "1: 1205 8003 8003 4542 4542 8565 6098 1090",
        "2: 1515 4502 7520 5545 3550 5550 8572 5098 1085",
        "1: 1510 4502 7018 4045 4045 8060 7590 4099 0590",
        "1: 1512 4003 7008 6028 4545 4545 7055 6585 3099",
        "1: 2520 2505 5502 7520 4545 4545 8065 7090 4098 1580",
    ),
    4: (
        "2: 2002 1550 1550 8550|7500 7050 7099",
        "3: 2002 1545 4555 8048|8000 7550 7099",
        "1: 6502 1065 1065 9065|6502 6550 6599",
        "2: 2505 1050 1050 5550 9948|7015 6050 5599",
        "1: 2505 2040 5050 7530 8005 8005 7060 6599",
        "1: 4502 0560 0560 9555|6035 6070 5599",
    ),
    5: (
        "2: 8003 3005 3005 2045 5538 8565 5098 1090",
        "1: 9502 4008 4008 3045 6550 7078 4098 0590",
        "2: 2505 2045 5538 8868 5098 1088|2505 9003",
        "1: 3515 2548 6048 7578 4098 1088|3512 9902",
        "1: 8503 4008 2030 6050 7578 4098 1085",
        "1: 9000 5006 5006 3545 5550 6575 3598 1090",
    ),
    6: (
        "2: 6500 3025 1060 3095 7590 7562 4555 1570",
        "2: 5500 2550 2085 5098 7878 6058 2570",
        "1: 6002 3535 2575 4098 7085 6565 3575",
        "1: 4500 1545 1080 4599 9080 7055 3060 1585",
        "1: 7510 5002 2030 1070 4098 8080 7055 4555 1575",
        "2: 3002 1050 1585 5098 8885 8560 6050 3565 3085 4095",
    ),
    7: (
        "4: 1008 8505 8505 6050 4599",
        "2: 1008 8505 8505 6050 4599|3055 8050",
        "1: 1025 1208 1208 8505 8505 6050 4599",
        "1: 1010 5012 8506 6050 4599",
        "1: 1030 1508 5012 8805 7045 5099",
        "1: 1030 1510 1510 5010 7525 6560 6099",
        "1: 1015 2508 5012 8505 6050 4599|3052 8048",
    ),
    8: (
        "3: 7515 5002 2515 3538 6555 8078 5098 2082 3560 6540 7515",
        "2: 8505 4002 2018 5045 7575 4598 2075 5050 8505",
        "1: 5045 2525 5002 7525 5045 2072 5098 8072 5045",
        "1: 8515 5003 1525 4048 6075 4598 3080 5550 8515",
        "1: 9010 6015 3003 1520 4045 6070 4598 2575 5050 9010",
    ),
    9: (
        "2: 7825 5003 2020 2548 5548 7525 7510 7510 7055 6099",
        "1: 7825 5003 2020 2548 5548 7525 7510 7510 7560 4598 2088",
        "2: 7008 4803 3018 3534 5532 7010 7010 6555 5599",
        "1: 8030 6003 2010 1040 4562 7545 8515 8515 8055 8099",
        "2: 7030 4545 2030 4503 7215 7050 6099",
        "1: 8510 5003 1525 3545 7540 8515 8060 5598 1590",
        "1: 8008 5010 2025 2545 5545 8025 7565 6599",
        "1: 8005 4010 1540 5048 8010 8010 7050 6599",
    ),
}
PEN_STEPS = 72  # S, from one pen position to the next, for the whole of a skeleton
CATMULL_ROM = np.array([[0, 2, 0, 0], [-1, 0, 1, 0], [2, -5, 4, -1], [-1, 3, -3, 1]]) / 2  # (t power, point)


# How much digits vary: standard deviations, in units of the writing box where no other unit is given.
JITTER = 0.06  # of each control point
BEND = 0.25  # of the coefficients of x², xy, y²: bows and tapers
N_WAVES, WARP = 3, 0.04  # sine waves that displace the path by this much each
SLANT = (0.15, 0.3)  # mean and deviation of the shear to the right
TURN = 0.15  # radians
ASPECT = 0.22  # of log(width / height)
PEN = (1.3, 0.25)  # median radius in pixels, deviation of its log
EDGE = (1.2, 0.2)  # the same for the width of the soft edge
SHIFT = 0.3  # pixels
CHUNK = 250  # digits drawn at a time


class Skeletons(NamedTuple):
    """K skeletons as linear maps from control points (P, padded) to pen positions (S+1)."""

    upto: Array  # (K,) digit + cumulative weight of its skeletons up to this one, from 0 to 1
    control: Array  # (K, P, 2)
    basis: Array  # (K, S+1, P) pen = basis @ control
    down: Array  # (K, S) 1 where the pen is down on this step, else 0


def compile_skeletons() -> Skeletons:
    """SKELETONS as Catmull-Rom splines through their points, cut into steps of even length."""
    digit = np.repeat(list(SKELETONS), [len(ways) for ways in SKELETONS.values()])  # (K,)
    entries = [entry.split(":") for ways in SKELETONS.values() for entry in ways]
    K, P = len(entries), max(len(text.replace("|", " ").split()) for _, text in entries)
    weights = np.array([float(weight) for weight, _ in entries])  # (K,)
    total = np.bincount(digit, weights)  # (10,)
    upto = digit + (np.cumsum(weights) - (np.cumsum(total) - total)[digit]) / total[digit]

    control, basis = np.zeros((K, P, 2), np.float32), np.zeros((K, PEN_STEPS + 1, P), np.float32)
    down = np.zeros((K, PEN_STEPS), np.float32)
    powers = np.linspace(0, 1, 50)[:, None] ** np.arange(4)  # (50, 4) of t along one piece of the spline
    for k, (_, text) in enumerate(entries):
        rows, stroke_of_row, used = [], [], 0
        for number, stroke in enumerate(text.split("|")):
            points = np.array([(int(word[:2]), int(word[2:])) for word in stroke.split()]) / 100  # (p, 2)
            fresh = np.any(np.diff(points, axis=0, prepend=-1) != 0, axis=1)
            column = used - 1 + np.cumsum(fresh)  # both sides of a corner are one control point
            used = column[-1] + 1
            control[k, column] = points
            pick = np.eye(P)[column]  # (p, P)
            pick = np.vstack((2 * pick[0] - pick[1], pick, 2 * pick[-1] - pick[-2]))
            pieces = [powers @ CATMULL_ROM @ pick[i : i + 4] for i in np.flatnonzero(fresh[1:])]
            rows += pieces
            stroke_of_row += [number] * sum(map(len, pieces))
        dense, stroke_of = np.vstack(rows), np.array(stroke_of_row)  # (R, P), (R,)
        length = np.linalg.norm(np.diff(dense @ control[k], axis=0), axis=1) * (np.diff(stroke_of) == 0)
        along = np.append(0, np.cumsum(length + 1e-9))
        step = np.searchsorted(along, np.linspace(0, along[-1], PEN_STEPS + 1))
        basis[k], down[k] = dense[step], np.diff(stroke_of[step]) == 0
    return Skeletons(upto, control, basis, down)


def stroke_digits(rng: np.random.Generator, n: int) -> tuple[Array, Array]:
    """Draw n digits, the classes as even as n allows, in random order.

    Returns images (n, 28, 28) uint8, prepared as MNIST's are (strokes in a box of 20 pixels, centred by mass),
    and labels (n,) uint8. Memory beyond the result is that of one chunk.
    """
    skeletons = compile_skeletons()
    labels = rng.permutation(np.arange(n) % 10).astype(np.uint8)
    images = np.empty((n, 28, 28), np.uint8)
    for start in range(0, n, CHUNK):
        images[start : start + CHUNK] = _draw(rng, skeletons, labels[start : start + CHUNK])
    return images, labels


def _draw(rng: np.random.Generator, skeletons: Skeletons, labels: Array) -> Array:
    """One image (n, 28, 28) uint8 for each of the labels (n,)."""
    n = len(labels)

    def gaussian(*shape: int) -> Array:
        return rng.standard_normal((n, *shape), np.float32)

    # The pen's path: jittered control points, then bows and tapers, then long waves.
    k = np.searchsorted(skeletons.upto, labels + rng.random(n), side="right")
    control = skeletons.control[k] - 0.5  # (n, P, 2)
    control += JITTER * gaussian(*control.shape[1:])
    pen = skeletons.basis[k] @ control  # (n, S+1, 2)
    x, y = pen[..., :1], pen[..., 1:]
    pen = pen + np.concatenate((x * x, x * y, y * y), axis=2) @ (BEND * gaussian(3, 2))
    phase = pen @ (2.5 * gaussian(2, N_WAVES)) + 3 * gaussian(1, N_WAVES)  # (n, S+1, waves)
    pen += np.sin(phase) @ (WARP * gaussian(N_WAVES, 2))

    # Slant, aspect ratio and rotation, one matrix a digit.
    slant, aspect = SLANT[0] + SLANT[1] * gaussian(), np.exp(ASPECT * gaussian())
    turn = TURN * gaussian()
    cos, sin = np.cos(turn), np.sin(turn)
    affine = np.stack((aspect * cos, aspect * sin, -slant * cos - sin, cos - slant * sin), axis=1)
    pen = pen @ affine.reshape(n, 2, 2)

    # Into the box of 20 pixels, the centre of mass to where MNIST has it.
    radius = PEN[0] * np.exp(PEN[1] * gaussian(1))  # (n, 1) pixels
    pen *= ((20 - 2 * radius) / np.ptp(pen, axis=1).max(axis=1, keepdims=True))[..., None]
    step = np.diff(pen, axis=1)
    lengths = np.sqrt(np.sum(step * step, axis=2)) * skeletons.down[k]  # (n, S) pixels of line
    pen = pen[:, :-1] + step / 2  # (n, S, 2) the steps' middles
    centre = np.matmul(lengths[:, None], pen) / lengths.sum(axis=1)[:, None, None]  # (n, 1, 2)
    low, high = pen.min(axis=1, keepdims=True), pen.max(axis=1, keepdims=True)
    margin = radius[..., None] + 1.5  # so that no stroke leaves the image
    pen += np.clip(14.5 - centre + SHIFT * gaussian(1, 2), margin - low, 28 - margin - high)

    # The line integral of a Gaussian along the path is exp(-d²/2σ²) at distance d from a line. Solved for d,
    # which is held against the radius, it gives grey values; close strokes merge.
    sigma = 0.7 * radius  # (n, 1)
    z = (pen[..., None] - (np.arange(28, dtype=np.float32) + 0.5)) / sigma[..., None, None]
    blur = np.exp(-0.5 * z * z)  # (n, S, 2, 28)
    lengths /= np.sqrt(2 * np.pi) * sigma
    line = np.matmul((blur[:, :, 1] * lengths[..., None]).transpose(0, 2, 1), blur[:, :, 0])  # (n, 28, 28)
    d = sigma[..., None] * np.sqrt(-2 * np.log(np.clip(line, 1e-9, 1)))
    edge = EDGE[0] * np.exp(EDGE[1] * gaussian(1, 1))
    return (255 * np.clip(0.5 + (radius[..., None] - d) / edge, 0, 1)).astype(np.uint8)
