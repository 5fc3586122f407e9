# SPDX-License-Identifier: Apache-2.0
"""The names of the files and nodes of Wan in ComfyUI."""

import re
from dataclasses import replace
from typing import Any

from wanjax.media.inputs import BACKGROUND, FACE, IMAGE, MASK, VIDEO
from wanjax.workflows.evaluate import NodeInputs
from wanjax.workflows.family import FORMATS, WorkflowFamily
from wanjax.workflows.node_functions import conditioning_node, ignore_speed_node, image_latents, with_settings
from wanjax.workflows.node_types import NodeType, video_shape_widgets
from wanjax.workflows.segments import joined_parts
from wanjax.workflows.values import Condition, Latents, Model, Pictures, SampledLatents, Segment, Shape, Unknown, Vision

FIRST = r"wan[ _-]?2[._]?1"  # matches the first generation in file names
SECOND = r"wan[ _-]?2[._]?2"
SMALL, LARGE = r"1[._]3b", "14b"
EXPERT = "(high|low)"
FILES = (
    (r"animate[ _-]?2.*distill", "wan2.2-animate-2-14b-distilled"),
    (r"animate[ _-]?2", "wan2.2-animate-2-14b"),
    (rf"{SECOND}.*animate|wan[ _-]?animate", "wan2.2-animate-14b"),
    (rf"{FIRST}.*vace.*{LARGE}", "wan2.1-vace-14b"),
    (rf"{FIRST}.*vace.*{SMALL}", "wan2.1-vace-1.3b"),
    (rf"{FIRST}.*fun.*(inp.*{SMALL}|{SMALL}.*inp)", "wan2.1-fun-1.3b-inp"),
    (rf"{FIRST}.*fun.*(inp.*{LARGE}|{LARGE}.*inp)", "wan2.1-fun-14b-inp"),
    (rf"{SECOND}.*fun.*(5b.*inp|inp.*5b)", "wan2.2-fun-5b-inp"),
    (rf"{SECOND}.*fun.*(inp.*{EXPERT}|{EXPERT}.*inp)", "wan2.2-fun-a14b-inp"),
    (rf"{FIRST}.*flf2v", "wan2.1-flf2v-14b"),
    (rf"{FIRST}.*i2v(?!.*(ati|infinite)).*720p", "wan2.1-i2v-14b-720p"),
    (rf"{FIRST}.*i2v.*480p|{FIRST}.*i2v.*{LARGE}(?!.*ati)", "wan2.1-i2v-14b-480p"),
    (rf"{FIRST}.*t2v.*{SMALL}", "wan2.1-t2v-1.3b"),
    (rf"{FIRST}.*t2v.*{LARGE}", "wan2.1-t2v-14b"),
    (rf"{SECOND}.*ti2v.*5b", "wan2.2-ti2v-5b"),
    (rf"{SECOND}.*(t2v.*{EXPERT}|{EXPERT}.*t2v)", "wan2.2-t2v-a14b"),
    (rf"{SECOND}.*(i2v.*{EXPERT}|{EXPERT}.*i2v)", "wan2.2-i2v-a14b"),
)
OTHER_FILES = (
    (r"s2v", "Wan S2V"),
    (r"infinite[ _-]?talk", "InfiniteTalk"),
    (r"humo", "HuMo"),
    (r"scail", "SCAIL"),
    (r"fun.*camera|camera.*fun", "Wan Fun Control with a camera"),
    (r"fun.*control|control.*fun", "Wan Fun Control"),
    (r"wan.*[ _-]ati[ ._-]", "Wan ATI"),
    (r"wan[ _-]?move", "WanMove"),
    (r"dancer", "Wan Dancer"),
    (r"wan.*alpha", "Wan Alpha"),
    (r"bernini", "Bernini"),
    (r"chrono", "ChronoEdit"),
    (r"causal[ _-]?forcing", "Causal Forcing"),
    (r"void", "VOID"),
)
OTHER_NODES = {
    "WanSoundImageToVideo": "Wan S2V",
    "WanSoundImageToVideoExtend": "Wan S2V",
    "WanInfiniteTalkToVideo": "InfiniteTalk",
    "WanHuMoImageToVideo": "HuMo",
    "WanSCAILToVideo": "SCAIL",
    "WanCameraImageToVideo": "Wan Fun Control with a camera",
    "WanCameraEmbedding": "Wan Fun Control with a camera",
    "WanFunControlToVideo": "Wan Fun Control",
    "Wan22FunControlToVideo": "Wan Fun Control",
    "WanTrackToVideo": "Wan ATI",
    "WanMoveTrackToVideo": "WanMove",
    "WanDancerVideo": "Wan Dancer",
    "WanPhantomSubjectToVideo": "Phantom",
    "BerniniConditioning": "Bernini",
    "ARVideoI2V": "a causal model that continues a picture",
    "VOIDSampler": "VOID",
    "WanVideoSampler": "the nodes WanVideoWrapper, which have settings of their own",
}


