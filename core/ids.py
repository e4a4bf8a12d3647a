"""Identifiers: instances, runs, groups, and the request ids by which an engine's calls are aborted."""

import json
import secrets
from hashlib import blake2b

InstanceId = str | int
"""An instance keeps the JSON type of its id: ``1`` is not ``"1"``."""
GivenId = str | int | float
"""An id as read from JSON. Some writers send ``1.0`` for ``1``, for example after reading a table of floats."""
MAX_ID_LENGTH = 1_024
OTHER_UID_DIGITS = 12
"""Number of hex digits of the digest in ``other_uid``."""

# The exact text matters: the run process and the server each compute the hash.
_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode


def read_instance_id(given: GivenId) -> InstanceId:
    """Return a whole number as an integer (``1.0``, ``1e0``: 1; ``-0.0``: 0), and any other float as its text."""
    if isinstance(given, float):
        return int(given) if given.is_integer() else repr(given)
    return given


def read_uid(given: GivenId) -> str:
    """Return a uid as text: ``7`` and ``7.0`` are ``"7"``. Raises ``ValueError`` for an integer that is too long."""
    uid = read_instance_id(given)
    if isinstance(uid, int) and abs(uid) >= 10 ** (MAX_ID_LENGTH - 1):
        raise ValueError(f"more than {MAX_ID_LENGTH} characters")
    return str(uid)


def other_uid(uid: str, digest: str) -> str:
    """Uid for a sample without an epoch whose own uid is taken by a sample with a different body."""
    return f"{uid[: MAX_ID_LENGTH - len(digest) - 1]}~{digest}"


def new_run_id() -> str:
    """Return ``run-`` and 12 random hex digits."""
    return f"run-{secrets.token_hex(6)}"


def new_run_key() -> str:
    """Return a secret that authorises writes to one run."""
    return secrets.token_urlsafe(18)


def group_id(instance_id: InstanceId, epoch: int) -> str:
    """Name the group of ``instance_id`` in ``epoch`` by 16 hex digits. Server and generator compute the same name."""
    return blake2b(_encode([instance_id, epoch]).encode(), digest_size=8).hexdigest()


def rollout_uid(run_id: str, group: str, number: int) -> str:
    """Uid of the sample from a group's rollout ``number``."""
    return f"{run_id}-{group}-{number:04x}"


def run_rid_prefix(run_id: str) -> str:
    """Prefix of all engine request ids of a run."""
    return f"fb-{run_id.removeprefix('run-'):>012}-"


def group_rid_prefix(run_id: str, group: str) -> str:
    """Prefix of all engine request ids of one group. Its length is fixed because engines abort by prefix."""
    return f"{run_rid_prefix(run_id)}{group}-"


def request_id(run_id: str, group: str, slot: int, attempt: int, call: int = 0) -> str:
    """The engine request id of one call: run, group, slot, attempt and call number, all of fixed length."""
    return call_rid(attempt_rid_prefix(run_id, group, slot, attempt), call)


def attempt_rid_prefix(run_id: str, group: str, slot: int, attempt: int) -> str:
    """Prefix of all engine request ids of one attempt."""
    # Engines abort by prefix: without a fixed length, aborting slot 1 would abort slot 10 too.
    return f"{group_rid_prefix(run_id, group)}{slot:04x}-{attempt:02x}-"


def call_rid(prefix: str, call: int) -> str:
    """Engine request id of an attempt's ``call``-th call."""
    return f"{prefix}{call:03x}"
