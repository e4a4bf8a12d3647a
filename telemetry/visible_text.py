"""Text of strangers made harmless to look at: what models, tools and generators wrote may reach a terminal.

A terminal takes escape sequences as commands: they recolour it, rename its window, write over what it showed, put text
on the clipboard. Bidirectional and invisible characters let a text be read as another one.
"""

import json
import re

HIDDEN = re.compile(
    "["
    "\x00-\x08\x0b-\x1f"  # C0, ESC among them; newlines and tabs stay
    "\x7f-\x9f"  # DEL, and C1, which some terminals take as escape sequences
    "\xad\u061c\u180e\u200b\u200e\u200f"  # invisible, and marks of direction; joiners belong to words and emoji
    "\u2028-\u202e"  # separators of lines and paragraphs, embeddings and overrides of direction
    "\u2060-\u206f\ufeff\ufff9-\ufffb"  # isolates of direction, and what shows nothing
    "\ud800-\udfff"  # halves of surrogate pairs, which cannot be written at all
    "\U000e0000-\U000e007f"  # tags
    "]"
)


def visible(text: str) -> str:
    r"""``text`` with its control, bidirectional and invisible characters written out: ``\x1b``, ``\u202e``."""
    return HIDDEN.sub(_written_out, text)


def visible_line(text: str) -> str:
    """``visible`` for what is to stay one entry of a log: further lines of it are set in, and can begin no other."""
    return visible(text).replace("\n", "\n    ")


def visible_json(value: object, *, indent: int | None = 2) -> str:
    """A JSON document whose strings are what they were, and in which nothing can be read as a command."""
    return HIDDEN.sub(_in_json, json.dumps(value, indent=indent, ensure_ascii=False))


def _written_out(found: re.Match[str]) -> str:
    return found.group().encode("unicode_escape").decode()


def _in_json(found: re.Match[str]) -> str:
    return json.dumps(found.group())[1:-1]
