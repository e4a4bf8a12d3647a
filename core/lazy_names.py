"""Names of a package whose modules load only when they are asked for: few of those that import it need them all."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``package`` (PEP 562). ``modules`` has, for each name, the module that defines it.

    For a type checker they are imported as well, under ``TYPE_CHECKING``.
    """

    def look_up(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return look_up
