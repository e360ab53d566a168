"""Threads that work on parts of a batch, and memory that the next step finds again.

numpy releases Python's lock while it computes, so threads run concurrently. The BLAS has one thread meanwhile: all of a
step is divided among the threads, not the matrix products alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

Array = np.ndarray
LEAST_PART = 8  # examples; a thread for fewer would cost more than it saves
Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers:
    """``n_threads`` threads. Used as a context, in which the BLAS has one thread; outside of it ``map`` has no threads.
    From the first context on, the process keeps up to 2 GiB of freed arrays below 32 MiB (``keep_freed_memory``)."""

    def __init__(self, n_threads: int = 1) -> None:
        self.n_threads = n_threads
        self._pool: ThreadPoolExecutor | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Workers:
        keep_freed_memory()
        self._stack.enter_context(blas_threads(1))
        self._pool = started_pool(self.n_threads)
        if self._pool:
            self._stack.enter_context(self._pool)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool = None
        self._stack.close()

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """``[work(item) for item in items]``, computed concurrently. ``work`` must not call it: it would never end."""
        items = list(items)
        if self._pool is None or len(items) == 1:
            return [work(item) for item in items]
        errors = np.geterr()  # a thread does not take it over from its caller

        def with_errors(item: Item) -> Result:
            with np.errstate(**errors):
                return work(item)

        return list(self._pool.map(with_errors, items))

    def gradients(
        self,
        loss_and_grads: Callable[[dict[str, Array], Any, int], tuple[dict[str, float], dict[str, Array]]],
        params: dict[str, Array],
        batch: Any,  # with ``labels`` (B, ...) and ``part(start, stop)``
        part_size: int | None = None,
    ) -> tuple[dict[str, float], list[dict[str, Array]]]:
        """Mean losses of a batch, and a list of gradients, one for each part of the batch, whose sum is the gradient.

        ``loss_and_grads(params, part, n)`` gives a part's terms of the mean losses over all ``n`` examples, and of
        their gradient. With ``part_size`` a part has at most so many examples, and results do not depend on the number
        of threads; without, each thread has one part, of ``LEAST_PART`` examples or more.
        """
        n = len(batch.labels)
        n_parts = math.ceil(n / part_size) if part_size else min(self.n_threads, max(1, n // LEAST_PART))

        def work(k: int) -> tuple[dict[str, float], dict[str, Array]]:
            return loss_and_grads(params, batch.part(n * k // n_parts, n * (k + 1) // n_parts), n)

        losses, grads = zip(*self.map(work, range(n_parts)), strict=True)
        return {key: sum(part[key] for part in losses) for key in losses[0]}, list(grads)


def started_pool(n_threads: int) -> ThreadPoolExecutor | None:
    """A pool whose threads run; of fewer where the system starts no more, which a line says; None for one thread."""
    if n_threads < 2:
        return None
    pool, gate, n_started = ThreadPoolExecutor(n_threads), threading.Event(), 0
    try:
        for _ in range(n_threads):
            pool.submit(gate.wait)  # or the first thread would take the next job too
            n_started += 1
    except RuntimeError:
        print(f"warning: {n_threads} threads cannot be started here: {max(1, n_started)} in use", file=sys.stderr)
    finally:
        gate.set()
    if n_started == n_threads:
        return pool
    pool.shutdown()
    return started_pool(n_started)


SERIAL = Workers(1)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h


@functools.cache
def keep_freed_memory() -> None:
    """Let the arrays that a step frees serve the next one. glibc gives large ones back to the system, and a step then
    pays for all of its memory anew, page by page: half of the time of a spectral convolution. Other C libraries are
    left as they are."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # no mallopt, or no C library to ask
        libc = ctypes.CDLL(None)
        for option, value in ((M_MMAP_THRESHOLD, 1 << 25), (M_TRIM_THRESHOLD, (1 << 31) - 1), (M_ARENA_MAX, 1)):
            libc.mallopt(option, value)


@functools.cache
def blas_libraries() -> list[tuple[ctypes.CDLL, str]]:
    """Each OpenBLAS (or MKL) that this process has loaded, and the form of the names of its functions."""
    package = Path(np.__file__).parent
    places = [path for place in ("../numpy.libs", ".dylibs", ".libs") for path in (package / place).glob("*blas*")]
    conda = ("Library/bin/*openblas*.dll", "Library/bin/mkl_rt*.dll", "lib/libopenblas*.dylib", "lib/libmkl_rt*.dylib")
    places = places or [path for pattern in conda for path in Path(sys.base_prefix).glob(pattern)]
    with contextlib.suppress(OSError):  # Linux alone has this list
        maps = Path("/proc/self/maps").read_text("utf-8", "replace").splitlines()
        loaded = (line.split(maxsplit=5)[-1] for line in maps)
        places = sorted({Path(path) for path in loaded if re.search(r"/[^/]*(blas|mkl_rt)[^/]*$", path)})
    forms = [f"{prefix}openblas_{{}}{end}" for prefix in ("scipy_", "") for end in ("64_", "", "_64")]
    found = []
    for path in places:
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(str(path))
            known = [form for form in [*forms, "MKL_{}"] if hasattr(library, form.format(SET[form[0] == "M"]))]
            found += [(library, form) for form in known[:1]]
    return found


GET, SET = ("get_num_threads", "Get_Max_Threads"), ("set_num_threads", "Set_Num_Threads")  # OpenBLAS, MKL


def blas_name() -> str:
    """Version and kernels of numpy's OpenBLAS; empty for another BLAS."""
    for library, form in blas_libraries():
        if hasattr(library, name := form.format("get_config")):
            function = getattr(library, name)
            function.restype = ctypes.c_char_p
            return " ".join(function().decode(errors="replace").split())
    return ""


def set_blas_threads(n: int) -> int | None:
    """How many threads the BLAS had before; None where it is not known how to tell it."""
    before = None
    for library, form in blas_libraries():
        get, put = (getattr(library, form.format(names[form[0] == "M"])) for names in (GET, SET))
        before = get() if before is None else before
        put(n)
    return before


_limits, _lock = list[int | None](), threading.Lock()  # how many threads the BLAS had before each limit that holds


@contextlib.contextmanager
def blas_threads(n: int) -> Iterator[None]:
    """Limit the BLAS to ``n`` threads, for all threads of the process, until the last of such limits ends."""
    with _lock:
        _limits.append(set_blas_threads(n))
    try:
        yield
    finally:
        with _lock:
            before = _limits.pop()
            if before is not None:
                set_blas_threads(before)


def n_processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads() -> int:
    """One for each processor that this process may use, at most four."""
    return min(4, n_processors())
