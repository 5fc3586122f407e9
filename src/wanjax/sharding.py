# SPDX-License-Identifier: Apache-2.0
"""Sharding: the mesh of devices, and the rules that map logical axes of arrays to axes of the mesh.

A mesh has three axes: `dp` for batches and for the two prompts of guidance, `sp` for the sequence, and `tp` for heads
and for the other sharded axes of weights. Models give logical names (`heads`, `mlp`, `length` ...) to the axes of
weights and activations, and rules map these names to mesh axes. There are three sets of rules:

- `fsdp`: weights are stored sharded, and gathered before use. Activations are sharded by tokens. Only attention needs
  the tokens of other devices.
- `tp`: weights stay sharded: the first projection of attention or the MLP by columns, the second by rows (Shoeybi et
  al., Megatron-LM, 2019). Activations are sharded by heads inside attention, by the hidden layer's width inside the
  MLP, and by tokens elsewhere (Korthikanti et al., 2022).
- `replicated`: every device has all weights, so no weights are sent. Activations are sharded by tokens.

There is always a mesh. Outside `use_partitioner(...)` it has a single device, and `constrain`, `shard_tokens`,
`replicate` and `gather_weight` return their input.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from math import prod
from numbers import Integral
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from wanjax.errors import WanjaxError, install_extra, repr_short
from wanjax.figures import format_mesh, pluralize

MESH_AXES = ("dp", "sp", "tp")
HOST_MEMORY_KIND = "pinned_host"  # JAX's name of host memory from which a device copies directly
MAX_RING = 16  # with more devices, there is no search for a ring of neighbouring chips
TILE_ROWS = 16  # the rows of a bfloat16 tile on TPUs; shards of complete tiles can be concatenated without a copy
Axes = Sequence[str | None]


@dataclass(frozen=True)
class ShardingRules:
    """Sharding rules: the mesh axes over which each logical axis may be sharded.

    Earlier entries have priority. A mesh axis shards at most one logical axis.

    Attributes:
        weights: Mesh axes for the logical axes of weights.
        activations: Mesh axes for the logical axes of activations.
        gather_weights: Whether weights are gathered before use.
    """

    weights: Mapping[str, tuple[str, ...]]
    activations: Mapping[str, tuple[str, ...]]
    gather_weights: bool

    def __hash__(self) -> int:
        return hash((tuple(self.weights.items()), tuple(self.activations.items()), self.gather_weights))


VIDEO_AXES = ("batch", "frames", "height", "width", None)  # the logical axes of an autoencoder's frames
_BY_TOKENS = {"batch": ("dp",), "length": ("sp", "tp")}
_BY_PIXELS = {"width": MESH_AXES, "height": MESH_AXES}  # an autoencoder's frames are sharded over all devices
SHARDING_RULES: Mapping[str, ShardingRules] = MappingProxyType(
    {
        "fsdp": ShardingRules(
            weights={"heads": ("sp", "tp"), "mlp": ("sp", "tp"), "vocab": ("sp", "tp")},
            activations={**_BY_TOKENS, **_BY_PIXELS},
            gather_weights=True,
        ),
        "tp": ShardingRules(
            weights={"heads": ("tp",), "mlp": ("tp",), "vocab": ("tp",)},
            activations={"batch": ("dp",), "heads": ("tp",), "mlp": ("tp",), "length": ("sp", "tp"), **_BY_PIXELS},
            gather_weights=False,
        ),
        "replicated": ShardingRules(weights={}, activations={**_BY_TOKENS, **_BY_PIXELS}, gather_weights=False),
    }
)


@dataclass(frozen=True)
class Partitioner:
    """A mesh and sharding rules. Together they determine how each array is sharded.

    Attributes:
        mesh: The mesh; abstract if programs are only traced.
        rules: The sharding rules.
        smallest_frame: The height and width of an autoencoder's smallest frames. Larger frames get a sharding that also
            divides the smallest frames evenly.
        num_device_blocks: The number of blocks of a stack that are on the device at a time, while the stack is in the
            host's memory. 0 means that stacks are on the device.
    """

    mesh: Mesh | AbstractMesh
    rules: ShardingRules
    smallest_frame: tuple[int, int] | None = None
    num_device_blocks: int = 0

    def __str__(self) -> str:
        """Return the mesh in the form that `parse_mesh` reads."""
        return format_mesh(self.mesh.shape)

    @property
    def is_single_device(self) -> bool:
        """Whether the mesh has one device, so that nothing is sharded."""
        return self.mesh.size == 1

    @property
    def device(self) -> Any:
        """The first device of the mesh, or the abstract device of an abstract mesh."""
        return self.mesh.abstract_device if isinstance(self.mesh, AbstractMesh) else self.mesh.devices.flat[0]

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of a replicated array, of which every device has a copy."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rules_name(self) -> str:
        """The name of the rules in `SHARDING_RULES`."""
        return next(name for name, rules in SHARDING_RULES.items() if rules == self.rules)

    def axis_size(self, axes: str | tuple[str, ...] | None) -> int:
        """Return the number of devices along an axis of the mesh, or along several axes together."""
        return prod(self.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))

    def activation_spec(self, axes: Axes, shape: Sequence[int]) -> PartitionSpec:
        """Return the sharding of an activation of this shape, by the logical names of its axes."""
        return self._best_spec(self.rules.activations, axes, shape)

    def weight_sharding(self, axes: Axes, shape: Sequence[int]) -> NamedSharding:
        """Return the sharding of a stored weight. Vectors are replicated if the rules gather weights before use.

        With `num_device_blocks`, the matrices of stacks are in the host's memory. A matrix is a weight with at least
        two named axes.
        """
        is_vector = sum(axis != "layers" for axis in axes) < 2
        rules = {} if is_vector and self.rules.gather_weights else self.rules.weights
        memory_kind = HOST_MEMORY_KIND if self.num_device_blocks and is_offloadable(axes) else None
        return NamedSharding(self.mesh, self._best_spec(rules, axes, shape), memory_kind=memory_kind)

    def shard_map(self, function: Callable[..., Any], in_specs: tuple[Any, ...], out_specs: Any) -> Callable[..., Any]:
        """Map a function over the shards of its arguments. On one device, return the function unchanged."""
        if self.is_single_device:
            return function
        # `check_vma` would fail, because kernels do not declare the mesh axes along which their results vary
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _best_spec(self, rules: Mapping[str, tuple[str, ...]], axes: Axes, shape: Sequence[int]) -> PartitionSpec:
        """Pick the even sharding that uses the most devices.

        If several shardings use equally many devices, prefer one that also divides `smallest_frame`, and then follow
        the order of the rules. All resolutions of an autoencoder then have the same sharding, so frames stay on their
        devices.
        """
        mesh_axes = [axis for axis in MESH_AXES if self.axis_size(axis) > 1]
        sharded_dims = [axes.index(name) for name in rules if name in axes]
        # for each mesh axis: the dimensions that it may shard, and None, which leaves the axis unused
        dim_choices = [[dim for dim in sharded_dims if axis in rules[axes[dim] or ""]] + [None] for axis in mesh_axes]
        candidates = (
            [
                tuple(axis for axis, sharded_dim in zip(mesh_axes, assignment, strict=True) if sharded_dim == dim)
                for dim in range(len(shape))
            ]
            for assignment in product(*dim_choices)
        )
        best = max(candidates, key=lambda candidate: self._score_sharding(candidate, axes, shape))
        return PartitionSpec(*(dim_axes or None for dim_axes in best))

    def _score_sharding(
        self, candidate: Sequence[tuple[str, ...]], axes: Axes, shape: Sequence[int]
    ) -> tuple[int, bool]:
        """Score a sharding: its number of devices (0 if it is uneven), and whether it divides `smallest_frame`."""
        shard_counts = [self.axis_size(dim_axes) for dim_axes in candidate]
        is_even = all(n % count == 0 for n, count in zip(shape, shard_counts, strict=True))
        count_of_axis = dict(zip(axes, shard_counts, strict=True))
        smallest_sides = zip(("height", "width"), self.smallest_frame or (), strict=False)
        divides_smallest = all(n % count_of_axis.get(name, 1) == 0 for name, n in smallest_sides)
        return prod(shard_counts) if is_even else 0, divides_smallest


def abstract_partitioner(dp: int = 1, sp: int = 1, tp: int = 1) -> Partitioner:
    """Make a partitioner with an abstract mesh, which needs no devices."""
    return Partitioner(AbstractMesh((dp, sp, tp), MESH_AXES, axis_types=(AxisType.Auto,) * 3), SHARDING_RULES["fsdp"])


ONE_DEVICE_PARTITIONER = abstract_partitioner()
_partitioner_in_use: ContextVar[Partitioner] = ContextVar("partitioner", default=ONE_DEVICE_PARTITIONER)
_collected_constraints: ContextVar["ShardingConstraints | None"] = ContextVar("constraints", default=None)


def current_partitioner() -> Partitioner:
    """Return the partitioner in use."""
    return _partitioner_in_use.get()


@contextmanager
def use_partitioner(partitioner: Partitioner) -> Iterator[None]:
    """Use a partitioner within the block.

    A function that `jax.jit` traces in the block must not be called with another partitioner.
    """
    token = _partitioner_in_use.set(partitioner)
    try:
        yield
    finally:
        _partitioner_in_use.reset(token)


@contextmanager
def align_shardings(height: int, width: int) -> Iterator[None]:
    """Within the block, if several shardings use equally many devices, prefer a sharding that also divides (height,
    width) evenly."""
    with use_partitioner(replace(current_partitioner(), smallest_frame=(height, width))):
        yield


class ShardingConstraints:
    """The shardings to which a program constrains its arrays while it is traced."""

    def __init__(self) -> None:
        # the keys are the arrays' `id`s, which are unique while the arrays are stored
        self._arrays: dict[int, tuple[jax.Array, PartitionSpec]] = {}

    def add(self, x: jax.Array, spec: PartitionSpec) -> None:
        self._arrays[id(x)] = x, spec

    def spec_of(self, x: Any) -> PartitionSpec | None:
        """Return the sharding of an array, or None if it is not constrained."""
        return self._arrays[id(x)][1] if id(x) in self._arrays else None


@contextmanager
def collect_constraints() -> Iterator[ShardingConstraints]:
    """Within the block, collect the shardings of constrained arrays."""
    token = _collected_constraints.set(constraints := ShardingConstraints())
    try:
        yield constraints
    finally:
        _collected_constraints.reset(token)


def constrain_to(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Constrain x to a sharding on the current mesh. On one device, return x unchanged."""
    partitioner = current_partitioner()
    if not partitioner.is_single_device:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(partitioner.mesh, spec))
        if (constraints := _collected_constraints.get()) is not None:
            constraints.add(x, spec)
    return x


