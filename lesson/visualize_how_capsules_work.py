"""The pictures of docs/how_capsules_work.md and docs/capsule_reference.md: what each step of a capsule network does.

    parts_and_wholes  a face, the same face rotated, and its parts scrambled, each part with its vote for the whole
    worked_example    four votes in the plane for two parents, and their dynamic routing in two iterations
    dynamic_routing   drawn votes of twelve children for two parents, in three iterations
    em_routing        four votes in the plane for two parents, and their EM routing in three iterations
    squash            the curve of squash with the ten digit capsules of an image, and the slope of squash
    couplings         the couplings of the children of that image in three iterations, and its digit capsules
    losses            margin loss and spread loss

The last three are of the network that the lesson trains. Its code blocks run here, in half a minute:

    python -m lesson.visualize_how_capsules_work
"""

from __future__ import annotations

from support.figures import (
    BLACK, BLUE, GREEN, GREY, PURPLE, RIGHT, SKY, VERMILLION, WRONG, OutOptions, Settings, add_frame,
    choice_of_figures, darkened, figure_script, heading, lightened, make_figure, show_pictures,
)

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Arc, Ellipse

from lesson.make_notebook import run_page
from lesson.solutions import dynamic_routing, e_step, m_step, sigmoid
from smallnorb_novel_viewpoint import RunOptions
from support.experiment import redeclared

Array = np.ndarray
NAME = "how_capsules_work"
FIRST, SECOND = BLUE, VERMILLION  # parents, and the children that agree about them
SIDE, TYPES = 5, 4  # of the grid of the lesson's children, and how many share a place

# --- The examples -----------------------------------------------------------------------------------------------------

# Four votes of two numbers each for two parents: three agree on A, and none on B.
WORKED_EXAMPLE = np.array(
    [[[1, 0], [0, 1]], [[1, 0], [0, -1]], [[1, 0], [1, 0]], [[-1, 0], [-1, 0]]], float
)  # (I, J, D)
# Those with which the explorer's plane begins.
EM_EXAMPLE = np.array(
    [[[1.4, 1.2], [-2.6, 1.9]], [[1.8, 0.7], [0.4, -2.8]], [[1.1, 0.6], [2.6, -1.2]], [[-2.2, -1.6], [-1.3, -0.4]]]
)  # (I, J, D)
EM_BETA_A, EM_FLOOR = -4.0, 0.05


def drawn_votes() -> Array:
    """(12, 2, 2): children 0 to 5 agree about parent A, 6 to 11 about B."""
    rng = np.random.default_rng(104)
    angle, length = rng.uniform(0, 2 * np.pi, (12, 2)), rng.uniform(0.96, 1.44, (12, 2))
    angle[:6, 0], angle[6:, 1] = 0.6 + 0.25 * rng.standard_normal(6), 2.4 + 0.25 * rng.standard_normal(6)
    return length[..., None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)


class Trained(NamedTuple):
    """A test image in the network of the lesson, and its routing in T iterations."""

    dataset: str
    image: Array  # (28, 28)
    label: int
    c: Array  # (T, I, J) couplings
    s: Array  # (J,) lengths of the parents' last inputs
    v: Array  # (J,) lengths of the digit capsules


def trained(page: Mapping[str, Any]) -> Trained:
    """The first test image that is classified correctly, from what the page's program has defined."""
    v, (*_, steps) = page["forward"](page["params"], page["test_images"][:100])
    k = int(np.argmax(np.linalg.norm(v, axis=2).argmax(axis=1) == page["test_labels"][:100]))
    lengths = (np.linalg.norm(x[k], axis=1) for x in steps[-1][1:])
    dataset = "MNIST" if page["folder"] else "digits that the project draws"
    return Trained(dataset, page["test_images"][k], int(page["test_labels"][k]), np.stack([c[k] for c, *_ in steps]),
                   *lengths)


# --- Figures ----------------------------------------------------------------------------------------------------------


