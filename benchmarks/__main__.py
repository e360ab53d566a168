"""Measure every table of the benchmarks in one run: ``python -m benchmarks``."""

from __future__ import annotations

import support.startup  # noqa: F401  before the others, for Ctrl-C

# isort: split

import functools
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import conv_matrix_capsules as matrix_capsules
from benchmarks import multimnist, smallnorb
from benchmarks.measure import Step, interleave, peak_memory, torch_version
from support.files import require_writable
from support.results import code_fingerprint, environment, save_result
from support.run import Parser, exit_status, print_message, print_result, whole_number

OURS, PRODUCTS, EAGER = "numpy", "its matrix products alone", "PyTorch eager"
Build = Callable[..., Step]
BATCHES = [8, 16, 32, 64, 128]


def compare(builds: dict[str, tuple[Build, dict[str, Any]]], repetitions: int, memory: bool) -> dict[str, Any]:
    """A row per candidate: time as a multiple of ours, milliseconds, peak MiB. One that does not build is left out."""
    steps: dict[str, Step] = {}
    for name, (build, arguments) in builds.items():
        try:
            steps[name] = build(**arguments)
            steps[name]()
        except Exception as error:  # torch.compile fails in many ways where there is no compiler
            steps.pop(name, None)
            print_message(f"{name} is left out: {type(error).__name__}")
    seconds = interleave(steps, repetitions)
    columns = ["training step", "time / numpy's", "ms", *(["peak MiB"] if memory else [])]
    rows = []
    for name in steps:
        row: list[Any] = [name, round(seconds[name] / seconds[OURS], 2), round(1e3 * seconds[name], 2)]
        if memory:
            build, arguments = builds[name]
            row.append(round(peak_memory(build, **arguments)))
        rows.append(row)
    return {"columns": columns, "rows": rows}


def growth(builds: dict[str, Build], label: str, flag: str, values: list[int], repetitions: int) -> dict[str, Any]:
    """A row per value of one size: our time as a multiple of each other candidate's, and our milliseconds."""
    others = [name for name in builds if name != OURS]
    rows = []
    for value in values:
        seconds = interleave({name: build(**{flag: value}) for name, build in builds.items()}, repetitions)
        ratios = [round(seconds[OURS] / seconds[name], 2) for name in others]
        rows.append([str(value), *ratios, round(1e3 * seconds[OURS], 2)])
    return {"columns": [label, *(f"numpy / {name}" for name in others), "numpy, ms"], "rows": rows}


def default_command(repetitions: int, threads: int) -> dict[str, Any]:
    """Median seconds of the whole smallNORB command: process start, three models trained, result table."""
    script = Path(smallnorb.experiment.__file__)
    command = [sys.executable, str(script), "--quiet", "--threads", str(threads)]
    run: dict[str, Step] = {"run": lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)}
    seconds = interleave(run, repetitions, warm_up=1)["run"]
    return {"columns": ["command", "seconds"], "rows": [[f"python {script.name}", round(seconds, 2)]]}


