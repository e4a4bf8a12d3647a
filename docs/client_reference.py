"""Generate client.md from the code of ``forebay.client``: ``make docs``. A test compares them."""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from field_texts import field_texts

from forebay import client
from forebay.client import model, slime, tensors, tinker
from forebay.client.sample_writer import outbox, protocol
from forebay.core import errors as core_errors
from forebay.core import ids, parts, weight_versions
from forebay.core.errors import ForebayError

PAGE = Path(__file__).parent / "client.md"
WIDTH = 110
CLIENTS = (client.BufferClient, client.AsyncBufferClient, client.MixedClient)
WRITERS = (client.SampleWriter, client.AsyncSampleWriter, client.Limits)
DATA = (
    client.Batch,
    client.Group,
    client.RunStats,
    client.Evaluation,
    model.Alarm,
    client.CheckpointInfo,
    client.CheckpointResult,
    client.RewindResult,
    client.Rows,
    client.Image,
    client.WeightUpdate,
    client.EnginePause,
)
OWN_ERRORS = (client.ServerUnreachable, client.ClientClosed, client.SamplesRefused, client.WriterClosed)
FUNCTIONS = (tensors.collate, tensors.rows, tensors.numpy_arrays, slime.generate_rollout, slime.close, tinker.datums)
TYPES = (
    (model, "Row"),
    (model, "BatchLike"),
    (ids, "InstanceId"),
    (weight_versions, "PauseMode"),
    (outbox, "Sample"),
    (protocol, "Encoding"),
    (protocol, "OnRefused"),
    (tensors, "Side"),
)
PUBLIC = {"Limits": client.Limits}
"""Public names that differ from the name of the class."""

HEAD = """# The client, method by method

Every method and field of `forebay.client`, for when you need a signature, a default or an error. For how to use them
together, see [trainers.md](trainers.md); for tensors, [tensors.md](tensors.md); for slime, [slime.md](slime.md);
for Tinker, [tinker.md](tinker.md).

Names that end in `_s` are seconds, names that end in `_bytes` are bytes. `make docs` generates this page from the code.

"""


def page() -> str:
    """The whole page."""
    parts = [
        ("Reading", [_class(each) for each in CLIENTS]),
        ("Data", [_class(each) for each in DATA]),
        ("Writing", [_class(each) for each in WRITERS]),
        ("Functions", [_function(each, _import_of(each)) for each in FUNCTIONS]),
        ("Types", [_types()]),
        ("Errors", [_errors()]),
    ]
    text = HEAD + "\n".join(f"## {title}\n\n" + "\n".join(sections) for title, sections in parts)
    return re.sub(r"\n{3,}", "\n\n", text)


def undocumented() -> list[str]:
    """Public classes, methods and fields without a docstring."""
    missing = [function.__name__ for function in FUNCTIONS if not function.__doc__]
    for kind in (*CLIENTS, *DATA, *WRITERS, *OWN_ERRORS):
        own = vars(kind).get("__doc__") or ""
        missing += [] if own and not own.startswith(f"{kind.__name__}(") else [_name(kind)]
        missing += [f"{_name(kind)}.{name}" for name, member in _members(kind) if not inspect.getdoc(member)]
        missing += [f"{_name(kind)}.{field}" for field in _field_names(kind) if field not in field_texts(kind)]
    missing += [name for module, name in TYPES if not _defined(module, name)[1]]
    return missing


def _class(kind: type) -> str:
    constructor = [] if _field_names(kind) else [_signature(kind.__init__, _name(kind))]
    sections = [f"### {_name(kind)}\n", *constructor, _text(inspect.getdoc(kind) or ""), *_attributes(kind)]
    sections += [
        f"#### {_name(kind)}.{name}\n\n{_signature(member, name)}{_text(inspect.getdoc(member) or '')}"
        for name, member in _members(kind)
        if not isinstance(member, property)
    ]
    return "\n".join(sections)


