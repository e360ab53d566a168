#!/usr/bin/env python3
"""MultiMNIST"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gzip
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

Array = np.ndarray
Params = dict[str, Array]

EXPERIMENT = "multimnist_capsnet"
N_CLASSES = 10
DIGIT_SIDE = 28
KERNEL = 9
PRIMARY_SIZE = 8
CLASS_SIZE = 16


class UserError(Exception):
    """Something that the person at the keyboard can put right; its message is one line."""


# ----------------------------------------------------------------------------------------------------------------------
# Configuration: what a person chooses, and nothing else
# ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    """One run."""

    dataset: str = "auto"
    data_dir: str | None = None
    seed: int = 0
    n_epochs: int = 8
    n_train: int = 6000
    n_test: int = 2000
    batch_size: int = 32
    lr: float = 2e-3
    lr_schedule: str = "constant"
    warmup_steps: int = 0
    max_shift: int = 4
    min_iou: float = 0.8
    pool: int = 0
    image_size: int = 36
    n_labels: int = 2
    conv_channels: int = 32
    primary_types: int = 8
    hidden: tuple[int, int] = (256, 512)
    routing_iters: int = 3
    routing_grad: str = "exact"
    recon_weight: float = 0.005
    routing_std: float = 0.1
    dtype: str = "float32"

    @property
    def primary_side(self) -> int:
        """Rows, and columns, of the grid of primary capsules."""
        return (self.image_size - 2 * KERNEL + 1) // 2 + 1

    @property
    def n_primary(self) -> int:
        return self.primary_side**2 * self.primary_types

    @property
    def steps_per_epoch(self) -> int:
        return max(1, self.n_train // self.batch_size)

    def lr_at(self, step: int) -> float:
        total = self.steps_per_epoch * self.n_epochs
        warm = min(1.0, (step + 1) / (self.warmup_steps + 1))
        if self.lr_schedule == "cosine":
            return self.lr * warm * max(0.01, 0.5 * (1 + math.cos(math.pi * step / total)))
        if self.lr_schedule == "linear":
            return self.lr * warm * max(0.01, 1 - step / total)
        if self.lr_schedule == "exponential":
            return self.lr * warm * 0.96 ** (step / 2000)
        return self.lr * warm


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
    """Single digits. `name` is what stands in tables, JSON and titles: "mnist", "strokes" or "custom"."""

    name: str
    train_images: Array  # (N, 28, 28) uint8, ink is 255
    train_labels: Array  # (N,) uint8, 0 to 9
    test_images: Array  # (M, 28, 28) uint8
    test_labels: Array  # (M,) uint8


# ------------------------------------------------------------------------------------------- 4.1 MNIST

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
    """Path of an intact `folder/<stem>.gz`, downloaded unless it is there and has the right SHA-256.

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
    return next((p for s in stems for p in (folder / f"{s}.gz", folder / s) if p.is_file()), None)


def load_mnist(
    data_dir: Path | None = None, cache_dir: Path | None = None, mirrors: Sequence[str] = MIRRORS
) -> Digits:
    """MNIST from `data_dir`, else from the cache, else from the mirrors into the cache.

    What lies in the cache folder itself was put there by a person: it is read, and when it is damaged it is
    named and left alone. Downloads live in its subfolder `downloaded`, which is ours: what is damaged there
    is fetched again. Intact files that are not the canonical MNIST are taken and called "custom".
    Raises UserError, or MnistUnavailableError when there is no file and no download.
    """
    if data_dir is not None and not data_dir.is_dir():
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


# ------------------------------------------------------------------------------------- 4.2 Stroke digits

# Several ways to write each digit, as points that the pen passes on a smooth curve: "xxyy" in percent of the
# writing box, y down. A point given twice is a corner, | lifts the pen, the number in front is the weight.
SKELETONS = {
    0: (
        "3: 5002 2515 1050 2585 5098 7585 9050 7515 5002",
        "2: 6205 3206 1240 1775 4098 7580 8545 6812 4004",
        "1: 6515 3508 1535 1575 4598 8075 8530 6006 4018",
        "1: 6515 4003 1540 2585 5598 8560 7515 5005 5025",
        "1: 3520 4003 1540 2585 5598 8560 7515 5008 2030",
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
    ),
    3: (
        "3: 1510 5002 8020 4548 4548 8570 5098 1088",
        "1: 1205 8003 8003 4542 4542 8565 6098 1090",
        "2: 1515 4502 7520 5545 3550 5550 8572 5098 1085",
        "1: 1510 4502 7018 4045 4045 8060 7590 4099 0590",
        "1: 1512 4003 7008 6028 4545 4545 7055 6585 3099",
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
    ),
}
PEN_STEPS = 72  # S, from one pen position to the next, for the whole of a skeleton
CATMULL_ROM = np.array([[0, 2, 0, 0], [-1, 0, 1, 0], [2, -5, 4, -1], [-1, 3, -3, 1]]) / 2  # (t power, point)


class Handwriting(NamedTuple):
    """How much digits vary: standard deviations, in units of the writing box unless said otherwise."""

    jitter: float = 0.07  # of each control point
    bend: float = 0.25  # of the coefficients of x², xy, y²: bows and tapers
    waves: int = 3  # sine waves that displace the path ...
    warp: float = 0.03  # ... by this much each
    slant: tuple[float, float] = (0.2, 0.25)  # mean and deviation of the shear to the right
    turn: float = 0.08  # radians
    aspect: float = 0.22  # of log(width / height)
    pen: tuple[float, float] = (1.3, 0.25)  # median radius in pixels, deviation of its log
    edge: tuple[float, float] = (1.2, 0.2)  # the same for the width of the soft edge
    shift: float = 0.3  # pixels


HANDWRITING = Handwriting()


class Skeletons(NamedTuple):
    """K skeletons as linear maps from control points (P, padded) to pen positions (S+1)."""

    upto: Array  # (K,) digit + share of the digit's writers up to this skeleton
    control: Array  # (K, P, 2)
    basis: Array  # (K, S+1, P) pen = basis @ control
    down: Array  # (K, S) 1 where the pen is down on this step, else 0


