# SPDX-License-Identifier: Apache-2.0
"""Two caches of compiled programs: JAX's own cache, which workers can share, and a cache of executables, which need no
lowering."""
