# SPDX-License-Identifier: Apache-2.0
"""Sharding: the mesh of devices, and the rules that map logical axes of arrays to axes of the mesh.

A mesh has three axes: `dp` for batches and for the two prompts of guidance, `sp` for the sequence, `tp` for heads and
for the other sharded axes of weights. Models give the axes of weights and activations logical names (`heads`, `mlp`,
`length` ...), and rules map the names to mesh axes. There are three sets of rules:

- `fsdp`: weights are stored sharded and gathered where they are used; activations are sharded by tokens. Only attention
  needs the tokens of other devices.
- `tp`: weights stay sharded, by columns and then by rows (Shoeybi et al., Megatron-LM, 2019). Between the two,
  activations are sharded by heads or by the width inside the MLP, elsewhere by tokens (Korthikanti et al., 2022).
- `replicated`: weights are whole on every device, where its memory allows, so that none are sent; activations are
  sharded by tokens.

There is always a mesh. Outside `use(partitioner)` it is one of a single device, on which `constrain`, `shard_tokens`,
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
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from wanjax.errors import WanjaxError, repr_short
from wanjax.figures import mesh_text, quantity

MESH_AXES = ("dp", "sp", "tp")
TILE = 16  # rows of a bfloat16 tile on TPUs: shards of whole tiles are joined without a copy
Axes = Sequence[str | None]


@dataclass(frozen=True)
class Rules:
    """Mesh axes that each logical axis may take. Earlier entries choose first; no mesh axis is taken twice.

    `gathered` says that weights are gathered where they are used.
    """

    weights: Mapping[str, tuple[str, ...]]
    activations: Mapping[str, tuple[str, ...]]
    gathered: bool

    def __hash__(self) -> int:
        return hash((tuple(self.weights.items()), tuple(self.activations.items()), self.gathered))


VIDEO = ("batch", "frames", "height", "width", None)  # the axes of an autoencoder's frames
_BY_TOKENS = {"batch": ("dp",), "length": ("sp", "tp")}
_SPACE = {"width": MESH_AXES, "height": MESH_AXES}  # an autoencoder's frames are sharded over all devices
RULES: Mapping[str, Rules] = MappingProxyType(
    {
        "fsdp": Rules(
            weights={"heads": ("sp", "tp"), "mlp": ("sp", "tp"), "vocab": ("sp", "tp")},
            activations={**_BY_TOKENS, **_SPACE},
            gathered=True,
        ),
        "tp": Rules(
            weights={"heads": ("tp",), "mlp": ("tp",), "vocab": ("tp",)},
            activations={"batch": ("dp",), "heads": ("tp",), "mlp": ("tp",), "length": ("sp", "tp"), **_SPACE},
            gathered=False,
        ),
        "replicated": Rules(weights={}, activations={**_BY_TOKENS, **_SPACE}, gathered=False),
    }
)


@dataclass(frozen=True)
class Partitioner:
    """A mesh and its rules: decides how each array is sharded.

    The mesh of a program that is only traced is abstract. `coarsest` are the height and width of an autoencoder's
    smallest frames; larger ones are sharded so that these divide too.
    """

    mesh: Mesh | AbstractMesh
    rules: Rules
    coarsest: tuple[int, int] | None = None

    def __str__(self) -> str:
        """The mesh as `parse_mesh` reads it."""
        return mesh_text(self.mesh.shape)

    @property
    def single_device(self) -> bool:
        """True for a mesh of one device, on which nothing is sharded."""
        return self.mesh.size == 1

    @property
    def device(self) -> Any:
        """The first device of the mesh; of an abstract mesh the kind of its devices."""
        return self.mesh.abstract_device if isinstance(self.mesh, AbstractMesh) else self.mesh.devices.flat[0]

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that every device holds whole."""
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
        """The sharding of a stored weight. A vector that would be gathered for use is replicated."""
        vector = sum(axis != "layers" for axis in axes) < 2
        rules = {} if vector and self.rules.gathered else self.rules.weights
        return NamedSharding(self.mesh, self._spec(rules, axes, shape))

    def shard_map(self, function: Callable[..., Any], specs: tuple[Any, ...], out: Any) -> Callable[..., Any]:
        """Return the function as each device runs it on its shards; unchanged on one device."""
        if self.single_device:
            return function
        # kernels do not say along which mesh axes their results vary, so that cannot be checked
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)

    def _spec(self, rules: Mapping[str, tuple[str, ...]], axes: Axes, shape: Sequence[int]) -> PartitionSpec:
        """Pick the even sharding over the most devices; ties go to one that divides `coarsest` too, then to rule order.

        A sharding that changed from level to level would send frames between devices.
        """
        mesh_axes = [axis for axis in MESH_AXES if self.size(axis) > 1]
        order = [axes.index(name) for name in rules if name in axes]
        ways = [[dim for dim in order if axis in rules[axes[dim] or ""]] + [None] for axis in mesh_axes]
        splits = (
            [tuple(axis for axis, at in zip(mesh_axes, way, strict=True) if at == dim) for dim in range(len(shape))]
            for way in product(*ways)
        )
        best = max(splits, key=lambda split: self._worth(split, axes, shape))
        return PartitionSpec(*(taken or None for taken in best))

    def _worth(self, split: Sequence[tuple[str, ...]], axes: Axes, shape: Sequence[int]) -> tuple[int, bool]:
        """Score a sharding: its number of devices, 0 if it is uneven, and whether it divides `coarsest`."""
        sizes = [self.size(taken) for taken in split]
        devices = prod(sizes) if all(n % size == 0 for n, size in zip(shape, sizes, strict=True)) else 0
        by_name = dict(zip(axes, sizes, strict=True))
        sides = zip(("height", "width"), self.coarsest or (), strict=False)
        return devices, all(n % by_name.get(name, 1) == 0 for name, n in sides)


