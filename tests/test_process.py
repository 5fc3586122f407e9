# SPDX-License-Identifier: Apache-2.0
"""Importing and loading change almost no flag of the process, and load few modules."""

import json
import os
import subprocess
import sys

FLAGS = """
import json, sys
import jax
from flax import configurations, nnx

def flags():
    values = {name: repr(value) for name, value in jax.config.values.items()}
    values["nnx_eager_sharding"] = repr(nnx.using_eager_sharding())
    return values | {f"flax_{name}": repr(value) for name, value in configurations.config._values.items()}

before = flags()
import wanjax
wanjax.load("nano").encode("a red circle moving right")
after = flags()
print(json.dumps([len(before), [name for name in after if after[name] != before.get(name)]]))
"""
MODULES = """
import json, sys
import wanjax, wanjax.jobs.rows, wanjax.pipelines.request
assert not hasattr(wanjax, "WanPipeline")
first = sorted(sys.modules)
import wanjax.registry
print(json.dumps([first, sorted(sys.modules)]))
"""


def json_of(code, **environment):
    """Run code in a new Python process; return its output, read as JSON."""
    run = subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_no_flag_changes_but_the_folder_of_the_compile_cache(tmp_path):
    count, changed = json_of(FLAGS, XDG_CACHE_HOME=str(tmp_path))
    assert count > 100
    assert changed == ["jax_compilation_cache_dir"]


def test_the_compile_cache_stays_in_the_user_s_folder(tmp_path):
    _, changed = json_of(FLAGS, JAX_COMPILATION_CACHE_DIR=str(tmp_path))
    assert changed == []


def test_importing_the_registry_loads_no_planner_and_importing_wanjax_no_jax():
    """Reading the rows of a batch loads no JAX either, because a process without devices does it."""
    loaded_by_wanjax, registry = json_of(MODULES)
    assert not [name for name in loaded_by_wanjax if name.partition(".")[0] in ("jax", "flax")]
    assert not [name for name in registry if name.startswith("wanjax.plan")]
    assert not {"torch", "transformers", "diffusers"} & set(registry)
