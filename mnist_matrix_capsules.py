#!/usr/bin/env python3
"""Convolutional matrix capsules on MNIST, and what an attacker can do to them, in numpy, every gradient by hand.

Claims reproduced: [Hinton 2018] G. Hinton, S. Sabour, N. Frosst, "Matrix capsules with EM routing", ICLR 2018. The
network of its figure 1, whose capsules share their transformation matrices over positions, reads handwritten digits
(section 5 reports 0.44 % test errors on MNIST); and it is harder to fool by small changes of an image, made along the
gradient of the loss, than a convolutional network is (section 6 and figure 3, on smallNORB).

    image            (B, 28, 28, 1)                        sizes A, B, C, D: 32, 4, 4, 8; all 32 in the paper
    conv1 + ReLU     (B, 14, 14, A)                        5x5, stride 2, padding 2
    primary capsules (B, 14, 14, B, 4, 4), (B, 14, 14, B)  1x1: poses and activations
    ConvCaps1        (B, 6, 6, C, 4, 4), (B, 6, 6, C)      3x3, stride 2, EM routing
    ConvCaps2        (B, 4, 4, D, 4, 4), (B, 4, 4, D)      3x3, stride 1, EM routing
    class capsules   (B, 10, 4, 4), (B, 10)                1x1, EM routing over all positions, coordinates added

These layers, EM routing, the losses, the optimiser, the loop and the checkpoints are those of
smallnorb_novel_viewpoint.py; the digits are those of multimnist_capsnet.py. The baseline is a CNN with convolutions of
the same sides and strides in the place of the capsules, as wide as gives it the same number of parameters.

Deviations from the paper: MNIST in the place of smallNORB (``--dataset smallnorb`` reads the real files); narrower
layers and two iterations of EM routing (``--sizes 64,8,16,16 --em-iters 3`` is its smaller network); a floor under the
variances; Adam with a learning rate that falls to 0. The transformation matrices start near the identity, and beta_v
where agreement activates: from there the training gets going without dead capsules.

Run it (both models, seed 0, and both attacks):

    python mnist_matrix_capsules.py --attack fgsm,iterated
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import multimnist_capsnet as digits
import smallnorb_novel_viewpoint as views
from multimnist_capsnet import CACHE_DIR
from smallnorb_novel_viewpoint import (
    Array,
    LinearCache,
    Model,
    Params,
    conv_capsnet_backward,
    conv_capsnet_forward,
    conv_capsnet_init,
    conv_cnn_backward,
    conv_cnn_channels,
    conv_cnn_forward,
    conv_cnn_init,
    evaluate,
    init_state,
    linear_backward,
    linear_forward,
    predict_scores,
    relu_backward,
    relu_forward,
    sigmoid_backward,
    sigmoid_forward,
    softmax_cross_entropy,
    spread_loss,
    spread_margin,
    worker_threads,
)
from support.optimizers import TrainState, adamw_step, count_params
from support.pictures import prediction_table
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
    check_file_flags,
    check_same,
    exit_status,
    generator,
    list_of,
    names_of,
    non_empty,
    number,
    of_models,
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
from support.workers import default_threads

# Dimension letters
#   B  images of a batch             N  images of a set         H, W  rows and columns of a map      C  channels
#   E  class capsules (= classes)    D  pose entries (16)       F  channels of the CNN               M  decoder's inputs

EXPERIMENT = "mnist_matrix_capsules"
MODEL_NAMES = ("capsules", "cnn")
ATTACKS = ("fgsm", "iterated")
EVALUATION_BATCH = 32  # the cache is better used than with more


# ----------------------------------------------------------------------------------------------------------------------
# Configuration: what a person chooses, and nothing else
# ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    """One run. The paper's values, where others are the default, are in the comments. [Hinton 2018, sec. 4 and 5]"""

    dataset: str = "auto"  # smallNORB
    data_dir: str | None = None
    seed: int = 0
    n_epochs: int = 5
    n_train: int | None = None
    n_test: int | None = None
    shift: int = 0
    sizes: tuple[int, int, int, int] = (32, 4, 4, 8)  # 32, 32, 32, 32; or 64, 8, 16, 16
    em_iters: int = 2  # 3, the best of its table 1 by a small margin
    em_grad: str = "exact"
    em_lambda: float = 1.0  # not given
    lambda_schedule: str = "constant"
    variance_floor: float = 0.5  # 0
    beta_v_init: float = -0.2  # not given; below 0, votes that agree activate a parent the more, the more they are
    loss: str = "spread"
    batch_size: int = 32
    lr: float = 0.015
    cnn_lr: float = 3e-3
    lr_schedule: str = "linear"
    dtype: str = "float32"
    attack: tuple[str, ...] = ()
    epsilons: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
    attack_steps: int = 10
    n_attack: int = 200

    @property
    def has_digits(self) -> bool:
        return self.dataset not in ("voxels", "smallnorb")

    @property
    def views(self) -> views.Config:
        """The other script's configuration, of its data set and of what both do in EM routing."""
        real: dict[str, Any] = {
            "train_azimuths": (300.0, 400.0),
            "test_azimuths": (60.0, 280.0),
        }  # [Hinton 2018, sec. 5.1]
        real |= {"train_elevations": (30.0, 70.0), "test_elevations": (30.0, 70.0)}
        shared = {k: getattr(self, k) for k in ("data_dir", "seed", "em_iters", "em_lambda", "lambda_schedule")}
        if self.has_digits:
            return views.Config(**shared)
        return views.Config(dataset=self.dataset, **shared, **(real if self.dataset == "smallnorb" else {}))

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple("0123456789") if self.has_digits else self.views.classes

    @property
    def n_classes(self) -> int:
        return len(self.classes)

    @property
    def image_size(self) -> int:
        return digits.DIGIT_SIDE if self.has_digits else views.IMAGE_SIZE

    @property
    def in_channels(self) -> int:
        return 1 if self.has_digits else self.views.in_channels

    @property
    def pixel_range(self) -> tuple[float, float]:
        """Between which values an attacker may move a pixel; smallNORB's are normalised and have no bounds."""
        return (-math.inf, math.inf) if self.dataset == "smallnorb" else (0.0, 1.0)

    @property
    def lambdas(self) -> list[float]:
        """Inverse temperature of each EM iteration, first to last."""
        return self.views.lambdas

    @property
    def free_to_change(self) -> set[str]:
        """What a continued run may have otherwise."""
        return {"data_dir", "attack", "epsilons", "attack_steps", "n_attack"}


