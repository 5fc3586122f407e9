# SPDX-License-Identifier: Apache-2.0
"""Many videos, by one process or by the workers of a Ray cluster."""
