"""Image files: reading them as squares, as strokes or as they are."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from data.files import UserError, expanded, one_line

Array = np.ndarray

MAX_PIXELS = 50_000_000
MNIST_SIDE = 28
GREATEST = 1e36  # of a pixel: sums of such numbers are finite in float32
Levels = Mapping[str, Sequence[float]]  # black and white, by the kind of a file's numbers
BYTES, WHOLE, FLOATS, NUMBERS = "8 bits", "whole numbers", "floating point", "arrays"  # the kinds


# --- A file as an image of Pillow -------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """An image file as an image of Pillow, before it is decoded, without warnings of what Pillow reads nevertheless.
    Raises UserError, also for what fails inside."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(expanded(path)) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise ValueError(f"it has {image.width:,} x {image.height:,} pixels, more than {MAX_PIXELS:,}")
                yield image
    except Exception as error:  # Pillow's decoders raise many kinds on a damaged file: SyntaxError, struct.error, ...
        raise UserError(f"{path} is not an image that can be read: {one_line(error)}") from error


def longer_side(path: Path) -> int:
    """Of an image file, in pixels; 0 where it cannot be read."""
    with contextlib.suppress(UserError), opened(path) as image:
        return max(image.size)
    return 0


def open_upright(path: Path, side: int | None = None) -> Any:
    """An image file -> an image of Pillow, upright as its EXIF orientation says: RGBA, or F where a pixel has more
    than 8 bits. With ``side`` a JPEG may be decoded at a fraction of its size, not below twice ``side`` in either
    direction. Raises UserError where the file cannot be read."""
    with opened(path) as image:
        if side:
            image.draft(None, (2 * side, 2 * side))
        upright = ImageOps.exif_transpose(image)
        if upright.mode[0] not in "IF":
            return upright.convert("RGBA")
        pixels = np.asarray(upright)
        if upright.mode == "I" and 1 in getattr(image, "tag_v2", {}).get(339, ()):  # Pillow takes it for signed
            pixels = pixels.view(np.uint32)
        if not np.abs(pixels).max() < GREATEST:
            raise ValueError("it has pixels that are no finite numbers, or too great")
        deep = Image.fromarray(pixels.astype(np.float32))
        deep.info["kind"] = FLOATS if pixels.dtype.kind == "f" else WHOLE
        return deep


def over_background(rgba: Any, channels: int) -> Array:
    """An RGBA image of Pillow -> (H, W, 1), grey, or (H, W, 3), in [0, 1], float32. Transparent pixels become white if
    the opaque ones are mostly dark, and black otherwise."""
    alpha, tone = (np.asarray(c, np.float32) / 255 for c in (rgba.getchannel("A"), rgba.convert("L")))
    background = float((alpha * tone).sum() < 0.5 * alpha.sum())
    alpha = alpha[..., None]
    colours = tone[..., None] if channels == 1 else np.asarray(rgba.convert("RGB"), np.float32) / 255
    return alpha * colours + (1 - alpha) * background


def border_level(image: Array) -> float:
    """The median of the outermost pixels of (H, W): the background's level."""
    return float(np.median(np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])))


# --- Squares, whose black and white are those of a set ----------------------------------------------------------------


class Square(NamedTuple):
    pixels: Array  # (S, S, C) float32, in the numbers of the image
    kind: str  # of these numbers
    extremes: tuple[float, float]  # least and greatest of the whole image


def read_square(path: Path, side: int, channels: int) -> Square:
    """An image file as a square of S = ``side``, C = 1, grey, or 3: see ``squared``. Raises UserError."""
    image = open_upright(path, side)
    bands = image.getextrema()
    if image.mode == "F":
        return Square(squared(image, side, channels), image.info["kind"], bands)
    is_opaque = bands[3][0] == 255  # others have a background of black or white
    extremes = (min(band[0] for band in bands[:3]), max(band[1] for band in bands[:3])) if is_opaque else (0, 255)
    return Square(squared(image, side, channels), BYTES, extremes)


def array_square(numbers: Array, side: int, channels: int) -> Square:
    """The same of an image (H, W, C'), C' = 1 or 3, of any numbers."""
    x = numbers.astype(np.float32)
    if channels < x.shape[-1]:
        x = (x @ np.array([0.299, 0.587, 0.114], np.float32))[..., None]
    planes = [squared(Image.fromarray(plane), side, 1) for plane in np.moveaxis(x, 2, 0)]
    pixels = np.broadcast_to(np.concatenate(planes, axis=2), (side, side, channels))
    return Square(pixels, NUMBERS, (float(x.min()), float(x.max())))


