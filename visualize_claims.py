#!/usr/bin/env python3
"""The verdicts on the papers' claims as a picture, from results/claims.json.

    python visualize_claims.py            # viz/claims/verdicts.png

Writes one picture: for each claim and each condition under which it was tested, the difference of two accuracies with
its interval, and the verdict.
"""

from __future__ import annotations

import support.startup  # noqa: F401  before the others, for Ctrl-C

# isort: split

import argparse
import math
import sys
import textwrap
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from report import CLAIMS, read_result

from support.figures import (  # isort: skip
    BLUE, GREEN, GREY, VERMILLION, add_axes, add_outdir, add_text, darkened, new_figure, plural, with_minus_sign,
    write_figures,
)  # fmt: skip
from support.console import exit_status
from support.files import UserError, require_writable
from support.flags import Parser

COLOURS = {"holds": BLUE, "reversed": VERMILLION, "equal": GREEN}  # all others are grey
LINEAR = 0.1  # beyond it the axis is logarithmic
ROW, GAP, TOP = 0.245, 0.2, 0.78  # inches
CLAIM_WIDTH = 38  # letters of a line


def draw_verdicts(document: dict[str, Any]) -> Figure:
    """A row for each condition that has been run, under its claim."""
    ran = [claim | {"conditions": [c for c in claim["conditions"] if "difference" in c]}
           for claim in document["claims"]]  # fmt: skip
    document = document | {"claims": [claim for claim in ran if claim["conditions"]]}
    heads = [textwrap.wrap(claim["claim"], CLAIM_WIDTH) for claim in document["claims"]]
    heights = [
        max(len(head), len(claim["conditions"])) * ROW + GAP
        for head, claim in zip(heads, document["claims"], strict=True)
    ]
    total = sum(heights)
    n = plural(document["n_comparisons"], "comparison")
    subtitle = f"differences of accuracies over the same seeds, with intervals adjusted for {n}"
    fig = new_figure(TOP + total + 0.65, "What the papers claim, and what is found here", subtitle)
    ax = add_axes(fig, 5.05, TOP, 2.35, total)
    limit = 0.05 * math.ceil(
        20 * max(abs(c[key] or c["difference"]) for claim in document["claims"] for c in claim["conditions"]
                 for key in ("low", "high"))
    )  # fmt: skip
    ax.set_xscale("symlog", linthresh=LINEAR, linscale=1.2)
    ax.set_xlim(-limit, limit)
    ax.set_ylim(total, 0)
    ax.axvline(0, color=GREY, linewidth=1.1)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.grid(False, axis="y")
    ax.axvspan(-LINEAR, LINEAR, color="#f1f1f1", linewidth=0)
    ax.set_xlabel("← against the claim      in its favour →\n(shaded: linear; beyond: logarithmic)")
    ticks = [x for x in (-0.6, -0.3, -LINEAR, -LINEAR / 2, 0, LINEAR / 2, LINEAR, 0.3, 0.6) if abs(x) <= limit]
    labelled = (-0.6, -LINEAR, LINEAR, 0.6)
    ax.set_xticks(ticks, [with_minus_sign(f"{x:+g}") if x in labelled else "" if x else "0" for x in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    y = 0.0
    for head, claim, height in zip(heads, document["claims"], heights, strict=True):
        for k, line in enumerate(head):
            add_text(fig, 0.12, TOP + y + GAP / 2 + k * ROW + 0.04, line, fontweight="bold")
        for k, c in enumerate(claim["conditions"]):
            middle, colour = y + GAP / 2 + (k + 0.5) * ROW, COLOURS.get(c["verdict"], GREY)
            add_text(fig, 3.3, TOP + middle - 0.08, c["condition"], color=GREY, fontsize=9)
            if c["low"] is not None:
                ax.plot([c["low"], c["high"]], [middle] * 2, color=colour, linewidth=2.2, solid_capstyle="butt")
            ax.plot([c["difference"]], [middle], "o", color=colour, markersize=6, clip_on=False)
            text = with_minus_sign(f"{c['difference']:+.3f}")
            add_text(fig, 7.5, TOP + middle - 0.08, text, fontsize=9)
            add_text(
                fig, 8.08, TOP + middle - 0.08, c["verdict"], color=darkened(colour), fontweight="bold", fontsize=9
            )
        y += height
        ax.axhline(y, color="#e4e4e4", linewidth=0.8)
    return fig


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        examples=[
            ("", "The picture of results/claims.json: about 2 seconds."),
            ("--outdir draft", "The same, into draft/claims/: about 2 seconds."),
            ("--claims other.json", "Of another file that report.py --claims has written: about 2 seconds."),
        ],
        description="Draw the verdicts on the papers' claims.",
        epilog="The picture goes to DIR/claims/, where DIR is --outdir.",
    )
    parser.add_argument("--claims", type=Path, metavar="FILE", default=CLAIMS,
        help="Draw the verdicts of this file. Default: %(default)s.")  # fmt: skip
    add_outdir(parser, "picture")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)

    def body() -> None:
        folder = args.outdir / "claims"
        document = read_result(args.claims)
        require_writable(folder / "verdicts.png")
        try:
            write_figures(folder, {"verdicts": lambda: draw_verdicts(document)}, {"verdicts": 64})
        except (KeyError, TypeError, ValueError, AttributeError):  # it is another result
            raise UserError(f"{args.claims} holds no claims: python report.py --claims writes it") from None

    return exit_status(body)


if __name__ == "__main__":
    sys.exit(main())
