# SPDX-License-Identifier: Apache-2.0
"""Layers that models share. A layer defines its formula and the logical axes of its weights. No layer depends on a
model."""
