"""Toys instead of smallNORB: a drawn set of the same structure, in the same files.

Five categories of ten toys. A toy is a list of 8 to 14 solids (ellipsoids, boxes, cones; a cylinder is a cone that does
not taper), whose sizes and details come from a random generator of its own. Each is seen under 9 elevations (30 to 70
degrees), 18 azimuths and 6 lightings by a pair of cameras, as 96x96 grey levels on a plain ground with a soft shadow.

Rays are parallel, so each step is linear algebra. With u and v on the screen and t along a ray, a solid's own
coordinates are linear in (u, v, t); in them it is the unit ball, cube or cone. A ray meets it where a quadratic
polynomial of u and v is positive, and between t's that are linear in u and v, up to a square root. The geometry of a
view serves all lightings: an image is a sum over lamps, and a lighting is their brightness. Shadows on the ground are
the same rays along the light; they are computed once for all elevations of an azimuth.

    N  pixels of a view that a toy covers     S  solids of a toy     K  lightings     Q  lamps

World coordinates: x to the right of the cameras, y away from them, z up; the ground is z = 0. The lamps stay where the
cameras are, and the toy turns, as on the turntable of the real set.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from support.console import print_message, shows_progress
from support.files import atomic_write
from support.results import plain_code
from support.run import Stream, generator
from support.workers import Workers, default_threads

Array = np.ndarray
Point = Sequence[float] | Array

CATEGORIES = ("animal", "human", "airplane", "truck", "car")
INSTANCES = {"training": (4, 6, 7, 8, 9), "testing": (0, 1, 2, 3, 5)}
PARTS = ("dat", "cat", "info")
ELEVATIONS = tuple(range(30, 75, 5))  # degrees
AZIMUTHS = tuple(range(0, 360, 20))  # degrees
N_LIGHTINGS = 6
SIDE = 96  # pixels
FINE = 2  # rays of a pixel along each axis
EXTENT = 72.0  # pixels: the largest width or height of the largest toys, over their views
SMALLEST = 0.8  # extent of the smallest toys, as a fraction of EXTENT
STEREO = 2.5  # degrees: each camera's angle from the middle of both

# Directions of the lamps (left, right, behind, in front), and how bright they are in each lighting.
LAMPS = np.array([[-0.6, -0.3, 0.9], [0.6, -0.35, 0.9], [-0.2, 0.55, 0.95], [0.1, -0.7, 0.9]])
LAMPS /= np.linalg.norm(LAMPS, axis=1, keepdims=True)
BRIGHTNESS = np.array(
    [[0.6, 0.6, 0.4, 0.4], [1.3, 0.1, 0.3, 0.2], [0.1, 1.3, 0.3, 0.2], [0.3, 0.3, 1.1, 0.2], [0.3, 0.2, 0.1, 1.3],
     [0.8, 0.1, 0.7, 0.6]]
)  # fmt: skip
GROUND = np.array([226, 203, 212, 230, 180, 190])  # grey level of the ground in each lighting
SKY = 0.8  # light from everywhere, in units of BRIGHTNESS
SHADOW_SIDE, SHADOW_HALF = 64, 1.05  # cells and half width of the map of shadows; a toy is about 1 wide
SHADOW_BLUR, SKY_BLUR = 0.05, 0.08  # standard deviations
MAGIC = {"u1": 0x1E3D4C55, "<i4": 0x1E3D4C54}


# ----------------------------------------------------------------------------------------------------------------------
# Solids
# ----------------------------------------------------------------------------------------------------------------------


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


def ball(centre: Point, radii: Point, albedo: float = 0.85, **angles: float) -> Solid:
    return Solid("ellipsoid", np.asarray(centre, float), turned(**angles) * np.asarray(radii, float), albedo)


def box(centre: Point, halves: Point, albedo: float = 0.85, **angles: float) -> Solid:
    return Solid("box", np.asarray(centre, float), turned(**angles) * np.asarray(halves, float), albedo)


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


def wheels(places: Iterable[float], half_track: float, radius: float, width: float) -> list[Solid]:
    """A pair of wheels at each x."""
    return [
        rod((x, side * (half_track - width), radius), (x, side * half_track, radius), radius, albedo=0.5)
        for x in places
        for side in (-1, 1)
    ]


def reach(solid: Solid, directions: Array) -> Array:
    """Half the width of a solid along directions (..., 3), times their length."""
    along = np.abs(directions @ solid.axes)  # (..., 3)
    if solid.kind == "ellipsoid":
        return np.linalg.norm(along, axis=-1)
    if solid.kind == "box":
        return along.sum(axis=-1)
    return np.hypot(along[..., 0], along[..., 1]) * max(1.0, solid.top) + along[..., 2]


# ----------------------------------------------------------------------------------------------------------------------
# Toys: x forward, y to the left, z up; any unit, as a toy is scaled to the frame
# ----------------------------------------------------------------------------------------------------------------------


def animal(rng: np.random.Generator) -> list[Solid]:
    """Body, four legs, neck, head, snout, two ears or horns, tail, and often a hump, a mane or a trunk. One in four
    rears."""
    u = rng.uniform
    length, girth, leg = u(0.55, 1.3), u(0.16, 0.48), u(0.15, 0.85)
    leg_radius, stance = u(0.04, 0.13), u(0.5, 0.9)
    neck, rise, head = u(0.05, 0.9), u(-10, 85), u(0.11, 0.28)
    stretch, stride, tone = u(1.0, 2.1), u(-0.25, 0.25), u(0.55, 1.0)
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
    u = rng.uniform
    leg, torso, wide, tone = u(0.35, 0.95), u(0.45, 0.75), u(0.14, 0.34), u(0.55, 1.0)
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
    u = rng.uniform
    radius, span, chord, tone = u(0.07, 0.2), u(0.35, 1.15), u(0.09, 0.34), u(0.55, 1.0)
    sweep, place, dihedral = u(-12, 52), u(-0.25, 0.3), u(-6, 14)
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
        middle = (place - span / 2 * math.tan(lean) * 0.9, side * (span / 2 + 0.3 * radius), height)
        half = span / 2 / math.cos(lean)
        parts.append(
            box(middle, (chord, half, 0.022), tone, **angles)
            if flat
            else ball(middle, (chord, half * 1.2, 0.04), tone, **angles)
        )
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
            x, y = place - out * span * math.tan(math.radians(sweep)), side * out * span
            low = height - 0.06
            parts.append(rod((x - 0.12, y, low), (x + chord + 0.1, y, low), 0.07, albedo=0.8 * tone))
    else:  # floats
        for side in (-1, 1):
            parts.append(ball((0.1, side * 0.3 * span, 0.06), (u(0.4, 0.6), 0.06, 0.06), 0.85 * tone))
    return parts


def truck(rng: np.random.Generator) -> list[Solid]:
    """Frame, cab with windscreen and windows, often a bonnet, six or four wheels, and one of six loads; or a bus."""
    u = rng.uniform
    length, half, wheel, tone = u(1.0, 2.1), u(0.24, 0.42), u(0.1, 0.2), u(0.55, 1.0)
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
    places = [front - 0.3, -front + 0.3, -front + 0.3 + 2.3 * wheel][: rng.integers(2, 4)]
    parts += wheels(places, half, wheel, u(0.08, 0.14))
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
    """Body, bonnet, boot, cabin with windscreen and windows, four wheels, bumpers, and often a spoiler."""
    u = rng.uniform
    length, half, wheel, tone = u(0.95, 1.75), u(0.26, 0.42), u(0.1, 0.2), u(0.55, 1.0)
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


BUILDERS: tuple[Callable[[np.random.Generator], list[Solid]], ...] = (animal, human, airplane, truck, car)


class Toy(NamedTuple):
    """S solids with the ground under them, scaled and centred: a unit is EXTENT pixels."""

    solids: list[Solid]
    axes: Array  # (S, 3, 3)
    centres: Array  # (S, 3)
    height: float  # of the point that the cameras look at


def make_toy(category: int, instance: int, seed: int = 0) -> Toy:
    """It depends on nothing but the three numbers."""
    rng = generator(seed, Stream.DATA, *b"toy", category, instance)
    solids = BUILDERS[category](rng)
    axes, centres = np.stack([s.axes for s in solids]), np.stack([s.centre for s in solids])
    low, high = (
        np.min([sign * s.centre - reach(s, np.eye(3)) for s in solids], axis=0) * sign for sign in (1, -1)
    )  # (3,) the box round the toy
    centres = centres - [*(low + high)[:2] / 2, low[2]]
    looked_at = (high - low)[2] / 2
    views = itertools.product(ELEVATIONS, AZIMUTHS)
    screens = np.concatenate([(camera(e, 0.0).T @ turned(yaw=a))[:2] for e, a in views])  # right and up, for the toy
    at = (centres - [0, 0, looked_at]) @ screens.T
    widest = 2 * max(np.max(np.abs(x) + reach(s, screens)) for s, x in zip(solids, at, strict=True))
    widest /= rng.uniform(SMALLEST, 1)
    solids = [s._replace(axes=s.axes / widest, centre=c / widest) for s, c in zip(solids, centres, strict=True)]
    return Toy(solids, axes / widest, centres / widest, looked_at / widest)


# ----------------------------------------------------------------------------------------------------------------------
# Rays
# ----------------------------------------------------------------------------------------------------------------------


def camera(elevation: float, eye: float) -> Array:
    """(3, 3): the columns point right, up and from the toy to the camera. Angles in degrees."""
    e, d = math.radians(elevation), math.radians(eye)
    up, back = [0, math.sin(e), math.cos(e)], [0, -math.cos(e), math.sin(e)]
    turn = [[math.cos(d), 0, math.sin(d)], [0, 1, 0], [-math.sin(d), 0, math.cos(d)]]
    return np.array([[1, 0, 0], up, back]).T @ turn


def linear(vector: Array, u: Array, v: Array) -> Array:
    """vector[0] u + vector[1] v over the window of u (w,) and v (h,) -> (h, w)."""
    return (vector[0] * u).astype(np.float32) + (vector[1] * v).astype(np.float32)[:, None]


def crossed(solid: Solid, own: Array, u: Array, v: Array) -> tuple[Array, Array]:
    """Where the rays of a window enter and leave a solid: u (w,), v (h,) -> two t's (h, w), enter > leave on a miss.

    ``own`` (3, 3) takes (u, v, t), counted from the solid's centre, to the solid's own coordinates p = own (u, v, t).
    """
    if solid.kind == "box":
        return slabs(own, u, v)
    if solid.kind == "ellipsoid":  # |p|^2 = 1
        return quadric(own, np.ones(3), np.zeros(3), 1.0, u, v)
    middle, slope = (1 + solid.top) / 2, (solid.top - 1) / 2  # p_x^2 + p_y^2 = (middle + slope p_z)^2 and |p_z| <= 1
    enter, leave = quadric(own * [[1], [1], [slope]], np.array([1, 1, -1]), np.array([0, 0, middle]), 0.0, u, v)
    low, high = slabs(own[2:], u, v)
    return np.maximum(enter, low), np.minimum(leave, high)


def slabs(own: Array, u: Array, v: Array) -> tuple[Array, Array]:
    """The t's between which |own (u, v, t)| <= 1 in every row of ``own`` (n, 3)."""
    enter, leave = np.array(-np.inf), np.array(np.inf)
    for *place, speed in own:
        speed = math.copysign(max(abs(speed), 1e-6), speed)
        centre = linear(np.array(place) / -speed, u, v)
        low, high = centre - np.float32(1 / abs(speed)), centre + np.float32(1 / abs(speed))
        enter, leave = np.maximum(enter, low), np.minimum(leave, high)
    return enter, leave


