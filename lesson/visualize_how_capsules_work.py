#!/usr/bin/env python3
"""The pictures of docs/how_capsules_work.md: what each step of a capsule network does.

    parts_and_wholes  a face, the same face turned, and its parts scrambled, each part with its vote for the whole
    worked_example    four votes in the plane for two parents, and their routing in two iterations
    squash            lengths of ten digit capsules before and after squash, and the slope of squash
    dynamic_routing   couplings of the primary capsules and lengths of the digit capsules, by iteration
    em_routing        votes, Gaussians, assignments and activations, by iteration
    losses            margin loss, spread loss and reconstruction

Two networks are needed: the CapsNet of multimnist_capsnet.py, from a checkpoint or trained, and the matrix capsules of
smallnorb_novel_viewpoint.py, which are trained here in seconds:

    python -m lesson.visualize_how_capsules_work --checkpoint capsnet.safetensors
"""

from __future__ import annotations

from support.figures import (  # isort: skip
    BLACK, BLUE, DATASET_NAMES, GREEN, GREY, ORANGE, PURPLE, RIGHT, SKY, VERMILLION, WRONG, FigureOptions,
    add_frame, choice_of_figures, darkened, figure_script, head_legend, heading, lightened, load_or_train,
    make_figure, show_pictures,
)  # fmt: skip

import dataclasses
import sys
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Arc, Ellipse

import multimnist_capsnet as digits
import smallnorb_novel_viewpoint as views
from multimnist_capsnet import Config
from support.output import UserError
from support.settings import redeclared

Array = np.ndarray
NAME = "how_capsules_work"
FIRST, SECOND = BLUE, VERMILLION  # the two digits of an image, the two classes of an object
FULL_COLOUR = 1 / 3  # of the preference for one of two parents: where one coupling is twice the other

# --- The examples -----------------------------------------------------------------------------------------------------


class Composite(NamedTuple):
    """An image of two digits in the CapsNet, and its dynamic routing in T iterations."""

    dataset: str
    image: Array  # (H, W)
    sources: Array  # (2, H, W) its two digits
    drawn: Array  # (2, H, W) their reconstructions
    labels: Array  # (2,)
    u: Array  # (rows, columns, types) lengths of the primary capsules
    c: Array  # (T, J, rows, columns, types) couplings
    s: Array  # (T, J) lengths of the parents' inputs
    v: Array  # (T, J) lengths of the digit capsules


def composite_example(config: Config, data: digits.Data, params: digits.Params) -> Composite:
    """The first test image whose digits are the two longest capsules, both longer than 0.6."""
    for k, labels in enumerate(data.test.labels[:500]):
        lengths, cache = digits.capsnet_forward(params, data.test.images[k : k + 1], config, digits.PLAIN)
        if lengths[0, labels].min() > max(0.6, np.delete(lengths[0], labels).max()):
            break
    else:
        raise UserError("the CapsNet finds both digits of none of the first 500 test images: train it longer")
    drawn = digits.reconstruct(params, cache.v, labels[None])[0]
    grid = (config.primary_side, config.primary_side, config.primary_types)
    routing = cache.routing
    return Composite(
        data.name, data.test.images[k], data.test.sources[k], drawn, labels,
        np.sqrt(np.square(routing.u[0]).sum(axis=1)).reshape(grid),
        np.stack([c[0].T.reshape(-1, *grid) for c in routing.c]),
        np.stack([np.sqrt(np.square(s[0]).sum(axis=1)) for s, _ in routing.squashes]),
        np.stack([np.sqrt(np.square(v[0]).sum(axis=1)) for v in routing.v]),
    )  # fmt: skip


class View(NamedTuple):
    """A held-out view of an object in the matrix capsules, and its EM routing in T iterations."""

    image: Array  # (H, W)
    label: int
    votes: Array  # (I, J, D)
    a_in: Array  # (I,)
    r: Array  # (T, I, J)
    mu: Array  # (T, J, D)
    sigma_sq: Array  # (T, J, D)
    a: Array  # (T, J)


