"""Draw the times of a training step, and of the same network in PyTorch and JAX: ``python -m benchmarks.figure``."""

from __future__ import annotations

from support.experiment import ROOT

from support.figures import BLUE, GREY, OutOptions, Settings, bare, figure_script, lightened, make_figure
from support.results import read_result

import sys
from typing import Any

from matplotlib.figure import Figure


STEPS = ROOT / "results/benchmarks/steps.json"
NETWORKS = {
    "multimnist": "CapsNet", "smallnorb": "dense matrix capsules", "matrix_capsules": "convolutional matrix capsules",
}
FORMS = {  # of a step, by their names in the tables
    "numpy": "numpy", "PyTorch eager": "PyTorch",
    "torch.compile, fused Adam, channels-last": "PyTorch, compiled", "JAX, jit": "JAX",
}


def draw_steps(tables: dict[str, Any]) -> Figure:
    """A panel for each network, a bar for each form of its step."""
    text = "batch of 32, two processor cores; each panel has a scale of its own"
    fig = make_figure(2.7, "Time of a training step", text)
    forms = [form for form in FORMS if all(form in {row[0] for row in tables[name]["rows"]} for name in NETWORKS)]
    for ax, (name, label) in zip(fig.subplots(1, len(NETWORKS)), NETWORKS.items(), strict=True):
        ms = {row[0]: row[tables[name]["columns"].index("ms")] for row in tables[name]["rows"]}
        colours = [BLUE if form == "numpy" else lightened(GREY, 0.5) for form in forms]
        bars = ax.barh(range(len(forms)), [ms[form] for form in forms], 0.7, color=colours)
        ax.bar_label(bars, fmt="{:.3g} ms", padding=2, fontsize=9)
        ax.set_title(label)
        ax.set_yticks(range(len(forms)), [FORMS[form] if ax.get_subplotspec().is_first_col() else "" for form in forms])
        ax.set(xticks=[], xlim=(0, 1.35 * ax.get_xlim()[1]))
        ax.invert_yaxis()
        bare(ax)
        ax.spines.left.set_visible(True)
    return fig


main = figure_script(
    "speed", Settings, OutOptions, "Draw training steps as DIR/speed/steps.png.",
    ("", "The picture of the committed times: about 3 seconds."),
    prepare=lambda *_: read_result(STEPS)["tables"], of_run={"steps": draw_steps},
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
