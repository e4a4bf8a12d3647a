"""The gateway: its own process, through which agents of any framework reach the engines and are recorded.

The server starts it (``__main__.py``, and sends it a ``spec.py``) and registers runs at it; a run
opens rollouts (``control_routes.py``, with the bodies of ``request_bodies.py``); an agent calls with a rollout's key
(``agent_routes.py``). ``app.py`` puts the routes together, ``runs/`` holds who may call and what is known of each run
and rollout.

The way of a chat:

1. ``agent_routes.py`` finds run and rollout by the key, reads the body as an engine would (``lenient_json.py``), and
   has ``dialects/`` make a chat completion of it, if the agent speaks another protocol.
2. ``asgi_calls.py`` makes the call while the agent is connected, and ends it when the agent goes away.
3. ``calls.py`` asks the engine that the rollout stays with (``engine_http.py``), another time if the connection breaks,
   and goes on with what an engine aborts; ``streaming.py`` does so for streams, in a task of their own.
4. ``recording.py`` adds to the request what makes SGLang tell its tokens, makes turns of the answer, and takes out of
   the answer what the agent did not ask for.
5. The turns go to the rollout's session (``runs/sessions.py``), the answer goes back through the dialect.

Completions of a text, and embeddings, are passed on without a record (``unrecorded.py``). What is large is read in a
thread (``off_loop.py``).

Out come the records: with the answer to a rollout's ``close``, or, for generators that know nothing of the gateway, in
the samples that they write through it (``runs/captured_run.py``). Errors of the gateway itself are in ``refusals.py``;
those of engines are passed on.
"""
