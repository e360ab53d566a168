"""What several test files share: the gradient check, operator mutants, and running a script as a person does."""

from __future__ import annotations

import ast
import atexit
import functools
import gzip
import importlib
import inspect
import os
import shutil
import struct
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

import multimnist_capsnet as multimnist
from data.stroke_digits import stroke_digits
from more import attacks
from smallnorb_novel_viewpoint import init_state, parse
from support.experiment import script_path

Array = np.ndarray
Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(__file__).resolve().parent / "data"
REAL_DATA = Path(os.environ.get("CAPSULES_DATA", ROOT.parent / "shared" / "data"))  # where real data lie, if anywhere
MNIST, SMALLNORB = REAL_DATA / "mnist", REAL_DATA / "smallnorb_sample"


def _needs(folder: Path) -> Callable[[Any], Any]:
    """Mark a test of real data: ``-m real_data`` picks these, and each says where it looked when it is skipped."""
    skip = pytest.mark.skipif(not folder.is_dir(), reason=f"no {folder}: CAPSULES_DATA names the folder of real data")
    return lambda test: pytest.mark.real_data(skip(test))


needs_mnist, needs_smallnorb = _needs(MNIST), _needs(SMALLNORB)


class GradientError(AssertionError):
    """An analytic gradient that the function's own differences do not confirm."""


def check_gradient(
    f: Callable[..., float],
    inputs: Mapping[str, Array],
    grads: Mapping[str, Array],
    rng: np.random.Generator,
    *,
    n_directions: int = 2,
    step: float = 1e-5,
    tolerance: float = 1e-6,
) -> None:
    """Compare gradients with central differences along random directions, one input at a time, in float64.

    ``f(**inputs)`` is a scalar: contract the output with a *random* upstream gradient, as a sum would let errors cancel
    (a softmax backward of zeros passes with all ones). The cost does not depend on an input's size. Each input is
    tested by itself, since a small gradient would hide behind a large one. ``inputs`` and ``grads`` have the same
    keys. Raises GradientError for a wrong gradient or shape, and AssertionError where a gradient is so small beside f
    that the difference could not tell right from wrong.
    """
    assert set(inputs) == set(grads), f"inputs {sorted(inputs)} but gradients {sorted(grads)}"
    value = float(f(**inputs))
    assert np.isfinite(value)
    for name, x in inputs.items():
        grad = grads[name]
        assert x.dtype == np.float64, f"{name} is {x.dtype}: differences need float64"
        if grad.shape != x.shape:
            raise GradientError(f"the gradient of {name} has shape {grad.shape}, not {x.shape}")
        if grad.dtype != np.float64:
            raise GradientError(f"the gradient of {name} is {grad.dtype}")
        for _ in range(n_directions):
            direction = rng.standard_normal(x.shape)
            plus = float(f(**{**inputs, name: x + step * direction}))
            minus = float(f(**{**inputs, name: x - step * direction}))
            numeric = (plus - minus) / (2 * step)
            analytic = float((grad * direction).sum())
            # The size that the sum has when its terms do not happen to cancel.
            scale = max(abs(numeric), float(np.linalg.norm(grad * direction)))
            rounding = 4 * np.finfo(np.float64).eps * max(abs(plus), abs(minus)) / step
            assert rounding < 0.3 * tolerance * scale or not scale < np.inf, (
                f"{name}: slope {scale:.1e} is lost in the rounding error {rounding:.1e} of a value of {value:.1e}"
            )
            if not abs(numeric - analytic) <= tolerance * scale:
                raise GradientError(f"{name}: slope {numeric:.12g}, but the gradient says {analytic:.12g}")


# --- Mutants: does the check see a wrong sign? ------------------------------------------------------------------------

SWAPS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
}


