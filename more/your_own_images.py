"""Your own images: matrix capsules, a CNN and a CapsNet with reconstructions, trained on any classes, in numpy.

Three networks of this project learn the classes of a folder of images and then classify others:

    capsules   convolutional matrix capsules with EM routing, as in conv_matrix_capsules.py
               G. Hinton, S. Sabour, N. Frosst, "Matrix capsules with EM routing", ICLR 2018
    cnn        a CNN on the same grids, with as many parameters
    capsnet    a capsule network with dynamic routing, which draws each image again from one capsule, as in
               multimnist_capsnet.py
               S. Sabour, N. Frosst, G. Hinton, "Dynamic routing between capsules", NIPS 2017

    images (B, S, S, C)   resized, in the middle of a square; C = 1, grey, or 3; S from 20 to 64 pixels
    answers  (B, J)         activations of the class capsules, probabilities of the CNN, lengths of the digit capsules

The folder has a sub-folder for each class (docs/your_own_images.md). The darkest and the brightest level of the
training images become 0 and 1, for the test and for --predict too. Without a test set a fifth of each class is drawn.

Run it (three networks, seed 0; then ask the trained networks):

    python -m more.your_own_images --data-dir FOLDER --checkpoint run.npz
    python -m more.your_own_images --checkpoint run.npz --predict PICTURES
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import glob
import io
import json
import math
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import multimnist_capsnet as multimnist
from data.files import expanded, with_progress
from data.labelled_pictures import Labelled, PictureSets, is_picture, read_sets, visible_files
from data.pictures import Levels, square_of_set
from more import conv_matrix_capsules as conv
from more.conv_matrix_capsules import Examples
from multimnist_capsnet import Workers
from smallnorb_novel_viewpoint import (
    FOLDER, NO_OPTIONS, OUTPUT, Callback, Session, SettingError, Settings, Stream, TrainState, UserError, adamw_of,
    count_params, fraction_right, generator, int_in, list_of, model_metrics, one_line, one_of, parse, permutation,
    print_message, read_checkpoint, report, require_own_outputs, result_document, script, setting, write_file,
)
from support.experiment import PredictOptions, redeclared, require_alone, require_writable, unfinished
from support.tables import class_accuracies, confusion_lines, confusion_matrix, describe_classes

# Dimension letters
#   B  images of a batch   N  images of a set   S  rows, and columns, of an image   C  channels   J  classes

Array = np.ndarray
Params = dict[str, Array]

EXPERIMENT = "your_own_images"
MODEL_NAMES = ("capsules", "cnn", "capsnet")
SIDES = (20, 32)  # least and greatest by default, in pixels; between them, the images' own size is kept
MOST_SHOWN = 60_000  # images that a network sees by default: 30 epochs of 2,000, one epoch of 60,000
BATCH_SIZE = 32
LEARNING_RATES = {"capsules": 0.015, "cnn": 3e-3, "capsnet": 2e-3}
MARGIN_EPOCHS = 10  # in which the margin of the capsules' loss rises, where the learning rate is constant


# --- Configuration ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    data_dir: Path | None = setting(None, FOLDER, "Folder of the images, with a sub-folder for each class; or a .npz"
        " file of x_train, y_train and perhaps x_test, y_test.", usual=True, free=True, group="images")
    image_size: int = setting(None, int_in(20, 64), "Resize the images to N x N pixels.", usual=True,
        shown="their own size, but at least {} and at most {}".format(*SIDES))
    colour: str = setting("grey", ("grey", "rgb"), "Show the images to the networks in grey or in colour.", usual=True)
    n_train: int | None = setting(None, int_in(1, 10**9), "Train on about N of the training images, of each class the"
        " same share.", shown="all of them")
    seed: int = setting(0, int_in(0, 2**32 - 1), "Seed of the test set that is drawn, the initial weights and the order"
        " of the images.", usual=True, group="training")
    n_epochs: int = setting(None, int_in(1, 100_000), "Train for N passes over the training images.",
        usual=True, shown=f"30, but fewer of more than {MOST_SHOWN // 30:,} images")
    lr_schedule: str = setting("linear", ("linear", "constant"), "Course of the learning rate: it falls to 0, or it"
        " stays, and a training can be continued with more epochs.")
    plain: bool = setting(False, bool, "Compute by the plain forms of the networks, not by their fast twins.")
    class_names: tuple[str, ...] = ()  # these three are from the images
    grey_levels: Levels = dataclasses.field(default_factory=dict)  # which became black and white, by kind of numbers
    pictures: str = ""  # a checksum of the training images

    dtype = "float32"

    @property
    def length_is_free(self) -> bool:
        return self.lr_schedule == "constant"

    @property
    def channels(self) -> int:
        return 3 if self.colour == "rgb" else 1


@dataclasses.dataclass(frozen=True)
class Options(PredictOptions):
    models: tuple[str, ...] = setting(MODEL_NAMES, list_of(one_of(MODEL_NAMES)), "Train these networks alone.",
        usual=True)
    out: Path | None = setting(None, OUTPUT, "Write the answers of --predict to this file, as JSON if it ends"
        " in .json, else as CSV.", usual=True)
    threads: int = redeclared(conv.Options, "threads")


# --- Data -------------------------------------------------------------------------------------------------------------


def make_data(config: Config) -> PictureSets:
    """Raises UserError where there are no images of two classes."""
    assert config.data_dir
    rng = generator(config.seed, Stream.DATA)
    return read_sets(config.data_dir, config.image_size or SIDES, config.channels, rng, config.n_train)


def resolved(config: Config, data: PictureSets) -> Config:
    """``config`` with what the images decide."""
    n, side = data.train.images.shape[:2]
    return dataclasses.replace(
        config, image_size=side, n_epochs=config.n_epochs or max(1, min(30, round(MOST_SHOWN / n))),
        class_names=data.classes, grey_levels=data.levels, pictures=f"{zlib.crc32(data.train.images.tobytes()):08x}",
    )


def in_floats(images: Array) -> Array:
    """uint8 -> float32 in [0, 1]."""
    return images * np.float32(1 / 255)


def steps_per_epoch(data: PictureSets) -> int:
    return math.ceil(len(data.train.labels) / BATCH_SIZE)


def training_batch(data: PictureSets, config: Config, step: int) -> Examples:
    """The batch of a step, which depends on the seed and the step alone."""
    epoch, position = divmod(step, steps_per_epoch(data))
    chosen = permutation(len(data.train.labels), config.seed, epoch)[position * BATCH_SIZE :][:BATCH_SIZE]
    return Examples(in_floats(data.train.images[chosen]), data.train.labels[chosen])


# --- The three networks as the training loop sees them ----------------------------------------------------------------


class Network(NamedTuple):
    name: str
    init_params: Callable[..., Params]  # rng
    loss_and_grads: Callable[[float, Params, Examples, int], tuple[dict[str, float], Params]]  # progress; n of a batch
    answers: Callable[[Params, Array], Array]  # images -> (B, J): the greatest names the class
    part_size: int  # images on which one thread works at a time


def sized(settings: Any, config: Config) -> Any:
    """The settings of another script's networks, for these images."""
    return settings(image_size=config.image_size, in_channels=config.channels, n_classes=len(config.class_names),
                    plain=config.plain)


