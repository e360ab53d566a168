"""Draw the training steps of results/benchmarks/: ``python -m benchmarks.figure``.

scaling.png   time and memory of a step against batch size and width
steps.png     time of a step, and of the same network in PyTorch and JAX
"""

from __future__ import annotations

import support.headless  # noqa: F401  before matplotlib

import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter, StrMethodFormatter

from report import read_result
from support.files import UserError
from support.script import script
from support.settings import input_path, parse, setting

from support.figures import (  # isort: skip
    BLACK, BLUE, GREY, OutOptions, bare, head_legend, lightened, make_figure, write_figures,
)  # fmt: skip

NETWORKS: dict[str, tuple[str, str, Any]] = {  # name, marker and line; capsules are blue in all figures
    "multimnist": ("CapsNet", "o", "-"),
    "smallnorb": ("dense matrix capsules", "s", ":"),
    "matrix_capsules": ("convolutional matrix capsules", "D", "--"),
}
THREADS: tuple[Any, Any] = lightened(BLUE, 0.45), BLUE  # one, and more
UNITS = {"ms": "time of a step, ms", "MiB": "peak memory, MiB"}
LABELS = {"batch": "batch size", "width": "conv1 channels, or capsule types (conv.)"}


def draw_lines(ax: Axes, tables: dict[str, Any], suffix: str, unit: str) -> None:
    """Log-log, a line per network and number of threads; pale where there is one thread."""
    values = set()
    for name, (_, marker, style) in NETWORKS.items():
        if table := tables.get(f"{name}_{suffix}"):
            x = [int(row[0]) for row in table["rows"]]
            values |= {*x}
            columns = [k for k, column in enumerate(table["columns"]) if column.endswith(f", {unit}")]
            for k, colour in zip(columns, THREADS, strict=False):
                ax.plot(x, [row[k] for row in table["rows"]], style, marker=marker, markersize=4, color=colour)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sorted(values))
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def draw_scaling(tables: dict[str, Any]) -> Figure:
    """Time on the left, memory on the right, against batch size and against width."""
    text = "numpy; each point a new process; both axes logarithmic"
    fig = make_figure(6.6, "Time and memory of a training step", text)
    handles: list[Artist] = [Line2D([], [], color=BLACK, marker=marker, markersize=4, linestyle=style, label=label)
                             for label, marker, style in NETWORKS.values()]  # fmt: skip
    threads = dict.fromkeys(column.split(",")[0] for column in tables["multimnist_batch"]["columns"][1:])
    handles += [Patch(color=colour, label=label) for label, colour in zip(threads, THREADS, strict=False)]
    head_legend(fig, handles)
    for column, (unit, title) in zip(fig.subplots(2, 2).T, UNITS.items(), strict=True):
        for ax, (suffix, label) in zip(column, LABELS.items(), strict=True):
            draw_lines(ax, tables, suffix, unit)
            ax.set(xlabel=label, title=title)
    return fig


FORMS = {  # of a step, by their names in the tables
    "numpy": "numpy", "PyTorch eager": "PyTorch",
    "torch.compile, fused Adam, channels-last": "PyTorch, compiled", "JAX, jit": "JAX",
}  # fmt: skip


def draw_steps(tables: dict[str, Any]) -> Figure:
    """A panel for each network, a bar for each form of its step."""
    text = "batch of 32, two processor cores; each panel has a scale of its own"
    fig = make_figure(2.7, "Time of a training step", text)
    forms = [form for form in FORMS if all(form in {row[0] for row in tables[name]["rows"]} for name in NETWORKS)]
    for ax, (name, (label, *_)) in zip(fig.subplots(1, len(NETWORKS)), NETWORKS.items(), strict=True):
        ms = {row[0]: row[tables[name]["columns"].index("ms")] for row in tables[name]["rows"]}
        colours = [BLUE if form == "numpy" else lightened(GREY, 0.5) for form in forms]
        bars = ax.barh(range(len(forms)), [ms[form] for form in forms], 0.7, color=colours)
        ax.bar_label(bars, fmt="{:.3g} ms", padding=2, fontsize=9)
        ax.set_title(label)
        ax.set_yticks(range(len(forms)), [FORMS[form] if ax.get_subplotspec().is_first_col() else "" for form in forms])
        ax.set(xticks=[], xlim=(0, 1.35 * ax.get_xlim()[1]))
        ax.invert_yaxis()
        bare(ax)
        ax.spines.left.set_visible(True)
    return fig


@dataclasses.dataclass(frozen=True)
class Inputs:
    results: Path = setting(
        Path("results/benchmarks/scaling.json"), input_path, "Draw scaling.png of this file.", usual=True
    )
    steps: Path = setting(Path("results/benchmarks/steps.json"), input_path, "Draw steps.png of this file.", usual=True)


@script
def main(argv: Sequence[str] | None = None) -> None:
    inputs, options, _ = parse(
        Inputs, OutOptions, argv, "Draw the training steps of results/benchmarks/ as scaling.png and steps.png.", (),
        "The figures go to DIR/speed/, where DIR is --outdir.",
    )  # fmt: skip
    for name, path, flag, draw in (
        ("scaling", inputs.results, " --scaling", draw_scaling),
        ("steps", inputs.steps, "", draw_steps),
    ):
        result = read_result(path)
        try:
            write_figures(options.outdir / "speed", {name: partial(draw, result["tables"])})
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):  # it is another result
            raise UserError(f"{path} has no such tables: python -m benchmarks{flag} --out {path}") from None


if __name__ == "__main__":
    sys.exit(main())
