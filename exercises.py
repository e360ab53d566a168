#!/usr/bin/env python3
"""Eight exercises on docs/how_capsules_work.md, and their check.

    cp exercises.py mine.py        Write your solutions into the stubs of mine.py.
    python exercises.py mine.py    See for each whether it passes, and if not, what is wrong.

All arrays are float64, and of one image: I children, J parents, D entries of a vote. ``dx`` is the gradient of the loss
with respect to x, of x's shape. A function gets correct versions of all others, so begin where you like.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from support.console import one_line
from support.files import UserError
from support.script import script
from support.settings import Parser

Array = np.ndarray


def sigmoid(z: Array) -> Array:
    return 1 / (1 + np.exp(-z))


def softmax(b: Array) -> Array:  # over the last axis
    e = np.exp(b - b.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def squash(s: Array) -> Array:  # (..., D) -> the same shape
    q = (s * s).sum(axis=-1, keepdims=True) + 1e-9
    return np.sqrt(q) / (1 + q) * s


# exercise 1
def squash_backward(dv: Array, s: Array) -> Array:
    """dv (n, D), s (n, D) -> ds (n, D), the gradient of v = squash(s). It is finite where s is 0."""
    raise NotImplementedError


# exercise 2
def softmax_backward(dc: Array, c: Array) -> Array:
    """dc (n, J), c (n, J) -> db (n, J), the gradient of c = softmax(b)."""
    raise NotImplementedError


# exercise 3
def dynamic_routing(u_hat: Array, n_iters: int) -> tuple[Array, list[tuple[Array, Array, Array]]]:
    """Votes (I, J, D) -> v (J, D), and a list of (c, s, v) of every iteration. [Sabour 2017, procedure 1]

    Couplings c (I, J), whose sum over the parents is 1; inputs s (J, D); outputs v (J, D). The logits b are 0 at first.
    """
    raise NotImplementedError


# exercise 4
def dynamic_routing_backward(dv: Array, u_hat: Array, steps: list[tuple[Array, Array, Array]]) -> Array:
    """dv (J, D), u_hat (I, J, D), steps as dynamic_routing returns them -> du_hat (I, J, D), through all iterations."""
    raise NotImplementedError


# exercise 5
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


# exercise 6
def e_step(mu: Array, sigma_sq: Array, z: Array, votes: Array) -> Array:
    """Gaussians mu and sigma_sq (J, D), z (J,), votes (I, J, D) -> assignments r (I, J), whose sum over the parents is
    1: r is proportional to sigmoid(z) times the density of the vote. Compute it in logarithms."""
    raise NotImplementedError


def e_step_backward(
    dr: Array, r: Array, mu: Array, sigma_sq: Array, z: Array, votes: Array
) -> tuple[Array, Array, Array, Array]:
    """dr (I, J), r as e_step returns it -> dmu (J, D), dsigma_sq (J, D), dz (J,), dvotes (I, J, D)."""
    raise NotImplementedError


# exercise 7
def margin_loss(v: Array, target: Array) -> tuple[float, Array]:
    """Digit capsules v (J, D), target (J,) of 0 and 1 -> the loss, and dv (J, D). [Sabour 2017, eq. 4]"""
    raise NotImplementedError


# exercise 8
def spread_loss(a: Array, true: int, margin: float) -> tuple[float, Array]:
    """Activations a (J,), the index of the true class, the margin -> the loss, and da (J,). [Hinton 2018, eq. 3]"""
    raise NotImplementedError


# ----------------------------------------------------------------------------------------------------------------------
# The check. There is nothing to change below, and reading it gives the forward passes away.
# ----------------------------------------------------------------------------------------------------------------------


class Terms:
    """Stands in a forward pass wherever a term of its gradient may be left out."""

    def __init__(self, left_out: str = "") -> None:
        self.left_out, self.labels, self.kept = left_out, dict[str, None](), dict[int, Array]()

    def __call__(self, label: str, value: Array, t: int = 0) -> Array:
        """Left out, it keeps its first value, so that differences lack what goes through it."""
        self.labels[label] = None
        return self.kept.setdefault(t, np.array(value)) if label == self.left_out else value


def squash_of(term: Terms, s: Array) -> tuple[Array, ...]:
    q = term("through the length |s|", (s * s).sum(axis=-1, keepdims=True) + 1e-9)
    return (np.sqrt(q) / (1 + q) * term("along dv, f(q) dv", s),)


def softmax_of(term: Terms, b: Array) -> tuple[Array, ...]:
    e = np.exp(b)
    total = term("through the sum of all exponentials", e.sum(axis=-1, keepdims=True))
    return (term("of the logit's own exponential", e) / total,)


def routing_of(term: Terms, u_hat: Array) -> tuple[Array, ...]:
    b = np.zeros(u_hat.shape[:2])
    for t in range(3):
        c = term("through the couplings c", softmax(b), t)
        v = squash(np.einsum("ij,ijd->jd", c, term("of the votes in the weighted sum s", u_hat, t)))
        votes = term("of the votes in the agreement", u_hat, t)
        agreement = np.einsum("ijd,jd->ij", votes, term("of the outputs v in the agreement", v, t))
        b = term("of the logits b of earlier iterations", b, t) + agreement
    return (v,)


def m_step_of(term: Terms, r: Array, a: Array, votes: Array, beta_a: Array, beta_v: Array) -> tuple[Array, ...]:
    g = r * a[:, None]
    mass = g.sum(axis=0) + 1e-8
    weight = g / term("through the mass in the weights", mass)
    mu = np.einsum("ij,ijd->jd", term("of the weights in mu", weight), term("of the votes in mu", votes))
    error = term("of the votes in sigma_sq", votes) - mu
    sigma_sq = np.einsum("ij,ijd->jd", term("of the weights in sigma_sq", weight), error**2) + FLOOR
    log_sigma = 0.5 * np.log(term("through sigma_sq in the cost", sigma_sq))
    cost = (beta_v * mu.shape[1] + log_sigma.sum(axis=1)) * term("through the mass in the cost", mass)
    return mu, sigma_sq, LAM * (beta_a - cost)


def e_step_of(term: Terms, mu: Array, sigma_sq: Array, z: Array, votes: Array) -> tuple[Array, ...]:
    square = (votes - mu) ** 2 / term("of sigma_sq under the squared error", sigma_sq)
    log_p = -0.5 * (square + np.log(term("of log sigma_sq", sigma_sq))).sum(axis=2)
    e = np.exp(log_p - np.logaddexp(0, -z))
    return (e / term("through the sum over the parents in the softmax", e.sum(axis=1, keepdims=True)),)


def margin_of(term: Terms, v: Array) -> tuple[Array, ...]:
    length = np.sqrt((v * v).sum(axis=1) + 1e-9)
    short = term("of the digits in the image", TARGET * np.maximum(0, 0.9 - length))
    long = term("of the digits not in the image", (1 - TARGET) * np.maximum(0, length - 0.1))
    return (np.sum(short**2) + 0.5 * np.sum(long**2),)


def spread_of(term: Terms, a: Array) -> tuple[Array, ...]:
    gap = term("of the true class", a[TRUE]) - term("of the wrong classes", np.delete(a, TRUE))
    return (np.sum(np.maximum(0, MARGIN - gap) ** 2),)


def page() -> dict[str, Any]:
    """The functions of docs/how_capsules_work.md, which the tests compare with the scripts."""
    text = (Path(__file__).resolve().parent / "docs" / "how_capsules_work.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if "torch" not in block:
            exec(block, names)
    return names | {"e_step": lambda *gaussians: names["e_step"](*gaussians, True)}  # every parent is seen


FUNCTIONS = {  # and their exercises
    "squash_backward": 1, "softmax_backward": 2, "dynamic_routing": 3, "dynamic_routing_backward": 4, "m_step": 5,
    "m_step_backward": 5, "e_step": 6, "e_step_backward": 6, "margin_loss": 7, "spread_loss": 8,
}  # fmt: skip
LAM, FLOOR, MARGIN, TRUE, TOLERANCE = 0.7, 0.3, 0.9, 2, 1e-6  # the last one of the largest entry
TARGET = np.array([0.0, 1, 0, 0, 1, 0])


class Case(NamedTuple):
    """One call of a student's function."""

    args: tuple[Any, ...]
    outputs: str  # their names; the last ones are gradients of ``inputs``
    forward: Any = None
    inputs: Any = ()  # of ``forward``, by name
    douts: tuple[Array, ...] = ()
    apart: tuple[str, int] | None = None  # what does not mix, and how many: the size of no other axis
    edge: tuple[str, tuple[Any, ...]] | None = None  # arguments for which the result must be finite


