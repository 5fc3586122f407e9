# SPDX-License-Identifier: Apache-2.0
"""The price of anybody's function: `wanjax.price`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from wanjax.pricing.chips import described, find_slice
from wanjax.pricing.lowering import Lowering
from wanjax.pricing.priced import Priced, check_priceable, price_all


def price(
    function: Callable[..., Any],
    *shapes: Any,
    mesh: Mapping[str, int] | Mesh | AbstractMesh | None = None,
    chip: str = "v6e-8",
    donate: Sequence[int] = (),
    options: Mapping[str, Any] | None = None,
) -> Priced:
    """Prices a function of JAX on TPUs that need not be present, with their own compiler.

        mesh = {"dp": 2, "tp": 4}
        x = jax.ShapeDtypeStruct((8192, 4096), "bfloat16", sharding=PartitionSpec("dp"))
        w = jax.ShapeDtypeStruct((4096, 4096), "bfloat16", sharding=PartitionSpec(None, "tp"))
        found = wanjax.price(lambda x, w: jax.nn.relu(x @ w), x, w, mesh=mesh, chip="v6e-8")
        print(found.seconds, found.peak, found.breakdown)

    `shapes` are the arguments, trees of `jax.ShapeDtypeStruct`. A sharding is a `PartitionSpec`, or a `NamedSharding`
    on any mesh with these axes; without one an array is replicated. `mesh` has the sizes of the axes: one axis,
    `chips`, over the whole slice if it is None. `donate` are the indices of the arguments whose buffers the results may
    reuse, and `options` those of XLA. The function is traced and lowered here; the price is kept, so that the compiler
    runs once.

    Raises WanjaxError if the slice is unknown, the mesh does not fill it, or the compiler, libtpu, is missing;
    CompilerError if the program does not compile. A program that is too large has no `seconds`.
    """
    place = find_slice(chip)
    axes = mesh.shape if isinstance(mesh, Mesh | AbstractMesh) else mesh
    on = described(place, None if axes is None else dict(axes))
    check_priceable()
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_on(on, x)), shapes)
    [found] = price_all(place, [Lowering(function, arguments, tuple(donate), options)])
    return found


def _on(mesh: AbstractMesh, x: Any) -> NamedSharding:
    """Returns the sharding of a shape on a mesh."""
    given = getattr(x, "_sharding", None)  # `sharding` fails for a PartitionSpec without a mesh of real devices
    spec = given.spec if isinstance(given, NamedSharding) else given
    return NamedSharding(mesh, spec if isinstance(spec, PartitionSpec) else PartitionSpec())
