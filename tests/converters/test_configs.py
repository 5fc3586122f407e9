# SPDX-License-Identifier: Apache-2.0
"""Configs of networks from untrusted files are read, or refused with the name of the wrong entry."""

import json
from contextlib import suppress
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import wanjax
from tests.support import tiny
from tests.support.commands import refused
from tests.support.quick import quick
from tests.support.types import unchecked
from tests.support.words import has_line_with_words
from wanjax.checkpoints.files import Spec, Tensors
from wanjax.checkpoints.network_kinds import read_network
from wanjax.converters.cogvideox.vae import vae_config
from wanjax.converters.configs import read_config
from wanjax.converters.wan import original
from wanjax.converters.wan.diffusers import transformer_config
from wanjax.errors import WanjaxError
from wanjax.pipelines.hunyuanvideo.recognise import language_model
from wanjax.registry import kinds, open_source

MODELS = {
    "wan": tiny.tiny_image_checkpoint,
    "wan-vace": tiny.tiny_control_checkpoint,
    "wan-causal": tiny.tiny_causal_checkpoint,
    "cogvideox": tiny.tiny_cogvideox_checkpoint,
    "hunyuanvideo": partial(tiny.tiny_hunyuan_checkpoint, pictured=True),
}
WRONG_VALUES = ["x", "", -1, 0, None, True, 1e30, 2**40, float("nan"), [], {}, [1], [1] * 40, ["x"], [[]], [True] * 40]


@pytest.fixture(scope="module", params=quick(["wan"], MODELS))
def source(request, tmp_path_factory):
    return open_source(MODELS[request.param](tmp_path_factory.mktemp("model") / "one"))


def test_any_value_of_any_entry_is_read_or_refused(source):
    """No other error than WanjaxError is raised."""
    known_classes = {kind for each in kinds() for kind in each.classes}
    for name, component in source.components.items():
        kind = component.kind
        if kind not in known_classes:
            continue
        config = source[name].config()
        for key in config:
            for value in WRONG_VALUES:
                _read_network(kind, config | {key: value})
            _read_network(kind, {name: entry for name, entry in config.items() if name != key})


def _read_network(kind, config):
    with suppress(WanjaxError):
        network = read_network(kind, config, kinds(), "the file")
        if sum(x for x in config.values() if type(x) is int) < 2**20:  # else it takes long
            network.abstract(dtype=jnp.float32, param_dtype=jnp.float32)


@pytest.mark.parametrize(
    ("component", "key", "value"),
    [
        ("transformer", "num_layers", -1),
        ("transformer", "num_layers", "x"),
        ("transformer", "num_attention_heads", 0),
        ("transformer", "patch_size", "x"),
        ("transformer", "ffn_dim", None),
        ("transformer", "eps", "small"),
        ("vae", "temperal_downsample", [True] * 40),
        ("vae", "dim_mult", [1, -2, 4, 4]),
        ("vae", "z_dim", 4.5),
        ("text_encoder", "num_layers", -1),
        ("text_encoder", "d_ff", "wide"),
    ],
)
def test_the_message_names_the_wrong_entry(tmp_path, monkeypatch, component, key, value):
    monkeypatch.chdir(tmp_path)
    model = tiny.tiny_checkpoint(tmp_path / "model")
    file = Path(model) / component / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with unchecked():
        output = refused("generate", "a", "--model", model)
        assert has_line_with_words(output, f"{component}'s config.json {key}")
        with pytest.raises(WanjaxError, match=key):
            wanjax.load(model).vae, wanjax.load(model).text_encoder


MLP_WIDTHS = {1536: 8960, 3072: 14336, 5120: 13824}  # by width


def authors_specs(width):
    """Return the shapes of VACE's transformer, by the authors' names, from which its config is read."""
    shapes = {
        "patch_embedding.weight": (width, 16, 1, 2, 2),
        "vace_patch_embedding.weight": (width, 96, 1, 2, 2),
        "blocks.0.ffn.0.weight": (MLP_WIDTHS[width], width),
        "blocks.1.modulation": (1, 6, width),
        "vace_blocks.0.modulation": (1, 6, width),
        "time_embedding.0.weight": (width, 256),
        "head.head.weight": (64, width),
        "text_embedding.0.weight": (width, 4096),
    }
    return {name: Spec(shape, np.dtype(np.float32)) for name, shape in shapes.items()}


@pytest.mark.parametrize("width", MLP_WIDTHS)
@pytest.mark.parametrize("heads", [None, "correct", 2, 16, 48, 96, 0, -12, True, "12", [12], 12.0, 7])
def test_unpublished_numbers_of_heads_are_reported(width, heads):
    """Shapes of tensors do not determine the number of heads, and a wrong number would make noise."""
    expected = width // 128
    config = {} if heads is None else {"num_heads": expected if heads == "correct" else heads, "vace_layers": None}
    if heads in (None, "correct"):
        result = transformer_config(original.transformer_json(authors_specs(width), config))
        assert (result.heads, result.head_dim) == (expected, 128)
        return
    with pytest.raises(WanjaxError) as raised:
        transformer_config(original.transformer_json(authors_specs(width), config))
    assert has_line_with_words(str(raised.value), f"config.json {heads if isinstance(heads, int) else ''} {width}")


AUTOENCODER = {
    "block_out_channels": [], "temporal_compression_ratio": 4, "latent_channels": 16, "layers_per_block": 3,
    "norm_num_groups": 32, "sample_height": 480, "sample_width": 720, "scaling_factor": 0.7,
}  # fmt: skip


def read_control_layers():
    json = original.transformer_json(authors_specs(1536), {"vace_layers": [0]}) | {"vace_layers": list(range(40))}
    return read_config("the transformer's config.json", json, transformer_config)


WRONG_CONFIGS = [  # what reads a wrong config, and words of its message
    (read_control_layers, "vace_layers evenly spaced"),
    (partial(vae_config, AUTOENCODER), "block_out_channels []"),
    *(
        (partial(language_model, Tensors({}), {"text_config": text}), "text_config object")
        for text in (None, "x", 3, [])
    ),
    *(
        (partial(original.transformer_json, authors_specs(1536), {"vace_layers": layers}), "vace_layers list")
        for layers in (3, "0, 5", {"0": 1}, True)
    ),
]


@pytest.mark.parametrize(("read", "words"), WRONG_CONFIGS)
def test_impossible_values_are_reported(read, words):
    with pytest.raises(WanjaxError) as raised:
        read()
    assert has_line_with_words(str(raised.value), words)
