"""What a training needs besides its science: random streams, checkpoints, Ctrl-C, progress.

What a new experiment must have, so that the rest of the project works with it:
    Config         a frozen dataclass with ``seed`` and ``n_epochs``; a property ``free_to_change``, the names of the
                   fields in which a resumed run may differ; and, where a field's flag is not its name with dashes, a
                   class variable ``flags`` (field: flag).
    a history      ``train_loss`` and any metrics, a number an epoch (``TrainState.add`` and ``end_epoch``).
    a result       by ``results.result_document``; the floats of a model in it are its metrics.
    its flags      --seed, --threads, and those of ``flags.add_file_flags``; compare_seeds.py sets --seed, --threads,
                   --quiet and --out-json. The parser of ``make_parser()`` refuses what does not fit together.
    for figures    the module's EXPERIMENT, add_config_flags, config_from_args, load_checkpoint, make_data, train_all;
                   labels and colours of its models in ``figures.MODEL_STYLES``, the data set's name in
                   ``figures.DATASET_NAMES``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import signal
import types
import typing
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from support.console import Terminated, one_line, print_message, shows_progress
from support.files import UserError, atomic_write
from support.flags import flag_of, format_value
from support.optimizers import TrainState

CHECKPOINT_FORMAT = 2
STATE_TYPES = {  # what a checkpoint keeps beside arrays
    "step": int, "seconds": float, "sums": dict[str, float], "history": dict[str, list[float]],
}  # fmt: skip
HEADER_TYPES: dict[str, Any] = {"config": dict, "command": str | None, "threads": int | None, "models": dict}
MAX_HEADER, MAX_NPY_HEADER = 1 << 28, 1 << 14  # bytes
ConfigT = TypeVar("ConfigT")


# ----------------------------------------------------------------------------------------------------------------------
# Random numbers
# ----------------------------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ----------------------------------------------------------------------------------------------------------------------


class OtherCheckpointError(UserError):
    """A checkpoint of another experiment, or of an older version."""


def save_checkpoint(
    path: Path, experiment: str, config: Any, states: Iterable[TrainState], command: str | None = None,
    threads: int | None = None,
) -> None:  # fmt: skip
    """One .npz file: the arrays of every state that has been trained, and the rest as JSON; ``command`` is the one that
    trained them, on so many ``threads`` (None: no bit depends on them)."""
    arrays: dict[str, np.ndarray] = {}
    models = {}
    for state in states:
        if state.step:
            for kind in ("params", "m", "v"):
                arrays |= {f"{state.name}/{kind}/{key}": array for key, array in getattr(state, kind).items()}
            models[state.name] = {key: getattr(state, key) for key in STATE_TYPES}
    header = {"format": CHECKPOINT_FORMAT, "experiment": experiment, "config": dataclasses.asdict(config)}
    header |= {"command": command, "threads": threads, "models": models}
    header["checksum"] = header_checksum(header)
    with atomic_write(path) as stream:
        np.savez(stream, header=np.array(json.dumps(header)), **arrays)  # type: ignore[arg-type]


def header_checksum(header: dict[str, Any]) -> int:
    """Of all but itself. The arrays have one of their own, as every member of a .npz file."""
    rest = {key: value for key, value in header.items() if key != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


@contextlib.contextmanager
def open_checkpoint(path: Path, experiment: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Its arrays and its header. Raises UserError where the file is missing or damaged, OtherCheckpointError where it
    is of another experiment or of an older version."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is a folder" if path.is_dir() else "it is no regular file")
        with path.open("rb") as opened:
            if not zipfile.is_zipfile(path):  # numpy would speak of pickled data, and of how to load them
                raise ValueError("it is no .npz file, or a part of one")
            stored = np.load(opened, allow_pickle=False)
            assert stored.zip
            if stored.zip.getinfo("header.npy").file_size > MAX_HEADER:
                raise ValueError("its header is too long")
            header = json.loads(str(stored["header"]), parse_constant=not_finite)
            if not isinstance(header, dict) or not isinstance(header.get("experiment"), str):
                raise ValueError("its header names no experiment")
            if header["experiment"] != experiment:
                raise OtherCheckpointError(f"{path} is a checkpoint of {header['experiment']}, not of {experiment}")
            if header.get("format") != CHECKPOINT_FORMAT:
                raise OtherCheckpointError(f"{path} is of an older version of {experiment}.py: train it again")
            if "checksum" in header and header["checksum"] != header_checksum(header):
                raise ValueError("its header has been changed since it was written")
            for key, kind in HEADER_TYPES.items():
                if not fits(header.get(key), kind):
                    raise ValueError(f"its {key} is {one_line(header.get(key), 40)}")
            yield stored, header
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {path}") from None
    except (UserError, MemoryError):
        raise
    except Exception as error:  # zipfile and numpy raise many kinds on a damaged file: BadZipFile, struct.error, ...
        raise UserError(f"{path} is not a readable checkpoint of {experiment}: {one_line(error)}") from error


def not_finite(text: str) -> NoReturn:
    raise ValueError(f"it holds {text}")


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type as a field's annotation says it; a float is finite, and may be a whole number."""
    parts = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return any(fits(value, part) for part in parts)
    if typing.get_origin(kind) is tuple:
        kinds = [parts[0]] * len(value) if parts[-1:] == (...,) and isinstance(value, tuple) else parts
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(fits, value, kinds))
    if typing.get_origin(kind) is list:
        return isinstance(value, list) and all(fits(part, parts[0]) for part in value)
    if typing.get_origin(kind) is dict:
        return isinstance(value, dict) and all(fits(part, parts[1]) for part in value.values())
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is kind


