# SPDX-License-Identifier: Apache-2.0
"""Whole pipelines from pictures against diffusers' WanImageToVideoPipeline, with the same checkpoint and noise."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanTransformer3DModel
from PIL import Image
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

import wanjax
from tests.parity.references import (
    MAX_LATENT_ERROR,
    NEGATIVE_PROMPT,
    PROMPT,
    emphasise_mlps,
    largest_error,
    psnr,
    randomise,
    relative_l2,
    small_components,
)
from tests.support.quick import quick

pytestmark = pytest.mark.usefixtures("cached_programs")

HEIGHT, WIDTH, FRAMES, STEPS, GUIDANCE = 32, 48, 9, 3, 5.0
KINDS = {  # options of the transformer, by kind
    "with CLIP": {"image_dim": 40, "added_kv_proj_dim": 96},
    "first and last": {"image_dim": 40, "added_kv_proj_dim": 96, "pos_embed_seq_len": 2 * 17},
    "condition only": {},
}


# test_wan22_pipeline.py has a quick video with the condition only
@pytest.fixture(scope="module", params=quick([kind for kind in KINDS if kind != "condition only"], KINDS))
def reference(request, tmp_path_factory) -> WanImageToVideoPipeline:
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=40, intermediate_size=80, num_hidden_layers=3, num_attention_heads=2, image_size=28, patch_size=7,
        hidden_act="gelu",
    )  # fmt: skip
    parts = small_components(tmp_path_factory.mktemp("tokenizer"))
    networks = {
        "transformer": WanTransformer3DModel(
            num_attention_heads=3, attention_head_dim=32, in_channels=12, out_channels=4, text_dim=48, freq_dim=64,
            ffn_dim=160, num_layers=2, **KINDS[request.param],
        )
    }  # fmt: skip
    if KINDS[request.param]:
        networks["image_encoder"] = CLIPVisionModelWithProjection(vision)  # as published
        processor = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    else:
        processor = None
    for seed, network in enumerate(networks.values()):
        randomise(network.eval(), seed)
    emphasise_mlps(networks["transformer"])
    pipe = WanImageToVideoPipeline(image_processor=processor, **parts, **networks)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    reference.save_pretrained(folder)
    return folder


NOISE = torch.randn(1, 4, (FRAMES + 3) // 4, HEIGHT // 8, WIDTH // 8, generator=torch.Generator().manual_seed(7))
SIZES = {  # (height, width) of the first and the last picture; the video's is 32 × 48
    "the video's size": ((HEIGHT, WIDTH), (HEIGHT, WIDTH)),
    "portrait": ((61, 37), (97, 41)),
    "landscape": ((29, 83), (31, 67)),
    "portrait, then landscape": ((53, 31), (27, 101)),
}
Inputs = dict[str, np.ndarray]


@pytest.fixture(params=quick(["portrait, then landscape"], SIZES))
def inputs(request, reference) -> Inputs:
    """Return the first picture, and a last one unless the transformer attends to a single picture."""
    config = reference.transformer.config
    count = 1 if config.image_dim and config.pos_embed_seq_len is None else 2
    sizes = zip(["image", "last_image"][:count], SIZES[request.param], strict=False)
    random = np.random.default_rng(list(SIZES).index(request.param))
    return {name: random.integers(0, 256, (*size, 3), dtype=np.uint8) for name, size in sizes}


@torch.no_grad()
def expected_video(pipe: WanImageToVideoPipeline, options: Inputs) -> tuple[list[np.ndarray], np.ndarray]:
    """Return diffusers' latents after every step, and its frames."""
    latents = []
    frames = pipe(
        prompt=PROMPT, negative_prompt=NEGATIVE_PROMPT, height=HEIGHT, width=WIDTH, num_frames=FRAMES,
        num_inference_steps=STEPS, guidance_scale=GUIDANCE, latents=NOISE,
        callback_on_step_end=lambda pipe, i, t, values: latents.append(values["latents"].numpy()) or {},
        **{name: Image.fromarray(picture) for name, picture in options.items()},
    ).frames[0]  # fmt: skip
    return latents, frames


@torch.no_grad()
def conditions(pipe: WanImageToVideoPipeline, options: Inputs) -> tuple[np.ndarray, np.ndarray | None]:
    """Return diffusers' condition that is concatenated with the latents, and its features of the images."""
    images = [Image.fromarray(picture) for picture in options.values()]
    pixels = [pipe.video_processor.preprocess(image, height=HEIGHT, width=WIDTH) for image in images]
    _, condition = pipe.prepare_latents(
        pixels[0], 1, 4, HEIGHT, WIDTH, FRAMES, torch.float32, None, None, NOISE, *pixels[1:]
    )
    uses_clip = pipe.transformer.config.image_dim
    return condition.numpy(), pipe.encode_image(images).numpy().reshape(1, -1, 40) if uses_clip else None


def test_every_step_and_every_frame_equal_those_of_diffusers(reference, folder, inputs):
    """Pictures of other proportions are stretched for the autoencoder, but not for CLIP."""
    pipe = wanjax.load(folder)
    settings = {"size": (HEIGHT, WIDTH), "frames": FRAMES}
    embeddings = pipe.encode(PROMPT, NEGATIVE_PROMPT, **inputs, resize="stretch", follow="diffusers", **settings)
    condition, image_embeds = conditions(reference, inputs)
    np.testing.assert_array_equal(embeddings.condition[:, :4], condition[:, :4])  # the mask
    assert relative_l2(embeddings.condition[:, 4:], condition[:, 4:]) <= 1e-5
    assert (embeddings.image_embeds is None) == (image_embeds is None)
    assert image_embeds is None or relative_l2(embeddings.image_embeds, image_embeds) <= 1e-5

    latents = []
    final_latents = pipe.denoise(
        embeddings, steps=STEPS, guidance_scale=GUIDANCE, flow_shift=3.0, sigmas="diffusers",
        noise=jnp.asarray(NOISE.numpy()), callback=lambda step: latents.append(np.asarray(step.latents)), **settings,
    )  # fmt: skip
    exact, frames = expected_video(reference, inputs)
    assert len(latents) == STEPS
    assert largest_error(latents, exact) <= MAX_LATENT_ERROR
    assert psnr(pipe.decode(final_latents, jnp.float32), frames) >= 60
