"""Running a rollout function: in the event loop or in a thread, attempt after attempt, to a sample."""

import asyncio
import contextvars
import copy
import functools
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import openai

from forebay.engines.balance import Member
from forebay.generators.clients import AsyncRolloutClient, RolloutClient, make_client
from forebay.generators.engine_ring import EngineRing, Target
from forebay.generators.groups import OpenGroup
from forebay.generators.link import Backoff
from forebay.generators.rewards import Rewarder, is_async
from forebay.generators.rollout import EngineCalls, Rollout, request_ids
from forebay.generators.rows import Message
from forebay.generators.samples import Trajectory, failed_sample, finished_sample, plain, reward_item
from forebay.generators.writer import Sample

logger = logging.getLogger(__name__)

RolloutResult = tuple[list[Message], str]
SyncRolloutFunc = Callable[[openai.OpenAI, list[Message], dict[str, Any]], RolloutResult]
AsyncRolloutFunc = Callable[[openai.AsyncOpenAI, list[Message], dict[str, Any]], Awaitable[RolloutResult]]
RolloutFunc = SyncRolloutFunc | AsyncRolloutFunc


@dataclass(frozen=True)
class RolloutSettings:
    """How each rollout is run: at most ``max_attempts`` times, with pauses that double from ``first_pause_s``."""

    sampling_params: dict[str, Any] = field(default_factory=dict)
    max_attempts: int = 3
    first_pause_s: float = 0.5


class RolloutRunner:
    """Makes the sample of one slot."""

    def __init__(
        self, function: RolloutFunc, ring: EngineRing, rewarder: Rewarder, settings: RolloutSettings, run_id: str
    ) -> None:
        self._function = function
        self._ring = ring
        self._rewarder = rewarder
        self._settings = settings
        self._run_id = run_id
        self._is_async = is_async(function)
        kind = AsyncRolloutClient if self._is_async else RolloutClient
        self._client = make_client(kind, ring.api_key)

    async def close(self) -> None:
        """Let go of the connections; calls still in flight end with an error."""
        closing = self._client.close()
        if self._is_async:
            await closing

    async def sample(self, group: OpenGroup, slot: int) -> Sample:
        """Run the rollout until it succeeds, at most ``max_attempts`` times; the last error makes a failed sample."""
        pause = Backoff(self._settings.first_pause_s, 30.0)
        for attempt in range(self._settings.max_attempts):
            if attempt:
                await pause.wait()
            member = await self._ring.take()
            names = request_ids(self._run_id, group, slot, attempt)
            calls = EngineCalls(self._ring, member, group, names)
            rollout = Rollout(self._run_id, group, slot, attempt, calls)
            result = await self._attempt(rollout, member)
            if isinstance(result, Trajectory):
                return await self._rewarded(rollout, result)
            logger.warning("rollout %s, attempt %d: %r", rollout.rollout_id, attempt, result)
            failed = failed_sample(rollout, result)
        return failed

    async def _attempt(self, rollout: Rollout, member: Member[Target]) -> Trajectory | BaseException:
        try:
            with self._ring.occupied(member):
                result = await self._call(rollout)
            rollout.extra_info = plain(rollout.extra_info)
            return Trajectory.of(result)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Nobody cancelled us: the function's own scopes leaked it.
            return error
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a rollout function raises costs one attempt
            return error

    async def _call(self, rollout: Rollout) -> object:
        client = self._client.bound_to(rollout)
        messages, params = copy.deepcopy(rollout.prompt), copy.deepcopy(self._settings.sampling_params)
        if self._is_async:
            return await self._function(client, messages, params)  # type: ignore[misc]
        return await in_thread(self._function, client, messages, params)

    async def _rewarded(self, rollout: Rollout, trajectory: Trajectory) -> Sample:
        outcome = await self._rewarder.reward(reward_item(rollout, trajectory))
        if outcome.kind:
            logger.warning("reward of rollout %s: %s: %s", rollout.rollout_id, outcome.kind, outcome.message)
        return finished_sample(rollout, trajectory, self._settings.sampling_params, outcome)


async def in_thread(function: Callable[..., object], *args: object) -> object:
    """Run ``function`` in a thread of its own.

    Not in a pool: a function that hangs after its group was closed is left behind, and must neither hold the place of
    another rollout nor keep the process from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[object] = loop.create_future()
    call = functools.partial(contextvars.copy_context().run, function, *args)
    threading.Thread(target=_run, args=(loop, future, call), name="rollout", daemon=True).start()
    return await future


def _run(loop: asyncio.AbstractEventLoop, future: "asyncio.Future[object]", call: Callable[[], object]) -> None:
    error: BaseException | None = None
    result: object = None
    try:
        result = call()
    except StopIteration as stop:
        # A future cannot hold this one.
        error = RuntimeError(f"rollout_func raised StopIteration({stop.value!r})")
    except BaseException as raised:  # noqa: BLE001 - handed to the event loop, whatever it is
        error = raised

    def settle() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:
        logger.debug("a rollout ended after its run")