FACE = {  # name of a part, where it is in the face, and its colour; a face is 2 high
    "left eye": (-0.32, 0.28, BLUE), "right eye": (0.32, 0.28, SKY), "nose": (0.0, -0.05, GREEN),
    "mouth": (0.0, -0.48, VERMILLION),
}


def draw_part(ax: Axes, name: str, at: Array, degrees: float, colour: str) -> None:
    x, y = map(float, at)
    outline: dict[str, Any] = {"edgecolor": colour, "linewidth": 2.2, "zorder": 4}
    if "eye" in name:
        ax.add_patch(Ellipse((x, y), 0.34, 0.2, angle=degrees, facecolor="white", **outline))
        ax.plot(x, y, "o", color=colour, markersize=4.5, zorder=5)
    elif name == "nose":
        points = rotated(np.array([[0.0, 0.2], [0.12, -0.13], [-0.05, -0.13]]), degrees) + at
        ax.plot(*points.T, color=colour, linewidth=2.2, zorder=4, solid_capstyle="round")
    else:
        ax.add_patch(Arc((x, y), 0.6, 0.3, angle=degrees, theta1=190, theta2=350, facecolor="none", **outline))


def rotated(points: Array, degrees: float) -> Array:
    """Points (..., 2), rotated to the left about the origin."""
    cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    return points @ np.array([[cos, sin], [-sin, cos]])


def draw_parts_and_wholes() -> Figure:
    fig = make_figure(4.2, "Parts and wholes", "Each part votes for the face that it would belong to: an oval of its"
                      " colour, with a cross at its centre")
    scrambled = {"left eye": (0.35, -0.5, 25), "right eye": (-0.55, -0.2, -40), "nose": (0.45, 0.4, 115),
                 "mouth": (-0.3, 0.55, 160)}
    panels: tuple[tuple[str, float, dict[str, Any], str], ...] = (
        ("a face", 0.0, {}, "The votes agree: a face."),
        ("the same face, rotated", -35.0, {}, "The votes rotate too, and agree again."),
        ("the same parts, scrambled", 0.0, scrambled, "No agreement: all parts, but no face."),
    )
    for ax, (title, degrees, moved, text) in zip(fig.subplots(1, 3), panels, strict=True):
        heading(ax, title)
        for n, (name, (x, y, colour)) in enumerate(FACE.items()):
            at, angle = rotated(np.array([x, y]), degrees), degrees
            if moved:
                *position, angle = moved[name]
                at = np.array(position)
            centre = at - rotated(np.array([x, y]), angle)  # the vote: where the face would be
            size = 1 - 0.03 * n  # or ovals that agree would hide each other
            ax.add_patch(Ellipse(centre, 1.6 * size, 2 * size, angle=angle, facecolor="none", edgecolor=colour,
                                 linewidth=1.3, linestyle=(0, (4, 2))))
            ax.plot(*centre, "+", color=colour, markersize=11 - 1.5 * n, markeredgewidth=1.8, zorder=3)
            ax.plot(*np.stack([at, centre]).T, color=colour, linewidth=0.9, zorder=2)
            draw_part(ax, name, at, angle, colour)
        ax.set(xlim=(-1.6, 1.6), ylim=(-1.6, 1.6), aspect="equal")
        add_frame(ax)
        ax.set_xlabel(text, color=darkened(WRONG if moved else RIGHT), fontweight="bold", loc="left")
    return fig


def draw_arrow(ax: Axes, start: Array, stop: Array, colour: str, width: float) -> None:
    """The head is no longer than half of the arrow."""
    head = min(10.0, 30 * float(np.linalg.norm(stop - start)))
    style = {"arrowstyle": "-|>", "mutation_scale": head, "color": colour, "linewidth": min(width, 0.4 * head),
             "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", (stop[0], stop[1]), (start[0], start[1]), arrowprops=style)


