"""The link to a Forebay server: the private address ``…/w/{run_key}`` of one run."""

from typing import Any

import httpx
import msgspec

from forebay.client.sample_writer.protocol import REPEATABLE_CODES, read_verdicts
from forebay.core.binary_sample import SAMPLES_TYPE, is_binary, join_samples
from forebay.core.errors import ForebayError
from forebay.core.oversampling import Oversampling
from forebay.generators.buffer_link.abc import (
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
from forebay.generators.job.schedule import Plan
from forebay.generators.job.step_gate import Step

FEED_WAIT_S = 25.0
JSON = {"Content-Type": "application/json"}
SAMPLES = {"Content-Type": SAMPLES_TYPE}
OVER_STATES = frozenset({"stopped", "failed"})


class ServerLink(Link):
    """Speaks ``plan``, ``samples``, ``progress`` and ``closed_groups`` below a run's private address."""

    has_feed = True
    takes_failed = True

    async def plan(self, fallback: Plan) -> Plan:
        told = _decoded(await self._ask("GET", "plan"))
        taken = [(instance_id, epoch, slots, rest) for instance_id, epoch, slots, *rest in told["taken"]]
        return Plan(
            run_id=told["run_id"],
            group_size=int(told["group_size"]),
            group_timeout_s=float(told["group_timeout_seconds"]),
            group_deadline_s=float(told["group_deadline_seconds"]),
            closed=frozenset((instance_id, epoch) for instance_id, epoch in told["closed"]),
            taken={(instance_id, epoch): frozenset(slots) for instance_id, epoch, slots, _ in taken},
            uids=frozenset(uid for *_, rest in taken for uids in rest for uid in uids),
            is_resumed=bool(told.get("is_resumed")),
            last_closed=int(told.get("last_closed_seq") or 0),
            # Beyond its own settings the server lets the generator's code decide.
            oversampling=Oversampling(**told["oversampling"]) if told.get("oversampling") else fallback.oversampling,
            step=_step(told),
            captures=fallback.captures,
        )

    async def write(self, samples: list[bytes]) -> list[Verdict]:
        has_arrays = any(is_binary(sample) for sample in samples)
        content = join_samples(samples) if has_arrays else b"[" + b",".join(samples) + b"]"
        response = await self._try("POST", "samples", content=content, headers=SAMPLES if has_arrays else JSON)
        errors = None if response is None else read_verdicts(response.content, len(samples))
        if errors is not None:
            return [_verdict(error) for error in errors]
        if response is None or response.status_code in BUSY or len(samples) > 1:
            raise BufferBusy(retry_after_s(response), may_split=response is not None)
        return [Verdict(problem=f"{response.status_code}: {response.text[:500]}")]

    async def report(self, progress: Progress) -> None:
        body = {
            "opened": [list(key) for key in progress.opened],
            "waiting_for_engine": progress.is_waiting_for_engine,
            "held": progress.is_held,
            "num_groups_total": progress.num_groups_total,
            "is_last_slot_reported": progress.is_last_slot_reported,
            "process_id": progress.process_id,
            "counts": progress.counts,
        }
        _decoded(await self._ask("POST", "progress", content=msgspec.json.encode(body), headers=JSON))

    async def closed_groups(self, told: ClosedGroups) -> ClosedGroups:
        query = {"after": told.last, "seen": told.seen, "paused": told.is_paused, "wait_s": FEED_WAIT_S}
        news = _decoded(await self._ask("GET", "closed_groups", params=query))
        return ClosedGroups(
            group_ids=[group["group_id"] for group in news["groups"]],
            last=int(news["last"]),
            is_run_over=news.get("run_state") in OVER_STATES,
            step=_step(news),
            seen=int(news.get("seen") or 0),
            is_paused=bool(news.get("paused")),
        )


def _step(told: dict[str, Any]) -> Step | None:
    step = told.get("step")
    return Step(step["number"], step["weight_version"], step["counted"], step["discarded"]) if step else None


def _decoded(response: httpx.Response) -> dict[str, Any]:
    if response.is_error:
        raise LinkRefused(
            f"the buffer answers {response.status_code} to {response.request.url.path}: {response.text[:300]}",
            hint="server and generator must be of the same version",
        )
    return dict(msgspec.json.decode(response.content))


def _verdict(error: ForebayError | None) -> Verdict:
    if error is None:
        return ACKNOWLEDGED
    return REPEAT if error.code in REPEATABLE_CODES else Verdict(problem=f"{error.code}: {error}")
