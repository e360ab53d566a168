"""What the figure and GIF scripts have in common."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import imageio.v3 as imageio
import numpy as np
import pytest

import multimnist_capsnet as multimnist
import smallnorb_novel_viewpoint as smallnorb
import visualize_smallnorb_novel_viewpoint
from figure_checks import check_animation, check_pictures, check_unchanged, draw_coarsely, move_to, refuse
from helpers import EXPERIMENTS, ROOT, Capture, Patch, failure, load, smallest
from more import mnist_affine_capsnet as affine
from recorded import note_figures
from smallnorb_novel_viewpoint import TrainState, UserError
from support import figures
from support.experiment import require_writable


OF_FILES = {  # the figures that need results
    "smallnorb_novel_viewpoint": set(),
    "multimnist_capsnet": {"scaling"},
    "mnist_affine_capsnet": set(),
    "conv_matrix_capsules": {"novel_viewpoints", "shapes_accuracy", "table_2"},
}


def visualize(name: str) -> Any:
    return load(f"visualize_{name}")


def make_gif(name: str) -> Any:
    return load(f"make_{name}_gif")


@pytest.mark.parametrize("name", [*OF_FILES, "your_own_images"])
def test_every_model_has_a_colour_and_a_marker_of_its_own(name: str) -> None:
    styles = load(f"visualize_{name}").MODELS
    assert tuple(styles) == load(name).MODEL_NAMES
    for attribute in ("label", "short", "colour", "marker"):
        assert len({getattr(style, attribute) for style in styles.values()}) == len(styles), attribute


@pytest.mark.parametrize(("n", "most", "indices"), [(3, 4, [0, 1, 2]), (8, 4, [0, 2, 5, 7]), (1, 4, [0])])
def test_indices_are_spread_from_the_first_to_the_last(n: int, most: int, indices: list[int]) -> None:
    assert figures.evenly_spaced_indices(n, most).tolist() == indices


def test_quantiles_are_weighted() -> None:
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1.0, 8.0, 1.0])
    assert figures.weighted_quantiles(values, weights, [0.5, 0.85, 1.0]).tolist() == [1, 2, 3]


def test_grey_levels_stretch_only_what_is_normalised() -> None:
    image = np.random.default_rng(0).random((8, 8, 2))
    np.testing.assert_array_equal(figures.grey_levels(image), image[..., 0])
    stretched = figures.grey_levels(5 * image - 2)
    assert (stretched.min(), stretched.max()) == (0, 1)
    assert 0.05 < (stretched == 1).mean() < 0.15  # the bright tenth


def test_a_picture_that_is_missing_leaves_white() -> None:
    pictures = np.stack([np.zeros((2, 2)), np.full((2, 2), np.nan)])[None]
    np.testing.assert_array_equal(figures.as_sheet(pictures, (1, 1), 2)[:2, :, 0], [[0, 0, 1, 1, 1]] * 2)


def test_validation_examples_are_called_so() -> None:
    for config, name in (({"n_val": None}, "test"), ({"n_val": 5}, "validation"),
                         ({"n_val": None, "n_val_objects": 1}, "validation")):
        assert figures.tested(SimpleNamespace(**config)) == name


# --- Which training is drawn ------------------------------------------------------------------------------------------

Config = smallnorb.Config


def finished(
    asked: Any, given: set[str], epochs: dict[str, int], dataset: str = "smallnorb", required: tuple[str, ...] = (),
    free: tuple[str, ...] = ("data_dir",), reached: Any = None, **settings: Any,
) -> tuple[Any, Any]:
    """``load_finished`` from a checkpoint of seed 3 and 1,000 epochs; ``epochs``: of each of its models; ``settings``:
    its others."""
    states = {name: TrainState(name, {}) for name in epochs}
    for name, state in states.items():
        state.history = {"train_loss": [0.5] * epochs[name]} if epochs[name] else {}
    kind: Any = multimnist.Config if dataset == "strokes" else Config
    folder = Path("y") if dataset == "smallnorb" else None
    saved = kind(dataset=dataset, seed=3, n_epochs=1000, data_dir=folder, **settings)
    with patch.object(figures, "load_checkpoint", lambda script, path: (saved, states)):
        x = SimpleNamespace(EXPERIMENT="x")
        return figures.load_finished(x, Path("a"), asked, given, free, required, reached=reached)


def test_given_flags_must_agree_with_the_checkpoint() -> None:
    asked, done = Config(dataset="smallnorb", seed=3, lr=0.1, data_dir=Path("x")), {"cnn": 1000}
    config, states = finished(asked, {"seed", "data_dir", "quiet"}, done)
    assert config == Config(dataset="smallnorb", seed=3, n_epochs=1000, data_dir=Path("x"))
    assert list(states) == ["cnn"]
    assert finished(asked, {"lr"}, done, free=("lr", "seed"))[0] == Config(
        dataset="smallnorb", data_dir=Path("y"), seed=3, n_epochs=1000, lr=0.1, cnn_lr=5e-4
    )
    with pytest.raises(OSError, match=r"^a was made with --lr 0\.001, not 0\.1$"):
        finished(asked, {"lr"}, done)
    digits = multimnist.Config(data_dir=Path("x"))
    for dataset in ("strokes", "voxels", "shapes", "toys"):
        with pytest.raises(OSError, match=f"a was trained on {dataset}, which have no files: leave --data-dir out"):
            finished(digits if dataset == "strokes" else asked, {"data_dir"}, done, dataset=dataset)


UNFINISHED: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("7 of 1,000 epochs of cnn; finish it with x ", {"capsules": 1000, "cnn": 7}, {}),
    ("0 of 1,000 epochs of cnn; ", {"capsules": 1000}, {"required": ("cnn",)}),
    ("0 of 1,000 epochs of capsules; ", {"capsules": 0}, {"reached": lambda state, _: state.name == "cnn"}),
    ("1,000 of 2,000 epochs of cnn; ", {"capsules": 1000, "cnn": 1000}, {"cnn_epochs": 2000}),
]


def test_an_unfinished_checkpoint_is_an_error() -> None:
    for says, epochs, more in UNFINISHED:
        with pytest.raises(OSError, match=f"^a holds {says}"):
            finished(Config(), set(), epochs, **more)
    finished(Config(), set(), {"capsules": 1000, "cnn": 0}, reached=lambda state, _: state.name == "cnn")


def test_a_new_training_is_of_the_median_of_the_reported_seeds_unless_one_is_given(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """With so many threads."""
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    runs = [{"seed": 200 + k, "models": {"cnn": {"accuracy": a}}} for k, a in enumerate((0.9, 0.5, 0.7, 0.6))]
    settings = {"other": {"config": {"n_epochs": 9}, "runs": runs[:1]}, "default": {"config": {}, "runs": runs}}
    document = {"config": dataclasses.asdict(Config(seed=9)), "settings": settings}
    (tmp_path / "r.json").write_text(json.dumps(document, default=str))
    train_all = Mock(return_value={"cnn": 1})

    def run(config: Any, given: set[str], path: str = "r.json", data: Any = "data", file: Any = None) -> figures.Run:
        experiment = SimpleNamespace(make_data=lambda config: data, train_all=train_all)
        options, place = SimpleNamespace(checkpoint=file, quiet=True, threads=3), (Path(path), "cnn", "accuracy")
        return figures.load_or_train(experiment, options, config, given, median_of=place)

    asked, median, trained = Config(seed=3), Config(seed=203), {"cnn": 1}
    assert run(asked, {"lr"}) == figures.Run(median, "data", trained, "seed 203, the median of 4", runs)
    *seen, options = train_all.call_args.args
    assert seen == [median, "data"]
    assert (options.quiet, options.threads) == (True, 3)
    assert run(asked, {"seed"}) == figures.Run(asked, "data", trained, "seed 3", runs)
    for config, path in ((Config(seed=3, lr=7.0), "r.json"), (asked, "none.json")):
        assert run(config, set(), path) == figures.Run(config, "data", trained, "seed 3", [])
    strokes = SimpleNamespace(name="strokes")  # of which no result is
    assert run(asked, set(), data=strokes) == figures.Run(median, strokes, trained, "seed 203", [])
    monkeypatch.setattr(figures, "load_finished", lambda *_: (asked, {"cnn": 2}))
    assert run(asked, set(), file=Path("run.npz")) == figures.Run(asked, "data", {"cnn": 2}, "seed 3", runs)


@pytest.mark.parametrize(("name", "required", "has_auto"), [
    ("smallnorb_novel_viewpoint", ("capsules", "cnn", "cnn_matched"), False),
    ("multimnist_capsnet", ("capsnet",), True),
    ("mnist_affine_capsnet", ("capsnet",), False),
    ("conv_matrix_capsules", ("capsules",), True),
])
def test_a_checkpoint_must_have_the_networks_that_are_drawn(
    name: str, required: tuple[str, ...], has_auto: bool, monkeypatch: Patch
) -> None:
    script, prepare = visualize(name), "finished" if "affine" in name else "trained"
    monkeypatch.setattr(script, "load_or_train", asked := Mock(side_effect=UserError("stop")))
    with pytest.raises(OSError, match="stop"):
        getattr(script, prepare)(load(name).Config(), None, ())
    assert tuple(asked.call_args.kwargs["required"]) == required
    assert (multimnist.resolve_auto in asked.call_args.args) == has_auto


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: Patch, request: pytest.FixtureRequest) -> None:
    """No figure of the project is touched, no results file of it found, and little done of what takes long. What is
    drawn is as it was recorded."""
    move_to(tmp_path, monkeypatch)
    draw_coarsely(monkeypatch)
    note_figures(figures, request.node.name, monkeypatch)
    smallest(monkeypatch)
    for module in (visualize("mnist_affine_capsnet"), make_gif("mnist_affine_capsnet")):
        monkeypatch.setattr(module, "SWEEP", affine.SWEEP)
    monkeypatch.setattr(visualize_smallnorb_novel_viewpoint, "NOISE_DRAWS", 1)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", OF_FILES)
def test_training_and_checkpoint_give_the_same_figures(name: str, monkeypatch: Patch, capsys: Capture) -> None:
    experiment, script, folder = EXPERIMENTS[name], visualize(name), Path("viz", name)
    argv = experiment.argv(f"--dtype=float64 --seed=123{' --n-test=60' * experiment.has_digits}")
    assert experiment.script.main([*argv, "--checkpoint=run.npz"]) == 0
    names = {*script.OF_RUN, *getattr(script, "OF_RESULTS", ())} - OF_FILES[name]
    argv.append(f"--figures={','.join(names)}")
    assert script.main(argv) == 0
    check_pictures(folder, names)
    for train in ("train", "train_all"):
        refuse(monkeypatch, experiment.script, train)
    check_unchanged(script, [*argv, "--checkpoint=run.npz"], folder, capsys)


VIEWS = "--n-train-views=2 --n-test-views=2 --n-elev=2 --n-per-combo=1"
ELEVATIONS = "--train-elevations=-20:35 --test-elevations=40:70 --loss=spread"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("name", "flags", "names"), [
    ("conv_matrix_capsules", f"--dataset=voxels --sizes=5,2,3,2 {VIEWS}", "training_curves"),
    ("smallnorb_novel_viewpoint", f"{ELEVATIONS} {VIEWS}", "elevation_strip,azimuth_accuracy"),
])
def test_figures_of_other_trainings(name: str, flags: str, names: str) -> None:
    argv = [*flags.split(), "--n-epochs=1", "--dtype=float64", "--quiet", f"--figures={names}"]
    assert visualize(name).main(argv) == 0
    check_pictures(Path("viz", name), names.split(","))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("name", "flags", "numbers", "held"), [
    ("smallnorb_novel_viewpoint", "--snapshots=2 --sweep-frames=3", [1, 1, 1, 2, 2, 2], {2}),
    ("multimnist_capsnet", "--n-test=60 --batch-size=4 --snapshot-every=5", [0, 5, 10, 12], ()),
    ("mnist_affine_capsnet", "--n-test=60 --frames=4", [-90, -48, -7, 35], {2}),
    ("conv_matrix_capsules", "--n-test=20 --snapshots=3 --em-iters=3", [0, 0, 0, 2, 2, 2, 6, 6, 6], {6, 7}),
    ("smallnorb_novel_viewpoint", f"--snapshots=1 --sweep-frames=3 --n-elev=2 {ELEVATIONS}", [2, 2, 2], {2}),
])
def test_animations(name: str, flags: str, numbers: list[int], held: Any, monkeypatch: Patch, capsys: Capture) -> None:
    """Frame by frame, steps, epochs or degrees are those in the titles."""
    titles, draw_frames = list[str](), figures.draw_frames

    def titled(fig: Any, update: Any, frames: Any) -> Any:
        for picture in draw_frames(fig, update, frames):
            titles.append(fig.texts[0].get_text().replace("−", "-"))
            yield picture

    monkeypatch.setattr(figures, "draw_frames", titled)
    argv = EXPERIMENTS[name].argv(f"--dtype=float64 --seed=123 {flags}")
    check_animation(make_gif(name), argv, len(numbers), held, capsys)
    assert [int(n) for n in re.findall(r"(?:step|epoch|ones:|after) (-?\d+)", "".join(titles))] == 2 * numbers


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("make", "name", "flags", "says"), [
    (visualize, "mnist_affine_capsnet", "--n-test=3", "none of the 3 test digits is a 0"),
    (make_gif, "mnist_affine_capsnet", "--n-test=3", "none of the 3 test digits is a 0"),
    (visualize, "multimnist_capsnet", "--figures=scaling", "/results/multimnist_capsnet/scaling.json: No such file"),
])
def test_what_cannot_be_drawn_is_found_before_any_training(
    make: Any, name: str, flags: str, says: str, monkeypatch: Patch, capsys: Capture
) -> None:
    refuse(monkeypatch, EXPERIMENTS[name].script, "train_all")
    assert says in failure(make(name), EXPERIMENTS[name].argv(flags), capsys)


# --- Files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "most"), [("viz/**/*.png", 600_000), ("viz/**/*.svg", 600_000), ("**/*.gif", 4_000_000)]
)
def test_the_projects_own_pictures_are_small(pattern: str, most: int) -> None:
    sizes = {path: path.stat().st_size for path in ROOT.glob(pattern)}
    assert sizes
    assert {path: size for path, size in sizes.items() if size > most} == {}


def test_a_frame_is_what_the_whole_figure_would_be() -> None:
    with figures.figure_style():
        fig = figures.make_figure(1.5, "", "fixed", width=2)
        (bar,) = fig.subplots().bar([0], [1], color="red", animated=True)
        frames = list(figures.draw_frames(fig, lambda height: bar.set_height(height / 10), [(9,), (2,)]))
        bar.set_animated(False)
        canvas: Any = fig.canvas
        canvas.draw()
        whole = np.asarray(canvas.buffer_rgba())[..., :3]
    assert (frames[0] != frames[1]).any()
    assert (frames[1] != whole).any(axis=2).mean() < 0.01  # spines are drawn over the bar there


def test_a_gif_keeps_white_and_the_colours_of_letters() -> None:
    frames = [np.full((40, 60, 3), 255, np.uint8) for _ in range(2)]
    frames[1][:20] = (200, 30, 30)
    frames[1][30, 30] = (0, 255, 0)  # a single pixel, as of a letter
    assert imageio.immeta(figures.gif_bytes(frames, 6), extension=".gif", index=0)["duration"] == 170  # of 166.7
    assert imageio.imread(figures.gif_bytes(frames[:1], 10), extension=".gif").shape[-3:] == (40, 60, 3)
    first, last = imageio.imread(figures.gif_bytes(frames, 10), extension=".gif")
    assert (first == 255).all()
    assert (last[39, 59] == 255).all()
    assert last[30, 30].tolist() == [0, 255, 0]
    assert np.abs(last[5, 5].astype(int) - (200, 30, 30)).max() < 12


@pytest.mark.parametrize("overwrite", [True, False])
def test_an_animation_may_replace_the_picture_of_a_page(overwrite: bool, monkeypatch: Patch) -> None:
    monkeypatch.setattr(figures, "write_if_changed", write := Mock(return_value=""))
    options = SimpleNamespace(out=Path("a.gif"), fps=10, quiet=True, overwrite=overwrite)
    figures.write_animation(options, lambda: (figures.make_figure(1, "", ""), lambda k: None), [(0,), (1,)])
    assert (*write.call_args.args, False)[2] == overwrite


@pytest.mark.parametrize(("content", "is_ours"), [
    (b"", True), (b"GIF89a", True), (b"\x89PNG\r\n", True), (b'{"a": 1}', True), (b"<!DOCTYPE html>", True),
    (b"my notes", False), (b"PK\x03\x04", False),
])
def test_a_file_of_another_kind_is_left_alone(content: bytes, is_ours: bool, tmp_path: Path) -> None:
    (path := tmp_path / "x").write_bytes(content)
    with contextlib.nullcontext() if is_ours else pytest.raises(OSError, match="of something else: name another"):
        require_writable(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("name", ["evidence.earlier", "benchmarks.__main__", "visualize_smallnorb_novel_viewpoint"])
def test_notes_are_left_alone_where_results_and_pictures_are_written(
    name: str, tmp_path: Path, capsys: Capture
) -> None:
    (notes := tmp_path / "smallnorb_novel_viewpoint" / "shapes.png").parent.mkdir()
    notes.write_text("my notes")
    argv = [f"--outdir={tmp_path}", "--figures=shapes"] if "visualize" in name else [f"--out={notes}"]
    assert failure(importlib.import_module(name), argv, capsys).endswith("of something else: name another file\n")
    assert notes.read_text() == "my notes"
