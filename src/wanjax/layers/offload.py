# SPDX-License-Identifier: Apache-2.0
"""Offload: which weights of a model are moved out of the memory of its device, and when.

This module does not import JAX, so that `--help` is quick.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from wanjax.errors import WanjaxError, repr_short

DEFAULT_BLOCKS = 2  # one block computes while the next block is copied to the device
MAX_BLOCKS = 8  # the program has code for each block on the device, so more blocks take longer to compile


@dataclass(frozen=True)
class Offload:
    """A way to offload weights.

    Attributes:
        frees_stages: Whether each network is freed at the end of its stage.
        frees_on_demand: Whether loaded networks are freed only when the next network does not fit in memory.
        blocks: The number of a network's transformer blocks that are on the device at a time, while all blocks are in
            the host's memory. 0 means that blocks are not offloaded.
    """

    frees_stages: bool = False
    frees_on_demand: bool = False
    blocks: int = 0

    def __str__(self) -> str:
        """Return the offload in the form that `of` reads."""
        if self.blocks:
            return "blocks" if self.blocks == DEFAULT_BLOCKS else f"blocks:{self.blocks}"
        return next((name for name, offload in OFFLOADS.items() if offload == self), "auto")

    @classmethod
    def of(cls, value: Any) -> "Offload":
        """Parse an offload. Raises WanjaxError if the offload is unknown.

        Args:
            value: "none", "stages", "blocks", "blocks:N" or an `Offload`. None frees networks only when the next
                network does not fit.
        """
        if value is None:
            return AUTO_OFFLOAD
        if isinstance(value, cls):
            return value
        name, colon, number = value.partition(":") if isinstance(value, str) else ("", "", "")
        if name == "blocks" and colon and re.fullmatch(f"[1-{MAX_BLOCKS}]", number):
            return cls(frees_on_demand=True, blocks=int(number))
        if colon or name not in OFFLOADS:
            raise WanjaxError(
                f"offload must be {', '.join(OFFLOADS)} or blocks:N, with N blocks on the device at a time, 1 to "
                f"{MAX_BLOCKS}, got {repr_short(value)}"
            )
        return OFFLOADS[name]

    def overridden_by(self, offload: "Offload | None") -> "Offload":
        """Return `offload`, or this offload if `offload` is None.

        If `offload` offloads blocks, it does not determine when networks are freed. This offload then determines it.
        """
        if offload is None:
            return self
        return replace(self, blocks=offload.blocks) if offload.blocks else offload

    def check_devices(self, devices: int) -> None:
        """Raise WanjaxError if blocks are offloaded on a mesh of several devices."""
        if self.blocks and devices > 1:
            raise WanjaxError(
                f"offload is {self}, which needs a mesh of one device, got {devices} devices: leave the mesh out, or "
                "leave offload out, because several devices share the weights"
            )


AUTO_OFFLOAD = Offload(frees_on_demand=True)
STAGES = Offload(frees_stages=True)
OFFLOADS = {
    "none": Offload(),
    "stages": STAGES,
    "blocks": Offload(frees_on_demand=True, blocks=DEFAULT_BLOCKS),
}
"""The offloads with a name. The default is `AUTO_OFFLOAD`."""
