"""Run slow work in a thread, in short steps, because the gateway's event loop serves the agents of all runs."""

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

LARGE_BYTES = 1 << 20
"""Smaller bodies take some milliseconds at most, which does not justify a thread."""

MANY_MESSAGES = 10_000
"""A chat with more messages takes tens of milliseconds to process."""

_decode = msgspec.json.Decoder().decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode


class _NoGarbage:
    """Disables garbage collection, which would scan a million new objects repeatedly and block the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_within = 0

    def __enter__(self) -> None:
        with self._lock:
            self._num_within += 1
            gc.disable()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_within -= 1
            if not self._num_within:
                gc.enable()


_no_garbage = _NoGarbage()


async def off_loop(work: Callable[[bytes], T], content: bytes) -> T:
    """Return ``work(content)``, run in a thread if ``content`` is large."""
    return await off_loop_if(len(content) > LARGE_BYTES, lambda: work(content))


async def off_loop_if(is_large: bool, work: Callable[[], T]) -> T:
    """Return ``work()``, run in a thread if ``is_large``."""
    return await asyncio.to_thread(work) if is_large else work()


def decoded_bytes(content: bytes, num_forms: int) -> int:
    """Estimate the memory of the JSON in ``content`` once decoded into ``num_forms`` copies that share their texts.

    Small objects take many times the size of their text.
    """
    return len(content) + num_forms * (500 * content.count(b"{") + 50 * content.count(b","))


def decode_in_steps(content: bytes) -> Any:
    """Decode the JSON in ``content``. The lists of a large object are decoded element by element.

    The decoder holds the interpreter's lock during each call, even in a thread.
    """
    if len(content) <= LARGE_BYTES or content.lstrip()[:1] != b"{":
        return _decode(content)
    with _no_garbage:
        return {name: _decoded(bytes(raw)) for name, raw in _fields(content).items()}


def _decoded(raw: bytes) -> Any:
    if len(raw) <= LARGE_BYTES or raw.lstrip()[:1] != b"[":
        return _decode(raw)
    elements = _elements(raw)[::-1]
    return [_decode(elements.pop()) for _ in range(len(elements))]  # frees each element once decoded
