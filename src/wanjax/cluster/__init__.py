# SPDX-License-Identifier: Apache-2.0
"""Many videos, by one process, by several that are one worker, or by the workers of a Ray cluster."""
