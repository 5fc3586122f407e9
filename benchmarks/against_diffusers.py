# SPDX-License-Identifier: Apache-2.0
"""Speed compared with diffusers and transformers in torch: the same weights, inputs and CPU, in float32.

Text encoding, denoising steps and decoding at the widths of Wan 2.1 1.3B. Fewer layers are run, as all cost the same.

    python -m benchmarks.against_diffusers [--json FILE] [--stage NAME ...] [--repeats 5]
"""

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from diffusers import WanPipeline as TorchPipeline
from flax import nnx
from rich.console import Console
from rich.table import Table
from transformers import UMT5Config, UMT5EncoderModel

from benchmarks.timing import Run, speed_ratio, time_rivals
from tests.parity.references import StateDict, relative_l2, wan_transformer, wan_vae
from wanjax.converters import engine, t5
from wanjax.kernels import compiler_options
from wanjax.models.t5 import T5Encoder
from wanjax.models.wan.config import T2V_1_3B
from wanjax.models.wan.vae import WanVAE
from wanjax.pipelines.components import Components
from wanjax.pipelines.wan.architecture import WanArchitecture
from wanjax.pipelines.wan.conditioning import WanEncoded
from wanjax.pipelines.wan.pipeline import WanPipeline
from wanjax.pipelines.wan.programs import encode_text
from wanjax.registry import presets
from wanjax.schedulers import from_config

STEPS = 2


@dataclass(frozen=True)
class Case:
    """One stage in both libraries: two functions that return the same array."""

    name: str
    bar: float  # the speed ratio to reach
    ours: Run
    theirs: Run
    pieces: int = 1  # equal pieces of work in a call, such as steps


@dataclass(frozen=True)
class Result:
    """Median seconds per piece of each library, theirs / ours, and the relative L2 distance between the two results."""

    name: str
    bar: float
    ours: float
    theirs: float
    ratio: float
    distance: float


def text_case(layers: int) -> Iterator[Case]:
    """Yields the encoder of UMT5-XXL with few layers and a small vocabulary, on 512 tokens with 452 of padding."""
    config = UMT5Config(
        vocab_size=4096, d_model=4096, d_kv=64, d_ff=10240, num_layers=layers, num_heads=64,
        feed_forward_proj="gated-gelu", tie_word_embeddings=True,
    )  # fmt: skip
    reference = UMT5EncoderModel(config).eval()
    sizes = t5.t5_config(config.to_dict())
    abstract = nnx.eval_shape(lambda: T5Encoder(sizes, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0)))
    encoder = engine.load(abstract, t5.t5_rules(sizes), StateDict(reference))
    graphdef, weights = nnx.split(encoder)
    encode = jax.jit(
        lambda weights, ids, mask: encode_text(nnx.merge(graphdef, weights), ids, mask),
        compiler_options=compiler_options.scanned(),
    )
    ids = np.random.default_rng(0).integers(2, config.vocab_size, (1, 512))
    mask = np.arange(512)[None] < 60
    ours = partial(encode, weights, jnp.asarray(ids, jnp.int32), jnp.asarray(mask))

    def theirs() -> torch.Tensor:
        features = reference(torch.from_numpy(ids), torch.from_numpy(mask).long()).last_hidden_state
        return features * torch.from_numpy(mask)[..., None]

    yield Case(f"text encoder, {layers} layers of UMT5-XXL, 512 tokens", 1.0, ours, theirs)


def step_cases(layers: int) -> Iterator[Case]:
    """Yields the denoising of 17 frames of 256 × 256 (1280 tokens) at the widths of 1.3B, with and without guidance."""
    reference = WanTransformer3DModel(
        num_layers=layers, num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, text_dim=4096
    ).eval()
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, num_train_timesteps=1000
    )
    vae = AutoencoderKLWan(base_dim=8)  # used only for its sizes
    torch_pipeline = TorchPipeline(
        tokenizer=None, text_encoder=None, vae=vae, scheduler=scheduler, transformer=reference
    )
    torch_pipeline.set_progress_bar_config(disable=True)
    same_scheduler = from_config({**scheduler.config, "_class_name": "UniPCMultistepScheduler"})
    pipeline = _pipeline(wan_vae(vae), transformer=wan_transformer(reference), scheduler=same_scheduler)
    random = np.random.default_rng(0)
    noise = random.standard_normal((1, 16, 5, 32, 32), np.float32)
    texts = [random.standard_normal((1, 512, 4096), np.float32) for _ in range(2)]

    def ours(scale: float) -> jax.Array:
        return pipeline.denoise(
            WanEncoded(*map(jnp.asarray, texts)), noise=jnp.asarray(noise), size=(256, 256), frames=17, steps=STEPS,
            guidance_scale=scale, flow_shift=3.0, sigmas="diffusers",
        )  # fmt: skip

    def theirs(scale: float) -> torch.Tensor:
        prompt, negative = (torch.from_numpy(text) for text in texts)
        return torch_pipeline(
            prompt_embeds=prompt, negative_prompt_embeds=negative, latents=torch.from_numpy(noise), height=256,
            width=256, num_frames=17, num_inference_steps=STEPS, guidance_scale=scale, output_type="latent",
        ).frames  # fmt: skip

    for scale, guidance in ((1.0, "without guidance"), (5.0, "with guidance")):
        name = f"step {guidance}, {layers} layers of 1.3B, 1280 tokens"
        yield Case(name, 1.0, partial(ours, scale), partial(theirs, scale), pieces=STEPS)


