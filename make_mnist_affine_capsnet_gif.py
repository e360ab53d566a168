#!/usr/bin/env python3
"""Animate the affine-digits experiment: digits turn, and three networks that never saw a turned one say what they are.

    python make_mnist_affine_capsnet_gif.py --checkpoint run.ckpt.npz

takes the networks that ``mnist_affine_capsnet.py --checkpoint FILE`` has trained; without ``--checkpoint`` they are
trained first, with the flags of that script. A frame shows the same digits at one angle, from -90 to 90 degrees: the
lengths of the ten capsules, the probabilities of the CNN and of LeNet-5, right and wrong answers, and the accuracy on
the test digits up to that angle.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from tqdm import tqdm

import make_smallnorb_novel_viewpoint_gif as gif
import mnist_affine_capsnet as experiment
import multimnist_capsnet as base
import visualize_mnist_affine_capsnet as figures
import visualize_smallnorb_novel_viewpoint as house
from mnist_affine_capsnet import SWEEP
from multimnist_capsnet import Array
from visualize_mnist_affine_capsnet import MODEL_STYLES, SHORT, J, Run, degrees, ink, place, show, tint, write

N_SHOWN = 3  # digits
N_GREYS, N_COLOURS = 32, 96  # of the palette

# ----------------------------------------------------------------------------------------------------------------------
# What the frames show
# ----------------------------------------------------------------------------------------------------------------------


def shown_digits(run: Run, classes: tuple[int, ...]) -> Array:
    """The first test digit of each of the classes."""
    labels = run.data.test_labels
    return np.array([int(np.flatnonzero(labels == j)[0]) for j in classes])


class Turning:
    """Some digits at every angle of the animation, and what the models believe."""

    def __init__(self, run: Run, classes: tuple[int, ...], n_frames: int) -> None:
        self.classes = classes
        self.angles = np.linspace(SWEEP[0], SWEEP[-1], n_frames)
        chosen = shown_digits(run, classes)
        self.images = np.stack([figures.turned(run, chosen, angle) for angle in self.angles])  # (frames, n, S, S)
        believed = figures.believed(run, self.images.reshape(-1, *self.images.shape[2:]))
        self.beliefs = {name: scores.reshape(n_frames, len(classes), J) for name, scores in believed.items()}


# ----------------------------------------------------------------------------------------------------------------------
# Drawing: the parts that stay are drawn once, the others over a copy of them
# ----------------------------------------------------------------------------------------------------------------------

GIF_WIDTH, GIF_HEIGHT = 8.8, 4.7  # inches
TOP, PITCH, CELL, LEFT = 1.14, 1.1, 0.86, 0.12
BARS_LEFT, BARS_PITCH, BARS_WIDTH, BARS_HEIGHT = 1.22, 1.58, 1.4, 0.72
CURVE_TOP, CURVE_LEFT, CURVE_WIDTH, CURVE_HEIGHT = 1.0, 6.44, 2.2, 2.2


class Scene:
    """The canvas with its moving parts."""

    def __init__(self, run: Run, turning: Turning) -> None:
        self.run, self.turning = run, turning
        self.fig = house.new_figure(GIF_HEIGHT, "", figures.subtitle(run.config, run.data), width=GIF_WIDTH)
        self.canvas = self.fig.canvas
        assert isinstance(self.canvas, FigureCanvasAgg)
        self.moving: list[Any] = []
        self.title = self.move(write(self.fig, 0.12, 0.12, "", fontsize=12.5, fontweight="bold"))
        self.pictures = [
            self.move(show(self.fig, LEFT, TOP + r * PITCH, CELL, turning.images[0, r])[1])
            for r in range(len(turning.classes))
        ]
        self.bars: dict[str, list[Any]] = {}
        self.verdicts: dict[str, list[Any]] = {}
        for m, name in enumerate(run.states):
            x = BARS_LEFT + m * BARS_PITCH
            head = f"{SHORT[name]}: {'lengths' if name == 'capsnet' else 'probability'}"
            write(self.fig, x, 0.7, head, color=ink(MODEL_STYLES[name].colour), fontweight="bold")
            self.bars[name], self.verdicts[name] = [], []
            for r, label in enumerate(turning.classes):
                self.add_bars(name, x, TOP + r * PITCH, label)
        x, y = BARS_LEFT, TOP + len(turning.classes) * PITCH - 0.04
        for text, colour in (("shaded: the true class", house.GREY), ("green: right", ink(house.RIGHT)),
                             ("red: wrong", ink(house.WRONG))):  # fmt: skip
            write(self.fig, x, y, text, color=colour)
            x += 0.078 * len(text) + 0.3
        self.add_curves()
        self.canvas.draw()
        self.background = self.canvas.copy_from_bbox(self.fig.bbox)

    def move(self, artist: Any) -> Any:
        """Keep an artist out of the background and redraw it in every frame."""
        artist.set_animated(True)
        self.moving.append(artist)
        return artist

    def add_bars(self, name: str, x: float, y: float, label: int) -> None:
        ax = place(self.fig, x, y, BARS_WIDTH, BARS_HEIGHT)
        ax.set(xlim=(-0.6, J - 0.4), ylim=(0, 1), yticks=[])
        ax.set_xticks(range(J))
        ax.tick_params(axis="x", length=0, pad=2)
        ax.get_xticklabels()[label].set(fontweight="bold", color=ink(house.RIGHT))
        ax.grid(False)
        ax.axvspan(label - 0.46, label + 0.46, color=tint(house.RIGHT, 0.17), linewidth=0, zorder=0)
        bars = ax.bar(range(J), np.zeros(J), 0.72, zorder=2)
        self.bars[name].append([self.move(bar) for bar in bars])
        at = x + BARS_WIDTH - 0.02, y - 0.2
        self.verdicts[name].append(self.move(write(self.fig, *at, "", ha="right", fontsize=10.5, fontweight="bold")))

    def add_curves(self) -> None:
        ax = place(self.fig, CURVE_LEFT, CURVE_TOP, CURVE_WIDTH, CURVE_HEIGHT)
        figures.accuracy_axis(ax)
        figures.angle_axis(ax, 45)
        ax.set_xlabel("turned by")
        n = min(self.run.config.n_sweep, len(self.run.data.test_labels))
        write(self.fig, CURVE_LEFT, 0.7, f"accuracy, {n:,} test digits")
        self.hand = self.move(ax.axvline(0, color=house.GREY, linewidth=1.0, zorder=1.8))
        self.lines, self.dots, self.values = {}, {}, {}
        for m, name in enumerate(self.run.states):
            colour, y = MODEL_STYLES[name].colour, CURVE_TOP + CURVE_HEIGHT + 0.56 + 0.24 * m
            self.lines[name] = self.move(ax.plot([], [], color=colour, linewidth=2.2, clip_on=False)[0])
            self.dots[name] = self.move(
                ax.plot([], [], clip_on=False, **house.model_line(name, MODEL_STYLES, markersize=7))[0]
            )
            write(self.fig, CURVE_LEFT, y, SHORT[name], color=ink(colour), fontweight="bold")
            self.values[name] = self.move(
                write(self.fig, CURVE_LEFT + CURVE_WIDTH, y, "", ha="right", color=ink(colour), fontweight="bold")
            )

    def frame(self, k: int) -> Array:
        """RGB (H, W, 3) of angle k."""
        turning, angle = self.turning, float(self.turning.angles[k])
        self.title.set_text(f"Trained on upright digits, asked about turned ones: {degrees(round(angle))}")
        for picture, image in zip(self.pictures, turning.images[k], strict=True):
            picture.set_data(np.clip(image, 0, 1))
        for name, rows in turning.beliefs.items():
            for r, label in enumerate(turning.classes):
                scores = rows[k, r]
                answer = int(scores.argmax())
                colour = house.RIGHT if answer == label else house.WRONG
                for j, bar in enumerate(self.bars[name][r]):
                    bar.set_height(scores[j])
                    bar.set_facecolor(colour if j == answer else "#b0b0b0")
                self.verdicts[name][r].set_text(f"{'✓' if answer == label else '✗'} {answer}")
                self.verdicts[name][r].set_color(ink(colour))
        self.hand.set_xdata([angle, angle])
        for name, tested in self.run.tested.items():
            accuracy = np.array([tested["sweep"][f"{a}"] for a in SWEEP])
            now = float(np.interp(angle, SWEEP, accuracy))  # between the angles that were tested
            past = [a for a in SWEEP if a < angle]
            self.lines[name].set_data([*past, angle], [*accuracy[: len(past)], now])
            self.dots[name].set_data([angle], [now])
            self.values[name].set_text(f"{100 * now:.0f} %")
        canvas: Any = self.canvas
        canvas.restore_region(self.background)
        for artist in self.moving:
            (artist.axes or self.fig).draw_artist(artist)
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def draw_frames(run: Run, turning: Turning) -> Iterator[Array]:
    with house.house_style():
        scene = Scene(run, turning)
        for k in range(len(turning.angles)):
            yield scene.frame(k)


# ----------------------------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------------------------


def digit_classes(text: str) -> tuple[int, ...]:
    classes = tuple(map(base.whole_number(0, J - 1), text.split(",")))
    if len(classes) > N_SHOWN:
        raise argparse.ArgumentTypeError(f"{text} are more than {N_SHOWN} digits")
    return classes


def make_parser() -> argparse.ArgumentParser:
    parser = base.Parser(
        description="Animate what the models of the affine-digits experiment take turning digits for, from a checkpoint"
        " or after training them."
    )
    experiment.add_experiment_arguments(parser)
    animation = parser.add_argument_group("animation")
    animation.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="take a finished training from there and train nothing"
    )
    animation.add_argument(
        "--digits", type=digit_classes, metavar="A,B,C", default=(2, 4, 7),
        help=f"classes of which the first test digit is shown, at most {N_SHOWN}; default: 2,4,7",
    )  # fmt: skip
    animation.add_argument(
        "--frames", type=base.whole_number(2, gif.MAX_FRAMES), metavar="N", default=73,
        help="angles from -90 to 90 degrees; default: %(default)s, every 2.5 degrees",
    )  # fmt: skip
    animation.add_argument(
        "--fps", type=gif.frame_rate, metavar="X", default=10.0, help="frames a second, 0.1 to 50; default: %(default)s"
    )
    animation.add_argument(
        "--out", type=Path, metavar="FILE", default=Path(f"{experiment.EXPERIMENT}.gif"), help="default: %(default)s"
    )
    animation.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    asked = experiment.config_from_args(args)
    if args.out.suffix.lower() != ".gif":
        parser.error(f"argument --out: {args.out} does not end in .gif")

    def body() -> None:
        base.require_writable(args.out)
        begun = figures.begin(args.checkpoint, asked, figures.given_flags(make_parser(), argv))
        run, result = begun.finish(threads=args.threads, quiet=args.quiet)
        print(f"{experiment.describe(result)}\n{experiment.format_table(result)}")
        silent = args.quiet or not sys.stderr.isatty()
        with base.single_blas():
            turning = Turning(run, args.digits, args.frames)
            drawn = draw_frames(run, turning)
            frames = list(tqdm(drawn, total=args.frames, desc="frames", unit="frame", leave=False, disable=silent))
        texts = [ink(c) for c in (house.RIGHT, house.WRONG, *(style.colour for style in MODEL_STYLES.values()))]
        content = gif.encode_gif(frames, args.fps, N_GREYS, N_COLOURS, texts)
        print(house.write_if_changed(args.out, content, base.atomic_write))

    return base.exit_status(body)


if __name__ == "__main__":
    sys.exit(main())
