"""A run's own copy of its generator, which later edits of the original do not change."""

import os
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from forebay.core.files import make_folder, make_private
from forebay.generators.discovery.module_loading import brings_siblings, module_name, package_names

COPY_LIMIT_BYTES = 16 * 2**20
COPY_LIMIT_FILES = 2_000
_NEVER_COPIED = frozenset({"__pycache__", "node_modules"})


def code_folder(run_dir: Path) -> Path:
    """Folder of the run's copy."""
    return run_dir / "code"


def packages_folder(copied: Path) -> Path:
    """Folder in which the copy of ``copied`` is also linked under the package names that its files may import."""
    return copied.parents[1] / "packages"


def copied_module(module_path: Path, run_dir: Path) -> Path:
    """Path of the run's copy of ``module_path``."""
    return code_folder(run_dir) / f"{module_name(module_path)}.py"


def copy_code(module_path: Path, run_dir: Path) -> Path:
    """Copy the generator file and its siblings to the run's folder, unless done before; return the copied module.

    Sibling ``*.py`` files are always copied. Other files and folders are copied if they are small (up to 16 MiB and
    2 000 files each); larger ones are linked. An existing copy is kept. Raises OSError.
    """
    target = code_folder(run_dir)
    if not target.exists():
        draft = run_dir / "code.draft"
        shutil.rmtree(draft, ignore_errors=True)
        make_folder(draft)
        for entry in _siblings(module_path, run_dir):
            _take(entry, draft / entry.name)
        shutil.copy2(module_path, draft / f"{module_name(module_path)}.py")
        _make_room_for_bytecode(draft)
        make_private(run_dir)
        # Renamed when complete, so that an interrupted copy is not used as the run's code.
        draft.rename(target)
    copied = copied_module(module_path, run_dir)
    if brings_siblings(module_path):
        for name in package_names(module_path.parent):
            _name_package(module_path.parent, name, copied)
    return copied


def copy_copy(source_dir: Path, run_dir: Path) -> None:
    """Copy the copy of another start. Links stay links. Raises OSError."""
    copied = code_folder(source_dir)
    make_folder(run_dir)
    packages = packages_folder(copied / "any.py")
    if packages.exists():
        shutil.copytree(packages, run_dir / packages.name, symlinks=True)
    draft = run_dir / "code.draft"
    shutil.copytree(copied, draft, symlinks=True)
    make_private(run_dir)
    draft.rename(code_folder(run_dir))


def has_code(run_dir: Path) -> bool:
    """Whether the run has a copy."""
    return code_folder(run_dir).exists()


def remove_code(run_dir: Path) -> None:
    """Remove the copy, if there is one, but not the targets of its links. Raises OSError."""
    copied = code_folder(run_dir)
    if copied.exists():
        # The copy goes last: once it is gone, everything is.
        shutil.rmtree(packages_folder(copied / "any.py"), ignore_errors=True)
        shutil.rmtree(copied)


def _name_package(original: Path, name: tuple[str, ...], copied: Path) -> None:
    """Make the copy importable as package ``name``, and link the other contents of the surrounding packages."""
    target, source = packages_folder(copied), original.parents[len(name) - 1]
    for package, inner in pairwise(name):
        target, source = target / package, source / package
        make_folder(target)
        for entry in source.iterdir():
            if entry.name != inner and entry.name not in _NEVER_COPIED and not (target / entry.name).is_symlink():
                (target / entry.name).symlink_to(entry.resolve())
    make_folder(target)
    if not (link := target / name[-1]).is_symlink():
        link.symlink_to(os.path.relpath(copied.parent, target))


def _siblings(module_path: Path, run_dir: Path) -> Iterator[Path]:
    if not brings_siblings(module_path):  # modules of an installed package are importable anyway
        return
    for entry in module_path.parent.iterdir():
        is_hidden = entry.name.startswith(".") or entry.name in _NEVER_COPIED
        # The data directory may be next to the generator, and must not be copied into itself.
        if entry != module_path and not is_hidden and not run_dir.resolve().is_relative_to(entry.resolve()):
            yield entry


def _take(entry: Path, target: Path) -> None:
    if entry.is_dir() and _is_small(entry):
        shutil.copytree(entry, target, ignore=shutil.ignore_patterns(*_NEVER_COPIED, ".*"), symlinks=True)
    elif entry.is_file() and (entry.suffix == ".py" or entry.stat().st_size <= COPY_LIMIT_BYTES):
        shutil.copy2(entry, target)
    elif entry.exists():
        target.symlink_to(entry.resolve())


def _make_room_for_bytecode(copied: Path) -> None:
    """Create the bytecode folders that Python would later create with the process's umask."""
    for module in list(copied.rglob("*.py")):
        make_folder(module.parent / "__pycache__")


def _is_small(folder: Path) -> bool:
    num_bytes = num_files = 0
    for parent, _, names in os.walk(folder):
        num_files += len(names)
        num_bytes += sum((Path(parent) / name).lstat().st_size for name in names)
        if num_files > COPY_LIMIT_FILES or num_bytes > COPY_LIMIT_BYTES:
            return False
    return True