def quadric(own: Array, sign: Array, start: Array, level: float, u: Array, v: Array) -> tuple[Array, Array]:
    """The t's between which sum_i sign_i q_i^2 <= level, q = start + own (u, v, t). A cone has one sheet: q_2 >= 0."""
    basis = np.column_stack([start, own])  # (3, 4): of 1, u, v, t
    gram = basis.T @ (sign[:, None] * basis)
    gram[0, 0] -= level
    # a t^2 + 2 b t + c = 0, b linear and c quadratic in u and v, so that b^2 - a c is quadratic
    a = float(gram[3, 3])
    a = math.copysign(max(abs(a), 1e-6 * float(own[:, 2] @ own[:, 2]), 1e-6), a)
    b = gram[:3, 3] / a
    square = np.outer(b, b) - gram[:3, :3] / a  # (b^2 - a c) / a^2 as a form in (1, u, v)
    powers = np.stack([np.ones_like(u), u, u * u])  # (3, w)
    weights = np.array([  # of v^i u^j
        [square[0, 0], 2 * square[0, 1], square[1, 1]], [2 * square[0, 2], 2 * square[1, 2], 0], [square[2, 2], 0, 0],
    ])  # fmt: skip
    inside = ((np.stack([np.ones_like(v), v, v * v], axis=1) @ weights) @ powers).astype(np.float32)  # (h, w)
    centre = linear(-b[1:], u, v) - np.float32(b[0])
    root = np.sqrt(np.maximum(inside, 0))
    if a > 0:
        root[inside <= 0] = -1  # a miss: enter > leave
        return centre - root, centre + root
    infinite = np.full_like(root, np.inf)  # a ray inside the cone's angle crosses the sheet once
    return (centre + root, infinite) if own[2, 2] > 0 else (-infinite, centre - root)


