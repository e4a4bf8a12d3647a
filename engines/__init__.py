"""Clients of inference servers: pick an engine for each call, administer engines, and read their replies.

Input: the addresses of a run (``remote_engine_url``): SGLang, an SGLang router, vLLM, or any OpenAI-compatible server.

- ``abc.py``: the interface of an engine client. ``openai.py`` and ``sglang.py`` (with a router's workers) implement
  it; ``detect.py`` finds out which of the two an address needs;
- ``dialect.py``: what differs between kinds of engines in a call: its id, its cache key, the fields it is asked with;
- ``pool.py``: the engines of a run. It assigns the least loaded engine to each rollout and waits while none answers;
- ``router_workers.py``: every HTTP call to one server, or one worker of a router, except chats. Built on it:
  ``vllm_admin.py`` (the same for vLLM), ``aborts.py`` (stops calls by a prefix of their ``rid``) and
  ``weight_updates.py`` (pauses all workers, loads weights, resumes);
- ``cache_keys.py``: the cache key of each call, so that the weights behind a logprob are known;
- ``sampling_defaults.py``: the engine's defaults for sampling parameters that a call omits;
- ``connections.py``: one connection per call in flight; ``bounded_replies.py``: limits the size of a reply;
- ``read_json.py``: decodes the JSON of a reply, and raises one kind of error for anything malformed;
- ``chat_template.py`` and ``chat_over_generate.py``: render chats locally, for routers that hide token ids;
- ``capture/``: turns replies into turns, and turns into samples, token by token;
- ``continuation/``: continues generations that an engine aborted;
- ``fake_sglang/``: the HTTP interface of the two embedded engines, ``scripted/`` (a function answers, for tests) and
  ``tiny/`` (a small model on the CPU).

Output: chats with their tokens. Run processes send chats with the ``openai`` package, the gateway sends those of
agents. Nothing here imports ``openai``.
"""