def _nag(node: NodeInputs) -> Any:
    values = {name: node.number(f"nag_{name}") for name in ("scale", "alpha", "tau")}
    if unknown := [value for value in values.values() if isinstance(value, Unknown)]:
        return unknown[0]
    rule = ",".join(f"{name}={value:g}" for name, value in values.items())
    model = with_settings(node.require_input("model", Model), guidance_rule=f"nag:{rule}")
    if (negative := node.optional_input("conditioning", Condition)) is None or negative.text is None:
        return model
    return negative.text if isinstance(negative.text, Unknown) else with_settings(model, negative_prompt=negative.text)


SEGMENT_NODE = "WanAnimateToVideo"
SEGMENT_INPUTS = {"reference_image": IMAGE.name, "pose_video": VIDEO.name, "face_video": FACE.name}
REPLACEMENT_INPUTS = {"background_video": BACKGROUND.name, "character_mask": MASK.name}
OVERLAPS = (1, 5)  # the numbers of frames that a segment can repeat from the segment before it


def _segment(node: NodeInputs) -> tuple[Condition, Condition, Latents, int, int, int | Unknown]:
    """Describe a character that follows a pose clip and a clip of a face. In a loop over the clip, describe the first
    iteration.

    The last three outputs are the number of latents to trim, the number of frames that the segment repeats, and the
    index of the clip's frame at which the next segment starts.
    """
    overlap, start = (
        _integer_or_default(node, "continue_motion_max_frames", 5),
        _integer_or_default(node, "video_frame_offset", 0),
    )
    previous = node.optional_input("continue_motion", Pictures)
    in_loop = node.has("continue_motion") and previous is None
    if previous is not None and not all(leaf.latents is not None for leaf in joined_parts(previous)):
        node.reader.problems.append(
            Unknown(node.graph_node, "continues the frames of a file, which wanjax does not support")
        )
    if previous is None and start:
        node.reader.problems.append(
            Unknown(node.graph_node, f"has {start} as its video_frame_offset, but wanjax supports only 0")
        )
    if (previous is not None or in_loop) and overlap not in OVERLAPS:
        problem = f"has {overlap} as its continue_motion_max_frames, but wanjax supports only 1 and 5"
        node.reader.problems.append(Unknown(node.graph_node, problem))
    inputs = {
        input_name: node(node_input)
        for node_input, input_name in (SEGMENT_INPUTS | REPLACEMENT_INPUTS).items()
        if node.has(node_input)
    }
    for node_input, input_name in SEGMENT_INPUTS.items():
        inputs.setdefault(input_name, Unknown(node.graph_node, f"has no {node_input}, which wanjax needs"))
    if vision := node.optional_input("clip_vision_output", Vision):
        inputs["vision"] = vision
    shape = Shape(node.integer("width"), node.integer("height"), node.integer("length"), node.integer("batch_size", 1))
    positive, negative = node.require_input("positive", Condition), node.require_input("negative", Condition)
    start = start if previous is None else max(0, start - overlap)
    settings = {"overlap": overlap} if in_loop else {"windows": 1}
    notes = (
        f"{node.graph_node} crops pictures to one size: wanjax adds bars to the character and stretches the clips",
        f"{node.graph_node} repeats the last frame of a short clip: in wanjax the video ends with the pose clip",
    )
    return (
        replace(positive, inputs=inputs, node=node.graph_node, settings=settings, notes=notes),
        replace(negative, inputs=inputs, node=node.graph_node),
        Latents(shape, node.graph_node, segment=Segment(start, overlap, previous)),
        1,  # the latent frame of the character's picture
        0 if previous is None else overlap,
        shape.frames if isinstance(shape.frames, Unknown) else start + shape.frames,
    )


