"""Write explorer.html: one page, without a server or a network, in which a person tries two capsule networks.

    python -m explorer.make_explorer --multimnist multimnist.npz --viewpoint viewpoint.npz

The page holds the weights of two capsule networks and of two CNNs, and their forward passes in JavaScript
(``explorer/page/``). In it one draws two digits and sees which capsules find them and what a CNN says, follows the
votes of one capsule through the routing, moves the sixteen numbers of a digit capsule, drags votes in the plane, and
turns an object. Large arrays of weights are rounded to 8 or 6 bits, with one scale for each index of the last axis; the
accuracy on the test sets is measured here with the weights as trained and with the rounded ones, and the page states
both.

Without --multimnist or --viewpoint the network is trained first, by the default flags of its script. With --keep the
networks and their numbers are those of the page that is there, and its text, style and scripts are written anew.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import math
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import ndimage

import multimnist_capsnet as multimnist
import smallnorb_novel_viewpoint as smallnorb
from fast.workers import Workers, blas_threads, default_threads
from smallnorb_novel_viewpoint import (
    FOLDER, INPUT, OUTPUT, RunOptions, SettingError, Settings, Stream, TrainState, UserError, from_json, generator,
    one_line, parse, print_message, script, setting, settings_of,
)
from evidence.report import differing
from support.experiment import ROOT, load_checkpoint, require_writable
from support.figures import DATASET_NAMES, load_finished, settings_in, with_reported_seed, write_if_changed
from support.results import git_commit
from support.statistics import describe_sample
from visualize_multimnist_capsnet import MEDIAN_OF

Array = np.ndarray
Params = dict[str, Array]

TEMPLATE = Path(__file__).resolve().parent / "page"
N_EXAMPLES = 24  # test composites in the page
N_TRAY = 6  # more of them that the capsules alone get right, and as many that the CNN alone does
N_CHOICE = 1000  # composites of training digits, and as many of these digits alone, to choose the page's rule on
RARE = 0.01  # of these: so many may each of two rules reject, though they hold digits
DIGIT_MODELS = ("capsnet", "cnn_pool")
SMALL, LARGE = 1 << 10, 1 << 18  # entries: below SMALL nothing is rounded; above LARGE it is to 6 bits, else to 8
VIEW_MODELS = ("capsules", "cnn_matched")
RESULTS = ROOT / "results"
RING_STEP = 5  # degrees, between the views that the page's ring shows


# --- Rounding ---------------------------------------------------------------------------------------------------------


def quantised(w: Array) -> tuple[Array, Array]:
    """w (..., F) -> int8 of the same shape and scales (F,): w is about ``q * scale``, off by half a scale at most."""
    scale = np.abs(w).reshape(-1, w.shape[-1]).max(axis=0) / (127 if w.size <= LARGE else 31)
    scale = np.maximum(scale, np.finfo(np.float32).tiny).astype(np.float32)
    return np.rint(w / scale).astype(np.int8), scale


def is_rounded(w: Array) -> bool:
    return w.ndim > 1 and w.size >= SMALL


def rounded(params: Mapping[str, Array]) -> Params:
    """The parameters as the page has them."""
    return {key: np.multiply(*quantised(w), dtype=w.dtype) if is_rounded(w) else w for key, w in params.items()}


def packed(tensors: Mapping[str, Array]) -> tuple[list[dict[str, Any]], bytes]:
    """Named arrays -> a list of their names, shapes, types and positions, and their bytes, one array after the other.

    Large float arrays are int8, followed by their scales; other ones float32. uint8 stays.
    """
    entries, blob = [], b""
    for name, array in tensors.items():
        kind, parts = "float32", {"at": array.astype(np.float32)}
        if array.dtype == np.uint8:
            kind, parts = "uint8", {"at": array}
        elif is_rounded(array):
            kind, parts = "int8", dict(zip(("at", "scaleAt"), quantised(array), strict=True))
        entry: dict[str, Any] = {"name": name, "shape": list(array.shape), "type": kind}
        for key, part in parts.items():
            entry[key] = len(blob)
            blob += part.tobytes() + bytes(-part.nbytes % 4)  # a Float32Array begins at a multiple of four
        entries.append(entry)
    return entries, blob


# --- What the sixteen numbers of a digit capsule do -------------------------------------------------------------------

STEP = 0.25  # [Sabour 2017, sec. 5.1]
N_CAPSULES = 48  # of each class, from test composites
LEAST_EFFECT = 0.5  # standard deviations


def shape_measures(pictures: Array) -> dict[str, Array]:
    """Pictures (N, H, W) in [0, 1] -> what can be measured of a digit's shape, (N,) each, in pixels but for slant.

    Positions and extents are moments of the brightness. The stroke width is twice area over outline: a line of width w
    and length n has an area of w n and an outline of 2 n, which is the sum of its gradient's lengths. The loop is the
    area of the dark regions that bright pixels enclose.
    """
    p = pictures.astype(float)
    rows, columns = np.arange(p.shape[1])[:, None], np.arange(p.shape[2])
    total = p.sum(axis=(1, 2)) + 1e-9

    def mean(values: Array) -> Array:
        return (p * values).sum(axis=(1, 2)) / total

    y, x = mean(rows), mean(columns)
    dy, dx = rows - y[:, None, None], columns - x[:, None, None]
    variance_x, variance_y = mean(dx * dx), mean(dy * dy)
    down, up = p[:, 1:, 1:] - p[:, :-1, :-1], p[:, :-1, 1:] - p[:, 1:, :-1]  # differences along both diagonals
    outline = np.sqrt((down * down + up * up) / 2).sum(axis=(1, 2))
    bright = p > 0.5
    holes = [ndimage.binary_fill_holes(b).sum() - b.sum() for b in bright]
    return {
        "stroke width": 2 * total / (outline + 1e-9),
        "slant": -mean(dx * dy) / (variance_y + 1e-9),  # rows count downwards: positive leans to the right
        "width": 4 * np.sqrt(variance_x),
        "height": 4 * np.sqrt(variance_y),
        "loop": np.array(holes, float),
        "left to right": x,
        "up and down": y,
    }


def class_capsules(config: Any, params: Params, test: multimnist.Batch, label: int) -> Array:
    """Capsules (n, D) of a class, from the first test composites that hold its digit."""
    chosen = np.flatnonzero((test.labels == label).any(axis=1))[:N_CAPSULES]
    if not len(chosen):
        raise UserError(f"the test composites hold no {label}: take a checkpoint with a larger --n-test")
    _, cache = multimnist.capsnet_forward(params, test.images[chosen], config)
    return cache.v[:, label]


def pictures_of(params: Params, capsules: Array, label: int) -> Array:
    """Capsules (n, D) of a class -> what the decoder draws of them, (n, H, W)."""
    v = np.zeros((len(capsules), multimnist.N_CLASSES, capsules.shape[1]), capsules.dtype)
    v[:, label] = capsules
    return multimnist.reconstruct(params, v, np.full((len(capsules), 1), label))[:, 0]


def dimension_names(config: Any, params: Params, test: multimnist.Batch) -> list[list[dict[str, Any]]]:
    """For each class and dimension, the measure that it changes most and by how much.

    ``effect``: change of the measure from -0.25 to +0.25, mean over capsules of test digits, in standard deviations of
    the measure over these digits. A dimension whose largest effect is below 0.5 has no name.
    """
    names = []
    for label in range(multimnist.N_CLASSES):
        capsules = class_capsules(config, params, test, label)
        n, D = capsules.shape
        spread = {key: values.std() for key, values in shape_measures(pictures_of(params, capsules, label)).items()}
        moved = np.concatenate([capsules + sign * STEP * np.eye(D)[d] for d in range(D) for sign in (1, -1)])
        measures = shape_measures(pictures_of(params, moved.astype(capsules.dtype), label))
        effects = {
            key: np.subtract(*values.reshape(D, 2, n).mean(axis=2).T) / spread[key]
            for key, values in measures.items()
            if spread[key] > 0.05  # pixels; or a class that has no loops would be named by its noise
        }
        rows = []
        for d in range(D):
            name = max(effects, key=lambda key: abs(effects[key][d]), default="")  # none where there is one capsule
            effect = float(effects[name][d]) if name else 0.0
            rows.append({"name": name if abs(effect) >= LEAST_EFFECT else "", "effect": round(effect, 2)})
        names.append(rows)
    return names


# --- One digit or two -------------------------------------------------------------------------------------------------


class Evidence(NamedTuple):
    """What the page's rule of one digit or two looks at, (N,) each."""

    lengths: Array  # of the longest capsule
    shares: Array  # part of the first reconstruction's squared error that the second, laid over it, removes
    explained: Array  # of the image's square, by the reconstructions of the digits that are found
    widths: Array  # of the strokes, pixels
    outlines: Array  # of the strokes, pixels
    inks: Array  # sums over the image, in white pixels


