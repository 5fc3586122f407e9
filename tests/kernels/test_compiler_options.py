# SPDX-License-Identifier: Apache-2.0
"""Options of XLA for each kind of program and each target."""

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.kernels.compiler_options import (
    OPTION_SETS,
    check_option_set,
    conv_options,
    fast_conv_options,
    fast_matmul_options,
    matmul_options,
    scan_options,
)
from wanjax.kernels.target import Target

CPU, GPU = Target("cpu", "cpu"), Target("gpu", "NVIDIA H200")
V5E, V5P, V6E, V7X = (Target("tpu", f"TPU {kind}") for kind in ("v5 lite", "v5", "v6 lite", "7x"))


def for_v6e():
    """Trace for a TPU v6e that need not be present."""
    device = AbstractDevice(V6E.device_kind, 1, "tpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("chips",), abstract_device=device))


def test_compiler_options_depend_on_the_platform():
    """XLA rejects the options of another platform."""
    assert scan_options() == scan_options(CPU) == matmul_options()
    with for_v6e():
        assert scan_options() == scan_options(V6E)
        assert matmul_options() == matmul_options(V6E)
    assert not scan_options(CPU).keys() & scan_options(V6E).keys()


@pytest.mark.parametrize("target", [V5E, V5P, V6E, V7X], ids=str)
def test_the_safe_set_has_only_asynchronous_collectives_and_vmem(target):
    """Half of a v6e's VMEM is as much as a v5p's whole VMEM."""
    assert matmul_options(target).keys() - scan_options(target).keys() == (
        {"xla_tpu_scoped_vmem_limit_kib"} if target == V6E else set()
    )
    assert all("async" in name for name in scan_options(target))


@pytest.mark.parametrize(
    ("target", "has_sparse_cores"), [(V5E, False), (V5P, True), (V6E, True), (V7X, True), (CPU, False), (GPU, False)]
)
def test_the_fast_set_uses_sparse_cores_and_more_vmem(target, has_sparse_cores):
    added = fast_matmul_options(target)
    assert bool(added) is has_sparse_cores
    assert {name for name, value in added.items() if "sparse_core_collective_offload" in name and value == "true"} == {
        f"xla_tpu_enable_sparse_core_collective_offload_{kind}"
        for kind in ("all_gather", "dense_all_to_all")
        if has_sparse_cores
    }
    limit = {"xla_tpu_scoped_vmem_limit_kib"}
    assert added.keys() & matmul_options(target).keys() == (limit if target == V6E else set())
    assert all(int(added[name]) > int(matmul_options(target)[name]) for name in limit & added.keys())


def test_a_single_chip_without_a_mesh_gets_its_options():
    with for_v6e():
        assert fast_matmul_options() == fast_matmul_options(V6E)
    assert fast_matmul_options() == {}


@pytest.mark.parametrize("name", ["quick", "", "Safe"])
def test_unknown_sets_are_refused(name):
    for option_set in OPTION_SETS:
        check_option_set(option_set)
    with pytest.raises(WanjaxError, match=line_with_words(f"{name!r} safe fast")):
        check_option_set(name)


def test_only_tpus_get_reduced_compiler_effort():
    assert conv_options(CPU) == conv_options() == {}
    assert conv_options(V6E) == {"optimization_level": 19}
    assert fast_conv_options(V6E) == {"optimization_level": 29}
    assert fast_conv_options(CPU) == {}
    with for_v6e():
        assert conv_options() == conv_options(V6E)
