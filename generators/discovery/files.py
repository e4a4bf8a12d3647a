"""Finds generator files and reads facts from their source text, without running them."""

import ast
import importlib.machinery
import importlib.metadata
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from forebay.generators.discovery.info import Source
from forebay.generators.discovery.module_loading import PACKAGED_FOLDER, sibling_sources

ENTRY_POINT_GROUP = "forebay.generators"
PATTERN_SUFFIX = "_generator.py"
_BASE_MODULE = "forebay.generators.base"
_ASSIGNED_LITERAL = re.compile(r"""^TASK_TYPE\s*(?::\s*\w+\s*)?=\s*(["'])(?P<value>[^"'\n]*)\1""", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """Facts about a source text. ``task_type`` is the literal assigned to TASK_TYPE; None if missing or computed.

    ``may_define_task_type`` is false if importing the file cannot define TASK_TYPE.
    """

    task_type: str | None
    may_define_task_type: bool
    has_run_rollout: bool
    names_base: bool
    names_input: bool = True
    """Whether it mentions the payload's ``input_file``."""


_NO_FACTS = SourceFacts(task_type=None, may_define_task_type=False, has_run_rollout=False, names_base=False)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A generator file, a file that only lacks a generator's name (not ``fits``), or an unreadable one (``error``)."""

    path: Path
    source: Source
    fits: bool = True
    error: str = ""
    digest: str = ""
    facts: SourceFacts = _NO_FACTS
    digests: dict[str, str] = field(default_factory=dict)


class FileFinder:
    """Searches all places for generators. Not thread-safe.

    Unchanged files are not read again.
    """

    def __init__(self, given: Sequence[Path], working_dir: Path) -> None:
        self._given = list(given)
        self._working_dir = working_dir
        self._read: dict[Path, tuple[tuple[int, ...], str, SourceFacts]] = {}

    def find(self) -> dict[Path, FoundFile]:
        """Return every generator file by its resolved path. A file found twice counts once, as first found."""
        found: dict[Path, FoundFile] = {}
        for file in self._places():
            known = found.get(file.path)
            if known is None or (file.fits and not known.fits):
                found[file.path] = file
        looked_at = (self._look(file) for file in found.values())
        return {file.path: file for file in looked_at if file.fits or _looks_like_a_generator(file.facts)}

    def _places(self) -> Iterator[FoundFile]:
        yield from (file for file in _in_folder(PACKAGED_FOLDER, "built-in") if file.fits)
        for given in self._given:
            yield from _given(self._working_dir / given)
        if (self._working_dir / "generators").is_dir():
            yield from _in_folder(self._working_dir / "generators", "user")
        yield from _installed(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))

    def _look(self, file: FoundFile) -> FoundFile:
        if file.error:
            return file
        try:
            digest, facts = self._digest_and_facts(file.path)
            beside = [(other.name, *self._digest_and_facts(other)) for other in sibling_sources(file.path)]
        except OSError as error:
            return FoundFile(file.path, file.source, file.fits, f"{error}; make it readable for the server")
        # Other generators in the folder are not part of this one's code.
        shared = [each for each in beside if not _looks_like_a_generator(each[2])]
        digests = [(file.path.name, digest), *((name, other) for name, other, _ in shared)]
        together = sha256(repr(digests).encode()).hexdigest()
        return FoundFile(file.path, file.source, file.fits, "", together, facts, dict(digests))

    def _digest_and_facts(self, path: Path) -> tuple[str, SourceFacts]:
        stat = path.stat()
        # More than size and time: an editor may replace the file with one of equal size within a clock tick.
        stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        known = self._read.get(path)
        if known is None or known[0] != stamp:
            text = path.read_bytes()
            known = (stamp, sha256(text).hexdigest(), read_facts(text))
            self._read[path] = known
        return known[1], known[2]


def _looks_like_a_generator(facts: SourceFacts) -> bool:
    return facts.may_define_task_type and facts.has_run_rollout


def _in_folder(folder: Path, source: Source) -> Iterator[FoundFile]:
    for path in sorted(folder.glob("*.py")):
        yield FoundFile(path.resolve(), source, fits=path.name.endswith(PATTERN_SUFFIX))


def _given(path: Path) -> Iterator[FoundFile]:
    if path.is_dir():
        yield from _in_folder(path, "user")
    elif path.is_file():
        yield FoundFile(path.resolve(), "user")
    else:
        yield FoundFile(path, "user", error="no such file or folder; create it, or correct --generators")


def _installed(entry_points: Iterable[importlib.metadata.EntryPoint]) -> Iterator[FoundFile]:
    for entry_point in entry_points:
        path = _module_file(entry_point.module)
        if path is not None:
            yield FoundFile(path.resolve(), "entry-point")
        else:
            problem = (
                f"entry point {entry_point.name!r}: module {entry_point.module!r} not found; reinstall its package"
            )
            yield FoundFile(Path(entry_point.module), "entry-point", error=problem)


def _module_file(name: str) -> Path | None:
    """Return the source file of the installed module ``name``, without importing it or its packages."""
    path: Sequence[str] | None = None
    origin: str | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return None
        path, origin = spec.submodule_search_locations, spec.origin
        if path is not None and depth < len(parts):
            # Iterating over a namespace package's path would look up its parent among the imported modules.
            path = list(getattr(path, "_path", path))
    return Path(origin) if origin and origin.endswith(".py") else None


def _find_spec(name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


def read_facts(source: bytes) -> SourceFacts:
    """Read facts from ``source``. If it does not parse, search for a line that assigns a literal TASK_TYPE."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # The inspection reports the error; the task type decides which starts have to wait for it.
        match = _ASSIGNED_LITERAL.search(source.decode("utf-8", errors="replace"))
        return SourceFacts(match["value"] if match else None, match is not None, False, False)
    defined = dict(_definitions(tree.body))
    return SourceFacts(
        task_type=_literal(defined.get("TASK_TYPE")),
        may_define_task_type="TASK_TYPE" in defined or "*" in defined,
        has_run_rollout="run_rollout" in defined,
        names_base=any(_imports_base(node) for node in ast.walk(tree)),
        names_input=b"input_file" in source,
    )


def _definitions(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield each name bound at the module's top level, with its expression if it is a plain assignment."""
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
        case ast.ImportFrom(module="forebay.generators.agent", names=aliases):
            return any(alias.name == "AgentGenerator" for alias in aliases)
        case ast.ImportFrom(module=module, names=aliases) if module == _BASE_MODULE:
            return any(alias.name in ("BaseGenerator", "*") for alias in aliases)
        case _:
            return False
