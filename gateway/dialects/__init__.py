"""The protocols of agents: OpenAI's chat completions unchanged, and two others translated to and from them.

``dialect.py`` has a class for each protocol, which ``agent_routes.py`` chooses by path. Its ``to_chat`` returns the
chat to request, ``reply`` or ``stream`` the answer in the agent's protocol, ``error`` an error in its format.
``CrossCallState`` holds state that the calls of one rollout share.

``anthropic/`` and ``responses/`` are the two translations, pure functions between bodies. Shared modules:
``history.py`` (engine-specific fields, and the model's original text in a returned history), ``chunks.py`` (reading
chat chunks), ``unknown.py`` (request features without an equivalent in a chat), ``errors.py`` (error formats).

No library is used, because translation libraries drop token ids and re-encode the arguments of tool calls.
"""
