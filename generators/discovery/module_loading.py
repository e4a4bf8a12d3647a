"""Importing a generator file: under its own name, from its own folder, as a top-level module."""

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
    """The name under which the file is imported: its stem, with dots replaced, since they would mean a package."""
    return path.stem.replace(".", "_")


def is_stdlib_name(name: str) -> bool:
    """Whether importing a file of this name would hide a module of Python itself."""
    return name in sys.stdlib_module_names


def brings_siblings(path: Path) -> bool:
    """Whether the files beside ``path`` belong to it: those of an installed package are importable anyway."""
    folder = path.parent
    # By the folders' names: `sysconfig` knows those of this environment only, and a file may be of another.
    installed = _INSTALL_FOLDERS.intersection(folder.parts) or folder.is_relative_to(sysconfig.get_path("stdlib"))
    return folder != PACKAGED_FOLDER and not installed


def sibling_sources(path: Path) -> list[Path]:
    """The ``*.py`` beside ``path`` that its code can import, sorted by name."""
    if not brings_siblings(path):
        return []
    return sorted(other for other in path.parent.glob("*.py") if other != path and other.is_file())


def package_names(folder: Path) -> list[tuple[str, ...]]:
    """As which packages files in ``folder`` import each other where it is the one of slime's checkout.

    slime runs its server beside its folder ``generator``, so that ``import generator.x`` finds what lies in it;
    others write ``slime_plugins.rollout_buffer.generator.x``.
    """
    parts = folder.parts
    names: list[tuple[str, ...]] = []
    if folder.name == SLIME_FOLDER:
        names.append((SLIME_FOLDER,))
    if SLIME_PACKAGE in parts:
        names.append(parts[len(parts) - 1 - parts[::-1].index(SLIME_PACKAGE) :])
    return names


def import_roots(folder: Path) -> list[Path]:
    """Where the packages of these names, and what lies beside them, are found."""
    return [folder.parents[len(name) - 1] for name in package_names(folder)]


def set_import_path(folder: Path, *fallbacks: Path) -> None:
    """Put ``folder`` first on ``sys.path``, and ``fallbacks`` and the working directory last.

    An installed package of the same name as something there wins.
    """
    last = map(str, fallbacks)
    sys.path[:] = [str(folder), *(entry for entry in sys.path if entry != str(folder)), *last, os.getcwd()]


def load_module(path: Path) -> ModuleType:
    """Execute ``path`` as a module that stands in ``sys.modules``, so that its classes pickle.

    Raises whatever the file raises, and ImportError if it cannot be loaded as Python source.
    """
    name = module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded: is it a .py file?", name=name, path=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up there
    spec.loader.exec_module(module)
    return module


def user_frames(trace: TracebackType | None, caller_file: str) -> TracebackType | None:
    """``trace`` from the first frame that is neither ours nor Python's import machinery; None if there is none."""
    ours = (__file__, caller_file, "<frozen importlib", "<frozen runpy")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return trace
