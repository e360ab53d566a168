"""Image files: reading them as grey levels, sheets of pictures as PNG, and the table of predictions."""

from __future__ import annotations

import contextlib
import stat
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from support.files import UserError
from support.run import one_line

Array = np.ndarray


MAX_PIXELS = 50_000_000


def read_grey(path: Path) -> Array:
    """A picture file -> grey levels (H, W) in [0, 1], float32, upright as its EXIF orientation says. Raises UserError
    where it cannot be read.

    Transparent pixels become white if the opaque ones are mostly dark, and black otherwise.
    """
    from PIL import Image, ImageOps

    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise UserError(f"{path} is not a picture: it is {'a folder' if path.is_dir() else 'no regular file'}")
        with quiet_and_unlimited(Image), Image.open(path) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise UserError(
                    f"{path} has {opened.width:,} x {opened.height:,} pixels: make it smaller than {MAX_PIXELS:,}"
                )
            upright = ImageOps.exif_transpose(opened)
            wide = upright.mode.startswith("I")  # 16 bits of grey
            narrow = Image.fromarray((np.asarray(upright).clip(0, 65535) // 257).astype(np.uint8)) if wide else upright
            rgba = narrow.convert("RGBA")
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"there is no picture {path}") from None
    except Exception as error:  # Pillow's decoders raise many kinds on a damaged file: SyntaxError, struct.error, ...
        raise UserError(f"{path} is not a picture that can be read: {one_line(error)}") from error
    alpha, tone = (np.asarray(c, np.float32) / 255 for c in (rgba.getchannel("A"), rgba.convert("L")))
    background = float((alpha * tone).sum() < 0.5 * alpha.sum())
    return alpha * tone + (1 - alpha) * background


@contextlib.contextmanager
def quiet_and_unlimited(image: Any) -> Iterator[None]:
    """Without Pillow's warnings of what it reads nevertheless, and without its own limit, which is twice a warning."""
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
    import imageio.v3 as iio

    tiles = np.pad(tiles, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=1)
    sheet = tiles.transpose(0, 2, 1, 3).reshape(len(tiles) * tiles.shape[2], -1).repeat(4, axis=0).repeat(4, axis=1)
    return iio.imwrite("<bytes>", (255 * np.clip(sheet, 0, 1)).astype(np.uint8), extension=".png")


def prediction_table(
    paths: Sequence[Path], classes: Sequence[str], scores: Mapping[str, Array], activations: Array
) -> str:
    """For each picture the class that each model predicts by its scores (N, J), and the class activations (N, J)."""
    width = max(len(str(path)) for path in paths)
    heads = " ".join(f"{name:>12}" for name in scores)
    lines = [f"{'picture':<{width}} {heads}   activations: {' '.join(classes)}"]
    for n, path in enumerate(paths):
        named = " ".join(f"{classes[s[n].argmax()]:>12}" for s in scores.values())
        lines.append(f"{path!s:<{width}} {named}   " + " ".join(f"{a:.3f}" for a in activations[n]))
    return "\n".join(lines)
