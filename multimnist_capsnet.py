#!/usr/bin/env python3
"""MultiMNIST: a capsule network with dynamic routing against two CNNs, in numpy, every gradient by hand.

Claim reproduced: [Sabour 2017] S. Sabour, N. Frosst, G. Hinton, "Dynamic routing between capsules", NIPS 2017,
section 6. Two digits of different classes are laid over each other; capsules that route by agreement recognise both and
reconstruct each alone, although they overlap almost wholly.

    image            (B, 36, 36)           pixel-wise maximum of two shifted digits
    conv1 + ReLU     (B, 28, 28, 32)       9x9
    primary capsules (B, 800, 8)           9x9, stride 2, 8 types on a 10x10 grid; squash
    votes            (B, 800, 10, 16)      u_hat_ij = u_i W_ij, never stored
    digit capsules   (B, 10, 16)           three iterations of dynamic routing; |v_j| says whether digit j is there
    decoder          (B, 36, 36)           256 - 512 - 1296, from one digit capsule, the others masked

The two CNNs have as many parameters: one keeps both convolutions and ends in dense layers, the other is of the paper's
kind, with max pooling. All three go through the same loop, data and optimiser; the two highest scores are the answer.
Convolutions are shown by im2col; those of many channels are computed as products of spectra, which is faster
(``support/spectral_conv.py``; ``--conv im2col`` uses the plain form for all).

What sets a capsule network apart from a CNN can be switched off part by part. [Gu 2021] J. Gu, V. Tresp, H. Hu,
"Capsule network is not more robust than convolutional network", CVPR 2021 (arXiv 2103.15459) names five parts:

    transformation   u_hat_ij = u_i W_ij. The capsule network always has it; ``--transform shared`` has one W_j for
                     all primary capsules, as in [Gu 2020] J. Gu, V. Tresp, "Improving the robustness of capsule
                     networks to image affine transformations", CVPR 2020 (arXiv 1911.07968), which does not route
    routing          ``--assignments uniform``: all couplings are 1 / J
    squash           ``--activation relu``: primary capsules have a ReLU, as in a CNN, and digit capsules are s_j
    margin loss      ``--capsnet-loss cross-entropy``: the softmax cross-entropy of the lengths
    reconstruction   of each class from its own capsule; ``--recon-weight 0``

Deviations from the paper: conv1 has 32 channels and there are 8 types of primary capsules, not 256 and 32
(``--preset paper`` has them). The paper's digits share 80 % of their boxes on average, which is an intersection over
union of 0.68; here it is at least 0.8 in every image (``--min-iou 0`` draws as the paper does). The CNN with pooling
has as many channels in its second convolution as in its first, not half. There are 1,496 steps, and the reconstruction
weighs ten times as much.

Run it (eight epochs of 6,000 fresh composites, seed 0, three models):

    python multimnist_capsnet.py
"""

from __future__ import annotations

import support.startup  # noqa: F401  before the others, for Ctrl-C

# isort: split

import argparse
import dataclasses
import itertools
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from data.labelled_pictures import read_class_names
from data.pictures import picture_sheet, read_strokes
from data.stroke_digits import stroke_digits
from support.console import one_line, print_message
from support.download import UnavailableError, download
from support.files import CACHE_DIR, UserError, atomic_write
from support.mnist_files import find_mnist_file, read_idx
from support.optimizers import TrainState, adamw_step, count_params, muon_step
from support.results import model_metrics, result_document, run_script
from support.spectral_conv import spectral_conv2d_backward, spectral_conv2d_forward
from support.tables import routing_study_lines, seed_of, two_label_table
from support.workers import LEAST_PART, Workers, Workspace, default_threads

from support.flags import (  # isort: skip
    Parser, add_file_flags, add_flags, non_empty, number, values_of, whole_number,
)  # fmt: skip
from support.run import (  # isort: skip
    NO_FILES, Callback, Files, Session, Stream, check_same, generator, init_state, of_models, permutation,
    read_checkpoint, require_finite,
)  # fmt: skip

# Dimension letters
#   B  images of a batch          N  examples of a set            L  digits in an image (2)
#   H, W    rows and columns      Ho, Wo  of a convolution's output         K  side of a kernel
#   C  channels                   C'      of a convolution's output (n_out in the code)
#   T  types of primary capsules  I  primary capsules             P  entries of a primary capsule (8)
#                                 J  digit capsules (= classes)   D  entries of a digit capsule (16)

Array = np.ndarray
Params = dict[str, Array]

EXPERIMENT = "multimnist_capsnet"
DIGITS = tuple("0123456789")
N_CLASSES = 10
DIGIT_SIDE = 28
KERNEL = 9
PRIMARY_SIZE = 8
CAPSULE_SIZE = 16
WARMUP = 100  # steps


# ----------------------------------------------------------------------------------------------------------------------
# Configuration: user inputs only
# ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
    """Digits, networks and training, for every experiment that trains these networks. The paper's values, where others
    are the default, are in the comments. [Sabour 2017, sec. 4 to 6]"""

    dataset: str = "auto"
    data_dir: str | None = None
    seed: int = 0
    n_epochs: int = 8
    n_train: int = 6000  # composites an epoch; 60 million in all
    n_test: int = 2000  # 10 million
    n_val: int | None = None
    max_shift: int = 4  # pixels
    image_size: int = 36
    conv_channels: int = 32  # 256
    primary_types: int = 8  # 32
    decoder: tuple[int, int] = (256, 512)  # 512, 1024
    assignments: str = "routed"
    routing_iters: int = 3
    routing_grad: str = "exact"
    transform: str = "own"
    activation: str = "squash"
    capsnet_loss: str = "margin"
    recon_weight: float = 0.005  # 0.0005
    batch_size: int = 32  # 128 in the published code
    lr: float = 5e-3  # 1e-3
    lr_schedule: str = "linear"  # exponential
    optimizer: str = "adam"
    weight_decay: float = 0.0
    dtype: str = "float32"
    conv: str = "spectral"  # or "im2col": how convolutions of many channels are computed
    class_names: tuple[str, ...] = ()  # of files that are not digits, from these; no flag sets it

    flags: ClassVar[dict[str, str]] = {
        "image_size": "--canvas", "decoder": "--preset with the decoder", "class_names": "the classes",
    }  # fmt: skip

    @property
    def classes(self) -> tuple[str, ...]:
        return self.class_names or DIGITS

    @property
    def n_classes(self) -> int:
        return len(self.classes)

    @property
    def free_to_change(self) -> set[str]:
        """Fields in which a resumed run may differ: its length, where the learning rate does not depend on it."""
        return {"data_dir"} | ({"n_epochs"} if self.lr_schedule in ("constant", "exponential") else set())

    @property
    def primary_side(self) -> int:
        """Rows, and columns, of the grid of primary capsules."""
        return (self.image_size - 2 * KERNEL + 1) // 2 + 1

    @property
    def n_primary(self) -> int:
        return self.primary_side**2 * self.primary_types

    @property
    def class_loss(self) -> str:
        """Name of the digit capsules' loss in a history."""
        return f"train_{self.capsnet_loss.replace('-', '_')}_loss"

    @property
    def steps_per_epoch(self) -> int:
        """Full batches only."""
        return max(1, self.n_train // self.batch_size)

    @property
    def n_steps(self) -> int:
        return self.steps_per_epoch * self.n_epochs

    def lr_at(self, step: int) -> float:
        """Learning rate of a step; steps count from 0. It rises for ``WARMUP`` steps, then follows the schedule."""
        factor = {
            "constant": 1.0,
            "linear": 1 - step / self.n_steps,
            "cosine": 0.5 * (1 + math.cos(math.pi * step / self.n_steps)),
            "exponential": 0.96 ** (step / 2000),  # the authors' published code
        }[self.lr_schedule]
        return self.lr * factor * min(1.0, (step + 1) / WARMUP)


@dataclasses.dataclass(frozen=True)
class Config(NetworkConfig):
    """One run on composites of two digits."""

    pool: int = 0  # composites drawn once and for all; 0: every batch is fresh
    min_iou: float = 0.8  # 0
    n_labels: int = 2  # always; kept so that older checkpoints can be read

    @property
    def n_pairs(self) -> int:
        """Number of pairs of different classes."""
        return self.n_classes * (self.n_classes - 1) // 2


# ----------------------------------------------------------------------------------------------------------------------
# Data, 1: MNIST files, or generated digits
# ----------------------------------------------------------------------------------------------------------------------


class Digits(NamedTuple):
    """Single digits. ``name`` is what stands in tables, JSON and titles: "mnist", "strokes" or "custom"."""

    name: str
    train_images: Array  # (N, 28, 28) uint8, strokes are 255
    train_labels: Array  # (N,) uint8, 0 to 9 of digits
    test_images: Array  # (N, 28, 28) uint8
    test_labels: Array  # (N,) uint8


MIRRORS = "https://storage.googleapis.com/cvdf-datasets/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_SHA256 = {
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}  # of the .gz files
MNIST_CRC32 = 0x1939F699  # of the four arrays' bytes, in the order of Digits


