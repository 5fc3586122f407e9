# SPDX-License-Identifier: Apache-2.0
"""CogVideoX's autoencoder equals diffusers' AutoencoderKLCogVideoX with the same small random weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from flax import nnx

from tests.parity.references import StateDict, channels_last, psnr, randomise, relative_l2, run, submodule
from tests.support.programs import caller
from tests.support.quick import quick
from tests.support.words import line_with_words
from wanjax.checkpoints import modules
from wanjax.checkpoints.network_kinds import NetworkKind, network_of
from wanjax.converters import weight_rules
from wanjax.converters.cogvideox.vae import vae_config, vae_weight_rules
from wanjax.converters.configs import read_config
from wanjax.errors import WanjaxError
from wanjax.layers.tiling import Tiling, blend_tiles, split_into_tiles
from wanjax.models.cogvideox.vae import CogVideoXVAE
from wanjax.models.cogvideox.vae_config import VAE_1_5, VAE_2B, VAE_5B, VAEConfig
from wanjax.pipelines.frames import decode_latents, encode_frames, split_posterior

BOUND = 1e-5
KIND = NetworkKind(("AutoencoderKLCogVideoX",), vae_config, {VAEConfig: CogVideoXVAE}, vae_weight_rules, float32=True)
SMALL = {
    "block_out_channels": (8, 16, 16, 24), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 4,
    "sample_height": 96, "sample_width": 80, "scaling_factor": 0.7,
}  # fmt: skip
SIZE = (16, 24)
DEFAULT_TILES = Tiling((48, 40), (40, 32))
SIZES_OF_TILES = {"row": (40, 72), "column": (64, 32), "both": (64, 72)}  # up to 2 × 3 tiles, smaller at the edges
PUBLISHED = {
    "2B": (VAE_2B, {}),
    "5B": (VAE_5B, {"scaling_factor": 0.7}),
    "1.5": (VAE_1_5, {"scaling_factor": 0.7, "invert_scale_latents": True}),
}


def cogvideox_vae(reference: AutoencoderKLCogVideoX) -> CogVideoXVAE:
    network = network_of(vae_config(reference.config), [KIND])
    abstract = network.abstract(dtype=jnp.float32, param_dtype=jnp.float32)
    return modules.load(abstract, network.rules, StateDict(reference))


@pytest.fixture(scope="module")
def reference() -> AutoencoderKLCogVideoX:
    torch.manual_seed(0)
    reference = AutoencoderKLCogVideoX(**SMALL).eval()
    randomise(reference, seed=1)
    with torch.no_grad():  # so that the latents have a large effect on the decoder's norms
        for name, weight in reference.named_parameters():
            if ".conv_y." in name or ".conv_b." in name:
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) * 0.5)
    return reference


@pytest.fixture(scope="module")
def vae(reference) -> CogVideoXVAE:
    return cogvideox_vae(reference)


@contextmanager
def enable_tiling(reference: AutoencoderKLCogVideoX) -> Iterator[None]:
    reference.enable_tiling()
    yield
    reference.disable_tiling()


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def video(frames: int, size: tuple[int, int] = SIZE) -> torch.Tensor:
    """Return random videos [B C T H W] in [0, 1]."""
    return torch.rand(1, 3, frames, *size, generator=torch.Generator().manual_seed(frames))


def latents(frames: int, size: tuple[int, int] = SIZE) -> torch.Tensor:
    return random(frames, 1, 4, frames, *(pixels // 8 for pixels in size))


call = caller()


def decode_chunks(vae: CogVideoXVAE, z: torch.Tensor, tiling: Tiling | None = None) -> np.ndarray:
    """Decode chunk by chunk; return frames [B C T H W] in [0, 1]."""
    chunk_lengths = vae.config.decode_lengths(z.shape[2])
    tiling = tiling and tiling.with_defaults(vae.config.tiling)
    frames = [np.asarray(x) for x in decode_latents(vae, [z.numpy()], chunk_lengths, jnp.float32, tiling, call)]
    return np.concatenate(frames).transpose(3, 0, 1, 2)[None]


@torch.no_grad()
def reference_frames(reference: AutoencoderKLCogVideoX, z: torch.Tensor) -> np.ndarray:
    frames = reference.decode(z / reference.config.scaling_factor).sample
    return (frames * 0.5 + 0.5).clamp(0, 1).numpy()


def check_frames(result: np.ndarray, expected: np.ndarray) -> None:
    assert np.mean((expected == 0) | (expected == 1)) < 0.5  # most values are not clipped
    error = relative_l2(result, expected)
    print(f"relative error {error:.1e}")
    assert error <= BOUND
    assert psnr(result, expected) >= 60


def moments(vae: CogVideoXVAE, x: torch.Tensor, tiling: Tiling | None = None) -> jax.Array:
    """Encode chunk by chunk; return mean and log-variance [B C T H W]."""
    return encode_frames(vae, x[0].permute(1, 2, 3, 0).numpy(), tiling, call)


@torch.no_grad()
def check_moments(reference: AutoencoderKLCogVideoX, vae: CogVideoXVAE, x: torch.Tensor, tiling: Tiling | None) -> None:
    expected = reference.encode(x * 2 - 1).latent_dist.parameters.numpy()
    error = relative_l2(moments(vae, x, tiling), expected)
    print(f"relative error {error:.1e} of values of size {np.std(expected):.2f}")
    assert error <= BOUND


@pytest.mark.parametrize("frames", quick([1, 9, 16, 17], [1, 5, 8, 9, 13, 16, 17, 49]))
def test_encoding_equals_diffusers(reference, vae, frames):
    """The clips are one picture, one chunk, or several chunks; the first chunk may be longer than the others."""
    check_moments(reference, vae, video(frames), None)


@pytest.mark.parametrize("frames", quick([1, 2, 5, 12], [1, 2, 3, 4, 5, 12, 13]))
def test_decoding_equals_diffusers(reference, vae, frames):
    z = latents(frames)
    expected = reference_frames(reference, z)
    assert expected.shape[2] == 4 * frames - 3 * (frames % 2)
    check_frames(decode_chunks(vae, z), expected)


@pytest.mark.parametrize("tiles", quick(["column"], SIZES_OF_TILES))
def test_encoding_in_tiles_equals_diffusers(reference, vae, tiles):
    with enable_tiling(reference):
        check_moments(reference, vae, video(17, SIZES_OF_TILES[tiles]), Tiling())


@pytest.mark.slow  # quick tests below cut and blend tiles, and tests/parity/test_wan_vae.py decodes in tiles
@pytest.mark.parametrize("tiles", SIZES_OF_TILES)
def test_decoding_in_tiles_equals_diffusers(reference, vae, tiles):
    z = latents(5, SIZES_OF_TILES[tiles])
    with enable_tiling(reference):
        expected = reference_frames(reference, z)
    check_frames(decode_chunks(vae, z, Tiling()), expected)
    assert relative_l2(reference_frames(reference, z), expected) > 1e-3  # tiles change the frames


class ToyDecoder(torch.nn.Module):
    """A decoder without weights: it enlarges cells, and scales them by the mean of the tile."""

    def forward(self, z: torch.Tensor, conv_cache: Any) -> tuple[torch.Tensor, None]:
        return (z * (1 + z.mean())).repeat_interleave(8, dim=3).repeat_interleave(8, dim=4), None


@pytest.mark.parametrize("size", [(30, 45), (29, 46), (31, 45), (60, 90), (96, 170), (52, 36), (25, 82)])
def test_tiles_are_cut_and_blended_as_in_diffusers(monkeypatch, size):
    """The tiles have the published size: one tile, a row, a column, and narrow tiles at the edges."""
    with torch.device("meta"):
        reference = AutoencoderKLCogVideoX()
    monkeypatch.setattr(reference, "decoder", ToyDecoder())
    z = random(0, 1, 3, 1, *size)
    with enable_tiling(reference):
        expected = reference.decode(z).sample

    def process(tile: jax.Array) -> jax.Array:
        return jnp.repeat(jnp.repeat(tile * (1 + tile.mean()), 8, axis=2), 8, axis=3)

    @jax.jit
    def decode_in_tiles(z: jax.Array) -> jax.Array:
        rows = split_into_tiles(*size, VAE_5B.tiling, 8)
        tiles = [[z[:, :, t.top : t.top + t.height, t.left : t.left + t.width] for t in row] for row in rows]
        return blend_tiles([[process(tile) for tile in row] for row in tiles], VAE_5B.tiling, 1)

    assert relative_l2(decode_in_tiles(channels_last(z)), channels_last(expected)) <= BOUND


def test_default_tiles_are_those_of_diffusers(vae):
    assert vae.config.tiling == DEFAULT_TILES
    assert {config.tiling for config, _ in PUBLISHED.values()} == {Tiling((240, 360), (200, 288))}


def test_the_posterior_equals_that_of_diffusers():
    """The log-variance has the reference's limits, so that no deviation is infinite."""
    moments = np.stack([np.linspace(-2, 2, 24), np.linspace(-400, 400, 24)], dtype=np.float32).reshape(1, 2, 2, 3, 4)
    mean, deviation = caller()(split_posterior, 0.7, jnp.asarray(moments))
    expected = DiagonalGaussianDistribution(torch.from_numpy(moments))
    np.testing.assert_allclose(mean, 0.7 * expected.mean, rtol=1e-6)
    np.testing.assert_allclose(deviation, 0.7 * expected.std, rtol=1e-6)


