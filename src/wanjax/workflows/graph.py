# SPDX-License-Identifier: Apache-2.0
"""Parse a ComfyUI workflow into one small graph.

A workflow has one of two forms. The editor's form has nodes with slots, links between slots, and subgraphs. The form of
the API maps the ids of nodes to their types and inputs. Both forms become a `Graph`. Links through subgraphs, reroutes,
primitives and bypassed nodes are resolved, so that each input has a value or the output of a node that computes
something.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from wanjax.errors import WanjaxError, printable
from wanjax.workflows.node_types import CONTROL_WORDS, SEED_WIDGETS, NodeType

MAX_NODES = 20_000  # the maximum number of nodes, including subgraphs
MAX_LINKS = 100  # the maximum number of links from an input to the node that computes its value
MAX_DEPTH = 32  # the maximum depth of nested subgraphs
MAX_USES = 16 * 2**20  # the maximum number of characters of JSON of all uses of subgraphs
MAX_SHOWN = 80  # the maximum number of characters of a workflow's text in a message
INPUT_NODE, OUTPUT_NODE = -10, -20  # the ids of a subgraph's input node and output node
MUTED, BYPASSED = (2, 4)  # the values of a node's mode in the editor
ANY_TYPE = "*"
NOTES = ("Note", "MarkdownNote")
REROUTES = ("Reroute", "Reroute (rgthree)")


def short_text(text: str) -> str:
    """Make a text of a workflow printable and short, for a message.

    Args:
        text: The text.
    """
    short = text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"
    return printable(short)


class Output(NamedTuple):
    """An output of a node: the node's id, and the number of the slot."""

    node: str
    slot: int


@dataclass(frozen=True)
class Node:
    """A node: its id, its type, and its inputs by name.

    An input is a JSON value, or the output of another node. An input that comes from a muted node is missing.
    """

    id: str
    type: str
    inputs: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return f"node {short_text(self.id)} ({short_text(self.type)})"


@dataclass(frozen=True)
class Graph:
    """The nodes of a workflow by id, and the URLs of its files of weights by file name."""

    nodes: Mapping[str, Node]
    addresses: Mapping[str, str] = field(default_factory=dict)


def parse_graph(workflow: Any, node_types: Mapping[str, NodeType]) -> Graph:
    """Parse a workflow of either form.

    Args:
        workflow: The JSON of the workflow.
        node_types: The widgets of nodes by type.

    Raises:
        WanjaxError: The JSON is not a workflow, or it is broken, has a cycle or has too many nodes.
    """
    try:
        return _parse(workflow, node_types)
    except WanjaxError:  # before Python's errors, because some errors of wanjax are subclasses of them
        raise
    except (*(AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError),) as error:
        raise WanjaxError(
            f"the workflow is damaged, at {type(error).__name__} {short_text(str(error))}: save it again in ComfyUI"
        ) from error


def is_workflow(value: Any) -> bool:
    """Return True if JSON has one of the two forms of a workflow.

    Args:
        value: The JSON.
    """
    if not isinstance(value, Mapping):
        return False
    if isinstance(value.get("nodes"), list) and isinstance(value.get("links"), list):
        return True
    nodes = value.get("prompt") if isinstance(value.get("prompt"), Mapping) else value
    return isinstance(nodes, Mapping) and any(
        isinstance(node, Mapping) and "class_type" in node for node in nodes.values()
    )


def _parse(workflow: Any, node_types: Mapping[str, NodeType]) -> Graph:
    if not is_workflow(workflow):
        raise WanjaxError("the file contains no workflow: save it in ComfyUI, as a workflow or for the API")
    if isinstance(workflow.get("nodes"), list):
        return _Editor(workflow, node_types).graph()
    nodes = workflow["prompt"] if isinstance(workflow.get("prompt"), Mapping) else workflow
    if len(nodes) > MAX_NODES:
        raise _too_many()
    return Graph({str(key): _api_node(str(key), node) for key, node in nodes.items() if isinstance(node, Mapping)})


