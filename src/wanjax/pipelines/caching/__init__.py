# SPDX-License-Identifier: Apache-2.0
"""Step caches: rules, tables, the caches themselves, and the calibration of a checkpoint."""
