# SPDX-License-Identifier: Apache-2.0
"""The precisions of a transformer's projections: the format of the weights, and the format of the inputs of a product.

This module does not import JAX, so that `--help` is quick.
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
        weights: The format of quantized weights; None means that weights are not quantized.
        activations: The format to which each token is quantized before a product; None means that tokens are not
            quantized.
    """

    name: str
    weights: "NumberFormat | None" = None
    activations: "NumberFormat | None" = None

    def __str__(self) -> str:
        return self.name

    @property
    def quantizes(self) -> bool:
        """Whether weights are quantized to 8 bits."""
        return self.weights is not None

    @property
    def rotates(self) -> bool:
        """Whether groups of channels are rotated before the quantization.

        Int8 needs the rotation. A token's largest number determines the step of the quantization. Without the rotation,
        most numbers of the token would be smaller than a step. 8-bit floats need no rotation, because their steps are
        smaller for small numbers.
        """
        return self.activations == "int8"

    @classmethod
    def of(cls, value: Any) -> "Precision":
        """Return the precision with a name. Raises WanjaxError if the name is unknown.

        Args:
            value: The name, or a precision.
        """
        precision = PRECISIONS.get(str(value)) if isinstance(value, str | cls) else None
        if precision is None:
            raise WanjaxError(f"precision must be {' or '.join(PRECISIONS)}, got {repr_short(value)}")
        return precision


UNQUANTIZED = Precision("none")
PRECISIONS = {
    precision.name: precision
    for precision in (
        UNQUANTIZED,
        Precision("int8", "int8", "int8"),
        Precision("int8-weights", "int8"),
        Precision("fp8", "fp8", "fp8"),
        Precision("fp8-weights", "fp8"),
    )
}
STORABLE_PRECISIONS = tuple(name for name, precision in PRECISIONS.items() if precision.weights == "int8")
"""The precisions in which a converted checkpoint can store its weights."""
