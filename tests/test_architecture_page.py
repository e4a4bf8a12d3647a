"""What docs/architecture.md and docs/code_map.md name exists, as does what other pages and docstrings name."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TOPS = (
    "core",
    "telemetry",
    "web",
    "hooks",
    "engines",
    "client",
    "buffer",
    "replay",
    "generators",
    "gateway",
    "workers",
    "server",
)
FOLDERS = sorted({path.parent.relative_to(ROOT) for top in TOPS for path in (ROOT / top).rglob("*.py")})
SOURCES = sorted(path for top in (*TOPS, "examples") for path in (ROOT / top).rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("examples/*/*.md")]
ARCHITECTURE, CODE_MAP = (
    (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("architecture.md", "code_map.md")
)

_CODE = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"``([a-z]\w*\.py)``")
_MODULE = re.compile(r"(?<![\w.\-/@])forebay((?:\.(?!py\b)[A-Za-z_]\w*)+)")
_PRODUCT_FILE = re.compile(rf"(?<![\w/.])((?:{'|'.join(TOPS)})/[\w/]+\.py)\b")
_USERS_FILE = re.compile(r"generators/(sums|my_task)_generator\.py")
_DEFINITION = re.compile(
    r"""\b(?:class|def) (\w+)|^\s*(\w+)(?:: [^=\n]+)? = |^\s+(\w+): \w|["'](\w+)["']""", re.MULTILINE
)
_NOT_MODULES = {
    "samples": "a content type ends so",
    "env": "a file of settings is called so",
    "policies": "a group of entry points",
    "exporters": "a group of entry points",
}


def code_words(text: str) -> list[str]:
    return [word for word in _CODE.findall(text) if re.fullmatch(r"[a-z_]+(/[\w.]+)*/?", word) and "/" in word]


@pytest.mark.parametrize("path", sorted(set(code_words(ARCHITECTURE + CODE_MAP))))
def test_every_path_on_the_pages_exists(path: str) -> None:
    assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file(), path


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_every_folder_of_the_product_has_a_row(folder: Path) -> None:
    assert f"\n| `{folder}/` |" in ARCHITECTURE


def test_the_page_shows_the_floors_that_are_checked() -> None:
    floors = next(line for line in ARCHITECTURE.splitlines() if line.startswith("server >"))
    assert set(re.findall(r"\w+", floors)) == set(TOPS)


def test_every_identifier_in_the_glossary_is_defined_in_the_product() -> None:
    product = [path for path in SOURCES if path.parts[len(ROOT.parts)] in TOPS]
    defined = {path.stem for path in product}
    for path in product:
        defined.update(
            name for match in _DEFINITION.findall(path.read_text(encoding="utf-8")) for name in match if name
        )
    rows = re.findall(
        r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|$", ARCHITECTURE.partition("\n## Glossary\n")[2], re.MULTILINE
    )
    named = {term: _CODE.findall(code) for term, code in rows[2:]}
    assert len(named) > 50
    assert {term: names for term, names in named.items() if not names or not defined.issuperset(names)} == {}


@cache
def docstrings(path: Path) -> list[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]


def named_in(pattern: re.Pattern[str]) -> list[tuple[str, Path]]:
    """What pages, and docstrings of the product and the examples, name; with the file that does."""
    texts = [(path, path.read_text(encoding="utf-8")) for path in PAGES]
    texts += [(path, text) for path in SOURCES for text in docstrings(path)]
    found = {(match[1], path.relative_to(ROOT)) for path, text in texts for match in pattern.finditer(text)}
    return sorted((name, path) for name, path in found if not _USERS_FILE.match(name))


def leads_somewhere(dotted: str) -> bool:
    """Whether ``forebay`` has a module, or a name in a module, that is called so."""
    names = dotted[1:].split(".")
    if names[0] in _NOT_MODULES:
        return True
    module: Any = None
    for number, name in enumerate(names, 1):
        if hasattr(module, name):
            module = getattr(module, name)
        else:
            try:
                module = importlib.import_module(".".join(("forebay", *names[:number])))
            except ImportError as error:  # a module that is there may need a package that is not
                return not (error.name or "forebay").startswith("forebay")
    return True


# One test for all names: they are found by parsing the whole product, which each worker would do as it collects.
def test_every_name_in_the_package_leads_somewhere() -> None:
    named = named_in(_MODULE)
    assert len(named) > 30
    assert [f"{path}: forebay{dotted}" for dotted, path in named if not leads_somewhere(dotted)] == []


def test_every_file_of_the_product_that_is_named_exists() -> None:
    named = named_in(_PRODUCT_FILE)
    assert len(named) > 100
    assert [f"{path}: {name}" for name, path in named if not (ROOT / name).is_file()] == []


def test_modules_that_a_docstring_names_by_their_files_stand_in_the_same_part() -> None:
    named = {(path, name) for path in SOURCES for text in docstrings(path) for name in _FILE.findall(text)}
    lost = [(path, name) for path, name in named if not any((ROOT / path.relative_to(ROOT).parts[0]).rglob(name))]
    assert [f"{path.relative_to(ROOT)}: {name}" for path, name in sorted(lost)] == []