def make_models(config: Config) -> dict[str, Network]:
    """By name, in the order of the result table."""
    grids, net = sized(conv.Config, config), sized(multimnist.CapsNetConfig, config)
    on_grids = conv.make_models(grids)

    def on_grid(name: str, answers: Callable[[Array], Array]) -> Network:
        it, size = on_grids[name], conv.part_size(grids, name)

        def answer(params: Params, images: Array) -> Array:
            return answers(it.forward(params, images)[0])

        return Network(name, it.init_params, functools.partial(conv.loss_and_grads, it), answer, size)

    def loss_and_grads(progress: float, params: Params, part: Examples, n: int) -> tuple[dict[str, float], Params]:
        batch = multimnist.Batch(part.images, part.labels[:, None], part.images[:, None])
        return multimnist.capsnet_loss_and_grads(params, batch, n, net)

    def lengths(params: Params, images: Array) -> Array:
        return multimnist.capsnet_forward(params, images, net)[0]

    init = functools.partial(multimnist.capsnet_init, config=net)
    return {
        "capsules": on_grid("capsules", np.asarray),
        "cnn": on_grid("cnn", multimnist.softmax),
        "capsnet": Network("capsnet", init, loss_and_grads, lengths, 16),
    }


def reconstructions(params: Params, images: Array, config: Config) -> Array:
    """Images (B, S, S, C) -> what the CapsNet draws of each from its longest capsule (B, S, S, C)."""
    lengths, cache = multimnist.capsnet_forward(params, images, sized(multimnist.CapsNetConfig, config))
    masked, _ = multimnist.mask_forward(cache.v, lengths.argmax(axis=1)[:, None])
    return multimnist.decoder_forward(params, masked)[0].reshape(images.shape)


