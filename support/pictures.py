"""Image files: reading them as grey levels, sheets of pictures as PNG, and the table of predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from support.run import UserError, one_line

Array = np.ndarray


def read_grey(path: Path) -> Array:
    """A picture file -> grey levels (H, W) in [0, 1], float32. Raises UserError where it cannot be read.

    Transparent pixels become white if the opaque ones are mostly dark, and black otherwise.
    """
    from PIL import Image

    try:
        with Image.open(path) as opened:
            wide = opened.mode.startswith("I")  # 16 bits of grey
            narrow = Image.fromarray((np.asarray(opened).clip(0, 65535) // 257).astype(np.uint8)) if wide else opened
            rgba = narrow.convert("RGBA")
    except FileNotFoundError:
        raise UserError(f"there is no picture {path}") from None
    except Exception as error:  # Pillow's decoders raise many kinds on a damaged file: SyntaxError, struct.error, ...
        raise UserError(f"{path} is not a picture that can be read: {one_line(error)}") from error
    alpha, tone = (np.asarray(c, np.float32) / 255 for c in (rgba.getchannel("A"), rgba.convert("L")))
    background = float((alpha * tone).sum() < 0.5 * alpha.sum())
    return alpha * tone + (1 - alpha) * background


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
