"""The embedded CPU engine: a Hugging Face causal language model behind SGLang's wire, for a demo or a laptop.

``server.serve`` runs it; ``python -m forebay.engines.tiny`` is the same from a shell. It needs the extra ``local``.

A request comes in at the face (``fake_sglang``), which asks ``TinyEngine`` for the tokens of its prompts and submits
them as calls. The generation thread takes calls between two steps: it reads their prompts, joins their choices to the
rows in flight, and decodes all rows together, one token each a step. What a row has grown by goes back to the event
loop as a piece, which the face writes out. Aborts, pauses and new weights are messages to the thread, too.

- ``server``: the process: its address, its signals, the ready line.
- ``engine``: the face's back end; chats as the model's template takes them, and what is not served.
- ``generation_thread``, ``backlog``: the loop of steps and how busy it is, and what waits to enter it.
- ``batch``, ``rows``: the cache of all rows, and drawing their tokens; one choice, its tokens and its text.
- ``model``, ``recipe``: the built-in model, made and warmed up on the spot, and loading it or another.
- ``extra``: torch and transformers, imported when they are first needed.
"""
