"""Timing that survives a noisy machine: candidates take turns, and what is reported are medians and their ratios."""

from __future__ import annotations

import importlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

Shape = tuple[int, ...]
Step = Callable[[], object]


def interleave(steps: dict[str, Step], repetitions: int, warm_up: int = 5) -> dict[str, float]:
    """Median seconds of each step. In each of ``repetitions`` rounds every candidate runs twice, and the second counts:
    the first brings its own data into the cache, and lets the other's waiting threads fall asleep."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(warm_up + repetitions):
        for name, step in steps.items():
            step()
            started = time.perf_counter()
            step()
            if round_ >= warm_up:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def in_fresh_process(function: Callable[..., Any], **arguments: Any) -> Any:
    """What a function returns, or raises, that is called in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        return executor.submit(function, **arguments).result()


def time_and_peak(build: Callable[..., Step], repetitions: int, **arguments: Any) -> tuple[float, float]:
    """Median seconds of a step, and peak resident memory in MiB of this process, which builds and runs it: call it in a
    fresh one. Linux alone."""
    seconds = interleave({"step": build(**arguments)}, repetitions, warm_up=1)["step"]
    # Not ru_maxrss, which a child takes over from its parent.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("utf-8").splitlines())
    return seconds, int(status["VmHWM"].split()[0]) / 1024


def version_of(package: str) -> str | None:
    """Its version, of torch with what it was built for; None where it is not installed."""
    try:
        return str(importlib.import_module(package).__version__)
    except ImportError:
        return None


def products_step(shapes: Sequence[tuple[Shape, Shape]]) -> Step:
    """The matrix products of a training step and nothing else. For each layer, of an input (..., B, N) and weights
    (..., N, M): one for the output, one for the gradient of the weights and, but for the first, one for the input's."""
    rng = np.random.default_rng(0)
    layers = [[rng.standard_normal(shape, np.float32) for shape in pair] for pair in shapes]
    arrays = [(x, w, x @ w, np.empty_like(w), np.empty_like(x)) for x, w in layers]

    def step() -> None:
        for k, (x, w, out, dw, dx) in enumerate(arrays):
            np.matmul(x, w, out=out)
            np.matmul(x.swapaxes(-1, -2), out, out=dw)
            if k > 0:
                np.matmul(out, w.swapaxes(-1, -2), out=dx)

    return step


def torch_adam_step(
    network: Any, loss: Callable[[Any, Any], Any], x: Any, layers: Sequence[Any], threads: int = 2,
    compiled: bool = False, fused: bool = False, bfloat16: bool = False, channels_last: bool = False,
) -> Step:
    """A step of PyTorch's Adam on ``loss(network, x)``, by autograd. ``bfloat16``: under autocast; ``channels_last``:
    x and the maps of ``layers`` in the order B, H, W, C."""
    import torch

    torch.set_num_threads(threads)
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-6, fused=fused)
    if channels_last:
        for layer in layers:
            layer.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
    forward = torch.compile(network) if compiled else network

    def step() -> None:
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            value = loss(forward, x)
        value.backward()
        optimiser.step()

    return step
