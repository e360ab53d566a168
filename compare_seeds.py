#!/usr/bin/env python3
"""Many seeds of one experiment side by side: tables, intervals, verdicts, a figure; and a README that stays true.

    python compare_seeds.py smallnorb_novel_viewpoint --seeds 0:3 -- --n-epochs 10
    python compare_seeds.py smallnorb_novel_viewpoint --seeds 0:10 --grid em-iters=1,2,3 loss=cross-entropy,spread
    python compare_seeds.py --report        # rewrite the tables and numbers of README.md from results/*.json
    python compare_seeds.py --check         # exit status 1 where README.md and results/*.json differ

A run is a process, ``python EXPERIMENT.py FLAGS --seed S --out-json FILE``, so every experiment that has these flags
and writes ``{"models": {name: {"n_params": int, metric: float, ...}}}`` can be compared. Every float of a model is a
metric. The capsule network is compared with each other model, paired by seed: the difference of the same seed's two
models, its mean with a 95 % interval (Student's t), and the p value of a sign-flip permutation test.
"""

from __future__ import annotations

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
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from smallnorb_novel_viewpoint import (
    Parser,
    UserError,
    atomic_write,
    exit_status,
    require_writable,
    save_result,
    whole_number,
)

Json = dict[str, Any]

# experiment: its main metric and that metric's value by chance; another experiment's is its first accuracy
EXPERIMENTS = {
    "smallnorb_novel_viewpoint": ("held_out_accuracy", 1 / 5),
    "multimnist_capsnet": ("set_accuracy", 1 / 45),
    "mnist_affine_capsnet": ("rotated_35_accuracy", 1 / 10),
    "conv_matrix_capsules": ("accuracy", 1 / 10),
}
OWN_FLAGS = ("seed", "out-json", "threads", "quiet", "checkpoint", "resume")  # of an experiment, set here or not at all
EXACT_UP_TO = 20  # seeds; all 2^n sign flips are tried, above it this many random ones:
N_FLIPS = 99_999
MAX_RUNS = 10_000
DASK_TIMEOUT = 10  # seconds until a scheduler must have answered
NEWLINE = "\n"
MAX_BYTES = 200_000  # of a committed result
OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")  # told apart by colour-blind eyes too
MARKERS = "os^Dvp"


# ----------------------------------------------------------------------------------------------------------------------
# One run
# ----------------------------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    script: Path
    args: tuple[str, ...]  # of the experiment, without those that are the same in every comparison
    seed: int
    threads: int
    timeout: float | None
    version: str
    cwd: Path
    setting: str  # its name, for messages

    @property
    def key(self) -> str:
        """What the numbers of the run depend on, as a file name."""
        text = json.dumps([self.script.stem, self.args, self.seed, self.threads, self.version])
        return f"{self.script.stem}-seed{self.seed}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def code_version(script: Path) -> str:
    """Hash of a script, of the modules beside it that it imports, and of numpy's version."""
    todo, seen = [script], {script}
    digest = hashlib.sha256(importlib.metadata.version("numpy").encode())
    while todo:
        source = todo.pop().read_bytes()
        digest.update(source)
        names = re.findall(rb"^\s*(?:from|import)\s+(\w+)", source, re.MULTILINE)
        local = {script.with_name(f"{name.decode()}.py") for name in names}
        new = sorted(path for path in local - seen if path.is_file())
        todo += new
        seen.update(new)
    return digest.hexdigest()[:16]


def run_job(job: Job, children: set[subprocess.Popen[str]] | None = None) -> Json:
    """The experiment's JSON as ``{"result": ...}``, or ``{"error": one line}``. Raises nothing a run can cause.

    While it lives, the process is in ``children``, for the caller to kill.
    """
    try:
        if code_version(job.script) != job.version:
            return {"error": f"{job.script} is not the version that was asked for"}
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "out.json")
            command = [sys.executable, str(job.script), *job.args, f"--seed={job.seed}", f"--threads={job.threads}"]
            blas = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(job.threads))
            with subprocess.Popen(
                [*command, "--quiet", f"--out-json={out}"], cwd=job.cwd, env={**os.environ, **blas}, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, errors="replace",
            ) as process:  # fmt: skip
                if children is not None:
                    children.add(process)
                timed_out = False
                try:
                    _, stderr = process.communicate(timeout=job.timeout)
                except subprocess.TimeoutExpired:
                    timed_out = True
                    process.kill()
                    _, stderr = process.communicate()
                finally:
                    if children is not None:
                        children.discard(process)
            last_line = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "no message")
            if timed_out:
                return {"error": f"not finished after {job.timeout:g} s: {last_line}"}
            if process.returncode < 0:
                return {"error": f"killed by {signal.Signals(-process.returncode).name}: {last_line}"}
            if process.returncode:
                return {"error": f"exit status {process.returncode}: {last_line}"}
            result = json.loads(out.read_text())
            if not result["models"]:
                return {"error": "its result holds no model"}
            for name, model in result["models"].items():
                for key, value in model.items():
                    if isinstance(value, float) and not math.isfinite(value):
                        return {"error": f"{name}'s {key} is {value}"}
            return {"result": result}
    except OSError as error:
        return {"error": f"no result: {error}"}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {"error": "its result is not the JSON of an experiment"}


