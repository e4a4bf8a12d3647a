"""From token ids to text as they come: whole characters only, cut at the first stop string."""

from typing import Any

MAX_PENDING_TOKENS = 16
"""After so many tokens without a whole character at the end, the bytes are no text and are shown as they are."""

REPLACEMENT = "\ufffd"


class TextStream:
    """The growing text of one choice. ``stopped_by`` is the stop string that ended it."""

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
        """Nothing more comes: an incomplete character at the end is shown as a replacement character."""
        self._advance(True)

    def take(self, *, final: bool) -> str:
        """What was not yet taken. Until ``final``, what may be the beginning of a stop string is held back."""
        end = len(self.text) - (0 if final else self._held_back())
        piece, self._shown = self.text[self._shown : end], max(self._shown, end)
        return piece

    def _advance(self, even_if_incomplete: bool) -> None:
        # Decoding starts at the text before, since some tokenizers drop a space at the beginning of what they decode.
        if self.stopped_by is not None or self._read == len(self._ids):
            return
        before = self._decode(self._ids[self._context : self._read])
        after = self._decode(self._ids[self._context :])
        # A character of several tokens decodes to this until its last token has come.
        if after.endswith(REPLACEMENT) and not even_if_incomplete:
            return
        self._context, self._read = self._read, len(self._ids)
        self._append(after[len(before) :])

    def _append(self, piece: str) -> None:
        start = len(self.text)
        self.text += piece
        # Of several stop strings the one that begins first counts, whichever was found first.
        hits = [(at, stop) for stop in self._stop if (at := self._find(stop, start)) >= 0]
        if hits:
            at, self.stopped_by = min(hits)
            self.text = self.text[:at]

    def _find(self, stop: str, start: int) -> int:
        # A stop string may begin in the text before and end in this piece.
        return self.text.find(stop, max(0, start - len(stop) + 1))

    def _held_back(self) -> int:
        tail = self.text[-max(map(len, self._stop), default=0) :] if self._stop else ""
        lengths = (n for stop in self._stop for n in range(min(len(stop), len(tail)), 0, -1) if tail.endswith(stop[:n]))
        return max(lengths, default=0)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
