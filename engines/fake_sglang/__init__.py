"""SGLang 0.5.23 as its clients see it, over HTTP, with somebody else behind it.

The one face of both embedded engines, ``scripted`` (a user's function answers) and ``tiny`` (a small model does).
Each is a ``Backend``; what clients send and get is the same with both, and a suite of calls compares it with the
real SGLang's.

In comes a request of ``routes.SGLangFace``. ``request_bodies`` reads it, ``requests`` makes a ``PromptCall`` of each
of its prompts: encoded by the back end and checked against its context. It hands the calls to the back end and reads
the pieces in which their choices grow, until all have ended, the client has gone, or the back end has failed. Out goes
what ``reply_bodies`` writes of the choices: one JSON body at the end, or a server-sent event for each piece. Aborts,
pauses and new weights go past all this straight to the back end, which ends or holds its calls.

- ``backend``: what an engine behind the face can do.
- ``calls``: a prompt and its choices on the way through an engine.
- ``request_bodies``, ``reply_bodies``: what clients ask for, and how the reply is written.
- ``requests``: one request from its body by its calls to its reply.
- ``routes``: the application; ``administration``: those that go past all this.
"""
