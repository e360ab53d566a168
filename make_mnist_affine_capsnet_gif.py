#!/usr/bin/env python3
"""Animate the affine-digits experiment: digits rotate, and three networks trained on upright ones name them.

    python make_mnist_affine_capsnet_gif.py --checkpoint run.safetensors

takes the networks that ``mnist_affine_capsnet.py --checkpoint FILE`` has trained; without ``--checkpoint`` they are
trained first, with the flags of that script. A frame shows the same digits at one angle, from -90 to 90 degrees: the
lengths of the ten capsules, the probabilities of the CNN and of LeNet-5, right and wrong answers, and the accuracy on
the test digits up to that angle.
"""

from __future__ import annotations

import support.headless  # noqa: F401  before matplotlib

# isort: split

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mnist_affine_capsnet as experiment
import multimnist_capsnet as base
import visualize_mnist_affine_capsnet as figures
from fast.workers import blas_threads
from mnist_affine_capsnet import SWEEP, Config
from multimnist_capsnet import Array
from support.figures import (
    GREY,
    MAX_FRAMES,
    RIGHT,
    WRONG,
    AnimationOptions,
    Scene,
    add_axes,
    add_image,
    add_text,
    darkened,
    lightened,
    marked_answer,
    model_line,
    new_figure,
    write_gif,
)
from support.files import require_writable
from support.script import script
from support.settings import SettingError, input_path, int_in, list_of, output_path, parse, redeclared, setting
from visualize_mnist_affine_capsnet import MODELS, J, Run, degrees

N_SHOWN = 3  # digits
N_GREYS, N_COLOURS = 32, 96  # of the palette

# ----------------------------------------------------------------------------------------------------------------------
# What the frames show
# ----------------------------------------------------------------------------------------------------------------------


class Turning:
    """Digits at every angle of the animation, and the models' outputs."""

    def __init__(self, run: Run, classes: tuple[int, ...], n_frames: int) -> None:
        self.classes = classes
        self.angles = np.linspace(SWEEP[0], SWEEP[-1], n_frames)
        chosen = figures.of_each_class(run.data.test_labels)[0][list(classes)]  # the first of each
        self.images = np.stack([figures.turned(run, chosen, angle) for angle in self.angles])  # (frames, n, S, S)
        outputs = figures.outputs(run, self.images.reshape(-1, *self.images.shape[2:]))
        self.outputs = {name: scores.reshape(n_frames, len(classes), J) for name, scores in outputs.items()}


# ----------------------------------------------------------------------------------------------------------------------
# Drawing
# ----------------------------------------------------------------------------------------------------------------------

GIF_WIDTH, GIF_HEIGHT = 8.8, 4.7  # inches
TOP, PITCH, CELL, LEFT = 1.14, 1.1, 0.86, 0.12
BARS_LEFT, BARS_PITCH, BARS_WIDTH, BARS_HEIGHT = 1.22, 1.58, 1.4, 0.72
CURVE_TOP, CURVE_LEFT, CURVE_WIDTH, CURVE_HEIGHT = 1.0, 6.44, 2.2, 2.2


