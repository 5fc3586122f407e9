# SPDX-License-Identifier: Apache-2.0
"""Wan Fun InP from no picture, one and two, against a pipeline in PyTorch, on diffusers' networks.

diffusers has no such pipeline. The one here was written from its publisher's description: docs/guides/picture.md.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline, WanTransformer3DModel
from transformers import CLIPVisionConfig, CLIPVisionModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

import wanjax
from tests.parity.references import (
    MAX_LATENT_ERROR,
    NEGATIVE_PROMPT,
    PROMPT,
    emphasise_mlps,
    largest_error,
    randomise,
    small_components,
)
from tests.support.quick import quick
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError

pytestmark = pytest.mark.usefixtures("cached_programs")

HEIGHT, WIDTH, FRAMES, STEPS, SHIFT, GUIDANCE = 32, 64, 9, 3, 5.0, 6.0
STATISTICS = {"z_dim": 4, "latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 0.7, 2.0, 1.0]}
RESIDUAL = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
RANDOM = np.random.default_rng(0)
FIRST, LAST = RANDOM.integers(0, 256, (2, HEIGHT, WIDTH, 3), dtype=np.uint8)
PICTURES = {"none": {}, "first": {"image": FIRST}, "first and last": {"image": FIRST, "last_image": LAST}}
KINDS = ("with CLIP", "plain", "residual")  # Wan 2.1, Wan 2.2 A14B and Wan 2.2 5B


class Components(NamedTuple):
    transformer: Any
    vae: Any
    vision: Any
    processor: Any

    @property
    def factor(self) -> int:
        return 16 if self.vae.config.is_residual else 8


def make_components(kind: str) -> Components:
    torch.manual_seed(0)
    clip_sizes = {"image_dim": 40, "added_kv_proj_dim": 96} if kind == "with CLIP" else {}
    transformer = WanTransformer3DModel(
        num_attention_heads=3, attention_head_dim=32, in_channels=12, out_channels=4, text_dim=48, freq_dim=64,
        ffn_dim=160, num_layers=2, **clip_sizes,
    ).eval()  # fmt: skip
    residual = RESIDUAL if kind == "residual" else {}
    vae = AutoencoderKLWan(base_dim=8, num_res_blocks=1, **STATISTICS, **residual).eval()
    vision = processor = None
    if clip_sizes:
        vision = CLIPVisionModel(
            CLIPVisionConfig(
                hidden_size=40, intermediate_size=80, num_hidden_layers=3, num_attention_heads=2, image_size=28,
                patch_size=7, hidden_act="gelu",
            )
        ).eval()  # fmt: skip
        processor = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    for seed, network in enumerate(filter(None, (transformer, vae, vision))):
        randomise(network, seed)
    emphasise_mlps(transformer)
    return Components(transformer, vae, vision, processor)


def save_pipeline(components: Components, folder: Path) -> None:
    pipeline_components = small_components(folder / "tokenizer_of_components") | {
        "vae": components.vae,
        "transformer": components.transformer,
    }
    pipeline_components["scheduler"] = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    pipe = WanImageToVideoPipeline(
        image_encoder=components.vision, image_processor=components.processor, **pipeline_components
    )
    pipe.save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text()) | {"_class_name": "WanFunInpaintPipeline"}
    (folder / "model_index.json").write_text(json.dumps(index))


def pixels(picture: np.ndarray) -> torch.Tensor:
    """Return a picture as [3 H W] in [-1, 1]."""
    return torch.from_numpy(picture).permute(2, 0, 1).float() / 127.5 - 1


def statistics(vae: Any) -> tuple[torch.Tensor, torch.Tensor]:
    mean, std = (torch.tensor(vae.config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    return mean, std


@torch.no_grad()
def reference(
    components: Components, texts: list[torch.Tensor], noise: torch.Tensor, pictures: dict
) -> list[np.ndarray]:
    """Return the latents after every step, for the features of the prompt and of the negative one."""
    latents, (_, _, count, height, width) = noise, noise.shape
    mask, clip = torch.zeros(1, 1, FRAMES, height, width), torch.zeros(1, 3, FRAMES, HEIGHT, WIDTH)
    for frame, name in ((0, "image"), (FRAMES - 1, "last_image")):
        if name in pictures:
            mask[:, :, frame], clip[0, :, frame] = 1, pixels(pictures[name])
    mask_channels = torch.cat([mask[:, :, :1].repeat(1, 1, 4, 1, 1), mask[:, :, 1:]], dim=2)
    mask_channels = mask_channels.view(1, count, 4, height, width).transpose(1, 2)
    masked = torch.zeros_like(noise)
    if pictures:
        mean, std = statistics(components.vae)
        masked = (components.vae.encode(clip).latent_dist.mode() - mean) / std
    condition = torch.cat([mask_channels, masked], dim=1)

    image_features = None
    if components.vision is not None:
        image_features = torch.zeros(1, 17, 40)
        if pictures:
            resized = torch.nn.functional.interpolate(pixels(pictures["image"])[None], (28, 28), mode="bicubic")
            scale = [
                torch.tensor(x).view(1, 3, 1, 1)
                for x in (components.processor.image_mean, components.processor.image_std)
            ]
            resized = (resized / 2 + 0.5 - scale[0]) / scale[1]
            image_features = components.vision(resized, output_hidden_states=True).hidden_states[-2]

    scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    scheduler.set_timesteps(STEPS)
    noisy = torch.ones(1, 1, count, height, width)  # 0 where the latents stay free of noise
    if components.factor == 16 and pictures:
        noisy[:, :, 0] = 0
    latents, steps = noisy * latents + (1 - noisy) * masked, []
    for t in scheduler.timesteps:
        timestep = t.view(1)
        if components.factor == 16:
            timestep = (noisy[0, 0, :, ::2, ::2] * t).reshape(1, -1)
        predictions = [
            components.transformer(
                torch.cat([latents, condition], dim=1),
                timestep,
                text,
                encoder_hidden_states_image=image_features,
                return_dict=False,
            )[0]
            for text in texts
        ]
        prediction = predictions[1] + GUIDANCE * (predictions[0] - predictions[1])
        latents = scheduler.step(prediction, t, latents, return_dict=False)[0]
        latents = noisy * latents + (1 - noisy) * masked
        steps.append(latents.numpy())
    return steps


CASES = [(kind, pictures) for kind in KINDS for pictures in PICTURES]


@pytest.mark.parametrize(
    ("kind", "picture_names"),
    quick([("with CLIP", "first and last")], CASES),
)
def test_every_step_equals_that_of_the_reference(kind, picture_names, tmp_path):
    components, pictures = make_components(kind), PICTURES[picture_names]
    save_pipeline(components, tmp_path)
    pipe = wanjax.load(tmp_path)
    settings: dict[str, Any] = {"size": (HEIGHT, WIDTH), "frames": FRAMES}
    encoded = pipe.encode(PROMPT, NEGATIVE_PROMPT, **pictures, **settings)
    assert (encoded.condition is None) == (not pictures)
    shape = (1, 4, (FRAMES + 3) // 4, HEIGHT // components.factor, WIDTH // components.factor)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    texts = [torch.tensor(np.asarray(x)) for x in encoded[:2]]
    exact, latents = reference(components, texts, noise, pictures), []
    final_latents = pipe.denoise(
        encoded, steps=STEPS, guidance_scale=GUIDANCE, flow_shift=SHIFT, sigmas="diffusers",
        noise=jnp.asarray(noise.numpy()), callback=lambda step: latents.append(np.asarray(step.latents)), **settings,
    )  # fmt: skip
    assert len(latents) == STEPS
    num_fixed = int(components.factor == 16 and bool(pictures))  # latent frames whose noise has no effect
    assert (
        largest_error([x[:, :, num_fixed:] for x in latents], [x[:, :, num_fixed:] for x in exact]) <= MAX_LATENT_ERROR
    )
    assert largest_error([np.asarray(final_latents)], exact[-1:]) <= MAX_LATENT_ERROR


def test_a_last_picture_needs_a_first(tmp_path):
    save_pipeline(make_components("plain"), tmp_path)
    pipe = wanjax.load(tmp_path)
    with pytest.raises(WanjaxError, match=line_with_words("last image first")):
        pipe.encode(PROMPT, last_image=LAST, size=(HEIGHT, WIDTH), frames=FRAMES)
