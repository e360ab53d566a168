"""Style, labels of models, axes, pictures, files, flags and mains of the figure and GIF scripts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

if (module := os.environ.get("MPLBACKEND", "").partition("module://")[2]) and not find_spec(module.split(".")[0]):
    del os.environ["MPLBACKEND"]  # a notebook names it for its commands; it is not installed here, and none is used
    import matplotlib

    os.environ["MPLBACKEND"] = f"module://{module}"

import imageio.v3 as imageio
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator, NullFormatter
from matplotlib.transforms import Bbox
from PIL import Image

from data.files import with_progress
from smallnorb_novel_viewpoint import (
    FOLDER, INPUT, RunOptions, Settings, UserError, blas_threads, float_in, list_of, one_of, parse, require_same,
    script, setting, write_file,
)
from support.experiment import ROOT, load_checkpoint, redeclared, require_writable, unfinished
from support.redraw import place_of
from support.statistics import has_scipy, read_comparison, t_quantile

Array = np.ndarray
Colour = str | tuple[float, float, float]
Side = Literal["left", "center", "right"]

# --- Style ------------------------------------------------------------------------------------------------------------

DPI, SAVED_DPI = 100, 200  # of animations, and of pictures
WIDTH = 9.0  # inches: 900 pixels, about the width of a page

# Okabe & Ito's palette, told apart with every kind of colour vision
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY = "#555555"
RIGHT, WRONG = GREEN, VERMILLION  # answers

STYLE = Path(__file__).with_name("capsules.mplstyle")
REFERENCE_LINE: dict[str, Any] = {"color": BLACK, "linewidth": 1.1, "linestyle": (0, (2, 2)), "zorder": 1.5}


class ModelStyle(NamedTuple):
    label: str
    short: str
    colour: str
    marker: str


# By role: a network has one name and one colour in all figures but those with two that would look alike.
EM_CAPSULES = ModelStyle("Matrix capsules", "capsules", BLUE, "o")
CAPSNET = ModelStyle("CapsNet", "CapsNet", BLUE, "o")
CNN = ModelStyle("CNN of equal size", "CNN", ORANGE, "s")
POOLING = ModelStyle("CNN with pooling", "pooling", VERMILLION, "^")
SMALL_CNN = ModelStyle("Small CNN", "small CNN", GREY, "v")
PAPER_CNN = ModelStyle("CNN of the paper", "paper's CNN", VERMILLION, "^")
LENET = ModelStyle("LeNet-5", "LeNet-5", PURPLE, "D")

DATASET_NAMES = {  # by the "dataset" of a result
    "mnist": "MNIST",
    "strokes": "drawn digits, not MNIST",
    "custom": "files of --data-dir",
    "voxels": "the write-up's objects",
    "shapes": "drawn shapes",
    "smallnorb": "smallNORB",
    "toys": "drawn toys, not smallNORB",
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


# --- Words and numbers ------------------------------------------------------------------------------------------------


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


# --- Layout: a title, a subtitle, and axes that matplotlib places below -----------------------------------------------

HEAD, LINE = 0.52, 0.19  # inches: title with the space below it, and a line of the subtitle or of a legend


def make_figure(height: float, title: str, subtitle: str, width: float = WIDTH) -> Figure:
    """A figure of ``width`` x ``height`` inches with a title and grey lines below it; its axes share the rest. What
    they leave free at the bottom is cut off, see ``png_bytes``."""
    fig = Figure(figsize=(width, height), dpi=DPI)
    FigureCanvasAgg(fig)
    fig.text(0.12 / width, 1 - 0.12 / height, title, fontsize=12.5, fontweight="bold", va="top")
    fig.text(0.12 / width, 1 - 0.39 / height, subtitle, color=GREY, va="top", linespacing=1.4)
    top = 1 - (HEAD + LINE * (1 + subtitle.count("\n"))) / height
    fig.set_layout_engine("constrained", rect=(0, 0, 1, top))
    return fig


def head_legend(fig: Figure, handles: Sequence[Any], n_rows: int = 1) -> None:
    """A legend below the subtitle, for which the axes make room."""
    engine: Any = fig.get_layout_engine()
    width, height = fig.get_size_inches()
    top = engine.get()["rect"][3]
    fig.legend(handles=handles, ncols=-(-len(handles) // n_rows), loc="upper left", columnspacing=1.8,
               handletextpad=0.6, bbox_to_anchor=(0.1 / width, top + 0.08 / height))
    engine.set(rect=(0, 0, 1, top - LINE * (n_rows + 0.2) / height))


def model_line(style: ModelStyle, **options: Any) -> dict[str, Any]:
    """Options of ``Axes.plot`` for a model's line."""
    line = {"color": style.colour, "marker": style.marker, "label": style.label, "markeredgecolor": "white"}
    return {**line, "markeredgewidth": 0.7, **options}


