"""What people's machines are like: a notebook with a backend, another folder, no home, an old code page, line ends."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import more
import support
import multimnist_capsnet as multimnist
from data import affnist_file, digit_files, files, norb_files, pictures, toy_norb
from data.labelled_pictures import read_sets
from helpers import ROOT, Capture, Patch, script_environment
from more import your_own_images
from support import results
from support.results import is_git_root

ROOMS = (".", "data", "support", "fast", "more", "explorer", "evidence", "lesson", "benchmarks")
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for room in ROOMS
    for path in sorted((ROOT / room).glob("*.py"))
    if path.stem not in ("__init__", "__main__", "jax_networks", "mine", "my_lesson")  # of JAX, and of a student
]


def text_of(module: str) -> str:
    return (ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8")
SCRIPTS = [name for name in MODULES if '\nif __name__ == "__main__":' in text_of(name)
           and name not in ("lesson.exercises", "lesson.solutions")]  # they print an example


def python(*words: str, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = script_environment() | variables
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, encoding="utf-8",
        errors="replace", timeout=120, check=False,
    )


IMPORT_ALL = """
import importlib, logging, os, random, signal, sys, threading, warnings
import matplotlib.pyplot as plt, numpy as np

plt.switch_backend("svg")
import scipy.special, threadpoolctl  # which add a kind of warning, and a variable of their own
warnings.simplefilter("ignore", ImportWarning)
signal.signal(signal.SIGTERM, lambda *_: None)

def state():
    return {
        "backend": plt.get_backend(), "style": dict(plt.rcParams), "figures": plt.get_fignums(),
        "environment": dict(os.environ), "folder": os.getcwd(), "path": list(sys.path), "warnings": warnings.filters[:],
        "signals": [signal.getsignal(number) for number in signal.valid_signals()], "numpy": np.geterr(),
        "threads": threading.active_count(), "hooks": (sys.excepthook, sys.displayhook, sys.gettrace()),
        "logging": logging.root.handlers[:],
        "streams": [(stream.encoding, stream.errors) for stream in (sys.stdout, sys.stderr)],
        "random": (random.getstate(), np.random.get_state()[1].tolist()), "print": np.get_printoptions(),
    }

before = state()
for name in sys.argv[1:]:
    importlib.import_module(name)
after = state()
print([name for name in before if before[name] != after[name]], end="")
"""


def test_no_import_changes_anything(tmp_path: Path) -> None:
    """Whatever backend, style, signals and warnings a notebook has set, they are as before."""
    process = python("-c", IMPORT_ALL, *MODULES, folder=tmp_path, MPLBACKEND="pdf")
    assert (process.returncode, process.stdout, process.stderr) == (0, "[]", "")
    assert list(tmp_path.iterdir()) == []


def test_pictures_are_drawn_without_pyplot() -> None:
    """Else a notebook's backend would draw them; and support.figures, which needs none, imports matplotlib first."""
    for name in set(MODULES) - {"support.figures"}:
        imports = re.findall(r"^ *(?:from|import) (support\.figures|matplotlib[.\w]*)", text_of(name), re.MULTILINE)
        assert imports[:1] in ([], ["support.figures"]), name
        assert "matplotlib.pyplot" not in imports, name


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize(("variables", "expected"), [
    ("HOME=/home/ada XDG_CACHE_HOME=no/whole/path", "/home/ada/.cache/hinton-mnist"),
    ("HOME=/home/ada XDG_CACHE_HOME=/large CAPSULES_CACHE=~/own", "/home/ada/own"),
    ("CAPSULES_CACHE=/own", "/own"),
    ("XDG_CACHE_HOME=/large", "/large/hinton-mnist"),
])
def test_where_downloads_and_toys_are_kept(variables: str, expected: str, monkeypatch: Patch) -> None:
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    assert files.cache_folder() == multimnist.cache_dir() == Path(expected)


