# SPDX-License-Identifier: Apache-2.0
"""The tiny decoder of previews, against its published formula in torch, from files as its author stores them."""

from collections import OrderedDict

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
from tests.support.words import naming, says
from wanjax.errors import WanjaxError
from wanjax.models.taehv import pictures
from wanjax.pipelines.previews import tiny_decoder
from wanjax.pipelines.previews.tiny_decoder import read_tiny_decoder

WIDTHS = (12, 8, 6, 6)
LEVELS = (3, 9, 15)  # the numbers of their first layers


def layers(latents: int, patch: int, growing: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    """Returns random tensors by the names and shapes of taehv.py; a level's `growing` is the frames that it makes."""
    shapes = {"encoder.0.weight": (64, 3, 3, 3), "decoder.1.weight": (WIDTHS[0], latents, 3, 3)}
    shapes |= {"decoder.1.bias": (WIDTHS[0],), "decoder.22.weight": (3 * patch**2, WIDTHS[3], 3, 3)}
    shapes |= {"decoder.22.bias": (3 * patch**2,)}
    for first, width, after, frames in zip(LEVELS, WIDTHS[:3], WIDTHS[1:], growing, strict=True):
        for block in range(first, first + 3):
            for conv, channels in ((0, 2 * width), (2, width), (4, width)):
                shapes |= {f"decoder.{block}.conv.{conv}.weight": (width, channels, 3, 3)}
                shapes |= {f"decoder.{block}.conv.{conv}.bias": (width,)}
        shapes |= {f"decoder.{first + 4}.conv.weight": (frames * width, width, 1, 1)}
        shapes |= {f"decoder.{first + 5}.weight": (after, width, 3, 3)}
    random = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    found = {name: x / max(1, int(np.prod(x.shape[1:]))) ** 0.5 for name, x in made.items()}
    found["decoder.22.weight"] *= 0.2  # few pixels are clipped
    return found | {"decoder.22.bias": 0.5 + 0.1 * made["decoder.22.bias"]}


def decoded(tensors: dict[str, torch.Tensor], latents: torch.Tensor, patch: int, doublings: int) -> np.ndarray:
    """Returns pictures [T 3 H W] of latents [T C H W] of one video, the last of those that the levels would make."""

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


FILES = [
    (stored, patch, growing) for stored in ("pth", "safetensors") for patch, growing in ((1, (1, 2, 2)), (2, (2, 2, 1)))
]


@pytest.mark.parametrize(("stored", "patch", "growing"), quick([FILES[0], FILES[3]], FILES))
def test_it_makes_the_reference_s_pictures(stored, patch, growing, tmp_path):
    tensors, file = layers(5, patch, growing), tmp_path / f"tae.{stored}"
    if stored == "pth":
        torch.save(OrderedDict(tensors), file)
    else:
        save_file(tensors, file)
    latents = torch.randn(4, 5, 6, 10, generator=torch.Generator().manual_seed(1))
    network = read_tiny_decoder(file, 5).network
    ours = nnx.jit(lambda network, z: [network(z, doublings) for doublings in range(4)])
    for doublings, answer in enumerate(ours(network, latents.permute(0, 2, 3, 1)[None].numpy())):
        expected = decoded(tensors, latents, patch, doublings)
        assert ((expected > 0) & (expected < 1)).mean() > 0.5
        assert error(np.moveaxis(np.asarray(answer[0]), -1, 1), expected.astype(np.float64)) <= 1e-5


@pytest.mark.parametrize(("height", "tall"), [(6, 24), (10, 20), (12, 24), (13, 13), (30, 30)])
def test_pictures_are_as_tall_as_they_may_be(height, tall, tmp_path):
    torch.save(OrderedDict(layers(3, 1, (1, 2, 2))), tmp_path / "tae.pth")
    network = read_tiny_decoder(tmp_path / "tae.pth", 3).network
    made = nnx.eval_shape(lambda network, z: pictures(network, z, 25), network, jnp.zeros((2, 3, 1, height, 4)))
    assert made.shape == (2, 1, tall, 4 * tall // height, 3)


def test_previews_are_made_with_it(tmp_path, monkeypatch):
    pipe = wanjax.load("nano")
    channels = pipe.architecture.latent_shape(pipe.defaults)[1]
    tensors = layers(channels, 1, (1, 2, 2))
    torch.save(OrderedDict(tensors), tmp_path / "tae.pth")
    monkeypatch.setattr(tiny_decoder, "TALLEST", 32)
    pipe.preview_with(tmp_path / "tae.pth")
    seen = []
    pipe.denoise(pipe.encode("a"), steps=1, callback=lambda step: seen.append((step.preview(), np.asarray(step.x0))))
    assert not pipe.components.has("vae")
    [(preview, x0)] = seen
    expected = decoded(tensors, torch.from_numpy(x0[0].copy()).transpose(0, 1), 1, 2)
    np.testing.assert_allclose(np.moveaxis(preview[0], -1, 1), 255 * expected, atol=0.51)


def test_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(OrderedDict(layers(16, 1, (1, 2, 2))), "tae.pth")
    torch.save(OrderedDict(layers(32, 1, (1, 2, 2))), "other.pth")
    options = ("a red circle", "--steps", "1", "--dir", "one", "--preview-decoder")
    assert says(refused(*options, "other.pth"), "latents 32 channels 16")
    succeeded(command(*options, "tae.pth"))
    with Image.open("one/preview.png") as page:
        assert page.size == (2 * 5 * 64, 2 * 64)


def without(name):
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (without("decoder.22.weight"), "decoder.22.weight TAEHV"),
        (without("decoder.10.conv.2.bias"), "decoder.10.conv.2.bias"),
        (lambda tensors: tensors.update({"decoder.22.weight": torch.zeros(9, 6, 3, 3)}), "no square of pixels"),
        (lambda tensors: tensors.update({"decoder.23.weight": torch.zeros(1)}), "decoder.23.weight"),
        (lambda tensors: tensors.update(layers(9, 1, (1, 2, 2))), "latents 9 channels 7"),
    ],
)
def test_another_file_is_refused(harm, why, tmp_path):
    tensors = layers(7, 1, (1, 2, 2))
    harm(tensors)
    torch.save(OrderedDict(tensors), tmp_path / "tae.pth")
    with pytest.raises(WanjaxError, match=naming(why)):
        read_tiny_decoder(tmp_path / "tae.pth", 7)
