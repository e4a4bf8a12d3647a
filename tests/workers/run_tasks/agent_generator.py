"""An agent that is a function: two turns over the gateway."""

from openai import AsyncOpenAI

from forebay.generators.agent import AgentGenerator

TASK_TYPE = "agents"


async def agent(task):
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        history = [{"role": "user", "content": task.question}]
        for question in ("And then?", ""):
            reply = await client.chat.completions.create(model=task.model, messages=history)
            history += [{"role": "assistant", "content": reply.choices[0].message.content}]
            history += [{"role": "user", "content": question}] if question else []
    return history[-1]["content"]


async def reward(item):
    return float(item["uid"].endswith("1"))


def run_rollout(data):
    AgentGenerator.from_payload(data).run_agent(data["input_file"], agent, reward)
