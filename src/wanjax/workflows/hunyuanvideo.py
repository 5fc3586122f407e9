# SPDX-License-Identifier: Apache-2.0
"""The names of the files and nodes of HunyuanVideo 1.5 in ComfyUI."""

from wanjax.workflows.family import FORMATS, WorkflowFamily
from wanjax.workflows.node_functions import conditioning_node, empty_latents
from wanjax.workflows.node_types import video_shape_widgets

NAME = r"hunyuan[ _-]?video[ _-]?1[._]?5"
FAMILY = WorkflowFamily(
    title="HunyuanVideo 1.5",
    files=tuple(
        (rf"{NAME}.*{size}.*{task}(?!.*sr)", f"hunyuanvideo1.5-{size}-{task}")
        for size in ("480p", "720p")
        for task in ("t2v", "i2v")
    ),
    components=(
        rf"qwen[ _-]?2[._]?5[ _-]?vl[ _-]?7b{FORMATS}",
        rf"byt5[ _-]?small[ _-]?glyphxl{FORMATS}",
        rf"sigclip[ _-]?vision[ _-]?patch14[ _-]?384{FORMATS}",
        rf"hunyuan[ _-]?video[ _-]?1?[._]?5[ _-]?vae{FORMATS}",
    ),
    other_files=(
        (r"1080p_sr|sr_distilled", "the super-resolution of HunyuanVideo 1.5"),
        (r"hunyuan[ _-]?video(?!.?1[._]?5)", "HunyuanVideo 1.0"),
    ),
    other_nodes={"HunyuanVideo15SuperResolution": "the super-resolution of HunyuanVideo 1.5"},
    default_shift=7.0,
    node_types={
        "EmptyHunyuanLatentVideo": video_shape_widgets(),
        "EmptyHunyuanVideo15Latent": video_shape_widgets(),
        "HunyuanVideo15ImageToVideo": video_shape_widgets(),
    },
    functions={
        "EmptyHunyuanLatentVideo": empty_latents,  # other families use these nodes too
        "EmptyHunyuanVideo15Latent": empty_latents,
        "HunyuanVideo15ImageToVideo": conditioning_node({"start_image": "image"}, "start_image"),
    },
)
