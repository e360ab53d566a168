"""Published files of affNIST, MNIST's digits under random affine maps on 40x40 pixels (Tieleman 2013)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from support.output import UserError, one_line

Array = np.ndarray

AFFNIST_SIDE = 40  # pixels


def read_affnist(path: Path) -> tuple[Array, Array]:
    """A published affNIST file, ``test_batches/15.mat`` for instance -> images (N, 40, 40) uint8, labels (N,).

    It is a MATLAB file (version 5) of one struct, ``affNISTdata``, whose ``image`` is (1600, N) uint8 and whose
    ``label_int`` has the N digits. Files differ in whether the 1600 run along rows or columns: images are transposed if
    the ones lie, that is, change more from row to row than from column to column. Raises UserError for any other file.
    """
    from scipy.io import loadmat

    try:
        with path.open("rb") as opened:  # loadmat's own word on a missing file does not say that it is missing
            struct = loadmat(opened, variable_names=["affNISTdata"])["affNISTdata"][0, 0]
        pixels, labels = np.asarray(struct["image"]), np.asarray(struct["label_int"]).ravel()
        are_digits = labels.dtype.kind in "iuf" and np.isin(labels, range(10)).all()
        if pixels.dtype != np.uint8 or pixels.shape != (AFFNIST_SIDE**2, len(labels)) or not are_digits:
            raise ValueError("it has no images (1600, N) uint8 with a label from 0 to 9 for each")
    except Exception as error:  # scipy raises many kinds on a damaged file: TypeError, zlib.error, MatReadError, ...
        raise UserError(f"{path} is not an affNIST file that can be read: {one_line(error)}") from error
    images = np.ascontiguousarray(pixels.T).reshape(-1, AFFNIST_SIDE, AFFNIST_SIDE)
    ones = images[labels == 1].astype(int)
    if np.abs(np.diff(ones, axis=1)).sum() > np.abs(np.diff(ones, axis=2)).sum():
        images = images.transpose(0, 2, 1)
    return images, labels.astype(np.intp)
