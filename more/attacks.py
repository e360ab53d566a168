"""Attacks on any network that gives scores and gradients: in one step, in many, and without a gradient, in numpy.

What an attack finds is a bound: another attacker may do better. So several are run, with 20 to 160 steps, until twice
as many mislead hardly an image more, and an image counts as misled if one of them misleads the network.

    fgsm        one step of epsilon along the sign of the gradient, the fast gradient sign method
                (I. Goodfellow, J. Shlens, C. Szegedy, ICLR 2015, section 4)
    iterated    many steps with momentum, from the image and from random starts; their size is halved where the loss
                rises no longer (the idea of F. Croce, M. Hein, ICML 2020, arXiv 2003.01690, section 3)
    targeted    the same towards each wrong class by itself (as in F. Croce, M. Hein, ICML 2020, section 6)
    along       the same along the gradients of another network: one with other weights, or the same one without its
    others      routing, which is the vote attack (J. Gu, B. Wu, V. Tresp, ICLR 2021, arXiv 2102.10055)
    squares     random squares at the edges of the box, kept where they help, without a gradient
                (the idea of M. Andriushchenko, F. Croce, N. Flammarion, M. Hein, ECCV 2020, arXiv 1912.00049)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# Dimension letters
#   N  images     J  classes     H, W  rows and columns of an image     C  channels

Array = np.ndarray
Bounds = tuple[float, float]  # least and greatest value of a pixel
Loss = Callable[[Array, Array], tuple[Array, Array]]  # scores (N, J), labels (N,) -> losses (N,), dscores (N, J)
MARGIN = "_margin"
VOTE = "vote"  # of the other networks, the same one without its routing


def margin_to(target: int) -> Loss:
    """The score of one class minus that of the right one; 0 where it is the right one."""

    def loss(scores: Array, labels: Array) -> tuple[Array, Array]:
        rows, dscores = np.arange(len(labels)), np.zeros_like(scores)
        dscores[rows, target] += 1
        dscores[rows, labels] -= 1
        return scores[:, target] - scores[rows, labels], dscores

    return loss


class Attacked(NamedTuple):
    """What an attacker knows of a network."""

    scores: Callable[[Array], Array]  # images (N, H, W, C) -> (N, J); the greatest is the answer
    gradient: Callable[[Array, Array, Loss], tuple[Array, Array, Array]]  # images, labels, loss -> scores, losses, dx
    losses: Mapping[str, Loss]  # those to raise, by suffix of an attack's name: "" the training's, MARGIN
    towards: Callable[[int], Loss] = margin_to  # the margin of a class


def network_of(
    forward: Callable[[Array], tuple[Array, Any]], backward: Callable[[Array, Any], Array], losses: Mapping[str, Loss],
    size: int, run: Callable[..., Any] = map, towards: Callable[[int], Loss] = margin_to,
) -> Attacked:
    """From a pair: forward(x) -> scores, cache; backward(dscores, cache) -> dx. It is given ``size`` images at a time,
    by ``run``, which may be the map of a pool of threads."""

    def scores(x: Array) -> Array:
        return np.concatenate(list(run(lambda k: forward(x[k : k + size])[0], range(0, len(x), size))))

    def gradient(x: Array, labels: Array, loss: Loss) -> tuple[Array, Array, Array]:
        def part(k: int) -> tuple[Array, Array, Array]:
            scores, cache = forward(x[k : k + size])
            values, dscores = loss(scores, labels[k : k + size])
            return scores, values, backward(dscores, cache)

        found, values, dx = (np.concatenate(each) for each in zip(*run(part, range(0, len(x), size)), strict=True))
        return found, values, dx

    return Attacked(scores, gradient, losses, towards)


def misled(network: Attacked, images: Array, labels: Array) -> Array:
    """Which images are classified wrongly, (N,)."""
    return network.scores(images).argmax(axis=1) != labels


# --- Losses that an attacker raises -----------------------------------------------------------------------------------


def margin_loss(scores: Array, labels: Array) -> tuple[Array, Array]:
    """The greatest score of a wrong class minus that of the right one: above 0 where the image is misled."""
    rows, wrong = np.arange(len(labels)), scores.copy()
    wrong[rows, labels] = -np.inf
    best = wrong.argmax(axis=1)
    dscores = np.zeros_like(scores)
    dscores[rows, best], dscores[rows, labels] = 1, -1
    return scores[rows, best] - scores[rows, labels], dscores


def by_image(mean_loss: Callable[[Array, Array], tuple[float, Array]]) -> Loss:
    """The losses of single images, from a function that gives their mean and its gradient.

    In float64: in float32 the softmax of a class that leads by more than 16.6 logits is 1, and its gradient 0.
    """

    def loss(scores: Array, labels: Array) -> tuple[Array, Array]:
        found = [mean_loss(scores[k : k + 1].astype(float), labels[k : k + 1]) for k in range(len(labels))]
        values, dscores = zip(*found, strict=True)
        return np.array(values), np.concatenate(dscores).astype(scores.dtype)

    return loss


LEAST_ODDS = 1e-30  # its inverse is a float32


def of_log_odds(loss: Loss) -> Loss:
    """A loss of log(a / (1 - a)), for scores a between 0 and 1.

    A spread or margin loss and its gradient are zero for an image that is right by more than the margin, and any
    gradient through a saturated sigmoid is almost zero. An attack along such gradients fails although the network may
    not be robust. The logarithm inverts the sigmoid.
    """

    def odds_loss(a: Array, labels: Array) -> tuple[Array, Array]:
        p = np.clip(a.astype(float), LEAST_ODDS, 1 - max(1e-15, float(np.finfo(a.dtype).epsneg)))
        values, dodds = loss(np.log(p) - np.log1p(-p), labels)
        return values, (dodds / (p * (1 - p))).astype(a.dtype)

    return odds_loss


# --- One attack -------------------------------------------------------------------------------------------------------

MOMENTUM = 0.25  # share of the last step in the next one
LEAST_RISES = 0.75  # share of steps that raise the loss, below which they are halved


def box(images: Array, epsilon: float, bounds: Bounds) -> tuple[Array, Array]:
    """The least and the greatest values of all pixels, (N, H, W, C) each."""
    return np.maximum(images - epsilon, bounds[0]), np.minimum(images + epsilon, bounds[1])


def checks(n_steps: int) -> set[int]:
    """The steps after which their size may be halved: first after 22 % of them, then ever sooner, down to 6 %."""
    at, span, found = 0.22, 0.22, set()
    while at < 1:
        found.add(math.ceil(round(at * n_steps, 6)))
        span = max(span - 0.03, 0.06)
        at += span
    return found


def iterated(
    network: Attacked, images: Array, labels: Array, loss: Loss, epsilon: float, n_steps: int, bounds: Bounds,
    start: Array | None = None, stop: bool = True,
) -> Array:
    """Those images (N, H, W, C) of the greatest loss that ``n_steps`` steps reach from ``start``, or from the images.

    One step is FGSM. With ``stop`` an image is left as it is as soon as it misleads the network.
    """
    low, high = box(images, epsilon, bounds)
    x = images if start is None else np.clip(start, low, high)
    scores, value, dx = network.gradient(x, labels, loss)
    best, best_value, best_dx, last = x.copy(), value.copy(), dx.copy(), x
    running = ~(stop & (scores.argmax(axis=1) != labels))
    size = np.full((len(x), *[1] * (x.ndim - 1)), 2 * epsilon, x.dtype)
    size_then, best_then, rises, checked = size, best_value.copy(), np.zeros(len(x), int), 0
    for step in range(1, n_steps + 1):
        ahead = np.clip(x + size * np.sign(dx), low, high)
        if step > 1:
            ahead = np.clip(x + (1 - MOMENTUM) * (ahead - x) + MOMENTUM * (x - last), low, high)
        last, x = x, ahead
        on = np.flatnonzero(running)
        if not len(on):
            break
        scores, now, dx[on] = network.gradient(x[on], labels[on], loss)
        stopped = stop & (scores.argmax(axis=1) != labels[on])
        rises[on] += now > value[on]
        value[on], running[on] = now, ~stopped
        better = on[stopped | (now > best_value[on])]
        best[better], best_value[better], best_dx[better] = x[better], value[better], dx[better]
        if step in checks(n_steps):
            unmoved = (size == size_then).ravel() & (best_value == best_then)
            halved = (rises < LEAST_RISES * (step - checked)) | unmoved  # these go on from the best that they found
            size_then, best_then, rises, checked = size.copy(), best_value.copy(), 0 * rises, step
            size[halved] /= 2
            x[halved], dx[halved], value[halved] = best[halved], best_dx[halved], best_value[halved]
            last = np.where(halved.reshape(size.shape), x, last)
    return best


FIRST_SHARE = 0.8  # of an image that the first squares cover
HALVINGS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)  # shares of the queries after which it is halved


def squares(
    network: Attacked, images: Array, labels: Array, epsilon: float, n_queries: int, bounds: Bounds,
    rng: np.random.Generator,
) -> Array:
    """Images (N, H, W, C) of as great a margin as a random search finds: it begins with stripes, and brings one random
    square after the other to the least or the greatest values of its pixels."""
    (low, high), (N, H, W, C), loss = box(images, epsilon, bounds), images.shape, network.losses[MARGIN]
    x = np.where(rng.random((N, 1, W, C)) < 0.5, low, high)
    value = loss(network.scores(x), labels)[0]
    for query in range(n_queries):
        on = np.flatnonzero(value <= 0)
        if not len(on):
            break
        share = FIRST_SHARE / 2 ** sum(query >= at * n_queries for at in HALVINGS)
        side = max(1, round(math.sqrt(share * H * W)))
        row, column = (rng.integers(0, n - min(side, n) + 1, (N, 1, 1, 1)) for n in (H, W))
        i, j = np.arange(H)[:, None, None], np.arange(W)[:, None]
        inside = (row <= i) & (i < row + side) & (column <= j) & (j < column + side)
        tried = np.where(inside, np.where(rng.random((N, 1, 1, C)) < 0.5, low, high), x)[on]
        found = loss(network.scores(tried), labels[on])[0]
        better = found > value[on]
        x[on[better]], value[on[better]] = tried[better], found[better]
    return x


# --- All of them ------------------------------------------------------------------------------------------------------


class Effort(NamedTuple):
    """How long is attacked."""

    first_steps: int = 20  # of iterated attacks, then twice as many from two starts, four times as many from four ...
    most_steps: int = 160
    tolerance: float = 0.01  # share of all images: a round that misleads fewer is the last
    queries: int = 200  # of the search


DEFAULT = Effort()


class Found(NamedTuple):
    clean: Array  # (N,) which images are classified correctly without an attack
    right: dict[str, Array]  # by attack: which images (epsilons, N) are so under it
    convergence: list[dict[int, float]]  # by epsilon: the accuracy under all attacks so far, by the number of steps


def attack(
    network: Attacked, others: Mapping[str, Attacked], images: Array, labels: Array, epsilons: Sequence[float],
    bounds: Bounds, rng: np.random.Generator, effort: Effort = DEFAULT,
) -> Found:
    """All attacks with rising ``epsilons``. An attack that misled the network with a smaller one is not repeated on
    that image; FGSM is, as its one longer step may pass over what a shorter one reaches.

    First each attack alone, the iterated ones from the image, along every loss, towards each class ("targeted") and
    along the ``others``. Then all losses and the VOTE, from random starts, on the images that no attack has misled, in
    rounds of twice as many steps and starts each, until a round misleads less than ``tolerance`` of all images:
    "gradients". At last the search: "worst_case".
    """
    scores = network.scores(images)
    clean = scores.argmax(axis=1) == labels
    own = [kind + suffix for kind in ("fgsm", "iterated") for suffix in network.losses]
    now = {name: clean.copy() for name in (*own, "targeted", *others, "gradients", "worst_case")}
    ways = [(network, loss) for loss in network.losses.values()]
    ways += [(others[name], others[name].losses[MARGIN]) for name in (VOTE,) if name in others]
    found, table = list[dict[str, Array]](), list[dict[int, float]]()

    def ascend(right: Array, along: Attacked, loss: Loss, epsilon: float, n_steps: int, starts: bool = False) -> None:
        if len(on := np.flatnonzero(right)):
            x, y = images[on], labels[on]
            start = rng.uniform(*box(x, epsilon, bounds)).astype(x.dtype) if starts else None
            moved = iterated(along, x, y, loss, epsilon, n_steps, bounds, start, stop=along is network)
            right[on] = ~misled(network, moved, y)

    for epsilon in epsilons:
        n_steps = effort.first_steps
        for suffix, loss in network.losses.items():
            now["fgsm" + suffix] = clean.copy()
            ascend(now["fgsm" + suffix], network, loss, epsilon, 1)
            ascend(now["iterated" + suffix], network, loss, epsilon, n_steps)
        for target in range(scores.shape[1]):
            ascend(now["targeted"], network, network.towards(target), epsilon, n_steps)
        for name, other in others.items():
            ascend(now[name], other, other.losses[MARGIN], epsilon, n_steps)
        left = now["gradients"] = np.all([right for name, right in now.items() if name != "worst_case"], axis=0)
        rounds, found_more = {n_steps: float(left.mean())}, True
        while found_more and 2 * n_steps <= effort.most_steps:
            n_steps, n_before = 2 * n_steps, left.sum()
            for along, loss in ways * (n_steps // effort.first_steps):
                ascend(left, along, loss, epsilon, n_steps, starts=True)
            found_more = n_before - left.sum() >= effort.tolerance * len(left)
            rounds[n_steps] = float(left.mean())
        worst = now["worst_case"] = left & now["worst_case"]
        if len(on := np.flatnonzero(worst)):
            moved = squares(network, images[on], labels[on], epsilon, effort.queries, bounds, rng)
            worst[on] = ~misled(network, moved, labels[on])
        table.append(rounds)
        found.append({name: right.copy() for name, right in now.items()})
    return Found(clean, {name: np.array([right[name] for right in found]) for name in now}, table)
