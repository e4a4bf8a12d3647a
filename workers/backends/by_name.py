"""The backends that can be asked for by name."""

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
"""Where the class of each is; made without arguments. Loaded when it is asked for, since Ray alone takes seconds."""


def check_backend_name(name: object) -> str:
    """The name, if there is such a backend, as a setting of a run or an argument.

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
    """A backend by its name; one that was made already is given back as it is.

    Raises ``InvalidInput`` for an unknown name, and ``MissingExtra`` if what it needs is not installed.
    """
    if not isinstance(backend, str) and callable(getattr(backend, "start", None)):
        return backend
    module, _, class_name = BACKENDS[check_backend_name(backend)].partition(":")
    return cast("WorkerBackend", getattr(importlib.import_module(module), class_name)())
