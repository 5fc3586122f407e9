# SPDX-License-Identifier: Apache-2.0
"""Compiled programs between runs: JAX's cache, which workers may share, and executables that need no lowering."""