MODULES = {  # wanjax's module: the reference's module, its channels, and whether it takes latents
    "encoder.conv_in": ("encoder.conv_in", 3, False),
    "encoder.levels.1.res.0": ("encoder.down_blocks.1.resnets.0", 8, False),  # with a shortcut
    "encoder.levels.0": ("encoder.down_blocks.0", 8, False),  # halves time too
    "encoder.levels.2": ("encoder.down_blocks.2", 16, False),  # does not change time
    "decoder.mid": ("decoder.mid_block", 24, True),
    "decoder.levels.0": ("decoder.up_blocks.0", 24, True),  # doubles time too
    "decoder.levels.2": ("decoder.up_blocks.2", 16, True),
    "decoder.levels.3": ("decoder.up_blocks.3", 16, True),  # at one resolution
}


@torch.no_grad()
@pytest.mark.parametrize("chunks", quick(["3 2 2"], ["1", "3 2 2", "2 2", "2 4"]))
@pytest.mark.parametrize("path", MODULES)
def test_every_module_equals_that_of_diffusers(reference, vae, path, chunks):
    """The first chunk repeats its first frame, and later chunks use the cache."""
    reference_path, channels, latent = MODULES[path]
    reference_module, module, cache, reference_cache = (
        reference.get_submodule(reference_path),
        submodule(vae, path),
        None,
        None,
    )
    for seed, frames in enumerate(map(int, chunks.split())):
        x, z = random(seed, 2, channels, frames, 8, 4), random(seed + 9, 2, 4, frames, 4, 2)
        options = {"zq": z} if latent else {}
        expected, reference_cache = reference_module(x, **options, conv_cache=reference_cache)
        y, cache = run(module, channels_last(x), cache, *map(channels_last, options.values()))
        assert relative_l2(y, channels_last(expected)) <= BOUND


