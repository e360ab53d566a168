"""Convolutional matrix capsules on digits and on views of objects, in numpy, every gradient by hand.

Claims tested: [Hinton 2018] G. Hinton, S. Sabour, N. Frosst, "Matrix capsules with EM routing", ICLR 2018. The
network of its figure 1, whose capsules have the same transformation matrices at every position, reads handwritten
digits (section 5 reports 0.44 % test errors on MNIST); and it recognises objects from viewpoints that it never saw, and
new objects from all viewpoints, better than a convolutional network (section 5.1, tables 1 and 2, on smallNORB).

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
cost is divided by the mass that even assignments would give it; the inverse temperature is the same in all iterations,
unless --lambda-first is given. The transformation matrices start near the identity, and beta_v where agreement
activates: from there the training starts without dead capsules.

The images are digits (MNIST, or strokes drawn by this project), or views of objects of which some are held out: the
write-up's objects, shapes and smallNORB, as in smallnorb_novel_viewpoint.py, and toys, a drawn set in its files.
Views have 32x32 pixels and 5 classes; the grids then have sides of 16, 7 and 5.

Run it (both models, seed 0: digits, then novel viewpoints):

    python -m more.conv_matrix_capsules
    python -m more.conv_matrix_capsules --dataset voxels
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import multimnist_capsnet as multimnist
import smallnorb_novel_viewpoint as smallnorb
from data.norb_files import NORB_SETS
from multimnist_capsnet import CNN, HAS_FAST, ConvLayer, Workers, default_threads
from smallnorb_novel_viewpoint import (
    FOLDER, NO_OPTIONS, POSE_SIDE, Array, Callback, ConvCache, EMCache, Network, Params, Session, SettingError, Stream,
    TrainState, UserError, Viewpoints, VotesCache, adamw_of, capsules_loss, class_scores_backward, class_scores_forward,
    conv2d_backward, conv2d_forward, count_params, em_routing_backward, em_routing_forward, float_in, fraction_right,
    from_data, from_json, gaussian, generator, int_in, list_of, model_metrics, of_model, one_of, parse, permutation,
    print_message, read_checkpoint, relu_backward, relu_forward, report, require_own_outputs, result_document, script,
    setting, sigmoid_backward, sigmoid_forward, steps_per_epoch, text_of, votes_backward, votes_forward,
)
from support.experiment import PredictOptions, redeclared, require_alone, unfinished

# Dimension letters
#   B  images of a batch              N       images of a set                 C       channels of an image
#   H, W    rows and columns of a map         Ho, Wo  the same of the map above it
#   K  side of a kernel, of a field   I       capsule types below             J       capsule types above, or classes
#   P  side of a pose matrix (4)      D       pose entries, P * P             S       side of the grid of ConvCaps2
#   L  receptive fields, B * Ho * Wo  M       children of a field, K * K * I  T       iterations of EM routing
# A child is a capsule of the layer below, a parent one of the layer above; the children of a parent are its field's.

EXPERIMENT = "conv_matrix_capsules"
MODEL_NAMES = ("capsules", "cnn")
CONV_KERNEL = 5
CAPS_KERNEL = 3
CAPS_STRIDES = {"convcaps1": 2, "convcaps2": 1}


# --- Configuration: user inputs only ----------------------------------------------------------------------------------


DIGIT_SETS = ("auto", "mnist", "strokes")
VIEW_SETS = ("voxels", "shapes", "smallnorb", "toys")
OBJECT_SETS = ("smallnorb", "toys")  # in the files of smallNORB
PRESETS: dict[str, dict[str, Any]] = {  # the second one's sizes: [Hinton 2018, sec. 5]; iterations: table 1
    "small": {"sizes": (32, 4, 4, 8), "em_iters": 2, "variance_floor": 1.0, "lr": 0.015},
    "paper": {"sizes": (64, 8, 16, 16), "em_iters": 3, "variance_floor": 8.0, "lr": 0.0025},
}
VIEW_FIELDS = {field.name for field in dataclasses.fields(Viewpoints)} - {"dataset", "data_dir", "seed"}


@dataclasses.dataclass(frozen=True)
class Config(Viewpoints):
    """One run. Where --n-epochs is given and --cnn-epochs is not, it holds for both models."""

    dataset: str = setting("auto", (*DIGIT_SETS, *VIEW_SETS), "Use MNIST; strokes: drawn digits; auto: MNIST if it"
        " is there or can be downloaded, else strokes; or views: the write-up's objects, shapes that the seed draws,"
        " the smallNORB files, or toys, which the seed draws in their format, in about a minute, into the cache.",
        usual=True, group="data")
    data_dir: Path | None = setting(None, FOLDER, "Folder of the four MNIST files, or of the six of smallNORB.",
        shown="the cache", usual=True)
    n_train: int | None = setting(None, int_in(1, 10**7), "Train on N images, drawn with the seed.", shown="all",
        usual=True)
    n_test: int | None = setting(None, int_in(1, 10**7), "Test on N images, evenly spaced over the set.", shown="all")
    n_val: int | None = setting(None, int_in(1, 10**6), "To choose settings, hold N training digits out and test on"
        " them.", shown="test on the test digits")
    held_out: str = setting("viewpoints", ("viewpoints", "nothing"), "With nothing, train on all views of five objects"
        " a class of smallnorb or toys, and test on all views of the five others.")
    n_val_objects: int | None = setting(None, int_in(1, 4), "To choose settings, hold N of the five training objects of"
        " each class of smallnorb or toys out and test on them.", shown="test on the five test objects")
    n_epochs: int = redeclared(smallnorb.Config, "n_epochs", shown="5")
    cnn_epochs: int = setting(None, int_in(1, 100_000), "The same for the CNN.", "10, but as a given --n-epochs")
    batch_size: int = setting(32, int_in(1, 4096), "Take each step on N images.")
    lr: float = setting(None, float_in(1e-9, 10), "Learning rate of the capsules. It falls to 0.",
        "0.015, or the preset's")
    cnn_lr: float = setting(1e-3, float_in(1e-9, 10), "Learning rate of the CNN.")
    weight_decay: float = setting(0.0, float_in(0, 100),
        "A step shrinks the weights of convolutions, and of a CNN's dense layers, by lr * X.")
    cnn_weight_decay: float = setting(None, float_in(0, 100), "The same for the CNN.", "as --weight-decay")
    preset: str = setting("small", tuple(PRESETS), "Small networks, or the smaller one of the paper: sizes 64,8,16,16,"
        " 68,754 parameters on stereo images, three iterations, with a floor and a rate of ours.", group="networks")
    sizes: tuple[int, int, int, int] = setting(None, list_of(int_in(1, 1024)), "Channels of conv1, and"
        " types of the primary capsules and of those of the two layers above.", "32,4,4,8, or the preset's",
        paper="32,32,32,32 (section 4), or 64,8,16,16 (section 5)")
    em_iters: int = setting(None, int_in(1, 20), "Route in N iterations. For 3, also give --variance-floor 8"
        " --lr 0.005: a lower floor lets each iteration sharpen the assignments until learning is slow.",
        "2, or the preset's",
        paper="3 is the best of its table 1")
    lambda_first: float = setting(1.0, float_in(1e-3, 1), "Inverse temperature of the first iteration. It rises"
        " evenly to 1 in the last.", paper="rises, by a schedule that it does not give")
    em_grad: str = redeclared(smallnorb.Config, "em_grad")
    variance_floor: float = redeclared(smallnorb.Config, "variance_floor", None, shown="1, or the preset's", paper="0",
                                       convert=float_in(1e-6, 1e6).convert)
    beta_v_init: float = setting(-0.2, float_in(-10, 10),
        "Initial beta_v, counted from -log(variance floor) / 2: below 0, votes that agree activate a capsule.")
    loss: str = setting("spread", ("spread", "cross-entropy"), "Loss of the capsules: the paper's spread loss of the"
        " activations, or cross-entropy of a score of pose and activation. The CNN always has cross-entropy.")
    cnn: str = setting("matched", ("matched", "paper"), "The CNN has the capsules' grids and as many parameters; or it"
        " is the paper's, of 4.2 million parameters.", paper="paper (section 5)")
    dtype: str = setting("float32", ("float32", "float64"), "Number format of all arithmetic.")
    plain: bool = redeclared(smallnorb.Config, "plain")
    image_size: Any = None  # these three are the data set's, unless others are given
    in_channels: Any = None
    n_classes: Any = None

    def dependent(self) -> dict[str, Any]:
        own: dict[str, Any] = {"image_size": smallnorb.IMAGE_SIZE if self.has_views else multimnist.DIGIT_SIDE,
               "in_channels": 2 if self.dataset in OBJECT_SETS else 1, "n_classes": len(self.classes),
               "n_epochs": 5, "cnn_epochs": self.n_epochs or 10, "cnn_weight_decay": self.weight_decay,
               **PRESETS[self.preset]}
        if self.has_held_out:
            return super().dependent() | own
        unused = f"needs --dataset {', '.join(VIEW_SETS[:-1])} or {VIEW_SETS[-1]}"
        if self.held_out == "nothing":
            unused = "not together with --held-out nothing"
            own["standardize"] = "image"
        for name in sorted(VIEW_FIELDS - ({"standardize"} if self.has_views else set())):
            if getattr(self, name) != getattr(Viewpoints, name):
                raise SettingError(name, unused)
        return own

    def check(self) -> None:
        if len(self.sizes) != 4:
            raise SettingError("sizes", f"{text_of(self.sizes)} is not a list of 4 with commas between")
        for name, those in {"n_val": DIGIT_SETS, "n_val_objects": OBJECT_SETS}.items():
            if getattr(self, name) is not None and self.dataset not in those:
                raise SettingError(name, f"needs --dataset {', '.join(those[:-1])} or {those[-1]}")
        if self.held_out == "nothing" and self.dataset not in OBJECT_SETS:
            raise SettingError("held_out", "nothing needs --dataset smallnorb or toys")
        if self.has_held_out or self.dataset == "smallnorb":
            super().check()
        elif self.data_dir is not None and self.dataset in ("strokes", "toys"):
            raise SettingError("data_dir", "strokes has no files" if self.dataset == "strokes" else
                               "goes with --dataset smallnorb: the folder of the six official files")

    @property
    def has_views(self) -> bool:
        return self.dataset in VIEW_SETS

    @property
    def has_held_out(self) -> bool:
        """Whether there are viewpoints that are tested and not trained on."""
        return self.has_views and self.held_out == "viewpoints"

    @property
    def classes(self) -> tuple[str, ...]:
        return super().classes if self.has_views else multimnist.DIGITS

    @property
    def lambdas(self) -> list[float]:
        """The inverse temperature of each iteration."""
        return list(map(float, np.linspace(1, self.lambda_first, self.em_iters)))[::-1]


@dataclasses.dataclass(frozen=True)
class Options(PredictOptions):
    models: tuple[str, ...] = setting(MODEL_NAMES, list_of(one_of(MODEL_NAMES)), "Train only these.", usual=True)
    threads: int = setting(default_threads(), int_in(1, 256), "Use N threads. No number depends on it.",
        shown="one for each processor, at most 4; 1 without fast/")


# --- Data -------------------------------------------------------------------------------------------------------------


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
    name: str  # "mnist", "strokes", "custom", "voxels", "shapes", "smallnorb" or "toys"
    train: Examples
    test: Examples  # for views: other images from the range of the training
    held_out: Examples | None = None  # viewpoints outside of that range; None where none are held out


def subset(examples: Examples, n: int | None, rng: np.random.Generator | None = None) -> Examples:
    """``n`` of the images (None: all), drawn by ``rng`` or, without it, evenly spaced."""
    n_all = len(examples.labels)
    if n is None or n >= n_all:
        return examples
    return examples.at(np.linspace(0, n_all - 1, n).astype(np.intp) if rng is None else rng.permutation(n_all)[:n])


def norb_halves(n_val: int | None) -> tuple[smallnorb.Half, smallnorb.Half]:
    """Objects to train and to test on: the official halves or, to choose settings, the training half alone, of which
    ``n_val`` objects of each class are tested on."""
    objects = [int(digit) for digit in NORB_SETS["training"].removeprefix("5x")]  # its name lists them: 5x46789
    return (("training", objects[:-n_val]), ("training", objects[-n_val:])) if n_val else smallnorb.HALVES


def make_views(config: Config) -> Sequence[smallnorb.Split]:
    """Training, test and held-out sets; without --held-out viewpoints, the two halves of smallNORB."""
    halves = norb_halves(config.n_val_objects)
    if config.has_held_out:
        return smallnorb.make_data(config) if config.is_rendered else smallnorb.load_smallnorb(config, halves)
    folder = smallnorb.norb_folder(config)
    return [smallnorb.read_smallnorb(folder, half, config.standardize) for half in halves]


def make_data(config: Config) -> Data:
    """Raises UserError where files are missing or damaged."""
    if config.has_views:
        name, angles = config.dataset, f"{config.held_out_angle}s"
        sets = [Examples(split.images, split.labels, getattr(split, angles)) for split in make_views(config)]
    else:
        digits = multimnist.resolve_dataset(config.dataset, generator(config.seed, Stream.DATA), config.data_dir)
        name, *arrays = multimnist.without_test(digits, config.n_val)
        pairs = arrays[:2], arrays[2:]
        sets = [Examples(x[..., None] * np.float32(1 / 255), y.astype(np.intp)) for x, y in pairs]
    train, *tests = sets
    familiar, *held_out = (subset(test, config.n_test) for test in tests)
    train = subset(train, config.n_train, generator(config.seed, Stream.DATA, 1))
    return Data(name, train, familiar, held_out[0] if held_out else None)


def prepared(images: Array, config: Config) -> Array:
    """Images (N, H, W, C) of a data set as the networks get them in a test: views cropped, of the configured dtype."""
    return (smallnorb.crop(images, None) if config.has_views else images).astype(config.dtype, copy=False)


# --- EM routing over receptive fields [Hinton 2018, sec. 4] -----------------------------------------------------------
#
# A field's parents get votes from its children alone, and fit them as in smallnorb_novel_viewpoint.py, with a field in
# the place of an image. One thing is different: a child has more parents than those of one field. They are all types at
# all positions whose field contains the child, and the E-step divides by the sum over all of them.


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


VOTES = multimnist.Pair(votes_forward, votes_backward)


class FieldRoutingCache(NamedTuple):
    fields: Fields
    n_in: int  # I
    shared: bool  # whether w is (1, 1, I, J, P, P)
    vote: multimnist.Pair
    votes: VotesCache
    mass_unit: float
    em: EMCache  # a field in place of an image, with its M children and J parents


def field_routing_forward(
    pose: Array, a_in: Array, w: Array, beta_a: Array, beta_v: Array, lambdas: Sequence[float], variance_floor: float,
    k: int, stride: int = 1, offset: Array | None = None, vote: multimnist.Pair = VOTES,
) -> tuple[Array, Array, FieldRoutingCache]:
    """EM routing where a parent's children are the capsules of its K x K field, and w is the same at all positions.

    pose (B, H, W, I, P, P), a_in (B, H, W, I), w (K, K, I, J, P, P), or (1, 1, I, J, P, P) for the same matrices at all
    positions of a field, beta_a and beta_v (J,), an inverse temperature for each iteration, offset (K, K, P, P) added
    to the votes of the children there -> poses (B, Ho, Wo, J, P, P), activations (B, Ho, Wo, J), cache. ``vote`` is the
    pair whose result the votes are.

    ``variance_floor`` is added to sigma_sq. It keeps the logarithm and the division finite where all votes agree. The
    mass in a parent's cost is divided by its mean over all parents if all children are active and assigned evenly
    (``mass_unit``), so that a cost means the same in layers with different numbers of children and parents.
    """
    (I, P), J, fields = pose.shape[3:5], w.shape[3], Fields(pose.shape[1:3], k, stride)
    poses = gather(pose, fields).reshape(-1, k * k * I, P, P)  # (L, M, P, P)
    a_fields = gather(a_in, fields).reshape(poses.shape[:2])  # (L, M)
    w_fields = np.broadcast_to(w, (k, k, I, J, P, P)).reshape(-1, J, P, P)  # (M, J, P, P)
    votes, votes_cache = vote.forward(poses, w_fields)  # (L, M, J, D)
    if offset is not None:
        votes += np.repeat(offset.reshape(-1, 1, P * P), I, axis=0)  # (M, 1, D)
    over = functools.partial(over_parents, fields)
    r = np.ones(votes.shape[:3], votes.dtype)
    r /= over(r, np.add)  # 1 / the number of the child's parents
    mass_unit = float(r.sum(axis=1).mean())
    # cost / mass_unit with beta_a is cost with mass_unit beta_a, at an inverse temperature of lambda / mass_unit
    scaled = [lambda_ / mass_unit for lambda_ in lambdas]
    mu, a, em = em_routing_forward(votes, a_fields, mass_unit * beta_a, beta_v, scaled, variance_floor, r, over)
    shape = (len(pose), *fields.out, J)
    cache = FieldRoutingCache(fields, I, w.shape[0] < k, vote, votes_cache, mass_unit, em)
    return mu.reshape(*shape, P, P), a.reshape(shape), cache


def field_routing_backward(dmu: Array, da: Array, cache: FieldRoutingCache, em_grad: str) -> tuple[Array, ...]:
    """dmu (B, Ho, Wo, J, P, P), da (B, Ho, Wo, J) -> dpose, da_in, dw, dbeta_a, dbeta_v, of the inputs' shapes, and the
    gradients of what other parameters ``vote`` has.

    em_grad "exact": the gradient of what the forward pass computes, through every iteration.
    em_grad "stop": that of the last M-step alone, with r, the mass, and the mean inside sigma_sq held constant.
    """
    fields, I, shared, vote, votes_cache, mass_unit, em = cache
    (B, Ho, Wo, J, P, _), k = dmu.shape, fields.k
    # mu, a = em_routing(votes, a_fields, mass_unit beta_a, beta_v)
    routed = em_routing_backward(dmu.reshape(-1, J, P * P), da.reshape(-1, J), em, em_grad)
    dvotes, da_fields, dbeta_a, dbeta_v = routed
    # votes = poses @ w_fields + offset
    dposes, dw_fields, *more = vote.backward(dvotes, votes_cache)
    dw = dw_fields.reshape(k, k, I, J, P, P)
    if shared:
        dw = dw.sum(axis=(0, 1), keepdims=True)
    # poses, a_fields = gather(pose), gather(a_in)
    dpose = scatter(dposes.reshape(B, Ho, Wo, k, k, I, P, P), fields)
    da_in = scatter(da_fields.reshape(B, Ho, Wo, k, k, I), fields)
    return dpose, da_in, dw, mass_unit * dbeta_a, dbeta_v, *more


class Routing(NamedTuple):
    """A pair of the signatures of ``field_routing_forward`` and ``field_routing_backward``, with these parameters of a
    layer besides w."""

    forward: Callable[..., tuple[Array, Array, Any]]
    backward: Callable[..., tuple[Array, ...]]
    parameters: tuple[str, ...] = ("beta_a", "beta_v")


PLAIN = FAST = Routing(field_routing_forward, field_routing_backward)
if HAS_FAST:
    from fast import field_em
    FAST = Routing(field_em.field_routing_forward, field_em.field_routing_backward)


# --- The network ------------------------------------------------------------------------------------------------------
#
# init(rng) -> params; forward(params, x) -> (scores, cache); backward(dscores, cache) -> (grads, dx)


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


def part_size(config: Config, model: str = "capsules") -> int:
    """Number of images in a part of a batch, at least one."""
    if model == "cnn" and config.cnn == "paper":
        return 2 * PART  # each part has its own 4.2 million gradients
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
    mu: Array  # (B, J, D) class poses
    a: Array  # (B, J) class activations


def conv_capsnet_init(rng: np.random.Generator, config: Config) -> Params:
    (channels, types0, types1, types2), dtype = config.sizes, config.dtype
    k, fan_in, n_primary = CAPS_KERNEL, CONV_KERNEL**2 * config.in_channels, types0 * (POSE_SIDE**2 + 1)
    params = {
        "conv1.w": gaussian(rng, dtype, math.sqrt(2 / fan_in), CONV_KERNEL, CONV_KERNEL, config.in_channels, channels),
        "conv1.b": np.zeros(channels, dtype),
        "primary.w": gaussian(rng, dtype, math.sqrt(2 / channels), 1, 1, channels, n_primary),
        "primary.b": np.zeros(n_primary, dtype),
    }
    # Where all votes agree, sigma_sq is the floor, and the cost of a pose entry is then beta_v_init per unit of mass.
    beta_v = config.beta_v_init - 0.5 * math.log(config.variance_floor)
    shapes = {"convcaps1": (k, k, types0, types1), "convcaps2": (k, k, types1, types2)}
    for layer, shape in {**shapes, "class": (types2, config.n_classes)}.items():
        eye = np.eye(POSE_SIDE, dtype=dtype)
        params[f"{layer}.w"] = eye + gaussian(rng, dtype, 0.1, *shape, POSE_SIDE, POSE_SIDE)
        params[f"{layer}.beta_a"] = np.zeros(shape[-1], dtype)
        params[f"{layer}.beta_v"] = np.full(shape[-1], beta_v, dtype)
    return params


def conv_capsnet_forward(params: Params, x: Array, config: Config, routing: Routing) -> tuple[Array, ConvCapsnetCache]:
    """x (B, H, W, C) -> class scores (B, J)."""

    def route(
        layer: str, pose: Array, a: Array, k: int, stride: int, offset: Array | None = None
    ) -> tuple[Array, Array, Any]:
        w = params["class.w"][None, None] if layer == "class" else params[f"{layer}.w"]  # (K, K, I, J, P, P)
        others = [params[f"{layer}.{name}"] for name in routing.parameters if f"{layer}.{name}" in params]
        return routing.forward(pose, a, w, *others, config.lambdas, config.variance_floor, k, stride, offset)

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
    mu, a, cache3 = route("class", pose, a, len(offset), 1, offset)  # (B, 1, 1, J, P, P), (B, 1, 1, J)
    mu, a = mu.reshape(len(x), -1, POSE_SIDE**2), a.reshape(len(x), -1)
    scores = class_scores_forward(mu, a, config.loss)
    cache = ConvCapsnetCache(conv_cache, relu_cache, primary_cache, a_primary, cache1, cache2, cache3, mu, a)
    return scores, cache


def conv_capsnet_backward(
    dscores: Array, cache: ConvCapsnetCache, config: Config, routing: Routing, need_dx: bool = False
) -> tuple[Params, Array | None]:
    """dscores (B, J) -> gradients under the parameters' names, and dx (B, H, W, C) where needed."""
    dmu, da = class_scores_backward(dscores, cache.mu, config.loss)
    n = len(da)
    dpose, da = dmu.reshape(n, 1, 1, -1, POSE_SIDE, POSE_SIDE), da.reshape(n, 1, 1, -1)
    grads: Params = {}
    for layer, routed in (("class", cache.routing), ("convcaps2", cache.convcaps2), ("convcaps1", cache.convcaps1)):
        dpose, da, dw, *others = routing.backward(dpose, da, routed, config.em_grad)
        grads |= {f"{layer}.{name}": grad for name, grad in zip(routing.parameters, others, strict=False)}
        grads[f"{layer}.w"] = dw[0, 0] if layer == "class" else dw
    # pose, a_primary = primary[..., :n_pose], sigmoid(primary[..., n_pose:])
    dlogits = sigmoid_backward(da, cache.a_primary)
    dprimary = np.concatenate([dpose.reshape(*dlogits.shape[:3], -1), dlogits], axis=3)
    dhidden, grads["primary.w"], grads["primary.b"] = conv2d_backward(dprimary, cache.primary)
    dconv = relu_backward(dhidden, cache.relu)
    dx, grads["conv1.w"], grads["conv1.b"] = conv2d_backward(dconv, cache.conv, need_dx)
    return grads, dx


