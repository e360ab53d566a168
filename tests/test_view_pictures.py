"""Pictures of objects that a person drew or photographed, as conv_matrix_capsules.py reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

import smallnorb_novel_viewpoint as s
from conv_matrix_capsules import Config, read_picture
from support.files import UserError

Array = np.ndarray


def view_config(**changes: Any) -> Config:
    return Config(**{"dataset": "voxels", "standardize": "none"} | changes)


def voxel_picture(label: int = 1) -> Array:
    """A view as a person would draw it: (32, 32) uint8, light on dark."""
    image = s.render_voxels(np.array([label]), np.array([60.0]), np.array([30.0]), None)[0, :, :, 0]
    return np.rint(255 * image).astype(np.uint8)


def save(folder: Path, name: str, pixels: Array) -> Path:
    path = folder / name
    Image.fromarray(pixels).save(path)
    return path


def test_a_picture_is_read_as_it_is(tmp_path: Path) -> None:
    pixels = voxel_picture()
    expected = pixels[None, :, :, None] / np.float32(255)
    config = view_config()
    colours = np.repeat(pixels[..., None], 3, axis=2)
    white, black = np.full_like(pixels, 255), np.zeros_like(pixels)
    pictures = {
        "grey": pixels,
        "large": np.kron(pixels, np.ones((3, 3), np.uint8)),
        "colours": colours,
        "opaque": np.dstack([colours, white]),
        "white ink on nothing": np.dstack([white, white, white, pixels]),
        "black ink on nothing": np.dstack([black, black, black, pixels]),
        "dark on light": 255 - pixels,
        "16 bits": pixels.astype(np.uint16) * 257,
        "black and white": pixels > 127,
    }
    for name, picture in pictures.items():
        image = read_picture(save(tmp_path, f"{name}.png", picture), config)
        wanted = (expected > 0.5) if name == "black and white" else expected
        assert image.shape == (1, 32, 32, 1), name
        assert image.dtype == np.float32, name
        np.testing.assert_allclose(image, wanted, atol=0.011, err_msg=name)


def test_a_wide_picture_is_a_stereo_pair_of_smallnorb(tmp_path: Path) -> None:
    pairs = np.random.default_rng(0).integers(0, 256, (1, 2, 96, 96), dtype=np.uint8)
    config = view_config(dataset="smallnorb", standardize="image")
    image = read_picture(save(tmp_path, "pair.png", np.concatenate(list(pairs[0]), axis=1)), config)
    np.testing.assert_array_equal(image, s.shrink(pairs))  # the same normalisation as the data set's
    one_eye = read_picture(save(tmp_path, "eye.png", pairs[0, 0]), config)
    np.testing.assert_array_equal(one_eye[..., 0], one_eye[..., 1])
    np.testing.assert_array_equal(one_eye[..., 0], image[..., 0])
    raw = read_picture(tmp_path / "pair.png", view_config(dataset="smallnorb"))
    np.testing.assert_array_equal(raw, s.shrink(pairs, "none"))


def test_a_picture_of_an_odd_size_is_standardized_as_the_images_of_the_training_are(tmp_path: Path) -> None:
    for size in ((1, 1), (2, 3), (31, 33), (100, 40), (1, 3000), (3000, 1)):
        path = save(tmp_path, "p.png", np.random.default_rng(0).integers(0, 256, size[::-1], dtype=np.uint8))
        read = read_picture(path, view_config(standardize="image"))
        assert read.shape == (1, 32, 32, 1)
        np.testing.assert_array_equal(read, s.standardized(read_picture(path, view_config())))
        assert read_picture(path, view_config(dataset="smallnorb")).shape == (1, 48, 48, 2)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(position=st.integers(0, 10_000), value=st.integers(0, 255), length=st.integers(1, 8), cut=st.booleans())
@example(position=1005, value=0, length=3, cut=False)  # Pillow raises a SyntaxError
def test_any_damaged_picture_is_read_or_refused(
    position: int, value: int, length: int, cut: bool, tmp_path: Path
) -> None:
    content = bytearray(save(tmp_path, "p.png", voxel_picture()).read_bytes())
    position %= len(content)
    if cut:
        content = content[:position]
    else:
        content[position : position + length] = bytes([value] * length)
    path = tmp_path / "damaged.png"
    path.write_bytes(content)
    try:
        assert read_picture(path, view_config()).shape == (1, 32, 32, 1)
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017
