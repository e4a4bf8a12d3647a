"""Identifiers: instances, runs, groups, and the request ids by which an engine's calls are aborted."""

import json
import secrets
from hashlib import blake2b

InstanceId = str | int
"""An instance keeps the JSON type of its id: ``1`` is not ``"1"``."""
GivenId = str | int | float
"""An id as JSON has it. Some writers, as those that have it out of a table of floats, send ``1.0`` for ``1``."""
MAX_ID_LENGTH = 1_024
OTHER_UID_DIGITS = 12
"""Of the digest in ``other_uid``, in hex."""

# The exact text matters: run process and server hash it each for itself.
_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode


def read_instance_id(given: GivenId) -> InstanceId:
    """A whole number as the integer that equals it (``1.0``, ``1e0``: 1; ``-0.0``: 0), another float as its text."""
    if isinstance(given, float):
        return int(given) if given.is_integer() else repr(given)
    return given


def read_uid(given: GivenId) -> str:
    """The text of a uid: ``7`` and ``7.0`` are ``"7"``. Raises ``ValueError`` for an integer that is too long."""
    uid = read_instance_id(given)
    if isinstance(uid, int) and abs(uid) >= 10 ** (MAX_ID_LENGTH - 1):
        raise ValueError(f"more than {MAX_ID_LENGTH} characters")
    return str(uid)


def other_uid(uid: str, digest: str) -> str:
    """The uid of a sample that came without an epoch, where its own is that of a sample with another body."""
    return f"{uid[: MAX_ID_LENGTH - len(digest) - 1]}~{digest}"


def new_run_id() -> str:
    """``run-`` and 12 hex digits."""
    return f"run-{secrets.token_hex(6)}"


def new_run_key() -> str:
    """A secret that authorises writes to one run."""
    return secrets.token_urlsafe(18)


def group_id(instance_id: InstanceId, epoch: int) -> str:
    """16 hex digits that name the group of ``instance_id`` in ``epoch``; server and generator compute the same."""
    return blake2b(_encode([instance_id, epoch]).encode(), digest_size=8).hexdigest()


def rollout_uid(run_id: str, group: str, number: int) -> str:
    """The uid of the sample of a group's rollout ``number``."""
    return f"{run_id}-{group}-{number:04x}"


def run_rid_prefix(run_id: str) -> str:
    """What every engine request id of a run begins with."""
    return f"fb-{run_id.removeprefix('run-'):>012}-"


def group_rid_prefix(run_id: str, group: str) -> str:
    """What every engine request id of one group begins with. Fixed length: an engine aborts by prefix."""
    return f"{run_rid_prefix(run_id)}{group}-"


def request_id(run_id: str, group: str, slot: int, attempt: int, call: int = 0) -> str:
    """The engine request id of one call: run, group, slot, attempt and call number, all of fixed length."""
    return call_rid(attempt_rid_prefix(run_id, group, slot, attempt), call)


def attempt_rid_prefix(run_id: str, group: str, slot: int, attempt: int) -> str:
    """What every engine request id of one attempt begins with."""
    # Engines abort by prefix: were the lengths not fixed, slot 1 would end the calls of slot 10.
    return f"{group_rid_prefix(run_id, group)}{slot:04x}-{attempt:02x}-"


def call_rid(prefix: str, call: int) -> str:
    """The engine request id of an attempt's ``call``-th call."""
    return f"{prefix}{call:03x}"
