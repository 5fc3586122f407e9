# SPDX-License-Identifier: Apache-2.0
"""Compare the peak memory of decoding a long and a short clip, with a model's autoencoder and random weights.

Each clip is decoded in its own process, chunk by chunk, and each chunk's frames are written at once.

    python -m benchmarks.memory [--model wan2.1-t2v-1.3b] [--frames 17 81] [--size 256x256] [--json FILE]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from wanjax.checkpoints.network_kinds import Network
from wanjax.media.video import write_video
from wanjax.pipelines.components import Components
from wanjax.pipelines.pipeline import Pipeline
from wanjax.registry import family_with, presets

MAX_GROWTH = 1.3  # at most this multiple of the first clip's memory
STATUS = Path("/proc/self/status")


def memory(field: str) -> int:
    """Return this process's memory in bytes: `VmRSS` is the current size, `VmHWM` the peak."""
    [line] = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:")]
    return 1024 * int(line.split()[1])


def random_network(network: Network) -> Any:
    """Return the network with random weights, in float32."""
    graphdef, state = nnx.split(network.abstract(dtype=jnp.float32, param_dtype=jnp.float32))
    random = np.random.default_rng(0)
    weights = jax.tree.map(lambda x: jnp.asarray(0.02 * random.standard_normal(x.shape, x.dtype)), state)
    return nnx.merge(graphdef, weights)


def decode(model: str, frames: int, height: int, width: int) -> dict[str, int]:
    """Decode one clip and return the process's memory before decoding and at its peak, in bytes."""
    preset, components = presets()[model], Components({})
    family, video_model = family_with(preset), preset.model
    assert video_model is not None
    components.override("vae", random_network(family.network_of(video_model.vae)))
    pipeline = Pipeline(components, video_model, preset.defaults)
    shape = video_model.spec.latent_shape(replace(preset.defaults, frames=frames, height=height, width=width))
    latents = jax.random.normal(jax.random.key(0), shape)
    bytes_before = memory("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        chunks = (np.asarray(chunk) for chunk in pipeline.decode_chunks(latents))
        write_video(f"{folder}/video.mp4", chunks, preset.defaults.fps, {})
    return {"frames": frames, "before": bytes_before, "peak": memory("VmHWM")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = [name for name, preset in presets().items() if preset.model]
    parser.add_argument("--model", default="wan2.1-t2v-1.3b", choices=models, metavar="NAME", help=", ".join(models))
    parser.add_argument("--frames", type=int, nargs="+", default=[17, 81])
    parser.add_argument("--size", default="256x256", help="WIDTHxHEIGHT")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--here", action="store_true", help="decode in this process and print one clip's figures")
    options = parser.parse_args()
    width, height = map(int, options.size.split("x"))
    if options.here:
        print(json.dumps(decode(options.model, options.frames[0], height, width)))
        return
    results = [_in_new_process(options.model, frames, options.size) for frames in options.frames]
    title = f"{options.model}, {options.size}"
    table = Table("frames", "before decoding, GB", "peak, GB", "peak / first", f"target {MAX_GROWTH}", title=title)
    for figures in results:
        ratio = figures["peak"] / results[0]["peak"]
        sizes = (f"{figures[name] / 1e9:.2f}" for name in ("before", "peak"))
        table.add_row(str(figures["frames"]), *sizes, f"{ratio:.2f}", "met" if ratio <= MAX_GROWTH else "missed")
    Console().print(table)
    if options.json:
        record = {"model": options.model, "size": options.size, "results": results}
        options.json.write_text(json.dumps(record, indent=2) + "\n")


def _in_new_process(model: str, frames: int, size: str) -> dict[str, int]:
    arguments = ["--here", "--model", model, "--frames", str(frames), "--size", size]
    command = [sys.executable, "-m", "benchmarks.memory", *arguments]
    process = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(process.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
