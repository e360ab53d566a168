"""The roofline of a training step: its operations and bytes, counted from the shapes of its arrays while it runs, and
what the machine can do.

[Williams 2009] S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for multicore
architectures", Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import threadpoolctl

import conv_matrix_capsules
import multimnist_capsnet
import smallnorb_novel_viewpoint
from benchmarks.measure import Step
from fast import dynamic_routing, field_em, optimizers, spectral_conv, workers
from support.optimizers import TrainState

Array = np.ndarray
MODULES = (
    smallnorb_novel_viewpoint, multimnist_capsnet, conv_matrix_capsules, dynamic_routing, field_em, optimizers,
    spectral_conv, workers,
)  # fmt: skip
CREATORS = {"empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like", "full_like"}


@dataclasses.dataclass
class Work:
    """What a step does."""

    product_flops: int = 0  # of matrix products; a complex multiplication and addition are eight, a real one two
    other_flops: int = 0  # of all other numpy functions, one for each number that they compute or sum up
    call_bytes: int = 0  # that numpy calls read and write, mostly in a cache
    state_bytes: int = 0  # parameters and two moments of Adam, each read and written: no step moves less

    def least_seconds(self, flop_rate: float, bandwidth: float) -> float:
        """Of a step that does nothing but its matrix products, or moving its state. [Williams 2009]"""
        return max(self.product_flops / flop_rate, self.state_bytes / bandwidth)


_work = Work()  # of the step that is being counted


def _plain(x: Any) -> Any:
    return x.view(np.ndarray) if isinstance(x, Counted) else x


class Counted(np.ndarray):
    """An array whose use is counted: ufuncs, matrix products, ``einsum`` and assignments. What it gives is such an
    array too. Copies by ``reshape``, indexing or functions such as ``concatenate`` are not counted."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if options.get("out"):
            options["out"] = tuple(map(_plain, options["out"]))
        inputs = tuple(map(_plain, inputs))
        result = getattr(ufunc, method)(*inputs, **options)
        if ufunc is np.matmul:
            _work.product_flops += (8 if np.iscomplexobj(result) else 2) * np.size(result) * inputs[0].shape[-1]
        else:
            _work.other_flops += np.size(inputs[0] if method == "reduce" else result)
        return _counted(result, inputs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is not np.einsum:
            result = super().__array_function__(function, types, args, kwargs)
            return result.view(Counted) if isinstance(result, np.ndarray) else result
        operands = tuple(map(_plain, args[1:]))
        names = "".join(args[0].split("->")[0].split(","))
        sides = dict(zip(names, (n for x in operands for n in x.shape), strict=True))
        _work.other_flops += len(operands) * math.prod(sides.values())
        return _counted(np.einsum(args[0], *operands), operands)

    def __setitem__(self, key: Any, value: Any) -> None:
        plain = _plain(self)
        plain[key] = _plain(value)
        _work.call_bytes += np.asarray(plain[key]).nbytes + getattr(value, "nbytes", 0)


def _counted(result: Any, operands: tuple[Any, ...]) -> Any:
    _work.call_bytes += sum(x.nbytes for x in (*operands, result) if isinstance(x, np.ndarray))
    return result.view(Counted) if isinstance(result, np.ndarray) else result


class _Numpy:
    """Stands for numpy in a module: what it allocates is counted."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        return (lambda *args, **kwargs: found(*args, **kwargs).view(Counted)) if name in CREATORS else found


def count_work(build: Callable[..., Step], **arguments: Any) -> Work:
    """What a step does that ``build``, a benchmark's ``numpy_step``, makes. Threads are not expected. Call it in a
    process of its own: arrays that the modules keep are counted ever after."""
    benchmark: Any = sys.modules[build.__module__]
    states: list[TrainState] = []

    def init_state(*args: Any) -> Any:
        state = original(*args)
        state.params = {key: p.view(Counted) for key, p in state.params.items()}
        states.append(state)
        return state

    original = benchmark.init_state
    global _work
    with ExitStack() as stack:
        for module in MODULES:
            stack.enter_context(mock.patch.object(module, "np", _Numpy()))
        stack.enter_context(mock.patch.object(benchmark, "init_state", init_state))
        step = build(**arguments)
        step()  # it may compute tables once
        _work = Work(state_bytes=6 * sum(p.nbytes for p in states[0].params.values()))
        step()
    return _work


def _least(step: Step, repetitions: int) -> float:
    seconds = []
    for _ in range(1 + repetitions):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def gemm_rate(threads: int, repetitions: int = 20, side: int = 1024) -> float:
    """Floating-point operations per second of a product of two float32 matrices, in the fastest of its repetitions."""
    a, b = np.random.default_rng(0).standard_normal((2, side, side), np.float32)
    out = np.empty_like(a)
    with threadpoolctl.threadpool_limits(threads):
        return 2 * side**3 / _least(lambda: np.matmul(a, b, out=out), repetitions)


def stream_bandwidth(threads: int, repetitions: int = 20, mebibytes: int = 64) -> float:
    """Bytes per second that the sum of two float32 arrays reads and writes, each array of ``mebibytes``, divided among
    the threads, in the fastest of its repetitions."""
    arrays = np.ones((3, threads, (mebibytes << 18) // threads), np.float32)
    with ThreadPoolExecutor(threads) as pool:
        return arrays.nbytes / _least(lambda: list(pool.map(np.add, *arrays)), repetitions)
