#!/usr/bin/env python3
"""Convolutional matrix capsules and what an attacker can do to them, in numpy, every gradient by hand.

Claims reproduced: [Hinton 2018] G. Hinton, S. Sabour, N. Frosst, "Matrix capsules with EM routing", ICLR 2018. The
network of its figure 1, whose capsules have the same transformation matrices at every position, reads handwritten
digits (section 5 reports 0.44 % test errors on MNIST); and it is harder to fool by small changes of an image, made
along the gradient of the loss, than a convolutional network is (section 6 and figure 3, on smallNORB).

    image            (B, 28, 28, 1)                                    28x28 digits, 10 classes
    conv1 + ReLU     (B, 14, 14, channels)                             5x5, stride 2, padding 2
    primary capsules (B, 14, 14, types0, 4, 4), (B, 14, 14, types0)    1x1: poses and activations
    ConvCaps1        (B, 6, 6, types1, 4, 4), (B, 6, 6, types1)        3x3, stride 2, EM routing
    ConvCaps2        (B, 4, 4, types2, 4, 4), (B, 4, 4, types2)        3x3, stride 1, EM routing
    class capsules   (B, 10, 4, 4), (B, 10)                            1x1, EM routing, with coordinate addition

Sizes: channels of conv1, capsule types of the primary layer, ConvCaps1, ConvCaps2. Here 32, 4, 4, 8; all 32 in the
paper. The baseline is a CNN with convolutions of the same sides and strides instead of the capsules, and with as many
channels as give it the same number of parameters; or, with --cnn paper, that of the paper's section 5, which has 4.2
million parameters and dropout.

Deviations from the paper: narrower layers and two iterations of EM routing; a floor under the variances; a parent's
cost is divided by the mass that even assignments would give it; the inverse temperature is the same in all iterations.
The transformation matrices start near the identity, and beta_v where agreement activates: from there the training
starts without dead capsules.

The images are digits (MNIST, or strokes drawn by this project), or views of objects of which some are held out: voxel
objects, shapes and smallNORB, as in smallnorb_novel_viewpoint.py, and toys, a drawn set in the files of smallNORB.
Views have 32x32 pixels and 5 classes; the grids then have sides of 16, 7 and 5. Or the images are a person's own, of
any classes, from a folder (docs/your_own_images.md).

Run it (both models, seed 0, and both attacks; then novel viewpoints):

    python conv_matrix_capsules.py --attack fgsm,iterated
    python conv_matrix_capsules.py --dataset voxels
"""

from __future__ import annotations

import support.startup  # noqa: F401  before the others, for Ctrl-C

# isort: split

import argparse
import dataclasses
import functools
import itertools
import math
import sys
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

import multimnist_capsnet as multimnist
import smallnorb_novel_viewpoint as viewpoint
from data.labelled_pictures import read_sets
from data.pictures import BYTES, border_level, grey_square, read_grey, read_strokes, square_of_set
from fast import field_em
from fast.optimizers import adamw_step
from fast.workers import Workers, default_threads
from support.console import print_message
from support.files import CACHE_DIR, UserError
from support.optimizers import TrainState, count_params
from support.results import model_metrics, result_document, run_script
from support.tables import attack_lines, confusion_lines, confusion_matrix, describe_classes, prediction_table, seed_of

from smallnorb_novel_viewpoint import (  # isort: skip
    POSE_SIDE, Array, ConvCache, EMCache, LinearCache, Params, Viewpoints, VotesCache, capsules_loss,
    class_scores_backward, class_scores_forward, conv2d_backward, conv2d_forward, em_routing_backward,
    em_routing_forward, linear_backward, linear_forward, relu_backward, relu_forward, sigmoid_backward,
    sigmoid_forward, softmax_cross_entropy, votes_backward, votes_forward,
)  # fmt: skip
from support.flags import (  # isort: skip
    Parser, add_file_flags, add_flags, angle_range, flag_of, format_range, list_of, names_of, non_empty, number,
    overlap, values_of, whole_number,
)  # fmt: skip
from support.run import (  # isort: skip
    NO_FILES, Callback, Files, Session, Stream, check_same, generator, init_state, of_models, permutation,
    read_checkpoint, require_finite,
)  # fmt: skip

# Dimension letters
#   B  images of a batch              N       images of a set                 C       channels of an image
#   H, W    rows and columns of a map         Ho, Wo  the same of the map above it
#   K  side of a kernel, of a field   I       capsule types below             J       capsule types above
#   P  side of a pose matrix (4)      D       pose entries, P * P             E       class capsules (= classes)
#   L  receptive fields, B * Ho * Wo  M       children of a field, K * K * I  S       side of the grid of ConvCaps2
#   T  iterations of EM routing
# A child is a capsule of the layer below, a parent one of the layer above; the children of a parent are its field's.

EXPERIMENT = "conv_matrix_capsules"
MODEL_NAMES = ("capsules", "cnn")
ATTACKS = ("fgsm", "iterated")
CONV_KERNEL = 5
CAPS_KERNEL = 3
CAPS_STRIDES = {"convcaps1": 2, "convcaps2": 1}


# ----------------------------------------------------------------------------------------------------------------------
# Configuration: user inputs only
# ----------------------------------------------------------------------------------------------------------------------


DIGIT_SETS = ("auto", "mnist", "strokes")
VIEW_SETS = ("voxels", "shapes", "smallnorb", "toys")
OBJECT_SETS = ("smallnorb", "toys")  # in the files of smallNORB
OWN_SET = "images"
DEFAULT_SIDES = (20, 32)  # of the own set's images, in pixels; the nearest to their size is taken
OWN_EPOCHS = 30  # by default, of the own set, which is mostly small


@dataclasses.dataclass(frozen=True)
class Config(Viewpoints):
    """One run. Comments give the paper's values where the defaults differ. [Hinton 2018, sec. 4 and 5]

    Those of VIEW_FIELDS are for VIEW_SETS. Of ``n_train`` and ``n_test`` None means all.
    """

    dataset: str = "auto"  # smallNORB
    data_dir: str | None = None  # type: ignore[assignment]
    n_test_elev: int | None = None  # as n_elev
    pixel_offset: float = 0.0
    hold_out: str = "viewpoints"
    n_epochs: int = 5
    n_train: int | None = None
    n_test: int | None = None
    n_val: int | None = None
    n_val_objects: int | None = None
    shift: int = 0
    sizes: tuple[int, int, int, int] = (32, 4, 4, 8)  # 32, 32, 32, 32; or 64, 8, 16, 16
    em_iters: int = 2  # 3, the best of its table 1 by a small margin
    em_grad: str = "exact"
    variance_floor: float = 0.5  # 0
    beta_v_init: float = -0.2  # not given; added to -log(variance_floor) / 2: below 0, votes that agree activate
    loss: str = "spread"
    cnn: str = "matched"  # paper
    batch_size: int = 32
    lr: float = 0.015
    cnn_lr: float = 3e-3
    lr_schedule: str = "linear"
    weight_decay: float = 0.0
    dtype: str = "float32"
    plain: bool = False
    attack: tuple[str, ...] = ()
    epsilons: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
    attack_steps: int = 10
    n_attack: int = 200
    side: int | None = None  # of own images; None, until they are read: the nearest that DEFAULT_SIDES allow
    colour: str = "grey"
    class_names: tuple[str, ...] = ()  # of own images, from their files; no flag sets it
    pictures: str = ""  # a checksum of own images of which a part was drawn for the test; no flag sets it

    flags: ClassVar[dict[str, str]] = {
        "side": "--image-size", "class_names": "the classes", "pictures": "pictures with the checksum",
    }  # fmt: skip

    @property
    def has_own_images(self) -> bool:
        return self.dataset == OWN_SET

    @property
    def has_views(self) -> bool:
        return self.dataset in VIEW_SETS

    @property
    def holds_out(self) -> bool:
        """Whether there are viewpoints that are tested and not trained on."""
        return self.has_views and self.hold_out == "viewpoints"

    @property
    def classes(self) -> tuple[str, ...]:
        if self.has_own_images:
            return self.class_names
        return super().classes if self.has_views else multimnist.DIGITS

    @property
    def n_classes(self) -> int:
        return len(self.classes)

    @property
    def image_size(self) -> int:
        if self.has_own_images and self.side:
            return self.side
        return viewpoint.IMAGE_SIZE if self.has_views else multimnist.DIGIT_SIDE

    @property
    def in_channels(self) -> int:
        return super().in_channels if self.has_views else 3 if self.has_own_images and self.colour == "rgb" else 1

    @property
    def headline(self) -> str:
        return "held_out_accuracy" if self.holds_out else "accuracy"

    @property
    def pixel_range(self) -> tuple[float, float]:
        """Least and greatest pixel value of an attacked image; standardised ones have no bounds."""
        if self.standardize == "image":
            return -math.inf, math.inf
        return 0.0 - self.pixel_offset, 1.0 - self.pixel_offset

    @property
    def free_to_change(self) -> set[str]:
        """Fields in which a resumed run may differ."""
        return {"data_dir", "attack", "epsilons", "attack_steps", "n_attack"}


# ----------------------------------------------------------------------------------------------------------------------
# Data
# ----------------------------------------------------------------------------------------------------------------------


