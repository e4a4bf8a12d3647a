"""A router that hides its workers, and a model folder whose tokenizer and template are those of the scripted engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forebay.engines.chat_template import ChatTemplate
from forebay.engines.scripted.tokens import MARKS, TURN_START, decode, encode_chat
from forebay.web.serving import serve_app
from tests.kit import TIME_LIMIT_S

TEMPLATE = ChatTemplate(encode_chat, lambda ids, with_special: decode(ids, with_marks=with_special))
CHAT_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
STRIPS = ("single_word", "lstrip", "rstrip")
DROPPED = ("rid", "return_token_ids", "return_meta_info", "extra_key")
"""Fields of a chat that a router does not know."""


class HidingRouter:
    """It lists one worker as ``listed`` (gRPC, or at an address of its own), and passes calls on to ``worker_url``."""

    def __init__(self, worker_url: str, listed: dict[str, Any]) -> None:
        self.worker_url = worker_url
        self.listed = {"url": worker_url, "is_healthy": True, **listed}
        self.asked: list[str] = []
        """The paths of the calls that were passed on."""
        self._http = httpx.AsyncClient(timeout=TIME_LIMIT_S)
        """One for all calls: making one takes longer than a call."""
        posts = ("/generate", "/v1/chat/completions")
        self.app = Starlette(
            routes=[
                Route("/workers", self._list),
                Route("/v1/models", self._get),
                Route("/server_info", self._get),
                *(Route(path, self._post, methods=["POST"]) for path in posts),
            ]
        )

    async def _list(self, _: Request) -> Response:
        return JSONResponse({"workers": [self.listed]})

    async def _get(self, request: Request) -> Response:
        return _passed(await self._http.get(self.worker_url + request.url.path))

    async def _post(self, request: Request) -> Response:
        path, body = request.url.path, await request.json()
        self.asked.append(path)
        if path != "/generate":
            body = {name: value for name, value in body.items() if name not in DROPPED}
        return _passed(await self._http.post(self.worker_url + path, json=body, timeout=None))


def _passed(reply: httpx.Response) -> Response:
    return Response(reply.content, reply.status_code, media_type="application/json")


@asynccontextmanager
async def hiding_router(worker_url: str, **listed: Any) -> AsyncIterator[tuple[HidingRouter, str]]:
    """The router, and its address."""
    router = HidingRouter(worker_url, listed)
    async with router._http, serve_app(router.app) as port:
        yield router, f"http://127.0.0.1:{port}"


def write_tokenizer(folder: Path, *, has_template: bool = True) -> Path:
    """A folder with a tokenizer of which a token is a byte, or a mark."""
    folder.mkdir(parents=True, exist_ok=True)
    special = [
        {"id": token, "content": mark, "special": True, "normalized": False, **dict.fromkeys(STRIPS, False)}
        for mark, token in MARKS.items()
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": BYTES | {"use_regex": False},
        "decoder": BYTES,
        "model": {"type": "BPE", "vocab": byte_names(), "merges": []},
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer.json").write_bytes(msgspec.json.encode(tokenizer))
    told = {**config, "chat_template": CHAT_TEMPLATE} if has_template else config
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(told))
    return folder


def byte_names() -> dict[str, int]:
    """Each byte under the character that byte-level tokenizers write for it: itself where it is visible."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(TURN_START) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
