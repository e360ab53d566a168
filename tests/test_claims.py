"""claims: verdicts on runs whose answer is known, and results/claims.json against its list."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import claims
import report
import visualize_claims
import visualize_parts
from claims import Claim, Condition, Runs, holm_levels, make_claims, runs_by_seed
from figure_checks import check_pictures, check_texts, drawn_texts
from helpers import ROOT, failure
from support.results import save_result
from support.statistics import describe_sample

Json = dict[str, Any]
NOISE = np.array([-1.5, -0.5, 0.5, 1.5])  # sd sqrt(5 / 3)


def document(capsules: Any, cnn: Any) -> Json:
    """A comparison of seeds, as compare_seeds.py writes it."""
    runs = [
        {"seed": seed, "models": {"capsules": {"accuracy": float(a)}, "cnn": {"accuracy": float(b)}}}
        for seed, (a, b) in enumerate(zip(capsules, cnn, strict=True))
    ]
    return {"settings": {"default": {"runs": runs}}}


def condition(file: str) -> Condition:
    return Condition(file, Runs(file, "capsules"), Runs(file, "cnn"), "accuracy")


def claim(*files: str) -> Claim:
    return Claim("more is better", "0.9 against 0.8", "docs/page.md", tuple(map(condition, files)))


FILES = {
    "higher": document(0.9 + 0.01 * NOISE, [0.5] * 4),
    "lower": document(0.1 + 0.01 * NOISE, [0.5] * 4),
    "near": document(0.5 + 0.01 * NOISE, [0.5] * 4),
    "single": document([0.9], [0.5]),
    "constant": document([0.75] * 3, [0.5] * 3),
    "equal": document([0.5] * 3, [0.5] * 3),
}


@pytest.mark.parametrize(
    ("files", "words", "whole"),
    [
        (["higher"], ["holds"], "holds"),
        (["lower"], ["reversed"], "reversed"),
        (["near"], ["undecided"], "undecided"),
        (["higher", "lower"], ["holds", "reversed"], "depends"),
        (["higher", "near"], ["holds", "undecided"], "depends"),
        (["single"], ["one seed"], "one seed"),
        (["higher", "single"], ["holds", "one seed"], "holds"),
        (["constant", "equal"], ["holds", "undecided"], "depends"),
    ],
)
def test_the_word_is_that_of_the_interval(files: list[str], words: list[str], whole: str) -> None:
    (found,) = make_claims([claim(*files)], FILES.__getitem__)["claims"]
    assert ([c["verdict"] for c in found["conditions"]], found["verdict"]) == (words, whole)
    for c in found["conditions"]:
        if c["low"] is not None:
            assert c["low"] <= c["difference"] <= c["high"]
            assert (c["low"] == c["high"]) == (c["condition"] in ("constant", "equal"))
            side = 1 if c["low"] > 0 else -1 if c["high"] < 0 else 0
            assert c["verdict"] == {1: "holds", -1: "reversed", 0: "undecided"}[side]


def test_one_comparison_by_hand() -> None:
    (found,) = make_claims([claim("higher")], FILES.__getitem__)["claims"]
    (c,) = found["conditions"]
    half = 3.182446305 * 0.01 * np.sqrt(5 / 3) / 2  # t quantile of 3 degrees of freedom at 0.975
    assert (c["first"], c["second"], c["n"]) == (pytest.approx(0.9), 0.5, 4)
    assert (c["low"], c["high"]) == (pytest.approx(0.4 - half), pytest.approx(0.4 + half))


def test_holm_by_hand() -> None:
    assert holm_levels([0.01, 0.04, 0.03, 0.005]) == [0.05 / 3, 0.05 / 2, 0.05 / 2, 0.05 / 4]
    assert holm_levels([0.04]) == [0.05]
    assert holm_levels([0.9, 0.9]) == [0.025, 0.025]


def test_more_comparisons_make_intervals_wider() -> None:
    def width(n: int) -> float:
        claims = [claim("higher")] + [
            Claim(f"{k}", "", "", (condition("near")._replace(name=f"{k}"),)) for k in range(n)
        ]
        first = make_claims(claims, FILES.__getitem__)["claims"][0]["conditions"][0]
        return float(first["high"] - first["low"])

    assert width(0) < width(1) < width(10)


def test_runs_of_other_seeds_are_refused() -> None:
    both = Condition("x", Runs("higher", "capsules"), Runs("single", "cnn"), "accuracy")
    with pytest.raises(KeyError, match="have other seeds"):
        make_claims([Claim("a", "b", "c", (both,))], FILES.__getitem__)


def curves(familiar: list[float], held_out: list[float]) -> Json:
    """A run that kept its history."""
    return {"history": {"capsules": {"familiar": familiar, "held_out": held_out}}}


def test_values_at_equal_accuracy_by_hand() -> None:
    """The second reaches 0.6 a quarter of the way from its first to its second epoch."""
    runs = [(curves([0.3, 0.6], [0.2, 0.5]), "capsules"), (curves([0.5, 0.9, 0.9], [0.1, 0.3, 0.7]), "capsules")]
    assert claims.at_equal_values(runs, "held_out", "familiar") == pytest.approx([0.5, 0.15])
    early = [(curves([0.3], [0.2]), "capsules"), (curves([0.4, 0.8], [0.1, 0.3]), "capsules")]
    assert claims.at_equal_values(early, "held_out", "familiar") == [0.2, 0.1]


def test_a_claim_may_be_read_at_equal_accuracy() -> None:
    def runs(*all_curves: tuple[list[float], list[float]]) -> Json:
        found = [{"seed": seed, **curves(*both)} for seed, both in enumerate(all_curves)]
        return {"settings": {"default": {"runs": found}}}

    files = {
        "first": runs(([0.3, 0.6], [0.2, 0.5]), ([0.7, 0.8], [0.3, 0.6])),
        "second": runs(([0.4, 0.8], [0.1, 0.3]), ([0.7, 0.7], [0.3, 0.4])),
    }
    both = Runs("first", "capsules"), Runs("second", "capsules")
    c = Condition("x", *both, "held_out", at_equal="familiar")
    first, second = claims.paired_differences(c, files.__getitem__)
    np.testing.assert_allclose(first, [0.5, 0.3])
    np.testing.assert_allclose(second, [0.2, 0.4])


def test_both_sides_may_have_metrics_of_their_own() -> None:
    c = condition("higher")._replace(second_metric="other")
    run = {"seed": 0, "models": {"capsules": {"accuracy": 0.9, "other": 0.1}, "cnn": {"accuracy": 0.8, "other": 0.3}}}
    first, second = claims.paired_differences(c, lambda file: {"settings": {"default": {"runs": [run]}}})
    assert (first, second) == (0.9, 0.3)


def test_the_file_is_made_from_the_list_and_changes_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(claims, "CLAIMS", (claim("one.json"),))
    Path("README.md").write_text("# A\n\n<!-- table: results/claims.json claims --><!-- end -->\n")
    Path("results").mkdir()
    save_result(Path("results/one.json"), FILES["higher"])
    assert report.main(["--claims", "--root", "."]) == 0
    assert "|   holds |" in Path("README.md").read_text()
    path = Path("results/claims.json")
    assert list(report.check_result(path, False)) == []
    stored = report.read_result(path)
    for key, value in (("verdict", "reversed"), ("difference", 0.5), ("low", 0.1), ("n", 20)):
        stored["claims"][0]["conditions"][0][key] = value
        save_result(path, stored)
        assert len(list(report.check_result(path, False))) == 1
    capsys.readouterr()
    assert report.main(["--claims", "--root", "."]) == 0
    Path("results/one.json").unlink()
    assert report.main(["--claims", "--root", "."]) == 1
    assert "error: cannot read results/one.json" in capsys.readouterr().err


def test_a_row_for_each_claim_gives_the_ranges_of_its_conditions() -> None:
    claims = [claim("higher", "lower", "near"), claim("near"), claim("lower", "single")]
    document = make_claims(claims, FILES.__getitem__)
    lines = report.verdicts_table(document).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    several, one, with_one_seed = cells
    assert several[0] == "[more is better](docs/page.md)"
    assert several[2:] == [
        "0.100 to 0.900", "0.500", "-0.400 to +0.400", "**depends**: 1 holds, 1 reversed, 1 undecided"
    ]  # fmt: skip
    assert one[2:] == ["0.500", "0.500", "+0.000", "**undecided**"]
    assert with_one_seed[-1] == "**reversed**: 1 reversed, 1 with one seed"


def test_check_and_claims_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        report.main(["--check", "--claims"])
    assert stopped.value.code == 2
    assert "argument --claims: --check writes nothing" in capsys.readouterr().err


def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    document = make_claims([claim("higher", "lower"), claim("near", "single"), claim("near")], FILES.__getitem__)
    fig, texts = drawn_texts(lambda: visualize_claims.draw_verdicts(document))
    words = [text.get_text() for text, _ in texts]
    assert [words.count(word) for word in ("holds", "reversed", "undecided", "one seed")] == [1, 1, 2, 1]
    assert "+0.400" in words
    check_texts(fig, texts, "verdicts")
    assert visualize_claims.main([]) == 1
    assert capsys.readouterr().err.startswith("error: cannot read results/claims.json")
    Path("results").mkdir()
    other: tuple[dict[str, Any], ...] = (
        {},
        {"claims": 1},
        {"claims": [1]},
        document | {"n_comparisons": "x"},
        document | {"claims": [{"claim": 5}]},
    )
    for wrong in other:
        save_result(Path("results/claims.json"), wrong)
        line = failure(visualize_claims, [], capsys)
        assert line == "error: results/claims.json holds no claims: python report.py --claims writes it\n"
    save_result(Path("results/claims.json"), document)
    Path("results/claims.json").write_text(Path("results/claims.json").read_text().replace("0.4", "0.5", 1))
    assert "has been changed since it was written" in failure(visualize_claims, [], capsys)
    save_result(Path("results/claims.json"), document)
    assert visualize_claims.main([]) == 0
    assert list(check_pictures(Path("viz/claims"), ["verdicts"], highest=1200)) == ["verdicts"]


def test_the_picture_of_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "copy"
    shutil.copytree(ROOT / "results", results)
    samples = visualize_parts.read_samples(results)
    fig, texts = drawn_texts(lambda: visualize_parts.draw_parts(samples))
    check_texts(fig, texts, "parts")
    words = [text.get_text() for text, _ in texts]
    for row, cells in zip(visualize_parts.ROWS, samples, strict=True):
        for (_, side, metric), cell in zip(visualize_parts.COLUMNS, cells, strict=True):
            runs = getattr(row, side)
            found = runs_by_seed(report.read_result(results / runs.file), runs).values()
            values = [run["models"][runs.model][metric] for run in found]
            assert cell["mean"] == pytest.approx(np.mean(values))
            assert any(word.startswith(f"{np.mean(values):.3f} ± ") for word in words)
    alone = [[describe_sample([cell["mean"]]) for cell in cells] for cells in samples]
    _, texts = drawn_texts(lambda: visualize_parts.draw_parts(alone))
    assert not any(" ± " in text.get_text() for text, _ in texts)
    assert any("means over 1 seed," in text.get_text() for text, _ in texts)
    # Each row has what its name says, and all that the rows above it have.
    settings = {row.name: row.affine.setting or "" for row in visualize_parts.ROWS}
    added = {"+ routing": "assignments=routed", "+ squash": "activation=squash", "+ margin loss": "capsnet-loss=margin"}
    for (name, part), before in zip(added.items(), ("+ transformation", "+ routing", "+ squash"), strict=True):
        assert part in settings[name]
        assert part not in settings[before]
    monkeypatch.chdir(tmp_path)
    assert "cannot read results/multimnist_capsnet/" in failure(visualize_parts, [], capsys)
    wrong = results / "multimnist_capsnet" / "parts.json"
    save_result(wrong, {"settings": {}})
    assert failure(visualize_parts, ["--results", "copy"], capsys) == (
        "error: copy/multimnist_capsnet/parts.json is not a comparison of seeds\n"
    )
    assert not Path("viz").exists()