class _Mutator(ast.NodeTransformer):
    """Counts what can be broken in a function, and breaks the one numbered ``target``."""

    def __init__(self, target: int | None) -> None:
        self.target, self.count, self.line = target, 0, 0

    def _is_target(self, node: ast.expr | ast.stmt) -> bool:
        self.count += 1
        if self.count - 1 == self.target:
            self.line = node.lineno
        return self.count - 1 == self.target

    def _negated(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Constant | ast.Starred):  # None, and arrays that a function passes on
            return node
        if not self._is_target(node):
            return node
        text = "{k: -v for k, v in X.items()} if isinstance(X, dict) else -X".replace("X", f"({ast.unparse(node)})")
        return ast.parse(text, mode="eval").body

    def _operator(self, node: ast.BinOp | ast.AugAssign | ast.UnaryOp) -> Any:
        self.generic_visit(node)
        if isinstance(node, ast.UnaryOp):
            if not isinstance(node.op, ast.USub) or isinstance(node.operand, ast.Constant):
                return node  # an axis of -1 is no arithmetic
        elif type(node.op) not in SWAPS:
            return node
        if self._is_target(node):
            if isinstance(node, ast.UnaryOp):
                return node.operand
            node.op = SWAPS[type(node.op)]()
        return node

    visit_BinOp = visit_AugAssign = visit_UnaryOp = _operator  # noqa: N815

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        node.value = self.visit(node.value)  # arithmetic inside an index moves things; it is no term of a gradient
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        is_shape = isinstance(node.func, ast.Attribute) and node.func.attr in {"reshape", "zeros", "empty"}
        node.func = self.visit(node.func)
        if not is_shape:
            node.args = [self.visit(a) for a in node.args]
            node.keywords = [self.visit(k) for k in node.keywords]
        return node

    def visit_Return(self, node: ast.Return) -> Any:
        self.generic_visit(node)
        if isinstance(node.value, ast.Tuple):
            node.value.elts = [self._negated(e) for e in node.value.elts]
        elif isinstance(node.value, ast.Name | ast.Call) and "full_like" not in ast.unparse(node.value):
            node.value = self._negated(node.value)  # an array, and not one of NaN
        return node

    def visit_Dict(self, node: ast.Dict) -> Any:
        self.generic_visit(node)
        node.values = [self._negated(v) for v in node.values]
        return node


def operator_mutants(module: ModuleType | type, name: str) -> Iterator[tuple[str, FunctionType]]:
    """The function ``module.name`` (or the method of a class) again and again, each time with one thing wrong.

    + and - change places, a product becomes a sum, a quotient a product, a minus sign goes away, += becomes -=, one
    returned array (or entry of a dict) is negated. Shapes and indices are left alone. Yields (description, function)
    and raises AssertionError where there is nothing to break.
    """
    original = getattr(module, name)
    source, first_line = inspect.getsourcelines(original)
    text = textwrap.dedent("".join(source))
    counter = _Mutator(None)
    counter.visit(ast.parse(text))
    assert counter.count, f"{name} holds nothing to break"
    for target in range(counter.count):
        mutator = _Mutator(target)
        tree = ast.fix_missing_locations(mutator.visit(ast.parse(text)))
        namespace = dict(inspect.unwrap(original).__globals__)
        exec(compile(tree, f"<mutant of {name}>", "exec"), namespace)
        line = source[mutator.line - 1].strip()
        yield f"{name}:{first_line + mutator.line - 1}, break {target}: {line}", namespace[name]


def surviving_mutants(monkeypatch: Any, module: ModuleType | type, name: str, check: Callable[[], None]) -> list[str]:
    """Descriptions of the mutants of ``module.name`` that ``check`` lets pass; at least one must be caught by a wrong
    number (and not by a crash)."""
    check()
    survivors, n_wrong_numbers, original = [], 0, getattr(module, name)
    for description, mutant in operator_mutants(module, name):
        with monkeypatch.context() as patch:  # in the function itself, which pairs and partials hold
            patch.setattr(inspect.unwrap(original), "__code__", inspect.unwrap(mutant).__code__)
            getattr(original, "cache_clear", int)()
            try:
                with np.errstate(all="ignore"):
                    check()
            except GradientError:
                n_wrong_numbers += 1
            except Exception:  # a mutant that crashes is caught as well
                pass
            else:
                survivors.append(description)
    getattr(original, "cache_clear", int)()
    assert n_wrong_numbers, f"no mutant of {name} was caught by its numbers"
    return survivors


# --- The experiments, as small as they can be -------------------------------------------------------------------------


def load(name: str) -> Any:
    """The module of a script's name, in whichever room it lies."""
    path = script_path(name)
    assert path, name
    return importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


class Experiment(NamedTuple):
    """A script, and the flags of its smallest training: two epochs of three steps for each model."""

    name: str
    tiny: str

    @property
    def script(self) -> Any:
        return load(self.name)

    @property
    def has_digits(self) -> bool:
        return "--data-dir" in self.tiny

    @property
    def models(self) -> tuple[str, ...]:
        return self.script.MODEL_NAMES

    def argv(self, more: str = "") -> list[str]:
        """The smallest training, and more flags."""
        return [*self.tiny.format(digits=digits_folder()).split(), "--threads", "1", "--quiet", *more.split()]


