# SPDX-License-Identifier: Apache-2.0
"""Leaves that more than one model is built from. A leaf knows its own formula and its weights' logical axes, no model."""