class Examples(NamedTuple):
    """A labelled set of images."""

    images: Array  # (N, H, W, C) float32
    labels: Array  # (N,)
    angles: Array | None = None  # (N,) azimuths, or elevations where they are held out, of sets of views
    dropout: Array | None = None  # (N, 1024) in the training of the paper's CNN: 0 for a unit that is left out, else 2

    def part(self, start: int, stop: int) -> Examples:
        return self.at(slice(start, stop))

    def at(self, chosen: Array | slice) -> Examples:
        angles, dropout = (None if x is None else x[chosen] for x in (self.angles, self.dropout))
        return Examples(self.images[chosen], self.labels[chosen], angles, dropout)


class Data(NamedTuple):
    name: str  # "mnist", "strokes", "custom", "voxels", "shapes", "smallnorb", "toys" or "images"
    train: Examples
    test: Examples  # for views: other images from the range of the training
    held_out: Examples | None = None  # viewpoints outside of that range; None where none are held out
    classes: tuple[str, ...] = ()  # of own images
    pictures: str = ""  # as in Config


def subset(examples: Examples, n: int | None, rng: np.random.Generator | None = None) -> Examples:
    """``n`` of the images (None: all), drawn by ``rng`` or, without it, evenly spaced."""
    n_all = len(examples.labels)
    if n is None or n >= n_all:
        return examples
    return examples.at(np.linspace(0, n_all - 1, n).astype(np.intp) if rng is None else rng.permutation(n_all)[:n])


def read_own_images(config: Config, classes: Sequence[str]) -> tuple[tuple[str, ...], list[Examples], str]:
    """The classes, training and test set, and ``Config.pictures``; see ``make_data``."""
    if not config.data_dir:
        raise UserError("--dataset images needs --data-dir DIR, the folder of the images")
    path, side, rng = Path(config.data_dir), config.side or DEFAULT_SIDES, generator(config.seed, Stream.DATA, 2)
    levels = {BYTES: (0.0, 255.0)} if path.is_dir() and not multimnist.has_mnist_files(path) else None
    found = read_sets(path, side, config.in_channels, rng, classes, levels)
    pictures = f"{zlib.crc32(found.train.images.tobytes()):08x}" if found.is_drawn else ""
    return found.classes, [Examples(x * np.float32(1 / 255), y) for x, y in (found.train, found.test)], pictures


def make_views(config: Config) -> Sequence[viewpoint.Split]:
    """Training, test and held-out sets; without --hold-out viewpoints, the two halves of smallNORB."""
    if config.holds_out:
        return viewpoint.make_data(config, config.n_val_objects)
    folder = viewpoint.norb_folder(config)
    halves = viewpoint.smallnorb_halves(config.n_val_objects)
    return [viewpoint.read_smallnorb(folder, half.subset, None, config.standardize, half.objects) for half in halves]


def make_data(config: Config, classes: Sequence[str] = ()) -> Data:
    """Raises UserError where files are missing or damaged. ``classes``: those of a trained network, among which all own
    images must be."""
    rng, pictures = generator(config.seed, Stream.DATA, 1), ""
    if config.has_own_images:
        name, (classes, sets, pictures) = OWN_SET, read_own_images(config, classes)
    elif config.has_views:
        name, angles = config.dataset, f"{config.held_out}s"
        sets = [Examples(split.images, split.labels, getattr(split, angles)) for split in make_views(config)]
    else:
        folder = Path(config.data_dir) if config.data_dir else None
        source = multimnist.resolve_dataset(config.dataset, generator(config.seed, Stream.DATA), folder)
        multimnist.require_digits(source, folder)
        source = multimnist.hold_out(source, config.n_val)
        pairs = (source.train_images, source.train_labels), (source.test_images, source.test_labels)
        name, sets = source.name, [Examples(x[..., None] * np.float32(1 / 255), y.astype(np.intp)) for x, y in pairs]
    if config.pixel_offset:
        sets = [part._replace(images=part.images - np.float32(config.pixel_offset)) for part in sets]
    train, *tests = sets
    familiar, *held_out = (subset(test, config.n_test) for test in tests)
    train = subset(train, config.n_train, rng)
    return Data(name, train, familiar, held_out[0] if held_out else None, tuple(classes), pictures)


def resolved(config: Config, data: Data) -> Config:
    """``config`` with what the files decide: the set that ``auto`` found; the classes of own images, and their size."""
    config = multimnist.resolve_auto(config, data.name)
    if not config.has_own_images:
        return config
    side = data.train.images.shape[1]
    return dataclasses.replace(config, class_names=data.classes, side=side, pictures=data.pictures)


def augment(config: Config, images: Array, rng: np.random.Generator) -> Array:
    """A training batch (B, H, W, C), each image shifted at random by up to ``config.shift`` pixels on each axis;
    those of smallNORB and toys are first cropped, and their contrast and brightness changed, at random."""
    if config.has_views:
        images = viewpoint.crop(images, rng)
    B, side, m = len(images), images.shape[1], config.shift
    if not m:
        return images
    # The border is black, or the mean of a standardised image.
    padded = np.pad(images, ((0, 0), (m, m), (m, m), (0, 0)), constant_values=-config.pixel_offset)
    row, column = rng.integers(0, 2 * m + 1, (2, B, 1)) + np.arange(side)  # each (B, H)
    return padded[np.arange(B)[:, None, None], row[:, :, None], column[:, None, :]]


def prepared(images: Array, config: Config) -> Array:
    """Images (N, H, W, C) of a data set as the networks get them in a test: views cropped, of the configured dtype."""
    return (viewpoint.crop(images, None) if config.has_views else images).astype(config.dtype, copy=False)


# ----------------------------------------------------------------------------------------------------------------------
# EM routing over receptive fields [Hinton 2018, sec. 4]
#
# A field's parents get votes from its children alone, and fit them as in smallnorb_novel_viewpoint.py, with a field in
# the place of an image. One thing is different: a child has more parents than those of one field. They are all types at
# all positions whose field contains the child, and the E-step divides by the sum over all of them.
# ----------------------------------------------------------------------------------------------------------------------


class Fields(NamedTuple):
    """Receptive fields of K x K positions, ``stride`` apart, on a map of H x W, without padding."""

    size: tuple[int, int]  # H, W
    k: int
    stride: int

    @property
    def out(self) -> tuple[int, int]:
        """Ho, Wo"""
        H, W = self.size
        return (H - self.k) // self.stride + 1, (W - self.k) // self.stride + 1


def gather(x: Array, fields: Fields) -> Array:
    """x (B, H, W, ...) -> the entries of every field (B, Ho, Wo, K, K, ...)."""
    (Ho, Wo), k, stride = fields.out, fields.k, fields.stride
    out = np.empty((len(x), Ho, Wo, k, k, *x.shape[3:]), x.dtype)
    for i, j in itertools.product(range(k), range(k)):
        out[:, :, :, i, j] = x[:, i : i + stride * Ho : stride, j : j + stride * Wo : stride]
    return out


def scatter(x: Array, fields: Fields, combine: np.ufunc = np.add) -> Array:
    """x (B, Ho, Wo, K, K, ...) -> (B, H, W, ...), combined over all fields that contain a position. With np.add it is
    the backward pass of ``gather``."""
    (Ho, Wo), k, stride = fields.out, fields.k, fields.stride
    out = np.full((len(x), *fields.size, *x.shape[5:]), 0 if combine is np.add else -np.inf, x.dtype)
    for i, j in itertools.product(range(k), range(k)):
        window = out[:, i : i + stride * Ho : stride, j : j + stride * Wo : stride]  # (B, Ho, Wo, ...)
        combine(window, x[:, :, :, i, j], out=window)
    return out


