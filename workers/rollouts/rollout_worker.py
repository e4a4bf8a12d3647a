"""One worker of a run: calls the user's ``run_rollout`` in a thread, and passes messages between it and the lead."""

import asyncio
import threading
import traceback
from typing import Any

from forebay.generators.job.composition import Composition, compose_here
from forebay.generators.process.main import call_run_rollout, set_up_output
from forebay.generators.process.spec import RunSpec
from forebay.telemetry.tracing.tracer import TraceSettings, run_tracer, start_tracing
from forebay.workers.members.worker import Worker
from forebay.workers.rollouts.mailbox import BATCH_EVERY_S, Mailbox
from forebay.workers.rollouts.messages import RunReturned
from forebay.workers.rollouts.run_member import RunMember
from forebay.workers.rollouts.sent_traces import SentTrace
from forebay.workers.rollouts.shipped_code import has_code, unpacked


class RolloutWorker(Worker):
    """Of the run of ``spec``. It loads the run's copy of the generator, so that nothing of a user's is pickled."""

    def __init__(self, spec: dict[str, Any], code: bytes = b"") -> None:
        """``code``: the run's copy, for a machine that has not got it."""
        self._spec, self._code = RunSpec(**spec), code
        self._mail = Mailbox()
        threading.Thread(target=self._run, name=f"run_rollout {self.rank}", daemon=True).start()

    async def tell(self, batch: bytes) -> None:
        """Take messages of the lead, which gathers others until this has returned."""
        self._mail.put(batch)
        await asyncio.sleep(BATCH_EVERY_S)

    async def news(self) -> bytes:
        """Messages for the lead, once there are some."""
        return await self._mail.news()

    def _call_run_rollout(self) -> None:
        if self._spec.backend != "inline":  # else it is the lead's process
            set_up_output()
        is_here = has_code(self._spec)
        if self._spec.trace is not None:
            trace = TraceSettings(**self._spec.trace)
            if is_here:
                start_tracing(trace, "run")
            else:
                start_tracing(trace, "run", lambda _, head: SentTrace(head, self._mail.post))
        call_run_rollout(self._spec if is_here else unpacked(self._spec, self._code))

    def _run(self) -> None:
        compose_here(Composition(member=RunMember(self._mail, self.rank)))
        trace = ""
        try:
            self._call_run_rollout()
        except BaseException:  # noqa: BLE001 - whatever the user's code raises, the lead decides what it means
            trace = traceback.format_exc()
        run_tracer().flush()
        self._mail.post(RunReturned(trace))
