"""claims: verdicts on runs whose answer is known, and results/claims.json against its list."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import smallnorb_novel_viewpoint as views
from evidence import claims, earlier, report, visualize_claims
from evidence.claims import Claim, Condition, listed, make_claims, paired_values, verdict_of
from figure_checks import check_pictures, drawn, held, legend_of, move_to
from helpers import ROOT, failure
from support.figures import BLUE, GREEN, VERMILLION
from support.results import save_result
from support.statistics import t_quantile
from test_report import git

Json = dict[str, Any]
NOISE = np.array([-1.5, -0.5, 0.0, 0.5, 1.5])  # sd sqrt(5 / 4)


def document(capsules: Any, cnn: Any) -> Json:
    """A comparison of seeds, as compare_seeds.py writes it."""
    runs = [
        {"seed": seed, "models": {"capsules": {"accuracy": float(a)}, "cnn": {"accuracy": float(b)}}}
        for seed, (a, b) in enumerate(zip(capsules, cnn, strict=True), 200)
    ]
    return {"settings": {"default": {"runs": runs}}}


def condition(file: str, **more: Any) -> Condition:
    return Condition(file, file, "capsules", "cnn", "accuracy", "200:205", **more)


def claim(*files: str) -> Claim:
    return Claim("more is better", "0.9 against 0.8", "docs/page.md", tuple(map(condition, files)))


FILES = {
    "higher": document(0.9 + 0.01 * NOISE, [0.5] * 5),
    "lower": document(0.1 + 0.01 * NOISE, [0.5] * 5),
    "near": document(0.5 + 0.001 * NOISE, [0.5] * 5),
    "wide": document(0.5 + 0.1 * NOISE, [0.5] * 5),
    "four": document([0.9, 0.8, 0.9, 0.8], [0.5] * 4),
    "single": document([0.9], [0.5]),
    "constant": document([0.75] * 5, [0.5] * 5),
    "same": document([0.5] * 5, [0.5] * 5),
}


UNDECIDED = ("undecided", "undecided")


@pytest.mark.parametrize(
    ("files", "words", "whole"),
    [
        (["higher"], ["holds"], "holds"),
        (["lower"], ["reversed"], "reversed"),
        (["near"], ["equal"], "equal"),
        (["wide"], ["undecided"], "undecided"),
        (["four", "single"], ["few seeds"] * 2, "few seeds"),
        (["none"], ["not run yet"], "not run yet"),
        (["constant", "same"], ["holds", "equal"], "holds in 1, equal in 1 of 2"),
        (["none", "wide", "higher", "higher"], ["not run yet", "undecided", "holds", "holds"],
         "holds in 2, undecided in 1, not run yet in 1 of 4"),
    ],
)
def test_the_word_is_that_of_the_interval(files: list[str], words: list[str], whole: str) -> None:
    (found,) = make_claims([claim(*files)], FILES.get)["claims"]
    assert ([c["verdict"] for c in found["conditions"]], found["verdict"]) == (words, whole)


@pytest.mark.parametrize(
    ("low", "high", "word", "registered"),
    [
        (0.001, 0.021, "holds", "holds"), (0.001, 0.02, "holds", "equal"), (-0.5, -0.001, "reversed", "reversed"),
        (-0.02, -0.001, "reversed", "equal"), (-0.02, 0.02, "equal", "equal"), (0.0, 0.02, "equal", "equal"),
        (-0.02, 0.0, "equal", "equal"), (-0.021, 0.01, *UNDECIDED), (-0.01, 0.021, *UNDECIDED),
        (0.0, 0.021, *UNDECIDED), (-0.5, 0.0, *UNDECIDED),
    ],
)
def test_the_ends_of_an_interval(low: float, high: float, word: str, registered: str) -> None:
    """Of the registered round, equal comes before the other words."""
    assert verdict_of({"n": 5, "low": low, "high": high}, 0.02) == word
    assert verdict_of({"n": 4, "low": low, "high": high}, 0.02) == "few seeds"
    assert claims.registered_verdict({"low": low, "high": high}, 0.02) == registered


def test_the_level_is_shared_among_all_listed_comparisons() -> None:
    """By scipy; a comparison that has not been run counts too, and each look at one."""
    looks = Claim("", "", "", (condition("none", looks=3),))
    for n, others in ((1, []), (4, [claim("none")] * 3), (4, [looks])):
        found = make_claims([claim("higher"), *others], FILES.get)
        assert found["n_looks"] == n
        c = found["claims"][0]["conditions"][0]
        assert (c["first"], c["second"], c["n"]) == (pytest.approx(0.9), 0.5, 5)
        interval = stats.ttest_1samp(0.4 + 0.01 * NOISE, 0).confidence_interval(1 - 0.05 / n)
        assert (c["low"], c["high"]) == (pytest.approx(interval.low), pytest.approx(interval.high))


def test_only_the_first_of_the_listed_seeds_are_taken() -> None:
    c, whole = condition("x"), document([0.9] * 5, [0.5] * 5)
    runs = whole["settings"]["default"]["runs"]
    for kept in (runs[:3], runs):
        assert len(paired_values(c, [{"settings": {"default": {"runs": kept}}}] * 2)) == len(kept)
    for other in (runs[1:], runs[::2], [*runs, {**runs[0], "seed": 205}]):
        with pytest.raises(KeyError, match="has other seeds than the first of 200:205"):
            paired_values(c, [{"settings": {"default": {"runs": other}}}] * 2)
    with pytest.raises(KeyError, match="has other seeds"):
        paired_values(c, [whole, FILES["four"]])


def test_both_sides_may_be_parts_and_have_metrics_of_their_own() -> None:
    c = Condition("x", "f.json", "a:capsules", "b:cnn", "accuracy", "200:201", "other")
    assert [side.file for side in claims.sides(c)] == ["f.json#a", "f.json#b"]
    run = {"seed": 200, "models": {"capsules": {"accuracy": 0.9}, "cnn": {"accuracy": 0.8, "other": 0.3}}}
    parts = {f"f.json#{part}": {"settings": {"default": {"runs": [run]}}} for part in "ab"}
    (found,) = make_claims([Claim("", "", "", (c,))], parts.get)["claims"]
    assert (found["conditions"][0]["first"], found["conditions"][0]["second"]) == (0.9, 0.3)


# --- The registered round ---------------------------------------------------------------------------------------------


make_registered = functools.partial(claims.judged, n_comparisons=claims.N_COMPARISONS, registered=True)


def document_of_seeds(n: int, lead: float) -> Json:
    return document(0.5 + lead + 0.02 * np.sin(np.arange(n)), [0.5] * n)


def registered(n: int, **more: Any) -> Claim:
    c = Condition("x", "f.json", "capsules", "cnn", "accuracy", f"200:{200 + n}", **more)
    return Claim("more is better", "", "docs/page.md", (c,))


def test_a_registered_comparison_has_a_verdict_after_its_last_seed_alone() -> None:
    differences = 0.01 + 0.02 * (np.arange(12) - 5.5)
    files = {"f.json": document(0.5 + differences, [0.5] * 12)}
    c = make_registered([registered(12)], files.get)[0]["conditions"][0]
    interval = stats.ttest_1samp(differences, 0).confidence_interval(1 - 0.05 / 24)
    assert (c["n"], c["low"], c["high"]) == (12, pytest.approx(interval.low), pytest.approx(interval.high))
    assert c["verdict"] == "undecided"
    assert "p_signs" not in c
    for n in (11, 13):
        c = make_registered([registered(n)], files.get)[0]["conditions"][0]
        assert c["verdict"] == "not run"
        assert "difference" not in c
    assert make_registered([registered(12)], lambda file: None)[0]["verdict"] == "not run"
    within = make_registered([registered(12, tolerance=0.2)], {"f.json": document_of_seeds(12, 0.1)}.get)
    assert within[0]["verdict"] == "equal"  # though above 0


def test_few_seeds_are_tested_by_signs_too() -> None:
    differences = np.array([0.1, 0.2, -0.01, 0.3, 0.1, 0.2, 0.0, 0.4])
    c = make_registered([registered(8)], {"f.json": document(0.5 + differences, [0.5] * 8)}.get)
    assert c[0]["conditions"][0]["p_signs"] == pytest.approx(stats.binomtest(6, 7).pvalue)
    for n, is_few in ((10, True), (11, False)):
        (one,) = make_registered([registered(n)], {"f.json": document_of_seeds(n, 0.1)}.get)
        assert ("p_signs" in one["conditions"][0]) == is_few
        assert (one["conditions"][0]["first"], one["conditions"][0]["second"]) == (
            pytest.approx(0.6 + 0.02 * np.sin(np.arange(n)).mean()), 0.5)
    assert claims.by_signs(np.zeros(3)) == 1.0


SEARCHED = {"axes": [[0.001, 0.002, 0.004], [0, 1], [10, 20, 40]], "winner": [0.002, 0, 20],
            "doubled_length": {"change": 0.01}}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({"seed": "1900:1912"}, "is not registered as it must be"),
        ({"seed": "2000:2007"}, "is not registered as it must be"),
        ({"looks": 2}, "is not registered as it must be"),
        ({"searches": None}, "is not registered as it must be"),
        ({"most": 1}, "claims.py registers 2 comparisons, more than 1"),
        ({"most": 2}, None),
        ({"winner": [0.004, 0, 20]}, "the winner lies at an edge of the grid"),
        ({"winner": [0.002, 0, 40]}, "the winner lies at an edge of the grid"),
        ({"doubled_length": {"change": 0.02}}, "twice the length gains 0.020"),
        ({"config": {"lr": 0.003}}, "f.json#a: lr of capsules is not that of results/search/capsules.json"),
        ({"config": {"dataset": "voxels"}}, "f.json#a: dataset of capsules is not that of"),
        ({"config": {"weight_decay": 0.3}}, "f.json#a: weight_decay of capsules is not that of"),
        ({"cnn": {"cnn_weight_decay": 0.3}}, "f.json#b: cnn_weight_decay of cnn_matched is not that of"),
        ({"one_decay": 0.0}, None),  # a run from before the CNNs had one of their own
        ({"one_decay": 0.3}, "f.json#b: cnn_weight_decay of cnn_matched is not that of"),
        ({"cnn": {"lr": 1, "n_epochs": 1, "em_iters": 1, "weight_decay": 1}}, None),  # of the other side
        ({"config": {"cnn_lr": 1, "cnn_epochs": 1, "cnn_weight_decay": 1}}, None),
        ({"lacks": "em_iters"}, None),  # a run from before there was such a setting had its default
        ({"lacks": "cnn_epochs"}, "f.json#b: cnn_epochs of cnn_matched is not that of"),
        ({"lacks": "dataset"}, "f.json#a: dataset of capsules is not that of"),
        ({"listed": "2000:2008"}, "was run before claims.py registered all of x"),
        ({"most then": 25}, "f.json#a was registered at another level"),
        ({"alpha then": 0.1}, "f.json#b was registered at another level"),
    ],
)
def test_a_registered_comparison_has_the_settings_of_its_searches(
    change: dict[str, Any], complaint: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = {key: change.get(key, value) for key, value in SEARCHED.items()}
    seeds = change.get("seed", "2000:2012")
    c = Condition("x", "f.json", "a:capsules", "b:cnn_matched", "accuracy", seeds,
                  searches=change.get("searches", ("capsules.json", "cnn.json")), looks=change.get("looks", 1))
    monkeypatch.setattr(claims, "N_COMPARISONS", change.get("most", 24))
    config = report.plain(views.Config(dataset="shapes", weight_decay=0.0))
    if "one_decay" in change:
        config["weight_decay"] = change["one_decay"]
        del config["cnn_weight_decay"]
    own = {"a": {"lr": 0.002, "n_epochs": 20} | change.get("config", {}),
           "b": {"cnn_lr": 0.002, "cnn_epochs": 20} | change.get("cnn", {})}
    stored = {part: {key: x for key, x in (config | own[part]).items() if key != change.get("lacks")} for part in own}
    runs = {part: {"settings": {"default": {"config": json.loads(json.dumps(stored[part])), "runs": [
        {"seed": 2000, "models": {model: {"accuracy": 0.5}}}]}}, "environment": {"git_commit": "0" * 40}}
        for part, model in (("a", "capsules"), ("b", "cnn_matched"))}
    Path("results/search").mkdir(parents=True)
    save_result(Path("results/f.json"), {"parts": runs})
    for name, flags in (("capsules", ""), ("cnn", " --model cnn")):
        save_result(Path(f"results/search/{name}.json"), {"command": f"python -m evidence.search{flags}", **found})
    monkeypatch.setattr(claims, "REGISTERED", (Claim("", "", "", (c, c)),))
    listed_then = {c._replace(name="", seeds=change.get("listed", seeds))}
    monkeypatch.setattr(report, "listed_at", lambda commit: listed_then)
    level = f"ALPHA = {change.get('alpha then', 0.05)}\nN_COMPARISONS = {change.get('most then', claims.N_COMPARISONS)}"
    monkeypatch.setattr(report, "claims_at", lambda commit: level)
    faults = list(report.check_registered(True))
    assert (faults == []) if complaint is None else any(complaint in fault for fault in faults), faults


def test_networks_of_digits_share_all_settings_but_those_of_the_validation(tmp_path: Path) -> None:
    searched: Json = {"axes": [[0.005, 0.01, 0.02], [0, 0.1, 0.3], [4]], "winner": [0.01, 0.1, 4]}
    searched["command"] = "python -m evidence.search --network capsnet --model cnn"
    wanted, model = report.search.winner_of(searched)
    found = json.loads(json.dumps(report.plain(wanted))) | {"n_val": None, "seed": 2000, "data_dir": "x"}
    assert (model, report.differing(wanted, found, True)) == ("cnn_pool", [])
    for name in ("lr", "routing_iters", "min_iou"):
        assert report.differing(wanted, found | {name: 0.7}, True) == [name]
    save_result(path := tmp_path / "search.json", searched)
    assert list(report.check_search(path)) == []  # nothing was trained twice as long


# --- The list, before the runs ----------------------------------------------------------------------------------------


def test_the_list_can_be_read_from_its_text() -> None:
    both = [
        {c._replace(name="") for one in those for c in one.conditions} for those in (claims.CLAIMS, claims.REGISTERED)
    ]
    own = both[0] | both[1]
    assert listed((ROOT / "evidence" / "claims.py").read_text()) == own
    assert len(own) == sum(len(one.conditions) for one in (*claims.CLAIMS, *claims.REGISTERED)) >= 25
    for those, first in zip(both, (200, 2000), strict=True):
        assert all(int(c.seeds.split(":")[0]) >= first for c in those)
    with pytest.raises(ValueError, match="malformed node"):
        listed("CLAIMS = Condition('a', open('b'))")


def test_a_run_from_before_its_comparison_was_listed_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def commit(text: str) -> str:
        Path("claims.py").write_text(text)
        for words in ("init -q", "add claims.py", "commit -qm x"):
            git(*words.split())
        return git("rev-parse", "HEAD")

    line = "CLAIMS = Condition('any words', 'one.json', 'capsules', 'cnn', 'accuracy', '200:205')"
    before, other, after = commit("x = 1"), commit(line.replace("205", "204")), commit(line)
    Path("results").mkdir()
    c = condition("one.json")
    monkeypatch.setattr(claims, "CLAIMS", (Claim("", "", "", (c, condition("none.json"))),))
    monkeypatch.setattr(claims, "REGISTERED", ())
    more, wider = (commit(line.replace("205'", f"{end}")) for end in ("400', looks=2", "205', tolerance=0.03"))
    cases = ((after, 0), ([other, after], 0), (more, 0), (wider, 1), (before, 1), (other, 1), ([before, after], 1))
    for commits, n_faults in cases:
        save_result(Path("results/one.json"), FILES["higher"] | {"environment": {"git_commit": commits}})
        assert len(list(report.check_listed())) == n_faults
    at = f"{before} and {after}"
    fault = f"results/one.json was run at {at}, whose claims.py does not list all of one.json"
    save_result(report.CLAIMS, report.make_claims())
    monkeypatch.setattr(report, "check_registered", lambda has_history: [has_history])
    for has_history, faults in ((True, [fault]), (False, [])):
        assert list(report.check_result(report.CLAIMS, has_history)) == [*faults, has_history]


def test_a_comparison_that_was_registered_once_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evidence").mkdir()
    git("init", "-q")
    one = "Condition('x', 'f.json', 'capsules', 'cnn', 'accuracy', '2000:2012')"
    for those in (one, f"{one}, {one.replace('2012', '2024')}", one.replace("'x'", "'renamed'")):
        Path("evidence/claims.py").write_text(f"REGISTERED = ({those},)\nCLAIMS = ({one.replace('f.json', 'g.json')},)")
        git("add", ".")
        git("commit", "-qm", "x")
    monkeypatch.setattr(claims, "REGISTERED", ())
    own = Condition("", "f.json", "capsules", "cnn", "accuracy", "2000:2012")
    monkeypatch.setattr(claims, "WITHDRAWN", (own,))
    [fault] = report.check_registered(True)  # the second commit's alone
    middle = git("log", "--format=%H").split()[1]
    assert fault == f"accuracy of f.json was registered at {middle}, and is in neither list any more"
    monkeypatch.setattr(claims, "WITHDRAWN", (own, own._replace(seeds="2000:2024")))
    assert list(report.check_registered(True)) == []


# --- Earlier rounds ---------------------------------------------------------------------------------------------------


def test_every_earlier_reading_is_that_of_the_history() -> None:
    """The contrary ones too: on five objects, in the worst case, -27 points; on digits, after ten steps, -22."""
    if report.unknown_history():
        pytest.skip("the history is not whole")
    stored = report.read_result(ROOT / earlier.OUT)["tables"]
    assert earlier.make_tables() == stored
    attacks = {(row[0], row[1]): row[2] for row in stored["attacks"]["rows"]}
    assert attacks["worst case, ε = 0.1", 5].startswith("-27.2 ")
    assert attacks["digits, ten steps, ε = 0.05", 3].startswith("-21.8 ")
    with pytest.raises(OSError, match="whole history"):
        earlier.show("show", f"{'0' * 40}:{earlier.CLAIMS}")


def test_earlier_readings_are_written_where_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(earlier, "ROOT", tmp_path / "project")
    monkeypatch.setattr(earlier, "make_tables", dict)
    assert earlier.main(["--out=own.json"]) == 0
    assert (tmp_path / "own.json").exists()


# --- Values at equal accuracy -----------------------------------------------------------------------------------------


def curves(familiar: list[float], held_out: list[float]) -> Json:
    """A run that kept its history."""
    return {"history": {"capsules": {"familiar": familiar, "held_out": held_out}}}


def test_values_at_equal_accuracy_by_hand() -> None:
    """The second reaches 0.6 a quarter of the way from its first to its second epoch."""
    runs = [(curves([0.3, 0.6], [0.2, 0.5]), "capsules"), (curves([0.5, 0.9, 0.9], [0.1, 0.3, 0.7]), "capsules")]
    assert claims.at_equal_values(runs, "held_out", "familiar") == pytest.approx([0.5, 0.15])
    level = [(curves([0.6], [0.2]), "capsules"), (curves([0.3, 0.6, 0.6, 0.9], [0.1, 0.3, 0.5, 0.7]), "capsules")]
    assert claims.at_equal_values(level, "held_out", "familiar") == pytest.approx([0.2, 0.3])  # where it comes to it
    early = [(curves([0.1, 0.3], [0.4, 0.2]), "capsules"), (curves([0.4, 0.8], [0.1, 0.3]), "capsules")]
    assert claims.at_equal_values(early, "held_out", "familiar") == [0.2, 0.1]
    fallen = [(curves([0.8, 0.5], [0.4, 0.2]), "capsules"), (curves([0.4, 0.6], [0.1, 0.3]), "capsules")]
    assert claims.at_equal_values(fallen, "held_out", "familiar") == pytest.approx([0.2, 0.2])  # where the first ends


def test_a_claim_may_be_read_at_equal_accuracy() -> None:
    def runs(*all_curves: tuple[list[float], list[float]]) -> Json:
        found = [{"seed": seed, **curves(*both)} for seed, both in enumerate(all_curves, 200)]
        return {"settings": {"default": {"runs": found}}}

    both = (
        runs(([0.3, 0.6], [0.2, 0.5]), ([0.7, 0.8], [0.3, 0.6])),
        runs(([0.4, 0.8], [0.1, 0.3]), ([0.7, 0.7], [0.3, 0.4])),
    )
    c = Condition("x", "f", "a:capsules", "b:capsules", "held_out", "200:205", at_equal="familiar")
    np.testing.assert_allclose(paired_values(c, both), [[0.5, 0.2], [0.3, 0.4]])


def test_the_file_is_made_from_the_list_and_changes_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(claims, "CLAIMS", (claim("one.json", "none.json"),))
    monkeypatch.setattr(claims, "REGISTERED", ())
    Path("README.md").write_text("<!-- table: results/claims.json claims --><!-- end -->\n")
    Path("results").mkdir()
    save_result(Path("results/one.json"), FILES["higher"])
    assert report.main(["--claims"]) == 0
    low, high = stats.ttest_1samp(0.4 + 0.01 * NOISE, 0).confidence_interval(1 - 0.05 / 2)
    lines = [" ".join(line.strip("|").split()) for line in Path("README.md").read_text().splitlines()]
    assert "*more is better*, exploratory: **holds in 1, not run yet in 1 of 2**. The paper: 0.9 against 0.8." in lines
    assert f"one.json | 0.900 | 0.500 | +40.0 ({100 * low:+.1f} to {100 * high:+.1f}) | 5 | holds" in lines
    assert "none.json | | | | 200:205 | not run yet" in lines
    path = Path("results/claims.json")
    assert list(report.check_result(path, False)) == []
    stored = report.read_result(path)
    changed = json.loads(json.dumps(stored))
    changed["claims"][0]["conditions"][0]["verdict"] = "reversed"
    save_result(path, changed)
    fault = f"{path} is not what claims.py and the results give; python -m evidence.report --claims writes it"
    assert list(report.check_result(path, False)) == [fault]
    save_result(path, {key: value for key, value in stored.items() if key != "registered"})
    assert list(report.check_result(path, False)) == [fault]
    for change, is_seen in ((3e-9, False), (2e-6, True), (-2e-6, True)):  # scipy's versions differ by 1e-9
        changed = json.loads(json.dumps(stored))
        changed["claims"][0]["conditions"][0]["high"] *= 1 + change
        save_result(path, changed)
        assert len(list(report.check_result(path, False))) == is_seen, change
    save_result(Path("results/one.json"), FILES["four"] | {"settings": {"x": {"runs": [{"seed": 5, "models": {}}]}}})
    capsys.readouterr()
    assert report.main(["--claims"]) == 1
    assert "one.json has other seeds than the first of 200:205" in capsys.readouterr().err


def test_the_picture() -> None:
    """In the row of a condition's name stand its dot, its intervals, its difference and its verdict."""
    document = make_claims([claim("near"), claim("single", "none"), claim("higher", "lower")], FILES.get)
    axes = np.array(drawn(lambda: visualize_claims.draw_earlier(document)).axes).reshape(-1, 3)
    found = {c["condition"]: c for one in document["claims"] for c in one["conditions"]}
    for names, (words, ax, verdicts) in zip((["near"], ["single", "higher", "lower"]), axes, strict=True):
        lines, place = held(ax)["lines"], {text.get_text(): text.get_position()[1] for text in words.texts}
        assert [name for name in found if name in place] == names
        for name in names:
            c, y, middle = found[name], place[name], 100 * found[name]["difference"]
            np.testing.assert_allclose(lines[name], [[middle], [y]])
            said = [text.get_text() for text in verdicts.texts if text.get_position()[1] == y]
            assert said == [c["verdict"], f"{middle:+.1f}".replace("-", "−")]
            if name == "single":  # of one seed
                assert (f"plain {name}" in lines, f"adjusted {name}" in lines) == (False, False)
                continue
            np.testing.assert_allclose(lines[f"adjusted {name}"], [[100 * c["low"], 100 * c["high"]], [y, y]])
            half = t_quantile(5) * NOISE.std(ddof=1) / np.sqrt(5) * (0.1 if name == "near" else 1)
            np.testing.assert_allclose(lines[f"plain {name}"], [[middle - half, middle + half], [y, y]], rtol=1e-6)
            (plain,) = [line for line in ax.lines if line.get_label() == f"plain {name}"]
            assert plain.get_color() == {"near": GREEN, "higher": BLUE, "lower": VERMILLION}[name]
            (band,) = [band for band in ax.collections if band.get_label() == f"tolerance {name}"]
            assert band.get_paths()[0].get_extents().extents.tolist() == pytest.approx([-2, y - 0.5, 2, y + 0.5])


