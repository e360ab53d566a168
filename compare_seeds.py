#!/usr/bin/env python3
"""Many seeds and settings of one experiment: runs them, compares the models with paired statistics, draws a figure.

    python compare_seeds.py smallnorb_novel_viewpoint --seeds 0:3 -- --n-epochs 10
    python compare_seeds.py smallnorb_novel_viewpoint --seeds 0:10 --grid em-iters=1,2,3 loss=cross-entropy,spread
    python compare_seeds.py smallnorb_novel_viewpoint --zip train-azimuths=0:60,0:150 test-azimuths=110:240,200:330

A run is a process, ``python EXPERIMENT.py FLAGS --seed S --threads N --quiet --out-json FILE``. Every experiment can be
compared that has these flags and writes ``{"models": {name: {"n_params": int, metric: float, ...}}}``, with the name of
its main metric as "headline" and the value of that metric by guessing as "chance". Every float of a model is a metric.
The capsule network is compared with each other model, paired by seed: the difference of the same seed's two models, its
mean with a 95 % interval (Student's t), and the p value of a sign-flip permutation test. ``report.py`` turns the
results into the tables of the pages.
"""

from __future__ import annotations

import support.startup

# isort: split

import argparse
import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import support
from report import MAX_BYTES, load_script, make_table, read_result, show_p
from support.console import exit_status, one_line, print_message, print_result, shows_progress
from support.files import UserError, atomic_write, data_files, overwriting, require_writable, temporary_folder
from support.flags import Parser, number, whole_number
from support.results import code_fingerprint, save_result
from support.statistics import best_setting, summarise

Json = dict[str, Any]

OWN_FLAGS = ("seed", "out-json", "threads", "quiet", "checkpoint", "resume")  # of an experiment, set here or not at all
DATA_FLAGS = ("dataset", "data-dir")  # settings that differ in them may have different data sets
SECONDS = ("train_seconds", "epoch_seconds")  # differ from call to call
MAX_RUNS = 10_000
MAX_SECONDS = 1e6  # twelve days
POLL_SECONDS = 0.1  # between two looks whether a run is still wanted
DASK_TIMEOUT = 10  # seconds until a scheduler must have answered
OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")  # told apart by colour-blind eyes too
MARKERS = "os^Dvp"
WATCHED = str(Path(__file__).resolve().with_name("support") / "watched.py")


# ----------------------------------------------------------------------------------------------------------------------
# One run
# ----------------------------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """One point of a sweep."""

    name: str  # "em-iters=1 loss=spread", or "default" without a sweep
    values: dict[str, str]
    args: tuple[str, ...]  # of the experiment, without those that are the same in every comparison


class Job(NamedTuple):
    script: Path
    setting: Setting
    seed: int
    threads: int
    timeout: float | None
    code: str  # fingerprint
    cwd: Path
    checkpoints: Path | None = None  # folder, where unfinished runs are saved
    resume: bool = False

    @property
    def key(self) -> str:
        """What the numbers of the run depend on: the beginning of its name in the cache, before the data set's."""
        args = [locate(arg, self.cwd) for arg in self.setting.args]
        numpy = importlib.metadata.version("numpy")
        text = json.dumps([self.script.stem, args, self.seed, self.threads, self.code, numpy])
        return f"{self.script.stem}-seed{self.seed}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def __str__(self) -> str:
        return f"seed {self.seed}, setting {self.setting.name}"


