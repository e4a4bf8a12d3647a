"""A full-text index of what models and tools wrote in a run: a temporary SQLite file, deleted with its connection.

``find`` finds any text of at least ``MIN_LENGTH`` characters wherever it occurs, also within words and in languages
without spaces; ASCII letters match in either case.
"""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from forebay.core.binary_sample import is_binary, unpack
from forebay.core.records.rows import SampleRow

MIN_LENGTH = 3
MOST_OF_SAMPLE = 2**20
"""Characters of one sample that are searched."""
AROUND = 120
"""Characters of an excerpt before and after the text."""
_NOT_SEARCHED = ("role", "type", "id", "tool_call_id")
_SCHEMA = """
CREATE TABLE sample (
  id INTEGER PRIMARY KEY, number INTEGER, group_id TEXT, instance_id TEXT, uid TEXT, slot INTEGER, fork INTEGER,
  reward REAL, is_counted INTEGER, num_bytes INTEGER
);
CREATE INDEX sample_by_age ON sample (number);
CREATE VIRTUAL TABLE written USING fts5(text, tokenize = 'trigram', detail = none);
"""
_FIELDS = ("group_id", "instance_id", "uid", "slot", "fork", "reward")
_FILTERS = "(:instance = '' OR instr(instance_id, :instance)) AND (:min_reward IS NULL OR reward >= :min_reward)"
# LIKE uses the index, but takes % and _ for wildcards; with ESCAPE, it would read all texts.
_WITH = f"""
FROM written JOIN sample ON sample.id = written.rowid
WHERE text LIKE :pattern AND instr(lower(text), lower(:text)) AND {_FILTERS}
"""
_TALLY = "SELECT count(*), total(is_counted), total(CASE WHEN is_counted THEN reward END)"
_TALLY_WITH, _TALLY_ALL = f"{_TALLY} {_WITH}", f"{_TALLY} FROM sample WHERE {_FILTERS}"
_HITS = f"SELECT {', '.join(_FIELDS)}, text {_WITH} ORDER BY number DESC, slot, fork LIMIT :limit"


class _Body(msgspec.Struct):
    messages: Any = None


class Found(msgspec.Struct):
    """The newest samples with a text, and the rewards of those with it and without it."""

    samples: list[dict[str, Any]] = []
    num_with: int = 0
    num_searched: int = 0
    mean_with: float | None = None
    """Over main samples that belong to their group and have a reward, as ``mean_without``."""
    mean_without: float | None = None


class TextIndex:
    """Holds up to ``most_bytes`` of text, of the newest groups. May be used from any thread."""

    def __init__(self, most_bytes: int) -> None:
        self._using = threading.Lock()
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self.is_full = False
        """Whether a text was left out, or removed for newer ones."""
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._database.executescript(_SCHEMA)

    def close(self) -> None:
        """Delete the file."""
        with self._using:
            self._database.close()

    def add(self, samples: Sequence[tuple[int, SampleRow, bytes]]) -> None:
        """Add samples, each with the number of its group and its body; once it is full, in place of older groups."""
        texts = [written_in(body) for _, _, body in samples]
        with self._using, self._database:
            self._database.execute("BEGIN")
            for (number, row, _), text in zip(samples, texts, strict=True):
                size = len(text.encode())
                if self._has_room(number, size):
                    self._insert(number, row, text, size)

    def _has_room(self, number: int, size: int) -> bool:
        while self._num_bytes + size > self._most_bytes:
            self.is_full = True
            oldest = "SELECT id, number, num_bytes FROM sample ORDER BY number LIMIT 1"
            found = self._database.execute(oldest).fetchone()
            if found is None or found[1] >= number or size > self._most_bytes:
                return False
            self._database.execute("DELETE FROM sample WHERE id = ?", found[:1])
            self._database.execute("DELETE FROM written WHERE rowid = ?", found[:1])
            self._num_bytes -= found[2]
        return True

    def _insert(self, number: int, row: SampleRow, text: str, size: int) -> None:
        values = (number, row.group_id, str(row.instance_id), row.uid, row.slot, row.fork, row.reward, row.is_rewarded)
        marks = ", ".join("?" * (len(values) + 1))
        added = self._database.execute(f"INSERT INTO sample VALUES (NULL, {marks})", (*values, size))  # noqa: S608
        self._database.execute("INSERT INTO written (rowid, text) VALUES (?, ?)", (added.lastrowid, text))
        self._num_bytes += size

    def find(self, text: str, instance: str, min_reward: float | None, limit: int) -> Found:
        """Find ``text``, "" for none, in samples whose instance contains ``instance`` and with at least that reward."""
        pattern = f"%{text}%"
        asked = {"text": text, "pattern": pattern, "instance": instance, "min_reward": min_reward, "limit": limit}
        with self._using:
            num_with, counted, total = self._database.execute(_TALLY_WITH, asked).fetchone() if text else (0, 0, 0.0)
            num_searched, all_counted, all_total = self._database.execute(_TALLY_ALL, asked).fetchone()
            hits = self._database.execute(_HITS, asked).fetchall() if text else []
        mean_without = _mean(all_total - total, all_counted - counted)
        return Found([_shown(hit, text) for hit in hits], num_with, num_searched, _mean(total, counted), mean_without)


def _mean(total: float, number: float) -> float | None:
    return total / number if number else None


def _shown(hit: Sequence[Any], text: str) -> dict[str, Any]:
    """A hit with the part of its text around the first occurrence."""
    *values, whole = hit
    at = _ascii_lower(whole).find(_ascii_lower(text))
    excerpt = whole[max(0, at - AROUND) : at + len(text) + AROUND]
    return dict(zip(_FIELDS, values, strict=True)) | {"excerpt": excerpt}


def _ascii_lower(text: str) -> str:
    return text.encode().lower().decode()  # as SQLite does it: the length of the text stays


def written_in(body: bytes) -> str:
    """The texts of a stored sample's tool messages and of its last answer; "" if it has no messages."""
    try:
        messages = msgspec.json.decode(unpack(body).json if is_binary(body) else body, type=_Body).messages
    except (msgspec.MsgspecError, RecursionError):  # other writers may use the name otherwise
        return ""
    of_dicts = [each for each in messages if isinstance(each, dict)] if isinstance(messages, list) else []
    final = next((each for each in reversed(of_dicts) if each.get("role") == "assistant"), None)
    shown = (each for each in of_dicts if each.get("role") == "tool" or each is final)
    text = "\n".join(part for message in shown for part in texts_of(message))
    return text[:MOST_OF_SAMPLE].replace("\0", "\N{REPLACEMENT CHARACTER}")  # SQLite would end the text there


def texts_of(message: Any) -> Iterator[str]:
    """The texts of a message: content, reasoning, names and arguments of calls."""
    waiting = [message]
    while waiting:  # without recursion: a body may be nested deeply
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += [each for name, each in reversed(value.items()) if name not in _NOT_SEARCHED]
        elif isinstance(value, list):
            waiting += reversed(value)
