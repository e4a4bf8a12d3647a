"""One choice being generated: its tokens, its text, and what of both its client has not got yet."""

import time
from dataclasses import replace
from typing import Any

from forebay.engines.fake_sglang.calls import UNBEGUN, Milestones, Piece, PromptCall, TokenChoice
from forebay.engines.tiny.sampling import new_dice
from forebay.engines.tiny.text import TextStream


class ChoiceRow:
    """A choice as a row of the batch. ``index`` is its place in the request."""

    def __init__(self, call: PromptCall, index: int, tokenizer: Any, milestones: Milestones = UNBEGUN) -> None:
        self.call = call
        self.index = index
        self._milestones = milestones
        # Counted within the call: a prompt of a list draws what it would draw alone.
        self.dice = new_dice(call.params.seed, index - call.first_index)
        self.finish_reason: str | None = None
        self.num_retractions = 0
        self._sampled: list[int] = []
        self._matched: str | int | None = None
        self._text = TextStream(tokenizer, call.params.stop)
        self._new_tokens: list[TokenChoice] = []
        self._new_versions: list[str] = []

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt and everything sampled."""
        return (*self.call.prompt_ids, *self._sampled)

    @property
    def last_token(self) -> int:
        """The token that the batch has not read yet."""
        return self._sampled[-1]

    def accept(self, token: TokenChoice, eos_token_ids: frozenset[int], version: str) -> None:
        """Take the next token, which the weights ``version`` gave, and finish where it ends the choice."""
        params = self.call.params
        if not self._sampled:
            self._milestones = replace(self._milestones, prefilled_s=time.monotonic())
        self._sampled.append(token.token_id)
        self._new_tokens.append(token)
        self._new_versions.append(version)
        ends = token.token_id in eos_token_ids and not params.ignore_eos
        if ends or token.token_id in params.stop_token_ids:
            self.finish("stop", token.token_id)
            return
        self._text.push(token.token_id)
        if self._text.stopped_by is not None:
            self.finish("stop", self._text.stopped_by)
        elif len(self._sampled) >= params.max_tokens:
            self.finish("length")

    def finish(self, reason: str, matched: str | int | None = None) -> None:
        """End the choice; a later reason changes nothing."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self._milestones = replace(self._milestones, ended_s=time.monotonic())
            self._matched = matched
            self._text.close()

    def take_piece(self) -> Piece | None:
        """What is new, if there is something to send: a call that does not stream gets one piece, at its end."""
        finished = self.finish_reason is not None
        if not finished and not self.call.stream:
            return None
        text = self._text.take(final=finished)
        if not text and not finished:
            return None
        tokens, self._new_tokens = self._new_tokens, []
        versions, self._new_versions = self._new_versions, []
        return Piece(
            self.index,
            text,
            tokens,
            self.finish_reason,
            self._matched,
            versions,
            num_retractions=self.num_retractions,
            milestones=self._milestones,
        )
