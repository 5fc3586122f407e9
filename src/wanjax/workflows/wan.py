# SPDX-License-Identifier: Apache-2.0
"""What ComfyUI calls the files and nodes of Wan."""

from dataclasses import replace
from typing import Any

from wanjax.workflows.evaluate import At
from wanjax.workflows.family import FORMATS, WorkflowFamily
from wanjax.workflows.node_functions import change_speed, condition, image_latents, with_settings
from wanjax.workflows.node_types import NodeType, shaped
from wanjax.workflows.values import Condition, Model, Unknown

FIRST = r"wan[ _-]?2[._]?1"  # the first generation in names of files
SECOND = r"wan[ _-]?2[._]?2"
SMALL, LARGE = r"1[._]3b", "14b"
EXPERT = "(high|low)"
FILES = (
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
    (r"animate[ _-]?2", "Wan Animate 2"),
    (r"animate", "Wan Animate"),
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
    "WanAnimate2ToVideo": "Wan Animate 2",
    "WanAnimateToVideo": "Wan Animate",
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


def _nag(at: At) -> Any:
    values = {name: at.number(f"nag_{name}") for name in ("scale", "alpha", "tau")}
    if unknown := [value for value in values.values() if isinstance(value, Unknown)]:
        return unknown[0]
    rule = ",".join(f"{name}={value:g}" for name, value in values.items())
    model = with_settings(at.take("model", Model), guidance_rule=f"nag:{rule}")
    if (negative := at.maybe("conditioning", Condition)) is None or negative.text is None:
        return model
    return negative.text if isinstance(negative.text, Unknown) else with_settings(model, negative_prompt=negative.text)


def _skip_layers(at: At) -> Any:
    scale, blocks = at.number("scale", 3.0), at.text("double_layers")
    if scale == 0 or blocks == "":
        return at.take("model", Model)
    return Unknown(at.node, "guides away from a prediction without some of the blocks, which wanjax does not do")


def _multiply_temporal_attention(at: At) -> Model:
    model = at.take("model", Model)
    note = f"{at.node} changes only models with an attention over time alone, which Wan is not"
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
    options={"Wan Animate 2": "--model wan2.2-animate-2-14b --image CHARACTER --video CLIP"},
    default_shift=8.0,
    node_types={
        "WanImageToVideo": shaped(),
        "WanFirstLastFrameToVideo": shaped(),
        "WanFunInpaintToVideo": shaped(),
        "WanVaceToVideo": shaped("strength"),
        "Wan22ImageToVideoLatent": shaped(),
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
        "WanImageToVideo": condition({"start_image": "image"}, "start_image"),
        "WanFirstLastFrameToVideo": condition({"start_image": "image", "end_image": "last_image"}, "start_image"),
        "WanFunInpaintToVideo": condition({"start_image": "image", "end_image": "last_image"}),
        "WanVaceToVideo": condition(
            {"control_video": "video", "control_masks": "mask", "reference_image": "references"}
        ),
        "Wan22ImageToVideoLatent": image_latents,
        "WanVideoNAG": _nag,
        "SkipLayerGuidanceDiT": _skip_layers,
        "UNetTemporalAttentionMultiply": _multiply_temporal_attention,
        "TorchCompileModelWanVideo": change_speed,
        "TorchCompileModelWanVideoV2": change_speed,
    },
)