def load_mnist(data_dir: Path | None = None, cache_dir: Path | None = None, mirrors: Sequence[str] = MIRRORS) -> Digits:
    """MNIST from ``data_dir``, else from the cache, else from the mirrors into the cache.

    A file in the cache folder itself is the user's: it is read, and never replaced. A damaged one raises UserError.
    Downloads are kept in the subfolder ``downloaded``; a damaged one is downloaded again. Intact files that are not
    the canonical MNIST are read, and the set is called "custom". Raises UserError, or UnavailableError when there is no
    file and no download.
    """
    if data_dir is not None and not os.path.isdir(data_dir):  # unlike Path.is_dir, never raises
        raise UserError(f"--data-dir {data_dir} is no folder: name the one with the four MNIST files")
    folder = data_dir or cache_dir or Path(os.path.expanduser(CACHE_DIR))
    paths = []
    for stem in MNIST_SHA256:
        path = find_mnist_file(folder, stem)
        if path is None and data_dir is not None:
            raise UserError(f"{data_dir} has no {stem}.gz nor {stem}: put the four MNIST files there")
        downloaded, instead = folder / "downloaded" / f"{stem}.gz", "name the four files' folder with --data-dir"
        instead += ", or take --dataset strokes"
        paths.append(path or download(downloaded, MNIST_SHA256[stem], mirrors, "MNIST", instead))

    arrays = [read_idx(path, ndim) for path, ndim in zip(paths, (3, 1, 3, 1), strict=True)]
    for i in (0, 2):
        images, labels = arrays[i : i + 2]
        if len(images) != len(labels):
            raise UserError(
                f"{paths[i]} has {len(images)} images but {paths[i + 1]} has {len(labels)} labels: "
                "take both from the same source"
            )
    crc = 0
    for array in arrays:
        crc = zlib.crc32(array.data, crc)
    return Digits("mnist" if crc == MNIST_CRC32 else "custom", *arrays)


def require_digits(digits: Digits, folder: Path | None = None) -> None:
    """Raises UserError where there are labels beyond those of digits."""
    if (most := max(digits.train_labels.max(), digits.test_labels.max())) > 9:
        raise UserError(f"{folder or CACHE_DIR} has the label {most}: the labels of digits must be 0 to 9")


def named_classes(digits: Digits, folder: Path | None, classes: Sequence[str] = ()) -> tuple[Digits, tuple[str, ...]]:
    """Any set of MNIST's format, with its labels counted from 0, and the names of the classes, see
    ``read_class_names``. ``classes``: those of a trained network, among which all must be. Raises UserError."""
    found, names = np.arange(N_CLASSES), DIGITS
    if digits.name == "custom":
        found = np.unique(np.concatenate([digits.train_labels, digits.test_labels]))
        names = read_class_names(folder, found)
    known = tuple(classes) or names
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"there are images of the class {unknown[0]}, which is none that the network was trained on")
    number = np.array([known.index(name) for name in names])
    train, test = (number[np.searchsorted(found, labels)] for labels in (digits.train_labels, digits.test_labels))
    return digits._replace(train_labels=train, test_labels=test), known


def has_mnist_files(folder: Path) -> bool:
    return any(find_mnist_file(folder, stem) for stem in MNIST_SHA256)


def resolve_dataset(
    choice: str, rng: np.random.Generator, data_dir: Path | None = None,
    stroke_counts: tuple[int, int] = (20_000, 5_000), cache_dir: Path | None = None, mirrors: Sequence[str] = MIRRORS,
) -> Digits:  # fmt: skip
    """The digits that ``--dataset`` asks for: "mnist", "strokes", or "auto".

    "auto" is MNIST where it is there or can be downloaded, else strokes with a warning on stderr. A damaged file and a
    wrong --data-dir raise UserError with "auto" too. ``rng`` draws the stroke digits, training and test set from
    separate streams.
    """
    if choice in ("auto", "mnist"):
        try:
            return load_mnist(data_dir, cache_dir, mirrors)
        except UnavailableError as error:
            if choice == "mnist":
                raise
            rule = "!" * 100
            print_message(
                f"{rule}\nWARNING: this run does NOT use MNIST but generated digits (strokes).\n"
                f"Its figures do not compare with those on MNIST. Reason: {error}\n{rule}"
            )
    train_rng, test_rng = rng.spawn(2)
    n_train, n_test = stroke_counts
    return Digits("strokes", *stroke_digits(train_rng, n_train), *stroke_digits(test_rng, n_test))


def hold_out(digits: Digits, n: int | None) -> Digits:
    """For the choice of settings: the last n training digits instead of the test digits. Raises UserError."""
    images, labels = digits.train_images, digits.train_labels
    if n is None:
        return digits
    if n >= len(labels):
        raise UserError(f"--n-val {n} leaves none of the {len(labels)} training digits to train on")
    return Digits(digits.name, images[:-n], labels[:-n], images[-n:], labels[-n:])


# ----------------------------------------------------------------------------------------------------------------------
# Data, 2: overlays of two digits
# ----------------------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Composites, the classes in them, and each digit alone. Intensities are 0 to 1."""

    images: Array  # (B, H, W)
    labels: Array  # (B, L)
    sources: Array  # (B, L, H, W)

    def part(self, start: int, stop: int) -> Batch:
        return Batch(*(a[start:stop] for a in self))


class Composites(NamedTuple):
    """Pairs of digits and their shifts; ``Overlays.render`` makes images of them."""

    which: Array  # (N, 2) digit images
    shift: Array  # (N, 2, 2) pixels, [composite, digit, axis]


def admissible_shifts(max_shift: int, min_iou: float) -> Array:
    """All pairs of shifts (n, 2, 2) after which the two boxes overlap by an IoU of at least ``min_iou``.

    A digit's box is its whole 28x28 image, so a pair is admissible whatever the digits look like: at IoU 0.8 two
    digits are 3 pixels apart at most.
    """
    s = np.arange(-max_shift, max_shift + 1)
    pairs = np.stack(np.meshgrid(s, s, s, s, indexing="ij"), axis=-1).reshape(-1, 2, 2)
    common = np.prod(DIGIT_SIDE - np.abs(pairs[:, 0] - pairs[:, 1]), axis=1)
    return pairs[common >= min_iou * (2 * DIGIT_SIDE**2 - common)]


def shifted(digits: Array, shift: Array, side: int, max_shift: int) -> Array:
    """digits (n, L, 28, 28) in the middle of (n, L, side, side), then shift (n, L, 2) pixels down and right, each at
    most ``max_shift``: windows of a larger canvas. What leaves the image is lost."""
    (n, L), m = digits.shape[:2], max_shift
    start = m + (side - DIGIT_SIDE) // 2
    canvas = np.zeros((n, L, side + 2 * m, side + 2 * m), digits.dtype)
    canvas[:, :, start : start + DIGIT_SIDE, start : start + DIGIT_SIDE] = digits
    windows = np.lib.stride_tricks.sliding_window_view(canvas, (side, side), axis=(2, 3))
    row, column = np.moveaxis(m - shift, -1, 0)  # (n, L)
    return windows[np.arange(n)[:, None], np.arange(L), row, column]


class Overlays:
    """The composites that can be made of one split's digits."""

    def __init__(self, images: Array, labels: Array, config: Config) -> None:
        """images (N, 28, 28) uint8, labels (N,). Raises UserError where there are not two classes."""
        order = np.argsort(labels, kind="stable")
        self.images, self.labels = images[order], labels[order].astype(np.intp)
        if self.labels[0] == self.labels[-1]:
            raise UserError("all digits are of one class: a composite needs two")
        self.class_start = np.searchsorted(self.labels, np.arange(self.labels[-1] + 2))  # in self.images
        self.shifts = admissible_shifts(config.max_shift, config.min_iou)
        self.max_shift, self.side, self.dtype = config.max_shift, config.image_size, np.dtype(config.dtype)

    def draw(self, rng: np.random.Generator, n: int) -> Composites:
        """``n`` times two digits of different classes, and one of the admissible pairs of shifts, without rejection."""
        first = rng.integers(len(self.labels), size=n)
        start, stop = self.class_start[self.labels[first]], self.class_start[self.labels[first] + 1]
        second = rng.integers(len(self.labels) - (stop - start))  # counts the digits of all other classes
        second += np.where(second >= start, stop - start, 0)
        return Composites(np.stack([first, second], axis=1), self.shifts[rng.integers(len(self.shifts), size=n)])

    def render(self, composites: Composites) -> Batch:
        """Images of the composites: the pixel-wise maximum of the two shifted digits."""
        which, shift = composites
        sources = shifted(self.images[which], shift, self.side, self.max_shift)  # (N, 2, H, W)
        sources = sources * self.dtype.type(1 / 255)
        return Batch(sources.max(axis=1), self.labels[which], sources)


class Data(NamedTuple):
    name: str  # of the digits: "mnist", "strokes" or "custom"
    train: Overlays
    pool: Composites | None  # None: every batch is drawn anew
    test: Batch
    classes: tuple[str, ...] = DIGITS


def make_data(config: Config, classes: Sequence[str] = ()) -> Data:
    """Test composites are rendered here, once; those of the training are rendered batch by batch. ``classes``: those of
    a trained network. Raises UserError."""
    rng, folder = generator(config.seed, Stream.DATA), Path(config.data_dir) if config.data_dir else None
    digits, classes = named_classes(resolve_dataset(config.dataset, rng, folder), folder, classes)
    digits = hold_out(digits, config.n_val)
    train = Overlays(digits.train_images, digits.train_labels, config)
    test = Overlays(digits.test_images, digits.test_labels, config)
    pool = train.draw(generator(config.seed, Stream.DATA, 1), config.pool) if config.pool else None
    composites = test.draw(generator(config.seed, Stream.EVALUATION), config.n_test)
    return Data(digits.name, train, pool, test.render(composites), tuple(classes))