# --- The CNNs: those of multimnist_capsnet.py in other sizes ----------------------------------------------------------

N_HIDDEN = 1024
# 4,253,349 parameters for stereo pairs of 32x32 pixels. The paper does not give the padding of the convolutions: with 2
# pixels they add up to its 4.2 million. [Hinton 2018, sec. 5]
PAPER_CNN = CNN(
    tuple(ConvLayer(CONV_KERNEL, channels, pad=2, pool=multimnist.MAX_POOL) for channels in (32, 64)),
    {"hidden": N_HIDDEN},
)


def grid_cnn(config: Config, n_channels: int) -> CNN:
    """On the capsules' own grids: their conv1, then 3x3 convolutions of ``n_channels``."""
    upper = (ConvLayer(CAPS_KERNEL, n_channels, stride) for stride in CAPS_STRIDES.values())
    return CNN((ConvLayer(CONV_KERNEL, config.sizes[0], stride=2, pad=2), *upper), {})


def nearest_channels(config: Config, n_params: int) -> int:
    """The number of channels that comes nearest to ``n_params`` parameters."""
    return min(range(1, 1025), key=lambda n: abs(multimnist.cnn_size(grid_cnn(config, n), config) - n_params))


# --- The models as the training loop sees them ------------------------------------------------------------------------


