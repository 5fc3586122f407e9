# SPDX-License-Identifier: Apache-2.0
"""Asks the model in the box for every combination that training never saw, and reads what it made.

Prints, for colour, motion and shape, the part of the videos in which it is right, each failure, and how well the video
autoencoder gives unseen clips back. A reading of None counts as wrong. With `--pictures` it is given the first frame of
an unseen clip and told only what is to happen.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from captions import plain_caption, plain_deed
from clips import BACKGROUNDS, HELD_OUT, Spec, draw, sample_specs
from jaxtyping import Float, UInt8
from PIL import Image
from reading import Reading, read

BARS = {"colour": 0.97, "motion": 0.95, "shape": 0.90}
PSNR_BAR = 32.0  # dB
PICTURE_BARS = {"motion": 0.90}
FIRST_FRAME_BAR = 25.0  # dB
SIZE, FRAMES = 64, 17

Frames = UInt8[np.ndarray, "T H W 3"]
Frame = UInt8[np.ndarray, "H W 3"]
Clips = Float[np.ndarray, "B T H W 3"]


@dataclass(frozen=True)
class Outcome:
    """A video that was asked for, and what is seen in it."""

    prompt: str
    seed: int
    asked: dict[str, str]
    reading: Reading
    frames: Frames

    def right(self, part: str) -> bool:
        """Whether `part` (colour, motion or shape) is as the prompt has it."""
        return getattr(self.reading, part) == self.asked[part]

    def __str__(self) -> str:
        wrong = ", ".join(f"{part} {getattr(self.reading, part)}" for part in BARS if not self.right(part))
        return f"{self.prompt}, seed {self.seed}: {wrong or 'right'}"


def evaluate(
    generate: Callable[[str, int], Frames],
    combinations: Iterable[tuple[str, str, str]],
    seeds: int,
    tell: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Generates each (colour, shape, motion) with the seeds 0, 1, ... and reads it; `tell` is given each outcome."""
    outcomes = []
    for colour, shape, motion in combinations:
        prompt = plain_caption(colour, shape, motion)
        for seed in range(seeds):
            frames = generate(prompt, seed)
            asked = {"colour": colour, "shape": shape, "motion": motion}
            outcomes.append(Outcome(prompt, seed, asked, read(frames), frames))
            tell(outcomes[-1])
    return outcomes


def evaluate_pictures(
    generate: Callable[[str, Frame, int], Frames],
    combinations: Iterable[tuple[str, str, str]],
    seeds: int,
    tell: Callable[[Outcome], None] = lambda outcome: None,
) -> tuple[list[Outcome], list[float]]:
    """The same from the first frame of a drawn clip of each; also the first frames' PSNR against it, in dB."""
    outcomes, psnr = [], []
    for number, (colour, shape, motion) in enumerate(combinations):
        for seed in range(seeds):
            rng = np.random.default_rng([2026, number, seed])
            clip = draw([Spec(colour, shape, motion, BACKGROUNDS[rng.integers(len(BACKGROUNDS))])], FRAMES, SIZE, rng)
            picture = np.round(127.5 * (clip[0, 0] + 1.0)).astype(np.uint8)
            frames = generate(plain_deed(motion), picture, seed)
            asked = {"colour": colour, "shape": shape, "motion": motion}
            outcomes.append(Outcome(f"{colour} {shape}: {plain_deed(motion)}", seed, asked, read(frames), frames))
            psnr.append(10.0 * np.log10(255.0**2 / np.mean((frames[0].astype(np.float64) - picture) ** 2)))
            tell(outcomes[-1])
    return outcomes, psnr


