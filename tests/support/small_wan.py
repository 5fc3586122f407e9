# SPDX-License-Identifier: Apache-2.0
"""Small Wan networks of random weights, on one device or on a mesh."""

from dataclasses import asdict, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from wanjax.layers.placement import as_shapes, with_shardings
from wanjax.models.t5 import T5Config
from wanjax.models.wan.animate import WanAnimateTransformer
from wanjax.models.wan.causal import WanCausalTransformer
from wanjax.models.wan.config import (
    VAE_2_1,
    AnimateTransformerConfig,
    CausalTransformerConfig,
    PoseTransformerConfig,
    TransformerConfig,
)
from wanjax.models.wan.pose import WanPoseTransformer
from wanjax.models.wan.transformer import WanTransformer
from wanjax.models.wan.vae import WanVAE
from wanjax.pipelines.components import Components
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.wan.animate import CharacterAnimation
from wanjax.pipelines.wan.conditioning import WanConditioning
from wanjax.pipelines.wan.pose import PoseToVideo
from wanjax.pipelines.wan.tasks import CausalTextToVideo, TextToVideo
from wanjax.registry import presets
from wanjax.schedulers import Consistency, FlowDPM, FlowEuler
from wanjax.sharding import SHARDING_RULES, Partitioner, make_mesh, one_device_partitioner

TEXT = T5Config(64, 8, 2, 4, 16, 2, 8, 16, 1e-6, False)
VIDEO = presets()["nano"].defaults.updated(
    {"height": 12, "width": 12, "frames": 5, "steps": 2, "guidance_scale": 4.0, "dtype": "float32"}
)
VAE = replace(
    VAE_2_1,
    width=4,
    decoder_width=4,
    latent_channels=4,
    multipliers=(1, 2),
    res_blocks=1,
    temporal_downsample=(True,),
    latents_mean=(0.1, -0.2, 0.3, 0.0),
    latents_std=(1.1, 0.9, 1.2, 1.0),
)


def partitioner(axes, rules="fsdp"):
    """Return the partitioner of a mesh of these sizes of dp, sp and tp; of one device for None."""
    return one_device_partitioner() if axes is None else Partitioner(make_mesh(*axes), SHARDING_RULES[rules])


def network(make, partitioner):
    """Return a network with random weights, which do not depend on the devices."""
    abstract = as_shapes(lambda rngs: make(dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs))
    graphdef, state = nnx.split(with_shardings(abstract, partitioner or one_device_partitioner()))
    random = np.random.default_rng(0)

    def draw(x):
        return jax.device_put(random.normal(0, 0.15, x.shape).astype(np.float32), x.sharding)

    return nnx.merge(graphdef, jax.tree.map(draw, state))


def transformer_config(heads):
    """Return the config of a transformer of two blocks with this number of heads."""
    return TransformerConfig(
        layers=2,
        heads=heads,
        head_dim=6,
        mlp_dim=16,
        channels_in=4,
        channels_out=4,
        patch=(1, 2, 2),
        text_width=8,
        frequency_dim=8,
        eps=1e-6,
        sparse_linear=None,
    )


def causal_pipeline(heads, partitioner, *, chunk_frames=2, window=6, sink=0):
    """Return a pipeline that makes a video chunk by chunk, with random weights."""
    sizes = asdict(transformer_config(heads))
    config = CausalTransformerConfig(**sizes, chunk_frames=chunk_frames, window=window, sink=sink)
    components = Components(
        {
            "transformer": lambda make_room: network(partial(WanCausalTransformer, config), partitioner),
            "vae": lambda make_room: network(partial(WanVAE, VAE), partitioner),
        }
    )
    model = CausalTextToVideo(transformer=config, vae=VAE, scheduler=Consistency())
    defaults = presets()["wan2.1-t2v-1.3b-causal"].defaults.updated({"dtype": "float32"})
    return Pipeline(components, model, defaults, partitioner)


