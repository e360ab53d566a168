#!/usr/bin/env python3
"""Attacks: small changes of an image that mislead matrix capsules and a CNN, in numpy.

Claim reproduced: [Hinton 2018] G. Hinton, S. Sabour, N. Frosst, "Matrix capsules with EM routing", ICLR 2018, section 6
and figure 3. After one step along the sign of the loss's gradient, which moves every pixel by epsilon, matrix capsules
keep more of their accuracy than a convolutional network does.

    fgsm          one step of epsilon along the gradient of the training's loss: the paper's attack
                  (I. Goodfellow, J. Shlens, C. Szegedy, ICLR 2015, section 4)
    iterated      ten steps of epsilon / 10, which never leave the box of side 2 epsilon round the image
                  (A. Kurakin, I. Goodfellow, S. Bengio, ICLR 2017 workshops, section 2.2)
    _log_odds     both along a second loss of the capsules, where theirs is the spread loss, which has no gradient
                  where an image is right by more than the margin
    worst_case    an image is wrong at an epsilon if any of these attacks misleads the network with that epsilon or a
                  smaller one

The networks are those of conv_matrix_capsules.py, matrix capsules and a CNN of as many parameters. They learn drawn
shapes, which are other ones for every seed, from a range of viewpoints; other images from that range are attacked. The
attacker knows all weights.

Deviations from the paper: drawn shapes stand in for smallNORB (``--dataset smallnorb`` reads its files); the paper's
CNN has more parameters than its capsules, this one has as many. Pixels run from 0 to 1, so that an epsilon of 0.1 is a
tenth of the range from black to white: images are not standardised, as conv_matrix_capsules.py has them by default.

Run it (both networks, seed 0, all attacks):

    python -m more.capsule_attacks
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fast.workers import Workers
from more import conv_matrix_capsules as conv
from more.conv_matrix_capsules import Data, Examples, Model, in_parts, of_model, steps_per_epoch, subset, train
from smallnorb_novel_viewpoint import (
    FOLDER,
    NO_OPTIONS,
    RunOptions,
    Session,
    SettingError,
    Settings,
    TrainState,
    float_in,
    int_in,
    model_metrics,
    names_of,
    parse,
    report,
    require_own_outputs,
    result_document,
    script,
    setting,
    softmax_cross_entropy,
)
from support.experiment import list_of, redeclared

# Dimension letters
#   B  images of a batch     N  images of a set     H, W  rows and columns of an image     C  channels     E  classes

Array = np.ndarray
Params = dict[str, Array]
Loss = Callable[[Array, Array], tuple[float, Array]]  # scores (B, E), labels (B,) -> mean loss, dscores

EXPERIMENT = "capsule_attacks"
MODEL_NAMES = ("capsules", "cnn")
STEREO_SETS, DIGIT_SETS = ("smallnorb", "toys"), ("mnist", "strokes")


# --- Configuration: user inputs only ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """One run. Where --n-epochs is given and --cnn-epochs is not, it holds for both models."""

    dataset: str = setting("shapes", ("shapes", "voxels", *STEREO_SETS, *DIGIT_SETS), "Attack drawn shapes, voxel"
        " objects, the smallNORB files, toys in their format, MNIST or generated digits.", usual=True, group="data")
    data_dir: Path | None = setting(None, FOLDER, "Folder of the six smallNORB files, or of the four of MNIST.",
        usual=True)
    seed: int = setting(0, int_in(0, 2**32 - 1), "Seed of the data, the initial weights and the order of the images.",
        usual=True)
    n_train: int | None = redeclared(conv.Config, "n_train", usual=False)
    standardize: str = setting("none", ("none", "image"), "With image, bring each image of an object to mean zero and"
        " unit variance; an epsilon is then in standard deviations, and pixels have no bounds.")
    n_epochs: int = redeclared(conv.Config, "n_epochs")
    cnn_epochs: int = redeclared(conv.Config, "cnn_epochs")
    batch_size: int = redeclared(conv.Config, "batch_size")
    cnn_lr: float = redeclared(conv.Config, "cnn_lr")
    sizes: tuple[int, int, int, int] = redeclared(conv.Config, "sizes")
    variance_floor: float = redeclared(conv.Config, "variance_floor")
    loss: str = redeclared(conv.Config, "loss")
    cnn: str = redeclared(conv.Config, "cnn")
    dtype: str = redeclared(conv.Config, "dtype", help="Number format of the trainings; attacks are in float64.")
    plain: bool = redeclared(conv.Config, "plain")
    epsilons: tuple[float, ...] = setting((0.05, 0.1, 0.2, 0.3, 0.4, 0.5), list_of(float_in(0, 10, above=True),
        rising=True), "Move no pixel by more than X.", usual=True, free=True, group="attacks")
    n_attack: int = setting(200, int_in(1, 10**7), "Attack N test images, evenly spaced over the set.", usual=True,
        free=True)
    attack_steps: int = 10  # of the iterated attack
    lr: float = conv.Config.lr
    em_iters: int = conv.Config.em_iters
    beta_v_init: float = conv.Config.beta_v_init

    def dependent(self) -> dict[str, Any]:
        return {"n_epochs": 5, "cnn_epochs": self.n_epochs or 10}

    def check(self) -> None:
        if self.dataset == "smallnorb" and self.data_dir is None:
            raise SettingError("data_dir", "--dataset smallnorb needs the folder of the six official files")
        if self.dataset not in ("smallnorb", "mnist") and self.data_dir is not None:
            raise SettingError("data_dir", f"{self.dataset} has no files")
        if len({f"{epsilon:g}" for epsilon in self.epsilons}) < len(self.epsilons):
            raise SettingError("epsilons", "two of them are the same to six digits")
        if self.dataset in DIGIT_SETS and self.standardize == "image":
            raise SettingError("standardize", f"{self.dataset} is not standardised")

    @property
    def pixel_range(self) -> tuple[float, float]:
        """Least and greatest pixel value of an attacked image; standardised ones have no bounds."""
        return (-math.inf, math.inf) if self.standardize == "image" else (0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Options(RunOptions):
    models: tuple[str, ...] = setting(MODEL_NAMES, names_of(MODEL_NAMES), "Train and attack only these.", usual=True)
    threads: int = redeclared(conv.Options, "threads")


def network_config(config: Config) -> conv.Config:
    """That of conv_matrix_capsules.py for the trainings."""
    names = {field.name for field in dataclasses.fields(conv.Config)}
    fields = {name: value for name, value in vars(config).items() if name in names}
    if config.dataset in DIGIT_SETS:
        del fields["standardize"]  # which is of views
    if config.dataset in STEREO_SETS:
        fields["held_out"] = "nothing"  # as in the paper's figure: all views of the objects that are not trained on
    return conv.Config(**fields)


def make_data(config: Config) -> Data:
    """Images to train on, and other ones to attack. Raises UserError where files are missing or damaged."""
    return conv.make_data(network_config(config))._replace(held_out=None)


# --- Losses that an attacker raises -----------------------------------------------------------------------------------


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
    """Loss and number of steps of each attack. The accuracy under one step may rise with epsilon: a larger step may
    pass over what a smaller one reaches."""
    steps = {"fgsm": 1, "iterated": config.attack_steps}
    losses = attack_losses(model, config)
    return {name + suffix: (loss, n_steps) for suffix, loss in losses.items() for name, n_steps in steps.items()}


# --- Attacks ----------------------------------------------------------------------------------------------------------


def image_gradient(model: Model, params: Params, images: Array, labels: Array, loss: Loss) -> Array:
    """Gradient of the loss with respect to the images (B, H, W, C)."""
    scores, cache = model.forward(params, images)
    return model.backward(loss(scores, labels)[1], cache, need_dx=True)[1]


def attack(
    model: Model, params: Params, images: Array, labels: Array, loss: Loss, epsilon: float, n_steps: int,
    pixel_range: tuple[float, float],
) -> Array:
    """Images (B, H, W, C) that raise the loss, no pixel of which is moved by more than ``epsilon`` or out of its
    range."""
    low, high = np.maximum(images - epsilon, pixel_range[0]), np.minimum(images + epsilon, pixel_range[1])
    x = images
    for _ in range(n_steps):
        step = epsilon / n_steps * np.sign(image_gradient(model, params, x, labels, loss))
        x = np.clip(x + step, low, high)
    return x


def robustness(model: Model, params: Params, examples: Examples, config: Config, workers: Workers) -> dict[str, Any]:
    """Accuracy under each attack, and in the worst case, by epsilon."""

    def correct(loss: Loss, epsilon: float, n_steps: int) -> Array:
        """Which of the examples are classified correctly after an attack: (N,)."""

        def work(x: Array, labels: Array) -> Array:
            if epsilon:
                x = attack(model, params, x, labels, loss, epsilon, n_steps, config.pixel_range)
            return model.forward(params, x)[0].argmax(axis=1) == labels

        return in_parts(work, examples, exact_config(config), workers)

    epsilons, kinds = (0.0, *config.epsilons), attack_kinds(model, config)
    answers = {  # (epsilons, N) each; what has two names, as all attacks on the CNN may, is done once
        (loss, n_steps): np.array([correct(loss, epsilon, n_steps) for epsilon in epsilons])
        for loss, n_steps in dict.fromkeys(kinds.values())
    }
    right = {kind: answers[attacked] for kind, attacked in kinds.items()}
    right["worst_case"] = np.logical_and.accumulate(np.all(list(right.values()), axis=0))
    return {
        kind: {f"{epsilon:g}": float(now.mean()) for epsilon, now in zip(epsilons, by_epsilon, strict=True)}
        for kind, by_epsilon in right.items()
    }


def exact_config(config: Config) -> conv.Config:
    """Attacks are in float64, in which gradients seldom round to zero."""
    return dataclasses.replace(network_config(config), dtype="float64")


def attack_all(config: Config, states: Mapping[str, TrainState], data: Data, threads: int = 1) -> dict[str, Any]:
    """The attacks on every trained model."""
    models, examples = conv.make_models(exact_config(config)), subset(data.test, config.n_attack)
    found = {}
    with Workers(threads) as workers:
        for name, state in states.items():
            params = {key: p.astype(np.float64) for key, p in state.params.items()}
            found[name] = robustness(models[name], params, examples, config, workers)
    return found


# --- A run from beginning to end --------------------------------------------------------------------------------------


def make_models(config: Config) -> dict[str, Model]:
    return conv.make_models(network_config(config))


def train_all(config: Config, data: Data, options: Any = NO_OPTIONS, **more: Any) -> dict[str, TrainState]:
    """Train the models one after the other, and return their states. ``more`` as in ``Session``."""
    network = network_config(config)
    session = Session(EXPERIMENT, config, make_models, options, **more)
    with Workers(options.threads) as workers:
        for model, state in session.trainings(lambda name: steps_per_epoch(network, data) * of_model(name, network)[0]):
            train(model, network, data, state, workers, session.after_step)
    return session.trained


def run(config: Config, options: Any = NO_OPTIONS, **more: Any) -> tuple[dict[str, Any], dict[str, TrainState]]:
    """Data, trainings, attacks -> the result and the states. ``more`` as in ``Session``."""
    data = make_data(config)
    states = train_all(config, data, options, **more)
    return make_result(config, states, attack_all(config, states, data, options.threads), data), states


def make_result(
    config: Config, states: Mapping[str, TrainState], attacks: Mapping[str, Any], data: Data
) -> dict[str, Any]:
    """The JSON of a run; accuracies are fractions, "accuracy" is that without an attack, on all test images. Accuracies
    under attack are in "attack", by epsilon, and also among a model's metrics, such as ``fgsm_0.1_accuracy``."""
    models: dict[str, dict[str, Any]] = {}
    config = dataclasses.replace(config, n_attack=min(config.n_attack, len(data.test.labels)))
    for name, state in states.items():
        models[name] = model_metrics(state)
        for kind, by_epsilon in attacks[name].items():
            models[name] |= {f"{kind}_{e}_accuracy": x for e, x in by_epsilon.items()}
    result = result_document(EXPERIMENT, config, data.name, models, states, headline="accuracy")
    return result | {"attack": attacks}


