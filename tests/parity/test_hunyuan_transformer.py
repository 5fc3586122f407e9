# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo's transformer against diffusers' HunyuanVideo15Transformer3DModel, float32, on small random weights."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from flax import nnx

from tests.parity.references import (
    NAG_NUMBERS,
    NAGHook,
    StateDict,
    add_hook,
    channels_last,
    compare_with_nag,
    randomise,
    relative_l2,
    run,
)
from tests.support.devices import on_meshes
from wanjax.checkpoints import modules
from wanjax.converters import weight_rules
from wanjax.converters.hunyuanvideo import diffusers as tables
from wanjax.layers.placement import as_shapes, with_shardings
from wanjax.layers.stack import block_at
from wanjax.models.hunyuanvideo.config import FEW_STEPS_480P, SIZE_480P, SIZE_720P
from wanjax.models.hunyuanvideo.refiner import Prompt
from wanjax.models.hunyuanvideo.transformer import Context, HunyuanVideoTransformer, Streams
from wanjax.pipelines.caching.step_cache import LastBlockCache
from wanjax.sharding import (
    ONE_DEVICE_PARTITIONER,
    SHARDING_RULES,
    Partitioner,
    make_mesh,
    one_device_partitioner,
    use_partitioner,
)

BOUND = 1e-5
SIZES = {
    "in_channels": 9, "out_channels": 4, "num_attention_heads": 3, "attention_head_dim": 32, "num_layers": 3,
    "num_refiner_layers": 2, "mlp_ratio": 2.0, "text_embed_dim": 40, "text_embed_2_dim": 24, "image_embed_dim": 20,
    "rope_axes_dim": (8, 12, 12),
}  # fmt: skip
WIDTH, VIDEO = 96, (3, 4, 6)  # the latents' frames, height and width
TASKS = ["text", "quoted text", "picture", "both"]


def make_reference(**sizes) -> HunyuanVideo15Transformer3DModel:
    """Return a reference whose timestep, gates and types of tokens matter as much as its tokens."""
    torch.manual_seed(0)
    reference = HunyuanVideo15Transformer3DModel(**SIZES | sizes).eval()
    randomise(reference, seed=1)
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if weight.ndim == 2 and (".norm" in name or "norm_out" in name or "context_embedder_2" in name):
                weight.mul_(4)
            elif weight.ndim == 2 and ("timestep_embedder" in name or "to_q" in name or ".ff" in name):
                weight.mul_(2)
    return reference


def load_model(reference, dtype=jnp.float32, partitioner=None) -> HunyuanVideoTransformer:
    config = tables.transformer_config(reference.config)
    kw = {"dtype": dtype, "param_dtype": dtype}
    abstract = as_shapes(lambda rngs: HunyuanVideoTransformer(config, **kw, rngs=rngs))
    return modules.load(
        with_shardings(abstract, partitioner or one_device_partitioner()),
        tables.transformer_weight_rules(config),
        StateDict(reference),
    )


@pytest.fixture(scope="module")
def models():
    reference = make_reference()
    return reference, load_model(reference)


def to_numpy(x: torch.Tensor) -> np.ndarray:
    return x.numpy()


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def length_mask(*lengths: int, length: int) -> torch.Tensor:
    return torch.arange(length)[None] < torch.tensor(lengths)[:, None]


def inputs(task: str) -> dict[str, torch.Tensor]:
    """Return the reference's inputs for two videos, whose texts differ in length."""
    quoted, picture = task in ("quoted text", "both"), task in ("picture", "both")
    return {
        "hidden_states": normal(0, 2, 9, *VIDEO),
        "timestep": torch.tensor([968.0, 137.0]),
        "encoder_hidden_states": normal(1, 2, 11, 40),
        "encoder_attention_mask": length_mask(11, 6, length=11),
        "encoder_hidden_states_2": normal(2, 2, 5, 24) * quoted,
        "encoder_attention_mask_2": length_mask(5 * quoted, 2 * quoted, length=5),
        "image_embeds": normal(3, 2, 7, 20) * picture,
    }


