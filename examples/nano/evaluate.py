# SPDX-License-Identifier: Apache-2.0
"""Evaluate the bundled model on every combination that training never saw.

The script prints the fraction of videos with the right colour, motion and shape, each failure, and the PSNR of unseen
clips after the autoencoder. A reading of None counts as wrong. With `--pictures`, the model receives the first frame of
an unseen clip and a prompt that names only the motion.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from captions import plain_caption, plain_motion
from clips import BACKGROUNDS, HELD_OUT, Spec, draw, sample_specs
from jaxtyping import Float, UInt8
from PIL import Image
from reading import Reading, read

TARGETS = {"colour": 0.97, "motion": 0.95, "shape": 0.90}
PSNR_TARGET = 32.0  # dB
PICTURE_TARGETS = {"motion": 0.90}
FIRST_FRAME_TARGET = 25.0  # dB
SIZE, FRAMES = 64, 17

Frames = UInt8[np.ndarray, "T H W 3"]
Frame = UInt8[np.ndarray, "H W 3"]
Clips = Float[np.ndarray, "B T H W 3"]


@dataclass(frozen=True)
class Outcome:
    """One generated video: its prompt, the expected names, and the reading."""

    prompt: str
    seed: int
    expected: dict[str, str]
    reading: Reading
    frames: Frames

    def is_right(self, aspect: str) -> bool:
        """Return True if `aspect` (colour, motion or shape) is as expected."""
        return getattr(self.reading, aspect) == self.expected[aspect]

    def __str__(self) -> str:
        wrong = ", ".join(
            f"{aspect} {getattr(self.reading, aspect)}" for aspect in TARGETS if not self.is_right(aspect)
        )
        return f"{self.prompt}, seed {self.seed}: {wrong or 'right'}"


def evaluate(
    generate: Callable[[str, int], Frames],
    combinations: Iterable[tuple[str, str, str]],
    seeds: int,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Generate each (colour, shape, motion) with seeds from 0 and read it; `on_outcome` is called with each outcome."""
    outcomes = []
    for colour, shape, motion in combinations:
        prompt = plain_caption(colour, shape, motion)
        for seed in range(seeds):
            frames = generate(prompt, seed)
            expected = {"colour": colour, "shape": shape, "motion": motion}
            outcomes.append(Outcome(prompt, seed, expected, read(frames), frames))
            on_outcome(outcomes[-1])
    return outcomes


