"""What the supervisor hands to a run process, and what comes back."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Which module to load, from the run's own copy, and the payload for ``run_rollout``; it may hold secrets."""

    module_path: str
    original_folder: str
    payload: dict[str, Any]
    max_engine_reply_bytes: int = 64 << 20
    trace: dict[str, Any] | None = None
    """``TraceSettings`` by name; None records nothing."""
    earlier_traces: list[str] = field(default_factory=list)
    """Folders with the traces of earlier runs of the same input, newest first; not all of them need be there."""
    workers: list[int] = field(default_factory=list)
    """How many workers each node has; without any, the run process runs its rollouts itself."""
    backend: str = "processes"
    worker_silence_s: float = 10.0
    ray_address: str = ""
    ray_namespace: str = ""

    def encode(self) -> bytes:
        """As JSON. Raises TypeError if the payload is not."""
        # Not as msgpack: a payload may hold whole numbers of any size, and half of a surrogate pair.
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, encoded: bytes) -> "RunSpec":
        """From what ``encode`` made."""
        return cls(**json.loads(encoded))


class ReportPart(msgspec.Struct, omit_defaults=True):
    """What a run process says of itself: its ``os_session`` first, then that ``run_rollout`` returned, or its error."""

    os_session: int = 0
    """Of the run process and what it started."""
    is_returned: bool = False
    error: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """How a run process ended. ``exit_code`` is negative for a signal, as in ``subprocess``."""

    is_returned: bool
    error: str
    traceback: str
    exit_code: int
