"""Who judges the agents that a generator file runs, as far as its text tells. Pure."""

import ast
from collections import defaultdict
from collections.abc import Collection, Iterator

JUDGE = 2
"""Its place among the arguments of ``AgentGenerator.run_agent``."""


def needs_agents_folder(tree: ast.Module) -> bool:
    """Whether all that the file runs are agents that a ``Verifier`` judges: false wherever that is in doubt."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    judges = [_judge(call) for call in calls if _name(call.func) == "run_agent"]
    runs_others = any(_name(call.func) == "entry" for call in calls)
    verifiers = _verifiers(tree)
    is_sure = any(map(_imports_verifier, ast.walk(tree))) and bool(judges) and not runs_others
    return is_sure and all(_is_verifier(judge, verifiers) for judge in judges)


def _imports_verifier(node: ast.AST) -> bool:
    """Others may have a class of that name."""
    match node:
        case ast.ImportFrom(module="forebay.generators.agent", names=names):
            return any(each.name == "Verifier" and each.asname is None for each in names)
    return False


def _verifiers(tree: ast.Module) -> set[str]:
    """The names that stand for nothing else."""
    values = defaultdict[str, list[ast.expr | None]](list)
    for name, value in _bound(tree):
        values[name].append(value)
    return {name for name, bound in values.items() if all(_is_verifier(each, ()) for each in bound)}


def _bound(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, None
            case ast.ClassDef(name=name) | ast.alias(name=name, asname=None) | ast.alias(asname=str(name)):
                yield name, None
    plain = {id(node.targets[0]) for node in ast.walk(tree) if isinstance(node, ast.Assign) and len(node.targets) == 1}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in plain:
            yield node.id, None


def _judge(call: ast.Call) -> ast.expr | None:
    named = next((each.value for each in call.keywords if each.arg == "judge"), None)
    return named or (call.args[JUDGE] if len(call.args) > JUDGE else None)


def _is_verifier(value: ast.expr | None, names: Collection[str]) -> bool:
    if isinstance(value, ast.Name):
        return value.id in names
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Verifier"


def _name(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""
