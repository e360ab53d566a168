#!/usr/bin/env python3
"""Eight exercises on docs/how_capsules_work.md, and their check.

    cp exercises.py mine.py        Write your solutions into the stubs of mine.py.
    python exercises.py mine.py    See for each whether it passes, and if not, what is wrong.

All arrays are float64, and of one image: I children, J parents, D entries of a vote. ``dx`` is the gradient of the loss
with respect to x, of x's shape. A function gets correct versions of all others, so begin where you like.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def sigmoid(z: Array) -> Array:
    return 1 / (1 + np.exp(-z))


def softmax(b: Array) -> Array:  # over the last axis
    e = np.exp(b - b.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def squash(s: Array) -> Array:  # (..., D) -> the same shape
    q = (s * s).sum(axis=-1, keepdims=True) + 1e-9
    return np.sqrt(q) / (1 + q) * s


# -------------------- exercise 1


def squash_backward(dv: Array, s: Array) -> Array:
    """dv (n, D), s (n, D) -> ds (n, D), the gradient of v = squash(s). It is finite where s is 0."""
    raise NotImplementedError


# -------------------- exercise 2


def softmax_backward(dc: Array, c: Array) -> Array:
    """dc (n, J), c (n, J) -> db (n, J), the gradient of c = softmax(b)."""
    raise NotImplementedError


# -------------------- exercise 3


def dynamic_routing(u_hat: Array, n_iters: int) -> tuple[Array, list[tuple[Array, Array, Array]]]:
    """Votes (I, J, D) -> v (J, D), and a list of (c, s, v) of every iteration. [Sabour 2017, procedure 1]

    Couplings c (I, J), whose sum over the parents is 1; inputs s (J, D); outputs v (J, D). The logits b are 0 at first.
    """
    raise NotImplementedError


# -------------------- exercise 4


def dynamic_routing_backward(dv: Array, u_hat: Array, steps: list[tuple[Array, Array, Array]]) -> Array:
    """dv (J, D), u_hat (I, J, D), steps as dynamic_routing returns them -> du_hat (I, J, D), through all iterations."""
    raise NotImplementedError


# -------------------- exercise 5


def m_step(
    r: Array, a: Array, votes: Array, beta_a: Array, beta_v: Array, lam: float, floor: float
) -> tuple[Array, Array, Array]:
    """Assignments r (I, J), activations a (I,), votes (I, J, D), beta_a and beta_v (J,) -> mu (J, D), sigma_sq (J, D),
    and z (J,), whose sigmoid is the parent's activation. [Hinton 2018, procedure 1]

    ``floor`` is added to the variance; the mass is sum_i r a + 1e-8; beta_v is counted once for each of the D entries.
    """
    raise NotImplementedError


def m_step_backward(
    dmu: Array, dsigma_sq: Array, dz: Array,
    r: Array, a: Array, votes: Array, beta_a: Array, beta_v: Array, lam: float, floor: float,
) -> tuple[Array, Array, Array, Array, Array]:  # fmt: skip
    """-> dr (I, J), da (I,), dvotes (I, J, D), dbeta_a (J,), dbeta_v (J,)."""
    raise NotImplementedError


# -------------------- exercise 6


def e_step(mu: Array, sigma_sq: Array, z: Array, votes: Array) -> Array:
    """Gaussians mu and sigma_sq (J, D), z (J,), votes (I, J, D) -> assignments r (I, J), whose sum over the parents is
    1: r is proportional to sigmoid(z) times the density of the vote. Compute it in logarithms."""
    raise NotImplementedError


def e_step_backward(
    dr: Array, r: Array, mu: Array, sigma_sq: Array, z: Array, votes: Array
) -> tuple[Array, Array, Array, Array]:
    """dr (I, J), r as e_step returns it -> dmu (J, D), dsigma_sq (J, D), dz (J,), dvotes (I, J, D)."""
    raise NotImplementedError


# -------------------- exercise 7


def margin_loss(v: Array, target: Array) -> tuple[float, Array]:
    """Digit capsules v (J, D), target (J,) of 0 and 1 -> the loss, and dv (J, D). [Sabour 2017, eq. 4]"""
    raise NotImplementedError


# -------------------- exercise 8


def spread_loss(a: Array, true: int, margin: float) -> tuple[float, Array]:
    """Activations a (J,), the index of the true class, the margin -> the loss, and da (J,). [Hinton 2018, eq. 3]"""
    raise NotImplementedError


# ----------------------------------------------------------------------------------------------------------------------
# The check. There is nothing to change below, and reading it gives the forward passes away.
# ----------------------------------------------------------------------------------------------------------------------

import argparse  # noqa: E402
import functools  # noqa: E402
import importlib.util  # noqa: E402
import itertools  # noqa: E402
import re  # noqa: E402
from collections.abc import Callable, Iterator, Mapping, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from types import MappingProxyType  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

TOLERANCE = 1e-6  # of the largest entry


class Marks:
    """Stands in a forward pass wherever a term of its gradient, or a part of its value, may be left out."""

    def __init__(self, left_out: Sequence[str] = ()) -> None:
        self.left_out, self.terms, self.parts = left_out, dict[str, None](), dict[str, None]()
        self.kept: dict[tuple[str, int], Array] = {}

    def term(self, label: str, value: Array, t: int = 0) -> Array:
        """Left out, it keeps its first value, so that differences lack what goes through it."""
        self.terms[label] = None
        return self.kept.setdefault((label, t), np.array(value)) if label in self.left_out else value

    def part(self, label: str, value: Any, instead: Any) -> Any:
        self.parts[label] = None
        return instead if label in self.left_out else value


def marked_squash(mark: Marks, s: Array) -> tuple[Array, ...]:
    q = mark.term("through the length |s|", (s * s).sum(axis=-1, keepdims=True) + 1e-9)
    return (np.sqrt(q) / (1 + q) * mark.term("along dv, f(q) dv", s),)


def marked_softmax(mark: Marks, b: Array) -> tuple[Array, ...]:
    e = np.exp(b)
    total = mark.term("through the sum of all exponentials", e.sum(axis=-1, keepdims=True))
    return (mark.term("of the logit's own exponential", e) / total,)


def marked_routing(mark: Marks, u_hat: Array, n_iters: int) -> tuple[Array, ...]:
    b, couplings = np.zeros(u_hat.shape[:2]), []
    for t in range(n_iters):
        wrong = softmax(b.T).T
        c = mark.part("wrong axis: the softmax runs over the children; it belongs over the parents", softmax(b), wrong)
        c = mark.term("through the couplings c", c, t)
        s = np.einsum("ij,ijd->jd", c, mark.term("of the votes in the weighted sum s", u_hat, t))
        v = mark.part("squash is missing", squash(s), s)
        couplings.append(c)
        votes = mark.term("of the votes in the agreement", u_hat, t)
        agreement = np.einsum("ijd,jd->ij", votes, mark.term("of the outputs v in the agreement", v, t))
        agreement = mark.part("the agreement has the wrong sign", agreement, -agreement)
        earlier = mark.term("of the logits b of earlier iterations", b, t)
        b = agreement + mark.part("a term is missing: b grows by the agreement, and is not replaced by it", earlier, 0)
    return v, np.stack(couplings)


def marked_m_step(
    mark: Marks, r: Array, a: Array, votes: Array, beta_a: Array, beta_v: Array, lam: float = 0.7, floor: float = 0.3
) -> tuple[Array, ...]:
    g = r * mark.part("a term is missing: the activations a of the children", a[:, None], 1)
    mass = g.sum(axis=0) + 1e-8
    wrong = g.sum(axis=1, keepdims=True) + 1e-8
    over = mark.part("wrong axis: the mass is a sum over the children, not over the parents", mass, wrong)
    weight = g / mark.term("through the mass in the weights", over)
    mu = np.einsum("ij,ijd->jd", mark.term("of the weights in mu", weight), mark.term("of the votes in mu", votes))
    error = mark.term("of the votes in sigma_sq", votes) - mu
    sigma_sq = np.einsum("ij,ijd->jd", mark.term("of the weights in sigma_sq", weight), error**2)
    sigma_sq = sigma_sq + mark.part("a term is missing: the floor", floor, 0)
    log_sigma = 0.5 * np.log(mark.term("through sigma_sq in the cost", sigma_sq))
    log_sigma = mark.part("the logarithm is that of sigma, half of that of sigma_sq", log_sigma, 2 * log_sigma)
    cost = mark.part("a term is missing: beta_v counts once for each entry", beta_v * mu.shape[1], beta_v)
    cost = cost + log_sigma.sum(axis=1)
    cost = cost * mark.part(
        "a factor is missing in the cost: the mass", mark.term("through the mass in the cost", mass), 1
    )
    cost = mark.part("the cost has the wrong sign in z", cost, -cost)
    return mu, sigma_sq, mark.part("a factor is missing: the inverse temperature lam", lam, 1) * (beta_a - cost)


def marked_e_step(mark: Marks, mu: Array, sigma_sq: Array, z: Array, votes: Array) -> tuple[Array, ...]:
    log_a = mark.part("a term is missing: the activation, log sigmoid(z)", -np.logaddexp(0, -z), 0)
    square = (votes - mu) ** 2 / mark.term("of sigma_sq under the squared error", sigma_sq)
    square = mark.part("the squared error has the wrong sign", square, -square)
    log_sigma_sq = np.log(mark.term("of log sigma_sq", sigma_sq))
    log_sigma_sq = mark.part("a term is missing: log sigma_sq", log_sigma_sq, 0)
    log_ap = log_a - 0.5 * (square + log_sigma_sq).sum(axis=2)
    e = np.exp(log_ap)
    total = mark.term("through the sum over the parents in the softmax", e.sum(axis=1, keepdims=True))
    wrong = e.sum(axis=0)
    return (e / mark.part("wrong axis: r sums to 1 over the parents, not over the children", total, wrong),)


def marked_margin(mark: Marks, v: Array, target: Array) -> tuple[Array, ...]:
    square = (v * v).sum(axis=1)
    length = np.sqrt(mark.part("the length is the root of the sum of squares", square + 1e-9, square**2))
    short = mark.part("a term is missing: digits in the image", target * np.maximum(0, 0.9 - length), 0)
    long = mark.part("a term is missing: digits not in the image", (1 - target) * np.maximum(0, length - 0.1), 0)
    short, long = mark.term("of the digits in the image", short), mark.term("of the digits not in the image", long)
    half = mark.part("a factor is missing: 0.5 for digits not in the image", 0.5, 1)
    power = mark.part("the squares are missing", 2, 1)
    return (np.sum(short**power) + half * np.sum(long**power),)


def marked_spread(mark: Marks, a: Array, true: int = 2, margin: float = 0.9) -> tuple[Array, ...]:
    gap = mark.term("of the true class", a[true]) - mark.term("of the wrong classes", a)
    gap = mark.part("the difference has the wrong sign: true minus wrong", gap, -gap)
    short = np.maximum(0, margin - gap)
    own = mark.part("the sum is over the wrong classes alone", 0, short[true])
    return (np.sum(np.delete(short, true) ** mark.part("the squares are missing", 2, 1)) + own**2,)


def page() -> dict[str, Any]:
    """The functions of docs/how_capsules_work.md, which the tests compare with the scripts."""
    text = (Path(__file__).resolve().parent / "docs" / "how_capsules_work.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if "torch" not in block:
            exec(block, names)
    return names


FUNCTIONS = {  # and their exercises
    "squash_backward": 1, "softmax_backward": 2, "dynamic_routing": 3, "dynamic_routing_backward": 4, "m_step": 5,
    "m_step_backward": 5, "e_step": 6, "e_step_backward": 6, "margin_loss": 7, "spread_loss": 8,
}  # fmt: skip


class Case(NamedTuple):
    """One call of a student's function."""

    name: str
    args: tuple[Any, ...]
    outputs: str  # their names
    forward: Callable[..., tuple[Array, ...]]
    inputs: Mapping[str, Array] = MappingProxyType({})  # of ``forward``, in the gradients' order; empty: compare values
    douts: tuple[Array, ...] = ()
    take: Callable[[Any], Any] = lambda out: out  # what is compared of the function's result
    apart: tuple[str, dict[int, int], dict[int, int]] | None = None  # what does not mix: its axis in args and outputs
    no_sum: tuple[str, tuple[Any, ...]] | None = None  # arguments for which a sum along a wrong axis alone matters
    edge: tuple[str, tuple[Any, ...]] | None = None  # arguments for which the result must be finite


