# SPDX-License-Identifier: Apache-2.0
"""A video that is asked for. JAX is not imported here, as the command line reads requests before it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wanjax.pipelines.settings import Settings


@dataclass(frozen=True)
class PreparedRequest:
    """A request that a model can make, as a run takes it.

    Args:
        settings: All settings of the video.
        metadata: What the video's file will hold.
    """

    settings: Settings
    metadata: Mapping[str, Any] = field(default_factory=dict)