def model_handles(styles: Iterable[ModelStyle]) -> list[Line2D]:
    return [Line2D([], [], **model_line(style)) for style in styles]


def heading(ax: Axes, text: str, colour: Colour = BLACK) -> None:
    """A bold title of axes."""
    ax.set_title(text, color=darkened(colour), fontweight="bold")


# --- Axes -------------------------------------------------------------------------------------------------------------


def accuracy_axis(
    ax: Axes, label: str | None, chance: float, chance_text: str = "", side: Side = "right", below: bool = False
) -> None:
    """A y axis from 0 to 1 with a line at ``chance``; ``side``, ``below``: where the line is labelled."""
    ax.set_ylim(0, 1.04)
    ax.set_yticks(np.arange(0, 1.01, 0.2))
    ax.axhline(chance, **REFERENCE_LINE)
    name_line(ax, f"chance {chance_text or format(chance, '.2g')}", chance, side, below, color=BLACK,
              bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5})
    if label:
        ax.set_ylabel(label)


def epoch_axis(ax: Axes, last: float, margin: float = 0.4) -> None:
    """An x axis of epochs up to ``last``; curves begin at the end of the first one."""
    ax.set_xlabel("epoch")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    ax.set_xlim(1 - margin, last + margin)


def step_axis(ax: Axes, last: int) -> None:
    """An x axis of training steps from 0."""
    ax.set_xlim(0, last)
    ax.locator_params(axis="x", nbins=4, integer=True)
    ax.xaxis.set_major_formatter("{x:,.0f}")


def grey_levels(image: Array) -> Array:
    """A network's input (H, W, C) as grey levels (H, W) in [0, 1]: the first channel, stretched where it is a
    normalised one."""
    channel = image[..., 0]
    if channel.min() >= 0 and channel.max() <= 1:
        return channel
    low, high = np.percentile(channel, [0.5, 90])  # the background is the larger part, and bright
    return np.clip((channel - low) / max(high - low, 1e-6), 0, 1)


# --- What is drawn in several figures ---------------------------------------------------------------------------------


class Pictures(NamedTuple):
    """A grid of pictures that fills axes, in pixels of the pictures."""

    ax: Axes
    height: int
    width: int
    gap: tuple[int, int]

    def write(self, row: int, column: float, text: str, below: float = 2, **style: Any) -> Text:
        """A line, so many points below a picture."""
        x = column * (self.width + self.gap[1]) + (self.width - 1) / 2
        y = row * (self.height + self.gap[0]) + self.height - 0.5
        return self.ax.annotate(text, (x, y), (0, -below), textcoords="offset points", annotation_clip=False,
                                **{"ha": "center", "va": "top", "fontsize": 9, **style})

    def update(self, pictures: Any, n_greys: int = 64) -> None:
        """Other pictures in the same places."""
        self.ax.images[0].set_data(as_sheet(pictures, self.gap, n_greys))

    def frame(self, row: int, column: int, colour: Colour, linewidth: float = 2.0, columns: int = 1, rows: int = 1
              ) -> None:
        """A coloured frame round a picture, or round several."""
        pitch = self.height + self.gap[0], self.width + self.gap[1]
        corner = column * pitch[1] - 0.5, row * pitch[0] - 0.5
        size = columns * pitch[1] - self.gap[1], rows * pitch[0] - self.gap[0]
        self.ax.add_patch(Rectangle(corner, *size, fill=False, edgecolor=colour, linewidth=linewidth, clip_on=False))