def make_capsules(config: Config, routing: Routing | None = None) -> Network:
    """``routing``: another pair than that of the configuration."""
    pair = routing or (PLAIN if config.plain else FAST)
    return Network(
        "capsules",
        functools.partial(conv_capsnet_init, config=config),
        functools.partial(conv_capsnet_forward, config=config, routing=pair),
        functools.partial(conv_capsnet_backward, config=config, routing=pair),
        functools.partial(capsules_loss, config.loss),
    )


def make_models(config: Config) -> dict[str, Network]:
    """The capsule network and its baseline, by name, in the order of the result table."""
    capsules = make_capsules(config)
    n_params = count_params(capsules.init_params(np.random.default_rng(0)))
    net = PAPER_CNN if config.cnn == "paper" else grid_cnn(config, nearest_channels(config, n_params))
    cnn = Network(
        "cnn",
        functools.partial(multimnist.cnn_init, config=config, net=net),
        functools.partial(multimnist.cnn_forward, net=net),
        functools.partial(multimnist.cnn_backward, net=net),
        functools.partial(capsules_loss, "cross-entropy"),
    )
    return {"capsules": capsules, "cnn": cnn}


# --- Evaluation and training loop -------------------------------------------------------------------------------------
#
# A batch is divided into parts of a fixed size, on which threads work: no number depends on how many threads there are.


