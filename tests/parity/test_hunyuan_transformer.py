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
    NUMBERS,
    Led,
    StateDict,
    channels_last,
    hooked,
    led_apart,
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

BAR = 1e-5
SIZES = {
    "in_channels": 9, "out_channels": 4, "num_attention_heads": 3, "attention_head_dim": 32, "num_layers": 3,
    "num_refiner_layers": 2, "mlp_ratio": 2.0, "text_embed_dim": 40, "text_embed_2_dim": 24, "image_embed_dim": 20,
    "rope_axes_dim": (8, 12, 12),
}  # fmt: skip
WIDTH, VIDEO = 96, (3, 4, 6)  # the latents' frames, height and width
TASKS = ["text", "quoted text", "picture", "both"]


def built(**sizes) -> HunyuanVideo15Transformer3DModel:
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


def loaded(reference, dtype=jnp.float32, partitioner=None) -> HunyuanVideoTransformer:
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
    reference = built()
    return reference, loaded(reference)


def ours(x: torch.Tensor) -> np.ndarray:
    return x.numpy()


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def masked(*lengths: int, of: int) -> torch.Tensor:
    return torch.arange(of)[None] < torch.tensor(lengths)[:, None]


def inputs(task: str) -> dict[str, torch.Tensor]:
    """Return the reference's inputs for two videos, whose texts differ in length."""
    quoted, picture = task in ("quoted text", "both"), task in ("picture", "both")
    return {
        "hidden_states": normal(0, 2, 9, *VIDEO),
        "timestep": torch.tensor([968.0, 137.0]),
        "encoder_hidden_states": normal(1, 2, 11, 40),
        "encoder_attention_mask": masked(11, 6, of=11),
        "encoder_hidden_states_2": normal(2, 2, 5, 24) * quoted,
        "encoder_attention_mask_2": masked(5 * quoted, 2 * quoted, of=5),
        "image_embeds": normal(3, 2, 7, 20) * picture,
    }


@torch.no_grad()
def velocity(reference, batch) -> np.ndarray:
    batch = {name: x.float() if x.dtype == torch.bool else x for name, x in batch.items()}
    return channels_last(reference(**{name: x.to(reference.dtype) for name, x in batch.items()}).sample)


def our_velocity(model, batch, *, dropped: bool = True, partitioner=None) -> jax.Array:
    """Return our velocity; `dropped` leaves out quoted text and a picture that are not there."""
    glyphs = ours(batch["encoder_hidden_states_2"]), ours(batch["encoder_attention_mask_2"])
    image = ours(batch["image_embeds"]) if batch["image_embeds"].any() else None
    if dropped and not glyphs[1].any():
        glyphs = None
    t_next = ours(batch["timestep_r"]) if "timestep_r" in batch else None
    text, mask = ours(batch["encoder_hidden_states"]), ours(batch["encoder_attention_mask"])
    latents, t = channels_last(batch["hidden_states"]), ours(batch["timestep"])
    return predicted(partitioner, *nnx.split(model), latents, t, text, mask, glyphs, image, t_next)


@partial(jax.jit, static_argnums=(0, 1))
def predicted(partitioner, graphdef, weights, latents, t, text, mask, glyphs, image, t_next):
    with use_partitioner(partitioner or ONE_DEVICE_PARTITIONER):
        model = nnx.merge(graphdef, weights)
        context = model.context(text, mask, glyphs, image)
        return model(latents, t, context, model.rope(model.grid(latents)), t_next)


def close(result, expected) -> None:
    error = relative_l2(result, expected)
    print(f"{error:.1e}")  # `pytest -rP` shows it
    assert error <= BAR


@pytest.mark.parametrize("dropped", [True, False])
@pytest.mark.parametrize("task", TASKS)
def test_whole(models, task, dropped):
    """The reference moves padding behind all text; a fixed order with a mask gives the same video."""
    reference, model = models
    close(our_velocity(model, inputs(task), dropped=dropped), velocity(reference, inputs(task)))


