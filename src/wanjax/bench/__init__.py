# SPDX-License-Identifier: Apache-2.0
"""Measure the user's devices, and compare the times with the prices of `wanjax.plan`."""