def locate(arg: str, cwd: Path) -> list[Any]:
    """An argument; where it names a file or folder, also which one, with the sizes and dates of the files."""
    flag, _, value = arg.rpartition("=") if arg.startswith("--") else ("", "", arg)
    path = (cwd / value).resolve()
    try:
        levels = itertools.chain(path.glob("*"), path.glob("*/*"), path.glob("*/*/*"))  # pictures are in sub-folders
        files = sorted(levels) if path.is_dir() else [path] if value and path.is_file() else []
        stamps = [[str(file.relative_to(path)), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        return [flag, str(path), stamps] if path.exists() and value else [arg]
    except (OSError, ValueError):
        return [arg]


def fault_of(result: Any, seed: int) -> str | None:
    """Why this is not the result of an experiment's run, in words."""
    if not isinstance(result, dict) or not isinstance(result.get("models"), dict):
        return "its result is not the JSON of an experiment"
    if not result["models"]:
        return "its result holds no model"
    for name, model in result["models"].items():
        if not isinstance(model, dict) or not isinstance(model.get("n_params", 0), int):
            return f"{name} has no metrics or no number of parameters"
        for key, value in model.items():
            if isinstance(value, float) and not math.isfinite(value):
                return f"{name}'s {key} is {value}"
    kinds = {"config": dict, "history": dict, "environment": dict, "dataset": str | None, "headline": str | None}
    for key, kind in (kinds | {"chance": int | float | None}).items():
        if not isinstance(result.get(key, {} if kind is dict else None), kind):
            return f"its {key} is {str(result[key])[:20]}"
    if result.get("seed", seed) != seed:
        return f"its seed is {str(result['seed'])[:20]}"
    try:
        json.dumps(result, allow_nan=False)
    except ValueError:
        return "its result holds a number that is not finite"
    return None


@contextlib.contextmanager
def held_pipe() -> Iterator[int]:
    """The end to read from of a pipe, the other end of which is closed with this process at the latest."""
    reader, writer = os.pipe()
    try:
        yield reader
    finally:
        os.close(reader)
        os.close(writer)


def scheduler_waits() -> bool:
    """Whether the Dask scheduler still waits for the result of the task that calls this: no longer where the comparison
    was stopped or killed."""
    from distributed import get_worker

    worker = get_worker()
    task = worker.state.tasks.get(worker.get_current_task())
    return task is not None and task.state != "cancelled"


def run_job(job: Job, is_wanted: Callable[[], bool]) -> Json:
    """``{"result": the experiment's JSON, "warnings": lines}``, or ``{"error": one line}``. Raises nothing that a run
    can cause.

    The process is killed where ``is_wanted()`` becomes false. It ends with this one too, however that ends: a cluster's
    worker, whose runs another one repeats, or a caller that is killed.
    """
    try:
        if code_fingerprint(job.script) != job.code:
            return {"error": f"{job.script} is not the version that was asked for"}
        with temporary_folder() as folder, held_pipe() as pipe:
            out = folder / "out.json"
            command = [sys.executable, WATCHED, str(job.script), *job.setting.args, f"--seed={job.seed}"]
            if job.checkpoints:
                saved = job.checkpoints / f"{job.key}.ckpt.npz"
                command += [f"--checkpoint={saved}", *["--resume"] * (job.resume and saved.exists())]
            blas = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(job.threads))
            with subprocess.Popen(
                [*command, f"--threads={job.threads}", "--quiet", f"--out-json={out}"],
                cwd=job.cwd, env={**os.environ, **blas}, text=True, errors="replace",
                stdin=pipe, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            ) as process:  # fmt: skip
                stderr, timed_out = None, False
                deadline = time.monotonic() + (job.timeout or math.inf)
                while stderr is None:
                    try:
                        _, stderr = process.communicate(timeout=POLL_SECONDS)
                    except subprocess.TimeoutExpired:
                        timed_out = time.monotonic() > deadline
                        if timed_out or not is_wanted():
                            process.kill()
            lines = [line.strip() for line in stderr.splitlines() if re.search(r"\w", line)] or ["no message"]
            if timed_out:
                return {"error": f"not finished after {job.timeout:g} s: {lines[-1]}"}
            if process.returncode < 0:
                return {"error": f"killed by {signal.Signals(-process.returncode).name}: {lines[-1]}"}
            if process.returncode:
                return {"error": f"exit status {process.returncode}: {lines[-1]}"}
            result = json.loads(out.read_text(encoding="utf-8"))
            if fault := fault_of(result, job.seed):
                return {"error": fault}
            if job.checkpoints:
                saved.unlink(missing_ok=True)
            return {"result": result, "warnings": lines if stderr.strip() else []}
    except UserError as error:
        return {"error": one_line(error, 400)}
    except OSError as error:
        return {"error": f"no result: {error}"}
    except (ValueError, RecursionError):
        return {"error": "its result is not the JSON of an experiment"}


# ----------------------------------------------------------------------------------------------------------------------
# All runs
# ----------------------------------------------------------------------------------------------------------------------


def make_settings(zipped: dict[str, list[str]], grid: dict[str, list[str]], rest: list[str]) -> list[Setting]:
    """The product of the grid's axes; the zipped flags are its first axis, and advance together."""
    axes = [[{name: v} for v in values] for name, values in grid.items()]
    if zipped:
        axes.insert(0, [dict(zip(zipped, row, strict=True)) for row in zip(*zipped.values(), strict=True)])
    settings = []
    for point in itertools.product(*axes):
        values = {name: v for part in point for name, v in part.items()}
        name = " ".join(f"{k}={v}" for k, v in values.items()) or "default"
        settings.append(Setting(name, values, (*rest, *(f"--{k}={v}" for k, v in values.items()))))
    return settings


class Comparison:
    """What the runs so far have in common. ``add`` raises UserError for the first that cannot be compared with them."""

    def __init__(self, metric: str | None, ignored: Iterable[str]) -> None:
        self.metric, self.ignored = metric, set(ignored)
        self.first: dict[tuple[str | None, ...], tuple[Job, str | None]] = {}
        self.pairs: set[tuple[str, str]] | None = None
        self.warned: set[str] = set()

    def add(self, job: Job, outcome: Json) -> list[str]:
        """Take in a run that has a result; the warnings that no run before it had."""
        result = outcome["result"]
        group = tuple(job.setting.values.get(flag) for flag in DATA_FLAGS)
        other, dataset = self.first.setdefault(group, (job, result.get("dataset")))
        if result.get("dataset") != dataset:
            raise UserError(
                f"the runs have different data sets and cannot be compared: {dataset} ({other}) and "
                f"{result.get('dataset')} ({job}); name one with --dataset, or leave --resume out"
            )
        pairs = {
            (name, key)
            for name, model in result["models"].items()
            for key, value in model.items()
            if isinstance(value, float) and key not in self.ignored
        }
        self.pairs = pairs if self.pairs is None else self.pairs & pairs
        known = list(dict.fromkeys(k for m in result["models"].values() for k in m if k in {key for _, key in pairs}))
        if not pairs:
            raise UserError(f"{job}: the result holds no metric, which is a number with a decimal point")
        if self.metric and self.metric not in {key for _, key in self.pairs}:
            raise UserError(f"--metric {self.metric} is not in the results, which have {', '.join(known)}")
        if not self.pairs:
            raise UserError(f"{job}: no metric of a model is in all results so far; this one has {', '.join(known)}")
        new = [line for line in outcome.get("warnings", []) if line not in self.warned]
        self.warned.update(new)
        return [f"{job}: {line}" for line in new]


def read_cache(jobs: list[Job], cache: Path) -> dict[int, Json]:
    """The newest kept outcome of each job that has one; a line on stderr for each file that cannot be used."""
    found: dict[str, list[Path]] = {}
    for path in cache.glob("*.json"):
        if not path.is_file():
            raise UserError(f"{path} is no file but has the name of a run; remove it")
        found.setdefault(path.name.rpartition(".on-")[0], []).append(path)
    outcomes = {}
    for n, job in enumerate(jobs):
        for path in sorted(found.get(job.key, []), key=lambda path: path.stat().st_mtime_ns):
            try:
                outcome = read_result(path)
                fault = fault_of(outcome.get("result"), job.seed)
                if fault or not all(isinstance(line, str) for line in outcome.get("warnings", [])):
                    raise UserError(f"{path}: {fault or 'its warnings are not text'}")
                outcomes[n] = outcome
            except (UserError, TypeError) as error:
                print_message(f"warning: {one_line(error, 400)}; the run is repeated ({job})")
    return outcomes


def cache_file(cache: Path, job: Job, result: Json) -> Path:
    dataset = re.sub(r"\W", "_", result.get("dataset") or "any")[:40]
    return cache / f"{job.key}.on-{dataset}.json"


@contextlib.contextmanager
def open_executor(n_parallel: int, address: str | None) -> Iterator[Executor]:
    """Threads that each wait for a process; or a running Dask cluster, whose workers see the same folders as we do."""
    if address is None:
        executor = ThreadPoolExecutor(n_parallel)
        yield executor
        executor.shutdown(wait=False)
        return
    try:
        import distributed
        from cloudpickle import register_pickle_by_value
    except ImportError:
        raise UserError("--dask needs Dask: pip install -r requirements-dask.txt") from None
    register_pickle_by_value(support)  # so that no worker needs to import this project
    if __name__ != "__main__":
        register_pickle_by_value(sys.modules[__name__])
    try:
        client = distributed.Client(address, timeout=DASK_TIMEOUT, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise UserError(f"there is no Dask scheduler at {address}") from error
    with client:
        yield client.get_executor(pure=False)  # it starts a lost worker's runs again on another one


def run_all(jobs: list[Job], common: Comparison, args: argparse.Namespace) -> list[Json]:
    """The outcome of every job, in their order. A result is stored in the cache as soon as it is there.

    After Ctrl-C, SIGTERM or a run that cannot be compared the running processes are killed, and the exception goes on
    to the caller.
    """
    from tqdm import tqdm

    outcomes: dict[int, Json] = {}
    for n, outcome in (read_cache(jobs, args.cache) if args.resume else {}).items():
        outcomes[n] = outcome
        for line in common.add(jobs[n], outcome):
            print_message(line)
    missing = [n for n in range(len(jobs)) if n not in outcomes]
    # The first seed of every setting runs first: it shows early what cannot be compared.
    missing.sort(key=lambda n: n % len(args.seeds))
    stopped = threading.Event()
    is_wanted = scheduler_waits if args.dask else lambda: not stopped.is_set()
    futures: dict[Future[Json], int] = {}
    bar = tqdm(total=len(jobs), initial=len(outcomes), unit="run", leave=False, disable=not shows_progress())
    with bar, open_executor(args.jobs, args.dask if missing else None) as executor:
        try:
            for n in missing:
                futures[executor.submit(run_job, jobs[n], is_wanted)] = n
            for future in as_completed(futures):
                n, job = futures[future], jobs[futures[future]]
                try:
                    outcomes[n] = future.result()
                except Exception as error:  # what a cluster may raise: killed workers, a lost scheduler, ...
                    outcomes[n] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
                if "result" in outcomes[n]:
                    save_result(cache_file(args.cache, job, outcomes[n]["result"]), outcomes[n])
                    lines = common.add(job, outcomes[n])
                else:
                    lines = [f"{job}: {outcomes[n]['error']}"]
                bar.clear()
                for line in lines:
                    print_message(line)
                bar.update()
        except BaseException as error:
            stopped.set()
            for future in futures:
                future.cancel()
            executor.shutdown(wait=not args.dask)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                kept = sum("result" in outcome for outcome in outcomes.values())
                print_message(f"{kept} of {len(jobs)} runs are finished and kept; --resume goes on from them")
            raise
    return [outcomes[n] for n in range(len(jobs))]


# ----------------------------------------------------------------------------------------------------------------------
# The result
# ----------------------------------------------------------------------------------------------------------------------


def merge(dicts: list[Json]) -> Json:
    """One dictionary of many: a list of the distinct values where they differ."""
    merged = {}
    for key in dicts[0]:
        distinct = list({json.dumps(d.get(key)): d.get(key) for d in dicts}.values())
        merged[key] = distinct[0] if len(distinct) == 1 else distinct
    return merged


def main_metric(asked: str | None, results: list[Json], pairs: list[tuple[str, str]]) -> tuple[str, float | None]:
    """The metric asked for, else the experiment's headline, else the first accuracy, else the first; and its value by
    guessing, which is known of the headline alone."""
    headline, chance = results[0].get("headline"), results[0].get("chance")
    known = [key for _, key in pairs]
    metric = next(k for k in (asked, headline, *(k for k in known if k.endswith("accuracy")), *known) if k in known)
    return metric, chance if metric == headline else None


def make_document(
    args: argparse.Namespace, settings: list[Setting], jobs: list[Job], outcomes: list[Json], common: Comparison
) -> Json:
    """The result file. It depends on the runs' numbers alone: not on the time, nor on how many ran at once."""
    results = [outcome["result"] for outcome in outcomes if "result" in outcome]
    if not results:
        raise UserError(f"none of the {len(jobs)} runs gave a result: {outcomes[0]['error']}")
    pairs = [(m, k) for m, model in results[0]["models"].items() for k in model if (m, k) in (common.pairs or ())]
    names = list(dict.fromkeys(name for name, key in pairs if args.metric in (None, key)))
    reference = next((name for name in names if name.startswith("caps")), names[0])
    headline, chance = main_metric(args.metric, results, [pair for pair in pairs if pair[0] == reference] or pairs)
    document: Json = {
        "command": args.command,
        "experiment": args.script.stem,
        "dataset": merge([{"dataset": result.get("dataset")} for result in results])["dataset"],
        "headline": headline,
        "chance": chance,
        "reference": reference,
        "seeds": args.seeds,
        "axes": axes_of(args),
        "code": args.code,
        "environment": merge([result.get("environment", {}) for result in results]),
        "settings": {},
    }
    for setting in settings:
        own = [(job, out) for job, out in zip(jobs, outcomes, strict=True) if job.setting == setting]
        runs: list[Json] = []
        for job, out in own:
            if "result" in out:
                models = {
                    name: {k: v for k, v in model.items() if k not in common.ignored}
                    for name, model in out["result"]["models"].items()
                }
                history = {"history": out["result"].get("history", {})} if args.keep_history else {}
                runs.append({"seed": job.seed, "models": models, **history})
        if not runs:
            print_message(f"setting {setting.name} has no result and is left out")
            continue
        first = next(out["result"] for _, out in own if "result" in out)
        document["settings"][setting.name] = {
            "values": setting.values,
            "args": list(setting.args),
            "config": {k: v for k, v in first.get("config", {}).items() if k not in ("seed", "data_dir")},
            **summarise(runs, reference),
            "runs": runs,
            "failures": [{"seed": job.seed, "error": out["error"]} for job, out in own if "error" in out],
        }
    if len(settings) > 1:
        best = {name: best_setting(document["settings"], name, headline) for name, k in pairs if k == headline}
        document["best"] = best
    return document


def axes_of(args: argparse.Namespace) -> list[list[str]]:
    """The names of the swept flags; those that advance together are on one axis."""
    return [list(args.zip)] * bool(args.zip) + [[name] for name in args.grid]


# ----------------------------------------------------------------------------------------------------------------------
# Figures
# ----------------------------------------------------------------------------------------------------------------------
def plain(name: str) -> str:
    return name.replace("_", " ")


def model_style(experiment: str, name: str, n: int) -> Json:
    """Colour and marker of a model, as in all figures; where they name no such model, the ``n``-th of the lists."""
    from support.figures import MODEL_STYLES

    if style := MODEL_STYLES.get(experiment, {}).get(name):
        return {"color": style.colour, "marker": style.marker}
    return {"color": OKABE_ITO[n % len(OKABE_ITO)], "marker": MARKERS[n % len(MARKERS)]}


def draw_points(axes: Any, at: float, values: list[float], sample: Json, style: Json) -> Any:
    """Every seed a faint point at ``at``; next to them mean and interval, in the colour of the model."""
    half = 0 if sample["low"] is None else sample["high"] - sample["mean"]
    axes.scatter([at] * len(values), values, s=16, alpha=0.4, linewidths=0, **style)
    return axes.errorbar([at + 0.07], [sample["mean"]], yerr=half, capsize=3, ms=6, ls="", **style)


def draw_pairs(figure: Any, entry: Json, models: list[str], document: Json) -> None:
    """Left: each model's seeds, a line for each seed. Right, if there is one to compare with: the differences of the
    same seed."""
    metric, chance, reference = document["headline"], document["chance"], document["reference"]
    baselines = [name for name in models if metric in entry["paired"].get(name, {})]
    left, *rest = figure.subplots(1, 2, width_ratios=(3, 2)) if baselines else [figure.subplots()]
    table = np.array([[run["models"][name][metric] for name in models] for run in entry["runs"]])  # (seeds, models)
    left.plot(table.T, color="0.75", linewidth=0.7, zorder=0)
    styles = [model_style(document["experiment"], name, n) for n, name in enumerate(models)]
    for n, name in enumerate(models):
        draw_points(left, n, table[:, n].tolist(), entry["models"][name][metric], styles[n])
    left.set(xticks=range(len(models)), xticklabels=map(plain, models), ylabel=plain(metric))
    left.set_xlim(-0.5, len(models) - 0.5)
    left.set_title(f"each {'line' if baselines else 'faint point'} is a seed; mean and 95 % interval", fontsize=10)
    if chance is not None:
        left.axhline(chance, color="0.4", linestyle="--", linewidth=1)
        left.text(len(models) - 0.5, chance, "chance", ha="right", va="bottom", color="0.3")
    for right in rest:
        labels = []
        for k, name in enumerate(baselines):
            sample, n = entry["paired"][name][metric], models.index(name)
            draw_points(right, k, (table[:, models.index(reference)] - table[:, n]).tolist(), sample, styles[n])
            labels.append(f"{plain(name)}\np {'' if sample['p'] < 1e-4 else '= '}{show_p(sample['p'])}")
        right.axhline(0, color="0.3", linewidth=0.8)
        right.set(
            xticks=range(len(baselines)), xticklabels=labels, ylabel=f"{plain(metric)}: {plain(reference)} minus …"
        )
        right.set_xlim(-0.5, len(baselines) - 0.5)
        right.set_title("difference of the same seed", fontsize=10)


def draw_sweep(figure: Any, document: Json, models: list[str]) -> None:
    """A column for each setting, the models side by side in it; joined to curves along one ordered axis."""
    metric, entries = document["headline"], list(document["settings"].values())
    is_curve = len(document["axes"]) == 1 and all(is_ordered(next(iter(e["values"].values()))) for e in entries)
    axes = figure.subplots()
    for n, name in enumerate(models):
        at = np.arange(len(entries)) + 0.22 * (n - (len(models) - 1) / 2)
        samples = [entry["models"][name][metric] for entry in entries]
        style = model_style(document["experiment"], name, n)
        for x, entry, sample in zip(at, entries, samples, strict=True):
            values = [run["models"][name][metric] for run in entry["runs"]]
            bar = draw_points(axes, x, values, sample, style)
        bar.set_label(plain(name))
        if is_curve:
            axes.plot(at + 0.07, [s["mean"] for s in samples], color=style["color"], linewidth=1.2)
    axes.set_xticks(range(len(entries)), ["\n".join(entry["values"].values()) for entry in entries])
    axes.set_xlim(-0.5, len(entries) - 0.5)
    axes.set(xlabel=" / ".join(name for group in document["axes"] for name in group), ylabel=plain(metric))
    if document["chance"] is not None:
        axes.axhline(document["chance"], color="0.4", linestyle="--", linewidth=1, label="chance")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)


def figure_title(document: Json) -> str:
    """Experiment, data, seeds, and the length of training where no setting has another."""
    entries = list(document["settings"].values())
    counts = sorted({len(entry["runs"]) for entry in entries})
    parts = [
        f"{plain(document['experiment'])} ({document['dataset']})",
        "–".join(map(str, counts)) + (" seed" if counts == [1] else " seeds"),
    ]
    lengths = [[entry["config"].get(key) for key in ("n_epochs", "n_train", "match_accuracy")] for entry in entries]
    epochs, examples, stops_early = lengths[0]
    if all(length == lengths[0] for length in lengths) and isinstance(epochs, int) and not stops_early:
        of = f" of {examples:,}" if examples and isinstance(examples, int) else ""
        parts.append(f"{epochs} epoch{'s' * (epochs != 1)}{of}")
    return ", ".join(parts) + (": means with 95 % intervals" if len(entries) > 1 else "")


def draw(document: Json, path: Path) -> None:
    """Write the figure of a result."""
    from matplotlib.figure import Figure

    from support.figures import figure_style

    metric, entries = document["headline"], list(document["settings"].values())
    models = [m for m in entries[0]["models"] if all(metric in entry["models"].get(m, {}) for entry in entries)]
    with figure_style(), atomic_write(path) as stream:
        figure = Figure(figsize=(9 if len(entries) == 1 else max(6.5, 1.2 * len(entries)), 4.6), layout="constrained")
        if len(entries) == 1:
            draw_pairs(figure, entries[0], models, document)
        else:
            draw_sweep(figure, document, models)
        figure.suptitle(figure_title(document), fontsize=11)
        figure.savefig(stream, format="png", metadata={"Software": None})


def is_ordered(text: str) -> bool:
    """Whether a setting's value is a number or a range of numbers."""
    try:
        return all(math.isfinite(float(part)) for part in text.split(":"))
    except ValueError:
        return False


# ----------------------------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------------------------


def seed_list(text: str) -> list[int]:
    """0:3 (as in Python, without the end), 0,1,2, or both."""
    seeds: list[int] = []
    for part in text.split(","):
        if not re.fullmatch(r"\d{1,10}(:\d{1,10})?", part):
            raise argparse.ArgumentTypeError(f"{text!r} is neither START:STOP nor a list such as 0,1,2")
        start, _, stop = part.partition(":")
        new = range(int(start), int(stop) if stop else int(start) + 1)
        if not 1 <= len(new) <= MAX_RUNS:
            raise argparse.ArgumentTypeError(f"{part} holds {'no seed' if not new else f'more than {MAX_RUNS} seeds'}")
        seeds += new
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text} names a seed twice")
    return seeds


