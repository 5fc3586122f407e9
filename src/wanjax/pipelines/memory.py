# SPDX-License-Identifier: Apache-2.0
"""The memory that weights and videos need, and what is available: what cannot fit is rejected before it is loaded."""

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
"""The minimum bytes of a process that has imported JAX and the library."""
MOST_A_PIXEL = 4096
"""The maximum bytes per pixel and frame, in any model's programs."""
GROUPS = Path("/proc/self/cgroup")  # the control groups of this process, on Linux
HIERARCHY = Path("/sys/fs/cgroup")


def bytes_needed(network: nnx.Module) -> int:
    """Return the bytes of a network's weights (or shapes) on the device that holds most of them.

    CPU devices share one memory, so there it is the sum.
    """
    taken = bytes_by_device(network).values()
    return sum(taken) if platform() == "cpu" else max(taken)


def check_video(settings: Settings, weights: int, tokens: int, devices: int) -> None:
    """Raise WanjaxError if a step of a video needs more than a device's whole memory.

    `weights` are the bytes of the denoiser's weights on a device, and `tokens` the bytes of tokens that all devices
    share. Nothing is rejected if the memory is unknown.
    """
    shared = tokens if local_devices()[0].platform == "cpu" else tokens // devices  # CPU devices share one memory
    check_held(settings, weights + shared)


def check_held(settings: Settings, needed: int, stage: str | None = None) -> None:
    """Raise WanjaxError if a video, or one of its stages, needs more than a device's whole memory.

    Args:
        settings: The settings of the video.
        needed: The minimum bytes that are needed.
        stage: encode, denoise or decode; None for the whole video.
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
    """Return whether a video certainly fits this machine, without a look at its compiled programs.

    Args:
        size: The (height, width) of the video.
        frames: The number of frames.
        weights: The bytes of the largest network.
    """
    device = local_devices()[0]
    if device.platform != "cpu" or (there := total_memory(device)) is None:
        return True  # an accelerator's compiler rejects programs that do not fit
    return PROCESS + weights + MOST_A_PIXEL * size[0] * size[1] * frames <= there


def total_memory(device: Any) -> int | None:
    """Return the total bytes of a device's memory, or None if they are unknown.

    For a CPU it is `machine_memory` plus the swap space.
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
    """Yield the memory limits of the process's control groups, for cgroup versions 1 and 2."""
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
