"""Numbers as they were recorded: a change of structure changes none, an error that no other test has thought of does.

``check(key, thing)`` compares what a test computed or drew with the file of its module in tests/data/recorded/. Words,
colours and places on a page are not recorded. After a change of arithmetic ``RECORD=1 python -m pytest FILE`` records
the numbers of a test file anew, and the commit says which of them changed, and why.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Ellipse, Rectangle

from helpers import DATA

folder = DATA / "recorded"
# What changes from one run or machine to the next
CHANGING = {"seconds", "train_seconds", "epoch_seconds", "environment", "data_dir", "digest", "dtype"}


def check(key: str, thing: Any, tolerance: float = 1e-6) -> None:
    """``thing``: numbers, texts with numbers, arrays and figures, in mappings, sequences and objects."""
    path = folder / f"{Path(os.environ['PYTEST_CURRENT_TEST'].split('::')[0]).stem}.json"
    parts = ((name, numbers_in(part) if isinstance(part, str) else part) for name, part in flat(thing))
    found = {name: part for name, part in parts if part.size}
    if os.environ.get("RECORD"):
        whole = json.loads(path.read_text()) if path.exists() else {}
        whole[key] = {name: summary(part) for name, part in found.items()}
        lines = (f"{json.dumps(name)}: {json.dumps(whole[name])}" for name in sorted(whole))
        path.parent.mkdir(exist_ok=True)
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return
    recorded = json.loads(path.read_text())[key]
    assert list(found) == list(recorded), f"{key}: other names (RECORD=1 records anew what changed on purpose)"
    for name, part in found.items():
        now, then = summary(part), recorded[name]
        assert now[0] == then[0], (key, name, "another number of values")
        scale = 1 + float(np.linalg.norm(part))
        np.testing.assert_allclose(now[1], then[1], rtol=0, atol=tolerance * scale, err_msg=f"{key}: {name}")


def summary(part: np.ndarray) -> list[float]:
    """How many numbers there are, and one that any of them, and their order, changes."""
    return [part.size, float(f"{part @ np.cos(1 + 1.3 * np.arange(part.size)):.10g}")]


def numbers_in(text: str) -> np.ndarray:
    return np.array([float(x) for x in re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", "").replace("−", "-"))])


def flat(thing: Any, name: str = "") -> Iterator[tuple[str, str | np.ndarray]]:
    """The texts and the flat arrays of a thing, by the way to them."""
    if isinstance(thing, Figure):
        yield from flat(of_figure(thing), name)
    elif hasattr(thing, "_asdict"):
        yield from flat(thing._asdict(), name)
    elif isinstance(thing, Mapping):
        for key, part in thing.items():
            if key not in CHANGING:
                yield from flat(part, f"{name}/{key}")
    elif isinstance(thing, str | Path):
        yield name, str(thing)
    elif isinstance(thing, list | tuple) and not all(isinstance(part, int | float) for part in thing):
        for k, part in enumerate(thing):
            yield from flat(part, f"{name}/{k}")
    elif hasattr(thing, "__dict__"):
        yield from flat(vars(thing), name)
    elif np.size(thing) and thing is not None:
        yield name, np.nan_to_num(np.asarray(thing, float).ravel(), nan=-7, posinf=1e3, neginf=-1e3)


def of_figure(fig: Figure) -> dict[str, Any]:
    """The numbers that a figure shows, in the units of its data."""
    return {str(k): of_axes(ax) for k, ax in enumerate(fig.findobj(Axes)) if ax.get_visible()}


def of_axes(ax: Any) -> dict[str, Any]:
    found: dict[str, list[Any]] = {}

    def note(kind: str, numbers: Any) -> None:
        found.setdefault(kind, []).append(np.ma.filled(np.ma.asarray(numbers, float), np.nan).ravel())

    for artist in ax.get_children():
        if not artist.get_visible() or artist is ax.patch:
            continue
        if isinstance(artist, Line2D):
            note("lines", artist.get_xydata())
        elif isinstance(artist, Rectangle):
            note("bars", [*artist.get_xy(), artist.get_width(), artist.get_height()])
        elif isinstance(artist, Ellipse):
            note("ellipses", [artist.get_center(), (artist.width, artist.height)])
        elif isinstance(artist, Collection):
            for path in artist.get_paths():
                note("areas", path.vertices)
            note("points", artist.get_offsets())
            if artist.get_array() is not None:
                note("mapped", artist.get_array())
        elif isinstance(artist, AxesImage):
            note("images", artist.get_array())
    return {kind: np.concatenate(parts) for kind, parts in sorted(found.items())}


def note_figures(figures: Any, key: str, monkeypatch: Any) -> None:
    """Check every figure that ``support.figures`` writes from now on, the first frame of an animation, and
    what the others have otherwise."""
    write_figure, draw_frames = figures.write_figure, figures.draw_frames
    seen = set[str]()

    def write(path: Path, draw: Callable[[], Figure], *rest: Any) -> None:
        def drawing() -> Figure:
            fig = draw()
            if path.stem not in seen:
                check(f"{key}/{path.stem}", fig)
            seen.add(path.stem)
            return fig

        write_figure(path, drawing, *rest)

    def frames(fig: Figure, update: Any, at: Any) -> Iterator[Any]:
        first: Any = {}
        for k, picture in enumerate(draw_frames(fig, update, at)):
            if f"frame {k}" not in seen:
                parts = dict(flat(fig))
                changed = {name: part for name, part in parts.items() if not np.array_equal(part, first.get(name))}
                check(f"{key}/frame {k}", changed)
                first = first or parts
            seen.add(f"frame {k}")
            yield picture

    monkeypatch.setattr(figures, "write_figure", write)
    monkeypatch.setattr(figures, "draw_frames", frames)
