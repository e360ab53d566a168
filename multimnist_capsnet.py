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

Deviations from the paper: conv1 has 32 channels and there are 8 types of primary capsules, not 256 and 32
(``--preset paper`` has them); the intersection over union of the two digits' boxes is at least 0.8 in every image, and
not 0.68 on average (``--min-iou 0``); 1,496 steps; the reconstruction weighs ten times as much.

Run it (eight epochs of 6,000 fresh composites, seed 0, three models):

    python multimnist_capsnet.py
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gzip
import itertools
import json
import math
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import numpy as np
import pooch
from tqdm import tqdm

from support.spectral_conv import spectral_conv2d_backward, spectral_conv2d_forward
from support.stroke_digits import stroke_digits

# Dimension letters
#   B  images of a batch          L  digits in an image (2)       H, W  rows and columns     C  channels
#   K  side of a kernel           N  examples of a set            T  types of primary capsules
#   I  primary capsules           P  numbers in one (8)           J  digit capsules (= classes)   D  numbers in one (16)

Array = np.ndarray
Params = dict[str, Array]

EXPERIMENT = "multimnist_capsnet"
N_CLASSES = 10
DIGIT_SIDE = 28
KERNEL = 9
PRIMARY_SIZE = 8
CAPSULE_SIZE = 16
WARMUP = 100  # steps


class UserError(Exception):
    """Something that the person at the keyboard can put right; its message is one line."""


# ----------------------------------------------------------------------------------------------------------------------
# Configuration: what a person chooses, and nothing else
# ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    """One run. The papers' values, where others are the default, are in the comments. [Sabour 2017, sec. 4 to 6]"""

    dataset: str = "auto"
    data_dir: str | None = None
    seed: int = 0
    n_epochs: int = 8
    n_train: int = 6000  # composites an epoch; 60 million in all
    n_test: int = 2000  # 10 million
    pool: int = 0  # composites drawn once and for all; 0: every batch is fresh
    max_shift: int = 4  # pixels
    min_iou: float = 0.8  # 0
    image_size: int = 36
    n_labels: int = 2
    conv_channels: int = 32  # 256
    primary_types: int = 8  # 32
    decoder: tuple[int, int] = (256, 512)  # 512, 1024
    routing_iters: int = 3
    routing_grad: str = "exact"
    recon_weight: float = 0.005  # 0.0005
    batch_size: int = 32  # 128 in the published code
    lr: float = 5e-3  # 1e-3
    lr_schedule: str = "linear"  # exponential
    optimizer: str = "adam"
    weight_decay: float = 0.0
    dtype: str = "float32"
    conv: str = "spectral"  # or "im2col": how convolutions of many channels are computed

    @property
    def primary_side(self) -> int:
        """Rows, and columns, of the grid of primary capsules."""
        return (self.image_size - 2 * KERNEL + 1) // 2 + 1

    @property
    def n_primary(self) -> int:
        return self.primary_side**2 * self.primary_types

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


class Stream(IntEnum):
    """Independent random streams of one seed, so that no part of a run shifts the draws of another."""

    DATA = 0
    INIT = 1
    SHUFFLE = 2
    EVALUATION = 3


def generator(seed: int, stream: Stream, *key: int) -> np.random.Generator:
    """The generator of one stream; ``key`` (an epoch, a model) addresses it, so a resumed run needs no stored state."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(int(stream), *key)))


# ----------------------------------------------------------------------------------------------------------------------
# Data, 1: single digits
# ----------------------------------------------------------------------------------------------------------------------


class Digits(NamedTuple):
    """Single digits. ``name`` is what stands in tables, JSON and titles: "mnist", "strokes" or "custom"."""

    name: str
    train_images: Array  # (N, 28, 28) uint8, strokes are 255
    train_labels: Array  # (N,) uint8, 0 to 9
    test_images: Array  # (M, 28, 28) uint8
    test_labels: Array  # (M,) uint8


# ----------------------------------------------------------------------------------------------------------------------
# Data, 2: MNIST files
# ----------------------------------------------------------------------------------------------------------------------

CACHE_DIR = "~/.cache/hinton-mnist"
MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)
MNIST_SHA256 = {
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}  # of the .gz files
MNIST_CRC32 = 0x1939F699  # of the four arrays' bytes, in the order of Digits
MAX_EXAMPLES = 1_000_000  # a header that claims more than this is not believed
MIRROR_SECONDS = 4.0  # for a mirror to answer at all, name look-up included
STALL_SECONDS = 15.0  # for the next bytes of a running download


class MnistUnavailableError(UserError):
    """MNIST is neither on this machine nor to be had from a mirror."""


def read_idx(path: Path, ndim: int) -> Array:
    """Read one MNIST file, plain or gzipped (told by content, not by name).

    ndim 3: images (N, 28, 28); ndim 1: labels (N,). uint8 both. Raises UserError naming the file when it is
    anything else. Memory follows the bytes that the file really holds, never what its header claims.
    """

    def fault(what: str) -> UserError:
        return UserError(f"{path} {what}: replace it with an intact MNIST file")

    data = bytearray()
    try:
        with path.open("rb") as raw:
            gzipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            with gzip.GzipFile(fileobj=raw) if gzipped else raw as file:
                header = file.read(4 + 4 * ndim)
                if len(header) < 4 + 4 * ndim:
                    raise fault("is cut short in its header")
                if header[:4] != bytes((0, 0, 8, ndim)):  # 8: unsigned byte
                    raise fault(f"is no IDX file of {ndim}-D uint8 (magic {header[:4].hex()})")
                shape = tuple(np.frombuffer(header, ">u4", offset=4).tolist())
                if shape[1:] != (28, 28)[: ndim - 1] or not 0 < shape[0] <= MAX_EXAMPLES:
                    raise fault(f"has the shape {shape}")
                size = shape[0] * 28 ** (ndim - 1)
                # One byte more than wanted shows trailing bytes and makes gzip check its CRC.
                while chunk := file.read(min(1 << 16, size + 1 - len(data))):
                    data += chunk
    except (OSError, EOFError, zlib.error) as error:
        raise fault(f"cannot be read ({_one_line(error)})") from error
    if len(data) != size:
        kind = "is truncated" if len(data) < size else "has trailing bytes"
        raise fault(f"{kind} ({size} bytes of data expected)")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _one_line(error: BaseException, limit: int = 120) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _answers(downloader: pooch.HTTPDownloader, url: str) -> bool:
    """Ask for the URL's header. A connect timeout bounds neither the name look-up nor a host with many
    addresses, so the question is put from a thread that is left behind when it takes too long."""
    answer: list[bool] = []

    def ask() -> None:
        try:
            answer.append(downloader(url, None, None, check_only=True))
        except (OSError, ValueError):  # requests' exceptions are OSErrors
            answer.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(MIRROR_SECONDS)
    return bool(answer) and answer[0]


def download_mnist(stem: str, folder: Path, mirrors: Sequence[str] = MIRRORS) -> Path:
    """Path of an intact ``folder/<stem>.gz``, downloaded unless it is there and has the right SHA-256.

    A damaged one is replaced when, and only when, a verified copy has arrived. Raises MnistUnavailableError
    when no mirror gives one.
    """
    path, sha256 = folder / f"{stem}.gz", MNIST_SHA256[stem]
    damaged = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if pooch.file_hash(str(path)) == sha256:
                return path
            damaged = f"{path} is damaged; "
            print(f"{path} is damaged, fetching it again", file=sys.stderr)
    except OSError as error:
        raise MnistUnavailableError(
            f"no MNIST cache at {folder} ({_one_line(error)}): name the files' folder with --data-dir"
        ) from error

    pooch.get_logger().setLevel("WARNING")
    tried = []
    for mirror in mirrors:
        url = f"{mirror}{stem}.gz"
        # total=1 until pooch knows better: a bar without a total has no truth value
        with tqdm(total=1, desc=stem, unit="B", unit_scale=True, leave=False, disable=None) as bar:
            downloader = pooch.HTTPDownloader(bar, 1 << 16, timeout=(MIRROR_SECONDS, STALL_SECONDS))
            try:
                if not _answers(downloader, url):
                    raise OSError("no answer")
                pooch.retrieve(url, f"sha256:{sha256}", path.name, folder, downloader=downloader)
                return path
            except ValueError:
                tried.append(f"{mirror} (wrong SHA-256)")
            except OSError as error:
                tried.append(f"{mirror} ({_one_line(error)})")
    raise MnistUnavailableError(
        f"{damaged}MNIST could not be downloaded from {', '.join(tried)}: "
        "name the folder with the four files by --data-dir, or take --dataset strokes"
    )


def _placed(folder: Path, stem: str) -> Path | None:
    """The file that a person put into the folder, under any of its usual names."""
    stems = (stem, stem.replace("-idx", ".idx"))
    return next((p for s in stems for p in (folder / f"{s}.gz", folder / s) if os.path.isfile(p)), None)


def load_mnist(data_dir: Path | None = None, cache_dir: Path | None = None, mirrors: Sequence[str] = MIRRORS) -> Digits:
    """MNIST from ``data_dir``, else from the cache, else from the mirrors into the cache.

    What lies in the cache folder itself was put there by a person: it is read, and when it is damaged it is
    named and left alone. Downloads live in its subfolder ``downloaded``, which is ours: what is damaged there
    is fetched again. Intact files that are not the canonical MNIST are taken and called "custom".
    Raises UserError, or MnistUnavailableError when there is no file and no download.
    """
    if data_dir is not None and not os.path.isdir(data_dir):  # unlike Path.is_dir, never raises
        raise UserError(f"--data-dir {data_dir} is no folder: name the one with the four MNIST files")
    folder = data_dir or cache_dir or Path(os.path.expanduser(CACHE_DIR))
    paths = []
    for stem in MNIST_SHA256:
        path = _placed(folder, stem)
        if path is None and data_dir is not None:
            raise UserError(f"{data_dir} has no {stem}.gz nor {stem}: put the four MNIST files there")
        paths.append(path or download_mnist(stem, folder / "downloaded", mirrors))

    arrays = [read_idx(path, ndim) for path, ndim in zip(paths, (3, 1, 3, 1), strict=True)]
    for i in (0, 2):
        images, labels = arrays[i : i + 2]
        if len(images) != len(labels):
            raise UserError(
                f"{paths[i]} has {len(images)} images but {paths[i + 1]} has {len(labels)} labels: "
                "take both from the same source"
            )
        if labels.max() > 9:
            raise UserError(f"{paths[i + 1]} has the label {labels.max()}: labels must be 0 to 9")
    crc = 0
    for array in arrays:
        crc = zlib.crc32(array.data, crc)
    return Digits("mnist" if crc == MNIST_CRC32 else "custom", *arrays)


# ----------------------------------------------------------------------------------------------------------------------
# Data, 3: MNIST, or generated digits
# ----------------------------------------------------------------------------------------------------------------------


def resolve_dataset(
    choice: str,
    rng: np.random.Generator,
    data_dir: Path | None = None,
    stroke_counts: tuple[int, int] = (20_000, 5_000),
    cache_dir: Path | None = None,
    mirrors: Sequence[str] = MIRRORS,
) -> Digits:
    """The digits that ``--dataset`` asks for: "mnist", "strokes", or "auto".

    "auto" is MNIST where it can be had, else strokes with a warning on stderr. A damaged file and a wrong
    --data-dir raise UserError even then: what a person asked for is never swapped for something else.
    ``rng`` draws the stroke digits (training and test set from separate streams) and nothing else.
    """
    if choice in ("auto", "mnist"):
        try:
            return load_mnist(data_dir, cache_dir, mirrors)
        except MnistUnavailableError as error:
            if choice == "mnist":
                raise
            rule = "!" * 100
            print(
                f"{rule}\nWARNING: this run does NOT use MNIST but generated digits (strokes).\n"
                f"Its figures do not compare with those on MNIST. Reason: {error}\n{rule}",
                file=sys.stderr,
            )
    train_rng, test_rng = rng.spawn(2)
    n_train, n_test = stroke_counts
    return Digits("strokes", *stroke_digits(train_rng, n_train), *stroke_digits(test_rng, n_test))


# ----------------------------------------------------------------------------------------------------------------------
# Data, 4: two digits laid over each other
# ----------------------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Composites, the classes in them, and each digit alone. Intensities are 0 to 1."""

    images: Array  # (B, H, W)
    labels: Array  # (B, L)
    sources: Array  # (B, L, H, W)

    def part(self, start: int, stop: int) -> Batch:
        return Batch(*(a[start:stop] for a in self))


