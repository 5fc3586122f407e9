# SPDX-License-Identifier: Apache-2.0
"""The user's own devices, measured beside what `wanjax.plan` says of them: `wanjax bench`."""