def view_example(seed: int) -> View:
    """The first held-out view of an L that is recognised, by the default network."""
    config = views.Config(seed=seed)
    data = views.make_data(config)
    model = views.make_models(config)["capsules"]
    params = views.train_all(config, data, names=("capsules",))["capsules"].params
    scores, cache = model.forward(params, data.held_out.images)
    answers, labels = scores.argmax(axis=1), data.held_out.labels
    k = int(np.flatnonzero((answers == labels) & (labels == views.VOXEL_CLASSES.index("L")))[0])
    steps = cache.routing.m_steps
    routing = (np.stack([getattr(step, name)[k] for step in steps]) for name in ("r", "mu", "sigma_sq", "a"))
    return View(data.held_out.images[k, :, :, 0], int(labels[k]), steps[0].votes[k], cache.a_in[k], *routing)


# Four votes of two numbers each for two parents: three agree on A, and none on B.
WORKED_EXAMPLE = np.array(
    [[[1, 0], [0, 1]], [[1, 0], [0, -1]], [[1, 0], [1, 0]], [[-1, 0], [-1, 0]]], float
)  # (I, J, D)


# --- Figures ----------------------------------------------------------------------------------------------------------


FACE = {  # name of a part, where it is in the face, and its colour; a face is 2 high
    "left eye": (-0.32, 0.28, BLUE), "right eye": (0.32, 0.28, SKY), "nose": (0.0, -0.05, GREEN),
    "mouth": (0.0, -0.48, VERMILLION),
}  # fmt: skip


def draw_part(ax: Axes, name: str, at: Array, degrees: float, colour: str) -> None:
    x, y = map(float, at)
    outline: dict[str, Any] = {"edgecolor": colour, "linewidth": 2.2, "zorder": 4}
    if "eye" in name:
        ax.add_patch(Ellipse((x, y), 0.34, 0.2, angle=degrees, facecolor="white", **outline))
        ax.plot(x, y, "o", color=colour, markersize=4.5, zorder=5)
    elif name == "nose":
        points = turned(np.array([[0.0, 0.2], [0.12, -0.13], [-0.05, -0.13]]), degrees) + at
        ax.plot(*points.T, color=colour, linewidth=2.2, zorder=4, solid_capstyle="round")
    else:
        ax.add_patch(Arc((x, y), 0.6, 0.3, angle=degrees, theta1=190, theta2=350, facecolor="none", **outline))


def turned(points: Array, degrees: float) -> Array:
    """Points (..., 2), turned to the left about the origin."""
    cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    return points @ np.array([[cos, sin], [-sin, cos]])


def draw_parts_and_wholes() -> Figure:
    fig = make_figure(4.2, "Parts and wholes", "Each part votes for the face that it would belong to: an oval of its"
                      " colour, with a cross at its centre")  # fmt: skip
    scrambled = {"left eye": (0.35, -0.5, 25), "right eye": (-0.55, -0.2, -40), "nose": (0.45, 0.4, 115),
                 "mouth": (-0.3, 0.55, 160)}  # fmt: skip
    panels: tuple[tuple[str, float, dict[str, Any], str], ...] = (
        ("a face", 0.0, {}, "The votes agree: a face."),
        ("the same face, turned", -35.0, {}, "The votes turn too, and agree again."),
        ("the same parts, scrambled", 0.0, scrambled, "No agreement: all parts, but no face."),
    )
    for ax, (title, degrees, moved, text) in zip(fig.subplots(1, 3), panels, strict=True):
        heading(ax, title)
        for n, (name, (x, y, colour)) in enumerate(FACE.items()):
            at, angle = turned(np.array([x, y]), degrees), degrees
            if moved:
                *position, angle = moved[name]
                at = np.array(position)
            centre = at - turned(np.array([x, y]), angle)  # the vote: where the face would be
            size = 1 - 0.03 * n  # or ovals that agree would hide each other
            ax.add_patch(Ellipse(centre, 1.6 * size, 2 * size, angle=angle, facecolor="none", edgecolor=colour,
                                 linewidth=1.3, linestyle=(0, (4, 2))))  # fmt: skip
            ax.plot(*centre, "+", color=colour, markersize=11 - 1.5 * n, markeredgewidth=1.8, zorder=3)
            ax.plot(*np.stack([at, centre]).T, color=colour, linewidth=0.9, zorder=2)
            draw_part(ax, name, at, angle, colour)
        ax.set(xlim=(-1.6, 1.6), ylim=(-1.6, 1.6), aspect="equal")
        add_frame(ax)
        ax.set_xlabel(text, color=darkened(WRONG if moved else RIGHT), fontweight="bold", loc="left")
    return fig


