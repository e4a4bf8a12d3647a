"""Server-sent events, as far as chat completions use them."""

import msgspec

DONE_DATA = b"[DONE]"
DONE = b"data: %b\n\n" % DONE_DATA
STREAM_TYPE = b"text/event-stream"

_encode = msgspec.json.Encoder().encode


def event(data: object) -> bytes:
    """``data`` as one event."""
    return b"data: %b\n\n" % _encode(data)


class EventReader:
    """Cuts a stream of bytes into the data of its events. Comments, names and ids of events are left out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """The data of the events that ``received`` completes."""
        *whole, self._rest = (self._rest + received).replace(b"\r\n", b"\n").split(b"\n\n")
        return [data for block in whole if (data := _data_of(block))]


def _data_of(block: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
