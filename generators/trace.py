"""What the engine's replies to one rollout told of its tokens: their ids, their logprobs, the weights behind them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from openai.types.chat import ChatCompletion


@dataclass
class TokenTrace:
    """Grows with each reply. Lists of tokens are as long as each other, from the first prompt to the last response.

    Ids are told by an engine that was asked for them (SGLang: ``return_token_ids``, beside ``logprobs``). They are kept
    as long as each prompt begins with all that came before it: a history that was changed on the way, or several
    choices, leave no one sequence to train on.
    """

    weight_versions: list[int] = field(default_factory=list)
    """In the order of their first use; versions that are no numbers are left out."""
    tokens: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    _is_whole: bool = True
    _has_logprobs: bool = True

    def note(self, reply: object) -> None:
        """Take in one reply; what is no whole chat completion (a stream, say) tells nothing."""
        if not isinstance(reply, ChatCompletion):
            return
        self.weight_versions += dict.fromkeys(v for v in _versions(reply) if v not in self.weight_versions)
        ids = _token_ids(reply)
        if ids is None or ids[0][: len(self.tokens)] != self.tokens:
            self._is_whole = False
        elif self._is_whole:
            self._extend(*ids, _logprobs(reply, len(ids[1])))

    def fields(self) -> dict[str, Any]:
        """What a sample gets: ``weight_version`` or ``weight_versions``; ``tokens``, ``loss_mask``, ``logprobs``."""
        told: dict[str, Any] = {}
        if len(self.weight_versions) == 1:
            told["weight_version"] = self.weight_versions[0]
        elif self.weight_versions:
            told["weight_versions"] = self.weight_versions
        if self._is_whole and self.tokens:
            told |= {"tokens": self.tokens, "loss_mask": self.loss_mask}
            if self._has_logprobs:
                told["logprobs"] = self.logprobs
        return told

    def _extend(self, prompt: list[int], response: list[int], logprobs: list[float] | None) -> None:
        num_new = len(prompt) - len(self.tokens)
        self.tokens = prompt + response
        self.loss_mask += [0] * num_new + [1] * len(response)
        self.logprobs += [0.0] * num_new + (logprobs or [0.0] * len(response))
        self._has_logprobs = self._has_logprobs and logprobs is not None


def _versions(reply: ChatCompletion) -> Iterator[int]:
    metadata: Any = getattr(reply, "metadata", None)
    if not isinstance(metadata, dict):
        return
    spans = metadata.get("weight_versions")
    told = [span.get("version") for span in spans if isinstance(span, dict)] if isinstance(spans, list) else []
    names = map(str, told or [metadata.get("weight_version")])
    yield from (int(name) for name in names if name.isdecimal())


def _token_ids(reply: ChatCompletion) -> tuple[list[int], list[int]] | None:
    """Prompt and response of the only choice."""
    if len(reply.choices) != 1:
        return None
    prompt, response = (getattr(reply.choices[0], f"{part}_token_ids", None) for part in ("prompt", "response"))
    return (list(prompt), list(response)) if isinstance(prompt, list) and isinstance(response, list) else None


def _logprobs(reply: ChatCompletion, num_tokens: int) -> list[float] | None:
    """One for each token of the response, or None."""
    told = reply.choices[0].logprobs
    numbers = [token.logprob for token in told.content] if told is not None and told.content is not None else []
    return numbers if len(numbers) == num_tokens else None
