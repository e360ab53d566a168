"""Style, labels of models, axes, pictures, files and flags of the figure and GIF scripts.

Lengths and positions on a figure are in inches, counted from its upper left corner: x to the right, y downwards.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import imageio.v3 as imageio
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator, NullFormatter
from PIL import Image
from tqdm import tqdm

from support.console import print_result, shows_progress
from support.files import UserError, atomic_write
from support.flags import file_path, number
from support.optimizers import TrainState
from support.results import parse_json, plain
from support.run import check_same, first_difference
from support.settings import float_in, folder, input_path, int_in, setting
from support.statistics import read_comparison

Array = np.ndarray
Colour = str | tuple[float, float, float]

# ----------------------------------------------------------------------------------------------------------------------
# Style
# ----------------------------------------------------------------------------------------------------------------------

DPI = 100  # of animations; pictures are written with twice as many
WIDTH = 9.0  # inches: 900 pixels, about the width of a page

# Okabe & Ito's palette, told apart with every kind of colour vision
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY = "#555555"
RIGHT, WRONG = GREEN, VERMILLION  # answers

STYLE = {
    "figure.dpi": DPI,
    "savefig.dpi": 2 * DPI,
    "text.hinting": "none",  # bold digits would look like another face
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.labelsize": 9.5,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "hatch.linewidth": 1.2,
}
REFERENCE_LINE: dict[str, Any] = {"color": BLACK, "linewidth": 1.1, "linestyle": (0, (2, 2))}


class ModelStyle(NamedTuple):
    label: str
    short: str
    colour: str
    marker: str


# By experiment and model: a key such as "cnn" is not the same network in every experiment. Add new experiments here.
MODEL_STYLES: dict[str, dict[str, ModelStyle]] = {
    "smallnorb_novel_viewpoint": {
        "capsules": ModelStyle("Matrix capsules", "capsules", BLUE, "o"),
        "cnn": ModelStyle("Small dense CNN", "small CNN", VERMILLION, "^"),
        "cnn_matched": ModelStyle("Dense CNN", "dense CNN", ORANGE, "s"),
    },
    "multimnist_capsnet": {
        "capsnet": ModelStyle("CapsNet", "CapsNet", BLUE, "o"),
        "cnn": ModelStyle("CNN, same convolutions", "CNN", ORANGE, "s"),
        "cnn_pool": ModelStyle("CNN with max pooling", "CNN,\npooling", VERMILLION, "^"),
    },
    "mnist_affine_capsnet": {
        "capsnet": ModelStyle("CapsNet", "CapsNet", BLUE, "o"),
        "cnn": ModelStyle("CNN, as many parameters", "CNN", ORANGE, "s"),
        "lenet": ModelStyle("LeNet-5", "LeNet-5", PURPLE, "^"),
    },
    "conv_matrix_capsules": {
        "capsules": ModelStyle("Matrix capsules", "capsules", BLUE, "o"),
        "cnn": ModelStyle("CNN, as many parameters", "CNN", ORANGE, "s"),
    },
}
DATASET_NAMES = {  # by the "dataset" of a result
    "mnist": "MNIST",
    "strokes": "generated strokes, not MNIST",
    "custom": "files of --data-dir",
    "voxels": "voxel objects",
    "shapes": "drawn shapes",
    "smallnorb": "smallNORB",
    "images": "own images",
    "toys": "generated toys, not smallNORB",
}


def figure_style() -> Any:
    """Context of all drawing: matplotlib's defaults, not the user's settings, then ``STYLE``."""
    return matplotlib.style.context(["default", STYLE])


def lightened(colour: Colour, strength: float) -> tuple[float, float, float]:
    """A colour mixed with white; ``strength`` 1 leaves it as it is, 0 makes it white."""
    r, g, b = (1 - strength * (1 - part) for part in to_rgb(colour))
    return r, g, b


def darkened(colour: Colour) -> tuple[float, float, float]:
    """A colour for text."""
    r, g, b = (0.72 * part for part in to_rgb(colour))
    return r, g, b


# ----------------------------------------------------------------------------------------------------------------------
# Words and numbers
# ----------------------------------------------------------------------------------------------------------------------


def plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'s' * (n != 1)}"


def with_minus_sign(text: str) -> str:
    return text.replace("-", "−")


def marked_answer(is_right: bool, answer: str) -> tuple[str, Any]:
    """An answer behind a tick or a cross, and the colour of the text."""
    return ("✓ " if is_right else "✗ ") + answer, darkened(RIGHT if is_right else WRONG)


def evenly_spaced_indices(n: int, most: int) -> Array:
    """At most ``most`` of the indices 0 to n - 1, the first and the last among them (for ``most`` of 2 or more)."""
    return np.unique(np.linspace(0, n - 1, min(most, n)).round().astype(int))


def weighted_quantiles(values: Array, weights: Array, quantiles: Any) -> Array:
    """The values (N,) below which these fractions of the weights (N,) lie."""
    order = np.argsort(values)
    below = np.cumsum(weights[order]) / weights.sum()
    return values[order[np.searchsorted(below, quantiles).clip(max=len(order) - 1)]]


# ----------------------------------------------------------------------------------------------------------------------
# Figures, texts and legends
# ----------------------------------------------------------------------------------------------------------------------


def new_figure(height: float, title: str, subtitle: str, width: float = WIDTH) -> Figure:
    """An empty figure of ``width`` x ``height`` inches with a title and a grey subtitle in its upper 0.6 inches."""
    fig = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(fig)
    add_text(fig, 0.12, 0.12, title, fontsize=12.5, fontweight="bold")
    add_text(fig, 0.12, 0.37, subtitle, color=GREY)
    return fig


def add_text(fig: Figure, x: float, y: float, text: str, **style: Any) -> Text:
    """A line whose left end and top are at x, y. Lines of one y have one base line, whatever letters they have."""
    width, height = fig.get_size_inches()
    if "va" not in style:
        y, style["va"] = y + 0.76 * style.get("fontsize", STYLE["font.size"]) / 72, "baseline"
    return fig.text(x / width, 1 - y / height, text, **{"ha": "left", **style})


def add_row_label(fig: Figure, x: float, y: float, text: str, colour: Any = BLACK) -> None:
    """A label of one or two lines, right-aligned at x, its middle at y."""
    add_text(fig, x, y, text, ha="right", va="center", color=colour, fontsize=9.5, linespacing=1.25)


def add_heading_bar(fig: Figure, x: float, y: float, width: float, text: str, colour: str) -> None:
    """A heading on a light bar, above a group of columns."""
    bar = add_axes(fig, x, y, width, 0.24)
    bar.set(xticks=[], yticks=[], facecolor=lightened(colour, 0.25))
    bar.spines[:].set_visible(False)
    bar.text(0.5, 0.46, text, color=darkened(colour), ha="center", va="center", fontweight="bold",
             transform=bar.transAxes)  # fmt: skip


def add_legend(fig: Figure, x: float, y: float, handles: Sequence[Any], **options: Any) -> None:
    """A legend whose upper left corner (or the corner ``loc``) is at x, y."""
    width, height = fig.get_size_inches()
    layout = {"loc": "upper left", "borderpad": 0, "borderaxespad": 0, **options}
    fig.legend(handles=handles, bbox_to_anchor=(x / width, 1 - y / height), **layout)


def model_line(style: ModelStyle, **options: Any) -> dict[str, Any]:
    """Options of ``Axes.plot`` for a model's line."""
    line = {"color": style.colour, "marker": style.marker, "label": style.label, "markeredgecolor": "white"}
    return {**line, "markeredgewidth": 0.7, **options}


