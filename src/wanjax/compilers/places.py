# SPDX-License-Identifier: Apache-2.0
"""Places: slices of TPUs and other devices that a plan prices programs for, by name."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from wanjax.compilers import traced
from wanjax.compilers.chips import SLICES, Slice, described
from wanjax.compilers.lowering import Lowering
from wanjax.compilers.priced import Priced, prices
from wanjax.compilers.roofline import Machine, machines
from wanjax.errors import WanjaxError
from wanjax.sharding import MESH_AXES, make_mesh

Place = Slice | Machine
LIMITS = {
    "attention": "the matrix units, in attention",
    "matmuls": "the matrix units, in projections",
    "elementwise": "the memory's bandwidth, in elementwise work",
    "copies": "the memory's bandwidth, in copies",
    "communication": "the links between chips",
}
ROOM = 0.9  # the share of a device's memory that advice may use


def find_place(name: str) -> Place:
    """Returns the slice of TPUs or the device of this name; raises WanjaxError that lists the known ones."""
    known: dict[str, Place] = {**SLICES, **machines()}
    if name not in known:
        raise WanjaxError(f"no chip is named {name!r}: there are {', '.join(known)}")
    return known[name]


def axes_on(place: Place, mesh: tuple[int, int, int]) -> dict[str, int]:
    """Returns the sizes of a mesh by axis; raises WanjaxError where a single device is asked for more than one."""
    if isinstance(place, Machine) and prod(mesh) != 1:
        raise WanjaxError(f"the mesh has {prod(mesh)} devices: {place.name} stands for one")
    return dict(zip(MESH_AXES, mesh, strict=True))


def mesh_on(place: Place, axes: Mapping[str, int]) -> Mesh | AbstractMesh:
    """Returns the mesh that programs for a place are traced on; a device that is modelled is stood for by a CPU."""
    return described(place, axes) if isinstance(place, Slice) else make_mesh(devices=jax.devices("cpu")[:1])


def priced_on(
    place: Place, programs: Sequence[tuple[str, Lowering]], tell: Callable[[str, int, int], Any] | None = None
) -> list[Priced]:
    """Returns the price of each named program: by the chip's compiler for a slice, else by the stated model.

    The programs are traced on `mesh_on`. Each time that a price is known, `tell` receives the program's name, the
    number of those that are known, and the number of all.
    """
    lowerings = [lowering for _, lowering in programs]
    known: dict[int, Priced] = {}
    modelled = (traced.price_lowering(place, x) for x in lowerings) if isinstance(place, Machine) else ()
    for number, priced in prices(place, lowerings) if isinstance(place, Slice) else enumerate(modelled):
        known[number] = priced
        if tell is not None:
            tell(programs[number][0], len(known), len(programs))
    return [known[number] for number in range(len(programs))]


def limit_of(program: Priced) -> str | None:
    """Returns what takes most of a program's time; None where it does not fit."""
    parts = program.breakdown
    return LIMITS[max(parts, key=lambda part: parts[part])] if parts else None


def would_fit(chip: str, needed: int) -> str:
    """Returns the smallest slice, of the same chips if there is one, that should have so many bytes in all."""
    places = [place for place in SLICES.values() if place.devices * place.chip.hbm * ROOM > needed]
    same = [place for place in places if place.chip.name == chip.partition("-")[0]] or places
    least = min(same, key=lambda place: place.devices, default=None)
    return "a smaller size or fewer frames may" if least is None else f"{least.name} should"
