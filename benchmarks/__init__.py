# SPDX-License-Identifier: Apache-2.0
"""What is measured and not tested: run as `python -m benchmarks.NAME` from the repository's root."""
