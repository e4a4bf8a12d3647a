"""Who may call the gateway: every key of the server, of runs and of rollouts is issued, found and revoked here.

- The server's own key comes with the spec of the process; it registers runs and ends them.
- A run's key comes with its registration; it opens, shows and closes rollouts of that run.
- A rollout's key is made here when it is opened; its agent calls with it until the rollout is closed, or forgotten.
- A captured run has a secret in place of keys: it is a part of the addresses that its generator is given.
"""

import asyncio
import secrets
from base64 import b64decode
from contextlib import suppress
from hashlib import sha256

from starlette.requests import Request

from forebay.core.errors import NotFound, Unauthorized
from forebay.core.tasks import TaskSet
from forebay.gateway.refusals import WrongKey
from forebay.gateway.request_bodies import OpenRollout, RegisterRun
from forebay.gateway.runs.rollouts import ABORTED, RETRIED, OpenedRollout
from forebay.gateway.runs.run import GatewayRun
from forebay.gateway.runs.sessions import Session
from forebay.telemetry.tracing.stall_watch import StallWatch

BEARER, BASIC = "bearer ", "basic "
RUN_OVER = "its run has ended"
REOPENED = "it was opened again"
CLOSED = "it was closed"

KEEP_S = 600.0
"""A rollout that nobody closes is forgotten so long after its deadline."""
LOOK_S = 1.0
"""So often, at most, is looked whether a rollout with a deadline that does not move on can be forgotten."""


def key_of(request: Request) -> str:
    """The key that a request carries; empty if there is none."""
    authorization = request.headers.get("authorization", "")
    if authorization[: len(BEARER)].lower() == BEARER:
        return authorization[len(BEARER) :].strip()
    if authorization[: len(BASIC)].lower() == BASIC:  # of an address with the key as its password
        with suppress(ValueError):
            return b64decode(authorization[len(BASIC) :]).decode().partition(":")[2]
    # Anthropic's clients send their key under this name unless they are given an "auth token".
    return request.headers.get("x-api-key", "")


