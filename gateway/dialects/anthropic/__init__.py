"""Anthropic's Messages API over chat completions: pure functions between the bodies of the two.

``request.py`` validates the agent's JSON and notes unknown features. ``to_chat.py`` translates it to a chat: messages,
tool results, tools, sampling. ``from_chat.py`` translates the engine's whole reply, ``stream.py`` a stream chunk by
chunk. ``ProtocolRefused`` is raised for what cannot be translated.

``ReplyMemo`` keeps the original text of each tool call: clients return arguments as an object, and the next prompt
must continue the sampled tokens, not another spelling of them.
"""
