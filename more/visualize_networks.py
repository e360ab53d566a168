"""Drawings of the four capsule networks as SVG, their shapes read from initialised networks and a blank image.

    python -m more.visualize_networks

writes viz/networks/EXPERIMENT.svg for each experiment with its default settings, for the images of its page.
"""

from __future__ import annotations

from support.figures import (
    BLACK, BLUE, GREEN, GREY, ORANGE, WIDTH, ModelStyle, OutOptions, Settings, darkened, figure_style, lightened,
    make_figure, write_if_changed,
)

import io
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle

import multimnist_capsnet as multimnist
import smallnorb_novel_viewpoint as smallnorb
import visualize_multimnist_capsnet as of_composites
import visualize_smallnorb_novel_viewpoint as of_views
from more import (
    conv_matrix_capsules as conv, mnist_affine_capsnet as affine, visualize_conv_matrix_capsules as of_grids,
    visualize_mnist_affine_capsnet as of_digits,
)
from smallnorb_novel_viewpoint import count_params, parse, script

Array = np.ndarray
HEIGHT = 2.6  # inches, below the subtitle


class Stage(NamedTuple):
    """What stands between two layers, and the layer below it.

    kind: "map", ``shape`` rows, columns, channels; "grid", rows, columns, types of capsules; "capsules", their number;
    "units", their number.
    """

    kind: str
    shape: tuple[int, ...]
    name: str
    text: str = ""  # under the shape
    layer: str = ""  # which computes it
    prefix: str = ""  # of the names of the layer's parameters


def capsnet_stages(config: Any, params: dict[str, Array]) -> list[Stage]:
    side, T = config.primary_side, config.primary_types
    blank = np.zeros((1, config.image_size, config.image_size), config.dtype)
    _, cache = multimnist.capsnet_forward(params, blank, config)
    _, rows, columns, channels = cache.relu1.shape
    K = params["conv1.w"].shape[0], params["primary.w"].shape[0]
    _, J, D = cache.v.shape
    decoder = [params[f"decoder{k}.w"].shape[1] for k in (1, 2)]
    return [
        Stage("map", (*blank.shape[1:], 1), "image"),
        Stage("map", (rows, columns, channels), "conv1", "", f"{K[0]}×{K[0]}\nReLU", "conv1"),
        Stage("grid", (side, side, T), "primary capsules", f"of {multimnist.PRIMARY_SIZE} numbers",
              f"{K[1]}×{K[1]}, stride 2\nsquash", "primary"),
        Stage("capsules", (J,), "digit capsules", f"of {D} numbers",
              f"votes, dynamic\nrouting, {config.routing_iters} times", "routing"),
        *(Stage("units", (n,), "decoder", "", "one capsule\ndense, ReLU" if k == 1 else "dense\nReLU", f"decoder{k}")
          for k, n in enumerate(decoder, 1)),
        Stage("map", (*blank.shape[1:], 1), "image", "of one digit", "dense\nsigmoid", "decoder3"),
    ]


def view_stages(config: Any, params: dict[str, Array]) -> list[Stage]:
    blank = np.zeros((1, smallnorb.IMAGE_SIZE, smallnorb.IMAGE_SIZE, config.in_channels), config.dtype)
    _, cache = smallnorb.make_models(config)["capsules"].forward(params, blank)
    I, J, P, _ = params["class.w"].shape
    K = params["conv1.w"].shape[0]
    pose = f"poses {P}×{P}, activations"
    return [
        Stage("map", blank.shape[1:], "image"),
        Stage("map", cache.relu.shape[1:], "conv1", "", f"{K}×{K}, stride 2\nReLU", "conv1"),
        Stage("capsules", (I,), "primary capsules", pose, "dense", "primary"),
        Stage("capsules", (J,), "class capsules", pose, f"votes, EM routing,\n{config.em_iters} times", "class"),
        Stage("units", (J,), "scores", "", "activations" if config.loss == "spread" else "‖μ‖²/16 + 4(a − ½)"),
    ]


def conv_stages(config: Any, params: dict[str, Array]) -> list[Stage]:
    blank = np.zeros((1, config.image_size, config.image_size, config.in_channels), config.dtype)
    _, cache = conv.make_capsules(config, conv.PLAIN).forward(params, blank)
    K, P = params["conv1.w"].shape[0], params["class.w"].shape[-1]
    k = params["convcaps1.w"].shape[0]
    pose, routing = f"poses {P}×{P},\nactivations", f"votes, EM routing,\n{config.em_iters} times"
    strides = conv.CAPS_STRIDES

    def layer(name: str, of: conv.FieldRoutingCache) -> Stage:
        shape = (*of.fields.out, of.em.m_steps[-1].a.shape[1])
        return Stage("grid", shape, name, pose, f"{k}×{k}, stride {strides[name.lower()]}\n{routing}", name.lower())

    return [
        Stage("map", blank.shape[1:], "image"),
        Stage("map", cache.relu.shape[1:], "conv1", "", f"{K}×{K}, stride 2\nReLU", "conv1"),
        Stage("grid", cache.a_primary.shape[1:], "primary capsules", pose, "1×1", "primary"),
        layer("ConvCaps1", cache.convcaps1),
        layer("ConvCaps2", cache.convcaps2),
        Stage("capsules", (cache.a.shape[1],), "class capsules", pose, f"coordinate addition\n{routing}", "class"),
    ]