def add_model_legend(fig: Figure, x: float, y: float, styles: Iterable[ModelStyle]) -> None:
    """The models' lines and names, side by side."""
    handles = [Line2D([], [], **model_line(style)) for style in styles]
    add_legend(fig, x, y, handles, ncols=len(handles), columnspacing=2.0, handletextpad=0.6)


# ----------------------------------------------------------------------------------------------------------------------
# Axes
# ----------------------------------------------------------------------------------------------------------------------


def add_axes(fig: Figure, x: float, y: float, width: float, height: float, **options: Any) -> Axes:
    """Axes whose upper left corner is at x, y."""
    w, h = fig.get_size_inches()
    return fig.add_axes((x / w, 1 - (y + height) / h, width / w, height / h), **options)


def add_frame(ax: Axes, colour: str, width: float = 2.0) -> None:
    """A coloured frame instead of ticks; its line is ``width`` points wide."""
    ax.set(xticks=[], yticks=[])
    ax.grid(False)
    ax.spines[:].set(visible=True, color=colour, linewidth=width)


def add_colourbar(fig: Figure, image: AxesImage, x: float, y: float, width: float, **options: Any) -> Axes:
    bar = add_axes(fig, x, y, width, 0.12)
    fig.colorbar(image, cax=bar, orientation="horizontal", **options)
    bar.grid(False)
    return bar


