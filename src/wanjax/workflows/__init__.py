# SPDX-License-Identifier: Apache-2.0
"""Read workflows of ComfyUI as requests. Nodes are only data. No node is executed."""

from wanjax.media.inputs import CLIP_SUFFIXES

PICTURE_SUFFIXES = (".png", ".apng", ".webp")  # suffixes of pictures into which ComfyUI writes its workflow
SUFFIXES = (".json", *CLIP_SUFFIXES, *PICTURE_SUFFIXES)  # suffixes of files that may have a workflow
