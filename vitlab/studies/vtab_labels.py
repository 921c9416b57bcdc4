"""The class labels of VTAB's structured tasks: counts, distances, positions and angles, cut into bins.

Each function takes the raw annotation of its data set and returns the class number. The bins are the benchmark's own.
"""

from collections.abc import Sequence

import numpy as np

from vitlab.errors import UserError

CLEVR_EDGES = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)  # depth of the closest object, in the scenes' own unit
KITTI_EDGES = (-100.0, 8.0, 20.0, 999.0)  # meters to the closest vehicle
KITTI_VEHICLES = ("Car", "Van", "Truck")
NO_VEHICLE = 1000.0


def clevr_count(objects: int) -> int:
    """Label scenes of 3 to 10 objects: 8 classes, 0 for three objects."""
    return check_range(objects, 3, 10, "objects in a CLEVR scene") - 3


def clevr_distance(depths: Sequence[float]) -> int:
    """The closest object's depth (the third of its pixel_coords): 6 classes, cut at 8, 8.5, 9, 9.5 and 10."""
    if not len(depths):
        raise UserError("a CLEVR scene without objects has no closest one")
    return bin_above(CLEVR_EDGES, min(depths), 6, "the depth of the closest CLEVR object")


def kitti_distance(kinds: Sequence[str], depths: Sequence[float]) -> int:
    """The closest car, van or truck (z of its location, meters): up to 8, up to 20, farther, and 3 for no vehicle.

    `kinds` are the object types of a label file, `depths` the z of each.
    """
    if len(kinds) != len(depths):
        raise UserError(f"a KITTI image has {len(kinds)} types of objects and {len(depths)} depths; they go together")
    vehicles = [z for kind, z in zip(kinds, depths, strict=True) if kind in KITTI_VEHICLES]
    return bin_above(KITTI_EDGES, min([*vehicles, NO_VEHICLE]), 4, "the depth of the closest KITTI vehicle")


def dsprites_location(x: int) -> int:
    """The place from left to right, 0 to 31 (the latent class of position x), two to a class: 16 classes."""
    return check_range(x, 0, 31, "x positions of dSprites") * 16 // 32


def dsprites_orientation(turn: int) -> int:
    """The turn, 0 to 39 (the latent class of orientation), two or three to a class: 16 classes of 22.5 degrees."""
    return check_range(turn, 0, 39, "orientations of dSprites") * 16 // 40


def norb_azimuth(azimuth: int) -> int:
    """The azimuth as smallNORB writes it, 0, 2 ... 34 (tens of degrees): 18 classes."""
    if azimuth % 2:
        raise UserError(f"smallNORB counts its azimuths 0, 2 ... 34, not {azimuth}")
    return check_range(azimuth // 2, 0, 17, "azimuths of smallNORB, halved,")


def norb_elevation(elevation: int) -> int:
    """The camera's elevation, 0 to 8 (30 to 70 degrees, in steps of 5): 9 classes, the numbers themselves."""
    return check_range(elevation, 0, 8, "elevations of smallNORB")


def bin_above(edges: Sequence[float], value: float, classes: int, what: str) -> int:
    """Return the index of the last edge below the value; a value on an edge belongs to the bin before."""
    place = int(np.searchsorted(edges, value, "left")) - 1
    if not np.isfinite(value) or not 0 <= place < classes:
        raise UserError(f"{what} is {value:g}, which is in none of the {classes} bins from {edges[0]:g} up")
    return place


def check_range(value: int, least: int, most: int, what: str) -> int:
    """Return the value; outside of least … most, or between integers, it is a UserError."""
    if int(value) != value or not least <= value <= most:
        raise UserError(f"{what} are integers from {least} to {most}, not {value}")
    return int(value)
