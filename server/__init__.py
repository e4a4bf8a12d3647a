"""The server process: HTTP routes, runs from start to end, and the command line.

``forebay serve`` (``cli/serve``) binds a port and hands it to ``server_process``, which opens the parts in order
(``app.open_services``), serves them, and closes them in the opposite order: run processes first, the store last.

A request enters through ``app.create_app``. ``auth`` checks the token or a run's key; without a token,
``web/browser_guard`` keeps browsers out. ``routes/sample_routes`` serves the routes that carry samples as plain ASGI;
FastAPI serves the rest, one file of ``routes/`` per resource. Routes use ``services``: the buffer for runs, groups and
batches; ``runs/`` for what starts and stops; ``tracing/`` for where time went; ``engine_pauses`` (with its records,
``engine_pause_records``) for engines whose weights change. ``gateway_process`` keeps the gateway alive, and
``hard_stop`` ends the process if something hangs.

The page under ``/ui/`` is in ``ui``; ``findings`` has its sentences, ``engine_watch`` its engines, ``search`` the texts
that it searches.

Replies are JSON from ``views`` and ``errors``, or a batch. ``direct_send`` sends a large batch from the store straight
to the socket, and breaks off a stalled reply so that its lease ends too.
"""
