"""The differences between kinds of engines: how a call is named and cached, and how an engine is asked for tokens."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from forebay.engines.cache_keys import CacheKey
from forebay.engines.capture.request_fields import STREAM_NAMES, VLLM_NAMES, WHOLE_NAMES, asking
from forebay.engines.capture.sampling_params import UNKNOWN_DEFAULTS, EngineDefaults
from forebay.engines.capture.turn import Turn
from forebay.engines.continuation.message import EngineReading, Whole
from forebay.engines.continuation.vllm import CHATS, VLLMReading, continued
from forebay.engines.router_workers import WorkerAdmin
from forebay.engines.sampling_defaults import UNKNOWN_VLLM, reported, sglang_defaults, vllm_defaults
from forebay.engines.vllm_admin import VLLMAdmin

__all__ = ["CHATS", "PLAIN", "SGLANG", "VLLM", "EngineDialect"]

Json = dict[str, Any]


@dataclass(frozen=True, eq=False)
class EngineDialect:
    """How one kind of engine is asked.

    The defaults are those of any OpenAI-compatible server: requests stay as they are, because it may reject unknown
    fields.
    """

    rid_name: str | None = None
    """Request field with the id of a call; None if calls have no ids, and cannot be aborted."""
    key_name: str | None = None
    """Request field with the key of the prefix cache; None if there is none."""
    has_gaps: bool = False
    """Whether a stream has its token ids at the end, also if it is aborted, and lacks what ``fill_gaps`` requests."""
    admin: type[WorkerAdmin] = WorkerAdmin
    """The client for administrative calls."""
    whole_names: tuple[str, ...] = ()
    """Fields that make the engine return the tokens of a chat; none if it may reject them."""
    stream_names: tuple[str, ...] = ()
    """Fields that make the engine return the tokens in a stream."""
    reading: type[EngineReading] = EngineReading
    """Reads the message of a turn in several parts with the engine's parsers."""
    unknown_defaults: EngineDefaults = UNKNOWN_DEFAULTS
    """The defaults for sampling parameters of a server that does not report them."""
    read_defaults: Callable[[Mapping[str, Any]], EngineDefaults] | None = None
    """Reads the defaults from a server's start options; None if it does not report them."""
    continued: Callable[[WorkerAdmin, Json], Awaitable[tuple[str, Json]]] | None = None
    """Returns path and body of a chat with ``input_ids``; None if that is a chat like others."""

    def named(self, body: Json, rid: str) -> Json:
        """Add the id of a call."""
        return body if self.rid_name is None else {**body, self.rid_name: rid}

    def keyed(self, body: Json, key: CacheKey) -> Json:
        """Put ``key`` before the body's own cache key."""
        return body if self.key_name is None else {**body, self.key_name: key.beside(body.get(self.key_name))}

    def sent(self, body: Mapping[str, Any]) -> tuple[str | None, str | None]:
        """Return the id and the cache key that a call was sent with; None for those that this kind has not."""
        rid, key = (None if name is None else body.get(name) for name in (self.rid_name, self.key_name))
        return None if rid is None else str(rid), None if key is None else str(key)

    def ask(self, body: Json, *, is_stream: bool) -> Json:
        """Add the fields that make the engine return the tokens of a chat. ``strip`` removes their effects."""
        names = self.stream_names if is_stream else self.whole_names
        return asking(body, names, is_stream=is_stream) if names else body

    async def addressed(self, http: httpx.AsyncClient, url: str, body: Json) -> tuple[str, Json]:
        """Return the path and the body of a chat. A reply to another path than ``CHATS`` is read by ``as_chat``."""
        if self.continued is None or not body.get("input_ids"):
            return CHATS, body
        return await self.continued(self.admin(http, url), body)

    async def whole_message(
        self, http: httpx.AsyncClient, url: str, turn: Turn, body: Mapping[str, Any]
    ) -> Whole | None:
        """Read the message of a turn in several parts; None if the engine cannot."""
        return await self.reading(self.admin(http, url), turn, body).message()

    async def defaults(self, http: httpx.AsyncClient, url: str) -> EngineDefaults | None:
        """Return the server's defaults for sampling parameters; None if it did not answer and should be asked again."""
        if self.read_defaults is None:
            return self.unknown_defaults
        return await reported(self.admin(http, url), self.read_defaults, self.unknown_defaults)


PLAIN = EngineDialect()
SGLANG = EngineDialect(
    "rid",
    "extra_key",
    has_gaps=True,
    whole_names=WHOLE_NAMES,
    stream_names=STREAM_NAMES,
    read_defaults=sglang_defaults,
)
"""SGLang, and its router. Seen: 0.5.23."""
VLLM = EngineDialect(
    "request_id",
    "cache_salt",
    admin=VLLMAdmin,
    whole_names=VLLM_NAMES,
    stream_names=VLLM_NAMES,
    reading=VLLMReading,
    unknown_defaults=UNKNOWN_VLLM,
    read_defaults=vllm_defaults,
    continued=continued,
)
"""vLLM. Seen: 0.32; 0.33 by its source."""
