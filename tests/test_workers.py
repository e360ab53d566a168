"""fast/workers.py: parts of a batch on several threads, and the BLAS beside them."""

from __future__ import annotations

import threading
from typing import NamedTuple

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


def batch_of(n: int) -> Batch:
    rng = np.random.default_rng(n)
    return Batch(rng.standard_normal((n, 5)), rng.standard_normal(n))


PARAMS = {"w": np.linspace(-1, 1, 5), "b": np.array([0.5])}


def squared_error(params: dict[str, Array], part: Batch, n: int) -> tuple[dict[str, float], dict[str, Array]]:
    error = part.x @ params["w"] + params["b"] - part.labels
    grads = {"w": 2 / n * part.x.T @ error, "b": np.full(params["b"].shape, 2 / n * error.sum())}
    return {"loss": float(error @ error) / n, "mean": float(error.sum()) / n}, grads


def gradients(n_threads: int, n: int, part_size: int | None = None) -> tuple[dict[str, float], list[dict[str, Array]]]:
    with Workers(n_threads) as workers:
        return workers.gradients(squared_error, PARAMS, batch_of(n), part_size)


def check_parts() -> None:
    """Their sum is the whole batch's gradient."""
    for n in (1, 3, 27, 40):
        expected, whole = squared_error(PARAMS, batch_of(n), n)
        for n_threads, part_size in ((1, None), (2, None), (3, None), (8, None), (1, 4), (3, 4)):
            losses, parts = gradients(n_threads, n, part_size)
            n_parts = min(n_threads, max(1, n // LEAST_PART)) if part_size is None else -(-n // part_size)
            if len(parts) != n_parts or not np.allclose([*losses.values()], [*expected.values()], rtol=1e-9):
                raise GradientError(f"{len(parts)} parts, {losses}")
            for key in PARAMS:
                if not np.allclose(sum(part[key] for part in parts), whole[key], rtol=1e-12):
                    raise GradientError(f"the parts of {key} do not add up")


def test_parts_are_the_whole_batch_and_an_error_is_seen(monkeypatch: Patch) -> None:
    assert surviving_mutants(monkeypatch, Workers, "gradients", check_parts) == []


def test_parts_of_a_fixed_size_do_not_depend_on_threads_and_all_come_in_order() -> None:
    (one, first), *others = (gradients(n_threads, 27, 4) for n_threads in (1, 2, 3, 8))
    assert len(first) == 7
    for losses, parts in others:
        assert losses == one
        np.testing.assert_equal(parts, first)


def test_work_is_done_in_order_concurrently_by_threads() -> None:
    barrier = threading.Barrier(3, timeout=20)

    def work(item: int) -> tuple[int, int]:
        barrier.wait()  # which lets nobody through before all three are here
        return item, threading.get_ident()

    with Workers(3) as workers:
        items, threads = zip(*workers.map(work, range(3)), strict=True)
        assert items == (0, 1, 2)
        assert len(set(threads)) == 3
        assert workers.map(lambda item: threading.get_ident(), [1]) == [threading.get_ident()]
    assert SERIAL.map(lambda item: item**2, range(4)) == [0, 1, 4, 9]


def test_threads_take_over_what_numpy_shall_do_with_errors() -> None:
    """And an error in a thread reaches the caller."""
    def divide(item: int) -> float:
        return float(np.ones(1)[0] / np.zeros(1)[0])

    for n_threads in (1, 2):
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
        first, second = blas_threads(1), blas_threads(1)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert blas_now() == {1}
        second.__exit__(None, None, None)
        assert blas_now() == {2}


def test_as_many_threads_as_processors_and_at_most_four(monkeypatch: Patch) -> None:
    for n_cpus, expected in ((1, 1), (3, 3), (64, 4)):
        monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid, n=n_cpus: set(range(n)), raising=False)
        assert default_threads() == expected
    monkeypatch.undo()
    for script in THREADED:
        assert load(script).Options().threads == default_threads()


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
