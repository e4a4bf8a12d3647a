"""Globals of a generator file that ``run_rollout`` sets and a hook reads: hooks run in another process, and see none.

Found in the source text alone, in one file: what is set by an imported module is not looked at. A function that both
fills and reads a global is left alone: it keeps a cache, which every process fills for itself.
"""

import ast
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
NAMED = (ast.FunctionDef, ast.AsyncFunctionDef)

START = "run_rollout"
REMEDY = (
    "hooks run in another process and never see it: "
    "put what they need into the sample, such as item['extra_info']['my_value']"
)
FILLERS = frozenset(
    {
        *("append", "appendleft", "extend", "extendleft", "insert", "add", "update", "setdefault"),
        *("subtract", "put", "put_nowait", "set"),
    }
)
"""Methods of containers by which something comes in."""
TAKERS = frozenset({"pop", "popleft", "popitem", "get_nowait"})
"""Those that give something back and change the container all the same."""
CHANGERS = frozenset(
    {
        *("remove", "discard", "clear", "sort", "reverse", "rotate"),
        *("difference_update", "intersection_update", "symmetric_difference_update"),
    }
)
"""Others that change it."""
METHODS = FILLERS | TAKERS | CHANGERS


@dataclass(frozen=True, slots=True)
class SharedGlobal:
    """One of them. ``setter`` is the function that sets it, with the lines of the first read and the first set."""

    hook: str
    name: str
    read_line: int
    setter: str
    set_line: int

    def __str__(self) -> str:
        by = START if self.setter == START else f"{self.setter}, which {START} calls"
        where = f"{self.hook} reads the global {self.name} (line {self.read_line}), which {START} sets"
        return f"{where} (line {self.set_line}, in {by}); {REMEDY}"


@dataclass(slots=True)
class _Definition:
    """What one name of the module stands for: whom it may call, and which globals it reads and sets, with lines."""

    refers_to: set[str] = field(default_factory=set)
    reads: dict[str, int] = field(default_factory=dict)
    sets: dict[str, int] = field(default_factory=dict)
    fills: set[str] = field(default_factory=set)

    def note(self, name: str, line: int, *, reads: bool = False, sets: bool = False, fills: bool = False) -> None:
        """Something is done to a global; of several lines the first one counts."""
        for is_done, lines in ((reads, self.reads), (sets or fills, self.sets)):
            if is_done:
                lines[name] = min(line, lines.get(name, line))
        if fills:
            self.fills.add(name)


def shared_globals(source: str | bytes, hooks: Iterable[str]) -> list[SharedGlobal]:
    """Those of a file's ``source``, by hook and name. ``hooks`` are the names that hooks may have.

    Raises ``SyntaxError``.
    """
    module = _Module(ast.parse(source))
    setters: dict[str, tuple[str, int]] = {}
    for name, whose, line in module.all_sets(START):
        setters.setdefault(name, (whose, line))
    found = []
    for hook in hooks:
        reads: dict[str, int] = {}
        for name, line in module.all_reads(hook):
            reads.setdefault(name, line)
        found += [SharedGlobal(hook, name, reads[name], *setters[name]) for name in sorted(setters.keys() & reads)]
    return found


class _Module:
    """The names that a module defines."""

    def __init__(self, tree: ast.Module) -> None:
        self.definitions: dict[str, _Definition] = {}
        statements = list(_own_statements(tree.body))
        functions = [node for node in statements if isinstance(node, NAMED)]
        self._classes = {node.name: node for node in statements if isinstance(node, ast.ClassDef)}
        self._variables = {name for node in statements for name in _assigned(node)} | _declared_global(tree)
        self._variables -= {*self._classes, *(node.name for node in functions)}
        self._changing = {name: _changing(self._classes[kind]) for name, kind in self._instances(statements)}
        for node in functions:
            self._add(node.name, node)
        for kind in self._classes.values():
            self._add_class(kind)
        for statement in statements:
            # A variable may hold functions: whoever reads it may call them.
            if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                for name in _assigned(statement):
                    self._add(name, statement.value)

    def _instances(self, statements: Iterable[ast.stmt]) -> Iterator[tuple[str, str]]:
        """Variables that hold an object of a class of the module, with that class."""
        for node in statements:
            match node:
                case ast.Assign(value=ast.Call(func=ast.Name(id=kind))) if kind in self._classes:
                    yield from ((name, kind) for name in _assigned(node))
                case _:
                    pass

    def _add(self, name: str, node: ast.AST) -> None:
        definition = self.definitions.setdefault(name, _Definition())
        _Reader(definition, self._variables, self._classes, self._changing).visit(node)

    def _add_class(self, kind: ast.ClassDef) -> None:
        whole = self.definitions.setdefault(kind.name, _Definition())
        for node in [*kind.bases, *kind.decorator_list, *kind.body]:
            if isinstance(node, NAMED):
                # Whoever has the class may call any method of it.
                whole.refers_to.add(f"{kind.name}.{node.name}")
                self._add(f"{kind.name}.{node.name}", node)
            elif isinstance(node, ast.expr):
                self._add(kind.name, node)

    def _reached(self, name: str) -> Iterator[tuple[str, _Definition]]:
        waiting, seen = deque([name]), set[str]()
        while waiting:
            current = waiting.popleft()
            if current in seen or current not in self.definitions:
                continue
            seen.add(current)
            yield current, self.definitions[current]
            waiting += sorted(self.definitions[current].refers_to)

    def all_sets(self, name: str) -> Iterator[tuple[str, str, int]]:
        """Every global that the name, or what it calls, sets: with who does it, and in which line."""
        for whose, definition in self._reached(name):
            yield from ((each, whose, line) for each, line in definition.sets.items())

    def all_reads(self, name: str) -> Iterator[tuple[str, int]]:
        """Every global that the name, or what it calls, reads and does not fill in the same place, with its line."""
        for _, definition in self._reached(name):
            yield from ((each, line) for each, line in definition.reads.items() if each not in definition.fills)


