"""Chats as the model's template takes them, and what the embedded engine does not serve."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from forebay.core.errors import InvalidInput
from forebay.engines.fake_sglang.calls import JSONObject
from forebay.engines.fake_sglang.request_bodies import ChatBody, GenerateBody
from forebay.engines.tiny.extra import require
from forebay.web.request_models import invalid

UNSUPPORTED: dict[str, Collection[object]] = {
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
}
"""Fields that would change the answer and are not served, with the values that ask for nothing."""

UNSUPPORTED_PARAMS = UNSUPPORTED | {"skip_special_tokens": (True,), "spaces_between_special_tokens": (True,)}
"""The same for the sampling parameters of ``/generate``."""


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
        message = {**self.model_dump(exclude_none=True), "content": text}
        if isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [_with_arguments(call) for call in message["tool_calls"]]
        return message


class ChatMessages(BaseModel):
    """The messages of a chat."""

    messages: list[Message]


def chat_tokens(
    tokenizer: Any, messages: Sequence[JSONObject], tools: Sequence[JSONObject], *, is_continued: bool
) -> list[int]:
    """The tokens of a chat's prompt. A message to be continued is the open end of it, as in SGLang."""
    try:
        rendered = [message.rendered() for message in ChatMessages.model_validate({"messages": messages}).messages]
    except ValidationError as error:
        raise invalid(error) from None
    partial = rendered.pop()["content"] if is_continued else ""
    try:
        prompt = tokenizer.apply_chat_template(
            rendered, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
        )
    except (require("jinja2").TemplateError, TypeError, RecursionError) as error:
        raise InvalidInput(f"the model's chat template refuses these messages: {error}", field="messages") from error
    return list(tokenizer.encode(prompt + partial, add_special_tokens=False))


def refuse_unserved(body: ChatBody | GenerateBody) -> None:
    """Raise ``InvalidInput`` where a body asks for what SGLang serves and this engine does not."""
    if isinstance(body, ChatBody):
        _refuse(body.given, UNSUPPORTED)
        if body.continue_final_message and body.messages[-1].get("role") != "assistant":
            message = "continue_final_message needs an assistant message at the end"
            raise InvalidInput(message, field="continue_final_message")
        return
    for at in range(len(body.prompts)):
        extra = body.params_of(at).model_extra or {}
        _refuse(extra, UNSUPPORTED_PARAMS)
        # SGLang refuses a name that it does not know; of those that it knows, few are served here.
        for name in extra.keys() - UNSUPPORTED_PARAMS.keys():
            raise InvalidInput(f"sampling_params.{name} is not supported by the embedded engine", field=name)
    if body.stream and len(body.prompts) > 1:
        raise InvalidInput("the embedded engine streams one prompt at a time", field="stream")


def _refuse(given: Mapping[str, Any], unsupported: Mapping[str, Collection[object]]) -> None:
    for name, idle in unsupported.items():
        if name in given and given[name] not in idle:
            raise InvalidInput(f"{name} is not supported by the embedded engine", field=name)


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
