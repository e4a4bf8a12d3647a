"""Calls of an engine, recorded and replayed: the same questions to the same wire."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from forebay.core.ids import request_id
from forebay.engines.capture.request_fields import STREAM_NAMES, WHOLE_NAMES, asking
from forebay.engines.scripted import Reply, Script, ScriptedCall, ScriptedEngine
from forebay.replay import EngineRecorder

RUN, OTHER_RUN = "run-0123456789ab", "run-ba9876543210"
GROUP = "0" * 15 + "a"
LIMIT_S = 60.0
SAYS = {"model": "any", "messages": [{"role": "user", "content": "What is 3 + 5?"}], "max_tokens": 64}

Json = dict[str, Any]


def numbered() -> Callable[[ScriptedCall], Reply]:
    """A script whose answers differ, those to equal requests too; some are said before those that came earlier."""
    return lambda call: Reply(text=f"answer {call.number} to it", delay_s=0.1 if call.number % 2 else 0.0)


@asynccontextmanager
async def recorded(script: Script, file: Path) -> AsyncIterator[tuple[EngineRecorder, ScriptedEngine]]:
    """A recorder before a scripted engine. What was recorded is in ``file`` afterwards."""
    async with ScriptedEngine(script) as engine, EngineRecorder(file, engine.url) as recorder:
        yield recorder, engine


@asynccontextmanager
async def engine_command(*options: object) -> AsyncIterator[tuple[str, Process]]:
    """The address of ``forebay engine`` with these options, and its process."""
    words = ["-P", "-m", "forebay.server.cli", "engine", *map(str, options), "--port", "0"]
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), LIMIT_S)).decode().strip()
        yield json.loads(line)["url"] if line.startswith("{") else line.rpartition(" ")[2], process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def rid(slot: int, *, run: str = RUN, attempt: int = 0, call: int = 0) -> str:
    return request_id(run, GROUP, slot, attempt, call)


async def post(url: str, path: str, body: Json) -> httpx.Response:
    async with httpx.AsyncClient(timeout=LIMIT_S, verify=False) as http:
        return await http.post(url + path, json=body)


async def chat(url: str, slot: int | None = None, *, is_stream: bool = False, **fields: Any) -> str:
    """The reply of a chat as it came, asked as a run would."""
    named = {} if slot is None else {"rid": rid(slot), **fields}
    body, names = ({**SAYS, "stream": True}, STREAM_NAMES) if is_stream else (SAYS, WHOLE_NAMES)
    reply = await post(url, "/v1/chat/completions", {**asking(body, names, is_stream=is_stream), **fields, **named})
    assert reply.status_code == 200, reply.text
    return reply.text


async def all_of(*asked: Any) -> list[str]:
    return list(await asyncio.gather(*asked))
