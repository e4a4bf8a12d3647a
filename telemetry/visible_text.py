"""Makes untrusted text safe to display: texts of models, tools and generators may reach a terminal.

Terminals interpret escape sequences as commands: change colours, rename the window, overwrite output, set the
clipboard. Bidirectional and invisible characters can make a text look like another one.
"""

import json
import re

HIDDEN = re.compile(
    "["
    "\x00-\x08\x0b-\x1f"  # C0, including ESC; newlines and tabs are kept
    "\x7f-\x9f"  # DEL, and C1, which some terminals treat as escape sequences
    "\xad\u061c\u180e\u200b\u200e\u200f"  # invisible, and marks of direction; joiners belong to words and emoji
    "\u2028-\u202e"  # line and paragraph separators, direction embeddings and overrides
    "\u2060-\u206f\ufeff\ufff9-\ufffb"  # direction isolates, and characters that show nothing
    "\ud800-\udfff"  # unpaired surrogates, which cannot be encoded
    "\U000e0000-\U000e007f"  # tags
    "]"
)


def visible(text: str) -> str:
    r"""``text`` with its control, bidirectional and invisible characters escaped: ``\x1b``, ``\u202e``."""
    return HIDDEN.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def visible_json(value: object, *, indent: int | None = 2) -> str:
    """A JSON document with unchanged strings, in which nothing can act as a command."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return HIDDEN.sub(lambda found: json.dumps(found.group())[1:-1], text)
