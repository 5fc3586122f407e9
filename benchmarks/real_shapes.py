# SPDX-License-Identifier: Apache-2.0
"""The command that a user types for Wan 2.1 T2V 1.3B, run on a checkpoint of the real names, shapes and dtypes.

The weights are random and the tokenizer is small: what is shown is that UMT5-XXL, the transformer and the autoencoder
load, run and are freed within the memory of this machine, and what each takes. Writes some 18 GB, and deletes them.

    python -m benchmarks.real_shapes [--folder FOLDER] [--json FILE] [-- OPTIONS OF wanjax generate ...]
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from tests.toy_tokenizer import save_tokenizer
from wanjax.checkpoint import save_safetensors

MODEL = "wan2.1-t2v-1.3b"
REPOSITORY = "models--Wan-AI--Wan2.1-T2V-1.3B-Diffusers"  # as the hub's cache names it
GENERATE = ["a cat playing the piano", "--size", "256x256", "--frames", "17", "--steps", "2"]
BAR = 20e9  # bytes
SHARD = 5e9  # bytes
SPREAD = 0.02


class RandomTensors(Mapping[str, np.ndarray]):
    """Tensors of given shapes as views of one stretch of noise, so that none is in memory before it is written.

    Each row of a matrix is the one above it, moved on by `STEP` values.
    """

    STEP = 7

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype):
        self.shapes = shapes
        longest = max(np.prod(shape[1:], dtype=int) + self.STEP * shape[0] for shape in shapes.values())
        noise = SPREAD * np.random.default_rng(0).standard_normal(longest, np.float32)
        self.noise = noise.astype(dtype)

    def __getitem__(self, key: str) -> np.ndarray:
        rows, *rest = self.shapes[key]
        if key.endswith(("norm.weight", "norm_q.weight", "norm_k.weight", "norm2.weight", "gamma")):
            return np.ones((rows, *rest), self.noise.dtype)
        columns = np.prod(rest, dtype=int)
        step = self.STEP * self.noise.itemsize
        x = np.lib.stride_tricks.as_strided(self.noise, (rows, columns), (step, self.noise.itemsize))
        return x if len(rest) == 1 else x.reshape(rows, *rest)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def write_checkpoint(folder: Path) -> None:
    """A folder in the diffusers layout; names and shapes come from the reference's own classes."""
    import torch
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    text = UMT5Config(
        vocab_size=256384, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64,
        feed_forward_proj="gated-gelu", architectures=["UMT5EncoderModel"],
    )  # fmt: skip
    with torch.device("meta"):
        encoder = UMT5EncoderModel(text)
        transformer = WanTransformer3DModel(num_attention_heads=12, num_layers=30, ffn_dim=8960)
    vae = AutoencoderKLWan()
    bfloat16, float32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
    _write_component(folder / "text_encoder", text.to_dict(), encoder, bfloat16, "model")
    _write_component(folder / "transformer", dict(transformer.config), transformer, float32, "diffusion_pytorch_model")
    _write_component(folder / "vae", dict(vae.config), vae, float32, "diffusion_pytorch_model")
    save_tokenizer(folder / "tokenizer", model_max_length=512)
    scheduler = {
        "_class_name": "UniPCMultistepScheduler", "num_train_timesteps": 1000, "solver_order": 2,
        "prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0,
    }  # fmt: skip
    _write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    parts = {
        "scheduler": ["diffusers", "UniPCMultistepScheduler"], "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"], "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }  # fmt: skip
    _write_json(folder / "model_index.json", {"_class_name": "WanPipeline", **parts})


def _write_component(folder: Path, config: dict, model, dtype: np.dtype, name: str) -> None:
    """config.json and the weights, in shards with an index where they are large."""
    _write_json(folder / "config.json", config)
    tied = "encoder.embed_tokens.weight"  # the same tensor as shared.weight, which files hold once
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items() if key != tied}
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for key, shape in shapes.items():
        nbytes = np.prod(shape, dtype=int) * dtype.itemsize
        if size and size + nbytes > SHARD:
            shards.append({})
            size = 0
        shards[-1][key] = shape
        size += nbytes
    files = {f"{name}-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}
    if len(shards) == 1:
        files = {f"{name}.safetensors": shapes}
    else:
        weight_map = {key: file for file, shard in files.items() for key in shard}
        _write_json(folder / f"{name}.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    for file, shard in files.items():
        save_safetensors(folder / file, RandomTensors(shard, dtype))


def _write_json(path: Path, value: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, default=str) + "\n")


def write_hub_cache(home: Path) -> None:
    """The checkpoint where huggingface-hub keeps what it has downloaded, so that the model is found by its name."""
    repository = home / "hub" / REPOSITORY
    revision = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    write_checkpoint(repository / "snapshots" / revision)


def run(command: list[str], environment: Mapping[str, str]) -> tuple[float, int]:
    """Runs it, its output shown; wall seconds and the most bytes it held in memory.

    The command sets its own peak back at the start of each stage, so the peak is looked at all along.
    """
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, env=environment)
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
        peak = max(peak, *(1024 * int(kilobytes) for kilobytes in found), 0)
        time.sleep(0.05)
    if process.returncode:
        sys.exit(process.returncode)
    return time.perf_counter() - start, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where there is room")
    parser.add_argument("--json", type=Path, help="where the figures go too")
    parser.add_argument("generate", nargs="*", help=f"after --, in place of {' '.join(GENERATE)}")
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="wanjax-synthetic-", dir=options.folder))
    try:
        start = time.perf_counter()
        write_hub_cache(home)
        size = sum(file.stat().st_size for file in home.rglob("*") if file.is_file())
        print(f"wrote {size / 1e9:.1f} GB in {time.perf_counter() - start:.0f} s", flush=True)
        arguments = [*(options.generate or GENERATE), "--model", MODEL, "--dir", str(home / "outputs")]
        command = [sys.executable, "-m", "wanjax", "generate", *arguments]
        print("wanjax", *command[3:], flush=True)
        caches = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(home / "cache")}
        seconds, peak = run(command, os.environ | caches)
    finally:
        shutil.rmtree(home)
    verdict = "within" if peak <= BAR else "beyond"
    print(f"{seconds:.0f} s, at most {peak / 1e9:.2f} GB of memory, {verdict} {BAR / 1e9:.0f}")
    if options.json:
        options.json.write_text(json.dumps({"seconds": seconds, "peak": peak, "checkpoint": size}, indent=2) + "\n")


if __name__ == "__main__":
    main()
