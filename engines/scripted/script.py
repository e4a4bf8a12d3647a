"""Calls and replies of a script, and the parsers that read reasoning and tool calls back from text."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.engines.fake_sglang.calls import UNBEGUN, Milestones, Piece, TokenChoice
from forebay.engines.scripted.tokens import TURN_END, TURN_START, call_text, encode, logprob

LIMITS = ("max_new_tokens", "max_completion_tokens", "max_tokens")
"""Names of the token limit in ``/generate`` and in a chat."""

THINK, THOUGHT = "<think>\n", "\n</think>\n\n"
REASONING_PARSER = "qwen3"
TOOL_CALL_PARSER = "qwen25"
"""SGLang's parser names for the scripted engine's reasoning and tool call formats."""

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>\n?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer of a script.

    ``tokens_per_s`` sets its speed, or ``delay_s`` its total duration in seconds; without them it is complete at once.
    An abort, a pause or a weight update in that time interrupts it. ``hang`` emits ``text`` and then never ends.
    An ``error_status`` returns an error with ``text`` as its message. ``reasoning`` is sampled as
    ``<think>\\n…\\n</think>\\n\\n`` before the text and returned separately. ``finish_reason`` ``length`` omits the
    end token.

    Before the reply, the call spends ``queue_s`` seconds in the queue and ``prefill_s`` on its prompt, of which
    ``cached_tokens`` are reported as cached. Replies report the measured times.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    finish_reason: str | None = None
    delay_s: float = 0.0
    tokens_per_s: float | None = None
    hang: bool = False
    error_status: int | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    cached_tokens: int = 0

    @property
    def reason(self) -> str:
        """``finish_reason`` if set, otherwise ``tool_calls`` or ``stop``."""
        return self.finish_reason or ("tool_calls" if self.tool_calls else "stop")

    @property
    def thought(self) -> str:
        """The reasoning in the sampled format."""
        return THINK + self.reasoning + THOUGHT if self.reasoning else ""

    def tokens(self) -> list[int]:
        """Return all sampled tokens, including the end token if there is one."""
        said = [self.text] if self.text else []
        said += [call_text(call, is_canonical=False) for call in self.tool_calls]
        ends = self.reason in {"stop", "tool_calls"} and not self.hang
        return encode(self.thought + "\n".join(said)) + [TURN_END] * ends


@dataclass(slots=True, eq=False)
class ScriptedCall:
    """One choice requested from a script: ``number`` counts calls from 0, ``choice`` counts within one request."""

    choice: int
    body: dict[str, Any]
    prompt_ids: list[int] = field(default_factory=list, repr=False)
    number: int = -1
    """Unique position in the engine's ``calls``."""
    said: str = ""
    """The beginning of the assistant's message in the prompt: a script that continues it returns the rest."""
    is_chat: bool = True
    is_asked: bool = True
    """Whether the script is asked: a ``/generate`` prompt that is not an open chat gets an empty answer."""
    asked_version: str = ""
    """Weight version when the engine started on the call."""
    finished: str | None = None
    """Outcome: a finish reason, ``error`` or ``disconnected``; ``None`` while the call runs."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    reply: Reply = field(default_factory=Reply, repr=False)
    sampled_ids: list[int] = field(default_factory=list, repr=False)
    versions: list[str] = field(default_factory=list, repr=False)
    """The weight version of each of ``sampled_ids``."""
    num_retractions: int = 0
    traceparent: str | None = None
    """The W3C header of the request."""
    milestones: Milestones = UNBEGUN
    """When it was started, read and finished."""
    _sent: tuple[str, str, int] = ("", "", 0)
    """Reasoning, text and number of tokens in the pieces so far."""

    @property
    def rid(self) -> str | None:
        """The client's request id."""
        return self.body.get("rid")

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of the chat; for ``/generate``, those decoded from its prompt."""
        return list(self.body["messages"])

    @property
    def prompt(self) -> str:
        """Content of the last message."""
        return str(self.messages[-1].get("content") or "")

    @property
    def params(self) -> Mapping[str, Any]:
        """The sampling parameters: the body of a chat, or ``sampling_params`` of ``/generate``."""
        params: Mapping[str, Any] = self.body.get("sampling_params") or self.body
        return params

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens requested."""
        limit = next((self.params[name] for name in LIMITS if self.params.get(name) is not None), None)
        return None if limit is None else int(limit)

    def next_piece(self) -> Piece:
        """Return the output since the previous piece."""
        reasoning, text, start = self._sent
        self._sent = now = (*self._shown(), len(self.sampled_ids))
        tokens, versions = self.sampled_ids[start:], self.versions[start:]
        # Each token is paired with the one before it, because its logprob depends on both.
        before = [self.prompt_ids[-1], *self.sampled_ids][start:]
        # An incomplete tool call does not count: a reply cut by an abort or by the limit has no tool calls.
        is_whole = self.is_chat and self.finished is not None and self.sampled_ids == self.reply.tokens()
        return Piece(
            self.choice,
            text=now[1][len(text) :],
            reasoning=now[0][len(reasoning) :],
            tokens=[TokenChoice(b, logprob(a, b, v)) for a, b, v in zip(before, tokens, versions, strict=False)],
            versions=versions,
            finish_reason=self.finished,
            matched_stop=TURN_END if self.sampled_ids[-1:] == [TURN_END] else None,
            num_retractions=self.num_retractions,
            tool_calls=self.reply.tool_calls if is_whole else (),
            milestones=self.milestones,
        )

    def _shown(self) -> tuple[str, str]:
        """Return the reasoning and the text so far, without an incomplete character at the end."""
        said = bytes(token for token in self.sampled_ids if token < TURN_START)
        if not self.is_chat:  # `/generate` does not parse its output
            return "", said.decode(errors="ignore" if self.finished is None else "replace")
        thought, text = self.reply.thought.encode(), self.reply.text.encode()
        # Cut by bytes, which works for any number of tokens; an incomplete character at the end is omitted.
        reasoning = said[len(THINK) : len(thought) - len(THOUGHT)] if thought else b""
        answer = said[len(thought) : len(thought) + len(text)]
        return reasoning.decode(errors="ignore"), answer.decode(errors="ignore")