# ----------------------------------------------------------------------------------------------------------------------
# Data
# ----------------------------------------------------------------------------------------------------------------------


class Examples(NamedTuple):
    """A labelled set of images."""

    images: Array  # (N, H, W, C) float32
    labels: Array  # (N,)


class Data(NamedTuple):
    name: str  # "mnist", "strokes", "custom", "voxels" or "smallnorb"
    train: Examples
    test: Examples  # for views: other images from the range of the training
    held_out: Examples | None  # viewpoints outside of that range, if the set has viewpoints


def some(images: Array, labels: Array, n: int | None, rng: np.random.Generator | None = None) -> Examples:
    """``n`` of the images (None: all), drawn by ``rng`` or, without it, evenly spaced."""
    if n is None or n >= len(labels):
        return Examples(images, labels)
    chosen = np.linspace(0, len(labels) - 1, n).astype(np.intp) if rng is None else rng.permutation(len(labels))[:n]
    return Examples(images[chosen], labels[chosen])


def make_data(config: Config) -> Data:
    """Raises UserError where files are missing or damaged."""
    rng = generator(config.seed, Stream.DATA, 1)
    if not config.has_digits:
        found = views.make_data(config.views)
        return Data(
            config.dataset,
            some(found.train.images, found.train.labels, config.n_train, rng),
            some(found.familiar.images, found.familiar.labels, config.n_test),
            some(found.held_out.images, found.held_out.labels, config.n_test),
        )
    folder = Path(config.data_dir) if config.data_dir else None
    source = digits.resolve_dataset(config.dataset, generator(config.seed, Stream.DATA), folder)

    def scaled(images: Array, labels: Array) -> Examples:
        return Examples(images[..., None] * np.float32(1 / 255), labels.astype(np.intp))

    train_set = some(source.train_images, source.train_labels, config.n_train, rng)
    test_set = some(source.test_images, source.test_labels, config.n_test)
    return Data(source.name, scaled(*train_set), scaled(*test_set), None)


