"""Steps of the MultiMNIST capsule network: numpy, its bare matrix products, and the same network in PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import threadpoolctl

import multimnist_capsnet as experiment
from benchmarks.measure import Step

Array = np.ndarray


def _batch(config: experiment.Config) -> experiment.Batch:
    rng = np.random.default_rng(0)
    side = config.image_size
    sources = rng.random((config.batch_size, 2, side, side), np.float32)
    labels = np.stack([rng.permutation(experiment.N_CLASSES)[:2] for _ in range(config.batch_size)])
    return experiment.Batch(sources.max(axis=1), labels, sources)


def config_of(batch_size: int = 32, conv_channels: int = 32, **changes: Any) -> experiment.Config:
    """From the default's to the paper's sizes by conv1's channels alone: types and decoder grow as they do there."""
    sizes = dict(experiment.PRESETS["paper" if conv_channels >= 256 else "small"])
    sizes |= {"conv_channels": conv_channels, "primary_types": conv_channels // (8 if conv_channels >= 256 else 4)}
    return experiment.Config(**{"batch_size": batch_size, **sizes, **changes})


def numpy_step(batch_size: int = 32, conv_channels: int = 32, threads: int = 2, routing_grad: str = "exact") -> Step:
    """One training step: forward, both reconstructions, losses, backward, Adam."""
    config = config_of(batch_size, conv_channels, routing_grad=routing_grad)
    model, batch = experiment.capsnet_model(config), _batch(config)
    state = experiment.init_state(model, config)
    crew = experiment.Crew(threads)
    crew.prepare(state)

    blas = threadpoolctl.ThreadpoolController()

    def step() -> None:
        with blas.limit(limits=1, user_api="blas"):
            _, grads = crew.gradients(model, state.params, batch)
            crew.update(state, grads, 1e-6)

    return step


def overlay_step(batch_size: int = 32) -> Step:
    """Drawing and rendering the composites of one batch."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (60_000, 28, 28), np.uint8)
    overlays = experiment.Overlays(images, rng.integers(0, 10, 60_000), config_of(batch_size))
    return lambda: overlays.render(overlays.draw(rng, batch_size))


def _direct_products(config: experiment.Config, normal: Callable[..., Array]) -> Step:
    K2C, n_out = experiment.KERNEL**2 * config.conv_channels, experiment.PRIMARY_SIZE * config.primary_types
    n = config.batch_size * config.primary_side**2
    cols, w, dout = normal(K2C, n), normal(n_out, K2C), normal(n_out, n)
    out, dw, dcols = np.empty_like(dout), np.empty_like(w), np.empty_like(cols)

    def step() -> None:
        np.matmul(w, cols, out=out)
        np.matmul(dout, cols.T, out=dw)
        np.matmul(w.T, dout, out=dcols)

    return step


def _spectral_products(config: experiment.Config, normal: Callable[..., Array]) -> Step:
    """Those of ``conv2d_forward`` and ``conv2d_backward``, transforms included."""
    k, side, B = -(-experiment.KERNEL // 2), config.primary_side, config.batch_size
    n_in, n_out = 4 * config.conv_channels, experiment.PRIMARY_SIZE * config.primary_types
    t = experiment.transforms(side, side, k, np.dtype(np.float32))
    U, R = side + k - 1, len(t.x_rows) // 2
    x, x_rows, x_f = normal(U, U * B * n_in), normal(R, 2 * U, B * n_in), normal(R, U, 2 * B, n_in)
    w, w_rows, w_f = normal(k, k * n_in * n_out), normal(R, 2 * k, n_in * n_out), normal(U, 2, n_in, n_out)
    w_f_t, dw_f = np.empty((U, 2, n_out, n_in), np.float32), np.empty_like(w_f)
    product, dx_terms, dx_f = normal(U, 2, 2 * B, n_out), normal(U, 2, 2 * B, n_in), normal(U, 2 * B, n_in)
    out_rows, out = normal(R, 2 * side, B * n_out), normal(side, side * B * n_out)
    transform = experiment.transform

    def step() -> None:
        transform(t.x_rows, x, x_rows)
        transform(t.w_rows, w, w_rows)
        transform(t.out_rows, out_rows, out)
        transform(t.out_rows.T, out, out_rows)
        transform(t.w_rows, w, w_rows)
        for r in range(R):
            out_columns, n = (t.out_columns, U) if 2 * r % U else (t.out_half, U // 2 + 1)
            transform(t.x_columns[: 2 * n], x_rows[r], x_f[r, :n])
            transform(t.w_columns[: 2 * n], w_rows[r], w_f[:n])
            np.matmul(x_f[r, :n, None], w_f[:n], out=product[:n])
            transform(out_columns, product[:n], out_rows[r])
        for r in range(R):
            out_columns, n = (t.out_columns, U) if 2 * r % U else (t.out_half, U // 2 + 1)
            transform(out_columns.T, out_rows[r], product[:n])
            transform(t.w_columns[: 2 * n], w_rows[r], w_f_t[:n])
            np.matmul(product[:n], w_f_t[:n], out=dx_terms[:n])
            transform(t.x_columns[: 2 * n].T, dx_f[:n], x_rows[r])
            np.matmul(x_f[r, :n].transpose(0, 2, 1)[:, None], product[:n], out=dw_f[:n])
            transform(t.w_columns[: 2 * n].T, dw_f[:n], w_rows[r])
        transform(t.w_rows.T, w_rows, w)
        transform(t.x_rows.T, x_rows, x)

    return step


def products_step(batch_size: int = 32, conv_channels: int = 32, threads: int = 2, direct: bool = False) -> Step:
    """The matrix products of the same step and nothing else, their operands ready.

    Those of ``image_conv2d_forward`` and ``image_conv2d_backward``; the primary capsules' convolution by its spectra,
    or, ``direct``, as one product each for output, weights and input; the decoder's nine; of the routing what
    ``routing_forward`` and ``routing_backward`` multiply: with w, and into its gradient. The threads share each product
    by the batch, as they do in the step.
    """
    config = config_of(batch_size // threads, conv_channels)
    B = config.batch_size
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32)

    K, H, C = experiment.KERNEL, config.image_size, config.conv_channels
    J, P, I, D = experiment.N_CLASSES, experiment.PRIMARY_SIZE, config.n_primary, experiment.CAPSULE_SIZE
    side = H - K + 1
    sizes = (J * D, *config.decoder, config.image_size**2)

    def share() -> Step:
        cols1, w1, out1, dw1 = (
            normal(H, K, side * B),
            normal(K * K, C),
            normal(side, side * B, C),
            normal(side, K, K, C),
        )
        row = cols1.strides[0]
        rows1 = np.lib.stride_tricks.as_strided(cols1, (side, K * K, side * B), (row, row // K, cols1.itemsize))
        blocks1 = rows1.reshape(side, K, K, -1)
        primary = (_direct_products if direct else _spectral_products)(config, normal)
        w, x, s, sums = normal(J, P, I, D), normal(P, I, B), normal(D, B), normal(P, D, B)
        s_t, dw = normal(B, D), normal(P, I, D)
        layers = [
            (normal(n, k), normal(n, 2 * B), normal(k, 2 * B), np.empty((n, k), np.float32))
            for n, k in itertools.pairwise(sizes)
        ]
        n_iters = config.routing_iters

        def step() -> None:
            np.matmul(rows1.transpose(0, 2, 1), w1, out=out1)
            np.matmul(blocks1, out1[:, None], out=dw1)
            primary()
            for j in range(J):
                for _ in range(2 * n_iters - 1):  # forward: every iteration's sum; backward: its transpose's
                    np.matmul(w[j].transpose(0, 2, 1), x, out=sums)
                    np.matmul(x, s_t, out=dw)
                for _ in range(3 * n_iters - 2):
                    np.matmul(w[j], s, out=x)
            for weight, before, after, dweight in layers:
                np.matmul(weight.T, before, out=after)
                np.matmul(before, after.T, out=dweight)
                np.matmul(weight, after, out=before)

        return step

    def run(step: Step) -> None:
        with np.errstate(all="ignore"):  # numbers grow as a product's result is the next one's operand
            step()

    steps = [share() for _ in range(threads)]
    pool, blas = ThreadPoolExecutor(threads), threadpoolctl.ThreadpoolController()

    def all_shares() -> None:
        with blas.limit(limits=1, user_api="blas"):
            list(pool.map(run, steps))

    return all_shares


def torch_step(
    batch_size: int = 32, conv_channels: int = 32, threads: int = 2, compiled: bool = False, fused: bool = False
) -> Step:
    """The same network, three routing iterations, autograd through all of them, PyTorch's Adam."""
    import torch
    from torch import nn
    from torch.nn import functional

    config = config_of(batch_size, conv_channels)
    n_types, n_primary, eps = config.primary_types, config.n_primary, experiment.SQUASH_EPS
    n_pixels = config.image_size**2

    def squash(s: torch.Tensor) -> torch.Tensor:
        q = (s * s).sum(-1, keepdim=True) + eps
        return s * (q.sqrt() / (1 + q))

    class CapsNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(1, config.conv_channels, 9)
            self.primary = nn.Conv2d(config.conv_channels, 8 * n_types, 9, stride=2)
            self.w = nn.Parameter(torch.randn(n_primary, 8, 160) * (8 / n_primary) ** 0.5)
            first, second = config.decoder
            hidden = [nn.Linear(160, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU()]
            self.decoder = nn.Sequential(*hidden, nn.Linear(second, n_pixels), nn.Sigmoid())

        def forward(
            self, x: torch.Tensor, positive: torch.Tensor, mask: torch.Tensor, target: torch.Tensor
        ) -> torch.Tensor:
            B = x.shape[0]
            h = self.primary(functional.relu(self.conv1(x)))
            u = squash(h.view(B, n_types, 8, -1).permute(0, 1, 3, 2).reshape(B, n_primary, 8))
            votes = torch.bmm(u.transpose(0, 1), self.w).view(n_primary, B, 10, 16)
            logits = torch.zeros(n_primary, B, 10, 1)
            for t in range(3):
                v = squash((torch.softmax(logits, 2) * votes).sum(0))
                if t < 2:
                    logits = logits + (votes * v).sum(-1, keepdim=True)
            lengths = ((v * v).sum(-1) + eps).sqrt()
            short, long = functional.relu(0.9 - lengths), functional.relu(lengths - 0.1)
            margin = positive * short**2 + 0.5 * (1 - positive) * long**2
            pictures = self.decoder((v[:, None] * mask).reshape(2 * B, 160))
            return (margin.sum() + config.recon_weight * ((pictures - target) ** 2).sum()) / B

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    batch = _batch(config)
    network = CapsNet()
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-6, fused=fused)
    x, target = torch.tensor(batch.images[:, None]), torch.tensor(batch.sources.reshape(2 * batch_size, n_pixels))
    positive = torch.tensor(experiment.indicator(batch.labels, np.dtype(np.float32)).T.copy())
    mask = functional.one_hot(torch.tensor(batch.labels), 10).float()[..., None]  # (B, 2, 10, 1)
    forward = torch.compile(network) if compiled else network

    def step() -> None:
        optimiser.zero_grad()
        forward(x, positive, mask, target).backward()
        optimiser.step()

    return step
