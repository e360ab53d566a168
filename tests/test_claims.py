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

import smallnorb_novel_viewpoint as smallnorb
from evidence import claims, earlier, report, visualize_claims
from evidence.claims import Claim, Condition, listed, make_claims, paired_values, verdict_of
from figure_checks import check_pictures, drawn, held, legend_of, move_to
from helpers import ROOT, Capture, Patch, failure
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


def listing(monkeypatch: Patch, exploratory: tuple[Claim, ...], registered: tuple[Claim, ...]) -> None:
    """Both lists of claims.py."""
    monkeypatch.setattr(claims, "CLAIMS", exploratory)
    monkeypatch.setattr(claims, "REGISTERED", registered)


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


@pytest.mark.parametrize(("files", "words", "whole"), [
    (["lower"], ["reversed"], "reversed"),
    (["near"], ["equal"], "equal"),
    (["four", "single"], ["few seeds"] * 2, "few seeds"),
    (["constant", "same"], ["holds", "equal"], "holds in 1, equal in 1 of 2"),
    (["none", "wide", "higher", "higher"], ["not run yet", "undecided", "holds", "holds"],
     "holds in 2, undecided in 1, not run yet in 1 of 4"),
])
def test_the_word_is_that_of_the_interval(files: list[str], words: list[str], whole: str) -> None:
    (found,) = make_claims([claim(*files)], FILES.get)["claims"]
    assert ([c["verdict"] for c in found["conditions"]], found["verdict"]) == (words, whole)


@pytest.mark.parametrize(("low", "high", "word", "registered"), [
    (0.001, 0.021, "holds", "holds"), (0.001, 0.02, "holds", "equal"), (-0.5, -0.001, "reversed", "reversed"),
    (-0.02, -0.001, "reversed", "equal"), (-0.02, 0.02, "equal", "equal"), (0.0, 0.02, "equal", "equal"),
    (-0.02, 0.0, "equal", "equal"),
    *((*ends, "undecided", "undecided") for ends in ((-0.021, 0.01), (-0.01, 0.021), (0.0, 0.021), (-0.5, 0.0))),
])
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
    others = [[{"settings": {"default": {"runs": those}}}] * 2
              for those in (runs[1:], runs[::2], [*runs, {**runs[0], "seed": 205}])]
    for both in (*others, [whole, FILES["four"]]):
        with pytest.raises(KeyError, match="has other seeds than the first of 200:205"):
            paired_values(c, both)


make_registered = functools.partial(claims.judged, n_comparisons=claims.N_COMPARISONS, registered=True)


def registered(n: int, **more: Any) -> Claim:
    c = Condition("x", "f.json", "capsules", "cnn", "accuracy", f"200:{200 + n}", **more)
    return Claim("more is better", "", "docs/page.md", (c,))


def registered_of(differences: Any, n: int, **more: Any) -> Json:
    """The comparison of ``n`` seeds, where there are as many as differences."""
    files = {"f.json": document(0.5 + differences, [0.5] * len(differences))}
    found: Json = make_registered([registered(n, **more)], files.get)[0]["conditions"][0]
    return found


def test_a_registered_comparison_has_a_verdict_after_its_last_seed_alone() -> None:
    differences = 0.01 + 0.02 * (np.arange(12) - 5.5)
    c = registered_of(differences, 12)
    interval = stats.ttest_1samp(differences, 0).confidence_interval(1 - 0.05 / 24)
    assert (c["n"], c["low"], c["high"]) == (12, pytest.approx(interval.low), pytest.approx(interval.high))
    assert (c["first"], c["second"]) == (pytest.approx(0.5 + differences.mean()), 0.5)
    assert c["verdict"] == "undecided"
    for n in (11, 13):
        c = registered_of(differences, n)
        assert (c["verdict"], "difference" in c) == ("not run", False)
    assert make_registered([registered(12)], lambda file: None)[0]["verdict"] == "not run"
    assert registered_of(0.1 + differences / 10, 12, tolerance=0.2)["verdict"] == "equal"  # though above 0


