"""Draw toys in the files of smallNORB: 48,600 stereo pairs of fifty toys, in about a minute and 0.9 GB.

The set has the structure, the file names and the format of the real one (see data/toy_norb.py), so that everything
that reads smallNORB reads it:

    python -m more.make_toy_norb --out-dir toys
    python -m more.conv_matrix_capsules --dataset smallnorb --data-dir toys

A sheet of all toys:

    python -m more.make_toy_norb --figure viz/toys/contact_sheet.png --data-dir smallnorb
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import imageio.v3 as imageio
import numpy as np

from data.norb_files import read_norb
from multimnist_capsnet import default_threads
from smallnorb_novel_viewpoint import FOLDER, OUTPUT, SettingError, Settings, UserError, int_in, parse, script, setting
from support.experiment import require_writable
from support.figures import write_if_changed

from data.toy_norb import (
    AZIMUTHS, CATEGORIES, ELEVATIONS, INSTANCES, N_LIGHTINGS, STEREO, draw_ground, draw_view, make_toy, shadow_maps,
    shadow_resampling, write_toy_norb,
)

Array = np.ndarray


# --- Contact sheet ----------------------------------------------------------------------------------------------------


def real_row(folder: Path) -> Array:
    """(96, 960): the left images of the first pair of each category in both halves of the real set."""
    images = []
    for subset in INSTANCES:
        labels, _, chunks = read_norb(folder, subset)
        pairs = next(chunks)
        images += [pairs[labels.tolist().index(category), 0] for category in range(len(CATEGORIES))]
    return np.concatenate(images, axis=1)


def contact_sheet(seed: int, real: Path | None = None) -> bytes:
    """PNG: a row of ten instances for each category, the left eye's view from a random side in a random lighting; below
    them, a row of the set in the folder ``real``."""
    rng = np.random.default_rng(seed)
    rows = []
    for category in range(len(CATEGORIES)):
        row = []
        for instance in range(10):
            toy = make_toy(category, instance, seed)
            azimuth, elevation, lighting = rng.choice(AZIMUTHS), rng.choice(ELEVATIONS[:6]), rng.integers(N_LIGHTINGS)
            resampling = shadow_resampling(elevation, -STEREO, toy.height)
            ground = draw_ground(shadow_maps(toy, azimuth), resampling)
            row.append(draw_view(toy, azimuth, elevation, -STEREO, ground)[lighting])
        rows.append(np.concatenate(row, axis=1))
    if real:
        rows += [np.full((4, rows[0].shape[1]), 255, np.uint8), real_row(real)]
    return imageio.imwrite("<bytes>", np.concatenate(rows), extension=".png", plugin="pillow", optimize=True)


# --- Command line -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    out_dir: Path = setting(Path("toys"), FOLDER, "Folder of the six files.", usual=True, group="drawing")
    seed: int = setting(0, int_in(0, 2**32 - 1), "Seed of the toys.", usual=True)


@dataclasses.dataclass(frozen=True)
class Options(Settings):
    figure: Path | None = setting(None, OUTPUT, "Draw all toys, one view each, as a PNG.", usual=True,
        group="instead of drawing the files")
    data_dir: Path | None = setting(None, FOLDER, "Add a row of real toys to --figure, from the files of smallNORB"
        " in this folder.", usual=True)
    threads: int = setting(default_threads(), int_in(1, 256), "Use N threads. No bit of a drawing depends on it.",
        shown="one for each processor, at most 4", group="running")

    def check(self) -> None:
        if self.data_dir and not self.figure:
            raise SettingError("data_dir", "needs --figure")


@script
def main(argv: Sequence[str]) -> None:
    config, options, given = parse(
        Config, Options, argv, "Draw toys in the files of smallNORB, or a sheet of them.",
        ("", "The whole set, 48,600 pairs of pictures, into the folder toys: about 1 minute."),
        ("--figure sheet.png", "A sheet of all fifty toys: about 2 seconds."),
        epilog="The six files go to --out-dir; more.conv_matrix_capsules --dataset smallnorb --data-dir DIR reads"
        " them.",
    )
    require_writable(*filter(None, [options.figure]))
    if options.figure and "out_dir" in given:
        raise SettingError("out_dir", "not together with --figure")
    if options.figure:
        print(write_if_changed(options.figure, contact_sheet(config.seed, options.data_dir), overwrite=True))
    else:
        for path in config.out_dir.glob("smallnorb-*"):  # of the real set, or drawn
            raise UserError(f"{config.out_dir} has a {path.name} already: name another folder with --out-dir")
        write_toy_norb(config.out_dir, config.seed, options.threads)
        print(f"wrote {config.out_dir}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
