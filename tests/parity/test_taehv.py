# SPDX-License-Identifier: Apache-2.0
"""The tiny decoder, for previews and frames, against its formula in torch, from files in its author's formats."""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import diffusers
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

import wanjax
from tests.support.commands import refused, succeeded
from tests.support.commands import wanjax as command
from tests.support.compare import error
from tests.support.quick import quick
from tests.support.tiny import (
    tiny_causal_checkpoint,
    tiny_checkpoint,
    tiny_cogvideox_checkpoint,
    tiny_hunyuan_checkpoint,
    tiny_residual_checkpoint,
)
from tests.support.words import has_line_with_words, line_with_words
from wanjax.converters.wan import original
from wanjax.errors import WanjaxError
from wanjax.media.video import read_metadata
from wanjax.models.taehv import decode_pictures
from wanjax.pipelines import tiny_decoder
from wanjax.pipelines.tiny_decoder import read_tiny_decoder

WIDTHS = (12, 8, 6, 6)
LEVELS = (3, 9, 15)  # the number of the first layer of each level


def layers(latents: int, patch: int, frames_of_levels: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    """Return random tensors by the names and shapes of taehv.py, for the number of frames that each level makes."""
    shapes = {"encoder.0.weight": (64, 3, 3, 3), "decoder.1.weight": (WIDTHS[0], latents, 3, 3)}
    shapes |= {"decoder.1.bias": (WIDTHS[0],), "decoder.22.weight": (3 * patch**2, WIDTHS[3], 3, 3)}
    shapes |= {"decoder.22.bias": (3 * patch**2,)}
    for first, width, next_width, frames in zip(LEVELS, WIDTHS[:3], WIDTHS[1:], frames_of_levels, strict=True):
        for block in range(first, first + 3):
            for conv, channels in ((0, 2 * width), (2, width), (4, width)):
                shapes |= {f"decoder.{block}.conv.{conv}.weight": (width, channels, 3, 3)}
                shapes |= {f"decoder.{block}.conv.{conv}.bias": (width,)}
        shapes |= {f"decoder.{first + 4}.conv.weight": (frames * width, width, 1, 1)}
        shapes |= {f"decoder.{first + 5}.weight": (next_width, width, 3, 3)}
    random = torch.Generator().manual_seed(0)
    output = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    result = {name: x / max(1, int(np.prod(x.shape[1:]))) ** 0.5 for name, x in output.items()}
    result["decoder.22.weight"] *= 0.2  # few pixels are clipped
    return result | {"decoder.22.bias": 0.5 + 0.1 * output["decoder.22.bias"]}


def reference_pictures(
    tensors: dict[str, torch.Tensor], latents: torch.Tensor, patch: int, doublings: int
) -> np.ndarray:
    """Return pictures [T 3 H W] of the latents [T C H W] of one video: the last of the frames of each level."""

    def conv(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.conv2d(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"), padding="same")

    x = functional.relu(conv(3 * torch.tanh(latents / 3), "decoder.1"))
    for level, first in enumerate(LEVELS):
        for block in range(first, first + 3):
            past = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
            y = functional.relu(conv(torch.cat([x, past], 1), f"decoder.{block}.conv.0"))
            y = functional.relu(conv(y, f"decoder.{block}.conv.2"))
            x = functional.relu(conv(y, f"decoder.{block}.conv.4") + x)
        if level < doublings:
            x = nn.Upsample(scale_factor=2)(x)
        mixed = functional.conv2d(x, tensors[f"decoder.{first + 4}.conv.weight"])
        x = conv(mixed[:, -x.shape[1] :], f"decoder.{first + 5}")
    return functional.pixel_shuffle(conv(functional.relu(x), "decoder.22"), patch).clamp(0, 1).numpy()


def reference_frames(
    tensors: dict[str, torch.Tensor], latents: torch.Tensor, patch: int, frames_of_levels: Any
) -> np.ndarray:
    """Return the frames [T H W 3] of the latents [T C H W] of one video, in [0, 1], without those before the first."""

    def conv(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.conv2d(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"), padding="same")

    x = functional.relu(conv(3 * torch.tanh(latents / 3), "decoder.1"))
    for first, num_frames in zip(LEVELS, frames_of_levels, strict=True):
        for block in range(first, first + 3):
            past = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
            y = functional.relu(conv(torch.cat([x, past], 1), f"decoder.{block}.conv.0"))
            y = functional.relu(conv(y, f"decoder.{block}.conv.2"))
            x = functional.relu(conv(y, f"decoder.{block}.conv.4") + x)
        x = nn.Upsample(scale_factor=2)(x)
        width, height, row_width = x.shape[1:]
        x = functional.conv2d(x, tensors[f"decoder.{first + 4}.conv.weight"]).reshape(-1, width, height, row_width)
        assert len(x) % num_frames == 0
        x = conv(x, f"decoder.{first + 5}")
    x = functional.pixel_shuffle(conv(functional.relu(x), "decoder.22"), patch).clamp(0, 1)
    return x[int(np.prod(frames_of_levels)) - 1 :].permute(0, 2, 3, 1).numpy()


FILES = [
    (file_format, patch, frames_of_levels)
    for file_format in ("pth", "safetensors")
    for patch, frames_of_levels in ((1, (1, 2, 2)), (2, (2, 2, 1)))
]


@pytest.mark.parametrize(("file_format", "patch", "frames_of_levels"), quick([FILES[0], FILES[3]], FILES))
def test_previews_equal_the_formula_in_torch(file_format, patch, frames_of_levels, tmp_path):
    tensors, file = layers(5, patch, frames_of_levels), tmp_path / f"tae.{file_format}"
    if file_format == "pth":
        torch.save(OrderedDict(tensors), file)
    else:
        save_file(tensors, file)
    latents = torch.randn(4, 5, 6, 10, generator=torch.Generator().manual_seed(1))
    network = read_tiny_decoder(file, 5).network
    decode = nnx.jit(lambda network, z: [network(z, doublings) for doublings in range(4)])
    for doublings, result in enumerate(decode(network, latents.permute(0, 2, 3, 1)[None].numpy())):
        expected = reference_pictures(tensors, latents, patch, doublings)
        assert ((expected > 0) & (expected < 1)).mean() > 0.5
        assert error(np.moveaxis(np.asarray(result[0]), -1, 1), expected.astype(np.float64)) <= 1e-5


@pytest.mark.parametrize(("height", "picture_height"), [(6, 24), (10, 20), (12, 24), (13, 13), (30, 30)])
def test_previews_have_a_limited_height(height, picture_height, tmp_path):
    torch.save(OrderedDict(layers(3, 1, (1, 2, 2))), tmp_path / "tae.pth")
    network = read_tiny_decoder(tmp_path / "tae.pth", 3).network
    result = nnx.eval_shape(
        lambda network, z: decode_pictures(network, z, 25), network, jnp.zeros((2, 3, 1, height, 4))
    )
    assert result.shape == (2, 1, picture_height, 4 * picture_height // height, 3)


def test_previews_use_the_tiny_decoder(tmp_path, monkeypatch):
    pipe = wanjax.load("nano")
    channels = pipe.model.spec.latent_shape(pipe.defaults)[1]
    tensors = layers(channels, 1, (1, 2, 2))
    torch.save(OrderedDict(tensors), tmp_path / "tae.pth")
    monkeypatch.setattr(tiny_decoder, "MAX_PREVIEW_HEIGHT", 32)
    pipe.preview_with(tmp_path / "tae.pth")
    previews = []
    pipe.denoise(
        pipe.encode("a"), steps=1, callback=lambda step: previews.append((step.preview(), np.asarray(step.x0)))
    )
    assert not pipe.components.has("vae")
    [(preview, x0)] = previews
    expected = reference_pictures(tensors, torch.from_numpy(x0[0].copy()).transpose(0, 1), 1, 2)
    np.testing.assert_allclose(np.moveaxis(preview[0], -1, 1), 255 * expected, atol=0.51)


MODELS = {  # a checkpoint, then its decoder's latent channels, pixels of a cell and frames of each level
    "wan": (tiny_checkpoint, 4, 1, (1, 2, 2)),
    "wan2.2 5b": (tiny_residual_checkpoint, 4, 2, (1, 2, 2)),
    "cogvideox": (tiny_cogvideox_checkpoint, 4, 1, (1, 2, 2)),
    "hunyuanvideo": (tiny_hunyuan_checkpoint, 4, 2, (1, 2, 2)),
}


@pytest.mark.parametrize("model", quick(["wan", "wan2.2 5b"], MODELS))
def test_frames_equal_the_formula_in_torch(model, tmp_path):
    """The tiny decoder has its chunks; the decoder of the model is not read."""
    make, channels, patch, frames_of_levels = MODELS[model]
    tensors = layers(channels, patch, frames_of_levels)
    torch.save(OrderedDict(tensors), tmp_path / "tae.pth")
    pipe = wanjax.load(make(tmp_path / "model"), decoder=tmp_path / "tae.pth")
    latents = torch.randn(5, channels, 4, 6, generator=torch.Generator().manual_seed(1))
    expected = reference_frames(tensors, latents, patch, frames_of_levels)
    result = pipe.decode(latents.transpose(0, 1)[None].numpy(), jnp.float32)
    assert ((expected > 0) & (expected < 1)).mean() > 0.5
    assert result.shape == (17, 32 * patch, 48 * patch, 3)
    assert error(result, expected.astype(np.float64)) <= 2e-5
    assert not pipe.components.has("vae")


@pytest.mark.slow
def test_the_tiny_decoder_works_on_a_mesh_in_tiles_and_in_a_stream(tmp_path):
    tensors = layers(4, 1, (1, 2, 2))
    torch.save(OrderedDict(tensors), file := tmp_path / "tae.pth")
    folder = tiny_checkpoint(tmp_path / "model")
    latents = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    expected, options = reference_frames(tensors, latents, 1, (1, 2, 2)), latents.transpose(0, 1)[None].numpy()
    on_mesh = wanjax.load(folder, decoder=file, mesh="dp=2,sp=2,tp=2").decode(options, jnp.float32)
    assert error(on_mesh, expected.astype(np.float64)) <= 2e-5
    tiled = wanjax.load(folder, decoder=file).decode(options, jnp.float32, tiling=wanjax.Tiling(48, 32))
    assert error(tiled, expected.astype(np.float64)) < 0.1  # tiles do not contain the pixels around them
    causal = wanjax.load(tiny_causal_checkpoint(tmp_path / "causal"), decoder=file)
    clips = list(causal.stream("a", size=(32, 32), frames=13, seed=3))
    latents = np.concatenate(list(causal.denoise_chunks(causal.encode("a"), size=(32, 32), frames=13, seed=3)), axis=2)
    all_frames = reference_frames(tensors, torch.from_numpy(latents[0]).transpose(0, 1), 1, (1, 2, 2))
    np.testing.assert_allclose(np.concatenate(clips), 255 * all_frames, atol=0.51)
    assert not causal.components.has("vae")


def autoencoder(**sizes):
    """Return an autoencoder of diffusers with random weights, and its tensors by the authors' names."""
    torch.manual_seed(3)
    vae = diffusers.AutoencoderKLWan(z_dim=16, **sizes).eval()
    names = original.vae_names({**sizes, "is_residual": False})
    return vae, {names.to_authors(key): x.contiguous() for key, x in vae.state_dict().items()}


def test_a_pruned_autoencoder_may_be_the_decoder(tmp_path):
    """LightVAE is Wan's autoencoder with fewer channels in each layer, in a file with the authors' names."""
    model = wanjax.load("nano").model.vae
    vae, tensors = autoencoder(
        base_dim=model.width // 2,
        dim_mult=list(model.multipliers),
        num_res_blocks=model.res_blocks,
        temperal_downsample=list(model.temporal_downsample),
    )
    save_file(tensors, file := tmp_path / "lightvae.safetensors")
    pipe = wanjax.load("nano", decoder=file)
    latents = torch.randn(1, 16, 3, 4, 6, generator=torch.Generator().manual_seed(1))
    mean, std = (torch.tensor(values)[:, None, None, None] for values in (model.latents_mean, model.latents_std))
    with torch.no_grad():
        expected = vae.decode(latents * std + mean).sample[0].permute(1, 2, 3, 0).numpy() / 2 + 0.5
    frames = pipe.decode(latents.numpy(), jnp.float32)
    assert ((expected > 0) & (expected < 1)).mean() > 0.5
    assert error(frames, expected.clip(0, 1).astype(np.float64)) <= 2e-5
    assert not pipe.components.has("vae")
    assert pipe("a", frames=9, steps=1).frames.shape == (9, 64, 64, 3)


def test_an_autoencoder_with_another_compression_is_refused(tmp_path):
    _, tensors = autoencoder(base_dim=8, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True])
    save_file(tensors, tmp_path / "vae.safetensors")
    with pytest.raises(WanjaxError, match=line_with_words("vae.safetensors no decoder pixels 2 8")):
        wanjax.load("nano", decoder=tmp_path / "vae.safetensors")


@pytest.mark.slow
def test_a_video_of_a_decoder_is_reproduced_from_its_metadata(tmp_path, monkeypatch):
    """Make it in one command and in stages. `--from` reproduces the video unless the decoder's file differs."""
    monkeypatch.chdir(tmp_path)
    torch.save(OrderedDict(layers(16, 1, (1, 2, 2))), "tae.pth")
    succeeded(command("a red circle", "--steps", "1", "--dir", "stages", "--out", "one", "--decoder", "tae.pth"))
    record = read_metadata("one")
    assert record["decoder"] == str(tmp_path / "tae.pth")
    assert record["decoder"] in record["digests"]
    succeeded(command("decode", "--dir", "stages", "--out", "two"))
    succeeded(command("--from", "one", "--out", "three"))
    for folder in ("two", "three"):
        for file in sorted(Path("one").glob("*.png")):
            np.testing.assert_array_equal(Image.open(file), Image.open(Path(folder, file.name)))
        assert read_metadata(folder)["decoder"] == record["decoder"]
        assert read_metadata(folder)["digests"] == record["digests"]
    plan = succeeded(command("plan", "nano", "--chip", "cpu", "--decoder", "tae.pth", "--json")).stdout
    default = succeeded(command("plan", "nano", "--chip", "cpu", "--json")).stdout
    with_decoder, without = (json.loads(message)["stages"]["decode"]["seconds"] for message in (plan, default))
    assert with_decoder != without
    tiny_weights = layers(16, 1, (1, 2, 2))
    torch.save(OrderedDict(tiny_weights | {"decoder.22.bias": tiny_weights["decoder.22.bias"] + 1}), "tae.pth")
    assert has_line_with_words(refused("--from", "one", "--out", "four"), "decoder tae.pth contents changed --decoder")
    torch.save(OrderedDict(tiny_weights), "tae.safetensors")
    assert has_line_with_words(refused("a red circle", "--decoder", "tae.safetensors"), "tae.safetensors")


def test_the_command_line_writes_previews_with_a_decoder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(OrderedDict(layers(16, 1, (1, 2, 2))), "tae.pth")
    torch.save(OrderedDict(layers(32, 1, (1, 2, 2))), "other.pth")
    options = ("a red circle", "--steps", "1", "--dir", "one", "--preview-decoder")
    assert has_line_with_words(refused(*options, "other.pth"), "latents 32 channels 16")
    succeeded(command(*options, "tae.pth"))
    with Image.open("one/preview.png") as page:
        assert page.size == (2 * 5 * 64, 2 * 64)


def without(name):
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without("decoder.22.weight"), "decoder.22.weight TAEHV"),
        (without("decoder.10.conv.2.bias"), "decoder.10.conv.2.bias"),
        (lambda tensors: tensors.update({"decoder.22.weight": torch.zeros(9, 6, 3, 3)}), "no square of pixels"),
        (lambda tensors: tensors.update({"decoder.23.weight": torch.zeros(1)}), "decoder.23.weight"),
        (lambda tensors: tensors.update(layers(9, 1, (1, 2, 2))), "latents 9 channels 7"),
    ],
)
def test_a_file_of_another_network_is_refused(damage, words, tmp_path):
    tensors = layers(7, 1, (1, 2, 2))
    damage(tensors)
    torch.save(OrderedDict(tensors), tmp_path / "tae.pth")
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        read_tiny_decoder(tmp_path / "tae.pth", 7)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((4, 2, (1, 2, 2)), "16 pixels 8"),
        ((4, 1, (1, 1, 2)), "2 frames 4"),
        ((5, 1, (1, 2, 2)), "5 4"),
        (None, "tae.pth"),
    ],
)
def test_a_decoder_of_another_model_is_refused_before_the_first_step(tmp_path, sizes, words):
    folder = tiny_checkpoint(tmp_path / "model")
    if sizes:
        torch.save(OrderedDict(layers(*sizes)), tmp_path / "tae.pth")
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        wanjax.load(folder, decoder=tmp_path / "tae.pth")