def over_parents(fields: Fields, x: Array, combine: np.ufunc) -> Array:
    """x (L, M, J), a number for each child and each parent of a field -> (L, M, 1), combined over all of the child's
    parents: all types at all positions whose field contains it."""
    L, M, _ = x.shape
    by_field = combine.reduce(x, axis=2).reshape(-1, *fields.out, fields.k, fields.k, M // fields.k**2)
    return gather(scatter(by_field, fields, combine), fields).reshape(L, M, 1)


class FieldRoutingCache(NamedTuple):
    fields: Fields
    n_in: int  # I
    shared: bool  # whether w is (1, 1, I, J, P, P)
    votes: VotesCache
    mass_unit: float
    em: EMCache  # a field in place of an image, with its M children and J parents

    @property
    def assignments(self) -> list[Array]:
        """r of every M-step: (B, Ho, Wo, K, K, I, J). A child's sum to 1 over all its parents."""
        shape = (-1, *self.fields.out, self.fields.k, self.fields.k, self.n_in)
        return [step.r.reshape(*shape, step.r.shape[2]) for step in self.em.m_steps]

    @property
    def mu(self) -> list[Array]:
        """Poses of every M-step: (B, Ho, Wo, J, D)."""
        return [step.mu.reshape(-1, *self.fields.out, *step.mu.shape[1:]) for step in self.em.m_steps]

    @property
    def a(self) -> list[Array]:
        """Activations of every M-step: (B, Ho, Wo, J)."""
        return [step.a.reshape(-1, *self.fields.out, step.a.shape[1]) for step in self.em.m_steps]


def field_routing_forward(
    pose: Array, a_in: Array, w: Array, beta_a: Array, beta_v: Array, n_iters: int, variance_floor: float, k: int,
    stride: int = 1, offset: Array | None = None,
) -> tuple[Array, Array, FieldRoutingCache]:  # fmt: skip
    """EM routing where a parent's children are the capsules of its K x K field, and w is the same at all positions.

    pose (B, H, W, I, P, P), a_in (B, H, W, I), w (K, K, I, J, P, P), or (1, 1, I, J, P, P) for the same matrices at all
    positions of a field, beta_a and beta_v (J,), offset (K, K, P, P) added to the votes of the children there
    -> poses (B, Ho, Wo, J, P, P), activations (B, Ho, Wo, J), cache.

    ``variance_floor`` is added to sigma_sq. It keeps the logarithm and the division finite where all votes agree. The
    mass in a parent's cost is divided by its mean over all parents if all children are active and assigned evenly
    (``mass_unit``), so that a cost means the same in layers with different numbers of children and parents.
    """
    (I, P), J, fields = pose.shape[3:5], w.shape[3], Fields(pose.shape[1:3], k, stride)
    poses = gather(pose, fields).reshape(-1, k * k * I, P, P)  # (L, M, P, P)
    a_fields = gather(a_in, fields).reshape(poses.shape[:2])  # (L, M)
    w_fields = np.broadcast_to(w, (k, k, I, J, P, P)).reshape(-1, J, P, P)  # (M, J, P, P)
    votes, votes_cache = votes_forward(poses, w_fields)  # (L, M, J, D)
    if offset is not None:
        votes += np.repeat(offset.reshape(-1, 1, P * P), I, axis=0)  # (M, 1, D)
    over = functools.partial(over_parents, fields)
    r = np.ones(votes.shape[:3], votes.dtype)
    r /= over(r, np.add)  # 1 / the number of the child's parents
    mass_unit = float(r.sum(axis=1).mean())
    # cost / mass_unit with beta_a is cost with mass_unit beta_a, at an inverse temperature of 1 / mass_unit
    mu, a, em = em_routing_forward(
        votes, a_fields, mass_unit * beta_a, beta_v, [1 / mass_unit] * n_iters, variance_floor, r, over
    )
    shape = (len(pose), *fields.out, J)
    cache = FieldRoutingCache(fields, I, w.shape[0] < k, votes_cache, mass_unit, em)
    return mu.reshape(*shape, P, P), a.reshape(shape), cache


def field_routing_backward(
    dmu: Array, da: Array, cache: FieldRoutingCache, policy: str
) -> tuple[Array, Array, Array, Array, Array]:
    """dmu (B, Ho, Wo, J, P, P), da (B, Ho, Wo, J) -> dpose, da_in, dw, dbeta_a, dbeta_v, of the inputs' shapes.

    policy "exact": the gradient of what the forward pass computes, through every iteration.
    policy "stop": that of the last M-step alone, with r, the mass, and the mean inside sigma_sq held constant.
    """
    fields, I, shared, votes_cache, mass_unit, em = cache
    (B, Ho, Wo, J, P, _), k = dmu.shape, fields.k
    # mu, a = em_routing(votes, a_fields, mass_unit beta_a, beta_v)
    dvotes, da_fields, dbeta_a, dbeta_v = em_routing_backward(dmu.reshape(-1, J, P * P), da.reshape(-1, J), em, policy)
    # votes = poses @ w_fields + offset
    dposes, dw_fields = votes_backward(dvotes, votes_cache)
    dw = dw_fields.reshape(k, k, I, J, P, P)
    if shared:
        dw = dw.sum(axis=(0, 1), keepdims=True)
    # poses, a_fields = gather(pose), gather(a_in)
    dpose = scatter(dposes.reshape(B, Ho, Wo, k, k, I, P, P), fields)
    da_in = scatter(da_fields.reshape(B, Ho, Wo, k, k, I), fields)
    return dpose, da_in, dw, mass_unit * dbeta_a, dbeta_v


class Routing(NamedTuple):
    """A pair of the signatures of ``field_routing_forward`` and ``field_routing_backward``, with these parameters of a
    layer besides w."""

    forward: Callable[..., tuple[Array, Array, Any]]
    backward: Callable[..., tuple[Array, ...]]
    parameters: tuple[str, ...] = ("beta_a", "beta_v")


PLAIN = Routing(field_routing_forward, field_routing_backward)
FAST = Routing(field_em.field_routing_forward, field_em.field_routing_backward)


# ----------------------------------------------------------------------------------------------------------------------
# The network: init(rng) -> params; forward(params, x) -> (scores, cache); backward(dscores, cache) -> (grads, dx)
# ----------------------------------------------------------------------------------------------------------------------


def grid_sides(image_size: int) -> list[int]:
    """Sides of the grids of conv1 (and the primary capsules), ConvCaps1 and ConvCaps2: 14, 6, 4 for 28 pixels."""
    sides = [(image_size + 2 * 2 - CONV_KERNEL) // 2 + 1]
    for stride in CAPS_STRIDES.values():
        sides.append((sides[-1] - CAPS_KERNEL) // stride + 1)
    return sides


def coordinates(image_size: int, dtype: str) -> Array:
    """What coordinate addition adds to the votes of each position of ConvCaps2: (S, S, P, P).

    The row of the centre of a position's receptive field, as a fraction of the image, is added to the first entry of
    the right-hand column of the vote matrix, its column to the second. [Hinton 2018, sec. 4] That column holds a
    pose's translation. Some implementations use the first two entries of the flattened matrix, which belong to the
    rotation.
    """
    side = grid_sides(image_size)[-1]
    centre, spacing = 0.5, 2  # of conv1's first field, in pixels: its kernel of 5 has a padding of 2
    for stride in CAPS_STRIDES.values():
        centre, spacing = centre + spacing * (CAPS_KERNEL - 1) / 2, spacing * stride
    position = (centre + spacing * np.arange(side)) / image_size
    offset = np.zeros((side, side, POSE_SIDE, POSE_SIDE), dtype)
    offset[:, :, 0, -1] = position[:, None]
    offset[:, :, 1, -1] = position
    return offset


PART = 8  # the most images of a part of a batch, on which one thread works
PART_BYTES = 16 << 20  # the most bytes of a part's votes and their squares in one layer; more would leave the cache


def part_size(config: Config) -> int:
    """Number of images in a part of a batch, at least one."""
    _, types0, types1, types2 = config.sizes
    _, side1, side2 = grid_sides(config.image_size)
    fields = CAPS_KERNEL**2 * max(side1**2 * types0 * types1, side2**2 * types1 * types2)
    n_votes = POSE_SIDE**2 * max(fields, side2**2 * types2 * config.n_classes)
    return max(1, min(PART, PART_BYTES // (2 * n_votes * np.dtype(config.dtype).itemsize)))


class ConvCapsnetCache(NamedTuple):
    conv: ConvCache
    relu: Array
    primary: ConvCache
    a_primary: Array  # (B, H, W, types0)
    convcaps1: Any  # FieldRoutingCache, or that of another pair
    convcaps2: Any
    routing: Any  # of the class capsules, whose one field is the whole grid
    mu: Array  # (B, E, D) class poses
    a: Array  # (B, E) class activations


def conv_capsnet_init(rng: np.random.Generator, config: Config) -> Params:
    def gaussian(std: float, *shape: int) -> Array:
        return rng.normal(0, std, shape).astype(config.dtype)

    channels, types0, types1, types2 = config.sizes
    k, fan_in, n_primary = CAPS_KERNEL, CONV_KERNEL**2 * config.in_channels, types0 * (POSE_SIDE**2 + 1)
    params = {
        "conv1.w": gaussian(math.sqrt(2 / fan_in), CONV_KERNEL, CONV_KERNEL, config.in_channels, channels),
        "conv1.b": np.zeros(channels, config.dtype),
        "primary.w": gaussian(math.sqrt(2 / channels), 1, 1, channels, n_primary),
        "primary.b": np.zeros(n_primary, config.dtype),
    }
    # Where all votes agree, sigma_sq is the floor, and the cost of a pose entry is then beta_v_init per unit of mass.
    beta_v = config.beta_v_init - 0.5 * math.log(config.variance_floor)
    shapes = {"convcaps1": (k, k, types0, types1), "convcaps2": (k, k, types1, types2)}
    for layer, shape in {**shapes, "class": (types2, config.n_classes)}.items():
        eye = np.eye(POSE_SIDE, dtype=config.dtype)
        params[f"{layer}.w"] = eye + gaussian(0.1, *shape, POSE_SIDE, POSE_SIDE)
        params[f"{layer}.beta_a"] = np.zeros(shape[-1], config.dtype)
        params[f"{layer}.beta_v"] = np.full(shape[-1], beta_v, config.dtype)
    return params


def conv_capsnet_forward(
    params: Params, x: Array, config: Config, routing: Routing = FAST
) -> tuple[Array, ConvCapsnetCache]:
    """x (B, H, W, C) -> class scores (B, E)."""

    def route(
        layer: str, pose: Array, a: Array, k: int, stride: int, offset: Array | None = None
    ) -> tuple[Array, Array, Any]:
        w = params["class.w"][None, None] if layer == "class" else params[f"{layer}.w"]  # (K, K, I, J, P, P)
        others = [params[f"{layer}.{name}"] for name in routing.parameters]
        return routing.forward(pose, a, w, *others, config.em_iters, config.variance_floor, k, stride, offset)

    conv, conv_cache = conv2d_forward(x, params["conv1.w"], params["conv1.b"], stride=2, pad=2)  # (B, 14, 14, channels)
    hidden, relu_cache = relu_forward(conv)
    primary, primary_cache = conv2d_forward(hidden, params["primary.w"], params["primary.b"], stride=1, pad=0)
    n_pose = config.sizes[1] * POSE_SIDE**2
    pose = primary[..., :n_pose].reshape(*primary.shape[:3], -1, POSE_SIDE, POSE_SIDE)  # (B, 14, 14, types0, P, P)
    a_primary, _ = sigmoid_forward(primary[..., n_pose:])  # (B, 14, 14, types0)
    k, (stride1, stride2) = CAPS_KERNEL, CAPS_STRIDES.values()
    pose, a, cache1 = route("convcaps1", pose, a_primary, k, stride1)  # (B, 6, 6, types1, P, P), (B, 6, 6, types1)
    pose, a, cache2 = route("convcaps2", pose, a, k, stride2)  # (B, 4, 4, types2, P, P), (B, 4, 4, types2)
    offset = coordinates(config.image_size, config.dtype)
    mu, a, cache3 = route("class", pose, a, len(offset), 1, offset)  # (B, 1, 1, E, P, P), (B, 1, 1, E)
    mu, a = mu.reshape(len(x), -1, POSE_SIDE**2), a.reshape(len(x), -1)
    scores = class_scores_forward(mu, a, config.loss)
    cache = ConvCapsnetCache(conv_cache, relu_cache, primary_cache, a_primary, cache1, cache2, cache3, mu, a)
    return scores, cache


def conv_capsnet_backward(
    dscores: Array, cache: ConvCapsnetCache, config: Config, routing: Routing = FAST, need_dx: bool = False
) -> tuple[Params, Array | None]:
    """dscores (B, E) -> gradients under the parameters' names, and dx (B, H, W, C) where needed."""
    dmu, da = class_scores_backward(dscores, cache.mu, config.loss)
    n = len(da)
    dpose, da = dmu.reshape(n, 1, 1, -1, POSE_SIDE, POSE_SIDE), da.reshape(n, 1, 1, -1)
    grads: Params = {}
    for layer, routed in (("class", cache.routing), ("convcaps2", cache.convcaps2), ("convcaps1", cache.convcaps1)):
        dpose, da, dw, *others = routing.backward(dpose, da, routed, config.em_grad)
        grads |= {f"{layer}.{name}": grad for name, grad in zip(routing.parameters, others, strict=True)}
        grads[f"{layer}.w"] = dw[0, 0] if layer == "class" else dw
    # pose, a_primary = primary[..., :n_pose], sigmoid(primary[..., n_pose:])
    dlogits = sigmoid_backward(da, cache.a_primary)
    dprimary = np.concatenate([dpose.reshape(*dlogits.shape[:3], -1), dlogits], axis=3)
    dhidden, grads["primary.w"], grads["primary.b"] = conv2d_backward(dprimary, cache.primary)
    assert dhidden is not None
    dconv = relu_backward(dhidden, cache.relu)
    dx, grads["conv1.w"], grads["conv1.b"] = conv2d_backward(dconv, cache.conv, need_dx)
    return grads, dx


# ----------------------------------------------------------------------------------------------------------------------
# The CNN: convolutions of the same sides and strides
# ----------------------------------------------------------------------------------------------------------------------

CONV_CNN_STRIDES = {"conv1": 2, "conv2": CAPS_STRIDES["convcaps1"], "conv3": CAPS_STRIDES["convcaps2"]}


def conv_cnn_shapes(config: Config, n_channels: int) -> dict[str, tuple[int, ...]]:
    """Weights of a CNN on the capsules' own grids: their conv1, then 3x3 convolutions of ``n_channels``, and scores."""
    k, side, channels = CAPS_KERNEL, grid_sides(config.image_size)[-1], config.sizes[0]
    return {
        "conv1": (CONV_KERNEL, CONV_KERNEL, config.in_channels, channels),
        "conv2": (k, k, channels, n_channels),
        "conv3": (k, k, n_channels, n_channels),
        "out": (side * side * n_channels, config.n_classes),
    }


def conv_cnn_channels(config: Config, n_params: int) -> int:
    """The number of channels that comes nearest to ``n_params`` parameters."""

    def difference(n_channels: int) -> int:
        shapes = conv_cnn_shapes(config, n_channels).values()
        return abs(sum(math.prod(shape) + shape[-1] for shape in shapes) - n_params)

    return min(range(1, 1025), key=difference)


def cnn_init(rng: np.random.Generator, shapes: dict[str, tuple[int, ...]], dtype: str) -> Params:
    params: Params = {}
    for name, shape in shapes.items():
        gain = 1 if name == "out" else 2  # a ReLU halves the second moment
        params[f"{name}.w"] = rng.normal(0, math.sqrt(gain / math.prod(shape[:-1])), shape).astype(dtype)
        params[f"{name}.b"] = np.zeros(shape[-1], dtype)
    return params


class ConvCNNCache(NamedTuple):
    convs: list[ConvCache]
    relus: list[Array]
    out: LinearCache


def conv_cnn_forward(params: Params, x: Array) -> tuple[Array, ConvCNNCache]:
    """x (B, H, W, C) -> class scores (B, E)."""
    convs, relus = [], []
    for name, stride in CONV_CNN_STRIDES.items():
        pad = 2 if name == "conv1" else 0
        x, conv_cache = conv2d_forward(x, params[f"{name}.w"], params[f"{name}.b"], stride, pad)
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


# ----------------------------------------------------------------------------------------------------------------------
# The paper's CNN: two convolutions with max pooling, a hidden layer with dropout [Hinton 2018, sec. 5]
# ----------------------------------------------------------------------------------------------------------------------

N_HIDDEN = 1024


def paper_cnn_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """4,253,349 parameters for stereo pairs of 32x32 pixels. The paper does not give the padding of the convolutions:
    with 2 pixels they add up to its 4.2 million."""
    k, side = CONV_KERNEL, config.image_size // 2 // 2
    return {
        "conv1": (k, k, config.in_channels, 32),
        "conv2": (k, k, 32, 64),
        "hidden": (side * side * 64, N_HIDDEN),
        "out": (N_HIDDEN, config.n_classes),
    }


class PaperCNNCache(NamedTuple):
    layers: list[tuple[ConvCache, Any, Array]]  # caches of both convolutions, of their pooling and ReLU
    hidden: LinearCache
    relu: Array  # (B, 1024)
    dropout: Array | None
    out: LinearCache


def paper_cnn_forward(params: Params, x: Array, dropout: Array | None) -> tuple[Array, PaperCNNCache]:
    """x (B, H, W, C), dropout (B, 1024) or None in a test -> class scores (B, E)."""
    layers = []
    for name in ("conv1", "conv2"):
        conv, conv_cache = conv2d_forward(x, params[f"{name}.w"], params[f"{name}.b"], stride=1, pad=2)
        pooled, pool_cache = multimnist.max_pool_forward(conv)
        x, relu = relu_forward(pooled)  # (B, H // 2, W // 2, C)
        layers.append((conv_cache, pool_cache, relu))
    hidden, hidden_cache = linear_forward(x.reshape(len(x), -1), params["hidden.w"], params["hidden.b"])
    relu, _ = relu_forward(hidden)
    units = relu if dropout is None else relu * dropout
    scores, out_cache = linear_forward(units, params["out.w"], params["out.b"])
    return scores, PaperCNNCache(layers, hidden_cache, relu, dropout, out_cache)


def paper_cnn_backward(dscores: Array, cache: PaperCNNCache, need_dx: bool = False) -> tuple[Params, Array | None]:
    """dscores (B, E) -> gradients under the parameters' names, and dx (B, H, W, C) where needed."""
    dx: Array | None
    grads: Params = {}
    dunits, grads["out.w"], grads["out.b"] = linear_backward(dscores, cache.out)
    drelu = dunits if cache.dropout is None else dunits * cache.dropout
    dx, grads["hidden.w"], grads["hidden.b"] = linear_backward(relu_backward(drelu, cache.relu), cache.hidden)
    for name, (conv_cache, pool_cache, relu) in zip(("conv2", "conv1"), reversed(cache.layers), strict=True):
        assert dx is not None
        dconv = multimnist.max_pool_backward(relu_backward(dx.reshape(relu.shape), relu), pool_cache)
        dx, grads[f"{name}.w"], grads[f"{name}.b"] = conv2d_backward(dconv, conv_cache, need_dx or name != "conv1")
    return grads, dx


# ----------------------------------------------------------------------------------------------------------------------
# The models as the training loop sees them
# ----------------------------------------------------------------------------------------------------------------------


class Model(NamedTuple):
    name: str
    init_params: Callable[[np.random.Generator], Params]
    forward: Callable[..., tuple[Array, Any]]  # params, x, dropout=None -> scores (B, E), cache
    backward: Callable[..., tuple[Params, Array | None]]  # dscores, cache, need_dx=False -> grads, dx
    loss: Callable[[Array, Array, float], tuple[float, Array]]  # scores, labels, progress -> mean loss, dscores
    part_size: int = PART  # number of images in a part of a training batch


def make_capsules(config: Config, routing: Routing | None = None) -> Model:
    """``routing``: another pair than that of the configuration."""
    pair = routing or (PLAIN if config.plain else FAST)
    return Model(
        "capsules",
        lambda rng: conv_capsnet_init(rng, config),
        lambda params, x, dropout=None: conv_capsnet_forward(params, x, config, pair),
        lambda dscores, cache, need_dx=False: conv_capsnet_backward(dscores, cache, config, pair, need_dx),
        functools.partial(capsules_loss, config.loss),
        part_size(config),
    )


def make_models(config: Config) -> dict[str, Model]:
    """The capsule network and its baseline, by name, in the order of the result table."""
    capsules = make_capsules(config)
    n_channels = conv_cnn_channels(config, count_params(capsules.init_params(np.random.default_rng(0))))
    cnn = Model(
        "cnn",
        lambda rng: cnn_init(rng, conv_cnn_shapes(config, n_channels), config.dtype),
        lambda params, x, dropout=None: conv_cnn_forward(params, x),
        conv_cnn_backward,
        lambda scores, labels, progress: softmax_cross_entropy(scores, labels),
        part_size(config),
    )
    if config.cnn == "paper":
        cnn = cnn._replace(
            init_params=lambda rng: cnn_init(rng, paper_cnn_shapes(config), config.dtype),
            forward=lambda params, x, dropout=None: paper_cnn_forward(params, x, dropout),
            backward=paper_cnn_backward,
            part_size=2 * PART,  # each part has its own 4.2 million gradients
        )
    return {"capsules": capsules, "cnn": cnn}


# ----------------------------------------------------------------------------------------------------------------------
# Evaluation and training loop. A batch is divided into parts of a fixed size, on which threads work: no number depends
# on how many threads there are.
# ----------------------------------------------------------------------------------------------------------------------


def in_parts(work: Callable[[Array, Array], Array], examples: Examples, config: Config, workers: Workers) -> Array:
    """work(images, labels) of each part of the examples, as the networks are given them in a test -> (N, ...)."""
    images, size = prepared(examples.images, config), part_size(config)

    def part(start: int) -> Array:
        return work(images[start : start + size], examples.labels[start : start + size])

    return np.concatenate(workers.map(part, range(0, len(images), size)))


def predict_scores(model: Model, params: Params, examples: Examples, config: Config, workers: Workers) -> Array:
    """Class scores (N, E)."""
    return in_parts(lambda x, _: model.forward(params, x)[0], examples, config, workers)


def accuracy(model: Model, params: Params, examples: Examples, config: Config, workers: Workers) -> float:
    """Fraction of a set of examples that is classified correctly."""
    scores = predict_scores(model, params, examples, config, workers)
    return float((scores.argmax(axis=1) == examples.labels).mean())


def evaluate(model: Model, params: Params, data: Data, config: Config, workers: Workers) -> dict[str, float]:
    """Accuracy on the test images and, where there are viewpoints, on those held out."""
    if data.held_out is None:
        return {"accuracy": accuracy(model, params, data.test, config, workers)}
    sets = {"familiar_accuracy": data.test, "held_out_accuracy": data.held_out}
    return {metric: accuracy(model, params, examples, config, workers) for metric, examples in sets.items()}


# Weights that decay: no bias, and no parameter of EM routing
DECAYED = {"conv1.w", "conv2.w", "conv3.w", "primary.w", "hidden.w", "out.w"}


def learning_rate(config: Config, model: str, progress: float) -> float:
    """The scheduled rate at ``progress`` through the training, 0 to 1, with a linear warm-up over the first hundredth
    from a tenth."""
    factor = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    lr = config.cnn_lr if model == "cnn" else config.lr
    return lr * factor[config.lr_schedule] * min(1.0, 0.1 + 90 * progress)


def steps_per_epoch(config: Config, data: Data) -> int:
    return math.ceil(len(data.train.labels) / config.batch_size)


def training_batch(data: Data, config: Config, step: int) -> Examples:
    """The batch of a step, which depends on the seed and the step alone."""
    epoch, position = divmod(step, steps_per_epoch(config, data))
    chosen = permutation(len(data.train.labels), config.seed, epoch)[position * config.batch_size :]
    chosen = chosen[: config.batch_size]
    rng = generator(config.seed, Stream.SHUFFLE, epoch, position)
    images = augment(config, data.train.images[chosen], rng).astype(config.dtype, copy=False)
    dropout = None
    if config.cnn == "paper":
        dropout = 2 * rng.integers(0, 2, (len(chosen), N_HIDDEN)).astype(config.dtype)
    return Examples(images, data.train.labels[chosen], dropout=dropout)


def loss_and_grads(
    model: Model, progress: float, params: Params, part: Examples, n: int
) -> tuple[dict[str, float], Params]:
    """The terms that a part of a batch of ``n`` examples adds to the mean loss and to its gradients."""
    scores, cache = model.forward(params, part.images, part.dropout)
    loss, dscores = model.loss(scores, part.labels, progress)
    weight = len(part.labels) / n
    return {"train_loss": weight * loss}, model.backward(weight * dscores, cache)[0]


def train(
    model: Model, config: Config, data: Data, state: TrainState, workers: Workers, callback: Callback | None = None
) -> dict[str, list[float]]:
    """Train ``state`` in place to ``config.n_epochs``, from the middle of an epoch too, and return its history.

    ``callback(state, epoch has ended)`` is called before the first step and after every one. Raises UserError where the
    loss stops being finite.
    """
    n, per_epoch = len(data.train.labels), steps_per_epoch(config, data)
    n_steps = per_epoch * config.n_epochs
    if callback and state.step == 0:
        callback(state, True)
    while state.step < n_steps:
        started = time.perf_counter()
        batch, progress = training_batch(data, config, state.step), state.step / max(1, n_steps - 1)
        with np.errstate(all="ignore"):  # a loss that is not finite is reported in words
            losses, grads = workers.gradients(
                functools.partial(loss_and_grads, model, progress), state.params, batch, model.part_size
            )
            adamw_step(state, grads, learning_rate(config, model.name, progress), config.weight_decay, DECAYED)
        require_finite(state, losses["train_loss"], per_epoch)
        state.add(losses, weight=len(batch.labels))
        state.seconds += time.perf_counter() - started
        epoch_ended = state.step % per_epoch == 0
        if epoch_ended:
            state.end_epoch(n, evaluate(model, state.params, data, config, workers))
        if callback:
            callback(state, epoch_ended)
    return state.history


# ----------------------------------------------------------------------------------------------------------------------
# Attacks: small changes of an image along the sign of the loss's gradient
# ----------------------------------------------------------------------------------------------------------------------


Loss = Callable[[Array, Array], tuple[float, Array]]


def log_odds_cross_entropy(activations: Array, labels: Array) -> tuple[float, Array]:
    """Cross-entropy of a softmax over log(a / (1 - a)): activations (B, E) -> mean loss, dactivations.

    The spread loss and its gradient are zero for an image that is classified correctly by more than the margin, and any
    gradient through a saturated sigmoid is almost zero. An attack along such gradients fails although the network may
    not be robust. This loss inverts the sigmoid and has no margin.
    """
    least = max(1e-15, float(np.finfo(activations.dtype).eps))
    a = np.clip(activations, least, 1 - least)
    loss, dodds = softmax_cross_entropy(np.log(a) - np.log1p(-a), labels)
    return loss, dodds / (a * (1 - a))


def attack_losses(model: Model, config: Config) -> dict[str, Loss]:
    """The losses that attacks raise, by suffix of their names: that of the training at its end and, where it is the
    spread loss, the cross-entropy of log-odds. The CNN has no sigmoid, and its own loss under both names."""
    losses: dict[str, Loss] = {"": lambda scores, labels: model.loss(scores, labels, 1.0)}
    if config.loss == "spread":
        losses["_log_odds"] = log_odds_cross_entropy if model.name == "capsules" else losses[""]
    return losses


def attack_kinds(model: Model, config: Config) -> dict[str, tuple[Loss, int]]:
    """Loss and number of steps of each attack. ``fgsm`` is that of [Hinton 2018, sec. 6 and fig. 3], in one step along
    the gradient of the training's loss; here pixels stay in their range. Its accuracy may rise with epsilon."""
    steps = {"fgsm": 1, "iterated": config.attack_steps}
    losses = attack_losses(model, config)
    return {name + suffix: (loss, steps[name]) for suffix, loss in losses.items() for name in config.attack}


def image_gradient(model: Model, params: Params, images: Array, labels: Array, loss: Loss) -> Array:
    """Gradient of the loss with respect to the images (B, H, W, C)."""
    scores, cache = model.forward(params, images)
    dx = model.backward(loss(scores, labels)[1], cache, need_dx=True)[1]
    assert dx is not None
    return dx


def attack(
    model: Model, params: Params, images: Array, labels: Array, loss: Loss, epsilon: float,
    n_steps: int = 1, pixel_range: tuple[float, float] = (0.0, 1.0),
) -> Array:  # fmt: skip
    """Images (B, H, W, C) that raise the loss, no pixel of which is moved by more than ``epsilon`` or out of its range.

    One step is the fast gradient sign method (I. Goodfellow et al., ICLR 2015, sec. 4); several, of epsilon / n_steps
    each, are the basic iterative method (A. Kurakin et al., ICLR 2017 workshops, sec. 2.2).
    """
    low, high = np.maximum(images - epsilon, pixel_range[0]), np.minimum(images + epsilon, pixel_range[1])
    x = images
    for _ in range(n_steps):
        step = epsilon / n_steps * np.sign(image_gradient(model, params, x, labels, loss))
        x = np.clip(x + step, low, high)
    return x


def robustness(model: Model, params: Params, examples: Examples, config: Config, workers: Workers) -> dict[str, Any]:
    """Accuracy under each attack of ``config``, by epsilon; ``worst_case``, in which an image is wrong at an epsilon if
    any of the attacks misleads the model with that epsilon or a smaller one; and the fraction of images on which an
    attack can have no effect, as the gradient is zero at every pixel."""

    def correct(loss: Loss, epsilon: float, n_steps: int, x: Array, labels: Array) -> Array:
        if epsilon:
            x = attack(model, params, x, labels, loss, epsilon, n_steps, config.pixel_range)
        return model.forward(params, x)[0].argmax(axis=1) == labels

    def has_no_gradient(loss: Loss, x: Array, labels: Array) -> Array:
        return (image_gradient(model, params, x, labels, loss) == 0).all(axis=(1, 2, 3))

    def each(test: Callable[..., Array], *args: Any) -> Array:
        return in_parts(functools.partial(test, *args), examples, config, workers)

    epsilons, kinds = (0.0, *config.epsilons), attack_kinds(model, config)
    answers = {  # (epsilons, N) each; what has two names, as all attacks on the CNN may, is done once
        (loss, n_steps): np.array([each(correct, loss, epsilon, n_steps) for epsilon in epsilons])
        for loss, n_steps in dict.fromkeys(kinds.values())
    }
    right = {kind: answers[attacked] for kind, attacked in kinds.items()}
    right["worst_case"] = np.logical_and.accumulate(np.all(list(right.values()), axis=0))
    found: dict[str, Any] = {
        kind: {f"{epsilon:g}": float(now.mean()) for epsilon, now in zip(epsilons, by_epsilon, strict=True)}
        for kind, by_epsilon in right.items()
    }
    losses = attack_losses(model, config)
    unmoved = {loss: float(each(has_no_gradient, loss).mean()) for loss in dict.fromkeys(losses.values())}
    return found | {"zero_gradient" + suffix: unmoved[loss] for suffix, loss in losses.items()}


def attack_all(config: Config, states: dict[str, TrainState], data: Data, threads: int = 1) -> dict[str, Any]:
    """White-box attacks on every model, as ``config`` names them: in float64, in which gradients seldom round to zero,
    and with the exact gradient through EM, whatever the training used."""
    if not config.attack:
        return {}
    config = dataclasses.replace(config, dtype="float64", em_grad="exact")
    examples = subset(data.test, config.n_attack)
    found = {}
    with Workers(threads, config.dtype) as workers:
        for name, model in make_models(config).items():
            if name in states:
                params = {key: p.astype(np.float64) for key, p in states[name].params.items()}
                found[name] = robustness(model, params, examples, config, workers)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Inside the capsule network, for the figures and for --predict
# ----------------------------------------------------------------------------------------------------------------------


def class_capsules(params: Params, images: Array, config: Config) -> tuple[Array, Array]:
    """Images (N, H, W, C) of a data set -> poses (N, E, D) and activations (N, E) of the class capsules."""
    model, poses, activations, size = make_capsules(config), [], [], part_size(config)
    for start in range(0, len(images), size):
        cache = model.forward(params, prepared(images[start : start + size], config))[1]
        poses.append(cache.mu)
        activations.append(cache.a)
    return np.concatenate(poses), np.concatenate(activations)


class ClassRouting(NamedTuple):
    """T iterations of routing between the M capsules of ConvCaps2, at all positions, and the class capsules."""

    votes: Array  # (N, M, E, D)
    a_in: Array  # (N, M) the children's activations
    r: Array  # (T, N, M, E) assignments that an iteration's M-step used; the sum over E is 1
    mu: Array  # (T, N, E, D)
    a: Array  # (T, N, E)

    @property
    def distances(self) -> Array:
        """Of every vote from its class capsule's mean after each iteration, in pose units: (T, N, M, E)."""
        return np.stack([np.linalg.norm(self.votes - mu[:, None], axis=-1) for mu in self.mu])

    @property
    def weights(self) -> Array:
        """Assignment times activation, (T, N, M, E)."""
        return self.r * self.a_in[:, :, None]


def class_routing(params: Params, images: Array, config: Config) -> ClassRouting:
    """The class layer's routing of a few images (N, H, W, C), every iteration."""
    routing = make_capsules(config, PLAIN).forward(params, prepared(images, config))[1].routing
    n, n_classes = len(images), config.n_classes
    return ClassRouting(
        routing.em.m_steps[0].votes,
        routing.em.m_steps[0].a_in,
        np.stack([r.reshape(n, -1, n_classes) for r in routing.assignments]),
        np.stack([mu.reshape(n, n_classes, -1) for mu in routing.mu]),
        np.stack([a.reshape(n, n_classes) for a in routing.a]),
    )


# ----------------------------------------------------------------------------------------------------------------------
# A run from beginning to end
# ----------------------------------------------------------------------------------------------------------------------


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
    n_steps = steps_per_epoch(config, data) * config.n_epochs
    with Session(EXPERIMENT, config, states, files, n_steps, callback) as session:
        for name, model in make_models(config).items():
            if name in names:
                with Workers(threads, config.dtype) as workers:
                    train(model, config, data, states[name], workers, session.after_step)
    return {name: state for name, state in states.items() if name in names}


def run(config: Config, files: Files = NO_FILES, threads: int = 1, **options: Any) -> dict[str, Any]:
    """Data, trainings, attacks, result. The options are those of ``train_all``."""
    data = make_data(config)
    config = resolved(config, data)
    if config.has_own_images and not files.quiet:
        text = describe_classes(class_counts(config, data), config.image_size, config.colour)
        print_message(text.splitlines()[0].rstrip(":"))
    states = train_all(config, data, threads=threads, files=files, **options)
    return make_result(config, data, states, attack_all(config, states, data, threads), threads)


VIEW_FIELDS = {field.name for field in dataclasses.fields(Viewpoints)} - {"dataset", "data_dir", "seed"}
VIEW_FIELDS |= {"n_test_elev"}
SPLIT_FIELDS = ("hold_out", "train_azimuths", "test_azimuths", "train_elevations", "test_elevations")
TEST_FIELDS = (
    "dataset", "data_dir", "hold_out", "seed", "n_test", "attack", "epsilons", "attack_steps", "n_attack",
    *sorted(VIEW_FIELDS - {"standardize", "shapes_seed"}),  # which the networks were trained with
)  # fmt: skip


def free_fields(config: Config) -> list[str]:
    """Fields that may differ between a training and a test. The seed draws shapes and toys, and which of the own images
    are for the test: with another one there would be other objects, or images of the training."""
    return [name for name in TEST_FIELDS if name != "seed" or config.dataset not in (OWN_SET, "shapes", "toys")]


def evaluate_checkpoint(
    checkpoint: Path, asked: Config, given: Collection[str], names: Collection[str], threads: int
) -> dict[str, Any]:
    """Test and attack the named networks of a checkpoint on the test set of ``asked``; see ``check_same`` for
    ``given``."""
    saved, states = load_checkpoint(checkpoint)
    check_same(checkpoint, saved, asked, given, free_fields(saved))
    states = of_models(checkpoint, states, names)
    # Without a flag of the split, that of the training: the default may hold out what the networks were trained on.
    keeps_split = asked.dataset == saved.dataset and not {*SPLIT_FIELDS} & {*given}
    fields = [name for name in free_fields(saved) if not (keeps_split and name in SPLIT_FIELDS)]
    config = dataclasses.replace(saved, **{name: getattr(asked, name) for name in fields})
    shapes = [(c.image_size, c.in_channels, c.classes) for c in (saved, config)]
    if shapes[0] != shapes[1]:
        raise UserError(
            f"{checkpoint} was trained on {saved.dataset}, whose images and classes are not those of --dataset"
            f" {asked.dataset}"
        )
    data = make_data(config, config.classes)
    config = resolved(config, data)
    if data.pictures and data.pictures != saved.pictures:
        print_message(
            f"warning: {config.data_dir} has not the pictures of the training, which drew a test set from them: some of"
            f" those that are tested now may have been trained on. Test pictures in {config.data_dir}/test are safe"
        )
    models = make_models(config)
    with Workers(threads, config.dtype) as workers:
        for name, state in states.items():
            metrics = evaluate(models[name], state.params, data, config, workers)
            state.history = {metric: [value] for metric, value in metrics.items()}
    result = make_result(config, data, states, attack_all(config, states, data, threads), threads)
    return result | {"trained_with_seed": saved.seed}


def make_result(
    config: Config, data: Data, states: dict[str, TrainState], attacks: dict[str, Any], threads: int = 1
) -> dict[str, Any]:
    """The JSON of a run; accuracies are fractions, those of the last epoch; "drop" is familiar minus held out.
    Accuracies at an angle are metrics such as ``azimuth_60_accuracy``. Accuracies under attack are in ``attack``, by
    epsilon, and also among a model's metrics for compare_seeds.py."""
    models = {}
    for name, state in states.items():
        models[name] = model_metrics(state)
        if config.holds_out:
            models[name]["drop"] = models[name]["familiar_accuracy"] - models[name]["held_out_accuracy"]
        for kind, found in attacks.get(name, {}).items():
            if isinstance(found, dict):
                models[name] |= {f"{kind}_{epsilon}_accuracy": v for epsilon, v in found.items()}
            else:
                models[name][kind] = found
    chance = 1 / config.n_classes
    result = result_document(EXPERIMENT, config, data.name, models, states, threads, config.headline, chance)
    if attacks:
        result["attack"] = attacks
    if config.has_own_images:
        result["classes"] = class_counts(config, data)
    if config.has_own_images or data.held_out is not None:
        networks, confusions = make_models(config), {}
        with Workers(threads, config.dtype) as workers:
            for part in filter(None, (data.test, data.held_out)):  # the confusion matrices are those of the last
                for name, state in states.items():
                    answers = predict_scores(networks[name], state.params, part, config, workers).argmax(axis=1)
                    models[name] |= angle_accuracies(config, part, answers)
                    confusions[name] = confusion_matrix(part.labels, answers, config.n_classes)
        result = add_confusions(result, config, confusions)
    return result


def add_confusions(result: dict[str, Any], config: Config, confusions: dict[str, Array]) -> dict[str, Any]:
    """The result of a run with the held-out confusion matrix of each model and, for held-out azimuths of voxels, the
    metric ``hard_accuracy``."""
    if config.dataset == "voxels" and config.held_out == "azimuth":
        for name, confusion in confusions.items():
            result["models"][name]["hard_accuracy"] = viewpoint.hard_accuracy(confusion)
    return result | {"confusion": {name: confusion.tolist() for name, confusion in confusions.items()}}


def angle_accuracies(config: Config, examples: Examples, answers: Array) -> dict[str, float]:
    """The accuracy at each angle of the examples, by the name of the metric; of own images none."""
    right, angles = answers == examples.labels, examples.angles
    if angles is None:
        return {}
    return {f"{config.held_out}_{at:g}_accuracy": float(right[angles == at].mean()) for at in np.unique(angles)}


def class_counts(config: Config, data: Data) -> dict[str, tuple[int, int]]:
    """By class, how many images are for training and for the test."""
    counts = (np.bincount(part.labels, minlength=config.n_classes).tolist() for part in (data.train, data.test))
    return dict(zip(config.classes, zip(*counts, strict=True), strict=True))


def describe(result: dict[str, Any]) -> str:
    """One line: the data, of views what is held out, and the training."""
    config = Config(**result["config"])
    data = result["dataset"]
    if config.has_views:
        data = viewpoint.describe(config) if config.holds_out else f"{data}: no viewpoints held out"
    if "classes" in result:
        data = describe_classes(result["classes"], config.image_size, config.colour) + "\n" + data
    if config.n_val or config.n_val_objects:
        data += f"; accuracies on validation {'digits' if config.n_val else 'objects'}"
    return f"{data}; seed {seed_of(result)}, {config.n_epochs} epochs, {config.loss} loss"


def format_table(result: dict[str, Any]) -> str:
    """The result table, and one of the accuracy under each attack and the fraction of images without a gradient."""
    models = result["models"]
    holds_out = "drop" in next(iter(models.values()))
    metrics = ("familiar_accuracy", "held_out_accuracy", "drop") if holds_out else ("accuracy",)
    heads = " ".join(f"{metric.removesuffix('_accuracy').replace('_', ' '):>8}" for metric in metrics)
    lines = [f"{'model':<10} {heads} {'parameters':>10} {'seconds':>8}"]
    for name, m in models.items():
        cells = " ".join(f"{m[metric]:8.4f}" for metric in metrics)
        lines.append(f"{name:<10} {cells} {m['n_params']:10,} {m['train_seconds']:8.1f}")
    if "attack" in result:
        epsilons = ["0", *(f"{epsilon:g}" for epsilon in result["config"]["epsilons"])]
        lines += ["", *attack_lines(result["attack"], epsilons)]
    if "classes" in result:
        for name, matrix in result["confusion"].items():
            lines += ["", f"{name}: answers", *confusion_lines(np.array(matrix), list(result["classes"]))]
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------------
# Prediction for image files (--predict)
# ----------------------------------------------------------------------------------------------------------------------

DIGIT_BOX = 20  # pixels: MNIST's digits fill a box of this side


def read_view(path: Path, config: Config) -> Array:
    """A picture file -> (1, 32 or 48, same, C), prepared as the data set is.

    A picture of any size is padded to a square with the grey of its border and resized. For voxels and shapes, one
    with a bright background is inverted. For smallNORB, a picture twice as wide as high is a stereo pair; any other
    one is used for both eyes. Raises UserError where it cannot be read.
    """
    grey = np.rint(255 * read_grey(path)).astype(np.uint8)  # (H, W)
    if not config.is_rendered:
        height, width = grey.shape
        pair = (grey[:, :height], grey[:, height:]) if width == 2 * height else (grey, grey)
        return viewpoint.shrink(
            np.stack([grey_square(eye, 2 * viewpoint.NORB_SIDE) for eye in pair])[None], config.standardize
        )
    image = grey_square(grey, viewpoint.IMAGE_SIZE).astype(np.float32) / 255
    image = (1 - image if border_level(image) > 0.5 else image)[None, :, :, None]
    return viewpoint.standardized(image) if config.standardize == "image" else image


def read_picture(path: Path, config: Config) -> Array:
    """A picture file -> (1, H, W, C), prepared as the data set is. Raises UserError where it cannot be read."""
    if config.has_own_images:
        square = square_of_set(path, config.image_size, config.in_channels, {})[None]
        return square * np.float32(1 / 255) - np.float32(config.pixel_offset)
    if config.has_views:
        return read_view(path, config) - np.float32(config.pixel_offset)
    digit = read_strokes(path, config.image_size, DIGIT_BOX).astype(config.dtype)
    return digit[None, :, :, None] - np.float32(config.pixel_offset)


def predict(checkpoint: Path, pictures: list[Path], asked: Config, given: Collection[str]) -> str:
    """A table: for each picture the class that each model predicts, and the class capsules' activations. Flags that
    were ``given`` must be those of the checkpoint."""
    config, states = load_checkpoint(checkpoint)
    check_same(checkpoint, config, asked, given)
    if "capsules" not in states:
        raise UserError(f"{checkpoint} has no capsule network")
    models = make_models(config)
    images = np.concatenate([read_picture(path, config) for path in pictures])
    examples = Examples(images, np.zeros(len(images), np.intp))
    with Workers(1, config.dtype) as workers:
        scores = {
            name: predict_scores(models[name], state.params, examples, config, workers)
            for name, state in states.items()
        }
    _, activations = class_capsules(states["capsules"].params, images, config)
    return prediction_table(pictures, config.classes, scores, activations)


# ----------------------------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------------------------


# fmt: off
def add_viewpoint_flags(
    parser: argparse.ArgumentParser, config: type[Viewpoints], title: str = "viewpoints"
) -> None:
    """The flags of the viewpoints; see ``viewpoints_from_args``."""
    azimuths, elevations, count = angle_range(-360, 720), angle_range(-90, 90), whole_number(1, 1000)
    add = add_flags(parser, title, config)
    add("train_azimuths", azimuths, "Azimuths of the training views, in degrees.", "A:B",
        "0:150, smallnorb and toys 300:400")
    add("test_azimuths", azimuths, "Azimuths that are held out, in degrees.", "A:B",
        "200:330, smallnorb and toys 60:280")
    add("train_elevations", elevations, "Elevations of the training views. With --test-elevations, hold elevations out"
        " instead of azimuths.", "A:B", "10:50, smallnorb and toys 30:70")
    add("test_elevations", elevations, "Elevations that are held out; needs --train-elevations.", "A:B", "none")
    add("n_train_views", count, "Train on N azimuths.", default=str(config.n_train_views))
    add("n_test_views", count, "Hold out N azimuths.", default=str(config.n_test_views))
    add("n_elev", count, "Use N elevations in every set.", default=str(config.n_elev))
    add("n_test_elev", count, "Use N elevations in the held-out views.", default="as --n-elev")
    add("n_per_combo", count, "Draw N images of each training view.", default=str(config.n_per_combo))
    add("shapes_seed", whole_number(0, 2**32 - 1), "Draw the objects of --dataset shapes, and the azimuth at which the"
        " ranges begin, with this seed.", default="as --seed")
    add("standardize", ("none", "image"), "With image, bring each image (channel of a stereo pair) to mean zero and"
        " unit variance.", default="image, voxels none")


# fmt: on


def viewpoints_from_args(args: argparse.Namespace) -> Viewpoints:
    """Flags that are not given have the defaults of their data set. Where elevation is held out, the azimuths of both
    sets are the same."""
    given = {name: value for name, value in values_of(args, Viewpoints).items() if value is not None}
    if "train_elevations" in given:
        given["train_azimuths"] = given["test_azimuths"] = args.train_azimuths or (0.0, 360.0)
    return Viewpoints(**viewpoint.VIEWS.get(args.dataset, {}) | given)


def check_viewpoint_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """A usage error (status 2) where they do not fit together."""
    if args.dataset == "smallnorb" and args.data_dir is None:
        parser.error("argument --dataset: smallnorb needs --data-dir DIR, the folder of the six official files")
    numbers = ("n_train_views", "n_test_views", "n_elev", "n_test_elev", "n_per_combo")
    if args.dataset not in ("voxels", "shapes") and (unused := [name for name in numbers if name in args.given]):
        parser.error(f"argument {flag_of(Viewpoints, unused[0])}: applies to --dataset voxels and shapes alone")
    if args.dataset != "shapes" and "shapes_seed" in args.given:
        parser.error("argument --shapes-seed: needs --dataset shapes")
    if ("train_elevations" in args.given) != ("test_elevations" in args.given):
        parser.error("arguments --train-elevations and --test-elevations: give both or none")
    if "train_elevations" in args.given:
        if "test_azimuths" in args.given:
            parser.error("argument --test-azimuths: elevation is held out already, and both sets have --train-azimuths")
        if overlap(args.train_elevations, args.test_elevations):
            parser.error("argument --test-elevations: overlaps --train-elevations")
    v = viewpoints_from_args(args)
    if v.held_out == "azimuth" and overlap(v.train_azimuths, v.test_azimuths, period=360):
        parser.error(
            f"argument --test-azimuths: {format_range(v.test_azimuths)} overlaps the training range"
            f" {format_range(v.train_azimuths)} (modulo 360)"
        )
    if v.standardize == "image" and args.pixel_offset:
        parser.error("argument --pixel-offset: needs --standardize none")
    n_familiar = v.n_elev * v.n_train_views * max(v.n_per_combo, 2)
    n_held_out = (args.n_test_elev or v.n_elev) * v.n_test_views * 2
    n_images = viewpoint.N_CLASSES * max(n_familiar, n_held_out)
    if n_images > viewpoint.MAX_IMAGES:
        flags = ", ".join(flag_of(Viewpoints, name) for name in numbers)
        parser.error(f"arguments {flags}: a set of {n_images:,} images is above the limit of {viewpoint.MAX_IMAGES:,}")


def check_variance_floor(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """A usage error (status 2) where it is below the square of a vote's rounding error, and the loss becomes NaN."""
    if args.variance_floor < (least := float(np.finfo(args.dtype).eps) ** 2):
        parser.error(
            f"argument --variance-floor: {args.variance_floor:g} is below {least:.2g}, the least of {args.dtype}"
        )


# fmt: off
def add_config_flags(parser: Parser) -> None:
    """The flags of Config, which the figure scripts have too."""
    parser.checks.append(check_config_flags)
    count, positive = whole_number(1, 10**7), number(0, 10, above=True)
    add = add_flags(parser, "data", Config)
    add("dataset", (*DIGIT_SETS, *VIEW_SETS, OWN_SET), "Use these images. auto is MNIST if it is there or can be"
        " downloaded, else strokes: generated digits. voxels are rendered objects. shapes and toys are"
        " drawn for every seed, toys in the format of smallnorb and in about a minute, into"
        f" {CACHE_DIR}/toys-…. images are your own.")
    add("data_dir", non_empty, "Folder of the four MNIST files, of the six of smallNORB, or of your own images in a"
        " sub-folder for each class; or a .npz file of x_train, y_train, x_test, y_test.", "DIR", CACHE_DIR)
    add("side", whole_number(13, 128), "Resize own images to N x N pixels.",
        default="their own size, but at least {} and at most {}".format(*DEFAULT_SIDES))
    add("colour", ("grey", "rgb"), "Show own images to the networks in grey or in colour.")
    add("n_train", count, "Train on N images, drawn with the seed.", default="all")
    add("n_test", count, "Test on N images, evenly spaced over the set.", default="all")
    add("n_val", whole_number(1, 10**6), "To choose settings, hold N training digits out and test on them.",
        default="test on the test digits")
    add("shift", whole_number(0, 8), "Shift every training image at random by up to N pixels on each axis.")
    add("pixel_offset", number(-10, 10), "Subtract X from every pixel before any network sees it.", "X")
    add_viewpoint_flags(parser, Config, "viewpoints, of --dataset voxels, shapes, smallnorb and toys")
    add = add_flags(parser, "objects, of --dataset smallnorb and toys", Config)
    add("hold_out", ("viewpoints", "nothing"),
        "With nothing, train on all views of five objects a class, and test on all views of the five others.")
    add("n_val_objects", whole_number(1, 4), "To choose settings, hold N of the five training objects of each class"
        " out and test on them.", default="test on the five test objects")
    add = add_flags(parser, "capsules", Config)
    add("sizes", list_of(whole_number(1, 1024), 4, "32,8,8,8"), "Channels of conv1, and types of the primary capsules"
        " and of those of the two layers above. The paper has 32,32,32,32 and 64,8,16,16.", "A,B,C,D")
    add("em_iters", whole_number(1, 20), "Route in N iterations.")
    add("em_grad", ("exact", "stop"),
        "Differentiate through all iterations, or through the last M-step alone, with constant assignments and mass.")
    add("variance_floor", number(0, 1e6, above=True), "Add X to every variance of a routing iteration.", "X")
    add("beta_v_init", number(-10, 10),
        "Initial beta_v, counted from -log(variance floor) / 2, at which votes that agree cost nothing.", "X")
    add = add_flags(parser, "training", Config)
    add("seed", whole_number(0, 2**32 - 1), "Seed of the data, the initial weights and the order of the images.")
    add("n_epochs", whole_number(1, 100_000),
        f"Train for N passes over the training set ({OWN_EPOCHS} with --dataset images).")
    add("batch_size", whole_number(1, 4096), "Take each step on N images.")
    add("lr", positive, "Learning rate of the capsules.", "X")
    add("cnn_lr", positive, "Learning rate of the CNN.", "X")
    add("lr_schedule", ("constant", "linear", "cosine"), "Course of the learning rate. linear and cosine fall to 0.")
    add("weight_decay", number(0, 100),
        "A step shrinks the weights of convolutions, and of a CNN's dense layers, by lr * X.", "X")
    add("loss", ("spread", "cross-entropy"), "Loss of the capsules: the paper's spread loss of the activations, or"
        " cross-entropy of a score of pose and activation. The CNN always has cross-entropy.")
    add("cnn", ("matched", "paper"), "The CNN has the capsules' grids and as many parameters; or it is the paper's, of"
        " 4.2 million parameters.")
    add("dtype", ("float32", "float64"), "Number format of all arithmetic.")
    parser.add_argument("--plain", action="store_true",
        help="Route by the plain form, which follows the paper line by line, and not by its fast twin.")
    add = add_flags(parser, "attacks", Config)
    add("attack", names_of(ATTACKS), "Test under attack after the training, by fgsm, iterated or both.", "A,B")
    add("epsilons", list_of(number(0, 10, above=True), rising=True),
        "An attack moves no pixel by more than X: pixels are 0 to 1, standardised ones in standard deviations.", "X,Y")
    add("attack_steps", whole_number(1, 1000), "The iterated attack takes N steps, each of epsilon / N.")
    add("n_attack", count, "Attack N test images; of views, those of the training range.")
    parser.add_argument("--threads", type=whole_number(1, 256), metavar="N", default=default_threads(),
        help="Use N threads. No result depends on it. Default: one for each processor, at most 4 (here: %(default)s).")
# fmt: on


FIELDS_OF_SETS: dict[str, tuple[str, ...]] = {  # which fields apply to some data sets alone
    "side": (OWN_SET,), "colour": (OWN_SET,), "n_val": DIGIT_SETS, "n_val_objects": OBJECT_SETS, "hold_out": VIEW_SETS,
    **dict.fromkeys(sorted(VIEW_FIELDS), VIEW_SETS),
}  # fmt: skip


def one_of(names: Sequence[str]) -> str:
    """a, b or c"""
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def check_config_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """A usage error (status 2) where they do not fit together."""
    check_variance_floor(parser, args)
    if args.dataset == OWN_SET and args.data_dir is None:
        parser.error("argument --dataset: images needs --data-dir DIR, a folder with a sub-folder for each class")
    if args.hold_out == "nothing":
        if args.dataset not in OBJECT_SETS:
            parser.error("argument --hold-out: nothing needs --dataset smallnorb or toys")
        for name in sorted((VIEW_FIELDS - {"standardize"}) & args.given):
            parser.error(f"argument {flag_of(Config, name)}: not together with --hold-out nothing")
    for name, sets in FIELDS_OF_SETS.items():
        if args.dataset not in sets and name in args.given:
            parser.error(f"argument {flag_of(Config, name)}: needs --dataset {one_of(sets)}")
    if args.dataset in ("voxels", "shapes", "strokes") and args.data_dir is not None:
        parser.error(f"argument --data-dir: {args.dataset} has no files")
    if args.dataset == "toys" and args.data_dir is not None:
        parser.error(
            "argument --data-dir: toys are drawn into the cache; for a folder of them take --dataset smallnorb"
        )
    if args.dataset in VIEW_SETS:
        check_viewpoint_flags(parser, args)


def config_from_args(args: argparse.Namespace) -> Config:
    fields = {name: value for name, value in values_of(args, Config).items() if value is not None}
    if args.dataset == OWN_SET and "n_epochs" not in args.given:
        fields["n_epochs"] = OWN_EPOCHS
    if args.dataset in VIEW_SETS:
        fields |= dataclasses.asdict(viewpoints_from_args(args))
    return Config(**fields)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "--dataset --data-dir --seed --n-epochs --n-train --attack --out-json --checkpoint --resume --predict",
        [
            ("", "Both models, five epochs of MNIST: about 10 minutes."),
            ("--n-train 6000 --n-epochs 2 --attack fgsm", "A short training and an attack: about 50 seconds."),
            ("--dataset voxels", "Both models on held-out views of voxel objects: about 20 seconds."),
        ],
        description="Train convolutional matrix capsules and a CNN on digits, on views of objects or on your own"
        " images; with --attack, attack both.",
    )
    add_config_flags(parser)
    add_file_flags(parser, MODEL_NAMES)
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    config = config_from_args(args)
    return run_script(
        EXPERIMENT, argv, args,
        predict=lambda: predict(args.checkpoint, args.predict, config, args.given),
        train=lambda files: run(config, files, args.threads, names=args.models),
        evaluate=lambda: evaluate_checkpoint(args.checkpoint, config, args.given, args.models, args.threads),
        text=lambda result: f"{describe(result)}\n{format_table(result)}",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
