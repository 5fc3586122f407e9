# SPDX-License-Identifier: Apache-2.0
"""Step caches: rules, tables, what is kept, and how a checkpoint is calibrated."""
