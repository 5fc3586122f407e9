# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's workflow templates, and workflows in the editor's form and the API's form."""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from wanjax.workflows.families import NODE_TYPES
from wanjax.workflows.graph import Graph, Output, parse_graph
from wanjax.workflows.request import Workflow, read_workflow

TEMPLATES = Path(str(files("comfyui_workflow_templates_json"))) / "templates"


@cache
def template_text(name: str) -> str:
    return (TEMPLATES / f"{name}.json").read_text(encoding="utf-8")


def template(name: str) -> dict[str, Any]:
    """Return a template in the editor's form."""
    return json.loads(template_text(name))


def template_names() -> list[str]:
    """List all templates, without other files in their folder."""
    names = [path.stem for path in sorted(TEMPLATES.glob("*.json"))]
    return [name for name in names if not name.startswith("index") and "nodes" in template(name)]


def nodes_of(workflow: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the nodes of a workflow and of its subgraphs."""
    subgraphs = workflow.get("definitions", {}).get("subgraphs", [])
    return [node for graph in (workflow, *subgraphs) for node in graph["nodes"]]


def graph_of(workflow: Mapping[str, Any]) -> Graph:
    return parse_graph(workflow, NODE_TYPES)


def request_of(workflow: Mapping[str, Any]) -> Workflow:
    return read_workflow(graph_of(workflow))


def api_form(graph: Graph) -> dict[str, Any]:
    """Return the API's form of a graph."""
    return {
        node.id: {
            "class_type": node.type,
            "inputs": {
                name: [value.node, value.slot] if isinstance(value, Output) else value
                for name, value in node.inputs.items()
            },
        }
        for node in graph.nodes.values()
    }


def with_switch(name: str) -> dict[str, Any]:
    """Return a template with its switch for fewer steps flipped."""
    workflow = template(name)
    for node in nodes_of(workflow):
        if node["type"] == "PrimitiveBoolean" and node["widgets_values"] in ([True], [False]):
            node["widgets_values"] = [not node["widgets_values"][0]]
        values = node.get("widgets_values")
        if len(node["type"]) == 36 and isinstance(values, list) and values and isinstance(values[-1], bool):
            values[-1] = not values[-1]  # the value for this use of a subgraph
    return workflow
