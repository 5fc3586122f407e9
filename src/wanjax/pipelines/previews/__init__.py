# SPDX-License-Identifier: Apache-2.0
"""Previews: pictures of latents on their way."""
