"""Numbers as they were recorded: a change of structure changes none, an error that no other test has thought of does.

``check(key, thing)`` compares what a test computed or drew with the file of its module in tests/data/recorded/. After a
change of arithmetic or of a picture, ``RECORD=1 python -m pytest FILE`` records the numbers of a test file anew, and
the commit says which of them changed, and why.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import Collection, PathCollection
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Arc, Ellipse, FancyArrowPatch, Patch
from matplotlib.spines import Spine
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter

from helpers import DATA

folder = DATA / "recorded"
# What changes from one run or machine to the next
CHANGING = {"seconds", "train_seconds", "epoch_seconds", "environment", "data_dir", "digest", "dtype"}


def check(key: str, thing: Any, tolerance: float = 1e-6) -> None:
    """``thing``: numbers, texts, arrays and figures, in mappings, sequences and objects."""
    path = folder / f"{Path(os.environ['PYTEST_CURRENT_TEST'].split('::')[0]).stem}.json"
    found = dict(flat(thing))
    if os.environ.get("RECORD"):
        whole = json.loads(path.read_text()) if path.exists() else {}
        whole[key] = {name: summary(part) for name, part in found.items()}
        lines = (f"{json.dumps(name)}: {json.dumps(whole[name], ensure_ascii=False)}" for name in sorted(whole))
        path.parent.mkdir(exist_ok=True)
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return
    recorded = json.loads(path.read_text())[key]
    assert list(found) == list(recorded), f"{key}: other names (RECORD=1 records anew what changed on purpose)"
    for name, part in found.items():
        now, then = summary(part), recorded[name]
        if isinstance(part, str):
            assert now == then, (key, name)
        else:
            assert now[0] == then[0], (key, name, "another number of values")
            scale = 1 + float(np.linalg.norm(part))
            np.testing.assert_allclose(now[1], then[1], rtol=0, atol=tolerance * scale, err_msg=f"{key}: {name}")


def summary(part: str | np.ndarray) -> Any:
    """A text itself; of numbers how many there are, and one that any of them, and their order, changes."""
    if isinstance(part, str):
        return part
    return [part.size, float(f"{part @ np.cos(1 + 1.3 * np.arange(part.size)):.10g}")]


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
    """What a figure shows, without what depends on fonts: data, colours, names, named ticks and the room for axes."""
    axes = [artist for artist in fig.findobj(Axes) if artist.get_visible()]
    engine: Any = fig.get_layout_engine()
    room = [*fig.get_size_inches(), *engine.get().get("rect", ())] if engine else []
    return {"figure": of_artists(fig.get_children(), fig) | {"room": room},
            **{str(k): of_axes(ax) for k, ax in enumerate(axes)}}


def said(text: str) -> str:
    """A name as it stands; of a longer text its numbers alone, so that it may be worded anew."""
    return text if len(text.split()) <= 5 else " ".join(re.findall(r"[-+−]?\d[\d.,]*", text))


def of_axes(ax: Any) -> dict[str, Any]:
    found = of_artists([artist for artist in ax.get_children() if not isinstance(artist, Spine)], ax)
    if ax.get_adjustable() == "box" or ax.get_aspect() == "auto":  # or limits follow the room that fonts leave
        found |= {"x limits": [*ax.get_xlim()], "y limits": [*ax.get_ylim()]}
    titles, shape = [ax.get_title(at) for at in ("left", "right")], f"{ax.get_aspect()} {ax.get_box_aspect()}"
    words = ["", *map(said, [ax.get_xlabel(), ax.get_ylabel(), *titles]), ax.get_xscale(), ax.get_yscale(), shape]
    found["words"] += "|".join(words)
    if place := ax.get_subplotspec():
        found["place"] = np.array(place.get_geometry())
    if ax.name == "polar":
        found["zero and direction"] = np.array([ax.get_theta_offset(), ax.get_theta_direction()])
    for axis in (ax.xaxis, ax.yaxis):
        formatter, places, locator = axis.get_major_formatter(), [-0.5, 0, 400, 1e6], axis.get_major_locator()
        if isinstance(locator, FixedLocator):
            places = list(axis.get_majorticklocs())
            marks = [[label.get_color(), label.get_fontweight() == "bold"] for label in axis.get_ticklabels()]
            found[f"{axis.axis_name} ticks"] = places
            found["words"] += "|" * bool(marks) + " ".join(dict.fromkeys(map(str, marks)))
        elif getattr(locator, "_nbins", "auto") != "auto":  # or their number depends on fonts
            found[f"{axis.axis_name} ticks"] = locator.tick_values(*axis.get_view_interval())
        if isinstance(formatter, FixedFormatter):
            found["words"] += "".join(f"|{text}" for text in formatter.seq if text)
        elif isinstance(formatter, FuncFormatter):
            found["words"] += "|" + "|".join(formatter(x, k) for k, x in enumerate(places))
    return found


def of_artists(artists: Iterable[Artist], owner: Any) -> dict[str, Any]:
    words, colours, data = list[str](), list[Any](), dict[str, list[Any]]()

    def note(kind: str, numbers: Any) -> None:
        data.setdefault(kind, []).append(np.ma.filled(np.ma.asarray(numbers, float), np.nan).ravel())

    def place(kind: str, points: Any) -> None:
        """Across and up apart: one of them may be millions of times the other."""
        for axis, numbers in zip("xy", np.ma.asarray(points, float).reshape(-1, 2).T, strict=True):
            note(f"{axis} of {kind}", numbers)

    for artist in artists:
        if not artist.get_visible() or artist is owner.patch:
            continue
        if isinstance(artist, Text):
            words.append(said(artist.get_text()) + "*" * (artist.get_fontweight() == "bold"))
            colours.append(artist.get_color())
            if artist.get_text() and artist in owner.texts and artist is not getattr(owner, "_supxlabel", None):
                place("words", [artist.get_position(), getattr(artist, "xy", (0, 0))])
            if box := artist.get_bbox_patch():
                words.append(type(box.get_boxstyle()).__name__)
                colours += [box.get_facecolor(), box.get_edgecolor()]
            if (arrow := getattr(artist, "arrow_patch", None)) is not None:
                note("widths", arrow.get_linewidth())
                colours.append(arrow.get_edgecolor())
        elif isinstance(artist, Legend):
            words += [text.get_text() for text in artist.get_texts()]
            for handle in artist.legend_handles:
                words.append(str(handle.get_marker()) if isinstance(handle, Line2D) else "")
                colours.append(handle.get_color() if isinstance(handle, Line2D) else handle.get_facecolor())  # type: ignore[union-attr]
        elif isinstance(artist, Line2D):
            place("lines", artist.get_xydata())
            words.append(f"{artist.get_marker()} {artist.get_markevery() or ''}")
            note("widths", [artist.get_linewidth(), str(artist.get_linestyle()) == "-"])
            colours.append(artist.get_color())
        elif isinstance(artist, FancyArrowPatch):
            place("arrows", vars(artist)["_posA_posB"])
            note("widths", artist.get_linewidth())
            colours.append(artist.get_edgecolor())
        elif isinstance(artist, Patch):
            note("widths", artist.get_linewidth())
            if isinstance(artist, Ellipse):  # whose outline differs between versions of matplotlib
                place("ellipses", [artist.get_center(), (artist.width, artist.height)])
                twice, stretch = 2 * np.radians(artist.angle), artist.width**2 - artist.height**2
                note("turns", [stretch * np.cos(twice), stretch * np.sin(twice)])  # none of a circle, or by half a turn
            else:
                corners = artist.get_patch_transform().transform(artist.get_path().vertices)
                place("patches", [corners.min(axis=0), corners.max(axis=0)])  # wherever the outline starts
            colours += [artist.get_facecolor(), artist.get_edgecolor()]
            if isinstance(artist, Arc):
                note("ends", [artist.theta1, artist.theta2])
        elif isinstance(artist, Collection):
            for path in artist.get_paths():
                place("collections", path.vertices)
            place("offsets", artist.get_offsets())
            note("sizes", artist.get_sizes() if isinstance(artist, PathCollection) else [])
            if artist.get_array() is not None:
                note("mapped", artist.get_array())
            colours += [artist.get_facecolor(), artist.get_edgecolor()]
        elif isinstance(artist, AxesImage):
            shown: Any = np.ma.asarray(artist.get_array())
            note("images", shown)
            note("range", [*artist.get_extent(), *(artist.get_clim() if shown.ndim == 2 else ())])
            words.append(artist.get_cmap().name)
    rgba = [to_rgba_array(colour).ravel() for colour in colours]
    numbers = {kind: np.concatenate(parts) for kind, parts in sorted(data.items())}
    return {"words": "|".join(words), "colours": np.concatenate([*rgba, []]), **numbers}


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