def constrain(x: jax.Array, axes: Axes) -> jax.Array:
    """Constrain x to the sharding that follows from the logical names of its axes."""
    return constrain_to(x, current_partitioner().activation_spec(axes, x.shape))


def num_shards(axes: Axes, shape: Sequence[int]) -> int:
    """Return the number of shards of an activation of this shape."""
    partitioner = current_partitioner()
    return prod(partitioner.axis_size(mesh_axes) for mesh_axes in partitioner.activation_spec(axes, shape))


def padded_length(length: int, *, room: int = 0) -> int:
    """Return the number of tokens to which `shard_tokens` pads this number: a multiple of the number of devices.

    Args:
        length: The number of tokens.
        room: If tokens are sharded over `tp`, the padding has room for this many tokens, padded in the same way.
    """
    partitioner = current_partitioner()
    num_devices = partitioner.axis_size(("sp", "tp"))
    has_all_to_all = partitioner.axis_size("tp") > 1  # an all-to-all concatenates shards, which is faster in full tiles
    is_long = length >= TILE_ROWS**2 * num_devices  # padding to full tiles then adds at most one sixteenth
    multiple = TILE_ROWS * num_devices if is_long and has_all_to_all else num_devices
    if room and has_all_to_all:
        length += padded_length(room)
    return length + -length % multiple


