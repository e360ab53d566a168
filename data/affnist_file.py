"""Published files of affNIST, MNIST's digits under random affine maps on 40x40 pixels (Tieleman 2013)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from support.console import one_line
from support.files import UserError

Array = np.ndarray

AFFNIST_SIDE = 40  # pixels


def read_affnist(path: Path) -> tuple[Array, Array]:
    """A published affNIST file, ``test_batches/15.mat`` for instance -> images (N, 40, 40) uint8, labels (N,).

    It is a MATLAB file (version 5) of one struct, ``affNISTdata``, whose ``image`` is (1600, N) uint8 and whose
    ``label_int`` has the N digits. Files differ in whether the 1600 run along rows or columns: images are transposed if
    the ones would lie down. Raises UserError for any other file.
    """
    from scipy.io import loadmat

    try:
        with path.open("rb") as opened:  # loadmat's own word on a missing file does not say that it is missing
            struct = loadmat(opened, variable_names=["affNISTdata"])["affNISTdata"][0, 0]
        pixels, labels = np.asarray(struct["image"]), np.asarray(struct["label_int"]).ravel()
    except FileNotFoundError:
        raise UserError(f"there is no affNIST file {path}") from None
    except Exception as error:  # scipy raises many kinds on a damaged file: TypeError, zlib.error, MatReadError, ...
        raise UserError(f"{path} is not an affNIST file that can be read: {one_line(error)}") from error
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or len(pixels) != AFFNIST_SIDE**2 or not pixels.shape[1]:
        raise UserError(f"{path} has images of shape {pixels.shape} and type {pixels.dtype}, not (1600, N) uint8")
    if labels.dtype.kind not in "iuf" or labels.shape != (pixels.shape[1],) or not np.isin(labels, range(10)).all():
        raise UserError(f"{path} does not have a label from 0 to 9 for each of its {pixels.shape[1]} images")
    images = np.ascontiguousarray(pixels.T).reshape(-1, AFFNIST_SIDE, AFFNIST_SIDE)
    if is_wide(images[labels == 1]):
        images = images.transpose(0, 2, 1)
    return images, labels.astype(np.intp)


def is_wide(images: Array) -> bool:
    """Whether the strokes of images (N, H, W) vary more along columns than along rows, summed over images."""
    variance = []
    for axis in (2, 1):
        mass = images.sum(axis=axis, dtype=float) + 1e-9  # (N, H or W)
        position, total = np.arange(mass.shape[1]), mass.sum(axis=1)
        variance.append((mass @ position**2 / total - (mass @ position / total) ** 2).sum())
    return bool(variance[0] < variance[1])