def loss_of(result: tuple[float, Array]) -> float:
    loss, _ = result
    return loss


def gradient_of(result: tuple[float, Array]) -> Array:
    _, gradient = result
    return gradient


def cases(ours: dict[str, Any]) -> list[Case]:
    rng, (I, J, D) = np.random.default_rng(5), (5, 4, 3)
    normal, s, b, u_hat = rng.normal, rng.normal(size=(I, D)), rng.normal(size=(I, J)), rng.normal(size=(I, J, D))
    dv, dc, dr, dvotes = normal(size=(I, D)), normal(size=(I, J)), normal(size=(I, J)), normal(size=(J, D))
    r, a, votes = rng.dirichlet(np.ones(J), I), rng.uniform(0.2, 0.9, I), normal(size=(I, J, D))
    fit = {"r": r, "a": a, "votes": votes, "beta_a": normal(size=J), "beta_v": normal(size=J)}
    dfit = normal(size=(J, D)), normal(size=(J, D)), normal(size=J)
    mu, sigma_sq, z = normal(size=(J, D)), rng.uniform(0.5, 2, (J, D)), normal(size=J)
    gaussians = {"mu": mu, "sigma_sq": sigma_sq, "z": z, "votes": votes}
    equal, far = {**fit, "votes": 0 * votes}, {**gaussians, "votes": 100 * votes}
    v, target, acts = 0.35 * normal(size=(6, D)), np.array([0.0, 1, 0, 0, 1, 0]), rng.uniform(0.1, 0.9, 5)
    more, one = (0.7, 0.3), (np.ones(()),)  # lam and floor, the gradient of a loss
    routing, single = ours["dynamic_routing"], u_hat[:, :1]
    return [
        Case("squash_backward", (dv, s), "ds", marked_squash, {"s": s}, (dv,),
             apart=("vectors", {0: 0, 1: 0}, {0: 0}), edge=("s = 0", (dv, 0 * s))),
        Case("softmax_backward", (dc, softmax(b)), "db", marked_softmax, {"b": b}, (dc,),
             apart=("children", {0: 0, 1: 0}, {0: 0})),
        Case("dynamic_routing", (u_hat, 3), "v c", marked_routing,
             take=lambda out: (out[0], np.stack([step[0] for step in out[1]]))),
        *(Case("dynamic_routing_backward", (dvotes, u_hat, routing(u_hat, n_iters)[1]), "du_hat",
               functools.partial(marked_routing, n_iters=n_iters), {"u_hat": u_hat},
               (dvotes, np.zeros((n_iters, I, J))),
               no_sum=("the couplings of a single parent are 1", (dvotes[:1], single, routing(single, 3)[1])))
          for n_iters in (2, 3)),
        Case("m_step", (*fit.values(), *more), "mu sigma_sq z", marked_m_step,
             apart=("parents", {0: 1, 2: 1, 3: 0, 4: 0}, {0: 0, 1: 0, 2: 0}),
             edge=("votes that are all equal", (*equal.values(), *more))),
        Case("m_step_backward", (*dfit, *fit.values(), *more), "dr da dvotes dbeta_a dbeta_v", marked_m_step, fit, dfit,
             apart=("parents", {0: 0, 1: 0, 2: 0, 3: 1, 5: 1, 6: 0, 7: 0}, {0: 1, 2: 1, 3: 0, 4: 0})),
        Case("e_step", tuple(gaussians.values()), "r", marked_e_step,
             apart=("children", {3: 0}, {0: 0}), edge=("votes far from all parents", tuple(far.values()))),
        Case("e_step_backward", (dr, ours["e_step"](*gaussians.values()), *gaussians.values()),
             "dmu dsigma_sq dz dvotes", marked_e_step, gaussians, (dr,),
             apart=("children", {0: 0, 1: 0, 5: 0}, {3: 0})),
        Case("margin_loss", (v, target), "loss", marked_margin, take=loss_of),
        Case("margin_loss", (v, target), "dv", lambda mark, v: marked_margin(mark, v, target), {"v": v}, one,
             take=gradient_of, apart=("capsules", {0: 0, 1: 0}, {0: 0})),
        Case("spread_loss", (acts, 2, 0.9), "loss", marked_spread, take=loss_of),
        Case("spread_loss", (acts, 2, 0.9), "da", marked_spread, {"a": acts}, one, take=gradient_of),
    ]  # fmt: skip


