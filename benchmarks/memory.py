# SPDX-License-Identifier: Apache-2.0
"""Peak memory of decoding a long clip compared with a short one, with Wan 2.1's autoencoder (random weights).

Each clip is decoded in its own process, chunk by chunk, and each chunk's frames are written at once.

    python -m benchmarks.memory [--frames 17 81] [--size 256x256] [--json FILE]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from wanjax.media.videos import write_video
from wanjax.models.wan.config import T2V_1_3B, VAE_2_1
from wanjax.models.wan.vae import WanVAE
from wanjax.pipelines.components import Components
from wanjax.pipelines.wan.architecture import WanArchitecture
from wanjax.pipelines.wan.pipeline import WanPipeline
from wanjax.registry import presets

BAR = 1.3  # at most this multiple of the first clip's memory
STATUS = Path("/proc/self/status")


def memory(field: str) -> int:
    """Returns this process's memory in bytes: `VmRSS` is the current size, `VmHWM` the peak."""
    [line] = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:")]
    return 1024 * int(line.split()[1])


def random_vae() -> WanVAE:
    make = partial(WanVAE, VAE_2_1, dtype=jnp.float32, param_dtype=jnp.float32)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
    random = np.random.default_rng(0)
    weights = jax.tree.map(lambda x: jnp.asarray(0.02 * random.standard_normal(x.shape, x.dtype)), state)
    return nnx.merge(graphdef, weights)


def decode(frames: int, height: int, width: int) -> dict[str, int]:
    """Decodes one clip and returns the process's memory before decoding and at its peak, in bytes."""
    parts = Components({})
    parts.put("vae", random_vae())
    preset = presets()["wan2.1-t2v-1.3b"]
    pipeline = WanPipeline(parts, WanArchitecture(transformer=T2V_1_3B, vae=VAE_2_1), preset.defaults)
    latents = jax.random.normal(jax.random.key(0), (1, 16, (frames + 3) // 4, height // 8, width // 8))
    before = memory("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        chunks = (np.asarray(chunk) for chunk in pipeline.decode_chunks(latents))
        write_video(f"{folder}/video.mp4", chunks, preset.defaults.fps, {})
    return {"frames": frames, "before": before, "peak": memory("VmHWM")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, nargs="+", default=[17, 81])
    parser.add_argument("--size", default="256x256", help="WIDTHxHEIGHT")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--here", action="store_true", help="decode in this process and print one clip's figures")
    options = parser.parse_args()
    width, height = map(int, options.size.split("x"))
    if options.here:
        print(json.dumps(decode(options.frames[0], height, width)))
        return
    results = [_in_new_process(frames, options.size) for frames in options.frames]
    table = Table("frames", "before decoding, GB", "peak, GB", "peak / first", f"bar {BAR}", title=options.size)
    for r in results:
        ratio = r["peak"] / results[0]["peak"]
        sizes = (f"{r[name] / 1e9:.2f}" for name in ("before", "peak"))
        table.add_row(str(r["frames"]), *sizes, f"{ratio:.2f}", "met" if ratio <= BAR else "missed")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({"size": options.size, "results": results}, indent=2) + "\n")


def _in_new_process(frames: int, size: str) -> dict[str, int]:
    command = [sys.executable, "-m", "benchmarks.memory", "--here", "--frames", str(frames), "--size", size]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