@torch.no_grad()
@pytest.mark.parametrize("frames", [(1, 1), (2, 2), (2, 8), (3, 3), (3, 9), (5, 9)])
def test_norms_equal_those_of_diffusers(reference, vae, frames):
    """A latent frame conditions up to eight frames; the first of an odd number conditions one frame."""
    z, x = random(0, 2, 4, frames[0], 2, 3), random(1, 2, 24, frames[1], 16, 24) + 3
    norm, reference_norm = vae.decoder.mid.res[0].norm1, reference.decoder.mid_block.resnets[0].norm1
    apply_norms = nnx.jit(lambda norm, x, z: (norm(x, z), norm.norm(x)))
    conditioned, normed = apply_norms(norm, channels_last(x), channels_last(z))
    assert relative_l2(conditioned, channels_last(reference_norm(x, z)[0])) <= BOUND
    assert relative_l2(normed, channels_last(reference_norm.norm_layer(x))) <= BOUND


def test_published_checkpoints_fill_every_parameter():
    """The weight rules use every tensor of a published checkpoint, and fill every parameter."""
    with torch.device("meta"):
        reference = AutoencoderKLCogVideoX()
    for config, json in PUBLISHED.values():
        assert vae_config({**reference.config, **json}) == config
        assert (config.spatial_factor, config.temporal_factor, config.patch) == (8, 4, 1)
    network = network_of(VAE_2B, [KIND])
    targets = modules.parameters(network.abstract(dtype=jnp.float32, param_dtype=jnp.float32))
    tensors = {key: jax.ShapeDtypeStruct(x.shape, jnp.float32) for key, x in reference.state_dict().items()}
    assert len(weight_rules.assign(network.rules, tensors, targets)) == len(tensors)
    parameters = sum(x.size for x in targets.values())
    assert parameters == sum(x.numel() for x in reference.parameters()) == 215_583_907


def test_latents_of_pictures_are_scaled_as_published():
    assert (VAE_5B.picture_scale, VAE_1_5.picture_scale) == (0.7, 1 / 0.7)


@pytest.mark.parametrize(
    ("entry", "value", "words"),
    [
        ("use_quant_conv", True, "use_quant_conv"),
        ("act_fn", "relu", "act_fn"),
        ("latents_mean", [0.0], "latents_mean"),
        ("temporal_compression_ratio", 3, "temporal_compression_ratio"),
        ("layers_per_block", None, "no layers_per_block"),
    ],
)
def test_other_architectures_are_refused(reference, entry, value, words):
    config = {name: x for name, x in {**reference.config, entry: value}.items() if x is not None or name != entry}
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        read_config("config.json", config, vae_config)
