"""Files, of all scripts: no output replaces an input, nothing is left behind; Ctrl-C or a kill at any time is clean."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from data import affnist_file, norb_files, pictures
from helpers import EXPERIMENTS, ROOT, Experiment, failure, script_environment, smallest, usage_error
from support import console, files, run
from support.download import UnavailableError, download
from support.flags import OUTPUTS
from support.optimizers import TrainState
from test_run import nobody_reads, process_of, streams

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py") if "\ndef main(" in path.read_text(encoding="utf-8"))
FIGURES = [name for name in SCRIPTS if name.partition("_")[2].removesuffix("_gif") in EXPERIMENTS]


@pytest.fixture(params=EXPERIMENTS, scope="module")
def experiment(request: pytest.FixtureRequest) -> Experiment:
    return EXPERIMENTS[request.param]


@pytest.fixture(autouse=True)
def _smallest(monkeypatch: Patch) -> None:
    smallest(monkeypatch)


@pytest.fixture
def no_run(monkeypatch: Patch) -> None:
    """What is wrong has to be found before any data are made, and before the first run of a comparison."""
    for experiment in EXPERIMENTS.values():
        monkeypatch.setattr(experiment.script, "make_data", lambda config: pytest.fail("got as far as the data"))
    monkeypatch.setattr(importlib.import_module("compare_seeds"), "compare", lambda *_: pytest.fail("compared"))


def trained(experiment: Experiment, path: Path, more: str = "") -> Path:
    """A checkpoint of one epoch of the CNN."""
    argv = experiment.argv(f"--models cnn --n-epochs 1 {more}")
    with contextlib.redirect_stdout(io.StringIO()):
        assert experiment.script.main([*argv, "--checkpoint", str(path)]) == 0
    return path


def status_of(script: Any, argv: list[str]) -> int:
    """The exit status, also that of a wrong command line."""
    try:
        status: int = script.main(argv)
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return status


def content(folder: Path) -> dict[str, bytes | None]:
    """Every file of a folder, and the folders in it."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


