"""Each rollout asks a sub-agent first, whose conversation is a sequence of its own; some tasks have no judge."""

from typing import Any

from forebay.generators.base import BaseGenerator, EnvironmentFailed, JudgeFailed, single_turn

TASK_TYPE = "sub_agent"


async def rollout_func(client: Any, messages: list[dict[str, Any]], sampling_params: dict[str, Any]) -> Any:
    if client.rollout.row.get("no_sandbox"):
        raise EnvironmentFailed("no sandbox")
    client.rollout.for_reward["slot"] = client.rollout.slot
    hint, _ = await single_turn(client, [{"role": "user", "content": "a hint, please"}], sampling_params)
    return await single_turn(client, [*messages, hint[-1] | {"role": "user"}], sampling_params)


async def reward_func(item: dict[str, Any]) -> float:
    if item.get("no_judge"):
        raise JudgeFailed("nobody can tell")
    return float(item["slot"] % 2)


def run_rollout(data: dict[str, Any]) -> None:
    generator = BaseGenerator.from_payload(data)
    generator.entry(data["input_file"], rollout_func, reward_func, data["num_epoch"])
