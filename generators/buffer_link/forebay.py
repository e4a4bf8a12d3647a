"""The link to a Forebay server: the private address ``…/w/{run_key}`` of one run."""

from collections.abc import Sequence
from typing import Any

import msgspec

from forebay.client.calls.flow import ENDLESS_S, JSON_BODY, Call, Flow, ServerReply, answered, json_call
from forebay.client.sample_writer.outbox import Sample
from forebay.client.sample_writer.protocol import WRITE_TIMEOUT_S
from forebay.core.binary_sample import is_raw
from forebay.core.errors import ForebayError
from forebay.core.ids import group_id
from forebay.core.scheduling.oversampling import Oversampling
from forebay.core.scheduling.scheduler import Scheduler
from forebay.core.weight_versions import AnnouncedWeights
from forebay.generators.buffer_link.abc import (
    BUSY,
    GONE,
    MAX_REPORTED_GROUPS,
    MAX_TEXT,
    MAX_WORKERS,
    TIMEOUT_S,
    ClosedGroups,
    GroupKey,
    Link,
    LinkRefused,
    NoteFull,
    Plan,
    ProgressReport,
    ReplayTask,
    RunGone,
    RunWriting,
    Step,
    WorkerReport,
    asked,
    ignore,
    text_of,
)
from forebay.replay.errors import NotRecorded
from forebay.replay.group_frames import RecordedBodies, read_frames

FEED_WAIT_S = 25.0
OVER_STATES = frozenset({"stopped", "failed"})
KEPT_OF_REFUSED = ("uid", "instance_id", "epoch", "slot", "attempt", "rollout_id")


class ServerLink(Link):
    """Calls ``plan``, ``samples``, ``progress`` and ``closed_groups`` below a run's private address."""

    has_feed = True
    takes_failed = True

    def _writing(self, max_waiting: int) -> RunWriting:
        return _ServerWriting("samples", max_waiting)

    async def plan(self, fallback: Plan) -> Plan:
        answer = await self._ask(Call("GET", "plan", timeout_s=TIMEOUT_S))
        taken = [(instance_id, epoch, slots, rest) for instance_id, epoch, slots, *rest in answer["taken"]]
        return Plan(
            run_id=answer["run_id"],
            group_size=int(answer["group_size"]),
            group_timeout_s=float(answer["group_timeout_seconds"]),
            group_deadline_s=float(answer["group_deadline_seconds"]),
            closed=frozenset((instance_id, epoch) for instance_id, epoch in answer["closed"]),
            taken={(instance_id, epoch): frozenset(slots) for instance_id, epoch, slots, _ in taken},
            uids=frozenset(uid for *_, rest in taken for uids in rest for uid in uids),
            last_closed=int(answer.get("last_closed_seq") or 0),
            # What the server's settings leave open is decided by the generator's code.
            oversampling=Oversampling(**answer["oversampling"])
            if answer.get("oversampling")
            else fallback.oversampling,
            scheduler=Scheduler(**answer["scheduler"]) if answer.get("scheduler") else fallback.scheduler,
            step=_step(answer),
            captures=fallback.captures,
            replay=_replay(answer.get("replay")),
        )

    async def report(self, progress: ProgressReport, note_full: NoteFull = ignore) -> None:
        groups = {name: getattr(progress, name) for name in ("opened", "idle", "busy", "short")}
        for name, keys in groups.items():  # `opened` first: the other lists name groups that the server already knows
            for start in range(0, len(keys) - MAX_REPORTED_GROUPS, MAX_REPORTED_GROUPS):
                first = {name: keys[start : start + MAX_REPORTED_GROUPS]}
                await self._ask(json_call("POST", "progress", first, TIMEOUT_S))
            groups[name] = keys[-(len(keys) % MAX_REPORTED_GROUPS or MAX_REPORTED_GROUPS) :]
        workers = None if progress.workers is None else list(map(_cut, progress.workers[:MAX_WORKERS]))
        last = msgspec.structs.replace(progress, **groups, workers=workers)
        await self._ask(json_call("POST", "progress", last, TIMEOUT_S), note_full)

    async def closed_groups(self, before: ClosedGroups) -> ClosedGroups:
        known = {"after": before.last, "seen": before.seen, "paused": before.is_paused, "still": before.is_still}
        query = {**known, "wait_s": FEED_WAIT_S}
        answer = await self._ask(Call("GET", "closed_groups", timeout_s=TIMEOUT_S, query=query))
        return ClosedGroups(
            group_ids=[group["group_id"] for group in answer["groups"]],
            last=int(answer["last"]),
            is_run_over=answer.get("run_state") in OVER_STATES,
            step=_step(answer),
            seen=int(answer.get("seen") or 0),
            is_paused=bool(answer.get("paused")),
            is_still=bool(answer.get("still")),
        )

    async def recorded(self, key: GroupKey) -> RecordedBodies | None:
        instance_id, epoch = key
        query: dict[str, str | int] = {"instance_id": msgspec.json.encode(instance_id).decode(), "epoch": epoch}
        call = Call("GET", f"recorded/{group_id(instance_id, epoch)}", timeout_s=TIMEOUT_S, query=query)
        reply = await self.transport.run(answered(call, ENDLESS_S, BUSY))
        if reply.is_success:
            return read_frames(reply.body)
        if reply.status == NotRecorded.status and _code_of(reply) == NotRecorded.code:
            return None
        if reply.status in GONE:
            raise RunGone(f"the buffer returned {reply.status} for this run: {text_of(reply)}")
        raise LinkRefused(f"the buffer returned {reply.status} for {call.path}: {text_of(reply)}")

    async def _ask(self, call: Call, note_full: NoteFull = ignore) -> dict[str, Any]:
        reply = await self.transport.run(asked(call, note_full))
        if reply.status >= 400:
            raise LinkRefused(
                f"the buffer returned {reply.status} for {call.path}: {text_of(reply)}",
                hint="server and generator must have the same version",
            )
        return dict(msgspec.json.decode(reply.body))