def config_of_header(
    header: dict[str, Any], config_class: type[ConfigT], parser: argparse.ArgumentParser | None
) -> ConfigT:
    """The configuration of a checkpoint. Raises ValueError where there is a field that ``config_class`` does not have,
    or a value that is not of its field's type, or is none that the field's flag takes."""
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in header["config"].items()}
    kinds = typing.get_type_hints(config_class)
    if unknown := set(fields) - set(kinds):
        raise ValueError(f"it is of another version, which had a field {min(unknown)}")
    config = config_class(**fields)
    actions = {action.dest: action for action in parser._actions} if parser else {}
    for field in dataclasses.fields(config_class):  # type: ignore[arg-type]
        value, action = getattr(config, field.name), actions.get(field.name)
        if not fits(value, kinds[field.name]):
            raise ValueError(f"its {field.name} is {value!r}")
        if action and action.choices and value not in action.choices:
            raise ValueError(f"its {field.name} is {value!r}")
        if action and callable(action.type) and value not in (None, ()):
            try:
                action.type(format_value(value, field.type))
            except argparse.ArgumentTypeError as error:
                raise ValueError(f"its {field.name}: {error}") from None
    return config


def read_checkpoint(
    path: Path, experiment: str, config_class: type[ConfigT], fresh: Callable[[ConfigT], dict[str, TrainState]],
    parser: argparse.ArgumentParser | None = None,
) -> tuple[ConfigT, dict[str, TrainState]]:  # fmt: skip
    """The inverse of ``save_checkpoint``; UserError as in ``open_checkpoint``. ``fresh(config)`` makes the states, by
    name, into which the arrays must fit; ``parser`` knows the values that the fields of a configuration may have."""
    with open_checkpoint(path, experiment) as (stored, header):
        config = config_of_header(header, config_class, parser)
        states = fresh(config)
        if unknown := [name for name in header["models"] if name not in states]:
            raise ValueError(f"it holds a network {unknown[0]!r}")
        states = {name: state for name, state in states.items() if name in header["models"]}
        for name, state in states.items():
            kept = header["models"][name]
            if set(kept) != set(STATE_TYPES) or not all(fits(kept[key], kind) for key, kind in STATE_TYPES.items()):
                raise ValueError(f"the state of {name} is not that of a training")
            if kept["step"] < 1 or kept["seconds"] < 0:
                raise ValueError(f"the state of {name} is that of {kept['step']} steps in {kept['seconds']} s")
            for kind in ("params", "m", "v"):
                for key, target in getattr(state, kind).items():
                    member = f"{name}/{kind}/{key}"
                    if stored.zip.getinfo(f"{member}.npy").file_size > target.nbytes + MAX_NPY_HEADER:
                        raise ValueError(f"its {key} does not fit this network")
                    array = stored[member]
                    if array.shape != target.shape or array.dtype != target.dtype:
                        raise ValueError(f"its {key} does not fit this network")
                    if np.isnan(array).any() or (kind == "params" and np.isinf(array).any()):
                        raise ValueError(f"{key} of {name} holds NaN or an infinite number")
                    target[...] = array
            for key, value in kept.items():
                setattr(state, key, value)
    return config, states


