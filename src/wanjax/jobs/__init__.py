# SPDX-License-Identifier: Apache-2.0
"""The queue of jobs in a database, the workers that make their videos, and pools that keep workers alive."""
