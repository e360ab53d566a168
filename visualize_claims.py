#!/usr/bin/env python3
"""The verdicts on the papers' claims, and what each part of a CapsNet adds to a CNN, from committed results.

    python visualize_claims.py            # viz/claims/verdicts.png and parts.png

    verdicts.png  a line for each condition under which a claim was tested: the difference of two accuracies over the
                  same seeds, in percentage points, its 95 % interval (thick: adjusted for all comparisons), and the
                  verdict; claims whose differences are larger than the others have an axis of their own
    parts.png     a row for each network between the CNN and the CapsNet, in which the five parts of [Gu 2021] are
                  switched on one by one, and a column for each test; ``multimnist_capsnet.py`` names their flags

[Gu 2021] J. Gu, V. Tresp, H. Hu, "Capsule network is not more robust than convolutional network", CVPR 2021 (arXiv
2103.15459)
"""

from __future__ import annotations

import support.headless  # noqa: F401  before matplotlib

import dataclasses
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from claims import ALPHA, Runs, runs_by_seed
from report import CLAIMS, read_result
from support.files import UserError
from support.result_tables import show_mean
from support.script import script
from support.settings import folder, input_path, parse, setting
from support.statistics import describe_sample, read_comparison, t_quantile

from support.figures import (  # isort: skip
    BLUE, GREEN, GREY, VERMILLION, OutOptions, bare, choice_of_figures, darkened, head_legend, lightened, make_figure,
    plural, with_minus_sign, write_figures,
)  # fmt: skip

# --- The verdicts -----------------------------------------------------------------------------------------------------

COLOURS = {"holds": BLUE, "reversed": VERMILLION, "equal": GREEN}  # words of verdicts; all others are grey
WIDE = 20.0  # points: a claim with a larger interval or difference stands on the second axis
BAND = 2.0  # points: differences that count as equal
CLAIM_WIDTH = 41  # letters of a line
GAP = 0.55  # lines between two claims


def plain_half_width(condition: dict[str, Any], n_comparisons: int) -> float:
    """Half of the plain 95 % interval of the mean difference; the adjusted one is at ALPHA / n_comparisons."""
    n = condition["n"]
    return (condition["high"] - condition["low"]) / 2 * t_quantile(n, ALPHA) / t_quantile(n, ALPHA / n_comparisons)


def is_wide(claim: dict[str, Any]) -> bool:
    ends = [c[key] for c in claim["conditions"] for key in ("low", "high", "difference")]
    return max(abs(100 * end) for end in ends if end is not None) > WIDE


def heads_of(claim: dict[str, Any]) -> list[str]:
    return textwrap.wrap(claim["claim"], CLAIM_WIDTH)


def n_lines(claims: Sequence[dict[str, Any]]) -> float:
    return sum(max(len(heads_of(claim)), len(claim["conditions"])) + GAP for claim in claims)