def evidence(config: Any, params: Params, images: Array, explains: float, workers: Workers) -> Evidence:
    """Images (N, H, W). A second digit is found where its share is at least ``explains``."""

    def work(start: int) -> Array:
        x = images[start : start + multimnist.EVALUATION_BATCH]
        lengths, cache = multimnist.capsnet_forward(params, x, config)
        drawn = multimnist.reconstruct(params, cache.v, multimnist.top_labels(lengths, 2))  # (n, 2, H, W)
        first, both = (np.square(x - picture).sum(axis=(1, 2)) for picture in (drawn[:, 0], drawn.max(axis=1)))
        shares = 1 - both / first
        explained = 1 - np.where(shares >= explains, both, first) / np.square(x).sum(axis=(1, 2))
        widths, inks = shape_measures(x)["stroke width"], x.sum(axis=(1, 2))
        return np.stack([lengths.max(axis=1), shares, explained, widths, 2 * inks / widths, inks])

    parts = workers.map(work, range(0, len(images), multimnist.EVALUATION_BATCH))
    return Evidence(*np.concatenate(list(parts), axis=1))


def even_threshold(one: Array, two: Array) -> float:
    """The value below which are as many of ``two`` as there are of ``one`` at or above it."""
    return float(min(np.sort(np.concatenate([one, two])), key=lambda t: max((one >= t).mean(), (two < t).mean())))


