"""The papers' claims that are tested here, which comparison tests each, and their verdicts.

There are two lists. REGISTERED fixes each comparison before its runs: networks, settings, metric, tolerance and number
of seeds. ``python -m evidence.report --check`` proves it by the commits of the runs, and that the settings are those of
the searches in results/search/. CLAIMS are the rounds before, which are exploratory: their attacks had not converged,
no search had the length of training, and seeds were added until a verdict came. ``python -m evidence.report --claims``
writes results/claims.json from both lists and the results.

A condition compares two models, or two trainings of one, over the same seeds. Its interval is that of Student's t for
the mean of the paired differences, at a level of 5 % divided by the number of comparisons [Bonferroni]: with a
probability of 95 % all intervals hold at once, and then all verdicts are right, whichever of them is read.

    equal       the interval lies within the tolerance to either side, whether or not it holds 0
                [the two one-sided tests of Schuirmann 1987, each at half of that level]
    holds       it lies above 0, in favour of the claim
    reversed    it lies below 0
    undecided   none of these
    not run     not all of the listed seeds have been run

The registered round has at most N_COMPARISONS; each is listed when its searches have ended; no verdict is read before
the last seed. The exploratory rounds keep their words: there ``holds`` and ``reversed`` came before ``equal``, five
seeds were enough, and each look at a verdict with more seeds counts as a comparison in the level of all intervals.

[Schuirmann 1987] D. J. Schuirmann, "A comparison of the two one-sided tests procedure and the power approach for
assessing the equivalence of average bioavailability", J. Pharmacokin. Biopharm. 15, 657-680.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from support.statistics import MIN_SEEDS, at_equal_values, describe_sample, t_quantile

Json = dict[str, Any]
ALPHA = 0.05
WORDS = ("holds", "reversed", "equal", "undecided", "few seeds", "not run yet", "not run")
N_COMPARISONS = 24  # of the registered round, at most
MIN_REGISTERED = 8  # seeds of a registered comparison


class Condition(NamedTuple):
    """Written with literal values alone, so that ``listed`` can read it in another commit's file."""

    name: str
    file: str  # below results/
    first: str  # a model of the file, or PART:MODEL; what the claim is in favour of
    second: str
    metric: str  # a fraction; more is better
    seeds: str  # START:STOP
    second_metric: str | None = None  # of the other side, where it has another name
    at_equal: str | None = None  # both sides are read where this metric is equal, see ``at_equal_values``
    tolerance: float = 0.02
    looks: int = 1  # how often its verdict has been read, each time with more seeds
    searches: tuple[str, str] | None = None  # of a registered one, in results/search/: its sides have their winners