def draw_claims(axes: Sequence[Axes], claims: Sequence[dict[str, Any]], n_comparisons: int) -> None:
    """Claims and conditions on the first axes, differences on the second, numbers and words on the third."""
    words, ax, verdicts = axes
    for side in (words, verdicts):
        side.set_axis_off()
        side.set_xlim(0, 1)
    ax.set(ylim=(n_lines(claims), 0), yticks=[])
    ax.spines.left.set_visible(False)
    ax.grid(False, axis="y")
    ax.axvspan(-BAND, BAND, color=lightened(GREEN, 0.2), linewidth=0, zorder=0)
    ax.axvline(0, color=GREY, linewidth=1.1, zorder=1)
    y = GAP / 2
    for claim in claims:
        heads = heads_of(claim)
        for k, head in enumerate(heads):
            words.text(0, y + k + 0.5, head, fontweight="bold", va="center")
        for k, c in enumerate(claim["conditions"]):
            middle, colour = y + k + 0.5, COLOURS.get(c["verdict"], GREY)
            words.text(1, middle, c["condition"], color=GREY, va="center", ha="right")
            if c["low"] is not None:
                half, at = 100 * plain_half_width(c, n_comparisons), 100 * c["difference"]
                ax.plot([100 * c["low"], 100 * c["high"]], [middle] * 2, color=lightened(colour, 0.55), linewidth=4.5,
                        solid_capstyle="butt", label=f"adjusted {c['condition']}")  # fmt: skip
                ax.plot(
                    [at - half, at + half], [middle] * 2, color=colour, linewidth=1.4, label=f"plain {c['condition']}"
                )
            ax.plot([100 * c["difference"]], [middle], "o", color=colour, markersize=6, label=c["condition"])
            verdicts.text(0.33, middle, with_minus_sign(f"{100 * c['difference']:+.1f}"), va="center", ha="right")
            style: dict[str, Any] = {"color": darkened(colour), "fontweight": "bold"}
            verdicts.text(0.42, middle, c["verdict"], va="center", **style)
        y += max(len(heads), len(claim["conditions"])) + GAP
        ax.axhline(y - GAP / 2, color="#e4e4e4", linewidth=0.8, zorder=0)
    ax.xaxis.set_major_formatter(lambda value, _: with_minus_sign(f"{value:+g}") if value else "0")


def draw_verdicts(document: dict[str, Any]) -> Figure:
    ran = [claim | {"conditions": [c for c in claim["conditions"] if "difference" in c]}
           for claim in document["claims"]]  # fmt: skip
    claims = [claim for claim in ran if claim["conditions"]]
    if document["claims"] and not claims:
        raise UserError("results/claims.json has no condition that has been run")
    groups = [group for wide in (False, True) if (group := [c for c in claims if is_wide(c) == wide])]
    lines = [n_lines(group) for group in groups]
    n = plural(document["n_comparisons"], "comparison")
    fig = make_figure(
        1.1 + 0.205 * sum(lines) + 0.55 * len(groups), "What the papers claim, and what is found here",
        "difference of two accuracies over the same seeds, in percentage points: right of 0 in favour of the claim",
    )  # fmt: skip
    head_legend(fig, [
        Line2D([], [], color=GREY, linewidth=1.4, label="95 % interval"),
        Line2D([], [], color=lightened(GREY, 0.55), linewidth=4.5, label=f"adjusted for {n}: gives the verdict"),
        Patch(facecolor=lightened(GREEN, 0.2), label=f"equal within {BAND:g} points"),
    ])  # fmt: skip
    axes = fig.subplots(len(groups), 3, squeeze=False, sharey="row", width_ratios=(6.6, 2.7, 1.5), height_ratios=lines)
    for row, group in zip(axes, groups, strict=True):
        draw_claims(row, group, document["n_comparisons"])
    if len(groups) > 1:
        axes[1, 1].set_xlabel("points, on another scale")
    return fig


# --- The parts of a CapsNet -------------------------------------------------------------------------------------------

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
        Runs(f"{DIGITS}/parts.json#switched_on", "capsnet", f"{setting} {digits}"),
        Runs(f"{AFFINE}/parts.json#switched_on", "capsnet", f"{setting} {affine}"),
    )