class RunRegistry:
    """The runs that the server has registered, and the rollouts that they opened, by the digests of their keys."""

    def __init__(self, control_key: str, watch: StallWatch) -> None:
        """``watch`` sees when the event loop stands still, which every run's trace tells."""
        self.runs: dict[str, GatewayRun] = {}
        self._control_digest = _digest(control_key)
        self._runs_by_key: dict[bytes, GatewayRun] = {}
        self._rollouts_by_key: dict[bytes, OpenedRollout] = {}
        self._captured_by_secret: dict[bytes, GatewayRun] = {}
        self._watch = watch
        self._ending = TaskSet()

    # --- finding who calls

    def check_server(self, key: str) -> None:
        """Raise ``Unauthorized`` unless the key is the server's."""
        if not secrets.compare_digest(_digest(key), self._control_digest):
            raise Unauthorized("only the server may call this")

    def run_of(self, key: str) -> GatewayRun:
        """The run that a key opens rollouts of. Raises ``Unauthorized``."""
        run = self._runs_by_key.get(_digest(key))
        if run is None:
            raise Unauthorized("this is no run's gateway key", hint="POST /w/{run_key}/gateway at the server tells it")
        return run

    def agent(self, name: str, key: str) -> tuple[GatewayRun, Session]:
        """Who calls below ``/gateway/{name}/``: ``name`` is a rollout's id that goes with ``key``, or a run's secret.

        Raises ``WrongKey``.
        """
        run = self._captured_by_secret.get(_digest(name))
        if run is not None and run.captured_calls is not None:
            return run, run.captured_calls.call()
        rollout = self._rollouts_by_key.get(_digest(key))
        if rollout is None or rollout.rollout_id != name:
            raise WrongKey
        return self.runs[rollout.run_id], rollout.session

    # --- runs

    async def register(self, run_id: str, registration: RegisterRun) -> None:
        """Make a run known. The same registration once more changes nothing; with another one the run begins afresh.

        Another start of its process, which is recorded elsewhere, ends no call of the one before.
        """
        known = self.runs.get(run_id)
        if known is not None and known.registration.model_copy(update={"trace": registration.trace}) == registration:
            if known.registration != registration:
                known.registration = registration
                known.trace.take(registration.trace)
            return
        await self.forget(run_id)
        run = GatewayRun(run_id, registration, self._watch)
        await run.__aenter__()
        self.runs[run_id] = self._runs_by_key[_digest(registration.key)] = run
        if registration.capturing is not None:
            self._captured_by_secret[_digest(registration.capturing.secret)] = run

    async def forget(self, run_id: str) -> None:
        """End a run: its keys are refused from now on, its calls are aborted. An unknown run is no error."""
        run = self.runs.pop(run_id, None)
        if run is None:
            return
        # All keys go before the first await: nobody can begin a call while the others are being ended.
        del self._runs_by_key[_digest(run.registration.key)]
        sessions, rollouts = run.sessions, list(run.rollouts.values())
        for rollout in rollouts:
            self._revoke(run, rollout, RUN_OVER)
        if run.captured_calls is not None:
            del self._captured_by_secret[_digest(run.captured_calls.capturing.secret)]
            run.captured_calls.drop()
            for captured in tuple(run.captured_calls.sessions):
                run.end(captured, RUN_OVER)
        for session in sessions:
            session.turns.drop()
        await asyncio.gather(*(session.wait_idle() for session in sessions))
        for rollout in rollouts:
            await rollout.given_up(ABORTED)
        await run.trace.close()
        # Not awaited: engines that are busy with other calls are sent the same aborts for some seconds.
        self._ending.start(run.__aexit__(None, None, None))

    async def aclose(self) -> None:
        """End all runs."""
        for run_id in list(self.runs):
            await self.forget(run_id)
        await self._ending.drain()

    # --- rollouts

    def open(self, run: GatewayRun, body: OpenRollout) -> OpenedRollout:
        """Open a rollout; one of the same id, of an attempt that is gone, ends. Raises ``InvalidInput``."""
        key = secrets.token_urlsafe(24)
        rollout = OpenedRollout(run.run_id, body, key, run.pool, run.clock, run.trace.opened(body))
        earlier = run.rollouts.get(body.rollout_id)
        if earlier is not None:
            self._give_up(run, earlier, REOPENED, RETRIED)
        run.rollouts[body.rollout_id] = self._rollouts_by_key[_digest(key)] = rollout
        run.closed.forget(body.rollout_id)
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
            run.report_now()
            # The record is made in a task of the run's: the caller that began the closing may go away meanwhile.
            run.closed.add(rollout_id, run.tasks.start(rollout.final_record()))
        record = await run.closed.record(rollout_id)
        if record is None:
            raise _not_open(run, rollout_id)
        return record

    def _expire(self, run: GatewayRun, rollout: OpenedRollout) -> None:
        left_s = rollout.session.ends_s + KEEP_S - run.clock.now_s()
        if left_s <= 0:
            self._give_up(run, rollout, CLOSED, ABORTED)
        else:
            # The event loop's clock goes on while the run's may stop: after the wait there can be time left again.
            wait_s = max(left_s, LOOK_S)
            rollout.expiry = asyncio.get_running_loop().call_later(wait_s, self._expire, run, rollout)

    def _give_up(self, run: GatewayRun, rollout: OpenedRollout, reason: str, ending: str) -> None:
        """Nobody will close it."""
        self._revoke(run, rollout, reason)
        run.tasks.start(rollout.given_up(ending))

    def _revoke(self, run: GatewayRun, rollout: OpenedRollout, reason: str) -> None:
        if self._rollouts_by_key.pop(_digest(rollout.key), None) is None:
            return
        if rollout.expiry is not None:
            rollout.expiry.cancel()
        # Its id may stand for another rollout by now, opened while this one was being closed.
        if run.rollouts.get(rollout.rollout_id) is rollout:
            del run.rollouts[rollout.rollout_id]
        run.end(rollout.session, reason)


def _not_open(run: GatewayRun, rollout_id: str) -> NotFound:
    return NotFound(f"run {run.run_id!r} has no open rollout {rollout_id!r}", hint="it may be closed already")


def _digest(key: str) -> bytes:
    # How long it takes to find or to compare a digest tells nothing about the key behind it.
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
