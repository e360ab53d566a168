"""The maker of the explorer and of its recording: with what they call what test_explorer.py tests."""

# ruff: noqa: F401, F811 - fixtures of test_explorer.py
from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import imageio.v3 as imageio
import numpy as np
import pytest

import multimnist_capsnet as digits
import smallnorb_novel_viewpoint as views
from explorer import make_explorer as explorer, make_explorer_gif as animation
from helpers import Capture, Patch
from test_explorer import _few_capsules, checkpoints, embedded


def test_comparisons_on_mnist_are_not_shown_of_other_digits(monkeypatch: Patch) -> None:
    monkeypatch.setattr(explorer, "registered_of_digits", lambda: {"composites": "of MNIST"})
    for name, shown in (("custom", {}), ("strokes", {}), ("mnist", {"composites": "of MNIST"})):
        page = explorer.page_of({"digits": {"run": explorer.run_of(digits.Config(), name)}}, "").decode()
        assert json.loads(embedded(page, "about"))["registered"] == shown


def stop(config: Any) -> None:
    raise OSError(f"asked for {config.dataset} in {config.data_dir}")


def test_the_folder_of_the_digits_may_be_another_than_the_checkpoints(
    checkpoints: tuple[Path, Path], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(digits, "make_data", stop)
    with pytest.raises(OSError, match="asked for mnist in elsewhere"):
        explorer.load_digits(checkpoints[0], Path("elsewhere"), 1)


def test_without_a_checkpoint_the_objects_are_drawn_shapes(monkeypatch: Patch) -> None:
    monkeypatch.setattr(views, "make_data", stop)
    with pytest.raises(OSError, match="asked for shapes"):
        explorer.load_viewpoint(None)


def test_accuracies_are_printed_before_and_after_rounding(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    row = {"model": "capsules", "metric": "held_out_accuracy", "before": 0.75, "after": 0.7}
    part = explorer.Part({"accuracies": [row], "run": {"dataset": "x"}}, {})
    for loader in ("load_viewpoint", "load_digits"):
        monkeypatch.setattr(explorer, loader, lambda *_: part)
    assert explorer.main([f"--out={tmp_path / 'page.html'}"]) == 0
    words = capsys.readouterr().out.splitlines()[0].split()
    assert words == ["capsules", "held_out_accuracy", "0.7500,", "rounded", "0.7000"]


def test_a_page_names_the_commit_of_its_text_style_and_scripts(monkeypatch: Patch) -> None:
    monkeypatch.setattr(explorer, "git_commit", lambda *others: [*others])
    page = explorer.page_of({"digits": {"run": {"dataset": "x"}}}, "").decode()
    assert json.loads(embedded(page, "about"))["pageCommit"] == ["explorer/page"]


def test_the_recording_has_the_frames_a_second_and_the_preview_that_are_asked_for(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    (page := tmp_path / "page.html").touch()
    frames = [np.full((4, 4, 3), grey, np.uint8) for grey in (0, 255)]
    monkeypatch.setattr(animation, "headless_browser", lambda *_: contextlib.nullcontext(Mock()))
    for name, value in (("open_page", None), ("show_as", None), ("record", frames), ("screenshot", b"\x89PNG")):
        monkeypatch.setattr(animation, name, Mock(return_value=value))
    out, preview = tmp_path / "a.gif", tmp_path / "a.png"
    assert animation.main([f"--page={page}", f"--out={out}", f"--preview={preview}", "--fps=2"]) == 0
    assert (imageio.immeta(out, index=0)["duration"], preview.read_bytes()) == (500, b"\x89PNG")