def predict_scores(model: Network, params: Params, examples: Examples, config: Config, workers: Workers) -> Array:
    """Class scores (N, J)."""
    images, size = prepared(examples.images, config), part_size(config)
    parts = workers.map(lambda k: model.forward(params, images[k : k + size])[0], range(0, len(images), size))
    return np.concatenate(parts)


def accuracy(model: Network, params: Params, examples: Examples, config: Config, workers: Workers) -> float:
    """Fraction of a set of examples that is classified correctly."""
    return fraction_right(predict_scores(model, params, examples, config, workers), examples.labels)


def evaluate(model: Network, params: Params, data: Data, config: Config, workers: Workers) -> dict[str, float]:
    """Accuracy on the test images and, where there are viewpoints, on those held out."""
    if data.held_out is None:
        return {"accuracy": accuracy(model, params, data.test, config, workers)}
    sets = {"familiar_accuracy": data.test, "held_out_accuracy": data.held_out}
    return {metric: accuracy(model, params, examples, config, workers) for metric, examples in sets.items()}


# Weights that decay: no bias, and no parameter of EM routing
DECAYED = {"conv1.w", "conv2.w", "conv3.w", "primary.w", "hidden.w", "out.w"}


def learning_rate(config: Config, model: str, progress: float) -> float:
    """The rate at ``progress`` through the training, 0 to 1: it rises from a tenth over the first hundredth, and falls
    linearly to 0."""
    return of_model(model, config)[1] * (1 - progress) * min(1.0, 0.1 + 90 * progress)


