# SPDX-License-Identifier: Apache-2.0
"""A family outside the package, unlike those in it. `wanjax.register(TOY)` adds it.

Two text encoders, a dual stream with a text mask, a scheduler on v-predictions whose steps draw noise, an autoencoder
of another scale.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.support.toy import networks as nets
from tests.support.toy.scheduler import Ancestral
from wanjax.checkpoints.network_kinds import NetworkKind, network
from wanjax.converters.weight_rules import linear
from wanjax.execution import program
from wanjax.kernels.compiler_options import scan_options
from wanjax.layers.stack import NO_BLOCK_CACHE
from wanjax.models.t5 import T5Config
from wanjax.pipelines.denoiser import Denoiser
from wanjax.pipelines.family import Family, Preset
from wanjax.pipelines.guidance import group_prompts
from wanjax.pipelines.model import ForwardCost, ModelSpec, VideoModel
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.text.encoders import T5
from wanjax.pipelines.text.tokenizer import Tokenizer
from wanjax.pipelines.validation import FieldShape

LENGTH, GLYPHS = 12, 8
DEFAULTS = Settings(
    model="toy", prompt="", negative_prompt="", height=32, width=32, frames=5, fps=8, steps=2, guidance_scale=3.0,
    seed=0, dtype="float32", resize="crop", strength=1.0,
)  # fmt: skip


def read(config: type, *names: str) -> Any:
    """Read a config.json whose entries are the fields of a config."""
    return lambda json: config(**{name: json[name] for name in names})


NETWORKS = (
    T5,
    NetworkKind(
        ("ToyGlyphs",),
        read(nets.GlyphConfig, "width"),
        {nets.GlyphConfig: nets.GlyphEncoder},
        lambda config: linear("table", "table", bias=False),
    ),
    NetworkKind(
        ("ToyTransformer",),
        read(nets.TransformerConfig, "layers", "heads", "head_dim", "text_width", "glyph_width", "channels"),
        {nets.TransformerConfig: nets.Transformer},
        lambda config: (
            [
                rule
                for name in ("patch_embed", "text_embed", "glyph_embed", "time_embed", "proj_out")
                for rule in linear(name, name)
            ]
            + [
                rule
                for name in ("video_qkv", "text_qkv", "video_out", "text_out")
                for rule in linear(f"blocks.{{i}}.{name}", f"blocks.{name}")
            ]
        ),
    ),
    NetworkKind(
        ("ToyVAE",),
        read(nets.VAEConfig, "latent_channels", "spatial_factor", "temporal_factor"),
        {nets.VAEConfig: nets.VAE},
        lambda config: [*linear("encoder", "encoder"), *linear("decoder", "decoder")],
        float32=True,
    ),
)


class ToyConditioning(NamedTuple):
    prompt_embeds: Any
    prompt_mask: Any
    glyph_embeds: Any
    negative_prompt_embeds: Any
    negative_prompt_mask: Any
    negative_glyph_embeds: Any


@program(scan_options)
def encode_texts(graphdefs, ids, mask, glyphs, weights):
    """Features of both encoders, and the mask of all tokens, of the prompt and of the negative one."""
    text, second = (nnx.merge(*pair) for pair in zip(graphdefs, weights, strict=True))
    features = text(ids, mask), jnp.concatenate([mask, glyphs > 0], axis=1), second(glyphs)
    return *(x[:1] for x in features), *(x[1:] for x in features)


@program(scan_options)
def embed_texts(static, texts, weights):
    graphdef, groups = static
    network = nnx.merge(graphdef, weights)
    return tuple((network.context(text, glyphs), mask) for text, mask, glyphs in group_prompts(texts, groups))


@dataclass(frozen=True)
class ToyDenoiser(Denoiser):
    def embed_timesteps(self, network, times, unprojected=False):
        return network.time_embed(nets.sinusoidal_embedding(times, 8).astype(network.dtype))

    def predict(self, network, x, t, prompt, shared, blocks=NO_BLOCK_CACHE, dense=None):
        return network(x, t, *prompt, blocks)


@dataclass(frozen=True, kw_only=True)
class ToyModel(VideoModel[ToyConditioning]):
    conditioning_type = ToyConditioning
    text_encoder: T5Config
    text_encoder_2: nets.GlyphConfig
    transformer: nets.TransformerConfig
    scheduler: Ancestral = field(default_factory=Ancestral)

    @classmethod
    def of(cls, source, reads_encoder_configs=False):
        names = ("text_encoder", "text_encoder_2", "transformer", "vae")
        return cls(**{name: network(source, name, NETWORKS).config for name in names})

    @cached_property
    def spec(self) -> ModelSpec:
        names = ("text_encoder", "text_encoder_2", "transformer", "vae")
        return ModelSpec(
            task="text to video",
            size_multiple=self.vae.spatial_factor * nets.PATCH[1],
            vae=self.vae,
            scheduler=self.scheduler,
            networks={name: getattr(self, name) for name in names},
            cache_tables=self.tables,
        )

    @property
    def denoiser(self) -> ToyDenoiser:
        return ToyDenoiser()

    def cost(self, settings: Settings, conditioning: Any = None) -> ForwardCost:
        config, (_, _, *latent_size) = self.transformer, self.spec.latent_shape(settings)
        tokens = int(np.prod(latent_size)) // 4 + LENGTH + GLYPHS
        flops = config.layers * 4 * tokens**2 * config.width
        return ForwardCost(tokens, config.layers, config.heads, config.width, flops, {"blocks": flops})

    def _tokens(self, runtime, prompt):
        glyphs = np.frombuffer(prompt.encode()[:GLYPHS].ljust(GLYPHS, b"\0"), np.uint8)
        return runtime.components.get("tokenizer").tokenize([prompt]), glyphs.astype(np.int32)[None]

    def encode_text(self, runtime, settings):
        tokens = [self._tokens(runtime, text) for text in (settings.prompt, settings.negative_prompt)]
        ids, mask, glyphs = (
            np.concatenate(x) for x in zip(*((text.ids, text.mask, glyphs) for text, glyphs in tokens), strict=True)
        )
        splits = [runtime.split(name) for name in ("text_encoder", "text_encoder_2")]
        graphdefs, weights = zip(*splits, strict=True)
        return ToyConditioning(*runtime.call(encode_texts, graphdefs, ids, mask, glyphs, weights))

    def conditioning_shapes(self, conditioning, settings):
        return {"prompt_embeds": FieldShape((None, LENGTH, self.transformer.text_width))}

    def prepare(self, runtime, network, conditioning, x, purpose):
        static = network.graphdef, purpose.groups
        return runtime.call(embed_texts, static, (conditioning[:3], conditioning[3:]), network.weights), ()


TOY = Family(
    name="Toy",
    networks=NETWORKS,
    pipelines=("ToyPipeline",),
    read_model=ToyModel.of,
    default_settings=lambda source, model, preset: DEFAULTS if preset is None else preset.defaults,
    loaders={"tokenizer": lambda folder: Tokenizer.load(folder, length=LENGTH)},
    prompt_lengths=lambda model: {"tokenizer": (LENGTH, LENGTH)},
    presets=(
        Preset(
            name="toy",
            source="owner/toy",
            about="text to video, for tests",
            transformer_parameters=5_324,
            licence="Apache-2.0",
            param_dtype="float32",
            defaults=DEFAULTS,
            model=ToyModel(
                text_encoder=T5Config(512, 16, 2, 8, 32, 2, 8, 16, 1e-6, True),
                text_encoder_2=nets.GlyphConfig(width=8),
                transformer=nets.TransformerConfig(2, 2, 8, 16, 8, 3),
                vae=nets.VAEConfig(latent_channels=3, spatial_factor=4, temporal_factor=2),
            ),
        ),
    ),
)
