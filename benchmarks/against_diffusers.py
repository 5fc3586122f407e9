# SPDX-License-Identifier: Apache-2.0
"""Compare the speed with diffusers and transformers in torch: same weights, inputs and CPU, in float32.

Text encoding, denoising steps, decoding, and gradients in training (Wan), at the widths of Wan 2.1 1.3B, CogVideoX-1.5
5B or HunyuanVideo-1.5. Only a few layers run, since all cost the same. benchmarks/comparison/ has each family's stages.

    python -m benchmarks.against_diffusers [--model FAMILY] [--json FILE] [--stage NAME ...] [--repeats 5]
"""

import argparse
import json
import os
import platform
import re
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.comparison import cogvideox, hunyuanvideo, wan
from benchmarks.comparison.cases import Result, Sizes, measure, show

FAMILIES = {"wan": wan.STAGES, "cogvideox": cogvideox.STAGES, "hunyuanvideo": hunyuanvideo.STAGES}
STAGES = list(dict.fromkeys(stage for stages in FAMILIES.values() for stage in stages))


def processor() -> str:
    """Return the processor's name, and the bfloat16 instructions that it supports."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    features = sorted(set(re.findall(r"\b(?:amx_bf16|avx512_bf16|avx512f|avx2)\b", text)))
    return f"{name[1] if name else platform.machine()} ({', '.join(features) or 'no known vector instructions'})"


def machine() -> dict[str, str]:
    packages = {name: version(name) for name in ("jax", "torch", "diffusers", "transformers")}
    return {"cpu": processor(), "cores": str(os.cpu_count()), **packages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=FAMILIES, default="wan")
    parser.add_argument("--stage", action="append", choices=STAGES, help="default: all of the family")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=2, help="layers of the text encoder and of the transformer")
    parser.add_argument("--vae-size", default="256x256", help="WIDTHxHEIGHT of the decoded video")
    parser.add_argument("--vae-frames", type=int, default=9)
    parser.add_argument("--step-size", default="256x256x17", help="WIDTHxHEIGHTxFRAMES of Wan's steps")
    parser.add_argument("--step-dtype", choices=("float32", "bfloat16"), default="float32", help="of Wan's steps")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    width, height = map(int, options.vae_size.split("x"))
    step_width, step_height, frames = map(int, options.step_size.split("x"))
    sizes = Sizes(
        options.layers, height, width, options.vae_frames, (step_height, step_width, frames), options.step_dtype
    )
    stages = FAMILIES[options.model]
    if missing := [stage for stage in options.stage or () if stage not in stages]:
        parser.error(f"{options.model} has no stage {missing[0]}: give {', '.join(stages)}")
    torch.manual_seed(0)
    results: list[Result] = []
    for stage in options.stage or stages:
        for case in stages[stage](sizes):
            results.append(measure(case, options.repeats))
            print(results[-1], flush=True)
            if options.json:
                report = {"machine": machine(), "results": [asdict(result) for result in results]}
                options.json.write_text(json.dumps(report, indent=2) + "\n")
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    show(results)


if __name__ == "__main__":
    main()
