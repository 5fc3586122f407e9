# SPDX-License-Identifier: Apache-2.0
"""LoRA in training: a low-rank projection beside each chosen one of a network, whose own weights do not change.

y = W x + alpha / rank · B A dropout(x) (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2106.09685). A
begins as PEFT begins it, uniform within 1 / sqrt(in), and B with zeros, so that the first step starts at the network.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from wanjax.checkpoints.modules import Exported, parameters
from wanjax.converters.weight_rules import Rule
from wanjax.errors import WanjaxError
from wanjax.layers.linear import Linear, linear
from wanjax.layers.placement import axes_of
from wanjax.layers.stack import stack
from wanjax.sharding import Partitioner

Network = TypeVar("Network", bound=nnx.Module)
FACTORS = ("lora_down", "lora_up")
CHANGE = "diff"
FULL_RANK = "proj_l"  # the end of the name of the projection of linear attention's results, which is learned whole
OPT_IN_ENDINGS = (
    "mod",
    FULL_RANK,
)  # ends of names of projections that are adapted where they are named; `mod`: of the timestep


@dataclass(frozen=True)
class LoraConfig:
    """The rank of the factors, alpha (None is the rank), dropout's rate, and the adapted layers by name.

    A target is the end of a layer's name in diffusers, such as `to_q` or `attn1.to_q`. Without targets all projections
    of the blocks are adapted but those of the timestep. That of linear attention, which is small and may begin with
    zeros, is learned whole unless it is a target.
    """

    rank: int = 32
    alpha: float | None = None
    dropout: float = 0.0
    targets: tuple[str, ...] = ()

    def __post_init__(self):
        if self.rank < 1:
            raise WanjaxError(f"the LoRA's rank is {self.rank}: give 1 or more, 16 to 64 is usual")
        if not 0 <= self.dropout < 1:
            raise WanjaxError(f"the LoRA's dropout is {self.dropout}: give a number from 0 to below 1")
        if self.alpha is not None and not 0 < self.alpha < float("inf"):
            raise WanjaxError(f"the LoRA's alpha is {self.alpha}: give a number above 0, such as the rank")

    @property
    def scale(self) -> float:
        return (self.rank if self.alpha is None else self.alpha) / self.rank


class DropoutKey(nnx.Variable):
    """The data of the random key by which an adapted projection drops its inputs, which each step replaces."""


class LoraLinear(nnx.Module):
    """A projection with a low-rank one beside it. `dropout_key` is None without dropout.

    Where its weights are read in place of a call, `kernel` has the product of the factors in it, and none is dropped.
    """

    def __init__(self, base: Linear, config: LoraConfig, rngs: nnx.Rngs):
        self.base, self.scale, self.rate = base, config.scale, config.dropout
        axes = axes_of(base.kernel) or (None,) * base.kernel[...].ndim
        layers = base.kernel.shape[0] if axes[0] == "layers" else None
        (axis_in, axis_out), (width_in, width_out) = axes[-2:], base.kernel.shape[-2:]
        kw: dict[str, Any] = {"bias": False, "dtype": base.dtype, "param_dtype": jnp.float32}

        def make(rngs: nnx.Rngs) -> tuple[Linear, Linear]:
            down = linear(width_in, config.rank, (axis_in, None), kernel_init=_uniform, rngs=rngs, **kw)
            zeros = nnx.initializers.zeros_init()
            return down, linear(config.rank, width_out, (None, axis_out), kernel_init=zeros, rngs=rngs, **kw)

        class Pair(nnx.Module):
            def __init__(self, rngs: nnx.Rngs):
                self.down, self.up = make(rngs)

        pair = Pair(rngs) if layers is None else stack(Pair, layers, rngs)
        self.lora_down, self.lora_up = pair.down, pair.up
        key = jnp.zeros((*([] if layers is None else [layers]), 2), jnp.uint32)
        self.dropout_key = DropoutKey(key) if config.dropout else None

    @property
    def kernel(self) -> Float[Array, "... _E E"]:
        delta = jnp.matmul(self.lora_down.kernel[...], self.lora_up.kernel[...], precision="highest")
        return self.base.kernel[...].astype(jnp.float32) + self.scale * delta

    @property
    def bias(self) -> Any:
        return self.base.bias

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.base(x)
        z = x
        if self.dropout_key is not None:
            key = jax.random.wrap_key_data(self.dropout_key[...], impl="threefry2x32")
            mask = jax.random.bernoulli(key, 1 - self.rate, x.shape)
            z = jnp.where(mask, x / jnp.asarray(1 - self.rate, x.dtype), jnp.zeros((), x.dtype))
        return y + (self.lora_up(self.lora_down(z)) * jnp.asarray(self.scale, y.dtype)).astype(y.dtype)


class DeltaLinear(nnx.Module):
    """A projection and a change of all its weights, which begins with zeros. Its weights are read; it is not called."""

    def __init__(self, base: Any):
        """`base` is a `Linear` with a bias."""
        graphdef, weights = nnx.split(base)
        self.base = base
        self.diff = nnx.merge(graphdef, jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), weights))

    @property
    def kernel(self) -> Float[Array, "... _E E"]:
        return self.base.kernel[...].astype(jnp.float32) + self.diff.kernel[...]

    @property
    def bias(self) -> Float[Array, "... E"]:
        return self.base.bias[...].astype(jnp.float32) + self.diff.bias[...]


def _uniform(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    bound = shape[-2] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def adapt(
    network: Network, rules: Iterable[Rule], config: LoraConfig, seed: int, partitioner: Partitioner | None = None
) -> tuple[Network, dict[str, str]]:
    """Return the network with projections adapted, or learned whole, and their names in diffusers by our own.

    A name of a stack's layer stands for all blocks. The given network is not changed. Raises WanjaxError where no layer
    has the name of a target.
    """
    names = module_names(network, rules)
    adapted = {path: name for path, name in names.items() if _is_chosen(path, name, config.targets)}
    matched = {target for target in config.targets for name in adapted.values() if _ends(name, target)}
    missing = [target for target in config.targets if target not in matched]
    if not adapted or missing:
        missing_text = "layer of blocks" if not config.targets else f"layer named {missing[0]}"
        available = ", ".join(sorted({name.rpartition("{i}.")[2] for name in names.values()}))
        raise WanjaxError(f"the network has no {missing_text} to adapt: there are {available}")
    network = nnx.merge(*nnx.split(network))
    rngs = nnx.Rngs(seed)
    whole = {path: name for path, name in names.items() if path.endswith(FULL_RANK) and path not in adapted}
    for path in sorted(adapted | whole):
        *parents, name = path.split(".")
        parent: Any = network
        for step in parents:
            parent = parent[int(step)] if step.isdigit() else getattr(parent, step)
        base = getattr(parent, name)
        setattr(parent, name, DeltaLinear(base) if path in whole else LoraLinear(base, config, rngs))
    _place(network, partitioner)
    return network, adapted | whole


def without_factors(network: Network) -> Network:
    """Return the network with the projections that `adapt` found in it."""
    network = nnx.merge(*nnx.split(network))
    for _, module in list(nnx.iter_modules(network)):
        for name, projection in list(vars(module).items()):
            if isinstance(projection, LoraLinear | DeltaLinear):
                setattr(module, name, projection.base)
    return network


def _place(network: nnx.Module, partitioner: Partitioner | None) -> None:
    """Put the factors on the devices of the network, if those are here."""
    if partitioner is None:
        return
    for path, weight in nnx.to_flat_state(nnx.state(network)):
        if is_factor(path, weight) or isinstance(weight, DropoutKey):
            value = weight.get_value()
            axes = axes_of(weight) or (None,) * value.ndim
            if not isinstance(value, jax.ShapeDtypeStruct):
                weight.set_value(jax.device_put(value, partitioner.weight(axes, value.shape)))


def is_factor(path: Sequence[Any], weight: Any) -> bool:
    """Return whether a parameter is a factor of a LoRA, or the change of a projection that is learned whole."""
    return len(path) > 1 and path[-2] in (*FACTORS, CHANGE)


def module_names(network: nnx.Module, rules: Iterable[Rule]) -> dict[str, str]:
    """Return the names in diffusers of the projections of a network by ours; `{i}` stands for a block of a stack."""
    linears = {".".join(map(str, path)) for path, node in nnx.iter_modules(network) if isinstance(node, Linear)}
    shapes, rules = parameters(network), list(rules)
    names: dict[str, str] = {}
    for path in sorted(linears):
        kernel = shapes[f"{path}.kernel"]
        first, *_ = Exported({f"{path}.kernel": kernel}, rules).specs
        name = first.removesuffix(".weight")
        if len(kernel.shape) == 3:
            before, _, after = name.partition(".0.")
            name = f"{before}.{{i}}.{after}"
        names[path] = name
    return names


def _is_chosen(path: str, name: str, targets: Sequence[str]) -> bool:
    if targets:
        return any(_ends(name, target) for target in targets)
    return "{i}" in name and not path.endswith(OPT_IN_ENDINGS)


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def redraw_dropout_keys(keys: Any, key: jax.Array) -> Any:
    """Return the keys of dropout, a state of `DropoutKey`, drawn anew for a step."""
    leaves, tree = jax.tree.flatten(keys)
    drawn = [
        jax.random.key_data(jax.random.split(subkey, leaf.shape[:-1]) if leaf.ndim > 1 else subkey)
        for leaf, subkey in zip(leaves, jax.random.split(key, max(1, len(leaves))), strict=False)
    ]
    return jax.tree.unflatten(tree, drawn)


def factors_of(network: nnx.Module, rules: Iterable[Rule], adapted: dict[str, str]) -> dict[str, np.ndarray]:
    """Return the factors by the names of diffusers, `NAME.lora_A.weight` [rank, in] and `NAME.lora_B.weight`.

    Of a projection that is learned whole they are `NAME.diff` [out, in], and `NAME.diff_b` of its bias.
    """
    values, rules = parameters(network), list(rules)
    factors: dict[str, np.ndarray] = {}
    for path in adapted:
        if f"{path}.{CHANGE}.kernel" in values:
            change = {f"{path}.{leaf}": np.asarray(values[f"{path}.{CHANGE}.{leaf}"]) for leaf in ("kernel", "bias")}
            changes, endings = Exported(change, rules), {"weight": "diff", "bias": "diff_b"}
            for key in changes.specs:
                name, _, leaf = key.rpartition(".")
                factors[f"{name}.{endings[leaf]}"] = np.ascontiguousarray(changes.read(key))
            continue
        down, up = (np.asarray(values[f"{path}.{factor}.kernel"]) for factor in FACTORS)
        rows = Exported({f"{path}.kernel": up}, rules)  # B has the order of the weight's rows
        for i, key in enumerate(rows.specs):
            name = key.removesuffix(".weight")
            factors[f"{name}.lora_A.weight"] = np.ascontiguousarray((down[i] if down.ndim == 3 else down).T)
            factors[f"{name}.lora_B.weight"] = np.ascontiguousarray(rows.read(key))
    return factors
