# SPDX-License-Identifier: Apache-2.0
"""Self-test: check in two minutes, without a network, that this machine computes correctly, and how fast."""
