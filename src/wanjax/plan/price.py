# SPDX-License-Identifier: Apache-2.0
"""The shared `Pricer` of plans, and `wanjax.price`, which prices any JAX function."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from wanjax.errors import WanjaxError, repr_short
from wanjax.kernels.attention.typical_scalars import typical_branch_scalars
from wanjax.kernels.quantized_matmul import MATMUL_SCOPE
from wanjax.pricing.pricer import Price, Pricer
from wanjax.stores.results import ResultCache
from wanjax.stores.temporary import temp_dir

PRICER = Pricer("attention", "self_attention", MATMUL_SCOPE, typical_branch_scalars, ResultCache(), temp_dir)


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
        print(price.seconds, price.peak_bytes, price.breakdown)

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
        WanjaxError: `function` is not a function, an argument has no shape, the slice is unknown, the mesh does not use
            all its chips, or the compiler libtpu is missing.
        CompilerError: The program does not compile.
    """
    plan = "`wanjax plan MODEL` prices a video of a model"
    if not callable(function) or hasattr(
        function, "defaults"
    ):  # a pipeline can be called, but is not a function of arrays
        if isinstance(function, str):
            plan = f"`{shlex.join(['wanjax', 'plan', function])}` prices a video of a model"
        raise WanjaxError(f"price takes a function of arrays that JAX can trace, got {repr_short(function)}: {plan}")
    for leaf in jax.tree.leaves(shapes):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            problem = f"price takes an object with a shape and a dtype for each argument, got {repr_short(leaf)}"
            example = "jax.ShapeDtypeStruct((8192, 4096), 'bfloat16')"
            raise WanjaxError(f"{problem}: give {example}")
    if not isinstance(mesh, Mapping | Mesh | AbstractMesh | None):
        raise WanjaxError(
            f"mesh must be the sizes of axes by name, got {repr_short(mesh)}: give one such as {{'tp': 8}}"
        )
    if not isinstance(donate, Sequence) or isinstance(donate, str | bytes):
        raise WanjaxError(
            f"donate must be a list of indices of arguments, got {repr_short(donate)}: give one such as [0]"
        )
    if not isinstance(options, Mapping | None):
        raise WanjaxError(
            f"options must be a dict of compiler options, got {repr_short(options)}: give names and values"
        )
    return PRICER.price(function, *shapes, mesh=mesh, chip=chip, donate=donate, options=options)
