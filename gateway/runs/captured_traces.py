"""Calls of a generator that knows nothing of the gateway: which rollout they are of is known once a sample has them.

Until then their spans wait here. What lasts long is noted at once all the same, of no rollout yet.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from forebay.client.calls.flow import ServerReply
from forebay.core.ids import InstanceId, group_id, read_instance_id, read_uid
from forebay.core.sample import PLACE_HEADER
from forebay.engines.capture.call_spans import end_turn, versions_of
from forebay.engines.capture.turn import Turn
from forebay.telemetry.tracing.attempt_trace import AttemptTrace
from forebay.telemetry.tracing.records import Record, Span
from forebay.telemetry.tracing.spans import Scope
from forebay.telemetry.tracing.trace_ids import new_span_id
from forebay.telemetry.tracing.tracer import Tracer


class CallSpans:
    """The spans of one call, as ``begin`` has them made. ``step`` is that of the run when it began."""

    def __init__(self, tracer: Tracer, step: int) -> None:
        self.run_id = tracer.run_id
        self.step = step
        self._tracer = tracer
        self._spans: list[Span] = []
        self._is_claimed = self._is_released = False
        self.begun = tracer.now()
        self._id = new_span_id()

    def begin(self) -> AttemptTrace:
        """What makes the spans, as if the call were a rollout."""
        # Kept whatever the share: of which group it is, and so whether its spans are, turns out later.
        return AttemptTrace(self, uid="", group="", attempt=0, begun=self.begun, id=self._id)

    # --- what that asks of whoever takes its records

    def now(self) -> int:
        return self._tracer.now()

    def write(self, record: Record) -> None:
        if isinstance(record, Span) and not self._is_released:
            self._spans.append(record)
        elif self._tracer.rate > 0:
            self._tracer.write(record)

    def watch(self, scope: Scope) -> None:
        self._tracer.watch(scope)

    # --- whose they are

    def release(self) -> None:
        """No further sample will have the call: its spans are the run's, unless one has it."""
        self._is_released = True
        spans, self._spans = self._spans, []
        for span in () if self._is_claimed else spans:
            self.write(msgspec.structs.replace(span, up="" if span.up == self._id else span.up))

    def claim(self, attempt: AttemptTrace, number: int, turn: Turn) -> None:
        """It is the turn ``number`` of a rollout: ``turn``, the choice that the rollout's sample has."""
        whole = next((span for span in self._spans if span.name == "turn"), None)
        if whole is None:
            return
        # Of several choices one rollout gets the ids; the engine may have been told them.
        ids = {span.id: new_span_id() if self._is_claimed else span.id for span in self._spans}
        self._is_claimed = True
        at = {**whole.at, "versions": versions_of([turn]), "finish_reason": turn.finish_reason}
        handle = attempt.turn(number, begun=whole.t, id=ids[whole.id], **at)
        for span in self._spans:
            if span is not whole:
                taken = msgspec.structs.replace(span, id=ids[span.id])
                attempt.take_over(taken, turn=number, up=ids.get(span.up, ""))
        end_turn(handle, [turn], at_ns=whole.t + whole.d)


Calls = Sequence[tuple[CallSpans, Turn]]
"""The calls of one conversation, in order, and of each the choice that it went on with."""


class CapturedRollout:
    """A sample that such a generator writes, with the calls in which its messages were found. Its write begins."""

    def __init__(self, tracer: Tracer, sample: Mapping[str, Any], calls: Calls) -> None:
        """Raises ``ValueError`` for a sample without a usable ``uid`` and ``instance_id``."""
        self._tracer = tracer
        self._uid, self._instance = _names(sample)
        self._reward = sample.get("reward")
        self._calls = calls
        self._write_began = tracer.now()

    def written(self, reply: ServerReply) -> None:
        """The server has answered: the rollout is over."""
        group, epoch, slot = _place(reply, self._instance)
        begun, step = min(call.begun for call, _ in self._calls), self._calls[0][0].step
        attempt = self._tracer.attempt(self._uid, group, 0, begun=begun)
        for number, (call, turn) in enumerate(self._calls):
            call.claim(attempt, number, turn)
        attempt.add("write", self._write_began, self._tracer.now() - self._write_began)
        known: dict[str, Any] = {"instance": self._instance, "epoch": epoch, "slot": slot, "started": begun}
        if isinstance(self._reward, int | float) and not isinstance(self._reward, bool):
            known["reward"] = float(self._reward)
        outcome = "not_written" if not reply.is_success else "" if "reward" in known else "no_reward"
        attempt.summary(ending="failed" if outcome else "finished", outcome=outcome, step=step, **known)


def _place(reply: ServerReply, instance: InstanceId) -> tuple[str, int, int]:
    """Group, epoch and slot of a sample, as the server says; those of the first epoch where it does not."""
    with suppress(ValueError):
        group, epoch, slot = reply.headers.get(PLACE_HEADER.lower(), "").split()
        return group, int(epoch), max(0, int(slot))
    return group_id(instance, 0), 0, 0


def _names(sample: Mapping[str, Any]) -> tuple[str, InstanceId]:
    uid, instance = sample.get("uid"), sample.get("instance_id")
    if isinstance(uid, str | int | float) and isinstance(instance, str | int | float):
        return read_uid(uid), read_instance_id(instance)
    raise ValueError("a sample has a uid and an instance_id")
