"""A request to an engine, and the parts of it that are compared: requests with equal parts are the same request.

The engine ids of a run's calls name their group and slot, which are the same in every run. These are the call's lane.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import msgspec

from forebay.core.errors import InvalidInput
from forebay.engines.abc import MARK
from forebay.engines.capture.request_fields import without_asking

NOT_COUNTED = frozenset({"rid", "request_id", "extra_key", "cache_salt", "user"})
"""Fields that name one call, one run's cache, or the caller."""
REPEATABLE = frozenset(
    {
        *("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/parse_function_call", "/separate_reasoning"),
        *("/v1/embeddings", "/encode", "/classify", "/v1/rerank", "/v1/score"),
    }
)
"""Routes that always return the same answer to the same request."""
FACTS = ("/model_info", "/get_model_info", "/server_info", "/get_server_info", "/v1/models", "/v1/loads")
"""GET routes with facts about the engine. A recorder requests them all itself, so that every replay has them."""
VERSIONED = frozenset({"/model_info", "/get_model_info", "/server_info", "/get_server_info"})
"""Routes whose answer may name the weights."""
LOADS = "/v1/loads"
HEALTH = frozenset({"/health", "/health_generate"})
WORKERS = "/workers"
"""The route where a router lists its workers. Clients would call these directly and bypass the recording."""
MODELLED = frozenset(
    {
        *("/abort_request", "/pause_generation", "/continue_generation", "/flush_cache"),
        *("/update_weights_from_disk", "/update_weight_version"),
    }
)
"""Administration that a recorded engine answers as the embedded engines do."""
ADMINISTRATION = MODELLED | {
    *("/update_weights_from_tensor", "/update_weights_from_distributed", "/update_weights_from_ipc"),
    *("/init_weights_update_group", "/destroy_weights_update_group", "/release_memory_occupation"),
    *("/resume_memory_occupation", "/start_profile", "/stop_profile", "/slow_down", "/configure_logging"),
}
"""Administrative routes; none is recorded."""

Match = Callable[[Any], Any]
"""Returns the compared part of a body: requests with equal results are equal. Argument and result are JSON values."""

_lane_of = re.compile(r"fb-.{12}-([0-9a-f]{16}-[0-9a-f]{4})-[0-9a-f]{2}-").match
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder(order="sorted").encode


@dataclass(frozen=True, slots=True)
class CallRequest:
    """One request. ``path`` includes the query; ``value`` is ``body`` decoded from JSON, None if it is not JSON."""

    method: str
    path: str
    body: bytes
    value: Any
    counts: Any
    """The part of ``value`` that is compared."""
    digest: bytes
    """SHA-256, equal for all requests that count as equal."""

    @classmethod
    def read(cls, method: str, path: str, body: bytes) -> "CallRequest":
        """Parse a request. Never raises: a body that is not JSON is compared byte by byte."""
        try:
            value = _decode(body) if body else None
            counts = _counted(value)
            text = _encode([method, path, counts])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            value, counts, text = None, None, _encode([method, path]) + body
        return cls(method, path, body, value, counts, _digest(text))

    def matched(self, match: Match | None) -> "CallRequest":
        """This request, compared by what ``match`` returns for its body. Raises ``InvalidInput`` if ``match`` fails."""
        if match is None or self.value is None:
            return self
        try:
            counts = match(_counted(_decode(self.body)))  # a copy: the function may change it
            return replace(self, counts=counts, digest=_digest(_encode([self.method, self.path, counts])))
        except Exception as error:  # a user's function raises anything
            words = f"match failed on the body of {self.method} {self.path}: {error!r}"
            raise InvalidInput(words, hint="match takes a JSON body, and must return JSON", field="match") from error

    @property
    def route(self) -> str:
        """The path without its query."""
        return self.path.partition("?")[0]

    @property
    def rid(self) -> str:
        """The engine id set by the client, or the first of several; "" without one."""
        rid = self.value.get("rid") if isinstance(self.value, dict) else None
        first = rid[0] if isinstance(rid, list) and rid else rid
        return first if isinstance(first, str) else ""

    @property
    def lane(self) -> str:
        """Group and slot of the rollout that made the call, taken from the ``rid``; "" if the ``rid`` names none."""
        found = _lane_of(self.rid)
        return found[1] if found else ""

    @property
    def is_drawn(self) -> bool:
        """Whether each answer is sampled. A sampled answer is replayed only once."""
        if self.method != "POST" or self.route in REPEATABLE:
            return False
        params = self.value.get("sampling_params") if isinstance(self.value, dict) else None
        # This is how an engine is asked for the logprobs of a prompt: nothing is sampled.
        return not (isinstance(params, dict) and params.get("max_new_tokens") == 0)

    @property
    def is_stream(self) -> bool:
        """Whether the client asks for a streamed answer."""
        return isinstance(self.value, dict) and bool(self.value.get("stream"))

    @property
    def is_mark(self) -> bool:
        """Whether the request only registers a ``rid`` with the engine, for an abort that follows."""
        return self.path == "/generate" and self.counts == MARK

    @property
    def counted_text(self) -> bytes:
        """The compared part of the body, as JSON with sorted names."""
        return self.body if self.value is None else _encode(self.counts)


def _digest(text: bytes) -> bytes:
    return sha256(text).digest()


def _counted(value: Any) -> Any:
    """The compared part of a body: without the caller's names and the fields that ask for token ids."""
    if not isinstance(value, dict):
        return value
    left = {name: each for name, each in without_asking(value).items() if name not in NOT_COUNTED}
    if left.get("stream") is False:
        del left["stream"]  # the default
    return left
