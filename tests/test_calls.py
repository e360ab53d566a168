"""What calls a function that is tested elsewhere, with what, and constants that no number shows."""

# ruff: noqa: F401, F811 - fixtures of other files
from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import imageio.v3 as imageio
import numpy as np
import pytest

import compare_seeds
import multimnist_capsnet as digits
import smallnorb_novel_viewpoint as views
from compare_seeds import Job
from data import files, toy_norb as toys
from evidence import claims, earlier, search, visualize_claims
from explorer import make_explorer as explorer, make_explorer_gif as animation
from figure_checks import held, legend_of
from helpers import EXPERIMENTS, MNIST, digits_folder, failure, load, needs_mnist, write_folder
from more import attacks, capsule_attacks as m, conv_matrix_capsules as conv, visualize_networks as networks
from more import your_own_images as own
from smallnorb_novel_viewpoint import settings_of, text_of
from support import figures, results, statistics, tables
from support.statistics import t_quantile
from test_claims import document_of_seeds, registered
from test_compare_seeds import fake
from test_contract import SCRIPTS
from test_explorer import _few_capsules, checkpoints, embedded
from test_report import README, faults, git, made, page, run
from test_toy_norb import few_toys, few_views, small_cache
from test_your_own_images import train

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def test_numbers_of_sentences_that_are_nowhere_else_are_faults(page: Path, capsys: Capture) -> None:
    page.write_text(page.read_text() + "\nAn accuracy of 0.987, ahead by 1.5 points (1.0 to 2.0).\n")
    assert faults(capsys) == ["README.md: 0.987 is in no table of the page",
                              "README.md: 1.5 points (1.0 to 2.0) is the interval of no comparison"]


def test_what_rewrites_the_pages_is_named_where_that_helps(page: Path, capsys: Capture) -> None:
    for text, helps in ((page.read_text() + "\n0.987", False), (README, True)):
        page.write_text(text)
        assert run("--check") == 1
        assert ("; python -m evidence.report rewrites the pages" in capsys.readouterr().err) == helps


@pytest.mark.parametrize(("network", "condition"), [("dense", None), ("dense", "attacks"), ("convolutional", None),
                                                    ("capsnet", None)])
def test_each_seed_is_a_training_of_its_own(network: str, condition: str | None) -> None:
    config = search.Config(network=network, condition=condition)
    assert [search.training_of(config, (0.01, 1, 4), seed)[1].seed for seed in (100, 149)] == [100, 149]


@needs_mnist
def test_the_checksums_are_those_of_the_published_files() -> None:
    found = {stem: hashlib.sha256((MNIST / f"{stem}.gz").read_bytes()).hexdigest() for stem in digits.MNIST_SHA256}
    assert found == digits.MNIST_SHA256


def test_the_registered_picture_has_the_intervals_of_its_own_level() -> None:
    differences = 0.1 + 0.02 * np.sin(np.arange(12))
    (one,) = claims.make_registered([registered(12)], {"f.json": document_of_seeds(12, 0.1)}.get)
    fig = visualize_claims.draw_verdicts({"registered": [one], "n_comparisons": claims.N_COMPARISONS, "n_looks": 99})
    half = t_quantile(12) * differences.std(ddof=1) / np.sqrt(12)
    plain = held(fig.axes[1])["lines"]["plain x"][0]
    np.testing.assert_allclose(plain, 100 * (differences.mean() + np.array([-half, half])))
    assert f"adjusted for {claims.N_COMPARISONS} comparisons: gives the verdict" in legend_of(fig)


def test_a_study_of_mnist_is_not_shown_of_other_digits(checkpoints: tuple[Path, Path], monkeypatch: Patch) -> None:
    monkeypatch.setattr(explorer, "study", lambda *_: "of MNIST")
    config, states = explorer.load_checkpoint(digits, checkpoints[0])
    data = digits.make_data(dataclasses.replace(config, n_val=None))
    for name, shown in (("custom", None), ("mnist", "of MNIST")):
        assert explorer.digits_part(config, states, data._replace(name=name), 1).about["study"] == shown


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
    for loader in ("load_viewpoint", "load_digits"):
        monkeypatch.setattr(explorer, loader, lambda *_: explorer.Part({"accuracies": [row]}, {}))
    assert explorer.main([f"--out={tmp_path / 'page.html'}"]) == 0
    words = capsys.readouterr().out.splitlines()[0].split()
    assert words == ["capsules", "held_out_accuracy", "0.7500,", "rounded", "0.7000"]