def test_few_seeds_are_tested_by_signs_too() -> None:
    c = registered_of(np.array([0.1, 0.2, -0.01, 0.3, 0.1, 0.2, 0.0, 0.4]), 8)
    assert c["p_signs"] == pytest.approx(stats.binomtest(6, 7).pvalue)
    assert [n for n in range(8, 14) if "p_signs" in registered_of(np.arange(n) / 100, n)] == [8, 9, 10]
    assert claims.by_signs(np.zeros(3)) == 1.0


SEARCHED = {"axes": [[0.001, 0.002, 0.004], [0, 1], [10, 20, 40]], "winner": [0.002, 0, 20],
            "doubled_length": {"change": 0.01}}


@pytest.mark.parametrize(("change", "complaint"), [
    ({}, None),
    *((change, "is not registered as it must be") for change in (
        {"seeds": "1900:1912"}, {"seeds": "2000:2007"}, {"looks": 2}, {"searches": None})),
    ({"most": 1}, "claims.py registers 2 comparisons, more than 1"),
    ({"winner": [0.004, 0, 20]}, "the winner lies at an edge of the grid"),
    ({"doubled_length": {"change": 0.02}}, "twice the length gains 0.020"),
    ({"a": {"lr": 0.003}}, "f.json#a: lr of capsules is not that of results/search/capsules.json"),
    ({"a": {"dataset": "voxels"}}, "f.json#a: dataset of capsules is not that of"),
    ({"a": {"weight_decay": 0.3}}, "f.json#a: weight_decay of capsules is not that of"),
    ({"b": {"cnn_weight_decay": 0.3}}, "f.json#b: cnn_weight_decay of cnn_matched is not that of"),
    ({"one_decay": 0.0}, None),  # a run from before the CNNs had one of their own
    ({"one_decay": 0.3}, "f.json#b: cnn_weight_decay of cnn_matched is not that of"),
    ({"b": {"lr": 1, "n_epochs": 1, "em_iters": 1, "weight_decay": 1}}, None),  # of the other side
    ({"a": {"cnn_lr": 1, "cnn_epochs": 1, "cnn_weight_decay": 1}}, None),
    ({"lacks": "em_iters"}, None),  # a run from before there was such a setting had its default
    ({"lacks": "cnn_epochs"}, "f.json#b: cnn_epochs of cnn_matched is not that of"),
    ({"listed": "2000:2008"}, "was run before claims.py registered all of x"),
    ({"most then": 25}, "f.json#a was registered at another level"),
    ({"alpha then": 0.1}, "f.json#b was registered at another level"),
    ({"winner then": None}, "f.json#a was run before results/search/capsules.json had its winner"),
    ({"searches": ("cnn.json", "cnn.json")}, "f.json#a: capsules is not the network of results/search/cnn.json, cnn_m"),
])
def test_a_registered_comparison_has_the_settings_of_its_searches(
    change: dict[str, Any], complaint: str | None, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    seeds, most = change.get("seeds", "2000:2012"), change.get("most", 2)
    c = Condition("x", "f.json", "a:capsules", "b:cnn_matched", "accuracy", seeds,
                  searches=change.get("searches", ("capsules.json", "cnn.json")), looks=change.get("looks", 1))
    config = json.loads(json.dumps(report.plain(smallnorb.Config(dataset="shapes", weight_decay=0.0))))
    if "one_decay" in change:
        config["weight_decay"] = change["one_decay"]
        del config["cnn_weight_decay"]
    own = {"a": {"lr": 0.002, "n_epochs": 20}, "b": {"cnn_lr": 0.002, "cnn_epochs": 20}}
    parts = {}
    for part, model in (("a", "capsules"), ("b", "cnn_matched")):
        of_part = config | own[part] | change.get(part, {})
        of_part.pop(change.get("lacks"), None)
        runs = [{"seed": 2000, "models": {model: {"accuracy": 0.5}}}]
        parts[part] = {"settings": {"default": {"config": of_part, "runs": runs}}, "environment": {"git_commit": "0"}}
    save_result(Path("results/f.json"), {"parts": parts})
    found = {key: change.get(key, value) for key, value in SEARCHED.items()}
    for name, flags in (("capsules", ""), ("cnn", " --model cnn")):
        save_result(Path(f"results/search/{name}.json"), {"command": f"python -m evidence.search{flags}", **found})
    listing(monkeypatch, (), (Claim("", "", "", (c, c)),))
    monkeypatch.setattr(claims, "N_COMPARISONS", most)
    listed_then = {c._replace(name="", seeds=change.get("listed", seeds))}
    monkeypatch.setattr(report, "listed_at", lambda commit: listed_then)
    monkeypatch.setattr(report, "winner_at", lambda commit, file: change.get("winner then", found["winner"]))
    level = f"ALPHA = {change.get('alpha then', 0.05)}\nN_COMPARISONS = {change.get('most then', most)}"
    monkeypatch.setattr(report, "claims_at", lambda commit: level)
    faults = list(report.check_registered(True))
    assert (faults == []) if complaint is None else any(complaint in fault for fault in faults), faults


def test_networks_of_digits_share_all_settings_but_those_of_the_validation(tmp_path: Path) -> None:
    searched: Json = {"axes": [[0.005, 0.01, 0.02], [0, 0.1, 0.3], [4]], "winner": [0.01, 0.1, 4]}
    searched["command"] = "python -m evidence.search --network capsnet --model cnn"
    wanted, model = report.search.winner_of(searched)
    found = json.loads(json.dumps(report.plain(wanted))) | {"n_val": None, "seed": 2000, "data_dir": "x"}
    assert (model, report.differing(wanted, found, True)) == ("cnn_pool", [])
    for name in ("lr", "routing_iters", "min_iou", "n_val"):
        assert report.differing(wanted, found | {name: 0.7}, True) == [name]
    save_result(path := tmp_path / "search.json", searched)
    assert list(report.check_search(path)) == []  # nothing was trained twice as long


def test_the_list_can_be_read_from_its_text() -> None:
    both = [
        {c._replace(name="") for one in those for c in one.conditions} for those in (claims.CLAIMS, claims.REGISTERED)
    ]
    assert listed((ROOT / "evidence" / "claims.py").read_text()) == both[0] | both[1]
    for those, first in zip(both, (200, 2000), strict=True):
        assert all(int(c.seeds.split(":")[0]) >= first for c in those)
    with pytest.raises(ValueError, match="malformed node"):
        listed("CLAIMS = Condition('a', open('b'))")


def test_the_seeds_of_registered_comparisons_are_fresh() -> None:
    """No two of the same networks on the same data share one, but where they are of the same file."""
    used: dict[tuple[str, int], str] = {}
    for c in report.registered():
        data = "_".join(str(c.searches and c.searches[0]).split("_")[:3])
        for seed in range(*map(int, c.seeds.split(":"))):
            assert used.setdefault((data, seed), c.file) == c.file, (c.file, seed)


def commit(text: str) -> str:
    """Of a list in evidence/claims.py below the working folder."""
    path = Path("evidence/claims.py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    for words in ("init -q", "add .", "commit -qm x"):
        git(*words.split())
    return git("rev-parse", "HEAD")


def test_a_run_from_before_its_comparison_was_listed_is_seen(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    line = "CLAIMS = Condition('any words', 'one.json', 'capsules', 'cnn', 'accuracy', '200:205')"
    before, other, after, more, wider = map(commit, (
        "x = 1", line.replace("205", "204"), line, line.replace("205'", "400', looks=2"),
        line.replace("205'", "205', tolerance=0.03")))
    c = condition("one.json")
    listing(monkeypatch, (Claim("", "", "", (c, condition("none.json"))),), ())
    cases = ((after, 0), ([other, after], 0), (more, 0), (wider, 1), (before, 1), (other, 1), ([before, after], 1))
    for commits, n_faults in cases:
        save_result(Path("results/one.json"), FILES["higher"] | {"environment": {"git_commit": commits}})
        assert len(list(report.check_listed())) == n_faults
    fault = f"results/one.json was run at {before} and {after}, whose claims.py does not list all of one.json"
    save_result(report.CLAIMS, report.make_claims())
    monkeypatch.setattr(report, "check_registered", lambda has_history: [has_history])
    for has_history, faults in ((True, [fault]), (False, [])):
        assert list(report.check_result(report.CLAIMS, has_history)) == [*faults, has_history]


def test_a_comparison_that_was_registered_once_stays(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    one = "Condition('x', 'f.json', 'capsules', 'cnn', 'accuracy', '2000:2012')"
    _, middle, _ = [commit(f"REGISTERED = ({those},)\nCLAIMS = ({one.replace('f.json', 'g.json')},)")
                    for those in (one, f"{one}, {one.replace('2012', '2024')}", one.replace("'x'", "'renamed'"))]
    own = Condition("", "f.json", "capsules", "cnn", "accuracy", "2000:2012")
    listing(monkeypatch, (), ())
    monkeypatch.setattr(claims, "WITHDRAWN", (own,))
    fault = f"accuracy of f.json was registered at {middle}, and is in neither list any more"
    assert list(report.check_registered(True)) == [fault]
    monkeypatch.setattr(claims, "WITHDRAWN", (own, own._replace(seeds="2000:2024")))
    assert list(report.check_registered(True)) == []


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


def curves(*accuracies: tuple[list[float], list[float]]) -> list[Json]:
    """Runs that kept their history, of familiar and of held-out views."""
    return [{"seed": seed, "history": {"capsules": {"familiar": familiar, "held_out": held_out}}}
            for seed, (familiar, held_out) in enumerate(accuracies, 200)]


@pytest.mark.parametrize(("first", "second", "expected"), [
    # the second reaches 0.6 a quarter of the way from its first to its second epoch
    (([0.3, 0.6], [0.2, 0.5]), ([0.5, 0.9, 0.9], [0.1, 0.3, 0.7]), [0.5, 0.15]),
    (([0.6], [0.2]), ([0.3, 0.6, 0.6, 0.9], [0.1, 0.3, 0.5, 0.7]), [0.2, 0.3]),  # where it comes to it
    (([0.1, 0.3], [0.4, 0.2]), ([0.4, 0.8], [0.1, 0.3]), [0.2, 0.1]),  # before its first epoch
    (([0.8, 0.5], [0.4, 0.2]), ([0.4, 0.6], [0.1, 0.3]), [0.2, 0.2]),  # where the first ends
])
def test_values_at_equal_accuracy_by_hand(first: Any, second: Any, expected: list[float]) -> None:
    runs = [(run, "capsules") for run in curves(first, second)]
    assert claims.at_equal_values(runs, "held_out", "familiar") == pytest.approx(expected)


def test_a_claim_may_be_read_at_equal_accuracy() -> None:
    both = [{"settings": {"default": {"runs": curves(*those)}}} for those in (
        [([0.3, 0.6], [0.2, 0.5]), ([0.7, 0.8], [0.3, 0.6])], [([0.4, 0.8], [0.1, 0.3]), ([0.7, 0.7], [0.3, 0.4])],
    )]
    c = Condition("x", "f", "a:capsules", "b:capsules", "held_out", "200:205", at_equal="familiar")
    np.testing.assert_allclose(paired_values(c, both), [[0.5, 0.2], [0.3, 0.4]])


def test_the_file_is_made_from_the_list_and_changes_are_seen(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    listing(monkeypatch, (claim("one.json", "none.json"),), ())
    Path("README.md").write_text("<!-- table: results/claims.json claims --><!-- end -->\n")
    save_result(Path("results/one.json"), FILES["higher"])
    assert report.main(["--claims"]) == 0
    low, high = stats.ttest_1samp(0.4 + 0.01 * NOISE, 0).confidence_interval(1 - 0.05 / 2)
    lines = [" ".join(line.strip("|").split()) for line in Path("README.md").read_text().splitlines()]
    assert "*more is better*, exploratory: **holds in 1, not run yet in 1 of 2**. The paper: 0.9 against 0.8." in lines
    assert f"one.json | 0.900 | 0.500 | +40.0 ({100 * low:+.1f} to {100 * high:+.1f}) | 5 | holds" in lines
    assert "none.json | | | | 200:205 | not run yet" in lines
    path = Path("results/claims.json")
    fault = f"{path} is not what claims.py and the results give; python -m evidence.report --claims writes it"
    stored = report.read_result(path)
    high = stored["claims"][0]["conditions"][0]["high"]
    changes: list[tuple[Json, list[str]]] = [
        ({}, []), ({"verdict": "reversed"}, [fault]), ({"more": 1}, [fault]), ({"n": 5.0}, [fault]),
        ({"high": high * (1 + 3e-9)}, []),  # scipy's versions differ by 1e-9
        *(({"high": high * (1 + change)}, [fault]) for change in (2e-6, -2e-6)),
    ]
    for change, faults in changes:
        changed = json.loads(json.dumps(stored))
        changed["claims"][0]["conditions"][0] |= change
        save_result(path, changed)
        assert list(report.check_result(path, False)) == faults, change
    changed["claims"][0]["conditions"].pop()
    for other in (changed, {key: value for key, value in stored.items() if key != "registered"}):
        save_result(path, other)
        assert list(report.check_result(path, False)) == [fault]
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
            digits = 2 if name == "near" else 1  # of a narrow interval
            assert said == [c["verdict"], f"{middle:+.{digits}f}".replace("-", "−")]
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
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    differences = 0.1 + 0.02 * np.sin(np.arange(12))
    both = registered(12, tolerance=0.03).conditions[0], registered(13).conditions[0]._replace(name="later")
    files = {"f.json": document(0.5 + differences, [0.5] * 12)}
    found = make_registered([Claim("more is better", "", "", both)], files.get)
    document_of_both = make_claims([claim("near")], FILES.get) | {"registered": found}
    fig = visualize_claims.draw_verdicts(document_of_both)
    _, ax, verdicts = fig.axes
    half = t_quantile(12) * differences.std(ddof=1) / np.sqrt(12)
    lines, texts = held(ax)["lines"], held(verdicts)["texts"]
    np.testing.assert_allclose(lines["plain x"][0], 100 * (differences.mean() + np.array([-half, half])))
    assert ("plain later" in lines, texts.count("holds"), texts.count("not run")) == (False, 1, 1)
    band = ax.collections[0].get_paths()[0].get_extents()
    assert (band.x0, band.x1) == pytest.approx((-3, 3))
    assert f"adjusted for up to {claims.N_COMPARISONS} comparisons: gives the verdict" in legend_of(fig)
    move_to(tmp_path, monkeypatch)
    assert failure(visualize_claims, [], capsys).startswith(f"error: cannot read {tmp_path}/results/claims.json")
    save_result(Path("results/claims.json"), document_of_both)
    assert visualize_claims.main([]) == 0
    check_pictures(Path("viz/claims"), ["verdicts", "earlier"])


@pytest.mark.parametrize("draw", [visualize_claims.draw_verdicts, visualize_claims.draw_earlier])
def test_no_two_texts_of_the_picture_overlap(draw: Any) -> None:
    fig = draw(report.read_result(ROOT / "results" / "claims.json"))
    fig.canvas.draw()
    boxes = [text.get_window_extent() for ax in fig.axes for text in ax.texts if text.get_text()]
    assert len(boxes) > 20
    assert not [(a, b) for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]
