#!/usr/bin/env python3
"""Attacks: small changes of an image that mislead capsules and a CNN, in numpy.

Claim reproduced: [Hinton 2018] G. Hinton, S. Sabour, N. Frosst, "Matrix capsules with EM routing", ICLR 2018, section 6
and figure 3. After one step along the sign of the loss's gradient, which moves every pixel by epsilon, matrix capsules
keep more of their accuracy than a convolutional network does. What an attacker with more patience finds:

    fgsm              one step along the gradient of the training's loss: the paper's attack
    iterated          many steps, as many as still help; see attacks.py
    ..._margin        both along the best wrong score minus the right one, where scores between 0 and 1 are log-odds
    ..._cross_entropy the same along the cross-entropy of log-odds
    vote              along the gradient of the capsules whose votes for the classes are averaged without routing
    from_cnn, from_capsules, from_other_seed    along the gradient of the other network, or of one that learned the same
                      images from other initial weights
    gradients         an image is right if none of all these misleads the network with that epsilon or a smaller one
    worst_case        nor does a search without gradients

The networks are those of conv_matrix_capsules.py, matrix capsules and a CNN of as many parameters. They learn drawn
shapes, which are other ones for every seed, from a range of viewpoints; other images from that range are attacked.
With ``--network capsnet`` they are the CapsNet of mnist_affine_capsnet.py and its CNN, on digits. The attacker knows
all weights. Pixels run from 0 to 1, and images are not standardised: an epsilon of 0.1 is a tenth of that range.

Deviations from the paper: drawn shapes stand in for smallNORB (``--dataset smallnorb`` reads its files); the paper's
CNN has more parameters than its capsules, this one has as many.

Run it (both networks, seed 0, all attacks):

    python -m more.capsule_attacks
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import multimnist_capsnet as multimnist
from fast.workers import Workers
from more import attacks
from more import conv_matrix_capsules as conv
from more import mnist_affine_capsnet as affine
from more.attacks import MARGIN, by_image, margin_loss, of_log_odds
from more.conv_matrix_capsules import Data, Network, of_model, steps_per_epoch
from smallnorb_novel_viewpoint import (
    FOLDER,
    NO_OPTIONS,
    RunOptions,
    Session,
    SettingError,
    Settings,
    Stream,
    TrainState,
    float_in,
    generator,
    int_in,
    list_of,
    model_metrics,
    one_of,
    parse,
    report,
    require_own_outputs,
    result_document,
    script,
    setting,
    softmax_cross_entropy,
    text_of,
)
from support.experiment import redeclared

# Dimension letters
#   B  images of a batch     N  images of a set     H, W  rows and columns of an image     C  channels     J  classes

Array = np.ndarray
Params = dict[str, Array]

EXPERIMENT = "capsule_attacks"
MODEL_NAMES = ("capsules", "cnn")
STEREO_SETS, DIGIT_SETS = ("smallnorb", "toys"), ("mnist", "strokes")
OF_MATRIX = ("cnn_epochs", "batch_size", "cnn_lr", "sizes", "variance_floor", "loss", "cnn")  # and not of a CapsNet
PIXELS = (0.0, 1.0)  # their range


# --- Configuration: user inputs only ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """One run. Where --n-epochs is given and --cnn-epochs is not, it holds for both models."""

    dataset: str = setting("shapes", ("shapes", "voxels", *STEREO_SETS, *DIGIT_SETS), "Attack drawn shapes, voxel"
        " objects, the smallNORB files, toys in their format, MNIST or generated digits.", usual=True, group="data")
    data_dir: Path | None = setting(None, FOLDER, "Folder of the six smallNORB files, or of the four of MNIST.",
        usual=True)
    seed: int = setting(0, int_in(0, 2**32 - 2), "Seed of the data, the initial weights and the order of the images.",
        usual=True)
    n_train: int | None = redeclared(conv.Config, "n_train", usual=False)
    network: str = setting("matrix", ("matrix", "capsnet"), "Attack convolutional matrix capsules; or, on digits, a"
        " CapsNet with dynamic routing.")
    n_epochs: int = redeclared(conv.Config, "n_epochs", shown="20")
    cnn_epochs: int = setting(None, int_in(1, 100_000), "The same for the CNN.", shown="20, or as --n-epochs")
    batch_size: int = redeclared(conv.Config, "batch_size")
    cnn_lr: float = redeclared(conv.Config, "cnn_lr")
    sizes: tuple[int, int, int, int] = redeclared(conv.Config, "sizes")
    variance_floor: float = redeclared(conv.Config, "variance_floor")
    loss: str = redeclared(conv.Config, "loss")
    cnn: str = redeclared(conv.Config, "cnn")
    dtype: str = redeclared(conv.Config, "dtype")
    plain: bool = redeclared(conv.Config, "plain")
    epsilons: tuple[float, ...] = setting((0.02, 0.05, 0.1, 0.2), list_of(float_in(1e-9, 1)),
        "Move no pixel by more than X.", usual=True, free=True, group="attacks")
    n_attack: int = setting(200, int_in(1, 10**7), "Attack N test images, evenly spaced over the set.", usual=True,
        free=True)
    n_test: int = 2000  # of smallNORB, toys and MNIST: a test on all would take longer than the training
    lr: float = conv.Config.lr
    em_iters: int = conv.Config.em_iters
    beta_v_init: float = conv.Config.beta_v_init

    def dependent(self) -> dict[str, Any]:
        return {"n_epochs": 20, "cnn_epochs": self.n_epochs or 20, **conv.PRESETS["small"]}

    def check(self) -> None:
        if self.dataset == "smallnorb" and self.data_dir is None:
            raise SettingError("data_dir", "--dataset smallnorb needs the folder of the six official files")
        if self.dataset not in ("smallnorb", "mnist") and self.data_dir is not None:
            raise SettingError("data_dir", f"{self.dataset} has no files")
        if list(self.epsilons) != sorted(set(self.epsilons)):
            raise SettingError("epsilons", f"{text_of(self.epsilons)} does not rise")
        if len({f"{epsilon:g}" for epsilon in self.epsilons}) < len(self.epsilons):
            raise SettingError("epsilons", "two of them are the same to six digits")
        if self.network == "capsnet":
            if self.dataset not in DIGIT_SETS:
                raise SettingError("network", "capsnet needs --dataset mnist or strokes")
            for name in (name for name in OF_MATRIX if name != "cnn_epochs"):
                if getattr(self, name) != conv.PRESETS["small"].get(name, getattr(Config, name)):
                    raise SettingError(name, "not together with --network capsnet")


@dataclasses.dataclass(frozen=True)
class Options(RunOptions):
    models: tuple[str, ...] = setting(MODEL_NAMES, list_of(one_of(MODEL_NAMES)), "Train and attack only these.",
        usual=True)
    threads: int = redeclared(conv.Options, "threads")


def fields_of(config: Config, other: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(other) if hasattr(config, f.name)}


def network_config(config: Config) -> conv.Config:
    """That of conv_matrix_capsules.py."""
    fields = fields_of(config, conv.Config) | {"standardize": "none"}
    if config.dataset in STEREO_SETS:
        fields["held_out"] = "nothing"  # as in the paper's figure: all views of the objects that are not trained on
    return conv.Config(**fields)


def capsnet_config(config: Config, data: affine.Data | None = None) -> affine.Config:
    """That of mnist_affine_capsnet.py; with the data, it has their number in place of 0."""
    own: dict[str, Any] = {"n_test": None} | {
        name: getattr(affine.Config, name) for name in ("lr", "cnn_lr", "batch_size")}
    made = affine.Config(**fields_of(config, affine.Config) | own | {"n_train": config.n_train})
    return affine.resolve_defaults(made, data) if data else made


def make_data(config: Config) -> Data | affine.Data:
    """Images to train on, and other ones to attack. Raises UserError where files are missing or damaged."""
    if config.network == "capsnet":
        return affine.make_data(capsnet_config(config))
    return conv.make_data(network_config(config))._replace(held_out=None)


def attacked_images(config: Config, data: Data | affine.Data) -> tuple[Array, Array]:
    """The images (N, H, W, C) to attack, and their labels (N,)."""
    if isinstance(data, affine.Data):
        digits = affine.rotated_set(data, capsnet_config(config), 0.0, config.n_attack)
        return digits.images[..., None], digits.labels[:, 0]
    examples = conv.subset(data.test, config.n_attack)
    return conv.prepared(examples.images, network_config(config)), examples.labels


# --- Networks: in training, and as an attacker sees them --------------------------------------------------------------


def make_models(config: Config) -> dict[str, Any]:
    if config.network == "capsnet":
        models = affine.make_models(capsnet_config(config))
        return {"capsules": models["capsnet"]._replace(name="capsules"), "cnn": models["cnn"]}
    return dict(conv.make_models(network_config(config)))


def train_all(
    config: Config, data: Data | affine.Data, options: Any = NO_OPTIONS, **more: Any
) -> dict[str, TrainState]:
    """Train the models one after the other, and return their states. ``more`` as in ``Session``."""
    session = Session(EXPERIMENT, config, make_models, options, **more)
    with Workers(options.threads) as workers:
        if isinstance(data, affine.Data):
            digits = capsnet_config(config, data)
            after_step: Any = session.after_step
            for model, state in session.trainings(lambda _: digits.n_steps):
                lr = digits.lr if model.name == "capsules" else digits.cnn_lr
                of_digits: Any = state
                affine.train(model, dataclasses.replace(digits, cnn_lr=lr), data, of_digits, workers, after_step)
        else:
            matrix = network_config(config)
            n_steps = functools.partial(of_model, config=matrix)
            for model, state in session.trainings(lambda name: steps_per_epoch(matrix, data) * n_steps(name)[0]):
                conv.train(model, matrix, data, state, workers, session.after_step)
    return session.trained


def voting(config: conv.Config) -> Network:
    """Matrix capsules whose class capsules have even assignments: the mean of all votes."""
    forward, backward, parameters = conv.PLAIN if config.plain else conv.FAST

    def class_votes(pose: Array, a: Array, w: Array, beta_a: Array, beta_v: Array, n_iters: int, *more: Any) -> Any:
        is_class_layer = w.shape[0] == 1  # its matrices are the same at all positions
        return forward(pose, a, w, beta_a, beta_v, 1 if is_class_layer else n_iters, *more)

    return conv.make_capsules(config, conv.Routing(class_votes, backward, parameters))


def attacked_network(
    config: Config, name: str, params: Params, workers: Workers, vote: bool = False
) -> attacks.Network:
    """A trained network, or with ``vote`` the capsules without the routing of the class capsules."""
    size, has_odds = conv.PART, name == "capsules"
    digits = capsnet_config(config) if config.network == "capsnet" else affine.Config()
    if config.network == "matrix":
        matrix = network_config(config)
        model = voting(matrix) if vote else conv.make_models(matrix)[name]
        forward, backward, size = functools.partial(model.forward, params), model.backward, model.part_size
        own, has_odds = lambda scores, labels: model.loss(scores, labels, 1.0), has_odds and config.loss == "spread"
    elif name == "capsules":
        digits = dataclasses.replace(digits, routing_iters=1 if vote else digits.routing_iters)
        forward = functools.partial(multimnist.capsnet_forward, params, config=digits)

        def backward(dlengths: Array, cache: multimnist.CapsNetCache, need_dx: bool) -> tuple[Params, Array | None]:
            lengths = np.sqrt(np.square(cache.v).sum(axis=2) + multimnist.SQUASH_EPS)
            dv = cache.v * (dlengths / lengths)[..., None]
            return multimnist.capsnet_backward(dv, cache, digits, need_dx=need_dx)

        def own(scores: Array, labels: Array) -> tuple[float, Array]:
            positive = multimnist.indicator(labels[:, None], scores.shape[1], scores.dtype)
            return multimnist.margin_loss(scores, positive, len(labels))
    else:
        layers = (multimnist.ConvLayer(multimnist.KERNEL, 2 * digits.conv_channels, pool=multimnist.MAX_POOL),
                  multimnist.ConvLayer(5, 2 * digits.conv_channels, pool=multimnist.MAX_POOL))
        net = multimnist.CNN(layers, {"hidden": len(params["hidden.b"])}, conv=multimnist.parts_of(digits).conv)
        forward, own = functools.partial(multimnist.cnn_forward, params, net=net), softmax_cross_entropy
        backward = functools.partial(multimnist.cnn_backward, net=net)
    odds = of_log_odds if has_odds else (lambda loss: loss)
    losses = {"": by_image(own), MARGIN: odds(margin_loss)}
    if has_odds:
        losses["_cross_entropy"] = odds(by_image(softmax_cross_entropy))
    return attacks.network_of(forward, lambda d, c: backward(d, c, need_dx=True)[1], losses, size, workers.map)


# --- Attacks ----------------------------------------------------------------------------------------------------------


def attack_all(
    config: Config, states: Mapping[str, TrainState], data: Data | affine.Data, threads: int = 1
) -> dict[str, attacks.Found]:
    """The attacks on every trained model, after a second training from other initial weights."""
    others = train_all(dataclasses.replace(config, seed=config.seed + 1), data, RunOptions(threads=threads, quiet=True),
                       names=list(states))
    images, labels = attacked_images(config, data)
    found = {}
    with Workers(threads) as workers:
        seen = functools.partial(attacked_network, config, workers=workers)
        for name, state in states.items():
            along = {f"from_{other}": seen(other, states[other].params) for other in states if other != name}
            along["from_other_seed"] = seen(name, others[name].params)
            if name == "capsules":
                along[attacks.VOTE] = seen(name, state.params, vote=True)
            rng = generator(config.seed, Stream.EVALUATION, *name.encode())
            network = seen(name, state.params)
            found[name] = attacks.attack(network, along, images, labels, config.epsilons, PIXELS, rng)
    return found


# --- A run from beginning to end --------------------------------------------------------------------------------------


def run(config: Config, options: Any = NO_OPTIONS, **more: Any) -> tuple[dict[str, Any], dict[str, TrainState]]:
    """Data, trainings, attacks -> the result and the states. ``more`` as in ``Session``."""
    data = make_data(config)
    states = train_all(config, data, options, **more)
    return make_result(config, states, attack_all(config, states, data, options.threads), data), states


def make_result(
    config: Config, states: Mapping[str, TrainState], found: Mapping[str, attacks.Found], data: Any
) -> dict[str, Any]:
    """The JSON of a run; accuracies are fractions, "accuracy" is that without an attack, on all test images. Accuracies
    under attack are in "attack", by epsilon, and also among a model's metrics, such as ``fgsm_0.1_accuracy``. Those
    among the images that all networks classify correctly without an attack are in "attack_of_both", and such as
    ``fgsm_0.1_of_both_accuracy`` (0 where there are no such images). "convergence" has the accuracy under all attacks
    but the search, by epsilon and by the number of steps."""
    models, names = dict[str, dict[str, Any]](), [f"{epsilon:g}" for epsilon in config.epsilons]
    both = np.all([one.clean for one in found.values()], axis=0)
    every = np.full(len(both), True)

    def accuracies(one: attacks.Found, those: Array) -> dict[str, dict[str, float]]:
        at = {kind: zip(["0", *names], [one.clean, *right], strict=True) for kind, right in one.right.items()}
        return {kind: {e: float(right[those].sum() / max(1, those.sum())) for e, right in at[kind]} for kind in at}

    suffixes = {"attack": ("accuracy", every), "attack_of_both": ("of_both_accuracy", both)}
    tables = {t: {name: accuracies(found[name], those) for name in states} for t, (_, those) in suffixes.items()}
    for name, state in states.items():
        models[name] = {"accuracy": float(found[name].clean.mean()), **model_metrics(state)}
        for table, (suffix, _) in suffixes.items():
            of = tables[table][name]
            models[name] |= {f"{kind}_{e}_{suffix}": x for kind in of for e, x in of[kind].items()}
    config = dataclasses.replace(config, n_attack=len(both))
    result = result_document(EXPERIMENT, config, data.name, models, states, headline="accuracy")
    rounds = {name: dict(zip(names, one.convergence, strict=True)) for name, one in found.items()}
    return result | tables | {"convergence": rounds, "n_both": int(both.sum())}


def describe(result: Mapping[str, Any]) -> str:
    config = result["config"]
    images = "familiar" if result["dataset"] in ("shapes", "voxels") else "test"
    return (f"{result['dataset']}: {images} images attacked, epsilon in the range of pixels; seed {config['seed']},"
            f" {config['n_epochs']} epochs (the CNN {config['cnn_epochs']})")


def format_table(result: Mapping[str, Any]) -> str:
    """The result table, one of the accuracy under each attack, and one of the accuracy by the number of steps."""
    lines = [f"{'model':<10} {'accuracy':>8} {'parameters':>10} {'seconds':>8}"]
    for name, m in result["models"].items():
        lines.append(f"{name:<10} {m['accuracy']:8.4f} {m['n_params']:10,} {m['train_seconds']:8.1f}")
    epsilons = ["0", *(f"{epsilon:g}" for epsilon in result["config"]["epsilons"])]
    heads = " ".join(f"{epsilon:>6}" for epsilon in epsilons)
    for table, title in (("attack", "of all images"), ("attack_of_both", f"of {result['n_both']} that both classify")):
        lines += [f"{'accuracy, ' + title:<36} {heads}"]
        for name, found in result[table].items():
            for kind in found if table == "attack" else ("fgsm", "worst_case"):
                cells = " ".join(f"{found[kind][epsilon]:6.3f}" for epsilon in epsilons)
                lines.append(f"{name + ': ' + kind.replace('_', ' '):<36} {cells}")
    for name, found in result["convergence"].items():
        for epsilon, rounds in found.items():
            cells = ", ".join(f"{n_steps} steps {accuracy:.3f}" for n_steps, accuracy in rounds.items())
            lines.append(f"{name}: epsilon {epsilon}, after {cells}")
    return "\n".join(lines)


@script
def main(argv: Sequence[str]) -> None:
    config, options, _ = parse(
        Config, Options, argv,
        "Train capsules and a CNN, and attack both by small changes of the images.",
        [
            ("", "Both networks on drawn shapes, all attacks: about 10 minutes."),
            ("--models cnn --epsilons 0.1,0.2", "The CNN alone, two sizes of attack: about 15 seconds."),
        ],
    )
    require_own_outputs(EXPERIMENT, config, options)
    result, states = run(config, options, names=options.models)
    report(result, f"{describe(result)}\n{format_table(result)}", options, states)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
