"""Traces of a run's rollouts: the spans of each attempt, and a summary with its ending."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from forebay.client.sample_writer.outbox import Sample
from forebay.core.ids import rollout_uid
from forebay.core.outcome import REWARDED, RolloutOutcome
from forebay.generators.rollouts.gateway_turns import with_gateway_turns
from forebay.generators.rollouts.open_group import GroupPlan
from forebay.telemetry.tracing.attempt_trace import counts_of
from forebay.telemetry.tracing.records import TurnSummary
from forebay.telemetry.tracing.tracer import AttemptTrace, SpanHandle, Tracer

if TYPE_CHECKING:
    from forebay.generators.rollouts.rollout import Rollout

Ending = Literal["finished", "failed", "aborted", "broken", "lost"]
"""``finished``: the sample is used. ``aborted``: no longer needed. ``broken``: token cap reached. ``lost``: the worker
is gone."""
SECOND_NS = 1_000_000_000
SHORTEST_NS = 1_000_000
DIGITS = 6
"""Decimal places of the seconds in a sample's ``timings``."""


class QueueWait:
    """Waiting times before a rollout starts, recorded before it is known which rollout that will be."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.begun = tracer.now()
        """When the previous rollout was started."""
        self._spans: list[tuple[str, int, int]] = []

    @contextmanager
    def waiting(self, name: str) -> Iterator[Callable[[str], None]]:
        """Record the time inside this context as a wait; ``name`` is one of ``PHASES``.

        Call the result with another name to record what follows under it.
        """
        begun = self._tracer.now()

        def rename(new: str) -> None:
            nonlocal name, begun
            now = self._tracer.now()
            if now - begun > SHORTEST_NS:  # most waits end at once
                self._spans.append((name, begun, now - begun))
            name, begun = new, now

        try:
            yield rename
        finally:
            rename(name)

    def move_to(self, attempt: AttemptTrace) -> None:
        """Add the waits to the attempt that was chosen, and start recording for the next one."""
        for name, begun, lasted in self._spans:
            attempt.add(name, begun, lasted)
        self.begun, self._spans = self._tracer.now(), []


class RolloutTraces:
    """Traces of a job's unended rollouts, by their samples' ``uid``."""

    def __init__(self, tracer: Tracer, run_id: str, worker: int | None = None) -> None:
        """``worker`` is the number of the worker that runs the rollouts."""
        self.tracer = tracer
        self.worker = worker
        self.on_end: Callable[[RolloutTrace], object] = lambda _: None
        """Called with each rollout that is over."""
        self._run_id = run_id
        self._begun: dict[str, RolloutTrace] = {}

    def begin(
        self, group: GroupPlan, number: int, step: int, waits: "QueueWait | None" = None, attempt: int = 0
    ) -> "RolloutTrace":
        """Start the trace of a chosen rollout at ``step``. ``waits`` holds the waits before it was chosen.

        ``attempt`` is the number of its first attempt here, if earlier ones ran elsewhere.
        """
        begun = waits.begun if waits is not None else None
        trace = RolloutTrace(self, self.tracer, self._run_id, group, number, step, begun, attempt)
        self._begun[trace.uid] = trace
        if waits is not None:
            waits.move_to(trace.attempt)
        return trace

    def note_judged(self, sample: Sample) -> None:
        """Note that the buffer has accepted or rejected a sample."""
        trace = self._begun.get(sample["uid"])  # None for forks, which have their own uids
        if trace is not None:
            trace.end()

    def forget(self, trace: "RolloutTrace") -> None:
        """Remove a trace that has ended."""
        if self._begun.pop(trace.uid, None) is not None:
            self.on_end(trace)

    def close(self) -> None:
        """End all remaining traces as aborted."""
        for trace in list(self._begun.values()):
            trace.ending = "aborted"
            trace.end()


class RolloutTrace:
    """Trace of one rollout, from the request for a slot until its sample is on the buffer's disk."""

    def __init__(
        self,
        traces: RolloutTraces,
        tracer: Tracer,
        run_id: str,
        group: GroupPlan,
        number: int,
        step: int,
        begun: int | None = None,
        attempt: int = 0,
    ) -> None:
        self._group = group.group_id
        self.uid = rollout_uid(run_id, self._group, number)
        self.attempt: AttemptTrace = tracer.attempt(self.uid, self._group, attempt, begun)
        self.num_attempts = attempt + 1
        """Number of attempts so far, including the current one."""
        self.ending: Ending = "aborted"
        self.slot = number
        self._traces = traces
        self._tracer = tracer
        instance_id, epoch = group.key
        self._about: dict[str, Any] = {"instance": instance_id, "epoch": epoch, "number": number, "step": step}
        if traces.worker is not None:
            self._about["worker"] = traces.worker
        self._rollout: Rollout | None = None
        self._gateway_turns: Sequence[TurnSummary] = ()
        self._started = 0
        self._reward: dict[str, Any] = {}
        self._outcome = ""
        self._waiting: SpanHandle | None = None
        """For the rest of the group, or for the write."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Assign spans of user code inside this context to the current attempt."""
        with self.attempt.activate():
            yield

    def note_started(self, rollout: "Rollout") -> None:
        """Note that the rollout function is called for the current attempt."""
        self._rollout, self._started = rollout, self._tracer.now()

    def note_outcome(self, outcome: RolloutOutcome) -> None:
        """Note the outcome of the current attempt."""
        self._outcome = "" if outcome in REWARDED else outcome.value

    def next_attempt(self, step: int, ending: Literal["retried", "broken", "lost"] = "retried") -> None:
        """End the current attempt, after its pause, and begin the next one, which may first wait for a slot."""
        end = self._tracer.now()
        self._end(ending, end, is_last=False)
        self.num_attempts += 1
        self.ending = "aborted"  # until the ending of the new attempt is known
        self._about["step"] = step
        self._gateway_turns, self._started, self._outcome, self._reward = (), 0, "", {}
        self.attempt = self._tracer.attempt(self.uid, self._group, self.num_attempts - 1, begun=end)

    def note_reward(self, reward: float | None, parts: dict[str, float], cpu_s: float | None) -> None:
        """Note the reward, its parts and its CPU time; repeated calls add up the time."""
        before = self._reward.get("reward_cpu_s")
        known = [value for value in (before, cpu_s) if value is not None]
        self._reward = {"reward": reward, "reward_parts": parts, "reward_cpu_s": sum(known) if known else None}

    def wait(self, name: str) -> SpanHandle:
        """Record as ``name`` how long the ended rollout waits until its sample is written or thrown away."""
        self._waiting = self.attempt.begin(name)
        return self._waiting

    def write(self, sample: Sample) -> None:
        """Begin writing the main sample, and add the ``timings`` of the rollout to it."""
        until = self._tracer.now()
        self._end_wait(until)
        if phases := self._phases(until):
            sample["extra_info"] = {**sample["extra_info"], "timings": self._timings(phases, until)}
        # The sample may wait for long, so only what the summary needs is kept of the rollout.
        self._let_go()
        self.wait("write")

    def end(self, *, is_last: bool = True) -> None:
        """End the trace: the sample is on the buffer's disk, or there is none. Not ``is_last``: another run follows."""
        until = self._tracer.now()
        self._end_wait(until)
        self._end(self.ending, until, is_last=is_last)
        self._traces.forget(self)

    def _end_wait(self, until: int) -> None:
        if self._waiting is not None:
            self._waiting.end(until)

    def _phases(self, until: int) -> dict[str, int]:
        turns = self._rollout.gateway_turns if self._rollout is not None else self._gateway_turns
        return with_gateway_turns(self.attempt.phases(until), turns)

    def _timings(self, phases: Mapping[str, int], until: int) -> dict[str, float]:
        seconds = {name: round(spent / SECOND_NS, DIGITS) for name, spent in phases.items()}
        rollout = self._rollout
        num_turns = 0 if rollout is None else len(rollout.gateway_turns) or rollout.num_turns
        return {**seconds, "total": round((until - self.attempt.begun) / SECOND_NS, DIGITS), "turns": num_turns}

    def _let_go(self) -> None:
        if self._rollout is not None:
            self._gateway_turns, self._rollout = self._rollout.gateway_turns, None

    def _end(self, ending: str, until: int, *, is_last: bool = True) -> None:
        self._let_go()
        fields = {**self._about, **self._reward, "slot": self.slot, "started": self._started}
        if turns := self._gateway_turns:
            fields |= {"phases": self._phases(until), **counts_of(turns)}
        self.attempt.summary(until=until, ending=ending, outcome=self._outcome, is_last=is_last, **fields)
