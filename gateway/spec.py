"""What the server hands to its gateway process, over inherited descriptors.

The one module of the gateway that the server imports, and so apart from what only the process needs.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO, Self

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

    def write(self, file: BinaryIO) -> None:
        """Write the spec for a child that inherits ``file``."""
        file.write(json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, descriptor: int) -> Self:
        """Read what ``write`` wrote, and close the descriptor."""
        with os.fdopen(descriptor, "rb") as file:
            file.seek(0)  # parent and child share the position, which is behind what the parent wrote
            spec = json.load(file)
        return cls(**spec | {"connections": ConnectionLimits(**spec["connections"])})
