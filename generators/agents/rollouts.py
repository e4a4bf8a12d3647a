"""The rollout function of an ``AgentGenerator``: runs an agent whose calls the gateway records."""

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
from forebay.generators.rewards import Reward
from forebay.generators.sandbox import Limits, Sandbox

if TYPE_CHECKING:
    from forebay.generators.rollouts.rollout import Rollout

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Time limit for closing a cancelled rollout at the gateway; otherwise its deadline ends it."""
TOKEN_LIMITS = ("max_completion_tokens", "max_tokens")
NOT_IN_BODY = ("extra_body", "extra_headers", "extra_query", "timeout", "stream")


class AgentRollouts:
    """The rollout function, and the state shared by rollouts in progress."""

    def __init__(
        self,
        gateway: GatewayLink,
        agent: Agent,
        limits: Limits,
        env: dict[str, str],
        hidden: frozenset[str],
        calls_model: bool = True,
    ) -> None:
        self._agent = agent
        self._calls_model = calls_model
        self._limits = limits
        self._env = env
        self._hidden = hidden
        self._gateway = gateway
        self._sandboxes: dict[str, Sandbox] = {}
        self._logs = AgentLogs.of_this_run()

    async def run(
        self, client: Any, messages: list[Message], sampling_params: dict[str, Any]
    ) -> tuple[list[Message], str]:
        """Run one rollout: the agent, and the samples that the gateway made of its calls."""
        rollout: Rollout = client.rollout
        # Open until the end of the rollout, not of this function, because verifiers read the folder.
        sandbox = await rollout.at_end.enter_async_context(Sandbox(self._env))
        self._sandboxes[rollout.uid] = sandbox
        rollout.at_end.callback(self._sandboxes.pop, rollout.uid, None)
        record, result = await self._recorded(rollout, messages, sampling_params, sandbox)
        rollout.trajectory = record
        rollout.for_reward["agent"] = result.for_reward()
        rollout.extra_info["agent"] = {"wall_s": result.wall_s, "num_calls": record.num_calls}
        return record.samples[-1]["messages"] if record.samples else messages, record.finish_reason or "stop"

    def judge(self, verifier: Verifier) -> "FolderJudge":
        """Return a reward function that runs a verifier in the agent's folder."""
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
                # Raises ``TimeoutError`` once the rollout has reached its token cap.
                async with timeout_when(self._gateway.wait_capped(name)) if is_capped else nullcontext():
                    result = await run_agent(self._agent, task, sandbox, self._limits, hold, keep)
            # The record is still needed: the results of the calls show the kind of failure.
            except (Exception, SystemExit) as raised:  # noqa: BLE001 - any error of an agent costs one attempt
                error = raised
            record = await self._gateway.close(name)
        if record.failures and record.failures[-1]["kind"] == "environment":
            rollout.calls.note_away()
        rollout.num_sampled_tokens = record.num_sampled_tokens
        rollout.gateway_turns = record.trace.turns
        if record.broken_tokens is not None:
            rollout.num_sampled_tokens = record.broken_tokens
            rollout.calls.break_off()
        return record, checked_result(record, result, error, self._calls_model)

    @asynccontextmanager
    async def _opened(
        self, name: str, rid_prefix: str, params: dict[str, Any], rollout: "Rollout"
    ) -> AsyncIterator[RolloutAccess]:
        """Open a rollout at the gateway, and close it there if this context is cancelled."""
        opened = await self._gateway.open(
            name,
            rid_prefix=rid_prefix,
            # If the run process dies, the gateway ends the rollout at this deadline.
            deadline_s=self._limits.wall_s + rollout.calls.group.hold.engine_wait_s + CLOSE_S,
            sampling_params=_defaults(params),
            max_tokens=next((params[limit] for limit in TOKEN_LIMITS if params.get(limit) is not None), None),
            cap_tokens=rollout.calls.rollout_slot.cap_tokens,
            engine_url=rollout.calls.rollout_slot.preferred,
            traceparent=rollout.trace.traceparent,
        )
        try:
            yield opened
        # In all other cases it is already closed, or left to its deadline.
        except asyncio.CancelledError:
            await self._abandon(name)
            raise

    async def _abandon(self, name: str) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._gateway.close(name)
        except (ForebayError, TimeoutError) as error:
            logger.warning("could not close rollout %s at the gateway: %s", name, error)

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
    """Reward function that runs a verifier in the agent's folder, one of ``sandboxes`` by uid."""

    needs_folder = True
    """Marks that recorded rollouts cannot be scored, because their folders are gone."""

    def __init__(self, verifier: Verifier, sandboxes: Mapping[str, Sandbox]) -> None:
        self._verifier, self._sandboxes = verifier, sandboxes

    async def __call__(self, item: dict[str, Any]) -> Reward:
        """Return the reward of sample ``item["uid"]``."""
        return await self._verifier.reward(self._sandboxes[item["uid"]], item)


def _defaults(params: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters as fields of a request body, without arguments of the ``openai`` package."""
    # The token limit is sent to the gateway separately, because it also applies to calls with their own limit.
    kept = {name: value for name, value in params.items() if name not in (*TOKEN_LIMITS, *NOT_IN_BODY)}
    return {**kept, **(params.get("extra_body") or {})}


def _attempt_names(rollout: "Rollout") -> tuple[str, str]:
    """Return the gateway's name of an attempt, and the prefix of its calls' ids at the engine."""
    attempt = f"{rollout.attempt:02x}"
    return f"{rollout.uid}-{attempt}", f"{rollout.calls.group.rid_prefix}{rollout.slot:04x}-{attempt}-"


# --- the result, or the kind of failure


def checked_result(
    record: RolloutRecord, result: AgentResult | None, error: BaseException | None, calls_model: bool = True
) -> AgentResult:
    """Return the result of a successful agent. Raises an error of the matching kind for a failed one."""
    last = record.failures[-1] if record.failures else {}
    is_last_word = last.get("call") == record.num_calls  # an agent may still succeed after a failed call
    if isinstance(error, EngineWaitOver):
        raise error
    # Checked before the agent's own error, which may only be a consequence of the engine's failure.
    if last.get("kind") in ("engine", "environment") and (error is not None or is_last_word or not record.samples):
        if last["kind"] == "environment":
            raise EnvironmentFailed(str(last.get("message"))) from error
        raise EngineError(str(last.get("message")), status_code=last.get("status")) from error
    if isinstance(error, RolloutFailed):
        raise error
    if error is not None:
        raise AgentFailed(f"the agent raised {error!r:.1000}") from error
    if not record.samples and (last or calls_model):
        why = f": {last.get('message')}" if last else ", because it made no call: check that it uses the given base_url"
        raise AgentFailed(f"the agent got no answer from the model{why}")
    assert result is not None
    return result
