"""your_own_images.py: trainings on folders that the tests draw, predictions, and the sheet of pictures."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

import multimnist_capsnet as multimnist
from fast import optimizers
from fast.workers import SERIAL
from figure_checks import draw_coarsely, drawn
from helpers import (
    PICTURE_CLASSES as CLASSES, ROOT, Array, Capture, Patch, check_gradient, failure, usage_error, write_folder,
)
from more import visualize_your_own_images as figures, your_own_images as m
from smallnorb_novel_viewpoint import TrainState, init_state, save_checkpoint
from support import tables
from support.experiment import load_checkpoint
from support.figures import RIGHT, WRONG, darkened
from test_read_pictures import write_deep

Trained = tuple[Path, Path, dict[str, Any]]  # folder, checkpoint and result

TINY = ["--n-epochs=1", "--threads=1", "--quiet"]
SMALL = m.Config(image_size=20, class_names=("a", "b", "c"))


def train(folder: Path, *flags: str) -> None:
    assert m.main([f"--data-dir={folder}", *TINY, *flags]) == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A short training of the three networks."""
    root = tmp_path_factory.mktemp("images")
    folder = write_folder(root / "own", n=20)
    train(folder, "--seed=3", f"--checkpoint={root / 'run.npz'}", f"--out-json={root / 'run.json'}")
    return folder, root / "run.npz", json.loads((root / "run.json").read_text())


