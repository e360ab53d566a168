"""Toys instead of smallNORB: drawn sets of the same structure, in the same files, one for each seed.

Five categories of ten toys. A toy is a list of 9 to 14 solids (ellipsoids, boxes, cones; a cylinder is a cone that does
not taper), whose sizes and details come from a random generator of its own. Each is seen under 9 elevations (30 to 70
degrees), 18 azimuths and 6 lightings by a pair of cameras, as 96x96 grey levels on a plain ground with a soft shadow.

Rays are parallel, so each step is linear algebra. With u and v on the screen and t along a ray, a solid's own
coordinates are linear in (u, v, t); in them it is the unit ball, cube or cone. A ray meets it where a quadratic
polynomial of u and v is positive, and between t's that are linear in u and v, up to a square root. The geometry of a
view serves all lightings: an image is a sum over lamps, and a lighting is their brightness. Shadows on the ground are
the same rays along the light; they are computed once for all elevations of an azimuth.

    N  rays of a view that meet a toy     S  solids of a toy     K  lightings     T  cells a side of a map of shadows

World coordinates: x to the right of the cameras, y away from them, z up; the ground is z = 0. The lamps stay where the
cameras are, and the toy turns, as on the turntable of the real set.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from data.files import atomic_write, cache_folder, expanded, print_message, told_as
from data.norb_files import NORB_PARTS, file_name, norb_header
from fast.workers import Workers, default_threads

Array = np.ndarray
Point = Sequence[float] | Array

CATEGORIES = ("animal", "human", "airplane", "truck", "car")
INSTANCES = {"training": (4, 6, 7, 8, 9), "testing": (0, 1, 2, 3, 5)}
ELEVATIONS = tuple(range(30, 75, 5))  # degrees
AZIMUTHS = tuple(range(0, 360, 20))  # degrees
N_LIGHTINGS = 6
SIDE = 96  # pixels
FINE = 2  # rays of a pixel along each axis
EXTENT = 72.0  # pixels: the largest width or height of the largest toys, over their views
VARIETY = 0.55  # fraction of each range of a toy's sizes, angles and greys that is used: its middle
SMALLEST = 0.8  # extent of the smallest toys, as a fraction of EXTENT
OFF_AXIS = 3.5  # pixels: the largest distance along x and along y between a toy's middle and the turntable's axis
STEREO = 2.5  # degrees: each camera's angle from the middle of both

# Directions of the lamps (left, right, behind, in front), and how bright they are in each lighting.
LAMPS = np.array([[-0.6, -0.3, 0.9], [0.6, -0.35, 0.9], [-0.2, 0.55, 0.95], [0.1, -0.7, 0.9]])
LAMPS /= np.linalg.norm(LAMPS, axis=1, keepdims=True)
BRIGHTNESS = np.array([[0.6, 0.6, 0.4, 0.4], [1.3, 0.1, 0.3, 0.2], [0.1, 1.3, 0.3, 0.2],
                       [0.3, 0.3, 1.1, 0.2], [0.3, 0.2, 0.1, 1.3], [0.8, 0.1, 0.7, 0.6]])
GROUND = np.array([226, 203, 212, 230, 180, 190])  # grey level of the ground in each lighting
SKY = 1.5  # light from everywhere, in units of BRIGHTNESS
SHADOW_SIDE, SHADOW_HALF = 64, 1.05  # cells and half width of the map of shadows; a toy is about 1 wide
SHADOW = 0.6  # fraction of the light kept from the ground that does not come back from around
SHADOW_BLUR, SKY_BLUR = 0.05, 0.08  # standard deviations
KEPT_SETS = 4  # in the cache, of 0.9 GB each


# --- Solids -----------------------------------------------------------------------------------------------------------


class Solid(NamedTuple):
    """In its own coordinates the unit ball, the cube [-1, 1]^3, or a cone round z from -1, of radius 1, to 1."""

    kind: str  # "ellipsoid", "box" or "cone"
    centre: Array  # (3,)
    axes: Array  # (3, 3) the columns are the half axes
    albedo: float = 0.85
    top: float = 1.0  # the cone's radius at z = 1


def turned(yaw: float = 0, pitch: float = 0, roll: float = 0) -> Array:
    """Rotation by degrees: roll about x, then pitch about y (nose up), then yaw about z."""
    (cz, cy, cx), (sz, sy, sx) = (f(np.deg2rad([yaw, -pitch, roll])) for f in (np.cos, np.sin))
    about_z = np.array([[cz, -sz, 0], [sz, cz, 0], [0, 0, 1]])
    about_y = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]])
    about_x = np.array([[1, 0, 0], [0, cx, -sx], [0, sx, cx]])
    return about_z @ about_y @ about_x


def vector(*coordinates: float) -> Array:
    return np.array(coordinates, float)


def turned_solid(kind: str, centre: Point, halves: Point, albedo: float = 0.85, **angles: float) -> Solid:
    return Solid(kind, np.asarray(centre, float), turned(**angles) * np.asarray(halves, float), albedo)


ball, box = (functools.partial(turned_solid, kind) for kind in ("ellipsoid", "box"))


def rod(start: Point, end: Point, radius: float, end_radius: float | None = None, albedo: float = 0.85) -> Solid:
    """A cylinder or a cone from one point to another, the thicker end first."""
    a, b = np.asarray(start, float), np.asarray(end, float)
    if end_radius is not None and end_radius > radius:
        a, b, radius, end_radius = b, a, end_radius, radius
    half = (b - a) / 2
    along = half / np.linalg.norm(half)
    across = np.cross(along, [0, 0, 1] if abs(along[2]) < 0.9 else [1, 0, 0])
    across /= np.linalg.norm(across)
    axes = np.stack([radius * across, radius * np.cross(along, across), half], axis=1)
    return Solid("cone", (a + b) / 2, axes, albedo, 1.0 if end_radius is None else end_radius / radius)


def wheels(axles: Iterable[float], half_track: float, radius: float, width: float) -> list[Solid]:
    """A pair of wheels on each axle, which is given by its x."""
    return [
        rod((x, side * (half_track - width), radius), (x, side * half_track, radius), radius, albedo=0.5)
        for x in axles
        for side in (-1, 1)
    ]


# --- Toys: x forward, y to the left, z up; any unit, as a toy is scaled to the frame ----------------------------------


def middle_of(rng: np.random.Generator) -> Callable[[float, float], float]:
    """u(low, high): a uniform draw from the middle of the range, the fraction VARIETY of it."""

    def u(low: float, high: float) -> float:
        centre, half = (low + high) / 2, VARIETY * (high - low) / 2
        return rng.uniform(centre - half, centre + half)

    return u


def animal(rng: np.random.Generator) -> list[Solid]:
    """Body, four legs, neck, head, snout, two ears or horns, tail, and often a hump, a mane or a trunk. One in four
    rears."""
    u = middle_of(rng)
    length, girth, leg = u(0.55, 1.3), u(0.16, 0.48), u(0.15, 0.85)
    leg_radius, stance = u(0.04, 0.13), u(0.5, 0.9)
    neck, rise, head = u(0.05, 0.9), u(-10, 85), u(0.11, 0.28)
    stretch, stride, tone = u(1.0, 2.1), u(-0.25, 0.25), u(0.85, 1.0)
    back = leg + 0.8 * girth
    parts = [ball((0, 0, back), (length / 2 + 0.1, girth * u(0.7, 1.0), girth), tone, pitch=u(-6, 8))]
    for side, front in itertools.product((-1, 1), (-1, 1)):
        x, y = front * (length / 2 - 0.08), side * girth * stance
        swing = side * front * stride
        hip = (0.8 * x, 0.55 * y, back - 0.2 * girth)
        parts.append(rod(hip, (x + swing, y, 0), 1.3 * leg_radius, 0.8 * leg_radius, tone))
    cos, sin = math.cos(math.radians(rise)), math.sin(math.radians(rise))
    shoulder = vector(length / 2, 0, back + 0.25 * girth)
    nape = shoulder + neck * vector(cos, 0, sin)
    parts.append(rod(shoulder - 0.12 * vector(cos, 0, sin), nape, u(0.4, 0.7) * girth, 0.7 * head, tone))
    dip = u(-40, 5)
    parts.append(ball(nape + vector(0.5 * head, 0, 0.2 * head), (head * stretch, head * 0.85, head), tone, pitch=dip))
    down = vector(math.cos(math.radians(dip)), 0, math.sin(math.radians(dip)))
    face = nape + head * (0.5 + stretch * 0.6) * down
    kind = rng.integers(4)
    if kind == 0:  # a trunk
        parts.append(rod(face, face + vector(0.18 * length, 0, -u(0.35, 0.6)), 0.5 * head, 0.25 * head, tone))
    else:
        parts.append(rod(face, face + u(0.5, 1.1) * head * down, 0.6 * head, 0.4 * head, tone))
    ear, spread, lean = u(0.6, 2.2) * head, u(0.4, 1.3), u(-0.6, 0.8)
    for side in (-1, 1):
        foot = nape + vector(0.2 * head, side * 0.5 * head, 0.7 * head)
        parts.append(rod(foot, foot + ear * vector(lean, side * spread, 1), u(0.25, 0.4) * head, 0.05 * head, tone))
    rump = vector(-length / 2 - 0.02, 0, back + 0.2 * girth)
    tail = u(0.2, 0.7)
    parts.append(rod(rump, rump + tail * vector(-u(0.4, 1), 0, u(-0.9, 0.8)), u(0.04, 0.11), 0.02, tone))
    if kind == 1:  # a hump
        parts.append(ball((u(-0.15, 0.15), 0, back + 0.8 * girth), (0.2, 0.6 * girth, 0.6 * girth), tone))
    elif kind == 2:  # a mane
        parts.append(ball(nape - vector(0.08, 0, 0.05), (0.14, 1.5 * head, 1.6 * head), 0.85 * tone, pitch=-20))
    if rng.random() < 0.25:
        turn = turned(pitch=u(25, 60))
        parts = [part._replace(centre=turn @ part.centre, axes=turn @ part.axes) for part in parts]
    return parts


def human(rng: np.random.Generator) -> list[Solid]:
    """Base, two legs with feet, hips, chest, two jointed arms, head, hat, and something held."""
    u = middle_of(rng)
    leg, torso, wide, tone = u(0.35, 0.95), u(0.45, 0.75), u(0.14, 0.34), u(0.85, 1.0)
    step, limb, deep = u(-0.55, 0.55), u(0.05, 0.12), u(0.1, 0.25)
    base = 0.05
    hip, chest = base + leg, base + leg + torso
    parts = [rod((0, 0, 0), (0, 0, base), u(0.12, 0.45), albedo=0.9 * tone)]
    for side in (-1, 1):
        foot = vector(side * step, side * u(0.8, 1.3) * 0.6 * wide, base)
        parts.append(rod((0, side * 0.5 * wide, hip), foot + vector(0, 0, 0.04), 1.35 * limb, 0.8 * limb, tone))
        parts.append(ball(foot + vector(0.07, 0, 0.04), (0.14, 0.07, 0.06), 0.8 * tone))
    parts.append(ball((0, 0, hip), (deep, wide * 0.85, 0.13), tone))
    if rng.random() < 0.5:
        parts.append(ball((0, 0, (hip + chest) / 2), (deep, wide, torso * 0.58), tone))
    else:
        parts.append(rod((0, 0, hip - u(0.05, 0.3)), (0, 0, chest + 0.05), wide * u(0.9, 1.2), 0.4 * wide, tone))
    hands = []
    for side in (-1, 1):
        shoulder = vector(0, side * (wide + 0.02), chest - 0.09)
        swing, lift, bend = u(-0.6, 1.0), u(-1.1, 0.3), u(-0.5, 1.1)
        upper = vector(swing, side * u(0.15, 1.3), lift)
        elbow = shoulder + 0.32 * upper / np.linalg.norm(upper)
        lower = vector(u(0.2, 1), side * u(-0.5, 0.3), bend - 0.4)
        hands.append(elbow + 0.3 * lower / np.linalg.norm(lower))
        parts += [rod(shoulder, elbow, limb, 0.85 * limb, tone), rod(elbow, hands[-1], 0.85 * limb, 0.65 * limb, tone)]
    skull = u(0.12, 0.165)
    crown = chest + 0.05 + skull
    parts.append(ball((0.02, 0, crown), (skull, 0.9 * skull, 1.15 * skull), tone))
    hat = rng.integers(4)
    if hat == 0:  # a cone
        parts.append(rod((0, 0, crown + 0.3 * skull), (0, 0, crown + u(2, 3) * skull), 1.1 * skull, 0.05, 0.8 * tone))
    elif hat == 1:  # a brim
        parts.append(rod((0, 0, crown + 0.4 * skull), (0, 0, crown + 0.6 * skull), 1.9 * skull, albedo=0.8 * tone))
    elif hat == 2:  # a helmet
        parts.append(ball((0, 0, crown + 0.35 * skull), (1.25 * skull, 1.2 * skull, 0.95 * skull), 0.8 * tone))
    held, hand = rng.integers(4), hands[rng.integers(2)]
    if held == 0:  # a staff
        lean = vector(u(-0.6, 0.6), u(-0.4, 0.4), 1)
        parts.append(rod(hand - u(0.2, 0.6) * lean, hand + u(0.3, 0.9) * lean, 0.035, albedo=0.8 * tone))
    elif held == 1:  # a rifle
        parts.append(
            rod(hand - vector(0.15, 0.1, 0.1), hand + vector(u(0.4, 0.9), 0.1, u(-0.1, 0.5)), 0.05, 0.03, 0.7 * tone)
        )
    elif held == 2:  # a pack
        parts.append(box((-deep - 0.12, 0, chest - 0.25), (0.13, wide * 0.8, u(0.15, 0.28)), 0.85 * tone))
    else:  # a shield or a case
        parts.append(box(hand + vector(0, 0, -0.1), (u(0.05, 0.2), 0.04, u(0.12, 0.25)), 0.85 * tone, yaw=u(0, 90)))
    return parts


def airplane(rng: np.random.Generator) -> list[Solid]:
    """Fuselage, nose, tail, two wings, two tailplanes, a fin, a canopy, and engines, a propeller or floats."""
    u = middle_of(rng)
    radius, span, chord, tone = u(0.07, 0.2), u(0.35, 1.15), u(0.09, 0.34), u(0.85, 1.0)
    sweep, wing_x, dihedral = u(-12, 52), u(-0.25, 0.3), u(-6, 14)
    z = radius + u(0.1, 0.25)
    height = z + rng.choice([-0.6, 0.0, 0.8]) * radius
    nose, tail = u(0.1, 0.5), u(0.15, 0.55)
    parts = [
        rod((-0.45, 0, z), (0.55, 0, z), radius, albedo=tone),
        ball((0.55, 0, z), (nose, radius, radius), tone),
        rod((-0.45, 0, z), (-0.45 - tail, 0, z + 0.4 * radius), radius, 0.35 * radius, tone),
        ball((u(0.2, 0.5), 0, z + 0.75 * radius), (u(0.12, 0.25), 0.6 * radius, u(0.5, 0.8) * radius), 0.5),
    ]
    flat = rng.random() < 0.5
    for side in (-1, 1):
        angles = {"yaw": -side * sweep, "roll": side * dihedral}
        lean = math.radians(sweep)
        middle = (wing_x - span / 2 * math.tan(lean) * 0.9, side * (span / 2 + 0.3 * radius), height)
        half = span / 2 / math.cos(lean)
        form, halves = (box, (chord, half, 0.022)) if flat else (ball, (chord, half * 1.2, 0.04))
        parts.append(form(middle, halves, tone, **angles))
    small = u(0.3, 0.45) * span
    aft = -0.4 - tail
    raised = u(0.0, 1.0) if rng.random() < 0.3 else 0.1
    fin = u(0.2, 0.38)
    for side in (-1, 1):
        middle = (aft - 0.3 * sweep / 40 * small, side * small / 2, z + 0.3 * radius + raised * fin * 1.6)
        parts.append(box(middle, (0.45 * chord + 0.03, small / 2, 0.018), tone, yaw=-side * sweep))
    middle = (aft - 0.03, 0, z + 0.4 * radius + fin / 2)
    parts.append(box(middle, (0.45 * chord + 0.03, 0.02, fin / 2), tone, pitch=-u(0, 35)))
    kind = rng.integers(4)
    tip = 0.55 + nose
    if kind == 0:  # a propeller
        blade, turn = u(0.16, 0.28), u(0, 180)
        parts.append(box((tip, 0, z), (0.015, 0.03, blade), 0.6, roll=turn))
        parts.append(ball((tip, 0, z), (0.06, 0.04, 0.04), 0.6))
    elif kind in (1, 2):  # two or four engines
        for side, out in itertools.product((-1, 1), (0.4, 0.7)[:kind]):
            x, y = wing_x - out * span * math.tan(math.radians(sweep)), side * out * span
            low = height - 0.06
            parts.append(rod((x - 0.12, y, low), (x + chord + 0.1, y, low), 0.07, albedo=0.8 * tone))
    else:  # floats
        for side in (-1, 1):
            parts.append(ball((0.1, side * 0.3 * span, 0.06), (u(0.4, 0.6), 0.06, 0.06), 0.85 * tone))
    return parts


def truck(rng: np.random.Generator) -> list[Solid]:
    """Frame, cab with windscreen and windows, often a bonnet, six or four wheels, and one of six loads; or a bus."""
    u = middle_of(rng)
    length, half, wheel, tone = u(1.0, 2.1), u(0.24, 0.42), u(0.1, 0.2), u(0.85, 1.0)
    deck = wheel * u(1.3, 1.8)
    cab, cab_height = u(0.14, 0.28), u(0.16, 0.38)
    bonnet = u(0.08, 0.22) if rng.random() < 0.45 else 0.0
    front = length / 2
    x = front - 2 * bonnet - cab
    parts = [
        box((0, 0, deck), (length / 2, half * 0.8, 0.05), 0.7 * tone),
        box((x, 0, deck + cab_height), (cab, half * 0.95, cab_height), tone),
        box((x + cab, 0, deck + 1.4 * cab_height), (0.012, half * 0.8, 0.35 * cab_height), 0.45),
        box((x + 0.1 * cab, 0, deck + 1.4 * cab_height), (0.5 * cab, half * 0.965, 0.3 * cab_height), 0.45),
    ]
    if bonnet:
        parts.append(box((front - bonnet, 0, deck + 0.45 * cab_height), (bonnet, half * 0.85, 0.45 * cab_height), tone))
    axles = [front - 0.3, -front + 0.3, -front + 0.3 + 2.3 * wheel][: rng.integers(2, 4)]
    parts += wheels(axles, half, wheel, u(0.08, 0.14))
    start, end = -front, x - cab - u(0.02, 0.1)
    middle, reach_x, shade = (start + end) / 2, (end - start) / 2, u(0.75, 1.0) * tone
    floor = deck + 0.05
    kind = rng.integers(7)
    if kind == 6:  # a bus
        parts.append(box((-0.03, 0, deck + cab_height), (length / 2, half * 0.97, cab_height * 1.03), tone))
        parts.append(box((-0.03, 0, deck + 1.4 * cab_height), (0.93 * front, half * 0.98, 0.25 * cab_height), 0.45))
    elif kind == 0:  # a closed van
        high = u(0.15, 0.45)
        parts.append(box((middle, 0, floor + high), (reach_x, half, high), shade))
    elif kind == 1:  # a tank
        radius = u(0.75, 0.95) * half
        parts.append(rod((start, 0, floor + radius), (end, 0, floor + radius), radius, albedo=shade))
    elif kind == 2:  # an open bed
        wall = u(0.06, 0.16)
        parts += [box((middle, side * half, floor + wall), (reach_x, 0.025, wall), shade) for side in (-1, 1)]
        parts.append(box((start, 0, floor + wall), (0.025, half, wall), shade))
    elif kind == 3:  # a tipper
        parts.append(box((middle, 0, floor + 0.25), (reach_x, half, 0.13), shade, pitch=-u(5, 22)))
    elif kind == 4:  # a drum
        radius = half * 0.95
        parts.append(rod((end - 0.1, 0, floor + 0.2), (start, 0, floor + u(0.3, 0.5)), radius, 0.5 * radius, shade))
    else:  # a crane or a ladder
        parts.append(box((middle, 0, floor + 0.1), (reach_x, half * 0.9, 0.1), shade))
        parts.append(rod((start + 0.2, 0, floor + 0.25), (end + u(0, 0.3), 0, floor + u(0.4, 0.7)), 0.07, 0.04, shade))
    return parts


def car(rng: np.random.Generator) -> list[Solid]:
    """Body, bonnet, cabin with windscreen and windows, four wheels, bumpers, and often a spoiler."""
    u = middle_of(rng)
    length, half, wheel, tone = u(0.95, 1.75), u(0.26, 0.42), u(0.1, 0.2), u(0.85, 1.0)
    belly, waist = wheel * u(0.6, 1.0), wheel * u(1.9, 3.2)
    front = length / 2
    parts = wheels([front * u(0.55, 0.68), -front * u(0.55, 0.68)], half + 0.01, wheel, u(0.07, 0.12))
    middle, deep = (belly + waist) / 2, (waist - belly) / 2
    if rng.random() < 0.5:
        parts.append(box((0, 0, middle), (front * 0.93, half, deep), tone))
    else:
        parts.append(ball((0, 0, middle - 0.02), (front * 1.12, half * 1.2, deep * 1.35), tone))
        parts.append(box((0, 0, middle), (front * 0.8, half * 0.95, deep * 0.9), tone))
    x, long, high = u(-0.4, 0.2) * front, u(0.16, 0.45) * length, u(0.08, 0.26)
    kind = rng.integers(4)
    if kind == 0:  # a round roof
        parts.append(ball((x, 0, waist), (long, half * 0.85, high * 1.5), tone))
        parts.append(ball((x + 0.06, 0, waist - 0.01), (long, half * 0.78, high * 1.25), 0.45))
    elif kind == 1:  # a square one
        parts.append(box((x, 0, waist + high), (long * 0.85, half * 0.85, high), tone))
        parts.append(box((x, 0, waist + high), (long * 0.7, half * 0.865, high * 0.6), 0.45))
        parts.append(box((x, 0, waist + high), (long * 0.865, half * 0.75, high * 0.6), 0.45))
    elif kind == 2:  # open, with a windscreen and seats
        parts.append(box((x, 0, waist), (long * 0.7, half * 0.75, 0.02), 0.4))
        parts.append(box((x + long * 0.75, 0, waist + 0.08), (0.02, half * 0.8, 0.1), 0.6, pitch=-35))
        parts += [ball((x - 0.1, side * half * 0.4, waist), (0.06, 0.1, 0.14), 0.7) for side in (-1, 1)]
    else:  # a sloping roof
        parts.append(box((x, 0, waist + high), (long * 0.5, half * 0.82, high), tone))
        parts.append(box((x + long * 0.5, 0, waist + 0.45 * high), (0.03, half * 0.78, high * 1.1), 0.45, pitch=-50))
        parts.append(box((x - long * 0.55, 0, waist + 0.35 * high), (0.03, half * 0.78, high * 1.2), 0.5, pitch=55))
    parts.append(ball((front * 0.62, 0, waist - 0.03), (front * 0.36, half * 0.85, u(0.05, 0.12)), tone))
    for side in (-1, 1):
        parts.append(box((side * front * 0.95, 0, belly + 0.06), (0.05, half * 0.92, 0.05), 0.75 * tone))
    if rng.random() < 0.4:
        parts.append(box((-front * 0.88, 0, waist + u(0.08, 0.16)), (0.09, half * 0.95, 0.02), tone, pitch=10))
    return parts


BUILDERS = (animal, human, airplane, truck, car)


class Toy(NamedTuple):
    """S solids, scaled, on the ground, the turntable's axis at x = y = 0: a unit is EXTENT pixels."""

    axes: Array  # (S, 3, 3) the columns are the half axes
    centres: Array  # (S, 3)
    kinds: Array  # (S,)
    albedo: Array  # (S,)
    top: Array  # (S,)
    height: float  # of the point that the cameras look at


