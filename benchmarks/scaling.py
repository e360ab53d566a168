"""Time and memory of our training steps against threads, batch size, width, and at the papers' sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import conv_matrix_capsules, multimnist, smallnorb
from benchmarks.measure import Step, in_fresh_process, time_and_peak

BATCHES = {str(n): {"batch_size": n} for n in (8, 16, 32, 64, 128)}
WIDTHS = {str(n): {"conv_channels": n} for n in (16, 32, 64, 128)}
TYPES: dict[str, Any] = {str(n): {"sizes": (32, n, n, n)} for n in (4, 8, 16)}


def scale(
    build: Callable[..., Step], label: str, values: dict[str, dict[str, Any]], threads: list[int], repetitions: int
) -> dict[str, Any]:
    """A row per value of ``label``: milliseconds, then peak MiB, for each number of threads, each in a new process."""
    columns = [f"{n} thread{'s' * (n > 1)}, {unit}" for unit in ("ms", "MiB") for n in threads]
    rows = []
    for value, arguments in values.items():
        given = {"build": build, "repetitions": repetitions, **arguments}
        times, peaks = zip(*(in_fresh_process(time_and_peak, threads=n, **given) for n in threads), strict=True)
        rows.append([value, *(round(1e3 * seconds, 2) for seconds in times), *map(round, peaks)])
    return {"columns": [label, *columns], "rows": rows}


def measure(repetitions: int, n_threads: int) -> dict[str, Any]:
    """All tables, with one thread and with ``n_threads``."""
    threads, few = sorted({1, n_threads}), max(3, repetitions // 20)

    def table(module: Any, label: str, values: dict[str, dict[str, Any]], n: int = repetitions) -> dict[str, Any]:
        return scale(module.numpy_step, label, values, threads, n)

    digits: dict[str, Any] = {"default, batch 32": {}, "paper, batch 128": {"batch_size": 128, "conv_channels": 256}}
    matrix: dict[str, Any] = {"8 types, batch 32": {}, "paper, batch 32": {"sizes": (32, 32, 32, 32)}}
    return {
        "multimnist_batch": table(multimnist, "batch size", BATCHES),
        "smallnorb_batch": table(smallnorb, "batch size", BATCHES),
        "matrix_capsules_batch": table(conv_matrix_capsules, "batch size", BATCHES),
        "multimnist_width": table(multimnist, "conv1 channels", WIDTHS),
        "matrix_capsules_width": table(conv_matrix_capsules, "capsule types", TYPES),
        "multimnist_sizes": table(multimnist, "sizes", digits, few),
        "matrix_capsules_sizes": table(conv_matrix_capsules, "sizes", matrix, few),
    }
