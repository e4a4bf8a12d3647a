"""Ids of traces and spans, the W3C ``traceparent``, and the choice of groups whose spans are kept.

The processes of a run exchange no context: each computes the same ids from run, ``uid`` and group.
"""

import os
import re
from hashlib import blake2b
from itertools import count
from typing import NamedTuple

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class ParentSpan(NamedTuple):
    """The content of a ``traceparent``."""

    trace_id: str
    span_id: str
    is_sampled: bool


def trace_id(run_id: str, uid: str) -> str:
    """32 hex digits: one trace for a rollout with all its attempts, across restarts."""
    return blake2b(f"{run_id}\0{uid}".encode(), digest_size=16).hexdigest()


def new_span_id() -> str:
    """16 hex digits, never all zero: a counter that starts at a random number in each process."""
    return f"{_NUMBERS.next():016x}"


class _Numbers:
    """A counter that does not use ``random``: user code may seed that equally in many processes."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.next = count(int.from_bytes(os.urandom(8), "big") >> 1 or 1).__next__


_NUMBERS = _Numbers()


def is_kept(group: str, rate: float) -> bool:
    """Whether the spans of ``group`` are in the share ``rate`` (0 to 1). Equal in every process."""
    if rate >= 1:
        return True
    return int.from_bytes(blake2b(group.encode(), digest_size=8).digest(), "big") < rate * 2.0**64


def format_traceparent(trace: str, span: str, *, is_sampled: bool = True) -> str:
    """The header of W3C Trace Context, version 00."""
    return f"00-{trace}-{span}-{int(is_sampled):02x}"


def read_traceparent(text: str | None) -> ParentSpan | None:
    """Parse a ``traceparent``; None if it is missing, malformed, or all zero."""
    match = _TRACEPARENT.fullmatch((text or "").strip())
    if match is None:
        return None
    trace, span, flags = match.groups()
    if not int(trace, 16) or not int(span, 16):
        return None
    return ParentSpan(trace, span, bool(int(flags, 16) & 1))
