"""The requests of a trainer, as flows."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec

from forebay.client.calls.flow import (
    CALL_TIMEOUT_S,
    ENDLESS_S,
    PAGE_RUNS,
    Call,
    Flow,
    Json,
    Lost,
    Pause,
    ServerReply,
    answered,
    decoded,
    failure,
    json_call,
)
from forebay.client.errors import ServerUnreachable, make_error
from forebay.client.model import (
    Batch,
    BatchLike,
    CheckpointInfo,
    CheckpointResult,
    EnginePause,
    RewindResult,
    RunStats,
    WeightUpdate,
    batch_ids,
)
from forebay.client.trainer.leases import Reads, UncheckpointedLeases
from forebay.core.errors import BatchAcked, ForebayError, InvalidInput, NotFound, RunEnded
from forebay.core.safetensors_format import TENSORS_TYPE, blob_json, is_blob
from forebay.core.waiting import Deadline
from forebay.core.weight_versions import PauseMode

logger = logging.getLogger(__name__)

Struct = TypeVar("Struct", bound=msgspec.Struct)

POLL_S = 5.0
"""Longest poll: short enough to notice the end of a run that only this client's own leases keep from ending."""
REPLY_TIMEOUT_S = 60.0
UPDATE_TIMEOUT_S = 900.0
PAUSE_TIMEOUT_S = 120.0
PAUSE_LIMIT_S = 600.0
LEAVING_RETRY_S = 5.0


