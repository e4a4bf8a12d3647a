"""The child's side of ``child_link``: messages to and from the parent over a socket pair.

A message is msgpack after its length (8 bytes, big-endian). The child's output goes elsewhere, so users' code may
print anything. Does not use asyncio, which would be a third of some children's imports.
"""

import os
import socket
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from forebay.core.child_process import die_with_parent

HEADER_BYTES = 8

In = TypeVar("In")


class ParentLink(Generic[In]):
    """The child's end. ``ChildLink.start`` has added the last two of ``arguments``.

    From here on this process dies with its parent. Send and receive from one thread at a time.
    """

    def __init__(self, arguments: Sequence[str], reads: type[In] | Any) -> None:
        descriptor, parent_pid = map(int, arguments[-2:])
        die_with_parent(parent_pid)
        os.set_inheritable(descriptor, False)  # a program that users' code starts must not keep the socket open
        self._sock = socket.socket(fileno=descriptor)
        self._stream = self._sock.makefile("rb")
        self._decode = msgspec.msgpack.Decoder(reads).decode

    def receive(self) -> In:
        """Receive the next message. Raises ``EOFError`` when the parent has closed the socket."""
        header = self._stream.read(HEADER_BYTES)
        length = int.from_bytes(header, "big")
        body = self._stream.read(length)
        if len(header) < HEADER_BYTES or len(body) < length:
            raise EOFError("the parent has closed the socket")
        return self._decode(body)  # type: ignore[no-any-return]

    def send(self, message: object) -> None:
        """Send a message. Raises ``OSError`` when the parent is gone."""
        self._sock.sendall(frame(message))


def frame(message: object) -> bytes:
    """Encode ``message`` for the socket."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "big") + body
