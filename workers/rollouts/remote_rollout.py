"""What the lead knows of a rollout that runs in a worker."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from forebay.client.sample_writer.outbox import Sample
from forebay.core.errors import ForebayError
from forebay.core.outcome import RolloutOutcome
from forebay.core.task_row import TaskRow
from forebay.engines.capture.sample_fields import HasFields, Recorded
from forebay.engines.ring import Call
from forebay.generators.rollouts.open_group import Execution, GroupPlan, OpenGroup
from forebay.generators.rollouts.samples import Unbegun, failed_sample
from forebay.generators.rollouts.seat import Seat
from forebay.workers.rollouts.orders import Done, Order, Span
from forebay.workers.rollouts.run_worker import RunWorker

WORKERS = "workers"
"""In place of an engine's address, for all calls of a rollout that a worker makes."""
STREAMS = "/streams"


@dataclass
class RemoteRecord:
    """Of what a worker has recorded, the lead has the numbers."""

    counters: Mapping[str, int] = field(default_factory=dict)

    def samples(self) -> Sequence[HasFields]:
        """They are the worker's."""
        return ()


@dataclass
class RemoteExecution:
    """One attempt, as far as it is counted."""

    num_sampled_tokens: int = 0
    trajectory: Recorded = field(default_factory=RemoteRecord)


@dataclass(eq=False)
class RemoteRollout:
    """From the moment at which a worker is asked to run it until its sample is on the disk, or nobody needs it."""

    uid: str
    plan: GroupPlan
    number: int
    attempt: int
    """That began last, as far as it is known."""
    group: OpenGroup | None = None
    seat: Seat | None = None
    is_done: bool = False
    """It has ended; its samples wait in its worker."""
    slot: int | None = None
    """Once its sample is to be written."""
    worker: RunWorker | None = None
    """Where it is; None once that is gone."""
    is_dropped: bool = False
    """It is not needed, and its worker knows."""

    def order(
        self,
        engine: str | None,
        cap_tokens: int | None,
        left_s: float,
        waited: tuple[str, int, list[Span]],
    ) -> Order:
        """What a worker is asked."""
        return Order(
            uid=self.uid,
            row=line_of(self.plan.row),
            row_number=self.plan.row.number,
            epoch=self.plan.epoch,
            number=self.number,
            attempt=self.attempt,
            left_s=left_s,
            engine=engine,
            cap_tokens=cap_tokens,
            span=waited[0],
            lasted=waited[1],
            waits=waited[2],
        )

    @property
    def execution(self) -> RemoteExecution | None:
        """The present attempt."""
        known = self.group.rollouts.get(self.number) if self.group is not None else None
        return known[-1] if known and isinstance(known[-1], RemoteExecution) else None

    def note_moved(self, engine: str | None, attempt: int) -> None:
        """It was on this engine, or on none, when its worker reported: in this attempt."""
        if self.is_done or attempt < self.attempt:
            return
        while self.attempt < attempt:
            self.attempt += 1
            if self.group is not None:
                self.group.note_rollout(self.number, RemoteExecution())
        if self.seat is not None:
            self.seat.move(engine)

    def note_tokens(self, tokens: int) -> None:
        """So many its present attempt has sampled."""
        if (execution := self.execution) is not None:
            execution.num_sampled_tokens = tokens

    def note_done(self, done: Done) -> None:
        """It has ended: what its attempts have sampled is known."""
        self.is_done = True
        if self.group is not None:
            last = len(done.tokens) - 1
            executions: list[Execution] = [RemoteExecution(each) for each in done.tokens]
            if executions:
                executions[last].trajectory = RemoteRecord(done.counters)
            self.group.rollouts[self.number] = executions

    @contextmanager
    def standing_for_calls(self, group: OpenGroup) -> Iterator[None]:
        """Whatever calls it has in flight: those answered in one piece, and streams."""
        whole, streams = (WORKERS, self.uid), (WORKERS, self.uid + STREAMS)
        group.begin_stream(streams)
        try:
            with group.in_flight(whole):
                yield
        finally:
            group.end_stream(streams)

    def failed(self, error: ForebayError, slot: int) -> Sample:
        """Its sample, where no worker has come to one."""
        unbegun = Unbegun(self.plan, self.uid, self.number, slot, self.attempt)
        return failed_sample(unbegun, error, RolloutOutcome.ENVIRONMENT_FAILURE)


class KilledWorkers(ForebayError):
    """Every worker that ran a rollout has died."""

    code = "killed_workers"

    def __init__(self, reason: str) -> None:
        super().__init__(f"each worker that ran it has died; the last one: {reason}")


class TookTooLong(ForebayError):
    """A rollout was made again after its sample was lost, and has not ended in the time of a group."""

    code = "took_too_long"

    def __init__(self) -> None:
        super().__init__("its sample was lost with its worker; made again, it took longer than its group may")


def uids_of(calls: Sequence[Call]) -> tuple[list[str], bool]:
    """The rollouts for which calls stand, and whether their streams are meant too."""
    uids = [uid.removesuffix(STREAMS) for url, uid in calls if url == WORKERS]
    return list(dict.fromkeys(uids)), any(uid.endswith(STREAMS) for _, uid in calls)


def line_of(row: TaskRow) -> bytes:
    """The row as a line of JSON."""
    try:
        return msgspec.json.encode(row.fields)
    except OverflowError:  # an integer of more than 64 bits
        return json.dumps(row.fields).encode()
