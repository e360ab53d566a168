"""statistics: means, intervals and differences by hand, and of files; intervals of other levels: test_claims.py; the
tables of them: test_report.py."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import Patch
from support import figures, statistics
from support.results import save_result
from support.statistics import compare_pairs, describe_sample, read_comparison, summarise, t_quantile, verdict

T_2, T_3, T_4 = 4.30265273, 3.18244631, 2.77644511  # quantiles of Student's t for 2 to 4 degrees of freedom, a table's


def runs_of(values: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A run for each seed, with the values of each model's only metric."""
    seeds = range(len(next(iter(values.values()))))
    return [
        {"seed": k, "models": {name: {"n_params": 3, "x_accuracy": v[k]} for name, v in values.items()}} for k in seeds
    ]


def test_three_seeds_by_hand() -> None:
    assert (t_quantile(3), t_quantile(4)) == (pytest.approx(T_2), pytest.approx(T_3))
    sample, sd = describe_sample([0.2, 0.3, 0.7]), math.sqrt((0.04 + 0.01 + 0.09) / 2)
    half = T_2 * sd / math.sqrt(3)
    assert sample == pytest.approx({"n": 3, "mean": 0.4, "sd": sd, "low": 0.4 - half, "high": 0.4 + half})
    assert describe_sample([0.25]) == {"n": 1, "mean": 0.25, "sd": None, "low": None, "high": None}
    assert describe_sample([0.25] * 3) == {"n": 3, "mean": 0.25, "sd": 0.0, "low": 0.25, "high": 0.25}


@pytest.mark.parametrize("order", [("capsules", "cnn"), ("cnn", "capsules")])
@pytest.mark.parametrize(("sign", "word", "higher"), [(1, "higher", 5), (-1, "lower", 0)])
def test_a_pair_by_hand_whatever_the_order(order: tuple[str, str], sign: int, word: str, higher: int) -> None:
    """Differences of 0.1, 0.2, 0.1, 0.2 and 0.15, or their negatives. A tie is not higher."""
    cnn = np.array([0.5, 0.6, 0.4, 0.7, 0.3])
    values = {"cnn": cnn.tolist(), "capsules": (cnn + sign * np.array([0.1, 0.2, 0.1, 0.2, 0.15])).tolist()}
    summary = summarise(runs_of({name: values[name] for name in order}), "capsules")
    assert (list(summary["models"]), list(summary["paired"])) == (list(order), ["cnn"])
    pair = summary["paired"]["cnn"]["x_accuracy"]
    half = T_4 * 0.05 / math.sqrt(5)
    np.testing.assert_allclose([pair["mean"], pair["low"], pair["high"]], sign * 0.15 + np.array([0, -half, half]))
    assert (pair["verdict"], pair["higher"], pair["n"]) == (word, higher, 5)
    assert compare_pairs([0.5, 0.6, 0.7, 0.8, 0.9], [0.5, 0.6, 0.7, 0.8, 0.5])["higher"] == 1


def test_the_verdict_is_the_intervals_with_five_seeds_or_more() -> None:
    for low, high, word in ((0.1, 0.3, "higher"), (-0.3, -0.1, "lower"), (-0.1, 0.3, "undecided"),
                            (0.0, 0.1, "undecided"), (-0.1, 0.0, "undecided"),
                            (float("nan"), float("nan"), "undecided")):
        assert verdict({"n": 5, "low": low, "high": high}) == word
        assert verdict({"n": 4, "low": low, "high": high}) is None


def test_what_not_every_run_has_is_left_out() -> None:
    made = runs_of({"cnn": [0.7, 0.6], "capsules": [0.9, 0.8]})
    made[0]["models"]["other"] = {"n_params": 1, "x_accuracy": 0.5}
    made[0]["models"]["cnn"]["first"] = made[1]["models"]["cnn"]["second"] = 1.0
    models = summarise(made, "capsules")["models"]
    assert (list(models), list(models["cnn"])) == (["cnn", "capsules"], ["n_params", "x_accuracy"])


def test_a_file_is_read_with_its_means_and_whole_configurations(tmp_path: Path) -> None:
    one, many = tmp_path / "one.json", tmp_path / "C#" / "parts.json"
    first = comparison_of(low={"capsules": [0.3, 0.3]}, high={"capsules": [0.4, 0.8]})
    save_result(one, first)
    settings = read_comparison(one)["settings"]
    assert settings["low"]["config"] == {"n_epochs": 3, "lr": "low"}
    assert settings["high"]["models"]["capsules"]["x_accuracy"]["mean"] == pytest.approx(0.6)
    save_result(many, {"parts": {"a": first, "b": comparison_of(only={"cnn": [0.1]})}})
    assert list(read_comparison(f"{many}#b")["settings"]) == ["only"]
    save_result(tmp_path / "none.json", {"settings": {}})
    for where, message in (
        (many, "has no part '', but a, b"), (f"{many}#c", "has no part 'c', but a, b"),
        (f"{one}#a", "has no part 'a', but none"), (tmp_path / "none.json", "is not a comparison of seeds"),
    ):
        with pytest.raises(OSError, match=message):
            read_comparison(where)


def comparison_of(**settings: dict[str, list[float]]) -> dict[str, Any]:
    """As compare_seeds.py writes it."""
    entries = {name: {"values": {}, "config": {"lr": name}, "runs": runs_of(v)} for name, v in settings.items()}
    return {"headline": "x_accuracy", "reference": "capsules", "config": {"n_epochs": 3}, "settings": entries}


def test_without_scipy_there_is_no_interval(monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(OSError, match=r"^intervals need scipy: pip install scipy$"):
        t_quantile(3, 0.0123)  # of a level that is in no cache
    for module in (statistics, figures):
        monkeypatch.setattr(module, "has_scipy", lambda: False)
    assert [statistics.describe_sample([0.25, 0.75])[end] for end in ("low", "high")] == [None, None]
    assert figures.interval(np.array([[0.25], [0.75]]))[1].tolist() == [0]