def toy_of(solids: Sequence[Solid]) -> Toy:
    """Solids as they are, with the ground at z = 0 and the cameras looking at the origin."""
    kinds, centres, axes, albedo, top = (np.array(values) for values in zip(*solids, strict=True))
    return Toy(axes, centres, kinds, albedo, top, 0.0)


def reach(toy: Toy, directions: Array) -> Array:
    """Half the width of each solid along directions (D, 3), times their length: (S, D)."""
    along = np.abs(directions @ toy.axes)  # (S, D, 3)
    ball, cone = np.linalg.norm(along, axis=2), np.hypot(along[..., 0], along[..., 1]) + along[..., 2]
    kinds = toy.kinds[:, None]
    return np.where(kinds == "box", along.sum(axis=2), np.where(kinds == "cone", cone, ball))


def generator(seed: int, *key: int) -> np.random.Generator:
    """One of the independent random streams of a seed: the first of the key is 0 for toys, 2 for the order."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def make_toy(category: int, instance: int, seed: int = 0) -> Toy:
    """It depends on nothing but the three numbers."""
    rng = generator(seed, 0, *b"toy", category, instance)
    toy = toy_of(BUILDERS[category](rng))
    half = reach(toy, np.eye(3))  # (S, 3)
    low, high = (toy.centres - half).min(axis=0), (toy.centres + half).max(axis=0)  # (3,) the box round the toy
    centres = toy.centres - [*(low + high)[:2] / 2, low[2]]
    looked_at = (high - low)[2] / 2
    views = itertools.product(ELEVATIONS, AZIMUTHS)
    screens = np.concatenate([(camera(e, 0.0).T @ turned(yaw=a))[:2] for e, a in views])  # right and up, for the toy
    at = (centres - [0, 0, looked_at]) @ screens.T
    widest = 2 * (np.abs(at) + reach(toy, screens)).max()
    widest /= rng.uniform(SMALLEST, 1)
    off_axis = [*rng.uniform(-OFF_AXIS / EXTENT, OFF_AXIS / EXTENT, 2), 0]
    return toy._replace(axes=toy.axes / widest, centres=centres / widest + off_axis, height=looked_at / widest)


def moved(toy: Toy, turn: Array, frame: Array, origin: Point) -> Toy:
    """A toy turned by ``turn`` (3, 3), in coordinates (u, v, t) whose steps are the columns of ``frame`` (3, 3)."""
    inverse = np.linalg.inv(frame)
    centres = (toy.centres @ turn.T - np.asarray(origin)) @ inverse.T
    return toy._replace(axes=inverse @ turn @ toy.axes, centres=centres)


# --- Rays -------------------------------------------------------------------------------------------------------------


def camera(elevation: float, eye: float) -> Array:
    """(3, 3): the columns point right, up and from the toy to the camera. Angles in degrees."""
    e, d = math.radians(elevation), math.radians(eye)
    up, back = [0, math.sin(e), math.cos(e)], [0, -math.cos(e), math.sin(e)]
    turn = [[math.cos(d), 0, math.sin(d)], [0, 1, 0], [-math.sin(d), 0, math.cos(d)]]
    return np.array([[1, 0, 0], up, back]).T @ turn


def own_coordinates(scene: Toy) -> tuple[Array, Array]:
    """(S, 3, 3) and (S, 3): from (u, v, t) to a solid's own coordinates, p = own (u, v, t) + start."""
    own = np.linalg.inv(scene.axes)
    return own, -(own @ scene.centres[:, :, None])[:, :, 0]


