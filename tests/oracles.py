"""What the scripts compute, stated once more as plainly as can be, in whole arrays that autograd differentiates. One
example at a time: docs/capsule_reference.md and test_docs.py."""

from __future__ import annotations

import itertools
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval

import multimnist_capsnet as multimnist
import smallnorb_novel_viewpoint as smallnorb
from helpers import Array

Constants = tuple[Any, Any, Any]  # r, mass and mu of the last M-step


def plain_conv(x: Any, w: Any, b: Any, stride: int, pad: int = 0) -> Any:
    k = w.shape[0]
    x = anp.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)), "constant")
    h_out, w_out = (x.shape[1] - k) // stride + 1, (x.shape[2] - k) // stride + 1
    out = b
    for i, j in itertools.product(range(k), range(k)):
        window = x[:, i : i + stride * (h_out - 1) + 1 : stride, j : j + stride * (w_out - 1) + 1 : stride]
        out = out + anp.einsum("nhwc,cf->nhwf", window, w[i, j])
    return out


def plain_em_routing(
    votes: Any, a_in: Any, beta_a: Any, beta_v: Any, lambdas: list[float], variance_floor: float,
    child: Array | None = None, mass_unit: float = 1.0, constants: Constants | None = None,
) -> tuple[Any, Any, Constants]:
    """votes (N, F, M, J, D) of the M children of each of F fields, a_in (N, F, M) -> mu (N, F, J, D), a (N, F, J), and
    (r, mass, mu) of the last M-step. child (F, M) has their numbers: a child in several fields has parents in all.

    With ``constants`` (such a triple) the last M-step alone is computed, with these three held constant.
    """
    n, n_fields, m, n_out, _ = votes.shape
    child = (np.arange(n_fields * m) if child is None else child).ravel()
    sees = np.eye(child.max() + 1)[child]  # 1 where an entry of a field is that child
    first = 1 / (n_out * sees.sum(axis=0)[child]).reshape(n_fields, m, 1)
    r: Any = np.broadcast_to(first, (n, n_fields, m, n_out))
    for t, lambda_ in enumerate(lambdas):
        if constants is not None:
            lambda_, r = lambdas[-1], constants[0]
        ra = r * a_in[..., None]
        mass = anp.sum(ra, axis=2) + smallnorb.MASS_FLOOR if constants is None else constants[1]
        weight = (ra / mass[:, :, None])[..., None]
        mu = anp.sum(weight * votes, axis=2)
        centre = (mu if constants is None else constants[2])[:, :, None]
        sigma_sq = anp.sum(weight * (votes - centre) ** 2, axis=2) + variance_floor
        cost = anp.sum(beta_v[:, None] + 0.5 * anp.log(sigma_sq), axis=3) * mass / mass_unit
        a = 1 / (1 + anp.exp(-lambda_ * (beta_a - cost)))
        if constants is not None or t == len(lambdas) - 1:
            break
        log_p = -0.5 * anp.sum((votes - centre) ** 2 / sigma_sq[:, :, None] + anp.log(sigma_sq)[:, :, None], axis=4)
        joint = anp.exp(anp.log(a)[:, :, None] + log_p)  # small enough here without a shift
        of_child = anp.dot(anp.reshape(anp.sum(joint, axis=3), (n, -1)), sees)
        r = joint / anp.reshape(of_child[:, child], (n, n_fields, m, 1))
    return mu, a, (r, mass, mu)


def plain_field_routing(
    pose: Any, a_in: Any, w: Any, beta_a: Any, beta_v: Any, lambdas: list[float], variance_floor: float, k: int,
    stride: int, offset: Array, constants: Constants | None = None, bias: Any = 0.0,
) -> tuple[Any, Any, Constants]:
    """``bias`` (J, D): of the votes for the parents of each type."""
    n, height, width, n_in, p, _ = pose.shape
    h_out, w_out, n_out = (height - k) // stride + 1, (width - k) // stride + 1, w.shape[3]
    number = np.arange(height * width * n_in).reshape(height, width, n_in)
    corners = itertools.product(stride * np.arange(h_out), stride * np.arange(w_out))
    child = np.stack([number[y : y + k, x : x + k].ravel() for y, x in corners])  # (F, M)
    poses, a = anp.reshape(pose, (n, -1, p, p))[:, child], anp.reshape(a_in, (n, -1))[:, child]
    kernel = anp.reshape(w * np.ones((k, k, 1, 1, 1, 1)), (k * k * n_in, n_out, p, p))
    votes = anp.einsum("nfmxy,mjyz->nfmjxz", poses, kernel) + np.repeat(offset.reshape(-1, 1, p, p), n_in, axis=0)
    votes = anp.reshape(votes, (n, *child.shape, n_out, p * p)) + bias
    mass_unit = len(np.unique(child)) / (len(child) * n_out)
    mu, a, found = plain_em_routing(votes, a, beta_a, beta_v, lambdas, variance_floor, child, mass_unit, constants)
    return anp.reshape(mu, (n, h_out, w_out, n_out, p, p)), anp.reshape(a, (n, h_out, w_out, n_out)), found


