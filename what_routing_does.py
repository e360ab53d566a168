"""The parts of a CapsNet, replaced one by one: what each does.

[Gu 2021] J. Gu, V. Tresp, H. Hu, "Capsule network is not more robust than convolutional network", CVPR 2021 (arXiv
2103.15459) names five parts that set a capsule network apart from a CNN. Here are the pairs that stand for each:

    transformation   u_hat_ij = u_i W_ij. The capsule network always has it. ``shared`` has one W_j for all primary
                     capsules, as in [Gu 2020] J. Gu, V. Tresp, "Improving the robustness of capsule networks to image
                     affine transformations", CVPR 2020 (arXiv 1911.07968), which does not route
    routing          ``fixed``: couplings that do not depend on the votes, even (all 1 / J) or drawn at random
    squash           ``RELU`` of primary capsules, as in a CNN, and ``IDENTITY`` of digit capsules
    margin loss      ``softmax_cross_entropy`` of the lengths
    reconstruction   of each class from its own capsule; a ``recon_weight`` of 0

They are given to ``multimnist_capsnet.capsnet_model`` as its ``Parts``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import multimnist_capsnet as base
from fast.workers import Workers
from multimnist_capsnet import Array, Batch, Config, Model, Network, Pair, Params, Parts
from support.run import Stream, generator

RELU: Pair = (base.relu_forward, base.relu_backward)
IDENTITY: Pair = (lambda s: (s, None), lambda dv, _: dv)


# ----------------------------------------------------------------------------------------------------------------------
# Routing without agreement
# ----------------------------------------------------------------------------------------------------------------------


def even_couplings(n_children: int, n_parents: int) -> Array:
    return np.full((n_children, n_parents), 1 / n_parents)


def random_couplings(n_children: int, n_parents: int) -> Array:
    """(I, J), drawn evenly from all whose sum over j is 1, the same for every image and every seed."""
    weights = generator(0, Stream.INIT, *b"couplings").standard_exponential((n_children, n_parents))
    return weights / weights.sum(axis=1, keepdims=True)


def fixed(couplings: Array) -> Pair:
    """The pair of a routing that has ``couplings`` (I, J) for every image; ``n_iters`` and ``policy`` mean nothing in
    it."""

    def forward(u: Array, w: Array, n_iters: int, squash: Pair) -> tuple[Array, Any]:
        """u (B, I, P), w (I, P, J, D) -> v (B, J, D)."""
        cu = couplings.T.astype(u.dtype)[..., None, None] * u.transpose(1, 2, 0)  # (J, I, P, B)
        rows = cu.reshape(len(cu), -1, len(u))  # (J, I*P, B)
        columns = w.transpose(2, 0, 1, 3).reshape(len(cu), rows.shape[1], -1)  # (J, I*P, D)
        v, squash_cache = squash[0]((rows.swapaxes(1, 2) @ columns).swapaxes(0, 1))
        return v, (rows, columns, squash_cache, squash, u.shape)

    def backward(dv: Array, cache: Any, policy: str) -> tuple[Array, Array]:
        rows, columns, squash_cache, squash, (B, I, P) = cache
        J, _, D = columns.shape
        # v = squash(s), s = rows^T columns, rows = c u
        ds = squash[1](dv, squash_cache).swapaxes(0, 1)  # (J, B, D)
        dw = (rows @ ds).reshape(J, I, P, D).transpose(1, 2, 0, 3)
        drows = (columns @ ds.swapaxes(1, 2)).reshape(J, I, P, B)
        return np.einsum("ij,jipb->bip", couplings.astype(dv.dtype), drows), dw

    return forward, backward


def shared(routing: Pair) -> Pair:
    """The same routing with one transformation w (1, P, J, D) for all primary capsules. [Gu 2020]"""

    def forward(u: Array, w: Array, n_iters: int, squash: Pair) -> tuple[Array, Any]:
        return routing[0](u, np.repeat(w, u.shape[1], axis=0), n_iters, squash)

    def backward(dv: Array, cache: Any, policy: str) -> tuple[Array, Array]:
        du, dw = routing[1](dv, cache, policy)
        # w_i = w
        return du, dw.sum(axis=0, keepdims=True)

    return forward, backward


# ----------------------------------------------------------------------------------------------------------------------
# Networks
# ----------------------------------------------------------------------------------------------------------------------


def make_parts(
    config: Network, assignments: str = "routed", transform: str = "own", activation: str = "squash",
    loss: str = "margin",
) -> Parts:  # fmt: skip
    """The parts of a network by their names: assignments "routed", "uniform" or "random"; transform "own" or "shared";
    activation "squash" or "relu"; loss "margin" or "cross-entropy"."""
    parts = base.parts_of(config)
    if assignments != "routed":
        couplings = {"uniform": even_couplings, "random": random_couplings}[assignments]
        parts = parts._replace(routing=fixed(couplings(config.n_primary, config.n_classes)))
    if transform == "shared":
        parts = parts._replace(routing=shared(parts.routing))
    if activation == "relu":
        parts = parts._replace(primary=RELU, digit=IDENTITY)
    if loss == "cross-entropy":
        parts = parts._replace(loss=base.softmax_cross_entropy)
    return parts


def make_model(config: Network, transform: str = "own", **names: str) -> Model:
    """A CapsNet of these parts, see ``make_parts``."""
    model = base.capsnet_model(config, make_parts(config, transform=transform, **names))

    def init_params(rng: np.random.Generator) -> Params:
        params = base.capsnet_init(rng, config)
        return params | {"routing.w": params["routing.w"][:1].copy()} if transform == "shared" else params

    return model._replace(init_params=init_params)


# ----------------------------------------------------------------------------------------------------------------------
# Couplings after the training
# ----------------------------------------------------------------------------------------------------------------------


def routing_study(config: Config, params: Params, batch: Batch, workers: Workers) -> dict[str, float]:
    """The trained capsules with other couplings than they were trained with, as in I. Paik et al., "Capsule networks
    need an improved routing algorithm", ACML 2019.

    These are the couplings of 1 to 5 iterations (after one they are even), and random ones. For each:
    ``set_accuracy``; "changed", the fraction of images that get another pair of digits than with the couplings of the
    training; and "entropy", that of a primary capsule's last couplings over its maximum log J, mean over capsules and
    images.
    """
    drawn = random_couplings(config.n_primary, config.n_classes)

    def answers_and_entropy(routing: Pair, n_iters: int) -> tuple[Array, float]:
        def forward(u: Array, w: Array, _: int, squash: Pair) -> tuple[Array, Any]:
            return routing[0](u, w, n_iters, squash)

        def work(start: int) -> tuple[Array, Array]:
            images = batch.part(start, start + base.EVALUATION_BATCH).images
            lengths, cache = base.capsnet_forward(params, images, config, parts._replace(routing=(forward, routing[1])))
            c = cache.routing.c[-1] if isinstance(cache.routing, base.RoutingCache) else drawn[None]  # (B, I, J)
            entropy = -(c * np.log(np.maximum(c, np.finfo(c.dtype).tiny))).sum(axis=2).mean(axis=1)  # (B,)
            answers = np.sort(base.top_labels(lengths, batch.labels.shape[1]), axis=1)
            return answers, np.broadcast_to(entropy / math.log(c.shape[2]), len(images))

        starts = range(0, len(batch.labels), base.EVALUATION_BATCH)
        answers, entropies = zip(*workers.map(work, starts), strict=True)
        return np.concatenate(answers), float(np.concatenate(entropies).mean())

    parts = base.parts_of(config)
    plain = base.PLAIN.routing
    trained, _ = answers_and_entropy(plain, config.routing_iters)
    settings = {f"iters_{n}": (plain, n) for n in range(1, 6)} | {"random": (fixed(drawn), 1)}
    found = {}
    for name, (routing, n_iters) in settings.items():
        answers, entropy = answers_and_entropy(routing, n_iters)
        found[f"{name}_accuracy"] = float((answers == np.sort(batch.labels, axis=1)).all(axis=1).mean())
        found[f"{name}_changed"] = float((answers != trained).any(axis=1).mean())
        found[f"{name}_entropy"] = entropy
    return found
