# SPDX-License-Identifier: Apache-2.0
"""Measure how the colours of long videos of nano drift, with and without `--match colour`.

    python -m benchmarks.window_drift --windows 8 --videos 6

A scene of nano has a still background. The benchmark compares the border of each window's last frame with the border of
the video's first frame: the distance of their mean colours, in hundredths of Oklab's range from black to white, and
the PSNR. `--videos 0` makes no videos. The benchmark then applies colour matching to films whose colours change on
purpose, and prints the part of the change that remains after eight windows. One film has full contrast, and the other
has half the contrast.
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np
from rich.table import Table

import wanjax
from benchmarks.quality import nano_prompts, psnr
from tests.support import drifts
from wanjax.pipelines.colour_match import srgb_to_oklab
from wanjax.pipelines.progress import console
from wanjax.pipelines.settings import MATCH_CHOICES

BORDER = 4  # pixels; nano's objects stay inside it most of the time


def border(frame: np.ndarray) -> np.ndarray:
    """Return the pixels [N 3] of a frame's border."""
    is_border = np.ones(frame.shape[:2], bool)
    is_border[BORDER:-BORDER, BORDER:-BORDER] = False
    return frame[is_border]


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the videos, and print a row for each value of --match."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--videos", type=int, default=6)
    options = parser.parse_args(arguments)
    share_table = Table("change in each window", "left, full contrast", "left, half")
    for change in (drifts.gain, drifts.hue, drifts.moving_gradient):
        shares = (f"{drifts.remaining_drift_share(change, contrast):.1%}" for contrast in (1.0, 0.5))
        share_table.add_row(change.__name__, *shares)
    console(stderr=False).print(share_table)
    if not options.videos:
        return 0
    pipe, (prompts, _) = wanjax.load("nano"), nano_prompts()
    table = Table("match", "window", "distance of colours", "PSNR, dB")
    for match in MATCH_CHOICES:
        distances, psnrs = np.zeros((2, options.videos, options.windows))
        for video, (prompt, _) in enumerate(prompts[: options.videos]):
            frames = np.asarray(pipe(prompt, windows=options.windows, match=match, seed=video).frames)
            first, length = border(frames[0]), pipe.defaults.frames
            for window in range(options.windows):
                last = border(frames[length - 1 + window * (length - 1)])
                mean_colours = [srgb_to_oklab(pixels / 255).mean(0) for pixels in (first, last)]
                distances[video, window] = 100 * np.linalg.norm(mean_colours[0] - mean_colours[1])
                psnrs[video, window] = psnr(last, first)
        for window in (0, options.windows // 2 - 1, options.windows - 1):
            row = (f"{values[:, window].mean():.2f}" for values in (distances, psnrs))
            table.add_row(match, str(window + 1), *row)
    console(stderr=False).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