def training_batch(data: Data, config: Config, step: int) -> Examples:
    """The batch of a step, which depends on the seed and the step alone."""
    epoch, position = divmod(step, steps_per_epoch(config, data))
    chosen = permutation(len(data.train.labels), config.seed, epoch)[position * config.batch_size :]
    chosen = chosen[: config.batch_size]
    images, rng = data.train.images[chosen], generator(config.seed, Stream.SHUFFLE, epoch, position)
    if config.has_views:
        images = smallnorb.crop(images, rng)
    images = images.astype(config.dtype, copy=False)
    dropout = None
    if config.cnn == "paper":
        dropout = 2 * rng.integers(0, 2, (len(chosen), N_HIDDEN)).astype(config.dtype)
    return Examples(images, data.train.labels[chosen], dropout=dropout)


def loss_and_grads(
    model: Network, progress: float, params: Params, part: Examples, n: int
) -> tuple[dict[str, float], Params]:
    """The terms that a part of a batch of ``n`` examples adds to the mean loss and to its gradients."""
    drops = part.dropout is not None and model.name == "cnn"
    forward = functools.partial(model.forward, dropout=part.dropout) if drops else model.forward
    scores, cache = forward(params, part.images)
    loss, dscores = model.loss(scores, part.labels, progress)
    weight = len(part.labels) / n
    return {"train_loss": weight * loss}, model.backward(weight * dscores, cache)[0]


