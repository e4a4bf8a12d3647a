"""A generator with the OpenAI Agents SDK: an agent with a tool, and a second agent that checks its answer."""

from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

from forebay.generators.agent import AgentGenerator, AgentTask

TASK_TYPE = "openai_agents"


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def solve(task: AgentTask) -> str:
    """Run both agents on the rollout's address. The checker's conversation is its own sample with the same reward."""
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        model = OpenAIResponsesModel(task.model, client)
        checker = Agent(name="checker", instructions="Say whether the sum is right: yes or no.", model=model)
        check = checker.as_tool("check", "Ask a colleague whether a sum is right.")
        solver = Agent(name="solver", instructions="Use your tools.", model=model, tools=[multiply, check])
        result = await Runner.run(solver, task.question, max_turns=8, run_config=RunConfig(tracing_disabled=True))
    return str(result.final_output)


def reward_func(item):
    """1 if the agent's final answer contains the result."""
    return float(str(item["label"]) in item["agent"]["output"])


def run_rollout(data):
    generator = AgentGenerator.from_payload(data)
    generator.run_agent(data["input_file"], solve, reward_func, data.get("num_epoch", 1))
