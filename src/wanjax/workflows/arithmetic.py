# SPDX-License-Identifier: Apache-2.0
"""Compute the small expressions of a workflow's nodes, such as `floor(a * b) + 1`.

Python's parser parses an expression. Only the operators and functions in the tables of this module are computed. No
part is evaluated as Python code.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from wanjax.errors import WanjaxError, repr_short

MAX_LENGTH = 500  # the maximum number of characters of an expression
MAX_DEPTH = 50  # the maximum depth of nested operators
MAX_NUMBER = 2.0**63
BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    # the power of floats, because a power of integers may be huge
    ast.Pow: lambda base, exponent: math.pow(base, exponent),
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil": math.ceil,
    "float": float,
    "floor": math.floor,
    "int": int,
    "log": math.log,
    "log2": math.log2,
    "max": max,
    "min": min,
    # of a float, because rounding an integer computes a power of ten, which may be huge
    "round": lambda number, *digits: round(float(number), *digits),
    "sqrt": math.sqrt,
}


def compute(expression: str, values: Mapping[str, float]) -> float | int | bool:
    """Compute an expression of numbers.

    Args:
        expression: The text, with names of values.
        values: Numbers by name.

    Raises:
        WanjaxError: The expression is not arithmetic, or it has no value.
    """
    if len(expression) > MAX_LENGTH:
        raise WanjaxError(f"the expression {repr_short(expression)} is longer than {MAX_LENGTH} characters")
    try:
        return _compute(ast.parse(expression.strip(), mode="eval").body, values, 0)
    except (ArithmeticError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        raise WanjaxError(f"the expression {repr_short(expression)} has no value: {error}") from error


def _compute(part: ast.expr, values: Mapping[str, float], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError("its operators are nested too deep")

    def inner(part: ast.expr) -> Any:
        return _compute(part, values, depth + 1)

    match part:
        case ast.Constant(value=bool() | int() | float() as value):
            pass
        case ast.Name(id=name) if name in values:
            value = values[name]
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in BINARY:
            value = BINARY[type(operation)](inner(left), inner(right))
        case ast.UnaryOp(op=operation, operand=operand) if type(operation) in UNARY:
            value = UNARY[type(operation)](inner(operand))
        case ast.BoolOp(op=ast.And(), values=parts):
            value = all(inner(part) for part in parts)
        case ast.BoolOp(op=ast.Or(), values=parts):
            value = any(inner(part) for part in parts)
        case ast.Compare(left=left, ops=[operation], comparators=[right]) if type(operation) in COMPARISONS:
            value = COMPARISONS[type(operation)](inner(left), inner(right))
        case ast.IfExp(test=test, body=body, orelse=otherwise):
            value = inner(body) if inner(test) else inner(otherwise)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            value = FUNCTIONS[name](*map(inner, arguments))
        case _:
            raise ValueError(f"{ast.unparse(part)} is not arithmetic")
    if abs(value) > MAX_NUMBER:
        raise ValueError("a number in it is too large")
    return value
