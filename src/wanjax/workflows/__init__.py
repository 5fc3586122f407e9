# SPDX-License-Identifier: Apache-2.0
"""Read workflows of ComfyUI as requests. Nodes are data: no node runs."""

from wanjax.media.inputs import CLIP_SUFFIXES

PICTURE_SUFFIXES = (".png", ".apng", ".webp")  # of pictures into which ComfyUI writes its workflow
SUFFIXES = (".json", *CLIP_SUFFIXES, *PICTURE_SUFFIXES)  # of files that may have a workflow