def shard_tokens(x: jax.Array, axes: Axes, *, length: int | None = None) -> jax.Array:
    """Pad the axis `length` with zero tokens, and shard it.

    Attention then needs the number of real tokens, as its argument `kv_length`.

    Args:
        x: The array.
        axes: The logical names of its axes.
        length: The length to which the axis is padded; `padded_length` by default.
    """
    axis = list(axes).index("length")
    padding = (length or padded_length(x.shape[axis])) - x.shape[axis]
    return constrain(jnp.pad(x, [(0, padding if i == axis else 0) for i in range(x.ndim)]) if padding else x, axes)


def is_offloadable(axes: Axes) -> bool:
    """Return whether a weight with these logical axes is in the host's memory when blocks are offloaded."""
    return "layers" in axes and sum(axis not in ("layers", None) for axis in axes) > 1


def is_in_host_memory(x: Any) -> bool:
    """Return whether an array or shape is in the host's memory, from which a device copies it before use."""
    return getattr(x.sharding, "memory_kind", None) == HOST_MEMORY_KIND


def replicate(tree: Any) -> Any:
    """Replicate the arrays of a pytree on every device."""
    return jax.tree.map(lambda x: constrain_to(x, PartitionSpec()), tree)


def gather_weight(weight: jax.Array) -> jax.Array:
    """Gather a weight on every device if the rules require it."""
    return replicate(weight) if current_partitioner().rules.gather_weights else weight


