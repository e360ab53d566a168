"""The check of the exercises: what is right, and of what is wrong which mistake it is.

    python -m lesson.check mine.py         All exercises of your copy of lesson/exercises.py.
    python -m lesson.check mine.py 1 3     Exercises 1 and 3 alone.
    python -m lesson.check mine.py 9       Exercises 1 to 5 and 9, and then a training of the network that they make.

It compares with lesson/solutions.py, and plants the usual mistakes there to see which of them gives what you return.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import inspect
import pickle
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.stroke_digits import stroke_digits
from lesson import exercises, solutions
from smallnorb_novel_viewpoint import Parser, UserError, one_line, path_of, script

Array = np.ndarray
I, J, D = 5, 4, 3
FUNCTIONS = {  # number of the exercise, names of what is returned, and size of an axis along which nothing mixes
    "squash_backward": (1, "ds", J),
    "softmax_backward": (2, "db", I),
    "dynamic_routing": (3, "v, c in the list, s in the list, v in the list", 0),
    "dynamic_routing_backward": (4, "du_hat", 0),
    "margin_loss": (5, "loss, dv", J),
    "m_step": (6, "mu, sigma_sq, z", J),
    "m_step_backward": (6, "dr, da, dvotes, dbeta_a, dbeta_v", J),
    "e_step": (7, "r", I),
    "e_step_backward": (7, "dmu, dsigma_sq, dz, dvotes", I),
    "spread_loss": (8, "loss, da", 0),
    "network": (9, "v, loss, dkernel, dbias, dw", 0),
}
TOLERANCE = 1e-6  # of the largest entry
SECONDS = 20  # of one call
SOURCE = ast.parse(inspect.getsource(solutions))
MANY, FEW, ONE = "has one iteration too many", "has one iteration too few", "has one iteration alone"
SIGMA = "has sigma for sigma squared"
FACTORS = ((0, 0, "lacks"), (0, -1, "has the wrong sign in"), (2, 0.5, "lacks a factor 2 in"),
           (2, 2, "has a factor 2 too many in"))
WORDS = {"derror": "d(V − μ)", "dweight": "dw", "weight": "w", "dmass": "d(mass)", "dcost": "d(cost)",
         "short": "0.9 − length", "long": "length − 0.1", "dlength": "d(length)", "dlog_ap": "d(log)", "q": "q",
         "twice_df": "2 f′(q)", "error": "V − μ", "g": "r a", "dg": "d(r a)", "log_p": "the log of the density",
         "shortfall": "max(0, ...)"}  # names of the solutions, as README.md has them
TERM = "s * dv).sum(axis=-1, keepdims=True) * s"  # of squash_backward
SPELLED = (  # function, a mistake in words, and what stands there and in its place
    ("squash_backward", "lacks the term from f, which depends on s too", TERM, f"{TERM} * 0"),
    ("squash_backward", "has v for s in the term with dv, s", TERM, TERM.replace("s * dv", "f * s * dv")),
    ("squash_backward", "has v for s in the term with dv, s", TERM, f"f * {TERM} * f"),
    ("squash_backward", "has no sum in the product of s and dv", ".sum(axis=-1, keepdims=True) * s", " * s"),
    ("softmax_backward", "has no sum in the product of c and dc", "(c * dc).sum(axis=-1, keepdims=True)", "c * dc"),
    ("softmax_backward", "lacks the factor c in the sum", "(c * dc).sum", "dc.sum"),
    ("dynamic_routing", "has couplings that stay even", "softmax(b)", "np.full(b.shape, 1 / b.shape[-1])"),
    ("dynamic_routing", "has a softmax over all entries, not over the parents of a child", "softmax(b)",
     "np.exp(b) / np.exp(b).sum()"),
    ("dynamic_routing", "has a sigmoid in place of the softmax", "softmax(b)", "1 / (1 + np.exp(-b))"),
    ("dynamic_routing", "has a wrong axis: the squash is over the parents, not over the entries", "squash(s)",
     "squash(s.T).T"),
    ("dynamic_routing", "has the squash twice", "squash(s)", "squash(squash(s))"),
    ("dynamic_routing", "has vectors of length 1 in place of squash(s)", "squash(s)",
     "s / np.sqrt((s * s).sum(axis=-1, keepdims=True))"),
    ("dynamic_routing", "is that of the next iteration: append before b changes", "append((c, s",
     "append((softmax(b), s"),
    ("dynamic_routing", "adds the s of the iteration before", 's = np', 's = (steps[-1][1] if steps else 0) + np'),
    ("dynamic_routing", "has a mean in place of a sum", "c, u_hat)", "c / len(c), u_hat)"),
    ("dynamic_routing", "has the agreement of c times u_hat, not of u_hat", "u_hat, v)", "c[..., None] * u_hat, v)"),
    ("dynamic_routing_backward", "passes the gradient of the last v to each iteration", "dv = np.zeros_like(dv)", ""),
    ("dynamic_routing_backward", "goes through the iterations forwards", "reversed(steps)", "steps"),
    ("margin_loss", "lacks the square in both terms", "(short**2).sum() + 0.5 * (long**2)", "short.sum() + 0.5 * long"),
    ("margin_loss", "has target and 1 - target in each other's place",
     "target * np.maximum(0, 0.9 - length), (1 - target)", "(1 - target) * np.maximum(0, 0.9 - length), target"),
    ("margin_loss", "lacks the max(0, ...)", "np.maximum(0, 0.9 - length), (1 - target) * np.maximum(0, length - 0.1)",
     "(0.9 - length), (1 - target) * (length - 0.1)"),
    ("margin_loss", "lacks the max(0, ...) of 0.9 - length", "np.maximum(0, 0.9 - length)", "(0.9 - length)"),
    ("margin_loss", "lacks the max(0, ...) of length - 0.1", "np.maximum(0, length - 0.1)", "(length - 0.1)"),
    ("margin_loss", "has a mean over the classes in place of the sum", "(short**2).sum() + 0.5 * (long**2).sum(), ",
     "(short**2).mean() + 0.5 * (long**2).mean(), 1 / len(v) * "),
    ("margin_loss", "lacks the division by the length", " / length[..., None]", ""),
    ("m_step", "has 1 - a for a", "r * a[:, None]", "r * (1 - a)[:, None]"),
    ("m_step", "has 1 - a for a in the mass", "(r * a[:, None]).sum", "(r * (1 - a)[:, None]).sum"),
    ("m_step", "has 1 - a for a in the weights", "r * a[:, None] /", "r * (1 - a)[:, None] /"),
    ("m_step", "leaves a out of the mass", "(r * a[:, None]).sum", "r.sum"),
    ("m_step", "leaves a out of the weights", "r * a[:, None] /", "r /"),
    ("m_step", "has sigma for log sigma", "0.5 * np.log(sigma_sq)", "np.sqrt(sigma_sq)"),
    ("m_step", "has a mean of the votes that is not divided by the mass", "a[:, None] / mass", "a[:, None]"),
    ("m_step", "has no weights in the variance", "weight, (votes", "np.full_like(r, 1 / len(r)), (votes"),
    ("m_step", "has squared weights in the variance", "weight, (votes", "weight**2, (votes"),
    ("m_step", "has a logarithm to the base 10", "np.log(", "np.log10("),
    ("m_step", "has 2 π in the logarithm, which the cost leaves out", "np.log(", "np.log(2 * np.pi * "),
    ("m_step", "has lam at beta_a alone", "lam * (beta_a - cost)", "lam * beta_a - cost"),
    ("m_step", "has beta_a and beta_v in each other's place", "(beta_v[:, None] + 0.5 * np.log(sigma_sq)).sum(axis=1)"
     " * mass / unit\n    return mu, sigma_sq, lam * (beta_a", "(beta_a[:, None] + 0.5 * np.log(sigma_sq)).sum(axis=1)"
     " * mass / unit\n    return mu, sigma_sq, lam * (beta_v"),
    ("m_step_backward", "lacks the factor a", "dg * a[:, None]", "dg"),
    ("m_step_backward", "takes the weights for constants", "dg = dweight / mass + dmass", "dg = 0 * dweight + dmass"),
    ("e_step", "lacks the log in log sigmoid(z)", "-np.logaddexp(0, -z)", "sigmoid(z)"),
    ("e_step", "has z for log sigmoid(z)", "-np.logaddexp(0, -z)", "z"),
    ("spread_loss", "lacks the max(0, ...)", "np.maximum(0, margin - (a[true] - a))", "margin - (a[true] - a)"),
    ("spread_loss", "counts the true class too", "    shortfall[true] = 0\n", ""),
    ("network", "has the children in another order: reshape row by row, as numpy does",
     "reshape(w.shape[0], w.shape[2])", "reshape(w.shape[2], w.shape[0]).T"),
    ("network", "has the children in another order: reshape row by row, as numpy does",
     "reshape(w.shape[0], w.shape[2])", "reshape(w.shape[0], w.shape[2], order='F')"),
    ("network", "has the first child's w for all children", '"ip,ijpd->ijd", u, w', '"ip,jpd->ijd", u, w[0]'),
    ("network", "has u for s in squash_backward", "squash_backward(du, s)", "squash_backward(du, u)"),
    ("network", "goes back through the last iteration alone", "u_hat, steps)", "u_hat, steps[-1:])"),
    ("network", "has 1 - target for target", "margin_loss(v, target)", "margin_loss(v, 1 - target)"),
)
WRAPPERS = {"log", "sqrt", "squash", "softmax", "sigmoid", "squash_backward"}  # functions that are forgotten


def arguments() -> dict[str, Any]:
    """By their names in the stubs; one vector of s is 0."""
    rng = np.random.default_rng(5)
    x: dict[str, Any] = {name: rng.normal(size=(J, D)) for name in ("s", "v", "dv", "mu", "dmu", "dsigma_sq")}
    x |= {name: rng.normal(size=J) for name in ("z", "dz", "beta_a", "beta_v")}
    x |= {name: rng.normal(size=(I, J, D)) for name in ("u_hat", "votes")}
    x |= {"dc": rng.normal(size=(I, J)), "dr": rng.normal(size=(I, J)), "c": rng.dirichlet(np.ones(J), I)}
    x |= {"a": rng.uniform(0.2, 0.9, I), "sigma_sq": rng.uniform(0.5, 2, (J, D)), "target": np.arange(J) % 2.0}
    x |= {"v": 0.35 * x["v"] * [[1], [1.3], [0.2], [1]], "n_iters": 3}  # lengths on both sides of 0.1 and of 0.9
    x |= {"lam": 0.7, "floor": 0.3, "true": 2, "margin": 0.05}  # and of the margin
    x |= {"patches": rng.normal(size=(3, 7)), "kernel": rng.normal(size=(7, 4)), "bias": rng.normal(size=4)}
    x["w"] = rng.normal(size=(6, J, 2, D))
    x["s"][-1] = 0
    x["r"] = solutions.e_step(x["mu"], x["sigma_sq"], x["z"], x["votes"])
    x["steps"] = solutions.dynamic_routing(x["u_hat"], x["n_iters"])[1]
    return x


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Without warnings of numpy, and in the main thread for SECONDS at most, where the platform has a timer."""

    def stop(*_: object) -> None:
        raise UserError(f"takes more than {SECONDS} seconds: a loop that does not end?")

    with contextlib.ExitStack() as stack:
        stack.enter_context(np.errstate(all="ignore"))
        if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
            stack.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, stop))
            stack.callback(signal.setitimer, signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
        yield


def array_of(output: str, x: Any) -> Array:
    """What is returned as ``output``: an array of numbers, or one number."""
    if x is None:
        raise UserError(f"{output} is None")
    if not isinstance(x, np.ndarray | np.generic | complex | float | int):
        raise UserError(f"{output} is a {type(x).__name__} and not {'a number' if output == 'loss' else 'an array'}")
    dtype = np.asarray(x).dtype
    if dtype.kind not in "biuf":
        raise UserError(f"{output} is complex" if dtype.kind == "c" else f"{output} has entries of dtype {dtype}")
    return np.asarray(x, float)


def called(name: str, function: Callable[..., Any], args: Sequence[Any]) -> list[Array]:
    """All that a function for the exercise's ``name`` returns; of its list c, s and v stacked over iterations."""
    with limited():
        result = function(*copy.deepcopy(args))
    if result is None:
        raise UserError("returns nothing: is return missing?")
    names = FUNCTIONS[name][1].split(", ")
    is_several = len(result) > 1 if isinstance(result, tuple) else isinstance(result, list) and len(names) > 1
    parts = [*result] if is_several else [result]
    if name == "dynamic_routing":
        steps = parts[1] if len(parts) == 2 else None
        if not (isinstance(steps, list | tuple) and all(isinstance(entry, list | tuple) for entry in steps)):
            raise UserError("does not return v and a list of (c, s, v)")
        if len({len(entry) for entry in steps}) > 1:
            raise UserError("the entries of the list have unequal lengths")
        parts = [parts[0], *zip(*steps, strict=True)]
    if len(parts) != len(names):
        raise UserError(f"returns {len(parts)} array{'s' * (len(parts) > 1)} and not {len(names)}: {', '.join(names)}")
    found = list[Array]()
    for output, part in zip(names, parts, strict=True):
        of_list = output.endswith("in the list")
        arrays = [array_of(output, x) for x in (part if of_list else [part])]
        if len({array.shape for array in arrays}) > 1:
            raise UserError(f"{output} has another shape in another iteration")
        found.append(np.stack(arrays) if of_list else arrays[0])
    return found


def close(a: Array, b: Array) -> bool:
    """Equal, of equal shape: what would only broadcast is not."""
    return a.shape == b.shape and bool(np.abs(a - b).max() < TOLERANCE * max(1e-3, np.abs(b).max()))


def spoiled(function: Callable[..., Any], args: Sequence[Any], names: Sequence[str]) -> list[str]:
    """The arguments that a function changes."""
    given = copy.deepcopy(args)
    before = [pickle.dumps(arg) for arg in given]
    with limited():
        function(*given)
    return [name for name, old, arg in zip(names, before, given, strict=True) if pickle.dumps(arg) != old]


def first_of(x: Any, n: int) -> Any:
    """The first entry along the axis of size n, where an array has one."""
    return x.take([0], x.shape.index(n)) if n in np.shape(x) else x


class Edit(NamedTuple):
    """A mistake in a function: what takes the place of a field of a node, or of its item k. Of two mistakes that give
    the same, that of the smaller rank is named."""

    rank: int
    words: str
    node: ast.AST
    field: str
    k: int | None
    new: ast.expr


def edits(function: ast.FunctionDef) -> Iterator[Edit]:
    """The usual mistakes. What stands beside a plus or a minus, and what a name gets, is left out, negated, halved or
    doubled; a factor, a log, a square, a root or a squash is left out; a sum is a mean; one name stands for another. A
    term is named by those of its names that the stub has, where there are some."""
    seen = {*re.findall(r"\w+", inspect.getsource(getattr(exercises, function.name)))}

    def of(x: ast.expr) -> str:
        """The words for x where they are neither a line of the solutions nor have a name that is theirs alone."""
        names = {node.id for node in ast.walk(x) if isinstance(node, ast.Name)}
        if not names <= {*seen, *WORDS} or any(isinstance(node, ast.Call) for node in ast.walk(x)):
            return ""
        return " of " + re.sub(r"\w+", lambda word: WORDS.get(word[0], word[0]), ast.unparse(x))

    for parent in ast.walk(function):
        for field, value in ast.iter_fields(parent):
            is_sum = isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add | ast.Sub)
            is_gift = isinstance(parent, ast.Assign | ast.AugAssign) and field == "value"
            if is_gift and "," in ast.unparse(parent).partition("=")[0]:
                is_gift = False  # of several names
            for k, x in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if not isinstance(x, ast.expr) or (isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)):
                    continue
                at, text = (parent, field, k), ast.unparse(x)
                if is_sum or is_gift:
                    every = {node.id for node in ast.walk(x) if isinstance(node, ast.Name)} - {"np"}
                    names = sorted(WORDS.get(name, name) for name in every & seen or every - {"unit"})
                    words = f"the term with {', '.join(names)}" if names else f"the term {text}"
                    for rank, factor, fault in FACTORS:
                        changed = ast.BinOp(ast.Constant(factor), ast.Mult(), x)
                        yield Edit(rank if is_sum else 3, f"{fault} {words}", *at, changed)
                match x:
                    case ast.BinOp(ast.Constant(1), ast.Sub(), other):
                        yield Edit(1, f"has {ast.unparse(other)} for {text}", *at, other)
                    case ast.BinOp(other, ast.Pow(), ast.Constant(2)):
                        yield Edit(1, f"lacks the square{of(other)}", *at, other)
                    case ast.Call(ast.Attribute(_, name) | ast.Name(name), [other, *_]) if name in WRAPPERS:
                        yield Edit(1, f"lacks the {name}{of(other)}", *at, other)
                    case ast.Name("v"):
                        yield Edit(1, "has s for v", *at, ast.Name("s", ast.Load()))
                    case ast.Name("s"):
                        yield Edit(1, "has v for s", *at, ast.Name("v", ast.Load()))
                    case ast.Call(ast.Name("dynamic_routing"), [votes, ast.Constant(int(n))]):
                        for wrong, words in ((n + 1, MANY), (n - 1, FEW), (1, ONE)):
                            yield Edit(1, words, *at, ast.Call(x.func, [votes, ast.Constant(wrong)], []))
                    case ast.BinOp(other, ast.Mult(), ast.Name(name)) | ast.BinOp(ast.Name(name), ast.Mult(), other):
                        yield Edit(2, f"lacks the factor {WORDS.get(name, name)}", *at, other)
                    case ast.Call(ast.Attribute(what, "sum"), values, keywords):
                        mean = ast.Call(ast.Attribute(what, "mean", ast.Load()), values, keywords)
                        yield Edit(2, "has a mean in place of a sum", *at, mean)
                    case ast.Name("sigma_sq"):
                        yield Edit(1, SIGMA, *at, ast.parse("np.sqrt(sigma_sq)", mode="eval").body)


