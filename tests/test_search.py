"""evidence/search.py: the halving, edges of a grid, the doubled length, and a search that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evidence import search as m


def accuracy(config: m.Config, chosen: m.Setting, seed: int) -> dict[str, float]:
    """Best at a rate of 0.008, beyond the grid, a decay of 0.3, 40 epochs; the highest rate forgets familiar views."""
    rate, decay, epochs = chosen
    off = abs(rate / 0.008 - 1) / 10 + abs(decay - 0.3) / 100 + abs(epochs - 40) / 4000
    return {"familiar": 0.9 if rate > 0.01 else 1.0, "held_out": 0.8 - off + 0.001 * (seed % 3) + (rate > 0.01)}


def test_the_winner_is_found_beyond_the_edge_and_no_run_is_made_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def run_once(*args: Any) -> dict[str, float]:
        asked.append(args[1:])
        return accuracy(*args)

    monkeypatch.setattr(m, "run_once", run_once)
    found = m.search(m.Config(), tmp_path)
    assert found["winner"] == [0.008, 0.3, 40]
    assert max(found["axes"][0]) == 0.016  # beyond the winner, whose familiar views are forgotten
    assert found["doubled_length"]["change"] == pytest.approx(-0.01)
    assert found["doubled_length"]["within_tolerance"]
    assert len(asked) == len(set(asked))
    assert {seed for _, seed in asked} == set(range(100, 116))
    assert all(row[3] in (2, 6, 16) for row in found["tables"]["grid"]["rows"])
    n = len(asked)
    assert m.search(m.Config(), tmp_path) == found  # from the kept runs
    assert len(asked) == n


def test_a_run_is_the_scripts_own_training() -> None:
    found = m.run_once(m.Config(model="cnn"), (0.001, 1.0, 1), 100)
    config = m.smallnorb.Config(dataset="shapes", seed=100, cnn_epochs=1, cnn_lr=0.001)
    states = m.smallnorb.train_all(config, m.smallnorb.make_data(config), names=("cnn_matched",))
    history = states["cnn_matched"].history
    assert found == {part: round(history[f"{part}_accuracy"][-1], 5) for part in ("familiar", "held_out")}
