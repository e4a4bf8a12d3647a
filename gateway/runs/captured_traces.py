"""Trace calls of a generator that does not know the gateway; their rollout is unknown until a sample contains them.

Their spans are kept here until then. Long spans are noted at once, without a rollout.
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
    """The spans of one call, created through ``begin``. ``step`` is the run's step when the call began."""

    def __init__(self, tracer: Tracer, step: int) -> None:
        self.run_id = tracer.run_id
        self.step = step
        self._tracer = tracer
        self._spans: list[Span] = []
        self._is_claimed = self._is_released = False
        self.begun = tracer.now()
        self._id = new_span_id()

    def begin(self) -> AttemptTrace:
        """Return the trace that creates the spans, as if the call were a rollout."""
        # Kept regardless of the rate: the group, which decides whether spans are kept, is known only later.
        return AttemptTrace(self, uid="", group="", attempt=0, begun=self.begun, id=self._id)

    # --- interface that ``AttemptTrace`` expects of a tracer

    def now(self) -> int:
        return self._tracer.now()

    def write(self, record: Record) -> None:
        if isinstance(record, Span) and not self._is_released:
            self._spans.append(record)
        elif self._tracer.rate > 0:
            self._tracer.write(record)

    def watch(self, scope: Scope) -> None:
        self._tracer.watch(scope)

    # --- assignment to a rollout

    def release(self) -> None:
        """Write the spans as the run's unless a sample claimed them: no further sample will contain the call."""
        self._is_released = True
        spans, self._spans = self._spans, []
        for span in () if self._is_claimed else spans:
            self.write(msgspec.structs.replace(span, up="" if span.up == self._id else span.up))

    def claim(self, attempt: AttemptTrace, number: int, turn: Turn) -> None:
        """Assign the call to turn ``number`` of a rollout; ``turn`` is the choice in the rollout's sample."""
        whole = next((span for span in self._spans if span.name == "turn"), None)
        if whole is None:
            return
        # If several rollouts claim choices of the call, one keeps the ids, which the engine may have received.
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
"""The calls of one conversation, in order, each with the choice that the conversation continued."""


class CapturedRollout:
    """A sample written by such a generator, with the calls that contain its messages. Starts timing its write."""

    def __init__(self, tracer: Tracer, sample: Mapping[str, Any], calls: Calls) -> None:
        """Raises ``ValueError`` for a sample without a usable ``uid`` and ``instance_id``."""
        self._tracer = tracer
        self._uid, self._instance = _names(sample)
        self._reward = sample.get("reward")
        self._calls = calls
        self._write_began = tracer.now()

    def written(self, reply: ServerReply) -> None:
        """Complete the rollout after the server's reply."""
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
    """Return group, epoch and slot of a sample from the server's reply; those of the first epoch by default."""
    with suppress(ValueError):
        group, epoch, slot = reply.headers.get(PLACE_HEADER.lower(), "").split()
        return group, int(epoch), max(0, int(slot))
    return group_id(instance, 0), 0, 0


def _names(sample: Mapping[str, Any]) -> tuple[str, InstanceId]:
    uid, instance = sample.get("uid"), sample.get("instance_id")
    if isinstance(uid, str | int | float) and isinstance(instance, str | int | float):
        return read_uid(uid), read_instance_id(instance)
    raise ValueError("a sample needs a uid and an instance_id")