def axis(text: str) -> tuple[str, list[str]]:
    """em-iters=1,2,3"""
    name, _, values = text.partition("=")
    name = name.removeprefix("--")
    listed = values.split(",")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name) or not all(listed):
        raise argparse.ArgumentTypeError(f"{text!r} is not FLAG=VALUE,VALUE,...")
    return name, listed


# fmt: off
def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "--seeds --grid --metric --name --out --jobs --timeout --resume --cache --dask",
        [
            ("smallnorb_novel_viewpoint --seeds 0:3", "Three seeds: about 15 seconds."),
            ("smallnorb_novel_viewpoint --seeds 0:10 --grid em-iters=1,2,3",
             "Ten seeds of each of three settings: about 2 minutes."),
            ("multimnist_capsnet --seeds 0:3 --jobs 2 -- --n-epochs 2",
             "Three short runs, two at a time: about 3 minutes."),
        ],
        usage="%(prog)s EXPERIMENT --seeds 0:3 [flags] [-- FLAGS OF THE EXPERIMENT]",
        description="Run an experiment with many seeds and settings and compare its models.",
        epilog="The result goes to results/EXPERIMENT/NAME.json, its figure to viz/EXPERIMENT/seeds_NAME.png.",
    )
    count, axes = whole_number(1, 1024), {"type": axis, "nargs": "+", "metavar": "FLAG=A,B", "default": []}
    add: Callable[..., Any] = parser.add_argument_group("what runs").add_argument
    add("experiment", metavar="EXPERIMENT",
        help="Name of the experiment, such as smallnorb_novel_viewpoint, or a script's path.")
    add("--seeds", type=seed_list, metavar="LIST",
        help="Run the seeds START:STOP, STOP left out, or a list such as 0,1,2. Default: 0:3.")
    add("--grid", **axes, help="Run every combination of these flags' values.")
    add("--zip", **axes, help="Run their first values, then their second, and so on.")
    add("--metric", metavar="NAME", help="Show this metric in tables and figure. Default: the experiment's headline.")
    add = parser.add_argument_group("output").add_argument
    add("--name", metavar="NAME", help="Name of the files. Default: the seeds, or the swept flags.")
    add("--out", type=Path, metavar="FILE", help="File of the result. Default: results/EXPERIMENT/NAME.json.")
    add("--figure", type=Path, metavar="FILE", help="File of the figure. Default: viz/EXPERIMENT/seeds_NAME.png.")
    add("--keep-history", action="store_true", help="Store the values of every epoch too.")
    add("--keep-seconds", action="store_true", help="Store training times too, which differ from call to call.")
    add = parser.add_argument_group("how it runs").add_argument
    add("--jobs", type=count, metavar="N", default=os.cpu_count() or 1,
        help="Do N runs at a time. Default: one for each core.")
    add("--threads", type=count, metavar="N", default=1, help="Give each run N threads. Default: %(default)s.")
    add("--timeout", type=number(0, MAX_SECONDS, above=True), metavar="S",
        help="Stop a run that takes more than S seconds. Default: never.")
    add("--resume", action="store_true", help="Do not repeat what has run with the same flags, data and code.")
    add("--cache", type=Path, metavar="DIR", default=Path(".cache/compare_seeds"),
        help="Keep finished runs in this folder. Default: %(default)s.")
    add("--checkpoints", action="store_true",
        help="Save every run in the cache after each of its epochs too; --resume goes on from there.")
    add("--dask", metavar="ADDRESS", help="Run on that Dask cluster, such as tcp://HOST:8786. --jobs does not apply.")
    return parser
