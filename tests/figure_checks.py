"""What the tests of the figures and of the animations share: one check for each promise that all four scripts make."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType
from typing import Any

import imageio.v3 as imageio
import matplotlib
import numpy as np
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from helpers import Capture, Patch
from recorded import check, flat
from support import figures as support_figures
from support.figures import DPI, figure_style


def refuse(monkeypatch: Patch, module: ModuleType, *names: str) -> None:
    """Let the named functions of a module, such as its ``train``, fail."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError(f"called one of {names}")

    for name in names:
        monkeypatch.setattr(module, name, refused)


def move_to(folder: Path, monkeypatch: Patch) -> None:
    """The scripts run in ``folder``, and find the results of the project there."""
    monkeypatch.chdir(folder)
    for module in ("support.figures", "visualize_multimnist_capsnet", "evidence.visualize_claims"):
        monkeypatch.setattr(f"{module}.ROOT", folder)


def draw_coarsely(monkeypatch: Patch) -> None:
    """Pictures of half the width and height."""
    monkeypatch.setattr(support_figures, "SAVED_DPI", DPI)


def pictures(folder: Path) -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in sorted(folder.iterdir())}


def write_seeds(path: Path, runs: list[dict[str, Any]], dataset: str = "shapes", **config: Any) -> Path:
    """A file of one setting, as compare_seeds.py writes it."""
    document = {"dataset": dataset, "config": config, "settings": {"": {"config": {}, "runs": runs}}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def check_pictures(folder: Path, names: Collection[str]) -> None:
    """The folder holds PNGs of these names and nothing else."""
    assert {path.name for path in folder.iterdir()} == {f"{name}.png" for name in names}
    for path in folder.iterdir():
        with Image.open(path) as image:
            assert image.format == "PNG", path


def check_unchanged(script: ModuleType, flags: list[str], folder: Path, capsys: Capture) -> None:
    """Drawn again, under a user's own style, the pictures are the same, and none of them is written."""
    before = pictures(folder)
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    capsys.readouterr()
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "yellow"}):
        assert script.main(flags) == 0
    assert pictures(folder) == before
    printed = capsys.readouterr().out
    for name in before:
        assert f"unchanged {folder / name}.png " in printed
    for path in folder.iterdir():
        assert path.stat().st_mtime == 0, f"{path.name} was written again although it is the same"


def check_animation(
    script: ModuleType, flags: list[str], n_frames: int, held: Collection[int], capsys: Capture
) -> None:
    """A small GIF of ``n_frames`` frames that all differ; made again, it is the same file. Frames ``held`` stay
    longer."""
    path = Path("sub", "a.gif")
    argv = [*flags, "--fps=20", "--quiet", f"--out={path}"]
    assert script.main(argv) == 0
    content = path.read_bytes()
    assert len(content) < 4_000_000
    frames = imageio.imread(path, extension=".gif")
    assert len(frames) == n_frames
    assert imageio.immeta(path)["loop"] == 0
    durations = [imageio.immeta(path, index=k)["duration"] for k in range(n_frames)]
    assert durations == [1200 if k in held else 50 for k in range(n_frames - 1)] + [2500]
    assert len({frame.tobytes() for frame in frames}) == n_frames
    capsys.readouterr()
    assert script.main(argv) == 0
    assert path.read_bytes() == content
    assert f"unchanged {path} " in capsys.readouterr().out


def held(ax: Any) -> dict[str, Any]:
    """What axes show, in the units of their data.

    lines: by label [x, y], those without one as "line 0", …; bands: [x, low, high] of each; bars: heights, of
    horizontal ones widths; spans: shaded ranges of x; levels: heights of lines across; texts; ticks: names on the x
    and y axis; image: its array.
    """
    found: dict[str, Any] = {"lines": {}, "bands": [], "bars": [], "spans": [], "levels": [], "texts": []}
    for k, line in enumerate(ax.lines):
        x, y = (np.asarray(values, float) for values in line.get_data())
        if line.get_transform() == ax.get_yaxis_transform():
            found["levels"].append(y[0])
        else:
            label = str(line.get_label())
            found["lines"][f"line {k}" if label.startswith("_") else label] = [x, y]
    for band in ax.collections:
        if isinstance(band, FillBetweenPolyCollection):
            points = np.asarray(band.get_paths()[0].vertices)
            n = (len(points) - 3) // 2
            x, low, high = points[1 : n + 1, 0], points[1 : n + 1, 1], points[n + 2 : 2 * n + 2, 1][::-1]
            found["bands"].append([x, np.minimum(low, high), np.maximum(low, high)])
    for container in ax.containers:
        if isinstance(container, BarContainer):
            upright = container.orientation == "vertical"
            found["bars"].append([bar.get_height() if upright else bar.get_width() for bar in container])
    for patch in ax.patches:
        if isinstance(patch, Rectangle) and patch.get_data_transform() == ax.get_xaxis_transform():
            found["spans"].append((patch.get_x(), patch.get_x() + patch.get_width()))
    found["spans"].sort()
    found["texts"] = [text.get_text() for text in ax.texts]
    found["ticks"] = [[label.get_text() for label in axis.get_ticklabels()] for axis in (ax.xaxis, ax.yaxis)]
    found["image"] = np.asarray(ax.images[-1].get_array()) if ax.images else None
    return found


def check_held(ax: Any, **expected: Any) -> None:
    """The axes hold what is expected, see ``held``: equal numbers (to 1e-9), the same names in the same order."""
    found = held(ax)
    for what, values in expected.items():
        assert_same(found[what], values, what)


def assert_same(found: Any, expected: Any, where: str) -> None:
    parts, wanted = dict(flat(found, where)), dict(flat(expected, where))
    assert list(parts) == list(wanted), where
    for name, part in wanted.items():
        if isinstance(part, str):
            assert parts[name] == part, name
        else:
            np.testing.assert_allclose(np.asarray(parts[name], float), part, rtol=1e-9, atol=1e-9, err_msg=name)


def cells(ax: Any, rows: int, columns: int, gap: tuple[int, int] = (1, 1)) -> np.ndarray:
    """The pictures (rows, columns, H, W, 3) that ``show_pictures`` laid out."""
    sheet = np.asarray(ax.images[-1].get_array())
    padded = np.pad(sheet, ((0, 0), (0, gap[1]), (0, 0)))
    height, width = padded.shape[0] // rows, padded.shape[1] // columns
    tiles = padded.reshape(rows, height, columns, width, 3).transpose(0, 2, 1, 3, 4)
    return tiles[:, :, : height - gap[0], : width - gap[1]]


def frame_of(scene: tuple[Figure, Callable[..., None]], *place: Any) -> Figure:
    """An animation as it is at some place."""
    fig, update = scene
    update(*place)
    return fig


def legend_of(fig: Figure) -> list[str]:
    return [text.get_text() for text in fig.legends[0].get_texts()]


N_DRAWN: Counter[str] = Counter()


def drawn(draw: Callable[[], Figure], record: bool = True) -> Figure:
    """A figure in the common style, laid out; all that it shows is as it was recorded."""
    with figure_style():
        fig = draw()
        fig.draw_without_rendering()
    test = os.environ["PYTEST_CURRENT_TEST"].removesuffix(" (call)")  # with its file: two may have a test of this name
    if record:
        check(f"{test.split('::')[1]}/{N_DRAWN[test]}", fig)
    N_DRAWN[test] += 1
    return fig
