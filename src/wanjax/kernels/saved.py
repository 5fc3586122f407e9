# SPDX-License-Identifier: Apache-2.0
"""Results that a block's backward pass reads where it computes the rest of the block again."""

from functools import partial
from typing import TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

Results = TypeVar("Results")  # an array, or a tree of arrays

_NAME = "saved"

saved_alone = partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(_NAME))
"""Computes a function again in its backward pass, except what is `saved` in it."""


def saved(x: Results) -> Results:
    """Marks results as kept for the backward pass, if it needs them: those that cost the most beside their size."""
    return checkpoint_name(x, _NAME)
