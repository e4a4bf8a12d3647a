"""The HTTP interface of SGLang 0.5.23, served by another engine.

Both embedded engines share it: ``scripted`` (a user's function answers) and ``tiny`` (a small model answers). Each is a
``Backend``. Requests and replies are the same for both, and a test suite compares them with the real SGLang.

A request arrives at ``routes.SGLangFace``. ``request_bodies`` parses it; ``requests`` makes a ``PromptCall`` of each
prompt, which the back end encodes and which is checked against the context length. The back end then sends the pieces
of each choice, until all have ended, the client disconnects, or the back end fails. ``reply_bodies`` writes the
choices: one JSON body at the end, or a server-sent event per piece. Aborts, pauses and weight updates go directly to
the back end, which ends or pauses its calls.

- ``backend``: the interface of an engine behind the HTTP interface.
- ``calls``: a prompt and its choices while an engine works on them.
- ``request_bodies``, ``reply_bodies``: request formats and reply formats.
- ``requests``: one request from its body through its calls to its reply.
- ``routes``: the application; ``administration``: the routes that bypass ``requests``.
"""