def describe(result: Mapping[str, Any]) -> str:
    config = result["config"]
    unit = "standard deviations" if config["standardize"] == "image" else "the range of pixels"
    images = "familiar" if result["dataset"] in ("shapes", "voxels") else "test"
    return (f"{result['dataset']}: {images} images attacked, epsilon in {unit}; seed {config['seed']},"
            f" {config['n_epochs']} epochs (the CNN {config['cnn_epochs']})")


def format_table(result: Mapping[str, Any]) -> str:
    """The result table, and one of the accuracy under each attack."""
    lines = [f"{'model':<10} {'accuracy':>8} {'parameters':>10} {'seconds':>8}"]
    for name, m in result["models"].items():
        lines.append(f"{name:<10} {m['accuracy']:8.4f} {m['n_params']:10,} {m['train_seconds']:8.1f}")
    epsilons = ["0", *(f"{epsilon:g}" for epsilon in result["config"]["epsilons"])]
    heads = " ".join(f"{epsilon:>6}" for epsilon in epsilons)
    lines += [f"{'accuracy under attack by epsilon':<32} {heads}"]
    for name, found in result["attack"].items():
        for kind, by_epsilon in found.items():
            cells = " ".join(f"{by_epsilon[epsilon]:6.3f}" for epsilon in epsilons)
            lines.append(f"{name + ': ' + kind.replace('_', ' '):<32} {cells}")
    return "\n".join(lines)


@script
def main(argv: Sequence[str]) -> None:
    config, options, _ = parse(
        Config, Options, argv,
        "Train matrix capsules and a CNN, and attack both by small changes of the images.",
        [
            ("", "Both networks on drawn shapes, all attacks: about 1 minute."),
            ("--models cnn --epsilons 0.1,0.2", "The CNN alone, two sizes of attack: about 5 seconds."),
            ("--dataset strokes --n-train 5000 --n-attack 100", "On generated digits: about 1 minute."),
        ],
    )
    require_own_outputs(EXPERIMENT, config, options)
    result, states = run(config, options, names=options.models)
    report(result, f"{describe(result)}\n{format_table(result)}", options, states)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