@torch.no_grad()
def reference_velocity(reference, batch) -> np.ndarray:
    batch = {name: x.float() if x.dtype == torch.bool else x for name, x in batch.items()}
    return channels_last(reference(**{name: x.to(reference.dtype) for name, x in batch.items()}).sample)


def predict_velocity(model, batch, *, leave_out_empty: bool = True, partitioner=None) -> jax.Array:
    """Return the velocity; `leave_out_empty` leaves out quoted text and a picture without tokens."""
    glyphs = to_numpy(batch["encoder_hidden_states_2"]), to_numpy(batch["encoder_attention_mask_2"])
    image = to_numpy(batch["image_embeds"]) if batch["image_embeds"].any() else None
    if leave_out_empty and not glyphs[1].any():
        glyphs = None
    t_next = to_numpy(batch["timestep_r"]) if "timestep_r" in batch else None
    text, mask = to_numpy(batch["encoder_hidden_states"]), to_numpy(batch["encoder_attention_mask"])
    latents, t = channels_last(batch["hidden_states"]), to_numpy(batch["timestep"])
    return predict_jitted(partitioner, *nnx.split(model), latents, t, text, mask, glyphs, image, t_next)


@partial(jax.jit, static_argnums=(0, 1))
def predict_jitted(partitioner, graphdef, weights, latents, t, text, mask, glyphs, image, t_next):
    with use_partitioner(partitioner or ONE_DEVICE_PARTITIONER):
        model = nnx.merge(graphdef, weights)
        context = model.context(text, mask, glyphs, image)
        return model(latents, t, context, model.rope(model.grid(latents)), t_next)


def compare(result, expected) -> None:
    error = relative_l2(result, expected)
    print(f"{error:.1e}")  # `pytest -rP` shows it
    assert error <= BOUND


@pytest.mark.parametrize("leave_out_empty", [True, False])
@pytest.mark.parametrize("task", TASKS)
def test_the_velocity_equals_that_of_diffusers(models, task, leave_out_empty):
    """The reference moves padding to the end of all text; a fixed order with a mask gives the same video."""
    reference, model = models
    compare(
        predict_velocity(model, inputs(task), leave_out_empty=leave_out_empty),
        reference_velocity(reference, inputs(task)),
    )


@pytest.mark.parametrize(
    "change", ["timestep", "encoder_hidden_states", "encoder_hidden_states_2", "image_embeds", "encoder_attention_mask"]
)
def test_every_input_matters(models, change):
    batch = inputs("both")
    changed = length_mask(7, 4, length=11) if change == "encoder_attention_mask" else batch[change].flip(-1)
    assert (
        relative_l2(predict_velocity(models[1], batch | {change: changed}), predict_velocity(models[1], batch)) > 1e-2
    )


def test_padding_does_not_matter(models):
    """Text may be padded to any length with any values."""
    reference, model = models
    batch = inputs("both")
    expected = reference_velocity(reference, batch)
    for name, size in (("encoder_hidden_states", 40), ("encoder_hidden_states_2", 24)):
        batch[name] = torch.cat([batch[name], 50 * normal(9, 2, 6, size)], dim=1)
    for name in ("encoder_attention_mask", "encoder_attention_mask_2"):
        batch[name] = torch.cat([batch[name], torch.zeros(2, 6, dtype=torch.bool)], dim=1)
    compare(predict_velocity(model, batch), expected)


def test_a_video_without_any_text_is_finite(models):
    batch = inputs("text") | {"encoder_attention_mask": length_mask(11, 0, length=11)}
    assert np.isfinite(predict_velocity(models[1], batch)).all()


def test_a_network_for_few_steps_reads_the_next_timestep():
    reference = make_reference(use_meanflow=True)
    model = load_model(reference)
    batch = inputs("picture") | {"timestep_r": torch.tensor([850.0, 0.0])}
    result = predict_velocity(model, batch)
    compare(result, reference_velocity(reference, batch))
    changed = batch | {"timestep_r": torch.tensor([600.0, 90.0])}
    assert relative_l2(predict_velocity(model, changed), result) > 1e-2
    with pytest.raises(AssertionError, match="needs t_next"):
        predict_velocity(model, inputs("picture"))