def _too_many() -> WanjaxError:
    return WanjaxError(
        f"the workflow has more than {MAX_NODES:,} nodes, or too much in its subgraphs: save only the part that makes "
        "the video"
    )


def _api_node(key: str, node: Mapping[str, Any]) -> Node:
    inputs = node.get("inputs") or {}
    if not isinstance(inputs, Mapping):
        raise TypeError(f"the inputs of node {key}, which are no object")
    return Node(key, str(node["class_type"]), {str(name): _api_input(value) for name, value in inputs.items()})


def _api_input(value: Any) -> Any:
    """Convert a pair of an id and a slot to the output of a node. Return other values unchanged."""
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str | int) and type(value[1]) is int:
        return Output(str(value[0]), value[1])
    return value


class _Missing:
    """The value of an input that comes from a muted node, or that is not linked."""


MISSING = _Missing()


class _Scope:
    """The nodes and links of the workflow, or of one use of a subgraph."""

    def __init__(self, graph: Mapping[str, Any], prefix: str, parent: "_Scope | None", user: Mapping[str, Any] | None):
        self.prefix, self.parent, self.user = prefix, parent, user
        self.nodes = {str(node["id"]): _checked_node(node) for node in _mappings(graph["nodes"])}
        self.inputs = _mappings(graph.get("inputs"), "name")
        self.links: dict[Any, tuple[str, int, str, int]] = dict(map(_read_link, graph.get("links") or ()))
        self.children: dict[str, _Scope] = {}

    @cached_property
    def by_target(self) -> dict[tuple[str, int], Any]:
        """The id of the link at each slot of the subgraph's outputs."""
        return {(target, slot): key for key, (_, _, target, slot) in self.links.items()}

    @cached_property
    def setters(self) -> dict[str, Mapping[str, Any]]:
        """The nodes that name a link, by this name."""
        return {str(_widgets(node)[0]): node for node in self.nodes.values() if node["type"] == "SetNode"}

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else self.parent.depth + 1


def _mappings(values: Any, *names: str) -> list[Mapping[str, Any]]:
    """Return a list of JSON objects after checking that each object has these names. Null is an empty list."""
    values = [] if values is None else values
    if not isinstance(values, list) or not all(isinstance(value, Mapping) for value in values):
        raise TypeError("a list of objects, which is something else")
    if any(name not in value for value in values for name in names):
        raise TypeError(f"an object without {' and '.join(names)}")
    return values


