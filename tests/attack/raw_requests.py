"""Requests as bytes on a socket: with headers that no client would send, and bodies that never come."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

from tests.kit import TIME_LIMIT_S


class RawReply(NamedTuple):
    """What came back."""

    status: int
    body: str


def head(method: str, target: str, *headers: str, version: str = "1.1") -> bytes:
    """A request without its body."""
    return "\r\n".join([f"{method} {target} HTTP/{version}", *headers, "", ""]).encode("latin-1")


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    """A connection to the address of ``url``."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=TIME_LIMIT_S) as opened:
        yield opened


def reply_to(opened: socket.socket, sent: bytes) -> RawReply:
    """Send, and read one reply: the first, whatever it is. Raises ``TimeoutError`` if none comes."""
    opened.sendall(sent)
    with opened.makefile("rb") as stream:
        told = b""
        while (line := stream.readline()) not in (b"\r\n", b""):  # the second where the connection was closed
            told += line
        assert told, "the connection was closed without a reply"
        fields = dict(line.split(b": ", 1) for line in told.lower().splitlines()[1:])
        body = stream.read(int(fields.get(b"content-length", b"0")))
    return RawReply(int(told.split()[1]), body.decode())


def ask_raw(url: str, sent: bytes) -> RawReply:
    """The reply on a connection of its own."""
    with connected(url) as opened:
        return reply_to(opened, sent)
