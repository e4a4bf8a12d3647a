"""Registers with the gateway which runs use it, under which keys, and for how long."""

import asyncio
import hmac
import logging
from typing import Any

from forebay.buffer.buffer import Buffer
from forebay.core.addresses import engine_urls
from forebay.core.errors import InvalidInput, RunEnded, RunNotFound
from forebay.core.fields import read_flag
from forebay.core.run import WORKING, Run, RunState
from forebay.server.gateway_process import GatewayProcess
from forebay.server.tracing.run_traces import RunTraces

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Seconds between checks of runs: not every end is reported to ``look``."""


class RunGateway:
    """Registers runs with the gateway process, and removes them when they are over.

    Keys are derived from a run's own key, so they survive restarts of the server and the gateway.
    """

    def __init__(self, buffer: Buffer, process: GatewayProcess, own_url: str, traces: RunTraces) -> None:
        """``own_url`` is where the gateway reaches this server."""
        self._buffer = buffer
        self._process = process
        self._own_url = own_url
        self._traces = traces
        self._watching: dict[str, asyncio.Task[None]] = {}

    async def aclose(self) -> None:
        """Stop watching runs."""
        for task in list(self._watching.values()):
            task.cancel()
        await asyncio.gather(*self._watching.values(), return_exceptions=True)

    async def admit(self, run: Run) -> dict[str, str]:
        """The address and key for opening rollouts. Raises ``InvalidInput``, ``RunEnded``, or as ``register``."""
        if _is_over(run):
            raise RunEnded(run.run_id, run.state.value)
        if not engine_urls(run.payload):
            raise InvalidInput(
                "the run names no engine", hint="start it with remote_engine_url", field="remote_engine_url"
            )
        url = self._process.start()
        run.is_gateway_waiting = False  # a run asks again when its gateway died, and the flag would stay set
        self._buffer.get(run.run_id).buffer.update_clock()
        # On every call: the process may have a new payload, or the gateway may have forgotten the run.
        await self._process.register(run.run_id, self._registration(run))
        if run.run_id not in self._watching:
            self._watching[run.run_id] = asyncio.create_task(self._watch(run.run_id))
        return {"url": url, "key": _key(run, "gateway")}

    async def capture_url(self, run: Run) -> str:
        """The URL that replaces engine and buffer in the payload of a captured generator. Raises as ``admit``."""
        admitted = await self.admit(run)
        return f"{admitted['url']}/gateway/{_key(run, 'capture')}"

    async def look(self, run_id: str) -> None:
        """Revoke a run's keys and end its calls if it is over."""
        if run_id in self._watching and self._is_over(run_id):
            await self._process.forget(run_id)

    def _is_over(self, run_id: str) -> bool:
        try:
            return _is_over(self._buffer.get(run_id).run)
        except RunNotFound:
            return True

    async def _watch(self, run_id: str) -> None:
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                if self._is_over(run_id):
                    await self._process.forget(run_id)
                    return
        finally:  # in every case: a run that is resumed later is watched again
            del self._watching[run_id]

    def _registration(self, run: Run) -> dict[str, Any]:
        payload = run.payload
        registration: dict[str, Any] = {
            "key": _key(run, "gateway"),
            "engine_urls": engine_urls(payload),
            "buffer_url": f"{self._own_url}/w/{run.run_key}",
            "api_key": _text(payload, "api_key"),
            "model": _text(payload, "model"),
            "policy_models": run.settings.policy_models,
            "arrays": run.settings.arrays,
            "restore_reasoning": run.settings.restore_reasoning,
            "trace": self._traces.process_settings(run),
        }
        if is_captured(run):
            registration["capturing"] = {
                "secret": _key(run, "capture"),
                "group_deadline_s": run.settings.group_deadline_seconds,
                "input_file": _text(payload, "input_file"),
            }
        return registration


def is_captured(run: Run) -> bool:
    """Whether the gateway captures the generator's calls; a generator with our base records its own."""
    is_wanted = read_flag("capture", run.payload.get("capture"))
    return is_wanted and not run.is_native_generator and bool(engine_urls(run.payload))


def _is_over(run: Run) -> bool:
    """Whether the run is over. Without our base, a process that returned may have left its work to other jobs."""
    if run.has_ended or run.state in (RunState.STOPPED, RunState.FAILED):
        return True
    return run.is_native_generator and run.state not in WORKING


def _key(run: Run, use: str) -> str:
    # A digest cannot be reversed: one key reveals neither the run's own key nor the key for the other use.
    return hmac.digest(run.run_key.encode(), f"{run.run_id}/{use}".encode(), "sha256").hex()[:40]


def _text(payload: dict[str, Any], name: str) -> str | None:
    value = payload.get(name)
    return value if isinstance(value, str) and value else None
