"""Request bodies of the gateway's own routes, sent by the server and its runs."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

RolloutId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")]
"""Part of a URL, so ``.`` and ``..``, which clients resolve, are excluded."""
Seconds = Annotated[float, Field(gt=0, le=10_000_000)]


class Capturing(BaseModel):
    """Settings for recording the calls of a generator that does not know the gateway."""

    model_config = ConfigDict(extra="forbid")

    secret: str
    """Part of the URLs given to the generator, instead of a key."""
    group_deadline_s: Seconds
    """Maximum duration of a call, and maximum age of a record."""
    input_file: str | None = None
    """The rows, whose prompts assign a call to an instance."""


class TraceOptions(BaseModel):
    """How the gateway traces a run: the fields of ``TraceSettings``, as in the run's other processes."""

    model_config = ConfigDict(extra="forbid")

    folder: str
    run_id: str
    start: Annotated[int, Field(ge=1)] = 1
    """Start number of the run; each start has its own files."""
    rate: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Fraction of groups whose spans are kept."""
    max_bytes: Annotated[int, Field(ge=0)] = 256 << 20


class RegisterRun(BaseModel):
    """``PUT /gateway/runs/{run_id}``: the server registers a run."""

    model_config = ConfigDict(extra="forbid")

    key: str
    """Opens rollouts of this run."""
    engine_urls: Annotated[list[str], Field(min_length=1)]
    buffer_url: str
    """The run's private address at the server."""
    api_key: str | None = None
    model: str | None = None
    policy_models: list[str] | None = None
    arrays: list[str] | None = None
    restore_reasoning: bool = False
    capturing: Capturing | None = None
    trace: TraceOptions | None = None
    """None disables tracing."""


class OpenRollout(BaseModel):
    """``POST /gateway/rollouts``."""

    model_config = ConfigDict(extra="forbid")

    rollout_id: RolloutId
    rid_prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,200}$")] | None = None
    deadline_s: Seconds
    sampling_params: dict[str, Any] = {}
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    cap_tokens: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of tokens that all its calls may sample together."""
    engine_url: str | None = None
    """The preferred engine of the run, used while it answers and is not overloaded."""
    traceparent: Annotated[str, Field(max_length=200)] | None = None
    """W3C trace context of its attempt."""
