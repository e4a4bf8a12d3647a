"""An agent with a calculator, for any engine: python agent.py URL QUESTION."""

import json
import sys

from openai import OpenAI

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two whole numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def solve(url: str, question: str, max_turns: int = 4) -> str:
    """The agent's final answer."""
    messages = [{"role": "user", "content": question}]
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        for _ in range(max_turns):
            reply = client.chat.completions.create(model=model, messages=messages, tools=[CALCULATOR], max_tokens=256)
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                given = json.loads(call.function.arguments)
                product = str(given["a"] * given["b"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": product})
    return ""


if __name__ == "__main__":
    print(solve(*sys.argv[1:3]))
