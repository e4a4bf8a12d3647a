"""The bodies of the gateway's own routes, as the server and its runs send them."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

RolloutId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")]
"""Part of a URL: clients take ``.`` and ``..`` for something else."""
Seconds = Annotated[float, Field(gt=0, le=10_000_000)]


class Capturing(BaseModel):
    """What is needed to record the calls of a generator that knows nothing of the gateway."""

    model_config = ConfigDict(extra="forbid")

    secret: str
    """Stands in the URLs that the generator is given, in place of a key."""
    group_deadline_s: Seconds
    """No call takes longer, and no record is kept longer."""
    input_file: str | None = None
    """The rows, by whose prompts a call is found to belong to an instance."""


class TraceOptions(BaseModel):
    """How the gateway records a run: ``TraceSettings`` by name, as the run's other processes have them."""

    model_config = ConfigDict(extra="forbid")

    folder: str
    run_id: str
    start: Annotated[int, Field(ge=1)] = 1
    """Of the run: each has files of its own."""
    rate: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The share of groups whose spans are kept."""
    max_bytes: Annotated[int, Field(ge=0)] = 256 << 20


class RegisterRun(BaseModel):
    """``PUT /gateway/runs/{run_id}``: the server makes a run known."""

    model_config = ConfigDict(extra="forbid")

    key: str
    """Opens rollouts of this run."""
    engine_urls: Annotated[list[str], Field(min_length=1)]
    buffer_url: str
    """The run's private address at the server."""
    api_key: str | None = None
    model: str | None = None
    policy_models: list[str] | None = None
    capturing: Capturing | None = None
    trace: TraceOptions | None = None
    """Nothing is recorded without."""


class OpenRollout(BaseModel):
    """``POST /gateway/rollouts``."""

    model_config = ConfigDict(extra="forbid")

    rollout_id: RolloutId
    rid_prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,200}$")] | None = None
    deadline_s: Seconds
    sampling_params: dict[str, Any] = {}
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    cap_tokens: Annotated[int, Field(ge=1)] | None = None
    """That all its calls may sample together."""
    engine_url: str | None = None
    """Of the run's engines the one to ask, while it answers and is not overloaded."""
    traceparent: Annotated[str, Field(max_length=200)] | None = None
    """W3C trace context of the attempt that it is part of."""
