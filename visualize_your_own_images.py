#!/usr/bin/env python3
"""A sheet of ten of your own pictures, as the networks of your_own_images.py see them.

    python visualize_your_own_images.py --data-dir FOLDER
    python visualize_your_own_images.py --data-dir FOLDER --checkpoint run.safetensors

writes viz/your_own_images/pictures.png: ten test pictures and their classes and, with a checkpoint, the networks'
answers and what the CapsNet draws of each picture from its longest capsule.
"""

from __future__ import annotations

import support.headless  # noqa: F401  before matplotlib

# isort: split

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, fontManager, get_font

import your_own_images as own
from fast.workers import SERIAL
from support.files import UserError
from support.optimizers import TrainState
from support.script import script
from support.settings import SettingError, folder, input_path, parse, setting

from support.figures import (  # isort: skip
    BLACK, GREY, MODEL_STYLES, RIGHT, WRONG, add_axes, add_frame, add_row_label, add_text, darkened,
    evenly_spaced_indices, new_figure, write_figures,
)  # fmt: skip

Array = np.ndarray
N_SHOWN, SIDE, LEFT, TOP = 10, 0.72, 1.15, 0.72  # pictures; inches
MOST_LETTERS = 10


@dataclasses.dataclass(frozen=True)
class Options:
    checkpoint: Path | None = setting(
        None, input_path, "Show the answers and reconstructions of these networks.", usual=True, group="files"
    )
    outdir: Path = setting(Path("viz"), folder, "Folder of the figure.", usual=True)


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


def shown_names(names: Sequence[str], missing: set[str]) -> tuple[list[str], list[str]]:
    """Short names of the classes for a figure, and the key of those that no font can show: their code points."""
    shown, key = [], []
    for k, name in enumerate(names, 1):
        short = name if len(name) <= MOST_LETTERS else f"{name[: MOST_LETTERS - 1]}…"
        if missing & set(name):
            short = f"class {k}"
            key.append(f"{short}: {' '.join(f'U+{ord(c):04X}' for c in name[:12])}")
        shown.append(short.replace("$", r"\$"))
    return shown, key


def sheet(images: Array, labels: Array, names: Sequence[str], answers: dict[str, Array], drawn: Array | None) -> Figure:
    """images (n, S, S, C) in [0, 1] and what the networks make of them: answers (n,) by model."""
    families, missing = fonts_for(names)
    shown, key = shown_names(names, missing)
    rows = 1 + (drawn is not None)
    height = TOP + rows * (SIDE + 0.28) + 0.2 * len(answers) + 0.2 * len(key) + 0.1
    subtitle = "Ten test pictures as they see them" + ", and what the CapsNet draws of each" * (drawn is not None)
    fig = new_figure(height, "Your pictures as the networks get them", subtitle)

    def name_under(x: float, y: float, label: int, colour: Any = BLACK) -> None:
        add_text(fig, x + SIDE / 2, y, shown[label], ha="center", fontsize=8, color=colour, fontfamily=families)

    for n, image in enumerate(images):
        x = LEFT + n * (SIDE + 0.06)
        for row, picture in enumerate([image] if drawn is None else [image, drawn[n]]):
            ax = add_axes(fig, x, TOP + row * (SIDE + 0.28), SIDE, SIDE)
            add_frame(ax, GREY, 0.8)
            ax.imshow(picture.squeeze(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        name_under(x, TOP + SIDE + 0.06, labels[n])
        for row, answer in enumerate(answers.values()):
            colour = darkened(RIGHT if answer[n] == labels[n] else WRONG)
            name_under(x, TOP + rows * (SIDE + 0.28) + 0.2 * row, answer[n], colour)
    add_row_label(fig, LEFT - 0.1, TOP + SIDE / 2, "as read")
    if drawn is not None:
        add_row_label(fig, LEFT - 0.1, TOP + 1.5 * SIDE + 0.28, "drawn")
    for row, name in enumerate(answers):
        style = MODEL_STYLES[own.EXPERIMENT][name]
        add_row_label(fig, LEFT - 0.1, TOP + rows * (SIDE + 0.28) + 0.2 * row + 0.06, style.short, style.colour)
    for row, line in enumerate(key):
        add_text(fig, 0.12, height - 0.2 * (len(key) - row) - 0.05, line, fontsize=8, color=GREY)
    return fig


@script
def main(argv: Sequence[str] | None = None) -> None:
    config, options, _ = parse(
        own.Config, Options, argv, "Draw a sheet of ten of your own pictures as the networks see them.",
        [
            ("--data-dir photographs", "Ten test pictures: about 2 seconds."),
            ("--data-dir photographs --checkpoint run.safetensors", "And what the networks make of them: 3 seconds."),
        ],
    )  # fmt: skip
    if config.data_dir is None:
        raise SettingError("data_dir", "name the folder of your pictures")
    states: dict[str, TrainState] = {}
    if options.checkpoint:
        saved, states = own.load_checkpoint(options.checkpoint)
        config = dataclasses.replace(saved, data_dir=config.data_dir)
    data = own.make_data(config)
    config = own.resolved(config, data)
    if states and config.pictures != saved.pictures:
        raise UserError(f"{config.data_dir} has not the pictures that {options.checkpoint} was trained on")
    order = np.argsort(data.test.labels, kind="stable")
    chosen = order[evenly_spaced_indices(len(order), N_SHOWN)]
    images, models = data.test.images[chosen], own.make_models(config)
    answers = {
        name: own.answers_of(models[name], state.params, images, SERIAL).argmax(axis=1)
        for name, state in states.items()
    }
    drawn = None
    if "capsnet" in states:
        drawn = own.reconstructions(states["capsnet"].params, own.in_floats(images), config)
    for k, name in enumerate(data.classes, 1):
        if fonts_for([name])[1]:
            print(f"class {k} is {name}")
    figure = {"pictures": lambda: sheet(own.in_floats(images), data.test.labels[chosen], data.classes, answers, drawn)}
    write_figures(options.outdir / own.EXPERIMENT, figure)


if __name__ == "__main__":
    sys.exit(main())
