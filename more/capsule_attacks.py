"""Attacks: small changes of an image that mislead capsules and a CNN, in numpy.

Claim tested: [Hinton 2018] G. Hinton, S. Sabour, N. Frosst, "Matrix capsules with EM routing", ICLR 2018, section 6
and figure 3. After one step along the sign of the loss's gradient, which moves every pixel by epsilon, matrix capsules
keep more of their accuracy than a convolutional network does. What an attacker with more patience finds:

    fgsm              one step along the gradient of the training's loss: the paper's attack
    iterated          20 steps with momentum; see attacks.py
    ..._margin        both along the best wrong score minus the right one, where scores between 0 and 1 are log-odds
    ..._cross_entropy the same along the cross-entropy of log-odds
    targeted          the same steps along the margin to each class by itself
    vote              along the gradient of the capsules whose votes for the classes are averaged without routing
    from_cnn, from_capsules, from_other_seed    along the gradient of the other network, or of one that learned the same
                      images from other initial weights
    gradients         an image is right if none of these misleads the network with that epsilon or a smaller one, nor
                      twice to eight times the steps from random starts, as long as more steps help
    worst_case        nor does a search without gradients

The networks are those of conv_matrix_capsules.py, matrix capsules and a CNN of as many parameters. They learn drawn
shapes, which are other ones for every seed, from a range of viewpoints; other images from that range are attacked.
With ``--network dense`` they are those of smallnorb_novel_viewpoint.py, and ``--network capsnet`` attacks the CapsNet
of mnist_affine_capsnet.py and its CNN, on digits. The attacker knows all weights. Pixels run from 0 to 1: an epsilon of
0.1 is a tenth of that range. Where networks are given standardised images, that is their first layer: the attacker
changes the images before it, and follows the gradient through it.

Deviations from the paper: drawn shapes stand in for smallNORB (``--dataset smallnorb`` reads its files); the paper's
CNN has more parameters than its capsules, this one has as many.

Run it (both networks, seed 0, all attacks):

    python -m more.capsule_attacks
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

import multimnist_capsnet as multimnist
import smallnorb_novel_viewpoint as smallnorb
from more import attacks, conv_matrix_capsules as conv, mnist_affine_capsnet as affine
from more.attacks import MARGIN, by_image, margin_loss, of_log_odds
from more.conv_matrix_capsules import Data, Network, of_model, steps_per_epoch
from multimnist_capsnet import Workers
from smallnorb_novel_viewpoint import (
    FOLDER, NO_OPTIONS, RunOptions, Session, SettingError, Settings, Stream, TrainState, float_in, generator, int_in,
    is_terminal, list_of, model_metrics, one_of, parse, print_message, report, require_own_outputs, result_document,
    script, setting, softmax_cross_entropy, text_of,
)
from support.experiment import redeclared

# Dimension letters
#   B  images of a batch     N  images of a set     H, W  rows and columns of an image     C  channels     J  classes

Array = np.ndarray
Params = dict[str, Array]

EXPERIMENT = "capsule_attacks"
MODEL_NAMES = ("capsules", "cnn")
STEREO_SETS, DIGIT_SETS, RENDERED = ("smallnorb", "toys"), ("mnist", "strokes"), ("voxels", "shapes")
OF_VIEWS = ("batch_size", "lr", "cnn_lr", "weight_decay", "cnn_weight_decay", "variance_floor", "loss", "standardize")
OF_MATRIX = ("sizes", "cnn")
OF_CAPSNET = ("batch_size", "lr", "cnn_lr", "weight_decay")  # fixed, those of mnist_affine_capsnet.py
PIXELS = (0.0, 1.0)  # their range


DENSE: dict[str, Any] = {  # the winners of the searches under attack, of drawn shapes (docs/method.md)
    "n_epochs": 80, "lr": 1e-3, "weight_decay": 3.0, "cnn_epochs": 320, "cnn_lr": 1.25e-4, "cnn_weight_decay": 3.0,
}
FOLLOWED = {"cnn_epochs": "n_epochs", "cnn_lr": "lr", "cnn_weight_decay": "weight_decay"}  # if given alone


def defaults_of(network: str, **given: Any) -> dict[str, Any]:
    """Those of the network's own script, but for the dense networks' training and the length of the convolutional."""
    if network == "dense":
        own = {name: value for name, value in DENSE.items() if not {name, FOLLOWED.get(name)} & given.keys()}
        return vars(smallnorb.Config(dataset="shapes", **given, **own))
    n_epochs = given.get("n_epochs", 20)
    common = {"n_epochs": n_epochs, "cnn_epochs": n_epochs, "standardize": "none"}
    if network == "capsnet":
        return {name: getattr(affine.Config, name) for name in OF_CAPSNET} | common
    return vars(conv.Config(**given)) | common


# --- Configuration: user inputs only ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """One run. Where --n-epochs is given and --cnn-epochs is not, it holds for both models."""

    dataset: str = setting("shapes", ("shapes", "voxels", *STEREO_SETS, *DIGIT_SETS), "Attack drawn shapes, the"
        " write-up's objects, the smallNORB files, toys in their format, MNIST or drawn digits.", usual=True,
        group="data")
    data_dir: Path | None = setting(None, FOLDER, "Folder of the six smallNORB files, or of the four of MNIST.",
        usual=True)
    seed: int = redeclared(conv.Config, "seed")
    n_train: int | None = redeclared(conv.Config, "n_train", usual=False)
    network: str = setting("matrix", ("matrix", "dense", "capsnet"), "Attack convolutional matrix capsules; or on"
        " voxels and shapes those of smallnorb_novel_viewpoint.py, which are dense; or on digits a CapsNet with dynamic"
        " routing.", usual=True)
    standardize: str = setting(None, ("image", "none"), "With image, bring each image of voxels or shapes to mean zero"
        " and unit variance in the network's first layer.", "none, dense image")
    n_epochs: int = redeclared(conv.Config, "n_epochs", shown="20, dense 80")
    cnn_epochs: int = setting(None, int_in(1, 100_000), "The same for the CNN.",
        "20, dense 320, but as a given --n-epochs")
    batch_size: int = redeclared(conv.Config, "batch_size", None, shown="32, capsnet 16")
    lr: float = redeclared(conv.Config, "lr", help="Learning rate of the capsules.",
        shown="0.015, dense 0.001, capsnet 0.004")
    cnn_lr: float = redeclared(conv.Config, "cnn_lr", None,
        shown="0.001, capsnet 0.002, dense 0.000125 or a given --lr")
    weight_decay: float = redeclared(conv.Config, "weight_decay", None, shown="0, dense 3")
    cnn_weight_decay: float = redeclared(conv.Config, "cnn_weight_decay")
    sizes: tuple[int, int, int, int] = redeclared(conv.Config, "sizes", shown="32,4,4,8")
    variance_floor: float = redeclared(conv.Config, "variance_floor", shown="1, dense 3")
    loss: str = redeclared(conv.Config, "loss")
    cnn: str = redeclared(conv.Config, "cnn")
    dtype: str = redeclared(conv.Config, "dtype")
    plain: bool = redeclared(conv.Config, "plain")
    epsilons: tuple[float, ...] = setting((0.02, 0.05, 0.1, 0.2), list_of(float_in(1e-9, 1)),
        "Move no pixel by more than X.", usual=True, free=True, group="attacks")
    n_attack: int = setting(200, int_in(1, 10**7), "Attack N test images, evenly spaced over the set.", usual=True,
        free=True)
    n_test: int = 2000  # of smallNORB, toys and MNIST: a test on all would take longer than the training
    em_iters: Any = None  # these two are those of the network's own script
    beta_v_init: Any = None

    def dependent(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in ("n_epochs", "lr", "weight_decay")}
        own = defaults_of(self.network, **{name: value for name, value in given.items() if value is not None})
        return {name: own[name] for name in own.keys() & vars(self).keys()}

    def check(self) -> None:
        if self.dataset == "smallnorb" and self.data_dir is None:
            raise SettingError("data_dir", "--dataset smallnorb needs the folder of the six official files")
        if self.dataset not in ("smallnorb", "mnist") and self.data_dir is not None:
            raise SettingError("data_dir", f"{self.dataset} has no files")
        if list(self.epsilons) != sorted(set(self.epsilons)):
            raise SettingError("epsilons", f"{text_of(self.epsilons)} does not rise")
        if len({f"{epsilon:g}" for epsilon in self.epsilons}) < len(self.epsilons):
            raise SettingError("epsilons", "two of them are the same to six digits")
        for network, sets in {"capsnet": DIGIT_SETS, "dense": RENDERED}.items():
            if self.network == network and self.dataset not in sets:
                raise SettingError("network", f"{network} needs --dataset {' or '.join(sets)}")
        if self.standardize == "image" and self.dataset not in RENDERED:
            raise SettingError("standardize", "image needs --dataset voxels or shapes")
        unused = {"capsnet": ("cnn_epochs", *OF_VIEWS, *OF_MATRIX), "dense": (*OF_MATRIX, "n_train"), "matrix": ()}
        defaults = defaults_of(self.network, n_epochs=self.n_epochs)
        for name in unused[self.network]:
            if getattr(self, name) != defaults.get(name, getattr(Config, name)):
                raise SettingError(name, f"not together with --network {self.network}")


@dataclasses.dataclass(frozen=True)
class Options(RunOptions):
    models: tuple[str, ...] = setting(MODEL_NAMES, list_of(one_of(MODEL_NAMES)), "Train and attack only these.",
        usual=True)
    threads: int = redeclared(conv.Options, "threads", help="Use N threads. With --network capsnet the last bits of the"
        " numbers depend on N, else none.")


def fields_of(config: Config, other: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(other) if hasattr(config, f.name)}


def network_config(config: Config) -> conv.Config:
    """That of conv_matrix_capsules.py."""
    fields = fields_of(config, conv.Config)
    if config.dataset in STEREO_SETS:
        fields["held_out"] = "nothing"  # as in the paper's figure: all views of the objects that are not trained on
    if config.dataset in DIGIT_SETS:
        fields["standardize"] = None
    return conv.Config(**fields)


def dense_config(config: Config) -> smallnorb.Config:
    """That of smallnorb_novel_viewpoint.py."""
    return smallnorb.Config(**fields_of(config, smallnorb.Config))


def capsnet_config(config: Config, data: affine.Data | None = None) -> affine.Config:
    """That of mnist_affine_capsnet.py; with the data, it has their number in place of None."""
    made = affine.Config(**fields_of(config, affine.Config) | {"n_test": None})
    return affine.resolve_defaults(made, data) if data else made


AnyData = Data | smallnorb.Data | affine.Data


def make_data(config: Config) -> AnyData:
    """Images to train on, and other ones to attack. Raises UserError where files are missing or damaged."""
    if config.network == "capsnet":
        return affine.make_data(capsnet_config(config))
    if config.network == "dense":
        return smallnorb.make_data(dense_config(config))
    return conv.make_data(network_config(config))._replace(held_out=None)


def attacked_images(config: Config, data: AnyData) -> tuple[Array, Array]:
    """The images (N, H, W, C) to attack, as they are before any standardisation, and their labels (N,)."""
    if isinstance(data, affine.Data):
        digits = affine.rotated_set(data, capsnet_config(config), 0.0, config.n_attack)
        return digits.images[..., None], digits.labels[:, 0]
    if config.standardize == "image":
        config = dataclasses.replace(config, standardize="none")
        data = cast("Data | smallnorb.Data", make_data(config))
    examples = conv.Examples(*data.familiar[:2]) if isinstance(data, smallnorb.Data) else data.test
    examples = conv.subset(examples, config.n_attack)
    return conv.prepared(examples.images, network_config(config)), examples.labels


# --- Networks: in training, and as an attacker sees them --------------------------------------------------------------


def make_models(config: Config) -> dict[str, Any]:
    if config.network == "capsnet":
        models = affine.make_models(capsnet_config(config))
        return {"capsules": models["capsnet"]._replace(name="capsules"), "cnn": models["cnn"]}
    if config.network == "dense":
        dense = smallnorb.make_models(dense_config(config))
        return {"capsules": dense["capsules"], "cnn": dense["cnn_matched"]._replace(name="cnn")}
    return dict(conv.make_models(network_config(config)))


def train_all(config: Config, data: AnyData, options: Any = NO_OPTIONS, **more: Any) -> dict[str, TrainState]:
    """Train the models one after the other, and return their states. ``more`` as in ``Session``."""
    session = Session(EXPERIMENT, config, make_models, options, **more)
    with Workers(options.threads) as workers:
        if isinstance(data, affine.Data):
            digits = capsnet_config(config, data)
            train: Any = affine.train  # its states are those of multimnist_capsnet.py
            for model, state in session.trainings(lambda _: digits.n_steps):
                train(model, digits, data, state, workers, session.after_step)
        else:
            per_epoch = steps_per_epoch(config, data)
            for model, state in session.trainings(lambda name: per_epoch * of_model(name, config)[0]):
                if isinstance(data, smallnorb.Data):
                    smallnorb.train(model, dense_config(config), data, state, session.after_step)
                else:
                    conv.train(model, network_config(config), data, state, workers, session.after_step)
    return session.trained


def voting(config: conv.Config) -> Network:
    """Matrix capsules whose class capsules have even assignments: the mean of all votes."""
    forward, backward, parameters = conv.PLAIN if config.plain else conv.FAST

    def class_votes(
        pose: Array, a: Array, w: Array, beta_a: Array, beta_v: Array, lambdas: list[float], *more: Any
    ) -> Any:
        is_class_layer = w.shape[0] == 1  # its matrices are the same at all positions
        return forward(pose, a, w, beta_a, beta_v, lambdas[-1:] if is_class_layer else lambdas, *more)

    return conv.make_capsules(config, conv.Routing(class_votes, backward, parameters))


def standardized_forward(x: Array) -> tuple[Array, tuple[Array, Array]]:
    """Images x (N, H, W, C) -> ``smallnorb.standardized``, cache."""
    out = smallnorb.standardized(x)
    return out, (out, x.std(axis=(1, 2), keepdims=True))


def standardized_backward(dout: Array, cache: tuple[Array, Array]) -> Array:
    """dout (N, H, W, C) -> dx; 0 for an image of one grey level."""
    out, deviation = cache
    divisor = deviation + deviation.dtype.type(1e-6)
    # out = (x - mean) / (deviation + 1e-6)
    dcentred = dout / divisor
    # deviation = sqrt(mean of (x - mean)^2)
    dcentred -= out * (dout * out).mean(axis=(1, 2), keepdims=True) / np.maximum(deviation, 1e-12)
    # x - mean
    return np.where(out.any(axis=(1, 2), keepdims=True), dcentred - dcentred.mean(axis=(1, 2), keepdims=True), 0)


def of_raw(forward: Callable[..., Any], backward: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The pair of a network that standardises its images first."""

    def of_images(x: Array) -> tuple[Array, Any]:
        out, cache = standardized_forward(x)
        scores, own = forward(out)
        return scores, (own, cache)

    def to_images(dscores: Array, cache: Any, need_dx: bool) -> tuple[Params, Array]:
        grads, dout = backward(dscores, cache[0], need_dx=need_dx)
        return grads, standardized_backward(dout, cache[1])

    return of_images, to_images


