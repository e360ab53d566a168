"""What a training needs besides its science: its flags, checkpoints after every epoch, resuming, a progress bar.

A new experiment has a frozen dataclass ``Config`` of settings with ``seed`` and ``n_epochs`` (and with a property
``length_is_free`` where the learning rate is the same for any ``n_epochs``), an ``Options(RunOptions)`` with
``models``, and a result by ``results.result_document``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from support.checkpoints import read_checkpoint, require_resumable, save_checkpoint
from support.output import progress_bar, require_writable
from support.results import git_commit
from support.run import TrainState, init_states
from support.settings import SettingError, input_path, int_in, output_path, setting

# Of a training, after every step: the state, and whether an epoch has ended
Callback = Callable[[TrainState, bool], None]


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What a run reads and writes besides its configuration. Of its numbers, threads may change the last bits."""

    out_json: Path | None = setting(
        None, output_path, "Write the result, history and environment there.", usual=True, group="files"
    )
    checkpoint: Path | None = setting(
        None, output_path, "Save the networks there after every epoch, and read them from there.", usual=True
    )
    resume: bool = setting(
        False, bool, "Continue from --checkpoint: the numbers are those of an unbroken run, bit for bit.", usual=True
    )
    threads: int = setting(1, int_in(1, 256), "Use N threads.")
    quiet: bool = setting(False, bool, "Show no progress bar of the training.")

    def check(self, given: Mapping[str, Any]) -> None:
        if self.resume and self.checkpoint is None:
            raise SettingError("resume", "needs --checkpoint FILE")


@dataclasses.dataclass(frozen=True)
class PredictOptions(RunOptions):
    """Those of a script that also classifies pictures."""

    predict: tuple[Path, ...] = setting(
        (), input_path, "Train nothing: classify pictures with the networks of --checkpoint.", usual=True
    )

    def check(self, given: Mapping[str, Any]) -> None:
        super().check(given)
        if self.predict and self.checkpoint is None:
            raise SettingError("predict", "needs --checkpoint FILE")
        used = ("predict", "checkpoint", "threads", "quiet", "out")
        if unused := [name for name in given if self.predict and name not in used]:
            raise SettingError(unused[0], "--predict neither trains nor tests")


NO_OPTIONS = RunOptions(quiet=True)


class Session:
    """The trainings of a run: saved after every epoch, resumed, shown by a progress bar.

    ``with Session(EXPERIMENT, config, make_models, options) as session:``, then for each ``model, state`` of
    ``session.trainings(n_steps)``: ``train(…, callback=session.after_step)``. On entry, --resume loads the checkpoint.
    ``names``: train only these models. ``callback`` is called after every step too, and before the first.
    """

    def __init__(
        self, experiment: str, config: Any, make_models: Callable[[Any], Mapping[str, Any]], options: RunOptions,
        names: Collection[str] | None = None, callback: Callback | None = None,
    ) -> None:  # fmt: skip
        self.experiment, self.config, self.make_models, self.options = experiment, config, make_models, options
        self.names, self.callback, self.models = names, callback, make_models(config)
        self.states = init_states(self.models, config)
        self.bar = progress_bar(quiet=True)

    def __enter__(self) -> Session:
        git_commit()  # the code that has been read now, and not what may lie there at the end
        path = self.options.checkpoint
        if path and self.options.resume:
            saved, states = read_checkpoint(path, self.experiment, type(self.config), self.make_models)
            require_resumable(path, saved, self.config)
            self.states |= states
            require_writable(path)
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    @property
    def trained(self) -> dict[str, TrainState]:
        """The states of the models that are to be trained, by name."""
        return {name: state for name, state in self.states.items() if self.names is None or name in self.names}

    def trainings(self, n_steps: Callable[[str], int]) -> Iterator[tuple[Any, TrainState]]:
        """These models, one after the other, with their states. The bar goes to the ``n_steps`` of a model's name."""
        for name, state in self.trained.items():
            self.bar.close()
            options = {"total": n_steps(name), "initial": state.step, "desc": name, "unit": "step"}
            self.bar = progress_bar(quiet=self.options.quiet, **options)
            if self.callback and state.step == 0:
                self.callback(state, True)
            yield self.models[name], state

    def after_step(self, state: TrainState, epoch_ended: bool) -> None:
        """The callback of a training loop, after every step."""
        if self.callback:
            self.callback(state, epoch_ended)
        self.bar.update(state.step - self.bar.n)
        latest = {key: f"{values[-1]:.3f}" for key, values in state.history.items() if "accuracy" in key and values}
        self.bar.set_postfix(latest, refresh=False)
        if self.options.checkpoint and epoch_ended and state.step:
            save_checkpoint(self.options.checkpoint, self.experiment, self.config, self.states.values())
