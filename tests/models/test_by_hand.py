# SPDX-License-Identifier: Apache-2.0
"""A direct call of a transformer with encoded prompts computes the forward pass of a run."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import wanjax
from tests.support import tiny
from tests.support.quick import quick
from wanjax.errors import WanjaxError
from wanjax.layers.placement import on_weights_mesh
from wanjax.models.wan.causal import angles_at, slot_of
from wanjax.sharding import ONE_DEVICE_PARTITIONER, current_partitioner

TEXT, MASK = jax.ShapeDtypeStruct((1, 7, 16), jnp.float32), jax.ShapeDtypeStruct((1, 7), bool)
CHAT_TEXT = jax.ShapeDtypeStruct((1, 7, 24), jnp.float32)
T = jax.ShapeDtypeStruct((1,), jnp.float32)


def latents(channels: int, frames: int = 2) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, frames, 4, 6, channels), jnp.float32)


def image(tokens: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, tokens, 16), jnp.float32)


def rope(model: Any, x: Any) -> Any:
    return model.rope(model.grid(x))


def call_with_cache(model: Any, x: Any, t: Any, text: Any) -> Any:
    """Predict the first chunk of a video, with all inputs of a run."""
    context, tokens = model.context(text), int(np.prod(model.grid(x)))
    return model(x, t, context, angles_at(model.config, 0), model.empty_kv_cache(x), slot_of(model.config, 0, tokens))


CASES = {  # a checkpoint, a direct call, the call of a run, and the arguments
    "wan": (
        tiny.tiny_checkpoint,
        lambda model, x, t, text: model(x, t, text),
        lambda model, x, t, text: model(x, t, model.context(text), rope(model, x)),
        (latents(4), T, TEXT),
    ),
    "wan-i2v": (
        tiny.tiny_image_checkpoint,
        lambda model, x, t, text, image: model(x, t, text, image=image),
        lambda model, x, t, text, image: model(x, t, model.context(text, image), rope(model, x)),
        (latents(12), T, TEXT, image(5)),
    ),
    "wan-flf": (
        partial(tiny.tiny_image_checkpoint, last=True),
        lambda model, x, t, text, image: model(x, t, text, image=image),
        lambda model, x, t, text, image: model(x, t, model.context(text, image), rope(model, x)),
        (latents(12), T, TEXT, image(10)),
    ),
    "wan-vace": (
        tiny.tiny_control_checkpoint,
        lambda model, x, t, text, control: model(x, t, text, control=control),
        lambda model, x, t, text, control: model(x, t, model.context(text), rope(model, x), control=control),
        (latents(4), T, TEXT, latents(72)),
    ),
    "wan-ti2v": (
        tiny.tiny_residual_checkpoint,
        lambda model, x, t, text: model(x, t, text, clean_frames=1),
        lambda model, x, t, text: model(x, t, model.context(text), rope(model, x), clean_frames=1),
        (latents(4), T, TEXT),
    ),
    "wan-causal": (
        tiny.tiny_causal_checkpoint,
        lambda model, x, t, text: model(x, t, text),
        call_with_cache,
        (latents(4), T, TEXT),
    ),
    "cogvideox": (
        tiny.tiny_cogvideox_checkpoint,
        lambda model, x, t, text: model(x, t, text),
        lambda model, x, t, text: model(x, t, model.context(text), model.positions(model.grid(x), 7)),
        (latents(4), T, TEXT),
    ),
    "hunyuanvideo": (
        tiny.tiny_hunyuan_checkpoint,
        lambda model, x, t, text, mask: model(x, t, text, text_mask=mask),
        lambda model, x, t, text, mask: model(x, t, model.context(text, mask), rope(model, x)),
        (latents(9), T, CHAT_TEXT, MASK),
    ),
}


@pytest.fixture(scope="module")
def load_as_shapes(tmp_path_factory):
    """Return a function that loads a transformer as shapes."""

    @cache
    def load(case: str) -> Any:
        folder = CASES[case][0](tmp_path_factory.mktemp(case))
        return wanjax.load(folder).components.abstract().get("transformer")

    return load


def trace(model: Any, call: Any, *arguments: Any) -> str:
    graphdef, weights = nnx.split(model)
    return str(
        jax.make_jaxpr(lambda weights, *arguments: call(nnx.merge(graphdef, weights), *arguments))(weights, *arguments)
    )


@pytest.mark.parametrize("case", quick(("wan-i2v", "wan-causal", "cogvideox", "hunyuanvideo"), CASES))
def test_a_direct_call_needs_only_encoded_prompts(load_as_shapes, case):
    _, direct_call, run_call, arguments = CASES[case]
    assert trace(load_as_shapes(case), direct_call, *arguments) == trace(load_as_shapes(case), run_call, *arguments)


def test_a_prompt_without_a_mask_has_all_tokens(load_as_shapes):
    def call_with_mask(model: Any, x: Any, t: Any, text: Any) -> Any:
        return model(x, t, text, text_mask=jnp.ones(text.shape[:2], bool))

    model, arguments = load_as_shapes("hunyuanvideo"), (latents(9), T, CHAT_TEXT)
    assert trace(model, lambda model, *x: model(*x), *arguments) == trace(model, call_with_mask, *arguments)


@pytest.mark.parametrize("case", quick(("wan-i2v", "wan-causal", "cogvideox", "hunyuanvideo"), CASES))
def test_latents_of_a_wrong_shape_are_refused(load_as_shapes, case):
    """For example, diffusers' latents have channels before frames."""
    _, direct_call, _, arguments = CASES[case]
    wrong_arguments = [jax.ShapeDtypeStruct((1, 2, 2, 4, 8), x.dtype) if x.ndim == 5 else x for x in arguments]
    with pytest.raises(WanjaxError, match=rf"\b{arguments[0].shape[-1]}\b"):
        trace(load_as_shapes(case), direct_call, *wrong_arguments)


