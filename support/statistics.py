"""Statistics of runs that are paired by their seed: means with intervals, differences of the same seed, verdicts."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

Json = dict[str, Any]

EXACT_UP_TO = 20  # seeds; all 2^n sign flips are tried, above it this many random ones:
N_FLIPS = 99_999


@functools.lru_cache
def t_quantile(n: int, level: float = 0.05) -> float:
    """Half the width, in standard errors, of the interval of a mean of n values: by default that of 95 %."""
    from scipy import stats

    return float(stats.t.isf(level / 2, n - 1))


def describe_sample(values: list[float]) -> Json:
    """Size, mean, standard deviation, and the 95 % interval of the mean by Student's t; None where n is 1."""
    n, mean = len(values), float(np.mean(values))
    if n == 1:
        return {"n": n, "mean": mean, "sd": None, "low": None, "high": None}
    sd = float(np.std(values, ddof=1))
    half = t_quantile(n) * sd / math.sqrt(n)
    return {"n": n, "mean": mean, "sd": sd, "low": mean - half, "high": mean + half}


def sign_flip_p(differences: np.ndarray) -> float:
    """Two-sided p value of paired differences (n,): the fraction of all choices of their signs that give a mean at
    least as far from zero."""
    if len(differences) > EXACT_UP_TO:
        from scipy import stats

        test = stats.permutation_test(
            (differences,), lambda x, axis: np.mean(x, axis), permutation_type="samples",
            n_resamples=N_FLIPS, batch=4096, rng=np.random.default_rng(0),
        )  # fmt: skip
        return float(test.pvalue)
    # scipy's exact test draws up every sign vector: 2 s for 20 seeds, where the sums alone take 10 ms.
    sums = differences[:1]  # a vector of signs and its negative give the same |sum|
    for difference in differences[1:]:
        sums = np.concatenate([sums + difference, sums - difference])
    return float(np.mean(np.abs(sums) >= abs(differences.sum()) * (1 - 1e-12)))


def verdict(difference: Json) -> str:
    """Whether the 95 % interval of a mean difference is above zero, below it, or contains it: higher, lower,
    undecided."""
    low, high = difference["low"], difference["high"]
    return "undecided" if low is None or low <= 0 <= high else "higher" if low > 0 else "lower"


def compare_pairs(values: list[float], others: list[float], is_accuracy: bool) -> Json:
    """Differences of the same seed, ``values`` minus ``others``: their mean with its interval, how many are above zero,
    p, verdict, and for accuracies the relative reduction of the errors."""
    differences = np.subtract(values, others)
    entry = describe_sample(differences.tolist())
    entry |= {"higher": int(np.sum(differences > 0)), "p": sign_flip_p(differences), "verdict": verdict(entry)}
    if is_accuracy:
        errors = 1 - float(np.mean(others))
        entry["error_reduction"] = 1 - (1 - float(np.mean(values))) / errors if errors else None
    return entry


def summarise(runs: list[Json], reference: str) -> Json:
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
        if name != reference and (reference, metric) in values:
            paired[name][metric] = compare_pairs(values[reference, metric], column, metric.endswith("accuracy"))
    return {"models": models, "paired": {name: entry for name, entry in paired.items() if entry}}


def best_setting(settings: Json, model: str, metric: str) -> str:
    """The name of the setting with the model's highest mean; the first of equal ones."""
    return max(settings, key=lambda name: settings[name]["models"][model][metric]["mean"])
