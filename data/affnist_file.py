"""Published files of affNIST, MNIST's digits under random affine maps on 40x40 pixels (Tieleman 2013)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from data.digit_files import read_mat
from data.files import UserError, expanded
from data.stroke_digits import stroke_digits

Array = np.ndarray

AFFNIST_SIDE = 40  # pixels
N_DRAWN, N_COMPARED = 500, 1000  # upright digits, whose means tell how the first images lie


def read_affnist(path: Path) -> tuple[Array, Array]:
    """A published affNIST file, ``test_batches/15.mat`` for instance -> images (N, 40, 40) uint8, labels (N,).

    It is a MATLAB file (version 5) of one struct, ``affNISTdata``, whose ``image`` is (1600, N) uint8 and whose
    ``label_int`` has the N digits. Files differ in whether the 1600 run along rows or columns: images are transposed
    where that makes them more alike to the means of drawn digits. Raises UserError for any other file.
    """

    def arrays(struct: Any) -> tuple[Array, Array]:
        pixels, labels = np.asarray(struct["image"]), np.asarray(struct["label_int"]).ravel()
        are_digits = labels.dtype.kind in "iuf" and np.isin(labels, range(10)).all()
        if pixels.dtype != np.uint8 or pixels.shape != (AFFNIST_SIDE**2, len(labels)) or not are_digits:
            raise ValueError("it has no images (1600, N) uint8 with a label from 0 to 9 for each")
        return np.ascontiguousarray(pixels.T).reshape(-1, AFFNIST_SIDE, AFFNIST_SIDE), labels.astype(np.intp)

    try:
        images, labels = read_mat(expanded(path), "affNISTdata", arrays)
    except ValueError as error:
        raise UserError(f"it is no affNIST file: {error}") from error
    is_upright = uprightness(images[:N_COMPARED], labels[:N_COMPARED]) >= 0
    return images if is_upright else images.transpose(0, 2, 1), labels


def uprightness(images: Array, labels: Array) -> float:
    """How much more alike images (N, 40, 40) are to the mean digits of their classes than to these with rows and
    columns exchanged; all are centred."""
    drawn, classes = stroke_digits(np.random.default_rng(0), N_DRAWN)
    means = [centred(drawn[classes == label]).mean(axis=0) for label in range(10)]  # (40, 40)
    return float(sum(np.vdot(x, means[k] - means[k].T) for x, k in zip(centred(images), labels, strict=True)))


def centred(images: Array) -> Array:
    """Images of any size with their centres of mass in the middle of (N, 40, 40)."""
    middle, found = AFFNIST_SIDE // 2, np.zeros((len(images), AFFNIST_SIDE, AFFNIST_SIDE))
    for out, image in zip(found, images, strict=True):
        n, mass = len(image), max(1.0, float(image.sum(dtype=float)))
        shift = [middle - round(float(image.sum(axis=axis) @ np.arange(n)) / mass) for axis in (1, 0)]
        out[:n, :n] = image
        out[...] = np.roll(out, shift, (0, 1))
    return found