def draw_arrow(ax: Axes, start: Array, stop: Array, colour: str, width: float) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": width, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", (stop[0], stop[1]), (start[0], start[1]), arrowprops=style)


def draw_worked_example() -> Figure:
    fig = make_figure(3.3, "Four votes, two parents, two iterations", "Grey: the votes, as wide as their couplings."
                      " In colour: the output v of the parent")  # fmt: skip
    axes = iter(fig.subplots(1, 4))
    b = np.zeros(WORKED_EXAMPLE.shape[:2])
    for t in range(2):
        c = np.exp(b) / np.exp(b).sum(axis=1, keepdims=True)
        s = np.einsum("ij,ijd->jd", c, WORKED_EXAMPLE)
        length = np.sqrt((s * s).sum(axis=1, keepdims=True))
        v = s * length / (1 + length**2)
        b += np.einsum("ijd,jd->ij", WORKED_EXAMPLE, v)
        for j, colour in enumerate((FIRST, SECOND)):
            ax = next(axes)
            heading(ax, f"iteration {t + 1}, parent {'AB'[j]}", colour)
            for i, vote in enumerate(WORKED_EXAMPLE[:, j]):
                equal = np.flatnonzero((WORKED_EXAMPLE[:, j] == vote).all(axis=1))  # side by side
                aside = 0.16 * (np.flatnonzero(equal == i)[0] - (len(equal) - 1) / 2) * turned(vote, 90)
                draw_arrow(ax, aside, vote + aside, "#a5a5a5", 5 * c[i, j])
                x, y = 1.18 * vote + 1.3 * aside
                ax.text(x, y, str(i + 1), ha="center", va="center", color=GREY, fontsize=9)
            if v[j].any():
                draw_arrow(ax, np.zeros(2), v[j], colour, 3)
            ax.plot(0, 0, "o", color=colour, markersize=5, zorder=6)
            ax.set(xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), aspect="equal")
            add_frame(ax)
            ax.set_xlabel(f"length of v: {length[j, 0] ** 2 / (1 + length[j, 0] ** 2):.2f}", loc="left")
    return fig


def pair(composite: Composite) -> str:
    return " and ".join(str(label) for label in composite.labels)


def digit_colour(composite: Composite, j: int) -> str:
    return {int(composite.labels[0]): FIRST, int(composite.labels[1]): SECOND}.get(j, GREY)


def show_image(ax: Axes, image: Array, title: str) -> None:
    show_pictures(ax, image[None, None]).frame(0, 0, GREY, 0.8)
    ax.set_title(title)


