# SPDX-License-Identifier: Apache-2.0
"""Kinds of networks: how to read their config.json, build their module, and fill it with weights."""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from wanjax.checkpoints.dequantized import QUANTIZATION_ADVICE
from wanjax.checkpoints.files import Spec
from wanjax.checkpoints.modules import ExportedTensors, parameters
from wanjax.checkpoints.sources import Source
from wanjax.converters.configs import read_config
from wanjax.converters.name_map import NameMap
from wanjax.converters.weight_rules import WeightRule
from wanjax.errors import WanjaxError, repr_short
from wanjax.layers.linear import Linear
from wanjax.layers.placement import as_shapes
from wanjax.layers.precision import UNQUANTIZED, Precision
from wanjax.layers.quantized import quantize_layers, quantized_layers

QUANTIZERS = ("bitsandbytes", "compressed-tensors", "fp8", "modelopt", "quanto", "torchao")
"""Quantizers of which at least one format is supported. The names of the tensors show which format a file has."""
Config = Any  # a frozen dataclass; each class of modules has its own class of configs


@dataclass(frozen=True, eq=False)  # compared by identity
class NetworkKind:
    """A kind of network: how to read its config, build its module and fill it with weights.

    Args:
        classes: Names that this kind of network has in model_index.json.
        read: Reads a config from a config.json.
        modules: The class of the module for each class of config.
        rules: Returns the rules that fill the module from tensors with published names.
        float32: Whether the network's weights stay in float32.
        unused: Returns patterns of published names that the module does not use.
        lora_names: Pairs the authors' names of layers with diffusers' names. LoRA files may use the authors' names.
        full_precision: Descriptions of the projections that are never quantized, by patterns with `*` for their paths.
            None     if networks of this kind are never quantized.
    """

    classes: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Config]
    modules: Mapping[type, type[Any]]
    rules: Callable[[Config], list[WeightRule]]
    float32: bool = False
    unused: Callable[[Config], Sequence[str]] = lambda config: ()
    lora_names: NameMap | None = None
    full_precision: Mapping[str, str] | None = None


Kinds = Sequence[NetworkKind]


class Network(NamedTuple):
    """A network: its config and its kind."""

    config: Config
    kind: NetworkKind

    @property
    def rules(self) -> list[WeightRule]:
        return self.kind.rules(self.config)

    @property
    def unused(self) -> Sequence[str]:
        return self.kind.unused(self.config)

    @property
    def float32(self) -> bool:
        return self.kind.float32

    def abstract(
        self, *, dtype: DTypeLike, param_dtype: DTypeLike, precision: Precision = UNQUANTIZED, **options: Any
    ) -> Any:
        """Return the abstract module. Do not change the module, because it is cached.

        `options` are arguments of the module's class, other than `rngs`.
        """
        dtypes = {"dtype": jnp.dtype(dtype), "param_dtype": jnp.dtype(param_dtype)}
        module, table = self.kind.modules[type(self.config)], self.kind.full_precision
        layers = None if table is None or not precision.quantizes else tuple(table)
        return _abstract(module, self.config, precision, layers, **dtypes, **options)

    @property
    def specs(self) -> dict[str, Spec]:
        """The shapes of the tensors by diffusers' names, with the dtype float32."""
        return ExportedTensors(parameters(self.abstract(dtype=jnp.float32, param_dtype=jnp.float32)), self.rules).specs

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        module = self.abstract(dtype=jnp.float32, param_dtype=jnp.float32)
        return sum(x.size for x in jax.tree.leaves(nnx.state(module)))

    @property
    def unquantized_projections(self) -> list[str] | None:
        """Descriptions of the projections that are never quantized; None if the whole network is never quantized."""
        if (table := self.kind.full_precision) is None:
            return None
        modules = nnx.iter_modules(self.abstract(dtype=jnp.float32, param_dtype=jnp.float32))
        paths = [".".join(map(str, path)) for path, layer in modules if isinstance(layer, Linear)]
        return [description for pattern, description in table.items() if fnmatch.filter(paths, pattern)]

    def weight_bytes(self, param_dtype: DTypeLike, precision: Precision = UNQUANTIZED) -> int:
        """Return the bytes of the network's weights. A weight of 8 bits takes one byte, and its scale four bytes."""
        float_bytes = 4 if self.float32 else jnp.dtype(param_dtype).itemsize
        module = self.abstract(dtype=jnp.float32, param_dtype=jnp.float32, precision=precision)
        layers = [(x.values.get_value().size, x.scale.get_value().size) for x in quantized_layers(module).values()]
        values, scales = map(sum, zip(*layers, strict=True)) if layers else (0, 0)
        return float_bytes * (self.parameters - values) + values + 4 * scales


@lru_cache(maxsize=64)
def _abstract(
    module: type[Any], config: Config, precision: Precision, full_precision: tuple[str, ...] | None, **options: Any
) -> Any:
    try:
        network = as_shapes(lambda rngs: module(config, **options, rngs=rngs))
        return network if full_precision is None else quantize_layers(network, precision, full_precision)
    except WanjaxError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        problem = f"{module.__name__} cannot be built with these sizes ({str(error).partition(chr(10))[0]})"
        raise WanjaxError(f"{problem}: use the sizes of a published config.json") from error


def network_of(config: Config, kinds: Kinds) -> Network:
    """Return the network that has a config, with its kind from these kinds."""
    return Network(config, next(kind for kind in kinds if type(config) in kind.modules))


def network(source: Source, component: str, kinds: Kinds) -> Network:
    """Return the network of a checkpoint's component.

    Raises WanjaxError if the component is missing, its class is unknown, or its config is not supported.
    """
    entry, classes = source[component], [name for kind in kinds for name in kind.classes]
    if entry.kind not in classes:
        supported = ", ".join(classes)
        raise WanjaxError(
            f"the {component} of {source.name} is a {entry.kind}, which is not supported: give one of {supported}"
        )
    file, json = f"the {component}'s config.json", entry.config()
    quantization_config = json.get("quantization_config")
    method = quantization_config.get("quant_method") if isinstance(quantization_config, Mapping) else None
    if method not in (None, *QUANTIZERS):
        raise WanjaxError(
            f"{file} has weights quantized by {repr_short(method)}, which is not supported: {QUANTIZATION_ADVICE}"
        )
    return read_network(entry.kind, json, kinds, file)


def read_network(name: str, json: Mapping[str, Any], kinds: Kinds, file: str = "config.json") -> Network:
    """Read the network of a config.json; `name` is the name of its class in model_index.json.

    Raises WanjaxError for an invalid entry. The message has the name of the file.
    """
    kind = next(kind for kind in kinds if name in kind.classes)
    return Network(read_config(file, json, kind.read), kind)
