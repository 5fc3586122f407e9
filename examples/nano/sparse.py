# SPDX-License-Identifier: Apache-2.0
"""Teaches the model in the box sparse-linear attention: `python examples/nano/sparse.py`.

Draws clips of what the model knows, and trains it on them as `wanjax train --attention sla:…` does, once for each
share of the keys. The dense model is the teacher: what it predicts for a clip is the target. Then makes 32 videos, one
of each colour and shape: with all keys, and with that share before and after the training. Reads them, and compares
each with the one of all keys.
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
from wanjax.kernels.attention import AttentionConfig, SparseLinear
from wanjax.media.video import write_video
from wanjax.training import LoraConfig, OptimizerConfig, TrainConfig, Training

BLOCKS = {"block_q": 8, "block_kv": 4}  # of 80 tokens: 10 blocks of queries, 20 of keys
ASKED = [
    (colour, shape, MOTIONS[i % len(MOTIONS)])
    for i, (shape, colour) in enumerate((shape, colour) for shape in SHAPES for colour in COLOURS)
]
SEED = 300  # of the first video: with all keys the 32 are all right
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
    """Write drawn clips that are not there, and a table of their captions; each teaches what the model makes of it."""
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
    """Make a video of each of the 32."""
    return [np.asarray(pipe(plain_caption(*asked), seed=SEED + i).frames) for i, asked in enumerate(ASKED)]


def right(videos: Sequence[np.ndarray]) -> np.ndarray:
    """Tell of each of the 32 whether its colour, shape and motion are read as they were asked for."""
    readings = [read(frames) for frames in videos]
    return np.array([(x.colour, x.shape, x.motion) == asked for x, asked in zip(readings, ASKED, strict=True)])


def psnr(videos: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """Return the mean of the videos' peak signal-to-noise ratios, in dB."""
    squared = [np.mean((a.astype(np.float64) - b) ** 2) for a, b in zip(videos, others, strict=True)]
    return float(np.mean(10 * np.log10(255.0**2 / np.maximum(squared, 1e-3))))


def figures(videos: Sequence[np.ndarray], dense: Sequence[np.ndarray]) -> dict[str, float]:
    """Return the count of videos that are right, and how near they are to those of all keys."""
    return {"right": int(right(videos).sum()), "psnr": psnr(videos, dense)}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default="sparse", help="The folder of clips and trainings.")
@click.option("--top", "tops", type=float, multiple=True, default=[0.25], help="A share of the keys; may be repeated.")
@click.option("--steps", default=1200, show_default=True)
@click.option("--clips", default=512, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(out: Path, tops: Sequence[float], steps: int, clips: int, seed: int) -> None:
    """Teaches, then counts what is read right, and draws the videos."""
    note = lambda text: click.echo(text)  # noqa: E731
    write_clips(out / "clips", clips, seed)
    dense = videos_of(wanjax.load("nano"))
    found: dict[str, dict[str, float]] = {"all keys": figures(dense, dense)}
    config = replace(CONFIG, steps=steps, seed=seed)
    for top in tops:
        attention, folder, begun = (
            AttentionConfig(sparse=SparseLinear(top, **BLOCKS)),
            out / f"{top:g}",
            time.monotonic(),
        )
        pipe = wanjax.load("nano", attention=attention, note=note)
        found[f"{top:g} untrained"] = figures(videos_of(pipe), dense)
        file = Training(pipe, out / "clips", folder, config, note=note).run()
        videos = videos_of(wanjax.load("nano", lora=str(file), note=note))
        found[f"{top:g}"] = figures(videos, dense) | {"minutes": (time.monotonic() - begun) / 60}
        sheet(videos).save(folder / "videos.png")
        click.echo(json.dumps(found, indent=2))
    sheet(dense).save(out / "all_keys.png")
    (out / "figures.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
