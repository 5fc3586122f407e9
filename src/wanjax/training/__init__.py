# SPDX-License-Identifier: Apache-2.0
"""Train a LoRA, or all weights, on a folder of clips with captions.

pipe = wanjax.load("wan2.1-t2v-1.3b")
file = train(pipe, "clips", "my_style", steps=1000, lora=LoraConfig(rank=32))
wanjax.load("wan2.1-t2v-1.3b", lora=file)("a cat in my style")
"""

from wanjax.training.adapters import LoraConfig
from wanjax.training.config import TrainConfig
from wanjax.training.loop import Trainer
from wanjax.training.optimizers import OptimizerConfig
from wanjax.training.train import Training, train

__all__ = ["LoraConfig", "OptimizerConfig", "TrainConfig", "Trainer", "Training", "train"]