def draw_squash(composite: Composite) -> Figure:
    fig = make_figure(3.9, "Squash", f"The ten digit capsules of an image of {pair(composite)};"
                      f" {DATASET_NAMES[composite.dataset]}, {len(composite.v)} iterations of routing")  # fmt: skip
    image, lengths, slopes = fig.subplots(1, 3, width_ratios=(1.45, 3, 2.6))
    show_image(image, composite.image, "the image")
    most = max(2.0, 1.12 * composite.s[-1].max())
    norm = np.linspace(0, most, 400)
    lengths.plot(norm, norm**2 / (1 + norm**2), color=BLACK, linewidth=1.4)
    for j in range(digits.N_CLASSES):
        colour = digit_colour(composite, j)
        x, y = composite.s[-1, j], composite.v[-1, j]
        lengths.plot(x, y, "o", color=colour, zorder=4)
        if colour != GREY:
            lengths.plot([x, x], [0, y], color=colour, linewidth=1.0, linestyle=":")
            lengths.annotate(f"capsule {j}", (x, y), xytext=(-8, 6), textcoords="offset points", ha="right",
                             color=darkened(colour), fontweight="bold")  # fmt: skip
    lengths.set(xlim=(0, most), ylim=(0, 1), xlabel="‖s‖ before squash", ylabel="‖v‖ after squash",
                title="length of a capsule")  # fmt: skip
    q = norm**2
    across = norm / (1 + q)
    slopes.plot(norm, across, color=PURPLE, label="across s: f(q)")
    slopes.plot(norm, across + norm * (1 - q) / (1 + q) ** 2, color=GREEN, label="along s: f(q) + 2 f'(q) q")
    slopes.set(xlim=(0, most), ylim=(0, 0.92), xlabel="‖s‖ before squash", ylabel="change of v / change of s",
               title="effect of a small change of s")  # fmt: skip
    slopes.legend(loc="upper right")
    return fig


def draw_dynamic_routing(composite: Composite) -> Figure:
    fig = make_figure(5.55, "Dynamic routing", f"An image of {pair(composite)}; {DATASET_NAMES[composite.dataset]}")
    named = [(f"coupling to {label} twice the other", colour)
             for label, colour in zip(composite.labels, (FIRST, SECOND), strict=True)]  # fmt: skip
    head_legend(fig, [Line2D([], [], ls="", marker="o", color=colour, label=text)
                      for text, colour in (*named, ("to both equally", "#bfbfbf"))])  # fmt: skip
    sides: Any = fig.subfigures(1, 2, width_ratios=(1.6, 7))
    image, two = sides[0].subplots(2, 1)
    show_image(image, composite.image, "the image")
    both = 1 - sum(
        source[..., None] * (1 - np.array(to_rgb(colour)))
        for source, colour in zip(composite.sources, (FIRST, SECOND), strict=True)
    )
    show_image(two, both, "its two digits")
    centre = (digits.KERNEL - 1) / 2 * 2  # of the field of the first primary capsule, in pixels
    rows, columns, _ = composite.u.shape
    y, x = np.meshgrid(centre + 2 * np.arange(rows), centre + 2 * np.arange(columns), indexing="ij")
    length = composite.u.mean(axis=2)  # (rows, columns), over types
    total = composite.u.sum(axis=2)
    a, b = ((composite.c[:, j] * composite.u).sum(axis=3) / total for j in composite.labels)  # (T, rows, columns)
    preference = (a - b) / np.maximum(a + b, 1e-12)  # from -1 to 1
    axes = sides[1].subplots(2, len(composite.v), height_ratios=(2.4, 1), sharey="row", squeeze=False)
    for t, (ax, bars) in enumerate(axes.T):
        heading(ax, f"iteration {t + 1}")
        ax.imshow(1 - 0.2 * composite.image, vmin=0, vmax=1)
        strength = np.clip(np.abs(preference[t]) / FULL_COLOUR, 0, 1)[..., None]
        ends = np.where((preference[t] > 0)[..., None], to_rgb(FIRST), to_rgb(SECOND))
        colours = strength * ends + (1 - strength) * 0.75
        ax.scatter(x, y, s=130 * (length / length.max()) ** 2, c=colours.reshape(-1, 3), linewidths=0.6,
                   edgecolors="white")  # fmt: skip
        ax.set(xlim=(x.min() - 3, x.max() + 3), ylim=(y.max() + 3, y.min() - 3))
        add_frame(ax)
        for d, label in enumerate(composite.labels):
            low, high = np.quantile(composite.c[t, label], [0.05, 0.95])
            text = f"couplings to {label}: " + (f"{low:.3f} to {high:.3f}" if t else f"all {low:.3f}")
            ax.annotate(text, (0, 0), (0, -4 - 13 * d), xycoords="axes fraction", textcoords="offset points", va="top",
                        color=darkened((FIRST, SECOND)[d]))  # fmt: skip
        bars.bar(range(digits.N_CLASSES), composite.v[t],
                 color=[digit_colour(composite, j) for j in range(digits.N_CLASSES)])  # fmt: skip
        bars.set(ylim=(0, 1), xticks=range(digits.N_CLASSES), yticks=[0, 0.5, 1], xlabel="digit capsule")
    axes[1, 0].set_title("lengths ‖v‖ of the digit capsules")
    return fig