# fmt: on


def recorded_command(argv: list[str]) -> str:
    """The command that gives this result again, without the flags that only say where and how to run."""
    own = argv[: argv.index("--")] if "--" in argv else argv
    rest = argv[len(own) :]
    transient = {"--jobs", "--timeout", "--cache", "--dask"}
    words, skip = [], False
    for word in own:
        flag, has_value, _ = word.partition("=")
        if not (skip or flag in transient or word in ("--resume", "--checkpoints")):
            words.append(word)
        skip = flag in transient and not has_value
    return shlex.join(["python", "compare_seeds.py", *words, *rest])


def parse_command(argv: list[str]) -> tuple[argparse.Namespace, list[Setting]]:
    """The flags, checked against each other and completed, and the settings of the sweep."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser, rest = make_parser(), argv[split + 1 :]
    args = parser.parse_args(argv[:split])
    file = args.experiment.removesuffix(".py") + ".py"
    args.script = (Path(__file__).parent / file if file == Path(file).name else Path(file)).resolve()
    if not os.path.isfile(args.script):
        parser.error(f"argument EXPERIMENT: there is no script {args.script.name} in {args.script.parent}")
    if args.name is not None and not re.fullmatch(r"[\w.-]+", args.name):
        parser.error(f"argument --name: {args.name!r} is not made of letters, digits and ._-")
    names = [name for name, _ in (*args.zip, *args.grid)]
    if len(set(names)) < len(names):
        parser.error("arguments --grid and --zip: a flag is named twice")
    given = {word.partition("=")[0].removeprefix("--") for word in rest if word.startswith("--")}
    if own := sorted((given | set(names)) & set(OWN_FLAGS)):
        parser.error(f"--{own[0]} is not for the experiment here: --seeds, --threads and the cache stand for it")
    if twice := sorted(given & set(names)):
        parser.error(f"--{twice[0]} is both swept and given after --")
    if args.dask is not None and not re.fullmatch(r"(\w+://)?[^/\s]+:\d+", args.dask):
        parser.error(f"argument --dask: {args.dask!r} is no address such as tcp://HOST:8786")
    args.zip, args.grid, args.seeds = dict(args.zip), dict(args.grid), args.seeds or [0, 1, 2]
    if len({len(values) for values in args.zip.values()}) > 1:
        parser.error("argument --zip: the flags have different numbers of values")
    n_runs = math.prod([len(v) for v in args.grid.values()] + [len(v) for v in args.zip.values()][:1]) * len(args.seeds)
    if n_runs > MAX_RUNS:
        parser.error(f"that is {n_runs:,} runs, above the limit of {MAX_RUNS:,}")
    args.name = args.name or "_".join(names) or "-".join(map(str, sorted({min(args.seeds), max(args.seeds)})))
    args.out = args.out or Path("results", args.script.stem, f"{args.name}.json")
    args.figure = args.figure or Path("viz", args.script.stem, f"seeds_{args.name}.png")
    words = [word.rpartition("=")[2] if word.startswith("--") else word for word in rest]
    words += itertools.chain(*args.grid.values(), *args.zip.values())
    named = [Path(word) for word in words]
    inputs = [
        ("the script", args.script),
        *(("which the experiment reads", path) for path in (*named, *data_files(*named, pictures="images" in words))),
    ]
    if fault := overwriting({"--out": args.out, "--figure": args.figure}, inputs):
        parser.error(fault)
    settings = make_settings(args.zip, args.grid, rest)
    if len({setting.name for setting in settings}) < len(settings):
        parser.error("arguments --grid and --zip: a setting occurs twice")
    return args, settings


def require_understood(script: Path, settings: list[Setting], has_checkpoints: bool) -> None:
    """Ends with status 2 and the experiment's own line where it refuses the flags of a setting, before any run. A
    script of another folder may do anything when it is imported, and refuses them in its first run."""
    if script.parent != Path(__file__).resolve().parent:
        return
    experiment = load_script(script.name)
    if not hasattr(experiment, "make_parser"):
        return
    ours = ["--seed=0", "--threads=1", "--quiet", "--out-json=out.json", *["--checkpoint=out.npz"] * has_checkpoints]
    for setting in settings:
        parser = experiment.make_parser()
        parser.prog = script.name
        parser.parse_args([*setting.args, *ours])


def compare(args: argparse.Namespace, settings: list[Setting]) -> None:
    args.code = code_fingerprint(args.script)
    require_understood(args.script, settings, args.checkpoints)
    for path in (args.out, args.figure, args.cache / "a run"):
        require_writable(path)
    checkpoints = args.cache.resolve() if args.checkpoints else None
    how = (args.threads, args.timeout, args.code, Path.cwd(), checkpoints, args.resume)
    jobs = [Job(args.script, setting, seed, *how) for setting in settings for seed in args.seeds]
    common = Comparison(args.metric, () if args.keep_seconds else SECONDS)
    outcomes = run_all(jobs, common, args)
    document = make_document(args, settings, jobs, outcomes, common)
    save_result(args.out, document)
    draw(document, args.figure)
    lines = [f"## {document['experiment']} ({document['dataset']}), {document['headline']}\n"]
    if len(settings) > 1:
        lines.append("Means ± half of the 95 % interval:\n\n" + make_table(document, "grid", {}))
        lines += [f"\nBest for {model}: {name}" for model, name in document["best"].items()]
    else:
        (entry,) = document["settings"].values()
        every = ",".join(dict.fromkeys(k for m in entry["models"].values() for k in m if k != "n_params"))
        lines.append(make_table(document, "seeds", {}) + "\n\nMeans ± half of the 95 % interval:\n")
        lines.append(make_table(document, "summary", {"metrics": every}))
        if entry["paired"]:
            lines.append("\nPaired by seed:\n\n" + make_table(document, "paired", {"metrics": every}))
    print_result("\n".join([*lines, f"\n{args.out} and {args.figure} are written"]))
    if args.out.stat().st_size > MAX_BYTES:
        print_message(f"warning: {args.out} is too large for report.py --check ({MAX_BYTES:,} bytes)")
    if n_failed := sum("error" in outcome for outcome in outcomes):
        raise UserError(f"{n_failed} of {len(jobs)} runs failed; the others are kept")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        Path.cwd()
    except OSError:
        print_message("error: the working folder does not exist any more")
        return 1
    args, settings = parse_command(argv)
    args.command = recorded_command(argv)
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the runs end too
    try:
        return exit_status(lambda: compare(args, settings))
    finally:
        signal.signal(signal.SIGTERM, previous)


if __name__ == "__main__":
    sys.exit(main())
