"""Loads modules of a package only when their names are used; finds packages and plugins without loading them."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from forebay.core.errors import InvalidInput, MissingExtra

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make ``__getattr__`` and ``__dir__`` of ``package`` (PEP 562). ``modules`` maps each name to its module.

    The package must also import the names under ``TYPE_CHECKING``, for type checkers.
    """

    def look_up(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return look_up, lambda: sorted({*vars(sys.modules[package]), *modules})


def require_extra(extra: str, *packages: str) -> None:
    """Raise ``MissingExtra`` if a package of ``extra`` is missing. Imports none, which could take seconds."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtra(package, extra)


def find_plugin(group: str, name: str, *, what: str, field: str) -> "EntryPoint":
    """The installed entry point of a group. Raises ``InvalidInput`` about ``field`` if none has this name."""
    from importlib.metadata import entry_points  # would be a third of the imports of a run process without a policy

    known = {point.name: point for point in entry_points(group=group)}
    if name not in known:
        kinds = group.rpartition(".")[2]
        hint = f"known {kinds}: {', '.join(sorted(known))}; others are entry points of {group}"
        raise InvalidInput(f"there is no {what} {name!r:.100}", hint=hint, field=field)
    return known[name]


def load_plugin(group: str, name: str, *, what: str, field: str) -> Any:
    """The object of an entry point. Raises as ``find_plugin`` does, also if it cannot be loaded; ``MissingExtra``."""
    found = find_plugin(group, name, what=what, field=field)
    try:
        return found.load()
    except MissingExtra:
        raise
    except (ImportError, AttributeError) as error:
        raise InvalidInput(f"the {what} {name!r} cannot be loaded: {error}", field=field) from error
