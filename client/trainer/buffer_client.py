"""The blocking client of a trainer. ``async_buffer_client.py`` has the awaited one; both use ``requests.py``."""

import inspect
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, get_args

from forebay.client.calls.flow import RETRY_FOR_S, Flow
from forebay.client.calls.transport import Background, Transport
from forebay.client.model import Batch, EnginePause
from forebay.client.trainer.leases import Wanted
from forebay.client.trainer.requests import LEASE_S, Reading
from forebay.client.trainer.run_requests import PAUSE_LIMIT_S
from forebay.core.weight_versions import PauseMode

DEFAULT_URL = "http://127.0.0.1:8889"
JOIN_S = 5.0

P = ParamSpec("P")
T = TypeVar("T")


def blocking(request: Callable[Concatenate[Reading, P], Flow[T]]) -> Callable[Concatenate["BufferClient", P], T]:
    """Make the method that runs ``request`` and returns its result."""

    @wraps(request, assigned=("__name__", "__doc__"))
    def call(self: "BufferClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(request(self._reading, *args, **kwargs))

    show_as_method(call, request, "BufferClient")
    return call


def show_as_method(call: Any, request: Callable[..., object], client: str) -> None:
    """Let ``help`` show ``call`` as a method of ``client`` that returns the result of the flow of ``request``."""
    signature = inspect.signature(request)
    call.__signature__ = signature.replace(return_annotation=get_args(signature.return_annotation)[-1])
    call.__qualname__ = f"{client}.{request.__name__}"


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

    start = blocking(Reading.start)
    attach = blocking(Reading.attach)
    runs = blocking(Reading.runs)
    stats = blocking(Reading.stats)
    stop = blocking(Reading.stop)
    evaluate = blocking(Reading.evaluate)

    # --- weights

    set_weight_version = blocking(Reading.set_weight_version)
    update_weights = blocking(Reading.update_weights)

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

    read = blocking(Reading.read)
    metrics = blocking(Reading.metrics)
    arrays = blocking(Reading.arrays)
    images = blocking(Reading.images)
    annotate = blocking(Reading.annotate)
    checkpoint = blocking(Reading.checkpoint)
    checkpoints = blocking(Reading.checkpoints)
    rewind = blocking(Reading.rewind)
    ack = blocking(Reading.ack)
    release = blocking(Reading.release)
