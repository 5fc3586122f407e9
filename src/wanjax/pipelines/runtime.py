# SPDX-License-Identifier: Apache-2.0
"""The runtime: loaded networks, the devices on which programs run, and what is done with a program."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flax import nnx

from wanjax.execution import EXECUTE, Program, Site, Strategy
from wanjax.kernels.compiler_options import SAFE
from wanjax.pipelines.components import Components
from wanjax.sharding import Partitioner


class SplitNetwork(NamedTuple):
    """A network as a program is given it.

    Args:
        graphdef: Its definition, a static value.
        weights: Its arrays.
    """

    graphdef: nnx.GraphDef[Any]
    weights: nnx.State[Any, Any]


@dataclass(frozen=True)
class Runtime:
    """All that a model needs in order to compute. A model is given one, and never a pipeline.

    Args:
        components: The networks and tokenizers, each loaded at first use.
        partitioner: The mesh, and the rules by which arrays are sharded over it.
        compiler: The set of compiler options.
        strategy: Executes programs, traces them, or inlines them into the caller's.
    """

    components: Components
    partitioner: Partitioner
    compiler: str = SAFE
    strategy: Strategy = EXECUTE

    def call(self, program: Program, static: Hashable, *arguments: object) -> Any:
        """Call a program on the devices, and return its results.

        Args:
            program: The program.
            static: A hashable value; a new one compiles anew.
            arguments: Trees of arrays.
        """
        return self.strategy.call(program, Site(self.partitioner, self.compiler), static, *arguments)

    def split(self, name: str) -> SplitNetwork:
        """Return the definition and the weights of a network, which is loaded if it is not.

        Args:
            name: Name of the component.
        """
        return SplitNetwork(*nnx.split(self.components.get(name)))

    def under(self, strategy: Strategy, components: Components | None = None) -> "Runtime":
        """Return the runtime with another strategy, and with other components if given.

        Args:
            strategy: What to do with programs.
            components: The networks; None keeps those of before.
        """
        return replace(self, strategy=strategy, components=components or self.components)
