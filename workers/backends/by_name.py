"""Backends by name."""

import importlib
from collections.abc import Mapping
from typing import cast

from forebay.core.errors import InvalidInput
from forebay.workers.backends.abc import WorkerBackend

BACKENDS: Mapping[str, str] = {
    "inline": "forebay.workers.backends.inline:InlineBackend",
    "processes": "forebay.workers.backends.processes:ProcessesBackend",
    "ray": "forebay.workers.backends.ray:RayBackend",
}
"""Class of each backend, called without arguments. Imported only when needed, since importing Ray takes seconds."""


def check_backend_name(name: object) -> str:
    """Return ``name`` if it is a backend's, in a setting of a run or an argument.

    Raises ``InvalidInput`` otherwise.
    """
    if not isinstance(name, str) or name not in BACKENDS:
        raise InvalidInput(
            f"backend {name!r} is unknown",
            field="backend",
            hint=f"one of {', '.join(map(repr, BACKENDS))}",
        )
    return name


def make_backend(backend: str | WorkerBackend) -> WorkerBackend:
    """Make a backend by its name; a backend object is returned unchanged.

    Raises ``InvalidInput`` for an unknown name, and ``MissingExtra`` if a package that it needs is not installed.
    """
    if not isinstance(backend, str) and callable(getattr(backend, "start", None)):
        return backend
    module, _, class_name = BACKENDS[check_backend_name(backend)].partition(":")
    return cast("WorkerBackend", getattr(importlib.import_module(module), class_name)())
