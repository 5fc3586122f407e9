# SPDX-License-Identifier: Apache-2.0
"""The alphabet of shapes: what each letter of an annotation, an einsum string or a comment means, everywhere.

Inside the library arrays are channels-last: a video or its latents is `[B T H W C]`, a sequence `[B L E]`, attention's
operands `[B L N D]`. At the library's border and in files latents are `[B, C, T, H, W]`, as the reference stores them.
"""

ALPHABET = {
    "B": "batch",
    "T": "frames, of the video or of the latents",
    "H": "height, in pixels or latent cells",
    "W": "width, in pixels or latent cells",
    "C": "channels",
    "L": "tokens of the sequence that asks (query)",
    "S": "tokens of the sequence that is asked (key, value, context)",
    "N": "attention heads",
    "K": "key and value heads, where they are fewer than N",
    "D": "size of a head",
    "E": "width of the model",
    "F": "width inside the MLP",
    "P": "pairs of channels that rotary embeddings turn, D / 2",
    "steps": "of a denoising schedule",
    "terms": "of a solver's expansion at one step",
}
