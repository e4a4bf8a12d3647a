"""A request that an engine has accepted, and what its reply is read with."""

from dataclasses import dataclass
from typing import Any

from forebay.engines.cache_keys import CacheKey
from forebay.engines.capture.call_spans import CallSpan
from forebay.engines.capture.reply_shape import read_chat
from forebay.engines.capture.sampling_params import EngineDefaults
from forebay.engines.continuation.vllm import as_chat
from forebay.engines.pool import Target
from forebay.gateway.engine_http import IncomingReply

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request that an engine answers with a 200."""

    reply: IncomingReply
    target: Target
    rid: str
    began_s: float
    weight_version: str | None
    """Weight version before the request; fetched only for streams, which do not report it."""
    extra_key: str | None
    """Cache key that the engine used."""
    key: CacheKey
    """Our part of ``extra_key``, at its beginning."""
    defaults: EngineDefaults
    """The engine's defaults for omitted sampling parameters."""
    span: CallSpan
    """Ended once the engine's reply is known."""
    cut_at: int | None
    """Number of tokens after which the rollout's cap ends the reply."""
    is_chat: bool
    """Whether it was sent to the path of chats."""

    @property
    def origin(self) -> Json:
        """Where its turns come from."""
        return {"rid": self.rid, "engine_url": self.target.url, "began_s": self.began_s}

    def read(self, content: bytes) -> Json:
        """Decode the whole reply. Raises ``EngineError``."""
        return read_chat(content if self.is_chat else as_chat(content))