def mistakes(name: str, args: Sequence[Any]) -> Iterator[tuple[str, list[Array]]]:
    """What the solution returns after each of the usual mistakes, first after those in itself."""
    theirs: dict[str, Any] = {}
    exec(inspect.getsource(solutions), theirs)
    right, parameters = theirs[name], [*inspect.signature(getattr(exercises, name)).parameters]
    for at, words, change in (
        ("n_iters", MANY, lambda n: n + 1),
        ("n_iters", FEW, lambda n: n - 1),
        ("n_iters", ONE, lambda n: 1),
        ("a", "leaves a out", np.ones_like),
        ("lam", "leaves lam out", lambda lam: 1.0),
        ("beta_v", "has beta_v once and not D times", lambda beta_v: beta_v / D),
        ("steps", "lacks the last iteration", lambda steps: steps[:-1]),
        ("steps", "lacks the first iteration", lambda steps: steps[1:]),
        ("sigma_sq", SIGMA, np.sqrt),
    ):
        if at in parameters:
            given = dict(zip(parameters, args, strict=True))
            yield words, called(name, right, [*(given | {at: change(given[at])}).values()])
    own = inspect.getsource(getattr(solutions, name))
    for of, words, there, instead in SPELLED:
        if of == name:
            exec(own.replace(there, instead), theirs)
            yield words, called(name, theirs[name], args)
    exec(own, theirs)
    functions = [part for part in SOURCE.body if isinstance(part, ast.FunctionDef)]
    for function in sorted(functions, key=lambda function: function.name != name):
        changed = copy.deepcopy(function)
        for _, words, node, field, k, new in sorted(edits(changed), key=lambda edit: edit.rank):
            right_one: Any = getattr(node, field)
            setattr(node, field, new if k is None else [*right_one[:k], new, *right_one[k + 1 :]])
            exec(compile(ast.fix_missing_locations(ast.Module([changed], [])), name, "exec"), theirs)
            setattr(node, field, right_one)
            with contextlib.suppress(Exception):  # a mistake that ends in an error needs no words of ours
                yield words, called(name, theirs[name], args)
        exec(compile(ast.Module([function], []), name, "exec"), theirs)
    forward, backward = theirs["softmax"], theirs["softmax_backward"]
    theirs |= {"softmax": lambda b: forward(b.T).T, "softmax_backward": lambda dc, c: backward(dc.T, c.T).T}
    yield "has a wrong axis: the softmax is over the children, not over the parents", called(name, theirs[name], args)