def compile_skeletons() -> Skeletons:
    """SKELETONS as Catmull-Rom splines through their points, cut into steps of even length."""
    digit = np.repeat(list(SKELETONS), [len(ways) for ways in SKELETONS.values()])  # (K,)
    entries = [entry.split(":") for ways in SKELETONS.values() for entry in ways]
    K, P = len(entries), max(len(text.replace("|", " ").split()) for _, text in entries)
    share = np.array([float(weight) for weight, _ in entries])
    total = np.bincount(digit, share)  # (10,)
    upto = digit + (np.cumsum(share) - (np.cumsum(total) - total)[digit]) / total[digit]

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


def stroke_digits(
    rng: np.random.Generator, n: int, hand: Handwriting = HANDWRITING, chunk: int = 250
) -> tuple[Array, Array]:
    """Write n digits, the classes as even as n allows, in random order.

    Returns images (n, 28, 28) uint8, prepared as MNIST's are (ink in a box of 20 pixels, centred by mass),
    and labels (n,) uint8. Memory beyond the result is that of one chunk.
    """
    skeletons = compile_skeletons()
    labels = rng.permutation(np.arange(n) % 10).astype(np.uint8)
    images = np.empty((n, 28, 28), np.uint8)
    for start in range(0, n, chunk):
        images[start : start + chunk] = _write(rng, skeletons, labels[start : start + chunk], hand)
    return images, labels


def _write(rng: np.random.Generator, skeletons: Skeletons, labels: Array, hand: Handwriting) -> Array:
    """One image (B, 28, 28) uint8 for each of the labels (B,)."""
    B = len(labels)

    def normal(*shape: int) -> Array:
        return rng.standard_normal((B, *shape), np.float32)

    # The pen's path: jittered control points, then bows and tapers, then long waves.
    k = np.searchsorted(skeletons.upto, labels + rng.random(B), side="right")
    control = skeletons.control[k] - 0.5  # (B, P, 2)
    control += hand.jitter * normal(*control.shape[1:])
    pen = skeletons.basis[k] @ control  # (B, S+1, 2)
    x, y = pen[..., :1], pen[..., 1:]
    pen = pen + np.concatenate((x * x, x * y, y * y), axis=2) @ (hand.bend * normal(3, 2))
    pen += np.sin(pen @ (2.5 * normal(2, hand.waves)) + 3 * normal(1, hand.waves)) @ (
        hand.warp * normal(hand.waves, 2)
    )

    # Slant, aspect ratio and rotation, one matrix a digit.
    slant, aspect = hand.slant[0] + hand.slant[1] * normal(), np.exp(hand.aspect * normal())
    turn = hand.turn * normal()
    cos, sin = np.cos(turn), np.sin(turn)
    affine = np.stack((aspect * cos, aspect * sin, -slant * cos - sin, cos - slant * sin), axis=1)
    pen = pen @ affine.reshape(B, 2, 2)

    # Into the box of 20 pixels, the centre of mass to where MNIST has it.
    radius = hand.pen[0] * np.exp(hand.pen[1] * normal(1))  # (B, 1) pixels
    pen *= ((20 - 2 * radius) / np.ptp(pen, axis=1).max(axis=1, keepdims=True))[..., None]
    step = np.diff(pen, axis=1)
    ink = np.sqrt(np.sum(step * step, axis=2)) * skeletons.down[k]  # (B, S) pixels of line
    pen = pen[:, :-1] + step / 2  # (B, S, 2) the steps' middles
    centre = np.matmul(ink[:, None], pen) / ink.sum(axis=1)[:, None, None]  # (B, 1, 2)
    low, high = pen.min(axis=1, keepdims=True), pen.max(axis=1, keepdims=True)
    margin = radius[..., None] + 2  # so that no ink leaves the image
    pen += np.clip(14.5 - centre + hand.shift * normal(1, 2), margin - low, 28 - margin - high)

    # The line integral of a Gaussian along the path is exp(-d²/2σ²) at distance d from a line. Solved for d,
    # which is held against the radius, it gives grey values; strokes that run close flow together as ink does.
    sigma = 0.7 * radius  # (B, 1)
    z = (pen[..., None] - (np.arange(28, dtype=np.float32) + 0.5)) / sigma[..., None, None]
    blur = np.exp(-0.5 * z * z)  # (B, S, 2, 28)
    ink /= np.sqrt(2 * np.pi) * sigma
    line = np.matmul((blur[:, :, 1] * ink[..., None]).transpose(0, 2, 1), blur[:, :, 0])  # (B, 28, 28)
    d = sigma[..., None] * np.sqrt(-2 * np.log(np.clip(line, 1e-9, 1)))
    edge = hand.edge[0] * np.exp(hand.edge[1] * normal(1, 1))
    return (255 * np.clip(0.5 + (radius[..., None] - d) / edge, 0, 1)).astype(np.uint8)


# -------------------------------------------------------------------------------- 4.3 Choice of the data set


def resolve_dataset(
    choice: str,
    rng: np.random.Generator,
    data_dir: Path | None = None,
    stroke_counts: tuple[int, int] = (20_000, 5_000),
    cache_dir: Path | None = None,
    mirrors: Sequence[str] = MIRRORS,
) -> Digits:
    """The digits that `--dataset` asks for: "mnist", "strokes", or "auto".

    "auto" is MNIST where it can be had, else strokes with a warning on stderr. A damaged file and a wrong
    --data-dir raise UserError even then: what a person asked for is never swapped for something else.
    `rng` draws the stroke digits (training and test set from separate streams) and nothing else.
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
# Data, 2: overlays of two digits
# ----------------------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Composites, the classes in them, and each digit alone. Intensities are 0 to 1."""

    images: Array  # (B, H, W)
    labels: Array  # (B, L)
    sources: Array  # (B, L, H, W)

    def part(self, start: int, stop: int) -> Batch:
        return Batch(*(a[start:stop] for a in self))


