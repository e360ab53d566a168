#!/usr/bin/env python3
"""What each part of a CapsNet adds to a CNN, as a picture, from committed results.

    python visualize_parts.py            # viz/claims/parts.png

A row for each network between the CNN and the CapsNet, in which the five parts of [Gu 2021] are switched on one by one,
and a column for each test. The docstring of ``multimnist_capsnet.py`` names the parts and their flags.

[Gu 2021] J. Gu, V. Tresp, H. Hu, "Capsule network is not more robust than convolutional network", CVPR 2021 (arXiv
2103.15459)
"""

from __future__ import annotations

import support.headless  # noqa: F401  before matplotlib

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from claims import Runs, runs_by_seed
from support.files import UserError
from support.result_tables import show_mean
from support.script import script
from support.settings import folder, parse, setting
from support.statistics import describe_sample, read_comparison

from support.figures import (  # isort: skip
    BLUE, GREY, VERMILLION, OutOptions, bare, make_figure, plural, with_minus_sign, write_figures,
)  # fmt: skip

RESULTS = Path("results")
DIGITS, AFFINE = "multimnist_capsnet", "mnist_affine_capsnet"
NO_SQUASH = "activation=relu capsnet-loss=cross-entropy recon-weight=0"
SQUASH = "assignments=routed activation=squash capsnet-loss=cross-entropy recon-weight=0"


class Row(NamedTuple):
    name: str
    remark: str
    digits: Runs  # 48,000 overlapping digits
    affine: Runs  # distorted digits, at 0.98 on upright ones


def parts(setting: str, digits: str, affine: str) -> tuple[Runs, Runs]:
    """A network with some parts, whose setting has another end in the two files."""
    return (
        Runs(f"{DIGITS}/parts.json", "capsnet", f"{setting} {digits}"),
        Runs(f"{AFFINE}/affnist_parts.json", "capsnet", f"{setting} {affine}"),
    )


ROWS = (
    Row("CNN", "no pooling on overlapping digits", Runs(f"{DIGITS}/scaling_cnn_48000.json", "cnn"),
        Runs(f"{AFFINE}/affnist_cnn.json", "cnn")),
    Row("+ transformation", "a matrix for each part and whole",
        *parts(f"assignments=uniform {NO_SQUASH}", "transform=own", "lr=0.004")),
    Row("+ routing", "three iterations", *parts(f"assignments=routed {NO_SQUASH}", "transform=own", "lr=0.002")),
    Row("+ squash", "instead of ReLU", *parts(SQUASH, "transform=own", "lr=0.002")),
    Row("+ margin loss", "instead of cross-entropy", Runs(f"{DIGITS}/no_reconstruction.json", "capsnet"),
        Runs(f"{AFFINE}/affnist_parts.json", "capsnet",
             "assignments=routed activation=squash capsnet-loss=margin recon-weight=0 lr=0.004")),
    Row("+ reconstruction", "the complete CapsNet", Runs(f"{DIGITS}/scaling_capsnet_48000.json", "capsnet"),
        Runs(f"{AFFINE}/affnist_capsnet.json", "capsnet")),
    Row("shared transformation", "one for all parts; no routing",
        Runs(f"{DIGITS}/parts.json", "capsnet", "assignments=uniform activation=squash capsnet-loss=margin"
             " recon-weight=0.005 transform=shared"),
        Runs(f"{AFFINE}/affnist_shared.json", "capsnet")),
)  # fmt: skip
COLUMNS = (
    ("overlapping:\nboth right", "digits", "set_accuracy"),
    ("distorted", "affine", "affnist_accuracy"),
    ("turned by 35°", "affine", "rotated_35_accuracy"),
    ("upright", "affine", "upright_accuracy"),
)  # of a Row; the runs of a column have the same training
LIMIT = 0.15  # difference from the CNN at which colours end
COLOURS = LinearSegmentedColormap.from_list("difference", [VERMILLION, "white", BLUE])


def read_samples(folder: Path) -> list[list[dict[str, Any]]]:
    """For each row and column the sample of its runs, see ``describe_sample``. Raises UserError."""
    samples: list[list[dict[str, Any]]] = []
    for row in ROWS:
        samples.append([])
        for _, side, metric in COLUMNS:
            runs: Runs = getattr(row, side)
            document = read_comparison(folder / runs.file)
            try:
                found = runs_by_seed(document, runs).values()
                samples[-1].append(describe_sample([run["models"][runs.model][metric] for run in found]))
            except (KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{folder / runs.file} has no runs of {row.name} with {metric}") from error
    return samples


def draw_parts(samples: list[list[dict[str, Any]]]) -> Figure:
    """A heat map: mean and half of its 95 % interval, coloured by the difference of the mean from the CNN's."""
    counts = sorted({sample["n"] for row in samples for sample in row})
    seeds = plural(counts[-1], "seed") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    subtitle = f"means over {seeds}, half of their 95 % intervals; colour: difference from the CNN"
    fig = make_figure(4.9, "The parts of a CapsNet, switched on one by one", subtitle)
    means = np.array([[sample["mean"] for sample in row] for row in samples])
    ax = fig.subplots()
    image = ax.imshow(means - means[0], cmap=COLOURS, vmin=-LIMIT, vmax=LIMIT, aspect="auto")
    ax.axhline(len(ROWS) - 1.5, color=GREY, linewidth=1.2)  # what follows is no step of the series
    for i, k in np.ndindex(means.shape):
        ax.text(k, i, show_mean(samples[i][k], 3), ha="center", va="center", fontsize=10)
    ax.xaxis.tick_top()
    ax.set_xticks(range(len(COLUMNS)), [head for head, *_ in COLUMNS], fontweight="bold", fontsize=9.5)
    ax.set_yticks(range(len(ROWS)), [f"{row.name}\n{row.remark}" for row in ROWS])
    bare(ax)
    bar = fig.colorbar(image, ax=ax, orientation="horizontal", shrink=0.5, aspect=40, anchor=(1, 0))
    bar.set_ticks([-LIMIT, 0, LIMIT], labels=[with_minus_sign(f"{-LIMIT:.2f}"), "the CNN's", f"{LIMIT:+.2f}"])
    return fig


@dataclasses.dataclass(frozen=True)
class Inputs:
    results: Path = setting(RESULTS, folder, "Folder of the results.", usual=True)


@script
def main(argv: Sequence[str] | None = None) -> None:
    inputs, options, _ = parse(
        Inputs, OutOptions, argv, "Draw what each part of a CapsNet adds to a CNN.",
        [("", "The picture of the committed results: about 1 second.")],
        "The picture goes to DIR/claims/, where DIR is --outdir.",
    )  # fmt: skip
    samples = read_samples(inputs.results)
    write_figures(options.outdir / "claims", {"parts": lambda: draw_parts(samples)})


if __name__ == "__main__":
    sys.exit(main())
