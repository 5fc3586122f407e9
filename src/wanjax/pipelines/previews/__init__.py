# SPDX-License-Identifier: Apache-2.0
"""Previews: images of partly denoised latents."""