def abstract_partitioner(dp: int = 1, sp: int = 1, tp: int = 1) -> Partitioner:
    """Return the partitioner of a mesh whose devices need not be here."""
    return Partitioner(AbstractMesh((dp, sp, tp), MESH_AXES, axis_types=(AxisType.Auto,) * 3), RULES["fsdp"])


ONE_DEVICE = abstract_partitioner()
_current: ContextVar[Partitioner] = ContextVar("partitioner", default=ONE_DEVICE)
_constraints: ContextVar["Constraints | None"] = ContextVar("constraints", default=None)


def current() -> Partitioner:
    """The partitioner in use."""
    return _current.get()


@contextmanager
def use(partitioner: Partitioner) -> Iterator[None]:
    """Use a partitioner within the block. A `jax.jit` traced there must not serve another partitioner."""
    token = _current.set(partitioner)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def aligned_to(height: int, width: int) -> Iterator[None]:
    """Within the block, shard frames so that (height, width) divide evenly too, if as many devices are used."""
    with use(replace(current(), coarsest=(height, width))):
        yield


class Constraints:
    """The shardings of arrays that a program constrains while it is traced."""

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[jax.Array, PartitionSpec]] = {}  # by identity, which lasts: they are held

    def add(self, x: jax.Array, spec: PartitionSpec) -> None:
        self._arrays[id(x)] = x, spec

    def spec_of(self, x: Any) -> PartitionSpec | None:
        """Return the sharding of a constrained array; None for one that is left to the compiler."""
        return self._arrays[id(x)][1] if id(x) in self._arrays else None


@contextmanager
def collect_constraints() -> Iterator[Constraints]:
    """Collect the shardings that are constrained in the `with` block."""
    token = _constraints.set(constraints := Constraints())
    try:
        yield constraints
    finally:
        _constraints.reset(token)


def constrain_to(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Constrain x to a sharding on the mesh in use; on one device return it unchanged."""
    partitioner = current()
    if not partitioner.single_device:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(partitioner.mesh, spec))
        if (constraints := _constraints.get()) is not None:
            constraints.add(x, spec)
    return x


def constrain(x: jax.Array, axes: Axes) -> jax.Array:
    """Constrain x to a sharding by the logical names of its axes."""
    return constrain_to(x, current().activation(axes, x.shape))


def num_shards(axes: Axes, shape: Sequence[int]) -> int:
    """Return the number of shards of an activation of this shape."""
    partitioner = current()
    return prod(partitioner.size(taken) for taken in partitioner.activation(axes, shape))


def shard_tokens(x: jax.Array, axes: Axes) -> jax.Array:
    """Zero-pad tokens at the end of the axis `length`, so that every device holds the same number, and shard them.

    Attention needs the number of real tokens as its `keys`.
    """
    partitioner = current()
    axis, devices = list(axes).index("length"), partitioner.size(("sp", "tp"))
    many = x.shape[axis] >= TILE**2 * devices  # then padding to whole tiles adds a sixteenth at most
    joined = partitioner.size("tp") > 1  # by an all-to-all; what goes round a ring is not
    return constrain(pad_to(x, axis, TILE * devices if many and joined else devices), axes)


def replicate(tree: Any) -> Any:
    """Return the arrays of a tree, replicated on every device."""
    return jax.tree.map(lambda x: constrain_to(x, PartitionSpec()), tree)


def gather_weight(weight: jax.Array) -> jax.Array:
    """Gather a weight for use on every device, if the rules say so."""
    return replicate(weight) if current().rules.gathered else weight


def pad_to(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Pad an axis of x with zeros at its end, up to a multiple."""
    fill = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, fill if i == axis else 0) for i in range(x.ndim)]) if fill else x


