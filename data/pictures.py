"""Image files: reading them as squares, as strokes or as they are; and sheets of pictures as PNG."""

from __future__ import annotations

import contextlib
import io
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from support.console import one_line
from support.files import UserError

Array = np.ndarray


MAX_PIXELS = 50_000_000


def read_grey(path: Path) -> Array:
    """A picture file -> grey levels (H, W) in [0, 1], float32, upright as its EXIF orientation says. Raises UserError
    where it cannot be read."""
    return over_background(open_upright(path), 1)[..., 0]


def open_upright(path: Path, side: int | None = None) -> Any:
    """A picture file -> an image of Pillow, RGBA. With ``side`` a JPEG may be decoded at a fraction of its size, not
    below twice ``side`` in either direction. Raises UserError where the file cannot be read."""
    from PIL import Image, ImageOps

    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise UserError(f"{path} is not a picture: it is {'a folder' if path.is_dir() else 'no regular file'}")
        with quiet_and_unlimited(Image), Image.open(path) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise UserError(
                    f"{path} has {opened.width:,} x {opened.height:,} pixels: make it smaller than {MAX_PIXELS:,}"
                )
            if side:
                opened.draft(None, (2 * side, 2 * side))
            upright = ImageOps.exif_transpose(opened)
            wide = upright.mode.startswith("I")  # 16 bits of grey
            narrow = Image.fromarray((np.asarray(upright).clip(0, 65535) // 257).astype(np.uint8)) if wide else upright
            return narrow.convert("RGBA")
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"there is no picture {path}") from None
    except Exception as error:  # Pillow's decoders raise many kinds on a damaged file: SyntaxError, struct.error, ...
        raise UserError(f"{path} is not a picture that can be read: {one_line(error)}") from error


def over_background(rgba: Any, channels: int) -> Array:
    """An RGBA image of Pillow -> (H, W, 1), grey, or (H, W, 3), in [0, 1], float32. Transparent pixels become white if
    the opaque ones are mostly dark, and black otherwise."""
    alpha, tone = (np.asarray(c, np.float32) / 255 for c in (rgba.getchannel("A"), rgba.convert("L")))
    background = float((alpha * tone).sum() < 0.5 * alpha.sum())
    alpha = alpha[..., None]
    colours = tone[..., None] if channels == 1 else np.asarray(rgba.convert("RGB"), np.float32) / 255
    return alpha * colours + (1 - alpha) * background


def read_square(path: Path, side: int, channels: int) -> Array:
    """A picture file -> (S, S, C) uint8, S = ``side``, C = 1, grey, or 3: see ``squared``. Raises UserError."""
    return squared(open_upright(path, side), side, channels)


def squared(rgba: Any, side: int, channels: int) -> Array:
    """An RGBA image of Pillow -> (S, S, C) uint8: resized until its longer side is S, in the middle of a square of the
    median of its border."""
    from PIL import Image

    width, height = (max(1, round(n * side / max(rgba.size))) for n in rgba.size)
    shrinks = max(rgba.size) > side
    small = rgba.resize((width, height), Image.Resampling.BOX if shrinks else Image.Resampling.BILINEAR)
    pixels = np.rint(255 * over_background(small, channels)).astype(np.uint8)  # (height, width, C)
    square = np.empty((side, side, channels), np.uint8)
    square[...] = [border_level(pixels[..., c]) for c in range(channels)]
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = pixels
    return square


def grey_square(grey: Array, side: int) -> Array:
    """(H, W) uint8 -> (S, S): resized until its longer side is S, in the middle of a square of the median of its
    border."""
    from PIL import Image

    height, width = (max(1, round(n * side / max(grey.shape))) for n in grey.shape)
    square = Image.new("L", (side, side), int(border_level(grey)))
    small = Image.fromarray(grey).resize((width, height), Image.Resampling.BOX)
    square.paste(small, ((side - width) // 2, (side - height) // 2))
    return np.asarray(square)


MNIST_SIDE = 28


def read_strokes(path: Path, side: int, box: int) -> Array:
    """A picture file of strokes -> (S, S) in [0, 1], float32, bright strokes on black.

    A picture with a bright background is inverted. A picture of S x S or 28x28 pixels is not scaled; of any other the
    strokes are cut out, scaled to a box of ``box`` pixels and centred. Raises UserError where it cannot be read or has
    no strokes.
    """
    from PIL import Image

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


@contextlib.contextmanager
def quiet_and_unlimited(image: Any) -> Iterator[None]:
    """Without Pillow's warnings of what it reads nevertheless, and without its limit on the number of pixels."""
    limit, image.MAX_IMAGE_PIXELS = image.MAX_IMAGE_PIXELS, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        image.MAX_IMAGE_PIXELS = limit


def border_level(image: Array) -> float:
    """The median of the outermost pixels of (H, W): the background's level."""
    return float(np.median(np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])))


def picture_sheet(tiles: Array) -> bytes:
    """tiles (rows, columns, H, W) in [0, 1] -> a PNG of them, four times as large, between white lines."""
    from PIL import Image

    tiles = np.pad(tiles, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=1)
    sheet = tiles.transpose(0, 2, 1, 3).reshape(len(tiles) * tiles.shape[2], -1).repeat(4, axis=0).repeat(4, axis=1)
    stream = io.BytesIO()
    Image.fromarray((255 * np.clip(sheet, 0, 1)).astype(np.uint8)).save(stream, "PNG")
    return stream.getvalue()