def resolve_auto(config: Any, data_name: str) -> Any:
    """``config`` with the data set that ``auto`` found, strokes or MNIST files, instead of ``auto``: a run that was
    begun on one is not to be resumed on the other."""
    if config.dataset != "auto":
        return config
    return dataclasses.replace(config, dataset="strokes" if data_name == "strokes" else "mnist")


def resolved(config: Config, data: Data) -> Config:
    """``config`` with what the files decide: the set that ``auto`` found, and classes that are not the ten digits."""
    names = () if data.classes == DIGITS else data.classes
    return dataclasses.replace(resolve_auto(config, data.name), class_names=names)


def training_batch(data: Data, config: Config, step: int) -> Batch:
    """The batch of a step, which depends on the seed and the step alone. A pool is gone through again and again, each
    time in a new order."""
    B = config.batch_size
    if data.pool is None:
        return data.train.render(data.train.draw(generator(config.seed, Stream.SHUFFLE, step), B))
    n = len(data.pool.which)
    passes, positions = np.divmod(np.arange(step * B, (step + 1) * B), n)
    chosen = np.concatenate(
        [permutation(n, config.seed, t)[positions[passes == t]] for t in np.unique(passes).tolist()]
    )
    return data.train.render(Composites(data.pool.which[chosen], data.pool.shift[chosen]))


# ----------------------------------------------------------------------------------------------------------------------
# Forward and backward passes
#
# Maps have the axes (H, W, B, C): each pixel is a matrix of examples and channels. From the capsules on, the batch is
# the last axis: the primary capsules are (P, I, B). So all matrix products have contiguous operands. A backward pass
# writes the gradients of weights into arrays that it is given (dw, db), and returns the gradient of its input. ``ws``
# is a Workspace: ws(name, *shape) is an array whose memory is allocated once and then used in every step.
# ----------------------------------------------------------------------------------------------------------------------


class ConvCache(NamedTuple):
    name: str
    cols: Array  # (Ho, Wo, B, K, K, C)
    w: Array  # (K, K, C, C')
    x_shape: tuple[int, ...]  # (H, W, B, C)
    stride: int


def conv2d_forward(x: Array, w: Array, b: Array, stride: int, ws: Workspace, name: str) -> tuple[Array, ConvCache]:
    """Valid convolution by im2col. x (H, W, B, C), w (K, K, C, C'), b (C') -> out (Ho, Wo, B, C')."""
    K, n_out = w.shape[0], w.shape[-1]
    windows = np.lib.stride_tricks.sliding_window_view(x, (K, K), axis=(0, 1))[::stride, ::stride]
    patches = windows.transpose(0, 1, 2, 4, 5, 3)  # (Ho, Wo, B, K, K, C), a view
    cols = ws(name + ".cols", *patches.shape)
    cols[...] = patches
    out = ws(name + ".out", *cols.shape[:3], n_out)
    w_matrix = w.reshape(-1, n_out)  # (K*K*C, C')
    np.matmul(cols.reshape(-1, len(w_matrix)), w_matrix, out=out.reshape(-1, n_out))  # (Ho*Wo*B, C')
    out += b
    return out, ConvCache(name, cols, w, x.shape, stride)


def conv2d_backward(
    dout: Array, cache: ConvCache, dw: Array, db: Array, ws: Workspace, need_dx: bool = True
) -> Array | None:
    """dout (Ho, Wo, B, C') -> dx (H, W, B, C), or None; writes dw (K, K, C, C') and db (C')."""
    name, cols, w, x_shape, s = cache
    (Ho, Wo, _, n_out), K = dout.shape, len(w)
    w_matrix, dout_matrix = w.reshape(-1, n_out), dout.reshape(-1, n_out)  # (K*K*C, C'), (Ho*Wo*B, C')
    # out = cols w + b
    db[...] = np.ones(len(dout_matrix), dout.dtype) @ dout_matrix  # the sum over rows, faster than np.sum
    np.matmul(cols.reshape(-1, len(w_matrix)).T, dout_matrix, out=dw.reshape(-1, n_out))
    if not need_dx:
        return None
    dcols = ws(name + ".dcols", *cols.shape)
    np.matmul(dout_matrix, w_matrix.T, out=dcols.reshape(-1, len(w_matrix)))
    # cols[:, :, :, i, j] = x[i :: s, j :: s]
    dx = ws(name + ".dx", *x_shape)
    dx[...] = 0
    for i, j in itertools.product(range(K), repeat=2):
        dx[i : i + s * Ho : s, j : j + s * Wo : s] += dcols[:, :, :, i, j]
    return dx


Convolution = tuple[Callable[..., tuple[Array, Any]], Callable[..., Any]]  # forward and backward pass
CONVOLUTIONS: dict[str, Convolution] = {
    "im2col": (conv2d_forward, conv2d_backward),
    "spectral": (spectral_conv2d_forward, spectral_conv2d_backward),
}


def convolution(conv: str, layer: int) -> Convolution:
    """Those of a network's layer, counted from 1; the first, which has one channel, is always im2col."""
    return CONVOLUTIONS[conv if layer > 1 else "im2col"]


