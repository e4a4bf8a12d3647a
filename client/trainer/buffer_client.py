"""The blocking client of a trainer. ``async_buffer_client.py`` has the awaited one; both use ``requests.py``."""

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
    """Reads batches of a run and reports to the buffer what was done with them::

        with BufferClient("http://127.0.0.1:8889") as client:
            client.start("math", group_size=8, input_file="tasks.jsonl", remote_engine_url="http://127.0.0.1:30000")
            for step, batch in enumerate(client.batches(num_groups=16)):
                train(batch.rows)
                client.checkpoint(step)  # before the model of this step becomes visible

    A batch is leased to this client until the client checkpoints, acks or releases it. A background thread extends the
    lease every third of ``lease_s``. A lease can still be lost: the process was suspended for longer than ``lease_s``,
    or another client rewound the run. The next call that concerns batches then raises ``LeaseLost``, once per lost
    batch. To recover, ``rewind`` to the last checkpoint.

    Leaving the ``with`` block, normally or by an exception, releases what is still leased: those batches are ready for
    the next reader at once. Checkpointed and acked batches are unaffected. Calls that other threads have in progress
    are interrupted and raise ``ClientClosed``, as does every later call. A batch that such a call was about to return
    is released too.

    While the server is unreachable or busy, each call is retried for up to ``retry_for_s`` seconds, so a restart of the
    server goes unnoticed. Retries never have an effect twice. Calls raise the errors of ``forebay.core.errors``, and
    ``ServerUnreachable``. The client is thread-safe.

    ``token`` is the server's token, by default ``FOREBAY_TOKEN`` from the environment. With ``as_tensors``, token
    arrays arrive as tensors for ``collate``, many times faster than as lists, and the rows omit them.
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
        """Interrupt calls of other threads, release what is still leased, and close the connections. Leaving the
        ``with`` block does the same."""
        if not self._reading.reads.end():
            return
        # No batch is taken from now on, so nothing starts another keeper, which would outlive the client.
        with self._keeper_lock:
            keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.stop()
        # Cut first: a read in another thread could otherwise lease a batch after the release below.
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
        """The run that this client started or attached to; empty before that."""
        return self._reading.run_id

    def start(
        self,
        task_type: str | None = None,
        group_size: int | None = None,
        input_file: str | Path | None = None,
        **settings: Any,
    ) -> RunStats:
        """Start a run and attach to it.

        ``input_file`` is a path on the server. ``settings`` are the other fields of a start (``remote_engine_url``,
        ``num_epoch``, ``name``, ``max_staleness``, …) and any that the generator takes. ``task_type`` and
        ``group_size`` are required, except with ``replay="run-…"`` or ``replay={"source": "run-…", "steps": "50-60"}``:
        a replay takes omitted fields from the recording.

        Raises ``StartRefused``, ``InvalidInput``.
        """
        return self._run(self._reading.start(start_payload(task_type, group_size, input_file, settings)))

    def attach(self, run_id: str) -> RunStats:
        """Attach to an existing run.

        Raises ``RunNotFound``. Like ``start``, raises ``InvalidInput`` while batches of another run are leased to this
        client: checkpoint, ack or release them first.
        """
        return self._run(self._reading.attach(run_id))

    def runs(self, name: str | None = None) -> list[RunStats]:
        """Every run of the server, or every run with this ``name``, oldest first."""
        return self._run(self._reading.runs(name))

    def stats(self) -> RunStats:
        """The state and the statistics of the run."""
        return self._run(self._reading.stats())

    def stop(self) -> RunStats:
        """Stop the run's process. Its data is kept, and completed groups can still be read."""
        return self._run(self._reading.stop())

    # --- weights

    def set_weight_version(self, version: int) -> None:
        """Announce the version of the weights in the engines (0 or more). Staleness is counted from it."""
        self._run(self._reading.set_weight_version(version))

    def update_weights(
        self,
        version: int,
        model_path: str | Path,
        mode: PauseMode = "abort",
        *,
        timeout_s: float = UPDATE_TIMEOUT_S,
    ) -> WeightUpdate:
        """Load the weights in ``model_path``, a path on each engine's machine, into every engine; announce ``version``.

        The engines are paused meanwhile. ``mode`` decides what happens to calls in flight. With "abort" they end, and
        the base generator continues them from their tokens. With "retract" the engine continues them and recomputes
        their cache under the new weights. With "in_place" they continue with the old cache, which is fastest, but
        their logprobs belong to no single policy.

        Raises ``WeightUpdateFailed``, which names the engine and quotes its reply, and ``EnginesPaused``.
        """
        return self._run(self._reading.update_weights(version, str(model_path), mode, timeout_s))

    @contextmanager
    def paused_engines(
        self, mode: PauseMode = "abort", *, weight_version: int | None = None, limit_s: float = PAUSE_LIMIT_S
    ) -> Iterator[EnginePause]:
        """Pause the engines of the run inside the ``with`` block, so that the trainer can transfer weights itself.

        When the block ends, the engines resume and ``weight_version`` is announced, also to the engines. After an error
        they resume without it. A block that takes longer than ``limit_s`` seconds raises ``PauseExpired`` at its end.
        ``mode`` is as for ``update_weights``.
        """
        pause = self._run(self._reading.pause_engines(mode, limit_s))
        try:
            yield pause
        except BaseException:  # however the block ends, the engines must resume
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
        """Iterate over batches of ``num_groups`` groups, or of ``batch_size`` rows in whole groups, until the run ends.

        The last batch may be smaller; with ``drop_last`` its groups stay in the buffer. ``step`` is the training step
        of the first batch and increases by one per batch; the server only records and shows it. ``max_staleness``
        overrides the run's own limit. Iteration also ends once all remaining groups are leased to this client.

        Raises ``LeaseLost``, and ``RunEnded`` at the end of a run that failed.
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
        """Read one batch. Returns None if none is ready within ``wait_s`` seconds; without ``wait_s``, waits for one.

        Raises ``LeaseLost``, and ``RunEnded`` when the run can deliver no more groups.
        """
        wanted = Wanted(num_groups, batch_size, lease_s, step, max_staleness)
        return self._run(self._reading.read(wanted, wait_s))

    def checkpoint(self, step: int, batches: BatchLike | Iterable[BatchLike] | None = None) -> CheckpointResult:
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
        return self._run(self._reading.checkpoint(step, batches))

    def checkpoints(self) -> list[CheckpointInfo]:
        """The checkpoints of the run, by step."""
        return self._run(self._reading.checkpoints())

    def rewind(self, step: int | None) -> RewindResult:
        """Make every group that is in no checkpoint up to ``step`` ready again, in its original order.

        All leases of the run are revoked, those of other clients too. With None, the run is rewound to its beginning.
        Call it when the trainer loads a model. Raises ``CheckpointNotFound``, which lists the known steps.
        """
        return self._run(self._reading.rewind(step))

    def ack(self, batch: BatchLike) -> None:
        """Mark a batch as used; the next ``checkpoint`` includes it. For loops without checkpoints.

        Raises ``LeaseLost``.
        """
        self._run(self._reading.ack(batch))

    def release(self, batches: BatchLike | Iterable[BatchLike]) -> None:
        """Release batches: their groups are ready for the next reader. Raises ``BatchAcked``."""
        self._run(self._reading.release(batches))
