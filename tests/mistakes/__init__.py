# SPDX-License-Identifier: Apache-2.0
"""Mistakes in requests, and what a sentence about each has to name."""