def max_pool_forward(x: Array, ws: Workspace, name: str) -> Array:
    """2x2, stride 2; an odd last row or column is dropped. x (H, W, B, C) -> (H // 2, W // 2, B, C)."""
    H, W = x.shape[0] // 2 * 2, x.shape[1] // 2 * 2
    out = ws(name + ".out", H // 2, W // 2, *x.shape[2:])
    np.maximum(x[0:H:2, 0:W:2], x[0:H:2, 1:W:2], out=out)
    np.maximum(out, x[1:H:2, 0:W:2], out=out)
    return np.maximum(out, x[1:H:2, 1:W:2], out=out)


def max_pool_backward(dout: Array, x: Array, out: Array, ws: Workspace, name: str) -> Array:
    """dout (H // 2, W // 2, B, C) -> dx (H, W, B, C). The first of the four pixels that is the maximum gets it all."""
    H, W = x.shape[0] // 2 * 2, x.shape[1] // 2 * 2
    dx = ws(name + ".dx", *x.shape)
    dx[...] = 0
    not_found = np.ones(out.shape, bool)
    # out = max(x00, x01, x10, x11)
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        is_maximum = not_found & (x[i:H:2, j:W:2] == out)
        not_found ^= is_maximum
        np.multiply(dout, is_maximum, out=dx[i:H:2, j:W:2])
    return dx


def flattened(x: Array, ws: Workspace) -> Array:
    """x (H, W, B, C) -> (H*C*W, B). Changing the order would change which weight belongs to which input."""
    H, W, B, C = x.shape
    flat = ws("flat", H, C, W, B)
    flat[...] = x.transpose(0, 3, 1, 2)
    return flat.reshape(-1, B)


def unflattened(flat: Array, shape: tuple[int, ...], ws: Workspace) -> Array:
    """The inverse of flattened. shape: (H, W, B, C)."""
    H, W, B, C = shape
    x = ws("unflattened", *shape)
    x[...] = flat.reshape(H, C, W, B).transpose(0, 2, 3, 1)
    return x


def linear_forward(x: Array, w: Array, b: Array, ws: Workspace, name: str) -> Array:
    """x (n_in, B), w (n_in, n_out), b (n_out,) -> (n_out, B)."""
    out = ws(name + ".out", w.shape[1], x.shape[1])
    np.matmul(w.T, x, out=out)
    out += b[:, None]
    return out


def linear_backward(dout: Array, x: Array, w: Array, dw: Array, db: Array) -> Array:
    """dout (n_out, B) -> dx (n_in, B); writes dw (n_in, n_out) and db (n_out,)."""
    # out = w.T x + b
    np.matmul(x, dout.T, out=dw)
    np.sum(dout, axis=1, out=db)
    return np.matmul(w, dout)


def relu_forward(x: Array) -> Array:
    """max(x, 0), in place: the backward pass needs the output alone."""
    return np.maximum(x, 0, out=x)


def relu_backward(dout: Array, out: Array) -> Array:
    """In place: dout becomes dx."""
    # out = max(x, 0)
    dout *= out > 0
    return dout


def sigmoid_forward(x: Array) -> Array:
    """1 / (1 + exp(-x)), in place, with an error of a few roundings. x is clipped from below (in float32 at -87), so
    that exp(-x) does not overflow."""
    np.maximum(x, math.log(np.finfo(x.dtype).tiny), out=x)
    np.negative(x, out=x)
    np.exp(x, out=x)
    x += 1
    return np.reciprocal(x, out=x)


def sigmoid_backward(dout: Array, out: Array) -> Array:
    """In place: dout becomes dx."""
    # out = sigmoid(x)
    dout *= out * (1 - out)
    return dout


SQUASH_EPS = 1e-9  # added to |s|^2, so that the derivative of |s| is finite for a capsule that is exactly zero


class SquashCache(NamedTuple):
    s: Array
    q: Array  # |s|^2 + eps, its axis kept
    axis: int


def squash_forward(s: Array, axis: int, out: Array) -> SquashCache:
    """v = |s|^2 / (1 + |s|^2) * s / |s|, written into ``out``; a capsule's entries are along ``axis``.
    [Sabour 2017, eq. 1]"""
    q = np.square(s).sum(axis, keepdims=True)
    q += SQUASH_EPS
    np.multiply(s, np.sqrt(q) / (1 + q), out=out)
    return SquashCache(s, q, axis)


def squash_backward(dv: Array, cache: SquashCache) -> Array:
    """dv -> ds, of the same shape."""
    s, q, axis = cache
    root = np.sqrt(q)
    # v = f(q) s with f(q) = sqrt(q) / (1 + q) and q = |s|^2, so ds = f(q) dv + 2 f'(q) (s . dv) s
    ds = s * dv
    dq_twice = ds.sum(axis, keepdims=True) * ((1 - q) / (root * (1 + q) ** 2))  # 2 f'(q) (s . dv)
    np.multiply(s, dq_twice, out=ds)
    ds += dv * (root / (1 + q))
    return ds


# ----------------------------------------------------------------------------------------------------------------------
# Dynamic routing
#
# Capsule i votes u_hat[j, d, i] = sum_p w[j, p, i, d] u[p, i] for parent j. The votes of a batch would be the largest
# array of the network, and they are never stored. Procedure 1 needs only two sums of them:
#     s[j, d] = sum_i c[j, i] u_hat[j, d, i] = sum_pi w[j, p, i, d] (c[j, i] u[p, i])    the parents' inputs
#     a[j, i] = sum_d v[j, d] u_hat[j, d, i] = sum_p u[p, i] (sum_d w[j, p, i, d] v[j, d])    the agreements
# The arrays in parentheses, cu and wv below, have P = 8 entries for each capsule and parent, where votes have D = 16.
# Unless couplings are given, all c are 1 / J in the first iteration, and u itself takes the place of cu.
# ----------------------------------------------------------------------------------------------------------------------


def softmax_over_parents(b: Array, out: Array) -> Array:
    """b (J, I, B) -> coupling coefficients c (J, I, B), whose sum over j is 1. [Sabour 2017, eq. 3]"""
    np.subtract(b, b.max(axis=0), out=out)
    np.exp(out, out=out)
    out /= out.sum(axis=0)
    return out


def softmax_backward(dc: Array, c: Array) -> Array:
    """In place: dc (J, I, B) becomes db."""
    # c = softmax(b), so db = c (dc - sum_j c dc)
    dc -= np.einsum("jib,jib->ib", c, dc)
    dc *= c
    return dc


class RoutingCache(NamedTuple):
    u: Array  # (P, I, B)
    w: Array  # (J, P, I, D)
    c: list[Array]  # per iteration: couplings (J, I, B)
    squashes: list[SquashCache]  # per iteration; empty without squash
    v: list[Array]  # per iteration: (J, D, B)
    is_uniform: bool  # whether the couplings of the first iteration are 1 / J


def shared_transform_forward(w: Array, n_children: int, ws: Workspace) -> Array:
    """One transformation for all primary capsules, w (J, P, 1, D) -> (J, P, I, D). [Gu 2020]"""
    J, P, _, D = w.shape
    copies = ws("routing.w", J, P, n_children, D)
    copies[...] = w
    return copies


def shared_transform_backward(dcopies: Array, dw: Array) -> None:
    """dcopies (J, P, I, D); writes dw (J, P, 1, D)."""
    # copies_i = w
    np.sum(dcopies, axis=2, keepdims=True, out=dw)


def random_couplings(n_parents: int, n_children: int) -> Array:
    """Couplings (J, I) drawn evenly from all whose sum over j is 1, the same for every image and every seed."""
    weights = generator(0, Stream.INIT, *b"couplings").standard_exponential((n_parents, n_children))
    return weights / weights.sum(axis=0)


def routing_forward(
    u: Array, w: Array, n_iters: int, ws: Workspace, couplings: Array | None = None, has_squash: bool = True
) -> tuple[Array, RoutingCache]:
    """Dynamic routing [Sabour 2017, procedure 1]. u (P, I, B), w (J, P, I, D) -> v (J, D, B). The first iteration has
    the given couplings (J, I), or 1 / J. Without squash v = s."""
    J, P, I, D = w.shape
    B = u.shape[-1]
    cache = RoutingCache(u, w, [], [], [], couplings is None)
    b, sums = ws("routing.b", J, I, B), ws("routing.sums", J, P, D, B)
    product = ws("routing.product", J, P, I, B)  # memory of cu, then of wv
    b[...] = 0
    for t in range(n_iters):
        c, v = ws(f"routing.c{t}", J, I, B), ws(f"routing.v{t}", J, D, B)
        if t == 0:
            c[...] = 1 / J if couplings is None else couplings[..., None]  # 1 / J: b is zero
        else:
            softmax_over_parents(b, c)
        is_uniform = t == 0 and cache.is_uniform
        cu = u if is_uniform else np.multiply(c[:, None], u, out=product)  # (P, I, B) or (J, P, I, B)
        s = np.matmul(w.transpose(0, 1, 3, 2), cu, out=sums).sum(axis=1)  # (J, D, B)
        if is_uniform:  # c = 1 / J
            s /= J
        cache.c.append(c)
        if has_squash:
            cache.squashes.append(squash_forward(s, 1, v))
        else:
            v[...] = s
        cache.v.append(v)
        if t < n_iters - 1:
            wv = np.matmul(w, v[:, None], out=product)  # (J, P, I, B)
            b += np.einsum("pib,jpib->jib", u, wv)  # agreements
    return v, cache


TERM_SIZE = 1 << 19  # entries of dw that are added up at a time: more would leave the cache, fewer need many calls


def routing_backward(dv: Array, cache: RoutingCache, policy: str, dw: Array, ws: Workspace) -> Array:
    """dv (J, D, B), which may be overwritten -> du (P, I, B); writes dw (J, P, I, D).

    policy "exact": the gradient of what the forward pass computes, through the softmax, the agreement and the squash of
                    every iteration. That of the votes, which is never stored either, is
                    du_hat[j, d, i] = sum_t c_t[j, i] ds_t[j, d] + db_t+1[j, i] v_t[j, d].
    policy "stop":  the couplings are constants: only the last iteration's s and v are differentiated.
    """
    u, w, c, squashes, v, _ = cache
    J, P, I, D = w.shape
    B = u.shape[-1]
    sums = ws("routing.sums", J, P, D, B)
    product = ws("routing.product", J, P, I, B)  # memory of dbu, wv, cu and wds, one after the other
    n = max(1, TERM_SIZE // w[0].size)
    groups = [slice(j, j + n) for j in range(0, J, n)]  # of parents
    dw_term = ws("routing.dw_term", *w[:n].shape)
    du, db = ws("routing.du", P, I, B), ws("routing.db", J, I, B)
    du[...] = db[...] = 0
    last = len(v) - 1
    earliest = last if policy == "stop" else 0
    for t in range(last, earliest - 1, -1):
        if t < last:
            # b += a; a = sum_d v u_hat = sum_p u (w v)
            dbu = np.multiply(db[:, None], u, out=product)  # (J, P, I, B)
            v_rows = np.ascontiguousarray(v[t].transpose(0, 2, 1))[:, None]  # (J, 1, B, D)
            for group in groups:
                dw[group] += np.matmul(dbu[group], v_rows[group], out=dw_term[: len(w[group])])
            dv = np.matmul(w.transpose(0, 1, 3, 2), dbu, out=sums).sum(axis=1)  # (J, D, B)
            wv = np.matmul(w, v[t][:, None], out=product)  # (J, P, I, B)
            du += np.einsum("jib,jpib->pib", db, wv)
        # v = squash(s), or s
        ds = squash_backward(dv, squashes[t]) if squashes else dv  # (J, D, B)
        is_uniform = t == 0 and cache.is_uniform
        if is_uniform:  # c = 1 / J
            ds /= J
        # s = sum_i c u_hat = sum_pi w (c u)
        ds_rows = np.ascontiguousarray(ds.transpose(0, 2, 1))[:, None]  # (J, 1, B, D)
        cu = np.broadcast_to(u, product.shape) if is_uniform else np.multiply(c[t][:, None], u, out=product)
        if t == last:  # the first term of dw
            np.matmul(cu, ds_rows, out=dw)
        else:
            for group in groups:
                dw[group] += np.matmul(cu[group], ds_rows[group], out=dw_term[: len(w[group])])
        wds = np.matmul(w, ds[:, None], out=product)  # (J, P, I, B)
        du += wds.sum(axis=0) if is_uniform else np.einsum("jib,jpib->pib", c[t], wds)
        # c = softmax(b)
        if t > earliest:
            db += softmax_backward(np.einsum("pib,jpib->jib", u, wds), c[t])
    return du


# ----------------------------------------------------------------------------------------------------------------------
# Losses: (loss, gradient with respect to the input); a part's terms of the mean over a batch of ``n`` examples
# ----------------------------------------------------------------------------------------------------------------------

PRESENT, ABSENT, ABSENT_WEIGHT = 0.9, 0.1, 0.5  # m+, m- and lambda [Sabour 2017, sec. 3]


def margin_loss(lengths: Array, positive: Array, n: int) -> tuple[float, Array]:
    """Summed over the classes. lengths (J, B), positive (J, B) of 0 and 1 -> loss, dlengths. [Sabour 2017, eq. 4]"""
    shortfall = np.maximum(0, PRESENT - lengths) * positive
    excess = np.maximum(0, lengths - ABSENT) * (1 - positive)
    loss = float(np.square(shortfall).sum() + ABSENT_WEIGHT * np.square(excess).sum()) / n
    return loss, (2 / n) * (ABSENT_WEIGHT * excess - shortfall)


def squared_error(out: Array, target: Array, weight: float, n: int) -> tuple[float, Array]:
    """Summed over pixels and digits. The gradient is that of ``weight`` times the loss."""
    error = out - target
    loss = float(np.vdot(error, error)) / n
    error *= 2 * weight / n
    return loss, error


def sigmoid_cross_entropy(scores: Array, positive: Array, n: int) -> tuple[float, Array]:
    """Summed over the classes. scores (J, B) before the sigmoid, positive (J, B) of 0 and 1."""
    loss = float((np.maximum(scores, 0) - scores * positive + np.log1p(np.exp(-np.abs(scores)))).sum()) / n
    return loss, (sigmoid_forward(scores.copy()) - positive) / n


def softmax_cross_entropy(scores: Array, positive: Array, n: int) -> tuple[float, Array]:
    """Summed over the classes that are there. scores (J, B) before the softmax, positive (J, B) of 0 and 1."""
    shifted = scores - scores.max(axis=0)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=0))
    return float(-(positive * log_p).sum()) / n, (positive.sum(axis=0) * np.exp(log_p) - positive) / n


