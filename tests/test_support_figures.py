"""What the figure and GIF scripts have in common."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

import conv_matrix_capsules
import make_conv_matrix_capsules_gif
import make_mnist_affine_capsnet_gif
import make_multimnist_capsnet_gif
import make_smallnorb_novel_viewpoint_gif
import mnist_affine_capsnet
import multimnist_capsnet
import smallnorb_novel_viewpoint
import visualize_conv_matrix_capsules
import visualize_mnist_affine_capsnet
import visualize_multimnist_capsnet
import visualize_smallnorb_novel_viewpoint
from figure_checks import check_failures
from helpers import ROOT, run_script, usage_error
from support import figures
from support.files import UserError
from support.optimizers import TrainState

EXPERIMENTS: list[Any] = [smallnorb_novel_viewpoint, multimnist_capsnet, mnist_affine_capsnet, conv_matrix_capsules]
FIGURE_SCRIPTS: list[Any] = [
    visualize_smallnorb_novel_viewpoint,
    visualize_multimnist_capsnet,
    visualize_mnist_affine_capsnet,
    visualize_conv_matrix_capsules,
]
GIF_SCRIPTS: list[Any] = [
    make_smallnorb_novel_viewpoint_gif,
    make_multimnist_capsnet_gif,
    make_mnist_affine_capsnet_gif,
    make_conv_matrix_capsules_gif,
]

# ----------------------------------------------------------------------------------------------------------------------
# Style
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_model_has_a_colour_and_a_marker_of_its_own(experiment: Any) -> None:
    styles = figures.MODEL_STYLES[experiment.EXPERIMENT]
    assert list(styles) == list(experiment.make_models(experiment.Config()))
    for attribute in ("label", "short", "colour", "marker"):
        assert len({getattr(style, attribute) for style in styles.values()}) == len(styles), attribute
    assert set(figures.MODEL_STYLES) == {e.EXPERIMENT for e in EXPERIMENTS} | {"your_own_images"}


def test_colours_are_mixed_with_white_and_darkened() -> None:
    assert figures.lightened("#000000", 0) == (1, 1, 1)
    assert figures.lightened("#008040", 1) == pytest.approx((0, 128 / 255, 64 / 255))
    assert figures.lightened("#000000", 0.25) == (0.75, 0.75, 0.75)
    assert max(figures.darkened("#ffffff")) < 0.8


def test_texts_and_axes_are_measured_in_inches_from_the_upper_left_corner() -> None:
    fig = figures.new_figure(4, "title", "subtitle", width=8)
    box = figures.add_axes(fig, 1, 0.5, 2, 1).get_position()
    assert box.bounds == pytest.approx((1 / 8, 2.5 / 4, 2 / 8, 1 / 4))
    text = figures.add_text(fig, 2, 1, "x", va="top")
    assert text.get_position() == pytest.approx((2 / 8, 3 / 4))
    assert figures.add_text(fig, 2, 1, "x").get_position()[1] < 3 / 4  # the base line is below the top


@pytest.mark.parametrize(
    ("last", "options", "limits"),
    [(1, {}, (0.6, 1.4)), (100, {}, (-2, 103)), (10, {"margin": 1}, (0, 11))],
)
def test_epochs_have_a_margin(last: float, options: dict[str, Any], limits: tuple[float, float]) -> None:
    ax = Figure().add_subplot()
    figures.epoch_axis(ax, last, **options)
    assert ax.get_xlim() == pytest.approx(limits)


def test_decades_hold_the_values() -> None:
    ax = Figure().add_subplot()
    figures.decades_axis(ax, np.array([0.03, 1.0]))
    assert ax.get_ylim() == pytest.approx((0.01, 10))


# ----------------------------------------------------------------------------------------------------------------------
# Numbers and pictures
# ----------------------------------------------------------------------------------------------------------------------


def test_words_and_numbers() -> None:
    assert [figures.plural(n, "seed") for n in (1, 2, 1200)] == ["1 seed", "2 seeds", "1,200 seeds"]
    assert figures.with_minus_sign("-1") == "−1"
    assert figures.marked_answer(True, "5") == ("✓ 5", figures.darkened(figures.RIGHT))
    assert figures.marked_answer(False, "5") == ("✗ 5", figures.darkened(figures.WRONG))


@pytest.mark.parametrize(("n", "most", "indices"), [(3, 4, [0, 1, 2]), (9, 3, [0, 4, 8]), (1, 4, [0]), (5, 2, [0, 4])])
def test_indices_are_spread_from_the_first_to_the_last(n: int, most: int, indices: list[int]) -> None:
    assert figures.evenly_spaced_indices(n, most).tolist() == indices


def test_quantiles_are_weighted() -> None:
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1.0, 8.0, 1.0])
    assert figures.weighted_quantiles(values, weights, [0.5, 0.85, 1.0]).tolist() == [1, 2, 3]
    assert figures.weighted_quantiles(values, weights, 0.95) == 3


def test_grey_levels_stretch_only_what_is_normalised() -> None:
    image = np.random.default_rng(0).random((8, 8, 2))
    np.testing.assert_array_equal(figures.grey_levels(image), image[..., 0])
    stretched = figures.grey_levels(5 * image - 2)
    assert (stretched.min(), stretched.max()) == (0, 1)


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints and flags
# ----------------------------------------------------------------------------------------------------------------------

Config = smallnorb_novel_viewpoint.Config


def finished(
    asked: Any, given: set[str], epochs: dict[str, int], dataset: str = "smallnorb", **options: Any
) -> tuple[Any, dict[str, TrainState]]:
    """``load_finished`` from a checkpoint of seed 3 and 1,000 epochs; ``epochs``: of each of its models."""
    states = {name: TrainState(name, {}) for name in epochs}
    for name, state in states.items():
        state.history = {"train_loss": [0.5] * epochs[name]} if epochs[name] else {}
    script = SimpleNamespace(
        EXPERIMENT="x", load_checkpoint=lambda path: (Config(dataset=dataset, seed=3, n_epochs=1000), states)
    )
    return figures.load_finished(script, Path("a"), asked, given, **options)


def test_given_flags_must_agree_with_the_checkpoint() -> None:
    asked, done = Config(seed=3, lr=0.1, data_dir=Path("x")), {"cnn": 1000}
    config, states = finished(asked, {"seed", "data_dir", "quiet"}, done)
    assert config == Config(dataset="smallnorb", seed=3, n_epochs=1000, data_dir=Path("x"))
    assert list(states) == ["cnn"]
    with pytest.raises(UserError, match=r"^a was made with --lr 0\.002, not 0\.1$"):
        finished(asked, {"lr"}, done)
    assert finished(asked, {"lr"}, done, free=("lr", "seed"))[0] == Config(
        dataset="smallnorb", seed=3, n_epochs=1000, lr=0.1
    )
    assert figures.load_finished(None, None, asked, {"lr"}) == (asked, {})
    with pytest.raises(UserError, match="a was trained on voxels, which have no files: leave --data-dir out"):
        finished(asked, {"data_dir"}, done, dataset="voxels")


def test_an_unfinished_checkpoint_is_an_error() -> None:
    with pytest.raises(UserError, match=r"^a holds 7 of 1,000 epochs of cnn; finish it with x\.py "):
        finished(Config(), set(), {"capsules": 1000, "cnn": 7})
    with pytest.raises(UserError, match=r"^a holds 0 of 1,000 epochs of cnn; "):
        finished(Config(), set(), {"capsules": 1000}, required=("cnn",))
    with pytest.raises(UserError, match=r"^a holds 0 of 1,000 epochs of capsules; "):
        finished(Config(), set(), {"capsules": 0}, stopped=lambda state, _: state.name == "cnn")
    finished(Config(), set(), {"capsules": 1000, "cnn": 0}, stopped=lambda state, _: state.name == "cnn")


# ----------------------------------------------------------------------------------------------------------------------
# All scripts
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [*FIGURE_SCRIPTS, *GIF_SCRIPTS])
def test_wrong_flags(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--seed=-1", "--no-such-flag"]
    for flag in flags + (["--fps=0", "--fps=51", "--out="] if script in GIF_SCRIPTS else []):
        usage_error(script, [flag], capsys)


@pytest.mark.parametrize("script", [*FIGURE_SCRIPTS, *GIF_SCRIPTS])
def test_files_that_cannot_be_read_or_written_are_found_at_once(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("in the way")
    Path("dir.gif").mkdir()
    of_figures = [
        (script, ["--outdir=file"], "cannot write"),
        (script, ["--outdir=/proc/none"], "cannot write"),
    ]
    of_gifs = [(script, ["--out=dir.gif"], "it is no regular file"), (script, ["--out=file/a.gif"], "cannot write")]
    check_failures(of_gifs if script in GIF_SCRIPTS else of_figures, capsys)


# ----------------------------------------------------------------------------------------------------------------------
# Files
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "most"), [("viz/**/*.png", 600_000), ("viz/**/*.svg", 600_000), ("*.gif", 4_000_000)]
)
def test_the_projects_own_pictures_are_small(pattern: str, most: int) -> None:
    sizes = {path: path.stat().st_size for path in ROOT.glob(pattern)}
    assert sizes
    assert {path: size for path, size in sizes.items() if size > most} == {}


def test_a_picture_is_1800_pixels_wide() -> None:
    with Image.open(io.BytesIO(figures.png_bytes(lambda: figures.new_figure(2, "", "")))) as image:
        assert image.size == (1800, 400)


def small_figure(colour: str = "red") -> Callable[[], Figure]:
    def draw() -> Figure:
        fig = figures.new_figure(1, "title", "", width=2)
        figures.add_axes(fig, 0.2, 0.5, 1, 0.4).plot([1, 2], color=colour)
        return fig

    return draw


def test_a_file_is_written_only_when_it_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for colour, n_colours, word in (("red", {}, "wrote"), ("red", {}, "unchanged"), ("blue", {}, "wrote"),
                                    ("blue", {"a": 4}, "wrote")):  # fmt: skip
        figures.write_figures(tmp_path, {"a": small_figure(colour)}, n_colours)
        assert capsys.readouterr().out.startswith(f"{word} {tmp_path / 'a.png'} (")
    with Image.open(tmp_path / "a.png") as image:
        assert image.mode == "P"
        assert len(image.getcolors() or []) <= 4


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
    differ = (frames[1] != whole).any(axis=2)
    assert differ.mean() < 0.01  # spines are drawn over the bar there


def test_a_gif_keeps_white_and_the_colours_of_letters() -> None:
    frames = [np.full((40, 60, 3), 255, np.uint8) for _ in range(2)]
    frames[1][:20] = (200, 30, 30)
    frames[1][30, 30] = (0, 255, 0)  # a single pixel, as of a letter
    content = figures.gif_bytes(frames, 10)
    shown = [imageio.immeta(content, extension=".gif", index=k) for k in range(2)]
    assert (shown[0]["loop"], shown[0]["duration"], shown[1]["duration"]) == (0, 100, 1000 * figures.LAST_SECONDS)
    first, last = imageio.imread(content, extension=".gif")
    assert (first == 255).all()
    assert (last[39, 59] == 255).all()
    assert last[30, 30].tolist() == [0, 255, 0]
    assert np.abs(last[5, 5].astype(int) - (200, 30, 30)).max() < 12
    stream = io.BytesIO()  # imageio adds nothing to what Pillow writes
    pictures = [Image.fromarray(frame) for frame in (first, last)]
    pictures[0].save(stream, "GIF", save_all=True, append_images=pictures[1:], duration=[100, 2500], loop=0)
    assert content == stream.getvalue()


def test_a_notebooks_backend_stops_no_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notebooks set MPLBACKEND for the commands that they start; the project does not have that backend."""
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    process = run_script("visualize_networks.py", f"--outdir={tmp_path}")
    assert (process.returncode, process.stderr) == (0, "")
    assert len(list(tmp_path.glob("networks/*.svg"))) == 4
