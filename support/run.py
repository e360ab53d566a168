"""What every run has: random streams of its seed, the states of its models, and an end where a number is not finite."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np

from support.output import UserError

Params = dict[str, np.ndarray]


class Stream(IntEnum):
    """Independent random streams of one seed, so that no part of a run shifts the draws of another."""

    DATA = 0
    INIT = 1
    SHUFFLE = 2
    EVALUATION = 3
    OBJECTS = 4


@functools.lru_cache(maxsize=2)
def permutation(n: int, seed: int, *key: int) -> np.ndarray:
    """A random order of 0 to n - 1, the same for the same seed and key (such as the epoch). Cached: do not write to
    it."""
    return generator(seed, Stream.SHUFFLE, *key).permutation(n)


def generator(seed: int, stream: Stream, *key: int) -> np.random.Generator:
    """The generator of a stream and a key (such as the epoch and step). It depends on nothing else, so that a resumed
    run draws the same numbers without any stored state."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(int(stream), *key)))


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


def count_params(params: Params) -> int:
    return sum(p.size for p in params.values())


def init_state(model: Any, config: Any) -> TrainState:
    """Fresh parameters of a model; their draws depend on the seed and the model's name alone."""
    return TrainState(model.name, model.init_params(generator(config.seed, Stream.INIT, *model.name.encode())))


def init_states(models: Mapping[str, Any], config: Any) -> dict[str, TrainState]:
    return {name: init_state(model, config) for name, model in models.items()}


def require_finite(state: TrainState, loss: float, steps_per_epoch: int) -> None:
    """After a step: raises UserError where its loss, or a parameter at the end of an epoch, is not finite."""
    epoch, position = divmod(state.step - 1, steps_per_epoch)
    where = f"epoch {epoch + 1}, step {position + 1}; try a smaller learning rate"
    if not np.isfinite(loss):
        raise UserError(f"{state.name}: the loss became {loss} in {where}")
    if position == steps_per_epoch - 1 and not all(np.isfinite(p).all() for p in state.params.values()):
        raise UserError(f"{state.name}: a parameter became infinite or NaN in {where}")
