"""The optional dependencies of the embedded engine."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forebay.core.errors import MissingExtra


def require(package: str) -> Any:
    """Return the imported package. Raises ``MissingExtra`` with the install command if it is missing."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        raise MissingExtra(package, "local") from error


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Limit torch operations of the calling thread to ``threads`` cores within the block."""
    torch = require("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
