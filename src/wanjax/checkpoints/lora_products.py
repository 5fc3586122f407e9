# SPDX-License-Identifier: Apache-2.0
"""The formulas of LoRA, LoHa, LoKr and DoRA.

LoRA is a product B A (Hu et al., 2106.09685). LoHa is the elementwise product of two matrices B A (Hyeon-Woo et al.,
2108.06098). LoKr is the Kronecker product of two matrices, each with or without factors (Yeh et al., 2309.14859). The
matrix of a convolution may have a core between its factors (Tucker decomposition). DoRA sets the norm of each row or
column of the changed weight (Liu et al., 2402.09353).
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import numpy as np

from wanjax.converters.transforms import Shape

Shapes = Mapping[str, Shape]  # the shapes of a change's tensors, by role
Arrays = Mapping[str, np.ndarray]


class Matrix(NamedTuple):
    """A matrix, or a convolution's kernel. A file stores it as one tensor or as factors.

    The product is left [rows, rank] · right [rank, columns, ...]. If there is a core, the file stores left transposed,
    as [rank, rows], unless `is_left_untransposed` is set.

    Args:
        left: The role of the left factor.
        right: The role of the right factor.
        core: The role of the core [rank, rank, ...], or "".
        unfactored: The role of the tensor with the whole matrix, or "".
        diagonal: The role of a vector [rank] that scales the rows of right, or "".
        is_left_untransposed: Whether the file stores left as [rows, rank] even if there is a core.
    """

    left: str
    right: str
    core: str = ""
    unfactored: str = ""
    diagonal: str = ""
    is_left_untransposed: bool = False

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.unfactored, self.left, self.right, self.core, self.diagonal)))

    def is_complete(self, roles: Collection[str]) -> bool:
        """Return whether tensors with these roles form the matrix: the whole matrix, or both factors."""
        present_roles = set(roles) & set(self.roles)
        return (
            present_roles == {self.unfactored}
            if self.unfactored in present_roles
            else {self.left, self.right} <= present_roles
        )

    def rank(self, shapes: Shapes) -> int | None:
        """Return the rank of the product; None for a matrix without factors."""
        return None if self.unfactored in shapes else (shapes[self.right] or (0,))[0]

    def shape(self, shapes: Shapes) -> Shape:
        """Return the shape of the matrix; empty if the shapes of the factors do not match."""
        if self.unfactored in shapes:
            return shapes[self.unfactored]
        left, right, core = shapes[self.left], shapes[self.right], shapes.get(self.core)
        if min(len(left), len(right)) < 2 or math.prod(shapes.get(self.diagonal, right[:1])) != right[0]:
            return ()
        if core is None:
            return (left[0], *right[1:]) if math.prod(left[1:]) == right[0] else ()
        rank, rows = left[:2][:: -1 if self.is_left_untransposed else 1]
        is_flat = math.prod(left[2:]) == 1 and math.prod(right[2:]) == 1
        return (rows, right[1], *core[2:]) if is_flat and core[:2] == (rank, right[0]) else ()

    def value(self, arrays: Arrays) -> np.ndarray:
        """Compute the matrix from tensors whose shapes match."""
        if self.unfactored in arrays:
            return arrays[self.unfactored]
        left, right, core = arrays[self.left], arrays[self.right], arrays.get(self.core)
        left, right_matrix = left.reshape(left.shape[0], -1), right.reshape(right.shape[0], -1)
        if self.diagonal in arrays:
            right_matrix = right_matrix * arrays[self.diagonal].reshape(-1, 1)
        if core is None:
            return (left @ right_matrix).reshape(len(left), *right.shape[1:])
        rows = np.tensordot(left.T if self.is_left_untransposed else left, core, (0, 0))  # [rows, rank, ...]
        return np.moveaxis(np.tensordot(right_matrix, rows, (0, 1)), 0, 1)


class Formula(NamedTuple):
    """A formula that computes a change from one or two matrices. `combine_shapes` takes their shapes, and
    `combine_values` takes their values."""

    name: str
    matrices: tuple[Matrix, ...]
    combine_shapes: Callable[..., Shape]
    combine_values: Callable[..., np.ndarray]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(role for matrix in self.matrices for role in matrix.roles)

    def is_complete(self, roles: Collection[str]) -> bool:
        """Return whether tensors with these roles form a change."""
        return all(matrix.is_complete(roles) for matrix in self.matrices)

    def rank(self, shapes: Shapes) -> int | None:
        """Return the rank that divides alpha: the rank of the last product. Returns None without a product."""
        ranks = [matrix.rank(shapes) for matrix in self.matrices]
        return next((rank for rank in reversed(ranks) if rank is not None), None)

    def shape(self, shapes: Shapes) -> Shape:
        """Return the shape of the change; empty if the shapes of the tensors do not match."""
        matrix_shapes = [matrix.shape(shapes) for matrix in self.matrices]
        return self.combine_shapes(*matrix_shapes) if all(matrix_shapes) else ()

    def product(self, arrays: Arrays) -> np.ndarray:
        """Compute the change from tensors whose shapes match."""
        return self.combine_values(*(matrix.value(arrays) for matrix in self.matrices))


def _equal_shape(first: Shape, second: Shape) -> Shape:
    return first if first == second else ()


def _kronecker_shape(first: Shape, second: Shape) -> Shape:
    if len(first) != 2 or len(second) < 2:
        return ()
    return (first[0] * second[0], first[1] * second[1], *second[2:])


def _kronecker(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the Kronecker product of a matrix with a matrix or kernel."""
    flat = second.reshape(len(second), -1)
    product = first[:, None, :, None] * flat[None, :, None, :]
    return product.reshape(_kronecker_shape(first.shape, second.shape))


