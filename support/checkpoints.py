"""Checkpoints: safetensors files of weights and moments, with the configuration and the history as JSON metadata.

``safetensors.numpy.load_file`` reads the arrays, and so does PyTorch: ``MODEL/params/NAME`` are the weights.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from support.output import UserError, atomic_write, one_line
from support.results import plain
from support.run import TrainState, init_states
from support.settings import difference, from_json, settings_of

C = TypeVar("C")
KEPT = ("step", "seconds", "history")  # of a state, beside its arrays


def save_checkpoint(path: Path, experiment: str, config: Any, states: Iterable[TrainState]) -> None:
    """Every state that has been trained. Written beside ``path``, which it then replaces. Raises UserError."""
    from safetensors.numpy import save

    arrays: dict[str, np.ndarray] = {}
    models = {}
    for state in states:
        if state.step:
            models[state.name] = {key: getattr(state, key) for key in KEPT}
            for kind in ("params", "m", "v"):
                arrays |= {f"{state.name}/{kind}/{key}": a for key, a in getattr(state, kind).items()}
    arrays = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
    header: dict[str, Any] = {"experiment": experiment, "config": plain(config), "models": models}
    header["checksum"] = checksum(header, arrays)
    with atomic_write(path) as stream:
        stream.write(save(arrays, {key: json.dumps(value) for key, value in header.items()}))


def checksum(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> int:
    """The format itself has none, and a flipped bit would be another training."""
    total = zlib.crc32(json.dumps([header["config"], header["models"]]).encode())
    return functools.reduce(lambda found, key: zlib.crc32(arrays[key].data, found), sorted(arrays), total)


def read_checkpoint(
    path: Path, experiment: str, config_class: type[C], make_models: Callable[[C], Mapping[str, Any]]
) -> tuple[C, dict[str, TrainState]]:
    """The inverse of ``save_checkpoint``: the configuration, and the states of its models. ``make_models(config)`` are
    those, by name, whose parameters the arrays must fit. Raises UserError where the file is missing, damaged, or of
    another experiment."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise UserError(f"there is no checkpoint {path}")
    try:
        with safe_open(str(path), framework="numpy") as stored:
            header = {key: json.loads(text) for key, text in (stored.metadata() or {}).items()}
            if header.get("experiment") != experiment:
                raise ValueError(f"it is of {header.get('experiment', 'something else')}")
            arrays = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118  it is no dict
        if header["checksum"] != checksum(header, arrays):
            raise ValueError("it is damaged")
        config = from_json(config_class, header["config"])
        kept = {name: {key: model[key] for key in KEPT} for name, model in header["models"].items()}
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise UserError(f"{path} is no readable checkpoint of {experiment}: {one_line(error)}") from None
    states = init_states({name: model for name, model in make_models(config).items() if name in kept}, config)
    for name, state in states.items():
        vars(state).update(kept[name])
        for kind in ("params", "m", "v"):
            for key, target in getattr(state, kind).items():
                array = arrays.get(f"{name}/{kind}/{key}", np.empty(0))
                if array.shape != target.shape or array.dtype != target.dtype:
                    raise UserError(f"{path} is no checkpoint of this network: its {key} does not fit")
                target[...] = array
    return config, states


def load_checkpoint(script: Any, path: Path) -> tuple[Any, dict[str, TrainState]]:
    """Configuration and states of a checkpoint of a script: its module."""
    return read_checkpoint(path, script.EXPERIMENT, script.Config, script.make_models)


def unfinished(
    script: Any, path: Path, config: Any, states: Mapping[str, TrainState], required: Iterable[str] = ()
) -> str | None:
    """Which training of a script's checkpoint, or of the ``required`` models, has not come to its end, in words. Where
    the script has no ``of_model`` that says otherwise, that is after ``n_epochs``; or it has ``reached`` it before."""
    for name in dict.fromkeys((*required, *states)):
        done = len(states[name].history.get("train_loss", [])) if name in states else 0
        n_epochs = script.of_model(name, config)[0] if hasattr(script, "of_model") else config.n_epochs
        reached = hasattr(script, "reached") and name in states and script.reached(states[name], config)
        if done < n_epochs and not reached:
            how = f"{script.EXPERIMENT}.py --checkpoint … --resume"
            return f"{path} holds {done:,} of {n_epochs:,} epochs of {name}; finish it with {how}"
    return None


def require_resumable(path: Path, saved: Any, asked: Any) -> None:
    """Raises UserError where a resumed run would differ from the saved one in more than the settings that are free, or
    in its length, unless ``config.length_is_free``: the learning rate and the loss do not depend on it."""
    names = [field.name for field in dataclasses.fields(saved)]
    lengths = [name for name in names if name.endswith("epochs")]
    free = {name for name, it in settings_of(saved).items() if it.free}
    if found := difference(saved, asked, set(names) - {*free, *lengths}):
        raise UserError(f"cannot resume {path}: it was made with {found}")
    if found := difference(saved, asked, lengths):
        if not getattr(asked, "length_is_free", False):
            hint = "its learning rate or loss depends on the length: train anew"
            raise UserError(f"cannot resume {path}: it was made with {found}; {hint}")
        if found := difference(saved, asked, [k for k in lengths if getattr(asked, k) < getattr(saved, k)]):
            raise UserError(f"cannot resume {path}: it was made with {found}, which is shorter")