@torch.no_grad()
def test_the_refiner_equals_that_of_diffusers(models):
    reference, model = models
    text, mask, t = normal(1, 2, 11, 40), length_mask(11, 6, length=11), torch.tensor([968.0, 137.0])
    expected = reference.context_embedder(text, t, mask.float())
    refine = nnx.jit(lambda refiner, text, t, mask: (p := refiner.prompt(text, mask), refiner(p, t, mask)))
    prompt, result = refine(model.refiner, to_numpy(text), to_numpy(t), to_numpy(mask))
    mask_array, result = mask.numpy(), np.asarray(result)
    compare(result[mask_array], expected.numpy()[mask_array])  # the reference's padded tokens attend to nothing
    assert np.isfinite(result).all()
    compare(prompt.tokens, reference.context_embedder.proj_in(text))
    mean = (text * mask[..., None]).sum(1) / mask.sum(1)[:, None]
    compare(prompt.mean, reference.context_embedder.time_text_embed.text_embedder(mean))


@torch.no_grad()
def test_every_embedding_equals_that_of_diffusers(models):
    reference, model = models
    glyphs, image, t = normal(2, 2, 5, 24), normal(3, 2, 7, 20), torch.tensor([968.0, 137.0])
    compare(run(model.glyph_embed, to_numpy(glyphs)), reference.context_embedder_2(glyphs))
    compare(run(model.image_embed, to_numpy(image)), reference.image_embedder(image))
    compare(nnx.jit(lambda model, t: model.time(t))(model, to_numpy(t)), reference.time_embed(t))
    compare(model.kinds[...], reference.cond_type_embed.weight)


@torch.no_grad()
@pytest.mark.parametrize("index", range(3))
def test_every_block_equals_that_of_diffusers(models, index):
    reference, model = models
    block = block_at(model.blocks, index) if index < 2 else model.last_block
    x, text, temb = normal(4, 2, 72, WIDTH), normal(5, 2, 9, WIDTH), normal(6, 2, WIDTH)
    mask = length_mask(9, 4, length=9)
    rotary = reference.rope(torch.zeros(1, 9, *VIDEO))
    expected, expected_text = reference.transformer_blocks[index](x, text, temb, mask.float(), rotary)
    no_prompt = Prompt(jnp.zeros((2, 9, WIDTH)), jnp.zeros((2, WIDTH)))
    context = Context(no_prompt, jnp.zeros((2, 0, WIDTH)), to_numpy(mask))
    result = run(block, Streams(to_numpy(x), to_numpy(text)), to_numpy(temb), model.rope(VIDEO), context)
    compare(result.video, expected)
    compare(np.asarray(result.text)[mask.numpy()], expected_text.numpy()[mask.numpy()])


def test_the_order_of_text_does_not_matter(models):
    batch = inputs("text")
    text, mask = batch["encoder_hidden_states"], batch["encoder_attention_mask"]
    order = np.random.default_rng(0).permutation(text.shape[1])
    reordered = {**batch, "encoder_hidden_states": text[:, order], "encoder_attention_mask": mask[:, order]}
    assert not np.array_equal(mask, mask[:, order])
    compare(predict_velocity(models[1], reordered), predict_velocity(models[1], batch))


def test_a_step_from_a_cache_equals_a_whole_step(models):
    """A step cache may hold both streams from before the last block."""
    _, model = models
    batch = inputs("text")
    text, mask = to_numpy(batch["encoder_hidden_states"]), to_numpy(batch["encoder_attention_mask"])

    @nnx.jit
    def with_and_from_cache(model, latents, t, text, mask):
        context, rope, cache = model.context(text, mask), model.rope(VIDEO), LastBlockCache()
        output = model(latents, t, context, rope, cache=cache)
        return output, model(latents, t, context, rope, cache=LastBlockCache(cache.cached)), cache.cached

    *results, cached = with_and_from_cache(
        model, channels_last(batch["hidden_states"]), to_numpy(batch["timestep"]), text, mask
    )
    assert [x.shape[2] for x in cached] == [WIDTH, WIDTH]
    for result in results:
        compare(result, predict_velocity(model, batch))


