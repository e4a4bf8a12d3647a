"""HTTP parts shared by the server, the gateway, and the engines that Forebay serves.

Requests arrive through ``http_protocol``, the one module that depends on uvicorn's internals. It reads one request at a
time, and limits how much a client sends and how long the server waits (``connection_limits``). ``bodies`` reads the
body, also for routes of a framework: a body waits for room among all bodies in memory, and one that is too long is
refused (413). ``decompression`` decompresses it. ``request_models`` parses its JSON into a checked object, or raises an
error that names the first wrong field. If a server requires no key, ``browser_guard`` refuses what browsers send for
pages of other sites. ``replies`` sends JSON at once, a large body in chunks while it is built, and every error in the
same form. ``serving`` binds ports and serves an application from a running event loop.

This package does not depend on runs or samples. The hot paths through ``bodies`` and ``replies`` use no framework,
which would take longer than a 4 KB write itself.
"""

from forebay.core.lazy_names import require_extra

require_extra("server", "starlette")