def cases(ours: dict[str, Any]) -> dict[str, Case]:
    rng, (I, J, D) = np.random.default_rng(5), (5, 4, 3)
    normal = rng.normal
    s, dv, b, dc, u_hat = (normal(size=shape) for shape in ((I, D), (I, D), (I, J), (I, J), (I, J, D)))
    dr, dvotes = normal(size=(I, J)), normal(size=(J, D))
    r, a, votes = rng.dirichlet(np.ones(J), I), rng.uniform(0.2, 0.9, I), normal(size=(I, J, D))
    fit = {"r": r, "a": a, "votes": votes, "beta_a": normal(size=J), "beta_v": normal(size=J)}
    dfit = normal(size=(J, D)), normal(size=(J, D)), normal(size=J)
    fitted = {"mu": normal(size=(J, D)), "sigma_sq": rng.uniform(0.5, 2, (J, D)), "z": normal(size=J), "votes": votes}
    v, acts, one = 0.35 * normal(size=(6, D)), rng.uniform(0.1, 0.9, 5), (np.ones(()),)
    return {
        "squash_backward": Case((dv, s), "ds", squash_of, {"s": s}, (dv,), ("vectors", I), ("s = 0", (dv, 0 * s))),
        "softmax_backward": Case((dc, softmax(b)), "db", softmax_of, {"b": b}, (dc,), ("children", I)),
        "dynamic_routing": Case((u_hat, 3), "v c"),
        "dynamic_routing_backward": Case((dvotes, u_hat, ours["dynamic_routing"](u_hat, 3)[1]), "du_hat", routing_of,
                                         {"u_hat": u_hat}, (dvotes,)),
        "m_step": Case((*fit.values(), LAM, FLOOR), "mu sigma_sq z", apart=("parents", J)),
        "m_step_backward": Case((*dfit, *fit.values(), LAM, FLOOR), "dr da dvotes dbeta_a dbeta_v", m_step_of, fit,
                                dfit, ("parents", J)),
        "e_step": Case(tuple(fitted.values()), "r", apart=("children", I),
                       edge=("votes far from all parents", (*list(fitted.values())[:3], 100 * votes))),
        "e_step_backward": Case((dr, ours["e_step"](*fitted.values()), *fitted.values()), "dmu dsigma_sq dz dvotes",
                                e_step_of, fitted, (dr,), ("children", I)),
        "margin_loss": Case((v, TARGET), "loss dv", margin_of, {"v": v}, one, ("capsules", len(v))),
        "spread_loss": Case((acts, TRUE, MARGIN), "loss da", spread_of, {"a": acts}, one),
    }  # fmt: skip