def draw_worked_example() -> Figure:
    fig = make_figure(3.3, "Four votes, two parents, two iterations", "Grey: the votes, as wide as their couplings."
                      " In colour: the output v of the parent")
    axes = iter(fig.subplots(1, 4))
    for t, (c, _, v) in enumerate(dynamic_routing(WORKED_EXAMPLE, 2)[1]):
        for j, colour in enumerate((FIRST, SECOND)):
            ax = next(axes)
            heading(ax, f"iteration {t + 1}, parent {'AB'[j]}", colour)
            for i, vote in enumerate(WORKED_EXAMPLE[:, j]):
                equal = np.flatnonzero((WORKED_EXAMPLE[:, j] == vote).all(axis=1))  # side by side
                aside = 0.16 * (np.flatnonzero(equal == i)[0] - (len(equal) - 1) / 2) * rotated(vote, 90)
                draw_arrow(ax, aside, vote + aside, "#a5a5a5", 5 * c[i, j])
                x, y = 1.18 * vote + 1.3 * aside
                ax.text(x, y, str(i + 1), ha="center", va="center", color=GREY, fontsize=9)
            if v[j].any():
                draw_arrow(ax, np.zeros(2), v[j], colour, 3)
            ax.plot(0, 0, "o", color=colour, markersize=3, zorder=6)
            ax.set(xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), aspect="equal")
            add_frame(ax)
            ax.set_xlabel(f"length of v: {np.linalg.norm(v[j]):.2f}", loc="left")
    return fig


def draw_dynamic_routing() -> Figure:
    votes = drawn_votes()
    fig = make_figure(6.0, "Dynamic routing of drawn votes", "Of no network. A dot is the end of a vote, its area the"
                      " coupling. Blue children agree about A, red ones about B")
    for t, (c, _, v) in enumerate(steps := dynamic_routing(votes, 3)[1]):
        for j, name in enumerate("AB"):
            ax = fig.add_subplot(2, len(steps), 1 + len(steps) * j + t)
            heading(ax, f"iteration {t + 1}, parent {name}")
            for group, colour in ((slice(0, 6), FIRST), (slice(6, 12), SECOND)):
                x, y = votes[group, j].T
                ax.scatter(x, y, 260 * c[group, j], color=colour, edgecolors="white", zorder=3)
            draw_arrow(ax, np.zeros(2), v[j], BLACK, 3)
            ax.set(xlim=(-1.7, 1.7), ylim=(-1.7, 1.7), aspect="equal")
            add_frame(ax)
            blue, red = c[:6, j].mean(), c[6:, j].mean()
            ax.set_xlabel(f"mean coupling: blue {blue:.2f}, red {red:.2f}\nlength of v: {np.linalg.norm(v[j]):.2f}",
                          loc="left")
    return fig


