#!/usr/bin/env python3
"""Many seeds and settings of one experiment, here or on a cluster: runs them and compares the models.

    python compare_seeds.py smallnorb_novel_viewpoint --seeds 0:3 -- --n-epochs 10
    python compare_seeds.py smallnorb_novel_viewpoint --seeds 0:10 --grid em-iters=1,2,3 loss=cross-entropy,spread
    python compare_seeds.py smallnorb_novel_viewpoint --zip train-azimuths=0:60,0:150 test-azimuths=110:240,200:330

A run is a process, ``python EXPERIMENT.py FLAGS --seed S --threads N --quiet --out-json FILE``. Every experiment can be
compared that has these flags and writes ``{"models": {name: {"n_params": int, metric: float, ...}}}``, with its data
set as "dataset" and the name of its main metric as "headline". Every float of a model is a metric. The capsule network
is compared with each other model, paired by seed. A script of your own may lie anywhere, named by its path, and import
this project's modules; inside of this folder it has ``Config`` and ``Options``, or ``make_parser()``.

The file of a run is kept in .cache/compare_seeds, under a name that stands for flags, seed, code and numpy's version;
``--resume`` runs what has no file there. ``python -m evidence.report`` turns results into the tables of the pages.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from smallnorb_novel_viewpoint import Parser, UserError, int_in, one_line, path_of, print_message, script, write_file
from support.experiment import ROOT, RUN_FLAGS, code_files, parse_flags, require_writable, run_command, script_path
from support.result_tables import metrics_table, paired_table, rows_table, seeds_table
from support.results import environment, n_processors, parse_json, read_result, save_result
from support.statistics import has_scipy, summarise_comparison

Json = dict[str, Any]

OWN_FLAGS = ("seed", "out-json", "threads", "quiet", "checkpoint", "resume")  # of an experiment, set here or not at all
DATA_FLAGS = {"dataset", "data-dir"}  # swept, they ask for different data sets
SECONDS = ("train_seconds", "epoch_seconds")  # differ from call to call
CACHE = Path(".cache/compare_seeds")
DASK_TIMEOUT = 10  # seconds until a scheduler must have answered


# --- One run ----------------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """One point of a sweep."""

    name: str  # "em-iters=1 loss=spread", or "default" without a sweep
    values: tuple[tuple[str, str], ...]  # of the swept flags
    args: tuple[str, ...]  # of the experiment, without those that are the same in every comparison


class Job(NamedTuple):
    setting: Setting
    seed: int
    file: Path  # of its result, in the cache

    def __str__(self) -> str:
        return f"seed {self.seed}, setting {self.setting.name}"


running: set[subprocess.Popen[bytes]] = set()  # the processes of this machine


def run(command: list[str], variables: dict[str, str], where: str = "") -> None:
    """Run a command, which goes on to its end where this process is killed. Raises RuntimeError with a line where it
    fails."""
    with subprocess.Popen(
        command, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        running.add(process)
        _, said = process.communicate()
        running.discard(process)
    if status := process.returncode:
        lines = [line.strip() for line in said.decode(errors="replace").splitlines() if re.search(r"\w", line)]
        how = f"exit status {status}" if status > 0 else f"killed by signal {-status}"
        raise RuntimeError(f"{how}: {(lines or ['no message'])[-1]}{where}")


def run_on_worker(archive: bytes, start: list[str], flags: list[str], variables: dict[str, str]) -> bytes:
    """``run`` a script of the archive in the worker's working folder, and return its result file. The worker needs
    nothing of this project."""
    from distributed import get_worker

    worker = get_worker()
    with tempfile.TemporaryDirectory(dir=worker.local_directory) as folder:  # Dask clears it where the worker is killed
        zipfile.ZipFile(io.BytesIO(archive)).extractall(folder)
        start = start if start[0] == "-m" else [os.path.join(folder, start[0])]
        out = os.path.join(folder, "out.json")
        command = [sys.executable, *start, *flags, f"--out-json={out}"]
        run(command, variables | {"PYTHONPATH": folder}, f" (worker {worker.address} in {os.getcwd()})")
        with open(out, "rb") as stream:
            return stream.read()


def read_run(file: Path) -> Json:
    """The result of a run. Raises ValueError where the file holds none."""
    try:
        result = parse_json(file)
        metrics = [metric for model in result["models"].values() for metric in model.values()]
        if result["headline"] and any(isinstance(metric, float) for metric in metrics):
            return dict(result)
    except (OSError, LookupError, TypeError, AttributeError):
        pass
    raise ValueError("its result holds no metric of a model, or a number that is not finite")


# --- All runs ---------------------------------------------------------------------------------------------------------


def make_settings(zipped: dict[str, list[str]], grid: dict[str, list[str]], rest: list[str]) -> list[Setting]:
    """The product of the grid's axes; the zipped flags are its first axis, and advance together."""
    axes = [[{name: v} for v in values] for name, values in grid.items()]
    if zipped:
        axes.insert(0, [dict(zip(zipped, row, strict=True)) for row in zip(*zipped.values(), strict=True)])
    settings = []
    for point in itertools.product(*axes):
        values = tuple(pair for part in point for pair in part.items())
        name = " ".join(f"{k}={v}" for k, v in values) or "default"
        settings.append(Setting(name, values, (*rest, *(f"--{k}={v}" for k, v in values))))
    return settings


