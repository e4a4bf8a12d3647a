"""Notes: numbers that a trainer stores beside the samples it has read, such as its own logprobs of their tokens.

A note is never delivered to training. Its form on the wire is that of ``Note``; its arrays are in parts, as those of
samples are. A stored note is the same JSON.
"""

from typing import Annotated

import msgspec

from forebay.core.binary_sample import Field, is_binary, response_length, unpack, value_of
from forebay.core.errors import InvalidInput
from forebay.core.parts import ArrayRows, SideArrays, digest_of, read_fields
from forebay.core.records.rows import NOTE_PREFIX, SampleRow

_Name = Annotated[str, msgspec.Meta(pattern="^[a-z][a-z0-9_]{0,63}$")]


class Note(msgspec.Struct, forbid_unknown_fields=True):
    """One item of a request of annotations."""

    uid: str
    step: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    producer: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] = "trainer"
    values: Annotated[dict[_Name, float | None], msgspec.Meta(max_length=64)] = {}
    """Numbers of the whole sample. JSON has no NaN: it is null."""
    parts: Field = msgspec.UNSET
    arrays: Field = msgspec.UNSET


class _Lengths(msgspec.Struct):
    tokens: list[msgspec.Raw] = []
    loss_mask: list[float] = []
    response_length: Field = msgspec.UNSET


def read_note(text: bytes) -> tuple[Note, SideArrays]:
    """Decode an item and the places of its arrays. Raises ``InvalidInput``."""
    try:
        note = msgspec.json.decode(text, type=Note)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"an annotation: {error}"[:500], field="body") from None
    return note, read_fields(note.parts, note.arrays)


def placed(side: SideArrays, num_tokens: int, num_response: int) -> SideArrays:
    """The arrays at the tokens to which their rows belong: all of the sample, or those of its response.

    A client may not know the tokens, so the rows belong to the last ones, wherever it has placed the first. Raises
    ``InvalidInput`` for another number of rows.
    """
    arrays = {}
    for name, given in side.arrays.items():
        num_rows = sum(end - start for _, _, start, end in given.rows)
        if not given.rows or num_rows not in (num_tokens, num_response):
            what = f"must have {num_tokens} rows, one per token, or {num_response}, one per token of the response"
            raise InvalidInput(f"arrays.{name}: {what} (got {num_rows})", field=f"arrays.{name}")
        shift = num_tokens - num_rows - given.rows[0][2]
        rows = [(part, first, start + shift, end + shift) for part, first, start, end in given.rows]
        arrays[name] = ArrayRows(given.dtype, given.shape, rows)
    return SideArrays(side.digests, arrays)


def stored_note(note: Note, side: SideArrays) -> tuple[str, bytes]:
    """The uid of a note's row and its body. A note with the same content has the same uid."""
    parts, arrays = (msgspec.Raw(msgspec.json.encode(each)) if each else msgspec.UNSET for each in side)
    body = msgspec.json.encode(msgspec.structs.replace(note, parts=parts, arrays=arrays))
    return f"{NOTE_PREFIX}{note.step}/{digest_of(body)}/{note.uid}", body


def read_key(row: SampleRow) -> tuple[str, str]:
    """A note's id and its sample's uid. Ids are in the order of arrival, which stays when a body is moved."""
    _, _, digest, uid = row.uid.split("/", 3)
    return f"{row.received_at_s:017.6f}-{digest}", uid


def token_counts(body: bytes) -> tuple[int, int]:
    """Number of tokens of a stored sample, and of its response.

    The response has ``response_length`` tokens, or begins with the first token whose ``loss_mask`` is not 0.
    """
    pieces = unpack(body) if is_binary(body) else None
    try:
        lengths = msgspec.json.decode(pieces.json if pieces else body, type=_Lengths)
    except (msgspec.MsgspecError, RecursionError):  # other writers may use these names otherwise
        lengths = _Lengths()
    num_tokens = len(pieces.tokens) // 4 if pieces else len(lengths.tokens)
    given = response_length(value_of(lengths.response_length), num_tokens)
    if given is not None:
        return num_tokens, given
    mask = bytes(pieces.loss_mask or b"") if pieces else bytes(map(bool, lengths.loss_mask))
    return num_tokens, num_tokens - (len(mask) - len(mask.lstrip(b"\0")))