def require_replaceable(path: Path, experiment: str, overwrite: bool) -> None:
    """Raises UserError where a training would replace what is no checkpoint of its experiment; with ``overwrite``, what
    is no checkpoint at all."""
    try:
        with open_checkpoint(path, experiment):
            pass
    except OtherCheckpointError as error:
        if not overwrite:
            raise UserError(f"{error}; --overwrite replaces it") from None
    except UserError as error:
        raise UserError(f"{error}; --checkpoint does not replace it") from None


def checkpoint_command(path: Path, experiment: str) -> str | None:
    """The command line that trained it."""
    with open_checkpoint(path, experiment) as (_, header):
        return header["command"]


def first_difference(saved: Any, asked: Any, names: Collection[str]) -> str | None:
    for field in dataclasses.fields(saved):
        old, new = getattr(saved, field.name), getattr(asked, field.name)
        if field.name in names and old != new:
            text = [format_value(value, field.type) for value in (old, new)]
            return f"made with {flag_of(saved, field.name)} {text[0]}, not {text[1]}"
    return None


def check_same(path: Path, saved: Any, asked: Any, given: Collection[str], free: Collection[str] = ()) -> None:
    """For --eval-only and --predict: raises UserError where a field of ``asked`` that is among ``given`` (set on the
    command line) differs from the checkpoint's ``saved``, unless it is one of ``free``."""
    if difference := first_difference(saved, asked, {*given} - {*free, "data_dir"}):
        raise UserError(f"{path} was {difference}")


def check_resumable(path: Path, saved: Any, asked: Any) -> None:
    """Raises UserError where a resumed run differs from the saved one in a field that is not free to change, or is
    shorter."""
    fixed = {field.name for field in dataclasses.fields(saved)} - saved.free_to_change
    if difference := first_difference(saved, asked, fixed):
        raise UserError(f"cannot resume {path}: it was {difference}")
    if asked.n_epochs < saved.n_epochs:
        raise UserError(f"cannot resume {path} for {asked.n_epochs} epochs: it was begun for {saved.n_epochs}")


def of_models(path: Path, states: dict[str, TrainState], names: Collection[str]) -> dict[str, TrainState]:
    """The states of the named models; UserError where there is none."""
    if not (found := {name: state for name, state in states.items() if name in names}):
        raise UserError(f"{path} holds {', '.join(states)}, and not {', '.join(names)}")
    return found


# ----------------------------------------------------------------------------------------------------------------------
# A run's trainings
# ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Files:
    """What a training saves, and what it shows."""

    checkpoint: Path | None = None
    checkpoint_every: int | None = None  # steps
    resume: bool = False
    quiet: bool = True
    command: str | None = None  # the command line, which the checkpoint keeps
    overwrite: bool = False  # a checkpoint of another experiment or of an older version
    threads: int | None = None  # where the bits depend on them
    failure: str | None = dataclasses.field(default=None, init=False)  # why the last checkpoint is not saved

    def require_checkpoint(self, experiment: str) -> None:
        """Find out before data are looked for that there is nothing to resume, or what must not be replaced."""
        if self.checkpoint is None:
            return
        if self.resume:
            with open_checkpoint(self.checkpoint, experiment):
                pass
        elif os.path.exists(self.checkpoint):
            require_replaceable(self.checkpoint, experiment, self.overwrite)

    def require_saved(self) -> None:
        """Raises UserError where the last checkpoint could not be written."""
        if self.failure is not None:
            raise UserError(f"the last checkpoint is not saved: {self.failure}")

    @classmethod
    def from_args(cls, args: argparse.Namespace, command: str, threads: int | None = None) -> Files:
        return cls(args.checkpoint, args.checkpoint_every, args.resume, args.quiet, command, args.overwrite, threads)


NO_FILES = Files()
Callback = Callable[[TrainState, bool], None]  # the state, and whether an epoch has ended