class TurningDigits(Scene):
    """Digits, answers and curves."""

    def __init__(self, run: Run, turning: Turning) -> None:
        self.run, self.turning = run, turning
        super().__init__(new_figure(GIF_HEIGHT, "", figures.subtitle(run.config, run.data), width=GIF_WIDTH))
        self.pictures = [
            self.move(add_image(self.fig, LEFT, TOP + r * PITCH, CELL, turning.images[0, r]))
            for r in range(len(turning.classes))
        ]
        self.bars: dict[str, list[Any]] = {}
        self.verdicts: dict[str, list[Any]] = {}
        for m, name in enumerate(run.states):
            x = BARS_LEFT + m * BARS_PITCH
            head = f"{MODELS[name].short}: {'lengths' if name == 'capsnet' else 'probability'}"
            add_text(self.fig, x, 0.7, head, color=darkened(MODELS[name].colour), fontweight="bold")
            self.bars[name], self.verdicts[name] = [], []
            for r, label in enumerate(turning.classes):
                self.add_bars(name, x, TOP + r * PITCH, label)
        x, y = BARS_LEFT, TOP + len(turning.classes) * PITCH - 0.04
        for text, colour in (("shaded: the true class", GREY), ("green: right", darkened(RIGHT)),
                             ("red: wrong", darkened(WRONG))):  # fmt: skip
            add_text(self.fig, x, y, text, color=colour)
            x += 0.078 * len(text) + 0.3
        self.add_curves()
        self.finish_background()

    def add_bars(self, name: str, x: float, y: float, label: int) -> None:
        ax = add_axes(self.fig, x, y, BARS_WIDTH, BARS_HEIGHT)
        ax.set(xlim=(-0.6, J - 0.4), ylim=(0, 1), yticks=[])
        ax.set_xticks(range(J))
        ax.tick_params(axis="x", length=0, pad=2)
        ax.get_xticklabels()[label].set(fontweight="bold", color=darkened(RIGHT))
        ax.grid(False)
        ax.axvspan(label - 0.46, label + 0.46, color=lightened(RIGHT, 0.17), linewidth=0, zorder=0)
        bars = ax.bar(range(J), np.zeros(J), 0.72, zorder=2)
        self.bars[name].append([self.move(bar) for bar in bars])
        at = x + BARS_WIDTH - 0.02, y - 0.2
        self.verdicts[name].append(self.move(add_text(self.fig, *at, "", ha="right", fontsize=10.5, fontweight="bold")))

    def add_curves(self) -> None:
        ax = add_axes(self.fig, CURVE_LEFT, CURVE_TOP, CURVE_WIDTH, CURVE_HEIGHT)
        figures.sweep_accuracy_axis(ax)
        figures.angle_axis(ax, 45)
        ax.set_xlabel("rotation")
        n = min(self.run.config.n_sweep, len(self.run.data.test_labels))
        add_text(self.fig, CURVE_LEFT, 0.7, f"accuracy, {n:,} test digits")
        self.hand = self.move(ax.axvline(0, color=GREY, linewidth=1.0, zorder=1.8))
        self.lines, self.dots, self.values = {}, {}, {}
        for m, name in enumerate(self.run.states):
            colour, y = MODELS[name].colour, CURVE_TOP + CURVE_HEIGHT + 0.56 + 0.24 * m
            self.lines[name] = self.move(ax.plot([], [], color=colour, linewidth=2.2, clip_on=False)[0])
            self.dots[name] = self.move(ax.plot([], [], clip_on=False, **model_line(MODELS[name], markersize=7))[0])
            add_text(self.fig, CURVE_LEFT, y, MODELS[name].short, color=darkened(colour), fontweight="bold")
            self.values[name] = self.move(
                add_text(
                    self.fig, CURVE_LEFT + CURVE_WIDTH, y, "", ha="right", color=darkened(colour), fontweight="bold"
                )
            )

    def frame(self, k: int) -> Array:
        """RGB (H, W, 3) of angle k."""
        turning, angle = self.turning, float(self.turning.angles[k])
        self.title.set_text(f"Trained on upright digits, tested on rotated ones: {degrees(round(angle))}")
        for picture, image in zip(self.pictures, turning.images[k], strict=True):
            picture.set_data(np.clip(image, 0, 1))
        for name, rows in turning.outputs.items():
            for r, label in enumerate(turning.classes):
                scores = rows[k, r]
                answer = int(scores.argmax())
                right = answer == label
                for j, bar in enumerate(self.bars[name][r]):
                    bar.set_height(scores[j])
                    bar.set_facecolor("#b0b0b0" if j != answer else RIGHT if right else WRONG)
                text, colour = marked_answer(right, str(answer))
                self.verdicts[name][r].set(text=text, color=colour)
        self.hand.set_xdata([angle, angle])
        for name, tested in self.run.tested.items():
            accuracy = np.array([tested["sweep"][f"{a}"] for a in SWEEP])
            now = float(np.interp(angle, SWEEP, accuracy))  # between the angles that were tested
            past = [a for a in SWEEP if a < angle]
            self.lines[name].set_data([*past, angle], [*accuracy[: len(past)], now])
            self.dots[name].set_data([angle], [now])
            self.values[name].set_text(f"{100 * now:.0f} %")
        return self.draw()


# ----------------------------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Options(AnimationOptions):
    fps: float = redeclared(AnimationOptions, "fps", 10.0)
    out: Path = setting(Path(f"{experiment.EXPERIMENT}.gif"), output_path, "File of the animation.", usual=True)
    checkpoint: Path | None = setting(
        None, input_path, "Show the finished training of this file. Without it, train first, with the flags of the"
        " experiment.", usual=True,
    )  # fmt: skip
    digits: tuple[int, ...] = setting(
        (2, 4, 7), list_of(int_in(0, J - 1)), f"Show the first test digit of these classes, at most {N_SHOWN}.",
        usual=True,
    )  # fmt: skip
    frames: int = setting(73, int_in(2, MAX_FRAMES), "Show N angles from -90 to 90 degrees.", usual=True)
    threads: int = redeclared(base.DigitOptions, "threads", base.DigitOptions.threads)

    def check(self, given: Mapping[str, Any]) -> None:
        if len(self.digits) > N_SHOWN:
            raise SettingError("digits", f"{len(self.digits)} are more than {N_SHOWN}")


@script
def main(argv: Sequence[str] | None = None) -> None:
    config, options, given = parse(
        Config, Options, argv,
        "Animate the answers to rotating digits in the affine-digits experiment, from a checkpoint or after training"
        " its models.",
        [
            ("--checkpoint run.safetensors", "Three rotating digits and these networks: about 1 minute."),
            ("--checkpoint run.safetensors --digits 6,9 --out 69.gif", "Two other digits: about 1 minute."),
            ("--n-train 6000 --n-epochs 4", "After a short training on 6,000 digits: about 3 minutes."),
        ],
    )  # fmt: skip
    require_writable(options.out)
    run = figures.finish(*figures.prepare(options.checkpoint, config, given), options.threads, options.quiet)
    text_colours = [darkened(c) for c in (RIGHT, WRONG, *(style.colour for style in MODELS.values()))]
    with blas_threads(1):
        turning = Turning(run, options.digits, options.frames)
        holds = {int(np.abs(turning.angles - angle).argmin()) for angle in (0, *run.config.rotation)}
        write_gif(options, lambda: TurningDigits(run, turning), [(k,) for k in range(options.frames)],
                  N_GREYS, N_COLOURS, text_colours, holds)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
