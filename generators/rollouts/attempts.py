"""Running a rollout function, in the event loop or in a thread, with retries, until there is a sample."""

import asyncio
import contextvars
import copy
import functools
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import openai

from forebay.client.sample_writer.outbox import Sample
from forebay.core.backoff import Backoff
from forebay.core.outcome import RolloutOutcome
from forebay.core.task_row import Message
from forebay.engines.pool import EnginePool
from forebay.generators.failures import EngineWaitOver, outcome_of
from forebay.generators.rewards import Rewarder, is_async, is_cancelled
from forebay.generators.rollouts.client import make_async_client, make_client
from forebay.generators.rollouts.engine_calls import CallNames, EngineCalls, taken
from forebay.generators.rollouts.open_group import GroupClosed, OpenGroup, RolloutBroken
from forebay.generators.rollouts.rollout import Rollout
from forebay.generators.rollouts.rollout_slot import RolloutSlot
from forebay.generators.rollouts.rollout_trace import RolloutTrace
from forebay.generators.rollouts.samples import (
    Returned,
    SampleArrays,
    Unbegun,
    failed_sample,
    finished_samples,
    plain,
    reward_item,
    text_of,
    with_own_arrays,
)

logger = logging.getLogger(__name__)

RolloutResult = tuple[list[Message], str]
SyncRolloutFunc = Callable[[openai.OpenAI, list[Message], dict[str, Any]], RolloutResult]
AsyncRolloutFunc = Callable[[openai.AsyncOpenAI, list[Message], dict[str, Any]], Awaitable[RolloutResult]]
RolloutFunc = SyncRolloutFunc | AsyncRolloutFunc


@dataclass(frozen=True)
class RolloutSettings:
    """Sampling parameters, retries per kind of failure, and the first pause; later pauses double."""

    sampling_params: dict[str, Any]
    retry_budgets: Mapping[RolloutOutcome, int]
    first_pause_s: float = 0.5

    def pause(self) -> Backoff:
        """Return the back-off between attempts."""
        return Backoff(self.first_pause_s, 30.0)


