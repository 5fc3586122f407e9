# SPDX-License-Identifier: Apache-2.0
"""Measure the loss of quality by step caches and by precisions, compared with the same videos without them.

    python -m benchmarks.quality --steps 50 --caches magcache teacache easycache deepcache guidance
    python -m benchmarks.quality --steps 20 --caches easycache --precisions int8-weights int8 fp8-weights fp8

For each precision and cache, the table has the speedups of denoising and of the whole video: the median of the ratios
to the run without them just before. It also has the mean number of computed steps, PSNR and SSIM of the frames against
that run, and LPIPS if --lpips names its weights. For `nano`, the prompts are the combinations that training never saw,
and the table has the number of videos with the right colour, motion and shape.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, UInt8
from scipy import ndimage

import wanjax
from benchmarks.lpips import lpips
from wanjax.layers.precision import PRECISIONS
from wanjax.pipelines.caching.step_cache import History

Frames = UInt8[np.ndarray, "T H W 3"]
NANO = Path(__file__).parents[1] / "examples/nano"
ASPECTS = ("colour", "motion", "shape")
CACHES = ("magcache", "teacache", "easycache", "deepcache", "guidance")


class Variant(NamedTuple):
    """The precision and the cache with which a video is made."""

    precision: str = "none"
    cache: str = "none"

    def __str__(self) -> str:
        return " + ".join(name for name in self if name != "none") or "none"


@dataclass
class TimedVideo:
    """A video, the seconds of denoising, the seconds of the whole run, and the number of computed steps."""

    frames: Frames
    denoising_seconds: float
    total_seconds: float
    computed_steps: int


@dataclass
class VariantFigures:
    """The figures of a variant, one for each video. Speedups are relative to full precision without a cache."""

    denoising_speedup: list[float] = field(default_factory=list)
    total_speedup: list[float] = field(default_factory=list)
    computed_steps: list[int] = field(default_factory=list)
    psnr: list[float] = field(default_factory=list)
    ssim: list[float] = field(default_factory=list)
    lpips: list[float] = field(default_factory=list)
    content: dict[str, list[bool]] = field(default_factory=lambda: {aspect: [] for aspect in ASPECTS})

    def summary(self) -> dict[str, Any]:
        """Return the medians of the speedups, and the means of the other figures."""
        medians = {name: float(np.median(getattr(self, name))) for name in ("denoising_speedup", "total_speedup")}
        lists = {name: getattr(self, name) for name in ("computed_steps", "psnr", "ssim", "lpips")} | self.content
        return medians | {name: float(np.mean(values)) for name, values in lists.items() if values}


def psnr(first: Frames, second: Frames) -> float:
    """Return the peak signal-to-noise ratio in dB, at most 100."""
    mean_square = np.mean((first.astype(np.float64) - second) ** 2)
    return 100.0 if mean_square == 0 else min(100.0, float(10 * np.log10(255**2 / mean_square)))


def ssim(first: Frames, second: Frames) -> float:
    """Return the mean structural similarity of frames, as Wang et al., 2004: Gaussian windows of 11 × 11, σ 1.5."""

    def mean(x: Float[np.ndarray, "T H W 3"]) -> Float[np.ndarray, "T H W 3"]:
        return ndimage.gaussian_filter(x, (0, 1.5, 1.5, 0), truncate=3.5)[:, 5:-5, 5:-5]

    x, y = (frames.astype(np.float64) for frames in (first, second))
    mean_x, mean_y = mean(x), mean(y)
    var_x, var_y = mean(x * x) - mean_x**2, mean(y * y) - mean_y**2
    covariance, c1, c2 = mean(x * y) - mean_x * mean_y, (0.01 * 255) ** 2, (0.03 * 255) ** 2
    similarity = (
        (2 * mean_x * mean_y + c1) * (2 * covariance + c2) / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
    )
    return float(similarity.mean())


class VideoMaker:
    """Makes videos with a model in several precisions; the prompt is encoded ahead."""

    def __init__(self, model: str, precisions: Sequence[str], settings: dict[str, Any]):
        self.pipes = {name: wanjax.load(model, precision=name) for name in ("none", *precisions)}
        for pipe in self.pipes.values():
            pipe.progress = False
        self.settings = settings

    def encode(self, prompt: str) -> Any:
        return self.pipes["none"].encode(prompt)

    def make(self, conditioning: Any, seed: int, variant: Variant) -> TimedVideo:
        pipe, reused_steps = self.pipes[variant.precision], []

        def callback(step: Any) -> None:
            reused_steps.append(step.reuses)
            if step.index + 1 == step.total and variant.cache.startswith("easycache"):
                num_reused = int(History(*step.state.cached[-1]).count)
                reused_steps[:] = [index < num_reused for index in range(step.total)]

        start = perf_counter()
        latents = pipe.denoise(conditioning, seed=seed, cache=variant.cache, callback=callback, **self.settings)
        jax.block_until_ready(latents)
        denoised = perf_counter()
        frames = np.asarray(pipe.decode(latents))
        computed_steps = len(reused_steps) - sum(reused_steps)
        return TimedVideo(frames, denoised - start, perf_counter() - start, computed_steps)


def compare(
    maker: VideoMaker,
    prompts: Sequence[tuple[str, dict[str, str]]],
    seeds: int,
    variants: Sequence[Variant],
    read_content: Callable[[Frames], Any] | None,
    weights: Path | None,
) -> dict[Variant, VariantFigures]:
    """Make a video of each prompt and seed in each variant. The first video of each variant is made twice.

    Each prompt comes with the expected content of its video, by aspect. `read` recognises the content of a video.
    """
    reference = Variant()
    figures_by_variant = {variant: VariantFigures() for variant in (reference, *variants)}
    for index, (prompt, expected_content) in enumerate(prompts):
        conditioning = maker.encode(prompt)
        for seed in range(seeds):
            for variant in figures_by_variant if index == seed == 0 else ():
                maker.make(conditioning, seed, variant)
            reference_video = maker.make(conditioning, seed, reference)
            for variant, figures in figures_by_variant.items():
                video = reference_video if variant == reference else maker.make(conditioning, seed, variant)
                figures.denoising_speedup.append(reference_video.denoising_seconds / video.denoising_seconds)
                figures.total_speedup.append(reference_video.total_seconds / video.total_seconds)
                figures.computed_steps.append(video.computed_steps)
                figures.psnr.append(psnr(video.frames, reference_video.frames))
                figures.ssim.append(ssim(video.frames, reference_video.frames))
                if weights is not None:
                    figures.lpips.append(lpips(video.frames, reference_video.frames, weights))
                content = read_content(video.frames) if read_content else None
                for aspect, name in expected_content.items():
                    figures.content[aspect].append(getattr(content, aspect) == name)
        print(f"{index + 1} of {len(prompts)} prompts", file=sys.stderr, flush=True)
    return figures_by_variant


def format_table(summaries: dict[str, dict[str, float]]) -> str:
    """Format the figures as a table of Markdown."""
    columns = {
        "denoising_speedup": ("denoising", "{:.2f} ×"),
        "total_speedup": ("whole video", "{:.2f} ×"),
        "computed_steps": ("steps computed", "{:.1f}"),
        "psnr": ("PSNR", "{:.1f}"),
        "ssim": ("SSIM", "{:.3f}"),
        "lpips": ("LPIPS", "{:.3f}"),
    } | {aspect: (aspect, "{:.1%}") for aspect in ASPECTS}
    columns = {name: column for name, column in columns.items() if name in summaries["none"]}
    rows = [["", *(title for title, _ in columns.values())], ["---"] * (len(columns) + 1)]
    for variant, summary in summaries.items():
        rows.append([f"`{variant}`", *(template.format(summary[name]) for name, (_, template) in columns.items())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def nano_prompts() -> tuple[list[tuple[str, dict[str, str]]], Callable[[Frames], Any]]:
    """Return prompts that nano never saw in training, each with its names, and a function that reads a video."""
    sys.path.insert(0, str(NANO))
    from captions import plain_caption
    from clips import HELD_OUT
    from reading import read

    names = ("colour", "shape", "motion")
    return [(plain_caption(*content), dict(zip(names, content, strict=True))) for content in HELD_OUT], read


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano", help="a name, a hub id or a folder (default: nano)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt on each line (default: nano's own)")
    parser.add_argument("--limit", type=int, help="only the first LIMIT prompts")
    parser.add_argument("--seeds", type=int, default=4, help="videos of each prompt (default: 4)")
    parser.add_argument("--steps", type=int, default=50, help="denoising steps (default: 50)")
    parser.add_argument("--size", metavar="WxH", help="width and height (default: the model's)")
    parser.add_argument("--frames", type=int, help="number of frames (default: the model's)")
    parser.add_argument("--caches", nargs="*", default=CACHES, metavar="NAME", help=f"default: {' '.join(CACHES)}")
    parser.add_argument(
        "--precisions",
        nargs="*",
        default=(),
        choices=[name for name in PRECISIONS if name != "none"],
        help="each without a cache and with each cache (default: none)",
    )
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
    prompts, read_content = ([], None) if options.model != "nano" and options.prompts else nano_prompts()
    if options.prompts:
        prompts, read_content = (
            [(line, {}) for line in options.prompts.read_text(encoding="utf-8").splitlines() if line],
            None,
        )
    maker = VideoMaker(options.model, options.precisions, settings)
    variants = [Variant(precision, cache) for precision in maker.pipes for cache in ("none", *options.caches)][1:]
    figures = compare(maker, prompts[: options.limit], options.seeds, variants, read_content, options.lpips)
    summaries = {str(variant): variant_figures.summary() for variant, variant_figures in figures.items()}
    print(f"{options.model}, {options.steps} steps, {len(figures[Variant()].psnr)} videos")
    print(format_table(summaries))
    if options.json:
        options.json.write_text(json.dumps(summaries, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