def linear(weights: Array, u: Array, v: Array) -> Array:
    """weights (..., 3) . (1, u, v) for u (w,) and v (h,) -> (..., h, w)."""
    return (weights[..., :1] + weights[..., 2:] * v)[..., None] + (weights[..., 1:2] * u)[..., None, :]


def slabs(own: Array, start: Array) -> tuple[Array, Array]:
    """A ray is between the sides of each solid's three slabs, -1 <= p_i <= 1, for t = middle_i . (1, u, v) -+ half_i.

    -> middle (S, 3, 3), half (S, 3)
    """
    speed = own[:, :, 2]
    speed = np.copysign(np.maximum(np.abs(speed), 1e-6), speed)
    return -np.concatenate([start[:, :, None], own[:, :, :2]], axis=2) / speed[:, :, None], 1 / np.abs(speed)


def quadrics(scene: Toy, own: Array, start: Array) -> tuple[Array, Array, Array]:
    """A ray is in a ball or a cone for t = middle . (1, u, v) -+ sqrt(square), where square > 0.

    The ball is |p|^2 <= 1, the cone p_x^2 + p_y^2 <= (1 + (top - 1) (p_z + 1) / 2)^2.
    -> middle (S, 3); square (S, 3, 3), the weights of v^i u^j; whether a ray crosses the surface twice (S,), not once
    """
    cone = scene.kinds == "cone"
    q = np.concatenate([start[:, :, None], own], axis=2)  # (S, 3, 4) of 1, u, v, t: q_x^2 + q_y^2 +- q_z^2 <= level
    q[cone, 2] *= (scene.top[cone, None] - 1) / 2
    q[cone, 2, 0] += (scene.top[cone] + 1) / 2
    sign = np.where(cone[:, None], [1, 1, -1], 1)  # (S, 3)
    gram = q.swapaxes(1, 2) @ (sign[:, :, None] * q)  # (S, 4, 4)
    gram[:, 0, 0] -= np.where(cone, 0, 1)
    # a t^2 + 2 b t + c = 0, b linear and c quadratic in u and v: t = -b / a -+ sqrt((b / a)^2 - c / a)
    a = gram[:, 3, 3]
    a = np.copysign(np.maximum(np.abs(a), 1e-6 * np.maximum(1, (own[:, :, 2] ** 2).sum(axis=1))), a)
    b = gram[:, :3, 3] / a[:, None]
    form = b[:, :, None] * b[:, None] - gram[:, :3, :3] / a[:, None, None]  # of (1, u, v)
    square = np.zeros_like(form)
    square[:, 0] = np.stack([form[:, 0, 0], 2 * form[:, 0, 1], form[:, 1, 1]], axis=1)
    square[:, 1, :2] = 2 * form[:, 2, :2]
    square[:, 2, 0] = form[:, 2, 2]
    return -b, square, a > 0


