"""Animate the affine-digits experiment: digits rotate, and three networks trained on upright ones name them.

    python -m more.make_mnist_affine_capsnet_gif --checkpoint run.npz

takes the networks that ``mnist_affine_capsnet.py --checkpoint FILE`` has trained; without ``--checkpoint`` they are
trained first, with the flags of that script. A frame shows the same digits at one angle, from -90 to 90 degrees: the
lengths of the ten capsules, the probabilities of the CNN and of LeNet-5, right and wrong answers, and the accuracy on
the test digits up to that angle.
"""

from __future__ import annotations

from support.figures import (
    GREY, MAX_FRAMES, OF_MEDIAN, RIGHT, WRONG, AnimationOptions, FigureOptions, Run, accuracy_axis, darkened, heading,
    lightened, make_figure, marked_answer, model_handles, model_line, show_pictures, write_animation,
)

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from more import mnist_affine_capsnet as affine, visualize_mnist_affine_capsnet as figures
from more.mnist_affine_capsnet import SWEEP, Config
from more.visualize_mnist_affine_capsnet import MODELS, J, degrees
from multimnist_capsnet import OUTPUT, Array, Workers, assess, int_in, parse, script, setting, softmax
from smallnorb_novel_viewpoint import blas_threads
from support.experiment import redeclared, require_writable

SHOWN = (2, 4, 7)  # classes
OTHER = "#b0b0b0"  # bars of classes that are not the answer


class Turning:
    """The first test digit of each shown class at every angle of the animation, and the models' outputs."""

    def __init__(self, run: Run, n_frames: int) -> None:
        self.angles = np.linspace(SWEEP[0], SWEEP[-1], n_frames)
        chosen = figures.first_of_each_class(run.data.test_labels)[list(SHOWN)]
        turned = [affine.rotated_digits(run.data, run.config, angle, chosen) for angle in self.angles]
        self.images = np.stack(turned)  # (frames, n, S, S)
        models, labels = affine.make_models(run.config), np.tile(SHOWN, n_frames)
        batch = affine.single_digits(self.images.reshape(-1, *self.images.shape[2:]), labels)
        self.outputs = {}  # of each model lengths of capsules, or probabilities (frames, n, J)
        for name, state in run.states.items():
            scores, _ = assess(models[name], state.params, batch, Workers())
            found = scores if name == "capsnet" else softmax(scores)
            self.outputs[name] = found.reshape(n_frames, len(SHOWN), J)


def add_bars(ax: Axes, label: int) -> tuple[Any, Any]:
    """Bars of ten classes, the true one shaded, and a text beside the axis for the verdict."""
    ax.set(xlim=(-0.6, J - 0.4), ylim=(0, 1), yticks=[])
    ax.set_xticks(range(J))
    ax.tick_params(axis="x", length=0, pad=2)
    ax.get_xticklabels()[label].set(fontweight="bold", color=darkened(RIGHT))
    ax.grid(False)
    ax.axvspan(label - 0.46, label + 0.46, color=lightened(RIGHT, 0.17), linewidth=0, zorder=0)
    ax.yaxis.set_label_position("right")
    ax.set_ylabel("\n", fontsize=11)  # room for the verdict
    verdict = ax.text(1.03, 0.5, "", transform=ax.transAxes, va="center", fontsize=11, fontweight="bold", animated=True)
    return ax.bar(range(J), np.zeros(J), 0.72, zorder=2, animated=True).patches, verdict


