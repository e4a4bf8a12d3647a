"""Samples of a given size, as agents write them: half of them with non-ASCII text escaped, the reward in any place."""

import json
import re
from collections.abc import Callable
from functools import cache
from itertools import cycle

from tests.benchmarks.conversations import LOG_LINES, Message, opening, turns

FIELD_ORDERS = (
    ("reward", "uid", "instance_id", "messages", "extra_info"),
    ("uid", "extra_info", "reward", "messages", "instance_id"),
    ("uid", "instance_id", "extra_info", "messages", "reward"),
)
NUM_KINDS = 24
"""So many bodies of a size differ in their texts; the others are these with another number."""
LOG_SHARE = 1 / 6
_split = re.compile(rb'(@uid@|@instance_id@|"@reward@"|@number@)').split


def sample_body(number: int, num_bytes: int, group_size: int = 8, prefix: str = "") -> bytes:
    """A sample of about ``num_bytes`` bytes; every ``group_size`` numbers make a group with two rewards."""
    values = {
        b"@uid@": f"{prefix}uid-{number}".encode(),
        b"@instance_id@": f"{prefix}instance-{number // group_size}".encode(),
        b'"@reward@"': b"%d.0" % (number % 2),
        b"@number@": b"%08d" % number,
    }
    return b"".join([values.get(part, part) for part in _parts(number % NUM_KINDS, num_bytes)])


@cache
def _parts(kind: int, num_bytes: int) -> tuple[bytes, ...]:
    """A body, cut at what differs: as many turns as there is room for, and a last reply that fills it."""
    log = _filled(lambda text: len(text.encode()) < num_bytes * LOG_SHARE)
    messages = opening(kind)
    for turn in turns(kind):
        if len(_encode(kind, [*messages, *turn], log)) > num_bytes:
            break
        messages += turn

    def reply(text: str) -> list[Message]:
        return [*messages, {"role": "assistant", "content": text + "DONE"}]

    summary = _filled(lambda text: len(_encode(kind, reply(text), log)) < num_bytes)
    return tuple(_split(_encode(kind, reply(summary), log)))


def _filled(fits: Callable[[str], bool]) -> str:
    """As many lines of a log as fit."""
    text = ""
    for line in cycle(LOG_LINES):
        if not fits(text + line):
            return text
        text += line
    raise AssertionError("a cycle has no end")


def _encode(kind: int, messages: list[Message], log: str) -> bytes:
    """As Python's ``json`` writes it by default, or as other languages' libraries do."""
    fields: dict[str, object] = {
        "uid": "@uid@",
        "instance_id": "@instance_id@",
        "messages": messages,
        "reward": "@reward@",
        "extra_info": {"finish_reason": "stop", "timestamp": "1700000000.0", "log": log},
    }
    ordered = {name: fields[name] for name in FIELD_ORDERS[kind % len(FIELD_ORDERS)]}
    if kind // len(FIELD_ORDERS) % 2:
        return json.dumps(ordered).encode()
    return json.dumps(ordered, ensure_ascii=False, separators=(",", ":")).encode()
