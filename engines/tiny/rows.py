"""One choice being generated: its tokens, its text in whole characters, and the part not sent yet."""

import random
import time
from dataclasses import replace
from typing import Any

from forebay.engines.fake_sglang.calls import UNBEGUN, Milestones, Piece, PromptCall, TokenChoice

MAX_PENDING_TOKENS = 16
"""After this many tokens without a complete character, the bytes are not valid text and are shown undecoded."""

REPLACEMENT = "\ufffd"


class ChoiceRow:
    """A choice as a row of the batch. ``index`` is its position in the request."""

    def __init__(self, call: PromptCall, index: int, tokenizer: Any, milestones: Milestones = UNBEGUN) -> None:
        self.call = call
        self.index = index
        self._milestones = milestones
        # Counted within the call, so that a prompt in a list samples the same tokens as it would alone.
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
        """The prompt and all sampled tokens."""
        return (*self.call.prompt_ids, *self._sampled)

    @property
    def last_token(self) -> int:
        """The newest token, which the batch has not read yet."""
        return self._sampled[-1]

    def accept(self, token: TokenChoice, eos_token_ids: frozenset[int], version: str) -> None:
        """Add the next token, sampled by the weights ``version``; finish the choice if the token ends it."""
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
        """End the choice; later calls have no effect."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self._milestones = replace(self._milestones, ended_s=time.monotonic())
            self._matched = matched
            self._text.close()

    def take_piece(self) -> Piece | None:
        """Return the new output to send, if any: a call that does not stream gets one piece, at its end."""
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


def new_dice(seed: int | None, index: int) -> random.Random:
    """Random numbers of choice ``index`` of a call: equal for equal seeds, different for each choice."""
    return random.Random() if seed is None else random.Random(f"{seed}/{index}")


class TextStream:
    """The growing text of one choice. ``stopped_by`` is the stop string that ended it, or None."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []
        self._shown = 0
        self._context = 0
        self._read = 0
        self.text = ""
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> None:
        """Add one token."""
        self._ids.append(token_id)
        self._advance(len(self._ids) - self._read >= MAX_PENDING_TOKENS)

    def close(self) -> None:
        """End the text; an incomplete character at the end becomes a replacement character."""
        self._advance(True)

    def take(self, *, final: bool) -> str:
        """Return the new text. Until ``final``, text that may begin a stop string is kept back."""
        end = len(self.text) - (0 if final else self._held_back())
        piece, self._shown = self.text[self._shown : end], max(self._shown, end)
        return piece

    def _advance(self, even_if_incomplete: bool) -> None:
        # Decode together with the previous text, because some tokenizers drop a leading space.
        if self.stopped_by is not None or self._read == len(self._ids):
            return
        before = self._decode(self._ids[self._context : self._read])
        after = self._decode(self._ids[self._context :])
        # A character of several tokens decodes to a replacement character until its last token arrives.
        if after.endswith(REPLACEMENT) and not even_if_incomplete:
            return
        self._context, self._read = self._read, len(self._ids)
        self._append(after[len(before) :])

    def _append(self, piece: str) -> None:
        start = len(self.text)
        self.text += piece
        # Of several stop strings, the one that begins first wins.
        hits = [(at, stop) for stop in self._stop if (at := self._find(stop, start)) >= 0]
        if hits:
            at, self.stopped_by = min(hits)
            self.text = self.text[:at]

    def _find(self, stop: str, start: int) -> int:
        # A stop string may begin in the previous text and end in this piece.
        return self.text.find(stop, max(0, start - len(stop) + 1))

    def _held_back(self) -> int:
        tail = self.text[-max(map(len, self._stop), default=0) :] if self._stop else ""
        lengths = (n for stop in self._stop for n in range(min(len(stop), len(tail)), 0, -1) if tail.endswith(stop[:n]))
        return max(lengths, default=0)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
