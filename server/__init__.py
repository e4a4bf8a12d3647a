"""The server process: HTTP routes, runs from start to end, and the command line.

``forebay serve`` (``cli/serve``) binds a port and hands it to ``server_process``, which opens the parts in order
(``app.open_services``), serves them, and closes them in the opposite order: run processes first, the store last.

A request comes in through ``app.create_app``: ``auth`` asks for the token or a run's key (where there is no token,
``web/browser_guard`` keeps browsers out), ``routes/sample_routes`` takes what carries samples as plain ASGI, and
FastAPI takes the rest, one file of ``routes/`` for each resource. Routes reach everything by ``services``: the buffer
for runs, groups and batches; ``runs/`` for what starts and stops; ``tracing/`` for where time went;
``engine_pauses`` (and its records, ``engine_pause_records``) for engines whose weights change. ``gateway_process``
keeps the gateway alive. ``hard_stop`` ends the process where something hangs.

What goes out is JSON made by ``views`` and ``errors``, or a batch. A large batch goes from the store straight to the
socket: ``direct_send``, which has a reply that stands still broken off, so that its lease ends too.
"""
