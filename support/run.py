"""What every experiment script needs besides its science: flags, one-line errors, random streams, Ctrl-C, checkpoints.

What a new experiment must have, so that the rest of the project works with it:
    Config         a frozen dataclass with ``seed`` and ``n_epochs``; a property ``free_to_change``, the names of the
                   fields in which a resumed run may differ; and, where a field's flag is not its name with dashes, a
                   class variable ``flags`` (field: flag).
    a history      ``train_loss`` and any metrics, a number an epoch (``TrainState.add`` and ``end_epoch``).
    a result       by ``results.result_document``; the floats of a model in it are its metrics.
    its flags      --seed, --threads, and those of ``add_file_flags``; compare_seeds.py sets --seed, --threads, --quiet
                   and --out-json.
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
import os
import re
import signal
import stat
import sys
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from support.optimizers import TrainState

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT_FORMAT = 2
STATE_TYPES = {"step": int, "seconds": float, "sums": dict, "history": dict}  # what a checkpoint keeps beside arrays
ConfigT = TypeVar("ConfigT")


class UserError(Exception):
    """An error that the user can correct; its message is one line."""


def one_line(error: object, limit: int = 200) -> str:
    """An error's message, or any other text, on one line; a long one is cut in its middle."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-(limit // 2 - 1) :]}"


