"""The papers' claims that are tested here, which runs test each, and their verdicts.

``python report.py --claims`` writes results/claims.json from this list; ``python report.py --check`` computes it again.

A claim is tested under one or more conditions; docs/method.md says which of them were listed before their runs. A
condition compares two models, or two settings, over the same seeds. *holds*: the interval of the difference lies
beyond 0 in the direction of the paper; *reversed*: beyond 0 in the other direction; *undecided*: it contains 0. A
claim with different words under its conditions *depends*; a condition of *one seed* has no interval and no say. The
intervals are those of Student's t for paired differences, each at the level at which its difference is tested [Holm
1979]: the probability that any *holds* or *reversed* is wrong is at most 5 %.

[Holm 1979] S. Holm, "A simple sequentially rejective multiple test procedure", Scand. J. Statist. 6, 65-70.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from support.statistics import t_quantile

Json = dict[str, Any]
ALPHA = 0.05


class Runs(NamedTuple):
    """A model's runs in a file that compare_seeds.py wrote."""

    file: str  # below results/
    model: str
    setting: str | None = None  # None where the file has one


class Condition(NamedTuple):
    name: str
    first: Runs  # what the paper's claim is in favour of
    second: Runs
    metric: str  # a fraction; more is better
    second_metric: str | None = None  # of the other side, where it has another name
    at_equal: str | None = None  # both sides are read where this metric is equal, see ``at_equal_values``


class Claim(NamedTuple):
    text: str
    paper: str  # what the paper measured
    page: str
    conditions: tuple[Condition, ...]


DENSE, CONV = "smallnorb_novel_viewpoint", "conv_matrix_capsules"
PAGE, ROUTING_PAGE = "docs/smallnorb_novel_viewpoint.md", "docs/what_routing_does.md"
DENSE_CAPSULES = {
    "raw": "standardize=none lr=0.001 em-iters=3 variance-floor=3",
    "standardised": "standardize=image lr=0.004 em-iters=2 variance-floor=1",
}  # chosen on other views
DENSE_CNN = {
    "raw": "standardize=none lr=0.002 weight-decay=1",
    "standardised": "standardize=image lr=0.004 weight-decay=1",
}
CONV_CAPSULES = {
    "raw": "standardize=none variance-floor=0.5",
    "standardised": "standardize=image variance-floor=1",
}
CONV_CNN = {"raw": "standardize=none", "standardised": "standardize=image"}
UNIFORM = {
    "raw": "standardize=none lr=0.004 variance-floor=0.3",
    "standardised": "standardize=image lr=0.002 variance-floor=1",
}
VOTE_BIAS = {
    "raw": "standardize=none lr=0.002 em-iters=3 variance-floor=3",
    "standardised": "standardize=image lr=0.004 em-iters=2 variance-floor=1",
}
SPREAD = {
    "raw": "standardize=none lr=0.002 em-iters=2 variance-floor=1",
    "standardised": "standardize=image lr=0.001 em-iters=3 variance-floor=3",
}


def views(axis: str, where: str = "") -> tuple[Condition, ...]:
    """Both pairs of networks of equal size, on pixels as they are and on standardised images."""
    return tuple(
        Condition(
            f"{network}, {pixels}",
            Runs(f"{script}/{axis}_capsules.json", "capsules", capsules[pixels] + where),
            Runs(f"{script}/{axis}_{baseline}.json", baseline, cnn[pixels] + where),
            "held_out_accuracy",
        )
        for network, script, baseline, capsules, cnn in (
            ("dense", DENSE, "cnn_matched", DENSE_CAPSULES, DENSE_CNN),
            ("convolutional", CONV, "cnn", CONV_CAPSULES, CONV_CNN),
        )
        for pixels in ("raw", "standardised")
    )


def toys(axis: str) -> Condition:
    first, second = (Runs(f"{CONV}/toys_{axis}_{model}.json", model) for model in ("capsules", "cnn"))
    return Condition(f"toys, {axis}", first, second, "held_out_accuracy", at_equal="familiar_accuracy")


def digits(n: int) -> Condition:
    """The CNN is that which held-out training digits chose."""
    return Condition(
        f"{n:,} composites",
        Runs(f"multimnist_capsnet/scaling_capsnet_{n}.json", "capsnet"),
        Runs(f"multimnist_capsnet/scaling_cnn_pool_{n}.json", "cnn_pool"),
        "set_accuracy",
    )


def capsnet_without(file: str, setting: str | None = None) -> Condition:
    """The CapsNet against one that lacks something, 48,000 composites."""
    path = "multimnist_capsnet/{}.json".format
    whole, other = Runs(path("scaling_capsnet_48000"), "capsnet"), Runs(path(file), "capsnet", setting)
    return Condition("48,000 composites", whole, other, "set_accuracy")


