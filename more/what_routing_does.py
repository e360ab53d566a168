"""What routing does: one part of a capsule network is replaced, and everything else stays as it was.

The convolutional matrix capsules of conv_matrix_capsules.py, on drawn shapes of which some azimuths are held out:

    assignments      ``even``: one iteration, whose M-step has the assignments from which EM routing starts, the same
                     for all parents of a child, as in [Hinton 2018, table 1] and in [Paik 2019] I. Paik, T. Kwak,
                     I. Kim, "Capsule networks need an improved routing algorithm", ACML 2019 (arXiv 1907.13327)
    loss             ``cross-entropy`` of a score of pose and activation, in place of the spread loss of activations
    votes            V_ij = M_i W_ij + b_j with a learned bias b_j. [Peer 2019] D. Peer, S. Stabinger, A.
                     Rodriguez-Sanchez, "Limitations of routing-by-agreement based capsule networks" (arXiv 1905.08744)

The CapsNet of multimnist_capsnet.py, on composites of digits or, as in mnist_affine_capsnet.py, on upright digits that
are distorted in the test. [Gu 2021] J. Gu, V. Tresp, H. Hu, "Capsule network is not more robust than convolutional
network", CVPR 2021 (arXiv 2103.15459) names five parts that set it apart from a CNN:

    transformation   u_hat_ij = u_i W_ij. The capsule network always has it. ``shared`` has one W_j for all primary
                     capsules, as in [Gu 2020] J. Gu, V. Tresp, "Improving the robustness of capsule networks to image
                     affine transformations", CVPR 2020 (arXiv 1911.07968), which does not route
    assignments      ``even`` (all 1 / J) or ``random`` couplings, which do not depend on the votes
    activation       ``relu`` of primary capsules, as in a CNN, and no squash of digit capsules; or ``published``:
                     squashed as in the published code of 2017 (github.com/Sarasra/models), see ``published_squash``
    loss             ``cross-entropy``: softmax of the lengths, in place of the margin loss
    reconstruction   of each class from its own capsule; a ``recon_weight`` of 0

The variants are pairs that are given to the network of the base script, and no branch there. A third study has the task
of [Peer 2019]: poses and their negatives, which EM routing without a bias cannot tell apart.

Run it (EM routing, then even assignments, then the third study):

    python -m more.what_routing_does
    python -m more.what_routing_does --assignments even
    python -m more.what_routing_does --study signs
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import multimnist_capsnet as multimnist
import smallnorb_novel_viewpoint as smallnorb
from more import conv_matrix_capsules as conv, mnist_affine_capsnet as affine
from multimnist_capsnet import Array, Batch, CapsNetConfig, Pair, Params, Parts, Workers
from smallnorb_novel_viewpoint import (
    FOLDER, NO_OPTIONS, RunOptions, Session, SettingError, Settings, Stream, TrainState, adamw_of, count_params,
    float_in, from_json, generator, int_in, model_metrics, parse, report, require_own_outputs, result_document, script,
    setting,
)
from support.experiment import redeclared

# Dimension letters
#   B  images of a batch              I  capsules, or types, below           J  capsules, or types, above
#   K  side of a receptive field      P  side of a pose matrix (4), or entries of a primary capsule (8)
#   L  receptive fields               D  entries of a pose (16), or of a digit capsule (16)
#   M  children of a field, K * K * I

EXPERIMENT = "what_routing_does"
AFFNIST: dict[str, Any] = {  # the settings of that study
    "canvas": 40, "max_shift": 6, "conv_channels": 16, "primary_types": 4, "match_accuracy": 0.98, "check_every": 200,
}


# --- Configuration: user inputs only ----------------------------------------------------------------------------------

CAPSNET, PARTS = ("composites", "couplings", "affnist"), ("composites", "affnist")  # studies of a CapsNet; of its parts
OF_STUDIES: dict[str, tuple[str, ...]] = {  # the studies to which a field applies
    "n_epochs": ("shapes", *CAPSNET), "lr": ("shapes", *CAPSNET), "data_dir": CAPSNET, "recon_weight": CAPSNET,
    "assignments": ("shapes", *PARTS), "loss": ("shapes", *PARTS), "vote_bias": ("shapes",), "transform": PARTS,
    "activation": PARTS, "n_val": ("composites",),
}


DEPENDENT = ("n_epochs", "lr")  # of the study
SCRIPTS: dict[str, Any] = {"shapes": conv, "composites": multimnist, "couplings": multimnist, "affnist": affine}


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """One run."""

    study: str = setting("shapes", ("shapes", "signs", *CAPSNET), "Train convolutional matrix capsules on drawn shapes;"
        " a layer of class capsules on poses and their negatives; or a CapsNet on composites of two digits, with"
        " couplings then test it with other couplings, or, with affnist, on single digits, and test distorted ones.",
        usual=True, group="data")
    data_dir: Path | None = setting(None, FOLDER, "Folder of the four MNIST files.")
    n_val: int | None = setting(None, int_in(1, 10**6), "Hold N training digits out, and test on composites of them.")
    seed: int = redeclared(CapsNetConfig, "seed", group="")
    n_epochs: int = setting(None, int_in(1, 100_000), "Train for N epochs.",
        f"{conv.Config().n_epochs}, with digits {multimnist.Config.n_epochs}", usual=True, group="training")
    assignments: str = setting("routed", ("routed", "even", "random"), "Assign children to parents by routing; evenly;"
        " or, in a CapsNet, at random, drawn once for each pair of capsules.", usual=True, group="parts")
    loss: str = setting("paper", ("paper", "cross-entropy"), "Loss: the paper's, which is the spread loss of matrix"
        " capsules and the margin loss of a CapsNet; or cross-entropy.", usual=True)
    vote_bias: str = setting("none", ("none", "learned"), "Learn a bias of the votes for each parent.", usual=True)
    transform: str = setting("own", ("own", "shared"), "Give every primary capsule of a CapsNet its own transformation,"
        " or all of them one.")
    activation: str = setting("squash", ("squash", "relu", "published"), "Squash the capsules of a CapsNet; or take the"
        " ReLU of primary capsules, and nothing of digit capsules; or scale and shift them first, as published code.")
    recon_weight: float = setting(CapsNetConfig.recon_weight, float_in(0, 1000),
        "Weight of the squared error of a CapsNet's reconstruction in the loss.")
    plain: bool = redeclared(CapsNetConfig, "plain")
    lr: Any = None  # that of the study's networks
    dataset: str = "auto"  # of digits; or what was found

    def dependent(self) -> dict[str, Any]:
        if self.study == "signs":
            return {}
        script = SCRIPTS[self.study]
        length = multimnist.Config.n_epochs if self.study in CAPSNET else conv.Config().n_epochs
        return {"n_epochs": length, "lr": script.Config().lr}

    def check(self) -> None:
        for name, studies in {**OF_STUDIES, "plain": ("shapes", *CAPSNET)}.items():
            is_set = getattr(self, name) != getattr(Config, name) and (name not in DEPENDENT or self.study == "signs")
            if is_set and self.study not in studies:
                raise SettingError(name, f"does not apply to --study {self.study}")
        if self.assignments == "random" and self.study == "shapes":
            raise SettingError("assignments", "random is for a CapsNet")


Options = RunOptions  # those of every training


# --- EM routing over receptive fields: even assignments, and a learned bias of the votes ------------------------------


def biased_votes(bias: Array) -> Pair:
    """The pair of votes M_i W_ij + b_j with the bias (J, D). [Peer 2019]

    The mean of votes whose weights have the sum 1 moves by the bias, and no distance changes. Where a parent has hardly
    any mass the sum is below 1, because of MASS_FLOOR: then the bias also changes variances, activations and
    assignments.
    """

    def forward(pose: Array, w: Array) -> tuple[Array, smallnorb.VotesCache]:
        votes, cache = smallnorb.votes_forward(pose, w)
        return votes + bias, cache

    def backward(dvotes: Array, cache: smallnorb.VotesCache) -> tuple[Array, Array, Array]:
        # votes = pose w + bias
        return *smallnorb.votes_backward(dvotes, cache), dvotes.sum(axis=(0, 1))

    return Pair(forward, backward)


def biased_routing_forward(
    pose: Array, a_in: Array, w: Array, beta_a: Array, beta_v: Array, *more: Any
) -> tuple[Array, Array, conv.FieldRoutingCache]:
    """``conv.field_routing_forward`` with a bias (J, D) of the votes for a parent of each type before the settings, in
    the layers that have one."""
    bias, *settings = more if isinstance(more[0], np.ndarray) else (None, *more)
    vote = conv.VOTES if bias is None else biased_votes(bias)
    return conv.field_routing_forward(pose, a_in, w, beta_a, beta_v, *settings, vote=vote)  # type: ignore[misc]


BIASED = conv.Routing(biased_routing_forward, conv.field_routing_backward, ("beta_a", "beta_v", "bias"))
BIAS_INIT = 0.1  # [Peer 2019]


def matrix_capsules(network: conv.Config, assignments: str = "routed", vote_bias: str = "none") -> conv.Network:
    """The base script's capsules with these parts. What they have in common starts from the same weights. The first
    iteration has even assignments."""
    if assignments == "even":
        network = dataclasses.replace(network, em_iters=1)
    model = conv.make_capsules(network, BIASED if vote_bias == "learned" else None)

    def init_params(rng: np.random.Generator) -> Params:
        params = model.init_params(rng)
        if vote_bias == "learned":
            # The spread loss sees the activations alone, which no bias of the class capsules' votes changes.
            for layer in ("convcaps1", "convcaps2", *(["class"] if network.loss == "cross-entropy" else [])):
                shape = (len(params[f"{layer}.beta_a"]), smallnorb.POSE_SIDE**2)
                params[f"{layer}.bias"] = np.full(shape, BIAS_INIT, network.dtype)
        return params

    return model._replace(init_params=init_params)


# --- Poses and their negatives [Peer 2019] ----------------------------------------------------------------------------


def sign_accuracy(config: smallnorb.Config, rng: np.random.Generator, biased: bool) -> tuple[float, int]:
    """Whether class capsules tell poses from their negatives: accuracy, 0.5 by guessing, and number of parameters.

    Class 0 has children whose pose entries lie between 0 and 1, class 1 has the negatives of the same poses. All
    children are active. The layer has the parameters, routing and optimiser of the dense capsules of
    smallnorb_novel_viewpoint.py, cross-entropy and a rate of 0.002; 300 steps see 16 new pairs each, the test 500.
    """

    def pairs(n: int) -> tuple[Array, Array]:
        x = rng.random((n, smallnorb.N_PRIMARY, smallnorb.POSE_SIDE, smallnorb.POSE_SIDE)).astype(config.dtype)
        return np.concatenate([x, -x]), np.repeat([0, 1], n)

    def forward(params: Params, pose: Array) -> tuple[Array, smallnorb.VotesCache, smallnorb.EMCache, Array]:
        votes, votes_cache = smallnorb.votes_forward(pose, params["class.w"])
        votes = votes + params["class.bias"] if biased else votes
        betas, a_in = (params["class.beta_a"], params["class.beta_v"]), np.ones_like(votes[:, :, 0, 0])
        mu, a, cache = smallnorb.em_routing_forward(votes, a_in, *betas, config.lambdas, config.variance_floor)
        return smallnorb.class_scores_forward(mu, a, "cross-entropy"), votes_cache, cache, mu

    drawn = smallnorb.capsules_init(rng, config)
    params = {"class.w": drawn["class.w"][:, :2].copy()}  # of two classes
    params |= {name: drawn[name][:2].copy() for name in ("class.beta_a", "class.beta_v")}
    if biased:
        params["class.bias"] = np.full((2, smallnorb.POSE_SIDE**2), BIAS_INIT, config.dtype)
    state, update = TrainState("signs", params), adamw_of(config)
    for _ in range(300):
        pose, labels = pairs(16)
        scores, votes_cache, cache, mu = forward(params, pose)
        dscores = smallnorb.softmax_cross_entropy(scores, labels)[1]
        dmu, da = smallnorb.class_scores_backward(dscores, mu, "cross-entropy")
        dvotes, _, dbeta_a, dbeta_v = smallnorb.em_routing_backward(dmu, da, cache, config.em_grad)
        grads = {"class.w": smallnorb.votes_backward(dvotes, votes_cache)[1], "class.bias": dvotes.sum(axis=(0, 1))}
        update(state, [grads | {"class.beta_a": dbeta_a, "class.beta_v": dbeta_v}], config.lr)
    pose, labels = pairs(500)
    return float((forward(params, pose)[0].argmax(axis=1) == labels).mean()), count_params(params)


def sign_study(seed: int) -> dict[str, Any]:
    """The metrics without and with a bias of the votes."""
    config, rng = smallnorb.Config(seed=seed, lr=2e-3), generator(seed, Stream.EVALUATION, *b"signs")
    plain, n_params = sign_accuracy(config, rng, biased=False)
    biased, _ = sign_accuracy(config, rng, biased=True)
    return {"n_params": n_params, "sign_accuracy": plain, "biased_sign_accuracy": biased}


# --- Parts of a CapsNet -----------------------------------------------------------------------------------------------

RELU = Pair(multimnist.relu_forward, multimnist.relu_backward)
IDENTITY = Pair(lambda s: (s, None), lambda dv, _: dv)


def published_squash(divisor: float) -> Pair:
    """squash(s / divisor + 0.1). The published code divides primary capsules by 32, and adds biases that start at 0.1
    to them and, in every iteration, to digit capsules. Here these biases are constant."""

    def forward(s: Array) -> tuple[Array, Any]:
        return multimnist.squash_forward(s / divisor + 0.1)

    def backward(dv: Array, cache: Any) -> Array:
        # s / divisor + 0.1
        return multimnist.squash_backward(dv, cache) / divisor

    return Pair(forward, backward)


def random_couplings(n_children: int, n_parents: int) -> Array:
    """(I, J), drawn evenly from all whose sum over j is 1, the same for every image and every seed."""
    weights = generator(0, Stream.INIT, *b"couplings").standard_exponential((n_children, n_parents))
    return weights / weights.sum(axis=1, keepdims=True)


def fixed(couplings: Array) -> Pair:
    """The pair of a routing that has ``couplings`` (I, J) for every image, where ``n_iters`` and ``routing_grad`` mean
    nothing."""

    def forward(u: Array, w: Array, n_iters: int, squash: Pair) -> tuple[Array, Any]:
        """u (B, I, P), w (I, P, J, D) -> v (B, J, D)."""
        cu = couplings.T.astype(u.dtype)[..., None, None] * u.transpose(1, 2, 0)  # (J, I, P, B)
        rows = cu.reshape(len(cu), -1, len(u))  # (J, I*P, B)
        columns = w.transpose(2, 0, 1, 3).reshape(len(cu), rows.shape[1], -1)  # (J, I*P, D)
        v, squash_cache = squash.forward((rows.swapaxes(1, 2) @ columns).swapaxes(0, 1))
        return v, (rows, columns, squash_cache, squash, u.shape)

    def backward(dv: Array, cache: Any, routing_grad: str) -> tuple[Array, Array]:
        rows, columns, squash_cache, squash, (B, I, P) = cache
        J, _, D = columns.shape
        # v = squash(s), s = rows^T columns, rows = c u
        ds = squash.backward(dv, squash_cache).swapaxes(0, 1)  # (J, B, D)
        dw = (rows @ ds).reshape(J, I, P, D).transpose(1, 2, 0, 3)
        drows = (columns @ ds.swapaxes(1, 2)).reshape(J, I, P, B)
        return np.einsum("ij,jipb->bip", couplings.astype(dv.dtype), drows), dw

    return Pair(forward, backward)


def shared(routing: Pair) -> Pair:
    """The same routing with one transformation w (1, P, J, D) for all primary capsules. [Gu 2020]"""

    def forward(u: Array, w: Array, n_iters: int, squash: Pair) -> tuple[Array, Any]:
        return routing.forward(u, np.repeat(w, u.shape[1], axis=0), n_iters, squash)

    def backward(dv: Array, cache: Any, routing_grad: str) -> tuple[Array, Array]:
        du, dw = routing.backward(dv, cache, routing_grad)
        # w_i = w
        return du, dw.sum(axis=0, keepdims=True)

    return Pair(forward, backward)


def make_parts(
    config: CapsNetConfig, assignments: str = "routed", transform: str = "own", activation: str = "squash",
    loss: str = "paper",
) -> Parts:
    """The parts of a network by their names: assignments "routed", "even" or "random"; transform "own" or "shared";
    activation "squash", "relu" or "published"; loss "paper" or "cross-entropy"."""
    parts = multimnist.parts_of(config)
    if assignments != "routed":
        I, J = config.n_primary, config.n_classes
        couplings = random_couplings(I, J) if assignments == "random" else np.full((I, J), 1 / J)
        parts = parts._replace(routing=fixed(couplings))
    if transform == "shared":
        parts = parts._replace(routing=shared(parts.routing))
    if activation == "relu":
        # On a blank ground the primary capsules are 0; the fast convolution would leave its rounding to the ReLU.
        parts = parts._replace(conv=multimnist.CONV, primary=RELU, digit=IDENTITY)
    elif activation == "published":
        parts = parts._replace(primary=published_squash(32), digit=published_squash(1))
    if loss == "cross-entropy":
        parts = parts._replace(loss=affine.softmax_cross_entropy)
    return parts


def make_model(config: CapsNetConfig, transform: str = "own", **names: str) -> multimnist.Network:
    """A CapsNet of these parts, see ``make_parts``."""
    model = multimnist.capsnet_model(config, make_parts(config, transform=transform, **names))

    def init_params(rng: np.random.Generator) -> Params:
        params = multimnist.capsnet_init(rng, config)
        return params | {"routing.w": params["routing.w"][:1].copy()} if transform == "shared" else params

    return model._replace(init_params=init_params)


# --- Couplings after the training -------------------------------------------------------------------------------------


def routing_study(config: multimnist.Config, params: Params, batch: Batch, workers: Workers) -> dict[str, float]:
    """The trained capsules with other couplings than they were trained with, as in I. Paik et al., "Capsule networks
    need an improved routing algorithm", ACML 2019.

    These are the couplings of 1 to 5 iterations (after one they are even), and random ones. For each:
    ``set_accuracy``; "changed", the fraction of images that get another pair of digits than with the couplings of the
    training; and "entropy", that of a primary capsule's last couplings over its maximum log J, mean over capsules and
    images.
    """
    drawn, plain = random_couplings(config.n_primary, config.n_classes), multimnist.PLAIN.routing

    def answers_and_entropy(routing: Pair, n_iters: int) -> tuple[Array, float]:
        network = dataclasses.replace(config, routing_iters=n_iters)
        parts = multimnist.parts_of(config)._replace(routing=routing)

        def work(start: int) -> tuple[Array, Array]:
            images = batch.part(start, start + multimnist.EVALUATION_BATCH).images
            lengths, cache = multimnist.capsnet_forward(params, images, network, parts)
            c = cache.routing.c[-1] if isinstance(cache.routing, multimnist.RoutingCache) else drawn[None]  # (B, I, J)
            entropy = -(c * np.log(np.maximum(c, np.finfo(c.dtype).tiny))).sum(axis=2).mean(axis=1)  # (B,)
            answers = np.sort(multimnist.top_labels(lengths, batch.labels.shape[1]), axis=1)
            return answers, np.broadcast_to(entropy / math.log(c.shape[2]), len(images))

        starts = range(0, len(batch.labels), multimnist.EVALUATION_BATCH)
        answers, entropies = zip(*workers.map(work, starts), strict=True)
        return np.concatenate(answers), float(np.concatenate(entropies).mean())

    trained, _ = answers_and_entropy(plain, config.routing_iters)
    settings = {f"iters_{n}": (plain, n) for n in range(1, 6)} | {"random": (fixed(drawn), 1)}
    found = {}
    for name, (routing, n_iters) in settings.items():
        answers, entropy = answers_and_entropy(routing, n_iters)
        found[f"{name}_accuracy"] = float((answers == np.sort(batch.labels, axis=1)).all(axis=1).mean())
        found[f"{name}_changed"] = float((answers != trained).any(axis=1).mean())
        found[f"{name}_entropy"] = entropy
    return found


# --- A run from beginning to end --------------------------------------------------------------------------------------


def network_config(config: Config) -> Any:
    """The configuration of the base script."""
    common = {name: getattr(config, name) for name in ("seed", "n_epochs", "lr", "plain")}
    if config.study == "shapes":
        loss = "spread" if config.loss == "paper" else config.loss
        return conv.Config(dataset="shapes", loss=loss, **common)
    common |= {name: getattr(config, name) for name in ("dataset", "data_dir", "recon_weight")}
    if config.study == "affnist":
        return affine.Config(**(AFFNIST | common))
    return multimnist.Config(n_val=config.n_val, **common)


def make_data(config: Config) -> Any:
    return SCRIPTS[config.study].make_data(network_config(config))


def make_models(config: Config) -> dict[str, Any]:
    """The base script's network with the configured parts, by its name."""
    if config.study == "shapes":
        return {"capsules": matrix_capsules(network_config(config), config.assignments, config.vote_bias)}
    names = {name: getattr(config, name) for name in ("assignments", "transform", "activation", "loss")}
    return {"capsnet": make_model(network_config(config), **names)}


