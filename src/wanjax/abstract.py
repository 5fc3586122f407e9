# SPDX-License-Identifier: Apache-2.0
"""Which network each type of config is the shape of."""

from typing import Any

from flax import nnx

from wanjax.models.t5 import T5Config, T5Encoder
from wanjax.models.vision import CLIPVision, CLIPVisionConfig
from wanjax.models.wan.config import (
    ControlTransformerConfig,
    ImageTransformerConfig,
    ResidualVAEConfig,
    TransformerConfig,
    VAEConfig,
)
from wanjax.models.wan.control import WanControlTransformer
from wanjax.models.wan.image import WanImageTransformer
from wanjax.models.wan.residual_vae import WanResidualVAE
from wanjax.models.wan.transformer import WanTransformer
from wanjax.models.wan.vae import WanVAE

CLASSES: dict[type, type[Any]] = {
    T5Config: T5Encoder,
    CLIPVisionConfig: CLIPVision,
    TransformerConfig: WanTransformer,
    ImageTransformerConfig: WanImageTransformer,
    ControlTransformerConfig: WanControlTransformer,
    VAEConfig: WanVAE,
    ResidualVAEConfig: WanResidualVAE,
}


def abstract(config: Any, **options: Any) -> Any:
    """The network of this config as shapes and dtypes alone; the options are those of its class, except `rngs`."""
    return nnx.eval_shape(lambda: CLASSES[type(config)](config, **options, rngs=nnx.Rngs(0)))
