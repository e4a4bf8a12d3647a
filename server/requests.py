"""Request bodies of reads, and of what a trainer says about its batches. Numbers may arrive as strings."""

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from forebay.core.errors import InvalidInput

Model = TypeVar("Model", bound=BaseModel)


def _no_flag(value: object) -> object:
    """Refuse ``true`` and ``false``, which would count as 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "Input should be a number, not true or false")
    return value


NotFlag = BeforeValidator(_no_flag)
Count = Annotated[int, NotFlag, Field(ge=1, le=1 << 53)]
Step = Annotated[int, NotFlag, Field(ge=0, le=1 << 53)]
WaitSeconds = Annotated[float, NotFlag, Field(ge=0)]
LeaseSeconds = Annotated[float, NotFlag, Field(gt=0, le=10_000_000)]


class SlimeRead(BaseModel):
    """``/get_rollout_data`` and ``/buffer/read``. More than there is, however much, is no mistake of slime's client."""

    model_config = ConfigDict(extra="ignore")

    batch_size: Annotated[int, Field(ge=1)] | None = None
    timeout: float = Field(default=0.0, ge=0)
    wait: bool = False

    @property
    def wait_s(self) -> float:
        """Seconds to wait; none unless asked to."""
        return self.timeout if self.wait else 0.0


class BatchRequest(BaseModel):
    """``/v1/runs/{run_id}/batches``."""

    model_config = ConfigDict(extra="forbid")

    num_groups: Count | None = None
    batch_size: Count | None = None
    wait_s: WaitSeconds = 0.0
    lease_s: LeaseSeconds = 600.0
    step: Step | None = None
    max_staleness: Step | None = None
    request_id: str | None = Field(default=None, min_length=1, max_length=200)

    @model_validator(mode="after")
    def _has_one_size(self) -> "BatchRequest":
        if (self.num_groups is None) == (self.batch_size is None):
            raise ValueError("give either num_groups or batch_size")
        return self


class ExtendRequest(BaseModel):
    """``…/batches/{batch_id}/extend``."""

    model_config = ConfigDict(extra="forbid")

    lease_s: LeaseSeconds | None = None


class CheckpointRequest(BaseModel):
    """``…/checkpoints``."""

    model_config = ConfigDict(extra="forbid")

    step: Step
    batch_ids: list[str] | None = None


class RewindRequest(BaseModel):
    """``…/rewind``. The step must be there: null undoes everything."""

    model_config = ConfigDict(extra="forbid")

    step: Step | None


def parse_slime_read(body: bytes) -> SlimeRead:
    """Read the body of a slime read; an empty one asks for everything. Raises ``InvalidInput``."""
    return parse(SlimeRead, body or b"{}")


def parse_batch_request(body: bytes) -> BatchRequest:
    """Read the body of a native read. Raises ``InvalidInput``."""
    return parse(BatchRequest, body or b"{}")


def parse(model: type[Model], body: bytes) -> Model:
    """Read a JSON object into ``model``. Raises ``InvalidInput`` with the first wrong field."""
    try:
        return model.model_validate(parse_object(body))
    except ValidationError as error:
        raise invalid(error) from None


def parse_object(body: bytes) -> dict[str, Any]:
    """Read a JSON object. Raises ``InvalidInput``."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the body is not JSON: {error}", field="body") from None
    if not isinstance(value, dict):
        raise InvalidInput("the body must be a JSON object", field="body")
    return value


def invalid(error: ValidationError) -> InvalidInput:
    """The first complaint of a pydantic error, as ours."""
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"]) or "body"
    return InvalidInput(f"{name}: {first['msg']}"[:500], field=name)