DENSE_PART = 64  # images of the dense networks at a time


def attacked_network(
    config: Config, name: str, params: Params, workers: Workers, vote: bool = False
) -> attacks.Attacked:
    """A trained network, or with ``vote`` the capsules without the routing of the class capsules."""
    size, has_odds = conv.PART, name == "capsules"
    digits = capsnet_config(config) if config.network == "capsnet" else affine.Config()
    if config.network != "capsnet":
        model = make_models(dataclasses.replace(config, em_iters=1) if vote else config)[name]
        if vote and config.network == "matrix":
            model = voting(network_config(config))
        forward: Any = functools.partial(model.forward, params)
        backward: Any = model.backward
        size = DENSE_PART if config.network == "dense" else conv.part_size(network_config(config), name)
        own, has_odds = lambda scores, labels: model.loss(scores, labels, 1.0), has_odds and config.loss == "spread"
        if config.standardize == "image":
            forward, backward = of_raw(forward, backward)
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
        net = make_models(config)[name].loss_and_grads.keywords["net"]
        forward, own = functools.partial(multimnist.cnn_forward, params, net=net), softmax_cross_entropy
        backward = functools.partial(multimnist.cnn_backward, net=net)
    odds = of_log_odds if has_odds else (lambda loss: loss)
    losses = {"": by_image(own), MARGIN: odds(margin_loss)}
    if has_odds:
        losses["_cross_entropy"] = odds(by_image(softmax_cross_entropy))
    return attacks.network_of(
        forward, lambda d, c: backward(d, c, need_dx=True)[1], losses, size, workers.map,
        lambda target: odds(attacks.margin_to(target)))


