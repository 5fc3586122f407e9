# SPDX-License-Identifier: Apache-2.0
"""Layers that models share. A layer has its formula and the logical axes of its weights, and knows no model."""
