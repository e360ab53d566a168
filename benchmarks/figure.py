"""Draw the training steps of results/benchmarks/: ``python -m benchmarks.figure``.

scaling.png   time and memory of a step against batch size and width, and at the papers' sizes
steps.png     time of a step, and of the same network in PyTorch and JAX
"""

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
LABELS = {"batch": "batch size", "width": "conv1 channels (CapsNet) or capsule types (conv.)"}
LEFT, WIDTH, HEIGHT, STEP = (1.0, 5.5), 3.35, 2.1, 2.95  # inches


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
                    ax.bar_label(bar, fmt="{:,.0f}", padding=2, fontsize=9)
                labels.append(f"{label.split()[0]},\n{row[0]}".replace("convolutional", "conv."))
    ax.set_xlim(right=1.2 * ax.get_xlim()[1])
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.set_yticks([k + 0.19 for k in range(len(labels))], labels, fontsize=9)
    ax.invert_yaxis()
    ax.grid(False, axis="y")


def draw_scaling(tables: dict[str, Any]) -> Figure:
    """Time on the left, memory on the right: against batch size, against width, and at default and paper sizes."""
    text = "numpy; each point a new process; both axes of the lines logarithmic"
    fig = new_figure(9.75, "Time and memory of a training step", text)
    handles = [Line2D([], [], color=colour, marker="o", label=label) for label, colour in NETWORKS.values()]
    threads = [column.split(",")[0] for column in tables["multimnist_batch"]["columns"][1:]]
    styles: Any = zip(dict.fromkeys(threads), ("--", "-"), strict=False)
    handles += [Line2D([], [], color=BLACK, linestyle=style, label=label) for label, style in styles]
    add_legend(fig, 0.12, 0.68, handles, ncols=5, columnspacing=1.3)
    for left, (unit, title) in zip(LEFT, UNITS.items(), strict=True):
        for row, (suffix, label) in enumerate(LABELS.items()):
            ax = add_axes(fig, left, 1.2 + row * STEP, WIDTH, HEIGHT)
            draw_lines(ax, tables, suffix, unit)
            ax.set(xlabel=label, title=title)
        ax = add_axes(fig, left + 0.25, 1.2 + 2 * STEP, WIDTH - 0.25, HEIGHT)
        draw_bars(ax, tables, unit)
        ax.set_xlabel(f"{title}; pale: 1 thread", color=GREY)
    return fig


FORMS = {  # of a step, by their names in the tables
    "numpy": "numpy", "PyTorch eager": "PyTorch",
    "torch.compile, fused Adam, channels-last": "PyTorch, compiled", "JAX, jit": "JAX",
}  # fmt: skip


def draw_steps(tables: dict[str, Any]) -> Figure:
    """A panel for each network, a bar for each form of its step."""
    text = "batch of 32, two processor cores; each panel has a scale of its own"
    fig = new_figure(2.6, "Time of a training step", text)
    forms = [form for form in FORMS if all(form in {row[0] for row in tables[name]["rows"]} for name in NETWORKS)]
    for k, (name, (label, colour)) in enumerate(NETWORKS.items()):
        ax = add_axes(fig, 1.45 + 2.52 * k, 0.98, 2.2, 1.5)
        ms = {row[0]: row[tables[name]["columns"].index("ms")] for row in tables[name]["rows"]}
        colours = [colour if form == "numpy" else lightened(GREY, 0.5) for form in forms]
        bars = ax.barh(range(len(forms)), [ms[form] for form in forms], 0.7, color=colours)
        ax.bar_label(bars, fmt="{:.3g} ms", padding=2, fontsize=9)
        ax.set_title(label, loc="left")
        ax.set_xlim(right=1.35 * ax.get_xlim()[1])
        ax.set_yticks(range(len(forms)), [FORMS[form] if k == 0 else "" for form in forms])
        ax.invert_yaxis()
        ax.grid(False)
        ax.set_xticks([])
        ax.spines.bottom.set_visible(False)
        ax.tick_params(length=0)
    return fig


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m benchmarks.figure",
        description="Draw the training steps of results/benchmarks/ as scaling.png and steps.png.",
    )
    # fmt: off
    parser.add_argument("--results", type=Path, metavar="FILE", default=Path("results/benchmarks/scaling.json"),
        help="Draw scaling.png of this. Default: %(default)s.")
    parser.add_argument("--steps", type=Path, metavar="FILE", default=Path("results/benchmarks/steps.json"),
        help="Draw steps.png of this. Default: %(default)s.")
    parser.add_argument("--outdir", type=Path, metavar="DIR", default=Path("viz"),
        help="The figures go to DIR/speed/. Default: %(default)s.")
    # fmt: on
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)

    def body() -> None:
        scaling, steps = read_result(args.results), read_result(args.steps)
        require_writable(args.outdir / "speed" / "scaling.png")
        drawers = {"scaling": (args.results, " --scaling", lambda: draw_scaling(scaling["tables"])),
                   "steps": (args.steps, "", lambda: draw_steps(steps["tables"]))}  # fmt: skip
        for name, (path, flag, draw) in drawers.items():
            try:
                write_figures(args.outdir / "speed", {name: draw})
            except (KeyError, TypeError, ValueError, IndexError, AttributeError):  # it is another result
                raise UserError(f"{path} has no such tables: python -m benchmarks{flag} --out {path}") from None

    return exit_status(body)


if __name__ == "__main__":
    sys.exit(main())
