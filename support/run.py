"""What every run has: random streams of its seed, fresh parameters, and an end where a number is not finite."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np

from support.files import UserError
from support.optimizers import TrainState


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
    if position == steps_per_epoch - 1 and not state.is_finite:
        raise UserError(f"{state.name}: a parameter became infinite or NaN in {where}")