class Claim(NamedTuple):
    text: str
    paper: str  # what the paper measured
    page: str
    conditions: tuple[Condition, ...]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "Matrix capsules generalise better than a CNN to new azimuths",
        "smallNORB: error 13.5 % against 20.0 %", "docs/smallnorb_novel_viewpoint.md", (
            Condition("dense, the write-up's objects", "smallnorb_novel_viewpoint/voxels_azimuths.json", "capsules",
                      "cnn_matched", "held_out_accuracy", "200:400"),
            Condition("dense, drawn shapes", "smallnorb_novel_viewpoint/shapes_azimuths.json", "capsules",
                      "cnn_matched", "held_out_accuracy", "200:600", looks=3),
            Condition("convolutional, the write-up's objects", "conv_matrix_capsules/voxels_azimuths.json", "capsules",
                      "cnn", "held_out_accuracy", "200:400", looks=2),
            Condition("convolutional, drawn shapes", "conv_matrix_capsules/shapes_azimuths.json", "capsules",
                      "cnn", "held_out_accuracy", "200:1200", looks=5),
            Condition("toys, at equal familiar accuracy", "conv_matrix_capsules/toys_azimuths.json", "capsules",
                      "cnn", "held_out_accuracy", "200:215", at_equal="familiar_accuracy", looks=2),
        ),
    ),
    Claim(
        "Matrix capsules generalise better than a CNN to new elevations",
        "smallNORB: error 12.3 % against 17.8 %", "docs/smallnorb_novel_viewpoint.md", (
            Condition("dense, the write-up's objects", "smallnorb_novel_viewpoint/voxels_elevations.json", "capsules",
                      "cnn_matched", "held_out_accuracy", "200:400"),
            Condition("dense, drawn shapes", "smallnorb_novel_viewpoint/shapes_elevations.json", "capsules",
                      "cnn_matched", "held_out_accuracy", "200:400", looks=2),
            Condition("convolutional, the write-up's objects", "conv_matrix_capsules/voxels_elevations.json",
                      "capsules", "cnn", "held_out_accuracy", "200:600", looks=4),
            Condition("convolutional, drawn shapes", "conv_matrix_capsules/shapes_elevations.json", "capsules",
                      "cnn", "held_out_accuracy", "200:400"),
            Condition("toys, at equal familiar accuracy", "conv_matrix_capsules/toys_elevations.json", "capsules",
                      "cnn", "held_out_accuracy", "200:215", at_equal="familiar_accuracy", looks=2),
        ),
    ),
    Claim(
        "Matrix capsules classify new toys from all viewpoints better than a CNN",
        "smallNORB: error 1.8 % against 5.2 %", "docs/conv_matrix_capsules.md", (
            Condition("new toys; CNN of equal size", "conv_matrix_capsules/toys_all.json",
                      "capsules:capsules", "cnn:cnn", "accuracy", "200:215", looks=2),
            Condition("new toys; the paper's CNN", "conv_matrix_capsules/toys_all.json",
                      "capsules:capsules", "paper_cnn:cnn", "accuracy", "200:215", looks=2),
        ),
    ),
    Claim(
        "A CapsNet classifies overlapping digits better than a CNN",
        "MultiMNIST: error 5.2 % against 8.1 %", "docs/multimnist_capsnet.md", (
            Condition("48,000 composites", "multimnist_capsnet/composites_48000.json", "capsnet", "cnn_pool",
                      "set_accuracy", "200:220"),
            Condition("240,000 composites", "multimnist_capsnet/composites_240000.json", "capsnet", "cnn_pool",
                      "set_accuracy", "200:210"),
            Condition("1.2 million composites", "multimnist_capsnet/composites_1200000.json", "capsnet", "cnn_pool",
                      "set_accuracy", "200:205"),
            Condition("as the published code draws, 48,000", "multimnist_capsnet/published_48000.json", "capsnet",
                      "cnn_pool", "set_accuracy", "200:240", looks=4),
            Condition("as the published code draws, 240,000", "multimnist_capsnet/published_240000.json", "capsnet",
                      "cnn_pool", "set_accuracy", "200:210"),
        ),
    ),
    Claim(
        "Three iterations of dynamic routing are better than one",
        "MultiMNIST: error 5.2 % against 7.5 %", "docs/what_routing_does.md", (
            Condition("overlapping digits", "multimnist_capsnet/iterations.json", "three:capsnet", "one:capsnet",
                      "set_accuracy", "200:220", looks=2),
            Condition("single digits", "mnist_affine_capsnet/iterations.json", "three:capsnet", "one:capsnet",
                      "upright_accuracy", "200:220", tolerance=0.002),
        ),
    ),
    Claim(
        "Reconstruction makes a CapsNet classify better",
        "MNIST: error 0.25 % against 0.35 %", "docs/what_routing_does.md", (
            Condition("overlapping digits", "multimnist_capsnet/reconstruction.json", "with:capsnet",
                      "without:capsnet", "set_accuracy", "200:220"),
            Condition("single digits", "mnist_affine_capsnet/reconstruction.json", "with:capsnet", "without:capsnet",
                      "upright_accuracy", "200:220", tolerance=0.002),
        ),
    ),
    Claim(
        "Matrix capsules withstand attacks better than a CNN",
        "smallNORB, FGSM: higher accuracy at every ε", "docs/capsule_attacks.md", (
            Condition("one step, ε = 0.1", "capsule_attacks/shapes.json", "capsules", "cnn", "fgsm_0.1_accuracy",
                      "200:260", looks=2),
            Condition("one step, ε = 0.2", "capsule_attacks/shapes.json", "capsules", "cnn", "fgsm_0.2_accuracy",
                      "200:260", looks=2),
            Condition("worst case, ε = 0.1", "capsule_attacks/shapes.json", "capsules", "cnn",
                      "worst_case_0.1_accuracy", "200:260", looks=2),
            Condition("worst case, ε = 0.2", "capsule_attacks/shapes.json", "capsules", "cnn",
                      "worst_case_0.2_accuracy", "200:260", looks=2),
        ),
    ),
    Claim(
        "A CapsNet classifies rotated and distorted digits better than a CNN",
        "affNIST: accuracy 79 % against 66 %", "docs/mnist_affine_capsnet.md", (
            Condition("rotated by 15°", "mnist_affine_capsnet/rotated.json", "capsnet", "cnn", "rotated_15_accuracy",
                      "200:230"),
            Condition("rotated by 35°", "mnist_affine_capsnet/rotated.json", "capsnet", "cnn", "rotated_35_accuracy",
                      "200:230"),
            Condition("distorted, at equal upright accuracy", "mnist_affine_capsnet/distorted.json", "capsnet", "cnn",
                      "affnist_accuracy", "200:220", looks=2),
        ),
    ),
    Claim(
        "EM routing classifies better than even assignments",
        "smallNORB: error 1.8 % with three iterations, 9.7 % with one", "docs/what_routing_does.md", (
            Condition("new azimuths", "what_routing_does/assignments.json", "routed:capsules", "even:capsules",
                      "held_out_accuracy", "200:600", looks=4),
        ),
    ),
    Claim(
        "The spread loss trains matrix capsules better than cross-entropy",
        "smallNORB: error 1.8 % against 5.8 %", "docs/what_routing_does.md", (
            Condition("new azimuths", "what_routing_does/losses.json", "spread:capsules", "cross_entropy:capsules",
                      "held_out_accuracy", "200:600", looks=4),
        ),
    ),
    Claim(
        "A bias of the votes makes matrix capsules better",
        "Peer et al. 2019: a bias tells a pose from its negative", "docs/what_routing_does.md", (
            Condition("new azimuths", "what_routing_does/vote_bias.json", "bias:capsules", "none:capsules",
                      "held_out_accuracy", "200:600", looks=4),
            Condition("vectors and their negatives", "what_routing_does/signs.json", "capsules", "capsules",
                      "biased_sign_accuracy", "200:220", "sign_accuracy"),
        ),
    ),
)


