"""A request to an engine, and what counts of it: two that count as equal are one request, asked twice.

The engine ids of a run's calls name their group and slot, the same in every run: those are its lane.
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

NOT_COUNTED = frozenset({"rid", "extra_key", "user"})
"""Names of one call, of one run's cache, and of who asks."""
REPEATABLE = frozenset(
    {
        *("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/parse_function_call", "/separate_reasoning"),
        *("/v1/embeddings", "/encode", "/classify", "/v1/rerank", "/v1/score"),
    }
)
"""What is sent there has one answer, however often it is asked."""
FACTS = ("/model_info", "/get_model_info", "/server_info", "/get_server_info", "/v1/models", "/v1/loads")
"""What is asked of an engine by GET. A recorder asks it all itself: it is known, whoever comes later."""
VERSIONED = frozenset({"/model_info", "/get_model_info", "/server_info", "/get_server_info"})
"""What is answered there may name the weights."""
LOADS = "/v1/loads"
HEALTH = frozenset({"/health", "/health_generate"})
WORKERS = "/workers"
"""Where a router lists its workers: clients would go on to them, past a recording."""
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
"""None of it is recorded."""

Match = Callable[[Any], Any]
"""Returns what counts of a body: requests for which it returns the same are equal. Both are JSON values."""

_lane_of = re.compile(r"fb-.{12}-([0-9a-f]{16}-[0-9a-f]{4})-[0-9a-f]{2}-").match
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder(order="sorted").encode


@dataclass(frozen=True, slots=True)
class CallRequest:
    """One request. ``path`` has its query, ``body`` is as it came, ``value`` that as JSON, None if it is none."""

    method: str
    path: str
    body: bytes
    value: Any
    counts: Any
    """What counts of ``value``."""
    digest: bytes
    """SHA-256, the same for all requests that count as equal."""

    @classmethod
    def read(cls, method: str, path: str, body: bytes) -> "CallRequest":
        """Never raises for what a client may send: a body that is no JSON counts byte by byte."""
        try:
            value = _decode(body) if body else None
            counts = _counted(value)
            text = _encode([method, path, counts])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            value, counts, text = None, None, _encode([method, path]) + body
        return cls(method, path, body, value, counts, _digest(text))

    def matched(self, match: Match | None) -> "CallRequest":
        """The same request, compared by what ``match`` returns for its body. Raises ``InvalidInput`` if that fails."""
        if match is None or self.value is None:
            return self
        try:
            counts = match(_counted(_decode(self.body)))  # a copy: the function may change it
            return replace(self, counts=counts, digest=_digest(_encode([self.method, self.path, counts])))
        except Exception as error:  # a user's function raises anything
            words = f"match failed on the body of {self.method} {self.path}: {error!r}"
            raise InvalidInput(words, hint="it gets every body as JSON, and returns JSON", field="match") from error

    @property
    def route(self) -> str:
        """The path without its query."""
        return self.path.partition("?")[0]

    @property
    def rid(self) -> str:
        """The engine id that the client gave it, the first of several; else "" ."""
        rid = self.value.get("rid") if isinstance(self.value, dict) else None
        first = rid[0] if isinstance(rid, list) and rid else rid
        return first if isinstance(first, str) else ""

    @property
    def lane(self) -> str:
        """Group and slot of the rollout whose call it is, out of the ``rid``; "" where that names none."""
        found = _lane_of(self.rid)
        return found[1] if found else ""

    @property
    def is_drawn(self) -> bool:
        """Whether each answer is drawn anew: then none is given twice."""
        if self.method != "POST" or self.route in REPEATABLE:
            return False
        params = self.value.get("sampling_params") if isinstance(self.value, dict) else None
        # So an engine is asked for the logprobs of a prompt.
        return not (isinstance(params, dict) and params.get("max_new_tokens") == 0)

    @property
    def is_stream(self) -> bool:
        """Whether its answer is to come in parts."""
        return isinstance(self.value, dict) and bool(self.value.get("stream"))

    @property
    def is_mark(self) -> bool:
        """Whether it only makes an engine know a ``rid``, for an abort that follows."""
        return self.path == "/generate" and self.counts == MARK

    @property
    def counted_text(self) -> bytes:
        """What counts of the body, as JSON with sorted names."""
        return self.body if self.value is None else _encode(self.counts)


def _digest(text: bytes) -> bytes:
    return sha256(text).digest()


def _counted(value: Any) -> Any:
    """What counts of a body: not who asks, nor what is asked for so that tokens come along."""
    if not isinstance(value, dict):
        return value
    left = {name: each for name, each in without_asking(value).items() if name not in NOT_COUNTED}
    if left.get("stream") is False:
        del left["stream"]  # as if nothing were said of it
    return left
