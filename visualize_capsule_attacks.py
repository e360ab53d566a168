#!/usr/bin/env python3
"""Draw attacks on the convolutional matrix capsules and their CNN into ``DIR/conv_matrix_capsules/``.

    python visualize_capsule_attacks.py --checkpoint run.safetensors

draws what ``conv_matrix_capsules.py --checkpoint run.safetensors`` has trained; without ``--checkpoint`` it trains
first, with the same flags as that script.

    attacked_images.png     images in the worst case, what was added to them, and the answers
    attack_curves.png       accuracy against the size of an attack: FGSM, with the paper's on smallNORB in grey, and the
                            worst case of all attacks
    attack_seeds.png        the same from results of compare_seeds.py, mean and interval over seeds

Which images are shown never depends on the attack: the first of the test set that both models read right are taken,
each of another class.
"""

from __future__ import annotations

import support.headless  # noqa: F401  before matplotlib

# isort: split


import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import conv_matrix_capsules as experiment
from conv_matrix_capsules import Array, Config
from fast.workers import Workers
from support.console import exit_status, print_result
from support.files import UserError, require_writable
from support.flags import Parser, names_of
from support.run import Files
from visualize_conv_matrix_capsules import (
    MODELS,
    TEST_FIELDS,
    Run,
    answers_of,
    one_of_each_class,
    require_images,
    style_of,
    subtitle,
    verdict,
    with_article,
)

from support.figures import (  # isort: skip
    COMMON_FLAGS, DATASET_NAMES, GREY, RIGHT, WRONG, accuracy_axis, add_figure_arguments, draw_figures, grey_levels,
    head_legend, load_finished, make_figure, model_line, plot_band, plural, settings_in, show_pictures,
)  # fmt: skip

ATTACKED = re.compile(r"(fgsm|iterated|worst_case)(_log_odds)?_([0-9.e+-]+)_accuracy")
SHOWN_KINDS = {"fgsm": "one step: FGSM", "worst_case": "worst case of all attacks with this ε or a smaller one"}
# read off figure 3 of [Hinton 2018], by epsilon
PAPER_FGSM = {"capsules": {0.2: 0.83, 0.5: 0.69}, "cnn": {0.2: 0.16, 0.5: 0.03}}


class Attacks(NamedTuple):
    """Accuracies under attack: by model and kind (``fgsm``, ``worst_case``)."""

    epsilons: list[float]  # from 0
    accuracy: dict[str, dict[str, Array]]  # (seeds, epsilons)
    zero_gradient: dict[str, float]  # fraction of images that give an attacker no gradient, mean over the seeds


def attacks_among(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A model's metrics -> ``{"fgsm": {"0": accuracy, "0.05": …}, …, "zero_gradient": fraction}``."""
    kinds: dict[str, Any] = {k: v for k, v in metrics.items() if k.startswith("zero_gradient")}
    for key, value in metrics.items():
        if match := ATTACKED.fullmatch(key):
            kinds.setdefault(match[1] + (match[2] or ""), {})[match[3]] = value
    return kinds


def gather_attacks(runs: Sequence[Mapping[str, Mapping[str, Any]]]) -> Attacks:
    """``runs``: per seed, per model, as ``attacks_among``. Raises LookupError where their attacks differ."""
    texts = sorted(next(iter(runs[0].values()))["fgsm"], key=float)
    accuracy: dict[str, dict[str, Array]] = {}
    for name in runs[0]:
        for kind in SHOWN_KINDS:
            if any(set(run[name][kind]) != set(texts) for run in runs):
                raise LookupError(f"{kind} with other values of epsilon")
            accuracy.setdefault(name, {})[kind] = np.array([[run[name][kind][text] for text in texts] for run in runs])
    zero = {name: float(np.mean([run[name].get("zero_gradient", 0.0) for run in runs])) for name in accuracy}
    return Attacks([float(text) for text in texts], accuracy, zero)


ATTACKED_ALIKE = ("attack", "n_attack", "standardize", "test_azimuths", "test_elevations", "class_names")


def join_attacks(paths: Sequence[Path]) -> tuple[Config, str, Attacks]:
    """Configuration, data set and attacks of files by compare_seeds.py, in which models of the same seed are one run.

    Raises UserError where a file is none of these, and where they differ in what is attacked, or how.
    """
    runs: dict[int, dict[str, dict[str, Any]]] = {}
    alike: list[dict[str, Any]] = []
    for path in paths:
        for setting in settings_in(path):
            config = setting["config"]
            alike.append({name: config.get(name) for name in ATTACKED_ALIKE} | {"dataset": setting["dataset"]})
            for run in setting["runs"]:
                for name, metrics in run["models"].items():
                    runs.setdefault(run["seed"], {})[name] = attacks_among(metrics)
    if not alike:
        raise UserError(f"there are no results {ATTACK_RESULTS}")
    try:
        found = gather_attacks(list(runs.values()))
    except LookupError:
        found = None
    if found is None or any(config != alike[0] for config in alike):
        raise UserError(f"{', '.join(map(str, paths))} have no attacks in common")
    fields: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in alike[0].items() if v is not None
    }
    return Config(**fields), alike[0]["dataset"], found