def plain_scores(mu: Any, a: Any, loss: str) -> Any:
    return a if loss == "spread" else anp.sum(mu**2, axis=2) / 16 + 4 * (a - 0.5)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + anp.exp(-x))


def plain_capsules(params: Any, x: Any, config: Any, constants: Any = None) -> tuple[Any, Any]:
    """Class scores of smallnorb_novel_viewpoint's capsules, and what ``constants`` takes."""
    hidden = anp.maximum(plain_conv(x, params["conv1.w"], params["conv1.b"], 2, 2), 0)
    primary = anp.dot(anp.reshape(hidden, (len(x), -1)), params["primary.w"]) + params["primary.b"]
    n_pose = smallnorb.N_PRIMARY * smallnorb.POSE_SIDE**2
    pose = anp.reshape(primary[:, :n_pose], (len(x), smallnorb.N_PRIMARY, smallnorb.POSE_SIDE, smallnorb.POSE_SIDE))
    votes = anp.einsum("nipq,ijqr->nijpr", pose, params["class.w"])
    votes = anp.reshape(votes, (len(x), 1, smallnorb.N_PRIMARY, smallnorb.N_CLASSES, smallnorb.POSE_SIDE**2))
    a_in = anp.reshape(sigmoid(primary[:, n_pose:]), (len(x), 1, smallnorb.N_PRIMARY))
    betas = params["class.beta_a"], params["class.beta_v"]
    mu, a, found = plain_em_routing(votes, a_in, *betas, config.lambdas, config.variance_floor, constants=constants)
    return plain_scores(mu[:, 0], a[:, 0], config.loss), found


def plain_cnn(params: Any, x: Any, convs: Any, dropout: Any = 1.0) -> Any:
    """Scores. ``convs``: stride, padding and perhaps the pooling (anp.max or anp.mean) of each convolution."""
    for k, (stride, pad, *pool) in enumerate(convs, 1):
        x = anp.maximum(plain_conv(x, params[f"conv{k}.w"], params[f"conv{k}.b"], stride, pad), 0)
        for of in pool:
            H, W = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
            x = of(anp.stack([x[:, i:H:2, j:W:2] for i, j in itertools.product(range(2), repeat=2)]), axis=0)
    x = anp.reshape(x, (len(x), -1))
    for name in sorted(key[:-2] for key in params if key.startswith("hidden") and key.endswith(".w")):
        x = anp.maximum(anp.dot(x, params[f"{name}.w"]) + params[f"{name}.b"], 0)
    return anp.dot(x * dropout, params["out.w"]) + params["out.b"]


def plain_loss(scores: Any, labels: Array, loss: str, n: int, margin: float = 0.375) -> Any:
    """Of scores (B, J) and labels (B, L): the sum over examples and labels, over n. "spread" after a quarter
    of a training; "cross-entropy" of a softmax; "sigmoids": of a sigmoid for each class."""
    total = 0.0
    for b, j in np.ndindex(*scores.shape):
        x, here = scores[b, j], j in labels[b]
        if loss == "sigmoids":
            total = total - anp.log(sigmoid(x if here else -x))
        elif loss == "spread":
            total = total + (0 if here else anp.maximum(0, margin - (scores[b, labels[b, 0]] - x)) ** 2)
        elif loss == "margin":
            total = total + (anp.maximum(0, 0.9 - x) ** 2 if here else 0.5 * anp.maximum(0, x - 0.1) ** 2)
        elif here:
            total = total - anp.log(anp.exp(x) / anp.sum(anp.exp(scores[b])))
    return total / n


