"""Errors of the gateway itself for calls that cannot be made, in the format of the OpenAI protocol.

Errors of engines are forwarded instead; ``dialects/errors.py`` has the formats of the other protocols.
"""

from http import HTTPStatus
from typing import Any

from forebay.core.errors import ForebayError


class GatewayRefusal(ForebayError):
    """An error of the gateway, not of an engine. ``kind`` is its OpenAI type."""

    kind = "invalid_request_error"

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's format."""
        message = f"{self.message} ({self.hint})" if self.hint else self.message
        return {"error": {"message": message, "type": self.kind, "param": self.field, "code": self.code}}


class WrongKey(GatewayRefusal):
    """No open rollout has this id and this key; the error does not reveal which of the two is wrong."""

    code = "invalid_api_key"
    status = HTTPStatus.UNAUTHORIZED

    def __init__(self) -> None:
        super().__init__(
            "there is no open rollout with this address and this key",
            hint="a rollout's key is valid for that rollout only, until the rollout ends",
        )


class Over(GatewayRefusal):
    """The rollout, or its run, has ended."""

    code = "rollout_over"
    # OpenAI's and Anthropic's clients retry 408, 409, 429 and every 5xx automatically, but not this status.
    status = HTTPStatus.GONE

    def __init__(self, reason: str, *, is_late: bool = False) -> None:
        super().__init__(f"this rollout is over: {reason}", hint="do not call again")
        self.is_late = is_late
        """Whether the rollout's time was up, rather than it being closed."""


class NoSuchRoute(GatewayRefusal):
    """The gateway has no such route."""

    code = "no_such_route"
    status = HTTPStatus.NOT_FOUND

    def __init__(self, method: str, path: str) -> None:
        super().__init__(
            f"the gateway has no route {method} {path}",
            hint="its routes are v1/chat/completions, v1/completions, v1/embeddings, v1/models, v1/responses and "
            "anthropic/v1/messages",
        )


class NoObject(GatewayRefusal):
    """The body is not a JSON object that can be translated."""

    code = "invalid_json"
    status = HTTPStatus.BAD_REQUEST

    def __init__(self) -> None:
        super().__init__("the body is not a JSON object", hint="send UTF-8 without NaN, Infinity or very deep nesting")


# SGLang (0.5.23) does not validate prompt ids; an id outside the vocabulary crashes its process.
class OwnIds(GatewayRefusal):
    """The prompt is given as token ids."""

    code = "input_ids_refused"
    status = HTTPStatus.BAD_REQUEST

    def __init__(self, field: str) -> None:
        instead = "messages" if field == "input_ids" else "text"
        super().__init__(f"the gateway accepts no token ids in {field}", hint=f"send {instead}", field=field)


class EngineLost(GatewayRefusal):
    """The connection to the engine broke repeatedly, or the engine's reply is unusable."""

    code = "engine_lost"
    kind = "server_error"
    status = HTTPStatus.BAD_GATEWAY


class TooLarge(GatewayRefusal):
    """The body exceeds the size limit."""

    code = "body_too_large"
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class Busy(GatewayRefusal):
    """Too many bodies are in memory."""

    code = "too_many_bodies"
    kind = "server_error"
    status = HTTPStatus.TOO_MANY_REQUESTS


class Stalled(GatewayRefusal):
    """The agent stopped sending in the middle of its body; the connection is closed."""

    code = "request_stalled"
    status = HTTPStatus.REQUEST_TIMEOUT
