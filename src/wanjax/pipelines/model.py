# SPDX-License-Identifier: Apache-2.0
"""A loaded model: its components, shapes, default settings and devices."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import jax
from flax import nnx

from wanjax.dims import readable
from wanjax.kernels.compiler_options import SAFE
from wanjax.layers.tiling import Tiling
from wanjax.pipelines.components import Components
from wanjax.pipelines.keywords import right_name
from wanjax.pipelines.record import devices_of, record
from wanjax.pipelines.settings import Settings
from wanjax.programs import EXECUTE, Program, Site, Strategy
from wanjax.schedulers import Scheduler, name_of, successor
from wanjax.sharding import Partitioner, one_device

SomeModel = TypeVar("SomeModel", bound="Model")


@readable
class Model:
    """A model: components, which are loaded at first use, the shapes of its networks, and its default settings.

    Components (`text_encoder`, `transformer`, `vae`, `tokenizer` ...) are attributes. Each can be used alone. `free`
    releases their memory. `progress` says whether stages are shown on stderr while they run: True, False, or None for
    on a terminal and in a notebook. `strategy` is what is done with the model's programs.
    """

    def __init__(
        self,
        components: Components,
        architecture: Any,
        defaults: Settings,
        partitioner: Partitioner | None = None,
        compiler: str = SAFE,
    ):
        """Takes the components, the shapes, default settings, and how programs are compiled.

        `partitioner` is a mesh and its rules; None is JAX's first device. `compiler` names a set of compiler options.
        """
        self.components = components
        self.architecture = architecture
        self.defaults = defaults
        self.partitioner = one_device() if partitioner is None else partitioner
        self.compiler = compiler
        self.progress: bool | None = None
        self.strategy: Strategy = EXECUTE

    def __init_subclass__(cls) -> None:
        """Makes the help of a family's pipeline readable."""
        readable(cls)

    @property
    def tokenizer(self) -> Any:
        return self.components.get("tokenizer")

    @property
    def text_encoder(self) -> Any:
        return self.components.get("text_encoder")

    @property
    def transformer(self) -> Any:
        return self.components.get("transformer")

    @property
    def vae(self) -> Any:
        return self.components.get("vae")

    @property
    def scheduler(self) -> Scheduler:
        return self.architecture.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: str | Scheduler) -> None:
        """Sets another scheduler, by name or as a value; raises WanjaxError where it does not fit the model."""
        self.architecture = replace(self.architecture, scheduler=successor(scheduler, self.scheduler))

    def free(self, *names: str) -> None:
        """Drops the named components, or all, until their next use."""
        self.components.free(*names)

    def record(
        self,
        settings: Settings,
        sources: Mapping[str, Any],
        *,
        tiling: Tiling | None = None,
        batch_guidance: bool = False,
    ) -> dict[str, Any]:
        """Returns everything that shapes a video, as JSON; `sources` are its pictures, clips and noise by name."""
        return record(
            settings,
            sources,
            loaded=self.components.options,
            scheduler=self.scheduler,
            partitioner=self.partitioner,
            tiling=tiling and tiling.completed(self.architecture.vae.tiling),
            batch_guidance=batch_guidance,
        )

    def call(self, program: Program, static: Any, *arguments: Any) -> Any:
        """Calls a program on the model's devices, and returns its results; `static` is hashable."""
        return self.strategy.call(program, Site(self.partitioner, self.compiler), static, *arguments)

    def under(self: SomeModel, strategy: Strategy, components: Components | None = None) -> SomeModel:
        """Returns the model with another strategy, and with other components if given; the rest is shared."""
        model = copy.copy(self)
        model.strategy, model.components = strategy, components or self.components
        return model

    if not TYPE_CHECKING:  # an editor is to see that an attribute is missing

        def __getattr__(self, name: str) -> Any:
            """Raises AttributeError, which tells what is right for names of other libraries."""
            if sentence := right_name(name):
                raise AttributeError(sentence)
            return object.__getattribute__(self, name)  # raises the error for which Python came here

    def __repr__(self) -> str:
        mesh = "" if self.partitioner.alone else f" ({self.partitioner}, rules {self.partitioner.rules_name})"
        what = f"{self.defaults.model}, {self.architecture.purpose}, {self.defaults.dtype}"
        lines = [f"{type(self).__name__}: {what}, on {devices_of(self.partitioner)}{mesh}"]
        lines += [f"  {name}: {self._state_of(name)}" for name in self.components.names]
        return "\n".join([*lines, f"  scheduler: {name_of(self.scheduler)}"])

    def _state_of(self, name: str) -> str:
        """Returns whether a component is loaded, and a network's bytes on all devices together."""
        if not self.components.has(name):
            return "not loaded"
        component = self.components.get(name)
        if not isinstance(component, nnx.Module):
            return "loaded"
        weights = jax.tree.leaves(nnx.state(component))
        dtypes = " and ".join(sorted({str(weight.dtype) for weight in weights}))
        return f"loaded, {sum(weight.nbytes for weight in weights) / 1e6:,.1f} MB in {dtypes}"
