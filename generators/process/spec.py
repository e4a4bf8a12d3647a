"""Messages between the supervisor and a run process."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class RunSpec:
    """The module to load from the run's copy, and the payload for ``run_rollout``, which may contain secrets."""

    module_path: str
    original_folder: str
    payload: dict[str, Any]
    max_engine_reply_bytes: int = 64 << 20
    trace: dict[str, Any] | None = None
    """Fields of ``TraceSettings``; None disables tracing."""
    earlier_traces: list[str] = field(default_factory=list)
    """Trace folders of earlier runs of the same input, newest first. Some may not exist."""
    workers: list[int] = field(default_factory=list)
    """Number of workers per node. If empty, the run process runs its rollouts itself."""
    backend: str = "processes"
    worker_silence_s: float = 10.0
    ray_address: str = ""
    ray_namespace: str = ""

    def encode(self) -> bytes:
        """Encode as JSON. Raises TypeError if the payload is not JSON."""
        # Not msgpack, because a payload may contain integers of any size and lone surrogates.
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, encoded: bytes) -> "RunSpec":
        """Decode the output of ``encode``."""
        return cls(**json.loads(encoded))


class ReportPart(msgspec.Struct, omit_defaults=True):
    """Report of a run process: first its ``os_session``, later the return of ``run_rollout`` or its error."""

    os_session: int = 0
    """OS session of the run process and its children."""
    is_returned: bool = False
    error: str = ""
    traceback: str = ""
    is_invalid_input: bool = False
    """Whether the error is an ``InvalidInput``, which would come again."""


@dataclass(frozen=True, slots=True)
class Report:
    """How a run process ended. ``exit_code`` is negative for a signal, as in ``subprocess``."""

    is_returned: bool
    error: str
    traceback: str
    exit_code: int
    is_invalid_input: bool = False