def add_reference_line(ax: Axes, height: float) -> None:
    ax.axhline(height, **REFERENCE_LINE, zorder=1.5)


def accuracy_axis(
    ax: Axes, label: str | None, chance: float, chance_text: str = "", side: Literal["left", "right"] = "right"
) -> None:
    """A y axis from 0 to 1 with a line at ``chance``; ``side``: at which end the line is labelled."""
    ax.set_ylim(0, 1.04)
    ax.set_yticks(np.arange(0, 1.01, 0.2))
    add_reference_line(ax, chance)
    ax.annotate(
        f"chance {chance_text or format(chance, 'g')}", (0 if side == "left" else 1, chance),
        xycoords=("axes fraction", "data"), xytext=(3 if side == "left" else -3, 3),
        textcoords="offset points", ha=side, va="bottom", fontsize=9, zorder=6,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
    )  # fmt: skip
    if label:
        ax.set_ylabel(label)


def epoch_axis(ax: Axes, last: float, margin: float | None = None, *, whole: bool = True) -> None:
    """An x axis of epochs up to ``last``; ``whole``: curves begin at the end of the first epoch, not at 0."""
    if margin is None:
        margin = max(0.4 * whole, 0.03 * last)
    ax.set_xlabel("epoch")
    ax.xaxis.set_major_locator(MaxNLocator(integer=whole or last > 2, nbins=6, min_n_ticks=1))
    ax.set_xlim(1 - margin if whole else 0, last + margin)


def step_axis(ax: Axes, last: int) -> None:
    """An x axis of training steps from 0."""
    ax.set_xlim(0, last)
    ax.locator_params(axis="x", nbins=4, integer=True)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def decades_axis(ax: Axes, values: Array) -> None:
    """A log axis from the power of ten below the values to the one above."""
    ax.set_yscale("log")
    ax.set_ylim(10 ** np.floor(np.log10(values.min())), 10 ** np.ceil(np.log10(values.max()) + 1e-6))
    ax.yaxis.set_minor_formatter(NullFormatter())


def add_seed_points(fig: Figure, ax: Axes, x: float, y: float, height: float, points: Mapping[str, Array],
                    styles: Mapping[str, ModelStyle]) -> None:  # fmt: skip
    """Narrow axes at x, y beside ``ax`` and with its scale: for each model one point a seed (n,)."""
    strip = add_axes(fig, x, y, 0.52, height)
    strip.set(xlim=(-0.6, len(points) - 0.4), xticks=[], yscale=ax.get_yscale(), ylim=ax.get_ylim())
    strip.set_yticks(ax.get_yticks(), [""] * len(ax.get_yticks()))
    strip.yaxis.set_minor_formatter(NullFormatter())
    strip.tick_params(which="both", length=0)
    strip.spines.left.set_visible(False)
    strip.set_xlabel(plural(max(map(len, points.values())), "seed"), labelpad=6)
    for m, (name, values) in enumerate(points.items()):
        style = styles[name]
        strip.plot(
            m + np.linspace(-0.25, 0.25, len(values)) * (len(values) > 1), values, ls="", markersize=4.5,
            marker=style.marker, color=lightened(style.colour, 0.35), markeredgecolor=style.colour,
            markeredgewidth=1.0, clip_on=False,
        )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Pictures
