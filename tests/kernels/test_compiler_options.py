# SPDX-License-Identifier: Apache-2.0
"""Options of XLA for each kind of program and each target."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from wanjax.kernels.compiler_options import convolutions, products, scanned
from wanjax.kernels.target import Target

CPU, V5E, V5P, V6E = (Target("cpu", "cpu"), *(Target("tpu", f"TPU {kind}") for kind in ("v5 lite", "v5", "v6 lite")))


def for_v6e():
    """Traces for a TPU v6e that need not be present."""
    device = AbstractDevice(V6E.kind, 1, "tpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("chips",), abstract_device=device))


def test_options_are_those_of_the_target():
    """XLA rejects the options of another platform."""
    assert scanned() == scanned(CPU) == products()
    with for_v6e():
        assert scanned() == scanned(V6E)
        assert products() == products(V6E)
    assert not scanned(CPU).keys() & scanned(V6E).keys()


def test_products_use_what_a_chip_has():
    """A v5e has no SparseCores; half of a v6e's VMEM is as much as a v5p's whole VMEM."""
    assert scanned(V5E) == products(V5E)
    assert {name for name, _ in products(V5P).items() - products(V5E).items() if "sparse_core" in name}
    assert products(V6E).keys() - products(V5P).keys() == {"xla_tpu_scoped_vmem_limit_kib"}


def test_only_tpus_are_asked_to_spare_effort():
    assert convolutions(CPU) == convolutions() == {}
    assert convolutions(V6E) == {"optimization_level": 19}
    with for_v6e():
        assert convolutions() == convolutions(V6E)
