"""Draw time and memory of a training step from results/benchmarks/scaling.json: ``python -m benchmarks.figure``."""

from __future__ import annotations

import support.startup  # noqa: F401  before the others, for Ctrl-C

# isort: split

import argparse
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter, StrMethodFormatter

from report import read_result

from support.figures import (  # isort: skip
    BLACK, BLUE, GREEN, GREY, VERMILLION, add_axes, add_legend, lightened, new_figure, write_figures,
)  # fmt: skip
from support.console import exit_status
from support.files import UserError, require_writable
from support.flags import Parser

NETWORKS = {
    "multimnist": ("CapsNet", BLUE),
    "smallnorb": ("dense matrix capsules", VERMILLION),
    "matrix_capsules": ("convolutional matrix capsules", GREEN),
}
UNITS = {"ms": "time of a step, ms", "MiB": "peak memory, MiB"}
LEFT, WIDTH, HEIGHT, STEP = (0.9, 5.45), 3.4, 2.1, 2.95  # inches


def columns_in(table: dict[str, Any], unit: str) -> list[int]:
    """Its columns in ``unit``, in the order of the numbers of threads."""
    return [k for k, column in enumerate(table["columns"]) if column.endswith(f", {unit}")]


def draw_lines(ax: Axes, tables: dict[str, Any], suffix: str, unit: str) -> None:
    """Log-log, a line per network and number of threads; dashed where there is one thread."""
    values = set()
    for name, (_, colour) in NETWORKS.items():
        if table := tables.get(f"{name}_{suffix}"):
            x = [int(row[0]) for row in table["rows"]]
            values |= {*x}
            for k, style in zip(columns_in(table, unit), ("--", "-"), strict=False):
                ax.plot(x, [row[k] for row in table["rows"]], style, marker="o", markersize=4, color=colour)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sorted(values))
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def draw_bars(ax: Axes, tables: dict[str, Any], unit: str) -> None:
    """A pair of bars per network and size; the pale one has one thread."""
    labels: list[str] = []
    for name, (label, colour) in NETWORKS.items():
        if table := tables.get(f"{name}_sizes"):
            for row in table["rows"]:
                for n, k in enumerate(columns_in(table, unit)):
                    bar = ax.barh(len(labels) + 0.38 * n, row[k], 0.36, color=lightened(colour, 0.5 if n == 0 else 1))
                    ax.bar_label(bar, fmt="{:,.0f}", padding=2, fontsize=8.5)
                labels.append(f"{label.split()[0]},\n{row[0]}".replace("convolutional", "conv."))
    ax.set_xlim(right=1.2 * ax.get_xlim()[1])
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.set_yticks([k + 0.19 for k in range(len(labels))], labels, fontsize=8)
    ax.invert_yaxis()
    ax.grid(False, axis="y")


def draw_scaling(tables: dict[str, Any]) -> Figure:
    """Time on the left, memory on the right: against batch size, against width, and at default and paper sizes."""
    fig = new_figure(
        9.6, "Time and memory of a training step", "numpy; each point a new process; both axes of the lines logarithmic"
    )
    handles = [Line2D([], [], color=colour, marker="o", label=label) for label, colour in NETWORKS.values()]
    threads = [column.split(",")[0] for column in tables["multimnist_batch"]["columns"][1:]]
    styles: Any = zip(dict.fromkeys(threads), ("--", "-"), strict=False)
    handles += [Line2D([], [], color=BLACK, linestyle=style, label=label) for label, style in styles]
    add_legend(fig, 0.12, 0.68, handles, ncols=5, columnspacing=1.3)
    for left, (unit, title) in zip(LEFT, UNITS.items(), strict=True):
        for row, (suffix, label) in enumerate({"batch": "batch size", "width": "channels or capsule types"}.items()):
            ax = add_axes(fig, left, 1.2 + row * STEP, WIDTH, HEIGHT)
            draw_lines(ax, tables, suffix, unit)
            ax.set(xlabel=label, title=title)
        ax = add_axes(fig, left + 0.25, 1.2 + 2 * STEP, WIDTH - 0.25, HEIGHT)
        draw_bars(ax, tables, unit)
        ax.set_xlabel(f"{title}; pale: 1 thread", color=GREY)
    return fig


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m benchmarks.figure", description=__doc__)
    # fmt: off
    parser.add_argument("--results", type=Path, metavar="FILE", default=Path("results/benchmarks/scaling.json"),
        help="Draw this. Default: %(default)s.")
    parser.add_argument("--outdir", type=Path, metavar="DIR", default=Path("viz"),
        help="The figure goes to DIR/speed/. Default: %(default)s.")
    # fmt: on
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)

    def body() -> None:
        document = read_result(args.results)
        require_writable(args.outdir / "speed" / "scaling.png")
        try:
            write_figures(args.outdir / "speed", {"scaling": lambda: draw_scaling(document["tables"])})
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):  # it is another result
            command = f"python -m benchmarks --scaling --out {args.results}"
            raise UserError(f"{args.results} has no such tables: {command}") from None

    return exit_status(body)


if __name__ == "__main__":
    sys.exit(main())
