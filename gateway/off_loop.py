"""What takes a while is done in a thread, in short steps: the gateway's loop serves the agents of all runs."""

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

LARGE_BYTES = 1 << 20
"""What is made of fewer takes some milliseconds at most, and a thread would cost more than it gives."""

MANY_MESSAGES = 10_000
"""So many messages of one chat take tens of milliseconds to look at."""

_decode = msgspec.json.Decoder().decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode


class _NoGarbage:
    """No search for garbage meanwhile: it would go over a million new objects again and again, and hold up the loop."""

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
    """``work(content)``, in a thread if there is much of it."""
    return await off_loop_if(len(content) > LARGE_BYTES, lambda: work(content))


async def off_loop_if(is_large: bool, work: Callable[[], T]) -> T:
    """``work()``, in a thread if it is about something large."""
    return await asyncio.to_thread(work) if is_large else work()


def decoded_bytes(content: bytes, num_forms: int) -> int:
    """Roughly what the JSON in ``content`` takes once it is decoded, in ``num_forms`` forms that share their texts.

    Small objects take many times their text.
    """
    return len(content) + num_forms * (500 * content.count(b"{") + 50 * content.count(b","))


def decode_in_steps(content: bytes) -> Any:
    """The JSON in ``content``. Of a large object the lists are decoded element by element.

    The decoder holds the interpreter's lock for as long as one call takes, in a thread as well.
    """
    if len(content) <= LARGE_BYTES or content.lstrip()[:1] != b"{":
        return _decode(content)
    with _no_garbage:
        return {name: _decoded(bytes(raw)) for name, raw in _fields(content).items()}


def _decoded(raw: bytes) -> Any:
    if len(raw) <= LARGE_BYTES or raw.lstrip()[:1] != b"[":
        return _decode(raw)
    elements = _elements(raw)[::-1]
    return [_decode(elements.pop()) for _ in range(len(elements))]  # each goes as soon as it is decoded