def _attributes(kind: type) -> list[str]:
    """A table of fields and properties, if there are any."""
    texts, types, defaults = field_texts(kind), _annotations(kind), _defaults(kind)
    rows = [(f"`{name}`", _cell(types[name]), defaults[name], texts.get(name, "")) for name in _field_names(kind)]
    rows += [
        (f"`{name}`", _cell(_returned(member.fget)), "", _line(inspect.getdoc(member) or ""))
        for name, member in _members(kind)
        if isinstance(member, property)
    ]
    return [_table(("field", "type", "default", "what it is"), rows)] if rows else []


def _types() -> str:
    """A table of the type aliases in signatures."""
    rows = []
    for module, name in TYPES:
        definition, text = _defined(module, name)
        rows.append((f"`{name}`", _cell(definition), _line(text)))
    return _table(("name", "stands for", "what it is"), rows)


def _function(function: Callable[..., Any], module: str) -> str:
    name = function.__name__
    head = f"### {module.removeprefix('forebay.client.')}.{name}\n\n`from {module} import {name}`\n"
    return f"{head}\n{_signature(function, name)}{_text(inspect.getdoc(function) or '')}"


def _errors() -> str:
    """A table of all errors of the client, and those of the server that docstrings name."""
    texts = "".join(inspect.getdoc(member) or "" for kind in (*CLIENTS, *WRITERS) for _, member in _members(kind))
    texts += "".join(inspect.getdoc(each) or "" for each in (*CLIENTS, *WRITERS, *FUNCTIONS))
    known = {**vars(core_errors), **vars(parts)}
    named = {name for name in re.findall(r"``(\w+)``", texts) if _is_error(known.get(name))}
    kinds = [*OWN_ERRORS, *(known[name] for name in sorted(named))]
    rows = [(f"`{each.__name__}`", f"`{each.__module__}`", f"`{each.code}`", _first_line(each)) for each in kinds]
    head = (
        "Each error has a `code`, a `hint` with a remedy and, for a wrong argument, its `field`. The errors of\n"
        "`forebay.client.errors` can also be imported from `forebay.client`. Other errors of a server are raised as\n"
        "the class of `forebay.core.errors` with the same code; [http_api.md](http_api.md#errors) lists them.\n\n"
    )
    return head + _table(("error", "from", "code", "when"), rows)


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, ForebayError)


def _first_line(kind: type) -> str:
    return _line((inspect.getdoc(kind) or "").split("\n\n")[0])


# --- members


def _name(kind: type) -> str:
    return next((name for name, each in PUBLIC.items() if each is kind), kind.__name__)


def _import_of(function: Callable[..., Any]) -> str:
    package = sys.modules[str(function.__module__).rpartition(".")[0]]
    # A name in ``__all__`` of the package is imported from the package, not from the module that defines it.
    is_offered = function.__name__ in getattr(package, "__all__", ())
    return package.__name__ if is_offered else str(function.__module__)


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties, those of Forebay's base classes included, in the order of the code."""
    seen: set[str] = set()
    for each in reversed(
        [base for base in kind.__mro__ if base.__module__.startswith(("forebay.client", "forebay.core.parts"))]
    ):
        for name in vars(each):
            member = inspect.getattr_static(kind, name)
            is_shown = inspect.isfunction(member) or isinstance(member, property) or hasattr(member, "attrname")
            if name.startswith("_") or name in seen or not is_shown:
                continue
            seen.add(name)
            yield name, property(member.func) if hasattr(member, "attrname") else member


def _field_names(kind: type) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    if issubclass(kind, msgspec.Struct):
        return [field.name for field in msgspec.structs.fields(kind)]
    return list(getattr(kind, "_fields", ()))


def _annotations(kind: type) -> dict[str, str]:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        node.target.id: ast.unparse(node.annotation).strip("'")
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _defaults(kind: type) -> dict[str, str]:
    """The default of each field as source code; empty for a required field."""
    if not _field_names(kind):
        return {}
    parameters = inspect.signature(kind).parameters
    return {
        name: "" if parameters[name].default is inspect.Parameter.empty else f"`{_value(parameters[name].default)}`"
        for name in _field_names(kind)
    }


