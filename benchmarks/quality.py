# SPDX-License-Identifier: Apache-2.0
"""Measure the loss of quality by step caches, compared with the same videos without a cache.

    python -m benchmarks.quality --steps 50 --caches magcache teacache easycache deepcache guidance

For each cache, the table has the speedups of denoising and of the whole video: the median of the ratios to the run
without a cache just before. It also has the mean number of computed steps, PSNR and SSIM of the frames against the run
without a cache, and LPIPS if --lpips names its weights. For `nano`, the prompts are the combinations that training
never saw, and the table has the number of videos with the right colour, motion and shape.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, UInt8
from scipy import ndimage

import wanjax
from benchmarks.lpips import lpips
from wanjax.pipelines.caching.step_cache import History

Frames = UInt8[np.ndarray, "T H W 3"]
NANO = Path(__file__).parents[1] / "examples/nano"
ASPECTS = ("colour", "motion", "shape")
CACHES = ("magcache", "teacache", "easycache", "deepcache", "guidance")


@dataclass
class Made:
    """A video, the seconds of its denoising and in all, and the number of steps that were computed."""

    frames: Frames
    denoise: float
    whole: float
    computed: int


@dataclass
class Compared:
    """The figures of a cache, one of each video."""

    denoise: list[float] = field(default_factory=list)  # times as fast
    whole: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    psnr: list[float] = field(default_factory=list)
    ssim: list[float] = field(default_factory=list)
    lpips: list[float] = field(default_factory=list)
    right: dict[str, list[bool]] = field(default_factory=lambda: {aspect: [] for aspect in ASPECTS})

    def told(self) -> dict[str, Any]:
        """Return the medians of the speedups, and the means of the other figures."""
        found = {name: float(np.median(getattr(self, name))) for name in ("denoise", "whole")}
        means = {name: getattr(self, name) for name in ("computed", "psnr", "ssim", "lpips")} | self.right
        return found | {name: float(np.mean(values)) for name, values in means.items() if values}


def psnr(one: Frames, other: Frames) -> float:
    """Return the peak signal-to-noise ratio in dB, at most 100."""
    squared = np.mean((one.astype(np.float64) - other) ** 2)
    return 100.0 if squared == 0 else min(100.0, float(10 * np.log10(255**2 / squared)))


def ssim(one: Frames, other: Frames) -> float:
    """Return the mean structural similarity of frames, as Wang et al., 2004: Gaussian windows of 11 × 11, σ 1.5."""

    def mean(x: Float[np.ndarray, "T H W 3"]) -> Float[np.ndarray, "T H W 3"]:
        return ndimage.gaussian_filter(x, (0, 1.5, 1.5, 0), truncate=3.5)[:, 5:-5, 5:-5]

    x, y = (frames.astype(np.float64) for frames in (one, other))
    mean_x, mean_y = mean(x), mean(y)
    var_x, var_y = mean(x * x) - mean_x**2, mean(y * y) - mean_y**2
    both, c1, c2 = mean(x * y) - mean_x * mean_y, (0.01 * 255) ** 2, (0.03 * 255) ** 2
    likeness = (2 * mean_x * mean_y + c1) * (2 * both + c2) / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
    return float(likeness.mean())


class Maker:
    """Makes videos with a model; the prompt is encoded ahead."""

    def __init__(self, model: str, settings: dict[str, Any]):
        self.pipe = wanjax.load(model)
        self.pipe.progress = False
        self.settings = settings

    def make(self, encoded: Any, seed: int, cache: str) -> Made:
        reused = []

        def callback(step: Any) -> None:
            reused.append(step.reuses)
            if step.index + 1 == step.total and cache.startswith("easycache"):
                reused[:] = [True] * int(History(*step.state.cached[-1]).count) + [False] * step.total
                del reused[step.total :]

        start = perf_counter()
        latents = self.pipe.denoise(encoded, seed=seed, cache=cache, callback=callback, **self.settings)
        jax.block_until_ready(latents)
        middle = perf_counter()
        frames = np.asarray(self.pipe.decode(latents))
        return Made(frames, middle - start, perf_counter() - start, len(reused) - sum(reused))


def compare(
    maker: Maker,
    prompts: Sequence[tuple[str, dict[str, str]]],
    seeds: int,
    caches: Sequence[str],
    read: Callable[[Frames], Any] | None,
    weights: Path | None,
) -> dict[str, Compared]:
    """Make a video of each prompt and seed with and without every cache. The first of each is made twice, for warm-up.

    A prompt comes with the names that a reading of its video should tell.
    """
    found = {cache: Compared() for cache in ("none", *caches)}
    for number, (prompt, asked) in enumerate(prompts):
        encoded = maker.pipe.encode(prompt)
        for seed in range(seeds):
            for cache in found if number == seed == 0 else ():
                maker.make(encoded, seed, cache)
            plain = maker.make(encoded, seed, "none")
            for cache, figures in found.items():
                made = plain if cache == "none" else maker.make(encoded, seed, cache)
                figures.denoise.append(plain.denoise / made.denoise)
                figures.whole.append(plain.whole / made.whole)
                figures.computed.append(made.computed)
                figures.psnr.append(psnr(made.frames, plain.frames))
                figures.ssim.append(ssim(made.frames, plain.frames))
                if weights is not None:
                    figures.lpips.append(lpips(made.frames, plain.frames, weights))
                reading = read(made.frames) if read else None
                for aspect, name in asked.items():
                    figures.right[aspect].append(getattr(reading, aspect) == name)
        print(f"{number + 1} of {len(prompts)} prompts", file=sys.stderr, flush=True)
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    """Formats the figures as a table of Markdown."""
    kinds = {
        "denoise": ("denoising", "{:.2f} ×"),
        "whole": ("whole video", "{:.2f} ×"),
        "computed": ("steps computed", "{:.1f}"),
        "psnr": ("PSNR", "{:.1f}"),
        "ssim": ("SSIM", "{:.3f}"),
        "lpips": ("LPIPS", "{:.3f}"),
    } | {aspect: (aspect, "{:.1%}") for aspect in ASPECTS}
    known = {name: kind for name, kind in kinds.items() if name in found["none"]}
    rows = [["cache", *(title for title, _ in known.values())], ["---"] * (len(known) + 1)]
    for cache, figures in found.items():
        rows.append([f"`{cache}`", *(shape.format(figures[name]) for name, (_, shape) in known.items())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def of_nano() -> tuple[list[tuple[str, dict[str, str]]], Callable[[Frames], Any]]:
    """Return prompts that nano's training never saw with the names in them, and a function that reads a video."""
    sys.path.insert(0, str(NANO))
    from captions import plain_caption
    from clips import HELD_OUT
    from reading import read

    names = ("colour", "shape", "motion")
    return [(plain_caption(*given), dict(zip(names, given, strict=True))) for given in HELD_OUT], read


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano", help="a name, a hub id or a folder (default: nano)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt on each line (default: nano's own)")
    parser.add_argument("--limit", type=int, help="only the first LIMIT prompts")
    parser.add_argument("--seeds", type=int, default=4, help="videos of each prompt (default: 4)")
    parser.add_argument("--steps", type=int, default=50, help="denoising steps (default: 50)")
    parser.add_argument("--size", metavar="WxH", help="width and height (default: the model's)")
    parser.add_argument("--frames", type=int, help="number of frames (default: the model's)")
    parser.add_argument("--caches", nargs="+", default=CACHES, metavar="NAME", help=f"default: {' '.join(CACHES)}")
    parser.add_argument(
        "--lpips", type=Path, metavar="FILE", help="weights of LPIPS, as benchmarks/lpips.py reads them"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)
    settings: dict[str, Any] = {"steps": options.steps}
    if options.size:
        settings["size"] = tuple(int(side) for side in reversed(options.size.split("x")))
    if options.frames:
        settings["frames"] = options.frames
    prompts, read = ([], None) if options.model != "nano" and options.prompts else of_nano()
    if options.prompts:
        prompts, read = [(line, {}) for line in options.prompts.read_text(encoding="utf-8").splitlines() if line], None
    maker = Maker(options.model, settings)
    compared = compare(maker, prompts[: options.limit], options.seeds, options.caches, read, options.lpips)
    found = {cache: figures.told() for cache, figures in compared.items()}
    print(f"{options.model}, {options.steps} steps, {len(compared['none'].psnr)} videos")
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
