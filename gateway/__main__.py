"""``python -m forebay.gateway SOCKET_FD``, started as a child process: the gateway as its own process."""

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
"""Seconds that calls in flight have to finish when the server ends."""


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Exit normally on the server's SIGTERM; uvicorn would raise the signal again."""
        if sig == signal.SIGTERM:
            self.should_exit = True
        else:
            super().handle_exit(sig, frame)


def main(arguments: list[str]) -> None:
    """Serve on the inherited socket until SIGTERM, or until the server is gone."""
    close_to_others()  # this process holds the keys of all runs in memory
    spec = ParentLink[GatewaySpec](arguments, GatewaySpec).receive()
    os.environ[LIMIT_VARIABLE] = str(spec.max_engine_reply_bytes)
    set_up_logging(spec.log_level, spec.log_format)
    # Hidden, because the server's log would show "application startup complete" as if the server had logged it.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    listening = socket.socket(fileno=int(arguments[0]))
    config = uvicorn.Config(
        create_gateway(spec),
        log_config=None,
        access_log=False,
        http=http_protocol(spec.connections),
        ws="none",
        lifespan="on",
        # An agent gets only the headers of its engine's reply.
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
