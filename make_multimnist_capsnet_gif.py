#!/usr/bin/env python3
"""Animate the MultiMNIST experiment: a capsule network learns to take two overlapping digits apart.

    python make_multimnist_capsnet_gif.py --n-epochs 8 --n-train 6000

Every ``--snapshot-every`` steps a frame shows the same test composites, what the decoder draws from the capsule of each
of their two digits, the answer of the network, and the accuracy up to then. Of reported settings it is, without
--seed, the seed whose capsule network has the median accuracy.
"""

from __future__ import annotations

from support.figures import (
    CAPSNET, MAX_FRAMES, OF_MEDIAN, AnimationOptions, Run, accuracy_axis, darkened, make_figure, marked_answer,
    model_line, show_pictures, step_axis, tested, with_reported_seed, write_animation,
)

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

import multimnist_capsnet as multimnist
import visualize_multimnist_capsnet as figures
from multimnist_capsnet import (
    OUTPUT, Array, Batch, Config, Data, RunOptions, SettingError, TrainState, Workers, int_in, parse, script, setting,
)
from support.experiment import redeclared, require_writable
from visualize_multimnist_capsnet import DIGIT_COLOURS, both_names, in_colour

N_SHOWN = 5  # composites
N_TESTED = 500  # composites of the curve, the first of the test set
N_GREYS = 16  # a picture has few, for a small file


class Snapshot(NamedTuple):
    step: int
    drawn: Array  # (5, 2, H, W)
    answers: Array  # (5, 2), see figures.in_order_of_labels
    set_accuracy: float


class Recorder:
    """A callback that takes a snapshot before the training, every so many steps, and after the last."""

    def __init__(self, config: Config, data: Data, every: int, workers: Workers) -> None:
        self.config, self.every, self.workers = config, every, workers
        self.model = multimnist.make_models(config)["capsnet"]
        self.tested = data.test.part(0, N_TESTED)
        chosen = figures.varied(self.tested.labels, np.arange(len(self.tested.labels)), N_SHOWN)
        self.shown = Batch(*(array[chosen] for array in self.tested))
        self.snapshots: list[Snapshot] = []

    def __call__(self, state: TrainState, epoch_ended: bool) -> None:
        if state.step % self.every and state.step != self.config.n_steps:
            return
        labels = self.shown.labels
        lengths, cache = multimnist.capsnet_forward(state.params, self.shown.images, self.config)
        answers = figures.in_order_of_labels(labels, multimnist.top_labels(lengths, 2))
        drawn = multimnist.reconstruct(state.params, cache.v, labels)
        tested = multimnist.evaluate(self.model, state.params, self.tested, self.workers)
        self.snapshots.append(Snapshot(state.step, drawn, answers, tested["set_accuracy"]))


def make_scene(recorder: Recorder, subtitle: str) -> tuple[Figure, Callable[[int], None]]:
    """Composites, what is drawn of them, answers and the curve; ``update(k)`` shows snapshot ``k``."""
    config, shown, snapshots = recorder.config, recorder.shown, recorder.snapshots
    fig = make_figure(4.7, "", subtitle, width=8.8)
    title = fig.texts[0]
    left, right = fig.subplots(1, 2, width_ratios=(3.2, 1))
    seen = np.repeat(shown.images[..., None], 3, axis=3)

    def sheet(drawn: Array) -> Array:
        return np.stack([seen, *(in_colour(drawn[:, d], colour) for d, colour in enumerate(DIGIT_COLOURS))])

    rows = ("the network\nsees", "first digit,\ndrawn from\nits capsule", "second digit,\ndrawn from\nits capsule")
    grid = show_pictures(left, sheet(snapshots[0].drawn), rows, [both_names(config, two) for two in shown.labels],
                         gap=(2, 2), interpolation="bicubic")
    figures.colour_rows(left, dict(enumerate(DIGIT_COLOURS, 1)))
    left.images[0].set_animated(True)
    left.set_xlabel(" ")  # room for the answers
    left.xaxis.set_label_position("bottom")
    said = [grid.write(2, m, "", fontsize=11, fontweight="bold", animated=True) for m in range(len(seen))]

    accuracy_axis(right, None, 1 / figures.N_PAIRS, f"1/{figures.N_PAIRS}")
    right.set_box_aspect(1.35)
    right.set_anchor("N")
    step_axis(right, config.n_steps)
    right.set(title="both digits right", xlabel=f"step (on {len(recorder.tested.labels)} {tested(config)}"
              "\ncomposites)")
    (line,) = right.plot([], [], **model_line(CAPSNET, marker="none", linewidth=2.2, animated=True))
    percent = right.text(1, 1.02, "", transform=right.transAxes, ha="right", va="bottom", fontweight="bold",
                         color=darkened(CAPSNET.colour), animated=True)

    def update(k: int) -> None:
        now = snapshots[k]
        title.set_text(f"A capsule network takes two digits apart: step {now.step:,} of {config.n_steps:,}")
        grid.update(sheet(now.drawn), N_GREYS)
        for text, labels, answers in zip(said, shown.labels, now.answers, strict=True):
            words, colour = marked_answer(bool((answers == labels).all()), both_names(config, answers))
            text.set(text=words, color=colour)
        line.set_data([s.step for s in snapshots[: k + 1]], [s.set_accuracy for s in snapshots[: k + 1]])
        percent.set_text(f"{100 * now.set_accuracy:.0f} %")

    return fig, update


@dataclasses.dataclass(frozen=True)
class Options(AnimationOptions):
    fps: float = redeclared(AnimationOptions, "fps", 10.0)
    out: Path = setting(Path(f"{multimnist.EXPERIMENT}.gif"), OUTPUT, "File of the animation, a GIF.", usual=True)
    snapshot_every: int = setting(25, int_in(1, 10**9), "Take N steps from one frame to the next.", usual=True)
    threads: int = redeclared(multimnist.Options, "threads")


@script
def main(argv: Sequence[str]) -> None:
    config, options, given = parse(
        Config, Options, argv,
        "Train the capsule network of the MultiMNIST experiment and animate its reconstructions." + OF_MEDIAN,
        ("", "A frame every 25 steps of four epochs: about 100 seconds."),
        ("--n-epochs 1 --out draft.gif", "A draft of one epoch: about 30 seconds."),
        ("--n-epochs 20 --snapshot-every 150", "A longer training, and a frame every 150 steps: about 8 minutes."),
    )
    if (n_frames := 1 + -(-config.n_steps // options.snapshot_every)) > MAX_FRAMES:
        raise SettingError("snapshot_every", f"{n_frames:,} frames are more than {MAX_FRAMES}")
    require_writable(options.out)
    config, who, _ = with_reported_seed(*figures.MEDIAN_OF, config, given)
    data = multimnist.make_data(config)
    if data.name == "strokes":  # which no result is of
        who = f"seed {config.seed}"
    config = multimnist.resolve_auto(config, data)
    with Workers(options.threads) as workers:
        recorder = Recorder(config, data, options.snapshot_every, workers)
        run_options = RunOptions(threads=options.threads, quiet=options.quiet)
        states = multimnist.train_all(config, data, run_options, names=("capsnet",), callback=recorder)
    run = Run(config, data, states, who)
    frames = [(k,) for k in range(len(recorder.snapshots))]
    write_animation(options, lambda: make_scene(recorder, figures.subtitle(run)), frames)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