def print_result(text: str) -> None:
    """Print to stdout. A closed pipe is ignored; raises UserError where the text cannot be written."""
    if sys.stdout is None:
        return
    try:
        print(encodable(text, sys.stdout), flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries, and fails, again at its end
        if not isinstance(error, BrokenPipeError):
            raise UserError(f"cannot write to the standard output: {error.strerror}") from error


def print_message(text: str) -> None:
    """Print to stderr, if there is one that can be written to."""
    if sys.stderr is not None:  # print would take stdout instead
        with contextlib.suppress(OSError):
            print(encodable(text, sys.stderr), file=sys.stderr, flush=True)


def encodable(text: str, stream: IO[str]) -> str:
    """The text with escapes for what the stream cannot take, such as odd bytes in a file's name."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


# ----------------------------------------------------------------------------------------------------------------------
# Random numbers
# ----------------------------------------------------------------------------------------------------------------------


class Stream(IntEnum):
    """Independent random streams of one seed, so that no part of a run shifts the draws of another."""

    DATA = 0
    INIT = 1
    SHUFFLE = 2
    EVALUATION = 3


@functools.lru_cache(maxsize=2)
def permutation(n: int, seed: int, *key: int) -> np.ndarray:
    """A random order of 0 to n - 1, the same for the same seed and key (such as the epoch). Cached: do not write to
    it."""
    return generator(seed, Stream.SHUFFLE, *key).permutation(n)


def generator(seed: int, stream: Stream, *key: int) -> np.random.Generator:
    """The generator of a stream and a key (such as the epoch and step). It depends on nothing else, so that a resumed
    run draws the same numbers without any stored state."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(int(stream), *key)))


# ----------------------------------------------------------------------------------------------------------------------
# Flags
# ----------------------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage. ``args.given``: names of the flags on the command line."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        for flag, _, value in (word.partition("=") for word in (sys.argv[1:] if args is None else args)):
            if flag.startswith("-") and value == "--":  # Python 3.11 takes it for no value at all
                self.error(f"argument {flag}: expected a value, not --")
        self._negative_number_matcher = re.compile(r"-[\d.]")  # or -30:30 would be taken for a flag
        parsed = super().parse_args(args, namespace)
        defaults = {action: action.default for action in self._actions}
        for action in self._actions:
            action.default = argparse.SUPPRESS
        parsed.given = frozenset(vars(super().parse_args(args)))
        for action, default in defaults.items():
            action.default = default
        return parsed

    def error(self, message: str) -> NoReturn:
        print_message(f"{self.prog}: error: {one_line(message, 300)} (--help shows every flag)")
        self.exit(2)

    def print_help(self, file: Any = None) -> None:
        self.exit(exit_status(lambda: print_result(self.format_help().rstrip("\n"))))


def add_flags(parser: argparse.ArgumentParser, title: str, config: type) -> Callable[..., None]:
    """Start a group of flags, and return ``add(field, type, help, metavar, default)``, which adds the flag of a field
    of ``config``.

    The type is a function of the text, or a tuple of choices. Without ``default`` the flag has the field's default, and
    the help says it. With it, the help says this text, and the value is None unless the flag is given.
    """
    group = parser.add_argument_group(title)
    fields = {field.name: field for field in dataclasses.fields(config)}

    def add(name: str, kind: Any, text: str, metavar: str | None = "N", default: str | None = None) -> None:
        options: dict[str, Any] = {"choices": kind} if isinstance(kind, tuple) else {"type": kind, "metavar": metavar}
        shown = default or format_value(fields[name].default, fields[name].type)
        group.add_argument(
            flag_of(config, name), dest=name, default=None if default else fields[name].default,
            help=f"{text}; default: {shown}".replace("%", "%%").lstrip("; "), **options,
        )  # fmt: skip

    return add


def flag_of(config: Any, field: str) -> str:
    """The flag that sets a field of a Config."""
    own: dict[str, str] = getattr(config, "flags", {})
    return own.get(field, "--" + field.replace("_", "-"))


def format_value(value: Any, type_name: Any = "") -> str:
    """As a flag takes it: a Range 0:150, other tuples 16,4,8,8."""
    if isinstance(value, tuple):
        return (":" if type_name == "Range" else ",").join(format_value(v) for v in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def whole_number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not between {low} and {high}")
        return value

    return parse


def number(low: float, high: float, *, above: bool = False) -> Callable[[str], float]:
    """A number from ``low`` (with ``above``: greater than it) to ``high``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= value <= high or (above and value == low):  # a NaN fails this too
            bounds = f"above {low:g} and at most {high:g}" if above else f"between {low:g} and {high:g}"
            raise argparse.ArgumentTypeError(f"{text} is not {bounds}")
        return value

    return parse


def list_of(kind: Callable[[str], Any], length: int | None = None, example: str = "") -> Callable[[str], tuple]:
    """Values with commas between them."""

    def parse(text: str) -> tuple[Any, ...]:
        values = tuple(kind(part) for part in text.split(","))
        if length not in (None, len(values)):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {length}, such as {example}")
        return values

    return parse


def names_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Some of the known names, each once, with commas between them."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        if len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"{text} names one twice")
        return names

    return parse


def non_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return text


def file_path(text: str) -> Path:
    return Path(non_empty(text))


def add_file_flags(
    parser: argparse.ArgumentParser, models: Sequence[str], *, eval_only: bool = True, predict_png: bool = False
) -> None:
    """--models, and the files that a training reads and writes."""
    parser.add_argument(
        "--models", type=names_of(models), metavar="A,B", default=tuple(models),
        help=f"which to train; default: {','.join(models)}",
    )  # fmt: skip
    add = parser.add_argument_group("files").add_argument
    add("--out-json", type=file_path, metavar="FILE", help="write the result, history and environment there")
    add(
        "--checkpoint", type=file_path, metavar="FILE",
        help="save after every epoch, and on Ctrl-C; without --resume an older file of that name is replaced",
    )  # fmt: skip
    add("--checkpoint-every", type=whole_number(1, 10**9), metavar="N", help="save every N steps as well")
    add(
        "--resume", action="store_true",
        help="continue from --checkpoint, to the same numbers bit for bit where the threads are the same",
    )  # fmt: skip
    if eval_only:
        add(
            "--eval-only", action="store_true",
            help="no training: test the networks of --checkpoint on the test set that the data flags describe",
        )  # fmt: skip
    add("--predict", type=file_path, nargs="+", metavar="IMAGE", help="no training: classify pictures by --checkpoint")
    if predict_png:
        add(
            "--predict-png", type=file_path, metavar="FILE", default=Path("prediction.png"),
            help="where --predict draws what the network sees in them; default: %(default)s",
        )  # fmt: skip
    add("--quiet", action="store_true", help="no progress bar")


def check_file_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the script with status 2 where they do not fit together."""
    eval_only, png = getattr(args, "eval_only", False), getattr(args, "predict_png", None)
    for flag in ("predict", "eval_only", "resume", "checkpoint_every"):
        if getattr(args, flag, None) and not args.checkpoint:
            parser.error(f"argument --{flag.replace('_', '-')}: needs --checkpoint FILE")
    if args.predict and eval_only:
        parser.error("argument --predict: not together with --eval-only")
    for flag in ("resume", "checkpoint_every"):
        if (args.predict or eval_only) and getattr(args, flag):
            parser.error(f"argument --{flag.replace('_', '-')}: --predict and --eval-only do not train")
    if "predict_png" in args.given and not args.predict:
        parser.error("argument --predict-png: needs --predict IMAGE")
    if args.predict and args.out_json:
        parser.error("argument --out-json: --predict has no result of this kind")
    if args.out_json and same_file(args.out_json, args.checkpoint):
        parser.error("argument --out-json: is the same file as --checkpoint")
    for path in [args.checkpoint, *args.predict] if args.predict and png else []:
        if same_file(path, png):
            parser.error(f"argument --predict-png: would overwrite {path}")


def same_file(a: Path, b: Path | None) -> bool:
    return b is not None and os.path.realpath(a) == os.path.realpath(b)


# ----------------------------------------------------------------------------------------------------------------------
# The end of a script
# ----------------------------------------------------------------------------------------------------------------------


def exit_status(body: Callable[[], None]) -> int:
    """Run a script's body: 0; 1 with one line on stderr for a UserError; 130 after Ctrl-C, 143 after SIGTERM."""
    try:
        body()
    except UserError as error:
        print_message(f"error: {one_line(error, 500)}")
        return 1
    except MemoryError:
        print_message("error: out of memory; try a smaller --batch-size or fewer examples")
        return 1
    except Terminated:
        print_message("terminated")
        return 143
    except KeyboardInterrupt:
        print_message("interrupted")
        return 130
    return 0


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


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


# ----------------------------------------------------------------------------------------------------------------------
# Files are written whole or not at all
# ----------------------------------------------------------------------------------------------------------------------


def temporary_path(path: Path) -> Path:
    """A name beside ``path``, hidden and of bounded length."""
    return path.with_name(f".{path.name[:50]}.{os.getpid()}.tmp")


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file beside ``path`` that takes its name once all is written. Raises UserError on failure."""
    temporary = temporary_path(path)
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def require_writable(*paths: Path | None) -> None:
    """Before a training: make the files' folders; raises UserError where a file could not be written."""
    for path in paths:
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                mode = path.stat().st_mode  # fails too where the name is too long
                if not stat.S_ISREG(mode):
                    kind = "a folder" if stat.S_ISDIR(mode) else "no regular file"
                    raise UserError(f"cannot write {path}: it is {kind}")
            temporary = temporary_path(path)
            temporary.touch()
            temporary.unlink()
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from error


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ----------------------------------------------------------------------------------------------------------------------


def save_checkpoint(
    path: Path, experiment: str, config: Any, states: Iterable[TrainState], command: str | None = None
) -> None:
    """One .npz file: the arrays of every state that has been trained, and the rest as JSON; ``command`` is the one that
    trained them."""
    arrays: dict[str, np.ndarray] = {}
    models = {}
    for state in states:
        if state.step:
            for kind in ("params", "m", "v"):
                arrays |= {f"{state.name}/{kind}/{key}": array for key, array in getattr(state, kind).items()}
            models[state.name] = {key: getattr(state, key) for key in STATE_TYPES}
    header = {"format": CHECKPOINT_FORMAT, "experiment": experiment, "config": dataclasses.asdict(config)}
    header |= {"command": command, "models": models}
    with atomic_write(path) as stream:
        np.savez(stream, header=np.array(json.dumps(header)), **arrays)  # type: ignore[arg-type]


@contextlib.contextmanager
def open_checkpoint(path: Path, experiment: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Its arrays and its header. Raises UserError where the file is missing, damaged, of another experiment or of an
    older version."""
    try:
        with path.open("rb") as opened:
            stored = np.load(opened, allow_pickle=False)
            if not isinstance(stored, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            header = json.loads(str(stored["header"]))
            if header["experiment"] != experiment:
                raise UserError(f"{path} is a checkpoint of {header['experiment']}, not of {experiment}")
            if header.get("format") != CHECKPOINT_FORMAT:
                raise UserError(f"{path} is of an older version of {experiment}.py: train it again")
            yield stored, header
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {path}") from None
    except (OSError, ArithmeticError, AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError,
            zipfile.BadZipFile, zlib.error) as error:  # fmt: skip
        raise UserError(f"{path} is not a readable checkpoint of {experiment}: {one_line(error)}") from error


def read_checkpoint(
    path: Path, experiment: str, config_class: type[ConfigT], fresh: Callable[[ConfigT], dict[str, TrainState]]
) -> tuple[ConfigT, dict[str, TrainState]]:
    """Configuration and states of a file of ``save_checkpoint``; UserError as in ``open_checkpoint``. ``fresh(config)``
    makes untrained states by model name, whose arrays are overwritten and must have the file's shapes."""
    with open_checkpoint(path, experiment) as (stored, header):
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in header["config"].items()}
        config = config_class(**fields)
        states = {name: state for name, state in fresh(config).items() if name in header["models"]}
        for name, state in states.items():
            kept = header["models"][name]
            if {key: type(value) for key, value in kept.items()} != STATE_TYPES:
                raise ValueError(f"the state of {name} is not that of a training")
            for kind in ("params", "m", "v"):
                for key, target in getattr(state, kind).items():
                    array = stored[f"{name}/{kind}/{key}"]
                    if array.shape != target.shape or array.dtype != target.dtype:
                        raise ValueError(f"its {key} does not fit this network")
                    target[...] = array
            for key, value in kept.items():
                setattr(state, key, value)
    return config, states


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


class Files(NamedTuple):
    """Files that a training reads and writes, and whether it shows a progress bar."""

    checkpoint: Path | None = None
    checkpoint_every: int | None = None  # steps
    resume: bool = False
    quiet: bool = True
    command: str | None = None  # the command line, which the checkpoint keeps

    def require_checkpoint(self, experiment: str) -> None:
        """Before data are loaded: raises UserError where --resume has no checkpoint to read."""
        if self.resume and self.checkpoint:
            with open_checkpoint(self.checkpoint, experiment):
                pass

    @classmethod
    def from_args(cls, args: argparse.Namespace, command: str) -> Files:
        return cls(args.checkpoint, args.checkpoint_every, args.resume, args.quiet, command)


NO_FILES = Files()
Callback = Callable[[TrainState, bool], None]  # the state, and whether an epoch has ended


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
        path = self.files.checkpoint
        if path and self.files.resume:

            def states(saved: Any, path: Path = path) -> dict[str, TrainState]:
                check_resumable(path, saved, self.config)
                return self.states

            read_checkpoint(path, self.experiment, type(self.config), states)
        self.interrupt.__enter__()
        return self

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
                save_checkpoint(self.files.checkpoint, self.experiment, self.config, states, self.files.command)
            except UserError as error:
                print_message(f"warning: {one_line(error, 500)}; training goes on")
        self.interrupt.check()

    def _show(self, state: TrainState, epoch_ended: bool) -> None:
        if self.files.quiet or sys.stderr is None or not sys.stderr.isatty():
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
    where = f"epoch {epoch + 1}, step {position + 1}; try a smaller --lr"
    if not np.isfinite(loss):
        raise UserError(f"{state.name}: the loss became {loss} in {where}")
    if position == steps_per_epoch - 1 and not state.is_finite:
        raise UserError(f"{state.name}: a parameter became infinite or NaN in {where}")
