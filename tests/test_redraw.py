"""The pictures of the pages: each has a command, and another command leaves it alone."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT, Capture, Patch
from support import redraw
from support.experiment import parse_flags
from support.figures import write_if_changed

PICTURE = "viz/multimnist_capsnet/overlay.png"
SCRIPT = "python visualize_multimnist_capsnet.py"
OWN = f"{SCRIPT} --dataset mnist --figures training_curves,overlay"


def test_every_committed_picture_has_a_command() -> None:
    listed = subprocess.run(["git", "ls-files", "*.png", "*.gif", "*.svg"], cwd=ROOT, capture_output=True, text=True,
                            check=False).stdout.split()
    rows = redraw.read_rows()
    assert len(rows) > 15
    assert [path for path in listed if not any(row.draws(path) for row in rows)] == []
    assert [own for row in rows for own in row.pictures if not (ROOT / own).exists()] == []


@pytest.mark.parametrize("row", redraw.read_rows(), ids=lambda row: row.pictures[0])
def test_every_command_is_understood(row: redraw.Row) -> None:
    words = shlex.split(row.command)[1:]
    script, _ = redraw.meaning(words)
    assert script is not None
    if flags := words[2:] if words[0] == "-m" else words[1:]:
        parse_flags(script, flags)


def test_every_picture_of_a_page_is_found() -> None:
    kinds = set()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        shown = re.findall(r"!\[.*?\]\((.*?)\)", page.read_text(encoding="utf-8"), re.DOTALL)
        found = {(ROOT / path).resolve() for path in redraw.pictures_of(page)}
        assert {(page.parent / path).resolve() for path in shown} <= found
        kinds |= {path.suffix for path in found}
    assert kinds == {".png", ".gif", ".svg"}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A folder with the tables and one picture of the project, in which the scripts run."""
    (tmp_path / "docs").mkdir()
    (tmp_path / redraw.TABLE).write_text((ROOT / redraw.TABLE).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / PICTURE).parent.mkdir(parents=True)
    (tmp_path / PICTURE).write_bytes(b"of the page")
    monkeypatch.setattr(redraw, "ROOT", tmp_path.resolve())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("command", "overwrite", "is_replaced"), [
    (OWN, False, True),
    (f"{SCRIPT} --figures=overlay --threads 2 --quiet --dataset mnist --data-dir x --outdir viz --out=x --preview=x"
     " --overwrite", False, True),
    (f"{SCRIPT} --figures=overlay", False, False),  # without MNIST that draws strokes
    (f"{SCRIPT} --dataset mnist --figures overlay --seed 5", False, False),
    (f"{SCRIPT} --seed 5", True, True),
    ("python make_multimnist_capsnet_gif.py --dataset mnist", False, False),
    ("pytest", False, False),
])
def test_a_picture_of_a_page_is_replaced_by_its_own_command(
    command: str, overwrite: bool, is_replaced: bool, project: Path, monkeypatch: Patch
) -> None:
    words = shlex.split(command)
    monkeypatch.setattr(sys, "argv", [str(ROOT / words[1]), *words[2:]] if len(words) > 1 else words)
    said = write_if_changed(Path(PICTURE), b"new", overwrite)
    if is_replaced:
        assert said == f"wrote {PICTURE} (0 kB), which differs from the picture of the page"
    else:
        assert said == (f"wrote out/{PICTURE} (0 kB): {PICTURE} is of another command and stays as it is (--overwrite"
                        " replaces it)")
    written = {str(path.relative_to(project)): path.read_bytes() for path in project.rglob("*.png")}
    assert written == ({PICTURE: b"new"} if is_replaced else {PICTURE: b"of the page", f"out/{PICTURE}": b"new"})
    other = project / "other.gif"
    assert write_if_changed(other, b"one") == write_if_changed(other, b"two") == f"wrote {other} (0 kB)"
    assert write_if_changed(other, b"two").startswith("unchanged ")


def test_pictures_are_drawn_again(project: Path, monkeypatch: Patch, capfd: Capture) -> None:
    """One is the same, one another, one of a whole folder is new, one is left out; one command fails, one is killed."""
    for name, line in {
        "same": "open('same.png', 'w').write('of the page')", "other": "open('other.png', 'w').write('new')",
        "new": "open('all/new.png', 'w')", "bad": "raise SystemExit(3)", "killed": "import os; os.kill(os.getpid(), 9)",
    }.items():
        (project / f"{name}.py").write_text(line)
        (project / f"{name}.png").write_text("of the page")
    (project / "all").mkdir()
    rows = {"same.png": "same.py` | 1 s", "other.png": "other.py` | 2 s", "all/": "new.py` | 3 s",
            "far.png": "far.py` | 4 s | a browser", "bad.png": "bad.py` | 5 s", "killed.png": "killed.py` | 6 s"}
    (project / redraw.TABLE).write_text("\n".join(f"| `{name}` | `python {row} |" for name, row in rows.items()))
    (project / "page.md").write_text("![c](far.png) ![d](all/new.png)")
    (project / "more.md").write_text("![b](other.png) ![a](same.png)")
    (project / "README.md").write_text("![a](same.png)")
    assert redraw.main(["page.md", "more.md"]) == 0
    out = capfd.readouterr().out
    assert out.endswith("1 unchanged, 2 changed, 1 left out\n    other.png\n    all/new.png\n")
    assert "left out: it needs a browser" in out
    assert [line for line in out.splitlines() if line.startswith("python ")] == [  # in the order of the tables
        "python same.py   # 1 s", "python other.py   # 2 s", "python new.py   # 3 s", "python far.py   # 4 s"]
    assert redraw.main(["--all"]) == 1
    said = capfd.readouterr()
    assert "3 unchanged, 0 changed, 1 left out" in said.out  # the pictures of commands that fail are not among them
    assert said.err == "error: 2 of 6 commands failed: python bad.py\n"
    monkeypatch.chdir("all")
    assert redraw.main([]) == 0  # the front page of the project, whose commands run in its folder
    assert "1 unchanged, 0 changed" in capfd.readouterr().out


def test_a_folder_of_mnist_is_for_those_that_train_on_it(project: Path, capfd: Capture) -> None:
    (project / "say.py").write_text("import sys; print('given', sys.argv[1:])")
    rows = [f"| `{name}.png` | `python say.py --dataset {name}` | 1 s |" for name in ("mnist", "voxels")]
    (project / redraw.TABLE).write_text("\n".join(rows))
    for name, folder in (("~/a", Path("~/a").expanduser()), ("b", project / "b")):
        assert redraw.main(["--all", "--data-dir", name]) == 0
        given = [line for line in capfd.readouterr().out.splitlines() if line.startswith("given")]
        words = ["--dataset", "mnist", "--data-dir", f"{folder.absolute()}"]
        assert given == [f"given {words}", "given ['--dataset', 'voxels']"]


@pytest.mark.parametrize(("flags", "status", "message"), [
    (["--all", "README.md"], 2, "argument --all: not together with a page"), (["no.md"], 1, "cannot read no.md"),
    (["viz/speed/steps.png"], 1, "steps.png"),
])
def test_wrong_words(flags: list[str], status: int, message: str, capsys: Capture) -> None:
    assert redraw.main(flags) == status
    assert message in capsys.readouterr().err
