"""Agents as they are: any program that talks to a model over HTTP becomes a generator, and every token is recorded."""

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
    """Runs an agent for each rollout: a function of an ``AgentTask``, or a command. The agent's code stays as it is.

    The model that it talks to is the gateway of the run, which passes its calls to the engines and records them. What
    ``BaseGenerator`` does for rollout functions holds for agents: groups, slots, deadlines, attempts.
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
        """``entry`` with an agent in place of the rollout function.

        ``judge`` is a reward function, whose item has ``agent`` besides (``output``, ``folder``, ``wall_s``), or a
        ``Verifier``. ``limits.wall_s`` holds for every agent, the others for commands, which find ``env`` in their
        environment. The ``hidden`` fields of a row are not told to agents: what they can read, they learn to copy.
        """

        async def run() -> "Totals":
            async with GatewayLink(self.remote_buffer_url) as gateway:
                if (places := composition().places) is not None:
                    await places.need("gateway_url", gateway.url)
                rollouts = AgentRollouts(gateway, agent, limits, dict(env or {}), frozenset(hidden))
                judged = rollouts.judge(judge) if isinstance(judge, Verifier) else judge
                return await self.run_async(input_file, rollouts.run, judged, num_epoch)

        return asyncio.run(run())
