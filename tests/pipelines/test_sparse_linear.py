# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with sparse-linear attention: their attention, conversions, training and LoRAs."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wanjax
from tests.support import small_wan, tiny
from tests.support.clips import write_clips
from tests.support.commands import refused, succeeded
from tests.support.commands import wanjax as command
from tests.support.compare import error
from tests.support.quick import quick
from tests.support.words import has_line_with_words, line_with_words
from wanjax.checkpoints.files import load_safetensors, save_safetensors
from wanjax.checkpoints.modules import parameters
from wanjax.errors import UnsupportedError, WanjaxError, WanjaxWarning
from wanjax.kernels.attention import AttentionConfig, SparseLinearAttentionConfig
from wanjax.models.wan.transformer import WanTransformer
from wanjax.pipelines.wan.conditioning import WanConditioning
from wanjax.training import LoraConfig, OptimizerConfig, TrainConfig, Training

pytestmark = pytest.mark.usefixtures("cached_programs")

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
SMALL = {"size": (64, 64), "frames": 9, "steps": 1, "guidance_scale": 1.0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.tiny_sparse_linear_checkpoint(tmp_path_factory.mktemp("sparse"))


def test_a_checkpoint_attends_as_it_was_trained(checkpoint):
    """Another share of keys changes the video, and the metadata has the requested attention."""
    videos, requested = [], "sla:top=0.5,block_q=8,block_kv=4"
    pipes = [wanjax.load(checkpoint, attention=attention) for attention in (None, requested)]
    conditioning = pipes[0].encode("a cat", "")
    for pipe in pipes:
        videos.append(np.asarray(pipe.denoise(conditioning, **SMALL)))
    assert pipes[0].transformer.attention == AttentionConfig(sparse=SparseLinearAttentionConfig(0.1))
    assert [pipe.components.metadata.get("attention") for pipe in pipes] == [None, requested]
    assert np.abs(videos[1] - videos[0]).max() > 1e-3


def test_a_checkpoint_is_converted_and_back_unchanged(checkpoint, tmp_path):
    succeeded(command("convert", checkpoint, tmp_path / "converted"))
    succeeded(command("convert", tmp_path / "converted", tmp_path / "diffusers", "--to", "diffusers"))
    before, after = (load_safetensors(folder / WEIGHTS) for folder in (checkpoint, tmp_path / "diffusers"))
    assert before.keys() == after.keys()
    assert before["blocks.1.attn1.proj_l.weight"].shape == (12, 12)
    for key, x in before.items():
        np.testing.assert_array_equal(after[key], x)
    weights = [parameters(wanjax.load(folder).transformer) for folder in (checkpoint, tmp_path / "converted")]
    jax.tree.map(np.testing.assert_array_equal, *weights)


@pytest.mark.parametrize("requested", ["reference", "chunked", "radial", "auto:window=9"])
def test_other_attention_is_refused(requested, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "radial --attention auto" if requested == "radial" else "sparse-linear --attention auto sla:top=0.15"
    with pytest.raises(UnsupportedError, match=line_with_words(words)):
        wanjax.load(checkpoint, attention=requested)
    assert has_line_with_words(refused("a cat", "--model", str(checkpoint), "--attention", requested), words)


def test_eight_devices_agree_with_one():
    config = replace(small_wan.transformer_config(4), sparse_linear=SparseLinearAttentionConfig())
    random = np.random.default_rng(0)
    conditioning = WanConditioning(*(jnp.asarray(random.normal(size=(1, 3, 8)), jnp.float32) for _ in range(2)))
    requested, latents = AttentionConfig.parse("sla:top=0.5,block_q=8,block_kv=4"), []
    for axes in (None, (2, 2, 2)):
        pipe = small_wan.pipeline(4, small_wan.partitioner(axes))
        transformer = small_wan.network(partial(WanTransformer, config, attention=requested), pipe.partitioner)
        pipe.components.override("transformer", transformer)
        pipe.model = replace(pipe.model, transformer=config)
        latents.append(np.asarray(pipe.denoise(conditioning, size=(24, 24), frames=5, steps=1, guidance_scale=1.0)))
    assert error(latents[1], latents[0]) <= 1e-5


TRAINED_ATTENTION = "sla:top=0.3,block_q=8,block_kv=4"
TRAINING = TrainConfig(
    steps=2,
    batch_size=2,
    size=(32, 32),
    frames=5,
    buckets=False,
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return tiny.tiny_checkpoint(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return write_clips(tmp_path_factory.mktemp("clips"), 3)


def train(dense, clips, out, attention=TRAINED_ATTENTION, **changes):
    """Train a dense checkpoint with sparse-linear attention, and return the path of the result."""
    with pytest.warns(WanjaxWarning, match="zeros"):
        pipe = wanjax.load(dense, attention=attention, param_dtype="float32", note=print)
    return Training(pipe, clips, out, replace(TRAINING, **changes)).run()


@pytest.fixture(scope="module")
def lora(dense, clips, tmp_path_factory):
    return train(dense, clips, tmp_path_factory.mktemp("lora"), lora=LoraConfig(rank=2))


def load_transformer(*arguments, **options):
    return wanjax.load(*arguments, note=lambda message: None, **options).transformer


LORA_KEYS = [
    ("diffusers", "transformer.blocks.0.attn1.proj_l.diff"),
    ("comfy", "diffusion_model.blocks.0.self_attn.attn_op.local_attn.proj_l.diff"),
]


@pytest.mark.parametrize(
    ("lora_format", "key"),
    quick(LORA_KEYS[:1], LORA_KEYS),  # tests/training has quick tests of formats
)
def test_a_lora_trains_a_dense_model_to_attend_sparsely(lora_format, key, dense, clips, lora, tmp_path):
    """The file names the attention and has the projection's weights. A requested attention replaces the file's."""
    if lora_format == "comfy":
        lora = train(dense, clips, tmp_path / "out", lora=LoraConfig(rank=2), lora_format=lora_format)
    transformers = {
        requested: load_transformer(dense, lora=lora, attention=requested) for requested in (None, "sla:top=1", "auto")
    }
    expected = {
        None: AttentionConfig.parse(TRAINED_ATTENTION),
        "sla:top=1": AttentionConfig.parse("sla:top=1"),
        "auto": AttentionConfig(),
    }
    assert {requested: transformer.attention for requested, transformer in transformers.items()} == expected
    change = load_safetensors(lora)[key]
    assert np.abs(change).max() > 0
    np.testing.assert_array_equal(transformers[None].blocks.self_attn.proj_l.kernel[0], change.T)
    assert transformers["auto"].blocks.self_attn.proj_l is None


ALL_KEYS, SOME_KEYS = ("sla:top=1", 0, 1e-10), (TRAINED_ATTENTION, 1e-5, 1)


@pytest.mark.parametrize(("attention", "min_loss", "max_loss"), quick([ALL_KEYS], [ALL_KEYS, SOME_KEYS]))
def test_a_preserved_clip_trains_towards_the_dense_model(attention, min_loss, max_loss, dense, tmp_path):
    """The untrained network attends to all keys: the first loss comes only from keys that are left out."""
    folder = write_clips(tmp_path / "clips", 2)
    rows = [{"file": f"{i}.gif", "text": "a cat", "preserve": True} for i in range(2)]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train(dense, folder, tmp_path / "out", attention, steps=1, lora=LoraConfig(rank=2))
    (line,) = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert min_loss <= json.loads(line)["loss"] <= max_loss


@pytest.mark.slow  # a quick test trains a LoRA, whose weights of the projection are trained in the same way
def test_training_all_weights_makes_a_dense_model_attend_sparsely(dense, clips, tmp_path):
    transformer = load_transformer(train(dense, clips, tmp_path / "out", lora=None))
    assert transformer.attention == AttentionConfig.parse(TRAINED_ATTENTION)
    assert np.abs(transformer.blocks.self_attn.proj_l.kernel[...]).max() > 0


def test_convert_merges_a_lora_with_its_attention(dense, lora, tmp_path):
    succeeded(command("convert", dense, tmp_path / "merged", "--lora", lora))
    with_lora, merged = load_transformer(dense, lora=lora), load_transformer(tmp_path / "merged")
    assert merged.attention == with_lora.attention == AttentionConfig.parse(TRAINED_ATTENTION)
    jax.tree.map(np.testing.assert_array_equal, parameters(with_lora), parameters(merged))


@pytest.mark.parametrize(
    ("attention_text", "words"), [("sla:top=9", "other.safetensors 9"), ("nothing", "other.safetensors nothing")]
)
def test_a_lora_with_an_invalid_attention_is_refused(dense, lora, tmp_path, attention_text, words):
    lora_file = tmp_path / "other.safetensors"
    save_safetensors(lora_file, load_safetensors(lora), {"wanjax": json.dumps({"attention": attention_text})})
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        load_transformer(dense, lora=lora_file)


@pytest.mark.parametrize("metadata", ["{", "[]", "null", "{}"])
def test_a_lora_without_an_attention_changes_no_attention(dense, lora, tmp_path, metadata):
    lora_file = tmp_path / "other.safetensors"
    save_safetensors(lora_file, load_safetensors(lora), {"wanjax": metadata})
    assert load_transformer(dense, lora=lora_file).attention == AttentionConfig()
