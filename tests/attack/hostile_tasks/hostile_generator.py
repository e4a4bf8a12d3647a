"""Asks its engine in the way that the payload names; what is asked names the nonsense that the engine answers."""

from forebay.generators.base import BaseGenerator

TASK_TYPE = "hostile"


def messages_of(text):
    return [{"role": "user", "content": text}]


def thread_whole(client, messages, params):
    reply = client.chat.completions.create(model="scripted", messages=messages, **params)
    return [*messages, {"role": "assistant", "content": reply.choices[0].message.content}], "stop"


def thread_stream(client, messages, params):
    text = ""
    for chunk in client.chat.completions.create(model="scripted", messages=messages, stream=True, **params):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    return [*messages, {"role": "assistant", "content": text}], "stop"


async def async_whole(client, messages, params):
    reply = await client.chat.completions.create(model="scripted", messages=messages, **params)
    return [*messages, {"role": "assistant", "content": reply.choices[0].message.content}], "stop"


async def async_stream(client, messages, params):
    text = ""
    async for chunk in await client.chat.completions.create(model="scripted", messages=messages, stream=True, **params):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    return [*messages, {"role": "assistant", "content": text}], "stop"


def reward(item):
    return 1.0


def run_rollout(data):
    way = {each.__name__: each for each in (thread_whole, thread_stream, async_whole, async_stream)}[data["way"]]
    BaseGenerator.from_payload(data).entry(data["input_file"], way, reward)