def n_found(rule: Mapping[str, float], seen: Evidence) -> Array:
    """How many digits the page finds in each image, 0, 1 or 2."""
    is_digit = (seen.lengths >= rule["least"]) & (seen.explained >= rule["explained"])
    is_drawn = (seen.widths <= rule["widest"]) & (seen.outlines <= rule["outline"]) & (seen.inks <= rule["most"])
    return np.where(is_digit & is_drawn, 1 + (seen.shares >= rule["explains"]), 0)


def one_or_two(config: Any, params: Params, data: multimnist.Data, workers: Workers) -> dict[str, float]:
    """The page's rule, chosen on composites of training digits and on these digits alone, and how often it is right.

    ``explains`` errs equally often on both. Of both together, one in a hundred has a shorter longest capsule than
    ``least``, and one in a hundred less ``explained``; none has wider strokes than ``widest``, a longer ``outline`` of
    them or more ink than ``most``. ``two`` and ``one``: the parts of test composites, and of their first digits alone,
    in which the page finds as many digits as there are.
    """
    choice = data.train.render(*data.train.draw(generator(config.seed, Stream.EVALUATION, 1), N_CHOICE))

    def look(images: Array, explains: float) -> Evidence:
        return evidence(config, params, images, explains, workers)

    explains = round(even_threshold(*(look(images, 0).shares for images in (choice.sources[:, 0], choice.images))), 3)
    seen = look(np.concatenate([choice.sources[:, 0], choice.images]), explains)
    rule = {
        "explains": explains,
        "least": round(float(np.quantile(seen.lengths, RARE)), 3),
        "explained": round(float(np.quantile(seen.explained, RARE)), 3),
        "widest": round(float(seen.widths.max()), 2),
        "outline": round(float(seen.outlines.max()), 1),
        "most": round(float(seen.inks.max()), 1),
    }
    one, two = (n_found(rule, look(images, explains)) for images in (data.test.sources[:, 0], data.test.images))
    return rule | {"nChoice": N_CHOICE, "one": float((one == 1).mean()), "two": float((two == 2).mean())}