_substitutes: list[Any] = []


@contextmanager
def substitute_devices(devices: Sequence[Any]) -> Iterator[None]:
    """Within the block, compile for these described devices in place of the real ones."""
    _substitutes[:] = devices
    try:
        yield
    finally:
        _substitutes.clear()


def local_devices() -> list[Any]:
    """Return the devices of this process, or all their substitutes."""
    return list(_substitutes) or jax.local_devices()


def all_devices() -> list[Any]:
    """Return the devices of all processes, or their substitutes."""
    return list(_substitutes) or jax.devices()


def platform() -> str:
    """Return the platform of the devices, such as "cpu".

    Raises:
        WanjaxError: JAX has no device of the platform in JAX_PLATFORMS.
    """
    if _substitutes:
        return _substitutes[0].platform
    try:
        return jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # without a plugin for NVIDIA's cards JAX raises the second
        platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
        cause = " ".join(str(error).partition(" (set JAX_PLATFORMS")[0].split()).rstrip(".")
        reason = cause or f"there is no device of {platforms}, or no plugin for it"
        if "tpu" in str(platforms).split(",") and find_spec("libtpu") is None:
            reason = "libtpu is missing, which wanjax[tpu] brings"
        raise WanjaxError(
            f"JAX cannot use JAX_PLATFORMS={platforms} here ({reason}): without JAX_PLATFORMS it takes what there is"
        ) from error


def make_mesh(dp: int = 1, sp: int = 1, tp: int = 1, *, devices: Sequence[Any] | None = None) -> Mesh:
    """Make a mesh of devices, whose last axes connect neighbouring chips.

    Args:
        dp: The size of the axis for batches, and for the two prompts of guidance.
        sp: The size of the axis for the sequence.
        tp: The size of the axis for heads, and for the other sharded axes of weights.
        devices: The devices to use; None is all of JAX's.

    Returns:
        The mesh, for `wanjax.load(..., mesh=...)`.

    Raises:
        WanjaxError: The product of the axes is not the number of devices, or JAX finds no devices.
    """
    for axis, size in zip(MESH_AXES, (dp, sp, tp), strict=True):
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise WanjaxError(f"{axis} is {repr_short(size)}: give a whole number, as in make_mesh(dp=2, tp=4)")
    if devices is None:
        platform()  # raises for a mistake in JAX_PLATFORMS, in one sentence
        devices = all_devices()
    sizes: dict[str, int] = dict(zip(MESH_AXES, (dp, sp, tp), strict=True))
    if dp < 1 or sp < 1 or tp < 1:
        raise WanjaxError(f"the mesh {mesh_text(sizes)} has an axis below 1: every axis must be at least 1")
    if dp * sp * tp != len(devices):
        raise WanjaxError(
            f"the mesh {mesh_text(sizes)} needs {quantity(dp * sp * tp, 'device')} of {len(devices)} that there are: "
            f"dp · sp · tp must be {len(devices)}"
        )
    return arrange(devices, sizes)


def arrange(devices: Sequence[Any], axes: Mapping[str, int]) -> Mesh:
    """Make a mesh whose last axes connect neighbouring chips, as far as the links allow."""
    sizes = tuple(axes.values())
    # on 4 × 4 chips an axis of 8 takes half of one physical axis, which JAX splits only on request
    placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(placed, tuple(axes), axis_types=(AxisType.Auto,) * len(sizes))


def one_device() -> Partitioner:
    """Return the partitioner of JAX's first device."""
    platform()
    return Partitioner(make_mesh(devices=jax.local_devices()[:1]), RULES["fsdp"])


def find_rules(name: str) -> Rules:
    """Return the rules of this name; raise WanjaxError for an unknown name."""
    if name not in RULES:
        raise WanjaxError(f"no rules are named {name!r}: there are {', '.join(RULES)}")
    return RULES[name]