Loss = Callable[[Array, Array, int], tuple[float, Array]]  # scores and indicator (J, B), n -> loss, gradient of scores
# Of the digit capsules' lengths. A sigmoid is not among them: a length is never negative, so it would be >= 1/2.
CAPSNET_LOSSES: dict[str, Loss] = {"margin": margin_loss, "cross-entropy": softmax_cross_entropy}


def indicator(labels: Array, dtype: np.dtype, n_classes: int = N_CLASSES) -> Array:
    """labels (B, L) -> (J, B), 1 for the classes in an image."""
    positive = np.zeros((n_classes, len(labels)), dtype)
    positive[labels.T, np.arange(len(labels))] = 1
    return positive


# ----------------------------------------------------------------------------------------------------------------------
# The capsule network
# ----------------------------------------------------------------------------------------------------------------------


class CapsNetCache(NamedTuple):
    conv1: ConvCache
    h1: Array  # (28, 28, B, 32) at the default sizes
    primary: Any  # of the convolution that the configuration names
    squash: SquashCache | None  # None: primary capsules with a ReLU
    routing: RoutingCache
    v: Array  # (J, D, B)


def gaussian(rng: np.random.Generator, dtype: str, std: float, *shape: int) -> Array:
    """Independent, of mean 0."""
    return rng.normal(0, std, shape).astype(dtype)


def capsnet_init(rng: np.random.Generator, config: NetworkConfig) -> Params:
    C, n_primary_out, dtype = config.conv_channels, PRIMARY_SIZE * config.primary_types, config.dtype
    # 0.1 at the default sizes. It falls as 1 / sqrt(I), as a digit capsule is a sum of I votes.
    routing_std = math.sqrt(PRIMARY_SIZE / config.n_primary)
    n_transforms = 1 if config.transform == "shared" else config.n_primary
    params = {
        "conv1.w": gaussian(rng, dtype, math.sqrt(2 / KERNEL**2), KERNEL, KERNEL, 1, C),
        "conv1.b": np.zeros(C, dtype),
        "primary.w": gaussian(rng, dtype, math.sqrt(1 / (KERNEL**2 * C)), KERNEL, KERNEL, C, n_primary_out),
        "primary.b": np.zeros(n_primary_out, dtype),
        "routing.w": gaussian(rng, dtype, routing_std, config.n_classes, PRIMARY_SIZE, n_transforms, CAPSULE_SIZE),
    }
    sizes = (config.n_classes * CAPSULE_SIZE, *config.decoder, config.image_size**2)
    variances = (2 / CAPSULE_SIZE, 2 / sizes[1], 1 / sizes[2])  # of the first layer's inputs all but one capsule are 0
    for k in range(3):
        params[f"decoder{k + 1}.w"] = gaussian(rng, dtype, math.sqrt(variances[k]), sizes[k], sizes[k + 1])
        params[f"decoder{k + 1}.b"] = np.zeros(sizes[k + 1], dtype)
    return params


def batch_last(images: Array, ws: Workspace) -> Array:
    """(B, H, W) -> (H, W, B, 1), a map of one channel."""
    B, H, W = images.shape
    x = ws("images", H, W, B, 1)
    x[..., 0] = images.transpose(1, 2, 0)
    return x


def as_map(capsules: Array, side: int) -> Array:
    """capsules (P, I, B), in the order row, type, column -> the same as a map (side, side, B, P, T)."""
    P, _, B = capsules.shape
    return capsules.reshape(P, side, -1, side, B).transpose(1, 3, 4, 0, 2)


def capsnet_forward(params: Params, images: Array, config: NetworkConfig, ws: Workspace) -> tuple[Array, CapsNetCache]:
    """images (B, H, W) -> lengths of the digit capsules (J, B). The cache has the capsules and their couplings."""
    side, B = config.primary_side, len(images)
    h1, conv1 = conv2d_forward(batch_last(images, ws), params["conv1.w"], params["conv1.b"], 1, ws, "conv1")
    relu_forward(h1)
    forward, _ = CONVOLUTIONS[config.conv]
    h2, primary = forward(h1, params["primary.w"], params["primary.b"], 2, ws, "primary")  # (side, side, B, P*T)
    s, u = (ws(name, PRIMARY_SIZE, config.n_primary, B) for name in ("primary.s", "primary.u"))
    as_map(s, side)[...] = h2.reshape(side, side, B, PRIMARY_SIZE, -1)
    if config.activation == "squash":
        squash = squash_forward(s, 0, u)
    else:
        squash, u = None, relu_forward(s)
    w = params["routing.w"]
    if config.transform == "shared":
        w = shared_transform_forward(w, config.n_primary, ws)
    couplings = random_couplings(config.n_classes, config.n_primary) if config.assignments == "random" else None
    n_iters = config.routing_iters if config.assignments == "routed" else 1
    v, routing = routing_forward(u, w, n_iters, ws, couplings, config.activation == "squash")  # (J, D, B)
    lengths = np.sqrt(np.square(v).sum(axis=1) + SQUASH_EPS)
    return lengths, CapsNetCache(conv1, h1, primary, squash, routing, v)


def mask_capsules(v: Array, labels: Array) -> Array:
    """v (J, D, B), labels (B, L) -> (J*D, L*B): capsule ``labels[b, l]`` of example b in column l*B + b, zeros above
    and below it."""
    (J, D, B), L = v.shape, labels.shape[1]
    masked = np.zeros((J, D, L, B), v.dtype)
    example, digit = np.arange(B)[:, None], np.arange(L)
    masked[labels, :, digit, example] = v[labels, :, example]
    return masked.reshape(J * D, L * B)


def unmask_gradient(dmasked: Array, dv: Array, labels: Array) -> None:
    """dmasked (J*D, L*B): adds its gradient to dv (J, D, B)."""
    (J, D, B), L = dv.shape, labels.shape[1]
    example, digit = np.arange(B)[:, None], np.arange(L)
    # masked = v[labels]; no two labels of an example are the same, so that += adds each term
    dv[labels, :, example] += dmasked.reshape(J, D, L, B)[labels, :, digit, example]


def decoder_forward(params: Params, masked: Array, ws: Workspace) -> tuple[Array, list[Array]]:
    """masked (J*D, N) -> pictures (H*W, N), and the inputs of the three layers."""
    x, inputs = masked, []
    for k in (1, 2, 3):
        inputs.append(x)
        x = linear_forward(x, params[f"decoder{k}.w"], params[f"decoder{k}.b"], ws, f"decoder{k}")
        x = relu_forward(x) if k < 3 else sigmoid_forward(x)
    return x, inputs


def decoder_backward(dout: Array, out: Array, inputs: list[Array], params: Params, grads: Params) -> Array:
    """dout (H*W, N), overwritten -> gradient of the masked capsules (J*D, N)."""
    dx = sigmoid_backward(dout, out)
    for k in (3, 2, 1):
        x, w = inputs[k - 1], params[f"decoder{k}.w"]
        dx = linear_backward(dx, x, w, grads[f"decoder{k}.w"], grads[f"decoder{k}.b"])
        if k > 1:
            relu_backward(dx, x)
    return dx


def pixels_last(sources: Array) -> Array:
    """(B, L, H, W) -> (H*W, L*B), the order of ``mask_capsules``."""
    B, L, H, W = sources.shape
    return sources.transpose(2, 3, 1, 0).reshape(H * W, L * B)


def reconstruct(params: Params, v: Array, labels: Array, ws: Workspace) -> Array:
    """v (J, D, B), labels (B, L) -> pictures (B, L, H, W), one of each named capsule alone."""
    B, L = labels.shape
    out, _ = decoder_forward(params, mask_capsules(v, labels), ws)
    side = math.isqrt(len(out))
    return out.reshape(side, side, L, B).transpose(3, 2, 0, 1)