def test_result_and_table(trained: Trained, capsys: Capture) -> None:
    _, _, result = trained
    assert result["config"]["class_names"] == sorted(CLASSES)
    assert result["classes"] == {name: [16, 4] for name in sorted(CLASSES)}
    assert list(result["models"]) == list(m.MODEL_NAMES)
    text = m.format_result(result)
    assert "48 training and 12 test images of 20x20 pixels, grey, 3 classes" in text
    assert "grey levels 0 to " in text
    for name, model in result["models"].items():
        matrix = np.array(result["confusion"][name])
        assert matrix.sum(axis=1).tolist() == [4, 4, 4]
        assert np.trace(matrix) / 12 == pytest.approx(model["accuracy"])
        assert f"{name}: answers" in text
    cnn = {"accuracy": 0.75, "balanced_accuracy": 0.5, "n_params": 12345, "train_seconds": 1.5}
    assert "cnn          0.7500   0.5000     12,345      1.5" in m.format_result(result | {"models": {"cnn": cnn}})
    argv = [f"--data-dir={trained[0]}", "--n-epochs=1", "--threads=1", "--models=cnn"]
    assert m.main([*argv, "--colour=rgb", "--n-train=24", "--image-size=30"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("24 training and 6 test images of 30x30 pixels, rgb, 3 classes\n")  # before it trains
    assert "of 30x30 pixels, rgb, 3 classes" in out
    assert "capsules" not in out
    data = m.make_data(m.Config(data_dir=trained[0], seed=3))
    first, other = (m.resolved(m.Config(), one).pictures for one in (data._replace(test=data.train),
                                                                     data._replace(train=data.test)))
    assert first == result["config"]["pictures"] != other  # a checksum of the training images


def test_the_mean_over_classes_leaves_out_those_without_test_pictures() -> None:
    confusion = np.array([[8, 0, 2], [0, 0, 0], [1, 0, 0]])
    np.testing.assert_allclose(tables.class_accuracies(confusion), [0.8, np.nan, 0])
    assert tables.confusion_lines(confusion, ["a", "b", "c"])[1:] == [
        "  a    8    0    2    0.800",
        "  b    0    0    0        -",
        "  c    1    0    0    0.000",
    ]
    model = m.make_models(SMALL)["cnn"]._replace(answers=lambda _, images: np.eye(3)[[0] * len(images)])
    pictures = m.Labelled(np.zeros((4, 20, 20, 1), np.uint8), np.array([0, 0, 0, 2]))
    assert m.evaluate(model, {}, pictures, 3, SERIAL)[1] == {"accuracy": 0.75, "balanced_accuracy": 0.5}


def test_of_many_classes_the_greatest_errors_are_told() -> None:
    many = np.diag([9] * 13)
    assert tables.confusion_lines(many, "abcdefghijklm") == ["  no error"]
    many[3, 5], many[7, 1] = 4, 2
    lines = ["      4 of d as f", "      2 of h as b", "  least accurate: d 0.692, h 0.818"]
    assert tables.confusion_lines(many, "abcdefghijklm") == lines
    head, *lines = tables.describe_classes({f"c{k}": (k, 1000) for k in range(31)}, 20, "grey").splitlines()
    assert head == "465 training and 31,000 test images of 20x20 pixels, grey, 31 classes:"
    assert lines[29:] == ["  c29: 29 + 1,000", "  ..."]


def test_the_same_command_again_and_resumed(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """It goes on with the same pictures of the same classes alone."""
    folder, out, checkpoint = write_folder(tmp_path / "own", n=10), tmp_path / "r.json", tmp_path / "c.npz"
    flags = ["--models=cnn", f"--checkpoint={checkpoint}", f"--out-json={out}"]
    train(folder, *flags)
    train(folder, *flags)
    monkeypatch.setattr(m, "cost", lambda *_: pytest.fail("was measured, though nothing is left to train"))
    train(folder, *flags, "--resume")
    held = checkpoint.read_bytes(), out.read_bytes()

    def fault(*more: str) -> str:
        return failure(m, [f"--data-dir={folder}", *TINY, f"--checkpoint={checkpoint}", *more], capsys)

    assert fault("--models=capsules") == f"error: {checkpoint} holds cnn too: --resume keeps what it holds\n"
    assert "was made with --n-epochs 1, not 2" in fault("--models=cnn", "--resume", "--n-epochs=2")
    (folder / CLASSES[0] / "bild 0ß.png").unlink()
    assert f"{checkpoint} was made with other pictures" in fault("--models=cnn", "--resume")
    assert f"{out} was made with other pictures" in fault("--models=cnn", "--resume", f"--out-json={out}")
    (folder / CLASSES[0]).rename(folder / "bird")
    names = "was made with other class names: dark left,heller,猫, not bird,"
    assert names in fault("--models=cnn", "--resume")
    assert (checkpoint.read_bytes(), out.read_bytes()) == held


def test_answers_replace_answers_alone(trained: Trained, tmp_path: Path, capsys: Capture) -> None:
    folder, checkpoint, _ = trained
    picture, notes = str(next(folder.rglob("*.png"))), tmp_path / "notes.txt"
    argv = [f"--checkpoint={checkpoint}", "--predict", picture]
    notes.write_text("mine")
    line = failure(m, [*argv, f"--out={notes}"], capsys)
    assert line == f"error: {notes} is there, and is of something else: name another file\n"
    assert notes.read_text() == "mine"
    line = usage_error(m, [*argv, f"--out={checkpoint}"], capsys)
    assert "argument --out: is the same file as that of --checkpoint" in line
    for name in ("a.csv", "a.csv", "a.json", "a.json"):
        assert m.main([*argv, f"--out={tmp_path / name}"]) == 0


def test_colours_reach_every_network(tmp_path: Path) -> None:
    """Classes that differ in their colour alone."""
    rng = np.random.default_rng(0)
    for name, channel in (("red", 0), ("blue", 2)):
        (tmp_path / name).mkdir()
        for k in range(30):
            image = rng.integers(0, 30, (20, 20, 3))
            image[4:16, 4:16, channel] = 114 if channel else 43.5  # as grey they are alike
            Image.fromarray(image.astype(np.uint8)).save(tmp_path / name / f"{k}.png")
    out = tmp_path / "run.json"
    train(tmp_path, "--colour=rgb", "--n-epochs=15", f"--out-json={out}")
    accuracies = {name: model["accuracy"] for name, model in json.loads(out.read_text())["models"].items()}
    assert min(accuracies.values()) > 0.9, accuracies


def test_the_gradient_of_the_capsnet_on_colours() -> None:
    own = m.Config(image_size=21, colour="rgb", class_names=("a", "b", "c"), plain=True)
    sizes: dict[str, Any] = {"conv_channels": 3, "primary_types": 2, "decoder": (5, 7), "dtype": "float64"}
    config = dataclasses.replace(m.sized(multimnist.CapsNetConfig, own), **sizes)
    rng = np.random.default_rng(0)
    params = multimnist.capsnet_init(rng, config)
    assert params["decoder3.w"].shape[1] == 21 * 21 * 3
    images = rng.random((4, 21, 21, 3))
    batch = multimnist.Batch(images, np.array([[0], [1], [2], [1]]), images[:, None])

    def loss(**params: Array) -> float:
        return multimnist.capsnet_loss_and_grads(params, batch, 4, config)[0]["train_loss"]

    check_gradient(loss, params, multimnist.capsnet_loss_and_grads(params, batch, 4, config)[1], rng)


def test_the_seed_draws_the_test_set_and_the_order_of_the_images(trained: Trained) -> None:
    data, other = (m.make_data(m.Config(data_dir=trained[0], seed=seed)) for seed in (0, 1))
    assert (data.test.images != other.test.images).any()
    first, second = (m.training_batch(data, m.Config(seed=seed), 0).images for seed in (0, 1))
    assert (first != second).any()


def test_epochs_follow_from_the_number_of_pictures(trained: Trained) -> None:
    data = m.make_data(m.Config(data_dir=trained[0]))
    for n, expected in ((48, 30), (2000, 30), (6000, 10), (60_000, 1), (200_000, 1)):
        many = data._replace(train=m.Labelled(np.empty((n, 20, 1, 1), np.uint8), np.zeros(n, int)))
        assert m.resolved(m.Config(), many).n_epochs == expected
        assert m.resolved(m.Config(n_epochs=7), many).n_epochs == 7


def test_time_and_memory_of_a_training_follow_from_a_step_on_one_image_and_on_three(
    trained: Trained, monkeypatch: Patch
) -> None:
    """Of a network that takes 2 seconds and 3 for each image, and as many MiB."""
    clock, size, mib = [0.0], 4 * 1000, 1 << 20

    def loss_and_grads(progress: float, params: m.Params, part: m.Examples, n: int) -> Any:
        clock[0] += 2 + 3 * len(part.labels)
        used = np.zeros((2 + 3 * len(part.labels)) * mib, np.uint8)
        return {"train_loss": 0.0}, {"w": np.zeros_like(params["w"]) + used[0]}

    def update(state: TrainState, grads: Any, lr: float) -> None:
        clock[0] += 7

    monkeypatch.setattr(m.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(optimizers, "adamw_step", update)
    model = m.Network("cnn", lambda rng: {"w": np.ones(1000, np.float32)}, loss_and_grads, lambda p, x: x, part_size=8)
    data = m.make_data(m.Config(data_dir=trained[0], image_size=20))  # 48 and 12 images, two steps an epoch
    for threads, at_once in ((1, 1), (2, 2), (9, 4)):  # a batch of 32 is four parts
        seconds, memory = m.cost(model, SMALL, data, 6, threads)
        assert seconds == pytest.approx(6 * ((4 * 2 + 32 * 3) / at_once + 7) + 3 * 12 / threads * 3 / 3)
        assert memory == pytest.approx(at_once * (2 + 3 * 8) * mib + (3 + 4) * size, rel=0.01)


def test_a_training_that_takes_much_is_told_before(trained: Trained, monkeypatch: Patch, capsys: Capture) -> None:
    costs = {"capsules": m.Cost(7300, 3 << 30), "cnn": m.Cost(6600, 0), "capsnet": m.Cost(600, 2 << 30)}
    monkeypatch.setattr(m, "cost", ask := Mock(side_effect=lambda model, *_: costs[model.name]))
    train(trained[0])
    capsules, cnn = capsys.readouterr().err.splitlines()
    assert capsules.startswith("warning: capsules will train for about 2 hours and take about 3.0 GiB of memory; less")
    assert cnn.startswith("warning: cnn will train for about 110 minutes and take about 0.0 GiB of memory; less")
    assert [call.args[3] for call in ask.call_args_list] == [2, 2, 2]  # steps


def test_prediction_takes_folders_and_patterns_and_reads_as_the_training_did(trained: Trained, capsys: Capture) -> None:
    folder, checkpoint, _ = trained
    names = [folder / CLASSES[0], folder / "h*" / "bild 1*.png", folder / CLASSES[2] / "bild 0ß.png"]
    assert m.main([f"--checkpoint={checkpoint}", "--predict", *map(str, names)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert (head.split(), len(lines)) == (["image", *m.MODEL_NAMES], 20 + 11 + 1)
    assert len(m.predict(checkpoint, [folder / "h*"]).paths) == 20  # a pattern of folders
    answers = m.predict(checkpoint, [folder, folder / CLASSES[0]])  # each image once
    assert len(answers.paths) == 60
    config, states = load_checkpoint(m, checkpoint)
    data = m.make_data(dataclasses.replace(config, data_dir=folder))
    images = np.stack([m.square_of_set(path, 20, 1, config.grey_levels) for path in answers.paths])
    assert {x.tobytes() for x in images} == {x.tobytes() for part in (data.train, data.test) for x in part.images}
    for name, model in m.make_models(config).items():
        expected = m.answers_of(model, states[name].params, images, SERIAL)
        np.testing.assert_allclose(answers.by_model[name], expected, atol=1e-5)
    np.testing.assert_allclose(answers.by_model["cnn"].sum(axis=1), 1, atol=1e-5)
    answers = m.Answers([Path("x.png")], ("a", "b", "c"), {"cnn": np.array([[0.125, 0.75, 0.25]])}, [])
    assert m.format_answers(answers).splitlines()[1].split() == ["x.png", "b", "0.750"]


def test_a_broken_picture_is_named_and_the_others_are_answered(
    trained: Trained, tmp_path: Path, capsys: Capture
) -> None:
    folder, checkpoint, _ = trained
    argv, shots, empty = [f"--checkpoint={checkpoint}", "--predict"], tmp_path / "shots", tmp_path / "empty"
    shutil.copytree(folder / CLASSES[0], shots)
    (shots / "cut.png").write_bytes((shots / "bild 0ß.png").read_bytes()[:50])
    for place in (shots, empty):
        place.mkdir(exist_ok=True)
        (place / "notes.txt").write_text("x")
    line = failure(m, [*argv, str(empty)], capsys)
    assert line.startswith(f"error: 1 image cannot be read: {empty} is not an image that can be read: ")
    names = [str(shots), str(tmp_path / "no*.png")]
    assert m.main([*argv, *names, f"--out={tmp_path / 'A.CSV'}"]) == 1
    printed, error = capsys.readouterr()
    assert len(printed.splitlines()) == 21
    assert re.fullmatch(r"error: 2 images cannot be read: .*cut\.png.*no\*\.png.*\n", error)
    with (tmp_path / "A.CSV").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 20 * 3
    assert list(rows[0]) == ["file", "model", "class", *sorted(CLASSES)]
    for row in rows:
        assert row["class"] == max(sorted(CLASSES), key=lambda name: float(row[name]))
    assert m.main([*argv, *names, f"--out={tmp_path / 'a.json'}"]) == 1
    found = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert [(row["file"], row["class"]) for row in found] == [(row["file"], row["class"]) for row in rows]
    assert set(found[0]["answers"]) == set(CLASSES)


def test_grey_levels_of_the_training_hold_for_predictions(tmp_path: Path, capsys: Capture) -> None:
    folder = write_deep(tmp_path / "deep", ".tif", lambda x: (x / 255 - 0.5).astype(np.float32), n=10)
    checkpoint = tmp_path / "run.npz"
    train(folder, "--models=cnn", f"--checkpoint={checkpoint}")
    assert "grey levels -0.5 to 0.5" in capsys.readouterr().out
    saved, states = load_checkpoint(m, checkpoint)
    assert saved.grey_levels == {"floating point": [-0.5, 0.5]}
    save_checkpoint(checkpoint, m.EXPERIMENT, dataclasses.replace(saved, n_epochs=9), states.values())
    argv = [f"--checkpoint={checkpoint}", "--predict", str(folder)]
    assert m.main(argv) == 0
    assert re.match(r"warning: .* holds \d of 9 epochs of cnn; finish it with your_own_images", capsys.readouterr().err)
    other = write_deep(tmp_path / "other", ".png", lambda x: (257 * x).astype(np.uint16), n=1)
    assert m.main([*argv[:2], str(other)]) == 1
    assert "no image of the training does" in capsys.readouterr().err
    assert "--image-size: --predict neither trains nor tests" in usage_error(m, [*argv, "--image-size=64"], capsys)


def test_the_sheet(trained: Trained, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    draw_coarsely(monkeypatch)
    folder, checkpoint, _ = trained
    argv = [f"--data-dir={folder}", f"--outdir={tmp_path}"]
    for flags in ([], ["--colour=rgb"], [f"--checkpoint={checkpoint}"]):
        assert figures.main([*argv, *flags]) == 0
    assert (tmp_path / "your_own_images" / "pictures.png").stat().st_size > 5000
    assert "was made with --colour" in failure(figures, [*argv, *flags, "--colour=rgb"], capsys)
    other = write_folder(tmp_path / "other", n=5, seed=1)
    assert "has not the images" in failure(figures, [f"--data-dir={other}", *argv[1:], *flags], capsys)


def test_the_sheet_shows_test_pictures_and_what_the_networks_make_of_them(
    trained: Trained, tmp_path: Path, capsys: Capture
) -> None:
    folder, checkpoint, _ = trained
    config, states = load_checkpoint(m, checkpoint)
    unfinished = tmp_path / "unfinished.npz"
    save_checkpoint(unfinished, m.EXPERIMENT, dataclasses.replace(config, n_epochs=9), states.values())
    shown = figures.shown_pictures(figures.Config(data_dir=folder), figures.Options(checkpoint=unfinished), ())
    assert capsys.readouterr().err.startswith(f"warning: {unfinished} holds 1 of 9 epochs of ")
    test = m.make_data(dataclasses.replace(config, data_dir=folder)).test
    chosen = np.argsort(test.labels, kind="stable")[[0, 1, 2, 4, 5, 6, 7, 9, 10, 11]]  # ten of twelve, of all classes
    np.testing.assert_array_equal(shown[0], m.in_floats(test.images[chosen]))
    assert shown[1].tolist() == test.labels[chosen].tolist()
    for name, model in m.make_models(config).items():
        answers = m.answers_of(model, states[name].params, test.images[chosen], SERIAL)
        assert shown[3][name].tolist() == answers.argmax(axis=1).tolist()
    np.testing.assert_array_equal(shown[4], m.reconstructions(states["capsnet"].params, shown[0], config))


def test_right_and_wrong_answers_have_their_colours() -> None:
    images = np.random.default_rng(0).random((2, 32, 32, 1))
    answers = {"cnn": np.zeros(2, int), "capsules": np.arange(2)}
    drawn(lambda: figures.sheet(images, np.array([0, 1]), ["cat", "dog"], answers, 1 - images))
    texts = drawn(lambda: figures.sheet(images, np.array([0, 1]), ["cat", "dog"], answers, None)).axes[0].texts
    assert [text.get_text() for text in texts] == ["cat", "cat", "cat", "dog", "cat", "dog", "CNN", "capsules"]
    right, wrong = darkened(RIGHT), darkened(WRONG)
    assert [texts[k].get_color() for k in (1, 2, 4, 5)] == [right, right, wrong, right]


def test_the_classes_that_the_sheet_can_only_number_are_named(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """Of those that are shown."""
    write_folder(tmp_path / "train", ["cat", "犬", "猫"], n=3)
    write_folder(tmp_path / "test", ["cat", "犬"], n=10, seed=1)
    monkeypatch.setattr(figures, "fonts_for", lambda names: (["DejaVu Sans"], {*"犬猫"} & {*"".join(names)}))
    shown = figures.shown_pictures(figures.Config(data_dir=tmp_path), figures.Options(), ())
    assert capsys.readouterr().out == "class 2 is 犬\n"
    assert {text.get_text() for text in figures.sheet(*shown).axes[0].texts} >= {"cat", "class 2"}


def test_names_in_any_alphabet(monkeypatch: Patch) -> None:
    names, shown = ["cat", "a" * 20, "猫", "$a$", "Ж"], ["cat", "a" * 9 + "…", "class 3", r"\$a\$", "Ж"]
    assert figures.fonts_for(["cat", "Ж", "é"]) == (["DejaVu Sans"], set())
    assert [figures.short_name(k, name, {"猫"}) for k, name in enumerate(names, 1)] == shown
    real, cjk = figures.get_font, dataclasses.replace(figures.fontManager.ttflist[0], fname="c.ttf", name="A CJK font")
    font = Mock(get_char_index=lambda code: code)
    monkeypatch.setattr(figures, "get_font", lambda path: font if path == "c.ttf" else real(path))
    monkeypatch.setattr(figures.fontManager, "ttflist", [*figures.fontManager.ttflist, cjk])
    assert figures.fonts_for(names) == (["DejaVu Sans", "A CJK font"], set())


def test_the_page(tmp_path: Path, monkeypatch: Patch) -> None:
    """What it draws are sets, and the counts that it prints are theirs. The flags of its commands: test_pages.py."""
    page = (ROOT / "docs" / "your_own_images.md").read_text(encoding="utf-8")
    drawings = re.findall(r"python - <<'END'\n(.*?)END\n", page, re.DOTALL)
    folders = re.findall(r"^python -m more\.your_own_images --data-dir (\w+)", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    for drawing, folder in zip(drawings, folders, strict=True):
        exec(drawing, {})
        data = m.make_data(m.Config(data_dir=Path(folder)))
        counts = [np.bincount(part.labels).tolist() for part in (data.train, data.test)]
        by_class = dict(zip(data.classes, zip(*counts, strict=True), strict=True))
        assert tables.describe_classes(by_class, data.train.images.shape[1], "grey") in page


@pytest.mark.parametrize(("schedule", "n_rising"), [("constant", 30), ("linear", 36)])
def test_the_margin_rises_over_ten_epochs_or_all_and_each_epoch_has_an_order(
    schedule: str, n_rising: int, trained: Trained, monkeypatch: Patch
) -> None:
    """Where the learning rate falls, its end is known, and the margin rises until then."""
    data, seen = m.make_data(m.Config(data_dir=trained[0])), []

    def loss_and_grads(progress: float, params: Any, part: m.Examples, n: int) -> tuple[dict[str, float], Any]:
        seen.append((progress, part.images.tobytes()))
        return {"train_loss": 0.0}, {"w": np.zeros(1, np.float32)}

    model = m.make_models(SMALL)["cnn"]._replace(
        loss_and_grads=loss_and_grads, answers=lambda _, images: np.zeros((len(images), 3)), part_size=16
    )
    monkeypatch.setattr(m, "BATCH_SIZE", 16)
    monkeypatch.setattr(optimizers, "adamw_step", step := Mock(wraps=optimizers.adamw_step))
    config = m.Config(n_epochs=12, lr_schedule=schedule)  # of three steps
    m.train(model, config, data, TrainState("cnn", {"w": np.ones(1, np.float32)}), SERIAL, lambda *_: None)
    np.testing.assert_allclose([progress for progress, _ in seen], np.minimum(1, np.arange(36) / (n_rising - 1)))
    assert len({images for _, images in seen}) == 36
    steps = np.arange(36)
    falls = 1 - steps / 36 if schedule == "linear" else 1
    rates = [call.args[2] for call in step.call_args_list]
    np.testing.assert_allclose(rates, m.LEARNING_RATES["cnn"] * falls * np.minimum(1, 0.1 + 0.9 * steps / 20))


def test_a_picture_is_drawn_again_from_the_longest_capsule() -> None:
    net, images = m.sized(multimnist.CapsNetConfig, SMALL), np.random.default_rng(0).random((5, 20, 20, 1), np.float32)
    params = init_state(m.make_models(SMALL)["capsnet"], SMALL).params
    lengths, cache = multimnist.capsnet_forward(params, images, net)
    expected = multimnist.reconstruct(params, cache.v, lengths.argmax(axis=1)[:, None])[:, 0, ..., None]
    np.testing.assert_allclose(m.reconstructions(params, images, SMALL), expected, atol=1e-6)
