"""A worker as the generator meets it: what each of its jobs is replaced by."""

import asyncio
import threading
from typing import Any

from forebay.generators.buffer_link.abc import Plan
from forebay.generators.job.places import MemberShare, OpenMember
from forebay.generators.job.reporter import Totals
from forebay.workers.members.loop_pulse import LoopPulse
from forebay.workers.members.worker_errors import WorkerError
from forebay.workers.rollouts.mailbox import Mailbox
from forebay.workers.rollouts.member_job import MemberJob
from forebay.workers.rollouts.messages import BeginJob, EndJob, EnginesAnswer, JobReady, OutOfReach
from forebay.workers.rollouts.reach import out_of_reach


class RunMember:
    """Takes part in the jobs of a run, one after another, as the lead's ``run_rollout`` has them."""

    def __init__(self, mail: Mailbox, worker: int) -> None:
        self._mail, self._worker = mail, worker
        self._num_served = 0

    async def serve(self, open_parts: OpenMember) -> Totals:
        """Of ``JobMember``. A job that was over before this worker came is passed at once."""
        number, self._num_served = self._num_served, self._num_served + 1
        begin = await self._first_of(number)
        end = begin if isinstance(begin, EndJob) else await self._served(begin, open_parts)
        if end.totals is None:
            raise WorkerError("the lead of this run has failed")
        return totals_of(end.totals)

    async def _first_of(self, number: int) -> BeginJob | EndJob:
        while True:
            messages = await self._mail.take()
            for place, message in enumerate(messages, 1):
                if isinstance(message, BeginJob | EndJob) and message.number == number:
                    self._mail.give_back(messages[place:])
                    return message

    async def _served(self, begin: BeginJob, open_parts: OpenMember) -> EndJob:
        plan = Plan(
            begin.run_id, begin.group_size, begin.group_timeout_s, begin.group_deadline_s, captures=begin.captures
        )
        share = MemberShare(plan, begin.queue_size, begin.num_reward_workers, self._worker)

        def note_waiting(is_waiting: bool) -> None:
            self._mail.post(EnginesAnswer(is_waiting))

        for address in await out_of_reach(begin.addresses):
            self._mail.post(OutOfReach(address))
        async with open_parts(share, note_waiting) as parts:
            job = MemberJob(begin.number, plan, parts, self._mail)
            self._mail.watch(LoopPulse(asyncio.get_running_loop(), threading.get_ident()))
            self._mail.post(JobReady(begin.number))
            try:
                return await job.run(begin.state)
            finally:
                self._mail.watch(None)


def totals_of(fields: dict[str, Any]) -> Totals:
    """What the lead's job came to."""
    totals = Totals(**{name: value for name, value in fields.items() if name != "counts"})
    totals.counts.update(fields.get("counts", {}))
    return totals