@functools.cache
def known_mistakes(name: str) -> list[tuple[str, list[Array]]]:
    """``mistakes`` for the arguments of the check, which are the same for every student's function."""
    given = arguments()
    return list(mistakes(name, [given[x] for x in inspect.signature(getattr(exercises, name)).parameters]))


def faults(name: str, function: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """The outputs of a student's function that are wrong, each with what is wrong with it, in words."""
    _, outputs, n = FUNCTIONS[name]
    given, names = arguments(), outputs.split(", ")
    parameters = [*inspect.signature(getattr(exercises, name)).parameters]
    args, right = [given[x] for x in parameters], getattr(solutions, name)
    got, wanted = called(name, function, args), called(name, right, args)
    wrong = [k for k in range(len(names)) if not close(got[k], wanted[k])]
    if not wrong:
        yield from rare_faults(name, function, right, args, parameters)
    known = [*known_mistakes(name)] if wrong else []
    known.sort(key=lambda mistake: -sum(map(close, got, mistake[1])))  # first what explains most of the outputs
    for k in wrong:
        x, y = got[k], wanted[k]
        found = [words for words, other in known if close(x, other[k]) and not close(other[k], y)]
        if x.shape != y.shape:
            fault = found[0] if found else f"has shape {x.shape} and not {y.shape}: look at the axes"
        elif name == "squash_backward" and close(x[:-1], y[:-1]):
            fault = "is wrong where s is 0 alone: add 1e-9 to q, as squash does"
        elif not np.isfinite(x).all():
            fault = "is not finite"
        elif close(x, -y):
            fault = "has the wrong sign"
        elif other := [names[j] for j in range(len(names)) if j != k and close(x, wanted[j])]:
            fault = f"is {other[0]}: look at the order of what is returned"
        elif found and found[0].startswith(("leaves", "has a mean over")):
            fault = found[0]
        elif close(x, solutions.sigmoid(y)):
            fault = "is the sigmoid of what it should be"
        elif x.size > 1 and close(x, (factor := np.vdot(x, y) / np.vdot(y, y)) * y):
            fault = f"is {factor:.3g} times what it should be"
        elif found:
            fault = found[0]
        elif n in x.shape and not close(called(name, function, [first_of(y, n) for y in args])[k], first_of(x, n)):
            fault = "has a wrong axis: what does not depend on each other is added up"
        else:
            fault = f"is wrong in {(np.abs(x - y) > TOLERANCE * np.abs(y).max()).sum()} of {x.size} entries"
            fault += ": compare it with differences of the output" * name.endswith("_backward")
        yield names[k], fault


def rare_faults(
    name: str, function: Callable[..., Any], right: Callable[..., Any], args: list[Any], parameters: list[str]
) -> Iterator[tuple[str, str]]:
    """Those of a function that returns what it should for the usual arguments."""
    if changed := spoiled(function, args, parameters):
        yield "", f"changes its argument {' and '.join(changed)}: the next one who uses it gets another array"
    if name == "dynamic_routing":
        got, wanted = (called(name, f, [args[0], 2]) for f in (function, right))
        if not all(map(close, got, wanted)):
            yield "", "takes no notice of n_iters"
    if name == "e_step" and not np.isfinite(called(name, function, [*args[:3], 100 * args[3]])).all():
        yield "r", "is not finite for votes far from all parents"
    if name == "margin_loss" and not np.isfinite(called(name, function, [0 * args[0], args[1]])[1]).all():
        yield "dv", "is not finite where v is 0: add 1e-9 under the root"
    if name == "m_step" and not np.isfinite(called(name, function, [args[0], 0 * args[1], *args[2:]])[0]).all():
        yield "mu", "is not finite where the mass is 0: add 1e-8 to it"


def ending(error: BaseException, path: Path) -> str:
    """An error in words, with the line of the student's file."""
    lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == str(path)]
    return f"ends in {type(error).__name__}{f', line {lines[-1]}' if lines else ''}: {one_line(error)}"