def capsnet_loss_and_grads(
    params: Params, batch: Batch, n: int, config: NetworkConfig, grads: Params, ws: Workspace
) -> dict[str, float]:
    """Loss of the lengths of all digit capsules, plus the squared error of each digit's reconstruction from its own
    capsule: ``recon_weight`` weighs it, and with 0 the decoder does not learn.

    Writes ``grads``, and returns the losses: a part's terms of the mean over ``n`` examples.
    """
    side, B = config.primary_side, len(batch.labels)
    lengths, cache = capsnet_forward(params, batch.images, config, ws)
    loss_of_lengths = CAPSNET_LOSSES[config.capsnet_loss]
    loss, dlengths = loss_of_lengths(lengths, indicator(batch.labels, lengths.dtype, len(lengths)), n)
    dv = cache.v * (dlengths / lengths)[:, None]  # lengths = |v|

    pictures, inputs = decoder_forward(params, mask_capsules(cache.v, batch.labels), ws)
    error, dpictures = squared_error(pictures, pixels_last(batch.sources), config.recon_weight, n)
    unmask_gradient(decoder_backward(dpictures, pictures, inputs, params, grads), dv, batch.labels)

    dw = grads["routing.w"]
    if config.transform == "shared":
        dw = ws("routing.dw", *cache.routing.w.shape)  # of the copies
    du = routing_backward(dv, cache.routing, config.routing_grad, dw, ws)
    if config.transform == "shared":
        shared_transform_backward(dw, grads["routing.w"])
    ds = squash_backward(du, cache.squash) if cache.squash else relu_backward(du, cache.routing.u)
    dh2 = ws("primary.dout", side, side, B, PRIMARY_SIZE, config.primary_types)
    dh2[...] = as_map(ds, side)
    _, backward = CONVOLUTIONS[config.conv]
    dh1 = backward(dh2.reshape(side, side, B, -1), cache.primary, grads["primary.w"], grads["primary.b"], ws)
    relu_backward(dh1, cache.h1)
    conv2d_backward(dh1, cache.conv1, grads["conv1.w"], grads["conv1.b"], ws, need_dx=False)
    return {
        "train_loss": loss + config.recon_weight * error,
        config.class_loss: loss,
        "train_recon_loss": error / batch.labels.shape[1],  # of one digit
    }


def capsnet_assess(params: Params, batch: Batch, config: NetworkConfig, ws: Workspace) -> tuple[Array, float]:
    """Scores (B, J), and the squared error of the true digits' pictures, summed over all pixels."""
    lengths, cache = capsnet_forward(params, batch.images, config, ws)
    pictures, _ = decoder_forward(params, mask_capsules(cache.v, batch.labels), ws)
    return lengths.T, squared_error(pictures, pixels_last(batch.sources), 1, 1)[0]


# ----------------------------------------------------------------------------------------------------------------------
# The CNN baselines: convolutions with ReLU and perhaps pooling, one hidden layer, a sigmoid for each class
# ----------------------------------------------------------------------------------------------------------------------


class ConvLayer(NamedTuple):
    kernel: int
    channels: int
    stride: int = 1
    pool: bool = False


class CNN(NamedTuple):
    convs: tuple[ConvLayer, ...]
    n_hidden: int
    loss: Loss = sigmoid_cross_entropy
    conv: str = "spectral"


class CNNCache(NamedTuple):
    convs: list[tuple[Any, Array, Array]]  # cache, output before and after pooling
    flat: Array
    hidden: Array


