# SPDX-License-Identifier: Apache-2.0
"""The options of the command `train`."""

from pathlib import Path

import click

from wanjax.cli.options import Decorator, together

out = click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="FOLDER",
    help="Checkpoints, metrics, samples and the result; the same command goes on from what is there.",
)
number = click.IntRange(min=1)
steps = together(
    click.option("--steps", type=number, default=1000, show_default=True, metavar="N", help="Steps of training."),
    click.option("--batch", type=number, default=1, show_default=True, metavar="N", help="Clips in a step."),
    click.option(
        "--accumulate",
        "accumulated",
        type=number,
        default=1,
        show_default=True,
        metavar="N",
        help="Parts in which a step's clips are computed one after another, for less memory.",
    ),
    click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Seed of all that is random."),
)
lora = together(
    click.option("--rank", type=number, default=32, show_default=True, metavar="N", help="Rank of the LoRA."),
    click.option("--alpha", type=float, metavar="X", help="Alpha of the LoRA.  [default: the rank]"),
    click.option("--dropout", type=float, default=0.0, show_default=True, metavar="X", help="Dropout in the LoRA."),
    click.option(
        "--target",
        "targets",
        multiple=True,
        metavar="NAME",
        help="A layer to adapt by the end of its name in diffusers, such as to_q; may be given more than once.  "
        "[default: all projections of the blocks]",
    ),
    click.option("--full", is_flag=True, help="Train all weights in place of a LoRA."),
    click.option(
        "--dialect",
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
    click.option("--optimizer", type=click.Choice(["adamw", "adafactor", "muon"]), default="adamw", show_default=True),
    click.option("--rate", type=float, default=1e-4, show_default=True, metavar="X", help="Peak learning rate."),
    click.option("--warm-up", type=int, default=0, show_default=True, metavar="N", help="Steps of rising rate."),
    click.option(
        "--schedule",
        type=click.Choice(["constant", "cosine", "linear"]),
        default="constant",
        show_default=True,
        help="The rate after the warm-up.",
    ),
    click.option(
        "--clip", type=float, default=1.0, show_default=True, metavar="X", help="Largest norm of a gradient; 0 is any."
    ),
    click.option("--weight-decay", type=float, default=0.01, show_default=True, metavar="X"),
    click.option(
        "--average", type=float, metavar="X", help="Decay of a mean of the weights, which is then the result."
    ),
)
clips = together(
    click.option("--fps", type=number, metavar="N", help="Frames a second of the clips.  [default: the model's]"),
    click.option(
        "--cut",
        type=click.Choice(["head", "uniform", "windows"]),
        default="head",
        show_default=True,
        help="The frames of a long file: its first, frames from all of it, or all of it in pieces.",
    ),
    click.option("--resize", type=click.Choice(["crop", "pad", "stretch"]), default="crop", show_default=True),
    click.option(
        "--buckets/--one-size",
        default=True,
        show_default=True,
        help="Keep the proportions of clips, in a few sizes of the same area, or make them all of one size.",
    ),
    click.option("--shortest", type=number, metavar="N", help="Frames of the shortest clips.  [default: any]"),
    click.option(
        "--store",
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
    click.option("--shift", type=float, metavar="X", help="The shift of the noise levels.  [default: the model's]"),
    click.option("--logit-mean", type=float, default=0.0, show_default=True, metavar="X"),
    click.option("--logit-deviation", type=float, default=1.0, show_default=True, metavar="X"),
    click.option(
        "--dropped-captions",
        type=float,
        default=0.05,
        show_default=True,
        metavar="X",
        help="The share of clips that are shown without a caption, for guidance.",
    ),
)
looks = together(
    click.option(
        "--sample",
        "samples",
        multiple=True,
        metavar="PROMPT",
        help="Make a video of PROMPT at the first step and along the way; may be given more than once.",
    ),
    click.option("--sample-every", type=number, default=250, show_default=True, metavar="N"),
    click.option(
        "--held-out", type=int, default=0, show_default=True, metavar="N", help="Keep one clip in N for a loss."
    ),
    click.option("--evaluate-every", type=number, default=250, show_default=True, metavar="N"),
    click.option("--save-every", type=number, default=250, show_default=True, metavar="N", help="Keep a checkpoint."),
)
train: Decorator = together(out, steps, lora, optimizer, clips, noise, looks)
priced = together(
    click.option("--train", "train", is_flag=True, help="Price a step of training, of a LoRA unless with --full."),
    click.option(
        "--lora-rank", type=number, default=32, show_default=True, metavar="N", help="With --train: the rank."
    ),
    click.option("--full", is_flag=True, help="With --train: train all weights."),
    click.option(
        "--batch", type=number, default=1, show_default=True, metavar="N", help="With --train: clips in a step."
    ),
    click.option(
        "--optimizer",
        type=click.Choice(["adamw", "adafactor", "muon"]),
        default="adamw",
        show_default=True,
        help="With --train: the optimiser.",
    ),
)