class Window(NamedTuple):
    """The part of a grid that one solid covers, as seen along a frame of rays."""

    rows: slice
    columns: slice
    u: Array  # (w,) from the solid's centre
    v: Array  # (h,)


def windows(
    toy: Toy, turn: Array, frame: Array, origin: Point, u: Array, v: Array
) -> tuple[Array, Array, list[Window]]:
    """How a frame of rays meets each solid of a toy that is turned by ``turn`` (3, 3).

    The columns of ``frame`` are the steps of u, v and t, from ``origin``. -> (S, 3, 3) from (u, v, t), counted from
    a solid's centre, to its own coordinates; (S, 3) the centres; and the windows on the grid of u and of v, both even
    and u rising, v falling.
    """
    inverse = np.linalg.inv(frame)
    at = (toy.centres @ turn.T - np.asarray(origin)) @ inverse.T  # (S, 3)
    screen = (inverse @ turn)[:2]
    found = []
    for solid, centre in zip(toy.solids, at, strict=True):
        half_u, half_v = reach(solid, screen)
        left, right = np.searchsorted(u, [centre[0] - half_u, centre[0] + half_u])
        top, bottom = np.searchsorted(-v, [-centre[1] - half_v, -centre[1] + half_v])
        rows, columns = slice(top, bottom), slice(left, right)
        found.append(Window(rows, columns, u[columns] - centre[0], v[rows] - centre[1]))
    return np.linalg.inv(inverse @ turn @ toy.axes), at, found


