"""The folders are the packages, and nothing reaches them by a bare name."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
NOT_PACKAGES = {"tests", "examples", "docs", "build", "dist"}

FOLDERS = sorted(
    folder.relative_to(ROOT)
    for top in ROOT.iterdir()
    if top.is_dir() and not top.name.startswith(".") and top.name not in NOT_PACKAGES
    for folder in [top, *(path for path in top.rglob("*") if path.is_dir())]
    if "__pycache__" not in folder.parts and any(folder.glob("*.py"))
)


def test_every_folder_with_code_is_a_listed_package() -> None:
    assert sorted(SETUPTOOLS["packages"]) == sorted(f"forebay.{'.'.join(folder.parts)}" for folder in FOLDERS)


def test_every_top_folder_is_mapped_into_the_namespace() -> None:
    tops = {folder.parts[0] for folder in FOLDERS}
    assert SETUPTOOLS["package-dir"] == {f"forebay.{top}": top for top in tops}
    assert set(PROJECT["tool"]["importlinter"]["root_packages"]) == {f"forebay.{top}" for top in tops}


def test_the_makefile_links_every_top_folder_for_the_type_checker() -> None:
    makefile = (ROOT / "Makefile").read_text()
    listed = next(line for line in makefile.splitlines() if line.startswith("PACKAGES :="))
    assert set(listed.split()[2:]) == {folder.parts[0] for folder in FOLDERS}


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_every_package_is_typed_and_says_what_it_is(folder: Path) -> None:
    assert (ROOT / folder / "py.typed").exists()
    assert (ROOT / folder / "__init__.py").read_text().startswith('"""')


def test_no_folder_is_named_after_a_module_of_the_standard_library() -> None:
    assert [str(folder) for folder in FOLDERS if folder.name in sys.stdlib_module_names] == []


def test_the_namespace_itself_has_no_code() -> None:
    assert not (ROOT / "__init__.py").exists()
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.usefixtures("everything_imported")
def test_no_folder_was_imported_by_its_bare_name() -> None:
    bare = {folder.parts[0] for folder in FOLDERS}
    found = {name for name in sys.modules if name.partition(".")[0] in bare}
    ours = {name for name in found if str(getattr(sys.modules[name], "__file__", "")).startswith(f"{ROOT}/")}
    assert ours == set()


@pytest.fixture
def everything_imported() -> None:
    import forebay.server.app
    import forebay.server.cli.command_line  # noqa: F401 - they import the rest


def test_the_server_never_loads_what_only_users_code_needs() -> None:
    heavy = "{'torch', 'transformers', 'math_verify', 'openai', 'ray'}"
    code = f"import sys, forebay.server.app; found = {heavy} & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_test_files_have_names_of_their_own() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))


def test_no_file_is_too_long_to_be_read() -> None:
    sizes = {path: len(path.read_text().splitlines()) for folder in FOLDERS for path in (ROOT / folder).glob("*.py")}
    assert {str(path): size for path, size in sizes.items() if size > 400} == {}


@pytest.mark.parametrize("module", ["forebay.client", "forebay.generators.base", "forebay.hooks.host"])
def test_what_is_loaded_with_every_run_waits_for_no_pydantic(module: str) -> None:
    code = f"import sys, {module}; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
