# SPDX-License-Identifier: Apache-2.0
"""Sharding: the mesh of devices, and the rules that map logical axes of arrays to axes of the mesh.

A mesh has three axes: `dp` for batches and for the two prompts of guidance, `sp` for the sequence, `tp` for heads and
for the other sharded axes of weights. Models give logical names (`heads`, `mlp`, `length` ...) to the axes of weights
and activations, and rules map these names to mesh axes. There are three sets of rules:

- `fsdp`: weights are stored sharded and gathered before use; activations are sharded by tokens. Only attention needs
  the tokens of other devices.
- `tp`: weights stay sharded, by columns and then by rows (Shoeybi et al., Megatron-LM, 2019). Between the two,
  activations are sharded by heads or by the width inside the MLP; elsewhere by tokens (Korthikanti et al., 2022).
- `replicated`: every device holds all weights, so no weights are sent; activations are sharded by tokens.

There is always a mesh. Outside `use(partitioner)` it has a single device, and `constrain`, `shard_tokens`, `replicate`
and `gather_weight` return their input.
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
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from wanjax.errors import WanjaxError, repr_short
from wanjax.figures import mesh_text, quantity

MESH_AXES = ("dp", "sp", "tp")
TILE = 16  # rows of a bfloat16 tile on TPUs; shards made of full tiles are concatenated without a copy
Axes = Sequence[str | None]


@dataclass(frozen=True)
class Rules:
    """The mesh axes that each logical axis may be sharded over.

    Earlier entries have priority, and a mesh axis shards at most one logical axis.

    Attributes:
        weights: Mesh axes for the logical axes of weights.
        activations: Mesh axes for the logical axes of activations.
        gathered: True if weights are gathered before use.
    """

    weights: Mapping[str, tuple[str, ...]]
    activations: Mapping[str, tuple[str, ...]]
    gathered: bool

    def __hash__(self) -> int:
        return hash((tuple(self.weights.items()), tuple(self.activations.items()), self.gathered))


VIDEO = ("batch", "frames", "height", "width", None)  # logical axes of an autoencoder's frames
_BY_TOKENS = {"batch": ("dp",), "length": ("sp", "tp")}
_BY_PIXELS = {"width": MESH_AXES, "height": MESH_AXES}  # an autoencoder's frames are sharded over all devices
RULES: Mapping[str, Rules] = MappingProxyType(
    {
        "fsdp": Rules(
            weights={"heads": ("sp", "tp"), "mlp": ("sp", "tp"), "vocab": ("sp", "tp")},
            activations={**_BY_TOKENS, **_BY_PIXELS},
            gathered=True,
        ),
        "tp": Rules(
            weights={"heads": ("tp",), "mlp": ("tp",), "vocab": ("tp",)},
            activations={"batch": ("dp",), "heads": ("tp",), "mlp": ("tp",), "length": ("sp", "tp"), **_BY_PIXELS},
            gathered=False,
        ),
        "replicated": Rules(weights={}, activations={**_BY_TOKENS, **_BY_PIXELS}, gathered=False),
    }
)


@dataclass(frozen=True)
class Partitioner:
    """A mesh and its rules, which decide how each array is sharded.

    Attributes:
        mesh: The mesh; abstract for a program that is only traced.
        rules: The sharding rules.
        coarsest: The height and width of an autoencoder's smallest frames. Larger frames are sharded in a way that
            divides these evenly too.
    """

    mesh: Mesh | AbstractMesh
    rules: Rules
    coarsest: tuple[int, int] | None = None

    def __str__(self) -> str:
        """The mesh as `parse_mesh` reads it."""
        return mesh_text(self.mesh.shape)

    @property
    def single_device(self) -> bool:
        """True for a mesh of one device, where nothing is sharded."""
        return self.mesh.size == 1

    @property
    def device(self) -> Any:
        """The first device of the mesh, or the abstract device of an abstract mesh."""
        return self.mesh.abstract_device if isinstance(self.mesh, AbstractMesh) else self.mesh.devices.flat[0]

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that every device holds completely."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rules_name(self) -> str:
        """The name of the rules in `RULES`."""
        return next(name for name, rules in RULES.items() if rules == self.rules)

    def size(self, axes: str | tuple[str, ...] | None) -> int:
        """The number of devices along an axis of the mesh, or along several axes together."""
        return prod(self.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))

    def activation(self, axes: Axes, shape: Sequence[int]) -> PartitionSpec:
        """The sharding of an activation of this shape, by the logical names of its axes."""
        return self._spec(self.rules.activations, axes, shape)

    def weight(self, axes: Axes, shape: Sequence[int]) -> NamedSharding:
        """The sharding of a stored weight. Vectors are replicated if the rules gather weights before use."""
        is_vector = sum(axis != "layers" for axis in axes) < 2
        rules = {} if is_vector and self.rules.gathered else self.rules.weights
        return NamedSharding(self.mesh, self._spec(rules, axes, shape))

    def shard_map(self, function: Callable[..., Any], specs: tuple[Any, ...], out: Any) -> Callable[..., Any]:
        """Map a function over the shards of its arguments; return it unchanged on one device."""
        if self.single_device:
            return function
        # kernels do not declare along which mesh axes their results vary, so `check_vma` would fail
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)

    def _spec(self, rules: Mapping[str, tuple[str, ...]], axes: Axes, shape: Sequence[int]) -> PartitionSpec:
        """Pick the even sharding that uses the most devices.

        Ties go to a sharding that divides `coarsest` too, then to the order of the rules. So all resolutions of an
        autoencoder have the same sharding, and no frames are sent between devices.
        """
        mesh_axes = [axis for axis in MESH_AXES if self.size(axis) > 1]
        sharded_dims = [axes.index(name) for name in rules if name in axes]
        # for each mesh axis: the dimensions that it may shard, or None to leave it unused
        dim_choices = [[dim for dim in sharded_dims if axis in rules[axes[dim] or ""]] + [None] for axis in mesh_axes]
        candidates = (
            [
                tuple(axis for axis, sharded_dim in zip(mesh_axes, assignment, strict=True) if sharded_dim == dim)
                for dim in range(len(shape))
            ]
            for assignment in product(*dim_choices)
        )
        best = max(candidates, key=lambda candidate: self._score(candidate, axes, shape))
        return PartitionSpec(*(dim_axes or None for dim_axes in best))

    def _score(self, candidate: Sequence[tuple[str, ...]], axes: Axes, shape: Sequence[int]) -> tuple[int, bool]:
        """Score a sharding: its number of devices (0 if it is uneven), and whether it divides `coarsest`."""
        shard_counts = [self.size(dim_axes) for dim_axes in candidate]
        is_even = all(n % count == 0 for n, count in zip(shape, shard_counts, strict=True))
        count_of_axis = dict(zip(axes, shard_counts, strict=True))
        coarsest_sides = zip(("height", "width"), self.coarsest or (), strict=False)
        divides_coarsest = all(n % count_of_axis.get(name, 1) == 0 for name, n in coarsest_sides)
        return prod(shard_counts) if is_even else 0, divides_coarsest


def abstract_partitioner(dp: int = 1, sp: int = 1, tp: int = 1) -> Partitioner:
    """Make a partitioner with an abstract mesh, which needs no devices."""
    return Partitioner(AbstractMesh((dp, sp, tp), MESH_AXES, axis_types=(AxisType.Auto,) * 3), RULES["fsdp"])


ONE_DEVICE = abstract_partitioner()
_current: ContextVar[Partitioner] = ContextVar("partitioner", default=ONE_DEVICE)
_constraints: ContextVar["Constraints | None"] = ContextVar("constraints", default=None)


def current() -> Partitioner:
    """Return the partitioner in use."""
    return _current.get()


@contextmanager
def use(partitioner: Partitioner) -> Iterator[None]:
    """Use a partitioner within the block. A function that `jax.jit` traces there must not run with another one."""
    token = _current.set(partitioner)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def aligned_to(height: int, width: int) -> Iterator[None]:
    """Within the block, prefer shardings that also divide (height, width) evenly, if they use as many devices."""
    with use(replace(current(), coarsest=(height, width))):
        yield


class Constraints:
    """The shardings to which a program constrains its arrays while it is traced."""

    def __init__(self) -> None:
        self._arrays: dict[
            int, tuple[jax.Array, PartitionSpec]
        ] = {}  # by `id`, which stays valid while the array is stored here

    def add(self, x: jax.Array, spec: PartitionSpec) -> None:
        self._arrays[id(x)] = x, spec

    def spec_of(self, x: Any) -> PartitionSpec | None:
        """Return the sharding of a constrained array, or None if the compiler chooses it."""
        return self._arrays[id(x)][1] if id(x) in self._arrays else None


@contextmanager
def collect_constraints() -> Iterator[Constraints]:
    """Collect the shardings that the `with` block constrains arrays to."""
    token = _constraints.set(constraints := Constraints())
    try:
        yield constraints
    finally:
        _constraints.reset(token)


def constrain_to(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Constrain x to a sharding on the mesh in use; return it unchanged on one device."""
    partitioner = current()
    if not partitioner.single_device:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(partitioner.mesh, spec))
        if (constraints := _constraints.get()) is not None:
            constraints.add(x, spec)
    return x


