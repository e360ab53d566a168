#!/usr/bin/env python3
"""Draw toys in the files of smallNORB: 48,600 stereo pairs of fifty toys, in about a minute and 0.9 GB.

The set has the structure, the file names and the format of the real one (see data/toy_norb.py), so that everything
that reads smallNORB reads it:

    python make_toy_norb.py --out-dir toys
    python conv_matrix_capsules.py --dataset smallnorb --data-dir toys

How hard it is, by three baselines; and a sheet of all toys:

    python make_toy_norb.py --baselines --out-json results/toys/baselines.json
    python make_toy_norb.py --figure viz/toys/contact_sheet.png --data-dir smallnorb
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np

import conv_matrix_capsules as conv
from data.norb_files import read_norb
from fast.workers import blas_threads, default_threads
from support.figures import write_if_changed
from support.files import CACHE_DIR, UserError
from support.results import recorded_command, result_document, save_result
from support.script import script
from support.settings import SettingError, folder, input_path, int_in, output_path, parse, setting
from support.training import RunOptions

from data.toy_norb import (  # isort: skip
    AZIMUTHS, CATEGORIES, ELEVATIONS, INSTANCES, N_LIGHTINGS, SIDE, STEREO, cached_toys, draw_ground,
    draw_view, make_toy, shadow_maps, shadow_resampling, write_toy_norb,
)  # fmt: skip

Array = np.ndarray

EXPERIMENT = "make_toy_norb"
EVERY = 4  # one in so many test pairs is classified by its nearest neighbour
RIDGE = 1.0  # in units of the mean eigenvalue: of 1e-4 to 1 the best on one training toy of each category
CNN = conv.Config(
    dataset="toys", hold_out="nothing", standardize="image", cnn_epochs=12, sizes=(64, 8, 16, 16), cnn_lr=3e-3
)  # as many parameters as the paper's smaller capsule network


# --- Baselines --------------------------------------------------------------------------------------------------------


def read_pixels(folder: Path, subset: str) -> tuple[Array, Array]:
    """Pairs as rows of 4,608 grey levels (N, 2 * 48 * 48) float32, means of 2x2 pixels; labels (N,)."""
    labels, _, chunks = read_norb(folder, subset)
    rows = [
        pairs.reshape(-1, 2, SIDE // 2, 2, SIDE // 2, 2).mean(axis=(3, 5), dtype=np.float32).reshape(len(pairs), -1)
        for pairs in chunks
    ]
    return np.concatenate(rows), labels


def nearest_neighbour(train: Array, labels: Array, test: Array) -> Array:
    """Class of the nearest training row (N, E) by Euclidean distance, for each of the test rows (M, E)."""
    norms = (train * train).sum(axis=1)
    found = [(norms - 2 * (part @ train.T)).argmin(axis=1) for part in np.array_split(test, -(-len(test) // 256))]
    return labels[np.concatenate(found)]


def linear_classifier(train: Array, labels: Array, test: Array) -> Array:
    """Classes of the test rows by least squares to one-hot targets, with a ridge."""
    mean = train.mean(axis=0)
    x, y = train - mean, np.eye(len(CATEGORIES))[labels]
    values, vectors = np.linalg.eigh((x.T @ x).astype(np.float64))
    projected = vectors.T @ (x.T @ (y - y.mean(axis=0)))  # (E, classes)
    w = vectors @ (projected / (values + RIDGE * values.mean())[:, None])
    return ((test - mean) @ w + y.mean(axis=0)).argmax(axis=1)


def pixel_baselines(folder: Path) -> dict[str, dict[str, Any]]:
    """Test errors, as fractions, of two classifiers that know pixels alone."""
    (train, labels), (test, test_labels) = (read_pixels(folder, subset) for subset in ("training", "testing"))
    nearest = nearest_neighbour(train, labels, test[::EVERY])
    linear = linear_classifier(train, labels, test)
    return {
        "nearest_neighbour": {"error": float((nearest != test_labels[::EVERY]).mean()), "n_test": len(nearest)},
        "linear": {"error": float((linear != test_labels).mean()), "n_test": len(linear), "ridge": RIDGE},
    }


def grey_levels(folder: Path) -> dict[str, float]:
    """Mean over all test pairs of an image's mean and standard deviation."""
    chunks = read_norb(folder, "testing")[2]
    images = [np.stack([pairs.mean(axis=(2, 3)), pairs.std(axis=(2, 3))], axis=-1) for pairs in chunks]
    mean, spread = np.concatenate(images).mean(axis=(0, 1))
    return {"mean": float(mean), "spread": float(spread)}


