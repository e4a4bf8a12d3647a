"""The first message from the server to its gateway process.

The server imports only this module of the gateway, so it must not import what only the gateway process needs.
"""

from dataclasses import dataclass, field
from typing import Any

from forebay.telemetry.log import LogFormat
from forebay.web.connection_limits import ConnectionLimits


@dataclass(frozen=True, slots=True)
class GatewaySpec:
    """The settings of a gateway process. They contain a secret, so they are passed by neither argv nor environment."""

    control_key: str
    """Key for the routes with which the server registers runs."""
    url: str
    """Address at which agents reach the gateway."""
    max_body_bytes: int
    max_bodies_bytes: int
    max_engine_reply_bytes: int = 64 << 20
    body_room_wait_s: float = 60.0
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    log_level: str = "info"
    log_format: LogFormat = "text"
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Initially known runs, by id: bodies of ``PUT /gateway/runs/{run_id}``."""