_DIGITS = "--dataset mnist --data-dir {digits} --n-epochs 2 --batch-size 8 --n-train 24"
_CAPSNET = f"{_DIGITS} --n-test 20 --conv-channels 2 --primary-types 1"
_TINY = {
    "smallnorb_novel_viewpoint": "--n-epochs 2 --batch-size 4 --n-train-views 2 --n-test-views 2 --n-elev 1"
                                 " --n-per-combo 1 --loss cross-entropy",
    "multimnist_capsnet": _CAPSNET,
    "mnist_affine_capsnet": f"{_CAPSNET} --n-val 16 --n-sweep 4",
    "conv_matrix_capsules": f"{_DIGITS} --n-test 10 --sizes 5,2,3,2 --loss cross-entropy",
    "capsule_attacks": "--n-epochs 2 --batch-size 8 --n-train 24 --sizes 5,2,3,2 --loss cross-entropy --n-attack 2"
                       " --epsilons 0.5",
}
EXPERIMENTS = {name: Experiment(name, tiny) for name, tiny in _TINY.items()}


def config_of(script: Any, argv: Sequence[str]) -> Any:
    """The configuration that flags make."""
    return parse(script.Config, script.Options, argv)[0]


def states_of(models: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Fresh states of models, by name."""
    return {name: init_state(model, config) for name, model in models.items()}


def smallest(monkeypatch: Patch) -> None:
    """Make small what no flag makes small: the decoder, the sweep of angles, the effort of attacks."""
    base = importlib.import_module("multimnist_capsnet")
    monkeypatch.setitem(base.PRESETS, "small", base.PRESETS["small"] | {"decoder": (16, 16)})
    monkeypatch.setattr(load("mnist_affine_capsnet"), "SWEEP", (-90, 0, 35))
    effort = attacks.Effort(first_steps=5, most_steps=10, queries=10)
    monkeypatch.setattr(attacks.attack, "__defaults__", (effort,))


@functools.cache
def strokes() -> multimnist.Digits:
    """600 drawn digits to train on, 300 to test on."""
    train, test = (stroke_digits(np.random.default_rng(k), n) for k, n in ((0, 600), (1, 300)))
    return multimnist.Digits("strokes", *train, *test)


@functools.cache
def digits_folder() -> Path:
    """Those digits as the four files of MNIST, in a folder of this process."""
    folder = Path(tempfile.mkdtemp(prefix="digits"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for stem, array in zip(multimnist.MNIST_SHA256, strokes()[1:], strict=True):
        (folder / f"{stem}.gz").write_bytes(gzip.compress(idx(array), 1))
    return folder


# --- Pictures of a person ---------------------------------------------------------------------------------------------

PICTURE_CLASSES = ("dark left", "heller", "猫")  # a blank, and another alphabet


def picture(label: int, rng: np.random.Generator, side: int = 20) -> Array:
    """Bright in a band that the class determines."""
    image = rng.integers(0, 60, (side, side, 3))
    image[:, label * side // 3 : (label + 1) * side // 3] += 150
    image[0, 0], image[-1, -1] = 0, 255
    return image.astype(np.uint8)


def write_folder(
    root: Path,
    names: Sequence[str] = PICTURE_CLASSES,
    n: int = 8,
    sides: Sequence[int] = (20,),
    endings: Sequence[str] = (".png",),
    seed: int = 0,
) -> Path:
    rng = np.random.default_rng(seed)
    for label, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for k in range(n):
            image = Image.fromarray(picture(label, rng, sides[k % len(sides)]))
            image.save(root / name / f"bild {k}ß{endings[k % len(endings)]}")
    return root


def idx(array: Array) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


# --- A script in a process of its own ---------------------------------------------------------------------------------


def script_environment() -> dict[str, str]:
    return os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "error", "PYTHONPATH": str(ROOT)}


# --- What a script says of mistakes -----------------------------------------------------------------------------------


def usage_error(script: ModuleType, argv: list[str], capsys: Capture) -> str:
    """The one line of a wrong command line; status 2."""
    try:
        status = script.main(argv)
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2, argv
    out, error = capsys.readouterr()
    assert out == "", argv
    assert ": error: " in error, argv
    assert error.count("\n") == 1, argv
    assert error.endswith("\n"), argv
    return error


def failure(script: ModuleType, argv: list[str], capsys: Capture) -> str:
    """The one line that a failed run prints; status 1."""
    capsys.readouterr()
    assert script.main(argv) == 1, argv
    out, error = capsys.readouterr()
    assert out == "", argv
    assert error.startswith("error: "), argv
    assert error.count("\n") == 1, argv
    assert error.endswith("\n"), argv
    return error
