#!/usr/bin/env python3
"""Animate the novel-viewpoint experiment: five objects turn while two networks, as they train, say what they see.

    python make_smallnorb_novel_viewpoint_gif.py --seed 1 --n-epochs 8 --snapshots 8 --sweep-frames 12 --fps 10

Training is stopped ``--snapshots`` times. Each time the objects turn once through the full circle (through all
elevations where elevation is held out), and every frame shows what the capsule network and the CNN with as many
parameters take them for, where the viewpoint lies, and the accuracy on held-out viewpoints up to then.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import imageio.v3 as iio
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.ticker import MaxNLocator
from PIL import Image

import smallnorb_novel_viewpoint as experiment
import visualize_smallnorb_novel_viewpoint as house
from smallnorb_novel_viewpoint import Array, Config, Data, Params, Split
from visualize_smallnorb_novel_viewpoint import MODEL_STYLES, ink, place, tint, write

SHOWN = ("capsules", "cnn_matched")  # models whose answers are drawn
N_GREYS, N_COLOURS = 48, 80  # of the palette that all frames share
HOLD = 2.5  # seconds that the last frame stays
MAX_FRAMES = 600


# ----------------------------------------------------------------------------------------------------------------------
# What the frames show
# ----------------------------------------------------------------------------------------------------------------------


class Sweep(NamedTuple):
    """One turn of the five objects: F viewpoints."""

    angles: Array  # (F,) azimuths, or elevations where those are held out, in degrees
    views: Split  # J * F views, those of class 0 first


def make_sweep(config: Config, data: Data, n_frames: int) -> Sweep:
    """From the start of the training range once round, at its middle elevation; or up through all elevations."""
    if config.held_out == "azimuth":
        angles = config.train_azimuths[0] + 360 * np.arange(n_frames) / n_frames
        other = np.full(n_frames, house.middle(config, data, "elevation", "train"))
        views = house.pick_views(config, data, angles, other)
        angles = views.azimuths[:n_frames]
    else:
        bounds = (*config.train_elevations, *config.test_elevations)
        angles = np.linspace(min(bounds), max(bounds), n_frames)
        views = house.pick_views(config, data, np.full(n_frames, 60.0), angles)
        angles = views.elevations[:n_frames]
    return Sweep(angles, views)


def snapshot_epochs(n_epochs: int, snapshots: int) -> list[int]:
    """Evenly spread epochs, the last one among them."""
    return [round(n_epochs * (k + 1) / snapshots) for k in range(snapshots)]


def confidence(config: Config, name: str, scores: Array) -> Array:
    """Bars between 0 and 1 for scores (N, J): their softmax; the activations themselves under spread loss."""
    if name == "capsules" and config.loss == "spread":
        return scores
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


class Recorder:
    """A callback that keeps, for each snapshot, the bars of the sweep (J, F, J), and in the end the histories."""

    def __init__(self, config: Config, sweep: Sweep, epochs: list[int]) -> None:
        self.config, self.sweep, self.epochs = config, sweep, epochs
        self.models = experiment.make_models(config)
        self.bars: dict[tuple[str, int], Array] = {}
        self.histories: dict[str, dict[str, list[float]]] = {}

    def __call__(self, name: str, epoch: int, params: Params, history: dict[str, list[float]]) -> None:
        self.histories[name] = history
        if name in SHOWN and epoch in self.epochs:
            scores = experiment.predict_scores(self.models[name], params, self.sweep.views.images)
            n = experiment.N_CLASSES
            self.bars[name, epoch] = confidence(self.config, name, scores).reshape(n, -1, n)


# ----------------------------------------------------------------------------------------------------------------------
# Drawing: the parts that stay are drawn once, the others over a copy of them
# ----------------------------------------------------------------------------------------------------------------------

GIF_WIDTH, GIF_HEIGHT = 8.8, 5.35  # inches
LEFT, PITCH, CELL = 0.86, 1.07, 1.0  # of the five columns
PICTURE_TOP = 0.86
BARS_TOP, BARS_HEIGHT = {"capsules": 2.42, "cnn_matched": 3.98}, 1.0
DIAL_LEFT, DIAL_TOP, DIAL_SIZE = 6.94, 1.14, 1.46
CURVE = (6.75, 3.5, 1.85, 1.35)


class Scene:
    """The canvas with its moving parts."""

    def __init__(self, config: Config, sweep: Sweep, recorder: Recorder) -> None:
        self.config, self.sweep, self.recorder = config, sweep, recorder
        n, n_frames = experiment.N_CLASSES, len(sweep.angles)
        self.images = sweep.views.images.reshape(n, n_frames, *sweep.views.images.shape[1:])
        self.fig = house.new_figure(GIF_HEIGHT, "", house.subtitle(config), width=GIF_WIDTH)
        self.canvas = self.fig.canvas
        assert isinstance(self.canvas, FigureCanvasAgg)
        self.moving: list[Any] = []

        self.title = self.move(write(self.fig, 0.12, 0.12, "", fontsize=12.5, fontweight="bold"))
        self.pictures: list[Any] = []
        self.rectangles: dict[tuple[str, int], list[Any]] = {}
        self.verdicts: dict[tuple[str, int], Any] = {}
        for k, name in enumerate(config.classes):
            x = LEFT + k * PITCH
            write(self.fig, x + CELL / 2, PICTURE_TOP - 0.2, name, ha="center", fontsize=10)
            ax = place(self.fig, x, PICTURE_TOP, CELL, CELL)
            self.pictures.append(self.move(house.show_image(ax, self.images[k, 0], house.GREY, 1)))
        write(self.fig, 0.12, PICTURE_TOP + CELL / 2 - 0.07, "object", fontweight="bold")
        for model in SHOWN:
            self.add_answers(model)
        key = "bars: a model's confidence in each class · grey band: the true class"
        write(self.fig, LEFT, GIF_HEIGHT - 0.24, key, fontsize=9, color=house.GREY)
        self.add_dial()
        self.add_curve()
        self.canvas.draw()
        self.background = self.canvas.copy_from_bbox(self.fig.bbox)

    def move(self, artist: Any) -> Any:
        """Keep an artist out of the background and redraw it in every frame."""
        artist.set_animated(True)
        self.moving.append(artist)
        return artist

    def add_answers(self, model: str) -> None:
        """Five bar charts: the scores that a model gives each object."""
        config, style, top = self.config, MODEL_STYLES[model], BARS_TOP[model]
        n = experiment.N_CLASSES
        write(self.fig, 0.12, top - 0.42, f"{style.label} say" + "s" * (model != "capsules"),
              color=style.colour, fontweight="bold", fontsize=10.5)  # fmt: skip
        for k in range(n):
            ax = place(self.fig, LEFT + k * PITCH, top, CELL, BARS_HEIGHT)
            ax.set(xlim=(0, 1), ylim=(n - 0.5, -0.5), xticks=[])
            ax.set_yticks(range(n), config.classes if k == 0 else [""] * n)
            ax.tick_params(length=0)
            ax.grid(False)
            ax.spines.bottom.set_visible(False)
            ax.axhspan(k - 0.5, k + 0.5, color="#e8e8e8", linewidth=0, zorder=0)  # the true class
            bars = ax.barh(range(n), np.zeros(n), height=0.62, color=style.colour)
            self.rectangles[model, k] = [self.move(bar) for bar in bars]
            self.verdicts[model, k] = self.move(
                write(self.fig, LEFT + k * PITCH + 0.02, top - 0.2, "", fontweight="bold", fontsize=9.5)
            )

    def add_dial(self) -> None:
        """A compass of azimuths, or a quadrant of elevations, with the ranges shaded and a hand."""
        config, angle = self.config, self.config.held_out
        ax: Any = place(self.fig, DIAL_LEFT, DIAL_TOP, DIAL_SIZE, DIAL_SIZE, projection="polar")
        ax.grid(False)
        ax.set(ylim=(0, 1), yticks=[])
        ax.spines["polar"].set(color=house.GREY, linewidth=0.8)
        if angle == "azimuth":
            ax.set_theta_zero_location("N")
            ax.set_theta_direction(-1)
            ax.set_thetagrids(range(0, 360, 90))
        else:
            low = 0 if min(config.train_elevations + config.test_elevations) >= 0 else -90
            ax.set_thetagrids(range(low, 91, 30))
            ax.set_thetalim(np.deg2rad(low), np.pi / 2)
        ax.tick_params(pad=0)
        for part, colour in (("train", house.TRAINED), ("test", house.HELD_OUT)):
            low, high = np.deg2rad(getattr(config, f"{part}_{angle}s"))
            ax.bar((low + high) / 2, 1, width=max(high - low, 0.02), color=tint(colour, 0.45), linewidth=0, zorder=0)
        (self.hand,) = ax.plot([0, 0], [0, 0.95], color=house.BLACK, linewidth=2.6, solid_capstyle="round")
        self.move(self.hand)
        middle = DIAL_LEFT + DIAL_SIZE / 2
        for x, align, word, colour in (
            (middle - 1.25, "left", "trained on", house.TRAINED),
            (middle + 1.05, "right", "held out", house.HELD_OUT),
        ):
            write(self.fig, x, PICTURE_TOP - 0.2, word, color=ink(colour), fontweight="bold", ha=align)
        y = DIAL_TOP + DIAL_SIZE + 0.25
        self.place_text = self.move(write(self.fig, middle, y, "", fontsize=10.5, ha="center", fontweight="bold"))

    def add_curve(self) -> None:
        """Held-out accuracy, epoch by epoch."""
        ax = place(self.fig, *CURVE)
        house.accuracy_axis(ax, label=None)
        ax.set_title("accuracy on held-out views", loc="left", x=-0.16)
        ax.set_xlabel("epoch", labelpad=1)
        n = self.config.n_epochs
        ax.set_xlim(0.5, n + 0.5)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
        self.lines = {}
        for model in SHOWN:
            (line,) = ax.plot([], [], **house.model_line(model, clip_on=False, markevery=max(1, n // 10)))
            self.lines[model] = self.move(line)

    def frame(self, epoch: int, f: int) -> Array:
        """RGB (H, W, 3) of viewpoint ``f`` after ``epoch`` epochs."""
        config, angle = self.config, self.config.held_out
        self.title.set_text(f"What do they see after {epoch} of {config.n_epochs} epochs?")
        for k, picture in enumerate(self.pictures):
            picture.set_data(house.grey_levels(self.images[k, f]))
        for (model, k), rectangles in self.rectangles.items():
            values = self.recorder.bars[model, epoch][k, f]
            answer = int(values.argmax())
            for j, (rectangle, value) in enumerate(zip(rectangles, values, strict=True)):
                rectangle.set_width(value)
                rectangle.set_alpha(1 if j == answer else 0.45)
            verdict, right = self.verdicts[model, k], answer == k
            verdict.set_text(("✓ " if right else "✗ ") + config.classes[answer])
            verdict.set_color(ink(house.RIGHT if right else house.WRONG))
        degrees = self.sweep.angles[f]
        self.hand.set_xdata(np.deg2rad([degrees, degrees]))
        circular = angle == "azimuth"
        where, colour = "between", house.GREY
        for part, word, range_colour in (("train", "trained on", house.TRAINED), ("test", "held out", house.HELD_OUT)):
            if experiment.in_range(np.array(degrees), getattr(config, f"{part}_{angle}s"), circular=circular):
                where, colour = word, range_colour
        self.place_text.set_text(f"{angle} {degrees % 360 if circular else degrees:.0f}°: {where}")
        self.place_text.set_color(ink(colour))
        for model, line in self.lines.items():
            values = self.recorder.histories[model]["held_out_accuracy"][:epoch]
            line.set_data(np.arange(1, len(values) + 1), values)
        canvas: Any = self.canvas
        canvas.restore_region(self.background)
        for artist in self.moving:
            (artist.axes or self.fig).draw_artist(artist)
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def draw_frames(config: Config, sweep: Sweep, recorder: Recorder) -> Iterator[Array]:
    with house.house_style():
        scene = Scene(config, sweep, recorder)
        for epoch in recorder.epochs:
            for f in range(len(sweep.angles)):
                yield scene.frame(epoch, f)


# ----------------------------------------------------------------------------------------------------------------------
# The file
# ----------------------------------------------------------------------------------------------------------------------


def encode_gif(
    frames: list[Array],
    fps: float,
    n_greys: int = N_GREYS,
    n_colours: int = N_COLOURS,
    texts: Sequence[tuple[float, float, float]] = (),
) -> bytes:
    """An endless GIF; all frames share one small palette, so that what does not move costs nothing.

    ``texts``: colours of letters, which are too few pixels to come into the palette by themselves.
    """
    pixels = np.concatenate(frames[:: max(1, len(frames) // 6)]).reshape(-1, 3)
    coloured = pixels[np.ptp(pixels, axis=1) > 8]
    reduced = Image.fromarray(coloured[None]).quantize(n_colours, method=Image.Quantize.MEDIANCUT)
    # Pillow looks colours up in steps of four, so white stays white only where no other grey is near.
    greys = np.repeat(np.append(np.linspace(0, 240, n_greys - 1).round().astype(int), 255), 3).tolist()
    palette = Image.new("P", (1, 1))
    kept = [round(255 * part) for colour in texts for share in (1, 0.8, 0.6, 0.35) for part in tint(colour, share)]
    palette.putpalette(greys + kept + (reduced.getpalette() or [])[: 3 * n_colours])
    few = [
        np.asarray(Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE).convert("RGB"))
        for frame in frames
    ]
    duration = [round(100 / fps) * 10.0] * len(frames)  # milliseconds; a GIF counts in hundredths of a second
    duration[-1] = max(duration[-1], 1000 * HOLD)
    stream = io.BytesIO()
    iio.imwrite(stream, few, extension=".gif", plugin="pillow", duration=duration, loop=0)
    return stream.getvalue()


# ----------------------------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------------------------


def frame_rate(text: str) -> float:
    value = experiment.number(0, 50, above=True)(text)  # the most that a GIF can say
    if value < 0.1:
        raise argparse.ArgumentTypeError(f"{text} is below 0.1")
    return value


def make_parser() -> argparse.ArgumentParser:
    parser = experiment.Parser(
        description="Train the models of the novel-viewpoint experiment and animate what they see on the way."
    )
    experiment.add_experiment_arguments(parser)
    animation = parser.add_argument_group("animation")
    count = experiment.whole_number(1, MAX_FRAMES)
    animation.add_argument(
        "--snapshots",
        type=count,
        metavar="N",
        help="epochs that are shown; default: 8, or --n-epochs where that is less",
    )
    animation.add_argument(
        "--sweep-frames", type=count, metavar="N", default=12, help="viewpoints of a turn; default: %(default)s"
    )
    animation.add_argument(
        "--fps", type=frame_rate, metavar="X", default=10.0, help="frames a second, 0.1 to 50; default: %(default)s"
    )
    animation.add_argument(
        "--out", type=Path, metavar="FILE", default=Path(f"{experiment.EXPERIMENT}.gif"), help="default: %(default)s"
    )
    animation.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    config = experiment.config_from_args(parser, args)
    snapshots = args.snapshots or min(8, config.n_epochs)
    if snapshots > config.n_epochs:
        parser.error(f"argument --snapshots: {snapshots} are more than --n-epochs {config.n_epochs}")
    if snapshots * args.sweep_frames > MAX_FRAMES:
        parser.error(
            f"argument --sweep-frames: {snapshots} snapshots of {args.sweep_frames} are more than {MAX_FRAMES} frames"
        )
    if args.out.suffix.lower() != ".gif":
        parser.error(f"argument --out: {args.out} does not end in .gif")

    def body() -> None:
        from tqdm import tqdm

        experiment.require_writable(args.out)
        with experiment.blas_threads(args.threads):
            data = experiment.make_data(config)
            house.require_every_class(config, data)
            sweep = make_sweep(config, data, args.sweep_frames)
            recorder = Recorder(config, sweep, snapshot_epochs(config.n_epochs, snapshots))
            states = experiment.train_all(config, data, quiet=args.quiet, callback=recorder)
            result = experiment.make_result(config, states, data)
        print(f"{experiment.describe(config)}; seed {config.seed}, {config.n_epochs} epochs")
        print(experiment.format_table(result))
        silent = args.quiet or not sys.stderr.isatty()
        total = snapshots * args.sweep_frames
        drawn = draw_frames(config, sweep, recorder)
        frames = list(tqdm(drawn, total=total, desc="frames", unit="frame", leave=False, disable=silent))
        print(house.write_if_changed(args.out, encode_gif(frames, args.fps)))

    return experiment.exit_status(body)


if __name__ == "__main__":
    sys.exit(main())
