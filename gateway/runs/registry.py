"""Who may use the gateway: the runs that the server has registered, and the rollouts that they opened."""

import asyncio
from hashlib import sha256
from secrets import compare_digest

from forebay.core.errors import NotFound, Unauthorized
from forebay.gateway.refusals import WrongKey
from forebay.gateway.request_bodies import OpenRollout, RegisterRun
from forebay.gateway.runs.rollout import OpenedRollout
from forebay.gateway.runs.run import GatewayRun
from forebay.gateway.runs.sessions import Affinity, Agent

RUN_OVER = "its run has ended"
REOPENED = "it was opened again"
CLOSED = "it was closed"

KEEP_S = 600.0
"""A rollout that nobody closes is forgotten so long after its deadline."""
LOOK_S = 1.0


class Desk:
    """Looks keys up by their digests: how long that takes tells nothing about a key."""

    def __init__(self) -> None:
        self.runs: dict[str, GatewayRun] = {}
        self._runs_by_key: dict[bytes, GatewayRun] = {}
        self._rollouts_by_key: dict[bytes, OpenedRollout] = {}
        self._captured_by_secret: dict[bytes, GatewayRun] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def register(self, run_id: str, told: RegisterRun) -> None:
        """Make a run known. What is told once more changes nothing; told otherwise, the run begins afresh."""
        known = self.runs.get(run_id)
        if known is not None and known.told == told:
            return
        await self.forget(run_id)
        run = GatewayRun(run_id, told)
        await run.__aenter__()
        self.runs[run_id] = self._runs_by_key[_digest(told.key)] = run
        if told.capturing is not None:
            self._captured_by_secret[_digest(told.capturing.secret)] = run

    async def forget(self, run_id: str) -> None:
        """End a run: its keys are refused from now on, its calls are aborted. An unknown run is no error."""
        run = self.runs.pop(run_id, None)
        if run is None:
            return
        del self._runs_by_key[_digest(run.told.key)]
        sessions = run.sessions
        for rollout in list(run.rollouts.values()):
            self._revoke(run, rollout, RUN_OVER)
        if run.captured is not None:
            del self._captured_by_secret[_digest(run.captured.told.secret)]
            run.captured.drop()
            for session in tuple(run.captured.sessions):
                run.end(session, RUN_OVER)
        for each in sessions:
            each.turns.drop()
        await asyncio.gather(*(session.wait_idle() for session in sessions))
        # Engines that are busy with other calls are told again and again for some seconds.
        ending = asyncio.create_task(run.__aexit__(None, None, None))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def aclose(self) -> None:
        """End all runs."""
        for run_id in list(self.runs):
            await self.forget(run_id)
        await asyncio.gather(*self._ending)

    def run_of(self, key: str) -> GatewayRun:
        """The run that a key opens rollouts of. Raises ``Unauthorized``."""
        run = self._runs_by_key.get(_digest(key))
        if run is None or not compare_digest(run.told.key.encode(), key.encode()):
            raise Unauthorized("this is no run's gateway key", hint="POST /w/{run_key}/gateway at the server tells it")
        return run

    def open(self, run: GatewayRun, told: OpenRollout) -> OpenedRollout:
        """Open a rollout; one of the same id, of an attempt that is gone, ends. Raises ``InvalidInput``."""
        rollout = OpenedRollout(run.run_id, told, Affinity(run.ring), run.clock)
        earlier = run.rollouts.get(told.rollout_id)
        if earlier is not None:
            self._revoke(run, earlier, REOPENED)
        run.rollouts[told.rollout_id] = self._rollouts_by_key[_digest(rollout.key)] = rollout
        run.closed.forget(told.rollout_id)
        self._expire(run, rollout)
        return rollout

    def rollout(self, run: GatewayRun, rollout_id: str) -> OpenedRollout:
        """An open rollout of the run. Raises ``NotFound``."""
        rollout = run.rollouts.get(rollout_id)
        if rollout is None:
            raise _not_open(run, rollout_id)
        return rollout

    async def close(self, run: GatewayRun, rollout_id: str) -> bytes:
        """Revoke a rollout's key and abort its calls; its record as JSON once the last one has ended.

        The same for some minutes to a caller who asks again, because the first answer was lost. Raises ``NotFound``.
        """
        rollout = run.rollouts.get(rollout_id)
        if rollout is not None:
            self._revoke(run, rollout, CLOSED)
            run.settle(rollout)
        told = await run.closed.answer(rollout_id)
        if told is None:
            raise _not_open(run, rollout_id)
        return told

    def agent(self, name: str, key: str) -> tuple[GatewayRun, Agent]:
        """Who calls below ``/gateway/{name}/``: ``name`` is a rollout's id that goes with ``key``, or a run's secret.

        Raises ``WrongKey``.
        """
        captured = self._captured_by_secret.get(_digest(name))
        if captured is not None and captured.captured is not None:
            return captured, captured.captured.call()
        rollout = self._rollouts_by_key.get(_digest(key))
        if rollout is None or not compare_digest(rollout.key.encode(), key.encode()):
            raise WrongKey
        if not compare_digest(rollout.rollout_id.encode(), name.encode()):
            raise WrongKey
        return self.runs[rollout.run_id], rollout

    def _expire(self, run: GatewayRun, rollout: OpenedRollout) -> None:
        """Forget a rollout that nobody closes, now or, as its deadline may stand still, when it has been over long."""
        left_s = rollout.session.ends_s + KEEP_S - run.clock.now_s()
        if left_s <= 0:
            self._revoke(run, rollout, CLOSED)
        else:
            wait_s = max(left_s, LOOK_S)
            rollout.expiry = asyncio.get_running_loop().call_later(wait_s, self._expire, run, rollout)

    def _revoke(self, run: GatewayRun, rollout: OpenedRollout, reason: str) -> None:
        if self._rollouts_by_key.pop(_digest(rollout.key), None) is None:
            return
        if rollout.expiry is not None:
            rollout.expiry.cancel()
        if run.rollouts.get(rollout.rollout_id) is rollout:
            del run.rollouts[rollout.rollout_id]
        run.end(rollout.session, reason)


def _not_open(run: GatewayRun, rollout_id: str) -> NotFound:
    return NotFound(f"run {run.run_id!r} has no open rollout {rollout_id!r}", hint="it may be closed already")


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
