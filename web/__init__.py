"""What every HTTP face shares: the server, the gateway, and the engines that answer HTTP.

A request comes in over ``http_protocol``, the one module that knows uvicorn's inside: it reads one request at a time,
within bounds on what a client sends, and how long it keeps the server waiting (``connection_limits``). On it goes as
ASGI. ``bodies`` reads its body, for the routes of a framework too: the body waits for room among all bodies that are in
memory, and one that is too long is refused (413); ``decompression`` gives what a compressed one holds.
``request_models`` makes a checked object of its JSON, or an error that names the first wrong field. Where nobody is
asked for a key, ``browser_guard`` refuses what a browser sends for pages of other sites. What goes out is made in
``replies``: JSON at once, a large body in chunks while it is made, and the one form of every error. ``serving`` binds
ports and serves an application on one from a running loop.

Nothing here knows what a run or a sample is. The hot ways through ``bodies`` and ``replies`` use no framework: a write
of 4 KB spends more time in one than in its work.
"""
