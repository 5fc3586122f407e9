# SPDX-License-Identifier: Apache-2.0
"""Small data sets of clips with captions."""

import numpy as np
from PIL import Image

CAPTIONS = ("a red circle", "a blue cat", "the sea at night", "a dog")


def write_clips(folder, count=4, frames=9, size=(32, 32), suffix=".gif"):
    """Write clips of moving colours, equal at every call, and a caption of each; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        random = np.random.default_rng(index)
        height, width = size if index % 2 == 0 else size[::-1]
        ramp = np.linspace(0, 255, width)[None, :, None] * random.random(3)
        clip = [np.roll(np.broadcast_to(ramp, (height, width, 3)), 2 * i, 1).astype(np.uint8) for i in range(frames)]
        pictures = [Image.fromarray(frame) for frame in clip]
        file = folder / f"{index}{suffix}"
        if frames == 1:
            pictures[0].save(file)
        else:
            pictures[0].save(file, save_all=True, append_images=pictures[1:], duration=150, loop=0)
        file.with_suffix(".txt").write_text(CAPTIONS[index % len(CAPTIONS)])
    return folder
