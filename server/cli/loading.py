"""Loading the parts of the command line quickly."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Let the cyclic collector rest: what imports make stays, and walking it again and again is a tenth of a start."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
