"""What the lead knows of a rollout that runs in a worker."""

import asyncio
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
from forebay.workers.rollouts.messages import Assignment, RolloutDone, Span
from forebay.workers.rollouts.placed_worker import PlacedWorker

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
class PlacedRollout:
    """From the moment at which a worker is asked to run it until its sample is on the disk, or nobody needs it."""

    uid: str
    plan: GroupPlan
    number: int
    attempt: int
    """That began last, as far as it is known."""
    done: "asyncio.Future[RolloutDone]"
    group: OpenGroup | None = None
    seat: Seat | None = None
    slot: int | None = None
    """Once its sample is to be written."""
    member: PlacedWorker | None = None
    """Where it is; None once that is gone."""
    is_ended: bool = False
    """Nobody needs it, and its worker knows."""

    def assignment(
        self,
        engine: str | None,
        cap_tokens: int | None,
        left_s: float,
        waited: tuple[str, int, list[Span]],
    ) -> Assignment:
        """What a worker is asked."""
        return Assignment(
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
            slot=self.slot,
        )

    @property
    def execution(self) -> RemoteExecution | None:
        """The present attempt."""
        known = self.group.rollouts.get(self.number) if self.group is not None else None
        return known[-1] if known and isinstance(known[-1], RemoteExecution) else None

    def note_attempt(self, attempt: int) -> None:
        """It has begun."""
        while self.attempt < attempt:
            self.attempt += 1
            if self.group is not None:
                self.group.note_rollout(self.number, RemoteExecution())

    def note_tokens(self, tokens: int) -> None:
        """So many its present attempt has sampled."""
        if (execution := self.execution) is not None:
            execution.num_sampled_tokens = tokens

    def note_done(self, done: RolloutDone) -> None:
        """It has ended: what its attempts have sampled is known."""
        if self.group is not None:
            last = len(done.tokens) - 1
            executions: list[Execution] = [RemoteExecution(each) for each in done.tokens]
            if executions:
                executions[last].trajectory = RemoteRecord(done.counters)
            self.group.rollouts[self.number] = executions
        if not self.done.done():
            self.done.set_result(done)

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