# ----------------------------------------------------------------------------------------------------------------------


def add_image(fig: Figure, x: float, y: float, side: float, image: Array, colour: str = GREY, width: float = 0.8,
              interpolation: str = "hanning") -> AxesImage:  # fmt: skip
    """A framed picture (H, W) or (H, W, 3) of values in [0, 1], its upper left corner at x, y."""
    ax = add_axes(fig, x, y, side, side)
    add_frame(ax, colour, width)
    return ax.imshow(np.clip(image, 0, 1), cmap="gray", vmin=0, vmax=1, interpolation=interpolation)


def shown_names(names: Sequence[str], limit: int = 12) -> tuple[str, ...]:
    """Classes' names as they may stand in a figure: at most ``limit`` characters, without the signs of mathematical
    text, and a number instead of a name for which the font has no characters."""
    font = get_font(findfont("DejaVu Sans"))
    shown = []
    for k, name in enumerate(names, 1):
        short = name if len(name) <= limit else f"{name[: limit - 1]}…" if limit > 4 else name[:limit]
        is_known = all(map(font.get_char_index, map(ord, short)))
        shown.append(short.replace("$", r"\$") if is_known else f"class {k}"[-limit:].strip())
    return tuple(shown)


def grey_levels(image: Array) -> Array:
    """A network's input (H, W, C) as grey levels (H, W) in [0, 1]: the first channel, stretched where it is a
    normalised one. Of three channels, which are colours, their mean."""
    channel = image.mean(axis=-1) if image.shape[-1] == 3 else image[..., 0]
    if channel.min() >= 0 and channel.max() <= 1:
        return channel
    low, high = np.percentile(channel, [0.5, 90])  # the background is the larger part, and bright
    return np.clip((channel - low) / max(high - low, 1e-6), 0, 1)


def add_view(fig: Figure, x: float, y: float, side: float, image: Array, colour: str = GREY,
             width: float = 0.8) -> AxesImage:  # fmt: skip
    """A network's input (H, W, C), see ``add_image``."""
    return add_image(fig, x, y, side, grey_levels(image), colour, width, "nearest")


def tiled(pictures: Array, n_greys: int, border: tuple[int, int] = (1, 1)) -> Array:
    """Pictures (rows, columns, H, W) in [0, 1] -> one picture, of few greys for a small file, with white borders."""
    greys = np.round(pictures * (n_greys - 1)) / (n_greys - 1)
    tiles = np.pad(greys, ((0, 0), (0, 0), border, border), constant_values=1)
    rows, columns, height, width = tiles.shape
    return tiles.transpose(0, 2, 1, 3).reshape(rows * height, columns * width)


def add_sheet(fig: Figure, x: float, y: float, width: float, height: float, sheet: Array, **options: Any) -> Axes:
    """A large picture without a frame, see ``tiled``."""
    ax = add_axes(fig, x, y, width, height)
    ax.imshow(sheet, cmap="gray", vmin=0, vmax=1, aspect="auto", **{"interpolation": "nearest", **options})
    ax.axis("off")
    return ax


def mark_column(ax: Axes, left: float, width: float, height: float, colour: str, linewidth: float) -> None:
    """A rectangle round one column of a sheet, in pixels of the sheet."""
    ax.add_patch(Rectangle((left - 0.5, -0.5), width, height, fill=False, edgecolor=colour, linewidth=linewidth,
                           clip_on=False))  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Results of many seeds
# ----------------------------------------------------------------------------------------------------------------------


