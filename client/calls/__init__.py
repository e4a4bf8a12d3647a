"""The HTTP client of our own server: what a call is, when it is made again, and the connections it goes over.

A process opens one transport for an address, which may have a path (``http://host/w/KEY``), and a token::

    transport = AsyncTransport("http://127.0.0.1:8889/w/KEY")      # Transport is the same, blocking
    call = json_call("POST", "progress", {"opened": []})           # or Call(method, path, body, headers, query=...)

    reply = await transport.ask(call)                              # once: a ServerReply of any status, or Lost
    reply = await transport.run(answered(call, 120.0))             # again while nobody answers or the server is busy
    reply = await transport.run(answered(call, ENDLESS_S, BUSY))    # without end, and for statuses of your own
    body = decoded(reply, call)                                    # its JSON object; raises what the server said

A long poll says in its query or body how long the server may wait, and gives ``timeout_s`` as much more than that.

``flow.py`` has no I/O. What takes several calls is written once as a generator, a *flow*, that yields ``Call``,
``Pause`` and ``Work`` and uses others with ``yield from``; ``transport.py`` runs it, blocking or awaited, in the
foreground or (``Background``) beside the caller. ``cutting.py`` breaks off calls from outside, when a client is closed
that others wait in.
"""
