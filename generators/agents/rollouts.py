"""The rollout function behind an ``AgentGenerator``: an agent from its start to its end, recorded by the gateway."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from forebay.core.errors import EngineError, ForebayError
from forebay.core.task_row import Message
from forebay.core.waiting import timeout_when
from forebay.generators.agents.gateway import GatewayLink, RolloutAccess, RolloutRecord
from forebay.generators.agents.run import Agent, run_agent
from forebay.generators.agents.task import AgentResult, AgentTask
from forebay.generators.agents.verifier import Verifier
from forebay.generators.failures import AgentFailed, EngineWaitOver, EnvironmentFailed, RolloutFailed
from forebay.generators.process.run_logs import AgentLogs
from forebay.generators.sandbox import Limits, Sandbox

if TYPE_CHECKING:
    from forebay.generators.rollouts.rollout import Rollout

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
"""For telling the gateway that a cancelled rollout is over; its deadline ends it otherwise."""
TOKEN_LIMITS = ("max_completion_tokens", "max_tokens")
NOT_IN_BODY = ("extra_body", "extra_headers", "extra_query", "timeout", "stream")


class AgentRollouts:
    """The rollout function, and what the rollouts in progress share."""

    def __init__(
        self, gateway: GatewayLink, agent: Agent, limits: Limits, env: dict[str, str], hidden: frozenset[str]
    ) -> None:
        self._agent = agent
        self._limits = limits
        self._env = env
        self._hidden = hidden
        self._gateway = gateway
        self._sandboxes: dict[str, Sandbox] = {}
        self._logs = AgentLogs.of_this_run()

    async def run(
        self, client: Any, messages: list[Message], sampling_params: dict[str, Any]
    ) -> tuple[list[Message], str]:
        """One rollout: the agent from its start to its end, and the samples that the gateway made of its calls."""
        rollout: Rollout = client.rollout
        # Open to the end of the rollout, not of this function: verifiers look into the folder.
        sandbox = await rollout.at_end.enter_async_context(Sandbox(self._env))
        self._sandboxes[rollout.uid] = sandbox
        rollout.at_end.callback(self._sandboxes.pop, rollout.uid, None)
        record, result = await self._recorded(rollout, messages, sampling_params, sandbox)
        rollout.trajectory = record
        rollout.for_reward["agent"] = result.for_reward()
        rollout.extra_info["agent"] = {"wall_s": result.wall_s, "num_calls": record.num_calls}
        return record.samples[-1]["messages"], record.finish_reason or "stop"

    def judge(self, verifier: Verifier) -> "FolderJudge":
        """The reward that a verifier tells, in the folder where the agent worked."""
        return FolderJudge(verifier, self._sandboxes)

    async def _recorded(
        self, rollout: "Rollout", prompt: list[Message], sampling_params: dict[str, Any], sandbox: Sandbox
    ) -> tuple[RolloutRecord, AgentResult]:
        result, error = None, None
        name, rid_prefix = _attempt_names(rollout)
        async with self._opened(name, rid_prefix, sampling_params, rollout) as opened:
            task = self._task(rollout, prompt, opened, sandbox)
            try:
                hold, keep = rollout.calls.group.hold, partial(self._logs.keep, rollout.uid)
                is_capped = rollout.calls.rollout_slot.cap_tokens is not None
                # Ended, by a ``TimeoutError``, once the rollout has come to its cap.
                async with timeout_when(self._gateway.wait_capped(name)) if is_capped else nullcontext():
                    result = await run_agent(self._agent, task, sandbox, self._limits, hold, keep)
            # Its record is asked for all the same: what the calls came to tells whose fault it is.
            except (Exception, SystemExit) as raised:  # noqa: BLE001 - whatever an agent raises costs one attempt
                error = raised
            record = await self._gateway.close(name)
        if record.failures and record.failures[-1]["kind"] == "environment":
            rollout.calls.note_away()
        rollout.num_sampled_tokens = record.num_sampled_tokens
        rollout.gateway_turns = record.trace.turns
        if record.broken_tokens is not None:
            rollout.num_sampled_tokens = record.broken_tokens
            rollout.calls.break_off()
        return record, checked_result(record, result, error)

    @asynccontextmanager
    async def _opened(
        self, name: str, rid_prefix: str, params: dict[str, Any], rollout: "Rollout"
    ) -> AsyncIterator[RolloutAccess]:
        """A rollout at the gateway, which is ended there however this ends."""
        opened = await self._gateway.open(
            name,
            rid_prefix=rid_prefix,
            # A run process that dies closes nothing: the gateway ends the rollout by itself.
            deadline_s=self._limits.wall_s + rollout.calls.group.hold.engine_wait_s + CLOSE_S,
            sampling_params=_defaults(params),
            max_tokens=next((params[limit] for limit in TOKEN_LIMITS if params.get(limit) is not None), None),
            cap_tokens=rollout.calls.rollout_slot.cap_tokens,
            engine_url=rollout.calls.rollout_slot.preferred,
            traceparent=rollout.trace.traceparent,
        )
        try:
            yield opened
        # Whatever else ends it has closed it before, or leaves it to its deadline.
        except asyncio.CancelledError:
            await self._abandon(name)
            raise

    async def _abandon(self, name: str) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._gateway.close(name)
        except (ForebayError, TimeoutError) as error:
            logger.warning("rollout %s was not ended at the gateway: %s", name, error)

    def _task(self, rollout: "Rollout", prompt: list[Message], opened: RolloutAccess, sandbox: Sandbox) -> AgentTask:
        return AgentTask(
            instance_id=rollout.instance_id,
            row={name: value for name, value in rollout.row.items() if name not in self._hidden},
            prompt=prompt,
            model=rollout.model,
            base_url=opened.base_url,
            anthropic_url=opened.anthropic_url,
            api_key=opened.key,
            folder=sandbox.folder,
            timeout_s=self._limits.wall_s,
            traceparent=rollout.trace.traceparent,
        )


class FolderJudge:
    """A reward function: a verifier in the folder of the agent, one of ``sandboxes`` by uid."""

    needs_folder = True
    """So it cannot judge what was recorded."""

    def __init__(self, verifier: Verifier, sandboxes: Mapping[str, Sandbox]) -> None:
        self._verifier, self._sandboxes = verifier, sandboxes

    async def __call__(self, item: dict[str, Any]) -> float:
        """Of the sample ``item["uid"]``."""
        return await self._verifier.reward(self._sandboxes[item["uid"]], item)


def _defaults(params: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters as fields of a request's body, without what only the ``openai`` package understands."""
    # The limit on tokens goes to the gateway by itself: it holds for calls that have a limit of their own as well.
    kept = {name: value for name, value in params.items() if name not in (*TOKEN_LIMITS, *NOT_IN_BODY)}
    return {**kept, **(params.get("extra_body") or {})}


