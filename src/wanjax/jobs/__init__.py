# SPDX-License-Identifier: Apache-2.0
"""Jobs: requests for videos in a database, the workers that make them, and pools that keep workers alive."""
