# SPDX-License-Identifier: Apache-2.0
"""Results that a block's backward pass reads where it computes the rest of the block again."""

from functools import partial
from typing import TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

Results = TypeVar("Results")  # an array, or a tree of arrays

_NAME = "saved"

remat = partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(_NAME))
"""Computes a function again in its backward pass, except what `save_for_backward` marks."""


def save_for_backward(x: Results) -> Results:
    """Mark results that a backward pass reads: those that cost the most for their size."""
    return checkpoint_name(x, _NAME)
