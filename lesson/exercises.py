#!/usr/bin/env python3
"""Eight exercises on docs/how_capsules_work.md, and their check.

    cp lesson/exercises.py mine.py       Write your solutions into the stubs of mine.py.
    python -m lesson.exercises mine.py    See for each whether it passes, and if not, what is wrong.

All arrays are float64, and of one image: I children, J parents, D entries of a vote. ``dx`` is the gradient of the loss
with respect to x, of x's shape. A function gets correct versions of all others, so begin where you like.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from support.output import UserError, one_line
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
# The check. There is nothing to change below.
# ----------------------------------------------------------------------------------------------------------------------

I, J, D = 5, 4, 3
FUNCTIONS = {  # number of the exercise, names of what is returned, and size of an axis along which nothing mixes
    "squash_backward": (1, "ds", J),
    "softmax_backward": (2, "db", I),
    "dynamic_routing": (3, "v c", 0),
    "dynamic_routing_backward": (4, "du_hat", 0),
    "m_step": (5, "mu sigma_sq z", J),
    "m_step_backward": (5, "dr da dvotes dbeta_a dbeta_v", J),
    "e_step": (6, "r", I),
    "e_step_backward": (6, "dmu dsigma_sq dz dvotes", I),
    "margin_loss": (7, "loss dv", J),
    "spread_loss": (8, "loss da", 0),
}
TOLERANCE = 1e-6  # of the largest entry


def page() -> tuple[str, dict[str, Any]]:
    """The numpy of docs/how_capsules_work.md, which the tests compare with the scripts, and what it defines."""
    text = (Path(__file__).resolve().parent.parent / "docs" / "how_capsules_work.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    code, names = "\n".join(block for block in blocks if "torch" not in block), dict[str, Any]()
    exec(code, names)
    return code, names


def arguments(ours: dict[str, Any]) -> dict[str, Any]:
    """By their names in the stubs; one vector of s is 0."""
    rng = np.random.default_rng(5)
    x: dict[str, Any] = {name: rng.normal(size=(J, D)) for name in ("s", "v", "dv", "mu", "dmu", "dsigma_sq")}
    x |= {name: rng.normal(size=J) for name in ("z", "dz", "beta_a", "beta_v")}
    x |= {name: rng.normal(size=(I, J, D)) for name in ("u_hat", "votes")}
    x |= {"dc": rng.normal(size=(I, J)), "dr": rng.normal(size=(I, J)), "c": rng.dirichlet(np.ones(J), I)}
    x |= {"a": rng.uniform(0.2, 0.9, I), "sigma_sq": rng.uniform(0.5, 2, (J, D)), "target": np.arange(J) % 2.0}
    x |= {"v": 0.35 * x["v"], "n_iters": 3, "lam": 0.7, "floor": 0.3, "true": 2, "margin": 0.9}
    x["s"][-1] = 0
    x["r"] = ours["e_step"](x["mu"], x["sigma_sq"], x["z"], x["votes"])
    x["steps"] = ours["dynamic_routing"](x["u_hat"], x["n_iters"])[1]
    return x


def called(function: Callable[..., Any], args: Sequence[Any]) -> list[Array]:
    with np.errstate(all="ignore"):
        result = function(*(x.copy() if isinstance(x, np.ndarray) else x for x in args))
    if result is None:
        raise ValueError("nothing is returned")
    parts = result if isinstance(result, tuple) else (result,)
    return [np.stack([step[0] for step in x]) if isinstance(x, list) else np.asarray(x, float) for x in parts]


def close(a: Array, b: Array) -> bool:
    return a.shape == b.shape and bool(np.abs(a - b).max() < TOLERANCE * max(1e-3, np.abs(b).max()))


def first_of(x: Any, n: int) -> Any:
    """The first entry along the axis of size n, where an array has one."""
    return x.take([0], x.shape.index(n)) if n in np.shape(x) else x


def terms(function: ast.FunctionDef) -> list[tuple[Any, str]]:
    """Nodes of a syntax tree and their fields that hold terms of sums, then those that hold what a name gets."""
    sums, gets = list[tuple[Any, str]](), list[tuple[Any, str]]()
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            sums += [(node, "left"), (node, "right")]
        elif isinstance(node, ast.Assign | ast.AugAssign) and "," not in ast.unparse(node).partition("=")[0]:
            gets.append((node, "value"))  # of one name, not of several
    return sums + gets


def mistakes(name: str, args: Sequence[Any]) -> Iterator[tuple[str, list[Array]]]:
    """What the page's function returns after each of the common mistakes, first after those in itself."""
    code, theirs = page()
    functions = [part for part in ast.parse(code).body if isinstance(part, ast.FunctionDef)]
    for function in sorted(functions, key=lambda function: function.name != name):
        module = ast.Module([function], [])
        for node, field in terms(function):
            term = getattr(node, field)
            names = sorted({x.id for x in ast.walk(term) if isinstance(x, ast.Name)} - {"np"})
            words = f"with {', '.join(names)}" if names else ast.unparse(term)
            for factor, fault in ((0, "lacks the term"), (-1, "has the wrong sign in the term")):
                setattr(node, field, ast.BinOp(ast.Constant(factor), ast.Mult(), term))
                exec(compile(ast.fix_missing_locations(module), name, "exec"), theirs)
                yield f"{fault} {words}", called(theirs[name], args)
            setattr(node, field, term)
        exec(compile(module, name, "exec"), theirs)
    forward, backward = theirs["softmax"], theirs["softmax_backward"]
    theirs |= {"softmax": lambda b: forward(b.T).T, "softmax_backward": lambda dc, c: backward(dc.T, c.T).T}
    yield "has a wrong axis: the softmax is over the children, not over the parents", called(theirs[name], args)


