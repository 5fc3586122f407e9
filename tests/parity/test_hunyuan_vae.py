# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo's autoencoder against diffusers' AutoencoderKLHunyuanVideo15, on the same small random weights.

The reference computes the whole clip at once; wanjax computes it chunk by chunk.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15
from flax import nnx

from tests.parity.references import StateDict, channels_last, randomise, relative_l2, run, submodule
from tests.support.devices import on_meshes
from tests.support.programs import caller
from wanjax.checkpoints import modules
from wanjax.converters import weight_rules
from wanjax.converters.hunyuanvideo import diffusers as tables
from wanjax.layers.placement import as_shapes, with_shardings
from wanjax.layers.tiling import Tiling
from wanjax.models.hunyuanvideo.vae import HunyuanVideoVAE
from wanjax.models.hunyuanvideo.vae_config import VAE_1_5
from wanjax.pipelines.frames import decode_latents, encode_frames
from wanjax.sharding import SHARDING_RULES, Partitioner, make_mesh, one_device_partitioner

BOUND = 1e-5
SIZES = {"latent_channels": 4, "block_out_channels": (8, 16, 16, 32, 32), "layers_per_block": 1, "scaling_factor": 1.3}
FRAMES = [1, 5, 9, 17]
SIZE = (32, 48)
TILING = Tiling(32, 16)
SIZE_OF_TILES = (16, 48)  # three tiles, the last of which is smaller


@pytest.fixture(scope="module")
def reference() -> AutoencoderKLHunyuanVideo15:
    """Return an autoencoder whose attention logits exceed one, so that each key matters."""
    torch.manual_seed(0)
    reference = AutoencoderKLHunyuanVideo15(**SIZES).eval()
    randomise(reference, seed=1)
    with torch.no_grad():
        for coder in (reference.encoder, reference.decoder):
            coder.mid_block.attentions[0].to_q.weight.mul_(4)
            coder.mid_block.attentions[0].to_k.weight.mul_(4)
            coder.mid_block.attentions[0].proj_out.weight.mul_(4)
    return reference


def load_vae(reference, dtype=jnp.float32, partitioner=None) -> HunyuanVideoVAE:
    config = replace(tables.vae_config(reference.config), max_latent_frames=6)
    kw = {"dtype": dtype, "param_dtype": dtype}
    abstract = as_shapes(lambda rngs: HunyuanVideoVAE(config, **kw, rngs=rngs))
    return modules.load(
        with_shardings(abstract, partitioner or one_device_partitioner()),
        tables.vae_weight_rules(config),
        StateDict(reference),
    )


@pytest.fixture(scope="module")
def vae(reference) -> HunyuanVideoVAE:
    return load_vae(reference)


def random_video(frames: int, size: tuple[int, int] = SIZE) -> torch.Tensor:
    """Return a random video [B C T H W] in [0, 1]."""
    return torch.rand(1, 3, frames, *size, generator=torch.Generator().manual_seed(frames))


