"""The link to a Forebay server: the private address ``…/w/{run_key}`` of one run."""

from typing import Any

import httpx
import msgspec

from forebay.generators.link import (
    ACKNOWLEDGED,
    BUSY,
    REPEAT,
    BufferBusy,
    ClosedGroups,
    Link,
    LinkRefused,
    Progress,
    Verdict,
    retry_after_s,
)
from forebay.generators.schedule import Plan

FEED_WAIT_S = 25.0
JSON = {"Content-Type": "application/json"}
REPEATABLE_CODES = frozenset({"buffer_full", "storage_failed"})
OVER_STATES = frozenset({"stopped", "failed"})


class ServerLink(Link):
    """Speaks ``plan``, ``samples``, ``progress`` and ``closed_groups`` below a run's private address."""

    has_feed = True
    takes_failed = True

    async def plan(self, fallback: Plan) -> Plan:  # noqa: ARG002 - the server knows better
        told = _decoded(await self._ask("GET", "plan"))
        return Plan(
            run_id=told["run_id"],
            group_size=int(told["group_size"]),
            group_timeout_s=float(told["group_timeout_seconds"]),
            group_deadline_s=float(told["group_deadline_seconds"]),
            closed=frozenset((instance_id, epoch) for instance_id, epoch in told["closed"]),
            taken={(instance_id, epoch): frozenset(slots) for instance_id, epoch, slots in told["taken"]},
            is_resumed=bool(told.get("is_resumed")),
        )

    async def write(self, samples: list[bytes]) -> list[Verdict]:
        response = await self._try("POST", "samples", content=b"[" + b",".join(samples) + b"]", headers=JSON)
        results = _results(response, len(samples))
        if results is not None:
            return [_verdict(result) for result in results]
        if response is None or response.status_code in BUSY or len(samples) > 1:
            raise BufferBusy(retry_after_s(response), may_split=response is not None)
        return [Verdict(problem=f"{response.status_code}: {response.text[:500]}")]

    async def report(self, progress: Progress) -> None:
        body = {
            "opened": [list(key) for key in progress.opened],
            "waiting_for_engine": progress.is_waiting_for_engine,
            "num_groups_total": progress.num_groups_total,
            "is_last_slot_reported": progress.is_last_slot_reported,
        }
        _decoded(await self._ask("POST", "progress", content=msgspec.json.encode(body), headers=JSON))

    async def closed_groups(self, after: int) -> ClosedGroups:
        query = {"after": after, "wait_s": FEED_WAIT_S}
        told = _decoded(await self._ask("GET", "closed_groups", params=query))
        closed = [group["group_id"] for group in told["groups"]]
        return ClosedGroups(closed, int(told["last"]), told.get("run_state") in OVER_STATES)


def _decoded(response: httpx.Response) -> dict[str, Any]:
    if response.is_error:
        raise LinkRefused(
            f"the buffer answers {response.status_code} to {response.request.url.path}: {response.text[:300]}",
            hint="server and generator must be of the same version",
        )
    return dict(msgspec.json.decode(response.content))


def _results(response: httpx.Response | None, count: int) -> list[dict[str, Any]] | None:
    """The verdicts of the server, one per sample; None if it gave none."""
    if response is None or not response.content:
        return None
    try:
        results = msgspec.json.decode(response.content).get("results")
    except (msgspec.DecodeError, AttributeError):
        return None
    return results if isinstance(results, list) and len(results) == count else None


def _verdict(result: dict[str, Any]) -> Verdict:
    error = result.get("error")
    if not error:
        return ACKNOWLEDGED
    if error.get("code") in REPEATABLE_CODES:
        return REPEAT
    return Verdict(problem=f"{error.get('code')}: {error.get('message')}")
