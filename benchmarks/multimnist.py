"""Steps of the MultiMNIST capsule network: numpy, its bare matrix products, and the same network in PyTorch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

import multimnist_capsnet as multimnist
from benchmarks.measure import Step, products_step, torch_adam_step
from fast.workers import Workers
from multimnist_capsnet import init_state


def problem(batch_size: int = 32, conv_channels: int = 32) -> tuple[multimnist.Config, Any, multimnist.Batch]:
    """From the default's to the paper's sizes by conv1's channels alone: types and decoder grow as they do there."""
    sizes = dict(multimnist.PRESETS["paper" if conv_channels >= 256 else "small"])
    sizes |= {"conv_channels": conv_channels, "primary_types": conv_channels // (8 if conv_channels >= 256 else 4)}
    config = multimnist.Config(**{"batch_size": batch_size, **sizes})
    rng, side = np.random.default_rng(0), config.image_size
    sources = rng.random((batch_size, 2, side, side), np.float32)
    labels = np.stack([rng.permutation(multimnist.N_CLASSES)[:2] for _ in range(batch_size)])
    return config, multimnist.capsnet_model(config), multimnist.Batch(sources.max(axis=1), labels, sources)


def numpy_step(batch_size: int = 32, conv_channels: int = 32, threads: int = 2) -> Step:
    """One training step: forward, both reconstructions, losses, backward, Adam."""
    config, model, batch = problem(batch_size, conv_channels)
    state = init_state(model, config)
    workers = Workers(threads).__enter__()  # as long as the process

    def step() -> None:
        _, grads = workers.gradients(model.loss_and_grads, state.params, batch)
        multimnist.update(state, grads, 1e-6, config, workers)

    return step


def overlay_step(batch_size: int = 32) -> Step:
    """Drawing and rendering the composites of one batch."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (60_000, 28, 28), np.uint8)
    overlays = multimnist.Overlays(images, rng.integers(0, 10, 60_000), problem(batch_size)[0])
    return lambda: overlays.render(*overlays.draw(rng, batch_size))


def usual_products_step(batch_size: int = 32, threads: int = 2) -> Step:
    """The matrix products that the network is usually computed by: direct convolutions, their columns ready, and all
    votes at once, so that routing needs no more."""
    config = problem(batch_size // threads)[0]
    B, K2, C, P = config.batch_size, multimnist.KERNEL**2, config.conv_channels, multimnist.PRIMARY_SIZE
    n_digit = multimnist.N_CLASSES * multimnist.CAPSULE_SIZE
    shapes = [
        ((B * (config.image_size - multimnist.KERNEL + 1) ** 2, K2), (K2, C)),
        ((B * config.primary_side**2, K2 * C), (K2 * C, P * config.primary_types)),
        ((config.n_primary, B, P), (config.n_primary, P, n_digit)),
        *(((2 * B, n), (n, m)) for n, m in itertools.pairwise((n_digit, *config.decoder, config.image_size**2))),
    ]
    workers = Workers(threads).__enter__()  # as long as the process
    shares = [products_step(shapes) for _ in range(threads)]
    return lambda: workers.map(lambda step: step(), shares)


def torch_step(batch_size: int = 32, **options: Any) -> Step:
    """The same network, three routing iterations; ``options`` as of ``torch_adam_step``."""
    import torch
    from torch import nn
    from torch.nn import functional

    config, _, batch = problem(batch_size)
    n_types, n_primary, eps = config.primary_types, config.n_primary, multimnist.SQUASH_EPS
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
            u = squash(h.reshape(B, n_types, 8, -1).permute(0, 1, 3, 2).reshape(B, n_primary, 8))
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

    torch.manual_seed(0)
    network = CapsNet()
    x, target = torch.tensor(batch.images[:, None]), torch.tensor(batch.sources.reshape(2 * batch_size, n_pixels))
    positive = torch.tensor(multimnist.indicator(batch.labels, multimnist.N_CLASSES, np.float32))
    mask = functional.one_hot(torch.tensor(batch.labels), 10).float()[..., None]  # (B, 2, 10, 1)
    return torch_adam_step(network, lambda f, x: f(x, positive, mask, target), x, (network,), **options)
