"""Cutting a sequence into parts of about one size."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def stretches(items: Sequence[T], num_bytes: Callable[[T], int], limit: int) -> Iterator[tuple[Sequence[T], int]]:
    """``items`` in parts of up to ``limit`` bytes, each with its bytes; an item that is longer stands alone."""
    first = size = 0
    for place, item in enumerate(items):
        own = num_bytes(item)
        if place > first and size + own > limit:
            yield items[first:place], size
            first, size = place, 0
        size += own
    if first < len(items):
        yield items[first:], size
