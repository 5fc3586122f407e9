# SPDX-License-Identifier: Apache-2.0
"""Find the hardware of a plan by name, choose its mesh, and price programs on it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from wanjax.errors import WanjaxError
from wanjax.figures import format_bytes
from wanjax.pipelines.meshes import StepCost, choose_mesh
from wanjax.plan.price import PRICER
from wanjax.pricing import roofline_price
from wanjax.pricing.chips import CARD_SLICES, SLICES, Slice, abstract_mesh
from wanjax.pricing.compile import has_cuda_compiler
from wanjax.pricing.lowering import AbstractCall
from wanjax.pricing.pricer import Price
from wanjax.pricing.roofline import Machine, find_hardware
from wanjax.sharding import MESH_AXES, make_mesh

Hardware = Slice | Machine
OnProgress = Callable[[Sequence[str], int, int], Any]
LIMITS = {
    "attention": "the matrix units, in attention",
    "matmuls": "the matrix units, in projections",
    "elementwise": "the memory's bandwidth, in elementwise work",
    "copies": "the memory's bandwidth, in copies",
    "communication": "the links between chips",
    "offload": "the link to the host's memory",
}
USABLE_FRACTION = 0.9  # the fraction of a device's memory that advice assumes to be usable


def find_priceable_hardware(name: str) -> Hardware:
    """Find the slice or the device with a name.

    If the compiler of the extra `plan-cuda` is not installed, the result for a card is a device with a roofline model.
    Raises WanjaxError if the name is unknown, or if the hardware needs a compiler that is missing.
    """
    hardware = find_hardware(name)
    if name in CARD_SLICES and has_cuda_compiler():
        hardware = CARD_SLICES[name]
    if isinstance(hardware, Slice):
        PRICER.check(hardware.chip.platform)
    return hardware


def mesh_axes(
    hardware: Hardware,
    mesh: tuple[int, int, int] | None,
    step: Callable[[], StepCost],
    sp: int | None,
    *,
    one_device: bool = False,
) -> tuple[Hardware, dict[str, int]]:
    """Choose the hardware that a mesh uses, and the sizes of the mesh by axis.

    Args:
        hardware: A slice, or a single device with a roofline model.
        mesh: The sizes in the order of `MESH_AXES`; None for the best mesh, which may use only part of a slice.
        step: A function that returns the cost of a step, by which the best mesh is chosen.
        sp: The size of the axis `sp` in the best mesh; None chooses the size.
        one_device: Whether the best mesh must have one device.

    Raises:
        WanjaxError: The mesh has several devices, but the hardware is a single device.
    """
    if mesh is None and isinstance(hardware, Slice):
        devices = 1 if one_device else hardware.devices
        mesh = choose_mesh(step(), devices, hardware.memory, hardware.chip, sp=sp)
        hardware = replace(hardware, devices=prod(mesh))
    mesh = mesh or (1, 1, 1)
    if isinstance(hardware, Machine) and prod(mesh) != 1:
        raise WanjaxError(
            f"the mesh has {prod(mesh)} devices, but {hardware.name} is one device: omit the mesh, or give a slice"
        )
    return hardware, dict(zip(MESH_AXES, mesh, strict=True))


def mesh_on(hardware: Hardware, axes: Mapping[str, int]) -> Mesh | AbstractMesh:
    """Return the mesh for tracing programs for this hardware. For a device with a roofline model it is a CPU."""
    return abstract_mesh(hardware, axes) if isinstance(hardware, Slice) else make_mesh(devices=jax.devices("cpu")[:1])


def price_on(
    hardware: Hardware,
    programs: Sequence[tuple[str, AbstractCall]],
    on_progress: OnProgress = lambda running_names, done, total: None,
) -> list[Price]:
    """Price named programs that are traced on `mesh_on`.

    A slice is priced with the chip's compiler. Any other device is priced with its roofline model. `on_progress` is
    called when the pricing of a program starts and ends. Its arguments are the names of the programs that are being
    priced, the number of finished programs, and the total number of programs. Programs with a cached price do not
    count.
    """
    abstract_calls = [abstract_call for _, abstract_call in programs]
    prices: dict[int, Price] = {}
    running: dict[int, str] = {}
    cached: int | None = None  # the number of cached prices; None until a program starts

    def report() -> None:
        on_progress([*running.values()], len(prices) - (cached or 0), len(programs) - (cached or 0))

    def on_start(index: int) -> None:
        nonlocal cached
        cached = len(prices) if cached is None else cached
        running[index] = programs[index][0]
        report()

    indexed_prices = (
        PRICER.prices(hardware, abstract_calls, on_start)
        if isinstance(hardware, Slice)
        else _roofline_prices(hardware, abstract_calls, on_start)
    )
    for index, price in indexed_prices:
        prices[index] = price
        running.pop(index, None)
        if cached is not None:
            report()
    return [prices[index] for index in range(len(programs))]


def _roofline_prices(
    machine: Machine, abstract_calls: Sequence[AbstractCall], on_start: Callable[[int], Any]
) -> Iterator[tuple[int, Price]]:
    for index, abstract_call in enumerate(abstract_calls):
        on_start(index)
        yield index, roofline_price.price_abstract_call(machine, abstract_call, PRICER.attention)


def limit_of(program: Price) -> str | None:
    """Describe what limits the speed of a program; return None if the program does not fit."""
    parts = program.breakdown
    return LIMITS[max(parts, key=lambda part: parts[part])] if parts else None


def fits_on(hardware: Hardware, arguments: int, peak: int) -> bool | None:
    """Return whether a program fits a device. Return None if this depends on fusion and nothing was compiled.

    Args:
        hardware: The devices. For a slice, `peak` comes from the compiler. For other hardware, `peak` is an upper bound
            that assumes no fusion.
        arguments: Bytes that are needed in any case: weights, inputs and networks that stay on the device.
        peak: Bytes at the peak.
    """
    if peak <= hardware.memory:
        return True
    return None if not isinstance(hardware, Slice) and arguments <= hardware.memory else False


def may_fit_advice(claim: str, subject: str, min_bytes: int, max_bytes: int, memory: int) -> str:
    """Write the advice for a program that may or may not fit. Only a compiler can decide whether it fits.

    Args:
        claim: The start of the sentence, which says what may fit.
        subject: The subject of the sentence, which needs the memory.
        min_bytes: Bytes of weights and inputs on a device.
        max_bytes: Bytes at the peak if nothing is fused.
        memory: Bytes of a device's memory.
    """
    return (
        f"{claim}: {subject} needs {format_bytes(min_bytes, 1024)} for weights and inputs, and up to "
        f"{format_bytes(max_bytes, 1024)} in "
        f"all if nothing is fused; a chip has {format_bytes(memory, 1024)}. Nothing was compiled for this chip: to be "
        "sure, run `wanjax warmup` there, which compiles without weights"
    )


def smallest_slice_advice(chip: str, needed_bytes: int) -> str:
    """Write the end of the advice.

    The advice names the smallest slice with enough memory, preferably of the same chip.
    """
    family = CARD_SLICES if chip.partition("-")[0] in CARD_SLICES else SLICES
    large_enough = [
        hardware
        for hardware in family.values()
        if hardware.devices * hardware.chip.hbm * USABLE_FRACTION > needed_bytes
    ]
    candidates = [hardware for hardware in large_enough if hardware.chip.name == chip.partition("-")[0]] or large_enough
    smallest = min(candidates, key=lambda hardware: hardware.devices, default=None)
    return "a smaller size or fewer frames may" if smallest is None else f"{smallest.name} should"
