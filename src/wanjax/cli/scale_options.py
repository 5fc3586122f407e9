# SPDX-License-Identifier: Apache-2.0
"""The options of `plan` for many videos: a deadline, a price, and what is known of the place."""

import re
from typing import Any

import click

from wanjax.cli.options import Decorator, together

SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
LONGEST = 3650 * SECONDS["d"]
BYTES = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
DEAREST = 1e6  # a chip-hour


class Duration(click.ParamType):
    """A type of option: reads a time such as 12h, 90min or 1h30m as seconds; `least` is the shortest."""

    name = "duration"

    def __init__(self, least: float = 0):
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        parts = re.findall(r"([0-9]*\.?[0-9]+)\s*(d|h|min|m|s)\s*", str(value))
        whole = "".join(re.split(r"\s+", str(value)))
        seconds = sum(float(number) * SECONDS[unit[0]] for number, unit in parts)
        if not parts or "".join(f"{n}{unit}" for n, unit in parts) != whole or not self.least <= seconds <= LONGEST:
            return self.fail(f"{value!r} is no time here: write 12h, 90min or 1d12h, of ten years at most", param, ctx)
        return seconds


class Rate(click.ParamType):
    """A type of option: reads a rate such as 200MB/s as bytes a second."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kMGT])B/s\s*", str(value))
        rate = float(match[1]) * BYTES[match[2]] if match else 0
        if not 0 < rate < 1e15:
            return self.fail(f"{value!r} is no rate of bytes: write it as 200MB/s or 1.5GB/s", param, ctx)
        return rate


class Price(click.types.FloatParamType):
    """A type of option: reads a sum of money in any currency."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        price = super().convert(value, param, ctx)
        if not 0 < price <= DEAREST:
            return self.fail(f"{value!r} is no price of a chip-hour: write a number such as 2.7", param, ctx)
        return price


def _beside_requests(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    if value is not None and ctx.params.get("requests") is None:
        raise click.UsageError(f"{parameter.opts[-1]} is for many videos: --requests says how many")
    return value


def _beside(option: str, name: str, kind: click.ParamType, metavar: str, description: str) -> Decorator:
    return click.option(option, name, type=kind, metavar=metavar, help=description, callback=_beside_requests)


at_scale = together(
    click.option(
        "--requests",
        type=click.IntRange(1, 10**9),
        metavar="N",
        is_eager=True,  # before the options that stand beside it
        help="Price N videos, with --deadline and --price; on slices of this chip and smaller ones, and say which.",
    ),
    _beside(
        "--deadline",
        "deadline",
        Duration(1),
        "TIME",
        "With --requests: the time for all, as 12h; says how many slices.",
    ),
    _beside("--price", "price", Price(), "X", "With --requests: the price of a chip for an hour, in any currency."),
    _beside(
        "--start-time",
        "start",
        Duration(),
        "TIME",
        "With --requests: until a slice that is asked for is there.  [default: 5min, an estimate]",
    ),
    _beside(
        "--download-rate",
        "download",
        Rate(),
        "RATE",
        "With --requests: at which a slice receives weights.  [default: 200MB/s, an estimate]",
    ),
    _beside(
        "--compile-time",
        "compiling",
        Duration(),
        "TIME",
        "With --requests: of a slice that begins.  [default: from 0, of a shared cache, to that of the plan]",
    ),
)
