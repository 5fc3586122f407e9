# SPDX-License-Identifier: Apache-2.0
"""Meshes and rules; every network on eight devices against one device."""

from dataclasses import replace
from functools import cache, partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as Spec

import wanjax
from tests.support.compare import error
from tests.support.devices import MESHES, SHARDED_RULES
from tests.support.quick import quick
from tests.support.small_wan import network, partitioner, pipeline, transformer_config
from tests.support.tiny import tiny_checkpoint
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.kernels.autodiff import forward_only
from wanjax.layers.placement import as_shapes, with_shardings
from wanjax.models.wan.config import T2V_14B
from wanjax.models.wan.transformer import WanTransformer
from wanjax.pipelines.frames import DecodeStatic, decode_chunk
from wanjax.pipelines.mesh_sizes import parse_mesh
from wanjax.pipelines.wan.conditioning import WanConditioning
from wanjax.pricing.hlo import parse
from wanjax.sharding import (
    MESH_AXES,
    ONE_DEVICE_PARTITIONER,
    SHARDING_RULES,
    VIDEO_AXES,
    Partitioner,
    make_mesh,
    use_partitioner,
)

MAX_ERROR = 1e-5


@cache
def denoised(heads, axes=None, rules="fsdp"):
    """Denoise 27 tokens, which no axis divides; return the latents."""
    random = np.random.default_rng(1)
    embeddings = WanConditioning(*(jnp.asarray(random.normal(size=(1, 7, 8)), jnp.float32) for _ in range(2)))
    pipe = pipeline(heads, partitioner(axes, rules))
    return pipe.denoise(embeddings, size=(12, 12), frames=5, steps=2, guidance_scale=4.0, seed=0)


CASES = [
    (axes, rules, (4, 12, 40)[(i + j) % 3]) for i, axes in enumerate(MESHES) for j, rules in enumerate(SHARDED_RULES)
]


@pytest.mark.parametrize(
    ("axes", "rules", "heads"),
    [
        *quick([((2, 1, 4), "fsdp", 12), ((2, 2, 2), "tp", 4)], CASES),
        pytest.param((1, 4, 2), "replicated", 4, marks=pytest.mark.slow),
    ],
)
def test_denoising_on_a_mesh_equals_one_device(axes, rules, heads):
    latents = denoised(heads, axes, rules)
    assert latents.sharding.is_fully_replicated
    assert len(latents.sharding.device_set) == 8
    assert error(latents, np.asarray(denoised(heads), np.float64)) <= MAX_ERROR


def test_tokens_at_two_timesteps_on_a_mesh_equal_one_device():
    x, t, text = (
        jnp.asarray(np.random.default_rng(3).normal(size=s), jnp.float32) for s in ((2, 3, 6, 6, 4), 2, (2, 7, 8))
    )

    def run(partitioner):
        def call(weights):
            with use_partitioner(partitioner or ONE_DEVICE_PARTITIONER):
                model = nnx.merge(graphdef, weights)
                return model(x, t, model.context(text), model.rope(model.grid(x)), clean_frames=1)

        graphdef, weights = nnx.split(network(partial(WanTransformer, transformer_config(4)), partitioner))
        return jax.jit(call)(weights)

    assert error(run(partitioner((2, 2, 2))), np.asarray(run(None), np.float64)) <= MAX_ERROR


def test_the_autoencoder_on_a_mesh_equals_one_device():
    """Frames are split by height and width where these divide evenly; the final bytes or floats are replicated."""
    z = np.random.default_rng(2).normal(size=(1, 4, 2, 6, 4)).astype(np.float32)
    one_device, together = pipeline(4, None), pipeline(4, partitioner((2, 2, 2)))
    graphdef, weights = nnx.split(together.vae)
    static = DecodeStatic(graphdef, jnp.dtype(jnp.float32), 1)
    first, conv_cache = together.call(decode_chunk, static, np.moveaxis(z, 1, -1)[:, :1], None, weights)
    assert first.sharding.is_fully_replicated
    assert all(len({str(shard.index) for shard in x.addressable_shards}) == 8 for x in jax.tree.leaves(conv_cache))
    frames = one_device.decode(z, jnp.float32)
    assert error(together.decode(z, jnp.float32), frames.astype(np.float64)) <= MAX_ERROR
    latents = one_device.encode_video(frames)
    assert error(together.encode_video(frames), np.asarray(latents, np.float64)) <= MAX_ERROR
    assert all(weight.sharding.is_fully_replicated for weight in jax.tree.leaves(nnx.state(together.vae)))