REGISTERED: tuple[Claim, ...] = (
    Claim(
        "A CapsNet classifies overlapping digits better than a CNN", "MultiMNIST: error 5.2 % against 8.1 %",
        "docs/multimnist_capsnet.md", (
            Condition(
                "48,000 composites", "multimnist_capsnet/registered_composites_48000.json", "capsnet:capsnet",
                "cnn_pool:cnn_pool", "set_accuracy", "2000:2024",
                searches=("mnist_overlaps_48000_capsnet_capsules_3_iterations.json",
                          "mnist_overlaps_48000_capsnet_cnn.json"),
            ),
        ),
    ),
    Claim(
        "Three iterations of dynamic routing are better than one", "MultiMNIST: error 5.2 % against 7.5 %",
        "docs/what_routing_does.md", (
            Condition(
                "48,000 composites", "multimnist_capsnet/registered_iterations_48000.json",
                "three:capsnet", "one:capsnet", "set_accuracy", "2024:2036",
                searches=("mnist_overlaps_48000_capsnet_capsules_3_iterations.json",
                          "mnist_overlaps_48000_capsnet_capsules_1_iterations.json"),
            ),
        ),
    ),
    Claim(
        "Reconstruction makes a CapsNet classify better", "MNIST: error 0.25 % against 0.35 %",
        "docs/what_routing_does.md", (
            Condition(
                "48,000 composites", "multimnist_capsnet/registered_reconstruction_48000.json",
                "with:capsnet", "without:capsnet", "set_accuracy", "2036:2052",
                searches=("mnist_overlaps_48000_capsnet_capsules_3_iterations.json",
                          "mnist_overlaps_48000_capsnet_capsules_3_iterations_reconstruction_0.json"),
            ),
        ),
    ),
    Claim(
        "Matrix capsules generalise better than a CNN to new azimuths",
        "smallNORB: error 13.5 % against 20.0 %", "docs/smallnorb_novel_viewpoint.md", (
            Condition(
                "dense, drawn shapes", "smallnorb_novel_viewpoint/registered_azimuths.json", "capsules:capsules",
                "cnn:cnn_matched", "held_out_accuracy", "2000:2352",
                searches=("shapes_azimuths_dense_capsules_2_iterations.json", "shapes_azimuths_dense_cnn.json"),
            ),
            Condition(
                "dense, the write-up's objects", "smallnorb_novel_viewpoint/registered_voxels_azimuths.json",
                "capsules:capsules", "cnn:cnn_matched", "held_out_accuracy", "3000:3680",
                searches=("voxels_azimuths_dense_capsules_2_iterations.json", "voxels_azimuths_dense_cnn.json"),
            ),
        ),
    ),
    Claim(
        "Matrix capsules generalise better than a CNN to new elevations",
        "smallNORB: error 12.3 % against 17.8 %", "docs/smallnorb_novel_viewpoint.md", (
            Condition(
                "dense, drawn shapes", "smallnorb_novel_viewpoint/registered_elevations.json", "capsules:capsules",
                "cnn:cnn_matched", "held_out_accuracy", "2000:2176",
                searches=("shapes_elevations_dense_capsules_2_iterations.json", "shapes_elevations_dense_cnn.json"),
            ),
            Condition(
                "dense, the write-up's objects", "smallnorb_novel_viewpoint/registered_voxels_elevations.json",
                "capsules:capsules", "cnn:cnn_matched", "held_out_accuracy", "3000:3176",
                searches=("voxels_elevations_dense_capsules_2_iterations.json", "voxels_elevations_dense_cnn.json"),
            ),
            Condition(
                "dense without routing, drawn shapes", "smallnorb_novel_viewpoint/registered_even_elevations.json",
                "even:capsules", "cnn:cnn_matched", "held_out_accuracy", "4700:4836",
                searches=("shapes_elevations_dense_capsules_1_iterations.json", "shapes_elevations_dense_cnn.json"),
            ),
            Condition(
                "dense without routing, the write-up's objects",
                "smallnorb_novel_viewpoint/registered_voxels_even_elevations.json",
                "even:capsules", "cnn:cnn_matched", "held_out_accuracy", "4700:4780",
                searches=("voxels_elevations_dense_capsules_1_iterations.json", "voxels_elevations_dense_cnn.json"),
            ),
            Condition(
                "convolutional, drawn shapes", "conv_matrix_capsules/registered_elevations.json", "capsules:capsules",
                "cnn:cnn", "held_out_accuracy", "2000:2704",
                searches=("shapes_elevations_convolutional_capsules_2_iterations.json",
                          "shapes_elevations_convolutional_cnn.json"),
            ),
        ),
    ),
    Claim(
        "EM routing classifies better than even assignments",
        "smallNORB: error 1.8 % with three iterations, 9.7 % with one", "docs/what_routing_does.md", (
            Condition(
                "drawn shapes, new azimuths", "smallnorb_novel_viewpoint/registered_routing_azimuths.json",
                "routed:capsules", "even:capsules", "held_out_accuracy", "3000:3384",
                searches=("shapes_azimuths_dense_capsules_2_iterations.json",
                          "shapes_azimuths_dense_capsules_1_iterations.json"),
            ),
            Condition(
                "drawn shapes, new elevations", "smallnorb_novel_viewpoint/registered_routing_elevations.json",
                "routed:capsules", "even:capsules", "held_out_accuracy", "3000:3176",
                searches=("shapes_elevations_dense_capsules_2_iterations.json",
                          "shapes_elevations_dense_capsules_1_iterations.json"),
            ),
            Condition(
                "write-up's objects, new elevations",
                "smallnorb_novel_viewpoint/registered_voxels_routing_elevations.json",
                "routed:capsules", "even:capsules", "held_out_accuracy", "4000:4128",
                searches=("voxels_elevations_dense_capsules_2_iterations.json",
                          "voxels_elevations_dense_capsules_1_iterations.json"),
            ),
            Condition(
                "write-up's objects, new azimuths",
                "smallnorb_novel_viewpoint/registered_voxels_routing_azimuths.json",
                "routed:capsules", "even:capsules", "held_out_accuracy", "4200:4560",
                searches=("voxels_azimuths_dense_capsules_2_iterations.json",
                          "voxels_azimuths_dense_capsules_1_iterations.json"),
            ),
        ),
    ),
    Claim(
        "Matrix capsules withstand attacks better than a CNN",
        "smallNORB, FGSM: higher accuracy at every ε", "docs/capsule_attacks.md", (
            Condition(
                "drawn shapes: one step, ε = 0.1", "capsule_attacks/registered_shapes.json", "capsules", "cnn",
                "fgsm_0.1_accuracy", "2000:2048", tolerance=0.1,
                searches=("shapes_attacks_dense_capsules_2_iterations.json", "shapes_attacks_dense_cnn.json"),
            ),
            Condition(
                "drawn shapes: one step, ε = 0.2", "capsule_attacks/registered_shapes.json", "capsules", "cnn",
                "fgsm_0.2_accuracy", "2000:2048", tolerance=0.1,
                searches=("shapes_attacks_dense_capsules_2_iterations.json", "shapes_attacks_dense_cnn.json"),
            ),
            Condition(
                "drawn shapes: worst case, ε = 0.1", "capsule_attacks/registered_shapes.json", "capsules", "cnn",
                "worst_case_0.1_accuracy", "2000:2048", tolerance=0.1,
                searches=("shapes_attacks_dense_capsules_2_iterations.json", "shapes_attacks_dense_cnn.json"),
            ),
            Condition(
                "drawn shapes: worst case, ε = 0.2", "capsule_attacks/registered_shapes.json", "capsules", "cnn",
                "worst_case_0.2_accuracy", "2000:2048", tolerance=0.1,
                searches=("shapes_attacks_dense_capsules_2_iterations.json", "shapes_attacks_dense_cnn.json"),
            ),
            Condition(
                "the write-up's objects: one step, ε = 0.1", "capsule_attacks/registered_voxels.json", "capsules",
                "cnn", "fgsm_0.1_accuracy", "4600:4664", tolerance=0.1,
                searches=("voxels_attacks_dense_capsules_2_iterations.json", "voxels_attacks_dense_cnn.json"),
            ),
            Condition(
                "the write-up's objects: one step, ε = 0.2", "capsule_attacks/registered_voxels.json", "capsules",
                "cnn", "fgsm_0.2_accuracy", "4600:4664", tolerance=0.1,
                searches=("voxels_attacks_dense_capsules_2_iterations.json", "voxels_attacks_dense_cnn.json"),
            ),
            Condition(
                "the write-up's objects: worst case, ε = 0.1", "capsule_attacks/registered_voxels.json", "capsules",
                "cnn", "worst_case_0.1_accuracy", "4600:4664", tolerance=0.1,
                searches=("voxels_attacks_dense_capsules_2_iterations.json", "voxels_attacks_dense_cnn.json"),
            ),
            Condition(
                "the write-up's objects: worst case, ε = 0.2", "capsule_attacks/registered_voxels.json", "capsules",
                "cnn", "worst_case_0.2_accuracy", "4600:4664", tolerance=0.1,
                searches=("voxels_attacks_dense_capsules_2_iterations.json", "voxels_attacks_dense_cnn.json"),
            ),
        ),
    ),
)


