"""An engine that answers nonsense: what a prompt names, in place of what was asked for. Bytes on a plain socket."""

import asyncio
import gzip
import json
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

Json = dict[str, Any]
Change = Callable[[Json], Any]

HEALTHY = "healthy"
ABORTED = "aborted then "
"""Before the name of a mode: an abort cuts the first answer off, and the nonsense answers the call for the rest."""
NAMED = re.compile(rb"do: (aborted then )?([a-z_0-9]+)")
BOMB = gzip.compress(bytes(80 << 20))
JSON_TYPE, SSE_TYPE = "application/json", "text/event-stream"
INFO = {"model_path": "/nowhere", "served_model_name": "scripted", "weight_version": "1"}


def healthy_chat(finish_reason: str = "stop") -> Json:
    """What SGLang answers, with its tokens."""
    info = {"weight_version": "1", "num_retractions": 0, "output_token_logprobs": [[-0.5, 5, None], [-0.25, 6, None]]}
    logprobs = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "ab", "tool_calls": None},
        "finish_reason": finish_reason,
        "logprobs": logprobs,
        "meta_info": info,
        "prompt_token_ids": [1, 2],
        "response_token_ids": [5, 6],
    }
    usage = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    head = {"id": "chat", "object": "chat.completion", "created": 1, "model": "scripted"}
    return {**head, "choices": [choice], "usage": usage, "metadata": {"weight_version": "1"}}


def _choice(**fields: Any) -> Change:
    """A whole reply, or a chunk, with these fields in its choice."""
    return lambda chat: {**chat, "choices": [{**chat["choices"][0], **fields}]}


def _message(**fields: Any) -> Change:
    """The same with these fields of its message, or delta."""

    def change(chat: Json) -> Json:
        name = "message" if "message" in chat["choices"][0] else "delta"
        return _choice(**{name: {"role": "assistant", "content": "ab", **fields}})(chat)  # type: ignore[no-any-return]

    return change


OF_BOTH: dict[str, Change] = {
    "null": lambda _: None,
    "number": lambda _: 5,
    "array": lambda _: [],
    "text": lambda _: "an answer",
    "choices_object": lambda chat: {**chat, "choices": {}},
    "choices_string": lambda chat: {**chat, "choices": "none"},
    "choice_number": lambda chat: {**chat, "choices": [1]},
    "index_string": _choice(index="first"),
    "index_huge": _choice(index=10**400),
    "index_negative": _choice(index=-1),
    "finish_number": _choice(finish_reason=7),
    "content_number": _message(content=5),
    "content_object": _message(content={"text": "ab"}),
    "calls_string": _message(tool_calls="none"),
    "call_number": _message(tool_calls=[4]),
    "call_function_string": _message(tool_calls=[{"id": "c", "index": 0, "function": "f"}]),
    "call_arguments_object": _message(tool_calls=[{"id": "c", "index": 0, "function": {"name": "f", "arguments": {}}}]),
    "logprobs_list": _choice(logprobs=["a"]),
    "logprob_string": _choice(logprobs={"content": [{"token": "a", "logprob": "-0.5"}]}),
    "logprob_numbers": _choice(logprobs={"content": [-0.5]}),
    "usage_list": lambda chat: {**chat, "usage": [1]},
    "usage_strings": lambda chat: {**chat, "usage": {"completion_tokens": "2"}},
    "usage_negative": lambda chat: {**chat, "usage": {"completion_tokens": -2}},
}
"""What is wrong in a whole reply as well as in a chunk."""
OF_WHOLE: dict[str, Change] = {
    "empty_object": lambda _: {},
    "choices_missing": lambda chat: {name: value for name, value in chat.items() if name != "choices"},
    "choices_null": lambda chat: {**chat, "choices": None},
    "choices_empty": lambda chat: {**chat, "choices": []},
    "message_null": _choice(message=None),
    "message_string": _choice(message="ab"),
    "ids_string": _choice(response_token_ids="56"),
    "ids_of_strings": _choice(response_token_ids=["5", "6"]),
    "ids_negative": _choice(response_token_ids=[-5, 6]),
    "ids_huge": _choice(response_token_ids=[2**70, 6]),
    "ids_floats": _choice(prompt_token_ids=[0.5]),
    "meta_list": _choice(meta_info=[1]),
    "meta_logprobs_object": _choice(meta_info={"output_token_logprobs": {}}),
    "meta_logprobs_numbers": _choice(meta_info={"output_token_logprobs": [-0.5, -0.5]}),
    "meta_logprobs_strings": _choice(meta_info={"output_token_logprobs": [["-0.5", 5, None], ["-0.25", 6, None]]}),
    "meta_versions_string": _choice(meta_info={"weight_versions": "1"}),
    "meta_versions_backwards": _choice(meta_info={"weight_versions": [{"version": "1", "start": 2, "end": 0}]}),
    "metadata_list": lambda chat: {**chat, "metadata": [1]},
}


