"""The wire of an OpenAI-compatible engine: addresses, the body of a chat call, and how its reply is read."""

from typing import Any
from urllib.parse import urlsplit

import msgspec

from forebay.core.errors import EngineError, EngineUnavailable, InvalidInput
from forebay.engines.abc import ChatReply, ChatRequest

UNAVAILABLE_STATUSES = frozenset({502, 503})
"""What a proxy or a starting server answers: wait, the rollout has not failed."""


def root_url(base_url: str) -> str:
    """``base_url`` without trailing slashes and without ``/v1``. Raises ``InvalidInput`` unless it is http(s)."""
    root = base_url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    parts = urlsplit(root)
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise InvalidInput(f"{base_url!r} is not the address of an engine", hint="write it as http://HOST:PORT")
    return root


def auth_headers(api_key: str | None) -> dict[str, str]:
    """The bearer header for ``api_key``, or no header at all."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def chat_body(request: ChatRequest, model: str) -> dict[str, Any]:
    """The body of ``POST /v1/chat/completions``; ``request.extra`` wins over everything else."""
    body: dict[str, Any] = {"model": model, "messages": list(request.messages), **request.sampling_params}
    if request.n != 1:
        body["n"] = request.n
    if request.tools:
        body["tools"] = list(request.tools)
    if request.continue_final_message:
        # vLLM insists on the second field, SGLang ignores it.
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    return body | dict(request.extra)


def read_reply(content: bytes, rid: str | None) -> ChatReply:
    """The reply in a 200's body. Raises ``EngineError`` for anything that is no chat completion."""
    try:
        raw = msgspec.json.decode(content, type=dict[str, Any])
        choice = raw["choices"][0]
        message = choice["message"]
        usage = raw.get("usage") or {}
        return ChatReply(
            message=message,
            text=message.get("content") or "",
            finish_reason=choice.get("finish_reason") or "",
            prompt_tokens=usage.get("prompt_tokens") or 0,
            completion_tokens=usage.get("completion_tokens") or 0,
            rid=rid,
            raw=raw,
        )
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError) as error:
        raise EngineError(f"the engine's reply is no chat completion: {content[:200]!r}", status_code=200) from error


def status_error(url: str, status_code: int, content: bytes) -> EngineError:
    """The error to raise for an error status, with the server's own message where it sent one."""
    kind = EngineUnavailable if status_code in UNAVAILABLE_STATUSES else EngineError
    return kind(f"{url} answered {status_code}: {_message(content)}", status_code=status_code)


def unreachable(url: str, cause: BaseException) -> EngineUnavailable:
    """The error to raise when nobody answers at ``url``."""
    why = str(cause.__cause__ or cause) or type(cause).__name__
    return EngineUnavailable(f"no engine answers at {url}: {why}", hint="start the engine, or check the address")


def _message(content: bytes) -> str:
    """OpenAI nests the message in ``error``, SGLang does not, proxies send plain text."""
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError:
        return content[:500].decode(errors="replace")
    inner = body.get("error", body) if isinstance(body, dict) else body
    told = inner.get("message") or inner.get("detail") if isinstance(inner, dict) else inner
    return str(told or body)[:2000]
