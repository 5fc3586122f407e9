# SPDX-License-Identifier: Apache-2.0
"""TPU chips that programs are compiled for and priced on, and the slices in which they are rented.

Sources: peak FLOP/s and bandwidth are from JAX's Pallas (`jax/_src/pallas/mosaic/tpu_info.py`). HBM is the
capacity that the compiler reports when a program does not fit. The clock is the peak divided by the operations per
cycle: 524,288 on v6e and on half a v7x, 131,072 on each core of earlier chips. The delay slots are those of the
compiler's dumps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

from wanjax.errors import WanjaxError

if TYPE_CHECKING:  # importing JAX takes seconds, and looking up a name does not need it
    from jax.sharding import AbstractMesh


@dataclass(frozen=True)
class Chip:
    """One JAX device: a whole chip, except on v7x, where each of a chip's two cores is a device."""

    name: str
    kind: str  # JAX's `device_kind`
    hbm: int  # bytes available to a program
    flops: float  # peak, bfloat16 operations per second
    bandwidth: float  # of HBM, bytes per second
    clock: float  # cycles per second
    link: float  # bytes per second and direction over one inter-chip link
    cores: int  # cores that share the work of one device
    branch_delay: int  # delay slots: bundles after a branch that still run

    torus: ClassVar[bool] = True  # links connect only neighbours


@dataclass(frozen=True)
class Slice:
    """Connected chips that are rented together; `topology` is the compiler's name for the arrangement."""

    name: str
    chip: Chip
    devices: int
    topology: str

    @property
    def memory(self) -> int:
        return self.chip.hbm

    @property
    def flops(self) -> float:
        return self.chip.flops

    peak_dtype: ClassVar[str] = "bfloat16"  # of the operations at the peak


ONE_HOST = {"v5e:2x4": (2, 4, 1), "v6e:2x4": (2, 4, 1)}
"""Topologies that may also be rented as one host, and the host's chips along each axis."""
TOPOLOGY_LOCK = Lock()  # the first call loads libtpu, which two threads may not do at once
GIB = 2**30
V4 = Chip("v4", "TPU v4", int(30.75 * GIB), 275e12, 1.23e12, 1.05e9, 45e9, 2, 1)
V5E = Chip("v5e", "TPU v5 lite", int(15.75 * GIB), 197e12, 0.82e12, 1.5e9, 45e9, 1, 4)
V5P = Chip("v5p", "TPU v5", int(95.74 * GIB), 459e12, 2.46e12, 1.75e9, 90e9, 2, 4)
V6E = Chip("v6e", "TPU v6 lite", int(31.25 * GIB), 918e12, 1.64e12, 1.75e9, 90e9, 1, 4)
V7X = Chip("v7x", "TPU7x", int(94.75 * GIB), 1153.5e12, 3.7e12, 2.2e9, 90e9, 1, 6)

SLICES = {
    name: Slice(name, chip, devices, topology)
    for name, chip, devices, topology in (
        ("v5e-1", V5E, 1, "v5e:1x1"),
        ("v5e-4", V5E, 4, "v5e:2x2"),
        ("v5e-8", V5E, 8, "v5e:2x4"),
        ("v5p-8", V5P, 4, "v5p:2x2x1"),  # the name counts cores, two per device
        ("v6e-1", V6E, 1, "v6e:1x1"),
        ("v6e-4", V6E, 4, "v6e:2x2"),
        ("v6e-8", V6E, 8, "v6e:2x4"),
        ("v6e-16", V6E, 16, "v6e:4x4"),
        ("v7x-8", V7X, 8, "tpu7x:2x2x1"),
        ("v4-8", V4, 4, "v4:2x2x1"),  # the name counts cores, two per device
    )
}

KINDS = {chip.kind: chip for chip in (V4, V5E, V5P, V6E, V7X)} | {"TPU v5e": V5E, "TPU v5p": V5P, "TPU v6e": V6E}
"""Chips by JAX's `device_kind`."""


def find_slice(name: str) -> Slice:
    """Return the slice of a name such as `v6e-8`. Raises WanjaxError that lists the known names."""
    if name not in SLICES:
        raise WanjaxError(f"no TPU slice is named {name!r}: there are {', '.join(SLICES)}")
    return SLICES[name]


def topology_devices(topology: str, *, one_host: bool = False) -> list[Any]:
    """Return the TPU compiler's devices of a topology, which may be absent.

    With `one_host` the devices of a topology in ONE_HOST belong to one host, otherwise to two. Loads libtpu.
    """
    from jax.experimental import topologies

    options: dict[str, Any] = {"chips_per_host_bounds": (1, 1, 1)} if topology.endswith(":1x1") else {}
    if one_host and topology in ONE_HOST:
        options["chips_per_host_bounds"] = ONE_HOST[topology]
    if topology.startswith("v4:"):  # JAX sees a v4's two cores as one device; later chips need no option
        options["chip_config_name"] = "megacore"
    with TOPOLOGY_LOCK:
        topology_desc = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options)
    return list(topology_desc.devices)


def abstract_mesh(target: Slice, axes: Mapping[str, int] | None = None) -> "AbstractMesh":
    """Return a mesh of a slice's chips, which may be absent; without `axes` it has one axis, `chips`, over all of them.

    Programs traced on it are compiled for that chip. Raises WanjaxError if the axes do not fill it.
    """
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType

    axes = {"chips": target.devices} if axes is None else axes
    if prod(axes.values()) != target.devices:
        shape = ", ".join(f"{axis}={size}" for axis, size in axes.items())
        raise WanjaxError(f"the mesh {shape} needs {prod(axes.values())} devices: {target.name} has {target.devices}")
    chip = AbstractDevice(target.chip.kind, target.chip.cores, "tpu")
    return AbstractMesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes), abstract_device=chip)