# --- The two networks as the page has them ----------------------------------------------------------------------------


class Part(NamedTuple):
    """One experiment's part of the page."""

    about: dict[str, Any]  # for the page's script, as JSON
    tensors: Params


def run_of(config: Any, data_name: str) -> dict[str, Any]:
    """What the page says of a training."""
    return {
        "seed": config.seed,
        "dataset": DATASET_NAMES[data_name],
        "epochs": config.n_epochs,
        "config": dataclasses.asdict(config) | {"data_dir": None},
    }


def registered_of_digits() -> dict[str, Any]:
    """Two registered comparisons on MNIST's overlapping digits, each as ``compared``. ``composites``: capsules and a
    CNN. ``iterations``: three of routing, called ``capsules``, and one, called ``cnn``."""
    found = {}
    for name, sides in {"composites": DIGIT_MODELS, "iterations": ("three", "one")}.items():
        path = RESULTS / multimnist.EXPERIMENT / f"registered_{name}_48000.json"
        if path.exists():
            of_sides = zip(sides, DIGIT_MODELS if name == "composites" else ("capsnet", "capsnet"), strict=True)
            found[name] = compared(*(
                [run["models"][model]["set_accuracy"] for run in settings_in(Path(f"{path}#{part}"))[0]["runs"]]
                for part, model in of_sides))
    return found


def compared(capsules: Sequence[float], cnn: Sequence[float]) -> dict[str, Any]:
    """How capsules and a CNN do: the mean of each over seeds, and their difference with its 95 % interval."""
    difference = describe_sample(np.subtract(capsules, cnn).tolist())
    return difference | {"capsules": float(np.mean(capsules)), "cnn": float(np.mean(cnn))}


def registered_study(path: Path, config: smallnorb.Config) -> dict[str, Any] | None:
    """The same of the registered comparison, whose networks are in two parts of a file. None where it has not been run,
    or has other settings than the page."""
    sides = []
    for part, name in zip(("capsules", "cnn"), VIEW_MODELS, strict=True):
        found = settings_in(Path(f"{path}#{part}"))[0] if path.exists() else None
        if found is None or differing(config, found["config"], part == "cnn"):
            return None
        sides.append([run["models"][name]["held_out_accuracy"] for run in found["runs"]])
    return compared(*sides)


def tray(is_right: Mapping[str, Array], is_two: Array) -> Array:
    """The first test composites after the page's examples that one of the two models alone gets right, in turn; of the
    capsules' those in which the page finds two digits."""
    capsules, cnn = is_right["capsnet"][N_EXAMPLES:], is_right["cnn_pool"][N_EXAMPLES:]
    alone = [N_EXAMPLES + np.flatnonzero(found)[:N_TRAY]
             for found in (capsules & ~cnn & is_two[N_EXAMPLES:], cnn & ~capsules)]
    n = min(map(len, alone))
    return np.stack([indices[:n] for indices in alone], axis=1).ravel()


