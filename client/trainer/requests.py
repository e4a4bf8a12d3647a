"""What a trainer asks of the server, as flows."""

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
"""Seconds of the longest poll: short enough to notice the end of a run that this client itself keeps from ending."""
REPLY_TIMEOUT_S = 60.0
UPDATE_TIMEOUT_S = 900.0
PAUSE_TIMEOUT_S = 120.0
PAUSE_LIMIT_S = 600.0
LEAVING_RETRY_S = 5.0


@dataclass(frozen=True)
class Wanted:
    """What is asked for with each batch."""

    num_groups: int | None
    batch_size: int | None
    lease_s: float
    step: int | None
    max_staleness: int | None

    def __post_init__(self) -> None:
        if (self.num_groups is None) == (self.batch_size is None):
            raise InvalidInput("give either num_groups or batch_size", field="num_groups")

    def body(self) -> Json:
        """The request's, without what differs from try to try."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def next(self) -> "Wanted":
        """The same for the next step."""
        return self if self.step is None else replace(self, step=self.step + 1)

    def last(self, num_left: int, *, drop_last: bool) -> "Wanted":
        """What to ask for once more when a run has ended with so many groups: all of them, unless those are dropped."""
        return self if drop_last else replace(self, num_groups=num_left, batch_size=None)


class Reading:
    """The protocol of one reader. Its methods return flows; it holds what outlives them."""

    def __init__(self, retry_for_s: float, *, as_tensors: bool = False) -> None:
        self._retry_for_s = retry_for_s
        self._as_tensors = as_tensors
        self.leases = UncheckpointedLeases()
        self.run_id = ""
        self.reads = Reads()
        self._warned: set[tuple[str, str]] = set()
        self._acked_of: dict[str, list[str]] = {}
        """By run that was left for another: acked batches that no checkpoint holds yet."""

    # --- runs

    def start(self, payload: Json) -> Flow[RunStats]:
        """Start a run and attach to it. Made again after a lost reply, under its ``start_id``, it is the same start."""
        yield from self._leave_run_for(payload.get("run_id"))
        payload = {"start_id": f"start-{token_hex(12)}", **payload}
        call = json_call("POST", "v1/runs", payload, REPLY_TIMEOUT_S)
        stats = self._attached(decoded((yield from answered(call, self._retry_for_s)), call))
        for warning in stats.warnings:
            logger.warning("%s: %s", stats.run_id, warning)
        return stats

    def attach(self, run_id: str) -> Flow[RunStats]:
        """Go on with a run. Raises ``RunNotFound``, and ``InvalidInput`` while batches of another run are leased."""
        yield from self._leave_run_for(run_id)
        return self._attached((yield from self._ask("GET", f"v1/runs/{run_id}")))

    def _leave_run_for(self, run_id: object) -> Flow[None]:
        if run_id == self.run_id or not self.run_id:
            return
        self.leases.check()
        # Nobody would extend them any more: they would go to another reader, and be trained on twice.
        if leased := self.leases.leased_ids:
            what = f"{leased[0]} is leased" if len(leased) == 1 else f"{len(leased)} batches are leased"
            hint = "checkpoint, ack or release them first, or take a client for each run"
            raise InvalidInput(f"{what}, of {self.run_id}", field="run_id", hint=hint)
        yield from self._give_back_all([])

    def _attached(self, view: Json) -> RunStats:
        stats = msgspec.convert(view, RunStats)
        if stats.run_id != self.run_id:
            acked = self._acked_of.pop(stats.run_id, ())
            self._acked_of[self.run_id] = self.leases.exchange_acked(acked)
            self.reads.forget()  # what they had leased was given back when the run was left
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
        """The run in numbers."""
        return msgspec.convert((yield from self._ask("GET", self._path())), RunStats)

    def stop(self) -> Flow[RunStats]:
        """End the run's process."""
        return msgspec.convert((yield from self._ask("POST", self._path("stop"), {})), RunStats)

    # --- weights

    def set_weight_version(self, version: int) -> Flow[None]:
        """Announce the policy from which staleness counts."""
        yield from self._ask("PUT", self._path("weight_version"), {"weight_version": version})

    def update_weights(self, version: int, model_path: str, mode: PauseMode, timeout_s: float) -> Flow[WeightUpdate]:
        """Let the engines load other weights, and announce them."""
        body = {"weight_version": version, "model_path": model_path, "mode": mode}
        reply = yield from self._ask("PUT", self._path("weight_version"), body, timeout_s)
        return msgspec.convert(reply, WeightUpdate)

    def pause_engines(self, mode: PauseMode, limit_s: float) -> Flow[EnginePause]:
        """Let the engines stand still."""
        body = {"mode": mode, "limit_s": limit_s}
        reply = yield from self._ask("POST", self._path("engines/pause"), body, PAUSE_TIMEOUT_S)
        return msgspec.convert(reply, EnginePause)

    def continue_engines(self, version: int | None) -> Flow[None]:
        """Let the engines go on, and announce the weights that they have, if a version is given."""
        body = {} if version is None else {"weight_version": version}
        yield from self._ask("POST", self._path("engines/continue"), body, REPLY_TIMEOUT_S)

    # --- batches

    def read(self, wanted: Wanted, wait_s: float | None) -> Flow[Batch | None]:
        """A batch, or None once ``wait_s`` is over."""
        deadline = Deadline(ENDLESS_S if wait_s is None else wait_s)
        poll_s = 0.0  # the first look does not wait: what is there is had even without time
        while True:
            batch = yield from self._lease(wanted, min(poll_s, deadline.left_s))
            if batch is not None or deadline.left_s <= 0:
                return batch
            poll_s = POLL_S

    def next_batch(self, wanted: Wanted, *, drop_last: bool) -> Flow[Batch | None]:
        """A batch, however long it takes; None when there will be none. Raises ``RunEnded`` for a run that failed."""
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
            # While leases last, what they hold may come back, and the server says nothing of an end. If they are this
            # client's own, then having nothing else is the end for it.
            if self.leases.leased_ids if not num_left else drop_last:
                _check_not_failed(stats)
                return None
            # Groups that were there and did not go out may be gone by now, discarded by the read: look again at once.
            poll_s, num_seen = 0.0 if num_left != num_seen else POLL_S, num_left

    def _lease(self, wanted: Wanted, wait_s: float) -> Flow[Batch | None]:
        """One request for a batch."""
        self.leases.check()
        path = self._path("batches")
        request_id = self.reads.begin(wanted)
        call = self._read_call(path, {**wanted.body(), "wait_s": round(wait_s, 3), "request_id": request_id})
        try:
            reply = yield from answered(call, self._retry_for_s)
        except BaseException:  # also a call that was cancelled
            # Its batch may be leased: the next read that wants the same asks under the same id, and gets the same.
            self.reads.break_off(wanted, request_id)
            raise
        with self.reads.taking(request_id):  # the client may have been closed while the answer was under way
            return self._taken(reply, call, wanted)

    def _read_call(self, path: str, body: Json) -> Call:
        call = json_call("POST", path, body, body["wait_s"] + REPLY_TIMEOUT_S)
        return replace(call, headers={**call.headers, "Accept": TENSORS_TYPE}) if self._as_tensors else call

    def _taken(self, reply: ServerReply, call: Call, wanted: Wanted) -> Batch | None:
        """What a reply has, which is this client's from here on."""
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
        """Say what the server warns of, once for each run."""
        if text and (self.run_id, text) not in self._warned:
            self._warned.add((self.run_id, text))
            logger.warning("%s: %s", self.run_id, text)

    def ack(self, batch: BatchLike) -> Flow[None]:
        """A batch is done with."""
        self.leases.check()
        for batch_id in batch_ids(batch):
            with self.leases.busy([batch_id]):
                yield from self._ask("POST", self._path(f"batches/{batch_id}/ack"), {})
                self.leases.acked(batch_id)

    def release(self, batches: BatchLike | Iterable[BatchLike]) -> Flow[None]:
        """Give batches back."""
        for batch_id in batch_ids(batches):
            with self.leases.busy([batch_id]):
                yield from self._ask("POST", self._path(f"batches/{batch_id}/release"), {})
                self.leases.drop([batch_id])

    def checkpoint(self, step: int, batches: BatchLike | Iterable[BatchLike] | None) -> Flow[CheckpointResult]:
        """Fix batches to a step; by default all that no checkpoint holds."""
        self.leases.check()
        ids = self.leases.all_ids if batches is None else batch_ids(batches)
        with self.leases.busy(ids):
            reply = yield from self._ask("POST", self._path("checkpoints"), {"step": step, "batch_ids": ids})
            self.leases.drop(ids)
        return msgspec.convert(reply, CheckpointResult)

    def checkpoints(self) -> Flow[list[CheckpointInfo]]:
        """The checkpoints that the run knows, by step."""
        reply = yield from self._ask("GET", self._path("checkpoints"))
        return msgspec.convert(reply["checkpoints"], list[CheckpointInfo])

    def rewind(self, step: int | None) -> Flow[RewindResult]:
        """Undo what no checkpoint up to ``step`` holds."""
        ids = self.leases.all_ids
        with self.leases.busy(ids):
            reply = yield from self._ask("POST", self._path("rewind"), {"step": step})
            self.leases.forget()
        self.reads.forget()
        return msgspec.convert(reply, RewindResult)

    # --- leases

    def keep(self) -> Flow[None]:
        """Extend leases when they are due, for ever."""
        while True:
            yield Pause(self.leases.pause_s, is_wakeable=True)
            for batch_id, lease_s in self.leases.due():
                yield from self._extend(batch_id, lease_s)

    def _extend(self, batch_id: str, lease_s: float) -> Flow[None]:
        # Asked once, and not for long: other leases wait for their turn meanwhile.
        call = json_call("POST", self._path(f"batches/{batch_id}/extend"), {}, max(1.0, lease_s / 6))
        reply: ServerReply | Lost = yield call
        if isinstance(reply, ServerReply) and reply.is_success:
            self.leases.extended(batch_id, is_done=True)
            return
        error = failure(reply, call)
        if isinstance(reply, ServerReply) and reply.status in (404, 409) and not isinstance(error, BatchAcked):
            self.leases.lose(batch_id, _as_lost(batch_id, error))
            return
        logger.warning("the lease of %s could not be extended, trying again: %s", batch_id, error)
        self.leases.extended(batch_id, is_done=False)

    def leave(self) -> Flow[None]:
        """Give back what is leased, known or not. What cannot be given back is left to the leases' end.

        To be run when reads have ended and those under way were broken off.
        """
        self._retry_for_s = min(self._retry_for_s, LEAVING_RETRY_S)
        yield from self._give_back_all(self.leases.leased_ids)

    def _give_back_all(self, batch_ids: list[str]) -> Flow[None]:
        """Give these back, and those of reads that were broken off."""
        given_back: set[str] = set()
        try:
            while True:  # until none is found: a read that was broken off may be answered at the server only now
                for batch_id in batch_ids:
                    yield from self._give_back(batch_id)
                given_back.update(batch_ids)
                batch_ids = [batch_id for batch_id in (yield from self._untaken()) if batch_id not in given_back]
                if not batch_ids:
                    return
        except ForebayError as error:
            logger.warning("not all batches were released, their leases will run out: %s", error)

    def _give_back(self, batch_id: str) -> Flow[None]:
        try:
            yield from self.release(batch_id)
        except (ServerUnreachable, NotFound):  # and so with all others: leaving must not take a minute for each
            raise
        except ForebayError as error:
            logger.warning("%s was not released: %s", batch_id, error)

    def _untaken(self) -> Flow[list[str]]:
        """Batches of reads that were broken off: they went out, and nobody here took them."""
        request_ids = self.reads.open_ids
        if not request_ids:
            return []
        reply = yield from self._ask("GET", self._path("batches?state=leased"))
        return [batch["batch_id"] for batch in reply["batches"] if batch["request_id"] in request_ids]

    # --- asking

    def _path(self, rest: str = "") -> str:
        if not self.run_id:
            raise InvalidInput("no run is chosen", hint="call start() or attach(run_id) first", field="run_id")
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
    """What the trainer's next call raises."""
    hint = getattr(error, "hint", "") or "rewind to the last checkpoint"
    return make_error("lease_lost", f"the lease of {batch_id} is lost: {error}", hint=hint)


def start_payload(
    task_type: str | None, group_size: int | None, input_file: str | Path | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """The body of a start; what is None is left out."""
    named = {"task_type": task_type, "group_size": group_size}
    given = {name: value for name, value in named.items() if value is not None} | settings
    if input_file is not None:
        given["input_file"] = str(input_file)
    return {name: value for name, value in given.items() if value is not None}
