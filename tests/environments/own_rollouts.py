"""Rollouts of verifiers itself, without Forebay: the rewards of each task, as JSON."""

import asyncio
import json
import sys
from typing import Any

import verifiers.v1 as vf


async def rewards(config: dict[str, Any], url: str, model: str, num_each: int, **sampling: Any) -> list[list[Any]]:
    """The index, the total and the parts of each rollout."""
    env = vf.load_environment(vf.resolve_env_config(config))
    client = vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var="NO_KEY")
    context = vf.ModelContext(model=model, client=client, sampling=vf.SamplingConfig(**sampling))
    async with env.serving():
        slots = [slot for task in env.taskset for slot in env.slots(task, num_each)]
        episodes = await asyncio.gather(*(env.run_slot(slot, context) for slot in slots))
    found = []
    for episode in episodes:
        assert episode.ok, [error for trace in episode.traces for error in trace.errors] + episode.errors
        trace = next(trace for trace in episode.traces if trace.agent.trainable)
        parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        found.append([episode.task.data.idx, trace.reward, parts])
    return found


async def main(given: dict[str, Any]) -> None:
    """Run the rollouts of every environment at its engine."""
    print(json.dumps([await rewards(**each, **given["common"]) for each in given["envs"]]))


asyncio.run(main(json.loads(sys.argv[1])))
