"""Ids of traces and spans, the W3C ``traceparent``, and the share of groups whose spans are kept.

No context has to travel between our own processes: whoever knows run, ``uid`` and group computes the same.
"""

import os
import re
from hashlib import blake2b
from itertools import count
from typing import NamedTuple

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1


class ParentSpan(NamedTuple):
    """What a ``traceparent`` names."""

    trace_id: str
    span_id: str
    is_sampled: bool


def trace_id(run_id: str, uid: str) -> str:
    """32 hex digits: one trace for a rollout with all its attempts, over restarts."""
    return blake2b(f"{run_id}\0{uid}".encode(), digest_size=16).hexdigest()


def new_span_id() -> str:
    """16 hex digits, never all zero: counted on from a random number, another one in each process."""
    return f"{_NUMBERS.next():016x}"


class _Numbers:
    """Not of the module ``random``, which users' code seeds, in many processes alike, and counts on."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.next = count(int.from_bytes(os.urandom(8), "big") >> 1 or 1).__next__


_NUMBERS = _Numbers()


def is_kept(group: str, rate: float) -> bool:
    """Whether the spans of ``group`` are in the share ``rate`` (0 to 1). Every process says the same."""
    if rate >= 1:
        return True
    return int.from_bytes(blake2b(group.encode(), digest_size=8).digest(), "big") < rate * 2.0**64


def format_traceparent(trace: str, span: str, *, is_sampled: bool = True) -> str:
    """The header of W3C Trace Context, version 00."""
    return f"00-{trace}-{span}-{_SAMPLED if is_sampled else 0:02x}"


def read_traceparent(text: str | None) -> ParentSpan | None:
    """What a ``traceparent`` names; None for one that is missing, malformed, or all zero."""
    match = _TRACEPARENT.fullmatch((text or "").strip())
    if match is None:
        return None
    trace, span, flags = match.groups()
    if not int(trace, 16) or not int(span, 16):
        return None
    return ParentSpan(trace, span, bool(int(flags, 16) & _SAMPLED))