def measure(repetitions: int, threads: int, only: str | None = None) -> dict[str, Any]:
    """All tables, or those of one experiment."""
    import threadpoolctl

    torch = torch_version()
    if not torch:
        print_message("PyTorch is not installed: pip install -r requirements-bench.txt")

    def with_torch(module: Any, sizes: dict[str, Any], ours: dict[str, Any]) -> dict[str, tuple[Build, dict[str, Any]]]:
        builds: dict[str, tuple[Build, dict[str, Any]]] = {
            OURS: (module.numpy_step, {**sizes, **ours}),
            PRODUCTS: (module.products_step, {**sizes, **ours}),
        }
        if torch:
            builds[EAGER] = (module.torch_step, {**sizes, **ours, "compiled": False})
            builds["PyTorch eager, fused Adam"] = (
                module.torch_step,
                {**sizes, **ours, "compiled": False, "fused": True},
            )
            builds["torch.compile"] = (module.torch_step, {**sizes, **ours, "compiled": True})
            builds["torch.compile, fused Adam"] = (
                module.torch_step,
                {**sizes, **ours, "compiled": True, "fused": True},
            )
        return builds

    crew = {"threads": threads}
    few = max(3, repetitions // 4)

    def plain(module: Any, options: dict[str, Any]) -> dict[str, Build]:
        builds: dict[str, Build] = {OURS: module.numpy_step, PRODUCTS: module.products_step}
        builds |= {EAGER: module.torch_step} if torch else {}
        return {name: functools.partial(build, **options) for name, build in builds.items()}

    def measure_smallnorb() -> dict[str, Any]:
        return {
            "smallnorb": compare(with_torch(smallnorb, {"batch_size": 32}, {}), repetitions, memory=True),
            "smallnorb_batch": growth(plain(smallnorb, {}), "batch size", "batch_size", BATCHES, repetitions),
        }

    def measure_matrix_capsules() -> dict[str, Any]:
        builds: dict[str, tuple[Build, dict[str, Any]]] = {
            OURS: (matrix_capsules.numpy_step, crew),
            "numpy, one thread": (matrix_capsules.numpy_step, {"threads": 1}),
        }
        if torch:
            builds[EAGER] = (matrix_capsules.torch_step, {})
            builds["torch.compile"] = (matrix_capsules.torch_step, {"compiled": True})
        paper = {"sizes": (32, 32, 32, 32), "threads": threads}
        rows = [["A = B = C = D = 32, batch 32", round(peak_memory(matrix_capsules.numpy_step, **paper))]]
        return {
            "matrix_capsules": compare(builds, few, memory=True),
            "matrix_capsules_paper": {"columns": ["training step", "peak MiB"], "rows": rows},
        }

    def measure_multimnist() -> dict[str, Any]:
        builds = with_torch(multimnist, {"batch_size": 32}, crew)
        builds["matrix products of the usual form"] = (multimnist.usual_products_step, {"batch_size": 32, **crew})
        builds["drawing its composites"] = (multimnist.overlay_step, {"batch_size": 32})
        paper = {"batch_size": 128, "conv_channels": 256, "threads": threads}
        rows = [["paper preset, batch 128", round(peak_memory(multimnist.numpy_step, **paper))]]
        widths = [16, 32, 64, 128]
        return {
            "multimnist": compare(builds, repetitions, memory=True),
            "multimnist_paper": {"columns": ["training step", "peak MiB"], "rows": rows},
            "multimnist_batch": growth(plain(multimnist, crew), "batch size", "batch_size", BATCHES, few),
            "multimnist_width": growth(plain(multimnist, crew), "conv1 channels", "conv_channels", widths, few),
        }

    parts = {
        "smallnorb": measure_smallnorb,
        "matrix_capsules": measure_matrix_capsules,
        "multimnist": measure_multimnist,
    }
    tables: dict[str, Any] = {}
    if only is None:
        tables["smallnorb_command"] = default_command(max(3, repetitions // 8), threads)
    with threadpoolctl.threadpool_limits(threads):
        for name, part in parts.items():
            if only in (None, name):
                tables |= part()
    return tables


def make_parser() -> Parser:
    parser = Parser(
        prog="python -m benchmarks",
        description="Time training steps, their matrix products alone, and the same networks in PyTorch.",
        epilog="The times are printed, and go to the file of --out.",
    )
    # fmt: off
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/steps.json"), metavar="FILE",
        help="File of the result. Default: %(default)s.")
    parser.add_argument("--repetitions", type=whole_number(1, 10_000), default=60, metavar="N",
        help="Time every step in N rounds. Default: %(default)s.")
    parser.add_argument("--threads", type=whole_number(1, 1024), default=2, metavar="N",
        help="Use N threads. Default: %(default)s.")
    parser.add_argument("--only", choices=("smallnorb", "matrix_capsules", "multimnist"),
        help="Time one experiment. Default: all.")
    # fmt: on
    return parser


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = make_parser().parse_args(argv)

    def body() -> None:
        require_writable(args.out)
        tables = measure(args.repetitions, args.threads, args.only)
        result = {
            "command": shlex.join(["python", "-m", "benchmarks", *argv]),
            "code": code_fingerprint(Path(__file__)),
            "environment": environment() | {"pytorch": torch_version()},
            "tables": tables,
        }
        save_result(args.out, result)
        for name, table in tables.items():
            print_result(f"\n{name}")
            for row in [table["columns"], *table["rows"]]:
                print_result("  ".join(f"{cell!s:>26}" for cell in row))

    return exit_status(body)


if __name__ == "__main__":
    sys.exit(main())
