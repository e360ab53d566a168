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
# The check. There is nothing to change below, and reading it gives the solutions away.
# ----------------------------------------------------------------------------------------------------------------------

TERMS = {  # lines of the page with a factor K before one term, and its name; K is 1, and 0 or -1 for a mistake
    "return K * f * dv": "along dv, f(q) dv",
    "+ K * twice_df * (s": "through the length |s|",
    "c * (K * dc -": "of the logit's own exponential",
    "- K * (c * dc)": "through the sum of all exponentials",
    "b = K * b +": "of the logits b of earlier iterations",
    'b + K * np.einsum("ijd,jd->ij", u_hat, v)': "of the agreement in the logits b",
    "+= K * c[:, :, None]": "of the votes in the weighted sum s",
    "+= K * db[:, :, None]": "of the votes in the agreement",
    "dv + K * np": "of the outputs v in the agreement",
    "db = K * db +": "of the logits b of earlier iterations",
    "db + K * softmax_backward": "through the couplings c",
    "dz, K * -lam": "of the cost",
    "dsigma_sq + K * (dcost": "through sigma_sq in the cost",
    "dmass = K * dcost": "through the mass in the cost",
    "dmass -= K * (dweight": "through the mass in the weights",
    "dg = K * dweight": "of the weights",
    "mass + K * dmass": "of the mass",
    "dweight = K * np": "of the weights in sigma_sq",
    "dweight += K * np": "of the weights in mu",
    "dvotes = K * derror": "of the votes in sigma_sq",
    "derror + K * weight": "of the votes in mu",
    "* (K * beta_a - cost)": "of beta_a",
    "(beta_a - K * cost)": "of the cost",
    "(K * beta_v[:, None]": "of beta_v in the cost",
    "+ K * 0.5 * np.log(sigma_sq)": "of log sigma_sq in the cost",
    "+ K * floor": "of the floor",
    "-0.5 * (K * (votes": "of the squared error",
    "sigma_sq + K * np.log": "of log sigma_sq",
    "= K * -np.logaddexp": "of the activation",
    "(K * error**2 / sigma_sq": "of sigma_sq under the squared error",
    "- K * 1) / (2 * sigma_sq)": "of log sigma_sq",
    "dlength = K * 0.5": "of the digits not in the image",
    "long - K * 2 * short": "of the digits in the image",
    "return K * (short": "of the digits in the image",
    "+ K * 0.5 * (long": "of the digits not in the image",
    "da = K * 2 * shortfall\n    da[true] = -K * da": "of the wrong classes",
    "da[true] = K * -da": "of the true class",
}
NUMBERS = {  # of the functions, those of their exercises
    "squash_backward": 1, "softmax_backward": 2, "dynamic_routing": 3, "dynamic_routing_backward": 4, "m_step": 5,
    "m_step_backward": 5, "e_step": 6, "e_step_backward": 6, "margin_loss": 7, "spread_loss": 8,
}  # fmt: skip
LAM, FLOOR, MARGIN, TRUE, TOLERANCE = 0.7, 0.3, 0.9, 2, 1e-6  # the last one of the largest entry
TARGET = np.array([0.0, 1, 0, 0, 1, 0])