def check(path: Path, numbers: Collection[int] = ()) -> Iterator[tuple[str, str]]:
    """The functions of the file ``path``, of these exercises or of all, each with what is wrong with it, or ""."""
    mine: dict[str, Any] = {"__name__": "mine"}
    with limited():
        exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), mine)
    missing = FUNCTIONS.keys() - mine.keys()
    theirs = {name: mine.get(name, getattr(exercises, name)) for name in FUNCTIONS}  # the stub for a missing one
    for name, function in theirs.items():
        if numbers and FUNCTIONS[name][0] not in numbers:
            continue
        mine.update({other: getattr(solutions, other) for other in FUNCTIONS if other != name})
        try:
            if name in missing:
                yield name, f"is not in {path.name}"
                continue
            outputs_of = dict[str, list[str]]()
            for output, fault in faults(name, function):
                outputs_of.setdefault(fault, []).append(output)
            found = [f"{', '.join(of)}{': each' * (len(of) > 1)} {fault}".strip() for fault, of in outputs_of.items()]
        except NotImplementedError:
            found = ["is not written yet"]
        except UserError as error:
            found = [str(error)]
        except (Exception, SystemExit) as error:
            found = [ending(error, path)]
        yield name, "; ".join(found)


def squares(images: Array) -> Array:
    """Images (B, 28, 28) -> of each its 25 squares of 9 x 9 pixels, four apart: (B, 25, 81)."""
    view = np.lib.stride_tricks.sliding_window_view(images, (9, 9), axis=(1, 2))[:, ::4, ::4]
    return view.reshape(len(images), 25, 81) / 255


