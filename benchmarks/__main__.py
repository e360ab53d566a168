"""Time training steps against other frameworks, or with --scaling against their sizes: ``python -m benchmarks``."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import conv_matrix_capsules as matrix_capsules, multimnist, scaling, smallnorb
from benchmarks.measure import Step, in_fresh_process, interleave, time_and_peak, version_of
from fast.workers import blas_threads
from smallnorb_novel_viewpoint import OUTPUT, SettingError, Settings, int_in, parse, print_message, script, setting
from support.experiment import require_writable
from support.result_tables import plain_table
from support.results import environment, save_result

OURS = "numpy"
Build = Callable[..., Step]
MODULES: dict[str, Any] = {"smallnorb": smallnorb, "matrix_capsules": matrix_capsules, "multimnist": multimnist}
SLOW = "matrix_capsules"  # a quarter of the repetitions
TORCH: dict[str, dict[str, Any]] = {
    "PyTorch eager": {},
    "PyTorch eager, fused Adam": {"fused": True},
    "torch.compile": {"compiled": True},
    "torch.compile, fused Adam": {"compiled": True, "fused": True},
    "torch.compile, fused Adam, bfloat16 autocast": {"compiled": True, "fused": True, "bfloat16": True},
    "torch.compile, fused Adam, channels-last": {"compiled": True, "fused": True, "channels_last": True},
}


def compare(builds: dict[str, tuple[Build, dict[str, Any]]], repetitions: int) -> dict[str, Any]:
    """A row per candidate: time as a multiple of ours, milliseconds, peak MiB. One that does not build is left out."""
    steps: dict[str, Step] = {}
    for name, (build, arguments) in builds.items():
        try:
            steps[name] = build(**arguments)
            steps[name]()
        except Exception as error:  # torch.compile fails in many ways where there is no compiler
            if name == OURS:
                raise
            steps.pop(name, None)
            print_message(f"{name} is left out: {type(error).__name__}")
    seconds = interleave(steps, repetitions)
    rows = []
    for name in steps:
        build, arguments = builds[name]
        times = round(seconds[name] / seconds[OURS], 2), round(1e3 * seconds[name], 2)
        _, peak = in_fresh_process(time_and_peak, build=build, repetitions=1, **arguments)
        rows.append([name, *times, round(peak)])
    return {"columns": ["training step", "time / numpy's", "ms", "peak MiB"], "rows": rows}


def candidates(name: str, threads: int) -> dict[str, tuple[Build, dict[str, Any]]]:
    """What is timed of an experiment: the function that builds a step, and its arguments."""
    module, crew = MODULES[name], {"threads": threads}
    builds: dict[str, tuple[Build, dict[str, Any]]] = {OURS: (module.numpy_step, crew)}
    if module is smallnorb:
        builds["its matrix products alone"] = (smallnorb.matrix_products_step, {})
    if version_of("torch"):
        builds |= {label: (module.torch_step, crew | options) for label, options in TORCH.items()}
    if version_of("jax"):
        from benchmarks import jax_networks

        builds["JAX, jit"] = (jax_networks.jax_step, {"name": name})
    if module is matrix_capsules:
        builds["numpy, one thread"] = (matrix_capsules.numpy_step, {"threads": 1})
    if module is multimnist:
        builds["matrix products of the usual form"] = (multimnist.usual_products_step, crew)
        builds["drawing its composites"] = (multimnist.overlay_step, {})
    return builds


def measure(repetitions: int, threads: int, only: str | None = None) -> dict[str, Any]:
    """All tables, or those of one experiment."""
    for package in ("torch", "jax"):
        if not version_of(package):
            print_message(f"{package} is not installed, its rows are left out: pip install torch jax")
    names = [name for name in MODULES if only in (None, name)]
    with blas_threads(threads):
        return {
            name: compare(candidates(name, threads), max(3, repetitions // 4) if name == SLOW else repetitions)
            for name in names
        }


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    repetitions: int = setting(60, int_in(1, 10_000), "Time a step in N rounds, slow ones in fewer.", usual=True)
    only: str | None = setting(None, tuple(MODULES), "Time one experiment.", usual=True)


@dataclasses.dataclass(frozen=True)
class Options(Settings):
    scaling: bool = setting(False, bool, "Time our steps alone, with 1 and N threads, against batch size and width and"
        " at the papers' sizes.", usual=True)
    out: Path = setting(None, OUTPUT, "File of the result.", usual=True,
        shown="results/benchmarks/steps.json, with --scaling scaling.json")
    threads: int = setting(2, int_in(1, 1024), "Use N threads.", usual=True)

    def dependent(self) -> dict[str, Any]:
        return {"out": Path("results", "benchmarks", f"{'scaling' if self.scaling else 'steps'}.json")}


@script
def main(argv: Sequence[str]) -> None:
    config, options, _ = parse(
        Config, Options, argv,
        "Time training steps, their matrix products alone, and the same networks in PyTorch and JAX.",
        epilog="The times are printed, and go to the file of --out.",
    )
    if options.scaling and config.only:
        raise SettingError("scaling", "not together with --only")
    require_writable(options.out)
    if options.scaling:
        tables = scaling.measure(config.repetitions, options.threads)
    else:
        tables = measure(config.repetitions, options.threads, config.only)
    command = shlex.join(["python", "-m", "benchmarks", *argv])
    machine = environment(options.threads) | {"pytorch": version_of("torch"), "jax": version_of("jax")}
    try:
        for name in tables:
            print(f"\n{name}\n{plain_table({'tables': tables}, name, {})}", flush=True)
    finally:  # where nobody reads them, too
        save_result(options.out, {"command": command, "environment": machine, "tables": tables})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
