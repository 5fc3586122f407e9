# SPDX-License-Identifier: Apache-2.0
"""How programs are priced here, and the price of anybody's function: `wanjax.price`."""

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
    """Price a function of JAX on TPUs that need not be present, with their own compiler.

        mesh = {"dp": 2, "tp": 4}
        x = jax.ShapeDtypeStruct((8192, 4096), "bfloat16", sharding=PartitionSpec("dp"))
        w = jax.ShapeDtypeStruct((4096, 4096), "bfloat16", sharding=PartitionSpec(None, "tp"))
        found = wanjax.price(lambda x, w: jax.nn.relu(x @ w), x, w, mesh=mesh, chip="v6e-8")
        print(found.seconds, found.peak, found.breakdown)

    The function is traced and lowered here; the price is kept in the user's cache, so that the compiler runs once.

    Args:
        function: Any function of arrays that JAX can trace.
        shapes: Its arguments, trees of `jax.ShapeDtypeStruct`. A sharding is a `PartitionSpec`, or a `NamedSharding` on
            any mesh with these axes; without one an array is replicated.
        mesh: The sizes of the axes; None is one axis, `chips`, over the whole slice.
        chip: The slice, such as v6e-8.
        donate: The indices of the arguments whose buffers the results may reuse.
        options: XLA's.

    Returns:
        The bytes and the seconds of one run on one device. A program that is too large has no `seconds`.

    Raises:
        WanjaxError: The slice is unknown, the mesh does not fill it, or the compiler, libtpu, is missing.
        CompilerError: The program does not compile.
    """
    return PRICER.price(function, *shapes, mesh=mesh, chip=chip, donate=donate, options=options)
