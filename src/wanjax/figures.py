# SPDX-License-Identifier: Apache-2.0
"""Numbers formatted for people: at most three significant digits, with a fitting unit."""

from collections.abc import Mapping, Sequence

PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def digits(number: float) -> str:
    """Format a number with three significant digits, such as 1.02, 85 or 1240."""
    return f"{float(f'{number:.3g}'):.15g}"


def between(low: str, high: str) -> str:
    """Format a range of two numbers; print one number if both read the same."""
    return low if low == high else f"{low} to {high}"


def joined_by_and(words: Sequence[str]) -> str:
    """Join words into a list for a sentence, such as `size, steps and seed`."""
    return " and ".join([*([", ".join(words[:-1])] if words[1:] else []), *words[-1:]])


def progress_of_many(missing: int, existing: int, folder: object) -> str:
    """Return the first line of a run of many videos: how many it makes, how many exist already, and the folder."""
    if not existing:
        return f"videos: {missing}, into {folder}"
    if not missing:
        subject = "the video is" if existing == 1 else f"all {quantity(existing, 'video')} are"
        return f"{subject} there already, in {folder}"
    return f"videos: {missing} to be made, into {folder}; {existing} there already"


def quantity(number: int, noun: str) -> str:
    """Format a number with its noun, such as 1 step, 1000 steps or 10,000 frames."""
    plural = f"{noun}{'es' if noun.endswith(('s', 'sh', 'ch', 'x')) else 's'}"
    digits_text = f"{number:,}" if number >= 10_000 else str(number)
    return f"{digits_text} {noun if number == 1 else plural}"


def duration(seconds: float) -> str:
    """Format a duration, such as 85 ms, 1.25 s, 2 min 30 s or 1 h 5 min."""
    rounded = float(f"{seconds:.3g}")
    if rounded < 1:
        ms = 1000 * rounded
        return f"{digits(ms)} ms" if ms >= 1 else f"{digits(1000 * ms)} µs" if ms else "0 s"
    if not rounded >= 60:  # NaN too
        return f"{digits(rounded)} s"
    minutes, remaining_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {remaining_seconds} s"


def in_bytes(number: float, base: int = 1000) -> str:
    """Format a size in bytes, such as 1.42 GB; with a base of 1024 such as 1.32 GiB."""
    return scaled(number, "B", base)


def scaled(number: float, unit: str = "", base: int = 1000) -> str:
    """Format a number with a prefix of its unit, such as 14.3 G."""
    power = 0
    while abs(float(f"{number / base**power:.3g}")) >= base and power < len(PREFIXES) - 1:
        power += 1
    prefix = f"{PREFIXES[power].upper()}i" if base == 1024 and power else PREFIXES[power]
    return f"{digits(number / base**power)} {prefix}{unit}".rstrip()


def mesh_text(axes: Mapping[str, int], separator: str = ",") -> str:
    """Format the sizes of a mesh as `parse_mesh` reads them, such as `dp=1,sp=2,tp=4`."""
    return separator.join(f"{axis}={size}" for axis, size in axes.items())
