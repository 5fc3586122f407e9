# SPDX-License-Identifier: Apache-2.0
"""Figures as people read them: three significant digits at most, in the unit that suits."""

from collections.abc import Mapping, Sequence

PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def digits(number: float) -> str:
    """Return a number with three significant digits, such as 1.02, 85 or 1240."""
    return f"{float(f'{number:.3g}'):.15g}"


def between(low: str, high: str) -> str:
    """Return a range of two figures; one figure where both read the same."""
    return low if low == high else f"{low} to {high}"


def joined_by_and(words: Sequence[str]) -> str:
    """Return words as a list in a sentence, such as `size, steps and seed`."""
    return " and ".join([*([", ".join(words[:-1])] if words[1:] else []), *words[-1:]])


def progress_of_many(left: int, existing: int, folder: object) -> str:
    """Return the first line of a run of many videos: how many it makes, how many are there already, and where."""
    if not existing:
        return f"videos: {left}, into {folder}"
    if not left:
        every = "the video is" if existing == 1 else f"all {quantity(existing, 'video')} are"
        return f"{every} there already, in {folder}"
    return f"videos: {left} to be made, into {folder}; {existing} there already"


def quantity(number: int, noun: str) -> str:
    """Return a number with its noun, such as 1 step, 1000 steps or 10,000 frames."""
    plural = f"{noun}{'es' if noun.endswith(('s', 'sh', 'ch', 'x')) else 's'}"
    figure = f"{number:,}" if number >= 10_000 else str(number)  # fewer digits are as they were typed
    return f"{figure} {noun if number == 1 else plural}"


def duration(seconds: float) -> str:
    """Return a time such as 85 ms, 1.25 s, 2 min 30 s or 1 h 5 min."""
    rounded = float(f"{seconds:.3g}")
    if rounded < 1:
        ms = 1000 * rounded
        return f"{digits(ms)} ms" if ms >= 1 else f"{digits(1000 * ms)} µs" if ms else "0 s"
    if not rounded >= 60:  # one that is unknown, NaN, too
        return f"{digits(rounded)} s"
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole} s"


def in_bytes(number: float, base: int = 1000) -> str:
    """Return a size such as 1.42 GB, or 1.32 GiB to the base of 1024."""
    return scaled(number, "B", base)


def scaled(number: float, unit: str = "", base: int = 1000) -> str:
    """Return a number with a prefix of its unit, such as 14.3 G."""
    power = 0
    while abs(float(f"{number / base**power:.3g}")) >= base and power < len(PREFIXES) - 1:
        power += 1
    prefix = f"{PREFIXES[power].upper()}i" if base == 1024 and power else PREFIXES[power]
    return f"{digits(number / base**power)} {prefix}{unit}".rstrip()


def mesh_text(axes: Mapping[str, int], joint: str = ",") -> str:
    """Return the sizes of a mesh as `parse_mesh` reads them."""
    return joint.join(f"{axis}={size}" for axis, size in axes.items())
