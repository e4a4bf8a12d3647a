"""What the server sends to its gateway process first.

The one module of the gateway that the server imports, and so apart from what only the process needs.
"""

from dataclasses import dataclass, field
from typing import Any

from forebay.web.connection_limits import ConnectionLimits


@dataclass(frozen=True, slots=True)
class GatewaySpec:
    """The settings of a gateway process; it holds a secret, so it goes neither by argv nor by environment."""

    control_key: str
    """Opens the routes by which the server registers runs."""
    url: str
    """Under which the gateway is reached by agents."""
    max_body_bytes: int
    max_bodies_bytes: int
    max_engine_reply_bytes: int = 64 << 20
    body_room_wait_s: float = 60.0
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    log_level: str = "info"
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Runs that are known from the start, by id: bodies of ``PUT /gateway/runs/{run_id}``."""
