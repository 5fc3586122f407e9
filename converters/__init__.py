# SPDX-License-Identifier: Apache-2.0
"""Convert Hugging Face checkpoints to wanjax modules and back.

Each model family has a table with a rule for every tensor."""
