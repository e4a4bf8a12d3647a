"""What can be learnt from a generator's source without running it."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

_BASE_MODULE = "forebay.generators.base"
_ASSIGNED_LITERAL = re.compile(r"""^TASK_TYPE\s*(?::\s*\w+\s*)?=\s*(["'])(?P<value>[^"'\n]*)\1""", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """``task_type`` is the literal assigned to TASK_TYPE, None if there is none or it is computed.

    ``may_define_task_type`` is false when importing the file cannot give it one.
    """

    task_type: str | None
    may_define_task_type: bool
    has_run_rollout: bool
    names_base: bool


def read_facts(source: bytes) -> SourceFacts:
    """Parse ``source``; where it does not parse, find a literal TASK_TYPE by its line."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        match = _ASSIGNED_LITERAL.search(source.decode("utf-8", errors="replace"))
        return SourceFacts(match["value"] if match else None, match is not None, False, False)
    defined = dict(_definitions(tree.body))
    return SourceFacts(
        task_type=_literal(defined.get("TASK_TYPE")),
        may_define_task_type="TASK_TYPE" in defined or "*" in defined,
        has_run_rollout="run_rollout" in defined,
        names_base=any(_imports_base(node) for node in ast.walk(tree)),
    )


def _definitions(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    """Each name that the module's top level binds, with the expression bound to it if it is a plain assignment."""
    for node in body:
        match node:
            case ast.Assign(targets=targets, value=value):
                yield from ((target.id, value) for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield name, value
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, None
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from ((alias.asname or alias.name, None) for alias in aliases)
            case ast.If(body=first, orelse=second) | ast.Try(body=first, orelse=second):
                yield from _definitions(first + second)
            case _:
                pass


def _literal(value: ast.expr | None) -> str | None:
    match value:
        case ast.Constant(value=str(text)):
            return text
        case _:
            return None


def _imports_base(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=aliases):
            return any(alias.name == _BASE_MODULE for alias in aliases)
        case ast.ImportFrom(module="forebay.generators", names=aliases):
            return any(alias.name == "base" for alias in aliases)
        case ast.ImportFrom(module=module, names=aliases) if module == _BASE_MODULE:
            return any(alias.name in ("BaseGenerator", "*") for alias in aliases)
        case _:
            return False
