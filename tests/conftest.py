# SPDX-License-Identifier: Apache-2.0
"""Every test runs offline, on a CPU as eight devices, with strict promotion, and with types and shapes checked."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import jaxtyping

import tests.support.types  # noqa: F401 (the hook finds it by its name)

jaxtyping.install_import_hook("wanjax", "tests.support.types.checked")  # before anything imports the library
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
