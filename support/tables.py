"""Tables on the command line: confusion matrices, and how many images there are of each class."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

MAX_MATRIX, MAX_NAMES = 12, 30  # classes of a printed matrix, of a list


def confusion_matrix(labels: np.ndarray, answers: np.ndarray, n_classes: int) -> np.ndarray:
    """labels and answers (N,) -> counts (J, J): entry k, j is the number of images of class k that are classified as
    j."""
    counts = np.zeros((n_classes, n_classes), int)
    np.add.at(counts, (labels, answers), 1)
    return counts


def class_accuracies(confusion: np.ndarray) -> np.ndarray:
    """Counts (J, J) by true class and answer -> the fraction of each class that is right (J,); NaN without images."""
    with np.errstate(invalid="ignore"):
        return np.diag(confusion) / confusion.sum(axis=1)


def confusion_lines(counts: np.ndarray, classes: Sequence[str]) -> list[str]:
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