Stages = Callable[[Any, dict[str, Array]], list[Stage]]
NETWORKS: dict[str, tuple[Any, Stages, Any, dict[str, ModelStyle]]] = {
    smallnorb.EXPERIMENT: (smallnorb, view_stages, smallnorb.Config(), of_views.MODELS),
    multimnist.EXPERIMENT: (multimnist, capsnet_stages, multimnist.Config(), of_composites.MODELS),
    affine.EXPERIMENT: (affine, capsnet_stages, affine.Config(), of_digits.MODELS),
    conv.EXPERIMENT: (conv, conv_stages, conv.Config(dataset="shapes"), of_grids.MODELS),
}


def draw_stack(ax: Axes, x: float, y: float, side: float, n: int, colour: str, cells: int) -> None:
    """Maps behind one another, at most five, the front one centred at x, y; ``cells``: lines of a grid on it."""
    for depth in reversed(range(min(n, 5))):
        corner = x - side / 2 + 0.05 * depth, y - side / 2 + 0.05 * depth
        ax.add_patch(Rectangle(corner, side, side, facecolor=lightened(colour, 0.25), edgecolor=colour, linewidth=0.8))
    for line in np.linspace(-side / 2, side / 2, cells + 1)[1:-1] if cells else ():
        ax.plot([x + line] * 2, [y - side / 2, y + side / 2], color=colour, linewidth=0.4)
        ax.plot([x - side / 2, x + side / 2], [y + line] * 2, color=colour, linewidth=0.4)


def draw_stage(ax: Axes, x: float, y: float, stage: Stage, largest: int) -> float:
    """The drawing of a stage, centred at x, y. Returns half of its width."""
    if stage.kind in ("map", "grid"):
        side = 0.28 + 0.62 * stage.shape[0] / largest
        cells = stage.shape[0] if stage.kind == "grid" else 0
        draw_stack(ax, x, y, side, stage.shape[2], BLUE if cells else GREY, cells)
        return side / 2 + 0.05 * min(stage.shape[2] - 1, 4)
    if stage.kind == "capsules":
        n, gap = stage.shape[0], 0.125
        for k in range(n):
            at = y + (k - (n - 1) / 2) * gap
            ax.add_patch(Rectangle((x - 0.16, at - 0.05), 0.25, 0.1, facecolor=lightened(BLUE, 0.25), edgecolor=BLUE,
                                   linewidth=0.8))
            if "activations" in stage.text:
                ax.add_patch(Circle((x + 0.15, at), 0.035, facecolor=ORANGE, edgecolor="none"))
        return 0.2
    height = 0.5 + 0.7 * min(1.0, stage.shape[0] / 600)
    ax.add_patch(Rectangle((x - 0.06, y - height / 2), 0.12, height, facecolor=lightened(GREEN, 0.25), edgecolor=GREEN,
                           linewidth=0.8))
    return 0.08


def draw_network(name: str) -> Figure:
    script, stages_of, config, styles = NETWORKS[name]
    models = script.make_models(config)
    params = {key: model.init_params(np.random.default_rng(0)) for key, model in models.items()}
    capsules, *others = models
    stages = stages_of(config, params[capsules])
    baselines = "; ".join(f"{styles[key].label}: {count_params(params[key]):,}" for key in others)
    subtitle = f"{count_params(params[capsules]):,} parameters (of each layer in green); {baselines}"
    fig = make_figure(HEIGHT + 0.6, f"The capsule network of {name}.py", subtitle)
    ax = fig.subplots()
    ax.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0), aspect="equal")
    ax.axis("off")
    middle, x = 1.1, np.linspace(0.72, WIDTH - 0.72, len(stages))
    largest = max(stage.shape[0] for stage in stages if stage.kind in ("map", "grid"))
    halves = [draw_stage(ax, x[k], middle, stage, largest) for k, stage in enumerate(stages)]
    for k, stage in enumerate(stages):
        centred: dict[str, Any] = {"ha": "center", "va": "top", "linespacing": 1.2}
        ax.text(x[k], 1.88, stage.name, fontsize=8.5, fontweight="bold", **centred)
        ax.text(x[k], 2.06, " × ".join(map(str, stage.shape)), fontsize=8.5, **centred)
        ax.text(x[k], 2.25, stage.text, fontsize=8, color=GREY, **centred)
        if k:
            ends = (x[k - 1] + halves[k - 1] + 0.03, middle), (x[k] - halves[k] - 0.03, middle)
            ax.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=9, color=BLACK))
            n = sum(array.size for key, array in params[capsules].items() if key.split(".")[0] == stage.prefix)
            centre = (x[k - 1] + x[k]) / 2
            ax.text(centre, 0.38, stage.layer, fontsize=8, **centred | {"va": "bottom"})
            if n:
                ax.text(centre, 0.41, f"{n:,}", fontsize=8, color=darkened(GREEN), **centred)
    return fig


def svg_bytes(name: str) -> bytes:
    """The same bytes every time; letters as outlines, which need no font."""
    stream = io.BytesIO()
    with figure_style(), matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        draw_network(name).savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()


@script
def main(argv: Sequence[str]) -> None:
    _, options, _ = parse(
        Settings, OutOptions, argv, "Draw the four capsule networks as SVG, with their real shapes and numbers of"
        " parameters.", ("", "All four drawings: about 3 seconds."),
        epilog="The drawings go to DIR/networks/, where DIR is --outdir.",
    )
    for name in NETWORKS:
        path = options.outdir / "networks" / f"{name}.svg"
        print(write_if_changed(path, svg_bytes(name), options.overwrite))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
