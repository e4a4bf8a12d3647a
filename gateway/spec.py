"""What the server hands to its gateway process, over inherited descriptors.

The one module of the gateway that the server imports, and so apart from what only the process needs.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO, Self


@dataclass(frozen=True, slots=True)
class GatewaySpec:
    """The settings of a gateway process; it holds a secret, so it goes neither by argv nor by environment."""

    control_key: str
    """Opens the routes by which the server registers runs."""
    url: str
    """Under which the gateway is reached by agents."""
    max_body_bytes: int
    max_bodies_bytes: int
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
            return cls(**json.load(file))
