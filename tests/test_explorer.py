"""The page of make_explorer.py: its weights, what it states of them, and in a browser its networks and its controls.

The tests in a browser need Chromium, its driver and selenium (``pip install selenium``), and skip elsewhere.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import gzip
import http.server
import io
import json
import math
import re
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import imageio.v3 as imageio
import numpy as np
import pytest

import multimnist_capsnet as multimnist
import smallnorb_novel_viewpoint as smallnorb
from explorer import make_explorer as explorer
from explorer import make_explorer_gif as animation
from explorer.browser import NoBrowserError, first_program, headless_browser, imported_selenium, show_as
from fast.workers import Workers
from helpers import EXPERIMENTS, MNIST, ROOT, digits_folder, failure, needs_mnist, smallest, states_of, usage_error
from smallnorb_novel_viewpoint import Stream, generator
from support.experiment import load_checkpoint
from support.figures import median_seed, settings_in
from support.results import git_commit

Array = np.ndarray
PAGE = ROOT / "explorer.html"
MEASURED = "measured.html"
MAX_BYTES = 5_000_000
N_NAMED = explorer.N_CAPSULES  # before the tests take fewer


def embedded(page: str, name: str) -> str:
    found = re.search(f'id="{name}">(.*?)</script>', page, re.DOTALL)
    assert found
    return found[1]


def unpacked(page: str) -> tuple[dict[str, Any], dict[str, dict[str, Array]]]:
    """What a page says of its networks, and their weights as it uses them."""
    about = json.loads(embedded(page, "about"))
    return about, explorer.unpacked(about, embedded(page, "weights"))


def config_of(experiment: Any, about: dict[str, Any]) -> Any:
    """Of the fields that there are today."""
    known = {field.name for field in dataclasses.fields(experiment.Config)}
    fields = {key: value for key, value in about["run"]["config"].items() if key in known}
    return experiment.Config(**{key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()})


def evidence_of(config: Any, params: dict[str, Array], images: Array, explains: float = 0.0) -> explorer.Evidence:
    with Workers(1) as workers:
        return explorer.evidence(config, params, images, explains, workers)


def digits_found(config: Any, params: dict[str, Array], images: Array, rule: dict[str, float]) -> Array:
    return explorer.n_found(rule, evidence_of(config, params, images, rule["explains"]))


# --- Rounding, measures, flags ----------------------------------------------------------------------------------------


def test_rounding_is_off_by_half_a_step_at_most() -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(7, 5, 6)).astype(np.float32) * np.array([1, 10, 1e-3, 0, 1, 5], np.float32)
    q, scale = explorer.quantised(w)
    assert (np.abs(q * scale - w) <= 0.5001 * scale).all()
    assert (np.abs(q[..., scale > 1e-30]).max(axis=(0, 1)) == 127).all()
    assert np.abs(explorer.quantised(np.resize(w, (explorer.LARGE + 1, 1)))[0]).max() == 31  # 6 bits
    params = {"a.w": rng.normal(size=(64, 32)).astype(np.float32), "a.b": rng.normal(size=3000).astype(np.float32)}
    rounded = explorer.rounded(params)
    assert rounded["a.b"] is params["a.b"]
    assert 0 < np.abs(rounded["a.w"] - params["a.w"]).max() < 0.03


def test_measures_of_shapes_that_are_known() -> None:
    rows, columns = np.mgrid[:36, :36] - 17.5

    def bar(width: float, slant: float) -> Array:
        return (np.abs(columns + slant * rows) <= width / 2) * (np.abs(rows) <= 10.0)

    radius = np.hypot(rows, columns)
    circle = np.clip(10.5 - radius, 0, 1) * np.clip(radius - 6.5, 0, 1)  # grey at its edges, as digits are
    pictures = np.stack([bar(2, 0), bar(4, 0), bar(4, 0.4), circle, np.roll(bar(4, 0), (3, -2), (0, 1))]).astype(float)
    measures = explorer.shape_measures(pictures)
    thin, thick, slanted, ring, moved = range(5)
    np.testing.assert_allclose(measures["stroke width"][[thin, thick]], [40 / 22, 80 / 24], rtol=0.05)
    np.testing.assert_allclose(measures["stroke width"][ring], 3, rtol=0.05)
    np.testing.assert_allclose(measures["slant"], [0, 0, 0.4, 0, 0], atol=0.02)  # to the right is positive
    np.testing.assert_allclose(measures["loop"][ring], math.pi * 7**2, rtol=0.05)
    assert not measures["loop"][[thin, thick, slanted, moved]].any()
    np.testing.assert_allclose(measures["width"][[thin, thick]], [2, 4 * math.sqrt(1.25)])  # of 2 and 4 columns
    np.testing.assert_allclose(measures["height"][[thin, thick]], 4 * math.sqrt(33.25))  # of 20 rows
    assert measures["left to right"][moved] == pytest.approx(17.5 - 2)
    assert measures["up and down"][moved] == pytest.approx(17.5 + 3)


@pytest.fixture(autouse=True, scope="module")
def _few_capsules() -> Iterator[None]:
    """The names of the dimensions are measured on few capsules: most of the time of a page goes there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explorer, "N_CAPSULES", 3)
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Of the smallest networks, trained for six steps."""
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = {"multimnist_capsnet": folder / "digits", "smallnorb_novel_viewpoint": folder / "views.npz"}
    more = {"multimnist_capsnet": "--models capsnet,cnn_pool --n-test 120 --n-val 20", "smallnorb_novel_viewpoint": ""}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        smallest(patch)
        for name, path in paths.items():
            argv = EXPERIMENTS[name].argv(more[name])
            assert EXPERIMENTS[name].script.main([*argv, "--checkpoint", str(path)]) == 0
        yield paths["multimnist_capsnet"], paths["smallnorb_novel_viewpoint"]


@pytest.fixture(scope="module")
def made(checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of these networks."""
    out = tmp_path_factory.mktemp("made") / "page.html"
    argv = ["--multimnist", str(checkpoints[0]), "--viewpoint", str(checkpoints[1]), "--out", str(out)]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert explorer.main(argv) == 0
    page, (*rows, last) = out.read_text(), said.getvalue().splitlines()
    about = json.loads(embedded(page, "about"))
    accuracies = [row for part in ("viewpoint", "digits") for row in about[part]["accuracies"]]
    assert [row.split() for row in rows[-len(accuracies) :]] == [
        [r["model"], r["metric"], f"{r['before']:.4f},", "rounded", f"{r['after']:.4f}"] for r in accuracies]
    assert str(out) in last
    return page


def test_a_page_from_checkpoints(checkpoints: tuple[Path, Path], made: str) -> None:
    about, tensors = unpacked(made)
    config, states = load_checkpoint(multimnist, checkpoints[0])
    test = multimnist.make_data(dataclasses.replace(config, n_val=None)).test  # no validation digits
    n = explorer.N_EXAMPLES
    params = {name: explorer.rounded(states[name].params) for name in explorer.DIGIT_MODELS}
    for name, prefix in (("capsnet", ""), ("cnn_pool", "pool.")):
        for key, w in params[name].items():
            np.testing.assert_array_equal(tensors["digits"][prefix + key], w)
    np.testing.assert_allclose(tensors["digits"]["examples"][:n] / 255, test.sources[:n], atol=1e-6)
    assert about["digits"]["labels"][:n] == test.labels[:n].tolist()
    assert len(about["digits"]["labels"]) == len(tensors["digits"]["examples"])
    assert np.shape(about["digits"]["names"]) == (10, 16)
    with Workers(1) as workers:
        before = multimnist.evaluate(multimnist.make_models(config)["capsnet"], states["capsnet"].params, test, workers)
    assert about["digits"]["accuracies"][0]["before"] == before["set_accuracy"]
    held_out = next(r for r in about["viewpoint"]["accuracies"] if r["metric"] == "held_out_accuracy")
    _, view_states = load_checkpoint(smallnorb, checkpoints[1])
    assert held_out["before"] == view_states["capsules"].history["held_out_accuracy"][-1]
    assert about["digits"]["nTest"] == len(test.labels) == 120
    for part, its in (("digits", config), ("viewpoint", load_checkpoint(smallnorb, checkpoints[1])[0])):
        assert [about[part]["run"][key] for key in ("seed", "epochs")] == [its.seed, its.n_epochs]
    few: Any = SimpleNamespace(labels=test.labels[(test.labels != 3).all(axis=1)], images=test.images)
    with pytest.raises(OSError, match="the test composites hold no 3: take a checkpoint with a larger --n-test"):
        explorer.class_capsules(config, params["capsnet"], few, 3)


def test_a_page_of_held_out_elevations_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: Any = {"train_elevations": (10, 35), "test_elevations": (40, 70), "train_azimuths": (0, 90)}
    config = smallnorb.Config(dataset="shapes", n_train_views=3, n_test_views=2, n_elev=2, n_per_combo=1, **ranges)
    data = smallnorb.make_data(config)
    data = data._replace(held_out=smallnorb.Split(*(part[:40] for part in data.held_out)))
    monkeypatch.setattr(smallnorb, "make_data", lambda _: data)
    monkeypatch.setattr(explorer, "registered_study", lambda path, _: path.name)
    about = explorer.viewpoint_part(config, states_of(smallnorb.make_models(config), config)).about
    assert (about["heldOut"], about["nTest"], about["study"]) == ("elevation", 40, "registered_elevations.json")
    for angles in ("train_azimuths", "test_azimuths", "train_elevations"):
        assert about[re.sub("_(.)", lambda letter: letter[1].upper(), angles)] == getattr(config, angles)


def test_the_tray_has_pictures_of_both_kinds_in_turn() -> None:
    is_right = {name: np.random.default_rng(k).uniform(size=400) < 0.6 for k, name in enumerate(explorer.DIGIT_MODELS)}
    is_two = np.random.default_rng(5).uniform(size=400) < 0.5
    indices = explorer.tray(is_right, is_two)
    assert len(indices) == 2 * explorer.N_TRAY
    assert is_two[indices[::2]].all()
    assert not is_two[indices[1::2]].all()
    assert indices.min() >= explorer.N_EXAMPLES
    for k, index in enumerate(indices):
        assert [is_right[name][index] for name in explorer.DIGIT_MODELS] == [k % 2 == 0, k % 2 == 1]


@pytest.mark.parametrize("names", [explorer.VIEW_MODELS, explorer.VIEW_MODELS[::-1]])
def test_the_opening_is_the_view_where_one_network_is_furthest_ahead(names: Any, monkeypatch: Any) -> None:
    """One is wrong on object 2 at 20 of the held-out azimuths, the other on object 1 at 7 of them."""
    wrong = {names[0]: lambda label, azimuth, elevation: (label == 2) & (elevation == 40) & (azimuth < 300),
             names[1]: lambda label, azimuth, elevation: (label == 1) & (elevation == 20) & (azimuth >= 300)}

    def network(name: str) -> Any:
        return SimpleNamespace(forward=lambda _, x: (np.eye(5)[(x[:, 0] + wrong[name](*x.T)) % 5], None))

    monkeypatch.setattr(smallnorb, "make_models", lambda config: {name: network(name) for name in names})
    monkeypatch.setattr(smallnorb, "render_voxels", lambda *view: np.stack(view[:3], axis=1).astype(int))
    found = explorer.opening(smallnorb.Config(dataset="shapes", standardize="none"), {name: {} for name in names})
    assert found == {"object": 2, "azimuth": 250, "elevation": 40}
    across = smallnorb.Config(dataset="shapes", standardize="none", train_azimuths=(30, 150), test_azimuths=(340, 380))
    found = explorer.opening(across, {name: {} for name in names})  # through 0, where one is wrong on 20 degrees
    assert found == {"object": 2, "azimuth": 10, "elevation": 40}
    wrong[names[0]] = lambda label, azimuth, elevation: (label == 3) & (elevation == across.test_elevations[1])
    assert explorer.opening(across, {name: {} for name in names})["elevation"] == 50  # the last one too


def test_a_page_is_written_anew_with_its_networks(tmp_path: Path, capsys: Any) -> None:
    page, packed = tmp_path / "page.html", base64.b64encode(gzip.compress(b"", mtime=0)).decode()
    run = {"dataset": "MNIST"}
    about = {"commit": "</script>", **{p: {"tensors": [], "offset": 0, "run": run} for p in ("digits", "viewpoint")}}
    text = json.dumps(about).replace("</", "<\\/")
    page.write_text(f'<!DOCTYPE html><script id="about">{text}</script><script id="weights">{packed}</script>')
    argv = ["--keep", "--out", str(page)]
    assert explorer.main(argv) == 0
    text = page.read_text()
    assert embedded(text, "weights") == packed
    assert json.loads(embedded(text, "about")) == {
        **about, "registered": explorer.registered_of_digits(), "pageCommit": git_commit()}
    assert (explorer.TEMPLATE / "explorer.js").read_text() in text
    capsys.readouterr()
    assert "argument --viewpoint: not with --keep" in usage_error(explorer, [*argv, "--viewpoint=x"], capsys)
    start = b'id="about">'
    for damage in ((b'"digits":{', b'"digit":{'), (start, start + b"{"), (packed[:4].encode(), b"AAAA")):
        whole = page.read_bytes()
        page.write_bytes(whole.replace(*damage, 1))
        assert "is damaged, and has no networks to keep" in failure(explorer, argv, capsys), damage
        page.write_bytes(whole)
    page.write_text("my notes")
    assert failure(explorer, argv, capsys).endswith("is there, and is of something else: name another file\n")
    assert page.read_text() == "my notes"
    page.write_text("<!DOCTYPE html>")
    assert failure(explorer, argv, capsys).endswith("is no page of this script, and has no networks to keep\n")
    page.unlink()
    assert str(page) in failure(explorer, argv, capsys)


def test_what_a_kept_page_measures_again_is_what_was_measured(made: str, tmp_path: Path, capsys: Any) -> None:
    page = tmp_path / "page.html"
    page.write_text(made)
    about, weights = explorer.read_page(page)
    about["digits"]["naming"], about["viewpoint"]["opening"], about["digits"]["evenAccuracy"] = None, None, None
    about["digits"]["accuracies"][0]["before"] = 0.25  # cannot be measured again: the page has no such weights
    page.write_bytes(explorer.page_of(about, weights))
    assert explorer.main(["--keep", "--data-dir", str(digits_folder()), "--out", str(page)]) == 0
    old, new = (json.loads(embedded(text, "about")) for text in (made, page.read_text()))
    old["digits"]["accuracies"][0]["before"] = 0.25
    assert new == {**old, "measuredCommit": git_commit()}
    about["digits"]["run"]["config"]["seed"] += 1
    page.write_bytes(explorer.page_of(about, weights))
    said = failure(explorer, ["--keep", "--data-dir", str(digits_folder()), "--out", str(page)], capsys)
    assert "give other test images than the page shows: make it anew" in said