# ----------------------------------------------------------------------------------------------------------------------
# Images
# ----------------------------------------------------------------------------------------------------------------------


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
    """The fraction of light that a toy keeps from the ground, in every lighting: (K, T, T), rows from far to near."""
    x, turn, shadows = grid(SHADOW_SIDE, SHADOW_HALF), turned(yaw=azimuth), []
    for lamp, sigma in zip((*LAMPS, np.array([0, 0, 1])), (*[SHADOW_BLUR] * len(LAMPS), SKY_BLUR), strict=True):
        dark = np.zeros((SHADOW_SIDE, SHADOW_SIDE), bool)
        own, _, found = windows(toy, turn, np.stack([*np.eye(3)[:2], lamp], axis=1), (0, 0, 0), x, x[::-1])
        for solid, mine, (rows, columns, u, v) in zip(toy.solids, own, found, strict=True):
            enter, leave = crossed(solid, mine, u, v)
            dark[rows, columns] |= enter < leave
        blur = smoothing(SHADOW_SIDE, SHADOW_HALF, sigma)
        shadows.append(blur @ dark @ blur.T)
    weights = np.concatenate([BRIGHTNESS * LAMPS[:, 2], np.full((N_LIGHTINGS, 1), SKY)], axis=1) / FLUX[:, None]
    return np.tensordot(weights, np.stack(shadows), 1)


