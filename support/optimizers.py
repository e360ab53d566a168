"""The state of a model in training: what an optimiser changes and a checkpoint stores."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Array = np.ndarray
Params = dict[str, Array]


class TrainState:
    """A model in training: parameters, moments and history, all of which a checkpoint stores."""

    def __init__(self, name: str, params: Params) -> None:
        self.name = name
        self.params = params
        self.m: Params = {key: np.zeros_like(p) for key, p in params.items()}  # first moments, or Muon's momentum
        self.v: Params = {key: np.zeros_like(p) for key, p in params.items()}  # second moments
        self.step = 0
        self.seconds = 0.0  # of training, without the tests after epochs
        self.sums: dict[str, float] = {}  # weighted sums of the losses since the last epoch's end
        self.history: dict[str, list[float]] = {}  # by metric, an entry for each epoch

    def add(self, losses: Mapping[str, float], weight: float = 1) -> None:
        """Add ``weight`` times a batch's mean losses to the sums of the epoch; ``weight`` is the number of images where
        batches differ in size."""
        for key, loss in losses.items():
            self.sums[key] = self.sums.get(key, 0.0) + weight * loss

    def end_epoch(self, weight: float, metrics: Mapping[str, float]) -> None:
        """Append the sums divided by their total ``weight``, and the metrics, to the history."""
        self.append({key: total / weight for key, total in self.sums.items()})
        self.append(metrics)
        self.sums = {}

    def append(self, metrics: Mapping[str, float]) -> None:
        """Append each metric to its list in the history."""
        for key, value in metrics.items():
            self.history.setdefault(key, []).append(value)

    @property
    def is_finite(self) -> bool:
        return all(bool(np.isfinite(p).all()) for p in self.params.values())


def count_params(params: Params) -> int:
    return sum(p.size for p in params.values())
