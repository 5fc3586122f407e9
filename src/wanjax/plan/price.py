# SPDX-License-Identifier: Apache-2.0
"""The `Pricer` of this package, and `wanjax.price`, which prices any JAX function."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from wanjax.kernels.attention.visits import visits
from wanjax.pricing.pricer import Price, Pricer
from wanjax.stores.results import Results
from wanjax.stores.temporary import temp_dir

PRICER = Pricer("attention", "self_attention", visits, Results(), temp_dir)


def price(
    function: Callable[..., Any],
    *shapes: Any,
    mesh: Mapping[str, int] | Mesh | AbstractMesh | None = None,
    chip: str = "v6e-8",
    donate: Sequence[int] = (),
    options: Mapping[str, Any] | None = None,
) -> Price:
    """Price a JAX function on TPUs that may be absent, with the compiler for TPUs.

        mesh = {"dp": 2, "tp": 4}
        x = jax.ShapeDtypeStruct((8192, 4096), "bfloat16", sharding=PartitionSpec("dp"))
        w = jax.ShapeDtypeStruct((4096, 4096), "bfloat16", sharding=PartitionSpec(None, "tp"))
        price = wanjax.price(lambda x, w: jax.nn.relu(x @ w), x, w, mesh=mesh, chip="v6e-8")
        print(price.seconds, price.peak, price.breakdown)

    The function is traced and lowered in this process. The price is stored in the user's cache, so that the compiler
    runs only once for each program.

    Args:
        function: Any function of arrays that JAX can trace.
        shapes: The function's arguments, as trees of `jax.ShapeDtypeStruct`. A sharding is a `PartitionSpec`, or a
            `NamedSharding` on any mesh with these axes. An array without a sharding is replicated.
        mesh: The sizes of the mesh axes by name; None for one axis, `chips`, over the whole slice.
        chip: The name of the slice, such as v6e-8.
        donate: The indices of the arguments whose buffers the results may reuse.
        options: Compiler options of XLA; None for its defaults.

    Returns:
        The bytes and the seconds of one run on one device. `seconds` is None if the program does not fit in memory.

    Raises:
        WanjaxError: The slice is unknown, the mesh does not use all its chips, or the compiler libtpu is missing.
        CompilerError: The program does not compile.
    """
    return PRICER.price(function, *shapes, mesh=mesh, chip=chip, donate=donate, options=options)