def pack(script: Path) -> bytes:
    """``code_files``, as one archive: the same bytes for the same code."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in code_files(script):
            root = ROOT if path.is_relative_to(ROOT) else script.parent
            archive.writestr(zipfile.ZipInfo(path.relative_to(root).as_posix()), path.read_bytes())
    return stream.getvalue()


def make_jobs(args: argparse.Namespace, settings: list[Setting], archive: bytes) -> list[Job]:
    """The first seed of every setting comes first, which shows early what fails."""
    jobs = []
    for seed, setting in itertools.product(args.seeds, settings):
        key = json.dumps([setting.args, seed, args.threads, np.__version__]).encode() + archive
        name = f"{args.script.stem}-seed{seed}-{hashlib.sha256(key).hexdigest()[:16]}.json"
        jobs.append(Job(setting, seed, CACHE.resolve() / name))
    return jobs


@contextlib.contextmanager
def open_executor(n_parallel: int, address: str | None) -> Iterator[Executor]:
    """Threads that each wait for a process; or a running Dask cluster, which starts a lost worker's runs again."""
    if address is None:
        with ThreadPoolExecutor(n_parallel) as executor:
            yield executor
        return
    try:
        import distributed
    except ImportError:
        raise UserError('--scheduler needs Dask: pip install "dask[distributed]"') from None
    try:
        client = distributed.Client(address, timeout=DASK_TIMEOUT, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise UserError(f"there is no Dask scheduler at {address}") from error
    with client:
        yield client.get_executor(pure=False)


def run_all(jobs: list[Job], args: argparse.Namespace, archive: bytes) -> tuple[dict[Job, Json], dict[Job, str]]:
    """The results, and why the other runs have none. After Ctrl-C or SIGTERM the processes of this machine are
    stopped, and what has run is kept. Raises UserError for runs that cannot be compared."""
    results: dict[Job, Json] = {}
    failures: dict[Job, str] = {}
    if args.resume:
        for job in jobs:
            with contextlib.suppress(ValueError):
                results[job] = read_run(job.file)
        require_one_dataset(results)
    missing = [job for job in jobs if job not in results]
    futures: dict[Future[Any], Job] = {}
    with open_executor(args.jobs, args.scheduler if missing else None) as executor:
        try:
            for job in missing:
                futures[submit(executor, job, args, archive)] = job
            for future in as_completed(futures):
                job = futures[future]
                try:
                    if content := future.result():  # of a worker, which does not know the commit of its code
                        write_file(job.file, content)
                    results[job] = read_run(job.file)
                except Exception as error:  # of the run, of its result, or of the cluster, such as KilledWorker
                    failures[job] = one_line(error, 400)
                    print_message(f"{job}: {failures[job]}")
                require_one_dataset(results)
                print_message(f"{len(results) + len(failures)} of {len(jobs)} runs: {job}")
        except BaseException as error:
            for future in reversed(futures):
                future.cancel()
            while not args.scheduler and sum(future.running() for future in futures) > len(running):
                time.sleep(0.01)  # a run that has just begun is not among them yet
            for process in list(running):
                process.terminate()
            if isinstance(error, KeyboardInterrupt):
                print_message(f"{len(results)} of {len(jobs)} runs are kept; --resume goes on from them")
            raise
    return {job: results[job] for job in jobs if job in results}, failures


def submit(executor: Executor, job: Job, args: argparse.Namespace, archive: bytes) -> Future[Any]:
    flags = [*job.setting.args, f"--seed={job.seed}", f"--threads={args.threads}", "--quiet"]
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    variables = dict.fromkeys(names, str(args.threads))
    command = run_command(args.script)
    if args.scheduler:
        start = [args.script.name] if len(command) == 1 else command
        return executor.submit(run_on_worker, archive, start, flags, variables)
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return executor.submit(run, [sys.executable, *command, *flags, f"--out-json={job.file}"], variables)


# --- The result -------------------------------------------------------------------------------------------------------


def merge(values: list[Any]) -> Any:
    """The value that all have, or a list of the distinct ones."""
    distinct = list({json.dumps(value): value for value in values}.values())
    return distinct[0] if len(distinct) == 1 else distinct


def require_one_dataset(results: dict[Job, Json]) -> None:
    """Raises UserError where runs have different data sets that no swept flag asked for, as where a file is missing on
    one machine and its experiment draws digits instead."""
    names = {f"{r.get('dataset')}" for job, r in results.items() if not DATA_FLAGS & dict(job.setting.values).keys()}
    if len(names) > 1:
        raise UserError(
            f"the runs have different data sets and cannot be compared: {' and '.join(sorted(names))}; name one with"
            " --dataset, or leave --resume out"
        )


def make_document(
    args: argparse.Namespace, settings: list[Setting], results: dict[Job, Json], failures: dict[Job, str]
) -> Json:
    """The result. Besides command and machine it depends on the runs' numbers alone: not on how many ran at once."""
    if not results:
        raise UserError(f"none of the {len(failures)} runs gave a result")
    first = next(iter(results.values()))
    left_out = ("seed", "data_dir")
    configs = {j: {k: v for k, v in r.get("config", {}).items() if k not in left_out} for j, r in results.items()}
    common = {k: v for k, v in first.get("config", {}).items() if all(c.get(k) == v for c in configs.values())}
    document: Json = {
        "command": args.command,
        "experiment": args.script.stem,
        "dataset": merge([result.get("dataset") for result in results.values()]),
        "headline": first["headline"],
        "reference": next((name for name in first["models"] if name.startswith("caps")), next(iter(first["models"]))),
        "seeds": args.seeds,
        "environment": args.environment,
        "config": common,
        "settings": {},
    }
    ignored = () if args.keep_seconds else SECONDS
    for setting in settings:
        own = [job for job in results if job.setting == setting]
        if not own:
            print_message(f"setting {setting.name} has no result and is left out")
            continue
        runs: list[Json] = []
        for job in own:
            models = results[job]["models"]
            models = {name: shortened({k: v for k, v in m.items() if k not in ignored}) for name, m in models.items()}
            history = {"history": results[job].get("history", {})} if args.keep_history else {}
            runs.append({"seed": job.seed, "models": models, **history})
        document["settings"][setting.name] = {
            "values": dict(setting.values),
            "config": {k: v for k, v in configs[own[0]].items() if k not in common},
            "runs": runs,
            "failures": [{"seed": j.seed, "error": failures[j]} for j in sorted(failures) if j.setting == setting],
        }
    return document


def shortened(value: Any) -> Any:
    """Floats to six digits, so that a file of many runs stays small; tests have fewer than a million examples."""
    if isinstance(value, dict):  # a model's metrics, and among them such as the accuracy at each angle
        return {key: shortened(v) for key, v in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def require_own(args: argparse.Namespace) -> None:
    """Raises UserError where the file has parts and none is named, or the other way, and where it, or the part of it,
    is of another command; with --resume, of an experiment."""
    found = read_result(args.out) if args.out.exists() else {}
    if found and ("parts" in found) != bool(args.part):
        raise UserError(f"{args.out} {'is one comparison, without parts' if args.part else 'has parts: give --part'}")
    found = found.get("parts", {}).get(args.part, {}) if args.part else found
    command = found.get("command", args.command)
    is_own = found.get("experiment", args.script.stem) == args.script.stem if args.resume else command == args.command
    if not is_own:
        raise UserError(f"{args.out} is of another command, {command}: name another file by --out, or remove it")


OF_A_PART = ("azimuth_", "elevation_", "class_")  # metrics of one angle or class, which the file alone has


def describe(document: Json) -> str:
    """The tables for the terminal: of the headline by seed, and of all metrics; of a sweep, a row for each setting."""
    settings, headline = document["settings"], document["headline"]
    lines = [f"{document['experiment']} ({document['dataset']}), {headline}", ""]
    if len(settings) > 1:
        lines += [rows_table([document], {}), ""]
        for model in next(iter(settings.values()))["models"]:
            of_model = {name: entry["models"].get(model, {}) for name, entry in settings.items()}
            means = {name: metrics[headline]["mean"] for name, metrics in of_model.items() if headline in metrics}
            lines += [f"Best for {model}: {max(means, key=means.__getitem__)}"] if means else []
    else:
        (entry,) = settings.values()
        named = dict.fromkeys(k for m in entry["models"].values() for k in m if k != "n_params")
        every = {"metrics": ",".join(k for k in named if not k.startswith(OF_A_PART))}
        lines += [seeds_table([document], {}), "", metrics_table(document, every)]
        if entry["paired"]:
            lines += ["", paired_table(document, every)]
    about = "± is half of a 95 % interval of the mean" if has_scipy() else "intervals of the means need scipy"
    return "\n".join([*lines, "", about])


# --- Command line -----------------------------------------------------------------------------------------------------


def seed_list(text: str) -> list[int]:
    """0:3 (as in Python, without the end), 0,1,2, or both."""
    found = [re.fullmatch(r"(\d{1,10})(?::(\d{1,10}))?", part) for part in text.split(",")]
    parts = [range(int(part[1]), int(part[2] or int(part[1]) + 1)) for part in found if part]
    seeds = [n for part in parts for n in part]
    if not all(found) or not all(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is neither START:STOP nor a list of seeds such as 0,1,2")
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text!r} has a seed twice")
    return seeds


def axis(text: str) -> tuple[str, list[str]]:
    """em-iters=1,2,3"""
    if not re.fullmatch(r"[a-z][a-z0-9_-]*=[^,]+(,[^,]+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not FLAG=VALUE,VALUE,...")
    name, values = text.split("=", 1)
    return name, values.split(",")


def word(text: str) -> str:
    if not re.fullmatch(r"[\w.-]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not made of letters, digits and ._-")
    return text


EXAMPLES = """examples, with their times on one thread:
  python compare_seeds.py smallnorb_novel_viewpoint --seeds 0:3
      Three seeds: about 30 seconds.
  python compare_seeds.py smallnorb_novel_viewpoint --seeds 0:10 --grid em-iters=1,2,3
      Ten seeds of each of three settings: about 2 minutes.
  python compare_seeds.py multimnist_capsnet --seeds 0:3 --jobs 2 -- --n-epochs 2
      Three short runs, two at a time: about 7 minutes.

The result goes to results/EXPERIMENT/NAME.json."""


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s EXPERIMENT --seeds 0:3 [flags] [-- FLAGS OF THE EXPERIMENT]",
        description="Run an experiment with many seeds and settings and compare its models.",
        epilog=EXAMPLES,
    )
    count = int_in(1, 1024).convert
    axes = {"type": axis, "action": "extend", "nargs": "+", "metavar": "FLAG=A,B", "default": []}
    add: Callable[..., Any] = parser.add_argument_group("what runs").add_argument
    add("experiment", metavar="EXPERIMENT",
        help="Name of the experiment, such as smallnorb_novel_viewpoint, or a script's path.")
    add("--seeds", type=seed_list, metavar="LIST", default=[0, 1, 2],
        help="Run the seeds START:STOP, STOP left out, or a list such as 0,1,2. Default: 0:3.")
    add("--grid", **axes, help="Run every combination of these flags' values.")
    add("--zip", **axes, help="Run their first values, then their second, and so on.")
    add = parser.add_argument_group("output").add_argument
    add("--name", type=word, help="Name of the file. Default: the seeds, or the swept flags.")
    add("--part", type=word, metavar="NAME", help="Write this part of the file, and keep its other parts.")
    add("--out", type=path_of, metavar="FILE", help="File of the result. Default: results/EXPERIMENT/NAME.json.")
    add("--keep-history", action="store_true", help="Store the values of every epoch too.")
    add("--keep-seconds", action="store_true", help="Store training times too, which differ from call to call.")
    add = parser.add_argument_group("how it runs").add_argument
    add("--jobs", type=count, metavar="N", default=n_processors(),
        help="Do N runs at a time. Default: one for each core that may be used.")
    add("--threads", type=count, metavar="N", default=1, help="Give each run N threads. Default: %(default)s.")
    add("--resume", action="store_true", help="Do not repeat what has run with the same flags and code.")
    add("--scheduler", metavar="ADDRESS",
        help="Run on the workers of this Dask scheduler, such as tcp://HOST:8786. --jobs does not apply.")
    parser.add_argument("--help-all", action="help", help=argparse.SUPPRESS)
    return parser


def parse_command(argv: Sequence[str]) -> tuple[argparse.Namespace, list[Setting]]:
    """The flags, checked against each other and completed, and the settings of the sweep."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser, rest = make_parser(), list(argv[split + 1 :])
    args, unknown = parser.parse_known_args(argv[:split])
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; flags of the experiment stand after --")
    # without the flags that only say where and how to run
    flags = re.sub(r" --(jobs|scheduler)[ =]\S+| --resume\b", "", f" {shlex.join(argv[:split])}")
    args.command = f"python compare_seeds.py{flags} {shlex.join(argv[split:])}".rstrip()
    script = script_path(args.experiment)
    if script is None:
        parser.error(f"argument EXPERIMENT: there is no script {args.experiment}")
    args.script = script
    swept = [name for name, _ in (*args.zip, *args.grid)]
    given = {word.partition("=")[0].removeprefix("--") for word in rest if word.startswith("--")}
    for name in (*swept, *given):
        if name in OWN_FLAGS:
            parser.error(f"--{name} is not for the experiment here: --seeds, --threads and the cache stand for it")
        if swept.count(name) + (name in given) > 1:
            parser.error(f"--{name} is named twice")
    args.zip, args.grid = dict(args.zip), dict(args.grid)
    if len({len(values) for values in args.zip.values()}) > 1:
        parser.error("argument --zip: the flags have different numbers of values")
    if args.scheduler is not None and not re.fullmatch(r"(\w+://)?[^/\s]+:\d+", args.scheduler):
        parser.error(f"argument --scheduler: {args.scheduler!r} is no address such as tcp://HOST:8786")
    name = args.name or "_".join(swept) or "-".join(map(str, sorted({min(args.seeds), max(args.seeds)})))
    args.out = args.out or Path("results", args.script.stem, f"{name}.json")
    settings = make_settings(args.zip, args.grid, rest)
    for path in (args.script, *(word.partition("=")[2] or word for setting in settings for word in setting.args)):
        if os.path.realpath(args.out) == os.path.realpath(path):
            parser.error(f"argument --out: would overwrite {path}")
    if len({setting.name for setting in settings}) < len(settings):
        parser.error("arguments --grid and --zip: a setting occurs twice")
    return args, settings


@script
def main(argv: Sequence[str]) -> None:
    args, settings = parse_command(argv)
    if args.script.is_relative_to(ROOT):  # another one may do anything when it is imported
        for setting in settings:
            parse_flags(args.script, [*setting.args, *RUN_FLAGS])
    args.environment, archive = environment(args.threads), pack(args.script)
    require_writable(args.out, CACHE / "a run")
    require_own(args)
    jobs = make_jobs(args, settings, archive)
    results, failures = run_all(jobs, args, archive)
    document = make_document(args, settings, results, failures)
    try:
        print(f"{describe(summarise_comparison(document))}\n", flush=True)
    finally:  # where nobody reads the table, too
        try:
            parts = read_result(args.out)["parts"] if args.part and args.out.exists() else {}
            save_result(args.out, {"parts": parts | {args.part: document}} if args.part else document)
        except OSError as error:
            raise UserError(f"{one_line(error)}; the runs are kept, and --resume writes them") from error
    print(f"{args.out} is written")
    if failures:
        raise UserError(f"{len(failures)} of {len(jobs)} runs failed; the others are kept")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
