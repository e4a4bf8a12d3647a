"""What the gateway itself answers when a call cannot be made, in the words of the OpenAI protocol.

The errors of engines are passed on instead; ``dialects/errors.py`` has the words of the other protocols.
"""

from http import HTTPStatus
from typing import Any

from forebay.core.errors import ForebayError


class GatewayRefusal(ForebayError):
    """An error of the gateway, not of an engine. ``kind`` is OpenAI's type of it."""

    kind = "invalid_request_error"

    def body(self) -> dict[str, Any]:
        """As OpenAI words errors."""
        message = f"{self.message} ({self.hint})" if self.hint else self.message
        return {"error": {"message": message, "type": self.kind, "param": self.field, "code": self.code}}


class WrongKey(GatewayRefusal):
    """No open rollout has this id and this key; which of the two is wrong is not said."""

    code = "invalid_api_key"
    status = HTTPStatus.UNAUTHORIZED

    def __init__(self) -> None:
        super().__init__(
            "there is no open rollout with this address and this key",
            hint="a rollout's key opens that rollout alone, and only until its end",
        )


class Over(GatewayRefusal):
    """The rollout, or its run, has ended."""

    code = "rollout_over"
    # OpenAI's and Anthropic's clients repeat 408, 409, 429 and every 5xx by themselves, but not this one.
    status = HTTPStatus.GONE

    def __init__(self, reason: str, *, is_late: bool = False) -> None:
        super().__init__(f"this rollout is over: {reason}", hint="do not call again")
        self.is_late = is_late
        """Its time was up; nobody ended it."""


class NoSuchRoute(GatewayRefusal):
    """The gateway does not speak this."""

    code = "no_such_route"
    status = HTTPStatus.NOT_FOUND

    def __init__(self, method: str, path: str) -> None:
        super().__init__(
            f"{method} {path} is no route of the gateway",
            hint="it has v1/chat/completions, v1/completions, v1/embeddings, v1/models, v1/responses and "
            "anthropic/v1/messages",
        )


class NoObject(GatewayRefusal):
    """The body cannot be translated."""

    code = "invalid_json"
    status = HTTPStatus.BAD_REQUEST

    def __init__(self) -> None:
        super().__init__("the body is no JSON object", hint="send UTF-8 without NaN and Infinity, not nested too deep")


# SGLang (0.5.23) does not look at the ids of a prompt; one beyond the vocabulary ends its process.
class OwnIds(GatewayRefusal):
    """A prompt in token ids."""

    code = "input_ids_refused"
    status = HTTPStatus.BAD_REQUEST

    def __init__(self, field: str) -> None:
        instead = "messages" if field == "input_ids" else "text"
        super().__init__(f"the gateway takes no token ids in {field}", hint=f"send {instead}", field=field)


class EngineLost(GatewayRefusal):
    """The connection to the engine broke, again and again."""

    code = "engine_lost"
    kind = "server_error"
    status = HTTPStatus.BAD_GATEWAY


class TooLarge(GatewayRefusal):
    """The body is over the limit."""

    code = "body_too_large"
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class Busy(GatewayRefusal):
    """Too many bodies are in memory at once."""

    code = "too_many_bodies"
    kind = "server_error"
    status = HTTPStatus.TOO_MANY_REQUESTS


class Stalled(GatewayRefusal):
    """The agent stopped in the middle of its body; the connection is closed."""

    code = "request_stalled"
    status = HTTPStatus.REQUEST_TIMEOUT