def differences(case: Case, term: Terms) -> list[Array]:
    """The gradients by central differences, without the term that is left out."""
    inputs = {name: x.copy() for name, x in case.inputs.items()}

    def loss() -> float:
        return sum(float((y * dy).sum()) for y, dy in zip(case.forward(term, **inputs), case.douts, strict=True))

    loss()  # what is left out is kept from here
    grads = [np.zeros_like(x) for x in inputs.values()]
    for x, grad in zip(inputs.values(), grads, strict=True):
        for k in np.ndindex(x.shape):
            middle, ends = x[k], []
            for step in (1e-5, -1e-5):
                x[k] = middle + step
                ends.append(loss())
            x[k], grad[k] = middle, (ends[0] - ends[1]) / 2e-5
    return grads


def close(a: Array, b: Array) -> bool:
    return a.shape == b.shape and bool(np.abs(a - b).max() <= TOLERANCE * max(1e-3, np.abs(b).max()))


def fault_of(got: Array, want: Array, without: Iterator[tuple[str, Array]]) -> str:
    """What is wrong with an output, in words; "" where nothing is. ``without``: what a gradient is without a term."""
    if got.shape != want.shape:
        return f"has shape {got.shape} and not {want.shape}: look at the axes"
    if not np.isfinite(got).all():
        return "is not finite"
    if close(got, want):
        return ""
    if close(got, -want):
        return "has the wrong sign"
    if got.size > 1 and close(got, (k := np.vdot(got, want) / np.vdot(want, want)) * want):
        return f"is {k:.3g} times what it should be"
    for label, other in without:
        if not close(other, want) and close(got, other):
            return f"lacks a term: {label}"
        if not close(other, want) and close(got, 2 * other - want):
            return f"has the wrong sign in a term: {label}"
    return f"is wrong in {int((np.abs(got - want) > TOLERANCE * np.abs(want).max()).sum())} of {got.size} entries"


