"""Working out arithmetic that a model wrote: numbers and operators, nothing else, and nothing that takes long."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

MAX_LENGTH = 500
MAX_BITS = 8_192
"""Of a whole number, also in between: a power of a power would take all memory."""

MAX_DIGITS = 400
"""That a number is rounded to: for each a power of ten is worked out."""

Number = int | float


def _round(number: Number, num_digits: int | None = None) -> Number:
    if num_digits is not None and abs(num_digits) > MAX_DIGITS:
        raise ValueError(f"a number can be rounded to {MAX_DIGITS} digits, no more")
    return round(number, num_digits)


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{function.__name__: function for function in (abs, max, min)},
    "round": _round,
    **{name: getattr(math, name) for name in ("ceil", "cos", "exp", "floor", "log", "sin", "sqrt", "tan")},
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def evaluate(expression: str) -> str:
    """The value of ``expression`` as text. Raises ``ValueError`` that says what is wrong with it."""
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression is longer than {MAX_LENGTH} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"not an arithmetic expression: {expression!r}") from None
    except (ArithmeticError, TypeError) as error:
        raise ValueError(f"{expression!r} has no value: {error}") from None
    return str(value)


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _checked(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.BinOp(left, operation, right) if type(operation) in _BINARY:
            return _binary(operation, _value(left), _value(right))
        case ast.UnaryOp(operation, operand) if type(operation) in _UNARY:
            return _checked(_UNARY[type(operation)](_value(operand)))
        case ast.Call(ast.Name(id=name), arguments, []) if name in _FUNCTIONS:
            return _checked(_FUNCTIONS[name](*map(_value, arguments)))
    raise ValueError(f"only numbers, + - * / // % **, brackets and {', '.join([*_FUNCTIONS, *_CONSTANTS])} can be used")


def _binary(operation: ast.operator, left: Number, right: Number) -> Number:
    is_power = isinstance(operation, ast.Pow) and isinstance(left, int) and isinstance(right, int)
    if is_power and right > 0 and int(left).bit_length() * right > MAX_BITS:
        raise ValueError("the power is too large")
    return _checked(_BINARY[type(operation)](left, right))


def _checked(value: Any) -> Number:
    if not isinstance(value, int | float) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError("the value is not a finite real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError("the value is too large")
    return value