def vae_case(height: int, width: int, frames: int) -> Iterator[Case]:
    """Yields the decoding of a video with Wan 2.1's autoencoder."""
    reference = AutoencoderKLWan().eval()
    pipeline = _pipeline(wan_vae(reference))
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (reference.config.latents_mean, reference.config.latents_std)
    )
    latents = np.random.default_rng(0).standard_normal((1, 16, (frames + 3) // 4, height // 8, width // 8), np.float32)

    def ours() -> np.ndarray:
        return pipeline.decode(jnp.asarray(latents), jnp.float32)

    def theirs() -> torch.Tensor:
        video = reference.decode(torch.from_numpy(latents) * std + mean).sample
        return video[0].permute(1, 2, 3, 0) * 0.5 + 0.5

    yield Case(f"VAE decode, {frames} frames of {width} × {height}", 0.7, ours, theirs)


def _pipeline(vae: WanVAE, **others: Any) -> WanPipeline:
    """Returns our pipeline with components that are loaded already."""
    parts = Components({})
    for name, part in {"vae": vae, **others}.items():
        parts.put(name, part)
    return WanPipeline(
        parts, WanArchitecture(transformer=T2V_1_3B, vae=vae.config), presets()["wan2.1-t2v-1.3b"].defaults
    )


def measure(case: Case, repeats: int) -> Result:
    """Times both libraries in turns and compares their results."""

    def theirs() -> torch.Tensor:
        with torch.no_grad():
            return case.theirs()

    distance = relative_l2(case.ours(), theirs())
    timings = time_rivals({"ours": case.ours, "theirs": theirs}, repeats)
    seconds = {name: timing.median / case.pieces for name, timing in timings.items()}
    return Result(case.name, case.bar, **seconds, ratio=speed_ratio(**timings), distance=distance)


def show(results: list[Result]) -> None:
    table = Table("stage", "wanjax, s", "torch, s", "torch / wanjax", "bar", "relative L2 distance")
    for r in results:
        mark = "" if r.ratio >= r.bar else " (missed)"
        table.add_row(
            r.name, f"{r.ours:.3f}", f"{r.theirs:.3f}", f"{r.ratio:.2f}{mark}", f"{r.bar:.1f}", f"{r.distance:.1e}"
        )
    Console(width=140).print(table)


def machine() -> dict[str, str]:
    packages = {name: version(name) for name in ("jax", "torch", "diffusers", "transformers")}
    return {"cpu": platform.processor() or platform.machine(), "cores": str(os.cpu_count()), **packages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", action="append", choices=("text", "step", "vae"), help="default: all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=2, help="layers of the text encoder and of the transformer")
    parser.add_argument("--vae-size", default="256x256", help="WIDTHxHEIGHT of the decoded video")
    parser.add_argument("--vae-frames", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    width, height = map(int, options.vae_size.split("x"))
    stages: dict[str, Callable[[], Iterator[Case]]] = {
        "text": partial(text_case, options.layers),
        "step": partial(step_cases, options.layers),
        "vae": partial(vae_case, height, width, options.vae_frames),
    }
    torch.manual_seed(0)
    results: list[Result] = []
    for stage in options.stage or stages:
        for case in stages[stage]():
            results.append(measure(case, options.repeats))
            print(results[-1], flush=True)
            if options.json:
                record = {"machine": machine(), "results": [asdict(result) for result in results]}
                options.json.write_text(json.dumps(record, indent=2) + "\n")
    show(results)


if __name__ == "__main__":
    main()