def accuracies(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The part of the outcomes that is right, for colour, motion and shape."""
    return {part: sum(outcome.right(part) for outcome in outcomes) / len(outcomes) for part in BARS}


def reconstruction_psnr(
    encode: Callable[[Clips], Clips],
    decode: Callable[[Clips], Clips],
    clips: int = 64,
    batch: int = 8,
    seed: int = 2026,
) -> float:
    """Peak signal-to-noise ratio in dB over all pixels of clips, of held-out combinations, put through the autoencoder.

    `encode` takes videos [B T H W 3] in [-1, 1] to latents, `decode` takes these back.
    """
    rng = np.random.default_rng(seed)
    squared = []
    for _ in range(0, clips, batch):
        video = draw(sample_specs(rng, batch, held_out=True), FRAMES, SIZE, rng)
        squared.append(np.mean((np.asarray(decode(encode(video)), np.float64) - video) ** 2))
    return float(10.0 * np.log10(4.0 / np.mean(squared)))


def contact_sheet(outcomes: Sequence[Outcome], columns: int = 9) -> Image.Image:
    """The first video of each prompt, a row each, `columns` frames of it from first to last, two pixels apart."""
    rows = []
    for outcome in outcomes:
        if outcome.seed == 0:
            frames = outcome.frames[np.linspace(0, len(outcome.frames) - 1, columns).round().astype(int)]
            rows.append(np.concatenate(np.pad(frames, ((0, 0), (1, 1), (1, 1), (0, 0))), axis=1))
    return Image.fromarray(np.concatenate(rows, axis=0))


def report(outcomes: Sequence[Outcome], psnr: float) -> dict:
    """Everything that was found, for a file."""
    return {
        "videos": len(outcomes),
        "accuracy": accuracies(outcomes),
        "psnr": psnr,
        "failures": [
            {"prompt": outcome.prompt, "seed": outcome.seed, "reading": dataclasses.asdict(outcome.reading)}
            for outcome in outcomes
            if not all(outcome.right(part) for part in BARS)
        ],
    }


def table(found: dict) -> str:
    """The figures of a report beside their bars."""
    lines = [f"{part:<8} {100 * found['accuracy'][part]:6.1f} %   bar {100 * BARS[part]:.0f} %" for part in BARS]
    return "\n".join([*lines, f"{'VAE':<8} {found['psnr']:6.1f} dB  bar {PSNR_BAR:.0f} dB"])


def picture_table(outcomes: Sequence[Outcome], psnr: Sequence[float]) -> str:
    """The figures of the videos that were made from pictures."""
    lines = [
        f"{part:<8} {100 * right:6.1f} %" + (f"   bar {100 * PICTURE_BARS[part]:.0f} %" if part in PICTURE_BARS else "")
        for part, right in accuracies(outcomes).items()
    ]
    first = f"{'first frame':<8} {np.mean(psnr):.1f} dB, the worst {min(psnr):.1f} dB  bar {FIRST_FRAME_BAR:.0f} dB"
    return "\n".join([*lines, first])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano", help="a name or a folder (default: nano)")
    parser.add_argument("--seeds", type=int, default=4, help="videos for each prompt (default: 4)")
    parser.add_argument("--pictures", action="store_true", help="animate pictures in place of prompts alone")
    parser.add_argument("--limit", type=int, help="only the first so many combinations")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and the failures there")
    parser.add_argument("--sheet", type=Path, metavar="FILE.png", help="write a picture of the videos there")
    options = parser.parse_args(arguments)

    from flax import nnx  # here, so that --help and the functions above need no model

    import wanjax

    pipe = wanjax.load(options.model)

    def generate(prompt: str, seed: int, **given: Frame) -> Frames:
        return np.asarray(pipe(prompt, seed=seed, **given).frames)

    def tell(outcome: Outcome) -> None:
        print(outcome, flush=True)

    combinations = HELD_OUT[: options.limit]
    if options.pictures:
        outcomes, psnr = evaluate_pictures(
            lambda prompt, picture, seed: generate(prompt, seed, image=picture), combinations, options.seeds, tell
        )
        print(picture_table(outcomes, psnr))
    else:
        outcomes = evaluate(generate, combinations, options.seeds, tell)
        encode, decode = (nnx.jit(lambda vae, x: vae.encode(x)), nnx.jit(lambda vae, z: vae.decode(z)))
        psnr = [reconstruction_psnr(lambda x: encode(pipe.vae, x), lambda z: decode(pipe.vae, z))]
        print(table(report(outcomes, psnr[0])))
    if options.json:
        found = report(outcomes, float(np.mean(psnr)))
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if options.sheet:
        contact_sheet(outcomes).save(options.sheet)


if __name__ == "__main__":
    main()
