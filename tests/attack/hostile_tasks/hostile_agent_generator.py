"""An agent that calls in the protocol that the payload names, and is content with whatever it gets."""

import httpx

from forebay.generators.agent import AgentGenerator

TASK_TYPE = "hostile_agent"


def reward(item):
    return 1.0


def run_rollout(data):
    dialect, _, is_stream = data["way"].partition("_")

    async def agent(task):
        messages = [{"role": "user", "content": task.question}]
        url, body = {
            "chat": (f"{task.base_url}/chat/completions", {"messages": messages}),
            "messages": (f"{task.anthropic_url}/v1/messages", {"messages": messages, "max_tokens": 64}),
            "responses": (f"{task.base_url}/responses", {"input": task.question}),
            "completions": (f"{task.base_url}/completions", {"prompt": task.question}),
            "tokens": (f"{task.anthropic_url}/v1/messages/count_tokens", {"messages": messages}),
        }[dialect]
        body = {"model": "scripted", **body, **({"stream": True} if is_stream else {})}
        async with httpx.AsyncClient(timeout=120) as http:
            reply = await http.post(url, json=body, headers={"Authorization": f"Bearer {task.api_key}"})
        return {"status": reply.status_code, "text": reply.text}

    AgentGenerator.from_payload(data).run_agent(data["input_file"], agent, reward)