def random_latents(frames: int, size: tuple[int, int] = SIZE) -> torch.Tensor:
    shape = (1, 4, (frames + 3) // 4, size[0] // 16, size[1] // 16)
    return torch.randn(shape, generator=torch.Generator().manual_seed(frames))


@torch.no_grad()
def reference_latents(reference, x: torch.Tensor) -> np.ndarray:
    mode = reference.encode((x * 2 - 1).to(reference.dtype)).latent_dist.mode()
    return (mode.float() * SIZES["scaling_factor"]).numpy()


@torch.no_grad()
def reference_frames(reference, z: torch.Tensor) -> np.ndarray:
    return reference.decode((z / SIZES["scaling_factor"]).to(reference.dtype)).sample.float().numpy()


def encode(vae, x: torch.Tensor, tiling: Tiling | None = None, partitioner=None) -> jax.Array:
    """Encode as a pipeline does: one frame, then four at a time."""
    return encode_frames(vae, x[0].permute(1, 2, 3, 0).numpy(), tiling, caller(partitioner))


def decode(vae, z: torch.Tensor, tiling: Tiling | None = None, partitioner=None) -> np.ndarray:
    """Decode as a pipeline does, one latent frame at a time, which clips; return [B C T H W]."""
    tiling = tiling and tiling.with_defaults(vae.config.tiling)
    chunks = list(decode_latents(vae, [z.numpy()], (1, 1), jnp.float32, tiling, caller(partitioner)))
    return np.concatenate(chunks).transpose(3, 0, 1, 2)[None] * 2 - 1


def compare(result, expected) -> None:
    error = relative_l2(result, expected)
    print(f"{error:.1e}")  # `pytest -rP` shows it
    assert error <= BOUND


@pytest.mark.parametrize("frames", FRAMES)
def test_encoded_videos_equal_those_of_diffusers(reference, vae, frames):
    compare(encode(vae, random_video(frames)), reference_latents(reference, random_video(frames)))


@pytest.mark.parametrize("frames", FRAMES)
def test_decoded_videos_equal_those_of_diffusers(reference, vae, frames):
    expected = reference_frames(reference, random_latents(frames))
    assert np.mean(np.abs(expected) > 1) < 0.5  # only some are clipped
    compare(decode(vae, random_latents(frames)), np.clip(expected, -1, 1))


@pytest.mark.slow  # tests/parity/test_wan_vae.py has quick tests of the same tiling
def test_tiled_videos_equal_those_of_diffusers(reference, vae):
    x, z = random_video(1, SIZE_OF_TILES), random_latents(1, SIZE_OF_TILES)
    reference.enable_tiling(32, 32, 2, 2, 0.5)
    expected = reference_latents(reference, x), np.clip(reference_frames(reference, z), -1, 1)
    reference.disable_tiling()
    compare(encode(vae, x, TILING), expected[0])
    compare(decode(vae, z, TILING), expected[1])


def test_the_default_tiling_is_that_of_diffusers():
    reference = AutoencoderKLHunyuanVideo15
    with torch.device("meta"):
        default = reference()
    size = default.tile_sample_min_height
    assert VAE_1_5.tiling == (size, int(size * (1 - default.tile_overlap_factor)))


@pytest.mark.slow  # a quick test covers Wan's autoencoder, which has the same convolutions
def test_longer_chunks_equal_the_full_video(vae, chunk_functions, full_outputs):
    """The first chunk and the later ones may have several latent frames."""
    x, z = full_outputs[0], full_outputs[1]
    for stream, source, per_latent, expected in (("encode", x, 4, z), ("decode", z, 1, full_outputs[2])):
        cache, parts, start = None, [], 0
        for chunk in (2, 2):
            end = start + chunk * per_latent - (per_latent - 1 if cache is None else 0)
            y, cache = chunk_functions[stream](vae, source[:, start:end], cache)
            parts.append(y)
            start = end
        assert start == source.shape[1]
        compare(np.concatenate(parts, axis=1), expected)


@pytest.fixture(scope="module")
def chunk_functions():
    return {
        "encode": nnx.jit(lambda vae, x, cache: vae.encode_chunk(x, cache)),
        "decode": nnx.jit(lambda vae, z, cache: vae.decode_chunk(z, cache)),
    }


@pytest.fixture(scope="module")
def full_outputs(vae) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return two videos of 13 frames, their latents and the decoded latents, each from one call."""
    x = np.random.default_rng(0).uniform(-1, 1, (2, 13, *SIZE, 3)).astype(np.float32)
    z = latents_of(vae, x)
    return x, np.asarray(z), np.asarray(nnx.jit(lambda vae, z: vae.decode_chunk(z, None)[0])(vae, z))


@nnx.jit
def latents_of(vae, x):
    return vae.encode_chunk(x, None)[0]


@pytest.mark.slow  # quick tests above compare clips of up to 17 frames, chunk by chunk
def test_full_videos_equal_those_of_diffusers(reference, full_outputs):
    """Run the reference one video at a time, because its mask has no batch axis."""
    x, z, frames = full_outputs
    for index in range(2):
        pixels = torch.from_numpy(x[index : index + 1]).permute(0, 4, 1, 2, 3) / 2 + 0.5
        expected = reference_latents(reference, pixels)
        compare(np.moveaxis(z[index : index + 1], -1, 1), expected)
        expected = reference_frames(reference, torch.from_numpy(expected))
        compare(np.moveaxis(frames[index : index + 1], -1, 1), expected)


CHUNKED_MODULES = {  # wanjax's module, the reference's module, and its channels
    "encoder.conv_in": ("encoder.conv_in", 3),
    "encoder.levels.1.res.0": ("encoder.down_blocks.1.resnets.0", 16),
    "encoder.levels.0.resample": ("encoder.down_blocks.0.downsamplers.0", 8),
    "encoder.levels.2.resample": ("encoder.down_blocks.2.downsamplers.0", 16),  # in time too
    "encoder.levels.3": ("encoder.down_blocks.3", 32),
    "encoder.mid": ("encoder.mid_block", 32),
    "decoder.mid.attention": ("decoder.mid_block.attentions.0", 32),
    "decoder.levels.0.resample": ("decoder.up_blocks.0.upsamplers.0", 32),  # in time too
    "decoder.levels.1.resample": ("decoder.up_blocks.1.upsamplers.0", 32),
    "decoder.levels.3.resample": ("decoder.up_blocks.3.upsamplers.0", 16),
}


@torch.no_grad()
@pytest.mark.parametrize("path", CHUNKED_MODULES)
def test_modules_run_chunk_by_chunk_equal_those_of_diffusers(reference, vae, path):
    reference_path, channels = CHUNKED_MODULES[path]
    x = torch.randn(1, channels, 5, 6, 4, generator=torch.Generator().manual_seed(channels))
    expected = channels_last(reference.get_submodule(reference_path)(x))
    module, cache, parts = submodule(vae, path), None, []
    for chunk in (x[:, :, :1], x[:, :, 1:3], x[:, :, 3:]):
        y, cache = run(module, channels_last(chunk), cache)
        parts.append(y)
    compare(np.concatenate(parts, axis=1), expected)


def test_a_latent_frame_does_not_depend_on_later_frames(vae):
    x = np.random.default_rng(0).uniform(-1, 1, (1, 13, *SIZE, 3)).astype(np.float32)
    z = np.asarray(latents_of(vae, x))
    changed = np.asarray(latents_of(vae, np.concatenate([x[:, :9], -x[:, 9:]], axis=1)))
    assert relative_l2(changed[:, :3], z[:, :3]) <= 1e-6
    assert relative_l2(changed[:, 3:], z[:, 3:]) > 1e-2


def test_attention_does_not_store_all_its_scores(vae):
    """Compile attention of 6 frames of 64 × 64 cells: it multiplies a block of queries and a block of keys."""
    x = jax.ShapeDtypeStruct((1, 6, 64, 64, 32), jnp.float32)
    graphdef, weights = nnx.split(vae.decoder.mid.attention)
    run = jax.jit(lambda weights, x: nnx.merge(graphdef, weights)(x, None)[0])
    memory = run.lower(weights, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 20 * 6 * 64 * 64 * 32 * 4 < (6 * 64 * 64) ** 2


@pytest.mark.slow  # a quick test in tests/pipelines/test_hunyuanvideo.py runs the whole pipeline on eight devices
@pytest.mark.parametrize(("axes", "rules"), on_meshes(((2, 2, 2), "tp")))
def test_eight_devices_give_the_same_video(reference, axes, rules):
    """Frames of 2 × 8 latent positions are divided by width, those of 4 × 6 by both."""
    size = (32, 128) if axes[2] == 8 else (64, 96)
    partitioner = Partitioner(make_mesh(*axes), SHARDING_RULES[rules])
    partitioned_vae = load_vae(reference, partitioner=partitioner)
    expected = np.clip(reference_frames(reference, random_latents(5, size)), -1, 1)
    compare(decode(partitioned_vae, random_latents(5, size), partitioner=partitioner), expected)
    compare(
        encode(partitioned_vae, random_video(5, size), partitioner=partitioner),
        reference_latents(reference, random_video(5, size)),
    )


def test_the_published_autoencoder_has_the_published_sizes():
    with torch.device("meta"):
        reference = AutoencoderKLHunyuanVideo15()
    config = tables.vae_config(reference.config)
    assert config == VAE_1_5
    kw = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    parameters = modules.parameters(as_shapes(lambda rngs: HunyuanVideoVAE(config, **kw, rngs=rngs)))
    specs = {key: jax.ShapeDtypeStruct(tuple(x.shape), jnp.float32) for key, x in reference.state_dict().items()}
    weight_rules.assign(tables.vae_weight_rules(config), specs, parameters)
    assert sum(x.size for x in parameters.values()) == sum(x.numel() for x in reference.parameters())
    assert (config.spatial_factor, config.temporal_factor, config.longest_video) == (16, 4, 129)