def crossings(scene: Toy, u: Array, v: Array) -> Iterator[tuple[tuple[slice, slice], Array, Array]]:
    """For each solid the part of the grid of u and v that it covers, and where the rays enter and leave it: two t's
    (h, w) each. On a miss enter < leave is false; a ray may miss by a NaN. Both grids are even; u rises and v falls.
    """
    centre, wide = scene.centres[:, :2], reach(scene, np.eye(3)[:2])  # (S, 2)
    (left, bottom), (right, top) = (centre - wide).T, (centre + wide).T  # (S,) each
    edges = np.searchsorted(-v, [-top, -bottom]), np.searchsorted(u, [left, right])  # (2, S) each
    windows = [(slice(*rows), slice(*columns)) for rows, columns in zip(edges[0].T, edges[1].T, strict=True)]
    own, start = own_coordinates(scene)
    plane, half = (x.astype(np.float32) for x in slabs(own, start))
    middle, square, twice = quadrics(scene, own, start)
    middle, square = middle.astype(np.float32), square.astype(np.float32)
    u, v = u.astype(np.float32), v.astype(np.float32)
    powers_u, powers_v = np.stack([np.ones_like(u), u, u * u]), np.stack([np.ones_like(v), v, v * v], axis=1)
    for k, (kind, window) in enumerate(zip(scene.kinds, windows, strict=True)):
        mine_u, mine_v = u[window[1]], v[window[0]]
        if kind == "box":
            t, halves = linear(plane[k], mine_u, mine_v), half[k][:, None, None]  # (3, h, w)
            yield window, (t - halves).max(axis=0), (t + halves).min(axis=0)
            continue
        t = linear(middle[k], mine_u, mine_v)
        root = powers_v[window[0]] @ square[k] @ powers_u[:, window[1]]
        if twice[k]:
            with np.errstate(invalid="ignore"):  # NaN on a miss
                root = np.sqrt(root, out=root)
            enter, leave = t - root, t + root
        elif own[k, 2, 2] < 0:  # a ray inside the cone's angle crosses it once: here on its way to the thicker end
            enter, leave = t + np.sqrt(np.abs(root)), np.float32(np.inf)
        else:
            enter, leave = np.float32(-np.inf), t - np.sqrt(np.abs(root))
        if kind == "cone":
            t = linear(plane[k, 2], mine_u, mine_v)
            enter, leave = np.maximum(enter, t - half[k, 2]), np.minimum(leave, t + half[k, 2])
        yield window, enter, leave