def test_a_page_names_the_commit_of_its_text_style_and_scripts(monkeypatch: Patch) -> None:
    monkeypatch.setattr(explorer, "git_commit", lambda *others: [*others])
    assert json.loads(embedded(explorer.page_of({}, "").decode(), "about"))["pageCommit"] == ["explorer/page"]


def test_a_commit_is_dirty_where_another_named_file_has_changed(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    git("init")
    Path("page").mkdir()
    Path("page/a.js").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    Path("page/a.js").write_text("2")
    results.git_commit.cache_clear()
    assert [results.git_commit(*others) == git("rev-parse", "HEAD") for others in ((), ("page",))] == [True, False]
    results.git_commit.cache_clear()


def test_another_version_of_the_file_draws_its_own_toys(small_cache: Path, monkeypatch: Patch) -> None:
    folder, other = toys.cached_toys(small_cache, 0), small_cache / "other" / "toy_norb.py"
    other.parent.mkdir()
    other.write_bytes(Path(toys.__file__).read_bytes() + b"#")
    monkeypatch.setattr(toys, "__file__", str(other))
    assert toys.cached_toys(small_cache, 0) != folder


def test_the_capsnet_has_the_settings_of_its_own_script() -> None:
    config = m.Config(dataset="mnist", network="capsnet", n_train=64, n_epochs=3, seed=5)
    assert m.capsnet_config(config) == m.affine.Config(dataset="mnist", n_train=64, n_epochs=3, seed=5)


def test_digits_that_are_attacked_are_test_digits(monkeypatch: Patch) -> None:
    config = m.Config(dataset="mnist", data_dir=digits_folder(), network="capsnet", n_train=64, n_attack=5)
    few = dataclasses.replace(m.capsnet_config(config), n_val=8)
    monkeypatch.setattr(m, "capsnet_config", lambda config, data=None: few)
    data: Any = m.make_data(config)
    images, labels = m.attacked_images(config, data)
    chosen = np.linspace(0, 299, 5).round().astype(int)
    np.testing.assert_allclose(images[..., 0], data.test_images[chosen] / 255, atol=1e-6)
    assert labels.tolist() == data.test_labels[chosen].tolist()


def test_an_animation_may_replace_the_picture_of_a_page(monkeypatch: Patch) -> None:
    monkeypatch.setattr(figures, "write_if_changed", write := Mock(return_value=""))

    def scene() -> Any:
        return figures.make_figure(1, "", ""), lambda k: None

    for overwrite in (True, False):
        options = SimpleNamespace(out=Path("a.gif"), fps=10, quiet=True, overwrite=overwrite)
        figures.write_animation(options, scene, [(0,), (1,)])
        assert (*write.call_args.args, False)[2] == overwrite


def test_a_drawing_may_replace_that_of_a_page(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(networks, "svg_bytes", lambda name: b"")
    monkeypatch.setattr(networks, "write_if_changed", write := Mock(return_value=""))
    assert networks.main([f"--outdir={tmp_path}", "--overwrite"]) == 0
    assert all(call.args[2:] == (True,) for call in write.call_args_list)


def test_each_figure_has_the_palette_that_its_script_gives_it(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(figures, "write_figure", write := Mock())
    main = figures.figure_script("x", figures.Settings, figures.OutOptions, "", [], Mock(), {},
                                 {"a": Mock(), "b": Mock()}, {"a": 7})
    assert main([f"--outdir={tmp_path}"]) == 0
    assert [(call.args[0].stem, call.args[2]) for call in write.call_args_list] == [("a", 7), ("b", None)]


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


def test_a_document_has_six_digits_of_a_number(fake: str) -> None:
    args, (setting,) = compare_seeds.parse_command([fake, "--seeds", "0"])
    args.commit = "c"
    found: Any = {Job(setting, 0, Path("x")): {"headline": "loss", "models": {"a": {"loss": 2 / 3}}}}
    document = compare_seeds.make_document(args, [setting], found, {})
    assert document["settings"]["default"]["runs"][0]["models"]["a"]["loss"] == 0.666667


def test_the_readers_of_data_write_to_a_terminal_as_the_base_scripts_do() -> None:
    for name in ("one_line", "obeys_escapes", "is_terminal"):
        assert inspect.getsource(getattr(files, name)) == inspect.getsource(getattr(views, name)), name


def test_a_shell_that_shows_escape_codes_has_no_bar(monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "idlelib.run", Mock())
    assert not any(module.obeys_escapes.__wrapped__() for module in (views, digits, files))


def test_twelve_classes_have_a_matrix() -> None:
    assert len(tables.confusion_lines(np.eye(12, dtype=int), "abcdefghijkl")) == 13


def test_a_training_that_is_over_costs_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    folder, flags = write_folder(tmp_path / "own", n=4), ["--models=cnn", f"--checkpoint={tmp_path / 'c.npz'}"]
    train(folder, *flags)
    monkeypatch.setattr(own, "cost", lambda *_: pytest.fail("was measured"))
    train(folder, *flags, "--resume")


def test_earlier_readings_are_written_where_they_are_asked_for(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(earlier, "ROOT", tmp_path)
    monkeypatch.setattr(earlier, "make_tables", dict)
    assert earlier.main(["--out=own.json"]) == 0
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert earlier.main(["--out=~/own.json"]) == 0
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json")) == ["home/own.json", "own.json"]


@pytest.mark.parametrize("name", ["evidence.earlier", "benchmarks.__main__", "visualize_smallnorb_novel_viewpoint"])
def test_notes_are_left_alone_where_results_and_pictures_are_written(
    name: str, tmp_path: Path, capsys: Capture
) -> None:
    (notes := tmp_path / "smallnorb_novel_viewpoint" / "shapes.png").parent.mkdir()
    notes.write_text("my notes")
    argv = [f"--outdir={tmp_path}", "--figures=shapes"] if "visualize" in name else [f"--out={notes}"]
    assert failure(importlib.import_module(name), argv, capsys).endswith("of something else: name another file\n")
    assert notes.read_text() == "my notes"


def test_a_cnn_alone_names_no_digits(tmp_path: Path, capsys: Capture) -> None:
    saved = ["--checkpoint", str(tmp_path / "c.npz")]
    assert conv.main([*EXPERIMENTS[conv.EXPERIMENT].argv("--models cnn"), *saved]) == 0
    (tmp_path / "a.png").touch()
    line = failure(conv, ["--predict", str(tmp_path / "a.png"), *saved], capsys)
    assert "has no capsules that learned digits" in line


def test_without_scipy_there_is_no_interval(monkeypatch: Patch) -> None:
    for module in (statistics, figures):
        monkeypatch.setattr(module, "has_scipy", lambda: False)
    assert [statistics.describe_sample([0.25, 0.75])[end] for end in ("low", "high")] == [None, None]
    assert figures.interval(np.array([[0.25], [0.75]]))[1].tolist() == [0]


SHARES = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)


def test_constants_of_attacks_and_addresses() -> None:
    assert attacks.DEFAULT == (20, 160, 0.01, 200)
    assert (attacks.FIRST_SHARE, attacks.HALVINGS, attacks.LEAST_RISES, attacks.MOMENTUM) == (0.8, SHARES, 0.75, 0.25)
    google, amazon = "https://storage.googleapis.com/cvdf-datasets/mnist/", "://ossci-datasets.s3.amazonaws.com/mnist/"
    assert list(digits.MIRRORS) == [google, f"https{amazon}", f"http{amazon}"]


def test_what_a_resumed_run_may_change() -> None:
    scripts = [load(name) for name in (*EXPERIMENTS, "what_routing_does", "your_own_images")]
    free = {f"{one.EXPERIMENT} {field}" for one in scripts for field, it in settings_of(one.Config).items() if it.free}
    assert free == {"capsule_attacks epsilons", "capsule_attacks n_attack", "your_own_images data_dir"}


def test_a_training_whose_margin_rises_to_its_end_is_not_made_longer(tmp_path: Path, capsys: Capture) -> None:
    argv = EXPERIMENTS["smallnorb_novel_viewpoint"].argv(f"--models cnn --loss spread --checkpoint {tmp_path / 'c'}")
    assert views.main([*argv, "--n-epochs=1"]) == 0
    assert "was made with --n-epochs 1, not 2" in failure(views, [*argv, "--resume"], capsys)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_default_that_the_help_tells_in_numbers_is_the_default(name: str) -> None:
    script = load(name)
    for one in (script.Config(), script.Options()):
        for field, it in settings_of(one).items():
            if it.shown[:1].isdigit() and (value := getattr(one, field)) is not None:
                assert it.shown == text_of(value) or it.shown.startswith(f"{text_of(value)}, "), field
