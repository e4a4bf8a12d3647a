"""What the gateway itself answers when a call cannot be made, in the words of the OpenAI protocol."""

from http import HTTPStatus
from typing import Any

from forebay.core.errors import ForebayError


class Refusal(ForebayError):
    """An error of the gateway, not of an engine. ``kind`` is OpenAI's type of it."""

    kind = "invalid_request_error"

    def body(self) -> dict[str, Any]:
        """As OpenAI words errors."""
        told = f"{self.message} ({self.hint})" if self.hint else self.message
        return {"error": {"message": told, "type": self.kind, "param": self.field, "code": self.code}}


class WrongKey(Refusal):
    """No open rollout has this id and this key; which of the two is wrong is not told."""

    code = "invalid_api_key"
    status = HTTPStatus.UNAUTHORIZED

    def __init__(self) -> None:
        super().__init__(
            "there is no open rollout with this address and this key",
            hint="a rollout's key opens that rollout alone, and only until its end",
        )


class Over(Refusal):
    """The rollout, or its run, has ended. No status that clients try again."""

    code = "rollout_over"
    status = HTTPStatus.GONE

    def __init__(self, reason: str, *, is_late: bool = False) -> None:
        super().__init__(f"this rollout is over: {reason}", hint="do not call again")
        self.is_late = is_late
        """Its time was up; nobody ended it."""


class NoSuchRoute(Refusal):
    """The gateway does not speak this."""

    code = "no_such_route"
    status = HTTPStatus.NOT_FOUND

    def __init__(self, method: str, path: str) -> None:
        super().__init__(
            f"{method} {path} is no route of the gateway",
            hint="it has v1/chat/completions, v1/responses, v1/models and anthropic/v1/messages",
        )


class NoObject(Refusal):
    """The body cannot be translated."""

    code = "invalid_json"
    status = HTTPStatus.BAD_REQUEST

    def __init__(self) -> None:
        super().__init__("the body is no JSON object", hint="send UTF-8 without NaN and Infinity, not nested too deep")


class OwnIds(Refusal):
    """A prompt in token ids. SGLang (0.5.23) does not look at them; one beyond the vocabulary ends its process."""

    code = "input_ids_refused"
    status = HTTPStatus.BAD_REQUEST

    def __init__(self) -> None:
        super().__init__("the gateway takes no input_ids", hint="send messages", field="input_ids")


class EngineLost(Refusal):
    """The connection to the engine broke, again and again."""

    code = "engine_lost"
    kind = "server_error"
    status = HTTPStatus.BAD_GATEWAY


class TooLarge(Refusal):
    """The body is over the limit."""

    code = "body_too_large"
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class Busy(Refusal):
    """Too many bodies are held at once."""

    code = "too_many_bodies"
    kind = "server_error"
    status = HTTPStatus.TOO_MANY_REQUESTS