def admissible_shifts(max_shift: int, min_iou: float) -> Array:
    """All pairs of shifts (n, 2, 2) whose shifted 28x28 boxes overlap by at least ``min_iou``; [pair, digit, axis]."""
    s = np.arange(-max_shift, max_shift + 1)
    pairs = np.stack(np.meshgrid(s, s, s, s, indexing="ij"), axis=-1).reshape(-1, 2, 2)
    common = np.prod(DIGIT_SIDE - np.abs(pairs[:, 0] - pairs[:, 1]), axis=1)
    return pairs[common / (2 * DIGIT_SIDE**2 - common) >= min_iou]


class Overlay:
    """Draws composites from single digits, for one split."""

    def __init__(self, images: Array, labels: Array, config: Config) -> None:
        order = np.argsort(labels, kind="stable")
        self.images, self.labels = images[order], labels[order].astype(np.intp)
        self.first = np.searchsorted(self.labels, np.arange(N_CLASSES + 1))  # of each class, in self.images
        self.shifts = admissible_shifts(config.max_shift, config.min_iou)
        self.max_shift, self.side, self.dtype = config.max_shift, config.image_size, np.dtype(config.dtype)

    def draw(self, rng: np.random.Generator, n: int) -> Batch:
        N = len(self.labels)
        a = rng.integers(N, size=n)
        first, last = self.first[self.labels[a]], self.first[self.labels[a] + 1]
        b = rng.integers(N - (last - first))  # among the digits of all other classes
        b += np.where(b >= first, last - first, 0)
        which = np.stack([a, b], axis=1)  # (n, 2)
        shift = self.shifts[rng.integers(len(self.shifts), size=n)]  # (n, 2, 2)

        m = self.max_shift
        margin = (self.side - DIGIT_SIDE) // 2
        padded = np.zeros((n, 2, self.side + 2 * m, self.side + 2 * m), np.uint8)
        padded[:, :, m + margin : m + margin + DIGIT_SIDE, m + margin : m + margin + DIGIT_SIDE] = self.images[which]
        windows = np.lib.stride_tricks.sliding_window_view(padded, (self.side, self.side), axis=(2, 3))
        start = m - shift
        each, digit = np.arange(n)[:, None], np.arange(2)
        sources = windows[each, digit, start[..., 0], start[..., 1]] * self.dtype.type(1 / 255)  # (n, 2, H, W)
        return Batch(sources.max(axis=1), self.labels[which], sources)


# ----------------------------------------------------------------------------------------------------------------------
# Primitive pairs
# ----------------------------------------------------------------------------------------------------------------------
# Inside the networks the batch is the last axis and the image row the first: an image tensor is (H, C, W, B), a capsule
# tensor (P, I, B). Every product below then has contiguous operands.


class Workspace:
    """Arrays that one training step leaves to the next: `ws("conv1.out", 28, 32, 28, B)`.

    A large array allocated anew costs its page faults every time; here it is allocated once and overwritten. What a
    forward pass returns therefore holds until the next forward pass with the same workspace.
    """

    def __init__(self, dtype: np.dtype | type = np.float32) -> None:
        self.dtype = np.dtype(dtype)
        self._arrays: dict[str, Array] = {}

    def __call__(self, name: str, *shape: int) -> Array:
        array = self._arrays.get(name)
        if array is None or array.shape != shape:
            array = self._arrays[name] = np.empty(shape, self.dtype)
        return array


class ConvCache(NamedTuple):
    rows: Array  # (Ho, K*K*C, Wo*B), a view: consecutive items overlap
    w: Array  # (K, K, C, C')
    in_shape: tuple[int, int, int, int]  # (H, C, W, B)
    stride: int


