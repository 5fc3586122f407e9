# SPDX-License-Identifier: Apache-2.0
"""Many devices: their mesh, the rules that say what of an array lies on which axis of it, and what models ask of both.

A mesh has three axes: `dp` for the two prompts of guidance and for batches, `sp` for the sequence, `tp` for the heads
and for what else of a weight is split. Models name the axes of weights and activations after what they are (`heads`,
`mlp`, `length` ...); rules map those names to axes of the mesh. Two sets of rules are offered:

- `fsdp`: a weight is stored in parts and gathered where it is used; activations are split by their tokens. Attention
  alone needs other chips' tokens.
- `tp`: weights stay where they are, by columns and then by rows (Shoeybi et al., Megatron-LM, 2019); between the two
  activations are split by heads or by the width inside the MLP, elsewhere by tokens (Korthikanti et al., 2022).

Outside `use(layout)` everything here is a no-op, and there is one device.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import product
from math import prod
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from wanjax.errors import WanjaxError

MESH_AXES = ("dp", "sp", "tp")
TOKENS_PER_DEVICE = 32  # fewer tokens than this on a device are not worth the communication
TILE = 16  # rows of a tile of bfloat16 on a TPU: parts of whole tiles are joined without a copy
Axes = Sequence[str | None]


@dataclass(frozen=True)
class Rules:
    """The mesh axes that logical axes may take, those that come first choosing first; no mesh axis is taken twice.

    `gathered`: weights are made whole where they are used.
    """

    weights: Mapping[str, tuple[str, ...]]
    activations: Mapping[str, tuple[str, ...]]
    gathered: bool

    def __hash__(self) -> int:
        return hash((tuple(self.weights.items()), tuple(self.activations.items()), self.gathered))


_SPACE = {"width": MESH_AXES, "height": MESH_AXES}  # an autoencoder's frames are split over all devices
RULES: Mapping[str, Rules] = MappingProxyType(
    {
        "fsdp": Rules(
            weights={"heads": ("sp", "tp"), "mlp": ("sp", "tp"), "vocab": ("sp", "tp")},
            activations={"batch": ("dp",), "length": ("sp", "tp"), **_SPACE},
            gathered=True,
        ),
        "tp": Rules(
            weights={"heads": ("tp",), "mlp": ("tp",), "vocab": ("tp",)},
            activations={"batch": ("dp",), "heads": ("tp",), "mlp": ("tp",), "length": ("sp", "tp"), **_SPACE},
            gathered=False,
        ),
    }
)


@dataclass(frozen=True)
class Layout:
    """A mesh and the rules by which arrays lie on it."""

    mesh: Mesh
    rules: Rules

    def size(self, axes: str | tuple[str, ...] | None) -> int:
        """How many devices lie along an axis of the mesh, or along several together."""
        return prod(self.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))

    def activation(self, axes: Axes, shape: Sequence[int]) -> PartitionSpec:
        """Where an activation of this shape lies, by the logical names of its axes."""
        return self._spec(self.rules.activations, axes, shape)

    def weight(self, axes: Axes, shape: Sequence[int]) -> NamedSharding:
        """Where a weight is stored. What is gathered for use is stored whole if it is a mere vector."""
        vector = sum(axis != "layers" for axis in axes) < 2
        rules = {} if vector and self.rules.gathered else self.rules.weights
        return NamedSharding(self.mesh, self._spec(rules, axes, shape))

    def _spec(self, rules: Mapping[str, tuple[str, ...]], axes: Axes, shape: Sequence[int]) -> PartitionSpec:
        """Of all ways to split the array evenly one over the most devices, and of these what the rules name first."""
        mesh_axes = [axis for axis in MESH_AXES if self.size(axis) > 1]
        order = [axes.index(name) for name in rules if name in axes]
        ways = [[dim for dim in order if axis in rules[axes[dim] or ""]] + [None] for axis in mesh_axes]

        def split(way: Sequence[int | None]) -> list[tuple[str, ...]]:
            return [tuple(a for a, at in zip(mesh_axes, way, strict=True) if at == dim) for dim in range(len(shape))]

        def devices(way: Sequence[int | None]) -> int:
            sizes = [self.size(taken) for taken in split(way)]
            return prod(sizes) if all(n % size == 0 for n, size in zip(shape, sizes, strict=True)) else 0

        return PartitionSpec(*(taken or None for taken in split(max(product(*ways), key=devices))))


_current: ContextVar[Layout | None] = ContextVar("layout", default=None)


def current() -> Layout | None:
    """The layout in use, None where there is one device."""
    return _current.get()


@contextmanager
def use(layout: Layout | None) -> Iterator[None]:
    """Arrays lie by this layout within; what `jax.jit` traces inside must not be shared with another layout."""
    token = _current.set(layout)
    try:
        yield
    finally:
        _current.reset(token)


def constrain(x: jax.Array, axes: Axes) -> jax.Array:
    """x, laid out by the logical names of its axes."""
    layout = current()
    if layout is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, layout.activation(axes, x.shape)))


def spread(x: jax.Array, axes: Axes) -> jax.Array:
    """x with zeros behind its `length`, so that each device gets as many tokens, and laid out.

    Attention has to be told how many tokens are real.
    """
    layout = current()
    if layout is None:
        return x
    axis, devices = list(axes).index("length"), layout.size(("sp", "tp"))
    many = x.shape[axis] >= TILE**2 * devices  # what is made up is a sixteenth at most
    return constrain(pad_to(x, axis, TILE * devices if many else devices), axes)


def replicate(tree: Any) -> Any:
    """The arrays in `tree`, whole on every device."""
    layout = current()
    if layout is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(layout.mesh, PartitionSpec()))


def whole(weight: jax.Array) -> jax.Array:
    """A weight as it is used: whole on each device under rules that gather them."""
    layout = current()
    return replicate(weight) if layout is not None and layout.rules.gathered else weight


def pad_to(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """x with zeros at the end of an axis, up to a multiple."""
    fill = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, fill if i == axis else 0) for i in range(x.ndim)]) if fill else x


def make_mesh(dp: int = 1, sp: int = 1, tp: int = 1, *, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of all `devices` (None: all there are), neighbours on its last axes being neighbours on the chips' links.

    Raises WanjaxError unless the product of the axes is the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes: dict[str, int] = dict(zip(MESH_AXES, (dp, sp, tp), strict=True))
    told = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    if min(sizes.values()) < 1:
        raise WanjaxError(f"the mesh {told} has an axis below 1: each is at least 1")
    if dp * sp * tp != len(devices):
        raise WanjaxError(
            f"the mesh {told} is for {dp * sp * tp} devices where there are {len(devices)}: "
            f"dp · sp · tp has to be {len(devices)}"
        )
    return arrange(devices, sizes)


def arrange(devices: Sequence[Any], axes: Mapping[str, int]) -> Mesh:
    """A mesh in which neighbours on the last axes are neighbours on the chips' links, as far as those allow."""
    sizes = tuple(axes.values())
    # on 4 × 4 chips an axis of 8 takes half of one of the links' directions, which is split only on request
    placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(placed, tuple(axes), axis_types=(AxisType.Auto,) * len(sizes))


