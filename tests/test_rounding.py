"""Where a rounding error would decide: blank ground, images of one grey level, parameters without an effect."""

from __future__ import annotations

import numpy as np
import pytest

import multimnist_capsnet as multimnist
import smallnorb_novel_viewpoint as smallnorb
from more import conv_matrix_capsules as conv, mnist_affine_capsnet as affine, what_routing_does as parts


def strokes_on_a_blank_ground(side: int) -> multimnist.Batch:
    rng = np.random.default_rng(0)
    images = np.zeros((8, side, side), np.float32)
    images[:, side // 2 - 4 : side // 2 + 4, side // 2] = rng.random((8, 8))
    labels = np.arange(8)[:, None] % 10
    return multimnist.Batch(images, labels, images[:, None])


@pytest.mark.parametrize("name", ["multimnist cnn", "multimnist cnn_pool", "affine cnn", "affine lenet"])
@pytest.mark.parametrize("side", [28, 40])
def test_fast_and_plain_cnns_have_the_same_first_gradient_on_a_blank_ground(name: str, side: int) -> None:
    module, model = name.split()
    found = []
    for plain in (False, True):
        if module == "affine":
            config: multimnist.CapsNetConfig = affine.Config(canvas=side, conv_channels=4, primary_types=1, plain=plain)
            models = affine.make_models(config)  # type: ignore[arg-type]
        else:
            config = multimnist.Config(image_size=side, conv_channels=4, primary_types=1, plain=plain)
            models = multimnist.make_models(config)
        params = models[model].init_params(np.random.default_rng(1))
        found.append(models[model].loss_and_grads(params, strokes_on_a_blank_ground(side), 8)[1])
    for key, grad in found[1].items():
        np.testing.assert_allclose(found[0][key], grad, atol=2e-5 * np.abs(grad).max(), err_msg=key)


@pytest.mark.parametrize("level", [0.0, 0.1, 7.0, 255.0])
def test_an_image_of_one_grey_level_becomes_nothing(level: float) -> None:
    images = np.full((2, 33, 31, 2), level, np.float32)
    images[1, 0, 0, 1] += 1 if level > 1 else 1 / 255
    found = smallnorb.standardized(images)
    assert (found[0] == 0).all()
    assert (found[1, :, :, 0] == 0).all()
    assert found[1, :, :, 1].std() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("loss", ["spread", "cross-entropy"])
def test_the_class_layer_has_a_bias_of_votes_only_where_the_loss_sees_it(loss: str) -> None:
    config = conv.Config(dataset="shapes", loss=loss, sizes=(4, 2, 2, 2))
    model = parts.matrix_capsules(config, vote_bias="learned")
    params = model.init_params(np.random.default_rng(0))
    assert ("class.bias" in params) == (loss == "cross-entropy")
    scores, cache = model.forward(params, np.random.default_rng(1).random((3, 32, 32, 1), np.float32))
    grads, _ = model.backward(np.ones_like(scores), cache)
    assert set(grads) == set(params)