# --- Images -----------------------------------------------------------------------------------------------------------


def grid(n: int, half: float) -> Array:
    """The centres of n cells between -half and half."""
    return ((np.arange(n) + 0.5) * 2 / n - 1) * half


SCREEN = SIDE / 2 / EXTENT  # half its width
FLUX = BRIGHTNESS @ LAMPS[:, 2] + SKY  # (K,) what reaches the ground


def smoothing(n: int, half: float, sigma: float) -> Array:
    """(n, n): Gaussian blur as a matrix."""
    x = grid(n, half)
    kernel = np.exp(-0.5 * ((x[:, None] - x) / sigma) ** 2)
    return kernel / kernel.sum(axis=1, keepdims=True).max()


def shadow_maps(toy: Toy, azimuth: float) -> Array:
    """The fraction of light that a toy keeps from the ground, in every lighting: (K, T, T) float32, rows from far to
    near."""
    x, turn, shadows = grid(SHADOW_SIDE, SHADOW_HALF), turned(yaw=azimuth), []
    for lamp, sigma in zip((*LAMPS, np.array([0, 0, 1])), (*[SHADOW_BLUR] * len(LAMPS), SKY_BLUR), strict=True):
        dark = np.zeros((SHADOW_SIDE, SHADOW_SIDE), bool)
        scene = moved(toy, turn, np.stack([*np.eye(3)[:2], lamp], axis=1), (0, 0, 0))
        for window, enter, leave in crossings(scene, x, x[::-1]):
            dark[window] |= enter < leave
        blur = smoothing(SHADOW_SIDE, SHADOW_HALF, sigma)
        shadows.append(blur @ dark @ blur.T)
    weights = np.concatenate([BRIGHTNESS * LAMPS[:, 2], np.full((N_LIGHTINGS, 1), SKY)], axis=1) / FLUX[:, None]
    return np.tensordot(weights, np.stack(shadows), 1).astype(np.float32)