def measure_attacks(run: Run, threads: int) -> Attacks:
    """With the attacks of the configuration, or with all where it has none."""
    config = dataclasses.replace(run.config, attack=run.config.attack or experiment.ATTACKS)
    return gather_attacks([experiment.attack_all(config, run.states, run.data, threads)])


def gradient_note(attacks: Attacks) -> str:
    """Empty where every image gives a gradient, up to half a percent."""
    zero = {name: f"{100 * fraction:.0f} %" for name, fraction in attacks.zero_gradient.items()}
    if {*zero.values()} <= {"0 %"}:
        return ""
    parts = ", ".join(f"{style.short} {zero[name]}" for name, style in MODELS.items() if name in zero)
    return f"\nimages that give an attacker no gradient at all of the model's own loss: {parts}"


def draw_attacks(config: Config, attacks: Attacks, text: str) -> Figure:
    """Accuracy against epsilon: mean and interval over the seeds."""
    text += "\nno pixel moved by more than ε, along the gradient of the loss, all weights known"
    text += gradient_note(attacks)
    fig = make_figure(4.3, "Accuracy under attack", text)
    styles = {name: style_of(name, config.cnn) for name in MODELS if name in attacks.accuracy}
    handles = [Line2D([], [], **model_line(style)) for style in styles.values()]
    dotted: dict[str, Any] = {"color": GREY, "linestyle": ":", "linewidth": 1.1}
    handles += [Line2D([], [], **dotted, marker=style.marker, label=f"the paper's {style.short}, smallNORB, read off")
                for style in styles.values()]  # fmt: skip
    head_legend(fig, [handles[k] for k in (0, 2, 1, 3)] if len(styles) == 2 else handles, 2)
    for ax, (kind, title) in zip(fig.subplots(1, 2, sharey=True), SHOWN_KINDS.items(), strict=True):
        accuracy_axis(ax, "accuracy" if kind == "fgsm" else None, 1 / config.n_classes, side="left")
        ax.set_title(title)
        for name, style in styles.items():
            plot_band(ax, attacks.epsilons, attacks.accuracy[name][kind], style)
            if kind == "fgsm":
                paper = {e: value for e, value in PAPER_FGSM[name].items() if e <= attacks.epsilons[-1]}
                label = f"paper, {style.short}"
                ax.plot(list(paper), list(paper.values()), **dotted, marker=style.marker, label=label, clip_on=False)
        ax.set_xlabel("ε (pixels run from 0 to 1)" if config.pixel_range[1] == 1 else "ε (in standard deviations)")
        ax.set_xlim(0, attacks.epsilons[-1])
    return fig


def worst_cases(model: experiment.Model, params: dict[str, Array], images: Array, labels: Array, config: Config
                ) -> list[Array]:  # fmt: skip
    """For each epsilon of ``config``, the images (N, H, W, C) as they mislead the model: under the first attack that
    does so with this epsilon, else as with a smaller one. Images that nothing misleads are under the last attack."""
    found = [images]

    def are_misread(x: Array) -> Array:
        return model.forward(params, x)[0].argmax(axis=1) != labels

    misread = are_misread(images)
    for epsilon in config.epsilons:
        x = found[-1].copy()
        fresh = np.zeros(len(images), bool)  # misread with this epsilon
        for loss, n_steps in experiment.attack_kinds(model, config).values():
            moved = experiment.attack(model, params, images, labels, loss, epsilon, n_steps, config.pixel_range)
            wrong = are_misread(moved)
            take = ~fresh & (wrong | ~misread)
            x[take] = moved[take]
            fresh |= wrong
            misread = misread | wrong
        found.append(x)
    return found[1:]


N_IMAGES = 2