# --- Attacks ----------------------------------------------------------------------------------------------------------


def attack_all(
    config: Config, states: Mapping[str, TrainState], data: AnyData, threads: int = 1, quiet: bool = True
) -> dict[str, attacks.Found]:
    """The attacks on every trained model, after a second training from other initial weights."""
    other_seed = (config.seed + 1) % 2**32
    others = train_all(dataclasses.replace(config, seed=other_seed), data, RunOptions(threads=threads, quiet=True),
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
            if not quiet:
                print_message(f"{name}: attacks on {len(images)} images", end="" if is_terminal() else "\n")
            rng = generator(config.seed, Stream.EVALUATION, *name.encode())
            network = seen(name, state.params)
            found[name] = attacks.attack(network, along, images, labels, config.epsilons, PIXELS, rng)
    if not quiet and is_terminal():
        print_message("", end="")
    return found


# --- A run from beginning to end --------------------------------------------------------------------------------------


def run(config: Config, options: Any = NO_OPTIONS, **more: Any) -> tuple[dict[str, Any], dict[str, TrainState]]:
    """Data, trainings, attacks -> the result and the states. ``more`` as in ``Session``."""
    data = make_data(config)
    states = train_all(config, data, options, **more)
    return make_result(config, states, attack_all(config, states, data, options.threads, options.quiet), data), states


def make_result(
    config: Config, states: Mapping[str, TrainState], found: Mapping[str, attacks.Found], data: Any
) -> dict[str, Any]:
    """The JSON of a run; accuracies are fractions, "accuracy" is that without an attack, on all test images of matrix
    networks on a grid and on the attacked images of the others. Accuracies under attack are in "attack", by epsilon,
    and also among a model's metrics, such as ``fgsm_0.1_accuracy``. Those among the images that all networks classify
    correctly without an attack are in "attack_of_both", and such as ``fgsm_0.1_of_both_accuracy`` (0 where there are no
    such images). "convergence" has the accuracy under all attacks but the search, by epsilon and by the number of
    steps; ``20_steps_0.1_accuracy`` is that of the first round, ``gradients_0.1_accuracy`` that of the last."""
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
        for e, rounds in zip(names, found[name].convergence, strict=True):
            models[name][f"{min(rounds)}_steps_{e}_accuracy"] = rounds[min(rounds)]
    config = dataclasses.replace(config, n_attack=len(both))
    name = config.dataset if isinstance(data, smallnorb.Data) else data.name
    result = result_document(EXPERIMENT, config, name, models, states, headline="accuracy")
    convergence = {name: dict(zip(names, one.convergence, strict=True)) for name, one in found.items()}
    return result | tables | {"convergence": convergence, "n_both": int(both.sum())}


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
    of_both = f"of {result['n_both']} that both classify"
    for table, title in (("attack", "of all images"), ("attack_of_both", of_both))[: len(result["models"])]:
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
        Config, Options, argv, "Train capsules and a CNN, and attack both by small changes of the images.",
        ("", "Both networks on drawn shapes, all attacks: about 10 minutes."),
        ("--network dense --n-attack 50", "The dense networks: about 40 seconds."),
        ("--models cnn --epsilons 0.1,0.2", "The CNN alone, two sizes of attack: about 15 seconds."),
    )
    require_own_outputs(EXPERIMENT, config, options)
    result, states = run(config, options, names=options.models)
    report(result, f"{describe(result)}\n{format_table(result)}", options, states)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