class Resampling(NamedTuple):
    """From the map of shadows to the screen, for one elevation and eye, by linear interpolation."""

    rows: Array  # (96, T) zero outside the map
    left: Array  # (96 * 96,) of each pixel the cell to its left, an index into the (96, T) rows of a lighting
    fraction: Array  # (96 * 96,) how far the pixel is on the way from that cell to the next


def shadow_resampling(elevation: float, eye: float, height: float) -> Resampling:
    """A pixel (u, v) of the ground shows y = (v + height cos e) / sin e, and x = u / cos d - tan d (v cos e + height)
    / sin e, where d is the angle of the eye."""
    e, d = math.radians(elevation), math.radians(eye)
    u, v = grid(SIDE, SCREEN), grid(SIDE, SCREEN)[::-1]
    y = (v + height * math.cos(e)) / math.sin(e)
    x = u / math.cos(d) - (v[:, None] * math.cos(e) + height) * math.tan(d) / math.sin(e)  # (96, 96)
    row, column = ((at / SHADOW_HALF + 1) * SHADOW_SIDE / 2 - 0.5 for at in (-y, x.ravel()))
    rows = np.maximum(0, 1 - np.abs(row[:, None] - np.arange(SHADOW_SIDE)))
    left = np.floor(column).astype(int)  # no column of the screen is outside the map
    left += np.repeat(np.arange(SIDE) * SHADOW_SIDE, SIDE)
    return Resampling(rows.astype(np.float32), left, (column % 1).astype(np.float32))