def trained_accuracy(network: Callable[..., Any], n_steps: int = 250, batch: int = 16, lr: float = 0.01) -> float:
    """The accuracy on 300 new drawn digits after a training of a student's ``network`` with Adam."""
    rng = np.random.default_rng(100)
    images, labels = stroke_digits(rng, n_steps * batch + 300)
    x, targets = squares(images), np.eye(10)[labels]
    params = [rng.normal(0, 0.1, (81, 32)), np.zeros(32), rng.normal(0, 0.1, (100, 10, 8, 8))]
    m, s = ([np.zeros_like(p) for p in params] for _ in range(2))
    for t in range(n_steps):
        of_images = [network(x[k], targets[k], *params)[2:] for k in range(t * batch, (t + 1) * batch)]
        for p, m_p, s_p, *grads in zip(params, m, s, *of_images, strict=True):
            grad = sum(grads) / batch
            m_p += 0.1 * (grad - m_p)
            s_p += 0.01 * (grad * grad - s_p)
            p -= lr * (m_p / (1 - 0.9 ** (t + 1))) / (np.sqrt(s_p / (1 - 0.99 ** (t + 1))) + 1e-8)
    v = [network(patches, target, *params)[0] for patches, target in zip(x[-300:], targets[-300:], strict=True)]
    return float((np.linalg.norm(v, axis=2).argmax(axis=1) == labels[-300:]).mean())


