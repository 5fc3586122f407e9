# SPDX-License-Identifier: Apache-2.0
"""Layers that models are built from. A layer knows its formula and the logical axes of its weights, and no model."""