def draw_ground(shadows: Array, resampling: Resampling) -> Array:
    """Grey levels (K, 96 * 96) float32 of the ground alone."""
    lines = (resampling.rows @ shadows).reshape(N_LIGHTINGS, -1)  # (K, 96 * T)
    left, right = lines.take(resampling.left, axis=1), lines.take(resampling.left + 1, axis=1)
    dark = left + resampling.fraction * (right - left)
    return GROUND[:, None].astype(np.float32) * (1 - np.float32(SHADOW) * dark)


def draw_view(toy: Toy, azimuth: float, elevation: float, eye: float, ground: Array) -> Array:
    """One camera's images in all lightings: (K, 96, 96) uint8."""
    n, frame = SIDE * FINE, camera(elevation, eye)
    u = grid(n, SCREEN)
    scene = moved(toy, turned(yaw=azimuth), frame, (0, 0, toy.height))
    depth, owner = np.full((n, n), -np.inf, np.float32), np.full((n, n), -1, np.int8)
    for k, (window, enter, leave) in enumerate(crossings(scene, u, u[::-1])):
        seen = (enter < leave) & (leave > depth[window])
        np.copyto(depth[window], leave, where=seen)
        np.copyto(owner[window], k, where=seen)

    hit = np.flatnonzero(owner >= 0)  # the rays that meet a solid
    hit = hit[np.argsort(owner.ravel()[hit], kind="stable")]  # (N,) those of each solid together
    counts = np.bincount(owner.ravel()[hit], minlength=len(toy.kinds))
    row, column = np.divmod(hit, n)
    point = np.stack([u[column], u[::-1][row], depth.ravel()[hit]]).astype(np.float32)  # (3, N)
    normal = normals(scene, counts, point)
    world = frame.astype(np.float32)  # from (u, v, t)
    light = BRIGHTNESS.astype(np.float32) @ np.maximum(LAMPS.astype(np.float32) @ world @ normal, 0)  # (K, N)
    above = world[2] @ point + np.float32(toy.height)  # over the ground, which shades what is low
    light += SKY * (0.65 + 0.35 * (world[2] @ normal)) * np.minimum(1, 0.55 + 3 * above)
    light *= np.repeat(toy.albedo.astype(np.float32), counts)
    grey = np.minimum(light * (GROUND / FLUX).astype(np.float32)[:, None], 255)

    pixel = row // FINE * SIDE + column // FINE
    covered = np.bincount(pixel, minlength=SIDE * SIDE).astype(np.float32) / FINE**2
    images = ground * (1 - covered)
    for image, levels in zip(images, grey, strict=True):
        image += np.bincount(pixel, levels, minlength=SIDE * SIDE) / FINE**2
    return (images + 0.5).astype(np.uint8).reshape(N_LIGHTINGS, SIDE, SIDE)


