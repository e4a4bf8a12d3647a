"""Anthropic's Messages API over chat completions: pure functions between the bodies of the two.

A request comes in as the JSON that the agent sent. ``request.py`` checks it, and notes what it does not know;
``to_chat.py`` makes a chat of it: messages, tool results, tools, sampling. The engine's chat goes back through
``from_chat.py`` if it came whole, and through ``stream.py``, chunk by chunk, if it streams. ``ProtocolRefused`` is
raised for what cannot be translated.

``ReplyMemo`` keeps the model's own words of each tool call: the client hands arguments back as an object, and the next
prompt must go on from the tokens that were sampled, not from another spelling of them.
"""