@pytest.mark.parametrize(("layers", "axes"), quick([(5, (1, 4, 1))], [(4, (1, 4, 1)), (5, (1, 4, 1)), (4, (1, 1, 4))]))
def test_attention_gathers_the_weights_of_the_next_block(layers, axes):
    """No block waits for its weights, and the result equals that of one device.

    The mesh has only four of the eight devices. On eight, XLA's CPU client sometimes waited forever in this program,
    whose exchanges run at the same time, if other tests had run before in the process.
    """
    config = replace(transformer_config(4), layers=layers)
    random = np.random.default_rng(0)
    x, text = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((2, 2, 8, 8, 4), (2, 5, 8)))

    def run(partitioner):
        def call(weights):
            with use_partitioner(partitioner or ONE_DEVICE_PARTITIONER), forward_only():
                model = nnx.merge(graphdef, weights)
                return model(x, jnp.ones(2), model.context(text), model.rope(model.grid(x)))

        graphdef, weights = nnx.split(network(partial(WanTransformer, config), partitioner))
        executable = jax.jit(call).lower(weights).compile()
        return np.asarray(executable(weights), np.float64), executable.as_text()

    four_devices = Partitioner(make_mesh(*axes, devices=jax.devices()[:4]), SHARDING_RULES["fsdp"])
    output, hlo_text = run(four_devices)
    assert error(output, run(None)[0]) <= MAX_ERROR
    module = parse(hlo_text)
    loops = [each for part in module.computations.values() for each in part.instructions if each.opcode == "while"]
    bodies = [module.computations[loop.computation_name("body")] for loop in loops]
    opcodes = [[each.opcode.removesuffix("-start") for each in body.instructions] for body in bodies]
    blocks = max(opcodes, key=lambda names: names.count("collective-permute"))
    assert blocks.count("collective-permute") >= 2 * 3 * 8  # of two blocks, eight matrices each, sent three times
    assert "all-gather" not in blocks