# Registered once, and replaced before any run: the settings were those of new azimuths, with which a longer training
# changes the accuracy under attack by tens of points.
WITHDRAWN = tuple(
    Condition(
        "", "capsule_attacks/registered_shapes.json", "capsules", "cnn", metric, "2000:2128", tolerance=0.1,
        searches=("shapes_azimuths_dense_capsules_2_iterations.json", "shapes_azimuths_dense_cnn.json"),
    )
    for metric in (f"{kind}_accuracy" for kind in ("fgsm_0.1", "fgsm_margin_0.1", "worst_case_0.05", "worst_case_0.1"))
)


def values_of(source: str) -> dict[str, ast.expr]:
    """What the names of a module's text are set to. Raises SyntaxError."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            found[ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])] = node.value
    return found


def level_of(source: str) -> tuple[float, int]:
    """ALPHA and N_COMPARISONS in the text of a claims.py. Raises SyntaxError, ValueError, KeyError."""
    values = values_of(source)
    return ast.literal_eval(values["ALPHA"]), ast.literal_eval(values["N_COMPARISONS"])


def listed(source: str, names: Collection[str] = ("CLAIMS", "REGISTERED")) -> set[Condition]:
    """The conditions in these lists of a claims.py's text, without their own names. Raises SyntaxError, ValueError."""
    lists = [value for name, value in values_of(source).items() if name in names]
    found = set()
    for call in (node for value in lists for node in ast.walk(value) if isinstance(node, ast.Call)):
        if ast.unparse(call.func) == "Condition":
            named = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
            found.add(Condition(*map(ast.literal_eval, call.args), **named)._replace(name=""))
    return found


