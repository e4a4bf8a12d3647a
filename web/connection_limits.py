"""What one client may take of a server, before and while it sends a request: for server, gateway and engines alike, and
what it is told beyond that."""

from dataclasses import dataclass, fields
from typing import Self

from forebay.core.errors import ForebayError


@dataclass(frozen=True)
class ConnectionLimits:
    """The bounds of one connection; a server closes what goes beyond them.

    The server's settings have the same names, and these defaults.
    """

    max_head_bytes: int = 64 << 10
    """Bytes of the first line and the headers of a request."""
    head_timeout_s: float = 10.0
    """Seconds from a request's first byte to the end of its headers."""
    body_timeout_s: float = 30.0
    """Seconds that a body may stand still while the server reads it."""
    idle_timeout_s: float = 75.0
    """Seconds without a request under way, from the first one on also where no byte ever came, or with a reply of which
    the client takes nothing."""

    @classmethod
    def of(cls, settings: object) -> Self:
        """Those of the server's settings, or of anything else that has them as attributes."""
        return cls(**{each.name: getattr(settings, each.name) for each in fields(cls)})


DEFAULT_LIMITS = ConnectionLimits()


class RequestStalled(ForebayError):
    """A client began a request, and then sent nothing of it for too long; the connection is closed."""

    code = "request_stalled"
    status = 408

    def __init__(self, what: str, setting: str) -> None:
        super().__init__(what, hint=f"send it without a pause, or raise {setting} of the server")


class HeadTooLarge(ForebayError):
    """The first line and the headers of a request are over the limit; the connection is closed."""

    code = "head_too_large"
    status = 431

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"the first line and the headers are larger than {limit_bytes} bytes",
            hint="send less in them, or raise max_head_bytes of the server",
        )
