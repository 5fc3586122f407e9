# SPDX-License-Identifier: Apache-2.0
"""Teach the bundled model a shape and a colour that it has never seen: `python examples/nano/teach.py`.

The script draws 64 clips, 40 of a magenta bar and 24 of known shapes, and lets the model make more clips of known
shapes. It trains a LoRA of rank 16 on them as `wanjax train` does. Then it makes videos of 40 magenta bars and of
held-out combinations of old words, and reads them. The new words are not in the model's vocabulary, so its tokenizer
spells them. The autoencoder, which is not trained, can already draw the new shape and colour.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
from captions import caption, plain_caption
from clips import BACKGROUNDS, COLOURS, HELD_OUT, MOTIONS, SHAPES, TAUGHT_COLOUR, TAUGHT_SHAPE, Spec, draw, sample_specs
from PIL import Image
from reading import read

import wanjax
from wanjax.media.video import write_video
from wanjax.training import LoraConfig, OptimizerConfig, TrainConfig, Training

NEW_CLIPS, OLD_CLIPS = 40, 24  # drawn clips of new and of old words; the old ones prevent forgetting
GENERATED_CLIPS = 128  # clips of old words that the model makes
SIZE, FRAMES, FPS = 64, 17, 8
GUIDANCE = 2.5  # on new words it acts like 1 + 0.25 · 1.5 (see `uncaptioned_preservation` below)
[COLOUR] = TAUGHT_COLOUR
WORDS = COLOUR, TAUGHT_SHAPE
CONFIG = TrainConfig(
    steps=1800,
    batch_size=16,
    lora=LoraConfig(rank=16),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=50, lr_scheduler="cosine", weight_decay=0.0),
    timesteps="logit-normal",
    logit_mean=0.5,
    caption_dropout=0.1,
    uncaptioned_preservation=0.25,  # at 1 guidance exaggerates new words, at 0 it does not affect them
    buckets=False,
    save_every=300,
    validation_every=100,
)


def write_clips(folder: Path, pipe: wanjax.Pipeline, seed: int) -> None:
    """Write the missing clips, and a table of their captions in which clips of old words are preserved.

    The model makes some clips of old words, because with the few drawn clips alone it would forget more.
    """
    rng = np.random.default_rng([seed, 16])
    new = [Spec(*WORDS, MOTIONS[i % len(MOTIONS)], BACKGROUNDS[i % len(BACKGROUNDS)]) for i in range(NEW_CLIPS)]
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, spec in enumerate([*new, *sample_specs(rng, OLD_CLIPS + GENERATED_CLIPS)]):
        text = caption(spec, rng)
        if not (file := folder / f"{number:03}.mp4").exists():
            if number < NEW_CLIPS + OLD_CLIPS:
                frames = np.round(127.5 * (draw([spec], FRAMES, SIZE, rng)[0] + 1.0)).astype(np.uint8)
            else:
                frames = np.asarray(pipe(text, seed=number, steps=10).frames)
            write_video(file, frames, FPS, {"prompt": text})
        is_new = number < NEW_CLIPS
        repeats = 3 if is_new else 1  # four in nine clips of an epoch are new
        rows.append({"file_name": file.name, "text": text, "preserve": not is_new, "repeats": repeats})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metadata.jsonl").write_text(lines, encoding="utf-8")


def make_and_check(
    pipe: wanjax.Pipeline, combinations: Sequence[tuple[str, str, str]], count: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Make `count` videos of the combinations in turn; return which aspects of each are right [B 3], and the videos."""
    palette, shapes = COLOURS | TAUGHT_COLOUR, (*SHAPES, TAUGHT_SHAPE)
    is_right, videos = [], []
    for index in range(count):
        colour, shape, motion = combinations[index % len(combinations)]
        prompt = plain_caption(colour, shape, motion)
        frames = np.asarray(pipe(prompt, seed=1000 + index, guidance_scale=GUIDANCE).frames)
        reading = read(frames, palette, shapes)
        is_right.append((reading.colour == colour, reading.shape == shape, reading.motion == motion))
        videos.append(frames)
    return np.array(is_right), videos


def fractions(is_right: np.ndarray) -> dict[str, float]:
    """Return the fractions of videos with the right colour, shape, motion, and all three."""
    colour, shape, motion = is_right.mean(axis=0)
    return {"colour": colour, "shape": shape, "motion": motion, "all": is_right.all(axis=1).mean()}


def sheet(videos: Sequence[np.ndarray], columns: int = 9) -> Image.Image:
    """Draw a row of frames for each video."""
    rows = [v[np.linspace(0, len(v) - 1, columns).round().astype(int)] for v in videos]
    return Image.fromarray(np.concatenate([np.concatenate(list(row), axis=1) for row in rows], axis=0))


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default="taught", help="Folder of the clips and the training.")
@click.option("--seed", default=0, show_default=True)
@click.option("--old", "old_videos", default=44, show_default=True, help="Number of videos of old combinations.")
def main(out: Path, seed: int, old_videos: int) -> None:
    """Train a LoRA on new words, and count the right videos with and without it."""
    start_time = time.monotonic()
    pipe = wanjax.load("nano")
    write_clips(out / "clips", pipe, seed)
    note = lambda text: click.echo(text)  # noqa: E731
    file = Training(pipe, out / "clips", out, CONFIG, note=note).run()
    seconds = time.monotonic() - start_time
    click.echo(f"{file} in {seconds / 60:.1f} minutes")
    taught_pipe = wanjax.load("nano", lora=str(file), note=note)
    combinations = [(*WORDS, motion) for motion in MOTIONS]
    new, videos = make_and_check(taught_pipe, combinations, 40)
    new_before, _ = make_and_check(pipe, combinations, len(MOTIONS))
    old_before, old_after = (make_and_check(model, HELD_OUT, old_videos)[0] for model in (pipe, taught_pipe))
    figures = {"minutes": seconds / 60, "new": fractions(new), "new before": fractions(new_before)}
    figures |= {"old before": fractions(old_before), "old": fractions(old_after)}
    figures["old still"] = old_after[old_before.all(axis=1)].all(axis=1).mean()  # of the videos that were right before
    sheet(videos[: len(MOTIONS)]).save(out / "taught.png")
    (out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    click.echo(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
