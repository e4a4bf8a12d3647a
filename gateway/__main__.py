"""``python -m forebay.gateway SOCKET_FD``, started as a child: the gateway as a process of its own."""

import asyncio
import logging
import math
import os
import signal
import socket
import sys
from types import FrameType

import uvicorn
import uvloop

from forebay.core.child_process import close_to_others
from forebay.core.processes.parent_link import ParentLink
from forebay.engines.bounded_replies import LIMIT_VARIABLE
from forebay.gateway.app import create_gateway
from forebay.gateway.spec import GatewaySpec
from forebay.telemetry.log import set_up_logging
from forebay.web.http_protocol import http_protocol

GRACE_S = 2
"""Seconds for calls in flight once the server ends."""


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ended by the server, it ended well: uvicorn would raise the signal once more."""
        if sig == signal.SIGTERM:
            self.should_exit = True
        else:
            super().handle_exit(sig, frame)


def main(arguments: list[str]) -> None:
    """Serve on the inherited socket until SIGTERM, or until the server is gone."""
    close_to_others()  # the keys of all runs are in our memory
    spec = ParentLink[GatewaySpec](arguments, GatewaySpec).receive()
    os.environ[LIMIT_VARIABLE] = str(spec.max_engine_reply_bytes)
    set_up_logging(spec.log_level)
    # Its lines go to the server's log: "application startup complete" would be taken for the server's own.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    listening = socket.socket(fileno=int(arguments[0]))
    config = uvicorn.Config(
        create_gateway(spec),
        log_config=None,
        access_log=False,
        http=http_protocol(spec.connections),
        ws="none",
        lifespan="on",
        # An agent gets the headers of its engine's reply, and those only.
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=math.ceil(spec.connections.idle_timeout_s),
        timeout_graceful_shutdown=GRACE_S,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_Server(config).serve(sockets=[listening]))


if __name__ == "__main__":
    main(sys.argv[1:])
