"""Anthropic's Messages API over chat completions: pure functions between the bodies of the two.

A request comes in as the JSON that the agent sent. ``request.py`` checks it, and notes what it does not know;
``to_chat.py`` makes a chat of it: messages, tool results, tools, sampling. The engine's chat goes back through
``from_chat.py`` if it came whole, and through ``stream.py``, chunk by chunk, if it streams. ``MessagesRefused`` is
raised for what cannot be translated: its status and body are the reply.

``ReplyMemo`` keeps the model's own words of each tool call: the client hands arguments back as an object, and the next
prompt must go on from the tokens that were sampled, not from another spelling of them.
"""

from forebay.gateway.dialects.anthropic.from_chat import from_chat, from_models, from_tokenize
from forebay.gateway.dialects.anthropic.stream import MessagesStream
from forebay.gateway.dialects.anthropic.to_chat import to_chat, to_tokenize
from forebay.gateway.dialects.errors import MessagesRefused, messages_error
from forebay.gateway.dialects.history import ReplyMemo

__all__ = [
    "MessagesRefused",
    "MessagesStream",
    "ReplyMemo",
    "from_chat",
    "from_models",
    "from_tokenize",
    "messages_error",
    "to_chat",
    "to_tokenize",
]
