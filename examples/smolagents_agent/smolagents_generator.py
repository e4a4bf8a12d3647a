"""A generator with smolagents: a ToolCallingAgent, which blocks and therefore runs in its own thread."""

from smolagents import OpenAIModel, ToolCallingAgent, tool

from forebay.generators.agent import AgentGenerator, AgentTask

TASK_TYPE = "smolagents"


@tool
def count_letter(word: str, letter: str) -> int:
    """Counts how often a letter occurs in a word.

    Args:
        word: The word to look at.
        letter: The letter to count.
    """
    return word.lower().count(letter.lower())


def solve(task: AgentTask) -> str:
    model = OpenAIModel(task.model, api_base=task.base_url, api_key=task.api_key)
    agent = ToolCallingAgent(tools=[count_letter], model=model, max_steps=6, verbosity_level=0)
    return str(agent.run(task.question))


def reward_func(item):
    """1 if the agent's final answer is the label."""
    return float(item["agent"]["output"].strip() == str(item["label"]))


def run_rollout(data):
    generator = AgentGenerator.from_payload(data)
    generator.run_agent(data["input_file"], solve, reward_func, data.get("num_epoch", 1))