def digits_part(config: Any, states: Mapping[str, Any], data: multimnist.Data, threads: int) -> Part:
    """The capsule network and the CNN with pooling of multimnist_capsnet.py, test composites and the names of the
    capsules' dimensions."""
    models, rows, is_right = multimnist.make_models(config), [], {}
    params = {name: rounded(states[name].params) for name in DIGIT_MODELS}
    even = multimnist.capsnet_model(dataclasses.replace(config, routing_iters=1))  # the first couplings are all 1 / J
    with Workers(threads) as workers:
        for name in DIGIT_MODELS:
            both = states[name].params, params[name]
            scores = [multimnist.assess(models[name], p, data.test, workers)[0] for p in both]
            answers = [np.sort(multimnist.top_labels(s, 2)) for s in scores]
            before, after = ((two[:, :, None] == data.test.labels[:, None]).sum(axis=(1, 2)) for two in answers)
            is_right[name], changed = after == 2, int((answers[0] != answers[1]).any(axis=1).sum())
            rows += [{"model": name, "metric": "set_accuracy", "before": float((before == 2).mean()),
                      "after": float((after == 2).mean()), "changed": changed},
                     {"model": name, "metric": "digit_accuracy", "before": float(before.mean() / 2),
                      "after": float(after.mean() / 2)}]
        even_accuracy = multimnist.evaluate(even, params["capsnet"], data.test, workers)["set_accuracy"]
        naming = one_or_two(config, params["capsnet"], data, workers)
        seen = evidence(config, params["capsnet"], data.test.images, naming["explains"], workers)
    in_tray = tray(is_right, n_found(naming, seen) == 2)
    about = {
        "run": run_of(config, data.name),
        "nTest": len(data.test.labels),
        "accuracies": rows,
        "evenAccuracy": even_accuracy,
        "naming": naming,
        "config": {
            "imageSize": config.image_size,
            "kernel": multimnist.KERNEL,
            "side": config.primary_side,
            "types": config.primary_types,
            "primarySize": multimnist.PRIMARY_SIZE,
            "classes": multimnist.N_CLASSES,
            "capsuleSize": multimnist.CAPSULE_SIZE,
            "iterations": config.routing_iters,
        },
        "nExamples": N_EXAMPLES,
        "labels": [*data.test.labels[:N_EXAMPLES].tolist(), *data.test.labels[in_tray].tolist()],
        "names": dimension_names(config, params["capsnet"], data.test),
    }
    shown = np.concatenate([data.test.sources[:N_EXAMPLES], data.test.sources[in_tray]])
    pool = {f"pool.{key}": w for key, w in states["cnn_pool"].params.items()}
    return Part(about, {**states["capsnet"].params, **pool, "examples": np.rint(255 * shown).astype(np.uint8)})


