# SPDX-License-Identifier: Apache-2.0
"""Hardware by name: slices of TPUs and other devices, for which a plan prices programs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from wanjax.errors import WanjaxError
from wanjax.figures import in_bytes
from wanjax.pipelines.meshes import StepCost, choose_mesh
from wanjax.plan.price import PRICER
from wanjax.pricing import roofline_price
from wanjax.pricing.chips import CARD_SLICES, SLICES, Slice, abstract_mesh
from wanjax.pricing.compile import has_cuda_compiler
from wanjax.pricing.lowering import Lowering
from wanjax.pricing.pricer import Price
from wanjax.pricing.roofline import Machine, find_hardware
from wanjax.sharding import MESH_AXES, make_mesh

Hardware = Slice | Machine
Tell = Callable[[Sequence[str], int, int], Any]
LIMITS = {
    "attention": "the matrix units, in attention",
    "matmuls": "the matrix units, in projections",
    "elementwise": "the memory's bandwidth, in elementwise work",
    "copies": "the memory's bandwidth, in copies",
    "communication": "the links between chips",
}
ROOM = 0.9  # the share of a device's memory that advice may use


def find_priceable_hardware(name: str) -> Hardware:
    """Return the hardware of this name: for a card, without the compiler that the extra `plan-cuda` brings, its model.

    Raises WanjaxError if it is unknown, or needs a compiler that is missing.
    """
    hardware = find_hardware(name)
    if name in CARD_SLICES and has_cuda_compiler():
        hardware = CARD_SLICES[name]
    if isinstance(hardware, Slice):
        PRICER.check(hardware.chip.platform)
    return hardware


def mesh_axes(
    hardware: Hardware, mesh: tuple[int, int, int] | None, step: Callable[[], StepCost], sp: int | None
) -> tuple[Hardware, dict[str, int]]:
    """Return the hardware that a mesh uses, and the sizes of the mesh by axis.

    Args:
        hardware: A slice, or a modelled device, which stands for itself alone.
        mesh: The sizes in the order of `MESH_AXES`; None is the best mesh, which may use a part of a slice.
        step: Makes what the best mesh is chosen by.
        sp: The size of that axis in the best mesh, if it is given.

    Raises:
        WanjaxError: The mesh has more than one device, and the hardware is modelled.
    """
    if mesh is None and isinstance(hardware, Slice):
        mesh = choose_mesh(step(), hardware.devices, hardware.memory, hardware.chip, sp=sp)
        hardware = replace(hardware, devices=prod(mesh))
    mesh = mesh or (1, 1, 1)
    if isinstance(hardware, Machine) and prod(mesh) != 1:
        raise WanjaxError(f"the mesh has {prod(mesh)} devices: {hardware.name} stands for one")
    return hardware, dict(zip(MESH_AXES, mesh, strict=True))


def mesh_on(hardware: Hardware, axes: Mapping[str, int]) -> Mesh | AbstractMesh:
    """Return the mesh on which programs for this hardware are traced; a CPU stands for a modelled device."""
    return abstract_mesh(hardware, axes) if isinstance(hardware, Slice) else make_mesh(devices=jax.devices("cpu")[:1])


def priced_on(
    hardware: Hardware, programs: Sequence[tuple[str, Lowering]], tell: Tell = lambda now, done, total: None
) -> list[Price]:
    """Return the price of each named program: by the chip's compiler for a slice, else by the stated model.

    The programs are traced on `mesh_on`. Each time that a program is begun or its price is known, `tell` receives the
    names of those being priced, the number of those that are done, and the number of all whose price was not kept.
    """
    lowerings = [lowering for _, lowering in programs]
    prices: dict[int, Price] = {}
    under_way: dict[int, str] = {}
    cached: int | None = None  # the prices that were there before anything was begun

    def show() -> None:
        tell([*under_way.values()], len(prices) - (cached or 0), len(programs) - (cached or 0))

    def begun(number: int) -> None:
        nonlocal cached
        cached = len(prices) if cached is None else cached
        under_way[number] = programs[number][0]
        show()

    priced = (
        PRICER.prices(hardware, lowerings, begun)
        if isinstance(hardware, Slice)
        else _modelled(hardware, lowerings, begun)
    )
    for number, price in priced:
        prices[number] = price
        under_way.pop(number, None)
        if cached is not None:
            show()
    return [prices[number] for number in range(len(programs))]


def _modelled(
    machine: Machine, lowerings: Sequence[Lowering], begun: Callable[[int], Any]
) -> Iterator[tuple[int, Price]]:
    for number, lowering in enumerate(lowerings):
        begun(number)
        yield number, roofline_price.price_lowering(machine, lowering, PRICER.attention)


def limit_of(program: Price) -> str | None:
    """Return the part that takes most of a program's time; None if it does not fit."""
    parts = program.breakdown
    return LIMITS[max(parts, key=lambda part: parts[part])] if parts else None


def fits_on(hardware: Hardware, arguments: int, peak: int) -> bool | None:
    """Return whether a program fits a device; None where nothing is compiled, and only fusion could make it fit.

    Args:
        hardware: The devices. On a slice of TPUs the bytes are the compiler's own; elsewhere the peak is an upper
            bound, that of a program of which nothing is fused.
        arguments: Bytes that have to be there: weights, inputs and what is kept beside them.
        peak: Bytes at the peak.
    """
    if peak <= hardware.memory:
        return True
    return None if not isinstance(hardware, Slice) and arguments <= hardware.memory else False


def may_fit(claim: str, subject: str, least: int, most: int, memory: int) -> str:
    """Return advice on a program whose memory only a compiler could tell.

    Args:
        claim: What may fit.
        subject: What needs the memory.
        least: Bytes of weights and inputs on a device.
        most: Bytes at the peak if nothing is fused.
        memory: Bytes of a device.
    """
    return (
        f"{claim}: {subject} needs {in_bytes(least, 1024)} for weights and inputs, and up to {in_bytes(most, 1024)} in "
        f"all if nothing is fused; a chip has {in_bytes(memory, 1024)}. Nothing was compiled for this chip: to be "
        "sure, run `wanjax warmup` there, which compiles without weights"
    )


def would_fit(chip: str, needed: int) -> str:
    """Return advice that names the smallest slice with so many bytes, of the same chips if there is one."""
    family = CARD_SLICES if chip.partition("-")[0] in CARD_SLICES else SLICES
    places = [hardware for hardware in family.values() if hardware.devices * hardware.chip.hbm * ROOM > needed]
    same = [hardware for hardware in places if hardware.chip.name == chip.partition("-")[0]] or places
    least = min(same, key=lambda hardware: hardware.devices, default=None)
    return "a smaller size or fewer frames may" if least is None else f"{least.name} should"
