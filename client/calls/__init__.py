"""The HTTP client for Forebay's server: calls, retries and connections.

A process opens one transport per server address, which may have a path (``http://host/w/KEY``), and token::

    transport = AsyncTransport("http://127.0.0.1:8889/w/KEY")      # Transport is the blocking one
    call = json_call("POST", "progress", {"opened": []})           # or Call(method, path, body, headers, query=...)

    reply = await transport.ask(call)                              # once: a ServerReply of any status, or Lost
    reply = await transport.run(answered(call, 120.0))             # retry while the server is unreachable or busy
    reply = await transport.run(answered(call, ENDLESS_S, BUSY))    # retry without end, on statuses of your own
    body = decoded(reply, call)                                    # the JSON object; raises the server's error

A long poll states in its query or body how long the server may wait, and adds that time to ``timeout_s``.

``flow.py`` has no I/O. An exchange of several calls is written once as a generator, a *flow*, that yields ``Call``,
``Pause`` and ``Work`` and includes other flows with ``yield from``. ``transport.py`` runs flows in the
foreground or in the background (``Background``), blocking; ``async_transport.py`` runs them awaited. ``cutting.py``
interrupts calls when a client is closed while other threads wait in it.
"""
