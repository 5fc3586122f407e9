# SPDX-License-Identifier: Apache-2.0
"""The description of an implementation of attention on one device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

INTERPRETER_ADVICE = (
    "{0} runs on TPUs: choose chunked or auto here, or call the function of wanjax.kernels.attention with "
    "config={1}.Config(interpret=True), which is slow and meant for tests"
)
"""Why a TPU's kernel does not run elsewhere, given its name and its module."""


def no_carry(config: Any) -> bool:
    """Return False, because no config of the implementation supports a carry."""
    return False


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention on the device that holds the operands.

    All functions take q, k, v as [B L N D] and [B S K D], and the options of `api.attention` by their names.

    Attributes:
        attention: Returns the result, and with `return_lse` also the log-sum-exp of each query.
        unsupported: Returns the reason why a call is not supported, or None. In place of arrays, shapes suffice.
        gradient: The backward function for `gradient.from_result`. The function is used if all queries attend to the
            same keys.
        takes_kv_length: Whether `attention` takes `kv_length`, the number of valid keys. If `attention` does not take
            it, the caller slices the keys.
        supports_carry: Whether `attention_with_carry` takes a config.
        attention_with_carry: Takes the carry of a call for earlier keys and adds further keys to it. If
            the function is None, the caller merges the softmaxes instead.
    """

    attention: Callable[..., Any]
    unsupported: Callable[..., str | None]
    gradient: Callable[..., Any]
    takes_kv_length: bool = False
    supports_carry: Callable[[Any], bool] = no_carry
    attention_with_carry: Callable[..., Any] | None = None
