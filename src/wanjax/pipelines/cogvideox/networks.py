# SPDX-License-Identifier: Apache-2.0
"""The networks of CogVideoX's checkpoints."""

from wanjax.checkpoints.network_kinds import NetworkKind
from wanjax.converters.cogvideox import diffusers, vae
from wanjax.models.cogvideox.config import TransformerConfig
from wanjax.models.cogvideox.transformer import CogVideoXTransformer
from wanjax.models.cogvideox.vae import CogVideoXVAE
from wanjax.models.cogvideox.vae_config import VAEConfig
from wanjax.pipelines.text.encoders import T5

FULL_PRECISION = {
    "patch_embed": "the first projection",
    "proj_out": "the last projection",
    "time_embed.*": "the embedding of the timestep",
    "*_mod": "the modulation by the timestep",
    "text_embed": "the projection of the text",
}
"""The projections of CogVideoX's transformer that no precision quantizes."""

NETWORKS = (
    T5,
    NetworkKind(
        classes=("CogVideoXTransformer3DModel",),
        read=diffusers.transformer_config,
        modules={TransformerConfig: CogVideoXTransformer},
        rules=diffusers.transformer_weight_rules,
        full_precision=FULL_PRECISION,
    ),
    NetworkKind(
        classes=("AutoencoderKLCogVideoX",),
        read=vae.vae_config,
        modules={VAEConfig: CogVideoXVAE},
        rules=vae.vae_weight_rules,
        float32=True,
    ),
)
