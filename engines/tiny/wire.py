"""What clients send, OpenAI's bodies with the fields that SGLang adds, and how an error is told."""

from typing import Annotated, Any, Literal, Self
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

UNSUPPORTED = {
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
}
"""Fields that would change the answer and are not served, with the values that ask for nothing."""

JSONObject = dict[str, Any]


class TextPart(BaseModel):
    """A part of a message's content; only text is served."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message; fields beside these reach the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[TextPart] | None = None

    def rendered(self) -> JSONObject:
        """The message as a chat template takes it, its content one string."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {**self.model_dump(exclude_none=True), "content": text}


class StreamOptions(BaseModel):
    """What a stream carries beside its text."""

    include_usage: bool = False


class ChatBody(BaseModel):
    """``POST /v1/chat/completions``. ``rid`` names the call for ``/abort_request``; unknown fields are ignored."""

    messages: Annotated[list[Message], Field(min_length=1)]
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1)] | None = -1
    seed: int | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, Field(ge=1)] | None = 1
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = 0
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    rid: str | None = None
    continue_final_message: bool = False
    ignore_eos: bool = False
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _nothing_unsupported(cls, body: Any) -> Any:
        for name, idle in UNSUPPORTED.items() if isinstance(body, dict) else ():
            if name in body and body[name] not in idle:
                raise ValueError(f"{name} is not supported by the embedded engine")
        return body

    @field_validator("stop")
    @classmethod
    def _stop_has_text(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if stop is not None and "" in ([stop] if isinstance(stop, str) else stop):
            raise ValueError("a stop string cannot be empty")
        return stop

    @model_validator(mode="after")
    def _final_message_can_be_continued(self) -> Self:
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message needs an assistant message at the end")
        return self

    @model_validator(mode="after")
    def _token_ids_come_whole(self) -> Self:
        if self.return_token_ids and self.stream:
            raise ValueError("return_token_ids is not supported with stream")
        return self

    @property
    def limit(self) -> int | None:
        """The most tokens to generate, if the caller said."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class AbortBody(BaseModel):
    """``POST /abort_request``: the calls whose ``rid`` begins with this one, or all."""

    rid: str | None = None
    abort_all: bool = False


class WeightsBody(BaseModel):
    """``POST /update_weights_from_disk``; SGLang's other fields change nothing here and are ignored."""

    model_config = ConfigDict(protected_namespaces=())

    model_path: Annotated[str, Field(min_length=1)]
    weight_version: str | None = None
    abort_all_requests: bool = False


def new_rid() -> str:
    """An id for a call whose caller gave none."""
    return uuid4().hex


def error_body(message: str, status: int, *, param: str | None = None, code: str | None = None) -> JSONObject:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code or str(status)}}
