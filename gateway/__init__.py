"""The gateway: a separate process through which agents of any framework reach the engines and are recorded.

The server starts it (``__main__.py``), sends it its settings (``spec.py``) and registers runs; a run opens rollouts
(``control_routes.py``, bodies in ``request_bodies.py``); an agent calls with a rollout's key (``agent_routes.py``).
``app.py`` combines the routes; ``runs/`` holds the keys and the state of each run and rollout.

Steps of a chat:

1. ``agent_routes.py`` finds run and rollout by the key and reads the body as an engine would (``lenient_json.py``). If
   the agent speaks another protocol, ``dialects/`` translates the body to a chat completion.
2. ``asgi_calls.py`` makes the call while the agent is connected, and ends it when the agent disconnects.
3. ``calls.py`` asks the rollout's engine (``engine_http.py``, ``engine_request.py``), retries if the connection breaks,
   and continues what an engine aborts; ``streaming.py`` does so for streams, each in its own task.
4. ``recording.py`` adds the request fields that make SGLang or vLLM return tokens, makes turns of the reply, and
   removes from the reply what the agent did not request.
5. The turns go to the rollout's session (``runs/sessions.py``), the reply goes back through the dialect.

Text completions and embeddings are forwarded without a record (``unrecorded.py``). Large bodies are parsed in a thread
(``off_loop.py``).

Records leave with the reply to a rollout's ``close``. For generators that do not know the gateway, they leave in the
samples that these write through it (``runs/captured_run.py``). ``refusals.py`` has the gateway's own errors; errors of
engines are forwarded.
"""

from forebay.core.lazy_names import require_extra

require_extra("server", "starlette")