@pytest.mark.parametrize(
    "change", ["timestep", "encoder_hidden_states", "encoder_hidden_states_2", "image_embeds", "encoder_attention_mask"]
)
def test_every_input_matters(models, change):
    batch = inputs("both")
    changed = masked(7, 4, of=11) if change == "encoder_attention_mask" else batch[change].flip(-1)
    assert relative_l2(our_velocity(models[1], batch | {change: changed}), our_velocity(models[1], batch)) > 1e-2


def test_padding_does_not_matter(models):
    """Text may be padded to any length with any values."""
    reference, model = models
    batch = inputs("both")
    expected = velocity(reference, batch)
    for name, size in (("encoder_hidden_states", 40), ("encoder_hidden_states_2", 24)):
        batch[name] = torch.cat([batch[name], 50 * normal(9, 2, 6, size)], dim=1)
    for name in ("encoder_attention_mask", "encoder_attention_mask_2"):
        batch[name] = torch.cat([batch[name], torch.zeros(2, 6, dtype=torch.bool)], dim=1)
    close(our_velocity(model, batch), expected)


def test_a_video_without_any_text_is_finite(models):
    batch = inputs("text") | {"encoder_attention_mask": masked(11, 0, of=11)}
    assert np.isfinite(our_velocity(models[1], batch)).all()


def test_the_next_timestep_of_a_network_of_few_steps():
    reference = built(use_meanflow=True)
    model = loaded(reference)
    batch = inputs("picture") | {"timestep_r": torch.tensor([850.0, 0.0])}
    result = our_velocity(model, batch)
    close(result, velocity(reference, batch))
    changed = batch | {"timestep_r": torch.tensor([600.0, 90.0])}
    assert relative_l2(our_velocity(model, changed), result) > 1e-2
    with pytest.raises(AssertionError, match="needs t_next"):
        our_velocity(model, inputs("picture"))


@torch.no_grad()
def test_refiner(models):
    reference, model = models
    text, mask, t = normal(1, 2, 11, 40), masked(11, 6, of=11), torch.tensor([968.0, 137.0])
    expected = reference.context_embedder(text, t, mask.float())
    refine = nnx.jit(lambda refiner, text, t, mask: (p := refiner.prompt(text, mask), refiner(p, t, mask)))
    prompt, result = refine(model.refiner, ours(text), ours(t), ours(mask))
    live, result = mask.numpy(), np.asarray(result)
    close(result[live], expected.numpy()[live])  # the reference's padded tokens attend to nothing
    assert np.isfinite(result).all()
    close(prompt.tokens, reference.context_embedder.proj_in(text))
    mean = (text * mask[..., None]).sum(1) / mask.sum(1)[:, None]
    close(prompt.mean, reference.context_embedder.time_text_embed.text_embedder(mean))


@torch.no_grad()
def test_embeddings(models):
    reference, model = models
    glyphs, image, t = normal(2, 2, 5, 24), normal(3, 2, 7, 20), torch.tensor([968.0, 137.0])
    close(run(model.glyph_embed, ours(glyphs)), reference.context_embedder_2(glyphs))
    close(run(model.image_embed, ours(image)), reference.image_embedder(image))
    close(nnx.jit(lambda model, t: model.time(t))(model, ours(t)), reference.time_embed(t))
    close(model.kinds[...], reference.cond_type_embed.weight)


@torch.no_grad()
@pytest.mark.parametrize("index", range(3))
def test_block(models, index):
    reference, model = models
    block = block_at(model.blocks, index) if index < 2 else model.last_block
    x, text, temb = normal(4, 2, 72, WIDTH), normal(5, 2, 9, WIDTH), normal(6, 2, WIDTH)
    mask = masked(9, 4, of=9)
    rotary = reference.rope(torch.zeros(1, 9, *VIDEO))
    expected, expected_text = reference.transformer_blocks[index](x, text, temb, mask.float(), rotary)
    nothing = Prompt(jnp.zeros((2, 9, WIDTH)), jnp.zeros((2, WIDTH)))
    context = Context(nothing, jnp.zeros((2, 0, WIDTH)), ours(mask))
    result = run(block, Streams(ours(x), ours(text)), ours(temb), model.rope(VIDEO), context)
    close(result.video, expected)
    close(np.asarray(result.text)[mask.numpy()], expected_text.numpy()[mask.numpy()])


