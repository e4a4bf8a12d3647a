"""Loads modules of a package only when their names are used, because few importers need them all."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of ``package`` (PEP 562). ``modules`` maps each name to the module that defines it.

    The package must also import the names under ``TYPE_CHECKING``, for type checkers.
    """

    def look_up(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return look_up
