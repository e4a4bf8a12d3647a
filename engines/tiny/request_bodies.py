"""What clients send, OpenAI's bodies with the fields that SGLang adds, and how an error is told.

``POST /generate``: SGLang's own route, by text or by token ids, alone or in a list.
"""

import json
from http import HTTPStatus
from typing import Annotated, Any, Literal, Self
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from forebay.core.weight_versions import PauseMode

UNSUPPORTED = {
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

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class Body(BaseModel):
    """A body. Text in it that UTF-8 cannot hold is refused: no tokenizer takes it, and no reply could repeat it."""

    @model_validator(mode="before")
    @classmethod
    def _can_be_written(cls, body: Any) -> Any:
        if not isinstance(body, dict):  # bytes, for one, where the content type is not JSON: refused as what they are
            return body
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("the body holds half of a surrogate pair (\\ud800 to \\udfff), which is no text") from None
        except RecursionError:
            raise ValueError("the body is nested too deeply") from None
        return body


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
        told = {**self.model_dump(exclude_none=True), "content": text}
        if isinstance(told.get("tool_calls"), list):
            told["tool_calls"] = [_with_arguments(call) for call in told["tool_calls"]]
        return told


class StreamOptions(BaseModel):
    """What a stream carries beside its text."""

    include_usage: bool = False


class ChatBody(Body):
    """``POST /v1/chat/completions``. ``rid`` names the call for ``/abort_request``; unknown fields are ignored.

    ``input_ids`` are the prompt's tokens, in the place of the rendered messages. ``tools`` reach the chat template;
    what the model says about them stays text, as in SGLang without a parser for it.
    """

    messages: Annotated[list[Message], Field(min_length=1)]
    input_ids: TokenIds | None = None
    tools: list[JSONObject] | None = None
    tool_choice: str | JSONObject | None = None
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
    return_meta_info: bool = False
    return_input_ids_in_sglext: bool = False
    return_output_ids_in_sglext: bool = False

    @model_validator(mode="before")
    @classmethod
    def _nothing_unsupported(cls, body: Any) -> Any:
        return without_unsupported(body)

    @field_validator("stop")
    @classmethod
    def _stop_has_text(cls, stop: str | list[str] | None) -> str | list[str] | None:
        return with_text(stop)

    @model_validator(mode="after")
    def _final_message_can_be_continued(self) -> Self:
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message needs an assistant message at the end")
        return self

    @model_validator(mode="after")
    def _token_ids_come_whole(self) -> Self:
        for name in ("return_token_ids", "return_meta_info"):
            if self.stream and getattr(self, name):
                raise ValueError(f"{name} is not supported with stream")
        return self

    @property
    def shown_tools(self) -> list[JSONObject]:
        """The tools that the chat template is given: none where the caller chose none, else all or the chosen one."""
        if self.tool_choice == "none":
            return []
        chosen = _name(self.tool_choice) if isinstance(self.tool_choice, dict) else None
        return [tool for tool in self.tools or [] if chosen in (None, _name(tool))]

    @property
    def limit(self) -> int | None:
        """The most tokens to generate, if the caller said."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class PauseBody(Body):
    """``POST /pause_generation``."""

    mode: PauseMode = "abort"


class TokenizeBody(Body):
    """``POST /tokenize``: the tokens of a text, or of a chat's prompt."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[JSONObject] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of prompt and messages must be given")
        return self


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    tokens: list[Annotated[int, Field(ge=0)]] | list[list[Annotated[int, Field(ge=0)]]]
    skip_special_tokens: bool = True


class VersionBody(Body):
    """``POST /update_weight_version``."""

    new_version: str
    abort_all_requests: bool = False


class AbortBody(Body):
    """``POST /abort_request``: the calls whose ``rid`` begins with this one, or all."""

    rid: str | None = None
    abort_all: bool = False


class WeightsBody(Body):
    """``POST /update_weights_from_disk``; SGLang's other fields change nothing here and are ignored."""

    model_config = ConfigDict(protected_namespaces=())

    model_path: Annotated[str, Field(min_length=1)]
    weight_version: str | None = None
    abort_all_requests: bool = False


def new_rid() -> str:
    """An id for a call whose caller gave none."""
    return uuid4().hex


def without_unsupported(body: Any) -> Any:
    """The body as it came; ``ValueError`` where a field asks for what is not served."""
    for name, idle in UNSUPPORTED.items() if isinstance(body, dict) else ():
        if name in body and body[name] not in idle:
            raise ValueError(f"{name} is not supported by the embedded engine")
    return body


def with_text(stop: str | list[str] | None) -> str | list[str] | None:
    """The stop strings as they came; ``ValueError`` where one is empty."""
    if stop is not None and "" in ([stop] if isinstance(stop, str) else stop):
        raise ValueError("a stop string cannot be empty")
    return stop


def error_body(message: str, status: int, *, param: str | None = None) -> JSONObject:
    """An error as SGLang words it, which OpenAI's clients read as well."""
    kind = "BadRequestError" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "InternalServerError"
    return {"object": "error", "message": message, "type": kind, "param": param, "code": status}


def generate_error(message: str, status: int) -> JSONObject:
    """An error of ``/generate`` as SGLang words it."""
    return {"error": {"message": message, "code": status}}


def event(body: JSONObject | str) -> str:
    """A server-sent event."""
    return f"data: {body if isinstance(body, str) else json.dumps(body, separators=(',', ':'))}\n\n"


def _name(tool: JSONObject) -> object:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


def _with_arguments(call: Any) -> Any:
    """A call of a tool with its arguments decoded, as chat templates take them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except json.JSONDecodeError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


DEFAULT_NEW_TOKENS = 128
"""SGLang's own."""


class GenerateParams(BaseModel):
    """The sampling parameters of ``/generate``; a field that SGLang does not have is refused, as there."""

    model_config = ConfigDict(extra="forbid")

    max_new_tokens: Annotated[int, Field(ge=0)] | None = DEFAULT_NEW_TOKENS
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    sampling_seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1)] = 1
    skip_special_tokens: Literal[True] = True
    spaces_between_special_tokens: Literal[True] = True

    @model_validator(mode="before")
    @classmethod
    def _nothing_unsupported(cls, params: Any) -> Any:
        if not isinstance(params, dict):
            return params
        return {name: value for name, value in without_unsupported(params).items() if name not in UNSUPPORTED}

    @field_validator("stop")
    @classmethod
    def _stop_has_text(cls, stop: str | list[str] | None) -> str | list[str] | None:
        return with_text(stop)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class GenerateBody(Body):
    """The body; ``input_ids`` go before ``text``. ``logprob_start_len`` -1 scores nothing of the prompt."""

    text: str | list[str] | None = None
    input_ids: TokenIds | Annotated[list[TokenIds], Field(min_length=1)] | None = None
    sampling_params: GenerateParams | list[GenerateParams] = GenerateParams()
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = -1
    return_text_in_logprobs: bool = False
    stream: bool = False
    rid: str | list[str] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.text is None and self.input_ids is None:
            raise ValueError("Either text, input_ids or input_embeds should be provided.")
        num_prompts = len(self.prompts)
        if not num_prompts:
            raise ValueError("text is an empty list: it needs one prompt at least")
        for name in ("sampling_params", "rid"):
            told = getattr(self, name)
            if isinstance(told, list) and len(told) != num_prompts:
                raise ValueError(f"{name} has {len(told)} entries for {num_prompts} prompts")
        if self.stream and num_prompts > 1:
            raise ValueError("the embedded engine streams one prompt at a time")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as token ids."""
        given: Any = self.text if self.input_ids is None else self.input_ids
        return list(given) if self.is_list else [given]

    @property
    def is_list(self) -> bool:
        """Whether several prompts were given, or one in a list."""
        if self.input_ids is None:
            return isinstance(self.text, list)
        return isinstance(self.input_ids[0], list)

    def params_of(self, index: int) -> GenerateParams:
        """The sampling parameters of a prompt."""
        return self.sampling_params[index] if isinstance(self.sampling_params, list) else self.sampling_params

    def rid_of(self, index: int) -> str | None:
        """The request id of a prompt: SGLang numbers the prompts of a list below one id."""
        if isinstance(self.rid, list):
            return self.rid[index]
        return f"{self.rid}_{index}" if self.rid and self.is_list else self.rid

    @property
    def logprob_start(self) -> int | None:
        """The first token of the prompt to score."""
        start = -1 if self.logprob_start_len is None else self.logprob_start_len
        return start if self.return_logprob and start >= 0 else None