class _Reader(ast.NodeVisitor):
    """Goes through a function or an expression, with everything in it."""

    def __init__(
        self,
        definition: _Definition,
        variables: set[str],
        classes: Mapping[str, ast.ClassDef],
        changing: Mapping[str, set[str]],
    ) -> None:
        self._definition = definition
        self._variables = variables
        self._classes = classes
        self._changing = changing
        self._hidden: list[set[str]] = []
        """Names that functions around this place have of their own."""

    def _visit_function(self, node: Function) -> None:
        self._hidden.append(_locals(node))
        self.generic_visit(node)
        self._hidden.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_function(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_function(node)

    def visit_Name(self, node: ast.Name) -> None:
        name = self._global(node)
        if name is None:
            return
        self._definition.refers_to.add(node.id)
        if name in self._variables:
            self._note(name, node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._visit_part(node, node.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._visit_part(node, node.value)
        self.visit(node.slice)

    def _visit_part(self, node: ast.Attribute | ast.Subscript, whole: ast.expr) -> None:
        target = self._target(node)
        if target is None:
            self.visit(whole)
        else:
            self._note(target, node)
            self._definition.refers_to.add(target.partition(".")[0])

    def visit_Call(self, node: ast.Call) -> None:
        if not self._note_method(node):
            self.visit(node.func)
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            self.visit(argument)

    def _note_method(self, node: ast.Call) -> bool:
        """Note a call of a method that changes a global; false for any other."""
        function = node.func
        target = self._target(function.value) if isinstance(function, ast.Attribute) else None
        if target is None or not isinstance(function, ast.Attribute):
            return False
        method = function.attr
        if method not in METHODS | self._changing.get(target, set()):
            return False
        self._definition.note(target, node.lineno, reads=method in TAKERS, sets=True, fills=method in FILLERS)
        self._definition.refers_to.add(target.partition(".")[0])
        return True

    def _target(self, node: ast.expr) -> str | None:
        """The global whose part, or which itself, an expression is: a variable, or an attribute of a class."""
        path: list[str] = []
        while isinstance(node, ast.Attribute | ast.Subscript):
            if isinstance(node, ast.Attribute):
                path.insert(0, node.attr)
            node = node.value
        name = self._global(node) if isinstance(node, ast.Name) else None
        if name in self._variables:
            return name
        return f"{name}.{path[0]}" if name in self._classes and path else None

    def _global(self, node: ast.Name) -> str | None:
        return None if any(node.id in names for names in self._hidden) else node.id

    def _note(self, name: str, node: ast.Name | ast.Attribute | ast.Subscript) -> None:
        is_store, is_del = isinstance(node.ctx, ast.Store), isinstance(node.ctx, ast.Del)
        self._definition.note(name, node.lineno, reads=not (is_store or is_del), sets=is_del, fills=is_store)


def _changing(kind: ast.ClassDef) -> set[str]:
    """The methods of a class that change its objects."""
    methods = [node for node in kind.body if isinstance(node, NAMED) and node.args.args]
    return {
        method.name for method in methods if any(_is_change(node, method.args.args[0].arg) for node in ast.walk(method))
    }


def _is_change(node: ast.AST, own: str) -> bool:
    """Whether a part of a method stores into, or changes, what the name ``own`` holds."""
    whole: ast.AST = node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
        whole = node.func.value
    elif not isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
        return False
    is_part = isinstance(whole, ast.Attribute | ast.Subscript)
    while isinstance(whole, ast.Attribute | ast.Subscript):
        whole = whole.value
    return is_part and isinstance(whole, ast.Name) and whole.id == own


def _own_statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported, with those below ``if``, ``try``, ``with`` and loops."""
    for node in body:
        yield node
        if not isinstance(node, (*NAMED, ast.ClassDef)):
            for name in ("body", "orelse", "finalbody"):
                yield from _own_statements(getattr(node, name, []))
            for handler in getattr(node, "handlers", []):
                yield from _own_statements(handler.body)


def _assigned(node: ast.stmt) -> list[str]:
    """The names that an assignment binds, or an import of what looks like a variable."""
    match node:
        case ast.ImportFrom(names=aliases):
            return [name for name in (alias.asname or alias.name for alias in aliases) if name.isupper()]
        case ast.Assign(targets=targets):
            pass
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            targets = [target]
        case _:
            targets = []
    return [name.id for each in targets for name in ast.walk(each) if isinstance(name, ast.Name) and _is_store(name)]


def _is_store(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _declared_global(tree: ast.AST) -> set[str]:
    return {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}


def _locals(function: Function) -> set[str]:
    """The names that a function has of its own."""
    arguments = function.args
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    own = {argument.arg for argument in given if argument is not None}
    body = [function.body] if isinstance(function, ast.Lambda) else function.body
    globals_ = set[str]()
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        match node:
            case ast.Global(names=names):
                globals_.update(names)
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                own.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                own.update((alias.asname or alias.name).partition(".")[0] for alias in aliases)
            case ast.ExceptHandler(name=str(name)):
                own.add(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                own.add(name)
            case _:
                pass
        # Functions in it have scopes of their own; comprehensions are taken for a part of it.
        if not isinstance(node, (*NAMED, ast.Lambda, ast.ClassDef)):
            waiting += ast.iter_child_nodes(node)
    return own - globals_
