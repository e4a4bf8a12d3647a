"""A chat of a rollout that goes over ``/generate`` of a router: its prompt is rendered here."""

from collections.abc import Mapping
from typing import Any, Self

from forebay.engines.chat_template import ChatTemplate
from forebay.engines.templated import as_chat, generate_body, rendered

OF_THE_BODY = frozenset({"content-encoding", "content-length", "transfer-encoding"})
"""Headers that no longer hold for another body."""


class TemplatedCall:
    """One such chat: what goes out in its place, and its reply as a chat's. ``chat`` is the body of the chat."""

    def __init__(self, chat: Mapping[str, Any], prompt_ids: list[int], template: ChatTemplate) -> None:
        self._chat = chat
        self._prompt_ids = prompt_ids
        self._template = template

    @classmethod
    def of(cls, sent: Mapping[str, Any], client_body: Mapping[str, Any], template: ChatTemplate) -> Self | None:
        """The chat that would be ``sent``; None if only a chat will do. Logprobs are told if ``client_body`` asks."""
        # Asked for by us as well, and by other means here.
        chat = {**sent, "logprobs": client_body.get("logprobs")}
        prompt_ids = rendered(chat, template)
        return None if prompt_ids is None else cls(chat, prompt_ids, template)

    def options(self, bound: Any, url: str) -> Any:
        """The call of the openai package in place of ``bound``."""
        body = generate_body(self._chat, self._prompt_ids)
        return bound.model_copy(update={"url": f"{url}/generate", "json_data": body, "extra_json": None})

    def response(self, response: Any) -> Any:
        """The HTTP response as one to a chat. Raises ``EngineError`` for what is no reply."""
        content = as_chat(response.content, self._chat, self._prompt_ids, self._template)
        return with_body(response, content)


def with_body(response: Any, content: bytes) -> Any:
    """The same HTTP response with another body."""
    headers = [(name, value) for name, value in response.headers.items() if name.lower() not in OF_THE_BODY]
    return type(response)(response.status_code, headers=headers, content=content, request=response.request)
