# SPDX-License-Identifier: Apache-2.0
"""Teaches the model in the box a shape and a colour that it has never seen: `python examples/nano/teach.py`.

Draws 64 clips, 40 of a magenta bar and 24 of what the model knows, and lets the model make more of what it knows;
trains a LoRA of rank 16 on them as `wanjax train` does; then asks for 40 magenta bars and for the held-out combinations
of old words, and reads the videos. The new words are not in the model's vocabulary: its tokenizer spells them. Both
were chosen among what its autoencoder, which stays as it is, can draw.
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

TAUGHT, KEPT = 40, 24  # clips of the new words, and of old ones, which are shown so that they are not forgotten
REMEMBERED = 128  # clips of old words that the model makes itself
SIZE, FRAMES, FPS = 64, 17, 8
GUIDANCE = 2.5  # which acts on what is new as 1 + 0.25 · 1.5 does (`uncaptioned_preservation` below)
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
    uncaptioned_preservation=0.25,  # at 1 guidance exaggerates what is new, at 0 it does nothing for it
    buckets=False,
    save_every=300,
    validation_every=100,
)


def write_clips(folder: Path, pipe: wanjax.Pipeline, seed: int) -> None:
    """Write the clips that are not there, and a table of their captions, in which those of old words are preserved.

    To the drawn clips come some that the model itself makes: so it forgets less than from the few drawn ones alone.
    """
    rng = np.random.default_rng([seed, 16])
    new = [Spec(*WORDS, MOTIONS[i % len(MOTIONS)], BACKGROUNDS[i % len(BACKGROUNDS)]) for i in range(TAUGHT)]
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, spec in enumerate([*new, *sample_specs(rng, KEPT + REMEMBERED)]):
        text = caption(spec, rng)
        if not (file := folder / f"{number:03}.mp4").exists():
            if number < TAUGHT + KEPT:
                frames = np.round(127.5 * (draw([spec], FRAMES, SIZE, rng)[0] + 1.0)).astype(np.uint8)
            else:
                frames = np.asarray(pipe(text, seed=number, steps=10).frames)
            write_video(file, frames, FPS, {"prompt": text})
        is_new = number < TAUGHT
        repeats = 3 if is_new else 1  # of an epoch four in nine are new
        rows.append({"file_name": file.name, "text": text, "preserve": not is_new, "repeats": repeats})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metadata.jsonl").write_text(lines, encoding="utf-8")


def right(
    pipe: wanjax.Pipeline, combinations: Sequence[tuple[str, str, str]], count: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Make `count` videos of the combinations in turn; return what is read right of each [B 3], and the videos."""
    palette, shapes = COLOURS | TAUGHT_COLOUR, (*SHAPES, TAUGHT_SHAPE)
    found, videos = [], []
    for index in range(count):
        colour, shape, motion = combinations[index % len(combinations)]
        prompt = plain_caption(colour, shape, motion)
        frames = np.asarray(pipe(prompt, seed=1000 + index, guidance_scale=GUIDANCE).frames)
        reading = read(frames, palette, shapes)
        found.append((reading.colour == colour, reading.shape == shape, reading.motion == motion))
        videos.append(frames)
    return np.array(found), videos


def fractions(found: np.ndarray) -> dict[str, float]:
    """Return the fractions of videos of which colour, shape, motion and all three are read right."""
    colour, shape, motion = found.mean(axis=0)
    return {"colour": colour, "shape": shape, "motion": motion, "all": found.all(axis=1).mean()}


def sheet(videos: Sequence[np.ndarray], columns: int = 9) -> Image.Image:
    """Draw a row of frames for each video."""
    rows = [v[np.linspace(0, len(v) - 1, columns).round().astype(int)] for v in videos]
    return Image.fromarray(np.concatenate([np.concatenate(list(row), axis=1) for row in rows], axis=0))


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default="taught", help="The folder of clips and training.")
@click.option("--seed", default=0, show_default=True)
@click.option("--old", default=44, show_default=True, help="Videos of old combinations to read.")
def main(out: Path, seed: int, old: int) -> None:
    """Teaches, then counts what is read right, with and without the LoRA."""
    begun = time.monotonic()
    pipe = wanjax.load("nano")
    write_clips(out / "clips", pipe, seed)
    note = lambda text: click.echo(text)  # noqa: E731
    file = Training(pipe, out / "clips", out, CONFIG, note=note).run()
    seconds = time.monotonic() - begun
    click.echo(f"{file} in {seconds / 60:.1f} minutes")
    learnt = wanjax.load("nano", lora=str(file), note=note)
    combinations = [(*WORDS, motion) for motion in MOTIONS]
    new, videos = right(learnt, combinations, 40)
    new_before, _ = right(pipe, combinations, len(MOTIONS))
    old_before, old_after = (right(each, HELD_OUT, old)[0] for each in (pipe, learnt))
    found = {"minutes": seconds / 60, "new": fractions(new), "new before": fractions(new_before)}
    found |= {"old before": fractions(old_before), "old": fractions(old_after)}
    found["old still"] = old_after[old_before.all(axis=1)].all(axis=1).mean()  # of the videos that were right before
    sheet(videos[: len(MOTIONS)]).save(out / "taught.png")
    (out / "figures.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    click.echo(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