def animate_pipeline(heads, partitioner, layers=2):
    """Return a pipeline that follows a driving clip, with random weights."""
    sizes = asdict(replace(transformer_config(heads), channels_in=10, layers=layers))
    config = AnimateTransformerConfig(**sizes, image_width=8, image_positions=None, clip_offset=(1, 0, -1))
    components = Components(
        {"transformer": lambda make_room: network(partial(WanAnimateTransformer, config), partitioner)}
    )
    model = CharacterAnimation(transformer=config, vae=VAE, scheduler=FlowDPM())
    defaults = presets()["wan2.2-animate-2-14b"].defaults.updated({"dtype": "float32", "steps": 2})
    return Pipeline(components, model, defaults, partitioner)


def animate_conditioning(bias=None):
    """Return random conditioning of `animate_pipeline`, for a video of 5 frames of 12x20 pixels."""
    random = np.random.default_rng(1)
    shapes = {
        "prompt_embeds": (512, 8),
        "negative_prompt_embeds": (512, 8),
        "clip_prompt_embeds": (512, 8),
        "condition": (6, 4, 6, 10),
        "image_embeds": (5, 8),
        "clip_latents": (4, 3, 6, 10),
        "clip_image_embeds": (5, 8),
    }
    arrays = {name: jnp.asarray(random.normal(size=(1, *shape)), jnp.float32) for name, shape in shapes.items()}
    bias = None if bias is None else np.array([bias], np.float32)
    return WanConditioning(**arrays, first_frame_bias=bias, video_shape=np.array([[5, 12, 20, 1]], np.int32))


def pose_pipeline(heads, partitioner, layers=2):
    """Return a pipeline that follows a pose clip and a face, with random weights."""
    sizes = asdict(replace(transformer_config(heads), channels_in=12, layers=layers))
    faces = {"face_size": 16, "motion_channels": (4, 6, 5), "motion_width": 8, "motions": 3, "motion_space": 7}
    faces |= {"face_width": 6, "face_heads": 2, "face_stride": 2}
    config = PoseTransformerConfig(**sizes, image_width=8, image_positions=None, **faces)
    components = Components(
        {"transformer": lambda make_room: network(partial(WanPoseTransformer, config), partitioner)}
    )
    vae = replace(
        VAE, multipliers=(1, 2, 2), temporal_downsample=(True, True)
    )  # one latent frame has four frames, as in the face
    model = PoseToVideo(transformer=config, vae=vae)
    defaults = presets()["wan2.2-animate-14b"].defaults.updated({"dtype": "float32", "steps": 2})
    return Pipeline(components, model, defaults, partitioner)


def pose_conditioning():
    """Return random conditioning of `pose_pipeline`, for a video of 9 frames of 24x40 pixels."""
    random = np.random.default_rng(1)
    shapes = {
        "prompt_embeds": (512, 8),
        "negative_prompt_embeds": (512, 8),
        "condition": (8, 4, 6, 10),
        "image_embeds": (5, 8),
        "clip_latents": (4, 3, 6, 10),
    }
    arrays = {name: jnp.asarray(random.normal(size=(1, *shape)), jnp.float32) for name, shape in shapes.items()}
    faces = random.integers(0, 256, (1, 9, 16, 16, 3), dtype=np.uint8)
    return WanConditioning(**arrays, face_pictures=faces, video_shape=np.array([[9, 24, 40, 1]], np.int32))


def small_model(heads, **more):
    """Return a text-to-video model without weights."""
    parts = {"text_encoder": TEXT, "transformer": transformer_config(heads), "vae": VAE, "scheduler": FlowEuler()}
    return TextToVideo(**parts | more)


def pipeline(heads, partitioner):
    """Return a pipeline of a transformer and a VAE with random weights."""
    config = transformer_config(heads)
    components = Components(
        {
            "transformer": lambda make_room: network(partial(WanTransformer, config), partitioner),
            "vae": lambda make_room: network(partial(WanVAE, VAE), partitioner),
        }
    )
    defaults = presets()["nano"].defaults.updated({"dtype": "float32"})
    return Pipeline(components, small_model(heads), defaults, partitioner)