def squared(image: Any, side: int, channels: int) -> Array:
    """An image of Pillow, RGBA or F -> (S, S, C) float32, of 0 to 255 or of its own numbers: resized until its longer
    side is S, in the middle of a square of the median of its border."""
    width, height = (max(1, round(n * side / max(image.size))) for n in image.size)
    shrinks = max(image.size) > side
    small = image.resize((width, height), Image.Resampling.BOX if shrinks else Image.Resampling.BILINEAR)
    grey = small.mode == "F"
    pixels = np.asarray(small)[..., None].repeat(channels, axis=2) if grey else 255 * over_background(small, channels)
    square = np.empty((side, side, channels), np.float32)
    square[...] = [border_level(pixels[..., c]) for c in range(channels)]
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = pixels
    return square


def in_levels(what: object, square: Square, levels: Levels) -> Array:
    """The pixels of ``what`` as uint8, 0 at the lower level of their kind and 255 at the upper one; what lies beyond
    them is cut. Raises UserError where a training with these levels had none of its kind, or far smaller numbers."""
    if square.kind not in levels:
        raise UserError(f"{what} holds {square.kind}, and no image of the training does: save all in one format")
    (low, high), greatest = levels[square.kind], square.extremes[1]
    if greatest - low > 4 * (high - low):  # 0 to 255 after a training with 0 to 1
        raise UserError(f"{what} has values up to {greatest:g}, and those of the training up to {high:g}: scale both"
                        " alike")
    return np.rint(np.clip((square.pixels - low) * (255 / max(high - low, 1e-30)), 0, 255)).astype(np.uint8)


def square_of_set(path: Path, side: int, channels: int, levels: Levels) -> Array:
    """An image file -> (S, S, C) uint8, read as the images of a training with these levels; after one with arrays
    as these if their numbers are of 8 bits, else with levels of 0 and 255. Raises UserError."""
    if levels.keys() <= {NUMBERS}:
        low, high = levels.get(NUMBERS, (0, 1))
        levels = {BYTES: (low, high) if low >= 0 and 1 < high <= 255 else (0, 255)}
    return in_levels(path, read_square(path, side, channels), levels)


# --- Single images --------------------------------------------------------------------------------------------------


def read_grey(path: Path) -> Array:
    """An image file -> grey levels (H, W) in [0, 1], float32. Of more than 8 bits white is the power of two that the
    image's greatest number needs. Raises UserError where it cannot be read."""
    image = open_upright(path)
    if image.mode != "F":
        return over_background(image, 1)[..., 0]
    low, high = image.getextrema()
    white = 2 ** math.ceil(math.log2(max(high, 1) + 1) - 0.01) - 1  # 1.0000004 is 1
    return np.clip((np.asarray(image) - min(low, 0)) / np.float32(white - min(low, 0)), 0, 1)


def read_strokes(path: Path, side: int, box: int) -> Array:
    """An image file of strokes -> (S, S) in [0, 1], float32, bright strokes on black.

    An image with a bright background is inverted. An image of S x S or 28x28 pixels is not scaled; of any other the
    strokes are cut out, scaled to a box of ``box`` pixels and centred. Raises UserError where it cannot be read or has
    no strokes.
    """
    grey = read_grey(path)
    strokes = 1 - grey if border_level(grey) > 0.5 else grey
    strokes = np.maximum(0, strokes - border_level(strokes))
    if strokes.max() < 0.1:
        raise UserError(f"{path} has nothing that stands out from its background")
    if strokes.shape not in ((side, side), (MNIST_SIDE, MNIST_SIDE)):
        rows, columns = (np.flatnonzero((strokes > 0.25 * strokes.max()).any(axis=axis)) for axis in (1, 0))
        strokes = strokes[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        scale = box / max(strokes.shape)
        resampling = Image.Resampling.BOX if scale < 1 else Image.Resampling.BILINEAR
        size = (max(1, round(strokes.shape[1] * scale)), max(1, round(strokes.shape[0] * scale)))
        strokes = np.asarray(Image.fromarray(strokes).resize(size, resampling))
    strokes = np.clip(strokes / strokes.max(), 0, 1)
    top, left = ((side - n) // 2 for n in strokes.shape)
    picture = np.zeros((side, side), np.float32)
    picture[top : top + strokes.shape[0], left : left + strokes.shape[1]] = strokes
    return picture