def test_a_wrong_command_line_is_one_line(checkpoints: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    out = ["--out", str(tmp_path / "o.html")]
    assert "there is no checkpoint" in failure(explorer, ["--viewpoint", str(tmp_path / "none"), *out], capsys)
    line = failure(explorer, ["--viewpoint", str(checkpoints[0]), *out], capsys)
    assert "is no readable checkpoint of smallnorb_novel_viewpoint" in line
    assert "there is no page" in failure(animation, ["--page", "none.html", "--out", str(tmp_path / "o.gif")], capsys)


def test_what_is_asked_for_and_what_is_refused(checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(config: Any) -> None:
        raise OSError(f"asked for {config.dataset} in {config.data_dir}")

    monkeypatch.setattr(smallnorb, "make_data", stop)
    monkeypatch.setattr(multimnist, "make_data", stop)
    with pytest.raises(OSError, match="asked for mnist in elsewhere"):  # another folder than the checkpoint's
        explorer.load_digits(checkpoints[0], Path("elsewhere"), 1)
    with pytest.raises(OSError, match="asked for shapes"):  # without a checkpoint
        explorer.load_viewpoint(None)
    loaded = Mock(return_value=(smallnorb.Config(dataset="toys"), {}))
    monkeypatch.setattr(explorer, "load_finished", loaded)
    with pytest.raises(OSError, match="other was trained on toys, whose networks the page does not compute"):
        explorer.load_viewpoint(Path("other"))
    loaded.return_value = multimnist.Config(), {}
    with pytest.raises(OSError, match="asked for"):
        explorer.load_digits(Path("other"), None, 1)
    required = [call.kwargs["required"] for call in loaded.call_args_list]
    assert required == [("capsules", "cnn_matched"), ("capsnet", "cnn_pool")]


def test_a_page_of_mnist_alone_shows_its_comparisons_and_each_names_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explorer, "registered_of_digits", lambda: {"composites": "of MNIST"})
    monkeypatch.setattr(explorer, "git_commit", lambda *others: [*others])
    for name, shown in (("custom", {}), ("strokes", {}), ("mnist", {"composites": "of MNIST"})):
        page = explorer.page_of({"digits": {"run": explorer.run_of(multimnist.Config(), name)}}, "").decode()
        about = json.loads(embedded(page, "about"))
        assert (about["registered"], about["pageCommit"]) == (shown, ["explorer/page"])


def test_a_recording_has_the_frames_a_second_and_the_preview_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (page := tmp_path / "page.html").touch()
    frames = [np.full((4, 4, 3), grey, np.uint8) for grey in (0, 255)]
    driver = Mock(get_screenshot_as_png=lambda: b"\x89PNG")
    monkeypatch.setattr(animation, "headless_browser", lambda *_: contextlib.nullcontext(driver))
    for name, given in (("open_page", None), ("show_as", None), ("record", frames)):
        monkeypatch.setattr(animation, name, Mock(return_value=given))
    out, preview = tmp_path / "a.gif", tmp_path / "a.png"
    assert animation.main([f"--page={page}", f"--out={out}", f"--preview={preview}", "--fps=2"]) == 0
    assert (imageio.immeta(out, index=0)["duration"], preview.read_bytes()) == (500, b"\x89PNG")


# --- The committed page -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def committed() -> tuple[str, dict[str, Any], dict[str, dict[str, Array]]]:
    text = PAGE.read_text(encoding="utf-8")
    return text, *unpacked(text)


def test_the_page_is_one_small_file_that_loads_nothing(committed: tuple[str, Any, Any]) -> None:
    text = committed[0]
    assert PAGE.stat().st_size <= MAX_BYTES
    rest = text.replace(embedded(text, "weights"), "")
    assert "{{" not in rest
    about = committed[1]
    for commit in (about.get("measuredCommit", about["commit"]), about["pageCommit"]):
        assert re.fullmatch("[0-9a-f]{40}", commit), f"made from changed files: {commit}"
    assert f'id="n-capsules">{N_NAMED}<' in rest
    links = re.findall(r"""(?:src|href)\s*=\s*["']([^"']*)|url\(([^)]*)\)|@import|fetch\(|XMLHttpRequest""", rest)
    anchors = {"#digits", "#routing", "#dimensions", "#em", "#viewpoint", "#numbers"}
    sources = {"https://arxiv.org/abs/1710.09829", "https://openreview.net/forum?id=HJWLfGWRb"}
    pages = {"README.md", "docs/how_capsules_work.md"}
    assert {link for link, _ in links} - {"#", "^="} <= {"data:,", *anchors, *sources, *pages}
    assert not any(url for _, url in links)
    for name in ("explorer.css", "networks.js", "explorer.js"):
        assert (explorer.TEMPLATE / name).read_text(encoding="utf-8") in text, f"make_explorer.py has a newer {name}"


def test_the_viewpoint_accuracies_are_those_of_its_weights(committed: tuple[str, Any, Any]) -> None:
    _, about, tensors = committed
    part = about["viewpoint"]
    config = config_of(smallnorb, part)
    models, data = smallnorb.make_models(config), smallnorb.make_data(config)
    for name in explorer.VIEW_MODELS:
        ours = {k.removeprefix(f"{name}."): w for k, w in tensors["viewpoint"].items() if k.startswith(f"{name}.")}
        metrics = smallnorb.evaluate(models[name], ours, data)
        stated = {row["metric"]: row["after"] for row in part["accuracies"] if row["model"] == name}
        assert metrics == pytest.approx(stated, abs=2 / len(data.held_out.labels))


@needs_mnist
def test_the_digit_accuracies_are_those_of_its_weights(committed: tuple[str, Any, Any]) -> None:
    _, about, tensors = committed
    part = about["digits"]
    if part["run"]["dataset"] != "MNIST":
        pytest.skip(f"the page's digits are {part['run']['dataset']}")
    config = dataclasses.replace(config_of(multimnist, part), data_dir=MNIST)
    test = multimnist.make_data(config).test
    with Workers(1) as workers:
        for name, prefix in (("capsnet", ""), ("cnn_pool", "pool.")):
            params = {key[len(prefix) :]: w for key, w in tensors["digits"].items() if key.startswith(prefix)}
            metrics = multimnist.evaluate(multimnist.make_models(config)[name], params, test, workers)
            for row in part["accuracies"]:
                if row["model"] == name:
                    assert metrics[row["metric"]] == pytest.approx(row["after"], abs=2 / part["nTest"])
    capsnet = {key: w for key, w in tensors["digits"].items() if not key.startswith("pool.")}
    for n, (stated, images) in enumerate((("one", test.sources[:1000, 0]), ("two", test.images[:1000]))):
        found = digits_found(config, capsnet, images, part["naming"])
        assert (found == 1 + n).mean() == pytest.approx(part["naming"][stated], abs=0.03)


def test_the_accuracies_as_trained_are_those_of_the_registered_run(committed: tuple[str, Any, Any]) -> None:
    said = committed[1]["digits"]
    results = Path("results", "multimnist_capsnet", "registered_composites_48000.json")
    for row in said["accuracies"]:
        runs = settings_in(Path(f"{results}#{row['model']}"))[0]["runs"]
        if row["metric"] == "set_accuracy" and row["model"] == "capsnet":
            assert median_seed(runs, row["model"], row["metric"]) == said["run"]["seed"]
        (run,) = (run["models"][row["model"]] for run in runs if run["seed"] == said["run"]["seed"])
        assert run[row["metric"]] == row["before"]


def test_the_comparisons_are_those_of_the_claims(committed: tuple[str, Any, Any]) -> None:
    claims = json.loads((ROOT / "results" / "claims.json").read_text())["registered"]
    about, config = committed[1], config_of(smallnorb, committed[1]["viewpoint"])
    study, of_digits = about["viewpoint"]["study"], about["registered"]
    for said, text, condition in (
        (study, "azimuths", "dense, drawn shapes"),
        (of_digits["composites"], "classifies overlapping digits", "48,000 composites"),
        (of_digits["iterations"], "Three iterations of dynamic", "48,000 composites"),
    ):
        (c,) = (c for claim in claims if text in claim["claim"] for c in claim["conditions"]
                if c["condition"] == condition)
        assert [said[key] for key in ("n", "capsules", "cnn", "mean")] == pytest.approx(
            [c[key] for key in ("n", "first", "second", "difference")])
    assert explorer.registered_of_digits() == of_digits
    path = ROOT / "results" / "smallnorb_novel_viewpoint" / "registered_azimuths.json"
    assert explorer.registered_study(path, config) == study
    for change in ({"lr": 0.1}, {"cnn_weight_decay": 5.0}, {"dataset": "voxels"}):
        assert explorer.registered_study(path, dataclasses.replace(config, **change)) is None
    assert explorer.registered_study(Path("none.json"), config) is None


# --- In a browser: the JavaScript against numpy -----------------------------------------------------------------------


def settled(driver: Any, condition: Callable[[], Any]) -> Any:
    """What the condition gives once it is true, within a minute."""
    deadline = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < deadline, driver.name == "chrome" and driver.get_log("browser")
        time.sleep(0.02)
    return value


def started(driver: Any) -> None:
    settled(driver, lambda: driver.execute_script("return document.documentElement.dataset.ready") == "true")


def opened(driver: Any, page: Path, state: str = "") -> None:
    """Load a page and wait until it has begun."""
    driver.get("about:blank")
    driver.get(page.resolve().as_uri() + state)
    started(driver)
    assert driver.execute_script("return document.getElementById('failure').hidden")


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        try:
            browser = stack.enter_context(headless_browser())
        except NoBrowserError as error:
            pytest.skip(f"no test in a browser: {error}")
        opened(browser, PAGE)
        browser.get_log("performance")  # of the browser's own first page
        yield browser


STUDY_NUMBERS = ("n", "mean", "low", "high", "capsules", "cnn")
STUDIES = {
    "multimnist_capsnet": dict(zip(STUDY_NUMBERS, (7, 0.0123, -0.0045, 0.0291, 0.6123, 0.6), strict=True)),
    "smallnorb_novel_viewpoint": dict(zip(STUDY_NUMBERS, (11, -0.0234, -0.0456, -0.0012, 0.51, 0.5334), strict=True)),
}


def coarse(w: Array) -> tuple[Array, Array]:
    """Of eleven levels, so that rounding changes answers."""
    scale = np.maximum(np.abs(w).reshape(-1, w.shape[-1]).max(axis=0) / 5, 1e-30).astype(np.float32)
    return np.rint(w / scale).astype(np.int8), scale


@pytest.fixture(scope="module")
def measured(driver: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A page of networks that were trained for a few steps and are rounded coarsely: what is measured before and after
    rounding, on test and on training digits, of capsules and of CNNs, is each another number. ``ask`` is for what the
    page computes."""
    config = multimnist.Config(
        dataset="mnist", data_dir=digits_folder(), n_test=300, n_train=1280, n_epochs=1, batch_size=32, conv_channels=6,
        primary_types=3, decoder=(24, 40), lr=0.01, weight_decay=0.1, recon_weight=0.005, seed=101,
    )
    view_config = smallnorb.Config(  # all that a training depends on, so that other defaults give the same networks
        dataset="shapes", n_epochs=1, cnn_epochs=1, lr=2e-3, cnn_lr=1e-3, weight_decay=1, em_iters=2, em_grad="exact",
        variance_floor=3, beta_v_init=-1, loss="spread", standardize="image", batch_size=32, seed=107,
    )
    data, view_data = multimnist.make_data(config), smallnorb.make_data(view_config)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        for name, value in {"quantised": coarse, "N_CHOICE": 50, "RARE": 0.1}.items():
            patch.setattr(explorer, name, value)
        patch.setattr(explorer, "registered_study", lambda path, *_: STUDIES[path.parent.name])
        patch.setattr(explorer, "registered_of_digits", lambda: {
            "composites": STUDIES["multimnist_capsnet"], "iterations": STUDIES["smallnorb_novel_viewpoint"]})
        states = multimnist.train_all(config, data, names=explorer.DIGIT_MODELS)
        states["capsnet"].params["routing.w"] *= 2  # so that each iteration changes answers
        view_states = smallnorb.train_all(view_config, view_data, names=explorer.VIEW_MODELS)
        parts = {
            "viewpoint": explorer.viewpoint_part(view_config, view_states),
            "digits": explorer.digits_part(config, states, data._replace(name="mnist"), 1),
        }
        page = tmp_path_factory.mktemp("measured") / MEASURED
        page.write_bytes(explorer.make_page(parts))
    _, tensors = unpacked(page.read_text())
    pool = {key.removeprefix("pool."): w for key, w in tensors["digits"].items() if key.startswith("pool.")}
    capsnet = {key: w for key, w in tensors["digits"].items() if not key.startswith("pool.") and key != "examples"}
    rounded: dict[str, dict[str, Array]] = {name: {} for name in explorer.VIEW_MODELS}
    for key, w in tensors["viewpoint"].items():
        name, _, rest = key.partition(".")
        rounded[name][rest] = w
    for params in (capsnet, pool, *rounded.values()):
        assert min(np.abs(w).max() for w in params.values()) > 1e-3  # or a bias that is forgotten would not be noticed
    opened(driver, page)

    def ask(script: str, *arguments: Any) -> Any:
        plain = [a.ravel().tolist() if isinstance(a, np.ndarray) else a for a in arguments]
        return driver.execute_script("const plain = (x) => Array.from(x);" + script, *plain)

    return SimpleNamespace(
        driver=driver, ask=ask, config=config, view_config=view_config, data=data, view_data=view_data,
        trained={name: getattr(state, "params") for name, state in [*states.items(), *view_states.items()]},  # noqa: B009
        rounded={"capsnet": capsnet, "cnn_pool": pool, **rounded},
    )


TOLERANCE = 1e-4


def agree(theirs: Any, ours: Any, rtol: float = 1e-7) -> None:
    for other, mine in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(np.ravel(other), np.ravel(mine), atol=TOLERANCE, rtol=rtol)


def test_dynamic_routing_is_that_of_numpy(measured: Any) -> None:
    config, params = dataclasses.replace(measured.config, routing_iters=5), measured.rounded["capsnet"]
    images = measured.data.test.images
    for image in (np.zeros_like(images[0]), *images[:2]):
        lengths, cache = multimnist.capsnet_forward(params, image[None], config, multimnist.PLAIN)
        script = """
            const { iterations, uHat } = Networks.capsnet(explorer.models.digits, explorer.about.digits.config,
                                                          Float32Array.from(arguments[0]), 5);
            return [plain(uHat), iterations.map((step) =>
                ["c", "v", "lengths", "s", "logits"].map((name) => plain(step[name])))];"""
        votes, theirs = measured.ask(script, image)
        assert len(theirs) == 5
        votes = np.reshape(votes, (multimnist.N_CLASSES, -1, multimnist.CAPSULE_SIZE))  # (J, I, D)
        expected = np.einsum("ip,ipjd->jid", cache.routing.u[0], params["routing.w"])
        np.testing.assert_allclose(votes, expected, atol=TOLERANCE)
        for t, (c, v, _, s, logits) in enumerate(theirs):
            couplings, e = np.reshape(c, votes.shape[:2]), np.exp(np.reshape(logits, votes.shape[:2]))
            agree((c, v), (cache.routing.c[t][0].T, cache.routing.v[t]))
            agree((s, couplings), (np.einsum("ji,jid->jd", couplings, expected), e / e.sum(axis=0)))
        agree([theirs[-1][2]], lengths)
    assert lengths.max() > 0.1
    assert np.ptp(cache.routing.c[-1]) > 0.01  # or equal couplings would agree by chance


def test_the_cnn_with_pooling_and_the_decoder_are_those_of_numpy(measured: Any) -> None:
    test = measured.data.test.part(0, 3)
    scores = multimnist.make_models(measured.config)["cnn_pool"].assess(measured.rounded["cnn_pool"], test)[0]
    for image, expected in zip(test.images, scores, strict=True):
        script = """return Networks.cnnPool(explorer.models.pool, explorer.about.digits.config,
                                           Float32Array.from(arguments[0]));"""
        np.testing.assert_allclose(measured.ask(script, image), 1 / (1 + np.exp(-expected)), atol=TOLERANCE)
    capsules = np.random.default_rng(0).normal(size=(multimnist.N_CLASSES, multimnist.CAPSULE_SIZE)).astype(np.float32)
    for label in (0, 3, 9):
        picture = explorer.pictures_of(measured.rounded["capsnet"], capsules[label : label + 1], label)
        script = "return plain(Networks.decoder(explorer.models.digits, Float32Array.from(arguments[0]), arguments[1]))"
        np.testing.assert_allclose(measured.ask(script, capsules[label], label), picture.ravel(), atol=TOLERANCE)


@pytest.mark.parametrize(
    "more",
    [
        {"loss": "cross-entropy", "standardize": "none"}, {"loss": "spread", "standardize": "image"},
        {"loss": "spread", "em_iters": 4, "variance_floor": 0.5},
    ],
)
def test_em_routing_and_the_cnn_are_those_of_numpy(more: dict[str, Any], measured: Any) -> None:
    config = smallnorb.Config(**more)
    models = smallnorb.make_models(config)
    images = smallnorb.render_voxels(np.arange(5), np.arange(5) * 70.0, np.arange(5) * 10.0, np.random.default_rng(0))
    images = images.astype(float)
    asked = {
        "loss": config.loss, "lambdas": config.lambdas, "varianceFloor": config.variance_floor,
        "standardize": config.standardize == "image",
    }
    given, images = images, smallnorb.standardized(images) if config.standardize == "image" else images
    (scores, cache), (cnn_scores, _) = (
        models[name].forward({key: w.astype(float) for key, w in measured.rounded[name].items()}, images)
        for name in explorer.VIEW_MODELS
    )
    for k, image in enumerate(given):
        script = """
            const config = { ...explorer.about.viewpoint.config, ...arguments[1] };
            const image = Float32Array.from(arguments[0]);
            const { scores, mu, a } = Networks.matrixCapsules(explorer.models.capsules, config, image);
            return [scores, plain(mu), plain(a), plain(Networks.cnn(explorer.models.cnn, config, image))];"""
        agree(measured.ask(script, image, asked), (scores[k], cache.mu[k], cache.a[k], cnn_scores[k]), TOLERANCE)


def test_objects_are_drawn_as_by_numpy(measured: Any) -> None:
    azimuths, elevations = np.array([0.0, 33.0, 150.0, 271.0, 359.0]), np.array([-30.0, 0.0, 10.0, 50.0, 80.0])
    points = smallnorb.points_of(measured.view_config)
    images = smallnorb.render_voxels(np.arange(5), azimuths, elevations, None, points)
    for k, image in enumerate(images):
        script = """const [object, azimuth, elevation] = arguments[0];
            return plain(Networks.renderVoxels(explorer.about.viewpoint.objects[object], azimuth, elevation, 32));"""
        theirs = measured.ask(script, [k, azimuths[k], elevations[k]])
        np.testing.assert_allclose(theirs, image.ravel(), atol=1e-5)


# --- In a browser: what the page says it measured, against a second computation ---------------------------------------

def cells_of(driver: Any, table: str) -> list[list[str]]:
    return each(driver, f"{table} tbody tr", "[...e.cells].map((cell) => cell.textContent)")


def percentages(text: str) -> list[float]:
    return [float(number.replace("−", "-")) for number in re.findall(r"([-−+]?[\d.]+)\xa0%", text)]


def numbers(text: str) -> list[float]:
    return [float(number.replace("−", "-").replace(",", "")) for number in re.findall(r"[-−+]?\d[\d,]*\.?\d*", text)]


def digit_scores(m: Any, name: str, params: dict[str, Array], images: Array, iterations: int = 3) -> Array:
    if name == "capsnet":
        return multimnist.capsnet_forward(params, images, dataclasses.replace(m.config, routing_iters=iterations))[0]
    return multimnist.make_models(m.config)["cnn_pool"].assess(params, m.data.test)[0]


def shown_image(m: Any, example: int) -> Array:
    script = "showExample(arguments[0]); setRouting(3, false); updateDigits(); return Array.from(digits.image)"
    return np.array(m.driver.execute_script(script, example), np.float32).reshape(1, 36, 36)


def pairs_right(scores: Array, labels: Array) -> tuple[float, float]:
    """The parts of images with both digits among the two highest scores, and of digits that are among them."""
    hits = np.array([[label in row.argsort()[-2:] for label in pair] for row, pair in zip(scores, labels, strict=True)])
    return hits.all(axis=1).mean(), hits.mean()


def view_scores(m: Any, name: str, params: dict[str, Array], images: Array) -> Array:
    return smallnorb.make_models(m.view_config)[name].forward(params, images)[0]


def views_of(m: Any, label: int, azimuths: Array, elevation: int) -> Array:
    """Images of an object as its networks see them."""
    n, points = len(azimuths), smallnorb.points_of(m.view_config)
    images = smallnorb.render_voxels(np.full(n, label), azimuths, np.full(n, elevation), None, points)
    return smallnorb.standardized(images)


def views_right(m: Any, label: int, images: Array) -> list[Array]:
    """Where the capsules, and the CNN, classify this object correctly as the page has it."""
    return [view_scores(m, name, m.rounded[name], images).argmax(axis=1) == label for name in explorer.VIEW_MODELS]


def sine_share(m: Any, label: int, azimuths: Array, images: Array) -> float:
    """The least-squares share of the class pose's variance that a + b cos(azimuth) + c sin(azimuth) explains."""
    mu = smallnorb.make_models(m.view_config)["capsules"].forward(m.rounded["capsules"], images)[1].mu
    pose, angle = mu[:, label].reshape(len(images), 16).astype(float), np.deg2rad(azimuths)
    waves = np.stack([np.ones(len(images)), np.cos(angle), np.sin(angle)], axis=1)
    left = pose - waves @ np.linalg.lstsq(waves, pose, rcond=None)[0]
    return 1 - left.var(axis=0).sum() / pose.var(axis=0).sum()


def test_the_table_of_accuracies(measured: Any) -> None:
    m, test = measured, measured.data.test
    expected, changed = [], []
    for name in explorer.DIGIT_MODELS:
        scores = [digit_scores(m, name, p[name], test.images) for p in (m.trained, m.rounded)]
        before, after = (pairs_right(s, test.labels) for s in scores)
        expected += [[before[k], after[k]] for k in (0, 1)]
        sets = [[set(row.argsort()[-2:].tolist()) for row in s] for s in scores]
        changed += [str(sum(a != b for a, b in zip(*sets, strict=True))), "–"]
    for name in explorer.VIEW_MODELS:
        for split in (m.view_data.familiar, m.view_data.held_out):
            answers = [view_scores(m, name, p[name], split.images).argmax(axis=1) for p in (m.trained, m.rounded)]
            expected.append([(answer == split.labels).mean() for answer in answers])
            changed.append(str((answers[0] != answers[1]).sum()))
    assert len(np.unique(np.round(expected, 4))) == 16  # or a number in another's place would not be seen
    rows = cells_of(m.driver, "#accuracy")
    shown = [[percentages(cell)[0] for cell in row[2:4]] for row in rows]
    assert [row[4] for row in rows] == changed
    assert len({*changed}) == 7  # all but the two dashes
    np.testing.assert_allclose(shown, 100 * np.array(expected), atol=0.0051)
    assert [row[0] for row in rows] == ["CapsNet"] * 2 + ["CNN with pooling"] * 2 + ["matrix capsules"] * 2 + [
        "CNN, as many parameters"
    ] * 2
    assert ["held-out" in row[1] for row in rows] == [False] * 4 + [False, True] * 2
    assert ["both" in row[1] for row in rows] == [True, False] * 2 + [False] * 4
    assert ["each one" in row[1] for row in rows] == [False, True] * 2 + [False] * 4
    better = text_of(m.driver, "better")
    assert percentages(better)[:2] == pytest.approx([100 * expected[0][1], 100 * expected[2][1]], abs=0.0501)
    assert ("the capsules are better" in better) == (expected[0][1] > expected[2][1])
    winner = "the capsules are" if expected[0][1] > expected[2][1] else "the CNN is"
    assert f"{winner} right more often" in value(m.driver, "TOUR[1].answer()")
    even = pairs_right(digit_scores(m, "capsnet", m.rounded["capsnet"], test.images, 1), test.labels)[0]
    routed = pairs_right(digit_scores(m, "capsnet", m.rounded["capsnet"], test.images, 2), test.labels)[0]
    assert min(abs(even - other) for other in (routed, expected[0][1])) > 0.002
    said = percentages(text_of(m.driver, "even-text"))[:2]
    assert said == pytest.approx([100 * expected[0][1], 100 * even], abs=0.0501)
    assert f"On {len(test.labels)} test images" in better
    provenance = text_of(m.driver, "provenance")
    for config in (m.config, m.view_config):
        assert f", seed {config.seed}, {config.n_epochs} epochs," in provenance
    assert f"epochs, {len(test.labels)} test images; test images 1 to {explorer.N_EXAMPLES} of" in provenance
    assert f"epochs, {len(m.view_data.held_out.labels)} held-out views" in provenance


def test_the_studies(measured: Any) -> None:
    for place, name in (("better", "multimnist_capsnet"), ("study", "smallnorb_novel_viewpoint")):
        said, study = text_of(measured.driver, place), STUDIES[name]
        said = said[said.index("Over ") :]
        parts = [100 * study[name] for name in ("capsules", "cnn", "mean", "low", "high")]
        expected = [study["n"], *parts[:3], 95, *parts[3:]]
        assert numbers(said) == pytest.approx(expected, abs=0.0501), said
    said, study = text_of(measured.driver, "even-text"), STUDIES[name]
    said = said.split("Networks that were trained with three are ")[1]
    assert said.startswith("behind those trained with one")
    expected = [-100 * study["mean"], 95, 100 * study["low"], 100 * study["high"], study["n"]]
    assert numbers(said) == pytest.approx(expected, abs=0.0051), said


def test_the_rule_of_one_digit_or_two(measured: Any) -> None:
    """Its bounds come from training digits, its percentages from test digits."""
    m, params = measured, measured.rounded["capsnet"]
    choice = m.data.train.render(*m.data.train.draw(generator(m.config.seed, Stream.EVALUATION, 1), 50))
    alone, pairs = choice.sources[:, 0], choice.images
    single, double = (evidence_of(m.config, params, images).shares for images in (alone, pairs))
    bounds = np.unique(np.concatenate([single, double]))
    wrong = [max((single >= bound).mean(), (double < bound).mean()) for bound in bounds]
    explains = round(float(bounds[int(np.argmin(wrong))]), 3)
    seen = evidence_of(m.config, params, np.concatenate([alone, pairs]), explains)
    rule = {
        "explains": explains,
        "least": round(float(np.quantile(seen.lengths, 0.1)), 3),
        "explained": round(float(np.quantile(seen.explained, 0.1)), 3),
        "widest": round(float(seen.widths.max()), 2),
        "outline": round(float(seen.outlines.max()), 1),
        "most": round(float(seen.inks.max()), 1),
    }
    found = [digits_found(m.config, params, images, rule) for images in (m.data.test.sources[:, 0], m.data.test.images)]
    parts = [(found[0] == 1).mean(), (found[1] == 2).mean()]
    assert parts[0] != parts[1]
    stated = value(m.driver, "about.digits.naming")
    assert stated == pytest.approx({**rule, "nChoice": 50, "one": parts[0], "two": parts[1]}, abs=0.0011)
    said = numbers(text_of(m.driver, "naming"))
    of_capsules = [100 * rule["explains"], 10, rule["least"], 100 * rule["explained"]]
    of_ink = [rule["widest"], rule["outline"], rule["most"]]
    expected = [*of_capsules, *of_ink, 50, 300, 100 * parts[0], 300, 100 * parts[1]]
    assert said == pytest.approx(expected, abs=0.0501)
    assert "chosen on 50 pairs of training digits" in text_of(m.driver, "naming")
    # On single images, as the browser finds them.
    images = np.concatenate([m.data.test.images[:6], m.data.test.sources[:6, 0]])
    asked = m.driver.execute_script("""
        return arguments[0].map((image) => {
            layers.forEach((layer) => { layer.exact = Float32Array.from(image); layer.used = true; });
            updateDigits();
            return [digits.found.length, digits.share, digits.explained, digits.width, digits.outline, digits.ink];
        });""", [image.ravel().tolist() for image in images])
    of_images = np.transpose(evidence_of(m.config, params, images, stated["explains"])[1:])
    np.testing.assert_allclose([row[1:] for row in asked], of_images, rtol=1e-3, atol=1e-3)
    assert [row[0] for row in asked] == digits_found(m.config, params, images, stated).tolist()
    assert len({row[0] for row in asked}) > 1


def test_the_names_of_the_dimensions_and_their_signs(measured: Any) -> None:
    m, params = measured, measured.rounded["capsnet"]
    signs = []
    for label in (2, 7):
        rows = np.flatnonzero((m.data.test.labels == label).any(axis=1))[: explorer.N_CAPSULES]
        v = multimnist.capsnet_forward(params, m.data.test.images[rows], m.config)[1].v[:, label]
        spread = {key: x.std() for key, x in explorer.shape_measures(explorer.pictures_of(params, v, label)).items()}
        m.driver.execute_script("chooseCapsule(arguments[0])", label)
        for d in range(multimnist.CAPSULE_SIZE):
            more, less = v.copy(), v.copy()
            more[:, d] += 0.25
            less[:, d] -= 0.25
            high, low = (explorer.shape_measures(explorer.pictures_of(params, x, label)) for x in (more, less))
            effects = {key: (high[key].mean() - low[key].mean()) / spread[key] for key in spread if spread[key] > 0.05}
            name = max(effects, key=lambda key: abs(effects[key]))
            said = text_of(m.driver, f"name{d}").removeprefix(f"Number {d + 1}, ")
            if abs(effects[name]) < 0.495:
                assert said == "no single effect"
            elif abs(effects[name]) > 0.505:
                assert said.startswith(f"{name} ")
                title = value(m.driver, "$(arguments[0]).title", f"name{d}")
                assert numbers(said) == numbers(title)[2:] == pytest.approx([effects[name]], abs=0.0051)
                signs.append(np.sign(effects[name]))
    assert {-1, 1} <= set(signs)


def test_the_answers_of_each_iteration(measured: Any) -> None:
    m, params = measured, measured.rounded["capsnet"]
    image = shown_image(m, 2)
    lengths = [digit_scores(m, "capsnet", params, image, t)[0] for t in (1, 2, 3, 4, 5)]
    for t, is_even in ((2, False), (3, True), (5, False)):  # what it says of even couplings, while they are even too
        m.driver.execute_script("setRouting(arguments[0], arguments[1]); updateAnswer()", t, is_even)
        said = text_of(m.driver, "even-text")
        routed, even = said.split("With even couplings: ")
        assert f"Routed, iteration {t}: " in routed
        for text, length in ((routed.split(": ")[1], lengths[t - 1]), (even.split(". ")[0], lengths[0])):
            order = np.argsort(-length)[:2]
            expected = [x for j in order for x in (j, length[j])]
            assert numbers(text) == pytest.approx(expected, abs=0.0051)
        bars = each(m.driver, ".bar .value", "Number(e.textContent)")
        np.testing.assert_allclose(bars, lengths[0 if is_even else t - 1], atol=0.0051)
    m.driver.execute_script("setRouting(3, false); updateAnswer()")
    lines = each(m.driver, "#lengths .line", "e.getAttribute('d')")
    points = np.array([numbers(line) for line in lines])  # a length of 1 is 284 pixels above 0
    assert (points[:, ::2] == np.linspace(34, 390, 5)).all()
    heights = points[:, 1::2]
    np.testing.assert_allclose(np.sort(heights, axis=0), np.sort(298 - 284 * np.transpose(lengths), axis=0), atol=0.02)
    assert np.abs(lengths[1] - lengths[4]).max() > 0.02
    grown, pair = lengths[2] - lengths[0], np.argsort(-lengths[2])[:2]
    names = each(m.driver, "#lengths text[x='400']", "Number(e.textContent)")
    assert names == [j for j in np.argsort(-lengths[4]) if lengths[4][j] >= 0.25 or j in pair]
    others = np.delete(grown, pair)
    expected = [*pair, *grown[pair], others.min(), others.max()]  # as the tour says it
    assert numbers(value(m.driver, "grownText()")) == pytest.approx(expected, abs=0.0051)


def test_right_answers_to_a_test_image_are_counted(measured: Any) -> None:
    m, found = measured, set[int]()
    top = digit_scores(m, "cnn_pool", m.rounded["cnn_pool"], m.data.test.images).argsort(axis=1)[:, -2:]
    for k in range(16):
        named, there, lengths, cnn, bars = m.ask("""
            showExample(arguments[0]); updateDigits();
            const bars = [...document.querySelectorAll(".bar")].map((bar) =>
                [...bar.querySelectorAll("i")].map((e) => parseFloat(e.style.width)));
            return [digits.named, digits.found, plain(routed().lengths), plain(digits.cnn), bars];""", k)
        np.testing.assert_allclose(bars, 100 * np.transpose([lengths, cnn]), atol=0.01)
        for place, j in enumerate(named):
            caption = f"{j}: {f'length {lengths[j]:.2f}' if j in there else 'not found'}"
            assert text_of(m.driver, f"recon{place}-text").endswith(caption)
        said = text_of(m.driver, "cnn-answer")
        found.add(n := len({*top[k].tolist()} & {*m.data.test.labels[k].tolist()}))
        assert said.endswith(("Neither is right.", "One is right.", "Both are right.")[n])
    assert len(found) > 1


def test_the_sum_of_the_votes_and_their_table_as_csv(measured: Any) -> None:
    m, params = measured, measured.rounded["capsnet"]
    _, cache = multimnist.capsnet_forward(params, shown_image(m, 3), m.config, multimnist.PLAIN)
    votes = np.einsum("ip,ipjd->jid", cache.routing.u[0], params["routing.w"])
    side, types = m.config.primary_side, m.config.primary_types
    child, (c, v) = types * (2 * side + 5) + 1, (cache.routing.c[2][0], cache.v[0])
    m.driver.execute_script("chooseChild(arguments[0])", child)
    assert numbers(text_of(m.driver, "child-text"))[:4] == [3, 6, 2, types]
    own, moved = m.ask("""
        dimensions.offsets.fill(0); dimensions.offsets[3] = 0.25;
        const both = [capsuleOf(routed(), dimensions.digit), changedCapsule()].map(plain);
        dimensions.offsets.fill(0);
        return both;""")
    np.testing.assert_allclose(np.subtract(moved, own), 0.25 * np.eye(16)[3], atol=1e-6)
    for j, row in enumerate(cells_of(m.driver, "#votes")):  # of one small capsule
        vote, s = votes[j, child], c[:, j] @ votes[j]
        logit = vote @ (cache.routing.v[0] + cache.routing.v[1])[0, j]
        of_sum = c[child, j] * vote @ s / np.linalg.norm(s)
        of = [np.linalg.norm(vote), logit, c[child, j], of_sum, np.linalg.norm(s), np.linalg.norm(v[j]), vote @ v[j]]
        assert [numbers(cell)[0] for cell in row] == pytest.approx([j, *of], abs=0.0055)
    said = numbers(text_of(m.driver, "coupling-text"))
    pair = np.argsort(-np.linalg.norm(v, axis=1))[:2]
    ends = [[j, *np.sort(c[:, j])[[round(part * (len(c) - 1)) for part in (0.05, 0.95, 1)]]] for j in pair]
    assert said == pytest.approx([*ends[0], *ends[1], 0.1], abs=0.0006)
    for at, is_short in ((0.29, True), (0.31, False)):
        m.driver.execute_script("routed().lengths[4] = arguments[0]; chooseCapsule(4)", at)
        assert ("It is short" in text_of(m.driver, "capsule-text")) == is_short
    m.driver.execute_script("updateDigits()")
    for j in (1, 6):
        m.driver.execute_script("chooseCapsule(arguments[0])", j)
        c, c1 = (cache.routing.c[t][0].T[j] for t in (2, 0))
        total, total1 = ((x * np.linalg.norm(votes[j], axis=1)).sum() for x in (c, c1))
        length, length1 = (np.linalg.norm(x @ votes[j]) for x in (c, c1))
        said = numbers(text_of(m.driver, "walk-text"))
        assert said[:2] == [len(c), j]
        assert said[2:4] == pytest.approx([total, length], abs=0.0051)
        assert said[4:] == pytest.approx([100 * length / total, 100 * length1 / total1], abs=0.051)
        assert said[4] != said[5]  # with as many decimals as tell them apart
        pair = value(m.driver, "mostVaried(dimensions.digit)")
        ends = value(m.driver, "walkOf(routed(), dimensions.digit, arguments[0]).ends", pair)
        assert pair == np.argsort(-votes[j].var(axis=0), kind="stable")[:2].tolist()
        longest = value(m.driver, "longestVotes(...arguments)", j, pair)
        far = np.hypot(*votes[j][:, pair].T)
        np.testing.assert_allclose(far[longest], np.sort(far)[::-1][:8], atol=1e-5)
        steps = (c[:, None] * votes[j])[:, pair].reshape(-1, m.config.primary_types, 2).sum(axis=1)
        np.testing.assert_allclose(ends, np.concatenate([np.zeros((1, 2)), steps.cumsum(axis=0)]), atol=1e-4)
        header, *rows = [line.split(",") for line in value(m.driver, "votesText()").splitlines()]
        table = {name: np.array(column, float) for name, column in zip(header, zip(*rows, strict=True), strict=True)}
        np.testing.assert_allclose(table["coupling"], c, atol=1e-5)
        np.testing.assert_allclose(np.stack([table[f"vote{d + 1}"] for d in range(16)], axis=1), votes[j], atol=1e-5)
        np.testing.assert_allclose(table["length"], np.linalg.norm(cache.routing.u[0], axis=1), atol=1e-4)
        np.testing.assert_allclose(table["agreement"], votes[j] @ (cache.v[0, j]), atol=1e-4)
        of_place = slice(types * (2 * side + 5), types * (2 * side + 6))
        widths = each(m.driver, "#arrows .walk", "parseFloat(e.style.strokeWidth)")
        assert widths[:types] == pytest.approx(np.clip(30 * c[of_place] - 1.5, 0.5, 10), abs=0.01)
        assert f"The {types} votes for {j}" in text_of(m.driver, "arrows-text")
        place = np.arange(side * side * types)
        np.testing.assert_array_equal(table["row"], place // types // side + 1)
        np.testing.assert_array_equal(table["column"], place // types % side + 1)
        np.testing.assert_array_equal(table["type"], place % types + 1)


def test_the_held_out_azimuths(measured: Any) -> None:
    m = measured
    azimuths = np.arange(0, 360, 5)
    held_out = (azimuths >= 200) & (azimuths <= 330)
    said = []
    for label, elevation in ((0, 30), (1, 20), (3, 50), (4, 10)):
        images = views_of(m, label, azimuths, elevation)
        right = views_right(m, label, images)
        script = "$('ring-count').textContent = ''; setView(90, arguments[1]); selectObject(arguments[0])"
        m.driver.execute_script(script, label, elevation)
        text = settled(m.driver, lambda: text_of(m.driver, "ring-count"))
        expected = [27, right[0][held_out].sum(), right[1][held_out].sum()]
        assert numbers(text) == expected, (text, expected)
        said.append(tuple(expected[1:]))
        drawn(m.driver)
        hand = value(m.driver, "[view.hand.getAttribute('d'), ...['cx', 'cy'].map((x) => view.knob.getAttribute(x))]")
        assert hand == ["M292.00 145.00L334.00 145.00", "342.00", "145.00"]
        turned = percentages(text_of(m.driver, "pose-turn"))
        assert turned == pytest.approx([100 * sine_share(m, label, azimuths, images), 100], abs=0.51)
        filled = value(m.driver, "view.fields.map((pair) => pair.map((e) => !e.style.stroke.includes('track')))")
        np.testing.assert_array_equal(np.array(filled).T, right)
        for azimuth, words in ((150, "within the trained range"), (155, "neither network was trained on")):
            m.driver.execute_script("setView(arguments[0], arguments[1]); updateView()", azimuth, elevation)
            assert words in text_of(m.driver, "verdict")
            image = views_of(m, label, np.array([azimuth]), elevation)
            a, scores = (view_scores(m, name, m.rounded[name], image)[0] for name in explorer.VIEW_MODELS)
            for name, p in (("capsules", a), ("cnn", np.exp(scores) / np.exp(scores).sum())):  # activations
                answer = "right" if p.argmax() == label else f"wrong ({m.view_config.classes[p.argmax()]})"
                assert f"the {'CNN is' if name == 'cnn' else 'capsules are'} {answer}" in text_of(m.driver, "verdict")
                bars = each(m.driver, f"#answer-{name} > *", "[e.className, Number(e.lastChild.textContent)]")
                for j, (marks, shown) in enumerate(bars):
                    assert shown == pytest.approx(p[j], abs=0.0051)
                    assert [word in marks for word in ("best", "true")] == [j == p.argmax(), j == label]
    assert any(a != b for a, b in said)


def test_the_page_opens_where_the_networks_differ_most(measured: Any) -> None:
    m, azimuths = measured, np.arange(200, 331, 5)
    opening = value(m.driver, "part.opening")
    differences = {}
    for label in range(5):
        for elevation in range(10, 51, 10):
            right = views_right(m, label, views_of(m, label, azimuths, elevation))
            differences[label, elevation] = right, abs(int(right[0].sum()) - int(right[1].sum()))
    right, difference = differences[opening["object"], opening["elevation"]]
    assert difference == max(d for _, d in differences.values()) > 0
    k = int(np.flatnonzero(azimuths == opening["azimuth"])[0])
    assert right[0][k] != right[1][k]
    m.driver.execute_script("restore('')")
    shown = value(m.driver, "[view.object, view.azimuth, view.elevation]")
    assert shown == [opening["object"], opening["azimuth"], opening["elevation"]]
    assert f"shape {opening['object'] + 1} at elevation {opening['elevation']}°" in text_of(m.driver, "study")


def test_the_numbers_of_em_routing_in_the_plane(measured: Any) -> None:
    driver, rng = measured.driver, np.random.default_rng(100)
    said = "return arguments[0].map((a) => activeParents(a, [0, 1, 0.5, 0.5, 0.5, 0.5, 1, 0]))"
    words = driver.execute_script(said, [[0.4, 0.45], [0.45, 0.55], [0.55, 0.6]])
    assert [text.partition(" of the four")[0] for text in words] == [
        "Neither parent is active.", "Parent B is active: 2.0", "Both parents are active."]
    # Votes on a line are far from each other, and their parent is active all the same: its ellipse is what is small.
    line = [x for k in range(4) for x in (0, -2 + 4 / 3 * k, 3 * (-1) ** k, 3 * (-1) ** (k // 2))]
    said_of_line = driver.execute_script("setPlane(arguments[0], 3); return $('plane-text').textContent", line)
    assert said_of_line.startswith("Parent A is active: 4.0")
    assert "ellipse of their votes is small" in said_of_line
    assert "close together" not in said_of_line
    for t in (1, 3):
        votes = np.round(rng.uniform(-3, 3, (1, 4, 2, 2)), 1)
        votes[0, :3, 0] = votes[0, 0, 0] + 0.3 * rng.normal(size=(3, 2)).round(1)
        driver.execute_script("setPlane(...arguments)", votes.ravel().tolist(), t)
        beta = value(driver, "[PLANE.betaA, PLANE.floor]")
        mu, a, cache = smallnorb.em_routing_forward(
            votes, np.ones((1, 4)), np.full(2, beta[0]), np.zeros(2), [1.0] * t, beta[1]
        )
        last = cache.m_steps[-1]
        drawn_at = driver.execute_script("""
            const of = (e, ...names) => names.map((name) => Number(e.getAttribute(name)));
            return [plane.ellipses.map((e) => of(e, "cx", "cy", "rx", "ry")),
                plane.handles.map((e) => e.getAttribute("transform").match(/[-\\d.]+/g).map(Number))];""")
        centre, size = mu.reshape(2, 2) * [1, -1], np.sqrt(last.sigma_sq.reshape(2, 2))
        np.testing.assert_allclose(drawn_at[0], np.hstack([180 + 42.5 * centre, 42.5 * size]), atol=0.0051)
        np.testing.assert_allclose(drawn_at[1], 180 + 42.5 * votes.reshape(8, 2) * [1, -1], atol=0.0051)
        costs = 0.5 * np.log(last.sigma_sq[0]) * last.mass[0][:, None]
        rows = cells_of(driver, "#assignments")
        expected = [*last.r[0], last.mass[0], *[x.reshape(2, 2) for x in (mu[0], last.sigma_sq[0], costs)], a[0]]
        others = ["sum R", "mean μ", "variance σ²", "cost", "activation a"]
        assert [row[0] for row in rows] == [*(f"child {i}" for i in (1, 2, 3, 4)), *others]
        for row, values in zip(rows, expected, strict=True):
            shown = [x for cell in row[1:] for x in numbers(cell)]
            np.testing.assert_allclose(shown, np.ravel(values), atol=0.0051, err_msg=row[0])
        for j, line in enumerate(each(driver, "#plane-equation > *", "e.textContent")):
            z = beta[0] - costs[j].sum()
            assert numbers(line) == pytest.approx([beta[0], -costs[j][0], -costs[j][1], z, a[0, j]], abs=0.0051)
            assert 1 / (1 + math.exp(-z)) == pytest.approx(a[0, j], abs=1e-6)
            shown = numbers(line)
            assert sum(shown[:3]) == pytest.approx(shown[3], abs=1e-9)  # a reader who adds finds what stands there


def test_the_numbers_that_stand_in_the_text(measured: Any) -> None:
    m, of_views = measured, measured.view_config
    types, elevations = m.config.primary_types, " to ".join(f"{angle:.0f}°" for angle in of_views.train_elevations)
    shown = [text_of(m.driver, f"n-{name}") for name in ("primary", "types")]
    assert shown == [str(types * m.config.primary_side**2), str(types)]
    assert text_of(m.driver, "trained-iterations") == str(m.config.routing_iters)
    assert text_of(m.driver, "trained-elevations") == elevations
    words = " ".join(value(m.driver, "document.querySelector('main').textContent").split())
    assert f"where they have more than {explorer.LARGE:,}" in words
    assert f"the small image, {smallnorb.IMAGE_SIZE}×{smallnorb.IMAGE_SIZE} pixels" in words
    start = np.reshape(value(m.driver, "START"), (1, 4, 2, 2))  # of which the tour says three of four
    a, cache = smallnorb.em_routing_forward(start, np.ones((1, 4)), np.full(2, -4.0), np.zeros(2), [1.0] * 3, 0.05)[1:]
    assert (cache.m_steps[-1].r[0, :, 0] > 0.5).sum() == 3
    assert a[0, 0] > 0.5 > a[0, 1]


# --- In a browser: the committed page as a person uses it -------------------------------------------------------------

@pytest.fixture
def page(driver: Any) -> Any:
    """The committed page, opened once for all tests, in the state in which it opens."""
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    show_as(driver, 1280, 900)
    if driver.current_url.partition("#")[0] != PAGE.resolve().as_uri():
        opened(driver, PAGE)
    driver.execute_script(
        "link.closeTour(); stopPlaying(); selectLayer(0); $('plane-reset').click();"
        "Object.assign(drawing, { pen: null, penSeen: -Infinity }); drawing.keys.down = false;"
        "history.replaceState(null, '', '#x=1'); restore(); drawing.past = [];"
    )
    drawn(driver)  # what the test before began to scroll has come to its end
    driver.execute_script("scrollTo(0, 0)")
    drawn(driver)
    return driver


def drawn(driver: Any) -> None:
    """Wait for two frames of the screen: what was asked for before is shown."""
    frames = "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(arguments[0])))"
    driver.execute_async_script(frames)
    until(driver, "waiting.size === 0")


def restored(page: Any, link: str) -> None:
    page.execute_script("restore(arguments[0])", link)
    drawn(page)


def asked(driver: Any, script: str, *arguments: Any) -> Any:
    """What a script gives in the page itself: one of Firefox's driver has names of its own."""
    code = f"JSON.stringify((function () {{ {script} }})(...{json.dumps(arguments)}))"
    return json.loads(driver.execute_script("return (window.wrappedJSObject ?? window).eval(arguments[0])", code))


def value(driver: Any, expression: str, *arguments: Any) -> Any:
    """Of an expression of the page's script."""
    return driver.execute_script(f"return {expression}", *arguments)


def until(driver: Any, expression: str, *arguments: Any) -> None:
    settled(driver, lambda: value(driver, expression, *arguments))


def each(driver: Any, selector: str, expression: str) -> list[Any]:
    """Of every element ``e``."""
    return value(driver, f"[...document.querySelectorAll(arguments[0])].map((e) => {expression})", selector)


def text_of(driver: Any, name: str) -> str:
    return value(driver, "document.getElementById(arguments[0]).textContent", name)


def rect_of(driver: Any, selector: str) -> dict[str, float]:
    return value(driver, "document.querySelector(arguments[0]).getBoundingClientRect().toJSON()", selector)


def pixels_of(driver: Any, name: str) -> bytes:
    url = value(driver, "document.getElementById(arguments[0]).toDataURL()", name)
    return base64.b64decode(url.partition(",")[2])


def click(driver: Any, name: str) -> None:
    driver.find_element("id", name).click()


def is_shown(driver: Any, name: str) -> bool:
    return driver.find_element("id", name).is_displayed()


def answers_to_the_image(page: Any, committed: tuple[str, Any, Any]) -> list[int]:
    """The digits that numpy finds in the image that the page's networks see, the same ones as the page says."""
    settled(page, lambda: asked(page, "return waiting.size + Number(isEmpty())") == 0)
    part, params = committed[1]["digits"], committed[2]["digits"]
    config = config_of(multimnist, part)
    images = np.reshape(asked(page, "return Array.from(digits.image)"), (1, 36, 36)).astype(np.float32)
    order = np.argsort(-multimnist.capsnet_forward(params, images, config)[0][0])
    found = order[: digits_found(config, params, images, part["naming"])[0]].tolist()
    names = " and ".join(f"{'an' if j == 8 else 'a'} {j}" for j in found) or "no digit"
    expected = f"Capsules: {names}{' alone' if len(found) == 1 else ''}. "
    assert text_of(page, "answer") == expected
    marked = asked(page, "return [...document.querySelectorAll('.bar.first, .bar.second')].map((e) => e.id)")
    assert marked == [f"bar{j}" for j in sorted(found)]
    return found


def drag(driver: Any, element: Any, right: int, down: int) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    driver.execute_script("arguments[0].scrollIntoView({ block: 'center', behavior: 'instant' })", element)
    ActionChains(driver).click_and_hold(element).move_by_offset(right, down).release().perform()


def pen(page: Any, *lines: Any, layer: int = 0) -> None:
    """Draws lines of points (x, y) on a layer, whose side is 288."""
    page.execute_script("""
        selectLayer(arguments[1]);
        for (const line of arguments[0]) {
            const points = line.map(([x, y]) => ({ x, y }));
            penDown(points[0], "test"); points.forEach(penTo); penUp();
        }
        updateDigits();""", lines, layer)


def circle(radius: float) -> list[tuple[float, float]]:
    return [(144 + radius * math.sin(k * math.pi / 9), 144 + radius * math.cos(k * math.pi / 9)) for k in range(20)]


def strokes_of(driver: Any) -> list[int]:
    """The number of points of each stroke."""
    return value(driver, "drawing.strokes.map(({ points }) => points.length)")


def pointers(page: Any, name: str, *events: Any) -> None:
    """Of pointers at an element: kind, number, event, pixels from the left edge, and what else the event says."""
    page.execute_script("""
        const node = $(arguments[0]), { left, top } = node.getBoundingClientRect();
        node.setPointerCapture = () => {};
        for (const [pointerType, pointerId, type, x, more] of arguments[1]) {
            node.dispatchEvent(new PointerEvent(`pointer${type}`, { pointerType, pointerId, button: 0, bubbles: true,
                clientX: left + x, clientY: top + 100, ...more }));
        }
        delete node.setPointerCapture;""", name, events)


@contextlib.contextmanager
def fingers(page: Any, name: str) -> Iterator[Callable[..., None]]:
    """Touches an element with fingers (number, x, y), in parts of its width and height."""
    page.execute_script("$(arguments[0]).scrollIntoView({ block: 'center', behavior: 'instant' })", name)
    drawn(page)
    box = rect_of(page, f"#{name}")

    def touch(kind: str, *points: tuple[int, float, float]) -> None:
        at = [{"id": k, "x": box["x"] + x * box["width"], "y": box["y"] + y * box["height"]} for k, x, y in points]
        page.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": at})

    page.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 3})
    yield touch
    touch("End")
    page.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})
    drawn(page)


# Drawing.


def test_what_is_drawn_with_the_mouse_is_answered(page: Any, committed: tuple[str, Any, Any]) -> None:
    before = pixels_of(page, "seen")
    page.execute_script("getSelection().selectAllChildren(document.body)")  # which is not dragged in place of the pen
    animation.draw_line(page, "draw", animation.SEVEN)
    settled(page, lambda: pixels_of(page, "seen") != before)
    assert strokes_of(page)[0] > 10
    answers_to_the_image(page, committed)
    image = np.reshape(value(page, "Array.from(digits.image)"), (36, 36))
    rows, columns = (np.flatnonzero(image.max(axis=axis) > 0.5) for axis in (1, 0))
    assert 18 <= np.ptp(rows) <= 20 > np.ptp(columns)  # as high as a digit of MNIST
    assert image[: rows[0] + 5].sum() > 1.5 * image[-(36 - rows[-1]) - 5 :].sum()  # a seven's line is above
    page.find_elements("name", "layer")[1].click()
    animation.draw_line(page, "draw", animation.ZERO)
    drawn(page)
    answers_to_the_image(page, committed)


def test_undo_and_clear(page: Any) -> None:
    click(page, "clear")
    empty = settled(page, lambda: "is empty" in text_of(page, "answer") and pixels_of(page, "draw"))
    assert {*each(page, ".bar i", "e.style.width")} == {"0%"}
    assert text_of(page, "bars") == "0123456789"
    pen(page, [(90, 70), (200, 70)])
    first = settled(page, lambda: (now := pixels_of(page, "draw")) != empty and now)
    pen(page, [(144, 60), (144, 230)], layer=1)
    settled(page, lambda: pixels_of(page, "draw") != first)
    # The second digit is cleared when nothing is left of it, and an empty canvas: then there is nothing to do.
    for name, layer, expected in (
        ("undo", 1, first), ("clear-one", 1, first), ("clear-one", 0, empty), ("clear", 0, empty), ("clear", 0, empty),
        ("undo", 0, first),
    ):
        page.find_elements("name", "layer")[layer].click()
        click(page, name)
        drawn(page)
        assert pixels_of(page, "draw") == expected, (name, layer)


def test_the_keyboard_draws_and_the_browsers_keys_are_its_own(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    canvas = page.find_element("id", "draw")
    click(page, "clear")
    canvas.send_keys(Keys.ARROW_UP, " ", *[Keys.ARROW_DOWN] * 9, " ", Keys.ARROW_LEFT)
    settled(page, lambda: "is empty" not in text_of(page, "answer"))
    assert strokes_of(page) == [10]
    canvas.send_keys(" ")  # down, and left so: the mouse draws all the same
    animation.draw_line(page, "draw", animation.SEVEN)
    assert len(strokes_of(page)) == 3
    assert strokes_of(page)[2] > 10
    press = """
        const [selector, key, more] = arguments;
        const event = new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true, ...more });
        document.querySelector(selector).dispatchEvent(event);
        return event.defaultPrevented;"""
    click(page, "clear")
    for repeat in (False, True, True, True):  # a key that is held draws once, and the page does not scroll
        assert page.execute_script(press, "#draw", " ", {"repeat": repeat})
    assert value(page, "[drawing.strokes.length, drawing.keys.down]") == [1, True]
    page.execute_script("penUp(); drawing.keys.down = false")
    for name in ("#draw", "#couplings", "#view", "#plane .handle"):
        before = value(page, "[stateText(), drawing.keys.x]")
        for modifier in ("altKey", "ctrlKey", "metaKey"):
            assert not page.execute_script(press, name, "ArrowLeft", {modifier: True}), name
        assert value(page, "[stateText(), drawing.keys.x]") == before, name
        assert page.execute_script(press, name, "ArrowLeft", {}), name
        assert value(page, "[stateText(), drawing.keys.x]") != before, name


def test_a_second_finger_draws_beside_one_that_rests_alone(page: Any) -> None:
    click(page, "clear")
    with fingers(page, "draw") as touch:  # it does not join the line of one that draws
        touch("Start", (0, 0.2, 0.2))
        touch("Move", (0, 0.3, 0.3))
        touch("Start", (0, 0.3, 0.3), (1, 0.8, 0.9))
        for k in range(5):
            touch("Move", (0, 0.3, 0.4 + k / 20), (1, 0.8, 0.8))
    page.execute_script("penDown({ x: 9, y: 9 }, 'test'); $('undo').click()")  # by another finger
    assert value(page, "drawing.pen") is None
    points = value(page, "drawing.strokes.flatMap(({ points }) => points).map(({ x }) => x / LAYER_SIDE)")
    assert len(points) > 3
    assert max(points) < 0.35
    click(page, "clear")
    with fingers(page, "draw") as touch:  # a palm's touch rests
        touch("Start", (0, 0.8, 0.95))
        touch("Start", (0, 0.8, 0.95), (1, 0.3, 0.3))
        for k in range(6):
            touch("Move", (0, 0.805, 0.95), (1, 0.3 + k / 20, 0.3))
    assert value(page, "drawing.strokes.map(({ points }) => points.length > 3)") == [True]
    assert value(page, "drawing.strokes[0].points[0].x / LAYER_SIDE") == pytest.approx(0.3, abs=0.02)
    with fingers(page, "draw") as touch:  # two that rest: the first one's dot
        touch("Start", (0, 0.8, 0.9))
        touch("Start", (0, 0.8, 0.9), (1, 0.2, 0.9))
    assert strokes_of(page)[1:] == [1]


def test_a_second_finger_drags_nothing(page: Any) -> None:
    of, on_3b = ([0.5 + x / 8 * 340 / 360 for x in place] for place in ((-2.6, -1.9), (2.6, 1.2)))  # 1B and 3B
    with fingers(page, "plane") as touch:
        touch("Start", (0, *of))
        touch("Move", (0, of[0] + 0.02, of[1]))
        drawn(page)
        before = value(page, "[...plane.votes]")
        touch("Start", (0, of[0] + 0.02, of[1]), (1, *on_3b))
        for k in range(3):
            touch("Move", (0, of[0] + 0.02, of[1]), (1, on_3b[0] - k / 50, on_3b[1]))
        drawn(page)
        still = value(page, "[...plane.votes]")
        touch("Move", (0, of[0] + 0.1, of[1] + 0.05), (1, *on_3b))
    assert np.delete(still, [2, 3]).tolist() == np.delete(before, [2, 3]).tolist()
    assert value(page, "[...plane.votes]")[2:4] != before[2:4]


def test_palms_draw_nothing(page: Any) -> None:
    def slide(kind: str, number: int, *places: int, **more: Any) -> list[Any]:
        events = ["down", *["move"] * (len(places) - 1)]
        return [(kind, number, event, x, more) for event, x in zip(events, places, strict=True)]

    click(page, "clear")
    before, after = slide("touch", 5, 150), [("touch", 5, "move", 170), ("touch", 5, "up", 170)]
    pointers(page, "draw", *before, *slide("pen", 6, 50, 60, 80, 100), after[0], ("pen", 6, "up", 100), after[1])
    assert strokes_of(page) == [4]  # a pen takes the canvas from a palm
    for milliseconds, n in ((9000, 1), (11000, 2)):  # since the stylus: its hand rests while one thinks
        page.execute_script("drawing.penSeen = performance.now() - arguments[0]", milliseconds)
        pointers(page, "draw", *slide("touch", 7, 40, 80), ("touch", 7, "up", 80))
        assert len(strokes_of(page)) == n
    click(page, "clear")
    palm, slow, pressed = ((150, 200), (170, 200)), ((150, 30), (170, 200)), ((150, 60), (170, 130), (190, 200))
    for touched, expected in ((palm, [4]), (slow, [4, 4]), (pressed, [4, 4, 3])):  # a finger that is pressed draws
        wide = [("touch", 7, "move" if k else "down", x, {"width": width}) for k, (x, width) in enumerate(touched)]
        finger = [*slide("touch", 8, 40, 60, 80, 100, width=22), ("touch", 8, "up", 100)]
        pointers(page, "draw", *wide, *finger, ("touch", 7, "up", 150))
        assert strokes_of(page) == expected


def test_the_first_button_alone_drags(page: Any) -> None:
    def mouse(name: str, *moves: tuple[str, int, int, int]) -> float:
        events = [("mouse", 5, event, 100 + x, {"button": button, "buttons": n}) for event, x, button, n in moves]
        pointers(page, name, *events)
        return value(page, "view.azimuth")

    before = mouse("view")
    assert mouse("view", ("down", 0, 2, 2), ("move", 40, -1, 2), ("up", 40, 2, 0)) == before
    lost = (("down", 0, 0, 1), ("move", 20, -1, 1), ("move", 60, -1, 0), ("move", 90, -1, 1))
    turned = mouse("view", *lost)
    assert turned != before
    again = mouse("view", ("down", 0, 0, 1), ("move", 20, -1, 1), ("up", 20, 0, 0))
    assert (again - turned) % 360 == pytest.approx((turned - before) % 360)  # the button was let go after 20 pixels
    click(page, "clear")
    mouse("draw", *lost)
    assert strokes_of(page) == [2]


def test_nothing_of_a_stroke_is_lost(page: Any) -> None:
    """A reload in the middle of it, or a call that ends the touch, loses no more than its last second."""
    page.execute_script("$('clear').click(); remember()")
    n, is_saved, address = page.execute_script("""
        penDown({ x: 20, y: 20 }, "keys"); link.saved = -1e6;
        for (let k = 1; k < 6; k++) penTo({ x: 20 + 20 * k, y: 40 });
        return [drawing.strokes.length, location.hash.slice(1) === stateText(), location.hash.slice(1)];""")
    assert n == 1
    assert "d=" in address
    assert not is_saved  # the rest within a second
    page.execute_script("dispatchEvent(new PointerEvent('pointercancel'))")
    assert value(page, "location.hash.slice(1) === stateText()")
    page.execute_script("penUp(); restore(arguments[0])", address)
    assert strokes_of(page) == [2]
    click(page, "clear")
    animation.draw_line(page, "draw", animation.SEVEN)
    value(page, "0")  # after the last event of the mouse
    page.refresh()  # the page is left at once
    started(page)
    assert len(strokes_of(page)) == 1
    pen(page, [(50, 40), (50, 100)])
    page.execute_script("remember()")
    page.refresh()
    started(page)
    for n in (1, 0):  # stroke by stroke
        click(page, "undo")
        assert len(strokes_of(page)) == n


def test_slow_networks_wait_for_the_pen_to_rest(page: Any) -> None:
    """They would hold up the ink: at a point a frame of the screen each of them would be one answer."""
    draw = """
        const [took, done] = arguments;
        Object.defineProperty(digits, "took", { get: () => took, set: () => {}, configurable: true });
        const ink = () => $("draw").toDataURL();
        const [results, before, seen] = [new Set([digits.result]), ink(), []];
        penDown({ x: 50, y: 50 }, "test");
        let k = 0;
        const next = () => {
            if (k === 0) seen.push(ink() !== before && results.has(digits.result));
            results.add(digits.result);
            if (++k < 12) { penTo({ x: 50 + 12 * k, y: 50 + 12 * k }); return requestAnimationFrame(next); }
            seen.push(results.size - 1, waiting.has(afterPause));
            if (took > 100) penUp();
            setTimeout(() => {
                seen.push(digits.result === [...results].at(-1), waiting.size, Boolean(drawing.pen));
                penUp(); delete digits.took; digits.took = 0; done(seen);
            }, 600);
        };
        requestAnimationFrame(next);"""
    seen = []
    for took in (1, 90, 110):
        click(page, "clear")
        drawn(page)
        seen.append(page.execute_async_script(draw, took))
    (is_ink_first, n_answers, waits, *_), slow, lifted = seen
    assert (is_ink_first, waits) == (True, False)
    assert n_answers > 2
    assert slow == [True, 0, True, False, 0, True]  # it rests, and is answered
    assert lifted == [True, 0, True, False, 0, False]


def test_what_is_no_digit_and_why(page: Any) -> None:
    def zigzag(n: int) -> list[list[tuple[float, float]]]:
        return [[(3 if k // 2 % 2 else 285, 288 * k / (2 * n)) for k in range(2 * n + 1)]]

    wide = "(twice area over outline), more than"  # for which no network is asked
    cases: list[tuple[Any, str, str]] = [
        ([[(144, 144)]], "Draw it larger. ", wide), ([circle(6)], "Draw it larger. ", wide),
        ([[(280 if k % 2 else 8, 8 * k) for k in range(40)]], "", wide),
        # Lines from side to side leave slits of the ground that are no strokes; the capsules take some for digits.
        *((zigzag(n), "", "the small image holds as much ink as") for n in (11, 12, 13, 14)),
        *(([[(3, y), (285, y)] for y in np.linspace(8, 280, n)], "", "have an outline of") for n in (6, 7, 8, 9)),
    ]
    for lines, hint, why in cases:
        click(page, "clear")
        pen(page, *lines)
        assert text_of(page, "answer") == f"Capsules: no digit. {hint}", lines
        assert "The capsules find no digit: " in text_of(page, "why-text")
        assert why in text_of(page, "why-text")
        assert text_of(page, "cnn-answer").startswith("CNN, always two: ")
    large = [(144 + 110 * math.sin(k * 0.16), 144 + 128 * math.cos(k * 0.16)) for k in range(40)]
    dense = [(280 if k // 2 % 2 else 8, 8 + 17 * k) for k in range(16)]
    page.execute_script("$('fit').checked = false")  # a large drawing that is not scaled has a longer outline
    for line, is_too_long in ((large, False), (dense, True)):
        click(page, "clear")
        pen(page, line)
        assert value(page, "digits.outline > about.digits.naming.outline")
        assert ("have an outline of" in text_of(page, "why-text")) == is_too_long


def test_a_tiny_ring_is_no_digit_and_a_blob_beside_another(page: Any) -> None:
    for radius, is_small in ((22, True), (11, True), (40, False)):  # scaled, the smallest look like an 8 or a 9
        click(page, "clear")
        pen(page, circle(radius))
        assert ("pixels large" in text_of(page, "why-text")) == is_small, radius
        assert ("no digit" in text_of(page, "answer")) == is_small
        if radius == 11:  # after any number of iterations
            page.execute_script("setRouting(1, false); updateAnswer()")
            assert "no digit. Draw it larger" in text_of(page, "answer")
            page.execute_script("setRouting(3, false)")
    pen(page, circle(11), layer=1)  # upon the large one, which stays a digit, and alone
    assert "One drawing is 5.7 of 36 pixels large, less than 10" in text_of(page, "why-text")
    expected = r"Capsules: an? \d alone. The other one is too small: draw it larger. "
    assert re.fullmatch(expected, text_of(page, "answer"))
    assert value(page, "digits.colour[digits.named.indexOf(digits.found[0])]") == 0
    page.execute_script("setRouting(5, false); updateAnswer()")
    assert value(page, "[digits.small.length, digits.found.length]") == [1, 1]
    assert "left out of the image" in text_of(page, "why-text")
    with_ring = value(page, "[...digits.result.iterations[2].lengths]")
    page.execute_script("$('clear-one').click(); updateDigits()")
    assert value(page, "[...digits.result.iterations[2].lengths]") == with_ring


def test_a_digit_found_alone_has_the_colour_in_which_it_was_drawn(page: Any) -> None:
    """The second longest capsule is not found, and its faint reconstruction resembles the 7 even more."""
    seven = np.array([(3, 2), (6, 2), (6, 2.5), (5, 5), (4, 8.5)])
    zero = np.array([(3.5, 6), (3, 3), (5, 2), (6, 4), (5, 7), (3.5, 6)])
    click(page, "clear")
    for layer, line in enumerate((seven, zero)):
        pen(page, (28.8 * line).tolist(), layer=layer)
    assert text_of(page, "answer") == "Capsules: a 7 alone. "
    (first, second), (other, another) = page.execute_script("""
        const likeness = (r, p) => dot(r, p) / Math.sqrt(dot(r, r) * dot(p, p));
        return digits.recon.map((r) => digits.pictures.map((p) => likeness(r, p)));""")
    assert first > second
    assert first + another < second + other  # both together would change the colours
    assert value(page, "digits.colour") == [0, 1]
    assert page.find_elements("css selector", "#answer .swatch.first")


def test_a_test_image_loses_one_digit_and_comes_back(page: Any) -> None:
    state = "[drawing.example, drawing.kept, drawing.strokes.length, layers.map(({ used }) => used)]"
    whole = pixels_of(page, "draw")
    click(page, "draw")  # a tap
    drawn(page)
    assert pixels_of(page, "draw") == whole
    page.find_elements("name", "layer")[1].click()
    click(page, "clear-one")
    drawn(page)
    np.testing.assert_array_equal(*value(page, "[Array.from(digits.image), Array.from(sourceOf(0, 0))]"))
    assert f"; you cleared the {value(page, 'about.digits.labels[0][1]')}." in text_of(page, "why-text")
    assert "ight" not in text_of(page, "answer")  # of one digit of a pair nobody says which is right
    click(page, "undo")
    settled(page, lambda: pixels_of(page, "draw") == whole)
    click(page, "clear-one")
    pen(page, [(144, 90), (200, 90), (160, 200)], layer=1)  # in place of the digit that is cleared, in its link too
    both = [0, [True, False], 1, [True, True]]
    assert value(page, state) == both
    lengths = value(page, "[...digits.result.iterations[2].lengths]")
    pen(page, [(20, 20), (90, 90)])  # on the other: a new drawing
    assert value(page, state)[::2] == [-1, 1]
    click(page, "undo")
    assert value(page, state) == both
    page.execute_script("remember()")
    page.refresh()
    started(page)
    assert value(page, state) == both
    assert value(page, "[...digits.result.iterations[2].lengths]") == pytest.approx(lengths, abs=1e-6)
    click(page, "undo")
    click(page, "undo")
    settled(page, lambda: pixels_of(page, "draw") == whole)
    click(page, "next-example")
    drawn(page)
    assert value(page, "[drawing.example, $('example').value]") == [1, "1"]
    assert pixels_of(page, "draw") != whole
    click(page, "clear")
    assert value(page, "$('example').selectedOptions[0].textContent") == "–"  # it is no test image
    click(page, "next-example")
    assert value(page, "drawing.example") == 1  # the one before the drawing


# Answers, routing, numbers of a capsule, the plane and the object.


def test_after_other_iterations_the_two_longest_are_the_answer(page: Any) -> None:
    """The rule of one digit or none was chosen for three."""
    page.execute_script("""
        for (let k = 0; k < 24; k++) { showExample(k); updateDigits(); if (digits.found.length === 1) return; }""")
    assert " alone" in text_of(page, "answer")
    for t, even, said in ((1, False, "iteration 1"), (5, False, "iteration 5"), (3, True, "even couplings")):
        page.execute_script("setRouting(...arguments); updateAnswer()", t, even)
        assert text_of(page, "answer").startswith(f"Capsules, {said}: ")
        assert numbers(text_of(page, "answer").split(": ")[1]) == value(page, "longest(routed())")
        assert "no rule says how many" in text_of(page, "why-text")
    assert "more iterations change nothing" in text_of(page, "even-text")
    page.execute_script("setRouting(1, false); updateAnswer()")
    assert text_of(page, "even-text").startswith("The first iteration has even couplings")
    said = page.execute_script("""
        setRouting(3, false); updateAnswer(); digits.share = -0.125; showWhy();
        return $("why-text").textContent;""")
    assert "adds 12.5\xa0% to the squared error that the first leaves. It is" in said


def test_the_two_networks_differ_on_the_images_of_the_tray(page: Any) -> None:
    buttons = page.find_elements("css selector", "#tray button")
    assert buttons
    n_images = value(page, "about.digits.labels.length")
    for k, button in enumerate(buttons[:4]):
        page.execute_script("arguments[0].click()", button)
        right = "CNN is" if k % 2 else "capsules are"
        assert button.get_attribute("aria-label").endswith(f": only the {right} right")
        assert value(page, "drawing.example") == explorer.N_EXAMPLES + k
        drawn(page)
        assert ("oth are right" in text_of(page, "answer")) == (k % 2 == 0)
        assert ("Both are right" in text_of(page, "cnn-answer")) == (k % 2 == 1)
        click(page, "next-example")  # it goes through the tray too, and from its end to the first
        assert value(page, "drawing.example") == (explorer.N_EXAMPLES + k + 1) % n_images


def test_the_sliders_and_choices_of_the_routing(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    bars = text_of(page, "bars")
    page.find_element("id", "iterations").send_keys(Keys.HOME)
    settled(page, lambda: text_of(page, "iterations-value") == "1" and text_of(page, "bars") != bars)
    assert "all are 0.100" in text_of(page, "coupling-text")
    for slider, part in zip(page.find_elements("class name", "again"), ("walk", "votes"), strict=True):  # in sight
        before = value(page, "$(arguments[0]).innerHTML", part)
        slider.send_keys(Keys.ARROW_RIGHT)
        drawn(page)
        assert value(page, "$(arguments[0]).innerHTML", part) != before
        shown = value(page, "['#iterations', '.again', '.formula .again'].map((e) => document.querySelector(e).value)")
        assert shown == [str(value(page, "digits.iteration"))] * 3
    click(page, "bar4")
    settled(page, lambda: "Capsule 4" in text_of(page, "capsule-text"))
    click(page, "even")
    settled(page, lambda: "All are held at 0.100" in text_of(page, "coupling-text"))
    assert text_of(page, "arrows-text").endswith("All couplings are held at a tenth.")
    saved = [line.split(",") for line in value(page, "votesText()").splitlines()[1:]]
    assert {(line[1], line[7]) for line in saved} == {("1", "0.1")}  # iteration and coupling
    assert "With even couplings" in text_of(page, "even-text")
    child = text_of(page, "child-text")
    drag(page, page.find_element("id", "couplings"), -60, 40)
    settled(page, lambda: text_of(page, "child-text") != child)


def test_a_slider_changes_the_digit_and_reset_undoes_it(page: Any) -> None:
    before = pixels_of(page, "after")
    assert before == pixels_of(page, "before")
    drag(page, page.find_element("id", "slider0"), 60, 0)
    settled(page, lambda: pixels_of(page, "after") != before)
    assert float(text_of(page, "slider-value0")) > 0.02
    click(page, "reset")
    assert pixels_of(page, "after") == before
    click(page, "play0")
    settled(page, lambda: pixels_of(page, "after") != before)
    click(page, "play0")
    assert pixels_of(page, "after") == before
    saved = page.execute_script("""
        $("slider3").value = 0.2; $("slider3").dispatchEvent(new Event("input")); $("play5").click();
        dimensions.playing.offset = 0.11;
        return stateText().match(/&n=([^&]*)/)?.[1];""")
    assert saved == ",".join("20" if d == 3 else "0" for d in range(16))  # without what plays
    page.execute_script("$('play5').click(); $('play3').click(); dimensions.playing.offset = -0.1; $('play3').click()")
    assert text_of(page, "slider-value3") == "+0.20"  # as it was set before it was played
    digit = value(page, "dimensions.digit")
    for iterations in range(1, 6):
        page.execute_script("setRouting(arguments[0], false)", iterations)
        drawn(page)
        assert text_of(page, "slider-value3") == "+0.20"
        assert value(page, "dimensions.digit") == digit


def test_votes_in_the_plane_are_dragged(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    slider = page.find_element("id", "plane-iterations")
    slider.send_keys(Keys.ARROW_RIGHT)
    settled(page, lambda: text_of(page, "plane-text") == "Neither parent is active.")  # of activations of 0.02 and 0.02
    assert text_of(page, "plane-value") == "2"
    slider.send_keys(Keys.ARROW_RIGHT)
    settled(page, lambda: text_of(page, "plane-text").startswith("Parent A is active: 3.0 of the four children"))
    before, votes = text_of(page, "assignments"), value(page, "[...plane.votes]")
    assert before.endswith("activation a0.8900.084")  # as views.em_routing_forward has them, with lambda = 1
    drag(page, page.find_element("css selector", "#plane .handle circle"), -60, 30)
    settled(page, lambda: text_of(page, "assignments") != before)
    moved = value(page, "[...plane.votes]")
    assert moved == value(page, "plane.votes.map(hundredths)")  # as a link holds them
    assert np.flatnonzero(np.array(moved) != votes).tolist() == [0, 1]
    at = [0.5 + x / 8 * 340 / 360 for x in value(page, "[plane.votes[10] + 0.3, 0.2 - plane.votes[11]]")]
    with fingers(page, "plane") as touch:  # beside the vote of child 3 for B, as a finger falls
        touch("Start", (0, *at))
        touch("Move", (0, at[0] - 0.1, at[1]))
    after = np.flatnonzero(np.array(value(page, "[...plane.votes]")) != moved)
    assert 10 in after
    assert set(after) <= {10, 11}


def test_dragging_turns_the_object(page: Any) -> None:
    """A class can be known by its activation, with a pose of almost zero."""

    def seen() -> tuple[bytes, str]:
        drawn(page)
        pose = np.array(value(page, "poseOf(answersAt(view.azimuth).capsules.mu)"))
        cells = each(page, "#matrix td", "[e.textContent, e.style.background]")
        np.testing.assert_allclose([numbers(text)[0] for text, _ in cells], pose, atol=0.0501)
        assert ["cnn" in colour for _, colour in cells] == (pose < 0).tolist()
        assert bool(text_of(page, "pose-zero")) == (np.abs(pose).max() < 0.05)
        return pixels_of(page, "view"), text_of(page, "azimuth-value")

    for j in range(smallnorb.N_CLASSES):
        page.execute_script("selectObject(arguments[0])", j)
        before = seen()
    assert len({*each(page, "#objects canvas", "e.toDataURL()")}) == smallnorb.N_CLASSES  # each object beside its name
    page.execute_script("setView(10, 33.33); $('azimuth').value = 20; $('azimuth').dispatchEvent(new Event('input'))")
    assert value(page, "[view.azimuth, view.elevation]") == [20, 33.33]  # its own angle alone
    restored(page, "a=150.4&o=0&h=50.3")  # beyond the trained sides, and it says so
    assert [text_of(page, f"{name}-value") for name in ("azimuth", "elevation")] == ["150.4°", "50.3°"]
    drag(page, page.find_element("id", "view"), 83, 11)
    assert value(page, "[view.azimuth, view.elevation].every(Number.isInteger)")
    assert all(new != old for new, old in zip(seen(), before, strict=True))
    settled(page, lambda: "held-out azimuths" in text_of(page, "ring-text"))
    assert "the capsules are" in text_of(page, "verdict")


# Links.

SIZES = pytest.mark.parametrize("size", [(1280, 720), (390, 664)])  # of a laptop and of a phone
RANDOM_STROKES = """
    const random = () => ((seed = (16807 * seed) % 2147483647) / 2147483647);
    let seed = arguments[0];
    $("clear").click();
    for (const layer of [0, 1]) { // each leaves the canvas now and then
        selectLayer(layer);
        let [x, y] = [60 + 160 * random(), 60 + 160 * random()];
        penDown({ x, y }, "test");
        for (let k = 0; k < 30; k++) penTo({ x: x += 70 * random() - 35, y: y += 70 * random() - 35 });
        penUp();
    }
    updateDigits();
    const all = () => [Array.from(digits.image), Array.from(routed().lengths), digits.cnn, $("answer").textContent];"""


def test_a_link_gives_the_same_image_and_answer(page: Any) -> None:
    for seed in range(100, 120):
        before, after, same = page.execute_script(f"""{RANDOM_STROKES}
            const [before, text] = [all(), stateText()];
            $("clear").click();
            restore(text);
            return [before, all(), text === stateText() && !link.damaged];""", seed)
        assert before == after
        assert same


def test_a_link_holds_every_setting_and_the_section(page: Any) -> None:
    text = page.execute_script("""
        const set = (id, x, type = "input") => { $(id).value = x; $(id).dispatchEvent(new Event(type)); };
        selectLayer(1); penDown({ x: 90, y: 40 }, "test"); penTo({ x: 90, y: 240 }); penUp(); updateDigits();
        set("iterations", 2); set("azimuth", 251); set("elevation", -7); set("plane-iterations", 4);
        $("even").click(); $("fit").click(); chooseCapsule(6); chooseChild(413); $("big").click();
        document.querySelectorAll("input[name=object]")[3].click(); $("how").open = true;
        set("range", "1", "change"); dimensions.offsets[3] = 0.75; updateSliders();
        plane.votes[5] = -1.3; updatePlane(); updateAnswer(); $("em").scrollIntoView();
        return stateText();""")
    settled(page, lambda: page.current_url.endswith(f"#{text}"))
    shown = """[drawing.layer, document.querySelector("input[name=layer]:checked").value, digits.iteration,
        digits.even, $("fit").checked, dimensions.digit, formula.shown, $("type").value, $("range").value,
        $("slider3").value, $("slider-value3").textContent, view.object, view.azimuth, view.elevation, PLANE.iterations,
        plane.votes[5], $("big").checked, sectionInSight(), $("even").checked,
        document.querySelector("input[name=object]:checked").value, DETAILS.filter((id) => $(id).open), stateText()]"""
    expected = [1, "1", 2, True, False, 6, 413, "6", "1", "0.75", "+0.75", 3, 251, -7, 4, -1.3, True, "em", True, "3",
                ["how"], text]
    assert value(page, shown) == expected
    opened(page, PAGE, f"#{text}")
    assert value(page, shown) == expected
    page.refresh()
    started(page)
    assert value(page, shown) == expected
    page.get("about:blank")
    page.back()
    started(page)
    assert value(page, shown) == expected
    chosen = page.execute_script("""
        chooseCapsule(0); chooseChild(0); setView(0, 0); selectObject(0); // a nought is a choice too
        const text = stateText();
        chooseCapsule(5); chooseChild(7); setView(90, 40); selectObject(2);
        restore(text);
        return [dimensions.chosen, dimensions.digit, digits.child, view.object, view.azimuth, view.elevation];""")
    assert chosen == [0] * 6


def test_a_link_holds_angles_and_votes_to_the_last_bit(page: Any) -> None:
    rng = np.random.default_rng(5)
    for angles, votes in zip(rng.uniform((-20, -40), (380, 90), (40, 2)), rng.uniform(-4, 4, (40, 16)), strict=True):
        before, after, is_damaged = page.execute_script("""
            const all = () => [view.azimuth, view.elevation, ...plane.votes];
            setView(...arguments[0]);
            plane.votes = arguments[1].map(hundredths);
            const [before, text] = [all(), stateText()];
            restore("");
            restore(text);
            return [before, all(), link.damaged];""", angles.tolist(), votes.tolist())
        assert (after, is_damaged) == (before, False)


def test_a_link_pasted_into_the_open_page_is_followed_to_where_it_begins(page: Any) -> None:
    # Left at once: an address that the page has written itself would be pasted without an event.
    whole = page.execute_script("showExample(9); const text = stateText(); restore(''); return text")
    for pasted, heading, example in (
        (whole, "digits", 9), ("only=em", "em", 0), ("only=routing,em&hide=cnn,tray", "routing", 0),
        ("x=7", "digits", 6), ("s=em&only=routing", "routing", 0), ("s=numbers&only=digits,em", "digits", 0),
        ("only=em,routing", "routing", 0), ("s=digits&only=viewpoint,routing", "routing", 0),
    ):
        page.execute_script("restore('s=numbers'); scrollTo(0, 1e6); $('copied').hidden = false")
        page.execute_script("location.hash = arguments[0]", pasted)
        top = f"$('{heading}-title').getBoundingClientRect().top"
        until(page, f"0 <= {top} && {top} < innerHeight / 3")
        time.sleep(0.4)  # longer than the page waits before it writes the address
        assert value(page, "drawing.example") == example
        assert not is_shown(page, "copied")  # it speaks of the link before


@pytest.mark.parametrize(
    ("change", "said", "example"),
    [
        (lambda text: text[: len(text) // 2], "damaged or incomplete.", None),
        (lambda text: "v=2", "damaged or incomplete. Its image is missing.", 0),
        (lambda text: text.replace("&x=5", "&d=0A!"), "Its image cannot be read", 0),
        (lambda text: text.replace("v=2", "v=1"), "of another version", 0),
        (lambda text: "x=999&t=99&a=1e9&h=x&p=1,2&k=77", "damaged or incomplete.", 0),
        (lambda text: "only=none", "damaged or incomplete. “only” takes digits, routing, ", 0),
        (lambda text: "hide=none", "damaged or incomplete. “hide” takes tour, answers, cnn, ", 0),
        (lambda text: "viewpiont", "damaged or incomplete.", 0),
        (lambda text: f"={text.split('=', 2)[2]}", "damaged or incomplete.", 4),
        (lambda text: text.partition("&")[2], "damaged or incomplete.", 4),
        (lambda text: text[text.index("&o=") + 1 :], "damaged or incomplete.", 4),
    ],
)
def test_a_damaged_link_says_so_and_stays_until_something_is_done(
    change: Callable[[str], str], said: str, example: int | None, page: Any
) -> None:
    show_as(page, 1280, 720)
    whole = page.execute_script("showExample(4); $('viewpoint').scrollIntoView(); return stateText()")
    assert "&s=viewpoint&" in whole
    opened_text = change(whole)
    assert opened_text != whole
    page.get("about:blank")
    page.get(f"{PAGE.resolve().as_uri()}#{opened_text}")
    started(page)
    assert said in settled(page, lambda: text_of(page, "failure"))
    page.execute_script("""
        const send = (node, event) => node.dispatchEvent(event), bubbles = true;
        const heading = document.querySelector("h2");
        for (const type of ["pointerdown", "pointerup", "scroll"]) send(heading, new Event(type, { bubbles }));
        for (const key of ["Tab", "Alt", "Control"]) send($("clear"), new KeyboardEvent("keydown", { key, bubbles }));
        send(document.body, new KeyboardEvent("keydown", { key: "PageDown", bubbles }));""")
    time.sleep(0.4)
    assert is_shown(page, "failure")
    box = rect_of(page, "#failure")
    assert 0 <= box["top"] < box["bottom"] < 720
    assert page.current_url.endswith(f"#{opened_text}")
    if example is not None:
        assert value(page, "drawing.example") == example
    click(page, "next-example")
    settled(page, lambda: "#v=2&" in page.current_url and not is_shown(page, "failure"))


def test_a_link_that_was_wrapped_quoted_or_encoded_is_whole(page: Any) -> None:
    whole = page.execute_script("showExample(4); return stateText()")
    for space in (" ", "%20", "%0A", "%0D%0A", "%20%20", "%2520"):  # of a mail program, or after commas
        for only in (f"routing,{space}digits&hide=cnn,{space}try", f"rou{space}ting,digits&{space}hide=cnn,try"):
            page.execute_script("restore('x=1'); restore(arguments[0])", f"{whole[:40]}{space}{whole[40:]}&only={only}")
            seen = value(page, "[drawing.example, lesson.only, lesson.hide, link.damaged]")
            assert seen == [4, ["routing", "digits"], ["cnn", "try"], False], (space, only)
    for text in (whole, "x=5", "routing", "hide=cnn"):  # at the end of a sentence
        for end in (".", ",", ";", ":", ")", "!", ").", '"', "”", "'", ">", "%3E", "]", "**", "%20", "&gt;"):
            assert page.execute_script("restore(arguments[0]); return link.damaged", text + end) is False, text + end
    for end in ("”", "’.", "»", "…", "\u200b", "\u00a0"):  # which an address holds encoded
        page.execute_script("location.hash = 'x=1'; location.hash = arguments[0]", whole + end)
        until(page, "drawing.example === 4")
        assert value(page, "[link.damaged, stateText()]") == [False, whole], end
    once = urllib.parse.quote(whole, safe="")
    for encoded in (
        once, whole.replace("&", "&amp;"), whole.replace(",", "%2C"), whole.replace("&", "%26"), f"%23{whole}",
        whole.replace("&", "&#38;"), urllib.parse.quote(once), urllib.parse.quote(whole.replace("&", "&amp;"), safe=""),
    ):
        page.execute_script("restore('x=1'); restore(arguments[0])", encoded)
        assert value(page, "[link.damaged, stateText()]") == [False, whole]


@SIZES
def test_a_link_to_a_section_shows_its_heading_and_what_is_chosen_in_it(size: tuple[int, int], page: Any) -> None:
    show_as(page, *size)
    for k, section in enumerate(value(page, "SECTIONS")):
        if k % 2 == 0:
            page.execute_script("scrollTo(0, 0); restore(arguments[0])", section)
        else:
            opened(page, PAGE, f"#{section}")
        assert value(page, "link.damaged") is False
        assert 0 <= rect_of(page, f"#{section}-title")["top"] < size[1] / 2, section
        assert value(page, "document.activeElement.id") == f"{section}-title"
        assert value(page, "sectionInSight()") == section
    one, two = (",".join("25" if d in moved else "0" for d in range(16)) for moved in ([12], [1, 14]))
    for state, chosen in (
        ("s=digits&k=9", "#bar9"), ("s=routing&i=413", "#couplings"), ("s=routing&k=4", "#walk"),
        ("s=dimensions&k=4", "#picker"), (f"s=dimensions&k=4&n={one}", "#slider12"), ("s=em&r=3", "#plane"),
        ("s=viewpoint&a=250", "#view"), (f"s=dimensions&k=4&n={two}", "#slider1"),
    ):
        page.execute_script("scrollTo(0, 0); restore(arguments[0])", state)
        top, bottom, on_top, heading = page.execute_script("""
            const chosen = document.querySelector(arguments[0]);
            const { left, right, top, bottom } = chosen.getBoundingClientRect();
            const middle = document.elementFromPoint((left + right) / 2, (top + bottom) / 2);
            const heading = chosen.closest("section").querySelector("h2").getBoundingClientRect();
            return [top, bottom, chosen.contains(middle), heading.top];""", chosen)
        assert 0 <= top < bottom <= size[1], (state, top, bottom)
        assert on_top, state
        assert heading >= 0 or chosen in ("#walk", "#slider12", "#slider1"), state  # farther below than one screen
    motion = {"features": [{"name": "prefers-reduced-motion", "value": "no-preference"}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", motion)
    for section in ("routing", "dimensions", "viewpoint"):  # pasted while the page scrolls
        page.execute_script("scrollTo({ top: 0, behavior: 'instant' }); goTo('numbers')")
        settled(page, lambda: value(page, "scrollY") > 0)  # on its way
        page.execute_script("location.hash = arguments[0]", f"s={section}")
        time.sleep(0.4)
        assert 0 <= rect_of(page, f"#{section}-title")["top"] < 30, section


@SIZES
def test_a_copied_link_names_the_section_of_its_button(size: tuple[int, int], page: Any) -> None:
    show_as(page, *size)
    page.execute_script("navigator.clipboard.writeText = async (text) => { window.copiedText = text; }")
    for section in value(page, "SECTIONS"):
        button = page.find_element("css selector", f"#{section} .copy")
        page.execute_script("arguments[0].scrollIntoView({ block: 'end' })", button)  # below all others in sight
        drawn(page)
        place = button.location
        button.click()
        settled(page, lambda: text_of(page, "copied").startswith("Copied."))
        assert f"&s={section}&" in value(page, "copiedText")
        assert f"the section “{text_of(page, f'{section}-title')}”" in text_of(page, "copied")
        assert rect_of(page, "#copied")["bottom"] == pytest.approx(size[1], abs=1)
        time.sleep(0.4)  # longer than the page waits before it writes the address
        assert page.current_url == value(page, "copiedText")
        page.execute_script("dispatchEvent(new Event('pointerdown'))")
        assert not is_shown(page, "copied")
        assert button.location == place  # nothing under the pen has moved
    goes = page.execute_async_script("""
        const done = arguments[0];
        const own = window.setTimeout;
        window.setTimeout = (call, ms) => own(call, ms / 20);
        copyLink("em").then(() => own(() => done($("copied").hidden), SAID / 10))
            .finally(() => { window.setTimeout = own; });""")
    assert goes  # by itself


# A lesson's link, and the tour.


def sections_shown(page: Any) -> list[str]:
    return value(page, "SECTIONS.filter((id) => $(id).offsetHeight > 100)")


def tour_texts(page: Any) -> list[str]:
    """Of every step, in a tour from its beginning to its end."""
    texts = []
    click(page, "start-tour")
    while is_shown(page, "tour"):
        texts.append(text_of(page, "tour-text"))
        page.execute_script("$('tour-next').click()")  # as by a key: two clicks at once count once
    return texts


def test_a_lesson_shows_what_its_link_asks_for(page: Any) -> None:
    restored(page, "only=digits,routing&hide=cnn,tray&x=7")
    assert sections_shown(page) == ["digits", "routing"]
    hidden = page.find_elements("css selector", "#cnn-answer, .bar .thin, #tray, nav a[href='#em']")
    assert not any(e.is_displayed() for e in hidden)
    assert all(is_shown(page, name) for name in ("answer", "draw", "recon0", "iterations"))
    assert value(page, "drawing.example") == 6
    link = value(page, "stateText()")
    assert "only=digits,routing&hide=cnn,tray" in link
    restored(page, f"{link}&only=em")  # a copied link, to which a teacher adds
    assert sections_shown(page) == ["em"]
    assert value(page, "[link.damaged, $('failure').hidden]") == [False, True]
    click(page, "start-tour")
    assert sections_shown(page) == value(page, "SECTIONS")
    click(page, "tour-end")
    assert sections_shown(page) == ["em"]
    for only, is_link in (("digits", False), ("digits,dimensions", True)):
        restored(page, f"only={only}&w=why")
        text = page.find_elements("css selector", "#why a")[1]  # "sixteen numbers"
        assert text.is_displayed()
        assert bool(text.get_attribute("href")) == is_link
    seen = page.execute_script("""
        $("clear").click(); penDown({ x: 90, y: 40 }, "test"); penTo({ x: 90, y: 240 }); penUp();
        const text = stateText();
        restore(`${text}&x=7`); // a number that is added to the link of a drawing
        const { example } = drawing;
        restore(text.replaceAll(",", "%2C")); // commas as some programs send them
        const own = [example, drawing.strokes.length, link.damaged];
        restore(`x=7&m=01&x=8`);
        return [...own, drawing.kept];""")
    assert seen == [6, 1, False, [True, True]]


def test_a_lesson_without_the_cnn_does_not_name_it(page: Any) -> None:
    restored(page, "hide=cnn&w=why")
    settled(page, lambda: "held-out azimuths" in text_of(page, "ring-count"))
    page.execute_script("setView(20, 60)")
    settled(page, lambda: text_of(page, "verdict").startswith("A side that they were not trained on."))
    words = value(page, "['digits', 'viewpoint'].map((id) => $(id).innerText.split('Try this')[0]).join()")
    assert "CNN" not in words + page.find_element("id", "accuracy").text
    assert "inner ring" not in words
    assert not any(e.is_displayed() for e in page.find_elements("css selector", "#ring [data-model=cnn]"))
    assert not page.find_elements("css selector", ".bar[aria-label*=CNN]")
    assert not [text for text in tour_texts(page) if "CNN" in text or "network classifies" in text]
    restored(page, "hide=tray")
    assert "Where the two differ" not in tour_texts(page)[3]


def test_a_lesson_without_answers_tells_none(page: Any) -> None:
    """In no part but the bars and the reconstructions, which have names of their own."""
    page.execute_script("$('say').textContent = ''; setView(20, 30)")
    until(page, "'verdict' in telling.unsaid")
    restored(page, "x=26&hide=answers,bars,reconstructions&w=why")
    labels = value(page, "about.digits.labels[25]")
    parts = "#digits p:not(#naming), figcaption, #tray button, #coupling-text, #lengths"
    seen = each(page, parts, "e.getClientRects().length && `${e.textContent} ${e.getAttribute('aria-label') ?? ''}`")
    assert any(seen)
    told = rf"(made of|Digit|a|an|to) ({labels[0]}|{labels[1]})\b(?!\.)"
    assert not [text for text in seen if text and re.search(told, text)]
    assert "Routed, iteration" not in page.find_element("tag name", "main").text
    restored(page, "x=26&hide=answers")
    page.execute_script("setView(30, 60)")
    assert not page.find_elements("css selector", ".bar.first, .bar.second, #lengths text[x='400']")
    captions = page.find_element("id", "recons")
    assert captions.text.split("\n") == ["redrawn by a capsule"] * 2
    names = [e.get_attribute("aria-label") for e in captions.find_elements("tag name", "canvas")]
    assert names == ["A reconstruction"] * 2
    assert not is_shown(page, "ring")
    assert value(page, "$('walk-digit').value") == "0"
    time.sleep(1)
    assert text_of(page, "say") == ""  # nor what was to be said before
    restored(page, "hide=answers&d=")  # nothing is drawn: the tour shows an image
    assert tour_texts(page)[0].startswith("1 of 4. From sixteen numbers")
    restored(page, "hide=answers&d=")
    click(page, "start-tour")
    page.execute_script("$('tour-next').click()")
    drawn(page)
    assert text_of(page, "tour-text").startswith("1 of 4. One each here")
    assert value(page, "digits.found.length") == 2
    click(page, "tour-end")


@pytest.mark.parametrize(
    ("size", "big"),
    [((1280, 720), 0), ((1280, 720), 1), ((1366, 650), 0), ((390, 664), 0), ((390, 664), 1), ((1920, 1080), 0)],
)
def test_the_tour_asks_and_shows(size: tuple[int, int], big: int, page: Any) -> None:
    """It covers nothing that it speaks of, and shows no answer before its question is answered."""
    from selenium.webdriver.common.keys import Keys

    show_as(page, *size)
    restored(page, f"big={big}&t=1&e=1")
    page.execute_script("scrollTo(0, 0)")
    click(page, "start-tour")
    spoken_of = [
        ["draw"], ["bars", "answer"], ["recon0", "recon1", "next-example"], ["iterations", "lengths"], [".toured"],
        ["plane", "plane-iterations"], ["view"],
    ]
    answers = {11: ["plane-text"], 13: ["ring", "verdict", "answer-cnn"]}
    next_stops = ["draw", "bar0", "next-example", "iterations", "slider", "plane-iterations", "view"]
    n, texts = len(spoken_of), ""
    for step in range(2 * n):
        drawn(page)
        text = text_of(page, "tour-text")
        texts += text
        assert text.startswith(f"{step // 2 + 1} of {n}. ")
        assert ("?" in text) == (step % 2 == 0)
        if step < 5:  # as the capsules do, in an image that is routed as in training
            assert re.fullmatch("Capsules: .*Both are right.", text_of(page, "answer"))
        parts = answers.get(step, spoken_of[step // 2])
        if step == 1 and size[0] > 600 and not big:
            parts = [*parts, "answer", "bars", "recons"]
        for part in parts:
            covered, cut = page.execute_script("""
                const rect = (e) => document.querySelector(e).getBoundingClientRect();
                const [part, box] = [rect(arguments[0]), rect("#tour")];
                const both = (low, high) => Math.min(part[high], box[high]) - Math.max(part[low], box[low]);
                const cut = Math.max(-part.top, part.bottom - innerHeight);
                return [Math.min(both("left", "right"), both("top", "bottom")), cut];""",
                part if part == ".toured" else f"#{part}")
            assert max(covered, cut) <= 1, (step, part, covered, cut)
        box, buttons = rect_of(page, "#tour"), page.find_elements("css selector", "#tour button")
        assert box["bottom"] <= size[1]
        assert min(button.size["height"] for button in buttons) >= 36
        assert is_shown(page, "tray") == (step > 2)  # which has the image of the tour, its two digits and who is right
        assert ("CNN" in page.find_element("id", "bar0").get_attribute("aria-label")) == (step > 2)
        wrong = page.execute_script("""
            const of = (first) => TOUR.slice(first).flatMap((step) => step.hidden ?? []).join() || "none";
            const isShown = (e) => e.checkVisibility({ checkVisibilityCSS: true });
            const [now, next] = [arguments[0] >> 1, (arguments[0] + 1) >> 1];
            return [...document.querySelectorAll(of(now))].filter((e) => isShown(e) === e.matches(of(next)))
                .map((e) => e.id || e.className);""", step)
        assert wrong == [], step  # asked before it is shown, in no earlier step either
        page.find_element("id", "tour-end").send_keys(Keys.TAB)
        assert value(page, "document.activeElement.id").startswith(next_stops[step // 2])
        if step == 4:  # back to a question and on again hides what it hid
            page.execute_script("$('tour-back').click(); $('tour-back').click(); $('tour-next').click()")
            assert not page.find_elements("css selector", "#answer.asked, .bar.asked")  # but what the next ones ask
            page.execute_script("$('tour-next').click(); $('tour-next').click(); $('tour-next').click()")
        if step == 9:  # the number that it asks about moves
            until(page, "$('after').toDataURL() !== arguments[0]", value(page, "$('before').toDataURL()"))
            first = page.find_element("css selector", "#sliders input").get_attribute("id")
            assert value(page, "`slider${dimensions.playing.d}`") == first
        page.execute_script("$('tour-next').click()")
    for word in ("capsule", "redraw", "CNN", "EM"):
        assert word in texts
    assert not is_shown(page, "tour")
    assert value(page, "[digits.iteration, digits.even, dimensions.playing]") == [1, True, None]


def test_the_tour_gives_everything_back(page: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    show_as(page, 1280, 720)
    restored(page, "d=0IIIISIII&t=4&r=5&k=3")
    page.execute_script("scrollTo(0, 0)")
    pen(page, [(50, 40), (50, 100)])
    before, n_past = value(page, "[stateText(), drawing.past.length]")
    click(page, "start-tour")
    ActionChains(page).double_click(page.find_element("id", "tour-next")).perform()  # is meant once
    assert text_of(page, "tour-next") == "Next"
    time.sleep(0.6)
    click(page, "tour-next")
    assert text_of(page, "tour-text").startswith("2 of ")
    assert page.execute_script("""
        const event = new KeyboardEvent("keydown", { key: "Enter", repeat: true, bubbles: true, cancelable: true });
        $("tour-next").dispatchEvent(event);
        return event.defaultPrevented;""")  # a key that is held, too
    for end in ("$('tour-end').click()", "dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape' }))"):
        page.execute_script(f"{end}; document.activeElement.click()")  # a key that is pressed twice does not begin anew
        assert not is_shown(page, "tour")
        assert value(page, "document.activeElement.id") == "start-tour"
        settled(page, lambda: value(page, "[stateText(), drawing.past.length]") == [before, n_past])
        click(page, "start-tour")
    # A link that is pasted in its midst is followed.
    page.execute_script("navigator.clipboard.writeText = async () => { throw new Error(); }; copyLink('digits')")
    settled(page, lambda: "address is that of before the tour" in text_of(page, "copied"))
    page.execute_script("location.hash = 's=em&x=9'")
    until(page, "drawing.example === 8")
    assert not is_shown(page, "tour")
    assert not page.find_elements("css selector", ".asked, .toured")
    restored(page, before)
    click(page, "start-tour")  # and a reload in its midst loses nothing
    page.execute_script("$('tour-next').click(); dispatchEvent(new Event('scroll'))")
    time.sleep(0.4)
    page.refresh()
    started(page)
    settled(page, lambda: value(page, "stateText()") == before)


# On every screen, on paper, without a mouse, without colours.


def test_no_sideways_scrolling_and_room_for_large_type(page: Any) -> None:
    for width, height in ((1280, 720), *((width, 600) for width in (1060, 1000, 900, 800, 770, 640)), (390, 664)):
        for big in (0, 1):
            show_as(page, width, height)
            page.execute_script("restore(`big=${arguments[0]}`)", big)
            assert value(page, "document.documentElement.scrollWidth") <= width, (width, big)
            if width in (1280, 390) and not big:
                edges = each(page, "body *", "(({ left, right }) => [left, right])(e.getBoundingClientRect())")
                assert np.min(edges) >= 0, width
                assert np.max(edges) <= width, width
            over = "e.scrollWidth - e.clientWidth"
            assert width == 390 or each(page, ".scroll:has(#assignments)", over)[0] <= 0, (width, big)
            if big and width >= 800:
                assert max(each(page, "#viewpoint .small-bar", over)) <= 0, width
                assert min(each(page, "#viewpoint .small-bar > :nth-child(2)", "e.clientWidth")) >= 48, width
            if big and width == 390:
                assert min(each(page, "#recons canvas", "e.clientWidth")) >= 48


@pytest.mark.parametrize("size", [(1280, 720), (1366, 650), (768, 1024), (390, 664)])
def test_one_screen_has_what_belongs_together(size: tuple[int, int], page: Any) -> None:
    """The pen, both answers and both reconstructions; on a phone the object and its answers too."""
    box = "((box) => [box.left, box.top, box.right, box.bottom])(e.getBoundingClientRect())"
    show_as(page, *size)
    page.execute_script("scrollTo(0, 0)")
    parts = "#draw, #undo, #next-example, #answer, #cnn-answer, #bars, #recon0-text, #recon1-text"
    for example in range(0, value(page, "about.digits.labels.length"), 4):
        page.execute_script("showExample(arguments[0]); updateDigits()", example)
        boxes = np.array(each(page, parts, box))
        assert (boxes >= 0).all()
        assert (boxes[:, 2:] <= size).all(), (example, boxes)
        assert boxes[:, 3].max() > 300
    if size[0] == 390:
        show_as(page, 390, 844)
        page.execute_script("scrollBy(0, $('view').getBoundingClientRect().top - 2)")
        boxes = np.array(each(page, "#view, #answer-capsules, #answer-cnn, #verdict, #ring", box))
        assert (boxes[:, 2:] - boxes[:, :2] >= (100, 24)).all()  # pixels, enough for a finger
        assert (boxes >= 0).all()
        assert (boxes[:, 2:] <= (390, 844)).all()


def test_one_announcement_after_a_stroke(page: Any) -> None:
    click(page, "clear")
    time.sleep(1)
    page.execute_script("""
        window.changes = [];
        window.observer = new MutationObserver((list) => changes.push(...list.map(({ target }) => target.textContent)));
        for (const e of document.querySelectorAll("[role=status], [role=alert], [role=log], [aria-live], output")) {
            if (e.tagName !== "OUTPUT" || getComputedStyle(e).display !== "none") {
                observer.observe(e, { childList: true, characterData: true, subtree: true });
            }
        }""")
    animation.draw_line(page, "draw", animation.SEVEN)
    time.sleep(1.5)
    said = page.execute_script("observer.disconnect(); return changes")
    assert said == [f"{text_of(page, 'answer')} {text_of(page, 'cnn-answer')}"]
    dot = "penDown({ x: 144, y: 150 }, 'test'); penTo({ x: 148, y: 170 }); penUp()"
    link = "copyLink('digits')"
    for act, words in (  # an answer of the same words, and a second link, are said too
        (dot, "Capsules: "), ("$('undo').click()", "Capsules: "), (link, "The link holds your drawing"),
        (link, "The link holds your drawing"), (f"$('clear').click(); {link}", "The link holds an empty canvas, every"),
        (f"$('next-example').click(); {link}", "The link holds this test image"),
    ):
        page.execute_script(f"$('say').textContent = ''; updateDigits(); {act}; updateDigits()")
        until(page, "$('say').textContent.includes(arguments[0])", words)
    assert text_of(page, "say").startswith("Capsules: ")  # what else is to be said


def colours(page: Any) -> dict[str, Array]:
    """Custom properties of the style sheet -> sRGB in [0, 1]."""
    found = page.execute_script("""
        const probe = document.querySelector("#ring").appendChild(document.createElementNS(SVG, "path"));
        const names = ["card", "track", "fill", "edge", "soft", "text", "accent", "first", "second", "capsules",
                       "third", "cnn"];
        const read = (name, at) => {
            at.append(probe);
            probe.style.fill = `var(--${name})`;
            return getComputedStyle(probe).fill;
        };
        const all = Object.fromEntries(names.map((name) => [name, read(name, $("lengths"))]));
        all.viewpointCnn = read("cnn", $("ring"));
        probe.remove();
        return all;""")
    return {name: np.array([int(x) for x in re.findall(r"\d+", rgb)]) / 255 for name, rgb in found.items()}


def contrast(a: Array, b: Array) -> float:
    """[WCAG 2.1, contrast ratio and relative luminance]"""
    linear = [np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4) for rgb in (a, b)]
    low, high = sorted(float(rgb @ [0.2126, 0.7152, 0.0722]) for rgb in linear)
    return (high + 0.05) / (low + 0.05)


def emulated(page: Any, media: str = "", **wishes: str) -> None:
    features = [{"name": name.replace("_", "-"), "value": wish} for name, wish in wishes.items()]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})


@pytest.mark.parametrize("dark", [False, True])
def test_colours_are_seen_and_differ_in_grey(dark: bool, page: Any) -> None:
    show_as(page, 1280, 900, dark)
    of = colours(page)
    assert (of["card"].max() < 0.5) == dark
    least_of: dict[float, list[tuple[str, str]]] = {
        3: [("edge", "card"), ("third", "card"), *((name, ground) for ground in ("card", "track")
            for name in ("fill", "first", "second", "capsules", "cnn", "viewpointCnn"))],
        4.5: [(name, "card") for name in ("text", "soft", "accent")],
        1.5: [("first", "second"), ("capsules", "cnn"), ("capsules", "viewpointCnn")],
        1.8: [("capsules", "third")],  # the parents in the plane
    }
    for least, pairs in least_of.items():
        for pair in pairs:
            assert contrast(*(of[name] for name in pair)) >= least, pair
    named = ".first .track:first-child i, .second .track:first-child i, .thin i, .best i"
    look = f"[e.matches('{named}'), getComputedStyle(e).backgroundColor, getComputedStyle(e).boxShadow]"
    for is_named, colour, shadow in each(page, ".bar .track i, .small-bar .track i", look):
        assert (colour != "rgba(0, 0, 0, 0)") == (shadow == "none") == is_named  # the others are hollow
    ink = np.array(value(page, "COLOURS")) / 255
    assert min(contrast(colour, np.zeros(3)) for colour in ink) >= 3
    assert contrast(*ink) >= 1.5
    under, dots = page.execute_script("""
        const { side, kernel } = about.digits.config, { width } = $("couplings");
        const copy = element("canvas", { width, height: width }).getContext("2d", { willReadFrequently: true });
        copy.drawImage($("couplings"), 0, 0);
        const { data } = copy.getImageData(0, 0, width, width);
        const at = (k) => Math.round((kernel - 0.5 + 2 * k) * width / SIDE);
        const dot = (row, column) => [...data.slice(4 * (at(row) * width + at(column))).slice(0, 3)];
        return [UNDER, Array.from({ length: side ** 2 }, (_, k) => dot(Math.floor(k / side), k % side))];""")
    assert min(contrast(np.array(dot) / 255, np.array(under) / 255) for dot in dots) >= 3
    assert len({*map(tuple, dots)}) > 20  # grey and both colours


def test_bars_are_seen_in_forced_colours_and_on_paper(page: Any) -> None:
    emulated(page, forced_colors="active")
    parts = (".bar .track", ".bar .track i", ".swatch.cnn")
    assert len({each(page, part, "getComputedStyle(e).backgroundColor")[0] for part in parts}) == 3
    for scheme in ("dark", "light"):
        for media, forced in (("screen", "active"), ("print", "none")):
            emulated(page, media, forced_colors=forced, prefers_color_scheme=scheme)
            of = colours(page)
            for name in ("fill", "first", "second", "cnn", "viewpointCnn"):
                assert contrast(of[name], of["track"]) >= 3, (scheme, media, name)
            for name in ("capsules", "third", "accent", "edge", "viewpointCnn") if forced == "active" else ():
                assert contrast(of[name], np.ones(3)) >= 3, name  # pictures stand on white, in a dark scheme too


def test_a_print_has_two_pages_and_a_lesson_of_one_section_one(page: Any) -> None:
    for lesson, n_pages in (("", 2), ("w=why,how", 2), ("only=digits", 1), ("only=routing", 1)):
        restored(page, lesson)
        for sides in ((8.27, 11.69), (8.5, 11), (11.69, 8.27), (11, 8.5)):  # A4 and Letter
            paper = dict(zip(("paperWidth", "paperHeight"), sides, strict=True))
            pdf = base64.b64decode(page.execute_cdp_cmd("Page.printToPDF", paper)["data"])
            assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == n_pages, (lesson, sides)
    emulated(page, "print")
    for name in value(page, "SECTIONS"):
        page.execute_script("restore(arguments[0])", f"only={name}")
        assert sections_shown(page) == [name]
    assert {*each(page, ".desk, .together, .card", "getComputedStyle(e).breakInside")} == {"avoid"}
    assert {*each(page, ".segment input:checked + span", "getComputedStyle(e).printColorAdjust")} == {"exact"}
    for details in ("", "w=why"):
        page.execute_script("restore(arguments[0])", details)
        assert is_shown(page, "why-text") == bool(details)


def test_every_control_has_a_name_and_takes_the_keyboard(page: Any) -> None:
    unnamed = page.execute_script("""
        const named = (e) => e.getAttribute("aria-label") || e.getAttribute("aria-labelledby")
            || [...(e.labels ?? [])].some((label) => label.textContent.trim()) || e.textContent.trim();
        return [...document.querySelectorAll("input, button, select, canvas, svg")]
            .filter((e) => !e.hasAttribute("aria-hidden") && !named(e)).map((e) => e.outerHTML.slice(0, 80));""")
    assert unnamed == []
    tables = each(page, "table", "e.ariaLabel")
    assert len(tables) == len({*tables} - {None, ""}) == 4
    controls = "input, button:not(#tour-back), select, #draw, #view, #couplings, .handle"
    assert not any(each(page, controls, "e.tabIndex < 0 || e.disabled"))
    for width in (1280, 390):  # what is seen first is tabbed to first
        show_as(page, width, 844)
        assert {*each(page, "body *", "getComputedStyle(e).order")} == {"0"}
        assert max(each(page, "body *", "e.tabIndex")) == 0
    for digit in (3, 8):
        page.execute_script("chooseCapsule(arguments[0])", digit)
        tops = each(page, "#sliders input", "e.getBoundingClientRect().top")
        assert tops == sorted(tops)
        sizes = [abs(numbers(effect)[0]) for effect in each(page, "#sliders small", "e.textContent")]
        assert sizes == sorted(sizes, reverse=True)


def test_no_sentence_has_more_than_thirty_words(page: Any) -> None:
    page.execute_script("chooseCapsule(2)")
    pen(page, [(144, 144), (150, 200)])
    blocks = page.execute_script("""
        return [...TOUR.flatMap(({ question, answer }) => [question, answer.call ? answer() : answer]),
            ...[...document.querySelectorAll("p, figcaption, li, summary, h2, h3")]
                .filter((e) => e.id !== "plane-equation").map((e) => e.textContent)];""")
    sentences = [sentence.split() for block in blocks for sentence in re.split(r"(?<=[.?!:])\s+", block)]
    assert len(sentences) > 100
    assert [" ".join(words) for words in sentences if len(words) > 30] == []


# In other places.


def test_a_page_that_is_still_loading_says_so(page: Any, tmp_path: Path) -> None:
    half, cut = tmp_path / "half.html", tmp_path / "cut.html"
    cut.write_bytes(content := PAGE.read_bytes()[:2_000_000])
    loads = b"<script>Object.defineProperty(document, 'readyState', { get: () => 'loading' });</script>"
    half.write_bytes(content.replace(b"<body>", b"<body>" + loads, 1))
    page.get(cut.as_uri())
    settled(page, lambda: "The page is not whole" in text_of(page, "loading"))
    page.get(half.as_uri())
    size = len(embedded(PAGE.read_text(encoding="utf-8"), "weights")) / 1e6
    settled(page, lambda: re.search(rf"loading, {size:.1f} megabytes, 1.\d are here", text_of(page, "loading")))
    assert is_shown(page, "loading")
    page.get(f"{half.as_uri()}#x=5&only=digits,routing")
    page.find_element("css selector", "nav a[href='#routing']").click()
    assert page.current_url.endswith("#x=5&only=digits,routing")
    opened(page, PAGE)
    assert not is_shown(page, "loading")


def test_a_gif_of_the_page(page: Any) -> None:
    frames = animation.record(page, strokes=1, steps=1)
    assert {frame.shape for frame in frames} == {(animation.HEIGHT, animation.WIDTH, 3)}
    as_first = [bool((frame == frames[0]).all()) for frame in frames]  # the whole drawing, which stays for a second
    assert not as_first[1]
    assert not as_first[-1]
    assert sum(as_first) > 6
    assert "capsules are right" in text_of(page, "verdict")  # on a held-out view, at the end


def test_a_static_host_serves_the_folder(page: Any, tmp_path: Path) -> None:
    """As .github/workflows/pages.yml makes it, and as a copy of the repository has it."""
    site = tmp_path / "site"
    workflow = (ROOT / ".github/workflows/pages.yml").read_text()
    commands = re.search(r"run: \|\n((?: {10}.*\n)+)", workflow)
    assert commands
    script = commands[1].replace("_site", str(site))
    for name, text in (
        ("steps.pages.outputs.base_url", "http://127.0.0.1"), ("github.server_url", "http://127.0.0.2"),
        ("github.repository", "some/one"),
    ):
        script = script.replace(f"${{{{ {name} }}}}", text)
    assert "${{" not in script
    subprocess.run(["bash", "-euc", script], cwd=ROOT, check=True)
    assert sorted(path.name for path in (site / "explorer").iterdir()) == ["index.html", "preview.png"]
    published = (site / "explorer/index.html").read_text()
    assert 'content="http://127.0.0.1/explorer/preview.png"' in published[:3000]
    assert '<meta name="description" content="Draw two digits' in published[:3000]
    pages = re.findall(r'href="(?!#|data:,|https:)([^"$]*)"', published)
    assert pages == [f"http://127.0.0.2/some/one/blob/main/{p}" for p in ("README.md", "docs/how_capsules_work.md")]
    for folder in (site, ROOT):
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            page.get(f"http://127.0.0.1:{server.server_port}/explorer/#x=5")
            started(page)
            assert value(page, "drawing.example") == 4
            page.get("about:blank")
            server.shutdown()


@contextlib.contextmanager
def headless_firefox() -> Iterator[Any]:
    """A selenium driver of an empty Firefox, in which no host name resolves. Raises NoBrowserError."""
    browser, driver_path = first_program(("firefox", "firefox-esr")), first_program(("geckodriver",))
    webdriver = imported_selenium()
    options = webdriver.FirefoxOptions()
    options.binary_location = browser
    options.enable_bidi = True  # its console is read that way
    for argument in ("-headless", "--width=1280", "--height=900"):
        options.add_argument(argument)
    options.set_preference("network.dns.disabled", True)
    firefox = webdriver.Firefox(options=options, service=webdriver.FirefoxService(driver_path))
    try:
        firefox.set_script_timeout(120)
        yield firefox
    finally:
        firefox.quit()


def test_firefox_gives_the_same_answers(page: Any, committed: tuple[str, Any, Any]) -> None:
    script = f"""
        {RANDOM_STROKES}
        const [before, text] = [all(), stateText()];
        restore(text);
        return [before, all(), stateText() === text];"""
    noise: list[str] = []  # of Firefox's console: what the page writes there, and errors
    expected = asked(page, script, 100)[0]
    try:
        with headless_firefox() as firefox:
            firefox.script.add_console_message_handler(lambda entry: noise.append(entry.text))
            firefox.script.add_javascript_error_handler(lambda entry: noise.append(entry.text))
            opened(firefox, PAGE)
            firefox.execute_script("getSelection().selectAllChildren(document.body)")
            firefox.find_elements("name", "layer")[1].click()
            animation.draw_line(firefox, "draw", animation.SEVEN)
            found = answers_to_the_image(firefox, committed)
            settled(firefox, lambda: "&d=1" in firefox.current_url)
            firefox.refresh()
            started(firefox)
            assert answers_to_the_image(firefox, committed) == found
            assert asked(firefox, "return drawing.layer") == 1
            assert firefox.find_elements("name", "layer")[1].is_selected()
            before, after, same = asked(firefox, script, 100)
            for button in firefox.find_elements("css selector", "button:not(#csv)"):  # every one, its tour too
                firefox.execute_script("arguments[0].click()", button)
            firefox.execute_script("setTimeout(() => { console.warn('a word'); unknown(); })")
            settled(firefox, lambda: len(noise) >= 2)
    except NoBrowserError as error:
        pytest.skip(f"no test in Firefox: {error}")
    assert before == after
    assert same
    assert noise == ["a word", "ReferenceError: unknown is not defined"]  # the test's own
    # Two browsers smooth the edges of a stroke a little differently.
    np.testing.assert_allclose(before[0], expected[0], atol=0.1)
    np.testing.assert_allclose(before[1], expected[1], atol=0.05)


def test_nothing_leaves_the_page_and_the_console_is_silent(page: Any) -> None:
    """In all tests above."""
    events = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    served = [url.partition("#")[0] for url in urls if url.startswith("http:")]
    paths = {re.sub(r"http://127.0.0.1:\d+", "", url) for url in served}
    assert paths <= {"/explorer/", "/explorer.html"}  # those that test_a_static_host_serves_the_folder asks for
    assert [url for url in urls if not url.startswith(("file:", "data:", "blob:", "http://127.0.0.1:"))] == []
    files = {url.partition("#")[0].rpartition("/")[2] for url in urls if url.startswith("file:")}
    assert files <= {PAGE.name, MEASURED, "half.html", "cut.html"}
    assert page.get_log("browser") == []
