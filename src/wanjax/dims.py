# SPDX-License-Identifier: Apache-2.0
"""The alphabet of shapes: the meaning of each letter in annotations, einsum strings and comments.

Inside the library arrays are channels-last: videos and latents are `[B T H W C]`, sequences `[B L E]`, operands of
attention `[B L N D]`. In files and for users latents are `[B, C, T, H, W]` as in the reference.
A letter with a leading underscore is a size that differs from the one that the letter stands for elsewhere.
"""

ALPHABET = {
    "B": "batch",
    "T": "frames, of the video or of the latents",
    "H": "height, in pixels or latent cells",
    "W": "width, in pixels or latent cells",
    "C": "channels",
    "L": "tokens of the queries",
    "S": "tokens of the keys and values, or of the context",
    "N": "attention heads",
    "K": "heads of keys and values, if they are fewer than N",
    "D": "size of a head",
    "E": "width of the model",
    "F": "width inside the MLP",
    "P": "pairs of channels that rotary embeddings rotate, D / 2",
    "steps": "of a denoising schedule",
    "terms": "of a solver's expansion at one step",
}
