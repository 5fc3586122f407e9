# SPDX-License-Identifier: Apache-2.0
"""The video autoencoder and its parts against diffusers' AutoencoderKLWan, on the same small random weights."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResidualUpBlock, patchify
from flax import nnx

from tests.parity.references import channels_last, randomise, relative_l2, run, submodule, wan_vae
from tests.support.quick import quick
from wanjax.layers.patch import depth_to_space, space_to_depth
from wanjax.layers.tiling import Tiling
from wanjax.models.wan.config import T2V_1_3B
from wanjax.models.wan.vae import WanVAE
from wanjax.pipelines.components import Components
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.wan.tasks import TextToVideo
from wanjax.registry import presets

BOUND = 1e-5
FRAMES = quick([1, 5, 17], [1, 5, 17, 33])
TILED_FRAMES = quick([9], [1, 9, 13])  # a first chunk, and later ones with a cache
SIZE = (32, 32)
LATENTS_MEAN, LATENTS_STD = [0.1, -0.2, 0.3, 0.0], [1.5, 0.7, 2.0, 1.0]
STATISTICS = {"z_dim": 4, "latents_mean": LATENTS_MEAN, "latents_std": LATENTS_STD}
KINDS = {
    "2.1": {"base_dim": 8, "num_res_blocks": 1},
    "2.2": {
        "base_dim": 8, "decoder_base_dim": 12, "num_res_blocks": 1, "is_residual": True, "patch_size": 2,
        "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16,
    },
}  # fmt: skip
ENCODE_TILING = Tiling(32, 24)
DECODE_TILING = {"2.1": Tiling(32, 24), "2.2": Tiling(64, 48)}
TILED_SIZES = {"row": (24, 56), "column": (40, 24), "both": (40, 56)}
"""Sizes in cells of up to 2 × 3 tiles, smaller at the edges, with all four kinds of seams; 2.2 encodes its cells."""


class Models(NamedTuple):
    kind: str
    reference: AutoencoderKLWan
    vae: WanVAE


@pytest.fixture(scope="module", params=KINDS)
def models(request) -> Models:
    torch.manual_seed(0)
    reference = AutoencoderKLWan(**KINDS[request.param], **STATISTICS).eval()
    randomise(reference, seed=1)
    return Models(request.param, reference, wan_vae(reference))


@pytest.fixture(scope="module")
def pipe(models) -> Pipeline:
    """Return a pipeline of only the autoencoder."""
    shapes = TextToVideo(transformer=T2V_1_3B, vae=models.vae.config)
    return Pipeline(Components({"vae": lambda make_room: models.vae}), shapes, presets()["wan2.1-t2v-1.3b"].defaults)


@contextmanager
def reference_tiling(reference: AutoencoderKLWan, tiling: Tiling) -> Iterator[None]:
    reference.enable_tiling(tiling.size, tiling.size, tiling.stride, tiling.stride)
    yield
    reference.disable_tiling()


def video(frames: int, size: tuple[int, int]) -> torch.Tensor:
    """Return random videos [B C T H W] in [0, 1]."""
    return torch.rand(1, 3, frames, *size, generator=torch.Generator().manual_seed(frames))


def latents(models: Models, frames: int, size: tuple[int, int]) -> torch.Tensor:
    """Return the reference's normalised latents of a random video."""
    cells = (pixels // models.vae.config.spatial_factor for pixels in size)
    return torch.randn(1, 4, (frames + 3) // 4, *cells, generator=torch.Generator().manual_seed(frames))


def statistics() -> list[torch.Tensor]:
    return [torch.tensor(values).view(1, -1, 1, 1, 1) for values in (LATENTS_MEAN, LATENTS_STD)]


@torch.no_grad()
def reference_latents(reference: AutoencoderKLWan, video: torch.Tensor) -> np.ndarray:
    """Return the reference's normalised latents [B C T H W]."""
    mean, std = statistics()
    pixels = (video * 2 - 1).to(reference.dtype)
    return ((reference.encode(pixels).latent_dist.mode().float() - mean) / std).numpy()


@torch.no_grad()
def reference_frames(reference: AutoencoderKLWan, latents: torch.Tensor) -> np.ndarray:
    """Return the reference's frames [B C T H W] in [-1, 1]."""
    mean, std = statistics()
    return reference.decode((latents * std + mean).to(reference.dtype)).sample.float().numpy()


def encode(pipe: Pipeline, video: torch.Tensor, tiling: Tiling | None = None) -> jax.Array:
    return pipe.encode_video(video[0].permute(1, 2, 3, 0).numpy(), tiling=tiling)


def decode(pipe: Pipeline, latents: torch.Tensor, tiling: Tiling | None = None) -> np.ndarray:
    frames = pipe.decode(jnp.asarray(latents.numpy()), jnp.float32, tiling=tiling)
    return frames.transpose(3, 0, 1, 2)[None] * 2 - 1


@pytest.mark.parametrize("frames", FRAMES)
def test_encoded_videos_equal_those_of_diffusers(models, pipe, frames):
    x = video(frames, SIZE)
    assert relative_l2(encode(pipe, x), reference_latents(models.reference, x)) <= BOUND


@pytest.mark.parametrize("frames", FRAMES)
def test_decoded_videos_equal_those_of_diffusers(models, pipe, frames):
    z = latents(models, frames, SIZE)
    assert relative_l2(decode(pipe, z), reference_frames(models.reference, z)) <= BOUND


def tiled_size(models: Models, tiles: str) -> tuple[int, int]:
    height, width = TILED_SIZES[tiles]
    return height * models.vae.config.patch, width * models.vae.config.patch


@pytest.mark.parametrize("tiles", quick(["row"], TILED_SIZES))
@pytest.mark.parametrize("frames", TILED_FRAMES)
@pytest.mark.parametrize("models", quick(["2.1"], KINDS), indirect=True)
def test_videos_encoded_in_tiles_equal_those_of_diffusers(models, pipe, frames, tiles):
    x = video(frames, tiled_size(models, tiles))
    with reference_tiling(models.reference, ENCODE_TILING):
        expected = reference_latents(models.reference, x)
    assert relative_l2(encode(pipe, x, ENCODE_TILING), expected) <= BOUND


@pytest.mark.parametrize("tiles", quick(["column"], TILED_SIZES))
@pytest.mark.parametrize("frames", TILED_FRAMES)
@pytest.mark.parametrize("models", quick(["2.2"], KINDS), indirect=True)
def test_videos_decoded_in_tiles_equal_those_of_diffusers(models, pipe, frames, tiles):
    z = latents(models, frames, tiled_size(models, tiles))
    with reference_tiling(models.reference, DECODE_TILING[models.kind]):
        expected = reference_frames(models.reference, z)
    assert np.mean(np.abs(expected) == 1) < 0.5  # only some are clipped
    assert relative_l2(decode(pipe, z, DECODE_TILING[models.kind]), expected) <= BOUND


@pytest.mark.parametrize("models", quick(["2.2"], KINDS), indirect=True)
def test_frames_that_fit_in_a_tile_are_not_tiled(models, pipe):
    z = latents(models, 1, SIZE)
    with reference_tiling(models.reference, DECODE_TILING[models.kind]):
        expected = reference_frames(models.reference, z)
    assert relative_l2(decode(pipe, z, DECODE_TILING[models.kind]), expected) <= BOUND


@pytest.mark.parametrize("chunks", quick(["2 2"], ["1 1 1 1", "1 2 1", "1 3", "2 2", "3 1", "4"]))
@pytest.mark.parametrize("models", quick(["2.2"], KINDS), indirect=True)
def test_any_chunks_equal_the_full_video(models, chunk_functions, full_outputs, chunks):
    """Latent frames may be encoded and decoded one or several at a time."""
    x, z = full_outputs[0], full_outputs[2]
    for stream, source, per_latent, expected in (("encode", x, 4, z), ("decode", z, 1, full_outputs[1])):
        y, cache = chunk_functions[stream](models.vae, source[:, :1], None)
        parts, start = [y], 1
        for chunk in map(int, chunks.split()):
            y, cache = chunk_functions[stream](models.vae, source[:, start : start + chunk * per_latent], cache)
            parts.append(y)
            start += chunk * per_latent
        assert start == source.shape[1]
        assert relative_l2(np.concatenate(parts, axis=1), expected) <= 1e-6


def encode_chunk(vae, x, cache):
    """Encode frames in [-1, 1], as the program of this name."""
    return vae.encode_chunk(space_to_depth(x, vae.config.patch), cache)


def decode_chunk(vae, z, cache):
    """Decode latents to frames in [-1, 1], as the program of this name."""
    x, cache = vae.decode_chunk(z, cache)
    return jnp.clip(depth_to_space(x, vae.config.patch), -1.0, 1.0), cache


@pytest.fixture(scope="module")
def chunk_functions():
    return {
        "encode": nnx.jit(encode_chunk),
        "decode": nnx.jit(decode_chunk),
    }


@pytest.fixture(scope="module")
def full_outputs(models) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two videos of 17 frames, their decoded latents, and their latents, from one executable."""
    size = models.vae.config.spatial_factor
    x = np.random.default_rng(0).uniform(-1, 1, (2, 17, size, 2 * size, 3)).astype(np.float32)

    @nnx.jit
    def round_trip(vae, x):
        z = encode_chunk(vae, x, None)[0]
        return decode_chunk(vae, z, None)[0], z

    return x, *map(np.asarray, round_trip(models.vae, x))


@pytest.mark.parametrize("models", quick(["2.2"], KINDS), indirect=True)  # the 2.1 decodes 17 frames in chunks
def test_full_videos_equal_those_of_diffusers(models, full_outputs):
    """Compare a batch of two videos, with all frames in one executable."""
    x, frames, z = full_outputs
    pixels = torch.from_numpy(x).permute(0, 4, 1, 2, 3) / 2 + 0.5
    expected = reference_latents(models.reference, pixels)
    assert relative_l2(np.moveaxis(z, -1, 1), expected) <= BOUND
    expected = reference_frames(models.reference, torch.from_numpy(expected))
    assert relative_l2(np.moveaxis(frames, -1, 1), expected) <= BOUND


CHUNKED_MODULES = {  # by kind: wanjax's module, the reference's module, and its channels
    "2.1": {
        "encoder.conv_in": ("encoder.conv_in", 3),
        "encoder.levels.1.res.0": ("encoder.down_blocks.2", 8),  # with a shortcut
        "decoder.levels.3.res.0": ("decoder.up_blocks.3.resnets.0", 8),
        "encoder.mid": ("encoder.mid_block", 32),
        "encoder.levels.0.resample": ("encoder.down_blocks.1", 8),
        "encoder.levels.1.resample": ("encoder.down_blocks.3", 16),  # in time too
        "decoder.levels.2.resample": ("decoder.up_blocks.2.upsamplers.0", 16),
        "decoder.levels.0.resample": ("decoder.up_blocks.0.upsamplers.0", 32),  # in time too
    },
    "2.2": {
        "encoder.levels.0": ("encoder.down_blocks.0", 8),
        "encoder.levels.1": ("encoder.down_blocks.1", 8),  # in time too
        "encoder.levels.3": ("encoder.down_blocks.3", 32),  # at one resolution
        "decoder.levels.2": ("decoder.up_blocks.2", 48),
        "decoder.levels.0": ("decoder.up_blocks.0", 48),  # in time too
    },
}


@torch.no_grad()
def test_modules_run_chunk_by_chunk_equal_those_of_diffusers(models):
    for path, (reference_path, channels) in CHUNKED_MODULES[models.kind].items():
        reference_module, module = models.reference.get_submodule(reference_path), submodule(models.vae, path)
        x = torch.randn(2, channels, 5, 6, 4, generator=torch.Generator().manual_seed(channels))
        cache, reference_cache = None, [None] * 8
        for chunk in (x[:, :, :1], x[:, :, 1:3], x[:, :, 3:]):
            if path == "encoder.conv_in":
                expected = reference_module(chunk, reference_cache[0])
                reference_cache[0] = chunk
            else:
                first = {"first_chunk": cache is None} if isinstance(reference_module, WanResidualUpBlock) else {}
                expected = reference_module(chunk, feat_cache=reference_cache, feat_idx=[0], **first)
            y, cache = run(module, channels_last(chunk), cache)
            assert relative_l2(y, channels_last(expected)) <= BOUND, path


@pytest.mark.parametrize("patch", [1, 2, 4])
def test_cells_are_converted_as_in_diffusers(patch):
    x = video(3, (8, 16))
    cells = jax.jit(lambda x: space_to_depth(x, patch))(channels_last(x))
    np.testing.assert_array_equal(cells, channels_last(patchify(x, patch)))
    np.testing.assert_array_equal(jax.jit(lambda cells: depth_to_space(cells, patch))(cells), channels_last(x))


@torch.no_grad()
def test_attention_and_norm_equal_those_of_diffusers(models):
    module, reference_module = models.vae.decoder.mid.attention, models.reference.decoder.mid_block.attentions[0]
    x = torch.randn(2, reference_module.dim, 3, 6, 4, generator=torch.Generator().manual_seed(0))
    assert relative_l2(run(module, channels_last(x)), channels_last(reference_module(x))) <= BOUND
    module, reference_module = models.vae.decoder.mid.res1.norm1, models.reference.decoder.mid_block.resnets[0].norm1
    assert relative_l2(run(module, channels_last(x)), channels_last(reference_module(x))) <= BOUND


@pytest.mark.parametrize("models", quick(["2.2"], KINDS), indirect=True)
def test_bfloat16_is_no_further_from_float32_than_in_the_reference(models, chunk_functions):
    reference = models.reference
    reference_bfloat16 = copy.deepcopy(reference).to(torch.bfloat16)
    vae = wan_vae(reference_bfloat16, jnp.bfloat16, jnp.bfloat16)
    size = (96, 96)  # with few values, the rounding error may be twice or half that of the reference by chance
    x, z = video(5, size), latents(models, 5, size)

    def run_in_two_chunks(direction: str, source: torch.Tensor) -> np.ndarray:
        x_channels_last = channels_last(source)
        first, cache = chunk_functions[direction](vae, x_channels_last[:, :1], None)
        rest, _ = chunk_functions[direction](vae, x_channels_last[:, 1:], cache)
        return np.moveaxis(np.concatenate([first, rest], axis=1), -1, 1)

    exact = reference_latents(reference, x)
    assert relative_l2(run_in_two_chunks("encode", x * 2 - 1), exact) <= 1.1 * relative_l2(
        reference_latents(reference_bfloat16, x), exact
    )
    exact = reference_frames(reference, z)
    assert relative_l2(run_in_two_chunks("decode", z), exact) <= 1.1 * relative_l2(
        reference_frames(reference_bfloat16, z), exact
    )