def normals(scene: Toy, counts: Array, point: Array) -> Array:
    """Unit normals (3, N) at points (3, N), of which the first ``counts[0]`` are on the first solid, and so on. A box
    is shaded as if its edges were round."""
    own, start = (x.astype(np.float32) for x in own_coordinates(scene))
    normal, stops = np.empty_like(point), np.cumsum(counts)
    for k, kind in enumerate(scene.kinds):
        part = slice(stops[k] - counts[k], stops[k])
        p = own[k] @ point[:, part] + start[k][:, None]
        if kind == "box":
            p *= ((p * p) ** 2) ** 2
        elif kind == "cone":
            lid, slope = np.abs(p[2]) > 0.999, np.float32((scene.top[k] - 1) / 2)
            p[:2, lid] = 0
            p[2] = np.where(lid, p[2], -slope * (1 + slope * (p[2] + 1)))
        normal[:, part] = own[k].T @ p  # a normal goes by the inverse transposed
    return normal / np.sqrt((normal * normal).sum(axis=0))


def draw_toy(category: int, instance: int, seed: int = 0) -> Array:
    """All views of one toy: (elevations, azimuths, lightings, 2, 96, 96) uint8."""
    toy = make_toy(category, instance, seed)
    shadows = [shadow_maps(toy, azimuth) for azimuth in AZIMUTHS]
    images = np.empty((len(ELEVATIONS), len(AZIMUTHS), N_LIGHTINGS, 2, SIDE, SIDE), np.uint8)
    for (e, elevation), (eye, angle) in itertools.product(enumerate(ELEVATIONS), enumerate((-STEREO, STEREO))):
        resampling = shadow_resampling(elevation, angle, toy.height)
        for a, azimuth in enumerate(AZIMUTHS):
            ground = draw_ground(shadows[a], resampling)
            images[e, a, :, eye] = draw_view(toy, azimuth, elevation, angle, ground)
    return images


# --- The six files ----------------------------------------------------------------------------------------------------


def shuffled_views(subset: str, seed: int) -> Array:
    """(items, 5): category, instance, elevation 0 to 8, azimuth 0 to 34, lighting of every item of a file. As in the
    real set the categories alternate and the rest is shuffled."""
    counts = len(INSTANCES[subset]), len(ELEVATIONS), len(AZIMUTHS), N_LIGHTINGS
    views = np.indices(counts).reshape(4, -1).T
    views[:, 0] = np.array(INSTANCES[subset])[views[:, 0]]
    views[:, 2] *= 2
    rng = generator(seed, 2, *subset.encode())
    order = np.stack([rng.permutation(len(views)) for _ in CATEGORIES], axis=1)  # (views, 5)
    categories = np.broadcast_to(np.arange(len(CATEGORIES)), order.shape)
    return np.concatenate([categories[..., None], views[order]], axis=2).reshape(-1, 5)


def write_toy_norb(folder: Path, seed: int = 0, threads: int | None = None) -> None:
    """Write the six files, or none of them; no bit depends on ``threads``. Raises UserError where they cannot be
    written."""
    folder = expanded(folder)
    views = {subset: shuffled_views(subset, seed) for subset in INSTANCES}
    toys = [(subset, instance) for subset, instances in INSTANCES.items() for instance in instances]
    jobs = [(subset, category, instance) for subset, instance in toys for category in range(len(CATEGORIES))]
    lock = threading.Lock()
    with contextlib.ExitStack() as stack:
        names = itertools.product(INSTANCES, NORB_PARTS)
        files = {name: stack.enter_context(atomic_write(folder / file_name(*name))) for name in names}
        starts = {}
        for subset, rows in views.items():
            files[subset, "cat"].write(norb_header("cat", len(rows)) + rows[:, 0].astype("<i4").tobytes())
            files[subset, "info"].write(norb_header("info", len(rows)) + rows[:, 1:].astype("<i4").tobytes())
            starts[subset] = files[subset, "dat"].write(norb_header("dat", len(rows)))
        workers = stack.enter_context(Workers(threads or default_threads()))

        def draw(job: tuple[str, int, int]) -> None:
            subset, category, instance = job
            images = draw_toy(category, instance, seed)
            rows, file = views[subset], files[subset, "dat"]
            with lock:
                for item in np.flatnonzero((rows[:, :2] == (category, instance)).all(axis=1)):
                    _, _, elevation, azimuth, lighting = rows[item]
                    file.seek(starts[subset] + int(item) * 2 * SIDE * SIDE)
                    file.write(images[elevation, azimuth // 2, lighting].data)

        workers.map(draw, jobs)
        for file in files.values():  # all are on the disk before the first takes its name
            file.flush()
            os.fsync(file.fileno())


# --- The cache --------------------------------------------------------------------------------------------------------


def wait_for(lock: IO[bytes]) -> None:
    """Until no other process holds it; where the system or its files have no such locks, not at all."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX)


def cached_toys(cache: Path | None, seed: int) -> Path:
    """The folder below ``cache``, or that of ``cache_folder``, with the whole set of a seed, drawn unless it is there.
    Its name has a fingerprint of this file, so that another version is drawn anew. Of all sets only the ``KEPT_SETS``
    used last are kept. Raises UserError where it cannot be written."""
    with told_as("cannot draw toys"):
        cache = expanded(cache) if cache else cache_folder()
    folder = cache / f"toys-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]}-{seed}"

    def is_whole() -> bool:
        return all(os.path.isfile(folder / file_name(*name)) for name in itertools.product(INSTANCES, NORB_PARTS))

    if is_whole():
        with contextlib.suppress(OSError):  # it is another person's, who shares it
            os.utime(folder)
        return folder
    with told_as(f"cannot write {cache}"):
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / "toys.lock").open("wb")
    with lock:
        wait_for(lock)  # another process, such as another seed's run, may be drawing
        if not is_whole():
            for old in sorted(cache.glob("toys-*"), key=lambda old: old.stat().st_mtime)[: 1 - KEPT_SETS]:
                shutil.rmtree(old, ignore_errors=True)
            print_message(f"drawing the toys of seed {seed} into {folder}: about a minute, 0.9 GB")
            write_toy_norb(folder, seed=seed)
        os.utime(folder)
    return folder