def numbers_of(metrics: Any, names: Sequence[str]) -> list[float] | None:
    """The named metrics of one model; None where one is missing, too large, or holds statistics of many runs."""
    found = [metrics.get(name) for name in names] if isinstance(metrics, dict) else [None]
    values = [float(value) for value in found if isinstance(value, (int, float)) and abs(value) < 1e6]
    return values if len(values) == len(found) else None


def find_runs(node: Any, names: Sequence[str], config: Any = None, dataset: Any = None) -> Iterator[dict[str, Any]]:
    """Every run's result in a JSON tree, however nested; a configuration, and the data set's name, hold for all below
    that have none."""
    if isinstance(node, list):
        for child in node:
            yield from find_runs(child, names, config, dataset)
    elif isinstance(node, dict):
        config = {**(config or {}), **node["config"]} if isinstance(node.get("config"), dict) else config
        dataset = node["dataset"] if isinstance(node.get("dataset"), str) else dataset
        models = node.get("models")
        if isinstance(models, dict) and any(numbers_of(m, names) for m in models.values()):
            yield {"models": models, "config": config, "dataset": dataset}
            return
        for child in node.values():
            yield from find_runs(child, names, config, dataset)


def read_runs(
    paths: Sequence[Path], config: Any, dataset: str, names: Sequence[str],
    free: Collection[str] = ("seed", "data_dir"),
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The models of each run in the files that has the metrics ``names``, this data set and this configuration, the
    fields ``free`` aside.

    A field that a file does not have came later, and the run had its default. Raises UserError where a file cannot be
    read.
    """
    defaults, asked = (json.loads(json.dumps(plain(c))) for c in (type(config)(), config))
    asked["dataset"] = dataset
    for path in paths:
        try:
            runs = list(find_runs(parse_json(path), names))
        except RecursionError:
            raise UserError(f"{path} is nested too deeply") from None
        for found in runs:
            theirs = defaults | (found["config"] or {})
            theirs["dataset"] = found["dataset"] or theirs["dataset"]
            if all(theirs[key] == value for key, value in asked.items() if key not in free):
                yield found["models"]


def read_seeds(paths: Sequence[Path], config: Any, dataset: str, names: Sequence[str]) -> dict[str, Array]:
    """Per model, the named metrics (n, len(names)) of the files' runs, see ``read_runs``."""
    points: dict[str, list[list[float]]] = {}
    for models in read_runs(paths, config, dataset, names):
        for name, metrics in models.items():
            if values := numbers_of(metrics, names):
                points.setdefault(name, []).append(values)
    return {name: np.array(rows) for name, rows in points.items()}


@contextlib.contextmanager
def reading_seeds(path: Path, fault: str = "is no result of this experiment by compare_seeds.py") -> Iterator[Any]:
    """The document of a file by compare_seeds.py. Raises UserError where the body does not find in it what it needs."""
    try:
        yield read_comparison(path)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{path} {fault}") from error


# ----------------------------------------------------------------------------------------------------------------------
# Figures as files, and the flags of the figure scripts
# ----------------------------------------------------------------------------------------------------------------------


def write_if_changed(path: Path, content: bytes) -> str:
    """Write a file whole, unless it has this content already. Returns a line that says which."""
    with contextlib.suppress(OSError):
        if path.read_bytes() == content:
            return f"unchanged {path} ({len(content) / 1000:.0f} kB)"
    with atomic_write(path) as stream:
        stream.write(content)
    return f"wrote {path} ({len(content) / 1000:.0f} kB)"


def png_bytes(draw: Callable[[], Figure], n_colours: int | None = None) -> bytes:
    """A figure as PNG; with ``n_colours`` of a palette of that size, which halves a file of small grey pictures."""
    stream = io.BytesIO()
    with figure_style():
        draw().savefig(stream, format="png", metadata={"Software": None})  # a version would change the bytes
    if n_colours is None:
        return stream.getvalue()
    small = io.BytesIO()
    with Image.open(stream) as image:
        image.convert("RGB").quantize(n_colours, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return small.getvalue()


def write_figures(
    folder: Path, drawers: Mapping[str, Callable[[], Figure]], n_colours: Mapping[str, int] | None = None
) -> None:
    """Draw each figure into ``folder/NAME.png`` and print whether it changed; for ``n_colours`` see ``png_bytes``."""
    for name, draw in drawers.items():
        content = png_bytes(draw, (n_colours or {}).get(name))
        print_result(write_if_changed(folder / f"{name}.png", content))


COMMON_FLAGS = (  # of a figure script's --help
    "--checkpoint --outdir --results --dataset --data-dir --seed --n-epochs --n-train --threads --quiet"
)


def add_outdir(parser: Any, what: str) -> None:
    parser.add_argument("--outdir", type=file_path, metavar="DIR", default=Path("viz"),
                        help=f"Folder of the {what}. Default: %(default)s.")  # fmt: skip


def add_figure_arguments(
    parser: argparse.ArgumentParser, experiment: str, results_help: str
) -> argparse._ArgumentGroup:
    """``--outdir``, ``--checkpoint``, ``--quiet`` and ``--results``."""
    parser.epilog = f"The figures go to DIR/{experiment}/, where DIR is --outdir."
    files = parser.add_argument_group("files")
    add_outdir(files, "figures")
    files.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="Draw the finished training of this file. Default: train first, with the flags of the experiment.",
    )
    files.add_argument("--results", type=Path, metavar="FILE", nargs="+", help=results_help)
    files.add_argument("--quiet", action="store_true", help="Show no progress bar.")
    return files


def add_results_alone(files: argparse._ArgumentGroup, flag: str, picture: str, *results: Path) -> None:
    """A flag that draws one picture from ``results``, patterns, or from other files by compare_seeds.py."""
    default = ", ".join(map(str, results))
    text = (
        f"Train nothing, and draw {picture}.png alone, from these results of compare_seeds.py. Without FILE: {default}."
    )
    files.add_argument(flag, type=Path, metavar="FILE", nargs="*", help=text)


def results_alone(
    parser: argparse.ArgumentParser, args: argparse.Namespace, name: str, *results: Path
) -> list[Path] | None:
    """The files of that flag; None without it. A usage error where other flags are given with it."""
    given: list[Path] | None = getattr(args, name)
    if given is None:
        return None
    if args.given - {name, "outdir", "quiet"}:
        parser.error(f"argument --{name}: only --outdir goes with it")
    return given or [path for pattern in results for path in sorted(pattern.parent.glob(pattern.name))]


def results_files(given: list[Path] | None, default: Path | None = None) -> list[Path]:
    """The files of ``--results``; without the flag, the default if it exists. Raises UserError where one is missing or
    is no JSON, before any data are looked for."""
    found = given or ([default] if default and default.is_file() else [])
    for path in found:
        if not os.path.exists(path):
            raise UserError(f"there is no results file {path}")
        parse_json(path)
    return found


def require_runs(given: list[Path] | None, found: Any) -> None:
    """Raises UserError where the ``given`` files of ``--results`` have no run that fits, so that ``found`` is empty."""
    if given and not found:
        raise UserError(f"{', '.join(map(str, given))} holds no run with these flags")


@dataclasses.dataclass(frozen=True)
class FigureOptions:
    """What a figure script reads and writes."""

    outdir: Path = setting(Path("viz"), folder, "Folder above the folder of the figures.", usual=True, group="files")
    checkpoint: Path | None = setting(None, input_path, "Draw the finished training of this file. Without it, train"
                                      " first, with the flags of the experiment.", usual=True)  # fmt: skip
    threads: int = setting(1, int_in(1, 256), "Use N threads.")
    quiet: bool = setting(False, bool, "Show no progress bar.")


@dataclasses.dataclass(frozen=True)
class AnimationOptions:
    """What a script of an animation writes."""

    fps: float = setting(12.0, float_in(0.1, 50), "Show X frames a second.", usual=True, group="animation")
    threads: int = setting(1, int_in(1, 256), "Use N threads.")
    quiet: bool = setting(False, bool, "Show no progress bar.")


def require_test_images(n: int, least: int) -> None:
    if n < least:
        raise UserError(f"the figures need --n-test {least} or more")


def require_checkpoints(checkpoints: Mapping[Any, Path | None]) -> None:
    """Raises UserError where a file is no checkpoint of its experiment, before the first of several trainings."""
    for experiment, path in checkpoints.items():
        if path is not None:
            experiment.load_checkpoint(path)


def require_defaults(path: Path | None, config: Any, fields: Collection[str], why: str) -> None:
    """Raises UserError where a checkpoint's configuration has another value than the default in one of the fields."""
    if difference := first_difference(config, type(config)(), fields):
        raise UserError(f"{path} was {difference}: {why}")


def load_finished(
    experiment: Any, path: Path | None, asked: Any, given: Collection[str], free: Collection[str] = ("data_dir",),
    required: Collection[str] = (), stopped: Callable[[TrainState, Any], bool] = lambda state, config: False,
    length: Callable[[str, Any], int] = lambda name, config: config.n_epochs,
) -> tuple[Any, dict[str, TrainState]]:  # fmt: skip
    """Configuration and states of a checkpoint of finished trainings, at least of the ``required`` models. Without a
    ``path``: the configuration ``asked``, and no states.

    ``experiment`` is the script's module, of which ``load_checkpoint`` and ``EXPERIMENT`` are used. A training is
    finished after ``length(name, config)`` entries of ``train_loss`` in its history, or where ``stopped(state,
    config)``. The
    ``given`` fields of ``asked`` must be those of the checkpoint; ``free`` ones may differ, and replace them. Raises
    UserError.
    """
    if path is None:
        return asked, {}
    config, states = experiment.load_checkpoint(path)
    check_same(path, config, asked, given, free)
    if "data_dir" in given and config.dataset in ("strokes", "voxels", "shapes", "toys"):
        raise UserError(f"{path} was trained on {config.dataset}, which have no files: leave --data-dir out")
    for name in dict.fromkeys((*required, *states)):
        done = len(states[name].history.get("train_loss", [])) if name in states else 0
        if done < length(name, config) and not (name in states and stopped(states[name], config)):
            raise UserError(
                f"{path} holds {done:,} of {length(name, config):,} epochs of {name}; finish it with"
                f" {experiment.EXPERIMENT}.py --checkpoint … --resume"
            )
    return dataclasses.replace(config, **{name: getattr(asked, name) for name in free if name in given}), states


# ----------------------------------------------------------------------------------------------------------------------
# Animations
# ----------------------------------------------------------------------------------------------------------------------

HOLD_SECONDS, LAST_SECONDS = 1.2, 2.5  # that held frames and the last one stay
MAX_FRAMES = 600


class Scene:
    """A figure whose fixed parts are drawn once; each frame draws the moving artists over a copy of them.

    A subclass adds its artists, those that move by ``move``, and calls ``finish_background``. Its ``frame(...)`` sets
    them and returns ``draw()``.
    """

    def __init__(self, fig: Figure) -> None:
        self.fig = fig
        self.canvas: Any = fig.canvas
        self.moving: list[Any] = []
        self.title = self.move(add_text(fig, 0.12, 0.12, "", fontsize=12.5, fontweight="bold"))

    def move(self, artist: Any) -> Any:
        """Keep an artist out of the background and draw it in every frame."""
        artist.set_animated(True)
        self.moving.append(artist)
        return artist

    def add_value_text(self, ax: Axes) -> Any:
        """A moving number above the right end of axes."""
        return self.move(ax.text(1, 1.06, "", transform=ax.transAxes, ha="right", fontweight="bold", fontsize=10.5,
                                 color=darkened(BLUE)))  # fmt: skip

    def finish_background(self) -> None:
        self.canvas.draw()
        self.background = self.canvas.copy_from_bbox(self.fig.bbox)

    def draw(self) -> Array:
        """RGB (H, W, 3), uint8."""
        self.canvas.restore_region(self.background)
        for artist in self.moving:
            (artist.axes or self.fig).draw_artist(artist)
        return np.asarray(self.canvas.buffer_rgba())[..., :3].copy()


def encode_gif(
    frames: Sequence[Array], fps: float, n_greys: int, n_colours: int, text_colours: Iterable[Colour],
    holds: Iterable[int] = (),
) -> bytes:  # fmt: skip
    """Frames (H, W, 3) as an endless GIF with one palette of ``n_greys`` greys and ``n_colours`` other colours, so that
    what does not move costs nothing.

    ``text_colours``: of letters, which are too few pixels to come into the palette by themselves. ``holds``: frames
    that stay longer.
    """
    pixels = np.concatenate(frames[:: max(1, len(frames) // 6)]).reshape(-1, 3)
    coloured = pixels[np.ptp(pixels, axis=1) > 8]
    colours = Image.fromarray(coloured[None]).quantize(n_colours, method=Image.Quantize.MEDIANCUT)
    # Pillow compares colours in steps of four, so white stays white only where no other grey is near.
    greys = np.repeat(np.append(np.linspace(0, 240, n_greys - 1).round().astype(int), 255), 3).tolist()
    palette = Image.new("P", (1, 1))
    kept = [
        round(255 * part) for c in text_colours for strength in (1, 0.8, 0.6, 0.35) for part in lightened(c, strength)
    ]
    palette.putpalette(greys + kept + (colours.getpalette() or [])[: 3 * n_colours])
    reduced = [
        np.asarray(Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE).convert("RGB"))
        for frame in frames
    ]
    duration = [round(100 / fps) * 10.0] * len(frames)  # milliseconds; a GIF counts in hundredths of a second
    for k in holds:
        duration[k] = max(duration[k], 1000 * HOLD_SECONDS)
    duration[-1] = max(duration[-1], 1000 * LAST_SECONDS)
    return imageio.imwrite("<bytes>", reduced, extension=".gif", plugin="pillow", duration=duration, loop=0)


def write_gif(
    args: Any, make_scene: Callable[[], Any], frames: Sequence[tuple[int, ...]],
    n_greys: int, n_colours: int, text_colours: Iterable[Colour] = (), holds: Iterable[int] = (),
) -> None:  # fmt: skip
    """Draw ``make_scene().frame(*at)`` for each ``at`` of ``frames`` into ``args.out`` and print what became of it;
    for the palette and ``holds`` see ``encode_gif``."""
    with figure_style():
        scene = make_scene()
        bar = tqdm(frames, desc="frames", unit="frame", leave=False, disable=not shows_progress(args.quiet))
        drawn = [scene.frame(*at) for at in bar]
    print_result(write_if_changed(args.out, encode_gif(drawn, args.fps, n_greys, n_colours, text_colours, holds)))


def frame_rate(text: str) -> float:
    """Frames a second, for argparse."""
    value = number(0, 50, above=True)(text)  # the most that a GIF can say
    if value < 0.1:
        raise argparse.ArgumentTypeError(f"{text} is below 0.1")
    return value


def add_animation_arguments(parser: argparse.ArgumentParser, experiment: str, fps: float) -> argparse._ArgumentGroup:
    """``--fps``, ``--out`` and ``--quiet``."""
    parser.epilog = "The animation goes to the file of --out."
    group = parser.add_argument_group("animation")
    group.add_argument(
        "--fps",
        type=frame_rate,
        metavar="X",
        default=fps,
        help="Show X frames a second, 0.1 to 50. Default: %(default)s.",
    )
    group.add_argument(
        "--out",
        type=file_path,
        metavar="FILE",
        default=Path(f"{experiment}.gif"),
        help="File of the animation. Default: %(default)s.",
    )
    group.add_argument("--quiet", action="store_true", help="Show no progress bar.")
    return group