def _attempt_names(rollout: "Rollout") -> tuple[str, str]:
    """What the gateway knows an attempt by, and what the engine's ids of its calls begin with."""
    attempt = f"{rollout.attempt:02x}"
    return f"{rollout.uid}-{attempt}", f"{rollout.calls.group.rid_prefix}{rollout.slot:04x}-{attempt}-"


# --- what the gateway recorded, and whose fault it is when there is nothing


def checked_result(record: RolloutRecord, result: AgentResult | None, error: BaseException | None) -> AgentResult:
    """The result of an agent that did its work. Raises what tells whose fault it is that another did not."""
    last = record.failures[-1] if record.failures else {}
    is_last_word = last.get("call") == record.num_calls  # an agent may end well all the same, with what it had
    if isinstance(error, EngineWaitOver):
        raise error
    # Before the agent's own error: what it raised may be no more than its way to pass on that the engine failed.
    if last.get("kind") in ("engine", "environment") and (error is not None or is_last_word or not record.samples):
        if last["kind"] == "environment":
            raise EnvironmentFailed(str(last.get("message"))) from error
        raise EngineError(str(last.get("message")), status_code=last.get("status")) from error
    if isinstance(error, RolloutFailed):
        raise error
    if error is not None:
        raise AgentFailed(f"the agent raised {error!r:.1000}") from error
    if not record.samples:
        why = f": {last.get('message')}" if last else ", it made no call: does it use the base_url that it was given?"
        raise AgentFailed(f"the agent has no answer of the model{why}")
    assert result is not None
    return result
