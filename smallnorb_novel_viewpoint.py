#!/usr/bin/env python3
"""Novel viewpoints: matrix capsules with EM routing against two CNNs, in numpy, every gradient by hand.

Claim reproduced: [Hinton 2018] G. Hinton, S. Sabour, N. Frosst, "Matrix capsules with EM routing", ICLR 2018,
section 5.1 and table 2. A network sees five object classes from a restricted range of viewpoints and is tested on
viewpoints that it never saw. Matrix capsules lose less of their accuracy than a convolutional network does.

    input            (B, 32, 32, C)          C = 1 (voxels) or 2 (smallNORB stereo pairs)
    conv1 + ReLU     (B, 16, 16, 16)         5x5, stride 2, padding 2
    primary capsules (B, 8, 4, 4), (B, 8)    a dense layer: eight poses M_i and activations a_i
    votes            (B, 8, 5, 4, 4)         V_ij = M_i W_ij
    class capsules   (B, 5, 4, 4), (B, 5)    EM routing: poses mu_j and activations a_j
    score            (B, 5)                  |mu_j|^2 / 16 + 4 (a_j - 1/2)

The CNNs keep conv1 and put a dense ReLU layer in the place of the capsules: one with 64 units, one with as many as give
it the capsule network's parameter count. All three go through the same loop, data and optimiser.

``--arch conv`` puts the paper's own network in the place of the capsules. For --sizes A,B,C,D and 32x32 images:

    conv1 + ReLU     (B, 16, 16, A)                 5x5, stride 2, padding 2
    PrimaryCaps      (B, 16, 16, B, 4, 4), (…, B)   1x1; poses and activations
    ConvCaps1        (B, 7, 7, C, 4, 4), (…, C)     EM routing within 3x3 fields, stride 2
    ConvCaps2        (B, 5, 5, D, 4, 4), (…, D)     EM routing within 3x3 fields, stride 1
    class capsules   (B, 5, 4, 4), (B, 5)           EM routing; one W for all positions, whose places are added to votes

The CNN of equal parameter count is then one of convolutions on the same grids.

Deviations from the paper: voxel objects stand in for the smallNORB images by default (``--dataset smallnorb`` reads the
real files); without ``--arch conv`` the primary capsules come from one dense layer, so there is no grid of capsules and
no coordinate addition, and with it a cost counts mass in shares of an even distribution; the default loss is
cross-entropy on the score above (``--loss spread`` is the paper's); a floor of 3 under the variances of EM routing, and
weight decay.

Run it (ten epochs, seed 0, three models):

    python smallnorb_novel_viewpoint.py
    python smallnorb_novel_viewpoint.py --arch conv --lr 6e-3
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gzip
import math
import sys
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np

from support.optimizers import TrainState, adamw_step, count_params
from support.pictures import border_level, prediction_table, read_grey
from support.run import (
    NO_FILES,
    Callback,
    Files,
    Parser,
    Session,
    Stream,
    UserError,
    add_file_flags,
    add_flags,
    blas_name,
    check_file_flags,
    check_same,
    exit_status,
    format_value,
    generator,
    list_of,
    non_empty,
    number,
    permutation,
    print_result,
    read_checkpoint,
    recorded_command,
    report_result,
    require_finite,
    require_writable,
    result_document,
    whole_number,
)
from support.workers import blas_threads

# Dimension letters
#   B  images of a batch             N  images of a set          H, W  rows and columns of a map      C  channels
#   K  side of a kernel              I  primary capsules         J  class capsules (= classes)
#   P  side of a pose matrix (4)     D  pose entries, P * P      V  points of a voxel object

Array = np.ndarray
Params = dict[str, Array]
Item = TypeVar("Item")
Part = TypeVar("Part")

EXPERIMENT = "smallnorb_novel_viewpoint"
MODEL_NAMES = ("capsules", "cnn", "cnn_matched")
IMAGE_SIZE = 32
N_CLASSES = 5
POSE_SIDE = 4
N_PRIMARY = 8
CONV_CHANNELS = 16
CONV_KERNEL = 5
VARIANCE_FLOOR = 3.0  # see em_routing_forward
VOXEL_CLASSES = ("cross", "L", "T", "frame", "tripod")
SMALLNORB_CLASSES = ("animal", "human", "airplane", "truck", "car")


# ----------------------------------------------------------------------------------------------------------------------
# Configuration: what a person chooses, and nothing else
# ----------------------------------------------------------------------------------------------------------------------

Range = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Config:
    """One run. Angles are in degrees; a range is closed and, for azimuths, may pass 360."""

    dataset: str = "voxels"
    data_dir: str | None = None
    seed: int = 0
    n_epochs: int = 10
    batch_size: int = 32
    pixel_offset: float = 0.0
    lr: float = 2e-3
    weight_decay: float = 1.0
    train_azimuths: Range = (0.0, 150.0)
    test_azimuths: Range = (200.0, 330.0)
    train_elevations: Range = (10.0, 50.0)
    test_elevations: Range = (10.0, 50.0)
    n_train_views: int = 6
    n_test_views: int = 6
    n_elev: int = 3
    n_per_combo: int = 5
    em_iters: int = 3  # [Hinton 2018, table 1]: three is the best
    em_grad: str = "exact"
    em_lambda: float = 1.0  # final inverse temperature; the paper gives no value
    variance_floor: float = VARIANCE_FLOOR
    beta_v_init: float = 0.0
    lambda_schedule: str = "constant"
    loss: str = "cross-entropy"
    dtype: str = "float32"
    arch: str = "dense"
    sizes: tuple[int, int, int, int] = (16, 4, 8, 8)  # of the convolutional architecture: A, B, C, D

    @property
    def held_out(self) -> str:
        """The angle whose range differs between training and test."""
        return "azimuth" if self.train_elevations == self.test_elevations else "elevation"

    @property
    def classes(self) -> tuple[str, ...]:
        return VOXEL_CLASSES if self.dataset == "voxels" else SMALLNORB_CLASSES

    @property
    def in_channels(self) -> int:
        return 1 if self.dataset == "voxels" else 2

    @property
    def n_classes(self) -> int:
        return N_CLASSES

    @property
    def image_size(self) -> int:
        return IMAGE_SIZE

    @property
    def free_to_change(self) -> set[str]:
        """What a continued run may have otherwise: the margin of the spread loss depends on the training's length."""
        return {"data_dir"} | ({"n_epochs"} if self.loss == "cross-entropy" else set())

    @property
    def n_features(self) -> int:
        """Length of the flattened conv1 map."""
        return (IMAGE_SIZE // 2) ** 2 * CONV_CHANNELS

    @property
    def lambdas(self) -> list[float]:
        """Inverse temperature of each EM iteration, first to last."""
        t = np.arange(1, self.em_iters + 1)
        rise = {
            "constant": np.ones(len(t)),
            "linear": t / self.em_iters,
            "exponential": 1 - 0.95**t,  # the form that the authors' later code uses
        }[self.lambda_schedule]
        return [float(self.em_lambda * r) for r in rise]


# ----------------------------------------------------------------------------------------------------------------------
# Data, 1: voxel objects
# ----------------------------------------------------------------------------------------------------------------------


class Split(NamedTuple):
    """A labelled set of views."""

    images: Array  # (N, H, W, C)
    labels: Array  # (N,) class numbers
    azimuths: Array  # (N,) degrees
    elevations: Array  # (N,) degrees


class Data(NamedTuple):
    train: Split
    familiar: Split  # the training range, other images
    held_out: Split


def _rod(axis: int, start: float, stop: float, n: int, at: tuple[float, float, float] = (0, 0, 0)) -> Array:
    """(n, 3) points evenly spaced along one axis; the two other coordinates are those of ``at``."""
    points = np.tile(np.asarray(at, dtype=float), (n, 1))
    points[:, axis] = np.linspace(start, stop, n)
    return points


def voxel_points() -> tuple[Array, Array]:
    """The five objects in [-1, 1]^3 as points (classes, V, 3) and a mask (classes, V) over the padding."""
    x, y, z = range(3)
    origin = np.zeros((1, 3))
    arms = [_rod(axis, -0.7, 0.7, 5)[[0, 1, 3, 4]] for axis in (x, y, z)]
    cross = [origin, *arms]
    ell = [
        _rod(x, -0.8, 0.8, 9, at=(0, -0.7, -0.6)),
        _rod(y, -0.6, 0.8, 8, at=(-0.8, 0, -0.6)),
        _rod(z, -0.5, 0.5, 5, at=(-0.8, -0.7, 0)),
    ]
    tee = [
        _rod(x, -0.8, 0.8, 9, at=(0, 0.7, 0)),
        _rod(y, -0.7, 0.6, 7),
        _rod(z, -0.4, 0.4, 5, at=(0, 0.7, 0)),
    ]
    frame = [
        _rod(axis, -0.7, 0.7, 5, at=tuple(np.insert([s, t], axis, 0.0)))
        for axis in (x, y, z)
        for s in (-0.7, 0.7)
        for t in (-0.7, 0.7)
    ]
    prong = np.linspace(0.17, 0.85, 5)[:, None]
    tripod = [origin, *(prong * direction for direction in np.array([[1, 0, 0], [0, 1, 0], [-0.7, -0.7, -0.7]]))]

    objects = [np.concatenate(parts) for parts in (cross, ell, tee, frame, tripod)]
    points = np.zeros((N_CLASSES, max(map(len, objects)), 3))
    mask = np.zeros(points.shape[:2])
    for k, p in enumerate(objects):
        points[k, : len(p)] = p
        mask[k, : len(p)] = 1
    return points, mask


def render_voxels(
    labels: Array,
    azimuths: Array,
    elevations: Array,
    rng: np.random.Generator | None,
    *,
    margin: int = 4,
    blob_sigma: float = 1.6,
    noise: float = 0.04,
) -> Array:
    """Draw one view per entry: labels (N,), angles (N,) in degrees -> images (N, 32, 32, 1) in [0, 1].

    An object turns about y by the azimuth, then about x by the elevation, and is projected along z with ``margin``
    pixels left free round [-1, 1]^2. A point is a Gaussian blob of ``blob_sigma`` pixels, its brightness linear in
    depth from 0.6 (z = -1, far) to 1.0 (z = +1, near). The blobs are summed and clipped; ``rng`` (or None) draws noise.
    """
    points, mask = voxel_points()
    azimuth, elevation = np.deg2rad(azimuths), np.deg2rad(elevations)
    ca, sa, ce, se = np.cos(azimuth), np.sin(azimuth), np.cos(elevation), np.sin(elevation)
    zero = np.zeros_like(ca)
    rotation = np.stack(  # R_x(elevation) R_y(azimuth)
        [ca, zero, sa, se * sa, ce, -se * ca, -ce * sa, se, ce * ca], axis=-1
    ).reshape(-1, 3, 3)  # (N, 3, 3)
    x, y, z = np.moveaxis(points[labels] @ rotation.transpose(0, 2, 1), -1, 0)  # each (N, V)

    pixels = np.arange(IMAGE_SIZE)
    centre, scale = (IMAGE_SIZE - 1) / 2, IMAGE_SIZE / 2 - margin
    brightness = mask[labels] * (0.8 + 0.2 * z)

    # A round Gaussian is a product of a row profile and a column profile, so the sum over points is one matrix product.
    def profile(position: Array) -> Array:
        return np.exp(-0.5 * ((pixels - position[..., None]) / blob_sigma) ** 2)  # (N, V, 32)

    rows = profile(centre - scale * y) * brightness[..., None]
    images = np.clip(rows.transpose(0, 2, 1) @ profile(centre + scale * x), 0, 1)
    if rng is not None:
        images = np.clip(images + rng.normal(0, noise, images.shape), 0, 1)
    return images[..., None].astype(np.float32)


def evenly_spaced(angles: Range, n: int) -> Array:
    """``n`` angles over a closed range; over a full circle the end is left out, being the start again."""
    low, high = angles
    return np.linspace(low, high, n, endpoint=high - low < 360)


def voxel_views(azimuths: Array, elevations: Array, n_per_view: int, rng: np.random.Generator | None) -> Split:
    """Every class at every (azimuth, elevation), ``n_per_view`` noisy images of each."""
    grid = np.meshgrid(np.arange(N_CLASSES), azimuths, elevations, np.arange(n_per_view), indexing="ij")
    label, azimuth, elevation, _ = (g.reshape(-1) for g in grid)
    return Split(render_voxels(label, azimuth, elevation, rng), label, azimuth, elevation)


def make_voxel_data(config: Config) -> Data:
    """Training, familiar and held-out sets: by default 450, 180 and 180 images."""

    def views(key: int, azimuths: Range, elevations: Range, n_azimuths: int, n_per_view: int) -> Split:
        rng = generator(config.seed, Stream.DATA, key)
        azimuth, elevation = evenly_spaced(azimuths, n_azimuths), evenly_spaced(elevations, config.n_elev)
        return voxel_views(azimuth, elevation, n_per_view, rng)

    c = config
    return Data(
        train=views(0, c.train_azimuths, c.train_elevations, c.n_train_views, c.n_per_combo),
        familiar=views(1, c.train_azimuths, c.train_elevations, c.n_train_views, 2),
        held_out=views(2, c.test_azimuths, c.test_elevations, c.n_test_views, 2),
    )


# ----------------------------------------------------------------------------------------------------------------------
# Data, 2: the smallNORB files
# ----------------------------------------------------------------------------------------------------------------------

NORB_DTYPES: dict[int, np.dtype[Any]] = {
    0x1E3D4C55: np.dtype("u1"),
    0x1E3D4C54: np.dtype("<i4"),
    0x1E3D4C51: np.dtype("<f4"),
    0x1E3D4C53: np.dtype("<f8"),
    0x1E3D4C56: np.dtype("<i2"),
}
NORB_SETS = {"training": "5x46789", "testing": "5x01235"}  # the digits are the object instances of each set
NORB_CHUNK = 256  # stereo pairs decoded at a time
NORB_SIDE = 48  # [Hinton 2018, sec. 5]: 96x96 images are shrunk to 48x48


def norb_path(data_dir: Path, subset: str, part: str) -> Path:
    """The official name of one file, gzipped or not. Raises UserError where neither is there."""
    name = f"smallnorb-{NORB_SETS[subset]}x9x18x6x2x96x96-{subset}-{part}.mat"
    with contextlib.suppress(OSError):  # a folder that cannot be looked into, a name that is too long
        for path in (data_dir / name, data_dir / f"{name}.gz"):
            if path.is_file():
                return path
    raise UserError(f"{data_dir} has no {name}[.gz]; --data-dir must hold the six official smallNORB files")


def read_norb_header(stream: IO[bytes], path: Path) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Element type and sizes: magic, number of dimensions, then at least three sizes, all little-endian int32."""

    def words(n: int) -> list[int]:
        raw = stream.read(4 * n)
        if len(raw) != 4 * n:
            raise UserError(f"{path} is truncated inside its header; fetch it again")
        return [int(w) for w in np.frombuffer(raw, "<i4")]

    magic, n_dims = words(2)
    if magic not in NORB_DTYPES:
        raise UserError(f"{path} is not a smallNORB file: its magic number is 0x{magic & 0xFFFFFFFF:08X}")
    if not 1 <= n_dims <= 4:
        raise UserError(f"{path} is not a smallNORB file: it claims {n_dims} dimensions")
    sizes = words(max(3, n_dims))[:n_dims]
    if min(sizes) < 1:
        raise UserError(f"{path} is not a smallNORB file: it claims the sizes {sizes}")
    return NORB_DTYPES[magic], tuple(sizes)


def stream_norb(path: Path, dtype: np.dtype, item_shape: tuple[int | None, ...]) -> Iterator[Array]:
    """Yield the file's items a chunk at a time, so that no more than a chunk is ever decoded.

    Raises UserError where the element type or the item shape (None: any) is not the expected one, where the file ends
    early, or goes on after its last item.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as opened:
            stream = cast(IO[bytes], opened)
            found, sizes = read_norb_header(stream, path)
            matches = len(sizes) == 1 + len(item_shape) and all(
                want in (None, have) for want, have in zip(item_shape, sizes[1:], strict=True)
            )
            if found != dtype or not matches:
                raise UserError(
                    f"{path} holds {found} items of shape {sizes[1:]}, not {dtype} {item_shape}: are files swapped?"
                )
            item_bytes = math.prod(sizes[1:]) * dtype.itemsize
            for start in range(0, sizes[0], NORB_CHUNK):
                n = min(NORB_CHUNK, sizes[0] - start)
                raw = stream.read(n * item_bytes)
                if len(raw) != n * item_bytes:
                    raise UserError(f"{path} is truncated: item {start + len(raw) // item_bytes} of {sizes[0]} is cut")
                yield np.frombuffer(raw, dtype).reshape(n, *sizes[1:])
            if stream.read(1):
                raise UserError(f"{path} is longer than its header says; fetch it again")
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}); fetch it again") from error


