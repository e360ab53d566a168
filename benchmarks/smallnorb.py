"""Steps of the dense matrix capsules: numpy, its bare matrix products, and the same network in PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np

import smallnorb_novel_viewpoint as smallnorb
from benchmarks.measure import Step, products_step, torch_adam_step
from fast.optimizers import adamw_step
from fast.workers import set_blas_threads
from smallnorb_novel_viewpoint import init_state

Array = np.ndarray


def problem(batch_size: int = 32) -> tuple[smallnorb.Config, Any, tuple[Array, Array]]:
    """What is computed here, in PyTorch and in JAX: three iterations, and the cross-entropy; and a batch."""
    config = smallnorb.Config(em_grad="exact", em_iters=3, beta_v_init=0.0, loss="cross-entropy")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, smallnorb.N_CLASSES, batch_size)
    azimuths, elevations = rng.uniform(0, 150, batch_size), rng.uniform(10, 50, batch_size)
    images = smallnorb.render_voxels(labels, azimuths, elevations, rng)
    return config, smallnorb.make_models(config)["capsules"], (images, labels)


def numpy_step(batch_size: int = 32, threads: int = 2) -> Step:
    """One training step: forward, loss, backward, Adam."""
    set_blas_threads(threads)  # as long as the process
    config, model, (x, labels) = problem(batch_size)
    state = init_state(model, config)

    def step() -> None:
        scores, cache = model.forward(state.params, x)
        _, dscores = model.loss(scores, labels, 0.0)
        grads, _ = model.backward(dscores, cache)
        adamw_step(state, [grads], 1e-6)

    return step


def matrix_products_step(batch_size: int = 32) -> Step:
    """The matrix products of that step and nothing else: two of conv1, three of the dense layer, three of the votes."""
    n_positions, K2 = batch_size * (smallnorb.IMAGE_SIZE // 2) ** 2, smallnorb.CONV_KERNEL**2
    side, n_in, n_out = smallnorb.POSE_SIDE, smallnorb.N_PRIMARY, smallnorb.N_CLASSES
    n_features, n_primary = smallnorb.Config().n_features, n_in * (side**2 + 1)
    return products_step([
        ((n_positions, K2), (K2, smallnorb.CONV_CHANNELS)),
        ((batch_size, n_features), (n_features, n_primary)),
        ((n_in, batch_size * side, side), (n_in, side, n_out * side)),
    ])


def torch_step(batch_size: int = 32, **options: Any) -> Step:
    """The same network, three EM iterations; ``options`` as of ``torch_adam_step``."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Capsules(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, smallnorb.CONV_CHANNELS, smallnorb.CONV_KERNEL, stride=2, padding=2)
            self.primary = nn.Linear(4096, smallnorb.N_PRIMARY * 17)
            self.w = nn.Parameter(torch.eye(4) + 0.1 * torch.randn(smallnorb.N_PRIMARY, smallnorb.N_CLASSES, 4, 4))
            self.beta_a = nn.Parameter(torch.zeros(smallnorb.N_CLASSES))
            self.beta_v = nn.Parameter(torch.zeros(smallnorb.N_CLASSES))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            primary = self.primary(functional.relu(self.conv(x)).flatten(1))
            pose, a_in = primary[:, :128].reshape(-1, 8, 4, 4), torch.sigmoid(primary[:, 128:])
            votes = torch.einsum("bipq,ijqr->bijpr", pose, self.w).flatten(3)
            r = torch.full(votes.shape[:3], 1 / smallnorb.N_CLASSES)
            for t in range(3):
                ra = r * a_in[:, :, None]
                mass = ra.sum(1) + smallnorb.MASS_FLOOR
                weight = (ra / mass[:, None])[..., None]
                mu = (weight * votes).sum(1)
                square = (votes - mu[:, None]) ** 2
                sigma_sq = (weight * square).sum(1) + smallnorb.VARIANCE_FLOOR
                log_det = sigma_sq.log().sum(2)
                z = self.beta_a - (16 * self.beta_v + 0.5 * log_det) * mass
                if t < 2:
                    log_p = -0.5 * (square / sigma_sq[:, None]).sum(3) - 0.5 * log_det[:, None]
                    r = torch.softmax(functional.logsigmoid(z)[:, None] + log_p, 2)
            return smallnorb.POSE_SCORE * (mu * mu).sum(2) + smallnorb.ACTIVATION_SCORE * (torch.sigmoid(z) - 0.5)

    torch.manual_seed(0)
    network = Capsules()
    _, _, (images, classes) = problem(batch_size)
    x, labels = torch.tensor(images.transpose(0, 3, 1, 2).copy()), torch.tensor(classes)
    return torch_adam_step(network, lambda f, x: functional.cross_entropy(f(x), labels), x, (network,), **options)
