"""What the tests of the figures and of the animations share: one check for each promise that all four scripts make."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType
from typing import Any

import imageio.v3 as imageio
import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

from helpers import failure
from support.figures import DPI, STYLE, figure_style

Texts = list[tuple[Text, Bbox]]  # and the box (px) that each fills
Capture = pytest.CaptureFixture[str]


def refuse(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *names: str) -> None:
    """Let the named functions of a module, such as its ``train``, fail."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError(f"called one of {names}")

    for name in names:
        monkeypatch.setattr(module, name, refused)


def draw_coarsely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of half the width and height."""
    monkeypatch.setitem(STYLE, "savefig.dpi", DPI)


def check_failures(cases: list[tuple[Any, list[str], str]], capsys: Capture) -> None:
    """``cases``: (script, flags, message). Each run fails with status 1 and one line that holds the message."""
    for script, flags, message in cases:
        assert message in failure(script, flags, capsys), flags


# ----------------------------------------------------------------------------------------------------------------------
# Files
# ----------------------------------------------------------------------------------------------------------------------


def pictures(folder: Path) -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in sorted(folder.iterdir())}


def check_pictures(folder: Path, names: Collection[str], highest: int, scale: float = 1) -> dict[str, bytes]:
    """The folder holds PNGs of these names and nothing else, each of the right size; returns their bytes.

    ``highest``: the largest height, px. ``scale``: of all lengths and of the largest size of a file, 0.5 after
    ``draw_coarsely``.
    """
    found = pictures(folder)
    assert {path.name for path in folder.iterdir()} == {f"{name}.png" for name in names}
    for name, content in found.items():
        assert len(content) < 600_000 * scale, name
        with Image.open(folder / f"{name}.png") as image:
            assert image.format == "PNG", name
            assert image.width == 1800 * scale, name
            assert 600 * scale <= image.height <= highest * scale, name
            assert "Software" not in image.info, name
            assert np.count_nonzero(image.convert("L").histogram()) > 30, f"{name} is trivial"
    return found


def check_unchanged(
    script: ModuleType, flags: list[str], folder: Path, capsys: Capture, redrawn: Collection[str] | None = None
) -> None:
    """Drawn again, under a user's own style, the pictures are the same, and none of them is written.

    ``redrawn``: the figures that ``flags`` ask for; None: all in ``folder``.
    """
    before = pictures(folder)
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    capsys.readouterr()
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "yellow"}):
        assert script.main(flags) == 0
    assert pictures(folder) == before
    printed = capsys.readouterr().out
    names = before if redrawn is None else redrawn
    assert printed.count("unchanged") == len(names)
    for name in names:
        assert f"unchanged {folder / name}.png " in printed
    for path in folder.iterdir():
        assert path.stat().st_mtime == 0, f"{path.name} was written again although it is the same"


def check_animation(
    script: ModuleType, flags: list[str], n_frames: int, below: int, capsys: Capture, held: Collection[int] = ()
) -> None:
    """A GIF of ``n_frames`` frames that all differ, in fewer than ``below`` bytes; made again, it is the same file.
    Frames ``held`` stay longer."""
    path = Path("sub", "a.gif")
    argv = [*flags, "--fps=20", "--quiet", f"--out={path}"]
    assert script.main(argv) == 0
    content = path.read_bytes()
    assert len(content) < below
    frames = imageio.imread(path, extension=".gif")
    assert len(frames) == n_frames
    assert 800 <= frames.shape[2] <= 900
    assert imageio.immeta(path)["loop"] == 0
    durations = [imageio.immeta(path, index=k)["duration"] for k in range(n_frames)]
    assert durations == [1200 if k in held else 50 for k in range(n_frames - 1)] + [2500]
    assert all((frame[:5, :5] == 255).all() for frame in frames), "white has become grey"
    assert len({frame.tobytes() for frame in frames}) == n_frames
    capsys.readouterr()
    assert script.main(argv) == 0
    assert path.read_bytes() == content
    assert f"unchanged {path} " in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------------
# Texts
# ----------------------------------------------------------------------------------------------------------------------


def drawn_texts(drawer: Callable[[], Figure]) -> tuple[Figure, Texts]:
    """A figure in the common style, and every text that was drawn of it."""
    texts: Texts = []
    original = Text.draw

    def draw(self: Text, renderer: Any, *args: Any, **kwargs: Any) -> None:
        original(self, renderer, *args, **kwargs)
        if self.get_visible() and self.get_text().strip():
            texts.append((self, self.get_window_extent(renderer)))

    with pytest.MonkeyPatch.context() as patch, figure_style():
        patch.setattr(Text, "draw", draw)
        fig = drawer()
        fig.canvas.draw()
    return fig, texts


def shown_texts(scene: Any) -> Texts:
    """The texts of an animation's frame, which is put together from parts and not drawn by the figure."""
    texts = [t for t in scene.fig.findobj(Text) if t.get_visible() and t.get_text().strip()]
    boxes = [(text, text.get_window_extent(scene.canvas.get_renderer())) for text in texts]
    return [(text, box) for text, box in boxes if box.width and np.isfinite(box.extents).all()]


def check_texts(fig: Figure, texts: Texts, name: str) -> None:
    """Every text is at least 9 points high and within the figure, and no two overlap by 3 px both ways."""
    assert texts, name
    for text, box in texts:
        assert float(text.get_fontsize()) >= 9, (name, text)
        assert min(box.x0, box.y0) >= 0, (name, text)
        assert box.x1 <= fig.bbox.x1, (name, text)
        assert box.y1 <= fig.bbox.y1, (name, text)
    edges = np.array([box.extents for _, box in texts])
    width = np.minimum(edges[:, None, 2], edges[None, :, 2]) - np.maximum(edges[:, None, 0], edges[None, :, 0])
    height = np.minimum(edges[:, None, 3], edges[None, :, 3]) - np.maximum(edges[:, None, 1], edges[None, :, 1])
    overlaps = np.argwhere(np.triu(np.minimum(width, height) >= 3, 1))
    assert not len(overlaps), (name, [(texts[a][0], texts[b][0]) for a, b in overlaps])
