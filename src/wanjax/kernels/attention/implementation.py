# SPDX-License-Identifier: Apache-2.0
"""An implementation of attention on one device, as a value."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def never(config: Any) -> bool:
    """Resume with no config."""
    return False


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention on the device that holds the operands.

    All functions take q, k, v as [B L N D] and [B S K D], and the options of `api.attention` by their names.

    Attributes:
        attention: The result, and with `return_lse` the log-sum-exp of each query too.
        unsupported: The reason why a call is not supported, or None. Shapes suffice.
        gradient: The gradients of q, k and v where all queries see the same keys, from those that
            `gradient.from_result` gives.
        counts_keys: Whether `attention` takes `keys`, a number of keys that take part; for others the keys are cut.
        resumes: Whether `attention_with_carry` takes a config.
        resumed: Adds the attention to some keys to what it returned for others; None where softmaxes are merged.
    """

    attention: Callable[..., Any]
    unsupported: Callable[..., str | None]
    gradient: Callable[..., Any]
    counts_keys: bool = False
    supports_carry: Callable[[Any], bool] = never
    attention_with_carry: Callable[..., Any] | None = None