def evaluate_pictures(
    generate: Callable[[str, Frame, int], Frames],
    combinations: Iterable[tuple[str, str, str]],
    seeds: int,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> tuple[list[Outcome], list[float]]:
    """Evaluate with the first frames of drawn clips as inputs; also return the PSNR of the first frames, in dB."""
    outcomes, psnr = [], []
    for number, (colour, shape, motion) in enumerate(combinations):
        for seed in range(seeds):
            rng = np.random.default_rng([2026, number, seed])
            clip = draw([Spec(colour, shape, motion, BACKGROUNDS[rng.integers(len(BACKGROUNDS))])], FRAMES, SIZE, rng)
            picture = np.round(127.5 * (clip[0, 0] + 1.0)).astype(np.uint8)
            frames = generate(plain_motion(motion), picture, seed)
            expected = {"colour": colour, "shape": shape, "motion": motion}
            outcomes.append(Outcome(f"{colour} {shape}: {plain_motion(motion)}", seed, expected, read(frames), frames))
            psnr.append(10.0 * np.log10(255.0**2 / np.mean((frames[0].astype(np.float64) - picture) ** 2)))
            on_outcome(outcomes[-1])
    return outcomes, psnr


def accuracies(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the fraction of outcomes with the right colour, motion and shape."""
    return {aspect: sum(outcome.is_right(aspect) for outcome in outcomes) / len(outcomes) for aspect in TARGETS}


def reconstruction_psnr(
    encode: Callable[[Clips], Clips],
    decode: Callable[[Clips], Clips],
    clips: int = 64,
    batch: int = 8,
    seed: int = 2026,
) -> float:
    """Return the peak signal-to-noise ratio in dB of clips of held-out combinations after the autoencoder.

    `encode` maps videos [B T H W 3] in [-1, 1] to latents, `decode` maps them back.
    """
    rng = np.random.default_rng(seed)
    squared = []
    for _ in range(0, clips, batch):
        video = draw(sample_specs(rng, batch, held_out=True), FRAMES, SIZE, rng)
        squared.append(np.mean((np.asarray(decode(encode(video)), np.float64) - video) ** 2))
    return float(10.0 * np.log10(4.0 / np.mean(squared)))


def contact_sheet(outcomes: Sequence[Outcome], columns: int = 9) -> Image.Image:
    """Draw one row per prompt: `columns` frames of its first video, from first to last, two pixels apart."""
    rows = []
    for outcome in outcomes:
        if outcome.seed == 0:
            frames = outcome.frames[np.linspace(0, len(outcome.frames) - 1, columns).round().astype(int)]
            rows.append(np.concatenate(np.pad(frames, ((0, 0), (1, 1), (1, 1), (0, 0))), axis=1))
    return Image.fromarray(np.concatenate(rows, axis=0))


def report(outcomes: Sequence[Outcome], psnr: float) -> dict:
    """Return all figures and failures as JSON values."""
    return {
        "videos": len(outcomes),
        "accuracy": accuracies(outcomes),
        "psnr": psnr,
        "failures": [
            {"prompt": outcome.prompt, "seed": outcome.seed, "reading": dataclasses.asdict(outcome.reading)}
            for outcome in outcomes
            if not all(outcome.is_right(aspect) for aspect in TARGETS)
        ],
    }


def table(figures: dict) -> str:
    """Format the figures of a report with their targets."""
    lines = [
        f"{aspect:<8} {100 * figures['accuracy'][aspect]:6.1f} %   target {100 * target:.0f} %"
        for aspect, target in TARGETS.items()
    ]
    return "\n".join([*lines, f"{'VAE':<8} {figures['psnr']:6.1f} dB  target {PSNR_TARGET:.0f} dB"])


def picture_table(outcomes: Sequence[Outcome], psnr: Sequence[float]) -> str:
    """Format the figures of the videos that were made from pictures, with their targets."""
    targets = {aspect: f"   target {100 * target:.0f} %" for aspect, target in PICTURE_TARGETS.items()}
    lines = [
        f"{aspect:<8} {100 * is_right:6.1f} %{targets.get(aspect, '')}"
        for aspect, is_right in accuracies(outcomes).items()
    ]
    first = (
        f"{'first frame':<8} {np.mean(psnr):.1f} dB, the worst {min(psnr):.1f} dB  target {FIRST_FRAME_TARGET:.0f} dB"
    )
    return "\n".join([*lines, first])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano", help="a name or a folder (default: nano)")
    parser.add_argument("--seeds", type=int, default=4, help="videos per prompt (default: 4)")
    parser.add_argument("--pictures", action="store_true", help="use the first frame and a prompt of only the motion")
    parser.add_argument("--limit", type=int, help="evaluate only the first LIMIT combinations")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and the failures there")
    parser.add_argument("--sheet", type=Path, metavar="FILE.png", help="write a picture of the videos there")
    options = parser.parse_args(arguments)

    import jax.numpy as jnp
    from flax import nnx  # imported late: --help and the functions above need no model

    import wanjax

    pipe = wanjax.load(options.model)

    def generate(prompt: str, seed: int, **inputs: Any) -> Frames:
        return np.asarray(pipe(prompt, seed=seed, **inputs).frames)

    def on_outcome(outcome: Outcome) -> None:
        print(outcome, flush=True)

    combinations = HELD_OUT[: options.limit]
    if options.pictures:
        outcomes, psnr = evaluate_pictures(
            lambda prompt, picture, seed: generate(prompt, seed, image=picture), combinations, options.seeds, on_outcome
        )
        print(picture_table(outcomes, psnr))
    else:
        outcomes = evaluate(generate, combinations, options.seeds, on_outcome)
        encode = nnx.jit(lambda vae, x: vae.encode_chunk(x, None)[0])  # a cell of this model is a pixel
        decode = nnx.jit(lambda vae, z: jnp.clip(vae.decode_chunk(z, None)[0], -1, 1))
        psnr = [
            reconstruction_psnr(lambda x: np.asarray(encode(pipe.vae, x)), lambda z: np.asarray(decode(pipe.vae, z)))
        ]
        print(table(report(outcomes, psnr[0])))
    if options.json:
        figures = report(outcomes, float(np.mean(psnr)))
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if options.sheet:
        contact_sheet(outcomes).save(options.sheet)


if __name__ == "__main__":
    main()
