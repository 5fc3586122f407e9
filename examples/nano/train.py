# SPDX-License-Identifier: Apache-2.0
"""Train the bundled model from scratch: `python examples/nano/train.py --out DIR`.

The script trains the autoencoder, measures its latents, trains the transformer together with its text encoder, and
writes a folder in the diffusers layout. After an interruption, the same command resumes the training.
"""

import json
from pathlib import Path

import click
import jax.numpy as jnp
import recipe
import tokenizer
from flax import nnx
from train_flow import PromptedTransformer, train_flow
from train_vae import latent_statistics, train_vae

from wanjax.checkpoints import modules
from wanjax.converters import t5
from wanjax.converters.wan import diffusers as wan
from wanjax.kernels.attention import AttentionConfig
from wanjax.models.t5 import T5Encoder
from wanjax.models.wan.transformer import WanTransformer
from wanjax.models.wan.vae import WanVAE


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the finished model.")
@click.option(
    "--work", type=click.Path(path_type=Path), default="nano_training", help="Folder of the training's checkpoints."
)
@click.option("--seed", default=0, show_default=True)
def main(out: Path, work: Path, seed: int) -> None:
    """Run the remaining training, and write the model."""
    settings = {"dtype": jnp.float32, "param_dtype": jnp.float32, "rngs": nnx.Rngs(seed)}
    vae = train_vae(WanVAE(wan.vae_config(recipe.VAE), **settings), work, seed)
    mean, std = latent_statistics(vae, seed)
    vae_json = recipe.VAE | {"latents_mean": mean.tolist(), "latents_std": std.tolist()}
    vae.config = wan.vae_config(vae_json)
    model = PromptedTransformer(
        T5Encoder(t5.t5_config(recipe.TEXT_ENCODER), **settings),
        WanTransformer(wan.transformer_config(recipe.TRANSFORMER), attention=AttentionConfig("reference"), **settings),
    )
    model = train_flow(model, vae, work, seed)

    transformer, text_encoder = model.transformer, model.text_encoder
    write_network(out / "vae", vae_json, vae, wan.vae_weight_rules(vae.config))
    write_network(
        out / "transformer", recipe.TRANSFORMER, transformer, wan.transformer_weight_rules(transformer.config)
    )
    write_network(
        out / "text_encoder", recipe.TEXT_ENCODER, text_encoder, t5.t5_weight_rules(text_encoder.config), "model"
    )
    tokenizer.write(out / "tokenizer")
    write_json(out / "scheduler" / "scheduler_config.json", recipe.SCHEDULER)
    write_json(out / "model_index.json", recipe.MODEL_INDEX)
    write_json(out / "generation_config.json", recipe.DEFAULTS)
    print(f"the model is in {out}")


def write_network(
    folder: Path, config: dict, network: nnx.Module, rules: list, name: str = "diffusion_pytorch_model"
) -> None:
    """Write a network's folder: its config, and its weights under the names of the published checkpoints."""
    write_json(folder / "config.json", config)
    modules.export(network, rules, folder / f"{name}.safetensors", metadata={"format": "pt"})


def write_json(file: Path, value: dict) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