@dataclass(frozen=True)
class Wanted:
    """The arguments of a read."""

    num_groups: int | None
    batch_size: int | None
    lease_s: float
    step: int | None
    max_staleness: int | None

    def __post_init__(self) -> None:
        if (self.num_groups is None) == (self.batch_size is None):
            raise InvalidInput("give exactly one of num_groups and batch_size", field="num_groups")

    def body(self) -> Json:
        """The body of the request, without the fields that differ between tries."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def next(self) -> "Wanted":
        """The arguments for the next step."""
        return self if self.step is None else replace(self, step=self.step + 1)

    def last(self, num_left: int, *, drop_last: bool) -> "Wanted":
        """The last read of a run that ended with ``num_left`` groups: all of them, unless ``drop_last``."""
        return self if drop_last else replace(self, num_groups=num_left, batch_size=None)


class Reading:
    """The protocol of one reader. Its methods return flows; the object holds the state between them."""

    def __init__(self, retry_for_s: float, *, as_tensors: bool = False) -> None:
        self._retry_for_s = retry_for_s
        self._as_tensors = as_tensors
        self.leases = UncheckpointedLeases()
        self.run_id = ""
        self.reads = Reads()
        self._warned: set[tuple[str, str]] = set()
        self._acked_of: dict[str, list[str]] = {}
        """Acked batches that are in no checkpoint yet, by run, for runs that the client has left."""

    # --- runs

    def start(self, payload: Json) -> Flow[RunStats]:
        """Start a run and attach to it. A retry after a lost reply has the same ``start_id``: no second run starts."""
        yield from self._leave_run_for(payload.get("run_id"))
        payload = {"start_id": f"start-{token_hex(12)}", **payload}
        call = json_call("POST", "v1/runs", payload, REPLY_TIMEOUT_S)
        stats = self._attached(decoded((yield from answered(call, self._retry_for_s)), call))
        for warning in stats.warnings:
            logger.warning("%s: %s", stats.run_id, warning)
        return stats

    def attach(self, run_id: str) -> Flow[RunStats]:
        """Attach to a run. Raises ``RunNotFound``, and ``InvalidInput`` while batches of another run are leased."""
        yield from self._leave_run_for(run_id)
        return self._attached((yield from self._ask("GET", f"v1/runs/{run_id}")))

    def _leave_run_for(self, run_id: object) -> Flow[None]:
        if run_id == self.run_id or not self.run_id:
            return
        self.leases.check()
        # Their leases would no longer be extended: another reader would get them, and they would be trained on twice.
        if leased := self.leases.leased_ids:
            what = leased[0] if len(leased) == 1 else f"{len(leased)} batches"
            hint = "checkpoint, ack or release them first, or use one client per run"
            raise InvalidInput(f"still leased to this client: {what} of {self.run_id}", field="run_id", hint=hint)
        yield from self._release_all([])

    def _attached(self, view: Json) -> RunStats:
        stats = msgspec.convert(view, RunStats)
        if stats.run_id != self.run_id:
            acked = self._acked_of.pop(stats.run_id, ())
            self._acked_of[self.run_id] = self.leases.exchange_acked(acked)
            self.reads.forget()  # their batches were released when the client left the run
        self.run_id = stats.run_id
        return stats

    def runs(self, name: str | None = None) -> Flow[list[RunStats]]:
        """Every run of the server, or every run with this name, oldest first."""
        query: Json = {"limit": PAGE_RUNS} | ({} if name is None else {"name": name})
        found: list[Json] = []
        while True:
            page = (yield from self._ask("GET", f"v1/runs?{urlencode(query)}"))["runs"]
            found += page
            if len(page) < PAGE_RUNS:
                return msgspec.convert(found[::-1], list[RunStats])
            query["before"] = page[-1]["run_id"]

    def stats(self) -> Flow[RunStats]:
        """The state and the statistics of the run."""
        return msgspec.convert((yield from self._ask("GET", self._path())), RunStats)

    def stop(self) -> Flow[RunStats]:
        """Stop the run's process."""
        return msgspec.convert((yield from self._ask("POST", self._path("stop"), {})), RunStats)

    # --- weights

    def set_weight_version(self, version: int) -> Flow[None]:
        """Announce the weight version from which staleness is counted."""
        yield from self._ask("PUT", self._path("weight_version"), {"weight_version": version})

    def update_weights(self, version: int, model_path: str, mode: PauseMode, timeout_s: float) -> Flow[WeightUpdate]:
        """Load other weights into the engines, and announce them."""
        body = {"weight_version": version, "model_path": model_path, "mode": mode}
        reply = yield from self._ask("PUT", self._path("weight_version"), body, timeout_s)
        return msgspec.convert(reply, WeightUpdate)

    def pause_engines(self, mode: PauseMode, limit_s: float) -> Flow[EnginePause]:
        """Pause the engines."""
        body = {"mode": mode, "limit_s": limit_s}
        reply = yield from self._ask("POST", self._path("engines/pause"), body, PAUSE_TIMEOUT_S)
        return msgspec.convert(reply, EnginePause)

    def continue_engines(self, version: int | None) -> Flow[None]:
        """Resume the engines, and announce the version of their weights, if one is given."""
        body = {} if version is None else {"weight_version": version}
        yield from self._ask("POST", self._path("engines/continue"), body, REPLY_TIMEOUT_S)

    # --- batches

    def read(self, wanted: Wanted, wait_s: float | None) -> Flow[Batch | None]:
        """Read a batch; None if there is none within ``wait_s`` seconds."""
        deadline = Deadline(ENDLESS_S if wait_s is None else wait_s)
        poll_s = 0.0  # the first request does not wait, so that a ready batch is returned even with wait_s=0
        while True:
            batch = yield from self._lease(wanted, min(poll_s, deadline.left_s))
            if batch is not None or deadline.left_s <= 0:
                return batch
            poll_s = POLL_S

    def next_batch(self, wanted: Wanted, *, drop_last: bool) -> Flow[Batch | None]:
        """Wait for a batch; None when the run has no more. Raises ``RunEnded`` for a run that failed."""
        poll_s, num_seen = 0.0, 0
        while True:
            try:
                batch = yield from self._lease(wanted, poll_s)
                if batch is not None:
                    return batch
                stats = yield from self.stats()
                if not stats.has_ended or stats.groups.get("open"):
                    poll_s = min(POLL_S, 2 * poll_s + 1)
                    continue
                num_left = stats.groups.get("ready", 0)
                if num_left and (batch := (yield from self._lease(wanted.last(num_left, drop_last=drop_last), 0.0))):
                    return batch
            except RunEnded:
                stats = yield from self.stats()
                _check_not_failed(stats)
                return None
            # Leased groups may still be released, so the server does not report an end. If all of them are leased to
            # this client, there is nothing left for it to read.
            if self.leases.leased_ids if not num_left else drop_last:
                _check_not_failed(stats)
                return None
            # Ready groups that were not returned may have been discarded by the read: ask again at once.
            poll_s, num_seen = 0.0 if num_left != num_seen else POLL_S, num_left

    def _lease(self, wanted: Wanted, wait_s: float) -> Flow[Batch | None]:
        """Make one request for a batch."""
        self.leases.check()
        path = self._path("batches")
        request_id = self.reads.begin(wanted)
        call = self._read_call(path, {**wanted.body(), "wait_s": round(wait_s, 3), "request_id": request_id})
        try:
            reply = yield from answered(call, self._retry_for_s)
        except BaseException:  # cancellation included
            # Its batch may be leased: the next read with the same arguments reuses the id and gets the same batch.
            self.reads.break_off(wanted, request_id)
            raise
        with self.reads.taking(request_id):  # the client may have been closed while the reply was in transit
            return self._taken(reply, call, wanted)

    def _read_call(self, path: str, body: Json) -> Call:
        call = json_call("POST", path, body, body["wait_s"] + REPLY_TIMEOUT_S)
        return replace(call, headers={**call.headers, "Accept": TENSORS_TYPE}) if self._as_tensors else call

    def _taken(self, reply: ServerReply, call: Call, wanted: Wanted) -> Batch | None:
        """The batch in a reply, whose lease the client extends from here on; None if there is none."""
        content = reply.body if is_blob(reply.body) else b""
        batch = decoded(replace(reply, body=blob_json(content)) if content else reply, call)
        if batch["batch_id"] is None:
            return None
        self.leases.add(batch["batch_id"], batch["lease_s"])
        self._warn(batch["meta_info"].get("warning"))
        names = ("batch_id", "meta_info", "lease_s", "group_sizes", "group_ids")
        return Batch(
            **{name: batch[name] for name in names},
            rows=batch["data"],
            step=wanted.step,
            foreign_rows=frozenset(batch.get("foreign_rows", ())),
            content=content,
        )

    def _warn(self, text: str | None) -> None:
        """Log a warning of the server, once per run."""
        if text and (self.run_id, text) not in self._warned:
            self._warned.add((self.run_id, text))
            logger.warning("%s: %s", self.run_id, text)

    def ack(self, batch: BatchLike) -> Flow[None]:
        """Mark a batch as used."""
        self.leases.check()
        for batch_id in batch_ids(batch):
            with self.leases.busy([batch_id]):
                yield from self._ask("POST", self._path(f"batches/{batch_id}/ack"), {})
                self.leases.acked(batch_id)

    def release(self, batches: BatchLike | Iterable[BatchLike]) -> Flow[None]:
        """Release batches."""
        for batch_id in batch_ids(batches):
            with self.leases.busy([batch_id]):
                yield from self._ask("POST", self._path(f"batches/{batch_id}/release"), {})
                self.leases.drop([batch_id])

    def checkpoint(self, step: int, batches: BatchLike | Iterable[BatchLike] | None) -> Flow[CheckpointResult]:
        """Add batches to the checkpoint of a step; by default all that are in no checkpoint."""
        self.leases.check()
        ids = self.leases.all_ids if batches is None else batch_ids(batches)
        with self.leases.busy(ids):
            reply = yield from self._ask("POST", self._path("checkpoints"), {"step": step, "batch_ids": ids})
            self.leases.drop(ids)
        return msgspec.convert(reply, CheckpointResult)

    def checkpoints(self) -> Flow[list[CheckpointInfo]]:
        """The checkpoints of the run, by step."""
        reply = yield from self._ask("GET", self._path("checkpoints"))
        return msgspec.convert(reply["checkpoints"], list[CheckpointInfo])

    def rewind(self, step: int | None) -> Flow[RewindResult]:
        """Make groups that are in no checkpoint up to ``step`` ready again."""
        ids = self.leases.all_ids
        with self.leases.busy(ids):
            reply = yield from self._ask("POST", self._path("rewind"), {"step": step})
            self.leases.forget()
        self.reads.forget()
        return msgspec.convert(reply, RewindResult)

    # --- leases

    def keep(self) -> Flow[None]:
        """Extend leases when they are due, without end."""
        while True:
            yield Pause(self.leases.pause_s, is_wakeable=True)
            for batch_id, lease_s in self.leases.due():
                yield from self._extend(batch_id, lease_s)

    def _extend(self, batch_id: str, lease_s: float) -> Flow[None]:
        # One try with a short timeout: other leases wait for their turn meanwhile.
        call = json_call("POST", self._path(f"batches/{batch_id}/extend"), {}, max(1.0, lease_s / 6))
        reply: ServerReply | Lost = yield call
        if isinstance(reply, ServerReply) and reply.is_success:
            self.leases.extended(batch_id, is_done=True)
            return
        error = failure(reply, call)
        if isinstance(reply, ServerReply) and reply.status in (404, 409) and not isinstance(error, BatchAcked):
            self.leases.lose(batch_id, _as_lost(batch_id, error))
            return
        logger.warning("the lease of %s could not be extended, retrying: %s", batch_id, error)
        self.leases.extended(batch_id, is_done=False)

    def leave(self) -> Flow[None]:
        """Release all leased batches, those of interrupted reads included. What cannot be released expires.

        To be run after reads have ended and those in progress were interrupted.
        """
        self._retry_for_s = min(self._retry_for_s, LEAVING_RETRY_S)
        yield from self._release_all(self.leases.leased_ids)

    def _release_all(self, batch_ids: list[str]) -> Flow[None]:
        """Release these batches, and those of interrupted reads."""
        released: set[str] = set()
        try:
            while True:  # until none is found: the server may answer an interrupted read only now
                for batch_id in batch_ids:
                    yield from self._release_one(batch_id)
                released.update(batch_ids)
                batch_ids = [batch_id for batch_id in (yield from self._untaken()) if batch_id not in released]
                if not batch_ids:
                    return
        except ForebayError as error:
            logger.warning("not all batches were released; the leases of the others will expire: %s", error)

    def _release_one(self, batch_id: str) -> Flow[None]:
        try:
            yield from self.release(batch_id)
        except (ServerUnreachable, NotFound):  # all others would fail too: closing must not take a minute for each
            raise
        except ForebayError as error:
            logger.warning("%s was not released: %s", batch_id, error)

    def _untaken(self) -> Flow[list[str]]:
        """Batches of interrupted reads: leased to this client, but never taken by it."""
        request_ids = self.reads.open_ids
        if not request_ids:
            return []
        reply = yield from self._ask("GET", self._path("batches?state=leased"))
        return [batch["batch_id"] for batch in reply["batches"] if batch["request_id"] in request_ids]

    # --- asking

    def _path(self, rest: str = "") -> str:
        if not self.run_id:
            hint = "call start() or attach(run_id) first"
            raise InvalidInput("this client is not attached to a run", hint=hint, field="run_id")
        return f"v1/runs/{self.run_id}/{rest}".rstrip("/")

    def _ask(
        self, method: str, path: str, body: Json | None = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> Flow[dict[str, Any]]:
        call = json_call(method, path, body, timeout_s)
        return decoded((yield from answered(call, self._retry_for_s)), call)


def _check_not_failed(stats: RunStats) -> None:
    if stats.state == "failed":
        error = stats.reason.partition("\n")[0]  # a traceback may follow
        raise RunEnded(stats.run_id, f"failed: {error}")


def _as_lost(batch_id: str, error: Exception) -> ForebayError:
    """The error that the trainer's next call raises."""
    hint = getattr(error, "hint", "") or "rewind to the last checkpoint"
    return make_error("lease_lost", f"the lease of {batch_id} was lost: {error}", hint=hint)


def start_payload(
    task_type: str | None, group_size: int | None, input_file: str | Path | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """The body of a start, without the fields that are None."""
    named = {"task_type": task_type, "group_size": group_size}
    given = {name: value for name, value in named.items() if value is not None} | settings
    if input_file is not None:
        given["input_file"] = str(input_file)
    return {name: value for name, value in given.items() if value is not None}
