# SPDX-License-Identifier: Apache-2.0
"""The models that are known by name, and `load`, which makes a pipeline of any checkpoint."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from wanjax.adapters import AdaptedSource, Note
from wanjax.cache import enable_compile_cache
from wanjax.converters.lora import Lora
from wanjax.errors import WanjaxError
from wanjax.kernels.attention import choose, named
from wanjax.layers.linear import placed
from wanjax.networks import Network, components, network
from wanjax.pipelines.base import Parts, Settings
from wanjax.pipelines.tasks import (
    ATTENDED_IMAGE_TO_VIDEO,
    CONTROLLED_VIDEO,
    FIRST_AND_LAST_FRAME,
    FIRST_FRAME_TO_VIDEO,
    IMAGE_TO_VIDEO,
    TEXT_TO_VIDEO,
    Task,
    check_pipeline,
    task_of,
)
from wanjax.pipelines.text import Tokenizer
from wanjax.pipelines.vision import ImageProcessor
from wanjax.pipelines.wan import WanConfigs, WanPipeline
from wanjax.schedulers import from_config
from wanjax.sharding import Layout, choose_axes, find_rules, make_mesh, parse_mesh
from wanjax.sources import Source, open_source, read_json

NANO = Path(__file__).parent / "nano"
OFFICIAL_NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，"
    "残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，"
    "三条腿，背景人很多，倒着走"
)
Progress = Callable[[str, int, int], Any]


@dataclass(frozen=True)
class Preset:
    """A published checkpoint: where it is, what it is, its licence, and the settings its authors publish.

    `loras` are merged into it; `scheduler` is a scheduler_config.json in place of the checkpoint's own.
    """

    name: str
    source: str
    about: str
    transformer_parameters: int
    licence: str
    param_dtype: str
    defaults: Settings
    loras: tuple[str, ...] = ()
    scheduler: Mapping[str, Any] | None = None


_T2V_1_3B = Preset(
    name="wan2.1-t2v-1.3b",
    source="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    about="text to video, 480p",
    transformer_parameters=1_418_996_800,
    licence="Apache-2.0",
    param_dtype="bfloat16",
    defaults=Settings(
        model="wan2.1-t2v-1.3b",
        prompt="",
        negative_prompt=OFFICIAL_NEGATIVE_PROMPT,
        height=480,
        width=832,
        frames=81,
        fps=16,
        steps=50,
        guidance_scale=5.0,
        guidance_scale_2=None,
        boundary=None,
        flow_shift=5.0,
        sigmas="official",
        seed=42,
        dtype="bfloat16",
        resize="crop",
        strength=0.8,
    ),
)
_T2V_A14B = replace(
    _T2V_1_3B,
    name="wan2.2-t2v-a14b",
    source="Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    about="text to video, 480p and 720p; two experts of as many parameters each",
    transformer_parameters=14_288_491_584,
    defaults=replace(
        _T2V_1_3B.defaults,
        model="wan2.2-t2v-a14b",
        height=720,
        width=1280,
        steps=40,
        guidance_scale=4.0,  # of much noise; the official pair, (3.0, 4.0), begins with that of little
        guidance_scale_2=3.0,
        boundary=0.875,
        flow_shift=12.0,
    ),
)
_I2V_A14B = replace(
    _T2V_A14B,
    name="wan2.2-i2v-a14b",
    source="Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    about="image to video, 480p and 720p; two experts of as many parameters each",
    transformer_parameters=14_288_901_184,
    defaults=replace(
        _T2V_A14B.defaults,
        model="wan2.2-i2v-a14b",
        guidance_scale=3.5,
        guidance_scale_2=3.5,
        boundary=0.9,
        flow_shift=5.0,
    ),
)
_TI2V_5B = replace(
    _T2V_1_3B,
    name="wan2.2-ti2v-5b",
    source="Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    about="text and image to video, 704p",
    transformer_parameters=4_999_787_712,
    defaults=replace(_T2V_1_3B.defaults, model="wan2.2-ti2v-5b", height=704, width=1280, frames=121, fps=24),
)
_I2V_480P = replace(
    _T2V_1_3B,
    name="wan2.1-i2v-14b-480p",
    source="Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
    about="image to video, 480p",
    transformer_parameters=16_394_878_784,
    defaults=replace(
        _T2V_1_3B.defaults,
        model="wan2.1-i2v-14b-480p",
        negative_prompt="镜头晃动，" + OFFICIAL_NEGATIVE_PROMPT,
        steps=40,
        flow_shift=3.0,
    ),
)
_FLF2V = replace(
    _I2V_480P,
    name="wan2.1-flf2v-14b",
    source="Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",
    about="first and last frame to video, 720p",
    transformer_parameters=16_395_536_704,
    defaults=replace(
        _I2V_480P.defaults,
        model="wan2.1-flf2v-14b",
        negative_prompt="镜头切换，镜头晃动，" + OFFICIAL_NEGATIVE_PROMPT,
        height=720,
        width=1280,
        steps=50,
        flow_shift=16.0,
    ),
)
_VACE = replace(
    _T2V_1_3B,
    name="wan2.1-vace-1.3b",
    source="Wan-AI/Wan2.1-VACE-1.3B-diffusers",
    about="video from a control clip, a mask and reference pictures, 480p",
    transformer_parameters=2_153_972_032,
    defaults=replace(_T2V_1_3B.defaults, model="wan2.1-vace-1.3b", flow_shift=16.0),
)
PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="nano",
            source=str(NANO),
            about="text and image to video, 64 × 64, one coloured shape; ships with wanjax and runs on any CPU",
            transformer_parameters=2_380_032,
            licence="Apache-2.0",
            param_dtype="float32",
            defaults=_T2V_1_3B.defaults.updated(
                read_json(NANO / "generation_config.json", missing={}) | {"model": "nano"}
            ),
        ),
        _T2V_1_3B,
        replace(
            _T2V_1_3B,
            name="wan2.1-t2v-14b",
            source="Wan-AI/Wan2.1-T2V-14B-Diffusers",
            about="text to video, 480p and 720p",
            transformer_parameters=14_288_491_584,
            defaults=replace(_T2V_1_3B.defaults, model="wan2.1-t2v-14b", height=720, width=1280),
        ),
        _I2V_480P,
        replace(
            _I2V_480P,
            name="wan2.1-i2v-14b-720p",
            source="Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
            about="image to video, 720p",
            defaults=replace(_I2V_480P.defaults, model="wan2.1-i2v-14b-720p", height=720, width=1280, flow_shift=5.0),
        ),
        _FLF2V,
        _VACE,
        replace(
            _VACE,
            name="wan2.1-vace-14b",
            source="Wan-AI/Wan2.1-VACE-14B-diffusers",
            about="video from a control clip, a mask and reference pictures, 480p and 720p",
            transformer_parameters=17_337_592_896,
            defaults=replace(_VACE.defaults, model="wan2.1-vace-14b", height=720, width=1280),
        ),
        _T2V_A14B,
        _I2V_A14B,
        _TI2V_5B,
    )
}


def _in_four_steps(name: str, authors: str, *loras: str, **settings: Any) -> Preset:
    """A preset with a LoRA that needs 4 steps and no guidance.

    Euler, at the noise levels 1, 0.75, 0.5, 0.25 shifted by 5: timesteps 1000, 937.5, 833.3 and 625. Of two experts
    each has two steps. As in configs/distill/ and models/schedulers/wan/step_distill/ of ModelTC/LightX2V, and in
    wan/configs/ and wan/utils/fm_solvers_euler.py of ModelTC/Wan2.2-Lightning.
    """
    preset, few = PRESETS[name], f"{name}-4step"
    chosen = {"model": few, "steps": 4, "guidance_scale": 1.0, "flow_shift": 5.0}
    return replace(
        preset,
        name=few,
        about=f"{preset.about.partition(',')[0]} in 4 steps, with a LoRA by {authors}",
        defaults=preset.defaults.updated(chosen | settings),
        loras=loras,
        scheduler={"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 5.0},
    )


_X2V, _480P = "lightx2v/Wan2.1-Distill-Loras/wan2.1", {"height": 480, "width": 832}
_LIGHTNING, _RANK = "lightx2v/Wan2.2-Lightning/Wan2.2", "A14B-4steps-lora-rank64-Seko"
PRESETS |= {
    preset.name: preset
    for preset in (
        _in_four_steps("wan2.1-t2v-14b", "LightX2V", f"{_X2V}_t2v_14b_lora_rank64_lightx2v_4step.safetensors", **_480P),
        _in_four_steps("wan2.1-i2v-14b-480p", "LightX2V", f"{_X2V}_i2v_lora_rank64_lightx2v_4step.safetensors"),
        _in_four_steps(
            "wan2.2-t2v-a14b",
            "Lightning",
            *(f"{name}={_LIGHTNING}-T2V-{_RANK}-V1.1/{name}_noise_model.safetensors" for name in ("high", "low")),
            guidance_scale_2=1.0,
        ),
        _in_four_steps(
            "wan2.2-i2v-a14b",
            "Lightning",
            *(f"{name}={_LIGHTNING}-I2V-{_RANK}-V1/{name}_noise_model.safetensors" for name in ("high", "low")),
            guidance_scale_2=1.0,
        ),
    )
}
# What a checkpoint that is not known by name takes its settings from, by its task and whether it has two experts; Wan
# 2.1 1.3B if it is not here.
LIKE = {
    (TEXT_TO_VIDEO, True): _T2V_A14B,
    (FIRST_FRAME_TO_VIDEO, False): _TI2V_5B,
    (IMAGE_TO_VIDEO, False): _I2V_480P,
    (IMAGE_TO_VIDEO, True): _I2V_A14B,
    (ATTENDED_IMAGE_TO_VIDEO, False): _I2V_480P,
    (FIRST_AND_LAST_FRAME, False): _FLF2V,
    (CONTROLLED_VIDEO, False): _VACE,
}


def load(
    model: str | Path = "nano",
    *,
    dtype: str | None = None,
    param_dtype: str | None = None,
    attention: str | None = None,
    revision: str | None = None,
    mesh: Mesh | str | None = None,
    rules: str = "fsdp",
    lora: str | Lora | Sequence[str | Lora] = (),
    progress: Progress | None = None,
    note: Note | None = None,
) -> WanPipeline:
    """A pipeline for a known name, a Hugging Face id or a folder in the diffusers layout.

    Networks are loaded when they are first used. They compute in `dtype`, "bfloat16" or "float32" (None: float32 on a
    CPU, which has no fast bfloat16, and `param_dtype` elsewhere), and keep weights in `param_dtype` (None: bfloat16 for
    published checkpoints, and as they are stored for others); the VAE is in float32, as in the reference. `attention`
    names the transformer's implementation of it (None picks by platform and shape). `mesh` is the devices to spread
    over: from `wanjax.make_mesh`, or such as "dp=2,sp=1,tp=4", or "auto", which takes all that are of use (None: one
    device of a CPU, and "auto" elsewhere); `rules`, "fsdp" or "tp", say how. `lora` is merged into the transformer as
    it is read: a file, or FILE:STRENGTH, or several; FILE may be OWNER/NAME/FILE on the hub, and of two experts
    `high=FILE` and `low=FILE` mean one. `progress(part, done, total)` is told the bytes read, `note(sentence)` what of
    each LoRA was merged. Raises WanjaxError where the checkpoint or a LoRA cannot be found or does not fit, or there is
    no such mesh, UnsupportedError where the attention that is named cannot be that of this transformer here.
    """
    named(attention)
    enable_compile_cache()
    source, preset = find(model, revision)
    check_pipeline(source.index, source.name)
    if loras := [*(preset.loras if preset else ()), *([lora] if isinstance(lora, str | Lora) else lora)]:
        source = AdaptedSource(source, [x if isinstance(x, Lora) else Lora.parse(x) for x in loras], note)
    transformer, vae = network(source, "transformer"), network(source, "vae")
    experts = "transformer_2" in components(source.index)
    if experts and network(source, "transformer_2").config != transformer.config:
        raise WanjaxError(f"the two transformers of {source.name} differ in their config.json: experts are alike")
    configs = WanConfigs(transformer=transformer.config, vae=vae.config, experts=experts)
    task = task_of(source.index, configs.transformer, configs.vae)
    kept = param_dtype or (preset.param_dtype if preset else None)  # None: each network's own
    defaults = preset.defaults if preset else _defaults(source, task, experts, str(model))
    boundary = (source.index.get("boundary_ratio") or defaults.boundary) if experts else None
    guidance_scale_2 = defaults.guidance_scale_2 if experts else None
    defaults = replace(defaults, boundary=boundary, guidance_scale_2=guidance_scale_2)
    usual = "float32" if jax.default_backend() == "cpu" else kept or _stored_dtype(source, "transformer")
    defaults = replace(defaults, dtype=dtype or usual)
    layout = _layout(mesh, rules, configs, defaults)
    if attention is not None:  # an answer before anything is read
        some = jax.ShapeDtypeStruct((1, 256, configs.transformer.heads, configs.transformer.head_dim), defaults.dtype)
        choose(some, some, some, implementation=attention)
    build = partial(_build, source, jnp.dtype(defaults.dtype), kept, layout, progress)
    loaders = {
        "tokenizer": lambda: Tokenizer.load(source.files("tokenizer")[0].parent),
        "text_encoder": lambda: build("text_encoder", network(source, "text_encoder")),
        "image_processor": lambda: ImageProcessor.load(source.files("image_processor")[0].parent),
        "image_encoder": lambda: build("image_encoder", network(source, "image_encoder")),
        "transformer": lambda: build("transformer", transformer, attention=attention),
        "transformer_2": lambda: build("transformer_2", transformer, attention=attention),
        "vae": lambda: build("vae", vae),
        "scheduler": lambda: from_config((preset and preset.scheduler) or source.config("scheduler")),
    }
    return WanPipeline(Parts(loaders), configs, defaults, task, layout)


def _layout(mesh: Mesh | str | None, rules: str, configs: WanConfigs, settings: Settings) -> Layout | None:
    """How arrays lie on the devices; a mesh that is to be found is one that suits a video of these settings."""
    found = find_rules(rules)
    if mesh is None and jax.default_backend() != "cpu" and jax.device_count() > 1:
        mesh = "auto"
    if mesh == "auto":
        tokens = configs.tokens(settings)
        guided = settings.guidance_scale > 1
        axes = choose_axes(jax.device_count(), heads=configs.transformer.heads, tokens=tokens, guided=guided)
        mesh = make_mesh(*axes, devices=jax.devices()[: math.prod(axes)])
    elif isinstance(mesh, str):
        mesh = make_mesh(*parse_mesh(mesh))
    return None if mesh is None else Layout(mesh, found)


def find(model: str | Path, revision: str | None = None) -> tuple[Source, Preset | None]:
    """The checkpoint for a known name or any that `open_source` opens, and the preset where it is a published one.

    Raises WanjaxError where there is none.
    """
    preset = _published(str(model))
    if preset is None and not Path(model).exists() and "/" not in str(model):
        raise WanjaxError(_unknown(str(model)))
    source = open_source(preset.source if preset else model, revision)
    if preset is None and (preset := _published(source.origin)):  # converted, and known by another name here
        preset = replace(preset, defaults=replace(preset.defaults, model=str(model)))
    return source, preset


def _published(name: str) -> Preset | None:
    """The preset of a name, or of the repository that it is all of."""
    whole = {preset.source: preset for preset in reversed(PRESETS.values()) if not preset.loras}
    return PRESETS.get(name) or whole.get(name)


def _unknown(name: str) -> str:
    near = get_close_matches(name, PRESETS, n=3, cutoff=0.5)
    told = f"a near name is {' or '.join(near)}" if near else "`wanjax models` lists the names"
    return f"no model is named {name!r}, nor is there such a folder or file: {told}, and a hub id is OWNER/NAME"


def _defaults(source: Source, task: Task, experts: bool, name: str) -> Settings:
    """The settings of a known model of the task, with the checkpoint's own flow shift and its own defaults file."""
    scheduler = source.config("scheduler")
    shift = scheduler.get("flow_shift", scheduler.get("shift"))
    own = read_json(source.root / "generation_config.json", missing={})
    return LIKE.get((task, experts), _T2V_1_3B).defaults.updated({"flow_shift": shift} | own | {"model": name})


def _stored_dtype(source: Source, name: str) -> str:
    """The dtype in which most of a network's bytes are; float32 if that is not one we keep weights in."""
    weights, stored = source.weights(name), Counter()
    for key in weights.keys():  # noqa: SIM118
        stored[str(weights.spec(key).dtype)] += weights.spec(key).nbytes
    [(dtype, _)] = stored.most_common(1)
    return dtype if dtype in ("bfloat16", "float32") else "float32"


def _build(
    source: Source,
    dtype: DTypeLike,
    param_dtype: str | None,
    layout: Layout | None,
    progress: Progress | None,
    name: str,
    network: Network,
    **options: Any,
) -> nnx.Module:
    """A network with its weights."""
    if network.float32:
        dtype, param_dtype = jnp.float32, "float32"
    kept = jnp.dtype(param_dtype or _stored_dtype(source, name))
    abstract = placed(network.abstract(dtype=dtype, param_dtype=kept, **options), layout)
    told = None if progress is None else partial(progress, name)
    return source.load(name, abstract, network.rules, ignore=network.unused, progress=told)