def test_bfloat16_is_no_further_from_float32_than_in_the_reference(models, tmp_path):
    reference, _ = models
    reference.save_pretrained(tmp_path)
    reference_bfloat16 = HunyuanVideo15Transformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    exact, batch = reference_velocity(reference, inputs("both")), inputs("both")
    result = predict_velocity(load_model(reference_bfloat16, jnp.bfloat16), batch)
    assert result.dtype == jnp.bfloat16
    assert relative_l2(result, exact) <= 1.1 * relative_l2(reference_velocity(reference_bfloat16, batch), exact)


@pytest.mark.parametrize(("axes", "rules"), on_meshes(((2, 2, 2), "tp")))
def test_eight_devices_give_the_same_velocity(models, axes, rules):
    """No axis divides the 70 tokens of video, the 23 of text or the three heads."""
    reference, _ = models
    batch = inputs("both") | {"hidden_states": normal(0, 2, 9, 2, 5, 7)}
    partitioner = Partitioner(make_mesh(*axes), SHARDING_RULES[rules])
    result = predict_velocity(load_model(reference, partitioner=partitioner), batch, partitioner=partitioner)
    assert len(result.sharding.device_set) == 8
    compare(result, reference_velocity(reference, batch))


@pytest.mark.parametrize("name", ["480p", "720p", "few steps"])
def test_published_transformers_have_the_published_sizes(name):
    sizes = {"480p": {}, "720p": {"target_size": 960}, "few steps": {"use_meanflow": True}}[name]
    with torch.device("meta"):
        reference = HunyuanVideo15Transformer3DModel(**sizes)
    config = tables.transformer_config(reference.config)
    published = {"480p": SIZE_480P, "720p": SIZE_720P, "few steps": FEW_STEPS_480P}
    assert config == published[name]
    kw = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    abstract = as_shapes(lambda rngs: HunyuanVideoTransformer(config, **kw, rngs=rngs))
    parameters = modules.parameters(abstract)
    specs = {key: jax.ShapeDtypeStruct(tuple(x.shape), jnp.float32) for key, x in reference.state_dict().items()}
    weight_rules.assign(tables.transformer_weight_rules(config), specs, parameters)
    assert sum(x.size for x in parameters.values()) == sum(x.numel() for x in reference.parameters())
    assert sum(x.size for x in parameters.values()) == (8_331_330_848 if config.uses_meanflow else 8_326_608_160)


def test_nag_equals_its_formula_in_diffusers():
    reference = make_reference()
    model, batch, negative = load_model(reference), inputs("both"), inputs("picture")
    negative |= {"encoder_hidden_states": normal(9, 2, 11, 40), "encoder_attention_mask": length_mask(4, 9, length=11)}
    unguided = reference_velocity(reference, batch)
    texts = {name: torch.cat([batch[name], negative[name]]) for name in batch if name.startswith(("enc", "image"))}
    videos = {name: torch.cat([batch[name]] * 2) for name in ("hidden_states", "timestep")}
    add_hook(reference, "attn.to_out.0", NAGHook(NAG_NUMBERS))
    expected = reference_velocity(reference, texts | videos)

    @nnx.jit
    def predict_with_nag(model, latents, t, text, mask, glyphs, image):
        return model(latents, t, model.context(text, mask, glyphs, image)._replace(nag=jnp.array(NAG_NUMBERS)))

    names = "encoder_hidden_states", "encoder_attention_mask", "encoder_hidden_states_2", "encoder_attention_mask_2"
    text, mask, *glyphs = (to_numpy(texts[name]) for name in names)
    latents, t = channels_last(batch["hidden_states"]), to_numpy(batch["timestep"])
    compare_with_nag(
        predict_with_nag(model, latents, t, text, mask, tuple(glyphs), to_numpy(texts["image_embeds"])),
        expected,
        unguided,
    )
