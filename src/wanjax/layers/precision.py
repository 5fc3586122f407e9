# SPDX-License-Identifier: Apache-2.0
"""Precisions. A precision says in which formats the projections of a transformer store their weights and multiply. This
module describes all precisions. The module does not import JAX, so that `--help` is quick.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wanjax.errors import WanjaxError, repr_short

if TYPE_CHECKING:
    from wanjax.kernels.quantized_matmul.formats import NumberFormat


@dataclass(frozen=True)
class Precision:
    """A precision of a transformer's projections.

    Args:
        name: The name of the precision for `load`, options and metadata.
        weights: The format of the weights; None keeps them as floats.
        activations: The format to which each token is quantized before a product; None multiplies in the dtype.
    """

    name: str
    weights: "NumberFormat | None" = None
    activations: "NumberFormat | None" = None

    def __str__(self) -> str:
        return self.name

    @property
    def quantizes(self) -> bool:
        """True if weights have 8 bits."""
        return self.weights is not None

    @property
    def rotates(self) -> bool:
        """True if groups of channels are rotated. Int8 needs the rotation. A token's largest number determines the step
        of quantization, and without the rotation most numbers of the token would be smaller than a step. Floats of 8
        bits need no rotation, because they have fine steps for small numbers.
        """
        return self.activations == "int8"

    @classmethod
    def of(cls, value: Any) -> "Precision":
        """Return the precision with this name. Raises WanjaxError for an unknown name.

        Args:
            value: A name, or a precision.
        """
        precision = PRECISIONS.get(str(value)) if isinstance(value, str | cls) else None
        if precision is None:
            raise WanjaxError(f"precision must be {' or '.join(PRECISIONS)}, got {repr_short(value)}")
        return precision


FLOATS = Precision("none")
PRECISIONS = {
    precision.name: precision
    for precision in (
        FLOATS,
        Precision("int8", "int8", "int8"),
        Precision("int8-weights", "int8"),
        Precision("fp8", "fp8", "fp8"),
        Precision("fp8-weights", "fp8"),
    )
}
STORABLE = tuple(name for name, precision in PRECISIONS.items() if precision.weights == "int8")
"""The precisions in which a converted checkpoint can store its weights."""
