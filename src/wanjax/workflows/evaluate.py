# SPDX-License-Identifier: Apache-2.0
"""Follow a workflow from an output back through its links, and describe the outputs of its nodes.

Each type of node has a function that describes its outputs. The function computes only numbers and texts.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard, TypeVar

from wanjax.errors import WanjaxError
from wanjax.workflows.graph import Graph, Node, Output, short_text
from wanjax.workflows.values import File, Unknown

Kind = TypeVar("Kind")
MAX_NUMBER = 2**64


class MediaSize(NamedTuple):
    """The size of a picture or clip, its number of frames, and its frames per second."""

    width: int
    height: int
    frames: int
    fps: float


class Reader:
    """Describes the outputs of nodes. Each node is described once."""

    def __init__(
        self,
        graph: Graph,
        functions: "Mapping[str, Callable[[NodeInputs], Any]]",
        measure: Callable[[File], MediaSize | None],
    ):
        """Create a reader of a graph.

        Args:
            graph: The graph.
            functions: The function for each known type of node.
            measure: Returns the size of a picture or clip, or None if the file is missing.
        """
        self.graph, self.functions, self.measure = graph, functions, measure
        self.problems: list[Unknown] = []
        self._outputs_by_node: dict[str, tuple[Any, ...]] = {}
        self._open_nodes: set[str] = set()

    def output(self, output: Output) -> Any:
        """Describe an output of a node. Return None for an output that does not exist."""
        if output.node in self._open_nodes:
            raise WanjaxError(f"the nodes of the workflow form a circle at {self.graph.nodes[output.node]}: cut a link")
        if output.node not in self._outputs_by_node:
            if (node := self.graph.nodes.get(output.node)) is None:
                raise WanjaxError(
                    f"the workflow has a link to node {short_text(output.node)}, which it lacks: save it again"
                )
            self._open_nodes.add(output.node)
            try:
                self._outputs_by_node[output.node] = self._describe(node)
            finally:
                self._open_nodes.discard(output.node)
        values = self._outputs_by_node[output.node]
        return values[output.slot] if 0 <= output.slot < len(values) else values[0] if len(values) == 1 else None

    def _describe(self, node: Node) -> tuple[Any, ...]:
        function = self.functions.get(node.type)
        value = Unknown(node) if function is None else function(NodeInputs(self, node))
        return value if type(value) is tuple else (value,)

    def require(self, value: Any, kind: type[Kind]) -> Kind | None:
        """Return a value if it is of the class `kind`.

        For the output of an unknown node, record the problem, and return an input of that node that is of this class.
        """
        seen: set[str] = set()
        waiting = [value]
        while waiting:
            value = waiting.pop(0)
            if isinstance(value, kind):
                return value
            if isinstance(value, Unknown) and value.node.id not in seen:
                seen.add(value.node.id)
                if value not in self.problems:
                    self.problems.append(value)
                waiting += [self.output(source) for source in value.node.inputs.values() if isinstance(source, Output)]
        return None


class NodeInputs:
    """The values of a node's inputs. `graph_node` is the node."""

    def __init__(self, reader: Reader, node: Node):
        self.reader, self.graph_node = reader, node

    def __call__(self, name: str, default: Any = None) -> Any:
        """Return the value of an input, or the default if it is missing."""
        value = self.graph_node.inputs.get(name, default)
        return self.reader.output(value) if isinstance(value, Output) else value

    def has(self, name: str) -> bool:
        return self.graph_node.inputs.get(name) is not None

    def require_input(self, name: str, kind: type[Kind]) -> Kind:
        """Return an input of the class `kind`. Raises WanjaxError if no value of this class is linked."""
        if (value := self.reader.require(self(name), kind)) is None:
            raise MissingInput(self.graph_node, name)
        return value

    def optional_input(self, name: str, kind: type[Kind]) -> Kind | None:
        """Return an input of the class `kind`, or None."""
        return self.reader.require(self(name), kind) if self.has(name) else None

    def number(self, name: str, default: float | None = None) -> int | float | Unknown:
        """Return a number, or `Unknown`."""
        value = self(name, default)
        if isinstance(value, Unknown):
            return value
        if isinstance(value, str):
            value = _to_number(value)
        if not is_number(value):
            is_large = isinstance(value, int | float) and abs(value) > MAX_NUMBER
            problem = "is too large" if is_large else "is not a number"
            return Unknown(self.graph_node, f"has {repr_value(value)} as its {short_text(name)}, which {problem}")
        return value

    def integer(self, name: str, default: int | None = None) -> int | Unknown:
        """Return a whole number, or `Unknown`."""
        value = self.number(name, default)
        return value if isinstance(value, Unknown) else int(value)

    def text(self, name: str, default: str = "") -> str | Unknown:
        """Return a text, or `Unknown`."""
        value = self(name, default)
        return value if isinstance(value, str | Unknown) else Unknown(self.graph_node, f"has no text as its {name}")

    def file(self, name: str, kind: str) -> File:
        """Return the file that a widget names."""
        return self.file_of(self(name), name, kind)

    def file_of(self, value: Any, name: str, kind: str) -> File:
        """Return the file whose name is the value of an input."""
        if not isinstance(value, str) or not value:
            raise WanjaxError(f"{self.graph_node} names no file as its {name}: choose one in ComfyUI, and save again")
        return File(value, kind, self.graph_node)


class MissingInput(WanjaxError):
    """A required input is not linked."""

    def __init__(self, node: Node, name: str):
        super().__init__(f"{node} has nothing linked to {name}: link it in ComfyUI, and save again")


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return True for a finite number that is not huge.

    Args:
        value: The value.
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def repr_value(value: Any) -> str:
    """Format a value for a message. A description of nodes may be too large for a message.

    Args:
        value: The value.
    """
    return f"{value!r:.40}" if value is None or isinstance(value, str | int | float) else "something else"


def _to_number(text: str) -> Any:
    try:
        return float(text) if any(character in text for character in ".eE") else int(text)
    except ValueError:
        return text