def opening(config: Any, params: Mapping[str, Params]) -> dict[str, int]:
    """The object, azimuth and elevation (degrees) with which the page opens: where the two networks differ most.

    For each object and for elevations in steps of 10 degrees, the held-out azimuths of the ring are counted that a
    network classifies correctly. The azimuth is the middle one of those that the better network alone does.
    """
    azimuths = np.arange(0, 360, RING_STEP)
    azimuths = azimuths[smallnorb.in_range(azimuths, config.test_azimuths)]
    models, objects, found = smallnorb.make_models(config), smallnorb.points_of(config), []
    for label in range(smallnorb.N_CLASSES):
        for elevation in range(math.ceil(config.test_elevations[0]), math.floor(config.test_elevations[1]) + 1, 10):
            labels, elevations = np.full(len(azimuths), label), np.full(len(azimuths), elevation)
            images = smallnorb.render_voxels(labels, azimuths, elevations, None, objects)
            images = smallnorb.standardized(images) if config.standardize == "image" else images
            scores = [models[name].forward(params[name], images)[0] for name in VIEW_MODELS]
            better, other = (s.argmax(axis=1) == label for s in scores)
            if other.sum() > better.sum():
                better, other = other, better
            alone = azimuths[better & ~other] if (better & ~other).any() else azimuths
            found.append((better.sum() - other.sum(), label, int(alone[len(alone) // 2]), elevation))
    _, label, azimuth, elevation = max(found, key=lambda view: view[0])
    return {"object": label, "azimuth": azimuth, "elevation": elevation}


def viewpoint_part(config: Any, states: Mapping[str, Any]) -> Part:
    """The matrix capsules and the CNN with as many parameters of smallnorb_novel_viewpoint.py, and the objects."""
    data, models = smallnorb.make_data(config), smallnorb.make_models(config)
    rows: list[dict[str, Any]] = []
    tensors: Params = {}
    for name in VIEW_MODELS:
        params = states[name].params
        both = params, rounded(params)
        before, after = (smallnorb.evaluate(models[name], p, data) for p in both)
        for split in ("familiar", "held_out"):
            images = getattr(data, split).images
            answers = [smallnorb.predict_scores(models[name], p, images).argmax(axis=1) for p in both]
            rows.append({"model": name, "metric": (key := f"{split}_accuracy"), "before": before[key],
                         "after": after[key], "changed": int((answers[0] != answers[1]).sum())})
        tensors |= {f"{name}.{key}": w for key, w in params.items()}
    points, mask = smallnorb.points_of(config)
    registered = RESULTS / smallnorb.EXPERIMENT / f"registered_{config.held_out_angle}s.json"
    about = {
        "run": run_of(config, config.dataset),
        "study": registered_study(registered, config),
        "accuracies": rows,
        "nTest": len(data.held_out.labels),
        "heldOut": config.held_out_angle,
        "trainAzimuths": config.train_azimuths,
        "testAzimuths": config.test_azimuths,
        "trainElevations": config.train_elevations,
        "opening": opening(config, {name: rounded(states[name].params) for name in VIEW_MODELS}),
        "classes": config.classes,
        "objects": [np.round(p[m > 0], 6).tolist() for p, m in zip(points, mask, strict=True)],
        "config": {
            "imageSize": smallnorb.IMAGE_SIZE,
            "kernel": smallnorb.CONV_KERNEL,
            "primaries": smallnorb.N_PRIMARY,
            "classes": smallnorb.N_CLASSES,
            "lambdas": config.lambdas,
            "varianceFloor": config.variance_floor,
            "standardize": config.standardize == "image",
            "loss": config.loss,
        },
    }
    return Part(about, tensors)


# --- The page ---------------------------------------------------------------------------------------------------------


def make_page(parts: Mapping[str, Part]) -> bytes:
    """The page with its style, scripts and weights inside."""
    about: dict[str, Any] = {name: dict(part.about) for name, part in parts.items()}
    blob = b""
    for name, part in parts.items():
        about[name]["tensors"], data = packed(part.tensors)
        about[name]["offset"] = len(blob)
        blob += data
    about["commit"] = git_commit()
    return page_of(about, base64.b64encode(gzip.compress(blob, 9, mtime=0)).decode())


def page_of(about: Mapping[str, Any], weights: str) -> bytes:
    """The page of these networks, with the text, style and scripts of ``explorer/page/`` and their commit."""
    page = (TEMPLATE / "explorer.html").read_text(encoding="utf-8")
    for name in ("explorer.css", "networks.js", "explorer.js"):
        page = page.replace(f"{{{{{name}}}}}", (TEMPLATE / name).read_text(encoding="utf-8"))
    is_mnist = about["digits"]["run"]["dataset"] == DATASET_NAMES["mnist"]
    about = {**about, "registered": registered_of_digits() if is_mnist else {},
             "pageCommit": git_commit("explorer/page")}
    described = json.dumps(about, separators=(",", ":")).replace("</", "<\\/")
    page = page.replace("{{about}}", described).replace("{{megabytes}}", f"{len(weights) / 1e6:.1f}")
    return page.replace("{{weights}}", weights).encode()


def read_page(path: Path) -> tuple[dict[str, Any], str]:
    """What the page at ``path`` says of its networks, and their weights as they stand there."""
    text = path.read_text(encoding="utf-8", errors="replace")
    found = [re.search(f'id="{name}">(.*?)</script>', text, re.DOTALL) for name in ("about", "weights")]
    if not (found[0] and found[1]):
        raise UserError(f"{path} is no page of this script, and has no networks to keep")
    try:
        about, weights = json.loads(found[0][1]), found[1][1]
        unpacked(about, weights)
    except (ValueError, KeyError, TypeError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is damaged, and has no networks to keep: {one_line(error)}") from None
    return about, weights


def unpacked(about: Mapping[str, Any], weights: str) -> dict[str, Params]:
    """The networks' parameters as the page has them, by part: the inverse of ``packed``."""
    blob = gzip.decompress(base64.b64decode(weights))
    params: dict[str, Params] = {}
    for part in ("digits", "viewpoint"):
        params[part] = {}
        for entry in about[part]["tensors"]:
            at, n = about[part]["offset"] + entry["at"], math.prod(entry["shape"])
            w = np.frombuffer(blob, entry["type"], n, at).reshape(entry["shape"])
            if entry["type"] == "int8":
                scale = np.frombuffer(blob, "float32", w.shape[-1], about[part]["offset"] + entry["scaleAt"])
                w = np.multiply(w, scale, dtype=np.float32)
            params[part][entry["name"]] = w
    return params


def measured_again(about: Mapping[str, Any], weights: str, data_dir: Path | None, threads: int) -> dict[str, Any]:
    """``about`` with all that is measured of the rounded networks measured anew. What was measured of the networks as
    they were trained stays, since the page has only the rounded ones."""
    params = unpacked(about, weights)
    pool = {key: w for key, w in params["digits"].items() if key.startswith("pool.")}
    capsnet = {key: w for key, w in params["digits"].items() if key not in {*pool, "examples"}}

    def without(prefix: str, ours: Params) -> Any:
        return TrainState("", {key.removeprefix(prefix): w for key, w in ours.items() if key.startswith(prefix)})

    def config_of(experiment: Any, part: str) -> Any:
        known, saved = vars(experiment.Config()), about[part]["run"]["config"]
        return from_json(experiment.Config, {key: value for key, value in saved.items() if key in known})

    config = dataclasses.replace(config_of(multimnist, "digits"), data_dir=data_dir)
    data = multimnist.make_data(dataclasses.replace(config, n_val=None))
    parts = {
        "viewpoint": viewpoint_part(
            config_of(smallnorb, "viewpoint"), {name: without(f"{name}.", params["viewpoint"]) for name in VIEW_MODELS}
        ),
        "digits": digits_part(
            config, {"capsnet": without("", capsnet), "cnn_pool": without("pool.", pool)}, data, threads
        ),
    }
    if not np.array_equal(parts["digits"].tensors["examples"], params["digits"]["examples"]):
        raise UserError(f"the digits of {data_dir}, or the page's rules, give other test images than the page shows:"
                        " make it anew, from checkpoints")
    again: dict[str, Any] = {**about, "measuredCommit": git_commit()}
    for name, part in parts.items():
        again[name] = part.about | {key: about[name][key] for key in ("tensors", "offset", "run", "study")
                                    if key in about[name]}
        for row, old in zip(again[name]["accuracies"], about[name]["accuracies"], strict=True):
            row |= {key: old[key] for key in ("before", "changed") if key in old}
    return again


def load_digits(path: Path | None, data_dir: Path | None, threads: int) -> Part:
    """Load the checkpoint, or train."""
    asked, given = multimnist.Config(data_dir=data_dir), ({"data_dir"} if data_dir else set())
    config, states = load_finished(multimnist, path, asked, given, required=DIGIT_MODELS)
    if not states:
        config = with_reported_seed(*MEDIAN_OF, config, ())[0]  # before the data, which depend on the seed
    # The page shows test digits, not validation ones.
    data = multimnist.make_data(dataclasses.replace(config, n_val=None))
    config = multimnist.resolve_auto(config, data)
    if not states:
        print_message(f"{multimnist.EXPERIMENT}: no --multimnist, so two networks are trained first: 2 to 6 minutes")
        states = multimnist.train_all(config, data, RunOptions(threads=threads), names=DIGIT_MODELS)
    return digits_part(config, states, data, threads)


def load_viewpoint(path: Path | None) -> Part:
    """Load the checkpoint, or train."""
    asked = smallnorb.Config(dataset="shapes")
    config, states = load_finished(smallnorb, path, asked, (), required=VIEW_MODELS)
    if not config.is_rendered:
        raise UserError(f"{path} was trained on {config.dataset}, whose networks the page does not compute")
    if not states:
        print_message(f"{smallnorb.EXPERIMENT}: no --viewpoint, so its networks are trained first: some seconds")
        with blas_threads(1):
            states = smallnorb.train_all(config, smallnorb.make_data(config), names=VIEW_MODELS)
    return viewpoint_part(config, states)


# --- Command line -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    multimnist: Path | None = setting(None, INPUT, f"Checkpoint of {multimnist.EXPERIMENT}.py. Without it, its CapsNet"
        " and its CNN with pooling are trained first.", usual=True)
    viewpoint: Path | None = setting(None, INPUT, f"Checkpoint of {smallnorb.EXPERIMENT}.py, of voxels or shapes."
        " Without it, its capsules and its CNN of equal size are trained on shapes first.", usual=True)
    data_dir: Path | None = setting(None, FOLDER, "Folder of the four MNIST files.", usual=True,
        shown="the checkpoint's, else the cache")


@dataclasses.dataclass(frozen=True)
class Options(Settings):
    out: Path = setting(Path("explorer.html"), OUTPUT, "Write the page there.", usual=True)
    keep: bool = setting(False, bool, "Keep the networks of the page --out, and write its text, style and scripts anew."
        " With --data-dir what the page says of its rounded networks is measured anew too.", usual=True)


@script
def main(argv: Sequence[str]) -> None:
    config, options, given = parse(
        Config, Options, argv,
        "Write a page in which a person draws digits, moves the numbers of a capsule and turns an object.",
        ("", "Train all networks, then write explorer.html: about 7 minutes."),
        ("--multimnist a.npz --viewpoint b.npz", "The page of two checkpoints: about 20 seconds."),
        ("--multimnist a.npz --out draft.html", "Train only the networks of the object: about 30 seconds."),
        ("--keep", "After a change of explorer/page/: about 1 second."),
        epilog="The page is one file, --out. An experiment's --checkpoint FILE writes a checkpoint.",
    )
    require_writable(options.out)
    if options.keep:
        if other := given.keys() & settings_of(Config).keys() - {"data_dir"}:
            raise SettingError(min(other), "not with --keep, which keeps both networks")
        about, weights = read_page(options.out)
        if config.data_dir:
            about = measured_again(about, weights, config.data_dir, default_threads())
        print(write_if_changed(options.out, page_of(about, weights)))
        return
    if config.multimnist:
        load_checkpoint(multimnist, config.multimnist)  # so that a wrong one is found before the other is trained
    parts = {
        "viewpoint": load_viewpoint(config.viewpoint),
        "digits": load_digits(config.multimnist, config.data_dir, default_threads()),
    }
    written = write_if_changed(options.out, make_page(parts))
    for part in parts.values():
        for row in part.about["accuracies"]:
            print(f"{row['model']:<12} {row['metric']:<20} {row['before']:.4f}, rounded {row['after']:.4f}")
    print(written)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
