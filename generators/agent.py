"""Generators for unchanged agents: any program that calls a model over HTTP. Every token is recorded."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.generators.agents.gateway import GatewayLink
from forebay.generators.agents.rollouts import AgentRollouts
from forebay.generators.agents.run import Agent
from forebay.generators.agents.task import AgentTask
from forebay.generators.agents.verifier import Verifier
from forebay.generators.base import BaseGenerator
from forebay.generators.job.composition import composition
from forebay.generators.sandbox import Limits

if TYPE_CHECKING:
    from forebay.generators.job.reporter import Totals
    from forebay.generators.rewards import RewardFunc

__all__ = ["AgentGenerator", "AgentTask", "Limits", "Verifier"]

AGENT_LIMITS = Limits(wall_s=600)


class AgentGenerator(BaseGenerator):
    """Runs an agent for each rollout: a function of an ``AgentTask``, or a command. The agent's code need not change.

    The agent's model is the gateway of the run, which forwards its calls to the engines and records them. Groups,
    slots, deadlines and attempts work as in ``BaseGenerator``.
    """

    def run_agent(
        self,
        input_file: str | Path,
        agent: Agent,
        judge: "RewardFunc | Verifier",
        num_epoch: int | str = 1,
        *,
        limits: Limits = AGENT_LIMITS,
        env: Mapping[str, str] | None = None,
        hidden: Sequence[str] = ("label",),
    ) -> "Totals":
        """Run an agent on every row, like ``entry`` does with a rollout function.

        ``judge`` is a ``Verifier`` or a reward function, whose item also has ``agent`` (``output``, ``folder``,
        ``wall_s``). ``limits.wall_s`` applies to every agent, the other limits to commands. ``env`` is added to the
        environment of commands. Agents do not see a row's ``hidden`` fields, because they would learn to copy them.
        """
        return asyncio.run(
            self.run_agent_async(input_file, agent, judge, num_epoch, limits=limits, env=env, hidden=hidden)
        )

    async def run_agent_async(
        self,
        input_file: str | Path,
        agent: Agent,
        judge: "RewardFunc | Verifier",
        num_epoch: int | str = 1,
        *,
        limits: Limits = AGENT_LIMITS,
        env: Mapping[str, str] | None = None,
        hidden: Sequence[str] = ("label",),
        calls_model: bool = True,
    ) -> "Totals":
        """Run an agent on every row like ``run_agent``, for callers inside an event loop.

        With ``calls_model`` False, an agent that makes no call is no failure: its sample has no tokens.
        """
        async with GatewayLink(self.remote_buffer_url) as gateway:
            if (places := composition().places) is not None:
                await places.need("gateway_url", gateway.url)
            rollouts = AgentRollouts(gateway, agent, limits, dict(env or {}), frozenset(hidden), calls_model)
            judged = rollouts.judge(judge) if isinstance(judge, Verifier) else judge
            return await self.run_async(input_file, rollouts.run, judged, num_epoch)
