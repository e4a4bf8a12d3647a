"""What a script is asked, what it answers, and how reasoning and calls of tools are read out of a text again."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.engines.fake_sglang.calls import UNBEGUN, Milestones, Piece, TokenChoice
from forebay.engines.scripted.tokens import TURN_END, TURN_START, call_text, encode, logprob

LIMITS = ("max_new_tokens", "max_completion_tokens", "max_tokens")
"""What the most tokens to say are called, in ``/generate`` and in a chat."""

THINK, THOUGHT = "<think>\n", "\n</think>\n\n"
REASONING_PARSER = "qwen3"
TOOL_CALL_PARSER = "qwen25"
"""SGLang's names for the forms in which the scripted engine thinks and calls."""

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>\n?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer of a script.

    ``tokens_per_s`` says how fast it is said, or ``delay_s`` how many seconds it takes in all; without them it is there
    at once. An abort, a pause or new weights in that time fall into the middle of it. ``hang`` says ``text`` and then
    never ends. An ``error_status`` is answered with ``text`` as the message. ``reasoning`` is sampled as
    ``<think>\\n…\\n</think>\\n\\n`` before the text and kept apart from it. ``finish_reason`` ``length`` leaves out the
    end token.

    Before it is said, the call waits ``queue_s`` seconds in the queue, and its prompt, of which ``cached_tokens`` are
    said to have been in the cache, is read for ``prefill_s``. Replies tell the times as they were measured.
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
        """``finish_reason`` as given, else ``tool_calls`` or ``stop``."""
        return self.finish_reason or ("tool_calls" if self.tool_calls else "stop")

    @property
    def thought(self) -> str:
        """The reasoning as it is sampled."""
        return THINK + self.reasoning + THOUGHT if self.reasoning else ""

    def tokens(self) -> list[int]:
        """Everything that is sampled, with the end token where one is."""
        said = [self.text] if self.text else []
        said += [call_text(call, is_canonical=False) for call in self.tool_calls]
        ends = self.reason in {"stop", "tool_calls"} and not self.hang
        return encode(self.thought + "\n".join(said)) + [TURN_END] * ends


@dataclass(slots=True, eq=False)
class ScriptedCall:
    """One choice that a script is asked for: ``number`` counts them from 0, ``choice`` those of one request."""

    choice: int
    body: dict[str, Any]
    prompt_ids: list[int] = field(default_factory=list, repr=False)
    number: int = -1
    """Its place in the engine's ``calls``: no two have the same, those that arrive together included."""
    said: str = ""
    """What the prompt has the assistant say already: a script that continues it answers with the rest."""
    is_chat: bool = True
    is_asked: bool = True
    """Whether the script is asked: a prompt of ``/generate`` that is no open chat is answered with nothing."""
    asked_version: str = ""
    """The weight version when it came to be worked on."""
    finished: str | None = None
    """How it ended: a finish reason, ``error`` or ``disconnected``; ``None`` while it runs."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    reply: Reply = field(default_factory=Reply, repr=False)
    sampled_ids: list[int] = field(default_factory=list, repr=False)
    versions: list[str] = field(default_factory=list, repr=False)
    """The weight version of each of ``sampled_ids``."""
    num_retractions: int = 0
    traceparent: str | None = None
    """The W3C header with which it came."""
    milestones: Milestones = UNBEGUN
    """When it was begun, read and ended."""
    _sent: tuple[str, str, int] = ("", "", 0)
    """The reasoning, the text and the number of tokens in the pieces so far."""

    @property
    def rid(self) -> str | None:
        """The request id that the client gave."""
        return self.body.get("rid")

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of the chat; of ``/generate``, those that its prompt spells."""
        return list(self.body["messages"])

    @property
    def prompt(self) -> str:
        """The content of the last message."""
        return str(self.messages[-1].get("content") or "")

    @property
    def params(self) -> Mapping[str, Any]:
        """Where the sampling parameters stand: in the body of a chat, below it in ``/generate``."""
        params: Mapping[str, Any] = self.body.get("sampling_params") or self.body
        return params

    @property
    def limit(self) -> int | None:
        """The most tokens that were asked for."""
        limit = next((self.params[name] for name in LIMITS if self.params.get(name) is not None), None)
        return None if limit is None else int(limit)

    def next_piece(self) -> Piece:
        """What was said since the piece before."""
        reasoning, text, start = self._sent
        self._sent = now = (*self._shown(), len(self.sampled_ids))
        tokens, versions = self.sampled_ids[start:], self.versions[start:]
        # Each token with the one before it, which its logprob depends on.
        before = [self.prompt_ids[-1], *self.sampled_ids][start:]
        # Half a call of a tool is no call: what an abort or the limit has cut has none.
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
        """The reasoning and the text so far, without a character that is not whole yet."""
        said = bytes(token for token in self.sampled_ids if token < TURN_START)
        if not self.is_chat:  # what `/generate` gives is not parsed
            return "", said.decode(errors="ignore" if self.finished is None else "replace")
        thought, text = self.reply.thought.encode(), self.reply.text.encode()
        # Cut by bytes, so that it holds for any number of tokens; half a character at the end is left out.
        reasoning = said[len(THINK) : len(thought) - len(THOUGHT)] if thought else b""
        answer = said[len(thought) : len(thought) + len(text)]
        return reasoning.decode(errors="ignore"), answer.decode(errors="ignore")


Answer = str | Reply
Script = Callable[[ScriptedCall], Answer | Awaitable[Answer]]


def parse_function_call(body: dict[str, Any]) -> dict[str, Any]:
    """``POST /parse_function_call``: the text without its calls, and the calls. What is no call stays text."""
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
    """``POST /separate_reasoning``: what was thought, and what was said."""
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
"""By the path that each answers."""
