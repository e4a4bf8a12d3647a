"""The protocols that agents speak: OpenAI's chat completions as they are, two others translated to them and back.

A call comes in as a JSON body. ``dialect.py`` has a class for each protocol, which ``agent_routes.py`` chooses by the
path: ``to_chat`` gives the chat to ask for, ``reply`` or ``stream`` the answer in the agent's protocol, ``error`` an
error in its words. ``CrossCallState`` is what the calls of one rollout know of each other.

``anthropic/`` and ``responses/`` are the two translations, pure functions between bodies. What both need:
``history.py`` (the engine's own fields, the model's own words in a history that comes back), ``chunks.py`` (reading a
chat's chunks), ``unknown.py`` (what a request has beyond a chat), ``errors.py`` (the words of both for errors).

No library is used for it: those that translate know no token ids, and write the arguments of tool calls anew.
"""
