"""Tables on the command line: confusion matrices, images of each class, predictions, studies, accuracy under attack."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray

MAX_MATRIX, MAX_NAMES = 12, 30  # classes of a printed matrix, of a list


def seed_of(result: Mapping[str, Any]) -> str:
    """The seed that the test set was drawn with and, where it is another one, that of the training."""
    seed = result.get("trained_with_seed", result["seed"])
    return f"{result['seed']}" + (f" (trained with seed {seed})" if seed != result["seed"] else "")


def confusion_matrix(labels: Array, answers: Array, n_classes: int) -> Array:
    """labels and answers (N,) -> counts (J, J): entry k, j is the number of images of class k that are classified as
    j."""
    counts = np.zeros((n_classes, n_classes), int)
    np.add.at(counts, (labels, answers), 1)
    return counts


def class_accuracies(confusion: Array) -> Array:
    """Counts (J, J) by true class and answer -> the fraction of each class that is right (J,); NaN without images."""
    with np.errstate(invalid="ignore"):
        return np.diag(confusion) / confusion.sum(axis=1)


def confusion_lines(counts: Array, classes: Sequence[str]) -> list[str]:
    """A confusion matrix (true class, answer) with the names of the classes, and the accuracy of each; of many classes
    the greatest errors and the least accurate ones."""
    right = class_accuracies(counts).tolist()
    if len(classes) <= MAX_MATRIX:
        names = [name if len(name) <= 12 else f"{name[:11]}…" for name in classes]
        first, width = max(map(len, names)), max(4, *map(len, names))
        rows = [
            f"  {name:<{first}} " + " ".join(f"{n:>{width}}" for n in row) + (f"    {x:.3f}" if x >= 0 else "        -")
            for name, row, x in zip(names, counts, right, strict=True)
        ]
        return [f"  {'':<{first}} " + " ".join(f"{name:>{width}}" for name in names) + " accuracy", *rows]
    errors = np.where(np.eye(len(classes), dtype=bool), 0, counts)
    order = np.argsort(-errors, axis=None, kind="stable")[:10].tolist()
    pairs = [divmod(k, len(classes)) for k in order]
    lines = [f"  {errors[i, j]:>5} of {classes[i]} as {classes[j]}" for i, j in pairs if errors[i, j]]
    worst = [f"{classes[k]} {right[k]:.3f}" for k in np.argsort(right)[:5] if right[k] < 1]
    return [*lines, f"  least accurate: {', '.join(worst)}"] if lines else ["  no error"]


def describe_classes(counts: Mapping[str, tuple[int, int]], side: int, colour: str) -> str:
    """How many images there are for training and for the test, of each class, and of which size."""
    n_train, n_test = (sum(pair[k] for pair in counts.values()) for k in (0, 1))
    lines = [
        f"{n_train:,} training and {n_test:,} test images of {side}x{side} pixels, {colour}, {len(counts)} classes:"
    ]
    lines += [f"  {name}: {a:,} + {b:,}" for name, (a, b) in itertools.islice(counts.items(), MAX_NAMES)]
    return "\n".join([*lines, "  ..."] if len(counts) > MAX_NAMES else lines)


def pose_study_lines(models: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What a study of the poses has found, in a line; empty if there was none."""
    errors = {name: m["azimuth_error"] for name, m in models.items() if "azimuth_error" in m}
    if "capsules" in errors:
        errors |= {name: models["capsules"][f"azimuth_error_of_{name}"] for name in ("pixels", "mean")}
    found = ", ".join(f"{error:.1f} from {name}" for name, error in errors.items())
    return [f"mean error of the azimuths of L and tripod in degrees: {found}"] * bool(errors)


def sign_study_lines(capsules: Mapping[str, Any]) -> list[str]:
    """What a study of the poses' signs has found, in a line; empty if there was none."""
    if "sign_accuracy" not in capsules:
        return []
    found = f"{capsules['sign_accuracy']:.3f}, with a bias of the votes {capsules['biased_sign_accuracy']:.3f}"
    return [f"poses told from their negatives: {found}"]


def routing_study_lines(capsules: Mapping[str, Any]) -> list[str]:
    """What a routing study has found, a line for each kind of couplings; empty if there was none."""
    names = [key.removesuffix("_entropy") for key in capsules if key.endswith("_entropy")]
    lines = [f"{'couplings':<12} accuracy  changed  entropy"] * bool(names)
    for name in names:
        cells = " ".join(f"{capsules[f'{name}_{found}']:8.3f}" for found in ("accuracy", "changed", "entropy"))
        lines.append(f"{name.replace('iters_', 'iterations '):<12} {cells}")
    return lines