def as_sheet(pictures: Any, gap: tuple[int, int], n_greys: int) -> Array:
    """Pictures (R, C, H, W) or (R, C, H, W, 3) as one (rows, columns, 3), see ``show_pictures``."""
    pictures = np.asarray(pictures, float)
    R, C, H, W = pictures.shape[:4]
    if pictures.ndim == 4:
        pictures = np.repeat(pictures[..., None], 3, axis=4)
    sheet = np.ones((R, H + gap[0], C, W + gap[1], 3))
    few = np.round(np.clip(pictures, 0, 1) * (n_greys - 1)) / (n_greys - 1)
    sheet[:, :H, :, :W] = np.nan_to_num(few, nan=1.0).transpose(0, 2, 1, 3, 4)
    return sheet.reshape(R * (H + gap[0]), C * (W + gap[1]), 3)[:, : C * (W + gap[1]) - gap[1]]


def show_pictures(
    ax: Axes, pictures: Any, rows: Sequence[str] = (), columns: Sequence[str] = (), gap: tuple[int, int] = (1, 1),
    n_greys: int = 64, interpolation: str = "hanning",
) -> Pictures:
    """Pictures (R, C, H, W) or (R, C, H, W, 3) of values in [0, 1] with names of the rows and columns; where one is
    NaN, nothing is shown. ``gap``: below and beside a picture, in its pixels. ``n_greys``: few, for a small file."""
    R, C, H, W = np.shape(pictures)[:4]
    ax.imshow(as_sheet(pictures, gap, n_greys), interpolation=interpolation)
    ax.set_anchor("NW")
    ax.xaxis.tick_top()
    ax.set_xticks(np.arange(C) * (W + gap[1]) + (W - 1) / 2, columns or [""] * C)
    ax.set_yticks(np.arange(R) * (H + gap[0]) + (H - 1) / 2, rows or [""] * R)
    bare(ax)
    return Pictures(ax, H, W, gap)


def add_frame(ax: Axes, colour: str = GREY, linewidth: float = 0.8) -> None:
    """A frame instead of ticks."""
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set(visible=True, color=colour, linewidth=linewidth)


def bare(ax: Axes) -> None:
    """Neither grid nor lines round the axes."""
    ax.grid(False)
    ax.tick_params(length=0, which="both")
    ax.spines[:].set_visible(False)


def interval(values: Array) -> tuple[Array, Array]:
    """Mean of the seeds (S, ...) and half of its 95 % interval by Student's t; nothing of one seed or without scipy."""
    n = len(values)
    if n == 1 or not has_scipy():
        return values.mean(axis=0), np.zeros(values.shape[1:])
    return values.mean(axis=0), t_quantile(n) * values.std(axis=0, ddof=1) / np.sqrt(n)


def plot_band(ax: Axes, x: Any, values: Array, style: ModelStyle, **options: Any) -> None:
    """The mean of the seeds (S, X) as a model's line, and its 95 % interval as a band."""
    mean, half = interval(values)
    if len(values) > 1:
        ax.fill_between(x, mean - half, mean + half, color=lightened(style.colour, 0.3), linewidth=0, zorder=2)
    ax.plot(x, mean, **model_line(style, **{"zorder": 3, "clip_on": False, **options}))


VIEWPOINT_METRICS = {
    "familiar_accuracy": "accuracy, familiar viewpoints", "held_out_accuracy": "accuracy, held-out viewpoints"
}


