"""Build the reply to a chat whose choices were continued after an abort, as if it came from one call."""

from collections.abc import Mapping, Sequence
from typing import Any

from forebay.engines.capture.turn import Turn

Json = dict[str, Any]
Logprobs = Mapping[int, list[Json]]
"""Logprobs of the parts after the first, by choice; only for continued choices."""


def joined_reply(reply: Json, turns: Sequence[Turn], logprobs: Logprobs) -> Json:
    """Return a whole reply with the choices replaced by ``turns``."""
    by_choice = {turn.choice: turn for turn in turns}
    choices = [_choice(choice, by_choice.get(choice.get("index", 0)), logprobs) for choice in reply["choices"]]
    return {**reply, "choices": choices, "usage": joined_usage(reply.get("usage"), turns)}


def joined_usage(usage: Json | None, turns: Sequence[Turn]) -> Json | None:
    """Return the usage of the first part, with the tokens of all parts."""
    if usage is None:
        return None
    counts = [_num_sampled(turn, len(turns)) for turn in turns]
    if None in counts:
        return usage
    completion = sum(count for count in counts if count is not None)
    return {**usage, "completion_tokens": completion, "total_tokens": usage.get("prompt_tokens", 0) + completion}


def _num_sampled(turn: Turn, num_choices: int) -> int | None:
    if turn.sampled_ids is not None:
        return len(turn.sampled_ids)
    # The usage of a turn covers all choices of its call: with several, it cannot be split between them.
    return turn.usage.get("completion_tokens") if num_choices == 1 else None


def _choice(choice: Json, turn: Turn | None, logprobs: Logprobs) -> Json:
    if turn is None or turn.choice not in logprobs:
        return choice
    whole = {**choice, "message": {**choice["message"], **turn.reply}, "finish_reason": turn.finish_reason}
    if "response_token_ids" in choice:
        whole["response_token_ids"] = turn.sampled_ids
    if isinstance(choice.get("logprobs"), dict):
        content = [*(choice["logprobs"].get("content") or []), *logprobs[turn.choice]]
        kept = content if turn.sampled_ids is None else content[: len(turn.sampled_ids)]
        whole["logprobs"] = {**choice["logprobs"], "content": kept}
    return whole