def interpolation(at: Array, n: int, half: float) -> Array:
    """Linear interpolation in a grid of n cells as a matrix: positions (...,) -> (..., n), zeros outside."""
    cell = (at[..., None] / half + 1) * n / 2 - 0.5
    return np.maximum(0, 1 - np.abs(cell - np.arange(n)))


class Resampling(NamedTuple):
    """From the map of shadows to the screen, for one elevation and eye."""

    rows: Array  # (96, T)
    columns: Array  # (96, T, 96) one for each row of the screen


def shadow_resampling(elevation: float, eye: float, height: float) -> Resampling:
    """A pixel (u, v) of the ground shows y = (v + height cos e) / sin e, and x = u / cos d - tan d (v cos e + height)
    / sin e, where d is the angle of the eye."""
    e, d = math.radians(elevation), math.radians(eye)
    u, v = grid(SIDE, SCREEN), grid(SIDE, SCREEN)[::-1]
    rows = interpolation(-(v + height * math.cos(e)) / math.sin(e), SHADOW_SIDE, SHADOW_HALF)
    x = u / math.cos(d) - (v[:, None] * math.cos(e) + height) * math.tan(d) / math.sin(e)  # (96, 96)
    columns = interpolation(x, SHADOW_SIDE, SHADOW_HALF).swapaxes(1, 2)
    return Resampling(rows.astype(np.float32), np.ascontiguousarray(columns, np.float32))


def draw_ground(shadows: Array, resampling: Resampling) -> Array:
    """Grey levels (K, 96, 96) of the ground alone."""
    lines = resampling.rows @ shadows  # (K, 96, T)
    dark = lines.swapaxes(0, 1) @ resampling.columns  # (96, K, 96)
    return GROUND[:, None, None].astype(np.float32) * (1 - dark.swapaxes(0, 1))


def draw_view(toy: Toy, azimuth: float, elevation: float, eye: float, ground: Array) -> Array:
    """One camera's images in all lightings: (K, 96, 96) uint8."""
    n = SIDE * FINE
    u, v = grid(n, SCREEN), grid(n, SCREEN)[::-1]
    turn, frame = turned(yaw=azimuth), camera(elevation, eye)
    own, at, found = windows(toy, turn, frame, (0, 0, toy.height), u, v)
    depth, owner = np.full((n, n), -np.inf, np.float32), np.full((n, n), -1, np.int8)
    for k, (solid, mine, window) in enumerate(zip(toy.solids, own, found, strict=True)):
        rows, columns = window[:2]
        enter, leave = crossed(solid, mine, window.u, window.v)
        near = leave + np.float32(at[k, 2])
        seen = (enter < leave) & (near > depth[rows, columns])
        np.copyto(depth[rows, columns], near, where=seen)
        np.copyto(owner[rows, columns], k, where=seen)

    place = np.flatnonzero(owner >= 0)  # (N,)
    owner, depth, row, column = owner.ravel()[place], depth.ravel()[place], place // n, place % n
    point = np.stack([u[column], v[row], depth], axis=1).astype(np.float32)  # (N, 3)
    own, at = own.astype(np.float32), at.astype(np.float32)
    p = ((point - at[owner])[:, None] @ own[owner].swapaxes(1, 2))[:, 0]  # (N, 3)
    normal = normals(toy, turn, owner, p)
    light = np.maximum(normal @ LAMPS.T.astype(np.float32), 0) @ BRIGHTNESS.T.astype(np.float32)  # (N, K)
    above = point @ frame[2].astype(np.float32) + np.float32(toy.height)  # over the ground, which shades what is low
    light += (SKY * (0.65 + 0.35 * normal[:, 2]) * np.minimum(1, 0.55 + 3 * above))[:, None]
    albedo = np.array([solid.albedo for solid in toy.solids], np.float32)[owner]
    grey = np.minimum(light * albedo[:, None] * (GROUND / FLUX).astype(np.float32), 255)  # (N, K)

    pixel = row // FINE * SIDE + column // FINE
    covered = np.bincount(pixel, minlength=SIDE * SIDE) / FINE**2
    images = ground.reshape(N_LIGHTINGS, -1) * (1 - covered)
    for k in range(N_LIGHTINGS):
        images[k] += np.bincount(pixel, grey[:, k], minlength=SIDE * SIDE) / FINE**2
    return np.rint(images).astype(np.uint8).reshape(N_LIGHTINGS, SIDE, SIDE)