def draw_em_routing() -> Figure:
    fig = make_figure(5.4, "EM routing of four votes in the plane", "Blue: votes for A, and A's Gaussian at one"
                      " standard deviation. Red: those of B. A dot's area is the assignment")
    axes = fig.subplots(2, 3, height_ratios=(3, 1))
    r, ones, zeros = np.full((4, 2), 0.5), np.ones(4), np.zeros(2)
    for t, (plane, table) in enumerate(axes.T):
        mu, sigma_sq, z = m_step(r, ones, EM_EXAMPLE, np.full(2, EM_BETA_A), zeros, 1.0, EM_FLOOR)
        heading(plane, f"iteration {t + 1}: M-step")
        for j, colour in enumerate((FIRST, SECOND)):
            x, y = map(float, mu[j])
            width, height = 2 * np.sqrt(sigma_sq[j])
            plane.add_patch(Ellipse((x, y), width, height, facecolor=lightened(colour, 0.12)))
            plane.add_patch(Ellipse((x, y), width, height, facecolor="none", edgecolor=colour, zorder=5))
            plane.plot(x, y, marker="+", color=colour, markersize=10, markeredgewidth=2)
            plane.scatter(*EM_EXAMPLE[:, j].T, s=10 + 170 * r[:, j], color=colour, edgecolors="white", zorder=4)
            for i, vote in enumerate(EM_EXAMPLE[:, j]):
                aside = (-4, -17) if i == 2 else (8, 4)  # points, so that no dot hides a number
                plane.annotate(f"{i + 1}", (vote[0], vote[1]), aside, textcoords="offset points", color=GREY,
                               fontsize=9)
        plane.set(xlim=(-4, 4), ylim=(-3.6, 3.6), aspect="equal")
        add_frame(plane)
        table.imshow(r.T, cmap="Greys", vmin=0, vmax=1.6, aspect="auto")
        for i in range(4):
            for j in range(2):
                table.text(i, j, f"{r[i, j]:.2f}", ha="center", va="center")
        table.set_title("assignments from the E-step" if t else "assignments: even")
        table.set_xticks(range(4), [str(i + 1) for i in range(4)])
        table.set_yticks(range(2), ["A", "B"])
        table.grid(False)
        a = sigmoid(z)
        table.set_xlabel(f"child\nactivations: A {a[0]:.3f}, B {a[1]:.3f}", linespacing=1.6)
        r = e_step(mu, sigma_sq, z, EM_EXAMPLE)
    return fig


def show_image(ax: Axes, image: Array, title: str) -> None:
    show_pictures(ax, image[None, None] / 255).frame(0, 0, GREY, 0.8)
    ax.set_title(title)


def draw_squash(of: Trained) -> Figure:
    fig = make_figure(3.9, "Squash", f"The ten digit capsules of an image of {of.label}, in the network of the lesson;"
                      f" {of.dataset}")
    image, lengths, slopes = fig.subplots(1, 3, width_ratios=(1.45, 3, 2.6))
    show_image(image, of.image, "the image")
    most = max(2.0, 1.12 * of.s.max())
    norm = np.linspace(0, most, 400)
    lengths.plot(norm, norm**2 / (1 + norm**2), color=BLACK, linewidth=1.4)
    for j, (x, y) in enumerate(zip(of.s, of.v, strict=True)):
        lengths.plot(x, y, "o", color=FIRST if j == of.label else GREY, zorder=4)
    lengths.annotate(f"capsule {of.label}", (of.s[of.label], of.v[of.label]), xytext=(-8, -14), ha="right",
                     textcoords="offset points", color=darkened(FIRST), fontweight="bold")
    lengths.set(xlim=(0, most), ylim=(0, 1), xlabel="‖s‖ before squash", ylabel="‖v‖ after squash",
                title="length of a capsule")
    q = norm**2
    across = norm / (1 + q)
    slopes.plot(norm, across, color=PURPLE, label="across s: f(q)")
    slopes.plot(norm, across + norm * (1 - q) / (1 + q) ** 2, color=GREEN, label="along s: f(q) + 2 f'(q) q")
    slopes.set(xlim=(0, most), ylim=(0, 0.92), xlabel="‖s‖ before squash", ylabel="change of v / change of s",
               title="effect of a small change of s")
    slopes.legend(loc="upper right")
    return fig


