"""What the benchmarks of MultiMNIST count as a step's matrix products. Nothing is timed here."""

from __future__ import annotations

import numpy as np

import multimnist_capsnet as m
from benchmarks import multimnist as benchmark

B = 4


def multiplications(products: list[tuple[m.Array, m.Array, m.Array]]) -> int:
    """Of real numbers; a complex product takes four."""
    return sum((4 if np.iscomplexobj(product) else 1) * product.size * a.shape[-1] for a, _, product in products)


def noted_step() -> tuple[m.Params, list[tuple[m.Array, m.Array, m.Array]]]:
    """The parameters, and the products of a step."""
    config = benchmark.config_of(B)
    model, batch = m.capsnet_model(config), benchmark._batch(config)
    params = m.init_state(model, config).params
    grads, ws = {key: np.empty_like(p) for key, p in params.items()}, m.Workspace()
    return params, benchmark.noted_products(lambda: model.loss_and_grads(params, batch, B, grads, ws))


def test_every_matrix_product_of_a_step_is_noted() -> None:
    """By hand: two of conv1, as images have no gradient, nine of the decoder, and of the routing, which multiplies by
    as many weights each time, three sums and two agreements forward, and backward five for w and seven for the rest."""
    params, noted = noted_step()
    grads, ws = {key: np.empty_like(p) for key, p in params.items()}, m.Workspace()
    w, b = params["primary.w"], params["primary.b"]
    x, dout = np.zeros((28, 28, B, 32), np.float32), np.zeros((10, 10, B, 64), np.float32)

    def convolution() -> None:
        _, cache = m.spectral_conv2d_forward(x, w, b, 2, ws, "primary")
        m.spectral_conv2d_backward(dout, cache, grads["primary.w"], grads["primary.b"], ws)

    conv1 = 2 * B * 28**2 * 81 * 32
    decoder = 3 * 2 * B * sum(params[f"decoder{k}.w"].size for k in (1, 2, 3))
    routing = 17 * B * params["routing.w"].size
    spectral = multiplications(benchmark.noted_products(convolution))
    assert multiplications(noted) == conv1 + decoder + routing + spectral
    direct = 3 * B * 10**2 * 81 * 32 * 64
    assert 0 < spectral < direct


def test_repeating_the_products_gives_finite_numbers_that_stay() -> None:
    """Infinite or ever smaller ones would take another time."""
    _, noted = noted_step()

    def repeat() -> list[m.Array]:
        for a, b, product in noted:
            np.matmul(a, b, out=product)
        return [product.copy() for *_, product in noted]

    repeat()
    first, second = repeat(), repeat()
    for one, other in zip(first, second, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, other)
