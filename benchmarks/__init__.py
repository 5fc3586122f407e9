# SPDX-License-Identifier: Apache-2.0
"""Measurements that are not tests: run `python -m benchmarks.NAME` in the repository's root."""
