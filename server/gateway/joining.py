"""Chunks of an answer that was gone on with after an abort."""

from collections.abc import Sequence
from typing import Any

from forebay.server.gateway.refusals import EngineLost

Json = dict[str, Any]


def rest_of(seen: Json, whole: Json) -> Json:
    """The delta between a message of which ``seen`` has gone out and the ``whole`` one.

    Raises ``EngineLost`` if what has gone out is no beginning of it.
    """
    delta: Json = {}
    for name in ("reasoning_content", "content"):
        before, now = seen.get(name) or "", whole.get(name) or ""
        if not now.startswith(before):
            raise EngineLost("the answer was aborted, and its rest does not fit what has gone out")
        if now != before:
            delta[name] = now[len(before) :]
    if calls := _rest_of_calls(seen.get("tool_calls") or [], whole.get("tool_calls") or []):
        delta["tool_calls"] = calls
    return delta


def _rest_of_calls(seen: Sequence[Json], whole: Sequence[Json]) -> list[Json]:
    if len(seen) > len(whole):
        raise EngineLost("the answer was aborted in a tool call that its rest does not complete")
    rest = [{"index": index, **call} for index, call in enumerate(whole)][len(seen) :]
    begun = []
    for index, (before, now) in enumerate(zip(seen, whole, strict=False)):
        given, full = before["function"].get("arguments") or "", now["function"].get("arguments") or ""
        if not full.startswith(given):
            raise EngineLost("the answer was aborted in a tool call that its rest does not fit")
        now["id"] = before.get("id") or now.get("id")
        if full != given:
            begun.append({"index": index, "function": {"arguments": full[len(given) :]}})
    return [*begun, *rest]
