# SPDX-License-Identifier: Apache-2.0
"""Twenty steps of training have the same losses on eight devices as on one, for a LoRA and for all weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.small_wan import network, partitioner, small_model, transformer_config
from wanjax.converters.wan.diffusers import transformer_weight_rules
from wanjax.execution import CompileContext
from wanjax.kernels.compiler_options import matmul_options
from wanjax.models.wan.transformer import WanTransformer
from wanjax.pipelines.components import Components
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.wan.conditioning import WanConditioning
from wanjax.registry import presets
from wanjax.sharding import one_device_partitioner
from wanjax.training.adapters import LoraConfig, adapt, is_factor
from wanjax.training.loop import Trainer
from wanjax.training.objective import Batch, NoiseLevels, make_loss
from wanjax.training.optimizers import OptimizerConfig, make_optimizer
from wanjax.training.step import all_parameters, train

HEADS, STEPS = 8, 20
MESHES = {"dp=2,sp=2,tp=2": (2, 2, 2), "tp=8": (1, 1, 8), "sp=4,tp=2": (1, 4, 2)}
slow = pytest.mark.slow


def batch(step):
    random = np.random.default_rng(step)
    latents, text = (random.normal(size=size).astype(np.float32) for size in ((2, 4, 3, 8, 8), (2, 16, 8)))
    return Batch(jnp.asarray(latents), WanConditioning(jnp.asarray(text), jnp.asarray(text)))


def losses(axes, rules, full, folder):
    device_partitioner = partitioner(axes, rules)
    pipe = Pipeline(
        Components({}), small_model(HEADS), presets()["nano"].defaults.updated({"dtype": "float32"}), device_partitioner
    )
    config = transformer_config(HEADS)
    model = network(lambda **kw: WanTransformer(config, **kw), device_partitioner)
    if not full:
        model, _ = adapt(model, transformer_weight_rules(config), LoraConfig(rank=4), 0, device_partitioner)
    is_trained = all_parameters if full else is_factor
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-3), STEPS)
    trainer = Trainer(
        model,
        make_loss(pipe, NoiseLevels("shift", 3.0)),
        optimizer,
        folder,
        0,
        trained=is_trained,
        partitioner=device_partitioner,
    )
    compile_context = CompileContext(one_device_partitioner() if device_partitioner is None else device_partitioner)
    assert train.compiler_options(compile_context) == matmul_options(None)  # as in a plan
    losses_of_steps = []
    trainer.run(
        STEPS,
        lambda step, _: batch(step),
        lambda step, metrics: losses_of_steps.append(metrics["loss"]),
        save_every=10**6,
    )
    trainer.close()
    shardings = {x.sharding for x in jax.tree.leaves(trainer.state)}
    return np.array(list(map(float, losses_of_steps))), shardings


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=slow)], ids=["lora", "full"])
def test_eight_devices_have_the_losses_of_one(full, tmp_path):
    one_device, _ = losses(None, "fsdp", full, tmp_path / "one")
    meshes = MESHES.items() if full else [*MESHES.items()][:1]
    for index, (name, axes) in enumerate(meshes):
        rules = "tp" if index == 1 else "fsdp"
        eight_devices, shardings = losses(axes, rules, full, tmp_path / f"{index}")
        difference = np.abs(eight_devices / one_device - 1).max()
        print(f"{name}, {rules}, {'all weights' if full else 'LoRA'}: {difference:.1e}")
        assert difference <= 1e-5
        assert any(not sharding.is_fully_replicated for sharding in shardings)


@slow
@pytest.mark.parametrize("mesh", [*MESHES][1:])
@pytest.mark.parametrize("rules", ["fsdp", "tp"])
def test_a_lora_has_the_same_losses_on_other_meshes(mesh, rules, tmp_path):
    one_device, _ = losses(None, "fsdp", False, tmp_path / "one")
    eight_devices, _ = losses(MESHES[mesh], rules, False, tmp_path / "more")
    print(f"{mesh}, {rules}, LoRA: {np.abs(eight_devices / one_device - 1).max():.1e}")
    assert np.abs(eight_devices / one_device - 1).max() <= 1e-5
