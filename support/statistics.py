"""Statistics of runs that are paired by their seed: means with intervals, and differences of the same seed."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smallnorb_novel_viewpoint import UserError
from support.results import parse_json

Json = dict[str, Any]

MIN_SEEDS = 5  # of a verdict


@functools.lru_cache
def t_quantile(n: int, level: float = 0.05) -> float:
    """Half the width, in standard errors, of the interval of a mean of n values: by default that of 95 %. Raises
    UserError without scipy."""
    try:
        from scipy import stats
    except ImportError:
        raise UserError("intervals need scipy: pip install scipy") from None
    return float(stats.t.isf(level / 2, n - 1))


def has_scipy() -> bool:
    return importlib.util.find_spec("scipy") is not None


def describe_sample(values: list[float], level: float = 0.05) -> Json:
    """Size, mean, standard deviation, and the interval of the mean by Student's t: that of 95 %, or of 1 - ``level``.
    They are None where n is 1, and without scipy."""
    n, mean = len(values), float(np.mean(values))
    sd = float(np.std(values, ddof=1)) if n > 1 else None
    if sd is None or not has_scipy():
        return {"n": n, "mean": mean, "sd": sd, "low": None, "high": None}
    half = t_quantile(n, level) * sd / math.sqrt(n)
    return {"n": n, "mean": mean, "sd": sd, "low": mean - half, "high": mean + half}


def verdict(difference: Json) -> str | None:
    """Whether the interval of a mean difference is above zero, below it, or contains it: higher, lower, undecided.
    None with fewer than five seeds."""
    low, high = difference["low"], difference["high"]
    if difference["n"] < MIN_SEEDS or low is None:
        return None
    return "higher" if low > 0 else "lower" if high < 0 else "undecided"


def compare_pairs(values: list[float], others: list[float]) -> Json:
    """Differences of the same seed, ``values`` minus ``others``: their mean with its interval, how many are above zero,
    and the verdict."""
    differences = np.subtract(values, others)
    entry = describe_sample(differences.tolist())
    return entry | {"higher": int(np.sum(differences > 0)), "verdict": verdict(entry)}


def summarise(runs: list[Json], reference: str | None) -> Json:
    """``{"models": {name: {metric: sample}}, "paired": {other: {metric: sample of reference minus other}}}``.

    A run is ``{"models": {name: {"n_params": int, metric: float}}}``; every float is a metric. A model or metric that
    not every run has is left out.
    """
    models: Json = {}
    values: dict[tuple[str, str], list[float]] = {}
    for name, first in runs[0]["models"].items():
        if all(name in run["models"] for run in runs):
            models[name] = {"n_params": first["n_params"]} if "n_params" in first else {}
            for metric in (key for key, value in first.items() if isinstance(value, float)):
                column = [run["models"][name].get(metric) for run in runs]
                if all(isinstance(value, float) for value in column):
                    values[name, metric] = column
                    models[name][metric] = describe_sample(column)
    paired: Json = {name: {} for name in models if name != reference}
    for (name, metric), column in values.items():
        if name != reference and (own := values.get((str(reference), metric))):
            paired[name][metric] = compare_pairs(own, column)
    return {"models": models, "paired": {name: entry for name, entry in paired.items() if entry}}


def at_equal_values(runs: Sequence[tuple[Json, str]], metric: str, equal: str) -> list[float]:
    """``metric`` of each (run, model) at the same value of ``equal``, the lowest that any of them ends with. The one
    that ends there gives its last value; the others that where they first reach it, between two epochs. [Hinton 2018,
    sec. 5.1]"""
    histories = [run["history"][model] for run, model in runs]
    level = min(history[equal][-1] for history in histories)
    values = []
    for history in histories:
        x, y = history[equal], history[metric]
        if x[-1] == level:
            values.append(y[-1])
            continue
        k = next(k for k, now in enumerate(x) if now >= level)
        part = (level - x[k - 1]) / (x[k] - x[k - 1]) if k else 1.0
        values.append(y[k - 1] + part * (y[k] - y[k - 1]) if k else y[0])
    return values


def summarise_comparison(document: Json) -> Json:
    """The content of a file by compare_seeds.py with what follows from its runs: for each setting its whole
    configuration, and the means and differences of ``summarise``."""
    settings = {
        name: {
            **entry,
            "config": document.get("config", {}) | entry.get("config", {}),
            **summarise(entry["runs"], document.get("reference")),
        }
        for name, entry in document["settings"].items()
    }
    return {**document, "settings": settings}


def read_comparison(where: str | Path) -> Json:
    """``summarise_comparison`` of a file by compare_seeds.py, or of one of its parts: FILE.json#PART. Raises UserError
    where there is none."""
    file, _, part = str(where).partition(".json#")
    file += ".json" * bool(part)  # a folder may have a # in its name
    document = parse_json(Path(file))
    if part or "parts" in document:
        if part not in document.get("parts", ()):
            raise UserError(f"{file} has no part {part!r}, but {', '.join(document.get('parts', ())) or 'none'}")
        document = document["parts"][part]
    if not document.get("settings"):
        raise UserError(f"{where} is not a comparison of seeds")
    return summarise_comparison(document)