# ----------------------------------------------------------------------------------------------------------------------
# All runs
# ----------------------------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """One point of a sweep."""

    name: str  # "em-iters=1 loss=spread", or "default" without a sweep
    values: dict[str, str]
    args: tuple[str, ...]


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
    if __name__ != "__main__":
        register_pickle_by_value(sys.modules[__name__])  # so that no worker needs to import this file
    try:
        client = distributed.Client(address, timeout=DASK_TIMEOUT, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise UserError(f"there is no Dask scheduler at {address}") from error
    with client:
        yield client.get_executor(pure=False)  # it starts a lost worker's runs again on another one


def run_all(jobs: list[Job], n_parallel: int, cache: Path, resume: bool, dask: str | None) -> list[Json]:
    """The outcome of every job, in their order. A result is stored in ``cache`` as soon as it is there.

    After Ctrl-C the running processes are killed, and KeyboardInterrupt goes on to the caller.
    """
    from tqdm import tqdm

    outcomes: dict[int, Json] = {}
    for n, job in enumerate(jobs if resume else []):
        with contextlib.suppress(OSError, ValueError):
            outcomes[n] = {"result": json.loads((cache / job.key).read_text())}
    missing = [n for n in range(len(jobs)) if n not in outcomes]
    children: set[subprocess.Popen[str]] = set()
    futures: dict[Future[Json], int] = {}
    bar = tqdm(total=len(jobs), initial=len(outcomes), unit="run", leave=False, disable=not sys.stderr.isatty())
    with bar, open_executor(n_parallel, dask if missing else None) as executor:
        try:
            for n in missing:
                futures[executor.submit(run_job, jobs[n], *([] if dask else [children]))] = n
            for future in as_completed(futures):
                n, job = futures[future], jobs[futures[future]]
                try:
                    outcomes[n] = future.result()
                except Exception as error:  # what a cluster may raise: killed workers, a lost scheduler, ...
                    outcomes[n] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
                if "result" in outcomes[n]:
                    save_result(cache / job.key, outcomes[n]["result"])
                else:
                    bar.write(f"seed {job.seed}, setting {job.setting}: {outcomes[n]['error']}", file=sys.stderr)
                bar.update()
        except BaseException as error:
            for future in futures:
                future.cancel()
            while not dask and not all(future.done() for future in futures):
                for child in list(children):
                    child.kill()
                time.sleep(0.02)
            if isinstance(error, KeyboardInterrupt):
                kept = sum("result" in outcome for outcome in outcomes.values())
                bar.write(f"{kept} of {len(jobs)} runs are finished and kept; --resume goes on from them", sys.stderr)
            raise
    return [outcomes[n] for n in range(len(jobs))]


# ----------------------------------------------------------------------------------------------------------------------
# Statistics
# ----------------------------------------------------------------------------------------------------------------------


def describe_sample(values: list[float]) -> Json:
    """Size, mean, standard deviation, and the 95 % interval of the mean by Student's t; None where n is 1."""
    from scipy import stats

    n, mean = len(values), float(np.mean(values))
    if n == 1:
        return {"n": n, "mean": mean, "sd": None, "low": None, "high": None}
    sd = float(np.std(values, ddof=1))
    low, high = stats.t.interval(0.95, n - 1, loc=mean, scale=sd / math.sqrt(n)) if sd else (mean, mean)
    return {"n": n, "mean": mean, "sd": sd, "low": float(low), "high": float(high)}


def sign_flip_p(differences: np.ndarray) -> np.ndarray:
    """Paired differences (rows, n) -> two-sided p (rows,): does a seed's sign, drawn at random, give such a mean?"""
    from scipy import stats

    n = differences.shape[1]
    if n == 1:
        return np.ones(len(differences))
    test = stats.permutation_test(
        (differences,), lambda x, axis: np.mean(x, axis), permutation_type="samples", axis=1, batch=4096,
        n_resamples=2**n if n <= EXACT_UP_TO else N_FLIPS, rng=np.random.default_rng(0),
    )  # fmt: skip
    return np.asarray(test.pvalue)


def capsule_model(models: Iterable[str]) -> str:
    """The model that the others are compared with."""
    names = list(models)
    return next((name for name in names if name.startswith("caps")), names[0])


def summarise(runs: list[Json]) -> Json:
    """``{"models": {name: {metric: sample}}, "paired": {baseline: {metric: sample of capsules minus baseline}}}``.

    A model or metric that not every run has is left out.
    """
    models: Json = {}
    for name, first in runs[0]["models"].items():
        if all(name in run["models"] for run in runs):
            metrics = [k for k, v in first.items() if isinstance(v, float)]
            values = {k: [run["models"][name].get(k) for run in runs] for k in metrics}
            fixed = {"n_params": first["n_params"]} if "n_params" in first else {}
            models[name] = {**fixed, **{k: describe_sample(v) for k, v in values.items() if None not in v}}
    capsules = capsule_model(models)
    pairs = [
        (name, metric)
        for name in models
        for metric in models[name]
        if name != capsules and metric != "n_params" and metric in models[capsules]
    ]
    paired: Json = {name: {} for name, _ in pairs}
    if not pairs:
        return {"models": models, "paired": paired}
    differences = np.array([[r["models"][capsules][k] - r["models"][m][k] for r in runs] for m, k in pairs])
    for (name, metric), row, p in zip(pairs, differences, sign_flip_p(differences), strict=True):
        entry = describe_sample(row.tolist()) | {"higher": int(np.sum(row > 0)), "p": float(p)}
        errors = 1 - models[name][metric]["mean"]
        if metric.endswith("accuracy"):
            entry["error_reduction"] = 1 - (1 - models[capsules][metric]["mean"]) / errors if errors else None
        paired[name][metric] = entry
    return {"models": models, "paired": paired}


def merge(dicts: list[Json]) -> Json:
    """One dictionary of many: a list of the distinct values where they differ."""
    merged = {}
    for key in dicts[0]:
        distinct = list({json.dumps(d.get(key)): d.get(key) for d in dicts}.values())
        merged[key] = distinct[0] if len(distinct) == 1 else distinct
    return merged


def make_document(args: argparse.Namespace, settings: list[Setting], jobs: list[Job], outcomes: list[Json]) -> Json:
    """The result file. It depends on the runs' numbers alone: not on the time, nor on how many ran at once."""
    results = [outcome["result"] for outcome in outcomes if "result" in outcome]
    if not results:
        raise UserError(f"none of the {len(jobs)} runs gave a result: {outcomes[0]['error']}")
    drop = set() if args.keep_seconds else {"train_seconds", "epoch_seconds"}
    document: Json = {
        "command": args.command,
        "experiment": args.script.stem,
        "dataset": merge([{"dataset": result.get("dataset")} for result in results])["dataset"],
        "metric": "",
        "seeds": args.seeds,
        "axes": [list(args.zip)] * bool(args.zip) + [[name] for name in args.grid],
        "code_version": args.version,
        "environment": merge([result.get("environment", {}) for result in results]),
        "settings": {},
    }
    for setting in settings:
        own = [(job, out) for job, out in zip(jobs, outcomes, strict=True) if job.setting == setting.name]
        runs: list[Json] = []
        for job, out in own:
            if "result" in out:
                models = {
                    name: {k: v for k, v in m.items() if k not in drop} for name, m in out["result"]["models"].items()
                }
                history = {"history": out["result"].get("history", {})} if args.keep_history else {}
                runs.append({"seed": job.seed, "models": models, **history})
        if not runs:
            print(f"setting {setting.name} has no result and is left out", file=sys.stderr)
            continue
        first = next(out["result"] for _, out in own if "result" in out)
        document["settings"][setting.name] = {
            "values": setting.values,
            "args": list(setting.args),
            "config": {k: v for k, v in first.get("config", {}).items() if k not in ("seed", "data_dir")},
            **summarise(runs),
            "runs": runs,
            "failures": [{"seed": job.seed, "error": out["error"]} for job, out in own if "error" in out],
        }
    document["metric"] = main_metric(document, args.metric)
    return document


def main_metric(document: Json, asked: str | None) -> str:
    """The metric asked for; else the experiment's own; else the first accuracy; else the first metric."""
    models = next(iter(document["settings"].values()))["models"]
    known = [k for k in models[capsule_model(models)] if k != "n_params"]
    if asked and asked not in known:
        raise UserError(f"--metric {asked} is not in the results, which have {', '.join(known)}")
    own = asked or EXPERIMENTS.get(document["experiment"], ("", 0))[0]
    for candidate in (own, *(k for k in known if k.endswith("accuracy")), *known):
        if candidate in known:
            return candidate
    raise UserError("the results hold no metric, which is a number with a decimal point")


# ----------------------------------------------------------------------------------------------------------------------
# Markdown
# ----------------------------------------------------------------------------------------------------------------------


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """A table whose columns line up in a terminal too; the first is left-aligned."""
    widths = [max(3, *map(len, column)) for column in zip(columns, *rows, strict=True)]

    def line(cells: list[str]) -> str:
        padded = [c.rjust(w) for c, w in zip(cells, widths, strict=True)]
        return f"| {' | '.join([cells[0].ljust(widths[0]), *padded[1:]])} |"

    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    return "\n".join([line(columns), line(rule), *map(line, rows)])


def show(value: Any, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def show_mean(sample: Json | None, digits: int, sign: str = "") -> str:
    """Mean, and half of its 95 % interval."""
    if not sample:
        return ""
    half = "" if sample["low"] is None else f" ± {sample['high'] - sample['mean']:.{digits}f}"
    return f"{sample['mean']:{sign}.{digits}f}{half}"


def show_interval(sample: Json, digits: int, sign: str = "") -> str:
    known = sample.get("low") is not None
    return f"{sample['low']:{sign}.{digits}f} to {sample['high']:{sign}.{digits}f}" if known else ""


def show_p(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.1 else f"{p:.2f}"


def pick_setting(document: Json, name: str | None) -> Json:
    settings = document.get("settings")
    if not settings:
        raise UserError("the file is not a comparison of seeds")
    if name is None and len(settings) > 1:
        raise UserError(f"the file holds {len(settings)} settings: add setting=NAME, such as {min(settings)!r}")
    if name is not None and name not in settings:
        raise UserError(f"the file has no setting {name!r}")
    chosen: Json = settings[name or next(iter(settings))]
    return chosen


class View(NamedTuple):
    """What of a result a table shows."""

    models: list[str]
    metrics: list[str]
    digits: int

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return list(itertools.product(self.metrics, self.models))

    def heads(self, prefix: str = "", models: list[str] | None = None) -> list[str]:
        """A column for each metric of each model."""
        names = self.models if models is None else models
        short = len(self.metrics) == 1
        return [f"{prefix}{m}" if short else f"{prefix}{m}: {k}" for k, m in itertools.product(self.metrics, names)]


def seeds_table(entry: Json, view: View) -> str:
    samples = [entry["models"][m].get(k, {}) for k, m in view.pairs]
    rows = [
        [str(run["seed"]), *(show(run["models"][m].get(k), view.digits) for k, m in view.pairs)]
        for run in entry["runs"]
    ]
    rows.append(["mean", *(show(s.get("mean"), view.digits) for s in samples)])
    if len(rows) > 2:
        rows.append(["sd", *(show(s.get("sd"), view.digits) for s in samples)])
        rows.append(["95 %", *(show_interval(s, view.digits) for s in samples)])
    return markdown(["seed", *view.heads()], rows)


def summary_table(entry: Json, view: View) -> str:
    models = {name: entry["models"][name] for name in view.models}
    rows = [
        [name, f"{m.get('n_params', 0):,}", *(show_mean(m.get(k), view.digits) for k in view.metrics)]
        for name, m in models.items()
    ]
    return markdown(["model", "parameters", *view.metrics], rows)


def paired_table(entry: Json, view: View) -> str:
    rows = []
    for metric, name in view.pairs:
        if s := entry["paired"].get(name, {}).get(metric):
            mean, interval = f"{s['mean']:+.{view.digits}f}", show_interval(s, view.digits, "+")
            less = f"{100 * s['error_reduction']:.0f} %" if s.get("error_reduction") is not None else ""
            shown = interval and not s["low"] <= 0 <= s["high"]
            verdict = "not shown" if not shown else "higher" if s["mean"] > 0 else "lower"
            rows.append([name, metric, mean, interval, f"{s['higher']} of {s['n']}", show_p(s["p"]), less, verdict])
    capsules = capsule_model(entry["models"])
    columns = ["metric", "difference", "95 % interval", "higher on", "p", "fewer errors", "verdict"]
    return markdown([f"{capsules} minus", *columns], rows)


def grid_table(document: Json, view: View) -> str:
    axes = [name for group in document["axes"] for name in group]
    entries = list(document["settings"].values())
    capsules = capsule_model(entries[0]["models"])
    baselines = [m for m in view.models if any(m in entry["paired"] for entry in entries)]
    rows = []
    for entry in entries:
        row = [*(entry["values"][name] for name in axes), str(len(entry["runs"]))]
        row += [show_mean(entry["models"].get(m, {}).get(k), view.digits) for k, m in view.pairs]
        for metric, name in itertools.product(view.metrics, baselines):
            row.append(show_mean(entry["paired"].get(name, {}).get(metric), view.digits, "+"))
        rows.append(row)
    return markdown([*axes, "seeds", *view.heads(), *view.heads(f"{capsules} − ", baselines)], rows)


def plain_table(table: Json, columns: list[str], digits: int) -> str:
    where = [table["columns"].index(name) for name in columns]
    return markdown(columns, [[show(row[k], digits) for k in where] for row in table["rows"]])


TABLES = {"seeds": seeds_table, "summary": summary_table, "paired": paired_table, "grid": grid_table}


def make_table(document: Json, kind: str, options: dict[str, str], name: str | None = None) -> str:
    """A Markdown table of one kind; see HELP_MARKERS. Raises UserError where kind, options and file do not fit."""
    known = {"grid": {"metrics", "models", "digits"}, "table": {"columns", "digits"}}
    if kind not in (*TABLES, "table"):
        raise UserError(f"{kind!r} is not a kind of table, which are {', '.join(TABLES)} and table")
    if extra := set(options) - known.get(kind, {"metrics", "models", "digits", "setting"}):
        raise UserError(f"a table of kind {kind} takes no {', '.join(sorted(extra))}=")
    if not re.fullmatch(r"\d", digits := options.get("digits", "3")):
        raise UserError("digits= is a number from 0 to 9")

    def chosen(option: str, default: list[str], there: Iterable[str]) -> list[str]:
        names = options[option].split(",") if option in options else default
        if missing := [n for n in names if n not in there]:
            raise UserError(f"the file has no {option.removesuffix('s')} {', '.join(missing)}")
        return names

    if kind == "table":
        table = document.get("tables", {}).get(name)
        if table is None:
            raise UserError(f"the file has no table {name!r}")
        return plain_table(table, chosen("columns", table["columns"], table["columns"]), int(digits))
    first = next(iter(document.get("settings") or [None])) if kind == "grid" else options.get("setting")
    entry = pick_setting(document, first)
    models = chosen("models", list(entry["models"]), entry["models"])
    metrics = chosen("metrics", [document["metric"]], {k for m in models for k in entry["models"][m]})
    return TABLES[kind](document if kind == "grid" else entry, View(models, metrics, int(digits)))


# ----------------------------------------------------------------------------------------------------------------------
# The README
# ----------------------------------------------------------------------------------------------------------------------

HELP_EXAMPLES = """examples:
  python compare_seeds.py smallnorb_novel_viewpoint --seeds 0:3 -- --n-epochs 10
  python compare_seeds.py smallnorb_novel_viewpoint --seeds 0:10 --grid em-iters=1,2,3 loss=cross-entropy,spread
  python compare_seeds.py smallnorb_novel_viewpoint --zip train-azimuths=0:60,0:150 test-azimuths=110:240,200:330"""
HELP_MARKERS = """markers in the README, each closed by <!-- end -->; what stands between is rewritten by --report:
  <!-- table: results/FILE.json seeds -->          a row per seed, then mean, sd and 95 % interval
  <!-- table: results/FILE.json summary metrics=familiar_accuracy,held_out_accuracy -->     a row per model
  <!-- table: results/FILE.json paired setting="em-iters=1 loss=spread" -->   capsules minus each baseline
  <!-- table: results/FILE.json grid models=capsules,cnn digits=2 -->         a row per setting of a sweep
  <!-- table: results/benchmarks.json table NAME columns=step,ms -->          a table of a benchmark file
  <!-- value: results/FILE.json capsules.held_out_accuracy.mean .3f -->0.812<!-- end -->     one number, in a sentence
Options: metrics= models= digits= setting= columns=. A path ends in mean, sd, low, high, n or n_params; it may begin
with paired.BASELINE (also: p, higher, error_reduction), config, or a benchmark's TABLE.ROW.COLUMN; use / for . where a
name has a dot (a / between blanks is part of a name). After it comes a Python format: .3f  +.3f  .0%  ,d  .2g. A
marker inside `backquotes` is left alone."""

MARKER = re.compile(r"(?<!`)<!--\s*(?:(table|value):\s*(.*?)|end)\s*-->(?!`)", re.DOTALL)


def lookup(document: Json, path: str, setting: str | None) -> Any:
    """A number or text by its path; see HELP_MARKERS."""
    roots: list[Any] = [document]
    if "settings" in document:
        entry = pick_setting(document, setting)
        roots = [entry["models"], entry, document]
    elif "tables" in document:
        for name, table in document["tables"].items():
            rows = {str(row[0]): dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
            roots.insert(0, {name: rows})
    for node in roots:
        for key in re.split(r"(?<! )/(?! )", path) if "/" in path else path.split("."):
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, int | float | str):
            return node
    raise UserError(f"the file has no value {path!r}")


def fill_marker(kind: str, text: str, folder: Path) -> str:
    """What belongs between a marker and its end. Raises UserError where the marker or its file is at fault."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"{error}") from None
    option = re.compile(r"(metrics|models|digits|setting|columns)=(.*)", re.DOTALL)
    options = {found[1]: found[2] for word in words if (found := option.fullmatch(word))}
    plain_words = [word for word in words if not option.fullmatch(word)]
    if not 2 <= len(plain_words) <= 3:
        raise UserError("a marker names a file, then a kind of table or a path")
    file, what, *rest = plain_words
    try:
        document = json.loads((folder / file).read_text())
    except OSError:
        raise UserError(f"there is no file {file}") from None
    except ValueError:
        raise UserError(f"{file} is not JSON") from None
    try:
        if kind == "table":
            if rest and what != "table":
                raise UserError(f"{rest[0]!r} is not an option: write NAME=VALUE")
            return f"\n\n{make_table(document, what, options, *rest)}\n\n"
        return format(lookup(document, what, options.get("setting")), *rest)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"the marker does not fit the file ({type(error).__name__}: {error})") from error


def render_readme(text: str, folder: Path) -> tuple[str, list[str], list[str]]:
    """The README as it should be; where it differs; and which of its markers are at fault, as ``LINE: message``."""
    parts: list[str] = []
    stale: list[str] = []
    faults: list[str] = []
    end, opened = 0, None
    for marker in MARKER.finditer(text):
        if (marker[1] is None) == (opened is None):  # an end without a beginning, or a second beginning
            what = "closes nothing" if opened is None else f"stands before the end of {opened[0]}"
            faults.append(f"{text.count(NEWLINE, 0, marker.start()) + 1}: {marker[0]} {what}")
        elif opened is not None:
            at = f"{text.count(NEWLINE, 0, opened.start()) + 1}: {opened[1]} {opened[2]}"
            parts.append(text[end : opened.end()])
            old, end = text[opened.end() : marker.start()], marker.start()
            try:
                new = fill_marker(opened[1], opened[2], folder)
                if new != old:
                    stale.append(f"{at} differs from its file")
            except UserError as error:
                faults.append(f"{at}: {error}")
                new = old
            parts.append(new)
        opened = marker if marker[1] else None
    if opened is not None:
        faults.append(f"{text.count(NEWLINE, 0, opened.start()) + 1}: {opened[0]} has no end")
    return "".join(parts) + text[end:], stale, faults


def check_results(folder: Path) -> Iterator[str]:
    """What is wrong with the committed results."""
    for path in sorted((folder / "results").glob("*.json")):
        try:
            command = json.loads(path.read_text()).get("command")
        except (ValueError, AttributeError):
            yield f"{path}: is not a JSON object"
            continue
        if not isinstance(command, str) or not command:
            yield f"{path}: names no command that made it"
        if path.stat().st_size >= MAX_BYTES:
            yield f"{path}: is {path.stat().st_size:,} bytes, above {MAX_BYTES:,}"


def report(readme: Path, check: bool) -> None:
    try:
        text = readme.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {readme}: {error.strerror}") from error
    new, stale, faults = render_readme(text, readme.parent)
    problems = [f"{readme}:{fault}" for fault in faults]
    if check:
        problems += [f"{readme}:{line}" for line in stale] + list(check_results(readme.parent))
    if problems:
        print(*problems, sep="\n", file=sys.stderr)
        hint = "; python compare_seeds.py --report rewrites the README" if stale and check else ""
        raise UserError(f"{len(problems)} problem{'s' * (len(problems) > 1)} in {readme} and its results{hint}")
    if not check and new != text:
        with atomic_write(readme) as stream:
            stream.write(new.encode())
        print(f"{readme}: {len(stale)} rewritten")


# ----------------------------------------------------------------------------------------------------------------------
# Figures
# ----------------------------------------------------------------------------------------------------------------------


def plain(name: str) -> str:
    return name.replace("_", " ")


def draw_points(axes: Any, at: float, values: list[float], sample: Json, n: int, upright: bool = True) -> Any:
    """Every seed a faint point at ``at``; beside them mean and interval, in the colour of model ``n``."""
    style = {"color": OKABE_ITO[n % len(OKABE_ITO)], "marker": MARKERS[n % len(MARKERS)]}
    half = 0 if sample["low"] is None else sample["high"] - sample["mean"]
    step = 1 if upright else -1  # swaps the two coordinates
    axes.scatter(*([at] * len(values), values)[::step], s=16, alpha=0.4, linewidths=0, **style)
    error = {"yerr" if upright else "xerr": half}
    return axes.errorbar(*([at + 0.07], [sample["mean"]])[::step], **error, capsize=3, ms=6, ls="", **style)


def draw_pairs(figure: Any, entry: Json, models: list[str], metric: str, chance: float | None) -> None:
    """Left: each model's seeds, a line for each seed. Right, if there is one to compare with: the differences of the
    same seed."""
    baselines = [name for name in models if metric in entry["paired"].get(name, {})]
    left, *rest = figure.subplots(1, 2, width_ratios=(3, 2)) if baselines else [figure.subplots()]
    table = np.array([[run["models"][name][metric] for name in models] for run in entry["runs"]])  # (seeds, models)
    left.plot(table.T, color="0.75", linewidth=0.7, zorder=0)
    for n, name in enumerate(models):
        draw_points(left, n, table[:, n].tolist(), entry["models"][name][metric], n)
    left.set(xticks=range(len(models)), xticklabels=map(plain, models), ylabel=plain(metric))
    left.set_xlim(-0.5, len(models) - 0.5)
    left.set_title(f"each {'line' if baselines else 'faint point'} is a seed; mean and 95 % interval", fontsize=10)
    if chance is not None:
        left.axhline(chance, color="0.4", linestyle="--", linewidth=1)
        left.text(len(models) - 0.5, chance, "chance", ha="right", va="bottom", color="0.3")
    capsules = capsule_model(entry["models"])
    for right in rest:
        labels = []
        for k, name in enumerate(baselines):
            sample, n = entry["paired"][name][metric], models.index(name)
            draw_points(right, k, (table[:, models.index(capsules)] - table[:, n]).tolist(), sample, n)
            labels.append(f"{plain(name)}\np {'' if sample['p'] < 1e-4 else '= '}{show_p(sample['p'])}")
        right.axhline(0, color="0.3", linewidth=0.8)
        right.set(
            xticks=range(len(baselines)), xticklabels=labels, ylabel=f"{plain(metric)}: {plain(capsules)} minus …"
        )
        right.set_xlim(-0.5, len(baselines) - 0.5)
        right.set_title("difference of the same seed", fontsize=10)


def draw_sweep(figure: Any, document: Json, models: list[str], chance: float | None, upright: bool) -> None:
    """A column (upright, joined to a curve) or a row for each setting, the models side by side in it."""
    metric, settings = document["metric"], document["settings"].values()
    axes = figure.subplots()
    for n, name in enumerate(models):
        shift = 0.22 * (n - (len(models) - 1) / 2)
        samples = [entry["models"][name][metric] for entry in settings]
        for k, entry in enumerate(settings):
            values = [run["models"][name][metric] for run in entry["runs"]]
            bar = draw_points(axes, k + shift, values, samples[k], n, upright)
        bar.set_label(plain(name))
        if upright:
            at = np.arange(len(samples)) + shift + 0.07
            axes.plot(at, [s["mean"] for s in samples], color=OKABE_ITO[n % len(OKABE_ITO)], linewidth=1.2)
    labels = [("\n" if upright else ", ").join(entry["values"].values()) for entry in settings]
    names = " / ".join(name for group in document["axes"] for name in group)
    if upright:
        axes.set_xticks(range(len(labels)), labels)
        axes.set_xlim(-0.5, len(labels) - 0.5)
        axes.set(xlabel=names, ylabel=plain(metric))
    else:
        axes.set_yticks(range(len(labels)), labels)
        axes.set(ylabel=names, xlabel=plain(metric))
        axes.invert_yaxis()
    if chance is not None:
        (axes.axhline if upright else axes.axvline)(chance, color="0.4", linestyle="--", linewidth=1, label="chance")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)


def figure_title(document: Json) -> str:
    """Experiment, data, seeds, and the length of training where no setting has another."""
    entries = list(document["settings"].values())
    counts = sorted({len(entry["runs"]) for entry in entries})
    parts = [
        f"{plain(document['experiment'])} ({document['dataset']})",
        "–".join(map(str, counts)) + (" seed" if counts == [1] else " seeds"),
    ]
    lengths = {tuple(map(entry["config"].get, ("n_epochs", "n_train", "match_accuracy"))) for entry in entries}
    if len(lengths) == 1:
        epochs, examples, stops_early = lengths.pop()
        if epochs and not stops_early:
            parts.append(f"{epochs} epoch{'s' * (epochs != 1)}" + (f" of {examples:,}" if examples else ""))
    return ", ".join(parts) + (": means with 95 % intervals" if len(entries) > 1 else "")


def draw(document: Json, path: Path) -> None:
    """Write the figure of a result; a sweep along one ordered axis becomes a curve for each model."""
    from matplotlib.figure import Figure

    metric, entries = document["metric"], list(document["settings"].values())
    models = [m for m in entries[0]["models"] if all(metric in entry["models"].get(m, {}) for entry in entries)]
    is_accuracy = metric.endswith("accuracy")
    chance = EXPERIMENTS.get(document["experiment"], ("", None))[1] if is_accuracy else None
    if len(entries) == 1:
        figure = Figure(figsize=(9, 4.6), layout="constrained")
        draw_pairs(figure, entries[0], models, metric, chance)
    else:
        one_axis = len(document["axes"]) == 1
        upright = one_axis and all(is_ordered(next(iter(e["values"].values()))) for e in entries)
        size = (max(6.5, 1.6 * len(entries)), 4.6) if upright else (8.5, 1.6 + 0.5 * len(entries))
        figure = Figure(figsize=size, layout="constrained")
        draw_sweep(figure, document, models, chance, upright)
    figure.suptitle(figure_title(document), fontsize=11)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    with atomic_write(path) as stream:
        figure.savefig(stream, format="png", dpi=150, metadata={"Software": None})


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


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        usage="%(prog)s EXPERIMENT --seeds 0:3 [options] [-- FLAGS OF THE EXPERIMENT]\n"
        "       %(prog)s --report | --check",
        description="Run an experiment with many seeds and settings side by side; keep the README's numbers true.",
        epilog=f"{HELP_EXAMPLES}\n\n{HELP_MARKERS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    count, cache = whole_number(1, 1024), Path(".cache/compare_seeds")
    add = parser.add_argument_group("what runs").add_argument
    add("experiment", nargs="?", metavar="EXPERIMENT", help="such as smallnorb_novel_viewpoint, or a script's path")
    add("--seeds", type=seed_list, metavar="LIST", help="START:STOP without STOP, or 0,1,2; default: 0:3")
    add("--grid", type=axis, nargs="+", metavar="FLAG=A,B", default=[], help="every combination of these flags' values")
    add("--zip", type=axis, nargs="+", metavar="FLAG=A,B", default=[], help="their first values, then the second, ...")
    add("--metric", metavar="NAME", help="of tables and figure; default: the experiment's main one")
    add = parser.add_argument_group("output").add_argument
    add("--name", metavar="NAME", help="part of the files' names; default: the seeds, or the swept flags")
    add("--out", type=Path, metavar="FILE", help="default: results/EXPERIMENT_NAME.json")
    add("--figure", type=Path, metavar="FILE", help="default: viz/EXPERIMENT/seeds_NAME.png")
    add("--keep-history", action="store_true", help="store the values of every epoch too")
    add("--keep-seconds", action="store_true", help="store training times too, which differ from call to call")
    add = parser.add_argument_group("how it runs").add_argument
    add("--jobs", type=count, metavar="N", default=os.cpu_count() or 1, help="runs at a time; default: the cores")
    add("--threads", type=count, metavar="N", default=1, help="BLAS threads of a run; default: %(default)s")
    add("--timeout", type=seconds, metavar="S", help="give a run up after so many seconds; default: never")
    add("--resume", action="store_true", help="do not repeat what has run with the same flags and code")
    add("--cache", type=Path, metavar="DIR", default=cache, help="keeps finished runs; default: %(default)s")
    add("--dask", metavar="ADDRESS", help="run on that Dask cluster, such as tcp://HOST:8786; --jobs does not apply")
    add = parser.add_argument_group("README").add_argument
    add("--report", action="store_true", help="rewrite the tables and numbers between the markers")
    add("--check", action="store_true", help="exit with status 1 where --report would change something")
    add("--readme", type=Path, metavar="FILE", default=Path("README.md"), help="beside results/; default: %(default)s")
    return parser


def recorded_command(argv: list[str]) -> str:
    """The command that gives this result again, without the flags that only say where and how to run."""
    own = argv[: argv.index("--")] if "--" in argv else argv
    rest = argv[len(own) :]
    transient = {"--jobs", "--timeout", "--cache", "--dask"}
    words, skip = [], False
    for word in own:
        flag, has_value, _ = word.partition("=")
        if not (skip or flag in transient or word == "--resume"):
            words.append(word)
        skip = flag in transient and not has_value
    return shlex.join(["python", "compare_seeds.py", *words, *rest])


def complete(parser: argparse.ArgumentParser, args: argparse.Namespace, rest: list[str]) -> list[Setting]:
    """Check the flags against each other, fill in what depends on others; the settings of the sweep."""
    if args.experiment is None:
        parser.error("name an experiment, or give --report or --check")
    file = args.experiment.removesuffix(".py") + ".py"
    args.script = (Path(__file__).parent / file if file == Path(file).name else Path(file)).resolve()
    if not args.script.is_file():
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
    args.zip, args.grid, args.seeds = dict(args.zip), dict(args.grid), args.seeds or [0, 1, 2]
    if len({len(values) for values in args.zip.values()}) > 1:
        parser.error("argument --zip: the flags have different numbers of values")
    n_runs = math.prod([len(v) for v in args.grid.values()] + [len(v) for v in args.zip.values()][:1]) * len(args.seeds)
    if n_runs > MAX_RUNS:
        parser.error(f"that is {n_runs:,} runs, above the limit of {MAX_RUNS:,}")
    args.name = args.name or "_".join(names) or "-".join(map(str, sorted({min(args.seeds), max(args.seeds)})))
    args.out = args.out or Path("results", f"{args.script.stem}_{args.name}.json")
    args.figure = args.figure or Path("viz", args.script.stem, f"seeds_{args.name}.png")
    settings = make_settings(args.zip, args.grid, rest)
    if len({setting.name for setting in settings}) < len(settings):
        parser.error("arguments --grid and --zip: a setting occurs twice")
    return settings


def compare(args: argparse.Namespace, settings: list[Setting]) -> None:
    for path in (args.out, args.figure, args.cache / "a run"):
        require_writable(path)
    args.version = code_version(args.script)
    jobs = [
        Job(args.script, s.args, seed, args.threads, args.timeout, args.version, Path.cwd(), s.name)
        for s in settings
        for seed in args.seeds
    ]
    outcomes = run_all(jobs, args.jobs, args.cache, args.resume, args.dask)
    document = make_document(args, settings, jobs, outcomes)
    save_result(args.out, document)
    draw(document, args.figure)
    print(f"## {document['experiment']} ({document['dataset']}), {document['metric']}\n")
    if len(settings) > 1:
        print("Means ± half of the 95 % interval:\n\n" + make_table(document, "grid", {}))
    else:
        (entry,) = document["settings"].values()
        every = ",".join(dict.fromkeys(k for m in entry["models"].values() for k in m if k != "n_params"))
        print(make_table(document, "seeds", {}) + "\n\nMeans ± half of the 95 % interval:\n")
        print(make_table(document, "summary", {"metrics": every}))
        if entry["paired"]:
            print("\nPaired by seed:\n\n" + make_table(document, "paired", {"metrics": every}))
    print(f"\n{args.out} and {args.figure} are written")
    if args.out.stat().st_size >= MAX_BYTES:
        print(f"warning: {args.out} is too large for --check ({MAX_BYTES:,} bytes)", file=sys.stderr)
    if n_failed := sum("error" in outcome for outcome in outcomes):
        raise UserError(f"{n_failed} of {len(jobs)} runs failed; the others are kept")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    split = argv.index("--") if "--" in argv else len(argv)
    parser = make_parser()
    args = parser.parse_args(argv[:split])
    if args.report or args.check:
        if args.experiment is not None or (args.report and args.check) or argv[split:]:
            parser.error("--report and --check stand alone")
        return exit_status(lambda: report(args.readme, args.check))
    settings = complete(parser, args, argv[split + 1 :])
    args.command = recorded_command(argv)
    return exit_status(lambda: compare(args, settings))


if __name__ == "__main__":
    sys.exit(main())
