# SPDX-License-Identifier: Apache-2.0
"""An implementation of attention on one device, as a value."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def no_carry(config: Any) -> bool:
    """Return False: no config supports a carry."""
    return False


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention on the device that holds the operands.

    All functions take q, k, v as [B L N D] and [B S K D], and the options of `api.attention` by their names.

    Attributes:
        attention: The result, and with `return_lse` the log-sum-exp of each query too.
        unsupported: The reason why a call is not supported, or None. Shapes suffice.
        gradient: The backward function of `gradient.from_result`, if all queries attend to the same keys.
        takes_num_keys: Whether `attention` takes `keys`, the number of valid keys; if not, the caller slices the keys.
        supports_carry: Whether `attention_with_carry` takes a config.
        attention_with_carry: Adds the attention to some keys to its return value for earlier keys; None if the caller
            has to merge softmaxes instead.
    """

    attention: Callable[..., Any]
    unsupported: Callable[..., str | None]
    gradient: Callable[..., Any]
    takes_num_keys: bool = False
    supports_carry: Callable[[Any], bool] = no_carry
    attention_with_carry: Callable[..., Any] | None = None
