"""Inference servers: which one a call goes to, what is asked of them beside chats, and what their replies say.

In come the addresses of a run (``remote_engine_url``): SGLang, an SGLang router, or any OpenAI-compatible server.

- ``abc.py``: what a client of an engine can do; ``openai.py`` and ``sglang.py`` (with a router's workers) do it, and
  ``detect.py`` finds out which of the two answers at an address;
- ``pool.py``: the engines of a run. It gives each rollout the least loaded one, and waits while none answers;
- ``router_workers.py``: every HTTP call to one server, or worker of a router, beside its chats. On it stand
  ``aborts.py`` (stop calls by the beginning of their ``rid``) and ``weight_updates.py`` (pause all workers, load
  weights, go on);
- ``cache_keys.py``: under which key an engine caches a call, so that the weights behind a logprob are known;
- ``sampling_defaults.py``: what an engine takes for sampling parameters that a call leaves out;
- ``connections.py``: a connection for each call under way; ``bounded_replies.py``: how much comes over it;
- ``read_json.py``: the JSON in a reply, or one kind of error for whatever else an engine may send;
- ``chat_template.py`` and ``chat_over_generate.py``: chats rendered here, for routers that hide token ids;
- ``capture/``: from the replies to turns, and from turns to samples, token by token;
- ``continuation/``: going on with what an engine has aborted;
- ``fake_sglang/``: the HTTP face of the two embedded engines, ``scripted/`` (answers of a function, for tests) and
  ``tiny/`` (a small model on the CPU).

Out go chats with their tokens: run processes send them with the ``openai`` package, the gateway sends those of agents.
Nothing here imports ``openai``.
"""