class Composites(NamedTuple):
    """Which digits are laid over each other, and how far each is shifted; ``Overlays.render`` makes images of them."""

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
        self.class_start = np.searchsorted(self.labels, np.arange(N_CLASSES + 1))  # in self.images
        self.shifts = admissible_shifts(config.max_shift, config.min_iou)
        self.max_shift, self.side, self.dtype = config.max_shift, config.image_size, np.dtype(config.dtype)

    def draw(self, rng: np.random.Generator, n: int) -> Composites:
        """Two digits of different classes, and one of the admissible pairs of shifts; no draw is thrown away."""
        a = rng.integers(len(self.labels), size=n)
        start, stop = self.class_start[self.labels[a]], self.class_start[self.labels[a] + 1]
        b = rng.integers(len(self.labels) - (stop - start))  # counts the digits of all other classes
        b += np.where(b >= start, stop - start, 0)
        return Composites(np.stack([a, b], axis=1), self.shifts[rng.integers(len(self.shifts), size=n)])

    def render(self, composites: Composites) -> Batch:
        which, shift = composites
        sources = shifted(self.images[which], shift, self.side, self.max_shift)  # (N, 2, H, W)
        sources = sources * self.dtype.type(1 / 255)
        return Batch(sources.max(axis=1), self.labels[which], sources)


class Data(NamedTuple):
    name: str  # of the digits: "mnist", "strokes" or "custom"
    train: Overlays
    pool: Composites | None
    test: Batch


def make_data(config: Config) -> Data:
    """Composites for training are drawn later, batch by batch; those of the test are drawn here, once."""
    rng = generator(config.seed, Stream.DATA)
    digits = resolve_dataset(config.dataset, rng, Path(config.data_dir) if config.data_dir else None)
    train = Overlays(digits.train_images, digits.train_labels, config)
    test = Overlays(digits.test_images, digits.test_labels, config)
    pool = train.draw(generator(config.seed, Stream.DATA, 1), config.pool) if config.pool else None
    composites = test.draw(generator(config.seed, Stream.EVALUATION), config.n_test)
    return Data(digits.name, train, pool, test.render(composites))


def resolve_auto(config: Any, data_name: str) -> Any:
    """``config`` with the data set that ``auto`` found, strokes or MNIST files, instead of ``auto``: a run that was
    begun on one is not to be resumed on the other."""
    if config.dataset != "auto":
        return config
    return dataclasses.replace(config, dataset="strokes" if data_name == "strokes" else "mnist")


@functools.lru_cache(maxsize=2)
def shuffled(n: int, seed: int, *key: int) -> Array:
    """0 to n - 1 in the order that the seed and a key, such as the epoch, give."""
    return generator(seed, Stream.SHUFFLE, *key).permutation(n)


def training_batch(data: Data, config: Config, step: int) -> Batch:
    """The batch of a step, which depends on the seed and the step alone. A pool is gone through again and again, each
    time in a new order."""
    B = config.batch_size
    if data.pool is None:
        return data.train.render(data.train.draw(generator(config.seed, Stream.SHUFFLE, step), B))
    n = len(data.pool.which)
    passes, positions = np.divmod(np.arange(step * B, (step + 1) * B), n)
    chosen = np.concatenate([shuffled(n, config.seed, t)[positions[passes == t]] for t in np.unique(passes).tolist()])
    return data.train.render(Composites(data.pool.which[chosen], data.pool.shift[chosen]))


# ----------------------------------------------------------------------------------------------------------------------
# Forward and backward passes
#
# A map is (H, W, B, C) in here, so that each pixel is a matrix of examples and channels. From the capsules on the
# batch is the last axis: the primary capsules are (P, I, B). All products below then have contiguous operands. A
# backward pass writes the gradients of weights into the arrays that it is given, and returns that of its input.
# ----------------------------------------------------------------------------------------------------------------------


class Workspace:
    """Arrays that one training step leaves to the next: ``ws("conv1.out", 28, 28, B, 32)``.

    A large array allocated anew pays for its page faults every time; here it is allocated once and overwritten. What a
    forward pass returns therefore holds until the next one with the same workspace.
    """

    def __init__(self, dtype: np.dtype | type | str = np.float32) -> None:
        self.dtype = np.dtype(dtype)
        self._arrays: dict[str, Array] = {}

    def __call__(self, name: str, *shape: int) -> Array:
        array = self._arrays.get(name)
        if array is None or array.shape != shape:
            array = self._arrays[name] = np.empty(shape, self.dtype)
        return array


def row_sum(x: Array) -> Array:
    """x (..., C) -> (C), by a product, which is faster than np.sum."""
    flat = x.reshape(-1, x.shape[-1])
    return np.ones(len(flat), x.dtype) @ flat


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
    db[...] = row_sum(dout)
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


CONVOLUTIONS: dict[str, tuple[Callable[..., tuple[Array, Any]], Callable[..., Any]]] = {
    "im2col": (conv2d_forward, conv2d_backward),
    "spectral": (spectral_conv2d_forward, spectral_conv2d_backward),
}