class Interrupt:
    """Delays Ctrl-C and SIGTERM until ``check`` is called between two steps, so that checkpoints are complete. A second
    signal stops at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        with contextlib.suppress(ValueError):  # not in the main thread: signals are not ours
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._previous[signum] = signal.signal(signum, self._request)
        return self

    def _request(self, signum: int, frame: Any) -> None:
        self.signal = signum
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def check(self) -> None:
        """Raises Terminated or KeyboardInterrupt where a signal came."""
        if self.signal is not None:
            raise Terminated if self.signal == signal.SIGTERM else KeyboardInterrupt


class Session:
    """The trainings of a run: saved after every epoch and on Ctrl-C, resumed, shown by a progress bar.

    ``with Session(EXPERIMENT, config, states, files, n_steps) as session: train(…, callback=session.after_step)``
    On entry, --resume loads the checkpoint into ``states``. ``n_steps``: of each training, for the progress bar.
    ``callback`` is called after every step too, and before the first.
    """

    def __init__(
        self, experiment: str, config: Any, states: dict[str, TrainState], files: Files, n_steps: int,
        callback: Callback | None = None,
    ) -> None:  # fmt: skip
        self.experiment, self.config, self.states, self.files = experiment, config, states, files
        self.n_steps, self.callback = n_steps, callback
        self.interrupt = Interrupt()
        self.bar: Any = None

    def __enter__(self) -> Session:
        if self.files.checkpoint and self.files.resume:
            self._resume(self.files.checkpoint)
        self.interrupt.__enter__()
        return self

    def _resume(self, path: Path) -> None:
        with open_checkpoint(path, self.experiment) as (_, header):
            threads = header.get("threads")

        def states(saved: Any) -> dict[str, TrainState]:
            check_resumable(path, saved, self.config)
            return self.states

        read_checkpoint(path, self.experiment, type(self.config), states)
        for state in self.states.values():
            n_epochs = state.step // (self.n_steps // self.config.n_epochs)
            if state.step > self.n_steps or len(state.history.get("train_loss", [])) != n_epochs:
                raise UserError(f"cannot resume {path}: its history of {state.name} is not that of {state.step} steps")
        if threads != self.files.threads and None not in (threads, self.files.threads):
            print_message(
                f"warning: {path} was trained with --threads {threads} and goes on with {self.files.threads}: the last"
                " bits of its numbers may be others than without the break"
            )

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()
        self.interrupt.__exit__(*error)

    def after_step(self, state: TrainState, epoch_ended: bool) -> None:
        """The callback of a training loop: after every step, and before the first."""
        if self.callback:
            self.callback(state, epoch_ended)
        self._show(state, epoch_ended)
        every = self.files.checkpoint_every
        due = epoch_ended or (every and state.step % every == 0) or self.interrupt.signal is not None
        if self.files.checkpoint and due and state.step:
            try:
                states = self.states.values()
                save_checkpoint(
                    self.files.checkpoint, self.experiment, self.config, states, self.files.command, self.files.threads
                )
                self.files.failure = None
            except UserError as error:
                self.files.failure = one_line(error, 400)
                goes_on = "" if self.interrupt.signal is not None else "; training goes on"
                print_message(f"warning: {self.files.failure}{goes_on}")
        self.interrupt.check()

    def _show(self, state: TrainState, epoch_ended: bool) -> None:
        if not shows_progress(self.files.quiet):
            return
        from tqdm import tqdm

        if self.bar is None or self.bar.desc.removesuffix(": ") != state.name:
            if self.bar is not None:
                self.bar.close()
            self.bar = tqdm(total=self.n_steps, initial=state.step, desc=state.name, unit="step", leave=False)
        self.bar.update(state.step - self.bar.n)
        if epoch_ended and state.history:
            latest = {key: f"{values[-1]:.3f}" for key, values in state.history.items() if values}
            self.bar.set_postfix({k: v for k, v in latest.items() if "loss" in k or "accuracy" in k}, refresh=False)


def require_finite(state: TrainState, loss: float, steps_per_epoch: int) -> None:
    """After a step: raises UserError where its loss, or a parameter at the end of an epoch, is not finite."""
    epoch, position = divmod(state.step - 1, steps_per_epoch)
    where = f"epoch {epoch + 1}, step {position + 1}; try a smaller learning rate"
    if not np.isfinite(loss):
        raise UserError(f"{state.name}: the loss became {loss} in {where}")
    if position == steps_per_epoch - 1 and not state.is_finite:
        raise UserError(f"{state.name}: a parameter became infinite or NaN in {where}")
