"""Agents of several frameworks with one tool, which drop the model's reasoning from the history that they send back."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import agents
import anthropic

from tests.gateway.gateway_kit import Json, OpenedAt

NAME, FOUND = "look", "nothing"
QUESTION = "where is it?"
SCHEMA: Json = {"type": "object", "properties": {}}
KEPT: Any = {"role": True, "content": True, "tool_calls": {"__all__": {"id", "type", "function"}}}

Agent = Callable[[OpenedAt, int], Awaitable[None]]


async def openai_chat(
    rollout: OpenedAt, num_turns: int, *, edit: Callable[[str], str] = str, is_stream: bool = False
) -> None:
    """The openai package. ``edit`` is what the agent makes of the model's text before it sends it back."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tools = [{"type": "function", "function": {"name": NAME, "parameters": SCHEMA}}]
    asked: Any = {"model": "m", "messages": messages, "tools": tools}
    async with rollout.client() as client:
        for _ in range(num_turns):
            if is_stream:
                async with client.chat.completions.stream(**asked) as stream:
                    reply: Any = await stream.get_final_completion()
            else:
                reply = await client.chat.completions.create(**asked)
            kept = reply.choices[0].message.model_dump(include=KEPT)
            messages.append(kept | {"content": edit(kept["content"])})
            messages += [{"role": "tool", "tool_call_id": each["id"], "content": FOUND} for each in kept["tool_calls"]]


async def openai_responses(rollout: OpenedAt, num_turns: int) -> None:
    """The openai package over Responses, without the server's memory."""
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    tools: Any = [{"type": "function", "strict": False, "name": NAME, "parameters": SCHEMA}]
    async with rollout.client() as client:
        for _ in range(num_turns):
            reply = await client.responses.create(model="m", input=items, tools=tools, store=False)
            items += [item.model_dump(exclude_none=True) for item in reply.output if item.type != "reasoning"]
            called = [item.call_id for item in reply.output if item.type == "function_call"]
            items += [{"type": "function_call_output", "call_id": each, "output": FOUND} for each in called]


async def anthropic_messages(rollout: OpenedAt, num_turns: int) -> None:
    """The anthropic package."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    asked: Any = {"max_tokens": 256, "messages": messages, "tools": [{"name": NAME, "input_schema": SCHEMA}]}
    async with anthropic.AsyncAnthropic(base_url=rollout.anthropic_url, api_key=rollout.key) as client:
        for _ in range(num_turns):
            reply = await client.messages.create(model="m", **asked)
            said = [block.model_dump() for block in reply.content if block.type != "thinking"]
            called = [block["id"] for block in said if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": each, "content": FOUND} for each in called]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": results}]


async def openai_agents(rollout: OpenedAt, num_turns: int) -> None:
    """The Agents SDK over chat completions."""

    @agents.function_tool
    def look() -> str:
        """Look around."""
        return FOUND

    async with rollout.client() as client:
        agent = agents.Agent("seeker", model=agents.OpenAIChatCompletionsModel("m", client), tools=[look])
        config = agents.RunConfig(tracing_disabled=True)
        with suppress(agents.MaxTurnsExceeded):
            await agents.Runner.run(agent, QUESTION, max_turns=num_turns, run_config=config)


AGENTS: dict[str, Agent] = {
    "openai": openai_chat,
    "responses": openai_responses,
    "anthropic": anthropic_messages,
    "agents": openai_agents,
}
STREAMING: dict[str, Agent] = {"stream": partial(openai_chat, is_stream=True)}