def add_gaussian(ax: Axes, mean: Array, sd: Array, axes: Array, colour: str) -> None:
    """A parent's Gaussian at one standard deviation, its covariance projected on two directions ``axes`` (D, 2)."""
    covariance = axes.T @ (sd[:, None] ** 2 * axes)  # (2, 2)
    values, vectors = np.linalg.eigh(covariance)
    angle = np.degrees(np.arctan2(vectors[1, 1], vectors[0, 1]))
    width, height = 2 * np.sqrt(values[1]), 2 * np.sqrt(values[0])
    x, y = map(float, mean)
    ax.add_patch(Ellipse((x, y), width, height, angle=angle, facecolor=lightened(colour, 0.12), edgecolor=colour))
    ax.plot(x, y, marker="+", color=colour, markersize=10, markeredgewidth=2)


def draw_em_routing(view: View) -> Figure:
    """Votes for the true class and for the most active wrong one."""
    n_children, J = view.votes.shape[:2]
    name = views.VOXEL_CLASSES
    rival = int(np.argsort(view.a[-1] - 2 * np.eye(J)[view.label])[-1])
    shown = {view.label: FIRST, rival: SECOND}
    fig = make_figure(6.2, "EM routing", f"Votes of the {n_children} primary capsules of a held-out view of a voxel"
                      f" object ({name[view.label]}), on the two directions in which they vary most")  # fmt: skip
    handles = [Line2D([], [], ls="", marker="o", color=colour, label=f"votes for {name[j]}")
               for j, colour in shown.items()]  # fmt: skip
    head_legend(fig, handles)
    sides: Any = fig.subfigures(1, 2, width_ratios=(1.6, 7))
    show_image(sides[0].subplots(), view.image, "the image")
    chosen = view.votes[:, list(shown)].reshape(-1, view.votes.shape[2])
    centre = chosen.mean(axis=0)
    directions = np.linalg.svd(chosen - centre)[2][:2].T  # (D, 2)
    plane = (view.votes - centre) @ directions  # (I, J, 2)
    reach = 1.15 * np.abs(plane[:, list(shown)]).max()
    axes = sides[1].subplots(2, len(view.r), height_ratios=(2, 1), sharey="row")
    for t, (ax, assignments) in enumerate(axes.T):
        heading(ax, f"iteration {t + 1}: M-step")
        for j, colour in shown.items():
            add_gaussian(ax, (view.mu[t][j] - centre) @ directions, np.sqrt(view.sigma_sq[t][j]), directions, colour)
            mass = view.r[t][:, j] * view.a_in
            ax.scatter(plane[:, j, 0], plane[:, j, 1], s=4 + 130 * mass, color=colour, edgecolors="white",
                       linewidths=0.5, zorder=4)  # fmt: skip
        ax.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
        ax.set_xticks(ax.get_yticks()[1:-1])
        assignments.imshow(view.r[t].T, cmap="Greys", vmin=0, vmax=1, aspect="auto")
        assignments.set_title("assignments" if t else "assignments: even")
        assignments.set_xticks(range(n_children), [str(i + 1) for i in range(n_children)])
        assignments.set_yticks(range(J), name)
        assignments.grid(False)
        text = "   ".join(f"{name[j]} {view.a[t][j]:.2f}" for j in shown)
        assignments.set_xlabel(f"primary capsule\nactivations: {text}", linespacing=1.6)
    for j, colour in shown.items():
        axes[1, 0].get_yticklabels()[j].set_color(darkened(colour))
    return fig