def differences(case: Case, mark: Marks) -> tuple[Array, ...]:
    """The gradient by central differences, without the terms that ``mark`` leaves out."""
    inputs = {name: x.copy() for name, x in case.inputs.items()}

    def loss() -> float:
        return float(
            sum((out * dout).sum() for out, dout in zip(case.forward(mark, **inputs), case.douts, strict=True))
        )

    loss()  # what is left out is kept from here
    grads = tuple(np.zeros_like(x) for x in inputs.values())
    for x, grad in zip(inputs.values(), grads, strict=True):
        for k in np.ndindex(x.shape):
            middle = x[k]
            up, down = (x.__setitem__(k, middle + step) or loss() for step in (1e-5, -1e-5))
            x[k], grad[k] = middle, (up - down) / 2e-5
    return grads


def expected(case: Case, left_out: tuple[str, ...] = ()) -> tuple[tuple[Array, ...], Marks]:
    mark = Marks(left_out)
    return (differences(case, mark) if case.inputs else case.forward(mark, *case.args)), mark


def close(a: Array, b: Array) -> bool:
    return a.shape == b.shape and bool(np.abs(a - b).max() <= TOLERANCE * max(1e-3, np.abs(b).max()))


def fault_of(got: Array, want: Array, others: Iterator[tuple[str, Array]], are_terms: bool) -> str:
    """What is wrong with an output, in words; "" where nothing is. ``others``: what it is if a part is left out."""
    if got.shape != want.shape:
        return f"has shape {got.shape} and not {want.shape}: look at the axes"
    if not np.isfinite(got).all():
        return "is not finite"
    if close(got, want):
        return ""
    if close(got, -want):
        return "has the wrong sign"
    if are_terms and got.size > 1 and close(got, (k := np.vdot(got, want) / np.vdot(want, want)) * want):
        return f"is {k:.3g} times what it should be"
    for label, other in others:
        if close(other, want):
            continue
        term = want - other
        if close(got, other):
            return f"lacks a term: {label}" if are_terms else label
        if are_terms and close(got, other - term):
            return f"has the wrong sign in a term: {label}"
        if (
            are_terms
            and got.size > 1
            and close(got, other + (k := np.vdot(got - other, term) / np.vdot(term, term)) * term)
        ):
            return f"has {k:.3g} times a term: {label}"
    return f"is wrong in {int((np.abs(got - want) > TOLERANCE * np.abs(want).max()).sum())} of {got.size} entries"