def constrain(x: jax.Array, axes: Axes) -> jax.Array:
    """Constrain x to the sharding that follows from the logical names of its axes."""
    return constrain_to(x, current().activation(axes, x.shape))


def num_shards(axes: Axes, shape: Sequence[int]) -> int:
    """Return the number of shards of an activation of this shape."""
    partitioner = current()
    return prod(partitioner.size(mesh_axes) for mesh_axes in partitioner.activation(axes, shape))


def shard_tokens(x: jax.Array, axes: Axes) -> jax.Array:
    """Pad the axis `length` with zero tokens so that it divides evenly over devices, and shard it.

    Attention needs the number of real tokens as its `keys`.
    """
    partitioner = current()
    axis, devices = list(axes).index("length"), partitioner.size(("sp", "tp"))
    is_long = x.shape[axis] >= TILE**2 * devices  # padding to full tiles adds at most one sixteenth
    has_all_to_all = partitioner.size("tp") > 1  # an all-to-all concatenates shards; ring attention does not
    return constrain(pad_to(x, axis, TILE * devices if is_long and has_all_to_all else devices), axes)


def replicate(tree: Any) -> Any:
    """Replicate the arrays of a pytree on every device."""
    return jax.tree.map(lambda x: constrain_to(x, PartitionSpec()), tree)


