"""The drawings of the networks, and the pictures of docs/how_capsules_work.md from small networks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import multimnist_capsnet as digits
import visualize_how_capsules_work as pictures
import visualize_networks as networks
from figure_checks import Capture, check_pictures
from helpers import EXPERIMENTS, failure, smallest
from support.files import UserError
from support.optimizers import count_params

STAGES = {  # written by hand from the scripts' docstrings
    "smallnorb_novel_viewpoint": [(32, 32, 1), (16, 16, 16), (8,), (5,), (5,)],
    "multimnist_capsnet": [(36, 36, 1), (28, 28, 32), (10, 10, 8), (10,), (256,), (512,), (36, 36, 1)],
    "mnist_affine_capsnet": [(28, 28, 1), (20, 20, 32), (6, 6, 8), (10,), (256,), (512,), (28, 28, 1)],
    "conv_matrix_capsules": [(28, 28, 1), (14, 14, 32), (14, 14, 4), (6, 6, 4), (4, 4, 8), (10,)],
}


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_a_drawing_has_the_shapes_of_the_network_and_all_its_parameters(name: str) -> None:
    script, stages_of = networks.NETWORKS[name]
    config = script.Config()
    params = next(iter(script.make_models(config).values())).init_params(np.random.default_rng(0))
    stages = stages_of(config, params)
    assert [stage.shape for stage in stages] == STAGES[name]
    drawn = {stage.prefix for stage in stages}
    assert sum(array.size for key, array in params.items() if key.split(".")[0] in drawn) == count_params(params)


def test_a_drawing_is_the_same_every_time(tmp_path: Path, capsys: Capture) -> None:
    for expected in ("wrote", "unchanged"):
        assert networks.main(["--networks", "conv_matrix_capsules", "--outdir", str(tmp_path)]) == 0
        assert capsys.readouterr().out.startswith(expected)


def test_pictures_from_small_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    smallest(monkeypatch)
    experiment = EXPERIMENTS["multimnist_capsnet"]
    argv = [*experiment.argv("--models capsnet"), "--checkpoint", "c.safetensors"]
    assert experiment.script.main(argv) == 0
    argv = ["--capsnet", "c.safetensors", "--outdir", "."]
    capsys.readouterr()
    assert pictures.main(argv) == 1  # three steps of training are not enough
    assert capsys.readouterr().err.endswith("train it longer\n")

    forward = digits.capsnet_forward
    labels = digits.make_data(digits.load_checkpoint(Path("c.safetensors"))[0]).test.labels

    def found(*args: object) -> tuple[np.ndarray, object]:
        lengths, cache = forward(*args)  # type: ignore[arg-type]
        lengths[0, labels[0]] = 0.9
        return lengths, cache

    monkeypatch.setattr(digits, "capsnet_forward", found)
    assert pictures.main(argv) == 0
    names = ("parts_and_wholes", "worked_example", "squash", "dynamic_routing", "coordinate_addition", "em_routing",
             "losses")  # fmt: skip
    check_pictures(Path(pictures.NAME), names)
    line = failure(pictures, ["--capsnet", "none"], capsys)
    assert line == "error: there is no checkpoint none\n"
    assert "was made with --dataset mnist, not strokes" in failure(pictures, [*argv, "--dataset", "strokes"], capsys)


def test_more_iterations_than_there_is_room_for() -> None:
    with pytest.raises(UserError, match="room for 3 iterations of routing, and not 5"):
        pictures.composite_example(digits.Config(routing_iters=5), {})
