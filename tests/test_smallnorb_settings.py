"""What settings of smallnorb_novel_viewpoint.py fit together, and what its table says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import smallnorb_novel_viewpoint as s
from helpers import EXPERIMENTS, config_of, usage_error
from support.settings import format_value

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
    config = config_of(s, ["--train-azimuths", train, "--test-azimuths", test])
    assert (format_value(config.train_azimuths, "Range"), format_value(config.test_azimuths, "Range")) == (train, test)


BOTH = ["--train-elevations", "10:35", "--test-elevations", "40:70"]


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize(
    ("argv", "flag", "says"),
    [
        ([*BOTH, "--test-azimuths", "200:330"], "--test-azimuths", "elevation is held out already"),
        (["--train-elevations", "10:35"], "--test-elevations", "both or none"),
        (["--test-elevations", "10:35"], "--train-elevations", "both or none"),
        (["--train-elevations", "10:40", "--test-elevations", "40:70"], "--test-elevations", "overlaps"),
        (["--dataset", "smallnorb"], "--data-dir", "goes with --dataset smallnorb"),
        (["--data-dir", "folder"], "--data-dir", "goes with --dataset smallnorb"),
        (["--dataset", "smallnorb", "--data-dir", "f", "--n-elev", "3"], "--n-elev", "voxels"),
        (["--n-train-views", "1000", "--n-elev", "1000"], "--n-elev", "above the limit"),
        (["--n-train-views", "1000", "--n-elev", "10", "--n-per-combo", "1"], "--n-elev", "100,000 images"),
        (["--n-test-views", "1000", "--n-elev", "10"], "--n-elev", "above the limit"),
        (["--variance-floor", "1e-14"], "--variance-floor", "1e-14 is below 1.4e-14, the least of float32"),
        (["--dtype", "float64", "--variance-floor", "1e-320"], "--variance-floor", "the least of float64"),
    ],
)
def test_flags_that_do_not_fit_together(
    argv: list[str], flag: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = usage_error(s, argv, capsys)
    assert flag in line
    assert says in line


def test_elevation_flags_hold_out_elevation() -> None:
    config = config_of(s, BOTH)
    assert config.held_out == "elevation"
    assert (config.train_elevations, config.test_elevations) == ((10, 35), (40, 70))
    assert config.train_azimuths == config.test_azimuths == (0, 360)
    config = config_of(s, [*BOTH, "--train-azimuths", "0:90"])
    assert config.train_azimuths == config.test_azimuths == (0, 90)


def test_small_variance_floors_are_taken_where_the_numbers_carry_them() -> None:
    assert config_of(s, ["--variance-floor", "2e-14"]).variance_floor == 2e-14
    assert config_of(s, ["--dtype", "float64", "--variance-floor", "5e-32"]).variance_floor == 5e-32


def test_the_cnns_follow_the_capsules_unless_they_have_their_own() -> None:
    config = config_of(s, ["--lr", "0.01", "--n-epochs", "3"])
    assert (config.cnn_lr, config.cnn_epochs) == (0.01, 3)
    config = config_of(s, ["--lr", "0.01", "--n-epochs", "3", "--cnn-lr", "0.1", "--cnn-epochs", "1"])
    assert [s.of_model(name, config) for name in MODELS] == [(3, 0.01), (1, 0.1), (1, 0.1)]


def test_defaults_are_the_headline_run() -> None:
    config = config_of(s, [])
    assert config == s.Config()
    assert (config.seed, config.n_epochs, config.lr) == (0, 20, 2e-3)
    assert (config.train_azimuths, config.test_azimuths) == ((0, 150), (200, 330))
    assert config.em_iters == 2


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
