"""One choice of a chat that takes several calls: builds each request, joins the results, and tracks what is left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from forebay.core.errors import EngineError
from forebay.engines.capture.engine_times import summed
from forebay.engines.capture.sampling_params import grammar_of
from forebay.engines.capture.token_cap import LIMIT_NAMES
from forebay.engines.capture.token_tree import media_of
from forebay.engines.capture.turn import Turn, joined, merge

MIN_NAMES = ("min_tokens", "min_new_tokens")
OF_ONE_CALL = ("rid", "request_id", "stream", "stream_options")
"""Fields that apply to a single call and are left out of later ones."""
OF_THE_END = ("continue_final_message", "add_generation_prompt")
"""Fields that control how the last message is rendered."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A whole reply and its turns; ``raw`` is the caller's own response object."""

    reply: Json
    turns: Sequence[Turn]
    raw: Any = None

    @property
    def only(self) -> Turn:
        """The turn of a call for one choice. Raises ``EngineError`` if the reply has no choice."""
        if not self.turns:
            raise EngineError("the engine's reply has no choices", status_code=200)
        return self.turns[0]


class Parts:
    """The parts of one choice, each from one call. ``body`` is the requested chat, ``first`` the first call's turn.

    Aborted text is continued from token ids if every engine so far returned them, otherwise from text.
    """

    def __init__(self, body: Mapping[str, Any], first: Turn) -> None:
        self.body: Json = {name: value for name, value in body.items() if name not in OF_ONE_CALL}
        self.before, self._prefix = _split(body)
        self.is_by_ids = first.prompt_ids is not None and first.sampled_ids is not None
        self.turn: Turn | None = first
        """All parts as one turn."""
        self.texts: list[str] = []
        self.completion_tokens: list[int] = []
        self.weight_versions: list[str | None] = []
        self.logprobs: list[Json] = []
        """Logprobs of the parts after the first, in the format of chats."""
        self.dropped: list[Turn] = []
        """Parts that could not be continued."""
        self._note(first)
        self._budget = next((name for name in LIMIT_NAMES if self.body.get(name) is not None), None)

    @property
    def num_tokens(self) -> int:
        """Number of tokens sampled for the parts."""
        return sum(self.completion_tokens)

    @property
    def is_last_empty(self) -> bool:
        """Whether the last call returned nothing."""
        return not self.texts[-1] and not self.completion_tokens[-1]

    @property
    def is_budget_spent(self) -> bool:
        """Whether the token limit is used up."""
        return self._budget is not None and self.num_tokens >= int(self.body[self._budget])

    @property
    def must_restart(self) -> bool:
        """Whether a part cannot be continued.

        A grammar restarts with each call. The ids of a prompt with images have their placeholders expanded already,
        so an engine cannot read the images again beside the ids.
        """
        return grammar_of(self.body) is not None or bool(media_of(self.before))

    def request(self) -> Json:
        """Return the body of the next call."""
        request = {**self.body, **self._left()}
        # Choices are continued one by one.
        if "n" in request:
            request["n"] = 1
        ids, text = self._known_ids(), "".join(self.texts)
        if ids is None and not text:
            return request
        request = {name: value for name, value in request.items() if name not in OF_THE_END}
        if ids is not None:
            return {**request, "messages": self.before, "input_ids": ids}
        messages = [*self.before, {"role": "assistant", "content": self._prefix + text}]
        # vLLM requires the last field, SGLang ignores it.
        return {**request, "messages": messages, "continue_final_message": True, "add_generation_prompt": False}

    def add(self, part: Part) -> bool:
        """Add the reply to the last request; False if it did not continue from the given tokens."""
        turn, ids = part.only, self._known_ids()
        # An engine that does not know `input_ids` renders the messages instead and restarts the answer.
        if ids is not None and turn.prompt_ids != ids:
            self.is_by_ids = False
            return False
        self.is_by_ids = self.is_by_ids and turn.sampled_ids is not None
        self.turn = self._with(turn)
        self._note(turn)
        self.logprobs += (part.reply["choices"][0].get("logprobs") or {}).get("content") or []
        return True

    def _with(self, rest: Turn) -> Turn:
        if self.turn is None:
            return rest
        # Aborted before the first token: the engine may not have read the prompt, and then reports none of its ids.
        if not self.turn.sampled_ids and not any(self.texts):
            times = summed(self.turn.engine, rest.engine)
            return msgspec.structs.replace(rest, began_s=self.turn.began_s, engine=times)
        # Continued from text, which may be tokenized differently from the sampled tokens.
        if not self.is_by_ids:
            rest = msgspec.structs.replace(rest, prompt_ids=None, sampled_ids=None, logprobs=None)
        return merge(self.turn, rest)

    def drop(self) -> int:
        """Discard all parts. Returns the number of discarded tokens."""
        num_tokens = self.num_tokens
        if self.turn is not None:
            self.dropped.append(self.turn)
        self.texts, self.completion_tokens, self.weight_versions, self.turn = [], [], [], None
        self.logprobs.clear()
        self.is_by_ids = True
        return num_tokens

    def _note(self, turn: Turn) -> None:
        content, counted = turn.reply.get("content"), turn.usage.get("completion_tokens")
        self.texts.append(content if isinstance(content, str) else "")
        self.completion_tokens.append(len(turn.sampled_ids) if turn.sampled_ids is not None else counted or 0)
        self.weight_versions.append(turn.versions[-1].version if turn.versions else None)

    def _known_ids(self) -> list[int] | None:
        """The tokens to continue from; None at the beginning, and if they are unknown."""
        turn = self.turn
        if not self.is_by_ids or turn is None or not turn.sampled_ids:
            return None
        return joined(turn.prompt_ids, turn.sampled_ids)

    def _left(self) -> Json:
        """Return the token limits left after the parts so far."""
        spent = self.num_tokens
        left = {name: max(0, self.body[name] - spent) for name in MIN_NAMES if self.body.get(name)}
        if self._budget is not None:
            left[self._budget] = int(self.body[self._budget]) - spent
        return left


def _split(body: Mapping[str, Any]) -> tuple[list[Json], str]:
    """Split off the text at the end of the messages that the engine was asked to continue."""
    messages = list(body["messages"])
    if body.get("continue_final_message") and ends_with_text(messages):
        return messages[:-1], messages[-1]["content"]
    return messages, ""


def ends_with_text(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is from the assistant and contains only text."""
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and isinstance(last.get("content"), str) and not last.get("tool_calls")
