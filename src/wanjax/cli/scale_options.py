# SPDX-License-Identifier: Apache-2.0
"""The options of `plan` for many videos: the deadline, the price of a chip, and the startup times of a slice."""

import re
from typing import Any

import click

from wanjax.cli.options import Decorator, combine_options

UNIT_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
MAX_SECONDS = 3650 * UNIT_SECONDS["d"]
PREFIX_FACTORS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
MAX_PRICE = 1e6  # the highest price of a chip-hour


class DurationType(click.ParamType):
    """The click type of an option whose value is a time such as 12h, 90min or 1h30m. The value is converted to seconds,
    and is at least `min_seconds`."""

    name = "duration"

    def __init__(self, min_seconds: float = 0):
        self.min_seconds = min_seconds

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        parts = re.findall(r"([0-9]*\.?[0-9]+)\s*(d|h|min|m|s)\s*", str(value))
        text_without_spaces = "".join(re.split(r"\s+", str(value)))
        seconds = sum(float(number) * UNIT_SECONDS[unit[0]] for number, unit in parts)
        if (
            not parts
            or "".join(f"{number}{unit}" for number, unit in parts) != text_without_spaces
            or not self.min_seconds <= seconds <= MAX_SECONDS
        ):
            return self.fail(f"{value!r} is not a time: write 12h, 90min or 1d12h, at most ten years", param, ctx)
        return seconds


class RateType(click.ParamType):
    """The click type of an option whose value is a rate such as 200MB/s. The value is converted to bytes per second."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kMGT])B/s\s*", str(value))
        rate = float(match[1]) * PREFIX_FACTORS[match[2]] if match else 0
        if not 0 < rate < 1e15:
            return self.fail(f"{value!r} is not a rate of bytes: write 200MB/s or 1.5GB/s", param, ctx)
        return rate


class PriceType(click.types.FloatParamType):
    """The click type of an option whose value is a price, in any currency."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        price = super().convert(value, param, ctx)
        if not 0 < price <= MAX_PRICE:
            return self.fail(f"{value!r} is not a price of a chip-hour: write a number such as 2.7", param, ctx)
        return price


def _check_has_requests(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    if value is not None and ctx.params.get("requests") is None:
        raise click.UsageError(f"{parameter.opts[-1]} is for many videos: also give their number, --requests")
    return value


def _workload_option(option: str, name: str, param_type: click.ParamType, metavar: str, description: str) -> Decorator:
    return click.option(option, name, type=param_type, metavar=metavar, help=description, callback=_check_has_requests)


workload_options = combine_options(
    click.option(
        "--requests",
        type=click.IntRange(1, 10**9),
        metavar="N",
        is_eager=True,  # eager: read before the options that need --requests
        help="Price N videos: on slices of this chip, up to the size of --chip. With --deadline and --price, "
        "also compute the number of slices and the cost.",
    ),
    _workload_option(
        "--deadline",
        "deadline",
        DurationType(1),
        "TIME",
        "With --requests: the time in which all videos must be made, such as 12h. The deadline determines the "
        "number of slices.",
    ),
    _workload_option(
        "--price", "price", PriceType(), "X", "With --requests: the price of a chip-hour, in any currency."
    ),
    _workload_option(
        "--start-time",
        "start",
        DurationType(),
        "TIME",
        "With --requests: the time until a requested slice is ready.  [default: 5min, an estimate]",
    ),
    _workload_option(
        "--download-rate",
        "download",
        RateType(),
        "RATE",
        "With --requests: the rate at which a slice downloads weights.  [default: 200MB/s, an estimate]",
    ),
    _workload_option(
        "--compile-time",
        "compiling",
        DurationType(),
        "TIME",
        "With --requests: the time that a new slice needs to compile.  [default: a range from 0, as with a "
        "shared cache, to the time in the plan]",
    ),
)
