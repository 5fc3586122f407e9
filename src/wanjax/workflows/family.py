# SPDX-License-Identifier: Apache-2.0
"""The names of the files and nodes of one family of models in ComfyUI."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from wanjax.workflows.node_types import NodeType

FORMATS = r"(?:[ ._-]*(?:encoder|enc|fp\d+|bf16|e4m3fn|e5m2|scaled|mixed|nvfp4|q\d\w*))*\.\w+"
"""The end of the name of a file whose weights differ only in their format."""


class WorkflowFamily(NamedTuple):
    """The files and nodes of a family in ComfyUI.

    Args:
        title: The family's name in sentences.
        files: Patterns of file names, each with the published model that such a file contains. The first match wins.
        components: Patterns of names of files with the text encoders, vision encoders and VAEs of these models.
        other_files: Patterns of file names of unsupported related models, each with the model's name.
        other_nodes: Types of nodes of unsupported related models, each with the model's name.
        default_shift: The shift if no node sets one.
        node_types: The widgets of the family's nodes.
        functions: The functions that describe the family's nodes.
    """

    title: str
    files: tuple[tuple[str, str], ...]
    components: tuple[str, ...]
    other_files: tuple[tuple[str, str], ...]
    other_nodes: Mapping[str, str]
    default_shift: float
    node_types: Mapping[str, NodeType]
    functions: Mapping[str, Callable[[Any], Any]]
