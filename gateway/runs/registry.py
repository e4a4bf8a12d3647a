"""Access control of the gateway: issues, finds and revokes the keys of the server, of runs and of rollouts.

- The server's key comes with the process's spec; it registers and ends runs.
- A run's key comes with its registration; it opens, shows and closes rollouts of that run.
- A rollout's key is made when the rollout is opened; its agent uses it until the rollout is closed or forgotten.
- A captured run has a secret instead of keys: it is part of the addresses given to its generator.
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
from forebay.gateway.runs.reasoning import ReasoningMemo
from forebay.gateway.runs.rollouts import ABORTED, RETRIED, OpenedRollout
from forebay.gateway.runs.run import GatewayRun
from forebay.gateway.runs.sessions import Session
from forebay.telemetry.tracing.stall_watch import StallWatch

BEARER, BASIC = "bearer ", "basic "
RUN_OVER = "its run has ended"
REOPENED = "it was opened again"
CLOSED = "it was closed"

KEEP_S = 600.0
"""Seconds after its deadline when a rollout that was never closed is forgotten."""
LOOK_S = 1.0
"""Minimum seconds between checks whether a rollout with a paused deadline can be forgotten."""


def key_of(request: Request) -> str:
    """Return the key of a request; empty if it has none."""
    authorization = request.headers.get("authorization", "")
    if authorization[: len(BEARER)].lower() == BEARER:
        return authorization[len(BEARER) :].strip()
    if authorization[: len(BASIC)].lower() == BASIC:  # from a URL with the key as its password
        with suppress(ValueError):
            return b64decode(authorization[len(BASIC) :]).decode().partition(":")[2]
    # Anthropic's clients use this header unless they are given an "auth token".
    return request.headers.get("x-api-key", "")


class RunRegistry:
    """The registered runs and their open rollouts, by the digests of their keys."""

    def __init__(self, control_key: str, watch: StallWatch) -> None:
        """``watch`` detects stalls of the event loop, which every run's trace reports."""
        self.runs: dict[str, GatewayRun] = {}
        self._control_digest = _digest(control_key)
        self._runs_by_key: dict[bytes, GatewayRun] = {}
        self._rollouts_by_key: dict[bytes, OpenedRollout] = {}
        self._captured_by_secret: dict[bytes, GatewayRun] = {}
        self._watch = watch
        self._ending = TaskSet()

    # --- identifying callers

    def check_server(self, key: str) -> None:
        """Raise ``Unauthorized`` unless the key is the server's."""
        if not secrets.compare_digest(_digest(key), self._control_digest):
            raise Unauthorized("only the server may call this")

    def run_of(self, key: str) -> GatewayRun:
        """Return the run whose rollouts a key can open. Raises ``Unauthorized``."""
        run = self._runs_by_key.get(_digest(key))
        if run is None:
            raise Unauthorized("unknown gateway key", hint="get the key from the server: POST /w/{run_key}/gateway")
        return run

    def agent(self, name: str, key: str) -> tuple[GatewayRun, Session]:
        """Identify the caller below ``/gateway/{name}/``: ``name`` is the rollout id of ``key``, or a run's secret.

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
        """Register a run. An equal registration changes nothing; a different one restarts the run at the gateway.

        If only the trace differs, after a restart of the run's process, calls in flight continue.
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
        """End a run: revoke its keys and abort its calls. An unknown run is ignored."""
        run = self.runs.pop(run_id, None)
        if run is None:
            return
        # All keys are revoked before the first await, so that no call can begin while the others are being ended.
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
        # Not awaited, because aborts are repeated for some seconds at engines that are busy with other calls.
        self._ending.start(run.__aexit__(None, None, None))

    async def aclose(self) -> None:
        """End all runs."""
        for run_id in list(self.runs):
            await self.forget(run_id)
        await self._ending.drain()

    # --- rollouts

    def open(self, run: GatewayRun, body: OpenRollout) -> OpenedRollout:
        """Open a rollout; ends an earlier attempt with the same id. Raises ``InvalidInput``."""
        key = secrets.token_urlsafe(24)
        rollout = OpenedRollout(run.run_id, body, key, run.pool, run.clock, run.trace.opened(body))
        if run.registration.restore_reasoning:
            rollout.session.reasoning = ReasoningMemo(rollout.session.counters)
        earlier = run.rollouts.get(body.rollout_id)
        if earlier is not None:
            self._give_up(run, earlier, REOPENED, RETRIED)
        run.rollouts[body.rollout_id] = self._rollouts_by_key[_digest(key)] = rollout
        run.closed.forget(body.rollout_id)
        self._expire(run, rollout)
        return rollout

    def rollout(self, run: GatewayRun, rollout_id: str) -> OpenedRollout:
        """Return an open rollout of the run. Raises ``NotFound``."""
        rollout = run.rollouts.get(rollout_id)
        if rollout is None:
            raise _not_open(run, rollout_id)
        return rollout

    async def close(self, run: GatewayRun, rollout_id: str) -> bytes:
        """Revoke a rollout's key and abort its calls. Returns its record as JSON once the last call has ended.

        Repeated calls return the same record for some minutes, in case the first reply was lost. Raises ``NotFound``.
        """
        rollout = run.rollouts.get(rollout_id)
        if rollout is not None:
            self._revoke(run, rollout, CLOSED)
            run.report_now()
            # Made in a task of the run, because the caller may disconnect meanwhile.
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
            # The run's clock may be paused while the event loop's runs, so time may be left after the wait.
            wait_s = max(left_s, LOOK_S)
            rollout.expiry = asyncio.get_running_loop().call_later(wait_s, self._expire, run, rollout)

    def _give_up(self, run: GatewayRun, rollout: OpenedRollout, reason: str, ending: str) -> None:
        """End a rollout that will not be closed."""
        self._revoke(run, rollout, reason)
        run.tasks.start(rollout.given_up(ending))

    def _revoke(self, run: GatewayRun, rollout: OpenedRollout, reason: str) -> None:
        if self._rollouts_by_key.pop(_digest(rollout.key), None) is None:
            return
        if rollout.expiry is not None:
            rollout.expiry.cancel()
        # The id may belong to a newer rollout, opened while this one was being closed.
        if run.rollouts.get(rollout.rollout_id) is rollout:
            del run.rollouts[rollout.rollout_id]
        run.end(rollout.session, reason)


def _not_open(run: GatewayRun, rollout_id: str) -> NotFound:
    return NotFound(f"run {run.run_id!r} has no open rollout {rollout_id!r}", hint="it may already be closed")


def _digest(key: str) -> bytes:
    # Hashed, so that the time to find or compare a digest reveals nothing about the key.
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
