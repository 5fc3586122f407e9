# SPDX-License-Identifier: Apache-2.0
"""Caches of compiled programs: JAX's cache, which workers can share, and executables that need no lowering."""