def test_the_order_of_text_does_not_matter(models):
    batch = inputs("text")
    text, mask = batch["encoder_hidden_states"], batch["encoder_attention_mask"]
    order = np.random.default_rng(0).permutation(text.shape[1])
    reordered = {**batch, "encoder_hidden_states": text[:, order], "encoder_attention_mask": mask[:, order]}
    assert not np.array_equal(mask, mask[:, order])
    close(our_velocity(models[1], reordered), our_velocity(models[1], batch))


def test_the_parts_equal_the_network(models):
    """A step cache may keep both streams before the last block."""
    _, model = models
    batch = inputs("text")
    text, mask = ours(batch["encoder_hidden_states"]), ours(batch["encoder_attention_mask"])

    @nnx.jit
    def in_pieces(model, latents, t, text, mask):
        context, rope, before = model.context(text, mask), model.rope(VIDEO), LastBlockCache()
        output = model(latents, t, context, rope, cache=before)
        return output, model(latents, t, context, rope, cache=LastBlockCache(before.cached)), before.cached

    *answers, cached = in_pieces(model, channels_last(batch["hidden_states"]), ours(batch["timestep"]), text, mask)
    assert [x.shape[2] for x in cached] == [WIDTH, WIDTH]
    for result in answers:
        close(result, our_velocity(model, batch))


def test_bfloat16_is_no_further_from_float32_than_in_the_reference(models, tmp_path):
    reference, _ = models
    reference.save_pretrained(tmp_path)
    half = HunyuanVideo15Transformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    exact, batch = velocity(reference, inputs("both")), inputs("both")
    result = our_velocity(loaded(half, jnp.bfloat16), batch)
    assert result.dtype == jnp.bfloat16
    assert relative_l2(result, exact) <= 1.1 * relative_l2(velocity(half, batch), exact)


@pytest.mark.parametrize(
    ("axes", "rules"),
    on_meshes(((2, 2, 2), "tp")),
)
def test_eight_devices(models, axes, rules):
    """70 tokens of video and 23 of text, which no axis divides, and three heads."""
    reference, _ = models
    batch = inputs("both") | {"hidden_states": normal(0, 2, 9, 2, 5, 7)}
    partitioner = Partitioner(make_mesh(*axes), SHARDING_RULES[rules])
    result = our_velocity(loaded(reference, partitioner=partitioner), batch, partitioner=partitioner)
    assert len(result.sharding.device_set) == 8
    close(result, velocity(reference, batch))


@pytest.mark.parametrize("name", ["480p", "720p", "few steps"])
def test_the_published_transformers(name):
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
    assert sum(x.size for x in parameters.values()) == (8_331_330_848 if config.meanflow else 8_326_608_160)


def test_attention_led_away_from_a_negative_prompt():
    reference = built()
    model, batch, negative = loaded(reference), inputs("both"), inputs("picture")
    negative |= {"encoder_hidden_states": normal(9, 2, 11, 40), "encoder_attention_mask": masked(4, 9, of=11)}
    unguided = velocity(reference, batch)
    texts = {name: torch.cat([batch[name], negative[name]]) for name in batch if name.startswith(("enc", "image"))}
    videos = {name: torch.cat([batch[name]] * 2) for name in ("hidden_states", "timestep")}
    hooked(reference, "attn.to_out.0", Led(NUMBERS))
    expected = velocity(reference, texts | videos)

    @nnx.jit
    def led(model, latents, t, text, mask, glyphs, image):
        return model(latents, t, model.context(text, mask, glyphs, image)._replace(nag=jnp.array(NUMBERS)))

    names = "encoder_hidden_states", "encoder_attention_mask", "encoder_hidden_states_2", "encoder_attention_mask_2"
    text, mask, *glyphs = (ours(texts[name]) for name in names)
    latents, t = channels_last(batch["hidden_states"]), ours(batch["timestep"])
    led_apart(led(model, latents, t, text, mask, tuple(glyphs), ours(texts["image_embeds"])), expected, unguided)
