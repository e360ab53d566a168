"""Steps of the convolutional matrix-capsule network: numpy, and the same network in PyTorch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import smallnorb_novel_viewpoint as smallnorb
from benchmarks.measure import Step, torch_adam_step
from fast.optimizers import adamw_step
from fast.workers import Workers
from more import conv_matrix_capsules as conv
from smallnorb_novel_viewpoint import init_state

Array = np.ndarray
N_CLASSES = 10
SIZES = (32, 8, 8, 8)


def problem(
    batch_size: int = 32, sizes: tuple[int, int, int, int] = SIZES
) -> tuple[conv.Config, Any, tuple[Array, Array]]:
    config = conv.Config(
        dataset="mnist", sizes=sizes, em_iters=3, variance_floor=1.0, beta_v_init=0.0, loss="cross-entropy"
    )
    rng = np.random.default_rng(0)
    data = rng.random((batch_size, 28, 28, 1), np.float32), rng.integers(0, N_CLASSES, batch_size)
    return config, conv.make_models(config)["capsules"], data


def numpy_step(batch_size: int = 32, sizes: tuple[int, int, int, int] = SIZES, threads: int = 2) -> Step:
    """One training step: forward, loss, backward, Adam; exact gradient through three EM iterations."""
    config, model, data = problem(batch_size, sizes)
    state, batch = init_state(model, config), conv.Examples(*data)
    workers = Workers(threads).__enter__()  # as long as the process
    gradients = functools.partial(conv.loss_and_grads, model, 0.0)

    def step() -> None:
        _, grads = workers.gradients(gradients, state.params, batch, conv.part_size(config))
        adamw_step(state, grads, 1e-6)

    return step


def torch_step(batch_size: int = 32, **options: Any) -> Step:
    """The same network, three EM iterations; ``options`` as of ``torch_adam_step``."""
    import torch
    from torch import nn
    from torch.nn import functional

    config, _, (images, classes) = problem(batch_size)
    floor = config.variance_floor

    class ConvCaps(nn.Module):
        """Capsules whose children are those of a field of k x k; with ``offset`` one matrix serves all positions."""

        child: torch.Tensor
        first: torch.Tensor

        def __init__(self, side: int, k: int, stride: int, n_in: int, n_out: int, offset: Any = None) -> None:
            super().__init__()
            self.k, self.stride, self.n_in, self.n_out, self.offset = k, stride, n_in, n_out, offset
            shape = (k, k, n_in, n_out) if offset is None else (n_in, n_out)
            self.w = nn.Parameter(torch.eye(4) + 0.1 * torch.randn(*shape, 4, 4))
            self.beta_a = nn.Parameter(torch.zeros(n_out))
            self.beta_v = nn.Parameter(torch.full((n_out,), -0.5 * float(np.log(floor))))
            places = torch.arange(side * side).reshape(side, side).unfold(0, k, stride).unfold(1, k, stride)
            self.side = len(places)
            self.n_children = side * side
            self.register_buffer("child", places.reshape(-1))  # of each entry (position, kernel place)
            n_parents = torch.bincount(self.child, minlength=side * side)
            self.register_buffer("first", 1 / (n_out * n_parents[self.child]).reshape(1, -1, k * k, 1, 1).float())
            self.mass_unit = int((n_parents > 0).sum()) * n_in / (self.side**2 * n_out)

        def forward(self, pose: torch.Tensor, a_in: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            n, places, k2, n_in, n_out = len(pose), self.side**2, self.k**2, self.n_in, self.n_out
            # pose (B, H * W, I, 4, 4), a_in (B, H * W, I)
            fields = pose[:, self.child].reshape(n, places, k2, n_in, 4, 4)
            a = a_in[:, self.child].reshape(n, places, k2, n_in, 1)
            if self.offset is None:
                votes = torch.einsum("bpkixy,kijyz->bpkijxz", fields, self.w.flatten(0, 1))
            else:
                votes = torch.einsum("bpkixy,ijyz->bpkijxz", fields, self.w) + self.offset.reshape(k2, 1, 1, 4, 4)
            votes = votes.reshape(n, places, k2 * n_in, n_out, 16)
            a = a.reshape(n, places, k2 * n_in, 1)
            r = self.first.expand(n, places, k2, n_in, n_out).reshape(n, places, k2 * n_in, n_out)
            for t in range(config.em_iters):
                ra = r * a
                mass = ra.sum(2) + smallnorb.MASS_FLOOR  # (B, places, J)
                weight = ra / mass[:, :, None]
                mu = torch.einsum("bpcj,bpcjd->bpjd", weight, votes)
                square = (votes - mu[:, :, None]) ** 2
                sigma_sq = torch.einsum("bpcj,bpcjd->bpjd", weight, square) + floor
                log_det = sigma_sq.log().sum(3)
                z = self.beta_a - (16 * self.beta_v + 0.5 * log_det) * mass / self.mass_unit
                if t < config.em_iters - 1:
                    log_p = -0.5 * torch.einsum("bpcjd,bpjd->bpcj", square, 1 / sigma_sq) - 0.5 * log_det[:, :, None]
                    log_r = (functional.logsigmoid(z)[:, :, None] + log_p).reshape(n, places * k2, n_in, n_out)
                    # a child's parents are all types at all positions that see it
                    with torch.no_grad():
                        index = self.child[None, :, None].expand(n, -1, n_in)
                        highest = log_r.new_full((n, self.n_children, n_in), -torch.inf)
                        highest.scatter_reduce_(1, index, log_r.amax(3), "amax")
                    e = torch.exp(log_r - highest[:, self.child, :, None])
                    total = e.new_zeros(n, self.n_children, n_in).index_add(1, self.child, e.sum(3))
                    r = (e / total[:, self.child, :, None]).reshape(n, places, k2 * n_in, n_out)
            return mu.reshape(n, places, n_out, 4, 4), torch.sigmoid(z)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            A, B, C, D = SIZES
            self.conv1 = nn.Conv2d(1, A, 5, stride=2, padding=2)
            self.primary = nn.Conv2d(A, 17 * B, 1)
            sides = conv.grid_sides(28)
            self.convcaps1 = ConvCaps(sides[0], 3, 2, B, C)
            self.convcaps2 = ConvCaps(sides[1], 3, 1, C, D)
            offset = torch.tensor(conv.coordinates(28, "float32"))
            self.caps = ConvCaps(sides[2], sides[2], 1, D, N_CLASSES, offset)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            primary = self.primary(functional.relu(self.conv1(x))).permute(0, 2, 3, 1).flatten(1, 2)  # (B, H * W, 17 I)
            n_pose = 16 * SIZES[1]
            pose, a = primary[..., :n_pose].unflatten(2, (-1, 4, 4)), torch.sigmoid(primary[..., n_pose:])
            mu, a = self.caps(*self.convcaps2(*self.convcaps1(pose, a)))
            scores = smallnorb.POSE_SCORE * (mu * mu).sum((3, 4)) + smallnorb.ACTIVATION_SCORE * (a - 0.5)
            return scores[:, 0]

    torch.manual_seed(0)
    network = Network()
    x, labels = torch.tensor(images.transpose(0, 3, 1, 2).copy()), torch.tensor(classes)
    layers = (network.conv1, network.primary)
    return torch_adam_step(network, lambda f, x: functional.cross_entropy(f(x), labels), x, layers, **options)
