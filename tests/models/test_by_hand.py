# SPDX-License-Identifier: Apache-2.0
"""A transformer that is called by hand, with encoded prompts and nothing prepared: the forward that a run computes."""

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
CHATS = jax.ShapeDtypeStruct((1, 7, 24), jnp.float32)
T = jax.ShapeDtypeStruct((1,), jnp.float32)


def latents(channels: int, frames: int = 2) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, frames, 4, 6, channels), jnp.float32)


def image(tokens: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, tokens, 16), jnp.float32)


def rope(model: Any, x: Any) -> Any:
    return model.rope(model.grid(x))


def as_block(model: Any, x: Any, t: Any, text: Any) -> Any:
    """The first block of a video, with all inputs of a run."""
    context, tokens = model.context(text), int(np.prod(model.grid(x)))
    return model(x, t, context, angles_at(model.config, 0), model.empty_kv_cache(x), slot_of(model.config, 0, tokens))


CASES = {  # by hand, as a run calls it, and the arguments
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
        as_block,
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
        (latents(9), T, CHATS, MASK),
    ),
}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """Return a model's transformer as shapes."""

    @cache
    def make(case: str) -> Any:
        folder = CASES[case][0](tmp_path_factory.mktemp(case))
        return wanjax.load(folder).components.abstract().get("transformer")

    return make


def traced(model: Any, call: Any, *arguments: Any) -> str:
    graphdef, weights = nnx.split(model)
    return str(
        jax.make_jaxpr(lambda weights, *arguments: call(nnx.merge(graphdef, weights), *arguments))(weights, *arguments)
    )


@pytest.mark.parametrize("case", quick(("wan-i2v", "wan-causal", "cogvideox", "hunyuanvideo"), CASES))
def test_encoded_prompts_are_enough(shapes, case):
    _, by_hand, prepared, options = CASES[case]
    assert traced(shapes(case), by_hand, *options) == traced(shapes(case), prepared, *options)


def test_a_prompt_without_a_mask_has_all_tokens(shapes):
    def masked(model: Any, x: Any, t: Any, text: Any) -> Any:
        return model(x, t, text, text_mask=jnp.ones(text.shape[:2], bool))

    model, options = shapes("hunyuanvideo"), (latents(9), T, CHATS)
    assert traced(model, lambda model, *x: model(*x), *options) == traced(model, masked, *options)


@pytest.mark.parametrize("case", quick(("wan-i2v", "wan-causal", "cogvideox", "hunyuanvideo"), CASES))
def test_latents_that_do_not_fit_are_refused(shapes, case):
    """The latents of a pipeline, for example, whose channels come before their frames."""
    _, by_hand, _, options = CASES[case]
    wrong = [jax.ShapeDtypeStruct((1, 2, 2, 4, 8), x.dtype) if x.ndim == 5 else x for x in options]
    with pytest.raises(WanjaxError, match=rf"\b{options[0].shape[-1]}\b"):
        traced(shapes(case), by_hand, *wrong)


def test_an_image_that_is_missing_is_named(shapes):
    with pytest.raises(WanjaxError, match="image="):
        traced(shapes("wan-i2v"), lambda model, *x: model(*x), latents(12), T, TEXT)


class PartitionerOf(nnx.Module):
    """Returns the mesh of its forward."""

    def __init__(self, sharding: jax.sharding.Sharding):
        self.weight = nnx.Param(jax.device_put(jnp.zeros((8, 8)), sharding))

    @on_weights_mesh
    def __call__(self) -> Any:
        return current_partitioner()


def test_a_forward_runs_on_the_mesh_of_its_weights():
    mesh = wanjax.make_mesh(sp=2, tp=4)
    spread_out = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, ("sp", "tp")))
    assert PartitionerOf(spread_out)().mesh == mesh
    assert current_partitioner() is ONE_DEVICE_PARTITIONER
    assert PartitionerOf(jax.sharding.SingleDeviceSharding(jax.devices()[0]))() is ONE_DEVICE_PARTITIONER
    assert (
        nnx.jit(lambda report: report().is_single_device and 1)(PartitionerOf(spread_out)) == 1
    )  # traced arrays have no mesh


@pytest.mark.slow
def test_a_forward_on_a_mesh_is_that_of_one_device(tmp_path):
    folder = tiny.tiny_checkpoint(tmp_path)
    x, t = jax.random.normal(jax.random.key(0), (1, 2, 4, 6, 4)), jnp.array([500.0])
    text = jax.random.normal(jax.random.key(1), (1, 7, 16))
    one_device, sharded, by_columns = (
        np.asarray(wanjax.load(folder, mesh=mesh, rules=rules).transformer(x, t, text))
        for mesh, rules in ((None, "fsdp"), ("sp=4,tp=2", "fsdp"), ("sp=4,tp=2", "tp"))
    )
    np.testing.assert_allclose(sharded, one_device, atol=1e-5)
    np.testing.assert_allclose(by_columns, one_device, atol=1e-5)