def normals(toy: Toy, turn: Array, owner: Array, p: Array) -> Array:
    """Unit normals (N, 3) in the world at points p (N, 3), each in the coordinates of its solid. A box is shaded as if
    its edges were round."""
    kind = np.array([solid.kind for solid in toy.solids])[owner]
    tops = np.array([solid.top for solid in toy.solids], np.float32)[owner]
    slope = (tops - 1) / 2
    normal = p.copy()
    cubes = normal[kind == "box"]
    normal[kind == "box"] = cubes * (cubes * cubes) ** 4
    lid = (kind == "cone") & (np.abs(p[:, 2]) > 0.999)
    side = (kind == "cone") & ~lid
    normal[side, 2] = -slope[side] * ((1 + tops[side]) / 2 + slope[side] * p[side, 2])
    normal[lid, :2] = 0
    outward = np.linalg.inv(turn @ toy.axes).astype(np.float32)  # (S, 3, 3); a normal goes by the inverse transposed
    normal = (normal[:, None] @ outward[owner])[:, 0]
    return normal / np.linalg.norm(normal, axis=1, keepdims=True)


def draw_toy(category: int, instance: int, n_lightings: int = N_LIGHTINGS, seed: int = 0) -> Array:
    """All views of one toy: (elevations, azimuths, lightings, 2, 96, 96) uint8."""
    toy = make_toy(category, instance, seed)
    shadows = [shadow_maps(toy, azimuth).astype(np.float32) for azimuth in AZIMUTHS]
    images = np.empty((len(ELEVATIONS), len(AZIMUTHS), n_lightings, 2, SIDE, SIDE), np.uint8)
    for (e, elevation), (eye, angle) in itertools.product(enumerate(ELEVATIONS), enumerate((-STEREO, STEREO))):
        resampling = shadow_resampling(elevation, angle, toy.height)
        for a, azimuth in enumerate(AZIMUTHS):
            ground = draw_ground(shadows[a], resampling)
            images[e, a, :, eye] = draw_view(toy, azimuth, elevation, angle, ground)[:n_lightings]
    return images


# ----------------------------------------------------------------------------------------------------------------------
# The six files
# ----------------------------------------------------------------------------------------------------------------------


def file_name(subset: str, part: str) -> str:
    """The official name of a file of the real set."""
    instances = "".join(map(str, INSTANCES[subset]))
    return f"smallnorb-5x{instances}x9x18x6x2x96x96-{subset}-{part}.mat"


