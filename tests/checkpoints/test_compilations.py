# SPDX-License-Identifier: Apache-2.0
"""Loading copies weights from files to devices without compiling a program."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wanjax
from tests.support.compilations import compilations
from tests.support.devices import on_eight_devices
from tests.support.quick import quick
from wanjax.checkpoints.files import save_safetensors

MESHES = {"none": None, "one": (1, 1, 1), "four": (2, 1, 2)}  # sizes of dp, sp and tp
WIDTH = 24
FACTORS = {"lora_down": (2, WIDTH), "lora_up": (WIDTH, 2)}


def test_a_compilation_is_counted():
    with compilations() as compiled:
        jax.jit(lambda: jnp.ones(3))()
    assert len(compiled) == 1


@pytest.mark.parametrize("mesh", quick(["four"], MESHES))
def test_components_are_loaded_without_a_compilation(mesh, converted, tmp_path):
    """A new process has no programs that another test compiled."""
    lora = tmp_path / "lora.safetensors"
    names = {f"diffusion_model.blocks.1.self_attn.q.{name}.weight": shape for name, shape in FACTORS.items()}
    save_safetensors(lora, {name: np.ones(shape, np.float32) for name, shape in names.items()})
    code = f"from tests.checkpoints.test_compilations import load_all; load_all({mesh!r})"
    on_eight_devices(code, converted, lora)


def load_all(name):
    """Load the bundled model, a wanjax checkpoint, and one into which a LoRA is merged."""
    converted, lora = sys.argv[1:]
    sizes = MESHES[name]
    mesh = sizes and wanjax.make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)])
    with compilations() as compiled:
        for model, options in (("nano", {}), (converted, {}), (converted, {"lora": lora})):
            pipe = wanjax.load(model, mesh=mesh, **options)
            loaded = {name: pipe.components.get(name) for name in pipe.components.names}
            assert {"text_encoder", "transformer", "vae"} <= loaded.keys()
    assert compiled == []