def faults(case: Case, function: Callable[..., Any], ours: Callable[..., Any]) -> Iterator[str]:
    def run(f: Callable[..., Any], args: tuple[Any, ...]) -> list[Array]:
        copies = [x.copy() if isinstance(x, np.ndarray) else x for x in args]
        with np.errstate(all="ignore"):
            result = f(*copies)
        if result is None:
            raise ValueError("nothing is returned")
        result = case.take(result)
        return [np.asarray(x, float) for x in (result if isinstance(result, tuple) else (result,))]

    names, got, wanted = case.outputs.split(), run(function, case.args), run(ours, case.args)
    if len(got) != len(names):
        yield f"returns {len(got)} arrays and not {len(names)}: {', '.join(names)}"
        return
    by_differences, mark = expected(case)
    if all(close(g, w) and close(g, d) for g, w, d in zip(got, wanted, by_differences, strict=True)):
        if case.edge and not all(np.isfinite(x).all() for x in run(function, case.edge[1])):
            yield f"is not finite for {case.edge[0]}"
        return
    labels = list(mark.terms if case.inputs else mark.parts)
    sets = [(label,) for label in labels] + (list(itertools.combinations(labels, 2)) if case.inputs else [])
    without = functools.cache(lambda left_out: expected(case, left_out)[0])
    for k, name in enumerate(names):
        others = ((" and ".join(left_out), without(left_out)[k]) for left_out in sets)
        fault = fault_of(got[k], wanted[k], others, bool(case.inputs))
        if fault.startswith("is wrong in") and case.no_sum:
            reason, single = case.no_sum
            if not close(run(function, single)[k], run(ours, single)[k]):
                fault = f"has a wrong axis in the gradient of softmax: {reason}"
        if fault.startswith("is wrong in") and case.apart and k in case.apart[2]:
            what, of_args, of_outputs = case.apart
            first = tuple(x.take([0], of_args[n]) if n in of_args else x for n, x in enumerate(case.args))
            if not close(run(function, first)[k], got[k].take([0], of_outputs[k])):
                fault = f"has a wrong axis: {what} are added up that do not depend on each other"
        if fault:
            yield f"{name} {fault}"


