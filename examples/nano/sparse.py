# SPDX-License-Identifier: Apache-2.0
"""Teach the bundled model sparse-linear attention: `python examples/nano/sparse.py`.

The script draws clips of shapes that the model knows, and trains the model on them as `wanjax train --attention sla:…`
does, once for each fraction of the keys. The dense model is the teacher: its prediction for a clip is the target. Then
the script makes 32 videos, one of each colour and shape: with all keys, and with a fraction of the keys before and
after the training. It reads the videos, and compares each with the video that uses all keys.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
from captions import caption, plain_caption
from clips import COLOURS, MOTIONS, SHAPES, draw, sample_specs
from reading import read
from teach import FPS, FRAMES, SIZE, sheet

import wanjax
from wanjax.kernels.attention import AttentionConfig, SparseLinearAttentionConfig
from wanjax.media.video import write_video
from wanjax.training import LoraConfig, OptimizerConfig, TrainConfig, Training

BLOCKS = {"block_q": 8, "block_kv": 4}  # 80 tokens make 10 blocks of queries and 20 of keys
COMBINATIONS = [
    (colour, shape, MOTIONS[i % len(MOTIONS)])
    for i, (shape, colour) in enumerate((shape, colour) for shape in SHAPES for colour in COLOURS)
]
SEED = 300  # of the first video; with all keys, all 32 videos are right
CONFIG = TrainConfig(
    batch_size=16,
    lora=LoraConfig(rank=64),
    optimizer=OptimizerConfig("muon", learning_rate=2e-3, warmup_steps=50, lr_scheduler="cosine", weight_decay=0.0),
    timesteps="logit-normal",
    logit_mean=0.5,
    caption_dropout=0.2,
    buckets=False,
    save_every=200,
    validation_every=100,
)


def write_clips(folder: Path, count: int, seed: int) -> None:
    """Write the missing clips, and a table of their captions. The model's prediction is the target for each clip."""
    rng = np.random.default_rng([seed, 32])
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, spec in enumerate(sample_specs(rng, count)):
        frames = np.round(127.5 * (draw([spec], FRAMES, SIZE, rng)[0] + 1.0)).astype(np.uint8)
        rows.append({"file_name": f"{number:04}.mp4", "text": caption(spec, rng), "preserve": True})
        if not (file := folder / rows[-1]["file_name"]).exists():
            write_video(file, frames, FPS, {"prompt": rows[-1]["text"]})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def videos_of(pipe: wanjax.Pipeline) -> list[np.ndarray]:
    """Make a video of each of the 32 combinations."""
    return [
        np.asarray(pipe(plain_caption(*combination), seed=SEED + i).frames)
        for i, combination in enumerate(COMBINATIONS)
    ]


def check_videos(videos: Sequence[np.ndarray]) -> np.ndarray:
    """Return for each of the 32 videos whether colour, shape and motion are right."""
    readings = [read(frames) for frames in videos]
    return np.array(
        [(x.colour, x.shape, x.motion) == combination for x, combination in zip(readings, COMBINATIONS, strict=True)]
    )


def psnr(videos: Sequence[np.ndarray], references: Sequence[np.ndarray]) -> float:
    """Return the mean of the videos' peak signal-to-noise ratios, in dB."""
    squared = [np.mean((a.astype(np.float64) - b) ** 2) for a, b in zip(videos, references, strict=True)]
    return float(np.mean(10 * np.log10(255.0**2 / np.maximum(squared, 1e-3))))


def figures(videos: Sequence[np.ndarray], dense: Sequence[np.ndarray]) -> dict[str, float]:
    """Return the number of right videos, and their mean PSNR to the videos that use all keys."""
    return {"right": int(check_videos(videos).sum()), "psnr": psnr(videos, dense)}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default="sparse", help="Folder of the clips and the trainings.")
@click.option("--top", "tops", type=float, multiple=True, default=[0.25], help="Fraction of the keys; may be repeated.")
@click.option("--steps", default=1200, show_default=True)
@click.option("--clips", default=512, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(out: Path, tops: Sequence[float], steps: int, clips: int, seed: int) -> None:
    """Train with sparse-linear attention, count the right videos, and draw them."""
    note = lambda text: click.echo(text)  # noqa: E731
    write_clips(out / "clips", clips, seed)
    dense = videos_of(wanjax.load("nano"))
    figures_by_run: dict[str, dict[str, float]] = {"all keys": figures(dense, dense)}
    config = replace(CONFIG, steps=steps, seed=seed)
    for top in tops:
        attention, folder, start_time = (
            AttentionConfig(sparse=SparseLinearAttentionConfig(top, **BLOCKS)),
            out / f"{top:g}",
            time.monotonic(),
        )
        pipe = wanjax.load("nano", attention=attention, note=note)
        figures_by_run[f"{top:g} untrained"] = figures(videos_of(pipe), dense)
        file = Training(pipe, out / "clips", folder, config, note=note).run()
        videos = videos_of(wanjax.load("nano", lora=str(file), note=note))
        figures_by_run[f"{top:g}"] = figures(videos, dense) | {"minutes": (time.monotonic() - start_time) / 60}
        sheet(videos).save(folder / "videos.png")
        click.echo(json.dumps(figures_by_run, indent=2))
    sheet(dense).save(out / "all_keys.png")
    (out / "figures.json").write_text(json.dumps(figures_by_run, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