def train(model: Network, config: Config, data: Data, state: TrainState, workers: Workers, callback: Callback) -> None:
    """Train ``state`` in place to the model's number of epochs. Raises UserError where the loss stops being finite."""
    per_epoch = steps_per_epoch(config, data)
    n_epochs, _, weight_decay = of_model(model.name, config)
    n_steps = per_epoch * n_epochs
    update, size = adamw_of(config), part_size(config, model.name)
    while state.step < n_steps:
        started = time.perf_counter()
        batch, progress = training_batch(data, config, state.step), state.step / max(1, n_steps - 1)
        with np.errstate(all="ignore"):  # a loss that is not finite is reported in words
            work = functools.partial(loss_and_grads, model, progress)
            losses, grads = workers.gradients(work, state.params, batch, size)
            update(state, grads, learning_rate(config, model.name, progress), weight_decay, DECAYED)
        state.add(losses, started, weight=len(batch.labels))
        if epoch_ended := state.step % per_epoch == 0:
            with np.errstate(all="ignore"):
                state.end_epoch(evaluate(model, state.params, data, config, workers))
        callback(state, epoch_ended)


# --- Inside the capsule network, for the figures ----------------------------------------------------------------------


class ClassRouting(NamedTuple):
    """T iterations of routing between the M capsules of ConvCaps2, at all positions, and the class capsules."""

    votes: Array  # (N, M, J, D)
    a_in: Array  # (N, M) the children's activations
    r: Array  # (T, N, M, J) assignments that an iteration's M-step used; the sum over J is 1
    mu: Array  # (T, N, J, D)
    a: Array  # (T, N, J)

    @property
    def distances(self) -> Array:
        """Of every vote from its class capsule's mean after each iteration, in pose units: (T, N, M, J)."""
        return np.stack([np.linalg.norm(self.votes - mu[:, None], axis=-1) for mu in self.mu])

    @property
    def weights(self) -> Array:
        """Assignment times activation, (T, N, M, J)."""
        return self.r * self.a_in[:, :, None]


