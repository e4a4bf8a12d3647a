"""An agent whose tools come from an MCP server: a local process per rollout, connected through stdio."""

import json
import sys
from pathlib import Path

from mcp import StdioServerParameters, stdio_client
from mcp.client import Client
from openai import AsyncOpenAI

from forebay.generators.agent import AgentGenerator, AgentTask

TASK_TYPE = "mcp_agent"
SERVER = StdioServerParameters(command=sys.executable, args=[str(Path(__file__).with_name("mcp_stock.py"))])


async def solve(task: AgentTask) -> str:
    messages = [*task.prompt]
    async with (
        AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as model,
        Client(stdio_client(SERVER)) as server,
    ):
        tools = [as_function(tool) for tool in (await server.list_tools()).tools]
        for _ in range(8):
            reply = await model.chat.completions.create(model=task.model, messages=messages, tools=tools)
            message = reply.choices[0].message
            if not message.tool_calls:
                break
            messages.append(message)
            messages += [await answer(server, call) for call in message.tool_calls]
    return message.content or ""


def as_function(tool):
    """An MCP tool in the format of Chat Completions."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


async def answer(server, call):
    """The server's result for one call, as a message to the model; errors are passed to the model too."""
    result = await server.call_tool(call.function.name, json.loads(call.function.arguments))
    text = "".join(block.text for block in result.content if block.type == "text")
    return {"role": "tool", "tool_call_id": call.id, "content": f"error: {text}" if result.is_error else text}


def reward_func(item):
    """1 if the agent's final answer contains the number."""
    return float(str(item["label"]) in item["agent"]["output"])


def run_rollout(data):
    generator = AgentGenerator.from_payload(data)
    generator.run_agent(data["input_file"], solve, reward_func, data.get("num_epoch", 1))