def _json(change: Change) -> Callable[[Json], bytes]:
    return lambda chat: json.dumps(change(chat)).encode()


def _spoiled(before: bytes, after: bytes) -> Callable[[Json], bytes]:
    def spoil(chat: Json) -> bytes:
        told = json.dumps(chat).encode()
        assert before in told
        return told.replace(before, after)

    return spoil


BODIES: dict[str, Callable[[Json], bytes]] = {
    **{name: _json(change) for name, change in OF_BOTH.items()},
    "html": lambda _: b"<!doctype html><html><body>Welcome to nginx</body></html>",
    "bytes": lambda _: bytes(range(256)),
    "truncated": lambda chat: json.dumps(chat).encode()[:-40],
    "nan": _spoiled(b"-0.5", b"NaN"),
    "infinity": _spoiled(b"-0.5", b"-1e999"),
    "no_utf8": _spoiled(b'"ab"', b'"\xff\xfe"'),
    "half_surrogate": _spoiled(b'"ab"', b'"\\ud800"'),
    "deep": lambda _: b'{"choices":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep_beside": lambda chat: json.dumps(chat).encode()[:-1] + b',"x":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
}
WHOLE_BODIES = {**BODIES, **{name: _json(change) for name, change in OF_WHOLE.items()}, "empty": lambda _: b""}
STREAMS: dict[str, Callable[[Json], bytes]] = {
    "done_alone": lambda _: b"data: [DONE]\n\n",
    "nothing": lambda _: b"",
    "no_events": lambda _: b"Welcome to nginx\nNothing to see here\n\n" * 20,
    "whole_reply": lambda _: json.dumps(healthy_chat()).encode(),
    "error_event": lambda _: b'data: {"error": {"message": "out of memory"}}\n\n',
    "ids_negative": lambda chunk: _events(json.dumps({**chunk, "sglext": {"output_ids": [[-1]]}}).encode()),
    "ids_string": lambda chunk: _events(json.dumps({**chunk, "sglext": {"output_ids": "56"}}).encode()),
}
HEADS: dict[str, bytes] = {
    "status_204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "status_299": b"HTTP/1.1 299 Odd\r\ncontent-length: 2\r\n\r\nok",
    "status_999": b"HTTP/1.1 999 Odder\r\ncontent-length: 2\r\n\r\nok",
    "redirect_loop": b"HTTP/1.1 307 Temporary\r\nlocation: /v1/chat/completions\r\ncontent-length: 0\r\n\r\n",
    "no_http": b"220 mail.example.com ESMTP\r\n\r\n",
    "cut_in_body": b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9999\r\n\r\n{",
    "cut_in_chunk": b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n9\r\n{",
    "bad_chunk": b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    b"100000\r\n%b\r\nno size\r\n" % (b" " * 0x100000),
    "bad_gzip": b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\nabcd",
    "bad_coding": b"HTTP/1.1 200 OK\r\ncontent-encoding: rot13\r\ncontent-length: 2\r\n\r\n{}",
    "bomb": b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(BOMB), BOMB),
    "endless_head": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100_000,
}
"""Whole answers, after which the connection is closed."""
ENDLESS = "endless"
"""Bytes as long as anybody reads them."""

WHOLE_MODES = [*WHOLE_BODIES, *HEADS, ENDLESS]
STREAM_MODES = [*BODIES, *STREAMS, *HEADS, ENDLESS]


def _events(*chunks: bytes) -> bytes:
    return b"".join(b"data: %b\n\n" % chunk for chunk in (*chunks, b"[DONE]"))


def _chunk() -> Json:
    choice = {"index": 0, "delta": {"role": "assistant", "content": "ab"}, "logprobs": None, "finish_reason": None}
    return {"id": "chat", "object": "chat.completion.chunk", "created": 1, "model": "scripted", "choices": [choice]}


def healthy_stream() -> bytes:
    end = _choice(delta={}, finish_reason="stop")(_chunk())
    ids = {**_chunk(), "choices": [], "sglext": {"input_ids": [1, 2], "output_ids": [[5, 6]]}}
    return _events(*(json.dumps(chunk).encode() for chunk in (_chunk(), end, ids)))


class HostileEngine:
    """Answers at ``url``. ``admin_mode`` names what it answers to everything beside chats; None: what it should."""

    def __init__(self, *, is_sglang: bool = True, bodies: dict[str, bytes] | None = None) -> None:
        """``bodies`` are further modes: what is answered, by name."""
        self.url = ""
        self.admin_mode: str | None = None
        self.num_calls = 0
        self._is_sglang = is_sglang
        self._bodies = bodies or {}

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"(?i)content-length: (\d+)", head)
                body = await reader.readexactly(int(length.group(1)) if length else 0)
                async for part in self._answer(head.split(b" ")[1].decode().split("?")[0], body):
                    writer.write(part)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, _Close):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        named = NAMED.search(body)
        if path == "/v1/models" and self.admin_mode is None:
            yield _reply(json.dumps({"object": "list", "data": [{"id": "scripted", "object": "model"}]}).encode())
        elif path in ("/model_info", "/get_model_info") and self.admin_mode is None:
            yield _reply(json.dumps(INFO).encode()) if self._is_sglang else _reply(b"", "404 Not Found")
        elif path.startswith("/v1/") or path == "/tokenize":
            self.num_calls += 1
            is_stream = re.search(rb'"stream": ?true', body) is not None
            mode = named.group(2).decode() if named else self.admin_mode or HEALTHY
            is_rest = b'"input_ids"' in body or b"continue_final_message" in body
            if named and named.group(1) and not is_rest:
                yield _reply(json.dumps(healthy_chat("abort")).encode())
                return
            async for part in self._hostile(mode, is_stream):
                yield part
        elif self.admin_mode is None:
            yield _reply(b"", "404 Not Found")
        else:
            async for part in self._hostile(self.admin_mode, False):
                yield part

    async def _hostile(self, mode: str, is_stream: bool) -> AsyncIterator[bytes]:
        if mode in HEADS:
            yield HEADS[mode]
            raise _Close
        if mode == ENDLESS:
            yield b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\ndata: "
            while True:
                yield b"x" * 65_536
        if mode in self._bodies:
            yield _reply(self._bodies[mode])
        elif mode == HEALTHY:
            yield _reply(healthy_stream(), kind=SSE_TYPE) if is_stream else _reply(json.dumps(healthy_chat()).encode())
        elif not is_stream:
            yield _reply(WHOLE_BODIES[mode](healthy_chat()))
        elif mode in STREAMS:
            yield _reply(STREAMS[mode](_chunk()), kind=SSE_TYPE)
        else:
            chunk = _chunk()
            chunk["choices"][0]["logprobs"] = {"content": [{"token": "ab", "logprob": -0.5}]}
            yield _reply(_events(BODIES[mode](chunk)), kind=SSE_TYPE)


class _Close(Exception):
    pass


def _reply(content: bytes, status: str = "200 OK", kind: str = JSON_TYPE) -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


@contextmanager
def hostile_engine(**options: Any) -> Iterator[HostileEngine]:
    """A ``HostileEngine`` in a thread."""
    engine, started = HostileEngine(**options), threading.Event()
    ending: list[Callable[[], object]] = []

    async def main() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        async with await asyncio.start_server(engine.connection, "127.0.0.1", 0) as server:
            engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            ending.append(lambda: loop.call_soon_threadsafe(ended.set))
            started.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert started.wait(30)
    try:
        yield engine
    finally:
        ending[0]()
        thread.join()
