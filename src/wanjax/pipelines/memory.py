# SPDX-License-Identifier: Apache-2.0
"""The memory that weights need, and that there is: a network that cannot fit is refused before its weights are read."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import psutil
from flax import nnx

from wanjax.errors import WanjaxError
from wanjax.figures import in_bytes, quantity
from wanjax.layers.placement import bytes_by_device
from wanjax.pipelines.settings import Settings
from wanjax.pricing.chips import KINDS
from wanjax.sharding import local_devices, platform

PROCESS = 230_000_000
"""Bytes of a process that has imported JAX and the library, at the least."""
MOST_A_PIXEL = 4096
"""Bytes that a pixel of a frame may take at the most, in any model's programs."""
GROUPS = Path("/proc/self/cgroup")  # the control groups of this process, on Linux
HIERARCHY = Path("/sys/fs/cgroup")


def bytes_needed(network: nnx.Module) -> int:
    """Return the bytes of a network's weights, which may be given as shapes, in the memory that holds most of them.

    CPU devices share one memory.
    """
    taken = bytes_by_device(network).values()
    return sum(taken) if platform() == "cpu" else max(taken)


def check_video(settings: Settings, weights: int, tokens: int, devices: int) -> None:
    """Raise WanjaxError where a step of a video needs more than a device's whole memory.

    `weights` are the bytes of the denoiser's weights on a device, and `tokens` those that so many devices share.
    Nothing is refused where the memory is unknown.
    """
    shared = tokens if local_devices()[0].platform == "cpu" else tokens // devices  # CPU devices share one memory
    check_held(settings, weights + shared)


def check_held(settings: Settings, needed: int, stage: str | None = None) -> None:
    """Raise WanjaxError where a video, or a stage of it, holds more than a device's whole memory.

    Args:
        settings: Those of the video.
        needed: Bytes that are held at the least.
        stage: encode, denoise or decode.
    """
    device = local_devices()[0]
    if (there := total_memory(device)) is None or needed <= there:
        return
    where = "this machine" if device.platform == "cpu" else f"each {device.device_kind}"
    tiles = ", or decode in tiles (--tile)" if stage == "decode" else ""
    raise WanjaxError(
        f"a video of {settings.width}x{settings.height} and {quantity(settings.frames, 'frame')} needs "
        f"{in_bytes(needed)} of "
        f"memory at the least{f' to {stage}' if stage else ''} where {where} has {in_bytes(there)}: use a smaller size "
        f"or fewer frames{tiles}"
    )


def is_small(size: tuple[int, int], frames: int, weights: int) -> bool:
    """Tell whether the programs of a video cannot be too large for this machine, without a look at them.

    Args:
        size: The (height, width) of the video.
        frames: Those of the video.
        weights: Bytes of the largest network.
    """
    device = local_devices()[0]
    if device.platform != "cpu" or (there := total_memory(device)) is None:
        return True  # an accelerator's compiler refuses what it has no room for
    return PROCESS + weights + MOST_A_PIXEL * size[0] * size[1] * frames <= there


def total_memory(device: Any) -> int | None:
    """Return the bytes of a device's memory, of which a program may use all; None where they are unknown.

    The memory of a CPU is that of `machine_memory`, and the swap space.
    """
    if device.platform != "cpu":
        try:
            return (device.memory_stats() or {}).get("bytes_limit")
        except jax.errors.JaxRuntimeError:  # of a device that is described
            return chip.hbm if (chip := KINDS.get(device.device_kind)) else None
    return machine_memory() + psutil.swap_memory().total


def machine_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or what its control groups allow."""
    return min([psutil.virtual_memory().total, *_group_limits()])


def _group_limits() -> Iterator[int]:
    """Yield the limits of the process's control groups, of both versions of their interface."""
    with suppress(OSError):
        for line in GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root, file = (HIERARCHY / "memory", "memory.limit_in_bytes") if controllers else (HIERARCHY, "memory.max")
            parts = Path(path.lstrip("/")).parts
            for depth in range(len(parts) + 1):
                with suppress(OSError, ValueError):  # a group without a limit, whose file is missing or says "max"
                    yield int(root.joinpath(*parts[:depth], file).read_text())