def plain_conv_capsules(params: Any, x: Any, config: Any, constants: Any = None) -> tuple[Any, Any]:
    """Class scores of conv_matrix_capsules' capsules, and what ``constants`` takes."""
    hidden = anp.maximum(plain_conv(x, params["conv1.w"], params["conv1.b"], 2, 2), 0)
    primary = plain_conv(hidden, params["primary.w"], params["primary.b"], 1)
    n_pose = config.sizes[1] * 16
    pose = anp.reshape(primary[..., :n_pose], (*primary.shape[:3], config.sizes[1], 4, 4))
    a, found = sigmoid(primary[..., n_pose:]), []
    for t, (layer, stride) in enumerate((("convcaps1", 2), ("convcaps2", 1), ("class", 1))):
        w = params[f"{layer}.w"]
        offset = np.zeros((3, 3, 4, 4))
        if layer == "class":
            side = pose.shape[1]
            w = w[None, None]
            position = (6.5 + 4 * np.arange(side)) / config.image_size  # the middles of 13 pixels, 4 apart
            offset = np.zeros((side, side, 4, 4))
            offset[:, :, 0, 3], offset[:, :, 1, 3] = position[:, None], position[None, :]
        betas = params[f"{layer}.beta_a"], params[f"{layer}.beta_v"]
        pose, a, of_layer = plain_field_routing(
            pose, a, w, *betas, config.lambdas, config.variance_floor, len(offset), stride, offset,
            None if constants is None else constants[t], params.get(f"{layer}.bias", 0.0),
        )
        found.append(of_layer)
    return plain_scores(anp.reshape(pose, (len(x), -1, 16)), anp.reshape(a, (len(x), -1)), config.loss), found


def plain_capsnet(
    p: Any, batch: multimnist.Batch, config: Any, names: dict[str, str], n: int, couplings: Any = None
) -> tuple[Any, dict[str, Any]]:
    """The loss of multimnist_capsnet's CapsNet with the parts of what_routing_does, with all votes stored, and what is
    reported. ``couplings`` (I, J): those of every image, without routing."""

    def squash(s: Any, divisor: float) -> Any:
        if names.get("activation") == "published":
            s = s / divisor + 0.1
        q = anp.sum(s * s, axis=2, keepdims=True) + multimnist.SQUASH_EPS
        return s * anp.sqrt(q) / (1 + q)

    B, L = batch.labels.shape
    h = anp.maximum(plain_conv(batch.images[..., None], p["conv1.w"], p["conv1.b"], 1), 0)
    u = anp.reshape(plain_conv(h, p["primary.w"], p["primary.b"], 2), (B, -1, multimnist.PRIMARY_SIZE))  # (B, I, P)
    is_squashed = names.get("activation") != "relu"
    u = squash(u, 32) if is_squashed else anp.maximum(u, 0)
    w = p["routing.w"] * np.ones((u.shape[1], 1, 1, 1)) if names.get("transform") == "shared" else p["routing.w"]
    votes = anp.einsum("bip,ipjd->bijd", u, w)
    logits = np.zeros((B, u.shape[1], 10)) if couplings is None else np.log(couplings) + np.zeros((B, 1, 1))
    n_iters = config.routing_iters if couplings is None else 1
    for t in range(n_iters):
        e = anp.exp(logits)
        c = e / anp.sum(e, axis=2, keepdims=True)
        if config.routing_grad == "stop":
            c = getval(c)  # a constant
        v = anp.einsum("bij,bijd->bjd", c, votes)
        v = squash(v, 1) if is_squashed else v
        if t < n_iters - 1:
            logits = logits + anp.einsum("bijd,bjd->bij", votes, v)
    lengths = anp.sqrt(anp.sum(v * v, axis=2) + multimnist.SQUASH_EPS)
    loss, error = plain_loss(lengths, batch.labels, names.get("loss", "margin"), n), 0.0
    for b, digit in np.ndindex(B, L):
        j = batch.labels[b, digit]
        x = v[b, j] @ p["decoder1.w"][j * multimnist.CAPSULE_SIZE : (j + 1) * multimnist.CAPSULE_SIZE] + p["decoder1.b"]
        x = anp.maximum(x, 0) @ p["decoder2.w"] + p["decoder2.b"]
        x = sigmoid(anp.maximum(x, 0) @ p["decoder3.w"] + p["decoder3.b"])
        error = error + anp.sum((x - batch.sources[b, digit].ravel()) ** 2)
    total = loss + config.recon_weight * error / n
    reported = {"train_loss": total, "train_class_loss": loss, "train_recon_loss": error / n / L}
    return total, reported | {"scores": lengths, "error": error}
