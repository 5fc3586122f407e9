# SPDX-License-Identifier: Apache-2.0
"""The formulas of changes of weights: LoRA, LoHa, LoKr and DoRA.

LoRA is B A (Hu et al., 2106.09685), LoHa the elementwise product of two such matrices (Hyeon-Woo et al., 2108.06098),
and LoKr their Kronecker product (Yeh et al., 2309.14859). The matrix of a convolution may have a core between its
factors, by Tucker's decomposition. DoRA sets the norm of each row, or column, of the changed weight (Liu et al.,
2402.09353).
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import numpy as np

from wanjax.converters.transforms import Shape

Shapes = Mapping[str, Shape]  # those of a change's tensors, by the role of each
Arrays = Mapping[str, np.ndarray]


class Matrix(NamedTuple):
    """A matrix, or a convolution's kernel, that a file holds whole or as a product; the fields are roles of tensors.

    It is left [rows, rank] · right [rank, columns, ...]. With a core [rank, rank, ...] left is [rank, rows], but for
    `upright` ones. `diagonal` [rank] scales the rows of right.
    """

    left: str
    right: str
    core: str = ""
    whole: str = ""
    diagonal: str = ""
    upright: bool = False

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.whole, self.left, self.right, self.core, self.diagonal)))

    def is_complete(self, roles: Collection[str]) -> bool:
        """Return whether these roles make a whole matrix, or both its factors."""
        held = set(roles) & set(self.roles)
        return held == {self.whole} if self.whole in held else {self.left, self.right} <= held

    def rank(self, shapes: Shapes) -> int | None:
        """Return the rank of the product; None for a whole matrix."""
        return None if self.whole in shapes else (shapes[self.right] or (0,))[0]

    def shape(self, shapes: Shapes) -> Shape:
        """Return the shape of the matrix; empty if the factors do not fit each other."""
        if self.whole in shapes:
            return shapes[self.whole]
        left, right, core = shapes[self.left], shapes[self.right], shapes.get(self.core)
        if min(len(left), len(right)) < 2 or math.prod(shapes.get(self.diagonal, right[:1])) != right[0]:
            return ()
        if core is None:
            return (left[0], *right[1:]) if math.prod(left[1:]) == right[0] else ()
        rank, rows = left[:2][:: -1 if self.upright else 1]
        flat = math.prod(left[2:]) == 1 and math.prod(right[2:]) == 1
        return (rows, right[1], *core[2:]) if flat and core[:2] == (rank, right[0]) else ()

    def value(self, arrays: Arrays) -> np.ndarray:
        """Return the matrix, given tensors of shapes that fit."""
        if self.whole in arrays:
            return arrays[self.whole]
        left, right, core = arrays[self.left], arrays[self.right], arrays.get(self.core)
        left, flat = left.reshape(left.shape[0], -1), right.reshape(right.shape[0], -1)
        if self.diagonal in arrays:
            flat = flat * arrays[self.diagonal].reshape(-1, 1)
        if core is None:
            return (left @ flat).reshape(len(left), *right.shape[1:])
        rows = np.tensordot(left.T if self.upright else left, core, (0, 0))  # [rows, rank, ...]
        return np.moveaxis(np.tensordot(flat, rows, (0, 1)), 0, 1)


class Formula(NamedTuple):
    """A way to make a change of one matrix or two. The functions combine their shapes, and their values."""

    name: str
    matrices: tuple[Matrix, ...]
    shapes: Callable[..., Shape]
    values: Callable[..., np.ndarray]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(role for matrix in self.matrices for role in matrix.roles)

    def is_complete(self, roles: Collection[str]) -> bool:
        """Return whether these roles make a change."""
        return all(matrix.is_complete(roles) for matrix in self.matrices)

    def rank(self, shapes: Shapes) -> int | None:
        """Return the rank that divides alpha: the rank of the last product; None without a product."""
        ranks = [matrix.rank(shapes) for matrix in self.matrices]
        return next((rank for rank in reversed(ranks) if rank is not None), None)

    def shape(self, shapes: Shapes) -> Shape:
        """Return the shape of the change; empty if the tensors do not fit each other."""
        each = [matrix.shape(shapes) for matrix in self.matrices]
        return self.shapes(*each) if all(each) else ()

    def product(self, arrays: Arrays) -> np.ndarray:
        """Return the change, given tensors of shapes that fit."""
        return self.values(*(matrix.value(arrays) for matrix in self.matrices))


def _same(first: Shape, second: Shape) -> Shape:
    return first if first == second else ()


def _kronecker_shape(first: Shape, second: Shape) -> Shape:
    if len(first) != 2 or len(second) < 2:
        return ()
    return (first[0] * second[0], first[1] * second[1], *second[2:])


def _kronecker(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the Kronecker product of a matrix, and a matrix or a kernel."""
    flat = second.reshape(len(second), -1)
    product = first[:, None, :, None] * flat[None, :, None, :]
    return product.reshape(_kronecker_shape(first.shape, second.shape))


def _alone(only):
    return only


LORA = Formula("LoRA", (Matrix("up", "down", "mid", diagonal="diagonal", upright=True),), _alone, _alone)
LOHA = Formula(
    "LoHa",
    (Matrix("hada_w1_a", "hada_w1_b", "hada_t1"), Matrix("hada_w2_a", "hada_w2_b", "hada_t2")),
    _same,
    lambda first, second: np.multiply(first, second, out=first),
)
LOKR = Formula(
    "LoKr",
    (Matrix("lokr_w1_a", "lokr_w1_b", whole="lokr_w1"), Matrix("lokr_w2_a", "lokr_w2_b", "lokr_t2", whole="lokr_w2")),
    _kronecker_shape,
    _kronecker,
)
DIFF = Formula("diff", (Matrix("", "", whole="diff"),), _alone, _alone)
FORMULAS = (LORA, LOHA, LOKR, DIFF)


def magnitude_axis(magnitude: Shape, weight: Shape, *, of_rows: bool) -> int | None:
    """Return the axis of a weight whose slices have these norms, 0 for rows and 1 for columns; None if neither.

    of_rows: PEFT's are of rows alone, with their axis first or second; LyCORIS has that of the weight.
    """
    if len(weight) < 2 or not magnitude:
        return None
    size, long = math.prod(magnitude), [axis for axis, length in enumerate(magnitude) if length != 1]
    if size == weight[0] and (of_rows or long in ([0], [])):
        return 0
    return 1 if not of_rows and size == weight[1] and long in ([1], []) else None


def set_norms(x: np.ndarray, norms: np.ndarray, axis: int) -> None:
    """Scale the rows of a weight, or its columns, in place, so that they have these norms; zeros stay zeros."""
    y = x.reshape(*x.shape[:2], -1)
    squares = np.einsum("ijk,ijk->j" if axis else "ijk,ijk->i", y, y, dtype=np.float64)
    scales = np.divide(norms.ravel(), np.sqrt(squares), out=np.zeros(len(squares)), where=squares > 0)
    x *= scales.astype(np.float32).reshape([-1 if i == axis else 1 for i in range(x.ndim)])