def draw_losses(composite: Composite, view: View) -> Figure:
    fig = make_figure(3.9, "The losses", f"Left and right: the image of {pair(composite)}. Middle: the"
                      f" {views.VOXEL_CLASSES[view.label]}")  # fmt: skip
    margin_loss, spread_loss, pictures = fig.subplots(1, 3)
    length = np.linspace(0, 1, 200)

    def term(x: Array, *, present: bool) -> Array:
        return np.maximum(0, 0.9 - x) ** 2 if present else 0.5 * np.maximum(0, x - 0.1) ** 2

    margin_loss.plot(length, term(length, present=True), color=BLACK, label="digit in the image")
    margin_loss.plot(length, term(length, present=False), color=BLACK, linestyle="--", label="digit not in it")
    for j in range(digits.N_CLASSES):
        x, there = composite.v[-1, j], j in composite.labels
        margin_loss.plot(x, term(x, present=there), "o", color=digit_colour(composite, j), zorder=4, clip_on=False)
    margin_loss.set(xlim=(0, 1), ylim=(0, 0.85), xlabel="length ‖v‖ of a digit capsule", ylabel="term of the loss",
                    title="margin loss")  # fmt: skip
    margin_loss.legend(loc="upper right")

    gap = np.linspace(-0.5, 1, 400)
    for margin, colour in ((0.2, lightened(GREEN, 0.45)), (0.55, lightened(GREEN, 0.7)), (0.9, darkened(GREEN))):
        spread_loss.plot(gap, np.maximum(0, margin - gap) ** 2, color=colour, label=f"m = {margin:g}")
    a = view.a[-1]
    wrong = a[view.label] - np.delete(a, view.label)
    spread_loss.plot(
        wrong, np.maximum(0, 0.9 - wrong) ** 2, "o", color=ORANGE, zorder=4, label="the four wrong classes"
    )
    spread_loss.set(xlim=(-0.5, 1), xticks=[-0.5, 0, 0.5, 1], ylim=(0, 2.3), xlabel="aₜ − aₖ, true minus wrong",
                    title="spread loss")  # fmt: skip
    spread_loss.legend(loc="upper right")

    error = np.square(composite.drawn - composite.sources)
    grid = show_pictures(pictures, np.stack([composite.sources, composite.drawn, error], axis=1), gap=(10, 2))
    pictures.set_title("reconstruction: digit, drawn, error²")
    for d, label in enumerate(composite.labels):
        for k in range(3):
            grid.frame(d, k, (FIRST, SECOND)[d], 1.2)
        grid.write(d, 1, f"capsule {label}: sum of error² {error[d].sum():.1f}")
    return fig


# --- Command line -----------------------------------------------------------------------------------------------------

WITHOUT_NETWORKS = {"parts_and_wholes": draw_parts_and_wholes, "worked_example": draw_worked_example}
OF_NETWORKS: dict[str, Callable[[tuple[Composite, View]], Figure]] = {
    "squash": lambda of: draw_squash(of[0]),
    "dynamic_routing": lambda of: draw_dynamic_routing(of[0]),
    "em_routing": lambda of: draw_em_routing(of[1]),
    "losses": lambda of: draw_losses(*of),
}


@dataclasses.dataclass(frozen=True)
class Options(FigureOptions):
    figures: tuple[str, ...] = choice_of_figures(*WITHOUT_NETWORKS, *OF_NETWORKS)
    threads: int = redeclared(digits.Options, "threads")


def examples(asked: Config, options: Options, given: Collection[str]) -> tuple[Composite, View]:
    run = load_or_train(digits, options, asked, given, digits.resolve_auto, names=["capsnet"], required=["capsnet"])
    return composite_example(run.config, run.data, run.states["capsnet"].params), view_example(seed=0)


main = figure_script(
    NAME, Config, Options, "Draw the pictures of docs/how_capsules_work.md.",
    [
        ("--checkpoint capsnet.safetensors", "All pictures, from a checkpoint: about 7 seconds."),
        ("", "All pictures, after training the networks: about 2 minutes."),
        ("--dataset strokes --outdir draft", "The same on generated digits, into draft/: about 2 minutes."),
    ],
    examples, OF_NETWORKS, WITHOUT_NETWORKS,
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