# --- Evaluation and training loop -------------------------------------------------------------------------------------


def answers_of(model: Network, params: Params, images: Array, workers: Workers) -> Array:
    """Images (N, S, S, C) uint8 -> (N, J)."""
    n = model.part_size
    parts = workers.map(lambda k: model.answers(params, in_floats(images[k : k + n])), range(0, len(images), n))
    return np.concatenate(parts)


def evaluate(model: Network, params: Params, test: Labelled, n_classes: int, workers: Workers) -> tuple[Array, Any]:
    """Confusion matrix, and metrics: the accuracy, and its mean over the classes."""
    answers = answers_of(model, params, test.images, workers)
    confusion = confusion_matrix(test.labels, answers.argmax(axis=1), n_classes)
    balanced = np.nanmean(class_accuracies(confusion))
    return confusion, {"accuracy": fraction_right(answers, test.labels), "balanced_accuracy": float(balanced)}


def train(
    model: Network, config: Config, data: PictureSets, state: TrainState, workers: Workers, callback: Callback
) -> None:
    """Train ``state`` in place to ``config.n_epochs``. ``callback(state, epoch has ended)`` is called after every step.
    Raises UserError where the loss stops being finite."""
    per_epoch = steps_per_epoch(data)
    n_steps = per_epoch * config.n_epochs
    n_rising = n_steps if config.lr_schedule == "linear" else per_epoch * MARGIN_EPOCHS
    update = adamw_of(config)
    while state.step < n_steps:
        started = time.perf_counter()
        batch = training_batch(data, config, state.step)
        progress = min(1.0, state.step / max(1, n_rising - 1))
        falls = 1 - state.step / n_steps if config.lr_schedule == "linear" else 1.0
        lr = LEARNING_RATES[model.name] * falls * min(1.0, 0.1 + 0.9 * state.step / 20)  # rises over 20 steps
        work = functools.partial(model.loss_and_grads, progress)
        with np.errstate(all="ignore"):  # a loss that is not finite is reported in words
            losses, grads = workers.gradients(work, state.params, batch, model.part_size)
            update(state, grads, lr)
        state.add(losses, started, weight=len(batch.labels))
        if epoch_ended := state.step % per_epoch == 0:
            with np.errstate(all="ignore"):
                state.end_epoch(evaluate(model, state.params, data.test, len(data.classes), workers)[1])
        callback(state, epoch_ended)


class Cost(NamedTuple):
    seconds: float
    memory: float  # bytes


LONG = Cost(600, 2 << 30)  # what more than that takes is told before


def cost(model: Network, config: Config, data: PictureSets, n_steps: int, threads: int) -> Cost:
    """What a training takes, about: from a step on one image and one on three, since both grow by the image."""
    state, taken = TrainState(model.name, model.init_params(np.random.default_rng(0))), list[Cost]()
    update = adamw_of(config)
    for n in (1, 1, 3):  # the first has to make what the others find
        part = Examples(in_floats(data.train.images[:n]), data.train.labels[:n])
        tracemalloc.start()
        started = time.monotonic()
        _, grads = model.loss_and_grads(1.0, state.params, part, n)
        taken.append(Cost(time.monotonic() - started, tracemalloc.get_traced_memory()[1]))
        tracemalloc.stop()
    started = time.monotonic()
    update(state, [grads], LEARNING_RATES[model.name])
    once, each = taken[1], Cost(*(max(0.0, (b - a) / 2) for a, b in zip(*taken[1:], strict=True)))
    n = min(BATCH_SIZE, len(data.train.labels))
    n_parts = math.ceil(n / model.part_size)
    at_once, size = min(threads, n_parts), 4 * count_params(state.params)
    step = (n_parts * once.seconds + (n - n_parts) * each.seconds) / at_once + time.monotonic() - started
    tests = each.seconds / 3 * len(data.test.labels) / threads * n_steps / steps_per_epoch(data)  # forward alone
    part_memory = once.memory + (n / n_parts - 1) * each.memory - size
    return Cost(step * n_steps + tests, (3 + n_parts) * size + at_once * part_memory)  # and both moments of Adam