# --- words


def _tree(function: Callable[..., Any]) -> ast.FunctionDef | ast.AsyncFunctionDef:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    assert isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef)
    return tree


def _returned(function: Callable[..., Any]) -> str:
    returns = _tree(function).returns
    written = _type(returns) if returns is not None else "Any"
    return written.removeprefix("Flow[").removesuffix("]") if written.startswith("Flow[") else written


def _type(annotation: ast.expr) -> str:
    """An annotation as source code, with public names and without quotes around names that are imported late."""
    written = re.sub(r"'([\w.]*\.[\w.\[\], ]+)'", r"\1", ast.unparse(annotation)).strip("'")
    for name, kind in PUBLIC.items():
        written = re.sub(rf"\b{kind.__name__}\b", name, written)
    return written


def _signature(function: Callable[..., Any], name: str) -> str:
    """The signature as a code block, with types as in the source and the values of defaults."""
    tree = _tree(function)
    arguments = [*tree.args.posonlyargs, *tree.args.args, tree.args.vararg, *tree.args.kwonlyargs, tree.args.kwarg]
    types = {each.arg: _type(each.annotation) for each in arguments if each and each.annotation}
    shown: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        default = "" if parameter.default is parameter.empty else f" = {_value(parameter.default)}"
        prefix = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        shown.append(f"{prefix}{parameter.name}: {types[parameter.name]}{default}")
    # For a generator decorated as a context manager, the result of the ``with`` block is what it yields.
    is_context = any("contextmanager" in ast.unparse(each) for each in tree.decorator_list)
    is_awaited = isinstance(tree, ast.AsyncFunctionDef) or inspect.iscoroutinefunction(function)
    how = "async " * (is_awaited and is_context) or "await " * is_awaited
    how += "with " * is_context
    returned = _returned(function)
    if is_context:
        returned = returned.partition("[")[2].removesuffix("]")
    result = "" if tree.name == "__init__" else f" -> {returned}"
    line = f"{how}{name}({', '.join(shown)}){result}"
    if len(line) > WIDTH:
        line = f"{how}{name}(\n" + "".join(f"    {each},\n" for each in shown) + f"){result}"
    return f"```python\n{line}\n```\n\n"


def _value(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:_}"
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _defined(module: Any, name: str) -> tuple[str, str]:
    """The definition of ``name`` in the source of ``module``, and the docstring below it."""
    body = ast.parse(inspect.getsource(module)).body
    for node, below in pairwise(body):
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                pass
            case ast.AnnAssign(target=ast.Name(id=found), value=ast.expr() as value) if found == name:
                pass
            case _:
                continue
        match below:
            case ast.Expr(value=ast.Constant(value=str(text))):
                return ast.unparse(value), text
        return ast.unparse(value), ""
    raise LookupError(name)


def _text(docstring: str) -> str:
    """A docstring as Markdown: code and tables of reStructuredText become code blocks."""
    blocks: list[str] = []
    is_code = False
    for block in re.split(r"\n\n", docstring):
        if is_code and block.startswith("    "):
            blocks.append(f"```python\n{textwrap.dedent(block)}\n```")
            continue
        is_code = block.endswith("::")
        if block.startswith("===="):  # a table, whose columns must stay aligned
            blocks.append("```\n" + re.sub(r"``(\w+)``", r"\1    ", block) + "\n```")
        else:
            blocks.append(block[:-1] if is_code else block)
    return "".join(f"{block if block.startswith('```') else _plain(block)}\n\n" for block in blocks if block)


def _plain(text: str) -> str:
    return text.replace("``", "`")


def _line(text: str) -> str:
    return _plain(" ".join(text.split()))


def _cell(code: str) -> str:
    return f"`{code}`".replace("|", "\\|")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE.name} is written\n")