def conv2d_forward(x: Array, w: Array, b: Array, stride: int, ws: Workspace, name: str) -> tuple[Array, ConvCache]:
    """Valid convolution. x (H, C, W, B), w (K, K, C, C'), b (C') -> (Ho, C', Wo, B).

    Only the columns of the image are unfolded, which makes it K / stride times as large, not (K / stride)² times. The K
    rows that an output row sees then lie next to each other: its matrix is a view, and output rows share memory.
    """
    H, C, W, B = x.shape
    K, n_out = w.shape[0], w.shape[-1]
    Ho, Wo = (H - K) // stride + 1, (W - K) // stride + 1
    cols = ws(name + ".cols", H, K, C, Wo, B)
    for k in range(K):
        cols[:, k] = x[:, :, k : k + stride * (Wo - 1) + 1 : stride]
    row = cols.strides[0]
    rows = np.lib.stride_tricks.as_strided(
        cols, (Ho, K * K * C, Wo * B), (stride * row, row // (K * C), cols.itemsize), writeable=False
    )
    out = ws(name + ".out", Ho, n_out, Wo, B)
    flat = out.reshape(Ho, n_out, Wo * B)
    np.matmul(w.reshape(-1, n_out).T, rows, out=flat)
    flat += b[:, None]
    return out, ConvCache(rows, w, x.shape, stride)


def conv2d_backward(
    dout: Array, cache: ConvCache, dw: Array, db: Array, ws: Workspace, name: str, need_dx: bool = True
) -> Array | None:
    """dout (Ho, C', Wo, B) -> dx (H, C, W, B); dw and db are written in place."""
    rows, w, (H, C, W, B), s = cache
    Ho, n_out, Wo, _ = dout.shape
    K = w.shape[0]
    flat = dout.reshape(Ho, n_out, Wo * B)
    # out = w.T @ rows + b
    np.sum(flat, axis=(0, 2), out=db)
    dw2 = dw.reshape(-1, n_out)
    term = ws(name + ".dw_term", *dw2.shape)
    np.matmul(rows[0], flat[0].T, out=dw2)
    for ho in range(1, Ho):
        dw2 += np.matmul(rows[ho], flat[ho].T, out=term)
    if not need_dx:
        return None

    # Input row h was read by the output rows ho with h = s*ho + kh, 0 <= kh < K. They are neighbours, so the gradient of
    # that row is one product: the kernel rows kh = h mod s, + s, + 2s ... in falling order times a block of dout.
    w_rows = [  # per h mod s: (K*C, n_kh*C')
        np.ascontiguousarray(w[phase::s][::-1].transpose(1, 2, 0, 3)).reshape(K * C, -1) for phase in range(s)
    ]
    dx = ws(name + ".dx", H, C, W, B)
    dcols = ws(name + ".dcols", K, C, Wo, B)
    fold = ws(name + ".fold", s, C, -(-W // s), B)  # dx of one row, its columns sorted by w mod s
    for h in range(H):
        first, last = max(0, -((K - 1 - h) // s)), min(Ho - 1, h // s)  # output rows, ends included
        fold[...] = 0
        if last >= first:
            w_row = w_rows[h % s]
            skip = w_row.shape[1] // n_out - 1 - (h - s * first) // s
            w_row = w_row[:, skip * n_out : (skip + last - first + 1) * n_out]
            np.matmul(w_row, flat[first : last + 1].reshape(-1, Wo * B), out=dcols.reshape(K * C, -1))
            for k in range(K):  # cols[:, k] = x[:, :, k : k + s * (Wo - 1) + 1 : s]
                fold[k % s][:, k // s : k // s + Wo] += dcols[k]
        for phase in range(s):
            dx[h][:, phase::s] = fold[phase][:, : len(range(phase, W, s))]
    return dx


def relu_forward(x: Array) -> Array:
    """In place: the output is the only thing the backward pass needs."""
    return np.maximum(x, 0, out=x)


def relu_backward(dout: Array, out: Array) -> Array:
    """In place."""
    dout *= out > 0
    return dout


SQUASH_EPS = 1e-9  # keeps the norm's derivative finite for a capsule that is exactly zero


class SquashCache(NamedTuple):
    s: Array
    q: Array  # |s|² + eps
    axis: int


def squash_forward(s: Array, axis: int, out: Array | None = None) -> tuple[Array, SquashCache]:
    """v = |s|² / (1 + |s|²) * s / |s| along `axis` [Sabour 2017, eq. 1]."""
    q = np.square(s).sum(axis, keepdims=True)
    q += SQUASH_EPS
    return np.multiply(s, np.sqrt(q) / (1 + q), out=out), SquashCache(s, q, axis)


def squash_backward(dv: Array, cache: SquashCache, out: Array | None = None) -> Array:
    """v = f s with f = sqrt(q) / (1 + q): ds = f dv + 2 f'(q) (s . dv) s."""
    s, q, axis = cache
    root = np.sqrt(q)
    ds = np.multiply(s, dv, out=out)
    along = ds.sum(axis, keepdims=True) * ((1 - q) / (root * (1 + q) ** 2))
    np.multiply(s, along, out=ds)
    ds += dv * (root / (1 + q))
    return ds


def softmax_over_parents(b: Array, out: Array) -> Array:
    """b (J, I, B) -> couplings of the same shape that sum to 1 over the J parents of each lower capsule."""
    np.subtract(b, b.max(0), out=out)
    np.exp(out, out=out)
    out /= out.sum(0)
    return out


def softmax_backward(dc: Array, c: Array) -> Array:
    """In place: db = c (dc - sum_j c dc)."""
    dc -= np.einsum("jib,jib->ib", c, dc)
    dc *= c
    return dc


# ---------------------------------------------------------------------------------------------- 5. Dynamic routing
# The vote of lower capsule i for parent j is u_hat[j, d, i] = sum_p w[j, p, i, d] u[p, i]. The votes of a batch are the
# largest array of the network, and nothing needs them one by one. Routing only ever asks two questions:
#   weighted_sum   s[j, d] = sum_i c[j, i] u_hat[j, d, i] = sum_pi w[j, pi, d] (c[j, i] u[p, i])
#   agreement      a[j, i] = sum_d v[j, d] u_hat[j, d, i] = sum_p u[p, i] (sum_d w[j, pi, d] v[j, d])
# Each is one matrix product per parent, with the P numbers of a lower capsule in place of the D numbers of a vote.


class RoutingCache(NamedTuple):
    u: Array  # (P, I, B)
    w: Array  # (J, P, I, D)
    c: list[Array]  # per iteration: couplings (J, I, B)
    squashes: list[list[SquashCache]]  # per iteration and parent
    v: list[Array]  # per iteration: (J, D, B)


def routing_forward(u: Array, w: Array, n_iters: int, ws: Workspace) -> tuple[Array, RoutingCache]:
    """Dynamic routing [Sabour 2017, procedure 1]. u (P, I, B), w (J, P, I, D) -> v (J, D, B).

    Between two softmaxes the parents do not know of each other, so one is done with before the next: its weights and
    the products stay in the processor's cache.
    """
    J, P, I, D = w.shape
    B = u.shape[-1]
    cache = RoutingCache(u, w, [], [], [])
    x, s_p, a = ws("routing.x", P, I, B), ws("routing.s_p", P, D, B), ws("routing.a", I, B)
    b = ws("routing.b", J, I, B)
    b[...] = 0
    for t in range(n_iters):
        c, v = ws(f"routing.c{t}", J, I, B), ws(f"routing.v{t}", J, D, B)
        if t == 0:
            c[...] = 1 / J
        else:
            softmax_over_parents(b, c)
        squashes = []
        for j in range(J):
            if t == 0:
                np.matmul(w[j].transpose(0, 2, 1), u, out=s_p)
                s_p *= 1 / J
            else:
                np.multiply(c[j], u, out=x)
                np.matmul(w[j].transpose(0, 2, 1), x, out=s_p)
            _, squash = squash_forward(s_p.sum(0), 0, v[j])  # (D, B)
            squashes.append(squash)
            if t < n_iters - 1:  # the agreement sum_d v u_hat
                np.matmul(w[j], v[j], out=x)
                b[j] += np.einsum("pib,pib->ib", x, u, out=a)
        cache.c.append(c)
        cache.squashes.append(squashes)
        cache.v.append(v)
    return v, cache


def routing_backward(dv: Array, cache: RoutingCache, policy: str, dw: Array, ws: Workspace) -> Array:
    """dv (J, D, B) -> du (P, I, B); dw (J, P, I, D) is written in place.

    policy "stop": the couplings are constants, only the last iteration's sum is differentiated.
    policy "exact": the gradient of what the forward pass computes, through softmax, agreement and squash of every
    iteration. The gradient of the votes is a sum of rank-one terms,
        du_hat[j, d, i] = sum_t c_t[j, i] ds_t[j, d] + db_t+1[j, i] v_t[j, d],
    and is only ever used in this factored form.
    """
    u, w, c, squashes, v = cache
    J, P, I, D = w.shape
    B = u.shape[-1]
    du, x, dw_term = ws("routing.du", P, I, B), ws("routing.x", P, I, B), ws("routing.dw_term", P, I, D)
    db, dc, dv_p = ws("routing.db", J, I, B), ws("routing.dc", J, I, B), ws("routing.s_p", P, D, B)
    du[...] = db[...] = 0
    last = len(v) - 1
    first = 0 if policy == "exact" else last
    for t in range(last, first - 1, -1):
        for j in range(J):
            dv_j = dv[j]
            if t < last:  # a = sum_d v u_hat
                np.multiply(db[j], u, out=x)
                dw[j] += np.matmul(x, np.ascontiguousarray(v[t][j].T), out=dw_term)
                np.matmul(w[j].transpose(0, 2, 1), x, out=dv_p)
                dv_j = dv_p.sum(0)
                np.matmul(w[j], v[t][j], out=x)
                x *= db[j]
                du += x
            ds = squash_backward(dv_j, squashes[t][j])  # (D, B)
            ds_t = np.ascontiguousarray(ds.T)
            if t == 0:  # s = sum_i u_hat / J
                ds_t /= J
                ds /= J
                if t == last:
                    np.matmul(u, ds_t, out=dw[j])
                else:
                    dw[j] += np.matmul(u, ds_t, out=dw_term)
                du += np.matmul(w[j], ds, out=x)
                continue
            np.multiply(c[t][j], u, out=x)  # s = sum_i c u_hat
            if t == last:
                np.matmul(x, ds_t, out=dw[j])
            else:
                dw[j] += np.matmul(x, ds_t, out=dw_term)
            np.matmul(w[j], ds, out=x)
            if t > first:
                np.einsum("pib,pib->ib", x, u, out=dc[j])
            x *= c[t][j]
            du += x
        if t > first:
            db += softmax_backward(dc, c[t])  # c_t = softmax(b_t), b_t = b_t-1 + a_t-1
    return du


# ------------------------------------------------------------------------------------------------------- 6. Dense, losses


def dense_forward(x: Array, w: Array, b: Array, out: Array) -> Array:
    """x (N, B), w (N, M), b (M) -> out (M, B)."""
    np.matmul(w.T, x, out=out)
    out += b[:, None]
    return out


def dense_backward(dout: Array, x: Array, w: Array, dw: Array, db: Array) -> Array:
    """dout (M, B) -> dx (N, B); dw and db are written in place."""
    np.matmul(x, dout.T, out=dw)
    np.sum(dout, axis=1, out=db)
    return w @ dout


def sigmoid(x: Array) -> Array:
    """In place. tanh neither overflows nor needs a case distinction."""
    x *= 0.5
    np.tanh(x, out=x)
    x += 1
    x *= 0.5
    return x


def margin_loss(lengths: Array, positive: Array, n: int) -> tuple[float, Array]:
    """[Sabour 2017, eq. 4] summed over the classes, mean of n examples. lengths and positive (0 or 1) (J, B)."""
    present = np.maximum(0, M_PLUS - lengths) * positive
    absent = np.maximum(0, lengths - M_MINUS) * (1 - positive)
    loss = float((present**2).sum() + DOWN_WEIGHT * (absent**2).sum()) / n
    return loss, (2 / n) * (DOWN_WEIGHT * absent - present)


M_PLUS, M_MINUS, DOWN_WEIGHT = 0.9, 0.1, 0.5


def squared_error(out: Array, target: Array, weight: float, n: int) -> tuple[float, Array]:
    """Sum of squared differences, mean of n examples; the gradient carries ``weight``."""
    difference = out - target
    loss = float(np.vdot(difference, difference)) / n
    difference *= 2 * weight / n
    return loss, difference


# ----------------------------------------------------------------------------------------------------------------------
# Models
# ----------------------------------------------------------------------------------------------------------------------


class CapsNetOutput(NamedTuple):
    lengths: Array  # (J, B)
    v: Array  # (J, D, B)
    routing: RoutingCache
    squash: SquashCache
    primary: ConvCache
    h1: Array
    conv1: ConvCache


def he_normal(rng: np.random.Generator, dtype: str, gain: float, fan_in: int, *shape: int) -> Array:
    return (rng.standard_normal(shape) * math.sqrt(gain / fan_in)).astype(dtype)


def capsnet_init(rng: np.random.Generator, config: Config) -> Params:
    C, T, J, D, P = config.conv_channels, config.primary_types, N_CLASSES, CLASS_SIZE, PRIMARY_SIZE
    dtype = config.dtype
    sizes = (J * D, *config.hidden, config.image_size**2)
    params = {
        "conv1.w": he_normal(rng, dtype, 2, KERNEL**2, KERNEL, KERNEL, 1, C),
        "conv1.b": np.zeros(C, dtype),
        "primary.w": he_normal(rng, dtype, 1, KERNEL**2 * C, KERNEL, KERNEL, C, P * T),
        "primary.b": np.zeros(P * T, dtype),
        "routing.w": he_normal(rng, dtype, config.routing_std**2, 1, J, P, config.n_primary, D),
    }
    for k in (1, 2, 3):
        n_in, n_out = sizes[k - 1], sizes[k]
        # One capsule of the first layer's input is not masked.
        params[f"fc{k}.w"] = he_normal(rng, dtype, 1 if k == 3 else 2, D if k == 1 else n_in, n_in, n_out)
        params[f"fc{k}.b"] = np.zeros(n_out, dtype)
    return params


def batch_last(images: Array, ws: Workspace) -> Array:
    """(B, H, W) -> (H, 1, W, B)."""
    B, H, W = images.shape
    x = ws("images", H, 1, W, B)
    x[:, 0] = images.transpose(1, 2, 0)
    return x


def capsnet_forward(params: Params, images: Array, config: Config, ws: Workspace) -> CapsNetOutput:
    P, side = PRIMARY_SIZE, config.primary_side
    x = batch_last(images, ws)
    h1, conv1 = conv2d_forward(x, params["conv1.w"], params["conv1.b"], 1, ws, "conv1")
    relu_forward(h1)
    h2, primary = conv2d_forward(h1, params["primary.w"], params["primary.b"], 2, ws, "primary")
    s = ws("primary.s", P, config.n_primary, len(images))
    s.reshape(P, side, -1)[...] = h2.reshape(side, P, -1).transpose(1, 0, 2)
    u, squash = squash_forward(s, 0, ws("primary.u", *s.shape))
    v, routing = routing_forward(u, params["routing.w"], config.routing_iters, ws)
    lengths = np.sqrt(np.square(v).sum(1) + SQUASH_EPS)  # (J, B)
    return CapsNetOutput(lengths, v, routing, squash, primary, h1, conv1)


def mask_capsules(v: Array, labels: Array, ws: Workspace) -> Array:
    """v (J, D, B), labels (B, L) -> (J*D, L*B): all but one capsule of each column are zero."""
    (J, D, B), L = v.shape, labels.shape[1]
    masked = ws("masked", J, D, L, B)
    masked[...] = 0
    each = np.arange(B)
    for l in range(L):
        masked[labels[:, l], :, l, each] = v[labels[:, l], :, each]
    return masked.reshape(J * D, L * B)


def decoder_forward(params: Params, masked: Array, ws: Workspace) -> tuple[Array, list[Array]]:
    """masked (J*D, N) -> images (H*W, N), inputs of the three layers."""
    inputs = [masked]
    for k in (1, 2, 3):
        w, b = params[f"fc{k}.w"], params[f"fc{k}.b"]
        out = dense_forward(inputs[-1], w, b, ws(f"fc{k}", w.shape[1], masked.shape[1]))
        inputs.append(relu_forward(out) if k < 3 else sigmoid(out))
    return inputs.pop(), inputs


def decoder_backward(dout: Array, out: Array, inputs: list[Array], params: Params, grads: Params) -> Array:
    dx = dout
    dx *= out * (1 - out)
    for k in (3, 2, 1):
        dx = dense_backward(dx, inputs[k - 1], params[f"fc{k}.w"], grads[f"fc{k}.w"], grads[f"fc{k}.b"])
        if k > 1:
            relu_backward(dx, inputs[k - 1])
    return dx


def one_hot(labels: Array, dtype: np.dtype) -> Array:
    """(B, L) -> (J, B)."""
    positive = np.zeros((N_CLASSES, len(labels)), dtype)
    positive[labels.T, np.arange(len(labels))] = 1
    return positive


def capsnet_loss_and_grads(
    params: Params, batch: Batch, n: int, config: Config, grads: Params, ws: Workspace
) -> dict[str, float]:
    (B, L), P, side = batch.labels.shape, PRIMARY_SIZE, config.primary_side
    out = capsnet_forward(params, batch.images, config, ws)
    margin, dlengths = margin_loss(out.lengths, one_hot(batch.labels, out.v.dtype), n)
    dv = out.v * (dlengths / out.lengths)[:, None]

    masked = mask_capsules(out.v, batch.labels, ws)
    picture, inputs = decoder_forward(params, masked, ws)
    target = batch.sources.transpose(2, 3, 1, 0).reshape(-1, L * B)
    recon, dpicture = squared_error(picture, target, config.recon_weight, n)
    dmasked = decoder_backward(dpicture, picture, inputs, params, grads).reshape(N_CLASSES, CLASS_SIZE, L, B)
    each = np.arange(B)
    for l in range(L):
        dv[batch.labels[:, l], :, each] += dmasked[batch.labels[:, l], :, l, each]

    du = routing_backward(dv, out.routing, config.routing_grad, grads["routing.w"], ws)
    ds = squash_backward(du, out.squash, ws("primary.ds", *du.shape))
    dh2 = ws("primary.dout", side, ds.size // side // B // side, side, B)
    dh2.reshape(side, P, -1)[...] = ds.reshape(P, side, -1).transpose(1, 0, 2)
    dh1 = conv2d_backward(dh2, out.primary, grads["primary.w"], grads["primary.b"], ws, "primary")
    relu_backward(dh1, out.h1)
    conv2d_backward(dh1, out.conv1, grads["conv1.w"], grads["conv1.b"], ws, "conv1", need_dx=False)
    return {"margin_loss": margin, "recon_loss": recon / L, "loss": margin + config.recon_weight * recon}


def max_pool_forward(x: Array, out: Array) -> Array:
    """2x2, stride 2; an odd last row or column is dropped. x (H, C, W, B) -> out (H/2, C, W/2, B)."""
    H, W = 2 * (x.shape[0] // 2), 2 * (x.shape[2] // 2)
    np.maximum(x[0:H:2, :, 0:W:2], x[0:H:2, :, 1:W:2], out=out)
    np.maximum(out, x[1:H:2, :, 0:W:2], out=out)
    return np.maximum(out, x[1:H:2, :, 1:W:2], out=out)


def max_pool_backward(dout: Array, x: Array, out: Array, dx: Array) -> Array:
    """The gradient goes to the first of the four that is the maximum."""
    H, W = 2 * (x.shape[0] // 2), 2 * (x.shape[2] // 2)
    dx[...] = 0
    left = np.ones(out.shape, bool)
    for i in (0, 1):
        for j in (0, 1):
            hit = x[i:H:2, :, j:W:2] == out
            hit &= left
            left ^= hit
            np.multiply(dout, hit, out=dx[i:H:2, :, j:W:2])
    return dx


def sigmoid_cross_entropy(scores: Array, positive: Array, n: int) -> tuple[float, Array]:
    """Summed over the classes, mean of n examples. scores (J, B) are logits."""
    loss = float((np.maximum(scores, 0) - scores * positive + np.log1p(np.exp(-np.abs(scores)))).sum()) / n
    return loss, (0.5 * (1 + np.tanh(0.5 * scores)) - positive) / n


class ConvLayer(NamedTuple):
    kernel: int
    channels: int
    stride: int
    pool: bool


class CNN(NamedTuple):
    convs: tuple[ConvLayer, ...]
    n_hidden: int


def cnn_init(rng: np.random.Generator, config: Config, net: CNN) -> Params:
    params: Params = {}
    side, C = config.image_size, 1
    for k, layer in enumerate(net.convs, 1):
        K = layer.kernel
        params[f"conv{k}.w"] = he_normal(rng, config.dtype, 2, K * K * C, K, K, C, layer.channels)
        params[f"conv{k}.b"] = np.zeros(layer.channels, config.dtype)
        side = (side - K) // layer.stride + 1
        side = side // 2 if layer.pool else side
        C = layer.channels
    sizes = (side * side * C, net.n_hidden, N_CLASSES)
    for k in (1, 2):
        params[f"fc{k}.w"] = he_normal(rng, config.dtype, 3 - k, sizes[k - 1], *sizes[k - 1 : k + 1])
        params[f"fc{k}.b"] = np.zeros(sizes[k], config.dtype)
    return params


def cnn_forward(params: Params, images: Array, net: CNN, ws: Workspace) -> tuple[Array, list[Any]]:
    """-> scores (J, B)"""
    x = batch_last(images, ws)
    B = len(images)
    caches: list[Any] = []
    for k, layer in enumerate(net.convs, 1):
        y, cache = conv2d_forward(x, params[f"conv{k}.w"], params[f"conv{k}.b"], layer.stride, ws, f"conv{k}")
        x = relu_forward(y)
        if layer.pool:
            H, C, W, _ = y.shape
            x = max_pool_forward(y, ws(f"pool{k}", H // 2, C, W // 2, B))
        caches.append((cache, y, x))
    flat = x.reshape(-1, B)
    h = relu_forward(dense_forward(flat, params["fc1.w"], params["fc1.b"], ws("fc1", net.n_hidden, B)))
    scores = dense_forward(h, params["fc2.w"], params["fc2.b"], ws("fc2", N_CLASSES, B))
    caches.append((flat, h))
    return scores, caches


def cnn_loss_and_grads(
    params: Params, batch: Batch, n: int, net: CNN, grads: Params, ws: Workspace
) -> dict[str, float]:
    scores, caches = cnn_forward(params, batch.images, net, ws)
    loss, dscores = sigmoid_cross_entropy(scores, one_hot(batch.labels, scores.dtype), n)
    flat, h = caches.pop()
    dh = relu_backward(dense_backward(dscores, h, params["fc2.w"], grads["fc2.w"], grads["fc2.b"]), h)
    dx = dense_backward(dh, flat, params["fc1.w"], grads["fc1.w"], grads["fc1.b"])
    for k, layer in reversed(list(enumerate(net.convs, 1))):
        cache, y, out = caches[k - 1]
        dx = dx.reshape(out.shape)
        if layer.pool:
            dx = max_pool_backward(dx, y, out, ws(f"pool{k}.dx", *y.shape))
        relu_backward(dx, y)
        dx = conv2d_backward(dx, cache, grads[f"conv{k}.w"], grads[f"conv{k}.b"], ws, f"conv{k}", need_dx=k > 1)
    return {"loss": loss}


class Model(NamedTuple):
    name: str
    init_params: Callable[[np.random.Generator], Params]
    scores: Callable[[Params, Array, Workspace], Array]
    loss_and_grads: Callable[[Params, Batch, int, Params, Workspace], dict[str, float]]


def count_params(params: Params) -> int:
    return sum(p.size for p in params.values())


def make_models(config: Config) -> dict[str, Model]:
    n_params = count_params(capsnet_init(np.random.default_rng(0), config))
    c, T = config.conv_channels, config.primary_types * PRIMARY_SIZE

    def cnn(name: str, *convs: ConvLayer) -> Model:
        # Each hidden unit costs the same: match the parameter count by the line through two sizes.
        one, two = (count_params(cnn_init(np.random.default_rng(0), config, CNN(convs, n))) for n in (1, 2))
        net = CNN(convs, 1 + round((n_params - one) / (two - one)))
        return Model(
            name,
            lambda rng: cnn_init(rng, config, net),
            lambda params, images, ws: cnn_forward(params, images, net, ws)[0],
            lambda params, batch, n, grads, ws: cnn_loss_and_grads(params, batch, n, net, grads, ws),
        )

    capsnet = Model(
        "capsnet",
        lambda rng: capsnet_init(rng, config),
        lambda params, images, ws: capsnet_forward(params, images, config, ws).lengths,
        lambda params, batch, n, grads, ws: capsnet_loss_and_grads(params, batch, n, config, grads, ws),
    )
    models = (
        capsnet,
        cnn("cnn", ConvLayer(KERNEL, c, 1, False), ConvLayer(KERNEL, T, 2, False)),
        cnn("cnn_pool", ConvLayer(KERNEL, 2 * c, 1, True), ConvLayer(5, 2 * c, 1, True)),
    )
    return {m.name: m for m in models}


ADAM_BLOCK = 1 << 15


class TrainState:
    def __init__(self, params: Params) -> None:
        self.flat, self.params = pack(params)
        self.m, self.v = np.zeros_like(self.flat), np.zeros_like(self.flat)
        self.step = 0
        self.seconds = 0.0
        self.sums: dict[str, float] = {}
        self.history: dict[str, list[float]] = {}


def pack(params: Params) -> tuple[Array, Params]:
    """The parameters one after the other in one vector, and views of it under their names."""
    flat = np.concatenate([p.ravel() for p in params.values()])
    views, end = {}, 0
    for name, p in params.items():
        start, end = end, end + p.size
        views[name] = flat[start:end].reshape(p.shape)
    return flat, views


def adam_step(p: Array, grad: Array, m: Array, v: Array, t: int, lr: float, b1: float = 0.9, b2: float = 0.999) -> None:
    """m and v are kept without their factors 1 - beta, which the step size and eps take over."""
    root = math.sqrt((1 - b2) / (1 - b2**t))
    rate, eps = lr * (1 - b1) / (1 - b1**t) / root, 1e-8 / root
    d_full = np.empty(min(ADAM_BLOCK, len(p)), p.dtype)
    for i in range(0, len(p), ADAM_BLOCK):
        block = slice(i, i + ADAM_BLOCK)
        p_b, g_b, m_b, v_b = p[block], grad[block], m[block], v[block]
        d = d_full[: len(p_b)]
        m_b *= b1
        m_b += g_b
        np.square(g_b, out=d)
        v_b *= b2
        v_b += d
        np.sqrt(v_b, out=d)
        d += eps
        np.divide(m_b, d, out=d)
        d *= rate
        p_b -= d


class Crew:
    """Threads that share each step: every one takes its part of the batch, then its part of the parameters."""

    def __init__(self, n_threads: int, model: Model, state: TrainState) -> None:
        self.model, self.n = model, n_threads
        self.ws = [Workspace(state.flat.dtype) for _ in range(n_threads)]
        self.grads = [pack(state.params) for _ in range(n_threads)]
        self.pool = ThreadPoolExecutor(n_threads) if n_threads > 1 else None

    def _map(self, work: Callable[[int], Any], n: int) -> list[Any]:
        return list(self.pool.map(work, range(n))) if self.pool else [work(k) for k in range(n)]

    def step(self, state: TrainState, batch: Batch, lr: float) -> dict[str, float]:
        B = len(batch.labels)
        n = min(self.n, B)
        cut = [B * k // n for k in range(n + 1)]

        def gradient(k: int) -> dict[str, float]:
            part = batch.part(cut[k], cut[k + 1])
            return self.model.loss_and_grads(state.params, part, B, self.grads[k][1], self.ws[k])

        losses = self._map(gradient, n)
        state.step += 1
        size = len(state.flat)
        edges = [size * k // n for k in range(n + 1)]

        def update(k: int) -> None:
            own = slice(edges[k], edges[k + 1])
            total = self.grads[0][0][own]
            for other in self.grads[1:n]:
                total += other[0][own]
            adam_step(state.flat[own], total, state.m[own], state.v[own], state.step, lr)

        self._map(update, n)
        return {name: sum(part[name] for part in losses) for name in losses[0]}


def predict_scores(model: Model, params: Params, images: Array, crew: Crew, batch: int = 50) -> Array:
    starts = range(0, len(images), batch)
    scores = np.empty((len(images), N_CLASSES))

    def work(k: int) -> None:
        for i in starts[k :: crew.n]:
            scores[i : i + batch] = model.scores(params, images[i : i + batch], crew.ws[k]).T

    crew._map(work, crew.n)
    return scores


def set_accuracy(scores: Array, labels: Array) -> float:
    top = np.argsort(-scores, axis=1)[:, : labels.shape[1]]
    return float((np.sort(top, 1) == np.sort(labels, 1)).all(1).mean())


def recon_mse(params, batch, config, crew, size=50):
    tot = 0.0
    for i in range(0, len(batch.labels), size):
        b = batch.part(i, i + size)
        out = capsnet_forward(params, b.images, config, crew.ws[0])
        pic, _ = decoder_forward(params, mask_capsules(out.v, b.labels, crew.ws[0]), crew.ws[0])
        t = b.sources.transpose(2, 3, 1, 0).reshape(pic.shape)
        tot += float(np.square(pic - t).sum())
    return tot / batch.sources.size


def main() -> None:
    p = argparse.ArgumentParser()
    for f in dataclasses.fields(Config):
        d = f.default
        if isinstance(d, tuple):
            p.add_argument("--" + f.name.replace("_", "-"), default=d, type=lambda s: tuple(map(int, s.split(","))))
        else:
            p.add_argument("--" + f.name.replace("_", "-"), default=d, type=type(d) if d is not None else str)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--models", default="capsnet,cnn,cnn_pool")
    p.add_argument("--max-epochs", type=int, default=10**9)
    args = vars(p.parse_args())
    threads, names, stop = args.pop("threads"), args.pop("models").split(","), args.pop("max_epochs")
    config = Config(**args)
    digits = resolve_dataset(config.dataset, generator(config.seed, Stream.DATA), Path(config.data_dir) if config.data_dir else None)
    train_set = Overlay(digits.train_images, digits.train_labels, config)
    test = Overlay(digits.test_images, digits.test_labels, config).draw(generator(config.seed, Stream.EVALUATION), config.n_test)
    for name, model in make_models(config).items():
        if name not in names:
            continue
        state = TrainState(model.init_params(generator(config.seed, Stream.INIT, *name.encode())))
        crew = Crew(threads, model, state)
        print(name, len(state.flat), config, flush=True)
        for epoch in range(min(stop, config.n_epochs)):
            t0 = time.perf_counter()
            rng = generator(config.seed, Stream.SHUFFLE, epoch)
            tot: dict[str, float] = {}
            for _ in range(config.steps_per_epoch):
                losses = crew.step(state, train_set.draw(rng, config.batch_size), config.lr_at(state.step))
                for k, x in losses.items():
                    tot[k] = tot.get(k, 0) + x
            t1 = time.perf_counter()
            acc = set_accuracy(predict_scores(model, state.params, test.images, crew), test.labels)
            mse = recon_mse(state.params, test, config, crew) if name == "capsnet" else 0
            print(epoch + 1, state.step, {k: round(x / config.steps_per_epoch, 4) for k, x in tot.items()}, f"acc {acc:.4f} mse {mse:.4f} ms/step {1e3*(t1-t0)/config.steps_per_epoch:.1f} eval {time.perf_counter()-t1:.1f}", flush=True)


if __name__ == "__main__":
    main()