def gather_weight(weight: jax.Array) -> jax.Array:
    """Gather a weight on every device if the rules require it."""
    return replicate(weight) if current().rules.gathered else weight


def pad_to(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Pad the end of an axis of x with zeros, up to a multiple."""
    padding = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, padding if i == axis else 0) for i in range(x.ndim)]) if padding else x


_substitute_devices: list[Any] = []


@contextmanager
def substitute_devices(devices: Sequence[Any]) -> Iterator[None]:
    """Within the block, compile for these devices in place of the real ones."""
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


def platform() -> str:
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
            reason = "libtpu is missing: install wanjax[tpu]"
        raise WanjaxError(
            f"JAX cannot use JAX_PLATFORMS={platforms} here ({reason}): without JAX_PLATFORMS it uses what it finds"
        ) from error


def make_mesh(dp: int = 1, sp: int = 1, tp: int = 1, *, devices: Sequence[Any] | None = None) -> Mesh:
    """Make a mesh of devices. Its last axes connect neighbouring chips.

    Args:
        dp: The size of the axis for batches, and for the two prompts of guidance.
        sp: The size of the axis for the sequence.
        tp: The size of the axis for heads, and for the other sharded axes of weights.
        devices: The devices to use; None uses all of JAX's.

    Returns:
        The mesh, for `wanjax.load(..., mesh=...)`.

    Raises:
        WanjaxError: The product of the axes is not the number of devices, or JAX has no devices.
    """
    for axis, size in zip(MESH_AXES, (dp, sp, tp), strict=True):
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise WanjaxError(f"{axis} is {repr_short(size)}: give a whole number, as in make_mesh(dp=2, tp=4)")
    if devices is None:
        platform()  # raises WanjaxError for a mistake in JAX_PLATFORMS
        devices = all_devices()
    sizes: dict[str, int] = dict(zip(MESH_AXES, (dp, sp, tp), strict=True))
    if dp < 1 or sp < 1 or tp < 1:
        raise WanjaxError(f"the mesh {mesh_text(sizes)} has an axis below 1: every axis must be at least 1")
    if dp * sp * tp != len(devices):
        raise WanjaxError(
            f"the mesh {mesh_text(sizes)} needs {quantity(dp * sp * tp, 'device')}, and there are {len(devices)}: "
            f"dp · sp · tp must be {len(devices)}"
        )
    return arrange(devices, sizes)


def arrange(devices: Sequence[Any], axes: Mapping[str, int]) -> Mesh:
    """Make a mesh of the given axis sizes; its last axes connect neighbouring chips as far as the topology allows."""
    sizes = tuple(axes.values())
    # on 4 × 4 chips an axis of 8 needs half of a physical axis, which JAX splits only if allowed
    device_array = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(device_array, tuple(axes), axis_types=(AxisType.Auto,) * len(sizes))


def one_device() -> Partitioner:
    """Make a partitioner for JAX's first device."""
    platform()
    return Partitioner(make_mesh(devices=jax.local_devices()[:1]), RULES["fsdp"])


def find_rules(name: str) -> Rules:
    """Look up rules by name; raise WanjaxError for an unknown name."""
    if name not in RULES:
        raise WanjaxError(f"no sharding rules are named {name!r}: choose {', '.join(RULES)}")
    return RULES[name]
