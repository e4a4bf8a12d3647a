"""The last field of a replayed body: ``replayed_from``, which recorded sample it is. All else stays as it was."""

import msgspec

_OPENING = b',"replayed_from":{"run_id":'
_WINDOW = 16 << 10
"""The field is within so many bytes at the end: a uid of 1 024 characters takes at most 6 KiB."""


class ReplayedFrom(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which recorded sample a body is of."""

    run_id: str
    uid: str
    """As it was recorded."""
    substitute: bool
    """Whether it is of another epoch than the sample whose place it has."""


class _Tail(msgspec.Struct, forbid_unknown_fields=True):
    replayed_from: ReplayedFrom


_encode = msgspec.json.Encoder().encode
_decode_tail = msgspec.json.Decoder(_Tail).decode


def splice(body: bytes, run_id: str, uid: str, *, substitute: bool = False) -> bytes:
    """``body``, JSON or binary, with ``replayed_from`` before its last brace, in place of one that it has.

    What stands before it keeps its place, thus the span of a reward holds for both.
    """
    plain = strip(body)
    end = plain.rfind(b"}")
    field = _encode(ReplayedFrom(run_id, uid, substitute))
    return b'%b,"replayed_from":%b%b' % (plain[:end], field, plain[end:])


def strip(body: bytes) -> bytes:
    """``body`` as it was recorded: without the field that ``splice`` has set."""
    at = _field_start(body)
    return body if at is None else body[:at] + body[body.rfind(b"}") :]


def replayed_from(body: bytes) -> ReplayedFrom | None:
    """Which recorded sample it is; None for one that was generated."""
    at = _field_start(body)
    return None if at is None else _decode_tail(b"{" + body[at + 1 :]).replayed_from


def _field_start(body: bytes) -> int | None:
    at = body.rfind(_OPENING, max(0, len(body) - _WINDOW))
    if at < 0:
        return None
    try:
        # The same text in an object within the body has another brace behind it.
        _decode_tail(b"{" + body[at + 1 :])
    except msgspec.DecodeError:
        return None
    return at