def _integer_or_default(node: NodeInputs, name: str, default: int) -> int:
    """Return a whole number. For an unknown number, record a note and return the default."""
    if isinstance(number := node.integer(name, default), Unknown):
        node.reader.problems.append(number)
        return default
    return number


ANIMATE_NODE = "WanAnimate2ToVideo"
ANIMATE_INPUTS = {"reference_image": "image", "pose_video": "video"}
ANIMATE_GRID = 16  # pixels; sizes of Animate's videos are multiples of it
ANIMATE_NUMBERS = {"pose_strength": 1, "pose_start_percent": 0, "pose_end_percent": 1, "reference_image_strength": 1}
"""The numbers of Animate's node, each with the only value that wanjax supports."""


def _animate(node: NodeInputs) -> tuple[Condition, Condition, Latents, int, None, int]:
    """Describe a character that follows a clip. In a loop over the clip, describe the first iteration."""
    for name, value in {**ANIMATE_NUMBERS, "video_frame_offset": 0}.items():
        number = node.number(name, value)
        if isinstance(number, Unknown):
            node.reader.problems.append(number)
        elif number != value:
            problem = f"has {number:g} as its {name}, but wanjax supports only {value}"
            node.reader.problems.append(Unknown(node.graph_node, problem))
    if node("continue_motion") is not None:
        node.reader.problems.append(Unknown(node.graph_node, "continues other frames, which wanjax does not support"))
    in_loop, clip = node.has("continue_motion"), node.optional_input("positive_pose", Condition)
    settings: dict[str, Any] = {"clip_prompt": clip.text} if clip is not None and clip.text is not None else {}
    notes = [
        f"{node.graph_node} crops the picture and the clip to one size: "
        "wanjax adds bars to them, and uses the size as an area"
    ]
    if in_loop:
        notes.append(
            f"{node.graph_node} has the same noise in each iteration of its loop: "
            "in wanjax each segment has its own noise"
        )
    else:
        settings["windows"] = 1
    shape = Shape(_on_grid(node.integer("width")), _on_grid(node.integer("height")), node.integer("length"))
    inputs = {input_name: node(node_input) for node_input, input_name in ANIMATE_INPUTS.items() if node.has(node_input)}
    if vision := node.optional_input("clip_vision_output", Vision):
        inputs["vision"] = vision
    positive, negative = node.require_input("positive", Condition), node.require_input("negative", Condition)
    return (
        replace(positive, inputs=inputs, node=node.graph_node, settings=settings, notes=tuple(notes)),
        replace(negative, inputs=inputs, node=node.graph_node),
        Latents(shape, node.graph_node),
        0,
        None,
        0,
    )