def class_routing(params: Params, images: Array, config: Config) -> ClassRouting:
    """The class layer's routing of a few images (N, H, W, C), each of which is one field, every iteration."""
    steps = make_capsules(config, PLAIN).forward(params, prepared(images, config))[1].routing.em.m_steps
    r, mu, a = (np.stack([getattr(step, name) for step in steps]) for name in ("r", "mu", "a"))
    return ClassRouting(steps[0].votes, steps[0].a_in, r, mu, a)


# --- A run from beginning to end --------------------------------------------------------------------------------------


def train_all(config: Config, data: Data, options: Any = NO_OPTIONS, **more: Any) -> dict[str, TrainState]:
    """Train the models one after the other, and return their states. ``more`` as in ``Session``."""
    session = Session(EXPERIMENT, config, make_models, options, **more)
    with Workers(options.threads) as workers:
        for model, state in session.trainings(lambda name: steps_per_epoch(config, data) * of_model(name, config)[0]):
            train(model, config, data, state, workers, session.after_step)
    return session.trained


def run(config: Config, options: Any = NO_OPTIONS, **more: Any) -> tuple[dict[str, Any], dict[str, TrainState]]:
    """Data, trainings, tests -> the result and the states. ``more`` as in ``Session``."""
    data = make_data(config)
    config = multimnist.resolve_auto(config, data)
    states = train_all(config, data, options, **more)
    return make_result(config, states, data, options.threads), states


