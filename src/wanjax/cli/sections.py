# SPDX-License-Identifier: Apache-2.0
"""The help of a command, with its options in sections. `--help` shows the common options, and `--help-all` all
options."""

import inspect
import re

import click

from wanjax.media.inputs import INPUT_SPECS

SECTIONS = {
    "Model and video": (
        "model size frames seed count requests from",
        "models inputs print-command "
        "deadline price start-time download-rate compile-time prompts seeds rng windows then overlap match "
        "extend-prompt extend-model negative-prompt clip-prompt height width fps prompt allow-empty-prompt with-prompt",
    ),
    "Inputs": (
        "image last-image video",
        "face background mask reference strength resize outpaint max-picture noise",
    ),
    "What to train": (
        "full lora-rank sample-prompt",
        "lora-alpha lora-dropout lora-target lora-format expert ema-decay",
    ),
    "Training data": (
        "buckets holdout-every",
        "cut min-frames latent-cache caption-dropout uncaptioned-preservation",
    ),
    "Quality": (
        "steps guidance-scale lora",
        "guidance-scale-2 boundary boundary-step dynamic-guidance guidance-rule flow-shift follow sigmas scheduler "
        "timesteps shift logit-mean logit-std",
    ),
    "Optimisation": (
        "batch-size learning-rate warmup-steps",
        "grad-accum-steps optimizer lr-scheduler max-grad-norm weight-decay",
    ),
    "Speed": (
        "cache dtype precision",
        "vae-dtype attention block-q block-kv block-kv-compute window batch-guidance compiler quick keep timings",
    ),
    "Devices and servers": (
        "at chip mesh workers database ray host port token",
        "origin hosts resources retries dashboard rules processes "
        "compile-cache trust-compile-cache offload no-offload tile decoder rehearse",
    ),
    "Limits": ("max-queue", "max-pixels max-steps max-upload"),
    "Output": (
        "out dir to train preview quiet",
        "force preview-decoder sample-every validation-every save-every profile stats fit programs json verbose verify "
        "revision",
    ),
    "More": ("config help help-all", ""),
}
"""For each section, the options of all commands: first the common options, then the other options."""
INPUTS_SECTION = "Inputs"
MAX_SHORT_HELP_LINES = 50  # lines; a longer help is shortened
OPTION_COLUMN = 24  # columns for the name of an option before its help
SHOW_ALL, SHOW_SHORT = "wanjax.whole", "wanjax.short"  # keys of the `meta` of a command's context


class Command(click.Command):
    """A command that shows its options in sections."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), HELP_ALL]

    def get_help(self, ctx: click.Context) -> str:
        """Format the help. If the help is too long for a terminal, show only the common options."""
        full_help = super().get_help(ctx)
        if SHOW_ALL in ctx.meta or full_help.count("\n") < MAX_SHORT_HELP_LINES:
            return full_help
        ctx.meta[SHOW_SHORT] = True
        return super().get_help(ctx)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        text, _, details = inspect.cleandoc(self.help or "").partition("\n\n")
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(text if SHOW_SHORT in ctx.meta else f"{text}\n\n{details}")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        short = SHOW_SHORT in ctx.meta
        params = [parameter for parameter in self.get_params(ctx) if short or parameter is not HELP_ALL]
        records = {name: parameter.get_help_record(ctx) for parameter in params for name in parameter.opts}
        for title, (common_options, rare_options) in SECTIONS.items():
            names = common_options.split() if short else [*common_options.split(), *rare_options.split()]
            if title == INPUTS_SECTION and not short:  # options of families that were registered in this process
                names += [name for spec in INPUT_SPECS.values() if (name := spec.option[2:]) not in names]
            rows = [record for name in names if (record := records.get(f"--{name}"))]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(
                        [
                            (option_text.ljust(OPTION_COLUMN), _first_clause(description) if short else description)
                            for option_text, description in rows
                        ],
                        OPTION_COLUMN,
                    )


def _first_clause(text: str) -> str:
    """Shorten an option's help to its first clause. Keep the default if it is one word."""
    text, _, default = text.partition("  [default: ")
    clause = re.split(r"[;.:] ", text)[0].removesuffix(".")
    return f"{clause}.  [default: {default}" if default and " " not in default else f"{clause}."


def _show_all(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[SHOW_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


HELP_ALL = click.Option(
    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all, help="Show all options."
)