def draw_couplings(of: Trained) -> Figure:
    fig = make_figure(3.5, "Couplings of a trained network", f"An image of {of.label}; {of.dataset}. A mark: the"
                      f" {TYPES} children of a place,\na blue circle where their coupling is above 1/10,"
                      " a red square below")
    *maps, bars = fig.subplots(1, len(of.c) + 1)
    x, y = np.meshgrid(4 + 4 * np.arange(SIDE), 4 + 4 * np.arange(SIDE))  # the middles of the squares, in pixels
    to_true = of.c[:, :, of.label].reshape(len(of.c), SIDE * SIDE, TYPES).mean(axis=2)
    for t, (ax, share) in enumerate(zip(maps, to_true, strict=True)):
        show_image(ax, 255 - 0.25 * of.image, f"iteration {t + 1}")
        shift = np.clip((share - 0.1) / 0.05, -1, 1)
        for marker, colour, these in (("o", FIRST, shift >= 0), ("s", SECOND, shift < 0)):
            colours = [lightened(colour, abs(d)) for d in shift[these]]
            ax.scatter(x.flat[these], y.flat[these], s=90, c=colours, marker=marker, edgecolors=GREY, linewidths=0.6)
        ax.set_xlabel(f"to {of.label}: {share.min():.3f} to {share.max():.3f}")
    bars.bar(range(len(of.v)), of.v, color=[FIRST if j == of.label else GREY for j in range(len(of.v))])
    bars.set(ylim=(0, 1), xticks=range(len(of.v)), xlabel="digit capsule", title="lengths ‖v‖")
    return fig


def draw_losses(of: Trained) -> Figure:
    fig = make_figure(3.9, "The losses", f"Dots: the ten digit capsules of an image of {of.label}, in the network of"
                      f" the lesson; {of.dataset}")
    margin_loss, spread_loss = fig.subplots(1, 2)
    length = np.linspace(0, 1, 200)

    def term(x: Array, *, present: bool) -> Array:
        return np.maximum(0, 0.9 - x) ** 2 if present else 0.5 * np.maximum(0, x - 0.1) ** 2

    margin_loss.plot(length, term(length, present=True), color=BLACK, label="digit in the image")
    margin_loss.plot(length, term(length, present=False), color=BLACK, linestyle="--", label="digit not in it")
    for j, x in enumerate(of.v):
        there = j == of.label
        margin_loss.plot(x, term(x, present=there), "o", color=FIRST if there else GREY, zorder=4, clip_on=False)
    margin_loss.set(xlim=(0, 1), ylim=(0, 0.85), xlabel="length ‖v‖ of a digit capsule", ylabel="term of the loss",
                    title="margin loss")
    margin_loss.legend(loc="upper right")
    gap = np.linspace(-0.5, 1, 400)
    for margin, colour in ((0.2, lightened(GREEN, 0.45)), (0.55, lightened(GREEN, 0.7)), (0.9, darkened(GREEN))):
        spread_loss.plot(gap, np.maximum(0, margin - gap) ** 2, color=colour, label=f"m = {margin:g}")
    spread_loss.set(xlim=(-0.5, 1), xticks=[-0.5, 0, 0.5, 1], ylim=(0, 2), xlabel="aₜ − aₖ, true minus wrong",
                    ylabel="term of the loss", title="spread loss")
    spread_loss.legend(loc="upper right")
    return fig


# --- Command line -----------------------------------------------------------------------------------------------------

DRAWN: dict[str, Callable[[], Figure]] = {
    "parts_and_wholes": draw_parts_and_wholes, "worked_example": draw_worked_example,
    "dynamic_routing": draw_dynamic_routing, "em_routing": draw_em_routing,
}
OF_NETWORK: dict[str, Callable[[Trained], Figure]] = {
    "squash": draw_squash, "couplings": draw_couplings, "losses": draw_losses,
}
Config = Settings


@dataclasses.dataclass(frozen=True)
class Options(OutOptions):
    figures: tuple[str, ...] = choice_of_figures(*DRAWN, *OF_NETWORK)
    threads: int = redeclared(RunOptions, "threads", usual=True)


def example(*_: Any) -> Trained:
    with contextlib.redirect_stdout(sys.stderr):
        return trained(run_page())


main = figure_script(
    NAME, Config, Options, "Draw the pictures of docs/how_capsules_work.md.",
    ("", "All pictures, after the training of the lesson: about half a minute."),
    ("--figures em_routing --outdir draft", "One of the drawn ones, into draft/: about 1 second."),
    prepare=example, of_run=OF_NETWORK, of_results=DRAWN,
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