def augment(config: Config, images: Array, rng: np.random.Generator) -> Array:
    """A training batch (B, H, W, C), each image shifted by up to ``config.shift`` pixels on each axis, by itself.

    smallNORB has its own: random crops, contrast and brightness.
    """
    images = views.crop(images, rng)
    n, side, m = len(images), images.shape[1], config.shift
    if not m:
        return images
    padded = np.pad(images, ((0, 0), (m, m), (m, m), (0, 0)))
    row, column = rng.integers(0, 2 * m + 1, (2, n, 1)) + np.arange(side)  # each (B, H)
    return padded[np.arange(n)[:, None, None], row[:, :, None], column[:, None, :]]


# ----------------------------------------------------------------------------------------------------------------------
# The models as the training loop sees them
# ----------------------------------------------------------------------------------------------------------------------


def make_models(config: Config) -> dict[str, Model]:
    """The capsule network and its baseline, by name, in the order of the result table."""

    def capsules_loss(scores: Array, labels: Array, progress: float) -> tuple[float, Array]:
        if config.loss == "spread":
            return spread_loss(scores, labels, spread_margin(progress))
        return softmax_cross_entropy(scores, labels)

    capsules = Model(
        "capsules",
        lambda rng: conv_capsnet_init(rng, config),
        lambda params, x: conv_capsnet_forward(params, x, config),
        lambda dscores, cache, need_dx=False: conv_capsnet_backward(dscores, cache, config, need_dx),
        capsules_loss,
        EVALUATION_BATCH,
    )
    n_channels = conv_cnn_channels(config, count_params(capsules.init_params(np.random.default_rng(0))))
    cnn = Model(
        "cnn",
        lambda rng: conv_cnn_init(rng, config, n_channels),
        conv_cnn_forward,
        conv_cnn_backward,
        lambda scores, labels, progress: softmax_cross_entropy(scores, labels),
        EVALUATION_BATCH,
    )
    return {"capsules": capsules, "cnn": cnn}


def assess(model: Model, params: Params, data: Data) -> dict[str, float]:
    """Share of the test images that are classified rightly, and of the held-out viewpoints."""
    sets = {"accuracy": data.test, "held_out_accuracy": data.held_out}
    return {k: evaluate(model, params, v) for k, v in sets.items() if v is not None}


def learning_rate(config: Config, model: str, progress: float) -> float:
    """After a share of the training: it rises for a hundredth of it, then follows the schedule."""
    factor = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    lr = config.cnn_lr if model == "cnn" else config.lr
    return lr * factor[config.lr_schedule] * min(1.0, 0.1 + 90 * progress)


