# SPDX-License-Identifier: Apache-2.0
"""The bench: measurements of the user's devices beside the prices of `wanjax.plan`."""
