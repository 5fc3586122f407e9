# SPDX-License-Identifier: Apache-2.0
"""`help` prints types as they are written in the code; type checkers can still read the annotations."""

import pydoc
import re
from collections.abc import Callable, Mapping
from typing import get_type_hints

import numpy as np
import pytest
from jaxtyping import Array, Float, TypeCheckError

import wanjax
from wanjax.dims import ReadableHint, readable_signature
from wanjax.models.cogvideox.transformer import CogVideoXTransformer
from wanjax.models.hunyuanvideo.transformer import HunyuanVideoTransformer
from wanjax.models.wan.causal import WanCausalTransformer
from wanjax.models.wan.control import WanControlTransformer
from wanjax.models.wan.image import WanImageTransformer
from wanjax.models.wan.transformer import WanTransformer

PUBLIC = sorted({*wanjax.__all__} - {"__version__"})  # __version__ is a string
NOISE = ("jaxtyping", "typing.", "Union[", "NoneType", "jaxlib", "lambda", "<class", "<function", " at 0x", "<factory>")
Latents = Float[Array, "B C T H W"]


def help_text(value: object) -> str:
    return pydoc.plain(pydoc.render_doc(value))


def signatures(text: str) -> list[str]:
    """Return the signatures in a help text."""
    return [line for line in text.splitlines() if re.match(r"[ |]*\w+\(", line)]


@pytest.mark.parametrize("name", PUBLIC)
def test_help_of_a_public_name_has_no_noise(name):
    text = help_text(getattr(wanjax, name))
    assert not [word for word in ("jaxtyping", "functools", "lambda model") if word in text]
    noise = [word for line in signatures(text) for word in NOISE if word in line]
    assert not noise, noise


def test_help_of_a_loaded_pipeline_shows_shapes():
    text = help_text(wanjax.load("nano"))
    assert not [word for line in signatures(text) for word in NOISE if word in line]
    for method in ("decode(", "decode_chunks(", "denoise(", "encode_video("):
        line = next(line for line in text.splitlines() if f" {method}self" in line)
        assert 'Float[Array, "' in line or 'Shaped[Array, "' in line, line
    assert 'denoise(self, conditioning: Conditioning, *, noise: Float[Array, "B C T H W"] | ' in text
    assert "settings(self, *, size: tuple[int, int] | str | None = None, height: int | None = None," in text


@pytest.mark.parametrize(
    ("network", "context"),
    [
        (WanTransformer, "tuple[Any, ...]"),
        (WanImageTransformer, "ImageContext"),
        (WanControlTransformer, "ControlContext"),
        (WanCausalTransformer, "Context"),
        (CogVideoXTransformer, "Context"),
        (HunyuanVideoTransformer, "Context"),
    ],
)
def test_help_of_a_transformer_shows_how_it_is_called(network, context):
    text = help_text(network)
    [call] = [line for line in signatures(text) if " __call__(" in line]
    assert not [word for word in NOISE if word in call], call
    assert f'context: Float[Array, "B S _E"] | {context}, ' in call
    assert "transformer(latents, t, text" in text


def test_help_of_returned_values_shows_shapes():
    assert 'Video(frames: UInt8[ndarray, "T H W 3"], fps: int | float, settings: Mapping[str, Any])' in help_text(
        wanjax.Video
    )
    assert 'preview(self) -> UInt8[ndarray, "B T _H _W 3"]' in help_text(wanjax.Step)


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (Latents | None, 'Float[Array, "B C T H W"] | None'),
        (Float[Array | np.ndarray, "..."] | None, 'Float[Array, "..."] | Float[ndarray, "..."] | None'),
        (Callable[[Latents], bool | None], 'Callable[[Float[Array, "B C T H W"]], bool | None]'),
        (Mapping[str, wanjax.Tiling], "Mapping[str, Tiling]"),
        (type(None), "None"),
    ],
)
def test_an_annotation_prints_as_it_is_written(hint, text):
    assert repr(ReadableHint(hint)) == text


def test_annotations_stay_for_type_checkers():
    def scale(latents: Latents, by: float | None = None) -> Latents: ...

    assert get_type_hints(readable_signature(readable_signature(scale))) == {
        "latents": Latents,
        "by": float | None,
        "return": Latents,
    }
    assert help_text(scale).endswith(
        'scale(latents: Float[Array, "B C T H W"], by: float | None = None) -> Float[Array, "B C T H W"]\n'
    )
    with pytest.raises(TypeCheckError):
        wanjax.Video(np.zeros((2, 4, 4), np.uint8), 8, {})
