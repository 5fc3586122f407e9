# SPDX-License-Identifier: Apache-2.0
"""Kinds of networks: the reader of their config.json, the module that it describes, and the rules that fill it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from wanjax.checkpoints.dequantized import EIGHT_BITS
from wanjax.checkpoints.files import Spec
from wanjax.checkpoints.modules import Exported, parameters
from wanjax.checkpoints.sources import Source
from wanjax.converters.configs import read_config
from wanjax.converters.name_map import NameMap
from wanjax.converters.weight_rules import Rule
from wanjax.errors import WanjaxError, repr_short
from wanjax.layers.placement import as_shapes

QUANTISERS = ("bitsandbytes", "compressed-tensors", "fp8", "modelopt", "quanto", "torchao")
"""Those of whose formats some are read, as the names of tensors tell."""
Config = Any  # a frozen dataclass, of a type of its own for each module


@dataclass(frozen=True, eq=False)  # equal only to itself
class NetworkKind:
    """One kind of network: its class names in model_index.json, and the functions that read, build and fill it.

    `read` turns a config.json into a config; `modules` maps the config's type to the module's class; `rules` fill the
    module from the published names. A `float32` kind keeps its weights in float32, whatever the dtype of the others.
    `unused` returns patterns of published names that the module does not use. `lora_names` pairs the authors' names of
    its layers, which LoRA files may use, with those of diffusers.
    """

    classes: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Config]
    modules: Mapping[type, type[Any]]
    rules: Callable[[Config], list[Rule]]
    float32: bool = False
    unused: Callable[[Config], Sequence[str]] = lambda config: ()
    lora_names: NameMap | None = None


Kinds = Sequence[NetworkKind]


class Network(NamedTuple):
    """A network: its config and its kind."""

    config: Config
    kind: NetworkKind

    @property
    def rules(self) -> list[Rule]:
        return self.kind.rules(self.config)

    @property
    def unused(self) -> Sequence[str]:
        return self.kind.unused(self.config)

    @property
    def float32(self) -> bool:
        return self.kind.float32

    def abstract(self, *, dtype: DTypeLike, param_dtype: DTypeLike, **options: Any) -> Any:
        """Return the module as shapes and dtypes without values, which is not to be changed: it is made once.

        The options are its class's own, except `rngs`.
        """
        dtypes = {"dtype": jnp.dtype(dtype), "param_dtype": jnp.dtype(param_dtype)}
        return _abstract(self.kind.modules[type(self.config)], self.config, **dtypes, **options)

    @property
    def specs(self) -> dict[str, Spec]:
        """The shapes of the tensors, in float32, by their names in diffusers."""
        return Exported(parameters(self.abstract(dtype=jnp.float32, param_dtype=jnp.float32)), self.rules).specs

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        module = self.abstract(dtype=jnp.float32, param_dtype=jnp.float32)
        return sum(x.size for x in jax.tree.leaves(nnx.state(module)))


@lru_cache(maxsize=64)
def _abstract(module: type[Any], config: Config, **options: Any) -> Any:
    try:
        return as_shapes(lambda rngs: module(config, **options, rngs=rngs))
    except WanjaxError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        why = f"{module.__name__} cannot be made of these sizes, {str(error).partition(chr(10))[0]}"
        raise WanjaxError(f"{why}: use those of a published config.json") from error


def network_of(config: Config, kinds: Kinds) -> Network:
    """Return the network that a config of one of these kinds describes."""
    return Network(config, next(kind for kind in kinds if type(config) in kind.modules))


def network(source: Source, component: str, kinds: Kinds) -> Network:
    """Return the network of a checkpoint's component.

    Raises WanjaxError where the component is missing, its class is unknown, or its config is that of another model.
    """
    listed, classes = source[component], [name for kind in kinds for name in kind.classes]
    if listed.kind not in classes:
        right = ", ".join(classes)
        raise WanjaxError(f"the {component} of {source.name} is a {listed.kind}, where {right} can be read")
    file, json = f"the {component}'s config.json", listed.config()
    quantised = json.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
    if method not in (None, *QUANTISERS):
        raise WanjaxError(f"{file} tells weights quantised by {repr_short(method)}, which are not read: {EIGHT_BITS}")
    return read_network(listed.kind, json, kinds, file)


def read_network(name: str, json: Mapping[str, Any], kinds: Kinds, file: str = "config.json") -> Network:
    """Return the network that a config.json describes, for a class name of one of the kinds.

    Raises WanjaxError, with the name of the file, for an entry that no network has.
    """
    kind = next(kind for kind in kinds if name in kind.classes)
    return Network(read_config(file, json, kind.read), kind)
