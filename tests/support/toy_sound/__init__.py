# SPDX-License-Identifier: Apache-2.0
"""A second family outside the package, with features that no family in it has. `wanjax.register(TOY_SOUND)` adds it.

The first network denoises a video and its sound together. Before, it reads a reference picture and an optional driving
clip once, and caches their keys and values. Only this family has a driving clip. A second network denoises both again
at twice the height and width. The decoder adds noise to the latents, and makes the sound too.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.support.toy import DEFAULTS as TOY_DEFAULTS
from tests.support.toy import LENGTH, read
from tests.support.toy import NETWORKS as TOY_NETWORKS
from tests.support.toy.networks import VAEConfig
from tests.support.toy.scheduler import Ancestral
from tests.support.toy_sound import networks as nets
from wanjax.checkpoints.network_kinds import NetworkKind, network
from wanjax.converters.weight_rules import linear
from wanjax.execution import program
from wanjax.kernels.compiler_options import conv_options, matmul_options, random_options, scan_options
from wanjax.layers.stack import NO_BLOCK_CACHE
from wanjax.media.inputs import IMAGE, InputSpec
from wanjax.media.pictures import fit_to_size
from wanjax.models.t5 import T5Config
from wanjax.pipelines.denoiser import Denoiser
from wanjax.pipelines.family import Family, Preset
from wanjax.pipelines.frames import encode_clip
from wanjax.pipelines.guidance import group_prompts
from wanjax.pipelines.model import ForwardCost, ModalitySpec, ModelSpec, SamplingPass, VideoModel
from wanjax.pipelines.seeds import draw_noise, seed_to_key_data
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.text.tokenizer import Tokenizer
from wanjax.pipelines.validation import FieldShape

DEFAULTS = TOY_DEFAULTS.updated({"model": "toy-sound", "height": 64, "width": 64, "steps": 3})
DRIVING = InputSpec("driving", "clip", "a driving clip", "A clip whose motion the video follows.", background="black")
AUDIO = ModalitySpec(channels=5, per_second=12.8)
NOISE = 0.1  # the noise level of the decoder's input
JOINT = ("patch_embed", "audio_embed", "text_embed", "time_embed", "proj_out", "audio_out")
BLOCK = ("video_qkv", "audio_qkv", "text_kv", "video_out", "audio_out")

NETWORKS = (
    *(kind for kind in TOY_NETWORKS if "T5EncoderModel" in kind.classes or "ToyVAE" in kind.classes),
    NetworkKind(
        ("ToyJointTransformer",),
        read(nets.JointConfig, "layers", "heads", "head_dim", "text_width", "channels", "audio_channels"),
        {nets.JointConfig: nets.JointTransformer},
        lambda config: (
            [rule for name in JOINT for rule in linear(name, name)]
            + [rule for name in BLOCK for rule in linear(f"blocks.{{i}}.{name}", f"blocks.{name}")]
        ),
    ),
    NetworkKind(
        ("ToyUpsampler",),
        read(nets.UpsamplerConfig, "channels"),
        {nets.UpsamplerConfig: nets.Upsampler},
        lambda config: [*linear("up", "up")],
    ),
    NetworkKind(
        ("ToySound",),
        read(nets.SoundConfig, "channels", "samples"),
        {nets.SoundConfig: nets.SoundDecoder},
        lambda config: [*linear("out", "out")],
    ),
)


class SoundConditioning(NamedTuple):
    prompt_embeds: Any
    prompt_mask: Any
    negative_prompt_embeds: Any
    negative_prompt_mask: Any
    reference: Any = None
    driving: Any = None
    video_latents: Any = None
    audio_latents: Any = None
    video_shape: Any = None


@program(scan_options)
def encode_texts(graphdef, ids, mask, weights):
    text = nnx.merge(graphdef, weights)(ids, mask)
    return text[:1], mask[:1], text[1:], mask[1:]


@program(matmul_options)
def make_contexts(static, texts, references, weights):
    """The context of each forward, and the keys and values of the references, which the network sees once."""
    graphdef, groups = static
    network = nnx.merge(graphdef, weights)
    prompts = group_prompts([(network.text_embed(text.astype(network.dtype)), mask) for text, mask in texts], groups)
    return prompts, network.reference(jnp.moveaxis(jnp.concatenate(references, axis=2), 1, -1))


@program(conv_options)
def upsample(graphdef, latents, weights):
    return jnp.moveaxis(nnx.merge(graphdef, weights)(jnp.moveaxis(latents, 1, -1)), -1, 1)


@program(random_options)
def add_noise(static, latents, key_data):
    return (1 - NOISE) * latents + NOISE * draw_noise(key_data, (1, *latents.shape[1:]), 100)


@program(conv_options)
def decode_sound(graphdef, latents, video, weights):
    single = jax.lax.dynamic_slice_in_dim(latents, video, 1)
    return nnx.merge(graphdef, weights)(jnp.moveaxis(single, 1, -1))[0]


@dataclass(frozen=True)
class SoundDenoiser(Denoiser):
    def embed_timesteps(self, network, times, unprojected=False):
        return network.time_embed(nets.sinusoidal_embedding(times, 8).astype(network.dtype))

    def predict(self, network, x, t, prompt, shared, blocks=NO_BLOCK_CACHE, dense=None):
        reference, real = shared
        times = len(t) // len(real)  # the prompts of a video
        reference = jax.tree.map(lambda x: jnp.concatenate([x] * times, axis=1), reference)
        return network(x, t, *prompt, reference, jnp.concatenate([real] * times), blocks)


@dataclass(frozen=True, kw_only=True)
class SoundModel(VideoModel[SoundConditioning]):
    conditioning_type = SoundConditioning
    text_encoder: T5Config
    transformer: nets.JointConfig
    upsampler: nets.UpsamplerConfig
    sound_decoder: nets.SoundConfig
    scheduler: Ancestral = field(default_factory=Ancestral)

    @classmethod
    def of(cls, source, reads_encoder_configs=False):
        names = ("text_encoder", "transformer", "upsampler", "sound_decoder", "vae")
        return cls(**{name: network(source, name, NETWORKS).config for name in names})

    @cached_property
    def spec(self) -> ModelSpec:
        names = ("text_encoder", "transformer", "upsampler", "sound_decoder", "vae")
        return ModelSpec(
            task="image to video with sound",
            size_multiple=2 * self.vae.spatial_factor * nets.PATCH[1],
            vae=self.vae,
            scheduler=self.scheduler,
            networks={name: getattr(self, name) for name in names} | {"transformer_2": self.transformer},
            cache_tables=self.tables,
            denoisers=("transformer", "transformer_2"),
            inputs=(IMAGE.needed, DRIVING),
            extra_modalities={"audio": AUDIO},
            passes=(
                SamplingPass(divisor=2, denoisers=("transformer",)),
                SamplingPass(steps=4, strength=0.5, guidance_scale=1.0, denoisers=("transformer_2",)),
            ),
        )

    @property
    def denoiser(self) -> SoundDenoiser:
        return SoundDenoiser()

    def cost(self, settings: Settings, conditioning: Any = None) -> ForwardCost:
        config, (_, _, *latent_size) = self.transformer, self.spec.latent_shape(settings)
        tokens = int(np.prod(latent_size)) // 4 + self.spec.modality_shapes(settings)["audio"][2]
        flops = config.layers * 4 * tokens**2 * config.width
        return ForwardCost(tokens, config.layers, config.heads, config.width, flops, {"blocks": flops})

    def encode_text(self, runtime, settings):
        [prompts] = self.tokenize(runtime, [settings.prompt, settings.negative_prompt], settings.follow)
        graphdef, weights = runtime.split("text_encoder")
        return SoundConditioning(*runtime.call(encode_texts, graphdef, prompts.ids, prompts.mask, weights))

    def encode_inputs(self, runtime, pictures, settings, *, tiling=None):
        vae, options = runtime.components.get("vae"), {"reference": pictures["image"][None]}
        options |= {} if (clip := pictures.clip("driving")) is None else {"driving": clip[: settings.frames]}
        fitted = {
            name: [fit_to_size(frame, settings.size, settings.resize) for frame in frames]
            for name, frames in options.items()
        }
        return {name: encode_clip(vae, frames, tiling, runtime.call) for name, frames in fitted.items()}

    def conditioning_shapes(self, conditioning, settings):
        _, channels, _, *latent_size = self.spec.latent_shape(settings)
        return {
            "prompt_embeds": FieldShape((len(conditioning.prompt_embeds), LENGTH, self.transformer.text_width)),
            "reference": FieldShape((None, channels, 1, *latent_size)),
            "driving": FieldShape((None, channels, None, *latent_size), optional=True),
        }

    def prepare(self, runtime, network, conditioning, x, purpose):
        texts, static = (conditioning[:2], conditioning[2:4]), (network.graphdef, purpose.groups)
        references = tuple(x for x in (conditioning.reference, conditioning.driving) if x is not None)
        return runtime.call(make_contexts, static, texts, references, network.weights)

    def refine(self, runtime, conditioning, latents: Any):
        graphdef, weights = runtime.split("upsampler")
        larger = runtime.call(upsample, graphdef, latents["video"], weights)
        return super().refine(runtime, conditioning, {**latents, "video": larger})

    def decode(self, runtime, latent_chunks, *, seed=0, video=0, **how):
        [latents], (graphdef, weights) = latent_chunks, runtime.split("sound_decoder")
        noisy = {**latents, "video": runtime.call(add_noise, None, latents["video"], seed_to_key_data([seed]))}
        sound = runtime.call(decode_sound, graphdef, latents["audio"], np.int32(video), weights)
        for number, chunk in enumerate(super().decode(runtime, [noisy], video=video, **how)):
            yield chunk if number else chunk._replace(extras={"audio": sound})


TOY_SOUND = Family(
    name="Toy with sound",
    networks=NETWORKS,
    pipelines=("ToySoundPipeline",),
    read_model=SoundModel.of,
    default_settings=lambda source, model, preset: DEFAULTS if preset is None else preset.defaults,
    loaders={"tokenizer": lambda folder: Tokenizer.load(folder, length=LENGTH)},
    prompt_lengths=lambda model: {"tokenizer": (LENGTH, LENGTH)},
    presets=(
        Preset(
            name="toy-sound",
            source="owner/toy-sound",
            about="image to video with sound, for tests",
            transformer_parameters=5_852,
            licence="Apache-2.0",
            param_dtype="float32",
            defaults=DEFAULTS,
            model=SoundModel(
                text_encoder=T5Config(512, 16, 2, 8, 32, 2, 8, 16, 1e-6, True),
                transformer=nets.JointConfig(2, 2, 8, 16, 3, AUDIO.channels),
                upsampler=nets.UpsamplerConfig(3),
                sound_decoder=nets.SoundConfig(AUDIO.channels, 4),
                vae=VAEConfig(latent_channels=3, spatial_factor=4, temporal_factor=2),
            ),
        ),
    ),
)