ROWS = (
    Row("CNN", "no pooling on overlapping digits", Runs(f"{DIGITS}/scaling.json#cnn_48000", "cnn"),
        Runs(f"{AFFINE}/parts.json#cnn", "cnn")),
    Row("+ transformation", "a matrix for each part and whole",
        *parts(f"assignments=uniform {NO_SQUASH}", "transform=own", "lr=0.004")),
    Row("+ routing", "three iterations", *parts(f"assignments=routed {NO_SQUASH}", "transform=own", "lr=0.002")),
    Row("+ squash", "instead of ReLU", *parts(SQUASH, "transform=own", "lr=0.002")),
    Row("+ margin loss", "instead of cross-entropy", Runs(f"{DIGITS}/parts.json#no_reconstruction", "capsnet"),
        Runs(f"{AFFINE}/parts.json#switched_on", "capsnet",
             "assignments=routed activation=squash capsnet-loss=margin recon-weight=0 lr=0.004")),
    Row("+ reconstruction", "the complete CapsNet", Runs(f"{DIGITS}/scaling.json#capsnet_48000", "capsnet"),
        Runs(f"{AFFINE}/parts.json#capsnet", "capsnet")),
    Row("shared transformation", "one for all parts; no routing",
        Runs(f"{DIGITS}/parts.json#switched_on", "capsnet", "assignments=uniform activation=squash capsnet-loss=margin"
             " recon-weight=0.005 transform=shared"),
        Runs(f"{AFFINE}/parts.json#shared", "capsnet")),
)  # fmt: skip
COLUMNS = (
    ("overlapping:\nboth right", "digits", "set_accuracy"),
    ("distorted", "affine", "affnist_accuracy"),
    ("turned by 35°", "affine", "rotated_35_accuracy"),
    ("upright", "affine", "upright_accuracy"),
)  # of a Row; the runs of a column have the same training
LIMIT = 0.15  # difference from the CNN at which colours end
DIFFERENCES = LinearSegmentedColormap.from_list("difference", [VERMILLION, "white", BLUE])


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
    image = ax.imshow(means - means[0], cmap=DIFFERENCES, vmin=-LIMIT, vmax=LIMIT, aspect="auto")
    ax.axhline(len(ROWS) - 1.5, color=GREY, linewidth=1.2)  # what follows is no step of the series
    for i, k in np.ndindex(means.shape):
        ax.text(k, i, show_mean(samples[i][k], 3), ha="center", va="center", fontsize=10)
    ax.xaxis.tick_top()
    ax.set_xticks(range(len(COLUMNS)), [head for head, *_ in COLUMNS], fontweight="bold", fontsize=9.5)
    ax.set_yticks(range(len(ROWS)), [f"{row.name}\n{row.remark}" for row in ROWS])
    bare(ax)
    bar = fig.colorbar(image, ax=ax, orientation="horizontal", shrink=0.5, aspect=40, anchor=(1, 0))
    end = f"{100 * LIMIT:g} points"
    bar.set_ticks([-LIMIT, 0, LIMIT], labels=[f"−{end}", "as the CNN", f"+{end}"])
    return fig


# --- Command line -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    claims: Path = setting(CLAIMS, input_path, "Draw the verdicts of this file.", usual=True)
    results: Path = setting(RESULTS, folder, "Folder of the results of the parts.", usual=True)


@dataclasses.dataclass(frozen=True)
class Options(OutOptions):
    figures: tuple[str, ...] = choice_of_figures("verdicts", "parts")


@script
def main(argv: Sequence[str] | None = None) -> None:
    inputs, options, _ = parse(
        Config, Options, argv, "Draw the verdicts on the papers' claims, and what each part of a CapsNet adds.",
        [
            ("", "The pictures of the committed results: about 2 seconds."),
            ("--figures parts", "One of them: about 1 second."),
        ],
        "The pictures go to DIR/claims/, where DIR is --outdir.",
    )  # fmt: skip
    if not options.figures or "verdicts" in options.figures:
        document = read_result(inputs.claims)
        try:
            write_figures(options.outdir / "claims", {"verdicts": lambda: draw_verdicts(document)}, {"verdicts": 96})
        except (KeyError, TypeError, ValueError, AttributeError):  # it is another result
            raise UserError(f"{inputs.claims} holds no claims: python report.py --claims writes it") from None
    if not options.figures or "parts" in options.figures:
        samples = read_samples(inputs.results)
        write_figures(options.outdir / "claims", {"parts": lambda: draw_parts(samples)})


if __name__ == "__main__":
    sys.exit(main())
