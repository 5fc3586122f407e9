# SPDX-License-Identifier: Apache-2.0
"""Wan Fun InP from no picture, one and two, against its pipeline as its publisher describes it, on diffusers' networks.

diffusers has no such pipeline. The one here was written from the description in docs/guides/picture.md, in PyTorch.
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
from tests.parity.references import BAR, NEGATIVE_PROMPT, PROMPT, emphasise_mlps, largest_error, randomise, small_parts
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
KINDS = ("attended", "plain", "residual")  # Wan 2.1, Wan 2.2 A14B and Wan 2.2 5B


class Parts(NamedTuple):
    transformer: Any
    vae: Any
    vision: Any
    processor: Any

    @property
    def factor(self) -> int:
        return 16 if self.vae.config.is_residual else 8


def parts_of(kind: str) -> Parts:
    torch.manual_seed(0)
    seen = {"image_dim": 40, "added_kv_proj_dim": 96} if kind == "attended" else {}
    transformer = WanTransformer3DModel(
        num_attention_heads=3, attention_head_dim=32, in_channels=12, out_channels=4, text_dim=48, freq_dim=64,
        ffn_dim=160, num_layers=2, **seen,
    ).eval()  # fmt: skip
    residual = RESIDUAL if kind == "residual" else {}
    vae = AutoencoderKLWan(base_dim=8, num_res_blocks=1, **STATISTICS, **residual).eval()
    vision = processor = None
    if seen:
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
    return Parts(transformer, vae, vision, processor)


def save(parts: Parts, folder: Path) -> None:
    parts_of_pipeline = small_parts(folder / "tokenizer_of_parts") | {
        "vae": parts.vae,
        "transformer": parts.transformer,
    }
    parts_of_pipeline["scheduler"] = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    pipe = WanImageToVideoPipeline(image_encoder=parts.vision, image_processor=parts.processor, **parts_of_pipeline)
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
def reference(parts: Parts, texts: list[torch.Tensor], noise: torch.Tensor, pictures: dict) -> list[np.ndarray]:
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
        mean, std = statistics(parts.vae)
        masked = (parts.vae.encode(clip).latent_dist.mode() - mean) / std
    condition = torch.cat([mask_channels, masked], dim=1)

    seen = None
    if parts.vision is not None:
        seen = torch.zeros(1, 17, 40)
        if pictures:
            resized = torch.nn.functional.interpolate(pixels(pictures["image"])[None], (28, 28), mode="bicubic")
            scale = [torch.tensor(x).view(1, 3, 1, 1) for x in (parts.processor.image_mean, parts.processor.image_std)]
            resized = (resized / 2 + 0.5 - scale[0]) / scale[1]
            seen = parts.vision(resized, output_hidden_states=True).hidden_states[-2]

    scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    scheduler.set_timesteps(STEPS)
    noisy = torch.ones(1, 1, count, height, width)  # 0 where the latents are kept free of noise
    if parts.factor == 16 and pictures:
        noisy[:, :, 0] = 0
    latents, steps = noisy * latents + (1 - noisy) * masked, []
    for t in scheduler.timesteps:
        times = t.view(1)
        if parts.factor == 16:
            times = (noisy[0, 0, :, ::2, ::2] * t).reshape(1, -1)
        guided = [
            parts.transformer(
                torch.cat([latents, condition], dim=1), times, text, encoder_hidden_states_image=seen, return_dict=False
            )[0]
            for text in texts
        ]
        prediction = guided[1] + GUIDANCE * (guided[0] - guided[1])
        latents = scheduler.step(prediction, t, latents, return_dict=False)[0]
        latents = noisy * latents + (1 - noisy) * masked
        steps.append(latents.numpy())
    return steps


CASES = [(kind, pictures) for kind in KINDS for pictures in PICTURES]


@pytest.mark.parametrize(
    ("kind", "places"),
    quick([("attended", "none"), ("attended", "first and last"), ("residual", "first and last")], CASES),
)
def test_every_step(kind, places, tmp_path):
    parts, pictures = parts_of(kind), PICTURES[places]
    save(parts, tmp_path)
    pipe = wanjax.load(tmp_path)
    settings: dict[str, Any] = {"size": (HEIGHT, WIDTH), "frames": FRAMES}
    encoded = pipe.encode(PROMPT, NEGATIVE_PROMPT, **pictures, **settings)
    assert (encoded.condition is None) == (not pictures)
    shape = (1, 4, (FRAMES + 3) // 4, HEIGHT // parts.factor, WIDTH // parts.factor)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    texts = [torch.tensor(np.asarray(x)) for x in encoded[:2]]
    exact, latents = reference(parts, texts, noise, pictures), []
    last = pipe.denoise(
        encoded, steps=STEPS, guidance_scale=GUIDANCE, flow_shift=SHIFT, sigmas="diffusers",
        noise=jnp.asarray(noise.numpy()), callback=lambda step: latents.append(np.asarray(step.latents)), **settings,
    )  # fmt: skip
    assert len(latents) == STEPS
    num_fixed = int(parts.factor == 16 and bool(pictures))  # latent frames whose noise counts for nothing
    assert largest_error([x[:, :, num_fixed:] for x in latents], [x[:, :, num_fixed:] for x in exact]) <= BAR
    assert largest_error([np.asarray(last)], exact[-1:]) <= BAR


def test_a_last_picture_needs_a_first(tmp_path):
    save(parts_of("plain"), tmp_path)
    pipe = wanjax.load(tmp_path)
    with pytest.raises(WanjaxError, match=line_with_words("last image first")):
        pipe.encode(PROMPT, last_image=LAST, size=(HEIGHT, WIDTH), frames=FRAMES)
