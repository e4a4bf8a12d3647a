"""Wrong bodies made of right ones: bytes changed, and values of JSON replaced. Seeded: a failure can be made again."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

HOSTILE_VALUES: tuple[Any, ...] = (
    *(None, True, 0.5, 1e308, -0.0, -1, 0, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 10**400),
    *("", "\x00", "\ud800", "\u202e", "a" * 300, "../../etc/passwd", "NaN", "1"),
    *([], {}, [[]], [None], {"": None}, [1, "2", 3.0]),
)
HOSTILE_TEXTS = (
    *(b"NaN", b"Infinity", b"1e999", b"-1e-999", b"0" * 400, b"1" * 5_000),
    *(b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\xaf", b"\\ud800", b"\\u0000", b"\x00", b"\xef\xbb\xbf"),
    *(b"[" * 3_000, b'{"a":' * 3_000, b"\r\n\r\n", b"\n", b",", b'"', b"}", b"]"),
)
MAX_CHANGES = 4

Mutation = Callable[[random.Random, bytes], bytes]


def mutated(rng: random.Random, body: bytes) -> bytes:
    """``body`` with one to four changes."""
    for _ in range(rng.randint(1, MAX_CHANGES)):
        body = rng.choice(_OF_BYTES)(rng, body)
    return body


def mutated_json(rng: random.Random, value: Any) -> bytes:
    """A value like ``value``: mostly still JSON, with hostile values at places of it."""
    copy = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, MAX_CHANGES)):
        copy = _replaced(rng, copy)
    # Half surrogates as escapes: as bytes they would not be UTF-8, which ``mutated`` tries.
    body = json.dumps(copy).encode()
    return mutated(rng, body) if rng.random() < 0.3 else body


def _replaced(rng: random.Random, value: Any) -> Any:
    """``value`` with another value, or without one, somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {name: each for name, each in value.items() if name != key}
        if rng.random() < 0.1:
            return value | {str(rng.choice(HOSTILE_VALUES)): value[key]}
        return value | {key: _replaced(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        if rng.random() < 0.15:
            return value[:at] + value[at + 1 :]
        if rng.random() < 0.1:
            return value[:at] + [value[at]] * rng.choice((2, 50)) + value[at:]
        return [*value[:at], _replaced(rng, value[at]), *value[at + 1 :]]
    return rng.choice(HOSTILE_VALUES)


def _flip(rng: random.Random, body: bytes) -> bytes:
    if not body:
        return body
    changed = bytearray(body)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(rng: random.Random, body: bytes) -> bytes:
    return body[: rng.randrange(len(body) + 1)]


def _remove(rng: random.Random, body: bytes) -> bytes:
    start, end = _span(rng, body)
    return body[:start] + body[end:]


def _repeat(rng: random.Random, body: bytes) -> bytes:
    start, end = _span(rng, body)
    return body[:end] + body[start:end] * rng.choice((1, 1, 1, 30)) + body[end:]


def _insert(rng: random.Random, body: bytes) -> bytes:
    at = rng.randrange(len(body) + 1)
    return body[:at] + rng.choice(HOSTILE_TEXTS) + body[at:]


def _replace(rng: random.Random, body: bytes) -> bytes:
    start, end = _span(rng, body)
    return body[:start] + rng.choice(HOSTILE_TEXTS) + body[end:]


def _noise(rng: random.Random, body: bytes) -> bytes:
    start, end = _span(rng, body)
    return body[:start] + rng.randbytes(end - start) + body[end:]


def _span(rng: random.Random, body: bytes) -> tuple[int, int]:
    start = rng.randrange(len(body) + 1)
    return start, min(len(body), start + rng.choice((1, 2, 4, 16, 200)))


_OF_BYTES: Sequence[Mutation] = (_flip, _flip, _flip, _cut, _remove, _repeat, _insert, _replace, _noise)
