"""In a worker: the rollouts of one job, which the lead asks for one by one."""

import asyncio
import logging

from forebay.core.clock import ActiveClock, SystemClock
from forebay.generators.buffer_link.abc import Plan, RunGone
from forebay.generators.job.places import MemberParts
from forebay.generators.rollouts.open_group import GroupClosed, Hold, RolloutBroken
from forebay.generators.rollouts.rollout_trace import RolloutTrace
from forebay.workers.rollouts.mailbox import Mailbox
from forebay.workers.rollouts.member_rollout import MemberRollout, begin_rollout
from forebay.workers.rollouts.messages import (
    Assignment,
    CallsStopped,
    EndJob,
    EndRollout,
    EngineChanged,
    GrantSlot,
    JobBroken,
    LeadState,
    SampleJudged,
    StopCalls,
    ToWorker,
)

logger = logging.getLogger(__name__)


class MemberJob:
    """Runs what the lead assigns, and writes what the lead grants a slot to."""

    def __init__(self, number: int, plan: Plan, parts: MemberParts, mail: Mailbox) -> None:
        self._number, self._plan, self._parts, self._mail = number, plan, parts, mail
        self._clock = ActiveClock(SystemClock())
        self._hold = Hold(clock=self._clock, engine_wait_s=parts.engine_wait_s)
        self._rollouts: dict[str, MemberRollout] = {}
        self._tasks: asyncio.TaskGroup
        parts.traces.on_end = self._note_over
        parts.ring.on_server = lambda url, is_failing: mail.post(EngineChanged(url, is_failing))

    async def run(self, state: LeadState) -> EndJob:
        """Take rollouts until the lead has ended the job."""
        self._follow(state)
        async with asyncio.TaskGroup() as self._tasks:
            watching = self._tasks.create_task(self._watch_writer())
            end = await self._take_all()
            watching.cancel()
            for rollout in self._rollouts.values():
                rollout.group.close()
        self._parts.traces.close()
        return end

    async def _take_all(self) -> EndJob:
        while True:
            messages = await self._mail.take()
            for place, message in enumerate(messages, 1):
                if isinstance(message, EndJob) and message.number == self._number:
                    self._mail.give_back(messages[place:])
                    return message
                self._handle(message)

    async def _watch_writer(self) -> None:
        try:
            await self._parts.writer.watch()
        except Exception as error:  # noqa: BLE001 - the lead ends the job, and so this worker
            self._mail.post(JobBroken(isinstance(error, RunGone), f"{type(error).__name__}: {error}"))

    def _handle(self, message: ToWorker) -> None:
        match message:
            case Assignment():
                # Known at once: the lead's next message may be about it.
                self._tasks.create_task(self._run(self._begun(message)))
            case LeadState():
                self._follow(message)
            case StopCalls():
                self._tasks.create_task(self._stop(message))
            case GrantSlot(uid) | EndRollout(uid):
                if (rollout := self._rollouts.get(uid)) is not None:
                    self._handle_one(rollout, message)
            case _:
                logger.debug("a message for another job: %r", message)

    def _handle_one(self, rollout: MemberRollout, message: GrantSlot | EndRollout) -> None:
        if isinstance(message, GrantSlot):
            self._tasks.create_task(self._write(rollout, message.slot))
        else:
            self._end(rollout, message)

    def _follow(self, state: LeadState) -> None:
        # Before the hold ends: calls that go out then carry the new version.
        self._parts.ring.announce(state.weights)
        self._clock.run(state.is_clock_running)
        self._hold.follow(is_held=state.is_held, is_paused=state.is_paused, number=state.step)

    # --- one rollout

    def _begun(self, assignment: Assignment) -> MemberRollout:
        traces, post = self._parts.traces, self._mail.post
        rollout = begin_rollout(assignment, self._plan, traces, self._clock, self._hold, post)
        self._rollouts[assignment.uid] = rollout
        return rollout

    async def _run(self, rollout: MemberRollout) -> None:
        status = await self._status(rollout)
        rollout.is_running = False
        self._mail.post(rollout.done(status))
        if not rollout.samples:
            rollout.trace.end(is_last=status != "broken")
        elif rollout.assignment.slot is not None:
            await self._write(rollout, rollout.assignment.slot)
        elif self._hold.is_held:  # it could fill another group than the step needs
            with rollout.trace.attempt.span("hold"):
                await self._hold.wait()

    async def _status(self, rollout: MemberRollout) -> str:
        task, group, number = asyncio.current_task(), rollout.group, rollout.assignment.number
        assert task is not None
        try:
            if rollout.is_ended:
                return "closed"
            with group.working():
                samples = await self._parts.runner.samples(group, number, rollout.trace, rollout.seat)
        except RolloutBroken:
            rollout.trace.ending = "broken"
            return "broken"
        except GroupClosed:
            return "closed"
        except asyncio.CancelledError:
            # Cancelled once for the lead's word; any more and the whole job ends.
            if not group.is_closed or task.uncancel():
                raise
            return "closed"
        rollout.samples = samples
        return str(samples[-1]["status"])

    async def _write(self, rollout: MemberRollout, slot: int) -> None:
        if rollout.is_granted:
            return
        rollout.is_granted, trace, samples = True, rollout.trace, rollout.samples
        trace.ending = "failed" if samples[-1]["status"] == "failed" else "finished"
        trace.slot = slot
        trace.write(samples[-1])
        for sample in samples if self._parts.takes_failed else samples[-1:]:
            await self._parts.writer.write({**sample, "slot": slot})
        rollout.samples = []

    def _end(self, rollout: MemberRollout, message: EndRollout) -> None:
        rollout.trace.ending = message.ending
        if not rollout.is_running:
            if not rollout.is_granted:
                rollout.trace.end()
            return
        rollout.is_ended = True
        calls = rollout.group.calls()  # before it is closed: tasks that are cancelled forget their calls
        rollout.group.close()
        for url, rid in calls:
            self._tasks.create_task(self._parts.ring.abandon(url, rid))

    async def _stop(self, message: StopCalls) -> None:
        rollouts = [self._rollouts[uid] for uid in message.uids if uid in self._rollouts]
        if message.are_over:
            for rollout in rollouts:
                rollout.group.shut()
            await self._parts.ring.stop(lambda: [call for each in rollouts for call in each.group.calls()])
        else:
            await self._parts.ring.stop(lambda: self._whole_calls(rollouts), limit_s=None)
        tokens = {each.assignment.uid: each.executions[-1].num_sampled_tokens for each in rollouts if each.executions}
        self._mail.post(CallsStopped(message.request, tokens))

    def _whole_calls(self, rollouts: list[MemberRollout]) -> list[tuple[str, str]]:
        held = rollouts if self._hold.is_held else ()
        return [call for each in held for call in each.group.whole_calls()]

    def _note_over(self, trace: RolloutTrace) -> None:
        rollout = self._rollouts.pop(trace.uid, None)
        if rollout is not None and rollout.is_granted:
            self._mail.post(SampleJudged(trace.uid))