def make_scene(run: Run, turning: Turning) -> tuple[Figure, Callable[[int], None]]:
    """Digits, answers and curves; ``update(k)`` shows angle ``k``."""
    n, names = len(SHOWN), list(run.states)
    fig = make_figure(4.6, "", f"{figures.subtitle(run)}\nbars: lengths of the capsules, probabilities of the others;"
                      " shaded: the true class", width=8.8)
    title = fig.texts[0]
    sides: Any = fig.subfigures(1, 2, width_ratios=(2.6, 1))
    grid = sides[0].subplots(n, 1 + len(names), width_ratios=(0.9, *(1.6 for _ in names)))
    pictures = [show_pictures(ax, turning.images[None, None, 0, r]) for r, ax in enumerate(grid[:, 0])]
    for picture in pictures:
        picture.ax.images[0].set_animated(True)
        picture.ax.set_anchor("C")
    bars = {(name, r): add_bars(grid[r, 1 + m], SHOWN[r]) for m, name in enumerate(names) for r in range(n)}
    for ax, name in zip(grid[0, 1:], names, strict=True):
        heading(ax, MODELS[name].label, MODELS[name].colour)
    curve = sides[1].subplots()
    accuracy_axis(curve, None, 1 / J, side="center")
    figures.angle_axis(curve, 45)
    curve.set_xlabel("rotation")
    curve.set_box_aspect(1)
    curve.set_title(f"accuracy, {min(run.config.n_sweep, len(run.data.test_labels)):,} test digits")
    curve.legend(handles=model_handles(MODELS[name] for name in names), loc="upper left", bbox_to_anchor=(-0.05, -0.28))
    hand = curve.axvline(0, color=GREY, linewidth=1.0, zorder=1.8, animated=True)
    lines = {name: curve.plot([], [], clip_on=False, **model_line(MODELS[name], markevery=[-1], animated=True))[0]
             for name in names}
    sweep = {name: np.array([tested["sweep"][f"{a}"] for a in SWEEP]) for name, tested in run.tested.items()}

    def update(k: int) -> None:
        angle = float(turning.angles[k])
        title.set_text(f"Trained on upright digits, tested on rotated ones: {degrees(round(angle))}")
        for r, picture in enumerate(pictures):
            picture.update(turning.images[k, r][None, None], 32)
        for (name, r), (patches, verdict) in bars.items():
            scores = turning.outputs[name][k, r]
            answer = int(scores.argmax())
            right = answer == SHOWN[r]
            for j, bar in enumerate(patches):
                bar.set(height=scores[j], facecolor=OTHER if j != answer else RIGHT if right else WRONG)
            text, colour = marked_answer(right, str(answer))
            verdict.set(text=text, color=colour)
        hand.set_xdata([angle, angle])
        for name, line in lines.items():
            past = [a for a in SWEEP if a < angle]
            now = np.interp(angle, SWEEP, sweep[name])  # between the angles that were tested
            line.set_data([*past, angle], [*sweep[name][: len(past)], now])

    return fig, update


def held(angles: Array, rotation: Sequence[float]) -> set[int]:
    """The frames that stay longer: upright, and the angles of the rotated test sets."""
    return {int(np.abs(angles - angle).argmin()) for angle in (0, *rotation)}


@dataclasses.dataclass(frozen=True)
class Options(AnimationOptions):
    fps: float = redeclared(AnimationOptions, "fps", 10.0)
    out: Path = setting(Path(f"{affine.EXPERIMENT}.gif"), OUTPUT, "File of the animation, a GIF.", usual=True)
    checkpoint: Path | None = redeclared(FigureOptions, "checkpoint")
    frames: int = setting(73, int_in(2, MAX_FRAMES), "Show N angles from -90 to 90 degrees.", usual=True)
    threads: int = redeclared(affine.Options, "threads")


@script
def main(argv: Sequence[str]) -> None:
    config, options, given = parse(
        Config, Options, argv,
        "Animate the answers to rotating digits in the affine-digits experiment, from a checkpoint or after training"
        " its models." + OF_MEDIAN,
        ("--checkpoint run.npz", "Three rotating digits and these networks: about 1 minute."),
        ("--n-train 6000 --n-epochs 4", "After a short training on 6,000 digits: about 3 minutes."),
    )
    require_writable(options.out)
    run = figures.finished(config, options, given)
    with blas_threads(1):
        turning = Turning(run, options.frames)
        write_animation(options, lambda: make_scene(run, turning), [(k,) for k in range(options.frames)],
                        held(turning.angles, run.config.rotation))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