def rotated(degrees: int) -> Condition:
    capsnet = Runs("mnist_affine_capsnet/upright.json", "capsnet")
    return Condition(f"turned by {degrees}°", capsnet, capsnet._replace(model="cnn"), f"rotated_{degrees}_accuracy")


DISTORTED = Condition(
    "affNIST-like, at 0.98 upright",
    Runs("mnist_affine_capsnet/affnist_capsnet.json", "capsnet"),
    Runs("mnist_affine_capsnet/affnist_cnn.json", "cnn"),
    "affnist_accuracy",
)


def dense_capsules(file: str, settings: dict[str, str], *, for_claim: bool) -> tuple[Condition, ...]:
    """The dense capsules with something else, in another file, against those of ``views``, on held-out azimuths; each
    with settings of its own. ``for_claim``: the claim is in favour of the other file's."""
    conditions = []
    for pixels, setting in settings.items():
        usual = Runs(f"{DENSE}/azimuths_capsules.json", "capsules", DENSE_CAPSULES[pixels] + " test-azimuths=200:330")
        sides = Runs(f"{DENSE}/{file}.json", "capsules", setting), usual
        conditions.append(Condition(f"dense, {pixels}", *(sides if for_claim else sides[::-1]), "held_out_accuracy"))
    return tuple(conditions)


SIGNS = Runs(f"{DENSE}/signs.json", "capsules")


def attack(name: str, metric: str) -> Condition:
    files = f"{CONV}/attacks_capsules.json", f"{CONV}/attacks_cnn.json"
    return Condition(name, Runs(files[0], "capsules"), Runs(files[1], "cnn"), metric)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "Matrix capsules generalise better than a CNN to new azimuths",
        "smallNORB: error 13.5 % against 20.0 %",
        PAGE,
        views("azimuths", " test-azimuths=200:330"),
    ),
    Claim(
        "Matrix capsules generalise better than a CNN to new elevations",
        "smallNORB: error 12.3 % against 17.8 %",
        PAGE,
        views("elevations"),
    ),
    Claim(
        "At equal accuracy on familiar viewpoints, matrix capsules are better on new ones",
        "smallNORB: error 13.5 % against 20.0 %, 12.3 % against 17.8 %",
        "docs/toys.md",
        (toys("azimuths"), toys("elevations")),
    ),
    Claim(
        "CapsNet recognises overlapping digits better than a CNN",
        "MultiMNIST: error 5.2 % against 8.1 %",
        "docs/multimnist_capsnet.md",
        (digits(48000), digits(240000), digits(1200000)),
    ),
    Claim(
        "On overlapping digits, three iterations of dynamic routing are better than one",
        "MultiMNIST: error 5.2 % against 7.5 %",
        "docs/multimnist_capsnet.md",
        (capsnet_without("routing_iters", "routing-iters=1"),),
    ),
    Claim(
        "Reconstruction makes a CapsNet classify overlapping digits better",
        "MNIST: error 0.25 % against 0.35 %",
        "docs/multimnist_capsnet.md",
        (capsnet_without("no_reconstruction"),),
    ),
    Claim(
        "Matrix capsules withstand attacks better than a CNN",
        "smallNORB, FGSM: higher accuracy at every ε",
        "docs/conv_matrix_capsules.md",
        (  # ε = 0.2 was added after the runs
            attack("FGSM, ε = 0.1", "fgsm_0.1_accuracy"),
            attack("FGSM, ε = 0.2", "fgsm_0.2_accuracy"),
            attack("worst case, ε = 0.1", "worst_case_0.1_accuracy"),
            attack("worst case, ε = 0.2", "worst_case_0.2_accuracy"),
        ),
    ),
    Claim(
        "CapsNet recognises rotated and distorted digits better than a CNN",
        "affNIST: accuracy 79 % against 66 %",
        "docs/mnist_affine_capsnet.md",
        (rotated(15), rotated(35), DISTORTED),
    ),
    Claim(
        "EM routing classifies better than fixed equal assignments",
        "smallNORB: error 1.8 % with three iterations, 9.7 % with one",
        ROUTING_PAGE,
        dense_capsules("azimuths_uniform", UNIFORM, for_claim=False),
    ),
    Claim(
        "The spread loss trains matrix capsules better than cross-entropy",
        "smallNORB: error 1.8 % against 5.8 %",
        ROUTING_PAGE,
        dense_capsules("azimuths_spread", SPREAD, for_claim=True),
    ),
    Claim(
        "Without a bias of the votes, EM routing cannot tell a pose from its negative",
        "Peer et al. 2019: agreement has no sign",
        ROUTING_PAGE,
        (Condition("vectors and their negatives", SIGNS, SIGNS, "biased_sign_accuracy", "sign_accuracy"),),
    ),
    Claim(
        "A bias of the votes makes matrix capsules better",
        "Peer et al. 2019: a bias fixes this",
        ROUTING_PAGE,
        dense_capsules("azimuths_vote_bias", VOTE_BIAS, for_claim=True),
    ),
)


