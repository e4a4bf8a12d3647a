"""OpenAI's Responses API over chat completions: pure functions between the bodies of the two.

``request.py`` validates the agent's JSON and notes unknown features. ``tools.py`` maps its tools to functions of a
chat; ``store.py`` prepends the items named by ``previous_response_id`` and item references; ``to_chat.py`` translates
messages, tools and sampling to a chat. ``from_chat.py`` translates the engine's whole reply, ``stream.py`` a stream
chunk by chunk; both keep the response in the store. ``ProtocolRefused`` is raised for what cannot be translated.

``ReplyMemo`` keeps the original text of each tool call, so that the next prompt continues the sampled tokens, however
the client formats the arguments.
"""
