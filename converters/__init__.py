# SPDX-License-Identifier: Apache-2.0
"""Converts Hugging Face checkpoints to wanjax modules and back: rules, and one total table a family."""
