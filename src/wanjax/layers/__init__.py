# SPDX-License-Identifier: Apache-2.0
"""Leaves that models are built from. A leaf knows its own formula and its weights' logical axes, and no model."""
