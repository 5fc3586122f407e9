# SPDX-License-Identifier: Apache-2.0
"""Time the noise of `--rng torch`, or compare a video of nano with the video that diffusers makes of the same seed.

python -m benchmarks.torch_noise [--shape 16 21 90 160] [--repeats 5]
python -m benchmarks.torch_noise --video [--seed 3] [--steps 20]
"""

import argparse
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import wanjax
from wanjax.pipelines.torch_noise import TorchGenerator

PROMPT = "a red circle moving right"


def best_seconds(function: Callable[[], object], repeats: int) -> float:
    """Return the shortest time of several calls."""
    seconds = []
    for _ in range(repeats):
        start = perf_counter()
        function()
        seconds.append(perf_counter() - start)
    return min(seconds)


def time_draws(shape: tuple[int, ...], repeats: int) -> None:
    """Print the seconds of a draw."""
    generator = TorchGenerator(0)
    print(f"{math.prod(shape):,} numbers, the best of {repeats}:")
    print(f"  drawn   {best_seconds(lambda: generator.normal(shape), repeats):.3f} s")
    print(f"  skipped {best_seconds(lambda: generator.skip(shape), repeats):.3f} s")
    if find_spec("torch"):
        import torch

        print(f"  torch   {best_seconds(lambda: torch.randn(shape), repeats):.3f} s")


def compare_videos(seed: int, steps: int) -> None:
    """Print the difference between the frames of wanjax and of diffusers, in levels of 255."""
    import torch
    from diffusers import WanPipeline
    from transformers import PreTrainedTokenizerFast

    folder = Path(wanjax.__file__).parent / "nano"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    reference: Any = WanPipeline.from_pretrained(folder, tokenizer=tokenizer)
    reference.set_progress_bar_config(disable=True)
    video = wanjax.load("nano")(PROMPT, steps=steps, seed=seed, rng="torch", follow="diffusers")
    settings = video.settings
    frames = reference(
        PROMPT,
        height=settings["height"],
        width=settings["width"],
        num_frames=settings["frames"],
        num_inference_steps=steps,
        guidance_scale=settings["guidance_scale"],
        max_sequence_length=tokenizer.model_max_length,
        generator=torch.Generator().manual_seed(seed),
    ).frames[0]
    difference = np.abs(np.rint(255 * frames) - video.frames)
    share = f"{(difference > 0).sum()} of {difference.size:,} values differ"
    print(f"seed {seed}: at most {difference.max():.0f} of 255, and {share}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs="+", default=(16, 21, 90, 160), help="default: 81 frames of 720p")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--video", action="store_true")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if options.video:
        compare_videos(options.seed, options.steps)
    else:
        time_draws(tuple(options.shape), options.repeats)


if __name__ == "__main__":
    main()
