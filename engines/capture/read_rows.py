"""Read the rows that an engine returns beside the tokens of a reply."""

import base64
import binascii
import itertools
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from forebay.engines.capture.reply_shape import Ids
from forebay.engines.capture.request_fields import ROUTED_START
from forebay.engines.capture.side_rows import RAGGED, RowPiece, interleaved
from forebay.engines.capture.turn import VersionSpan

ROUTED = "routed_experts"


def row_fields(
    request_body: Mapping[str, Any],
    found: Mapping[str, Any],
    num_prompt: int,
    num_sampled: int,
    versions: Sequence[VersionSpan] = (),
) -> dict[str, Any]:
    """Return the fields of a turn for the rows in SGLang's ``meta_info`` or ``sglext`` of a reply with so many tokens.

    If a weight update retracted the call, SGLang computes the rows before the newest of ``versions`` again: they belong
    to other weights than the logprobs, and are dropped. Rows that are malformed or do not fit the tokens are left out.
    """
    asked, end, num_dropped = request_body.get(ROUTED_START), num_prompt + num_sampled, 0
    start = asked if isinstance(asked, int) else 0
    pieces = {**_mask(found, num_prompt, end), **_top(found, num_prompt, end)}
    if (routed := _routed(found.get(ROUTED), start, end)) is not None:
        is_recomputed = len(versions) > 1 and found.get("num_retractions")
        num_dropped = max(0, min(num_prompt + versions[-1].start - 1, routed.end) - start) if is_recomputed else 0
        pieces[ROUTED] = routed.between(start + num_dropped, routed.end)
    return {"arrays": {name: [each] for name, each in pieces.items() if each.data}, "num_rerouted": num_dropped}


def _mask(found: Mapping[str, Any], start: int, end: int) -> dict[str, RowPiece]:
    """The ids that top-k and the like left for each sampled token, and its logprob among these."""
    try:
        kept = msgspec.convert(found.get("output_token_sampling_mask"), list[Ids])
        values = msgspec.convert(found.get("output_token_sampling_logprobs"), list[float])
    except msgspec.ValidationError:
        return {}
    if not len(kept) == len(values) == end - start:
        return {}
    ids, lengths = array("i", itertools.chain.from_iterable(kept)), array("i", map(len, kept))
    return {
        "sampling_mask": RowPiece(start, end, "I32", RAGGED, ids.tobytes(), lengths.tobytes()),
        "sampling_logprobs": RowPiece(start, end, "F32", (), array("f", values).tobytes()),
    }


def _top(found: Mapping[str, Any], start: int, end: int) -> dict[str, RowPiece]:
    """The most probable ids of each sampled token, and their logprobs."""
    match found.get("output_top_logprobs_shape"):
        case [int(num_rows), int(width)] if num_rows == end - start and width > 0:
            ids, values = (_decoded(found.get(f"output_top_logprobs_{name}_flat_b64")) for name in ("idx", "val"))
            if len(ids) == len(values) == 4 * num_rows * width:
                return {
                    "top_ids": RowPiece(start, end, "I32", (width,), ids),
                    "top_logprobs": RowPiece(start, end, "F32", (width,), values),
                }
    return {}


def _decoded(encoded: object) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True) if isinstance(encoded, str) else b""
    except binascii.Error:
        return b""


def _routed(encoded: object, start: int, num_tokens: int) -> RowPiece | None:
    """Read SGLang's ``routed_experts``: int32 in base64, rows of the tokens ``[start, num_tokens - 1)``.

    The last token has no row, since no token was sampled from it. None if there are none, or they do not fit.
    """
    ids, num_rows = _decoded(encoded), num_tokens - 1 - start
    num = len(ids) // 4
    # Negative numbers and those above 65 535 have bits in the upper bytes.
    if num_rows <= 0 or not ids or len(ids) % (4 * num_rows) or (ids[2::4] + ids[3::4]).count(0) < 2 * num:
        return None
    is_narrow = ids[1::4].count(0) == num
    data = ids[::4] if is_narrow else interleaved(ids[::4], ids[1::4])
    return RowPiece(start, num_tokens - 1, "U8" if is_narrow else "U16", (num // num_rows,), data)
