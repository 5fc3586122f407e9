# SPDX-License-Identifier: Apache-2.0
"""The description of an implementation of attention on one device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

INTERPRETER_ADVICE = (
    "{0} runs on TPUs: choose chunked or auto here, or call the function of wanjax.kernels.attention with "
    "config={1}.Config(interpret=True), which is slow and meant for tests"
)
"""The message for a TPU kernel on another platform. The fields are the kernel's name and its module."""


def no_carry(config: Any) -> bool:
    """Return False, because no config of the implementation supports a carry."""
    return False


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention on the device that holds the operands.

    All functions take q, k, v as [B L N D] and [B S K D], and the options of `api.attention` by their names.

    Attributes:
        attention: Returns the result, and with `return_lse` also the log-sum-exp of each query.
        unsupported: Returns the reason why a call is not supported, or None. Shapes may replace the arrays.
        gradient: The backward function for `gradient.from_result`, for attention of all queries to the same keys.
        takes_kv_length: Whether `attention` takes `kv_length`, the number of valid keys. If False, the caller slices
            the keys.
        supports_carry: Returns whether `attention_with_carry` supports a config.
        attention_with_carry: Online softmax: updates the running sums of earlier keys, the carry, with more keys and
            values. None means that the caller has to merge the softmaxes.
    """

    attention: Callable[..., Any]
    unsupported: Callable[..., str | None]
    gradient: Callable[..., Any]
    takes_kv_length: bool = False
    supports_carry: Callable[[Any], bool] = no_carry
    attention_with_carry: Callable[..., Any] | None = None
