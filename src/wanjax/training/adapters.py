# SPDX-License-Identifier: Apache-2.0
"""LoRA layers for training. Each adapted projection gets a low-rank projection. The weights of the base stay frozen.

    y = W x + alpha / rank · B A dropout(x)

The formula is that of Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2106.09685. A is initialised
with uniform numbers between -1 / sqrt(in) and 1 / sqrt(in), as in PEFT. B is initialised with zeros, so that training
starts from the base model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from wanjax.checkpoints.modules import ExportedTensors, parameters
from wanjax.converters.weight_rules import WeightRule
from wanjax.errors import WanjaxError
from wanjax.layers.linear import Linear, linear
from wanjax.layers.placement import axes_of
from wanjax.layers.precision import Precision
from wanjax.layers.quantized import QuantizedLinear
from wanjax.layers.stack import stack
from wanjax.sharding import Partitioner
from wanjax.training.settings_check import check_types

Network = TypeVar("Network", bound=nnx.Module)
FACTORS = ("lora_down", "lora_up")
DIFF = "diff"
FULL_RANK = "proj_l"  # the name of linear attention's output projection, which is trained at full rank
# Layers with these names get a LoRA only if they are targets; `mod` projects the timestep
OPT_IN_ENDINGS = ("mod", FULL_RANK)


@dataclass(frozen=True)
class LoraConfig:
    """A LoRA to train.

    Args:
        rank: The rank of the factors.
        alpha: The LoRA's alpha; None sets it to the rank.
        dropout: The probability with which an input of the factors is set to zero in training.
        targets: The layers to adapt. A target is the end of a layer's name in diffusers, such as `to_q` or
            `attn1.to_q`. Without targets, all projections of the blocks are adapted except the projections of the
            timestep. The output projection of linear attention is small and may start as zeros, so it is trained at
            full rank unless it is a target.

    Raises:
        WanjaxError: A value is out of its range.
    """

    rank: int = 32
    alpha: float | None = None
    dropout: float = 0.0
    targets: tuple[str, ...] = ()

    def __post_init__(self):
        check_types(self)
        if self.rank < 1:
            raise WanjaxError(f"the LoRA's rank is {self.rank}: give 1 or more, 16 to 64 is usual")
        if not 0 <= self.dropout < 1:
            raise WanjaxError(f"the LoRA's dropout is {self.dropout}: give a number from 0 to below 1")
        if self.alpha is not None and not 0 < self.alpha < float("inf"):
            raise WanjaxError(f"the LoRA's alpha is {self.alpha}: give a number above 0, such as the rank")

    @property
    def scale(self) -> float:
        return (self.rank if self.alpha is None else self.alpha) / self.rank


def check_trainable_precision(precision: Precision, lora: LoraConfig | None, *, is_stored: bool = False) -> None:
    """Raise WanjaxError unless a model in this precision can be trained.

    If only the frozen weights are quantized, the gradient of a product's inputs is exact. If the inputs are quantized,
    there is no useful gradient: the derivative of the quantization is 0 almost everywhere, and a substitute for it
    would add noise to every layer.

    Args:
        precision: The precision of the model.
        lora: The LoRA to train; None trains all weights.
        is_stored: Whether the checkpoint's weights are stored in this precision, which then cannot be changed.
    """
    if not precision.quantizes:
        return
    weights_only = f"{precision.weights}-weights"
    if lora is None:
        advice = "give the original checkpoint" if is_stored else "give precision none"
        advice = advice if precision.activations is not None else f"train a LoRA, or {advice}"
        raise WanjaxError(f"weights of 8 bits ({precision}) cannot be trained themselves: {advice}")
    if precision.activations is not None:
        advice = (
            f"give the original checkpoint, with precision {weights_only} or none"
            if is_stored
            else f"train with precision {weights_only}, or with none"
        )
        raise WanjaxError(
            f"the precision {precision} quantizes the inputs of matrix products, which then have no gradient: {advice}"
        )


class DropoutKey(nnx.Variable):
    """The data of the random key for dropout in an adapted projection. Each training step replaces this data."""


class LoraLinear(nnx.Module):
    """A projection plus a low-rank projection. The weight of the first projection may be quantized.

    `kernel` is the merged weight, without dropout, for callers that read the weight instead of calling the layer.
    Without dropout, `dropout_key` is None.
    """

    def __init__(self, base: Linear | QuantizedLinear, config: LoraConfig, rngs: nnx.Rngs):
        self.base, self.scale, self.dropout_rate = base, config.scale, config.dropout
        weight = getattr(base, base.weight_name)
        axes = axes_of(weight) or (None,) * weight[...].ndim
        layers = weight.shape[0] if axes[0] == "layers" else None
        (axis_in, axis_out), (width_in, width_out) = axes[-2:], weight.shape[-2:]
        options: dict[str, Any] = {"bias": False, "dtype": base.dtype, "param_dtype": jnp.float32}

        def make_factors(rngs: nnx.Rngs) -> tuple[Linear, Linear]:
            down = linear(width_in, config.rank, (axis_in, None), kernel_init=_uniform, rngs=rngs, **options)
            zeros = nnx.initializers.zeros_init()
            return down, linear(config.rank, width_out, (None, axis_out), kernel_init=zeros, rngs=rngs, **options)

        class FactorPair(nnx.Module):
            def __init__(self, rngs: nnx.Rngs):
                self.down, self.up = make_factors(rngs)

        pair = FactorPair(rngs) if layers is None else stack(FactorPair, layers, rngs)
        self.lora_down, self.lora_up = pair.down, pair.up
        key = jnp.zeros((*([] if layers is None else [layers]), 2), jnp.uint32)
        self.dropout_key = DropoutKey(key) if config.dropout else None

    @property
    def kernel(self) -> Float[Array, "... _E E"]:
        assert isinstance(self.base, Linear)  # a projection whose weight is read directly is not quantized
        delta = jnp.matmul(self.lora_down.kernel[...], self.lora_up.kernel[...], precision="highest")
        return self.base.kernel[...].astype(jnp.float32) + self.scale * delta

    @property
    def bias(self) -> Any:
        return self.base.bias

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.base(x)
        x_dropped = x
        if self.dropout_key is not None:
            key = jax.random.wrap_key_data(self.dropout_key[...], impl="threefry2x32")
            mask = jax.random.bernoulli(key, 1 - self.dropout_rate, x.shape)
            x_dropped = jnp.where(mask, x / jnp.asarray(1 - self.dropout_rate, x.dtype), jnp.zeros((), x.dtype))
        return y + (self.lora_up(self.lora_down(x_dropped)) * jnp.asarray(self.scale, y.dtype)).astype(y.dtype)


class DeltaLinear(nnx.Module):
    """A projection plus a trained change of its weights, which starts at zero.

    Callers do not call this layer, but read `kernel` and `bias`, the changed weights.
    """

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
    network: Network, rules: Iterable[WeightRule], config: LoraConfig, seed: int, partitioner: Partitioner | None = None
) -> tuple[Network, dict[str, str]]:
    """Add LoRA layers to a copy of a network.

    Args:
        network: The network, which is not changed.
        rules: The rules that convert the network's weights to diffusers.
        config: The LoRA.
        seed: Seed of the factors' initial values.
        partitioner: The mesh; None leaves the factors on the default device.

    Returns:
        The copy, and a mapping of the adapted projections' names in wanjax to their names in diffusers. The blocks of a
        stack have one name together.

    Raises:
        WanjaxError: No layer has the name of a target, or the rank is higher than that of any adapted weight.
    """
    names = module_names(network, rules)
    adapted_names = {path: name for path, name in names.items() if _is_adapted(path, name, config.targets)}
    matched_targets = {
        target for target in config.targets for name in adapted_names.values() if _matches_target(name, target)
    }
    missing = [target for target in config.targets if target not in matched_targets]
    if not adapted_names or missing:
        missing_text = "layer of blocks" if not config.targets else f"layer named {missing[0]}"
        available = ", ".join(sorted({name.rpartition("{i}.")[2] for name in names.values()}))
        raise WanjaxError(f"the network has no {missing_text} to adapt: there are {available}")
    network = nnx.merge(*nnx.split(network))
    projections = [_find_module(network, path)[-1] for path in adapted_names]
    widths = [min(getattr(projection, projection.weight_name).shape[-2:]) for projection in projections]
    if config.rank > max(widths):
        raise WanjaxError(
            f"the LoRA's rank is {config.rank}, and no projection has a rank above {max(widths)}: give at most that"
        )
    rngs = nnx.Rngs(seed)
    full_rank = {path: name for path, name in names.items() if path.endswith(FULL_RANK) and path not in adapted_names}
    for path in sorted(adapted_names | full_rank):
        parent, name, base = _find_module(network, path)
        setattr(parent, name, DeltaLinear(base) if path in full_rank else LoraLinear(base, config, rngs))
    _move_factors_to_mesh(network, partitioner)
    return network, adapted_names | full_rank


def _find_module(network: nnx.Module, path: str) -> tuple[Any, str, Any]:
    """Return the parent of a module, the module's name in the parent, and the module, by its path in a network."""
    *parents, name = path.split(".")
    parent: Any = network
    for key in parents:
        parent = parent[int(key)] if key.isdigit() else getattr(parent, key)
    return parent, name, getattr(parent, name)