def test_the_registered_picture_has_the_intervals_of_its_own_level_and_what_has_not_been_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = registered(12, tolerance=0.03).conditions[0], registered(13).conditions[0]._replace(name="later")
    found = make_registered([Claim("more is better", "", "", both)], {"f.json": document_of_seeds(12, 0.1)}.get)
    document = {"registered": found, "n_comparisons": claims.N_COMPARISONS, "claims": [], "n_looks": 99}
    fig = visualize_claims.draw_verdicts(document)
    _, ax, verdicts = fig.axes
    differences = 0.1 + 0.02 * np.sin(np.arange(12))
    half = t_quantile(12) * differences.std(ddof=1) / np.sqrt(12)
    lines, texts = held(ax)["lines"], held(verdicts)["texts"]
    np.testing.assert_allclose(lines["plain x"][0], 100 * (differences.mean() + np.array([-half, half])))
    assert ("plain later" in lines, texts.count("holds"), texts.count("not run")) == (False, 1, 1)
    band = ax.collections[0].get_paths()[0].get_extents()
    assert (band.x0, band.x1) == pytest.approx((-3, 3))
    assert f"adjusted for {claims.N_COMPARISONS} comparisons: gives the verdict" in legend_of(fig)

    move_to(tmp_path, monkeypatch)
    assert failure(visualize_claims, [], capsys).startswith(f"error: cannot read {tmp_path}/results/claims.json")
    Path("results").mkdir()
    save_result(Path("results/claims.json"), document | make_claims([claim("near")], FILES.get) | {"registered": found})
    assert visualize_claims.main([]) == 0
    check_pictures(Path("viz/claims"), ["verdicts", "earlier"])


@pytest.mark.parametrize("draw", [visualize_claims.draw_verdicts, visualize_claims.draw_earlier])
def test_no_two_texts_of_the_picture_overlap(draw: Any) -> None:
    fig = draw(report.read_result(ROOT / "results" / "claims.json"))
    fig.canvas.draw()
    boxes = [text.get_window_extent() for ax in fig.axes for text in ax.texts if text.get_text()]
    assert len(boxes) > 20
    assert not [(a, b) for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]
