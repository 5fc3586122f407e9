# SPDX-License-Identifier: Apache-2.0
"""The options of the command `train`."""

from functools import partial
from pathlib import Path

import click

from wanjax.cli import options
from wanjax.cli.options import Decorator, combine_options
from wanjax.pipelines.settings import RESIZE_MODES

out = click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="FOLDER",
    help="Folder of checkpoints, metrics, samples and the result. The same command resumes the training in "
    "this folder.",
)
number_option = partial(options.number, show_default=True)
float_option = partial(click.option, type=float, metavar="X", show_default=True)
optimizer_name = partial(
    click.option,
    "--optimizer",
    type=click.Choice(["adamw", "adafactor", "muon"]),
    default="adamw",
    show_default=True,
)
steps = combine_options(
    number_option("--steps", default=1000, help="Training steps."),
    number_option("--batch-size", default=1, help="Clips in each step."),
    number_option(
        "--grad-accum-steps",
        default=1,
        help="Divide the clips of a step into N parts and compute one part after another, to save memory.",
    ),
    click.option(
        "--seed", type=int, default=0, show_default=True, metavar="N", help="Seed of the training's randomness."
    ),
)
lora = combine_options(
    number_option("--lora-rank", "rank", default=32, help="Rank of the LoRA."),
    float_option("--lora-alpha", "alpha", help="Alpha of the LoRA.  [default: the rank]"),
    float_option("--lora-dropout", "dropout", default=0.0, help="Dropout in the LoRA."),
    click.option(
        "--lora-target",
        "targets",
        multiple=True,
        metavar="NAME",
        help="Layers that the LoRA changes. Give the end of their names in diffusers, such as to_q; may be "
        "given more than once.  [default: all projections of the blocks]",
    ),
    click.option("--full", is_flag=True, help="Train all weights in place of a LoRA."),
    click.option(
        "--lora-format",
        type=click.Choice(["diffusers", "comfy"]),
        default="diffusers",
        show_default=True,
        help="Names of the layers in the LoRA file: diffusers' names, or the model authors' names, which "
        "ComfyUI reads.",
    ),
    click.option(
        "--expert",
        type=click.Choice(["both", "high", "low"]),
        default="both",
        show_default=True,
        help="For a model with two experts: train both, or only the expert for high or for low noise.",
    ),
)
optimizer = combine_options(
    optimizer_name(help="The optimiser."),
    float_option("--learning-rate", default=1e-4, help="Peak learning rate."),
    click.option(
        "--warmup-steps",
        type=int,
        default=0,
        show_default=True,
        metavar="N",
        help="Number of steps in which the learning rate rises to its full value.",
    ),
    click.option(
        "--lr-scheduler",
        type=click.Choice(["constant", "cosine", "linear"]),
        default="constant",
        show_default=True,
        help="The learning rate after the warm-up.",
    ),
    float_option("--max-grad-norm", default=1.0, help="Norm to which gradients are clipped; 0 does not clip."),
    float_option(
        "--weight-decay",
        default=0.01,
        help="Weight decay. A step subtracts the weights times this number times the learning rate.",
    ),
    float_option(
        "--ema-decay", help="Decay of an exponential moving average of the weights. The average becomes the result."
    ),
)
clips = combine_options(
    number_option("--fps", help="Frames a second of the clips.  [default: the model's]"),
    click.option(
        "--cut",
        type=click.Choice(["head", "uniform", "windows"]),
        default="head",
        show_default=True,
        help="Which frames of a long file to use: head uses the first frames, uniform uses evenly spaced frames, and "
        "windows cuts all frames into several clips.",
    ),
    click.option(
        "--resize",
        type=click.Choice(RESIZE_MODES),
        default="crop",
        show_default=True,
        help="How to fit clips to a size if their proportions differ.",
    ),
    click.option(
        "--buckets/--one-size",
        default=True,
        show_default=True,
        help="Keep the proportions of clips, in a few sizes of the same area, or give all clips one size.",
    ),
    number_option("--min-frames", help="Leave out clips with fewer frames than this.  [default: use all clips]"),
    click.option(
        "--latent-cache",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="FOLDER",
        help="Folder of encoded clips and captions.  [default: .wanjax next to the data]",
    ),
)
noise = combine_options(
    click.option(
        "--timesteps",
        type=click.Choice(["uniform", "logit-normal", "shift"]),
        help="Distribution of noise levels: uniform, logit-normal, or shift, which shifts uniform levels.  [default: "
        "shift, if the model has a flow shift]",
    ),
    float_option("--shift", help="The shift of the noise levels.  [default: the model's]"),
    float_option("--logit-mean", default=0.0, help="Mean of the logit-normal noise levels."),
    float_option("--logit-std", default=1.0, help="Standard deviation of the logit-normal noise levels."),
    float_option(
        "--caption-dropout",
        default=0.05,
        help="Fraction of clips that are trained without a caption. Classifier-free guidance needs such training.",
    ),
    float_option(
        "--uncaptioned-preservation",
        default=1.0,
        help="Weight of prior preservation, from 0 to 1, for clips that are trained without a caption. The option has "
        "an effect only if DATA has clips for prior preservation.",
    ),
)
monitoring = combine_options(
    click.option(
        "--sample-prompt",
        "sample_prompts",
        multiple=True,
        metavar="PROMPT",
        help="Make a sample video from PROMPT at the first step, and then at intervals; may be given more than once.",
    ),
    number_option("--sample-every", default=250, help="Steps between samples."),
    click.option(
        "--holdout-every",
        type=int,
        default=0,
        show_default=True,
        metavar="N",
        help="Hold out one clip in N for the validation loss. With 0, no clip is held out.",
    ),
    number_option("--validation-every", default=250, help="Steps between validation losses."),
    number_option("--save-every", default=250, help="Steps between checkpoints."),
)
train: Decorator = combine_options(out, steps, lora, optimizer, clips, noise, monitoring)
priced_training_options = combine_options(
    click.option(
        "--train",
        "train",
        is_flag=True,
        help="Price a step of training: of a LoRA, or with --full of all weights.",
    ),
    number_option("--lora-rank", default=32, help="Rank of the LoRA, with --train."),
    click.option("--full", is_flag=True, help="Train all weights, with --train."),
    number_option("--batch-size", default=1, help="Clips in a step, with --train."),
    optimizer_name(help="Optimiser, with --train."),
)