def header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Magic number, number of dimensions, and at least three sizes."""
    sizes = [*shape, *[1] * (3 - len(shape))]
    return np.array([MAGIC[dtype], len(shape), *sizes], "<i4").tobytes()


def shuffled_views(subset: str, n_instances: int, n_lightings: int, seed: int) -> Array:
    """(items, 5): category, instance, elevation 0 to 8, azimuth 0 to 34, lighting of every item of a file. As in the
    real set the categories alternate and the rest is shuffled."""
    counts = n_instances, len(ELEVATIONS), len(AZIMUTHS), n_lightings
    views = np.indices(counts).reshape(4, -1).T
    views[:, 0] = np.array(INSTANCES[subset])[views[:, 0]]
    views[:, 2] *= 2
    rng = generator(seed, Stream.SHUFFLE, *subset.encode())
    order = np.stack([rng.permutation(len(views)) for _ in CATEGORIES], axis=1)  # (views, 5)
    categories = np.broadcast_to(np.arange(len(CATEGORIES)), order.shape)
    return np.concatenate([categories[..., None], views[order]], axis=2).reshape(-1, 5)


def write_toy_norb(
    folder: Path,
    n_instances: int = 5,
    n_lightings: int = N_LIGHTINGS,
    seed: int = 0,
    threads: int | None = None,
    quiet: bool = False,
) -> None:
    """Write the six files, or none of them; no bit depends on ``threads``. A smaller set has the first ``n_instances``
    toys of each category in each half, and the first ``n_lightings`` lightings. Raises UserError where they cannot be
    written."""
    from tqdm import tqdm

    views = {subset: shuffled_views(subset, n_instances, n_lightings, seed) for subset in INSTANCES}
    jobs = [
        (subset, category, instance)
        for subset in INSTANCES
        for instance in INSTANCES[subset][:n_instances]
        for category in range(len(CATEGORIES))
    ]
    lock = threading.Lock()
    with contextlib.ExitStack() as stack:
        files = {
            (subset, part): stack.enter_context(atomic_write(folder / file_name(subset, part)))
            for subset in INSTANCES
            for part in PARTS
        }
        starts = {}
        for subset, rows in views.items():
            files[subset, "cat"].write(header("<i4", (len(rows),)) + rows[:, 0].astype("<i4").tobytes())
            files[subset, "info"].write(header("<i4", (len(rows), 4)) + rows[:, 1:].astype("<i4").tobytes())
            shape = (len(rows), 2, SIDE, SIDE)
            starts[subset] = files[subset, "dat"].write(header("u1", shape))
            reserve(files[subset, "dat"], starts[subset] + math.prod(shape))
        workers = stack.enter_context(Workers(threads or default_threads()))
        bar = stack.enter_context(
            tqdm(total=len(jobs), desc="toys", unit="toy", leave=False, disable=not shows_progress(quiet))
        )

        def draw(job: tuple[str, int, int]) -> None:
            subset, category, instance = job
            images = draw_toy(category, instance, n_lightings, seed)
            rows, file = views[subset], files[subset, "dat"]
            with lock:
                for item in np.flatnonzero((rows[:, :2] == (category, instance)).all(axis=1)):
                    _, _, elevation, azimuth, lighting = rows[item]
                    file.seek(starts[subset] + int(item) * 2 * SIDE * SIDE)
                    file.write(images[elevation, azimuth // 2, lighting].data)
                bar.update()

        workers.map(draw, jobs)
        for file in files.values():  # all are on the disk before the first takes its name
            file.flush()
            os.fsync(file.fileno())


def reserve(file: IO[bytes], size: int) -> None:
    """Find out at once whether the disk has room for the file."""
    file.flush()
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
    file.seek(size - 1)
    file.write(b"\0")


# ----------------------------------------------------------------------------------------------------------------------
# The cache
# ----------------------------------------------------------------------------------------------------------------------


def cached_toys(cache: Path) -> Path:
    """The folder below ``cache`` with the whole set of seed 0, drawn unless it is there. Its name has a fingerprint of
    this file's code, so that another version is drawn anew. Raises UserError where it cannot be written."""
    code = plain_code(Path(__file__).read_text(encoding="utf-8"))
    folder = cache / f"toys-{hashlib.sha256(code.encode()).hexdigest()[:8]}"
    names = [folder / file_name(subset, part) for subset in INSTANCES for part in PARTS]
    if not all(os.path.isfile(name) for name in names):
        print_message(f"drawing the toys, once, into {folder}: a minute or two, 0.9 GB")
        started = time.monotonic()
        write_toy_norb(folder)
        print_message(f"drawn in {time.monotonic() - started:.0f} s")
    return folder
