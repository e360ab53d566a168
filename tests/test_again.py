"""again: the first seeds of a result are run again, and what differs is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

import compare_seeds
from evidence import again, claims
from helpers import Capture
from support.results import read_result, save_result
from support.statistics import read_comparison

TINY = "smallnorb_novel_viewpoint --seeds 3:5 --part cnn --threads 1"
FLAGS = "-- --dataset voxels --models cnn_matched --n-train-views 1 --n-test-views 1 --n-per-combo 1 --n-epochs 1"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of two seeds."""
    out = tmp_path_factory.mktemp("again") / "r.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out.parent)  # where the runs are kept
        assert compare_seeds.main([*TINY.split(), f"--out={out}", *FLAGS.split()]) == 0
    return out


def test_a_changed_number_is_the_only_one_that_differs(path: Path, capsys: Capture) -> None:
    document = read_result(path)
    first, second = document["parts"]["cnn"]["settings"]["default"]["runs"]
    for run in (first, second):
        run["models"]["cnn_matched"]["held_out_accuracy"] += 0.25
    save_result(path.with_name("changed.json"), document)
    where, out = f"{path.with_name('changed.json')}#cnn", path.with_name("again.json")
    assert again.main([where, f"--out={out}"]) == 0
    assert where in capsys.readouterr().out
    ((name, n_seeds, n, n_same, then, now),) = read_result(out)["tables"]["again"]["rows"]
    assert (name, n_seeds, n_same, then) == (where, 1, n - 1, pytest.approx(now + 0.25))
    assert n > 3
    assert again.compare(where, 2)[1:4] == [2, 2 * n, 2 * n - 2]


def test_what_cannot_be_run_again_is_said_in_a_line(path: Path, capsys: Capture) -> None:
    document = read_result(path)
    command = document["parts"]["cnn"]["command"].partition(" -- ")[0]
    for name, flags in (("old", "--networks cnn"), ("lost", "--dataset smallnorb --data-dir none")):
        document["parts"]["cnn"]["command"] = f"{command} -- {flags}"
        save_result(path.with_name(f"{name}.json"), document)
    for where, why in (
        (path, f"{path} has no part '', but cnn"),
        (f"{path}#capsules", f"{path} has no part 'capsules', but cnn"),
        (f"{path.with_name('old.json')}#cnn", "could not be run again: compare_seeds.py: error: "),
        (f"{path.with_name('lost.json')}#cnn", "again: seed 3, setting default: exit status 1: error: "),
    ):
        capsys.readouterr()
        assert again.main([str(where), f"--out={path.with_name('x.json')}"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert why in line
    assert not path.with_name("x.json").exists()


def test_every_side_of_the_registered_comparisons_is_there() -> None:
    places = again.registered()
    assert len(places) == len(set(places))
    for where in places:
        assert read_comparison(where)["seeds"][0] >= 2000
    assert {where.partition("#")[0] for where in places} == {
        f"results/{c.file}" for claim in claims.REGISTERED for c in claim.conditions}
