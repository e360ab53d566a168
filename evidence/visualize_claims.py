"""The verdicts on the papers' claims, from results/claims.json.

    python -m evidence.visualize_claims            # viz/claims/verdicts.png and earlier.png: the rounds before

A line for each condition under which a claim was tested: the difference of two accuracies over the same seeds, in
percentage points, its 95 % interval (thick: adjusted for all comparisons, or looks at them), and the verdict. Claims
whose differences are larger than the others have an axis of their own.
"""

from __future__ import annotations

from support.experiment import ROOT

from support.figures import (
    BLUE, GREEN, GREY, VERMILLION, OutOptions, Settings, darkened, figure_script, head_legend, lightened, make_figure,
    plural, with_minus_sign,
)

import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from evidence.claims import ALPHA
from evidence.report import CLAIMS
from support.result_tables import show_points
from support.results import read_result
from support.statistics import t_quantile

COLOURS = {"holds": BLUE, "reversed": VERMILLION, "equal": GREEN}  # words of verdicts; all others are grey
WIDE = 20.0  # points: a claim with a larger interval or difference stands on the second axis
CLAIM_WIDTH = 34  # letters of a line
GAP = 0.55  # lines between two claims


def plain_half_width(condition: dict[str, Any], n_looks: int) -> float:
    """Half of the plain 95 % interval of the mean difference; the adjusted one is at ALPHA / n_looks."""
    n = condition["n"]
    return (condition["high"] - condition["low"]) / 2 * t_quantile(n, ALPHA) / t_quantile(n, ALPHA / n_looks)


def is_wide(claim: dict[str, Any]) -> bool:
    ends = [c.get(key) for c in claim["conditions"] for key in ("low", "high", "difference")]
    return max((abs(100 * end) for end in ends if end is not None), default=0.0) > WIDE


def heads_of(claim: dict[str, Any]) -> list[str]:
    return textwrap.wrap(claim["claim"], CLAIM_WIDTH)


def n_lines(claims: Sequence[dict[str, Any]]) -> float:
    return sum(max(len(heads_of(claim)), len(claim["conditions"])) + GAP for claim in claims)


def draw_claims(axes: Sequence[Axes], claims: Sequence[dict[str, Any]], n_looks: int) -> None:
    """Claims and conditions on the first axes, differences on the second, numbers and words on the third."""
    words, ax, verdicts = axes
    for side in (words, verdicts):
        side.set_axis_off()
        side.set_xlim(0, 1)
    ax.set(ylim=(n_lines(claims), 0), yticks=[])
    ax.spines.left.set_visible(False)
    ax.grid(False, axis="y")
    ax.axvline(0, color=GREY, linewidth=1.1, zorder=1)
    y = GAP / 2
    for claim in claims:
        heads = heads_of(claim)
        for k, head in enumerate(heads):
            words.text(0, y + k + 0.5, head, fontweight="bold", va="center")
        for k, c in enumerate(claim["conditions"]):
            middle, colour = y + k + 0.5, COLOURS.get(c["verdict"], GREY)
            words.text(1, middle, c["condition"], color=GREY, va="center", ha="right")
            band = 100 * c["tolerance"]
            ax.fill_betweenx([middle - 0.5, middle + 0.5], -band, band, color=lightened(GREEN, 0.2), linewidth=0,
                             zorder=0, label=f"tolerance {c['condition']}")
            style: dict[str, Any] = {"color": darkened(colour), "fontweight": "bold"}
            verdicts.text(0.42, middle, c["verdict"], va="center", **style)
            if "difference" not in c:
                continue
            if c["low"] is not None:
                half, at = 100 * plain_half_width(c, n_looks), 100 * c["difference"]
                ax.plot([100 * c["low"], 100 * c["high"]], [middle] * 2, color=lightened(colour, 0.55), linewidth=4.5,
                        solid_capstyle="butt", label=f"adjusted {c['condition']}")
                ax.plot(
                    [at - half, at + half], [middle] * 2, color=colour, linewidth=1.4, label=f"plain {c['condition']}"
                )
            ax.plot([100 * c["difference"]], [middle], "o", color=colour, markersize=6, label=c["condition"])
            verdicts.text(0.33, middle, with_minus_sign(show_points(c).split()[0]), va="center", ha="right")
        y += max(len(heads), len(claim["conditions"])) + GAP
        ax.axhline(y - GAP / 2, color="#e4e4e4", linewidth=0.8, zorder=0)
    ax.xaxis.set_major_formatter(lambda value, _: with_minus_sign(f"{value:+g}") if value else "0")


def draw_verdicts(document: dict[str, Any]) -> Figure:
    """Those of the registered round; what has not been run to its last seed has a row too."""
    claims, n = document["registered"], document["n_comparisons"]
    return draw_round(claims, n, "What the papers claim, and what is found here", f"adjusted for up to {n} comparisons")


def draw_earlier(document: dict[str, Any]) -> Figure:
    """Those of the rounds before."""
    claims, n = document["claims"], document["n_looks"]
    ran = [claim | {"conditions": [c for c in claim["conditions"] if "difference" in c]} for claim in claims]
    listed = plural(sum(len(claim["conditions"]) for claim in claims), "comparison")
    ran = [claim for claim in ran if claim["conditions"]]
    return draw_round(ran, n, "Earlier rounds, exploratory", f"adjusted for {n} looks at {listed}")


def draw_round(claims: Sequence[dict[str, Any]], n_looks: int, title: str, adjusted: str) -> Figure:
    groups = [group for wide in (False, True) if (group := [c for c in claims if is_wide(c) == wide])]
    lines = [n_lines(group) for group in groups]
    fig = make_figure(
        1.1 + 0.205 * sum(lines) + 0.55 * len(groups), title,
        "difference of two accuracies over the same seeds, in percentage points: right of 0 in favour of the claim",
    )
    head_legend(fig, [
        Line2D([], [], color=GREY, linewidth=1.4, label="95 % interval"),
        Line2D([], [], color=lightened(GREY, 0.55), linewidth=4.5, label=f"{adjusted}: gives the verdict"),
        Patch(facecolor=lightened(GREEN, 0.2), label="counts as equal"),
    ])
    axes = fig.subplots(len(groups), 3, squeeze=False, sharey="row", width_ratios=(6.6, 2.7, 1.5), height_ratios=lines)
    for row, group in zip(axes, groups, strict=True):
        draw_claims(row, group, n_looks)
    if len(groups) > 1:
        axes[1, 1].set_xlabel("points, on another scale")
    return fig


# --- Command line -----------------------------------------------------------------------------------------------------


main = figure_script(
    "claims", Settings, OutOptions, "Draw the verdicts on the papers' claims.",
    ("", "Both pictures, of the committed results: about 2 seconds."),
    prepare=lambda *_: read_result(ROOT / CLAIMS), of_run={"verdicts": draw_verdicts, "earlier": draw_earlier},
    n_colours={"verdicts": 96, "earlier": 96},
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