def max_pool_forward(x: Array, ws: Workspace, name: str) -> Array:
    """2x2, stride 2; an odd last row or column is dropped. x (H, W, B, C) -> (H // 2, W // 2, B, C)."""
    H, W = x.shape[0] // 2 * 2, x.shape[1] // 2 * 2
    out = ws(name + ".out", H // 2, W // 2, *x.shape[2:])
    np.maximum(x[0:H:2, 0:W:2], x[0:H:2, 1:W:2], out=out)
    np.maximum(out, x[1:H:2, 0:W:2], out=out)
    return np.maximum(out, x[1:H:2, 1:W:2], out=out)


def max_pool_backward(dout: Array, x: Array, out: Array, ws: Workspace, name: str) -> Array:
    """The gradient goes to the first of the four that is the maximum."""
    H, W = x.shape[0] // 2 * 2, x.shape[1] // 2 * 2
    dx = ws(name + ".dx", *x.shape)
    dx[...] = 0
    waiting = np.ones(out.shape, bool)
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        hit = waiting & (x[i:H:2, j:W:2] == out)
        waiting ^= hit
        np.multiply(dout, hit, out=dx[i:H:2, j:W:2])
    return dx


def flattened(x: Array, ws: Workspace) -> Array:
    """x (H, W, B, C) -> (H*C*W, B). The order is part of what the weights of a dense layer mean."""
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
    """x (n_in, B), w (n_in, n_out), b (n_out) -> (n_out, B)."""
    out = ws(name + ".out", w.shape[1], x.shape[1])
    np.matmul(w.T, x, out=out)
    out += b[:, None]
    return out


def linear_backward(dout: Array, x: Array, w: Array, dw: Array, db: Array) -> Array:
    """dout (n_out, B) -> dx (n_in, B)."""
    np.matmul(x, dout.T, out=dw)
    np.sum(dout, axis=1, out=db)
    return np.matmul(w, dout)


def relu_forward(x: Array) -> Array:
    """In place: the output is all that the backward pass needs."""
    return np.maximum(x, 0, out=x)


def relu_backward(dout: Array, out: Array) -> Array:
    """In place."""
    dout *= out > 0
    return dout


def sigmoid_forward(x: Array) -> Array:
    """In place: 1 / (1 + exp(-x)), to a few roundings. It stops at the smallest normal number (in float32 at x = -87),
    so that exp does not overflow."""
    np.maximum(x, math.log(np.finfo(x.dtype).tiny), out=x)
    np.negative(x, out=x)
    np.exp(x, out=x)
    x += 1
    return np.reciprocal(x, out=x)


def sigmoid_backward(dout: Array, out: Array) -> Array:
    """In place."""
    dout *= out * (1 - out)
    return dout


SQUASH_EPS = 1e-9  # added to |s|^2: keeps the derivative of |s| finite for a capsule that is exactly zero


class SquashCache(NamedTuple):
    s: Array
    q: Array  # |s|^2 + eps, its axis kept
    axis: int


def squash_forward(s: Array, axis: int, out: Array) -> SquashCache:
    """Writes |s|^2 / (1 + |s|^2) * s / |s| into ``out``; lengths are taken along ``axis``. [Sabour 2017, eq. 1]"""
    q = np.square(s).sum(axis, keepdims=True)
    q += SQUASH_EPS
    np.multiply(s, np.sqrt(q) / (1 + q), out=out)
    return SquashCache(s, q, axis)


def squash_backward(dv: Array, cache: SquashCache) -> Array:
    """v = f s with f(q) = sqrt(q) / (1 + q), q = |s|^2: ds = f dv + 2 f'(q) (s . dv) s."""
    s, q, axis = cache
    root = np.sqrt(q)
    ds = s * dv
    along = ds.sum(axis, keepdims=True) * ((1 - q) / (root * (1 + q) ** 2))
    np.multiply(s, along, out=ds)
    ds += dv * (root / (1 + q))
    return ds


# ----------------------------------------------------------------------------------------------------------------------
# Dynamic routing
#
# Capsule i votes u_hat[j, d, i] = sum_p w[j, p, i, d] u[p, i] for parent j. The votes of a batch would be the largest
# array of the network, and nothing needs them one by one. Routing only ever asks
#     for a sum over capsules  s[j, d] = sum_i c[j, i] u_hat[j, d, i] = sum_pi w[j, p, i, d] (c[j, i] u[p, i]), and
#     for an agreement         a[j, i] = sum_d v[j, d] u_hat[j, d, i] = sum_p u[p, i] (sum_d w[j, p, i, d] v[j, d]):
# a product by w of P = 8 numbers for a capsule and each of its ten parents, not of D = 16 (while all c are equal, of u
# itself).
# ----------------------------------------------------------------------------------------------------------------------


def softmax_over_parents(b: Array, out: Array) -> Array:
    """b (J, I, B) -> couplings c of that shape: what a capsule gives its J parents sums to 1."""
    np.subtract(b, b.max(axis=0), out=out)
    np.exp(out, out=out)
    out /= out.sum(axis=0)
    return out


def softmax_backward(dc: Array, c: Array) -> Array:
    """In place: db = c (dc - sum_j c dc)."""
    dc -= np.einsum("jib,jib->ib", c, dc)
    dc *= c
    return dc


class RoutingCache(NamedTuple):
    u: Array  # (P, I, B)
    w: Array  # (J, P, I, D)
    c: list[Array]  # per iteration: couplings (J, I, B)
    squashes: list[SquashCache]  # per iteration
    v: list[Array]  # per iteration: (J, D, B)


def routing_forward(u: Array, w: Array, n_iters: int, ws: Workspace) -> tuple[Array, RoutingCache]:
    """Dynamic routing [Sabour 2017, procedure 1]. u (P, I, B), w (J, P, I, D) -> v (J, D, B)."""
    J, P, I, D = w.shape
    B = u.shape[-1]
    cache = RoutingCache(u, w, [], [], [])
    b, x, sums = ws("routing.b", J, I, B), ws("routing.x", J, P, I, B), ws("routing.sums", J, P, D, B)
    b[...] = 0
    for t in range(n_iters):
        c, v = ws(f"routing.c{t}", J, I, B), ws(f"routing.v{t}", J, D, B)
        if t == 0:
            c[...] = 1 / J  # b is zero
        else:
            softmax_over_parents(b, c)
        cu = u if t == 0 else np.multiply(c[:, None], u, out=x)  # (P, I, B) or (J, P, I, B)
        s = np.matmul(w.transpose(0, 1, 3, 2), cu, out=sums).sum(axis=1)  # (J, D, B)
        if t == 0:  # c = 1 / J
            s /= J
        cache.c.append(c)
        cache.squashes.append(squash_forward(s, 1, v))
        cache.v.append(v)
        if t < n_iters - 1:
            np.matmul(w, v[:, None], out=x)  # (J, P, I, B)
            b += np.einsum("pib,jpib->jib", u, x)
    return v, cache


TERM_SIZE = 1 << 19  # entries of the weights' gradient that are added up at a time: few calls, and few cache misses


def routing_backward(dv: Array, cache: RoutingCache, policy: str, dw: Array, ws: Workspace) -> Array:
    """dv (J, D, B) -> du (P, I, B).

    policy "stop":  the couplings are constants; only the last iteration's sum is differentiated.
    policy "exact": the gradient of what the forward pass computes, through the softmax, the agreement and the squash of
                    every iteration. The gradient of the votes is then a sum of products of two factors,
                    du_hat[j, d, i] = sum_t c_t[j, i] ds_t[j, d] + db_t+1[j, i] v_t[j, d], and stays in factors.
    """
    u, w, c, squashes, v = cache
    J, P, I, D = w.shape
    B = u.shape[-1]
    x, sums = ws("routing.x", J, P, I, B), ws("routing.sums", J, P, D, B)
    n = max(1, TERM_SIZE // w[0].size)
    groups = [slice(j, j + n) for j in range(0, J, n)]  # of parents
    dw_term = ws("routing.dw_term", *w[:n].shape)
    du, db = ws("routing.du", P, I, B), ws("routing.db", J, I, B)
    du[...] = db[...] = 0
    last = len(v) - 1
    first = last if policy == "stop" else 0
    for t in range(last, first - 1, -1):
        if t < last:  # b += a; a = sum_d v u_hat
            np.multiply(db[:, None], u, out=x)
            v_rows = np.ascontiguousarray(v[t].transpose(0, 2, 1))[:, None]  # (J, 1, B, D)
            for group in groups:
                dw[group] += np.matmul(x[group], v_rows[group], out=dw_term[: len(w[group])])
            dv = np.matmul(w.transpose(0, 1, 3, 2), x, out=sums).sum(axis=1)
            np.matmul(w, v[t][:, None], out=x)
            du += np.einsum("jib,jpib->pib", db, x)
        ds = squash_backward(dv, squashes[t])  # v = squash(s)
        if t == 0:  # c = 1 / J
            ds /= J
        # s = sum_i c u_hat
        ds_rows = np.ascontiguousarray(ds.transpose(0, 2, 1))[:, None]  # (J, 1, B, D)
        cu = np.broadcast_to(u, x.shape) if t == 0 else np.multiply(c[t][:, None], u, out=x)
        if t == last:  # the first to write there
            np.matmul(cu, ds_rows, out=dw)
        else:
            for group in groups:
                dw[group] += np.matmul(cu[group], ds_rows[group], out=dw_term[: len(w[group])])
        np.matmul(w, ds[:, None], out=x)
        du += x.sum(axis=0) if t == 0 else np.einsum("jib,jpib->pib", c[t], x)
        if t > first:
            db += softmax_backward(np.einsum("pib,jpib->jib", u, x), c[t])  # c = softmax(b)
    return du


# ----------------------------------------------------------------------------------------------------------------------
# Losses: (loss, gradient with respect to the input), means over ``n`` examples, of which the batch may be a part
# ----------------------------------------------------------------------------------------------------------------------

PRESENT, ABSENT, ABSENT_WEIGHT = 0.9, 0.1, 0.5  # m+, m- and lambda [Sabour 2017, sec. 3]


def margin_loss(lengths: Array, positive: Array, n: int) -> tuple[float, Array]:
    """Summed over the classes. lengths (J, B), positive (J, B) of 0 and 1. [Sabour 2017, eq. 4]"""
    short = np.maximum(0, PRESENT - lengths) * positive
    long = np.maximum(0, lengths - ABSENT) * (1 - positive)
    loss = float(np.square(short).sum() + ABSENT_WEIGHT * np.square(long).sum()) / n
    return loss, (2 / n) * (ABSENT_WEIGHT * long - short)


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


Loss = Callable[[Array, Array, int], tuple[float, Array]]  # scores and indicator (J, B), n -> loss, gradient of scores


def indicator(labels: Array, dtype: np.dtype) -> Array:
    """labels (B, L) -> (J, B), 1 for the classes in an image."""
    positive = np.zeros((N_CLASSES, len(labels)), dtype)
    positive[labels.T, np.arange(len(labels))] = 1
    return positive


# ----------------------------------------------------------------------------------------------------------------------
# The capsule network
# ----------------------------------------------------------------------------------------------------------------------


class CapsNetCache(NamedTuple):
    conv1: ConvCache
    h1: Array  # (28, 28, B, 32) at the default sizes
    primary: Any  # of the convolution that the configuration names
    squash: SquashCache
    routing: RoutingCache
    v: Array  # (J, D, B)


def gaussian(rng: np.random.Generator, dtype: str, std: float, *shape: int) -> Array:
    """Independent, of mean 0."""
    return rng.normal(0, std, shape).astype(dtype)


def capsnet_init(rng: np.random.Generator, config: Config) -> Params:
    C, n_primary_out, dtype = config.conv_channels, PRIMARY_SIZE * config.primary_types, config.dtype
    # A vote is a sum of P terms, a digit capsule one of I votes; this is 0.1 at the default sizes.
    routing_std = math.sqrt(PRIMARY_SIZE / config.n_primary)
    params = {
        "conv1.w": gaussian(rng, dtype, math.sqrt(2 / KERNEL**2), KERNEL, KERNEL, 1, C),
        "conv1.b": np.zeros(C, dtype),
        "primary.w": gaussian(rng, dtype, math.sqrt(1 / (KERNEL**2 * C)), KERNEL, KERNEL, C, n_primary_out),
        "primary.b": np.zeros(n_primary_out, dtype),
        "routing.w": gaussian(rng, dtype, routing_std, N_CLASSES, PRIMARY_SIZE, config.n_primary, CAPSULE_SIZE),
    }
    sizes = (N_CLASSES * CAPSULE_SIZE, *config.decoder, config.image_size**2)
    variances = (2 / CAPSULE_SIZE, 2 / sizes[1], 1 / sizes[2])  # one capsule is all that the first layer ever sees
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


def capsnet_forward(params: Params, images: Array, config: Config, ws: Workspace) -> tuple[Array, CapsNetCache]:
    """images (B, H, W) -> lengths of the digit capsules (J, B). The cache has the capsules and their couplings."""
    side, B = config.primary_side, len(images)
    h1, conv1 = conv2d_forward(batch_last(images, ws), params["conv1.w"], params["conv1.b"], 1, ws, "conv1")
    relu_forward(h1)
    forward, _ = CONVOLUTIONS[config.conv]
    h2, primary = forward(h1, params["primary.w"], params["primary.b"], 2, ws, "primary")  # (side, side, B, P*T)
    s, u = (ws(name, PRIMARY_SIZE, config.n_primary, B) for name in ("primary.s", "primary.u"))
    as_map(s, side)[...] = h2.reshape(side, side, B, PRIMARY_SIZE, -1)
    squash = squash_forward(s, 0, u)
    v, routing = routing_forward(u, params["routing.w"], config.routing_iters, ws)  # (J, D, B)
    lengths = np.sqrt(np.square(v).sum(axis=1) + SQUASH_EPS)
    return lengths, CapsNetCache(conv1, h1, primary, squash, routing, v)


def mask_capsules(v: Array, labels: Array) -> Array:
    """v (J, D, B), labels (B, L) -> (J*D, L*B): capsule ``labels[b, l]`` of example b in column l*B + b, zeros above
    and below it."""
    (J, D, B), L = v.shape, labels.shape[1]
    masked = np.zeros((J, D, L, B), v.dtype)
    each, digit = np.arange(B)[:, None], np.arange(L)
    masked[labels, :, digit, each] = v[labels, :, each]
    return masked.reshape(J * D, L * B)


def unmask_gradient(dmasked: Array, dv: Array, labels: Array) -> None:
    """masked[...] = v[labels]: adds the gradient of the masked capsules (J*D, L*B) to dv (J, D, B)."""
    (J, D, B), L = dv.shape, labels.shape[1]
    each, digit = np.arange(B)[:, None], np.arange(L)
    dv[labels, :, each] += dmasked.reshape(J, D, L, B)[labels, :, digit, each]  # the labels of an example differ


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
    params: Params, batch: Batch, n: int, config: Config, grads: Params, ws: Workspace
) -> dict[str, float]:
    """Margin loss of all capsules, and squared error of each digit drawn from its own; of ``n`` examples in all."""
    side, B = config.primary_side, len(batch.labels)
    lengths, cache = capsnet_forward(params, batch.images, config, ws)
    margin, dlengths = margin_loss(lengths, indicator(batch.labels, lengths.dtype), n)
    dv = cache.v * (dlengths / lengths)[:, None]  # lengths = |v|

    pictures, inputs = decoder_forward(params, mask_capsules(cache.v, batch.labels), ws)
    error, dpictures = squared_error(pictures, pixels_last(batch.sources), config.recon_weight, n)
    unmask_gradient(decoder_backward(dpictures, pictures, inputs, params, grads), dv, batch.labels)

    du = routing_backward(dv, cache.routing, config.routing_grad, grads["routing.w"], ws)
    ds = squash_backward(du, cache.squash)
    dh2 = ws("primary.dout", side, side, B, PRIMARY_SIZE, config.primary_types)
    dh2[...] = as_map(ds, side)
    _, backward = CONVOLUTIONS[config.conv]
    dh1 = backward(dh2.reshape(side, side, B, -1), cache.primary, grads["primary.w"], grads["primary.b"], ws)
    relu_backward(dh1, cache.h1)
    conv2d_backward(dh1, cache.conv1, grads["conv1.w"], grads["conv1.b"], ws, need_dx=False)
    return {
        "train_loss": margin + config.recon_weight * error,
        "train_margin_loss": margin,
        "train_recon_loss": error / batch.labels.shape[1],  # of one digit
    }


def capsnet_assess(params: Params, batch: Batch, config: Config, ws: Workspace) -> tuple[Array, float]:
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

    def convolution(self, k: int) -> tuple[Callable[..., tuple[Array, Any]], Callable[..., Any]]:
        """Forward and backward pass of layer k, counted from 1; that of one channel is always im2col."""
        return CONVOLUTIONS[self.conv if k > 1 else "im2col"]


class CNNCache(NamedTuple):
    convs: list[tuple[Any, Array, Array]]  # cache, output before and after pooling
    flat: Array
    hidden: Array


def cnn_init(rng: np.random.Generator, config: Config, net: CNN) -> Params:
    params: Params = {}
    side, C, dtype = config.image_size, 1, config.dtype
    for k, (K, n_out, stride, pool) in enumerate(net.convs, 1):
        params[f"conv{k}.w"] = gaussian(rng, dtype, math.sqrt(2 / (K * K * C)), K, K, C, n_out)
        params[f"conv{k}.b"] = np.zeros(n_out, dtype)
        side, C = ((side - K) // stride + 1) // (2 if pool else 1), n_out
    n_flat = side * side * C
    params["hidden.w"] = gaussian(rng, dtype, math.sqrt(2 / n_flat), n_flat, net.n_hidden)
    params["hidden.b"] = np.zeros(net.n_hidden, dtype)
    params["out.w"] = gaussian(rng, dtype, math.sqrt(1 / net.n_hidden), net.n_hidden, N_CLASSES)
    params["out.b"] = np.zeros(N_CLASSES, dtype)
    return params


def cnn_forward(params: Params, images: Array, net: CNN, ws: Workspace) -> tuple[Array, CNNCache]:
    """images (B, H, W) -> scores (J, B), before the sigmoid."""
    x, convs = batch_last(images, ws), []
    for k, layer in enumerate(net.convs, 1):
        forward, _ = net.convolution(k)
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
    loss, dscores = net.loss(scores, indicator(batch.labels, scores.dtype), n)
    dhidden = linear_backward(dscores, hidden, params["out.w"], grads["out.w"], grads["out.b"])
    relu_backward(dhidden, hidden)
    dflat = linear_backward(dhidden, flat, params["hidden.w"], grads["hidden.w"], grads["hidden.b"])
    dx = unflattened(dflat, convs[-1][-1].shape, ws)
    for k in range(len(convs), 0, -1):
        cache, y, out = convs[k - 1]
        dy = max_pool_backward(dx, y, out, ws, f"pool{k}") if net.convs[k - 1].pool else dx
        relu_backward(dy, y)
        _, backward = net.convolution(k)
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
    lr_factor: float = 1.0


def count_params(params: Params) -> int:
    return sum(p.size for p in params.values())


def capsnet_model(config: Config) -> Model:
    return Model(
        "capsnet",
        lambda rng: capsnet_init(rng, config),
        lambda params, batch, n, grads, ws: capsnet_loss_and_grads(params, batch, n, config, grads, ws),
        lambda params, batch, ws: capsnet_assess(params, batch, config, ws),
    )


def cnn_model(name: str, config: Config, convs: tuple[ConvLayer, ...], n_params: int, loss: Loss) -> Model:
    """A CNN with as many hidden units as bring it to ``n_params`` parameters."""
    one, two = (count_params(cnn_init(np.random.default_rng(0), config, CNN(convs, n))) for n in (1, 2))
    net = CNN(convs, max(1, 1 + round((n_params - one) / (two - one))), loss, config.conv)
    return Model(
        name,
        lambda rng: cnn_init(rng, config, net),
        lambda params, batch, n, grads, ws: cnn_loss_and_grads(params, batch, n, net, grads, ws),
        lambda params, batch, ws: (cnn_forward(params, batch.images, net, ws)[0].T, math.nan),
    )


def make_models(config: Config, cnn_loss: Loss = sigmoid_cross_entropy) -> dict[str, Model]:
    """The capsule network and its two baselines, by name, in the order of the result table."""
    capsnet = capsnet_model(config)
    n_params = count_params(capsnet.init_params(np.random.default_rng(0)))
    C = config.conv_channels
    trunk = (ConvLayer(KERNEL, C), ConvLayer(KERNEL, PRIMARY_SIZE * config.primary_types, stride=2))
    pooled = (ConvLayer(KERNEL, 2 * C, pool=True), ConvLayer(5, 2 * C, pool=True))  # [Sabour 2017, sec. 6]: 512, 256
    models = (
        capsnet,
        cnn_model("cnn", config, trunk, n_params, cnn_loss),
        cnn_model("cnn_pool", config, pooled, n_params, cnn_loss),
    )
    return {model.name: model for model in models}


# ----------------------------------------------------------------------------------------------------------------------
# Optimiser, evaluation, training loop
# ----------------------------------------------------------------------------------------------------------------------

ADAM_BLOCK = 1 << 18  # entries updated at a time: what a block needs stays in the cache


def places(params: Params) -> dict[str, slice]:
    """Where each is in one vector of all."""
    stops = np.cumsum([p.size for p in params.values()]).tolist()
    return {name: slice(stop - p.size, stop) for (name, p), stop in zip(params.items(), stops, strict=True)}


def pack(params: Params) -> tuple[Array, Params]:
    """The parameters one after the other in one vector, and views of it under their names."""
    flat = np.concatenate([p.ravel() for p in params.values()])
    return flat, {name: flat[place].reshape(params[name].shape) for name, place in places(params).items()}


class TrainState:
    """Everything that a half-trained model is."""

    def __init__(self, params: Params) -> None:
        self.flat, self.params = pack(params)
        self.m, self.v = np.zeros_like(self.flat), np.zeros_like(self.flat)  # of adam_step; muon_step has m alone
        self.step = 0
        self.seconds = 0.0
        self.sums: dict[str, float] = {}  # of the losses of the unfinished epoch
        self.history: dict[str, list[float]] = {}


def adam_step(
    p: Array, grads: list[Array], m: Array, v: Array, step: int, lr: float, beta1: float = 0.9, beta2: float = 0.999
) -> None:
    """Update the vectors p, m and v in place; the gradient is the sum of ``grads``, of which the first is overwritten.
    ``step`` counts from 1. [Kingma & Ba 2015, algorithm 1]

    m and v are kept without their factors 1 - beta. These and the bias corrections are in the step size and in eps.
    """
    root = math.sqrt((1 - beta2) / (1 - beta2**step))
    step_size, eps = lr * (1 - beta1) / (1 - beta1**step) / root, 1e-8 / root
    scratch = np.empty(min(ADAM_BLOCK, len(p)), p.dtype)
    for start in range(0, len(p), ADAM_BLOCK):
        block = slice(start, start + ADAM_BLOCK)
        p_b, g_b, m_b, v_b = p[block], grads[0][block], m[block], v[block]
        d = scratch[: len(p_b)]
        for other in grads[1:]:
            g_b += other[block]
        m_b *= beta1
        m_b += g_b
        v_b *= beta2
        v_b += np.multiply(g_b, g_b, out=d)
        np.sqrt(v_b, out=d)
        d += eps
        np.divide(m_b, d, out=d)
        d *= step_size
        p_b -= d


def flush_subnormals(moments: Array) -> None:
    """Set to 0, in place, what is so small that it does not matter. The moments of a unit that no example reaches any
    more decay until they are subnormal numbers, with which a processor takes a hundred times as long."""
    moments[np.abs(moments) < math.sqrt(np.finfo(moments.dtype).tiny)] = 0


FLUSH_EVERY = 100  # steps, in which moments that are not flushed cannot become subnormal

MUON_WEIGHTS = ("routing.w", "hidden.w", "primary.w", "conv2.w", "conv1.w")  # not the last layers, not the decoder
MUON_RMS = 0.2  # of the entries of an update, in learning rates; Adam's have about as much


def orthogonalised(a: Array) -> Array:
    """a (M, N) = U S V^T -> U V^T; singular values below a thousandth of the others' stay below 1."""
    if len(a) < a.shape[1]:
        return orthogonalised(a.T).T
    gram = a.T @ a
    if not np.isfinite(gram).all():
        return np.full_like(a, np.nan)  # eigh would raise
    squares, vectors = np.linalg.eigh(gram)  # S^2 and V
    floor = 1e-6 * squares.mean() + np.finfo(a.dtype).tiny
    return a @ (vectors / np.sqrt(np.maximum(squares, 0) + floor) @ vectors.T)


def as_matrix(w: Array, name: str) -> Array:
    """Weights (..., outputs), or those of the routing (J, P, I, D) -> (inputs, outputs), there (P*I, J*D)."""
    if name == "routing.w":
        J, P, I, D = w.shape
        return w.transpose(1, 2, 0, 3).reshape(P * I, J * D)
    return w.reshape(-1, w.shape[-1])


def from_matrix(matrix: Array, name: str, shape: tuple[int, ...]) -> Array:
    """The inverse of as_matrix."""
    if name == "routing.w":
        J, P, I, D = shape
        return matrix.reshape(P, I, J, D).transpose(2, 0, 1, 3)
    return matrix.reshape(shape)


def muon_step(w: Array, grads: list[Array], m: Array, lr: float, name: str, momentum: float = 0.95) -> None:
    """Update the weights w and the vector m of their momentum in place; the gradient is the sum of the vectors
    ``grads``, of which the first is overwritten.

    The direction is the momentum, a step ahead, as a matrix of inputs by outputs made orthogonal: what has small
    gradients is learned as fast as what has large ones. [K. Jordan et al., "Muon: an optimizer for hidden layers in
    neural networks", 2024, but by eigenvectors and not by Newton-Schulz; size of the step: J. Liu et al., "Muon is
    scalable for LLM training", 2025, sec. 2.2]
    """
    g = grads[0]
    for other in grads[1:]:
        g += other
    m *= momentum
    m += g
    g += momentum * m
    matrix = as_matrix(g.reshape(w.shape), name)
    step = orthogonalised(matrix)
    step *= lr * MUON_RMS * math.sqrt(max(matrix.shape))
    w -= from_matrix(step, name, w.shape)


class Crew:
    """Threads that share each step: each works on a part of the batch, then on a part of the parameters.

    numpy computes outside of Python's lock, so that threads do run at once; with BLAS at one thread (``single_blas``)
    all of a step is shared, not the matrix products alone. Numbers depend on how many threads there are, by rounding.
    """

    MIN_PART = 8  # examples that are worth a thread

    def __init__(self, n_threads: int = 1) -> None:
        self.n_threads = n_threads
        self.pool = ThreadPoolExecutor(n_threads) if n_threads > 1 else None
        self.workspaces: list[Workspace] = []
        self.grads: list[tuple[Array, Params]] = []

    def prepare(self, state: TrainState) -> None:
        """Make workspaces and gradients for this model."""
        self.workspaces = [Workspace(state.flat.dtype) for _ in range(self.n_threads)]
        self.grads = [pack(state.params) for _ in range(self.n_threads)]

    def share(self, work: Callable[[int], Any], n: int) -> list[Any]:
        """[work(0), ... work(n - 1)], at once."""
        return [work(k) for k in range(n)] if self.pool is None or n == 1 else list(self.pool.map(work, range(n)))

    def close(self) -> None:
        if self.pool:
            self.pool.shutdown()

    def gradients(self, model: Model, params: Params, batch: Batch) -> tuple[dict[str, float], list[Array]]:
        """Mean losses of the batch; gradient vectors that have yet to be added up."""
        B = len(batch.labels)
        n = min(self.n_threads, max(1, B // self.MIN_PART))

        def work(k: int) -> dict[str, float]:
            part = batch.part(B * k // n, B * (k + 1) // n)
            with np.errstate(all="ignore"):  # a loss that is not finite is reported in words
                return model.loss_and_grads(params, part, B, self.grads[k][1], self.workspaces[k])

        losses = self.share(work, n)
        return {name: sum(part[name] for part in losses) for name in losses[0]}, [g for g, _ in self.grads[:n]]

    def update(
        self, state: TrainState, grads: list[Array], lr: float, optimizer: str = "adam", weight_decay: float = 0.0
    ) -> None:
        """One step, in place. Weights, but not biases, first shrink by ``lr * weight_decay`` of themselves
        [Loshchilov & Hutter 2019, algorithm 2]."""
        state.step += 1
        if weight_decay:
            for name, w in state.params.items():
                if name.endswith(".w"):
                    w *= 1 - lr * weight_decay

        def adam(own: slice) -> None:
            adam_step(state.flat[own], [grad[own] for grad in grads], state.m[own], state.v[own], state.step, lr)

        def muon(name: str, own: slice) -> None:
            muon_step(state.params[name], [grad[own] for grad in grads], state.m[own], lr, name)

        jobs: list[Callable[[], None]] = []
        if optimizer == "muon":
            where = places(state.params)
            jobs += [partial(muon, name, where.pop(name)) for name in MUON_WEIGHTS if name in where]
            jobs += [partial(adam, own) for own in where.values()]
        else:
            n, size = self.n_threads, len(state.flat)
            jobs += [partial(adam, slice(size * k // n, size * (k + 1) // n)) for k in range(n)]

        def work(k: int) -> None:
            with np.errstate(all="ignore"):
                jobs[k]()

        self.share(work, len(jobs))
        if state.step % FLUSH_EVERY == 0:
            flush_subnormals(state.m)
            flush_subnormals(state.v)


@contextlib.contextmanager
def single_blas() -> Iterator[None]:
    """One BLAS thread: the crew has the others."""
    import threadpoolctl

    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield


def default_threads() -> int:
    n_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(4, n_cpus)


def top_labels(scores: Array, n_labels: int) -> Array:
    """scores (N, J) -> the classes (N, L) with the highest scores, highest first."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :n_labels]


def assess(model: Model, params: Params, batch: Batch, crew: Crew, part: int = 32) -> tuple[Array, float]:
    """Scores (N, J), and the squared error of all reconstructions from the true digits' capsules, NaN where a model has
    none. The crew must be prepared for the model."""
    N = len(batch.labels)
    scores = np.empty((N, N_CLASSES))
    errors = np.zeros(crew.n_threads)

    def work(k: int) -> None:
        for start in range(k * part, N, crew.n_threads * part):
            some = batch.part(start, start + part)
            with np.errstate(all="ignore"):
                scores[start : start + part], error = model.assess(params, some, crew.workspaces[k])
            errors[k] += error

    crew.share(work, crew.n_threads)
    return scores, float(errors.sum())


def evaluate(model: Model, params: Params, batch: Batch, crew: Crew, part: int = 32) -> dict[str, float]:
    """Test figures. ``set_accuracy``: both digits are the two highest scores. ``digit_accuracy``: share of digits that
    are among them. ``soft_accuracy``: at least one is. ``recon_mse``: a pixel's mean squared error, of reconstructions
    from the true digits' capsules. The crew must be prepared for the model."""
    L = batch.labels.shape[1]
    scores, error = assess(model, params, batch, crew, part)
    hits = (top_labels(scores, L)[:, :, None] == batch.labels[:, None]).sum(axis=(1, 2))
    figures = {
        "set_accuracy": float((hits == L).mean()),
        "soft_accuracy": float((hits > 0).mean()),
        "digit_accuracy": float(hits.mean() / L),
    }
    if not math.isnan(error):
        figures["recon_mse"] = error / batch.sources.size
    return figures


class Experiment(NamedTuple):
    """What the training loop and the checkpoints ask of an experiment; a script that builds on this one has its own."""

    name: str
    config: type[Config]
    make_models: Callable[[Any], dict[str, Model]]
    training_batch: Callable[[Any, Any, int], Batch]  # of data, config and step
    measure: Callable[[Model, TrainState, Any, Any, Crew, bool], None]  # what a step adds to the history; see below
    finished: Callable[[TrainState, Any], bool]  # before ``n_steps``
    headline: str  # of the history's entries


def measure(model: Model, state: TrainState, config: Config, data: Data, crew: Crew, epoch_ends: bool) -> None:
    """Called after every step; appends test figures to the history."""
    if epoch_ends:
        for name, figure in evaluate(model, state.params, data.test, crew).items():
            state.history.setdefault(name, []).append(figure)


MULTIMNIST = Experiment(
    EXPERIMENT, Config, make_models, training_batch, measure, lambda state, config: False, "set_accuracy"
)

Callback = Callable[[str, int, Params, dict[str, list[float]]], None]


def init_state(model: Model, config: Config) -> TrainState:
    """Fresh parameters; their draws depend on the seed and the model's name alone."""
    return TrainState(model.init_params(generator(config.seed, Stream.INIT, *model.name.encode())))


def train(
    model: Model,
    config: Config,
    data: Any,
    state: TrainState | None = None,
    callback: Callback | None = None,
    after_step: Callable[[TrainState, bool], None] | None = None,
    crew: Crew | None = None,
    experiment: Experiment = MULTIMNIST,
) -> tuple[Params, dict[str, list[float]]]:
    """Train to ``config.n_epochs`` and return (params, history); each list of the history has an entry per epoch.

    A given ``state`` is continued in place, from the middle of an epoch too. ``callback(model name, epochs done,
    params, history)`` is called before the first epoch and after each; ``after_step(state, epoch has ended)`` after
    every step, when the state is whole. Raises UserError where the loss stops being finite.
    """
    state, crew = state or init_state(model, config), crew or Crew()
    crew.prepare(state)
    if callback and state.step == 0:
        callback(model.name, 0, state.params, state.history)
    while state.step < config.n_steps and not experiment.finished(state, config):
        started = time.perf_counter()
        epoch, position = divmod(state.step, config.steps_per_epoch)
        losses, grads = crew.gradients(model, state.params, experiment.training_batch(data, config, state.step))
        if not math.isfinite(losses["train_loss"]):
            where = f"epoch {epoch + 1}, step {position + 1}"
            raise UserError(f"{model.name}: the loss became {losses['train_loss']} in {where}; try a smaller --lr")
        lr = config.lr_at(state.step) * model.lr_factor
        crew.update(state, grads, lr, config.optimizer, config.weight_decay)
        for name, loss in losses.items():
            state.sums[name] = state.sums.get(name, 0.0) + loss
        epoch_ends = position == config.steps_per_epoch - 1
        if epoch_ends:
            if not np.isfinite(state.flat).all():
                where = f"epoch {epoch + 1}, step {position + 1}"
                raise UserError(f"{model.name}: a parameter became infinite or NaN in {where}; try a smaller --lr")
            for name, total in state.sums.items():
                state.history.setdefault(name, []).append(total / config.steps_per_epoch)
            state.sums = {}
        experiment.measure(model, state, config, data, crew, epoch_ends)
        state.seconds += time.perf_counter() - started
        if after_step:
            after_step(state, epoch_ends)
        if callback and epoch_ends:
            callback(model.name, epoch + 1, state.params, state.history)
    return state.params, state.history


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints and results: files are written whole or not at all
# ----------------------------------------------------------------------------------------------------------------------


def temporary_path(path: Path) -> Path:
    """A name beside ``path``, hidden and of bounded length."""
    return path.with_name(f".{path.name[:50]}.{os.getpid()}.tmp")


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file beside ``path`` that takes its name once all is written. Raises UserError on failure."""
    temporary = temporary_path(path)
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def require_writable(path: Path) -> None:
    """Find out before a training, not after it, that a file cannot be written there. Makes the folder if need be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            mode = path.stat().st_mode  # fails too where the name is too long
            if not stat.S_ISREG(mode):
                kind = "a folder" if stat.S_ISDIR(mode) else "no regular file"
                raise UserError(f"cannot write {path}: it is {kind}")
        temporary = temporary_path(path)
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def save_checkpoint(
    path: Path, config: Config, states: dict[str, TrainState], experiment: Experiment = MULTIMNIST
) -> None:
    """One .npz file: the arrays of every model's TrainState, and the rest as JSON."""
    arrays: dict[str, Array] = {}
    scalars = {}
    for name, state in states.items():
        arrays |= {f"{name}/{key}": array for key, array in state.params.items()}
        arrays |= {f"{name}/adam_m": state.m, f"{name}/adam_v": state.v}
        scalars[name] = {k: getattr(state, k) for k in ("step", "seconds", "sums", "history")}
    header = {"experiment": experiment.name, "config": dataclasses.asdict(config), "models": scalars}
    with atomic_write(path) as stream:
        np.savez(stream, header=np.array(json.dumps(header)), **arrays)  # type: ignore[arg-type]


def load_checkpoint(path: Path, experiment: Experiment = MULTIMNIST) -> tuple[Any, dict[str, TrainState]]:
    """The inverse of save_checkpoint. Raises UserError where the file is missing, damaged, or of something else."""
    try:
        with path.open("rb") as opened:
            stored = np.load(opened, allow_pickle=False)
            if not isinstance(stored, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            header = json.loads(str(stored["header"]))
            if header["experiment"] != experiment.name:
                raise UserError(f"{path} is a checkpoint of {header['experiment']}, not of {experiment.name}")
            fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in header["config"].items()}
            config = experiment.config(**fields)
            states = {}
            for name, model in experiment.make_models(config).items():
                if name not in header["models"]:
                    continue
                state = TrainState(model.init_params(np.random.default_rng(0)))
                for key, target in {**state.params, "adam_m": state.m, "adam_v": state.v}.items():
                    array = stored[f"{name}/{key}"]
                    if array.shape != target.shape or array.dtype != target.dtype:
                        raise ValueError(f"its {key} does not fit this network")
                    target[...] = array
                for key in ("step", "seconds", "sums", "history"):
                    setattr(state, key, header["models"][name][key])
                states[name] = state
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {path}") from None
    except (OSError, ArithmeticError, AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError,
            zipfile.BadZipFile, zlib.error) as error:  # fmt: skip
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is not a readable checkpoint of {experiment.name}: {reason}") from error
    return config, states


def flag_of(field: str) -> str:
    """What a person writes, or could have written, to set a field of a Config."""
    others = {"image_size": "--canvas", "decoder": "--preset with the decoder"}
    return others.get(field, "--" + field.replace("_", "-"))


def first_difference(saved: Config, asked: Config, fields: Collection[str]) -> str | None:
    for field in dataclasses.fields(saved):
        old, new = getattr(saved, field.name), getattr(asked, field.name)
        if field.name in fields and old != new:
            return f"made with {flag_of(field.name)} {old}, not {new}"
    return None


def check_same(path: Path, saved: Config, asked: Config, given: Collection[str], free: Collection[str] = ()) -> None:
    """Where nothing is trained, a flag that was ``given`` must be the checkpoint's, or be ``free`` to differ."""
    fields = {*given, *(PRESETS["small"] if "preset" in given else ())} - {*free, "data_dir"}
    if difference := first_difference(saved, asked, fields):
        raise UserError(f"{path} was {difference}")


def some_states(path: Path, states: dict[str, TrainState], names: Collection[str]) -> dict[str, TrainState]:
    """Those of ``names``; UserError where there is none."""
    if not (found := {name: state for name, state in states.items() if name in names}):
        raise UserError(f"{path} holds {', '.join(states)}, and not {', '.join(names)}")
    return found


def check_resumable(path: Path, saved: Config, asked: Config) -> None:
    """A continued run must be the run that was begun; only one whose learning rate does not depend on its length may
    become longer."""
    free = {"data_dir"} | ({"n_epochs"} if saved.lr_schedule in ("constant", "exponential") else set())
    if difference := first_difference(saved, asked, {field.name for field in dataclasses.fields(saved)} - free):
        raise UserError(f"cannot resume {path}: it was {difference}")
    if asked.n_epochs < saved.n_epochs:
        raise UserError(f"cannot resume {path} for {asked.n_epochs} epochs: it was begun for {saved.n_epochs}")


def environment(n_threads: int) -> dict[str, Any]:
    """What the numbers of a run depend on beside its configuration."""
    import threadpoolctl

    blas = [lib for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "blas"]
    try:
        cpu_lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in cpu_lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"],
        cwd=Path(__file__).resolve().parent, capture_output=True, text=True, check=False,
    ) if shutil.which("git") else None  # fmt: skip
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": " ".join(
            f"{lib['internal_api']} {lib['version']} {lib.get('architecture', '')}" for lib in blas
        ).strip(),
        "threads": n_threads,
        "cpu": cpu,
        "n_cpus": os.cpu_count(),
        "git_commit": git.stdout.strip() or None if git else None,
    }


def save_result(path: Path, result: dict[str, Any]) -> None:
    with atomic_write(path) as stream:
        stream.write((json.dumps(result, indent=1) + "\n").encode())


# ----------------------------------------------------------------------------------------------------------------------
# A run from beginning to end
# ----------------------------------------------------------------------------------------------------------------------


class Interrupt:
    """Turns Ctrl-C into a flag that is looked at between steps, so that what is saved is whole. A second one stops at
    once."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interrupt:
        try:
            self._previous = signal.signal(signal.SIGINT, self._request)
        except ValueError:  # not in the main thread: Ctrl-C is somebody else's affair
            self._previous = None
        return self

    def _request(self, signum: int, frame: Any) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)


MODEL_NAMES = ("capsnet", "cnn", "cnn_pool")


def train_all(
    config: Config,
    data: Any,
    *,
    experiment: Experiment = MULTIMNIST,
    names: Sequence[str] = MODEL_NAMES,
    checkpoint: Path | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    quiet: bool = True,
    threads: int = 1,
    callback: Callback | None = None,
) -> dict[str, TrainState]:
    """Train the named models one after the other, and return them. The checkpoint keeps what others it holds.

    It is saved after every epoch, every ``checkpoint_every`` steps, and before KeyboardInterrupt on Ctrl-C.
    One that cannot be saved is reported and costs nothing: training goes on, and the next one may succeed.
    """
    states: dict[str, TrainState] = {}
    if checkpoint and resume:
        saved, states = load_checkpoint(checkpoint, experiment)
        check_resumable(checkpoint, saved, config)
    crew = Crew(threads)
    with single_blas(), contextlib.closing(crew), Interrupt() as interrupt:
        for name, model in experiment.make_models(config).items():
            if name not in names:
                continue
            state = states.setdefault(name, init_state(model, config))
            silent = quiet or not sys.stderr.isatty()
            total = config.n_steps
            with tqdm(total=total, initial=state.step, desc=name, unit="step", leave=False, disable=silent) as bar:

                def after_step(state: TrainState, epoch_ends: bool, bar: tqdm = bar) -> None:
                    bar.update()
                    if epoch_ends and not bar.disable:
                        accuracy, loss = (state.history[key][-1] for key in (experiment.headline, "train_loss"))
                        bar.set_postfix(loss=f"{loss:.3f}", accuracy=f"{accuracy:.3f}", refresh=False)
                    due = epoch_ends or (checkpoint_every and state.step % checkpoint_every == 0)
                    due = due or experiment.finished(state, config)
                    if checkpoint and (due or interrupt.requested):
                        try:
                            save_checkpoint(checkpoint, config, states, experiment)
                        except UserError as error:
                            tqdm.write(f"warning: {error}; training goes on", file=sys.stderr)
                    if interrupt.requested:
                        raise KeyboardInterrupt

                train(model, config, data, state, callback, after_step, crew, experiment)
    return {name: state for name, state in states.items() if name in names}


METRICS = ("set_accuracy", "soft_accuracy", "digit_accuracy", "recon_mse")


def make_result(config: Config, data_name: str, states: dict[str, TrainState], threads: int = 1) -> dict[str, Any]:
    """The JSON of a run; accuracies are fractions, those of the last epoch."""
    models = {}
    for name, state in states.items():
        models[name] = {
            "n_params": count_params(state.params),
            **{metric: state.history[metric][-1] for metric in METRICS if metric in state.history},
            "train_seconds": round(state.seconds, 3),
        }
    return {
        "experiment": EXPERIMENT,
        "seed": config.seed,
        "dataset": data_name,
        "config": dataclasses.asdict(config),
        "models": models,
        "history": {name: state.history for name, state in states.items()},
        "environment": environment(threads),
    }


def run(config: Config, *, threads: int = 1, **options: Any) -> dict[str, Any]:
    """Data, trainings, result. The options are those of ``train_all``."""
    data = make_data(config)
    config = resolve_auto(config, data.name)
    return make_result(config, data.name, train_all(config, data, threads=threads, **options), threads)


TEST_FIELDS = ("dataset", "data_dir", "seed", "n_test", "min_iou", "max_shift")


def evaluate_checkpoint(
    checkpoint: Path, asked: Config, given: Collection[str] = (), names: Collection[str] = MODEL_NAMES, threads: int = 1
) -> dict[str, Any]:
    """Test the named networks of a checkpoint on the test set of ``asked``; see ``check_same`` for ``given``."""
    saved, states = load_checkpoint(checkpoint)
    check_same(checkpoint, saved, asked, given, TEST_FIELDS)
    states = some_states(checkpoint, states, names)
    config = dataclasses.replace(saved, **{k: getattr(asked, k) for k in TEST_FIELDS})
    data = make_data(config)
    config = resolve_auto(config, data.name)
    crew = Crew(threads)
    with single_blas(), contextlib.closing(crew):
        for name, model in make_models(config).items():
            if name in states:
                state = states[name]
                crew.prepare(state)
                state.history = {k: [v] for k, v in evaluate(model, state.params, data.test, crew).items()}
    return make_result(config, data.name, states, threads) | {"trained_with_seed": saved.seed}


def describe(result: dict[str, Any]) -> str:
    """One line: on what the figures were measured."""
    config = result["config"]
    return (
        f"{result['dataset']}: {config['n_test']:,} composites, IoU at least {config['min_iou']:g};"
        f" seed {result['seed']}{training_seed(result)}, {config['n_epochs']} epochs of {config['n_train']:,}"
    )


def training_seed(result: dict[str, Any]) -> str:
    """What a line that names the seed says besides, where the training had another than the test set."""
    seed = result.get("trained_with_seed", result["seed"])
    return f" (trained with seed {seed})" if seed != result["seed"] else ""


def format_table(result: dict[str, Any]) -> str:
    """The result table."""
    lines = [f"{'model':<10} {'both':>6} {'one':>6} {'digits':>6} {'recon MSE':>9} {'parameters':>10} {'seconds':>8}"]
    for name, m in result["models"].items():
        mse = f"{m['recon_mse']:9.4f}" if "recon_mse" in m else " " * 9
        lines.append(
            f"{name:<10} {m['set_accuracy']:6.3f} {m['soft_accuracy']:6.3f} {m['digit_accuracy']:6.3f} {mse}"
            f" {m['n_params']:10,} {m['train_seconds']:8.1f}"
        )
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------------
# A person's own pictures
# ----------------------------------------------------------------------------------------------------------------------

INK_SIDE = 24  # pixels: one digit of MNIST has 20, two that are a few pixels apart have more


def read_picture(path: Path, config: Any, ink_side: int = INK_SIDE) -> Array:
    """A picture file -> (36, 36), or whatever ``config.image_size`` is, in [0, 1], ink bright.

    A bright background is taken for a picture with dark ink and inverted. A picture of 36x36 or 28x28 pixels is placed
    as it is; of any other the ink is cut out, scaled to a box of ``ink_side`` pixels and centred. Raises UserError
    where it cannot be read or has no ink.
    """
    from PIL import Image

    try:
        with Image.open(path) as opened:
            wide = opened.mode.startswith("I")  # 16 bits of grey
            narrow = Image.fromarray((np.asarray(opened).clip(0, 65535) // 257).astype(np.uint8)) if wide else opened
            rgba = narrow.convert("RGBA")
    except FileNotFoundError:
        raise UserError(f"there is no picture {path}") from None
    except Exception as error:  # Pillow's decoders raise many kinds on a damaged file: SyntaxError, struct.error, ...
        raise UserError(f"{path} is not a picture that can be read: {' '.join(str(error).split())}") from error
    # What is transparent becomes the opposite of the ink, so that black ink on nothing is seen as well.
    alpha, tone = (np.asarray(c, np.float32) / 255 for c in (rgba.getchannel("A"), rgba.convert("L")))
    paper = float((alpha * tone).sum() < 0.5 * alpha.sum())
    grey = alpha * tone + (1 - alpha) * paper
    border = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    ink = 1 - grey if np.median(border) > 0.5 else grey
    ink = np.maximum(0, ink - np.median(np.concatenate([ink[0], ink[-1], ink[:, 0], ink[:, -1]])))
    if ink.max() < 0.1:
        raise UserError(f"{path} has no ink that stands out from its background")
    side = config.image_size
    if ink.shape not in ((side, side), (DIGIT_SIDE, DIGIT_SIDE)):
        rows, columns = (np.flatnonzero((ink > 0.25 * ink.max()).any(axis=axis)) for axis in (1, 0))
        ink = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        scale = ink_side / max(ink.shape)
        resampling = Image.Resampling.BOX if scale < 1 else Image.Resampling.BILINEAR
        size = (max(1, round(ink.shape[1] * scale)), max(1, round(ink.shape[0] * scale)))
        ink = np.asarray(Image.fromarray(ink).resize(size, resampling))
    ink = np.clip(ink / ink.max(), 0, 1)
    top, left = ((side - n) // 2 for n in ink.shape)
    picture = np.zeros((side, side), config.dtype)
    picture[top : top + ink.shape[0], left : left + ink.shape[1]] = ink
    return picture


def picture_sheet(tiles: Array) -> bytes:
    """tiles (rows, columns, H, W) in [0, 1] -> a PNG of them, four times as large, between white lines."""
    import imageio.v3 as iio

    tiles = np.pad(tiles, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=1)
    sheet = tiles.transpose(0, 2, 1, 3).reshape(len(tiles) * tiles.shape[2], -1).repeat(4, axis=0).repeat(4, axis=1)
    return iio.imwrite("<bytes>", (255 * np.clip(sheet, 0, 1)).astype(np.uint8), extension=".png")


def predict(
    checkpoint: Path, paths: list[Path], out_png: Path, asked: Config | None = None, given: Collection[str] = ()
) -> str:
    """A table of the two longest capsules of each picture, and a PNG: a row each of the picture as the network gets it
    and what the two capsules draw. See ``check_same`` for ``asked`` and ``given``."""
    config, states = load_checkpoint(checkpoint)
    check_same(checkpoint, config, asked or config, given)
    if "capsnet" not in states:
        raise UserError(f"{checkpoint} has no capsule network")
    params, ws = states["capsnet"].params, Workspace(config.dtype)
    images = np.stack([read_picture(path, config) for path in paths])
    lengths, cache = capsnet_forward(params, images, config, ws)
    named = top_labels(lengths.T, 2)
    drawn = reconstruct(params, cache.v, named, ws)  # (B, 2, H, W)
    tiles = np.concatenate([images[:, None], drawn], axis=1)  # (B, 3, H, W)
    with atomic_write(out_png) as stream:
        stream.write(picture_sheet(tiles))
    width = max(len(str(path)) for path in paths)
    lines = [f"{'picture':<{width}} longest     second   lengths of 0 ... 9"]
    for path, two, length in zip(paths, named, lengths.T, strict=True):
        both = "    ".join(f"{j} ({length[j]:.2f})" for j in two)
        lines.append(f"{path!s:<{width}} {both}   " + " ".join(f"{x:.2f}" for x in length))
    return "\n".join([*lines, f"pictures and reconstructions: {out_png}"])


# ----------------------------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "small": {"conv_channels": 32, "primary_types": 8, "decoder": (256, 512)},
    "paper": {"conv_channels": 256, "primary_types": 32, "decoder": (512, 1024)},
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and not the whole usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help shows every flag)\n")


def whole_number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not between {low} and {high}")
        return value

    return parse


def number(low: float, high: float, *, above: bool = False) -> Callable[[str], float]:
    """``above``: low itself is not allowed."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= value <= high or (above and value == low):  # a NaN fails this too
            bounds = f"above {low:g} and at most {high:g}" if above else f"between {low:g} and {high:g}"
            raise argparse.ArgumentTypeError(f"{text} is not {bounds}")
        return value

    return parse


def non_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return text


def file_path(text: str) -> Path:
    return Path(non_empty(text))


def some_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
        return names

    return parse


def add_digit_arguments(data: argparse._ArgumentGroup, d: Config) -> None:
    data.add_argument(
        "--dataset", choices=("auto", "mnist", "strokes"), default=d.dataset,
        help="auto: MNIST if it is there or can be downloaded, else generated digits; default: %(default)s",
    )  # fmt: skip
    data.add_argument(
        "--data-dir", type=non_empty, metavar="DIR", help=f"folder of the four MNIST files; default: {CACHE_DIR}"
    )


def add_experiment_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that make up a Config; the scripts that draw figures have them too."""
    d = Config()
    data = parser.add_argument_group("data")
    add_digit_arguments(data, d)
    data.add_argument(
        "--n-train", type=whole_number(1, 10**8), metavar="N", default=d.n_train,
        help="composites an epoch, in whole batches; default: %(default)s",
    )  # fmt: skip
    data.add_argument(
        "--n-test", type=whole_number(1, 100_000), metavar="N", default=d.n_test,
        help="composites of test digits, the same for all models; default: %(default)s",
    )  # fmt: skip
    data.add_argument(
        "--min-iou", type=number(0, 1), metavar="X", default=d.min_iou,
        help="least intersection over union of the two 28x28 boxes; 0 is the paper's; default: %(default)s",
    )  # fmt: skip
    data.add_argument(
        "--pool", type=whole_number(0, 10**7), metavar="N", default=d.pool,
        help="train on N composites drawn once, and shuffled every time; default: fresh ones for every batch",
    )  # fmt: skip
    add_network_arguments(parser, d)


def add_network_arguments(parser: argparse.ArgumentParser, d: Config) -> None:
    """The flags of the networks and of their training, the same in every experiment that trains these."""
    model = parser.add_argument_group("capsules")
    model.add_argument(
        "--preset", choices=tuple(PRESETS), default="small",
        help="sizes of the network: 32 channels, 8 types, decoder 256-512; or the paper's 256, 32, 512-1024;"
        " default: %(default)s",
    )  # fmt: skip
    model.add_argument(
        "--conv-channels", type=whole_number(1, 1024), metavar="N", help="of conv1; default: the preset's"
    )
    model.add_argument(
        "--primary-types", type=whole_number(1, 256), metavar="N", help="of 8-D capsules; default: the preset's"
    )
    model.add_argument(
        "--routing-iters", type=whole_number(1, 20), metavar="N", default=d.routing_iters, help="default: %(default)s"
    )
    model.add_argument(
        "--routing-grad", choices=("exact", "stop"), default=d.routing_grad,
        help="gradient through all iterations, or through the last sum with couplings constant; default: %(default)s",
    )  # fmt: skip
    model.add_argument(
        "--recon-weight", type=number(0, 1000), metavar="X", default=d.recon_weight,
        help="of the squared error of reconstruction, beside the margin loss; default: %(default)s",
    )  # fmt: skip
    training = parser.add_argument_group("training")
    training.add_argument(
        "--seed", type=whole_number(0, 2**32 - 1), metavar="N", default=d.seed, help="default: %(default)s"
    )
    training.add_argument(
        "--n-epochs", type=whole_number(1, 100_000), metavar="N", default=d.n_epochs, help="default: %(default)s"
    )
    training.add_argument(
        "--batch-size", type=whole_number(1, 4096), metavar="N", default=d.batch_size, help="default: %(default)s"
    )
    training.add_argument(
        "--optimizer", choices=("adam", "muon"), default=d.optimizer,
        help="muon: steps of orthogonal matrices for convolutions, digit capsules and a CNN's hidden layer, Adam for"
        " the decoder and the rest; default: %(default)s",
    )  # fmt: skip
    training.add_argument(
        "--lr", type=number(0, 10, above=True), metavar="X", default=d.lr,
        help="learning rate; default: %(default)s",
    )  # fmt: skip
    training.add_argument(
        "--weight-decay", type=number(0, 100), metavar="X", default=d.weight_decay,
        help="a step shrinks every weight, but no bias, by lr * X; default: %(default)s",
    )  # fmt: skip
    training.add_argument(
        "--lr-schedule", choices=("constant", "linear", "cosine", "exponential"), default=d.lr_schedule,
        help="linear and cosine fall to 0, exponential by 4 %% every 2,000 steps; default: %(default)s",
    )  # fmt: skip
    training.add_argument(
        "--conv", choices=tuple(CONVOLUTIONS), default=d.conv,
        help="how convolutions of many channels are computed: the plain form, or a faster one; default: %(default)s",
    )  # fmt: skip
    training.add_argument("--dtype", choices=("float32", "float64"), default=d.dtype, help="default: %(default)s")
    training.add_argument(
        "--threads", type=whole_number(1, 256), metavar="N", default=default_threads(),
        help=f"each works on {Crew.MIN_PART} images of a batch or more; default: one for each processor, at most 4"
        " (here: %(default)s)",
    )  # fmt: skip


def config_fields(args: argparse.Namespace, *more: str) -> dict[str, Any]:
    """The preset, what the flags say instead of it, and the flags that every experiment has, and ``more``."""
    preset = PRESETS[args.preset]
    given = {k: v for k in ("conv_channels", "primary_types") if (v := getattr(args, k)) is not None}
    same = ("dataset", "data_dir", "seed", "n_epochs", "n_train", "n_test", "routing_iters", "routing_grad")
    also = ("recon_weight", "batch_size", "lr", "lr_schedule", "optimizer", "weight_decay", "dtype", "conv")
    return preset | given | {k: getattr(args, k) for k in (*same, *also, *more)}


def config_from_args(args: argparse.Namespace) -> Config:
    return Config(**config_fields(args, "pool", "min_iou"))


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        description="Train a capsule network and two CNNs to recognise two digits that lie over each other.",
        epilog="With no flags: eight epochs of 6,000 composites of MNIST digits, seed 0, three models.",
    )
    add_experiment_arguments(parser)
    parser.add_argument(
        "--models", type=some_of(MODEL_NAMES), metavar="A,B", default=MODEL_NAMES,
        help=f"which to train; default: {','.join(MODEL_NAMES)}",
    )  # fmt: skip
    add_file_arguments(parser)
    return parser


def add_file_arguments(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("files")
    files.add_argument(
        "--out-json", type=file_path, metavar="FILE", help="write the result, history and environment there"
    )
    files.add_argument(
        "--checkpoint", type=file_path, metavar="FILE",
        help="save after every epoch, and on Ctrl-C; without --resume an older file of that name is replaced",
    )  # fmt: skip
    files.add_argument(
        "--checkpoint-every", type=whole_number(1, 10**9), metavar="N", help="save every N steps as well"
    )
    files.add_argument(
        "--resume", action="store_true",
        help="continue from --checkpoint, to the same numbers bit for bit where --threads is the same",
    )  # fmt: skip
    files.add_argument(
        "--eval-only", action="store_true",
        help="no training: test the networks of --checkpoint on the test set that the data flags and the seed describe",
    )  # fmt: skip
    files.add_argument(
        "--predict", type=file_path, nargs="+", metavar="IMAGE",
        help="no training: name the digits in pictures with --checkpoint, and draw them one by one",
    )  # fmt: skip
    files.add_argument(
        "--predict-png", type=file_path, metavar="FILE", default=Path("prediction.png"),
        help="where --predict draws; default: %(default)s",
    )  # fmt: skip
    files.add_argument("--quiet", action="store_true", help="no progress bar")


def check_file_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the script with status 2 where they do not fit together."""
    for flag in ("predict", "eval_only", "resume", "checkpoint_every"):
        if getattr(args, flag) and not args.checkpoint:
            parser.error(f"argument --{flag.replace('_', '-')}: needs --checkpoint FILE")
    if args.predict and args.eval_only:
        parser.error("argument --predict: not together with --eval-only")
    for flag in ("resume", "checkpoint_every"):
        if (args.predict or args.eval_only) and getattr(args, flag):
            parser.error(f"argument --{flag.replace('_', '-')}: --predict and --eval-only do not train")
    if args.predict_png != parser.get_default("predict_png") and not args.predict:
        parser.error("argument --predict-png: needs --predict IMAGE")
    if args.predict and args.out_json:
        parser.error("argument --out-json: --predict has no result of this kind")
    if args.out_json and args.checkpoint and os.path.realpath(args.out_json) == os.path.realpath(args.checkpoint):
        parser.error("argument --out-json: is the same file as --checkpoint")
    for path in [args.checkpoint, *args.predict] if args.predict else []:
        if os.path.realpath(path) == os.path.realpath(args.predict_png):
            parser.error(f"argument --predict-png: would overwrite {path}")


def given_flags(parser: argparse.ArgumentParser, argv: list[str] | None) -> dict[str, Any]:
    """What stands on the command line, whatever the defaults are. Spoils the parser's defaults."""
    parser.set_defaults(**dict.fromkeys(vars(parser.parse_args([]))))
    return {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}


def exit_status(body: Callable[[], None]) -> int:
    """Run a script's body: 0, 1 with one line on stderr for a UserError, 130 after Ctrl-C."""
    try:
        body()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except MemoryError:
        print("error: out of memory; try a smaller --batch-size or --n-test", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    check_file_arguments(parser, args)
    if args.predict and "capsnet" not in args.models:
        parser.error("argument --models: --predict asks the capsule network")
    config, given = config_from_args(args), given_flags(make_parser(), argv)

    def body() -> None:
        if args.predict:
            require_writable(args.predict_png)
            print(predict(args.checkpoint, args.predict, args.predict_png, config, given))
            return
        for path in filter(None, (args.out_json, None if args.eval_only else args.checkpoint)):
            require_writable(path)
        if args.eval_only:
            result = evaluate_checkpoint(args.checkpoint, config, given, args.models, args.threads)
        else:
            result = run(
                config, threads=args.threads, names=args.models, checkpoint=args.checkpoint,
                checkpoint_every=args.checkpoint_every, resume=args.resume, quiet=args.quiet,
            )  # fmt: skip
        print(f"{describe(result)}\n{format_table(result)}")
        if args.out_json:
            save_result(args.out_json, result)

    return exit_status(body)


if __name__ == "__main__":
    sys.exit(main())
