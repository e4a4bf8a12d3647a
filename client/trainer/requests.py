"""The requests of a trainer, as flows."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.client.batch_metrics import batch_metrics, timed
from forebay.client.calls.flow import (
    ENDLESS_S,
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
    RewindResult,
    RunStats,
    batch_ids,
)
from forebay.client.trainer.annotate import RETRY_S, NoteQueue, encode_note
from forebay.client.trainer.leases import Reads, UncheckpointedLeases, Wanted
from forebay.client.trainer.read_arrays import SampleRequests
from forebay.client.trainer.run_requests import REPLY_TIMEOUT_S
from forebay.core.backoff import Deadline
from forebay.core.errors import BatchAcked, ForebayError, InvalidInput, NotFound, RunEnded
from forebay.core.safetensors_format import TENSORS_TYPE, blob_json, is_blob

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

logger = logging.getLogger(__name__)

LEASE_S = 600.0
POLL_S = 5.0
"""Longest poll: short enough to notice the end of a run that only this client's own leases keep from ending."""
LEAVING_RETRY_S = 5.0


class Reading(SampleRequests):
    """The protocol of one reader. Its methods return flows; the object holds the state between them."""

    def __init__(self, retry_for_s: float, *, as_tensors: bool = False) -> None:
        super().__init__(retry_for_s)
        self._as_tensors = as_tensors
        self.leases = UncheckpointedLeases()
        self.reads = Reads()
        self.notes = NoteQueue()
        self._warned: set[tuple[str, str]] = set()
        self._acked_of: dict[str, list[str]] = {}
        """Acked batches that are in no checkpoint yet, by run, for runs that the client has left."""

    # --- runs

    def start(
        self,
        /,
        task_type: str | None = None,
        group_size: int | None = None,
        input_file: str | Path | None = None,
        **settings: Any,
    ) -> Flow[RunStats]:
        """Start a run and attach to it.

        ``input_file`` is a path on the server. ``settings`` are the other fields of a start (``remote_engine_url``,
        ``num_epoch``, ``name``, ``max_staleness``, …) and any that the generator takes. ``task_type`` and
        ``group_size`` are required, except with ``replay="run-…"`` or ``replay={"source": "run-…", "steps": "50-60"}``:
        a replay takes omitted fields from the recording.

        Raises ``StartRefused``, ``InvalidInput``.
        """
        yield from self._leave_run_for(settings.get("run_id"))
        named = {"task_type": task_type, "group_size": group_size, "input_file": input_file and str(input_file)}
        payload = {name: value for name, value in (named | settings).items() if value is not None}
        # A retry after a lost reply has the same ``start_id``, so no second run starts.
        payload = {"start_id": f"start-{token_hex(12)}", **payload}
        call = json_call("POST", "v1/runs", payload, REPLY_TIMEOUT_S)
        stats = self._attached(decoded((yield from answered(call, self._retry_for_s)), call))
        for warning in stats.warnings:
            logger.warning("%s: %s", stats.run_id, warning)
        return stats

    def attach(self, run_id: str) -> Flow[RunStats]:
        """Attach to an existing run.

        Raises ``RunNotFound``. Like ``start``, raises ``InvalidInput`` while batches of another run are leased to this
        client: checkpoint, ack or release them first.
        """
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

    # --- batches

    @timed
    def read(
        self,
        num_groups: int | None = None,
        batch_size: int | None = None,
        *,
        wait_s: float | None = None,
        lease_s: float = LEASE_S,
        step: int | None = None,
        max_staleness: int | None = None,
    ) -> Flow[Batch | None]:
        """Read one batch. Returns None if none is ready within ``wait_s`` seconds; without ``wait_s``, waits for one.

        Raises ``LeaseLost``, and ``RunEnded`` when the run can deliver no more groups.
        """
        wanted = Wanted(num_groups, batch_size, lease_s, step, max_staleness)
        deadline = Deadline(ENDLESS_S if wait_s is None else wait_s)
        poll_s = 0.0  # the first request does not wait, so that a ready batch is returned even with wait_s=0
        while True:
            batch = yield from self._lease(wanted, min(poll_s, deadline.left_s))
            if batch is not None or deadline.left_s <= 0:
                return batch
            poll_s = POLL_S

    @timed
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
        self.notes.learn(self._batch_path(batch["batch_id"]), batch["data"])
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
        """Mark a batch as used; the next ``checkpoint`` includes it. For loops without checkpoints.

        Raises ``LeaseLost``.
        """
        self.leases.check()
        for batch_id in batch_ids(batch):
            with self.leases.busy([batch_id]):
                yield from self._ask("POST", f"{self._batch_path(batch_id)}/ack", {})
                self.leases.acked(batch_id)

    def metrics(self, batch: Batch) -> Flow[dict[str, float]]:
        """Numbers about a batch and its run, for W&B, Trackio, MLflow or TensorBoard; see ``docs/trainers.md``.

        Rewards, staleness, lengths and the wait are of the batch; counts of groups and outcomes are of the whole run.
        """
        return batch_metrics([(batch, (yield from self.stats()))])

    def annotate(
        self,
        uid: str,
        values: "Mapping[str, float | ArrayLike]",
        *,
        step: int,
        batch: BatchLike | None = None,
        producer: str = "trainer",
    ) -> Flow[None]:
        """Store numbers of your own about a sample, such as the trainer's logprobs; training never reads them.

        A value is one number, or an array (NumPy, torch or a list) with one item per token of the sample, or per token
        of its response. A response begins with the first token whose ``loss_mask`` is 1, unless the sample has a
        ``response_length``. Notes are only added; repeating a call changes nothing. They are sent in the background,
        at the latest on closing; what the server refuses is logged. Works also after the ack.

        Without ``batch``, this client must have read the sample itself. ``step`` is the training step, ``producer``
        any name. Raises ``InvalidInput`` for a sample of an unknown batch, and ``MissingExtra`` without NumPy.
        """
        yield from ()
        self.reads.check()
        path = self.notes.batch_of(uid) if batch is None else self._batch_path(batch)
        self.notes.add(path, encode_note(uid, values, step, producer))
        self.leases.wake()

    def release(self, batches: BatchLike | Iterable[BatchLike]) -> Flow[None]:
        """Release batches for the next reader. If this fails, their leases expire. Raises ``BatchAcked``."""
        for batch_id in batch_ids(batches):
            with self.leases.busy([batch_id]):
                try:
                    yield from self._ask("POST", f"{self._batch_path(batch_id)}/release", {})
                except BatchAcked:
                    raise
                except ForebayError:  # no later checkpoint may include it; the lease expires
                    self.leases.drop([batch_id])
                    raise
                self.leases.drop([batch_id])

    def checkpoint(self, step: int, batches: BatchLike | Iterable[BatchLike] | None = None) -> Flow[CheckpointResult]:
        """Add batches to the checkpoint of ``step`` and ack them, all or none. A rewind to this step keeps them.

        The default is ALL batches that this client has returned and that are in no checkpoint. A loop that reads ahead
        must name the batches it trained on; otherwise the checkpoint includes batches that the model has not seen::

            trained = []
            for batch in prefetch(client.batches(num_groups=16)):
                train(batch.rows)
                trained.append(batch)
                if is_time_to_save():
                    client.checkpoint(step, trained)
                    trained.clear()

        Call it before the model file becomes visible. A checkpoint without its model is harmless; a model without its
        checkpoint is not. Raises ``LeaseLost``, ``CheckpointConflict``, ``BatchNotFound``.
        """
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
        """Make every group that is in no checkpoint up to ``step`` ready again, in its original order.

        All leases of the run are revoked, those of other clients too. With None, the run is rewound to its beginning.
        Call it when the trainer loads a model. Raises ``CheckpointNotFound``, which lists the known steps.
        """
        ids = self.leases.all_ids
        with self.leases.busy(ids):
            reply = yield from self._ask("POST", self._path("rewind"), {"step": step})
            self.leases.forget()
        self.reads.forget()
        return msgspec.convert(reply, RewindResult)

    # --- leases, and what else is done in the background

    def keep(self) -> Flow[None]:
        """Extend leases when they are due, and send notes, without end."""
        while True:
            yield Pause(0.0 if self.notes else self.leases.pause_s, is_wakeable=True)
            for batch_id, lease_s in self.leases.due():
                yield from self._extend(batch_id, lease_s)
            if self.notes and not (yield from self.notes.send()):
                yield Pause(min(RETRY_S, self.leases.pause_s))

    def _extend(self, batch_id: str, lease_s: float) -> Flow[None]:
        # One try with a short timeout: other leases wait for their turn meanwhile.
        call = json_call("POST", f"{self._batch_path(batch_id)}/extend", {}, max(1.0, lease_s / 6))
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
        """Send all notes, and release all leased batches, those of interrupted reads included.

        What cannot be released expires.

        To be run after reads have ended and those in progress were interrupted.
        """
        self._retry_for_s = min(self._retry_for_s, LEAVING_RETRY_S)
        while self.notes and (yield from self.notes.send(self._retry_for_s)):
            pass
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


def _check_not_failed(stats: RunStats) -> None:
    if stats.state == "failed":
        error = stats.reason.partition("\n")[0]  # a traceback may follow
        raise RunEnded(stats.run_id, f"failed: {error}")


def _as_lost(batch_id: str, error: Exception) -> ForebayError:
    """The error that the trainer's next call raises."""
    hint = getattr(error, "hint", "") or "rewind to the last checkpoint"
    return make_error("lease_lost", f"the lease of {batch_id} was lost: {error}", hint=hint)
