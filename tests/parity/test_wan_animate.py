# SPDX-License-Identifier: Apache-2.0
"""Wan Animate 2's transformer against that of diffusers: the computation of the clip's keys, and a step."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache
from flax import nnx

from tests.parity.animate_references import SIZES, animate_transformer, uncompiled_mask
from tests.parity.references import channels_last, relative_l2, wan_transformer
from tests.support.quick import quick
from wanjax.models.wan.animate import AnimateContext

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
FRAMES, HEIGHT, WIDTH = 3, 6, 10  # of the clip's latents
BOUND = 1e-5
RANDOM = torch.Generator().manual_seed(0)
INPUTS: dict[str, torch.Tensor] = {
    "clip": torch.randn(16, FRAMES, HEIGHT, WIDTH, generator=RANDOM),
    "x": torch.randn(16, FRAMES + 1, HEIGHT, WIDTH, generator=RANDOM),
    "condition": torch.randn(20, FRAMES + 1, HEIGHT, WIDTH, generator=RANDOM),
    "text": torch.randn(1, 512, SIZES["text_dim"], generator=RANDOM),
    "clip_text": torch.randn(1, 512, SIZES["text_dim"], generator=RANDOM),
    "image": torch.randn(1, 17, 1280, generator=RANDOM),
    "clip_image": torch.randn(1, 17, 1280, generator=RANDOM),
}


@torch.no_grad()
def expected_outputs(network: Any, *, negative: bool) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the values that diffusers caches in each layer, and its velocity [T H W C] at timestep 700."""
    grid = torch.tensor([[FRAMES, HEIGHT // 2, WIDTH // 2]])
    cache, tokens = WanAnimate2KVCache(len(network.blocks)), HEIGHT * WIDTH // 4
    common: dict[str, Any] = {"timestep": torch.tensor([700.0]), "kv_cache": cache}
    clip = INPUTS["clip"]
    network(
        [clip], encoder_hidden_states=[*INPUTS["clip_text"]], encoder_hidden_states_image=INPUTS["clip_image"],
        condition_latents=[torch.cat([torch.ones(4, *clip.shape[1:]), clip])], kv_cache_mode="extract",
        seq_len=FRAMES * tokens, offset_grid_sizes=grid, **common,
    )  # fmt: skip
    with uncompiled_mask():
        velocity = network(
            [INPUTS["x"]], encoder_hidden_states=[*INPUTS["text"]], encoder_hidden_states_image=INPUTS["image"],
            condition_latents=[INPUTS["condition"]], kv_cache_mode="cached", seq_len=(FRAMES + 1) * tokens,
            reference_grid_sizes=grid, origin_len=4 * FRAMES - 3, origin_area=[8 * HEIGHT, 8 * WIDTH],
            is_uncondtion=negative, **common,
        ).sample[0]  # fmt: skip
    values = [layer.value for layer in cache.layer_caches]
    return [value.flatten(2).numpy() for value in values if value is not None], channels_last(velocity[None])[0]


@nnx.jit(static_argnames=("prompts", "negatives"))
def predict(network: Any, prompts: int, negatives: int) -> tuple[Any, Any]:
    """Return the keys and values of the clip, and the velocities of equal prompts, the last of which are negative."""
    arrays = {name: jnp.asarray(x.numpy()) for name, x in INPUTS.items()}
    x = jnp.moveaxis(jnp.concatenate([arrays["x"], arrays["condition"]])[None], 1, -1)
    clip = jnp.moveaxis(arrays["clip"][None], 1, -1)
    clip = jnp.concatenate([clip, jnp.ones((*clip.shape[:-1], 4)), clip], axis=-1)
    keys = network.clip_kv(clip, network.context(arrays["clip_text"], arrays["clip_image"]))
    x, text, image = (jnp.repeat(y, prompts, axis=0) for y in (x, arrays["text"], arrays["image"]))
    context = AnimateContext(network.context(text, image), negatives)
    return keys, network(x, jnp.full(prompts, 700.0), context, clip=keys)


@pytest.mark.parametrize("layers", quick([10], [2, 10]))
def test_the_clip_s_values_and_a_step_equal_those_of_diffusers(layers):
    """Negative prompts skip the tenth block, even in a batch with prompts."""
    reference = animate_transformer(layers)
    network: Any = wan_transformer(reference)
    values, exact = expected_outputs(reference, negative=False)
    _, exact_negative = expected_outputs(reference, negative=True)
    assert (relative_l2(exact, exact_negative) > 1e-3) == (layers > 9)
    keys, [velocity] = predict(network, 1, 0)
    for result, layer_values in zip(keys.v, values, strict=True):
        assert relative_l2(result, layer_values) <= BOUND
    assert relative_l2(velocity, exact) <= BOUND
    _, [negative] = predict(network, 1, 1)
    assert relative_l2(negative, exact_negative) <= BOUND
    _, [first, second] = predict(network, 2, 1)
    assert relative_l2(first, exact) <= BOUND
    assert relative_l2(second, exact_negative) <= BOUND
