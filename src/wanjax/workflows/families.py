# SPDX-License-Identifier: Apache-2.0
"""The families whose workflows are read, and the meaning of names in a workflow: files, nodes, outputs and services."""

import re

from wanjax.figures import join_with_and
from wanjax.workflows import composing_nodes, node_functions, node_types
from wanjax.workflows.graph import Graph, Node, Output
from wanjax.workflows.hunyuanvideo import FAMILY as HUNYUANVIDEO
from wanjax.workflows.wan import FAMILY as WAN

FAMILIES = (WAN, HUNYUANVIDEO)
NODE_TYPES = {name: kind for family in FAMILIES for name, kind in family.node_types.items()} | node_types.NODE_TYPES
FUNCTIONS = {name: function for family in FAMILIES for name, function in family.functions.items()} | {
    **node_functions.FUNCTIONS,
    **composing_nodes.FUNCTIONS,
}
OTHER_NODES = {name: words for family in FAMILIES for name, words in family.other_nodes.items()} | {
    "SVD_img2vid_Conditioning": "Stable Video Diffusion",
    "Kandinsky5ImageToVideo": "Kandinsky 5",
    "LTXVConditioning": "LTX",
    "SeedVR2Conditioning": "SeedVR2",
}
"""Nodes of unsupported models, each with the model's name."""
OTHER_FILES = (
    *(row for family in FAMILIES for row in family.other_files),
    (r"ltx", "LTX"),
    (r"hunyuan[ _-]?3d", "Hunyuan3D"),
    (r"triposplat", "TripoSplat"),
    (r"capybara", "Capybara"),
    (r"minimax", "MiniMax"),
    (r"fast[ _-]?h3", "FastH3"),
    (r"kandinsky", "Kandinsky"),
    (r"cosmos", "Cosmos"),
    (r"mochi", "Mochi"),
    (r"svd", "Stable Video Diffusion"),
    (r"seedvr", "SeedVR2"),
    (r"flux", "Flux"),
    (r"qwen", "Qwen-Image"),
    (r"z[ _-]?image", "Z-Image"),
    (r"sd_?xl|sd3|v1-5", "Stable Diffusion"),
)
"""Patterns of file names of unsupported models, each with the model's name."""
VIDEO_OUTPUTS = ("SaveVideo", "VHS_VideoCombine", "SaveWEBM", "SaveAnimatedWEBP", "SaveAnimatedPNG")
PICTURE_OUTPUTS = ("SaveImage", "PreviewImage")
OTHER_OUTPUTS = (
    (r"(Save|Preview)Audio", "sound"),
    (r"Save(GLB|3D)|Preview3D|PreviewGaussian|SaveSplat", "3D models"),
    (r"SaveSVG", "vector graphics"),
    (r"SaveImage|PreviewImage|ImageCompare|MaskPreview", "pictures"),
    (r"SaveText|PreviewAny|ShowText", "text"),
)
"""Patterns of types of output nodes, each with the product of such a workflow. The first match wins."""
SERVICES = re.compile(
    r"Api$|^(?:Beeble|Bria|ByteDance|Clarity|Claude|ElevenLabs|FishAudio|Gemini|Grok|HappyHorse|HeyGen|Higgsfield|"
    r"HitPaw|Ideogram(?!4Sched)|Kling|LtxApi|LTXVApi|Luma|Magnific|Meshy|MetaMuse|Minimax[HTI]|Mirelo|Moonvalley|"
    r"OpenAI|OpenRouter|Pika|Pixverse|Pruna|Quiver|Recraft|Rodin3D|Runway|Sonilo|Sora|Stability|Sync(?=[LT])|Tencent|"
    r"Topaz|Tripo(?!Splat)|Veed|Veo|Vidu|Wavespeed)|^(?:Flux|Krea)\w*Node\d?$"
)
"""Types of nodes that call a paid service."""
SUPPORTED_WORKFLOWS = (
    f"wanjax reads workflows that make a video with {join_with_and([family.title for family in FAMILIES])}"
)


def model_of(file_name: str) -> str | None:
    """Return the name of the published model that a file contains, or None.

    Args:
        file_name: The file's name, without folders.
    """
    patterns = (row for family in FAMILIES for row in family.files)
    return next((model for pattern, model in patterns if re.search(pattern, file_name, re.IGNORECASE)), None)


def other_model_of(file_name: str) -> str | None:
    """Return the name of the unsupported model that a file contains, or None.

    Args:
        file_name: The file's name, without folders.
    """
    return next((model for pattern, model in OTHER_FILES if re.search(pattern, file_name, re.IGNORECASE)), None)


def is_component_of(model: str | None, file_name: str) -> bool:
    """Return True if a file has a text encoder, vision encoder or VAE of a published model, in any number format.

    Args:
        model: The name of the model; None for an unknown model, which may be of any family.
        file_name: The file's name, without folders.
    """
    families = [family for family in FAMILIES if model is None or model in dict(family.files).values()]
    patterns = (row for family in families for row in family.components)
    return any(re.fullmatch(pattern, file_name, re.IGNORECASE) for pattern in patterns)


def default_shift(model: str) -> float | None:
    """Return the shift that ComfyUI uses for a model if no node sets the shift. Return None for an unknown model.

    Args:
        model: The name of a published model.
    """
    return next((family.default_shift for family in FAMILIES if model in dict(family.files).values()), None)


def sorted_by_id(graph: Graph) -> list[Node]:
    """Sort nodes by the numbers in their ids. Both forms of a workflow have the same numbers.

    Args:
        graph: The graph with the nodes.
    """
    return sorted(
        graph.nodes.values(), key=lambda node: [(not part.isdigit(), part.zfill(20)) for part in node.id.split(":")]
    )


def ancestors(graph: Graph, node: Node) -> list[Node]:
    """Return a node and all nodes before it, the nearest nodes first.

    Args:
        graph: The graph.
        node: The node.
    """
    names, nodes = {node.id}, [node]
    for current in nodes:  # the loop appends to this list
        for value in current.inputs.values():
            if isinstance(value, Output) and value.node not in names and value.node in graph.nodes:
                names.add(value.node)
                nodes.append(graph.nodes[value.node])
    return nodes
