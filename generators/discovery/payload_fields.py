"""Which fields of a start payload a generator file may read, as far as its text tells. Pure."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

GETTERS = frozenset({"get", "pop", "setdefault"})


@dataclass(frozen=True, slots=True)
class PayloadFields:
    """``read`` are those that the file takes by name out of what ``run_rollout`` is given.

    ``words`` are all identifiers in the file, quoted ones too: a field that is none of them is not read in it.
    """

    read: frozenset[str] = frozenset()
    words: frozenset[str] = frozenset()


NOT_KNOWN = PayloadFields()
"""Of a file that does not parse."""


def read_fields(tree: ast.Module) -> PayloadFields:
    """What the text of a generator file says."""
    payload_names = set(_parameters_of_run_rollout(tree))
    read, words = set[str](), set[str]()
    for node in ast.walk(tree):
        words.update(_words_of(node))
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(field))) if name in payload_names:
                read.add(field)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr=getter), args=[ast.Constant(value=str(field)), *_]
            ) if name in payload_names and getter in GETTERS:
                read.add(field)
            case _:
                pass
    return PayloadFields(frozenset(read), frozenset(words))


def _parameters_of_run_rollout(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "run_rollout":
            yield from (parameter.arg for parameter in node.args.args)


def _words_of(node: ast.AST) -> Iterator[str]:
    # A payload may become the arguments of a function, or the fields of a class: `Config(**data)`.
    match node:
        case ast.Constant(value=str(text)) if text.isidentifier():
            yield text
        case ast.Name(id=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)) | ast.Attribute(attr=name):
            yield name
        case _:
            pass
