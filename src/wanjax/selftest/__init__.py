# SPDX-License-Identifier: Apache-2.0
"""The self-test: whether this machine computes what it should, and how fast, in two minutes and without a network."""