def shrink(pairs: Array) -> Array:
    """Stereo pairs (N, 2, 96, 96) uint8 -> (N, 48, 48, 2) float32: 2x2 means, then zero mean and unit variance."""
    n, eyes, height, width = pairs.shape
    small = pairs.reshape(n, eyes, height // 2, 2, width // 2, 2).mean(axis=(3, 5), dtype=np.float32)
    small -= small.mean(axis=(2, 3), keepdims=True)
    small /= small.std(axis=(2, 3), keepdims=True) + 1e-6
    return np.ascontiguousarray(small.transpose(0, 2, 3, 1))


def in_range(angles: Array, bounds: Range, *, circular: bool) -> Array:
    """Which angles lie in a closed range, for azimuths modulo 360."""
    low, high = bounds
    return (angles - low) % 360 <= high - low if circular else (angles >= low) & (angles <= high)


def read_smallnorb(data_dir: Path, subset: str, wanted: Callable[[Array, Array], Array] | None = None) -> Split:
    """One official set ("training" or "testing"); ``wanted(azimuths, elevations)`` picks the pairs that are kept.

    Images come as (N, 48, 48, 2), normalised. At most the kept images and one chunk are in memory: 0.45 GB for all
    24,300 pairs of a set. Raises UserError for a file that is missing, damaged, swapped or of another length.
    """
    dat, cat, info = (norb_path(data_dir, subset, part) for part in ("dat", "cat", "info"))
    labels = np.concatenate(list(stream_norb(cat, np.dtype("<i4"), ())))
    views = np.concatenate(list(stream_norb(info, np.dtype("<i4"), (4,))))  # instance, elevation, azimuth, lighting
    if len(labels) != len(views):
        raise UserError(f"{cat} has {len(labels)} items but {info} has {len(views)}: they are not of one set")
    if labels.min() < 0 or labels.max() >= N_CLASSES:
        raise UserError(f"{cat} holds a class outside 0 to {N_CLASSES - 1}")
    instances = {int(digit) for digit in NORB_SETS[subset][2:]}
    if not set(views[:, 0].tolist()) <= instances:
        raise UserError(f"{info} holds objects of the other set: training and testing files are swapped")
    if ((views[:, 1:3] < 0) | (views[:, 1:3] > (8, 34))).any():
        raise UserError(f"{info} holds an elevation outside 0 to 8 or an azimuth outside 0 to 34; fetch it again")

    elevations, azimuths = 30.0 + 5.0 * views[:, 1], 10.0 * views[:, 2]
    keep = np.ones(len(labels), bool) if wanted is None else wanted(azimuths, elevations)
    images = np.empty((int(keep.sum()), NORB_SIDE, NORB_SIDE, 2), np.float32)
    seen = filled = 0
    for pairs in stream_norb(dat, np.dtype("u1"), (2, 96, 96)):
        chosen = keep[seen : seen + len(pairs)]
        if len(chosen) < len(pairs):
            raise UserError(f"{dat} has more images than {cat} has labels: they are not of one set")
        n = int(chosen.sum())
        images[filled : filled + n] = shrink(pairs[chosen])
        seen, filled = seen + len(pairs), filled + n
    if seen != len(labels):
        raise UserError(f"{dat} has {seen} images but {cat} has {len(labels)} labels: they are not of one set")
    return Split(images, labels[keep].astype(np.intp), azimuths[keep], elevations[keep])


def load_smallnorb(config: Config) -> Data:
    """The paper's split: training objects seen from the training range; other objects from both ranges."""

    def within(azimuths: Range, elevations: Range) -> Callable[[Array, Array], Array]:
        return lambda azimuth, elevation: (
            in_range(azimuth, azimuths, circular=True) & in_range(elevation, elevations, circular=False)
        )

    data_dir = Path(config.data_dir or ".")
    familiar_range = within(config.train_azimuths, config.train_elevations)
    held_out_range = within(config.test_azimuths, config.test_elevations)
    data = Data(
        train=read_smallnorb(data_dir, "training", familiar_range),
        familiar=read_smallnorb(data_dir, "testing", familiar_range),
        held_out=read_smallnorb(data_dir, "testing", held_out_range),
    )
    for name, split in zip(Data._fields, data, strict=True):
        if not len(split.labels):
            raise UserError(f"no smallNORB image in {data_dir} falls into the {name.replace('_', '-')} range")
    return data


def make_data(config: Config) -> Data:
    return make_voxel_data(config) if config.dataset == "voxels" else load_smallnorb(config)


def crop(images: Array, rng: np.random.Generator | None) -> Array:
    """Images (B, H, W, C) -> (B, 32, 32, C): what the network is given.

    With ``rng`` (training) a crop is taken at random, and contrast (0.8 to 1.2) and brightness (-0.2 to 0.2, in
    standard deviations) are drawn for each image; without (test) the crop is central. [Hinton 2018, sec. 5]; the
    amounts are ours. Images that have the network's size already, or less, pass unchanged: voxels do.
    """
    n, side = images.shape[:2]
    slack = side - IMAGE_SIZE
    if slack <= 0:
        return images
    if rng is None:
        return images[:, slack // 2 : slack // 2 + IMAGE_SIZE, slack // 2 : slack // 2 + IMAGE_SIZE]
    window = np.arange(IMAGE_SIZE)
    row, column = rng.integers(0, slack + 1, (2, n, 1)) + window  # each (B, 32)
    crops = images[np.arange(n)[:, None, None], row[:, :, None], column[:, None, :]]
    contrast, brightness = rng.uniform(0.8, 1.2, (n, 1, 1, 1)), rng.uniform(-0.2, 0.2, (n, 1, 1, 1))
    return (crops * contrast + brightness).astype(images.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Primitives: each forward stands above the backward that undoes it
# ----------------------------------------------------------------------------------------------------------------------


class ConvCache(NamedTuple):
    columns: Array  # (K * K * C, B * Ho * Wo) the patches, one per column
    w: Array
    x_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    stride: int
    pad: int


def conv2d_forward(x: Array, w: Array, b: Array, stride: int, pad: int) -> tuple[Array, ConvCache]:
    """Cross-correlate x (B, H, W, C) with w (K, K, C, F), add b (F,) -> (B, Ho, Wo, F), zero padded."""
    n, height, width, channels = x.shape
    k, n_filters = w.shape[0], w.shape[-1]
    h_out, w_out = (height + 2 * pad - k) // stride + 1, (width + 2 * pad - k) // stride + 1
    x_pad = np.zeros((n, height + 2 * pad, width + 2 * pad, channels), x.dtype)
    x_pad[:, pad : pad + height, pad : pad + width] = x
    columns = np.empty(
        (k, k, channels, n, h_out, w_out), x.dtype
    )  # long runs to write: twice as fast as patch by patch
    for i in range(k):
        for j in range(k):
            window = x_pad[:, i : i + stride * h_out : stride, j : j + stride * w_out : stride]
            columns[i, j] = window.transpose(3, 0, 1, 2)
    columns = columns.reshape(k * k * channels, -1)
    out = columns.T @ w.reshape(-1, n_filters)  # (B * Ho * Wo, F)
    out += b
    out = out.reshape(n, h_out, w_out, n_filters)
    return out, ConvCache(columns, w, x.shape, out.shape, stride, pad)


def conv2d_backward(dout: Array, cache: ConvCache, need_dx: bool = True) -> tuple[Array | None, Array, Array]:
    """dout (B, Ho, Wo, F) -> dx (None unless needed: the first layer does not), dw, db."""
    columns, w, (n, height, width, channels), (_, h_out, w_out, n_filters), stride, pad = cache
    k = w.shape[0]
    rows = dout.reshape(-1, n_filters)
    # out = columns.T @ w + b
    dw = (columns @ rows).reshape(w.shape)
    db = np.ones(len(rows), rows.dtype) @ rows  # the sum over rows; numpy's own takes 15 times as long for short rows
    if not need_dx:
        return None, dw, db
    dcolumns = (w.reshape(-1, n_filters) @ rows.T).reshape(k, k, channels, n, h_out, w_out)
    dx_pad = np.zeros((n, height + 2 * pad, width + 2 * pad, channels), dout.dtype)
    for i in range(k):
        for j in range(k):
            window = dx_pad[:, i : i + stride * h_out : stride, j : j + stride * w_out : stride]
            window += dcolumns[i, j].transpose(1, 2, 3, 0)
    return dx_pad[:, pad : pad + height, pad : pad + width], dw, db


class LinearCache(NamedTuple):
    x: Array
    w: Array


def linear_forward(x: Array, w: Array, b: Array) -> tuple[Array, LinearCache]:
    """x (B, M) @ w (M, F) + b (F,)."""
    return x @ w + b, LinearCache(x, w)


def linear_backward(dout: Array, cache: LinearCache) -> tuple[Array, Array, Array]:
    """dout (B, F) -> dx, dw, db."""
    x, w = cache
    # out = x @ w + b
    return dout @ w.T, x.T @ dout, dout.sum(axis=0)


def relu_forward(x: Array) -> tuple[Array, Array]:
    out = np.maximum(x, 0)
    return out, out


def relu_backward(dout: Array, out: Array) -> Array:
    # out = max(x, 0)
    return dout * (out > 0)


def sigmoid_forward(x: Array) -> tuple[Array, Array]:
    out = 0.5 * (1 + np.tanh(0.5 * x))  # the same function as 1 / (1 + exp(-x)), without an overflow
    return out, out


def sigmoid_backward(dout: Array, out: Array) -> Array:
    # out = sigmoid(x)
    return dout * out * (1 - out)


class VotesCache(NamedTuple):
    pose: Array
    w: Array


def votes_forward(pose: Array, w: Array) -> tuple[Array, VotesCache]:
    """V_ij = M_i W_ij: pose (B, I, P, P), w (I, J, P, P) -> votes (B, I, J, D)."""
    n, n_in, p, _ = pose.shape
    rows = pose.transpose(1, 0, 2, 3).reshape(n_in, n * p, p)  # (I, B * P, P)
    columns = w.transpose(0, 2, 1, 3).reshape(n_in, p, -1)  # (I, P, J * P)
    votes = (rows @ columns).reshape(n_in, n, p, -1, p)  # (I, B, P, J, P)
    return votes.transpose(1, 0, 3, 2, 4).reshape(n, n_in, -1, p * p), VotesCache(pose, w)


def votes_backward(dvotes: Array, cache: VotesCache) -> tuple[Array, Array]:
    """dvotes (B, I, J, D) -> dpose (B, I, P, P), dw (I, J, P, P)."""
    pose, w = cache
    n, n_in, p, _ = pose.shape
    n_out = w.shape[1]
    dv = dvotes.reshape(n, n_in, n_out, p, p).transpose(1, 0, 3, 2, 4).reshape(n_in, n * p, n_out * p)
    rows = pose.transpose(1, 0, 2, 3).reshape(n_in, n * p, p)
    columns = w.transpose(0, 2, 1, 3).reshape(n_in, p, n_out * p)
    # votes = rows @ columns, a product for each primary capsule
    drows = dv @ columns.transpose(0, 2, 1)  # (I, B * P, P)
    dcolumns = rows.transpose(0, 2, 1) @ dv  # (I, P, J * P)
    dpose = drows.reshape(n_in, n, p, p).transpose(1, 0, 2, 3)
    return dpose, dcolumns.reshape(n_in, p, n_out, p).transpose(0, 2, 1, 3)


# ----------------------------------------------------------------------------------------------------------------------
# EM routing
# ----------------------------------------------------------------------------------------------------------------------

MASS_FLOOR = 1e-8  # added to the assigned mass: a parent that gets nothing has a mean of zero, not NaN


class EMIteration(NamedTuple):
    """What one iteration computed; the backward needs no more. A routing over receptive fields has a row of B for each
    position: B * Ho * Wo fields, and their K * K * I children in the place of I."""

    r: Array  # (B, I, J) assignments that the M-step used
    weight: Array  # (B, I, J) r times the children's activations, as shares of the mass: 1 in sum over I
    mass: Array  # (B, J)
    mu: Array  # (B, J, D)
    error: Array | None  # (B, I, J, D) votes - mu, where votes are kept whole
    sigma_sq: Array  # (B, J, D)
    log_det: Array  # (B, J) sum of log sigma_sq
    a: Array  # (B, J) activations


class Votes:
    """Votes (B, I, J, D) that are kept whole, and the four things that EM does with them."""

    def __init__(self, votes: Array) -> None:
        self.votes = votes

    def m_step(self, weight: Array, variance_floor: float) -> tuple[Array, Array, Array | None]:
        """weight (B, I, J) -> mu and sigma_sq (B, J, D), votes - mu (B, I, J, D)."""
        mu = np.einsum("bij,bijd->bjd", weight, self.votes)
        error = self.votes - mu[:, None]  # (B, I, J, D)
        sigma_sq = np.einsum("bij,bijd->bjd", weight, error * error) + variance_floor
        return mu, sigma_sq, error

    def e_step(self, now: EMIteration) -> Array:
        """Squared distances of the votes from mu, in units of sigma: (B, I, J)."""
        assert now.error is not None
        return np.einsum("bijd,bijd->bij", now.error / now.sigma_sq[:, None], now.error)

    def begin_backward(self) -> None:
        self.dvotes = np.zeros_like(self.votes)

    def m_step_backward(self, now: EMIteration, dmu: Array, dsigma_sq: Array, policy: str) -> Array:
        """dmu, dsigma_sq (B, J, D) -> dvotes grows; what a vote's share of the mass is worth, (B, I, J).

        With policy "exact" the worth is counted from the mean's: a share taken by one vote is lost to the others.
        """
        assert now.error is not None
        # mu = sum_i weight votes; error = votes - mu; sigma_sq = sum_i weight error^2 + floor
        pull = dsigma_sq[:, None] * now.error  # (B, I, J, D)
        if policy == "stop":
            self.dvotes += now.weight[..., None] * (dmu[:, None] + 2 * pull)
            return np.einsum("bjd,bijd->bij", dmu, self.votes) + np.einsum("bijd,bijd->bij", pull, now.error)
        push = dmu[:, None] + pull
        self.dvotes += now.weight[..., None] * (push + pull)
        return np.einsum("bijd,bijd->bij", push, now.error)

    def e_step_backward(self, now: EMIteration, dlog_r: Array) -> tuple[Array, Array]:
        """dlog_r (B, I, J), of log_r = -distance / 2 -> dvotes grows; dmu, dsigma_sq (B, J, D)."""
        assert now.error is not None
        # distance = sum_d error^2 / sigma_sq
        scaled = now.error / now.sigma_sq[:, None]
        derror = -dlog_r[..., None] * scaled  # (B, I, J, D)
        self.dvotes += derror
        return -derror.sum(axis=1), 0.5 * np.einsum("bijd,bijd->bjd", -derror, scaled)


class Competition:
    """Which parents share a child: here all of them, so that nothing is left to gather."""

    def first(self, n: int, n_in: int, n_out: int, dtype: np.dtype) -> Array:
        """The even assignments (B, I, J) that routing starts from: 1 / (number of a child's parents)."""
        return np.full((n, n_in, n_out), 1 / n_out, dtype)

    def gather(self, per_child: Array, op: np.ufunc) -> Array:
        """A number (B, I) for each child, reduced over its parents within a row -> over all of its parents."""
        return per_child


class EMCache(NamedTuple):
    votes: Votes | None  # None: not kept, to be made again before the backward
    competition: Competition
    a_in: Array
    beta_v: Array
    lambdas: list[float]
    variance_floor: float
    mass_unit: float
    iterations: list[EMIteration]


def em_forward(
    votes: Votes,
    competition: Competition,
    a_in: Array,
    beta_a: Array,
    beta_v: Array,
    lambdas: list[float],
    variance_floor: float,
    d: int,
    mass_unit: float = 1.0,
) -> EMCache:
    """One (M-step, E-step) per entry of ``lambdas``, whatever the votes' layout and whichever parents compete.

    ``mass_unit``: the mass at which a cost counts once; the other arguments are those of ``em_routing_forward``.
    """
    n, n_in = a_in.shape
    r = competition.first(n, n_in, len(beta_a), a_in.dtype)
    iterations: list[EMIteration] = []
    for t, inverse_temperature in enumerate(lambdas):
        # M-step
        ra = r * a_in[:, :, None]  # (B, I, J)
        mass = ra.sum(axis=1) + MASS_FLOOR  # (B, J)
        weight = ra / mass[:, None]  # (B, I, J)
        mu, sigma_sq, error = votes.m_step(weight, variance_floor)
        log_det = np.log(sigma_sq).sum(axis=2)  # (B, J)
        cost = (d * beta_v + 0.5 * log_det) * (mass / mass_unit)  # (B, J)
        z = inverse_temperature * (beta_a - cost)
        a, _ = sigmoid_forward(z)
        iterations.append(EMIteration(r, weight, mass, mu, error, sigma_sq, log_det, a))
        if t == len(lambdas) - 1:
            break
        # E-step, in logarithms; the constant of the Gaussian is the same for all parents and drops out
        log_a = -np.logaddexp(0, -z)
        log_r = (log_a - 0.5 * log_det)[:, None] - 0.5 * votes.e_step(iterations[-1])
        r = np.exp(log_r - competition.gather(log_r.max(axis=2), np.maximum)[:, :, None])
        r /= competition.gather(r.sum(axis=2), np.add)[:, :, None]  # a child's assignments sum to 1 over its parents
    return EMCache(votes, competition, a_in, beta_v, lambdas, variance_floor, mass_unit, iterations)


def em_backward(dmu: Array, da: Array, cache: EMCache, policy: str) -> tuple[Array, Array, Array]:
    """dmu (B, J, D), da (B, J) -> da_in, dbeta_a, dbeta_v; the gradient of the votes gathers in ``cache.votes``.

    policy "exact": through every iteration: assignments, means, variances, activations, and the children's activations.
    policy "stop": the last M-step alone, with the assignments, the mass, and the mean inside sigma_sq held constant.
    """
    votes, competition, a_in, beta_v, lambdas, variance_floor, mass_unit, iterations = cache
    assert votes is not None
    d = dmu.shape[2]
    votes.begin_backward()
    da_in = np.zeros_like(a_in)
    dbeta_a, dbeta_v = np.zeros_like(beta_v), np.zeros_like(beta_v)
    dsigma_sq = np.zeros_like(dmu)
    dz = sigmoid_backward(da, iterations[-1].a)
    for t in reversed(range(len(lambdas))):
        now = iterations[t]
        r, mass, mu, sigma_sq, log_det = now.r, now.mass, now.mu, now.sigma_sq, now.log_det
        # z = lambda (beta_a - cost)
        dbeta_a += lambdas[t] * dz.sum(axis=0)
        dcost = -lambdas[t] * dz / mass_unit  # (B, J), of cost times the unit of mass
        # cost = (d beta_v + log_det / 2) mass; log_det = sum_d log sigma_sq
        dbeta_v += d * (dcost * mass).sum(axis=0)
        dsigma_sq = dsigma_sq + (0.5 * dcost * mass)[..., None] / sigma_sq  # (B, J, D)
        if policy == "stop":
            dra = votes.m_step_backward(now, dmu, dsigma_sq, policy) / mass[:, None]
            da_in += (dra * r).sum(axis=2)
            break
        # through the mean inside sigma_sq: sum_i weight error would be 0, were there no floor under the mass
        dmu = dmu - 2 * dsigma_sq * mu * (MASS_FLOOR / mass)[..., None]
        # weight = ra / mass, mass = sum_i ra: the quotient takes off each sum's own value, so votes turn into error.
        dmass = dcost * (d * beta_v + 0.5 * log_det)
        dmass -= (dsigma_sq * (sigma_sq - variance_floor)).sum(axis=2) / mass
        dra = votes.m_step_backward(now, dmu, dsigma_sq, policy) / mass[:, None] + dmass[:, None]
        # ra = r a_in
        da_in += (dra * r).sum(axis=2)
        if t == 0:
            break  # the first assignments are constants
        dr = dra * a_in[:, :, None]
        # r = softmax over a child's parents of (log_a - log_det / 2 - distance / 2), all of the iteration before
        dlog_r = r * (dr - competition.gather((dr * r).sum(axis=2), np.add)[:, :, None])  # (B, I, J)
        before = iterations[t - 1]
        dlog_p = dlog_r.sum(axis=1)  # (B, J)
        dz = dlog_p * (1 - before.a)  # log_a = log sigmoid(z)
        dmu, dsigma_sq = votes.e_step_backward(before, dlog_r)
        dsigma_sq = dsigma_sq - 0.5 * dlog_p[..., None] / before.sigma_sq
    return da_in, dbeta_a, dbeta_v


def em_routing_forward(
    votes: Array,
    a_in: Array,
    beta_a: Array,
    beta_v: Array,
    lambdas: list[float],
    variance_floor: float = VARIANCE_FLOOR,
) -> tuple[Array, Array, EMCache]:
    """Fit one Gaussian per parent to its children's votes; one (M-step, E-step) per entry of ``lambdas``.

    votes (B, I, J, D), a_in (B, I), beta_a and beta_v (J,), lambdas: inverse temperature of each iteration
    -> poses mu (B, J, D), activations (B, J), cache. [Hinton 2018, procedure 1]; the cost of a pose entry is
    (beta_v + log sigma) times the assigned mass, one beta_v per parent shared by its D entries.

    ``variance_floor`` is added to sigma_sq. It keeps the logarithm and the division finite when all votes agree. And as
    a product of D Gaussians is very peaked, a floor of the order of a vote's square is what lets several children share
    a parent: with 1e-4 the trained network leaves a parent about one child, and generalises less.
    """
    d = votes.shape[3]
    cache = em_forward(Votes(votes), Competition(), a_in, beta_a, beta_v, lambdas, variance_floor, d)
    return cache.iterations[-1].mu, cache.iterations[-1].a, cache


def em_routing_backward(dmu: Array, da: Array, cache: EMCache, policy: str) -> tuple[Array, Array, Array, Array]:
    """dmu (B, J, D), da (B, J) -> dvotes, da_in, dbeta_a, dbeta_v; the policies are those of ``em_backward``."""
    da_in, dbeta_a, dbeta_v = em_backward(dmu, da, cache, policy)
    assert cache.votes is not None
    return cache.votes.dvotes, da_in, dbeta_a, dbeta_v


# ----------------------------------------------------------------------------------------------------------------------
# EM routing over receptive fields
# ----------------------------------------------------------------------------------------------------------------------

# A row of a field's arrays is one position of one example: N = B * Ho * Wo rows. Its children are the M = K * K * I
# capsules of its receptive field. What routing keeps for each pair is stored parent by parent, (N, J, M), and handed to
# em_forward as a view (N, M, J).

_workers: ThreadPoolExecutor | None = None
_n_workers = 1


def use_workers(pool: ThreadPoolExecutor | None, n: int = 1) -> None:
    """Whose ``n`` threads share the chunks from now on; None: nobody's."""
    global _workers, _n_workers
    _workers, _n_workers = pool, n


@contextlib.contextmanager
def worker_threads(n: int) -> Iterator[None]:
    """Let ``n`` threads share the chunks of a routing over fields, the BLAS having one thread meanwhile.

    numpy computes outside of Python's lock. Chunks, and the order in which their gradients are added, do not depend on
    ``n``: neither does any number.
    """
    with blas_threads(1), ThreadPoolExecutor(n) if n > 1 else contextlib.nullcontext() as pool:
        use_workers(pool, n)
        try:
            yield
        finally:
            use_workers(None)


CHUNK_BYTES = 12 << 20  # votes and their squares that are worked on at a time; more of them leave the cache, fewer wait
MIN_CHUNKS = 4  # of a batch, for the threads to share


class Scratch(threading.local):
    """Memory of a thread that is written again and again: fresh pages cost more than the arithmetic on them."""

    def __init__(self) -> None:
        self.memory: dict[str, Array] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """An array that is good until the same name is asked for again."""
        n_bytes = math.prod(shape) * dtype.itemsize
        if name not in self.memory or self.memory[name].nbytes < n_bytes:
            self.memory[name] = np.empty(n_bytes, np.uint8)
        return self.memory[name][:n_bytes].view(dtype).reshape(shape)


_scratch = Scratch()


def share(work: Callable[[Item], Part], items: Iterable[Item]) -> Iterator[Part]:
    """work(item) of each, in order; at once where there are worker threads."""
    if _workers is None:
        return map(work, items)
    errors = np.geterr()  # which a thread does not take over from its caller

    def with_errors(item: Item) -> Part:
        with np.errstate(**errors):
            return work(item)

    return _workers.map(with_errors, items)


class Fields(NamedTuple):
    """Which children each position sees, and back."""

    height: int  # Ho
    width: int  # Wo
    child: Array  # (Ho * Wo, K * K) the child's place on the grid H * W
    slot: Array  # (most positions that a child has, H * W) where ``child`` names this child; Ho * Wo * K * K: nowhere
    n_positions: Array  # (H * W,) how many positions see a child


@functools.lru_cache(maxsize=64)
def receptive_fields(height: int, width: int, k: int, stride: int) -> Fields:
    """Fields of k x k children, ``stride`` apart, on a grid of H x W children without padding."""
    h_out, w_out = (height - k) // stride + 1, (width - k) // stride + 1
    row = stride * np.arange(h_out)[:, None] + np.arange(k)  # (Ho, K)
    column = stride * np.arange(w_out)[:, None] + np.arange(k)  # (Wo, K)
    child = (row[:, None, :, None] * width + column[None, :, None, :]).reshape(h_out * w_out, k * k)
    n_positions = np.bincount(child.reshape(-1), minlength=height * width)
    slot = np.full((int(n_positions.max()), height * width), child.size)
    filled = np.zeros(height * width, np.intp)
    for entry, c in enumerate(child.reshape(-1)):
        slot[filled[c], c] = entry
        filled[c] += 1
    return Fields(h_out, w_out, child, slot, n_positions)


class FieldCompetition(Competition):
    """A child's parents are all types at all positions whose field holds it. [Hinton 2018, sec. 4]"""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields

    def first(self, n: int, n_in: int, n_out: int, dtype: np.dtype) -> Array:
        n_places, k2 = self.fields.child.shape
        share = 1 / (n_out * self.fields.n_positions[self.fields.child])  # (Ho * Wo, K * K)
        per_child = np.repeat(share.astype(dtype), n_in // k2, axis=1)  # (Ho * Wo, M)
        r = np.broadcast_to(per_child[:, None], (n // n_places, n_places, n_out, n_in)).reshape(n, n_out, n_in)
        return r.transpose(0, 2, 1)

    def gather(self, per_child: Array, op: np.ufunc) -> Array:
        fields, (n, n_in) = self.fields, per_child.shape
        nothing = -np.inf if op is np.maximum else 0
        entries = per_child.reshape(n // len(fields.child), fields.child.size, -1)  # (B, Ho * Wo * K * K, I)
        nowhere = np.full((len(entries), 1, entries.shape[2]), nothing, per_child.dtype)
        at_child = np.take(np.concatenate([entries, nowhere], axis=1), fields.slot, axis=1)  # (B, slots, H * W, I)
        return np.take(op.reduce(at_child, axis=1), fields.child, axis=1).reshape(n, n_in)


class FieldVotes(Votes):
    """Votes of a field's children as products and sums of two arrays, V and V^2, both (N, M, J, D). They lie in the
    thread's scratch memory: a thread has one FieldVotes at a time.

    Means, variances, distances and their gradients are matrix products with these two, so that an iteration passes over
    the votes in a BLAS and nowhere else. A variance as a difference of moments loses digits where it is far below the
    votes' squares: it is held at zero from below, and the floor comes on top.
    """

    def __init__(self, pose: Array, kron: Array, offset: Array | None) -> None:
        """pose (N, M, D), kron (M, D, J * D) of ``kronecker``, offset (M, D) added to the votes for all parents."""
        (n, n_in, d), n_out = pose.shape, kron.shape[2] // pose.shape[2]
        self.pose, self.kron = pose, kron
        votes = _scratch.empty("votes", (n, n_in, n_out, d), pose.dtype)
        np.matmul(pose.transpose(1, 0, 2), kron, out=votes.reshape(n, n_in, n_out * d).transpose(1, 0, 2))
        if offset is not None:
            votes += offset[:, None]
        squares = np.multiply(votes, votes, out=_scratch.empty("squares", votes.shape, votes.dtype))
        self.by_child = votes  # (N, M, J, D)
        self.votes, self.squares = votes.transpose(0, 2, 1, 3), squares.transpose(0, 2, 1, 3)  # (N, J, M, D)

    def sums(self, weight: Array) -> tuple[Array, Array]:
        """weight (N, M, J) -> sums over the children of weight V and weight V^2, each (N, J, D)."""
        rows = weight.transpose(0, 2, 1)[:, :, None]  # (N, J, 1, M)
        return (rows @ self.votes)[:, :, 0], (rows @ self.squares)[:, :, 0]

    def products(self, linear: Array, square: Array) -> Array:
        """linear, square (N, J, D) -> sum_d linear V + square V^2, (N, J, M)."""
        out = (self.votes @ linear[..., None])[..., 0]
        out += (self.squares @ square[..., None])[..., 0]
        return out

    def m_step(self, weight: Array, variance_floor: float) -> tuple[Array, Array, None]:
        mu, square = self.sums(weight)
        # sum_i weight (V - mu)^2, where the weights do not quite add up to 1 for the floor under the mass
        variance = square - mu * mu * (2 - weight.sum(axis=1))[..., None]
        return mu, np.maximum(variance, 0) + variance_floor, None

    def e_step(self, now: EMIteration) -> Array:
        precision = 1 / now.sigma_sq
        scaled = now.mu * precision
        distance = self.products(-2 * scaled, precision)  # (N, J, M)
        distance += (now.mu * scaled).sum(axis=2)[..., None]
        return distance.transpose(0, 2, 1)

    def begin_backward(self) -> None:
        self.terms: list[tuple[Array, Array, Array]] = []  # dvotes = sum over terms of left (linear + square V)

    def m_step_backward(self, now: EMIteration, dmu: Array, dsigma_sq: Array, policy: str) -> Array:
        # mu = sum_i weight V; sigma_sq = sum_i weight (V - mu)^2 + floor
        linear = dmu - 2 * dsigma_sq * now.mu
        self.terms.append((now.weight, linear, 2 * dsigma_sq))
        constant = (dsigma_sq * now.mu * now.mu).sum(axis=2)
        if policy == "exact":
            constant = constant - (dmu * now.mu).sum(axis=2)
        worth = self.products(linear, dsigma_sq)
        worth += constant[..., None]
        return worth.transpose(0, 2, 1)

    def e_step_backward(self, now: EMIteration, dlog_r: Array) -> tuple[Array, Array]:
        # distance = sum_d (V - mu)^2 / sigma_sq
        precision = 1 / now.sigma_sq
        scaled = now.mu * precision
        self.terms.append((dlog_r, scaled, -precision))
        sums, squares = self.sums(dlog_r)
        total = dlog_r.sum(axis=1)[..., None]  # (N, J, 1)
        dmu = (sums - now.mu * total) * precision
        dsigma_sq = 0.5 * (squares - 2 * now.mu * sums + now.mu * now.mu * total) * precision * precision
        return dmu, dsigma_sq

    def finish_backward(self) -> tuple[Array, Array]:
        """-> dpose (N, M, D), dkron (M, D, J * D)."""
        n, n_in, n_out, d = self.by_child.shape
        left = np.stack([term[0].transpose(0, 2, 1) for term in self.terms], axis=2).transpose(0, 1, 3, 2)
        linear, square = (np.stack([term[k] for term in self.terms], axis=2) for k in (1, 2))  # (N, J, terms, D)
        dvotes, slope = (_scratch.empty(name, (n, n_in, n_out, d), self.pose.dtype) for name in ("dvotes", "slope"))
        np.matmul(left, linear, out=dvotes.transpose(0, 2, 1, 3))
        np.matmul(left, square, out=slope.transpose(0, 2, 1, 3))
        slope *= self.by_child
        dvotes += slope
        by_child = dvotes.reshape(n, n_in, n_out * d).transpose(1, 0, 2)  # (M, N, J * D)
        # votes = pose @ kron, a product for each child
        dpose = np.empty_like(self.pose)
        np.matmul(by_child, self.kron.transpose(0, 2, 1), out=dpose.transpose(1, 0, 2))
        return dpose, self.pose.transpose(1, 2, 0) @ by_child


def kronecker(w: Array) -> Array:
    """w (M, J, P, P) -> (M, D, J * D) with which a pose, written as a row of D, gives its votes for all J."""
    n_in, n_out, p, _ = w.shape
    kron = np.zeros((n_in, p, p, n_out, p, p), w.dtype)
    for row in range(p):
        kron[:, row, :, :, row] = w.transpose(0, 2, 1, 3)
    return kron.reshape(n_in, p * p, n_out * p * p)


def kronecker_backward(dkron: Array, p: int) -> Array:
    """dkron (M, D, J * D) -> dw (M, J, P, P)."""
    blocks = dkron.reshape(len(dkron), p, p, -1, p, p)
    # kron[:, row, :, :, row] = w
    return np.einsum("irkjrq->ijkq", blocks)


class FieldsCache(NamedTuple):
    """A routing over fields; its votes are computed again when they are needed."""

    pose: Array  # (B, H, W, I, P, P)
    a_in: Array  # (B, H, W, I)
    w: Array  # (K, K, I, J, P, P)
    offset: Array | None  # (K, K, P, P)
    fields: Fields
    chunks: list[tuple[slice, EMCache]]  # examples, and their routing without its votes

    @property
    def iterations(self) -> list[EMIteration]:
        """Every iteration, over the whole batch: N = B * Ho * Wo rows, M = K * K * I children."""
        parts = zip(*(em.iterations for _, em in self.chunks), strict=True)
        names = [name for name in EMIteration._fields if name != "error"]
        return [
            EMIteration(error=None, **{name: np.concatenate([getattr(now, name) for now in part]) for name in names})
            for part in parts
        ]

    @property
    def assignments(self) -> list[Array]:
        """r of every iteration's M-step: (B, Ho, Wo, K, K, I, J); a child's entries sum to 1 over all its parents."""
        shape = (len(self.pose), self.fields.height, self.fields.width, *self.w.shape[:4])
        return [now.r.reshape(shape) for now in self.iterations]

    def votes(self, examples: slice = slice(None)) -> Array:
        """Votes (B, Ho, Wo, K, K, I, J, D) of some examples, whole: mind the size."""
        votes = field_votes(self, examples, kronecker(self.w.reshape(-1, *self.w.shape[3:]))).by_child
        shape = (self.fields.height, self.fields.width, *self.w.shape[:4], votes.shape[-1])
        return votes.reshape(-1, *shape).copy()


def field_votes(cache: FieldsCache, examples: slice, kron: Array) -> FieldVotes:
    pose = cache.pose[examples]
    n, height, width, n_in, p, _ = pose.shape
    children = np.take(pose.reshape(n, height * width, n_in * p * p), cache.fields.child, axis=1)
    n_children = cache.fields.child.shape[1] * n_in
    offset = None if cache.offset is None else np.repeat(cache.offset.reshape(-1, p * p), n_in, axis=0)
    return FieldVotes(children.reshape(-1, n_children, p * p), kron, offset)


def conv_em_routing_forward(
    pose: Array,
    a_in: Array,
    w: Array,
    beta_a: Array,
    beta_v: Array,
    lambdas: list[float],
    variance_floor: float = VARIANCE_FLOOR,
    stride: int = 1,
    offset: Array | None = None,
) -> tuple[Array, Array, FieldsCache]:
    """EM routing where a parent's children are the capsules of its receptive field, and w is shared over positions.

    pose (B, H, W, I, P, P), a_in (B, H, W, I), w (K, K, I, J, P, P), beta_a and beta_v (J,), offset (K, K, P, P) added
    to the votes of the children there -> poses (B, Ho, Wo, J, P, P), activations (B, Ho, Wo, J), cache.
    [Hinton 2018, sec. 4]: a child in the middle lies in several fields, and all parents of all of them compete for it.

    The mass in a parent's cost is counted in units of what it would get, were active children shared out evenly. So a
    cost means the same in a layer of 72 children a parent as in one of 128, and one inverse temperature suits all.
    """
    n, height, width, n_in, p, _ = pose.shape
    k, n_out = w.shape[0], w.shape[3]
    fields = receptive_fields(height, width, k, stride)
    n_places, n_children = len(fields.child), k * k * n_in
    mass_unit = float((fields.n_positions > 0).sum() * n_in / (n_places * n_out))
    competition, kron = FieldCompetition(fields), kronecker(w.reshape(n_children, n_out, p, p))
    cache = FieldsCache(pose, a_in, w, offset, fields, [])
    bytes_per_example = 2 * n_places * n_children * n_out * p * p * pose.dtype.itemsize
    step = min(max(1, CHUNK_BYTES // bytes_per_example), max(1, n // MIN_CHUNKS))
    step = math.ceil(n / math.ceil(n / step))  # chunks of one size

    def work(start: int) -> tuple[slice, EMCache]:
        examples = slice(start, start + step)
        children = np.take(a_in[examples].reshape(-1, height * width, n_in), fields.child, axis=1)
        em = em_forward(
            field_votes(cache, examples, kron), competition, children.reshape(-1, n_children),
            beta_a, beta_v, lambdas, variance_floor, p * p, mass_unit,
        )  # fmt: skip
        return examples, em._replace(votes=None)

    cache.chunks.extend(share(work, range(0, n, step)))
    mu, a = (np.concatenate([getattr(em.iterations[-1], name) for _, em in cache.chunks]) for name in ("mu", "a"))
    shape = (n, fields.height, fields.width, n_out)
    return mu.reshape(*shape, p, p), a.reshape(shape), cache


def conv_em_routing_backward(
    dmu: Array, da: Array, cache: FieldsCache, policy: str
) -> tuple[Array, Array, Array, Array, Array]:
    """dmu (B, Ho, Wo, J, P, P), da (B, Ho, Wo, J) -> dpose, da_in, dw, dbeta_a, dbeta_v."""
    pose, a_in, w, _, fields, chunks = cache
    _, height, width, n_in, p, _ = pose.shape
    n_out = w.shape[3]
    kron = kronecker(w.reshape(-1, n_out, p, p))
    dpose, da_in, dw = np.empty_like(pose), np.empty_like(a_in), np.zeros((kron.shape[0], n_out, p, p), w.dtype)
    dbeta_a, dbeta_v = np.zeros(n_out, w.dtype), np.zeros(n_out, w.dtype)

    def to_children(dentries: Array) -> Array:
        """(B * Ho * Wo * K * K, F) -> sums over the positions of each child (B, H, W, F)."""
        # entries = take(children, fields.child)
        entries = dentries.reshape(-1, fields.child.size, dentries.shape[-1])
        nowhere = np.zeros((len(entries), 1, entries.shape[2]), entries.dtype)
        at_child = np.take(np.concatenate([entries, nowhere], axis=1), fields.slot, axis=1)  # (B, slots, H * W, F)
        return at_child.sum(axis=1).reshape(-1, height, width, entries.shape[2])

    def work(chunk: tuple[slice, EMCache]) -> tuple[Array, Array, Array]:
        examples, em = chunk
        votes = field_votes(cache, examples, kron)
        dmu_rows, da_rows = dmu[examples].reshape(-1, n_out, p * p), da[examples].reshape(-1, n_out)
        da_children, dbeta_a_part, dbeta_v_part = em_backward(dmu_rows, da_rows, em._replace(votes=votes), policy)
        dchildren, dkron = votes.finish_backward()
        dpose[examples] = to_children(dchildren.reshape(-1, n_in * p * p)).reshape(dpose[examples].shape)
        da_in[examples] = to_children(da_children.reshape(-1, n_in))
        return kronecker_backward(dkron, p), dbeta_a_part, dbeta_v_part

    for dw_part, dbeta_a_part, dbeta_v_part in share(work, chunks):
        dw += dw_part
        dbeta_a += dbeta_a_part
        dbeta_v += dbeta_v_part
    return dpose, da_in, dw.reshape(w.shape), dbeta_a, dbeta_v


# ----------------------------------------------------------------------------------------------------------------------
# Losses: (loss, gradient with respect to the input), means over the batch
# ----------------------------------------------------------------------------------------------------------------------


def softmax_cross_entropy(scores: Array, labels: Array) -> tuple[float, Array]:
    """scores (B, J), labels (B,) -> mean negative log-likelihood, dscores."""
    rows = np.arange(len(labels))
    shifted = scores - scores.max(axis=1, keepdims=True)
    p = np.exp(shifted)
    total = p.sum(axis=1, keepdims=True)
    p /= total
    loss = float((np.log(total[:, 0]) - shifted[rows, labels]).mean())
    p[rows, labels] -= 1
    return loss, p / len(labels)


def spread_loss(activations: Array, labels: Array, margin: float) -> tuple[float, Array]:
    """Sum over wrong classes of max(0, margin - (a_target - a_i))^2. [Hinton 2018, eq. 3]

    activations (B, J), labels (B,) -> mean loss, dactivations.
    """
    rows = np.arange(len(labels))
    short = np.maximum(0, margin - (activations[rows, labels][:, None] - activations))  # (B, J)
    short[rows, labels] = 0  # the target is no competitor of itself
    da = 2 * short
    da[rows, labels] = -da.sum(axis=1)
    return float((short * short).sum(axis=1).mean()), da / len(labels)


def spread_margin(progress: float) -> float:
    """0.2 at the start of training, 0.9 at its end, linear between. [Hinton 2018, sec. 3]"""
    return 0.2 + 0.7 * progress


# ----------------------------------------------------------------------------------------------------------------------
# Models: init_params(rng) -> params; forward(params, x) -> (scores, cache); backward(dscores, cache) -> (grads, dx)
# ----------------------------------------------------------------------------------------------------------------------

POSE_SCORE = 1 / 16  # weight of |mu|^2 in a class score
ACTIVATION_SCORE = 4.0  # weight of a - 1/2


class Model(NamedTuple):
    """A network as the training loop sees it. ``backward`` gives dx only where ``need_dx`` asks for it."""

    name: str
    init_params: Callable[[np.random.Generator], Params]
    forward: Callable[[Params, Array], tuple[Array, Any]]
    backward: Callable[..., tuple[Params, Array | None]]
    loss: Callable[[Array, Array, float], tuple[float, Array]]  # scores, labels, share of training done
    eval_batch: int = 256  # examples that are classified at a time


class CapsulesCache(NamedTuple):
    conv: ConvCache
    relu: Array
    primary: LinearCache
    a_in: Array  # (B, I)
    votes: VotesCache
    routing: EMCache
    mu: Array  # (B, J, D) class poses
    a: Array  # (B, J) class activations


def capsules_init(rng: np.random.Generator, config: Config) -> Params:
    def normal(std: float, *shape: int) -> Array:
        return rng.normal(0, std, shape).astype(config.dtype)

    def zeros(*shape: int) -> Array:
        return np.zeros(shape, config.dtype)

    fan_in = CONV_KERNEL**2 * config.in_channels
    n_primary_outputs = N_PRIMARY * (POSE_SIDE**2 + 1)
    # Each W_ij starts near the identity, so that a vote starts as the child's own pose.
    route = np.eye(POSE_SIDE, dtype=config.dtype) + normal(0.1, N_PRIMARY, N_CLASSES, POSE_SIDE, POSE_SIDE)
    return {
        "conv1.w": normal(math.sqrt(2 / fan_in), CONV_KERNEL, CONV_KERNEL, config.in_channels, CONV_CHANNELS),
        "conv1.b": zeros(CONV_CHANNELS),
        "primary.w": normal(math.sqrt(1 / config.n_features), config.n_features, n_primary_outputs),
        "primary.b": zeros(n_primary_outputs),
        "class.w": route,
        "class.beta_a": zeros(N_CLASSES),
        "class.beta_v": np.full(N_CLASSES, config.beta_v_init, config.dtype),
    }


def capsules_forward(params: Params, x: Array, config: Config) -> tuple[Array, CapsulesCache]:
    """x (B, 32, 32, C) -> class scores (B, J)."""
    conv, conv_cache = conv2d_forward(x, params["conv1.w"], params["conv1.b"], stride=2, pad=2)  # (B, 16, 16, 16)
    hidden, relu_cache = relu_forward(conv)
    flat = hidden.reshape(len(x), -1)  # (B, 4096)
    primary, primary_cache = linear_forward(flat, params["primary.w"], params["primary.b"])  # (B, I * D + I)
    n_pose = N_PRIMARY * POSE_SIDE**2
    pose = primary[:, :n_pose].reshape(-1, N_PRIMARY, POSE_SIDE, POSE_SIDE)  # (B, I, P, P)
    a_in, _ = sigmoid_forward(primary[:, n_pose:])  # (B, I)
    votes, votes_cache = votes_forward(pose, params["class.w"])  # (B, I, J, D)
    mu, a, routing_cache = em_routing_forward(
        votes, a_in, params["class.beta_a"], params["class.beta_v"], config.lambdas, config.variance_floor
    )
    scores = a if config.loss == "spread" else POSE_SCORE * (mu * mu).sum(axis=2) + ACTIVATION_SCORE * (a - 0.5)
    return scores, CapsulesCache(conv_cache, relu_cache, primary_cache, a_in, votes_cache, routing_cache, mu, a)


def capsules_backward(
    dscores: Array, cache: CapsulesCache, config: Config, need_dx: bool = False
) -> tuple[Params, Array | None]:
    """dscores (B, J) -> gradients under the parameters' names, and dx (B, 32, 32, C) where needed."""
    if config.loss == "spread":
        dmu, da = np.zeros_like(cache.mu), dscores
    else:  # scores = |mu|^2 / 16 + 4 (a - 1/2)
        dmu, da = 2 * POSE_SCORE * dscores[..., None] * cache.mu, ACTIVATION_SCORE * dscores
    dvotes, da_in, dbeta_a, dbeta_v = em_routing_backward(dmu, da, cache.routing, config.em_grad)
    dpose, dclass_w = votes_backward(dvotes, cache.votes)
    dprimary = np.concatenate([dpose.reshape(len(da), -1), sigmoid_backward(da_in, cache.a_in)], axis=1)
    dflat, dprimary_w, dprimary_b = linear_backward(dprimary, cache.primary)
    dconv = relu_backward(dflat.reshape(cache.relu.shape), cache.relu)
    dx, dconv_w, dconv_b = conv2d_backward(dconv, cache.conv, need_dx)
    grads = {
        "conv1.w": dconv_w,
        "conv1.b": dconv_b,
        "primary.w": dprimary_w,
        "primary.b": dprimary_b,
        "class.w": dclass_w,
        "class.beta_a": dbeta_a,
        "class.beta_v": dbeta_v,
    }
    return grads, dx


class ConvCapsConfig(Protocol):
    """What the convolutional capsule network reads of a configuration."""

    @property
    def sizes(self) -> tuple[int, int, int, int]: ...  # A, B, C, D
    @property
    def image_size(self) -> int: ...
    @property
    def in_channels(self) -> int: ...
    @property
    def n_classes(self) -> int: ...
    @property
    def lambdas(self) -> list[float]: ...
    @property
    def variance_floor(self) -> float: ...
    @property
    def beta_v_init(self) -> float: ...
    @property
    def em_grad(self) -> str: ...
    @property
    def loss(self) -> str: ...
    @property
    def dtype(self) -> str: ...


CAPS_KERNEL = 3
CAPS_STRIDES = {"convcaps1": 2, "convcaps2": 1}


def conv_capsnet_grids(image_size: int) -> list[int]:
    """Sides of the grids of conv1 (and the primary capsules), ConvCaps1 and ConvCaps2: 14, 6, 4 for 28 pixels."""
    grids = [(image_size + 2 * 2 - CONV_KERNEL) // 2 + 1]
    for stride in CAPS_STRIDES.values():
        grids.append((grids[-1] - CAPS_KERNEL) // stride + 1)
    return grids


def coordinates(image_size: int, dtype: str) -> Array:
    """What coordinate addition adds to the votes of each position of ConvCaps2: (S, S, P, P).

    The centre of a position's receptive field, in shares of the image: its row goes to the first entry of the vote
    matrix's right-hand column, its column to the second. [Hinton 2018, sec. 4.1] There a pose has its translation, and
    a place is one; the first two entries of the flattened matrix, where other code adds them, belong to its rotation.
    """
    side = conv_capsnet_grids(image_size)[-1]
    centre, spacing = 0.5, 2  # of conv1's first field, in pixels: its kernel of 5 has a padding of 2
    for stride in CAPS_STRIDES.values():
        centre, spacing = centre + spacing * (CAPS_KERNEL - 1) / 2, spacing * stride
    place = (centre + spacing * np.arange(side)) / image_size
    offset = np.zeros((side, side, POSE_SIDE, POSE_SIDE), dtype)
    offset[:, :, 0, -1] = place[:, None]
    offset[:, :, 1, -1] = place
    return offset


class ConvCapsnetCache(NamedTuple):
    conv: ConvCache
    relu: Array
    primary: ConvCache
    a_primary: Array  # (B, H, W, I)
    convcaps1: FieldsCache
    convcaps2: FieldsCache
    routing: FieldsCache  # of the class capsules, whose one field is the whole grid
    mu: Array  # (B, E, D) class poses
    a: Array  # (B, E) class activations


def conv_capsnet_init(rng: np.random.Generator, config: ConvCapsConfig) -> Params:
    def normal(std: float, *shape: int) -> Array:
        return rng.normal(0, std, shape).astype(config.dtype)

    def zeros(*shape: int) -> Array:
        return np.zeros(shape, config.dtype)

    A, B, C, D = config.sizes
    params = {
        "conv1.w": normal(
            math.sqrt(2 / (CONV_KERNEL**2 * config.in_channels)), CONV_KERNEL, CONV_KERNEL, config.in_channels, A
        ),
        "conv1.b": zeros(A),
        "primary.w": normal(math.sqrt(2 / A), 1, 1, A, B * (POSE_SIDE**2 + 1)),
        "primary.b": zeros(B * (POSE_SIDE**2 + 1)),
    }
    k = CAPS_KERNEL
    shapes = {"convcaps1": (k, k, B, C), "convcaps2": (k, k, C, D), "class": (D, config.n_classes)}
    for layer, shape in shapes.items():
        eye = np.eye(POSE_SIDE, dtype=config.dtype)
        params[f"{layer}.w"] = eye + normal(0.1, *shape, POSE_SIDE, POSE_SIDE)
        params[f"{layer}.beta_a"] = zeros(shape[-1])
        # Where all votes agree, sigma_sq is the floor: from here beta_v_init is the cost of an agreement's pose entry.
        agreement = config.beta_v_init - 0.5 * math.log(config.variance_floor)
        params[f"{layer}.beta_v"] = np.full(shape[-1], agreement, config.dtype)
    return params


def conv_capsnet_forward(params: Params, x: Array, config: ConvCapsConfig) -> tuple[Array, ConvCapsnetCache]:
    """x (B, H, W, C) -> class scores (B, E)."""
    conv, conv_cache = conv2d_forward(x, params["conv1.w"], params["conv1.b"], stride=2, pad=2)  # (B, 14, 14, A)
    hidden, relu_cache = relu_forward(conv)
    primary, primary_cache = conv2d_forward(hidden, params["primary.w"], params["primary.b"], stride=1, pad=0)
    n_pose = config.sizes[1] * POSE_SIDE**2
    pose = primary[..., :n_pose].reshape(*primary.shape[:3], -1, POSE_SIDE, POSE_SIDE)  # (B, 14, 14, I, P, P)
    a_primary, _ = sigmoid_forward(primary[..., n_pose:])  # (B, 14, 14, I)

    def route(layer: str, pose: Array, a: Array, w: Array, stride: int, offset: Array | None = None) -> Any:
        betas = params[f"{layer}.beta_a"], params[f"{layer}.beta_v"]
        return conv_em_routing_forward(pose, a, w, *betas, config.lambdas, config.variance_floor, stride, offset)

    pose, a, cache1 = route("convcaps1", pose, a_primary, params["convcaps1.w"], CAPS_STRIDES["convcaps1"])
    pose, a, cache2 = route("convcaps2", pose, a, params["convcaps2.w"], CAPS_STRIDES["convcaps2"])
    offset = coordinates(config.image_size, config.dtype)  # (S, S, P, P)
    class_w = np.broadcast_to(params["class.w"], (*offset.shape[:2], *params["class.w"].shape))  # (S, S, I, E, P, P)
    mu, a, cache3 = route("class", pose, a, class_w, 1, offset)  # (B, 1, 1, E, P, P), (B, 1, 1, E)
    mu, a = mu.reshape(len(x), -1, POSE_SIDE**2), a.reshape(len(x), -1)
    scores = a if config.loss == "spread" else POSE_SCORE * (mu * mu).sum(axis=2) + ACTIVATION_SCORE * (a - 0.5)
    cache = ConvCapsnetCache(conv_cache, relu_cache, primary_cache, a_primary, cache1, cache2, cache3, mu, a)
    return scores, cache


def conv_capsnet_backward(
    dscores: Array, cache: ConvCapsnetCache, config: ConvCapsConfig, need_dx: bool = False, dmu: Array | None = None
) -> tuple[Params, Array | None]:
    """dscores (B, E) and, if wanted, dmu (B, E, D) on the class poses -> gradients under the parameters' names, and dx
    (B, H, W, C) where needed."""
    dmu = np.zeros_like(cache.mu) if dmu is None else dmu
    if config.loss == "spread":
        da = dscores
    else:  # scores = |mu|^2 / 16 + 4 (a - 1/2)
        dmu, da = dmu + 2 * POSE_SCORE * dscores[..., None] * cache.mu, ACTIVATION_SCORE * dscores
    n = len(da)
    dpose, da = dmu.reshape(n, 1, 1, -1, POSE_SIDE, POSE_SIDE), da.reshape(n, 1, 1, -1)
    grads: Params = {}
    for layer, routing in (("class", cache.routing), ("convcaps2", cache.convcaps2), ("convcaps1", cache.convcaps1)):
        dpose, da, dw, dbeta_a, dbeta_v = conv_em_routing_backward(dpose, da, routing, config.em_grad)
        # the class capsules' w is the same at every position
        grads |= {
            f"{layer}.w": dw.sum(axis=(0, 1)) if layer == "class" else dw,
            f"{layer}.beta_a": dbeta_a,
            f"{layer}.beta_v": dbeta_v,
        }
    dgates = sigmoid_backward(da, cache.a_primary)
    dprimary = np.concatenate([dpose.reshape(*dgates.shape[:3], -1), dgates], axis=3)
    dhidden, grads["primary.w"], grads["primary.b"] = conv2d_backward(dprimary, cache.primary)
    assert dhidden is not None
    dconv = relu_backward(dhidden, cache.relu)
    dx, grads["conv1.w"], grads["conv1.b"] = conv2d_backward(dconv, cache.conv, need_dx)
    return grads, dx


class CNNCache(NamedTuple):
    conv: ConvCache
    conv_relu: Array
    hidden: LinearCache
    hidden_relu: Array
    out: LinearCache


def cnn_init(rng: np.random.Generator, config: Config, n_hidden: int) -> Params:
    def normal(std: float, *shape: int) -> Array:
        return rng.normal(0, std, shape).astype(config.dtype)

    fan_in = CONV_KERNEL**2 * config.in_channels
    return {
        "conv1.w": normal(math.sqrt(2 / fan_in), CONV_KERNEL, CONV_KERNEL, config.in_channels, CONV_CHANNELS),
        "conv1.b": np.zeros(CONV_CHANNELS, config.dtype),
        "hidden.w": normal(math.sqrt(2 / config.n_features), config.n_features, n_hidden),
        "hidden.b": np.zeros(n_hidden, config.dtype),
        "out.w": normal(math.sqrt(1 / n_hidden), n_hidden, N_CLASSES),
        "out.b": np.zeros(N_CLASSES, config.dtype),
    }


def cnn_forward(params: Params, x: Array) -> tuple[Array, CNNCache]:
    """x (B, 32, 32, C) -> class scores (B, J)."""
    conv, conv_cache = conv2d_forward(x, params["conv1.w"], params["conv1.b"], stride=2, pad=2)  # (B, 16, 16, 16)
    features, conv_relu = relu_forward(conv)
    hidden, hidden_cache = linear_forward(features.reshape(len(x), -1), params["hidden.w"], params["hidden.b"])
    units, hidden_relu = relu_forward(hidden)
    scores, out_cache = linear_forward(units, params["out.w"], params["out.b"])
    return scores, CNNCache(conv_cache, conv_relu, hidden_cache, hidden_relu, out_cache)


def cnn_backward(dscores: Array, cache: CNNCache, need_dx: bool = False) -> tuple[Params, Array | None]:
    """dscores (B, J) -> gradients under the parameters' names, and dx (B, 32, 32, C) where needed."""
    dunits, dout_w, dout_b = linear_backward(dscores, cache.out)
    dhidden, dhidden_w, dhidden_b = linear_backward(relu_backward(dunits, cache.hidden_relu), cache.hidden)
    dconv = relu_backward(dhidden.reshape(cache.conv_relu.shape), cache.conv_relu)
    dx, dconv_w, dconv_b = conv2d_backward(dconv, cache.conv, need_dx)
    grads = {
        "conv1.w": dconv_w,
        "conv1.b": dconv_b,
        "hidden.w": dhidden_w,
        "hidden.b": dhidden_b,
        "out.w": dout_w,
        "out.b": dout_b,
    }
    return grads, dx


CONV_CNN_STRIDES = {"conv1": 2, "conv2": CAPS_STRIDES["convcaps1"], "conv3": CAPS_STRIDES["convcaps2"]}


def conv_cnn_shapes(config: ConvCapsConfig, n_channels: int) -> dict[str, tuple[int, ...]]:
    """Weights of a CNN on the capsules' own grids: their conv1, then 3x3 convolutions of ``n_channels``, and scores."""
    k, side, A = CAPS_KERNEL, conv_capsnet_grids(config.image_size)[-1], config.sizes[0]
    return {
        "conv1": (CONV_KERNEL, CONV_KERNEL, config.in_channels, A),
        "conv2": (k, k, A, n_channels),
        "conv3": (k, k, n_channels, n_channels),
        "out": (side * side * n_channels, config.n_classes),
    }


def conv_cnn_channels(config: ConvCapsConfig, n_params: int) -> int:
    """The number of channels that comes nearest to ``n_params`` parameters."""

    def difference(n_channels: int) -> int:
        shapes = conv_cnn_shapes(config, n_channels).values()
        return abs(sum(math.prod(shape) + shape[-1] for shape in shapes) - n_params)

    return min(range(1, 1025), key=difference)


def conv_cnn_init(rng: np.random.Generator, config: ConvCapsConfig, n_channels: int) -> Params:
    params: Params = {}
    for name, shape in conv_cnn_shapes(config, n_channels).items():
        gain = 1 if name == "out" else 2  # what a ReLU takes away
        params[f"{name}.w"] = rng.normal(0, math.sqrt(gain / math.prod(shape[:-1])), shape).astype(config.dtype)
        params[f"{name}.b"] = np.zeros(shape[-1], config.dtype)
    return params


class ConvCNNCache(NamedTuple):
    convs: list[ConvCache]
    relus: list[Array]
    out: LinearCache


def conv_cnn_forward(params: Params, x: Array) -> tuple[Array, ConvCNNCache]:
    """x (B, H, W, C) -> class scores (B, E)."""
    convs, relus = [], []
    for name, stride in CONV_CNN_STRIDES.items():
        x, conv_cache = conv2d_forward(
            x, params[f"{name}.w"], params[f"{name}.b"], stride, pad=2 if name == "conv1" else 0
        )
        x, relu_cache = relu_forward(x)
        convs.append(conv_cache)
        relus.append(relu_cache)
    scores, out_cache = linear_forward(x.reshape(len(x), -1), params["out.w"], params["out.b"])
    return scores, ConvCNNCache(convs, relus, out_cache)


def conv_cnn_backward(dscores: Array, cache: ConvCNNCache, need_dx: bool = False) -> tuple[Params, Array | None]:
    """dscores (B, E) -> gradients under the parameters' names, and dx (B, H, W, C) where needed."""
    dx: Array | None
    grads: Params = {}
    dx, grads["out.w"], grads["out.b"] = linear_backward(dscores, cache.out)
    for name, conv, relu in reversed(list(zip(CONV_CNN_STRIDES, cache.convs, cache.relus, strict=True))):
        assert dx is not None
        dconv = relu_backward(dx.reshape(relu.shape), relu)
        dx, grads[f"{name}.w"], grads[f"{name}.b"] = conv2d_backward(dconv, conv, need_dx or name != "conv1")
    return grads, dx


def make_models(config: Config) -> dict[str, Model]:
    """The capsule network and its two baselines, by name, in the order of the result table."""

    def centred(x: Array) -> Array:
        return x - x.dtype.type(config.pixel_offset) if config.pixel_offset else x

    def capsules_loss(scores: Array, labels: Array, progress: float) -> tuple[float, Array]:
        if config.loss == "spread":
            return spread_loss(scores, labels, spread_margin(progress))
        return softmax_cross_entropy(scores, labels)

    def cnn(name: str, n_hidden: int) -> Model:
        return Model(
            name,
            lambda rng: cnn_init(rng, config, n_hidden),
            lambda params, x: cnn_forward(params, centred(x)),
            cnn_backward,
            lambda scores, labels, progress: softmax_cross_entropy(scores, labels),
        )

    dense = config.arch == "dense"
    init, forward = (capsules_init, capsules_forward) if dense else (conv_capsnet_init, conv_capsnet_forward)
    backward = capsules_backward if dense else conv_capsnet_backward
    capsules = Model(
        "capsules",
        lambda rng: init(rng, config),
        lambda params, x: forward(params, centred(x), config),
        lambda dscores, cache, need_dx=False: backward(dscores, cache, config, need_dx),
        capsules_loss,
        eval_batch=256 if dense else 32,
    )
    n_params = count_params(capsules.init_params(np.random.default_rng(0)))
    if dense:
        # Each hidden unit costs its weights from conv1, its bias, and its weights to the classes.
        conv_and_out_bias = CONV_KERNEL**2 * config.in_channels * CONV_CHANNELS + CONV_CHANNELS + N_CLASSES
        matched = cnn("cnn_matched", round((n_params - conv_and_out_bias) / (config.n_features + 1 + N_CLASSES)))
    else:  # so few parameters would make four hidden units; convolutions make a network of them
        n_channels = conv_cnn_channels(config, n_params)
        matched = cnn("cnn_matched", 0)._replace(
            init_params=lambda rng: conv_cnn_init(rng, config, n_channels),
            forward=lambda params, x: conv_cnn_forward(params, centred(x)),
            backward=conv_cnn_backward,
        )
    return {model.name: model for model in (capsules, cnn("cnn", 64), matched)}


# ----------------------------------------------------------------------------------------------------------------------
# Optimiser, evaluation, training loop
# ----------------------------------------------------------------------------------------------------------------------

# Not the biases, and not what EM routing works with.
DECAYED = {"conv1.w", "conv2.w", "conv3.w", "primary.w", "hidden.w", "out.w"}


def predict_scores(model: Model, params: Params, images: Array, batch_size: int | None = None) -> Array:
    """Class scores (N, J) of images (N, H, W, C), cropped as for a test."""
    dtype, batch_size = params["conv1.w"].dtype, batch_size or model.eval_batch
    batches = (images[i : i + batch_size] for i in range(0, len(images), batch_size))
    return np.concatenate([model.forward(params, crop(x, None).astype(dtype, copy=False))[0] for x in batches])


class Labelled(Protocol):
    """A set of images as it is evaluated."""

    @property
    def images(self) -> Array: ...  # (N, H, W, C)

    @property
    def labels(self) -> Array: ...  # (N,)


def evaluate(model: Model, params: Params, split: Labelled) -> float:
    """Share of a set that is classified rightly."""
    return float((predict_scores(model, params, split.images).argmax(axis=1) == split.labels).mean())


def true_class_share(model: Model, params: Params, split: Split) -> float:
    """Share of the children's mass that routing gives the true class in the end, mean over a set; evenly it is 1/5."""
    shares = []
    for start in range(0, len(split.labels), model.eval_batch):
        labels = split.labels[start : start + model.eval_batch]
        x = crop(split.images[start : start + model.eval_batch], None).astype(params["conv1.w"].dtype, copy=False)
        mass = model.forward(params, x)[1].routing.iterations[-1].mass  # (B, J)
        shares.append(mass[np.arange(len(x)), labels] / mass.sum(axis=1))
    return float(np.concatenate(shares).mean())


def evaluate_views(model: Model, params: Params, data: Data) -> dict[str, float]:
    return {
        "familiar_accuracy": evaluate(model, params, data.familiar),
        "held_out_accuracy": evaluate(model, params, data.held_out),
    }


def init_state(model: Model, config: Any) -> TrainState:
    """Fresh parameters; their draws depend on the seed and the model's name alone."""
    return TrainState(model.name, model.init_params(generator(config.seed, Stream.INIT, *model.name.encode())))


def train(
    model: Model, config: Config, data: Data, state: TrainState, callback: Callback | None = None
) -> dict[str, list[float]]:
    """Train ``state`` in place to ``config.n_epochs``, from the middle of an epoch too, and return its history.

    ``callback(state, epoch has ended)`` is called before the first step and after every one. Raises UserError where the
    loss stops being finite.
    """
    n, n_steps = len(data.train.labels), steps_per_epoch(config, data) * config.n_epochs
    if callback and state.step == 0:
        callback(state, True)
    while state.step < n_steps:
        started = time.perf_counter()
        epoch, position = divmod(state.step, steps_per_epoch(config, data))
        batch = permutation(n, config.seed, epoch)[position * config.batch_size :][: config.batch_size]
        x = crop(data.train.images[batch], generator(config.seed, Stream.SHUFFLE, epoch, position))
        progress = state.step / max(1, n_steps - 1)
        with np.errstate(all="ignore"):  # a loss that is not finite is reported in words
            scores, cache = model.forward(state.params, x.astype(config.dtype, copy=False))
            loss, dscores = model.loss(scores, data.train.labels[batch], progress)
            grads, _ = model.backward(dscores, cache)
            adamw_step(state, [grads], config.lr, config.weight_decay, DECAYED)
        require_finite(state, loss, steps_per_epoch(config, data))
        state.add({"train_loss": loss}, weight=len(batch))
        epoch_ended = state.step % steps_per_epoch(config, data) == 0
        if epoch_ended:
            state.end_epoch(n, evaluate_views(model, state.params, data))
        state.seconds += time.perf_counter() - started
        if callback:
            callback(state, epoch_ended)
    return state.history


def steps_per_epoch(config: Config, data: Data) -> int:
    return math.ceil(len(data.train.labels) / config.batch_size)


# ----------------------------------------------------------------------------------------------------------------------
# A run from beginning to end
# ----------------------------------------------------------------------------------------------------------------------


def fresh_states(config: Config) -> dict[str, TrainState]:
    return {name: init_state(model, config) for name, model in make_models(config).items()}


def load_checkpoint(path: Path) -> tuple[Config, dict[str, TrainState]]:
    return read_checkpoint(path, EXPERIMENT, Config, fresh_states)


def train_all(
    config: Config,
    data: Data,
    *,
    names: Collection[str] = MODEL_NAMES,
    files: Files = NO_FILES,
    callback: Callback | None = None,
) -> dict[str, TrainState]:
    """Train the named models one after the other, and return their states."""
    states = fresh_states(config)
    n_steps = steps_per_epoch(config, data) * config.n_epochs
    with Session(EXPERIMENT, config, states, files, n_steps, callback) as session:
        for name, model in make_models(config).items():
            if name in names:
                train(model, config, data, states[name], session.after_step)
    return {name: state for name, state in states.items() if name in names}


def make_result(config: Config, states: dict[str, TrainState], data: Data) -> dict[str, Any]:
    """The JSON of a run; accuracies are fractions, those of the last epoch."""
    models = {}
    for name, state in states.items():
        familiar, held_out = state.history["familiar_accuracy"][-1], state.history["held_out_accuracy"][-1]
        models[name] = {
            "n_params": count_params(state.params),
            "familiar_accuracy": familiar,
            "held_out_accuracy": held_out,
            "drop": familiar - held_out,
            "train_seconds": round(state.seconds, 3),
        }
    if "capsules" in states:
        capsules = make_models(config)["capsules"]
        models["capsules"]["true_class_share"] = true_class_share(capsules, states["capsules"].params, data.familiar)
    return result_document(
        EXPERIMENT, config, config.dataset, models, states, _n_workers if config.arch == "conv" else None,
        "held_out_accuracy", 1 / N_CLASSES,
    )  # fmt: skip


def run(config: Config, files: Files = NO_FILES, **options: Any) -> dict[str, Any]:
    """Data, three trainings, result. The options are those of ``train_all``."""
    files.require_checkpoint(EXPERIMENT)
    data = make_data(config)
    return make_result(config, train_all(config, data, files=files, **options), data)


def describe(config: Config) -> str:
    """One line: what is held out."""
    train_range = format_range(getattr(config, f"train_{config.held_out}s"))
    test_range = format_range(getattr(config, f"test_{config.held_out}s"))
    return f"{config.dataset}: {config.held_out}s {test_range} held out, {train_range} trained on"


def format_table(result: dict[str, Any]) -> str:
    """The result table."""
    lines = [f"{'model':<12} {'familiar':>8} {'held out':>8} {'drop':>6} {'parameters':>10} {'seconds':>8}"]
    lines += [
        f"{name:<12} {m['familiar_accuracy']:8.3f} {m['held_out_accuracy']:8.3f} {m['drop']:6.3f}"
        f" {m['n_params']:10,} {m['train_seconds']:8.2f}"
        for name, m in result["models"].items()
    ]
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------------
# A person's own pictures
# ----------------------------------------------------------------------------------------------------------------------


def read_picture(path: Path, config: Config) -> Array:
    """A picture file -> (1, 32 or 48, same, C), prepared as the data set is.

    Any size: it is padded to a square with the colour of its border and resized. For voxels a bright background is
    taken for a picture with dark ink and inverted. For smallNORB a picture twice as wide as high is a stereo pair; of
    another one both eyes see the same. Raises UserError where it cannot be read.
    """
    from PIL import Image

    grey = Image.fromarray(np.rint(255 * read_grey(path)).astype(np.uint8))
    width, height = grey.size
    stereo = config.dataset == "smallnorb" and width == 2 * height
    eyes = [grey.crop((0, 0, height, height)), grey.crop((height, 0, width, height))] if stereo else [grey]

    def square(eye: Image.Image, side: int) -> Array:
        pixels = np.asarray(eye)
        width, height = (max(1, round(n * side / max(eye.size))) for n in eye.size)
        canvas = Image.new("L", (side, side), int(border_level(pixels)))
        canvas.paste(eye.resize((width, height), Image.Resampling.BOX), ((side - width) // 2, (side - height) // 2))
        return np.asarray(canvas)

    if config.dataset == "smallnorb":
        pair = [square(eye, 2 * NORB_SIDE) for eye in eyes]
        return shrink(np.stack([pair[0], pair[-1]])[None])
    image = square(eyes[0], IMAGE_SIZE).astype(np.float32) / 255
    return (1 - image if border_level(image) > 0.5 else image)[None, :, :, None]


def predict(checkpoint: Path, pictures: list[Path], asked: Config, given: Collection[str] = ()) -> str:
    """A table: for each picture the class that each model names, and the capsule network's class activations. Flags
    that were ``given`` must be those of the checkpoint."""
    config, states = load_checkpoint(checkpoint)
    check_same(checkpoint, config, asked, given)
    if "capsules" not in states:
        raise UserError(f"{checkpoint} has no capsule network")
    models = make_models(config)
    images = np.concatenate([read_picture(path, config) for path in pictures])
    scores = {name: predict_scores(models[name], state.params, images) for name, state in states.items()}
    x = crop(images, None).astype(config.dtype)
    activations = models["capsules"].forward(states["capsules"].params, x)[1].a
    return prediction_table(pictures, config.classes, scores, activations)


# ----------------------------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------------------------

MAX_IMAGES = 50_000  # of one voxel set, which is drawn at once


def angle_range(low: float, high: float) -> Callable[[str], Range]:
    def parse(text: str) -> Range:
        try:
            start, stop = (float(part) for part in text.split(":"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not START:STOP in degrees, such as 0:150") from None
        if not (low <= start <= high and low <= stop <= high):
            raise argparse.ArgumentTypeError(f"{text} is not between {low:g} and {high:g} degrees")
        if start > stop:
            raise argparse.ArgumentTypeError(f"{text} runs backwards: START must not be above STOP")
        if stop - start > 360:
            raise argparse.ArgumentTypeError(f"{text} is more than a full circle")
        return start, stop

    return parse


def format_range(angles: Range) -> str:
    return format_value(angles, "Range")


def overlap(a: Range, b: Range, period: float | None = None) -> bool:
    """Whether two closed ranges share an angle, modulo ``period`` where one is given."""
    if period is None:
        return a[0] <= b[1] and b[0] <= a[1]
    return (b[0] - a[0]) % period <= a[1] - a[0] or (a[0] - b[0]) % period <= b[1] - b[0]


# fmt: off
def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that make up a Config; the scripts that draw figures have them too."""
    azimuths, elevations, count = angle_range(-360, 720), angle_range(-90, 90), whole_number(1, 1000)
    positive = number(0, 1000, above=True)
    add = add_flags(parser, "data", Config)
    add("dataset", ("voxels", "smallnorb"), "drawn voxel objects, or the smallNORB files")
    add("data_dir", non_empty, "folder of the six official smallNORB files, gzipped or not", "DIR", "none")
    add("train_azimuths", azimuths, "degrees", "A:B", "0:150, smallnorb 300:400")
    add("test_azimuths", azimuths, "degrees, held out", "A:B", "200:330, smallnorb 60:280")
    add(
        "train_elevations",
        elevations,
        "with --test-elevations: hold out elevation instead",
        "A:B",
        "azimuth is held out",
    )
    add("test_elevations", elevations, "such as 10:35 and 40:70", "A:B", "azimuth is held out")
    add("n_train_views", count, "azimuths in training", default="6")
    add("n_test_views", count, "azimuths held out", default="6")
    add("n_elev", count, "elevations in each set", default="3")
    add("n_per_combo", count, "images of each training view", default="5")
    add("pixel_offset", number(-10, 10), "subtracted from every pixel before a network sees it, in all models", "X")
    add = add_flags(parser, "capsules", Config)
    add("arch", ("dense", "conv"), "eight capsules from a dense layer, or the paper's grids of capsules")
    add(
        "sizes",
        list_of(whole_number(1, 512), 4, "32,8,8,8"),
        "with --arch conv: channels of conv1, capsule types of each grid",
        "A,B,C,D",
        "16,4,8,8",
    )
    add("em_iters", whole_number(1, 20), "routing iterations")
    add("em_grad", ("exact", "stop"), "gradient through all iterations, or the last M-step with assignments constant")
    add("em_lambda", positive, "inverse temperature of the last iteration", "X")
    add(
        "lambda_schedule",
        ("constant", "linear", "exponential"),
        "inverse temperature of iteration t of T: X, X t / T, or X (1 - 0.95^t)",
    )
    add("variance_floor", number(0, 1e6, above=True), "added to every variance of a routing iteration", "X")
    add(
        "beta_v_init",
        number(-10, 10),
        "beta_v before training; below -log(variance floor) / 2, votes that agree"
        " activate; --arch conv counts it from there",
        "X",
    )
    add = add_flags(parser, "training", Config)
    add("seed", whole_number(0, 2**32 - 1), "of data noise, initial weights and order")
    add("n_epochs", whole_number(1, 100_000), "passes over the training set")
    add("batch_size", whole_number(1, 4096), "images of a step")
    add("lr", number(0, 10, above=True), "Adam's learning rate", "X")
    add(
        "weight_decay",
        number(0, 100),
        "a step shrinks the weights of conv1 and the dense layers by lr * X, in all models",
        "X",
    )
    add(
        "loss",
        ("cross-entropy", "spread"),
        "of the capsules: on the score, or the paper's on the activations; the CNNs always have cross-entropy",
    )
    add("dtype", ("float32", "float64"), "of all arithmetic")
    parser.add_argument(
        "--threads", type=whole_number(1, 1024), metavar="N", help="BLAS threads; default: what numpy's BLAS chooses"
    )
# fmt: on


def config_from_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Config:
    """Check the flags against each other; a usage error (status 2) where they do not fit together."""
    voxels = args.dataset == "voxels"
    if voxels and args.data_dir is not None:
        parser.error("argument --data-dir: needs --dataset smallnorb")
    if not voxels and args.data_dir is None:
        parser.error("argument --dataset: smallnorb needs --data-dir DIR, the folder of the six official files")
    if args.sizes is not None and args.arch == "dense":
        parser.error("argument --sizes: needs --arch conv")
    view_counts = {k: getattr(args, k) for k in ("n_train_views", "n_test_views", "n_elev", "n_per_combo")}
    given = {k: v for k, v in view_counts.items() if v is not None}
    if not voxels and given:
        parser.error(f"argument --{next(iter(given)).replace('_', '-')}: applies to --dataset voxels alone")

    if (args.train_elevations is None) != (args.test_elevations is None):
        parser.error("arguments --train-elevations and --test-elevations: give both or none")
    if args.train_elevations is not None:
        if args.test_azimuths is not None:
            parser.error(
                "argument --test-azimuths: elevation is held out already, and both sets share --train-azimuths"
            )
        if overlap(args.train_elevations, args.test_elevations):
            parser.error("argument --test-elevations: overlaps --train-elevations")
        elevations = args.train_elevations, args.test_elevations
        train_azimuths = test_azimuths = args.train_azimuths or (0.0, 360.0)
    else:
        elevations = (Config.train_elevations if voxels else (30.0, 70.0),) * 2
        train_azimuths = args.train_azimuths or ((0.0, 150.0) if voxels else (300.0, 400.0))
        test_azimuths = args.test_azimuths or ((200.0, 330.0) if voxels else (60.0, 280.0))
        if overlap(train_azimuths, test_azimuths, period=360):
            parser.error(
                f"argument --test-azimuths: {format_range(test_azimuths)} overlaps the training range"
                f" {format_range(train_azimuths)} (modulo 360)"
            )
    worked_out = {
        "train_azimuths": train_azimuths,
        "test_azimuths": test_azimuths,
        "train_elevations": elevations[0],
        "test_elevations": elevations[1],
        **{k: getattr(Config, k) if v is None else v for k, v in view_counts.items()},
        "sizes": args.sizes or Config.sizes,
    }
    config = Config(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Config)} | worked_out)
    n_per_elevation = max(config.n_train_views * max(config.n_per_combo, 2), config.n_test_views * 2)
    n_images = N_CLASSES * config.n_elev * n_per_elevation
    if n_images > MAX_IMAGES:
        flags = ", ".join("--" + k.replace("_", "-") for k in view_counts)
        parser.error(f"arguments {flags}: a set of {n_images:,} images is above the limit of {MAX_IMAGES:,}")
    return config


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        description="Train matrix capsules and two CNNs on a range of viewpoints, test them on another.",
        epilog="With no flags: ten epochs on voxel objects, seed 0, azimuths 0 to 150 against 200 to 330 degrees.",
    )
    add_config_flags(parser)
    add_file_flags(parser, MODEL_NAMES, eval_only=False)
    return parser


def threads_for(config: Config, n: int | None) -> contextlib.AbstractContextManager[None]:
    """The threads of a run: the BLAS's own, or as many workers for capsules that work in chunks."""
    return blas_threads(n) if config.arch == "dense" else worker_threads(n or blas_name()[1])


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    check_file_flags(parser, args)
    config = config_from_args(parser, args)

    def body() -> None:
        if args.predict:
            print_result(predict(args.checkpoint, args.predict, config, args.given))
            return
        require_writable(args.out_json, args.checkpoint)
        with threads_for(config, args.threads):
            result = run(config, Files.from_args(args), names=args.models)
        result["command"] = recorded_command(EXPERIMENT, argv)
        head = f"{describe(config)}; seed {config.seed}, {config.n_epochs} epochs"
        report_result(args.out_json, result, f"{head}\n{format_table(result)}")

    return exit_status(body)


if __name__ == "__main__":
    sys.exit(main())
