"""The embedded CPU engine: a Hugging Face causal language model behind SGLang's HTTP API, for a demo or a laptop.

``server.serve`` runs it; ``python -m forebay.engines.tiny`` does so from a shell. It needs the extra ``local``.

A request arrives at the HTTP interface (``fake_sglang``), which encodes its prompts with ``TinyEngine`` and submits
them as calls. The generation thread admits calls between two steps: it reads their prompts, joins their choices to the
rows in flight, and decodes all rows together, one token per row and step. New tokens return to the event loop as
pieces, which the HTTP interface writes out. Aborts, pauses and weight updates are also messages to the thread.

- ``server``: the process: its address, its signals, the ready line.
- ``engine``: the back end of the HTTP interface; renders chats with the model's template, rejects unserved fields.
- ``generation_thread``, ``backlog``: the loop of steps and its load, and the queue in front of it.
- ``batch``, ``rows``: the cache of all rows and token sampling; one choice, its tokens and its text.
- ``model``, ``recipe``: loads a model; makes and warms up the built-in one.
- ``extra``: torch and transformers, imported when they are first needed.
"""