def _identity(value):
    return value


LORA = Formula(
    "LoRA", (Matrix("up", "down", "mid", diagonal="diagonal", is_left_untransposed=True),), _identity, _identity
)
LOHA = Formula(
    "LoHa",
    (Matrix("hada_w1_a", "hada_w1_b", "hada_t1"), Matrix("hada_w2_a", "hada_w2_b", "hada_t2")),
    _equal_shape,
    lambda first, second: np.multiply(first, second, out=first),
)
LOKR = Formula(
    "LoKr",
    (
        Matrix("lokr_w1_a", "lokr_w1_b", unfactored="lokr_w1"),
        Matrix("lokr_w2_a", "lokr_w2_b", "lokr_t2", unfactored="lokr_w2"),
    ),
    _kronecker_shape,
    _kronecker,
)
DIFF = Formula("diff", (Matrix("", "", unfactored="diff"),), _identity, _identity)
FORMULAS = (LORA, LOHA, LOKR, DIFF)


def magnitude_axis(norms_shape: Shape, weight_shape: Shape, *, is_row_norm: bool) -> int | None:
    """Return the axis of a weight along which there is a norm for each index: 0 for rows, 1 for columns.

    Returns None if the norms do not fit.

    With `is_row_norm`, as in PEFT, each row has a norm, and the shape of the norms does not matter. Otherwise, as in
    LyCORIS, the shape of the norms shows their axis.
    """
    if len(weight_shape) < 2 or not norms_shape:
        return None
    size, long_axes = math.prod(norms_shape), [axis for axis, length in enumerate(norms_shape) if length != 1]
    if size == weight_shape[0] and (is_row_norm or long_axes in ([0], [])):
        return 0
    return 1 if not is_row_norm and size == weight_shape[1] and long_axes in ([1], []) else None


def set_norms(x: np.ndarray, norms: np.ndarray, axis: int) -> None:
    """Scale the rows or columns of a weight in place to these norms; zero rows stay zero."""
    flat = x.reshape(*x.shape[:2], -1)
    squared_norms = np.einsum("ijk,ijk->j" if axis else "ijk,ijk->i", flat, flat, dtype=np.float64)
    scales = np.divide(norms.ravel(), np.sqrt(squared_norms), out=np.zeros(len(squared_norms)), where=squared_norms > 0)
    x *= scales.astype(np.float32).reshape([-1 if i == axis else 1 for i in range(x.ndim)])
