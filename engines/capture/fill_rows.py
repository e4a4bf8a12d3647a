"""Ask an SGLang server for the rows of a prompt that a wrong guess left out."""

import logging
from collections.abc import Sequence

import httpx
import msgspec

from forebay.core.errors import EngineError
from forebay.engines.capture.fill_gaps import prefill
from forebay.engines.capture.read_rows import ROUTED, row_fields
from forebay.engines.capture.request_fields import ROUTED_ASKED, ROUTED_START
from forebay.engines.capture.side_rows import RowPiece, widened
from forebay.engines.capture.trajectory import Trajectory
from forebay.engines.capture.turn import Turn

logger = logging.getLogger(__name__)

NUM_COMPARED = 16
"""Rows that are fetched again and compared with the call's own."""


async def with_prompt_rows(
    http: httpx.AsyncClient, recorded: Trajectory, turns: Sequence[Turn], *, extra_key: str | None = None
) -> list[Turn]:
    """Return the turns of one call, with the rows between those in ``recorded`` and the call's own.

    They come from one prefill at the turns' engine. Server failures never raise: the rows then stay missing.
    """
    # The choices of a call have one prompt, so the rows of the first are enough.
    first = recorded.gap_before(turns[0]) if turns else None
    if first is None or (gap := await _fetched(http, turns[0], first, extra_key)) is None:
        return list(turns)
    arrays = {**turns[0].arrays, ROUTED: [gap, *turns[0].arrays[ROUTED]]}
    return [msgspec.structs.replace(turns[0], arrays=arrays), *turns[1:]]


async def _fetched(http: httpx.AsyncClient, turn: Turn, first: int, extra_key: str | None) -> RowPiece | None:
    """Return the rows before the call's own: those of cached tokens, which it used, if the rows after them agree."""
    own = turn.arrays[ROUTED][0]
    ids = [*(turn.prompt_ids or ()), *(turn.sampled_ids or ())][: own.start + NUM_COMPARED + 1]
    asked = {ROUTED_ASKED: True, ROUTED_START: first}
    try:
        meta_info = await prefill(http, turn.engine_url, ids, extra_key, **asked)
    except (EngineError, TimeoutError) as error:
        logger.info("missing rows of routed experts could not be fetched: %s", type(error).__name__)
        return None
    pieces, cached = row_fields(asked, meta_info, len(ids), 0)["arrays"].get(ROUTED), meta_info.get("cached_tokens")
    if not pieces or not isinstance(cached, int) or cached <= first:
        return None
    fetched: RowPiece = pieces[0]
    if fetched.shape != own.shape or not _agree(fetched, own):
        logger.info("missing rows of routed experts stay missing: the fetched rows differ from the call's own")
        return None
    return fetched.between(first, min(own.start, cached))


def _agree(fetched: RowPiece, own: RowPiece) -> bool:
    stop = min(fetched.end, own.end)
    one, other = (widened(each.between(own.start, stop).content, each.dtype, "U16") for each in (fetched, own))
    return one == other
