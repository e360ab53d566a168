"""smallnorb_novel_viewpoint.py as a person meets it: flags, files, interruptions, their own pictures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

import smallnorb_novel_viewpoint as s
from helpers import EXPERIMENTS, failure, usage_error
from support.files import UserError
from support.run import check_resumable

Array = np.ndarray

SHORT = EXPERIMENTS["smallnorb_novel_viewpoint"].argv()
MODELS = ("capsules", "cnn", "cnn_matched")


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong has to be found before any data is made, and so before any training."""

    def make_data(config: s.Config) -> s.Data:
        pytest.fail("got as far as the data")

    monkeypatch.setattr(s, "make_data", make_data)


# ----------------------------------------------------------------------------------------------------------------------
# Wrong flags
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("0:150", "100:330"),
        ("0:150", "150:200"),  # closed ranges share their ends
        ("0:150", "200:360"),  # 360 is 0
        ("0:150", "360:400"),
        ("300:400", "30:60"),
        ("-30:30", "330:340"),
        ("0:360", "10:20"),
        ("10:20", "0:360"),
        ("50:60", "410:420"),
        ("200:330", "-100:-90"),
    ],
)
def test_ranges_that_overlap_modulo_360_are_refused(train: str, test: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = usage_error(s, ["--train-azimuths", train, "--test-azimuths", test], capsys)
    assert "argument --test-azimuths: " in line
    assert "overlaps" in line


@pytest.mark.parametrize(
    ("train", "test"),
    [("0:150", "200:330"), ("-30:30", "31:329"), ("300:400", "60:280"), ("0:0", "1:1"), ("-360:-350", "20:300")],
)
def test_ranges_apart_are_taken(train: str, test: str) -> None:
    parser = s.make_parser()
    config = s.config_from_args(parser.parse_args(["--train-azimuths", train, "--test-azimuths", test]))
    assert s.format_range(config.train_azimuths) == train
    assert s.format_range(config.test_azimuths) == test


BOTH = ["--train-elevations", "10:35", "--test-elevations", "40:70"]


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize(
    ("argv", "flag", "says"),
    [
        ([*BOTH, "--test-azimuths", "200:330"], "--test-azimuths", "elevation is held out already"),
        (["--train-elevations", "10:35"], "--test-elevations", "both or none"),
        (["--test-elevations", "10:35"], "--train-elevations", "both or none"),
        (["--train-elevations", "10:40", "--test-elevations", "40:70"], "--test-elevations", "overlaps"),
        (["--dataset", "smallnorb"], "--data-dir", "needs"),
        (["--data-dir", "folder"], "--data-dir", "needs --dataset smallnorb"),
        (["--dataset", "smallnorb", "--data-dir", "f", "--n-elev", "3"], "--n-elev", "voxels"),
        (["--n-train-views", "1000", "--n-elev", "1000"], "--n-elev", "above the limit"),
        (["--n-train-views", "1000", "--n-elev", "10", "--n-per-combo", "1"], "--n-train-views", "100,000 images"),
        (["--n-test-views", "1000", "--n-elev", "10"], "--n-test-views", "above the limit"),
        (["--models", "cnn", "--routing-study"], "--routing-study", "needs the capsules among --models"),
        (["--sign-study", "--assignments", "random"], "--sign-study", "its layer has no --assignments random"),
        (["--models", "cnn", "--sign-study"], "--sign-study", "needs the capsules among --models"),
    ],
)
def test_flags_that_do_not_fit_together(
    argv: list[str], flag: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = usage_error(s, argv, capsys)
    assert flag in line
    assert says in line


def test_elevation_flags_hold_out_elevation() -> None:
    parser = s.make_parser()
    config = s.config_from_args(parser.parse_args(BOTH))
    assert config.held_out == "elevation"
    assert (config.train_elevations, config.test_elevations) == ((10, 35), (40, 70))
    assert config.train_azimuths == config.test_azimuths == (0, 360)
    config = s.config_from_args(parser.parse_args([*BOTH, "--train-azimuths", "0:90"]))
    assert config.train_azimuths == config.test_azimuths == (0, 90)


def test_defaults_are_the_headline_run() -> None:
    parser = s.make_parser()
    config = s.config_from_args(parser.parse_args([]))
    assert config == s.Config()
    assert (config.seed, config.n_epochs, config.lr) == (0, 10, 2e-3)
    assert (config.train_azimuths, config.test_azimuths) == ((0, 150), (200, 330))
    assert config.em_iters == 3


# ----------------------------------------------------------------------------------------------------------------------
# A run
# ----------------------------------------------------------------------------------------------------------------------


def test_the_result_and_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert s.main([*SHORT, "--seed", "3", "--out-json", str(path)]) == 0
    result, lines = json.loads(path.read_text()), capsys.readouterr().out.splitlines()
    assert (result["seed"], result["headline"], result["chance"]) == (3, "held_out_accuracy", 0.2)
    assert "200:330 held out" in lines[0]
    assert "seed 3" in lines[0]
    for column in ("familiar", "held out", "drop", "parameters", "seconds"):
        assert column in lines[1]
    assert [line.split()[0] for line in lines[2:]] == list(MODELS)
    for line, model in zip(lines[2:], result["models"].values(), strict=True):
        assert {"n_params", "familiar_accuracy", "held_out_accuracy", "drop", "train_seconds"} <= set(model)
        assert model["drop"] == pytest.approx(model["familiar_accuracy"] - model["held_out_accuracy"])
        assert f" {model['familiar_accuracy']:.3f} " in line
        assert f" {model['held_out_accuracy']:.3f} " in line
    assert result["models"]["capsules"]["n_params"] == 558_258
    assert 0 <= result["models"]["capsules"]["true_class_mass"] <= 1


def test_threads_are_limited_for_the_run_alone(tmp_path: Path) -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl")

    def blas_threads() -> list[int]:
        return [lib["num_threads"] for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "blas"]

    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        before = blas_threads()
        path = tmp_path / "out.json"
        assert s.main([*SHORT, "--out-json", str(path)]) == 0
        assert json.loads(path.read_text())["environment"]["threads"] == 1
        assert blas_threads() == before


# ----------------------------------------------------------------------------------------------------------------------
# Interrupted and resumed
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained checkpoint; tests must not change it."""
    path = tmp_path_factory.mktemp("trained") / "c.npz"
    assert s.main([*SHORT, "--checkpoint", str(path)]) == 0
    return path


def test_a_longer_spread_training_is_refused() -> None:
    """Its margin grows over the whole training, so a shorter one is no beginning of it."""
    check_resumable(Path("c.npz"), s.Config(), s.Config(n_epochs=11))
    config = s.Config(loss="spread")
    with pytest.raises(UserError, match="it was made with --n-epochs 10, not 11"):
        check_resumable(Path("c.npz"), config, dataclasses.replace(config, n_epochs=11))


# ----------------------------------------------------------------------------------------------------------------------
# A person's own pictures
# ----------------------------------------------------------------------------------------------------------------------


def voxel_picture(label: int = 1) -> Array:
    """A view as a person would draw it: (32, 32) uint8, light on dark."""
    image = s.render_voxels(np.array([label]), np.array([60.0]), np.array([30.0]), None)[0, :, :, 0]
    return np.rint(255 * image).astype(np.uint8)


def save(folder: Path, name: str, pixels: Array) -> Path:
    path = folder / name
    Image.fromarray(pixels).save(path)
    return path


def test_a_picture_is_read_as_it_is(tmp_path: Path) -> None:
    pixels = voxel_picture()
    expected = pixels[None, :, :, None] / np.float32(255)
    config = s.Config()
    colours = np.repeat(pixels[..., None], 3, axis=2)
    opaque = np.concatenate([colours, np.full_like(pixels, 255)[..., None]], axis=2)
    transparent_paper = np.stack([np.full_like(pixels, 255)] * 3 + [pixels], axis=2)
    transparent_dark = np.stack([np.zeros_like(pixels)] * 3 + [pixels], axis=2)
    pictures = {
        "grey": pixels,
        "large": np.kron(pixels, np.ones((3, 3), np.uint8)),
        "colours": colours,
        "opaque": opaque,
        "white ink on nothing": transparent_paper,
        "black ink on nothing": transparent_dark,
        "dark on light": 255 - pixels,
        "16 bits": pixels.astype(np.uint16) * 257,
        "black and white": pixels > 127,
    }
    for name, picture in pictures.items():
        image = s.read_picture(save(tmp_path, f"{name}.png", picture), config)
        wanted = (expected > 0.5) if name == "black and white" else expected
        assert image.shape == (1, 32, 32, 1), name
        assert image.dtype == np.float32, name
        np.testing.assert_allclose(image, wanted, atol=0.011, err_msg=name)


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (31, 33), (100, 40), (7, 200), (1, 3000), (3000, 1), (64, 32)])
@pytest.mark.parametrize("dataset", ["voxels", "smallnorb"])
def test_pictures_of_odd_sizes(size: tuple[int, int], dataset: str, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, size[::-1], dtype=np.uint8)
    image = s.read_picture(save(tmp_path, "p.png", pixels), s.Config(dataset=dataset))
    assert image.shape == ((1, 32, 32, 1) if dataset == "voxels" else (1, 48, 48, 2))
    assert np.isfinite(image).all()


def test_a_wide_picture_is_a_stereo_pair_of_smallnorb(tmp_path: Path) -> None:
    pairs = np.random.default_rng(0).integers(0, 256, (1, 2, 96, 96), dtype=np.uint8)
    config = s.Config(dataset="smallnorb", standardize="image")
    image = s.read_picture(save(tmp_path, "pair.png", np.concatenate(list(pairs[0]), axis=1)), config)
    np.testing.assert_array_equal(image, s.shrink(pairs))  # the same normalisation as the data set's
    one_eye = s.read_picture(save(tmp_path, "eye.png", pairs[0, 0]), config)
    np.testing.assert_array_equal(one_eye[..., 0], one_eye[..., 1])
    np.testing.assert_array_equal(one_eye[..., 0], image[..., 0])
    raw = s.read_picture(tmp_path / "pair.png", s.Config(dataset="smallnorb"))
    np.testing.assert_array_equal(raw, s.shrink(pairs, "none"))


def test_a_picture_is_standardized_as_the_images_of_the_training_are(tmp_path: Path) -> None:
    image = s.render_voxels(np.array([1]), np.array([60.0]), np.array([30.0]), None)
    path = save(tmp_path, "p.png", np.rint(255 * image[0, :, :, 0]).astype(np.uint8))
    read = s.read_picture(path, s.Config(standardize="image"))
    np.testing.assert_array_equal(read, s.standardized(s.read_picture(path, s.Config())))
    np.testing.assert_allclose(read, s.standardized(image), atol=0.01)


def test_predict_names_the_class_that_each_network_scores_highest(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, states = s.load_checkpoint(checkpoint)
    models = s.make_models(config)
    paths = [save(tmp_path, f"picture {label}.png", voxel_picture(label)) for label in range(5)]
    capsys.readouterr()
    assert s.main(["--checkpoint", str(checkpoint), "--predict", *map(str, paths)]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    head, *rows = out.splitlines()
    assert all(name in head for name in (*MODELS, *s.VOXEL_CLASSES))
    assert len(rows) == 5
    images = np.concatenate([s.read_picture(path, config) for path in paths])
    activations = s.capsules_forward(states["capsules"].params, images, config)[1].a
    for k, (path, row) in enumerate(zip(paths, rows, strict=True)):
        assert row.startswith(str(path))
        words = row[len(str(path)) :].split()
        classes = [models[m].forward(states[m].params, images[k : k + 1])[0].argmax() for m in MODELS]
        assert words[:3] == [s.VOXEL_CLASSES[c] for c in classes]
        np.testing.assert_allclose([float(w) for w in words[3:]], activations[k], atol=6e-4)
    argv = ["--checkpoint", str(checkpoint), "--predict", str(paths[0]), "--em-iters", "2"]
    assert failure(s, argv, capsys) == f"error: {checkpoint} was made with --em-iters 3, not 2\n"


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(position=st.integers(0, 10_000), value=st.integers(0, 255), length=st.integers(1, 8), cut=st.booleans())
@example(position=1005, value=0, length=3, cut=False)  # Pillow raises a SyntaxError
def test_any_damaged_picture_is_read_or_refused(
    position: int, value: int, length: int, cut: bool, tmp_path: Path
) -> None:
    content = bytearray(save(tmp_path, "p.png", voxel_picture()).read_bytes())
    position %= len(content)
    if cut:
        content = content[:position]
    else:
        content[position : position + length] = bytes([value] * length)
    path = tmp_path / "damaged.png"
    path.write_bytes(content)
    try:
        assert s.read_picture(path, s.Config()).shape == (1, 32, 32, 1)
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017
