"""Rotated and affine-distorted digits: a capsule network against LeNet-5 and a CNN that never saw a distorted one.

Claim tested: a capsule network that was trained on upright digits alone recognises rotated and distorted ones better
than a convolutional network of the same upright accuracy. [Sabour 2017] S. Sabour, N. Frosst, G. Hinton, "Dynamic
routing between capsules", NIPS 2017, section 5.2 (affNIST: 79 % against 66 %); and a DZone article, "Approaching the
problem of equivariance with Hinton's capsule networks" (LeNet-5 98.68 % upright and 76.05 % rotated; CapsNet 99.37 %,
84.09 % and 92.12 %. Its text says 35 degrees, its listing 15).

    image            (B, 28, 28)           one digit, shifted by up to 2 pixels in training; or, with --canvas 40,
                                           (B, 40, 40), one digit anywhere
    capsnet          as in multimnist_capsnet.py: 9x9 convolution, primary capsules (36 x 8 of them at 28x28), three
                                           iterations of dynamic routing, decoder
    cnn              as "cnn_pool" there: two convolutions with max pooling, a dense layer that brings it to the
                                           parameters of the capsule network, softmax
    lenet            (B, 24, 24, 6)        5x5 conv, ReLU, 2x2 average pooling
                     (B, 8, 8, 16)         5x5 conv, ReLU, 2x2 average pooling
                     256 - 120 - 84 - 10   44,426 parameters, softmax; at 40x40 the 256 grow to 784

The capsule network, the CNN and the MNIST loader are those of multimnist_capsnet.py. New here: average pooling,
LeNet-5, single digits, and the test sets:

    upright          test digits as they are; on the 40x40 canvas at random positions
    rotated          the same, rotated about their middle by a fixed angle; and a sweep from -90 to 90 degrees
    affNIST          (40x40) each rotated by up to 20 degrees, sheared by up to 0.2, scaled by 0.8 to 1.2 along each
                     axis, and shifted at random so that no stroke is cut off; or the published files (--affnist)

All images are grey values from 0 to 1.

Deviations: rotated images are sampled bilinearly, the article's to the nearest pixel; 5,000 training digits are held
out for validation; a smaller capsule network, as in multimnist_capsnet.py; affNIST is made anew from its published
ranges unless its files are given.

Run it (seed 0, three models; twelve epochs of 28x28, and what the paper did with affNIST):

    python -m more.mnist_affine_capsnet
    python -m more.mnist_affine_capsnet --canvas 40 --conv-channels 16 --primary-types 4 --n-epochs 4 \
        --match-accuracy 0.98
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import multimnist_capsnet as multimnist
from data.affnist_file import AFFNIST_SIDE, read_affnist
from multimnist_capsnet import (
    CNN, INPUT, NO_OPTIONS, Array, Batch, Callback, CapsNetConfig, ConvLayer, Network, Pair, Params, Session,
    SettingError, Stream, TrainState, UserError, Workers, assess, count_params, float_in, generator, int_in, list_of,
    one_of, parse, report, require_own_outputs, result_document, script, setting, update,
)
from smallnorb_novel_viewpoint import fraction_right, permutation
from support.experiment import redeclared

# Dimension letters as in multimnist_capsnet.py:
#   B  images of a batch          N  images of a set        H, W, S  rows, columns, side of an image
#   C  channels                   J  classes                D        entries of a digit capsule

EXPERIMENT = "mnist_affine_capsnet"
MODEL_NAMES = ("capsnet", "cnn", "lenet")
SWEEP = tuple(range(-90, 91, 5))  # degrees


# --- Configuration ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config(CapsNetConfig):
    """One run. Of the numbers of digits None means all that there are."""

    n_train: Any = redeclared(CapsNetConfig, "n_train", None, convert=int_in(1, 10**6).convert, paper="",
        help="Train on N digits.", shown="all that are not held out for validation")
    n_epochs: int = redeclared(CapsNetConfig, "n_epochs", 12)
    batch_size: int = redeclared(CapsNetConfig, "batch_size", 16)
    lr: float = redeclared(CapsNetConfig, "lr", 4e-3, help="Learning rate of the capsule network."
        " It rises for 100 steps and falls linearly to 0 at the end.")
    cnn_lr: float = setting(2e-3, float_in(1e-9, 10), "The same for both CNNs.")
    optimizer: str = "adam"
    weight_decay: float = 0.0
    canvas: int = setting(multimnist.DIGIT_SIDE, (multimnist.DIGIT_SIDE, AFFNIST_SIDE), "Side of the images in pixels:"
        " 28 for digits as they are, shifted by up to 2 pixels in training; 40 for digits anywhere on the canvas, as in"
        " affNIST.",
        usual=True, group="single digits")
    n_val: int = setting(5000, int_in(1, 10**6), "Hold N training digits out for validation.")
    n_test: int | None = setting(None, int_in(1, 10**6), "Test on N digits.", "all")
    n_sweep: int = setting(2000, int_in(1, 10**6), "Test N digits at each angle from -90 to 90 degrees in steps of 5.")
    rotation: tuple[float, ...] = (15.0, 35.0)  # degrees, counter-clockwise: those of the article's listing and text
    match_accuracy: float | None = setting(None, float_in(1e-9, 1), "Stop each model as soon as it has the"
        " accuracy X on the validation digits.", shown="train for all epochs")
    check_every: int = setting(500, int_in(1, 10**9), "Check every N steps whether a model has the --match-accuracy.")
    image_size: Any = None  # the canvas
    max_shift: Any = None  # pixels: 2 in training [Sabour 2017, sec. 5]; 6 on the canvas of 40, where that is anywhere

    def dependent(self) -> dict[str, Any]:
        return super().dependent() | {"max_shift": 6 if self.canvas == AFFNIST_SIDE else 2, "image_size": self.canvas}

    def check(self) -> None:
        super().check()
        if self.match_accuracy is None and self.check_every != Config.check_every:
            raise SettingError("check_every", "needs --match-accuracy")


@dataclasses.dataclass(frozen=True)
class Options(multimnist.Options):
    models: tuple[str, ...] = setting(MODEL_NAMES, list_of(one_of(MODEL_NAMES)), "Train only these.", usual=True)
    affnist: Path | None = setting(None, INPUT, "Test on a published affNIST file (.mat) as well; needs --canvas 40.")


# --- Affine maps of images --------------------------------------------------------------------------------------------

WARP_PART = 500  # images at a time: bounds the memory


def warp(images: Array, matrices: Array, side: int) -> Array:
    """Sample images (N, H, W) bilinearly; they are 0 outside. Returns (N, side, side).

    matrices (N, 2, 3), or (1, 2, 3) for all: pixel (row, column) of the result is taken from matrix @ (row, column, 1).
    """
    N, H, W = images.shape
    grid = np.stack([*np.indices((side, side), float).reshape(2, -1), np.ones(side * side)])  # (3, S*S)
    out = np.empty((N, side * side), images.dtype)
    for start in range(0, N, WARP_PART):
        part = slice(start, start + WARP_PART)
        # Positions outside of the image are clipped onto a border of zeros.
        padded = np.pad(images[part], ((0, 0), (1, 1), (1, 1))).reshape(-1, (H + 2) * (W + 2))
        source = matrices[part if len(matrices) > 1 else slice(None)] @ grid + 1  # (n or 1, 2, S*S)
        row, column = np.clip(source[:, 0], 0, H + 1), np.clip(source[:, 1], 0, W + 1)
        top, left = np.minimum(row.astype(np.intp), H), np.minimum(column.astype(np.intp), W)
        corner = top * (W + 2) + left
        down, right = (row - top).astype(images.dtype), (column - left).astype(images.dtype)

        def pixels(offset: int, padded: Array = padded, corner: Array = corner) -> Array:
            index = corner + offset
            return padded[:, index[0]] if len(index) == 1 else np.take_along_axis(padded, index, axis=1)

        upper = (1 - right) * pixels(0) + right * pixels(1)
        lower = (1 - right) * pixels(W + 2) + right * pixels(W + 3)
        out[part] = (1 - down) * upper + down * lower
    return out.reshape(N, side, side)


def rotation_matrices(degrees: Array | float) -> Array:
    """(...) -> (..., 2, 2) matrices of a counter-clockwise rotation of (row, column), counted from the middle."""
    angle = np.radians(degrees)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], -2)


def warp_matrices(forward: Array, source_middle: Array | float, target_middle: Array | float) -> Array:
    """forward (N, 2, 2), about the middle of an image -> matrices (N, 2, 3) for ``warp``, which brings
    ``source_middle`` to ``target_middle`` (each a number of pixels or (N, 2))."""
    inverse = np.linalg.inv(forward)
    target, source = (np.broadcast_to(m, (len(forward), 2)) for m in (target_middle, source_middle))
    return np.concatenate([inverse, (source - np.einsum("nij,nj->ni", inverse, target))[:, :, None]], axis=2)


def rotate(images: Array, degrees: float) -> Array:
    """images (N, S, S) rotated counter-clockwise about their middle. float32 unless float64."""
    images = np.asarray(images, np.result_type(images.dtype, np.float32))
    if degrees % 360 == 0:
        return images
    middle = (images.shape[1] - 1) / 2
    return warp(images, warp_matrices(rotation_matrices(degrees)[None], middle, middle), images.shape[1])


class Distortion(NamedTuple):
    """The affine maps of affNIST: a digit is scaled, then sheared, then rotated, then shifted."""

    rotation: Array  # (N,) degrees
    shear: Array  # (N,) columns to the right per row
    scale: Array  # (N, 2) of rows, of columns
    middle: Array  # (N, 2) position of the digit's middle on the canvas, in pixels

    @property
    def matrices(self) -> Array:
        """(N, 2, 2) of (row, column)."""
        forward = np.zeros((len(self.shear), 2, 2))
        forward[:, 0, 0] = self.scale[:, 0]
        forward[:, 1, 0] = self.scale[:, 0] * self.shear
        forward[:, 1, 1] = self.scale[:, 1]
        return rotation_matrices(self.rotation) @ forward


AFFNIST_ROTATION, AFFNIST_SHEAR, AFFNIST_SCALE = 20.0, 0.2, (0.8, 1.2)


def draw_distortions(rng: np.random.Generator, digits: Array) -> Distortion:
    """One for each of the digits (N, 28, 28), uniformly from affNIST's ranges; the middle uniformly from the positions
    at which all strokes are on the canvas of 40x40 pixels (if there is none, their box lies in the canvas's middle)."""
    n = len(digits)
    rotation = rng.uniform(-AFFNIST_ROTATION, AFFNIST_ROTATION, n)
    shear = rng.uniform(-AFFNIST_SHEAR, AFFNIST_SHEAR, n)
    scale = rng.uniform(*AFFNIST_SCALE, (n, 2))
    fraction = rng.random((n, 2))
    unplaced = Distortion(rotation, shear, scale, np.zeros((n, 2)))
    forward = unplaced.matrices  # they do not depend on the middle
    # Bilinear sampling spreads a pixel of a stroke up to its neighbours.
    reach = np.abs(forward).sum(axis=2)  # (N, 2)
    low, high = np.empty((n, 2)), np.empty((n, 2))
    grid = np.indices(digits.shape[1:], float).reshape(2, -1) - (multimnist.DIGIT_SIDE - 1) / 2
    for start in range(0, n, WARP_PART):
        part = slice(start, start + WARP_PART)
        position = forward[part] @ grid  # (n, 2, H*W)
        stroke = digits[part].reshape(-1, 1, grid.shape[1]) > 0
        low[part] = np.where(stroke, position, np.inf).min(axis=2, initial=0)
        high[part] = np.where(stroke, position, -np.inf).max(axis=2, initial=0)
    # Between these positions of its middle, no stroke of a digit leaves the canvas.
    first, last = reach - 1 - low, AFFNIST_SIDE - reach - high
    fits = first <= last
    middle = np.where(fits, first + fraction * (last - first), (first + last) / 2)
    return unplaced._replace(middle=middle)


def distort(digits: Array, distortion: Distortion) -> Array:
    """digits (N, 28, 28) -> (N, 40, 40)."""
    middle = (multimnist.DIGIT_SIDE - 1) / 2
    return warp(digits, warp_matrices(distortion.matrices, middle, distortion.middle), AFFNIST_SIDE)


# --- Data -------------------------------------------------------------------------------------------------------------


class Data(NamedTuple):
    name: str  # of the digits: "mnist", "strokes" or "custom"
    images: Array  # (N, 28, 28) uint8, for training
    labels: Array  # (N,)
    val: Batch  # digits held out from training, upright
    test_images: Array  # (N, 28, 28) uint8
    test_labels: Array  # (N,)


def single_digits(images: Array, labels: Array) -> Batch:
    """Images (B, S, S) in [0, 1] of one digit each, which are also the decoder's targets."""
    return Batch(images, labels[:, None].astype(np.intp), images[:, None])


def on_canvas(digits: Array, shift: Array, config: Config) -> Array:
    """digits (B, 28, 28), uint8 or in [0, 1], each shift (B, 2) pixels away from the middle -> (B, S, S) in [0, 1]."""
    reach = int(np.abs(shift).max(initial=0))
    images = multimnist.shifted(digits[:, None], shift[:, None], config.image_size, reach)[:, 0]
    return images * np.dtype(config.dtype).type(1 / 255) if images.dtype == np.uint8 else images.astype(config.dtype)


def evaluation_shifts(config: Config, n: int, key: int) -> Array:
    """Shifts (n, 2) of validation and test digits, in pixels: 0 at 28x28, to anywhere on a larger canvas."""
    free = (config.image_size - multimnist.DIGIT_SIDE) // 2
    return generator(config.seed, Stream.EVALUATION, key).integers(-free, free + 1, (n, 2))


def make_data(config: Config) -> Data:
    """Raises UserError where there are too few digits."""
    digits = multimnist.resolve_dataset(config.dataset, generator(config.seed, Stream.DATA), config.data_dir)
    n, n_train = len(digits.train_labels), config.n_train or len(digits.train_labels) - config.n_val
    if n_train < 1 or n_train + config.n_val > n:
        wanted = f"--n-train {n_train} and --n-val {config.n_val}" if config.n_train else f"--n-val {config.n_val}"
        raise UserError(f"there are {n:,} training digits: too few for {wanted}")
    n_test = config.n_test or len(digits.test_labels)
    if n_test > len(digits.test_labels):
        raise UserError(f"there are {len(digits.test_labels):,} test digits: too few for --n-test {n_test}")
    order = generator(config.seed, Stream.DATA, 1).permutation(n)
    held_out, train = order[: config.n_val], order[config.n_val : config.n_val + n_train]
    val = on_canvas(digits.train_images[held_out], evaluation_shifts(config, len(held_out), 1), config)
    return Data(
        digits.name, digits.train_images[train], digits.train_labels[train],
        single_digits(val, digits.train_labels[held_out]), digits.test_images[:n_test], digits.test_labels[:n_test],
    )


def resolve_defaults(config: Config, data: Data) -> Config:
    """``config`` with the data set in place of "auto", and the numbers of digits in place of None."""
    config = multimnist.resolve_auto(config, data)
    return dataclasses.replace(config, n_train=len(data.labels), n_test=len(data.test_labels))


def training_batch(data: Data, config: Config, step: int) -> Batch:
    """The batch of a step, which depends on the seed and the step alone: every model sees the same images."""
    epoch, position = divmod(step, config.steps_per_epoch)
    order = permutation(len(data.labels), config.seed, 0, epoch)
    chosen = order[position * config.batch_size :][: config.batch_size]
    m = config.max_shift
    shift = generator(config.seed, Stream.SHUFFLE, 1, step).integers(-m, m + 1, (len(chosen), 2))
    return single_digits(on_canvas(data.images[chosen], shift, config), data.labels[chosen])


# --- LeNet-5: a CNN with average pooling, two hidden layers and a softmax ---------------------------------------------


def avg_pool_forward(x: Array) -> tuple[Array, tuple[int, ...]]:
    """2x2, stride 2; an odd last row or column is dropped. x (B, H, W, C) -> (B, H // 2, W // 2, C)."""
    H, W = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
    return (x[:, 0:H:2, 0:W:2] + x[:, 0:H:2, 1:W:2] + x[:, 1:H:2, 0:W:2] + x[:, 1:H:2, 1:W:2]) / 4, x.shape


def avg_pool_backward(dout: Array, x_shape: tuple[int, ...]) -> Array:
    """dout (B, H // 2, W // 2, C) -> dx (B, H, W, C)."""
    H, W = x_shape[1] // 2 * 2, x_shape[2] // 2 * 2
    dx = np.zeros(x_shape, dout.dtype)
    # out = (x00 + x01 + x10 + x11) / 4
    dx[:, :H, :W] = (dout / 4).repeat(2, axis=1).repeat(2, axis=2)
    return dx


def softmax_cross_entropy(scores: Array, positive: Array, n: int) -> tuple[float, Array]:
    """Summed over the classes that are there. scores (B, J) before the softmax, positive (B, J) of 0 and 1."""
    shifted = scores - scores.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return float(-(positive * log_p).sum()) / n, (positive.sum(axis=1, keepdims=True) * np.exp(log_p) - positive) / n


AVERAGE = Pair(avg_pool_forward, avg_pool_backward)
LENET = CNN(
    (ConvLayer(5, 6, pool=AVERAGE), ConvLayer(5, 16, pool=AVERAGE)), {"hidden1": 120, "hidden2": 84},
    softmax_cross_entropy, multimnist.BIAS,
)


# --- The models -------------------------------------------------------------------------------------------------------

def make_models(config: Config) -> dict[str, Network]:
    """By name, in the order of the result table."""
    models = multimnist.make_models(config, softmax_cross_entropy)
    lenet = multimnist.cnn_model("lenet", config, LENET._replace(conv=multimnist.parts_of(config).conv))
    return {"capsnet": models["capsnet"], "cnn": models["cnn_pool"]._replace(name="cnn"), "lenet": lenet}


# --- Training loop, with checks on the validation digits --------------------------------------------------------------


def accuracy_and_error(model: Network, params: Params, digits: Batch, workers: Workers) -> tuple[float, float]:
    """Accuracy, and the mean squared error of a pixel in the reconstructions, NaN where a model has none."""
    scores, error = assess(model, params, digits, workers)
    return fraction_right(scores, digits.labels[:, 0]), error / digits.sources.size


def reached(state: TrainState, config: Config) -> bool:
    """Whether the last check found ``match_accuracy``."""
    found = state.history.get("check_accuracy", [0.0])[-1]
    return config.match_accuracy is not None and found >= config.match_accuracy


def train(model: Network, config: Config, data: Data, state: TrainState, workers: Workers, callback: Callback) -> None:
    """Train ``state`` in place to ``config.n_epochs``, from the middle of an epoch too, or until a check, every
    ``check_every`` steps, finds ``match_accuracy``. Validation does not count as training time. Raises UserError where
    the loss stops being finite."""
    lr_factor = config.cnn_lr / config.lr if model.name in ("cnn", "lenet") else 1.0
    while state.step < config.n_steps and not reached(state, config):
        started = time.perf_counter()
        batch = training_batch(data, config, state.step)
        with np.errstate(all="ignore"):  # a loss that is not finite is reported in words
            losses, grads = workers.gradients(model.loss_and_grads, state.params, batch)
            update(state, grads, config.lr_at(state.step) * lr_factor, config, workers)
        state.add(losses, started)
        epoch_ended = state.step % config.steps_per_epoch == 0
        check = config.match_accuracy is not None and (epoch_ended or state.step % config.check_every == 0)
        if epoch_ended or check:
            accuracy, error = accuracy_and_error(model, state.params, data.val, workers)
            metrics = {"val_accuracy": accuracy} | ({} if math.isnan(error) else {"val_recon_mse": error})
            if epoch_ended:
                state.end_epoch(metrics)
            if check:
                state.append({"check_step": float(state.step), "check_accuracy": metrics["val_accuracy"]})
        callback(state, epoch_ended or reached(state, config))


# --- Tests ------------------------------------------------------------------------------------------------------------


def rotated_digits(data: Data, config: Config, degrees: float, chosen: Array | slice) -> Array:
    """Images (n, S, S) of chosen test digits, rotated by an angle."""
    digits = data.test_images[chosen] * np.dtype(config.dtype).type(1 / 255)
    shift = evaluation_shifts(config, len(data.test_labels), 0)[chosen]
    return on_canvas(rotate(digits, degrees), shift, config)


def rotated_set(data: Data, config: Config, degrees: float = 0.0, n: int | None = None) -> Batch:
    """The test digits rotated by an angle (upright at 0), or n of them, evenly spaced."""
    n_all = len(data.test_labels)
    chosen = slice(None) if n is None else np.linspace(0, n_all - 1, min(n, n_all)).round().astype(np.intp)
    return single_digits(rotated_digits(data, config, degrees, chosen), data.test_labels[chosen])


def affnist_set(data: Data, config: Config) -> Batch:
    """Every test digit, distorted once."""
    distortion = draw_distortions(generator(config.seed, Stream.EVALUATION, 2), data.test_images)
    digits = data.test_images * np.dtype(config.dtype).type(1 / 255)
    return single_digits(distort(digits, distortion), data.test_labels)


def make_test_sets(
    data: Data, config: Config, affnist: tuple[Array, Array] | None = None
) -> Iterator[tuple[str, Batch]]:
    """The test sets by name, all but the sweep."""
    for degrees in dict.fromkeys((0.0, *config.rotation)):
        yield f"rotated_{degrees:g}" if degrees else "upright", rotated_set(data, config, degrees)
    if config.image_size == AFFNIST_SIDE:
        yield "affnist", affnist_set(data, config)
        if affnist:
            images, labels = affnist
            yield "affnist_file", single_digits(images * np.dtype(config.dtype).type(1 / 255), labels)


def run_sweep(config: Config, data: Data, states: Mapping[str, Any], workers: Workers) -> dict[str, dict[str, Any]]:
    """The accuracy of every model at each angle of ``SWEEP``."""
    models = make_models(config)
    tested: dict[str, dict[str, Any]] = {name: {"sweep": {}} for name in states}
    for degrees in SWEEP:
        digits = rotated_set(data, config, degrees, config.n_sweep)
        for name, state in states.items():
            tested[name]["sweep"][f"{degrees}"], _ = accuracy_and_error(models[name], state.params, digits, workers)
    return tested


def run_tests(
    config: Config, data: Data, states: Mapping[str, Any], workers: Workers,
    affnist: tuple[Array, Array] | None = None,
) -> dict[str, dict[str, Any]]:
    """Metrics of every model on every test set, with the sweep."""
    models, tested = make_models(config), run_sweep(config, data, states, workers)
    for kind, digits in make_test_sets(data, config, affnist):
        for name, state in states.items():
            accuracy, error = accuracy_and_error(models[name], state.params, digits, workers)
            tested[name][f"{kind}_accuracy"] = accuracy
            if kind == "upright":
                tested[name]["upright_error"] = round(1 - accuracy, 12)
                if not math.isnan(error):
                    tested[name]["recon_mse"] = error
    return tested


def make_result(
    config: Config, data: Data, states: Mapping[str, Any], tested: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The JSON of a run; accuracies are fractions. ``epochs`` are those that a model was trained for."""
    models: dict[str, dict[str, Any]] = {}
    for name, state in states.items():
        epochs = state.step / config.steps_per_epoch
        seen = state.history.get("val_accuracy" if config.match_accuracy is None else "check_accuracy")
        models[name] = {
            "n_params": count_params(state.params),
            **tested[name],
            **({"val_accuracy": seen[-1]} if seen else {}),
            "steps": state.step,
            "epochs": epochs,
            "reached": None if config.match_accuracy is None else reached(state, config),
            "epoch_seconds": round(state.seconds / max(epochs, 1e-9), 3),
            "train_seconds": round(state.seconds, 3),
        }
    headline = f"rotated_{config.rotation[-1]:g}_accuracy"
    return result_document(EXPERIMENT, config, data.name, models, states, headline)


def train_all(config: Config, data: Data, options: Any = NO_OPTIONS, **more: Any) -> dict[str, TrainState]:
    """Train the models one after the other, and return their states. ``more`` as in ``Session``."""
    session = Session(EXPERIMENT, config, make_models, options, **more)
    with Workers(options.threads) as workers:
        for model, state in session.trainings(lambda _: config.n_steps):
            train(model, config, data, state, workers, session.after_step)
    return session.trained


def run(
    config: Config, options: Any = NO_OPTIONS, affnist: Path | None = None, **more: Any
) -> tuple[dict[str, Any], dict[str, TrainState]]:
    """Data, trainings, tests -> the result and the states. ``more`` as in ``Session``."""
    real = read_affnist(affnist) if affnist else None
    data = make_data(config)
    config = resolve_defaults(config, data)
    states = train_all(config, data, options, **more)
    with Workers(options.threads) as workers:
        tested = run_tests(config, data, states, workers, real)
    return make_result(config, data, states, tested), states


ARTICLE = (
    "article: LeNet-5 98.68 upright, 76.05 rotated; CapsNet 99.37, 84.09 and 92.12 (text: 35, listing: 15 degrees)"
)
PAPER = "paper: CapsNet 99.23 at random positions, 79 affNIST; CNN 99.22, 66"


def describe(result: dict[str, Any]) -> str:
    """One line: what was trained and tested."""
    c = result["config"]
    line = (
        f"{result['dataset']} on {c['canvas']}x{c['canvas']}: {c['n_test']:,} test digits;"
        f" seed {result['seed']}, {c['n_epochs']} epochs of {c['n_train']:,}"
    )
    match = c["match_accuracy"]
    return line if match is None else f"{line}, stopped at {100 * match:g} % on {c['n_val']:,} for validation"


def format_table(result: dict[str, Any]) -> str:
    """Accuracies in percent."""
    columns = [k for k in next(iter(result["models"].values())) if k.endswith("_accuracy") and k != "val_accuracy"]
    heads = [k.removesuffix("_accuracy").replace("_", " ") for k in columns]
    widths = [max(7, len(head)) for head in heads]
    line = " ".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))
    lines = [f"{'model':<8} {'error %':>7} {line} {'parameters':>10} {'epochs':>6} {'s/epoch':>7}"]
    for name, m in result["models"].items():
        line = " ".join(f"{100 * m[k]:{width}.2f}" for k, width in zip(columns, widths, strict=True))
        missed = "  not reached" if m["reached"] is False else ""
        lines.append(
            f"{name:<8} {100 * m['upright_error']:7.2f} {line} {m['n_params']:10,} {m['epochs']:6.2f}"
            f" {m['epoch_seconds']:7.1f}{missed}"
        )
    return "\n".join([*lines, PAPER if "affnist_accuracy" in columns else ARTICLE])


@script
def main(argv: Sequence[str]) -> None:
    config, options, _ = parse(
        Config, Options, argv,
        "Train a capsule network, a CNN and LeNet-5 on upright digits and test them on rotated and distorted ones.",
        ("", "Three models, twelve epochs of MNIST: about 35 minutes."),
        ("--n-train 6000 --n-epochs 4 --checkpoint run.npz",
         "A short training on 6,000 digits, which is kept: about 3 minutes."),
    )
    if options.affnist and config.canvas != AFFNIST_SIDE:
        raise SettingError("affnist", f"needs --canvas {AFFNIST_SIDE}")
    require_own_outputs(EXPERIMENT, config, options)
    result, states = run(config, options, options.affnist, names=options.models)
    report(result, f"{describe(result)}\n{format_table(result)}", options, states)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