class _ServerWriting(RunWriting):
    """Sends one array of samples per call. A sample that the server rejects is sent again as a failed sample."""

    def call(self, bodies: Sequence[bytes]) -> Flow[Call]:
        if any(map(is_raw, bodies)):
            return (yield from super().call(bodies))
        return Call("POST", "samples", b"[" + b",".join(bodies) + b"]", JSON_BODY, WRITE_TIMEOUT_S)

    def replacement(self, sample: Sample, error: ForebayError) -> Sample | None:
        """Return a failed sample that fills the slot, so that the group need not wait for its deadline."""
        # A fork has no slot, and a rejected failed sample would be rejected again.
        if sample.get("fork") or sample.get("status") == "failed":
            return None
        kept = {name: sample[name] for name in KEPT_OF_REFUSED}
        problem = {"type": "SampleRefused", "message": f"{error.code}: {error}"}
        return {**kept, "messages": [], "status": "failed", "error": problem}


def _cut(worker: WorkerReport) -> WorkerReport:
    texts = {name: getattr(worker, name)[-MAX_TEXT:] for name in ("node", "blocked_at", "reason")}
    return msgspec.structs.replace(worker, **texts)


def _code_of(reply: ServerReply) -> str:
    try:
        return str(msgspec.json.decode(reply.body)["error"]["code"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return ""


def _replay(given: dict[str, Any] | None) -> ReplayTask | None:
    if given is None:
        return None
    groups = given.get("groups")
    keys = None if groups is None else [(instance_id, epoch) for instance_id, epoch in groups]
    return ReplayTask(given["mode"], given["rewards"] == "again", keys)


def _step(answer: dict[str, Any]) -> Step | None:
    step = answer.get("step")
    if not step:
        return None
    weights = AnnouncedWeights(**step["weights"]) if "weights" in step else None
    return Step(step["number"], step["weight_version"], weights, step["counted"], step["discarded"])
