# SPDX-License-Identifier: Apache-2.0
"""Format numbers for readers, with at most three significant digits and a suitable unit."""

from collections.abc import Mapping, Sequence

PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def format_number(number: float) -> str:
    """Format a number with three significant digits, such as 1.02, 85 or 1240."""
    return f"{float(f'{number:.3g}'):.15g}"


def format_range(low: str, high: str) -> str:
    """Format a range of two formatted numbers, or a single number if both are equal."""
    return low if low == high else f"{low} to {high}"


def join_with_and(words: Sequence[str]) -> str:
    """Join words into an enumeration, such as `size, steps and seed`."""
    return " and ".join([*([", ".join(words[:-1])] if words[1:] else []), *words[-1:]])


def format_batch_progress(missing: int, existing: int, folder: object) -> str:
    """Format the first line of a batch: how many videos it makes, how many exist already, and the folder."""
    if not existing:
        return f"videos: {missing}, into {folder}"
    if not missing:
        subject = "the video exists" if existing == 1 else f"all {pluralize(existing, 'video')} exist"
        return f"{subject} already, in {folder}"
    return f"videos: {missing} to be made, into {folder}; {existing} exist already"


def pluralize(count: int, noun: str) -> str:
    """Format a number with its noun, such as 1 step, 1000 steps or 10,000 frames."""
    plural = f"{noun}{'es' if noun.endswith(('s', 'sh', 'ch', 'x')) else 's'}"
    digits_text = f"{count:,}" if count >= 10_000 else str(count)
    return f"{digits_text} {noun if count == 1 else plural}"


def format_duration(seconds: float) -> str:
    """Format a duration, such as 85 ms, 1.25 s, 2 min 30 s or 1 h 5 min."""
    rounded = float(f"{seconds:.3g}")
    if rounded < 1:
        ms = 1000 * rounded
        return f"{format_number(ms)} ms" if ms >= 1 else f"{format_number(1000 * ms)} µs" if ms else "0 s"
    if not rounded >= 60:  # NaN too
        return f"{format_number(rounded)} s"
    minutes, remaining_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {remaining_seconds} s"


def format_bytes(num_bytes: float, base: int = 1000) -> str:
    """Format a number of bytes, such as 1.42 GB. With a base of 1024, the same number is 1.32 GiB."""
    return format_with_prefix(num_bytes, "B", base)


def format_with_prefix(number: float, unit: str = "", base: int = 1000) -> str:
    """Format a number with a unit prefix, such as 14.3 G."""
    power = 0
    while abs(float(f"{number / base**power:.3g}")) >= base and power < len(PREFIXES) - 1:
        power += 1
    prefix = f"{PREFIXES[power].upper()}i" if base == 1024 and power else PREFIXES[power]
    return f"{format_number(number / base**power)} {prefix}{unit}".rstrip()


def format_mesh(axes: Mapping[str, int], separator: str = ",") -> str:
    """Format the sizes of a mesh in the form that `parse_mesh` reads, such as `dp=1,sp=2,tp=4`."""
    return separator.join(f"{axis}={size}" for axis, size in axes.items())