def _checked_node(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the parts of a node that this module reads. Return the node with these parts."""
    properties = node.get("properties")
    return {
        "id": node["id"],
        "type": str(node["type"]),
        "mode": node.get("mode", 0),
        "inputs": _mappings(node.get("inputs"), "name"),
        "outputs": _mappings(node.get("outputs")),
        "widgets_values": node.get("widgets_values"),
        "models": _mappings(properties.get("models"), "name") if isinstance(properties, Mapping) else [],
    }


def _read_link(link: Any) -> tuple[Any, tuple[str, int, str, int]]:
    if isinstance(link, Mapping):
        key, *endpoints = (link[name] for name in ("id", "origin_id", "origin_slot", "target_id", "target_slot"))
    else:
        key, *endpoints = link[:5]
    origin, origin_slot, target, target_slot = endpoints
    return key, (str(origin), int(origin_slot), str(target), int(target_slot))


class _Editor:
    """The editor's form of a workflow. `scopes` has the workflow and each use of a subgraph."""

    def __init__(self, workflow: Mapping[str, Any], node_types: Mapping[str, NodeType]):
        self.node_types = node_types
        definitions = workflow.get("definitions")
        subgraphs = definitions.get("subgraphs") if isinstance(definitions, Mapping) else None
        self.subgraphs = {str(subgraph["id"]): subgraph for subgraph in _mappings(subgraphs)}
        self.lengths = {name: len(json.dumps(subgraph)) for name, subgraph in self.subgraphs.items()}
        self.node_count, self.used_length = len(workflow["nodes"]), 0
        if self.node_count > MAX_NODES:
            raise _too_many()
        self.scopes = [_Scope(workflow, "", None, None)]
        for scope in self.scopes:  # the loop appends to this list
            for key, node in scope.nodes.items():
                if (subgraph := self.subgraphs.get(name := node["type"])) is not None:
                    self._check_use(scope, name)
                    scope.children[key] = _Scope(subgraph, f"{scope.prefix}{key}:", scope, node)
                    self.scopes.append(scope.children[key])

    def _check_use(self, scope: _Scope, name: str) -> None:
        """Count a use of a subgraph before it is opened. Raises WanjaxError for a subgraph inside itself, and for too
        many uses."""
        outer: _Scope | None = scope
        while outer is not None and outer.user is not None:
            if outer.user["type"] == name:
                raise WanjaxError(f"the subgraph {short_text(name)} has itself inside: take it out in ComfyUI")
            outer = outer.parent
        if scope.depth == MAX_DEPTH:
            raise WanjaxError(
                f"the workflow has subgraphs in each other to a depth of more than {MAX_DEPTH}: unpack some"
            )
        self.node_count += len(self.subgraphs[name]["nodes"])
        self.used_length += self.lengths[name]
        if self.node_count > MAX_NODES or self.used_length > MAX_USES:
            raise _too_many()

    def graph(self) -> Graph:
        """Resolve all links."""
        nodes = {}
        addresses: dict[str, str] = {}
        for scope in self.scopes:
            for key, node in scope.nodes.items():
                for model in node["models"]:
                    if isinstance(url := model.get("url"), str) and url:
                        addresses.setdefault(str(model["name"]), url)
                if key in scope.children or node["type"] in NOTES or not self._is_active(scope, node):
                    continue
                name = scope.prefix + key
                nodes[name] = Node(name, node["type"], self._inputs(scope, node))
        return Graph(nodes, addresses)

    def _is_active(self, scope: _Scope, node: Mapping[str, Any]) -> bool:
        """Return True if the node and the subgraphs around it are neither muted nor bypassed."""
        if node["mode"] in (MUTED, BYPASSED):
            return False
        return scope.parent is None or scope.user is None or self._is_active(scope.parent, scope.user)

    def _inputs(self, scope: _Scope, node: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of a node: the values of its widgets, overridden by linked values."""
        inputs = named_widgets(node, self.node_types)
        for slot in node["inputs"]:
            value = self._input(scope, slot, MAX_LINKS)
            if value is not MISSING:
                inputs[str(slot["name"])] = value
        return inputs

    def _input(self, scope: _Scope, slot: Mapping[str, Any], max_links: int) -> Any:
        """Resolve a slot to the output of a node, a value, or `MISSING`."""
        link = slot.get("link")
        return MISSING if link is None or link not in scope.links else self._link(scope, link, max_links)

    def _link(self, scope: _Scope, link: Any, max_links: int) -> Any:
        """Resolve a link. `max_links` is the number of links that may still be followed."""
        if max_links == 0:
            raise WanjaxError("the links of the workflow form a circle: cut one of them in ComfyUI")
        origin, slot, _, _ = scope.links[link]
        if origin == str(INPUT_NODE):
            return self._subgraph_input(scope, slot, max_links - 1)
        return self._output(scope, scope.nodes[origin], slot, max_links - 1)

    def _subgraph_input(self, scope: _Scope, input_index: int, max_links: int) -> Any:
        """Resolve an input of a subgraph, in the graph that uses the subgraph."""
        if scope.parent is None or scope.user is None:
            return MISSING
        definition = scope.inputs[input_index]
        for slot in scope.user["inputs"]:
            if slot["name"] == definition["name"]:
                if slot.get("link") is not None:
                    return self._input(scope.parent, slot, max_links)
                break
        return self._promoted(scope).get(str(definition["name"]), MISSING)

    def _promoted(self, scope: _Scope) -> dict[str, Any]:
        """Return the values with which a use of a subgraph sets the widgets of its nodes, by the subgraph's inputs."""
        assert scope.user is not None
        values = scope.user.get("widgets_values")
        if isinstance(values, Mapping):
            return dict(values)
        names = [str(entry["name"]) for entry in scope.inputs if self._is_widget(scope, entry, 0)]
        return dict(zip(names, values, strict=True)) if isinstance(values, list) and len(values) == len(names) else {}

    def _is_widget(self, scope: _Scope, definition: Mapping[str, Any], depth: int) -> bool:
        """Return True if an input of a subgraph leads to a widget."""
        for link in definition.get("linkIds") or ():
            if link not in scope.links:
                continue
            _, _, target, number = scope.links[link]
            if target == str(OUTPUT_NODE) or target not in scope.nodes:
                continue
            slot = scope.nodes[target]["inputs"][number]
            if slot.get("widget"):
                return True
            if (child := scope.children.get(target)) is not None and depth < MAX_DEPTH:
                inner = [entry for entry in child.inputs if entry["name"] == slot["name"]]
                return any(self._is_widget(child, entry, depth + 1) for entry in inner)
        return False

    def _output(self, scope: _Scope, node: Mapping[str, Any], output_index: int, max_links: int) -> Any:
        """Resolve an output of a node to the output itself, or to the value that the node passes on."""
        key, kind = str(node["id"]), node["type"]
        if node["mode"] == MUTED:
            return MISSING
        if node["mode"] == BYPASSED:
            slot = _bypass(node, output_index)
            return MISSING if slot is None else self._input(scope, slot, max_links)
        if (child := scope.children.get(key)) is not None:
            link = child.by_target.get((str(OUTPUT_NODE), output_index))
            return MISSING if link is None else self._link(child, link, max_links)
        if kind in REROUTES:
            return self._input(scope, node["inputs"][0], max_links)
        if kind == "GetNode" and (setter := scope.setters.get(str(_widgets(node)[0]))) is not None:
            return self._input(scope, setter["inputs"][0], max_links)
        if kind == "PrimitiveNode":
            return _widgets(node)[0]
        return Output(scope.prefix + key, output_index)


def _bypass(node: Mapping[str, Any], output_index: int) -> Mapping[str, Any] | None:
    """Return the input that a bypassed node passes on as an output. The input has the type of the output and, if
    possible, the same slot."""
    slots, output_type = node["inputs"], str(node["outputs"][output_index].get("type"))

    def fits(slot: Mapping[str, Any]) -> bool:
        slot_type = str(slot.get("type"))
        return ANY_TYPE in (slot_type, output_type) or output_type in slot_type.split(",")

    same_slot = [slots[output_index]] if output_index < len(slots) else []
    return next((slot for slot in (*same_slot, *slots) if fits(slot)), None)


def _widgets(node: Mapping[str, Any]) -> Sequence[Any]:
    values = node.get("widgets_values")
    return values if isinstance(values, list) else list(values.values()) if isinstance(values, Mapping) else ()


def named_widgets(node: Mapping[str, Any], node_types: Mapping[str, NodeType]) -> dict[str, Any]:
    """Return the values of a node's widgets by name.

    The editor saves the values as a list, in the order of the node's definition. `node_types` has this order for
    some types. For other types, the node's inputs that are widgets name the values one by one. If values are left over,
    the file does not list all widgets as inputs, and the result is empty.

    Args:
        node: The node in the editor's form.
        node_types: The widgets of nodes by type.
    """
    values = node.get("widgets_values")
    if isinstance(values, Mapping):
        return {str(name): value for name, value in values.items()}
    if not isinstance(values, list):
        return {}
    if (node_type := node_types.get(node["type"])) is not None:
        names = node_type.widget_names(values)
    else:
        names = tuple(str(slot["name"]) for slot in node["inputs"] if slot.get("widget"))
    values_by_name: dict[str, Any] = {}
    remaining_values = list(values)
    for name in names:
        if not remaining_values:
            break
        values_by_name[name] = remaining_values.pop(0)
        if name in SEED_WIDGETS and remaining_values and remaining_values[0] in CONTROL_WORDS:
            remaining_values.pop(0)
    return values_by_name if node_type is not None or not remaining_values else {}