class RolloutRunner:
    """Makes the samples of one slot."""

    def __init__(
        self,
        function: RolloutFunc,
        pool: EnginePool,
        rewarder: Rewarder,
        settings: RolloutSettings,
        run_id: str,
        sample_arrays: SampleArrays | None = None,
    ) -> None:
        self._function = function
        self._pool = pool
        self._rewarder = rewarder
        self._settings = settings
        self._run_id = run_id
        self._sample_arrays = sample_arrays
        self._is_async = is_async(function)
        self._client: Any = make_async_client(pool.api_key) if self._is_async else make_client(pool.api_key)

    async def when_ready(self) -> None:
        """Return at once: rollouts run in this process."""

    async def close(self) -> None:
        """Close the connections; calls in flight end with an error."""
        closing = self._client.close()
        if self._is_async:
            await closing

    async def samples(
        self, group: OpenGroup, number: int, trace: RolloutTrace, rollout_slot: RolloutSlot
    ) -> list[Sample]:
        """Run the rollout until it succeeds or a kind of failure has used up its retries.

        Returns its samples: forks first, the main one last. A failed rollout has only the main sample, with its last
        error. Raises ``RolloutBroken`` once it has reached the token cap of ``rollout_slot``.
        """
        left, pause = Counter(self._settings.retry_budgets), self._settings.pause()
        while True:
            with trace.active():
                try:
                    rollout = await self._begun(group, number, trace, rollout_slot)
                except EngineWaitOver as error:
                    trace.note_outcome(error.outcome)
                    unbegun = Unbegun(group.plan, trace.uid, number, number, trace.num_attempts - 1)
                    return [failed_sample(unbegun, error, error.outcome)]
                async with _ended(rollout):
                    result = await self._attempt(rollout)
                    if isinstance(result, Returned):
                        return await self._judged(rollout, result, left, trace)
                outcome = outcome_of(result)
                trace.note_outcome(outcome)
                reason = f"{type(result).__name__}: {text_of(result)}"
                logger.warning("rollout %s, attempt %d: %s: %s", rollout.rollout_id, rollout.attempt, outcome, reason)
                if not left[outcome] or isinstance(result, EngineWaitOver):
                    return [failed_sample(rollout, result, outcome)]
                left[outcome] -= 1
                rollout_slot.preferred = None  # the engine may be the cause
                with trace.attempt.begin("retry"):
                    await pause.wait()
            trace.next_attempt(group.hold.step)

    async def _begun(self, group: OpenGroup, number: int, trace: RolloutTrace, rollout_slot: RolloutSlot) -> Rollout:
        with trace.attempt.begin("engine_wait"):
            member = await taken(self._pool, rollout_slot.preferred, group.hold.engine_wait_s)
        attempt = trace.num_attempts - 1
        names = CallNames(self._run_id, group, number, attempt)
        calls = EngineCalls(self._pool, member, group, names, trace.attempt, rollout_slot)
        rollout = Rollout(self._run_id, group, number, attempt, calls)
        trace.note_started(rollout)
        return rollout

    async def _attempt(self, rollout: Rollout) -> Returned | BaseException:
        result = await self._outcome(rollout)
        # Checked here because the function may have swallowed the exception, or raised another one.
        if (no_engine := rollout.calls.wait_over or rollout.calls.cut_off) is not None:
            return no_engine
        if rollout.calls.is_broken:
            with suppress(Exception):  # a stream that breaks off has nothing more to record
                await rollout.end_streams()
            await rollout.calls.end_calls()
            raise RolloutBroken(rollout.rollout_id)
        return result

    async def _outcome(self, rollout: Rollout) -> Returned | BaseException:
        try:
            with rollout.calls.occupying():
                result = await self._call(rollout)
                await rollout.end_streams()
            # Converted here, so that a value that is not JSON costs an attempt and not the run.
            rollout.extra_info, rollout.for_reward = plain(rollout.extra_info), plain(rollout.for_reward)
            return Returned.of(result)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            return error
        except BaseExceptionGroup as errors:  # concurrent calls: each found the group closed
            if errors.subgroup(GroupClosed) is not None:
                raise GroupClosed(rollout.calls.group.group_id) from None
            return errors
        except (Exception, SystemExit, RolloutBroken) as error:  # noqa: BLE001 - any error of a rollout function costs one attempt
            return error

    async def _call(self, rollout: Rollout) -> object:
        client = self._client.bound_to(rollout, base_url=f"{rollout.engine_url}/v1")
        # Copied: rollout functions may change their arguments, and the next attempt needs the originals.
        messages, params = copy.deepcopy(rollout.prompt), copy.deepcopy(self._settings.sampling_params)
        if self._is_async:
            return await self._function(client, messages, params)  # type: ignore[misc]
        return await in_thread(self._function, client, messages, params)

    async def _judged(
        self, rollout: Rollout, returned: Returned, left: "Counter[RolloutOutcome]", trace: RolloutTrace
    ) -> list[Sample]:
        # Only the reward is retried: the rollout succeeded, and its tokens are paid for.
        pause = self._settings.pause()
        while True:
            judged = await self._rewarder.reward(reward_item(rollout, returned), trace.attempt)
            trace.note_reward(judged.reward, judged.parts, judged.cpu_s)
            if not judged.kind:
                trace.note_outcome(returned.outcome)
                break
            trace.note_outcome(RolloutOutcome.JUDGE_FAILURE)
            logger.warning("reward of rollout %s: %s: %s", rollout.rollout_id, judged.kind, judged.message)
            if not left[RolloutOutcome.JUDGE_FAILURE]:
                break
            left[RolloutOutcome.JUDGE_FAILURE] -= 1
            with trace.attempt.begin("retry"):
                await pause.wait()
        samples = finished_samples(rollout, returned, self._settings.sampling_params, judged)
        if self._sample_arrays is None or judged.kind:
            return samples
        with trace.attempt.begin("reward"):  # the sample waits for both
            return list(await asyncio.gather(*(with_own_arrays(self._sample_arrays, each) for each in samples)))


@asynccontextmanager
async def _ended(rollout: Rollout) -> AsyncIterator[None]:
    """Run a rollout inside this context, and afterwards its ``at_end`` callbacks."""
    try:
        yield
    finally:
        try:
            await rollout.at_end.aclose()
        except Exception:  # a failed clean-up costs no sample
            logger.exception("clean-up of rollout %s failed", rollout.rollout_id)


async def in_thread(function: Callable[..., object], *args: object) -> object:
    """Run ``function`` in a new thread."""
    # Not in a pool: a function that hangs after its group was closed is left behind. It must not block a pool thread,
    # nor keep the process from ending.
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
        # A future cannot hold StopIteration.
        error = RuntimeError(f"rollout_func raised StopIteration({stop.value!r})")
    except BaseException as raised:  # noqa: BLE001 - passed on to the event loop
        error = raised

    def resolve() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        loop.call_soon_threadsafe(resolve)
    except RuntimeError:
        logger.debug("a rollout ended after its run")