# ----------------------------------------------------------------------------------------------------------------------
# No output replaces an input
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A folder with files of every kind, and other names of one of them; the test runs in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("c.npz", "p.png", "r.json", "a.mat", "data/train-images-idx3-ubyte", "data/own/more.mat", "x/i.gif"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(name)
    os.link("data/train-images-idx3-ubyte", "hard.json")
    Path("link.json").symlink_to("data/train-images-idx3-ubyte")
    os.link("c.npz", "hard.gif")
    Path("link.gif").symlink_to("c.npz")
    os.link("a.mat", "mat.json")
    os.link("a.mat", "mat.gif")
    Path("pictures/cat").mkdir(parents=True)
    for name in ("mat.html", "page.gif", "pictures/cat/1.png"):
        os.link("c.npz", name)
    for name in EXPERIMENTS:
        Path("out", name).mkdir(parents=True)
        os.link("c.npz", f"out/{name}/figure.png")
        Path("results-out", name).mkdir(parents=True)
        Path("results-out", name, "figure.png").symlink_to(tmp_path / "r.json")
    return tmp_path


@pytest.mark.usefixtures("no_run")
@pytest.mark.parametrize(
    ("which", "argv", "says"),
    [
        ("experiment", "--data-dir data --out-json data/train-images-idx3-ubyte", "--out-json: would overwrite"),
        ("experiment", "--data-dir data --out-json data/own/more.mat", "--out-json: would overwrite"),
        ("experiment", "--data-dir data --out-json hard.json", "--out-json: would overwrite"),
        ("experiment", "--data-dir data --out-json link.json", "--out-json: would overwrite"),
        ("experiment", "--data-dir data --checkpoint hard.json", "--checkpoint: would overwrite"),
        ("experiment", "--out-json README", "--out-json: would overwrite"),
        ("experiment", "--checkpoint SCRIPT", "--checkpoint: would overwrite"),
        ("experiment", "--checkpoint c.npz --out-json hard.gif", "--out-json: is the same file as --checkpoint"),
        ("experiment", "--checkpoint new --out-json x/../new", "--out-json: is the same file as --checkpoint"),
        ("eval", "--eval-only --checkpoint c.npz --out-json link.gif", "--out-json: would overwrite c.npz"),
        ("png", "--checkpoint c.npz --predict p.png --predict-png p.png", "--predict-png: would overwrite p.png"),
        ("png", "--checkpoint c.npz --predict p.png --predict-png hard.gif", "--predict-png: would overwrite c.npz"),
        ("affnist", "--affnist a.mat --canvas 40 --out-json a.mat", "--out-json: would overwrite a.mat"),
        ("affnist", "--affnist a.mat --canvas 40 --out-json mat.json", "--out-json: would overwrite a.mat"),
        ("affnist", "--affnist a.mat --canvas 40 --checkpoint ./a.mat", "--checkpoint: would overwrite a.mat"),
        ("gif checkpoint", "--checkpoint c.npz --out hard.gif", "--out: would overwrite c.npz"),
        ("gif checkpoint", "--checkpoint c.npz --out link.gif", "--out: would overwrite c.npz"),
        ("gif checkpoint", "--checkpoint x/i.gif --out x/i.gif", "--out: would overwrite x/i.gif"),
        ("gif", "--data-dir . --out mat.gif", "--out: would overwrite"),
        ("visualize", "--checkpoint c.npz --outdir out", "--outdir: figure.png: would overwrite c.npz"),
        ("visualize", "--results r.json --outdir results-out", "--outdir: figure.png: would overwrite r.json"),
        ("seeds", "smallnorb_novel_viewpoint --out SCRIPT", "--out: would overwrite"),
        ("seeds", "mnist_affine_capsnet --out mat.json -- --affnist=a.mat", "--out: would overwrite a.mat"),
        ("seeds", "mnist_affine_capsnet --out mat.json -- --affnist a.mat", "--out: would overwrite a.mat"),
        ("make_explorer", "--multimnist c.npz --out mat.html", "--out: would overwrite c.npz"),
        ("make_explorer", "--viewpoint c.npz --out mat.html", "--out: would overwrite c.npz"),
        ("make_explorer_gif", "--page page.gif --out hard.gif", "--out: would overwrite page.gif"),
        ("visualize_claims", "--claims c.npz --outdir out", "--outdir: figure.png: would overwrite c.npz"),
        ("visualize_how_capsules_work", "--capsnet c.npz --outdir out", "--outdir: figure.png: would overwrite c.npz"),
    ],
)  # fmt: skip
def test_no_output_replaces_an_input(which: str, argv: str, says: str, inputs: Path, capsys: Capture) -> None:
    before = content(inputs)
    words = argv.replace("README", str(ROOT / "README.md")).replace("SCRIPT", str(ROOT / "compare_seeds.py")).split()
    kinds = {
        "experiment": list(EXPERIMENTS), "affnist": ["mnist_affine_capsnet"], "seeds": ["compare_seeds"],
        "eval": [name for name in EXPERIMENTS if name != "smallnorb_novel_viewpoint"],
        "png": list(WITH_PNG), "gif checkpoint": ["make_mnist_affine_capsnet_gif"],
        "gif": [name for name in FIGURES if name.startswith("make")],
        "visualize": [name for name in FIGURES if name.startswith("visualize")],
    }  # fmt: skip
    for name in kinds.get(which, [which]):
        script = importlib.import_module(name)
        more = ["--dataset", "smallnorb"] if "smallnorb" in name and "--data-dir" in words else []
        assert f"argument {says}" in usage_error(script, [*words, *more], capsys), name
    assert content(inputs) == before


@pytest.mark.usefixtures("no_run")
@pytest.mark.parametrize(
    ("name", "argv", "says"),
    [
        *(
            (name, "--results none.json", "there is no results file none.json")
            for name in FIGURES
            if "visualize" in name
        ),
        ("make_explorer", "--multimnist none.npz", "there is no checkpoint none.npz"),
        ("make_explorer", "--viewpoint none.npz", "there is no checkpoint none.npz"),
        ("visualize_how_capsules_work", "--capsnet none.npz", "there is no checkpoint none.npz"),
    ],
)
def test_a_file_that_is_missing_is_found_before_the_data(
    name: str, argv: str, says: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert failure(importlib.import_module(name), argv.split(), capsys) == f"error: {says}\n"
    assert content(tmp_path) == {}


def test_an_output_is_taken_by_any_name() -> None:
    """By all scripts alike: no ending is asked for, and no input is replaced whatever its name."""
    seen = set()
    for name in (*SCRIPTS, "benchmarks.__main__"):
        for action in importlib.import_module(name).make_parser()._actions:
            if action.dest in OUTPUTS and action.option_strings:
                assert action.type("x.txt") == Path("x.txt"), (name, action.dest)
                seen.add(action.dest)
    assert seen == {*OUTPUTS}


@pytest.mark.parametrize("name", [*SCRIPTS, "benchmarks.__main__", "benchmarks.figure"])
def test_a_name_that_is_too_long_is_one_short_line(
    name: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """Of every file and folder that the flags of a script name."""
    monkeypatch.chdir(tmp_path)
    script, long = importlib.import_module(name), "x" * 200 + "/" + "y" * 5000
    for action in script.make_parser()._actions:
        if action.metavar not in ("FILE", "DIR", "IMAGE", "EXPERIMENT"):
            continue
        argv = [*action.option_strings, long]
        if action.dest == "data_dir":
            if name == "make_explorer":  # which trains first
                continue
            argv += ["--dataset", "smallnorb" if "smallnorb" in name else "mnist"]
        for more in ([], ["--dataset", "images"]) if action.dest == "data_dir" and "conv" in name else ([],):
            assert status_of(script, [*argv, *more]) in (1, 2), argv
            out, error = capsys.readouterr()
            assert (out, error.count("\n")) == ("", 1), argv
            assert "error: " in error
            assert len(error) < 600
    assert content(tmp_path) == {}


@pytest.mark.usefixtures("no_run")
def test_the_cache_of_mnist_is_no_place_for_a_result(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    cached = tmp_path / ".cache/hinton-mnist/downloaded/t10k-labels-idx1-ubyte.gz"
    cached.parent.mkdir(parents=True)
    cached.write_text("digits")
    for name in ("multimnist_capsnet", "mnist_affine_capsnet", "conv_matrix_capsules"):
        line = usage_error(importlib.import_module(name), ["--out-json", str(cached)], capsys)
        assert "argument --out-json: would overwrite" in line


def test_results_and_checkpoints_in_the_folder_of_the_data_are_taken(experiment: Experiment, tmp_path: Path) -> None:
    parser = experiment.script.make_parser()
    for name in ("o.json", "c.npz"):
        (tmp_path / name).write_text("earlier")
    flags = ["--dataset", "smallnorb"] if "smallnorb" in experiment.name else []
    flags += ["--data-dir", str(tmp_path), "--out-json", str(tmp_path / "o.json"), "--checkpoint"]
    assert parser.parse_args([*flags, str(tmp_path / "c.npz")])


def test_a_symbolic_link_keeps_being_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/real").write_text("old")
    for name, target in (("link", "folder/real"), ("dangling", "folder/new")):
        (tmp_path / name).symlink_to(target)
        files.require_writable(tmp_path / name)
        with files.atomic_write(tmp_path / name) as stream:
            stream.write(b"new")
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / target).read_text() == "new"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["dangling", "folder", "link", "new", "real"]


@pytest.mark.parametrize("flag", [[], ["--overwrite"]])
def test_a_training_replaces_no_file_that_is_no_checkpoint(
    flag: list[str], experiment: Experiment, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr(experiment.script, "make_data", lambda config: pytest.fail("got as far as the data"))
    path = tmp_path / "thesis.tex"
    stream = io.BytesIO()
    np.savez(stream, x=np.zeros(3))
    for foreign in (b"three years of work", b"", b"PK\3\4", stream.getvalue()):
        path.write_bytes(foreign)
        line = failure(experiment.script, [*experiment.argv(), *flag, "--checkpoint", str(path)], capsys)
        assert line.startswith(f"error: {path} is not a readable checkpoint of {experiment.name}: ")
        assert line.endswith("; --checkpoint does not replace it\n")
        assert path.read_bytes() == foreign


def test_a_checkpoint_of_another_kind_is_replaced_if_that_is_asked_for(
    experiment: Experiment, tmp_path: Path, capsys: Capture
) -> None:
    path = trained(experiment, tmp_path / "c.npz")
    good = path.read_bytes()
    again = [*experiment.argv("--models cnn --n-epochs 1 --seed 1"), "--checkpoint", str(path)]
    with np.load(path) as stored:
        arrays = {key: stored[key] for key in stored.files}
    header = json.loads(str(arrays.pop("header")))
    for change, says in (
        ({"format": 1}, f"is of an older version of {experiment.name}.py: train it again"),
        ({"experiment": "other"}, f"is a checkpoint of other, not of {experiment.name}"),
    ):
        np.savez(path, header=np.array(json.dumps(header | change)), **arrays)
        other = path.read_bytes()
        assert failure(experiment.script, again, capsys) == f"error: {path} {says}; --overwrite replaces it\n"
        assert path.read_bytes() == other
        assert experiment.script.main([*again, "--overwrite"]) == 0
        assert experiment.script.load_checkpoint(path)[0].seed == 1
    path.write_bytes(good)
    assert experiment.script.main(again) == 0  # one of the same experiment is replaced as ever
    assert experiment.script.load_checkpoint(path)[0].seed == 1


# ----------------------------------------------------------------------------------------------------------------------
# Nothing is left behind
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*EXPERIMENTS, *FIGURES, "compare_seeds"])
def test_a_check_that_fails_leaves_no_folder(name: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    script = importlib.import_module(name)
    missing = ["--data-dir", "none", *(["--dataset", "smallnorb"] if "smallnorb" in name else [])]
    compared = ["smallnorb_novel_viewpoint", "--out=a/o.json", "--", "--dataset=smallnorb"]
    runs = {
        "visualize": [["--outdir", "new/deep", "--checkpoint", "none"], ["--outdir", "new/deep", *missing]],
        "make": [["--out", "new/deep/x.gif", *missing]],
        "compare": [[*compared, "--data-dir=none"]],
    }.get(name.partition("_")[0], [
        ["--out-json", "new/o.json", "--checkpoint", "new/deep/c.npz", *missing],
        ["--out-json", "new/o.json", "--checkpoint", "new/deep/c.npz", "--resume"],
    ])  # fmt: skip
    for argv in runs:
        assert script.main(argv) == 1, argv
        assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
        assert content(tmp_path) == {}


OTHERS = "visualize_claims", "visualize_parts", "visualize_networks", "visualize_how_capsules_work", "make_explorer"


@pytest.mark.parametrize("name", [*FIGURES, *OTHERS])
def test_an_output_without_a_name_is_refused(name: str, capsys: Capture) -> None:
    flag = "--outdir" if name.startswith("visualize") else "--out"
    assert f"argument {flag}: " in usage_error(importlib.import_module(name), [f"{flag}="], capsys)


def test_a_download_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"MNIST could not be downloaded .*: stay at home"):
        download(tmp_path / "a/b/x.gz", "0" * 64, ("http://127.0.0.1:9/",), "MNIST", "stay at home")
    assert content(tmp_path) == {}


def test_folders_are_made_for_what_is_written_and_go_where_it_fails(tmp_path: Path) -> None:
    with files.atomic_write(tmp_path / "a/b/c") as stream:
        stream.write(b"x")
    with pytest.raises(ZeroDivisionError), files.atomic_write(tmp_path / "d/e/f"):
        raise ZeroDivisionError
    assert content(tmp_path) == {"a": None, "a/b": None, "a/b/c": b"x"}


def test_what_a_killed_process_was_writing_goes_with_the_next_run(experiment: Experiment, tmp_path: Path) -> None:
    dies = """
def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)
os.fsync = die
"""
    process = process_of(experiment, experiment.argv("--models cnn"), tmp_path / "c.npz", dies)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert [p.name for p in tmp_path.iterdir()] == [f".c.npz.{files.HOST}-{process.pid}.tmp"]
    ours = files.temporary_path(tmp_path / "other")  # of a process that runs
    theirs = tmp_path / f".c.npz.{'0' * 8}-{process.pid}.tmp"  # of another machine
    for path in (ours, theirs):
        path.touch()
    trained(experiment, tmp_path / "c.npz")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["c.npz", ours.name, theirs.name])


def test_a_temporary_folder_of_a_killed_process_goes_with_the_next_one(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(files.tempfile, "gettempdir", lambda: str(tmp_path))
    with subprocess.Popen(["true"]) as ended:
        pass
    abandoned = tmp_path / f".run-x.{files.HOST}-{ended.pid}.tmp"
    (abandoned / "deep").mkdir(parents=True)
    with files.temporary_folder() as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


def test_a_last_checkpoint_that_cannot_be_saved_ends_in_1_and_costs_no_result(
    experiment: Experiment, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    argv = [*experiment.argv("--models cnn"), "--checkpoint", str(tmp_path / "c.npz")]
    assert experiment.script.main([*argv, "--out-json", str(tmp_path / "o.json")]) == 1
    out, error = capsys.readouterr()
    why = f"cannot write {tmp_path / 'c.npz'}: No space left on device"
    assert error == f"warning: {why}; training goes on\n" * 2 + f"error: the last checkpoint is not saved: {why}\n"
    assert "cnn" in out
    assert json.loads((tmp_path / "o.json").read_text())["models"]["cnn"]
    assert [p.name for p in tmp_path.iterdir()] == ["o.json"]


# ----------------------------------------------------------------------------------------------------------------------
# Ctrl-C at any time
# ----------------------------------------------------------------------------------------------------------------------


def interrupted_at(marker: Path, command: list[str], folder: Path) -> tuple[int, str, str]:
    """Status, stdout and stderr of a process that is sent Ctrl-C as soon as the marker is there."""
    path = os.pathsep.join((str(folder), str(ROOT)))
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=script_environment() | {"PYTHONPATH": path},
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 60
        while not marker.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    return process.returncode, out, error


@pytest.mark.parametrize("name", SCRIPTS)
def test_ctrl_c_during_the_imports(name: str, tmp_path: Path) -> None:
    """numpy is one here that takes long, and makes an ImportError of whatever happens meanwhile. It sleeps in short
    pieces: a signal that comes just before a sleep does not end it."""
    (tmp_path / "numpy.py").write_text(
        "import pathlib, time\ntry:\n    pathlib.Path('here').touch()\n    for _ in range(6000):\n"
        "        time.sleep(0.01)\nexcept BaseException:\n    raise ImportError\n"
    )
    command = [sys.executable, str(ROOT / f"{name}.py")]
    assert interrupted_at(tmp_path / "here", command, tmp_path) == (130, "", "interrupted\n")


def test_ctrl_c_is_as_ever_where_a_script_is_imported() -> None:
    code = "import signal, multimnist_capsnet; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout == "True\n"


def test_ctrl_c_while_data_are_made(experiment: Experiment, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(experiment.script, "make_data", lambda config: os.kill(os.getpid(), signal.SIGINT))
    assert experiment.script.main(experiment.argv()) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_the_tests_pass_where_ctrl_c_is_ignored() -> None:
    """As in the background of a shell."""
    tests = "tests/test_compare_seeds.py tests/test_run.py"
    tests += " -k 'stopped_it_keeps and 130 or real_signal and smallnorb and SIGINT'"
    command = f"trap '' INT; exec {sys.executable} -m pytest -p no:cacheprovider {tests}"
    process = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert process.returncode == 0, process.stdout


# ----------------------------------------------------------------------------------------------------------------------
# Data and pictures that are too large, or turned
# ----------------------------------------------------------------------------------------------------------------------


WITH_PNG = ("multimnist_capsnet", "mnist_affine_capsnet")


def predict_argv(experiment: Experiment, checkpoint: Path, *paths: Path) -> list[str]:
    png = ["--predict-png", str(checkpoint.with_name("drawn.png"))] if experiment.name in WITH_PNG else []
    return ["--checkpoint", str(checkpoint), *png, "--predict", *map(str, paths)]


def test_a_photograph_is_seen_upright(tmp_path: Path) -> None:
    grey = np.linspace(0, 255, 30 * 20).astype(np.uint8).reshape(30, 20)
    upright, turned = tmp_path / "upright.png", tmp_path / "turned.png"
    Image.fromarray(grey).save(upright)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by a quarter, clockwise
    Image.fromarray(np.rot90(grey).copy()).save(turned, exif=exif)
    np.testing.assert_array_equal(pictures.read_grey(turned), pictures.read_grey(upright))
    deep = Image.fromarray(np.rot90(grey.astype(np.int32) * 257).astype(np.uint16).copy())
    deep.save(tmp_path / "deep.png", exif=exif)
    np.testing.assert_allclose(pictures.read_grey(tmp_path / "deep.png"), pictures.read_grey(upright))


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def huge_png(path: Path, width: int, height: int) -> None:
    """A PNG that claims a size and holds nothing."""
    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    body = png_chunk(b"IHDR", size + bytes((8, 0, 0, 0, 0))) + png_chunk(b"IDAT", zlib.compress(b""))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body + png_chunk(b"IEND", b""))


@pytest.mark.parametrize("side", [8_000, 10_000, 100_000])  # Pillow warns from 9,500 on, and raises from 13,400
def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(side: int, tmp_path: Path) -> None:
    huge_png(tmp_path / "huge.png", side, side)
    with pytest.raises(files.UserError) as error:
        pictures.read_grey(tmp_path / "huge.png")
    said = f"{tmp_path / 'huge.png'} has {side:,} x {side:,} pixels: make it smaller than 50,000,000"
    assert str(error.value) == said
    assert Image.MAX_IMAGE_PIXELS is not None


def test_what_pillow_finds_odd_is_no_warning(tmp_path: Path) -> None:
    """An animation of no frames, of which it warns, and warnings are errors here."""
    Image.new("L", (30, 30)).save(tmp_path / "p.png")
    plain = (tmp_path / "p.png").read_bytes()
    (tmp_path / "p.png").write_bytes(plain[:33] + png_chunk(b"acTL", bytes(8)) + plain[33:])
    assert pictures.read_grey(tmp_path / "p.png").shape == (30, 30)


def test_a_pipe_is_no_picture(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(files.UserError, match=r"pipe is not a picture: it is no regular file$"):
        pictures.read_grey(tmp_path / "pipe")
    with pytest.raises(files.UserError, match=r"is not a picture: it is a folder$"):
        pictures.read_grey(tmp_path)


def test_a_pipe_is_no_checkpoint_and_no_affnist_file(experiment: Experiment, tmp_path: Path, capsys: Capture) -> None:
    os.mkfifo(tmp_path / "pipe")
    argv = predict_argv(experiment, tmp_path / "pipe", tmp_path / "x.png")
    assert "it is no regular file" in failure(experiment.script, argv, capsys)
    with pytest.raises(files.UserError, match=r"pipe is not an affNIST file: it is no regular file$"):
        affnist_file.read_affnist(tmp_path / "pipe")


def test_a_name_that_the_terminal_cannot_show_is_printed_escaped(experiment: Experiment, tmp_path: Path) -> None:
    model = experiment.models[0]
    path = tmp_path / "c.npz"
    with contextlib.redirect_stdout(io.StringIO()):
        argv = experiment.argv(f"--models {model} --n-epochs 1")
        assert experiment.script.main([*argv, "--checkpoint", str(path)]) == 0
    odd = tmp_path / "\N{SNOWMAN}\udcff.png"
    grey = np.full((28, 28), 255, np.uint8)
    grey[8:20, 12:16] = 0
    Image.fromarray(grey).save(tmp_path / "p.png")
    (tmp_path / "p.png").rename(odd)
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    with streams(out, io.StringIO()):
        assert experiment.script.main(predict_argv(experiment, path, odd)) == 0
    assert b"\\u2603\\udcff.png" in out.buffer.getvalue()


def test_a_label_file_that_claims_too_many_items_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "smallnorb-cat.mat"
    for n_items in (2**31 - 1, norb_files.NORB_ITEMS + 1):
        path.write_bytes(np.array([0x1E3D4C54, 1, n_items, 1, 1], "<i4").tobytes() + bytes(4 * 30_000))
        with pytest.raises(files.UserError, match=f"{path} claims {n_items:,} items; an official file has 24,300"):
            list(norb_files.stream_norb(path, np.dtype("<i4"), ()))


def test_a_mat_file_that_grows_a_thousandfold_is_refused(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "bomb.mat"
    pixels = np.zeros((1600, 60_000), np.uint8)
    savemat(path, {"affNISTdata": {"image": pixels, "label_int": np.zeros(60_000)}}, do_compression=True)
    assert path.stat().st_size < 200_000
    with pytest.raises(files.UserError, match=f"{path} is not an affNIST file: it unpacks to 100 times its size$"):
        affnist_file.read_affnist(path)
    pixels = np.random.default_rng(0).integers(0, 2, (1600, 50), np.uint8)
    savemat(path, {"affNISTdata": {"image": pixels, "label_int": np.arange(50) % 10}}, do_compression=True)
    assert len(affnist_file.read_affnist(path)[0]) == 50


# ----------------------------------------------------------------------------------------------------------------------
# Flags that would be passed over, and their true causes
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_run")
@pytest.mark.parametrize("name", [name for name in [*EXPERIMENTS, *FIGURES] if "smallnorb" not in name])
def test_generated_digits_have_no_folder(name: str, tmp_path: Path, capsys: Capture) -> None:
    argv = ["--dataset", "strokes", "--data-dir", str(tmp_path)]
    assert "argument --data-dir: strokes has no files" in usage_error(importlib.import_module(name), argv, capsys)


@pytest.mark.usefixtures("no_run")
@pytest.mark.parametrize("name", [name for name in [*EXPERIMENTS, *FIGURES] if "smallnorb" in name])
def test_voxels_have_no_folder(name: str, tmp_path: Path, capsys: Capture) -> None:
    line = usage_error(importlib.import_module(name), ["--data-dir", str(tmp_path)], capsys)
    assert "argument --data-dir: needs --dataset smallnorb" in line


@pytest.mark.parametrize("name", ["smallnorb_novel_viewpoint", "conv_matrix_capsules"])
def test_a_variance_floor_is_one_that_the_numbers_carry(name: str, capsys: Capture) -> None:
    script = importlib.import_module(name)
    for dtype, refused, taken in (("float32", "1e-14", "2e-14"), ("float64", "1e-320", "5e-32")):
        argv = ["--dtype", dtype, "--variance-floor"]
        line = usage_error(script, [*argv, refused], capsys)
        assert f"argument --variance-floor: {float(refused):g} is below" in line
        assert "lr" not in line
        parser = script.make_parser()
        assert script.config_from_args(parser.parse_args([*argv, taken])).variance_floor == float(taken)


@pytest.mark.usefixtures("no_run")
@pytest.mark.parametrize("name", ["multimnist_capsnet", "mnist_affine_capsnet"])
def test_an_epoch_has_a_batch_or_more(name: str, capsys: Capture) -> None:
    script = importlib.import_module(name)
    line = usage_error(script, ["--n-train", "31", "--batch-size", "32"], capsys)
    assert "argument --n-train: 31 is less than a batch of --batch-size 32" in line
    assert script.make_parser().parse_args(["--n-train", "32", "--batch-size", "32"])


def test_a_resume_on_other_threads_says_that_bits_may_differ(
    experiment: Experiment, tmp_path: Path, capsys: Capture
) -> None:
    path = trained(experiment, tmp_path / "c.npz", "--threads 1")
    capsys.readouterr()
    for threads in (1, 2):
        argv = experiment.argv(f"--models cnn --n-epochs 1 --threads {threads} --resume")
        assert experiment.script.main([*argv, "--checkpoint", str(path)]) == 0
        error = capsys.readouterr().err
        if threads == 1 or experiment.name == "conv_matrix_capsules":
            assert error == ""
        else:
            assert re.fullmatch(r"warning: .*c.npz was trained with --threads 1 and goes on with 2: .*\n", error)


# ----------------------------------------------------------------------------------------------------------------------
# A checkpoint with other values than a training's
# ----------------------------------------------------------------------------------------------------------------------

ODD: list[Any] = [None, True, -1, 2.5, 10**30, "x", [1], [1.5, "x"], {"x": 1}]


def test_every_value_of_a_header_is_checked(experiment: Experiment, tmp_path: Path, monkeypatch: Patch) -> None:
    """Each is replaced by values of other kinds: what cannot be a training's is refused in words, and at once."""
    path = trained(experiment, tmp_path / "c.npz")
    with np.load(path) as stored:
        header = json.loads(str(stored["header"]))
    del header["checksum"]
    config = experiment.script.load_checkpoint(path)[0]
    without_arrays = {name: TrainState(name, {}) for name in experiment.models}  # which take most of the time
    monkeypatch.setattr(experiment.script, "fresh_states", lambda config: without_arrays)
    parser = experiment.script.make_parser()
    monkeypatch.setattr(experiment.script, "make_parser", lambda: parser)  # made once
    actions = parser._actions
    numbers = {action.dest: action.type for action in actions if callable(action.type)}
    state, n_refused = header["models"]["cnn"], 0
    places: list[tuple[dict[str, Any], str, bool]] = [(header["config"], key, True) for key in header["config"]]
    places += [(state, key, True) for key in state] + [(state["history"], key, True) for key in state["history"]]
    places += [(header["models"], "cnn", True), *((header, key, True) for key in ("config", "models"))]
    for where, key, _ in places:
        before = where[key]
        for odd in ODD:
            if odd == before:
                continue
            where[key] = odd
            np.savez(path, header=np.array(json.dumps(header)))
            try:
                found = experiment.script.load_checkpoint(path)
            except files.UserError:
                n_refused += 1
            else:
                kind = type(before)
                optional = key in ("sums", "models", "data_dir") or getattr(config, key, 0) in (None, ())
                is_number = kind in (int, float, type(None))
                assert where is state or is_number or type(odd) is kind or optional, (key, odd, found[0])
                assert not isinstance(odd, bool) or kind is type(None), (key, odd)
                if where is header["config"] and key in numbers and isinstance(odd, (int, float)):
                    numbers[key](repr(odd))  # its own flag takes it too
        where[key] = before
    assert n_refused > 5 * len(places)


def rewritten(path: Path, header: Any, **more: Any) -> None:
    """The checkpoint with another header, which has no checksum, and with other arrays."""
    with np.load(path) as stored:
        arrays = {key: stored[key] for key in stored.files if key != "header"}
    np.savez_compressed(path, header=np.array(json.dumps(header)), **arrays | more)


def header_of(path: Path) -> dict[str, Any]:
    with np.load(path) as stored:
        header: dict[str, Any] = json.loads(str(stored["header"]))
    del header["checksum"]
    return header


def test_a_header_of_another_form_is_refused_in_words(
    experiment: Experiment, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """Without a checksum, or with a right one."""
    path = trained(experiment, tmp_path / "c.npz")
    header = header_of(path)
    monkeypatch.setattr(run, "MAX_HEADER", 100_000)
    argv = ["--checkpoint", str(path), "--predict", "none.png"]
    capsys.readouterr()
    cases: list[tuple[Any, str]] = [
        ([], "its header names no experiment"),
        (3, "its header names no experiment"),
        ({}, "its header names no experiment"),
        (header | {"experiment": ["x"]}, "its header names no experiment"),
        (header | {"config": [1]}, "its config is [1]"),
        (header | {"models": "x"}, "its models is x"),
        (header | {"threads": True}, "its threads is True"),
        (header | {"command": {"x": 1}}, "its command is {'x': 1}"),
        (header | {"more": "x" * 100_000}, "its header is too long"),
        ({**header, "config": header["config"] | {"dtype": "float16"}}, "its dtype is 'float16'"),
        ({**header, "config": header["config"] | {"n_epochs": 10**30}}, "its n_epochs: "),
        ({**header, "config": header["config"] | {"nosuch": 1}}, "nosuch"),
        ({**header, "models": {"nosuch": header["models"]["cnn"]}}, "it holds a network 'nosuch'"),
    ]
    for other, says in cases:
        with_checksum = [{**other, "checksum": run.header_checksum(other)}] if isinstance(other, dict) else []
        for written in [other, *with_checksum]:
            rewritten(path, written)
            line = failure(experiment.script, argv, capsys)
            assert line.startswith(f"error: {path} is not a readable checkpoint of {experiment.name}: "), line
            assert says in line


def test_lists_in_a_header_are_such_as_their_flags_take(experiment: Experiment, tmp_path: Path) -> None:
    path = trained(experiment, tmp_path / "c.npz")
    header, config = header_of(path), experiment.script.load_checkpoint(path)[0]
    with_flags = {action.dest for action in experiment.script.make_parser()._actions}
    lists = [name for name in with_flags if isinstance(header["config"].get(name), list)]
    assert lists or experiment.name == "multimnist_capsnet"
    for name in lists:
        value = getattr(config, name) or ("x",)
        odd = ["nosuch" if isinstance(part, str) else type(part)(10**9) for part in value]
        rewritten(path, header | {"config": header["config"] | {name: odd}})
        with pytest.raises(files.UserError, match=f"its {name}: "):
            experiment.script.load_checkpoint(path)


def test_an_array_that_unpacks_to_more_than_the_network_has_is_not_unpacked(
    experiment: Experiment, tmp_path: Path, monkeypatch: Patch
) -> None:
    path = trained(experiment, tmp_path / "c.npz")
    header, key = header_of(path), next(iter(experiment.script.load_checkpoint(path)[1]["cnn"].params))
    rewritten(path, header, **{f"cnn/params/{key}": np.zeros(2_000_000)})
    original = np.lib.npyio.NpzFile.__getitem__

    def small(stored: Any, name: str) -> Any:
        assert stored.zip.getinfo(f"{name}.npy").file_size < 1_000_000
        return original(stored, name)

    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", small)
    with pytest.raises(files.UserError, match=f"its {key} does not fit this network"):
        experiment.script.load_checkpoint(path)


def test_a_history_that_is_not_that_of_the_steps_is_not_resumed(
    experiment: Experiment, tmp_path: Path, capsys: Capture
) -> None:
    path = trained(experiment, tmp_path / "c.npz")
    config, states = experiment.script.load_checkpoint(path)

    def forged(step: int, history: dict[str, list[float]]) -> str:
        state = TrainState("cnn", states["cnn"].params)
        state.step, state.history = step, history
        run.save_checkpoint(path, experiment.name, config, [state])
        argv = experiment.argv("--models cnn --n-epochs 1 --resume")
        return failure(experiment.script, [*argv, "--checkpoint", str(path)], capsys)

    for step, history in ((3, {}), (2, states["cnn"].history), (999, states["cnn"].history)):
        assert forged(step, history) == f"error: cannot resume {path}: its history of cnn is not that of {step} steps\n"


# ----------------------------------------------------------------------------------------------------------------------
# Full and closed streams, of the scripts that train nothing themselves
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SCRIPTS, "benchmarks.__main__"])
def test_every_script_prints_to_any_stream_without_a_traceback(name: str) -> None:
    script = importlib.import_module(name)
    source = ast.parse(Path(str(script.__file__)).read_text(encoding="utf-8"))
    prints = [
        node.lineno
        for node in ast.walk(source)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    ]
    assert not prints, "support.console.print_result knows what to do with a stream that takes nothing"
    for open_stdout, open_stderr, status in (
        (functools.partial(Path("/dev/full").open, "w"), io.StringIO, 1),
        (nobody_reads, io.StringIO, 0),
        (contextlib.nullcontext, contextlib.nullcontext, 0),
        (functools.partial(Path("/dev/full").open, "w"), nobody_reads, 1),
    ):
        for argv, expected in ((["--help-all"], status), (["--nosuch"], 2)):
            with open_stdout() as stdout, open_stderr() as stderr, streams(stdout, stderr):
                with pytest.raises(SystemExit) as stopped:
                    script.main(argv)
                assert stopped.value.code == expected
                if isinstance(stderr, io.StringIO):
                    lines = stderr.getvalue().splitlines()
                    assert len(lines) == (expected != 0), lines
                    assert all("error: " in line for line in lines)


def test_what_is_written_after_a_print_is_written_to_a_full_disk_of_stdout(tmp_path: Path) -> None:
    """The pages, figures and animations of a script that prints a line for each file."""

    def body() -> None:
        for name in "ab":
            with files.atomic_write(tmp_path / name) as stream:
                stream.write(b"x")
            console.print_result(name)

    error = io.StringIO()
    with open("/dev/full", "w") as full, streams(full, error):
        assert console.exit_status(body) == 1
        assert error.getvalue() == "error: cannot write to the standard output: No space left on device\n"
        assert console.exit_status(lambda: None) == 0
    assert content(tmp_path) == {"a": b"x", "b": b"x"}


def test_figures_and_comparisons_lose_nothing_to_a_full_stdout(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = "--seeds 0 --name n -- --n-epochs 1 --n-train-views 1 --n-test-views 1 --n-elev 1 --n-per-combo 1"
    seeds = importlib.import_module("compare_seeds")
    argv = ["smallnorb_novel_viewpoint", "--resume", *flags.split()]
    out = tmp_path / "results/smallnorb_novel_viewpoint/n.json"
    for open_stdout, open_stderr, status in (
        (functools.partial(Path("/dev/full").open, "w"), io.StringIO, 1),
        (nobody_reads, io.StringIO, 0),
        (contextlib.nullcontext, contextlib.nullcontext, 0),
    ):
        out.unlink(missing_ok=True)
        with open_stdout() as stdout, open_stderr() as stderr:
            with streams(stdout, stderr):
                assert seeds.main(argv) == status
            if stderr is not None:
                text = "error: cannot write to the standard output: No space left on device\n"
                assert stderr.getvalue() == (text if status else "")
        assert json.loads(out.read_text())["headline"]


# ----------------------------------------------------------------------------------------------------------------------
# The tests themselves
# ----------------------------------------------------------------------------------------------------------------------


def test_no_test_reaches_the_network_or_somebody_s_home() -> None:
    with socket.socket() as ours, pytest.raises(AssertionError, match=r"a test asks the network for 192\.0\.2\.1"):
        ours.connect(("192.0.2.1", 80))
    with pytest.raises(AssertionError, match="a test asks the network for example"):
        socket.getaddrinfo("example", 80)
    assert not list(Path.home().glob(".cache/hinton-mnist/*"))
    assert Path.home().parent == Path(tempfile.gettempdir())


def test_tests_without_data_say_which_are_skipped_and_why() -> None:
    tests = ["tests/test_smallnorb_files.py", "tests/test_multimnist_data.py", "-m", "real_data"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    env = os.environ | {"CAPSULES_DATA": "/nowhere"}
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout
    skipped = re.findall(r"SKIPPED \[\d+\] tests/(\w+)\.py:\d+: no /nowhere/(\w+): CAPSULES_DATA names", process.stdout)
    assert set(skipped) == {("test_smallnorb_files", "smallnorb_sample"), ("test_multimnist_data", "mnist")}
