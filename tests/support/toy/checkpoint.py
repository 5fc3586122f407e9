# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of toy families: random weights in the layout of diffusers."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.support.toy import LENGTH
from tests.support.toy_tokenizer import save_tokenizer
from wanjax.checkpoints import modules
from wanjax.models.t5 import T5Config
from wanjax.pipelines.family import Family

T5 = {"model_type": "t5", "feed_forward_proj": "gated-gelu"}
T5_NAMES = {
    "width": "d_model",
    "heads": "num_heads",
    "head_dim": "d_kv",
    "mlp_dim": "d_ff",
    "layers": "num_layers",
    "buckets": "relative_attention_num_buckets",
    "max_distance": "relative_attention_max_distance",
    "eps": "layer_norm_epsilon",
}


def write_checkpoint(folder: Path, family: Family) -> Path:
    """Write a checkpoint of a family's only preset; return its folder."""
    random, model = np.random.default_rng(0), family.presets[0].model
    assert model is not None
    classes = {}
    for name, config in model.spec.networks.items():
        toy_network, is_t5 = family.network_of(config), isinstance(config, T5Config)
        entries = {T5_NAMES.get(key, key) if is_t5 else key: value for key, value in vars(config).items()}
        _write(folder / name / "config.json", entries | (T5 if is_t5 else {}))
        graphdef, state = nnx.split(toy_network.abstract(dtype=jnp.float32, param_dtype=jnp.float32))
        weights = jax.tree.map(lambda x: random.normal(0, 0.3, x.shape).astype(np.float32), state)
        modules.export(nnx.merge(graphdef, weights), toy_network.rules, folder / name / "model.safetensors")
        classes[name] = ["toys", toy_network.kind.classes[0]]
    save_tokenizer(folder / "tokenizer", model_max_length=LENGTH)
    _write(folder / "scheduler" / "scheduler_config.json", {"_class_name": "Ancestral"})
    other_parts = {"tokenizer": ["transformers", "T5TokenizerFast"], "scheduler": ["toys", "AncestralScheduler"]}
    _write(folder / "model_index.json", {"_class_name": family.pipelines[0]} | classes | other_parts)
    return folder


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
