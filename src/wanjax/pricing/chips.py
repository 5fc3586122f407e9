# SPDX-License-Identifier: Apache-2.0
"""The TPU chips and NVIDIA cards for which programs are compiled, and the slices in which they are rented.

Sources for TPUs: peak FLOP/s and bandwidth are from JAX's Pallas (`jax/_src/pallas/mosaic/tpu_info.py`). HBM is the
capacity that the compiler reports when a program does not fit. The clock is the peak divided by the operations per
cycle. A v6e and half a v7x have 524,288 operations per cycle, and each core of earlier chips has 131,072. The numbers
of delay slots are from the compiler's dumps. The bandwidth to the host's memory is from the chapter on TPUs of the JAX
authors' book "How to Scale Your Model" (https://jax-ml.github.io/scaling-book/tpus): 15 GB/s for each chip, and 32 GB/s
on v6e. The number for v7x is an assumption.

Sources for cards: peak and bandwidth are from NVIDIA's data sheets (B200 in an HGX, H200, H100 SXM, A100 80 GB SXM,
L40S, T4) and from the appendix of the Ada whitepaper (RTX 4090). Peaks are dense, with float32 accumulation.
Multiprocessors, caches, clocks and limits are from XLA's descriptions (`xla/backends/gpu/target_config/specs`: B200,
H200, H100, A100) and from the CUDA programming guide's table of compute capabilities. Memory is the amount that JAX and
PyTorch report, which excludes the memory of the driver. The link is NVLink in one direction, or PCIe for cards without
NVLink. The bandwidth to the host's memory is the bandwidth of 16 PCIe lanes in one direction. The data sheets give the
generation of PCIe.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

from wanjax.errors import WanjaxError

if TYPE_CHECKING:  # JAX is imported late, because its import takes seconds and looking up a name does not need it
    from jax.sharding import AbstractMesh


@dataclass(frozen=True)
class Chip:
    """One JAX device: a whole chip, except on v7x, where each of a chip's two cores is a device."""

    name: str
    device_kind: str  # JAX's name of the device
    hbm: int  # bytes available to a program
    flops: float  # peak rate in bfloat16 operations per second
    bandwidth: float  # bytes of HBM per second
    clock: float  # cycles per second
    link: float  # bytes per second in each direction over one inter-chip link
    host_link: float  # bytes per second from the host's memory
    cores: int  # cores that share the work of one device
    branch_delay: int  # delay slots: the bundles after a branch that run before the branch takes effect

    torus: ClassVar[bool] = True  # the links connect only neighbouring chips

    platform: ClassVar[str] = "tpu"  # the name in jax.export
    peak_dtype: ClassVar[str] = "bfloat16"  # dtype of the operations that reach the peak


@dataclass(frozen=True)
class Generation:
    """The properties of streaming multiprocessors of one compute capability."""

    capability: tuple[int, int]
    lanes: int  # float32 units
    threads: int  # maximum resident threads
    shared: int  # KiB of shared memory
    shared_by_block: int  # KiB of shared memory that one block may use
    features: str = "NONE"  # ACCELERATED_FEATURES for instructions that only this generation has, as in sm_90a


