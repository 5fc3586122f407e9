# SPDX-License-Identifier: Apache-2.0
"""The runtime: the loaded networks, the devices, and the strategy that runs programs."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flax import nnx

from wanjax.execution import EXECUTE, CompileContext, Program, Strategy
from wanjax.kernels.compiler_options import SAFE_SET
from wanjax.pipelines.components import Components
from wanjax.sharding import Partitioner


class SplitNetwork(NamedTuple):
    """A network as two arguments of a program.

    Args:
        graphdef: The definition of the network, a static value.
        weights: The arrays of the network.
    """

    graphdef: nnx.GraphDef[Any]
    weights: nnx.State[Any, Any]


@dataclass(frozen=True)
class Runtime:
    """Everything that a model's methods need to run programs. Models receive a runtime instead of a pipeline.

    Args:
        components: The networks and tokenizers, each loaded at first use.
        partitioner: The mesh and its sharding rules.
        compiler: The name of a set of compiler options.
        strategy: Executes programs, traces them, or inlines them into the caller's program.
    """

    components: Components
    partitioner: Partitioner
    compiler: str = SAFE_SET
    strategy: Strategy = EXECUTE

    def call(self, program: Program, static: Hashable, *arguments: object) -> Any:
        """Call a program on the devices, and return its results.

        Args:
            program: The program.
            static: A hashable value that the program is compiled for.
            arguments: Trees of arrays.
        """
        return self.strategy.call(program, CompileContext(self.partitioner, self.compiler), static, *arguments)

    def split(self, name: str) -> SplitNetwork:
        """Split a network into its definition and its weights; load it first if necessary.

        Args:
            name: The name of the component.
        """
        return SplitNetwork(*nnx.split(self.components.get(name)))

    def with_strategy(self, strategy: Strategy, components: Components | None = None) -> "Runtime":
        """Return a copy with another strategy.

        Args:
            strategy: Executes, traces or inlines programs.
            components: Other components; None keeps the components of this runtime.
        """
        return replace(self, strategy=strategy, components=components or self.components)