def draw_attacked_images(run: Run, answers: Mapping[str, Array]) -> Figure:
    """A row for each image and model: the image, and for two values of epsilon the attacked image and what was
    added."""
    config, labels = run.config, run.data.test.labels
    names = [name for name in MODELS if name in run.states]
    right = np.flatnonzero(np.all([answers[name] == labels for name in names], axis=0))
    chosen = one_of_each_class(labels, right if len(right) else np.arange(len(labels)), N_IMAGES)
    n_epsilons = len(config.epsilons)
    shown = sorted({n_epsilons // 3, 2 * n_epsilons // 3})
    images = experiment.prepared(run.data.test.images[chosen], config).astype(np.float64)
    exact = dataclasses.replace(config, dtype="float64", em_grad="exact", attack=config.attack or experiment.ATTACKS)
    models = experiment.make_models(exact)
    text = "added: red where brighter, blue where darker, full at ±ε; once misread, misread at every larger ε"
    fig = make_figure(9.2, "Attacked images, and the answers of the models", f"{subtitle(run)}\n{text}")
    axes = fig.subplots(len(chosen) * len(names), 1)
    columns = ["image", *(c for i in shown for c in (f"ε = {config.epsilons[i]:g}", "added"))]
    for m, name in enumerate(names):
        params = {k: p.astype(np.float64) for k, p in run.states[name].params.items()}
        with np.errstate(all="ignore"):
            found = worst_cases(models[name], params, images, labels[chosen], exact)
            said = [models[name].forward(params, x)[0].argmax(axis=1) for x in found]
        for b, label in enumerate(labels[chosen].tolist()):
            pictures = [np.repeat(grey_levels(images[b])[..., None], 3, axis=2)]
            for i in shown:
                moved = found[i][b]
                added = (moved - images[b])[..., 0] / config.epsilons[i]
                pictures.append(np.repeat(grey_levels(moved)[..., None], 3, axis=2))
                pictures.append(colormaps["RdBu_r"](0.5 + added / 2)[..., :3])
            ax = axes[b * len(names) + m]
            style = style_of(name, config.cnn)
            grid = show_pictures(ax, np.stack(pictures)[None], [f"against the\n{style.short}"], columns, gap=(5, 2),
                                 interpolation="nearest")  # fmt: skip
            grid.write(0, 0, with_article(config.classes[label]), fontweight="bold")
            for k, i in enumerate(shown):
                said_text, colour = verdict(config, int(said[i][b]), label)
                grid.frame(0, 1 + 2 * k, RIGHT if said[i][b] == label else WRONG, 2.2)
                grid.write(0, 1 + 2 * k, f"answer {said_text}", color=colour, fontweight="bold")
    return fig


OF_RUN, OF_RESULTS = ("attacked_images", "attack_curves"), ("attack_seeds",)
RESULTS = Path("results") / experiment.EXPERIMENT
ATTACK_RESULTS = RESULTS / "attacks_*.json"


def draw_attack_seeds(paths: Sequence[Path]) -> Figure:
    config, dataset, attacks = join_attacks(paths)
    n = len(next(iter(attacks.accuracy.values()))["fgsm"])
    text = f"{DATASET_NAMES[dataset]} · networks of equal size, each tuned by itself · mean and 95 % interval of"
    return draw_attacks(config, attacks, f"{text} {plural(n, 'seed')}")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        COMMON_FLAGS.replace("--results", "--figures"),
        [
            ("--checkpoint run.npz", "All figures of the networks in run.npz: about 2 minutes."),
            ("--checkpoint run.npz --figures attacked_images", "One of them: about 10 seconds."),
            ("--figures attack_seeds", "Attack curves of committed results: about 3 seconds."),
        ],
        description="Draw attacks on the convolutional matrix capsules, from a checkpoint or after training them.",
    )
    experiment.add_config_flags(parser)
    files = add_figure_arguments(parser, experiment.EXPERIMENT)
    names = (*OF_RUN, *OF_RESULTS)
    files.add_argument("--figures", type=names_of(names), metavar="A,B", default=(),
                       help=f"Draw these alone: {', '.join(names)}.")  # fmt: skip
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    asked, folder = experiment.config_from_args(args), args.outdir / experiment.EXPERIMENT

    def of_run() -> dict[str, Callable[[], Figure]]:
        fields = (*TEST_FIELDS, "attack", "epsilons", "attack_steps", "n_attack")
        config, states = load_finished(experiment, args.checkpoint, asked, args.given, fields, required=("capsules",))
        data = experiment.make_data(config, config.classes if states else ())
        config = experiment.resolved(config, data)
        require_images(config, data)
        states = states or experiment.train_all(config, data, threads=args.threads, files=Files(quiet=args.quiet))
        result = experiment.make_result(config, data, states, {}, args.threads)
        print_result(f"{experiment.describe(result)}\n{experiment.format_table(result)}")
        run = Run(config, data, states)
        with Workers(args.threads, config.dtype) as workers:
            answers = answers_of(run, workers)
        return {
            "attacked_images": lambda: draw_attacked_images(run, answers),
            "attack_curves": lambda: draw_attacks(config, measure_attacks(run, args.threads), subtitle(run)),
        }

    def body() -> None:
        require_writable(folder / f"{OF_RUN[0]}.png")
        of_results = {"attack_seeds": lambda: draw_attack_seeds(sorted(RESULTS.glob(ATTACK_RESULTS.name)))}
        draw_figures(folder, args, of_results, of_run)

    return exit_status(body)


if __name__ == "__main__":
    sys.exit(main())