def train(
    model: Model, config: Config, data: Data, state: TrainState, callback: Callback | None = None
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
        epoch, position = divmod(state.step, per_epoch)
        batch = permutation(n, config.seed, epoch)[position * config.batch_size :][: config.batch_size]
        x = augment(config, data.train.images[batch], generator(config.seed, Stream.SHUFFLE, epoch, position))
        progress = state.step / max(1, n_steps - 1)
        with np.errstate(all="ignore"):  # a loss that is not finite is reported in words
            scores, cache = model.forward(state.params, x.astype(config.dtype, copy=False))
            loss, dscores = model.loss(scores, data.train.labels[batch], progress)
            grads, _ = model.backward(dscores, cache)
            adamw_step(state, [grads], learning_rate(config, model.name, progress))
        require_finite(state, loss, per_epoch)
        state.add({"train_loss": loss}, weight=len(batch))
        epoch_ended = state.step % per_epoch == 0
        if epoch_ended:
            state.end_epoch(n, assess(model, state.params, data))
        state.seconds += time.perf_counter() - started
        if callback:
            callback(state, epoch_ended)
    return state.history


def steps_per_epoch(config: Config, data: Data) -> int:
    return math.ceil(len(data.train.labels) / config.batch_size)


# ----------------------------------------------------------------------------------------------------------------------
# Attacks: small changes of an image along the sign of the loss's gradient
# ----------------------------------------------------------------------------------------------------------------------


Loss = Callable[[Array, Array], tuple[float, Array]]


def log_odds_cross_entropy(activations: Array, labels: Array) -> tuple[float, Array]:
    """Cross-entropy of a softmax over log(a / (1 - a)): activations (B, E) -> mean loss, dactivations.

    The spread loss of an image that is right by more than the margin is zero, and so is its gradient; and the gradient
    of any loss through a sigmoid that is all but 0 or 1 is all but zero. An attacker who follows these gradients goes
    nowhere, which is no robustness. This loss undoes the sigmoid and knows no margin.
    """
    a = np.clip(activations, 1e-15, 1 - 1e-15)
    loss, dodds = softmax_cross_entropy(np.log(a) - np.log1p(-a), labels)
    return loss, dodds / (a * (1 - a))


def attack_losses(model: Model, config: Config) -> dict[str, Loss]:
    """What is attacked: a model's own loss at the end of its training and, where that is bounded, the log-odds."""
    losses: dict[str, Loss] = {"": lambda scores, labels: model.loss(scores, labels, 1.0)}
    if config.loss == "spread":  # the capsules'; the CNN has scores of any size, and the same attack twice
        losses["_log_odds"] = log_odds_cross_entropy if model.name == "capsules" else losses[""]
    return losses


def image_gradient(model: Model, params: Params, images: Array, labels: Array, loss: Loss) -> Array:
    """Gradient of the loss with respect to the images (B, H, W, C)."""
    scores, cache = model.forward(params, images)
    dx = model.backward(loss(scores, labels)[1], cache, need_dx=True)[1]
    assert dx is not None
    return dx


def attack(
    model: Model,
    params: Params,
    images: Array,
    labels: Array,
    loss: Loss,
    epsilon: float,
    n_steps: int = 1,
    pixel_range: tuple[float, float] = (0.0, 1.0),
) -> Array:
    """Images (B, H, W, C) that raise the loss, no pixel of which is moved by more than ``epsilon`` or out of its range.

    One step is the fast gradient sign method [Goodfellow 2015, sec. 4]; several, of epsilon / n_steps each, are the
    basic iterative method [Kurakin 2017, sec. 2.2], its step size as in [Hinton 2018, sec. 6].
    """
    low, high = np.maximum(images - epsilon, pixel_range[0]), np.minimum(images + epsilon, pixel_range[1])
    x = images
    for _ in range(n_steps):
        step = epsilon / n_steps * np.sign(image_gradient(model, params, x, labels, loss))
        x = np.clip(x + step, low, high)
    return x


def robustness(model: Model, params: Params, examples: Examples, config: Config) -> dict[str, Any]:
    """Accuracy under each attack of ``config``, by epsilon; and the share of images whose gradient is zero throughout,
    so that an attacker has nothing to go by. Works in the parameters' precision."""
    found: dict[str, Any] = {}
    dtype = params["conv1.w"].dtype
    images, labels = views.crop(examples.images, None).astype(dtype), examples.labels
    batches = [slice(i, i + EVALUATION_BATCH) for i in range(0, len(labels), EVALUATION_BATCH)]
    for suffix, loss in attack_losses(model, config).items():
        for name in config.attack:
            n_steps = config.attack_steps if name == "iterated" else 1
            found[name + suffix] = {}
            for epsilon in (0.0, *config.epsilons):
                right = 0
                for b in batches:
                    x = images[b]
                    if epsilon:
                        x = attack(model, params, x, labels[b], loss, epsilon, n_steps, config.pixel_range)
                    right += int((model.forward(params, x)[0].argmax(axis=1) == labels[b]).sum())
                found[name + suffix][f"{epsilon:g}"] = right / len(labels)
        grads = [image_gradient(model, params, images[b], labels[b], loss) for b in batches]
        found["zero_gradient" + suffix] = float(np.concatenate([(g == 0).all(axis=(1, 2, 3)) for g in grads]).mean())
    return found


def attack_all(config: Config, states: dict[str, TrainState], data: Data) -> dict[str, Any]:
    """The attacks of ``config`` on every model, with its weights known: in float64, where gradients seldom vanish by
    rounding, and with the exact gradient through EM, whatever the training used."""
    if not config.attack:
        return {}
    config = dataclasses.replace(config, dtype="float64", em_grad="exact")
    examples = some(*data.test, config.n_attack)
    found = {}
    for name, model in make_models(config).items():
        if name in states:
            params = {k: p.astype(np.float64) for k, p in states[name].params.items()}
            found[name] = robustness(model, params, examples, config)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Inside the routing: what the figures show
# ----------------------------------------------------------------------------------------------------------------------


class ClassRouting(NamedTuple):
    """How the M children of the class capsules, those of ConvCaps2 at all positions, come to be assigned in T steps."""

    votes: Array  # (N, M, E, D)
    a_in: Array  # (N, M) the children's activations
    r: Array  # (T, N, M, E) assignments with which an iteration's means were made; 1 in sum over E
    mu: Array  # (T, N, E, D)
    a: Array  # (T, N, E)

    @property
    def distances(self) -> Array:
        """Of every vote from its class capsule's mean after each iteration, in pose units: (T, N, M, E)."""
        return np.stack([np.linalg.norm(self.votes - mu[:, None], axis=-1) for mu in self.mu])

    @property
    def weights(self) -> Array:
        """What a vote counts: assignment times activation, (T, N, M, E)."""
        return self.r * self.a_in[:, :, None]


def prepared(images: Array, config: Config) -> Array:
    """Images (N, H, W, C) of a data set as the network is given them in a test."""
    return views.crop(images, None).astype(config.dtype, copy=False)


def class_routing(params: Params, images: Array, config: Config) -> ClassRouting:
    """The class layer's routing of a few images (N, H, W, C), every iteration."""
    routing = conv_capsnet_forward(params, prepared(images, config), config)[1].routing
    n, n_classes, iterations = len(images), config.n_classes, routing.iterations
    return ClassRouting(
        routing.votes().reshape(n, -1, n_classes, views.POSE_SIDE**2),
        routing.a_in.reshape(n, -1),
        np.stack([now.r.reshape(n, -1, n_classes) for now in iterations]),
        np.stack([now.mu for now in iterations]),
        np.stack([now.a for now in iterations]),
    )


def field_assignments(params: Params, images: Array, config: Config) -> dict[str, list[Array]]:
    """By layer, "convcaps1" and "convcaps2": the assignments of a few images, every iteration, each of shape
    (N, Ho, Wo, K, K, I, J). A child (its own place is stride * (Ho, Wo) + (K, K)) has 1 in sum over all its parents."""
    cache = conv_capsnet_forward(params, prepared(images, config), config)[1]
    return {"convcaps1": cache.convcaps1.assignments, "convcaps2": cache.convcaps2.assignments}


# ----------------------------------------------------------------------------------------------------------------------
# The decoder: what a class capsule's pose says of the image. Trained after the capsules, which it leaves as they are.
# ----------------------------------------------------------------------------------------------------------------------

DECODER_WIDTHS = (128, 256)


def class_capsules(params: Params, images: Array, config: Config) -> tuple[Array, Array]:
    """Images (N, H, W, C) -> poses (N, E, D) and activations (N, E) of the class capsules."""
    poses, activations = [], []
    for start in range(0, len(images), EVALUATION_BATCH):
        cache = conv_capsnet_forward(params, prepared(images[start : start + EVALUATION_BATCH], config), config)[1]
        poses.append(cache.mu)
        activations.append(cache.a)
    return np.concatenate(poses), np.concatenate(activations)


def mask_poses(poses: Array, labels: Array) -> Array:
    """poses (N, E, D), labels (N,) -> (N, E * D) with all but the labelled class's pose zero."""
    masked = np.zeros_like(poses)
    rows = np.arange(len(labels))
    masked[rows, labels] = poses[rows, labels]
    return masked.reshape(len(labels), -1)


def decoder_init(rng: np.random.Generator, config: Config) -> Params:
    n_pixels = config.image_size**2 * config.in_channels
    widths = (config.n_classes * views.POSE_SIDE**2, *DECODER_WIDTHS, n_pixels)
    params: Params = {}
    for k, (n_in, n_out) in enumerate(itertools.pairwise(widths), start=1):
        params[f"dense{k}.w"] = rng.normal(0, math.sqrt(2 / n_in), (n_in, n_out)).astype(config.dtype)
        params[f"dense{k}.b"] = np.zeros(n_out, config.dtype)
    return params


class DecoderCache(NamedTuple):
    layers: list[LinearCache]
    outputs: list[Array]  # of the ReLUs, and of the sigmoid


def decoder_forward(params: Params, masked: Array) -> tuple[Array, DecoderCache]:
    """masked poses (B, M) -> pixels (B, H * W * C) between 0 and 1."""
    x, layers, outputs = masked, [], []
    n = len(params) // 2
    for k in range(1, n + 1):
        x, layer = linear_forward(x, params[f"dense{k}.w"], params[f"dense{k}.b"])
        x, _ = relu_forward(x) if k < n else sigmoid_forward(x)
        layers.append(layer)
        outputs.append(x)
    return x, DecoderCache(layers, outputs)


def decoder_backward(dpixels: Array, cache: DecoderCache, need_dx: bool = False) -> tuple[Params, Array | None]:
    """dpixels (B, H * W * C) -> gradients under the parameters' names, and those of the masked poses (B, M)."""
    grads: Params = {}
    n = len(cache.layers)
    dx = sigmoid_backward(dpixels, cache.outputs[-1])
    for k in range(n, 0, -1):
        if k < n:
            dx = relu_backward(dx, cache.outputs[k - 1])
        dx, grads[f"dense{k}.w"], grads[f"dense{k}.b"] = linear_backward(dx, cache.layers[k - 1])
    return grads, dx


def pixel_loss(pixels: Array, target: Array) -> tuple[float, Array]:
    """Squared error summed over an image's pixels (B, H * W * C), mean over the batch."""
    error = pixels - target
    return float((error * error).sum() / len(error)), 2 / len(error) * error


def train_decoder(
    params: Params, images: Array, labels: Array, config: Config, n_epochs: int = 20, lr: float = 2e-3
) -> tuple[Params, list[float]]:
    """Teach a decoder to draw images (N, H, W, C) from the poses that the capsules ``params`` give their labelled
    classes. Returns its parameters and the loss of every epoch: squared error, summed over an image.

    The images are given as to a test: without shifts. Their values should lie between 0 and 1.
    """
    poses, _ = class_capsules(params, images, config)
    inputs, targets = mask_poses(poses, labels), prepared(images, config).reshape(len(images), -1)
    n, per_epoch = len(images), math.ceil(len(images) / config.batch_size)
    state = TrainState("decoder", decoder_init(generator(config.seed, Stream.INIT, *b"decoder"), config))
    for step in range(per_epoch * n_epochs):
        epoch, position = divmod(step, per_epoch)
        batch = permutation(n, config.seed, epoch)[position * config.batch_size :][: config.batch_size]
        progress = step / max(1, per_epoch * n_epochs - 1)
        pixels, cache = decoder_forward(state.params, inputs[batch])
        loss, dpixels = pixel_loss(pixels, targets[batch])
        grads, _ = decoder_backward(dpixels, cache)
        adamw_step(state, [grads], lr * (1 - progress) * min(1.0, 0.1 + 90 * progress))
        require_finite(state, loss, per_epoch)
        state.add({"train_loss": loss}, weight=len(batch))
        if position == per_epoch - 1:
            state.end_epoch(n, {})
    return state.params, state.history["train_loss"]


def decode(decoder: Params, poses: Array, labels: Array, config: Config) -> Array:
    """poses (N, E, D), labels (N,) -> pictures (N, H, W, C) of the labelled classes' poses."""
    pixels, _ = decoder_forward(decoder, mask_poses(poses, labels))
    return pixels.reshape(len(labels), config.image_size, config.image_size, config.in_channels)


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


def run(config: Config, files: Files = NO_FILES, threads: int = 1, **options: Any) -> dict[str, Any]:
    """Data, trainings, attacks, result. The options are those of ``train_all``."""
    files.require_checkpoint(EXPERIMENT)
    data = make_data(config)
    config = digits.settled(config, data.name)
    with worker_threads(threads):
        states = train_all(config, data, files=files, **options)
        return make_result(config, data.name, states, attack_all(config, states, data), threads)


TEST_FIELDS = ("dataset", "data_dir", "seed", "n_test", "attack", "epsilons", "attack_steps", "n_attack")


def evaluate_checkpoint(
    checkpoint: Path, asked: Config, given: Collection[str] = (), names: Collection[str] = MODEL_NAMES, threads: int = 1
) -> dict[str, Any]:
    """Test and attack the named networks of a checkpoint on the test set of ``asked``; see ``check_same`` for
    ``given``."""
    saved, states = load_checkpoint(checkpoint)
    check_same(checkpoint, saved, asked, given, TEST_FIELDS)
    states = of_models(checkpoint, states, names)
    config = dataclasses.replace(saved, **{k: getattr(asked, k) for k in TEST_FIELDS})
    shapes = [(c.image_size, c.in_channels, c.classes) for c in (saved, config)]
    if shapes[0] != shapes[1]:
        raise UserError(
            f"{checkpoint} was trained on {saved.dataset}, whose images and classes are not those of {asked.dataset}"
        )
    data = make_data(config)
    config = digits.settled(config, data.name)
    with worker_threads(threads):
        for name, model in make_models(config).items():
            if name in states:
                tested = assess(model, states[name].params, data)
                states[name].history = {k: [v] for k, v in tested.items()}
        result = make_result(config, data.name, states, attack_all(config, states, data), threads)
    return result | {"trained_with_seed": saved.seed}


def make_result(
    config: Config, data_name: str, states: dict[str, TrainState], attacks: dict[str, Any], threads: int = 1
) -> dict[str, Any]:
    """The JSON of a run; accuracies are fractions, those of the last epoch. What the attacks leave of them stands in
    ``attack`` by epsilon, and again among a model's metrics, where seeds are compared."""
    models = {}
    for name, state in states.items():
        models[name] = {
            "n_params": count_params(state.params),
            **{k: v[-1] for k, v in state.history.items() if k.endswith("accuracy") and v},
            "train_seconds": round(state.seconds, 3),
        }
        for kind, found in attacks.get(name, {}).items():
            if isinstance(found, dict):
                models[name] |= {f"{kind}_{epsilon}_accuracy": v for epsilon, v in found.items()}
            else:
                models[name][kind] = found
    result = result_document(
        EXPERIMENT, config, data_name, models, states, threads, "accuracy", 1 / config.n_classes
    )  # fmt: skip
    return result | ({"attack": attacks} if attacks else {})


def describe(result: dict[str, Any]) -> str:
    """One line: on what the figures were measured."""
    config = result["config"]
    seed = f"{result['seed']}{digits.training_seed(result)}"
    return f"{result['dataset']}; seed {seed}, {config['n_epochs']} epochs, {config['loss']} loss"


def format_table(result: dict[str, Any]) -> str:
    """The result table, and one of what each attack leaves of the accuracy."""
    models = result["models"]
    held_out = any("held_out_accuracy" in m for m in models.values())
    lines = [f"{'model':<10} {'accuracy':>8} {'held out' if held_out else '':>8} {'parameters':>10} {'seconds':>8}"]
    for name, m in models.items():
        other = f"{m['held_out_accuracy']:8.4f}" if held_out else " " * 8
        lines.append(f"{name:<10} {m['accuracy']:8.4f} {other} {m['n_params']:10,} {m['train_seconds']:8.1f}")
    if "attack" in result:
        epsilons = ["0", *(f"{epsilon:g}" for epsilon in result["config"]["epsilons"])]
        lines += ["", f"{'attack':<32} " + " ".join(f"{e:>6}" for e in epsilons) + "  no gradient"]
        for name, found in result["attack"].items():
            for kind, by_epsilon in found.items():
                if isinstance(by_epsilon, dict):
                    zero = found["zero_gradient" + ("_log_odds" if kind.endswith("_log_odds") else "")]
                    cells = " ".join(f"{by_epsilon[e]:6.3f}" for e in epsilons)
                    lines.append(f"{name + ': ' + kind.replace('_', ' '):<32} {cells}  {zero:11.3f}")
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------------
# A person's own pictures
# ----------------------------------------------------------------------------------------------------------------------

INK_SIDE = 20  # pixels: MNIST's digits fill a box of this side


def read_picture(path: Path, config: Config) -> Array:
    """A picture file -> (1, H, W, C), prepared as the data set is. Raises UserError where it cannot be read."""
    if not config.has_digits:
        return views.read_picture(path, config.views)
    return digits.read_picture(path, config, INK_SIDE)[None, :, :, None]


def predict(checkpoint: Path, pictures: list[Path], asked: Config, given: Collection[str] = ()) -> str:
    """A table: for each picture the class that each model names, and the class capsules' activations. Flags that were
    ``given`` must be those of the checkpoint."""
    config, states = load_checkpoint(checkpoint)
    check_same(checkpoint, config, asked, given)
    if "capsules" not in states:
        raise UserError(f"{checkpoint} has no capsule network")
    models = make_models(config)
    images = np.concatenate([read_picture(path, config) for path in pictures])
    scores = {name: predict_scores(models[name], state.params, images) for name, state in states.items()}
    _, activations = class_capsules(states["capsules"].params, images, config)
    return prediction_table(pictures, config.classes, scores, activations)


# ----------------------------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------------------------


def epsilon_list(text: str) -> tuple[float, ...]:
    epsilons = tuple(number(0, 10, above=True)(part) for part in text.split(","))
    if list(epsilons) != sorted(set(epsilons)):
        raise argparse.ArgumentTypeError(f"{text} does not rise")
    return epsilons


# fmt: off
def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that make up a Config; the scripts that draw figures have them too."""
    count, positive = whole_number(1, 10**7), number(0, 10, above=True)
    add = add_flags(parser, "data", Config)
    add("dataset", ("auto", "mnist", "strokes", "voxels", "smallnorb"),
        "auto: MNIST if it is there or can be downloaded, else generated digits")
    add("data_dir", non_empty, "folder of the four MNIST files, or of the six of smallNORB", "DIR", CACHE_DIR)
    add("n_train", count, "training images, drawn with the seed", default="all")
    add("n_test", count, "test images, evenly spaced over the set", default="all")
    add("shift", whole_number(0, 8), "training images are shifted by up to N pixels on each axis")
    add = add_flags(parser, "capsules", Config)
    add("sizes", list_of(whole_number(1, 1024), 4, "32,8,8,8"), "channels of conv1, types of primary capsules and of"
        " those of the two layers above; the paper has 32,32,32,32 and 64,8,16,16", "A,B,C,D")
    add("em_iters", whole_number(1, 20), "routing iterations")
    add("em_grad", ("exact", "stop"), "gradient through all iterations, or the last M-step with assignments constant")
    add("em_lambda", number(0, 1000, above=True), "inverse temperature of the last iteration", "X")
    add("lambda_schedule", ("constant", "linear", "exponential"),
        "inverse temperature of iteration t of T: X, X t / T, or X (1 - 0.95^t)")
    add("variance_floor", number(0, 1e6, above=True), "added to every variance of a routing iteration", "X")
    add("beta_v_init", number(-10, 10),
        "beta_v before training, above -log(variance floor) / 2, where votes that agree cost nothing", "X")
    add = add_flags(parser, "training", Config)
    add("seed", whole_number(0, 2**32 - 1), "of data, initial weights and order")
    add("n_epochs", whole_number(1, 100_000), "passes over the training set")
    add("batch_size", whole_number(1, 4096), "images of a step")
    add("lr", positive, "Adam's learning rate for the capsules", "X")
    add("cnn_lr", positive, "the same for the CNN", "X")
    add("lr_schedule", ("constant", "linear", "cosine"), "linear and cosine fall to 0")
    add("loss", ("spread", "cross-entropy"), "of the capsules: the paper's, on the activations, or on a score of pose"
        " and activation; the CNN always has cross-entropy")
    add("dtype", ("float32", "float64"), "of all arithmetic")
    add = add_flags(parser, "attacks", Config)
    add("attack", names_of(ATTACKS), "after the training, measure the accuracy under fgsm and iterated", "A,B")
    add("epsilons", epsilon_list, "how far a pixel may be moved", "X,Y")
    add("attack_steps", whole_number(1, 1000), "of the iterated attack, each of epsilon / N")
    add("n_attack", count, "test images that are attacked")
    parser.add_argument("--threads", type=whole_number(1, 256), metavar="N", default=default_threads(),
        help="no number depends on it; default: one for each processor, at most 4 (here: %(default)s)")
# fmt: on


def config_from_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Config:
    """A usage error (status 2) where flags do not fit together."""
    if args.dataset == "smallnorb" and args.data_dir is None:
        parser.error("argument --dataset: smallnorb needs --data-dir DIR, the folder of the six official files")
    if args.dataset in ("voxels", "strokes") and args.data_dir is not None:
        parser.error(f"argument --data-dir: {args.dataset} has no files")
    return Config(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Config)})


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        description="Train convolutional matrix capsules and a CNN of equal size on digits, and attack both.",
        epilog="With no flags: both models on all of MNIST, seed 0, no attack.",
    )
    add_config_flags(parser)
    add_file_flags(parser, MODEL_NAMES)
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    check_file_flags(parser, args)
    config = config_from_args(parser, args)

    def body() -> None:
        if args.predict:
            print_result(predict(args.checkpoint, args.predict, config, args.given))
            return
        require_writable(args.out_json, None if args.eval_only else args.checkpoint)
        if args.eval_only:
            result = evaluate_checkpoint(args.checkpoint, config, args.given, args.models, args.threads)
        else:
            result = run(config, Files.from_args(args), args.threads, names=args.models)
        result["command"] = recorded_command(EXPERIMENT, argv)
        report_result(args.out_json, result, f"{describe(result)}\n{format_table(result)}")

    return exit_status(body)


if __name__ == "__main__":
    sys.exit(main())
