"""OpenAI's Responses API over chat completions: pure functions between the bodies of the two.

A request comes in as the JSON that the agent sent. ``request.py`` checks it, and notes what it does not know;
``tools.py`` has its tools, and the functions that stand for them in a chat; ``store.py`` puts the items before it that
``previous_response_id`` and item references name; ``to_chat.py`` makes a chat of all: messages, tools, sampling. The
engine's chat goes back through ``from_chat.py`` if it came whole, and through ``stream.py``, chunk by chunk, if it
streams; both keep the response in the store. ``ProtocolRefused`` is raised for what cannot be translated.

``ReplyMemo`` keeps the model's own words of each tool call, so that the next prompt goes on from the tokens that were
sampled, in whatever spelling the client hands the arguments back.
"""