def cnn_init(rng: np.random.Generator, config: NetworkConfig, net: CNN) -> Params:
    params: Params = {}
    side, C, dtype = config.image_size, 1, config.dtype
    for k, (K, n_out, stride, pool) in enumerate(net.convs, 1):
        params[f"conv{k}.w"] = gaussian(rng, dtype, math.sqrt(2 / (K * K * C)), K, K, C, n_out)
        params[f"conv{k}.b"] = np.zeros(n_out, dtype)
        side, C = ((side - K) // stride + 1) // (2 if pool else 1), n_out
    n_flat = side * side * C
    params["hidden.w"] = gaussian(rng, dtype, math.sqrt(2 / n_flat), n_flat, net.n_hidden)
    params["hidden.b"] = np.zeros(net.n_hidden, dtype)
    params["out.w"] = gaussian(rng, dtype, math.sqrt(1 / net.n_hidden), net.n_hidden, config.n_classes)
    params["out.b"] = np.zeros(config.n_classes, dtype)
    return params


def cnn_forward(params: Params, images: Array, net: CNN, ws: Workspace) -> tuple[Array, CNNCache]:
    """images (B, H, W) -> scores (J, B), before the sigmoid."""
    x, convs = batch_last(images, ws), []
    for k, layer in enumerate(net.convs, 1):
        forward, _ = convolution(net.conv, k)
        y, cache = forward(x, params[f"conv{k}.w"], params[f"conv{k}.b"], layer.stride, ws, f"conv{k}")
        relu_forward(y)
        x = max_pool_forward(y, ws, f"pool{k}") if layer.pool else y
        convs.append((cache, y, x))
    flat = flattened(x, ws)
    hidden = relu_forward(linear_forward(flat, params["hidden.w"], params["hidden.b"], ws, "hidden"))
    return linear_forward(hidden, params["out.w"], params["out.b"], ws, "out"), CNNCache(convs, flat, hidden)


def cnn_loss_and_grads(
    params: Params, batch: Batch, n: int, net: CNN, grads: Params, ws: Workspace
) -> dict[str, float]:
    scores, (convs, flat, hidden) = cnn_forward(params, batch.images, net, ws)
    loss, dscores = net.loss(scores, indicator(batch.labels, scores.dtype, len(scores)), n)
    dhidden = linear_backward(dscores, hidden, params["out.w"], grads["out.w"], grads["out.b"])
    relu_backward(dhidden, hidden)
    dflat = linear_backward(dhidden, flat, params["hidden.w"], grads["hidden.w"], grads["hidden.b"])
    dx = unflattened(dflat, convs[-1][-1].shape, ws)
    for k in range(len(convs), 0, -1):
        cache, y, out = convs[k - 1]
        dy = max_pool_backward(dx, y, out, ws, f"pool{k}") if net.convs[k - 1].pool else dx
        relu_backward(dy, y)
        _, backward = convolution(net.conv, k)
        dx = backward(dy, cache, grads[f"conv{k}.w"], grads[f"conv{k}.b"], ws, need_dx=k > 1)
    return {"train_loss": loss}


# ----------------------------------------------------------------------------------------------------------------------
# The three models as the training loop sees them
# ----------------------------------------------------------------------------------------------------------------------


class Model(NamedTuple):
    name: str
    init_params: Callable[[np.random.Generator], Params]
    loss_and_grads: Callable[[Params, Batch, int, Params, Workspace], dict[str, float]]
    assess: Callable[[Params, Batch, Workspace], tuple[Array, float]]  # scores (B, J), squared error of reconstruction
    lr_factor: float = 1.0  # LeNet-5 of mnist_affine_capsnet.py has its own


def capsnet_model(config: NetworkConfig) -> Model:
    return Model(
        "capsnet",
        lambda rng: capsnet_init(rng, config),
        lambda params, batch, n, grads, ws: capsnet_loss_and_grads(params, batch, n, config, grads, ws),
        lambda params, batch, ws: capsnet_assess(params, batch, config, ws),
    )


def cnn_model(name: str, config: NetworkConfig, convs: tuple[ConvLayer, ...], n_params: int, loss: Loss) -> Model:
    """A CNN with as many hidden units as bring it to ``n_params`` parameters."""
    one, two = (count_params(cnn_init(np.random.default_rng(0), config, CNN(convs, n))) for n in (1, 2))
    net = CNN(convs, max(1, 1 + round((n_params - one) / (two - one))), loss, config.conv)
    return Model(
        name,
        lambda rng: cnn_init(rng, config, net),
        lambda params, batch, n, grads, ws: cnn_loss_and_grads(params, batch, n, net, grads, ws),
        lambda params, batch, ws: (cnn_forward(params, batch.images, net, ws)[0].T, math.nan),
    )


def make_models(config: NetworkConfig, cnn_loss: Loss = sigmoid_cross_entropy) -> dict[str, Model]:
    """The capsule network and its two baselines, by name, in the order of the result table."""
    capsnet = capsnet_model(config)
    n_params = count_params(capsnet.init_params(np.random.default_rng(0)))
    C = config.conv_channels
    trunk = (ConvLayer(KERNEL, C), ConvLayer(KERNEL, PRIMARY_SIZE * config.primary_types, stride=2))
    # Of the kind of [Sabour 2017, sec. 6], where the layers have 512 and 256 channels.
    pooled = (ConvLayer(KERNEL, 2 * C, pool=True), ConvLayer(5, 2 * C, pool=True))
    cnn = cnn_model("cnn", config, trunk, n_params, cnn_loss)
    cnn_pool = cnn_model("cnn_pool", config, pooled, n_params, cnn_loss)
    return {"capsnet": capsnet, "cnn": cnn, "cnn_pool": cnn_pool}


# ----------------------------------------------------------------------------------------------------------------------
# Optimiser, evaluation, training loop
# ----------------------------------------------------------------------------------------------------------------------

# The weights that Muon updates, and which of their axes are inputs; Adam updates the last layers and the decoder.
CONV_INPUTS = (0, 1, 2)
MUON_INPUTS = {
    "routing.w": (1, 2), "hidden.w": (0,), "primary.w": CONV_INPUTS, "conv2.w": CONV_INPUTS, "conv1.w": CONV_INPUTS,
}  # fmt: skip


def top_labels(scores: Array, n_labels: int) -> Array:
    """scores (N, J) -> the classes (N, L) with the highest scores, highest first."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :n_labels]


EVALUATION_BATCH = 32  # images that a thread classifies at a time


def assess(model: Model, params: Params, batch: Batch, workers: Workers) -> tuple[Array, float]:
    """Scores (N, J), and the squared error of all reconstructions from the true digits' capsules, NaN where a model has
    none."""

    def work(start: int) -> tuple[Array, float]:
        with np.errstate(all="ignore"):
            part = batch.part(start, start + EVALUATION_BATCH)
            scores, error = model.assess(params, part, workers.workspace)
        return scores.astype(float), error  # a copy: the next part overwrites the workspace

    scores, errors = zip(*workers.map(work, range(0, len(batch.labels), EVALUATION_BATCH)), strict=True)
    return np.concatenate(scores), sum(errors)


def evaluate(model: Model, params: Params, batch: Batch, workers: Workers) -> dict[str, float]:
    """Test metrics. ``set_accuracy``: fraction of images whose two digits have the two highest scores;
    ``soft_accuracy``: fraction in which at least one of them is among these; ``digit_accuracy``: fraction of all digits
    that are. ``recon_mse``: mean squared error of a pixel in reconstructions from the true digits' capsules."""
    L = batch.labels.shape[1]
    scores, error = assess(model, params, batch, workers)
    n_correct = (top_labels(scores, L)[:, :, None] == batch.labels[:, None]).sum(axis=(1, 2))  # (N,)
    metrics = {
        "set_accuracy": float((n_correct == L).mean()),
        "soft_accuracy": float((n_correct > 0).mean()),
        "digit_accuracy": float(n_correct.mean() / L),
    }
    if not math.isnan(error):
        metrics["recon_mse"] = error / batch.sources.size
    return metrics


def routing_study(config: Config, params: Params, batch: Batch, workers: Workers) -> dict[str, float]:
    """The trained capsules with other couplings than they were trained with, as in I. Paik et al., "Capsule networks
    need an improved routing algorithm", ACML 2019.

    These are the couplings of 1 to 5 iterations (after one they are uniform), and random ones. For each:
    ``set_accuracy``; "changed", the fraction of images that get another pair of digits than with the couplings of the
    training; and "entropy", that of a primary capsule's last couplings over its maximum log J, mean over capsules and
    images.
    """

    def answers_and_entropy(config: Config) -> tuple[Array, float]:
        def work(start: int) -> tuple[Array, Array]:
            images = batch.part(start, start + EVALUATION_BATCH).images
            lengths, cache = capsnet_forward(params, images, config, workers.workspace)
            c = cache.routing.c[-1]  # (J, I, B)
            entropy = -(c * np.log(np.maximum(c, np.finfo(c.dtype).tiny))).sum(axis=0).mean(axis=0)  # (B,)
            return np.sort(top_labels(lengths.T, batch.labels.shape[1]), axis=1), entropy / math.log(len(c))

        answers, entropies = zip(*workers.map(work, range(0, len(batch.labels), EVALUATION_BATCH)), strict=True)
        return np.concatenate(answers), float(np.concatenate(entropies).mean())

    trained, _ = answers_and_entropy(config)
    settings: dict[str, dict[str, Any]] = {
        **{f"iters_{n}": {"assignments": "routed", "routing_iters": n} for n in range(1, 6)},
        "random": {"assignments": "random"},
    }
    found = {}
    for name, fields in settings.items():
        answers, entropy = answers_and_entropy(dataclasses.replace(config, **fields))
        found[f"{name}_accuracy"] = float((answers == np.sort(batch.labels, axis=1)).all(axis=1).mean())
        found[f"{name}_changed"] = float((answers != trained).any(axis=1).mean())
        found[f"{name}_entropy"] = entropy
    return found


def update(state: TrainState, grads: list[Params], lr: float, config: NetworkConfig, workers: Workers) -> None:
    """One step of the optimiser; weights decay, biases do not."""
    decayed = [key for key in state.params if key.endswith(".w")]
    if config.optimizer == "muon":
        muon_step(state, grads, lr, config.weight_decay, decayed, MUON_INPUTS, workers)
    else:
        adamw_step(state, grads, lr, config.weight_decay, decayed, workers)


def train(
    model: Model, config: Config, data: Data, state: TrainState, workers: Workers, callback: Callback | None = None
) -> dict[str, list[float]]:
    """Train ``state`` in place to ``config.n_epochs``, from the middle of an epoch too, and return its history.

    ``callback(state, epoch has ended)`` is called before the first step and after every one. Raises UserError where the
    loss stops being finite.
    """
    if callback and state.step == 0:
        callback(state, True)
    while state.step < config.n_steps:
        started = time.perf_counter()
        batch = training_batch(data, config, state.step)
        with np.errstate(all="ignore"):  # a loss that is not finite is reported in words
            losses, grads = workers.gradients(model.loss_and_grads, state.params, batch)
            update(state, grads, config.lr_at(state.step) * model.lr_factor, config, workers)
        require_finite(state, losses["train_loss"], config.steps_per_epoch)
        state.add(losses)
        state.seconds += time.perf_counter() - started
        epoch_ended = state.step % config.steps_per_epoch == 0
        if epoch_ended:
            state.end_epoch(config.steps_per_epoch, evaluate(model, state.params, data.test, workers))
        if callback:
            callback(state, epoch_ended)
    return state.history


# ----------------------------------------------------------------------------------------------------------------------
# A run from beginning to end
# ----------------------------------------------------------------------------------------------------------------------

MODEL_NAMES = ("capsnet", "cnn", "cnn_pool")


def fresh_states(config: Config) -> dict[str, TrainState]:
    return {name: init_state(model, config) for name, model in make_models(config).items()}


def load_checkpoint(path: Path) -> tuple[Config, dict[str, TrainState]]:
    return read_checkpoint(path, EXPERIMENT, Config, fresh_states, make_parser())


def train_all(
    config: Config, data: Data, *, names: Collection[str] = MODEL_NAMES, threads: int = 1, files: Files = NO_FILES,
    callback: Callback | None = None,
) -> dict[str, TrainState]:  # fmt: skip
    """Train the named models one after the other, and return their states."""
    states = fresh_states(config)
    with Session(EXPERIMENT, config, states, files, config.n_steps, callback) as session:
        for name, model in make_models(config).items():
            if name in names:
                with Workers(threads, config.dtype) as workers:
                    train(model, config, data, states[name], workers, session.after_step)
    return {name: state for name, state in states.items() if name in names}


def make_result(
    config: Config, data: Data, states: dict[str, TrainState], threads: int = 1, study: bool = False
) -> dict[str, Any]:
    """The JSON of a run; accuracies are fractions, those of the last epoch. ``study``: with ``routing_study`` on the
    test composites among the metrics of the capsules."""
    models = {name: model_metrics(state) for name, state in states.items()}
    if study and "capsnet" in states:
        with Workers(threads, config.dtype) as workers:
            models["capsnet"] |= routing_study(config, states["capsnet"].params, data.test, workers)
    return result_document(EXPERIMENT, config, data.name, models, states, threads, "set_accuracy", 1 / config.n_pairs)


def run(
    config: Config, files: Files = NO_FILES, threads: int = 1, study: bool = False, **options: Any
) -> dict[str, Any]:
    """Data, trainings, result; with ``study`` the routing's too. The options are those of ``train_all``."""
    data = make_data(config)
    config = resolved(config, data)
    states = train_all(config, data, threads=threads, files=files, **options)
    return make_result(config, data, states, threads, study)


TEST_FIELDS = ("dataset", "data_dir", "seed", "n_test", "min_iou")


def evaluate_checkpoint(
    checkpoint: Path, asked: Config, given: Collection[str], names: Collection[str], threads: int, study: bool
) -> dict[str, Any]:
    """Test the named networks of a checkpoint on the test set of ``asked``; see ``check_same`` for ``given``."""
    saved, states = load_checkpoint(checkpoint)
    check_same(checkpoint, saved, asked, given, TEST_FIELDS)
    states = of_models(checkpoint, states, names)
    config = dataclasses.replace(saved, **{k: getattr(asked, k) for k in TEST_FIELDS})
    data = make_data(config, config.classes)
    config = resolved(config, data)
    models = make_models(config)
    with Workers(threads, config.dtype) as workers:
        for name, state in states.items():
            metrics = evaluate(models[name], state.params, data.test, workers)
            state.history = {metric: [value] for metric, value in metrics.items()}
    return make_result(config, data, states, threads, study) | {"trained_with_seed": saved.seed}


def describe(result: dict[str, Any]) -> str:
    """One line: the test or validation set and the training behind a result's numbers."""
    config = result["config"]
    names, of_validation = config["class_names"], " of validation digits" if config["n_val"] else ""
    classes = f" ({len(names)} classes: {one_line(', '.join(names))})" if names else ""
    return (
        f"{result['dataset']}{classes}: {config['n_test']:,} composites{of_validation}, IoU at least"
        f" {config['min_iou']:g}; seed {seed_of(result)}, {config['n_epochs']} epochs of"
        f" {config['n_train']:,}"
    )


def format_table(result: dict[str, Any]) -> str:
    """The result table, and that of the routing study."""
    lines = [f"{'model':<10} {'both':>6} {'one':>6} {'digits':>6} {'recon MSE':>9} {'parameters':>10} {'seconds':>8}"]
    for name, m in result["models"].items():
        mse = f"{m['recon_mse']:9.4f}" if "recon_mse" in m else " " * 9
        lines.append(
            f"{name:<10} {m['set_accuracy']:6.3f} {m['soft_accuracy']:6.3f} {m['digit_accuracy']:6.3f} {mse}"
            f" {m['n_params']:10,} {m['train_seconds']:8.1f}"
        )
    return "\n".join([*lines, *routing_study_lines(result["models"].get("capsnet", {}))])


# ----------------------------------------------------------------------------------------------------------------------
# Prediction for image files (--predict)
# ----------------------------------------------------------------------------------------------------------------------

BOX = 24  # pixels: one digit of MNIST has 20, two that are a few pixels apart have more


def predict(checkpoint: Path, paths: list[Path], out_png: Path, asked: Config, given: Collection[str]) -> str:
    """A table of the two longest capsules of each picture, and a PNG: a row each of the picture as the network gets it
    and what the two capsules draw. See ``check_same`` for ``asked`` and ``given``."""
    config, states = load_checkpoint(checkpoint)
    check_same(checkpoint, config, asked, given)
    if "capsnet" not in states:
        raise UserError(f"{checkpoint} has no capsule network")
    params, ws = states["capsnet"].params, Workspace(config.dtype)
    images = np.stack([read_strokes(path, config.image_size, BOX) for path in paths]).astype(config.dtype)
    lengths, cache = capsnet_forward(params, images, config, ws)
    named = top_labels(lengths.T, 2)
    drawn = reconstruct(params, cache.v, named, ws)  # (B, 2, H, W)
    tiles = np.concatenate([images[:, None], drawn], axis=1)  # (B, 3, H, W)
    with atomic_write(out_png) as stream:
        stream.write(picture_sheet(tiles))
    return f"{two_label_table(paths, config.classes, named, lengths)}\npictures and reconstructions: {out_png}"


# ----------------------------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "small": {"conv_channels": 32, "primary_types": 8, "decoder": (256, 512)},  # the defaults of NetworkConfig
    "paper": {"conv_channels": 256, "primary_types": 32, "decoder": (512, 1024)},
}