def test_a_missing_image_is_reported(load_as_shapes):
    with pytest.raises(WanjaxError, match="image="):
        trace(load_as_shapes("wan-i2v"), lambda model, *x: model(*x), latents(12), T, TEXT)


class ReportPartitioner(nnx.Module):
    """A module that returns the partitioner of its forward pass."""

    def __init__(self, sharding: jax.sharding.Sharding):
        self.weight = nnx.Param(jax.device_put(jnp.zeros((8, 8)), sharding))

    @on_weights_mesh
    def __call__(self) -> Any:
        return current_partitioner()


def test_a_forward_runs_on_the_mesh_of_its_weights():
    mesh = wanjax.make_mesh(sp=2, tp=4)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, ("sp", "tp")))
    assert ReportPartitioner(sharding)().mesh == mesh
    assert current_partitioner() is ONE_DEVICE_PARTITIONER
    assert ReportPartitioner(jax.sharding.SingleDeviceSharding(jax.devices()[0]))() is ONE_DEVICE_PARTITIONER
    assert (
        nnx.jit(lambda module: module().is_single_device and 1)(ReportPartitioner(sharding)) == 1
    )  # traced arrays have no mesh


@pytest.mark.slow
def test_a_forward_on_a_mesh_is_that_of_one_device(tmp_path):
    folder = tiny.tiny_checkpoint(tmp_path)
    x, t = jax.random.normal(jax.random.key(0), (1, 2, 4, 6, 4)), jnp.array([500.0])
    text = jax.random.normal(jax.random.key(1), (1, 7, 16))
    one_device, sharded, sharded_by_columns = (
        np.asarray(wanjax.load(folder, mesh=mesh, rules=rules).transformer(x, t, text))
        for mesh, rules in ((None, "fsdp"), ("sp=4,tp=2", "fsdp"), ("sp=4,tp=2", "tp"))
    )
    np.testing.assert_allclose(sharded, one_device, atol=1e-5)
    np.testing.assert_allclose(sharded_by_columns, one_device, atol=1e-5)
