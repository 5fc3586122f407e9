# SPDX-License-Identifier: Apache-2.0
"""The help of a command: its options in sections. `--help` shows those in daily use, and `--help-all` all of them."""

import inspect
import re

import click

from wanjax.media.inputs import INPUTS

SECTIONS = {
    "What to make": (
        "model size frames seed count requests from",
        "deadline price start-time download-rate compile-time prompts seeds windows then overlap extend-prompt "
        "extend-model negative-prompt height width fps prompt allow-empty-prompt with-prompt",
    ),
    "From what": ("image last-image video", "mask reference strength resize max-picture noise"),
    "What to learn": (
        "full lora-rank sample-prompt",
        "lora-alpha lora-dropout lora-target lora-format expert ema-decay",
    ),
    "From which clips": (
        "buckets holdout-every",
        "cut min-frames latent-cache caption-dropout uncaptioned-preservation",
    ),
    "How well": (
        "steps guidance-scale lora",
        "guidance-scale-2 boundary dynamic-guidance guidance-rule flow-shift follow sigmas scheduler "
        "timesteps shift logit-mean logit-std",
    ),
    "How to learn": (
        "batch-size learning-rate warmup-steps",
        "grad-accum-steps optimizer lr-scheduler max-grad-norm weight-decay",
    ),
    "How fast": (
        "cache dtype",
        "vae-dtype attention block-q block-kv block-kv-compute window batch-guidance compiler quick keep timings",
    ),
    "Where": (
        "at chip mesh workers database ray host port token",
        "origin hosts resources retries dashboard rules processes "
        "compile-cache trust-compile-cache offload tile decoder rehearse",
    ),
    "Limits": ("max-queue", "max-pixels max-steps max-upload"),
    "Output": (
        "out dir to train preview quiet",
        "force preview-decoder sample-every validation-every save-every profile stats json verbose verify revision",
    ),
    "More": ("config help help-all", ""),
}
"""The options of all commands: for each section those in daily use, then the others."""
INPUTS_SECTION = "From what"
LINES = 50  # of a terminal that shows a help whole
LEFT = 24  # columns of an option at most, where its help stands beside it
WHOLE, SHORT = "wanjax.whole", "wanjax.short"  # keys, in a command's context, of the help that is asked for and made


class Command(click.Command):
    """A command that shows its options in sections."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), HELP_ALL]

    def get_help(self, ctx: click.Context) -> str:
        """Return the help, of the options in daily use alone where all of them are too many for a terminal."""
        whole = super().get_help(ctx)
        if WHOLE in ctx.meta or whole.count("\n") < LINES:
            return whole
        ctx.meta[SHORT] = True
        return super().get_help(ctx)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        text, _, more = inspect.cleandoc(self.help or "").partition("\n\n")
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(text if SHORT in ctx.meta else f"{text}\n\n{more}")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        short = SHORT in ctx.meta
        params = [x for x in self.get_params(ctx) if short or x is not HELP_ALL]
        records = {name: x.get_help_record(ctx) for x in params for name in x.opts}
        for title, (often, seldom) in SECTIONS.items():
            names = often.split() if short else [*often.split(), *seldom.split()]
            if title == INPUTS_SECTION and not short:  # those of registered families
                names += [name for one in INPUTS.values() if (name := one.option[2:]) not in names]
            shown = [record for name in names if (record := records.get(f"--{name}"))]
            if shown:
                with formatter.section(title):
                    formatter.write_dl(
                        [
                            (left.ljust(LEFT), _brief(description) if short else description)
                            for left, description in shown
                        ],
                        LEFT,
                    )


def _brief(text: str) -> str:
    """Return the first clause of an option's help, and its default if that is one word."""
    text, _, default = text.partition("  [default: ")
    clause = re.split(r"[;.:] ", text)[0].removesuffix(".")
    return f"{clause}.  [default: {default}" if default and " " not in default else f"{clause}."


def _show_all(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[WHOLE] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


HELP_ALL = click.Option(
    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all, help="Show all options."
)