@pytest.mark.parametrize("size", [(480, 832), (720, 1280), (1280, 720), (768, 1360), (1360, 768)])
@pytest.mark.parametrize("axes", MESHES)
def test_frames_keep_their_sharding_from_level_to_level(axes, size):
    """The devices exchange no frames where the autoencoder changes its resolution."""
    video_partitioner = replace(partitioner(axes), smallest_frame=(size[0] // 8, size[1] // 8))
    sizes = [(1, 2, size[0] // n, size[1] // n, 8) for n in (8, 4, 2, 1)]
    specs = {video_partitioner.activation_spec(VIDEO_AXES, shape) for shape in sizes}
    assert len(specs) == 1
    assert prod(video_partitioner.axis_size(mesh_axes) for mesh_axes in specs.pop()) == 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_a_checkpoint_makes_the_same_video_on_a_mesh(checkpoint):
    """Every weight is loaded with its sharding, and the video is the same up to rounding."""
    videos = []
    for mesh in (None, "dp=2,sp=2,tp=2"):
        pipe = wanjax.load(checkpoint, mesh=mesh)
        video = pipe("a cat", size=(32, 48), frames=1, steps=1, seed=1, guidance_scale=1.0)
        videos.append(video.frames.astype(int))
    assert np.abs(videos[1] - videos[0]).max() <= 1
    attention = pipe.transformer.blocks.self_attn
    assert attention.q.kernel.sharding.spec == Spec(None, None, ("sp", "tp"))
    assert attention.q_norm.scale.sharding.is_fully_replicated
    assert pipe.text_encoder.embed.embedding.sharding.spec == Spec(("sp", "tp"), None)


@pytest.mark.parametrize(
    ("rules", "axes", "shape", "spec"),
    [
        ("fsdp", ("layers", "embed", "heads"), (2, 8, 16), Spec(None, None, ("sp", "tp"))),
        ("fsdp", ("layers", "embed", "heads"), (2, 8, 6), Spec(None, None, "sp")),
        ("fsdp", ("layers", "embed", "heads"), (2, 8, 7), Spec(None, None, None)),
        ("fsdp", ("layers", "heads"), (2, 16), Spec(None, None)),
        ("fsdp", (None, "embed"), (4, 16), Spec(None, None)),
        ("tp", ("layers", "embed", "heads"), (2, 8, 16), Spec(None, None, "tp")),
        ("tp", ("layers", "mlp", "embed"), (2, 16, 8), Spec(None, "tp", None)),
        ("tp", ("layers", "heads"), (2, 16), Spec(None, "tp")),
        ("tp", ("vocab", "embed"), (16, 8), Spec("tp", None)),
        ("tp", (None, None, "conv_in", "conv_out"), (3, 3, 8, 8), Spec(None, None, None, None)),
    ],
)
def test_weights_have_the_sharding_of_the_rules(rules, axes, shape, spec):
    assert partitioner((2, 2, 2), rules).weight_sharding(axes, shape).spec == spec


@pytest.mark.parametrize(
    ("rules", "axes", "shape", "spec"),
    [
        ("fsdp", ("batch", "length", "embed"), (2, 8, 5), Spec("dp", ("sp", "tp"), None)),
        ("fsdp", ("batch", "length", "embed"), (1, 6, 5), Spec(None, "sp", None)),
        ("fsdp", ("batch", "length", "heads", "head_dim"), (2, 8, 4, 6), Spec("dp", ("sp", "tp"), None, None)),
        ("tp", ("batch", "length", "heads", "head_dim"), (2, 8, 4, 6), Spec("dp", "sp", "tp", None)),
        ("tp", ("batch", "length", "heads", "head_dim"), (2, 8, 3, 6), Spec("dp", ("sp", "tp"), None, None)),
        ("tp", ("batch", "length", "mlp"), (2, 8, 4), Spec("dp", "sp", "tp")),
        ("tp", ("batch", "length", "embed"), (2, 8, 4), Spec("dp", ("sp", "tp"), None)),
        (
            "fsdp",
            ("batch", "frames", "height", "width", None),
            (1, 5, 3, 8, 4),
            Spec(None, None, None, MESH_AXES, None),
        ),
        (
            "fsdp",
            ("batch", "frames", "height", "width", None),
            (1, 5, 6, 4, 4),
            Spec(None, None, "tp", ("dp", "sp"), None),
        ),
        ("fsdp", ("batch", "frames", "height", "width", None), (2, 5, 6, 6, 4), Spec("dp", None, "tp", "sp", None)),
    ],
)
def test_activations_have_the_sharding_of_the_rules(rules, axes, shape, spec):
    assert partitioner((2, 2, 2), rules).activation_spec(axes, shape) == spec


def test_eight_chips_share_the_weights_of_the_14b():
    """The 28.6 GB are split over `sp` and `tp`, and replicated over `dp`."""

    def bytes_a_device(axes, rules):
        make = partial(WanTransformer, T2V_14B, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
        weights = jax.tree.leaves(
            nnx.state(with_shardings(as_shapes(lambda rngs: make(rngs=rngs)), partitioner(axes, rules)))
        )
        return sum(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in weights)

    assert bytes_a_device((1, 1, 8), "fsdp") < 3.7e9
    assert bytes_a_device((2, 1, 4), "fsdp") < 7.3e9
    assert bytes_a_device((2, 1, 4), "tp") < 7.3e9
    assert 28.5e9 < bytes_a_device((2, 1, 4), "replicated") < 28.7e9


def test_an_automatic_mesh_keeps_a_requested_sp():
    pipe = wanjax.load("nano", mesh="auto,sp=2")
    assert pipe.partitioner.mesh.shape["sp"] == 2


EXAMPLE_MESH = "dp=2,sp=1,tp=4"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mesh": "dp=2,sp=2,tp=4"}, "mesh dp=2,sp=2,tp=4 16 devices 8 dp sp tp"),
        ({"mesh": "tp=3"}, "3 devices 8"),
        ({"mesh": "dp=0,tp=8"}, "axis 1"),
        ({"mesh": "tp=8,pp=1"}, f"'tp=8,pp=1' {EXAMPLE_MESH} auto"),
        ({"mesh": "auto,sp=3"}, "8 devices sp=3"),
        *(
            ({"mesh": mesh}, EXAMPLE_MESH)
            for mesh in ("tp=4,tp=2", "8", "auto,sp=", "auto,sp=0", "auto,tp=2", "auto,sp=2,tp=2", "auto sp=2")
        ),
        ({"rules": "zero"}, "rules 'zero' fsdp tp replicated"),
    ],
)
def test_invalid_meshes_and_rules_are_refused(options, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        wanjax.load("nano", **options)


def test_a_mesh_is_parsed_and_created():
    assert parse_mesh("tp=4, dp=2") == (2, 1, 4)
    pipe = wanjax.load("nano", mesh="auto", rules="tp")
    assert pipe.partitioner.mesh.size == 4  # four of the eight devices, because 80 tokens are few


def test_all_accelerators_are_used_by_default(monkeypatch):
    assert wanjax.load("nano").partitioner.is_single_device  # even where the CPU simulates several devices
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert wanjax.load("nano").partitioner == wanjax.load("nano", mesh="auto").partitioner
    [device, *_] = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert wanjax.load("nano").partitioner.is_single_device
