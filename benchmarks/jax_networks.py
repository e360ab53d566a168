"""Training steps of the three capsule networks in JAX: forward, backward and Adam in one jitted function.

Losses take our parameters under our names and in our shapes, so that a test compares losses and gradients directly.
XLA has a thread for each core that the process may use; there is no other setting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import Array, numpy as jnp

import multimnist_capsnet as multimnist
import smallnorb_novel_viewpoint as smallnorb
from benchmarks import (
    conv_matrix_capsules as conv_benchmark, multimnist as multimnist_benchmark, smallnorb as smallnorb_benchmark,
)
from benchmarks.measure import Step
from fast import field_em
from more import conv_matrix_capsules as conv
from smallnorb_novel_viewpoint import init_state

Params = dict[str, Any]


def convolution(x: Array, w: Array, b: Array, stride: int, pad: int = 0) -> Array:
    """x (B, H, W, C), w (K, K, C, F), b (F,) -> (B, Ho, Wo, F)."""
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (stride, stride), [(pad, pad)] * 2, dimension_numbers=layout) + b


def cross_entropy(scores: Array, labels: Array) -> Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], axis=1).mean()


def smallnorb_loss(params: Params, x: Array, labels: Array, config: smallnorb.Config) -> Array:
    """x (B, 32, 32, C), labels (B,) -> mean cross-entropy."""
    B, I, J, P = len(x), smallnorb.N_PRIMARY, smallnorb.N_CLASSES, smallnorb.POSE_SIDE
    hidden = jax.nn.relu(convolution(x, params["conv1.w"], params["conv1.b"], 2, 2)).reshape(B, -1)
    primary = hidden @ params["primary.w"] + params["primary.b"]
    pose, a_in = primary[:, : I * P * P].reshape(B, I, P, P), jax.nn.sigmoid(primary[:, I * P * P :])
    votes = jnp.einsum("bipq,ijqr->bijpr", pose, params["class.w"]).reshape(B, I, J, P * P)
    r = jnp.full((B, I, J), 1 / J, votes.dtype)
    for t, inverse_temperature in enumerate(config.lambdas):
        ra = r * a_in[:, :, None]
        mass = ra.sum(1) + smallnorb.MASS_FLOOR  # (B, J)
        weight = (ra / mass[:, None])[..., None]
        mu = (weight * votes).sum(1)  # (B, J, D)
        square = (votes - mu[:, None]) ** 2
        sigma_sq = (weight * square).sum(1) + config.variance_floor
        log_det = jnp.log(sigma_sq).sum(2)
        z = inverse_temperature * (params["class.beta_a"] - (P * P * params["class.beta_v"] + 0.5 * log_det) * mass)
        if t < len(config.lambdas) - 1:
            log_p = -0.5 * (square / sigma_sq[:, None]).sum(3) - 0.5 * log_det[:, None]
            r = jax.nn.softmax(jax.nn.log_sigmoid(z)[:, None] + log_p, 2)
    scores = smallnorb.POSE_SCORE * (mu * mu).sum(2) + smallnorb.ACTIVATION_SCORE * (jax.nn.sigmoid(z) - 0.5)
    return cross_entropy(scores, labels)


def squash(s: Array) -> Array:
    q = (s * s).sum(-1, keepdims=True) + multimnist.SQUASH_EPS
    return s * jnp.sqrt(q) / (1 + q)


def multimnist_loss(params: Params, images: Array, labels: Array, sources: Array, config: multimnist.Config) -> Array:
    """images (B, H, W), labels (B, Y), sources (B, Y, H, W) -> margin loss plus the weighted error of the pictures."""
    B, P = len(images), multimnist.PRIMARY_SIZE
    h1 = jax.nn.relu(convolution(images[..., None], params["conv1.w"], params["conv1.b"], 1))
    h2 = convolution(h1, params["primary.w"], params["primary.b"], 2)  # (B, side, side, T * P)
    u = squash(h2.reshape(B, -1, P))  # (B, I, P)
    u_hat = jnp.einsum("bip,ipjd->bjid", u, params["routing.w"])
    b = jnp.zeros(u_hat.shape[:3], u_hat.dtype)
    for t in range(config.routing_iters):
        v = squash((jax.nn.softmax(b, 1)[..., None] * u_hat).sum(2))  # (B, J, D)
        if t < config.routing_iters - 1:
            b = b + (u_hat * v[:, :, None]).sum(3)
    lengths = jnp.sqrt((v * v).sum(2) + multimnist.SQUASH_EPS)
    chosen = jax.nn.one_hot(labels, lengths.shape[1], dtype=v.dtype)  # (B, Y, J)
    positive = chosen.sum(1)
    shortfall, excess = jax.nn.relu(multimnist.PRESENT - lengths), jax.nn.relu(lengths - multimnist.ABSENT)
    margin = positive * shortfall**2 + multimnist.ABSENT_WEIGHT * (1 - positive) * excess**2
    x = (chosen[..., None] * v[:, None]).reshape(B, labels.shape[1], -1)
    for k in (1, 2, 3):
        x = x @ params[f"decoder{k}.w"] + params[f"decoder{k}.b"]
        x = jax.nn.relu(x) if k < 3 else jax.nn.sigmoid(x)
    return (margin.sum() + config.recon_weight * ((x - sources.reshape(x.shape)) ** 2).sum()) / B


def field_routing(
    pose: Array, a_in: Array, params: Params, name: str, config: conv.Config, k: int, stride: int, offset: Any = None
) -> tuple[Array, Array]:
    """As ``conv_matrix_capsules.field_routing_forward``. pose (B, H, W, I, P, P), a_in (B, H, W, I)
    -> (B, Ho, Wo, J, P, P), (B, Ho, Wo, J)."""
    B, H, W, I, P, _ = pose.shape
    w = params[f"{name}.w"]
    J, D, fields = w.shape[-3], P * P, field_em.receptive_fields(H, W, k, stride)
    L, child = fields.position.size // k**2, fields.position.ravel()  # of each entry (position, kernel place)
    poses = pose.reshape(B, H * W, I, P, P)[:, child].reshape(B, L, k * k, I, P, P)
    a = a_in.reshape(B, H * W, I)[:, child].reshape(B, L, k * k * I, 1)
    if offset is None:
        votes = jnp.einsum("blkixy,kijyz->blkijxz", poses, w.reshape(k * k, I, J, P, P))
    else:
        votes = jnp.einsum("blkixy,ijyz->blkijxz", poses, w) + offset.reshape(k * k, 1, 1, P, P)
    votes = votes.reshape(B, L, k * k * I, J, D)
    first = (1 / (J * fields.n_fields)).reshape(L, k * k, 1, 1)
    r = jnp.broadcast_to(first.astype(votes.dtype), (B, L, k * k, I, J)).reshape(B, L, -1, J)
    mass_unit = fields.n_covered * I / (L * J)
    for t in range(config.em_iters):
        ra = r * a
        mass = ra.sum(2) + smallnorb.MASS_FLOOR  # (B, L, J)
        weight = ra / mass[:, :, None]
        mu = jnp.einsum("blcj,blcjd->bljd", weight, votes)
        square = (votes - mu[:, :, None]) ** 2
        sigma_sq = jnp.einsum("blcj,blcjd->bljd", weight, square) + config.variance_floor
        log_det = jnp.log(sigma_sq).sum(3)
        cost = (D * params[f"{name}.beta_v"] + 0.5 * log_det) * mass / mass_unit
        z = params[f"{name}.beta_a"] - cost
        if t < config.em_iters - 1:
            log_p = -0.5 * jnp.einsum("blcjd,bljd->blcj", square, 1 / sigma_sq) - 0.5 * log_det[:, :, None]
            log_r = (jax.nn.log_sigmoid(z)[:, :, None] + log_p).reshape(B, L * k * k, I, J)
            # a child's parents are all types at all positions that see it
            highest = jnp.full((B, H * W, I), -jnp.inf, log_r.dtype).at[:, child].max(log_r.max(3))
            e = jnp.exp(log_r - jax.lax.stop_gradient(highest)[:, child, :, None])
            total = jnp.zeros((B, H * W, I), e.dtype).at[:, child].add(e.sum(3))
            r = (e / total[:, child, :, None]).reshape(B, L, -1, J)
    return mu.reshape(B, *fields.out, J, P, P), jax.nn.sigmoid(z).reshape(B, *fields.out, J)


def matrix_capsules_loss(params: Params, x: Array, labels: Array, config: conv.Config) -> Array:
    """x (B, H, W, C), labels (B,) -> mean cross-entropy."""
    I, P = config.sizes[1], conv.POSE_SIDE
    hidden = jax.nn.relu(convolution(x, params["conv1.w"], params["conv1.b"], 2, 2))
    primary = convolution(hidden, params["primary.w"], params["primary.b"], 1)
    pose = primary[..., : I * P * P].reshape(*primary.shape[:3], I, P, P)
    a = jax.nn.sigmoid(primary[..., I * P * P :])
    for name, stride in conv.CAPS_STRIDES.items():
        pose, a = field_routing(pose, a, params, name, config, conv.CAPS_KERNEL, stride)
    offset = conv.coordinates(config.image_size, config.dtype)
    mu, a = field_routing(pose, a, params, "class", config, len(offset), 1, offset)
    scores = smallnorb.POSE_SCORE * (mu * mu).sum((4, 5)) + smallnorb.ACTIVATION_SCORE * (a - 0.5)  # (B, 1, 1, J)
    return cross_entropy(scores[:, 0, 0], labels)


NETWORKS: dict[str, tuple[Any, Callable[..., Array]]] = {
    "smallnorb": (smallnorb_benchmark, smallnorb_loss),
    "multimnist": (multimnist_benchmark, multimnist_loss),
    "matrix_capsules": (conv_benchmark, matrix_capsules_loss),
}


def jax_step(name: str, batch_size: int = 32) -> Step:
    """A step of Adam on one of the networks; it returns when the new parameters are there."""
    module, loss = NETWORKS[name]
    config, model, data = module.problem(batch_size)
    params = init_state(model, config).params

    def adam(p: Array, g: Array, m: Array, v: Array, t: Array) -> tuple[Array, Array, Array]:
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        return p - 1e-6 * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8), m, v

    def update(state: list[Params], t: Array, *data: Array) -> list[Params]:
        grads = jax.grad(functools.partial(loss, config=config))(state[0], *data)
        new = {key: adam(p, grads[key], state[1][key], state[2][key], t) for key, p in state[0].items()}
        return [{key: new[key][k] for key in new} for k in range(3)]

    jitted = jax.jit(update, donate_argnums=0)
    state = [jax.tree.map(jnp.array, params), *(jax.tree.map(jnp.zeros_like, params) for _ in range(2))]
    fixed, n_steps = jax.tree.map(jnp.asarray, tuple(data)), 0

    def step() -> None:
        nonlocal state, n_steps
        n_steps += 1
        state = jax.block_until_ready(jitted(state, jnp.float32(n_steps), *fixed))

    return step