def baselines(threads: int) -> dict[str, Any]:
    """Test errors of nearest neighbour, linear classifier and CNN on the whole set."""
    folder = cached_toys(Path(CACHE_DIR).expanduser(), CNN.seed)
    with blas_threads(threads):
        models = pixel_baselines(folder)
    cnn = conv.run(CNN, RunOptions(threads=threads), names=("cnn",))["models"]["cnn"]
    models["cnn"] = {"error": 1 - cnn["accuracy"]} | cnn
    result = result_document(EXPERIMENT, CNN, "toys", models, {}, threads, "error", 1 - 1 / len(CATEGORIES))
    return result | {"grey_levels": grey_levels(folder)}


def format_table(result: dict[str, Any]) -> str:
    lines = [f"test error of {name:<18} {m['error']:6.3f}" for name, m in result["models"].items()]
    levels = result["grey_levels"]
    return "\n".join([*lines, f"grey levels of an image: mean {levels['mean']:.0f}, spread {levels['spread']:.0f}"])


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


# fmt: off
@dataclasses.dataclass(frozen=True)
class Config:
    out_dir: Path = setting(Path("toys"), folder, "Folder of the six files.", usual=True, group="drawing")
    seed: int = setting(0, int_in(0, 2**32 - 1), "Seed of the toys.", usual=True)


@dataclasses.dataclass(frozen=True)
class Options:
    figure: Path | None = setting(None, output_path, "Draw all toys, one view each, as a PNG.", usual=True,
        group="instead of drawing the files")
    data_dir: Path | None = setting(None, input_path, "Add a row of real toys to --figure, from the files of smallNORB"
        " in this folder.", usual=True)
    baselines: bool = setting(False, bool, "Test nearest neighbour, a linear classifier and a CNN on the whole set of"
        " seed 0, in the cache.", usual=True)
    out_json: Path | None = setting(None, output_path, "Write the result of --baselines there.", usual=True)
    threads: int = setting(default_threads(), int_in(1, 256), "Use N threads. No bit of a drawing depends on it.",
        shown="one for each processor", group="running")
# fmt: on

    def check(self, given: Mapping[str, Any]) -> None:
        if self.out_json and not self.baselines:
            raise SettingError("out_json", "needs --baselines")
        if self.baselines and self.figure:
            raise SettingError("figure", "not together with --baselines")
        if self.data_dir and not self.figure:
            raise SettingError("data_dir", "needs --figure")
        if self.baselines and "seed" in given:
            raise SettingError("seed", "not together with --baselines")
        if (self.baselines or self.figure) and "out_dir" in given:
            raise SettingError("out_dir", "not together with --baselines or --figure")


@script
def main(argv: Sequence[str] | None = None) -> None:
    config, options, _ = parse(
        Config, Options, argv, "Draw toys in the files of smallNORB, measure how hard they are, or draw a sheet.",
        [("", "The whole set, 48,600 pairs of pictures, into the folder toys: about 1 minute."),
         ("--figure sheet.png", "A sheet of all fifty toys: about 2 seconds.")],
        "The six files go to --out-dir; conv_matrix_capsules.py --dataset smallnorb --data-dir DIR reads them.",
    )  # fmt: skip
    if options.baselines:
        result = baselines(options.threads)
        save_result(options.out_json, result, recorded_command(EXPERIMENT, argv))
        print(format_table(result))
    elif options.figure:
        print(write_if_changed(options.figure, contact_sheet(config.seed, options.data_dir)))
    else:
        for path in config.out_dir.glob("smallnorb-*"):  # of the real set, or drawn
            raise UserError(f"{config.out_dir} has a {path.name} already: name another folder with --out-dir")
        write_toy_norb(config.out_dir, config.seed, options.threads)
        print(f"wrote {config.out_dir}")


if __name__ == "__main__":
    sys.exit(main())
