"""fast/workers.py: parts of a batch on several threads, and the BLAS beside them."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import pytest
import threadpoolctl

from fast import workers as module
from fast.workers import LEAST_PART, SERIAL, Workers, blas_threads, default_threads
from helpers import Array, Capture, GradientError, Patch, load, surviving_mutants

THREADED = ("multimnist_capsnet", "mnist_affine_capsnet", "conv_matrix_capsules", "capsule_attacks", "your_own_images",
            "make_toy_norb")  # those whose --threads is by default as many as there are processors


class Batch(NamedTuple):
    x: Array  # (B, M)
    labels: Array  # (B,)

    def part(self, start: int, stop: int) -> Batch:
        return Batch(self.x[start:stop], self.labels[start:stop])


PARAMS = {"w": np.linspace(-1, 1, 5), "b": np.array([0.5])}


def squared_error(params: dict[str, Array], part: Batch, n: int) -> tuple[dict[str, float], dict[str, Array]]:
    error = part.x @ params["w"] + params["b"] - part.labels
    grads = {"w": 2 / n * part.x.T @ error, "b": np.full(params["b"].shape, 2 / n * error.sum())}
    return {"loss": float(error @ error) / n, "mean": float(error.sum()) / n}, grads


def check_parts() -> None:
    """Their sum is the whole batch's gradient. Those of a fixed size come in order, whatever the number of threads."""
    for n in (1, 3, 27, 40):
        rng = np.random.default_rng(n)
        batch, of_size = Batch(rng.standard_normal((n, 5)), rng.standard_normal(n)), list[Any]()
        expected, whole = squared_error(PARAMS, batch, n)
        for n_threads, part_size in ((1, None), (2, None), (3, None), (8, None), (1, 4), (3, 4)):
            with Workers(n_threads) as workers:
                losses, parts = workers.gradients(squared_error, PARAMS, batch, part_size)
            n_parts = min(n_threads, max(1, n // LEAST_PART)) if part_size is None else -(-n // part_size)
            if len(parts) != n_parts or not np.allclose([*losses.values()], [*expected.values()], rtol=1e-9):
                raise GradientError(f"{len(parts)} parts, {losses}")
            for key in PARAMS:
                if not np.allclose(sum(part[key] for part in parts), whole[key], rtol=1e-12):
                    raise GradientError(f"the parts of {key} do not add up")
            of_size += [(losses, parts)] * (part_size is not None)
        np.testing.assert_equal(of_size[1], of_size[0])


def test_parts_are_the_whole_batch_and_an_error_is_seen(monkeypatch: Patch) -> None:
    assert surviving_mutants(monkeypatch, Workers, "gradients", check_parts) == []


def test_work_is_done_in_order_concurrently_by_threads() -> None:
    barrier = threading.Barrier(3, timeout=20)

    def work(item: int) -> tuple[int, int]:
        barrier.wait()  # which lets nobody through before all three are here
        return item, threading.get_ident()

    with Workers(3) as workers:
        items, threads = zip(*workers.map(work, range(3)), strict=True)
    assert items == (0, 1, 2)
    assert len(set(threads)) == 3
    assert SERIAL.map(lambda item: item**2, range(4)) == [0, 1, 4, 9]


@pytest.mark.parametrize("n_threads", [1, 2])
def test_threads_take_over_what_numpy_shall_do_with_errors(n_threads: int) -> None:
    """And an error in a thread reaches the caller."""
    def divide(item: int) -> float:
        return float(np.ones(1)[0] / np.zeros(1)[0])

    with Workers(n_threads) as workers:
        with np.errstate(all="ignore"):
            assert workers.map(divide, range(3)) == [np.inf] * 3
        with np.errstate(all="raise"), pytest.raises(FloatingPointError):
            workers.map(divide, range(3))


@pytest.fixture(autouse=True)
def _libraries_of_now() -> None:
    """Other tests may have loaded SciPy's BLAS since the first limit."""
    module.blas_libraries.cache_clear()


def blas_now() -> set[int]:
    return {lib["num_threads"] for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "blas"}


def test_the_blas_is_limited_inside_alone() -> None:
    """The last of several limits frees it: as of two trainings of a notebook, the first of which ends first."""
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        for context in (Workers(2), Workers(1)):
            with context:
                assert blas_now() == {1}
            assert blas_now() == {2}
        with blas_threads(1):
            with blas_threads(2):
                pass
            assert blas_now() == {1}, "the limit around it holds again"
        limits = blas_threads(1), blas_threads(1)
        for limit in limits:
            limit.__enter__()
        for limit, expected in zip(limits, (1, 2), strict=True):
            limit.__exit__(None, None, None)
            assert blas_now() == {expected}


def test_as_many_threads_as_processors_and_at_most_four(monkeypatch: Patch) -> None:
    for script in THREADED:
        assert load(script).Options().threads == default_threads()
    for n_cpus, expected in ((1, 1), (3, 3), (64, 4)):
        monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid, n=n_cpus: set(range(n)), raising=False)
        assert default_threads() == expected


@pytest.mark.parametrize("n_started", [0, 1, 2])
def test_threads_that_cannot_be_started(n_started: int, monkeypatch: Patch, capsys: Capture) -> None:
    """The system starts so many of four, and no more at any time."""
    start, running = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        running[:] = [one for one in running if one.is_alive()]
        if len(running) == n_started:
            raise RuntimeError("can't start new thread")
        start(thread)
        running.append(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with Workers(4) as workers:
        assert workers.map(lambda x: x * x, range(9)) == [x * x for x in range(9)]
    assert capsys.readouterr().err == f"warning: 4 threads cannot be started here: {max(1, n_started)} in use\n"