@script
def main(argv: Sequence[str]) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=path_of, help="your copy of lesson/exercises.py")
    parser.add_argument("exercise", nargs="*", default=[], help="its number, 1 to 9; all without")
    parser.add_argument("--help-all", action="help", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not set(args.exercise) <= set("123456789"):
        parser.error("argument exercise: expected numbers from 1 to 9, such as 1 3")
    if not args.file.exists():
        raise UserError(f"No such file: {args.file}")
    exercises = {int(number) for number in args.exercise}
    asked = {*exercises, *(range(1, 6) if 9 in exercises else ())}  # those that the training needs
    try:
        found = list(check(args.file, asked))
    except (Exception, SystemExit) as error:
        raise UserError(f"{args.file} {ending(error, args.file)}") from None
    for name, fault in found:
        print(f"{FUNCTIONS[name][0]}  {name:<25}", fault or "passes")
    wrong = any(fault for _, fault in found)
    print(f"{sum(not fault for _, fault in found)} of {len(found)} functions pass", flush=True)
    if 9 in exercises:
        print("training with your functions ...", flush=True)
        mine: dict[str, Any] = {"__name__": "mine"}
        try:
            exec(compile(args.file.read_bytes(), args.file, "exec", dont_inherit=True), mine)
            accuracy = trained_accuracy(mine["network"])
        except NotImplementedError as error:
            *_, last = traceback.extract_tb(error.__traceback__)
            raise UserError(f"the training needs exercises 1 to 5 and 9: {last.name} is not written yet") from None
        except (Exception, SystemExit) as error:
            raise UserError(f"the training {ending(error, args.file)}") from None
        print(f"your network classifies {accuracy:.0%} of 300 new drawn digits correctly", flush=True)
        if wrong and accuracy > 0.5:
            print("It learns in spite of the fault above: an accuracy does not prove a gradient right.", flush=True)
        elif accuracy <= 0.5:
            print("It does not learn: repair the fault above first." if wrong else "It does not learn.", flush=True)
    raise SystemExit(int(wrong))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
