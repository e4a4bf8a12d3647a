"""The client of a trainer that blocks; its awaited twin says the same (``requests.py``)."""

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from forebay.client.calls.transport import Background, Transport
from forebay.client.model import (
    Batch,
    BatchLike,
    CheckpointInfo,
    CheckpointResult,
    EnginePause,
    RewindResult,
    RunStats,
    WeightUpdate,
)
from forebay.client.trainer.requests import PAUSE_LIMIT_S, UPDATE_TIMEOUT_S, Reading, Wanted, start_payload
from forebay.core.weight_versions import PauseMode

DEFAULT_URL = "http://127.0.0.1:8889"
RETRY_FOR_S = 120.0
LEASE_S = 600.0
JOIN_S = 5.0


class BufferClient:
    """Reads batches of a run, and tells the buffer what became of them::

        with BufferClient("http://127.0.0.1:8889") as client:
            client.start("math", group_size=8, input_file="tasks.jsonl", remote_engine_url="http://127.0.0.1:30000")
            for step, batch in enumerate(client.batches(num_groups=16)):
                train(batch.rows)
                client.checkpoint(step)  # before the model of this step becomes visible

    A batch is leased: it is this client's until it is checkpointed, acked or released, and while the client lives its
    lease is extended, at a third of ``lease_s``, by a thread of the client's own. A lease that is lost all the same
    (this process stood still for longer than ``lease_s``, or somebody rewound the run) is told by ``LeaseLost`` at the
    next call that has to do with batches, once for each lost batch. ``rewind`` to the last checkpoint is the remedy.

    Leaving the ``with`` block, by its end or by an error, gives back what is still leased: batches that were
    checkpointed or acked stay so, all others are ready for the next reader at once. What other threads are doing with
    the client is broken off: a read or an iterator that waits there raises ``ClientClosed``, as does every later call,
    and what it was about to get is given back as well.

    Every call is made again while nobody answers or the server says that it is busy, for up to ``retry_for_s`` seconds:
    a restart of the server is not noticed. No repetition does anything twice. Errors are those of
    ``forebay.core.errors``, and ``ServerUnreachable``. May be used by several threads.

    ``token`` is the server's, by default the environment's ``FOREBAY_TOKEN``. With ``as_tensors`` the token arrays of a
    batch come as tensors for ``collate``, many times faster than as lists, and its rows are without them.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        token: str | None = None,
        *,
        retry_for_s: float = RETRY_FOR_S,
        as_tensors: bool = False,
    ) -> None:
        self._transport = Transport(url, token or os.environ.get("FOREBAY_TOKEN"))
        self._run = self._transport.run
        self._reading = Reading(retry_for_s, as_tensors=as_tensors)
        self._reading.leases.wake = self._keep
        self._keeper: Background | None = None
        self._keeper_lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Break off what other threads are doing with this client, give back what is still leased, and let go of the
        connections. What leaving the ``with`` block does."""
        if not self._reading.reads.end():
            return
        # No batch is taken any more, so nothing wakes a keeper that would outlive the client.
        with self._keeper_lock:
            keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.stop()
        # Cut first: what a read of another thread leases after the giving back, nobody would find.
        self._transport.cut()
        try:
            self._transport.run_last(self._reading.leave())
        finally:
            if keeper is not None:
                keeper.join(JOIN_S)
            self._transport.close()

    def _keep(self) -> None:
        with self._keeper_lock:
            if self._keeper is None:
                self._keeper = Background(self._transport, self._reading.keep(), "forebay-leases")
            else:
                self._keeper.wake()

    # --- runs

    @property
    def run_id(self) -> str:
        """The run that was started or attached to; empty before."""
        return self._reading.run_id

    def start(
        self,
        task_type: str | None = None,
        group_size: int | None = None,
        input_file: str | Path | None = None,
        **settings: Any,
    ) -> RunStats:
        """Start a run and attach to it.

        ``input_file`` is a path on the server. ``settings`` are the other fields of a start: ``remote_engine_url``,
        ``num_epoch``, ``name``, ``max_staleness``, whatever the generator takes. With ``replay="run-…"``, or
        ``replay={"source": "run-…", "steps": "50-60"}``, what is left out is as it was recorded; any other start needs
        ``task_type`` and ``group_size``.

        Raises ``StartRefused``, ``InvalidInput``.
        """
        return self._run(self._reading.start(start_payload(task_type, group_size, input_file, settings)))

    def attach(self, run_id: str) -> RunStats:
        """Go on with a run that exists.

        Raises ``RunNotFound``, and, as ``start`` does, ``InvalidInput`` while batches of another run are leased to this
        client: they must be checkpointed, acked or released before.
        """
        return self._run(self._reading.attach(run_id))

    def runs(self, name: str | None = None) -> list[RunStats]:
        """Every run of the server, or every run with this ``name``, oldest first."""
        return self._run(self._reading.runs(name))

    def stats(self) -> RunStats:
        """The run in numbers."""
        return self._run(self._reading.stats())

    def stop(self) -> RunStats:
        """End the run's process. Its data stays, and what is complete can still be read."""
        return self._run(self._reading.stop())

    # --- weights

    def set_weight_version(self, version: int) -> None:
        """Tell which policy the engines have now (0 or more): staleness counts from it."""
        self._run(self._reading.set_weight_version(version))

    def update_weights(
        self,
        version: int,
        model_path: str | Path,
        mode: PauseMode = "abort",
        *,
        timeout_s: float = UPDATE_TIMEOUT_S,
    ) -> WeightUpdate:
        """Let every engine of the run load the weights in ``model_path``, a path on its machine, and announce them.

        The engines stand still meanwhile. With ``mode`` "abort" calls in flight end, and the base generator goes on
        with them from their tokens; with "retract" they go on by themselves, their cache computed anew under the new
        weights; with "in_place" they go on with the old cache: fastest, and their logprobs belong to no one policy.

        Raises ``WeightUpdateFailed``, which names the engine and what it said, ``EnginesPaused``.
        """
        return self._run(self._reading.update_weights(version, str(model_path), mode, timeout_s))

    @contextmanager
    def paused_engines(
        self, mode: PauseMode = "abort", *, weight_version: int | None = None, limit_s: float = PAUSE_LIMIT_S
    ) -> Iterator[EnginePause]:
        """The engines of the run stand still, idle, inside the ``with`` block, for weights that the trainer brings.

        At its end they go on, with ``weight_version`` announced, to the engines too; after an error they go on without
        it. A block that takes longer than ``limit_s`` seconds raises ``PauseExpired`` at its end. ``mode`` is that of
        ``update_weights``.
        """
        pause = self._run(self._reading.pause_engines(mode, limit_s))
        try:
            yield pause
        except BaseException:  # however the block ends, engines must not stand still
            self._run(self._reading.continue_engines(None))
            raise
        self._run(self._reading.continue_engines(weight_version))

    # --- batches

    def batches(
        self,
        num_groups: int | None = None,
        batch_size: int | None = None,
        *,
        lease_s: float = LEASE_S,
        step: int | None = None,
        max_staleness: int | None = None,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """Iterate over batches of ``num_groups`` groups, or of as many as have ``batch_size`` rows, until the run has
        ended.

        The last batch may be smaller; with ``drop_last`` the groups that would make it are left in the buffer.
        ``step`` is what the first batch will be used for, each further one is for the step after; it is only
        recorded and shown. ``max_staleness`` replaces the run's own bound. A run has ended for this iterator also
        when all that is left of it is leased to this client.

        Raises ``RunEnded`` at the end of a run that failed, ``LeaseLost``.
        """
        return self._iterate(Wanted(num_groups, batch_size, lease_s, step, max_staleness), drop_last=drop_last)

    def _iterate(self, wanted: Wanted, *, drop_last: bool) -> Iterator[Batch]:
        while batch := self._run(self._reading.next_batch(wanted, drop_last=drop_last)):
            yield batch
            wanted = wanted.next()

    def read(
        self,
        num_groups: int | None = None,
        batch_size: int | None = None,
        *,
        wait_s: float | None = None,
        lease_s: float = LEASE_S,
        step: int | None = None,
        max_staleness: int | None = None,
    ) -> Batch | None:
        """One batch; None if there is none within ``wait_s`` seconds. Without ``wait_s`` it waits as long as it takes.

        Raises ``RunEnded`` when nothing will ever come, ``LeaseLost``.
        """
        wanted = Wanted(num_groups, batch_size, lease_s, step, max_staleness)
        return self._run(self._reading.read(wanted, wait_s))

    def checkpoint(self, step: int, batches: BatchLike | Iterable[BatchLike] | None = None) -> CheckpointResult:
        """Fix batches to the checkpoint of ``step`` and ack them, all or none: a rewind to it will not undo them.

        By default these are ALL batches that this client handed out and that no checkpoint holds. A loop that reads
        ahead must name those that it trained on, or the checkpoint claims batches that the model has not seen::

            trained = []
            for batch in prefetch(client.batches(num_groups=16)):
                train(batch.rows)
                trained.append(batch)
                if is_time_to_save():
                    client.checkpoint(step, trained)
                    trained.clear()

        Call it before the model file becomes visible: a mark without a model is harmless, a model without its mark is
        not. Raises ``LeaseLost``, ``CheckpointConflict``, ``BatchNotFound``.
        """
        return self._run(self._reading.checkpoint(step, batches))

    def checkpoints(self) -> list[CheckpointInfo]:
        """The checkpoints that the run knows, by step."""
        return self._run(self._reading.checkpoints())

    def rewind(self, step: int | None) -> RewindResult:
        """Undo all that no checkpoint up to ``step`` holds: those groups are ready again, in their order, for whoever
        reads next, and every lease of the run is revoked. None goes to before the first checkpoint.

        What a trainer calls when it loads a model. Raises ``CheckpointNotFound``, which lists the known steps.
        """
        return self._run(self._reading.rewind(step))

    def ack(self, batch: BatchLike) -> None:
        """A batch is done with; the next ``checkpoint`` holds it. For loops without checkpoints.

        Raises ``LeaseLost``.
        """
        self._run(self._reading.ack(batch))

    def release(self, batches: BatchLike | Iterable[BatchLike]) -> None:
        """Give batches back: their groups are ready for the next reader. Raises ``BatchAcked``."""
        self._run(self._reading.release(batches))