def draw_histories(
    subtitle: str, titles: Mapping[str, str], states: Mapping[str, Any], styles: Mapping[str, ModelStyle],
    chance: float, below: bool = False,
) -> Figure:
    """A panel for each metric of ``titles`` with its value after every epoch: losses and errors, which are one minus
    an accuracy, on a log axis, accuracies from 0 to 1 with a line at ``chance``, labelled ``below`` it or above."""
    fig = make_figure(3.75, "Training", subtitle)
    head_legend(fig, model_handles(styles[name] for name in states))
    for ax, (metric, title) in zip(fig.subplots(1, len(titles)), titles.items(), strict=True):
        is_error, stored = metric.endswith("error"), metric.replace("error", "accuracy")
        curves = {name: np.array(state.history[stored]) for name, state in states.items() if stored in state.history}
        if "accuracy" not in metric:
            curves = {name: np.maximum(1 - values if is_error else values, 1e-8) for name, values in curves.items()}
        for name, values in curves.items():
            style = model_line(styles[name], markevery=max(1, len(values) // 10), clip_on=False, zorder=3)
            ax.plot(np.arange(1, len(values) + 1), values, **style)
        if "accuracy" in metric:
            accuracy_axis(ax, None, chance, below=below)
        elif "loss" in metric or is_error:
            decades = np.log10(np.concatenate(list(curves.values())))
            ax.set_yscale("log")
            ax.set_ylim(10 ** np.floor(decades.min()), 10 ** np.ceil(decades.max() + 1e-6))
            ax.yaxis.set_minor_formatter(NullFormatter())
            if is_error:
                ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        else:
            ax.set_ylim(0)
        ax.set_title(title)
        epoch_axis(ax, max(map(len, curves.values())))
    return fig


def name_line(ax: Axes, text: str, height: float, side: Side = "left", below: bool = False, **style: Any) -> None:
    """A name on a horizontal line at ``height``."""
    x, aside = {"left": (0, 3), "center": (0.5, 0), "right": (1, -3)}[side]
    ax.annotate(
        text, (x, height), xycoords=("axes fraction", "data"), xytext=(aside, -3 if below else 3),
        textcoords="offset points", ha=side, va="top" if below else "bottom", fontsize=9, zorder=6,
        **{"color": GREY, **style},
    )


# --- What is drawn: results, and a finished run -----------------------------------------------------------------------


def settings_in(path: Path) -> list[dict[str, Any]]:
    """The settings in a file by compare_seeds.py, each with its whole ``config``, its ``runs`` and its data set. A path
    is one of the project, from wherever the script runs."""
    document = read_comparison(ROOT / path)
    return [found | {"dataset": document.get("dataset")} for found in document["settings"].values()]


def median_seed(runs: Sequence[Mapping[str, Any]], model: str, metric: str) -> int:
    """The seed whose metric is the median: of an even number of them, the lower of the two in the middle."""
    order = sorted(runs, key=lambda run: (run["models"][model][metric], run["seed"]))
    return int(order[(len(order) - 1) // 2]["seed"])


def tested(config: Any) -> str:
    """What the examples are called on which accuracies are measured."""
    return "validation" if config.n_val or getattr(config, "n_val_objects", None) else "test"


OF_MEDIAN = "\nWithout --seed, reported settings have the seed of their median."  # in the help of a script


def with_reported_seed(
    path: Path, model: str, metric: str, config: Any, given: Collection[str]
) -> tuple[Any, str, list[dict[str, Any]]]:
    """The configuration, its seed in words, and the reported runs: those of the first setting in a file by
    compare_seeds.py that agrees with it in all but the seed. Fields that the file lacks do not count. Unless a seed is
    given, it becomes that of the runs' median. Without such a setting there are no runs, and the seed stays."""
    free = {"seed", "data_dir", *(name for name in ("dataset", "n_train", "n_test")
                                  if getattr(config, name, None) in ("auto", None))}
    wanted = {name: value for name, value in dataclasses.asdict(config).items() if name not in free}
    wanted = json.loads(json.dumps(wanted, default=str))
    file = ROOT / str(path).partition("#")[0]  # it may be a part of one
    for found in settings_in(path) if file.exists() else ():
        if all(found["config"].get(name, value) == value for name, value in wanted.items()):
            reported, median = found["runs"], median_seed(found["runs"], model, metric)
            config = config if "seed" in given else dataclasses.replace(config, seed=median)
            of_all = f", the median of {len(reported)}" if config.seed == median else ""
            return config, f"seed {config.seed}{of_all}", reported
    return config, f"seed {config.seed}", []


class Run(NamedTuple):
    """What is drawn: a finished training."""

    config: Any
    data: Any
    states: Mapping[str, Any]
    who: str = ""  # its seed, and whether it is the median of the reported ones
    reported: Sequence[Mapping[str, Any]] = ()  # runs of these settings in the results
    tested: Any = None  # what is measured after the training


def load_or_train(
    experiment: Any, options: Any, asked: Any, given: Collection[str],
    resolve: Callable[[Any, Any], Any] = lambda config, data: config, median_of: tuple[Path, str, str] | None = None,
    **finished: Any,
) -> Run:
    """The training of --checkpoint, see ``load_finished``, or else a new one of all models.

    ``resolve(config, data)`` fills in what depends on the data; it raises UserError where nothing can be drawn.
    ``median_of``: results, model and metric; unless a seed is given, the new training is of the seed whose metric is
    the median of the reported ones.
    """
    config, states = load_finished(experiment, options.checkpoint, asked, given, **finished)
    who, reported = f"seed {config.seed}", list[dict[str, Any]]()
    if median_of:
        given = {"seed"} if states else given
        config, who, reported = with_reported_seed(*median_of, config, given)
    data = experiment.make_data(config)
    if getattr(data, "name", "") == "strokes":  # which no result is of
        who, reported = f"seed {config.seed}", []
    config = resolve(config, data)
    run_options = RunOptions(quiet=options.quiet, threads=options.threads)
    states = states or experiment.train_all(config, data, run_options)
    return Run(config, data, states, who, reported)


# --- Animations -------------------------------------------------------------------------------------------------------

HOLD_SECONDS, LAST_SECONDS = 1.2, 2.5  # that held frames and the last one stay
MAX_FRAMES = 600


def draw_frames(fig: Figure, update: Callable[..., None], frames: Iterable[tuple[int, ...]]) -> Iterator[Array]:
    """``update(*at)`` for each of ``frames`` sets the animated artists, which are drawn over a copy of all others: RGB
    (H, W, 3), uint8. (To draw the whole figure again takes ten times as long.)"""
    canvas: Any = fig.canvas
    moving = sorted(fig.findobj(lambda artist: artist.get_animated()), key=lambda artist: artist.get_zorder())
    for artist in moving:
        artist.set_in_layout(False)
    canvas.draw()
    fig.set_layout_engine("none")
    background = canvas.copy_from_bbox(fig.bbox)
    for at in frames:
        canvas.restore_region(background)
        update(*at)
        for artist in moving:
            fig.draw_artist(artist)
        yield np.asarray(canvas.buffer_rgba())[..., :3].copy()


def with_one_palette(frames: Sequence[Array]) -> list[Array]:
    """Frames (H, W, 3) in the same 256 colours, black and white among them, so that what does not move costs nothing. A
    colour counts once, however many pixels have it: letters are few."""
    keys = [(((frame.astype(int) + 4) // 8) @ [33 * 33, 33, 1]).astype(np.uint16) for frame in frames]  # steps of eight
    present = np.unique(np.concatenate([np.unique(key) for key in keys]))
    colours = np.minimum(np.stack(np.unravel_index(present, (33, 33, 33)), axis=1) * 8, 255)
    palette = colours
    if len(colours) > 256:
        reduced = Image.fromarray(colours[None].astype(np.uint8)).quantize(254, method=Image.Quantize.MEDIANCUT)
        palette = np.array([*(reduced.getpalette() or [])[: 3 * 254], *(0, 0, 0), *(255, 255, 255)]).reshape(-1, 3)
    nearest = np.square(colours[:, None] - palette).sum(axis=2).argmin(axis=1)
    table = np.zeros((33**3, 3), np.uint8)
    table[present] = palette[nearest]
    return [table[key] for key in keys]


def write_animation(
    options: Any, make: Callable[[], tuple[Figure, Callable[..., None]]], frames: Sequence[tuple[int, ...]],
    holds: Collection[int] = (),
) -> None:
    """An endless GIF of the figure and ``update`` of ``make()``, see ``draw_frames``, as ``options.out``; the frames
    numbered in ``holds`` stay longer, and the last one."""
    with figure_style():
        fig, update = make()
        fig.texts[0].set_animated(True)  # the title
        bar = with_progress(frames, "frame", options.quiet)
        drawn = list(draw_frames(fig, update, bar))
    print(write_if_changed(options.out, gif_bytes(drawn, options.fps, holds), options.overwrite))


def gif_bytes(frames: Sequence[Array], fps: float, holds: Collection[int] = ()) -> bytes:
    """An endless GIF of frames (H, W, 3); for ``holds`` see ``write_animation``."""
    duration = [round(100 / fps) * 10] * len(frames)  # milliseconds; a GIF counts in hundredths of a second
    for k in holds:
        duration[k] = max(duration[k], round(1000 * HOLD_SECONDS))
    duration[-1] = max(duration[-1], round(1000 * LAST_SECONDS))
    stacked = np.stack(with_one_palette(frames))
    return imageio.imwrite("<bytes>", stacked, extension=".gif", plugin="pillow", loop=0,
                           duration=duration if len(frames) > 1 else duration[0])


# --- Figures as files, and the flags of the figure scripts ------------------------------------------------------------


def write_if_changed(path: Path, content: bytes, overwrite: bool = False) -> str:
    """Write a file whole, unless it has this content already; a page's picture is kept, see ``place_of``. Returns a
    line that says which."""
    place, why = path, ""
    with contextlib.suppress(OSError):
        if path.read_bytes() == content:
            return f"unchanged {path} ({len(content) / 1000:.0f} kB)"
        place, why = place_of(path, overwrite)
    write_file(place, content)
    return f"wrote {place} ({len(content) / 1000:.0f} kB){why}"


def png_bytes(draw: Callable[[], Figure], n_colours: int | None = None) -> bytes:
    """A figure as PNG; with ``n_colours`` of a palette of that size, which halves a file of small grey pictures."""
    stream = io.BytesIO()
    with figure_style():
        fig = draw()
        fig.draw_without_rendering()
        width, height = fig.get_size_inches()
        lowest = max(0.0, fig.get_tightbbox().y0 - 0.06)
        cut = Bbox([[0, np.floor(100 * lowest) / 100], [width, height]])
        no_version = {"Software": None}  # it would change the bytes
        fig.savefig(stream, format="png", dpi=SAVED_DPI, bbox_inches=cut, metadata=no_version)
    if n_colours is None:
        return stream.getvalue()
    small = io.BytesIO()
    with Image.open(stream) as image:
        image.convert("RGB").quantize(n_colours, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return small.getvalue()


def write_figure(path: Path, draw: Callable[[], Figure], n_colours: int | None, overwrite: bool) -> None:
    """Draw a figure, see ``png_bytes``, and print whether it changed: the same run gives the same bytes."""
    print(write_if_changed(path, png_bytes(draw, n_colours), overwrite))


@dataclasses.dataclass(frozen=True)
class OutOptions(Settings):
    outdir: Path = setting(Path("viz"), FOLDER, "Folder above the folder of the figures.", usual=True, group="files")
    overwrite: bool = setting(False, bool, "Write over a page's picture that another command has drawn.")


@dataclasses.dataclass(frozen=True)
class FigureOptions(OutOptions):
    """What a figure script of an experiment reads and writes; a script adds ``figures``, the names of its own."""

    checkpoint: Path | None = setting(None, INPUT, "Draw the finished training of this file. Without it, train"
                                      " first, with the flags of the experiment.", usual=True)
    threads: int = redeclared(RunOptions, "threads")
    quiet: bool = redeclared(RunOptions, "quiet")


def choice_of_figures(*names: str) -> Any:
    """The flag --figures."""
    return setting((), list_of(one_of(names)), f"Draw these alone: {', '.join(names)}.", usual=True)


def figure_script(
    name: str, config: Any, options: Any, about: str, *examples: tuple[str, str], prepare: Callable[..., Any],
    of_run: Mapping[str, Callable[[Any], Figure]], of_results: Mapping[str, Callable[[], Figure]] | None = None,
    n_colours: Mapping[str, int] | None = None,
) -> Callable[..., int]:
    """The ``main`` of a script that writes the figures that --figures names, or all, to DIR/``name``/.

    ``config``, ``options``: the dataclasses of its flags. ``prepare(config, options, given)`` trains or reads what the
    figures ``of_run`` draw, and is called only where one of these is wanted. ``n_colours``: see ``png_bytes``.
    """
    drawers: dict[str, Callable[..., Figure]] = {**of_run, **(of_results or {})}

    @script
    def main(argv: Sequence[str]) -> None:
        asked, chosen, given = parse(config, options, argv, about, *examples,
                                     epilog=f"The pictures go to DIR/{name}/, where DIR is --outdir.")
        wanted = getattr(chosen, "figures", ()) or drawers
        paths = {figure: chosen.outdir / name / f"{figure}.png" for figure in drawers if figure in wanted}
        require_writable(*paths.values())
        with blas_threads(getattr(chosen, "threads", 1)):
            run = prepare(asked, chosen, given) if paths.keys() & of_run.keys() else None
            for figure, path in paths.items():
                draw = functools.partial(of_run[figure], run) if figure in of_run else drawers[figure]
                write_figure(path, draw, (n_colours or {}).get(figure), chosen.overwrite)

    return main


@dataclasses.dataclass(frozen=True)
class AnimationOptions(Settings):
    """What a script of an animation writes."""

    fps: float = setting(12.0, float_in(0.1, 50), "Show X frames a second.", usual=True, group="animation")
    threads: int = redeclared(RunOptions, "threads")
    quiet: bool = redeclared(RunOptions, "quiet")
    overwrite: bool = redeclared(OutOptions, "overwrite")


def load_finished(
    experiment: Any, path: Path | None, asked: Any, given: Collection[str], free: Collection[str] = ("data_dir",),
    required: Collection[str] = (), reached: Callable[..., bool] | None = None,
) -> tuple[Any, Mapping[str, Any]]:
    """Configuration and states of a checkpoint of finished trainings of the module ``experiment``, at least of the
    ``required`` models; ``reached``: see ``unfinished``. Without a ``path``: the configuration ``asked``, and no
    states. The ``given`` fields of ``asked`` must be those of the checkpoint; ``free`` ones may differ, and replace
    them. Raises UserError."""
    if path is None:
        return asked, {}
    config, states = load_checkpoint(experiment, path)
    require_same(path, config, asked, {*given} - {*free})
    if "data_dir" in given and config.dataset in ("strokes", "voxels", "shapes", "toys"):
        raise UserError(f"{path} was trained on {config.dataset}, which have no files: leave --data-dir out")
    if left := unfinished(experiment.EXPERIMENT, path, config, states, required, reached):
        raise UserError(left)
    return dataclasses.replace(config, **{name: getattr(asked, name) for name in free if name in given}), states