def train_all(config: Config, data: Any, options: Any = NO_OPTIONS, **more: Any) -> dict[str, TrainState]:
    """Train the network, and return its state by its name. ``more`` as in ``Session``."""
    network = network_config(config)
    if config.study == "affnist":
        network = affine.resolve_defaults(network, data)
    per_epoch = conv.steps_per_epoch(network, data) if config.study == "shapes" else network.steps_per_epoch
    session = Session(EXPERIMENT, config, make_models, options, **more)
    with Workers(options.threads) as workers:
        for model, state in session.trainings(lambda _: per_epoch * config.n_epochs):
            SCRIPTS[config.study].train(model, network, data, state, workers, session.after_step)
    return session.trained


def affnist_study(config: Config, params: Params, data: affine.Data, workers: Workers) -> dict[str, float]:
    """Accuracy on upright, rotated and distorted digits."""
    model, found = make_models(config)["capsnet"], {}
    for kind, digits in affine.make_test_sets(data, affine.resolve_defaults(network_config(config), data)):
        found[f"{kind}_accuracy"], _ = affine.accuracy_and_error(model, params, digits, workers)
    return found


HEADLINES = {"shapes": "held_out_accuracy", "signs": "sign_accuracy", "affnist": "affnist_accuracy"}


def run(config: Config, options: Any = NO_OPTIONS, **more: Any) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Data, training, tests -> result, states. ``more`` as in ``train_all``."""
    headline = HEADLINES.get(config.study, "set_accuracy")
    if config.study == "signs":
        models = {"capsules": sign_study(config.seed)}
        return result_document(EXPERIMENT, config, "signs", models, {}, headline), {}
    data = make_data(config)
    if config.study in CAPSNET:
        config = multimnist.resolve_auto(config, data)
    states = train_all(config, data, options, **more)
    ((name, state),) = states.items()
    metrics = model_metrics(state)
    with Workers(options.threads) as workers:
        if config.study == "couplings":
            metrics |= routing_study(network_config(config), state.params, data.test, workers)
        elif config.study == "affnist":
            metrics |= affnist_study(config, state.params, data, workers)
    return result_document(EXPERIMENT, config, data.name, {name: metrics}, states, headline), states


def describe(result: dict[str, Any]) -> str:
    """The study, its parts, and a line for each metric."""
    config = from_json(Config, result["config"])
    parts = [f"{name} {getattr(config, name)}" for name, studies in OF_STUDIES.items() if config.study in studies]
    lines = [", ".join([config.study, f"seed {config.seed}", *parts])]
    for name, metrics in result["models"].items():
        lines.append(f"{name:<10} {metrics['n_params']:10,} parameters")
        lines += [f"  {key:<22} {value:.4f}" for key, value in metrics.items() if isinstance(value, float)]
    return "\n".join(lines)


@script
def main(argv: Sequence[str]) -> None:
    config, options, _ = parse(
        Config, Options, argv, "Replace one part of a capsule network, and train and test it.",
        ("", "Matrix capsules with EM routing on drawn shapes: about 20 seconds."),
        ("--assignments even", "The same with even assignments: about 20 seconds."),
        ("--study signs", "Poses against their negatives, without and with a bias: about 2 seconds."),
    )
    if config.study == "signs" and options.checkpoint:
        raise SettingError("checkpoint", "--study signs takes seconds and saves nothing")
    require_own_outputs(EXPERIMENT, config, options)
    result, states = run(config, options)
    report(result, describe(result), options, states)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