def remove_adapters(network: Network) -> Network:
    """Return a copy of a network without the layers that `adapt` added."""
    network = nnx.merge(*nnx.split(network))
    for _, module in list(nnx.iter_modules(network)):
        for name, projection in list(vars(module).items()):
            if isinstance(projection, LoraLinear | DeltaLinear):
                setattr(module, name, projection.base)
    return network


def _move_factors_to_mesh(network: nnx.Module, partitioner: Partitioner | None) -> None:
    """Move the factors to the mesh. Abstract factors stay unchanged."""
    if partitioner is None:
        return
    for path, weight in nnx.to_flat_state(nnx.state(network)):
        if is_factor(path, weight) or isinstance(weight, DropoutKey):
            value = weight.get_value()
            axes = axes_of(weight) or (None,) * value.ndim
            if not isinstance(value, jax.ShapeDtypeStruct):
                weight.set_value(jax.device_put(value, partitioner.weight_sharding(axes, value.shape)))


def is_factor(path: Sequence[Any], weight: Any) -> bool:
    """Return whether a parameter is a factor of a LoRA, or the change of a projection that is trained at full rank."""
    return len(path) > 1 and path[-2] in (*FACTORS, DIFF)


def module_names(network: nnx.Module, rules: Iterable[WeightRule]) -> dict[str, str]:
    """Map the names of a network's projections to their names in diffusers, with `{i}` for the index of a block."""
    weight_names = {
        ".".join(map(str, path)): node.weight_name
        for path, node in nnx.iter_modules(network)
        if isinstance(node, Linear | QuantizedLinear)
    }
    shapes, rules = parameters(network), list(rules)
    names: dict[str, str] = {}
    for path, weight_name in sorted(weight_names.items()):
        kernel = shapes[f"{path}.{weight_name}"]
        diffusers_key, *_ = ExportedTensors({f"{path}.kernel": kernel}, rules).specs
        name = diffusers_key.removesuffix(".weight")
        if len(kernel.shape) == 3:
            prefix, _, suffix = name.partition(".0.")
            name = f"{prefix}.{{i}}.{suffix}"
        names[path] = name
    return names


