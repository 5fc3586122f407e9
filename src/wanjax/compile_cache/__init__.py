# SPDX-License-Identifier: Apache-2.0
"""Two caches of compiled programs. Workers can share the first, which is JAX's own cache. The second has executables,
which load without lowering."""