def tell_cost(name: str, expected: Cost) -> None:
    """A line on a training that takes long or much."""
    if expected.seconds > LONG.seconds or expected.memory > LONG.memory:
        minutes, gib = expected.seconds / 60, expected.memory / 2**30
        time = f"{minutes:,.0f} minutes" if minutes < 120 else f"{minutes / 60:,.0f} hours"
        print_message(f"warning: {name} will train for about {time} and take about {gib:.1f} GiB of memory; less with a"
                      " smaller --n-train, --n-epochs or --image-size, or without it in --models")


# --- A run from beginning to end --------------------------------------------------------------------------------------


def run(config: Config, options: Any = NO_OPTIONS, **more: Any) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Data, trainings, result: accuracies are fractions, "confusion" counts test images by model, true class and
    answer. ``more`` as in ``Session``."""
    data = make_data(config)
    config = resolved(config, data)
    require_own_outputs(EXPERIMENT, config, options)  # of these images, too
    counts = [np.bincount(part.labels, minlength=len(data.classes)).tolist() for part in (data.train, data.test)]
    by_class = dict(zip(data.classes, zip(*counts, strict=True), strict=True))
    if not options.quiet:
        print_message(describe_classes(by_class, data.train.images.shape[1], config.colour).splitlines()[0].rstrip(":"))
    models, confusions, n_steps = {}, {}, steps_per_epoch(data) * config.n_epochs
    session = Session(EXPERIMENT, config, make_models, options, **more)
    with Workers(options.threads) as workers:
        for name, state in session.trained.items():
            if left := n_steps - state.step:
                tell_cost(name, cost(session.models[name], config, data, left, options.threads))
        for model, state in session.trainings(lambda _: n_steps):
            train(model, config, data, state, workers, session.after_step)
            confusion, _ = evaluate(model, state.params, data.test, len(data.classes), workers)
            models[model.name], confusions[model.name] = model_metrics(state), confusion.tolist()
    result = result_document(EXPERIMENT, config, "images", models, session.trained, "accuracy")
    return result | {"classes": by_class, "confusion": confusions}, session.trained


def format_result(result: dict[str, Any]) -> str:
    """The images, the table of accuracies, and for each network the answers by class."""
    config = result["config"]
    text = describe_classes(result["classes"], config["image_size"], config["colour"])
    levels = "; ".join(f"{low:g} to {high:g}" for low, high in config["grey_levels"].values())
    lines = [text, f"grey levels {levels}; seed {config['seed']}, {config['n_epochs']} epochs", "",
             "model      accuracy balanced parameters  seconds"]
    for name, m in result["models"].items():
        lines.append(f"{name:<10} {m['accuracy']:8.4f} {m['balanced_accuracy']:8.4f} {m['n_params']:10,}"
                     f" {m['train_seconds']:8.1f}")
    for name, matrix in result["confusion"].items():
        lines += ["", f"{name}: answers", *confusion_lines(np.array(matrix), list(result["classes"]))]
    return "\n".join(lines)


# --- Prediction (--predict) -------------------------------------------------------------------------------------------


def named_files(names: Sequence[Path]) -> Iterator[Path]:
    """The files that folders, patterns and names stand for. One that stands for none is itself, and cannot be read."""
    for name in map(expanded, names):
        found = [name] if name.exists() else map(Path, sorted(glob.glob(str(name), recursive=True)) or [str(name)])
        for path in found:
            files = visible_files(path) if path.is_dir() else []
            yield from [file for _, file in files if is_picture(file)] or [path]


class Answers(NamedTuple):
    paths: list[Path]
    classes: tuple[str, ...]
    by_model: dict[str, Array]  # (N, J)
    unreadable: list[str]  # why


def predict(checkpoint: Path, names: Sequence[Path], threads: int = 1, quiet: bool = False) -> Answers:
    """The answers of each network of a checkpoint to each image that can be read."""
    config, states = read_checkpoint(checkpoint, EXPERIMENT, Config, make_models)
    if left := unfinished(EXPERIMENT, checkpoint, config, states):
        print_message(f"warning: {left}")
    models, squares, unreadable = make_models(config), dict[Path, Array](), list[str]()
    for path in with_progress(list(dict.fromkeys(named_files(names))), "image", quiet):
        try:
            squares[path] = square_of_set(path, config.image_size, config.channels, config.grey_levels)
        except OSError as error:
            unreadable.append(str(error))
    images = np.array(list(squares.values()))
    with Workers(threads) as workers:
        by_model = {k: answers_of(models[k], v.params, images, workers) for k, v in states.items() if squares}
    return Answers(list(squares), config.class_names, by_model, unreadable)


def format_answers(answers: Answers) -> str:
    """A line for each image: the class that each network names, and its activation, probability or length."""
    classes, names = answers.classes, list(answers.by_model)
    width, column = max(map(len, map(str, answers.paths)), default=7), max(map(len, classes)) + 6
    lines = [f"{'image':<{width}}  " + "  ".join(f"{name:<{column}}" for name in names).rstrip()]
    for n, path in enumerate(answers.paths):
        cells = [f"{classes[a[n].argmax()]} {a[n].max():.3f}" for a in answers.by_model.values()]
        lines.append(f"{path!s:<{width}}  " + "  ".join(f"{cell:<{column}}" for cell in cells).rstrip())
    return "\n".join(lines)


HEAD = ("file", "model", "class")


def write_answers(path: Path, answers: Answers) -> None:
    """A row for each image and network: file, model, class, and the answer for each class. Raises UserError."""
    rows = [
        [str(file), name, answers.classes[a[n].argmax()], *a[n].astype(float).round(6).tolist()]
        for n, file in enumerate(answers.paths) for name, a in answers.by_model.items()
    ]
    text = io.StringIO(newline="")
    if path.suffix.lower() == ".json":
        named = [dict(zip(HEAD, row, strict=False)) | {"answers": dict(zip(answers.classes, row[3:], strict=True))}
                 for row in rows]
        json.dump(named, text, ensure_ascii=False, indent=1)
    else:
        csv.writer(text).writerows([[*HEAD, *answers.classes], *rows])
    write_file(path, text.getvalue().encode(errors="backslashreplace"))  # odd bytes in a file's name


# --- Command line -----------------------------------------------------------------------------------------------------


@script
def main(argv: Sequence[str]) -> None:
    config, options, given = parse(
        Config, Options, argv,
        "Train two capsule networks and a CNN on your own images, and classify others.",
        ("--data-dir photographs --checkpoint run.npz", "300 images of three classes: about 1 minute."),
        ("--data-dir photographs --colour rgb --models capsules", "In colour, one network: about 40 seconds."),
        ("--checkpoint run.npz --predict new/ 'more/*.jpg' --out answers.csv",
         "Classify other images: about 1 second."),
    )
    if options.out and not options.predict:
        raise SettingError("out", "needs --predict")
    if options.predict:
        require_alone(given, "predict", "checkpoint", "threads", "quiet", "out")
        assert options.checkpoint
        if options.out:
            require_writable(options.out, ours=(",".join(HEAD).encode(), b"["))
        answers = predict(options.checkpoint, options.predict, options.threads, options.quiet)
        if options.out:
            write_answers(options.out, answers)
        if answers.paths:
            print(format_answers(answers))
        if n := len(answers.unreadable):
            why = one_line("; ".join(answers.unreadable), 2000)
            raise UserError(f"{n:,} image{'s' * (n > 1)} cannot be read: {why}")
        return
    if config.data_dir is None:
        raise SettingError("data_dir", "name the folder of your images")
    require_own_outputs(EXPERIMENT, config, options)
    result, states = run(config, options, names=options.models)
    report(result, format_result(result), options, states)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