def called(function: Callable[..., Any], args: tuple[Any, ...]) -> list[Array]:
    with np.errstate(all="ignore"):
        result = function(*(x.copy() if isinstance(x, np.ndarray) else x for x in args))
    if result is None:
        raise ValueError("nothing is returned")
    parts = result if isinstance(result, tuple) else (result,)
    return [np.stack([step[0] for step in x]) if isinstance(x, list) else np.asarray(x, float) for x in parts]


def first_of(x: Any, n: int) -> Any:
    """The first entry along the axis of size n, where an array has one."""
    return x.take([0], x.shape.index(n)) if isinstance(x, np.ndarray) and n in x.shape else x


def faults(case: Case, function: Callable[..., Any], ours: Callable[..., Any]) -> Iterator[str]:
    names, got, wanted = case.outputs.split(), called(function, case.args), called(ours, case.args)
    if len(got) != len(names):
        yield f"returns {len(got)} arrays and not {len(names)}: {', '.join(names)}"
        return
    terms, n_values = Terms(), len(names) - len(case.inputs)
    if case.inputs:
        wanted[n_values:] = differences(case, terms)
    if all(map(close, got, wanted)):
        if case.edge and not all(np.isfinite(x).all() for x in called(function, case.edge[1])):
            yield f"is not finite for {case.edge[0]}"
        return
    without = [(label, differences(case, Terms(label))) for label in terms.labels]
    for k, name in enumerate(names):
        others = ((label, grads[k - n_values]) for label, grads in without if k >= n_values)
        fault = fault_of(got[k], wanted[k], others)
        if fault.startswith("is wrong in") and case.apart and case.apart[1] in got[k].shape:
            what, n = case.apart
            alone = called(function, tuple(first_of(x, n) for x in case.args))[k]
            if not close(alone, first_of(got[k], n)):
                fault = f"has a wrong axis: {what} are added up that do not depend on each other"
        if fault:
            yield f"{name} {fault}"


def check(path: Path, names: Sequence[str] = tuple(FUNCTIONS)) -> Iterator[tuple[str, str]]:
    """The functions of the file ``path``, each with what is wrong with it, or ""."""
    mine: dict[str, Any] = {"__name__": "mine"}
    exec(compile(path.read_bytes(), path, "exec"), mine)
    theirs = {name: mine.get(name, globals()[name]) for name in names}  # instead of a missing one the stub above
    every = cases(ours := page())
    for name, function in theirs.items():
        mine.update({other: ours[other] for other in FUNCTIONS if other != name})
        try:
            found = list(faults(every[name], function, ours[name]))
        except NotImplementedError:
            found = ["is not written yet"]
        except (Exception, SystemExit) as error:
            found = [f"ends in {type(error).__name__}: {one_line(error)}"]
        yield name, "; ".join(found)


@script
def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="your copy of this file")
    parser.add_argument("--help-all", action="help", help=argparse.SUPPRESS)
    path = parser.parse_args(argv).file
    try:
        found = list(check(path))
    except (Exception, SystemExit) as error:
        raise UserError(f"{path} ends in {type(error).__name__}: {one_line(error)}") from None
    for name, fault in found:
        print(f"{FUNCTIONS[name]}  {name:<25}", fault or "passes")
    print(f"{sum(not fault for _, fault in found)} of {len(found)} functions pass", flush=True)
    raise SystemExit(int(any(fault for _, fault in found)))


if __name__ == "__main__":
    raise SystemExit(main())