def listed_end(condition: Condition, entries: Collection[Condition]) -> int:
    """Where the seeds of a condition stop in another commit's list; 0 if it is not in there."""
    for entry in entries:
        if entry == condition._replace(name="", seeds=entry.seeds, looks=entry.looks):
            return int(entry.seeds.split(":")[1])
    return 0


class Runs(NamedTuple):
    """A model's runs in a file that compare_seeds.py wrote."""

    file: str  # below results/: FILE.json or FILE.json#PART
    model: str


def sides(condition: Condition) -> list[Runs]:
    found = []
    for side in (condition.first, condition.second):
        part, _, model = side.rpartition(":")
        found.append(Runs(condition.file + (f"#{part}" if part else ""), model))
    return found


def runs_by_seed(document: Json) -> dict[int, Json]:
    """The runs of the first setting."""
    return {run["seed"]: run for run in next(iter(document["settings"].values()))["runs"]}


def paired_values(condition: Condition, documents: Sequence[Json]) -> np.ndarray:
    """Values of both sides (seeds, 2). Raises KeyError where the files have not what is wanted of them."""
    both = sides(condition)
    first, second = map(runs_by_seed, documents)
    start, stop = map(int, condition.seeds.split(":"))
    if set(first) != set(second) or not set(first) <= set(range(start, stop)) or max(first) - start >= len(first):
        raise KeyError(f"{condition.file} has other seeds than the first of {condition.seeds}")
    metrics = (condition.metric, condition.second_metric or condition.metric)
    values = []
    for seed in sorted(first):
        runs = [(run, side.model) for run, side in zip((first[seed], second[seed]), both, strict=True)]
        if condition.at_equal:
            values.append(at_equal_values(runs, condition.metric, condition.at_equal))
        else:
            values.append([run["models"][model][name] for (run, model), name in zip(runs, metrics, strict=True)])
    return np.array(values)