def runs_by_seed(document: Json, runs: Runs) -> dict[int, Json]:
    """Raises KeyError where the file has no such setting."""
    setting = runs.setting or next(iter(document["settings"]))
    return {run["seed"]: run for run in document["settings"][setting]["runs"]}


def at_equal_values(runs: Sequence[tuple[Json, str]], metric: str, equal: str) -> list[float]:
    """``metric`` of each (run, model) where its ``equal`` is the least of all runs' last: at the end of one of them,
    and where the others first come to it, between two epochs. [Hinton 2018, sec. 5.1]"""
    histories = [run["history"][model] for run, model in runs]
    level = min(history[equal][-1] for history in histories)
    values = []
    for history in histories:
        x, y = history[equal], history[metric]
        if x[-1] == level:
            values.append(y[-1])
            continue
        k = next(k for k, now in enumerate(x) if now >= level)
        part = (level - x[k - 1]) / (x[k] - x[k - 1]) if k else 1.0
        values.append(y[k - 1] + part * (y[k] - y[k - 1]) if k else y[0])
    return values


def holm_levels(p: Sequence[float], alpha: float = ALPHA) -> list[float]:
    """The level at which each p value is tested: alpha / n for the least, alpha / (n - 1) for the next, and so on up to
    the first that is above its level; all others are tested at that level, and above it too."""
    levels, level, stopped = [0.0] * len(p), 0.0, False
    for rank, k in enumerate(np.argsort(p, kind="stable")):
        if not stopped:
            level = alpha / (len(p) - rank)
            stopped = p[k] > level
        levels[k] = level
    return levels


def paired_differences(condition: Condition, read: Callable[[str], Json]) -> tuple[np.ndarray, np.ndarray]:
    """Values of both sides by seed. Raises KeyError where a file has not what is wanted of it."""
    sides, metric = (condition.first, condition.second), condition.metric
    first, second = (runs_by_seed(read(runs.file), runs) for runs in sides)
    if set(first) != set(second):
        raise KeyError(f"{condition.name}: {condition.first.file} and {condition.second.file} have other seeds")
    metrics, values = (metric, condition.second_metric or metric), []
    for seed in sorted(first):
        runs = [(run, side.model) for run, side in zip((first[seed], second[seed]), sides, strict=True)]
        if condition.at_equal:
            values.append(at_equal_values(runs, metric, condition.at_equal))
        else:
            values.append([run["models"][model][name] for (run, model), name in zip(runs, metrics, strict=True)])
    both = np.array(values)  # (seeds, 2)
    return both[:, 0], both[:, 1]


def p_value(differences: np.ndarray) -> float:
    """Two-sided, of Student's t test that the mean is 0. Of equal differences it is 0, and 1 where all are 0."""
    from scipy import stats

    return float(stats.ttest_1samp(differences, 0).pvalue) if np.ptp(differences) else float(differences[0] == 0)


def half_width(differences: np.ndarray, level: float) -> float:
    """Of the interval of the mean at that level."""
    n = len(differences)
    return t_quantile(n, level) * float(differences.std(ddof=1)) / math.sqrt(n)


def make_claims(claims: Sequence[Claim], read: Callable[[str], Json]) -> Json:
    """results/claims.json. ``read`` gives the document of a file below results/. Raises KeyError."""
    pairs = {c: paired_differences(c, read) for claim in claims for c in claim.conditions}
    p = {c: p_value(first - second) for c, (first, second) in pairs.items() if len(first) > 1}
    levels = dict(zip(p, holm_levels(list(p.values())), strict=True))
    entries = []
    for claim in claims:
        conditions: list[Json] = []
        for c in claim.conditions:
            first, second = pairs[c]
            mean, low, high, verdict = float((first - second).mean()), None, None, "one seed"
            if c in levels:
                half = half_width(first - second, levels[c])
                low, high = mean - half, mean + half
                verdict = "undecided" if p[c] > levels[c] else "holds" if mean > 0 else "reversed"
            conditions.append({
                "condition": c.name, "metric": c.metric, "n": len(first), "first": float(first.mean()),
                "second": float(second.mean()), "difference": mean, "low": low, "high": high, "p": p.get(c),
                "verdict": verdict,
            })  # fmt: skip
        words = {c["verdict"] for c in conditions}
        words = words - {"one seed"} or words
        verdict = words.pop() if len(words) == 1 else "depends"
        entries.append({"claim": claim.text, "paper": claim.paper, "page": claim.page, "verdict": verdict})
        entries[-1]["conditions"] = conditions
    return {"command": "python report.py --claims", "n_comparisons": len(p), "claims": entries}