def check(path: Path, names: Sequence[str] = tuple(FUNCTIONS)) -> Iterator[tuple[str, str]]:
    """The functions of the file ``path``, each with what is wrong with it, or ""."""
    spec = importlib.util.spec_from_file_location("mine", path)
    assert spec
    assert spec.loader
    mine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mine)
    ours = page()
    e_step = ours["e_step"]
    ours["e_step"] = lambda *gaussians: e_step(*gaussians, True)  # on the page some parents may not be seen
    theirs = {name: getattr(mine, name, None) for name in names}
    for name, group in itertools.groupby(cases(ours), lambda case: case.name):
        if name not in names:
            continue
        vars(mine).update({other: ours[other] for other in FUNCTIONS if other != name})
        try:
            function = theirs[name]
            if function is None:
                raise NotImplementedError
            found = next(filter(None, (list(faults(case, function, ours[name])) for case in group)), [])
        except NotImplementedError:
            found = ["is not written yet"]
        except Exception as error:
            found = [" ".join(f"ends in {type(error).__name__}: {error}".split())]
            if isinstance(error, ValueError) and "shape" in str(error):
                found[0] += "; is a sum along the wrong axis?"
        yield name, "; ".join(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="your copy of this file")
    path = parser.parse_args().file
    try:
        found = list(check(path))
    except Exception as error:
        parser.error(" ".join(f"{path}: {type(error).__name__}: {error}".split()))
    for name, fault in found:
        print(f"{FUNCTIONS[name]}  {name:<25}", fault or "passes")
    print(f"{sum(not fault for _, fault in found)} of {len(found)} functions pass")
    return int(any(fault for _, fault in found))


if __name__ == "__main__":
    raise SystemExit(main())