def verdict_of(sample: Json, tolerance: float) -> str:
    if sample["n"] < MIN_SEEDS:
        return "few seeds"
    low, high = sample["low"], sample["high"]
    if low > 0 or high < 0:
        return "holds" if low > 0 else "reversed"
    return "equal" if -tolerance <= low and high <= tolerance else "undecided"


def registered_verdict(sample: Json, tolerance: float) -> str:
    if -tolerance <= sample["low"] and sample["high"] <= tolerance:
        return "equal"
    return "holds" if sample["low"] > 0 else "reversed" if sample["high"] < 0 else "undecided"


def by_signs(differences: np.ndarray) -> float:
    """The two-sided probability of so unequal a number of signs, or of a less equal one, if both were as likely; a
    difference of 0 is left out."""
    higher, lower = int((differences > 0).sum()), int((differences < 0).sum())
    n = higher + lower
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(higher, lower) + 1)) / 2**n)


def judged(
    claims: Sequence[Claim], read: Callable[[str], Json | None], n_comparisons: int, registered: bool = False
) -> list[Json]:
    """The claims with their conditions' numbers and verdicts. A registered one has neither before its last seed."""
    entries = []
    for claim in claims:
        conditions: list[Json] = []
        for c in claim.conditions:
            entry: Json = {"condition": c.name, "metric": c.metric, "seeds": c.seeds, "tolerance": c.tolerance,
                           "verdict": "not run" if registered else "not run yet"}
            documents = [one for side in sides(c) if (one := read(side.file)) is not None]
            wanted = set(range(*map(int, c.seeds.split(":"))))
            has_all_seeds = all(set(runs_by_seed(one)) == wanted for one in documents)
            if len(documents) == 2 and (has_all_seeds or not registered):
                both = paired_values(c, documents)
                differences = both[:, 0] - both[:, 1]
                sample = describe_sample(differences.tolist(), ALPHA / n_comparisons)
                word = registered_verdict if registered else verdict_of
                entry |= {"n": sample["n"], "first": float(both[:, 0].mean()), "second": float(both[:, 1].mean()),
                          "difference": sample["mean"], "low": sample["low"], "high": sample["high"],
                          "verdict": word(sample, c.tolerance)}
                if registered and sample["n"] <= 10:
                    entry["p_signs"] = by_signs(differences)
            conditions.append(entry)
        entries.append({"claim": claim.text, "paper": claim.paper, "page": claim.page,
                        "verdict": count_words(conditions), "conditions": conditions})
    return entries


def make_claims(claims: Sequence[Claim], read: Callable[[str], Json | None], registered: Sequence[Claim] = ()) -> Json:
    """results/claims.json. ``read`` gives the comparison in a place below results/, None where it has not been run.
    Raises KeyError, and UserError without scipy."""
    t_quantile(MIN_SEEDS)
    n_looks = sum(condition.looks for claim in claims for condition in claim.conditions)
    return {"command": "python -m evidence.report --claims", "n_comparisons": N_COMPARISONS,
            "registered": judged(registered, read, N_COMPARISONS, registered=True), "n_looks": n_looks,
            "claims": judged(claims, read, n_looks)}


def count_words(conditions: Sequence[Json]) -> str:
    """How many of the conditions have which verdict: "holds in 1, equal in 2 of 3"."""
    counts = Counter(condition["verdict"] for condition in conditions)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{word} in {counts[word]}" for word in WORDS if counts[word]) + f" of {len(conditions)}"
