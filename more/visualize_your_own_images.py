"""A sheet of ten of your own images, as the networks of your_own_images.py see them.

    python -m more.visualize_your_own_images --data-dir FOLDER
    python -m more.visualize_your_own_images --data-dir FOLDER --checkpoint run.npz

writes viz/your_own_images/pictures.png: ten test images and their classes and, with a checkpoint, the networks'
answers and what the CapsNet draws of each image from its longest capsule.
"""

from __future__ import annotations

from support.figures import (
    CAPSNET, CNN, EM_CAPSULES, GREEN, GREY, RIGHT, WRONG, OutOptions, darkened, evenly_spaced_indices, figure_script,
    make_figure, show_pictures,
)

import dataclasses
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, fontManager, get_font

from more import your_own_images as own
from multimnist_capsnet import Workers
from smallnorb_novel_viewpoint import (
    INPUT, SettingError, Settings, TrainState, UserError, print_message, require_same, setting,
)
from support.experiment import load_checkpoint, redeclared, unfinished

Array = np.ndarray
MODELS = {"capsules": EM_CAPSULES, "cnn": CNN, "capsnet": CAPSNET._replace(colour=GREEN, marker="D")}
N_SHOWN = 10  # images
MOST_LETTERS = 10


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """What of a training decides which images its test has, and how the networks are shown them."""

    data_dir: Path | None = redeclared(own.Config, "data_dir")
    image_size: int | None = redeclared(own.Config, "image_size")
    colour: str = redeclared(own.Config, "colour")
    seed: int = redeclared(own.Config, "seed", group="")


@dataclasses.dataclass(frozen=True)
class Options(OutOptions):
    checkpoint: Path | None = setting(
        None, INPUT, "Show the answers and reconstructions of these networks.", usual=True
    )


def fonts_for(names: Sequence[str]) -> tuple[list[str], set[str]]:
    """The families of DejaVu Sans and of the fonts of this machine that have the characters that it lacks, and those
    that none has."""
    dejavu = get_font(findfont("DejaVu Sans"))
    missing = {c for name in names for c in name if not dejavu.get_char_index(ord(c))}
    families = ["DejaVu Sans"]
    for entry in sorted(fontManager.ttflist, key=lambda entry: entry.name) if missing else ():
        if entry.name.startswith("Last Resort"):  # it has a box for every character
            continue
        try:
            font = get_font(entry.fname)
        except (OSError, RuntimeError):  # a font that this matplotlib cannot read
            continue
        if found := {c for c in missing if font.get_char_index(ord(c))}:
            families.append(entry.name)
            missing -= found
    return families, missing


def short_name(number: int, name: str, missing: set[str]) -> str:
    """The name of a class for a figure, or its number where no font has the name's characters."""
    if missing & set(name):
        return f"class {number}"
    return (name if len(name) <= MOST_LETTERS else f"{name[: MOST_LETTERS - 1]}…").replace("$", r"\$")


def sheet(images: Array, labels: Array, names: Sequence[str], answers: dict[str, Array], drawn: Array | None) -> Figure:
    """images (n, S, S, C) in [0, 1] and what the networks make of them: answers (n,) by model."""
    families, missing = fonts_for(names)
    shown = [short_name(k, name, missing) for k, name in enumerate(names, 1)]
    number = "Ten" if len(images) == N_SHOWN else len(images)
    subtitle = f"{number} test images as they see them" + ", and what the CapsNet draws of each" * (drawn is not None)
    rows = {"as read": images} | ({"drawn": drawn} if drawn is not None else {})
    height = 1.1 + len(rows) + 0.2 * len(answers)
    fig = make_figure(height, "Your images as the networks get them", subtitle)
    ax = fig.subplots()
    pictures = np.stack([np.broadcast_to(row, (*images.shape[:3], 3)) for row in rows.values()])
    grid = show_pictures(ax, pictures, tuple(rows), gap=(images.shape[1] // 3, 2), interpolation="nearest", n_greys=256)
    last, named = len(rows) - 1, dict[str, Any](fontsize=8, fontfamily=families, va="baseline")
    for n, label in enumerate(labels):
        grid.write(0, n, shown[label], 10, **named)
        for row in range(len(rows)):
            grid.frame(row, n, GREY, 0.8)
        for line, answer in enumerate(answers.values()):
            grid.write(last, n, shown[answer[n]], 24 + 14 * line,
                       color=darkened(RIGHT if answer[n] == label else WRONG), **named)
    for line, name in enumerate(answers):
        style = MODELS[name]
        grid.write(last, -0.5, style.short, 24 + 14 * line, color=darkened(style.colour), ha="right", **named)
    return fig


def shown_pictures(asked: Config, options: Options, given: Collection[str]) -> tuple[Any, ...]:
    """What ``sheet`` shows."""
    if asked.data_dir is None:
        raise SettingError("data_dir", "name the folder of your images")
    config = own.Config(**vars(asked))
    states: dict[str, TrainState] = {}
    if options.checkpoint:
        saved, states = load_checkpoint(own, options.checkpoint)
        if left := unfinished(own.EXPERIMENT, options.checkpoint, saved, states):
            print_message(f"warning: {left}")
        require_same(options.checkpoint, saved, config, given)
        config = dataclasses.replace(saved, data_dir=config.data_dir)
    data = own.make_data(config)
    config = own.resolved(config, data)
    if states and config.pictures != saved.pictures:
        raise UserError(f"{config.data_dir} has not the images that {options.checkpoint} was trained on")
    order = np.argsort(data.test.labels, kind="stable")
    chosen = order[evenly_spaced_indices(len(order), N_SHOWN)]
    images, labels, models = data.test.images[chosen], data.test.labels[chosen], own.make_models(config)
    answers = {
        name: own.answers_of(models[name], state.params, images, Workers()).argmax(axis=1)
        for name, state in states.items()
    }
    x = own.in_floats(images)
    drawn = own.reconstructions(states["capsnet"].params, x, config) if "capsnet" in states else None
    used = np.concatenate([labels, *answers.values()])
    names = [name if k in used else "" for k, name in enumerate(data.classes)]  # of those that are shown
    missing = fonts_for(names)[1]
    for k, name in enumerate(names, 1):
        if missing & set(name):
            print(f"class {k} is {name}")
    return x, labels, names, answers, drawn


main = figure_script(
    own.EXPERIMENT, Config, Options, "Draw a sheet of ten of your own images as the networks see them.",
    ("--data-dir photographs", "Ten test images: about 2 seconds."),
    ("--data-dir photographs --checkpoint run.npz", "And the networks' answers: about 3 seconds."),
    prepare=shown_pictures, of_run={"pictures": lambda shown: sheet(*shown)},
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