@pytest.fixture
def nobody(monkeypatch: Patch) -> None:
    """A process that has neither a home folder nor a name, as one in a container may be."""
    for name in ("HOME", "XDG_CACHE_HOME", "CAPSULES_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)


@pytest.mark.usefixtures("nobody")
def test_without_a_home_folder_strokes_are_drawn_and_no_toys(monkeypatch: Patch, capsys: Capture) -> None:
    for cache_folder in (files.cache_folder, multimnist.cache_dir):
        with pytest.raises(OSError, match="no home folder for a cache: let the variable CAPSULES_CACHE name a folder"):
            cache_folder()
    with pytest.raises(OSError, match="cannot draw toys: there is no home folder"):
        toy_norb.cached_toys(None, 0)
    monkeypatch.setattr(multimnist, "STROKE_COUNTS", (3, 2))
    found = multimnist.resolve_dataset("auto", np.random.default_rng(0))
    assert (found.name, len(found.train_labels), len(found.test_labels)) == ("strokes", 3, 2)
    assert "Reason: there is no home folder for a cache" in capsys.readouterr().err


READERS: dict[str, Callable[[Path], Any]] = {  # of a file in the home folder, whose content is none, or of that folder
    "train.csv": digit_files.read_digit_files,
    "x.npz": lambda path: read_sets(path, 20, 1, np.random.default_rng(0)),
    "x.png": lambda path: pictures.read_square(path, 20, 1),
    "x.gif": lambda path: list(your_own_images.named_files([path])),
    norb_files.file_name("training", "cat"): lambda path: norb_files.read_norb(path.parent, "training"),
    "x.mat": affnist_file.read_affnist,
    "toys-0": lambda path: toy_norb.cached_toys(path.parent, 0),
}


@pytest.mark.parametrize("name", READERS)
def test_the_home_folder_may_be_a_tilde(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """What a reader does with ~/x it does with the whole path."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(toy_norb, "write_toy_norb", lambda folder, seed: folder.mkdir(exist_ok=True))
    home.mkdir()
    for file in (name, *(norb_files.file_name("training", part) for part in norb_files.NORB_PARTS)):
        (home / file).touch()
    said = []
    for folder in (Path("~"), home):
        try:
            said.append(str(READERS[name](folder / name)))
        except (OSError, ValueError) as error:
            said.append(str(error).replace("~", str(home)))
    assert said[0] == said[1]


@pytest.mark.parametrize(("name", "form"), [("data", "{}.py"), ("fast", "{}/__init__.py"), ("support", "{}.py")])
def test_a_module_in_the_way_of_the_projects_own_is_named_in_one_line(
    name: str, form: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """As that of a notebook, where this project is on the path."""
    path = tmp_path / form.format(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text("x = 1", encoding="utf-8")
    says = f"{path} is in the way of {ROOT / name}: rename it, or start in the project's folder"
    process = python("-m", "more.make_toy_norb", "--help", folder=tmp_path)
    assert (process.returncode, process.stdout, process.stderr.count("\n")) == (1, "", 1)
    assert says in process.stderr
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=re.escape(says)):
        importlib.reload(more if name == "support" else support)


def test_a_figure_of_results_is_drawn_from_any_folder(tmp_path: Path) -> None:
    """Also where a notebook names, for the commands that it starts, a backend that is not installed."""
    process = python("-m", "benchmarks.figure", folder=tmp_path, MPLBACKEND="module://not_installed.backend_inline")
    assert (process.returncode, process.stderr) == (0, "")
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*.png")] == [Path("viz/speed/steps.png")]


OLD = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "cp1252"}
HELP_ALL = """
import importlib, sys

for name in sys.argv[1:]:
    try:
        importlib.import_module(name).main(["--help-all"])
    except SystemExit as stopped:
        assert not stopped.code, name
"""


def encodes(call: ast.Call) -> bool:
    """Whether a call that may read or write text says in which encoding."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in ("read_text", "write_text"):
        return "encoding" in given or len(call.args) > (name == "write_text")
    if name in ("open", "fdopen") and ast.unparse(call.func) not in ("Image.open", "os.open", "webbrowser.open"):
        modes = [ast.literal_eval(a) for a in (*call.args, *given.values()) if isinstance(a, ast.Constant)]
        return "encoding" in given or any("b" in mode for mode in modes if isinstance(mode, str))
    return name not in ("run", "Popen", "check_output") or "encoding" in given or "text" not in given


def test_every_text_has_an_encoding_of_its_own() -> None:
    """Else it is that of the locale."""
    for name in MODULES:
        calls = [node for node in ast.walk(ast.parse(text_of(name))) if isinstance(node, ast.Call)]
        assert [f"{name}, line {call.lineno}: {ast.unparse(call)}" for call in calls if not encodes(call)] == []


def test_a_git_that_writes_paths_in_its_own_way_or_trusts_no_folder(monkeypatch: Any, capsys: Any) -> None:
    said = subprocess.CompletedProcess([], 0, "/c/Users/me/project\n", "")
    monkeypatch.setattr(results, "git", lambda *words, cwd=None: said)
    monkeypatch.setattr(results.shutil, "which", lambda name: name)
    assert not is_git_root(ROOT)
    said.stdout = ""
    for said.stderr, is_told in (("fatal: …\n\tgit config --global --add safe.directory /x\n", True),
                                 ("fatal: not a git repository", False)):
        assert results.git_commit.__wrapped__() is None
        assert ("as git does not trust the folder" in capsys.readouterr().err) == is_told


def test_a_clone_of_windows_in_an_old_locale(tmp_path: Path) -> None:
    """Its files have the line ends of the repository, the pages are proved, and all help is printed."""
    if not is_git_root(ROOT):
        pytest.skip("no repository to clone")
    clone = tmp_path / "clone"
    subprocess.run(["git", "-c", "core.autocrlf=true", "clone", "-q", str(ROOT), str(clone)], check=True)
    listed = subprocess.run(["git", "ls-files", "--eol"], cwd=clone, capture_output=True, check=True).stdout
    assert b"i/lf    w/lf" in listed
    assert not re.search(rb"w/(crlf|mixed)", listed)
    process = python("-m", "evidence.report", "--check", folder=clone, **OLD, PYTHONPATH="")
    assert process.returncode == 0, process.stderr
    process = python("-c", HELP_ALL, *SCRIPTS, folder=tmp_path, **OLD)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("usage: ") == len(SCRIPTS)