@dataclass(frozen=True)
class Card:
    """An NVIDIA card, with the properties that prices and XLA's GPU compiler need."""

    name: str
    device_kind: str  # JAX's name of the device
    hbm: int  # bytes available to a program
    flops: float  # peak rate, in operations of `peak_dtype` per second
    bandwidth: float  # bytes of memory per second
    link: float  # bytes per second and direction to the other cards of a host
    host_link: float  # bytes per second from the host's memory
    generation: Generation
    processors: int  # streaming multiprocessors
    cache: int  # size of the L2 cache in bytes
    clock: float  # GHz, boosted
    peak_dtype: str = "bfloat16"

    torus: ClassVar[bool] = False  # a switch or the host connects all cards
    cores: ClassVar[int] = 1
    platform: ClassVar[str] = "cuda"

    @property
    def description(self) -> str:
        """The card as a GpuTargetConfigProto of XLA, in protobuf's text format."""
        generation = self.generation
        major, minor = generation.capability
        device = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 48 * 1024,
            "shared_memory_per_core": generation.shared * 1024,
            "shared_memory_per_block_optin": generation.shared_by_block * 1024,
            "threads_per_core_limit": generation.threads,
            "core_count": self.processors,
            "fpus_per_core": generation.lanes,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "memory_bandwidth": int(self.bandwidth),
            "l2_cache_size": self.cache,
            "clock_rate_ghz": self.clock,
            "device_memory_size": self.hbm,
            "registers_per_core_limit": 2**16,
            "registers_per_block_limit": 2**16,
        }
        fields = " ".join(f"{name}: {value}" for name, value in device.items())
        return (
            f"gpu_device_info {{ {fields} cuda_compute_capability {{ major: {major} minor: {minor} "
            f"feature_extension: {generation.features} }} }} "
            f'platform_name: "CUDA" dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} }} '
            f'runtime_version {{ major: {CUDA} }} device_description_str: "{self.generation}"'
        )


@dataclass(frozen=True)
class Slice:
    """Connected chips that are rented together. `topology` is their arrangement, as the compiler names it."""

    name: str
    chip: Chip | Card
    devices: int
    topology: str

    @property
    def memory(self) -> int:
        return self.chip.hbm

    @property
    def flops(self) -> float:
        return self.chip.flops

    @property
    def peak_dtype(self) -> str:
        return self.chip.peak_dtype


ONE_HOST = {"v5e:2x4": (2, 4, 1), "v6e:2x4": (2, 4, 1)}
"""Topologies that can also be rented as one host, with the number of the host's chips along each axis."""
TOPOLOGY_LOCK = Lock()  # the first call loads libtpu, which is not thread-safe
GIB = 2**30
V4 = Chip("v4", "TPU v4", int(30.75 * GIB), 275e12, 1.23e12, 1.05e9, 45e9, 15e9, 2, 1)
V5E = Chip("v5e", "TPU v5 lite", int(15.75 * GIB), 197e12, 0.82e12, 1.5e9, 45e9, 15e9, 1, 4)
V5P = Chip("v5p", "TPU v5", int(95.74 * GIB), 459e12, 2.46e12, 1.75e9, 90e9, 15e9, 2, 4)
V6E = Chip("v6e", "TPU v6 lite", int(31.25 * GIB), 918e12, 1.64e12, 1.75e9, 90e9, 32e9, 1, 4)
V7X = Chip("v7x", "TPU7x", int(94.75 * GIB), 1153.5e12, 3.7e12, 2.2e9, 90e9, 32e9, 1, 6)

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

CUDA, CUDNN = 13, (9, 10)  # versions in the descriptions of cards
MIB = 2**20
TURING = Generation((7, 5), 64, 1024, 64, 64)
AMPERE = Generation((8, 0), 64, 2048, 164, 163)
ADA = Generation((8, 9), 128, 1536, 100, 99)
HOPPER = Generation((9, 0), 128, 2048, 228, 227, "ACCELERATED_FEATURES")
BLACKWELL = Generation((10, 0), 128, 2048, 228, 227, "ACCELERATED_FEATURES")