def pad_to(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Pad the end of an axis of x with zeros, up to a multiple."""
    padding = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, padding if i == axis else 0) for i in range(x.ndim)]) if padding else x


_substitute_devices: list[Any] = []


@contextmanager
def substitute_devices(devices: Sequence[Any]) -> Iterator[None]:
    """Within the block, compile for these devices instead of the real devices."""
    _substitute_devices[:] = devices
    try:
        yield
    finally:
        _substitute_devices.clear()


def local_devices() -> list[Any]:
    """Return the devices of this process, or all substitute devices."""
    return list(_substitute_devices) or jax.local_devices()


def all_devices() -> list[Any]:
    """Return the devices of all processes, or all substitute devices."""
    return list(_substitute_devices) or jax.devices()


def device_platform() -> str:
    """Return the platform of the devices, such as "cpu".

    Raises:
        WanjaxError: JAX has no device of the platforms in JAX_PLATFORMS.
    """
    if _substitute_devices:
        return _substitute_devices[0].platform
    try:
        return jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # JAX raises AssertionError if its plugin for NVIDIA is missing
        platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
        cause = " ".join(str(error).partition(" (set JAX_PLATFORMS")[0].split()).rstrip(".")
        reason = cause or f"there is no device of {platforms}, or no plugin for it"
        if "tpu" in str(platforms).split(",") and find_spec("libtpu") is None:
            reason = f"libtpu is missing: {install_extra('tpu')}"
        raise WanjaxError(
            f"JAX cannot use JAX_PLATFORMS={platforms} here ({reason}): without JAX_PLATFORMS, JAX finds its devices"
        ) from error


def make_mesh(
    dp: int = 1, sp: int = 1, tp: int = 1, *, devices: Sequence[Any] | None = None, **unknown_axes: Any
) -> Mesh:
    """Make a mesh of devices. Devices along its last axes are neighbouring chips, if possible.

    Args:
        dp: The size of the axis for batches, and for the two prompts of guidance.
        sp: The size of the axis for the sequence.
        tp: The size of the axis for heads, and for the other sharded axes of weights.
        devices: The devices to use; None uses all devices of JAX.
        **unknown_axes: Not accepted. The error message lists the valid axes.

    Returns:
        The mesh, for `wanjax.load(..., mesh=...)`.

    Raises:
        WanjaxError: An axis does not exist, JAX has no devices, or the product of the axes is not the number of
            devices.
    """
    for axis in unknown_axes:
        raise WanjaxError(f"a mesh has no axis {axis!r}: use {', '.join(MESH_AXES)}, as in make_mesh(dp=2, tp=4)")
    if not isinstance(devices, Sequence | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise WanjaxError(f"devices must be a list of devices, got {repr_short(devices)}: give jax.devices()")
    for axis, size in zip(MESH_AXES, (dp, sp, tp), strict=True):
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise WanjaxError(f"{axis} is {repr_short(size)}: give a whole number, as in make_mesh(dp=2, tp=4)")
    if devices is None:
        device_platform()  # raises WanjaxError for an invalid JAX_PLATFORMS
        devices = all_devices()
    sizes: dict[str, int] = dict(zip(MESH_AXES, (dp, sp, tp), strict=True))
    if dp < 1 or sp < 1 or tp < 1:
        raise WanjaxError(f"the mesh {format_mesh(sizes)} has an axis below 1: every axis must be at least 1")
    if dp * sp * tp != len(devices):
        device_text = "there is 1" if len(devices) == 1 else f"there are {len(devices)}"
        one_axis = format_mesh({"sp": len(devices)})
        raise WanjaxError(
            f"the mesh {format_mesh(sizes)} needs {pluralize(dp * sp * tp, 'device')}, and {device_text}: "
            f"leave the mesh out, or give one with dp · sp · tp = {len(devices)}, such as {one_axis}"
        )
    return arrange_mesh(devices, sizes)


def arrange_mesh(devices: Sequence[Any], axes: Mapping[str, int]) -> Mesh:
    """Make a mesh with these axis sizes. If the topology allows it, devices along the last axes are neighbouring chips.

    If the links between chips form a ring, the chips along `sp` are in the order of this ring. Keys, values and weights
    then pass over a single link to the next chip.
    """
    sizes = tuple(axes.values())
    # JAX must be allowed to split a physical axis: on 4 × 4 chips, an axis of size 8 needs half of one
    device_array = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    # with `tp`, the order does not change, because the devices along `tp` must stay neighbours
    if axes.get("sp", 1) > 2 and axes.get("tp", 1) == 1:
        device_array = np.apply_along_axis(_order_as_ring, list(axes).index("sp"), device_array)
    return Mesh(device_array, tuple(axes), axis_types=(AxisType.Auto,) * len(sizes))


def _order_as_ring(devices: np.ndarray) -> np.ndarray:
    """Order the devices as a ring: the chips of successive devices are linked, and the last chip is linked to the
    first.

    If there is no such order, or if the devices have no coordinates, return the devices unchanged.
    """
    if len(devices) > MAX_RING or not all(hasattr(device, "coords") for device in devices):
        return devices

    def are_linked(a: Any, b: Any) -> bool:
        return sum(abs(i - j) for i, j in zip(a.coords, b.coords, strict=True)) <= 1  # 0 for the two cores of a chip

    def extend(path: list[Any], remaining: list[Any]) -> list[Any] | None:
        if not remaining:
            return path if are_linked(path[-1], path[0]) else None
        candidates = (device for device in remaining if are_linked(path[-1], device))
        rings = (
            extend([*path, device], [other for other in remaining if other is not device]) for device in candidates
        )
        return next((ring for ring in rings if ring is not None), None)

    first, *remaining = devices
    return np.array(extend([first], remaining) or devices, object)


def one_device_partitioner() -> Partitioner:
    """Make a partitioner for JAX's first device."""
    device_platform()
    return Partitioner(make_mesh(devices=jax.local_devices()[:1]), SHARDING_RULES["fsdp"])


def find_sharding_rules(name: str) -> ShardingRules:
    """Return the sharding rules with a name. Raises WanjaxError if the name is unknown."""
    if name not in SHARDING_RULES:
        raise WanjaxError(f"no sharding rules are named {name!r}: choose {', '.join(SHARDING_RULES)}")
    return SHARDING_RULES[name]
