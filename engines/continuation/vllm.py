"""Continue a chat of vLLM from its token ids, and read a message from them.

The chat is rendered once more (``…/render``), which returns its sampling parameters as ``/inference/v1/generate`` takes
them, and sent there with the known tokens. ``…/derender`` parses all tokens at the end. The three routes need
``--enable-scale-out``.
"""

from typing import Any

import msgspec

from forebay.core.errors import EngineError, EngineUnavailable
from forebay.engines.capture.reply_shape import CHAT, read_chat
from forebay.engines.capture.token_cap import LIMIT_NAMES
from forebay.engines.continuation.message import EngineReading
from forebay.engines.read_json import read_object
from forebay.engines.router_workers import WorkerAdmin, unreachable

CHATS, GENERATE = "/v1/chat/completions", "/inference/v1/generate"

Json = dict[str, Any]


async def continued(admin: WorkerAdmin, body: Json) -> tuple[str, Json]:
    """Return the path and the body of a chat that continues from its ``input_ids``.

    Without the routes the chat starts over with one token, from which the caller learns that it was not continued.
    Raises ``EngineUnavailable`` if the engine does not answer: it may have the routes.
    """
    chat = {name: value for name, value in body.items() if name != "input_ids"}
    request = None
    try:
        request = await admin.post_json(f"{CHATS}/render", chat)
    except (EngineUnavailable, TimeoutError) as error:
        raise unreachable(admin.url, error) from error
    except EngineError:
        pass
    if request is None or not isinstance(request.get("sampling_params"), dict):
        return CHATS, {**chat, LIMIT_NAMES[0]: 1}
    params = {name: value for name, value in request["sampling_params"].items() if name != "max_tokens"}
    # Of a limit that is the default, 16, the rendered request says nothing. A chat without one gets the server's limit.
    limits = [chat[name] for name in LIMIT_NAMES if chat.get(name) is not None]
    params |= {"max_tokens": limits[0]} if limits else {}
    asked = {"token_ids": body["input_ids"], "request_id": chat.get("request_id"), "sampling_params": params}
    return GENERATE, {**request, **asked, "output_mode": "text", "return_token_ids": True, "stream": False}


def as_chat(content: bytes) -> bytes:
    """Convert a reply of ``/inference/v1/generate`` to a chat completion. Raises ``EngineError``."""
    reply = read_object(content, CHAT)
    for choice in reply.get("choices") or ():
        if isinstance(choice, dict):
            choice["message"] = {"role": "assistant", "content": choice.get("text")}
    return msgspec.json.encode({**reply, "object": "chat.completion"})


class VLLMReading(EngineReading):
    """Reads a message with vLLM's own parsers."""

    async def _decoded(self, tokens: list[list[int]]) -> list[str] | None:
        if not self._stops:  # the text is only searched for stop strings
            return [""] * len(tokens)
        answers = [await self._admin.post_json("/detokenize", {"tokens": each}) or {} for each in tokens]
        return [str(answer["prompt"]) for answer in answers] if all("prompt" in each for each in answers) else None

    async def _parsed(self, text: str, num_tokens: int, finish_reason: str) -> tuple[Json, bool]:  # noqa: ARG002
        reason = "length" if finish_reason == "length" else "stop"
        choice = {"index": 0, "finish_reason": reason, "token_ids": self._ids[:num_tokens]}
        prompt = {"prompt_token_ids": self._turn.prompt_ids or []}
        generated = {"request_id": "joined", "choices": [choice], **prompt}
        asked = {"generate_response": generated, **prompt, "chat_request": dict(self._body)}
        reply = await self._admin.post_json(f"{CHATS}/derender", asked)
        if reply is None:
            raise EngineError(f"{self._admin.url} does not parse tokens", hint="start vLLM with --enable-scale-out")
        message: Json = read_chat(msgspec.json.encode(reply))["choices"][0]["message"]
        return message, bool(message.get("tool_calls"))
