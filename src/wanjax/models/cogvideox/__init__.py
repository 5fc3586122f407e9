# SPDX-License-Identifier: Apache-2.0
"""The networks of CogVideoX."""
