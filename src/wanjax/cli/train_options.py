# SPDX-License-Identifier: Apache-2.0
"""The options of the command `train`."""

from functools import partial
from pathlib import Path

import click

from wanjax.cli import options
from wanjax.cli.options import Decorator, together
from wanjax.pipelines.settings import RESIZES

out = click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="FOLDER",
    help="Checkpoints, metrics, samples and the result; the same command goes on from what is there.",
)
number = partial(options.number, show_default=True)
real = partial(click.option, type=float, metavar="X", show_default=True)
optimizer_name = partial(
    click.option, "--optimizer", type=click.Choice(["adamw", "adafactor", "muon"]), default="adamw", show_default=True
)
steps = together(
    number("--steps", default=1000, help="Steps of training."),
    number("--batch-size", default=1, help="Clips in a step."),
    number(
        "--grad-accum-steps",
        default=1,
        help="Parts in which a step's clips are computed one after another, for less memory.",
    ),
    click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Seed of all that is random."),
)
lora = together(
    number("--lora-rank", "rank", default=32, help="Rank of the LoRA."),
    real("--lora-alpha", "alpha", help="Alpha of the LoRA.  [default: the rank]"),
    real("--lora-dropout", "dropout", default=0.0, help="Dropout in the LoRA."),
    click.option(
        "--lora-target",
        "targets",
        multiple=True,
        metavar="NAME",
        help="A layer to adapt by the end of its name in diffusers, such as to_q; may be given more than once.  "
        "[default: all projections of the blocks]",
    ),
    click.option("--full", is_flag=True, help="Train all weights in place of a LoRA."),
    click.option(
        "--lora-format",
        type=click.Choice(["diffusers", "comfy"]),
        default="diffusers",
        show_default=True,
        help="Names in the LoRA file: those of diffusers, or the authors' as ComfyUI reads them.",
    ),
    click.option(
        "--expert",
        type=click.Choice(["both", "high", "low"]),
        default="both",
        show_default=True,
        help="Of two experts, the ones to train, each at its own noise levels.",
    ),
)
optimizer = together(
    optimizer_name(help="The optimiser."),
    real("--learning-rate", default=1e-4, help="Peak learning rate."),
    click.option(
        "--warmup-steps", type=int, default=0, show_default=True, metavar="N", help="Steps of rising learning rate."
    ),
    click.option(
        "--lr-scheduler",
        type=click.Choice(["constant", "cosine", "linear"]),
        default="constant",
        show_default=True,
        help="The learning rate after the warm-up.",
    ),
    real("--max-grad-norm", default=1.0, help="Norm to which gradients are clipped; 0 does not clip."),
    real("--weight-decay", default=0.01, help="Part of the weights that a step takes off, times the learning rate."),
    real("--ema-decay", help="Decay of a moving average of the weights, which is then the result."),
)
clips = together(
    number("--fps", help="Frames a second of the clips.  [default: the model's]"),
    click.option(
        "--cut",
        type=click.Choice(["head", "uniform", "windows"]),
        default="head",
        show_default=True,
        help="The frames of a long file: its first, frames from all of it, or all of it in pieces.",
    ),
    click.option("--resize", type=click.Choice(RESIZES), default="crop", show_default=True),
    click.option(
        "--buckets/--one-size",
        default=True,
        show_default=True,
        help="Keep the proportions of clips, in a few sizes of the same area, or make them all of one size.",
    ),
    number("--min-frames", help="Frames of the shortest clips.  [default: any]"),
    click.option(
        "--latent-cache",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="FOLDER",
        help="Where encoded clips and captions are kept.  [default: .wanjax beside the data]",
    ),
)
noise = together(
    click.option(
        "--timesteps",
        type=click.Choice(["uniform", "logit-normal", "shift"]),
        help="The noise levels: uniform, around the middle, or by the model's flow shift.  [default: shift, if any]",
    ),
    real("--shift", help="The shift of the noise levels.  [default: the model's]"),
    real("--logit-mean", default=0.0, help="Mean of the logit-normal noise levels."),
    real("--logit-std", default=1.0, help="Their standard deviation."),
    real(
        "--caption-dropout",
        default=0.05,
        help="The share of clips that are shown without a caption, for guidance.",
    ),
    real(
        "--uncaptioned-preservation",
        default=1.0,
        help="With clips to preserve: how far what is shown without a caption is preserved too, from 0 to 1.",
    ),
)
looks = together(
    click.option(
        "--sample-prompt",
        "sample_prompts",
        multiple=True,
        metavar="PROMPT",
        help="Make a video of PROMPT at the first step and along the way; may be given more than once.",
    ),
    number("--sample-every", default=250, help="Steps between samples."),
    click.option(
        "--holdout-every",
        type=int,
        default=0,
        show_default=True,
        metavar="N",
        help="Hold out one clip in N for the validation loss; 0 holds out none.",
    ),
    number("--validation-every", default=250, help="Steps between validation losses."),
    number("--save-every", default=250, help="Steps between checkpoints."),
)
train: Decorator = together(out, steps, lora, optimizer, clips, noise, looks)
priced = together(
    click.option("--train", "train", is_flag=True, help="Price a step of training; of a LoRA, unless with --full."),
    number("--lora-rank", default=32, help="With --train: the rank."),
    click.option("--full", is_flag=True, help="With --train: train all weights."),
    number("--batch-size", default=1, help="With --train: clips in a step."),
    optimizer_name(help="With --train: the optimiser."),
)