def _is_adapted(path: str, name: str, targets: Sequence[str]) -> bool:
    if targets:
        return any(_matches_target(name, target) for target in targets)
    return "{i}" in name and not path.endswith(OPT_IN_ENDINGS)


def _matches_target(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def redraw_dropout_keys(keys: Any, key: jax.Array) -> Any:
    """Draw new dropout keys for a step. The keys are a state of `DropoutKey` variables."""
    leaves, treedef = jax.tree.flatten(keys)
    key_data = [
        jax.random.key_data(jax.random.split(subkey, leaf.shape[:-1]) if leaf.ndim > 1 else subkey)
        for leaf, subkey in zip(leaves, jax.random.split(key, max(1, len(leaves))), strict=False)
    ]
    return jax.tree.unflatten(treedef, key_data)


def export_factors(
    network: nnx.Module, rules: Iterable[WeightRule], adapted_names: dict[str, str]
) -> dict[str, np.ndarray]:
    """Export the factors with diffusers' names, `NAME.lora_A.weight` [rank, in] and `NAME.lora_B.weight` [out, rank].

    A projection that is trained at full rank has `NAME.diff` [out, in] for its weight and `NAME.diff_b` for its bias.
    """
    values, rules = parameters(network), list(rules)
    factors: dict[str, np.ndarray] = {}
    for path in adapted_names:
        if f"{path}.{DIFF}.kernel" in values:
            diffs = {f"{path}.{suffix}": np.asarray(values[f"{path}.{DIFF}.{suffix}"]) for suffix in ("kernel", "bias")}
            exported, endings = ExportedTensors(diffs, rules), {"weight": "diff", "bias": "diff_b"}
            for key in exported.specs:
                name, _, suffix = key.rpartition(".")
                factors[f"{name}.{endings[suffix]}"] = np.ascontiguousarray(exported.read(key))
            continue
        down, up = (np.asarray(values[f"{path}.{factor}.kernel"]) for factor in FACTORS)
        # the rules for the weight also convert B, because the weight and B have the same rows
        exported_up = ExportedTensors({f"{path}.kernel": up}, rules)
        for i, key in enumerate(exported_up.specs):
            name = key.removesuffix(".weight")
            factors[f"{name}.lora_A.weight"] = np.ascontiguousarray((down[i] if down.ndim == 3 else down).T)
            factors[f"{name}.lora_B.weight"] = np.ascontiguousarray(exported_up.read(key))
    return factors
