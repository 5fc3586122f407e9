# SPDX-License-Identifier: Apache-2.0
"""Options of XLA for each kind of program and each target."""

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from tests.support.words import naming
from wanjax.errors import WanjaxError
from wanjax.kernels.compiler_options import (
    SETS,
    check_set,
    convolutions,
    fast_convolutions,
    fast_products,
    products,
    scanned,
)
from wanjax.kernels.target import Target

CPU, GPU = Target("cpu", "cpu"), Target("gpu", "NVIDIA H200")
V5E, V5P, V6E, V7X = (Target("tpu", f"TPU {kind}") for kind in ("v5 lite", "v5", "v6 lite", "7x"))


def for_v6e():
    """Trace for a TPU v6e that need not be present."""
    device = AbstractDevice(V6E.kind, 1, "tpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("chips",), abstract_device=device))


def test_options_are_those_of_the_target():
    """XLA rejects the options of another platform."""
    assert scanned() == scanned(CPU) == products()
    with for_v6e():
        assert scanned() == scanned(V6E)
        assert products() == products(V6E)
    assert not scanned(CPU).keys() & scanned(V6E).keys()


@pytest.mark.parametrize("on", [V5E, V5P, V6E, V7X], ids=str)
def test_the_safe_set_has_asynchronous_collectives_and_vmem_alone(on):
    """Half of a v6e's VMEM is as much as a v5p's whole VMEM."""
    assert products(on).keys() - scanned(on).keys() == ({"xla_tpu_scoped_vmem_limit_kib"} if on == V6E else set())
    assert all("async" in name for name in scanned(on))


@pytest.mark.parametrize(
    ("on", "has"), [(V5E, False), (V5P, True), (V6E, True), (V7X, True), (CPU, False), (GPU, False)]
)
def test_the_fast_set_adds_the_sparse_cores_of_chips_that_have_them_and_more_vmem_on_v6e(on, has):
    added = fast_products(on)
    assert bool(added) is has
    assert {name for name, value in added.items() if "sparse_core_collective_offload" in name and value == "true"} == {
        f"xla_tpu_enable_sparse_core_collective_offload_{kind}" for kind in ("all_gather", "dense_all_to_all") if has
    }
    limit = {"xla_tpu_scoped_vmem_limit_kib"}
    assert added.keys() & products(on).keys() == (limit if on == V6E else set())
    assert all(int(added[name]) > int(products(on)[name]) for name in limit & added.keys())


def test_a_single_chip_without_a_mesh_is_asked_for_its_options():
    with for_v6e():
        assert fast_products() == fast_products(V6E)
    assert fast_products() == {}


@pytest.mark.parametrize("name", ["quick", "", "Safe"])
def test_unknown_sets_are_refused(name):
    for known in SETS:
        check_set(known)
    with pytest.raises(WanjaxError, match=naming(f"{name!r} safe fast")):
        check_set(name)


def test_only_tpus_are_asked_to_spare_effort():
    assert convolutions(CPU) == convolutions() == {}
    assert convolutions(V6E) == {"optimization_level": 19}
    assert fast_convolutions(V6E) == {"optimization_level": 29}
    assert fast_convolutions(CPU) == {}
    with for_v6e():
        assert convolutions() == convolutions(V6E)