def _on_grid(side: int | Unknown) -> int | Unknown:
    return side if isinstance(side, Unknown) else max(1, side // ANIMATE_GRID) * ANIMATE_GRID


def _start_loop(_: NodeInputs) -> tuple[None, bool, bool, int, None]:
    """Describe the outputs of a loop's start in the first iteration: first, not last, and without an iteration before
    it."""
    return None, True, False, 0, None


def _end_loop(node: NodeInputs) -> Any:
    """Describe the pictures of a loop over a clip. The iterations are Animate's segments."""
    pictures = node("output_value")
    latents = pictures.latents if isinstance(pictures, Pictures) else None
    while isinstance(latents, SampledLatents):
        latents = latents.latents
    if isinstance(latents, Latents) and latents.node.type in (ANIMATE_NODE, SEGMENT_NODE):
        return pictures
    return Unknown(node.graph_node, "repeats other nodes, which wanjax does not support")


def _rebatch(node: NodeInputs) -> Any:
    return node("images")


def _animate_cache(node: NodeInputs) -> Model:
    model = node.require_input("model", Model)
    if node("dtype") != "int8":
        return model
    note = f"{node.graph_node} stores keys and values in int8: in wanjax --precision int8 does this"
    return replace(model, notes=(*model.notes, note))


SKIP_NUMBERS = ("scale", "start_percent", "end_percent", "rescaling_scale")


def _skip_layers(node: NodeInputs) -> Any:
    """Describe a model with skip-layer guidance. The percents of the node apply to the schedule before the shift that
    the model has at this node."""
    model, layers = node.require_input("model", Model), node.text("double_layers")
    numbers: list[float] = []
    for value in (
        *(node.number(name) for name in SKIP_NUMBERS),
        FAMILY.default_shift if model.shift is None else model.shift,
    ):
        if isinstance(value, Unknown):
            return value
        numbers.append(float(value))
    scale, start, end, rescaling, shift = numbers
    if isinstance(layers, Unknown):
        return layers
    blocks = "+".join(dict.fromkeys(re.findall(r"\d+", layers)))
    if scale <= 0 or not blocks:
        return model
    if rescaling:
        return Unknown(node.graph_node, f"has {rescaling:g} as its rescaling_scale, but wanjax supports only 0")
    levels = [shift * (1 - percent) / (1 + (shift - 1) * (1 - percent)) for percent in (start, end)]
    high, low = (f"{min(1.0, max(0.0, level)):.6g}" for level in levels)
    return with_settings(model, skip=f"skip={blocks},skip_scale={scale:g},skip_start={high},skip_end={low}")


def _multiply_temporal_attention(node: NodeInputs) -> Model:
    model = node.require_input("model", Model)
    note = f"{node.graph_node} changes only models with an attention over time alone, which Wan is not"
    return replace(model, notes=(*model.notes, note))


FAMILY = WorkflowFamily(
    title="Wan",
    files=FILES,
    components=(
        rf"(?:models_t5_)?umt5[ _-]?xxl{FORMATS}",
        rf"wan[ _-]?2[._]?[12][ _-]?vae{FORMATS}",
        rf"clip[ _-]?vision[ _-]?h{FORMATS}",
    ),
    other_files=OTHER_FILES,
    other_nodes=OTHER_NODES,
    default_shift=8.0,
    node_types={
        "WanImageToVideo": video_shape_widgets(),
        "WanFirstLastFrameToVideo": video_shape_widgets(),
        "WanFunInpaintToVideo": video_shape_widgets(),
        "WanVaceToVideo": video_shape_widgets("strength"),
        "Wan22ImageToVideoLatent": video_shape_widgets(),
        ANIMATE_NODE: video_shape_widgets(
            *("video_frame_offset", "pose_strength", "pose_start_percent", "pose_end_percent"),
            "reference_image_strength",
        ),
        SEGMENT_NODE: video_shape_widgets("continue_motion_max_frames", "video_frame_offset"),
        "WanAnimate2Cache": NodeType(("device", "dtype")),
        "StartLoop": NodeType(),
        "EndLoop": NodeType(),
        "RebatchImages": NodeType(("batch_size",)),
        "WanVideoNAG": NodeType(("nag_scale", "nag_alpha", "nag_tau", "input_type")),
        "SkipLayerGuidanceDiT": NodeType(
            ("double_layers", "single_layers", "scale", "start_percent", "end_percent", "rescaling_scale")
        ),
        "UNetTemporalAttentionMultiply": NodeType(
            ("self_structural", "self_temporal", "cross_structural", "cross_temporal")
        ),
        "TorchCompileModelWanVideo": NodeType(),
        "TorchCompileModelWanVideoV2": NodeType(),
    },
    functions={
        "WanImageToVideo": conditioning_node({"start_image": "image"}, "start_image"),
        "WanFirstLastFrameToVideo": conditioning_node(
            {"start_image": "image", "end_image": "last_image"}, "start_image"
        ),
        "WanFunInpaintToVideo": conditioning_node({"start_image": "image", "end_image": "last_image"}),
        "WanVaceToVideo": conditioning_node(
            {"control_video": "video", "control_masks": "mask", "reference_image": "references"}
        ),
        "Wan22ImageToVideoLatent": image_latents,
        ANIMATE_NODE: _animate,
        SEGMENT_NODE: _segment,
        "WanAnimate2Cache": _animate_cache,
        "StartLoop": _start_loop,
        "EndLoop": _end_loop,
        "RebatchImages": _rebatch,
        "WanVideoNAG": _nag,
        "SkipLayerGuidanceDiT": _skip_layers,
        "UNetTemporalAttentionMultiply": _multiply_temporal_attention,
        "TorchCompileModelWanVideo": ignore_speed_node,
        "TorchCompileModelWanVideoV2": ignore_speed_node,
    },
)