CARDS = {
    card.name: card
    for card in (
        Card("b200", "NVIDIA B200", 178 * GIB, 2250e12, 7.7e12, 900e9, 64e9, BLACKWELL, 148, 126 * MIB, 1.965),
        Card("h200", "NVIDIA H200", int(139.8 * GIB), 989e12, 4.8e12, 450e9, 64e9, HOPPER, 132, 50 * MIB, 1.98),
        Card(
            "h100", "NVIDIA H100 80GB HBM3", int(79.1 * GIB), 989e12, 3.35e12, 450e9, 64e9, HOPPER, 132, 50 * MIB, 1.98
        ),
        Card(
            "a100", "NVIDIA A100-SXM4-80GB", int(79.2 * GIB), 312e12, 2.04e12, 300e9, 32e9, AMPERE, 108, 40 * MIB, 1.41
        ),
        Card("l40s", "NVIDIA L40S", int(44.4 * GIB), 362e12, 0.864e12, 32e9, 32e9, ADA, 142, 96 * MIB, 2.52),
        Card(
            "4090", "NVIDIA GeForce RTX 4090", int(23.6 * GIB), 165e12, 1.008e12, 32e9, 32e9, ADA, 128, 72 * MIB, 2.52
        ),
        Card(
            "t4", "Tesla T4", int(14.7 * GIB), 8.1e12, 0.32e12, 16e9, 16e9, TURING, 40, 4 * MIB, 1.59, "float32"
        ),  # on this card XLA computes bfloat16 in float32
    )
}
CARD_SLICES = {
    name: Slice(name, card, devices, f"1x1x{devices}")
    for card in CARDS.values()
    for devices in (1, 2, 4, 8)
    for name in (card.name if devices == 1 else f"{card.name}-{devices}",)
}
"""Slices of cards in one host, by names such as h100 (one card) and h100-8."""

CHIPS_BY_DEVICE_KIND = {chip.device_kind: chip for chip in (V4, V5E, V5P, V6E, V7X)} | {
    "TPU v5e": V5E,
    "TPU v5p": V5P,
    "TPU v6e": V6E,
}
"""Chips by JAX's `device_kind`."""


def find_slice(name: str) -> Slice:
    """Return the slice with a name such as `v6e-8`. For an unknown name, raise a WanjaxError that lists all names."""
    if name not in SLICES:
        raise WanjaxError(f"no TPU slice is named {name!r}: use one of {', '.join(SLICES)}")
    return SLICES[name]


def card_devices(name: str) -> list[Any]:
    """Describe the cards of a slice such as h100-8 as devices for XLA's GPU compiler. This machine need not have the
    cards.

    Loads JAX's CUDA plugin.
    """
    from jax.experimental import topologies

    target = CARD_SLICES[name]
    assert isinstance(target.chip, Card)
    with TOPOLOGY_LOCK:
        topology_desc = topologies.get_topology_desc(
            target.chip.name, "cuda", topology=target.topology, target_config=target.chip.description
        )
    return list(topology_desc.devices)


def topology_devices(topology: str, *, one_host: bool = False) -> list[Any]:
    """Describe the chips of a topology as devices for the TPU compiler. This machine need not have the chips.

    With `one_host`, the devices of a topology in ONE_HOST belong to one host instead of two. Loads libtpu.
    """
    from jax.experimental import topologies

    options: dict[str, Any] = {"chips_per_host_bounds": (1, 1, 1)} if topology.endswith(":1x1") else {}
    if one_host and topology in ONE_HOST:
        options["chips_per_host_bounds"] = ONE_HOST[topology]
    if topology.startswith("v4:"):  # an option for v4, whose two cores then are one device; later chips need no option
        options["chip_config_name"] = "megacore"
    with TOPOLOGY_LOCK:
        topology_desc = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options)
    return list(topology_desc.devices)


def abstract_mesh(target: Slice, axes: Mapping[str, int] | None = None) -> "AbstractMesh":
    """Return a mesh of a slice's chips. This machine need not have the chips. Without `axes` the mesh has one axis,
    `chips`.

    Programs that are traced on the mesh can be compiled for the slice. Raises WanjaxError if the axes do not use all
    chips.
    """
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType

    axes = {"chips": target.devices} if axes is None else axes
    if prod(axes.values()) != target.devices:
        shape = ", ".join(f"{axis}={size}" for axis, size in axes.items())
        raise WanjaxError(
            f"the mesh {shape} needs {prod(axes.values())} devices, but {target.name} has {target.devices}: give "
            f"a mesh of {target.devices}"
        )
    device = (
        AbstractDevice(target.chip.device_kind, target.chip.cores, "tpu")
        if isinstance(target.chip, Chip)
        else AbstractDevice(target.chip.device_kind, None, "gpu")
    )
    return AbstractMesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes), abstract_device=device)