Answer = str | Reply
Script = Callable[[ScriptedCall], Answer | Awaitable[Answer]]


def parse_function_call(body: dict[str, Any]) -> dict[str, Any]:
    """``POST /parse_function_call``: split text into plain text and tool calls. Invalid calls remain text."""
    text = str(body.get("text") or "")
    found = [(match.group(0), call) for match in _CALL.finditer(text) if (call := _call(match.group(1))) is not None]
    for spelled, _ in found:
        text = text.replace(spelled, "", 1)
    calls = [
        {"tool_index": index, "name": call["name"], "parameters": json.dumps(call["arguments"])}
        for index, (_, call) in enumerate(found)
    ]
    return {"normal_text": text, "calls": calls}


def separate_reasoning(body: dict[str, Any]) -> dict[str, Any]:
    """``POST /separate_reasoning``: split text into reasoning and answer."""
    text = str(body.get("text") or "")
    thought, mark, said = text.partition(THOUGHT.rstrip())
    if not thought.startswith(THINK):
        return {"reasoning_text": "", "text": text}
    return {"reasoning_text": thought.removeprefix(THINK), "text": said.lstrip() if mark else ""}


def _call(spelled: str) -> dict[str, Any] | None:
    try:
        call = json.loads(spelled)
    except json.JSONDecodeError:
        return None
    return call if isinstance(call, dict) and {"name", "arguments"} <= call.keys() else None


PARSERS = {"/parse_function_call": parse_function_call, "/separate_reasoning": separate_reasoning}
"""By route."""
