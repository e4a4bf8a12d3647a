"""The floor: a bare uvicorn app that reads the body. Prints its URL."""

import socket
import sys

import uvicorn
from starlette.types import Receive, Scope, Send

REPLY = b"{}"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Read the body, answer two bytes."""
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(REPLY))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": REPLY})


def main() -> None:
    """Serve on a free port."""
    bound = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"http://127.0.0.1:{bound.getsockname()[1]}\n")
    sys.stdout.flush()
    config = uvicorn.Config(app, log_config=None, access_log=False, loop="uvloop", http="httptools", lifespan="off")
    uvicorn.Server(config).run(sockets=[bound])


if __name__ == "__main__":
    main()