def faults(name: str, function: Callable[..., Any], ours: dict[str, Any]) -> Iterator[str]:
    """What is wrong with each output of a student's function, in words."""
    _, outputs, n = FUNCTIONS[name]
    given, names = arguments(ours), outputs.split()
    args = [given[x] for x in inspect.signature(globals()[name]).parameters]
    got, wanted = called(function, args), called(ours[name], args)
    if len(got) != len(names):
        yield f"returns {len(got)} arrays and not {len(names)}: {outputs.replace(' ', ', ')}"
        return
    wrong = [k for k in range(len(names)) if not close(got[k], wanted[k])]
    if name == "e_step" and not wrong and not np.isfinite(called(function, [*args[:3], 100 * given["votes"]])).all():
        yield "is not finite for votes far from all parents"
    known = list(mistakes(name, args)) if wrong else []
    known.sort(key=lambda mistake: -sum(map(close, got, mistake[1])))  # first what explains most of the outputs
    for k in wrong:
        x, y = got[k], wanted[k]
        if x.shape != y.shape:
            fault = f"has shape {x.shape} and not {y.shape}: look at the axes"
        elif not np.isfinite(x).all():
            fault = "is not finite"
        elif close(x, -y):
            fault = "has the wrong sign"
        elif x.size > 1 and close(x, (factor := np.vdot(x, y) / np.vdot(y, y)) * y):
            fault = f"is {factor:.3g} times what it should be"
        elif found := [words for words, other in known if close(x, other[k]) and not close(other[k], y)]:
            fault = found[0]
        elif n in x.shape and not close(called(function, [first_of(arg, n) for arg in args])[k], first_of(x, n)):
            fault = "has a wrong axis: what does not depend on each other is added up"
        else:
            fault = f"is wrong in {(np.abs(x - y) > TOLERANCE * np.abs(y).max()).sum()} of {x.size} entries"
        yield f"{names[k]} {fault}"


def check(path: Path, names: Sequence[str] = tuple(FUNCTIONS)) -> Iterator[tuple[str, str]]:
    """The functions of the file ``path``, each with what is wrong with it, or ""."""
    mine: dict[str, Any] = {"__name__": "mine"}
    exec(compile(path.read_bytes(), path, "exec"), mine)
    theirs = {name: mine.get(name, globals()[name]) for name in names}  # instead of a missing one the stub above
    _, ours = page()
    for name, function in theirs.items():
        mine.update({other: ours[other] for other in FUNCTIONS if other != name})
        try:
            found = list(faults(name, function, ours))
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
        print(f"{FUNCTIONS[name][0]}  {name:<25}", fault or "passes")
    print(f"{sum(not fault for _, fault in found)} of {len(found)} functions pass", flush=True)
    raise SystemExit(int(any(fault for _, fault in found)))


if __name__ == "__main__":
    raise SystemExit(main())
