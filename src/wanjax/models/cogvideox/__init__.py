# SPDX-License-Identifier: Apache-2.0
"""CogVideoX's networks."""