def make_result(config: Config, states: Mapping[str, TrainState], data: Data, threads: int = 1) -> dict[str, Any]:
    """The JSON of a run; accuracies are fractions, those of the last epoch; "drop" is familiar minus held out.
    Accuracies at an angle are metrics such as ``azimuth_60_accuracy``."""
    models: dict[str, dict[str, Any]] = {}
    networks = make_models(config)
    for name, state in states.items():
        models[name] = model_metrics(state)
        if data.held_out is None:
            continue
        models[name]["drop"] = models[name]["familiar_accuracy"] - models[name]["held_out_accuracy"]
        with Workers(threads) as workers:
            for part in (data.test, data.held_out):
                scores = predict_scores(networks[name], state.params, part, config, workers)
                right = scores.argmax(axis=1) == part.labels
                assert part.angles is not None
                models[name] |= smallnorb.angle_accuracies(config, part.angles, right)
        models[name] |= smallnorb.class_accuracies(config, data.held_out.labels, right)
    headline = "held_out_accuracy" if config.has_held_out else "accuracy"
    return result_document(EXPERIMENT, config, data.name, models, states, headline)


def describe(result: Mapping[str, Any]) -> str:
    """One line: the data, of views what is held out, and the training."""
    config, data = from_json(Config, result["config"]), result["dataset"]
    if config.has_views:
        data = smallnorb.describe(config) if config.has_held_out else f"{data}: no viewpoints held out"
    if config.n_val or config.n_val_objects:
        data += f"; accuracies on validation {'digits' if config.n_val else 'objects'}"
    of_cnn = f" (the CNN {config.cnn_epochs})" if config.cnn_epochs != config.n_epochs else ""
    return f"{data}; seed {config.seed}, {config.n_epochs} epochs{of_cnn}, {config.loss} loss"


def format_table(result: Mapping[str, Any]) -> str:
    models = result["models"]
    held_out = "drop" in next(iter(models.values()))
    metrics = ("familiar_accuracy", "held_out_accuracy", "drop") if held_out else ("accuracy",)
    heads = " ".join(f"{metric.removesuffix('_accuracy').replace('_', ' '):>8}" for metric in metrics)
    lines = [f"{'model':<10} {heads} {'parameters':>10} {'seconds':>8}"]
    for name, m in models.items():
        cells = " ".join(f"{m[metric]:8.4f}" for metric in metrics)
        lines.append(f"{name:<10} {cells} {m['n_params']:10,} {m['train_seconds']:8.1f}")
    return "\n".join(lines)


# --- Prediction for image files (--predict) ---------------------------------------------------------------------------

DIGIT_BOX = 20  # pixels: MNIST's digits fill a box of this side


def predict(checkpoint: Path, pictures: Sequence[Path]) -> str:
    """A table: for each image the class that each model names, and the class capsules' activations. Raises UserError
    where a file cannot be read."""
    config, states = read_checkpoint(checkpoint, EXPERIMENT, Config, make_models)
    read_strokes = from_data("pictures").read_strokes  # it needs Pillow
    if left := unfinished(EXPERIMENT, checkpoint, config, states):
        print_message(f"warning: {left}")
    if config.has_views or "capsules" not in states:
        raise UserError(f"{checkpoint} has no capsules that learned digits; your_own_images.py learns any images")
    models, classes, width = make_models(config), config.classes, max(len(str(path)) for path in pictures)
    heads = " ".join(f"{name:>12}" for name in states)
    lines = [f"{'image':<{width}} {heads}   activations: " + " ".join(f"{name:>5}" for name in classes)]
    for path in pictures:
        image = read_strokes(path, config.image_size, DIGIT_BOX)[None, ..., None].astype(config.dtype)
        found = {name: models[name].forward(state.params, image) for name, state in states.items()}
        named = " ".join(f"{classes[scores.argmax()]:>12}" for scores, _ in found.values())
        lines.append(f"{path!s:<{width}} {named}   " + " ".join(f"{a:.3f}" for a in found["capsules"][1].a[0]))
    return "\n".join(lines)


# --- Command line -----------------------------------------------------------------------------------------------------


@script
def main(argv: Sequence[str]) -> None:
    config, options, given = parse(
        Config, Options, argv, "Train convolutional matrix capsules and a CNN on digits or on views of objects.",
        ("--n-train 6000 --n-epochs 2", "A short training on MNIST: about 30 seconds."),
        ("--dataset voxels", "Both models on held-out views of the write-up's objects: about 20 seconds."),
        ("--checkpoint run.npz --predict digit.png", "The digit in an image: about 1 second."),
    )
    if options.predict:
        require_alone(given, "predict", "checkpoint")
        assert options.checkpoint
        print(predict(options.checkpoint, options.predict))
        return
    require_own_outputs(EXPERIMENT, config, options)
    result, states = run(config, options, names=options.models)
    report(result, f"{describe(result)}\n{format_table(result)}", options, states)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