# fmt: off
def add_digit_flags(add: Callable[..., None]) -> None:
    add("dataset", ("auto", "mnist", "strokes"),
        "Use these digits. auto is MNIST if it is there or can be downloaded, else strokes: generated digits.")
    add("data_dir", non_empty, "Folder of the four MNIST files, or of others of their format.", "DIR", CACHE_DIR)


def add_config_flags(parser: Parser) -> None:
    """The flags of Config, which the figure scripts have too."""
    add = add_flags(parser, "data", Config)
    add_digit_flags(add)
    add("n_train", whole_number(1, 10**8), "Train on N composites in each epoch, rounded down to whole batches.")
    add("n_test", whole_number(1, 100_000), "Test on N composites of test digits, the same for all models.")
    add("n_val", whole_number(1, 10**6), "To choose settings, hold N training digits out and test on composites of"
        " them.", default="test on the test digits")
    add("min_iou", number(0, 1), "Least intersection over union of the two 28x28 boxes. The paper's is 0.", "X")
    add("pool", whole_number(0, 10**7),
        "Train on N composites drawn once, in a new order on each pass through them. With 0 every batch is fresh.")
    add_network_flags(parser, Config)


def add_network_flags(parser: Parser, config: type[NetworkConfig]) -> None:
    """The flags of the networks and of their training, the same in every experiment that trains these."""
    parser.checks.append(check_config_flags)
    parser.add_argument(
        "--preset", choices=tuple(PRESETS), default="small",
        help="Sizes of the network: 32 channels, 8 types and a decoder of 256-512 units, or the paper's 256, 32 and"
        " 512-1024. Default: %(default)s.",
    )
    add = add_flags(parser, "capsules", config)
    add("conv_channels", whole_number(1, 1024), "Give conv1 N channels.", default="the preset's")
    add("primary_types", whole_number(1, 256), "Use N types of primary capsules.", default="the preset's")
    add("assignments", ("routed", "uniform", "random"),
        "Assign by dynamic routing; evenly, 1 / J; or at random, drawn once for each pair of capsules.")
    add("routing_iters", whole_number(1, 20), "Route in N iterations.")
    add("routing_grad", ("exact", "stop"),
        "Differentiate through all iterations, or through the last sum with constant couplings.")
    add("transform", ("own", "shared"), "Transform each primary capsule by its own matrices, or all by the same.")
    add("activation", ("squash", "relu"),
        "Squash all capsules; or give primary capsules a ReLU, as in a CNN, and digit capsules nothing.")
    add("capsnet_loss", tuple(CAPSNET_LOSSES), "Loss of the lengths of the digit capsules.")
    add("recon_weight", number(0, 1000), "Weight of the squared error of reconstruction in the loss.", "X")
    add = add_flags(parser, "training", config)
    add("seed", whole_number(0, 2**32 - 1), "Seed of the data, the initial weights and the order of the images.")
    add("n_epochs", whole_number(1, 100_000), "Train for N epochs, each of --n-train examples.")
    add("batch_size", whole_number(1, 4096), "Take each step on N images.")
    add("optimizer", ("adam", "muon"), "Optimizer. muon takes orthogonal steps of convolutions, digit capsules and a"
        " CNN's hidden layer, and leaves the rest to Adam.")
    add("lr", number(0, 10, above=True), "Learning rate.", "X")
    add("weight_decay", number(0, 100), "A step shrinks every weight, but no bias, by lr * X.", "X")
    add("lr_schedule", ("constant", "linear", "cosine", "exponential"),
        "Course of the learning rate. linear and cosine fall to 0, exponential falls by 4 % every 2,000 steps.")
    add("conv", tuple(CONVOLUTIONS), "Form of convolutions of many channels: the plain one, or a fast one.")
    add("dtype", ("float32", "float64"), "Number format of all arithmetic.")
    parser.add_argument(
        "--threads", type=whole_number(1, 256), metavar="N", default=default_threads(),
        help=f"Use N threads; each works on {LEAST_PART} images of a batch or more. Default: one for each processor, at"
        " most 4 (here: %(default)s).",
    )
# fmt: on


def check_config_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """A usage error (status 2) where they do not fit together."""
    if args.dataset == "strokes" and args.data_dir is not None:
        parser.error("argument --data-dir: strokes has no files")
    if args.assignments != "routed" and "routing_iters" in args.given:
        parser.error("argument --routing-iters: needs --assignments routed")
    if 0 < args.n_train < args.batch_size and "n_train" in args.given:
        parser.error(f"argument --n-train: {args.n_train} is less than a batch of --batch-size {args.batch_size}")


def config_fields(args: argparse.Namespace, config: type[NetworkConfig]) -> dict[str, Any]:
    """Values of the fields of a Config: the preset's sizes, and those of the flags."""
    return PRESETS[args.preset] | {name: v for name, v in values_of(args, config).items() if v is not None}


def with_preset(given: Collection[str]) -> set[str]:
    """The fields that the command line set, those that a given --preset sets included."""
    return {*given, *(PRESETS["small"] if "preset" in given else ())}


def config_from_args(args: argparse.Namespace) -> Config:
    return Config(**config_fields(args, Config))


def check_study_flag(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """A usage error (status 2) where the study has nothing to ask."""
    if args.routing_study and "capsnet" not in args.models:
        parser.error("argument --models: --routing-study asks the capsule network")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "--dataset --data-dir --seed --n-epochs --n-train --models --out-json --checkpoint --resume --predict",
        [
            ("", "Three models, eight epochs of 6,000 composites: about 7 minutes."),
            (
                "--models capsnet --n-epochs 20 --checkpoint run.npz",
                "Train the capsules longer and keep them: about 8 minutes.",
            ),
            (
                "--checkpoint run.npz --predict digits.png",
                "Name the two digits of a picture with the capsule network of run.npz: about 1 second.",
            ),
        ],
        description="Train a capsule network and two CNNs to recognise both digits of a composite: two digits laid over"
        " each other.",
    )
    add_config_flags(parser)
    parser.add_argument(
        "--routing-study", action="store_true",
        help="Also test the trained capsules with 1 to 5 iterations and with random couplings.",
    )  # fmt: skip
    add_file_flags(parser, MODEL_NAMES, predict_png=True)
    parser.checks.append(check_study_flag)
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    config, given = config_from_args(args), with_preset(args.given)
    return run_script(
        EXPERIMENT, argv, args,
        predict=lambda: predict(args.checkpoint, args.predict, args.predict_png, config, given),
        train=lambda files: run(config, files, args.threads, args.routing_study, names=args.models),
        evaluate=lambda: evaluate_checkpoint(
            args.checkpoint, config, given, args.models, args.threads, args.routing_study
        ),
        text=lambda result: f"{describe(result)}\n{format_table(result)}", threads=args.threads,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
