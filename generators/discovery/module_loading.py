"""Importing a generator file under its own name, from its own folder, as a top-level module."""

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType, TracebackType

PACKAGED_FOLDER = Path(__file__).resolve().parents[1]
SLIME_FOLDER, SLIME_PACKAGE = "generator", "slime_plugins"
_INSTALL_FOLDERS = frozenset({"site-packages", "dist-packages"})


def module_name(path: Path) -> str:
    """Return the name under which the file is imported: its stem, with dots replaced because they mean packages."""
    return path.stem.replace(".", "_")


def is_stdlib_name(name: str) -> bool:
    """Whether importing a file of this name would hide a standard library module."""
    return name in sys.stdlib_module_names


def brings_siblings(path: Path) -> bool:
    """Whether the files next to ``path`` belong to it. Files of an installed package are importable anyway."""
    folder = path.parent
    # Compares folder names, because `sysconfig` only knows this environment, and the file may be in another.
    installed = _INSTALL_FOLDERS.intersection(folder.parts) or folder.is_relative_to(sysconfig.get_path("stdlib"))
    return folder != PACKAGED_FOLDER and not installed


def sibling_sources(path: Path) -> list[Path]:
    """Return the ``*.py`` files next to ``path`` that its code can import, sorted by name."""
    if not brings_siblings(path):
        return []
    return sorted(other for other in path.parent.glob("*.py") if other != path and other.is_file())


def package_names(folder: Path) -> list[tuple[str, ...]]:
    """Return the package names by which files in slime's folder ``generator`` import each other.

    slime starts its server next to that folder, so that ``import generator.x`` works. Other files import
    ``slime_plugins.rollout_buffer.generator.x``.
    """
    parts = folder.parts
    names: list[tuple[str, ...]] = []
    if folder.name == SLIME_FOLDER:
        names.append((SLIME_FOLDER,))
    if SLIME_PACKAGE in parts:
        names.append(parts[len(parts) - 1 - parts[::-1].index(SLIME_PACKAGE) :])
    return names


def import_roots(folder: Path) -> list[Path]:
    """Return the folders that contain the packages of ``package_names``."""
    return [folder.parents[len(name) - 1] for name in package_names(folder)]


def set_import_path(folder: Path, *fallbacks: Path) -> None:
    """Put ``folder`` first on ``sys.path``, and ``fallbacks`` and the working directory last.

    An installed package wins over one of the same name in the fallbacks.
    """
    last = map(str, fallbacks)
    sys.path[:] = [str(folder), *(entry for entry in sys.path if entry != str(folder)), *last, os.getcwd()]


def load_module(path: Path) -> ModuleType:
    """Execute ``path`` as a module registered in ``sys.modules``, so that its classes can be pickled.

    Raises any error of the file, and ImportError if it cannot be loaded as Python source.
    """
    name = module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded: is it a .py file?", name=name, path=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, because dataclasses and pickle look up their module there
    spec.loader.exec_module(module)
    return module


def user_frames(trace: TracebackType | None, caller_file: str) -> TracebackType | None:
    """Return ``trace`` from the first frame outside of our code and Python's import machinery; None if none is left."""
    ours = (__file__, caller_file, "<frozen importlib", "<frozen runpy")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return trace
