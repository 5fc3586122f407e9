# SPDX-License-Identifier: Apache-2.0
"""Price a step with prompts of several lengths, for a model that removes the padding of prompts.

python -m benchmarks.prompt_lengths [--model NAME] [--chip v6e-8] [--mesh dp=2,tp=4] [--tokens 128 1000]
"""

import argparse
from dataclasses import replace
from typing import Any

import jax

from wanjax.pipelines.hunyuanvideo.conditioning import LENGTHS
from wanjax.pipelines.mesh_sizes import parse_mesh
from wanjax.plan.estimate import estimate_video
from wanjax.registry import model_description


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="hunyuanvideo1.5-720p-t2v")
    parser.add_argument("--chip", default="v6e-8")
    parser.add_argument("--mesh", type=parse_mesh, help="default: the best for the chips")
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    model = model_description(options.model)
    settings = model.settings.updated({"dtype": "bfloat16"})
    for tokens in options.tokens:
        shapes: Any = replace(model.model, prompt_tokens=tokens)
        estimate = estimate_video(replace(model, model=shapes, settings=settings), options.chip, options.mesh)
        seconds_range = f"{estimate.step_seconds_low:.2f} to {estimate.step_seconds_high:.2f}"
        print(f"{tokens} tokens: {estimate.step_seconds:.3f} s, {seconds_range}")


if __name__ == "__main__":
    main()