def choose_axes(devices: int, *, heads: int, tokens: int, guided: bool = True) -> tuple[int, int, int]:
    """The dp, sp and tp that suit a transformer: guidance on dp, heads on tp as far as they go evenly, sp for the rest.

    Attention by heads sends less than by sequence, and no head is made up. Their product is less than `devices` where
    there are too few tokens for all.
    """
    dp = 2 if guided and devices % 2 == 0 else 1
    most = max(1, min(devices // dp, tokens // TOKENS_PER_DEVICE))
    parts = max(n for n in range(1, most + 1) if devices // dp % n == 0)
    tp = max(n for n in range(1, parts + 1) if parts % n == 0 and heads % n == 0)
    return dp, parts // tp, tp


def parse_mesh(text: str) -> tuple[int, int, int]:
    """The sizes of dp, sp and tp in text such as `dp=2,tp=4`, 1 where left out; raises WanjaxError for other text."""
    given: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in MESH_AXES or name in given or not (size.isascii() and size.isdigit()):
            raise WanjaxError(f"the mesh {text!r} is not such as dp=2,sp=1,tp=4, nor auto")
        given[name] = int(size)
    return given.get("dp", 1), given.get("sp", 1), given.get("tp", 1)


def find_rules(name: str) -> Rules:
    """The rules of that name; raises WanjaxError where there are none."""
    if name not in RULES:
        raise WanjaxError(f"no rules are named {name!r}: there are {' and '.join(RULES)}")
    return RULES[name]
