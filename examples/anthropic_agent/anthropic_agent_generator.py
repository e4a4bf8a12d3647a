"""A generator with the Anthropic SDK: the loop of messages and tool results from its documentation."""

import anthropic

from forebay.generators.agent import AgentGenerator, AgentTask

TASK_TYPE = "anthropic_agent"
CAPITALS = {"France": "Paris", "Peru": "Lima", "Kenya": "Nairobi"}
TOOL = {
    "name": "look_up",
    "description": "Look up the capital of a country.",
    "input_schema": {"type": "object", "properties": {"country": {"type": "string"}}, "required": ["country"]},
}


async def solve(task: AgentTask) -> str:
    messages = [{"role": "user", "content": task.question}]
    async with anthropic.AsyncAnthropic(base_url=task.anthropic_url, api_key=task.api_key) as client:
        for _ in range(8):
            reply = await client.messages.create(
                model=task.model, max_tokens=256, system="Look up what you say.", messages=messages, tools=[TOOL]
            )
            if reply.stop_reason != "tool_use":
                break
            results = [look_up(block) for block in reply.content if block.type == "tool_use"]
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
    return "".join(block.text for block in reply.content if block.type == "text")


def look_up(call):
    """The result of one call of the tool."""
    capital = CAPITALS.get(call.input.get("country"))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": capital or "no such country"}
    return result if capital else {**result, "is_error": True}


def reward_func(item):
    """1 if the agent's final answer contains the capital."""
    return float(item["label"] in item["agent"]["output"])


def run_rollout(data):
    generator = AgentGenerator.from_payload(data)
    generator.run_agent(data["input_file"], solve, reward_func, data.get("num_epoch", 1))