def page(mistake: str = "") -> dict[str, Any]:
    """The functions of docs/how_capsules_work.md, which the tests compare with the scripts, or those with a mistake."""
    text = (Path(__file__).resolve().parent / "docs" / "how_capsules_work.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    code = "\n".join(block for block in blocks if "torch" not in block)
    code = code.replace("votes, seen):", "votes, seen=True):")  # every parent is seen
    names: dict[str, Any] = {"K": 1}
    exec(code.replace(mistake.replace("K * ", ""), mistake) if mistake else code, names)
    return names


class Case(NamedTuple):
    """One call of a student's function."""

    args: tuple[Any, ...]
    outputs: str  # their names; the last ones are gradients of ``inputs``
    forward: str = ""  # the function of ``inputs`` and ``constants``, whose first outputs have the gradients ``douts``
    inputs: tuple[Array, ...] = ()
    constants: tuple[Any, ...] = ()
    douts: tuple[Array, ...] = ()
    apart: tuple[str, int] = ("", 0)  # what does not mix, and how many: the size of no other axis
    edge: tuple[str, tuple[Any, ...]] = ("", ())  # arguments for which the result must be finite


def cases(ours: dict[str, Any]) -> dict[str, Case]:
    rng, (I, J, D) = np.random.default_rng(5), (5, 4, 3)
    normal = rng.normal
    s, dv, b, dc, u_hat = (normal(size=shape) for shape in ((I, D), (I, D), (I, J), (I, J), (I, J, D)))
    dr, dout = normal(size=(I, J)), normal(size=(J, D))
    r, a, votes = rng.dirichlet(np.ones(J), I), rng.uniform(0.2, 0.9, I), normal(size=(I, J, D))
    fit = (r, a, votes, normal(size=J), normal(size=J))
    dfit = normal(size=(J, D)), normal(size=(J, D)), normal(size=J)
    fitted = normal(size=(J, D)), rng.uniform(0.5, 2, (J, D)), normal(size=J), votes
    v, acts, one = 0.35 * normal(size=(6, D)), rng.uniform(0.1, 0.9, 5), (np.ones(()),)
    steps, assigned = ours["dynamic_routing"](u_hat, 3)[1], ours["e_step"](*fitted)
    return {
        "squash_backward": Case((dv, s), "ds", "squash", (s,), (), (dv,), ("vectors", I), ("s = 0", (dv, 0 * s))),
        "softmax_backward": Case((dc, softmax(b)), "db", "softmax", (b,), (), (dc,), ("children", I)),
        "dynamic_routing": Case((u_hat, 3), "v c"),
        "dynamic_routing_backward": Case((dout, u_hat, steps), "du_hat", "dynamic_routing", (u_hat,), (3,), (dout,)),
        "m_step": Case((*fit, LAM, FLOOR), "mu sigma_sq z", apart=("parents", J)),
        "m_step_backward": Case((*dfit, *fit, LAM, FLOOR), "dr da dvotes dbeta_a dbeta_v", "m_step", fit, (LAM, FLOOR),
                                dfit, ("parents", J)),
        "e_step": Case(fitted, "r", apart=("children", I),
                       edge=("votes far from all parents", (*fitted[:3], 100 * votes))),
        "e_step_backward": Case((dr, assigned, *fitted), "dmu dsigma_sq dz dvotes", "e_step", fitted, (), (dr,),
                                ("children", I)),
        "margin_loss": Case((v, TARGET), "loss dv", "margin_loss", (v,), (TARGET,), one, ("capsules", len(v))),
        "spread_loss": Case((acts, TRUE, MARGIN), "loss da", "spread_loss", (acts,), (TRUE, MARGIN), one),
    }  # fmt: skip


def differences(case: Case, forward: Callable[..., Any]) -> Iterator[Array]:
    """The gradients by central differences."""
    for n, x in enumerate(case.inputs):
        grad = np.zeros_like(x)
        for k in np.ndindex(x.shape):
            for step in (1e-5, -1e-5):
                moved = x.copy()
                moved[k] += step
                outs = called(forward, (*case.inputs[:n], moved, *case.inputs[n + 1 :], *case.constants))
                grad[k] += sum(float((y * dy).sum()) for y, dy in zip(outs, case.douts, strict=False)) / (2 * step)
        yield grad


def close(a: Array, b: Array) -> bool:
    return a.shape == b.shape and bool(np.abs(a - b).max() <= TOLERANCE * max(1e-3, np.abs(b).max()))


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


def mistakes(name: str, case: Case) -> Iterator[tuple[str, list[Array]]]:
    """What the function returns after each of the common mistakes."""
    for line, term in TERMS.items():
        theirs = page(line)
        for factor, words in ((0, "lacks a term"), (-1, "has the wrong sign in a term")):
            theirs["K"] = factor
            yield f"{words}: {term}", called(theirs[name], case.args)
    theirs = page()
    forward, backward = theirs["softmax"], theirs["softmax_backward"]
    theirs |= {"softmax": lambda b: forward(b.T).T, "softmax_backward": lambda dc, c: backward(dc.T, c.T).T}
    yield "has a wrong axis: the softmax is over the children, not over the parents", called(theirs[name], case.args)


def fault_of(got: Array, want: Array, wrong: list[tuple[str, Array]]) -> str:
    """What is wrong with an output, in words. ``wrong``: what it is after a mistake."""
    if got.shape != want.shape:
        return f"has shape {got.shape} and not {want.shape}: look at the axes"
    if not np.isfinite(got).all():
        return "is not finite"
    if close(got, -want):
        return "has the wrong sign"
    if got.size > 1 and close(got, (k := np.vdot(got, want) / np.vdot(want, want)) * want):
        return f"is {k:.3g} times what it should be"
    n_wrong = (np.abs(got - want) > TOLERANCE * np.abs(want).max()).sum()
    named = (words for words, other in wrong if close(got, other) and not close(other, want))
    return next(named, f"is wrong in {n_wrong} of {got.size} entries")


def faults(name: str, case: Case, function: Callable[..., Any], ours: dict[str, Any]) -> Iterator[str]:
    names, got, wanted = case.outputs.split(), called(function, case.args), called(ours[name], case.args)
    if len(got) != len(names):
        yield f"returns {len(got)} arrays and not {len(names)}: {', '.join(names)}"
        return
    if case.inputs:
        wanted[-len(case.inputs) :] = differences(case, ours[case.forward])
    right = [close(x, y) for x, y in zip(got, wanted, strict=True)]
    if all(right) and case.edge[0] and not all(np.isfinite(x).all() for x in called(function, case.edge[1])):
        yield f"is not finite for {case.edge[0]}"
    wrong = [] if all(right) else list(mistakes(name, case))
    wrong.sort(key=lambda mistake: -sum(map(close, got, mistake[1])))  # first what explains most of the outputs
    for k in (k for k in range(len(names)) if not right[k]):
        fault = fault_of(got[k], wanted[k], [(words, outputs[k]) for words, outputs in wrong])
        what, n = case.apart
        if fault.startswith("is wrong in") and n in got[k].shape:
            alone = called(function, tuple(first_of(x, n) for x in case.args))[k]
            if not close(alone, first_of(got[k], n)):
                fault = f"has a wrong axis: {what} are added up that do not depend on each other"
        yield f"{names[k]} {fault}"


def check(path: Path, names: Sequence[str] = tuple(NUMBERS)) -> Iterator[tuple[str, str]]:
    """The functions of the file ``path``, each with what is wrong with it, or ""."""
    mine: dict[str, Any] = {"__name__": "mine"}
    exec(compile(path.read_bytes(), path, "exec"), mine)
    theirs = {name: mine.get(name, globals()[name]) for name in names}  # instead of a missing one the stub above
    every = cases(ours := page())
    for name, function in theirs.items():
        mine.update({other: ours[other] for other in NUMBERS if other != name})
        try:
            found = list(faults(name, every[name], function, ours))
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
        print(f"{NUMBERS[name]}  {name:<25}", fault or "passes")
    print(f"{sum(not fault for _, fault in found)} of {len(found)} functions pass", flush=True)
    raise SystemExit(int(any(fault for _, fault in found)))


if __name__ == "__main__":
    raise SystemExit(main())
