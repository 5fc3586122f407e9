# SPDX-License-Identifier: Apache-2.0
"""Checks of the memory that weights and videos need. A run that cannot fit is rejected before its weights are
loaded."""

import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import psutil
from flax import nnx

from wanjax.errors import WanjaxError, WanjaxWarning, user_stack_level
from wanjax.figures import format_bytes, pluralize
from wanjax.layers.placement import bytes_by_device
from wanjax.pipelines.settings import Settings
from wanjax.pricing.chips import CHIPS_BY_DEVICE_KIND
from wanjax.sharding import device_platform, local_devices

MIN_PROCESS_BYTES = 270_000_000
"""A lower bound of the bytes that a process uses after it has loaded a pipeline, without the weights. With jax 0.10 on
Linux, a process uses about 340 MB then."""
MAX_BYTES_PER_PIXEL = 4096
"""An upper bound on the memory of any model's programs, in bytes per pixel and frame."""
CGROUPS_FILE = Path("/proc/self/cgroup")  # lists the control groups of this process, on Linux
CGROUPS_ROOT = Path("/sys/fs/cgroup")


def bytes_needed(network: nnx.Module) -> int:
    """Compute the largest number of bytes that a network's weights need on one device. The network may have shapes in
    place of weights.

    CPU devices share one memory, so the result for CPUs is the sum over the devices.
    """
    device_bytes = bytes_by_device(network).values()
    return sum(device_bytes) if device_platform() == "cpu" else max(device_bytes, default=0)


def check_video(settings: Settings, weight_bytes: int, token_bytes: int, devices: int) -> None:
    """Raise WanjaxError if a denoising step of a video needs more than the total memory of a device.

    `weight_bytes` counts the denoiser's weights on a device, and `token_bytes` the tokens on all `devices` together.
    Nothing is rejected if the memory is unknown.
    """
    is_cpu = local_devices()[0].platform == "cpu"
    check_memory(
        settings, weight_bytes + (token_bytes if is_cpu else token_bytes // devices)
    )  # CPU devices share one memory


def check_memory(settings: Settings, needed_bytes: int, stage: str | None = None) -> None:
    """Raise WanjaxError if a video, or one of its stages, needs more than the total memory of a device.

    Args:
        settings: The settings of the video.
        needed_bytes: The minimum number of bytes that the video needs.
        stage: encode, denoise or decode; None for the whole video.

    Warns:
        WanjaxWarning: The video runs on a CPU, and other programs on this machine leave too little memory for it.
    """
    device = local_devices()[0]
    if (total := total_memory(device)) is None:
        return
    is_cpu = device.platform == "cpu"
    tiles = ", or decode in tiles" if stage == "decode" else ""
    problem = (
        f"a video of {settings.width}x{settings.height} and {pluralize(settings.frames, 'frame')} needs at least "
        f"{format_bytes(needed_bytes)} of memory{f' to {stage}' if stage else ''}"
    )
    advice = f"use a smaller size or fewer frames{tiles}"
    if needed_bytes > total:
        owner = "this machine" if is_cpu else f"each {device.device_kind}"
        raise WanjaxError(f"{problem}, and {owner} has {format_bytes(total)}: {advice}")
    if is_cpu and needed_bytes > (free := process_memory() + available_memory() + psutil.swap_memory().free):
        message = f"{problem}, and other programs leave {format_bytes(free)}, so the system may end it: {advice}"
        warnings.warn(message, WanjaxWarning, stacklevel=user_stack_level())


def surely_fits(size: tuple[int, int], frames: int, weight_bytes: int) -> bool:
    """Return True if a video certainly fits into this machine's memory. Compiles nothing.

    Args:
        size: The (height, width) of the video.
        frames: The number of frames.
        weight_bytes: The bytes of the largest network.
    """
    device = local_devices()[0]
    if device.platform != "cpu" or (total := total_memory(device)) is None:
        return True  # an accelerator's compiler rejects programs that do not fit
    return MIN_PROCESS_BYTES + weight_bytes + MAX_BYTES_PER_PIXEL * size[0] * size[1] * frames <= total


def total_memory(device: Any) -> int | None:
    """Return the total bytes of a device's memory, or None if they are unknown.

    For a CPU the result is `machine_memory` plus the swap space.
    """
    if device.platform != "cpu":
        try:
            return (device.memory_stats() or {}).get("bytes_limit")
        except jax.errors.JaxRuntimeError:  # a device description of a plan, not a real device
            return chip.hbm if (chip := CHIPS_BY_DEVICE_KIND.get(device.device_kind)) else None
    return machine_memory() + psutil.swap_memory().total


def machine_memory() -> int:
    """Return the bytes that this process may use: the machine's memory, or the limit of its control groups."""
    return min([psutil.virtual_memory().total, *_group_limits()])


def process_memory() -> int:
    """Return the bytes of memory that this process uses."""
    return psutil.Process().memory_info().rss


def available_memory() -> int:
    """Return the bytes of memory that this process may still allocate, by the machine's free memory and the limits of
    its control groups."""
    return max(0, min(psutil.virtual_memory().available, machine_memory() - process_memory()))


def _group_limits() -> Iterator[int]:
    """Yield the memory limits of the process's control groups, for cgroup versions 1 and 2."""
    with suppress(OSError):
        for line in CGROUPS_FILE.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root, file = (
                (CGROUPS_ROOT / "memory", "memory.limit_in_bytes") if controllers else (CGROUPS_ROOT, "memory.max")
            )
            parts = Path(path.lstrip("/")).parts
            for depth in range(len(parts) + 1):
                with suppress(OSError, ValueError):  # without a limit, the file is missing or contains "max"
                    yield int(root.joinpath(*parts[:depth], file).read_text())
